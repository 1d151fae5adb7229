import math
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, JUNK, SEEDS, normal, random_mask, value_and_grad

from rlhf_notes.compat.ding import (
    calculate_kl_div,
    efficient_method,
    grpo_info,
    grpo_policy_data,
    grpo_policy_error,
    less_efficient_method,
    naive_method,
    ppo_data,
    ppo_data_continuous,
    ppo_error,
    ppo_error_continuous,
    ppo_info,
    ppo_loss,
    ppo_policy_data,
    ppo_policy_data_continuous,
    ppo_policy_error,
    ppo_policy_error_continuous,
    ppo_policy_loss,
    ppo_value_data,
    ppo_value_error,
    rloo_info,
    rloo_policy_data,
    rloo_policy_error,
    shape_fn_ppo,
)
from rlhf_notes.formulas.grpo import policy_loss
from rlhf_notes.formulas.kl import kl_estimate
from rlhf_notes.formulas.logprob import selective_log_softmax

KINDS = st.sampled_from(["k1", "k2", "k3"])
CLIPS = st.sampled_from([0.2, 0.05, 0.5, 1.0])
DUALS = st.sampled_from([None, 1.2, 3.0])
SHAPES = st.sampled_from([(4,), (1,), (2, 3), (2, 1), (2, 2, 3)])
MAX = 12


def integers(seed, shape, high):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def weights(seed, shape, kind):
    "No weight, positive weights, a mask, or both in one."
    if kind is None: return None
    w, m = normal(seed, shape).exp(), random_mask(seed + 1, shape)
    return {"weight": w, "mask": m.double(), "boolean": m, "both": w * m,
            "nothing": torch.zeros(shape, dtype=torch.float64)}[kind]


WEIGHTS = st.sampled_from([None, "weight", "mask", "boolean", "both", "nothing"])


def log_softmax(row):
    top = max(row)
    return [v - top - math.log(math.fsum(math.exp(u - top) for u in row)) for v in row]


def discrete(logits, action):
    "(log-probability, entropy, score, slope of the entropy) of each row, in plain Python."
    out = []
    for row, a in zip(
        logits.double().reshape(-1, logits.shape[-1]).tolist(), action.flatten().tolist()):
        logp = log_softmax(row)
        H = -math.fsum(math.exp(l) * l for l in logp)
        out.append((logp[a], H, [(i == a) - math.exp(l) for i, l in enumerate(logp)],
                    [-math.exp(l) * (l + H) for l in logp]))
    return out


def gaussian(mu, sigma, action):
    "The same for Gaussians; score and slope are those of (mu, sigma) one after the other."
    out = []
    for m, s, a in zip(
        *(t.double().reshape(-1, t.shape[-1]).tolist() for t in (mu, sigma, action))):
        logp = math.fsum(-(x - c) ** 2 / (2 * d * d) - math.log(d) - math.log(2 * math.pi) / 2
                         for c, d, x in zip(m, s, a))
        H = math.fsum(0.5 * math.log(2 * math.pi * math.e * d * d) for d in s)
        out.append((logp, H,
                    [(x - c) / d**2 for c, d, x in zip(m, s, a)]
                    + [((x - c) ** 2 / d**2 - 1) / d for c, d, x in zip(m, s, a)],
                    [0.0] * len(m) + [1 / d for d in s]))
    return out


