// Three actions that earn 1, 2 and 4: sample, and watch the log-probabilities move.
const REWARDS = [1, 2, 4];

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

widget("bandit", (box) => {
  const state = {logits: [0, 0, 0], history: [], random: chance(0), actions: [], baseline: true, clip: false, n: 1, steps: 1};
  const kinds = ["third", "second", "first"], lines = new Chart("log-probability of each action", {x: [0, 40], y: [-6, 0], xlabel: "updates",
    xticks: [], yticks: [-6, -4, -2, 0]}), bars = new Chart("probability", {x: [-0.5, 2.5], y: [0, 1], xticks: [0, 1, 2],
    xtext: (a) => `action ${a}: ${REWARDS[a]}`, yticks: [0, 0.5, 1], digits: 1, xlabel: "and its reward"});
  const said = make("p", {class: "case", "aria-live": "polite"});
  function sample(times) {
    for (let k = 0; k < times; k++) {
      const p = logSoftmax(state.logits).map(Math.exp);
      state.actions = Array.from({length: state.n}, () => draw(p, state.random()));
      state.logits = improve(state.logits, state.actions, {baseline: state.baseline ? expected(state.logits) : 0, clip: state.clip ? 0.2 : null, steps: state.steps});
      state.history.push(logSoftmax(state.logits));
    }
    update();
  }
  function restart() {
    Object.assign(state, {logits: [0, 0, 0], history: [logSoftmax([0, 0, 0])], actions: [], random: chance(0)});
    update();
  }
  function update() {
    const n = state.history.length - 1, scale = Math.max(n, 40) / 40, logp = state.history[n];
    lines.clear();
    bars.clear();
    kinds.forEach((kind, a) => {
      lines.line(state.history.map((row, t) => [t / scale, row[a]]), kind);
      lines.text(Math.min(n / scale, 38.5), logp[a], String(a), {dx: 4, dy: 4});
      bars.bar(a, Math.exp(logp[a]), 50, kind);
      bars.text(a, Math.exp(logp[a]), show(Math.exp(logp[a])), {dy: -4, "text-anchor": "middle"});
    });
    lines.add("text", {x: lines.X(40), y: 190, "text-anchor": "end"}, String(Math.round(40 * scale)));
    said.textContent = n === 0 ? "Nothing sampled yet: each action has a probability of a third." :
      `After ${n} updates the expected reward is ${show(expected(state.logits))} (4 is the best). Last sampled: ${state.actions.slice(0, 12).map((a) => `action ${a}, ${REWARDS[a]}`).join("; ")}${state.actions.length > 12 ? "; …" : ""}.`;
  }
  box.append(make("div", {class: "dials"},
    toggle("baseline: subtract the expected reward", true, (on) => { state.baseline = on; restart(); }),
    toggle("clip the ratio at 1 ± 0.2", false, (on) => { state.clip = on; restart(); }),
    dial("samples in an update", {min: 1, max: 30, step: 1, value: 1, digits: 0}, (x) => { state.n = x; restart(); }),
    dial("steps on the same samples", {min: 1, max: 20, step: 1, value: 1, digits: 0}, (x) => { state.steps = x; restart(); })),
  make("p", {class: "buttons"}, button("One update", () => sample(1)), button("Ten", () => sample(10)), button("A hundred", () => sample(100)),
    button("Start again", restart)),
  make("div", {class: "panes"}, lines.svg, bars.svg), said);
  restart();
});
