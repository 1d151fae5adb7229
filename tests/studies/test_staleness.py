import copy
import math

import pytest
import staleness_reviews
import torch
from jobs import RESULTS, names_of

from rlhf_notes.language.model import head_log_probs, response_states
from rlhf_notes.language.sampling import sample
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.reviews.pipeline import evaluate
from rlhf_notes.studies.checkable import make_questions, pretrain
from rlhf_notes.studies.variants import measure, prepare

LESSON = names_of(RESULTS.parent / "48_staleness.ipynb", "imports", "corrections", "samplers",
                  "stale-loop", "stale-rlhf", "stale-reviews", "gradient-error")
CORRECTIONS, SAMPLERS, gradient_error, stale_reviews, stale_rlhf = (LESSON[name] for name in (
    "CORRECTIONS", "SAMPLERS", "gradient_error", "stale_reviews", "stale_rlhf"))
SMALL = dict(batch=16, iterations=4, minibatches=2, seed=1)
TINY = dict(sft_steps=4, sft_batch=8, labels=16, norm_samples=16, batch=16, eval_responses=12)
ONE = torch.ones(1, 3, dtype=torch.bool)


@pytest.fixture(scope="module")
def questions(): return make_questions(60)


@pytest.fixture(scope="module")
def lm(questions): return pretrain(questions, seed=1, steps=3)


@pytest.fixture(scope="module")
def start(): return prepare(ReviewsConfig(seed=1, device="cpu", iterations=3, **TINY))


def odd(prompts, responses, solution):
    "A reward with spread in every group."
    return [i % 2 for i in range(len(responses))]


def slope(name, logp, old, mu, A, mask=ONE):
    "Minus the gradient of each token's log pi, times the tokens that count: its weight times A."
    x = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    old, mu = (torch.tensor([y], dtype=torch.float64) for y in (old, mu))
    loss, _ = CORRECTIONS[name](x, old, mu, torch.full_like(old, A), mask)
    return [-g * mask.sum().item() for g in torch.autograd.grad(loss, x)[0][0].tolist()]


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("A", [1.5, -0.5])
def test_on_fresh_data_all_gradients_are_one(name, A):
    logp, mask = [-0.3, -1.0, -2.0], torch.tensor([[True, True, False]])
    assert slope(name, logp, logp, logp, A, mask) == pytest.approx([A, A, 0])


OLD, MU = [-1.0, -1.0, -1.0], [-1.0 - math.log(3), -1.0, -1.0 + math.log(4)]  # rho: 3, 1, 1/4


@pytest.mark.parametrize("name, A, weights", [
    ("nothing", 1, [1, 1, 1]),
    ("clip", 1, [0, 1, 0.25]), ("clip", -1, [3, 1, 0]),
    ("DPPO", 1, [0, 1, 0.25]), ("DPPO", -1, [3, 1, 0]),  # e^-1 (1 - 1/3) = 0.25 is beyond 0.2
    ("CISPO", 1, [3, 1, 0.25]),
    ("M2PO", 1, [0, 1, 0.25]), ("M2PO", -1, [3, 1, 0]),
    ("decoupled PPO", 1, [3, 1, 0.25]),
    ("token TIS", 1, [2, 1, 0.25]),
    ("IcePop", 1, [3, 1, 0]),
    ("sequence TIS", 1, [0.75] * 3),
    ("rejection", 1, [0, 0, 0]),
])
def test_weights_by_hand(name, A, weights):
    assert slope(name, OLD, OLD, MU, A) == pytest.approx([A * w for w in weights])


def test_m2po_keeps_what_is_near_on_average_beyond_any_clip():
    mu = [x - math.log(r) for x, r in zip(OLD, (1.25, 1.1, 1.0))]  # squares .0498, .0091: .0294
    assert slope("M2PO", OLD, OLD, mu, 1) == pytest.approx([1.25, 1.1, 1])
    assert slope("clip", OLD, OLD, mu, 1) == pytest.approx([0, 1.1, 1])
    mu[0] = OLD[0] - math.log(1.4)  # .0613 on average
    assert slope("M2PO", OLD, OLD, mu, 1) == pytest.approx([0, 1.1, 1])


