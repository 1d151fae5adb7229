"""One meaning of a name in training, evaluation, prediction and film, where the vectorized form
shows something else than the single environment; seeds that C refuses; the true return.
"""
import csv
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from rlhf_notes.control import envs, trainer
from rlhf_notes.control.config import RECIPES, PPOConfig, recipe
from rlhf_notes.control.envs import make_envs, reset
from rlhf_notes.control.trainer import PPO
from rlhf_notes.training.runs import Run

TINY = dict(num_envs=2, num_steps=8, minibatches=1, epochs=1, network=(8,), device="cpu")
SCREEN = gym.spaces.Box(0, 255, (30, 20, 3), np.uint8)
STACK = gym.spaces.Box(0, 255, (4, 12, 12), np.uint8)
LENGTH, SCORE = 5, 7.0  # steps of an episode, and the reward of its last


def check_seed(seed):
    if seed is not None and not 0 <= seed < 2**31: raise TypeError("incompatible arguments")


class Screens(gym.Env):
    "A game as its screen."
    observation_space, action_space = SCREEN, gym.spaces.Discrete(3)
    metadata = {"render_modes": ["rgb_array"]}
    def __init__(self, render_mode=None): self.render_mode = render_mode
    def reset(self, *, seed=None, options=None): return np.zeros(SCREEN.shape, np.uint8), {}
    def step(self, action): return np.zeros(SCREEN.shape, np.uint8), 0.0, False, False, {}


