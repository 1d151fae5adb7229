import itertools
import math
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, SEEDS, normal, shapes, value_and_grad, values

from rlhf_notes.formulas.preference import (
    DPO_KINDS,
    best_of_n_loss,
    bradley_terry_loss,
    dpo_loss,
    implicit_reward,
    kto_loss,
    orpo_loss,
    simpo_loss,
)

F64, ROWS = torch.float64, st.integers(1, 5)


def close(got, expected, **kw):
    torch.testing.assert_close(
        got, torch.as_tensor(expected, dtype=got.dtype), **({"rtol": 1e-9, "atol": 1e-12} | kw))


def as_float(dtype): return F64 if dtype == F64 else torch.float32
def indices(seed, n, high):
    return torch.randint(high, (n,), generator=torch.Generator().manual_seed(seed))
def log_sigmoid(d): return -math.log1p(math.exp(-d)) if d >= 0 else d - math.log1p(math.exp(d))


# The losses of the reward model

@given(seed=SEEDS, rows=ROWS, n=st.integers(1, 6), dtype=DTYPES,
       index=st.sampled_from([torch.int64, torch.int32, torch.uint8]))
def test_best_of_n_equals_the_loops(seed, rows, n, dtype, index):
    r, best = normal(seed, (rows, n), dtype, 3), indices(seed, rows, n)
    got = best_of_n_loss(r, best.to(index))
    losses = [math.log(math.fsum(math.exp(v - row[b]) for v in row))
              for row, b in zip(r.tolist(), best.tolist())]
    assert got.dtype == as_float(dtype) and got.ndim == 0
    torch.testing.assert_close(
        got.double(), torch.tensor(sum(losses) / rows, dtype=torch.float64), atol=1e-5, rtol=1e-5)


@given(seed=SEEDS, rows=ROWS, n=st.integers(1, 6), shift=st.sampled_from([0.0, -4.0, 1e3]))
def test_best_of_n_gradient_and_invariance(seed, rows, n, shift):
    r, best = normal(seed, (rows, n), scale=3), indices(seed, rows, n)
    value, (grad,) = value_and_grad(lambda t: best_of_n_loss(t + shift, best), r)
    torch.testing.assert_close(value, best_of_n_loss(r, best))
    torch.testing.assert_close(grad, (r.softmax(1) - torch.nn.functional.one_hot(best, n)) / rows)


@given(
    xm=shapes().flatmap(lambda s: st.tuples(values(s, st.floats(-30, 30, width=32)),
                                            values(s, st.floats(-30, 30, width=32)))), dtype=DTYPES,
    margin=st.one_of(st.floats(-3, 3), SEEDS))
def test_bradley_terry_equals_the_loop(xm, dtype, margin):
    chosen, rejected = (t.to(dtype) for t in xm)
    if isinstance(margin, int): margin = normal(margin, chosen.shape, dtype).abs()
    d = (chosen.double() - rejected.double()
         - (margin.double() if isinstance(margin, torch.Tensor) else margin)).flatten().tolist()
    got = bradley_terry_loss(chosen, rejected, margin)
    assert got.dtype == as_float(dtype) and got.ndim == 0
    torch.testing.assert_close(
        got.double(), torch.tensor(-sum(map(log_sigmoid, d)) / len(d), dtype=torch.float64),
        atol=1e-5, rtol=1e-5)


@given(seed=SEEDS, shape=shapes())
def test_bradley_terry_gradient(seed, shape):
    c, r, m = normal(seed, shape), normal(seed + 1, shape), normal(seed + 2, shape)
    _, (gc, gr, gm) = value_and_grad(bradley_terry_loss, c, r, m)
    slope = torch.sigmoid(r + m - c) / c.numel()
    for got, expected in zip((gc, gr, gm), (-slope, slope, slope)):
        torch.testing.assert_close(got, expected)


