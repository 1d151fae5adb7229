"""Make the skeleton of a lesson, and enter it wherever a lesson has to be known.

    python tools/lesson.py formulas 51_margin "The margin"
    python tools/lesson.py studies 51_margin "The margin"

The notebook that it writes has every cell that a lesson has, around a formula that holds the place
of yours. Fill in the cells; `make check` says what is missing then, of nine places: the front
page's map with its numbers, the whole map, a path or the list of lessons beside them, a test, of an
exercise the solution and the check with its imports, and for a formula the public names, its breaks
and the table of those that were caught.
"""
import argparse
import json
import re
import subprocess
import sys

from notebooks import BIN, NBDEV, ROOT, export

PROOF = """x = torch.tensor([1.0, 3.0, 9.0])
mask = torch.tensor([True, True, False])
assert NAME(x, mask) == 5
"""
CELLS = [  # id, kind, source; NAME, STEM, TITLE and ROOM are filled in
    ("title", "markdown", "# TITLE\n\n> In one line, what the module NAME has."),
    ("default-exp", "code", "#| default_exp ROOM.NAME"),
    ("question", "markdown", "## A question\n\nWhat goes wrong without this formula?\n\n"
     "**Predict before you run.** What will the mean square of 1 and 3 be?"),
    ("install", "code", '#| hide\ntry:\n    import rlhf_notes\nexcept ImportError:\n'
     '    get_ipython().run_line_magic("pip", "install -q rlhf_notes")'),
    ("export-imports", "code", "#| export\nfrom torch import Tensor\n\n"
     "from rlhf_notes.checks import checked\nfrom rlhf_notes.formulas.masking import masked_mean"),
    ("imports", "code", "import torch\n\nfrom rlhf_notes.lessons import ExceptionExpected"),
    ("naive", "code", "print(torch.tensor([1.0, 3.0]).square().mean().item())"),
    ("formula", "markdown", "## The formula\n\nWith its source and the number of the equation,\n\n"
     "$$\\frac{1}{n} \\sum_i x_i^2.$$"),
    ("NAME", "code", '#| export\n@checked(x="float (...)", mask="bool (...)?")\ndef NAME(\n'
     "    x: Tensor,  # (...), meaning and unit\n"
     "    mask: Tensor | None = None,  # (...) bool, True = counts; None = everything counts\n"
     ") -> Tensor:  # 0-dim, in units of `x` squared\n"
     '    "Mean of the squares of what counts."\n    return masked_mean(x.square(), mask)'),
    ("proof-md", "markdown", "## The proof\n\n**By hand.** What is masked does not count."),
    ("proof", "code", PROOF + 'with ExceptionExpected(TypeError, regex="mask must be boolean"):\n'
     "    NAME(x, mask.float())"),
    ("differ", "markdown", "## Where implementations differ\n\nWith the numbers."),
    ("in-short", "markdown", "## In one paragraph\n\n**What was the question?** The reply."),
    ("formulas-in-code", "markdown", "### The formulas by name\n\n```text\n"
     "NAME   1/n sum x^2 over what counts\n```"),
    ("exercises", "markdown", "## Exercises\n\n[The check](../exercises/00_check.ipynb) knows the "
     "usual mistakes; `check.NAME.hint()` gives a hint."),
    ("exercise-imports", "code", "from rlhf_notes import check"),
    ("exercise-NAME-task", "markdown", "**`NAME(x, mask)`**\n\nThe mean square of what counts."),
    ("exercise-NAME", "code", "#| eval: false\ndef my_NAME(x, mask):\n    ...\n\n"
     "check.NAME(my_NAME)"),
    ("exercise-NAME-solution", "code", "#| code-fold: true\n#| code-summary: Solution\n"
     "def NAME_solution(x, mask):\n    squares = [v * v for v in x[mask]]\n"
     "    return sum(squares) / len(squares)\n\ncheck.NAME(NAME_solution, strict=True);"),
    ("exercise-checks-imports", "code", "#| export exercises.check\n#| hide\n"
     "from rlhf_notes.exercises.engine import exercise\n"
     "from rlhf_notes.exercises.given import flags, mean, normal, vec"),
    ("exercise-checks", "code", '#| export exercises.check\n#| hide-input\nexercise("NAME", "STEM",'
     ' lambda x, m: mean(x.square(), m),\n'
     '    "f(x, mask) -> the mean square of what counts, 0-dim",\n'
     '    "Square first. How many count?", read="STEM, The formula",\n'
     '    inputs=[(vec([1., 3., 9.]), flags("110")),\n'
     '            (normal(2, 3, seed=70), flags("110", "011"))],\n    wrt=("x",),\n'
     '    not_squared=(lambda x, m: mean(x, m), "The mean is of x, not of its square."))'),
]
TEST = '''import torch

from rlhf_notes.ROOM.NAME import NAME

def test_by_hand():
    x, mask = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])
    assert NAME(x, mask) == 5 and NAME(x[:2]) == 5
'''
FORMULA = {"formulas", "compat"}  # rooms whose names are public and whose modules are broken
ROOMS = *sorted(FORMULA), "control", "language", "hub", "reviews", "studies", "bridges"
NO_FORMULA = "formulas-in-code"  # the cell that `help` says, which others do not have
BREAK = dict(why="what is masked counts", old="masked_mean(x.square(), mask)",
             new="masked_mean(x.square())")


