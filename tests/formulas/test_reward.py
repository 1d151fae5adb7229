import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    DTYPES,
    JUNK,
    SEEDS,
    masked,
    normal,
    random_mask,
    shapes,
    value_and_grad,
    values,
)

from rlhf_notes.formulas.reward import (
    PENALTY_MODES,
    RewardNorm,
    apply_penalty,
    overlong_penalty,
    token_rewards,
    truncate_at_stop,
)

ROWS, WIDTH = st.integers(1, 5), st.integers(1, 7)


def as_float(dtype): return torch.float64 if dtype == torch.float64 else torch.float32
def indices(seed, n, high):
    return torch.randint(high, (n,), generator=torch.Generator().manual_seed(seed))


# ---- normalisation

@given(seed=SEEDS, n=st.integers(3, 50), dtype=DTYPES, offset=st.sampled_from([0.0, -3.0, 1e3]),
       mean=st.floats(-5, 5), std=st.floats(0.1, 5))
def test_norm_gives_the_mean_and_std_asked_for(seed, n, dtype, offset, mean, std):
    raw = (torch.cat([normal(seed, (n,)), torch.tensor([2., -2.], dtype=torch.float64)]) * 8
           + offset).to(dtype)
    norm = RewardNorm(gain=-3.0, bias=50.0)
    assert norm.fit(raw, mean, std) is norm
    wide = raw.double()
    got = norm.gain * wide + norm.bias
    assert math.isclose(got.mean(), mean, abs_tol=1e-9)
    assert math.isclose(got.std(correction=0), std, rel_tol=1e-9)
    assert norm.gain > 0
    out = norm(raw)
    assert out.dtype == as_float(dtype)
    torch.testing.assert_close(out.double(), got, atol=1e-3, rtol=1e-4)
    gain, bias = norm.gain, norm.bias
    norm.fit(raw, mean, std)
    # raw rewards in, so fitting again changes nothing
    assert (norm.gain, norm.bias) == (gain, bias)


def test_norm_defaults_calls_and_checkpoints():
    r = torch.tensor([[1., -2.], [0., 5.]], requires_grad=True)
    assert torch.equal(RewardNorm()(r), r)
    out = RewardNorm(2.0, 3.0)(r)
    assert out.tolist() == [[5, -1], [3, 13]]
    assert (torch.autograd.grad(out.sum(), r)[0] == 2).all()
    a, b = RewardNorm().fit(torch.tensor([1., 2., 4.])), RewardNorm()
    assert abs(a(torch.tensor([1., 2., 4.])).mean()) < 1e-6
    assert abs(a(torch.tensor([1., 2., 4.])).std(correction=0) - 1) < 1e-6
    b.load_state_dict(a.state_dict())
    assert (a.gain, a.bias) == (b.gain, b.bias) and set(a.state_dict()) == {"gain", "bias"}
    a.fit(torch.tensor([1., 2., 4.]), np.float64(0.5), np.float64(2))
    # a checkpoint that holds a number of NumPy's cannot be read
    assert {type(x) for x in a.state_dict().values()} == {float}


@pytest.mark.parametrize(
    "rewards",
    [torch.full((7,), 0.1), torch.full((3, 3), 1e6), torch.zeros(4), torch.tensor(2.0),
     torch.empty(0),
     torch.full((999,), 1 / 3, dtype=torch.float64),
     torch.tensor([1e200, 3e200], dtype=torch.float64), torch.tensor([1.0, math.inf])])
def test_norm_refuses_rewards_without_a_spread(rewards):
    norm = RewardNorm(2.0, 3.0)
    with pytest.raises(ValueError, match="rewards must be finite and not all equal, got"):
        norm.fit(rewards)
    assert (norm.gain, norm.bias) == (2, 3)


# ---- one reward for each token

@given(seed=SEEDS, rows=ROWS, width=WIDTH, dtype=DTYPES, beta=st.sampled_from([0.0, 0.15, 2.0]),
       side=st.sampled_from(["right", "left", "holes", "full", None]))
