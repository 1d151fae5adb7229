import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, JUNK, SEEDS, normal, random_mask, value_and_grad, values
from torch.autograd import forward_ad

from rlhf_notes import fast
from rlhf_notes.fast import scan
from rlhf_notes.formulas.advantage import (
    GROUP_SCALES,
    accumulate,
    discounted_returns,
    gae,
    gae_tokens,
    group_advantage,
    length_adaptive_lambda,
    multi_reward_advantage,
    reinforce_pp_advantage,
    rloo_advantage,
)
from rlhf_notes.formulas.whitening import whiten

@pytest.fixture(autouse=True, scope="module", params=["plain", "loop"])
def way(request):
    "All that is promised holds for the plain code and for the compiled loop."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "SMALL", 1)
        with fast.off() if request.param == "plain" else nullcontext(): yield


UNIT = st.sampled_from([0.0, 0.3, 0.5, 0.95, 0.99, 1.0])
STEPS = st.one_of(st.tuples(st.integers(1, 12)), st.tuples(st.integers(1, 12), st.integers(1, 4)))
P_END = st.sampled_from([0.0, 0.2, 0.6, 1.0])
KEEP = st.sampled_from([0.0, 0.3, 0.7, 1.0])


@st.composite
def rollouts(draw, dtypes=st.just(torch.float64)):
    """rewards, values, next_values, terminated, done: ends of both kinds at random places,
    next_values independent of values.
    """
    shape, seed, p, dtype = draw(STEPS), draw(SEEDS), draw(P_END), draw(dtypes)
    terminated, truncated = random_mask(seed + 3, shape, p), random_mask(seed + 4, shape, p / 2)
    return *(normal(seed + i, shape, dtype) for i in range(3)), terminated, terminated | truncated


def as_float(dtype): return torch.float64 if dtype == torch.float64 else torch.float32


def columns(*tensors):
    "Each environment as plain lists."
    return zip(*[(t[:, None] if t.ndim == 1 else t).T.tolist() for t in tensors])


def as_steps(rows, like):
    return torch.tensor(rows, dtype=torch.float64).T.reshape(like.shape)


def double_sum(r, v, nv, terminated, done, gamma, lam):
    """A_t = sum_k (gamma lam)^(k - t) delta_k up to the end of the episode, every term computed by
    itself.
    """
    out = []
    for t in range(len(r)):
        last = next((k for k in range(t, len(r)) if done[k]), len(r) - 1)
        out.append(math.fsum((gamma * lam) ** (k - t)
                             * (r[k] + (0.0 if terminated[k] else gamma * nv[k]) - v[k])
                             for k in range(t, last + 1)))
    return out


def return_sum(r, done, gamma):
    return [
        math.fsum(gamma ** (k - t) * r[k]
                  for k in range(t, next((k for k in range(t, len(r)) if done[k]), len(r) - 1) + 1))
        for t in range(len(r))]


# ---- returns and GAE over steps

@given(data=rollouts(), gamma=UNIT, lam=UNIT)
def test_gae_equals_the_double_sum(data, gamma, lam):
    before = [t.clone() for t in data]
    A, R = gae(*data, gamma, lam)
    torch.testing.assert_close(
        A, as_steps([double_sum(*c, gamma, lam) for c in columns(*data)], A), atol=1e-10, rtol=0)
    torch.testing.assert_close(R, A + data[1], atol=1e-12, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(before, data))


@given(data=rollouts(), gamma=UNIT)
def test_returns_equal_the_sum(data, gamma):
    r, done = data[0], data[4]
    before = r.clone()
    R = discounted_returns(r, done, gamma)
    torch.testing.assert_close(
        R, as_steps([return_sum(*c, gamma) for c in columns(r, done)], R), atol=1e-10, rtol=0)
    assert torch.equal(r, before)


@given(data=rollouts(), gamma=UNIT)
def test_lambda_zero_is_one_step(data, gamma):
    r, v, nv, terminated, done = data
    A, R = gae(*data, gamma, 0.0)
    torch.testing.assert_close(R, r + gamma * nv * ~terminated, atol=1e-12, rtol=0)
    torch.testing.assert_close(A, r + gamma * nv * ~terminated - v, atol=1e-12, rtol=0)


@given(data=rollouts(), gamma=UNIT)
def test_lambda_one_is_the_return_with_one_bootstrap(data, gamma):
    """R_t = rewards to the end + gamma^n V(where it stopped) unless that was a termination; V in
    between telescopes away.
    """
    r, v, nv, terminated, done = data
    nv = nv.clone()
    nv[:-1] = torch.where(done[:-1], nv[:-1], v[1:])
    A, R = gae(r, v, nv, terminated, done, gamma, 1.0)
    rows = []
    for r_, nv_, term, d in columns(r, nv, terminated, done):
        row = []
        for t in range(len(r_)):
            last = next((k for k in range(t, len(r_)) if d[k]), len(r_) - 1)
            row.append(math.fsum(gamma ** (k - t) * r_[k] for k in range(t, last + 1))
                       + (0.0 if term[last] else gamma ** (last - t + 1) * nv_[last]))
        rows.append(row)
    torch.testing.assert_close(R, as_steps(rows, R), atol=1e-10, rtol=0)
    torch.testing.assert_close(A, R - v, atol=1e-10, rtol=0)


@given(data=rollouts(), gamma=UNIT, lam=UNIT)
def test_gradients_of_gae_equal_the_formula(data, gamma, lam):
    r, v, nv, terminated, done = [t[:, 0] if t.ndim == 2 else t for t in data]
    by_r, by_v, by_nv = torch.autograd.functional.jacobian(
        lambda *x: gae(*x, terminated, done, gamma, lam)[0], (r, v, nv))
    T, w = len(r), torch.zeros(len(r), len(r), dtype=torch.float64)
    for t, k in itertools.product(range(T), range(T)):
        if t <= k and not done[t:k].any(): w[t, k] = (gamma * lam) ** (k - t)
    torch.testing.assert_close(by_r, w, atol=1e-12, rtol=0)
    torch.testing.assert_close(by_v, -w, atol=1e-12, rtol=0)
    torch.testing.assert_close(by_nv, gamma * w * ~terminated, atol=1e-12, rtol=0)
    by_v = torch.autograd.functional.jacobian(
        lambda x: gae(r, x, nv, terminated, done, gamma, lam)[1], v)
    torch.testing.assert_close(by_v, torch.eye(T, dtype=torch.float64) - w, atol=1e-12, rtol=0)


