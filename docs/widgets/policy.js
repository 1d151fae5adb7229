// The tiny GPT-2 itself, before and after RLHF, computed in the page.

function unpack([scale, base64]) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  return Float32Array.from(new Int16Array(bytes.buffer), (n) => n * scale);
}

// The weights at `share` of the way from before to after.
function between(share) {
  const {before, after} = POLICY.models ??= {before: weights("before"), after: weights("after")};
  return Object.fromEntries(Object.keys(before).map((name) => [name, before[name].map((w, i) => w + share * (after[name][i] - w))]));
}
const weights = (when) => Object.fromEntries(Object.entries(POLICY.tensors).map(([name, t]) => [name, unpack(t[when])]));

const gelu = (x) => 0.5 * x * (1 + erf(x / Math.SQRT2));
function erf(x) {                                       // Abramowitz and Stegun 7.1.26, to 1.5e-7
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const y = 1 - t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * Math.exp(-x * x);
  return x < 0 ? -y : y;
}

// GPT-2 that reads one token after the other and keeps the keys and values of those before.
class GPT2 {
  constructor(w) { this.w = w; this.d = w["transformer.ln_f.weight"].length; this.restart(); }
  restart() { this.cache = []; this.place = 0; return this; }

  norm(x, name) {
    const w = this.w[`${name}.weight`], b = this.w[`${name}.bias`], mean = x.reduce((s, v) => s + v, 0) / x.length;
    const scale = 1 / Math.sqrt(x.reduce((s, v) => s + (v - mean) ** 2, 0) / x.length + 1e-5);
    return x.map((v, i) => (v - mean) * scale * w[i] + b[i]);
  }

  linear(x, name) {                                     // x W + b, W with a row for each input
    const w = this.w[`${name}.weight`], out = Float32Array.from(this.w[`${name}.bias`]), n = out.length;
    for (let i = 0; i < x.length; i++) for (let j = 0, at = i * n; j < n; j++) out[j] += x[i] * w[at + j];
    return out;
  }

  attention(x, layer) {
    const d = this.d, size = d / POLICY.heads, qkv = this.linear(x, `transformer.h.${layer}.attn.c_attn`), out = new Float32Array(d);
    const past = this.cache[layer] ??= [];
    past.push([qkv.slice(d, 2 * d), qkv.slice(2 * d)]);
    for (let from = 0; from < d; from += size) {
      const dot = (key) => { let s = 0; for (let i = from; i < from + size; i++) s += qkv[i] * key[i]; return s / Math.sqrt(size); };
      logSoftmax(past.map(([key]) => dot(key))).forEach((logp, t) => {
        for (let i = from; i < from + size; i++) out[i] += Math.exp(logp) * past[t][1][i];
      });
    }
    return this.linear(out, `transformer.h.${layer}.attn.c_proj`);
  }

  // Log-probabilities of the next token, after one more.
  read(token) {
    const {d, w} = this, wte = w["transformer.wte.weight"], wpe = w["transformer.wpe.weight"];
    let x = Float32Array.from({length: d}, (_, i) => wte[token * d + i] + wpe[this.place * d + i]);
    const add = (y) => { x = x.map((v, i) => v + y[i]); };
    for (let layer = 0; `transformer.h.${layer}.ln_1.weight` in w; layer++) {
      const at = `transformer.h.${layer}`;
      add(this.attention(this.norm(x, `${at}.ln_1`), layer));
      add(this.linear(this.linear(this.norm(x, `${at}.ln_2`), `${at}.mlp.c_fc`).map(gelu), `${at}.mlp.c_proj`));
    }
    this.place++;
    const last = this.norm(x, "transformer.ln_f"), logits = new Float32Array(wte.length / d);
    for (let v = 0; v < logits.length; v++) for (let i = 0; i < d; i++) logits[v] += last[i] * wte[v * d + i];
    return logSoftmax(logits);
  }
  readAll(tokens) { return tokens.map((t) => this.read(t)); }
}

// The human's opinion of a response: mean sentiment, and a cost for each fault (`judgement` of the lesson on the task).
function trueReward(prompt, response) {
  const {NOUNS, ADJECTIVES, INTENSIFIERS, CATEGORY, FOLLOWS, COSTS, NEGATION, LIMIT} = POLICY.rules;
  const said = response.split(/\s+/).filter(Boolean), domain = prompt.split(/\s+/).find((w) => POLICY.domains.includes(w)), felt = [];
  let factor = 1;
  for (const word of said) {
    if (word in INTENSIFIERS) factor *= INTENSIFIERS[word];
    else if (word === "not") factor *= NEGATION;
    else {
      if (word in ADJECTIVES) felt.push(Math.max(-LIMIT, Math.min(LIMIT, factor * ADJECTIVES[word])));
      factor = 1;
    }
  }
  const content = said.filter((w) => w in NOUNS || w in ADJECTIVES);
  const grammar = said.filter((w, i) => !(FOLLOWS[CATEGORY[i ? said[i - 1] : "."]] ?? []).includes(CATEGORY[w])).length;
  const topic = said.filter((w) => w in NOUNS && NOUNS[w] !== domain).length;
  return (felt.length ? felt.reduce((a, b) => a + b) / felt.length : 0) - COSTS.grammar * grammar - COSTS.topic * topic
    - COSTS.repetition * (content.length - new Set(content).size) - COSTS.ending * (said[said.length - 1] !== ".");
}

