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
from formulas import test_advantage, test_logprob
from rlhf_notes.formulas import advantage, logprob
from rlhf_notes.fast import compiled
from rlhf_notes.fast.compiled import COEFFICIENTS, ROWS, STEPS, backward_rows, exp2, forward_rows, gae_loop, scan, status, usable, without
from strategies import normal, random_mask, value_and_grad
from fast.test_kernels import reference

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


# ---- 2 to the power of x

@here
def test_the_power_of_two_is_right_to_the_last_digits():
    x = torch.cat([torch.linspace(-126, 127, 200_001), torch.randn(1000), torch.arange(-126.0, 128)])
    assert (exp2(x).double() / torch.exp2(x.double()) - 1).abs().max() < 2**-23
    assert torch.equal(exp2(torch.arange(-126.0, 128)), torch.exp2(torch.arange(-126, 128).double()).float())       # whole powers, exactly
    y = exp2(torch.tensor([[-math.inf, -1e30, -127.0], [math.inf, 1e30, math.nan]]))
    assert (y[0] == 0).all() and (y[1, :2] >= 2.0**126).all() and y[1, 2].isnan() and y.shape == (2, 3)
    assert torch.equal(exp2(torch.randn(4, 6).t()[:, ::2]).isfinite(), torch.ones(6, 2).bool()) and exp2(torch.ones(0)).shape == (0,)


@pytest.mark.parametrize("x", [torch.ones(3, dtype=torch.float64), torch.ones(3).bfloat16(), torch.ones(3, dtype=torch.long), torch.ones(3, device="meta")])
def test_what_the_power_is_not_made_for_is_refused(x):
    with pytest.raises(ValueError, match=f"x must be a float32 tensor on the CPU, where the programs are compiled, got {x.dtype} on {x.device}, .*compiled"): exp2(x)
    with without(), pytest.raises(ValueError, match="x must be a float32 tensor"): exp2(torch.ones(3))


def test_the_coefficients_are_those_of_two_to_the_power_of_f():
    f = torch.linspace(-0.5, 0.5, 1001, dtype=torch.float64)
    assert (sum(c * f**k for k, c in enumerate(COEFFICIENTS)) / 2**f - 1).abs().max() < 3e-9


# ---- rows

@here
@pytest.mark.parametrize("name", ["test_pieces_give_what_the_whole_gives", "test_a_row_does_not_depend_on_its_neighbours", "test_a_word_that_is_all_but_impossible", "test_the_gradient_in_place_of_the_logits_is_the_gradient",
                                  "test_in_place_makes_no_tensor_of_the_logits_size", "test_logits_that_others_need_are_not_overwritten_in_silence", "test_pieces_keep_two_numbers_for_a_row",
                                  "test_linear_equals_the_way_through_the_logits", "test_linear_by_finite_differences_and_where_only_some_gradients_are_wanted"])
def test_what_holds_in_pieces_holds_compiled(name, monkeypatch):
    monkeypatch.setattr(test_logprob, "HOW", nullcontext)
    getattr(test_logprob, name)()


@here
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_that_do_not_follow_one_another(threads, monkeypatch, calls):
    monkeypatch.setattr(test_logprob, "HOW", nullcontext)
    test_logprob.test_pieces_of_logits_whose_rows_do_not_follow_one_another(threads)
    assert {name for name, _ in calls} == {"forward_float", "backward_float"} and {given[-1] for _, given in calls} == {threads}


@here
@pytest.mark.parametrize("name", test_logprob.INPLACE)
def test_what_may_not_be_overwritten_is_refused(name, monkeypatch):
    monkeypatch.setattr(test_logprob, "HOW", nullcontext)
    test_logprob.test_what_may_not_be_overwritten_is_refused(name)


