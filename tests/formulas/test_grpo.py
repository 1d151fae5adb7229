import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, JUNK, SEEDS, normal, random_mask, value_and_grad

from rlhf_notes.formulas.grpo import (
    BY_PROMPT,
    POLICY_VARIANTS,
    off_policy_sequence_mask,
    policy_loss,
    register_variant,
)
from rlhf_notes.formulas.masking import aggregate_count, aggregation_weights
from rlhf_notes.formulas.ratio import importance_ratio, truncated_importance_weight

F64 = torch.float64
VARIANTS = st.sampled_from(list(POLICY_VARIANTS))
SURROGATES = ("ppo", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token")
DEFAULTS = {"ppo": (0.2, 0.2), "grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28),
            "gspo": (3e-4, 4e-4), "gspo_token": (3e-4, 4e-4), "cispo": (1.0, 4.0),
            "sapo": (None, None), "gmpo": (0.4, 0.4), "dppo": (0.2, 0.2), "vespo": (None, None),
            "luspo": (3e-4, 4e-4), "cpgd": (0.2, 0.2), "topr": (None, None)}
UNBOUNDED = [v for v, (low, _) in DEFAULTS.items() if low is None]
AGGREGATION = {
    "ppo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "constant", "dapo": "token-mean",
    "gspo": "seq-mean-token-mean", "gspo_token": "seq-mean-token-mean", "cispo": "token-mean",
    "sapo": "seq-mean-token-mean", "gmpo": "seq-mean-token-mean",
    "dppo": "token-mean", "vespo": "token-mean", "luspo": "seq-mean-token-sum",
    "cpgd": "token-mean", "topr": "seq-mean-token-sum"}


# An oracle in plain Python: loops over answers and tokens, nothing of the library

def clip(x, low, high): return min(max(x, low), high)
def free(x, A, low, high): return x <= high if A > 0 else x >= low


def token_weights(mask, mode, length=None):
    "What one token of each answer weighs."
    counts = [sum(row) for row in mask]
    full = sum(n > 0 for n in counts)
    return [0.0 if n == 0
            else {"token-mean": 1 / sum(counts), "seq-mean-token-mean": 1 / (full * n),
                  "seq-mean-token-sum": 1 / full,
                  "constant": 1 / (len(mask) * (length or len(mask[0])))}[mode] for n in counts]


def oracle(variant, logp, old, A, mask, low=None, high=None, dual=None, tau=(1.0, 1.05), mode=None,
           length=None, divergence="tv"):
    """(loss, its slope in each log-probability, share of bounded tokens); A: one number for each
    answer.
    """
    low, high = ((DEFAULTS[variant][0] if low is None else low),
                 (DEFAULTS[variant][1] if high is None else high))
    c = token_weights(mask, mode or AGGREGATION[variant], length)
    loss, slope, bounded, total = 0.0, [[0.0] * len(row) for row in logp], 0, 0
    for i, row in enumerate(mask):
        where, a = [t for t, m in enumerate(row) if m], A[i]
        if not where: continue
        r = {t: math.exp(logp[i][t] - old[i][t]) for t in where}
        s = math.exp(math.fsum(logp[i][t] - old[i][t] for t in where) / len(where))
        for t in where:
            total += 1
            if variant in (*SURROGATES, "luspo"):
                x = s if variant in ("gspo", "gspo_token", "luspo") else r[t]
                J = min(x * a, clip(x, 1 - low, 1 + high) * a)
                is_free = free(x, a, 1 - low, 1 + high)
                bounded += a != 0 and not is_free
                if dual is not None and a < 0 and J < dual * a: J, is_free = dual * a, False
                w = x * is_free
            elif variant == "cispo":
                w = clip(r[t], 1 - low, 1 + high)
                J = w * a * logp[i][t]
                bounded += w != r[t]
            elif variant == "sapo":
                k = tau[0] if a > 0 else tau[1]
                p = 1 / (1 + math.exp(-k * (r[t] - 1)))
                J, w = 4 / k * p * a, 4 * p * (1 - p) * r[t]
            elif variant == "dppo":
                p, q = math.exp(logp[i][t]), math.exp(old[i][t])
                D = abs(p - q) if divergence == "tv" else (
                    q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)))
                far = D > high and r[t] > 1 if a > 0 else D > low and r[t] < 1 and a < 0
                J, w = (0.0, 0.0) if far else (r[t] * a, r[t])
                bounded += far
            elif variant == "vespo":
                k, b = (2, 3) if a >= 0 else (3, 2)
                w = math.exp(b + k * len(where) * math.log(s) - b * s ** len(where))
                J = w * a * logp[i][t]
            elif variant == "cpgd":
                x = math.log(r[t])
                top, bottom = math.log(1 + high), math.log(1 - low) if low < 1 else -math.inf
                J, is_free = min(x * a, clip(x, bottom, top) * a), free(x, a, bottom, top)
                w = float(is_free)
                bounded += a != 0 and not is_free
            elif variant == "topr":
                w = 1 if a > 0 else min(s ** len(where), 1)
                J = w * a * logp[i][t]
                bounded += a < 0 and s > 1
            else:
                held = [clip(x, 0, math.exp(high)) if a > 0 else max(x, math.exp(-low))
                        for x in r.values()]
                geometric = math.prod(held) ** (1 / len(held))
                J, w = geometric * a, geometric * free(r[t], a, math.exp(-low), math.exp(high))
                bounded += a != 0 and w == 0
            loss -= c[i] * J
            slope[i][t] = -c[i] * w * a
    return loss, slope, bounded / max(total, 1)