@given(data=rollouts(DTYPES), gamma=UNIT, lam=UNIT, junk=JUNK)
def test_nothing_comes_from_behind_an_end(data, gamma, lam, junk):
    r, v, nv, terminated, done = data
    value, grads = value_and_grad(
        lambda *x: torch.stack(gae(*x, terminated, done, gamma, lam)), r, v, nv)
    dirty, dirty_grads = value_and_grad(
        lambda *x: torch.stack(gae(*x, terminated, done, gamma, lam)), r, v,
        torch.where(terminated, junk, nv).to(nv.dtype))
    assert torch.equal(value, dirty)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(grads, dirty_grads))
    assert value.dtype == (torch.float64 if r.dtype == torch.float64 else torch.float32)
    assert (grads[2][terminated] == 0).all()
    # steps in which every environment ends: all that follows is another story
    ends = done.reshape(len(done), -1).all(1).nonzero().flatten()
    if len(ends):
        later = (torch.arange(len(r)) > ends[0]).reshape(-1, *[1] * (r.ndim - 1))
        spoilt = [torch.where(later, junk, t).to(t.dtype) for t in (r, v, nv)]
        first = slice(0, int(ends[0]) + 1)
        f = lambda *x: torch.stack(gae(*x, terminated, done, gamma, lam))[:, first]
        (a, ga), (b, gb) = value_and_grad(f, r, v, nv), value_and_grad(f, *spoilt)
        assert torch.equal(a, b) and all(torch.equal(x, y) for x, y in zip(ga, gb))
        assert torch.equal(discounted_returns(spoilt[0], done, gamma)[first],
                           discounted_returns(r, done, gamma)[first])


@given(seed=SEEDS, T=st.integers(2, 10), cut=st.integers(1, 9), gamma=UNIT, lam=UNIT)
def test_two_episodes_in_one_row_are_two_rows(seed, T, cut, gamma, lam):
    r, v, nv = normal(seed, (T,)), normal(seed + 1, (T,)), normal(seed + 2, (T,))
    cut = min(cut, T - 1)
    for kind in ("truncated", "terminated"):
        done = torch.arange(T) == cut - 1
        terminated = done & torch.tensor(kind == "terminated")
        whole = torch.stack(gae(r, v, nv, terminated, done, gamma, lam))
        halves = [torch.stack(gae(*[x[s] for x in (r, v, nv, terminated, done)], gamma, lam))
                  for s in (slice(0, cut), slice(cut, T))]
        assert torch.equal(whole, torch.cat(halves, 1))


@given(seed=SEEDS, T=st.integers(1, 30), gamma=st.sampled_from([0.5, 0.9, 0.95]), lam=UNIT, p=P_END)
def test_with_the_right_values_truncation_surprises_nobody(seed, T, gamma, lam, p):
    """Reward 1 for ever: V = 1 / (1 - gamma) everywhere, and the clock changes nothing. Taken for a
    termination, it costs gamma V.
    """
    ones, V, done = (torch.ones(T, 3, dtype=torch.float64),
                     torch.full((T, 3), 1 / (1 - gamma), dtype=torch.float64),
                     random_mask(seed, (T, 3), p))
    A, R = gae(ones, V, V, torch.zeros_like(done), done, gamma, lam)
    torch.testing.assert_close(A, torch.zeros_like(A), atol=1e-10, rtol=0)
    A, R = gae(ones, V, V, done, done, gamma, lam)
    torch.testing.assert_close(
        A[done], torch.full_like(A[done], -gamma / (1 - gamma)), atol=1e-10, rtol=0)


@given(x=values((6, 2)), gamma=UNIT, lam=UNIT)
def test_extreme_rewards_stay_finite(x, gamma, lam):
    no = torch.zeros(6, 2, dtype=torch.bool)
    A, R = gae(x, x / 2, x / 3, no, no, gamma, lam)
    assert A.isfinite().all()
    assert R.isfinite().all()
    assert discounted_returns(x, no, gamma).isfinite().all()


def test_defaults_and_no_steps_at_all():
    data = (normal(0, (5, 2)), normal(1, (5, 2)), normal(2, (5, 2)), random_mask(3, (5, 2), 0.3),
            random_mask(3, (5, 2), 0.3))
    assert torch.equal(gae(*data)[0], gae(*data, gamma=0.99, lam=0.95)[0])
    assert not torch.equal(gae(*data)[0], gae(*data, 0.95, 0.99)[0])
    r, v, m = normal(0, (3, 4)), normal(1, (3, 4)), random_mask(2, (3, 4))
    assert torch.equal(gae_tokens(r, v, m)[0], gae_tokens(r, v, m, gamma=1.0, lam=0.95)[0])
    assert not torch.equal(gae_tokens(r, v, m)[0], gae_tokens(r, v, m, 0.95, 1.0)[0])
    assert torch.equal(
        reinforce_pp_advantage(r, m), reinforce_pp_advantage(r, m, 1.0, torch.zeros(3)))
    x = normal(0, (2, 4)) * 1e-3  # here the default eps is seen
    assert torch.equal(group_advantage(x), group_advantage(x, "std", 1e-4))
    assert not torch.equal(group_advantage(x), group_advantage(x, "std", 1e-6))
    empty, none = torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.bool)
    assert discounted_returns(empty, none, 0.9).shape == gae(
        empty, empty, empty, none, none)[0].shape == (0, 2)
    assert gae_tokens(empty.T, empty.T)[0].shape == (2, 0)
    assert reinforce_pp_advantage(empty.T).shape == (2, 0)


# ---- tokens

def cut_together(mask, *tensors):
    "The rows of tokens that count, as lists."
    return zip(*[[[x for x, k in zip(row, keep) if k]
                  for row, keep in zip(t.tolist(), mask.tolist())] for t in tensors])


def token_gae(r, v, gamma, lam):
    end = [False] * (len(r) - 1) + [True]
    return double_sum(r, v, v[1:] + [math.nan], end, end, gamma, lam)


@given(seed=SEEDS, rows=st.integers(1, 4), width=st.integers(1, 9), keep=KEEP, gamma=UNIT, lam=UNIT,
       dtype=DTYPES)
def test_token_gae_equals_gae_of_the_row_cut_together(seed, rows, width, keep, gamma, lam, dtype):
    r, v, m = (normal(seed, (rows, width), dtype), normal(seed + 1, (rows, width), dtype),
               random_mask(seed + 2, (rows, width), keep))
    before = [t.clone() for t in (r, v, m)]
    A, R = gae_tokens(r, v, m, gamma, lam)
    assert A.dtype == R.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert A.shape == R.shape == r.shape
    tol = 1e-10 if dtype == torch.float64 else 1e-4
    for b, (rb, vb) in enumerate(cut_together(m, r.double(), v.double())):
        expected = torch.tensor(token_gae(rb, vb, gamma, lam), dtype=torch.float64)
        torch.testing.assert_close(A[b, m[b]].double(), expected, atol=tol, rtol=0)
        torch.testing.assert_close(
            R[b, m[b]].double(), expected + torch.tensor(vb, dtype=torch.float64), atol=tol, rtol=0)
    assert (A[~m] == 0).all()
    assert (R[~m] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(before, (r, v, m)))
    full = torch.ones_like(m)
    assert all(
        torch.equal(a, b)
        for a, b in zip(gae_tokens(r, v, None, gamma, lam), gae_tokens(r, v, full, gamma, lam)))


