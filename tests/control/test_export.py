"The exported policy: the actions of `predict`, through torch.export and torch.compile."
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

from rlhf_notes import PPO

VECTOR = Box(-1, 1, (3,), np.float32)
OBSERVATIONS = dict(
    scalar=Box(-1, 1, (), np.float32),
    vector=VECTOR, exact=Box(-1, 1, (2,), np.float64), whole=Discrete(4, start=2),
    several=MultiDiscrete([3, 2], start=[1, 0]), switches=MultiBinary(3),
    bytes=Box(0, 255, (5,), np.uint8), picture=Box(0, 255, (12, 10, 3), np.uint8),
    grey=Box(0, 255, (40, 40), np.uint8), dict=Dict(b=Box(0, 255, (12, 12, 1), np.uint8), a=VECTOR,
                                                    c=Discrete(3)))
ACTIONS = dict(
    discrete=Discrete(3, start=4), several=MultiDiscrete([2, 3]), switches=MultiBinary(4),
    box=Box(np.float32([-1, 0.3]), np.float32([1, 0.4])))


class Random(gym.Env):
    def __init__(self, shows, takes):
        self.observation_space, self.action_space = shows, takes

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        return self.observation_space.sample(), float(np.sum(action)), False, self.t > 9, {}


def trained(shows, takes, **options):
    small = dict(steps=512, num_envs=4, num_steps=64, minibatches=2, network=(16,), seed=1)
    return PPO(lambda: Random(shows, takes), **{**small, **options}).learn()


def batch(space, n=7):
    space.seed(0)
    some = [space.sample() for _ in range(n)]
    if isinstance(space, Dict):
        return {name: np.stack([x[name] for x in some]) for name in space.spaces}
    return np.stack(some)


def tensors(obs):
    if isinstance(obs, dict): return {name: torch.from_numpy(x) for name, x in obs.items()}
    return torch.from_numpy(obs)


def assert_same(ppo, obs, act, *mask):
    expected = ppo.predict(obs, action_mask=mask[0] if mask else None)
    got = act(tensors(obs), *map(torch.from_numpy, mask)).numpy()
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shows", OBSERVATIONS)
@pytest.mark.parametrize("normalize", [False, True])
def test_every_observation(shows, normalize):
    ppo = trained(OBSERVATIONS[shows], ACTIONS["box"], normalize_obs=normalize)
    assert_same(ppo, batch(OBSERVATIONS[shows]), ppo.export())


@pytest.mark.parametrize("shows", OBSERVATIONS)
def test_a_batch_of_any_size_goes_through_torch_export(shows):
    ppo, obs = trained(OBSERVATIONS[shows], ACTIONS["box"]), batch(OBSERVATIONS[shows])
    rows, few = {0: torch.export.Dim("rows", min=2, max=64)}, tensors(batch(OBSERVATIONS[shows], 5))
    sizes = {name: rows for name in obs} if isinstance(obs, dict) else rows
    program = torch.export.export(ppo.export(), (few,), dynamic_shapes=(sizes,))
    assert_same(ppo, obs, program.module())


@pytest.mark.parametrize("takes", ACTIONS)
@pytest.mark.parametrize("squash", [False, True])
def test_every_action_through_torch_export(takes, squash):
    if squash and takes != "box": return
    ppo = trained(VECTOR, ACTIONS[takes], squash=squash, learning_rate=0.1)
    obs = batch(VECTOR)
    program = torch.export.export(ppo.export(), (tensors(obs),))
    assert_same(ppo, obs, program.module())
    assert_same(ppo, obs, torch.compile(ppo.export(), backend="eager", fullgraph=True))


def test_a_mask_rules_actions_out_and_a_change_of_the_trainer_changes_no_export():
    ppo = trained(VECTOR, ACTIONS["discrete"])
    obs, mask = batch(VECTOR), np.eye(3, dtype=bool)[[0, 1, 2, 0, 1, 2, 0]]
    policy = ppo.export()
    assert_same(ppo, obs, policy, mask)
    assert (policy(tensors(obs), torch.from_numpy(mask)).numpy() == mask.argmax(1) + 4).all()
    before = policy(tensors(obs))
    for p in ppo.agent.parameters():
        p.data.mul_(-1)
    assert torch.equal(policy(tensors(obs)), before)
