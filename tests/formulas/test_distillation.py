import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, JUNK, SEEDS, masked, normal, random_mask, shapes, value_and_grad

from rlhf_notes.formulas.distillation import (
    DISTILLATION_KINDS,
    distillation_advantage,
    distillation_loss,
    self_distillation_advantage,
)
from rlhf_notes.formulas.kl import exact_kl

F64, KINDS = torch.float64, st.sampled_from(DISTILLATION_KINDS)


def close(got, expected, **kw):
    expected = torch.as_tensor(expected, dtype=got.dtype)
    torch.testing.assert_close(got, expected, **({"rtol": 1e-9, "atol": 1e-12} | kw))


def softmax(row, temperature=1.0):
    weights = [math.exp(z / temperature) for z in row]
    return [w / sum(weights) for w in weights]


def kl(p, q): return sum(a * math.log(a / b) for a, b in zip(p, q))


def by_hand(student, teacher, kind, beta):
    if kind == "reverse": return kl(student, teacher)
    if kind == "forward": return kl(teacher, student)
    m = [beta * t + (1 - beta) * s for s, t in zip(student, teacher)]
    return beta * kl(teacher, m) + (1 - beta) * kl(student, m)


@given(seed=SEEDS, shape=shapes(1, 2), V=st.integers(1, 5), kind=KINDS, dtype=DTYPES,
       beta=st.sampled_from([0.1, 0.5, 0.9]), temperature=st.sampled_from([0.5, 1.0, 2.0]),
       keep=st.sampled_from([0.0, 0.5, 1.0]))
def test_loss_equals_the_loop(seed, shape, V, kind, dtype, beta, temperature, keep):
    s, t = (normal(seed + k, (*shape, V), dtype) for k in range(2))
    m, before = random_mask(seed + 2, shape, keep), (s.clone(), t.clone())
    each = [by_hand(softmax(a, temperature), softmax(b, temperature), kind, beta)
            for a, b in zip(s[m].tolist(), t[m].tolist())]
    got = distillation_loss(s, t, m, kind, beta if kind == "jsd" else 0.5, temperature)
    assert got.shape == () and got.dtype == (F64 if dtype == F64 else torch.float32)
    close(got.double(), sum(each) / max(len(each), 1), rtol=0, atol=1e-9 if dtype == F64 else 2e-6)
    assert torch.equal(before[0], s) and torch.equal(before[1], t)


@given(seed=SEEDS, temperature=st.sampled_from([0.5, 1.0, 3.0]), beta=st.sampled_from([0.2, 0.5]))
def test_slopes_equal_the_formulas(seed, temperature, beta):
    s, t = normal(seed, (3, 5)), normal(seed + 1, (3, 5))
    p, q = (s / temperature).softmax(-1), (t / temperature).softmax(-1)
    def weighted(d): return p * (d - (p * d).sum(-1, keepdim=True)) / (3 * temperature)
    m = beta * q + (1 - beta) * p
    slopes = {"reverse": weighted(p.log() - q.log()), "forward": (p - q) / (3 * temperature),
              "jsd": (1 - beta) * weighted(p.log() - m.log())}
    for kind, expected in slopes.items():
        _, (got, none) = value_and_grad(
            lambda s, t: distillation_loss(s, t, None, kind, beta if kind == "jsd" else 0.5,
                                           temperature), s, t)
        close(got, expected)
        assert none is None                                            # the teacher is a constant


def responses(first, second):
    "Log-probs of both tokens of all nine responses, (9, 2)."
    a, b = torch.tensor(list(itertools.product(range(3), repeat=2))).T
    one, two = first.log_softmax(-1), second.log_softmax(-1)
    return torch.stack([one[a], two[a, b]], 1)


@given(seed=SEEDS)
def test_the_advantage_gives_the_gradient_of_the_reverse_kl(seed):
    z1, z2 = (normal(seed + k, s).requires_grad_(True) for k, s in enumerate(((3,), (3, 3))))
    t1, t2 = normal(seed + 2, (3,)), normal(seed + 3, (3, 3))
    logp = responses(z1, z2)
    p, A = logp.sum(1).exp().detach(), distillation_advantage(logp, responses(t1, t2))
    def update(weights):
        loss = -(p[:, None] * weights * logp).sum()
        return torch.autograd.grad(loss, (z1, z2), retain_graph=True)
    visited = z1.detach().softmax(-1)
    positions = distillation_loss(z1, t1)
    for a in range(3): positions = positions + visited[a] * distillation_loss(z2[a], t2[a])
    for got, expected in zip(update(A), torch.autograd.grad(positions, (z1, z2))):
        close(got, expected)
    whole = exact_kl(logp.sum(1), responses(t1, t2).sum(1))
    to_go = A.flip(1).cumsum(1).flip(1)
    for got, expected in zip(update(to_go), torch.autograd.grad(whole, (z1, z2))):
        close(got, expected)


def test_by_hand():
    half, quarter = (torch.tensor(p, dtype=F64).log() for p in ([0.5, 0.5], [0.25, 0.75]))
    close(distillation_loss(half, quarter), math.log(4 / 3) / 2)  # reverse is the default
    close(
        distillation_loss(half, quarter, kind="forward"), math.log(0.5) / 4 + 0.75 * math.log(1.5))
    assert torch.equal(distillation_loss(half, quarter, kind="jsd"),
                       distillation_loss(half, quarter, kind="jsd", beta=0.5, temperature=1.0))
    assert distillation_loss(half, half) == distillation_loss(half, half, kind="jsd") == 0
    A = distillation_advantage(torch.tensor([[-2.0, -1.0]]), torch.tensor([[-0.5, -3.0]]))
    assert A.tolist() == [[1.5, -2.0]]


