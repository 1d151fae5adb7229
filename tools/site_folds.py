"""What a page of the site keeps closed until it is asked for: answers to predictions, more proofs,
engineering, errata, and what `help` says.

A section called "More proofs", "In the workshop", "Errata", "Exercises" or "The formulas by name"
is folded as a whole. After "Predict before you run" the code stays in view; what it prints and
draws, and the paragraph after it, are the answer, covered until it is clicked. A paragraph that
begins with "Now" leads on to the next experiment and stays open. So does a slider, and a picture
in whose place a widget stands: moving it shows the answer.
"""
import re

from docutils import nodes
from sphinx.addnodes import desc

SECTIONS = ("More proofs", "In the workshop", "Errata", "Exercises",
            CARD := "The formulas by name")
PREDICT = re.compile(
    r"(?:^|[.:?!)] +)Predict(?: at each| before you (?:run|look|move (?:it|them)|read on))?[.:,]")
COVER = 'Answer<span class="hint">: your guess first, then click</span>'
LEADS_ON = re.compile(r"(Now|Next)\b")


def details(name, summary, children):
    start = f'<details class="fold {name}"><summary>{summary}</summary>'
    return [
        nodes.raw("", start, format="html"), *children, nodes.raw("", "</details>", format="html")]


def fold_sections(doctree):
    for section in list(doctree.findall(nodes.section)):
        title, *rest = section.children
        if title.astext() not in SECTIONS or isinstance(section.parent, nodes.document): continue
        foot = [n for n in rest if "next-on-path" in n["classes"]]  # stays open
        rest = [n for n in rest if n not in foot]
        cells = sum(is_code(n) for n in section.findall(nodes.container))
        tasks = sum('id="exercise-' in r.astext() for r in section.findall(nodes.raw))
        shown = f"Show ({cells} cells)" if cells else "Show"
        if tasks: shown = f"Show ({tasks} exercise{'s' * (tasks > 1)})"
        if title.astext() == CARD: section[:] = [*details("section", CARD, rest), *foot]
        else: section[:] = [title, *details("section", shown, rest), *foot]


def is_code(node):
    return isinstance(node, nodes.container) and node.get("nb_element") == "cell_code"


def outputs(cell):
    "What the code cell `cell` puts out, unless that is a slider."
    found = [n for n in cell.children if n.get("nb_element") == "cell_code_output"]
    return [n for n in found if not any("data-slider" in r.astext() for r in n.findall(nodes.raw))]


def taken_out(outputs):
    "The pictures of `outputs`, which have none afterwards, as an output of their own."
    drawn = [n for out in outputs for n in out.children if isinstance(n, nodes.image)]
    for picture in drawn: picture.parent.remove(picture)
    shown = nodes.container("", *drawn, classes=["cell_output"])
    return [nodes.container("", shown, classes=["cell"])] if drawn else []


def is_widget(node): return isinstance(node, nodes.raw) and "data-widget" in node.astext()


def flow(section):
    "The blocks of `section` and of the sections within it, in order."
    for node in section.children:
        if isinstance(node, nodes.section): yield from flow(node)
        else: yield node


def is_question(node):
    return (isinstance(node, (nodes.paragraph, nodes.bullet_list, nodes.enumerated_list))
            and bool(PREDICT.search(node.astext())))


def answer(blocks):
    "(code cells, paragraph or None) that answer a question, given the blocks that follow it."
    cells, answered = [], False
    for before, node in zip([None, *blocks], blocks):
        if is_question(node) or isinstance(node, nodes.title): break
        if is_widget(node): continue
        if is_code(node):
            cells.append(node)
            answered = answered or len(node.children) > 1
        elif isinstance(node, nodes.paragraph) and (answered or cells and before is cells[-1]):
            return cells, node if closes(node) else None
        elif answered and not isinstance(node, (nodes.Invisible, desc)): break
    return cells, None


def closes(paragraph):
    "False for a paragraph that leads on to a formula, a list, code or another experiment."
    text = paragraph.astext()
    return text.rstrip(")”").endswith((".", "?", "!")) and not LEADS_ON.match(text)


def fold_answers(doctree):
    blocks = list(flow(doctree))
    for i, question in reversed(list(enumerate(blocks))):
        if not is_question(question): continue
        cells, text = answer(blocks[i + 1:])
        shown = [out for cell in cells for out in outputs(cell)]
        for cell in cells: cell[:] = [n for n in cell.children if n not in shown]
        drawn = taken_out(shown)
        in_view = drawn if cells and is_widget(after(cells[-1])) else []
        printed = [out for out in shown if out.children]
        folded = [nodes.container("", *printed, classes=["cell"])] if printed else []
        folded += [n for n in drawn if n not in in_view]
        if text is not None:
            text.parent.remove(text)
            folded.append(text)
        if not folded and not drawn: continue
        parent, at = cells[-1].parent, cells[-1].parent.index(cells[-1]) + 1
        name, summary = ("answer covered", COVER) if len(drawn) > len(in_view) else (
            "answer", "Answer")
        parent[at:at] = [*(details(name, summary, folded) if folded else []), *in_view]


def after(node):
    "The block that follows `node` in its section, or None."
    rest = node.parent.children[node.parent.index(node) + 1:]
    return next((n for n in rest if not isinstance(n, nodes.Invisible)), None)


def fold(app, doctree, name):
    fold_answers(doctree)
    fold_sections(doctree)


def setup(app): app.connect("doctree-resolved", fold)