@given(seed=SEEDS, rows=ROWS)
def test_best_of_two_is_bradley_terry(seed, rows):
    r, best = normal(seed, (rows, 2), scale=4), indices(seed, rows, 2)
    chosen, rejected = (r.gather(1, i[:, None])[:, 0] for i in (best, 1 - best))
    torch.testing.assert_close(best_of_n_loss(r, best), bradley_terry_loss(chosen, rejected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [0.0, 88.0, 100.0, 1e3, 1e6, 1e30])
def test_losses_are_finite_for_any_difference(d, dtype):
    for sign in (1, -1):
        for f in (lambda a, b: bradley_terry_loss(a, b),
                  lambda a, b: best_of_n_loss(torch.stack([a, b], 1), torch.tensor([0]))):
            value, grads = value_and_grad(
                f, torch.tensor([sign * d], dtype=dtype), torch.zeros(1, dtype=dtype))
            slope = -1 / (1 + math.exp(min(sign * d, 700)))
            torch.testing.assert_close(value,
                                       torch.tensor(-log_sigmoid(sign * d) if d < 700
                                                    else max(-sign * d, 0.0), dtype=dtype))
            for g, expected in zip(grads, (slope, -slope)):
                torch.testing.assert_close(g, torch.tensor([expected], dtype=dtype))


def test_losses_of_an_empty_batch_are_zero():
    assert bradley_terry_loss(torch.empty(0), torch.empty(0)) == 0
    assert best_of_n_loss(torch.empty(0, 4), torch.empty(0, dtype=torch.int64)) == 0


# IPO

@given(seed=SEEDS, tau=st.sampled_from([0.01, 0.1, 1.0]), eps=st.sampled_from([0.0, 0.1, 0.3, 0.5]),
       n=st.integers(1, 5))
def test_ipo_is_the_plain_formula(seed, tau, eps, n):
    tensors = [normal(seed + k, (n,), scale=10.0) for k in range(4)]
    before = [t.clone() for t in tensors]
    loss, slope = 0.0, []
    for w, l, rw, rl in zip(*(t.tolist() for t in tensors)):
        h, target = (w - rw) - (l - rl), 1 / (2 * tau)
        loss += ((1 - eps) * (h - target) ** 2 + eps * (-h - target) ** 2) / n
        slope.append(2 * (h - (1 - 2 * eps) * target) / n)
    got, (chosen, rejected, *refs) = value_and_grad(
        lambda *t: dpo_loss(*t, tau, eps, "ipo"), *tensors)
    assert got.shape == () and got.dtype == F64
    close(got, loss)
    close(chosen, slope)
    close(rejected, [-s for s in slope])
    assert refs == [None, None]
    assert all(torch.equal(x, y) for x, y in zip(before, tensors))


def test_ipo_by_hand():
    zero, lead = torch.zeros(1), lambda h: torch.tensor([h])
    # tau = 0.1: a lead of 5 is enough
    assert [dpo_loss(lead(h), zero, zero, zero, kind="ipo").item()
            for h in (0.0, 5.0, 7.0)] == [25.0, 0.0, 4.0]
    assert dpo_loss(zero, lead(7.0), zero, zero, kind="ipo").item() == dpo_loss(
        lead(-7.0), zero, zero, zero, kind="ipo").item() == 144.0
    for kind in ("sigmoid", "ipo", "robust"):
        assert torch.equal(dpo_loss(lead(3.0), zero, zero, zero, kind=kind),
                           dpo_loss(lead(2.0), zero, zero, lead(1.0), kind=kind))
    assert torch.equal(dpo_loss(lead(3.0), zero, zero, zero),
                       dpo_loss(lead(3.0), zero, zero, zero, kind="sigmoid"))


def test_ipo_stops_where_dpo_does_not():
    for kind, settles in (("ipo", True), ("sigmoid", False)):
        x, zero = torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)
        for _ in range(2000):
            x = x - 0.1 * value_and_grad(
                lambda x: dpo_loss(x, zero, zero, zero, 0.5, kind=kind), x)[1][0]
        assert (x.item() == pytest.approx(1.0)) if settles else (x > 5)


