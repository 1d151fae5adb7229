import math

import pytest
import torch
from preferences import METHODS, best_of_n_curve, curve, selection_kl

from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.reviews.pipeline import evaluate
from rlhf_notes.reviews.task import HELD_OUT
from rlhf_notes.studies.variants import best_of_n_kl, prepare

@pytest.fixture(scope="module")
def start():
    return prepare(ReviewsConfig(device="cpu", sft_steps=5, labels=16, rm_batch=8, norm_samples=16,
                              batch=16, minibatches=2, iterations=4, eval_responses=12, seed=2))


def exact_kl(p, worth, n):
    "KL of the best of n, from the probabilities of all choices: `worth` has no ties."
    order = worth.argsort()
    below = torch.cat([torch.zeros(1), p[order].cumsum(0)]).double() ** n
    best = below.diff()
    return (best * (best / p[order]).log()).sum().item()


@pytest.mark.parametrize("n", [1, 2, 5])
def test_selection_kl_is_that_of_a_small_world(n):
    p, worth, g = (torch.tensor([0.5, 0.2, 0.2, 0.1]), torch.tensor([0.0, 2.0, 1.0, 3.0]),
                   torch.Generator().manual_seed(0))
    drawn = torch.multinomial(p.expand(4000, 4), 64, True, generator=g)
    found = selection_kl(worth[drawn], p.log()[drawn], n).mean().item()
    assert found == pytest.approx(exact_kl(p, worth, n), abs=0.03)
    assert found < best_of_n_kl(n) + 0.03


def test_selection_kl_of_responses_that_are_never_alike_is_the_bound():
    g = torch.Generator().manual_seed(0)
    for n in (2, 8, 32):
        assert selection_kl(torch.randn(20, 256, generator=g), torch.full((20, 256), -40.0),
                            n).mean().item() == pytest.approx(best_of_n_kl(n), abs=0.05)
    with pytest.raises(ValueError, match=r"n must be in \[1, 4\]"):
        selection_kl(torch.randn(4), torch.zeros(4), 5)


@pytest.mark.parametrize("method", ["PPO", "RLOO", "DPO"])
def test_a_curve_is_measured_alike_for_all(start, method):
    before = [p.clone() for p in start.lm.parameters()]
    rows = list(curve(start, method, every=2))
    assert [r["step"] for r in rows] == [2, 4]
    assert set(rows[0]) == {"step", "proxy", "true", "kl", "valid", "win"}
    assert all(math.isfinite(x) for r in rows for x in r.values())
    assert rows[1]["kl"] > 0.001
    assert rows[0] != rows[1]
    assert all(torch.equal(a, b) for a, b in zip(before, start.lm.parameters()))


def test_methods_are_their_algorithms(start, monkeypatch):
    seen = []
    monkeypatch.setattr(
        type(start), "trainer",
        lambda self, _f=type(start).trainer, **c: seen.append(c.get("algo")) or _f(self, **c))
    for method in METHODS: next(curve(start, method, every=1))
    assert [a for a in seen if a] == ["ppo", "grpo", "rloo"]


def test_best_of_n(start):
    rows = list(best_of_n_curve(start, rounds=8, ns=(1, 2, 4)))
    assert [r["step"] for r in rows] == [1, 2, 4] and rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows[0]["proxy"] < rows[1]["proxy"] < rows[2]["proxy"]
    look = start.trainer(eval_responses=len(HELD_OUT))
    seen = [evaluate(look, start.lm, seed=seed) for seed in range(8)]
    assert rows[0]["true"] == pytest.approx(
        torch.stack([e.true for e in seen]).mean().item(), abs=1e-5)
    by_hand = torch.stack([e.rollout.scores for e in seen], 1)
    assert rows[0]["proxy"] == pytest.approx(by_hand.mean().item(), abs=1e-5)
    assert rows[0]["valid"] == pytest.approx(
        torch.stack([e.rollout.has_end.float() for e in seen]).mean().item())
