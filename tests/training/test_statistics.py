import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_notes.training.statistics import (
    bootstrap_interval,
    mean_interval,
    paired_interval,
    wilson_interval,
)

def every_resample(values, statistic):
    """The exact bootstrap: the statistic of each of the n ** n resamples, in order; as a function
    that reads off a quantile.
    """
    results = sorted(statistic(sample) for sample in product(values, repeat=len(values)))
    return lambda q: results[min(max(int(q * len(results)), 0), len(results) - 1)]


@pytest.mark.parametrize("statistic, by_hand",
                         [("mean", lambda v: sum(v) / len(v)),
                          ("median",
                           lambda v: sorted(v)[len(v) // 2] if len(v) % 2
                           else sum(sorted(v)[len(v) // 2 - 1:len(v) // 2 + 1]) / 2)])
@pytest.mark.parametrize(
    "values", [[0.0, 1.0], [3.0, 1.0, 2.0], [5.0, -1.0, 0.0, 7.5], [1.9, 2.1, 1.8, 2.4, 6.0]])
def test_interval_is_that_of_all_resamples(values, statistic, by_hand):
    exact = every_resample(values, by_hand)
    for end, q in zip(bootstrap_interval(values, 100_000, statistic), (0.025, 0.975)):
        assert exact(q - 0.01) - 1e-9 <= end <= exact(q + 0.01) + 1e-9


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8),
       statistic=st.sampled_from(["mean", "median"]))
def test_interval_properties(values, statistic):
    low, high = bootstrap_interval(values, 500, statistic)
    assert (low, high) == bootstrap_interval(
        values, 500, statistic), "the same numbers, the same interval"
    assert type(low) is type(high) is float
    assert min(values) - 1e-6 <= low <= high <= max(values) + 1e-6
    assert bootstrap_interval([2 * v for v in values], 500, statistic) == pytest.approx(
        (2 * low, 2 * high), rel=1e-9, abs=1e-9)
    if len(values) == 1: assert low == high == pytest.approx(values[0])


def test_interval_leaves_numpys_generator_alone_and_covers_the_mean():
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()
    rng = np.random.default_rng(5)
    covered = np.mean(
        [low <= 4 <= high
         for low, high
         in (bootstrap_interval(4 + rng.standard_normal(30), resamples=500) for _ in range(400))])
    assert 0.88 < covered < 0.98 and np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize("bad, error, words", [
    (dict(values=[]), ValueError, r"values must be finite numbers, at least one, got \[\]"),
    (dict(values=[1.0, math.nan]), ValueError, "values must be finite"),
    (dict(values=[math.inf]), ValueError, "values must be finite"),
    (dict(values=[None]), ValueError, "values must be finite"),
    (dict(values=["a"]), ValueError, "values must be finite"),
    (dict(values=[[1.0], [2.0]]), ValueError, "values must be finite"),
    (dict(values=3.0), ValueError, "values must be finite"),
    (dict(values=[1.0], resamples=0), ValueError, "resamples must be in"),
    (dict(values=[1.0], statistic="mode"), ValueError, "statistic must be one of 'mean', 'median'"),
])
def test_interval_refuses(bad, error, words):
    with pytest.raises(error, match=words): bootstrap_interval(**bad)


@pytest.mark.parametrize(
    "count, total", [(0, 1), (1, 1), (0, 20), (1, 20), (7, 20), (20, 20), (3, 1000)])
def test_ends_of_a_share_are_the_shares_that_are_just_no_surprise(count, total):
    low, high = wilson_interval(count, total)
    assert type(low) is type(high) is float and 0 <= low <= count / total <= high <= 1
    for p in (low, high):
        assert abs(count / total - p) == pytest.approx(
            1.959964 * math.sqrt(p * (1 - p) / total), rel=1e-5, abs=1e-7)
    assert wilson_interval(total - count, total) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_none_of_twenty_by_hand():
    assert wilson_interval(0, 20) == pytest.approx((0, 3.841459 / 23.841459), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("bad, error, words", [
    (dict(count=-1, total=5), ValueError, r"count must be in \[0, inf\), got -1"),
    (dict(count=6, total=5), ValueError, "count must be at most total = 5, got 6"),
    (dict(count=0, total=0), ValueError, r"total must be in \[1, inf\), got 0"),
    (dict(count=0.5, total=5), TypeError, "count must be an integer, got 0.5"),
    (dict(count=1, total=5.0), TypeError, "total must be an integer"),
    (dict(count=True, total=5), TypeError, "count must be a number"),
])
def test_share_refuses(bad, error, words):
    with pytest.raises(error, match=words): wilson_interval(**bad)


@pytest.mark.parametrize("n, t", [(2, 12.706205), (3, 4.302653), (5, 2.776445), (10, 2.262157),
                                  (20, 2.093024), (100, 1.984217)])  # tables of Student's t
def test_a_difference_has_students_interval(n, t):
    rng = np.random.default_rng(n)
    a, b = rng.standard_normal(n) + 3, rng.standard_normal(n)
    mean, low, high = paired_interval(list(a), b)
    d = a - b
    half = t * math.sqrt(((d - d.mean()) ** 2).sum() / (n - 1) / n)
    assert (mean, low, high) == pytest.approx((d.mean(), d.mean() - half, d.mean() + half), 1e-6)
    assert paired_interval(b, a) == pytest.approx((-mean, -high, -low), 1e-12)
    assert paired_interval(a, a) == (0, 0, 0)
    assert mean_interval(list(d)) == (mean, low, high)


@pytest.mark.parametrize("a, b, words", [
    ([1.0], [2.0], "a must be finite numbers, at least two, got"),
    ([1.0, 2.0], [1.0, math.inf], "b must be finite numbers, at least two, got"),
    ([1.0, 2.0], [1.0, 2.0, 3.0], "b must have a number for each of the 2 in a, got 3")])
def test_a_pair_that_is_none_is_named(a, b, words):
    with pytest.raises(ValueError, match=f"^{words}"): paired_interval(a, b)


@pytest.mark.parametrize("bad", [[], [1.0], [1.0, math.nan], [[1.0, 2.0]], ["1", "2"]])
def test_a_mean_takes_two_finite_numbers(bad):
    with pytest.raises(ValueError, match="^values must be finite numbers, at least two, got"):
        mean_interval(bad)
