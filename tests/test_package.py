"""The package as a user gets it: what is promised is there, importing is light, the distributions
build and work.
"""
import ast
import csv
import importlib
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import breaks
import notebooks
import pytest
from rules import broken, text

import rlhf_notes
from rlhf_notes import _docstrings, _moved

ROOT = notebooks.ROOT
BREAKS = sorted((ROOT / "tests" / "breaks").glob("*.json"))
FORMULAS = {m: importlib.import_module(f"rlhf_notes.{m}")
            for m in dict.fromkeys(rlhf_notes._MODULE_OF.values())
            if m.startswith(("formulas.", "compat."))}
CLASSES = "PPO", "RLHF", "DPO", "RewardTrainer"
HIDDEN = set(), {"ppo_loss"}  # at the top, `ppo_loss` is the formula's
PUBLIC = [(m, name) for m, module in FORMULAS.items() for name in module.__all__
          if name not in HIDDEN[m == "compat.ding"]]


def python(code, **kwargs):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          **kwargs).stdout.strip()


def test_top_level_offers_every_formula():
    rooms = {p.stem for p in (ROOT / "rlhf_notes").glob("[fc]o[rm]*/[a-z]*.py")}
    assert rooms == {m.split(".")[1] for m in FORMULAS}, "name them in rlhf_notes/__init__.pyi"
    names = [name for _, name in PUBLIC]
    assert len(set(names)) == len(names), "a name stands in two modules"
    for m, name in PUBLIC: assert getattr(rlhf_notes, name) is getattr(FORMULAS[m], name)
    assert set(names) <= set(dir(rlhf_notes))
    assert {*names, *CLASSES, "check", "fast", "identify"} == set(rlhf_notes.__all__)
    assert rlhf_notes.ppo_loss is FORMULAS["formulas.ppo"].ppo_loss
    with pytest.raises(
        AttributeError, match="no attribute 'clip_surrogate'; did you mean 'clipped_surrogate'"):
        rlhf_notes.clip_surrogate
    with pytest.raises(AttributeError, match="no attribute 'xyzzy'$"): rlhf_notes.xyzzy


def test_a_name_that_is_not_there_is_told_with_its_neighbour_by_import_too(monkeypatch):
    with pytest.raises(ImportError, match="^cannot import name 'clip_surrogate' from 'rlhf_notes'; "
                                          "did you mean 'clipped_surrogate'"):
        from rlhf_notes import clip_surrogate  # noqa: F401
    with pytest.raises(ImportError, match="^cannot import name 'xyzzy' from 'rlhf_notes'$"):
        from rlhf_notes import xyzzy  # noqa: F401
    monkeypatch.setitem(_moved.PLACES, "rlhf_notes.old_whiten", "whiten")
    with pytest.raises(ImportError, match="'old_whiten'.*; it was removed, use whiten$"):
        from rlhf_notes import old_whiten  # noqa: F401
    assert not hasattr(rlhf_notes, "xyzzy") and getattr(rlhf_notes, "xyzzy", None) is None
    assert python("from rlhf_notes import formulas, cli; print(cli.main.__name__)") == "main"


@pytest.mark.parametrize("old", _moved.PLACES)
def test_a_name_that_has_moved_is_told_with_its_new_place(old):
    module, _, name = old.rpartition(".")
    place = _moved.PLACES[old]
    with pytest.raises(ImportError, match=f"{name}.* was removed, use {re.escape(place)}$"):
        exec(f"from {module} import {name}")
    assert old not in _moved.PLACES.values()
    if place.startswith("rlhf_notes."):
        exec(f"from {place.rpartition('.')[0]} import {place.rpartition('.')[2]}")


def test_the_changelog_has_each_name_that_has_moved():
    table = text(ROOT / "CHANGELOG.md").split("| 0.1 | 0.2 |")[1].split("\n\n")[0]
    def missing(old):
        module, _, name = old.removeprefix("rlhf_notes.").rpartition(".")
        return not any(name in line and module in line for line in table.splitlines())
    assert not [old for old in _moved.PLACES if missing(old)]


def test_a_module_that_has_lost_a_name_says_of_others_that_they_are_none():
    ppo = importlib.import_module("rlhf_notes.control.ppo")
    assert not hasattr(ppo, "xyzzy") and ppo.__getattr__.func is _moved.instead
    with pytest.raises(ImportError, match="^cannot import name 'xyzzy' from 'rlhf_notes.con"):
        from rlhf_notes.control.ppo import xyzzy  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("rlhf_notes.formulas.never_there")