def spread(x, m, left, right, hole, junk):
    "`x` and `m` with padding in front, behind and in the middle, filled with junk."
    at, pad = x.shape[1] // 2, lambda n, t, fill: torch.full((t.shape[0], n), fill, dtype=t.dtype)
    return [torch.cat([pad(left, t, fill), t[:, :at], pad(hole, t, fill), t[:, at:],
                       pad(right, t, fill)], 1) for t, fill in ((x, junk), (m, False))]


@given(seed=SEEDS, left=st.integers(0, 4), right=st.integers(0, 4), hole=st.integers(0, 4),
       junk=JUNK, gamma=UNIT, lam=UNIT, keep=KEEP)
def test_token_estimates_do_not_see_padding(seed, left, right, hole, junk, gamma, lam, keep):
    r, v, m, c = (normal(seed, (3, 6)), normal(seed + 1, (3, 6)),
                  random_mask(seed + 2, (3, 6), keep), normal(seed + 3, (3,)))
    (wide_r, wide_m), (wide_v, _) = (spread(r, m, left, right, hole, junk),
                                     spread(v, m, left, right, hole, junk))
    r, v = torch.where(m, r, junk), torch.where(m, v, junk)
    for narrow, wide in zip(
        gae_tokens(r, v, m, gamma, lam), gae_tokens(wide_r, wide_v, wide_m, gamma, lam)):
        assert torch.equal(narrow[m], wide[wide_m])
    narrow, wide = (reinforce_pp_advantage(r, m, gamma, c),
                    reinforce_pp_advantage(wide_r, wide_m, gamma, c))
    # the sums inside whiten run in another order
    torch.testing.assert_close(narrow[m], wide[wide_m], atol=1e-10, rtol=0)
    for f, x in ((lambda *x: gae_tokens(*x, wide_m, gamma, lam)[0].square(), (wide_r, wide_v)),
                 (lambda x: reinforce_pp_advantage(x, wide_m, gamma, c).square(), (wide_r,))):
        y, grads = value_and_grad(f, *x)
        assert y.isfinite().all()
        assert (y[~wide_m] == 0).all()
        assert all(g.isfinite().all() and (g[~wide_m] == 0).all() for g in grads)


@given(seed=SEEDS, keep=KEEP, gamma=UNIT)
def test_token_gae_at_lambda_one_is_the_return_less_the_value(seed, keep, gamma):
    r, v, m = normal(seed, (3, 7)), normal(seed + 1, (3, 7)), random_mask(seed + 2, (3, 7), keep)
    _, R = gae_tokens(r, v, m, gamma, 1.0)
    for b, (rb,) in enumerate(cut_together(m, r)):
        torch.testing.assert_close(
            R[b, m[b]], torch.tensor(return_sum(rb, [False] * len(rb), gamma), dtype=torch.float64),
            atol=1e-10, rtol=0)


@given(seed=SEEDS, gamma=UNIT, lam=UNIT)
def test_gradients_of_token_gae_equal_the_formula(seed, gamma, lam):
    m = random_mask(seed + 2, (1, 7), 0.7)
    r, v = normal(seed, (1, 7)), normal(seed + 1, (1, 7))
    by_r, by_v = [
        j[0, :, 0]
        for j
        in torch.autograd.functional.jacobian(lambda *x: gae_tokens(*x, m, gamma, lam)[0], (r, v))]
    place, w = m[0].nonzero().flatten().tolist(), torch.zeros(7, 7, dtype=torch.float64)
    expected_v = torch.zeros(7, 7, dtype=torch.float64)
    for i, t in enumerate(place):
        for j, k in enumerate(place):
            if j >= i: w[t, k] = (gamma * lam) ** (j - i)
            expected_v[t, k] = (-((gamma * lam) ** (j - i)) if j >= i else 0) + (
                gamma * (gamma * lam) ** (j - 1 - i) if j > i else 0)
    torch.testing.assert_close(by_r, w, atol=1e-12, rtol=0)
    torch.testing.assert_close(by_v, expected_v, atol=1e-12, rtol=0)


@given(seed=SEEDS, keep=KEEP, gamma=UNIT, lam=UNIT, value_lam=UNIT)
def test_two_lambdas_are_two_calls(seed, keep, gamma, lam, value_lam):
    r, v, m = normal(seed, (3, 7)), normal(seed + 1, (3, 7)), random_mask(seed + 2, (3, 7), keep)
    A, R = gae_tokens(r, v, m, gamma, lam, value_lam)
    assert torch.equal(A, gae_tokens(r, v, m, gamma, lam)[0])
    assert torch.equal(R, gae_tokens(r, v, m, gamma, value_lam)[1])
    own = torch.tensor([0.0, lam, 1.0], dtype=torch.float64)             # of each row
    A, R = gae_tokens(r, v, m, gamma, own, own.flip(0))
    for b in range(3):
        row = [t[b : b + 1] for t in (r, v, m)]
        torch.testing.assert_close(A[b], gae_tokens(*row, gamma, own[b].item())[0][0])
        torch.testing.assert_close(R[b], gae_tokens(*row, gamma, own[2 - b].item())[1][0])
    assert gae_tokens(r.float(), v.float(), m, gamma, own.float())[0].dtype == torch.float32


def test_lambda_grows_with_the_length():
    n = torch.tensor([0, 1, 20, 40, 2000])
    expected = [0.0, 0.0, 0.0, 0.5, 0.99]
    torch.testing.assert_close(length_adaptive_lambda(n), torch.tensor(expected))
    torch.testing.assert_close(length_adaptive_lambda(n.double(), 0.5)[2:], 1 - 2 / n[2:].double())
    lam = length_adaptive_lambda(torch.arange(1, 500).reshape(1, -1))
    assert lam.shape == (1, 499) and (lam.diff() >= 0).all() and (lam >= 0).all()
    for lengths in (torch.tensor([100.0, 700.0]), torch.tensor([60, 61])):  # sum: alpha n
        total = [sum(x**k for k in range(4000)) for x in length_adaptive_lambda(lengths).tolist()]
        assert total == pytest.approx((0.05 * lengths).tolist(), rel=1e-4)


