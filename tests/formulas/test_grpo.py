import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlhf_notes.formulas.grpo import (DPO_KINDS, POLICY_VARIANTS, dpo_loss, grpo_info, grpo_policy_data, grpo_policy_error, off_policy_sequence_mask, policy_loss, rloo_info, rloo_policy_data,
                                      rloo_policy_error)
from rlhf_notes.formulas.logprob import efficient_method, less_efficient_method, naive_method, selective_log_softmax
from rlhf_notes.formulas.ratio import importance_ratio, truncated_importance_weight
from rlhf_notes.formulas.reward import bradley_terry_loss
from strategies import DTYPES, JUNK, SEEDS, normal, random_mask, value_and_grad

F64 = torch.float64
VARIANTS = st.sampled_from(list(POLICY_VARIANTS))
SURROGATES = ("ppo", "grpo", "dr_grpo", "dapo", "gspo")
DEFAULTS = {"ppo": (0.2, 0.2), "grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0), "sapo": (None, None), "gmpo": (0.4, 0.4)}
AGGREGATION = {"ppo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "constant", "dapo": "token-mean", "gspo": "seq-mean-token-mean", "cispo": "token-mean",
               "sapo": "seq-mean-token-mean", "gmpo": "seq-mean-token-mean"}


# An oracle in plain Python: loops over answers and tokens, nothing of the library

def clip(x, low, high): return min(max(x, low), high)
def free(x, A, low, high): return x <= high if A > 0 else x >= low


def token_weights(mask, mode, length=None):
    "What one token of each answer weighs."
    counts = [sum(row) for row in mask]
    full = sum(n > 0 for n in counts)
    return [0.0 if n == 0 else {"token-mean": 1 / sum(counts), "seq-mean-token-mean": 1 / (full * n), "seq-mean-token-sum": 1 / full,
                                "constant": 1 / (len(mask) * (length or len(mask[0])))}[mode] for n in counts]


def oracle(variant, logp, old, A, mask, low=None, high=None, dual=None, tau=(1.0, 1.05), mode=None, length=None):
    "(loss, its slope in each log-probability, share of bounded tokens); A: one number for each answer."
    low, high = (DEFAULTS[variant][0] if low is None else low), (DEFAULTS[variant][1] if high is None else high)
    c = token_weights(mask, mode or AGGREGATION[variant], length)
    loss, slope, bounded, total = 0.0, [[0.0] * len(row) for row in logp], 0, 0
    for i, row in enumerate(mask):
        where, a = [t for t, m in enumerate(row) if m], A[i]
        if not where: continue
        r = {t: math.exp(logp[i][t] - old[i][t]) for t in where}
        s = math.exp(math.fsum(logp[i][t] - old[i][t] for t in where) / len(where))
        for t in where:
            total += 1
            if variant in SURROGATES:
                x = s if variant == "gspo" else r[t]
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
            else:
                held = [clip(x, 0, math.exp(high)) if a > 0 else max(x, math.exp(-low)) for x in r.values()]
                geometric = math.prod(held) ** (1 / len(held))
                J, w = geometric * a, geometric * free(r[t], a, math.exp(-low), math.exp(high))
                bounded += a != 0 and w == 0
            loss -= c[i] * J; slope[i][t] = -c[i] * w * a
    return loss, slope, bounded / max(total, 1)


def batch(seed, B=3, T=4, spread=0.5, keep=0.7):
    logp = -normal(seed, (B, T)).abs() * 2
    return logp, logp - normal(seed + 1, (B, T), scale=spread), normal(seed + 2, (B,)), random_mask(seed + 3, (B, T), keep)


def close(got, expected, **kw):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), **({"rtol": 1e-9, "atol": 1e-12} | kw))


SHAPES = dict(B=st.integers(1, 4), T=st.integers(1, 5), spread=st.sampled_from([0.0003, 0.3, 2.0]), keep=st.sampled_from([0.0, 0.5, 0.9, 1.0]))


@settings(max_examples=150)
@given(variant=VARIANTS, seed=SEEDS, **SHAPES)
def test_loss_and_gradient_are_those_of_the_paper(variant, seed, B, T, spread, keep):
    logp, old, A, m = batch(seed, B, T, spread, keep)
    before = [t.clone() for t in (logp, old, A, m)]
    loss, slope, bounded = oracle(variant, logp.tolist(), old.tolist(), A.tolist(), m.tolist())
    stats = {}
    def f(x):
        out, s = policy_loss(x, old, A, m, variant); stats.update(s); return out
    got, (grad,) = value_and_grad(f, logp)
    assert got.shape == () and got.dtype == F64
    close(got, loss); close(grad, slope)
    assert stats["clip_fraction"].item() == pytest.approx(bounded, abs=1e-6)
    n = max(int(m.sum()), 1)
    d = (logp - old)[m]
    close(stats["ratio"], d.exp().sum() / n); close(stats["approx_kl"], (d * d / 2).sum() / n); close(stats["policy_loss"], loss); assert stats["kl"] == 0
    assert set(stats) == {"policy_loss", "kl", "ratio", "clip_fraction", "approx_kl"}
    assert all(s.shape == () and not s.requires_grad for s in stats.values())
    assert all(torch.equal(x, y) for x, y in zip(before, (logp, old, A, m)))


