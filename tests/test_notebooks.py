"""Every notebook runs from top to bottom from the wheel alone: in a process of its own, in an empty
folder, in a minute of processor time. Two run in a kernel of Jupyter, as in JupyterLab.
"""
import os
import subprocess
from importlib.util import find_spec

import cells
import nbformat
import notebooks
import pytest
from environments import make_environment
from filelock import FileLock

LIMIT_S, HANGS_S = 60, 1200  # for a notebook: of the processor, of the clock
SLOWEST_FIRST = ["19_ppo", "08_advantage", "06_kl"]
IN_A_KERNEL = ["start", "kernels"]  # Triton has to be told of its interpreter before it is loaded
PATHS = sorted(
    notebooks.notebooks(),
    key=lambda p: SLOWEST_FIRST.index(p.stem) if p.stem in SLOWEST_FIRST else len(SLOWEST_FIRST))


def changes():
    "What git would commit."
    told = subprocess.run(["git", "status", "--porcelain", "--untracked-files=all"],
                          cwd=notebooks.ROOT, capture_output=True, text=True)
    return set(told.stdout.splitlines())


def code(path):
    "The cells that run."
    return [cell.source for cell in nbformat.read(path, as_version=4).cells
            if cell.cell_type == "code" and not notebooks.is_skipped(cell)]


def in_a_kernel(path, python, folder):
    "Run as JupyterLab does; return the seconds of the processor."
    before = cells.processor_seconds()
    notebooks.execute(path, timeout=HANGS_S, python=python, folder=folder)
    return cells.processor_seconds() - before


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    "An environment with the wheel, for all the workers of pytest."
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ: folder = folder.parent
    with FileLock(folder / "wheel.lock"):
        if (made := folder / "wheel" / "bin" / "python").exists(): return made
        return make_environment(folder / "wheel")


@pytest.fixture(autouse=True)
def always_the_same(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_runs(path, python, tmp_path):
    if path.stem == "kernels" and find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    before, folder = changes(), tmp_path / "empty"
    folder.mkdir()
    if path.stem in IN_A_KERNEL:
        spent = in_a_kernel(path, python, folder)
    else:
        spent = cells.run(python, code(path), folder, log := tmp_path / "log", HANGS_S)
        assert spent is not None, log.read_text()[-5000:]
    assert not changes() - before, f"{path.name} leaves a trace"
    assert spent < LIMIT_S, f"{path.name} takes {spent:.0f} s"


def test_a_cell_that_fails_is_told(python, tmp_path):
    log = tmp_path / "log"
    def run(*source, limit=60): return cells.run(python, source, tmp_path, log, limit)
    assert run("x = 1", "print(x)", "assert x == 2", "x = 3") is None
    assert "1\n" in log.read_text() and "AssertionError" in log.read_text()
    assert run("import time", "time.sleep(60)", limit=1) is None
    assert run("import rlhf_notes", f"assert {str(python.parent.parent)!r} in rlhf_notes.__file__")
    for name in ("fastcore", "peft", "nbdev", "pytest"):
        assert run(f"import {name}") is None, f"{name} is there"
