import re
from dataclasses import FrozenInstanceError, asdict, fields, replace
from typing import get_args

import pytest

from rlhf_notes.control import config
from rlhf_notes.control.config import PendulumConfig, PPOConfig

@pytest.mark.parametrize("bad, words", [
    (dict(seed=-1), "seed must be greater than or equal to 0, got -1"),
    (dict(seed=0.5), "seed must be a valid integer, got 0.5"),
    (dict(device=0), "device must be a valid string, got 0"),
    (dict(steps=0), "steps must be greater"),
    (dict(steps=1), "steps must be at least num_envs * num_steps = 1024, got 1"),
    (dict(num_steps=1), "num_steps must be greater than or equal to 2"),
    (dict(minibatches=3), "minibatches must divide num_envs * num_steps = 1024, got 3"),
    (dict(learning_rate=0.0), "learning_rate must be greater than 0"),
    (dict(gamma=1.01), "gamma must be less than or equal to 1, got 1.01"),
    (dict(lam=-0.01), "lam must be greater than or equal to 0, got -0.01"),
    (dict(clip=0.0), "clip must be greater than 0"),
    (dict(clip=1.5), "clip must be less than or equal to 1"),
    (dict(lr_anneal=-1), "lr_anneal must be greater"),
    (dict(clip_anneal=30.0),
     "clip_anneal must leave a clip range that fits float32 in the last of "),
    (dict(clip=1e-300), "clip must fit float32, got 1e-300"),
    (dict(log_std=11), "log_std must be less than or equal to 10"),
    (dict(log_std=float("-inf")), "log_std must be"),
    (dict(vectorization="threads"),
     "vectorization must be 'auto', 'sync' or 'async', got 'threads'"),
    (dict(activation="gelu"), "activation must be 'tanh', 'relu' or 'silu'"),
    (dict(squash=1), "squash must be a valid boolean, got 1"),
    (dict(env=1), "env must be a valid string, got 1"),
    (dict(sed=1), "sed must be an option of "),
])
@pytest.mark.parametrize("Config", [PPOConfig, PendulumConfig])
def test_what_cannot_be_right_is_named(Config, bad, words):
    with pytest.raises(ValueError) as e: Config(**bad)
    assert str(e.value).startswith(words)


def test_sizes_and_edges():
    c = PPOConfig(steps=1300, num_envs=4, num_steps=32)
    assert (c.batch, c.iterations) == (128, 10)
    assert PPOConfig(steps=1024).iterations == 1 and PPOConfig(seed=2**63 - 1)
    PPOConfig(gamma=0, lam=0, clip=1, entropy_coef=0, value_coef=0)
    PPOConfig(gamma=1, lam=1, lr_anneal=0, target_kl=0, value_clip=0, log_std=-10, hidden=1,
              squash=True, normalize_obs=True)
    assert PendulumConfig().env == "Pendulum-v1"
    assert PendulumConfig().iterations * PendulumConfig().batch <= PendulumConfig().steps


def test_defaults_are_those_with_which_the_results_were_made():
    c = asdict(PPOConfig())
    assert c == dict(
        env="CartPole-v1", env_kwargs=None, eval_episodes=100, seed=0, device="auto",
        vectorization="auto", eval_every=0, keep_best=False, steps=40_000,
        num_envs=32, num_steps=32, stagger=False, epochs=4,
        minibatches=8, learning_rate=3e-3, lr_anneal=1.0, adam_eps=1e-5, gamma=0.98, lam=0.95,
        truncation="bootstrap",
        whitening="rollout", clip=0.2, clip_anneal=0.0, target_kl=0.0, entropy_coef=0.0,
        value_coef=0.5, value_clip=0.0, max_grad_norm=0.5, normalize_obs=False,
        normalize_rewards=False, reward_scale=1.0, hidden=64, activation="tanh",
        init="orthogonal", shared=False, log_std=0.0, squash=False, recent_episodes=20,
        reward_clip=0.0)
    assert asdict(PendulumConfig()) == c | dict(
        env="Pendulum-v1", steps=50_000, num_envs=16, num_steps=64, stagger=True, epochs=6,
        minibatches=4, learning_rate=5e-3, lr_anneal=2.0, gamma=0.95, reward_scale=0.1,
        activation="silu", log_std=1.0)


def test_the_budget_is_never_exceeded():
    for steps in range(128, 600, 7):
        c = PPOConfig(steps=steps, num_envs=4, num_steps=32)
        assert steps - c.batch < c.iterations * c.batch <= steps


def test_a_config_does_not_change_and_a_variant_is_checked():
    with pytest.raises(FrozenInstanceError): PPOConfig().gamma = 0.5
    with pytest.raises(ValueError, match="gamma must be less"): replace(PPOConfig(), gamma=2)
    assert replace(PendulumConfig(), seed=3) == PendulumConfig(seed=3)


def test_every_option_is_explained():
    assert all(len(f.description) > 10 for f in PPOConfig.__pydantic_fields__.values())


def test_the_two_configs_have_the_same_options_in_the_same_order():
    ours, theirs = PPOConfig.__pydantic_fields__, PendulumConfig.__pydantic_fields__
    assert list(ours) == list(theirs) and PPOConfig.__annotations__.keys() == set(ours)
    for name in ours:
        assert (ours[name].annotation, ours[name].metadata) == (
            theirs[name].annotation, theirs[name].metadata), name


def test_the_page_explains_options_and_every_choice():
    """A row of a table on the page is about options that exist; a choice stands there or in the
    field's own text.
    """
    rows = [line for line in config.__doc__.splitlines() if line.startswith("|")]
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert len(explained) > 20 and explained <= {f.name for f in fields(PPOConfig)}
    for name, field in PPOConfig.__pydantic_fields__.items():
        for choice in get_args(field.annotation):
            assert not isinstance(choice, str) or choice in field.description or any(
                f"`{choice}`" in row for row in rows), (name, choice)


def test_choices_are_those_of_the_code_that_uses_them():
    from rlhf_notes.control.policy import ACTIVATIONS
    choices = {
        name: get_args(field.annotation) for name, field in PPOConfig.__pydantic_fields__.items()}
    assert choices["activation"] == tuple(ACTIVATIONS)
    assert choices["init"] == ("orthogonal", "default")