@given(variant=st.sampled_from([v for v in POLICY_VARIANTS if v != "sapo"]), seed=SEEDS, low=st.sampled_from([0.05, 0.3, 1.0]), high=st.sampled_from([0.05, 0.5, 3.0]),
       dual=st.sampled_from([None, 1.2, 3.0]), mode=st.sampled_from([None, "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]), length=st.sampled_from([None, 3, 50]))
def test_the_options(variant, seed, low, high, dual, mode, length):
    logp, old, A, m = batch(seed, spread=1.0)
    if variant not in SURROGATES: dual = None
    loss, slope, bounded = oracle(variant, logp.tolist(), old.tolist(), A.tolist(), m.tolist(), low, high, dual, mode=mode, length=length)
    f = lambda x: policy_loss(x, old, A, m, variant, eps_low=low, eps_high=high, dual_clip=dual, aggregation=mode, length=length)[0]
    got, (grad,) = value_and_grad(f, logp)
    close(got, loss); close(grad, slope)
    assert policy_loss(logp, old, A, m, variant, eps_low=low, eps_high=high)[1]["clip_fraction"].item() == pytest.approx(bounded, abs=1e-6)


@given(seed=SEEDS, tau=st.tuples(st.floats(0.1, 5), st.floats(0.1, 5)))
def test_sapo_gate(seed, tau):
    logp, old, A, m = batch(seed)
    loss, slope, _ = oracle("sapo", logp.tolist(), old.tolist(), A.tolist(), m.tolist(), tau=tau)
    got, (grad,) = value_and_grad(lambda x: policy_loss(x, old, A, m, "sapo", tau=tau)[0], logp)
    close(got, loss); close(grad, slope)


def test_the_defaults_are_those_of_the_papers():
    assert {v: (AGGREGATION[v], *DEFAULTS[v]) for v in DEFAULTS} == POLICY_VARIANTS
    logp, old, A, m = batch(0)
    torch.testing.assert_close(policy_loss(logp, old, A, m), policy_loss(logp, old, A, m, "ppo"))
    assert policy_loss(logp, old, A, variant="gspo", eps_low=0.1)[0] == policy_loss(logp, old, A, variant="gspo", eps_low=0.1, eps_high=0.1)[0]       # eps_high follows eps_low
    assert policy_loss(logp, old, A, variant="dapo", eps_high=0.5)[0] == policy_loss(logp, old, A, variant="dapo", eps_low=0.2, eps_high=0.5)[0]


# two answers of two and one tokens, ratios 1.5, 1 and 0.5, A = 1 and -1
@pytest.mark.parametrize("variant, expected, bounded", [
    ("ppo", -1.4 / 3, 2 / 3), ("grpo", -0.15, 2 / 3), ("dr_grpo", -0.35, 2 / 3), ("dapo", -1.48 / 3, 2 / 3), ("gspo", -(1.0004 - 0.9997) / 2, 1.0), ("cispo", 2 / 3, 0.0),
    ("sapo", -((4 / (1 + math.exp(-0.5)) + 2) / 2 - 4 / 1.05 / (1 + math.exp(0.525))) / 2, 0.0), ("gmpo", -(math.exp(0.2) - math.exp(-0.4)) / 2, 2 / 3)])
def test_by_hand(variant, expected, bounded):
    logp = torch.tensor([[-1.0, -2.0], [-3.0, 7.0]], dtype=F64)
    old = logp - torch.tensor([[1.5, 1.0], [0.5, 99.0]], dtype=F64).log()
    loss, stats = policy_loss(logp, old, torch.tensor([1.0, -1.0]), torch.tensor([[True, True], [True, False]]), variant)
    assert loss.item() == pytest.approx(expected, abs=1e-6) and stats["clip_fraction"].item() == pytest.approx(bounded) and stats["ratio"].item() == pytest.approx(1.0)


@given(variant=VARIANTS, seed=SEEDS)
def test_on_policy_all_are_the_policy_gradient(variant, seed):
    logp, _, A, m = batch(seed)
    c = torch.tensor(token_weights(m.tolist(), AGGREGATION[variant]), dtype=F64)
    _, (grad,) = value_and_grad(lambda x: policy_loss(x, x.detach(), A, m, variant)[0], logp)
    close(grad, -(m * (c * A)[:, None]))
    each = normal(seed, logp.shape)                        # one advantage for each token: gspo and gmpo know only the answer
    _, (grad,) = value_and_grad(lambda x: policy_loss(x, x.detach(), each, m, variant)[0], logp)
    mean = (each * m).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1)
    close(grad, -(m * c[:, None] * (mean if variant in ("gspo", "gmpo") else each)))


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_without_advantage_nothing_moves(variant):
    logp, old, A, m = batch(3, spread=2.0, keep=1.0)
    loss, (grad,) = value_and_grad(lambda x: policy_loss(x, old, torch.zeros_like(A), m, variant)[0], logp)
    assert loss == 0 and (grad == 0).all()
    held = (logp - old > math.log(5)).float().mean() if variant == "cispo" else 0                # cispo holds the weight, whatever the advantage
    assert policy_loss(logp, old, torch.zeros_like(A), m, variant)[1]["clip_fraction"] == held and ((logp - old).abs() > 0.5).any()


@given(variant=VARIANTS, seed=SEEDS, shape=st.sampled_from(["(B,)", "(B, 1)", "(B, T)"]))
def test_shapes_of_the_advantage(variant, seed, shape):
    logp, old, A, m = batch(seed)
    given_as = {"(B,)": A, "(B, 1)": A[:, None], "(B, T)": A[:, None].expand(3, 4)}[shape]
    torch.testing.assert_close(policy_loss(logp, old, given_as, m, variant), policy_loss(logp, old, A, m, variant))


@given(variant=VARIANTS, seed=SEEDS, kind=st.sampled_from(["k1", "k2", "k3"]), beta=st.sampled_from([0.0, 0.04, 0.5]), keep=st.sampled_from([0.0, 0.6, 1.0]))
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
    got = value_and_grad(lambda x: policy_loss(x, old, A, m, variant, ref, beta, kl_kind=kind)[0], logp)
    close(got[0] - plain[0], beta * kl); close(got[1][0] - plain[1][0], slope)
    stats = policy_loss(logp, old, A, m, variant, ref, beta, kl_kind=kind)[1]
    close(stats["kl"], kl); close(stats["policy_loss"], plain[0])
    if kind == "k3" and beta == 0.04: torch.testing.assert_close(policy_loss(logp, old, A, m, variant, ref)[0], got[0])      # the defaults


@given(variant=VARIANTS, seed=SEEDS, junk=JUNK, keep=st.sampled_from([0.0, 0.5, 0.8]), dtype=DTYPES)
def test_nothing_leaks_from_under_the_mask(variant, seed, junk, keep, dtype):
    logp, old, A, m = (x.to(dtype) if x.is_floating_point() else x for x in batch(seed, keep=keep))
    ref, each = old + 0.25, A[:, None].expand(3, 4)
    put = lambda x: torch.where(m, x, torch.tensor(junk).to(dtype))
    f = lambda x, old, A, ref: policy_loss(x, old, A, m, variant, ref)[0]
    clean, dirty = value_and_grad(lambda x: f(x, old, each, ref), logp), value_and_grad(lambda x: f(x, put(old), put(each), put(ref)), put(logp))
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1][0], dirty[1][0]) and (dirty[1][0][~m] == 0).all()
    assert clean[0].isfinite() and clean[0].dtype == (F64 if dtype == F64 else torch.float32) and clean[1][0].dtype == dtype
    for name, value in policy_loss(put(logp), put(old), put(each), m, variant, put(ref))[1].items(): assert value.isfinite(), name
    rows = torch.where(m.any(1), A, torch.tensor(junk).to(dtype))                                # an empty answer may have any advantage
    assert torch.equal(value_and_grad(lambda x: f(x, old, rows, ref), logp)[1][0], clean[1][0])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_no_nan_on_the_way_back_from_under_the_mask(variant, kind):
    logp, old, A, m = batch(4)
    put = lambda x: torch.where(m, x, math.nan)
    with torch.autograd.set_detect_anomaly(True): _, (grad,) = value_and_grad(lambda x: policy_loss(x, put(old), A, m, variant, put(old + 0.1), kl_kind=kind)[0], put(logp))
    assert grad.isfinite().all() and not m.all()


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_all_false_gives_zero(variant):
    logp, old, A, m = batch(0)
    loss, (grad,) = value_and_grad(lambda x: policy_loss(x, old, A, torch.zeros_like(m), variant, old)[0], logp)
    assert loss == 0 and (grad == 0).all()
    assert all(s == 0 for name, s in policy_loss(logp, old, A, torch.zeros_like(m), variant, old)[1].items())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("size", [100.0, 1000.0, 1e6, -100.0, -1000.0, -1e6])