def loop_policy(new, old, ref, adv, w, clip, dual, kind, parts=1):
    """policy_loss, entropy_loss, kl_div, approx_kl, clipfrac and the gradients of the first three,
    by the definitions and one sample after the other.
    `parts` rows of `new`, `old` and `ref` share one advantage and one weight, and the mean of their
    ratios."""
    A = adv.double().flatten().tolist()
    w = [1.0] * len(A) if w is None else w.double().flatten().tolist()
    M = len(A)
    n = sum(x != 0 for x in w)
    policy = entropy = kl = approx = outside = 0.0
    grads = [[], [], []]
    for k, (a, u) in enumerate(zip(A, w)):
        rows = range(k * parts, (k + 1) * parts)
        r = [math.exp(new[j][0] - old[j][0]) for j in rows]
        ratio, bounds = math.fsum(r) / parts, (1 - clip, 1 + clip)
        objective = min(ratio * a, min(max(ratio, bounds[0]), bounds[1]) * a)
        live = ratio <= bounds[1] if a > 0 else ratio >= bounds[0]
        if dual is not None and a < 0:
            objective, live = max(objective, dual * a), live and ratio <= dual
        policy -= u * objective / M
        entropy += u * math.fsum(new[j][1] for j in rows) / parts / M
        outside += (u != 0) * (ratio < bounds[0] or ratio > bounds[1]) / max(n, 1)
        for j, r_j in zip(rows, r):
            d = new[j][0] - ref[j][0] if ref else 0.0
            value, slope = {"k1": (d, 1.0), "k2": (d * d / 2, d),
                            "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d))}[kind]
            share = (u != 0) / max(n * parts, 1)
            kl += bool(ref) * value * share
            approx += (old[j][0] - new[j][0]) * share
            grads[0].append([-u / M * a * live * r_j / parts * s for s in new[j][2]])
            grads[1].append([u / M / parts * h for h in new[j][3]])
            grads[2].append([bool(ref) * share * slope * s for s in new[j][2]])
    return [policy, entropy, kl], [approx, outside], grads


def check_policy(loss, info, leaves, expected, rtol=1e-9):
    values, logs, grads = expected
    for got, value, grad in zip(loss, values, grads):
        assert got.ndim == 0 and got.item() == pytest.approx(value, rel=rtol, abs=rtol)
        if not got.requires_grad:
            assert all(g == 0 for row in grad for g in row)
            continue
        g = torch.autograd.grad(got, leaves, retain_graph=True, allow_unused=True)
        g = torch.cat([(torch.zeros_like(t) if x is None else x).double().reshape(-1, t.shape[-1])
                       for x, t in zip(g, leaves)], -1)
        torch.testing.assert_close(
            g, torch.tensor(grad, dtype=torch.float64).reshape(g.shape), rtol=rtol, atol=rtol)
    assert isinstance(info, ppo_info) and all(type(x) is float for x in info)
    assert info.approx_kl == pytest.approx(logs[0], rel=rtol, abs=rtol)
    assert info.clipfrac == pytest.approx(logs[1], abs=1e-6)


def discrete_case(seed, shape, n, scale=0.5, adv_shape=None):
    z, z_old, z_ref = (normal(seed + k, (*shape, n), scale=scale) for k in range(3))
    return (z, z_old, z_ref, integers(seed + 3, shape, n),
            normal(seed + 4, shape if adv_shape is None else adv_shape))


@given(seed=SEEDS, shape=SHAPES, n=st.integers(2, 5), kind=WEIGHTS, reference=st.booleans(),
       clip=CLIPS, dual=DUALS, kl_type=KINDS, bonus=st.booleans())
def test_policy_error_and_its_gradient_are_the_loops(
    seed, shape, n, kind, reference, clip, dual, kl_type, bonus):
    z, z_old, z_ref, action, adv = discrete_case(seed, shape, n)
    w, leaf = weights(seed + 5, shape, kind), z.clone().requires_grad_(True)
    before = [t.clone() for t in (z_old, z_ref, action, adv)]
    loss, info = ppo_policy_error(
        ppo_policy_data(leaf, z_old, action, adv, w, z_ref if reference else None), clip, dual,
        bonus, kl_type)
    assert isinstance(loss, ppo_policy_loss)
    assert loss._fields == ("policy_loss", "entropy_loss", "kl_div")
    expected = loop_policy(
        discrete(z, action), discrete(z_old, action),
        discrete(z_ref, action) if reference else None, adv, w, clip, dual, kl_type)
    if not bonus: expected[0][1], expected[2][1] = 0.0, [[0.0] * n] * action.numel()
    check_policy(loss, info, [leaf], expected)
    assert all(torch.equal(a, b) for a, b in zip(before, (z_old, z_ref, action, adv)))


@given(seed=SEEDS, shape=st.sampled_from([(4,), (2, 3), ()]), parts=st.integers(1, 3),
       n=st.integers(2, 4), kind=WEIGHTS, dual=DUALS, kl_type=KINDS)
def test_parts_of_one_action_share_the_mean_of_their_ratios(
    seed, shape, parts, n, kind, dual, kl_type):
    if not shape: shape = (1,)
    z, z_old, z_ref, action, adv = discrete_case(seed, (*shape, parts), n, adv_shape=shape)
    w, leaf = weights(seed + 5, shape, kind), z.clone().requires_grad_(True)
    loss, info = ppo_policy_error(
        ppo_policy_data(leaf, z_old, action, adv, w, z_ref), 0.2, dual, True, kl_type)
    check_policy(loss, info, [leaf],
                 loop_policy(discrete(z, action), discrete(z_old, action), discrete(z_ref, action),
                             adv, w, 0.2, dual, kl_type, parts))


@given(seed=SEEDS, shape=SHAPES, n=st.integers(1, 3), kind=WEIGHTS, reference=st.booleans(),
       clip=CLIPS, dual=DUALS, kl_type=KINDS, as_dict=st.booleans(), joint=st.booleans())
def test_continuous_policy_error_and_its_gradient_are_the_loops(
    seed, shape, n, kind, reference, clip, dual, kl_type, as_dict, joint):
    joint = joint and len(shape) > 1
    mus, sigmas = ([normal(seed + k, (*shape, n), scale=0.3) for k in range(3)],
                   [(normal(seed + 3 + k, (*shape, n)) * 0.2).exp() for k in range(3)])
    action, adv = normal(seed + 6, (*shape, n)), normal(seed + 7, shape[:-1] if joint else shape)
    w, leaves = (weights(seed + 8, adv.shape, kind),
                 [mus[0].clone().requires_grad_(True), sigmas[0].clone().requires_grad_(True)])
    give = (
        lambda mu, sigma: dict(mu=mu, sigma=sigma)) if as_dict else (lambda mu, sigma: (mu, sigma))
    data = ppo_policy_data_continuous(give(*leaves), give(mus[1], sigmas[1]), action, adv, w,
                                      give(mus[2], sigmas[2]) if reference else None)
    loss, info = ppo_policy_error_continuous(data, clip, dual, kl_type)
    rows = [gaussian(m, s, action) for m, s in zip(mus, sigmas)]
    check_policy(loss, info, leaves,
                 loop_policy(rows[0], rows[1], rows[2] if reference else None, adv, w, clip, dual,
                             kl_type, shape[-1] if joint else 1))


def loop_value(V, V_old, R, w, clip):
    w = [1.0] * V.numel() if w is None else w.double().flatten().tolist()
    M = V.numel()
    total, grad = 0.0, []
    for v, o, r, u in zip(V.flatten().tolist(), V_old.flatten().tolist(), R.flatten().tolist(), w):
        near = v if clip is None or abs(v - o) <= clip else o + math.copysign(clip, v - o)
        stopped = (near - r) ** 2 > (v - r) ** 2
        total += 0.5 * u / M * max((v - r) ** 2, (near - r) ** 2)
        grad.append(0.0 if stopped else u / M * (v - r))
    return total, grad


@given(seed=SEEDS, shape=SHAPES, kind=WEIGHTS, clip=st.sampled_from([0.2, 1.0, 5.0]),
       use=st.booleans())
def test_value_error_and_its_gradient_are_the_loops(seed, shape, kind, clip, use):
    V, V_old, R = (normal(seed + k, shape) for k in range(3))
    w = weights(seed + 3, shape, kind)
    loss, (grad,) = value_and_grad(
        lambda v: ppo_value_error(ppo_value_data(v, V_old, R, w), clip, use), V)
    total, expected = loop_value(V, V_old, R, w, clip if use else None)
    assert loss.ndim == 0 and loss.item() == pytest.approx(total, rel=1e-9)
    torch.testing.assert_close(grad.flatten(), torch.tensor(expected, dtype=torch.float64))
    if not use:
        assert ppo_value_error(
            ppo_value_data(V, None, R, w), clip, False).item() == pytest.approx(total, rel=1e-9)


@given(seed=SEEDS, shape=SHAPES, kind=WEIGHTS, clip=CLIPS, use=st.booleans(), dual=DUALS,
       kl_type=KINDS)
def test_the_combined_functions_are_their_parts(seed, shape, kind, clip, use, dual, kl_type):
    z, z_old, z_ref, action, adv = discrete_case(seed, shape, 4)
    V, V_old, R = (normal(seed + k, shape) for k in (6, 7, 8))
    w = weights(seed + 9, shape, kind)
    value = ppo_value_error(ppo_value_data(V, V_old, R, w), clip, use)
    loss, info = ppo_error(
        ppo_data(z, z_old, action, V, V_old, adv, R, w, z_ref), clip, use, dual, kl_type)
    policy, expected = ppo_policy_error(
        ppo_policy_data(z, z_old, action, adv, w, z_ref), clip, dual, True, kl_type)
    assert isinstance(loss, ppo_loss)
    assert loss == (policy.policy_loss, value, policy.entropy_loss, policy.kl_div)
    assert info == expected
    new, old, ref = (z, z_old.exp()), dict(mu=z_old, sigma=z.exp()), (z_ref, z.exp())
    loss, info = ppo_error_continuous(ppo_data_continuous((z, z.exp()), old, z_ref, V, V_old, adv,
                                                          R, w, ref), clip, use, dual, kl_type)
    policy, expected = ppo_policy_error_continuous(
        ppo_policy_data_continuous((z, z.exp()), old, z_ref, adv, w, ref), clip, dual, kl_type)
    assert isinstance(loss, ppo_loss)
    assert loss == (policy.policy_loss, value, policy.entropy_loss, policy.kl_div)
    assert info == expected


def test_names_order_and_defaults_are_those_of_the_seed():
    assert ppo_data._fields == ("logit_new", "logit_old", "action", "value_new", "value_old", "adv",
                                "return_", "weight", "logit_pretrained")
    assert ppo_data_continuous._fields == ("mu_sigma_new", "mu_sigma_old", *ppo_data._fields[2:])
    assert ppo_policy_data._fields == (
        "logit_new", "logit_old", "action", "adv", "weight", "logit_pretrained")
    assert ppo_policy_data_continuous._fields == (
        "mu_sigma_new", "mu_sigma_old", *ppo_policy_data._fields[2:])
    assert ppo_value_data._fields == ("value_new", "value_old", "return_", "weight")
    assert not ppo_value_data._field_defaults
    for data in (ppo_data, ppo_data_continuous, ppo_policy_data, ppo_policy_data_continuous):
        assert data._field_defaults == {"logit_pretrained": None}
    assert ppo_loss._fields == ("policy_loss", "value_loss", "entropy_loss", "kl_div")
    assert ppo_policy_loss._fields == ("policy_loss", "entropy_loss", "kl_div")
    assert ppo_info._fields == ("approx_kl", "clipfrac")
    z, z_old, z_ref, action, adv = discrete_case(0, (MAX,), 4, scale=2.0)
    V, V_old, R = (normal(k, (MAX,)) for k in (6, 7, 8))
    w = weights(9, (MAX,), "both")
    fields, gauss = (action, V, V_old, adv, R, w), (z_ref, V, V_old, adv, R, w)
    assert ppo_error(ppo_data(z, z_old, *fields, z_ref)) == ppo_error(
        ppo_data(z, z_old, *fields, z_ref), 0.2, True, None, "k1")
    policy = ppo_policy_data(z, z_old, action, adv, w, z_ref)
    assert ppo_policy_error(policy) == ppo_policy_error(
        policy, clip_ratio=0.2, dual_clip=None, entropy_bonus=True, kl_type="k1")
    pair = dict(mu=z, sigma=z.exp()), dict(mu=z_old, sigma=z.exp())
    data = ppo_data_continuous(*pair, *gauss, pair[1])
    assert ppo_error_continuous(data) == ppo_error_continuous(data, 0.2, True, None, "k1")
    data = ppo_policy_data_continuous(*pair, z_ref, adv, w, pair[1])
    assert ppo_policy_error_continuous(data) == ppo_policy_error_continuous(data, 0.2, None, "k1")
    data = ppo_value_data(V, V_old, R, w)
    assert ppo_value_error(data) == ppo_value_error(data, 0.2, True) != ppo_value_error(
        data, 0.2, False)


def test_shape_fn():
    data = ppo_data(*[torch.zeros(3, 4)] * 2, *[None] * 6)
    assert shape_fn_ppo((data, 0.2), {}) == shape_fn_ppo((), {"data": data}) == shape_fn_ppo(
        (tuple(data),), {}) == shape_fn_ppo([data], {}) == (3, 4)
    policy = ppo_policy_data(*data[:2], *[None] * 3)
    assert shape_fn_ppo((policy,), {}) == shape_fn_ppo((tuple(policy),), {}) == (3, 4)


def test_any_tuple_with_the_fields_in_their_order_will_do():
    z, z_old, _, action, adv = discrete_case(0, (3,), 4)
    theirs = namedtuple("ppo_policy_data", "logit_new logit_old action adv weight")(
        z, z_old, action, adv, None)
    assert (ppo_policy_error(theirs)
            == ppo_policy_error(ppo_policy_data(z, z_old, action, adv, None))
            == ppo_policy_error((z, z_old, action, adv, None, None)))


def test_by_hand():
    rows = lambda p: torch.tensor([[x, 1 - x] for x in p]).log()
    old, new, first = (rows([0.4, 0.4, 0.5]), rows([0.6, 0.2, 0.55]),
                       torch.zeros(3, dtype=torch.long))
    adv, w = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([1.0, 0.0, 3.0])
    loss, info = ppo_policy_error(ppo_policy_data(new, old, first, adv, None, old))
    assert loss.policy_loss.item() == pytest.approx(-2.6 / 3)
    assert info.clipfrac == pytest.approx(2 / 3)
    assert info.approx_kl == pytest.approx(-math.log(1.5 * 0.5 * 1.1) / 3, rel=1e-5)
    assert loss.kl_div.item() == pytest.approx(-info.approx_kl, rel=1e-5)
    assert ppo_policy_error(
        ppo_policy_data(new, old, first, adv, w))[0].policy_loss.item() == pytest.approx(-7.8 / 3)
    assert (ppo_policy_error(ppo_policy_data(old, old, first, adv, None))[0].entropy_loss.item()
            == pytest.approx((2 * (-0.4 * math.log(0.4) - 0.6 * math.log(0.6)) + math.log(2)) / 3))


@pytest.mark.parametrize("adv, dual, objective, slope", [(2.0, 3.0, 2.4, 0.0),
                                                         (-2.0, 3.0, -6.0, 0.0),
                                                         (-2.0, None, -10.0, -2.0),
                                                         (-2.0, 6.0, -10.0, -2.0),
                                                         (2.0, None, 2.4, 0.0)])
def test_the_dual_clip_minds_the_sign_of_the_advantage(adv, dual, objective, slope):
    old = torch.tensor([[0.1, 0.9]], dtype=torch.float64).log()
    new, action, A = (torch.tensor([[0.5, 0.5]], dtype=torch.float64).log(), torch.tensor([0]),
                      torch.tensor([adv], dtype=torch.float64))
    loss, (grad,) = value_and_grad(
        lambda z: ppo_policy_error(ppo_policy_data(z, old, action, A, None),
                                   dual_clip=dual)[0].policy_loss, new)
    assert loss.item() == pytest.approx(-objective)
    torch.testing.assert_close(grad, -slope * 5 * torch.tensor([[0.5, -0.5]], dtype=torch.float64))
    one = torch.ones(1, 1, dtype=torch.float64)  # N(m, 1) against N(0, 1) at m: ratio exp(m^2 / 2)
    mu = (2 * torch.tensor([[5.0]], dtype=torch.float64).log()).sqrt()
    loss, (grad,) = value_and_grad(
        lambda m: ppo_policy_error_continuous(ppo_policy_data_continuous((m, one), (0 * one, one),
                                                                         mu, A, None),
                                              dual_clip=dual)[0].policy_loss, mu - 1e-9)
    assert loss.item() == pytest.approx(-objective)
    assert grad.item() == pytest.approx(-slope * 5 * 1e-9, abs=1e-12)
    loss, (grad,) = value_and_grad(
        lambda m: ppo_policy_error_continuous(ppo_policy_data_continuous((m, one), (0 * one, one),
                                                                         one, A, None),
                                              dual_clip=dual)[0].policy_loss, 0.1 * one)
    # inside of the range every sample teaches
    assert grad.item() == pytest.approx(-adv * math.exp(0.095) * 0.9)


@given(seed=SEEDS)
def test_the_old_policy_and_the_reference_are_constants(seed):
    z, z_old, z_ref, action, adv = discrete_case(seed, (5,), 3)
    leaves = [t.requires_grad_(True) for t in (z, z_old, z_ref, adv)]
    loss, _ = ppo_policy_error(ppo_policy_data(z, z_old, action, adv, None, z_ref), kl_type="k3")
    for got in torch.autograd.grad(sum(loss), leaves, allow_unused=True)[1:3]:
        assert got is None or (got == 0).all()
    attached, _ = ppo_policy_error(ppo_policy_data(z, z + 0.1 * z.sin(), action, adv, None))
    detached, _ = ppo_policy_error(
        ppo_policy_data(z, (z + 0.1 * z.sin()).detach(), action, adv, None))
    assert torch.equal(torch.autograd.grad(attached.policy_loss, z)[0],
                       torch.autograd.grad(detached.policy_loss, z)[0])
    mu = [normal(seed + k, (5, 2)).requires_grad_(True) for k in range(3)]
    s = [t.detach().exp().requires_grad_(True) for t in mu]
    loss, _ = ppo_policy_error_continuous(
        ppo_policy_data_continuous(*zip(mu[:2], s[:2]), normal(seed, (5, 2)), adv.detach(), None,
                                   (mu[2], s[2])), kl_type="k2")
    for got in torch.autograd.grad(sum(loss), [*mu[1:], *s[1:]], allow_unused=True):
        assert got is None or (got == 0).all()
    V, V_old, R = [normal(seed + k, (5,)).requires_grad_(True) for k in range(3)]
    for got in torch.autograd.grad(
        ppo_value_error(ppo_value_data(V, V_old, R, None)), (V_old, R), allow_unused=True):
        assert got is None or (got == 0).all()


@given(seed=SEEDS, scale=st.sampled_from([0.1, 7.0]), pad=st.integers(1, 5),
       kind=st.sampled_from(["mask", "both", "weight"]))
def test_the_mean_divides_by_the_number_of_elements(seed, scale, pad, kind):
    z, z_old, z_ref, action, adv = discrete_case(seed, (2, 4), 3)
    V, V_old, R = (normal(seed + k, (2, 4)) for k in (6, 7, 8))
    w = weights(seed + 9, (2, 4), kind)
    wide = lambda t: torch.cat(
        [t,
         torch.full((2, pad, *t.shape[2:]),
                    0 if not t.is_floating_point() else math.nan).to(t.dtype)], 1)
    data = ppo_data(z, z_old, action, V, V_old, adv, R, w, z_ref)
    padded = ppo_data(*map(wide, data))._replace(weight=torch.cat([w, torch.zeros(2, pad)], 1))
    (base, info), (heavy, same), (long, log) = (
        ppo_error(d) for d in (data, data._replace(weight=scale * w), padded))
    for k in range(3):
        torch.testing.assert_close(heavy[k], base[k] * scale)
        torch.testing.assert_close(long[k], base[k] * 4 / (4 + pad))
    torch.testing.assert_close(heavy.kl_div, base.kl_div)
    torch.testing.assert_close(long.kl_div, base.kl_div)
    assert same == info and log == pytest.approx(info)


def soil(t, m, junk):
    m = m if t.ndim == m.ndim else m[..., None]
    return torch.where(
        m, t, torch.tensor(-100 if not t.is_floating_point() else junk, dtype=t.dtype))


@given(seed=SEEDS, shape=st.sampled_from([(5,), (2, 3)]), junk=JUNK,
       kind=st.sampled_from(["mask", "boolean", "both", "nothing"]), dual=DUALS, kl_type=KINDS,
       joint=st.booleans())
def test_nothing_leaks_from_under_a_weight_of_zero(seed, shape, junk, kind, dual, kl_type, joint):
    parts = (2,) if joint else ()
    z, z_old, z_ref, action, adv = discrete_case(seed, (*shape, *parts), 3, adv_shape=shape)
    V, V_old, R = (normal(seed + k, shape) for k in (6, 7, 8))
    w = weights(seed + 9, shape, kind)
    m = w != 0
    deep = m[..., None].expand(*shape, 2) if joint else m

    def run(tensors, continuous):
        z, z_old, z_ref, action, adv, V, V_old, R = tensors
        if continuous:
            leaves = [z.clone().requires_grad_(True), z_ref.exp().requires_grad_(True),
                      V.clone().requires_grad_(True)]
            loss, info = ppo_error_continuous(
                ppo_data_continuous((leaves[0], leaves[1]), (z_old, z.exp()), z_ref, leaves[2],
                                    V_old, adv, R, w, (z_ref, z_old.exp())), 0.2, True, dual,
                kl_type)
        else:
            leaves = [z.clone().requires_grad_(True), V.clone().requires_grad_(True)]
            loss, info = ppo_error(ppo_data(leaves[0], z_old, action, leaves[1], V_old, adv, R, w,
                                            z_ref), 0.2, True, dual, kl_type)
        return loss, info, torch.autograd.grad(sum(loss), leaves)

    clean = (z, z_old, z_ref, action, adv, V, V_old, R)
    dirty = [soil(t, deep, junk) for t in clean[:4]] + [soil(t, m, junk) for t in clean[4:]]
    for continuous in (False, True):
        loss, info, grads = run(dirty, continuous)
        expected, log, slopes = run(clean, continuous)
        assert all(torch.equal(a, b) and a.isfinite() for a, b in zip(loss, expected))
        assert info == log
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(grads, slopes))
        if not m.any():
            assert all(x == 0 for x in loss)
            assert info == (0, 0)
            assert all((g == 0).all() for g in grads)