def batch(seed, B=3, T=4, spread=0.5, keep=0.7):
    logp = -normal(seed, (B, T)).abs() * 2
    return (logp, logp - normal(seed + 1, (B, T), scale=spread), normal(seed + 2, (B,)),
            random_mask(seed + 3, (B, T), keep))


def close(got, expected, **kw):
    torch.testing.assert_close(
        got, torch.as_tensor(expected, dtype=got.dtype), **({"rtol": 1e-9, "atol": 1e-12} | kw))


SHAPES = dict(B=st.integers(1, 4), T=st.integers(1, 5), spread=st.sampled_from([0.0003, 0.3, 2.0]),
              keep=st.sampled_from([0.0, 0.5, 0.9, 1.0]))


@settings(max_examples=150)
@given(variant=VARIANTS, seed=SEEDS, **SHAPES)
def test_loss_and_gradient_are_those_of_the_paper(variant, seed, B, T, spread, keep):
    logp, old, A, m = batch(seed, B, T, spread, keep)
    before = [t.clone() for t in (logp, old, A, m)]
    loss, slope, bounded = oracle(variant, logp.tolist(), old.tolist(), A.tolist(), m.tolist())
    stats = {}
    def f(x):
        out, s = policy_loss(x, old, A, m, variant)
        stats.update(s)
        return out
    got, (grad,) = value_and_grad(f, logp)
    assert got.shape == () and got.dtype == F64
    close(got, loss)
    close(grad, slope)
    assert stats["clip_fraction"].item() == pytest.approx(bounded, abs=1e-6)
    n = max(int(m.sum()), 1)
    d = (logp - old)[m]
    close(stats["ratio"], d.exp().sum() / n)
    close(stats["approx_kl"], (d * d / 2).sum() / n)
    close(stats["policy_loss"], loss)
    assert stats["kl"] == 0
    assert set(stats) == {"policy_loss", "kl", "ratio", "clip_fraction", "approx_kl"}
    assert all(s.shape == () and not s.requires_grad for s in stats.values())
    assert all(torch.equal(x, y) for x, y in zip(before, (logp, old, A, m)))


@given(variant=st.sampled_from([v for v in POLICY_VARIANTS if v not in UNBOUNDED]), seed=SEEDS,
       low=st.sampled_from([0.05, 0.3, 1.0]), high=st.sampled_from([0.05, 0.5, 3.0]),
       dual=st.sampled_from([None, 1.2, 3.0]),
       mode=st.sampled_from([None, "token-mean", "seq-mean-token-mean", "seq-mean-token-sum",
                             "constant"]), length=st.sampled_from([None, 3, 50]))
def test_the_options(variant, seed, low, high, dual, mode, length):
    logp, old, A, m = batch(seed, spread=1.0)
    if variant not in SURROGATES: dual = None
    loss, slope, bounded = oracle(variant, logp.tolist(), old.tolist(), A.tolist(), m.tolist(), low,
                                  high, dual, mode=mode, length=length)
    f = lambda x: policy_loss(x, old, A, m, variant, eps_low=low, eps_high=high, dual_clip=dual,
                              aggregation=mode, length=length)[0]
    got, (grad,) = value_and_grad(f, logp)
    close(got, loss)
    close(grad, slope)
    assert policy_loss(logp, old, A, m, variant, eps_low=low,
                       eps_high=high)[1]["clip_fraction"].item() == pytest.approx(bounded, abs=1e-6)


@given(seed=SEEDS, tau=st.tuples(st.floats(0.1, 5), st.floats(0.1, 5)))
def test_sapo_gate(seed, tau):
    logp, old, A, m = batch(seed)
    loss, slope, _ = oracle("sapo", logp.tolist(), old.tolist(), A.tolist(), m.tolist(), tau=tau)
    got, (grad,) = value_and_grad(lambda x: policy_loss(x, old, A, m, "sapo", tau=tau)[0], logp)
    close(got, loss)
    close(grad, slope)


@given(seed=SEEDS, divergence=st.sampled_from(["tv", "kl"]), low=st.sampled_from([0.01, 0.2]),
       high=st.sampled_from([0.01, 0.1]))
def test_dppo_by_either_divergence(seed, divergence, low, high):
    logp, old = (-(normal(seed + k, (3, 4)).abs() + 0.05) for k in range(2))
    A, m = normal(seed + 2, (3,)), random_mask(seed + 3, (3, 4))
    options = dict(eps_low=low, eps_high=high, divergence=divergence)
    loss, slope, bounded = oracle("dppo", *(x.tolist() for x in (logp, old, A, m)), low, high,
                                  divergence=divergence)
    got, (grad,) = value_and_grad(lambda x: policy_loss(x, old, A, m, "dppo", **options)[0], logp)
    close(got, loss)
    close(grad, slope)
    stats = policy_loss(logp, old, A, m, "dppo", **options)[1]
    assert stats["clip_fraction"].item() == pytest.approx(bounded, abs=1e-6)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_at_certain_and_impossible_tokens(divergence):
    sure, never = torch.zeros(1, 1), torch.full((1, 1), -math.inf)
    def slope(logp, old, A):
        f = lambda x: policy_loss(x, old, torch.tensor([A]), None, "dppo", divergence=divergence)[0]
        loss, (grad,) = value_and_grad(f, logp)
        assert loss.isfinite() and grad.isfinite().all()
        return grad.item()
    for logp, old in ((sure, sure), (sure, sure - 1), (sure - 1, sure), (sure - 1e4, sure),
                      (sure - 1, never)):
        for A in (1.0, -1.0): slope(logp, old, A)
    assert slope(sure - 0.1, sure - 3, 1.0) == 0                     # only the way of the advantage
    assert slope(sure - 0.1, sure - 3, -1.0) == pytest.approx(math.exp(2.9))
    assert policy_loss(sure * math.nan, sure, torch.ones(1), None, "dppo")[0].isnan()
    with pytest.raises(ValueError, match="divergence must be one of 'tv', 'kl', got 'js'"):
        policy_loss(sure, sure, torch.ones(1), divergence="js")