@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_no_log_ratio_is_too_large(variant, size, dtype):
    for logp in (torch.full((2, 3), size, dtype=dtype), torch.tensor([[size, 0, 0], [0, 0, size]], dtype=dtype)):
        if size > 0: logp, old = torch.full_like(logp, -1), -1 - logp                            # log-probabilities are negative
        else: old = torch.zeros_like(logp)
        for A in (torch.tensor([1.0, -1.0]), torch.tensor([-2.0, 0.0])):
            loss, (grad,) = value_and_grad(lambda x: policy_loss(x, old, A, None, variant, logp_ref=old)[0], logp)
            assert loss.isfinite() and grad.isfinite().all()
            loss, (grad,) = value_and_grad(lambda x: policy_loss(x, old, A, None, variant)[0], logp)
            assert loss.isfinite() and grad.isfinite().all()
            r = torch.tensor([[max(min(x, 40.0), -40.0) for x in row] for row in (logp - old).tolist()]).exp()
            if variant in ("ppo", "grpo", "dr_grpo", "dapo"): assert (grad[(A[:, None] > 0) & (r > 1.3)] == 0).all() and (grad[(A[:, None] < 0) & (r < 0.7)] == 0).all()
            if variant == "cispo": close(grad.float(), -r.clamp(max=5) * A[:, None] / 6, rtol=1e-5, atol=1e-6)
            if variant == "sapo": assert (grad[r > 1e3] == 0).all()


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_constants_get_no_gradient(variant):
    logp, old, A, m = batch(1)
    leaves = [t.clone().requires_grad_(True) for t in (logp, old, A, old + 0.1)]
    loss, stats = policy_loss(leaves[0], leaves[1], leaves[2], m, variant, leaves[3])
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    assert grads[0] is not None and grads[1:] == (None, None, None) and not any(s.requires_grad for s in stats.values())


@given(variant=VARIANTS, seed=SEEDS, dtype=st.sampled_from([torch.float16, torch.bfloat16]))
def test_half_precision_is_computed_in_float32(variant, seed, dtype):
    logp, old, A, m = (x.to(dtype) if x.is_floating_point() else x for x in batch(seed))
    assert torch.equal(policy_loss(logp, old, A, m, variant)[0], policy_loss(logp.float(), old.float(), A.float(), m, variant)[0])


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_vmap_and_compile(variant):
    stacks = [torch.stack(t) for t in zip(*(batch(seed) for seed in range(5)))]
    f = lambda x, old, A, m: policy_loss(x, old, A, m, variant, logp_ref=old - 0.1)
    loss, stats = torch.func.vmap(f)(*stacks)
    one_by_one = [f(*t) for t in zip(*stacks)]
    torch.testing.assert_close(loss, torch.stack([t[0] for t in one_by_one]))
    for name in stats: torch.testing.assert_close(stats[name], torch.stack([t[1][name] for t in one_by_one]))
    grads = torch.func.vmap(torch.func.grad(lambda *t: f(*t)[0]))(*stacks)
    torch.testing.assert_close(grads, torch.stack([value_and_grad(lambda x: f(x, *rest)[0], x)[1][0] for x, *rest in zip(*stacks)]))
    # gradients of each answer of one batch
    logp, old, A, _ = batch(0)
    per_answer = torch.func.vmap(torch.func.grad(lambda x, o, a: policy_loss(x[None], o[None], a[None], variant=variant)[0]))(logp, old, A)
    torch.testing.assert_close(per_answer, torch.stack([value_and_grad(lambda x: policy_loss(x, o[None], a[None], variant=variant)[0], x[None])[1][0][0] for x, o, a in zip(logp, old, A)]))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(f, backend="eager", fullgraph=True)(*(s[0] for s in stacks)), one_by_one[0])


@pytest.mark.parametrize("kwargs, error, words", [
    (dict(variant="gpro"), ValueError, "variant must be one of 'ppo', 'grpo', 'dr_grpo', 'dapo', 'gspo', 'cispo', 'sapo', 'gmpo', got 'gpro'"),
    (dict(variant="sapo", eps_low=0.2), ValueError, "eps_low must be None for variant='sapo', .* got 0.2"),
    (dict(variant="sapo", eps_high=0.2), ValueError, "eps_high must be None for variant='sapo'"),
    (dict(variant="cispo", dual_clip=3.0), ValueError, "dual_clip must be None for variant='cispo', got 3.0; it belongs to 'ppo', 'grpo', 'dr_grpo', 'dapo', 'gspo'"),
    (dict(variant="sapo", dual_clip=3.0), ValueError, "dual_clip must be None for variant='sapo'"),
    (dict(variant="gmpo", dual_clip=3.0), ValueError, "dual_clip must be None for variant='gmpo'"),
    (dict(dual_clip=1.0), ValueError, r"dual_clip must be in \(1, inf\), got 1.0"),
    (dict(eps_low=0.0), ValueError, r"eps_low must be in \(0, 1\], got 0.0"), (dict(eps_low=1.5), ValueError, r"eps_low must be in \(0, 1\], got 1.5"),
    (dict(variant="cispo", eps_low=1.5), ValueError, "eps_low"), (dict(variant="gmpo", eps_low=0.0), ValueError, "eps_low"), (dict(variant="cispo", eps_high=-1.0), ValueError, "eps_high"),
    (dict(eps_high=0), ValueError, r"eps_high must be in \(0, inf\), got 0"), (dict(eps_low="0.2"), TypeError, "eps_low must be a number, got str"),
    (dict(variant="sapo", tau=1.0), TypeError, "tau must be a pair of numbers, .* got 1.0"), (dict(variant="sapo", tau=(1.0,)), TypeError, "tau must be a pair"),
    (dict(variant="sapo", tau=(1.0, 0.0)), ValueError, r"tau must be in \(0, inf\), got 0.0"),
    (dict(beta=-0.1), ValueError, r"beta must be in \[0, inf\), got -0.1"), (dict(kl_kind="k4"), ValueError, "kl_kind must be one of 'k1', 'k2', 'k3', got 'k4'"),
    (dict(aggregation="mean"), ValueError, "aggregation must be one of 'token-mean', .* got 'mean'"), (dict(length=0), ValueError, "length must be in"),
    (dict(mask=torch.ones(2, 3)), TypeError, "mask must be boolean"), (dict(mask=torch.ones(2, dtype=torch.bool)), ValueError, r"mask must have the shape of logp, \(2, 3\), got \(2,\)"),
    (dict(logp_ref=torch.zeros(2)), ValueError, r"logp_ref must have the shape of logp, \(2, 3\), got \(2,\)"), (dict(logp_ref=1.0), TypeError, "logp_ref must be a torch.Tensor, got float"),
    (dict(logp_old=torch.zeros(3, 2)), ValueError, r"logp_old must have the shape of logp"), (dict(logp_old=torch.zeros(2, 3).long()), TypeError, "logp_old must have a floating-point dtype"),
    (dict(logp=torch.zeros(3), logp_old=torch.zeros(3)), ValueError, "logp must have 2 dimensions, got 1"),
    (dict(advantage=torch.ones(3)), ValueError, r"advantage must have one number for each answer, \(2,\) or \(2, 1\), or for each token, \(2, 3\), got \(3,\)"),
    (dict(advantage=torch.ones(1, 3)), ValueError, "advantage must have one number"), (dict(advantage=torch.ones(())), ValueError, "advantage must have one number"),
    (dict(advantage=torch.ones(2).long()), TypeError, "advantage must have a floating-point dtype"), (dict(advantage=1.0), TypeError, "advantage must be a torch.Tensor, got float"),
])
def test_bad_input_of_policy_loss_is_named(kwargs, error, words):
    with pytest.raises(error, match=words): policy_loss(**(dict(logp=torch.zeros(2, 3), logp_old=torch.zeros(2, 3), advantage=torch.ones(2)) | kwargs))


