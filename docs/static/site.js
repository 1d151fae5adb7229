// A formula that is wider than its box is made smaller (site.css), but stays legible; so is a table on a wide screen.
function fit() {
  document.querySelectorAll("mjx-container[display='true'] > svg[width$='ex']").forEach((formula) => {
    formula.style.minWidth ||= `${0.6 * parseFloat(formula.getAttribute("width"))}ex`;
  });
  document.querySelectorAll(".table-wrapper > table").forEach((table) => {
    table.style.fontSize = "";
    const room = table.parentElement.clientWidth / table.scrollWidth;
    if (innerWidth > 736 && room > 0 && room < 1) table.style.fontSize = `${Math.floor(100 * Math.max(0.75, room)) - 1}%`;
  });
}

// What scrolls within itself can be scrolled with the keyboard, too, and has a shadow that says so.
function reachable() {
  fit();
  document.querySelectorAll("pre, .table-wrapper, .cell_output, .cell_output .output, div.math, mjx-container[display='true'], .panels, [data-slider] > [role=img]").forEach((box) => {
    box.classList.toggle("scrolls", box.scrollWidth > box.clientWidth + 1);
    if (box.scrollWidth > box.clientWidth + 1) { if (!box.hasAttribute("tabindex")) { box.tabIndex = 0; box.dataset.reachable = ""; } }
    else if ("reachable" in box.dataset) { box.removeAttribute("tabindex"); delete box.dataset.reachable; }
  });
}
window.addEventListener("load", () => (window.MathJax?.startup?.promise ?? Promise.resolve()).then(reachable));
window.addEventListener("resize", reachable);
document.addEventListener("toggle", reachable, true);
document.addEventListener("input", () => requestAnimationFrame(reachable));      // another frame of a slider

// A table of many columns with sentences in them can become cards.
window.addEventListener("DOMContentLoaded", () => document.querySelectorAll("article > section table.docutils").forEach((table) => {
  const columns = [...table.querySelectorAll("thead th")].map((th) => th.textContent), cells = [...table.querySelectorAll("td")];
  if (columns.length < 4 || !cells.some((td) => td.textContent.length > 40)) return;
  table.classList.add("cards");
  for (const td of cells) if (td.textContent.trim()) td.dataset.column = columns[td.cellIndex];
}));

// A link into a fold opens it; on paper everything is open.
function unfold() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  const own = target.querySelector(":scope > details.fold.section");
  for (let box = own ?? target.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
  target.scrollIntoView();
}
window.addEventListener("DOMContentLoaded", unfold);
window.addEventListener("hashchange", unfold);
window.addEventListener("beforeprint", () => document.querySelectorAll("details:not([open], .hide)").forEach((d) => { d.open = true; d.dataset.closed = ""; }));
window.addEventListener("afterprint", () => document.querySelectorAll("details[data-closed]").forEach((d) => { d.open = false; delete d.dataset.closed; }));

// Which exercises are done is kept in this browser.
window.addEventListener("DOMContentLoaded", () => document.querySelectorAll("[data-exercise]").forEach((place) => {
  const name = `exercise-${place.dataset.exercise}`, box = document.createElement("input");
  Object.assign(box, {type: "checkbox", ariaLabel: `${place.dataset.exercise} is done`, checked: localStorage[name] === "done"});
  box.addEventListener("change", () => { if (box.checked) localStorage[name] = "done"; else delete localStorage[name]; });
  place.append(box);
}));

// A path of the front page, once taken, is what "Next" and "Previous" follow, and stands on top of each of its pages.
function take(path) {
  const name = path.querySelector("em").textContent, row = [...path.parentElement.children].indexOf(path);
  sessionStorage.path = JSON.stringify({name, row, steps: [...path.querySelectorAll("a")].map((a) => [a.href, a.textContent])});
}
function follow() {
  const here = location.href.replace(/[?#].*/, ""), paths = document.querySelectorAll("#three-paths li");
  paths.forEach((path) => path.addEventListener("click", () => take(path)));
  document.querySelector("a.go")?.addEventListener("click", () => take(paths[0]));
  const {name, row, steps} = JSON.parse(sessionStorage.path ?? '{"steps": []}'), at = steps.findIndex(([href]) => href == here);
  if (at < 0) return;
  for (const [kind, to, word] of [["next", steps[at + 1], "Next on your path"], ["prev", steps[at - 1], "Before it on your path"]]) {
    const link = to && document.querySelector(`a.${kind}-page`);
    if (!link) continue;
    link.href = to[0];
    link.querySelector(".context").textContent = word;
    link.querySelector(".title").textContent = to[1];
  }
  const bar = document.createElement("nav");
  bar.className = "on-path";
  bar.dataset.row = row;
  bar.ariaLabel = `the path ${name}`;
  bar.append(Object.assign(document.createElement("b"), {textContent: name}), ` ${at + 1} of ${steps.length} `);
  steps.forEach(([href, title], i) => {
    const step = Object.assign(document.createElement("a"), {href, title, ariaLabel: `${i + 1}: ${title}`, className: i < at ? "done" : ""});
    if (i === at) step.ariaCurrent = "page";
    bar.append(step);
  });
  document.querySelector("article").before(bar);
}
window.addEventListener("DOMContentLoaded", follow);

// A word of the field says its sentence when it is pointed at, and when it is tapped; from there a link leads to all words.
window.addEventListener("DOMContentLoaded", () => document.querySelectorAll("a.word").forEach((word) => {
  const tip = document.createElement("span"), more = Object.assign(document.createElement("a"), {href: word.href, textContent: "all words"});
  tip.className = "word-tip";
  tip.hidden = true;
  tip.role = "note";
  tip.append(`${word.title} `, more);
  const show = (on) => {
    document.querySelectorAll(".word-tip:not([hidden])").forEach((other) => { other.hidden = true; });
    tip.hidden = !on;
    if (!on) return;
    tip.style.translate = "none";
    const {left, right} = tip.getBoundingClientRect(), room = document.documentElement.clientWidth - 8;
    tip.style.translate = `${Math.min(0, room - right) || Math.max(0, 8 - left)}px`;
  };
  word.removeAttribute("title");
  word.role = "button";
  word.after(tip);
  word.addEventListener("click", (e) => { if (tip.hidden || e.detail) { e.preventDefault(); show(true); } });
  word.addEventListener("pointerenter", (e) => { if (e.pointerType === "mouse") show(true); });
  for (const end of ["keydown", "pointerdown"]) document.addEventListener(end, (e) => {
    if (!tip.hidden && (e.key === "Escape" || end === "pointerdown" && !tip.contains(e.target) && e.target !== word)) show(false);
  });
  tip.addEventListener("pointerleave", (e) => { if (e.pointerType === "mouse") show(false); });
}));
