import copy
import io
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SEEDS

from rlhf_notes.formulas.preference import best_of_n_loss
from rlhf_notes.formulas.reward import RewardNorm
from rlhf_notes.language.model import RewardModel, make_gpt2
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.reviews.pretraining import Pretraining
from rlhf_notes.reviews.reward_model import (
    CHOICES,
    RewardTraining,
    agreement,
    ask_human,
    proxy_reward,
    warm_linear,
    write_responses,
)
from rlhf_notes.reviews.task import WORDS, Reviews, make_tokenizer, review_prompts

CONFIG = ReviewsConfig(sft_steps=40, sft_batch=32, sft_learning_rate=2e-2, labels=40, rm_batch=8,
                    rm_epochs=1, rm_learning_rate=2e-3, norm_samples=48)


@pytest.fixture(scope="module")
def task(): return Reviews(make_tokenizer(), CONFIG.response_length, CONFIG.stop_after)


@pytest.fixture(scope="module")
def lm(task):
    model = make_gpt2("tiny", len(WORDS), n_layer=1, n_embd=16, n_head=2)
    pretraining = Pretraining(CONFIG, model, task)
    while pretraining.iteration < pretraining.iterations: pretraining.iterate()
    model.zero_grad()
    return model


@pytest.fixture(scope="module")
def asked(lm, task):
    queries, mask = task.sample_prompts(24, torch.Generator().manual_seed(0))[:2]
    return (queries, mask,
            *write_responses(CONFIG, lm, task, queries, mask, torch.Generator().manual_seed(1)))


def generator(seed=0): return torch.Generator().manual_seed(seed)
def run(stage, n=None):
    return [stage.iterate() for _ in range(stage.iterations - stage.iteration if n is None else n)]
def rewards_of(model, texts): return model.score(*(x.flatten(0, 1) for x in texts)).view(-1, 4)
def batch(stage, i=0):
    *texts, best = (x[stage.order[i]] for x in stage.labels)
    return texts, best
def weights(model): return torch.cat([p.detach().flatten() for p in model.parameters()])


# the score

@torch.no_grad()
def test_query_and_answer_are_read_together(lm, asked):
    model, (queries, mask, answers, counts) = RewardModel(lm, generator()), asked
    r = model.score(queries, mask, answers, counts)
    assert r.shape == (24,) and r.dtype == torch.float32
    other = model.score(queries.roll(1, 0), mask.roll(1, 0), answers, counts)
    changed = (queries != queries.roll(1, 0)).any(1)
    assert changed.sum() > 15 and (other[changed] != r[changed]).all()                # G1
    assert (model.score(queries, mask, answers.roll(1, 0), counts.roll(1, 0)) != r).any()