# The interface of DI-engine

METHODS = (naive_method, less_efficient_method, efficient_method, selective_log_softmax)


def logits_batch(seed, B=4, S=5, V=3, dtype=F64):
    z = [normal(seed + k, (B, S, V), dtype) for k in range(3)]
    action = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(seed))
    return z, action, normal(seed + 3, (B,), dtype), torch.rand(B, S, generator=torch.Generator().manual_seed(seed + 4), dtype=F64) * random_mask(seed + 5, (B, S), 0.6)


def log_softmax_of(z, action):
    "log pi of the actions, and d log pi / d logits, by loops."
    logp, slope = [], torch.zeros(z.shape, dtype=F64)
    for i, rows in enumerate(z.tolist()):
        logp.append([])
        for t, row in enumerate(rows):
            top = max(row); total = math.fsum(math.exp(x - top) for x in row)
            logp[-1].append(row[action[i, t]] - top - math.log(total))
            for v, x in enumerate(row): slope[i, t, v] = (v == action[i, t].item()) - math.exp(x - top) / total
    return logp, slope


def group_oracle(new, old, ref, adv, weight, eps, beta):
    "Loss and its slope in each log-probability: weighted mean in each answer, mean over the answers with weight; approx_kl and clipfrac over what has weight."
    answers = [i for i, row in enumerate(weight) if sum(row) > 0]
    loss, slope, kls, outside = 0.0, torch.zeros(len(new), len(new[0]), dtype=F64), [], []
    for i in answers:
        for t, w in enumerate(weight[i]):
            if w == 0: continue
            c = w / sum(weight[i]) / len(answers)
            r = math.exp(new[i][t] - old[i][t])
            q = math.exp(ref[i][t] - new[i][t]) if ref else 1.0
            loss += c * (-min(r * adv[i], clip(r, 1 - eps, 1 + eps) * adv[i]) + beta * (q - 1 - math.log(q)))
            slope[i, t] = c * (-r * adv[i] * free(r, adv[i], 1 - eps, 1 + eps) + beta * (1 - q))
            kls.append(old[i][t] - new[i][t]); outside.append(r < 1 - eps or r > 1 + eps)
    n = max(len(kls), 1)
    return loss, slope, math.fsum(kls) / n, sum(outside) / n


@given(seed=SEEDS, method=st.sampled_from(METHODS), eps=st.sampled_from([0.1, 0.2, 1.0]), beta=st.sampled_from([0.0, 0.1, 1.0]), weighted=st.booleans())
def test_grpo_is_the_plain_formula(seed, method, eps, beta, weighted):
    (z, z_old, z_ref), action, adv, weight = logits_batch(seed)
    (new, d), (old, _), (ref, _) = (log_softmax_of(x, action) for x in (z, z_old, z_ref))
    w = weight if weighted else torch.ones_like(weight)
    loss, slope, kl, outside = group_oracle(new, old, ref, adv.tolist(), w.tolist(), eps, beta)
    out, (grad, *others) = value_and_grad(lambda *x: grpo_policy_error(grpo_policy_data(*x, action, adv, weight if weighted else None), method, eps, beta)[0], z, z_old, z_ref)
    close(out, loss); close(grad, slope[..., None] * d); assert others == [None, None]
    _, info = grpo_policy_error(grpo_policy_data(z, z_old, z_ref, action, adv, weight if weighted else None), method, eps, beta)
    assert type(info) is grpo_info and type(info.approx_kl) is float and type(info.clipfrac) is float
    assert info.approx_kl == pytest.approx(kl, abs=1e-9) and info.clipfrac == pytest.approx(outside, abs=1e-6)


@given(seed=SEEDS, method=st.sampled_from(METHODS), eps=st.sampled_from([0.1, 0.2]), prompts=st.sampled_from([1, 2, 3]), flat=st.booleans())
def test_rloo_is_the_plain_formula(seed, method, eps, prompts, flat):
    K = 2 + seed % 3
    if flat: prompts = 1
    (z, z_old, _), action, reward, weight = logits_batch(seed, B=K * prompts)
    adv = [0.0] * (K * prompts)
    for p in range(prompts):
        scores = [reward[k * prompts + p].item() for k in range(K)]
        for k in range(K): adv[k * prompts + p] = scores[k] - (sum(scores) - scores[k]) / (K - 1)
    (new, d), (old, _) = log_softmax_of(z, action), log_softmax_of(z_old, action)
    loss, slope, kl, outside = group_oracle(new, old, None, adv, weight.tolist(), eps, 0.0)
    data = lambda x: rloo_policy_data(x, z_old, action, reward if flat else reward.reshape(K, prompts), weight)
    out, (grad,) = value_and_grad(lambda x: rloo_policy_error(data(x), method, eps)[0], z)
    close(out, loss); close(grad, slope[..., None] * d)
    info = rloo_policy_error(data(z), method, eps)[1]
    assert type(info) is rloo_info and info.approx_kl == pytest.approx(kl, abs=1e-9) and info.clipfrac == pytest.approx(outside, abs=1e-6)


def test_rloo_order_by_hand():
    z, action = torch.zeros(4, 1, 2, dtype=F64), torch.zeros(4, 1, dtype=torch.long)
    slopes = lambda reward: (-8 * value_and_grad(lambda x: rloo_policy_error(rloo_policy_data(x, z, action, reward, None))[0], z)[1][0][:, 0, 0]).tolist()
    assert slopes(torch.tensor([[10.0, 0.0], [11.0, 1.0]])) == [-1, -1, 1, 1]                    # first answers to two prompts, then second answers
    assert slopes(torch.tensor([10.0, 0.0, 11.0, 1.0])) == pytest.approx([6, -22 / 3, 22 / 3, -6])