def test_the_defaults_are_those_of_the_papers():
    assert {v: (AGGREGATION[v], *DEFAULTS[v]) for v in DEFAULTS} == POLICY_VARIANTS
    logp, old, A, m = batch(0)
    torch.testing.assert_close(policy_loss(logp, old, A, m), policy_loss(logp, old, A, m, "ppo"))
    # eps_high follows eps_low
    assert policy_loss(logp, old, A, variant="gspo", eps_low=0.1)[0] == policy_loss(
        logp, old, A, variant="gspo", eps_low=0.1, eps_high=0.1)[0]
    assert policy_loss(logp, old, A, variant="dapo", eps_high=0.5)[0] == policy_loss(
        logp, old, A, variant="dapo", eps_low=0.2, eps_high=0.5)[0]


# two answers of two and one tokens, ratios 1.5, 1 and 0.5, A = 1 and -1
@pytest.mark.parametrize("variant, expected, bounded", [
    ("ppo", -1.4 / 3, 2 / 3),
    ("grpo", -0.15, 2 / 3),
    ("dr_grpo", -0.35, 2 / 3),
    ("dapo", -1.48 / 3, 2 / 3),
    ("gspo", -(1.0004 - 0.9997) / 2, 1.0),
    ("gspo_token", -(1.0004 - 0.9997) / 2, 1.0),
    ("cispo", 2 / 3, 0.0),
    ("sapo", -((4 / (1 + math.exp(-0.5)) + 2) / 2 - 4 / 1.05 / (1 + math.exp(0.525))) / 2, 0.0),
    ("gmpo", -(math.exp(0.2) - math.exp(-0.4)) / 2, 2 / 3)])
def test_by_hand(variant, expected, bounded):
    logp = torch.tensor([[-1.0, -2.0], [-3.0, 7.0]], dtype=F64)
    old = logp - torch.tensor([[1.5, 1.0], [0.5, 99.0]], dtype=F64).log()
    loss, stats = policy_loss(
        logp, old, torch.tensor([1.0, -1.0]), torch.tensor([[True, True], [True, False]]), variant)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert stats["clip_fraction"].item() == pytest.approx(bounded)
    assert stats["ratio"].item() == pytest.approx(1.0)


@given(variant=VARIANTS, seed=SEEDS)
def test_on_policy_all_are_the_policy_gradient(variant, seed):
    logp, _, A, m = batch(seed)
    c = torch.tensor(token_weights(m.tolist(), AGGREGATION[variant]), dtype=F64)
    _, (grad,) = value_and_grad(lambda x: policy_loss(x, x.detach(), A, m, variant)[0], logp)
    close(grad, -(m * (c * A)[:, None]))
    # one advantage for each token: gspo and gmpo know only the answer
    each = normal(seed, logp.shape)
    _, (grad,) = value_and_grad(lambda x: policy_loss(x, x.detach(), each, m, variant)[0], logp)
    mean = (each * m).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1)
    close(grad, -(m * c[:, None] * (mean if variant in ("gspo", "gmpo", "luspo") else each)))


def test_gspo_token_gives_each_token_the_slope_of_its_own_advantage():
    logp, old, A = (torch.tensor([[-1.0, -2.0, -0.5]], dtype=F64),
                    torch.tensor([[-1.0001, -1.9999, -0.5001]], dtype=F64),
                    torch.tensor([[1.0, 2.0, -3.0]], dtype=F64))
    s = (logp - old).mean().exp()
    loss, (grad,) = value_and_grad(lambda x: policy_loss(x, old, A, variant="gspo_token")[0], logp)
    close(grad, -s * A / 3)
    close(loss, -(s * A).mean().item())


@given(variant=VARIANTS, seed=SEEDS, parts=st.sampled_from([1, 2, 4]),
       keep=st.sampled_from([0.0, 0.4, 1.0]),
       mode=st.sampled_from([None, *AGGREGATION.values(), "seq-mean-token-sum"]))
