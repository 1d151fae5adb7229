import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    DTYPES,
    EXTREMES,
    JUNK,
    SEEDS,
    masked,
    normal,
    random_mask,
    shapes,
    value_and_grad,
    values,
)

from rlhf_notes.formulas.ratio import importance_ratio
from rlhf_notes.formulas.surrogate import CLIP_KINDS, clip_fraction, clipped_surrogate

EPS = st.one_of(st.sampled_from([0.2, 1.0, 1e-3]), st.floats(0.01, 1.0))
EPS_HIGH = st.one_of(st.none(), st.sampled_from([0.28, 1e-3, 4.0, 1e6]), st.floats(0.01, 3.0))
DUAL = st.one_of(st.none(), st.sampled_from([3.0, 1.01, 1.2]), st.floats(1.01, 10.0))
RATIOS = st.one_of(st.sampled_from([0.0, 1.0, 0.8, 1.2, 1.28, 3.0, 5.0, 1e-30, 1e17, 1e30]),
                   st.floats(0, 4, width=32))
ADVANTAGES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30, 1e6, -1e6]), st.floats(-5, 5, width=32))
LOG_RATIOS = st.one_of(
    EXTREMES, st.floats(-60, 60, width=32), st.sampled_from([math.inf, -math.inf]))


def piecewise(r, A, lower, upper, c):
    "Objective, its slope in r, and whether the clip binds, of one sample, by cases."
    if A >= 0: value, slope, binds = (upper, 0.0, A > 0) if r > upper else (r, A, False)
    elif r < lower: value, slope, binds = lower, 0.0, True
    else: value, slope, binds = (c, 0.0, False) if c is not None and r > c else (r, A, False)
    return A * value, slope, binds


def by_the_papers(r, A, eps_low, eps_high, c):
    "Eq. 7 of the PPO paper, and the dual clip, with minimum and maximum."
    L = torch.minimum(
        r * A, r.clamp(1 - eps_low, 1 + (eps_low if eps_high is None else eps_high)) * A)
    return L if c is None else torch.where(A < 0, torch.maximum(L, c * A), L)


@given(data=st.data(), shape=shapes(0, 3, 4), eps_low=EPS, eps_high=EPS_HIGH, c=DUAL)
def test_value_and_gradient_are_the_piecewise_formula(data, shape, eps_low, eps_high, c):
    r, A = data.draw(values(shape, RATIOS)), data.draw(values(shape, ADVANTAGES))
    before = r.clone(), A.clone()
    L, (grad_r, grad_A) = value_and_grad(
        lambda r, A: clipped_surrogate(r, A, eps_low, eps_high, c), r, A)
    lower, upper = 1 - eps_low, 1 + (eps_low if eps_high is None else eps_high)
    rows = [piecewise(x, a, lower, upper, c)
            for x, a in zip(r.flatten().tolist(), A.flatten().tolist())]
    assert L.shape == r.shape and L.dtype == torch.float64
    assert L.flatten().tolist() == [row[0] for row in rows]
    # at a bound torch passes the gradient, or from 2.15 on none
    inside = [x not in (lower, upper, c) for x in r.flatten().tolist()]
    assert ([g for g, k in zip(grad_r.flatten().tolist(), inside) if k]
            == [row[1] for row, k in zip(rows, inside) if k])
    torch.testing.assert_close(grad_A * A, L)                       # linear in the advantage
    assert clip_fraction(r, A, eps_low, eps_high) == sum(row[2] for row in rows) / len(rows)
    assert torch.equal(r, before[0]) and torch.equal(A, before[1])


