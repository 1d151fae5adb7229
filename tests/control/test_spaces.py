"Every space, from a row of numbers to a policy that has learned."
import copy
import re
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from strategies import SEEDS

from rlhf_notes import PPO
from rlhf_notes.control import policy
from rlhf_notes.control.config import PPOConfig
from rlhf_notes.control.envs import make_envs
from rlhf_notes.control.policy import Agent, Body, picture_net
from rlhf_notes.control.rollout import Collector
from rlhf_notes.control.spaces import (
    as_batch,
    picture_shape,
    remedy,
    row_maker,
    space_from_numbers,
    space_to_numbers,
)

PICTURE = Box(0, 255, (6, 6, 1), np.uint8)
KINDS = [Discrete(3, start=-1), MultiDiscrete([2, 3], start=[0, 5]), MultiBinary((2, 2)), PICTURE,
         Box(-1, 1, (2, 2)), Box(-1, np.inf, (), np.float64),
         Dict(b=PICTURE, a=Discrete(2), c=MultiBinary(2), d=Box(-1, 1, (3,)))]


class Guess(gym.Env):
    "Shows a random observation for 8 steps; the right action earns 1: the optimum is 8."
    def __init__(self, shows, takes, right, mask=None):
        self.observation_space, self.action_space = shows, takes
        self.right, self.mask = right, mask

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look()

    def look(self):
        self.shown = self.observation_space.sample()
        if self.mask is None: return self.shown, {}
        self.allowed = np.zeros(self.action_space.n, np.int8)
        if self.t < 8: self.allowed[list(self.mask(self.shown))] = 1  # none when all is over
        return self.shown, {"action_mask": self.allowed}

    def step(self, action):
        assert self.action_space.contains(action)
        if self.mask: assert self.allowed[action - self.action_space.start], "an impossible action"
        reward = float(np.all(action == self.right(self.shown)))
        self.t += 1
        obs, info = self.look()
        return obs, reward, self.t == 8, False, info


class Side(Guess):
    "A bright dot, left or right."
    def look(self):
        self.shown = np.zeros(self.observation_space.shape, np.uint8)
        y, x = self.np_random.integers(self.shown.shape[0]), self.np_random.integers(6)
        self.shown[y, x] = 255
        return self.shown, {}


def dict_right(obs): return int(obs["bit"]) + 2 * int(obs["angle"][0] > 0)


TASKS = {
    "Discrete": (Guess, Discrete(4, start=2), Discrete(4), lambda x: x - 2),
    "MultiDiscrete": (Guess, Discrete(2), MultiDiscrete([2, 3], start=[0, 5]), lambda x: [x, 7]),
    "MultiBinary": (Guess, MultiBinary(2), MultiBinary(2), lambda x: 1 - x),
    "Dict": (Guess, Dict(bit=Discrete(2), angle=Box(-1, 1, (1,))), Discrete(4), dict_right),
    "picture": (Side, PICTURE, Discrete(2), lambda x: int(x[:, 3:].any())),
    "masks": (Guess, Discrete(3), Discrete(3, start=1),
              lambda x: 2 if x == 2 else 3, lambda x: {0, 1, 2} - {int(x)}),
}
FAST = dict(num_envs=16, num_steps=32, steps=10_240, gamma=0.0, minibatches=4)


@pytest.mark.parametrize("task", TASKS)
def test_each_space_is_learned_to_its_optimum(task, tmp_path):
    kind, *of = TASKS[task]
    p = PPO(lambda: kind(*of), **FAST).learn()
    returns = p.evaluate(40)
    assert returns.mean() > (7.5 if task == "Dict" else 7.99), returns  # a border is in between
    shown = p.envs.single_observation_space.sample()
    action = p.predict(shown)
    assert p.spaces[1].contains(action)
    p.save(tmp_path / "p.pt")
    again = PPO.load(tmp_path / "p.pt")
    assert again.spaces == p.spaces and np.array_equal(again.predict(shown), action)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_masks_reach_the_policy_in_both_ways_of_resetting(mode):
    kind, *of = TASKS["masks"]
    envs = SyncVectorEnv([lambda: kind(*of)] * 3, autoreset_mode=mode)
    seen, masks = [], []
    def act(rows, mask):
        seen.append(rows.copy())
        masks.append(mask.copy())
        return mask.argmax(1)
    rollout, episodes = Collector(envs, 0).collect(act, 30, lambda actions: actions + 1)
    assert len(episodes) >= 9
    assert rollout.mask.dtype == torch.bool and np.array_equal(rollout.mask, np.stack(masks))
    assert rollout.obs.shape == rollout.next_obs.shape == rollout.mask.shape == (30, 3, 3)
    steps, possible = (np.stack(x)[rollout.is_step.numpy()] for x in (seen, masks))
    assert (possible == 1 - steps).all()  # all is possible but what is shown
    if mode == AutoresetMode.NEXT_STEP:  # nothing follows: nothing is masked
        assert rollout.mask[~rollout.is_step].all() and not rollout.is_step.all()


