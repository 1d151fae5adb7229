// One update of GRPO under a microscope: eight responses of the tiny GPT-2, the push on each token, and its probability after the step.

// GPT-2 that reads a whole sequence and goes back through it. Matrices are arrays of rows.
class Learner {
  constructor(w) { this.w = w; this.d = w["transformer.ln_f.weight"].length; this.layers = Object.keys(w).filter((name) => name.endsWith("ln_1.weight")).length; }

  linear(X, name) {
    const W = this.w[`${name}.weight`], b = this.w[`${name}.bias`], m = b.length;
    const Y = X.map((x) => {
      const y = Float64Array.from(b);
      for (let i = 0; i < x.length; i++) for (let j = 0, at = i * m; j < m; j++) y[j] += x[i] * W[at + j];
      return y;
    });
    return [Y, (dY, g) => {
      const dW = g[`${name}.weight`], db = g[`${name}.bias`];
      return X.map((x, t) => Float64Array.from(x, (v, i) => {
        let s = 0;
        for (let j = 0, at = i * m; j < m; j++) { dW[at + j] += v * dY[t][j]; if (!i) db[j] += dY[t][j]; s += dY[t][j] * W[at + j]; }
        return s;
      }));
    }];
  }

  norm(X, name) {
    const w = this.w[`${name}.weight`], b = this.w[`${name}.bias`], d = this.d, scales = [];
    const unit = X.map((x, t) => {
      const mean = x.reduce((s, v) => s + v, 0) / d;
      scales[t] = 1 / Math.sqrt(x.reduce((s, v) => s + (v - mean) ** 2, 0) / d + 1e-5);
      return x.map((v) => (v - mean) * scales[t]);
    });
    return [unit.map((u) => u.map((v, i) => v * w[i] + b[i])), (dY, g) => dY.map((dy, t) => {
      const dU = dy.map((v, i) => { g[`${name}.weight`][i] += v * unit[t][i]; g[`${name}.bias`][i] += v; return v * w[i]; });
      const mean = dU.reduce((s, v) => s + v, 0) / d, along = dU.reduce((s, v, i) => s + v * unit[t][i], 0) / d;
      return dU.map((v, i) => scales[t] * (v - mean - unit[t][i] * along));
    })];
  }

  gelu(X) {
    const slope = (x) => 0.5 * (1 + erf(x / Math.SQRT2)) + x * Math.exp(-x * x / 2) / Math.sqrt(2 * Math.PI);
    return [X.map((x) => x.map(gelu)), (dY) => dY.map((dy, t) => dy.map((v, i) => v * slope(X[t][i])))];
  }

  attention(QKV) {
    const d = this.d, size = d / POLICY.heads, heads = [], Y = QKV.map(() => new Float64Array(d));
    for (let from = 0; from < d; from += size) {
      const dot = (t, s) => { let sum = 0; for (let i = from; i < from + size; i++) sum += QKV[t][i] * QKV[s][d + i]; return sum / Math.sqrt(size); };
      const P = QKV.map((_, t) => logSoftmax(Array.from({length: t + 1}, (_, s) => dot(t, s))).map(Math.exp));
      P.forEach((p, t) => p.forEach((share, s) => { for (let i = from; i < from + size; i++) Y[t][i] += share * QKV[s][2 * d + i]; }));
      heads.push([from, P]);
    }
    return [Y, (dY) => {
      const dX = QKV.map(() => new Float64Array(3 * d));
      for (const [from, P] of heads) P.forEach((p, t) => {
        const dP = p.map((share, s) => { let sum = 0; for (let i = from; i < from + size; i++) { sum += dY[t][i] * QKV[s][2 * d + i]; dX[s][2 * d + i] += share * dY[t][i]; } return sum; });
        const along = p.reduce((sum, share, s) => sum + share * dP[s], 0);
        p.forEach((share, s) => {
          const dS = share * (dP[s] - along) / Math.sqrt(size);
          for (let i = from; i < from + size; i++) { dX[t][i] += dS * QKV[s][d + i]; dX[s][d + i] += dS * QKV[t][i]; }
        });
      });
      return dX;
    }];
  }

