// What is chosen, what follows from it, and the controls.

const data = JSON.parse(byId("data").textContent);
const KINDS = { full: "FULL", diag: "DIAG", "gd++": "GD++" };
const HINTS = {
  full: "P and Q are any matrices.",
  diag: "P and Q are diagonal: four numbers a layer.",
  "gd++": "Diagonal, and labels are not compared: two numbers a layer. It cannot adapt to noise.",
};
const LONGEST = 2 * data.context;
const QUERIES = 40;
const MANY = 200;

const noises = Object.fromEntries(
  Object.entries(data.noises).map(([name, noise]) => {
    const nodes = { points: decode(noise.points, 8), weights: decode(noise.weights, 8) };
    return [name, { ...noise, ...nodes }];
  }),
);
const models = data.models.map((model) => readModel(model, data.dim));
const shared = data.prompts.map((text) => readPrompt(text, data.dim, LONGEST, QUERIES));
const many = Array.from({ length: MANY }, (_, k) => drawPrompt(1e6 + k, data.dim, LONGEST, 1));

const state = { kind: "", layers: 0, noise: "", sigma: 1, examples: data.context, layer: 0 };
Object.assign(state, { prompt: { shared: 0 }, seed: 0, scope: "many" });

const nameOf = ({ kind, layers, noise }) => `${kind}-${layers}-${noise}`;
const current = () => models.find((model) => nameOf(model) === nameOf(state));

// The prompt that is shown, and tokens and Gram matrix of any prompt at this σ and n.
function promptNow() {
  if ("shared" in state.prompt) return shared[state.prompt.shared];
  return drawPrompt(state.prompt.seed, data.dim, LONGEST, QUERIES);
}

const gramNow = (prompt) => gramOf(tokensOf(prompt, state.sigma, state.examples));

// Changes what is chosen. What does not exist gives way to the nearest that does.
function choose(change) {
  const before = nameOf(state);
  const wasLast = state.layer === state.layers;
  Object.assign(state, change);
  const fitting = (...keys) => models.filter((m) => keys.every((key) => m[key] === state[key]));
  if (!fitting("noise").length) state.noise = models[0].noise;
  const kinds = fitting("noise").map((model) => model.kind);
  if (!kinds.includes(state.kind)) state.kind = Object.keys(KINDS).find((k) => kinds.includes(k));
  const depths = fitting("noise", "kind").map((model) => model.layers);
  const far = (layers) => Math.abs(layers - state.layers);
  state.layers = depths.reduce((best, layers) => (far(layers) < far(best) ? layers : best));
  if (nameOf(state) !== before && wasLast) state.layer = state.layers;
  state.layer = clamp(state.layer, 0, state.layers);
  state.sigma = clamp(state.sigma, 0, largestSigma());
  schedule();
}

const largestSigma = () => Math.max(1, Math.ceil(1.5 * noises[state.noise].largest));

// Many changes between two pictures are drawn once.
let waiting = 0;
function schedule() {
  waiting ||= requestAnimationFrame(() => {
    waiting = 0;
    render();
  });
}

function render() {
  const model = current();
  document.documentElement.dataset.kind = model.kind;
  renderControls(model);
  renderPrompt(model);
  const layer = Math.max(1, state.layer);
  const next = state.layer === 0 ? ", the next one" : "";
  setText("matrices-name", `Matrices of layer ${layer}${next}`);
  drawMatrix("Q", model.matrices[layer - 1].Q, layer);
  drawMatrix("P", model.matrices[layer - 1].P, layer);
  byId("omegas").hidden = model.kind === "full";
  if (model.kind !== "full") {
    setText("omegas-name", `Four numbers of layer ${layer}${next}`);
    drawOmegas(model.matrices, layer);
  }
}

// Everything that depends on the prompts.
function renderPrompt(model) {
  const kind = KINDS[model.kind];
  const prompt = promptNow();
  const gram = gramNow(prompt);
  const weights = implicitWeights(model, gram);
  const rivals = baselinesOf(gram, state.examples, state.sigma, noises[state.noise]);
  const shown = { model: [...weights[state.layer]], oracle: [...rivals.oracle] };
  renderScatter(prompt, shown, kind);
  const truth = [...prompt.weights];
  const beyond = drawBars(byId("bars"), { ...shown, truth }, kind);
  const far = (w) => Math.sqrt(2 * lossOf(w, truth));
  const cut = beyond ? ` ${beyond} of the bars are cut off.` : "";
  setText(
    "bars-text",
    `Distance to w: ${tell(far(shown.model))} (ridge ${tell(far(shown.oracle))}).${cut}`,
  );
  const one = { losses: weights.map((w) => lossOf(w, truth)), flat: {} };
  for (const [name, w] of Object.entries(rivals)) one.flat[name] = lossOf(w, truth);
  renderLosses(state.scope === "many" ? lossesOfMany(model) : one, kind);
}

function renderScatter(prompt, { model, oracle }, kind) {
  const of = (w) => prompt.queries.map((x) => dot(w, x));
  const seen = { truth: of(prompt.weights), model: of(model), oracle: of(oracle) };
  const beyond = drawScatter(byId("scatter"), seen, kind);
  const error = (values) => {
    return Math.hypot(...values.map((v, i) => v - seen.truth[i])) / Math.sqrt(values.length);
  };
  const cut = beyond ? ` ${beyond} of the predictions are beyond the frame.` : "";
  setText(
    "scatter-text",
    `Root mean squared error: ${tell(error(seen.model))} (ridge ${tell(error(seen.oracle))}).${cut}`,
  );
}