def test_a_nan_that_counts_is_seen():
    z, z_old, _, action, adv = discrete_case(0, (3,), 4)
    adv[1] = math.nan
    assert ppo_policy_error(
        ppo_policy_data(z, z_old, action, adv, torch.ones(3)))[0].policy_loss.isnan()
    z[1, 2] = math.nan
    assert ppo_policy_error(
        ppo_policy_data(z, z_old, action, torch.ones(3), torch.ones(3)))[0].entropy_loss.isnan()


@given(size=st.sampled_from([100.0, 1000.0, 1e6]), sign=st.sampled_from([1, -1]),
       a=st.sampled_from([2.0, -2.0]), dual=DUALS, kl_type=KINDS,
       dtype=st.sampled_from([torch.float32, torch.float64]))
def test_no_log_ratio_is_too_large(size, sign, a, dual, kl_type, dtype):
    A, action = torch.tensor([a], dtype=dtype), torch.tensor([0])
    z, z_old = (torch.tensor([[0.0, 0.0]], dtype=dtype),
                torch.tensor([[-sign * size, 0.0]], dtype=dtype))
    if sign < 0:
        z, z_old = torch.tensor([[-size, 0.0]], dtype=dtype), torch.zeros(1, 2, dtype=dtype)
    leaf = z.clone().requires_grad_(True)
    loss, info = ppo_policy_error(
        ppo_policy_data(leaf, z_old, action, A, None, z_old), dual_clip=dual, kl_type=kl_type)
    grad, = torch.autograd.grad(loss.policy_loss, leaf, retain_graph=True)
    stopped = sign * a > 0 or (dual is not None and a < 0)
    assert loss.policy_loss.isfinite()
    assert grad.isfinite().all()
    assert loss.entropy_loss.isfinite()
    assert (not stopped or (grad == 0).all())
    assert torch.autograd.grad(loss.entropy_loss, leaf, retain_graph=True)[0].isfinite().all()
    assert info.clipfrac == 1 and info.approx_kl == pytest.approx(-sign * size, rel=1e-2)
    if kl_type != "k2":
        assert loss.kl_div.isfinite() and torch.autograd.grad(loss.kl_div, leaf)[0].isfinite().all()


