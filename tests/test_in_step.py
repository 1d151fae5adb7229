"""Notebooks, modules and README say the same; the notebooks are clean, and hold their outputs."""
import io
import json
import re
import shutil
import tokenize

import pytest

import notebooks

PATHS = notebooks.notebooks()
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)


def load(path): return json.loads(path.read_text(encoding="utf-8"))


def code_cells(path):
    "(id, source, outputs) of each code cell."
    return [(c["id"], "".join(c["source"]), c["outputs"]) for c in load(path)["cells"] if c["cell_type"] == "code"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    "What `make export` makes of the notebooks as they are, in a copy of the project."
    root = tmp_path_factory.mktemp("exported")
    for name in ("nbs", "rlhf_notes"): shutil.copytree(notebooks.ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("settings.ini", "README.md", "pyproject.toml"): shutil.copy(notebooks.ROOT / name, root)
    notebooks.export(root)
    return root


def test_modules_agree_with_notebooks(exported):
    here = {p.relative_to(notebooks.ROOT): p.read_text(encoding="utf-8") for p in (notebooks.ROOT / "rlhf_notes").rglob("*.py")}
    there = {p.relative_to(exported): p.read_text(encoding="utf-8") for p in (exported / "rlhf_notes").rglob("*.py")}
    assert sorted(map(str, here)) == sorted(map(str, there)), "a module has no notebook, or a notebook no module: run `make export`"
    differ = [str(p) for p in here if here[p] != there[p]]
    assert not differ, f"run `make export`; these modules differ from their notebooks: {differ}"


def test_readme_agrees_with_the_index(exported):
    assert (notebooks.ROOT / "README.md").read_text(encoding="utf-8") == (exported / "README.md").read_text(encoding="utf-8"), "run `make export`"
    assert (notebooks.ROOT / "pyproject.toml").read_text() == (exported / "pyproject.toml").read_text(), "run `make export`"
    for figure in (exported / "nbs" / "images").glob("*.svg"):
        assert (notebooks.ROOT / "nbs" / "images" / figure.name).read_text(encoding="utf-8") == figure.read_text(encoding="utf-8"), "run `make export`"


@each_notebook
def test_is_clean(path):
    assert path.read_text(encoding="utf-8") == notebooks.cleaned(load(path)), f"run `make outputs NB={path.relative_to(notebooks.ROOT)}`"


@each_notebook
def test_cell_ids_are_unique_and_stable(path):
    ids = [c["id"] for c in load(path)["cells"]]
    assert len(set(ids)) == len(ids)


def beyond(source, width):
    "Lines whose code goes further than `width` characters; comments, and strings that have a line or more to themselves, do not count."
    lines, ends, whole = source.split("\n"), {}, set()
    for t in tokenize.generate_tokens(io.StringIO(source).readline):
        if t.type in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER): continue
        (first, start), (last, end) = t.start, t.end
        alone = not (lines[first - 1][:start] + lines[last - 1][end:]).strip()
        if t.type == tokenize.STRING and (first != last or alone): whole |= {*range(first, last + 1)}
        ends[last] = end
    return [lines[n - 1] for n, end in ends.items() if end > width and n not in whole]


@each_notebook
def test_code_ends_where_the_page_does(path):
    long = {cell_id: lines for cell_id, source, _ in code_cells(path) if (lines := beyond(source, notebooks.WIDTH))}
    assert not long, long


def test_lines_that_are_too_long_are_seen():
    assert beyond('x = 1  # a comment\n"a string alone"\ny = "a string behind"', 12) == ['y = "a string behind"'] and beyond("f(1,\n  2, 3, 4)", 8) == ["  2, 3, 4)"]


@each_notebook
def test_outputs_are_stored_and_hold_no_error(path):
    cells = [(source, outputs) for _, source, outputs in code_cells(path) if not notebooks.is_skipped({"source": source})]
    assert not any(o["output_type"] == "error" for _, outputs in cells for o in outputs)
    silent = [source for source, outputs in cells if not outputs and re.search(r"^(print\(|display\(|plt\.|fig, ax)", source, re.M)]
    assert not silent, f"these cells print or draw, but have no stored output: {silent}"


@each_notebook
def test_outputs_hold_nothing_of_the_machine(path):
    text = json.dumps([outputs for _, _, outputs in code_cells(path)])
    assert not re.search(r"/(home|root|Users|tmp|work)/|\bat 0x[0-9a-f]{6,}|Traceback", text)


@each_notebook
def test_every_figure_says_what_it_shows(path):
    for cell_id, source, outputs in code_cells(path):
        drawn = any(kind.startswith("image/") for o in outputs for kind in o.get("data", {}))
        if drawn: assert len(notebooks.directives(source).get("fig-alt", "")) >= 30, f"{cell_id} draws a figure without a `#| fig-alt:` line"


@each_notebook
def test_imports_stand_in_cells_of_their_own(path):
    for cell_id, source, _ in code_cells(path):
        lines = [line for line in source.splitlines() if line.strip() and not line.startswith(("#", " ", ")", "viz.style()"))]
        imports = [line for line in lines if line.startswith(("import ", "from "))]
        assert not imports or len(imports) == len(lines), f"{cell_id} mixes imports with other code"