def test_token_rewards_equal_the_loops(seed, rows, width, dtype, beta, side):
    scores, logp, ref = (normal(seed, (rows,), dtype), normal(seed + 1, (rows, width), dtype),
                         normal(seed + 2, (rows, width), dtype))
    lengths = indices(seed, rows, width + 1)[:, None]
    mask = {"right": torch.arange(width) < lengths, "left": torch.arange(width) >= lengths,
            "holes": random_mask(seed, (rows, width)),
            "full": torch.ones(rows, width, dtype=torch.bool), None: None}[side]
    before = [t.clone() for t in (scores, logp, ref)]
    rewards, penalty = token_rewards(scores, logp, ref, beta, mask)
    assert all(torch.equal(a, b) for a, b in zip(before, (scores, logp, ref)))
    assert rewards.dtype == penalty.dtype == as_float(dtype)
    assert rewards.shape == penalty.shape == logp.shape
    for i in range(rows):
        real = [t for t in range(width) if mask is None or mask[i, t]]
        for t in range(width):
            kl = beta * (ref[i, t].item() - logp[i, t].item()) if t in real else 0.0
            assert math.isclose(penalty[i, t], kl, rel_tol=1e-5, abs_tol=1e-5)
            assert math.isclose(
                rewards[i, t], kl + (scores[i].item() if real and t == real[-1] else 0.0),
                rel_tol=1e-5, abs_tol=1e-5)
    if mask is not None: assert (rewards[~mask] == 0).all() and (penalty[~mask] == 0).all()


@given(seed=SEEDS, rows=ROWS, width=WIDTH, junk=JUNK)
def test_token_rewards_do_not_leak(seed, rows, width, junk):
    scores, logp, ref, mask = (normal(seed, (rows,)), normal(seed + 1, (rows, width)),
                               normal(seed + 2, (rows, width)),
                               random_mask(seed + 3, (rows, width), 0.4))
    clean = token_rewards(scores, logp, ref, 0.3, mask)
    dirty = token_rewards(torch.where(mask.any(1), scores, junk), torch.where(mask, logp, junk),
                          torch.where(mask, ref, -junk), 0.3, mask)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty))


def test_token_rewards_are_data():
    tensors = [torch.randn(s, requires_grad=True) for s in ((2,), (2, 3), (2, 3))]
    assert not any(t.requires_grad for t in token_rewards(*tensors, 0.1))


@given(seed=SEEDS)
def test_token_rewards_do_not_depend_on_padding(seed):
    scores, logp, ref, mask = (normal(seed, (3,)), normal(seed + 1, (3, 5)),
                               normal(seed + 2, (3, 5)), random_mask(seed + 3, (3, 5)))
    zeros, no = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.bool)
    for order in (lambda a, b: torch.cat([a, b], 1), lambda a, b: torch.cat([b, a], 1)):
        wide = token_rewards(
            scores, order(logp, zeros * math.nan), order(ref, zeros), 0.3, order(mask, no))
        for w, narrow in zip(wide, token_rewards(scores, logp, ref, 0.3, mask)):
            assert torch.equal(w, order(narrow, zeros))


# ---- the end of an answer

@given(
    seed=SEEDS, rows=ROWS, width=WIDTH, after=st.integers(0, 9),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.uint8]), pad=st.sampled_from([0, 2, 9]),
    stop=st.sampled_from([2, [2], (0, 3), [], torch.tensor([3, 2, 2]),
                          torch.tensor([1], dtype=torch.int32), 300, [-1, 2]]))
def test_truncation_equals_the_loop(seed, rows, width, after, dtype, pad, stop):
    tokens = indices(seed, rows * width, 4).reshape(rows, width).to(dtype)
    before = tokens.clone()
    cut, mask, found = truncate_at_stop(tokens, stop, pad, after)
    ends = [stop] if isinstance(stop, int) else [int(s) for s in stop]
    assert torch.equal(tokens, before)
    assert cut.dtype == dtype
    assert mask.dtype == found.dtype == torch.bool
    for i, row in enumerate(tokens.tolist()):
        stops = [t for t in range(width) if t >= after and row[t] in ends]
        end = stops[0] + 1 if stops else width
        assert cut[i].tolist() == row[:end] + [pad] * (width - end)
        assert mask[i].tolist() == [t < end for t in range(width)] and found[i] == bool(stops)


def test_truncation_default_and_empty():
    assert truncate_at_stop(torch.tensor([[2, 1, 2]]), 2, 0)[0].tolist() == [[2, 0, 0]]
    tokens, mask, found = truncate_at_stop(torch.empty(2, 0, dtype=torch.int64), 2, 0)
    assert tokens.shape == mask.shape == (2, 0) and found.tolist() == [False, False]


