import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, JUNK, SEEDS, normal, random_mask, value_and_grad

from rlhf_notes.formulas.kl import kl_loss
from rlhf_notes.formulas.ppo import (
    clip_cov_mask,
    kl_cov_penalty,
    ppo_loss,
    ppo_stats,
    top_entropy_mask,
)
from rlhf_notes.formulas.ratio import importance_ratio

SHAPES = st.sampled_from([(4,), (1,), (2, 3), (2, 2, 3)])
MASKS = st.sampled_from([None, 0.0, 0.5, 1.0])
NAMES = ("logp", "logp_old", "advantage", "value", "value_old", "returns", "entropy", "logp_ref")


def case(seed, shape, dtype=torch.float64):
    return {name: normal(seed + k, shape, dtype,
                         scale=1.0 if name in ("advantage", "value", "value_old", "returns")
                         else 0.4) for k, name in enumerate(NAMES)}


def loop(x, m, low, high, dual, clip, c_v, c_e, beta, kind):
    """The parts, the loss, and its slope in log-probability, value and entropy, one sample after
    the other.
    """
    rows = [dict(zip(x, row)) for row in zip(*(t.flatten().tolist() for t in x.values()))]
    n, parts, slopes = (max(sum(m), 1),
                        dict.fromkeys(("policy_loss", "value_loss", "entropy", "kl"), 0.0), [])
    for s, counts in zip(rows, m):
        if not counts:
            slopes.append([0.0] * 3)
            continue
        r, A = math.exp(s["logp"] - s["logp_old"]), s["advantage"]
        J, live = (min(r * A, min(max(r, 1 - low), 1 + high) * A),
                   r <= 1 + high if A > 0 else r >= 1 - low)
        if dual is not None and A < 0 and J < dual * A: J, live = dual * A, False
        V, old, R = s["value"], s["value_old"], s["returns"]
        near = V if clip is None else min(max(V, old - clip), old + clip)
        d = s["logp"] - s["logp_ref"]
        k, slope = {"k1": (d, 1.0), "k2": (d * d / 2, d),
                    "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d))}[kind]
        for name, add in dict(policy_loss=-J, value_loss=max((V - R) ** 2, (near - R) ** 2) / 2,
                              entropy=s["entropy"], kl=k).items():
            parts[name] += add / n
        slopes.append([(-r * A * live + beta * slope) / n,
                       c_v * (V - R) * (abs(near - R) <= abs(V - R)) / n, -c_e / n])
    return (parts,
            parts["policy_loss"] + c_v * parts["value_loss"] - c_e * parts["entropy"] + beta
            * parts["kl"], slopes)


@given(seed=SEEDS, shape=SHAPES, keep=MASKS, low=st.sampled_from([0.05, 0.2, 1.0]),
       high=st.sampled_from([None, 0.5]), dual=st.sampled_from([None, 1.2]),
       clip=st.sampled_from([None, 0.3]), kind=st.sampled_from(["k1", "k2", "k3"]))
def test_loss_parts_and_gradient_are_the_loops(seed, shape, keep, low, high, dual, clip, kind):
    x, mask = case(seed, shape), None if keep is None else random_mask(seed + 9, shape, keep)
    m = [True] * x["logp"].numel() if mask is None else mask.flatten().tolist()
    parts, total, slopes = loop(
        x, m, low, low if high is None else high, dual, clip, 0.7, 0.03, 0.2, kind)
    before = {name: t.clone() for name, t in x.items()}
    leaves = {name: t.clone().requires_grad_(True) for name, t in x.items()}
    loss, got = ppo_loss(**leaves, mask=mask, eps_low=low, eps_high=high, dual_clip=dual,
                         value_clip=clip, value_coef=0.7, entropy_coef=0.03, beta=0.2, kl_kind=kind)
    assert loss.shape == () and loss.item() == pytest.approx(total, rel=1e-9, abs=1e-12)
    assert {name: t.item() for name, t in got.items()} == pytest.approx(parts, rel=1e-9, abs=1e-12)
    assert not any(t.requires_grad for t in got.values())
    grads = dict(zip(NAMES, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)))
    for k, name in enumerate(("logp", "value", "entropy")):
        torch.testing.assert_close(
            grads.pop(name).flatten(), torch.tensor([s[k] for s in slopes], dtype=torch.float64),
            rtol=1e-9, atol=1e-12)
    assert all(g is None for g in grads.values()), "the rest are constants"
    assert all(torch.equal(before[name], t) for name, t in x.items())


