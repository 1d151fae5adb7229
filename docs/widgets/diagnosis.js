// The game of diagnosis: recorded trainings with one thing wrong each, and four answers.

widget("diagnosis", (box) => {
  const state = {at: 0, tried: new Set(), right: 0, asked: 0};
  const title = make("p", {class: "case"}), panes = make("div", {class: "panes small"}), answers = make("div", {class: "answers"});
  const verdict = make("p", {class: "case", "aria-live": "polite"}), score = make("p");
  const which = menu("which training", DIALS.cases.map((_, i) => `case ${i + 1}`), DIALS.start, (i) => open(+i));

  function picture({name, here, told}, band) {
    const values = [...band.low, ...band.high, ...here].filter((x) => x !== null), low = Math.min(...values), high = Math.max(...values);
    const room = 0.05 * (high - low) || 1, digits = high - low > 20 ? 0 : high - low > 2 ? 1 : high - low > 0.2 ? 2 : 3;
    const chart = new Chart(name, {x: [1, band.low.length], y: [low - room, high + room], yticks: [low, high], digits, xticks: [1, band.low.length],
      xlabel: "iteration", width: 260, height: 130});
    const edge = [...band.high.map((y, t) => [t + 1, y]), ...band.low.map((y, t) => [t + 1, y]).reverse()];
    chart.line(edge, "band");
    chart.line(here.map((y, t) => [t + 1, y]).filter(([, y]) => y !== null), "second");
    chart.svg.setAttribute("aria-label", `${name}: intact trainings end between ${band.low[band.low.length - 1]} and ${band.high[band.high.length - 1]}, this one at ${here[here.length - 1]}`);
    if (told) chart.svg.dataset.told = "";
    return chart.svg;
  }
  function open(at) {
    const now = DIALS.cases[at];
    Object.assign(state, {at, tried: new Set()});
    which.set(at);
    title.replaceChildren(make("b", {}, `${now.kind}, with one thing wrong.`), " The band: intact trainings; the line: this one. Which fault is it?");
    panes.replaceChildren(...now.dials.map((d) => picture(d, DIALS.bands[now.base][d.name])));
    panes.classList.remove("told");
    answers.replaceChildren(...now.answers.map((a, i) => button(`${"abcd"[i]}  ${a.name}: ${a.what}`, (e) => answer(i, e.target))));
    verdict.textContent = "";
  }
  function answer(i, pressed) {
    const {right, told} = DIALS.cases[state.at].answers[i];
    if (state.tried.has(i)) return;
    if (!state.tried.size) { state.asked++; state.right += right; }
    state.tried.add(i);
    verdict.textContent = told;
    pressed.className = right ? "right" : "wrong";
    if (right) {
      panes.classList.add("told");
      answers.querySelectorAll("button").forEach((b) => { b.disabled = b !== pressed; });
      DIALS.cases[state.at].answers.forEach((_, j) => state.tried.add(j));
    }
    score.textContent = `Right at once: ${state.right} of ${state.asked}.`;
  }
  box.append(make("div", {class: "dials"}, which, button("Next", () => open((state.at + 1) % DIALS.cases.length))), title, panes, answers, verdict, score);
  open(DIALS.start);
});
