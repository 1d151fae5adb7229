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

from rlhf_notes.formulas.ratio import (
    RATIO_LEVELS,
    bounded_log_ratio,
    effective_sample_size,
    importance_ratio,
    m2_mask,
    truncated_importance_weight,
)

LOG_RATIOS = st.one_of(EXTREMES, st.floats(-60, 60, width=32),
                       st.sampled_from([math.inf, -math.inf, 3e38, -3e38, 40.0, -40.0, 88.7, 89.0]))


def limit(dtype):
    return 350.0 if dtype == torch.float64 else 40.0


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@st.composite
def pairs(draw, dims=(1, 3)):
    "(logp, logp_old, mask) of any dtypes, moderate log-ratios."
    shape, seed, scale = draw(shapes(*dims)), draw(SEEDS), draw(st.sampled_from([0.1, 1.0, 5.0]))
    return (
        normal(seed, shape, draw(DTYPES), scale), normal(seed + 1, shape, draw(DTYPES), scale),
        draw(st.sampled_from([None, random_mask(seed + 2, shape), random_mask(seed + 2, shape, 0.0),
                              random_mask(seed + 2, shape, 1.0)])))


@given(data=st.data(), shape=shapes(0, 2), dtype=DTYPES)
def test_bounded_log_ratio_is_a_clamp_whose_gradient_passes(data, shape, dtype):
    x = data.draw(values(shape, LOG_RATIOS)).to(dtype)
    before = x.clone()
    y, (grad,) = value_and_grad(bounded_log_ratio, x)
    L = limit(dtype)
    assert y.dtype == wide(dtype) and y.shape == x.shape and torch.equal(x, before)
    assert y.flatten().tolist() == [min(max(v, -L), L) for v in x.to(y.dtype).flatten().tolist()]
    assert torch.equal(grad, x.isfinite().to(dtype))
    ratio, (grad,) = value_and_grad(lambda x: bounded_log_ratio(x).exp(), x)
    largest = torch.finfo(dtype).max  # float16 holds no e^12: its gradient ends there
    assert torch.equal(grad, torch.where(x.isfinite(), ratio, 0).clamp(max=largest).to(dtype))
    assert grad.isfinite().all()
    for z in (ratio, 1 / ratio):
        assert z.isfinite().all() and (z.square() * 1000).isfinite().all() and (z > 0).all()


def test_bounded_log_ratio_limits_and_nan():
    for dtype, largest in ((torch.float32, 88.7), (torch.float64, 709.7), (torch.bfloat16, 88.7)):
        y = bounded_log_ratio(torch.tensor([1e4, -1e4], dtype=dtype))
        # just under half of what exp bears
        assert y[0] == -y[1] and 0.9 * largest / 2 < y[0] < largest / 2
    assert bounded_log_ratio(torch.tensor(math.nan)).isnan()


@given(abm=pairs())
def test_token_ratio_equals_the_loop(abm):
    logp, logp_old, mask = abm
    r = importance_ratio(logp, logp_old, mask)
    dtype = torch.float64 if torch.float64 in (logp.dtype, logp_old.dtype) else torch.float32
    m = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    expected = [math.exp(a - b) if k else 1.0
                for a, b, k
                in zip(logp.flatten().tolist(), logp_old.flatten().tolist(), m.flatten().tolist())]
    assert r.dtype == dtype and r.shape == logp.shape
    torch.testing.assert_close(r.flatten().double(), torch.tensor(expected, dtype=torch.float64),
                               rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=0)
    _, (grad,) = value_and_grad(lambda x: importance_ratio(x, logp_old, mask), logp)
    most = torch.finfo(logp.dtype).max                      # float16 holds no more
    assert torch.equal(grad, (r * m).clamp(max=most).to(logp.dtype))


