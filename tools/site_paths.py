"""The paths of the front page, known to the pages on them: what comes next, the room of exercises,
and the sheet of all formulas.
"""
import html
import os
import re
from pathlib import Path

import nbformat
from notebooks import ROOT

PATH = re.compile(r"^\d\. \*(.+?):\* (.*)$", re.M)
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+\.(?:ipynb|py))\)")
# The order of the front page; then the rest.
FRONT = ("hero", "hero-picture", "paths", "in-the-page", "looking-for", "loop-md", "loop",
         "written", "who", "three-ways", "cartpole-seeds", "cartpole-seeds-md")
WORD = re.compile(r"^\| ([^|$`,]+)[^|$]*\|[^|]*\| ([^|]*) \|"
                  r".*\]\(([\w/.]+\.(?:ipynb|py))[^)]*\) \|$", re.M)
CODE = re.compile(r"```.*?```|\$\$.*?\$\$|\$[^$\n]*\$|`[^`]*`", re.S)
AWAY = (r"^(?:#+ |    )[^\n]*|"     # headings and indented code
        r"!?\[[^\[\]]*\]\([^()]*\)|``.+?``|`[^`]*`|\$\$.+?\$\$|\$[^$\n]+\$|<[^>]+>")
SET_OFF = re.compile(r"\*\*.+?\*\*|\*[^*\n]+\*|\[[^\]]+\]", re.M)
SOLUTION = re.compile(r"exercise-(\w+)-solution")


def from_nbs(page): return Path(os.path.relpath(page.path, ROOT / "nbs")).as_posix()


def only(cell):
    "For which of the two a cell of the index is: `site`, `readme`, or both."
    return cell.metadata.get("nbdev", {}).get("only", "both")


def paths(front):
    "[(name of the path, [(title, its file as seen from nbs)])]."
    text = next(c.source for c in front.nb.cells if c.id == "paths")
    return [(name, LINK.findall(line)) for name, line in PATH.findall(text)]


def front_first(cells):
    "The cells of the front page, those of FRONT first."
    return sorted(cells, key=lambda c: FRONT.index(c.id) if c.id in FRONT else len(FRONT))


def next_on(walks, page):
    "A line for each path that `page` is on, as a cell for the foot of it; None on no path."
    here, lines = from_nbs(page), []
    for name, steps in walks:
        at = next((i for i, (_, to) in enumerate(steps) if to == here), None)
        if at is None: continue
        if at + 1 == len(steps): lines.append(f"*{name}* ends here.")
        else:
            title, to = steps[at + 1]
            to = os.path.relpath(ROOT / "nbs" / to, page.path.parent)
            lines.append(f"Next on *{name}*: [{title}]({to})")
    if not lines: return
    text = ":::{container} next-on-path\n" + "\n\n".join(lines) + "\n:::"
    return nbformat.v4.new_markdown_cell(text, id="next-on-this-path")


def words(pages):
    """{term: (its sentence, the notebook or module of its lesson)}, from the page of words.

    Its last table, of words that mean something else elsewhere, explains none.
    """
    cells = [c for p in pages if p.page.name == "words" for c in p.nb.cells
             if "| English |" in c.source]
    rows = [row for c in cells for row in WORD.findall(re.sub(r"<a id[^>]*></a>", "", c.source))]
    return {name.strip(): (said, to) for name, said, to in rows}


def prose(page):
    "The Markdown cells of a page that are read in order: without exercises and foot."
    return [c for c in page.nb.cells if c.cell_type == "markdown"
            and not c.id.startswith(("exercise", "next-on"))]


def use(term):
    "A pattern of the word in the singular and the plural."
    stem, end = (term[:-1], "(?:y|ies)") if term.endswith("y") else (term, "(?:e?s)?")
    return rf"(?<![\w-]){re.escape(stem)}{end}(?![\w-])"


def introduced(term, text):
    "True if a page sets the term off: in bold, in italics or in a link."
    return any(re.search(use(term), m[0], re.I) for m in SET_OFF.finditer(text))


def plain(text):
    "The sentences and tables of `text`; what is linked stands in brackets."
    text = re.sub(r'<a class="word"[^>]*>(.*?)</a>', r"[\1]", CODE.sub("", text))
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"<[^>]+>|^#+ .*", "", text, flags=re.M))


def early(steps, pages):
    "(page, term) where a path uses a word of `words` for the first time and does not introduce it."
    known, met = words(pages), set()
    at = {from_nbs(p): p for p in pages}
    for to in (to for _, to in steps if to in at):
        text = plain("\n\n".join(c.source for c in prose(at[to])))
        for term, (_, lesson) in known.items():
            if term in met or not re.search(use(term), text, re.I): continue
            met.add(term)
            if lesson != to and not introduced(term, text): yield at[to], term


