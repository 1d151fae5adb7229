import importlib.util
import math
import time
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlhf_notes.control.config import PendulumConfig, PPOConfig
from rlhf_notes.formulas.surrogate import clipped_surrogate
from rlhf_notes.formulas.value import value_loss
from rlhf_notes.studies import benchmark as compare
from rlhf_notes.studies.benchmark import (
    COLUMNS,
    SINGLE_FILE,
    Contender,
    Ours,
    SingleFile,
    StableBaselines,
    contenders,
    equal,
    race,
    ratios,
    table,
)

needs_sb3 = pytest.mark.skipif(importlib.util.find_spec("stable_baselines3") is None,
                               reason="stable-baselines3 is not installed")
SMALL = dict(num_envs=2, num_steps=16, total=320, minibatches=2, epochs=2)


def single(task, **changes):
    return SingleFile({"cartpole": "CartPole-v1", "pendulum": "Pendulum-v1"}[task], 3,
                      **{**SINGLE_FILE[task], **SMALL, **changes})


# the loop in a single file

@pytest.mark.parametrize("task, size",
                         [("cartpole", 4 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2),
                          ("pendulum", 3 * 64 + 64 + 64 * 64 + 64 + 64 + 1 + 1)])
def test_single_file_has_the_published_networks(task, size):
    loop = single(task)
    critic = sum(p.numel() for p in loop.critic.parameters())
    assert sum(p.numel() for p in loop.parameters) == size + critic
    assert loop.optimizer.defaults["eps"] == 1e-5
    assert loop.batch == 32
    assert [type(m) for m in loop.actor] == [torch.nn.Linear, torch.nn.Tanh] * 2 + [torch.nn.Linear]


@pytest.mark.parametrize("published", SINGLE_FILE.values(), ids=SINGLE_FILE)
def test_single_file_cuts_its_batch_evenly(published):
    assert published["num_envs"] * published["num_steps"] % published["minibatches"] == 0


@pytest.mark.parametrize("task", SINGLE_FILE)
def test_single_file_learns_and_is_reproducible(task):
    def train():
        loop = single(task)
        first = [p.clone() for p in loop.parameters]
        rates = []
        for _ in range(3):
            loop.iterate()
            rates.append(loop.optimizer.param_groups[0]["lr"])
        return loop, first, rates
    (a, first, rates), (b, _, _) = train(), train()
    assert all(torch.equal(p, q) for p, q in zip(a.parameters, b.parameters))
    assert not any(torch.equal(p, q) for p, q in zip(a.parameters, first))
    # ten iterations in all
    assert rates == pytest.approx(
        [SINGLE_FILE[task]["learning_rate"] * left for left in (1, 0.9, 0.8)])


def test_single_file_advantages_are_those_of_a_loop_over_episodes():
    """Independent: the sum of discounted errors up to the end of the episode, written out for each
    step.
    """
    loop, rng = single("cartpole"), np.random.default_rng(0)
    T, N = loop.args.num_steps, 2
    rewards, values, dones = (torch.tensor(rng.normal(size=(T, N)), dtype=torch.float32),
                              torch.tensor(rng.normal(size=(T, N)), dtype=torch.float32),
                              torch.tensor(rng.random((T, N)) < 0.2).float())
    loop.done = torch.tensor([1.0, 0.0])
    last = loop.critic(loop.obs).squeeze(-1).tolist()
    got = loop._advantages(rewards, values, dones)
    for n in range(N):
        # does the episode end with step t?
        ends = [dones[t + 1, n].item() if t + 1 < T else loop.done[n].item() for t in range(T)]
        after = [values[t + 1, n].item() if t + 1 < T else last[n] for t in range(T)]
        for t in range(T):
            total, weight = 0.0, 1.0
            for k in range(t, T):
                total += weight * (rewards[k, n].item() + (0 if ends[k] else 0.99 * after[k])
                                   - values[k, n].item())
                if ends[k]: break
                weight *= 0.99 * 0.95
            assert got[t, n].item() == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("task", SINGLE_FILE)