def test_all_places_say_the_same_version():
    places = {"CITATION.cff": r"^version: (.+)$", "conda/recipe.yaml": r'^  version: "(.+)"$',
              "CHANGELOG.md": r"^## ([\d.]+)$"}
    for name, pattern in places.items():
        assert re.search(pattern, text(ROOT / name), re.M)[1] == rlhf_notes.__version__, name


def test_the_conda_recipe_asks_for_what_the_wheel_does():
    recipe = text(ROOT / "conda" / "recipe.yaml").split("  run:\n")[1].split("tests:")[0]
    conda = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
    found = re.findall(r"- (\S+) (\S+)", recipe)
    python = f"python>={notebooks.NBDEV.min_python}"
    assert ({conda.get(name, name) + spec for name, spec in found}
            == {python, *notebooks.settings()["requirements"].split()})


def test_the_package_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_notes", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"rlhf-notes {rlhf_notes.__version__}\n")
    done = subprocess.run([sys.executable, "-m", "rlhf_notes", "cartpole", "--seed", "x"],
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--seed" in done.stderr


def test_importing_is_lazy():
    loaded = python("import sys, rlhf_notes; print([m for m in ('torch', 'numpy', "
                    "'gymnasium', 'transformers', 'matplotlib') if m in sys.modules])")
    assert loaded == "[]"
    loaded = python("""import sys
import rlhf_notes
from rlhf_notes import whiten, gae, clipped_surrogate
import torch
torch_brings = set(sys.modules)
for m in {*rlhf_notes._MODULE_OF.values()}:
    if m.startswith(('formulas', 'compat')): __import__('rlhf_notes.' + m)
heavy = 'gymnasium', 'transformers', 'matplotlib', 'cyclopts', 'nbdev', 'fastcore'
print([m for m in heavy if m in sys.modules])
brought = {m.split('.')[0] for m in set(sys.modules) - torch_brings}
print(sorted(brought - {'rlhf_notes'}))""").splitlines()
    assert loaded == ["[]", "[]"]


PATHS = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
         for p in sorted((ROOT / "rlhf_notes").rglob("*.py")) if p.name != "_modidx.py"}
# Rooms that a room may import besides itself; studies and cli may import all.
ARROWS = {
    "checks": "", "formulas": "checks fast", "fast": "checks", "compat": "checks formulas",
    "bridges": "checks formulas",
    "training": "checks viz", "viz": "", "view": "training", "identify": "formulas checks viz",
    "control": "checks formulas fast training viz", "language": "checks formulas fast training viz",
    "hub": "language formulas training fast checks view",
    "reviews": "hub language formulas training fast checks", "exercises": "formulas viz identify"}


BUILDERS = {"nbdev", "fastcore", "execnb"}
ENGINES = {"verl", "trl", "ray"}  # bridges lead to them, studies compare with them
BENCHMARKS = {p.stem for p in (ROOT / "benchmarks").glob("*.py")}  # they import the package


def imports(name):
    """(module, line) of all that a module imports, lazily too; a module of the package stands under
    its whole name.
    """
    package = name.split(".") if PATHS[name].name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(
        ast.parse(PATHS[name].read_text(encoding="utf-8"), feature_version=(3, 10))):
        if isinstance(node, ast.Import): yield from ((a.name, node.lineno) for a in node.names)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if isinstance(node.args[0], ast.Constant): yield node.args[0].value, node.lineno
        if not isinstance(node, ast.ImportFrom): continue
        base = ".".join(package[:len(package) - node.level + 1] if node.level else [])
        module = ".".join(filter(None, (base, node.module)))
        for a in node.names:
            yield (whole if (whole := f"{module}.{a.name}") in PATHS else module), node.lineno


def against_the_arrows(name):
    "Imports of the module `name` that its room may not have."
    room = (name.split(".") + ["top"])[1]
    light = {"rlhf_notes", "torch"} | sys.stdlib_module_names
    for other, line in imports(name):
        package, *rest = other.split(".")
        wrong = (package in BUILDERS | BENCHMARKS
                 or package in ENGINES and room not in ("bridges", "studies")
                 or room in ("formulas", "checks") and package not in light
                 or package == "rlhf_notes" and room in ARROWS and rest
                 and rest[0] not in (room, *ARROWS[room].split()))
        if wrong: yield f"{name}, line {line}: {room} imports {other}"