// Mean losses over prompts that are the same for all models; kept until something changes.
let kept = {};
function lossesOfMany(model) {
  const key = `${nameOf(model)} ${state.sigma} ${state.examples}`;
  if (kept.key === key) return kept.means;
  const means = { losses: new Array(model.layers + 1).fill(0), flat: {} };
  for (const prompt of many) {
    const gram = gramNow(prompt);
    implicitWeights(model, gram).forEach((w, l) => {
      means.losses[l] += lossOf(w, prompt.weights) / MANY;
    });
    const rivals = baselinesOf(gram, state.examples, state.sigma, noises[state.noise]);
    for (const [name, w] of Object.entries(rivals)) {
      means.flat[name] = (means.flat[name] ?? 0) + lossOf(w, prompt.weights) / MANY;
    }
  }
  kept = { key, means };
  return means;
}

function renderLosses(seen, kind) {
  const edge = drawLines(byId("lines"), { ...seen, layer: state.layer }, kind);
  const { oracle, bayes: mixed, constant } = seen.flat;
  const loss = tell(seen.losses[state.layer]);
  setText(
    "losses",
    `Loss ${loss}; ridge that knows σ ${tell(oracle)}, Bayes ${tell(mixed)}, ` +
      `one variance for all ${tell(constant)}`,
  );
  const square = tell(noises[state.noise].mean_square);
  setText(
    "lines-text",
    (edge.above ? "What lies on the upper edge is beyond it. " : "") +
      (edge.below ? "What lies on the lower edge is below it. " : "") +
      "Bayes knows the σ of training, but not which one this is; over all of them nothing is " +
      `better. One variance for all is ridge with E[σ²] = ${square}; over all of them no GD++ ` +
      "model is better, whatever its depth.",
  );
}

function renderControls(model) {
  renderChoices("kinds", Object.entries(KINDS), "kind", (kind) => {
    return models.some((m) => m.kind === kind && m.noise === state.noise);
  });
  const depths = [...new Set(models.map((m) => m.layers))].sort((a, b) => a - b);
  const labelled = depths.map((depth) => [depth, `${depth}`]);
  renderChoices("depths", labelled, "layers", (layers) => {
    return models.some((m) => nameOf(m) === nameOf({ ...state, layers }));
  });
  const scopes = [["many", `mean of ${MANY} prompts`], ["one", "this prompt"]];
  renderChoices("scopes", scopes, "scope", () => true);
  setText("kind-hint", HINTS[model.kind]);
  const known = model.loss === null ? "" : `; adjusted loss ${tell(model.loss)}`;
  setText("model-hint", `Trained on σ ${told(model)}, seed ${model.seed}${known}.`);
  byId("noise").value = state.noise;
  renderSliders(model);
  const drawn = "seed" in state.prompt;
  byId("prompt").lastElementChild.hidden = !state.seed;
  byId("prompt").lastElementChild.textContent = `drawn here, seed ${state.seed}`;
  byId("prompt").value = drawn ? "drawn" : `${state.prompt.shared}`;
}

const told = ({ noise }) => noises[noise].sentence.replace(/^σ /, "");

function renderSliders(model) {
  const [sigma, examples, layer] = [byId("sigma"), byId("examples"), byId("layer")];
  sigma.max = largestSigma();
  sigma.value = state.sigma;
  examples.value = state.examples;
  layer.max = state.layers;
  layer.value = state.layer;
  for (const slider of [sigma, examples, layer]) {
    const share = (slider.value - slider.min) / (slider.max - slider.min);
    slider.style.setProperty("--share", `${100 * share}%`);
  }
  setText("sigma-value", state.sigma.toFixed(2));
  setText("examples-value", `${state.examples}`);
  const text = `After ${state.layer} of ${model.layers} layer${model.layers > 1 ? "s" : ""}`;
  setText("layer-text", text);
  layer.setAttribute("aria-valuetext", text);
  byId("back").disabled = state.layer === 0;
  byId("forth").disabled = state.layer === state.layers;
  const { values, largest } = noises[state.noise];
  const ranges = values ? values.map((value) => [value, value]) : [[0, largest]];
  markSeen("sigma-seen", ranges, 0, largestSigma());
  markSeen("examples-seen", [[data.context, data.context]], 1, LONGEST);
  const unseen = values ? !values.includes(state.sigma) : state.sigma > largest;
  const warnings = [
    unseen ? `σ = ${state.sigma.toFixed(2)} was not seen in training.` : "",
    state.examples !== data.context ? `The model was trained with n = ${data.context}.` : "",
  ];
  setText("warning", warnings.filter(Boolean).join(" "));
}

// Marks of what was seen in training, under the slider.
function markSeen(id, ranges, low, high) {
  const share = (value) => (100 * (value - low)) / (high - low);
  const marks = ranges.map(([from, to]) => {
    const mark = newElement("span");
    mark.style.left = `${share(from)}%`;
    mark.style.width = `${share(to) - share(from)}%`;
    return mark;
  });
  byId(id).replaceChildren(...marks);
}

// A row of buttons, one of which is pressed.
function renderChoices(id, options, key, exists) {
  const row = byId(id);
  if (row.children.length !== options.length) {
    row.replaceChildren(
      ...options.map(([value, label]) => {
        const button = newElement("button", { type: "button", "data-value": value }, label);
        button.addEventListener("click", () => choose({ [key]: value }));
        return button;
      }),
    );
  }
  options.forEach(([value], i) => {
    row.children[i].disabled = !exists(value);
    row.children[i].setAttribute("aria-pressed", state[key] === value);
  });
}
