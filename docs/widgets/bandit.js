// Three actions that earn 1, 2 and 4: sample, and watch the log-probabilities move.
const REWARDS = [1, 2, 4], NAMES = ["A", "B", "C"];

// Logits after `steps` steps of gradient ascent on the mean of ratio times advantage, or of the clipped surrogate.
function improve(logits, actions, {baseline = 0, clip = null, steps = 1, rate = 0.5}) {
  const old = logSoftmax(logits);
  let z = [...logits];
  for (let k = 0; k < steps; k++) {
    const logp = logSoftmax(z), gradient = [0, 0, 0];
    for (const a of actions) {
      const ratio = Math.exp(logp[a] - old[a]), A = REWARDS[a] - baseline;
      if (clip && (A > 0 ? ratio > 1 + clip : ratio < 1 - clip)) continue;
      for (let i = 0; i < 3; i++) gradient[i] += ratio * A * ((i === a) - Math.exp(logp[i])) / actions.length;
    }
    z = z.map((x, i) => x + rate * gradient[i]);
  }
  return z;
}

const expected = (logits) => logSoftmax(logits).reduce((s, x, a) => s + Math.exp(x) * REWARDS[a], 0);

// One update from fresh samples: {logits, actions}.
function update(logits, random, {n = 1, baseline = true, clip = false, steps = 1}) {
  const p = logSoftmax(logits).map(Math.exp), actions = Array.from({length: n}, () => draw(p, random()));
  return {logits: improve(logits, actions, {baseline: baseline ? expected(logits) : 0, clip: clip ? 0.2 : null, steps}), actions};
}

// Log-probabilities of the actions before each of `updates` updates and after the last, from equal ones.
function walk(seed, options, updates = 40) {
  const random = chance(seed), history = [logSoftmax([0, 0, 0])];
  for (let z = [0, 0, 0], k = 0; k < updates; k++) history.push(logSoftmax(z = update(z, random, options).logits));
  return history;
}

const loses = (history) => Math.exp(history[history.length - 1][2]) < 0.5;

widget("bandit", (box) => {
  const state = {n: 1, baseline: true, clip: false, steps: 1}, now = {};
  let seed = 0;                                   // of the next walk: none is taken twice
  const kinds = ["third", "second", "first"], lines = new Chart("log-probability of each action", {x: [0, 40], y: [-6, 0], xlabel: "updates",
    xticks: [], yticks: [-6, -4, -2, 0]}), bars = new Chart("probability", {x: [-0.5, 2.5], y: [0, 1], xticks: [0, 1, 2],
    xtext: (a) => `${NAMES[a]}: ${REWARDS[a]}`, yticks: [0, 0.5, 1], digits: 1, xlabel: "action and its reward"});
  const said = make("p", {class: "case", "aria-live": "polite"});
  function sample(times) {
    for (let k = 0; k < times; k++) {
      Object.assign(now, update(now.logits, now.random, state));
      now.history.push(logSoftmax(now.logits));
    }
    drawWalk();
  }
  function restart() {
    Object.assign(now, {logits: [0, 0, 0], history: [logSoftmax([0, 0, 0])], actions: [], random: chance(seed++)});
    drawWalk();
  }
  function change(what) {
    Object.assign(state, what);
    restart();
  }
  function barsOf(p) {
    bars.clear();
    p.forEach((x, a) => { bars.bar(a, x, 50, kinds[a]); bars.text(a, x, show(x), {dy: -4, "text-anchor": "middle"}); });
  }
  function drawWalk() {
    const n = now.history.length - 1, scale = Math.max(n, 40) / 40, logp = now.history[n];
    lines.title.textContent = "log-probability of each action";
    lines.clear();
    const ends = logp.map((x) => Math.max(x, -6)), near = (a) => [0, 1, 2].filter((b) => Math.abs(ends[b] - ends[a]) < 0.4);
    kinds.forEach((kind, a) => {
      lines.line(now.history.map((row, t) => [t / scale, row[a]]), kind);
      if (n && near(a)[0] === a) lines.text(Math.min(n / scale, 38.5), ends[a], near(a).map((b) => NAMES[b]).join(""), {dx: 2, dy: -5});
    });
    barsOf(logp.map(Math.exp));
    lines.add("text", {x: lines.X(40), y: 190, "text-anchor": "end"}, String(Math.round(40 * scale)));
    const last = now.actions.slice(0, 12).map((a) => NAMES[a] + ", " + REWARDS[a]).join("; ") + (now.actions.length > 12 ? "; …" : "");
    said.textContent = n === 0 ? "Nothing sampled yet: each action has a probability of a third. Take a hundred walks with the baseline and without it: how many lose C?" :
      `After ${n} update${n > 1 ? "s" : ""} the expected reward is ${show(expected(now.logits))} (4 is the best). Last sampled: ${last}.`;
  }
  function hundred() {
    restart();
    const found = Array.from({length: 100}, () => walk(seed++, state)), ends = found.map((h) => h[h.length - 1].map(Math.exp));
    lines.title.textContent = "log-probability of C, 100 walks";
    lines.clear();
    for (const h of found) lines.line(h.map((row, t) => [t, row[2]]), loses(h) ? "second thin" : "first thin");
    lines.add("text", {x: lines.X(40), y: 190, "text-anchor": "end"}, "40");
    barsOf(REWARDS.map((_, a) => ends.reduce((sum, p) => sum + p[a], 0) / 100));
    const lost = found.filter(loses).length;
    said.textContent = `${lost} of 100 walks lost C, the best action: after 40 updates its probability is below one half. Bars: the mean of all. Press again for another hundred.`;
  }
  box.append(make("div", {class: "dials"},
    toggle("baseline: subtract the expected reward", true, (baseline) => change({baseline})),
    toggle("clip the ratio at 1 ± 0.2", false, (clip) => change({clip})),
    dial("samples in an update", {min: 1, max: 30, step: 1, value: 1, digits: 0}, (n) => change({n})),
    dial("steps on the same samples", {min: 1, max: 20, step: 1, value: 1, digits: 0}, (steps) => change({steps}))),
  make("p", {class: "buttons"}, button("One update", () => sample(1)), button("Ten", () => sample(10)), button("A hundred", () => sample(100)),
    button("Start again", restart), button("A hundred walks", hundred)),
  make("div", {class: "panes"}, lines.svg, bars.svg), said);
  restart();
});
