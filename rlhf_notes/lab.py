"""Exercises for a course: lessons without their solutions, and marks for what is handed in.

```sh
rlhf-notes lab make course --lessons 04_surrogate,08_advantage
rlhf-notes lab grade course                 # course/marks.csv
```

`make` writes each lesson as a notebook without the solutions and without the cells that hold them,
and `exercises.csv`, a table of what to write. `grade` runs what the student has written, never the
lesson's own code, and judges each function by the check of the package. `marks.csv` has a row for
each exercise: `right` is 1 or 0, and `mistake` is the name that the check gives it, or

| mistake | |
|---|---|
| empty | nothing was written |
| crash | the cell, or the function, raises an exception |
| endless | it was stopped |
| borrowed | it runs code of the package or of the lesson: a solution is the student's own |
| wrong | no mistake that is known |
"""

__all__ = ["LINE_MINUTES", "Mark", "lessons", "make", "grade"]

import ast
import contextlib
import faulthandler
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from .exercises import check  # noqa: F401, registers the exercises
from .exercises.engine import EXERCISES, Exercise, Verdict
from .identify.calls import TimeIsOver
from .lessons import NOTEBOOKS
from .training.runs import read_table, write_table

LINE_MINUTES = 2  # to write a line of our solution; an estimate, nobody has been timed
ADDRESS = "https://github.com/rlhf-notes/rlhf_notes/blob/main/nbs"


def lessons() -> dict:  # name -> notebook
    "The lessons that have exercises, in the order of their numbers."
    names = {e.lesson for e in EXERCISES.values()}
    found = {p.stem: p for p in NOTEBOOKS.rglob("*.ipynb") if p.stem in names}
    return dict(sorted(found.items()))