def test_the_documented_call_runs():
    (z, z_old, z_ref), action, adv, _ = logits_batch(0, 4, 8, 5, torch.float32)
    loss, info = grpo_policy_error(grpo_policy_data(logit_new=z, logit_old=z_old, logit_ref=z_ref, action=action, adv=adv, weight=torch.ones(4, 8)))
    assert loss.shape == () and loss.dtype == torch.float32 and info._fields == ("approx_kl", "clipfrac") and grpo_policy_data._fields == ("logit_new", "logit_old", "logit_ref", "action", "adv", "weight")
    assert loss == grpo_policy_error(grpo_policy_data(z, z_old, z_ref, action, adv, None), efficient_method, 0.2, 0.1)[0]
    loss, info = rloo_policy_error(rloo_policy_data(logit_new=z, logit_old=z_old, action=action, reward=adv, weight=None))
    assert loss == rloo_policy_error(rloo_policy_data(z, z_old, action, adv, None), efficient_method, 0.2)[0] and info._fields == ("approx_kl", "clipfrac")
    assert rloo_policy_data._fields == ("logit_new", "logit_old", "action", "reward", "weight")


def test_grpo_is_policy_loss_on_the_log_probabilities():
    (z, z_old, z_ref), action, adv, weight = logits_batch(5)
    logp, old, ref = (torch.tensor(log_softmax_of(x, action)[0], dtype=F64) for x in (z, z_old, z_ref))
    m = weight > 0
    close(grpo_policy_error(grpo_policy_data(z, z_old, z_ref, action, adv, m.double()))[0], policy_loss(logp, old, adv, m, "grpo", ref, beta=0.1)[0].item())


@given(seed=SEEDS, junk=JUNK, method=st.sampled_from(METHODS), dtype=DTYPES, empty=st.sampled_from([0, 2, 4]))
def test_what_has_no_weight_does_not_leak(seed, junk, method, dtype, empty):
    z, action, adv, weight = logits_batch(seed, dtype=dtype)
    weight[:empty] = 0
    counts = weight > 0
    put = lambda x: torch.where(counts[..., None], x, torch.tensor(junk).to(dtype))
    dirty_action, dirty_adv = torch.where(counts, action, -100), torch.where(counts.any(1), adv, torch.tensor(junk).to(dtype))
    grpo = lambda x, a, adv, *rest: grpo_policy_error(grpo_policy_data(x, *rest, a, adv, weight), method)
    clean = value_and_grad(lambda x: grpo(x, action, adv, z[1], z[2])[0], z[0])
    dirty = value_and_grad(lambda x: grpo(x, dirty_action, dirty_adv, put(z[1]), put(z[2]))[0], put(z[0]))
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1][0], dirty[1][0]) and clean[0].isfinite() and (dirty[1][0][~counts] == 0).all()
    assert grpo(put(z[0]), dirty_action, dirty_adv, put(z[1]), put(z[2]))[1] == grpo(z[0], action, adv, z[1], z[2])[1]
    rloo = lambda x, a, old: rloo_policy_error(rloo_policy_data(x, old, a, adv, weight), method)[0]
    clean, dirty = value_and_grad(lambda x: rloo(x, action, z[1]), z[0]), value_and_grad(lambda x: rloo(x, dirty_action, put(z[1])), put(z[0]))
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1][0], dirty[1][0])
    if empty == 4: assert clean[0] == 0 and (clean[1][0] == 0).all()


def test_no_nan_on_the_way_back_from_an_empty_answer():
    (z, z_old, z_ref), action, adv, weight = logits_batch(2)
    weight[1] = 0
    with torch.autograd.set_detect_anomaly(True): value_and_grad(lambda x: grpo_policy_error(grpo_policy_data(x, z_old, z_ref, action, adv, weight))[0], z)


@pytest.mark.parametrize("size", [100.0, 1000.0, 1e6])
def test_no_logit_is_too_large_for_the_interfaces(size):
    z, action = torch.tensor([[[size, 0.0], [0.0, size]], [[size, 0.0], [0.0, size]]]), torch.zeros(2, 2, dtype=torch.long)
    for adv in (torch.tensor([1.0, -1.0]), torch.tensor([-1.0, 1.0])):
        for new, old in ((z, -z), (-z, z)):
            loss, (grad,) = value_and_grad(lambda x: grpo_policy_error(grpo_policy_data(x, old, old, action, adv, None))[0], new)
            assert loss.isfinite() and grad.isfinite().all()
            loss, (grad,) = value_and_grad(lambda x: rloo_policy_error(rloo_policy_data(x, old, action, adv, None))[0], new)
            assert loss.isfinite() and grad.isfinite().all()


Z, ACTION, ADV = torch.zeros(4, 3, 2), torch.zeros(4, 3, dtype=torch.long), torch.ones(4)


@pytest.mark.parametrize("field, value, error, words", [
    ("logit_new", torch.zeros(4, 3), ValueError, "data.logit_new must have 3 dimensions, got 2"), ("logit_old", torch.zeros(4, 3, 5), ValueError, r"data.logit_old must have the shape of data.logit_new, \(4, 3, 2\), got \(4, 3, 5\)"),
    ("logit_new", Z.long(), TypeError, "data.logit_new must have a floating-point dtype"), ("action", ACTION[:2], ValueError, r"data.action must have the shape of data.logit_new without the vocabulary, \(4, 3\), got \(2, 3\)"),
    ("action", ACTION.float(), TypeError, "data.action must have an integer dtype"), ("weight", torch.ones(4), ValueError, r"data.weight must have the shape of data.action, \(4, 3\), got \(4,\)"),
    ("weight", 1.0, TypeError, "data.weight must be a torch.Tensor or None, got float"),
    ("action", ACTION + 2, ValueError, "^data.action must be between 0 and 1"), ("action", ACTION - 1, ValueError, "^data.action must be between 0 and 1"),
])
def test_bad_fields_are_named(field, value, error, words):
    with pytest.raises(error, match=words): grpo_policy_error(grpo_policy_data(Z, Z, Z, ACTION, ADV, None)._replace(**{field: value}))
    with pytest.raises(error, match=words): rloo_policy_error(rloo_policy_data(Z, Z, ACTION, ADV, None)._replace(**{field: value}))


