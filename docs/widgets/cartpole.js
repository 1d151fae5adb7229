// The laboratory: twenty seeds learn CartPole in the page, while their poles move.

const RUNGS = {1: "REINFORCE", 2: "+ value", 3: "+ GAE", 4: "+ reuse, clip: PPO", 5: "− clip"};
const FAULTS = {       // name: what it is called, from which rung on it can be made, its line of the program, what it does
  none: ["none", 1],
  sign: ["sign of A", 1, "A = −A", "The advantage has the wrong sign: what went worse than usual becomes likelier."],
  buffer: ["state overwritten", 1, "s = s′", "The buffer keeps a reference to the environment's array, which the next step overwrites: each action is filed under the state after it."],
  broadcast: ["(N, 1) − (N)", 2, "V − R: (N, 1) − (N)", "A column minus a row is a square: whatever the state, V is drawn to the mean of all targets. PyTorch does not complain."],
  bootstrap: ["a fall is no end", 3, "V(s′) after a fall, too", "At a fall V(s′) is added, as if the episode went on: a fall costs next to nothing."],
  again: ["log π_old made again", 4, "log π_old = log π", "The old log-probabilities are computed again at every step: each ratio is 1, and nothing is ever clipped."],
  rows: ["A not shuffled along", 4, "s, a = s[rows], a[rows]; A = A[:n]", "A minibatch takes shuffled states and actions, and advantages in their old order."],
};
const SEEDS = 20, LAB = {rung: 4, eps: 0.2, lam: 0.95, rate: -2, epochs: 10, fault: "none", first: 0};
const DIALS = {eps: [0.05, 0.5, 0.05], lam: [0, 1, 0.05], rate: [-4, -1, 0.25], epochs: [1, 20, 1]};
const LIMITS = {...DIALS, rung: [1, 5], first: [0, 1e6]};
const KNOCK = 0.9;                                             // radians a second
const rateOf = (x) => +(10 ** x).toPrecision(2);
const allowed = (key, x) => key === "fault" ? Object.hasOwn(FAULTS, x) : x >= LIMITS[key][0] && x <= LIMITS[key][1];

// The program as it runs. A line is new at this rung, or wrong, or as before.
function program({rung, eps, lam, rate, epochs, fault}) {
  const reuse = rung > 3, clip = `clip(ρ, ${show(1 - eps)}, ${show(1 + eps)})`;
  const lines = [                                    // text, rung, the faults that come after it
    ["play 5 episodes: s, a, log π(a|s)", 1, "buffer"],
    rung < 3 ? [`R = r + 0.99 R′${rung < 2 ? "      A = R − mean R" : ""}`, 1, rung < 2 && "sign"] : ["δ = r + 0.99 V(s′) − V(s)", 3, "bootstrap"],
    rung === 2 && ["A = R − V(s)", 2, "sign"],
    rung > 2 && [`A = δ + 0.99 · ${show(lam)} A′      R = A + V`, 3, !reuse && "sign"],
    reuse && ["A = (A − mean A) / std A", 4, "sign"],
    reuse && [`${epochs} times, in 4 shuffled parts:`, 4, "again rows"],
    reuse && ["  ρ = exp(log π − log π_old)", 4],
    [reuse ? `  L = −mean ${rung === 4 ? `min(ρ A, ${clip} A)` : "ρ A"}` : "L = −mean(A log π)", reuse ? rung : 1],
    rung > 1 && [`${reuse ? "  " : ""}L = L + ½ mean ½ (V − R)²`, 2, "broadcast"],
    [`${reuse ? "  " : ""}a step of Adam, rate ${rateOf(rate)}`, 1],
  ].filter(Boolean).flatMap(([text, since, faults]) => {
    const [, , wrong] = FAULTS[fault], inside = /^ |times/.test(text) ? "  " : "";
    return [[text, since === rung && rung > 1 && "new"], ...faults && faults.split(" ").includes(fault) ? [[inside + wrong, "fault"]] : []];
  });
  return lines.map(([text, kind]) => make("code", {class: kind}, text));
}

