"""Build the site: notebooks as they stand, with their stored outputs, to static pages in _docs.

    python tools/site_pages.py [--out _docs]

Nothing is executed. What is for tools only (`#| hide`, `#| default_exp`, the directive lines) is left out, notebooks lose their numbers, and a
figure's `#| fig-alt:` becomes its alternative text. Any warning of Sphinx fails the build.
"""
import argparse
import re
import shutil
import sys
from pathlib import Path

import nbformat
from sphinx.cmd.build import main as sphinx

from notebooks import ROOT, directives, notebooks, settings

FLOORS = {"formulas": "Formulas", "control": "Classic control", "language": "Language", "studies": "Studies"}


def page(path):
    "Where the notebook at `path` stands on the site, without suffix: nbs/formulas/01_masking.ipynb -> formulas/masking."
    relative = path.relative_to(ROOT / "nbs")
    return relative.with_name(re.sub(r"^\d+_", "", relative.stem))


def relink(text):
    "Links between notebooks as links between pages; links to files at the top of the project as links to its repository."
    text = re.sub(r"\]\(((?:\.\./|[a-z]+/)*)(?:\d+_)?(\w+)\.ipynb(#[\w-]+)?\)", r"](\1\2.ipynb\3)", text)
    return re.sub(r"\]\(\.\./([A-Z]+(?:\.md)?|tests/[\w/.]+)\)", rf"]({settings()['git_url']}/blob/{settings()['branch']}/\1)", text)


def only_imports(source):
    "Imports before the first section are folded away: a lesson opens with its question."
    return all(re.match(r"import |from |viz\.style\(\)|\s|#|\)|$", line) for line in source.splitlines())


def prepare(path):
    "The notebook at `path` as a reader of the site should see it."
    nb = nbformat.read(path, as_version=4)
    cells = []
    for cell in nb.cells:
        d = directives(cell.source)
        if "hide" in d or "default_exp" in d: continue
        if cell.cell_type == "markdown":
            cell.source = relink(cell.source)
        else:
            cell.source = re.sub(r"\A(\s*#\s*\|.*\n?)+", "", cell.source)
            if only_imports(cell.source) and not any(re.search(r"^## ", c.source, re.M) for c in cells) or "hide-input" in d: cell.metadata["tags"] = ["hide-input"]
            if "fig-alt" in d: cell.metadata["mystnb"] = {"image": {"alt": d["fig-alt"]}}
        for out in cell.get("outputs", []):
            if "text/markdown" in out.get("data", {}): out.data["text/markdown"] = relink(out.data["text/markdown"])
        cells.append(cell)
    nb.cells = cells
    return nb


def contents(paths):
    "The table of contents, floor by floor, as a cell for the end of the front page."
    blocks = []
    for floor, caption in [(".", "Start here"), *FLOORS.items()]:
        pages = [page(p) for p in paths if str(p.parent.relative_to(ROOT / "nbs")) == floor and p.stem != "index"]
        if pages: blocks.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(map(str, pages)) + "\n```")
    return nbformat.v4.new_markdown_cell("\n\n".join(blocks), id="contents")


def build(out):
    source = ROOT / "_proc"
    shutil.rmtree(source, ignore_errors=True)
    paths = notebooks()
    for path in paths:
        nb = prepare(path)
        if path.stem == "index": nb.cells.append(contents(paths))
        to = source / f"{page(path)}.ipynb"
        to.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, to)
    shutil.copytree(ROOT / "nbs" / "images", source / "images", dirs_exist_ok=True)
    return sphinx(["-W", "--keep-going", "-q", "-b", "html", "-c", str(ROOT / "docs"), "-d", str(source / ".doctrees"), str(source), str(out)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "_docs")
    out = parser.parse_args().out
    code = build(out)
    if not code: print(f"the site is in {out}: open {out / 'index.html'}")
    sys.exit(code)
