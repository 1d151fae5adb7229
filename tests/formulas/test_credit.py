"""The advantage of a turn, and what the environment's tokens teach."""
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, JUNK, SEEDS, normal, random_mask, value_and_grad

from rlhf_notes.formulas.credit import TURN_BASELINES, observation_loss, turn_advantage

F64 = torch.float64


def close(got, expected, **kw):
    expected = torch.as_tensor(expected, dtype=got.dtype)
    torch.testing.assert_close(got, expected, **({"rtol": 1e-9, "atol": 1e-12} | kw))


def dialogues(seed, P=2, G=3, K=4, dtype=F64):
    "Rewards, and which turns were reached: the first, and those before one that was."
    turns = torch.randint(1, K + 1, (P, G, 1), generator=torch.Generator().manual_seed(seed))
    return normal(seed, (P, G, K), dtype), torch.arange(K) < turns


def by_loops(rewards, reached, baseline, mask):
    P, G, K = rewards.shape
    out = torch.zeros(P, G, K, dtype=F64)
    for p, i, k in itertools.product(range(P), range(G), range(K)):
        def to_go(j): return sum(float(rewards[p, j, n]) for n in range(k, K) if reached[p, j, n])
        if not (reached[p, i, k] and mask[p, i]): continue
        group = [j for j in range(G) if mask[p, j] and (baseline == "mean" or j != i)]
        mean = sum(map(to_go, group)) / len(group) if group else to_go(i)
        out[p, i, k] = to_go(i) - (mean if baseline else 0)
    return out


@given(seed=SEEDS, P=st.integers(1, 3), G=st.integers(2, 4), K=st.integers(1, 4), dtype=DTYPES,
       baseline=st.sampled_from(TURN_BASELINES), keep=st.sampled_from([0.0, 0.6, 1.0]))
def test_each_turn_equals_the_loop(seed, P, G, K, dtype, baseline, keep):
    rewards, reached = dialogues(seed, P, G, K, dtype)
    mask, before = random_mask(seed, (P, G), keep), rewards.clone()
    got = turn_advantage(rewards, reached, baseline, mask)
    assert got.dtype == (F64 if dtype == F64 else torch.float32)
    close(got.double(), by_loops(rewards, reached, baseline, mask),
          atol=1e-12 if dtype == F64 else 1e-5)
    if mask.all(): assert torch.equal(got, turn_advantage(rewards, reached, baseline))
    assert torch.equal(rewards, before) and not got[~reached].any()


@given(seed=SEEDS, junk=JUNK, baseline=st.sampled_from(TURN_BASELINES))
def test_what_was_not_reached_does_not_leak(seed, junk, baseline):
    rewards, reached = dialogues(seed)
    mask = random_mask(seed, (2, 3))
    f = lambda r: turn_advantage(r, reached, baseline, mask)
    clean, dirty = (value_and_grad(f, rewards.masked_fill(~(reached & mask[..., None]), x))
                    for x in (0.0, junk))
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1][0], dirty[1][0])


@pytest.mark.parametrize("G", [2, 4, 8])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.8])
def test_the_gradient_of_going_on_by_enumeration(G, p):
    goes = torch.tensor([*itertools.product([0.0, 1.0], repeat=G)], dtype=F64)
    weight = (p ** goes * (1 - p) ** (1 - goes)).prod(1)
    rewards = torch.stack([0 * goes, goes], 2)
    reached = torch.stack([goes >= 0, goes > 0], 2)
    def slope(baseline):
        A = turn_advantage(rewards, reached, baseline)[..., 0]
        return (weight * (A * (goes - p)).mean(1)).sum().item()
    true = p * (1 - p)
    assert slope("leave-one-out") == pytest.approx(true) == slope(None)
    assert slope("mean") == pytest.approx((G - 1) / G * true)


def test_vmap_of_turns():
    rewards, reached = (torch.stack(x) for x in zip(*(dialogues(s) for s in range(3))))
    torch.testing.assert_close(torch.func.vmap(turn_advantage)(rewards, reached),
                               torch.stack([*map(turn_advantage, rewards, reached)]))


@given(seed=SEEDS, junk=JUNK, keep=st.sampled_from([0.0, 0.5, 1.0]), dtype=DTYPES)
def test_the_loss_of_observations(seed, junk, keep, dtype):
    logp, m = normal(seed, (3, 4), dtype), random_mask(seed + 1, (3, 4), keep)
    x = torch.where(m, logp.double(), junk).to(dtype)
    loss, (grad,) = value_and_grad(lambda x: observation_loss(x, m, 0.05), x)
    n = max(int(m.sum()), 1)
    close(loss.double(), -0.05 * logp[m].double().sum() / n, rtol=1e-3, atol=1e-6)
    close(grad.double(), -0.05 * m / n, rtol=1e-2)
    assert loss.dtype == (F64 if dtype == F64 else torch.float32)


@pytest.mark.parametrize("call, error, words", [
    (lambda r, m: turn_advantage(r, m, "median"), ValueError,
     "baseline must be one of 'leave-one-out', 'mean', None, got 'median'"),
    (lambda r, m: turn_advantage(r, m.float()), TypeError, "reached must be boolean"),
    (lambda r, m: turn_advantage(r[0], m[0]), ValueError, r"rewards must have the shape \(P, G, K"),
    (lambda r, m: turn_advantage(r, m[:, :2]), ValueError, "reached must have the shape"),
    (lambda r, m: turn_advantage(r, m, mask=m[0]), ValueError, "mask must have the shape"),
    (lambda r, m: turn_advantage(r[:, :1], m[:, :1]), ValueError, "at least 2 responses"),
    (lambda r, m: observation_loss(r, m, -1.0), ValueError, r"coef must be in \[0, inf\), got -1"),
    (lambda r, m: observation_loss(r, m.long(), 1.0), TypeError, "observation_mask must be bool"),
    (lambda r, m: observation_loss(r, m[0], 1.0), ValueError, "observation_mask must have"),
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words): call(*dialogues(0))


def test_by_hand():
    rewards = torch.tensor([[[0.0, 1.0], [2.0, 9.0], [1.0, 3.0]]])
    reached = torch.tensor([[[True, True], [True, False], [True, True]]])
    assert turn_advantage(rewards, reached).tolist() == [[[-2, -0.5], [-0.5, 0], [2.5, 2.5]]]
    mean = turn_advantage(rewards, reached, "mean")
    close(mean, [[[-4 / 3, -1 / 3], [-1 / 3, 0], [5 / 3, 5 / 3]]], rtol=1e-6)
    left = torch.tensor([[True, False, True]])  # the second has no score
    assert turn_advantage(rewards, reached, mask=left).tolist() == [[[-3, -2], [0, 0], [3, 2]]]
