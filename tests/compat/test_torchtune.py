import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, JUNK, SEEDS, normal, random_mask, value_and_grad

from rlhf_notes.compat.torchtune import PPOLoss

CLIPS = st.sampled_from([0.2, 0.05, 0.5, 1.0])
SHAPES = st.sampled_from([(4,), (1,), (2, 3), (2, 1), (2, 2, 3)])
P = [torch.ones(4)] * 6


def soil(t, m, junk): return torch.where(m, t, torch.tensor(junk, dtype=t.dtype))


def loop_torchtune(old, new, A, V_old, V, R, m, vm, eps, clip, coeff):
    "The five outputs and the gradients of the loss with respect to log-probabilities and values."
    n, k = max(sum(m), 1), max(sum(vm), 1)
    policy = value = mean = frac = 0.0
    dlogp, dV = [], []
    for o, l, a, c in zip(old, new, A, m):
        r = math.exp(l - o)
        stopped = (a > 0 and r > 1 + eps) or (a < 0 and r < 1 - eps)
        policy -= c * min(r * a, min(max(r, 1 - eps), 1 + eps) * a) / n
        mean += c * r / n
        frac += c * stopped / n
        dlogp.append(0.0 if stopped or not c else -a * r / n)
    for o, v, r, c in zip(V_old, V, R, vm):
        near = min(max(v, o - clip), o + clip)
        value += c * 0.5 * max((v - r) ** 2, (near - r) ** 2) / k
        dV.append(c * coeff * (v - r) / k * (abs(near - r) <= abs(v - r)))
    return [policy + coeff * value, policy, value, mean, frac], dlogp, dV


@given(seed=SEEDS, shape=SHAPES, eps=CLIPS, clip=st.sampled_from([0.1, 0.2, 2.0]),
       coeff=st.sampled_from([0.0, 0.1, 1.0]), masked=st.booleans(),
       keep=st.sampled_from([0.0, 0.5, 1.0]), junk=JUNK)
