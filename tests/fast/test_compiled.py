"""The programs in C: what holds of the formulas in pieces and in blocks holds of them compiled, and without a compiler nothing is missing."""
import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

import notebooks
from formulas import test_advantage
from rlhf_notes.formulas import advantage
from rlhf_notes.fast import compiled
from rlhf_notes.fast.compiled import STEPS, gae_loop, scan, status, usable, without
from strategies import normal, random_mask, value_and_grad

here = pytest.mark.skipif(not usable(torch.ones(1)), reason=f"nothing is compiled here: {status()}")


@pytest.fixture
def calls(monkeypatch):
    "The programs that were called, by name, with what they were given."
    seen = []
    monkeypatch.setattr(compiled, "_call", lambda name, *given, f=compiled._call: seen.append((name, given)) or f(name, *given))
    return seen


@pytest.mark.skipif(not sys.platform.startswith("linux") or shutil.which("cc") is None, reason="only where there surely is a compiler")
def test_where_there_is_a_compiler_it_is_used():
    assert os.environ.get("CC") or os.environ.get("RLHF_NOTES_COMPILE") or status() == f"compiled by {shutil.which('cc')}"


# ---- over time

@here
@pytest.mark.parametrize("name", ["test_the_scan_equals_the_double_sum", "test_the_scan_over_tokens_equals_gae_of_the_row_cut_together"])
def test_what_holds_in_blocks_holds_compiled(name, monkeypatch, calls):
    monkeypatch.setattr(advantage, "_COMPILE", 0)
    getattr(test_advantage, name)()
    assert {"scan_double"} <= {name for name, _ in calls}


@here
@pytest.mark.parametrize("T, N", [(2048, 8), (129, 70), (8192, 1), (1, 9000), (2, 5000)])
@pytest.mark.parametrize("gamma, lam", [(0.99, 0.95), (1.0, 1.0), (0.3, 0.5)])
def test_many_steps_equal_the_loop(T, N, gamma, lam, monkeypatch, calls):
    monkeypatch.setattr(advantage, "_COMPILE", 0)
    test_advantage.test_many_steps_equal_the_loop(T, N, gamma, lam)
    assert {name for name, _ in calls} == {"gae_double", "scan_double"}


@here
@pytest.mark.parametrize("dtype", STEPS)
def test_gae_and_the_scan_equal_the_loop(dtype):
    tol = dict(atol=1e-10, rtol=0) if dtype == torch.float64 else dict(atol=1e-4, rtol=1e-5)
    for shape in ((1,), (7,), (300,), (0, 3), (7, 0), (1, 3), (40, 1030), (300, 2)):
        r, v, nv = (normal(i, shape, dtype) for i in range(3))
        terminated = random_mask(3, shape, 0.1); done = terminated | random_mask(4, shape, 0.1)
        before = [t.clone() for t in (r, v, nv)]
        delta, decay = r + 0.9 * torch.where(terminated, 0.0, nv) - v, torch.full(shape, 0.9 * 0.8, dtype=dtype).masked_fill(done, 0)
        if not len(r): loop = r
        else: loop = advantage._step_by_step(delta, decay)
        A, R = gae_loop(r, v, nv, terminated, done, 0.9, 0.8)
        for found in (A, R - v, scan(delta, decay), scan(delta.flip(0), decay.flip(0), forward=True).flip(0)): torch.testing.assert_close(found, loop, **tol)
        assert all(torch.equal(a, b) for a, b in zip(before, (r, v, nv))) and A.dtype == R.dtype == dtype and A.shape == R.shape == shape
        if loop.numel(): torch.testing.assert_close(gae_loop(*(t.t().contiguous().t() for t in (r, v, nv, terminated, done)), 0.9, 0.8), (A, R))      # however they lie


@here
def test_nothing_gets_past_an_end():
    r, v, nv = (normal(i, (30, 5)) for i in range(3))
    terminated = torch.zeros(30, 5, dtype=torch.bool); terminated[9] = True; done = terminated.clone(); done[19] = True
    clean = gae_loop(r, v, nv, terminated, done, 0.99, 0.95)
    for junk in (math.nan, math.inf, -math.inf):
        nv[9], r[25], decay = junk, junk, torch.full((30, 5), 0.9, dtype=torch.float64).masked_fill(done, 0)
        A, R = gae_loop(r, v, nv, terminated, done, 0.99, 0.95)
        assert torch.equal(A[:20], clean[0][:20]) and torch.equal(R[:20], clean[1][:20]) and not A[20:26].isfinite().any()
        y = scan(r, decay)
        assert y[:20].isfinite().all() and not y[20:26].isfinite().any() and y[26:].isfinite().all()