# ---- groups

SPREADS = [scale for scale in GROUP_SCALES if scale != "mean"]

def plain_group(rows, scale, eps):
    flat = [x for row in rows for x in row]
    def std(xs):
        mean = math.fsum(xs) / len(xs)
        return math.sqrt(
            math.fsum((x - mean) ** 2 for x in xs) / (len(xs) - 1)) if len(xs) > 1 else 0.0
    out = []
    for row in rows:
        mean = math.fsum(row) / len(row)
        by = 1.0 if scale is None else (std(row) if scale == "std" else std(flat)) + eps
        out.append([(x - mean) / by for x in row])
    return out


@pytest.mark.parametrize("scale", SPREADS)
@given(seed=SEEDS, P=st.integers(1, 4), G=st.integers(1, 8), eps=st.sampled_from([1e-9, 1e-4, 0.5]),
       dtype=DTYPES)
def test_group_advantage_equals_plain_python(scale, seed, P, G, eps, dtype):
    r = normal(seed, (P, G), dtype)
    before = r.clone()
    A = group_advantage(r, scale, eps)
    assert A.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(r, before)
    torch.testing.assert_close(
        A.double(), torch.tensor(plain_group(r.double().tolist(), scale, eps), dtype=torch.float64),
        atol=1e-10 if dtype == torch.float64 else 1e-4, rtol=0)
    if G == 1: assert (A == 0).all()
    assert A.sum(1).abs().max() < 1e-4


@given(seed=SEEDS, P=st.integers(1, 4), G=st.integers(2, 8), dtype=DTYPES)
def test_rloo_leaves_one_out(seed, P, G, dtype):
    r = normal(seed, (P, G), dtype)
    A = rloo_advantage(r)
    expected = [[row[i] - math.fsum(row[:i] + row[i + 1:]) / (G - 1) for i in range(G)]
                for row in r.double().tolist()]
    assert A.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(A.double(), torch.tensor(expected, dtype=torch.float64),
                               atol=1e-10 if dtype == torch.float64 else 1e-5, rtol=0)


@given(value=st.floats(-1e6, 1e6, width=32), G=st.integers(1, 64),
       scale=st.sampled_from(SPREADS), eps=st.sampled_from([0.0, 1e-9, 1e-4]))
def test_a_group_of_equals_is_exactly_zero(value, G, scale, eps):
    r = torch.full((2, G), value)
    y, (grad,) = value_and_grad(lambda x: group_advantage(x, scale, eps)[0, :1], r)
    assert (group_advantage(r, scale, eps) == 0).all() and grad.isfinite().all()
    if G > 1: assert (rloo_advantage(r) == 0).all()


@given(seed=SEEDS, size=st.sampled_from([1e-30, 1e-12, 1e12, 1e30]),
       offset=st.sampled_from([0.0, 4096.0]), scale=st.sampled_from(["std", "batch"]))