// Twenty poles on one track, each held by its own policy as it stands; one of them is the reader's.
class Track {
  constructor(lab, choose) {
    Object.assign(this, {lab, random: chance(Date.now() % 1e9), chosen: 0, last: 0});
    this.svg = make("svg:svg", {viewBox: "0 0 400 226", role: "img", "aria-label": "twenty carts with their poles on one track", class: "track"},
      make("svg:text", {x: 20, y: 14, class: "title"}, "twenty policies as they learn"),
      make("svg:path", {class: "axis", d: `M${this.X(-2.4)} 178 v16 m0 -8 H${this.X(2.4)} m0 -8 v16`}));
    this.carts = Array.from({length: SEEDS}, (_, i) => {
      const pole = make("svg:line", {x1: 0, y1: 0, x2: 0, y2: -130}), body = make("svg:rect", {x: -21, y: -1, width: 42, height: 17, rx: 4});
      const g = make("svg:g", {class: "cart", onclick: () => choose(i)}, body, pole, make("svg:circle", {cy: 1, r: 3}));
      this.svg.append(g);
      return {g, pole, s: lab.start(this.random), steps: 0, fallen: 0};
    });
    this.counter = make("svg:text", {x: 200, y: 214, "text-anchor": "middle"});
    this.svg.append(this.counter);
    this.pick(0);
  }
  X(x) { return 200 + 74 * Math.max(-2.5, Math.min(2.5, x)); }
  pick(i) {
    this.carts[this.chosen].g.classList.remove("chosen");
    this.carts[this.chosen = i].g.classList.add("chosen");
    this.counter.before(this.carts[i].g);                    // in front of the others
    this.draw();
  }
  // A knock at each pole, to one side: what has learned to balance takes it.
  knock() {
    const side = this.random() < 0.5 ? -KNOCK : KNOCK;
    for (const c of this.carts) if (!c.fallen) c.s[3] += side;
  }
  // A fiftieth of a second of each cart. A pole that has fallen sinks to the ground, and begins anew.
  tick() {
    for (const c of this.carts) {
      if (!c.fallen) {
        c.steps++;
        c.fallen = +this.lab.push(c.s, +(this.random() < 1 / (1 + Math.exp(-this.lab.odds(c.w, c.s)))));
      } else if (c.fallen++ < 40 && Math.abs(c.s[2]) < 1.5) {
        c.s[3] += 0.35 * Math.sign(c.s[2]);
        c.s[2] += 0.02 * c.s[3];
      } else Object.assign(c, {s: this.lab.start(this.random), steps: 0, fallen: 0});
    }
  }
  draw() {
    for (const {g, pole, s, fallen} of this.carts) {
      g.setAttribute("transform", `translate(${this.X(s[0]).toFixed(1)} 170)`);
      pole.setAttribute("transform", `rotate(${(s[2] * 180 / Math.PI).toFixed(1)})`);
      g.classList.toggle("fallen", fallen > 0);
    }
    this.counter.textContent = `upright for ${this.carts[this.chosen].steps} steps`;
  }
  move(on) {
    const frame = (time) => {
      if (!this.moving) return;
      const ticks = Math.min(5, Math.floor((time - this.last) / 20));
      for (let i = 0; i < ticks; i++) this.tick();
      if (ticks) this.draw();
      this.last = ticks === 5 ? time : this.last + 20 * ticks;
      requestAnimationFrame(frame);
    };
    if (on && !this.moving) requestAnimationFrame((time) => { this.last = time; frame(time); });
    this.moving = on;
  }
}

function median(x) {
  const sorted = [...x].sort((a, b) => a - b), n = sorted.length;
  return (sorted[(n - 1) >> 1] + sorted[n >> 1]) / 2;
}

