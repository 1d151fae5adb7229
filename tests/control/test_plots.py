import csv
import importlib
import math
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image
from strategies import SEEDS

from rlhf_notes import viz
from rlhf_notes.control import trainer
from rlhf_notes.control.config import PendulumConfig, PPOConfig
from rlhf_notes.control.plots import draw_cartpole, draw_pendulum, film, plot_run
from rlhf_notes.control.ppo import make_batch
from rlhf_notes.control.trainer import PPO, train
from rlhf_notes.formulas.advantage import gae

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = PendulumConfig(seed=2, steps=4 * 256, num_envs=4, num_steps=64, epochs=2)
ANGLE, SPEED, TORQUE = st.floats(-10, 10), st.floats(-8, 8), st.floats(-2, 2)


@pytest.fixture(scope="module")
def study():
    return importlib.import_module("pendulum_study")


def axes(): return Figure().subplots()


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
        np.testing.assert_allclose(arc[0], 0.55 * rod[1], atol=1e-9)  # it starts at the rod
        # and turns counterclockwise for a positive torque
        turn = arc[0, 0] * arc[-1, 1] - arc[0, 1] * arc[-1, 0]
        assert turn == pytest.approx(0.55 ** 2 * math.sin(0.5 * torque), abs=1e-9)
        np.testing.assert_allclose(ax.lines[3].get_xydata()[0], arc[-1], atol=1e-12)
    assert ax.get_xlim()[0] <= -1 and ax.get_ylim()[1] >= 1 and ax.get_aspect() == 1


def test_drawings(tmp_path):
    _, rows, summary = train(PPOConfig(seed=3, steps=128, num_envs=4, num_steps=32))
    for rows, summary in (
        (rows, summary), ([], summary | dict(interrupted=True, eval_return_mean=None))):
        figure = Figure()
        plot_run(figure, rows, summary)
        assert len(figure.axes) == 4
        assert ("interrupted" in figure.axes[3].get_xlabel()) == summary["interrupted"]
        figure.savefig(tmp_path / "f.svg")
    with matplotlib.rc_context():
        viz.style()
        figure = Figure()
        plot_run(figure, rows, summary | dict(eval_return_mean=20.0, eval_sampled_return_mean=20.0))
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert len(figure.legends[0].texts) == 3 and not any(
        box.overlaps(ax.get_window_extent()) for ax in figure.axes), "a legend lies on a curve"
    ax = Figure().subplots()
    draw_cartpole(ax, [1.0, 0.0, math.pi / 6, 0.0])
    pole = ax.lines[-1]
    assert pole.get_xdata()[1] - pole.get_xdata()[0] == pytest.approx(0.5)
    assert pole.get_ydata()[1] - pole.get_ydata()[0] == pytest.approx(math.cos(math.pi / 6))


@given(seed=SEEDS, gamma=st.floats(0, 1), lam=st.floats(0, 1), T=st.integers(1, 12))
def test_error_of_taking_a_cut_for_an_end(seed, gamma, lam, T):
    g = torch.Generator().manual_seed(seed)
    rewards, values, after = torch.randn((3, T), generator=g, dtype=torch.float64)
    values = torch.cat([values[:1], after[:-1]])
    done = torch.zeros(T, dtype=torch.bool)
    done[-1] = True
    (cut, _), (end, _) = (
        gae(rewards, values, after, terminated, done, gamma, lam)
        for terminated in (torch.zeros_like(done), done))
    for t in range(T):
        assert (end - cut)[t].item() == pytest.approx(
            -(gamma * lam) ** (T - 1 - t) * gamma * after[-1].item(), abs=1e-9)


def test_option_reaches_the_batch():
    config = replace(SMALL, whitening="none", stagger=False)
    ppo = PPO(**vars(config))
    rollouts = [
        ppo.collector.collect(ppo.policy(ppo.rng), 64, ppo.agent.head.for_env)[0] for _ in range(4)]
    for rollout in rollouts:
        cut, end = (make_batch(ppo.agent, ppo.scaling(rollout), replace(config, truncation=t))
                    for t in ("bootstrap", "terminate"))
        assert torch.equal(cut.advantages, end.advantages) == (not rollout.truncated.any())
        assert not rollout.terminated.any()
        assert torch.equal(cut.logp, end.logp)
        assert torch.equal(cut.values, end.values)
    assert [bool(r.truncated.any()) for r in rollouts] == [False, False, False, True]


def test_a_film_is_one_episode(tmp_path):
    told = []
    def choose(obs):
        told.append(obs)
        return np.zeros(1, np.float32)
    path = film("Pendulum-v1", choose, tmp_path / "swing.gif", seed=5, every=50)
    assert len(told) == 200
    assert Image.open(path).n_frames == 4
    assert [p.name for p in tmp_path.iterdir()] == ["swing.gif"]
    env = gym.make("Pendulum-v1")
    np.testing.assert_array_equal(told[0], env.reset(seed=5)[0])


