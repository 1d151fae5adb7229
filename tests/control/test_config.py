import json
import re
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path

import pytest

from rlhf_notes.control.config import PendulumConfig, PPOConfig


@pytest.mark.parametrize("bad, error, words", [
    (dict(seed=-1), ValueError, "seed must be in"), (dict(seed=0.5), TypeError, "seed must be an integer"), (dict(device=0), TypeError, "device must be a string"),
    (dict(steps=0), ValueError, "steps must be in"), (dict(steps=1023), ValueError, r"steps must be at least num_envs \* num_steps = 1024, got 1023"),
    (dict(num_envs=0), ValueError, "num_envs must be in"), (dict(num_steps=0), ValueError, "num_steps must be in"), (dict(epochs=0), ValueError, "epochs must be in"),
    (dict(minibatches=0), ValueError, "minibatches must be in"), (dict(minibatches=3), ValueError, r"minibatches must divide num_envs \* num_steps = 1024, got 3"),
    (dict(learning_rate=0.0), ValueError, "learning_rate must be in"), (dict(learning_rate=float("nan")), ValueError, "learning_rate must be in"), (dict(learning_rate="1"), TypeError, "learning_rate must be a number"),
    (dict(gamma=1.01), ValueError, "gamma must be in"), (dict(lam=-0.1), ValueError, "lam must be in"), (dict(lam=1.1), ValueError, "lam must be in"), (dict(clip=0.0), ValueError, "clip must be in"), (dict(clip=1.5), ValueError, "clip must be in"),
    (dict(lr_anneal=-1), ValueError, "lr_anneal must be in"), (dict(clip_anneal=-0.1), ValueError, "clip_anneal must be in"), (dict(adam_eps=0), ValueError, "adam_eps must be in"),
    (dict(target_kl=-1), ValueError, "target_kl must be in"), (dict(value_clip=-1), ValueError, "value_clip must be in"), (dict(reward_scale=0), ValueError, "reward_scale must be in"),
    (dict(hidden=0), ValueError, "hidden must be in"), (dict(log_std=11), ValueError, r"log_std must be in \[-10, 10\], got 11"), (dict(log_std=float("-inf")), ValueError, "log_std must be in"),
    (dict(vectorization="threads"), ValueError, "vectorization must be one of 'auto', 'sync', 'async', got 'threads'"), (dict(truncation="none"), ValueError, "truncation must be one of 'bootstrap', 'terminate'"),
    (dict(whitening=True), (TypeError, ValueError), "whitening must be"), (dict(activation="gelu"), ValueError, "activation must be one of"), (dict(init=""), ValueError, "init must be one of"),
    (dict(squash=1), TypeError, "squash must be True or False, got 1"), (dict(stagger=200), TypeError, "stagger must be True or False, got 200"), (dict(normalize_obs="yes"), TypeError, "normalize_obs must be True or False"), (dict(normalize_rewards=0.0), TypeError, "normalize_rewards must be True or False"),
    (dict(env=1), TypeError, "env must be a string, got int"), (dict(epochs=True), TypeError, "epochs must be a number, got bool"), (dict(learning_rate=float("inf")), ValueError, "learning_rate must be in"),
    (dict(entropy_coef=-1.0), ValueError, "entropy_coef must be in"), (dict(value_coef=-1.0), ValueError, "value_coef must be in"), (dict(max_grad_norm=0.0), ValueError, "max_grad_norm must be in"),
])
@pytest.mark.parametrize("Config", [PPOConfig, PendulumConfig])
def test_what_cannot_be_right_is_named(Config, bad, error, words):
    if Config is PendulumConfig: words = words.replace("1024", str(Config().batch)).replace("got 1023", "got [0-9]+")
    if bad == dict(steps=1023): bad = dict(steps=Config().batch - 1)
    with pytest.raises(error, match=words): Config(**bad)


def test_sizes_and_edges():
    c = PPOConfig(steps=1300, num_envs=4, num_steps=32)
    assert (c.batch, c.iterations) == (128, 10)
    assert PPOConfig(steps=1024).iterations == 1 and PPOConfig(seed=2**63 - 1)
    PPOConfig(gamma=0, lam=0, clip=1, entropy_coef=0, value_coef=0)
    PPOConfig(gamma=1, lam=1, lr_anneal=0, target_kl=0, value_clip=0, log_std=-10, hidden=1, squash=True, normalize_obs=True)
    assert PendulumConfig().env == "Pendulum-v1" and PendulumConfig().iterations * PendulumConfig().batch <= PendulumConfig().steps


def test_defaults_are_those_with_which_the_results_were_made():
    c = asdict(PPOConfig())
    assert c == dict(env="CartPole-v1", seed=0, device="auto", vectorization="auto", steps=40_000, num_envs=32, num_steps=32, stagger=False, epochs=4, minibatches=8, learning_rate=3e-3, lr_anneal=1.0, adam_eps=1e-5, gamma=0.98, lam=0.95, truncation="bootstrap",
                     whitening="rollout", clip=0.2, clip_anneal=0.0, target_kl=0.0, entropy_coef=0.0, value_coef=0.5, value_clip=0.0, max_grad_norm=0.5, normalize_obs=False, normalize_rewards=False, reward_scale=1.0, hidden=64, activation="tanh",
                     init="orthogonal", log_std=0.0, squash=False)
    assert asdict(PendulumConfig()) == c | dict(env="Pendulum-v1", steps=50_000, num_envs=16, num_steps=64, stagger=True, epochs=6, minibatches=4, learning_rate=5e-3, lr_anneal=2.0, gamma=0.95, reward_scale=0.1, activation="silu", log_std=1.0)


def test_the_budget_is_never_exceeded():
    for steps in range(128, 600, 7):
        c = PPOConfig(steps=steps, num_envs=4, num_steps=32)
        assert steps - c.batch < c.iterations * c.batch <= steps


def test_a_config_does_not_change_and_a_variant_is_checked():
    with pytest.raises(FrozenInstanceError): PPOConfig().gamma = 0.5
    with pytest.raises(ValueError, match="gamma must be in"): replace(PPOConfig(), gamma=2)
    assert replace(PendulumConfig(), seed=3) == PendulumConfig(seed=3)


def test_every_option_is_explained():
    for f in fields(PPOConfig): assert len(f.metadata["help"]) > 10, f.name


def test_the_two_configs_have_the_same_options_in_the_same_order():
    assert [f.name for f in fields(PPOConfig)] == [f.name for f in fields(PendulumConfig)]
    for f, g in zip(fields(PPOConfig), fields(PendulumConfig)):
        assert f.type == g.type and {k: v for k, v in f.metadata.items() if k != "help"} == {k: v for k, v in g.metadata.items() if k != "help"}, f.name


def test_the_lesson_explains_every_option_and_every_choice():
    "Each has a row of its own in a table of the notebook."
    notebook = json.loads((Path(__file__).parent.parent.parent / "nbs" / "control" / "18_config.ipynb").read_text(encoding="utf-8"))
    rows = [line for c in notebook["cells"] if c["cell_type"] == "markdown" for line in "".join(c["source"]).splitlines() if line.startswith("|")]
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert explained == {f.name for f in fields(PPOConfig)}
    for f in fields(PPOConfig):
        for choice in f.metadata["choices"]: assert any(f"`{choice}`" in row for row in rows), (f.name, choice)


def test_choices_are_those_of_the_code_that_uses_them():
    from rlhf_notes.control.policy import ACTIVATIONS, INITS
    choices = {f.name: f.metadata["choices"] for f in fields(PPOConfig)}
    assert choices["activation"] == tuple(ACTIVATIONS) and choices["init"] == INITS