def notebook(fill, room):
    def cell(i, kind, source):
        made = dict(cell_type=kind, id=fill(i), metadata={}, source=fill(source).splitlines(True))
        if i == "formulas-in-code": made["metadata"] = {"nbdev": {"export": "true"}}
        if i in ("exercise-NAME-solution", "exercise-checks"):
            made["metadata"] = {"jupyter": {"source_hidden": True}}
        return made | (dict(execution_count=None, outputs=[]) if kind == "code" else {})
    start = json.loads((ROOT / "nbs" / "start.ipynb").read_text(encoding="utf-8"))
    return start | {"cells": [cell(*x) for x in CELLS if room in FORMULA or x[0] != NO_FORMULA]}


def write(path, text):
    if path.exists(): sys.exit(f"{path.relative_to(ROOT)} is there already")
    path.write_text(text, encoding="utf-8")


def change(path, change):
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def change_cell(name, cell_id, change):
    "`change` the source of a cell of nbs/`name`."
    path = ROOT / "nbs" / name
    nb = json.loads(path.read_text(encoding="utf-8"))
    cell = next(c for c in nb["cells"] if c["id"] == cell_id)
    cell["source"] = change("".join(cell["source"])).splitlines(True)
    path.write_text(json.dumps(nb, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def row(room):
    "The row of a room in the map of the front page: up to its numbers, up to its last link."
    return re.compile(rf"(\| [^\n|]*\*\*{room}\*\*[^|]*\| [^|]*?)( \|[^\n]*\.ipynb\))")


def enter(room, stem, title):
    "Tables, paths and lists that should know the lesson."
    number, _, name = stem.partition("_")
    link = f"[{title[0].lower()}{title[1:]}]({room}/{stem}.ipynb)"
    change_cell("index.ipynb", "map",
                lambda s: row(room).sub(rf"\1, {number}\2, {link}", s, count=1))
    change_cell("map.ipynb", "formulas",
                lambda s: f"{s.rstrip()}\n| {title} | {link} | `{name}` | |")
    change(ROOT / "tests" / "test_in_step.py",
           lambda s: s.replace('").split()\nBROKEN', f' {number}").split()\nBROKEN', 1))
    if room not in FORMULA: return
    star = f"from .{room}.{name} import *"
    change(ROOT / "rlhf_notes" / "__init__.pyi", lambda s: re.sub(
        rf"(from \.{room}\.\w+ import \*\n)+",
        lambda m: "\n".join(sorted([*m[0].splitlines(), star])) + "\n", s))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", choices=ROOMS, help="folder of nbs")
    parser.add_argument("stem", help="number and name, as 51_margin")
    parser.add_argument("title")
    args = parser.parse_args()
    if not (m := re.fullmatch(r"\d\d_([a-z]\w*)", args.stem)):
        sys.exit(f"stem must be a number and a name, as 51_margin, got {args.stem}")
    name = m[1]
    def fill(text):
        for old, new in dict(NAME=name, STEM=args.stem, TITLE=args.title, ROOM=args.room).items():
            text = text.replace(old, new)
        return text
    path = ROOT / "nbs" / args.room / f"{args.stem}.ipynb"
    write(path, json.dumps(notebook(fill, args.room), indent=1, ensure_ascii=False) + "\n")
    write(ROOT / "tests" / args.room / f"test_{name}.py", fill(TEST))
    enter(args.room, args.stem, args.title)
    export()
    tools = [["notebooks.py", "outputs", str(path)]]
    if args.room in FORMULA:
        write(ROOT / "tests" / "breaks" / f"{name}.json", f"[\n {json.dumps(BREAK)}\n]\n")
        tools += [["breaks.py", "--keep", "--tests-first", "--out", "tests/breaks/caught.csv"]]
    for tool in tools:
        subprocess.run([BIN / "python", ROOT / "tools" / tool[0], *tool[1:]], cwd=ROOT, check=True)
    print(f"{path.relative_to(ROOT)} of {NBDEV.lib_name}.{args.room}.{name}: now write the lesson")


if __name__ == "__main__":
    main()