@given(seed=SEEDS, dtype=DTYPES)
def test_computes_in_float32_or_better(seed, dtype):
    z, z_old, z_ref, action, adv = (
        t.to(dtype) if t.is_floating_point() else t for t in discrete_case(seed, (4,), 3))
    V, V_old, R = (normal(seed + k, (4,), dtype) for k in (6, 7, 8))
    w = weights(seed + 9, (4,), "weight").to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    up = lambda t: t.to(wide) if t.is_floating_point() else t
    def near(loss, info, expected, log):  # half precision may take another way to the same digits
        for x, y in zip(loss, expected): torch.testing.assert_close(x, y)
        assert all(x.dtype == wide for x in loss)
        assert [*info] == pytest.approx([*log], rel=1e-5, abs=1e-6)

    loss, info = ppo_error(ppo_data(z, z_old, action, V, V_old, adv, R, w, z_ref), dual_clip=3.0)
    expected, log = ppo_error(
        ppo_data(*map(up, (z, z_old, action, V, V_old, adv, R, w, z_ref))), dual_clip=3.0)
    near(loss, info, expected, log)
    sigma = adv.abs().clamp(0.1)[:, None].expand(4, 3)
    loss, info = ppo_policy_error_continuous(
        ppo_policy_data_continuous((z, sigma), (z_old, sigma), z_ref, adv, w))
    expected, log = ppo_policy_error_continuous(
        ppo_policy_data_continuous((up(z), up(sigma)), (up(z_old), up(sigma)), up(z_ref), up(adv),
                                   up(w)))
    near(loss, info, expected, log)