# ---- penalties

@given(xv=masked(), penalty=st.floats(-5, 5, width=16), mode=st.sampled_from(PENALTY_MODES))
def test_penalty_equals_the_loop(xv, penalty, mode):
    scores, valid = xv
    before = scores.clone()
    got = apply_penalty(scores, valid, penalty, mode)
    expected = [s if v else (penalty if mode == "replace" else s - abs(penalty))
                for s, v in zip(scores.double().flatten().tolist(), valid.flatten().tolist())]
    assert got.dtype == as_float(scores.dtype) and torch.equal(scores, before)
    torch.testing.assert_close(
        got.double().flatten(), torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-6)


def test_penalty_defaults_gradient_and_leaks():
    s, valid = torch.tensor([3., math.nan, 2.]), torch.tensor([True, False, False])
    value, (grad,) = value_and_grad(lambda t: apply_penalty(t, valid), s)
    assert value.tolist() == [3, -1, -1] and grad.tolist() == [1, 0, 0]
    assert apply_penalty(s, valid, 4.0)[2] == 4  # a replaced score may be anything
    value, (grad,) = value_and_grad(
        lambda t: apply_penalty(t, valid, mode="subtract"), torch.tensor([3., 1., 2.]))
    assert value.tolist() == [3, 0, 1] and grad.tolist() == [1, 1, 1]


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=8),
       max_length=st.integers(1, 200), data=st.data(),
       dtype=st.sampled_from([torch.int64, torch.int32, torch.float32, torch.float64]))
def test_overlong_penalty_equals_the_three_cases(lengths, max_length, data, dtype):
    buffer = data.draw(st.integers(1, max_length))
    got = overlong_penalty(torch.tensor(lengths, dtype=dtype), max_length, buffer)
    expected = [0 if n <= max_length - buffer else -1 if n > max_length
                else (max_length - buffer - n) / buffer for n in lengths]
    assert got.dtype == as_float(dtype)
    torch.testing.assert_close(
        got.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-6)


def test_overlong_gradient():
    _, (grad,) = value_and_grad(
        lambda n: overlong_penalty(n, 100, 20), torch.tensor([10., 79.5, 80.5, 99.5, 100.5, 1e6]))
    torch.testing.assert_close(grad, torch.tensor([0., 0., -0.05, -0.05, 0., 0.]))


# ---- all of them

def test_works_under_vmap():
    scores, logp, ref, mask = (normal(0, (4, 3)), normal(1, (4, 3, 5)), normal(2, (4, 3, 5)),
                               random_mask(3, (4, 3, 5)))
    tokens = indices(0, 60, 4).reshape(4, 3, 5)
    for f, args in [
        (lambda *a: token_rewards(*a[:3], 0.2, a[3]), (scores, logp, ref, mask)),
        (lambda t: truncate_at_stop(t, [2, 3], 9, 1), (tokens,)),
        (lambda s, v: apply_penalty(s, v), (logp, mask)),
        (lambda n: overlong_penalty(n, 3, 2), (tokens,)),
        (RewardNorm(2.0, 1.0), (scores,)),
    ]:
        together, apart = torch.func.vmap(f)(*args), [f(*row) for row in zip(*args)]
        if isinstance(together, torch.Tensor): together, apart = (together,), [(a,) for a in apart]
        for k, t in enumerate(together):
            torch.testing.assert_close(t, torch.stack([a[k] for a in apart]))


