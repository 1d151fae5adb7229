"""A path of the front page as a book, or a lesson as slides: PDF from the built site, links alive.

    make book NUMBER=1                        _docs/book-1.pdf
    make slides LESSON=formulas/surrogate     _docs/slides-surrogate.pdf

A link to what is in the same file leads there, any other to the site. Folded code, which draws or
imports, is left out; a slide has what fits on it, and what answers a prediction has its own.
"""
import argparse
import os
import shutil
import sys
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import site_pages
import site_paths
from bs4 import BeautifulSoup
from notebooks import NBDEV, ROOT
from playwright.sync_api import sync_playwright

BROWSERS = os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "chrome"
AWAY = ("script, link, nav, .headerlink, .next-on-path, .widget, .sources, details.parameters, "
        "details.above-input")
NOT_SHOWN = "details.fold.section, #exercises, #where-implementations-differ"  # on slides
SITE_CSS = "pygments.css styles/furo.css styles/furo-extensions.css mystnb*.css site.css".split()
STYLE = """
body { margin: 0; background: white; color: black; }
article { max-width: none; } summary { display: none; }
details.fold { border: 0; padding: 0; margin: 0; }
mjx-container g { stroke: none; } pre { white-space: pre-wrap; }
svg, img { max-width: 100%; height: auto; }
.cell_input, .cell_output, table, blockquote { break-inside: avoid; }
h1, h2, h3 { break-after: avoid; }
"""
BOOK = "@page { size: A4; margin: 18mm; } article { font-size: 10.5pt; } h1 { break-before: page; }"
SLIDES = """
@page { size: 1280px 720px; margin: 0; }
.slide { width: 1180px; height: 664px; padding: 28px 50px; overflow: hidden; break-after: page; }
.slide > * { zoom: 1.5; } .slide h1 { font-size: 3em; margin-top: 15%; }
.slide h2 { margin-top: 0; }
"""
DEAL = """() => {  // the blocks of the lesson, as many to a slide as fit on it
  const blocks = [], flat = (box) => {
    for (const e of [...box.children])
      if (e.matches("section, details.fold.answer") && !e.matches(".covered")) flat(e);
      else if (e.tagName != "SUMMARY") blocks.push(e);
  };
  flat(document.querySelector("article"));
  let slide = null, title = null;
  const open = (head) => {
    slide = document.createElement("div");
    slide.className = "slide";
    document.body.append(slide);
    if (head) slide.append(head);
  };
  const full = () => [...slide.children].at(-1).getBoundingClientRect().bottom >
                     slide.getBoundingClientRect().bottom - 24;
  const wide = (block) => [...block.querySelectorAll("mjx-container[display='true'] svg")].some(
    (f) => f.getBoundingClientRect().right > slide.getBoundingClientRect().right - 120);
  for (const block of blocks) {
    if (block.matches("details")) block.open = true;
    const heads = block.matches("h1, h2, h3"), alone = block.matches(".covered");
    if (heads) { title = block; open(block); continue; }
    if (!slide || alone) open(title.cloneNode(true));
    slide.append(block);
    if (full() && slide.children.length > 2) { open(title.cloneNode(true)); slide.append(block); }
    for (let zoom = 1.45; (full() || wide(block)) && zoom > 0.45; zoom -= 0.05)
      block.style.zoom = zoom;
    if (alone) slide = null;
  }
  for (const copy of document.querySelectorAll(".slide"))
    if (copy.children.length < 2 && !copy.querySelector("h1")) copy.remove();
  document.querySelector("article").remove();
  return document.querySelectorAll(".slide").length;
}"""


def anchor(page, name=""): return page.replace("/", "-") + (f"--{name}" if name else "")


