import csv
import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from matplotlib.figure import Figure

from rlhf_notes.control import plots as pendulum
from rlhf_notes.control.ppo import PPO, make_batch
from rlhf_notes.control.config import PendulumConfig
from rlhf_notes.control.plots import Replay, draw_pendulum, draw_surface, filmstrip, observation, play, record_video, value_surface
from rlhf_notes.formulas.advantage import gae
from strategies import SEEDS

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = PendulumConfig(seed=2, steps=4 * 256, num_envs=4, num_steps=64, epochs=2)
ANGLE, SPEED, TORQUE = st.floats(-10, 10), st.floats(-8, 8), st.floats(-2, 2)


@pytest.fixture(scope="module")
def ppo():
    ppo = PPO(SMALL)
    for _ in range(4): ppo.iterate()
    return ppo


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("pendulum_study", ROOT / "benchmarks" / "pendulum_study.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def axes(): return Figure().subplots()


# drawing

@given(angle=ANGLE, speed=SPEED, torque=TORQUE)
def test_drawing_puts_the_rod_where_the_angle_says(angle, speed, torque):
    ax = axes()
    draw_pendulum(ax, (angle, speed), torque)
    rod = ax.lines[0].get_xydata()
    np.testing.assert_allclose(rod, [(0, 0), (-math.sin(angle), math.cos(angle))], atol=1e-12)
    assert len(ax.lines) == (4 if torque else 2)
    if torque:
        arc = ax.lines[2].get_xydata()
        np.testing.assert_allclose(np.hypot(*arc.T), 0.55, atol=1e-9)
        np.testing.assert_allclose(arc[0], 0.55 * rod[1], atol=1e-9)                              # it starts at the rod
        turn = arc[0, 0] * arc[-1, 1] - arc[0, 1] * arc[-1, 0]                                    # and turns counterclockwise for a positive torque
        assert turn == pytest.approx(0.55 ** 2 * math.sin(0.5 * torque), abs=1e-9)
        np.testing.assert_allclose(ax.lines[3].get_xydata()[0], arc[-1], atol=1e-12)
    assert ax.get_xlim()[0] <= -1 and ax.get_ylim()[1] >= 1 and ax.get_aspect() == 1


def test_filmstrip_draws_the_states_it_says():
    states = np.stack([np.linspace(math.pi, 0, 31), np.zeros(31)], 1)
    figure = filmstrip(Replay(states, np.linspace(-2, 2, 30), np.zeros(30)), every=4, frames=6, columns=4, dt=0.05)
    shown = [ax for ax in figure.axes if ax.lines]
    assert len(shown) == 6 and len(figure.axes) == 8 and not any(ax.axison for ax in figure.axes if not ax.lines)
    for i, ax in enumerate(shown):
        np.testing.assert_allclose(ax.lines[0].get_xydata()[1], (-math.sin(states[4 * i, 0]), math.cos(states[4 * i, 0])), atol=1e-12)
        assert ax.get_xlabel() == f"{4 * i * 0.05:.2f} s"
    short = filmstrip(Replay(states[:4], np.ones(3), np.zeros(3)), every=2)
    assert sum(bool(ax.lines) for ax in short.axes) == 2


# replays

def physics(angle, speed, torque):
    "One step of the pendulum, from its description: mass 1, length 1, gravity 10, 0.05 seconds."
    wrapped = (angle + math.pi) % (2 * math.pi) - math.pi
    reward = -(wrapped ** 2 + 0.1 * speed ** 2 + 0.001 * torque ** 2)
    speed = min(max(speed + (15 * math.sin(angle) + 3 * torque) * 0.05, -8), 8)
    return angle + 0.05 * speed, speed, reward


@settings(max_examples=15)
@given(start=st.tuples(st.floats(-3, 3), SPEED), seed=st.none() | SEEDS)
def test_replay_obeys_the_physics_and_the_policy(ppo, start, seed):
    def rng(): return None if seed is None else np.random.default_rng(seed)
    replay = play(ppo, 30, start=start, rng=rng())
    assert replay.states.shape == (31, 2) and replay.torques.shape == replay.rewards.shape == (30,)
    np.testing.assert_array_equal(replay.states[0], start)
    policy = ppo.policy(rng())
    for (angle, speed), after, torque, reward in zip(replay.states, replay.states[1:], replay.torques, replay.rewards):
        np.testing.assert_allclose((*after, reward), physics(angle, speed, torque), atol=1e-5)
        wanted = policy(np.array([[math.cos(angle), math.sin(angle), speed]], np.float32)).item()
        assert torque == pytest.approx(min(max(wanted, -2), 2), abs=1e-4)


def test_replay_is_not_cut_and_comes_again(ppo):
    a, b, c = play(ppo, 230, seed=5), play(ppo, 230, seed=5), play(ppo, 230, seed=6)
    assert len(a.rewards) == 230 and np.abs(np.diff(a.states[:, 0])).max() < 0.41           # never carried elsewhere: 8 rad/s for 0.05 s
    assert np.array_equal(a.states, b.states) and not np.array_equal(a.states, c.states)
    env = gym.make("Pendulum-v1")
    env.reset(seed=5)
    np.testing.assert_array_equal(a.states[0], env.unwrapped.state)


def test_replay_keeps_every_state_apart(ppo):
    assert len(np.unique(play(ppo, 20, start=(2.0, 1.0)).states, axis=0)) == 21


def test_replay_is_of_pendulum_only():
    with pytest.raises(ValueError, match="ppo must play Pendulum, got one for CartPole-v1"): play(PPO(replace(SMALL, env="CartPole-v1", stagger=False)), 5)


# the value surface

@given(angle=ANGLE, speed=SPEED)
def test_observation(angle, speed):
    obs = observation(angle, [speed, 0.0])
    assert obs.dtype == np.float32
    np.testing.assert_allclose(obs, [(math.cos(angle), math.sin(angle), speed), (math.cos(angle), math.sin(angle), 0)], atol=1e-6)


def test_observation_is_what_the_environment_shows():
    env = gym.make("Pendulum-v1")
    for seed in range(5):
        obs, _ = env.reset(seed=seed)
        np.testing.assert_allclose(observation(*env.unwrapped.state), obs, atol=1e-6)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scale", [0.1, 2.0])
def test_value_surface_against_loops(normalize, scale):
    ppo = PPO(replace(SMALL, normalize_obs=normalize, reward_scale=scale))
    ppo.iterate()
    weights = [(l.weight.detach().double().numpy(), l.bias.detach().double().numpy()) for l in ppo.agent.critic[::2]]
    angles, speeds = [-3.0, 0.2, 1.5], [-7.0, 4.0]
    surface = value_surface(ppo, angles, speeds)
    assert surface.shape == (2, 3)
    for i, speed in enumerate(speeds):
        for j, angle in enumerate(angles):
            x = np.array([math.cos(angle), math.sin(angle), speed])
            if normalize: x = np.clip((x - ppo.scaling.seen.mean.double().numpy()) / np.sqrt(ppo.scaling.seen.var.double().numpy() + 1e-8), -10, 10)
            for k, (w, b) in enumerate(weights):
                x = w @ x + b
                if k < 2: x = x / (1 + np.exp(-x))                      # SiLU
            assert surface[i, j] == pytest.approx(x.item() / scale, rel=1e-4, abs=1e-4)


def test_surface_is_drawn_the_right_way_round():
    values = np.arange(6.0).reshape(2, 3)
    states = np.array([(3.0, 1.0), (3.2, 2.0), (-0.1, -1.0), (-3.1 + 4 * math.pi, 0.5)])
    before = states.copy()
    ax = axes()
    image = draw_surface(ax, values, states, low=-1, high=7)
    np.testing.assert_array_equal(image.get_array(), values)
    assert image.origin == "lower" and image.get_clim() == (-1, 7)
    np.testing.assert_allclose(image.get_extent(), (-math.pi, math.pi, -8, 8))
    x, y = ax.lines[0].get_xydata().T
    np.testing.assert_allclose(x, [3.0, np.nan, 3.2 - 2 * math.pi, -0.1, -3.1], atol=1e-9)
    np.testing.assert_array_equal(y, [1.0, np.nan, 2.0, -1.0, 0.5])                    # a step over the edge breaks the line
    np.testing.assert_allclose(ax.lines[1].get_xydata()[0], (3.0, 1.0))
    np.testing.assert_array_equal(states, before)
    free = axes()
    assert draw_surface(free, values).get_clim() == (0, 5) and not free.lines


# a cut is not an end

@given(seed=SEEDS, gamma=st.floats(0, 1), lam=st.floats(0, 1), T=st.integers(1, 12))
def test_error_of_taking_a_cut_for_an_end(seed, gamma, lam, T):
    g = torch.Generator().manual_seed(seed)
    rewards, values, after = torch.randn((3, T), generator=g, dtype=torch.float64)
    values = torch.cat([values[:1], after[:-1]])
    done = torch.zeros(T, dtype=torch.bool)
    done[-1] = True
    (cut, _), (end, _) = (gae(rewards, values, after, terminated, done, gamma, lam) for terminated in (torch.zeros_like(done), done))
    for t in range(T): assert (end - cut)[t].item() == pytest.approx(-(gamma * lam) ** (T - 1 - t) * gamma * after[-1].item(), abs=1e-9)


def test_option_reaches_the_batch():
    config = replace(SMALL, whitening="none", stagger=False)
    ppo = PPO(config)
    rollouts = [ppo.collector.collect(ppo.policy(ppo.rng), 64, ppo.agent.head.for_env)[0] for _ in range(4)]
    for rollout in rollouts:
        cut, end = (make_batch(ppo.agent, ppo.scaling(rollout), replace(config, truncation=t)) for t in ("bootstrap", "terminate"))
        assert torch.equal(cut.advantages, end.advantages) == (not rollout.truncated.any())
        assert not rollout.terminated.any() and torch.equal(cut.logp, end.logp) and torch.equal(cut.values, end.values)
    assert [bool(r.truncated.any()) for r in rollouts] == [False, False, False, True]


# films

def test_film_needs_a_name_and_two_packages(ppo, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"path must end in \.mp4, got .*swing\.gif"): record_video(ppo, tmp_path / "swing.gif")
    for missing, said in ((("moviepy",), "needs moviepy: pip install moviepy"), (("pygame",), "needs pygame: pip install pygame"), (("moviepy", "pygame"), "needs moviepy and pygame: pip install moviepy pygame")):
        monkeypatch.setattr(pendulum, "find_spec", lambda name, missing=missing: None if name in missing else True)
        with pytest.raises(ModuleNotFoundError, match=said) as e: record_video(ppo, tmp_path / "swing.mp4")
        assert "\n" not in str(e.value)
    assert not list(tmp_path.iterdir())


def test_film_of_one_whole_episode(ppo, tmp_path, monkeypatch):
    steps = []

    class Recorder(gym.Wrapper):
        def __init__(self, env, video_folder, episode_trigger, name_prefix):
            super().__init__(env)
            self.file, self.modes = Path(video_folder) / f"{name_prefix}-episode-0.mp4", env.render_mode
            assert env.render_mode == "rgb_array" and episode_trigger(0)
        def step(self, action):
            steps.append(np.asarray(action))
            return super().step(action)
        def close(self):
            self.file.write_text(f"{len(steps)} steps")
            super().close()

    monkeypatch.setattr(pendulum, "find_spec", lambda name: True)
    monkeypatch.setattr(gym.wrappers, "RecordVideo", Recorder)
    path = record_video(ppo, tmp_path / "swing.mp4", seed=5)
    assert path == tmp_path / "swing.mp4" and path.read_text() == "200 steps" and [p.name for p in tmp_path.iterdir()] == ["swing.mp4"]
    np.testing.assert_allclose(np.concatenate(steps), play(ppo, 200, seed=5).torques, atol=1e-5)
    sampled = [len(steps), record_video(ppo, tmp_path / "again.mp4", seed=5, rng=np.random.default_rng(0))][0]
    assert np.abs(np.concatenate(steps[sampled:]) - np.concatenate(steps[:sampled])).max() > 0.1


class Unseen(gym.Env):
    "Takes no render_mode."
    observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-2, 2, (1,))
    def reset(self, *, seed=None, options=None): super().reset(seed=seed); return np.zeros(3, np.float32), {}
    def step(self, action): return np.zeros(3, np.float32), 0.0, True, False, {}