@torch.no_grad()
def test_the_last_real_token_counts_and_nothing_behind_it(lm, asked, task):
    model, (queries, mask, answers, counts) = RewardModel(lm, generator()), asked
    r = model.score(queries, mask, answers, counts)
    assert not counts.all()
    for junk in (0, 7, task.pad_token, 10_000):                                       # R1, G2
        torch.testing.assert_close(model.score(queries.masked_fill(~mask, junk), mask,
                                               answers.masked_fill(~counts, junk), counts), r)
    for i in range(len(r)):
        n = counts[i].sum()
        alone = lm.transformer(
            torch.cat([queries[i, mask[i]], answers[i, :n]])[None]).last_hidden_state[0, -1]
        torch.testing.assert_close(model.head(alone).item(), r[i].item(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_reward_is_the_normalised_score_and_never_missing(lm, asked):
    model, norm = RewardModel(lm, generator()), RewardNorm(2.0, -0.5)
    reward = proxy_reward(model, norm)
    queries, mask, answers, counts = asked
    found = queries, mask, SimpleNamespace(whole=answers, mask=counts)
    torch.testing.assert_close(reward(*found)[:, 0], 2 * model.score(*asked) - 0.5)         # R3
    model.head.bias.fill_(math.nan)
    assert (reward(*found) == math.inf).all()  # a NaN would say that there is no score


# answers and labels

def test_answers_are_cut_and_depend_on_the_generator_alone(lm, task):
    queries, mask, _ = task.sample_prompts(50, generator(3))
    write = lambda seed: write_responses(CONFIG, lm, task, queries, mask, generator(seed))
    torch.manual_seed(0)
    answers, counts = write(1)
    torch.manual_seed(1)
    again, _ = write(1)
    assert torch.equal(answers, again)
    assert not torch.equal(answers, write(2)[0])
    assert answers.shape == counts.shape == (50, 16)
    for t, c in zip(answers.tolist(), counts.sum(1).tolist()):
        assert t[c:] == [task.pad_token] * (16 - c)
        assert (c == 16 or t[c - 1] == task.stop_token and c > 8)
        assert task.stop_token not in t[8:c - 1]
    assert not answers.requires_grad and 0.2 < (counts.sum(1) < 16).float().mean()


def test_answers_are_drawn_at_the_temperature_of_the_policy(lm, task):
    queries, mask, _ = task.sample_prompts(200, generator(3))
    distinct = lambda t: len(set(map(tuple,
                                     write_responses(replace(CONFIG, temperature=t), lm, task,
                                                     queries, mask, generator(1))[0].tolist())))
    assert distinct(0.05) < distinct(1.0) == 200


def test_labels_are_four_responses_to_a_prompt_and_the_humans_choice(lm, task):
    texts, best = ask_human(
        replace(CONFIG, labels=60, human_temperature=1e-3), lm, task, generator(5))
    # no true rewards
    assert [x.shape for x in texts] == [(60, 4, task.prompt_length)] * 2 + [(60, 4, 16)] * 2
    assert CHOICES == 4 and best.shape == (60,)
    prompts, mask, responses, _ = (x.flatten(0, 1) for x in texts)
    true = task.true_rewards(prompts, mask, responses).view(60, 4)
    assert torch.equal(true.gather(1, best[:, None])[:, 0], true.amax(1))  # R4
    assert best.unique().tolist() == [0, 1, 2, 3]
    words = task.texts(prompts, mask, responses)
    for i in range(60):
        four = words[4 * i:4 * i + 4]
        assert len({prompt for prompt, _ in four}) == 1 and four[0][0] in review_prompts()
        assert len({response for _, response in four}) > 1
    assert len({prompt for prompt, _ in words}) > 40


def test_the_human_is_as_noisy_as_configured(lm, task):
    def true_best(temperature):
        texts, best = ask_human(
            replace(CONFIG, labels=150, human_temperature=temperature), lm, task, generator(5))
        true = task.true_rewards(*(x.flatten(0, 1) for x in texts[:3])).view(-1, 4)
        return (true.gather(1, best[:, None])[:, 0] == true.amax(1)).float().mean()
    assert true_best(1e-3) == 1 and 0.5 < true_best(0.5) < 1 and true_best(1e4) < 0.5


def test_the_true_score_is_looked_up_for_the_labels_only(lm, task, monkeypatch):
    looks = []
    monkeypatch.setattr(
        Reviews, "true_rewards",
        lambda self, *x, real=Reviews.true_rewards: looks.append(len(x[0])) or real(self, *x))
    stage = RewardTraining(CONFIG, lm, task)
    assert looks == [160]
    run(stage)
    stage.state_dict()
    stage.reference_rewards()
    assert looks == [160]


# the training

def test_learning_rate_by_hand():
    assert [
        warm_linear(s, 20) for s in (0, 1, 2, 11, 19)] == pytest.approx([0.5, 1, 1, 0.5, 1 / 18])
    assert warm_linear(0, 1) == 1
    assert warm_linear(100, 100) == 0                                                 # G5


@given(steps=st.integers(1, 300))
def test_learning_rate_rises_then_falls(steps):
    rates = [warm_linear(s, steps) for s in range(steps)]
    top = rates.index(max(rates))
    assert all(0 < r <= 1 + 1e-9 for r in rates)
    assert rates[:top + 1] == sorted(rates[:top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert top <= max(1, math.ceil(0.1 * steps)) and rates[-1] <= 1 / (0.9 * steps) + 1e-9


def test_it_learns_what_the_human_likes(lm, task):
    config = replace(CONFIG, labels=480, rm_learning_rate=5e-3, human_temperature=0.1)
    stage = RewardTraining(config, lm, task)
    rows = run(stage)
    mean = lambda part, key: sum(r[key] for r in part) / len(part)
    assert mean(rows[-20:], "loss") < mean(rows[:10], "loss") - 0.1
    assert mean(rows[-20:], "loss") < math.log(4) - 0.1
    assert mean(rows[-20:], "accuracy") > 0.37
    # G5
    assert [r["learning_rate"] for r in rows] == [5e-3 * warm_linear(s, 60) for s in range(60)]
    assert stage.optimizer.param_groups[0]["lr"] == rows[-1]["learning_rate"] < 2e-4
    assert set(rows[0]) == {"step", "loss", "accuracy", "grad_norm", "learning_rate"}
    assert [r["step"] for r in rows] == list(range(1, 61))
    fresh = ask_human(replace(config, labels=200), lm, task, generator(77))
    with torch.no_grad():
        found = agreement(rewards_of(stage.model, fresh[0]),
                          task.true_rewards(*(x.flatten(0, 1) for x in fresh[0][:3])).view(-1, 4))
    assert found["pairs"] > 0.6 and found["correlation"] > 0.25


def test_norm_before_and_after(lm, task):
    stage = RewardTraining(CONFIG, lm, task)
    def moments():
        r = stage.norm(stage.reference_rewards())
        return r.mean().item(), r.std(correction=0).item()
    assert len(stage.reference_rewards()) == CONFIG.norm_samples
    assert moments() == pytest.approx((0, 1), abs=1e-5)                               # R3, before
    before = stage.norm.state_dict()
    run(stage, stage.iterations - 1)
    # the scale stays as it is while it learns
    assert stage.norm.state_dict() == before and moments() != pytest.approx((0, 1), abs=1e-3)
    run(stage)
    # R3, after
    assert moments() == pytest.approx((0, 1), abs=1e-5) and stage.norm.state_dict() != before
    q, m, a, c = stage.reference
    r = stage.norm(stage.model.score(q, m, a, c)).detach()
    assert (r.mean().item(), r.std(correction=0).item()) == pytest.approx((0, 1), abs=1e-5)


def test_rewards_that_are_all_equal_have_no_scale(lm, task):
    words = (r"reward model, step {}, responses to norm_samples prompts: rewards must "
             r"be finite and not all equal, got {} of them with mean .* and standard "
             r"deviation 0.0; the last checkpoint")
    dull = copy.deepcopy(lm)
    with torch.no_grad(): dull.transformer.ln_f.weight.zero_()
    with pytest.raises(FloatingPointError, match=f"^{words.format(0, 48)}"):
        RewardTraining(CONFIG, dull, task)
    stage = RewardTraining(CONFIG, lm, task)
    run(stage, stage.iterations - 1)
    stage.reference = [x[:1] for x in stage.reference]
    with pytest.raises(FloatingPointError, match=f"^{words.format(stage.iterations, 1)}"):
        stage.iterate()


def test_the_reference_is_the_pretrained_model(lm, task):
    stage = RewardTraining(CONFIG, lm, task)
    texts = task.texts(*stage.reference[:3])
    assert len(texts) == 48
    assert {q for q, _ in texts} <= set(review_prompts())
    assert len({q for q, _ in texts}) > 30
    q, m, a, c = stage.reference
    cut, counts, found = task.truncate(a)
    assert a.shape == c.shape == (48, 16) and found.any() and not found.all()
    assert torch.equal(cut, a) and torch.equal(counts, c)
    frozen = copy.deepcopy(stage.reference)
    run(stage)
    assert all(torch.equal(x, y) for x, y in zip(frozen, stage.reference))


def test_the_loss_is_that_of_best_of_four_on_normalised_rewards(lm, task):
    stage = RewardTraining(CONFIG, lm, task)
    texts, best = batch(stage)
    with torch.no_grad():
        r = RewardNorm(stage.norm.gain, stage.norm.bias)(rewards_of(stage.model, texts))
    row = stage.iterate()
    assert row["loss"] == pytest.approx(best_of_n_loss(r, best).item(), rel=1e-5)
    assert row["accuracy"] == (r.argmax(1) == best).float().mean().item()
    assert abs(stage.norm.gain - 1) > 0.05
    assert row["learning_rate"] == CONFIG.rm_learning_rate * warm_linear(
        0, stage.iterations) == stage.optimizer.param_groups[0]["lr"]


def test_a_step_by_hand(lm, task):
    stage = RewardTraining(CONFIG, lm, task)
    model, (texts, best) = copy.deepcopy(stage.model), batch(stage)
    loss = -(stage.norm.gain * rewards_of(model, texts)
             + stage.norm.bias).log_softmax(1)[torch.arange(8), best].mean()
    # the warm-up is less than a step
    optimizer = torch.optim.Adam(model.parameters(), lr=CONFIG.rm_learning_rate, eps=1e-5)
    loss.backward()
    norm = math.sqrt(
        sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
    optimizer.step()
    row = stage.iterate()
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
    # the head's bias has no gradient but rounding errors
    error = (weights(stage.model) - weights(model)).abs()
    assert error.mean() < 1e-6 and error.max() < 1e-3


@pytest.mark.parametrize(
    "labels, batch, epochs, sizes",
    [(40, 8, 1, [8] * 5), (10, 8, 1, [8, 2]), (10, 4, 2, [4] * 5), (3, 8, 1, [3])])
def test_each_label_is_used_once_in_an_epoch(lm, task, labels, batch, epochs, sizes):
    stage = RewardTraining(
        replace(CONFIG, labels=labels, rm_batch=batch, rm_epochs=epochs), lm, task)
    assert stage.iterations == len(sizes)
    run(stage)
    assert [len(rows) for rows in stage.order] == sizes and stage.iteration == stage.iterations
    flat = torch.cat(stage.order).tolist()
    # R4
    for e in range(epochs): assert sorted(flat[e * labels:(e + 1) * labels]) == list(range(labels))
    if labels == 40: assert flat != list(range(40))
    if epochs == 2: assert flat[:labels] != flat[labels:]


def test_the_language_model_is_not_touched(lm, task):
    before = weights(lm).clone()
    stage = RewardTraining(CONFIG, lm, task)
    start = weights(stage.model).clone()
    run(stage)
    assert torch.equal(weights(lm), before)
    assert all(p.grad is None for p in lm.parameters())
    assert not torch.equal(weights(stage.model), start)
    moved = {
        name for name, p in stage.model.named_parameters() if p.grad is not None and p.grad.any()}
    # all of it learns, not the head alone
    assert any("wte" in name for name in moved) and any("head" in name for name in moved)


def test_all_depends_on_the_seed_and_on_nothing_else(lm, task):
    torch.manual_seed(0)
    first = RewardTraining(CONFIG, lm, task)
    expected = run(first)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    second = RewardTraining(CONFIG, lm, task)
    assert run(second) == expected
    assert torch.equal(weights(first.model), weights(second.model))
    assert torch.equal(torch.get_rng_state(), state)
    other = RewardTraining(replace(CONFIG, seed=1), lm, task)
    assert not torch.equal(other.labels[0], first.labels[0])
    assert not torch.equal(other.order[0], first.order[0])
    assert not torch.equal(other.model.head.weight, second.model.head.weight)


@pytest.mark.parametrize("at", [0, 3, 10])
def test_a_stopped_training_goes_on_as_if_nothing_had_happened(lm, task, at):
    config = replace(CONFIG, rm_epochs=2)
    whole = RewardTraining(config, lm, task)
    expected = run(whole)
    first = RewardTraining(config, lm, task)
    beginning = run(first, at)
    disk = io.BytesIO()
    torch.save(first.state_dict(), disk)
    disk.seek(0)
    run(first)  # what was saved does not change any more
    second = RewardTraining(config, lm, task)
    second.load_state_dict(torch.load(disk, weights_only=True))
    assert beginning + run(second) == expected
    assert second.norm.state_dict() == whole.norm.state_dict()
    assert second.iteration == whole.iteration == 10
    assert torch.equal(weights(second.model), weights(whole.model))


def test_a_loss_that_is_no_number_stops_it(lm, task):
    stage = RewardTraining(CONFIG, lm, task)
    run(stage, 2)
    with torch.no_grad(): stage.model.head.bias.fill_(math.inf)
    before = weights(stage.model.trunk).clone()
    with pytest.raises(
        FloatingPointError, match="reward model, step 3: loss is nan, grad_norm is nan"):
        stage.iterate()
    assert torch.equal(weights(stage.model.trunk), before) and stage.iteration == 2


def test_bfloat16_is_close(lm, task):
    config = replace(CONFIG, precision="bfloat16")
    single, half = RewardTraining(CONFIG, lm, task), RewardTraining(config, lm, task)
    half.labels, half.reference = single.labels, single.reference
    half.norm.load_state_dict(single.norm.state_dict())
    assert not torch.equal(half.reference_rewards(), single.reference_rewards())
    assert half.reference_rewards().dtype == torch.float32
    torch.testing.assert_close(
        half.reference_rewards(), single.reference_rewards(), rtol=0.05, atol=0.05)
    a, b = single.iterate(), half.iterate()
    assert a["loss"] != b["loss"]
    assert a["loss"] == pytest.approx(b["loss"], abs=0.05)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}


def test_training_computes_what_scoring_computes(lm, task, asked):
    "No dropout, in whatever mode the model is."
    stage = RewardTraining(CONFIG, lm, task)
    with torch.no_grad():
        stage.model.train()
        a = stage.model.score(*asked)
        stage.model.eval()
        assert torch.equal(stage.model.score(*asked), a)


# agreement

@given(seed=SEEDS, n=st.integers(1, 6), N=st.integers(2, 5))
def test_agreement_is_what_counting_gives(seed, n, N):
    g = generator(seed)
    rewards, true = (torch.randint(0, 5, (n, N), generator=g).float() for _ in range(2))
    right = total = best = 0
    for r, t in zip(rewards.tolist(), true.tolist()):
        for i in range(N):
            for j in range(i):
                if t[i] == t[j]: continue
                total += 1
                right += 0.5 if r[i] == r[j] else (r[i] > r[j]) == (t[i] > t[j])
        best += t[r.index(max(r))] == max(t)
    found = agreement(rewards, true)
    assert found["pairs"] == pytest.approx(right / total if total else 0)
    assert found["best"] == pytest.approx(best / n)
    if rewards.unique().numel() > 1 and true.unique().numel() > 1:
        r, t = (x.double().flatten() - x.double().mean() for x in (rewards, true))
        assert found["correlation"] == pytest.approx(
            (r @ t / (r.norm() * t.norm())).item(), abs=1e-5)


def test_agreement_at_its_ends():
    true = torch.tensor([[1., 2., 3., 4.], [0., -1., 5., 2.]])
    assert agreement(3 * true - 7, true) == pytest.approx(dict(pairs=1, best=1, correlation=1))
    assert agreement(-true, true) == pytest.approx(dict(pairs=0, best=0, correlation=-1))
    assert agreement(torch.tensor([[1., 2., 4., 3.]]),
                     true[:1]) == pytest.approx(dict(pairs=5 / 6, best=0, correlation=0.8))


def test_agreement_refuses():
    with pytest.raises(
        ValueError, match=r"true must have the shape of rewards, \(2, 4\), got \(2, 3\)"):
        agreement(torch.zeros(2, 4), torch.zeros(2, 3))
    with pytest.raises(TypeError, match="true must have a floating-point dtype"):
        agreement(torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="rewards must have the shape"):
        agreement(torch.zeros(4), torch.zeros(4))
