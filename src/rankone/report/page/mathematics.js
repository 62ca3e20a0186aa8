// The model, its prompts and its competitors. A matrix is an array of rows; all of it is float64.

const newMatrix = (rows, columns) => Array.from({ length: rows }, () => new Float64Array(columns));

function identity(size) {
  const result = newMatrix(size, size);
  for (let i = 0; i < size; i++) result[i][i] = 1;
  return result;
}

function multiply(A, B) {
  const result = newMatrix(A.length, B[0].length);
  for (let i = 0; i < A.length; i++) {
    const into = result[i];
    for (let k = 0; k < B.length; k++) addTo(into, A[i][k], B[k]);
  }
  return result;
}

// into ← into + factor · row
function addTo(into, factor, row) {
  if (factor === 0) return;
  for (let j = 0; j < into.length; j++) into[j] += factor * row[j];
}

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < b.length; i++) sum += a[i] * b[i];
  return sum;
}

// A Bᵀ
function multiplyTransposed(A, B) {
  const result = newMatrix(A.length, B.length);
  for (let i = 0; i < A.length; i++) {
    for (let j = 0; j < B.length; j++) result[i][j] = dot(A[i], B[j]);
  }
  return result;
}

// Numbers as Python exports them: base64, little-endian.
function decode(text, bytes) {
  const view = new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const read = bytes === 4 ? view.getFloat32 : view.getFloat64;
  return Float64Array.from({ length: view.byteLength / bytes }, (_, i) =>
    read.call(view, i * bytes, true),
  );
}

// P and Q of every layer, and the four omegas that diag and gd++ stand for.
function readModel(exported, dim) {
  const [p, q] = [decode(exported.p, 4), decode(exported.q, 4)];
  const layers = Array.from({ length: exported.layers }, (_, l) => {
    if (exported.kind === "full") return { P: square(p, l, dim + 1), Q: square(q, l, dim + 1) };
    const [px, py] = p.slice(2 * l);
    const [qx, qy] = exported.kind === "diag" ? q.slice(2 * l) : [q[l], 0];
    const omegas = { xx: px * qx, xy: px * qy, yx: py * qx, yy: py * qy };
    return { P: diagonal(px, py, dim), Q: diagonal(qx, qy, dim), omegas };
  });
  return { ...exported, matrices: layers };
}

function square(flat, index, size) {
  const start = index * size * size;
  return Array.from({ length: size }, (_, i) => {
    return flat.slice(start + i * size, start + (i + 1) * size);
  });
}

function diagonal(x, y, dim) {
  const result = newMatrix(dim + 1, dim + 1);
  for (let i = 0; i <= dim; i++) result[i][i] = i < dim ? x : y;
  return result;
}

// G = sum e eᵀ over the examples: all tokens but the last one, the query.
function gramOf(tokens) {
  const size = tokens[0].length;
  const gram = newMatrix(size, size);
  for (const token of tokens.slice(0, -1)) {
    for (let i = 0; i < size; i++) addTo(gram[i], token[i], token);
  }
  return gram;
}

// N = I + P G Q: what a layer multiplies every token by.
function stepOf({ P, Q }, gram) {
  const step = multiply(multiply(P, gram), Q);
  for (let i = 0; i < step.length; i++) step[i][i] += 1;
  return step;
}

// Implicit weights after 0, 1, … layers: T ← N T, G ← N G Nᵀ, weights = minus the last row of T.
function implicitWeights(model, gram) {
  const dim = gram.length - 1;
  const read = (T) => Float64Array.from(T[dim].subarray(0, dim), (value) => -value || 0);
  let transform = identity(dim + 1);
  const weights = [read(transform)];
  for (const layer of model.matrices) {
    const step = stepOf(layer, gram);
    transform = multiply(step, transform);
    gram = multiplyTransposed(multiply(step, gram), step);
    weights.push(read(transform));
  }
  return weights;
}

// Predictions for the query after 0, 1, … layers, by the tokens themselves: e ← e + P G Q e.
function predictionsOf(model, tokens) {
  const read = (rows) => -rows.at(-1).at(-1) || 0;
  const predictions = [read(tokens)];
  for (const layer of model.matrices) {
    tokens = multiplyTransposed(tokens, stepOf(layer, gramOf(tokens)));
    predictions.push(read(tokens));
  }
  return predictions;
}

// Eigenvalues and eigenvectors (in rows) of a symmetric matrix, by Jacobi's rotations.
function eigen(symmetric) {
  const A = symmetric.map((row) => Float64Array.from(row));
  const size = A.length;
  const vectors = identity(size);
  const total = A.reduce((sum, row) => sum + dot(row, row), 0);
  for (let sweep = 0; sweep < 30; sweep++) {
    let off = 0;
    for (let i = 0; i < size; i++) for (let j = 0; j < i; j++) off += A[i][j] ** 2;
    if (!(off > 1e-30 * total)) break;
    for (let i = 1; i < size; i++) for (let j = 0; j < i; j++) rotate(A, vectors, j, i);
  }
  return { values: A.map((row, i) => Math.max(0, row[i])), vectors };
}

