// The pictures. Each takes what is to be seen and draws it into its svg element.

// Predictions of two predictors against the truth.
function drawScatter(svg, { truth, model, oracle }, kind) {
  const { width, height } = sizeOf(svg, 0.78);
  const most = 1.25 * Math.max(1, ...truth.map(Math.abs), ...oracle.map(Math.abs));
  const [left, right, top, bottom] = [40, width - 10, 8, height - 38];
  const across = scale(-most, most, left, right);
  const up = scale(-most, most, bottom, top);
  const marks = ticks(-most, most);
  const number = (value) => tell(value, Math.abs(value) >= 10 ? 2 : 1);
  const shapes = axisShapes(marks, up, left, right, number);
  for (const value of marks) {
    const x = across(value);
    shapes.push({ tag: "line", class: "grid", x1: x, x2: x, y1: top, y2: bottom });
    shapes.push({ tag: "text", class: "tick middle", x, y: bottom + 15, text: number(value) });
  }
  const ends = { x1: left, y1: bottom, x2: right, y2: top };
  shapes.push({ tag: "line", class: "agree", ...ends });
  const title = { tag: "text", class: "axis middle", x: (left + right) / 2, y: height - 5 };
  shapes.push({ ...title, text: "true value" });
  shapes.push({ tag: "text", class: "axis", x: left + 4, y: top + 10, text: "prediction" });
  truth.forEach((value, i) => {
    const ring = { tag: "circle", class: "oracle ring", r: 4.5 };
    shapes.push({ ...ring, key: `ring${i}`, cx: across(value), cy: up(oracle[i]) });
  });
  let beyond = 0;
  truth.forEach((value, i) => {
    const inside = Math.abs(model[i]) <= most;
    beyond += inside ? 0 : 1;
    const cy = up(Number.isNaN(model[i]) ? most : clamp(model[i], -most, most));
    const look = inside ? "model dot" : "model beyond";
    shapes.push({ tag: "circle", key: `dot${i}`, class: look, r: 3.5, cx: across(value), cy });
  });
  draw(svg, shapes, `Predictions of the ${kind} model and of the ridge against the truth`);
  return beyond;
}

// Weights of the model, the truth and the oracle, side by side for every feature.
function drawBars(svg, { truth, model, oracle }, kind) {
  const { width, height } = sizeOf(svg, 0.78);
  const dim = truth.length;
  const most = 1.2 * Math.max(0.5, ...truth.map(Math.abs), ...oracle.map(Math.abs));
  const [left, right, top, bottom] = [40, width - 4, 8, height - 22];
  const up = scale(-most, most, bottom, top);
  const shapes = axisShapes(ticks(-most, most), up, left, right);
  const group = (right - left) / dim;
  const bar = group * 0.26;
  const sets = { model, truth, oracle };
  for (let j = 0; j < dim; j++) {
    const start = left + group * (j + 0.11);
    Object.entries(sets).forEach(([name, values], k) => {
      const value = Number.isNaN(values[j]) ? 0 : clamp(values[j], -most, most);
      const inside = Math.abs(values[j]) <= most;
      shapes.push({
        tag: "rect",
        key: `${name}${j}`,
        class: `${name} bar${inside ? "" : " beyond"}`,
        x: start + bar * k,
        width: bar - 1,
        y: Math.min(up(value), up(0)),
        height: Math.abs(up(value) - up(0)),
        "data-value": values[j],
      });
    });
    const middle = { tag: "text", class: "tick middle", x: left + group * (j + 0.5) };
    shapes.push({ ...middle, y: height - 5, text: `w${subscript(j + 1)}` });
  }
  shapes.push({ tag: "line", class: "zero", x1: left, x2: right, y1: up(0), y2: up(0) });
  draw(svg, shapes, `Implicit weights of the ${kind} model, of the ridge, and the true ones`);
  return model.filter((value) => !(Math.abs(value) <= most)).length;
}

const subscript = (number) => [...`${number}`].map((digit) => "₀₁₂₃₄₅₆₇₈₉"[digit]).join("");