def article(site, page, pages):
    "The article of a page of the site, its ids and links those of a file that has all `pages`."
    html = (site / f"{page}.html").read_text(encoding="utf-8")
    found = BeautifulSoup(html, "html.parser").article
    for e in found.select(AWAY): e.decompose()
    for dt in found.select("dt[id]"): dt.parent["id"] = dt.attrs.pop("id")  # else no destination
    for e in found.select("[id]"):
        if not e.find_parent(attrs={"data-slider": True}): e["id"] = anchor(page, e["id"])
    for e in found.select("[src]"): e["src"] = urljoin(f"{page}.html", e["src"])
    for a in found.select("a[href]"):
        to, name = urldefrag(urljoin(f"{page}.html", a["href"]))
        inside = to.removesuffix(".html")
        if inside in pages:
            a["href"] = "#" + anchor(inside, name)
        elif "://" not in to:
            home = f"{NBDEV.doc_host}{NBDEV.doc_baseurl}/"
            a["href"] = urljoin(home, to) + f"#{name}" * bool(name)
    found["id"] = anchor(page)
    return found


def document(site, pages, style, name=None):
    """One page with the articles of all `pages`, the styles of the site and its formulas; with the
    `name` of a book, its contents before them.
    """
    head = "".join(f'<link rel="stylesheet" href="{p.relative_to(site).as_posix()}">'
                   for css in SITE_CSS for p in sorted((site / "_static").glob(css)))
    html = (site / f"{pages[0]}.html").read_text(encoding="utf-8")
    first = BeautifulSoup(html, "html.parser")
    math = [s for s in first.select("script") if "mathjax" in (s.text + s.get("src", "")).lower()]
    for s in math:
        if s.get("src"): s["src"] = urljoin(f"{pages[0]}.html", s["src"])
    front = contents(name, site, pages) if name else ""
    title = f"<title>{name or first.title.get_text()}</title>"
    body = "".join(str(article(site, page, pages)) for page in pages)
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8">{title}{head}<style>'
            f'{STYLE}{style}</style></head><body data-theme="light">{front}{body}'
            f'{"".join(map(str, math))}<script src="_static/site.js"></script></body></html>')


def contents(name, site, pages):
    "The title of a book and its chapters, each a link."
    def title(page): return article(site, page, pages).h1.get_text()
    lines = "".join(f'<li><a href="#{anchor(p)}">{title(p)}</a></li>' for p in pages)
    return f"<article><h1>{name}</h1><p>{NBDEV.title} {NBDEV.version}</p><ol>{lines}</ol></article>"


def write(html, site, out, deal=False):
    "Print a document to a PDF; with deal, slide by slide; the number of slides."
    chromium = next((p for name in BROWSERS if name and (p := shutil.which(name))), None)
    if chromium is None: sys.exit("no Chromium found: set CHROMIUM to the path of one")
    path = site / f".{out.stem}.html"
    path.write_text(html, encoding="utf-8")
    try:
        with sync_playwright() as p:
            browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            tab = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme="light")
            tab.goto(path.resolve().as_uri())
            tab.evaluate("() => window.MathJax.startup.promise")
            count = tab.evaluate(DEAL) if deal else None
            number = ('<div style="font-size: 8px; width: 100%; text-align: center">'
                      '<span class="pageNumber"></span></div>')
            tab.pdf(path=out, prefer_css_page_size=True, print_background=True, outline=True,
                    tagged=True, display_header_footer=not deal, header_template="<i></i>",
                    footer_template=number)
            browser.close()
    finally: path.unlink()
    return count


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["book", "slides"])
    parser.add_argument("what", help="number of a path, from 1; or a page of the site")
    parser.add_argument("--site", type=Path, default=ROOT / "_docs")
    args = parser.parse_args()
    if args.kind == "book":
        front = site_pages.Page(ROOT / "nbs" / "index.ipynb")
        name, steps = site_paths.paths(front)[int(args.what) - 1]
        pages = [site_pages.page((ROOT / "nbs" / to).resolve()).as_posix() for _, to in steps]
        pages, out = [*dict.fromkeys(pages)], args.site / f"book-{args.what}.pdf"
        write(document(args.site, pages, BOOK, name), args.site, out)
    else:
        out = args.site / f"slides-{args.what.split('/')[-1]}.pdf"
        soup = BeautifulSoup(document(args.site, [args.what], SLIDES), "html.parser")
        for e in soup.select(NOT_SHOWN.replace("#", f"#{anchor(args.what)}--")): e.decompose()
        print(f"{write(str(soup), args.site, out, deal=True)} slides")
    print(out)


if __name__ == "__main__": main()
