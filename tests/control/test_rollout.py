from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import SEEDS

from rlhf_notes import PPO
from rlhf_notes.control.envs import make_envs
from rlhf_notes.control.rollout import Collector, Rollout, minibatches
from rlhf_notes.control.spaces import byte_scale, picture_shape, row_maker

FIELDS = ("obs", "actions", "rewards", "next_obs", "terminated", "truncated", "is_step")


def cartpole(num_envs, limit=500):
    return gym.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="vector_entry_point",
                        max_episode_steps=limit)


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
    """An environment that is all bookkeeping: it sees (episode, step), and its k-th episode has k +
    2 steps, of which the last truncates if k is odd.
    """
    observation_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float64)
    action_space = gym.spaces.Discrete(5)
    episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        return np.array([self.episode, 0.0]), {}

    def step(self, action):
        self.t += 1
        end = self.t == self.episode + 2
        return (np.array([self.episode, float(self.t)]), 10.0 * self.episode + self.t + action,
                end and self.episode % 2 == 0, end and self.episode % 2 == 1, {})


class Table(gym.Env):
    "A table of whole numbers, and actions called 1, 2, 3."
    observation_space, action_space = (gym.spaces.Box(0, 9, (2, 3), np.uint8),
                                       gym.spaces.Discrete(3, start=1))
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(0), {}
    def step(self, action):
        self.t += 1
        return self.look(action), 1.0, self.t == 5, False, {}
    def look(self, action): return np.array([[action, 0, 0], [0, 0, self.t]], np.uint8)


class Generous(SyncVectorEnv):
    "Pays for the step that only resets."
    def step(self, actions):
        resets = self._autoreset_envs.copy()
        obs, reward, *rest = super().step(actions)
        return obs, reward + 100 * resets, *rest


