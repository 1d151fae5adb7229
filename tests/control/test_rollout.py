import enum
import io
import random
import sys
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from hypothesis import given, settings, strategies as st

from rlhf_notes.control.rollout import ENV_ARRAYS, Collector, Rollout, autoreset_mode, env_state, episode_limit, find_spec, make_envs, minibatches, savable, set_env_state
from strategies import SEEDS

FIELDS = ("obs", "actions", "rewards", "next_obs", "terminated", "truncated", "valid")


def cartpole(num_envs, limit=500):
    return gym.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="vector_entry_point", max_episode_steps=limit)


def random_act(seed):
    rng = np.random.default_rng(seed)
    return lambda obs: rng.integers(2, size=len(obs))


def by_sight(obs):
    "Depends on the observation alone, and lets the pole fall soon."
    return (obs[:, 2] < 0).astype(np.int64)


def torque(obs):
    "A continuous action that depends on the observation alone."
    return np.tanh(obs.sum(-1, keepdims=True))


def assert_same(a, b):
    for name in FIELDS: assert torch.equal(getattr(a, name), getattr(b, name)), name


class Count(gym.Env):
    "An environment that is all bookkeeping: it sees (episode, step), and its k-th episode has k + 2 steps, of which the last truncates if k is odd."
    observation_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float64)
    action_space = gym.spaces.Discrete(5)
    episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1; self.t = 0
        return np.array([self.episode, 0.0]), {}

    def step(self, action):
        self.t += 1
        end = self.t == self.episode + 2
        return np.array([self.episode, float(self.t)]), 10.0 * self.episode + self.t + action, end and self.episode % 2 == 0, end and self.episode % 2 == 1, {}


class Engine(gym.Env):
    "Keeps something besides numbers and arrays."
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    def __init__(self, world=None): self.world = object() if world is None else world
    def reset(self, *, seed=None, options=None): super().reset(seed=seed); return np.zeros(2, np.float32), {}


class Colour(enum.IntEnum):
    RED = 1


class Bare(gym.vector.VectorEnv):
    "A vector environment of which nothing is known."
    def __init__(self, n): self.num_envs = n


class Draws(gym.Env):
    "Sees what its own kind of random generator draws; the seed of the first reset seeds it."
    observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (1,)), gym.spaces.Discrete(2)
    def __init__(self, kind): type(self).make = staticmethod(kind)              # of the class, so that it is no memory
    def reset(self, *, seed=None, options=None):
        if seed is not None: self.np_random = self.make(seed)
        self.t = 0
        return self.look(), {}
    def look(self): return np.array([self.np_random.normal()], np.float32)
    def step(self, action): self.t += 1; return self.look(), 1.0, self.t == 5, False, {}


class Slip(gym.Env):
    "Lets its action space draw, and a space within its observation space; both are seeded with the first reset."
    def __init__(self): self.action_space, self.observation_space = gym.spaces.Discrete(50), gym.spaces.Dict(a=gym.spaces.Discrete(50), b=gym.spaces.Box(0, 1, (2,)))
    def reset(self, *, seed=None, options=None):
        if seed is not None: self.action_space.seed(seed); self.observation_space["a"].seed(seed + 1)
        self.t = 0
        return self.look(), {}
    def look(self): return [self.action_space.sample(), self.observation_space["a"].sample()]
    def step(self, action): self.t += 1; return self.look(), 1.0, self.t == 5, False, {}


def whimsical(env):
    "In a wrapper that adds what spaces of its own draw. Spaces of a class are one for all its objects, so the class is a new one."
    class Whim(gym.Wrapper):
        observation_space, action_space = gym.spaces.Box(0, 50, (3,)), gym.spaces.Discrete(2)
        def reset(self, *, seed=None, options=None):
            if seed is not None: self.observation_space.seed(seed)
            obs, info = self.env.reset(seed=seed)
            return self.look(obs), info
        def look(self, obs): return np.array([*obs, self.observation_space.sample()[0]], np.float32)
        def step(self, action): obs, *rest = self.env.step(action); return self.look(obs), *rest
    return Whim(env)


class Arrays(Engine):
    "Keeps what it is told to keep."
    def __init__(self, **kept): vars(self).update(kept)


def went_on(make, stop=7, more=20):
    "A collector after a stop, and another that has loaded what was saved; both have collected the same if all is well."
    act = lambda obs: np.zeros(len(obs), np.int64)
    one, other, file = Collector(make(), 0), Collector(make(), 50), io.BytesIO()
    one.collect(act, stop); other.collect(act, 3)
    torch.save(one.state_dict(), file); file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    (a, _), (b, _) = one.collect(act, more), other.collect(act, more)
    assert_same(a, b)
    return one, other