class Deaf(Unseen):
    "Takes any option, and minds none."
    def __init__(self, **options): pass


class Undrawn(Unseen):
    "Takes render_mode, and has no render."
    metadata = {"render_modes": ["rgb_array"]}
    def __init__(self, render_mode=None): self.render_mode = render_mode


class Blank(Undrawn):
    "Renders nothing."
    def render(self): return None


@pytest.mark.parametrize("kind, why", [(Unseen, "it takes no render_mode"), (Deaf, "it ignores render_mode"), (Undrawn, r"it has no render\(\)"), (Blank, r"its render\(\) gives no pixels")])
def test_no_film_of_what_cannot_be_rendered(tmp_path, monkeypatch, kind, why):
    class Recorder(gym.Wrapper):
        def __init__(self, env, video_folder, episode_trigger, name_prefix): super().__init__(env)
    monkeypatch.setitem(gym.registry, "Film-v0", gym.envs.registration.EnvSpec("Film-v0", kind, max_episode_steps=5, disable_env_checker=True))
    monkeypatch.setattr(pendulum, "find_spec", lambda name: True)
    monkeypatch.setattr(gym.wrappers, "RecordVideo", Recorder)
    with pytest.raises(ValueError, match=r"^env must be an environment that can be rendered \(render_mode 'rgb_array'\), got 'Film-v0': .*" + why) as e: record_video(PPO(replace(SMALL, env="Film-v0")), tmp_path / "film.mp4")
    assert "\n" not in str(e.value) and not list(tmp_path.iterdir())