@given(seed=SEEDS, eps_low=EPS, eps_high=EPS_HIGH, c=DUAL)
def test_equals_the_minimum_and_maximum_of_the_papers(seed, eps_low, eps_high, c):
    r, A = normal(seed, (50,)).exp(), normal(seed + 1, (50,))
    got = value_and_grad(lambda r, A: clipped_surrogate(r, A, eps_low, eps_high, c), r, A)
    expected = value_and_grad(lambda r, A: by_the_papers(r, A, eps_low, eps_high, c), r, A)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("A, r, dual_clip, objective, gradient", [
    (2.0, 0.5, None, 1.0, 2.0),
    (2.0, 1.1, None, 2.2, 2.0),
    (2.0, 1.5, None, 2.56, 0.0),  # below, inside, above
    (-2.0, 0.5, None, -1.6, 0.0),
    (-2.0, 1.1, None, -2.2, -2.0),
    (-2.0, 1.5, None, -3.0, -2.0),
    (-2.0, 5.0, None, -10.0, -2.0),
    (-2.0, 5.0, 3.0, -6.0, 0.0),
    (-2.0, 2.5, 3.0, -5.0, -2.0),
    (-2.0, 0.5, 3.0, -1.6, 0.0),
    (2.0, 5.0, 3.0, 2.56, 0.0),
    (2.0, 1.1, 3.0, 2.2, 2.0),
    (2.0, 0.5, 3.0, 1.0, 2.0),  # dual clip leaves A > 0 alone
    (0.0, 5.0, 3.0, 0.0, 0.0),
    (0.0, math.inf, None, 0.0, 0.0),
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_by_hand(A, r, dual_clip, objective, gradient, dtype):
    L, (grad,) = value_and_grad(
        lambda r: clipped_surrogate(r, torch.tensor([A], dtype=dtype), 0.2, 0.28, dual_clip),
        torch.tensor([r], dtype=dtype))
    assert L.item() == pytest.approx(objective, rel=1e-6) and grad.item() == gradient


def test_defaults():
    r, A = (torch.tensor([0.0, 0.7, 1.3, 9.0]).repeat(2),
            torch.tensor([1.0, -1.0]).repeat_interleave(4))
    assert torch.equal(clipped_surrogate(r, A), clipped_surrogate(r, A, 0.2, 0.2, None))
    assert torch.equal(clipped_surrogate(r, A, 0.4), clipped_surrogate(r, A, 0.4, 0.4))
    assert clip_fraction(r, A) == clip_fraction(r, A, 0.2, 0.2, "binding")
    assert torch.equal(clipped_surrogate(r, -A.abs(), eps_low=1.0), -r)  # 1 = no lower clip


@given(data=st.data(), dtype=DTYPES, a_dtype=DTYPES, eps_low=EPS, eps_high=EPS_HIGH, c=DUAL)
def test_computes_in_float32_or_better(data, dtype, a_dtype, eps_low, eps_high, c):
    r, A = data.draw(values((4,), st.floats(0, 4))).to(dtype), data.draw(
        values((4,), st.sampled_from([-3.3, -1.0, -0.01, 0.0, 0.01, 1.0, 3.3]))).to(a_dtype)
    wide = torch.float64 if torch.float64 in (dtype, a_dtype) else torch.float32
    L, (grad,) = value_and_grad(lambda r: clipped_surrogate(r, A, eps_low, eps_high, c), r)
    up = lambda x: x if x.dtype == torch.float64 else x.float()
    assert L.dtype == wide and grad.dtype == dtype
    assert torch.equal(L, clipped_surrogate(up(r), up(A), eps_low, eps_high, c))
    # what dual clip stopped is not counted
    binding = (grad == 0) & (A.to(dtype) != 0) & ~((A < 0) & (up(r) > 1))
    assert clip_fraction(r, A, eps_low, eps_high) == binding.float().mean()


@given(
    data=st.data(), dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]), c=DUAL)
def test_no_log_ratio_is_too_large(data, dtype, c):
    x, A = (data.draw(values((4,), LOG_RATIOS)).to(dtype),
            data.draw(values((4,), st.sampled_from([2.0, -2.0, 1.0, -0.5]))).to(dtype))
    L, (grad,) = value_and_grad(
        lambda x: clipped_surrogate(importance_ratio(x, torch.zeros_like(x)), A, dual_clip=c), x)
    r = importance_ratio(x, torch.zeros_like(x))
    stopped = torch.where(A > 0, r > 1.2, r < 0.8) | ((A < 0) & (r > c) if c is not None else False)
    assert L.isfinite().all() and grad.isfinite().all()
    assert (grad[stopped] == 0).all()
    alive = ~stopped & x.isfinite()
    torch.testing.assert_close(grad[alive], (A * r)[alive].to(dtype),
                               rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)