widget("cartpole", (box) => {
  const lab = cartpole(chance), state = {...LAB}, episodes = {x: [0, 150], xlabel: "episodes", xticks: [0, 50, 100, 150]};
  let runs = [], workers = [], before = null, running = null, chosen = 0, frame = null, later = null;

  const curves = new Chart("steps before the pole falls, mean of five episodes", {...episodes, y: [0, 500], yticks: [0, 100, 200, 300, 400, 500], width: 400, height: 226});
  const small = {width: 260, height: 170};
  const ratio = new Chart("ratio ρ after the last update", {x: [0, 2], y: [0, 1], xticks: [0, 0.5, 1, 1.5, 2], xtext: (v) => v === 2 ? "≥ 2" : String(v), xlabel: "of how many actions", ...small});
  const kl = new Chart("KL of each update, nats", {...episodes, y: [-5, 1], yticks: [-4, -3, -2, -1, 0, 1], ytext: (v) => ["10⁻⁴", "10⁻³", "0.01", "0.1", "1", "10"][v + 4], ...small});
  const explained = new Chart("variance of R that V explains", {...episodes, y: [-1, 1], yticks: [-1, 0, 1], ...small});
  const track = new Track(lab, pick), code = make("pre", {class: "program", tabindex: 0, role: "region", "aria-label": "the program as it runs"});
  const told = make("p", {class: "told", "aria-live": "polite"}), why = make("p", {class: "why", "aria-live": "polite"}), key = make("p", {class: "key"});
  const link = make("a", {}, "link to these settings");

  // The policies before their first update.
  function untrained() {
    runs = Array.from({length: SEEDS}, (_, i) => ({w: lab.weights(chance(state.first + i)), lengths: [], kls: [], explained: []}));
    runs.forEach(({w}, i) => { track.carts[i].w = w; });
  }
  function stop() {
    while (workers.length) workers.pop().terminate();
    if (medians().length === lab.UPDATES) before = {line: medians(), name: running};
  }
  function start() {
    stop();
    running = RUNGS[state.rung].replace("− clip", "PPO without its clip").replace(/.*: /, "") + (state.fault === "none" ? "" : `, ${FAULTS[state.fault][0]}`);
    train.textContent = "Train again";
    untrained();
    const text = `${chance}\nconst lab = (${cartpole})(chance);\nonmessage = ({data}) => lab.race(data, postMessage);`;
    const url = URL.createObjectURL(new Blob([text], {type: "text/javascript"})), many = Math.max(1, Math.min(4, (navigator.hardwareConcurrency || 2) - 1));
    workers = Array.from({length: many}, (_, k) => {
      const worker = new Worker(url);
      worker.onmessage = ({data}) => hear(data);
      worker.postMessage({settings: {...state, rate: rateOf(state.rate)}, seeds: runs.map((_, i) => state.first + i).filter((_, i) => i % many === k)});
      return worker;
    });
    soon();
  }
  function hear({seed, greedy, w, length, kl, explained, ratios}) {
    const i = seed - state.first, run = runs[i];
    if (greedy !== undefined) run.greedy = greedy;
    else {
      Object.assign(run, {w, ratios});
      run.lengths.push(length); run.kls.push(kl); run.explained.push(explained);
      track.carts[i].w = w;
    }
    soon();
  }
  function medians() {
    const n = Math.min(...runs.map(({lengths}) => lengths.length));
    return Array.from({length: n}, (_, u) => median(runs.map(({lengths}) => lengths[u])));
  }

  function soon() { frame ??= requestAnimationFrame(() => { frame = null; update(); }); }
  function update() {
    const run = runs[chosen], points = (y) => y.map((v, u) => [u * lab.EPISODES, v]);
    curves.clear();
    if (before) curves.line(points(before.line), "before");
    if (!running) curves.text(75, 250, "Train: twenty seeds learn here, in your browser", {"text-anchor": "middle"});
    runs.forEach(({lengths}, i) => { if (i !== chosen) curves.line(points(lengths), "thin").addEventListener("click", () => pick(i)); });
    curves.line(points(medians()), "middle");
    curves.line(points(run.lengths), "first");
    kl.clear().line(points(run.kls.map((x) => Math.log10(Math.max(x, 1e-5)))), "first");
    explained.clear().line([[0, 0], [150, 0]], "axis");
    if (state.rung > 1) explained.line(points(run.explained), "first");
    else explained.text(75, 0.4, "there is no V yet", {"text-anchor": "middle"});
    histogram(run.ratios ?? []);
    key.replaceChildren(make("span", {class: "first"}, `seed ${state.first + chosen}`), make("span", {class: "middle"}, "median of twenty"), ...before ? [make("span", {class: "before"}, `median before: ${before.name}`)] : []);
    told.textContent = sentence(medians());
  }
  function histogram(ratios) {
    const {rung, eps} = state, counts = new Array(41).fill(0);
    ratio.clear();
    if (rung === 4) ratio.add("rect", {class: "band", x: ratio.X(1 - eps), width: ratio.X(1 + eps) - ratio.X(1 - eps), y: 22, height: 114});
    for (const r of ratios) counts[Math.min(40, Math.round(20 * r))]++;
    const most = Math.max(...counts);
    counts.forEach((n, i) => { if (n) ratio.bar(i / 20, n / most, 4.5, rung > 3 && Math.abs(i / 20 - 1) > eps + 1e-9 ? "second" : "first"); });
  }
  function sentence(middle) {
    const done = runs.filter(({greedy}) => greedy !== undefined), held = done.filter(({greedy}) => greedy === lab.LIMIT);
    if (!running) return "Twenty policies that know nothing yet. All they are told is a point for each step that the pole stands. Press Train: PPO takes about twenty seconds, the others less.";
    if (done.length < SEEDS) return `Update ${middle.length} of ${lab.UPDATES}: the median is ${show(middle.at(-1) ?? 0, 0)} steps.`;
    return `The last 50 episodes: ${show(median(runs.map(({lengths}) => lengths.slice(-10).reduce((a, b) => a + b) / 10)), 0)} steps, the median of twenty seeds. ` +
      `Always taking the likelier action, ${held.length} of ${SEEDS} hold the pole for all ${lab.LIMIT} steps, ten times in a row.${state.fault === "none" && held.length > SEEDS / 2 ? " Now push them." : ""}`;
  }
  function pick(i) { chosen = i; seed.set(i); track.pick(i); soon(); }

  function set(changes) {
    Object.assign(state, changes);
    if (state.rung < FAULTS[state.fault][1]) state.fault = "none";
    rungs.set(state.rung); faults.set(state.fault);
    for (const key in DIALS) dials[key].set(state[key]);
    dials.eps.inert = state.rung !== 4; dials.lam.inert = state.rung < 3; dials.epochs.inert = state.rung < 4;
    for (const input of faults.inputs) input.disabled = state.rung < FAULTS[input.value][1];
    seed.set(chosen);
    code.replaceChildren(...program(state));
    why.textContent = FAULTS[state.fault][3] ?? "";
    link.href = toLink("cartpole", state);
    if (running) stop();
    if ("first" in changes) untrained();
    if (running) {                                           // once it was asked for, each change trains anew
      history.replaceState(null, "", link.href);
      clearTimeout(later);
      later = setTimeout(start, 300);
    }
    soon();
  }
  const knob = (label, key, more = {}) => dial(label, {min: DIALS[key][0], max: DIALS[key][1], step: DIALS[key][2], value: state[key], ...more}, (x) => set({[key]: x}));
  const dials = {eps: knob("clip ε", "eps"), lam: knob("λ", "lam"), rate: knob("learning rate", "rate", {text: (x) => String(rateOf(x))}), epochs: knob("epochs", "epochs", {digits: 0})};
  const rungs = choice("program", RUNGS, state.rung, (x) => set({rung: +x}));
  const faults = choice("plant a fault", Object.fromEntries(Object.entries(FAULTS).map(([name, [text]]) => [name, text])), state.fault, (x) => set({fault: x}));
  const seed = dial("seed", {min: 0, max: SEEDS - 1, step: 1, value: 0, text: (i) => String(state.first + i)}, pick);
  const train = button("Train", start, {class: "go"}), push = button("Push", () => { track.knock(); moving.firstChild.checked = true; track.move(true); }, {class: "knock"}), others = button("Other seeds", () => { set({first: state.first + SEEDS}); if (!running) start(); });
  const moving = toggle("moving", !matchMedia("(prefers-reduced-motion: reduce)").matches, (on) => track.move(on));

  box.classList.add("lab");
  const brief = "brief" in box.dataset, panes = make("div", {class: "panes"},
    make("div", {}, track.svg, make("div", {class: "dials"}, train, push, seed, moving)), make("div", {}, curves.svg, key), told);
  box.append(...brief ? [panes, rungs] : [rungs, panes],       // on the front page the poles come first
    make("details", {class: "more", open: !brief}, make("summary", {}, "the program, its dials, its faults"),
      make("div", {class: "panes"}, make("div", {}, code), make("div", {}, make("div", {class: "dials column"}, Object.values(dials)), faults, why)),
      make("div", {class: "panes small"}, [ratio, kl, explained].map(({svg}) => make("div", {}, svg))),
      make("p", {class: "foot"}, others, link)));
  function linked() {
    const asked = fromLink("cartpole", LAB, allowed);
    if (!asked) return;
    set(asked);
    box.scrollIntoView();
  }
  untrained();
  set({});
  linked();
  window.addEventListener("hashchange", linked);
  new IntersectionObserver(([{isIntersecting}]) => track.move(isIntersecting && moving.querySelector("input").checked)).observe(track.svg);
});