def test_microbatches_add_up_to_the_batch(variant, seed, parts, keep, mode):
    logp, old, A, m = batch(seed, B=4, keep=keep)
    m[seed % 4] = False  # a response without tokens
    aggregation, ref = mode or AGGREGATION[variant], old + 0.1
    whole, (expected,) = value_and_grad(
        lambda x: policy_loss(x, old, A, m, variant, ref, aggregation=aggregation)[0], logp)
    rows = torch.arange(4).chunk(parts)
    w = aggregation_weights(m, aggregation, dtype=F64)
    def total(x):
        return sum(policy_loss(x[i], old[i], A[i], m[i], variant, ref[i], aggregation=w[i])[0]
                   for i in rows)
    got, (grad,) = value_and_grad(total, logp)
    close(got, whole.item(), rtol=1e-6, atol=1e-7)
    close(grad, expected.tolist(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_without_advantage_nothing_moves(variant):
    logp, old, A, m = batch(3, spread=2.0, keep=1.0)
    loss, (grad,) = value_and_grad(
        lambda x: policy_loss(x, old, torch.zeros_like(A), m, variant)[0], logp)
    assert loss == 0 and (grad == 0).all()
    # cispo holds the weight, whatever the advantage
    held = (logp - old > math.log(5)).float().mean() if variant == "cispo" else 0
    assert policy_loss(logp, old, torch.zeros_like(A), m, variant)[1]["clip_fraction"] == held
    assert ((logp - old).abs() > 0.5).any()


@given(variant=VARIANTS, seed=SEEDS, shape=st.sampled_from(["(B,)", "(B, 1)", "(B, T)"]))
def test_shapes_of_the_advantage(variant, seed, shape):
    logp, old, A, m = batch(seed)
    given_as = {"(B,)": A, "(B, 1)": A[:, None], "(B, T)": A[:, None].expand(3, 4)}[shape]
    torch.testing.assert_close(
        policy_loss(logp, old, given_as, m, variant), policy_loss(logp, old, A, m, variant))


@given(variant=VARIANTS, seed=SEEDS, kind=st.sampled_from(["k1", "k2", "k3"]),
       beta=st.sampled_from([0.0, 0.04, 0.5]), keep=st.sampled_from([0.0, 0.6, 1.0]))
def test_kl_is_aggregated_like_the_loss(variant, seed, kind, beta, keep):
    logp, old, A, m = batch(seed, keep=keep)
    ref = logp - normal(seed + 4, logp.shape)
    c = token_weights(m.tolist(), AGGREGATION[variant])
    kl, slope = 0.0, [[0.0] * 4 for _ in range(3)]
    for i in range(3):
        for t in range(4):
            d = (logp - ref)[i, t].item()
            if m[i, t]:
                kl += c[i] * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]
                slope[i][t] = beta * c[i] * {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[kind]
    plain = value_and_grad(lambda x: policy_loss(x, old, A, m, variant)[0], logp)
    got = value_and_grad(
        lambda x: policy_loss(x, old, A, m, variant, ref, beta, kl_kind=kind)[0], logp)
    close(got[0] - plain[0], beta * kl)
    close(got[1][0] - plain[1][0], slope)
    stats = policy_loss(logp, old, A, m, variant, ref, beta, kl_kind=kind)[1]
    close(stats["kl"], kl)
    close(stats["policy_loss"], plain[0])
    # the defaults
    if kind == "k3" and beta == 0.04:
        torch.testing.assert_close(policy_loss(logp, old, A, m, variant, ref)[0], got[0])


ENUMERATED = [1, 2, 3, 4, 6], [4, 1, 5, 2, 4], [5, 4, 3, 3, 1]  # of 16, by pi, pi_old, pi_ref


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("variant", [v for v in POLICY_VARIANTS])
def test_the_weighted_kl_has_the_gradient_of_the_kl(variant, kind):
    p, old, ref = (torch.tensor(n, dtype=F64) / 16 for n in ENUMERATED)
    sampled = torch.arange(5).repeat_interleave(torch.tensor(ENUMERATED[1]))  # just as pi_old does
    logits = p.log().requires_grad_()
    def exact():
        logp = logits.log_softmax(0)
        return (logp.exp() * (logp - ref.log())).sum()
    def by_loss(**options):
        rows = [x[sampled, None] for x in (logits.log_softmax(0), old.log(), ref.log())]
        A = torch.zeros(16, dtype=F64)
        return policy_loss(*rows[:2], A, None, variant, rows[2], 1.0, kl_kind=kind, **options)
    expected, = torch.autograd.grad(exact(), logits)
    got, = torch.autograd.grad(by_loss(kl_weighted=True)[0], logits)
    close(got, expected)
    close(by_loss(kl_weighted=True)[1]["kl"], exact().detach())
    biased, = torch.autograd.grad(by_loss()[0], logits)
    assert (biased - expected).norm() > 0.1 * expected.norm()


@given(variant=VARIANTS, seed=SEEDS, kind=st.sampled_from(["k1", "k2", "k3"]), junk=JUNK,
       keep=st.sampled_from([0.0, 0.6, 1.0]))
def test_the_weighted_kl_is_aggregated_like_the_loss(variant, seed, kind, junk, keep):
    logp, old, A, m = batch(seed, keep=keep)
    ref = logp - normal(seed + 4, logp.shape)
    c = torch.tensor(token_weights(m.tolist(), AGGREGATION[variant]), dtype=F64)[:, None] * m
    r, d = (logp - old).exp(), logp - ref
    k = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[kind]
    slope = {"k1": 1, "k2": d, "k3": 1 - torch.exp(-d)}[kind]
    def f(x, old, ref, **kl):
        return policy_loss(x, old, A, m, variant, **kl | dict(logp_ref=ref) if kl else {})[0]
    kl = dict(beta=0.5, kl_kind=kind, kl_weighted=True)
    x, old_x, ref_x = (torch.where(m, t, junk) for t in (logp, old, ref))
    plain = value_and_grad(lambda x: f(x, old, None), logp)
    got = value_and_grad(lambda x: f(x, old_x, ref_x, **kl), x)
    close(got[0] - plain[0], 0.5 * (c * r * k).sum())
    close(got[1][0] - plain[1][0], 0.5 * c * r * (k + slope))


@pytest.mark.parametrize("size", [100.0, 1e3, 1e6, -100.0, -1e3, -1e6])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_weighted_kl_is_finite_at_any_log_ratio(kind, size):
    old = torch.full((2, 3), -2.0)
    for ref in (old, old - size, torch.full((2, 3), size)):
        loss, (grad,) = value_and_grad(
            lambda x: policy_loss(x, old, torch.ones(2), None, "grpo", ref, 1.0, kind,
                                  kl_weighted=True)[0], old + size)
        assert loss.isfinite() and grad.isfinite().all()


@given(variant=VARIANTS, seed=SEEDS, junk=JUNK, keep=st.sampled_from([0.0, 0.5, 0.8]), dtype=DTYPES)
def test_nothing_leaks_from_under_the_mask(variant, seed, junk, keep, dtype):
    logp, old, A, m = (x.to(dtype) if x.is_floating_point() else x for x in batch(seed, keep=keep))
    ref, each = old + 0.25, A[:, None].expand(3, 4)
    put = lambda x: torch.where(m, x, torch.tensor(junk).to(dtype))
    f = lambda x, old, A, ref: policy_loss(x, old, A, m, variant, ref)[0]
    clean, dirty = (value_and_grad(lambda x: f(x, old, each, ref), logp),
                    value_and_grad(lambda x: f(x, put(old), put(each), put(ref)), put(logp)))
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1][0], dirty[1][0])
    assert (dirty[1][0][~m] == 0).all()
    assert clean[0].isfinite()
    assert clean[0].dtype == (F64 if dtype == F64 else torch.float32)
    assert clean[1][0].dtype == dtype
    for name, value in policy_loss(put(logp), put(old), put(each), m, variant, put(ref))[1].items():
        assert value.isfinite(), name
    # an empty answer may have any advantage
    rows = torch.where(m.any(1), A, torch.tensor(junk).to(dtype))
    assert torch.equal(value_and_grad(lambda x: f(x, old, rows, ref), logp)[1][0], clean[1][0])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_no_nan_on_the_way_back_from_under_the_mask(variant, kind):
    logp, old, A, m = batch(4)
    put = lambda x: torch.where(m, x, math.nan)
    with torch.autograd.set_detect_anomaly(True):
        _, (grad,) = value_and_grad(
            lambda x: policy_loss(x, put(old), A, m, variant, put(old + 0.1), kl_kind=kind)[0],
            put(logp))
    assert grad.isfinite().all() and not m.all()


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_all_false_gives_zero(variant):
    logp, old, A, m = batch(0)
    loss, (grad,) = value_and_grad(
        lambda x: policy_loss(x, old, A, torch.zeros_like(m), variant, old)[0], logp)
    assert loss == 0 and (grad == 0).all()
    assert all(
        s == 0
        for name, s in policy_loss(logp, old, A, torch.zeros_like(m), variant, old)[1].items())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("size", [100.0, 1000.0, 1e6, -100.0, -1000.0, -1e6])
