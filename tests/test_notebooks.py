"""Every notebook runs from top to bottom in a kernel of its own, as in JupyterLab, within a time limit, and changes no file of the repository."""
import subprocess
import time
from importlib.util import find_spec

import pytest

import notebooks

LIMIT_S = 60
SLOWEST_FIRST = ["19_ppo", "08_advantage", "06_kl"]
PATHS = sorted(notebooks.notebooks(), key=lambda p: SLOWEST_FIRST.index(p.stem) if p.stem in SLOWEST_FIRST else len(SLOWEST_FIRST))


def changes():
    "What git would commit."
    told = subprocess.run(["git", "status", "--porcelain", "--untracked-files=all"], cwd=notebooks.ROOT, capture_output=True, text=True)
    return set(told.stdout.splitlines())


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_runs(path, monkeypatch):
    if path.stem == "kernels" and find_spec("triton") is None: pytest.skip("Triton is not installed")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    before, start = changes(), time.monotonic()
    notebooks.execute(path, timeout=LIMIT_S)
    assert time.monotonic() - start < LIMIT_S
    assert not changes() - before, f"{path.name} leaves a trace"