@pytest.mark.parametrize("call, error, words", [
    (lambda: grpo_policy_error(grpo_policy_data(Z, Z, Z[..., :1], ACTION, ADV, None)), ValueError, "data.logit_ref must have the shape of data.logit_new"),
    (lambda: grpo_policy_error(grpo_policy_data(Z, Z, Z, ACTION, torch.ones(4, 3), None)), ValueError, r"data.adv must have one number for each answer, shape \(4,\), got \(4, 3\)"),
    (lambda: grpo_policy_error(grpo_policy_data(Z, Z, Z, ACTION, torch.ones(4).long(), None)), TypeError, "data.adv must have a floating-point dtype"),
    (lambda: grpo_policy_error(grpo_policy_data(Z, Z, Z, ACTION, ADV, None), clip_ratio=0.0), ValueError, r"clip_ratio must be in \(0, 1\], got 0.0"),
    (lambda: grpo_policy_error(grpo_policy_data(Z, Z, Z, ACTION, ADV, None), beta=-1.0), ValueError, r"beta must be in \[0, inf\), got -1.0"),
    (lambda: grpo_policy_error((Z, Z)), TypeError, "data must be a grpo_policy_data with the fields logit_new, logit_old, logit_ref, action, adv, weight, got 2 fields"),
    (lambda: grpo_policy_error(None), TypeError, "data must be a grpo_policy_data, got NoneType"),
    (lambda: rloo_policy_error(rloo_policy_data(Z, Z, ACTION, torch.ones(3), None)), ValueError, r"data.reward must have one number for each of the 4 answers, .* got shape \(3,\)"),
    (lambda: rloo_policy_error(rloo_policy_data(Z, Z, ACTION, torch.ones(1, 4), None)), ValueError, r"K >= 2 answers to each prompt, got shape \(1, 4\)"),
    (lambda: rloo_policy_error(rloo_policy_data(Z, Z, ACTION, torch.ones(2, 2, 1), None)), ValueError, "data.reward must have 1 or 2 dimensions, got 3"),
    (lambda: rloo_policy_error(rloo_policy_data(Z, Z, ACTION, torch.ones(4).long(), None)), TypeError, "data.reward must have a floating-point dtype"),
    (lambda: rloo_policy_error(rloo_policy_data(Z, Z, ACTION, ADV, None), clip_ratio=1.5), ValueError, "clip_ratio"),
    (lambda: grpo_policy_error(grpo_policy_data(Z, Z, Z, ACTION, ADV, None), log_prob_fn="efficient"), TypeError, "^log_prob_fn must be a function of logits and index, got 'efficient'"),
    (lambda: rloo_policy_error(rloo_policy_data(Z, Z, ACTION, ADV, None), log_prob_fn=None), TypeError, "^log_prob_fn must be a function of logits and index, got None"),
])
def test_more_bad_data(call, error, words):
    with pytest.raises(error, match=words): call()


# Samples of an older policy, or of another program

@given(seed=SEEDS, B=st.integers(1, 5), T=st.integers(1, 5), scale=st.sampled_from([0.1, 1.0]), delta=st.sampled_from([0.0, 0.1, 0.5]), per_answer=st.booleans(), p=st.sampled_from([0.0, 0.5, 1.0]))
def test_off_policy_mask_equals_the_loop(seed, B, T, scale, delta, per_answer, p):
    logp, old, A, m = normal(seed, (B, T), scale=scale), normal(seed + 1, (B, T), scale=scale), normal(seed + 2, (B,)), random_mask(seed + 3, (B, T), p)
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
    if delta: assert torch.equal(keep, (A[:, None] >= 0) | (importance_ratio(logp, old, m, "sequence") >= math.exp(-delta)))     # a bound on GSPO's ratio


def test_off_policy_mask_by_hand():
    logp, A = torch.tensor([[-1.0, -0.25]] * 3, dtype=F64), torch.tensor([-1.0, 0.0, 1.0])
    kept = lambda delta, sign=1: off_policy_sequence_mask(sign * logp, torch.zeros_like(logp), A, delta)[:, 0].tolist()
    assert kept(0.5) == [False, True, True] and kept(0.625) == kept(1.0) == kept(0.0, -1) == [True] * 3       # the distance is 0.625: above it, not at it; and one way only


@given(seed=SEEDS, junk=JUNK, old_junk=JUNK)
def test_off_policy_mask_does_not_see_what_is_masked(seed, junk, old_junk):
    logp, old, m, A = normal(seed, (4, 5)), normal(seed + 1, (4, 5)), random_mask(seed + 2, (4, 5)), torch.full((4,), -1.0)
    assert torch.equal(off_policy_sequence_mask(logp, old, A, 0.1, m), off_policy_sequence_mask(torch.where(m, logp, junk), torch.where(m, old, old_junk), A, 0.1, m))


def test_off_policy_mask_at_the_edges():
    bad, zero, inf = torch.full((1,), -1.0), torch.zeros(1, 1), torch.full((1, 1), math.inf)
    assert [off_policy_sequence_mask(x, zero, bad, 1e6).item() for x in (-inf, inf, zero * math.nan)] == [False, True, True]
    assert off_policy_sequence_mask(-inf, zero, bad, 0.0, torch.zeros(1, 1, dtype=torch.bool)).item()         # an answer without tokens
    for shape in ((0, 3), (3, 0), (0, 0)): assert off_policy_sequence_mask(torch.zeros(shape), torch.zeros(shape), torch.full(shape[:1], -1.0), 0.0).tolist() == [[True]] * shape[0]
    new, old = torch.tensor([[-256.0]]).bfloat16(), torch.tensor([[-0.5]]).bfloat16()                        # bfloat16 knows 256, and not 255.5
    assert off_policy_sequence_mask(new, old, bad, 255.75).item() and not off_policy_sequence_mask(new, old, bad, 255.25).item()
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
    assert torch.equal(zeroed, plain * keep)                                                                  # the paper's: it counts as 0
    rows = keep[:, 0]
    if variant != "dr_grpo": close(without, policy_loss(logp[rows], old[rows], A[rows], m[rows], variant)[0].item())


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
@given(seed=SEEDS)
def test_a_truncated_weight_times_the_advantage_weighs_the_objective(variant, seed):
    logp, old, A, m = batch(seed)
    w = truncated_importance_weight(old, old - normal(seed + 9, old.shape), mask=m)
    _, (plain,) = value_and_grad(lambda x: policy_loss(x, old, A, m, variant)[0], logp)
    _, (weighted,) = value_and_grad(lambda x: policy_loss(x, old, A[:, None] * w, m, variant)[0], logp)
    each = (w * m).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1) if variant in ("gspo", "gmpo") else w
    torch.testing.assert_close(weighted, plain * each)