@given(seed=SEEDS, kind=KINDS, junk=JUNK, teacher_junk=JUNK)
def test_nothing_leaks_from_under_the_mask(seed, kind, junk, teacher_junk):
    s, t, m = normal(seed, (2, 3, 4)), normal(seed + 1, (2, 3, 4)), random_mask(seed + 2, (2, 3))
    clean = value_and_grad(lambda s: distillation_loss(s, t, m, kind), s)
    dirty_t, seen = t.masked_fill(~m[..., None], teacher_junk), ~m[..., None]
    got = value_and_grad(
        lambda s: distillation_loss(s, dirty_t, m, kind), s.masked_fill(seen, junk))
    assert torch.equal(clean[0], got[0]) and torch.equal(clean[1][0], got[1][0])
    assert (got[1][0][~m] == 0).all()


@given(xm=masked(), seed=SEEDS, junk=JUNK)
def test_advantage_is_a_constant_and_sees_no_padding(xm, seed, junk):
    logp, m = xm
    teacher = normal(seed, logp.shape).to(logp.dtype)
    leaf = torch.where(m, logp, junk).to(logp.dtype).requires_grad_(True)
    A = distillation_advantage(leaf, teacher, m)
    wide = F64 if logp.dtype == F64 else torch.float32
    assert not A.requires_grad and A.dtype == wide and (A[~m] == 0).all()
    assert torch.equal(A[m], teacher[m].to(wide) - logp[m].to(wide))
    assert torch.equal(distillation_advantage(logp, teacher), teacher.to(wide) - logp.to(wide))


@given(xm=masked(), seed=SEEDS, junk=JUNK)
def test_told_a_hint_the_policy_is_its_own_teacher(xm, seed, junk):
    logp, m = xm
    told = torch.where(m, normal(seed, logp.shape), junk).to(logp.dtype).requires_grad_(True)
    A = self_distillation_advantage(told, logp, m)
    assert not A.requires_grad and (A[~m] == 0).all()
    assert torch.equal(A, distillation_advantage(logp, told, m))
    with pytest.raises(ValueError, match="logp must have the shape of logp_hinted"):
        self_distillation_advantage(told[None], logp)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_impossible_tokens_and_far_logits(dtype):
    s, t = torch.tensor([1.0, 0.5, -1.0], dtype=dtype), torch.tensor([0.0, 1.0, 2.0], dtype=dtype)
    never = torch.tensor([0.0, -math.inf, 0.0], dtype=dtype)
    for kind in DISTILLATION_KINDS:
        loss, (grad,) = value_and_grad(
            lambda s: distillation_loss(s + never, t + never, kind=kind), s)
        close(loss, distillation_loss(s[[0, 2]], t[[0, 2]], kind=kind).item(), rtol=1e-5, atol=1e-6)
        assert grad.isfinite().all() and grad[1] == 0
        for far in (1e4, 3e4):
            loss, (grad,) = value_and_grad(
                lambda s: distillation_loss(s, t - far * (t > 0), kind=kind), s)
            assert loss.isfinite() and grad.isfinite().all()
    assert distillation_loss(s, t + never) == math.inf
    assert distillation_loss(s + never, t, kind="forward") == math.inf
    loss, (grad,) = value_and_grad(lambda s: distillation_loss(s, t + never, kind="jsd"), s)
    assert 0 < loss < math.log(2) and grad.isfinite().all()
    assert distillation_loss(s * math.nan, t).isnan()  # what counts stays visible


@given(seed=SEEDS, beta=st.sampled_from([0.1, 0.5, 0.9]))
def test_jsd_is_bounded_and_has_its_limits(seed, beta):
    s, t = normal(seed, (4, 6), scale=3.0), normal(seed + 1, (4, 6), scale=3.0)
    loss = distillation_loss(s, t, kind="jsd", beta=beta)
    most = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert 0 <= loss <= most <= math.log(2) + 1e-12
    close(loss, distillation_loss(t, s, kind="jsd", beta=1 - beta))
    for kind, end in (("forward", 1e-9), ("reverse", 1 - 1e-9)):
        near = distillation_loss(s, t, kind="jsd", beta=end) / 1e-9
        close(near, distillation_loss(s, t, kind=kind), rtol=1e-3, atol=1e-5)


def test_works_under_vmap():
    s, t, m = normal(0, (4, 3, 5)), normal(1, (4, 3, 5)), random_mask(2, (4, 3))
    for kind in DISTILLATION_KINDS:
        f = lambda s, t, m: distillation_loss(s, t, m, kind)
        one_by_one = torch.stack([f(*row) for row in zip(s, t, m)])
        torch.testing.assert_close(torch.func.vmap(f)(s, t, m), one_by_one)


@pytest.mark.parametrize("call, error, words", [
    (lambda x, m: distillation_loss(x.long(), x), TypeError, "logits must have a floating-point"),
    (lambda x, m: distillation_loss(x, x[:1]), ValueError, "teacher_logits must have the shape of"),
    (lambda x, m: distillation_loss(x, x, m[0]), ValueError, "mask must have"),
    (lambda x, m: distillation_loss(x, x, m.float()), TypeError, "mask must be boolean"),
    (lambda x, m: distillation_loss(x, x, kind="k1"), ValueError,
     "kind must be one of 'reverse', 'forward', 'jsd', got 'k1'"),
    (lambda x, m: distillation_loss(x, x, beta=1.0), ValueError, r"beta must be in \(0, 1\)"),
    (lambda x, m: distillation_loss(x, x, temperature=0), ValueError, "temperature must be in"),
    (lambda x, m: distillation_advantage(x, x[0]), ValueError, "teacher_logp must have the shape"),
    (lambda x, m: distillation_advantage(x.bool(), x), TypeError,
     "logp must have a floating-point"),
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))