def test_numbers_in_the_log_are_floats_that_hold_no_graph():
    z, z_old, _, action, adv = discrete_case(0, (3,), 4)
    _, info = ppo_policy_error(ppo_policy_data(z.requires_grad_(True), z_old, action, adv, None))
    assert all(type(x) is float for x in info)
    with pytest.raises(RuntimeError, match="item"):
        torch.func.vmap(
            lambda z: ppo_policy_error(ppo_policy_data(z, z_old, action, adv,
                                                       None))[0].policy_loss)(z.detach()[None])


D = ppo_policy_data(
    torch.randn(4, 3), torch.randn(4, 3), torch.zeros(4, dtype=torch.long), torch.ones(4), None)
G = ppo_policy_data_continuous(
    dict(mu=torch.randn(4, 2), sigma=torch.ones(4, 2)),
    dict(mu=torch.randn(4, 2), sigma=torch.ones(4, 2)), torch.randn(4, 2), torch.ones(4), None)
V = ppo_value_data(torch.ones(4), torch.ones(4), torch.ones(4), None)


def whole(kind, policy):
    return kind(*policy[:3], V.value_new, V.value_old, policy.adv, V.return_, None)


def test_data_of_the_other_kind_are_refused():
    for f, data in ((ppo_policy_error, G), (ppo_error, whole(ppo_data_continuous, G))):
        with pytest.raises(TypeError, match="logit_new must be a torch.Tensor, got dict"): f(data)
    for f, data in ((ppo_policy_error_continuous, D), (ppo_error_continuous, whole(ppo_data, D))):
        with pytest.raises(
            TypeError,
            match="mu_sigma_new must be a dict with mu and sigma, or the pair of them, got Tensor"):
            f(data)


@pytest.mark.parametrize("call, error, words", [
    (lambda: ppo_policy_error(D._replace(logit_old=D.logit_old[:, :2])), ValueError,
     r"^logit_old must have the shape of logit_new, \(4, 3\), got \(4, 2\)"),
    (lambda: ppo_policy_error(D._replace(logit_pretrained=D.logit_old[:2])), ValueError,
     "^logit_pretrained must have the shape of logit_new"),
    (lambda: ppo_policy_error(D._replace(action=D.action[:, None])), ValueError,
     r"^action must have .*\(4, 1\)|^adv must have"),
    (lambda: ppo_policy_error(D._replace(action=D.adv)), TypeError,
     "^action must have an integer dtype"),
    *[(lambda a=a: ppo_policy_error(D._replace(action=torch.tensor([0, 1, 2, a]))), ValueError,
       "^action must be between 0 and 2") for a in (3, -1)],
    *[(lambda adv=adv: ppo_policy_error(D._replace(adv=adv)), ValueError,
       r"^adv must have the shape of the actions, \(4,\), or of their rows, got")
      for adv in (D.adv[:, None], D.adv[0])],
    (lambda: ppo_policy_error(D._replace(adv=1.0)), TypeError,
     "^adv must be a torch.Tensor, got float"),
    (lambda: ppo_policy_error(D._replace(adv=D.action)), TypeError,
     "^adv must have a floating-point dtype"),
    (lambda: ppo_policy_error(D._replace(weight=D.adv[:3])), ValueError,
     r"^weight must have the shape of adv, \(4,\), got \(3,\)"),
    (lambda: ppo_policy_error(D._replace(weight=1.0)), TypeError,
     "^weight must be a torch.Tensor, got float"),
    (lambda: ppo_policy_error(D._replace(logit_new=D.logit_new.long())), TypeError,
     "^logit_new must have a floating-point dtype"),
    *[(lambda f=f, d=d: f(d._replace(weight=torch.ones(4) + 2j)), TypeError,
       "^weight must be real, got torch.complex64")
      for f, d in ((ppo_policy_error, D), (ppo_policy_error_continuous, G), (ppo_value_error, V))],
    *[(lambda flag=flag: ppo_policy_error(D, entropy_bonus=flag), TypeError,
       f"^entropy_bonus must be True or False, got {flag!r}") for flag in ("no", 0, None)],
    *[(lambda flag=flag: ppo_value_error(V, use_value_clip=flag), TypeError,
       f"^use_value_clip must be True or False, got {flag!r}") for flag in ("no", 0, None)],
    (lambda: ppo_policy_error([*D]), TypeError,
     "data must be a ppo_policy_data with the fields .*, got list"),
    (lambda: ppo_policy_error(V), TypeError,
     "data must be a ppo_policy_data with the fields logit_new, logit_old, "
     "action, adv, weight, logit_pretrained, got 4 fields"),
    (lambda: ppo_error(D), TypeError, "data must be a ppo_data with the fields .*, got 6 fields"),
    (lambda: ppo_error_continuous(G), TypeError,
     "data must be a ppo_data_continuous with the fields .*, got 6 fields"),
    (lambda: ppo_error(ppo_data(D.logit_new, D.logit_old, D.action, V.value_new, V.value_old[:2],
                                D.adv, V.return_, None)), ValueError,
     "value_old must have the shape of value_new"),
    *[(lambda c=c, f=f, d=d: f(d, dual_clip=c), ValueError, r"dual_clip must be in \(1, inf\), got")
      for c in (1, -3.0) for f, d in ((ppo_policy_error, D), (ppo_policy_error_continuous, G))],
    *[(lambda c=c, f=f, d=d: f(d, clip_ratio=c), ValueError, r"clip_ratio must be in \(0, 1\], got")
      for c in (0, 1.5) for f, d in ((ppo_policy_error, D), (ppo_policy_error_continuous, G))],
    *[(lambda f=f, d=d: f(d, kl_type="k4"), ValueError,
       "kl_type must be one of 'k1', 'k2', 'k3', got 'k4'")
      for f, d in ((ppo_policy_error, D), (ppo_policy_error_continuous, G))],
    (lambda: ppo_policy_error_continuous(G._replace(mu_sigma_new=dict(mu=G.action))), TypeError,
     "mu_sigma_new must be a dict with mu and sigma"),
    (lambda: ppo_policy_error_continuous(G._replace(mu_sigma_old=None)), TypeError,
     "mu_sigma_old must be a dict with mu and sigma, or the pair of them, " "got NoneType"),
    (lambda: ppo_policy_error_continuous(G._replace(mu_sigma_old=(G.action, G.action[:1]))),
     ValueError, r"sigma must have .*got \(1, 2\)"),
    (lambda: ppo_policy_error_continuous(G._replace(mu_sigma_old=(G.action[:2], G.action[:2]))),
     ValueError, "must have"),
    (lambda: ppo_policy_error_continuous(G._replace(action=torch.zeros(4, dtype=torch.long))),
     TypeError, "action must have a floating-point dtype"),
    (lambda: ppo_policy_error_continuous(G._replace(adv=G.action)), ValueError,
     "adv must have the shape of"),
    (lambda: ppo_policy_error_continuous(G._replace(weight=G.action)), ValueError,
     "weight must have the shape of adv"),
    (lambda: ppo_policy_error_continuous(G._replace(action=G.action[:, 0].numpy())), TypeError,
     "action must be a torch.Tensor, got ndarray"),
    (lambda: ppo_policy_error_continuous(G._replace(mu_sigma_new=np.zeros((2, 4)))), TypeError,
     "mu_sigma_new must be a"),
    (lambda: shape_fn_ppo((), {}), TypeError,
     "args must begin with data, or kwargs hold it: .*, got NoneType"),
    (lambda: shape_fn_ppo((torch.ones(2),), {}), TypeError,
     "args must begin with data, .*, got Tensor"),
    *[(lambda args=args: shape_fn_ppo(args, {}), TypeError, "args must begin with data")
      for args in (None, 5, [1], torch.ones(2))],
    (lambda: shape_fn_ppo((), torch.ones(2)), TypeError,
     "args must begin with data, or kwargs hold it"),
    (lambda: shape_fn_ppo((), None), TypeError, "args must begin with data, or kwargs hold it"),
    (lambda: ppo_policy_error_continuous(G._replace(mu_sigma_new=torch.ones(2, 4, 2))), TypeError,
     "mu_sigma_new must be a dict with mu and sigma, or the pair of them, " "got Tensor"),
    (lambda: ppo_policy_error_continuous(G._replace(logit_pretrained=torch.ones(2))), TypeError,
     "logit_pretrained must be a dict with mu and sigma"),
    (lambda: ppo_value_error(V._replace(return_=torch.ones(3))), ValueError,
     r"return_ must have the shape of value_new, \(4,\), got \(3,\)"),
    (lambda: ppo_value_error(V._replace(weight=torch.ones(3))), ValueError,
     r"weight must have the shape of value_new, \(4,\), got \(3,\)"),
    (lambda: ppo_value_error(V._replace(value_old=None)), ValueError, "value_old must be given"),
    (lambda: ppo_value_error(V, clip_ratio=0), ValueError,
     r"clip_ratio must be in \(0, inf\), got 0"),
    (lambda: ppo_value_error(torch.ones(4)), TypeError,
     "data must be a ppo_value_data .*, got Tensor"),
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words): call()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_no_nan_arises_on_the_way_back_from_an_advantage_without_weight():
    z, z_old, _, action, _ = discrete_case(0, (2,), 3)
    adv, w = torch.tensor([1.0, math.nan], dtype=torch.float64), torch.tensor([1.0, 0.0])
    sigma, keep = torch.ones(2, 3, dtype=torch.float64), w != 0
    def discrete_loss(z):
        return ppo_policy_error(ppo_policy_data(z, z_old, action, adv, w))[0].policy_loss
    def continuous_loss(z):
        return ppo_policy_error_continuous(
            ppo_policy_data_continuous((z, sigma), (z_old, sigma), z_old, adv, w))[0].policy_loss
    def parts_loss(z):
        return ppo_policy_error(
            ppo_policy_data(z[:, None], z_old[:, None], action[:, None], adv, w))[0].policy_loss
    with torch.autograd.detect_anomaly():  # raises where a backward function returns NaN
        for f in (discrete_loss, continuous_loss, parts_loss):
            assert value_and_grad(f, z)[1][0].isfinite().all()


# GRPO and RLOO

F64 = torch.float64


def clip(x, low, high): return min(max(x, low), high)
def free(x, A, low, high): return x <= high if A > 0 else x >= low


def close(got, expected, **kw):
    torch.testing.assert_close(
        got, torch.as_tensor(expected, dtype=got.dtype), **({"rtol": 1e-9, "atol": 1e-12} | kw))


METHODS = (naive_method, less_efficient_method, efficient_method, selective_log_softmax)


def logits_batch(seed, B=4, S=5, V=3, dtype=F64):
    z = [normal(seed + k, (B, S, V), dtype) for k in range(3)]
    action = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(seed))
    return (z, action, normal(seed + 3, (B,), dtype),
            torch.rand(B, S, generator=torch.Generator().manual_seed(seed + 4), dtype=F64)
            * random_mask(seed + 5, (B, S), 0.6))


