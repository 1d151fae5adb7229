"""The loop behind returns and GAE: the plain code's values, gradients, NaN and shapes, under vmap
and in one graph.
"""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import SEEDS, normal, random_mask, value_and_grad

from rlhf_notes import fast
from rlhf_notes.fast import scan
from rlhf_notes.formulas.advantage import (
    accumulate,
    discounted_returns,
    gae,
    gae_tokens,
    reinforce_pp_advantage,
)

needs_numba = pytest.mark.skipif(not fast.has_numba(), reason="needs Numba")


@pytest.fixture
def many(monkeypatch):
    "However few the steps are, the loop is taken."
    monkeypatch.setattr(scan, "SHORT", 0)
    monkeypatch.setattr(scan, "SMALL", 1)
    called = []
    for name in ("_scan", "_scan_now", "_gae", "_gae_now"):
        op = getattr(scan, name)
        monkeypatch.setattr(scan, name, lambda *a, op=op: called.append(op) or op(*a))
    return called


@needs_numba
@pytest.mark.parametrize("T, N", [(2048, 8), (129, 70), (8192, 1), (1, 3), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loop_equals_the_plain_code(many, T, N, dtype):
    r, v, nv, terminated, truncated = (*(normal(i, (T, N), dtype) for i in range(3)),
                                       random_mask(3, (T, N), 0.02), random_mask(4, (T, N), 0.02))
    nv = torch.where(terminated, math.nan, nv)
    done, m = terminated | truncated, random_mask(5, (N, T), 0.8)
    def everything():
        A = gae(r, v, nv, terminated, done, 0.9, 0.8)
        y, grads = value_and_grad(lambda *x: gae(*x, terminated, done, 0.9, 0.8)[0].cos(), r, v,
                                  torch.where(terminated, 1, nv))
        tokens = gae_tokens(torch.where(m, r.T, math.nan), torch.where(m, v.T, math.inf), m)
        return *A, y, *grads, *tokens, discounted_returns(r, done, 0.9)
    quick = everything()
    assert len(many) > 5
    with fast.off(): plain = everything()
    torch.testing.assert_close(quick, plain, rtol=2e-5, atol=2e-5)


@needs_numba
@given(seed=SEEDS, T=st.integers(1, 9), gamma=st.sampled_from([0.0, 0.5, 1.0]),
       p=st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=15)
def test_the_gradient_of_the_loop_by_finite_differences(seed, T, gamma, p):
    terminated, truncated = random_mask(seed, (T, 2), p), random_mask(seed + 1, (T, 2), p / 2)
    leaves = [normal(seed + i, (T, 2)).requires_grad_(True) for i in range(3)]
    f = lambda *x: gae(*x, terminated, terminated | truncated, gamma, 0.9)[0].sin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "SMALL", 1)
        assert torch.autograd.gradcheck(f, leaves) and torch.autograd.gradgradcheck(f, leaves)


@needs_numba
def test_the_loop_under_vmap_and_in_one_graph(many):
    r, v, nv = (normal(i, (4, 6, 3)) for i in range(3))
    terminated, m, c = random_mask(3, (4, 6, 3), 0.2), random_mask(5, (4, 6, 3)), normal(6, (4, 6))
    for f, batch in (
        (lambda r, d: discounted_returns(r, d, 0.9), (r, terminated)),
        (lambda *x: torch.stack(gae(*x, 0.9, 0.8)), (r, v, nv, terminated, terminated | m)),
        (lambda *x: torch.stack(gae_tokens(*x, 0.9, 0.8)), (r, v, m)),
        (lambda r, m, c: reinforce_pp_advantage(r, m, 0.9, c), (r, m, c))):
        one_by_one = torch.stack([f(*one) for one in zip(*batch)])
        torch.testing.assert_close(torch.func.vmap(f)(*batch), one_by_one)
        shared = [x if x.is_floating_point() else x[0] for x in batch]  # one mask for all
        dims = tuple(0 if x.is_floating_point() else None for x in batch)
        torch.testing.assert_close(
            torch.func.vmap(f, in_dims=dims)(*shared),
            torch.stack([f(*(x if d is None else x[i] for x, d in zip(shared, dims)))
                         for i in range(4)]))
        g = lambda *x: f(*x).square().sum()
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(g))(*batch),
                                   torch.stack([torch.func.grad(g)(*one) for one in zip(*batch)]))
        torch._dynamo.reset()
        torch.testing.assert_close(
            torch.compile(f, fullgraph=True, backend="aot_eager")(*(x[0] for x in batch)),
            one_by_one[0])
    assert many
    x, decay = normal(0, (6, 3)), random_mask(1, (6, 3)).double()
    torch.library.opcheck(torch.ops.rlhf_notes.scan.default, (x, decay))
    torch.library.opcheck(
        torch.ops.rlhf_notes.gae.default, (x, x, x, decay > 0, decay > 0, 0.9, 0.8))