class Unseen(gym.Env):
    "Takes no render_mode."
    observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-2, 2, (1,))
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(3, np.float32), {}
    def step(self, action):
        self.t += 1
        return np.zeros(3, np.float32), 0.0, self.t == 6, False, {}


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


class Grey(Undrawn):
    "Renders from 0 to 1."
    def render(self): return np.zeros((8, 8, 3))


class Drawn(Undrawn):
    "Renders pixels."
    def render(self): return np.full((8, 8, 3), 40 * self.t, np.uint8)


@pytest.mark.parametrize("kind", [Unseen, Deaf, Undrawn, Blank, Grey])
def test_no_film_of_what_cannot_be_rendered(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(gym.registry, "Film-v0",
                        gym.envs.registration.EnvSpec("Film-v0", kind, max_episode_steps=5,
                                                      disable_env_checker=True))
    with pytest.raises(ValueError,
                       match=r"^env must be an environment that can be rendered \(render_mode "
                       r"'rgb_array'\), got 'Film-v0': "):
        PPO(**vars(replace(SMALL, env="Film-v0"))).film(tmp_path / "film.gif")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_rendered_is_closed(tmp_path, monkeypatch):
    spec, closed = gym.envs.registration.EnvSpec("Film-v0", Grey, disable_env_checker=True), []
    monkeypatch.setitem(gym.registry, "Film-v0", spec)
    monkeypatch.setattr(Grey, "close", lambda self: closed.append(self))
    with pytest.raises(ValueError, match="its frames have the dtype float64$"):
        film("Film-v0", None, tmp_path / "film.gif")
    assert len(closed) == 1


def test_a_film_of_any_environment_that_renders_pixels(tmp_path, monkeypatch):
    monkeypatch.setitem(gym.registry, "Film-v0",
                        gym.envs.registration.EnvSpec("Film-v0", Drawn, disable_env_checker=True))
    path = film("Film-v0", lambda obs: np.zeros(1), tmp_path / "film.gif", every=2)
    assert Image.open(path).n_frames == 3


class Cruise(Drawn):
    "Has no end."
    def step(self, action):
        self.t += 1
        return np.zeros(3, np.float32), 0.0, False, False, {}


def test_a_film_ends(tmp_path, monkeypatch):
    monkeypatch.setitem(gym.registry, "Film-v0",
                        gym.envs.registration.EnvSpec("Film-v0", Cruise, disable_env_checker=True))
    assert Image.open(film("Film-v0", lambda obs: np.zeros(1), tmp_path / "film.gif", every=2,
                           longest=8)).n_frames == 4
    monkeypatch.setattr(
        Cruise, "step",
        lambda self, action: (np.zeros(3, np.float32), 0.0, next(left) > 2990, False, {}))
    left = iter(range(3000))
    film("Film-v0", lambda obs: np.zeros(1), tmp_path / "film.gif", every=1000)
    assert next(left) == 2000


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
    for name in ("curves", "values"):
        assert tuple(read(f"pendulum_study_{name}")[0]) == study.FILES[name]


def test_study_can_fix_the_deviation_and_shift_the_reward(study):
    config = replace(SMALL, steps=512)
    fixed, curve = study.trained(replace(config, **study.VARIANTS["fixed std 1"]), fixed_std=True)
    assert [std for _, _, std in curve] == [1.0, 1.0] and fixed.agent.head.log_std.item() == 0
    free, learned = study.trained(config)
    assert learned[-1][2] not in (1.0, learned[0][2])
    shifted, _ = study.trained(config, shift=8.0)
    assert shifted.collector.episode_return[0] < 0  # what is logged is what the environment gave
    assert shifted.agent.value(torch.zeros(1, 3)).item() > free.agent.value(
        torch.zeros(1, 3)).item()


def test_study_checks_values_against_loops(study):
    ppo, _ = study.trained(replace(SMALL, steps=256, gamma=0.5))
    rows = study.value_check(ppo, shift=1.0, num_envs=2, steps=10, more=30)
    assert sum(n for _, n, _, _ in rows) == 20
    longer = study.value_check(ppo, shift=2.0, num_envs=2, steps=10, more=30)
    # 1 / (1 - 0.5)
    for (_, _, v, earned), (_, _, w, more) in zip(rows, longer):
        assert v == w and more - earned == pytest.approx(2.0, abs=1e-4)


def test_old_program_is_reproducible_and_trains(study, monkeypatch):
    whole = trainer.episode_returns
    def few(choose, seed, episodes=4, env=None, longest=None):
        return whole(choose, seed, episodes, env, longest)
    monkeypatch.setattr(trainer, "episode_returns", few)
    a, b, more = (study.old_program(0, steps) for steps in (2000, 2000, 4000))
    assert a == b
    assert [s for s, _, _ in more[2]] == [2000, 4000]
    assert a[:2] != more[:2]
    assert a != study.old_program(0, 2000, bootstrap=True) and a != study.old_program(1, 2000)
    assert all(-2000 < r < 0 for r in (*a[:2], *more[:2]))