@given(abm=pairs(dims=(2, 2)))
def test_sequence_ratio_equals_the_loop(abm):
    logp, logp_old, mask = abm
    s = importance_ratio(logp, logp_old, mask, "sequence")
    m = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    expected = []
    for a, b, k in zip(logp.tolist(), logp_old.tolist(), m.tolist()):
        kept = [x - y for x, y, c in zip(a, b, k) if c]
        expected.append([math.exp(sum(kept) / len(kept)) if kept else 1.0])
    assert s.shape == (len(logp), 1)
    torch.testing.assert_close(
        s.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)
    _, (grad,) = value_and_grad(
        lambda x: importance_ratio(x, logp_old, mask, level="sequence"), logp)
    torch.testing.assert_close(grad, (s * m / m.sum(1, keepdim=True).clamp(min=1)).to(logp.dtype))


@given(seed=SEEDS)
def test_the_mean_over_old_samples_is_the_mean_under_the_new_policy(seed):
    z, z_old, f = (normal(seed, (6,), scale=2.0), normal(seed + 1, (6,), scale=2.0),
                   normal(seed + 2, (6,)))
    p_old = z_old.softmax(0)
    off, (off_grad,) = value_and_grad(
        lambda z: (p_old * importance_ratio(z.log_softmax(0), z_old.log_softmax(0)) * f).sum(), z)
    on, (on_grad,) = value_and_grad(lambda z: (z.softmax(0) * f).sum(), z)
    torch.testing.assert_close(off, on)
    torch.testing.assert_close(off_grad, on_grad)


@pytest.mark.parametrize("level", RATIO_LEVELS)
@given(data=st.data(), dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_no_log_ratio_is_too_large(level, data, dtype):
    summable = LOG_RATIOS.filter(lambda x: not 1e38 < abs(x) < math.inf)
    # both tokens alike, so that a mean exists
    log_ratio = data.draw(values((3, 1), summable)).expand(3, 2).to(dtype)
    r, (grad,) = value_and_grad(
        lambda x: importance_ratio(x, torch.zeros_like(x), level=level), log_ratio)
    L, n = limit(dtype), 2 if level == "sequence" else 1
    torch.testing.assert_close(
        r, log_ratio[:, :r.shape[1]].to(r.dtype).clamp(-L, L).exp(), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        grad,
        torch.where(log_ratio.isfinite(), r / n,
                    0).clamp(max=torch.finfo(dtype).max).to(dtype).expand(3, 2))


def test_a_sequence_is_averaged_before_it_is_limited():
    log_ratio = torch.tensor([[1e6, -1e6, 0.3], [300.0, 0.0, 0.0], [-math.inf, 1.0, 1.0]])
    torch.testing.assert_close(importance_ratio(log_ratio, torch.zeros(3, 3), level="sequence"),
                               torch.tensor([[0.1], [40.0], [-40.0]]).exp())


def test_the_old_policy_is_a_constant():
    logp = normal(0, (2, 3)).requires_grad_(True)
    old = normal(1, (2, 3)).requires_grad_(True)
    importance_ratio(logp, old).sum().backward()
    assert old.grad is None and logp.grad is not None
    for level in RATIO_LEVELS:
        # the forgotten detach
        grad, = torch.autograd.grad(importance_ratio(logp, logp, level=level).sum(), logp)
        torch.testing.assert_close(grad, torch.full_like(grad, 1 if level == "token" else 1 / 3))


@pytest.mark.parametrize("level", RATIO_LEVELS)
@given(xm=masked(min_dims=2, max_dims=2), seed=SEEDS, junk=JUNK, old_junk=JUNK)
def test_nothing_leaks_from_under_the_mask(level, xm, seed, junk, old_junk):
    logp, mask = xm
    old = normal(seed, logp.shape)
    clean, (grad,) = value_and_grad(lambda x: importance_ratio(x, old, mask, level), logp)
    dirty_old = torch.where(mask, old, old_junk)
    dirty, (dirty_grad,) = value_and_grad(lambda x: importance_ratio(x, dirty_old, mask, level),
                                          torch.where(mask, logp, junk).to(logp.dtype))
    assert torch.equal(clean, dirty) and torch.equal(grad, dirty_grad)
    assert (grad[~mask] == 0).all() and grad.isfinite().all()
    nothing = ~mask if level == "token" else ~mask.any(1, keepdim=True)
    assert (clean[nothing] == 1).all()


@given(xm=masked(), scale=st.sampled_from([1e-37, 1e-20, 1.0, 1e20, 1e37]))
def test_effective_sample_size_equals_the_loop(xm, scale):
    x, m = xm
    w = x.float().abs() + 1e-3
    before = w.clone()
    ess = effective_sample_size((w * scale).to(torch.float32), m)
    kept = (w * scale).double()[m].tolist()
    assert ess.ndim == 0 and torch.equal(w, before)
    if not kept:
        assert ess == 0
        return
    expected = sum(kept) ** 2 / sum(v * v for v in kept)
    assert abs(ess.item() - expected) < 1e-4 * expected
    assert 1 - 1e-5 <= ess.item() <= len(kept) * (1 + 1e-5)


@given(xm=masked(dtypes=DTYPES), junk=JUNK)
def test_effective_sample_size_does_not_see_what_is_masked(xm, junk):
    x, m = xm
    w = x.abs()
    ess, (grad,) = value_and_grad(lambda w: effective_sample_size(w, m), w)
    dirty, (dirty_grad,) = value_and_grad(
        lambda w: effective_sample_size(w, m), torch.where(m, w, junk).to(w.dtype))
    assert torch.equal(ess, dirty)
    assert torch.equal(grad, dirty_grad)
    assert (grad[~m] == 0).all()
    assert grad.isfinite().all()
    assert ess.dtype == wide(x.dtype)


@given(seed=SEEDS, n=st.integers(1, 9))
def test_effective_sample_size_gradient(seed, n):
    w = normal(seed, (n,)).exp()
    _, (grad,) = value_and_grad(effective_sample_size, w)
    _, (expected,) = value_and_grad(lambda w: w.sum() ** 2 / (w**2).sum(), w)
    torch.testing.assert_close(grad, expected, atol=1e-12, rtol=1e-9)


def test_effective_sample_size_at_the_edges():
    for w, expected in (([1.0] * 5, 5),
                        ([0.0, 2.0, 0.0], 1),
                        ([0.0, 0.0], 0),
                        ([], 0),
                        ([3e38] * 4, 4),
                        ([1e-45] * 4, 4),
                        ([3e38, 1e-45], 1)):
        assert effective_sample_size(torch.tensor(w)) == expected
    assert effective_sample_size(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)) == 0
    hopeless = importance_ratio(torch.tensor([1e6, -1e6, 5.0]), torch.zeros(3))
    torch.testing.assert_close(effective_sample_size(hopeless), torch.tensor(1.0))


