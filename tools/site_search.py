"""The search page of the site knows every page's prose, so that a result comes with its line (from
file://, too), and which lesson defines a term.
"""
import json
import re

import nbformat
from docutils import nodes
from notebooks import ROOT

TERM = re.compile(r"^\| ([^|$]+?) \|.*\]\(([\w/]+)\.ipynb[^)]*\) \|$", re.M)


def prose(doctree):
    "The paragraphs of a page, without their formulas."
    texts = [[t.astext() for t in p.findall(nodes.Text) if not isinstance(t.parent, nodes.math)]
             for p in doctree.findall(nodes.paragraph)]
    return re.sub(r"\s+", " ", " ".join("".join(words) for words in texts))


def defines():
    "{term: the page that defines it}, from the page of words."
    cells = nbformat.read(ROOT / "nbs" / "words.ipynb", as_version=4).cells
    rows = [row for c in cells for row in TERM.findall(c.source)]
    return {name.strip("`").lower(): re.sub(r"(^|/)\d+_", r"\1", page) for names, page in rows
            for name in names.split(", ")}


def context(app, pagename, templatename, context, doctree):
    if pagename != "search": return
    pages = {name: prose(app.env.get_doctree(name)) for name in app.env.found_docs}
    app.add_js_file(None,
                    body=f"const PROSE = {json.dumps(pages)}, DEFINES = "
                    f"{json.dumps(defines())};".replace("</", "<\\/"))
    app.add_js_file("search.js")


def setup(app): app.connect("html-page-context", context)