@here
@pytest.mark.parametrize("dtype", ROWS)
def test_rows_in_every_layout(dtype, monkeypatch, calls):
    monkeypatch.setattr(logprob, "_WHOLE", 0)
    whole = normal(0, (2, 4, 4200), scale=3.0).to(dtype)
    for z, temperature in ((whole[0, 0, :37], 1.0), (whole[:, 0, :64], 0.7), (whole[:, :-1], 2.0), (whole[:, 1:, :16].transpose(0, 1), 1.0), (whole[..., :1], 1.0), (whole + 1e3, 1.0), (whole[:, :, None, :5], 1.0), (whole[..., ::3], 1.0), (whole[0].expand(3, 4, 4200), 1.0), (whole[:0], 1.0)):
        z = z.detach()
        i = (torch.arange(math.prod(z.shape[:-1])) * 7 % z.shape[-1]).view(z.shape[:-1])
        weight = normal(1, (2, *i.shape))
        exact = z.double().requires_grad_(True)
        (expected,) = torch.autograd.grad((reference(exact, i, temperature) * weight).sum(), exact)
        leaf = z.requires_grad_(True)
        y = torch.stack(logprob.log_probs_and_entropy(leaf, i, temperature))
        (got,) = torch.autograd.grad((y * weight).sum(), leaf)
        torch.testing.assert_close(y.detach().double(), reference(z.detach(), i, temperature), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert {name for name, _ in calls} == {f"{way}_{'float' if dtype == torch.float32 else 'bfloat16'}" for way in ("forward", "backward")}


@here
def test_impossible_words_infinite_logits_and_nan():
    inf = math.inf
    z = torch.tensor([[1.0, 2.0, -inf], [-inf] * 3, [math.nan, 1.0, 2.0], [5.0, 5.0, 5.0], [-inf, -inf, 3.0], [1.0, inf, 2.0], [3e38, -3e38, 0.0], [-3e38, 3e38, 0.0]])
    i = torch.tensor([2, 0, 1, 1, 2, 0, 0, 0])
    for dtype in ROWS:
        logp, H, base, total = forward_rows(z.to(dtype), i, 1.0, True)
        alone = forward_rows(z.to(dtype), i, 1.0, False)
        for y in (logp, alone[0]):
            assert y[0] == -inf and y[1].isnan() and y[2].isnan() and y[4] == 0 and y[5].isnan() and y[6] == 0 and y[7] == -inf
        assert H[1] == 0 and H[2].isnan() and H[4] == 0 and (alone[1] == 0).all() and total[1] == 0
        torch.testing.assert_close(H[[0, 3], 0], torch.tensor([0.58220309, math.log(3)]))
        one, zero = torch.ones(8, 1), torch.zeros(8, 1)
        assert (backward_rows(z.to(dtype), i, 1.0, zero, zero, H, base, total) == 0).all()                   # nothing is asked, whatever lies there
        silent = one.clone(); silent[[1, 2, 5, 7]] = 0
        g = backward_rows(z.to(dtype), i, 1.0, silent, None, None, base, total)
        assert g.isfinite().all() and (g[silent[:, 0] == 0] == 0).all() and g[0, 2] == 1 and g.dtype == dtype
        assert backward_rows(z.to(dtype), i, 1.0, one, None, None, base, total)[2].isnan().all()             # a NaN is seen


@here
def test_a_bfloat16_is_rounded_to_the_nearest():
    z, i = normal(0, (300, 64), torch.bfloat16, 3.0), torch.arange(300) % 64
    leaf = z.float().requires_grad_(True)
    (exact,) = torch.autograd.grad(logprob.selective_log_softmax(leaf, i).sum(), leaf)
    _, _, base, total = forward_rows(z, i, 1.0, False)
    got = backward_rows(z, i, 1.0, torch.ones(300, 1), None, None, base, total)
    assert (got != exact.bfloat16()).float().mean() < 1e-3                                                   # but for ties that a last digit decides


@here
def test_a_bfloat16_halfway_between_two_is_rounded_to_the_even_one():
    "Two equal logits: the gradient of the other word is -g / 2, exactly."
    half = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 3 * 2.0**-8])
    z, i = torch.zeros(4, 2, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.long)
    _, _, base, total = forward_rows(z, i, 1.0, False)
    got = backward_rows(z, i, 1.0, 2 * half[:, None], None, None, base, total)[:, 1]
    assert torch.equal(got, (-half).bfloat16()) and got.tolist() == [-1, -1 - 2.0**-6, -1 - 2.0**-7, 1 + 2.0**-6]
    nan = torch.full((4, 1), 2**31 - 1, dtype=torch.int32).view(torch.float32)                               # all its bits but the sign
    assert backward_rows(z, i, 1.0, nan, None, None, base, total).isnan().all()


@here
def test_a_sum_of_many_small_numbers_is_right():
    z, i = torch.zeros(2, 2**21), torch.tensor([5, 0])
    z[1, 1:] = -17                                                               # two million of 4e-8
    exact = z.double().log_softmax(-1)[torch.arange(2), i]
    for entropy in (False, True): torch.testing.assert_close(forward_rows(z, i, 1.0, entropy)[0][:, 0].double(), exact, atol=4e-6, rtol=1e-6)     # the thousand in which the 1 stands loses 64 of them


@here
@pytest.mark.parametrize("index", [5, -1, 10**6])
def test_a_word_beyond_the_vocabulary_is_named(index, monkeypatch):
    monkeypatch.setattr(logprob, "_WHOLE", 0)
    with pytest.raises(ValueError, match=f"index must be between 0 and 4, the last of 5 choices, got {min(index, 0)} to {max(index, 0)}"):
        logprob.selective_log_softmax(torch.randn(2, 5), torch.tensor([0, index]))


@here
def test_threads_do_not_change_a_digit():
    z, i, w = normal(0, (33, 3000), torch.float32, 4.0), torch.arange(33), normal(1, (2, 33, 1), torch.float32)
    found = []
    for threads in (1, 2, 3):
        before = torch.get_num_threads(); torch.set_num_threads(threads)
        try:
            out = forward_rows(z, i, 0.7, True)
            found.append([*out, backward_rows(z, i, 0.7, *w, *out[1:]), *gae_loop(z, z, z, z > 3, z > 2, 0.9, 0.9), scan(z, z)])
        finally: torch.set_num_threads(before)
    for other in found[1:]: assert all(torch.equal(a, b) for a, b in zip(found[0], other))


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
