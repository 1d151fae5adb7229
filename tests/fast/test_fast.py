"The door itself: who may shut it, and whether Numba works."
import asyncio
import os
import runpy
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_notes import fast
from rlhf_notes.fast import rows
from rlhf_notes.formulas.advantage import accumulate, gae
from rlhf_notes.formulas.logprob import linear_log_probs, selective_log_softmax

needs_numba = pytest.mark.skipif(not fast.has_numba(), reason="needs Numba")


def python(code, **env):
    "What a process of its own prints, and its warnings."
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], text=True,
                          capture_output=True, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip(), done.stderr


def test_off_is_for_the_thread_that_asks_and_ends_in_any_order():
    a_is_in, b_is_in, a_is_out = (threading.Event() for _ in range(3))
    seen = {}

    def b():
        a_is_in.wait()
        seen["b, while a is inside"] = fast.is_open()
        with fast.off():
            b_is_in.set()
            a_is_out.wait()
            seen["b, inside"] = fast.is_open()
        seen["b, after"] = fast.is_open()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(b)
        with fast.off():
            a_is_in.set()
            b_is_in.wait()
            seen["a, inside"] = fast.is_open()
        seen["a, after"] = fast.is_open()
        a_is_out.set()
        other.result()
    assert [name for name, is_open in seen.items() if not is_open] == ["a, inside", "b, inside"]
    assert fast.is_open()


def test_off_is_for_the_task_that_asks():
    async def plain():
        with fast.off():
            await asyncio.sleep(0)
            return fast.is_open()

    async def quick():
        before = fast.is_open()
        await asyncio.sleep(0)
        return before, fast.is_open()

    async def both(): return await asyncio.gather(plain(), quick())
    assert asyncio.run(both()) == [False, (True, True)]


def test_a_compiled_graph_takes_the_plain_code_inside_off():
    torch._dynamo.reset()
    quick = fast.door(lambda x: x + 1)(lambda x: x - 1)
    f, x = torch.compile(quick, fullgraph=True, backend="eager"), torch.zeros(2)
    assert f(x).tolist() == [1, 1]
    with fast.off(), fast.off(): assert f(x).tolist() == [-1, -1]
    assert f(x).tolist() == [1, 1]


@pytest.mark.parametrize("value, is_open", [("0", False), ("1", True)])
def test_the_environment_shuts_the_door_in_every_thread(value, is_open):
    code = """
from concurrent.futures import ThreadPoolExecutor
from rlhf_notes import fast
with ThreadPoolExecutor(1) as pool: print(fast.is_open(), pool.submit(fast.is_open).result())
"""
    assert python(code, RLHF_NOTES_FAST=value)[0] == f"{is_open} {is_open}"


WITHOUT = """
import torch, numba
from rlhf_notes.fast import rows
from rlhf_notes.formulas.advantage import gae
from rlhf_notes.formulas.logprob import linear_log_probs, log_probs_and_entropy
rows.LARGE, r = 0, torch.randn(2000)
z, i = torch.randn(3, 5, requires_grad=True), torch.arange(3)
for _ in range(2):
    sum(log_probs_and_entropy(z, i)).sum().backward()
    linear_log_probs(z, torch.randn(6, 5), i, chunk=2).sum().backward()
    gae(r, r, r, r > 1, r > 1)
torch.compile(gae, fullgraph=True, backend="eager")(r, r, r, r > 1, r > 1)
"""
BROKEN = """
import sys, types
sys.modules["numba"] = numba = types.ModuleType("numba")
numba.__spec__ = sys.__spec__
"""


@needs_numba
@pytest.mark.parametrize("before, env, why", [
    ("", {"NUMBA_DISABLE_JIT": "1"}, "NUMBA_DISABLE_JIT is set"), (BROKEN, {}, "ImportError")])
def test_where_numba_cannot_work_the_plain_code_does_with_one_warning(before, env, why):
    told = python(before + WITHOUT, **env)[1]
    lines = [line for line in told.splitlines() if "UserWarning: the Numba loops" in line]
    assert len(lines) == 1 and why in lines[0]


@needs_numba
@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
@pytest.mark.parametrize("kept", [0, 20])
def test_a_damaged_file_of_numbas_cache_is_made_anew_with_one_warning(tmp_path, ending, kept):
    (tmp_path / "loops.py").write_text("def twice(x): return 2 * x\n")
    twice = runpy.run_path(tmp_path / "loops.py")["twice"]
    assert fast.compiled(twice)(3) == 6
    damaged, = tmp_path.rglob(f"*{ending}")
    damaged.write_bytes(damaged.read_bytes()[:kept])
    with pytest.warns(UserWarning, match="Numba's cache in") as told:
        assert fast.compiled(twice)(3) == 6
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fast.compiled(twice)(3) == 6


@needs_numba
def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    def full(self, *_): raise OSError(28, "No space left on device")
    from numba.core.caching import IndexDataCacheFile
    monkeypatch.setattr(IndexDataCacheFile, "_save_index", full)
    def twice(x): return 2 * x
    f = fast.compiled(twice)
    with pytest.warns(UserWarning, match="No space left"): assert f(3) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert f(3) == 6 and f(np.ones(2)).tolist() == [2, 2]


USES = {  # operators -> what calls them, of x (T, 2), integers (T,) and flags (T, 2)
    ("scan",): lambda x, i, end: accumulate(x, 0.5 * end),
    ("gae",): lambda x, i, end: gae(*[x.detach()] * 3, end, end)[0],
    ("rows", "rows_backward"): lambda x, i, end: selective_log_softmax(x, i),
    ("head", "head_backward"): lambda x, i, end: linear_log_probs(x, x[:3], i, chunk=500),
}


@pytest.mark.parametrize("name, use", [(name, use) for names, use in USES.items()
                                       for name in names])
def test_an_operator_is_found_by_its_name(name, use, monkeypatch):
    "A page that runs again makes it anew; a handle of the old one points to freed memory."
    def found(*args): raise LookupError(name)
    monkeypatch.setattr(torch.ops.rlhf_notes, name, SimpleNamespace(default=found))
    monkeypatch.setattr(fast, "eager", lambda x: False)
    monkeypatch.setattr(rows, "LARGE", 0)
    x, i = torch.randn(1200, 2, requires_grad=True), torch.zeros(1200, dtype=torch.long)
    with pytest.raises(LookupError, match=f"^{name}$"):
        use(x, i, x > 0).sum().backward()