@pytest.mark.parametrize("size", [1e6, -1e6, 1e30, -1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_ipo_extremes(size, dtype):
    zero, x = torch.zeros(1, dtype=dtype), torch.tensor([size], dtype=dtype)
    loss, (grad,) = value_and_grad(lambda x: dpo_loss(x, zero, zero, zero, kind="ipo"), x)
    assert loss.dtype == (F64 if dtype == F64 else torch.float32) and loss > 0
    assert grad.item() == pytest.approx(
        2 * (x.item() - 5), rel=1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert dpo_loss(*[torch.zeros(0, dtype=dtype)] * 4, kind="ipo") == 0


def test_ipo_vmap_and_half_precision():
    stacks = [normal(k, (5, 3)) for k in range(4)]
    f = lambda *t: dpo_loss(*t, 0.5, 0.1, "ipo")
    torch.testing.assert_close(
        torch.func.vmap(f)(*stacks), torch.stack([f(*t) for t in zip(*stacks)]))
    torch.testing.assert_close(
        torch.compile(f, backend="eager", fullgraph=True)(*stacks), f(*stacks))
    new, old = torch.tensor([256.0]).bfloat16(), torch.tensor([0.5]).bfloat16()
    assert dpo_loss(new, old * 0, old, old * 0, kind="ipo") == 250.5**2


# DPO

@given(seed=SEEDS, beta=st.sampled_from([0.01, 0.1, 1.0]),
       eps=st.sampled_from([0.0, 0.1, 0.3, 0.5]), n=st.integers(1, 5))
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
    close(got, loss)
    close(chosen, slope)
    close(rejected, [-s for s in slope])
    assert refs == [None, None]
    assert all(torch.equal(x, y) for x, y in zip(before, tensors))


@given(
    seed=SEEDS, beta=st.sampled_from([0.01, 0.1, 1.0]), shape=st.sampled_from([(), (3,), (2, 3)]))
def test_dpo_is_bradley_terry_with_the_log_ratio_as_reward(seed, beta, shape):
    w, l, rw, rl = (normal(seed + k, shape, scale=10.0) for k in range(4))
    torch.testing.assert_close(
        dpo_loss(w, l, rw, rl, beta), bradley_terry_loss(beta * (w - rw), beta * (l - rl)))
    torch.testing.assert_close(
        dpo_loss(w, l, rw, rl, beta, 0.2),
        0.8 * dpo_loss(w, l, rw, rl, beta) + 0.2 * dpo_loss(l, w, rl, rw, beta))


def test_dpo_by_hand():
    for eps in (0.0, 0.1, 0.5):
        assert dpo_loss(*[torch.tensor([-3.0, -5.0])] * 4,
                        label_smoothing=eps).item() == pytest.approx(math.log(2))
    w, zero = torch.tensor([20.0]), torch.zeros(1)
    # beta = 0.1 by default, no smoothing
    assert dpo_loss(w, zero, zero, zero).item() == pytest.approx(math.log(1 + math.exp(-2)))
    assert dpo_loss(zero, w, zero, zero).item() == pytest.approx(math.log(1 + math.exp(2)))
    best = torch.tensor([math.log(9)], dtype=F64)  # sigmoid = 0.9: smoothing of 0.1 stops here
    assert value_and_grad(
        lambda x: dpo_loss(x, zero, zero, zero, 1.0, 0.1), best)[1][0].abs() < 1e-12


@pytest.mark.parametrize("size", [100.0, 1000.0, 1e6, -100.0, -1000.0, -1e6])
@pytest.mark.parametrize("eps", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_dpo_extremes(size, eps, dtype):
    zero = torch.zeros(1, dtype=dtype)
    loss, (grad,) = value_and_grad(
        lambda x: dpo_loss(x, zero, zero, zero, 1.0, eps), torch.tensor([size], dtype=dtype))
    assert loss.isfinite() and loss.dtype == (F64 if dtype == F64 else torch.float32)
    assert grad.item() == pytest.approx(
        eps if size > 0 else eps - 1, abs=1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert loss.item() == pytest.approx(abs(torch.tensor(size, dtype=dtype).item())
                                        * (eps if size > 0 else 1 - eps), abs=1e-6, rel=1e-5)


def test_dpo_vmap_and_compile():
    stacks = [normal(k, (5, 3)) for k in range(4)]
    f = lambda *t: dpo_loss(*t, 0.5, 0.1)
    torch.testing.assert_close(
        torch.func.vmap(f)(*stacks), torch.stack([f(*t) for t in zip(*stacks)]))
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(f))(*stacks),
        torch.stack([value_and_grad(lambda x: f(x, *rest), x)[1][0] for x, *rest in zip(*stacks)]))
    torch.testing.assert_close(
        torch.compile(f, backend="eager", fullgraph=True)(*stacks), f(*stacks))


@pytest.mark.parametrize("args, kwargs, error, words", [
    ([torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(3)], {}, ValueError,
     r"ref_rejected_logp must have the shape of chosen_logp, \(2,\), got \(3,\)"),
    ([torch.zeros(2), torch.zeros(2, 1), torch.zeros(2), torch.zeros(2)], {}, ValueError,
     "rejected_logp must have the shape of chosen_logp"),
    ([torch.zeros(2), torch.zeros(2), torch.zeros(2).long(), torch.zeros(2)], {}, TypeError,
     "ref_chosen_logp must have a floating-point dtype"),
    ([0.0, torch.zeros(2), torch.zeros(2), torch.zeros(2)], {}, TypeError,
     "chosen_logp must be a torch.Tensor, got float"),
    ([torch.zeros(2)] * 4, dict(beta=0.0), ValueError, r"beta must be in \(0, inf\), got 0.0"),
    ([torch.zeros(2)] * 4, dict(beta=-1), ValueError, "beta"),
    ([torch.zeros(2)] * 4, dict(label_smoothing=0.6), ValueError,
     r"label_smoothing must be in \[0, 0.5\], got 0.6"),
    ([torch.zeros(2)] * 4, dict(label_smoothing=-0.1), ValueError, "label_smoothing"),
    ([torch.zeros(2)] * 4, dict(kind="hinge"), ValueError,
     "kind must be one of 'sigmoid', 'ipo', .*, got 'hinge'"),
    ([torch.zeros(2)] * 4, dict(kind="apo_zero", label_smoothing=0.1), ValueError,
     "label_smoothing must be at most 0 for kind='apo_zero', got 0.1"),
    ([torch.zeros(2)] * 4, dict(kind="apo_down", label_smoothing=0.1), ValueError,
     "label_smoothing must be at most 0 for kind='apo_down'"),
    ([torch.zeros(2)] * 4, dict(kind="robust", label_smoothing=0.5), ValueError,
     "label_smoothing must be at most 0.499 for kind='robust', got 0.5"),
    ([torch.zeros(2)] * 4, dict(kind="rpo", alpha=-1.0), ValueError, "alpha must be in"),
    ([torch.zeros(2)] * 4, dict(kind="rpo", chosen_length=torch.ones(3)), ValueError,
     "chosen_length must have the shape of chosen_logp"),
    ([torch.zeros(2)] * 4, dict(chosen_length=torch.ones(2)), ValueError,
     "chosen_length must be None for kind='sigmoid'"),
])
def test_bad_input_of_dpo_is_named(args, kwargs, error, words):
    with pytest.raises(error, match=words): dpo_loss(*args, **kwargs)


def test_dpo_without_smoothing_has_no_second_term():
    inf, zero = torch.tensor([math.inf]), torch.zeros(1)
    loss, (_, grad) = value_and_grad(lambda c, r: dpo_loss(c, r, zero, zero), zero, -inf)
    assert loss == 0 and grad == 0  # the rejected answer is impossible: nothing is left to learn
    assert dpo_loss(
        zero, -inf, zero, zero, label_smoothing=0.1) == dpo_loss(-inf, zero, zero, zero) == math.inf


def test_reward_models_losses_under_vmap():
    logp, ref, best = normal(0, (4, 3, 5)), normal(1, (4, 3, 5)), indices(1, 12, 5).reshape(4, 3)
    for f, args in ((best_of_n_loss, (logp, best)), (bradley_terry_loss, (logp, ref, ref.abs()))):
        torch.testing.assert_close(
            torch.func.vmap(f)(*args), torch.stack([f(*row) for row in zip(*args)]))


def test_dpo_of_each_pair():
    pairs = [normal(k, (2, 3)) for k in range(4)]
    for kind in DPO_KINDS:
        eps = 0.0 if "apo" in kind else 0.1
        each = dpo_loss(*pairs, 0.3, eps, kind, reduction="none")
        assert each.shape == (2, 3)
        torch.testing.assert_close(each.mean(), dpo_loss(*pairs, 0.3, eps, kind))
    with pytest.raises(ValueError, match="reduction must be one of 'mean', 'none', got 'sum'"):
        dpo_loss(*pairs, reduction="sum")


# Anchors, imitation, wrong labels

def sigma(x): return 1 / (1 + math.exp(-x))


@given(seed=SEEDS, beta=st.sampled_from([0.05, 0.5]), n=st.integers(1, 5))
def test_apo_is_the_plain_formula(seed, beta, n):
    tensors = [normal(seed + k, (n,), scale=5.0) for k in range(4)]
    rows = [(beta * (w - rw), beta * (l - rl))
            for w, l, rw, rl in zip(*(t.tolist() for t in tensors))]
    d = lambda x: beta * sigma(x) * sigma(-x) / n
    formulas = {
        "apo_zero": (lambda w, l: 1 - sigma(w) + sigma(l), lambda w, l: (-d(w), d(l))),
        "apo_down": (lambda w, l: sigma(w) + 1 - sigma(w - l),
                     lambda w, l: (d(w) - d(w - l), d(w - l)))}
    for kind, (loss, slopes) in formulas.items():
        got, (chosen, rejected, *refs) = value_and_grad(
            lambda *t: dpo_loss(*t, beta, kind=kind), *tensors)
        close(got, sum(loss(*row) for row in rows) / n)
        close(chosen, [slopes(*row)[0] for row in rows])
        close(rejected, [slopes(*row)[1] for row in rows])
        assert refs == [None, None]


@given(seed=SEEDS, beta=st.sampled_from([0.05, 0.5]), eps=st.sampled_from([0.0, 0.1, 0.4]))
def test_the_robust_loss_is_dpos_on_average_over_wrong_labels(seed, beta, eps):
    w, l, rw, rl = (normal(seed + k, (4,), scale=5.0) for k in range(4))
    right, wrong = (w, l, rw, rl), (l, w, rl, rw)
    mixed = ((1 - eps) * dpo_loss(*right, beta, eps, "robust", "none")
             + eps * dpo_loss(*wrong, beta, eps, "robust", "none"))
    close(mixed, dpo_loss(*right, beta, reduction="none"))
    loss = [(-(1 - eps) * log_sigmoid(h) + eps * log_sigmoid(-h)) / (1 - 2 * eps)
            for h in (beta * ((w - rw) - (l - rl))).tolist()]
    close(dpo_loss(*right, beta, eps, "robust", "none"), loss)


@given(seed=SEEDS, alpha=st.sampled_from([0.0, 0.3, 1.0]), eps=st.sampled_from([0.0, 0.1]))
def test_rpo_imitates_what_was_chosen(seed, alpha, eps):
    pairs, length = [normal(seed + k, (4,), scale=5.0) for k in range(4)], indices(seed, 4, 9) + 1
    dpo, (slope, *_) = value_and_grad(lambda *t: dpo_loss(*t, 0.2, eps), *pairs)
    got, (chosen, rejected, *refs) = value_and_grad(lambda *t: dpo_loss(
        *t, 0.2, eps, "rpo", alpha=alpha, chosen_length=length), *pairs)
    each = [alpha * a / n for a, n in zip(pairs[0].tolist(), length.tolist())]
    close(got, dpo.item() - sum(each) / 4)
    close(chosen, slope - alpha / length.double() / 4)
    close(rejected, -slope)
    assert refs == [None, None]
    alone = dpo_loss(*pairs, 0.2, eps, "rpo", "none")                    # alpha 1, length 1
    empty = [x.masked_fill(x == x, 0.0) for x in pairs[:2]] + [*pairs[2:]]
    none = torch.zeros(len(empty[0]), dtype=torch.long)
    found = dpo_loss(*empty, 0.2, eps, "rpo", "none", chosen_length=none)
    assert torch.equal(found, dpo_loss(*empty, 0.2, eps, reduction="none"))
    close(alone, dpo_loss(*pairs, 0.2, eps, reduction="none") - pairs[0])


@pytest.mark.parametrize("size", [100.0, 1e6, -1e6, 1e30, -1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_the_repairs_at_the_extremes(size, dtype):
    x, zero = torch.tensor([size], dtype=dtype), torch.zeros(1, dtype=dtype)
    for kind, eps in (("apo_zero", 0.0), ("apo_down", 0.0), ("robust", 0.1), ("rpo", 0.0)):
        for at in range(2):
            args = [x, zero] if at == 0 else [zero, x]
            loss, grads = value_and_grad(
                lambda a, b: dpo_loss(a, b, zero, zero, 1.0, eps, kind), *args)
            assert loss.isfinite() and all(g.isfinite().all() for g in grads)
            assert loss.dtype == (F64 if dtype == F64 else torch.float32)


def test_the_repairs_under_vmap():
    stacks = [normal(k, (5, 3)) for k in range(4)]
    for kind, eps in (("apo_zero", 0.0), ("apo_down", 0.0), ("robust", 0.1), ("rpo", 0.1)):
        f = lambda *t: dpo_loss(*t, 0.5, eps, kind)
        one_by_one = torch.stack([f(*t) for t in zip(*stacks)])
        torch.testing.assert_close(torch.func.vmap(f)(*stacks), one_by_one)


@given(seed=SEEDS, centre=st.sampled_from([0.01, 0.5]), shape=shapes())
def test_centring_pulls_the_sum_of_a_pair_to_0(seed, centre, shape):
    c, r = normal(seed, shape, scale=3.0), normal(seed + 1, shape, scale=3.0)
    plain, (slope, _) = value_and_grad(lambda c, r: bradley_terry_loss(c, r, 0.3), c, r)
    got, grads = value_and_grad(lambda c, r: bradley_terry_loss(c, r, 0.3, centre), c, r)
    close(got, plain + centre * ((c + r) ** 2).mean())
    close(grads[0], slope + 2 * centre * (c + r) / c.numel())
    close(grads[1], -slope + 2 * centre * (c + r) / c.numel())
    assert torch.equal(plain, bradley_terry_loss(c, r, 0.3, 0.0))
    with pytest.raises(ValueError, match="centre must be in"):
        bradley_terry_loss(c, r, centre=-1.0)


# Beside DPO

@given(seed=SEEDS, n=st.integers(1, 5), beta=st.sampled_from([0.1, 2.0]),
       gamma=st.sampled_from([0.0, 1.0]), dtype=DTYPES)
def test_simpo_is_the_plain_formula(seed, n, beta, gamma, dtype):
    w, l = (-normal(seed + k, (n,)).abs().to(dtype) for k in (0, 1))
    loss = -sum(log_sigmoid(beta * (a - b) - gamma) for a, b in zip(w.tolist(), l.tolist())) / n
    got = simpo_loss(w, l, beta, gamma)
    assert got.dtype == as_float(dtype) and got.item() == pytest.approx(loss, rel=1e-5, abs=1e-6)
    if (beta, gamma) == (2.0, 1.0): assert torch.equal(got, simpo_loss(w, l))


@given(seed=SEEDS, n=st.integers(1, 5), weight=st.sampled_from([0.0, 0.1, 1.0]))
def test_orpo_is_the_plain_formula(seed, n, weight):
    w, l = (-normal(seed + k, (n,)).abs() - 1e-3 for k in (0, 1))
    loss, slopes = 0.0, ([], [])
    for a, b in zip(w.tolist(), l.tolist()):
        p, q = math.exp(a), math.exp(b)
        d = math.log(p / (1 - p)) - math.log(q / (1 - q))
        loss += (-a - weight * log_sigmoid(d)) / n
        slopes[0].append((-1 - weight / (1 + math.exp(d)) / (1 - p)) / n)
        slopes[1].append(weight / (1 + math.exp(d)) / (1 - q) / n)
    got, grads = value_and_grad(lambda a, b: orpo_loss(a, b, weight), w, l)
    close(got, loss)
    close(grads[0], slopes[0])
    close(grads[1], slopes[1])
    if weight == 0.1: assert torch.equal(got, orpo_loss(w, l))


def test_orpo_in_float64_at_any_odds():
    "Against 60 decimal digits; probabilities from 1 - 1e-14 to e^-60."
    sizes = [-1e-14, -1e-9, -1e-5, -0.1, -1.0, -10.0, -30.0, -60.0]
    for w, l in itertools.product(sizes, repeat=2):
        with localcontext() as context:
            context.prec = 60
            odds = [Decimal(x) - (1 - Decimal(x).exp()).ln() for x in (w, l)]
            exact = float((1 + (odds[1] - odds[0]).exp()).ln() / 10 - Decimal(w))
        got = orpo_loss(torch.tensor([w], dtype=F64), torch.tensor([l], dtype=F64)).item()
        assert got == pytest.approx(exact, rel=1e-13, abs=1e-25), (w, l)


@pytest.mark.parametrize(
    "w, l",
    [(0.0, -1.0), (-1e-12, -1.0), (-200.0, -0.1), (-0.1, -1e4), (-1e-30, -1e-30), (-1.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_orpo_at_odds_out_of_range(w, l, dtype):
    loss, (gw, gl) = value_and_grad(
        orpo_loss, torch.tensor([w], dtype=dtype), torch.tensor([l], dtype=dtype))
    assert loss.isfinite() and gw.isfinite() and gl.isfinite()
    # the odds of the rejected response are 1 / (e - 1)
    if w == 0: assert gw.item() == pytest.approx(-1 - 0.1 / (math.e - 1), rel=1e-2)


@given(seed=SEEDS, n=st.integers(1, 5), beta=st.sampled_from([0.1, 1.0]),
       kl=st.sampled_from([-1.0, 0.0, 2.0]),
       weights=st.sampled_from([(1.0, 1.0), (1.0, 2.5), (0.5, 0.0)]))
def test_kto_is_the_plain_formula(seed, n, beta, kl, weights):
    logp, ref, liked = (normal(seed, (n,), scale=5.0), normal(seed + 1, (n,), scale=5.0),
                        normal(seed + 2, (n,)) > 0)
    loss, slope = 0.0, []
    for a, b, good in zip(logp.tolist(), ref.tolist(), liked.tolist()):
        s = 1 / (1 + math.exp(-beta * (a - b - max(kl, 0))))
        loss += (weights[0] * (1 - s) if good else weights[1] * s) / n
        slope.append((-weights[0] if good else weights[1]) * beta * s * (1 - s) / n)
    got, (grad, of_ref, of_kl) = value_and_grad(
        lambda a, b, z: kto_loss(a, b, liked, z, beta, *weights), logp, ref,
        torch.tensor(kl, dtype=F64))
    close(got, loss)
    close(grad, slope)
    assert of_ref is None and of_kl is None
    if beta == 0.1 and weights == (1.0, 1.0):
        assert torch.equal(got, kto_loss(logp, ref, liked, torch.tensor(kl, dtype=F64)))


@pytest.mark.parametrize("size", [1e3, -1e3, 1e30, -1e30])
def test_the_losses_beside_dpo_at_the_extremes(size):
    zero, x, yes = torch.zeros(1), torch.tensor([size]), torch.tensor([True])
    for f, most in (
        (lambda x: simpo_loss(x, zero), 2), (lambda x: kto_loss(x, zero, yes, zero[0]), 0.1),
        (lambda x: kto_loss(x, zero, ~yes, zero[0]), 0.1)):
        loss, (grad,) = value_and_grad(f, x)
        assert loss.isfinite() and abs(grad) <= most
    for f in (simpo_loss, orpo_loss, lambda a, b: kto_loss(a, b, a > 0, zero[0])):
        assert f(torch.empty(0), torch.empty(0)) == 0


def test_implicit_reward_is_what_dpo_compares():
    pairs = [normal(k, (2, 3), scale=5.0).requires_grad_() for k in range(4)]
    w, l = implicit_reward(pairs[0], pairs[2], 0.3), implicit_reward(pairs[1], pairs[3], 0.3)
    torch.testing.assert_close(bradley_terry_loss(w, l), dpo_loss(*pairs, 0.3).detach())
    assert not w.requires_grad
    assert torch.equal(
        implicit_reward(pairs[0], pairs[2]), implicit_reward(pairs[0], pairs[2], 0.1))


def test_the_losses_beside_dpo_under_vmap():
    w, l = -normal(0, (4, 3)).abs(), -normal(1, (4, 3)).abs()
    for f in (
        simpo_loss, orpo_loss, implicit_reward, lambda a, b: kto_loss(a, b, a > -0.5, b.mean())):
        torch.testing.assert_close(
            torch.func.vmap(f)(w, l), torch.stack([f(*row) for row in zip(w, l)]))


R, B, L, S = (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64),
              torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2))


@pytest.mark.parametrize("call, error, words", [
    (lambda: best_of_n_loss(R * 1j, B), TypeError, "rewards must be real"),
    (lambda: best_of_n_loss(R[0], B), ValueError,
     r"rewards must have the shape \(B, N\), got \(3,\)"),
    (lambda: best_of_n_loss(R, B.float()), TypeError, "best must have an integer dtype"),
    (lambda: best_of_n_loss(R, B[:1]), ValueError,
     r"best must have .*B = 2, as rewards has.*got \(1,\)"),
    (lambda: best_of_n_loss(R, L), ValueError, r"best must have the shape \(B\), got \(2, 3\)"),
    (lambda: best_of_n_loss(R, torch.tensor([0, 3])), ValueError, "^best must be between 0 and 2"),
    (lambda: best_of_n_loss(R, torch.tensor([0, -1])), ValueError, "^best must be between 0 and 2"),
    (lambda: bradley_terry_loss(R, R[:1]), ValueError, "rejected must have the shape of chosen"),
    (lambda: bradley_terry_loss(1.0, 0.0), TypeError, "chosen must be a torch.Tensor"),
    (lambda: bradley_terry_loss(R, R, S), ValueError,
     r"margin must be a number or have the shape of chosen, \(2, 3\), got \(2,\)"),
    (lambda: simpo_loss(S, R), ValueError, "rejected_logp must have the shape of chosen_logp"),
    (lambda: simpo_loss(S, S, gamma=-1.0), ValueError, r"gamma must be in \[0, inf\), got -1.0"),
    (lambda: orpo_loss(S, S, "1"), TypeError, "weight must be a number, got str"),
    (lambda: orpo_loss(S, B), TypeError, "rejected_logp must have a floating-point dtype"),
    (lambda: kto_loss(S, S, S, S[0]), TypeError, "desirable must be boolean"),
    (lambda: kto_loss(S, S, S > 0, 0.0), TypeError, "kl must be a torch.Tensor, got float"),
    (lambda: kto_loss(S, S, S > 0, S), ValueError, r"kl must have the shape \(\), got \(2,\)"),
    (lambda: implicit_reward(S, R), ValueError, "logp_ref must have the shape of logp"),
    (lambda: bradley_terry_loss(R, R, "1"), TypeError, "margin must be a number"),
])
def test_bad_input_of_a_reward_models_losses_is_named(call, error, words):
    with pytest.raises(error, match=words): call()
