// What scrolls within itself can be scrolled with the keyboard, too.
function reachable() {
  document.querySelectorAll("pre, .table-wrapper, .cell_output, .cell_output .output, div.math, mjx-container[display='true']").forEach((box) => {
    if (box.scrollWidth > box.clientWidth + 1) { if (!box.hasAttribute("tabindex")) { box.tabIndex = 0; box.dataset.reachable = ""; } }
    else if ("reachable" in box.dataset) { box.removeAttribute("tabindex"); delete box.dataset.reachable; }
  });
}
window.addEventListener("load", () => (window.MathJax?.startup?.promise ?? Promise.resolve()).then(reachable));
window.addEventListener("resize", reachable);
document.addEventListener("toggle", reachable, true);
