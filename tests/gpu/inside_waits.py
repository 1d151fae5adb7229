"""Where a training waits for the GPU. A new line in these tables makes every iteration slower: is
it needed?
"""
from collections import Counter

import pytest
from pretend import counted

from rlhf_notes.control.trainer import PPO
from rlhf_notes.reviews import pipeline
from rlhf_notes.reviews.config import ReviewsConfig

EXPECTED = {
    "pretraining": {"D2H reviews/pretraining": 1},  # loss and norm
    "reward model": {"D2H reviews/pretraining": 1},  # loss, accuracy and norm
    "rl": {"item language/sampling": 1,  # is the mask right?
           "D2H language/loop": 1,  # the log
           # what `view` shows: which tokens, and 27 times in a training all of a batch
           "D2H hub/recorder": 2, "D2H language/rollout": 12},
    # the mask; the responses
    "evaluation": {"item language/sampling": 1, "D2H reviews/pipeline": 1},
}


def waits(f):
    with counted() as found: f()
    table = Counter()
    for (kind, line), n in found.lines.items():
        table[f"{kind} {line.removeprefix('rlhf_notes/').split('.py')[0]}"] += n
    return table, found.launches


def test_rlhf_waits_here_and_nowhere_else():
    training = pipeline.Training(
        ReviewsConfig(device="cuda", sft_steps=3, labels=24, norm_samples=16, iterations=3,
                      batch=16, eval_responses=16, eval_every=100))
    found = {}
    for name, key in (("sft", "pretraining"), ("reward_model", "reward model"), ("rl", "rl")):
        while training.name != name: training.iterate()
        training.iterate()  # the first is another
        found[key], launches = waits(training.iterate)
    found["evaluation"], _ = waits(lambda: pipeline.evaluate(training.stage))
    assert found == EXPECTED
    assert launches < 6000  # of an iteration of RL: 16 forward and 8 backward passes of two blocks


@pytest.mark.parametrize("env, most", [("CartPole-v1", 30), ("Pendulum-v1", 30)])
def test_control_waits_for_its_rollout_and_its_minibatches(env, most):
    ppo = PPO(env, device="cuda", steps=10**5)
    ppo.iterate()
    found, launches = waits(ppo.iterate)
    assert found.total() <= most, found