@pytest.mark.parametrize("args, kwargs, error, words", [
    ([torch.zeros(2, 3).long(), torch.zeros(2, 3), torch.zeros(2), 0.5], {}, TypeError, "logp must have a floating-point dtype"),
    ([torch.zeros(2, 3), torch.zeros(2, 3), [0.0, 0.0], 0.5], {}, TypeError, "advantage must be a torch.Tensor, got list"),
    ([torch.zeros(3), torch.zeros(3), torch.zeros(3), 0.5], {}, ValueError, "logp must have 2 dimensions, got 1"),
    ([torch.zeros(2, 3), torch.zeros(2, 1), torch.zeros(2), 0.5], {}, ValueError, r"logp_old must have the shape of logp, \(2, 3\), got \(2, 1\)"),
    ([torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), 0.5], {}, ValueError, r"advantage must have one number for each answer, \(2,\) or \(2, 1\), got \(2, 3\)"),
    ([torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(1, 2), 0.5], {}, ValueError, r"got \(1, 2\)"),
    ([torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), -0.5], {}, ValueError, r"threshold must be in \[0, inf\), got -0.5"),
    ([torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), 0.5], dict(mask=torch.ones(2, 3)), TypeError, "mask must be boolean"),
    ([torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), 0.5], dict(mask=torch.ones(2).bool()), ValueError, "mask must have the shape of logp"),
])
def test_bad_input_of_the_off_policy_mask_is_named(args, kwargs, error, words):
    with pytest.raises(error, match=words): off_policy_sequence_mask(*args, **kwargs)


# IPO

@given(seed=SEEDS, tau=st.sampled_from([0.01, 0.1, 1.0]), eps=st.sampled_from([0.0, 0.1, 0.3, 0.5]), n=st.integers(1, 5))
def test_ipo_is_the_plain_formula(seed, tau, eps, n):
    tensors = [normal(seed + k, (n,), scale=10.0) for k in range(4)]
    before = [t.clone() for t in tensors]
    loss, slope = 0.0, []
    for w, l, rw, rl in zip(*(t.tolist() for t in tensors)):
        h, target = (w - rw) - (l - rl), 1 / (2 * tau)
        loss += ((1 - eps) * (h - target) ** 2 + eps * (-h - target) ** 2) / n
        slope.append(2 * (h - (1 - 2 * eps) * target) / n)
    got, (chosen, rejected, *refs) = value_and_grad(lambda *t: dpo_loss(*t, tau, eps, "ipo"), *tensors)
    assert got.shape == () and got.dtype == F64
    close(got, loss); close(chosen, slope); close(rejected, [-s for s in slope]); assert refs == [None, None]
    assert all(torch.equal(x, y) for x, y in zip(before, tensors))


def test_ipo_by_hand():
    zero, lead = torch.zeros(1), lambda h: torch.tensor([h])
    assert [dpo_loss(lead(h), zero, zero, zero, kind="ipo").item() for h in (0.0, 5.0, 7.0)] == [25.0, 0.0, 4.0]       # tau = 0.1: a lead of 5 is enough
    assert dpo_loss(zero, lead(7.0), zero, zero, kind="ipo").item() == dpo_loss(lead(-7.0), zero, zero, zero, kind="ipo").item() == 144.0
    for kind in DPO_KINDS: assert torch.equal(dpo_loss(lead(3.0), zero, zero, zero, kind=kind), dpo_loss(lead(2.0), zero, zero, lead(1.0), kind=kind))
    assert torch.equal(dpo_loss(lead(3.0), zero, zero, zero), dpo_loss(lead(3.0), zero, zero, zero, kind="sigmoid"))


def test_ipo_stops_where_dpo_does_not():
    for kind, settles in (("ipo", True), ("sigmoid", False)):
        x, zero = torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)
        for _ in range(2000): x = x - 0.1 * value_and_grad(lambda x: dpo_loss(x, zero, zero, zero, 0.5, kind=kind), x)[1][0]
        assert (x.item() == pytest.approx(1.0)) if settles else (x > 5)