def test_film_for_real(ppo, tmp_path):
    pytest.importorskip("moviepy"); pytest.importorskip("pygame")
    path = record_video(ppo, tmp_path / "films" / "swing.mp4")
    assert path.stat().st_size > 1000 and path.read_bytes()[4:8] == b"ftyp"


# the study

def test_study_holds_what_its_script_makes(study):
    results = ROOT / "nbs" / "control" / "results"
    def read(name):
        with open(results / f"{name}.csv", newline="") as f: return list(csv.DictReader(f))
    rows = read("pendulum_study")
    assert tuple(rows[0]) == study.FILES["study"]
    keys = [(r["variant"], int(r["seed"])) for r in rows]
    assert len(set(keys)) == len(keys) and {v for v, _ in keys} == set(study.VARIANTS)
    seeds = {v: sorted(s for w, s in keys if w == v) for v in study.VARIANTS}
    assert all(s == list(range(len(s))) and len(s) >= 5 for s in seeds.values())
    for name in ("curves", "values"): assert tuple(read(f"pendulum_study_{name}")[0]) == study.FILES[name]


def test_study_can_fix_the_deviation_and_shift_the_reward(study):
    config = replace(SMALL, steps=512)
    fixed, curve = study.trained(replace(config, **study.VARIANTS["fixed std 1"]), fixed_std=True)
    assert [std for _, _, std in curve] == [1.0, 1.0] and fixed.agent.head.log_std.item() == 0
    free, learned = study.trained(config)
    assert learned[-1][2] not in (1.0, learned[0][2])
    shifted, _ = study.trained(config, shift=8.0)
    assert shifted.collector.episode_return[0] < 0                                                # what is logged is what the environment gave
    assert shifted.agent.value(torch.zeros(1, 3)).item() > free.agent.value(torch.zeros(1, 3)).item()


def test_study_checks_values_against_loops(study):
    ppo, _ = study.trained(replace(SMALL, steps=256, gamma=0.5))
    rows = study.value_check(ppo, shift=1.0, num_envs=2, steps=10, more=30)
    assert sum(n for _, n, _, _ in rows) == 20
    longer = study.value_check(ppo, shift=2.0, num_envs=2, steps=10, more=30)
    for (_, _, v, earned), (_, _, w, more) in zip(rows, longer): assert v == w and more - earned == pytest.approx(2.0, abs=1e-4)    # 1 / (1 - 0.5)


def test_old_program_is_reproducible_and_trains(study):
    a, b = study.old_program(0, 4000), study.old_program(0, 4000)
    assert a == b and [s for s, _, _ in a[2]] == [2000, 4000] and a[:2] != study.old_program(0, 2000)[:2]
    assert a != study.old_program(0, 4000, bootstrap=True) and a != study.old_program(1, 4000)
    assert all(-2000 < r < 0 for r in a[:2])
