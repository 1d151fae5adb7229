"""Every notebook runs from top to bottom in a kernel of its own, as in JupyterLab, in a minute of processor time, and changes no file of the repository."""
import os
import resource
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest

import notebooks

LIMIT_S = 60  # of processor time, which a busy machine does not stretch
HANGS_S = 600
SLOWEST_FIRST = ["19_ppo", "08_advantage", "06_kl"]
PATHS = sorted(notebooks.notebooks(), key=lambda p: SLOWEST_FIRST.index(p.stem) if p.stem in SLOWEST_FIRST else len(SLOWEST_FIRST))


def changes():
    "What git would commit."
    told = subprocess.run(["git", "status", "--porcelain", "--untracked-files=all"], cwd=notebooks.ROOT, capture_output=True, text=True)
    return set(told.stdout.splitlines())


def processor_seconds():
    "What ended processes of this one have taken."
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_runs(path):
    if path.stem == "kernels" and find_spec("triton") is None: pytest.skip("Triton is not installed")
    before, spent = changes(), processor_seconds()
    command = [sys.executable, str(notebooks.ROOT / "tools" / "notebooks.py"), "run", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"})
    try:
        printed, _ = process.communicate(timeout=HANGS_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        pytest.fail(f"{path.name} does not end in {HANGS_S} s", pytrace=False)
    if process.returncode:
        pytest.fail(f"{path.name} failed:\n{printed[-4000:]}", pytrace=False)
    assert not changes() - before, f"{path.name} leaves a trace"
    assert (spent := processor_seconds() - spent) < LIMIT_S, f"{path.name} takes {spent:.0f} s"