@given(abm=pairs(), cap=st.sampled_from([1.0, 1.5, 2.0, 1e3]))
def test_truncated_weight_equals_the_loop(abm, cap):
    logp_old, logp_rollout, mask = abm
    before = logp_old.clone(), logp_rollout.clone()
    w = truncated_importance_weight(logp_old, logp_rollout, cap, mask)
    dtype = torch.float64 if torch.float64 in (
        logp_old.dtype, logp_rollout.dtype) else torch.float32
    m = torch.ones_like(logp_old, dtype=torch.bool) if mask is None else mask
    expected = [
        min(math.exp(a - b), cap) if k else 1.0
        for a, b, k
        in zip(logp_old.flatten().tolist(), logp_rollout.flatten().tolist(), m.flatten().tolist())]
    assert w.dtype == dtype and w.shape == logp_old.shape
    torch.testing.assert_close(w.flatten().double(), torch.tensor(expected, dtype=torch.float64),
                               rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=0)
    assert torch.equal(before[0], logp_old) and torch.equal(before[1], logp_rollout)


def test_truncated_weight_by_hand():
    log = lambda *p: torch.tensor(p, dtype=torch.float64).log()
    # the cap is 2 by default
    torch.testing.assert_close(
        truncated_importance_weight(log(0.3, 0.2, 0.7), log(0.1, 0.4, 0.7)).tolist(),
        [2.0, 0.5, 1.0])
    torch.testing.assert_close(truncated_importance_weight(log(0.3, 0.2, 0.7), log(0.1, 0.4, 0.7),
                                                           cap=5).tolist(), [3.0, 0.5, 1.0])
    # no bound below
    assert truncated_importance_weight(log(1e-9), log(0.9)).item() == pytest.approx(1e-9 / 0.9)