@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_no_log_ratio_is_too_large(variant, size, dtype):
    for logp in (torch.full((2, 3), size, dtype=dtype),
                 torch.tensor([[size, 0, 0], [0, 0, size]], dtype=dtype)):
        # log-probabilities are negative
        if size > 0: logp, old = torch.full_like(logp, -1), -1 - logp
        else: old = torch.zeros_like(logp)
        for A in (torch.tensor([1.0, -1.0]), torch.tensor([-2.0, 0.0])):
            loss, (grad,) = value_and_grad(
                lambda x: policy_loss(x, old, A, None, variant, logp_ref=old)[0], logp)
            assert loss.isfinite() and grad.isfinite().all()
            loss, (grad,) = value_and_grad(lambda x: policy_loss(x, old, A, None, variant)[0], logp)
            assert loss.isfinite() and grad.isfinite().all()
            r = torch.tensor(
                [[max(min(x, 40.0), -40.0) for x in row] for row in (logp - old).tolist()]).exp()
            if variant in ("ppo", "grpo", "dr_grpo", "dapo"):
                assert (grad[(A[:, None] > 0) & (r > 1.3)] == 0).all()
                assert (grad[(A[:, None] < 0) & (r < 0.7)] == 0).all()
            if variant == "cispo":
                close(grad.float(), -r.clamp(max=5) * A[:, None] / 6, rtol=1e-5, atol=1e-6)
            if variant == "sapo": assert (grad[r > 1e3] == 0).all()


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_constants_get_no_gradient(variant):
    logp, old, A, m = batch(1)
    leaves = [t.clone().requires_grad_(True) for t in (logp, old, A, old + 0.1)]
    loss, stats = policy_loss(leaves[0], leaves[1], leaves[2], m, variant, leaves[3])
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    assert grads[0] is not None
    assert grads[1:] == (None, None, None)
    assert not any(s.requires_grad for s in stats.values())


@given(variant=VARIANTS, seed=SEEDS, dtype=st.sampled_from([torch.float16, torch.bfloat16]))
def test_half_precision_is_computed_in_float32(variant, seed, dtype):
    logp, old, A, m = (x.to(dtype) if x.is_floating_point() else x for x in batch(seed))
    assert torch.equal(policy_loss(logp, old, A, m, variant)[0],
                       policy_loss(logp.float(), old.float(), A.float(), m, variant)[0])


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_vmap_and_compile(variant):
    stacks = [torch.stack(t) for t in zip(*(batch(seed) for seed in range(5)))]
    f = lambda x, old, A, m: policy_loss(x, old, A, m, variant, logp_ref=old - 0.1)
    loss, stats = torch.func.vmap(f)(*stacks)
    one_by_one = [f(*t) for t in zip(*stacks)]
    torch.testing.assert_close(loss, torch.stack([t[0] for t in one_by_one]))
    for name in stats:
        torch.testing.assert_close(stats[name], torch.stack([t[1][name] for t in one_by_one]))
    grads = torch.func.vmap(torch.func.grad(lambda *t: f(*t)[0]))(*stacks)
    torch.testing.assert_close(grads,
                               torch.stack([value_and_grad(lambda x: f(x, *rest)[0], x)[1][0]
                                            for x, *rest in zip(*stacks)]))
    # gradients of each answer of one batch
    logp, old, A, _ = batch(0)
    per_answer = torch.func.vmap(
        torch.func.grad(lambda x, o, a: policy_loss(x[None], o[None], a[None],
                                                    variant=variant)[0]))(logp, old, A)
    torch.testing.assert_close(
        per_answer,
        torch.stack([value_and_grad(lambda x: policy_loss(x, o[None], a[None], variant=variant)[0],
                                    x[None])[1][0][0] for x, o, a in zip(logp, old, A)]))
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(f, backend="eager", fullgraph=True)(*(s[0] for s in stacks)), one_by_one[0])