@given(xm=masked(), seed=SEEDS, junk=JUNK, eps_low=EPS, eps_high=EPS_HIGH)
def test_clip_fraction_equals_the_count(xm, seed, junk, eps_low, eps_high):
    x, m = xm
    r, A = x.double().exp().to(x.dtype), normal(seed, x.shape).to(x.dtype)
    lower, upper = 1 - eps_low, 1 + (eps_low if eps_high is None else eps_high)
    if x.dtype != torch.float64:
        lower, upper = (torch.tensor(b, dtype=torch.float32).item() for b in (lower, upper))
    kept = [(p.item(), a.item()) for p, a in zip(r[m], A[m])]
    expected = {"outside": sum(p < lower or p > upper for p, _ in kept),
                "binding": sum((a > 0 and p > upper) or (a < 0 and p < lower) for p, a in kept)}
    for kind in CLIP_KINDS:
        for ratio, advantage in (
            (r, A), (torch.where(m, r, junk).to(r.dtype), torch.where(m, A, junk).to(r.dtype))):
            share = clip_fraction(ratio, advantage, eps_low, eps_high, kind, m)
            assert share.ndim == 0 and not share.requires_grad
            assert share.item() == pytest.approx(expected[kind] / max(len(kept), 1), abs=1e-6)
    assert clip_fraction(r, None, eps_low, eps_high, "outside", m) == clip_fraction(
        r, A, eps_low, eps_high, "outside", m)
    assert clip_fraction(r, A, eps_low, eps_high, mask=m) <= clip_fraction(
        r, A, eps_low, eps_high, "outside", m)


def test_the_two_clip_fractions_differ():
    r, A = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.0]), torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    torch.testing.assert_close(clip_fraction(r, A), torch.tensor(0.4))
    torch.testing.assert_close(clip_fraction(r, kind="outside"), torch.tensor(0.8))
    # no advantage, nothing to stop
    assert clip_fraction(torch.tensor([9.0, 0.1]), torch.zeros(2)) == 0
    assert clip_fraction(torch.tensor([9.0]), torch.tensor([-1.0])) == 0  # nor does dual clip count
    for kind in CLIP_KINDS:
        assert clip_fraction(torch.tensor([1.2, 0.8]), torch.tensor([1.0, -1.0]), kind=kind) == 0


@given(seed=SEEDS, eps_low=EPS, eps_high=EPS_HIGH, c=DUAL)
def test_a_pessimistic_bound(seed, eps_low, eps_high, c):
    r, A = normal(seed, (50,)).exp(), normal(seed + 1, (50,))
    L, dual = (clipped_surrogate(r, A, eps_low, eps_high),
               clipped_surrogate(r, A, eps_low, eps_high, c))
    assert (L <= r * A).all() and (dual >= L).all() and torch.equal(dual[A >= 0], L[A >= 0])
    ones = torch.ones_like(A)
    # the policy gradient at r = 1
    assert torch.equal(
        value_and_grad(lambda r: clipped_surrogate(r, A, eps_low, eps_high, c), ones)[1][0], A)


def test_works_under_vmap_and_compile():
    r, A, m = normal(0, (4, 3, 5)).exp(), normal(1, (4, 3, 5)), random_mask(2, (4, 3, 5))
    for c in (None, 1.5):
        f = lambda r, A: clipped_surrogate(r, A, 0.2, 0.28, c)
        torch.testing.assert_close(torch.func.vmap(f)(r, A), f(r, A))
        torch.testing.assert_close(
            torch.func.vmap(torch.func.grad(lambda r, A: f(r, A).sum()))(r, A),
            value_and_grad(lambda r: f(r, A), r)[1][0])
        torch.testing.assert_close(torch.compile(f, backend="eager", fullgraph=True)(r, A), f(r, A))
    for kind in CLIP_KINDS:
        f = lambda r, A, m: clip_fraction(r, A, kind=kind, mask=m)
        torch.testing.assert_close(
            torch.func.vmap(f)(r, A, m), torch.stack([f(*t) for t in zip(r, A, m)]))
        torch.testing.assert_close(
            torch.compile(f, backend="eager", fullgraph=True)(r, A, m), f(r, A, m))