def masked_agent(n=3):
    return Agent(Box(-1, 1, (2,)), Discrete(n), PPOConfig(), torch.Generator().manual_seed(0))


@given(seed=SEEDS)
def test_a_masked_action_is_never_drawn_and_has_no_gradient(seed):
    rng, agent = np.random.default_rng(seed), masked_agent()
    bad = np.eye(3, dtype=bool)[rng.integers(3, size=50)]
    obs = rng.normal(size=(50, 2)).astype(np.float32)
    out = agent.outputs(torch.from_numpy(obs), torch.from_numpy(~bad))
    assert (out.softmax(-1)[torch.from_numpy(bad)] == 0).all()
    for draw in agent.actor(rng), agent.actor(), agent.actor(copy=False):
        assert not bad[np.arange(50), draw(obs, ~bad)].any()
    logits = agent.policy(torch.from_numpy(obs)).detach().requires_grad_(True)
    hidden = logits.masked_fill(torch.from_numpy(bad), -torch.inf)
    actions = torch.from_numpy(agent.actor(rng)(obs, ~bad))
    loss = agent.head.logp(hidden, actions).sum() + agent.head.entropy(hidden).sum()
    loss.backward()
    assert (logits.grad[torch.from_numpy(bad)] == 0).all() and logits.grad.isfinite().all()


@pytest.mark.parametrize("space", KINDS, ids=str)
def test_a_space_comes_back_from_a_file(space, tmp_path):
    torch.save(space_to_numbers(space), tmp_path / "x")
    again = space_from_numbers(torch.load(tmp_path / "x", weights_only=True))
    assert again == space and again.dtype == space.dtype


def test_the_entries_of_a_dict_come_back_in_their_order():
    space = Dict([("b", Discrete(2)), ("a", Discrete(3))])
    assert list(space_from_numbers(space_to_numbers(space)).spaces) == ["b", "a"]


@pytest.mark.parametrize("space", KINDS, ids=str)
def test_rows_are_those_of_gymnasium(space):
    space.seed(0)
    obs = [space.sample() for _ in range(5)]
    entry = lambda name: np.stack([x if name is None else x[name] for x in obs])
    many = {k: entry(k) for k in space.spaces} if isinstance(space, Dict) else entry(None)
    rows = row_maker(space)(many)
    assert rows.flags.c_contiguous and rows.shape == (5, gym.spaces.flatdim(space))
    if not isinstance(space, Dict) and picture_shape(space) is None:
        expected = np.stack([gym.spaces.flatten(space, x) for x in obs])
        np.testing.assert_allclose(rows, expected, rtol=1e-6)
    batch, alone = as_batch(space, many)
    assert not alone and np.array_equal(row_maker(space)(batch), rows)
    batch, alone = as_batch(space, obs[0])
    assert alone and np.array_equal(row_maker(space)(batch), rows[:1])


@pytest.mark.parametrize("shape, channels_first", [
    ((9, 8), (1, 9, 8)), ((9, 8, 3), (3, 9, 8)), ((4, 9, 8), (4, 9, 8)), ((2, 9), None),
    ((9,), None), ((2, 2, 3), None)])
def test_which_box_is_a_picture(shape, channels_first):
    assert picture_shape(Box(0, 255, shape, np.uint8)) == channels_first
    assert picture_shape(Box(0, 9, shape, np.uint8)) is None


