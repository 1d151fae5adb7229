"""All on a GPU that is pretended (pretend.py says how). The files `inside_*.py` run in a process of
their own, since that device has to be there before torch is imported.
"""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# of `make test-all`; `make test` takes the quick half
ALL = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
pytestmark = pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None,
                                reason="the pretended GPU needs Linux and g++")


def test_on_a_pretended_gpu():
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "pretend", "-p", "no:cacheprovider",
               *([] if ALL else ["-m", "not slow"]), *map(str, sorted(HERE.glob("inside_*.py")))]
    p = subprocess.run(command, capture_output=True, text=True,
                       env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                       cwd=HERE.parent.parent, timeout=1200)
    assert p.returncode == 0, p.stdout[-6000:] + p.stderr[-2000:]
