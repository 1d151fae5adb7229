// Tokens and what a policy loss does to each: the gradient of `policy_loss`, and the strip of tokens that shows it.

// Aggregation and range of each variant, as in POLICY_VARIANTS.
const VARIANTS = {ppo: ["token-mean", 0.2, 0.2], grpo: ["seq-mean-token-mean", 0.2, 0.2], dr_grpo: ["constant", 0.2, 0.2], dapo: ["token-mean", 0.2, 0.28],
  gspo: ["seq-mean-token-mean", 3e-4, 4e-4], gspo_token: ["seq-mean-token-mean", 3e-4, 4e-4], cispo: ["token-mean", 1, 4],
  sapo: ["seq-mean-token-mean", null, null], gmpo: ["seq-mean-token-mean", 0.4, 0.4], dppo: ["token-mean", 0.2, 0.2],
  vespo: ["token-mean", null, null], luspo: ["seq-mean-token-sum", 3e-4, 4e-4], cpgd: ["token-mean", 0.2, 0.2], topr: ["seq-mean-token-sum", null, null]};
const AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "prompt-mean"];

const sumOf = (x) => x.reduce((a, b) => a + b, 0);
const held = (x, low, high) => Math.min(Math.max(x, low), high);

// The slope of each objective in log pi of each token of a response, times its weight w; and whether the clip stops it.
const clippedSlopes = (sequence) => ({r, A, w, mean}, {low, high, dual}) => {
  const s = sequence ? r.map(() => mean) : r;
  const stopped = s.map((x, t) => A[t] > 0 ? x > 1 + high : A[t] < 0 && (x < 1 - low || x > (dual ?? Infinity)));
  return [s.map((x, t) => stopped[t] ? 0 : w[t] * A[t] * x), stopped];
};
const spread = ([slopes, stopped]) => [slopes.map(() => sumOf(slopes) / slopes.length), stopped];
const SLOPES = {
  ppo: clippedSlopes(false), gspo_token: clippedSlopes(true), gspo: (x, options) => spread(clippedSlopes(true)(x, options)),
  cispo: ({r, A, w}, {low, high}) => [r.map((x, t) => w[t] * A[t] * held(x, 1 - low, 1 + high)), r.map((x) => x < 1 - low || x > 1 + high)],
  sapo: ({r, A, w}, {tau}) => [r.map((x, t) => {
    const gate = 1 / (1 + Math.exp(-tau[+(A[t] <= 0)] * (x - 1)));
    return 4 * gate * (1 - gate) * x * w[t] * A[t];
  }), r.map(() => false)],
  gmpo({r, A, w}, {low, high}) {
    const x = r.map(Math.log), stopped = x.map((d, t) => A[t] > 0 ? d > high : d < -low);
    const mean = Math.exp(sumOf(x.map((d, t) => A[t] > 0 ? Math.min(d, high) : Math.max(d, -low))) / x.length);
    return [stopped.map((no) => no ? 0 : mean * sumOf(A.map((a, t) => a * w[t])) / x.length), stopped.map((no, t) => no && A[t] !== 0)];
  },
  dppo({r, A, w, logp, old}, {low, high}) {
    const moved = logp.map((x, t) => Math.abs(Math.exp(x) - Math.exp(old[t])));
    const far = r.map((x, t) => A[t] > 0 ? x > 1 && moved[t] > high : A[t] < 0 && x < 1 && moved[t] > low);
    return [r.map((x, t) => far[t] ? 0 : w[t] * A[t] * x), far];
  },
  vespo: ({r, A, w, sum}) => [r.map((_, t) => {
    const [a, b] = A[t] >= 0 ? [2, 3] : [3, 2];
    return w[t] * A[t] * Math.exp(b + a * sum - b * Math.exp(sum));
  }), r.map(() => false)],
  cpgd({r, A, w}, {low, high}) {
    const stopped = r.map((x, t) => A[t] > 0 ? x > 1 + high : A[t] < 0 && x < 1 - low);
    return [r.map((_, t) => stopped[t] ? 0 : w[t] * A[t]), stopped];
  },
  topr: ({r, A, w, sum}) => [r.map((_, t) => w[t] * A[t] * (A[t] > 0 ? 1 : Math.min(1, Math.exp(sum)))), r.map((_, t) => A[t] < 0 && sum > 0)],
};
for (const name of ["grpo", "dr_grpo", "dapo"]) SLOPES[name] = SLOPES.ppo;
SLOPES.luspo = SLOPES.gspo;