@pytest.mark.parametrize("space, channels_first", [
    (Box(0, 1, (10, 10, 4), bool), (4, 10, 10)), (Box(0, 1, (9, 8), bool), (1, 9, 8)),
    (MultiBinary((10, 10, 7)), (7, 10, 10)), (MultiBinary((4, 9)), (1, 4, 9)),
    (Box(0, 1, (84, 84, 3)), (3, 84, 84)), (Box(0, 1, (3, 84, 84), np.float64), (3, 84, 84)),
    (Box(0, 1, (4, 4, 16)), (16, 4, 4)), (Box(0, 1, (16, 4, 4)), (16, 4, 4)),
    (Box(0, 1, (10, 10, 10)), (10, 10, 10)), (Box(0, 255, (5, 5, 7), np.uint8), (7, 5, 5)),
    (Box(0, 1, (9, 8)), None), (Box(0, 1, (9,)), None), (MultiBinary(9), None),
    (Box(-1, 1, (9, 8, 3)), None), (Box(0, 1, (2, 2, 3), bool), None)])
def test_bools_and_fractions_are_pictures_as_well(space, channels_first):
    "Small ones with many channels last too: equal sides tell them."
    assert picture_shape(space) == channels_first


@pytest.mark.parametrize("space", [Box(0, 1, (4, 9, 9, 3)), Box(0, 1, (4, 9, 9, 3), bool)])
def test_stacks_of_coloured_pictures_are_refused_whatever_their_dtype(space):
    with pytest.raises(ValueError, match="GrayscaleObservation below the stack"):
        make_envs(lambda: Guess(space, Discrete(2), lambda x: 0), 1)


@pytest.mark.parametrize("kind, value", [((0, 255, np.uint8), 51), ((0, 1, bool), True),
                                         ((0, 1, np.float32), 0.2)])
def test_the_network_sees_the_picture_as_it_is(kind, value):
    low, high, dtype = kind
    space, eye = Box(low, high, (5, 7, 2), dtype), np.zeros((1, 5, 7, 2), dtype)
    eye[0, 3, 4, 1] = value
    seen = []
    body = Body(space, network=torch.nn.Flatten())
    body.nets[0][1].register_forward_hook(lambda module, x, out: seen.append(x[0]))
    body(torch.from_numpy(row_maker(space)(eye)))
    seen, = seen
    assert seen.shape == (1, 2, 5, 7) and seen.dtype == torch.float32
    assert seen[0, 1, 3, 4] == (1 if dtype is bool else np.float32(0.2))
    assert seen.sum() == seen.max()


def test_many_pictures_are_read_piece_by_piece():
    space = Box(0, 255, (8, 8, 1), np.uint8)
    body, sizes = Body(space, generator=torch.Generator().manual_seed(0)), []
    body.nets[0].register_forward_hook(lambda module, x, out: sizes.append(len(x[0])))
    rows = torch.randint(0, 256, (3, 200, 64), dtype=torch.uint8)
    weight, = (p for p in body.parameters() if p.ndim == 4)
    with torch.no_grad(): whole = body._features(rows.flatten(0, 1)).unflatten(0, (3, 200))
    pieces = body(rows)
    assert sizes == [600, 128, 128, 128, 128, 88] and pieces.shape == (3, 200, body.outputs)
    torch.testing.assert_close(pieces, whole)
    pieces.sum().backward()  # learned from in pieces, too
    learned, weight.grad = weight.grad, None
    body._features(rows.flatten(0, 1)).sum().backward()
    torch.testing.assert_close(learned, weight.grad, rtol=1e-4, atol=1e-3)


class Spare(torch.nn.Module):
    "With weights that are frozen, and others that nobody reads."
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(4, 8, 8, 4), torch.nn.Conv2d(8, 8, 4, 2)
        self.spare = torch.nn.Linear(1, 1)
        self.second.requires_grad_(False)

    def forward(self, x): return self.second(self.first(x).relu()).flatten(1)


@pytest.mark.parametrize("space, network", [
    (Box(0, 255, (84, 84, 4), np.uint8), None), (Box(0, 255, (84, 84, 4), np.uint8), Spare()),
    (Dict(a=Box(0, 255, (40, 40, 1), np.uint8), b=Box(0, 255, (9, 9, 3), np.uint8)), None)])
