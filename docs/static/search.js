// Each result of a search with the line of its page that it was found in.
function line(item) {
  const link = item.querySelector("a");
  if (!link || item.querySelector(".context")) return;
  const root = new URL(document.documentElement.dataset.content_root ?? "./", location.href).href;
  const sections = PROSE[link.href.replace(root, "").replace(/\.html.*/, "")] ?? [];
  const words = new URLSearchParams(location.search).get("q").toLowerCase().split(/\s+/).filter(Boolean);
  // The section with most of the words, before others the one that has them side by side, or in its title.
  const worth = ([, title, text]) => {
    const all = `${title} ${text}`.toLowerCase(), phrase = words.join(" ");
    return words.filter((w) => all.includes(w)).length + 2 * all.includes(phrase) + title.toLowerCase().includes(phrase);
  };
  const [anchor, title, text] = sections.reduce((best, s) => worth(s) > worth(best) ? s : best, ["", "", ""]);
  const at = Math.max(0, [words.join(" "), ...words].map((w) => text.toLowerCase().indexOf(w)).find((n) => n >= 0) ?? -1);
  if (!text) return;
  const start = at < 60 ? 0 : text.indexOf(" ", at - 60) + 1, end = text.indexOf(" ", at + 100);
  const p = document.createElement("p");
  p.className = "context";
  const section = document.createElement("a");
  Object.assign(section, {href: `${link.href.replace(/[?#].*/, "")}#${anchor}`, textContent: title});
  p.append(section, ` ${start ? "… " : ""}${text.slice(start, end < 0 ? undefined : end)} …`);
  item.append(p);
}

// The page that is about what was asked for stands above what was found.
function first() {
  const asked = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase().split(/[^\w]+/).map((w) => w.replace(/s$/, ""));
  const known = ABOUT.map(([words, ...page]) => [words.split(" ").map((w) => w.replace(/s$/, "")), ...page]);
  const [words, href, title] = known.filter(([words]) => words.every((w) => asked.includes(w))).sort((a, b) => b[0].length - a[0].length)[0] ?? [];
  if (!words || document.getElementById("about")) return;
  const link = Object.assign(document.createElement("a"), {href, textContent: title}), p = document.createElement("p");
  p.id = "about";
  p.append("The page about this: ", link);
  document.getElementById("search-results").before(p);
}

window.addEventListener("DOMContentLoaded", () => {
  first();
  const lines = () => document.querySelectorAll("#search-results li").forEach(line);
  new MutationObserver(lines).observe(document.getElementById("search-results"), {childList: true, subtree: true});
});