def test_imports_follow_the_arrows():
    assert not [wrong for name in PATHS for wrong in against_the_arrows(name)]


def test_lazy_imports_are_seen(tmp_path, monkeypatch):
    (tmp_path / "x.py").write_text("def f():\n    from rlhf_notes.studies import failures\n"
                                   "    import_module('rlhf_notes.hub.load')\n")
    monkeypatch.setitem(PATHS, "rlhf_notes.exercises.x", tmp_path / "x.py")
    assert sorted(imports("rlhf_notes.exercises.x")) == [
        ("rlhf_notes.hub.load", 3), ("rlhf_notes.studies.failures", 2)]
    assert len([*against_the_arrows("rlhf_notes.exercises.x")]) == 2


def test_no_module_imports_itself_over_others():
    "No cycle, lazy imports included; the package itself only says where names stand."
    graph = {name: {m for m, _ in imports(name) if m in PATHS and m not in (name, "rlhf_notes")}
             for name in PATHS if name != "rlhf_notes"}
    def ends():
        return {n for n in graph if not graph[n] & graph.keys()
                or not any(n in others for others in graph.values())}
    while gone := ends(): graph = {n: others for n, others in graph.items() if n not in gone}
    assert not graph, f"these import each other: {sorted(graph)}"


def uncommented(functions, lines):
    "Parameters without a comment in their line that says what they are."
    return [f"{f.name}: {a.arg}" for f in functions for a in f.args.args + f.args.kwonlyargs
            if a.arg not in ("self", "cls") and "#" not in lines[a.lineno - 1]]


def undocumented(m, name):
    "The ways in which a public name of the module `m` is not documented or not tested."
    thing = getattr(FORMULAS[m], name)
    tests = (ROOT / "tests" / m.split(".")[0]).glob("test_*.py")
    if not any(re.search(rf"\b{name}\b", text(p)) for p in tests):
        yield f"{name} does not stand in the tests of {m}"
    if not callable(thing): return
    if not inspect.getdoc(thing): yield f"{name} has no docstring"
    source = text(Path(FORMULAS[m].__file__))
    lines, tree = source.splitlines(), ast.parse(source)
    top = next((n for n in tree.body if getattr(n, "name", None) == thing.__name__), None)
    if top is None:  # a namedtuple: its fields stand where it is used
        if not issubclass(thing, tuple): yield f"{name} is not defined in {m}"
        return
    yield from uncommented([n for n in ast.walk(top) if isinstance(n, ast.FunctionDef)
                            and (n is top or n.name == "__init__" or n.name[0] != "_")], lines)


def test_public_names_are_documented_and_tested():
    assert not [fault for m, name in PUBLIC for fault in undocumented(m, name)]


# Not the rooms behind a door.
WITH_NAMES = [p for p in PATHS.values() if p.name[0] != "_" and p.parent.name != "fast"]


def exported(tree):
    "The names in `__all__` of a module."
    names = next(n.value for n in tree.body
                 if isinstance(n, ast.Assign) and n.targets[0].id == "__all__")
    return {e.value for e in names.elts if isinstance(e, ast.Constant)}


def methods(c):
    "What a class defines for others to call."
    return {m.name: m for m in c.body if isinstance(m, ast.FunctionDef) and m.name[0] != "_"}


def without_docstring(path):
    "Exported functions, classes and their methods of more than one line that lack a docstring."
    tree = ast.parse(text(path))
    public = exported(tree)
    tops = [n for n in tree.body if getattr(n, "name", None) in public]
    own = {n.name: methods(n) for n in tops if isinstance(n, ast.ClassDef)}
    # an override keeps the words of what it overrides
    said = {n.name: {name for base in n.bases for name in own.get(getattr(base, "id", None), ())}
            for n in tops if isinstance(n, ast.ClassDef)}
    inside = [m for c in own for name, m in own[c].items() if name not in said[c]]
    return [n.name for n in tops + inside
            if n.body[0].lineno != n.lineno and not ast.get_docstring(n)]


def test_what_is_exported_says_what_it_is():
    assert not broken(without_docstring, WITH_NAMES)