@here
def test_gae_of_many_steps_goes_this_way_and_of_few_does_not(calls):
    for numbers, wanted in ((advantage._COMPILE - 1, False), (advantage._COMPILE, True)):
        r, end = torch.randn(numbers), torch.zeros(numbers, dtype=torch.bool)
        for f in (lambda: advantage.gae(r, r, r, end, end), lambda: advantage.discounted_returns(r, end, 0.9), lambda: advantage.gae_tokens(r[None], r[None])):
            calls.clear(); f()
            assert bool(calls) == wanted
            with without(): calls.clear(); f()
            assert not calls
    calls.clear(); r, end = torch.randn(2**16).half(), torch.zeros(2**16, dtype=torch.bool)
    assert advantage.gae(r, r, r, end, end)[0].dtype == torch.float32 and calls[0][0] == "gae_float"          # in float32 or better
    calls.clear(); advantage.gae(r.float(), r.double(), r.float(), end, end)
    assert not any(name.startswith("gae") for name, _ in calls)                                                # not all alike


@here
def test_advantages_and_returns_may_be_changed_one_without_the_other():
    r, end = torch.randn(2**16), torch.zeros(2**16, dtype=torch.bool)
    A, R = advantage.gae(r, r, r, end, end)
    before, w = R.clone(), torch.ones(2**16, requires_grad=True)
    loss = (w * R).sum()
    A.sub_(A.mean()).div_(A.std())
    loss.backward()
    assert torch.equal(R, before) and torch.equal(w.grad, before) and not A.requires_grad and A.is_leaf


# ---- whether anything is compiled

def test_without_nothing_compiled_is_used_and_afterwards_it_is_again():
    x, was = torch.ones(1), usable(torch.ones(1))
    with without():
        assert not usable(x)
        with pytest.raises(KeyError), without(): raise KeyError
        assert not usable(x)
    assert usable(x) == was


@here
def test_only_what_there_is_a_program_for_is_computed_with_it():
    x = torch.ones(3)
    assert [usable(x.to(d)) for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)] == [True, True, False, False]
    assert [usable(x.to(d), STEPS) for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)] == [True, False, False, True]
    assert not usable(x.to("meta"))


TRY = """
import torch, tempfile
from pathlib import Path
from rlhf_notes.fast import compiled
from rlhf_notes.formulas.advantage import gae
from rlhf_notes.formulas.logprob import selective_log_softmax
z, i, r, end = torch.randn(4, 2**19), torch.arange(4), torch.randn(2**17), torch.zeros(2**17, dtype=torch.bool)
torch.testing.assert_close(selective_log_softmax(z, i), z.log_softmax(-1)[torch.arange(4), i], atol=1e-4, rtol=0)
gae(r, r, r, end, end)
print(compiled.status(), compiled.usable(z), [*Path(tempfile.gettempdir()).iterdir()], sep="\\n")
"""


def elsewhere(folder, **variables):
    env = {k: v for k, v in os.environ.items() if k not in ("CC", "RLHF_NOTES_COMPILE")} | {"TMPDIR": str(folder)} | variables
    return subprocess.run([sys.executable, "-c", TRY], capture_output=True, text=True, check=True, env=env).stdout.splitlines()


@pytest.mark.parametrize("variables, words", [
    ({"RLHF_NOTES_COMPILE": "0"}, "not compiled: RLHF_NOTES_COMPILE is 0"), ({"CC": "no-such-compiler"}, "not compiled: there is no no-such-compiler"),
    ({"CC": "false"}, "not compiled: Command"), ({"CC": "true"}, "not compiled: "), ({"PATH": ""}, "not compiled: there is no cc"),
])
def test_where_it_cannot_be_compiled_the_formulas_are_computed_with_pytorch(tmp_path, variables, words):
    said, can, left = elsewhere(tmp_path, **variables)
    assert said.startswith(words) and can == "False" and left == "[]"


@here
def test_nothing_is_left_behind(tmp_path):
    said, can, left = elsewhere(tmp_path)
    assert said.startswith("compiled by ") and can == "True" and left == "[]"


def test_few_numbers_call_no_compiler(tmp_path):
    code = """
import torch
from rlhf_notes.fast import compiled
from rlhf_notes.formulas.advantage import gae
from rlhf_notes.formulas.logprob import log_probs_and_entropy
compiled._compiled = lambda: 1 / 0
z = torch.randn(4, 2**18, requires_grad=True)
sum(log_probs_and_entropy(z, torch.arange(4))).sum().backward()
r, end = torch.randn(2**15), torch.zeros(2**15, dtype=torch.bool)
gae(r, r, r, end, end)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_notebook_says_so_where_its_proofs_cannot_run():
    cells = {c["id"]: c for c in json.loads((notebooks.ROOT / "nbs" / "fast" / "compiled.ipynb").read_text(encoding="utf-8"))["cells"]}
    script = "\n".join("".join(cells[i]["source"]) for i in ("export-imports", "imports", "library", "rows", "steps", "fit", "proof-power", "proof-rows", "proof-steps", "used"))
    lines = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ | {"RLHF_NOTES_COMPILE": "0", "MPLBACKEND": "agg"}).stdout.splitlines()
    assert lines[-4:] == ["not run here: not compiled: RLHF_NOTES_COMPILE is 0"] * 3 + ["one way: not compiled: RLHF_NOTES_COMPILE is 0"]
    for i in ("proof-power", "proof-rows", "proof-steps"):
        stored = "".join("".join(o["text"]) for o in cells[i]["outputs"])
        assert stored and "not run here" not in stored, f"store {i} where there is a compiler"