const tokensOf = (text) => text.trim().split(/\s+/).filter(Boolean).map((w) => POLICY.words.indexOf(w));
const ended = (tokens) => tokens.length > POLICY.stop_after && POLICY.words[tokens[tokens.length - 1]] === "." || tokens.length >= POLICY.length;

// A sampled response with its exact KL to the model before, summed over its words.
function respond(policy, before, prompt, random) {
  const start = tokensOf(prompt), said = [];
  let p = policy.restart().readAll(start).pop(), q = before.restart().readAll(start).pop(), kl = 0;
  while (true) {
    kl += p.reduce((s, x, v) => s + Math.exp(x) * (x - q[v]), 0);
    said.push(draw(p.map(Math.exp), random()));
    if (ended(said)) break;
    [p, q] = [policy.read(said[said.length - 1]), before.read(said[said.length - 1])];
  }
  return {text: said.map((t) => POLICY.words[t]).join(" "), kl};
}

// Mean KL and mean true reward of a response to each of the prompts that nobody trained on.
function worth(share) {
  const policy = new GPT2(between(share)), before = new GPT2(between(0)), random = chance(1);
  const all = POLICY.prompts.map((prompt) => { const {text, kl} = respond(policy, before, prompt, random); return [kl, trueReward(prompt, text)]; });
  return [0, 1].map((i) => all.reduce((s, row) => s + row[i], 0) / all.length);
}

widget("policy", (box) => {
  const state = {share: 0.5, said: [], random: chance(7), seen: new Map()};
  const prompt = make("input", {type: "text", value: "about the old hotel .", oninput: () => { state.said = []; update(); }, "aria-label": "prompt", spellcheck: "false"});
  const text = make("p", {class: "case said", "aria-live": "polite"}), shares = table(["next word", "before", "here", "after"], [], {class: "next"}), found = make("p", {class: "case", "aria-live": "polite"});
  const chart = new Chart("score against KL so far", {x: [0, 10], y: [-2, 3], xlabel: "KL to the model before, nats a response",
    xticks: [0, 2, 4, 6, 8, 10], yticks: [-2, -1, 0, 1, 2, 3]});
  let models, waiting;
  function mix() { models = {before: new GPT2(between(0)), here: new GPT2(between(state.share)), after: new GPT2(between(1))}; }
  function next() {
    const read = [...tokensOf(prompt.value), ...state.said];
    return Object.values(models).map((m) => m.restart().readAll(read).pop().map(Math.exp));
  }
  function say(token) { state.said.push(token); update(); }
  const words = (token) => POLICY.words[token];
  function update() {
    const unknown = tokensOf(prompt.value).map((t, i) => t < 0 && prompt.value.trim().split(/\s+/)[i]).filter(Boolean), asked = tokensOf(prompt.value).length;
    for (const b of box.querySelectorAll(".buttons button")) b.disabled = Boolean(unknown.length || !asked || asked > 40);
    if (unknown.length || !asked || asked > 40) {
      text.textContent = unknown.length ? `The model has never read: ${unknown.join(", ")}. It knows ${POLICY.words.length} words, such as ${POLICY.words.slice(5, 17).join(", ")}.` : "Type a prompt of 1 to 40 words.";
      shares.fill([]);
      return;
    }
    const done = ended(state.said), said = state.said.map(words).join(" ");
    text.replaceChildren(`${prompt.value.trim()} `, make("b", {}, said || "…"), done ? ` The human gives it ${show(trueReward(prompt.value, said))}.` : "");
    const p = next(), likely = p[1].map((_, v) => v).sort((a, b) => Math.max(p[0][b], p[1][b], p[2][b]) - Math.max(p[0][a], p[1][a], p[2][a])).slice(0, 8);
    shares.fill(done ? [] : likely.map((v) => row(button(words(v), () => say(v), {title: "say this"}),
      p.map((column) => make("td", {}, make("span", {class: "share", style: `width: ${(60 * column[v]).toFixed(1)}%`}), " " + show(column[v]))))));
  }
  function continued(all) {
    if (ended(state.said)) state.said = [];
    do state.said.push(draw(next()[1], state.random())); while (all && !ended(state.said));
    update();
  }
  function measure() {
    const [kl, score] = state.seen.get(state.share) ?? worth(state.share);
    state.seen.set(state.share, [kl, score]);
    chart.clear();
    [...state.seen].sort(([a], [b]) => a - b).forEach(([share, [x, y]]) => chart.add("circle", {class: share === state.share ? "dot" : "seen", cx: chart.X(Math.min(x, 10)), cy: chart.Y(y), r: share === state.share ? 7 : 4}));
    found.textContent = `At ${show(state.share)}: a KL of ${show(kl, 1)} nats, a score of ${show(score)} by the human (3 is the best), means over ${POLICY.prompts.length} prompts that nobody trained on.`;
  }
  const share = dial("weights, from before (0) to after (1)", {min: 0, max: 1.5, step: 0.05, value: 0.5}, (x) => {
    state.share = x;
    mix();
    update();
    clearTimeout(waiting);
    waiting = setTimeout(measure, 150);
  });
  box.append(make("div", {class: "dials"}, make("label", {class: "dial"}, make("span", {}, "prompt"), prompt), share),
    make("p", {class: "buttons"}, button("Next word", () => continued(false)), button("Whole response", () => continued(true)), button("Again", () => { state.said = []; update(); })),
    text, make("div", {class: "panes"}, shares,
      make("div", {}, chart.svg, found)));
  mix();
  update();
  setTimeout(measure, 300);
});