def test_scaled_groups_are_blind_to_scale_and_shift(seed, size, offset, scale):
    r = normal(seed, (3, 5), torch.float32, 100).round()  # exact in float32, with the offset too
    r[:, 0] = r[:, 1:].amax(1) + 1                                      # no group of equals
    A = group_advantage(r, scale, 0.0)
    torch.testing.assert_close(group_advantage(r * size, scale, 0.0), A, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(group_advantage(r + offset, scale, 0.0), A, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rloo_advantage(r + offset), rloo_advantage(r), atol=1e-3, rtol=1e-4)


@given(seed=SEEDS, scale=st.sampled_from(SPREADS), P=st.integers(1, 3), G=st.integers(1, 5))
def test_gradients_of_groups_equal_autograd_of_the_formula(seed, scale, P, G):
    r, g = normal(seed, (P, G)), normal(seed + 1, (P, G))
    def textbook(x):
        centred = x - x.mean(1, keepdim=True)
        if scale is None or x.shape[1] == 1 and scale == "std" or x.numel() == 1: return centred * g
        return centred / ((x.std(1, keepdim=True) if scale == "std" else x.std()) + 1e-2) * g
    _, (grad,) = value_and_grad(lambda x: group_advantage(x, scale, 1e-2) * g, r)
    _, (expected,) = value_and_grad(textbook, r)
    torch.testing.assert_close(grad, expected, atol=1e-9, rtol=1e-9)
    if G > 1:
        _, (grad,) = value_and_grad(lambda x: rloo_advantage(x) * g, r)
        torch.testing.assert_close(
            grad, (g - g.mean(1, keepdim=True)) * G / (G - 1), atol=1e-10, rtol=0)


def test_the_gradient_at_a_group_of_equals():
    for eps in (1e-4, 0.3):
        jacobian = torch.autograd.functional.jacobian(
            lambda x: group_advantage(x[None], eps=eps)[0],
            torch.full((5,), 0.7, dtype=torch.float64))
        torch.testing.assert_close(jacobian, (torch.eye(5) - 1 / 5).double() / eps)


@settings(max_examples=20)
@given(seed=SEEDS, G=st.integers(2, 4))
def test_rloo_is_unbiased_and_dr_grpo_short_by_a_factor(seed, G):
    "Over all groups that can be drawn from three actions, each with its probability."
    logits, score = normal(seed, (3,)).requires_grad_(True), normal(seed + 1, (3,))
    true, = torch.autograd.grad(logits.softmax(0) @ score, logits)
    pi, drawn = (logits.softmax(0).detach(),
                 torch.tensor(list(itertools.product(range(3), repeat=G))))
    grad_logp = torch.eye(3, dtype=torch.float64)[drawn] - pi
    expected = lambda A: torch.einsum("p,pg,pgk->k", pi[drawn].prod(1), A, grad_logp) / G
    torch.testing.assert_close(expected(rloo_advantage(score[drawn])), true, atol=1e-12, rtol=0)
    torch.testing.assert_close(
        expected(group_advantage(score[drawn], None)), true * (G - 1) / G, atol=1e-12, rtol=0)


# ---- REINFORCE++

@given(seed=SEEDS, rows=st.integers(1, 4), width=st.integers(1, 7), keep=KEEP, gamma=UNIT,
       with_baseline=st.booleans(), dtype=DTYPES)
def test_reinforce_pp_equals_plain_python(seed, rows, width, keep, gamma, with_baseline, dtype):
    r, m, c = (normal(seed, (rows, width), dtype), random_mask(seed + 1, (rows, width), keep),
               normal(seed + 2, (rows,), dtype) if with_baseline else None)
    before = r.clone()
    A = reinforce_pp_advantage(r, m, gamma, c)
    assert A.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (A[~m] == 0).all()
    assert torch.equal(r, before)
    minus = c.double().tolist() if with_baseline else [0.0] * rows
    D = [x - minus[b] for b, (rb,) in enumerate(cut_together(m, r.double()))
         for x in return_sum(rb, [False] * len(rb), gamma)]
    mean = math.fsum(D) / max(len(D), 1)
    var = math.fsum((x - mean) ** 2 for x in D) / max(len(D), 1)
    expected = torch.tensor([(x - mean) / math.sqrt(var + 1e-8) for x in D], dtype=torch.float64)
    torch.testing.assert_close(
        A[m].double(), expected, atol=1e-7 if dtype == torch.float64 else 1e-3, rtol=1e-4)
    if m.all(): assert torch.equal(reinforce_pp_advantage(r, None, gamma, c), A)


@given(seed=SEEDS, P=st.integers(1, 3), G=st.integers(2, 4), T=st.integers(1, 5))
def test_with_the_score_on_the_last_token_the_baseline_version_is_dr_grpo_whitened(seed, P, G, T):
    scores, m = normal(seed, (P, G)), torch.ones(P * G, T, dtype=torch.bool)
    rewards = torch.zeros(P * G, T, dtype=torch.float64)
    rewards[:, -1] = scores.flatten()
    got = reinforce_pp_advantage(rewards, m, baseline=scores.mean(1).repeat_interleave(G))
    torch.testing.assert_close(
        got, whiten(group_advantage(scores, None).flatten()[:, None].expand(-1, T)), atol=1e-9,
        rtol=1e-9)


# ---- transforms and bad input

def calls():
    r, v, nv = (normal(i, (4, 6, 3)) for i in range(3))
    terminated, truncated, m, c = (random_mask(3, (4, 6, 3), 0.2), random_mask(4, (4, 6, 3), 0.2),
                                   random_mask(5, (4, 6, 3)), normal(6, (4, 6)))
    yield "returns", lambda r, d: discounted_returns(r, d, 0.9), (r, terminated)
    yield ("gae", lambda *x: torch.stack(gae(*x, 0.9, 0.8)),
           (r, v, nv, terminated, terminated | truncated))
    yield "gae_tokens", lambda *x: torch.stack(gae_tokens(*x, 0.9, 0.8)), (r, v, m)
    for scale in GROUP_SCALES:
        yield f"group {scale}", lambda r, scale=scale: group_advantage(r, scale), (r,)
    yield "rloo", rloo_advantage, (r,)
    yield "reinforce_pp", lambda r, m, c: reinforce_pp_advantage(r, m, 0.9, c), (r, m, c)


@pytest.mark.parametrize("f, batch", [c[1:] for c in calls()], ids=[c[0] for c in calls()])
def test_is_one_graph_for_the_compiler(f, batch):
    one = [x[0] for x in batch]
    torch.testing.assert_close(torch.compile(f, backend="eager", fullgraph=True)(*one), f(*one))


@pytest.mark.parametrize("f, batch", [c[1:] for c in calls()], ids=[c[0] for c in calls()])
def test_works_under_vmap(f, batch):
    torch.testing.assert_close(
        torch.func.vmap(f)(*batch), torch.stack([f(*one) for one in zip(*batch)]))
    g = lambda *x: f(*x).square().sum()
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(g))(*batch),
                               torch.stack([torch.func.grad(g)(*one) for one in zip(*batch)]))
    flags_shared = tuple(0 if x.is_floating_point() else None for x in batch)  # one mask for all
    if None in flags_shared:
        shared = [x if d == 0 else x[0] for x, d in zip(batch, flags_shared)]
        torch.testing.assert_close(
            torch.func.vmap(f, in_dims=flags_shared)(*shared),
            torch.stack([f(*[x[i] if d == 0 else x for x, d in zip(shared, flags_shared)])
                         for i in range(4)]))


B, F = torch.zeros(4, 2, dtype=torch.bool), torch.zeros(4, 2)


