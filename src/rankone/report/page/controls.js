// Listeners, the first picture, and what tests and curious readers may call.

function fillLists() {
  const options = Object.entries(noises).map(([name, { sentence }]) => {
    return newElement("option", { value: name }, sentence);
  });
  byId("noise").append(...options);
  byId("noise-field").hidden = options.length === 1;
  const prompts = shared.map((_, i) => newElement("option", { value: i }, `shared ${i + 1}`));
  byId("prompt").append(...prompts, newElement("option", { value: "drawn" }));
  byId("examples").max = LONGEST;
}

function listen() {
  const on = (id, type, change) => {
    byId(id).addEventListener(type, ({ target }) => choose(change(target.value)));
  };
  on("noise", "change", (noise) => ({ noise }));
  on("sigma", "input", (value) => ({ sigma: Number(value) }));
  on("examples", "input", (value) => ({ examples: Number(value) }));
  on("layer", "input", (value) => ({ layer: Number(value) }));
  on("back", "click", () => ({ layer: state.layer - 1 }));
  on("forth", "click", () => ({ layer: state.layer + 1 }));
  on("draw", "click", () => ({ seed: state.seed + 1, prompt: { seed: state.seed + 1 } }));
  on("prompt", "change", (value) => ({
    prompt: value === "drawn" ? { seed: state.seed } : { shared: Number(value) },
  }));
  byId("theme").addEventListener("click", switchTheme);
  document.addEventListener("keydown", stepByKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tellTheme);
  new ResizeObserver(schedule).observe(document.body);
}

// Arrow keys step through the layers where nothing else wants them.
function stepByKey(event) {
  const steps = { ArrowLeft: -1, ArrowRight: 1 };
  const other = event.ctrlKey || event.altKey || event.metaKey || event.shiftKey;
  if (!(event.key in steps) || other || event.target.closest("input, select, td")) return;
  event.preventDefault();
  choose({ layer: state.layer + steps[event.key] });
}

const isDark = () => {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

function switchTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  tellTheme();
}

function tellTheme() {
  byId("theme").setAttribute("aria-pressed", isDark());
}

function tellOrigin() {
  const { command, device, date, commit } = data.origin;
  const parts = [command, device, date?.slice(0, 10), commit && `commit ${commit.slice(0, 12)}`];
  setText("origin", `Models: ${parts.filter(Boolean).join(", ")}.`);
}

const modelNamed = (name) => {
  const found = models.find((model) => nameOf(model) === name);
  if (!found) throw new Error(`no model ${name}; there are ${models.map(nameOf).join(", ")}`);
  return found;
};

// Names are KIND-LAYERS-NOISE; predictions and weights are those after 0, 1, … layers.
window.rankone = {
  models: () => models.map(nameOf),
  predictions: (name, tokens) => predictionsOf(modelNamed(name), tokens),
  weights: (name, gram) => implicitWeights(modelNamed(name), gram.map((r) => Float64Array.from(r)))
    .map((w) => [...w]),
  baselines: (noise, gram, examples, sigma) => {
    const rows = gram.map((row) => Float64Array.from(row));
    const found = baselinesOf(rows, examples, sigma, noises[noise]);
    return Object.fromEntries(Object.entries(found).map(([name, w]) => [name, [...w]]));
  },
  tokens: (index, sigma, examples) =>
    tokensOf(shared[index], sigma, examples).map((token) => [...token]),
  state: () => ({ ...state }),
};

fillLists();
listen();
tellTheme();
tellOrigin();
const deepest = Math.max(...models.map((model) => model.layers));
const least = data.noises[models[0].noise].largest;
choose({ noise: models[0].noise, kind: "diag", layers: deepest, sigma: Math.min(1, least) });
choose({ layer: state.layers });