@given(seed=SEEDS, keep=MASKS, kind=st.sampled_from(["k1", "k2", "k3"]))
def test_the_weighted_kl_is_that_of_kl_loss(seed, keep, kind):
    x, mask = case(seed, (3, 4)), None if keep is None else random_mask(seed + 9, (3, 4), keep)
    three = x["logp"], x["logp_old"], x["advantage"]
    kl = dict(mask=mask, logp_ref=x["logp_ref"], beta=0.2, kl_kind=kind)
    def by_hand(logp):
        weight = importance_ratio(logp, x["logp_old"])
        return ppo_loss(logp, *three[1:], mask=mask)[0] + 0.2 * kl_loss(
            logp, x["logp_ref"], kind, weight, mask)
    expected = value_and_grad(by_hand, three[0])
    got = value_and_grad(lambda y: ppo_loss(y, *three[1:], kl_weighted=True, **kl)[0], three[0])
    torch.testing.assert_close(got, expected)


@given(seed=SEEDS, keep=MASKS, low=st.sampled_from([0.05, 0.2]), high=st.sampled_from([None, 0.5]))
def test_stats_are_the_loops(seed, keep, low, high):
    x = case(seed, (3, 4))
    mask = None if keep is None else random_mask(seed + 9, (3, 4), keep)
    rows = [(math.exp(a - b), a - b, A)
            for a, b, A, m
            in zip(*(x[k].flatten().tolist() for k in ("logp", "logp_old", "advantage")),
                   [True] * 12 if mask is None else mask.flatten().tolist()) if m]
    n, upper = max(len(rows), 1), low if high is None else high
    stats = ppo_stats(
        x["logp"].requires_grad_(True), x["logp_old"], x["advantage"], mask, low, high)
    assert set(stats) == {"ratio", "approx_kl", "clip_fraction"}
    assert not any(t.requires_grad or t.ndim for t in stats.values())
    assert stats["ratio"].item() == pytest.approx(sum(r for r, _, _ in rows) / n)
    assert stats["approx_kl"].item() == pytest.approx(
        sum(d * d / 2 for r, d, _ in rows) / n, abs=1e-9)
    assert stats["clip_fraction"].item() == pytest.approx(
        sum((A > 0 and r > 1 + upper) or (A < 0 and r < 1 - low) for r, _, A in rows) / n)


def test_by_hand_and_the_defaults():
    new, old, A = (torch.tensor([0.6, 0.2, 0.55]).log(), torch.tensor([0.4, 0.4, 0.5]).log(),
                   torch.tensor([1.0, -1.0, 2.0]))
    V, zero, H = torch.tensor([1.0, 2.0, 0.1]), torch.zeros(3), torch.tensor([0.5, 0.6, 0.7])
    loss, parts = ppo_loss(new, old, A)
    assert loss.item() == pytest.approx(-2.6 / 3) and set(parts) == {"policy_loss"}
    loss, parts = ppo_loss(new, old, A, V, zero, zero, H, logp_ref=old)
    kl = sum(math.log(r) ** 2 / 2 for r in (1.5, 0.5, 1.1)) / 3
    assert {k: v.item() for k, v in parts.items()} == pytest.approx(
        dict(policy_loss=-2.6 / 3, value_loss=5.01 / 6, entropy=0.6, kl=kl), rel=1e-5)
    assert loss.item() == pytest.approx(
        -2.6 / 3 + 0.5 * 5.01 / 6 - 0.01 * 0.6 + 0.04 * kl, rel=1e-5)
    assert ppo_loss(
        new, old, A, mask=torch.tensor([True, False, True]))[0].item() == pytest.approx(-1.7)
    assert ppo_loss(new, old, A, V, None, zero)[1]["value_loss"] == ppo_loss(
        new, old, A, V, zero, zero)[1]["value_loss"]