def log_softmax_of(z, action):
    "log pi of the actions, and d log pi / d logits, by loops."
    logp, slope = [], torch.zeros(z.shape, dtype=F64)
    for i, rows in enumerate(z.tolist()):
        logp.append([])
        for t, row in enumerate(rows):
            top = max(row)
            total = math.fsum(math.exp(x - top) for x in row)
            logp[-1].append(row[action[i, t]] - top - math.log(total))
            for v, x in enumerate(row):
                slope[i, t, v] = (v == action[i, t].item()) - math.exp(x - top) / total
    return logp, slope


def group_oracle(new, old, ref, adv, weight, eps, beta):
    """Loss and its slope in each log-probability: weighted mean in each answer, mean over the
    answers with weight; approx_kl and clipfrac over what has weight.
    """
    answers = [i for i, row in enumerate(weight) if sum(row) > 0]
    loss, slope, kls, outside = 0.0, torch.zeros(len(new), len(new[0]), dtype=F64), [], []
    for i in answers:
        for t, w in enumerate(weight[i]):
            if w == 0: continue
            c = w / sum(weight[i]) / len(answers)
            r = math.exp(new[i][t] - old[i][t])
            q = math.exp(ref[i][t] - new[i][t]) if ref else 1.0
            loss += c * (
                -min(r * adv[i], clip(r, 1 - eps, 1 + eps) * adv[i]) + beta * (q - 1 - math.log(q)))
            slope[i, t] = c * (-r * adv[i] * free(r, adv[i], 1 - eps, 1 + eps) + beta * (1 - q))
            kls.append(old[i][t] - new[i][t])
            outside.append(r < 1 - eps or r > 1 + eps)
    n = max(len(kls), 1)
    return loss, slope, math.fsum(kls) / n, sum(outside) / n


@given(seed=SEEDS, method=st.sampled_from(METHODS), eps=st.sampled_from([0.1, 0.2, 1.0]),
       beta=st.sampled_from([0.0, 0.1, 1.0]), weighted=st.booleans())
def test_grpo_is_the_plain_formula(seed, method, eps, beta, weighted):
    (z, z_old, z_ref), action, adv, weight = logits_batch(seed)
    (new, d), (old, _), (ref, _) = (log_softmax_of(x, action) for x in (z, z_old, z_ref))
    w = weight if weighted else torch.ones_like(weight)
    loss, slope, kl, outside = group_oracle(new, old, ref, adv.tolist(), w.tolist(), eps, beta)
    out, (grad, *others) = value_and_grad(
        lambda *x: grpo_policy_error(grpo_policy_data(*x, action, adv,
                                                      weight if weighted else None), method, eps,
                                     beta)[0], z, z_old, z_ref)
    close(out, loss)
    close(grad, slope[..., None] * d)
    assert others == [None, None]
    _, info = grpo_policy_error(grpo_policy_data(z, z_old, z_ref, action, adv,
                                                 weight if weighted else None), method, eps, beta)
    assert type(info) is grpo_info
    assert type(info.approx_kl) is float
    assert type(info.clipfrac) is float
    assert info.approx_kl == pytest.approx(kl, abs=1e-9)
    assert info.clipfrac == pytest.approx(outside, abs=1e-6)