  // log π of each token of a response, and a function that takes the loss's slope in each and adds to the gradient of the weights.
  logp(prompt, response) {
    const {d, w} = this, wte = w["transformer.wte.weight"], wpe = w["transformer.wpe.weight"], read = [...prompt, ...response].slice(0, -1), back = [], plus = (A, B) => A.map((a, t) => a.map((v, i) => v + B[t][i]));
    const through = ([Y, f]) => { back.push(f); return Y; };
    let X = read.map((token, t) => Float64Array.from({length: d}, (_, i) => wte[token * d + i] + wpe[t * d + i]));
    for (let layer = 0; layer < this.layers; layer++) {
      const at = `transformer.h.${layer}`;
      for (const part of [(x) => through(this.linear(through(this.attention(through(this.linear(through(this.norm(x, `${at}.ln_1`)), `${at}.attn.c_attn`)))), `${at}.attn.c_proj`)),
        (x) => through(this.linear(through(this.gelu(through(this.linear(through(this.norm(x, `${at}.ln_2`)), `${at}.mlp.c_fc`)))), `${at}.mlp.c_proj`))]) X = plus(X, part(X));
    }
    const last = through(this.norm(X, "transformer.ln_f")), first = prompt.length - 1;
    const logits = (h) => Array.from({length: wte.length / d}, (_, v) => { let s = 0; for (let i = 0; i < d; i++) s += h[i] * wte[v * d + i]; return s; });
    const all = response.map((_, k) => logSoftmax(logits(last[first + k])));
    return [response.map((token, k) => all[k][token]), (slopes, g) => {
      const embed = g["transformer.wte.weight"];
      let dX = last.map(() => new Float64Array(d));
      slopes.forEach((slope, k) => all[k].forEach((lp, v) => {
        const dz = slope * ((v === response[k]) - Math.exp(lp)), h = last[first + k];
        for (let i = 0; i < d; i++) { dX[first + k][i] += dz * wte[v * d + i]; embed[v * d + i] += dz * h[i]; }
      }));
      dX = back.at(-1)(dX, g);
      for (let layer = this.layers; layer--;) for (let part = 2; part--;) {
        const own = back.slice(8 * layer + 4 * part, 8 * layer + 4 * part + 4);
        dX = plus(dX, own.reduceRight((dY, f) => f(dY, g), dX));
      }
      dX.forEach((dx, t) => dx.forEach((v, i) => { embed[read[t] * d + i] += v; g["transformer.wpe.weight"][t * d + i] += v; }));
    }];
  }
}

// The advantage of each response (`group_advantage`, `rloo_advantage`).
function advantages(rewards, {deviation, others}) {
  const n = rewards.length, mean = sumOf(rewards) / n, away = rewards.map((r) => r - mean);
  if (others) return away.map((x) => x * n / (n - 1));
  return deviation ? away.map((x) => x / (Math.sqrt(sumOf(away.map((v) => v * v)) / (n - 1)) + 1e-4)) : away;
}

// A step of gradient descent from the weights w: what pushes each token, and log π before and after. `old` and `ref`: log π of sampler and reference.
function oneUpdate(w, prompt, responses, {rewards, old, ref, rate, ...settings}) {
  const policy = new Learner(w), A = advantages(rewards, settings), read = responses.map((r) => policy.logp(prompt, r)), before = read.map(([logp]) => logp);
  const {aggregation, high, beta} = settings, g = Object.fromEntries(Object.entries(w).map(([name, x]) => [name, new Float64Array(x.length)]));
  const found = pushes(before.map((logp, i) => ({logp, old: old[i], ref: ref[i], A: logp.map(() => A[i])})), {variant: "grpo", aggregation, low: 0.2, high, beta, length: POLICY.length, group: responses.length});
  found.forEach(({push}, i) => read[i][1](push.map((x) => -x), g));
  const stepped = Object.fromEntries(Object.entries(w).map(([name, x]) => [name, Float64Array.from(x, (v, i) => v - rate * g[name][i])])), next = new Learner(stepped);
  return {A, found, before, after: responses.map((r) => next.logp(prompt, r)[0]), w: stepped};
}