@pytest.mark.parametrize("f", [clipped_surrogate, clip_fraction])
@pytest.mark.parametrize("args, kwargs, error, words", [
    ((torch.ones(2, 3), torch.ones(2)), {}, ValueError,
     r"advantage must have the shape of ratio, \(2, 3\), got \(2,\)"),
    ((torch.ones(2, 3), torch.ones(2, 1)), {}, ValueError,
     "advantage must have the shape of ratio"),
    ((torch.ones(2, 1), torch.ones(2, 3)), {}, ValueError,
     "advantage must have the shape of ratio"),
    ((torch.ones(2), 1.0), {}, TypeError, "advantage must be a torch.Tensor, got float"),
    ((torch.ones(2).long(), torch.ones(2)), {}, TypeError,
     "ratio must have a floating-point dtype, got torch.int64"),
    ((torch.ones(2), torch.ones(2).long()), {}, TypeError,
     "advantage must have a floating-point dtype"),
    ((torch.ones(2), torch.ones(2), 0), {}, ValueError, r"eps_low must be in \(0, 1\], got 0"),
    ((torch.ones(2), torch.ones(2), -0.2), {}, ValueError, "eps_low"),
    ((torch.ones(2), torch.ones(2), 1.1), {}, ValueError, "eps_low"),
    ((torch.ones(2), torch.ones(2), "0.2"), {}, TypeError, "eps_low must be a number, got str"),
    ((torch.ones(2), torch.ones(2)), {"eps_high": 0}, ValueError,
     r"eps_high must be in \(0, inf\), got 0"),
    ((torch.ones(2), torch.ones(2)), {"eps_high": -0.1}, ValueError, "eps_high"),
    ((torch.ones(2), torch.ones(2)), {"eps_high": math.inf}, ValueError, "eps_high"),
])
def test_bad_input_is_named(f, args, kwargs, error, words):
    with pytest.raises(error, match=words): f(*args, **kwargs)


@pytest.mark.parametrize("call, error, words", [
    (lambda x, m: clipped_surrogate(x, x, dual_clip=1), ValueError,
     r"dual_clip must be in \(1, inf\), got 1"),
    (lambda x, m: clipped_surrogate(x, x, dual_clip=0.5), ValueError, "dual_clip"),
    (lambda x, m: clipped_surrogate(x, x, dual_clip=True), TypeError,
     "dual_clip must be a number, got bool"),
    (lambda x, m: clip_fraction(x), ValueError,
     'advantage must be given for kind="binding", got None'),
    (lambda x, m: clip_fraction(x, x, kind="clipped"), ValueError,
     "kind must be one of 'binding', 'outside', got 'clipped'"),
    (lambda x, m: clip_fraction(x, x, mask=m.float()), TypeError, "mask must be boolean"),
    (lambda x, m: clip_fraction(x, x, mask=m[0]), ValueError, "mask must have the shape of ratio"),
])
def test_more_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize("kind", ["binding", "outside"])
def test_a_ratio_that_is_nan_makes_the_share_nan_where_it_counts(kind):
    ratio, advantage = (torch.tensor([math.nan, 3.0, 1.0, 0.1]).requires_grad_(),
                        torch.tensor([1.0, 1.0, 1.0, -1.0]))
    share = clip_fraction(ratio, advantage, kind=kind)
    assert share.isnan() and not share.requires_grad
    assert clip_fraction(ratio, advantage, kind=kind, mask=~ratio.isnan()) == torch.tensor(2 / 3)
    assert clip_fraction(advantage.abs(), ratio).isnan()
    assert clip_fraction(advantage.abs(), ratio, kind="outside") == 0
