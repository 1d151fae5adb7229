"""Every notebook runs from top to bottom in a process of its own, in a minute of processor time,
and changes no file of the repository. Two run in a kernel of Jupyter, as in JupyterLab.
"""
import subprocess
from importlib.util import find_spec

import cells
import nbformat
import notebooks
import pytest

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


def in_a_kernel(path):
    "Run as JupyterLab does; return the seconds of the processor."
    before = cells.processor_seconds()
    notebooks.execute(path, timeout=HANGS_S)
    return cells.processor_seconds() - before


@pytest.fixture(autouse=True)
def always_the_same(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_runs(path, tmp_path):
    if path.stem == "kernels" and find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    before = changes()
    if path.stem in IN_A_KERNEL:
        spent = in_a_kernel(path)
    else:
        spent = cells.run(code(path), path.parent, log := tmp_path / "log", HANGS_S)
        assert spent is not None, log.read_text()[-5000:]
    assert not changes() - before, f"{path.name} leaves a trace"
    assert spent < LIMIT_S, f"{path.name} takes {spent:.0f} s"


def test_a_cell_that_fails_is_told(tmp_path):
    log = tmp_path / "log"
    assert cells.run(["x = 1", "print(x)", "assert x == 2", "x = 3"], tmp_path, log, 60) is None
    assert "1\n" in log.read_text() and "AssertionError" in log.read_text()
    assert cells.run(["import time", "time.sleep(60)"], tmp_path, log, 1) is None