def test_rejection_keeps_what_is_near():
    mu = [-1.2, -1.1, -0.9]  # k3 of it is at most 0.02
    assert slope("rejection", OLD, OLD, mu, 1) == pytest.approx([1, 1, 1])


def test_the_sequence_mask_leaves_out_bad_responses_that_the_policy_has_left():
    far = [x + 0.6 for x in OLD]
    assert slope("sequence mask", OLD, OLD, far, -1) == [0, 0, 0]
    assert slope("sequence mask", OLD, OLD, far, 1) == pytest.approx([math.exp(-0.6)] * 3)
    near = [x + 0.15 for x in OLD]
    assert slope("sequence mask", OLD, OLD, near, -1) == pytest.approx([-math.exp(-0.15)] * 3)


def test_log_ratio_squared_is_a_pull_back_to_the_sampler():
    mask = torch.tensor([[True, True, False]])
    pull = 0.1 * sum(o - m for o, m in zip(OLD[:2], MU[:2]))
    expected = [2 - pull] * 2 + [0]
    assert slope("log-ratio squared", OLD, OLD, MU, 2, mask) == pytest.approx(expected)


def test_age_is_in_iterations(lm, questions):
    trainer, seen = stale_rlhf(lm, questions, age=2, reward=odd, **SMALL), []
    for i in range(4):
        seen.append(copy.deepcopy(trainer.policy.lm).state_dict())
        trainer.iterate()
        wrote, expected = trainer.loop.stale.versions[0].state_dict(), seen[max(0, i - 2)]
        assert all(torch.equal(x, expected[name]) for name, x in wrote.items())
        kl = (trainer.rollout.logp - trainer.rollout.logp_ref)[trainer.rollout.response_mask]
        assert (kl.abs().max() < 1e-5) == (i == 0)
    assert len(trainer.loop.stale.versions) == 3


def test_a_mixture_is_of_four_versions(lm, questions):
    trainer, seen = stale_rlhf(lm, questions, age=6, sampler="mixture", reward=odd,
                              **SMALL | dict(iterations=7)), []
    for _ in range(7):
        seen.append(copy.deepcopy(trainer.policy.lm))
        trainer.iterate()
    x, T = trainer.rollout, trainer.config.response_length
    assert len(x) == 16
    for i, age in enumerate((6, 4, 2, 0)):
        rows = slice(4 * i, 4 * i + 4)
        states = response_states(seen[6 - age], x.tokens[rows], x.mask[rows], T)
        logp, _ = head_log_probs(seen[6 - age], states, x.responses[rows])
        mask = x.response_mask[rows]
        torch.testing.assert_close(x.logp[rows][mask], logp[mask], atol=1e-5, rtol=0)
        gap = (x.logp - x.logp_ref)[rows][mask].abs().max()
        assert (gap < 1e-5) == (age == 0)


def test_top_p_leaves_the_fewest_tokens_that_reach_it(lm, questions):
    p = torch.tensor([0.5, 0.05, 0.3, 0.15])
    model = SAMPLERS["top-p"](lm)
    model.lm_head.weight = torch.nn.Parameter(p.log()[:, None])
    found = model.lm_head(torch.ones(1, 1)).softmax(-1)[0]
    torch.testing.assert_close(found, torch.tensor([0.5, 0, 0.3, 0.15]) / 0.95)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_report_their_own_probabilities(lm, sampler):
    prompts, mask = torch.tensor([[1, 4, 5, 3]]), torch.ones(1, 4, dtype=torch.bool)
    u = torch.full((1, 3), 0.5)
    own, found = sample(lm, prompts, mask, u), sample(SAMPLERS[sampler](lm), prompts, mask, u)
    gap = (found.logp - own.logp).abs().max().item()
    assert 0 == gap if sampler in ("float32", "mixture") else 1e-6 < gap < 0.3
    if sampler == "top-p": assert (found.logp > own.logp).all()


