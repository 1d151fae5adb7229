// One action's ratio over the clip's curve, for a good and for a bad one.

function clippedSurrogate(ratio, advantage, eps = 0.2, dual = null) {
  const held = advantage >= 0 ? Math.min(ratio, 1 + eps) : Math.min(Math.max(ratio, 1 - eps), dual ?? Infinity);
  return advantage * held;
}

// Its slope: the advantage, or 0 beyond a bound.
function clippedSlope(ratio, advantage, eps = 0.2, dual = null) {
  const stopped = advantage >= 0 ? ratio > 1 + eps : ratio < 1 - eps || ratio > (dual ?? Infinity);
  return stopped ? 0 : advantage;
}

const CASES = {
  good: {
    below: ["good, but rarer than before", "The policy moved the wrong way. The full gradient leads it back up."],
    inside: ["good, and within the range", "Make it likelier: the gradient is the advantage."],
    above: ["good, and already likelier", "Clipped: the gradient is 0, and nothing more is earned by going on."],
  },
  bad: {
    below: ["bad, and already rarer", "Clipped: the gradient is 0, and nothing more is earned by going on."],
    inside: ["bad, and within the range", "Make it rarer: the gradient is the advantage."],
    above: ["bad, but likelier than before", "The policy moved the wrong way. The full gradient leads it back down."],
    far: ["bad, and beyond the dual clip", "The loss would grow without end; the dual clip holds it, and the gradient is 0."],
  },
};

function caseOf(ratio, advantage, eps, dual) {
  if (advantage < 0 && dual && ratio > dual) return CASES.bad.far;
  return CASES[advantage < 0 ? "bad" : "good"][ratio < 1 - eps ? "below" : ratio > 1 + eps ? "above" : "inside"];
}

widget("clip", (box) => {
  const MAX = 2.5, state = {ratio: 1.1, eps: 0.2, dual: null};
  const panels = [1, -1].map((A) => {
    const chart = new Chart(A > 0 ? "a good action, A = 1" : "a bad action, A = −1", {x: [0, MAX], y: A > 0 ? [0, 2.5] : [-2.5, 0],
      xlabel: "ratio ρ", xticks: [0, 0.5, 1, 1.5, 2, 2.5], yticks: A > 0 ? [0, 1, 2] : [-2, -1, 0]});
    const text = make("p", {class: "case", "aria-live": "polite"});
    const drag = (e) => {
      if (e.type === "pointermove" && !e.buttons) return;
      const place = chart.svg.getBoundingClientRect();
      set({ratio: Math.min(Math.max(chart.value((e.clientX - place.left) / place.width * chart.width), 0), MAX)});
    };
    chart.svg.addEventListener("pointerdown", (e) => { chart.svg.setPointerCapture(e.pointerId); drag(e); });
    chart.svg.addEventListener("pointermove", drag);
    chart.svg.classList.add("drag");
    return {A, chart, text};
  });
  const ratio = dial("ratio ρ", {min: 0, max: MAX, step: 0.01, value: state.ratio}, (x) => set({ratio: x}));
  function set(changes) {
    Object.assign(state, changes);
    ratio.set(state.ratio);
    const {ratio: r, eps, dual} = state;
    for (const {A, chart, text} of panels) {
      const L = clippedSurrogate(r, A, eps, dual), slope = clippedSlope(r, A, eps, dual), [name, why] = caseOf(r, A, eps, dual);
      chart.clear();
      chart.add("rect", {class: "band", x: chart.X(1 - eps), width: chart.X(1 + eps) - chart.X(1 - eps), y: 22, height: 154});
      chart.line([[0, 0], [MAX, MAX * A]], "faint");
      chart.line([0, 1 - eps, 1 + eps, dual ?? MAX, MAX].map((x) => [x, clippedSurrogate(x, A, eps, dual)]), A > 0 ? "first" : "second");
      if (slope) {
        const to = r + 0.4 * Math.sign(A), tip = chart.X(to) - 7 * Math.sign(A);
        chart.add("path", {class: "arrow", d: `M${chart.X(r)} ${chart.Y(L)} H${tip} m0 -4 L${chart.X(to)} ${chart.Y(L)} l${-7 * Math.sign(A)} 4`});
      }
      chart.add("circle", {class: "dot", cx: chart.X(r), cy: chart.Y(L), r: 7});
      text.replaceChildren(make("b", {}, name), `: L = ${show(L)}, gradient ${show(slope, 0)}. ${why}`);
    }
  }
  box.append(make("div", {class: "dials"}, ratio,
    dial("clip range ε", {min: 0.05, max: 0.5, step: 0.05, value: state.eps}, (x) => set({eps: x})),
    toggle("dual clip, c = 2", false, (on) => set({dual: on ? 2 : null}))),
  make("div", {class: "panes"}, panels.map(({chart, text}) => make("div", {}, chart.svg, text))));
  set({});
});