@pytest.mark.parametrize("kwargs, error, words", [
    (dict(variant="gpro"), ValueError,
     "variant must be one of 'ppo', 'grpo', 'dr_grpo', 'dapo', 'gspo', "
     "'gspo_token', 'cispo', 'sapo', 'gmpo', 'dppo', 'vespo', 'luspo', 'cpgd', 'topr', got 'gpro'"),
    (dict(variant="sapo", eps_low=0.2), ValueError,
     "eps_low must be None for variant='sapo', got 0.2"),
    (dict(variant="sapo", eps_high=0.2), ValueError, "eps_high must be None for variant='sapo'"),
    (dict(variant="cispo", dual_clip=3.0), ValueError,
     "dual_clip must be None for variant='cispo', got 3.0"),
    (dict(variant="sapo", dual_clip=3.0), ValueError, "dual_clip must be None for variant='sapo'"),
    (dict(variant="gmpo", dual_clip=3.0), ValueError, "dual_clip must be None for variant='gmpo'"),
    (dict(dual_clip=1.0), ValueError, r"dual_clip must be in \(1, inf\), got 1.0"),
    (dict(eps_low=0.0), ValueError, r"eps_low must be in \(0, inf\), got 0.0"),
    (dict(eps_low=1.5), ValueError, r"eps_low must be in \(0, 1\], got 1.5"),
    (dict(variant="cispo", eps_low=1.5), ValueError, "eps_low"),
    (dict(variant="gmpo", eps_low=0.0), ValueError, "eps_low"),
    (dict(variant="cispo", eps_high=-1.0), ValueError, "eps_high"),
    (dict(eps_high=0), ValueError, r"eps_high must be in \(0, inf\), got 0"),
    (dict(eps_low="0.2"), TypeError, "eps_low must be a number, got str"),
    (dict(variant="sapo", tau=1.0), TypeError, "tau must be a pair of numbers, .* got 1.0"),
    (dict(variant="sapo", tau=(1.0,)), TypeError, "tau must be a pair"),
    (dict(variant="sapo", tau=(1.0, 0.0)), ValueError, r"tau must be in \(0, inf\), got 0.0"),
    (dict(beta=-0.1), ValueError, r"beta must be in \[0, inf\), got -0.1"),
    (dict(kl_kind="k4"), ValueError, "kl_kind must be one of 'k1', 'k2', 'k3', got 'k4'"),
    (dict(aggregation="mean"), ValueError,
     "aggregation must be one of 'token-mean', .* got 'mean'"),
    (dict(length=0), ValueError, "length must be in"),
    (dict(kl_weighted=1), TypeError, "kl_weighted must be True or False, got 1"),
    (dict(mask=torch.ones(2, 3)), TypeError, "mask must be boolean"),
    (dict(mask=torch.ones(2, dtype=torch.bool)), ValueError,
     r"mask must have the shape of logp, \(2, 3\), got \(2,\)"),
    (dict(logp_ref=torch.zeros(2)), ValueError,
     r"logp_ref must have the shape of logp, \(2, 3\), got \(2,\)"),
    (dict(logp_ref=1.0), TypeError, "logp_ref must be a torch.Tensor, got float"),
    (dict(logp_old=torch.zeros(3, 2)), ValueError, r"logp_old must have the shape of logp"),
    (dict(logp_old=torch.zeros(2, 3).long()), TypeError,
     "logp_old must have a floating-point dtype"),
    (dict(logp=torch.zeros(3), logp_old=torch.zeros(3)), ValueError,
     r"logp must have the shape \(B, T\), got \(3,\)"),
    (dict(advantage=torch.ones(3)), ValueError, r"advantage must have .*got \(3,\)"),
    (dict(advantage=torch.ones(1, 3)), ValueError, "advantage must have"),
    (dict(advantage=torch.ones(())), ValueError, "advantage must have"),
    (dict(weight=torch.ones(2)), ValueError, r"weight must have the shape \(B, W\), got \(2,\)"),
    (dict(weight=torch.ones(2, 2)), ValueError, r"weight must have the shape .* got \(2, 2\)"),
    (dict(weight=2.0), TypeError, "weight must be a torch.Tensor, got float"),
    (dict(total=-1), ValueError, "total must be in"),
    (dict(advantage=torch.ones(2).long()), TypeError, "advantage must have a floating-point dtype"),
    (dict(advantage=1.0), TypeError, "advantage must be a torch.Tensor, got float"),
])
def test_bad_input_of_policy_loss_is_named(kwargs, error, words):
    with pytest.raises(error, match=words):
        policy_loss(**(dict(logp=torch.zeros(2, 3), logp_old=torch.zeros(2, 3),
                            advantage=torch.ones(2)) | kwargs))


# Samples of an older policy, or of another program

@given(seed=SEEDS, B=st.integers(1, 5), T=st.integers(1, 5), scale=st.sampled_from([0.1, 1.0]),
       delta=st.sampled_from([0.0, 0.1, 0.5]), per_answer=st.booleans(),
       p=st.sampled_from([0.0, 0.5, 1.0]))
