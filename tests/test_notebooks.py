"""Every notebook runs from top to bottom in a kernel of its own, as in JupyterLab, in a minute of
processor time, and changes no file of the repository.
"""
import resource
import subprocess
from importlib.util import find_spec

import notebooks
import pytest

LIMIT_S, HANGS_S = 60, 600  # of the processor for a notebook; of the clock for a cell
SLOWEST_FIRST = ["19_ppo", "08_advantage", "06_kl"]
PATHS = sorted(
    notebooks.notebooks(),
    key=lambda p: SLOWEST_FIRST.index(p.stem) if p.stem in SLOWEST_FIRST else len(SLOWEST_FIRST))


def changes():
    "What git would commit."
    told = subprocess.run(["git", "status", "--porcelain", "--untracked-files=all"],
                          cwd=notebooks.ROOT, capture_output=True, text=True)
    return set(told.stdout.splitlines())


def processor_seconds():
    "What ended processes of this one have taken."
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_runs(path, monkeypatch):
    if path.stem == "kernels" and find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    before, spent = changes(), processor_seconds()
    notebooks.execute(path, timeout=HANGS_S)
    assert not changes() - before, f"{path.name} leaves a trace"
    assert (spent := processor_seconds() - spent) < LIMIT_S, f"{path.name} takes {spent:.0f} s"
