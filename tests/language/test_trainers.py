"""RLHF, DPO and the reward model as users call them."""
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from language.parts import without_times
from language.test_own_task import SMALL, count, make, own, tokenizer

from rlhf_notes.formulas.advantage import multi_reward_advantage
from rlhf_notes.hub.prompts import in_epochs
from rlhf_notes.hub.spread import refill
from rlhf_notes.hub.trainers import RLHF
from rlhf_notes.language.loop import Loop
from rlhf_notes.language.machine import Machine, Scaled
from rlhf_notes.language.model import make_gpt2
from rlhf_notes.language.rollout import Rollout, no_spread

def test_several_responses_at_a_temperature_of_ones_own():
    t, prompts = own(seed=1), ["w3 w4", "w5"]
    some = t.generate(prompts, n=3)
    assert [len(texts) for texts in some] == [3, 3] and len({*some[0]}) > 1
    assert t.generate(prompts, n=1) == t.generate(prompts) == t.generate(prompts, temperature=1.0)
    assert t.generate(prompts, temperature=5.0) != t.generate(prompts)
    greedy = t.generate(prompts, temperature=0)
    assert greedy == t.generate(prompts, seed=7, temperature=0) != t.generate(prompts)
    assert t.generate(prompts, n=2, temperature=0) == [[text, text] for text in greedy]
    ids, mask = t.task.encode(prompts)
    for text, row, m in zip(greedy, ids, mask):
        theirs = t.policy.lm.generate(row[m][None], do_sample=False, max_new_tokens=4)
        said, _, _ = t.task.truncate(theirs[:, m.sum():])
        assert text == t.task.decode(said)[0]
    for bad in (dict(n=0), dict(temperature=-1.0)):
        with pytest.raises(ValueError, match=f"^{min(bad)} must be"): t.generate(prompts, **bad)


def test_a_reward_may_ask_for_tokens_alone():
    t = own(reward=lambda completion_ids: [len(ids) for ids in completion_ids])
    assert t.iterate()["score"] == t.rows[0]["length"] > 1
    with pytest.raises(ValueError, match="^reward must take prompts and responses"):
        own(reward=lambda prompts: [0.0] * len(prompts))


def test_a_held_out_prompt_may_stand_in_several_rows():
    def told(responses, score): return score
    rows = [dict(prompt="w3", score=float(i)) for i in range(40)]
    assert own(reward=told, prompts=rows, eval_prompts=rows).evaluate() == 19.5


# --- which responses it learns from

def rollout(scores):
    n = len(scores)
    rows, real = torch.arange(float(n))[:, None], torch.ones(n, 1, dtype=torch.bool)
    scores = torch.tensor(scores)
    return Rollout(rows, rows, real, rows, scores, *(torch.zeros(n, 1) for _ in range(3)),
                   parts=scores[:, None])


def same(x, group=2):
    config = SimpleNamespace(responses_per_prompt=group, reward_aggregation="sum")
    return no_spread(config, x, torch.ones(1))


def test_groups_without_spread_are_replaced_by_groups_with():
    old = rollout([0., 0., 1., 0., 1., 1., 0., 0.])  # only the second group has spread
    assert same(old).tolist() == [True, False, True, True]
    new = rollout([5., 5., 2., 3., 7., 7., 8., 9.])
    full = refill(old, new, same(old), same(new))
    assert full.scores.tolist() == [2, 3, 1, 0, 8, 9, 0, 0]
    assert full.tokens[:, 0].tolist() == [2, 3, 2, 3, 6, 7, 6, 7]
    assert refill(new, old, same(new), same(old)).scores.tolist() == [1, 0, 2, 3, 7, 7, 8, 9]
    many = rollout([1., 0., 2., 3., 4., 5., 6., 7.])  # more than there is room for stay out
    assert refill(old, many, same(old), same(many)).scores.tolist() == [1, 0, 1, 0, 2, 3, 4, 5]
    assert full.rewards is None