widget("update", (box) => {
  const PROMPT = "about the old hotel .", prompt = tokensOf(PROMPT), start = between(0), n = 8, percent = (logp) => `${show(100 * Math.exp(logp), 1)}%`;
  const state = {rewards: [], deviation: true, others: false, aggregation: "seq-mean-token-mean", higher: false, beta: 0, rate: 0.1, steps: 0, seed: 3, at: null};
  let responses = [], old = [], w = start, most = 0, result, waiting;
  const said = make("p", {class: "case", "aria-live": "polite"}), rows = make("div"), detail = make("p", {class: "case", "aria-live": "polite"});
  const chart = new Chart("how far the step moves log π of each response", {x: [-0.5, 7.5], y: [-1.25, 1.25], xticks: [...Array(n).keys()], xtext: (i) => String(i + 1), yticks: [0], xlabel: "response", width: 400, height: 170});
  let cards = [];

  function sample() {
    const random = chance(state.seed), model = new GPT2(start), same = new GPT2(start);
    responses = Array.from({length: n}, () => tokensOf(respond(model, same, PROMPT, random).text));
    result = undefined;
    state.rewards = responses.map((r) => +trueReward(PROMPT, r.map((t) => POLICY.words[t]).join(" ")).toFixed(2));
    const learner = new Learner(start);
    old = responses.map((r) => learner.logp(prompt, r)[0]);
    cards = responses.map(card);
    rows.replaceChildren(...cards.map(({e}) => e));
    again();
  }
  function again() { w = start; state.steps = 0; update(); }
  function update() {
    const {steps, higher, at, ...settings} = state;
    result = oneUpdate(w, prompt, responses, {...settings, high: higher ? 0.28 : 0.2, old, ref: old});
    most = Math.max(...result.found.flatMap(({push}) => push.map(Math.abs)));
    const moved = result.after.map((logp, i) => sumOf(logp) - sumOf(result.before[i])), high = Math.max(0.01, ...moved.map(Math.abs));
    cards.forEach(({strip, A, whole}, i) => {
      strip.update();
      A.textContent = `A ${show(result.A[i])}`;
      whole.textContent = `log π ${show(sumOf(result.before[i]))} → ${show(sumOf(result.after[i]))}`;
    });
    chart.clear().line([[-0.5, 0], [7.5, 0]], "axis");
    moved.forEach((x, i) => { chart.bar(i, x / high, 26); chart.text(i, x / high, show(x), {dy: x < 0 ? 13 : -4, "text-anchor": "middle"}); });
    const clipped = sumOf(result.found.flatMap((f) => f.clipped.map(Number)));
    said.textContent = state.rewards.every((r) => r === state.rewards[0]) ? "All rewards are equal: every advantage is 0, and without a KL nothing is learned." :
      `Step ${steps + 1} on these responses. ${clipped ? `The clip stops ${clipped} tokens: their push is 0.` : steps ? "No token is beyond the clip yet." : "Policy and sampler are one, so each ratio is 1: nothing is clipped yet."}`;
    tell();
  }
  function soon(changes) { Object.assign(state, changes); clearTimeout(waiting); waiting = setTimeout(update, 60); }
  function tell() {
    if (!state.at) { detail.textContent = "Choose a token: arrow keys, or a click."; return; }
    const [i, t] = state.at, {push, ratio, clipped} = result.found[i];
    detail.replaceChildren(make("b", {}, POLICY.words[responses[i][t]]), ` in response ${i + 1}: ratio ${show(ratio[t], 3)}, push ${show(push[t], 4)}${clipped[t] ? " (clipped)" : ""}; its probability ${percent(result.before[i][t])} → ${percent(result.after[i][t])}.`);
  }
  function card(tokens, i) {
    const A = make("span"), whole = make("span"), words = tokens.map((t, k) => (k ? " " : "") + POLICY.words[t]);
    const look = (t) => ({value: result?.found[i].push[t], most, kind: result?.found[i].clipped[t] ? "clipped" : ""});
    const strip = tokenStrip(words, look, (t) => { cards.forEach((c, j) => { if (j !== i) c.strip.leave(); }); state.at = [i, t]; tell(); }, `response ${i + 1}, token by token`);
    const reward = entry(state.rewards[i], (x) => { const rewards = [...state.rewards]; rewards[i] = x; soon({rewards}); }, {step: 0.5, "aria-label": `reward of response ${i + 1}`});
    return {strip, A, whole, e: make("div", {class: "answer"}, make("p", {class: "facts"}, make("label", {}, `${i + 1}: reward `, reward), A, whole), strip)};
  }
  box.append(make("p", {}, "Prompt: ", make("b", {}, PROMPT), " Eight responses of the tiny GPT-2, with the human's scores. Change a reward, or the loss."),
    make("div", {class: "dials"},
      toggle("divide by the deviation", true, (deviation) => soon({deviation})), toggle("leave one out", false, (others) => soon({others})), toggle("clip higher: 1.28", false, (higher) => soon({higher})),
      dial("β of the KL", {min: 0, max: 0.5, step: 0.05, value: 0}, (beta) => soon({beta})), dial("learning rate", {min: 0.05, max: 2, step: 0.05, value: 0.1}, (rate) => soon({rate}))),
    choice("mean over", {"seq-mean-token-mean": "each response, then all", "token-mean": "all tokens", constant: "a constant length"}, state.aggregation, (aggregation) => soon({aggregation})),
    make("p", {class: "buttons"}, button("Take the step", () => { w = result.w; state.steps++; update(); }), button("Start again", again), button("Other responses", () => { state.seed++; sample(); })),
    said, detail, make("div", {class: "panes"}, chart.svg, rows));
  sample();
});