@pytest.mark.parametrize("call, error, words", [
    (lambda: accumulate([1.0], torch.zeros(1)), TypeError, "x must be a torch.Tensor, got list"),
    (lambda: accumulate(torch.zeros(2), torch.zeros(3)), ValueError,
     r"decay must have the shape of x, \(2,\)|decay must have .*T = 2"),
    (lambda: gae(F, F, F, B.float(), B), TypeError,
     r"terminated must be boolean \(True = it ended\), got torch.float32; terminated.bool\(\) is"),
    (lambda: gae(F, F, F, B, B.long()), TypeError, "done must be boolean .*, got torch.int64"),
    (lambda: gae(F, F, F, B, None), TypeError, "done must be a torch.Tensor, got NoneType"),
    (lambda: gae(F * 1j, F, F, B, B), TypeError, "rewards must be real, got torch.complex64"),
    (lambda: gae(F, F.tolist(), F, B, B), TypeError, "values must be a torch.Tensor, got list"),
    (lambda: gae(F, F, F.long(), B, B), TypeError, "next_values must have a floating-point dtype"),
    (lambda: gae(F, F[:3], F, B, B), ValueError,
     r"values must have the shape of rewards, \(4, 2\), got \(3, 2\)"),
    (lambda: gae(F, F, F[:, :1], B, B), ValueError, r"next_values must have the shape of rewards"),
    (lambda: gae(F, F, F, B[0], B), ValueError,
     r"terminated must have the shape of rewards, \(4, 2\), got \(2,\)"),
    (lambda: gae(F, F, F, B, B[0]), ValueError, r"done must have the shape of rewards"),
    (lambda: gae(F[0, 0], F, F, B, B), ValueError,
     r"rewards must have the shape \(T, \.\.\.\), got \(\)"),
    (lambda: gae(F, F, F, B, B.to("meta")), ValueError,
     "done must be on the device of rewards, cpu, got meta"),
    (lambda: gae(F, F, F, B, B, gamma=1.1), ValueError, r"gamma must be in \[0, 1\], got 1.1"),
    (lambda: gae(F, F, F, B, B, lam=-0.1), ValueError, r"lam must be in \[0, 1\], got -0.1"),
    (lambda: gae(F, F, F, B, B, lam=torch.tensor(0.5)), TypeError,
     "lam must be a number, got Tensor"),
    (lambda: discounted_returns(F, B.float(), 0.9), TypeError, "done must be boolean"),
    (lambda: discounted_returns(F, B[:2], 0.9), ValueError, "done must have the shape of rewards"),
    (lambda: discounted_returns(F, B, math.nan), ValueError, "gamma must be in"),
    (lambda: discounted_returns(F * 1j, B, 0.9), TypeError, "rewards must be real"),
    (lambda: gae_tokens(F[0], F[0]), ValueError,
     r"rewards must have the shape \(B, T\), got \(2,\)"),
    (lambda: gae_tokens(F, F[:1]), ValueError, "values must have the shape of rewards"),
    (lambda: gae_tokens(F, F, B.float()), TypeError, "mask must be boolean"),
    (lambda: gae_tokens(F, F, B[:1]), ValueError, "mask must have the shape of rewards"),
    (lambda: gae_tokens(F, F, B, gamma="1"), TypeError, "gamma must be a number, got str"),
    (lambda: gae_tokens(F, F, B, lam=2), ValueError, "lam must be in"),
    (lambda: gae_tokens(F, F.long()), TypeError, "values must have a floating-point dtype"),
    (lambda: group_advantage(F[0]), ValueError,
     r"rewards must have the shape \(P, G\), got \(2,\)"),
    (lambda: group_advantage(F, "group"), ValueError,
     "scale must be one of 'std', 'batch', 'mean', None, got 'group'"),
    (lambda: group_advantage(F, eps=-1e-4), ValueError, "eps must be in"),
    (lambda: group_advantage(F + 1j), TypeError, "rewards must be real, got torch.complex64"),
    (lambda: group_advantage(F, mask=F), TypeError, "mask must be boolean"),
    (lambda: rloo_advantage(F, B[:1]), ValueError, "mask must have the shape of rewards"),
    (lambda: rloo_advantage(F[:, :1]), ValueError,
     r"rewards must have at least 2 responses .* got shape \(4, 1\)"),
    (lambda: rloo_advantage(F[0]), ValueError, r"rewards must have the shape \(P, G\), got \(2,\)"),
    (lambda: reinforce_pp_advantage(F[0]), ValueError,
     r"token_rewards must have the shape \(B, T\), got \(2,\)"),
    (lambda: reinforce_pp_advantage(F, B.long()), TypeError, "mask must be boolean"),
    (lambda: reinforce_pp_advantage(F, B[:1]), ValueError,
     "mask must have the shape of token_rewards"),
    (lambda: reinforce_pp_advantage(F, baseline=F), ValueError,
     r"baseline must have the shape \(B\), got \(4, 2\)"),
    (lambda: reinforce_pp_advantage(F, baseline=F[0]), ValueError,
     r"baseline must have the shape \(B\) with B = 4, as token_rewards has, got \(2,\)"),
    (lambda: reinforce_pp_advantage(F, baseline=0.5), TypeError,
     "baseline must be a torch.Tensor, got float"),
    (lambda: reinforce_pp_advantage(F, gamma=2.0), ValueError, "gamma must be in"),
    (lambda: reinforce_pp_advantage(F * 1j), TypeError, "token_rewards must be real"),
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("scale", GROUP_SCALES)
@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0, 0)])
def test_no_prompts_and_no_answers(shape, scale):
    assert group_advantage(torch.empty(shape), scale).shape == shape


@pytest.mark.parametrize(
    "f",
    [group_advantage, lambda r, mask=None: group_advantage(r, None, mask=mask), rloo_advantage])
@given(seed=SEEDS, P=st.integers(1, 4), G=st.integers(2, 6), keep=KEEP)
def test_a_masked_response_is_not_in_its_group(f, seed, P, G, keep):
    r, m = normal(seed, (P, G)), random_mask(seed + 1, (P, G), keep)
    A, (grad,) = value_and_grad(lambda r: f(r, mask=m).square(), torch.where(m, r, math.nan))
    A = f(torch.where(m, r, math.nan), mask=m)
    assert (A[~m] == 0).all() and (grad[~m] == 0).all() and grad.isfinite().all()
    for row, alone, counts in zip(A, r, m):
        if counts.sum() > 1: torch.testing.assert_close(row[counts], f(alone[counts][None])[0])
        else: assert (row == 0).all()


@given(seed=SEEDS, keep=KEEP)
def test_batch_scale_is_that_of_what_counts(seed, keep):
    r, m = normal(seed, (3, 5)), random_mask(seed + 1, (3, 5), keep)
    A = group_advantage(torch.where(m, r, math.nan), "batch", mask=m)
    if m.sum() > 1:
        torch.testing.assert_close(A, group_advantage(r, None, mask=m) / (r[m].std() + 1e-4))
    else: assert (A == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_counts_and_is_no_number_stays_visible(bad):
    r = torch.tensor([[1.0, 0.0, bad, 2.0], [0.5, 0.25, 0.75, 1.0]])
    for f in (group_advantage, lambda r: group_advantage(r, None), rloo_advantage):
        assert f(r)[0].isnan().all() and torch.equal(f(r)[1:], f(r[1:]))
    assert group_advantage(r, "batch").isnan().all()


def test_rewards_may_be_integers_or_booleans():
    r = torch.tensor([[1, 0, 0, 1], [3, 2, 0, 0]])
    for f in (group_advantage, lambda r: group_advantage(r, "batch"), rloo_advantage):
        assert torch.equal(f(r), f(r.float())) and torch.equal(f(r > 0), f((r > 0).float()))


@given(seed=SEEDS, P=st.integers(1, 3), G=st.integers(1, 5), eps=st.sampled_from([0.0, 1e-4]))
def test_division_by_the_mean_equals_the_loop(seed, P, G, eps):
    r = random_mask(seed, (P, G)).long()
    expected = [[(x - sum(row) / G) / (sum(row) / G + eps) if any(row) else 0.0 for x in row]
                for row in r.tolist()]
    got = group_advantage(r, "mean", eps)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("G", [2, 4])
def test_maxrl_climbs_pass_at_k(G):
    "The expected update of divided groups is the gradient of sum_k pass@k / k, k < G (eq. 5)."
    logits = normal(3, (3,)).requires_grad_(True)
    right = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    pi = logits.softmax(0).detach()
    drawn = torch.tensor(list(itertools.product(range(3), repeat=G)))
    slope = torch.eye(3, dtype=torch.float64)[drawn] - pi
    A = group_advantage(right[drawn], "mean", eps=0.0)
    update = torch.einsum("p,pg,pgk->k", pi[drawn].prod(1), A, slope) / G
    p = logits.softmax(0) @ right
    climbed = sum((1 - (1 - p) ** k) / k for k in range(1, G))
    torch.testing.assert_close(update, torch.autograd.grad(climbed, logits)[0])


@pytest.mark.parametrize("call, error, words", [
    (lambda r: gae_tokens(r, r, lam=1.5), ValueError, r"lam must be in \[0, 1\], got 1.5"),
    (lambda r: gae_tokens(r, r, value_lam=-1), ValueError,
     r"value_lam must be in \[0, 1\], got -1"),
    (lambda r: gae_tokens(r, r, lam=torch.ones(4)), ValueError,
     r"lam must be a number or have the shape \(B,\), got \(4,\)"),
    (lambda r: length_adaptive_lambda(5), TypeError, "lengths must be a torch.Tensor, got int"),
    (lambda r: length_adaptive_lambda(r, 0.0), ValueError, "alpha must be in"),
])
def test_bad_lambdas_are_named(call, error, words):
    with pytest.raises(error, match=words): call(torch.ones(2, 3))


# ---- several rewards

# ---- several rewards

def spread_out(xs, eps):
    "(x - mean) / (std + eps), the standard deviation unbiased."
    mean = math.fsum(xs) / len(xs)
    var = math.fsum((x - mean) ** 2 for x in xs) / (len(xs) - 1) if len(xs) > 1 else 0.0
    return [(x - mean) / (math.sqrt(var) + eps) if var else 0.0 for x in xs]


@given(seed=SEEDS, P=st.integers(1, 3), G=st.integers(2, 5), R=st.integers(1, 3),
       weighted=st.booleans(), eps=st.sampled_from([1e-4, 0.1]), dtype=DTYPES)
def test_several_rewards_equal_the_loop(seed, P, G, R, weighted, eps, dtype):
    r, w = normal(seed, (P, G, R), dtype), normal(seed + 1, (R,)).abs().to(dtype)
    before, total = r.clone(), []
    for group in r.double().tolist():
        each = [spread_out(list(column), eps) for column in zip(*group)]
        weights = w.tolist() if weighted else [1.0] * R
        total += [sum(k * a[i] for k, a in zip(weights, each)) for i in range(G)]
    got = multi_reward_advantage(r, w if weighted else None, eps)
    assert got.shape == (P, G) and got.dtype == as_float(dtype) and torch.equal(r, before)
    expected = torch.tensor(spread_out(total, eps), dtype=torch.float64).view(P, G)
    exact = dtype == torch.float64
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-9 if exact else 2e-3)


