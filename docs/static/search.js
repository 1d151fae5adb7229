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

// The sections closest to a question in whole sentences, which no page has word for word: a rare word counts more, one in the title most.
const SMALL = new Set("a an and are as at be by can do does during for from how i if in into is it its my of on or should the to use vs what when where which why with without your".split(" "));
const terms = (text) => text.toLowerCase().split(/[^\p{L}\p{N}@+]+/u).filter((w) => w && !SMALL.has(w)).map((w) => w.replace(/(ings?|ed|es|s|e)$/, ""));
function closest(query, many = 3) {
  const sections = Object.entries(PROSE).flatMap(([page, all]) => all.map(([anchor, title, text]) => {
    const words = terms(text);
    return {href: `${page}.html#${anchor}`, title, page: all[0][1], words: new Set(words), names: new Set(terms(title)), above: new Set(terms(all[0][1])), length: words.length};
  }));
  const mean = sections.reduce((sum, {length}) => sum + length, 0) / sections.length, asked = [...new Set(terms(query))];
  const rare = asked.map((w) => Math.log(sections.length / (0.5 + sections.filter(({words, names}) => words.has(w) || names.has(w)).length)));
  const worth = ({words, names, above, length}) => asked.reduce((sum, w, i) => sum + rare[i] * (words.has(w) / (0.7 + 0.3 * length / mean) + 1.5 * names.has(w) + 0.5 * above.has(w)), 0);
  const enough = 0.5 * rare.reduce((sum, x) => sum + x, 0);
  return sections.map((s) => [worth(s), s]).filter(([x]) => x > 0 && x >= enough).sort(([a], [b]) => b - a).slice(0, many).map(([, s]) => s);
}
function near() {
  const found = closest(new URLSearchParams(location.search).get("q") ?? "");
  if (!found.length) return;
  const list = document.createElement("ul");
  list.id = "closest";
  list.append(...found.map(({href, title, page}) => {
    const item = document.createElement("li"), link = Object.assign(document.createElement("a"), {href, textContent: title});
    item.append(link, title === page ? "" : `, in ${page}`);
    return item;
  }));
  document.getElementById("search-results").before("The closest sections:", list);
}

window.addEventListener("DOMContentLoaded", () => {
  if (!new URLSearchParams(location.search).get("q")) document.getElementById("search-results").append("Write a word or a question into the field at the top of the menu.");
  first();
  near();
  const lines = () => document.querySelectorAll("#search-results li").forEach(line);
  new MutationObserver(lines).observe(document.getElementById("search-results"), {childList: true, subtree: true});
});