@given(seed=SEEDS, junk=JUNK, keep=st.sampled_from([0.0, 0.5]), dtype=DTYPES)
def test_nothing_leaks_from_under_the_mask(seed, junk, keep, dtype):
    x, m = case(seed, (3, 4), dtype), random_mask(seed + 9, (3, 4), keep)
    dirty = {name: torch.where(m, t, torch.tensor(junk).to(dtype)) for name, t in x.items()}
    run = lambda x: value_and_grad(
        lambda l, v, h: ppo_loss(**{**x, "logp": l, "value": v, "entropy": h}, mask=m,
                                 value_clip=0.3)[0], x["logp"], x["value"], x["entropy"])
    (loss, grads), (clean, slopes) = run(dirty), run(x)
    assert torch.equal(loss, clean)
    assert loss.isfinite()
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(grads, slopes))
    assert all(
        torch.equal(a, b)
        for a, b in zip(ppo_loss(**dirty, mask=m)[1].values(), ppo_loss(**x, mask=m)[1].values()))
    stats = lambda x: ppo_stats(x["logp"], x["logp_old"], x["advantage"], m)
    assert stats(dirty) == stats(x)
    if not m.any(): assert loss == 0 and all((g == 0).all() for g in grads)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_no_nan_arises_on_the_way_back_from_under_the_mask():
    m, bad = torch.tensor([True, False]), torch.tensor([1.0, math.nan])
    with torch.autograd.detect_anomaly():
        _, grads = value_and_grad(lambda l, v, h: ppo_loss(l, bad, bad, v, bad, bad, h, m,
                                                           logp_ref=bad)[0], bad, bad, bad)
    assert all(g.isfinite().all() for g in grads)


def test_a_nan_that_counts_is_seen():
    for name in NAMES:
        assert ppo_loss(
            **{**case(0, (3,)), name: torch.tensor([0.1, math.nan, 0.2], dtype=torch.float64)},
            value_clip=0.3)[0].isnan(), name


@pytest.mark.parametrize("size", [100.0, 1e6, -1e6])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_no_log_ratio_is_too_large(size, dual):
    loss, (grad,) = value_and_grad(lambda l: ppo_loss(l, torch.zeros(2), torch.tensor([2.0, -2.0]),
                                                      dual_clip=dual)[0], torch.full((2,), size))
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert grad[0 if size > 0 else 1] == 0
    assert (dual is None or grad[1] == 0)


def test_half_precision_vmap_second_derivative_and_compile():
    x = case(0, (4, 5))
    for dtype in (torch.float16, torch.bfloat16):
        half = {name: t.to(dtype) for name, t in x.items()}
        assert torch.equal(
            ppo_loss(**half)[0], ppo_loss(**{name: t.float() for name, t in half.items()})[0])
    f = lambda *t: ppo_loss(**dict(zip(NAMES, t)))[0]
    tensors = list(x.values())
    per_row = torch.func.vmap(torch.func.grad(f))(*tensors)
    torch.testing.assert_close(
        per_row,
        torch.stack([value_and_grad(lambda l: f(l, *row), l)[1][0] for l, *row in zip(*tensors)]))
    assert torch.autograd.gradgradcheck(
        lambda l: f(l, *tensors[1:]), x["logp"].clone().requires_grad_(True))
    leaf = x["logp"].clone().requires_grad_(True)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)(leaf, *tensors[1:])
    torch.testing.assert_close(torch.autograd.grad(compiled, leaf)[0],
                               value_and_grad(lambda l: f(l, *tensors[1:]), leaf)[1][0])


