import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_notes.studies.checkable import (
    ALGORITHMS,
    TOKENS,
    _response_loss,
    checkable_rlhf,
    digit_tokenizer,
    exact_match,
    make_questions,
    measure,
    pass_at_k,
    pass_at_k_reward,
    pretrain,
)

SMALL = dict(batch=16, iterations=2, minibatches=2, seed=1)


@pytest.fixture(scope="module")
def questions(): return make_questions(60)


@pytest.fixture(scope="module")
def lm(questions): return pretrain(questions, seed=1, steps=3)


@given(n=st.integers(1, 6), data=st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(n, data):
    k, c = data.draw(st.integers(1, n)), data.draw(st.integers(0, n))
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    by_hand = sum(map(any, subsets)) / len(subsets)
    assert pass_at_k(torch.tensor([c]), n, k).item() == pytest.approx(by_hand, abs=1e-12)


def test_pass_at_k_refuses_more_attempts_than_responses():
    for k in (0, 5, 1.5):
        with pytest.raises((ValueError, TypeError), match="k must be"):
            pass_at_k(torch.tensor([1]), 4, k)


@given(n=st.integers(1, 5), data=st.data())
def test_pass_at_k_reward_counts_the_others(n, data):
    k = data.draw(st.integers(1, n))
    correct = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    def worth(i):
        sets = list(itertools.combinations(correct[:i] + correct[i + 1:], k - 1))
        return correct[i] * k * sum(not any(s) for s in sets) / len(sets)
    found = pass_at_k_reward(torch.tensor(correct), k)
    assert found.tolist() == pytest.approx([worth(i) for i in range(n)])


@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_reward_has_the_gradient_of_pass_at_k(k):
    p, n = 0.3, 4
    groups = torch.cartesian_prod(*[torch.arange(2)] * n).bool()
    chance = (p * groups + (1 - p) * ~groups).prod(1)
    score = groups / p - ~groups / (1 - p)  # d log-probability / dp
    found = (chance[:, None] * pass_at_k_reward(groups, k) * score).sum() / n
    assert found.item() == pytest.approx(k * (1 - p) ** (k - 1))


def test_questions_are_distinct_and_their_solutions_right(questions):
    assert len({q["prompt"] for q in questions}) == 60 and questions == make_questions(60)
    for q in questions:
        task, *digits, _ = q["prompt"].split()
        assert q["solution"].split() == (sorted(digits) if task == "sort" else digits[::-1])


def test_rewards():
    assert exact_match(["sort 2 1 ="] * 3, ["1 2", "2 1", ""], ["1 2"] * 3) == [1.0, 0.0, 0.0]


def test_the_loss_counts_responses_alone(lm):
    texts = [(["sort", "2", "1", "="], ["1", "2", "<eos>"]),
             (["reverse", "2", "1", "0", "="], ["0", "<eos>"])]
    total, n, rows = 0.0, 0, []
    for prompt, response in texts:
        rows.append(
            [TOKENS.index(t) for t in prompt + response] + [0] * (7 - len(prompt + response)))
        logp = lm(torch.tensor(rows[-1:])).logits.log_softmax(-1)
        for i in range(len(prompt), len(prompt + response)):
            total, n = total - logp[0, i - 1, rows[-1][i]].item(), n + 1
    assert _response_loss(lm, torch.tensor(rows)).item() == pytest.approx(total / n, rel=1e-5)


def test_tokens_are_those_of_the_tokenizer(questions):
    text = questions[0]["prompt"]
    assert digit_tokenizer()(text)["input_ids"] == [TOKENS.index(t) for t in text.split()]


@pytest.mark.parametrize("name", ["PPO", "GRPO", "Dr. GRPO"])
def test_a_training_and_what_is_measured(name, lm, questions):
    before = [p.clone() for p in lm.parameters()]
    trainer = checkable_rlhf(lm, questions, name, **SMALL).learn()
    assert all(torch.equal(p, q) for p, q in zip(before, lm.parameters()))
    assert len(trainer.rows) == 2 and all(0 <= r["same"] <= 1 for r in trainer.rows)
    found, right = measure(trainer, questions[:5])
    assert right.double().mean() / 32 == pytest.approx(found["pass_1"])
    shares = [found[f"pass_{k}"] for k in (1, 2, 4, 8, 16, 32)]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1
    assert 0 <= found["length"] <= 5


def test_groups_with_one_reward_are_counted(lm, questions):
    def halves(prompts, responses, solution):
        return [float(8 <= i < 12) for i in range(len(responses))]
    trainer = checkable_rlhf(lm, questions, "GRPO", halves, **SMALL).learn()
    # groups of 8: all 0; four 1, four 0
    assert trainer.rows[0]["same"] == 0.5 and trainer.rows[0]["rounds"] == 1


def test_dynamic_sampling_trains_on_groups_with_spread(lm, questions):
    calls = []
    def reward(prompts, responses, solution):
        calls.append(prompts)
        some = len(calls) % 3 != 1  # nothing has spread at first
        return [float(some and i % 2) for i in range(len(responses))]
    t = checkable_rlhf(lm, questions, "GRPO, dynamic", reward, **SMALL).learn()
    assert [r["rounds"] for r in t.rows] == [2, 1] and [r["same"] for r in t.rows] == [1, 0]
    assert t.rows[0]["score"] == 0.5 and calls[0] != calls[1]
    t = checkable_rlhf(
        lm, questions, "GRPO, dynamic", lambda p, r, solution: [0.0] * len(p), **SMALL).learn()
    assert [r["rounds"] for r in t.rows] == [4, 4] and t.rows[0]["same"] == 1


def test_every_algorithm_is_an_option_of_rlhf(lm, questions):
    for name in ALGORITHMS: assert checkable_rlhf(lm, questions, name, **SMALL).config.kl_coef == 0


def test_an_unknown_algorithm_is_named(lm, questions):
    with pytest.raises(ValueError, match="name must be.*GRPO.*'grpo'"):
        checkable_rlhf(lm, questions, "grpo")