// What each of n tokens of a response weighs, for responses with these numbers of tokens (`aggregation_weights`).
function aggregationWeights(counts, mode, {length, group = 1}) {
  const responses = Math.max(1, counts.filter((n) => n).length), all = Math.max(1, sumOf(counts));
  if (mode === "prompt-mean") {
    const prompts = Array.from({length: Math.ceil(counts.length / group)}, (_, p) => sumOf(counts.slice(p * group, (p + 1) * group)));
    return counts.map((_, i) => 1 / Math.max(1, prompts[Math.floor(i / group)]) / Math.max(1, prompts.filter((n) => n).length));
  }
  return counts.map((n) => ({"token-mean": 1 / all, "seq-mean-token-mean": 1 / Math.max(1, n) / responses, "seq-mean-token-sum": 1 / responses,
    constant: 1 / length / counts.length})[mode]);
}

// How hard the loss pushes log pi of each token: minus its gradient, so that what is pushed up has a number above 0.
// A response has logp, old, A and, for the KL, ref: a number for each of its own tokens.
function pushes(responses, {variant, aggregation, low, high, dual = null, tau = [1, 1.05], beta = 0, kind = "k3", weighted = true, length, group}) {
  const [mode, below, above] = VARIANTS[variant], weights = aggregationWeights(responses.map(({logp}) => logp.length), aggregation ?? mode, {length, group});
  return responses.map(({logp, old, A, ref}, i) => {
    const x = logp.map((p, t) => held(p - old[t], -40, 40)), r = x.map(Math.exp), w = r.map(() => weights[i]);
    const sum = sumOf(logp.map((p, t) => p - old[t])), mean = Math.exp(held(sum / (logp.length || 1), -40, 40));
    const options = {low: low ?? below, high: high ?? low ?? above, dual, tau};
    const [slopes, clipped] = SLOPES[variant]({r, A, w, mean, sum: held(sum, -40, 40), logp, old}, options);
    const leash = r.map((ratio, t) => {
      if (!beta || !ref) return 0;
      const d = logp[t] - ref[t], k = {k1: d, k2: d * d / 2, k3: Math.expm1(-d) + d}[kind], slope = {k1: 1, k2: d, k3: -Math.expm1(-d)}[kind];
      return beta * w[t] * (weighted ? ratio * (k + slope) : slope);
    });
    return {ratio: r, clipped, push: slopes.map((s, t) => s - leash[t])};
  });
}

// A text as text: what steers the lines, or cannot be seen, stands there by its number.
const HIDDEN = /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const plain = (text) => text.replace(/\r\n/g, "\n").replace(HIDDEN, (c) => c === "\t" ? "⇥" : `⟨${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

// Blue where a number is above 0, orange below, the stronger the further, up to `most`.
function shade(x, most) {
  if (!x || !most) return "";
  return `background: color-mix(in srgb, var(--${x > 0 ? "first" : "second"}) ${Math.round(Math.min(1, Math.abs(x) / most) * 40) + 5}%, transparent)`;
}

// A response token by token. `look(t)` gives {value, most, kind, label} of one; the arrow keys go from one to the next, `choose(t)` hears of it.
function tokenStrip(tokens, look, choose, label) {
  const spans = tokens.map((text, t) => make("span", {class: "token", onclick: () => pick(t)}, plain(text).replace(/\n/g, "↵\n") || "·"));
  let at = -1;
  function pick(t) {
    spans[at]?.classList.remove("chosen");
    spans[at = t]?.classList.add("chosen");
    if (t >= 0) choose(t);
  }
  const e = make("p", {class: "tokens", tabindex: 0, role: "group", dir: "ltr", "aria-label": label, onkeydown: (event) => {
    const to = {ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: spans.length - 1}[event.key];
    if (to === undefined || event.target !== e) return;
    event.preventDefault();
    pick(held(to, 0, spans.length - 1));
  }}, spans);
  e.update = () => spans.forEach((span, t) => {
    const {value = 0, most = 0, kind = ""} = look(t);
    span.className = `token ${kind} ${t === at ? "chosen" : ""}`;
    span.style.cssText = shade(value, most);
  });
  e.leave = () => pick(-1);
  e.pick = pick;
  e.update();
  return e;
}