one = torch.ones(4)


@pytest.mark.parametrize("args, kwargs, error, words", [
    ([one, one[:3], one], {}, ValueError,
     r"logp_old must have the shape of logp, \(4,\), got \(3,\)"),
    ([one, one, one.long()], {}, TypeError, "advantage must have a floating-point dtype"),
    ([one, one, 1.0], {}, TypeError, "advantage must be a torch.Tensor, got float"),
    ([one, one, one, one], {}, TypeError, "returns must be a torch.Tensor, got NoneType"),
    *[([one] * 3, {name: x}, ValueError, f"^value must be given if {name} is, got None")
      for name, x in (("returns", one), ("value_old", one), ("value_clip", 0.2))],
    ([one] * 4, dict(returns=one, value_clip=0.2), ValueError,
     "^value_old must be given if value_clip is, got None"),
    ([one, one, one, one, None, one], dict(value_clip=0.2), ValueError, "value_old must be given"),
    ([one, one, one], dict(mask=one), TypeError, r"mask must be boolean \(True = counts\)"),
    ([one, one, one], dict(entropy=one[:1]), ValueError, "entropy must have the shape of logp"),
    ([one, one, one], dict(eps_low=0), ValueError, r"eps_low must be in \(0, 1\], got 0"),
    ([one] * 4, dict(value_clip="0.2"), TypeError, "value_clip must be a number, got str"),
    ([one] * 4, dict(value_clip=0), ValueError, r"value_clip must be in \(0, inf\)"),
    ([one, one, one], dict(dual_clip=1), ValueError, r"dual_clip must be in \(1, inf\), got 1"),
    ([one, one, one], dict(kl_kind="k4"), ValueError, "kl_kind must be one of 'k1', 'k2', 'k3'"),
    *[([one, one, one], {name: -1.0}, ValueError, rf"{name} must be in \[0, inf\), got -1.0")
      for name in ("value_coef", "entropy_coef", "beta")],
])
def test_bad_input_is_named(args, kwargs, error, words):
    with pytest.raises(error, match=words): ppo_loss(*args, **kwargs)


# which tokens spend the entropy

def largest(x, where, share, n):
    """Indices of the largest share of n elements, at least one, of those that a list of booleans
    allows.
    """
    return set(sorted((i for i, w in enumerate(where) if w),
                      key=lambda i: -x[i])[:max(round(share * n), 1)])


@given(seed=SEEDS, keep=st.sampled_from([0.0, 0.5, 1.0]), share=st.sampled_from([0.001, 0.25, 1.0]),
       junk=JUNK, dtype=DTYPES)
def test_masks_and_penalty_are_the_loops(seed, keep, share, junk, dtype):
    m = random_mask(seed, (3, 8), keep)
    H, logp, A, draw = (normal(seed + k, (3, 8), dtype) for k in range(1, 5))
    put = lambda t: torch.where(m, t, torch.tensor(junk).to(dtype))
    where, n = m.flatten().tolist(), int(m.sum())
    flat = lambda t: t.double().flatten().tolist()
    mean = lambda x: math.fsum(v for v, w in zip(x, where) if w) / max(n, 1)
    l, a = flat(logp), flat(A)
    cov = [(u - mean(l)) * (v - mean(a)) for u, v in zip(l, a)]
    if len(set(flat(H))) == len(set(flat(draw))) == 24:  # no ties in half precision
        assert (set(top_entropy_mask(put(H), m, share).flatten().nonzero().flatten().tolist())
                == largest(flat(H), where, share, n))
        inside = [w and -0.3 < c < 0.8 for w, c in zip(where, cov)]
        dropped = ~clip_cov_mask(put(logp), put(A), put(draw), m, share, -0.3, 0.8)
        assert set(
            dropped.flatten().nonzero().flatten().tolist()) == largest(flat(draw), inside, share, n)
    penalty, (grad, of_old, of_A) = value_and_grad(
        lambda x, o, A: kl_cov_penalty(x, o, A, m, share), put(logp), put(logp - 0.5), put(A))
    top = torch.tensor([i in largest(cov, where, share, n) for i in range(24)]).reshape(3, 8)
    if dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(penalty, top * (logp - (logp - 0.5)).abs())
        torch.testing.assert_close(grad, top.to(dtype))
    assert penalty.isfinite().all()
    assert grad.isfinite().all()
    assert (grad[~m] == 0).all()
    assert of_old is None
    assert of_A is None