def test_each_argument_of_what_users_call_is_explained():
    for name in CLASSES:
        for c in getattr(rlhf_notes, name).__mro__:
            if c.__name__ not in (*CLASSES, "Trainer"): continue
            source = inspect.getsource(c)
            tree = ast.parse(source).body[0]
            called = [m for m in tree.body if isinstance(m, ast.FunctionDef)
                      and (m.name == "__init__" or m.name[0] != "_")]
            assert not uncommented(called, source.splitlines()), c


@pytest.mark.parametrize("m", [m for m in FORMULAS if m.startswith("formulas.")])
def test_help_says_the_formulas(m):
    module = FORMULAS[m]
    functions = [name for name in module.__all__ if callable(getattr(module, name))]
    missing = [name for name in functions if not re.search(rf"^{name} ", module.__doc__, re.M)]
    assert not missing, f"add them to the cell `formulas-in-code` of {m}'s lesson"


def test_nothing_is_said_in_pyproject_and_in_settings():
    twice = {key for key in notebooks.settings() if notebooks.NBDEV.get(key)}
    assert not twice, f"nbdev knows {twice} from pyproject.toml; settings.ini says it again"


def wheel_agrees_with_nbdev(metadata):
    "The distribution is called, and numbered, as nbdev says."
    said, nbdev = message_from_string(metadata), notebooks.NBDEV
    assert (said["Name"], said["Version"]) == (nbdev.lib_name, rlhf_notes.__version__)
    assert said["Summary"] == nbdev.description
    assert said["Requires-Python"] == f">={nbdev.min_python}"
    urls = [url.split(", ")[1] for url in said.get_all("Project-URL")]
    assert {nbdev.git_url, nbdev.doc_url} <= set(urls)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    "The wheel and the sdist, built from a copy of the project."
    tmp = tmp_path_factory.mktemp("dist")
    source = tmp / "source"
    source.mkdir()
    files = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"],
                           cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for f in files:
        if (ROOT / f).exists() and (not f.startswith("tests/") or f.endswith("peers.py")):
            (source / f).parent.mkdir(parents=True, exist_ok=True)
            (source / f).write_bytes((ROOT / f).read_bytes())
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp / "out"),
                    str(source)], check=True, capture_output=True)
    return next((tmp / "out").glob("*.whl")), next((tmp / "out").glob("*.tar.gz"))


@pytest.mark.slow
def test_wheel_works_away_from_the_project(distributions, tmp_path):
    wheel, _ = distributions
    with zipfile.ZipFile(wheel) as z:
        shipped = set(z.namelist())
        z.extractall(tmp_path)
        metadata = z.read(next(n for n in shipped if n.endswith("METADATA"))).decode()
        entry = z.read(next(n for n in shipped if n.endswith("entry_points.txt"))).decode()
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "rlhf_notes").rglob("*.py*")
               if p.suffix in (".py", ".pyi")}
    assert modules <= shipped and not any(n.startswith(("tests", "nbs", "tools")) for n in shipped)
    lessons = {f"rlhf_notes/{p.relative_to(ROOT)}" for p in notebooks.notebooks()}
    assert lessons <= shipped and "rlhf_notes/nbs/studies/results/failures.csv" in shipped
    assert wheel.stat().st_size < 3e6, "outputs of the notebooks?"
    assert "rlhf-notes = rlhf_notes.cli:main" in entry or "rlhf-notes=rlhf_notes.cli:main" in entry
    assert "rlhf_notes = rlhf_notes._modidx:d" in entry, "other projects of nbdev link to our names"
    wheel_agrees_with_nbdev(metadata)
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")
                and "extra" not in line]
    assert any("torch" in r for r in required) and not any(
        "==" in r for r in required), "ranges, not pins"
    assert not any(n in r for r in required for n in ("nbdev", "fastcore", "jupyter"))
    code = """import rlhf_notes, torch
from rlhf_notes.studies.failures import diagnose
print(rlhf_notes.__file__)
print(rlhf_notes.masked_mean(torch.ones(3)).item(), rlhf_notes.__version__)
print(rlhf_notes.gae.__doc__)
print(diagnose(1, draw=False))"""
    where, numbers, said = python(code, cwd=tmp_path, env={
        "PYTHONPATH": str(tmp_path), "PATH": ""}).split("\n", 2)
    assert Path(where).is_relative_to(tmp_path) and numbers == f"1.0 {notebooks.NBDEV.version}"
    said, asked = said.split("\nCase 1 of ")
    assert asked.endswith("None")
    assert "(T, N)" in said and "terminated or truncated" in said and "default 0.95" in said