def explain(page, term, said, outside):
    "Make the first use of `term` on `page` a link to its line in `words`, its sentence on hover."
    to, done = os.path.relpath("words", page.page.parent), []
    def link(m):
        if not m["term"] or done: return m[0]
        done.append(m)
        title = html.escape(re.sub(r"[`*$]", "", said))
        return f'<a class="word" title="{title}" href="{to}.html#{anchor(term)}">{m[0]}</a>'
    for cell in prose(page):
        cell.source = outside(rf"{AWAY}|(?P<term>(?i:{use(term)}))", link, cell.source)
        if done: return True
    return False


def anchor(term): return "word-" + re.sub(r"\W+", "-", term.lower())


def exercises(pages):
    "(name, page, lines of the solution) of each exercise, as the lessons have it."
    for p in pages:
        cells = {c.id: c.source for c in p.nb.cells}
        for at, source in cells.items():
            if not (m := SOLUTION.fullmatch(at)): continue
            lines = [x for x in source.splitlines()
                     if x.strip() and not x.startswith(("#", "check."))]
            yield m[1], p, len(lines)


def room(pages):
    "The list of all exercises: Markdown, with a place for the reader's marks."
    rows = ["| done | exercise | lesson | level | min |", "|" + "---|" * 5]
    for name, p, lines in sorted(exercises(pages), key=lambda e: (e[1].number or "99", e[2])):
        hard = 1 + (lines > 4) + (lines > 9)
        to = os.path.relpath(p.page, "exercises")
        link = f'<a href="{to}.html#exercise-{name}"><code>{name}</code></a>'
        rows.append(f'| <span data-exercise="{name}"></span> | {link} | '
                    f"{p.title} | {'●' * hard}{'○' * (3 - hard)} | {3 + 2 * lines} |")
    return ("The level goes by the lines of the solution: up to four, up to nine, more. The "
            "minutes are an estimate, three and two for each of those lines. The marks stay in "
            "this browser.\n\n" + "\n".join(rows))


def lessons_linked(text):
    """Tables whose last column is the lesson, without it: a row's first cell leads there, or, since
    a formula has no words to be read out, what follows it."""
    def row(m):
        *cells, last = re.split(r"(?<!\\)\|", m[0].strip("| "))
        if last.strip() == "lesson": return "|" + "|".join(cells) + "|"
        if not (to := re.search(r"\]\(([^)]+)\)", last)): return "|" + "|".join(cells[:width]) + "|"
        at = 1 if "$" in cells[0] else 0
        anchor, first = re.match(r" *(<a id[^>]*></a>)? *(.*?) *$", cells[at]).groups()
        cells[at] = f" {anchor or ''}[{first}]({to[1]}) "
        return "|" + "|".join(cells) + "|"

    def table(m):
        nonlocal width
        width = m[0].split("\n", 1)[0].count("|") - 2
        return re.sub(r"^\|.*\|$", row, m[0], flags=re.M)
    width = 0
    return re.sub(r"^\|.*\| lesson \|\n(?:\|.*\n?)+", table, text, flags=re.M)


def list_first(nb, text):
    "Put the list of exercises where its page begins, and what makes it under a fold."
    at = {c.id: i for i, c in enumerate(nb.cells)}
    listed = nbformat.v4.new_markdown_cell(f"## All of them\n\n{text}", id="all-of-them")
    code = nbformat.v4.new_markdown_cell("## In the workshop", id="in-the-workshop")
    rest = [c for c in nb.cells[at["use-md"] + 1:] if c.id not in ("names-md", "names")]
    nb.cells = [*nb.cells[:at["use-md"] + 1], listed, code, *rest]


def hanging(card):
    "The lines of a card; what does not fit on one goes on below its second column."
    def line(text):
        at = m.end() if (m := re.match(r" *\S.*?\S  +| {9,}", text)) else 2
        return f'<span style="--at: {at}ch">{html.escape(text)}</span>'
    return f'<pre class="card">{"".join(map(line, card.splitlines()))}</pre>'


def sheet(pages):
    "All formulas on one page to print, from the table of the map and the cards of the lessons."
    table = next(c.source for p in pages if p.page.name == "map" for c in p.nb.cells
                 if c.id == "formulas")
    rows = [r.split(" | ") for r in table.splitlines() if r.startswith("| $")]
    papers = {re.search(r"\(([^)]+)\.ipynb", r[1])[1]: (r[0].strip("| "), r[3].strip(" |"))
              for r in reversed(rows) if len(r) == 4}
    text = ("# A sheet of all formulas\n\n> Each formula of the lessons, by the name of its "
            "function: two columns, both sides of an A4.\n\n")
    for p in pages:
        card = next((c.source for c in p.nb.cells if "### The formulas by name" in c.source), None)
        if card is None: continue
        at = p.path.relative_to(ROOT / "nbs").with_suffix("").as_posix()
        formula, paper = papers.get(at, ("", ""))
        link = f'<a href="{p.page}.html">{p.number} {p.title}</a>'
        text += (f'<p class="sheet">{link} {paper}</p>\n\n'
                 + (f"{formula}\n\n" if formula else "")
                 + hanging(re.search(r"```text\n(.*?)```", card, re.S)[1]) + "\n\n")
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text, id="sheet")])
    nb.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    return nb