def test_torchtunes_loss_and_its_gradient_are_the_loops(
    seed, shape, eps, clip, coeff, masked, keep, junk):
    old, new, A = (normal(seed + k, shape, scale=s) for k, s in ((0, 0.3), (1, 0.3), (2, 1.0)))
    values = (2, *shape[1:])  # values may have a shape of their own
    V_old, V, R = (normal(seed + 3 + k, values) for k in range(3))
    m, vm = (random_mask(seed + 6, shape, keep),
             random_mask(seed + 7, values, keep)) if masked else (None, None)
    full = [torch.ones(s, dtype=torch.bool) for s in (shape, values)]
    outs, dlogp, dV = loop_torchtune(
        *(t.flatten().tolist() for t in (old, new, A, V_old, V, R, *((m, vm) if masked else full))),
        eps, clip, coeff)
    if masked:
        old, new, A, V_old, V, R = [soil(t, m, junk) for t in (old, new, A)] + [
            soil(t, vm, junk) for t in (V_old, V, R)]
    leaves = [t.clone().requires_grad_(True) for t in (new, V)]
    got = PPOLoss(eps, clip, coeff)(old, leaves[0], A, V_old, leaves[1], R, m, vm)
    assert [x.item() for x in got] == pytest.approx(outs, rel=1e-6, abs=1e-9)
    assert all(x.ndim == 0 for x in got)
    assert got[0].requires_grad and not any(x.requires_grad for x in got[1:])
    grads = torch.autograd.grad(got[0], leaves)
    for g, expected in zip(grads, (dlogp, dV)):
        torch.testing.assert_close(
            g.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_the_expectations_of_torchtunes_tests_set_right():
    before, one = torch.tensor([0.5, 0.8, 1.2]), torch.ones(3)
    for x, policy, ratio, frac in ((1.0, -1.2, math.e, 1), (-1.0, -math.exp(-1), math.exp(-1), 0),
                                   (0.1, -math.exp(0.1), math.exp(0.1), 0)):
        assert ([t.item() for t in PPOLoss(epsilon=0.2)(before, before + x, one, one, one, one)]
                == pytest.approx([policy, policy, 0, ratio, frac], rel=1e-6))


def test_torchtunes_loss_per_sample():
    old, new, A, V_old, V, R = (normal(k, (4, 5), scale=0.5) for k in range(6))
    m, vm = random_mask(6, (4, 5)), random_mask(7, (4, 5))
    f = lambda *t: PPOLoss(0.2)(*t)[0]
    torch.testing.assert_close(torch.func.vmap(f)(old, new, A, V_old, V, R, m, vm),
                               torch.stack([f(*t) for t in zip(old, new, A, V_old, V, R, m, vm)]))
    grads = torch.func.vmap(torch.func.grad(f, argnums=(1, 4)))(old, new, A, V_old, V, R, m, vm)
    for k in range(4):
        _, expected = value_and_grad(
            lambda l, v: f(old[k], l, A[k], V_old[k], v, R[k], m[k], vm[k]), new[k], V[k])
        torch.testing.assert_close((grads[0][k], grads[1][k]), expected)
    leaf = new.clone().requires_grad_(True)
    compiled = torch.compile(
        lambda l: PPOLoss(0.2)(old, l, A, V_old, V, R, m, vm), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close([t.detach() for t in compiled(leaf)],
                               [t.detach() for t in PPOLoss(0.2)(old, new, A, V_old, V, R, m, vm)])


@pytest.mark.parametrize("size", [100.0, -100.0, 1e6, -1e6])
@pytest.mark.parametrize("a", [2.0, -2.0])
def test_no_log_ratio_is_too_large(size, a):
    zero, one = torch.zeros(1), torch.ones(1)
    out, (grad,) = value_and_grad(
        lambda l: PPOLoss(0.2)(zero, l, a * one, one, one, one)[0], size * one)
    assert out.isfinite() and grad.isfinite() and (size * a < 0 or grad == 0)


@given(seed=SEEDS, dtype=DTYPES)
def test_computes_in_float32_or_better(seed, dtype):
    tensors = [normal(seed + k, (4,), dtype, scale=0.3) for k in range(6)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for x, y in zip(PPOLoss()(*tensors), PPOLoss()(*(t.to(wide) for t in tensors))):
        assert x.dtype in (wide, torch.float32) and torch.equal(x, y)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_no_nan_arises_on_the_way_back_from_padding():
    bad, keep = torch.tensor([1.0, math.nan]), torch.tensor([True, False])
    with torch.autograd.detect_anomaly():
        _, grads = value_and_grad(
            lambda l, v: PPOLoss()(bad, l, bad, bad, v, bad, keep, keep)[0], bad, bad)
    assert all(g.isfinite().all() for g in grads)


def test_defaults():
    loss = PPOLoss()
    assert (loss.epsilon, loss.value_clip_range, loss.value_coeff) == (0.1, 0.2, 0.1)


@pytest.mark.parametrize("call, error, words", [
    (lambda: PPOLoss(epsilon=0), ValueError, r"epsilon must be in \(0, 1\], got 0"),
    (lambda: PPOLoss(value_clip_range=-1), ValueError, "value_clip_range"),
    (lambda: PPOLoss(value_coeff=-0.1), ValueError, "value_coeff"),
    (lambda: PPOLoss()(*P[:5], torch.ones(3)), ValueError,
     r"returns must have the shape of phi_old_values, \(4,\), got \(3,\)"),
    (lambda: PPOLoss()(*P[:2], torch.ones(3), *P[:3]), ValueError,
     "advantages must have the shape of pi_old_logprobs"),
    (lambda: PPOLoss()(*P, torch.ones(4)), TypeError,
     r"padding_masks must be boolean \(True = counts\)"),
    (lambda: PPOLoss()(*P, torch.ones(3) > 0), ValueError,
     "padding_masks must have the shape of pi_old_logprobs"),
    (lambda: PPOLoss()(*P, None, torch.ones(3) > 0), ValueError,
     "value_padding_masks must have the shape of phi_old_values"),
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words): call()