def test_of_a_large_batch_of_pictures_a_gradient_keeps_the_bytes_alone(space, network, monkeypatch):
    "64 environments of 128 steps of Atari would take half a gigabyte more, in each minibatch."
    body = Body(space, generator=torch.Generator().manual_seed(0), network=network)
    rows = torch.randint(0, 256, (200, sum(body.sizes)), dtype=torch.uint8)
    def learn(large):
        kept = {}
        def pack(x):
            kept[x.untyped_storage().data_ptr()] = x.nbytes
            return x
        monkeypatch.setattr(policy, "LARGE", large)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            features = body(rows)
        body.zero_grad()
        features.square().sum().backward()
        return features, [p.grad for p in body.parameters()], sum(kept.values())
    features, gradients, kept = learn(rows.numel())
    again, others, less = learn(rows.numel() - 1)
    assert torch.equal(features, again) and kept > rows.numel() * 4 and less < rows.numel() / 20
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(gradients, others))


@pytest.mark.parametrize("space, network", [
    (Box(-1, 1, (3,)), None), (Box(-1, 1, (3,)), (8, 4)), (Box(0, 255, (9, 9, 2), np.uint8), (16,)),
    (Dict(a=Box(0, 1, (9, 9, 2), bool), b=Box(-1, 1, (2,))), None)])
def test_one_trunk_for_policy_and_value(space, network):
    "Read once; learned from both losses; saved, copied and exported as two networks are."
    make = lambda: Guess(space, Discrete(2), lambda x: 0)
    options = dict(seed=1, steps=256, num_envs=2, num_steps=32, minibatches=2, network=network)
    p, two = PPO(make, shared=True, **options), PPO(make, **options)
    calls = []
    p.agent.trunk[0].register_forward_hook(lambda *_: calls.append(1))
    rows = p.collector.rows({name: np.stack([x] * 2) for name, x in space.sample().items()}
                            if isinstance(space, Dict) else np.stack([space.sample()] * 2))
    rows = torch.from_numpy(rows)
    out, value = p.agent(rows)
    assert len(calls) == 1 and out.shape == (2, 2) and value.shape == (2,)
    torch.testing.assert_close(out, p.agent.outputs(rows))
    torch.testing.assert_close(value, p.agent.value(rows))
    torch.testing.assert_close(out, two.agent.outputs(rows))  # the same weights are drawn
    assert len(p.optimizer.vector) < len(two.optimizer.vector)
    for loss in (out[:, 0].sum(), value.sum()):
        grads = torch.autograd.grad(loss, list(p.agent.trunk.parameters()), retain_graph=True)
        assert any(g.abs().sum() > 0 for g in grads)
    p.learn()
    again = copy.deepcopy(p)
    obs = space.sample()
    assert np.array_equal(again.predict(obs), p.predict(obs)) and again.learn(64).rows[-1:]


def test_a_shared_trunk_comes_back_from_a_file(tmp_path):
    p = PPO("CartPole-v1", shared=True, seed=2, steps=2048).learn()
    p.save(tmp_path / "p.pt")
    q = PPO.load(tmp_path / "p.pt")
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    assert np.array_equal(p.predict(obs), q.predict(obs)) and q.config.shared
    assert np.array_equal(p.export()(torch.from_numpy(obs)).numpy(), p.predict(obs))
    with pytest.raises(ValueError, match="must fit the options"):
        PPO.load(tmp_path / "p.pt", shared=False)


@pytest.mark.parametrize("side, filters", [(16, [16]), (35, [16]), (36, [32, 64, 64]),
                                           (84, [32, 64, 64])])
def test_the_sizes_of_the_literature(side, filters):
    net = picture_net((4, side, side), generator=torch.Generator().manual_seed(0))
    layers = [x for x in net if isinstance(x, torch.nn.Conv2d)]
    assert [x.out_channels for x in layers] == filters
    for x in layers:  # orthogonal, by the gain of ReLU
        values = torch.linalg.svdvals(x.weight.detach().flatten(1))
        torch.testing.assert_close(values, torch.full_like(values, 2 ** 0.5), atol=1e-5, rtol=0)
    if side == 84: assert net(torch.zeros(2, 4 * 84 * 84)).shape == (2, 3136)  # Mnih et al. 2015