def test_a_training_with_each_sampler(lm, questions):
    for sampler in SAMPLERS:
        trainer = stale_rlhf(lm, questions, "token TIS", 1, sampler, reward=odd, **SMALL).learn()
        assert all(math.isfinite(row["kl_k1"]) for row in trainer.rows)


def test_fresh_reviews_are_those_of_grpo_without_a_price(start):
    loop, plain = stale_reviews(start), start.trainer(algo="grpo", kl_coef=0.0)
    for _ in range(3):
        loop.iterate()
        plain.iterate()
    expected, begin = plain.policy.state_dict(), loop.stale.versions[0].state_dict()
    for name, x in loop.policy.state_dict().items():
        torch.testing.assert_close(x, expected[name], atol=1e-5, rtol=0)
    assert not torch.equal(begin["lm_head.weight"], loop.policy.lm.lm_head.weight)


def test_a_row_of_the_reviews(start, monkeypatch):
    looker, loops = start.trainer(), []
    before = evaluate(looker, start.lm)
    monkeypatch.setattr(staleness_reviews, "started", lambda seed: (start, looker, before))
    monkeypatch.setattr(staleness_reviews, "stale_reviews",
                        lambda *args: loops.append(stale_reviews(*args)) or loops[0])
    found = dict(zip(staleness_reviews.COLUMNS, staleness_reviews.run(1, 2, "sequence mask")))
    loop, expected = loops[0], measure(looker, loops[0].policy.lm)
    assert (loop.stale.age, loop.stale.correction, loop.iteration) == (2, "sequence mask", 3)
    assert float(found["true"]) == pytest.approx(expected["true"], rel=1e-4)
    assert float(found["kl_pretrained"]) == pytest.approx(expected["kl"], rel=1e-4)
    assert float(found["kl"]) > 0 and float(found["kl"]) != float(found["kl_pretrained"])


def test_bad_options_are_named(lm, questions):
    for bad, name in ((("TIS",), "correction"), (("clip", -1), "age"),
                      (("clip", 1, "int8"), "sampler")):
        with pytest.raises(ValueError, match=f"{name} must be"):
            stale_rlhf(lm, questions, *bad, **SMALL)


LOGITS = torch.tensor([[0.2, -0.3, 0.5], [1.0, 0.0, -0.4]], dtype=torch.float64)
REWARD = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.2, 0.0, 0.0, 0.7, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_fresh_gradients_are_unbiased(name):
    bias, noise = gradient_error(name, LOGITS, LOGITS, REWARD)
    assert bias < 1e-12 and noise > 0.5


def test_the_error_of_a_gradient_by_hand():
    "Without a correction: two positions, nine responses, sum by sum."
    mu, pi = (LOGITS + 0.4 * LOGITS.flip(1)).softmax(-1), LOGITS.softmax(-1)
    pairs = [(i, j) for i in range(3) for j in range(3)]
    def moments(p, w):
        one = torch.eye(3, dtype=torch.float64)
        rows = [w(i, j) * torch.stack([one[i] - pi[0], one[j] - pi[1]]) / 2 for i, j in pairs]
        q = [p[0, i] * p[1, j] for i, j in pairs]
        mean = sum(x * row for x, row in zip(q, rows))
        return mean, sum(x * (row - mean).square().sum() for x, row in zip(q, rows)).sqrt()
    R = {pair: r.item() for pair, r in zip(pairs, REWARD)}
    base = sum(mu[0, i] * mu[1, j] * R[i, j] for i, j in pairs)
    true, _ = moments(pi, lambda i, j: R[i, j])
    mean, noise = moments(mu, lambda i, j: R[i, j] - base)
    found = gradient_error("nothing", LOGITS, LOGITS + 0.4 * LOGITS.flip(1), REWARD)
    expected = (mean - true).norm() / true.norm(), noise / true.norm()
    assert found == pytest.approx([x.item() for x in expected])
    near = LOGITS + 0.05 * LOGITS.flip(1)
    assert gradient_error("sequence TIS", LOGITS, near, REWARD)[0] < 1e-12  # no weight is cut
    assert gradient_error("token TIS", LOGITS, near, REWARD)[0] > 1e-3