@given(seed=SEEDS, cap=st.sampled_from([1.0, 1.2, 2.0, 10.0]))
def test_truncated_weight_is_biased_by_what_is_cut_off_and_bounded_in_its_second_moment(seed, cap):
    log_old, log_rollout, f = (normal(seed, (6,), scale=2.0).log_softmax(0),
                               normal(seed + 1, (6,), scale=2.0).log_softmax(0),
                               normal(seed + 2, (6,)))
    w, p = truncated_importance_weight(log_old, log_rollout, cap), log_rollout.exp()
    surplus = [max(a - cap * b, 0) for a, b in zip(log_old.exp().tolist(), p.tolist())]
    assert (p * w * f).sum().item() == pytest.approx(
        (log_old.exp() * f).sum().item() - sum(s * x for s, x in zip(surplus, f.tolist())),
        abs=1e-12)
    assert (p * w**2).sum() <= cap * (p * w).sum() + 1e-12 <= cap + 1e-11
    assert w.amax() <= cap and (truncated_importance_weight(log_old, log_old, cap) == 1).all()


@given(abm=pairs(dims=(2, 2)), cap=st.sampled_from([1.0, 1.5, 1e3]))
def test_weights_of_sequences_and_weights_left_out_equal_the_loop(abm, cap):
    logp_old, logp_rollout, mask = abm
    m = torch.ones_like(logp_old, dtype=torch.bool) if mask is None else mask
    difference = ((logp_old.double() - logp_rollout.double()) * m)
    for level, log_w in (("token", difference), ("sequence", difference.sum(1, keepdim=True))):
        w = log_w.clamp(-40, 40).exp()
        sure = (w / cap - 1).abs() > 1e-4  # at the cap itself rounding decides
        for above, expected in (("cap", w.clamp(max=cap)), ("zero", w.where(w <= cap, 0))):
            got = truncated_importance_weight(logp_old, logp_rollout, cap, mask, level, above)
            assert got.shape == w.shape and not got.requires_grad
            torch.testing.assert_close(got.double()[sure], expected[sure], rtol=1e-4, atol=1e-12)


def test_whole_sequences_are_unbiased_without_a_cap_and_lose_what_lies_above_it():
    "All sequences of two tokens, by their probability under the sampler."
    old, rollout, f = (normal(0, (3, 3)).flatten().log_softmax(0).view(3, 3),
                       normal(1, (3, 3)).flatten().log_softmax(0).view(3, 3), normal(2, (9,)))
    def tokens(joint):
        first = joint.logsumexp(1)
        # log p(a), log p(b | a)
        return torch.stack([first[:, None].expand(3, 3), joint - first[:, None]], -1).reshape(9, 2)
    w = (lambda cap, above: truncated_importance_weight(tokens(old), tokens(rollout), cap, None,
                                                        "sequence", above)[:, 0])
    p, q = rollout.exp().flatten(), old.exp().flatten()
    assert (p * w(1e6, "zero") * f).sum().item() == pytest.approx((q * f).sum().item())
    assert (q > 1.2 * p).any()
    assert (p * w(1.2, "zero") * f).sum().item() == pytest.approx(
        (q * f)[q <= 1.2 * p].sum().item())
    assert (p * w(1.2, "cap") * f).sum().item() == pytest.approx(
        (torch.minimum(q, 1.2 * p) * f).sum().item())
    assert truncated_importance_weight(
        torch.tensor([math.nan]), torch.zeros(1), above="zero").isnan()


@given(abm=pairs(dims=(2, 2)), cap=st.sampled_from([0.5, 1.5, 1e3]),
       floor=st.sampled_from([0.0, 0.3, 0.5]))
