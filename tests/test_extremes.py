"""No option of a config ends in a traceback from inside, whatever its value.

Either the config refuses it in one line, or a tiny training runs, or ends with the error of a
training that diverged.
"""
import math
from typing import get_args

import pytest

from rlhf_notes.control.config import PendulumConfig, PPOConfig
from rlhf_notes.control.trainer import train as train_control
from rlhf_notes.reviews.config import ReviewsConfig, ReviewsDPOConfig
from rlhf_notes.reviews.pipeline import Training
from rlhf_notes.reviews.pipeline import train as train_language

BEYOND = (1e300, 1e-300, math.nan, math.inf, -math.inf)  # never right
CONTROL = dict(steps=32, num_envs=2, num_steps=8, minibatches=2, epochs=2, hidden=4,
               eval_episodes=2, vectorization="sync", target_kl=0.1, entropy_coef=0.01,
               value_clip=0.2)
LANGUAGE = dict(device="cpu", sft_steps=2, sft_batch=4, labels=8, rm_batch=4, norm_samples=8,
                iterations=2, batch=8, epochs=1, minibatches=2, group=2, eval_every=1,
                eval_responses=4, response_length=8, stop_after=2)


def numbers(config):
    "The options that are numbers with a fraction, or None."
    def is_number(kind): return getattr(kind, "__origin__", kind) is float
    return [name for name, field in config.__pydantic_fields__.items()
            if any(map(is_number, (field.annotation, *get_args(field.annotation))))]


def refused(config, **options):
    "The one line with which a config refuses, or None."
    try:
        config(**options)
    except ValueError as e:
        assert "\n" not in str(e)
        return str(e)


@pytest.mark.parametrize("config", [PPOConfig, PendulumConfig, ReviewsConfig])
def test_a_number_that_float32_cannot_hold_is_refused_by_name(config):
    assert len(numbers(config)) > 12
    assert {"clip", "learning_rate", "value_coef"} <= {*numbers(config)}
    for name in numbers(config):
        for x in BEYOND:
            assert (refused(config, **{name: x}) or "taken").startswith(f"{name} must "), (name, x)


def runs(train, config, name, options):
    "A tiny training with 3e38, which float32 just holds, ends or diverges with our own error."
    if refused(config, **options | {name: 3e38}): return
    try:
        train(config(**options | {name: 3e38}))
    except FloatingPointError as e:
        assert "the last checkpoint, if there is one, is from before" in str(e)


@pytest.mark.parametrize("name", numbers(PPOConfig))
def test_a_huge_number_in_control_runs_or_diverges_by_name(name):
    runs(train_control, PPOConfig, name, CONTROL)
    runs(train_control, PPOConfig, name, CONTROL | dict(normalize_rewards=True))
    runs(train_control, PendulumConfig, name, CONTROL)


@pytest.mark.parametrize("name", numbers(ReviewsConfig))
def test_a_huge_number_in_language_runs_or_diverges_by_name(name):
    more = dict(kl_coef=dict(algo="grpo"), penalty=dict(overlong="subtract"))
    for options in ({}, more[name]) if name in more else ({},):
        runs(lambda c: train_language(Training(c)), ReviewsConfig, name, LANGUAGE | options)


def test_a_huge_beta_of_dpo_runs_or_diverges_by_name():
    options = {k: x for k, x in LANGUAGE.items() if k in ReviewsDPOConfig.__pydantic_fields__}
    runs(lambda c: train_language(Training(c)), ReviewsDPOConfig, "dpo_beta", options)


def test_a_clip_that_falls_below_what_float32_holds_is_refused_before_anything_begins():
    told = refused(PPOConfig, clip_anneal=30.0)
    assert told.startswith(
        "clip_anneal must leave a clip range that fits float32 in the last of 39 ")
    # 0.2 / 5^50 is 2e-36
    train_control(PPOConfig(**CONTROL | dict(steps=5 * 16, clip_anneal=50.0)))
