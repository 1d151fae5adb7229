from dataclasses import fields

import pytest

from rlhf_notes.control.config import PPOConfig


@pytest.mark.parametrize("bad, error, words", [
    (dict(seed=-1), ValueError, "seed must be in"), (dict(seed=0.5), TypeError, "seed must be an integer"), (dict(device=0), TypeError, "device must be a string"),
    (dict(steps=0), ValueError, "steps must be in"), (dict(steps=511), ValueError, r"steps must be at least num_envs \* num_steps = 512, got 511"),
    (dict(num_envs=0), ValueError, "num_envs must be in"), (dict(num_steps=0), ValueError, "num_steps must be in"), (dict(epochs=0), ValueError, "epochs must be in"),
    (dict(minibatches=0), ValueError, "minibatches must be in"), (dict(minibatches=3), ValueError, r"minibatches must divide num_envs \* num_steps = 512, got 3"),
    (dict(learning_rate=0.0), ValueError, "learning_rate must be in"), (dict(learning_rate=float("nan")), ValueError, "learning_rate must be in"), (dict(learning_rate="1"), TypeError, "learning_rate must be a number"),
    (dict(gamma=1.01), ValueError, "gamma must be in"), (dict(lam=-0.1), ValueError, "lam must be in"), (dict(clip=0.0), ValueError, "clip must be in"), (dict(clip=1.5), ValueError, "clip must be in"),
    (dict(entropy_coef=-1.0), ValueError, "entropy_coef must be in"), (dict(value_coef=-1.0), ValueError, "value_coef must be in"), (dict(max_grad_norm=0.0), ValueError, "max_grad_norm must be in"),
])
def test_what_cannot_be_right_is_named(bad, error, words):
    with pytest.raises(error, match=words): PPOConfig(**bad)


def test_sizes_and_edges():
    c = PPOConfig(steps=1300, num_envs=4, num_steps=32)
    assert (c.batch, c.iterations) == (128, 10)
    assert PPOConfig(steps=512).iterations == 1
    PPOConfig(gamma=0, lam=0, clip=1, entropy_coef=0, value_coef=0)
    PPOConfig(gamma=1, lam=1)


def test_every_option_is_explained():
    for f in fields(PPOConfig): assert len(f.metadata["help"]) > 10, f.name