R, B, L = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
S, YES = torch.zeros(2), torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize("call, error, words", [
    (lambda: RewardNorm("1"), TypeError, "gain must be a number"),
    (lambda: RewardNorm(1.0, math.inf), ValueError, "bias must be in"),
    (lambda: RewardNorm().fit([1., 2.]), TypeError, "rewards must be a torch.Tensor, got list"),
    (lambda: RewardNorm().fit(torch.tensor([1., math.inf])), ValueError, "rewards must be finite"),
    (lambda: RewardNorm().fit(torch.tensor([1., 2.]), std=0.0), ValueError, "std must be in"),
    (lambda: RewardNorm().fit(torch.tensor([1., 2.]), mean=math.nan), ValueError,
     "mean must be in"),
    (lambda: RewardNorm()(3.0), TypeError, "r must be a torch.Tensor"),
    (lambda: RewardNorm().load_state_dict({"gain": 1.0}), ValueError,
     "state must be a dict with the keys 'gain' and 'bias'"),
    (lambda: token_rewards(R, R, R, 0.1), ValueError,
     r"scores must have the shape \(B\), got \(2, 3\)"),
    (lambda: token_rewards(S, R, R[:1], 0.1), ValueError, "logp_ref must have the shape of logp"),
    (lambda: token_rewards(S, R[0], R[0], 0.1), ValueError, r"logp must have the shape \(B, T\)"),
    (lambda: token_rewards(S, R, R, -0.1), ValueError, "kl_coef must be in"),
    (lambda: token_rewards(S, R, R, torch.tensor(0.1)), TypeError, "kl_coef must be a number"),
    (lambda: token_rewards(S, R, R, 0.1, R), TypeError, "mask must be boolean"),
    (lambda: token_rewards(S, R, R, 0.1, YES), ValueError, "mask must have the shape of logp"),
    (lambda: token_rewards(S * 1j, R, R, 0.1), TypeError, "scores must be real"),
    (lambda: truncate_at_stop(R, 1, 0), TypeError, "tokens must have an integer dtype"),
    (lambda: truncate_at_stop(L[0], 1, 0), ValueError,
     r"tokens must have the shape \(B, T\), got \(3,\)"),
    (lambda: truncate_at_stop(L, 1.0, 0), TypeError, "stop_token must be an integer, got 1.0"),
    (lambda: truncate_at_stop(L, [1, "2"], 0), TypeError, "stop_token must be a number, got str"),
    (lambda: truncate_at_stop(L, [True], 0), TypeError, "stop_token must be a number, got bool"),
    (lambda: truncate_at_stop(L, None, 0), TypeError, "stop_token must be a number, got NoneType"),
    (lambda: truncate_at_stop(L, 10**30, 0), ValueError, "stop_token must be in"),
    (lambda: truncate_at_stop(L, torch.tensor([1.]), 0), TypeError,
     "stop_token must have an integer dtype"),
    (lambda: truncate_at_stop(L, torch.tensor(1), 0), ValueError,
     r"stop_token must have the shape \(K\), got \(\)"),
    (lambda: truncate_at_stop(L, 1, None), TypeError, "pad_token must be a number, got NoneType"),
    (lambda: truncate_at_stop(L.to(torch.uint8), 1, 300), ValueError,
     "pad_token must fit in torch.uint8, got 300"),
    (lambda: truncate_at_stop(L, 1, 0, -1), ValueError, "after must be in"),
    (lambda: truncate_at_stop(L, 1, 0, 1.5), TypeError, "^after must be an integer, got 1.5"),
    (lambda: truncate_at_stop(L, 1, 0, True), TypeError, "^after must be a number, got bool"),
    (lambda: apply_penalty(S, S), TypeError, "valid must be boolean .* got torch.float32"),
    (lambda: apply_penalty(S, [True, False]), TypeError, "valid must be a torch.Tensor, got list"),
    (lambda: apply_penalty(S, YES[:1]), ValueError, "valid must have the shape of scores"),
    (lambda: apply_penalty(S, YES, mode="add"), ValueError,
     "mode must be one of 'replace', 'subtract', got 'add'"),
    (lambda: apply_penalty(S, YES, float("inf"), "subtract"), ValueError,
     r"penalty must be in \(-inf, inf\), got inf"),
    (lambda: apply_penalty(S, YES, math.nan), ValueError, "penalty must be in"),
    (lambda: overlong_penalty(3, 10, 2), TypeError, "lengths must be a torch.Tensor, got int"),
    (lambda: overlong_penalty(B, 10, 0), ValueError, "buffer must be in"),
    (lambda: overlong_penalty(B, 10, 11), ValueError,
     "buffer must be at most max_length = 10, got 11"),
    (lambda: overlong_penalty(B, 0, 1), ValueError, "max_length must be in"),
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_price_of_zero_asks_for_nothing(sign):
    logp, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-math.inf, -3.0]])
    if sign < 0: logp, ref = ref, logp
    for mask in (None, torch.tensor([[True, True]])):
        rewards, penalty = token_rewards(torch.tensor([5.0]), logp, ref, 0.0, mask)
        assert rewards.tolist() == [[0, 5]] and penalty.tolist() == [[0, 0]]
    assert token_rewards(torch.tensor([5.0]), logp, ref, 0.1)[0][0, 0] == -sign * math.inf