// Losses after every layer, on a logarithmic axis, beside those of the closed forms.
function drawLines(svg, { losses, flat, layer }, kind) {
  const { width, height } = sizeOf(svg, 0.7);
  const [left, right, top, bottom] = [52, width - 12, 22, height - 38];
  const [low, high] = decades(losses, flat);
  const up = (value) => {
    const log = Math.log10(Math.max(value, 1e-300));
    return clamp(scale(low, high, bottom, top)(log), top, bottom);
  };
  const across = scale(0, Math.max(1, losses.length - 1), left + 10, right - 10);
  const shapes = axisShapes(logTicks(low, high), up, left, right);
  const here = { x1: across(layer), x2: across(layer), y1: top, y2: bottom };
  shapes.push({ tag: "line", key: "here", class: "here", ...here });
  for (const [name, value] of Object.entries(flat)) {
    const line = { x1: left, x2: right, y1: up(value), y2: up(value) };
    shapes.push({ tag: "line", key: name, class: `${name} line`, ...line, "data-value": value });
  }
  const finite = losses.map((loss) => (Number.isFinite(loss) ? loss : Infinity));
  const points = finite.map((loss, l) => `${across(l)},${up(loss)}`).join(" ");
  shapes.push({ tag: "polyline", key: "path", class: "model line", points });
  finite.forEach((loss, l) => {
    const look = `model dot${l === layer ? " current" : ""}`;
    const place = { cx: across(l), cy: up(loss), r: l === layer ? 6 : 4 };
    shapes.push({ tag: "circle", key: `dot${l}`, class: look, ...place, "data-value": losses[l] });
    const x = across(l);
    shapes.push({ tag: "text", class: "tick middle", x, y: bottom + 15, text: `${l}` });
  });
  const title = { tag: "text", class: "axis middle", x: (left + right) / 2, y: height - 5 };
  shapes.push({ ...title, text: "layers" });
  shapes.push({ tag: "text", class: "axis", x: left, y: 12, text: "loss" });
  draw(svg, shapes, `Loss of the ${kind} model after each layer, beside closed forms`);
  const all = [...finite, ...Object.values(flat)].map(Math.log10);
  return { above: Math.max(...all) > high, below: Math.min(...all) < low };
}

// The powers of ten between which losses are shown. What explodes does not move the axis far, nor
// does a ridge that is exact where there is no noise.
function decades(losses, flat) {
  const shown = (values) => values.filter((value) => value > 0 && value < 20 * losses[0]);
  const all = shown([...losses, ...Object.values(flat)]);
  const least = Math.min(...shown([...losses, flat.constant]));
  const lowest = Math.max(Math.min(...all), least / 30, 1e-16);
  return [Math.log10(lowest) - 0.12, Math.log10(1.4 * Math.max(...all))];
}

function logTicks(low, high) {
  const span = high - low;
  const fine = span > 0.8 ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 8];
  const steps = span > 5 ? [1] : span > 1.6 ? [1, 3] : fine;
  const every = Math.ceil(span / 7);
  const found = [];
  for (let power = Math.floor(low); power <= high; power++) {
    if (power % every) continue;
    for (const step of steps) {
      const log = power + Math.log10(step);
      if (log >= low && log <= high) found.push(step * 10 ** power);
    }
  }
  return found;
}

// A matrix as a table of coloured cells; blue is negative, orange positive.
function drawMatrix(name, matrix, layer) {
  const table = byId(`matrix-${name}`);
  if (table.rows.length !== matrix.length + 1) buildMatrix(table, name, matrix.length);
  const most = Math.max(...matrix.flatMap((row) => [...row].map(Math.abs)), 1e-300);
  matrix.forEach((row, i) => {
    row.forEach((value, j) => {
      const cell = table.rows[i + 1].cells[j + 1];
      const share = 100 * Math.sqrt(Math.abs(value) / most);
      const end = value < 0 ? "var(--minus)" : "var(--plus)";
      cell.style.backgroundColor = `color-mix(in oklab, ${end} ${share}%, var(--none))`;
      cell.dataset.value = value;
      cell.setAttribute("aria-label", `${name}, ${entryName(i, j, matrix.length)}: ${tell(value)}`);
    });
  });
  table.dataset.rest = `${name} of layer ${layer}: from ${tell(-most)} to ${tell(most)}`;
  readCell(table, table.querySelector("td:focus, td:hover"));
}