@given(seed=SEEDS, method=st.sampled_from(METHODS), eps=st.sampled_from([0.1, 0.2]),
       prompts=st.sampled_from([1, 2, 3]), flat=st.booleans())
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
    data = lambda x: rloo_policy_data(
        x, z_old, action, reward if flat else reward.reshape(K, prompts), weight)
    out, (grad,) = value_and_grad(lambda x: rloo_policy_error(data(x), method, eps)[0], z)
    close(out, loss)
    close(grad, slope[..., None] * d)
    info = rloo_policy_error(data(z), method, eps)[1]
    assert type(info) is rloo_info
    assert info.approx_kl == pytest.approx(kl, abs=1e-9)
    assert info.clipfrac == pytest.approx(outside, abs=1e-6)


def test_rloo_order_by_hand():
    z, action = torch.zeros(4, 1, 2, dtype=F64), torch.zeros(4, 1, dtype=torch.long)
    slopes = lambda reward: (
        -8
        * value_and_grad(lambda x: rloo_policy_error(rloo_policy_data(x, z, action, reward,
                                                                      None))[0],
                         z)[1][0][:, 0, 0]).tolist()
    # first answers to two prompts, then second answers
    assert slopes(torch.tensor([[10.0, 0.0], [11.0, 1.0]])) == [-1, -1, 1, 1]
    assert slopes(torch.tensor([10.0, 0.0, 11.0, 1.0])) == pytest.approx([6, -22 / 3, 22 / 3, -6])


def test_the_documented_call_runs():
    (z, z_old, z_ref), action, adv, _ = logits_batch(0, 4, 8, 5, torch.float32)
    loss, info = grpo_policy_error(
        grpo_policy_data(logit_new=z, logit_old=z_old, logit_ref=z_ref, action=action, adv=adv,
                         weight=torch.ones(4, 8)))
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert info._fields == ("approx_kl", "clipfrac")
    assert grpo_policy_data._fields == (
        "logit_new", "logit_old", "logit_ref", "action", "adv", "weight")
    assert loss == grpo_policy_error(
        grpo_policy_data(z, z_old, z_ref, action, adv, None), efficient_method, 0.2, 0.1)[0]
    loss, info = rloo_policy_error(
        rloo_policy_data(logit_new=z, logit_old=z_old, action=action, reward=adv, weight=None))
    assert loss == rloo_policy_error(
        rloo_policy_data(z, z_old, action, adv, None), efficient_method, 0.2)[0]
    assert info._fields == ("approx_kl", "clipfrac")
    assert rloo_policy_data._fields == ("logit_new", "logit_old", "action", "reward", "weight")


def test_grpo_is_policy_loss_on_the_log_probabilities():
    (z, z_old, z_ref), action, adv, weight = logits_batch(5)
    logp, old, ref = (
        torch.tensor(log_softmax_of(x, action)[0], dtype=F64) for x in (z, z_old, z_ref))
    m = weight > 0
    close(grpo_policy_error(grpo_policy_data(z, z_old, z_ref, action, adv, m.double()))[0],
          policy_loss(logp, old, adv, m, "grpo", ref, beta=0.1)[0].item())


@given(seed=SEEDS, junk=JUNK, method=st.sampled_from(METHODS), dtype=DTYPES,
       empty=st.sampled_from([0, 2, 4]))
def test_what_has_no_weight_does_not_leak(seed, junk, method, dtype, empty):
    z, action, adv, weight = logits_batch(seed, dtype=dtype)
    weight[:empty] = 0
    counts = weight > 0
    put = lambda x: torch.where(counts[..., None], x, torch.tensor(junk).to(dtype))
    dirty_action, dirty_adv = (torch.where(counts, action, -100),
                               torch.where(counts.any(1), adv, torch.tensor(junk).to(dtype)))
    grpo = (lambda x, a, adv, *rest: grpo_policy_error(grpo_policy_data(x, *rest, a, adv, weight),
                                                       method))
    clean = value_and_grad(lambda x: grpo(x, action, adv, z[1], z[2])[0], z[0])
    dirty = value_and_grad(
        lambda x: grpo(x, dirty_action, dirty_adv, put(z[1]), put(z[2]))[0], put(z[0]))
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1][0], dirty[1][0])
    assert clean[0].isfinite()
    assert (dirty[1][0][~counts] == 0).all()
    assert (grpo(put(z[0]), dirty_action, dirty_adv, put(z[1]), put(z[2]))[1]
            == grpo(z[0], action, adv, z[1], z[2])[1])
    rloo = lambda x, a, old: rloo_policy_error(rloo_policy_data(x, old, a, adv, weight), method)[0]
    clean, dirty = (value_and_grad(lambda x: rloo(x, action, z[1]), z[0]),
                    value_and_grad(lambda x: rloo(x, dirty_action, put(z[1])), put(z[0])))
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1][0], dirty[1][0])
    if empty == 4: assert clean[0] == 0 and (clean[1][0] == 0).all()


def test_no_nan_on_the_way_back_from_an_empty_answer():
    (z, z_old, z_ref), action, adv, weight = logits_batch(2)
    weight[1] = 0
    with torch.autograd.set_detect_anomaly(True):
        value_and_grad(lambda x: grpo_policy_error(grpo_policy_data(x, z_old, z_ref, action, adv,
                                                                    weight))[0], z)


@pytest.mark.parametrize("size", [100.0, 1000.0, 1e6])
def test_no_logit_is_too_large_for_the_interfaces(size):
    z, action = (torch.tensor([[[size, 0.0], [0.0, size]], [[size, 0.0], [0.0, size]]]),
                 torch.zeros(2, 2, dtype=torch.long))
    for adv in (torch.tensor([1.0, -1.0]), torch.tensor([-1.0, 1.0])):
        for new, old in ((z, -z), (-z, z)):
            loss, (grad,) = value_and_grad(
                lambda x: grpo_policy_error(grpo_policy_data(x, old, old, action, adv, None))[0],
                new)
            assert loss.isfinite() and grad.isfinite().all()
            loss, (grad,) = value_and_grad(
                lambda x: rloo_policy_error(rloo_policy_data(x, old, action, adv, None))[0], new)
            assert loss.isfinite() and grad.isfinite().all()


Z, ACTION, ADV = torch.zeros(4, 3, 2), torch.zeros(4, 3, dtype=torch.long), torch.ones(4)


@pytest.mark.parametrize("field, value, error, words", [
    ("logit_new", torch.zeros(4, 3), ValueError,
     r"logit_new must have the shape \(B, S, V\), got \(4, 3\)"),
    ("logit_old", torch.zeros(4, 3, 5), ValueError,
     r"logit_old must have the shape of logit_new, \(4, 3, 2\), got \(4, 3, 5\)"),
    ("logit_new", Z.long(), TypeError, "logit_new must have a floating-point dtype"),
    ("action", ACTION[:2], ValueError, "must have .*(B = 4|of the 2 responses)"),
    ("action", ACTION.float(), TypeError, "action must have an integer dtype"),
    ("weight", torch.ones(4), ValueError, "weight must have"),
    ("weight", 1.0, TypeError, "weight must be a torch.Tensor, got float"),
    ("action", ACTION + 2, ValueError, "^action must be between 0 and 1"),
    ("action", ACTION - 1, ValueError, "^action must be between 0 and 1"),
])
def test_bad_fields_are_named(field, value, error, words):
    with pytest.raises(error, match=words):
        grpo_policy_error(grpo_policy_data(Z, Z, Z, ACTION, ADV, None)._replace(**{field: value}))
    with pytest.raises(error, match=words):
        rloo_policy_error(rloo_policy_data(Z, Z, ACTION, ADV, None)._replace(**{field: value}))


