// A sheet of four steps: rewards and values are typed in, advantages follow from the right.

// `end` is "terminated", "truncated" or "goes on"; `last` is the value of the observation after the last step.
function gae(rewards, values, {gamma, lam, end = "terminated", last = 0}) {
  const bootstrap = end === "terminated" ? 0 : last;
  const next = [...values.slice(1), bootstrap], advantages = [];
  const deltas = rewards.map((r, t) => r + gamma * next[t] - values[t]);
  let A = 0;
  for (const delta of [...deltas].reverse()) advantages.unshift(A = delta + gamma * lam * A);
  return {next, deltas, advantages, targets: advantages.map((a, t) => a + values[t])};
}

widget("gae", (box) => {
  const state = {rewards: [0, 0, 0, 1], values: [0.5, 0.8, 0.2, 0.9], gamma: 1, lam: 0.95, end: "terminated", last: 0.5};
  const steps = [0, 1, 2, 3], set = (changes) => { Object.assign(state, changes); update(); };
  const typed = (name) => steps.map((t) => make("td", {}, entry(state[name][t], (x) => { state[name][t] = x; update(); }, {"aria-label": `${name} of step ${t}`})));
  const outputs = {next: "V(next)", deltas: "δ", advantages: "A", targets: "A + V"}, cells = {}, panes = make("div", {class: "panes"}), recursion = make("ol", {class: "recursion"});
  const sheet = table(["step", ...steps], [row("r", typed("rewards")), row("V", typed("values")),
    ...Object.entries(outputs).map(([name, head]) => row(head, cells[name] = steps.map(() => make("td"))))]);
  const after = make("label", {class: "dial"}, make("span", {}, "V after the end"), entry(state.last, (last) => set({last})));
  function bars(label, values) {
    const most = Math.max(1, ...values.map(Math.abs)), y = [-1.5 * most, 1.5 * most];
    const chart = new Chart(label, {x: [-0.5, 3.5], y, xticks: steps, xlabel: "step", yticks: [-most, 0, most], digits: most > 1 ? 1 : 0, height: 170});
    chart.line([[-0.5, 0], [3.5, 0]], "axis");
    values.forEach((x, t) => {
      chart.bar(t, x, 40);
      chart.text(t, x, show(x), {dy: x < 0 ? 13 : -4, "text-anchor": "middle"});
    });
    return chart.svg;
  }
  function update() {
    const found = gae(state.rewards, state.values, state), {gamma, lam} = state, {deltas, advantages} = found;
    for (const name in outputs) cells[name].forEach((td, t) => { td.textContent = show(found[name][t]); });
    panes.replaceChildren(bars("surprise δ", deltas), bars("advantage A", advantages));
    after.hidden = state.end === "terminated";
    recursion.replaceChildren(...[...steps].reverse().map((t) => make("li", {}, t === 3 ? `A₃ = δ₃ = ${show(deltas[3])}` :
      `A${"₀₁₂₃"[t]} = δ${"₀₁₂₃"[t]} + γλ A${"₀₁₂₃"[t + 1]} = ${show(deltas[t])} + ${show(gamma * lam)} · ${show(advantages[t + 1])} = ${show(advantages[t])}`)));
  }
  box.append(make("div", {class: "dials"},
    dial("λ", {min: 0, max: 1, step: 0.05, value: state.lam}, (lam) => set({lam})),
    dial("γ", {min: 0, max: 1, step: 0.05, value: state.gamma}, (gamma) => set({gamma})),
    menu("it ends", {terminated: "terminated: nothing can follow", truncated: "truncated: the clock ran out",
      "goes on": "the rollout stops, the episode goes on"}, state.end, (end) => set({end})), after),
  make("div", {class: "table"}, sheet), panes, make("p", {}, "The recursion, from the right:"), recursion);
  update();
});