def test_off_policy_mask_equals_the_loop(seed, B, T, scale, delta, per_answer, p):
    logp, old, A, m = (normal(seed, (B, T), scale=scale), normal(seed + 1, (B, T), scale=scale),
                       normal(seed + 2, (B,)), random_mask(seed + 3, (B, T), p))
    if seed % 3 == 0: A[0] = 0.0
    before = [t.clone() for t in (logp, old, A, m)]
    keep = off_policy_sequence_mask(logp, old, A[:, None] if per_answer else A, delta, m)
    expected = []
    for new, was, a, counts in zip(logp.tolist(), old.tolist(), A.tolist(), m.tolist()):
        distances = [w - n for n, w, c in zip(new, was, counts) if c]
        expected.append(not (a < 0 and distances and math.fsum(distances) / len(distances) > delta))
    assert keep.dtype == torch.bool and keep.shape == (B, 1) and keep[:, 0].tolist() == expected
    assert all(torch.equal(x, y) for x, y in zip(before, (logp, old, A, m)))
    if p == 1.0: assert torch.equal(keep, off_policy_sequence_mask(logp, old, A, delta))
    assert off_policy_sequence_mask(logp, old, A.abs(), delta, m).all()
    # a bound on GSPO's ratio
    if delta:
        assert torch.equal(
            keep,
            (A[:, None] >= 0) | (importance_ratio(logp, old, m, "sequence") >= math.exp(-delta)))


def test_off_policy_mask_by_hand():
    logp, A = torch.tensor([[-1.0, -0.25]] * 3, dtype=F64), torch.tensor([-1.0, 0.0, 1.0])
    kept = (lambda delta, sign=1: off_policy_sequence_mask(sign * logp, torch.zeros_like(logp), A,
                                                           delta)[:, 0].tolist())
    # the distance is 0.625: above it, not at it; and one way only
    assert kept(0.5) == [False, True, True]
    assert kept(0.625) == kept(1.0) == kept(0.0, -1) == [True] * 3


@given(seed=SEEDS, junk=JUNK, old_junk=JUNK)
def test_off_policy_mask_does_not_see_what_is_masked(seed, junk, old_junk):
    logp, old, m, A = (normal(seed, (4, 5)), normal(seed + 1, (4, 5)),
                       random_mask(seed + 2, (4, 5)), torch.full((4,), -1.0))
    assert torch.equal(off_policy_sequence_mask(logp, old, A, 0.1, m),
                       off_policy_sequence_mask(torch.where(m, logp, junk),
                                                torch.where(m, old, old_junk), A, 0.1, m))


def test_off_policy_mask_at_the_edges():
    bad, zero, inf = torch.full((1,), -1.0), torch.zeros(1, 1), torch.full((1, 1), math.inf)
    assert [off_policy_sequence_mask(x, zero, bad, 1e6).item()
            for x in (-inf, inf, zero * math.nan)] == [False, True, True]
    # an answer without tokens
    assert off_policy_sequence_mask(
        -inf, zero, bad, 0.0, torch.zeros(1, 1, dtype=torch.bool)).item()
    for shape in ((0, 3), (3, 0), (0, 0)):
        assert off_policy_sequence_mask(
            torch.zeros(shape), torch.zeros(shape), torch.full(shape[:1], -1.0),
            0.0).tolist() == [[True]] * shape[0]
    # bfloat16 knows 256, and not 255.5
    new, old = torch.tensor([[-256.0]]).bfloat16(), torch.tensor([[-0.5]]).bfloat16()
    assert off_policy_sequence_mask(new, old, bad, 255.75).item()
    assert not off_policy_sequence_mask(new, old, bad, 255.25).item()
    leaf = new.float().requires_grad_(True)
    assert not off_policy_sequence_mask(leaf, old.float(), bad, 0.5).requires_grad
    stacks = normal(0, (4, 3, 5)), normal(1, (4, 3, 5)), normal(2, (4, 3))
    f = lambda *t: off_policy_sequence_mask(*t, 0.1)
    assert torch.equal(torch.func.vmap(f)(*stacks), torch.stack([f(*t) for t in zip(*stacks)]))


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_off_policy_mask_leaves_answers_out(variant):
    logp, old, A, m = batch(8)
    m[:, 0] = True
    keep = off_policy_sequence_mask(logp, old, A, 0.0, m)
    assert 0 < keep.sum() < len(keep)
    f = lambda A, m: value_and_grad(lambda x: policy_loss(x, old, A, m, variant)[0], logp)
    (_, (plain,)), (_, (zeroed,)), (without, _) = f(A, m), f(A[:, None] * keep, m), f(A, m & keep)
    assert torch.equal(zeroed, plain * keep)  # the paper's: it counts as 0
    rows = keep[:, 0]
    if variant != "dr_grpo":
        close(without, policy_loss(logp[rows], old[rows], A[rows], m[rows], variant)[0].item())


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
@given(seed=SEEDS, junk=JUNK)
def test_weights_multiply_the_objective_and_not_the_kl(variant, seed, junk):
    logp, old, A, m = batch(seed)
    ref, each_w = (old + 0.2,
                   truncated_importance_weight(old, old - normal(seed + 9, old.shape), mask=m))
    for w in (each_w, each_w[:, :1]):
        w = w.clone().requires_grad_(True)
        f = (lambda ref=None, **kw: value_and_grad(lambda x: policy_loss(x, old, A, m, variant, ref,
                                                                         **kw)[0], logp))
        (plain, (slope,)), (got, (weighted,)) = f(), f(weight=w)
        wide = w.detach().expand_as(logp)
        mean = (wide * m).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1)
        torch.testing.assert_close(
            weighted, slope * (mean if variant in ("gspo", "gmpo", "luspo") else wide))
        # the KL has no weight
        torch.testing.assert_close(f(ref, weight=w)[0] - got, f(ref)[0] - plain)
    stats = lambda **kw: policy_loss(logp, old, A, m, variant, **kw)[1]
    assert stats(weight=torch.zeros_like(each_w))["clip_fraction"] == stats()["clip_fraction"]
    put = lambda x: torch.where(m, x, torch.tensor(junk, dtype=F64))
    assert torch.equal(f(weight=put(each_w))[0], f(weight=each_w)[0])
    assert f(weight=put(each_w))[1][0].isfinite().all()