def test_single_file_learns_from_the_gradient_of_its_formulas(task, monkeypatch):
    """Of one step, on data whose ratios and values are far enough from the old ones for both clips
    to bind.
    """
    loop = single(task, minibatches=1, epochs=1, entropy_coef=0.3)
    (obs, actions, logp_old, values, dones), rewards = loop._collect()
    noise = torch.Generator().manual_seed(0)
    logp_old, values = (x + 0.5 * torch.randn(x.shape, generator=noise) for x in (logp_old, values))
    monkeypatch.setattr(
        loop, "_collect", lambda: ([obs, actions, logp_old, values, dones], rewards))
    A = loop._advantages(rewards, values, dones)
    pi, value, far = loop._distribution(obs), loop.critic(obs).squeeze(-1), (A - A.mean()) / A.std()
    ratio = (pi.log_prob(actions) - logp_old).exp()
    assert ((ratio > 1.2) & (far > 0)).any()
    assert ((ratio < 0.8) & (far < 0)).any()
    assert ((value - values).abs() > 0.2).any()
    loss = -clipped_surrogate(ratio, far, 0.2).mean() + 0.5 * value_loss(
        value, values, A + values, 0.2).mean() - 0.3 * pi.entropy().mean()
    slopes = torch.autograd.grad(loss, loop.parameters)
    norm = sum(g.square().sum() for g in slopes).sqrt()
    loop.iterate()
    assert norm > 0.5
    for p, g in zip(loop.parameters, slopes):
        torch.testing.assert_close(p.grad, g * 0.5 / norm, atol=1e-5, rtol=1e-3)


def test_single_file_normalises_what_the_policy_sees():
    loop = single("pendulum")
    for _ in range(3): loop.iterate()
    assert loop.obs.abs().max() <= 10
    seen = loop.envs.envs[0].get_wrapper_attr("obs_rms")
    env = loop.envs.envs[0]
    raw = np.stack([env.unwrapped._get_obs()])
    before = seen.mean.copy(), seen.count
    greedy = loop.policy()(raw)
    expected = loop.actor(
        torch.tensor(np.clip((raw - seen.mean) / np.sqrt(seen.var + 1e-8), -10, 10),
                     dtype=torch.float32)).detach().numpy().clip(-2, 2)
    assert greedy == pytest.approx(expected, abs=1e-5)
    assert (seen.mean == before[0]).all() and seen.count == before[1], "looking must teach nothing"


def test_single_file_tells_the_environment_bounded_actions():
    loop = single("pendulum")
    with torch.no_grad(): loop.actor[-1].bias.fill_(50.0)
    for rng in (None, np.random.default_rng(0)):
        assert (loop.policy(rng)(np.zeros((5, 3), np.float32)) == 2).all()


# stable-baselines3

@needs_sb3
@pytest.mark.parametrize(
    "config",
    [PPOConfig(), PendulumConfig(),
     PPOConfig(num_envs=4, epochs=3, learning_rate=0.01, lr_anneal=1.0, hidden=32,
               activation="relu", clip_anneal=0.5, entropy_coef=0.1, value_coef=0.8,
               adam_eps=1e-7)], ids=["cartpole", "pendulum", "other"])
def test_equal_means_equal(config):
    theirs, ours = StableBaselines(config.env, 0, **equal(config)), Ours(config)
    m = theirs.model
    assert theirs.batch == config.batch
    assert m.batch_size * config.minibatches == config.batch
    assert (m.n_epochs, m.gamma, m.gae_lambda, m.ent_coef, m.max_grad_norm) == (
        config.epochs, config.gamma, config.lam, config.entropy_coef, config.max_grad_norm)
    for left in (1.0, 0.5, 0.1):
        assert m.lr_schedule(left) == pytest.approx(config.learning_rate * left ** config.lr_anneal)
        assert m.clip_range(left) == pytest.approx(config.clip * left ** config.clip_anneal)
    assert equal(config)["reward_scale"] == config.reward_scale
    assert (getattr(m.policy, "log_std", torch.tensor(config.log_std)) == config.log_std).all()
    shapes = lambda parameters: sorted(tuple(p.shape) for p in parameters)
    assert shapes(m.policy.parameters()) == shapes(ours.ppo.agent.parameters())
    assert m.policy.optimizer.defaults["eps"] == config.adam_eps
    assert type(m.policy.mlp_extractor.policy_net[1]) is type(ours.ppo.agent.policy[1])
    assert m.normalize_advantage
    assert m.clip_range_vf is None
    value, target = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.5])
    assert m.vf_coef * torch.nn.functional.mse_loss(value, target) == pytest.approx(
        config.value_coef * 0.5 * ((value - target) ** 2).mean())