// One rotation, which makes A[i][j] = A[j][i] = 0.
function rotate(A, vectors, i, j) {
  if (A[i][j] === 0) return;
  const theta = (A[j][j] - A[i][i]) / (2 * A[i][j]);
  const t = (theta < 0 ? -1 : 1) / (Math.abs(theta) + Math.hypot(theta, 1));
  const c = 1 / Math.hypot(t, 1);
  const s = t * c;
  turnRows(A[i], A[j], c, s);
  for (const row of A) {
    const a = row[i];
    row[i] = c * a - s * row[j];
    row[j] = s * a + c * row[j];
  }
  turnRows(vectors[i], vectors[j], c, s);
}

function turnRows(first, second, c, s) {
  for (let k = 0; k < first.length; k++) {
    const a = first[k];
    first[k] = c * a - s * second[k];
    second[k] = s * a + c * second[k];
  }
}

// A Gram matrix in the eigenbasis of its features: one decomposition serves every ridge.
function spectrumOf(gram) {
  const dim = gram.length - 1;
  const { values, vectors } = eigen(gram.slice(0, dim).map((row) => row.slice(0, dim)));
  const mixed = gram[dim].subarray(0, dim);
  const alpha = vectors.map((vector) => dot(vector, mixed));
  return { values, vectors, alpha, energy: gram[dim][dim], largest: Math.max(...values) };
}

// (S + variance I)⁻¹ a in the eigenbasis; where that has no inverse, the one of minimum norm.
function ridgeIn(spectrum, variance) {
  const tiny = 1e-12 * spectrum.largest;
  return spectrum.values.map((value, k) => {
    return value + variance > tiny ? spectrum.alpha[k] / (value + variance) : 0;
  });
}

function fromEigenbasis({ vectors }, coefficients) {
  const result = new Float64Array(vectors.length);
  vectors.forEach((vector, k) => addTo(result, coefficients[k], vector));
  return result;
}

const ridge = (spectrum, variance) => fromEigenbasis(spectrum, ridgeIn(spectrum, variance));

// The posterior mean of w when σ has the distribution of training: ridges of many σ, mixed by
// how likely each makes the labels, from y | X, σ ~ N(0, X Xᵀ + σ² I).
function bayes(spectrum, examples, { points, weights }) {
  if (points.length === 1) return ridge(spectrum, points[0] ** 2);
  const smallest = (1e-10 * spectrum.energy) / examples; // below it residuals are rounding errors
  const variances = Array.from(points, (sigma) => Math.max(sigma ** 2, smallest));
  const logs = variances.map((variance, i) => {
    return Math.log(weights[i]) + logLikelihood(spectrum, examples, variance);
  });
  const top = Math.max(...logs);
  const mean = new Float64Array(spectrum.alpha.length);
  let total = 0;
  variances.forEach((variance, i) => {
    const share = Math.exp(logs[i] - top);
    if (share < 1e-20) return;
    total += share;
    addTo(mean, share, ridgeIn(spectrum, variance));
  });
  return fromEigenbasis(spectrum, mean.map((value) => value / total));
}

// Of the labels, up to a constant.
function logLikelihood({ values, alpha, energy }, examples, variance) {
  let product = 1;
  let residual = energy;
  for (let k = 0; k < values.length; k++) {
    product *= 1 + values[k] / variance;
    residual -= alpha[k] ** 2 / (values[k] + variance);
  }
  const logDet = Math.log(product) + examples * Math.log(variance);
  return -(logDet + Math.max(0, residual) / variance) / 2;
}

// The competitors' weights for one prompt.
function baselinesOf(gram, examples, sigma, noise) {
  const spectrum = spectrumOf(gram);
  return {
    oracle: ridge(spectrum, sigma ** 2),
    constant: ridge(spectrum, noise.mean_square),
    bayes: bayes(spectrum, examples, noise),
  };
}

function lossOf(weights, truth) {
  let sum = 0;
  for (let j = 0; j < truth.length; j++) sum += (weights[j] - truth[j]) ** 2;
  return sum / 2;
}

// Standard normal numbers of a seed: mulberry32 and Box-Muller.
function normals(seed) {
  let state = Math.imul(seed, 0x9e3779b1) >>> 0;
  const uniform = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
  return (count) =>
    Float64Array.from({ length: count }, () => {
      return Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
    });
}

// A prompt holds its random numbers. σ scales the noise and n takes the first examples, so that
// a slider changes one thing only.
function drawPrompt(seed, dim, longest, queries) {
  const draw = normals(seed);
  return {
    weights: draw(dim),
    features: Array.from({ length: longest }, () => draw(dim)),
    noise: draw(longest),
    queries: Array.from({ length: queries }, () => draw(dim)),
  };
}

// One that Python exported; it has one query, and the others are drawn here.
function readPrompt(text, dim, longest, queries) {
  const flat = decode(text, 4);
  const row = (i) => flat.slice(dim * (i + 1), dim * (i + 2));
  const features = Array.from({ length: longest + 1 }, (_, i) => row(i));
  const further = drawPrompt(0, dim, 0, queries - 1).queries;
  return {
    weights: flat.slice(0, dim),
    features: features.slice(0, longest),
    noise: flat.slice(dim * (longest + 2), -1),
    queries: [features[longest], ...further],
  };
}

// Tokens (x, y) of the first examples, and (x, 0) of the first query.
function tokensOf(prompt, sigma, examples) {
  const tokens = prompt.features.slice(0, examples).map((x, i) => {
    return Float64Array.of(...x, dot(prompt.weights, x) + sigma * prompt.noise[i]);
  });
  return [...tokens, Float64Array.of(...prompt.queries[0], 0)];
}