@given(variant=VARIANTS, seed=SEEDS, parts=st.sampled_from([1, 2, 3, 4]),
       mode=st.sampled_from([None, *AGGREGATION.values(), "seq-mean-token-sum"]),
       length=st.sampled_from([None, 7]))
def test_losses_with_the_total_of_the_batch_add_up_to_its_loss(variant, seed, parts, mode, length):
    logp, old, A, m = batch(seed, B=4)
    m[seed % 4] = False
    mode, ref = mode or AGGREGATION[variant], old + 0.1
    f = (lambda x, i, **kw: policy_loss(x[i], old[i], A[i], m[i], variant, ref[i], aggregation=mode,
                                        length=length, **kw)[0])
    whole, (expected,) = value_and_grad(lambda x: f(x, slice(None)), logp)
    rows = torch.arange(4).chunk(parts)
    count = sum(aggregate_count(m[i], mode) for i in rows)  # as processes would sum it
    for total in (count, int(count)):
        got, (grad,) = value_and_grad(lambda x: sum(f(x, i, total=total) for i in rows), logp)
        torch.testing.assert_close(got, whole)
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("args, kwargs, error, words", [
    ([torch.zeros(2, 3).long(), torch.zeros(2, 3), torch.zeros(2), 0.5], {}, TypeError,
     "logp must have a floating-point dtype"),
    ([torch.zeros(2, 3), torch.zeros(2, 3), [0.0, 0.0], 0.5], {}, TypeError,
     "advantage must be a torch.Tensor, got list"),
    ([torch.zeros(3), torch.zeros(3), torch.zeros(3), 0.5], {}, ValueError,
     r"logp must have the shape \(B, T\), got \(3,\)"),
    ([torch.zeros(2, 3), torch.zeros(2, 1), torch.zeros(2), 0.5], {}, ValueError,
     r"logp_old must have the shape of logp, \(2, 3\), got \(2, 1\)"),
    ([torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), 0.5], {}, ValueError,
     r"advantage must have the shape \(B,\) or \(B, 1\), got \(2, 3\)"),
    ([torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(1, 2), 0.5], {}, ValueError,
     r"got \(1, 2\)"),
    ([torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), -0.5], {}, ValueError,
     r"threshold must be in \[0, inf\), got -0.5"),
    ([torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), 0.5], dict(mask=torch.ones(2, 3)),
     TypeError, "mask must be boolean"),
    ([torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), 0.5], dict(mask=torch.ones(2).bool()),
     ValueError, "mask must have the shape of logp"),
])
def test_bad_input_of_the_off_policy_mask_is_named(args, kwargs, error, words):
    with pytest.raises(error, match=words): off_policy_sequence_mask(*args, **kwargs)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_an_empty_batch_gives_zero(variant, shape):
    logp, A = torch.empty(shape), torch.empty(shape[:1])
    for mask in (None, torch.empty(shape, dtype=torch.bool)):
        loss, stats = policy_loss(logp, logp, A, mask, variant, logp_ref=logp)
        assert loss == 0 and all(s == 0 for s in stats.values())


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_without_advantage_an_impossible_word_costs_nothing(variant):
    logp = torch.tensor([[-math.inf, -1.0]])
    loss, (grad,) = value_and_grad(
        lambda x: policy_loss(x, torch.full_like(x, -1.0), torch.zeros(1), None, variant)[0], logp)
    assert loss == 0 and (grad == 0).all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_a_kl_that_weighs_nothing_adds_nothing(variant, kind):
    logp, old, A, m = batch(6)
    loss, stats = policy_loss(
        logp, old, A, m, variant, torch.full_like(old, -math.inf), 0.0, kl_kind=kind)
    # it is still measured
    assert torch.equal(loss, policy_loss(logp, old, A, m, variant)[0]) and stats["kl"] == math.inf


def test_the_mean_over_prompts_is_that_of_policy_loss_too():
    logp, mask = torch.zeros(4, 2), torch.tensor([[1, 1], [1, 0], [1, 0], [1, 0]]).bool()
    advantage = torch.tensor([3.0, 0.0, 1.0, 1.0])
    loss, _ = policy_loss(logp, logp, advantage, mask, aggregation="prompt-mean", group=2)
    assert loss.item() == pytest.approx(-(6 / 3 + 2 / 2) / 2)


def test_a_mean_over_prompts_needs_their_rows_side_by_side(own_variant):
    assert not BY_PROMPT & {*POLICY_VARIANTS} - {own_variant}
    def objective(ratio, advantage, *rest): return ratio * advantage
    for aggregation, needed in (("prompt-mean", True), ("token-mean", False)):
        register_variant(own_variant, objective, aggregation)
        assert (own_variant in BY_PROMPT) == needed