@needs_sb3
def test_reward_scale_reaches_their_training():
    def rewards(scale):
        trainer = StableBaselines("Pendulum-v1", 1, total=100, n_envs=1, reward_scale=scale,
                                  n_steps=16, batch_size=16, n_epochs=1)
        trainer.model.collect_rollouts(
            trainer.model.env, trainer.callback, trainer.model.rollout_buffer, n_rollout_steps=16)
        return trainer.model.rollout_buffer.rewards
    assert rewards(0.1) == pytest.approx(0.1 * rewards(1.0), rel=1e-4)


@needs_sb3
def test_driving_is_learning():
    "An iteration at a time is what their `learn` does."
    from stable_baselines3 import PPO as Theirs
    from stable_baselines3.common.env_util import make_vec_env
    settings = dict(n_steps=32, batch_size=32, n_epochs=2, learning_rate=lambda left: 1e-3 * left)
    driven = StableBaselines("CartPole-v1", 4, total=192, n_envs=2, **settings)
    for _ in range(3): driven.iterate()
    learned = Theirs("MlpPolicy", make_vec_env("CartPole-v1", 2, seed=4), seed=4, device="cpu",
                     **settings).learn(192)
    for p, q in zip(driven.model.policy.parameters(), learned.policy.parameters()):
        assert torch.equal(p, q)


@needs_sb3
def test_sampled_looks_renew_the_noise_of_gsde():
    trainer = StableBaselines("Pendulum-v1", 0, total=128, n_envs=2, n_steps=32, batch_size=32,
                              use_sde=True, sde_sample_freq=4)
    obs = np.tile(np.float32([1, 0, 0.5]), (6, 1))
    choose = trainer.policy(np.random.default_rng(0))
    actions = np.stack([choose(obs) for _ in range(8)])
    assert (actions[0] == actions[3]).all()
    assert (actions[3] != actions[4]).any()
    assert len(np.unique(actions[:, :, 0])) > 6
    assert np.ptp(trainer.policy()(obs)) < 1e-6  # of the greedy policy nothing is random
    trainer.iterate()


# the race

class Scripted:
    "A trainer that is as good as its plan says: greedy and sampled return after each iteration."
    batch = 300

    def __init__(self, plan): self.plan, self.iteration = plan, 0

    def iterate(self):
        self.iteration += 1
        time.sleep(0.002)

    def policy(self, rng=None):
        return self.plan[min(self.iteration, len(self.plan)) - 1][rng is not None]


@pytest.fixture
def scripted(monkeypatch):
    seen = []
    def evaluate(mean, seed, env):
        seen.append(seed)
        time.sleep(0.02)
        return torch.full((100,), float(mean))
    monkeypatch.setattr(compare, "episode_returns", evaluate)
    return seen


def test_the_race_notes_the_first_crossings_and_clocks_training_alone(scripted):
    plan = [(0, 0), (0, 0), (0, 0), (480, 100), (480, 100), (480, 100), (100, 475), (500, 500)]
    row = race(Contender("x", lambda seed: Scripted(plan), 3000, False), "cartpole", 5)
    assert list(row) == list(COLUMNS)
    assert (row["task"], row["seed"], row["contender"]) == ("cartpole", 5, "x")
    # looks after 1200 and 2100 steps, the first ends at or after 1024 and 2048
    assert (row["greedy_steps"], row["sampled_steps"], row["steps"]) == (1200, 2100, 2100)
    assert len(scripted) == 4 and len(set(scripted)) == 4
    assert 0.002 * 4 <= row["greedy_seconds"] < row["sampled_seconds"] == row["seconds"]
    assert row["seconds"] >= 0.002 * 7