def expected_rows(rows, resets):
    """(obs, reward less the action, next_obs, terminated, truncated, valid) of the first rows of
    Count, worked out on paper.
    """
    out, episode, t = [], 0, 0
    while len(out) < rows:
        end = t + 1 == episode + 2
        out.append(((episode, t), 10 * episode + t + 1, (episode, t + 1), end and episode % 2 == 0,
                    end and episode % 2 == 1, True))
        if end and resets:
            out.append(((episode, t + 1), None, (episode + 1, 0), False, False, False))
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
        for t, (obs, reward, next_obs, terminated, truncated, valid) in enumerate(
            expected_rows(T, resets=mode is AutoresetMode.NEXT_STEP)):
            assert tuple(r.obs[t, n].tolist()) == obs
            assert tuple(r.next_obs[t, n].tolist()) == next_obs
            assert (bool(r.terminated[t, n]), bool(r.truncated[t, n]),
                    bool(r.is_step[t, n])) == (terminated, truncated, valid)
            assert bool(r.done[t, n]) == (terminated or truncated)
            if valid: assert r.rewards[t, n] == reward + r.actions[t, n]
    lengths = [length for _, length in episodes]
    assert lengths == sorted(lengths)
    assert len(episodes) == int(r.done.sum())
    assert all(isinstance(x, float) and isinstance(l, int) for x, l in episodes)
    for k in range(len(episodes) // N): assert lengths[k * N:(k + 1) * N] == [k + 2] * N
    assert sum(ret for ret, _ in episodes) <= r.rewards.sum() + 1e-3


@settings(max_examples=12)
@given(seed=SEEDS, N=st.integers(1, 5), limit=st.sampled_from([8, 15, 500]))
def test_vectorised_cartpole_equals_single_environments(seed, N, limit):
    """Every episode, replayed in Gymnasium's single CartPole with its own time limit: observations,
    rewards, ends, returns and lengths, to the last bit.
    """
    envs, act, states = cartpole(N, limit), random_act(seed), []
    collector = Collector(envs, seed % 10000)
    def remember(obs):
        states.append(envs.state.T.copy())
        return act(obs)
    r, episodes = collector.collect(remember, 60)
    replayed = []
    for n in range(N):
        single, fresh = gym.make("CartPole-v1", max_episode_steps=limit), True
        for t in range(60):
            if not r.is_step[t, n]:
                assert r.rewards[t, n] == 0 and not r.done[t, n] and r.done[t - 1, n]
                assert (r.next_obs[t, n].abs() <= 0.05).all()  # the start of the next episode
                fresh = True
                continue
            if fresh:
                single.reset()
                single.unwrapped.state = tuple(states[t][n])
                fresh, total, length = False, 0.0, 0
            o, reward, terminated, truncated, _ = single.step(int(r.actions[t, n]))
            total += reward
            length += 1
            assert np.array_equal(o, r.next_obs[t, n].numpy()) and reward == r.rewards[t, n]
            assert terminated == r.terminated[t, n] and truncated == r.truncated[t, n]
            # also where the episode ended: the true final observation
            if t + 1 < 60: assert torch.equal(r.next_obs[t, n], r.obs[t + 1, n])
            if terminated or truncated: replayed.append((total, length))
    assert sorted(replayed) == sorted(episodes)


@pytest.mark.parametrize(
    "env_id, act", [("CartPole-v1", by_sight), ("Acrobot-v1", by_sight), ("Pendulum-v1", torque)])
@settings(max_examples=5)
@given(seed=st.integers(0, 10000))
def test_both_reset_modes_give_the_same_data(env_id, act, seed):
    def collect(mode):
        envs = gym.make_vec(env_id, num_envs=2, vectorization_mode="sync",
                            vector_kwargs={"autoreset_mode": mode}, max_episode_steps=14)
        return Collector(envs, seed).collect(act, 50)
    (a, _), (b, _) = collect(AutoresetMode.NEXT_STEP), collect(AutoresetMode.SAME_STEP)
    assert b.is_step.all() and not a.is_step.all()
    for n in range(2):
        keep = a.is_step[:, n]
        for name in FIELDS:
            assert torch.equal(
                getattr(a, name)[:, n][keep], getattr(b, name)[:int(keep.sum()), n]), name


@settings(max_examples=10)
@given(seed=st.integers(0, 10000), cut=st.integers(1, 59))
def test_cut_anywhere_the_recording_is_the_same(seed, cut):
    "Also where the cut falls on a reset step, since a random cut does in some of the environments."
    whole, episodes = Collector(cartpole(6), seed).collect(by_sight, 60)
    one = Collector(cartpole(6), seed)
    (first, a), (second, b) = one.collect(by_sight, cut), one.collect(by_sight, 60 - cut)
    assert_same(
        Rollout(*(torch.cat([getattr(first, f), getattr(second, f)]) for f in FIELDS)), whole)
    assert a + b == episodes


def test_the_policy_sees_rows():
    "The same numbers in another order of memory give other last digits."
    seen = []
    def act(obs):
        seen.append(obs.flags.c_contiguous and obs.dtype == np.float32)
        return by_sight(obs)
    Collector(cartpole(5), 0).collect(act, 30)
    assert all(seen) and len(seen) == 30


def test_same_seed_same_rollout_and_nothing_is_shared():
    (a, _), (b, _) = (Collector(cartpole(4), 3).collect(random_act(1), 40) for _ in range(2))
    assert_same(a, b)
    c, _ = Collector(cartpole(4), 4).collect(random_act(1), 40)
    assert not torch.equal(a.obs, c.obs)
    assert a.obs.dtype == a.next_obs.dtype == a.rewards.dtype == torch.float32
    assert a.actions.dtype == torch.int64
    assert a.is_step.dtype == a.terminated.dtype == a.truncated.dtype == torch.bool
    assert a.obs.shape == (40, 4, 4)
    assert a.is_step.shape == (40, 4)
    collector = Collector(cartpole(4), 3)
    first, _ = collector.collect(random_act(1), 20)
    kept = first.obs.clone()
    collector.collect(random_act(2), 20)
    assert torch.equal(first.obs, kept)
    assert_same(a.map(lambda x: x.to("cpu")), a)


def test_what_a_reset_step_pays_belongs_to_no_episode():
    (plain, episodes), (paid, same) = (
        Collector(kind([Count] * 2), 0).collect(lambda obs: np.ones(2, np.int64), 30)
        for kind in (SyncVectorEnv, Generous))
    assert episodes == same
    assert len(episodes) > 4
    assert (paid.rewards[~paid.is_step] == 100).all()
    assert torch.equal(paid.rewards[paid.is_step], plain.rewards[plain.is_step])


@given(size=st.integers(1, 40), parts=st.integers(1, 40), seed=SEEDS)
def test_minibatches_of_any_size(size, parts, seed):
    "Also where they cannot be equal, since rows that were no data are gone."
    got = minibatches(size, parts, torch.Generator().manual_seed(seed))
    lengths = [len(p) for p in got]
    assert len(got) == min(parts, size)
    assert max(lengths) - min(lengths) <= 1
    assert torch.cat(got).sort().values.tolist() == list(range(size))


def test_minibatches_are_shuffled_anew_each_time():
    g = torch.Generator().manual_seed(0)
    first, second = (torch.cat(minibatches(512, 4, g)) for _ in range(2))
    assert not torch.equal(first, second) and not torch.equal(first, torch.arange(512))


def test_other_spaces():
    """A table in a row, and actions that are stored as the policy counts them but told as the
    environment calls them.
    """
    told = []
    def for_env(a):
        told.append(a + 1)
        return told[-1]
    r, episodes = Collector(SyncVectorEnv([Table, Table]), 0).collect(
        lambda obs: np.array([0, 2]), 6, for_env)
    assert r.obs.shape == (6, 2, 6)
    assert r.obs.dtype == torch.float32
    assert (r.actions == torch.tensor([0, 2])).all()
    assert r.next_obs[4].tolist() == [[1, 0, 0, 0, 0, 5], [3, 0, 0, 0, 0, 5]]
    assert r.next_obs[5].tolist() == [[0] * 6] * 2
    assert all(t.tolist() == [1, 3] for t in told) and len(episodes) == 2


def test_the_continuous_actions_that_are_stored_are_those_of_the_policy():
    r, _ = Collector(make_envs("Pendulum-v1", 3), 0).collect(
        lambda obs: np.full((3, 1), 7, np.float32), 5, lambda a: np.clip(a, -2, 2))
    assert r.actions.dtype == torch.float32
    assert r.actions.shape == (5, 3, 1)
    assert (r.actions == 7).all()
    told, _ = Collector(make_envs("Pendulum-v1", 3), 0).collect(
        lambda obs: np.full((3, 1), 2, np.float32), 5)
    assert torch.equal(r.next_obs, told.next_obs) and torch.equal(r.rewards, told.rewards)


def test_processes_give_the_same_data():
    one, other = (Collector(make_envs("Pendulum-v1", 2, way), 3) for way in ("sync", "async"))
    try:
        (a, episodes_a), (b, episodes_b) = (c.collect(torque, 205) for c in (one, other))
        assert_same(a, b)
        assert episodes_a == episodes_b and len(episodes_a) == 2
    finally: other.envs.close()


def limited(limit, n, mode=AutoresetMode.NEXT_STEP, env_id="Pendulum-v1"):
    return gym.make_vec(replace(gym.spec(env_id), max_episode_steps=limit), num_envs=n,
                        vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_staggered_starts_cut_the_first_episode_and_nothing_else(mode):
    (plain, _), (cut, episodes) = (
        Collector(limited(17, 4, mode), 3, **kwargs).collect(torque, 60)
        for kwargs in ({}, dict(stagger=True)))
    seam = int(mode == AutoresetMode.NEXT_STEP)
    for n, last in enumerate((4, 8, 12, 17)):
        for name in FIELDS:
            # next_obs of the cut too: before any reset
            if name != "truncated":
                assert torch.equal(
                    getattr(cut, name)[:last, n], getattr(plain, name)[:last, n]), name
        start = last + (seam if last == 17 else 0)
        ends = [last - 1] + [e for k in range(4) if (e := start + 16 + k * (17 + seam)) < 60]
        assert cut.truncated[:, n].nonzero().flatten().tolist() == ends
        # no reset step behind the cut
        assert (~cut.is_step[:, n]).nonzero().flatten().tolist() == [
            e + 1 for e in ends[last < 17:] if seam and e < 59]
        assert not torch.equal(cut.obs[start, n], cut.next_obs[last - 1, n])
        assert abs(cut.obs[start, n, 2]) <= 1
    assert {length for _, length in episodes} == {17} and len(episodes) == cut.truncated.sum() - 3
    assert not cut.terminated.any() and not (cut.truncated & ~cut.is_step).any()


def test_the_returns_after_a_cut_are_those_of_whole_episodes():
    collector = Collector(limited(10, 2), 0, stagger=True)
    rollout, episodes = collector.collect(torque, 27)
    first = [(0, slice(5, 15)), (1, slice(0, 10)), (1, slice(11, 21)), (0, slice(16, 26))]
    by_hand = [rollout.rewards[rows, n].double().sum().item() for n, rows in first]
    assert sorted(earned for earned, _ in episodes) == pytest.approx(sorted(by_hand), rel=1e-5)
    assert [length for _, length in episodes] == [10] * 4
    assert collector.episode_length.tolist() == [0, 5]


def test_who_has_ended_already_is_not_cut_at_a_reset_step():
    collector = Collector(limited(17, 1), 0)
    collector.until_cut += 18  # the 18th step is the reset step
    rollout, episodes = collector.collect(torque, 40)
    assert rollout.truncated[:, 0].nonzero().flatten().tolist() == [16, 34]
    assert (~rollout.is_step[:, 0]).nonzero().flatten().tolist() == [17, 35]
    assert len(episodes) == 2


def test_a_cut_in_a_later_episode_is_a_truncation_as_well():
    "Poles that fall after some ten steps: the cut may find the second episode, or the third."
    collector = Collector(limited(60, 5, env_id="CartPole-v1"), 1, stagger=True)
    rollout, episodes = collector.collect(by_sight, 80)
    assert 0 < rollout.truncated.sum() <= 5
    assert len(episodes) == rollout.terminated.sum()
    assert not (rollout.truncated & rollout.terminated).any()
    for t, n in rollout.truncated.nonzero().tolist():
        assert t + 1 == 60 * (n + 1) // 5
        assert rollout.is_step[t + 1, n]
        assert (rollout.obs[t + 1, n].abs() <= 0.05).all()
    assert all(reward == length for reward, length in episodes)


def test_a_cut_comes_when_it_is_due_however_the_steps_fall_into_rollouts():
    whole, episodes = Collector(limited(17, 4), 3, stagger=True).collect(torque, 40)
    one = Collector(limited(17, 4), 3, stagger=True)
    parts = [one.collect(torque, n) for n in (3, 1, 1, 10, 25)]
    for name in FIELDS:
        assert torch.equal(
            torch.cat([getattr(r, name) for r, _ in parts]), getattr(whole, name)), name
    assert sum((e for _, e in parts), []) == episodes
    assert whole.truncated[3, 0]
    assert whole.truncated[11, 2]


def test_staggered_processes_give_the_same_data():
    one, other = (
        Collector(make_envs("Pendulum-v1", 2, way), 3, stagger=True) for way in ("sync", "async"))
    try:
        (a, episodes_a), (b, episodes_b) = (c.collect(torque, 205) for c in (one, other))
        assert_same(a, b)
        assert episodes_a == episodes_b and a.truncated.nonzero().tolist() == [[99, 0], [199, 1]]
    finally: other.envs.close()


def test_what_cannot_be_staggered_is_refused():
    for envs, words in ((cartpole(2), "CartPoleVectorEnv with max_episode_steps 500"),
                        (SyncVectorEnv([Count]), "SyncVectorEnv with max_episode_steps None")):
        with pytest.raises(
            ValueError,
            match=f"stagger must be left off without a time limit, or where environments "
            f"cannot be reset one by one .*, got {words}"):
            Collector(envs, 0, stagger=True)


@pytest.mark.parametrize("call, words", [
    (lambda: minibatches(0, 1), "size must be in"),
    (lambda: minibatches(10, 0), "parts must be in"),
    (lambda: Collector(SyncVectorEnv([Count], autoreset_mode=AutoresetMode.DISABLED), 0),
     "envs must reset themselves, .* got Disabled"),
])
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words): call()


@pytest.mark.parametrize("name", ["observation", "reward"])
def test_a_number_that_is_none_ends_the_rollout(name):
    class Broken(Count):
        def step(self, action):
            obs, reward, *rest = super().step(action)
            return (obs * np.nan, reward, *rest) if name == "observation" else (obs, np.nan, *rest)
    with pytest.raises(
        FloatingPointError, match=f"the environment gave no finite number as {name}"):
        Collector(SyncVectorEnv([Broken]), 0).collect(lambda obs: np.zeros(1, np.int64), 2)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
@pytest.mark.parametrize("shape", [(128,), (4, 4), (4, 4, 3)])
def test_numbers_of_bytes_become_fractions_whatever_their_shape_and_dtype(shape, dtype):
    "As the space says: RAM, grey and coloured pictures, and as whichever dtype they are handed in."
    for low, high, scale in (0, 255, 255), (0, 9, 1), (-255, 255, 1):
        space = gym.spaces.Box(low, high, shape, np.float32 if low else np.uint8)
        got = row_maker(space)(np.full((2, *shape), 9, dtype))
        if picture_shape(space) is not None:  # the network divides them
            assert got.dtype == np.uint8
            got = got / byte_scale(space)
        assert got.shape == (2, np.prod(shape)) and got.dtype == np.float32
        assert got.flags.c_contiguous and (got == np.float32(9) / np.float32(scale)).all()


@pytest.mark.parametrize("dtype, kept", [
    (np.uint8, np.float32), (np.int16, np.float32), (np.float16, np.float32),
    (np.float32, np.float32), (np.int64, np.float64), (np.float64, np.float64)])
def test_no_digit_is_lost_before_the_observations_are_normalised(dtype, kept):
    space = gym.spaces.Box(0, 100, (2,), dtype)
    assert row_maker(space)(np.ones((1, 2), dtype)).dtype == kept
    if kept is np.float64:
        times = np.array([[1_700_000_000, 1_700_000_001]], dtype)
        assert np.diff(row_maker(space)(times)) == 1


class Screen(gym.Env):
    "Shows bytes that tell how many steps were made since the reset, channels last."
    observation_space = gym.spaces.Box(0, 255, (6, 6, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)
    def look(self): return np.full((6, 6, 3), self.t, np.uint8)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}
    def step(self, action):
        self.t += 1
        return self.look(), 1.0, self.t == 4, False, {}


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_pictures_are_stored_as_bytes_and_once(mode):
    "Where the next step resets, what follows a row is the next row: the same memory."
    envs = SyncVectorEnv([Screen] * 2, autoreset_mode=AutoresetMode(mode))
    r, _ = Collector(envs, 0).collect(lambda obs: np.zeros(2, np.int64), 9)
    assert r.obs.dtype == r.next_obs.dtype == torch.uint8 and r.obs.shape == (9, 2, 108)
    after = [1, 2, 3, 4, 0, 1, 2, 3, 4] if mode == "NextStep" else [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert r.next_obs[:, 1, 107].tolist() == after
    shared = np.shares_memory(r.obs.numpy(), r.next_obs.numpy())
    assert shared == (mode == "NextStep")


def test_a_rollout_of_atari_pictures_takes_the_memory_of_its_bytes():
    "8 environments, 128 steps, 84 x 84 x 4: 27.6 MiB; as floats and twice it would be 221."
    class Screen(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        action_space, t = gym.spaces.Discrete(6), 0
        def reset(self, *, seed=None, options=None): return self.look(), {}
        def look(self): return np.full((4, 84, 84), self.t % 256, np.uint8)
        def step(self, action):
            self.t += 1
            return self.look(), 0.0, self.t % 50 == 0, False, {}
    p = PPO(Screen, num_envs=8, num_steps=128, network=(16,), shared=True)
    rollout, _ = p.collect()
    start, after = (x.numpy().ctypes.data for x in (rollout.obs, rollout.next_obs))
    one = 8 * 4 * 84 * 84
    assert rollout.obs.untyped_storage().nbytes() == rollout.next_obs.nbytes == 128 * one
    assert after - start == one  # the same memory, a step later