@pytest.mark.parametrize("size", [1e6, -1e6, 1e30, -1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_ipo_extremes(size, dtype):
    zero, x = torch.zeros(1, dtype=dtype), torch.tensor([size], dtype=dtype)
    loss, (grad,) = value_and_grad(lambda x: dpo_loss(x, zero, zero, zero, kind="ipo"), x)
    assert loss.dtype == (F64 if dtype == F64 else torch.float32) and loss > 0
    assert grad.item() == pytest.approx(2 * (x.item() - 5), rel=1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert dpo_loss(*[torch.zeros(0, dtype=dtype)] * 4, kind="ipo") == 0


def test_ipo_vmap_and_half_precision():
    stacks = [normal(k, (5, 3)) for k in range(4)]
    f = lambda *t: dpo_loss(*t, 0.5, 0.1, "ipo")
    torch.testing.assert_close(torch.func.vmap(f)(*stacks), torch.stack([f(*t) for t in zip(*stacks)]))
    torch.testing.assert_close(torch.compile(f, backend="eager", fullgraph=True)(*stacks), f(*stacks))
    new, old = torch.tensor([256.0]).bfloat16(), torch.tensor([0.5]).bfloat16()
    assert dpo_loss(new, old * 0, old, old * 0, kind="ipo") == 250.5**2


# DPO

@given(seed=SEEDS, beta=st.sampled_from([0.01, 0.1, 1.0]), eps=st.sampled_from([0.0, 0.1, 0.3, 0.5]), n=st.integers(1, 5))
def test_dpo_is_the_plain_formula(seed, beta, eps, n):
    tensors = [normal(seed + k, (n,), scale=10.0) for k in range(4)]
    before = [t.clone() for t in tensors]
    loss, slope = 0.0, []
    for w, l, rw, rl in zip(*(t.tolist() for t in tensors)):
        d = beta * ((w - rw) - (l - rl))
        p = 1 / (1 + math.exp(-d))
        loss += (-(1 - eps) * math.log(p) - eps * math.log(1 / (1 + math.exp(d)))) / n
        slope.append(-beta * (1 - eps - p) / n)
    got, (chosen, rejected, *refs) = value_and_grad(lambda *t: dpo_loss(*t, beta, eps), *tensors)
    assert got.shape == () and got.dtype == F64
    close(got, loss); close(chosen, slope); close(rejected, [-s for s in slope]); assert refs == [None, None]
    assert all(torch.equal(x, y) for x, y in zip(before, tensors))


@given(seed=SEEDS, beta=st.sampled_from([0.01, 0.1, 1.0]), shape=st.sampled_from([(), (3,), (2, 3)]))
def test_dpo_is_bradley_terry_with_the_log_ratio_as_reward(seed, beta, shape):
    w, l, rw, rl = (normal(seed + k, shape, scale=10.0) for k in range(4))
    torch.testing.assert_close(dpo_loss(w, l, rw, rl, beta), bradley_terry_loss(beta * (w - rw), beta * (l - rl)))
    torch.testing.assert_close(dpo_loss(w, l, rw, rl, beta, 0.2), 0.8 * dpo_loss(w, l, rw, rl, beta) + 0.2 * dpo_loss(l, w, rl, rw, beta))


def test_dpo_by_hand():
    for eps in (0.0, 0.1, 0.5): assert dpo_loss(*[torch.tensor([-3.0, -5.0])] * 4, label_smoothing=eps).item() == pytest.approx(math.log(2))
    w, zero = torch.tensor([20.0]), torch.zeros(1)
    assert dpo_loss(w, zero, zero, zero).item() == pytest.approx(math.log(1 + math.exp(-2)))         # beta = 0.1 by default, no smoothing
    assert dpo_loss(zero, w, zero, zero).item() == pytest.approx(math.log(1 + math.exp(2)))
    best = torch.tensor([math.log(9)], dtype=F64)                                                    # sigmoid = 0.9: smoothing of 0.1 stops here
    assert value_and_grad(lambda x: dpo_loss(x, zero, zero, zero, 1.0, 0.1), best)[1][0].abs() < 1e-12


@pytest.mark.parametrize("size", [100.0, 1000.0, 1e6, -100.0, -1000.0, -1e6])
@pytest.mark.parametrize("eps", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_dpo_extremes(size, eps, dtype):
    zero = torch.zeros(1, dtype=dtype)
    loss, (grad,) = value_and_grad(lambda x: dpo_loss(x, zero, zero, zero, 1.0, eps), torch.tensor([size], dtype=dtype))
    assert loss.isfinite() and loss.dtype == (F64 if dtype == F64 else torch.float32)
    assert grad.item() == pytest.approx(eps if size > 0 else eps - 1, abs=1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert loss.item() == pytest.approx(abs(torch.tensor(size, dtype=dtype).item()) * (eps if size > 0 else 1 - eps), abs=1e-6, rel=1e-5)


def test_dpo_vmap_and_compile():
    stacks = [normal(k, (5, 3)) for k in range(4)]
    f = lambda *t: dpo_loss(*t, 0.5, 0.1)
    torch.testing.assert_close(torch.func.vmap(f)(*stacks), torch.stack([f(*t) for t in zip(*stacks)]))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(f))(*stacks), torch.stack([value_and_grad(lambda x: f(x, *rest), x)[1][0] for x, *rest in zip(*stacks)]))
    torch.testing.assert_close(torch.compile(f, backend="eager", fullgraph=True)(*stacks), f(*stacks))


@pytest.mark.parametrize("args, kwargs, error, words", [
    ([torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(3)], {}, ValueError, r"ref_rejected_logp must have the shape of chosen_logp, \(2,\), got \(3,\)"),
    ([torch.zeros(2), torch.zeros(2, 1), torch.zeros(2), torch.zeros(2)], {}, ValueError, "rejected_logp must have the shape of chosen_logp"),
    ([torch.zeros(2), torch.zeros(2), torch.zeros(2).long(), torch.zeros(2)], {}, TypeError, "ref_chosen_logp must have a floating-point dtype"),
    ([0.0, torch.zeros(2), torch.zeros(2), torch.zeros(2)], {}, TypeError, "chosen_logp must be a torch.Tensor, got float"),
    ([torch.zeros(2)] * 4, dict(beta=0.0), ValueError, r"beta must be in \(0, inf\), got 0.0"), ([torch.zeros(2)] * 4, dict(beta=-1), ValueError, "beta"),
    ([torch.zeros(2)] * 4, dict(label_smoothing=0.6), ValueError, r"label_smoothing must be in \[0, 0.5\], got 0.6"), ([torch.zeros(2)] * 4, dict(label_smoothing=-0.1), ValueError, "label_smoothing"),
    ([torch.zeros(2)] * 4, dict(kind="hinge"), ValueError, "kind must be one of 'sigmoid', 'ipo', got 'hinge'"),
])
def test_bad_input_of_dpo_is_named(args, kwargs, error, words):
    with pytest.raises(error, match=words): dpo_loss(*args, **kwargs)


def test_no_words_are_named():
    none = Z[..., :0]
    for call in (lambda: grpo_policy_error(grpo_policy_data(none, none, none, ACTION, ADV, None)), lambda: rloo_policy_error(rloo_policy_data(none, none, ACTION, ADV, None))):
        with pytest.raises(ValueError, match=r"data.logit_new must have at least 1 dimension, the last of which, the vocabulary, has at least 1 element; got shape \(4, 3, 0\)"): call()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_an_empty_batch_gives_zero(variant, shape):
    logp, A = torch.empty(shape), torch.empty(shape[:1])
    for mask in (None, torch.empty(shape, dtype=torch.bool)):
        loss, stats = policy_loss(logp, logp, A, mask, variant, logp_ref=logp)
        assert loss == 0 and all(s == 0 for s in stats.values())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_a_kl_that_weighs_nothing_adds_nothing(variant, kind):
    logp, old, A, m = batch(6)
    loss, stats = policy_loss(logp, old, A, m, variant, torch.full_like(old, -math.inf), 0.0, kl_kind=kind)
    assert torch.equal(loss, policy_loss(logp, old, A, m, variant)[0]) and stats["kl"] == math.inf            # it is still measured
    (z, z_old, z_ref), action, adv, weight = logits_batch(6)
    impossible = z_ref.scatter(-1, action.unsqueeze(-1), -math.inf)
    f = lambda x, ref: grpo_policy_error(grpo_policy_data(x, z_old, ref, action, adv, weight), beta=0.0)[0]
    (loss, (grad,)), (same, (g,)) = (value_and_grad(lambda x: f(x, ref), z) for ref in (impossible, z_ref))
    assert torch.equal(loss, same) and torch.equal(grad, g) and loss.isfinite()


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_without_advantage_an_impossible_word_costs_nothing(variant):
    logp = torch.tensor([[-math.inf, -1.0]])
    loss, (grad,) = value_and_grad(lambda x: policy_loss(x, torch.full_like(x, -1.0), torch.zeros(1), None, variant)[0], logp)
    assert loss == 0 and (grad == 0).all()


def test_no_nan_on_the_way_back_from_the_advantage_of_an_answer_without_weight():
    (z, z_old, z_ref), action, adv, weight = logits_batch(2)
    adv[1], weight[1] = math.nan, 0
    with torch.autograd.set_detect_anomaly(True): _, (grad,) = value_and_grad(lambda x: grpo_policy_error(grpo_policy_data(x, z_old, z_ref, action, adv, weight))[0], z)
    assert grad.isfinite().all()


def test_dpo_without_smoothing_has_no_second_term():
    inf, zero = torch.tensor([math.inf]), torch.zeros(1)
    loss, (_, grad) = value_and_grad(lambda c, r: dpo_loss(c, r, zero, zero), zero, -inf)
    assert loss == 0 and grad == 0                                                                   # the rejected answer is impossible: nothing is left to learn
    assert dpo_loss(zero, -inf, zero, zero, label_smoothing=0.1) == dpo_loss(-inf, zero, zero, zero) == math.inf