def test_comments_become_numpy_docstrings(tmp_path):
    (tmp_path / "f.py").write_text("""def f(x: int,  # (T, N)
      *more,  # of "them"
      eps: float = 1e-8,  # > 0, not a\\b
      plain=None,
     ) -> int:  # in nats
    "Do it."
    return x
""")
    f = runpy.run_path(tmp_path / "f.py")["f"]
    _docstrings.explain(f)
    assert f.__doc__ == """Do it.

Parameters
----------
x : int
    (T, N)
*more
    of "them"
eps : float, default 1e-08
    > 0, not a\\b

Returns
-------
int
    in nats"""
    exec("def g(x): 'As it was.'", names := {})
    _docstrings.explain(names["g"])
    assert names["g"].__doc__ == "As it was."


def test_help_says_the_comments_of_what_users_call():
    for name in ("gae", "kl_loss", "policy_loss", "ppo_error"):
        assert "Parameters\n---" in getattr(rlhf_notes, name).__doc__
    for name in CLASSES: assert "Parameters\n---" in getattr(rlhf_notes, name).__init__.__doc__
    assert "Parameters\n---" in rlhf_notes.PPO.learn.__doc__


def test_help_says_what_an_argument_is_not_where_to_look():
    def elsewhere(name):
        thing = getattr(rlhf_notes, name)
        said = [thing, *vars(thing).values()] if isinstance(thing, type) else [thing]
        docs = "\n".join(getattr(x, "__doc__", None) or "" for x in said if callable(x))
        return re.findall(r"^ +as (?:in|for|of) .*|, as (?:in|for) `.*", docs, re.M)
    found = {name: elsewhere(name) for name in {name for _, name in PUBLIC} | {*CLASSES}}
    found = {name: lines for name, lines in found.items() if lines}
    assert not found


@pytest.mark.slow
def test_sdist_holds_what_building_needs(distributions):
    _, sdist = distributions
    with tarfile.open(sdist) as t: names = {n.split("/", 1)[1] for n in t.getnames() if "/" in n}
    tests = {n for n in names if re.match(r"tests/.*\w\.py", n)}
    assert tests == {"tests/crosscheck/peers.py"}, "all or none, but for what a lesson imports"
    assert {"rlhf_notes/__init__.pyi", "setup.py", "settings.ini", "pyproject.toml", "README.md",
            "LICENSE"} <= names


def test_every_listed_break_was_made_and_caught():
    with open(ROOT / "tests" / "breaks" / "caught.csv", newline="", encoding="utf-8") as f:
        made = {(r["module"], r["break"]): r["caught"] for r in csv.DictReader(f)}
    listed = [(p.stem, b["why"]) for p in BREAKS for b in json.loads(text(p))]
    assert len(set(listed)) == len(listed) > 400
    differ = set(made) ^ set(listed)
    assert not differ and set(made.values()) == {"True"}, f"run `make breaks`: {differ}"


def test_every_listed_break_can_be_made():
    def cannot(path):
        module, notebook, *_ = breaks.find(path.stem)
        cells = json.loads(text(ROOT / notebook))["cells"] if notebook else []
        cells = {c["id"]: "".join(c["source"]) for c in cells}
        places = [(b, cells[b["cell"]] if "cell" in b else text(ROOT / module))
                  for b in json.loads(text(path))]
        # what is no Python would be caught by anything
        for b, code in places: ast.parse(code.replace(b["old"], b["new"]), b["why"])
        return [b["why"] for b, code in places if code.count(b["old"]) != 1]
    assert not broken(cannot, BREAKS)


def test_every_benchmark_can_be_imported(monkeypatch):
    "As `python benchmarks/NAME.py` does, which finds neither tests nor tools."
    folders = {ROOT / name for name in ("benchmarks", "tests", "tools")}
    for name, module in [*sys.modules.items()]:
        if Path(getattr(module, "__file__", None) or ".").parent in folders:
            monkeypatch.delitem(sys.modules, name)
    others = [p for p in sys.path if Path(p) not in folders]
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *others])
    for name in sorted(BENCHMARKS): importlib.import_module(name)