def test_several_rewards_by_hand():
    answer = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    style = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    both = group_advantage(answer + style)
    torch.testing.assert_close(both[0], both[1], rtol=1e-3, atol=0)  # the sum is blind to it
    A = multi_reward_advantage(torch.stack([answer, style], -1), eps=0.0)
    S = torch.tensor([[1.5, -0.5, -0.5, -0.5], [3.0, -1.0, -1.0, -1.0]])
    torch.testing.assert_close(A, (S - S.mean()) / S.std())
    scaled = torch.stack([1000 * answer, style], -1)
    torch.testing.assert_close(multi_reward_advantage(scaled, eps=0.0), A)
    assert torch.equal(multi_reward_advantage(scaled), multi_reward_advantage(scaled, None, 1e-4))
    assert (multi_reward_advantage(torch.full((2, 4, 3), 0.9)) == 0).all()
    whole = multi_reward_advantage(torch.stack([answer, style], -1).long(), eps=0.0)
    assert torch.equal(whole, A)  # integer rewards too


@given(seed=SEEDS, keep=st.sampled_from([0.0, 0.6, 1.0]), junk=JUNK)
def test_a_masked_response_has_no_rewards(seed, keep, junk):
    r, m = normal(seed, (3, 4, 2)), random_mask(seed + 1, (3, 4), keep)
    f = lambda r: multi_reward_advantage(r, mask=m)
    clean, (slope,) = value_and_grad(lambda r: f(r) ** 2, torch.where(m[..., None], r, 0.0))
    dirty, (grad,) = value_and_grad(lambda r: f(r) ** 2, torch.where(m[..., None], r, junk))
    assert torch.equal(clean, dirty) and torch.equal(slope, grad) and (grad[~m] == 0).all()
    assert (f(r)[~m] == 0).all()
    if m.all(): assert torch.equal(f(r), multi_reward_advantage(r))


@pytest.mark.parametrize("call, error, words", [
    (lambda r: multi_reward_advantage(r[..., 0]), ValueError,
     r"rewards must have the shape \(P, G, R\)"),
    (lambda r: multi_reward_advantage(r, torch.ones(3)), ValueError,
     "weights must have a number for each of the 2 rewards, got 3"),
    (lambda r: multi_reward_advantage(r, [1.0]), ValueError, "weights must have a number for each"),
    (lambda r: multi_reward_advantage(r, torch.ones(2, 1)), ValueError, "weights must have the sh"),
    (lambda r: multi_reward_advantage(r, ["1", 2.0]), TypeError, "weights must be a number, got s"),
    (lambda r: multi_reward_advantage(r, [math.nan, 1.0]), ValueError, "weights must be in"),
    (lambda r: multi_reward_advantage(r, dict(a=1.0)), TypeError, "weights must be a number"),
    (lambda r: multi_reward_advantage(r, eps=-1.0), ValueError, "eps must be in"),
    (lambda r: multi_reward_advantage(r, mask=torch.ones(2).bool()), ValueError, "mask must have"),
    (lambda r: multi_reward_advantage(r, mask=torch.ones(2, 3, 1).bool()), ValueError,
     r"mask must have the shape of rewards, \(2, 3, 2\), got \(2, 3, 1\)"),
    (lambda r: multi_reward_advantage(r, mask=torch.ones(3, 2).bool()), ValueError, "with P = 2"),
])
def test_bad_rewards_are_named(call, error, words):
    with pytest.raises(error, match=words): call(torch.ones(2, 3, 2))


def test_a_reward_that_was_not_given_enters_nothing():
    "Numbers of TRL's normalize_then_sum, which counts NaN away: nanmean, nanstd, nansum."
    nan = math.nan
    first = torch.tensor([[1.0, 0.0, nan, nan], [1.0, 0.0, 1.0, 0.0]])
    second = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0]])
    r = torch.stack([first, second], -1)
    A = multi_reward_advantage(r, mask=~r.isnan())
    expected = torch.tensor([-0.208, 0.208, 1.133, -1.133])
    torch.testing.assert_close(A[0], expected, rtol=0, atol=1e-3)
    assert multi_reward_advantage(r).isnan().all()  # where nothing says so, nothing is left out


@given(seed=SEEDS, keep=st.sampled_from([0.0, 0.5, 0.9, 1.0]), junk=JUNK,
       weights=st.sampled_from([None, [2.0, -1.0], (1, 0.5)]))