def test_evaluation_does_not_run_on_the_clock(scripted, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(compare.time, "perf_counter", lambda: now[0])
    class Ticking(Scripted):
        def __init__(self, plan):
            super().__init__(plan)
            now[0] += 100.0
        def iterate(self):
            self.iteration += 1
            now[0] += 1.0
        def policy(self, rng=None):
            now[0] += 1000.0
            return super().policy(rng)
    row = race(
        Contender("x", lambda seed: Ticking([(0, 0)] * 3 + [(480, 0)] * 3 + [(480, 480)] * 9), 3000,
                  True), "cartpole", 0)
    assert ((row["greedy_seconds"], row["sampled_seconds"], row["seconds"], row["steps"])
            == (4.0, 7.0, 10.0, 3000))


def test_who_does_not_cross_is_censored_at_the_budget(scripted):
    row = race(Contender("x", lambda seed: Scripted([(480, 0)]), 1000, False), "cartpole", 0)
    # 900 < 1024: never looked at
    assert (row["greedy_steps"], row["sampled_steps"], row["sampled_seconds"],
            row["steps"]) == (None, None, None, 900)
    row = race(Contender("x", lambda seed: Scripted([(480, 0)]), 2600, False), "cartpole", 0)
    assert (row["greedy_steps"], row["sampled_steps"], row["steps"]) == (1200, None, 2400)


def test_all_are_evaluated_on_the_same_episodes(scripted):
    for name in "ab":
        race(Contender(name, lambda seed: Scripted([(0, 0)]), 3000, True), "cartpole", 7)
    half = len(scripted) // 2
    assert scripted[:half] == scripted[half:] and len(set(scripted)) == half


def test_start_states_and_actions_come_from_different_streams(monkeypatch):
    "Those of NumPy, for ours, and those of PyTorch, for the others."
    begun, drawn, ours = [], [], SimpleNamespace(
        policy=lambda rng=None: drawn.append((rng, torch.initial_seed())))
    monkeypatch.setattr(
        compare, "episode_returns", lambda choose, seed, env: begun.append(seed) or torch.zeros(1))
    compare._look(ours, "CartPole-v1", 3, 1024)
    (_, sampled), ((greedy, _), (rng, torch_seed)) = begun, drawn
    assert greedy is None and torch_seed not in begun and len(set(begun)) == 2
    assert rng.random() == np.random.default_rng(torch_seed).random() != np.random.default_rng(
        sampled).random()


def test_looking_changes_nothing():
    trainers = [single("cartpole") for _ in range(2)]
    trainers[0].iterate()
    look_state = torch.get_rng_state()
    compare._look(trainers[0], "CartPole-v1", 0, 32)
    assert torch.equal(torch.get_rng_state(), look_state)


def test_each_seed_begins_with_another_contender(monkeypatch):
    made = []
    class Nothing:
        def iterate(self): pass
    monkeypatch.setattr(
        compare, "contenders",
        lambda task: [Contender(n, lambda seed: Nothing(), 1, False) for n in "abc"])
    monkeypatch.setattr(compare, "race", lambda c, task, seed: made.append((seed, c.name)) or {})
    compare.compare("cartpole", 4)
    assert ["".join(n for s, n in made if s == seed) for seed in range(4)] == ["abc", "bca", "cab",
                                                                               "abc"]
    made.clear()
    compare.compare("cartpole", 2, first=4)
    assert ["".join(n for s, n in made if s == seed) for seed in range(6)] == ["", "", "", "",
                                                                               "bca", "cab"]


def test_each_contender_is_made_with_its_seed(monkeypatch):
    made = []
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compare, "Ours", lambda config: made.append(config.seed))
    for name in ("StableBaselines", "SingleFile"):
        monkeypatch.setattr(compare, name, lambda env_id, seed, **settings: made.append(seed))
    for c in contenders("cartpole"): c.make(7)
    assert made == [7] * 4


