"""What can be done in a page: the scripts of docs/widgets, in the place of a stored picture.

A cell that draws a picture and opens with `#| widget: NAME` is followed on the site by the widget
of that name; its picture stays for paper, for JupyterLab, and where there is no JavaScript.
"""
import io
import json
import os
import shutil
from contextlib import redirect_stdout

import nbformat
import site_python
from notebooks import ROOT

from rlhf_notes.studies import failures

FOLDER = ROOT / "docs" / "widgets"
SHARED = ROOT / "rlhf_notes" / "viz"                          # also in `rlhf-notes view`
# What a widget reads first.
DATA = {"cartpole": ["cartpole-train.js"], "diagnosis": ["dials.js"],
        "doctor": ["doctor-data.js"], "policy": ["policy-data.js"],
        "update": ["tokens.js", "policy-data.js", "policy.js"]}
SHOWN = 6                                                     # dials of a case


def place(asked, page):
    "The widget that is asked for, as a cell of `page`; `NAME brief` has its lower half folded."
    name, *brief = asked.split()
    at = os.path.relpath("_widgets", page.parent)
    scripts = ["widgets.js", *DATA.get(name, []), f"{name}.js"]
    text = (f'<div class="widget" data-widget="{name}"{" data-brief" * len(brief)} hidden></div>\n'
            f'<link rel="stylesheet" href="{at}/widgets.css">\n'
            + "".join(f'<script defer src="{at}/{script}"></script>\n' for script in scripts))
    return nbformat.v4.new_markdown_cell(text, id=f"{name}-widget")


def copy(to):
    "Copy scripts and styles to where the pages look for them; write the data of the game."
    to.mkdir(parents=True)
    for file in [*FOLDER.glob("*.js"), *SHARED.glob("*.js"), *SHARED.glob("*.css")]:
        shutil.copy(file, to)
    (to / "pyodide-pack.js").write_text(site_python.script(), encoding="utf-8")
    source = (ROOT / "rlhf_notes" / "doctor.py").read_text(encoding="utf-8")
    (to / "doctor-data.js").write_text(f"const DOCTOR = {json.dumps(source)};\n", encoding="utf-8")
    (to / "dials.js").write_text(f"const DIALS = {json.dumps(dials())};\n", encoding="utf-8")


def dials():
    "The game of diagnosis: cases with their dials, answers and verdicts; bands of intact runs."
    names = failures._puzzles()
    bases = dict.fromkeys(failures.recorded()[0][name]["base"] for name in names)
    return dict(start=4, cases=[case(i + 1, name) for i, name in enumerate(names)],
                bands={base: bands(base) for base in bases})


def case(number, truth):
    faults, runs = failures.recorded()
    with redirect_stdout(io.StringIO()):
        told = [failures.diagnose(number, answer, draw=False) for answer in "abcd"]
    answers = [dict(name=name, what=faults[name]["what"], right=v.right, told=v.text)
               for name, v in zip(failures._choices(truth), told)]
    loud = list(failures.unusual(truth))[:SHOWN]
    return dict(kind=failures.KINDS[faults[truth]["base"]], base=faults[truth]["base"],
                answers=answers, dials=[dict(name=d, here=short(runs[truth, 0][d]), told=i < 3)
                                        for i, d in enumerate(loud)])


def bands(base):
    "Lowest and highest value of each dial in each iteration of the intact trainings."
    intact = [run for (name, _), run in failures.recorded()[1].items() if name == base]
    return {d: dict(low=short(map(min, zip(*(run[d] for run in intact)))),
                    high=short(map(max, zip(*(run[d] for run in intact)))))
            for d in intact[0] if not any(None in run[d] for run in intact)}


def short(values): return [None if v is None else float(f"{v:.4g}") for v in values]
