// Drawing: elements are kept from one picture to the next, so that style can let them move.

const byId = (id) => document.getElementById(id);

function setText(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

function newElement(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Makes the shapes {key, tag, text, …attributes} the content of an svg element.
function draw(svg, shapes, label) {
  svg.setAttribute("aria-label", label);
  const old = svg.shapes ?? new Map();
  svg.shapes = new Map();
  shapes.forEach(({ key, tag, text, ...attributes }, place) => {
    const name = key ?? `${tag}${place}`;
    const element = old.get(name) ?? document.createElementNS(svg.namespaceURI, tag);
    for (const [attribute, value] of Object.entries(attributes)) {
      if (element.getAttribute(attribute) !== `${value}`) element.setAttribute(attribute, value);
    }
    if (text !== undefined && element.textContent !== text) element.textContent = text;
    if (svg.childNodes[place] !== element) svg.insertBefore(element, svg.childNodes[place] ?? null);
    svg.shapes.set(name, element);
    old.delete(name);
  });
  for (const element of old.values()) element.remove();
}

// The size of a picture in pixels, so that its letters are as large as those around it.
function sizeOf(svg, shape) {
  const width = Math.max(200, svg.parentElement.clientWidth);
  const height = Math.round(Math.min(shape * width, 340));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  return { width, height };
}

const scale = (from, to, start, end) => (value) =>
  start + ((value - from) / (to - from)) * (end - start);

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// A number for readers: three digits, powers of ten where it is very small or large.
function tell(value, digits = 3) {
  if (value === 0) return "0";
  if (!Number.isFinite(value)) return "not finite";
  const size = Math.abs(value);
  const plain = size >= 10 ** digits ? value.toFixed(0) : value.toPrecision(digits);
  const text = size >= 1e-3 && size < 1e4 ? plain : value.toExponential(digits - 1);
  return text.replace("e+", "e").replaceAll("-", "−");
}

// Round numbers from low to high, four or so.
function ticks(low, high) {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough);
  const first = Math.ceil(low / step);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, i) => (first + i) * step);
}

// Lines and numbers of an upward axis.
function axisShapes(values, place, left, right, label = (value) => tell(value, 1)) {
  return values.flatMap((value) => [
    { tag: "line", class: "grid", x1: left, x2: right, y1: place(value), y2: place(value) },
    { tag: "text", class: "tick end", x: left - 6, y: place(value) + 4, text: label(value) },
  ]);
}