const coordinate = (i, size) => (i === size - 1 ? "y" : `x${subscript(i + 1)}`);
const entryName = (i, j, size) => `row ${coordinate(i, size)}, column ${coordinate(j, size)}`;

function buildMatrix(table, name, size) {
  const labels = Array.from({ length: size }, (_, i) => coordinate(i, size));
  const head = newElement("tr", {}, newElement("td", { class: "corner" }, name));
  head.append(...labels.map((label) => newElement("th", { scope: "col" }, label)));
  const rows = labels.map((label) => {
    const row = newElement("tr", {}, newElement("th", { scope: "row" }, label));
    row.append(...labels.map(() => newElement("td", { tabindex: "-1" })));
    return row;
  });
  table.replaceChildren(head, ...rows);
  table.rows[1].cells[1].tabIndex = 0;
  for (const type of ["mouseover", "focusin", "mouseout", "focusout"]) {
    table.addEventListener(type, ({ target }) => {
      readCell(table, type.endsWith("out") ? table.querySelector("td:focus") : target);
    });
  }
  table.addEventListener("keydown", moveInMatrix);
}

// Writes the entry under the pointer below the matrix, or the range of all entries.
function readCell(table, cell) {
  const text = cell?.dataset?.value === undefined ? table.dataset.rest : cell.ariaLabel;
  setText(`${table.id}-text`, text);
}

// Arrow keys go from entry to entry; the table is one stop of the tab key.
function moveInMatrix(event) {
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const step = steps[event.key];
  const cell = event.target;
  if (!step || cell.tagName !== "TD") return;
  event.preventDefault();
  const { rows } = event.currentTarget;
  const row = clamp(cell.parentElement.rowIndex + step[0], 1, rows.length - 1);
  const next = rows[row].cells[clamp(cell.cellIndex + step[1], 1, rows.length - 1)];
  cell.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// The four numbers of a layer, each with its values in all layers.
function drawOmegas(layers, current) {
  for (const [name, text] of Object.entries(OMEGAS)) {
    if (!byId(`omega-${name}`)) byId("cards").append(newCard(name, text));
    const values = layers.map(({ omegas }) => omegas[name]);
    setText(`omega-${name}`, tell(values[current - 1]));
    setText(`omega-${name}-note`, values.some(Boolean) ? "" : " It is 0 in every layer of this kind.");
    const svg = byId(`history-${name}`);
    const [width, height] = [24 * values.length, 44];
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("width", width);
    const most = Math.max(...values.map(Math.abs), 1e-300);
    const up = scale(-most, most, height - 2, 2);
    const bars = values.map((value, l) => ({
      tag: "rect",
      class: `history${l === current - 1 ? " current" : ""}`,
      x: 24 * l + 3,
      width: 18,
      y: Math.min(up(value), up(0)),
      height: Math.abs(up(value) - up(0)),
    }));
    const zero = { tag: "line", class: "zero", x1: 0, x2: width, y1: up(0), y2: up(0) };
    draw(svg, [...bars, zero], `In layers 1 to ${values.length}: ${values.map((v) => tell(v))}`);
  }
}

const OMEGAS = {
  yx: "Gradient descent: a negative value moves the weights down the gradient of the squared error.",
  xx: "Preconditioner strength: a negative value damps the directions in which features vary much.",
  xy: "Step size that adapts to noise: labels enter the features, and noise changes later steps.",
  yy: "Rescaling that adapts to noise: a negative value shrinks the weights, the more the larger λ.",
};

function newCard(name, text) {
  const label = newElement("h3", {}, "w", newElement("sub", {}, name));
  const value = newElement("output", { id: `omega-${name}` });
  const svg = byId("bars").cloneNode(false);
  svg.setAttribute("id", `history-${name}`);
  svg.setAttribute("height", 44);
  const note = newElement("span", { id: `omega-${name}-note` });
  return newElement("div", { class: "card" }, label, value, svg, newElement("p", {}, text, note));
}
