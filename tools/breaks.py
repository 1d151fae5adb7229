"""Break the code on purpose, one break at a time, and see whether the tests notice.

    python tools/breaks.py [MODULE ...] [--out breaks.csv] [--keep] [--tests-first]

Each tests/breaks/MODULE.json lists breaks: a piece of code, what to put in its place, and why that
would be wrong. A break is made in a copy of the project, in the module and in its notebook, if it
has one, alike; then the module's tests are run and the notebook is run. It is caught if either
fails. With "cell", the id of one that exports nothing, it is made in the notebook alone, which is
run first, and the tests where it notices nothing. A module whose name stands twice is called
FOLDER.MODULE.

Before anything is broken the same is done with nothing changed, which must not be "caught", and
says how long tests and notebook take; a break that makes them take four times as long, and more
than two minutes, counts as caught, and is printed. With --tests-first the notebook is run only
where the tests notice nothing, and its column stays empty elsewhere. With --keep the breaks that
the CSV holds already are not made again.
"""
import argparse
import ast
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# where they are called otherwise than the module
TESTS = {
    "control.ppo": ("control/test_ppo.py", "control/test_saved.py", "control/test_spaces.py"),
    "grpo": ("formulas/test_grpo.py", "formulas/test_family.py"),
    "rows": ("formulas/test_logprob.py", "fast/test_row_loops.py"),
    "linear": ("formulas/test_logprob.py",),
    "row_loops": ("fast/test_row_loops.py", "formulas/test_logprob.py"),
    "loop": ("language/test_rlhf.py", "language/test_dpo.py", "reviews/test_pipeline.py",
             "language/test_own_task.py"),
    "dpo": ("language/test_dpo.py", "language/test_adapters.py"),
    "language.rollout": ("hub/test_credit.py", "language/test_rollout.py",
                         "language/test_own_task.py"),
    "told": ("hub/test_credit.py",),
    "48_staleness": ("studies/test_staleness.py",),
    **{f"identify.{name}": ("test_identify.py",) for name in (
        "calls", "gae", "groups", "losses", "policy", "probing", "tokens", "weights")}}
LESSONS = ("48_staleness",)  # that export nothing
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def find(name):
    "The module called `name`, its notebook (or None) and its tests, as paths from the top."
    if name in LESSONS:
        notebook = next((ROOT / "nbs").rglob(f"{name}.ipynb")).relative_to(ROOT)
        return [None, notebook, *(Path("tests") / t for t in TESTS[name])]
    module = next((ROOT / "rlhf_notes").rglob(name.replace(".", "/") + ".py"))
    folder = ROOT / "nbs" / module.parent.relative_to(ROOT / "rlhf_notes")
    notebook = next((p for p in folder.glob("*.ipynb")
                     if module.stem in (p.stem, p.stem.split("_", 1)[-1])), None)
    room = module.parent.relative_to(ROOT / "rlhf_notes")
    tests = [next((ROOT / "tests").rglob(t))
             for t in TESTS.get(name, ((room / f"test_{module.stem}.py").as_posix(),))]
    return [p and p.relative_to(ROOT) for p in (module, notebook, *tests)]


def replace_once(path, old, new, cell=None):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        nb = json.loads(text)
        sources = [(c, "".join(c["source"])) for c in nb["cells"]]
        cells = [c for c, x in sources if old in x and (c["id"] == cell if cell else
                                                        "#| export" in x)]
        if len(cells) != 1:
            raise ValueError(f"{path}: {old!r} stands in {len(cells)} exported cells, expected 1")
        cells[0]["source"] = "".join(cells[0]["source"]).replace(old, new)
        text = json.dumps(nb)
    else:
        if text.count(old) != 1:
            raise ValueError(f"{path}: {old!r} stands there {text.count(old)} times, expected once")
        text = text.replace(old, new)
        ast.parse(text)  # what is no Python would be caught by anything
    path.write_text(text, encoding="utf-8")


def run(command, cwd, limit):
    try:
        return subprocess.run(command, cwd=cwd, env={**ENV, "PYTHONPATH": str(cwd)},
                              capture_output=True, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        print(f"{' '.join(command[2:])} took longer than {limit:.0f} s", flush=True)
        return 124


def try_break(name, change, tests_first, limit):
    "Is this break caught by the notebook, by the tests?"
    module, notebook, *tests = find(name)
    with tempfile.TemporaryDirectory() as tmp:
        tree = Path(tmp) / "tree"
        shutil.copytree(ROOT, tree,
                        ignore=shutil.ignore_patterns(".git", ".venv", "_docs", "runs",
                                                      ".hypothesis", "__pycache__"))
        cell = change.get("cell")
        if change["old"]:
            for path in [notebook] if cell else filter(None, [module, notebook]):
                replace_once(tree / path, change["old"], change["new"], cell)
        how = {"tests": [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider",
                         *map(str, tests)] if tests else None,
               "notebook": [sys.executable, "tools/notebooks.py", "run", str(notebook)]
               if notebook else None}
        noticed = {"notebook": "", "tests": ""}
        for by in reversed(how) if cell else how:
            if how[by] and not ((tests_first or cell) and True in noticed.values()):
                noticed[by] = run(how[by], tree, limit) != 0
    return {"module": name, "break": change["why"], **noticed, "caught": True in noticed.values()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", nargs="*", help="all that have a list, by default")
    parser.add_argument("--out", type=Path, help="write the result as CSV")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--keep", action="store_true", help="do not make again what stands in --out")
    parser.add_argument("--tests-first", action="store_true",
                        help="run the notebook only where the tests notice nothing")
    args = parser.parse_args()
    lists = sorted((ROOT / "tests" / "breaks").glob("*.json"))
    todo = [(p.stem, b) for p in lists if not args.module or p.stem in args.module
            for b in json.loads(p.read_text(encoding="utf-8"))]
    kept = {}
    if args.keep and args.out and args.out.exists():
        with open(args.out, newline="", encoding="utf-8") as f:
            kept = {(r["module"], r["break"]): r | {"caught": r["caught"] == "True"}
                    for r in csv.DictReader(f)}
    new = [(name, b) for name, b in todo if (name, b["why"]) not in kept]
    limits = {}
    for name in dict(new):
        start = time.perf_counter()
        if try_break(name, {"why": "nothing is changed", "old": ""}, False, 1800)["caught"]:
            sys.exit(f"the tests or the notebook of {name} fail before anything is broken")
        limits[name] = max(120, 4 * (time.perf_counter() - start))
    with ThreadPoolExecutor(args.jobs) as pool:
        made = dict(kept)
        for row in pool.map(lambda t: try_break(*t, args.tests_first, limits[t[0]]), new):
            made[row["module"], row["break"]] = row
            by = " and ".join(k for k in ("notebook", "tests") if row[k]) or "NOTHING"
            print(f"{row['module']:16} {row['break']:70} caught by {by}", flush=True)
    rows = [made[name, b["why"]] for name, b in todo]
    if args.out:
        with open(args.out, "w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    missed = [r for r in rows if not r["caught"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} breaks caught")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