def test_the_field(monkeypatch):
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    assert [c.name for c in contenders("cartpole")] == ["ours", "single-file"]
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: object())
    for task in compare.CONFIGS:
        field, config = contenders(task), compare.CONFIGS[task]()
        assert [c.name for c in field] == ["ours", "sb3-zoo", "sb3-equal", "single-file"]
        assert [c.budget for c in field] == [
            config.iterations * config.batch, 100_000, config.iterations * config.batch, 200_000]
        assert compare.EVERY[
            task] % config.batch == 0, "we are looked at exactly every so many steps"


# the numbers

def row(contender, seed, sampled, seconds=8.0, steps=4000, greedy=1.0):
    return dict(
        zip(COLUMNS,
            ("cartpole", seed, contender, 1000, greedy, sampled and 2000, sampled, steps, seconds)))


def test_ratios_by_hand():
    rows = [row("ours", s, t) for s, t in enumerate((1.0, 2.0, 1.0))] + [
        row("peer", s, t, 16.0) for s, t in enumerate((3.0, 8.0, 20.0))]
    r = ratios(rows, "peer")
    assert (r["median"], r["low"], r["high"], r["censored"]) == (4.0, 3.0, 20.0, 0)  # 3, 4, 20
    assert ratios(rows, "peer", "speed")["median"] == 2.0
    assert ratios(rows, "peer", "greedy")["median"] == 1.0
    assert ratios(list(reversed(rows)), "peer")["median"] == 4.0, "paired by seed, not by place"
    assert (ratios(rows[1:], "peer") == ratios(rows[1:3] + rows[4:], "peer")
            and ratios(rows[3:], "peer") is None), ("a seed that only one has run is no pair")


def test_the_interval_of_a_ratio_is_that_of_the_median():
    "Of nine seeds one is far away, which the mean's interval would show."
    rows = [row("ours", s, 1.0) for s in range(9)] + [
        row("peer", s, 1000.0 if s == 8 else 2.0 + s / 100) for s in range(9)]
    assert ratios(rows, "peer")["high"] < 3


def test_censored_counts_as_its_budget_and_says_so():
    rows = [row("ours", 0, 1.0), row("ours", 1, 1.0), row("peer", 0, 5.0),
            row("peer", 1, None, seconds=9.0)]
    r = ratios(rows, "peer")
    assert (r["median"], r["censored"]) == (7.0, 1)
    lines = {line[0]: line for line in table(rows)}
    assert lines["peer"][1] == "1 of 2"
    assert lines["peer"][4].startswith("≥ 7.0")
    assert lines["ours"][4] == "1"
    assert lines["peer"][3].startswith(">")
    assert ratios([row("ours", 0, None), row("peer", 0, 5.0)], "peer") is None
    assert {line[0]: line
            for line in table([row("ours", 0, None), row("peer", 0, 5.0)])}["peer"][4] == "-"


def test_the_table_begins_with_ours_whatever_the_order():
    rows = [row("b", 0, 1.0), row("a", 0, 1.0), row("ours", 0, 1.0)]
    assert [line[0] for line in table(rows)] == ["contender", "ours", "b", "a"]
    assert len({len(line) for line in table(rows)}) == 1


def test_a_short_race_of_the_real_ones(monkeypatch):
    monkeypatch.setitem(compare.EVERY, "cartpole", 256)
    c = Contender(
        "ours", lambda seed: Ours(PPOConfig(seed=seed, steps=512, num_envs=4, epochs=1)), 512, True)
    row = race(c, "cartpole", 0)
    assert row["steps"] == 512 and row["seconds"] > 0 and row["sampled_steps"] is None
    row = race(Contender("single-file", lambda seed: single("cartpole"), 256, False), "cartpole", 0)
    assert row["steps"] == 256 and math.isfinite(row["seconds"])