@pytest.mark.parametrize("call, error, words", [
    (lambda: grpo_policy_error(grpo_policy_data(Z, Z, Z[..., :1], ACTION, ADV, None)), ValueError,
     "logit_ref must have the shape of logit_new"),
    (lambda: grpo_policy_error(grpo_policy_data(Z, Z, Z, ACTION, torch.ones(4, 3), None)),
     ValueError, r"adv must have the shape \(B\), got \(4, 3\)"),
    (lambda: grpo_policy_error(grpo_policy_data(Z, Z, Z, ACTION, torch.ones(4).long(), None)),
     TypeError, "adv must have a floating-point dtype"),
    (lambda: grpo_policy_error(grpo_policy_data(Z, Z, Z, ACTION, ADV, None), clip_ratio=0.0),
     ValueError, r"clip_ratio must be in \(0, 1\], got 0.0"),
    (lambda: grpo_policy_error(grpo_policy_data(Z, Z, Z, ACTION, ADV, None), beta=-1.0), ValueError,
     r"beta must be in \[0, inf\), got -1.0"),
    (lambda: grpo_policy_error((Z, Z)), TypeError,
     "data must be a grpo_policy_data with the fields logit_new, logit_old, "
     "logit_ref, action, adv, weight, got 2 fields"),
    (lambda: grpo_policy_error(None), TypeError,
     "data must be a grpo_policy_data .*, got NoneType"),
    (lambda: rloo_policy_error(rloo_policy_data(Z, Z, ACTION, torch.ones(3), None)), ValueError,
     r"reward must have one number for each of the 4 responses, .* got \(3,\)"),
    (lambda: rloo_policy_error(rloo_policy_data(Z, Z, ACTION, torch.ones(1, 4), None)), ValueError,
     r"with K >= 2, got \(1, 4\)"),
    (lambda: rloo_policy_error(rloo_policy_data(Z, Z, ACTION, torch.ones(2, 2, 1), None)),
     ValueError, r"reward must have .* got \(2, 2, 1\)"),
    (lambda: rloo_policy_error(rloo_policy_data(Z, Z, ACTION, [1.0] * 4, None)), TypeError,
     "reward must be a torch.Tensor, got list"),
    (lambda: rloo_policy_error(rloo_policy_data(Z, Z, None, ADV, None)), TypeError,
     "action must be a torch.Tensor, got NoneType"),
    (lambda: grpo_policy_error(grpo_policy_data(Z, Z, None, ACTION, ADV, None)), TypeError,
     "logit_ref must be a torch.Tensor, got NoneType"),
    (lambda: rloo_policy_error(rloo_policy_data(Z, Z, ACTION, ADV, None), clip_ratio=1.5),
     ValueError, "clip_ratio"),
    (lambda: grpo_policy_error(grpo_policy_data(Z, Z, Z, ACTION, ADV, None),
                               log_prob_fn="efficient"), TypeError,
     "^log_prob_fn must be a function of logits and index, got 'efficient'"),
    (lambda: rloo_policy_error(rloo_policy_data(Z, Z, ACTION, ADV, None), log_prob_fn=None),
     TypeError, "^log_prob_fn must be a function of logits and index, got None"),
])
def test_more_bad_data(call, error, words):
    with pytest.raises(error, match=words): call()


def test_no_nan_on_the_way_back_from_the_advantage_of_an_answer_without_weight():
    (z, z_old, z_ref), action, adv, weight = logits_batch(2)
    adv[1], weight[1] = math.nan, 0
    with torch.autograd.set_detect_anomaly(True):
        _, (grad,) = value_and_grad(
            lambda x: grpo_policy_error(grpo_policy_data(x, z_old, z_ref, action, adv, weight))[0],
            z)
    assert grad.isfinite().all()


def test_a_kl_that_weighs_nothing_adds_nothing():
    (z, z_old, z_ref), action, adv, weight = logits_batch(6)
    impossible = z_ref.scatter(-1, action.unsqueeze(-1), -math.inf)
    f = (lambda x, ref: grpo_policy_error(grpo_policy_data(x, z_old, ref, action, adv, weight),
                                          beta=0.0)[0])
    (loss, (grad,)), (same, (g,)) = (
        value_and_grad(lambda x: f(x, ref), z) for ref in (impossible, z_ref))
    assert torch.equal(loss, same) and torch.equal(grad, g) and loss.isfinite()


# The three ways to a log-probability, and the mean of the KL's estimates

@pytest.mark.parametrize("f", METHODS[:3])
@given(seed=SEEDS, dtype=DTYPES, shape=st.sampled_from([(3,), (2, 3)]))
def test_methods_are_the_log_softmax(f, seed, dtype, shape):
    z, i = normal(seed, (*shape, 5), dtype, scale=3.0), integers(seed, shape, 5)
    y, (grad,) = value_and_grad(lambda z: f(z, i), z)
    expected, (slope,) = value_and_grad(
        lambda z: z.log_softmax(-1).gather(-1, i[..., None])[..., 0], z.double())
    assert y.shape == i.shape
    assert y.dtype == (F64 if dtype == F64 else torch.float32)
    assert grad.dtype == dtype
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad.double(), slope, atol=1e-6, rtol=1e-2)
    for j in (i + 5, i - 100):
        with pytest.raises(ValueError, match="index must be between 0 and 4"): f(z, j)
    with pytest.raises(ValueError, match="index must have"): f(z, i[:1].expand(7, *i.shape[1:]))
    with pytest.raises(TypeError, match="index must have an integer dtype"): f(z, i.float())


@pytest.mark.parametrize("f", METHODS[:3])
def test_no_logit_is_too_large_for_the_methods(f):
    z = torch.tensor([[1e4 + 1, 1e4, -1e4]]).repeat(3, 1)
    torch.testing.assert_close(
        f(z, torch.tensor([0, 1, 2])), torch.tensor([1.0, 0.0, -2e4]) - math.log(1 + math.e),
        rtol=1e-6, atol=1e-6)


@given(seed=SEEDS, dtype=DTYPES, kind=KINDS)
def test_calculate_kl_div_is_the_mean(seed, dtype, kind):
    d = normal(seed, (4, 2), dtype)
    torch.testing.assert_close(
        calculate_kl_div(d, kind), kl_estimate(d, torch.zeros_like(d), kind).mean())
    with pytest.raises(ValueError, match="kl_type must be one of 'k1', 'k2', 'k3', got 'k4'"):
        calculate_kl_div(d, "k4")


@pytest.mark.parametrize("method", [naive_method, less_efficient_method, efficient_method])
def test_digits_of_one_token_above_a_large_vocabulary(method):
    logits = torch.zeros(1, 2, 151_936)
    logits[..., 0] = 16.7
    right = logits[0].double().log_softmax(-1)
    logp = method(logits, torch.tensor([[0, 5]]))[0]
    # the compiled loops add up in float32: log_softmax is off by 5e-4 here
    rtol, atol = (1.2e-7, 1e-6) if method is efficient_method else (6e-8, 1e-8)
    torch.testing.assert_close(
        logp.double(), torch.stack([right[0, 0], right[1, 5]]), rtol=rtol, atol=atol)
