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
  const steps = [0, 1, 2, 3], charts = ["surprise δ", "advantage A"].map((name) => new Chart(name, {x: [-0.5, 3.5], y: [-1.5, 1.5],
    xticks: steps, xlabel: "step", yticks: [-1, 0, 1], height: 170}));
  const cell = (name, t) => make("td", {}, make("input", {type: "number", step: 0.1, "aria-label": `${name} of step ${t}`, value: state[name][t],
    oninput: (e) => { state[name][t] = +e.target.value; update(); }}));
  const outputs = {next: "V(next)", deltas: "δ", advantages: "A", targets: "A + V"}, cells = {}, recursion = make("ol", {class: "recursion"});
  const row = (head, tds) => make("tr", {}, make("th", {scope: "row"}, head), tds);
  const table = make("table", {}, make("thead", {}, make("tr", {}, make("th", {scope: "col"}, "step"), steps.map((t) => make("th", {scope: "col"}, String(t))))),
    make("tbody", {}, row("r", steps.map((t) => cell("rewards", t))), row("V", steps.map((t) => cell("values", t))),
      Object.entries(outputs).map(([name, head]) => row(head, cells[name] = steps.map(() => make("td"))))));
  const after = make("label", {class: "dial"}, make("span", {}, "V after the end"), make("input", {type: "number", step: 0.1, value: state.last,
    oninput: (e) => { state.last = +e.target.value; update(); }}));
  function update() {
    const found = gae(state.rewards, state.values, state), {gamma, lam} = state;
    for (const name in outputs) cells[name].forEach((td, t) => { td.textContent = show(found[name][t]); });
    charts.forEach((chart, i) => {
      chart.clear().line([[-0.5, 0], [3.5, 0]], "axis");
      found[i ? "advantages" : "deltas"].forEach((x, t) => {
        chart.bar(t, x, 40);
        chart.text(t, x, show(x), {dy: x < 0 ? 13 : -4, "text-anchor": "middle"});
      });
    });
    after.hidden = state.end === "terminated";
    recursion.replaceChildren(...[...steps].reverse().map((t) => make("li", {}, t === 3 ? `A₃ = δ₃ = ${show(found.deltas[3])}` :
      `A${"₀₁₂₃"[t]} = δ${"₀₁₂₃"[t]} + γλ A${"₀₁₂₃"[t + 1]} = ${show(found.deltas[t])} + ${show(gamma * lam)} · ${show(found.advantages[t + 1])} = ${show(found.advantages[t])}`)));
  }
  const ends = make("select", {onchange: (e) => { state.end = e.target.value; update(); }}, Object.entries({
    terminated: "terminated: nothing can follow", truncated: "truncated: the clock ran out", "goes on": "the rollout stops, the episode goes on"})
    .map(([value, text]) => make("option", {value}, text)));
  box.append(make("div", {class: "dials"},
    dial("λ", {min: 0, max: 1, step: 0.05, value: state.lam}, (x) => { state.lam = x; update(); }),
    dial("γ", {min: 0, max: 1, step: 0.05, value: state.gamma}, (x) => { state.gamma = x; update(); }),
    make("label", {class: "dial"}, make("span", {}, "it ends"), ends), after),
  make("div", {class: "table"}, table), make("div", {class: "panes"}, charts.map((c) => c.svg)),
  make("p", {}, "The recursion, from the right:"), recursion);
  update();
});
