"The constants of guards by their values: a number on each side of them."
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from mpmath import mp, mpf

from rlhf_notes import RewardNorm, explained_variance, kl_estimate, whiten
from rlhf_notes.training.statistics import bootstrap_interval

SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])


@pytest.mark.parametrize("size", [1.0, 1e-19, 1e-25])
def test_advantages_of_any_size_are_whitened_without_eps(size):
    torch.testing.assert_close(whiten(SIGNS * size, eps=0), SIGNS)


@pytest.mark.parametrize("roundings, explained", [(4, 0.0), (16, 1.0)])
def test_returns_that_differ_by_rounding_are_constant(roundings, explained):
    returns = 1 + roundings * torch.finfo(torch.float64).eps * SIGNS.double()
    assert explained_variance(returns, returns) == explained


@pytest.mark.parametrize("spread, taken", [(2e-12, True), (5e-13, False)])
def test_rewards_that_differ_by_rounding_have_no_deviation(spread, taken):
    rewards = 1 + spread * SIGNS.double()
    with nullcontext() if taken else pytest.raises(ValueError): RewardNorm().fit(rewards)


@pytest.mark.parametrize("d", [-0.45, -0.2, -0.05, 0.05, 0.2, 0.45])
def test_k3_is_exact_where_its_series_ends(d):
    with mp.workdps(40):
        exact = float(mp.expm1(-mpf(d)) + mpf(d))
    zero = torch.zeros((), dtype=torch.float64)
    assert kl_estimate(zero + d, zero, "k3").item() == pytest.approx(exact, 2e-14, 0)


def test_a_bootstrap_leaves_two_and_a_half_percent_on_each_side():
    x = np.random.default_rng(1).normal(size=400)
    ends = np.array(bootstrap_interval(x)) - x.mean()
    # 1.96 deviations, but for what the resamples are off by chance
    assert ends / (x.std() / 20) == pytest.approx([-2.004, 1.963], abs=0.01)