def test_probable_good_tokens_and_rare_bad_ones_have_the_largest_covariance():
    logp, A = torch.tensor([0.9, 0.5, 0.05, 0.05]).log(), torch.tensor([2.0, 0.0, 2.0, -2.0])
    # covariance 2.4, -.5, -1.9, 3.2
    assert kl_cov_penalty(logp, logp + 0.5, A, share=0.5).tolist() == [0.5, 0, 0, 0.5]
    assert kl_cov_penalty(logp, logp + 0.5, A).tolist() == [0, 0, 0, 0.5]
    assert clip_cov_mask(logp, A, torch.rand(4), low=9.0, high=10.0).all()
    broken = torch.tensor([math.nan, *A[1:]])
    assert kl_cov_penalty(logp, logp, broken).isnan().all()
    assert not kl_cov_penalty(logp, logp, broken, A == 0).any()
    # the default share
    assert top_entropy_mask(torch.arange(10.0)).tolist() == [False] * 8 + [True] * 2
    assert top_entropy_mask(torch.tensor([1.0, math.nan, 3.0])).tolist() == [False, True, False]


def test_entropy_moves_against_the_covariance():
    z, A = normal(0, (6,)), normal(1, (6,))
    entropy = lambda z: -(z.softmax(0) * z.log_softmax(0)).sum()
    p, log_p = z.softmax(0), z.log_softmax(0)
    slope = (entropy(z + 1e-5 * A) - entropy(z - 1e-5 * A)) / 2e-5
    torch.testing.assert_close(
        slope, (p * log_p).sum() * (p * A).sum() - (p * log_p * A).sum(), rtol=1e-6, atol=1e-9)


def test_masks_and_penalty_under_vmap():
    x, A, u = normal(0, (4, 3, 5)), normal(1, (4, 3, 5)), normal(2, (4, 3, 5))
    for f, args in ((lambda x: top_entropy_mask(x, share=0.4), (x,)),
                    (lambda x, A, u: clip_cov_mask(x, A, u, low=-1.0, high=1.0), (x, A, u)),
                    (lambda x, A: kl_cov_penalty(x, x - 1, A, share=0.4), (x, A))):
        assert torch.equal(torch.func.vmap(f)(*args), torch.stack([f(*row) for row in zip(*args)]))


@pytest.mark.parametrize("call, error, words", [
    (lambda: top_entropy_mask(one, share=0.0), ValueError, r"share must be in \(0, 1\], got 0.0"),
    (lambda: top_entropy_mask(one, one), TypeError, "mask must be boolean"),
    (lambda: clip_cov_mask(one, one, one[:2]), ValueError, "draw must have the shape of logp"),
    (lambda: kl_cov_penalty(one, one[:2], one), ValueError, "logp_old must have the shape of logp"),
    (lambda: clip_cov_mask(one, one, one, share=1.5), ValueError, "share must be in"),
    (lambda: clip_cov_mask(one, one, one, low="1"), TypeError, "low must be a number"),
    (lambda: kl_cov_penalty(one, one, one.long()), TypeError,
     "advantage must have a floating-point dtype"),
])
def test_bad_input_of_the_masks_is_named(call, error, words):
    with pytest.raises(error, match=words): call()