def test_bands_and_geometric_weights_equal_the_loop(abm, cap, floor):
    logp_old, logp_rollout, mask = abm
    m = torch.ones_like(logp_old, dtype=torch.bool) if mask is None else mask
    d = (logp_old.double() - logp_rollout.double()) * m
    mean = d.sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1)
    for level, log_w in (("token", d), ("sequence", d.sum(1, keepdim=True)), ("geometric", mean)):
        w = log_w.clamp(-40, 40).exp()
        sure = ((w / cap - 1).abs() > 1e-4) & ((w - floor).abs() > 1e-4 * floor)
        for above, top in (("cap", w.clamp(max=cap)), ("zero", w.where(w <= cap, 0))):
            got = truncated_importance_weight(
                logp_old, logp_rollout, cap, mask, level, above, floor)
            assert got.shape == w.shape and not got.requires_grad
            expected = top.where(w >= floor, 0)
            torch.testing.assert_close(got.double()[sure], expected[sure], rtol=1e-4, atol=1e-12)


@given(seed=SEEDS, floor=st.sampled_from([0.0, 0.5, 0.9]), cap=st.sampled_from([1.0, 2.0, 50.0]))
def test_the_band_is_exact_inside_and_silent_outside(seed, floor, cap):
    log_old, log_rollout = (normal(seed + k, (6,), scale=2.0).log_softmax(0) for k in range(2))
    f, r = normal(seed + 2, (6,)), (log_old - log_rollout).exp()
    w = truncated_importance_weight(log_old, log_rollout, cap, above="zero", floor=floor)
    inside = (floor <= r) & (r <= cap)
    expected = (log_old.exp() * f)[inside].sum()
    torch.testing.assert_close((log_rollout.exp() * w * f).sum(), expected)
    assert (w[~inside] == 0).all()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@given(seed=SEEDS, junk=JUNK)
def test_weights_of_any_level_do_not_see_what_is_masked(level, seed, junk):
    old, rollout, m = normal(seed, (3, 4)), normal(seed + 1, (3, 4)), random_mask(seed + 2, (3, 4))
    band = dict(cap=2.0, mask=m, level=level, above="zero", floor=0.5)
    clean = truncated_importance_weight(old, rollout, **band)
    dirty = truncated_importance_weight(old.masked_fill(~m, junk), rollout, **band)
    assert torch.equal(clean, dirty)
    nothing = truncated_importance_weight(old, rollout, **band | dict(mask=torch.zeros_like(m)))
    assert (nothing == 1).all()
    missing = truncated_importance_weight(old * math.nan, rollout, **band | dict(mask=None))
    assert missing.isnan().all()


