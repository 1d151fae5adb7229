import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_frontier import best_of_n_win, measure_best_of_n

from rlhf_notes.language.rollout import rollout_stats
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.reviews.pipeline import evaluate
from rlhf_notes.studies.variants import best_of_n, best_of_n_kl, measure, prepare

SMALL = dict(device="cpu", sft_steps=4, sft_batch=8, labels=16, norm_samples=16, batch=16,
             iterations=2, eval_responses=12)


@pytest.fixture(scope="module")
def start(): return prepare(ReviewsConfig(seed=1, **SMALL))


@given(N=st.integers(1, 6), seed=st.integers(0, 10**6), data=st.data())
def test_best_of_n_is_the_mean_over_all_subsets(N, seed, data):
    n, g = data.draw(st.integers(1, N)), torch.Generator().manual_seed(seed)
    proxy, true = torch.randn(3, N, generator=g), torch.randn(3, N, generator=g)
    for row in range(3):
        by_hand = [true[row, max(subset, key=lambda i: proxy[row, i])].item()
                   for subset in itertools.combinations(range(N), n)]
        assert best_of_n(proxy, true, n)[row].item() == pytest.approx(
            sum(by_hand) / len(by_hand), abs=1e-6)


@given(N=st.integers(2, 6), seed=st.integers(0, 10**6), data=st.data())
def test_its_wins_are_over_all_that_could_not_be_chosen(N, seed, data):
    n, g = data.draw(st.integers(1, N - 1)), torch.Generator().manual_seed(seed)
    # with ties
    proxy, true = torch.randn(3, N, generator=g), torch.randint(3, (3, N), generator=g).float()
    for row in range(3):
        by_hand = []
        for subset in itertools.combinations(range(N), n):
            best = true[row, max(subset, key=lambda i: proxy[row, i])].item()
            by_hand += [(best > x) + 0.5 * (best == x) for i, x in enumerate(true[row].tolist())
                        if i not in subset]
        assert best_of_n_win(proxy, true, n)[row].item() == pytest.approx(
            sum(by_hand) / len(by_hand), abs=1e-9)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 15])
def test_the_best_of_n_alike_wins_n_times_of_n_and_one(n):
    x = torch.rand(50, 16, generator=torch.Generator().manual_seed(n))
    # whatever the scores are: of n + 1 answers each is as likely the best
    torch.testing.assert_close(
        best_of_n_win(x, x, n), torch.full((50,), n / (n + 1), dtype=torch.float64))
    assert best_of_n_win(x, -x, n).mean() == pytest.approx(1 / (n + 1))
    # large binomials
    assert best_of_n_win(
        torch.arange(256.0), torch.arange(256.0), 128).item() == pytest.approx(128 / 129)


def test_best_of_n_at_its_ends():
    proxy, true = torch.tensor([[0.3, 0.1, 0.2]]), torch.tensor([[5.0, 7.0, 12.0]])
    assert best_of_n(proxy, true, 1).item() == 8 and best_of_n(proxy, true, 3).item() == 5
    assert best_of_n(torch.rand(256), torch.ones(256), 256).item() == 1  # large binomials
    for n in (0, 4):
        with pytest.raises(ValueError, match="n must be in"): best_of_n(proxy, true, n)
    with pytest.raises(ValueError, match="true"): best_of_n(proxy, true[:, :2], 1)


@given(n=st.integers(1, 10**6))
def test_the_bound_on_its_kl(n):
    """KL of the best of n from one, where no two answers are alike: the log-density n q^(n-1) of
    its quantile q, integrated.
    """
    assert best_of_n_kl(n) == pytest.approx(math.log(n) - 1 + 1 / n, abs=1e-9)
    assert best_of_n_kl(n) >= 0
    with pytest.raises(ValueError, match="n must be in"): best_of_n_kl(0)


def test_the_bound_by_integration():
    q = (torch.arange(10**6, dtype=torch.float64) + 0.5) / 10**6
    for n in (2, 5, 16):
        assert ((n * q ** (n - 1) * torch.log(n * q ** (n - 1))).mean().item()
                == pytest.approx(best_of_n_kl(n), abs=1e-4))


def test_trainings_begin_alike_and_leave_the_start_alone(start):
    before = {name: x.clone() for name, x in start.lm.state_dict().items()}
    a, b = start.trainer(kl_coef=0.0), start.trainer(kl_coef=0.5, algo="rloo")
    assert (
        a.config.kl_coef, b.config.kl_coef, b.config.algo, a.config.seed) == (0.0, 0.5, "rloo", 1)
    for trainer in (a, b):
        while trainer.iteration < trainer.iterations: trainer.iterate()
        assert not torch.equal(trainer.policy.lm.lm_head.weight, before["lm_head.weight"])
    assert all(torch.equal(x, before[name]) for name, x in start.lm.state_dict().items())


def test_prepare_is_the_beginning_of_a_training():
    "The same two stages, the same numbers as `train`'s."
    from rlhf_notes.reviews.pipeline import Training
    config = ReviewsConfig(seed=1, **SMALL)
    training, start = Training(config), prepare(config)
    while training.name != "rl": training.iterate()
    assert all(torch.equal(x, y) for x, y in zip(training.lm.parameters(), start.lm.parameters()))
    assert all(
        torch.equal(x, y)
        for x, y
        in zip(training.learned["reward_model"].parameters(), start.reward_model.parameters()))
    assert training.learned["norm"].state_dict() == start.norm.state_dict()


def test_measure(start):
    trainer = start.trainer()
    itself = measure(trainer)
    assert list(itself) == ["proxy", "true", "kl", "valid", "win"] and abs(itself["kl"]) < 1e-5
    trainer.iterate()
    after, e = measure(trainer), evaluate(trainer)
    assert after["true"] == pytest.approx(e.true.mean().item())
    assert after["proxy"] == pytest.approx(rollout_stats(e.rollout)["score"].item())
    assert after["kl"] != 0
    gain = (e.true - evaluate(trainer, trainer.reference).true).sign()
    assert 0.5 != after["win"] == pytest.approx((gain.mean().item() + 1) / 2)
    assert measure(trainer, start.lm) == measure(start.trainer(), start.lm)


def test_measure_best_of_n(start):
    rows = measure_best_of_n(start.trainer(), (1, 2, 6), 6)
    assert list(rows) == [1, 2, 6] and rows[1]["win"] == 0.5 and rows[1]["kl"] == 0
    assert rows[1]["proxy"] < rows[2]["proxy"] < rows[6]["proxy"]
    alone = [evaluate(start.trainer(), start.lm, seed=seed) for seed in range(6)]
    assert rows[1]["true"] == pytest.approx(
        torch.stack([e.true for e in alone]).mean().item(), abs=1e-5)
    whole = [*alone, evaluate(start.trainer(), start.lm, seed=6)]
    proxy, true = (torch.stack([f(e) for e in whole], 1)
                   for f in (lambda e: e.rollout.scores, lambda e: e.true))
    assert rows[6]["win"] == pytest.approx(best_of_n_win(proxy, true, 6).mean().item())
    assert rows[6]["proxy"] == pytest.approx(
        torch.stack([e.rollout.scores for e in alone]).amax(0).mean().item(), abs=1e-5)