def test_an_agent_with_eyes_acts_as_it_learns():
    space = KINDS[-1]
    agent = Agent(space, Discrete(3), PPOConfig(), torch.Generator().manual_seed(0))
    rows = torch.rand(4, 5, gym.spaces.flatdim(space))
    out, value = agent(rows)
    assert out.shape == (4, 5, 3) and value.shape == (4, 5)
    act = agent.actor()
    expected = out.flatten(0, 1).argmax(-1).numpy()
    with torch.no_grad():
        for x in agent.parameters(): x.neg_()
    assert np.array_equal(act(rows.flatten(0, 1).numpy()), expected)  # a copy


@pytest.mark.parametrize("space, helps", [
    (Tuple([Discrete(2)]), "FlattenObservation"), (Dict(a=Dict(b=Discrete(2))), "FlattenObs"),
    (Text(3), ""), (Box(-1, 1, (0,)), ""), (Box(0, 255, (16, 16, 3)), "DtypeObservation"),
    (Box(0, 255, (4, 16, 16, 3), np.uint8), "GrayscaleObservation")])
def test_other_observations_are_refused_with_what_helps(space, helps):
    assert helps in remedy(space)
    shown = lambda: Guess(space, Discrete(2), lambda x: 0)
    with pytest.raises(ValueError, match=re.escape(f"with {space}")) as e: make_envs(shown, 1)
    assert helps in str(e.value) and "\n" not in str(e.value)


def test_a_wrapper_makes_bytes_of_a_picture_of_floats():
    floats = lambda: Guess(Box(0, 255, (6, 6, 1)), Discrete(2), lambda x: 0)
    make_envs(lambda: gym.wrappers.DtypeObservation(floats(), np.uint8), 1)


class Late(Guess):
    "Gives a mask from the first step on."
    def __init__(self): super().__init__(Discrete(2), Discrete(2), lambda x: x, lambda x: {0, 1})
    def reset(self, *, seed=None, options=None): return super().reset(seed=seed)[0], {}


def bad_mask(mask): return lambda: Guess(Discrete(2), Discrete(2), lambda x: 0, lambda x: mask)


@pytest.mark.parametrize("make, words", [
    (bad_mask(()), r"action_mask must leave an action possible, got \["),
    (lambda: Guess(Discrete(2), MultiBinary(2), lambda x: 0, lambda x: {0}),
     "needs Discrete actions"),
    (Late, r'its reset must give info\["action_mask"\], too, as its step does$')])
def test_bad_masks_are_named(make, words):
    with pytest.raises(ValueError, match=words): PPO(make)


@pytest.mark.parametrize("call, words", [
    (lambda p: p.predict(0, action_mask=[0, 0, 0]), "leave an action possible, got .0 0 0"),
    (lambda p: p.predict(0, action_mask=[1, 1]), r"action_mask must have shape \(1, 3\)"),
    (lambda p: p.predict(7), "obs must be whole numbers below"),
    (lambda p: p.predict({"a": 0}), "obs must")])
def test_what_predict_refuses(call, words):
    kind, *of = TASKS["masks"]
    p = PPO(lambda: kind(*of), **FAST)
    with pytest.raises((ValueError, TypeError), match=words): call(p)


def test_predict_obeys_a_mask():
    kind, *of = TASKS["masks"]
    p = PPO(lambda: kind(*of), **FAST)
    for k in range(3):
        assert p.predict(0, action_mask=np.eye(3)[k]) == k + 1
        drawn = p.predict(np.zeros(50, int), False, 1 - np.tile(np.eye(3)[k], (50, 1)))
        assert set(drawn) == {1, 2, 3} - {k + 1}
    with pytest.raises(ValueError, match="action_mask must be None for actions of MultiBinary"):
        PPO(lambda: Guess(Discrete(2), MultiBinary(2), lambda x: 0)).predict(0, action_mask=[1, 1])


@pytest.mark.parametrize("obs, words", [
    ({"a": 0}, "obs must be a dict with a, b"), (3, "obs must be a dict with a, b"),
    ({"a": 0, "b": [1.0, 2.0]}, r"obs\['b'\] must have shape \(3,\)"),
    ({"a": [0, 1], "b": np.zeros(3)}, "obs must have as many of each entry"),
    ({"a": 0, "b": [0, np.nan, 0]}, r"obs\['b'\] must be finite")])
