"A copied or unpickled trainer of a language model learns on as the original does."
import copy
import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from language.test_own_task import SMALL, count, tokenizer
from language_models import make

from rlhf_notes import DPO, RLHF
from rlhf_notes.hub.reward_trainer import RewardTrainer

PAIRS = [dict(prompt=f"w{i}", chosen="w9 " * (1 + i % 3), rejected="w8") for i in range(3, 9)]
COPIES = dict(deepcopy=copy.deepcopy, pickle=lambda t: pickle.loads(pickle.dumps(t)))


def over(prompts, responses): return [None] * len(prompts)
def replies(prompts, responses): return [("w5" if len(p) < 9 else None, 1.0) for p in prompts]
def size(prompts, responses): return [float(len(r)) for r in responses]
def told(prompts, responses): return ["w3"] * len(prompts)
def less_the_mean(rewards, mask): return rewards - rewards.mean(1, keepdim=True)


WAYS = dict(
    plain={}, ppo=dict(algo="ppo"), adapter=dict(lora=2),
    best=dict(eval_prompts=["w3", "w4 w5"], eval_reward=size, eval_every=1, keep_best=True),
    groups=dict(dynamic_sampling=True), own=dict(advantage=less_the_mean),
    hint=dict(hint=told, reward=None), dialogue=dict(environment=over),
    turns=dict(environment=replies, turn_credit="leave-one-out", reward=None, max_new_tokens=8),
    replies=dict(environment=replies, observation_coef=0.1, reward=None, max_new_tokens=8))


def build(way, lm=None):
    lm = make("Llama") if lm is None else lm
    if way == "dpo":
        return DPO(lm, tokenizer(), PAIRS, max_new_tokens=4, iterations=4, batch=6,
                   minibatches=2, device="cpu")
    if way == "scores":
        return RewardTrainer(lm, tokenizer(), PAIRS, iterations=4, batch=4, device="cpu")
    options = SMALL | dict(iterations=4, reward=count) | WAYS[way]
    del options["kl_coef"]
    return RLHF(lm, tokenizer(), ["w3 w4", "w5"], group=4, **options)


@pytest.mark.parametrize("way", [*WAYS, "dpo", "scores"])
def test_copies_learn_on_as_the_original(way):
    t = build(way).learn(lambda trainer, row: trainer.iteration < 2)
    copies = [f(t) for f in COPIES.values()]
    first, *others = [x.learn() for x in (t, *copies)]
    weights = [x.optimizer.vector if way == "scores" else x.loop.optimizer.vector
               for x in (first, *others)]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    for other in others:
        for row, same in zip(first.rows, other.rows):
            for name in row.keys() - {"tokens_per_second"}:
                assert row[name] == same[name] or row[name] != row[name], name


def test_the_best_weights_are_kept_where_they_were_replaced():
    t, seen = build("best"), {}
    def weights(): return torch.nn.utils.parameters_to_vector(t.policy.parameters()).detach()
    def replace(trainer, row):
        seen.setdefault(row["eval_score"], weights())
        for p in trainer.policy.parameters():
            p.data = p.data.clone()
    t.learn(replace)
    assert len(seen) > 1 and torch.equal(weights(), seen[max(seen)])


@pytest.mark.parametrize("way", ["plain", "ppo", "dpo", "scores"])
def test_a_model_in_the_place_of_the_first_is_learned(way):
    def replace(trainer, row):
        holder, name = (trainer, "model") if way == "scores" else (trainer.loop, "policy")
        setattr(holder, name, copy.deepcopy(getattr(holder, name)))
    first, other = build(way).learn(), build(way).learn(replace)
    for one, two in zip((first.model if way == "scores" else first.policy).parameters(),
                        (other.model if way == "scores" else other.policy).parameters()):
        assert torch.equal(one, two)


AROUND = dict(inference=torch.inference_mode, device=lambda: torch.device("meta"),
              half=lambda: torch.autocast("cpu", torch.bfloat16), plain=nullcontext)


@pytest.mark.filterwarnings("ignore:autocast for cpu is off")
@pytest.mark.parametrize("way", ["best", "adapter", "dpo", "scores"])
def test_what_is_set_around_a_trainer_changes_nothing(way):
    found = []
    for around in AROUND.values():
        lm = make("Llama")
        with around():
            t = build(way, lm).learn()
            with torch.autocast("cpu", enabled=False):
                said = t(["w3", "w5"]).tolist() if way == "scores" else t.generate(["w3"] * 4)
        model = t.model if way == "scores" else t.policy
        found.append([said, *(p.tolist() for p in model.parameters())])
    assert all(x == found[0] for x in found)


@pytest.mark.parametrize("no", [False, np.False_, torch.tensor(False)])
def test_a_false_of_any_library_ends_a_training(no):
    assert build("plain").learn(lambda trainer, row: no).iteration == 1


@pytest.mark.parametrize("yes", [None, 0, 0.0, "", [], True, np.True_, torch.tensor(0.0)])
def test_nothing_else_ends_a_training(yes):
    assert build("plain").learn(lambda trainer, row: yes).iteration == 4


@pytest.mark.parametrize("way", ["plain", "dpo", "scores"])
def test_a_callback_that_is_no_function_is_refused_at_the_start(way):
    t = build(way)
    with pytest.raises(TypeError, match="^callback must be a function or None, got 5$"): t.learn(5)
    assert t.iteration == 0
