// What the widgets share: elements, dials, charts and chance. No library, no network.

// make("p", {class: "case", onclick: f}, "text", another): an element; with "svg:" before its name one of a drawing.
function make(name, attributes = {}, ...children) {
  const e = name.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) e.addEventListener(key.slice(2), value);
    else if (key === "value") e.value = value;
    else if (value !== false && value != null) e.setAttribute(key, value === true ? "" : value);
  }
  e.append(...children.flat());
  return e;
}

// Start a widget where a page has a place for it; the picture before it is then for paper alone.
function widget(name, build) {
  window.addEventListener("DOMContentLoaded", () => {
    const box = document.querySelector(`[data-widget=${name}]`);
    if (!box) return;
    let before = box.previousElementSibling;
    while (before && !before.querySelector(".cell_output")) before = before.previousElementSibling;
    before?.querySelector(".cell_output").classList.add("on-paper");
    build(box);
    box.hidden = false;
  });
}

const show = (x, digits = 2) => x.toFixed(digits).replace(/^-(?=[0.]*$)/, "").replace("-", "−");

// A slider with its label and its value; `change(value)` at each move.
function dial(label, {min, max, step, value, digits = 2, text = (x) => show(x, digits)}, change) {
  const out = make("output", {}, text(value));
  const input = make("input", {type: "range", min, max, step, oninput: () => { out.textContent = text(+input.value); change(+input.value); }});
  input.value = value;
  const e = make("label", {class: "dial"}, make("span", {}, label), input, out);
  e.set = (x) => { input.value = x; out.textContent = text(+input.value); };
  return e;
}

function toggle(label, checked, change) {
  const input = make("input", {type: "checkbox", onchange: () => change(input.checked)});
  input.checked = checked;
  return make("label", {class: "toggle"}, input, " " + label);
}

// One of several, `options` as {name: text}: a row of buttons that the arrow keys go through.
function choice(legend, options, value, change) {
  const inputs = Object.entries(options).map(([name, text]) => {
    const input = make("input", {type: "radio", name: legend, value: name, onchange: () => change(name)});
    input.checked = name === String(value);
    return make("label", {}, input, make("span", {}, text));
  });
  const e = make("fieldset", {class: "choice"}, make("legend", {}, legend), make("div", {class: "options"}, inputs));
  e.inputs = inputs.map((label) => label.firstChild);
  e.set = (name) => { for (const input of e.inputs) input.checked = input.value === String(name); };
  return e;
}

// One of several, as a list that opens.
function menu(label, options, value, change) {
  const e = make("label", {class: "dial"}, make("span", {}, label)), list = make("select", {onchange: () => change(list.value)},
    Object.entries(options).map(([name, text]) => make("option", {value: name}, text)));
  e.append(list);
  e.set = (name) => { list.value = name; };
  e.set(value);
  return e;
}

const entry = (value, change, attributes) => make("input", {type: "number", step: 0.1, value, oninput: (e) => change(+e.target.value), ...attributes});

// A table whose rows `fill` puts into it.
const row = (head, cells) => make("tr", {}, make("th", {scope: "row"}, head), cells);
function table(heads, rows = [], attributes = {}) {
  const body = make("tbody", {}, rows), e = make("table", attributes, make("thead", {}, make("tr", {}, heads.map((head) => make("th", {scope: "col"}, head)))), body);
  e.fill = (rows) => body.replaceChildren(...rows);
  return e;
}

// Settings that a link carries, #name:key=value&...: the defaults, but for what `allowed(key, value)`; null without such a link.
function fromLink(name, defaults, allowed) {
  const [at, text = ""] = location.hash.slice(1).split(":"), found = {...defaults};
  if (at !== name) return null;
  for (const [key, value] of new URLSearchParams(text)) {
    const x = typeof defaults[key] === "number" ? parseFloat(value) : value;
    if (Object.hasOwn(defaults, key) && allowed(key, x)) found[key] = x;
  }
  return found;
}
const toLink = (name, settings) => `#${name}:${new URLSearchParams(settings)}`;

const button = (text, click, attributes = {}) => make("button", {type: "button", onclick: click, ...attributes}, text);

// A drawing with axes: `x` and `y` are [low, high], ticks are numbers. X and Y turn numbers into places.
class Chart {
  constructor(label, {x, y, xlabel = "", xticks = [], yticks = [], xtext = String, ytext, width = 340, height = 210, digits = 0}) {
    const [left, top, right, bottom] = [42, 22, width - 12, height - 34];
    this.X = (v) => left + (v - x[0]) / (x[1] - x[0]) * (right - left);
    this.Y = (v) => bottom - (Math.min(Math.max(v, y[0]), y[1]) - y[0]) / (y[1] - y[0]) * (bottom - top);
    this.x = x;
    this.value = (place) => x[0] + (place - left) / (right - left) * (x[1] - x[0]);
    this.width = width;
    this.marks = make("svg:g");
    this.title = make("svg:text", {x: left, y: 14, class: "title"}, label);
    this.svg = make("svg:svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label}, this.title,
      yticks.map((v) => [make("svg:line", {class: "grid", x1: left, x2: right, y1: this.Y(v), y2: this.Y(v)}),
        make("svg:text", {x: left - 5, y: this.Y(v) + 4, "text-anchor": "end"}, ytext?.(v) ?? show(v, digits))]).flat(),
      xticks.map((v) => make("svg:text", {x: this.X(v), y: bottom + 15, "text-anchor": "middle"}, xtext(v))),
      make("svg:text", {x: (left + right) / 2, y: height - 4, "text-anchor": "middle"}, xlabel), this.marks);
  }
  clear() { this.marks.replaceChildren(); return this; }
  add(name, attributes, ...children) { const e = make(`svg:${name}`, attributes, ...children); this.marks.append(e); return e; }
  line(points, kind) {
    return this.add("polyline", {class: `line ${kind}`, points: points.map(([a, b]) => `${this.X(a).toFixed(1)},${this.Y(b).toFixed(1)}`).join(" ")});
  }
  bar(at, value, width, kind = value < 0 ? "second" : "first") {
    const [a, b] = [this.Y(0), this.Y(value)];
    return this.add("rect", {class: kind, x: this.X(at) - width / 2, width, y: Math.min(a, b), height: Math.max(Math.abs(a - b), 0.5)});
  }
  text(at, value, text, attributes = {}) { return this.add("text", {x: this.X(at), y: this.Y(value), ...attributes}, text); }
}

// Numbers from 0 to 1 that follow from a seed (mulberry32).
function chance(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

function draw(probabilities, u) {
  let i = 0;
  for (let sum = probabilities[0]; sum <= u && i < probabilities.length - 1;) sum += probabilities[++i];
  return i;
}

function logSoftmax(z) {
  const top = Math.max(...z), sum = Math.log(z.reduce((s, x) => s + Math.exp(x - top), 0)) + top;
  return Array.from(z, (x) => x - sum);
}