def make(
    folder: str | Path,  # to write, made if it is not there
    names: list[str] | None = None,  # of lessons, as "04_surrogate"; None = all with exercises
) -> list[tuple]:  # exercise, lesson, minutes, what to write
    "Write lessons without solutions, and the table of their exercises."
    folder, known = Path(folder), lessons()
    for name in names or ():
        if name not in known:
            raise ValueError(f"lessons must be of {', '.join(known)}, got {name!r}")
    chosen = {name: known[name] for name in names or known}
    for file in (*(f"{name}.ipynb" for name in chosen), "exercises.csv"):
        if (folder / file).exists():
            raise ValueError(f"folder must not hold {file} yet, got {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in chosen.items():
        text = json.dumps(_for_students(path), indent=1, ensure_ascii=False)
        (folder / f"{name}.ipynb").write_text(text + "\n", encoding="utf-8")
    rows = [(e.name, e.lesson, _minutes(e, chosen[e.lesson]), e.task)
            for e in EXERCISES.values() if e.lesson in chosen]
    columns = "exercise", "lesson", "minutes", "task"
    write_table(folder / "exercises.csv", [dict(zip(columns, row)) for row in rows])
    return rows


def _for_students(path):
    "The notebook at `path` without outputs, solutions and the cells that define the checks."
    nb = json.loads(path.read_text(encoding="utf-8"))
    hidden = re.compile(r"exercise-(\w+-solution|checks.*)")
    nb["cells"] = [c for c in nb["cells"] if not hidden.fullmatch(c["id"])]
    for cell in nb["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            cell["outputs"] = []
            if cell["id"].startswith("exercise-"):
                source = source.replace("#| eval: false\n", "")
        else:
            link = r"(?<=\]\()[\w./-]+\.\w+(?=[#)])"
            source = re.sub(link, lambda m: _address(path, m[0]), source)
        cell["source"] = source.splitlines(keepends=True)
    return nb


def _address(path, link):
    "Where a relative link of the notebook at `path` leads outside of the repository."
    return f"{ADDRESS}/{os.path.relpath(path.parent / link, NOTEBOOKS)}".replace("nbs/../", "")


def _minutes(exercise, path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    own = next(c for c in cells if c["id"] == f"exercise-{exercise.name}-solution")
    lines = filter(None, "".join(own["source"]).splitlines())
    return 5 + LINE_MINUTES * sum(not line.startswith(("#", "check.")) for line in lines)


@dataclass
class Mark:
    "The mark of an exercise."
    exercise: str
    right: int  # 1 or 0
    mistake: str = ""  # its name; empty if right
    says: str = ""  # the check's sentence, which marks.csv leaves out


def grade(
    folder: str | Path,  # with notebooks that `make` has written and a student has filled in
    seconds: float = 30,  # after which a cell is stopped; a function on all inputs after four times
) -> list[Mark]:
    "Judge the solutions in a folder, and write marks.csv there."
    folder = Path(folder)
    if not (notebooks := sorted(folder.glob("*.ipynb"))):
        raise ValueError(f"folder must hold notebooks, got {folder}")
    marks = {name: Mark(name, 0, "empty") for name in _asked(folder, notebooks)}
    for notebook in notebooks:
        for mark in _graded(notebook, seconds):
            if mark.mistake != "empty" or mark.exercise not in marks:
                marks[mark.exercise] = mark
    rows = [dict(exercise=m.exercise, right=m.right, mistake=m.mistake) for m in marks.values()]
    write_table(folder / "marks.csv", rows)
    return [*marks.values()]


def _asked(folder, notebooks):
    "Names of the exercises that were handed out."
    stems, table = {p.stem for p in notebooks}, folder / "exercises.csv"
    if table.exists():
        stems |= {row["lesson"] for row in read_table(table)}
    return [e.name for e in EXERCISES.values() if e.lesson in stems]


def _graded(notebook, seconds):
    "Marks of one notebook: it runs in a process that ends itself where it hangs, and begins anew."
    stopped = {}  # step -> endless or crash
    paths = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "agg"}
    code = "import sys; del sys.path[0]; from rlhf_notes import lab; lab._inside(*sys.argv[1:])"
    while True:
        with tempfile.TemporaryDirectory() as tmp:
            report = Path(tmp, "report")
            command = [sys.executable, "-c", code, notebook.name, report, json.dumps(stopped),
                       str(seconds)]
            ran = subprocess.run(command, cwd=notebook.parent, env=env, stdout=subprocess.DEVNULL,
                                 stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
            said = ran.stderr.decode(errors="replace")
            lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
        found = [json.loads(line) for line in lines]
        if found and found[-1] == "done":
            return [Mark(**x) for x in found if isinstance(x, dict)]
        steps = [x for x in found if isinstance(x, str)]
        if not steps:
            why = f"{notebook.name} cannot be read: {said.strip().splitlines()[-1]}"
            return [Mark(e.name, 0, "crash", why) for e in EXERCISES.values()
                    if e.lesson == notebook.stem]
        stopped[steps[-1]] = "endless" if "Timeout (" in said else "crash"


_DEFINITIONS = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef


class _HandedIn:
    "The cells of a notebook, and the functions that they hand to the checks."

    def __init__(self, path):
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
        self.cells = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
        self.names = {"__name__": "__main__", "display": print}
        self.given, self.empty, self.failed = {}, set(), {}
        self.exercises = [e for e in EXERCISES.values() if e.lesson == Path(path).stem
                          or any(_asks(source, e) for source in self.cells)]
        own = {e.lesson: lessons()[e.lesson] for e in self.exercises}.values()
        self.lesson = {"".join(c["source"]) for p in own for c in _for_students(p)["cells"]}

    def run(self, source):
        "Run a cell of the student; of the lesson's own only imports and definitions."
        source = "".join(line for line in source.splitlines(keepends=True)
                         if not line.lstrip().startswith(("%", "!")))
        if source in self.lesson and not re.search(r"^check\.", source, re.M):
            return self._define(ast.parse(source))
        tree = ast.parse(source)
        self.empty |= {f.name for f in ast.walk(tree)
                       if isinstance(f, ast.FunctionDef) and all(map(_says_nothing, f.body))}
        exec(compile(tree, "<student>", "exec"), self.names)

    def _define(self, tree):
        for node in tree.body:
            value = getattr(node, "value", None)
            constant = isinstance(node, ast.Assign) and not any(
                isinstance(x, (ast.Call, ast.comprehension)) for x in ast.walk(value))
            if constant or isinstance(node, _DEFINITIONS):
                with contextlib.suppress(Exception):
                    exec(compile(ast.Module([node], []), "<lesson>", "exec"), self.names)

    def of(self, exercise):
        "The function that a student has written, or None."
        return self.given.get(exercise.name, self.names.get(f"my_{exercise.name}"))


def _asks(source, exercise):
    return re.search(rf"check\.{exercise.name}\b|\bmy_{exercise.name}\b", source)


def _says_nothing(node):
    "True of pass, ..., a docstring, `return`, `return None` and `raise NotImplementedError`."
    if isinstance(node, ast.Raise): return "NotImplementedError" in ast.unparse(node)
    value = getattr(node, "value", None)
    return isinstance(node, ast.Pass) or isinstance(node, (ast.Expr, ast.Return)) and (
        value is None or isinstance(value, ast.Constant) and value.value in (None, ...)
        or isinstance(node, ast.Expr) and isinstance(value, ast.Constant))


class _Watched:
    "A student's function, and what it does besides returning something."

    def __init__(self, f):
        self.f, self.borrows, self.errors = f, False, []

    def __call__(self, *args):
        def note(frame, event, _):
            file = frame.f_code.co_filename
            self.borrows |= event == "call" and (file == "<lesson>" or file.startswith(_PACKAGE))
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            return self.f(*args)
        except BaseException as e:
            self.errors.append(e)
            raise
        finally:
            sys.setprofile(before)


_PACKAGE = str(Path(__file__).parent) + os.sep


def _judge(exercise, f):
    "The mark of a function."
    watched = _Watched(f)
    with contextlib.redirect_stdout(io.StringIO()):
        verdict = exercise(watched, draw=False)
    def mark(mistake): return Mark(exercise.name, 0, mistake, verdict.text)
    stops = TimeIsOver, TimeoutError
    if any(isinstance(e, stops) for e in watched.errors): return mark("endless")
    if watched.borrows: return mark("borrowed")
    if verdict: return Mark(exercise.name, 1, "", verdict.text)
    return mark(verdict.mistake or ("crash" if watched.errors else "wrong"))


def _inside(notebook, report, stopped, seconds):
    "Run a notebook and judge what it hands in; in a process of its own, which `_graded` watches."
    stopped, handed, seconds = json.loads(stopped), _HandedIn(notebook), float(seconds)
    for e in handed.exercises:
        e.known()  # before anything of the student has run
    with open(report, "w", encoding="utf-8", buffering=1) as out:
        def say(x): print(json.dumps(x), file=out)
        def step(name, seconds):
            say(name)
            faulthandler.dump_traceback_later(seconds, exit=True)
        judge, Exercise.__call__ = Exercise.__call__, _keep(handed.given)
        for i, source in enumerate(handed.cells):
            if (name := f"cell {i}") in stopped: continue
            step(name, seconds)
            try:
                handed.run(source)
            except BaseException as e:  # SystemExit too
                handed.failed[i] = f"{type(e).__name__}: {e}"
        Exercise.__call__ = judge
        for e in handed.exercises:
            cells = {i for i, source in enumerate(handed.cells) if _asks(source, e)}
            ended = [stopped[n] for n in (e.name, *(f"cell {i}" for i in cells)) if n in stopped]
            if ended:
                mark = Mark(e.name, 0, ended[0], f"{e.name}: it was stopped.")
            elif (f := handed.of(e)) is None:
                said = [handed.failed[i] for i in cells & handed.failed.keys()]
                mark = Mark(e.name, 0, "crash" if said else "empty", "".join(said[:1]))
            elif getattr(f, "__name__", "") in handed.empty:
                mark = Mark(e.name, 0, "empty", f"{e.name}: nothing was written.")
            else:
                step(e.name, 4 * seconds)
                mark = _judge(e, f)
            say(asdict(mark))
        say("done")


def _keep(given):
    def call(exercise, f, *_, **__):
        given[exercise.name] = f
        return Verdict(False, "")
    return call
