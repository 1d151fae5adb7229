"""The size of each page of the site as a reader meets it, folds closed, in a window 1400 wide, as a CSV on the screen.

    python docs/sizes.py [SITE]

Fails where a line of code runs out of the page, and where a page is higher than 12,000 pixels.
"""
import csv
import os
import sys
from pathlib import Path

from conftest import CHROMIUM
from playwright.sync_api import sync_playwright

SITE = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SITE", Path(__file__).resolve().parent.parent / "_docs"))
HEIGHT = 12_000
MEASURE = """async () => {
  await window.MathJax?.startup?.promise;
  const cut = [...document.querySelectorAll(".cell_input pre")].filter((e) => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1);
  const words = [...document.querySelectorAll("article p, article li")].filter((e) => e.checkVisibility({contentVisibilityAuto: true}));
  return {
    height: document.documentElement.scrollHeight,
    words: words.map((e) => e.innerText.split(/\\s+/).length).reduce((a, b) => a + b, 0),
    cut: cut.map((e) => e.innerText.split("\\n").reduce((a, b) => a.length > b.length ? a : b).trim()),
  };
}"""


def measure(pages):
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1400, "height": 900})
        for page in pages:
            tab.goto(page.resolve().as_uri())
            yield page.relative_to(SITE).as_posix(), tab.evaluate(MEASURE)
        browser.close()


def main():
    if CHROMIUM is None: sys.exit("no Chromium found: set CHROMIUM to the path of one")
    if not (SITE / "index.html").exists(): sys.exit(f"no site in {SITE}: build it with `make site`")
    out, faults = csv.writer(sys.stdout), []
    out.writerow(["page", "height", "words", "cut"])
    for page, found in measure(sorted(SITE.rglob("*.html"))):
        out.writerow([page, found["height"], found["words"], len(found["cut"])])
        if found["cut"]: faults.append(f"{page}: {len(found['cut'])} cells with lines that are cut off, as {found['cut'][0]!r}")
        if found["height"] > HEIGHT: faults.append(f"{page} is {found['height']} pixels high")
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__": main()