def test_masked_parts_equal_the_loop(seed, keep, junk, weights):
    r, m = normal(seed, (3, 4, 2)), random_mask(seed + 1, (3, 4, 2), keep)
    f = lambda r: multi_reward_advantage(r, weights, mask=m)
    total, given = [], m.any(-1).flatten().tolist()
    for group, counts in zip(r.tolist(), m.tolist()):
        sums = [0.0] * 4
        for k in range(2):
            at = [i for i in range(4) if counts[i][k]]
            w = 1.0 if weights is None else weights[k]
            for i, a in zip(at, spread_out([group[i][k] for i in at], 1e-4) if at else ()):
                sums[i] += w * a
        total += sums
    some = [x for x, g in zip(total, given) if g]
    spread = iter(spread_out(some, 1e-4) if some else ())
    expected = torch.tensor([next(spread) if g else 0.0 for g in given], dtype=torch.float64)
    torch.testing.assert_close(f(r).flatten(), expected, rtol=0, atol=1e-7)
    clean, (slope,) = value_and_grad(lambda r: f(r) ** 2, torch.where(m, r, 0.0))
    dirty, (grad,) = value_and_grad(lambda r: f(r) ** 2, torch.where(m, r, junk))
    assert torch.equal(clean, dirty) and torch.equal(slope, grad) and (grad[~m] == 0).all()
    both = m.any(-1)
    whole = multi_reward_advantage(r, weights, mask=both[..., None].expand_as(m))
    assert torch.equal(whole, multi_reward_advantage(r, weights, mask=both))
    if weights: assert torch.equal(f(r), multi_reward_advantage(r, torch.tensor(weights), mask=m))


def test_no_prompts_no_responses_no_rewards():
    for shape in ((0, 4, 2), (3, 0, 2), (3, 4, 0)):
        for mask in (None, torch.ones(shape).bool(), torch.ones(shape[:2]).bool()):
            A = multi_reward_advantage(torch.ones(shape), mask=mask)
            assert A.shape == shape[:2] and (A == 0).all()


# ---- rewards of any sign divided by the mean

@given(seed=SEEDS, shift=st.sampled_from([-10.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 10.0]),
       eps=st.sampled_from([0.0, 1e-9, 1e-4]), keep=st.sampled_from([0.6, 1.0]), dtype=DTYPES)
def test_the_mean_as_divisor_keeps_the_order_and_a_bound(seed, shift, eps, keep, dtype):
    r, m = (normal(seed, (3, 6)) + shift).to(dtype), random_mask(seed + 1, (3, 6), keep)
    A = group_advantage(r, "mean", eps, m)
    plain = group_advantage(r, None, mask=m)
    assert (A.sign() == plain.sign()).all() and A.abs().max() <= 6
    positive = r.abs()
    size = (positive.double() * m).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(A.double(), plain.double() / (size + eps + 1e-300), rtol=2e-3,
                               atol=1e-6)


def test_negative_rewards_teach_what_positive_ones_do():
    A = group_advantage(torch.tensor([[-2.0, -1.0, -1.0, 0.0]]), "mean", 0.0)
    assert A.tolist() == [[-1.0, 0.0, 0.0, 1.0]]
    A = group_advantage(torch.tensor([[1.0, -1.0002]]), "mean", 0.0)
    torch.testing.assert_close(A, torch.tensor([[1.0, -1.0]]), rtol=1e-3, atol=0)
    assert group_advantage(torch.tensor([[math.nan, 1.0]]), "mean").isnan().all()


# ---- lambda as a tensor

@pytest.mark.parametrize("name", ["lam", "value_lam"])
@pytest.mark.parametrize("lam, error, words", [
    ([7.0, -3.0], ValueError, r"must be in \[0, 1\], got 7"),
    ([0.5, -1e-7], ValueError, r"must be in \[0, 1\], got -1e-07"),
    ([math.nan, 0.5], ValueError, r"must be in \[0, 1\], got nan"),
    ([0.5, math.inf], ValueError, r"must be in \[0, 1\], got inf"),
    ([1, 0], TypeError, "must have a floating-point dtype, got torch.int64"),
    ([True, False], TypeError, "must have a floating-point dtype, got torch.bool"),
    ([0.5j, 0.5j], TypeError, "must have a floating-point dtype, got torch.complex64"),
])
def test_a_lambda_of_each_row_is_held_to_the_rule_of_a_number(name, lam, error, words):
    r = torch.ones(2, 5)
    with pytest.raises(error, match=f"^{name} {words}"):
        gae_tokens(r, r, **{name: torch.tensor(lam)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_lambda_in_half_precision_is_widened(dtype):
    r, v = torch.full((2, 200), 3.0), torch.zeros(2, 200)
    lam = torch.tensor([0.95, 0.37]).to(dtype)
    for how in (dict(lam=lam), dict(lam=0.9, value_lam=lam)):
        wide = {k: x.float() if isinstance(x, torch.Tensor) else x for k, x in how.items()}
        for a, b in zip(gae_tokens(r, v, gamma=0.99, **how), gae_tokens(r, v, gamma=0.99, **wide)):
            assert a.dtype == torch.float32 and torch.equal(a, b)


# ---- tangents

def tangent(f, *inputs):
    "The derivative of f in a direction, by dual numbers."
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, normal(i, x.shape, x.dtype)) for i, x in enumerate(inputs)]
        out = f(*duals)
        parts = [forward_ad.unpack_dual(y).tangent for y in (out if type(out) is tuple else [out])]
    assert None not in parts, "the tangent is lost"
    return parts


@pytest.mark.parametrize("name", ["accumulate", "gae", "gae_tokens", "discounted_returns",
                                  "reinforce_pp_advantage"])
def test_no_tangent_is_lost_behind_the_door(name):
    x, y, z = (normal(seed, (40, 50)) for seed in (10, 11, 12))
    done, m = random_mask(13, (40, 50), 0.1), random_mask(14, (40, 50), 0.8)
    f, inputs = {
        "accumulate": (accumulate, (x, y.sigmoid())),
        "gae": (lambda *t: gae(*t, done, done), (x, y, z)),
        "gae_tokens": (lambda *t: gae_tokens(*t, m, 0.9, value_lam=1.0), (x, y)),
        "discounted_returns": (lambda t: discounted_returns(t, done, 0.9), (x,)),
        "reinforce_pp_advantage": (lambda t: reinforce_pp_advantage(t, m), (x,)),
    }[name]
    ours = tangent(f, *inputs)
    with fast.off(): plain = tangent(f, *inputs)
    torch.testing.assert_close(ours, plain)
    step = 1e-6  # and by differences
    moved = [t + step * normal(i, t.shape) for i, t in enumerate(inputs)]
    a, b = f(*moved), f(*inputs)
    for slope, new, old in zip(ours, *((a, b) if type(a) is tuple else ((a,), (b,)))):
        torch.testing.assert_close(slope, (new - old) / step, rtol=1e-3, atol=1e-3)