@given(data=st.data(), dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_truncated_weight_of_any_log_ratio(data, dtype):
    x = data.draw(values((4,), LOG_RATIOS)).to(dtype)
    w = truncated_importance_weight(x, torch.zeros_like(x), 3.0)
    assert w.dtype == wide(dtype) and (w > 0).all() and w.amax() <= 3
    torch.testing.assert_close(w, x.to(w.dtype).clamp(-limit(dtype), math.log(3)).exp())


@given(xm=masked(), seed=SEEDS, junk=JUNK, old_junk=JUNK)
def test_truncated_weight_does_not_see_what_is_masked(xm, seed, junk, old_junk):
    logp, mask = xm
    rollout = normal(seed, logp.shape)
    clean = truncated_importance_weight(logp, rollout, mask=mask)
    assert torch.equal(clean,
                       truncated_importance_weight(torch.where(mask, logp, junk).to(logp.dtype),
                                                   torch.where(mask, rollout, old_junk), mask=mask))
    assert (clean[~mask] == 1).all()


def test_truncated_weight_is_a_constant():
    leaves = [normal(seed, (2, 3)).requires_grad_(True) for seed in (0, 1)]
    w = truncated_importance_weight(*leaves)
    assert not w.requires_grad
    # the surrogate times the weight: w r, and no more
    grad, = torch.autograd.grad((importance_ratio(leaves[0], leaves[0]) * w).sum(), leaves[0])
    assert torch.equal(grad, w)
    for shape in ((0,), (0, 3), (2, 0)):
        assert truncated_importance_weight(torch.zeros(shape), torch.zeros(shape)).shape == shape
    assert truncated_importance_weight(torch.tensor([math.nan]), torch.zeros(1)).isnan()


def test_works_under_vmap_and_compile():
    logp, old, mask = normal(0, (4, 3, 5)), normal(1, (4, 3, 5)), random_mask(2, (4, 3, 5))
    logp[0, 0, 0] = 1e6
    for level in RATIO_LEVELS:
        f = lambda a, b, m: importance_ratio(a, b, m, level)
        one_by_one = torch.stack([f(a, b, m) for a, b, m in zip(logp, old, mask)])
        torch.testing.assert_close(torch.func.vmap(f)(logp, old, mask), one_by_one)
        per_sample = torch.func.vmap(
            torch.func.grad(lambda a, b, m: f(a, b, m).sum()))(logp, old, mask)
        for g, a, b, m in zip(per_sample, logp, old, mask):
            torch.testing.assert_close(g, value_and_grad(lambda x: f(x, b, m), a)[1][0])
        torch.testing.assert_close(
            torch.compile(f, backend="eager", fullgraph=True)(logp[0], old[0], mask[0]),
            one_by_one[0])
    torch.testing.assert_close(
        torch.func.vmap(lambda a, b, m: truncated_importance_weight(a, b, 1.5, m))(logp, old, mask),
        truncated_importance_weight(logp, old, 1.5, mask))
    w = normal(3, (4, 3, 5)).exp()
    torch.testing.assert_close(torch.func.vmap(effective_sample_size)(w, mask),
                               torch.stack([effective_sample_size(a, m) for a, m in zip(w, mask)]))
    torch.testing.assert_close(
        torch.compile(effective_sample_size, backend="eager", fullgraph=True)(w[0], mask[0]),
        effective_sample_size(w[0], mask[0]))


@pytest.mark.parametrize("call, error, words", [
    (lambda x, m: bounded_log_ratio(x.long()), TypeError,
     "log_ratio must have a floating-point dtype"),
    (lambda x, m: bounded_log_ratio(100.0), TypeError,
     "log_ratio must be a torch.Tensor, got float"),
    (lambda x, m: importance_ratio(x.long(), x), TypeError,
     "logp must have a floating-point dtype, got torch.int64"),
    (lambda x, m: importance_ratio(x, x.tolist()), TypeError,
     "logp_old must be a torch.Tensor, got list"),
    (lambda x, m: importance_ratio(x, x[:1]), ValueError,
     r"logp_old must have the shape of logp, \(2, 3\), got \(1, 3\)"),
    (lambda x, m: importance_ratio(x, x, m.float()), TypeError, "mask must be boolean"),
    (lambda x, m: importance_ratio(x, x, m[0]), ValueError,
     r"mask must have the shape of logp, \(2, 3\), got \(3,\)"),
    (lambda x, m: importance_ratio(x, x, m, "seq"), ValueError,
     "level must be one of 'token', 'sequence', got 'seq'"),
    (lambda x, m: importance_ratio(x[0], x[0], m[0], "sequence"), ValueError,
     r"logp must have the shape \(B, T\), got \(3,\)"),
    (lambda x, m: truncated_importance_weight(x.long(), x), TypeError,
     "logp_old must have a floating-point dtype, got torch.int64"),
    (lambda x, m: truncated_importance_weight(x, x.tolist()), TypeError,
     "logp_rollout must be a torch.Tensor, got list"),
    (lambda x, m: truncated_importance_weight(x, x[:1]), ValueError,
     r"logp_rollout must have the shape of logp_old, \(2, 3\), got \(1, 3\)"),
    (lambda x, m: truncated_importance_weight(x, x, 0), ValueError,
     r"cap must be in \(0, inf\), got 0"),
    (lambda x, m: truncated_importance_weight(x, x, floor=2.0), ValueError,
     r"floor must be in \[0, 1\], got 2.0"),
    (lambda x, m: truncated_importance_weight(x, x, 0.5, floor=0.9), ValueError,
     "floor must be at most cap, 0.5, got 0.9"),
    (lambda x, m: truncated_importance_weight(x[0], x[0], level="geometric"), ValueError,
     r"logp_old must have the shape \(B, T\), got \(3,\)"),
    (lambda x, m: truncated_importance_weight(x, x, level="mean"), ValueError,
     "level must be one of 'token', 'sequence', 'geometric', got 'mean'"),
    (lambda x, m: truncated_importance_weight(x[0], x[0], level="sequence"), ValueError,
     r"logp_old must have the shape \(B, T\), got \(3,\)"),
    (lambda x, m: truncated_importance_weight(x, x, above="mask"), ValueError,
     "above must be one of 'cap', 'zero', got 'mask'"),
    (lambda x, m: truncated_importance_weight(x, x, m), TypeError,
     "cap must be a number, got Tensor"),
    (lambda x, m: truncated_importance_weight(x, x, mask=m[0]), ValueError,
     r"mask must have the shape of logp_old, \(2, 3\), got \(3,\)"),
    (lambda x, m: effective_sample_size(m), TypeError, "ratio must have a floating-point dtype"),
    (lambda x, m: effective_sample_size(x, m.long()), TypeError, "mask must be boolean"),
    (lambda x, m: effective_sample_size(x, m[:1]), ValueError, "mask must have the shape of ratio"),
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))


def dropped_one_by_one(logp, old, A, mask, limit):
    "Algorithm 1 of M2PO: while the mean over the active tokens is too large, drop the largest."
    rows = [(i, t) for i in range(len(logp)) for t in range(len(logp[0])) if mask[i][t]]
    x = {(i, t): logp[i][t] - old[i][t] for i, t in rows}
    active = sorted((at for at in rows if A[at[0]] * x[at] > 0), key=lambda at: abs(x[at]))
    while active and sum(x[at] ** 2 for at in active) / len(active) > limit: active.pop()
    return [[(i, t) in active or (i, t) in x and A[i] * x[i, t] <= 0 for t in range(len(logp[0]))]
            for i in range(len(logp))]


@given(seed=SEEDS, limit=st.sampled_from([0.0, 0.04, 0.3, 5.0]), keep=st.sampled_from([0, 0.7, 1]),
       per_token=st.booleans(), junk=JUNK)
def test_m2_drops_the_largest_of_the_active(seed, limit, keep, per_token, junk):
    logp, old, A = normal(seed, (3, 5)), normal(seed + 1, (3, 5)), normal(seed + 2, (3,))
    A[0] = A[0] if seed % 3 else 0
    m = random_mask(seed + 3, (3, 5), keep)
    given_as = A[:, None].expand(3, 5) if per_token else A
    expected = dropped_one_by_one(*(x.tolist() for x in (logp, old, A, m)), limit)
    leaf = torch.where(m, logp, junk).requires_grad_(True)
    got = m2_mask(leaf, old, given_as, m, limit)
    assert got.dtype == torch.bool and got.tolist() == expected
    if keep == 1: assert torch.equal(got, m2_mask(logp, old, given_as, None, limit))


def test_the_limit_of_m2():
    r, zero = torch.tensor([[1.3, 1.1, 0.5]]), torch.zeros(1, 3)
    assert m2_mask(r.log(), zero, torch.ones(1), None).tolist() == [[True] * 3]  # .0389 of .04
    assert m2_mask(r.log(), zero, torch.ones(1), None, 0.03).tolist() == [[False, True, True]]
    for dtype in (torch.bfloat16, torch.float32):
        far = torch.tensor([[1e30, 0.01]], dtype=dtype)
        assert m2_mask(far, far * 0, torch.ones(1)).tolist() == [[False, True]]
    stacks = normal(0, (4, 3, 5)), normal(1, (4, 3, 5)), normal(2, (4, 3))
    each = torch.stack([m2_mask(*row) for row in zip(*stacks)])
    assert torch.equal(torch.func.vmap(m2_mask)(*stacks), each)
    for kw, words in ((dict(limit=-1), r"limit must be in \[0, inf\)"),
                      (dict(mask=torch.ones(1, 2) > 0), "mask must have the shape of logp")):
        with pytest.raises(ValueError, match=words): m2_mask(zero, zero, torch.ones(1), **kw)