def test_observations_that_do_not_fit_are_named(obs, words):
    with pytest.raises(ValueError, match=words):
        as_batch(Dict(a=Discrete(2), b=Box(-1, 1, (3,))), obs)


def vector(n=4): return SyncVectorEnv([lambda: TASKS["Discrete"][0](*TASKS["Discrete"][1:])] * n)


class Pool(gym.vector.VectorWrapper):
    "As envpool's: a spec of its own kind, and the action space is that of one environment."
    spec = SimpleNamespace(config={})
    action_space = property(lambda self: self.single_action_space)


def test_a_pool_of_environments_is_taken():
    p = PPO(Pool(vector()), num_steps=32, steps=256, minibatches=4).learn()
    assert (p.config.env, p.config.num_envs, p.spec.id) == ("Pool", 4, "Pool")


def test_environments_side_by_side_are_taken_as_they_are_and_left_open():
    envs = vector()
    p = PPO(envs, num_steps=32, steps=256, minibatches=4).learn()
    assert p.config.num_envs == 4 and p.envs is envs and len(p.evaluate(5)) == 5
    p.close()
    envs.step(envs.action_space.sample())
    with pytest.raises(ValueError, match="num_envs must be 4, as env has it, got 3"):
        PPO(envs, num_envs=3)
    envs.close()
    with pytest.raises(ValueError, match="env must be open, got SyncVectorEnv.*, which is closed$"):
        PPO(envs)


@pytest.mark.parametrize("name", ["IdentityEnv", "IdentityEnvBox", "IdentityEnvMultiBinary",
                                  "IdentityEnvMultiDiscrete", "FakeImageEnv", "SimpleMultiObsEnv"])
def test_the_environments_of_stable_baselines3_are_learned_from(name):
    envs = pytest.importorskip("stable_baselines3.common.envs")
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    checker.check_env(getattr(envs, name)(), warn=False, skip_render_check=True)
    p = PPO(getattr(envs, name), num_envs=2, num_steps=8, steps=16, minibatches=2).learn()
    space, envs_obs = p.envs.single_observation_space, p.envs.observation_space.sample()
    assert p.spaces[1].contains(p.predict(space.sample()))
    assert len(p.predict(envs_obs)) == 2 and np.isfinite(p.rows[0]["grad_norm"])


STILL = dict(num_envs=4, num_steps=32, steps=512, minibatches=4)


def test_a_network_for_pictures_sees_pictures():
    seen = []
    class Mean(torch.nn.Module):
        def forward(self, x):
            seen.append(x.shape[1:])
            return x.mean((2, 3))
    kind, *of = TASKS["picture"]
    PPO(lambda: kind(*of), network=Mean(), **STILL).iterate()
    assert set(seen) == {(1, 6, 6)}


@pytest.mark.parametrize("network, layers", [
    ((), ["2x4"]), ((8, 6, 5), ["8x4", "6x8", "5x6", "2x5"])])
def test_widths_of_the_hidden_layers(network, layers, tmp_path):
    p = PPO(network=network, **STILL)
    p.save(tmp_path / "p.pt")
    for x in p, PPO.load(tmp_path / "p.pt"):
        assert ["x".join(map(str, y.weight.shape)) for y in x.agent.policy[::2]] == layers
        x.predict(np.zeros(4))
    assert isinstance(PPO(network="relu", **STILL).agent.policy[1], torch.nn.ReLU)


def test_a_run_directory_is_written_from_the_class_and_goes_on(tmp_path):
    p = PPO(out=tmp_path / "run", track=("tensorboard",), eval_episodes=4, **STILL)
    assert not (tmp_path / "run").exists()
    p.learn().learn(steps=256)
    names = {x.name.split(".")[0] for x in (tmp_path / "run").iterdir()}
    assert {"config", "metrics", "summary", "curve", "ppo", "checkpoint", "events"} <= names
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 1 + len(p.rows)
    assert PPO.load(tmp_path / "run" / "ppo.pt").steps == p.steps
    with pytest.raises(ValueError, match="out must be a new directory"): PPO(out=tmp_path / "run")
    with pytest.raises(ValueError, match="track must be tensorboard, wandb or trackio"):
        PPO(out=tmp_path / "none", track=("nowhere",), **STILL).learn()
    assert not (tmp_path / "none").exists()
