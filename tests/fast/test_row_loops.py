"""The Numba loops over rows; values and gradients of the formulas by them are in
tests/formulas/test_logprob.py.
"""
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from formulas.test_logprob import by_rows
from strategies import normal, value_and_grad

from rlhf_notes.fast import row_loops, rows
from rlhf_notes.formulas.logprob import (
    entropy_from_logits,
    log_probs_and_entropy,
    selective_log_softmax,
)

def power(x):
    return np.array([row_loops.exp2(v) for v in np.asarray(x, np.float32)], np.float32)


def test_the_power_of_two_is_right_to_the_last_digits():
    x = np.concatenate([np.linspace(-126, 127, 2001),
                        np.random.default_rng(0).normal(size=300)]).astype(np.float32)
    assert np.abs(power(x) / np.exp2(x.astype(np.float64)) - 1).max() < 2**-22.9
    # whole powers, exactly
    assert (power(np.arange(-126, 128)) == np.exp2(np.arange(-126.0, 128))).all()
    y = power([-math.inf, -1e30, -127, math.inf, 1e30, math.nan])
    assert (y[:3] == 0).all() and (y[3:5] >= 2.0**126).all() and np.isnan(y[5])


def test_the_coefficients_are_those_of_two_to_the_power_of_f():
    f = torch.linspace(-0.5, 0.5, 1001, dtype=torch.float64)
    assert (
        sum(c * f**k for k, c in enumerate(row_loops.COEFFICIENTS)) / 2**f - 1).abs().max() < 3e-9


def backward(z, i, g, base, total):
    out = torch.empty_like(z)
    rows.backward(z, i, 1.0, g, None, base, base, total, out)
    return out


def test_a_bfloat16_is_rounded_to_the_nearest_and_halfway_to_the_even_one():
    "Two equal logits: the gradient of the other token is -g / 2, exactly."
    half = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 3 * 2.0**-8])
    z, i = torch.zeros(4, 2, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.long)
    _, _, base, total = rows.forward(z, i, 1.0, False)
    got = backward(z, i, 2 * half, base, total)[:, 1]
    assert torch.equal(got, (-half).bfloat16())
    assert got.tolist() == [-1, -1 - 2.0**-6, -1 - 2.0**-7, 1 + 2.0**-6]
    # all its bits but the sign
    nan = torch.full((4,), 2**31 - 1, dtype=torch.int32).view(torch.float32)
    assert backward(z, i, nan, base, total).isnan().all()


def test_a_sum_of_many_small_numbers_is_right():
    z, i = torch.zeros(2, 2**21), torch.tensor([5, 0])
    z[1, 1:] = -17  # two million of 4e-8
    exact = z.double().log_softmax(-1)[torch.arange(2), i]
    share = 2**21 * math.exp(-17) / (1 + 2**21 * math.exp(-17))
    # float32 adds 256 at most, one after another where nothing is vectorised
    bound = 256 * 2.0**-24 * share + 2.0**-22
    for entropy in (False, True):
        torch.testing.assert_close(
            rows.forward(z, i, 1.0, entropy)[0].double(), exact, atol=bound, rtol=2.0**-23)


def test_threads_do_not_change_a_digit(monkeypatch):
    monkeypatch.setattr(row_loops, "SHARE", 1)
    z, i = normal(0, (33, 300), torch.float32, 4.0), torch.arange(33)
    found = []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with by_rows():
                found.append(
                    value_and_grad(lambda z: torch.stack(log_probs_and_entropy(z, i, 0.7)), z))
        finally: torch.set_num_threads(before)
    for y, (g,) in found[1:]: assert torch.equal(y, found[0][0]) and torch.equal(g, found[0][1][0])


def test_no_thread_is_woken_for_little(monkeypatch):
    def pool(threads): raise InterruptedError(threads)
    monkeypatch.setattr(row_loops, "_pool", pool)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    z = torch.randn(2, row_loops.SHARE)
    with by_rows():
        selective_log_softmax(z[:, 1:].contiguous(), torch.tensor([0, 1]))
        with pytest.raises(InterruptedError, match="2"):
            selective_log_softmax(z, torch.tensor([0, 1]))


@pytest.mark.parametrize("index", [5, -1, 10**6])
@pytest.mark.parametrize("count", [1, 4])
def test_a_token_beyond_the_vocabulary_is_named(index, count):
    with by_rows(), pytest.raises(
        ValueError,
        match=f"index must be between 0 and 4, the last of 5 choices, got "
        f"{min(index, 0)} to {max(index, 0)}"):
        selective_log_softmax(torch.randn(count + 1, 5), torch.tensor([0] * count + [index]))


def test_an_index_that_changes_between_the_passes_is_an_error():
    z, i = torch.randn(3, 5, requires_grad=True), torch.arange(3)
    with by_rows():
        y = selective_log_softmax(z, i)
        i += 10**6
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        i = torch.arange(3)
        y = selective_log_softmax(z, i)
        i.numpy()[:] = 10**9  # unseen by autograd
        with pytest.raises(ValueError, match="index must be between 0 and 4"): y.sum().backward()
        i = torch.arange(3)
        y = selective_log_softmax(z, i)
        z.data = z.data[:, :2]
        with pytest.raises((ValueError, RuntimeError)): y.sum().backward()


def test_no_array_reaches_a_loop_unchecked():
    z, i, g = torch.randn(3, 5), torch.arange(3), torch.ones(3)
    base, total = rows.forward(z, i, 1.0, False)[2:]
    for bad in (torch.ones(3, dtype=torch.float64), torch.ones(2), torch.ones(3, device="meta")):
        with pytest.raises(ValueError, match="a loop needs torch.float32 of shape"):
            row_loops.backward_rows(z, i, 1.0, g, bad, base, base, total, torch.empty_like(z))
    for out in (torch.empty(3, 4), torch.empty(3, 5, dtype=torch.float64),
                torch.empty(3, 5, device="meta")):
        with pytest.raises((ValueError, RuntimeError), match="a loop needs|shape"):
            row_loops.backward_rows(z, i, 1.0, g, g, base, base, total, out)
    with pytest.raises((ValueError, KeyError)): row_loops.forward_rows(z.double(), i, 1.0, False)


def test_few_logits_stay_with_the_plain_code_and_without_numba_all_do():
    code = """
import sys
sys.modules["numba"] = None
import torch
from rlhf_notes.fast import rows
from rlhf_notes.formulas.logprob import selective_log_softmax, linear_log_probs
rows.LARGE = 0
z, i = torch.randn(4, 9, requires_grad=True), torch.arange(4)
torch.testing.assert_close(selective_log_softmax(z, i), z.log_softmax(-1)[range(4), i])
linear_log_probs(z, torch.randn(6, 9), i, chunk=2).sum().backward()
assert not rows.usable(z) and "rlhf_notes.fast.row_loops" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    few, many = torch.zeros(1, 2**11), torch.zeros(3, 2**10)
    assert not rows.usable(few) and rows.usable(many)
    assert not rows.usable(many.double()) and not rows.usable(many, 1e-35)


def test_a_row_without_a_possible_token_has_no_gradient_of_its_entropy():
    z = torch.randn(3, 5)
    z[1] = -math.inf
    with by_rows(): H, (g,) = value_and_grad(entropy_from_logits, z)
    assert H[1] == 0 and g.isfinite().all() and (g[1] == 0).all() and g[0].any()