class Table(gym.Env):
    "A table of whole numbers, actions called 1, 2, 3, and a memory of every kind that can be saved."
    observation_space, action_space = gym.spaces.Box(0, 255, (2, 3), np.uint8), gym.spaces.Discrete(3, start=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.clock = self.screen = self.t = 0
        self.name, self.pair, self.scalar = "a", (np.float64(self.np_random.random()), [1, np.arange(2.0)]), np.float32(0.1)
        return self.look(0), {}

    def step(self, action):
        self.t += 1; self.name += "b"; self.clock += 1; self.screen -= 1
        noise, (count, array) = self.pair
        array += noise                                                                  # in place
        self.pair = (noise * 0.9 + np.float64(self.np_random.random()), [count + action, array])
        self.scalar *= np.float64(1.1)
        return self.look(action), float(array.sum() + self.scalar + len(self.name)), self.t == 5, False, {}

    def look(self, action): return np.array([[action, 0, 0], [0, 0, self.t]], np.uint8)


NUMBERS = np.arange(6.0)
def arrays_saved(**kept): return Collector(SyncVectorEnv([lambda: Arrays(**kept)]), 0).state_dict()


class Dice(random.Random):
    def normal(self): return self.gauss(0, 1)


class OwnBits(np.random.PCG64): "A derived one, which may remember anything."
class OwnGenerator(np.random.Generator):
    def __init__(self, seed): super().__init__(np.random.PCG64(seed))


class Windy(CartPoleVectorEnv):
    "CartPole, and a wind that it remembers."
    def __init__(self, num_envs): super().__init__(num_envs); self.reset(); self.wind = np.zeros(num_envs)


class Counted(SyncVectorEnv): "Single environments, and perhaps a memory besides."


class Generous(SyncVectorEnv):
    "Pays for the step that only resets."
    def step(self, actions):
        resets = self._autoreset_envs.copy()
        obs, reward, *rest = super().step(actions)
        return obs, reward + 100 * resets, *rest


def expected_rows(rows, seams):
    "(obs, reward less the action, next_obs, terminated, truncated, valid) of the first rows of Count, worked out on paper."
    out, episode, t = [], 0, 0
    while len(out) < rows:
        end = t + 1 == episode + 2
        out.append(((episode, t), 10 * episode + t + 1, (episode, t + 1), end and episode % 2 == 0, end and episode % 2 == 1, True))
        if end and seams: out.append(((episode, t + 1), None, (episode + 1, 0), False, False, False))
        episode, t = (episode + 1, 0) if end else (episode, t + 1)
    return out[:rows]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@settings(max_examples=15)
@given(T=st.integers(1, 40), N=st.integers(1, 3), seed=SEEDS)
def test_every_row_is_what_it_should_be(mode, T, N, seed):
    envs = SyncVectorEnv([Count] * N, autoreset_mode=mode)
    rng = np.random.default_rng(seed)
    r, episodes = Collector(envs, seed=0).collect(lambda obs: rng.integers(5, size=len(obs)), T)
    for n in range(N):
        for t, (obs, reward, next_obs, terminated, truncated, valid) in enumerate(expected_rows(T, seams=mode is AutoresetMode.NEXT_STEP)):
            assert tuple(r.obs[t, n].tolist()) == obs and tuple(r.next_obs[t, n].tolist()) == next_obs
            assert (bool(r.terminated[t, n]), bool(r.truncated[t, n]), bool(r.valid[t, n])) == (terminated, truncated, valid)
            assert bool(r.done[t, n]) == (terminated or truncated)
            if valid: assert r.rewards[t, n] == reward + r.actions[t, n]
    lengths = [length for _, length in episodes]
    assert lengths == sorted(lengths) and len(episodes) == int(r.done.sum()) and all(isinstance(x, float) and isinstance(l, int) for x, l in episodes)
    for k in range(len(episodes) // N): assert lengths[k * N:(k + 1) * N] == [k + 2] * N
    assert sum(ret for ret, _ in episodes) <= r.rewards.sum() + 1e-3


@settings(max_examples=12)
@given(seed=SEEDS, N=st.integers(1, 5), limit=st.sampled_from([8, 15, 500]))
def test_vectorised_cartpole_equals_single_environments(seed, N, limit):
    "Every episode, replayed in Gymnasium's single CartPole with its own time limit: observations, rewards, ends, returns and lengths, to the last bit."
    envs, act, states = cartpole(N, limit), random_act(seed), []
    collector = Collector(envs, seed % 10000)
    def remember(obs): states.append(envs.state.T.copy()); return act(obs)
    r, episodes = collector.collect(remember, 60)
    replayed = []
    for n in range(N):
        single, fresh = gym.make("CartPole-v1", max_episode_steps=limit), True
        for t in range(60):
            if not r.valid[t, n]:
                assert r.rewards[t, n] == 0 and not r.done[t, n] and r.done[t - 1, n]
                assert (r.next_obs[t, n].abs() <= 0.05).all()                       # the start of the next episode
                fresh = True; continue
            if fresh: single.reset(); single.unwrapped.state = tuple(states[t][n]); fresh, total, length = False, 0.0, 0
            o, reward, terminated, truncated, _ = single.step(int(r.actions[t, n]))
            total += reward; length += 1
            assert np.array_equal(o, r.next_obs[t, n].numpy()) and reward == r.rewards[t, n]
            assert terminated == r.terminated[t, n] and truncated == r.truncated[t, n]
            if t + 1 < 60: assert torch.equal(r.next_obs[t, n], r.obs[t + 1, n])     # also where the episode ended: the true final observation
            if terminated or truncated: replayed.append((total, length))
    assert sorted(replayed) == sorted(episodes)


@pytest.mark.parametrize("env_id, act", [("CartPole-v1", by_sight), ("Acrobot-v1", by_sight), ("Pendulum-v1", torque)])
@settings(max_examples=5)
@given(seed=st.integers(0, 10000))
def test_both_reset_modes_give_the_same_data(env_id, act, seed):
    def collect(mode):
        envs = gym.make_vec(env_id, num_envs=2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}, max_episode_steps=14)
        return Collector(envs, seed).collect(act, 50)
    (a, _), (b, _) = collect(AutoresetMode.NEXT_STEP), collect(AutoresetMode.SAME_STEP)
    assert b.valid.all() and not a.valid.all()
    for n in range(2):
        keep = a.valid[:, n]
        for name in FIELDS: assert torch.equal(getattr(a, name)[:, n][keep], getattr(b, name)[:int(keep.sum()), n]), name


@settings(max_examples=10)
@given(seed=st.integers(0, 10000), cut=st.integers(1, 59))
def test_cut_or_saved_anywhere_the_recording_is_the_same(seed, cut):
    "Also where the cut falls on a seam, since a random cut does in some of the environments."
    whole, episodes = Collector(cartpole(6), seed).collect(by_sight, 60)
    one, other = Collector(cartpole(6), seed), Collector(cartpole(6), seed + 1)
    first, episodes_first = one.collect(by_sight, cut)
    other.load_state_dict(one.state_dict())
    for c in (one, other):
        second, episodes_second = c.collect(by_sight, 60 - cut)
        assert_same(Rollout(*(torch.cat([getattr(first, f), getattr(second, f)]) for f in FIELDS)), whole)
        assert episodes_first + episodes_second == episodes


def test_a_saved_state_is_a_copy_and_survives_the_disk(tmp_path):
    envs = cartpole(3)
    envs.reset(seed=0)
    state = env_state(envs)
    torch.save(state, tmp_path / "s")
    def future(): return [envs.step(np.zeros(3, np.int64))[0] for _ in range(25)]
    a = future()
    envs.reset(seed=9); set_env_state(envs, torch.load(tmp_path / "s", weights_only=True)); b = future()
    set_env_state(envs, state); c = future()
    assert all(np.array_equal(x, y) and np.array_equal(x, z) for x, y, z in zip(a, b, c))
    collector = Collector(cartpole(3), 0)
    saved = collector.state_dict()
    before = {k: saved[k].clone() for k in Collector.ARRAYS}
    collector.collect(by_sight, 20)
    assert all(torch.equal(saved[k], before[k]) for k in before) and saved["envs"]["state"].abs().max() <= 0.05


def test_same_seed_same_rollout_and_nothing_is_shared():
    (a, _), (b, _) = (Collector(cartpole(4), 3).collect(random_act(1), 40) for _ in range(2))
    assert_same(a, b)
    c, _ = Collector(cartpole(4), 4).collect(random_act(1), 40)
    assert not torch.equal(a.obs, c.obs)
    assert a.obs.dtype == a.next_obs.dtype == a.rewards.dtype == torch.float32 and a.actions.dtype == torch.int64
    assert a.valid.dtype == a.terminated.dtype == a.truncated.dtype == torch.bool and a.obs.shape == (40, 4, 4) and a.valid.shape == (40, 4)
    collector = Collector(cartpole(4), 3)
    first, _ = collector.collect(random_act(1), 20)
    kept = first.obs.clone()
    collector.collect(random_act(2), 20)
    assert torch.equal(first.obs, kept)
    assert_same(a.to("cpu"), a)


def test_the_policy_sees_rows_before_and_after_loading():
    "The same numbers in another order of memory give other last digits, and a resumed run would not be exact."
    seen = []
    def act(obs): seen.append(obs.flags.c_contiguous and obs.dtype == np.float32); return by_sight(obs)
    one, other = Collector(cartpole(5), 0), Collector(cartpole(5), 1)
    one.collect(act, 3)
    other.load_state_dict(one.state_dict())
    other.collect(act, 3)
    assert all(seen) and len(seen) == 6 and one.obs.strides == other.obs.strides


class Window: "Stands for what pygame gives."
Window.__module__ = "pygame.surface"


def test_a_window_is_no_memory():
    envs = SyncVectorEnv([lambda: Engine(Window())])
    envs.reset(seed=0)
    assert savable(envs) and "world" not in env_state(envs)["envs"][0]["layers"][-1]


def test_a_module_makes_its_environments_known(tmp_path, monkeypatch):
    (tmp_path / "makes_itself_known.py").write_text("import gymnasium as gym\ngym.register('rlhf_notes/Known-v0', 'gymnasium.envs.classic_control:PendulumEnv', reward_threshold=7, max_episode_steps=9)")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert find_spec("makes_itself_known:rlhf_notes/Known-v0").reward_threshold == 7
        sys.modules.pop("makes_itself_known"); gym.registry.pop("rlhf_notes/Known-v0")
        assert make_envs("makes_itself_known:rlhf_notes/Known-v0", 2).num_envs == 2
    finally: gym.registry.pop("rlhf_notes/Known-v0", None)
    assert find_spec("CartPole-v1") is gym.spec("CartPole-v1")


@pytest.mark.parametrize("error, words", [(RuntimeError("no licence"), "no licence"), (ImportError("libfoo.so"), "libfoo.so"), (AssertionError(), "AssertionError"), (None, "size")])
def test_an_environment_that_cannot_be_made_is_named(monkeypatch, error, words):
    class Fails(gym.Env):
        def __init__(self, *size):
            if error is not None: raise error
    class Needs(gym.Env):
        def __init__(self, size): pass
    monkeypatch.setitem(gym.registry, "Fails-v0", gym.envs.registration.EnvSpec("Fails-v0", Needs if error is None else Fails))
    with pytest.raises(ValueError, match=f"env must be an environment that Gymnasium can make, got 'Fails-v0': .*{words}"): make_envs("Fails-v0", 1)


def test_of_an_environment_that_fails_only_the_error_is_said(monkeypatch):
    class Old(gym.Env):
        observation_space = action_space = gym.spaces.Box(-1, 1, (1,))
        def __init__(self, works):
            warnings.warn("out of date", DeprecationWarning)
            if not works: raise RuntimeError("not installed")
    class Blind(gym.Env):
        action_space, observation_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Box(-1, 1, (0,))
    for name, kind, more in (("Works-v0", Old, dict(works=True)), ("Fails-v0", Old, dict(works=False)), ("Blind-v0", Blind, {})): monkeypatch.setitem(gym.registry, name, gym.envs.registration.EnvSpec(name, kind, kwargs=more))
    with warnings.catch_warnings(record=True) as said, pytest.raises(ValueError, match="got 'Fails-v0': not installed"): make_envs("Fails-v0", 1)
    assert not said
    with pytest.warns(DeprecationWarning, match="out of date"): make_envs("Works-v0", 1).close()
    with pytest.raises(ValueError, match="env must have observations of one number at least, got 'Blind-v0' with Box"): make_envs("Blind-v0", 1)
    with pytest.raises(ValueError, match="num_envs must be .* got 0"): make_envs("CartPole-v1", 0)


def test_make_envs():
    assert type(make_envs("CartPole-v1", 3).unwrapped).__name__ == "CartPoleVectorEnv" and make_envs("CartPole-v1", 3).num_envs == 3
    assert isinstance(make_envs("Acrobot-v1", 2), SyncVectorEnv) and isinstance(make_envs("CartPole-v1", 2, "sync"), SyncVectorEnv)
    envs = make_envs("CartPole-v1", 2, "async")
    assert isinstance(envs, AsyncVectorEnv)
    envs.close()


def test_observations_are_handed_out_without_a_copy():
    for way in ("sync", "async"):
        envs = make_envs("Pendulum-v1", 2, way)
        first, _ = envs.reset(seed=0)
        kept = first.copy()
        second, *_ = envs.step(np.ones((2, 1), np.float32))
        assert np.shares_memory(first, second) and (first != kept).any()
        envs.close()


def test_what_a_seam_pays_belongs_to_no_episode():
    (plain, episodes), (paid, same) = (Collector(kind([Count] * 2), 0).collect(lambda obs: np.ones(2, np.int64), 30) for kind in (SyncVectorEnv, Generous))
    assert episodes == same and len(episodes) > 4 and (paid.rewards[~paid.valid] == 100).all() and torch.equal(paid.rewards[paid.valid], plain.rewards[plain.valid])


def test_autoreset_mode():
    assert autoreset_mode(make_envs("CartPole-v1", 2)) == autoreset_mode(SyncVectorEnv([Count])) == "NextStep"
    assert autoreset_mode(SyncVectorEnv([Count], autoreset_mode=AutoresetMode.SAME_STEP)) == "SameStep"
    old = SyncVectorEnv([Count]); old.metadata = {}
    assert autoreset_mode(old) == "NextStep"


@given(parts=st.integers(1, 8), size=st.integers(1, 20), seed=SEEDS)
def test_minibatches_cover_each_row_once(parts, size, seed):
    got = minibatches(parts * size, parts, torch.Generator().manual_seed(seed))
    assert [len(p) for p in got] == [size] * parts
    assert torch.cat(got).sort().values.tolist() == list(range(parts * size))
    again = minibatches(parts * size, parts, torch.Generator().manual_seed(seed))
    assert all(torch.equal(a, b) for a, b in zip(got, again))


def test_minibatches_are_shuffled_anew_each_time():
    g = torch.Generator().manual_seed(0)
    first, second = (torch.cat(minibatches(512, 4, g)) for _ in range(2))
    assert not torch.equal(first, second) and not torch.equal(first, torch.arange(512))


@pytest.mark.parametrize("call, error, words", [
    (lambda: minibatches(10, 11), ValueError, r"parts must be in \[1, 10\], got 11"),
    (lambda: minibatches(0, 1), ValueError, "size must be in"),
    (lambda: minibatches(10, 0), ValueError, "parts must be in"),
    (lambda: Collector(SyncVectorEnv([Count], autoreset_mode=AutoresetMode.DISABLED), 0), ValueError, "envs must reset themselves, .* got Disabled"),
    (lambda: Collector(SyncVectorEnv([Engine]), 0).state_dict(), ValueError, "envs must keep their state in numbers and arrays to be saved, got Engine.world, a object"),
    (lambda: Collector(SyncVectorEnv([lambda: Engine({"a": 1})]), 0).state_dict(), ValueError, "got Engine.world, a dict"),
    (lambda: Collector(SyncVectorEnv([lambda: Engine([1, [object()]])]), 0).state_dict(), ValueError, "got Engine.world, a list"),
    (lambda: Collector(SyncVectorEnv([lambda: Engine(np.array([None]))]), 0).state_dict(), ValueError, "got Engine.world, a ndarray"),
    (lambda: Collector(SyncVectorEnv([lambda: Engine(Colour.RED)]), 0).state_dict(), ValueError, "got Engine.world, a Colour"),
    (lambda: Collector(SyncVectorEnv([lambda: Engine([1, Colour.RED])]), 0).state_dict(), ValueError, "got Engine.world, a list"),
    (lambda: Collector(SyncVectorEnv([lambda: Engine(np.ma.array([1]))]), 0).state_dict(), ValueError, "got Engine.world, a MaskedArray"),
    (lambda: make_envs("rlhf_notes/Engine-v0:CartPole-v1", 2), ValueError, "env must be an environment that Gymnasium can make"),
    (lambda: Collector(SyncVectorEnv([lambda: Engine(np.random.default_rng())]), 0).state_dict(), ValueError, "got Engine.world, a Generator"),
    (lambda: set_env_state(SyncVectorEnv([Engine]), {}), ValueError, "envs must keep their state"),
    (lambda: Collector(SyncVectorEnv([lambda: Draws(Dice)]), 0).state_dict(), ValueError, "envs must draw from a random generator of NumPy's to be saved, got Draws.np_random, a Dice"),
    (lambda: Collector(SyncVectorEnv([lambda: Draws(lambda seed: np.random.Generator(OwnBits(seed)))]), 0).state_dict(), ValueError, "got Draws.np_random, a OwnBits"),
    (lambda: Collector(SyncVectorEnv([lambda: Draws(lambda seed: np.random.RandomState(OwnBits(seed)))]), 0).state_dict(), ValueError, "got Draws.np_random, a OwnBits"),
    (lambda: Collector(SyncVectorEnv([lambda: Draws(OwnGenerator)]), 0).state_dict(), ValueError, "got Draws.np_random, a OwnGenerator"),
    (lambda: arrays_saved(buffer=NUMBERS, view=NUMBERS[:1]), ValueError, "envs must keep their state in arrays that share no memory to be saved, got Arrays.buffer and Arrays.view"),
    (lambda: arrays_saved(view=(1, [NUMBERS[::-2]]), buffer=[NUMBERS]), ValueError, "share no memory to be saved, got Arrays.buffer and Arrays.view"),
    (lambda: arrays_saved(a=NUMBERS[1:], b=NUMBERS[:2]), ValueError, "share no memory to be saved, got Arrays.b and Arrays.a"),
    (lambda: arrays_saved(world=np.zeros(2, np.longdouble)), ValueError, "got Arrays.world, a ndarray"),
    (lambda: arrays_saved(world=np.zeros(2, ">f8")), ValueError, "got Arrays.world, a ndarray"),
    (lambda: arrays_saved(world=np.zeros(())), ValueError, "got Arrays.world, a ndarray"),
    (lambda: arrays_saved(env=object()), ValueError, "got Arrays.env, a object"),
    (lambda: env_state(Windy(2)), ValueError, r"or be stepped in turn \(sync\), to be saved, got Windy, of which neither is known"),
    (lambda: env_state(Counted([Count])), ValueError, r"or be stepped in turn \(sync\), to be saved, got Counted, of which neither is known"),
    (lambda: env_state(CartPoleVectorEnv(2)), ValueError, "envs must keep their state in the arrays state, steps, prev_done"),
    (lambda: env_state(gym.wrappers.vector.NormalizeReward(make_envs("CartPole-v1", 2))), ValueError, "envs must not be wrapped to be saved, got NormalizeReward"),
    (lambda: env_state(Bare(2)), ValueError, r"envs must keep their state in the arrays state, steps, prev_done, or be stepped in turn \(sync\), to be saved, got Bare"),
    (lambda: make_envs("CartPool-v1", 2), ValueError, "env must be an environment that Gymnasium can make, got 'CartPool-v1'"),
    *((lambda env=env: find_spec(env), ValueError, f"^env must be an environment that Gymnasium can make, got '{env}': .") for env in ("CartPool-v1", "no_such_module:CartPole-v1")),
    (lambda: make_envs("no_such_module:CartPole-v1", 2), ValueError, "env must be an environment that Gymnasium can make"),
    (lambda: make_envs("FrozenLake-v1", 2), ValueError, "env must have Box observations, got 'FrozenLake-v1' with Discrete"),
    (lambda: make_envs("Blackjack-v1", 2), ValueError, "env must have Box observations, got 'Blackjack-v1' with Tuple"),
    (lambda: make_envs("CartPole-v1", 2, "threads"), ValueError, "vectorization must be one of 'auto', 'sync', 'async', got 'threads'"),
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words): call()


def test_a_saved_state_shares_no_memory_with_the_environments():
    envs = make_envs("CartPole-v1", 3)
    envs.reset(seed=0)
    state = env_state(envs)
    for name in ENV_ARRAYS: assert not np.shares_memory(state[name].numpy(), getattr(envs.unwrapped, name))
    set_env_state(envs, state)
    for name in ENV_ARRAYS: assert not np.shares_memory(state[name].numpy(), getattr(envs.unwrapped, name))


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Acrobot-v1", "MountainCarContinuous-v0", "MountainCar-v0", "CartPole-v1"])
@pytest.mark.parametrize("limit, stop", [(25, 37), (37, 37), (500, 37)])
def test_single_environments_go_on_bit_for_bit_after_the_disk(env_id, limit, stop):
    def fresh(seed): return Collector(gym.make_vec(env_id, num_envs=3, vectorization_mode="sync", max_episode_steps=limit), seed)
    one, other = fresh(0), fresh(50)
    space = one.envs.single_action_space
    act = torque if isinstance(space, gym.spaces.Box) else lambda obs: (np.abs(1e3 * obs).sum(-1) % space.n).astype(np.int64)
    one.collect(act, stop); other.collect(act, 4)                                     # another number of steps into the episode
    file = io.BytesIO(); torch.save(one.state_dict(), file); file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    states = [[type(x) for x in np.atleast_1d(np.array(e.unwrapped.state, dtype=object))] for e in one.envs.envs]
    assert states == [[type(x) for x in np.atleast_1d(np.array(e.unwrapped.state, dtype=object))] for e in other.envs.envs]
    assert all(type(a.unwrapped.state) is type(b.unwrapped.state) for a, b in zip(one.envs.envs, other.envs.envs))
    (a, episodes_a), (b, episodes_b) = one.collect(act, 60), other.collect(act, 60)
    assert_same(a, b)
    assert episodes_a == episodes_b and (limit == 500 or len(episodes_a) >= 3)
    if limit == stop and env_id != "CartPole-v1": assert not a.valid[0].any()                # the stop was right at the end of the episodes


@given(stop=st.integers(1, 23), seed=SEEDS)
@settings(max_examples=15)
def test_every_kind_of_memory_is_restored(stop, seed):
    def kinds(x): return [kinds(y) for y in x] + [type(x)] if isinstance(x, (list, tuple)) else (type(x), getattr(x, "dtype", None))
    def act(obs): return (obs[:, 5].astype(np.int64) + obs[:, 0].astype(np.int64)) % 3
    one, other = (Collector(SyncVectorEnv([Table, Table]), s) for s in (seed % 10000, 1))
    one.collect(act, stop, lambda a: a + 1)
    state = one.state_dict()
    kept = one.envs.envs[0].pair[1][1].copy()
    other.load_state_dict(state)
    for a, b in zip(one.envs.envs, other.envs.envs): assert kinds([a.t, a.name, a.pair, a.scalar]) == kinds([b.t, b.name, b.pair, b.scalar]) and (a.clock, a.screen) == (b.clock, b.screen) == (a.t, -a.t)
    assert not np.shares_memory(one.envs.envs[0].pair[1][1], other.envs.envs[0].pair[1][1])
    (a, episodes_a), (b, episodes_b) = (c.collect(act, 13, lambda a: a + 1) for c in (one, other))
    assert_same(a, b)
    assert episodes_a == episodes_b
    assert torch.equal(state["envs"]["envs"][0]["layers"][-1]["pair"][1][1], torch.from_numpy(kept))       # the saved state was not played on


def test_other_spaces():
    "A table in a row, and actions that are stored as the policy counts them but told as the environment calls them."
    told = []
    def for_env(a): told.append(a + 1); return told[-1]
    r, episodes = Collector(SyncVectorEnv([Table, Table]), 0).collect(lambda obs: np.array([0, 2]), 6, for_env)
    assert r.obs.shape == (6, 2, 6) and r.obs.dtype == torch.float32 and (r.actions == torch.tensor([0, 2])).all()
    assert r.next_obs[4].tolist() == [[1, 0, 0, 0, 0, 5], [3, 0, 0, 0, 0, 5]] and r.next_obs[5].tolist() == [[0] * 6] * 2
    assert all(t.tolist() == [1, 3] for t in told) and len(episodes) == 2


def test_the_continuous_actions_that_are_stored_are_those_of_the_policy():
    r, _ = Collector(make_envs("Pendulum-v1", 3), 0).collect(lambda obs: np.full((3, 1), 7, np.float32), 5, lambda a: np.clip(a, -2, 2))
    assert r.actions.dtype == torch.float32 and r.actions.shape == (5, 3, 1) and (r.actions == 7).all()
    told, _ = Collector(make_envs("Pendulum-v1", 3), 0).collect(lambda obs: np.full((3, 1), 2, np.float32), 5)
    assert torch.equal(r.next_obs, told.next_obs) and torch.equal(r.rewards, told.rewards)


def test_processes_give_the_same_data():
    one, other = (Collector(make_envs("Pendulum-v1", 2, way), 3) for way in ("sync", "async"))
    try:
        (a, episodes_a), (b, episodes_b) = (c.collect(torque, 205) for c in (one, other))
        assert_same(a, b)
        assert episodes_a == episodes_b and len(episodes_a) == 2
        with pytest.raises(ValueError, match=r"be stepped in turn \(sync\), to be saved, got AsyncVectorEnv"): other.state_dict()
    finally: other.envs.close()


# staggered starts

def limited(limit, n, mode=AutoresetMode.NEXT_STEP, env_id="Pendulum-v1"):
    return gym.make_vec(env_id, num_envs=n, vectorization_mode="sync", max_episode_steps=limit, vector_kwargs={"autoreset_mode": mode})


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_staggered_starts_cut_the_first_episode_and_nothing_else(mode):
    (plain, _), (cut, episodes) = (Collector(limited(17, 4, mode), 3, **kwargs).collect(torque, 60) for kwargs in ({}, dict(stagger=17)))
    seam = int(mode == AutoresetMode.NEXT_STEP)
    for n, last in enumerate((4, 8, 12, 17)):
        for name in FIELDS:
            if name != "truncated": assert torch.equal(getattr(cut, name)[:last, n], getattr(plain, name)[:last, n]), name     # next_obs of the cut too: before any reset
        start = last + (seam if last == 17 else 0)
        ends = [last - 1] + [e for k in range(4) if (e := start + 16 + k * (17 + seam)) < 60]
        assert cut.truncated[:, n].nonzero().flatten().tolist() == ends
        assert (~cut.valid[:, n]).nonzero().flatten().tolist() == [e + 1 for e in ends[last < 17:] if seam and e < 59]          # no seam behind the cut
        assert not torch.equal(cut.obs[start, n], cut.next_obs[last - 1, n]) and abs(cut.obs[start, n, 2]) <= 1
    assert {length for _, length in episodes} == {17} and len(episodes) == cut.truncated.sum() - 3
    assert not cut.terminated.any() and not (cut.truncated & ~cut.valid).any()


def test_the_returns_after_a_cut_are_those_of_whole_episodes():
    collector = Collector(limited(10, 2), 0, stagger=10)
    rollout, episodes = collector.collect(torque, 27)
    first = [(0, slice(5, 15)), (1, slice(0, 10)), (1, slice(11, 21)), (0, slice(16, 26))]
    by_hand = [rollout.rewards[rows, n].double().sum().item() for n, rows in first]
    assert sorted(earned for earned, _ in episodes) == pytest.approx(sorted(by_hand), rel=1e-5) and [length for _, length in episodes] == [10] * 4
    assert collector.episode_length.tolist() == [0, 5]


def test_who_has_ended_already_is_not_cut_at_a_seam():
    rollout, episodes = Collector(limited(17, 1), 0, stagger=18).collect(torque, 40)             # the 18th step is the seam
    assert rollout.truncated[:, 0].nonzero().flatten().tolist() == [16, 34] and (~rollout.valid[:, 0]).nonzero().flatten().tolist() == [17, 35] and len(episodes) == 2


def test_a_cut_in_a_later_episode_is_a_truncation_as_well():
    "Poles that fall after some ten steps: the cut may find the second episode, or the third."
    collector = Collector(limited(500, 5, env_id="CartPole-v1"), 1, stagger=60)
    rollout, episodes = collector.collect(by_sight, 80)
    assert 0 < rollout.truncated.sum() <= 5 and len(episodes) == rollout.terminated.sum() and not (rollout.truncated & rollout.terminated).any()
    for t, n in rollout.truncated.nonzero().tolist():
        assert t + 1 == 60 * (n + 1) // 5 and rollout.valid[t + 1, n] and (rollout.obs[t + 1, n].abs() <= 0.05).all()
    assert all(reward == length for reward, length in episodes)


def test_a_cut_comes_when_it_is_due_however_the_steps_fall_into_rollouts():
    whole, episodes = Collector(limited(17, 4), 3, stagger=17).collect(torque, 40)
    one = Collector(limited(17, 4), 3, stagger=17)
    parts = [one.collect(torque, n) for n in (3, 1, 1, 10, 25)]
    for name in FIELDS: assert torch.equal(torch.cat([getattr(r, name) for r, _ in parts]), getattr(whole, name)), name
    assert sum((e for _, e in parts), []) == episodes and whole.truncated[3, 0] and whole.truncated[11, 2]


@pytest.mark.parametrize("stop", [3, 4, 5, 12, 18])
def test_staggered_starts_go_on_after_the_disk(stop):
    one, other, file = Collector(limited(17, 4), 3, stagger=17), Collector(limited(17, 4), 5), io.BytesIO()
    one.collect(torque, stop); other.collect(torque, 2)
    torch.save(one.state_dict(), file); file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    (a, episodes_a), (b, episodes_b) = one.collect(torque, 40), other.collect(torque, 40)
    assert_same(a, b); assert episodes_a == episodes_b


def test_staggered_processes_give_the_same_data():
    one, other = (Collector(make_envs("Pendulum-v1", 2, way), 3, stagger=200) for way in ("sync", "async"))
    try:
        (a, episodes_a), (b, episodes_b) = (c.collect(torque, 205) for c in (one, other))
        assert_same(a, b)
        assert episodes_a == episodes_b and a.truncated.nonzero().tolist() == [[99, 0], [199, 1]]
    finally: other.envs.close()


def test_what_cannot_be_staggered_is_refused():
    with pytest.raises(ValueError, match="stagger must be left off where environments cannot be reset one by one .*, got CartPoleVectorEnv"): Collector(cartpole(2), 0, stagger=500)
    with pytest.raises(ValueError, match="stagger must be in"): Collector(limited(17, 2), 0, stagger=-1)
    with pytest.raises(TypeError, match="stagger must be"): Collector(limited(17, 2), 0, stagger=1.5)


def test_the_limit_of_an_episode():
    assert (episode_limit("CartPole-v1"), episode_limit("Pendulum-v1"), episode_limit("gymnasium:Acrobot-v1")) == (500, 200, 500)
    gym.register("rlhf_notes/NoLimit-v0", Count)
    try:
        with pytest.raises(ValueError, match=r"env must have a time limit \(max_episode_steps\) .*, got 'rlhf_notes/NoLimit-v0', which has none"): episode_limit("rlhf_notes/NoLimit-v0")
    finally: del gym.registry["rlhf_notes/NoLimit-v0"]
    with pytest.raises(ValueError, match="env must be an environment that Gymnasium can make, got 'CartPool-v1'"): episode_limit("CartPool-v1")


@given(size=st.integers(1, 40), parts=st.integers(1, 40), seed=SEEDS)
def test_minibatches_of_any_size(size, parts, seed):
    "Also where they cannot be equal, since rows that were no data are gone."
    parts = min(parts, size)
    got = minibatches(size, parts, torch.Generator().manual_seed(seed))
    lengths = [len(p) for p in got]
    assert len(got) == parts and max(lengths) - min(lengths) <= 1 and torch.cat(got).sort().values.tolist() == list(range(size))


BIT_GENERATORS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


@pytest.mark.parametrize("bits", BIT_GENERATORS)
@pytest.mark.parametrize("kind", [np.random.Generator, np.random.RandomState])
def test_any_generator_of_numpy_goes_on(kind, bits):
    "Stopped after nine draws: a RandomState draws normal numbers in pairs and keeps the second."
    one, _ = went_on(lambda: SyncVectorEnv([lambda: Draws(lambda seed: kind(bits(seed)))] * 3), stop=8)
    r = one.envs.envs[0].np_random
    assert type(r) is kind and type(r.bit_generator if kind is np.random.Generator else r._bit_generator) is bits


def test_spaces_go_on_drawing():
    one, other = went_on(lambda: SyncVectorEnv([lambda: whimsical(Slip())] * 2))
    assert one.obs.shape == (2, 3) and len(np.unique(one.obs)) > 3


def test_a_space_that_has_drawn_nothing_is_left_alone():
    "To ask the generator of a Dict for its state would seed it, and all within anew."
    envs = SyncVectorEnv([lambda: whimsical(Slip())] * 2)
    envs.reset(seed=0)
    env_state(envs)
    assert envs.envs[1].env.observation_space._np_random is None and envs.envs[1].env.observation_space["b"]._np_random is None


def test_what_is_one_object_stays_one_and_what_is_two_stays_two():
    def make():
        one, table = np.zeros(3), np.arange(12.0).reshape(4, 3)
        return SyncVectorEnv([lambda: Arrays(a=one, b=one, many=[one, (one,)], more=[], left=table[:, 0], right=table[:, 1], turned=np.asfortranarray(table))])
    one, other = make(), make()
    for envs in (one, other): envs.reset(seed=0)
    env = one.envs[0]; env.a += 1; env.rest = env.more; env.more.append(2.0); env.left += 7
    file = io.BytesIO(); torch.save(env_state(one), file); file.seek(0)
    set_env_state(other, torch.load(file, weights_only=True))
    e = other.envs[0]
    assert e.a is e.b is e.many[0] is e.many[1][0] is not env.a and e.rest is e.more and e.more == [2.0] and (e.a == 1).all()
    assert np.array_equal(e.left, env.left) and np.array_equal(e.right, env.right) and not np.shares_memory(e.left, e.right)
    assert np.array_equal(e.turned, env.turned) and e.turned.flags.f_contiguous and not e.turned.flags.c_contiguous


def test_whatever_an_environment_does_the_question_whether_it_can_be_saved_is_answered():
    itself = []; itself.append(itself)
    envs = SyncVectorEnv([lambda: Arrays(world=itself)])
    envs.reset(seed=0)
    assert savable(envs) is False