class Stacks(VectorEnv):
    "The same game as the last four pictures, small and grey, many at once; rewards are clipped."
    single_observation_space, single_action_space = STACK, gym.spaces.Discrete(3)
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    def __init__(self, num_envs, reward_clipping=True):
        self.num_envs, self.clips, self.seeds = num_envs, reward_clipping, []
        self.observation_space = gym.vector.utils.batch_space(STACK, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
    def reset(self, *, seed=None, options=None):
        check_seed(None if seed is None else seed + self.num_envs)
        self.seeds.append(seed)
        self.t, self.over = 0, np.zeros(self.num_envs, bool)
        return self.show(), {}
    def show(self): return np.full((self.num_envs, *STACK.shape), self.t, np.uint8)
    def step(self, actions):
        self.t = 0 if self.over.all() else self.t + 1
        self.over = np.full(self.num_envs, self.t == LENGTH)
        reward = self.over * (np.sign(SCORE) if self.clips else SCORE)
        return self.show(), reward, self.over, np.zeros(self.num_envs, bool), {}


@pytest.fixture
def game(monkeypatch):
    spec = EnvSpec("Games/Screens-v0", Screens, vector_entry_point=Stacks)
    monkeypatch.setitem(gym.registry, spec.id, spec)
    return spec.id


@pytest.mark.parametrize("seed", range(10))
def test_every_seed_starts_evaluates_and_films_where_c_takes_31_bits(game, seed, tmp_path):
    p = PPO(game, seed=seed, steps=32, **TINY).learn()
    assert p.envs.seeds[-1] < 2**31 and p.rows[-1]["return_mean"] == SCORE
    for how in dict(), dict(deterministic=False), dict(seed=2**40 + seed):
        assert p.evaluate(3, **how).tolist() == [SCORE] * 3
    assert p.film(tmp_path / "a.gif", seed=2**33 + seed).stat().st_size


def test_a_seed_is_shortened_only_where_it_is_refused():
    for seed in 2**31 + 9, 2**31 - 2, 2**40:  # of the second, only seed + i is too large
        assert reset(Stacks(2), seed)[0].shape == (2, *STACK.shape)
    long = 2**31 + 9
    first, again = (reset(gym.make("CartPole-v1"), seed)[0] for seed in (long, long % 2**30))
    assert (first != again).any()
    class Broken(Screens):
        def reset(self, *, seed=None, options=None): raise KeyError("file")
    for seed in (3, 2**40, None):
        with pytest.raises(KeyError, match="file"): reset(Broken(), seed)


@pytest.mark.parametrize("way", ["auto", "sync", "async"])
def test_a_name_means_one_thing_whatever_the_way(game, way, tmp_path):
    p = PPO(game, steps=32, vectorization=way, **TINY)
    assert p.spaces[0] == STACK
    assert p.learn().rows[-1]["return_mean"] == SCORE  # not the sign of it
    assert p.predict(np.zeros(STACK.shape, np.uint8)).shape == ()
    with pytest.raises(ValueError, match=r"obs must have shape \(4, 12, 12\)"):
        p.predict(np.zeros(SCREEN.shape, np.uint8))
    p.save(tmp_path / "p.pt")
    again = PPO.load(tmp_path / "p.pt")
    assert again.evaluate(2).tolist() == [SCORE] * 2
    p.close()


def test_what_a_function_makes_is_learned_from_as_it_is(game):
    assert PPO(lambda: gym.make(game), steps=16, **TINY).spaces[0] == SCREEN


def test_both_forms_of_a_name_are_compared_once(game, monkeypatch):
    envs._shows_other.cache_clear()
    made, make = [], gym.make
    monkeypatch.setattr(gym, "make", lambda *x, **more: made.append(x) or make(*x, **more))
    for _ in range(3):
        envs.make_one(game, {}).close()
        envs.make_one("CartPole-v1", {}).close()
    assert len(made) == 2 + 3  # to compare; CartPole itself, which shows the same in both forms
    other = EnvSpec(game, Screens, vector_entry_point=type("Others", (Stacks,), {}))
    monkeypatch.setitem(gym.registry, game, other)  # another one under the same name
    envs.make_one(game, {})
    assert len(made) == 6


def test_a_film_shows_the_last_picture_in_grey(game):
    from rlhf_notes.control.envs import make_one
    one = make_one(game, {}, render_mode="rgb_array")
    one.reset(seed=0)
    for t in range(1, 4):
        one.step(1)
        assert one.render().shape == (48, 48, 3) and (one.render() == t).all()


def test_rewards_are_clipped_in_training_alone(game):
    p = PPO(game, steps=16, reward_clip=2.0, reward_scale=0.5, **TINY)
    rollout, episodes = p.collect()
    assert rollout.rewards.unique().tolist() == [0.0, 1.0]  # 7, cut to 2, times 0.5
    assert {total for total, _ in episodes} == {SCORE}
    assert PPO(game, steps=16, env_kwargs={"reward_clipping": True}, **TINY).evaluate(1) == 1.0


def test_a_recipe_of_a_namespace():
    atari = recipe("ALE/Pong-v5")
    assert atari == recipe("ale_py:ALE/Pong-v5") == RECIPES["ALE/"] and atari["reward_clip"] == 1
    assert recipe("gymnasium:Pendulum-v1") == RECIPES["Pendulum-v1"]
    assert recipe("CartPole-v1") == recipe("Other/Pong-v5") == recipe("") == {}
    assert PPOConfig(env="ALE/Pong-v5", **atari).iterations > 9000
    games = "Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"
    assert {recipe(f"MinAtar/{game}-v{n}")["hidden"] for game in games for n in (0, 1)} == {128}
    assert PPOConfig(**recipe("MinAtar/Breakout-v1")).batch == 8192


@pytest.mark.parametrize("name", ["HalfCheetah", "Hopper", "Walker2d"])
def test_mujoco_has_the_options_of_cleanrl(name):
    config = PPOConfig(**recipe(f"{name}-v4"))
    assert recipe(f"{name}-v4") == recipe(f"{name}-v5") and config.iterations == 488
    assert (config.batch, config.batch // config.minibatches, config.epochs) == (2048, 64, 10)
    assert (config.truncation, config.whitening) == ("terminate", "minibatch")


def clip_warnings(p, fractions):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for fraction in fractions:
            p.rows.append(dict(clip_fraction=fraction))
            p._note_clips()
    return [str(w.message) for w in caught]


def test_a_clip_fraction_that_stays_high_is_said_once(monkeypatch):
    p = PPO("CartPole-v1", steps=16, **TINY)
    assert not clip_warnings(p, [0.5] * 9 + [0.4] + [0.9] * 9 + [0.1])
    said, = clip_warnings(p, [0.41] * 40)
    assert "clip_fraction" in said and "less than learning_rate=0.003" in said
    assert not clip_warnings(p, [0.1] + [0.9] * 20)
    monkeypatch.setattr(trainer, "HIGH", -1.0)
    with pytest.warns(UserWarning, match="clip_fraction has been above -1.0 for ten"):
        PPO("CartPole-v1", steps=160, **TINY).learn()


@pytest.mark.parametrize("seed", [0, 9])
def test_atari_by_its_name(seed, tmp_path):
    "The real one: seed 0 was too long for the training, 9 for all that it is used for."
    ale_py = pytest.importorskip("ale_py")
    gym.register_envs(ale_py)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of episodes that are given up
        p = PPO("ALE/Pong-v5", seed=seed, steps=16, **TINY).learn()
        assert p.spaces[0].shape == (4, 84, 84)
        assert (p.config.learning_rate, p.config.reward_clip) == (2.5e-4, 1.0)
        p.evaluate(1, longest=20)
        p.evaluate(1, deterministic=False, longest=20)
        p.film(tmp_path / "pong.gif", seed=seed)
        assert PPO("ALE/Pong-v5", vectorization="sync", steps=16, **TINY).spaces == p.spaces


class Lives(gym.Env):
    "Three lives of 4 steps; each step scores 2."
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 2.0, self.t == 12, False, {}


class EndsAtEachLife(gym.Wrapper):
    "As Atari's EpisodicLife: the game goes on, the episode of the training ends."
    over = True
    def reset(self, **how):
        return self.env.reset(**how) if self.over else (np.zeros(2, np.float32), {})
    def step(self, action):
        obs, reward, self.over, truncated, info = self.env.step(action)
        return obs, reward, self.unwrapped.t % 4 == 0, truncated, info


def shaped():
    env = gym.wrappers.RecordEpisodeStatistics(Lives())
    return gym.wrappers.TransformReward(EndsAtEachLife(env), lambda reward: 0.1 * reward)


def same_step(): return SyncVectorEnv([shaped] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
def above(): return gym.wrappers.vector.RecordEpisodeStatistics(SyncVectorEnv([Lives] * 2))


@pytest.mark.parametrize("make, way", [(shaped, "sync"), (shaped, "async"), (same_step, "auto"),
                                       (above, "auto")])
def test_the_true_return_is_reported_where_the_environment_tells_it(make, way):
    env = make() if make in (same_step, above) else make
    p = PPO(env, steps=128, vectorization=way, **TINY).learn()
    assert (p.rows[-1]["return_mean"], p.rows[-1]["length_mean"]) == (24.0, 12.0)
    assert p.episodes == 2 * (65 // (12 if make is same_step else 13 if make is above else 15))
    assert p.evaluate(4, envs=p.envs).tolist() == [24.0] * 4
    p.close()


def test_without_it_the_rewards_are_summed():
    def plain(): return gym.wrappers.TransformReward(Lives(), lambda reward: 0.5 * reward)
    p = PPO(plain, steps=128, **TINY).learn()
    assert p.rows[-1]["return_mean"] == 12.0 and p.evaluate(2).tolist() == [12.0] * 2


def test_a_threshold_holds_for_the_true_return():
    def inside(): return gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda r: 0.1 * r)
    def outside():
        told = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
        return gym.wrappers.TransformReward(told, lambda r: 0.1 * r)
    assert PPO(outside, steps=16, **TINY).threshold == 475
    assert PPO(inside, steps=16, **TINY).threshold is None


def episodes_of(path):
    with open(path / "episodes.csv", newline="") as f: return list(csv.DictReader(f))


def test_each_episode_is_in_a_file(tmp_path):
    p = PPO("CartPole-v1", out=tmp_path / "run", track=(), steps=2048, eval_episodes=2).learn()
    rows = episodes_of(tmp_path / "run")
    assert len(rows) == p.episodes > 20
    assert [float(row["return"]) for row in rows[-20:]] == [total for total, _ in p.recent]
    assert [int(row["steps"]) for row in rows] == [row["steps"] for row, before in zip(
        p.rows, [0, *(row["episodes"] for row in p.rows)]) for _ in range(row["episodes"] - before)]


def test_a_resumed_run_drops_the_episodes_after_its_checkpoint(tmp_path):
    run = Run.create(tmp_path / "run", {"task": "some"})
    for steps in (10, 20, 30):
        run.log(dict(steps=steps), steps)
        run.log_episodes([(steps * 1.5, 3), (0.0, 4)])
        if steps == 20: run.save_checkpoint({})
    run.finish({})
    with open(tmp_path / "run" / "episodes.csv", "a") as f: f.write("40,1")  # cut off
    again = Run.resume(tmp_path / "run")
    again.log(dict(steps=25), 25)
    again.log_episodes([(7.0, 5)])
    assert [tuple(map(float, row.values())) for row in episodes_of(tmp_path / "run")] == [
        (10, 15, 3), (10, 0, 4), (20, 30, 3), (20, 0, 4), (25, 7, 5)]
    again.finish({})


def test_make_envs_closes_what_it_looks_at(game, monkeypatch):
    closed = []
    monkeypatch.setattr(Stacks, "close", lambda self, **how: closed.append(self), raising=False)
    envs._shows_other.cache_clear()
    for many in 3, 5:  # one that is looked at, once, and two that are played
        make_envs(game, 2, "sync").close()
        assert len(closed) == many