def test_nothing_that_does_not_fit_reaches_the_loop():
    x = torch.ones(4, 3)
    for decay in (torch.ones(4, 2), torch.ones(4, 3).double(), torch.ones(12), torch.ones(3, 3)):
        with pytest.raises(ValueError, match=r"the loop expects torch.float32, \(4, 3\), cpu, got"):
            scan._scan(x, decay)
    for t in (x[:3], x.double(), x.long()):
        with pytest.raises(ValueError, match="the loop expects"):
            scan._gae(x, x, x, x > 0, t, 0.9, 0.9)
    assert scan.gae(x, x.double(), x, x > 0, x > 0, 0.99, 0.95) is NotImplemented
    assert scan.accumulate(x[:3], x[:3]) is NotImplemented
    decay = torch.ones(4, 3)[:, :1].expand(4, 3)                        # no memory of its own
    torch.testing.assert_close(scan._scan(x.T.contiguous().T, decay), accumulate(x, decay))
    assert scan._scan(x[:0], x[:0]).shape == (0, 3)
    assert scan._scan(x[:, :0], x[:, :0]).shape == (4, 0)


@needs_numba
def test_few_steps_and_a_shut_door_take_the_plain_code_and_few_numbers_numpy(monkeypatch):
    called = []
    def note(name): return lambda *a: called.append(name) or a[0]
    for name in ("_scan", "_scan_now", "_gae", "_gae_now"):
        monkeypatch.setattr(scan, name, note(name))
    for steps, wanted in ((scan.SHORT - 1, []), (scan.SMALL - 1, ["_scan_now"]),
                          (scan.SMALL, ["_gae_now"])):
        r, end = torch.randn(steps), torch.zeros(steps, dtype=torch.bool)
        called.clear()
        gae(r, r, r, end, end)
        assert called == wanted
        called.clear()
        gae(r.requires_grad_(True), r, r, end, end)
        assert called == ["_scan"] * len(wanted)
        with fast.off():
            called.clear()
            gae(r, r, r, end, end)
        assert not called


@pytest.mark.parametrize("bad", [1.0, math.inf, math.nan])
def test_a_row_at_a_time_gives_what_the_loop_gives(monkeypatch, bad):
    monkeypatch.setattr(fast, "has_numba", lambda: False)
    x, decay = normal(0, (40, 3)), random_mask(1, (40, 3)) * normal(2, (40, 3)).abs()
    x[20, 1] = bad
    quick = accumulate(x, decay)
    with fast.off(): plain = accumulate(x, decay)
    torch.testing.assert_close(quick, plain, equal_nan=True)


@needs_numba
def test_nothing_passes_a_cut_not_even_nan(many):
    rewards, done = torch.ones(6, 2), torch.zeros(6, 2, dtype=torch.bool)
    rewards[4, 0], done[2, 0] = math.nan, True
    returns = discounted_returns(rewards, done, 0.5)
    assert many
    assert torch.equal(returns[:3, 0], torch.tensor([1.75, 1.5, 1.0]))
    assert returns[3:5, 0].isnan().all()


@needs_numba
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("gamma, lam", [(0.9, 0.0), (0.0, 0.9), (1e-30, 1e-30), (0.9, 0.8)])
def test_a_decay_of_0_cuts_whatever_comes_later(many, gamma, lam, bad):
    r, zero, end = torch.ones(8, 2), torch.zeros(8, 2), torch.zeros(8, 2, dtype=torch.bool)
    r[5, 0] = bad
    quick = gae(r, zero, zero, end, end, gamma, lam)[0]
    with fast.off(): plain = gae(r, zero, zero, end, end, gamma, lam)[0]
    torch.testing.assert_close(quick, plain, equal_nan=True)
    assert many and (~quick.isfinite()).sum() == (6 if gamma == 0.9 and lam else 1)