def test_what_is_not_scored_is_no_spread():
    nan = math.nan
    x = rollout([1., nan, 1., 0., nan, nan, nan, 2.])
    assert same(x).tolist() == [True, False, True, True]
    x.response_mask[3] = False  # filtered out
    assert same(x).all()


def test_one_reward_with_spread_is_spread_where_each_is_normalised():
    "1, 0, 1, 0 and half of it the other way round: the sum does not differ, the parts do."
    def f(p, responses): return [1.0, 0.0] * (len(responses) // 2)
    def g(p, responses): return [0.0, 2.0] * (len(responses) // 2)
    parts, total = (own(reward=[(f, 2.0), g], reward_aggregation=how, iterations=1)
                    for how in ("normalise", "sum"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parts.iterate()["same"] == 0 < parts.rows[0]["grad_norm"]
    assert total.iterate()["same"] == 1
    nothing = own(reward=[(f, 2.0), (g, 0.0), (zero, 1.0)], reward_aggregation="normalise",
                  iterations=1)
    nothing.task.weights[0] = 0.0  # what has no weight has no spread
    assert nothing.iterate()["same"] == 1


def test_the_filter_reads_the_rewards_and_not_what_overlong_makes_of_them():
    for overlong in ("soft", "subtract", "replace"):
        t = own(reward=zero, dynamic_sampling=True, overlong=overlong, iterations=1)
        row = t.iterate()
        assert row["same"] == 1 and row["rounds"] == 3
        assert len(set(t.rollout.scores.tolist())) > 1


def has_w9(prompts, responses): return [float("w9" in r) for r in responses]


def many_w8(prompts, responses): return [100.0 * r.split().count("w8") for r in responses]


def zero(prompts, responses): return [0.0] * len(responses)


FOUR = "w3", "w4", "w5", "w6"


def test_groups_without_spread_are_drawn_again_at_most_twice():
    t = own(reward=has_w9, prompts=FOUR, batch=32, dynamic_sampling=True)
    plain = own(reward=has_w9, prompts=FOUR, batch=32)
    row, first = t.iterate(), plain.iterate()
    assert 0 < row["same"] == first["same"] < 1 and 1 < row["rounds"] <= 3
    assert same(plain.rollout, 4).float().mean() == row["same"]
    assert same(t.rollout, 4).sum() < same(plain.rollout, 4).sum()
    torch.testing.assert_close(t.rollout.parts[:, 0], t.rollout.scores)
    seen = []
    def at_first_none(prompts, responses):
        seen.append(responses)
        return [float(len(seen) > 1) * i for i in range(len(responses))]
    assert own(reward=at_first_none, dynamic_sampling=True).iterate()["rounds"] == 2
    assert len(seen) == 2 and seen[0] != seen[1]
    with pytest.warns(UserWarning, match="in 3 iterations 100% of the groups had no spread"):
        t = own(reward=zero, iterations=3, dynamic_sampling=True).learn()
    assert [row["rounds"] for row in t.rows] == [3] * 3


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_a_reward_that_never_differs_is_said_once(algo):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        own(reward=zero, iterations=5, algo=algo).learn()
    assert ["had no spread" in str(w.message) for w in found] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own(reward=count, iterations=5, algo=algo).learn()


def test_a_rate_at_which_the_kl_runs_away_is_said_once():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        t = own(reward=count, iterations=5, learning_rate=1.0).learn()
        t.hooks[0].of_kl(dict(kl_k1=99, length=4), 1.0)
    assert len(t.rows) == 5
    assert ["a learning_rate of 1 may be too high" in str(w.message) for w in found] == [True]


def test_each_reward_is_normalised():
    rewards = [(has_w9, 2.0), many_w8]
    t = own(reward=rewards, batch=32, reward_aggregation="normalise")
    row, x = t.iterate(), t.rollout
    parts = x.parts.view(-1, 4, 2)
    expected = multi_reward_advantage(parts, torch.tensor([2.0, 1.0])).view(-1, 1)
    torch.testing.assert_close(t.loop.advantages().advantages, expected.expand_as(x.logp))
    assert row["score"] == pytest.approx((x.parts @ torch.tensor([2.0, 1.0])).mean().item())
    assert row["reward_2_many_w8"] == pytest.approx(x.parts[:, 1].mean().item())
    scaled = own(reward=[(has_w9, 2.0), lambda p, r: [x / 100 for x in many_w8(p, r)]],
                 batch=32, reward_aggregation="normalise")
    scaled.iterate()
    torch.testing.assert_close(scaled.loop.advantages().advantages, t.loop.advantages().advantages,
                               rtol=1e-3, atol=1e-3)


def test_a_reward_that_is_silent_leaves_the_choice_to_the_others():
    def silent(prompts, responses): return [None] * len(responses)
    both, alone = (own(reward=r, batch=32, reward_aggregation="normalise", seed=1)
                   for r in ([has_w9, silent], [has_w9]))
    both.iterate(), alone.iterate()
    torch.testing.assert_close(both.loop.advantages().advantages,
                               alone.loop.advantages().advantages)


def test_rows_come_in_turn():
    for total, count_ in ((7, 3), (3, 7), (4, 4)):
        rows = torch.cat([in_epochs(total, i * count_, count_, "x", 0) for i in range(total)])
        epochs = rows.view(-1, total)
        assert (epochs.sort(1).values == torch.arange(total)).all()
        assert len(epochs.unique(dim=0)) > 1
    assert not torch.equal(in_epochs(50, 0, 50, "x", 0), in_epochs(50, 0, 50, "x", 1))


def test_each_prompt_comes_once_in_an_epoch_and_a_training_goes_on_where_it_was():
    def fresh(seen):
        def reward(prompts, responses):
            seen.append(prompts[::4])
            return count(prompts, responses)
        return own(reward=reward, prompts=FOUR, prompt_order="epochs", iterations=4, batch=8,
                   dynamic_sampling=True)
    whole, first, rest = [], [], []
    t = fresh(whole).learn()
    starts = [sum(row["rounds"] for row in t.rows[:i]) for i in range(4)]
    turns = [whole[i] for i in starts]
    assert sorted(turns[0] + turns[1]) == sorted(turns[2] + turns[3]) == sorted(FOUR)
    half = fresh(first)
    half.iterate(), half.iterate()
    again = fresh(rest)
    again.loop.load_state_dict(half.loop.state_dict())
    again.learn()
    assert first + rest == whole
    assert without_times(half.rows + again.rows) == without_times(t.rows)
    for p, q in zip(t.policy.parameters(), again.policy.parameters()): assert torch.equal(p, q)


def test_long_prompts_are_left_out_and_counted():
    prompts = ["w3", "w4 w5 w6", "w5 w6"]  # and a BOS each
    with pytest.warns(UserWarning, match="1 of 3 prompts have more than prompt_length = 3 tokens"):
        t = own(prompts=prompts, reward=count, prompt_length=3, long_prompts="filter").learn()
    assert [row["prompt"] for row in t.task.rows] == ["w3", "w5 w6"]
    assert t.task.tokens.shape == (2, 3) and t.task.decode(t.task.tokens) == ["w3", "w5 w6"]
    with pytest.raises(ValueError, match="^prompt_length must hold one of the prompts, got 1"):
        own(prompts=prompts, prompt_length=1, long_prompts="filter")
    with pytest.raises(ValueError, match="^prompt_length must be 0 or at least 4"):
        own(prompts=prompts, prompt_length=3)


@pytest.mark.parametrize("options, words", [
    (dict(dynamic_sampling=True, algo="ppo"), "dynamic_sampling must be left out for algo ppo"),
    (dict(reward_aggregation="normalise", algo="rloo"), "reward_aggregation must be left out"),
    (dict(reward_aggregation="normalise", group_scale="batch"), "group_scale must be left out"),
    (dict(reward_aggregation="normalise", overlong="soft"), "overlong must be keep or filter"),
    (dict(reward_aggregation="mean"), "reward_aggregation must be"),
    (dict(prompt_order="sorted"), "prompt_order must be"),
    (dict(long_prompts="filter"), "long_prompts must be refuse where prompt_length is 0")])
def test_an_option_without_an_effect_is_refused(options, words):
    with pytest.raises(ValueError, match=f"^{words}"): own(reward=count, **options)


# --- a teacher in place of the reward

def taught(teacher=None, **options):
    "A student with a teacher of its kind, and that teacher."
    if teacher is None:
        teacher, g = make("GPT2"), torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in teacher.parameters(): p += 0.2 * torch.randn(p.shape, generator=g)
    small = {name: x for name, x in SMALL.items() if name != "kl_coef"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        return teacher, RLHF(make("GPT2"), tokenizer(), ["w3 w4", "w5"], teacher=teacher,
                             **small | options)


def test_a_student_learns_from_its_teacher():
    teacher, t = taught(iterations=12, learning_rate=3e-3)
    rows = t.learn().rows
    assert rows[-1]["kl_k1"] < 0.7 * rows[0]["kl_k1"] and rows[0]["kl_k1"] > 0.01
    assert rows[0]["score"] == 0 and rows[0]["kl_coef"] == 0


def test_the_advantage_is_what_the_teacher_would_rather_have_had():
    teacher, t = taught(iterations=1)
    t.iterate()
    x = t.rollout
    logits = teacher(x.tokens.masked_fill(~x.mask, 0), attention_mask=x.mask.long(),
                     position_ids=x.mask.long().cumsum(1).sub(1).clamp(min=0)).logits
    T = x.logp.shape[1]
    of = logits[:, -T - 1:-1].log_softmax(-1).gather(-1, x.responses[..., None])[..., 0]
    expected = ((of - x.logp) * x.response_mask).detach()
    torch.testing.assert_close(t.loop.advantages().advantages, expected, rtol=1e-4, atol=1e-5)


def test_a_teacher_that_cannot_teach_is_refused():
    large = make_gpt2("tiny", 60)
    for options, words in (
            (dict(teacher=large), "teacher must have the model's vocabulary of .*60"),
            (dict(algo="ppo"), "algo must be grpo or rloo with a teacher"),
            (dict(dynamic_sampling=True), "dynamic_sampling must be left out for algo teacher"),
            (dict(kl_coef=0.1), "kl_coef must be left out for algo teacher")):
        with pytest.raises(ValueError, match=words):
            taught(**options)


# --- a loop of one's own, on any machine

class Counting(Loop):
    "Takes half of the loss, and counts its parts."
    def __init__(self, *args):
        super().__init__(*args)
        self.parts = 0

    def loss(self, part, batch):
        self.parts += 1
        loss, log = super().loss(part, batch)
        return loss / 2, log | dict(half=loss.detach() / 2)


class Halved(RLHF):
    LOOP = Counting


@pytest.mark.parametrize("options, kind, parts", [
    ({}, Machine, 1), (dict(microbatches=2), Scaled, 2), (dict(precision="bfloat16"), Scaled, 1)])
def test_a_loop_of_ones_own_runs_on_every_machine(options, kind, parts):
    def made(kind):
        return kind(make("GPT2"), tokenizer(), ["w3 w4", "w5"], count, iterations=2,
                    **SMALL | options)
    own, plain = made(Halved), made(RLHF)
    mine, theirs = own.iterate(), plain.iterate()
    assert type(own.loop.machine) is kind and type(own.loop) is Counting
    assert own.loop.parts == parts * own.config.epochs * own.config.minibatches
    assert mine["grad_norm"] < theirs["grad_norm"] and "half" in mine
    first = own.loop.config.epochs * own.loop.config.minibatches == 1
    assert not first or mine["half"] == pytest.approx(theirs["policy_loss"] / 2, rel=1e-3)
    assert own.iterate()["iteration"] == 2
