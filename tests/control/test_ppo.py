import copy
import gc
import importlib.util
import io
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import gymnasium as gym
import matplotlib
import numpy as np
import processes
import pytest
import torch
import tqdm
from gymnasium.envs.registration import EnvSpec
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import stopped
from strategies import SEEDS

from rlhf_notes import cli, fast
from rlhf_notes.control import ppo as inner
from rlhf_notes.control import trainer as control
from rlhf_notes.control.config import RECIPES, PendulumConfig, PPOConfig, continuous
from rlhf_notes.control.envs import make_envs
from rlhf_notes.control.policy import Agent
from rlhf_notes.control.ppo import Batch, batch_loss, health, make_batch, seeds
from rlhf_notes.control.rollout import Collector, Rollout, Scaling
from rlhf_notes.control.trainer import PPO, episode_returns, train
from rlhf_notes.formulas import ppo as losses
from rlhf_notes.formulas.whitening import RunningMoments
from rlhf_notes.training import fit
from rlhf_notes.training.runs import Run

# eight iterations in a moment
SHAPE = dict(seed=3, steps=8 * 128, num_envs=4, num_steps=32, epochs=2)
SMALL, PENDULUM = (PPOConfig(**SHAPE, whitening="minibatch"),
                   PendulumConfig(**SHAPE, whitening="minibatch"))
PUSHES, TORQUE = gym.spaces.Discrete(2), gym.spaces.Box(-2, 2, (1,), np.float32)


def agent(seed=0, config=SMALL):
    size, actions = (4, PUSHES) if config.env == "CartPole-v1" else (3, TORQUE)
    return Agent(gym.spaces.Box(-1, 1, (size,)), actions, config,
                 torch.Generator().manual_seed(seed))


def some_batch(seed=0, size=40):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=g)
    return Batch(
        normal(size, 4), torch.randint(2, (size,), generator=g), math.log(0.5) + 0.3 * normal(size),
        normal(size), 3 * normal(size) + 1, 2 * normal(size))


def collect(a, config=SMALL, steps=32, seed=0, envs=None):
    c = Collector(envs or make_envs(config.env, config.num_envs), seed)
    return c.collect(a.actor(np.random.default_rng(seed)), steps, a.head.for_env)[0]


def scaling_of(state):
    return json.dumps([state["obs"], state["rewards"]], default=lambda t: t.tolist())


def some_rollout(seed, T=40, N=3, size=2, mean=3.0, std=4.0, p_end=0.15):
    """Numbers with episodes of all lengths and, after each, a reset full of junk, that may lie at
    either edge of the data.
    """
    rng = np.random.default_rng(seed)
    f = lambda *shape: torch.from_numpy(rng.normal(mean, std, shape).astype(np.float32))
    terminated, truncated = (torch.from_numpy(rng.random((T, N)) < p_end) for _ in range(2))
    truncated &= ~terminated
    is_step = torch.ones(T, N, dtype=torch.bool)
    for t in range(1, T):
        is_step[t] = ~((terminated | truncated)[t - 1] & is_step[t - 1])
        terminated[t] &= is_step[t]
        truncated[t] &= is_step[t]
    r = Rollout(f(T, N, size), torch.zeros(T, N, dtype=torch.long), f(T, N), f(T, N, size),
                terminated, truncated, is_step)
    r.obs[~is_step] = r.next_obs[~is_step] = 1e6
    r.rewards[~is_step] = -1e6
    return r


def loss_and_grad(a, batch, config, clip=0.2):
    a.zero_grad()
    loss, parts = batch_loss(a, batch, config, clip)
    loss.backward()
    return (loss.item(), {k: v.item() for k, v in parts.items()},
            torch.cat([p.grad.flatten() for p in a.parameters()]))


@settings(max_examples=40)
@given(seed=SEEDS, clip=st.sampled_from([0.1, 0.2, 1.0]),
       entropy_coef=st.sampled_from([0.0, 0.01, 1.0]), value_coef=st.sampled_from([0.0, 0.5, 2.0]),
       value_clip=st.sampled_from([0.0, 0.2, 1.0]),
       whitening=st.sampled_from(["minibatch", "rollout", "none"]))
def test_loss_equals_the_loops(seed, clip, entropy_coef, value_coef, value_clip, whitening):
    a, b = agent(seed % 7), some_batch(seed)
    # the clip is the argument, not the option
    config = replace(SMALL, clip=0.5, entropy_coef=entropy_coef, value_coef=value_coef,
                     value_clip=value_clip, whitening=whitening)
    logits, values = (a.policy(b.obs).detach().double().tolist(),
                      a.critic(b.obs).detach().double()[:, 0].tolist())
    n, advantage = len(values), b.advantages.double()
    mean, std = (advantage.mean().item(),
                 advantage.std(correction=0).item()) if whitening == "minibatch" else (0, 1)
    policy = value = entropy = 0.0
    for i in range(n):
        top = max(logits[i])
        logp = [z - top - math.log(sum(math.exp(y - top) for y in logits[i])) for z in logits[i]]
        ratio, A = (math.exp(logp[b.actions[i]] - b.logp[i].item()),
                    (b.advantages[i].item() - mean) / std)
        policy -= min(ratio * A, min(max(ratio, 1 - clip), 1 + clip) * A) / n
        old, R = b.values[i].item(), b.returns[i].item()
        near = old + min(max(values[i] - old, -value_clip), value_clip) if value_clip else values[i]
        value += 0.5 * max((values[i] - R) ** 2, (near - R) ** 2) / n
        entropy -= sum(math.exp(l) * l for l in logp) / n
    loss, parts, _ = loss_and_grad(a, b, config, clip)
    if entropy_coef: assert parts.pop("entropy") == pytest.approx(entropy, abs=2e-5, rel=1e-4)
    assert parts == pytest.approx(dict(policy_loss=policy, value_loss=value), abs=2e-5, rel=1e-4)
    assert loss == pytest.approx(
        policy + value_coef * value - entropy_coef * entropy, abs=2e-5, rel=1e-4)


FORMULAS = {
    "importance_ratio": lambda logp, *rest: torch.ones_like(logp),
    "clipped_surrogate": lambda ratio, A, *bounds: torch.zeros_like(A), "whiten": lambda x: x,
    "value_loss": lambda v, *rest: v, "masked_mean": lambda x, mask: x.sum(),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_loss_calls_the_formula(monkeypatch, name):
    a, b, config = agent(), some_batch(), replace(SMALL, entropy_coef=0.1)
    _, _, right = loss_and_grad(a, b, config)
    monkeypatch.setattr(inner if name == "whiten" else losses, name, FORMULAS[name])
    _, _, broken = loss_and_grad(a, b, config)
    assert not torch.allclose(right, broken)


def test_the_batch_and_the_metrics_call_theirs(monkeypatch):
    a = agent()
    r = collect(a)
    seen = {}
    monkeypatch.setattr(inner, "gae", lambda *args: seen.setdefault("gae", args)[:2])
    b = make_batch(a, r, replace(SMALL, gamma=0.9, lam=0.8))
    rewards, values, next_values, terminated, done, gamma, lam = seen["gae"]
    assert torch.equal(values, a.value(r.obs))
    assert torch.equal(next_values, a.value(r.next_obs))
    assert (gamma, lam) == (0.9, 0.8)
    assert torch.equal(terminated, r.terminated) and torch.equal(done, r.done | ~r.is_step)
    assert torch.equal(b.advantages, rewards[r.is_step])
    assert torch.equal(b.returns, values[r.is_step])
    for name, column in (("kl_estimate", "kl_k3"), ("clip_fraction", "clip_fraction"),
                         ("explained_variance", "explained_variance")):
        shape = (len(b),) if column == "kl_k3" else ()
        monkeypatch.setattr(inner, name, lambda *args, shape=shape: torch.full(shape, 42.0))
        assert health(a, b, SMALL, 0.2)[column] == 42


@pytest.mark.parametrize("whitening", ["minibatch", "none"])
@pytest.mark.parametrize("clip", [0.05, 0.2])
def test_health_measures_the_move(clip, whitening):
    a, b = agent(), some_batch()
    # as they come from the task, whitened only if the loss does
    b = replace(b, advantages=b.advantages + 3.0)
    with torch.no_grad(): a.policy[-1].weight *= 100  # decided here, undecided there
    logp = a.policy(b.obs).log_softmax(-1).gather(-1, b.actions[:, None])[:, 0].detach()
    ratio, A = ((logp - b.logp).exp(),
                b.advantages - (b.advantages.mean() if whitening == "minibatch" else 0))
    d = b.logp - logp  # samples from the old policy: KL(old || new)
    got, p = (health(a, b, replace(SMALL, whitening=whitening), clip),
              a.policy(b.obs).softmax(-1).detach())
    assert got["entropy"] == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-5)
    assert got["kl_k3"] == pytest.approx(((-d).exp() - 1 + d).mean().item(), rel=1e-3)
    assert got["clip_fraction"] == pytest.approx(
        (((ratio > 1 + clip) & (A > 0)) | ((ratio < 1 - clip) & (A < 0))).float().mean().item())
    assert got["explained_variance"] == pytest.approx(
        1 - ((b.returns - b.values).var() / b.returns.var()).item(), rel=1e-3)


@pytest.mark.parametrize("config", [SMALL, PENDULUM, replace(PENDULUM, squash=True)],
                         ids=lambda c: f"{c.env} {c.squash}")
def test_the_first_ratio_is_one_and_the_first_loss_zero(config):
    """log pi_old is that of the policy that acted, recomputed: on its own data the ratio is 1, and
    whitened advantages have mean 0.
    """
    a = agent(config=config)
    r = collect(a, config, steps=64)
    b = make_batch(a, r, config)
    out = a.policy(b.obs).detach()
    if config is SMALL: expected = torch.distributions.Categorical(logits=out).log_prob(b.actions)
    else:
        base = torch.distributions.Normal(out, a.head.log_std.exp().detach().expand_as(out))
        expected = base.log_prob(b.actions).sum(-1)
        if config.squash:
            expected = expected - torch.distributions.TanhTransform().log_abs_det_jacobian(
                b.actions, b.actions.tanh()).sum(-1)
    torch.testing.assert_close(b.logp, expected, atol=2e-5, rtol=1e-4)
    assert not b.logp.requires_grad
    for rows in (torch.arange(len(b)), torch.arange(len(b)).flip(0)[:len(b) // 4]):
        logp = a.head.logp(a.policy(b[rows].obs), b[rows].actions)
        # exactly 1 where a product of matrices rounds each row alike whatever its size
        assert ((logp - b.logp[rows]).exp() - 1).abs().max() < 2e-6
    _, parts, grad = loss_and_grad(a, b, replace(config, value_coef=0.0))
    assert abs(parts["policy_loss"]) < 1e-5 and grad.norm() > 1e-3
    assert abs(health(a, b, config, 0.2)["kl_k3"]) < 1e-9
    assert health(a, b, config, 0.2)["clip_fraction"] == 0


@settings(max_examples=12)
@given(seed=st.integers(0, 10000), gamma=st.sampled_from([0.9, 1.0]),
       lam=st.sampled_from([0.0, 0.7, 1.0]), truncation=st.sampled_from(["bootstrap", "terminate"]))
def test_advantages_equal_the_sums_over_each_episode(seed, gamma, lam, truncation):
    """From the definition, episode by episode, with terminations, truncations, resets and the end
    of the data.
    """
    a = agent(1)
    r = collect(a, steps=50, seed=seed,
                envs=gym.make_vec("CartPole-v1", num_envs=3,
                                  vectorization_mode="vector_entry_point", max_episode_steps=17))
    assert r.truncated.any() and (~r.is_step).any()
    b = make_batch(a, r, replace(SMALL, gamma=gamma, lam=lam, truncation=truncation))
    V = lambda o: a.value(o).item()
    i = 0
    for t in range(50):
        for n in range(3):
            if not r.is_step[t, n]: continue
            total, weight, k = 0.0, 1.0, t
            while True:
                over = r.terminated[k, n] or truncation == "terminate" and r.truncated[k, n]
                total += weight * (r.rewards[k, n].item() + gamma
                                   * (0.0 if over else V(r.next_obs[k, n])) - V(r.obs[k, n]))
                weight *= gamma * lam
                k += 1
                if k == 50 or r.done[k - 1, n]: break
            assert b.advantages[i].item() == pytest.approx(total, abs=1e-3)
            assert b.returns[i].item() == pytest.approx(total + V(r.obs[t, n]), abs=1e-3)
            assert torch.equal(b.obs[i], r.obs[t, n])
            assert b.actions[i] == r.actions[t, n]
            assert b.values[i].item() == pytest.approx(V(r.obs[t, n]), abs=1e-5)
            i += 1
    assert len(b) == i == r.is_step.sum()
    rows = torch.tensor([3, 77, 3])
    assert b.mask is None is b[rows].mask
    for f in fields(b)[:-1]:
        assert torch.equal(getattr(b[rows], f.name), getattr(b, f.name)[rows])
        assert not getattr(b, f.name).requires_grad


@settings(max_examples=20)
@given(seed=SEEDS)
def test_rows_that_are_no_data_have_no_influence(seed):
    a = Agent(gym.spaces.Box(-1, 1, (2,)), PUSHES, SMALL, torch.Generator().manual_seed(0))
    r = some_rollout(seed)
    reset = ~r.is_step
    other = replace(
        r, obs=torch.where(reset[..., None], -7.0, r.obs),
        next_obs=torch.where(reset[..., None], 3.0, r.next_obs),
        rewards=torch.where(reset, 1e4, r.rewards), actions=torch.where(reset, 1, r.actions))
    for whitening in ("minibatch", "rollout"):
        one, two = (make_batch(a, x, replace(SMALL, whitening=whitening)) for x in (r, other))
        for f in fields(one):
            torch.testing.assert_close(
                getattr(one, f.name), getattr(two, f.name), rtol=1e-5, atol=1e-5)


def test_whitening_choices():
    a = agent()
    r = collect(a, steps=64)
    raw, rollout = (
        make_batch(a, r, replace(SMALL, whitening=w)).advantages for w in ("none", "rollout"))
    assert (~r.is_step).any()
    assert torch.equal(raw, make_batch(a, r, SMALL).advantages)
    assert abs(raw.mean()) > 0.1
    torch.testing.assert_close(
        rollout, (raw - raw.mean()) / raw.std(correction=0), rtol=1e-4, atol=1e-5)
    b = some_batch()
    losses = {w: batch_loss(a, b, replace(SMALL, whitening=w), 0.2)[1]["policy_loss"].item()
              for w in ("none", "rollout", "minibatch")}
    assert losses["none"] == losses["rollout"] != losses["minibatch"]


def loops(rollouts, config):
    "For each rollout, observations and rewards as they should come out, by plain loops in float64."
    seen, earned, running, out = [], [], [0.0] * config.num_envs, []
    for r in rollouts:
        T, N, size = r.obs.shape
        def scaled(o):
            if not config.normalize_obs or not seen: return [float(v) for v in o]
            columns = list(zip(*seen))
            means = [sum(c) / len(c) for c in columns]
            stds = [math.sqrt(sum((v - m) ** 2 for v in c) / len(c) + 1e-8)
                    for c, m in zip(columns, means)]
            return [min(max((float(v) - m) / s, -10.0), 10.0) for v, m, s in zip(o, means, stds)]
        obs, next_obs = ([[scaled(o) for o in row] for row in x] for x in (r.obs, r.next_obs))
        for t in range(T):
            for n in range(N):
                if not r.is_step[t, n]: continue
                seen.append([float(v) for v in r.obs[t, n]])
                running[n] = config.gamma * running[n] + float(
                    r.rewards[t, n]) * config.reward_scale
                earned.append(running[n])
                if r.done[t, n]: running[n] = 0.0
        rewards = [[float(x) * config.reward_scale for x in row] for row in r.rewards]
        if config.normalize_rewards:
            m = sum(earned) / len(earned)
            std = math.sqrt(sum((x - m) ** 2 for x in earned) / len(earned) + 1e-8)
            rewards = [[min(max(x / std, -10.0), 10.0) for x in row] for row in rewards]
        out.append((obs, next_obs, rewards))
    return out


@settings(max_examples=15)
@given(seed=SEEDS, normalize_obs=st.booleans(), normalize_rewards=st.booleans(),
       reward_scale=st.sampled_from([1.0, 0.1, 30.0]), std=st.sampled_from([0.01, 4.0]))
def test_scaling_equals_the_loops(seed, normalize_obs, normalize_rewards, reward_scale, std):
    config = replace(SMALL, num_envs=3, num_steps=12, minibatches=1, normalize_obs=normalize_obs,
                     normalize_rewards=normalize_rewards, reward_scale=reward_scale, gamma=0.9)
    rollouts = [some_rollout(seed + k, T=12, std=std) for k in range(3)]
    scaling = Scaling(config, 2)
    for r, (obs, next_obs, rewards) in zip(rollouts, loops(rollouts, config)):
        before = [x.clone() for x in (r.obs, r.next_obs, r.rewards)]
        got = scaling(r)
        assert all(map(torch.equal, before, (r.obs, r.next_obs, r.rewards)))
        torch.testing.assert_close(got.obs, torch.tensor(obs), rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(got.next_obs, torch.tensor(next_obs), rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(
            got.rewards[r.is_step], torch.tensor(rewards)[r.is_step], rtol=2e-4, atol=2e-4)
        for name in ("actions", "terminated", "truncated", "is_step"):
            assert torch.equal(getattr(got, name), getattr(r, name))
        assert got.obs.dtype == got.rewards.dtype == torch.float32
    if normalize_obs:
        assert got.obs[r.is_step].abs().max() < 10 and (got.obs[~r.is_step] == 10).all()
    if not (normalize_obs or normalize_rewards) and reward_scale == 1:
        assert torch.equal(got.obs, r.obs) and torch.equal(got.rewards, r.rewards)


def test_one_update_of_the_moments_for_each_rollout(monkeypatch):
    "Not one for each step: there a rollout of 2048 steps took 0.2 s, a fifth of an iteration."
    scaling = Scaling(replace(SMALL, num_envs=3, normalize_obs=True, normalize_rewards=True), 2)
    seen, update = [], RunningMoments.update
    monkeypatch.setattr(RunningMoments, "update",
                        lambda self, x, mask: seen.append(x.shape) or update(self, x, mask))
    scaling(some_rollout(0, T=40))
    assert seen == [(40, 3, 2), (40, 3)]


def test_moments_are_kept_until_they_change():
    scaling = Scaling(replace(SMALL, normalize_obs=True), 2)
    obs = np.float32([[3.0, -1.0]])
    scaling.seen.update(torch.rand(9, 2))
    first = scaling.obs(obs)
    assert scaling.moments()[1] is scaling.moments()[1]
    other = RunningMoments((2,)).update(torch.randn(9, 2))  # as many observations as before
    scaling.seen.load_state_dict(other.state_dict())
    expected = other.whiten(torch.from_numpy(obs)).clamp(-10, 10).numpy()
    assert (scaling.obs(obs) == expected).all() and (expected != first).all()
    scaling.seen.update(torch.ones(1, 2))
    assert (scaling.obs(obs) != expected).all()


@pytest.mark.parametrize("reward", [3.0, -3.0])
def test_a_rare_reward_is_cut_at_ten_deviations(reward):
    "One reward among 400 zeros lies sqrt(400) deviations out, nearly."
    r = some_rollout(0, T=40, N=10, p_end=0.0)
    r.rewards.zero_()
    r.rewards[20, 5] = reward
    scaled = Scaling(replace(SMALL, num_envs=10, gamma=0.0, normalize_rewards=True), 2)(r).rewards
    assert scaled[20, 5] == math.copysign(10, reward) and scaled.count_nonzero() == 1


def test_small_numbers_come_to_unit_scale():
    "The guard under the root is small beside the variance of numbers of a thousandth."
    r = some_rollout(0, N=10, size=1, p_end=0.0)
    r.rewards, r.obs = 1e-3 * (r.rewards - 3), 1e-3 * (r.obs - 3)
    config = replace(SMALL, num_envs=10, gamma=0.0, normalize_obs=True, normalize_rewards=True)
    scaling = Scaling(config, 1)
    rewards, obs = scaling(r).rewards, torch.from_numpy(scaling.obs(r.obs.numpy()))
    def std(x): return (x.double().var(correction=0) + 1e-8).sqrt()
    torch.testing.assert_close(rewards, (r.rewards / std(r.rewards)).float())
    torch.testing.assert_close(obs, ((r.obs - r.obs.mean()) / std(r.obs)).float(),
                               rtol=1e-5, atol=1e-5)


def test_the_batch_holds_what_the_policy_saw(monkeypatch):
    p = PPO(**vars(replace(PENDULUM, normalize_obs=True, normalize_rewards=True)))
    saw, batches, actor, make = [], [], p.agent.actor, inner.make_batch
    def recording(rng=None, copy=True):
        act = actor(rng, copy)
        return lambda obs: (saw.append(obs.copy()), act(obs))[1]
    monkeypatch.setattr(p.agent, "actor", recording)
    monkeypatch.setattr(inner, "make_batch", lambda a, r, c: batches.append(r) or make(a, r, c))
    for i in range(3):
        saw.clear()
        p.iterate()
        torch.testing.assert_close(batches[-1].obs, torch.from_numpy(np.stack(saw)), rtol=0, atol=0)
    assert abs(batches[-1].obs.mean()) < 0.6
    assert p.scaling.seen.count == 3 * 128
    assert p.scaling.earned.count == 3 * 128


def test_evaluation_sees_scaled_observations_and_teaches_the_scaling_nothing(monkeypatch):
    p = PPO(**vars(replace(PENDULUM, normalize_obs=True)))
    p.iterate()
    before, weights = scaling_of(p.state_dict()), [q.clone() for q in p.agent.parameters()]
    mean, std = p.scaling.seen.mean.numpy(), p.scaling.seen.var.sqrt().numpy()
    obs = np.array([[0.3, -0.9, 4.0], [1e9, 0.0, 0.0]], np.float32)
    expected = p.agent.actor()(np.clip((obs - mean) / std, -10, 10).astype(np.float32))
    np.testing.assert_allclose(p.policy()(obs), expected, rtol=1e-3, atol=1e-5)
    p.evaluate(seed=1, deterministic=True)
    assert scaling_of(p.state_dict()) == before
    assert all(map(torch.equal, weights, p.agent.parameters()))


def test_evaluation_plays_each_episode_whole_and_once():
    def choose(obs): return (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)
    returns = episode_returns(choose, seed=5, episodes=40)
    envs = make_envs("CartPole-v1", 40)
    envs.reset(seed=5)
    expected = []
    for state in envs.state.T:
        single, total, over = gym.make("CartPole-v1"), 0.0, False
        single.reset()
        single.unwrapped.state = tuple(state)
        while not over:
            _, reward, terminated, truncated, _ = single.step(
                int(choose(np.array(single.unwrapped.state, np.float32)[None])[0]))
            total += reward
            over = terminated or truncated
        expected.append(total)
    assert sorted(returns.tolist()) == sorted(expected) and len(set(expected)) > 3
    assert len(episode_returns(choose, seed=5)) == 100
    assert episode_returns(lambda o: np.zeros(len(o), np.int64), seed=0).max() < 12
    assert (episode_returns(lambda o: np.zeros((len(o), 1)), seed=0, episodes=5, env="Pendulum-v1")
            < -5).all()


def test_nothing_is_evaluated_on_what_it_was_trained_on(monkeypatch):
    trained, seen = [], []
    collector, original = control.Collector, control.episode_returns
    monkeypatch.setattr(
        control, "Collector",
        lambda envs, seed, *stagger: (trained.append(seed), collector(envs, seed, *stagger))[1])
    monkeypatch.setattr(
        control, "episode_returns",
        lambda choose, seed, *rest: (seen.append(seed), original(choose, seed, *rest))[1])
    got = PPO(**vars(SMALL)).scores()
    assert seen == seeds(3)[2:]
    assert set(trained) == set(seeds(3)[:1])
    assert not set(seen) & set(trained)
    assert got["eval_episodes"] == 100
    assert got["solved"] is False
    assert 5 < got["eval_return_mean"] < 475


def test_starts_are_staggered_over_the_time_limit_if_asked_for():
    assert PPO(**vars(PENDULUM)).collector.until_cut.tolist() == [50, 100, 150, 200]
    assert (PPO(**vars(replace(PENDULUM, stagger=False))).collector.until_cut.tolist() == [0] * 4
            == PPO(**vars(SMALL)).collector.until_cut.tolist())
    assert PPO(
        **vars(replace(SMALL, stagger=True,
                       vectorization="sync"))).collector.until_cut.tolist() == [125, 250, 375, 500]
    with pytest.raises(ValueError, match="stagger must be left off .*, got CartPoleVectorEnv"):
        PPO(**vars(replace(SMALL, stagger=True)))


def test_greedy_takes_the_most_probable_action_and_sampled_draws():
    p = PPO(**vars(SMALL))
    logits = p.agent.policy(torch.zeros(1, 4)).detach()
    greedy = p.policy()(np.zeros((5000, 4), np.float32))
    drawn = p.policy(np.random.default_rng(0))(np.zeros((5000, 4), np.float32))
    assert (greedy == logits.argmax().item()).all()
    assert abs(drawn.mean() - logits.softmax(-1)[0, 1].item()) < 0.03
    assert torch.equal(
        p.evaluate(seed=7, deterministic=False), p.evaluate(seed=7, deterministic=False))
    assert not torch.equal(
        p.evaluate(seed=7, deterministic=False), p.evaluate(seed=8, deterministic=False))


def test_what_draws_the_start_states_does_not_draw_the_actions(monkeypatch):
    """Gymnasium begins with the stream of the seed: actions from the same numbers would know where
    their episode began.
    """
    p, handed = PPO(**vars(SMALL)), []
    monkeypatch.setattr(
        p, "policy", lambda rng: handed.append(rng) or (lambda obs: np.zeros(len(obs), np.int64)))
    for seed in range(20): p.evaluate(seed=seed, deterministic=False)
    streams = [rng.random(8) for rng in handed] + [
        np.random.default_rng(seed + i).random(8) for seed in range(20) for i in range(3)]
    assert len(np.unique(np.concatenate(streams[:20]))) == 160
    assert not np.isin(np.concatenate(streams[:20]), np.concatenate(streams[20:])).any()


def test_a_greedy_score_is_that_of_the_most_probable_actions():
    p = PPO(**vars(SMALL))
    assert torch.equal(
        p.evaluate(seed=7, deterministic=True),
        episode_returns(lambda obs: p.agent.policy(torch.from_numpy(obs)).argmax(-1).numpy(), 7))


@pytest.mark.parametrize(
    "greedy, sampled, solved",
    [(475, 475, True), (500, 474.9, False), (474.9, 500, False), (500, 500, True), (20, 20, False)])
def test_solved_needs_both_means(monkeypatch, greedy, sampled, solved):
    monkeypatch.setattr(
        PPO, "evaluate",
        lambda self, deterministic=True, **how: torch.tensor([0.0,
                                                              2.0
                                                              * (greedy if deterministic
                                                                 else sampled)],
                                                             dtype=torch.float64))
    p = PPO(**vars(SMALL))
    got = p.scores()
    assert got["solved"] is solved
    assert got["eval_return_mean"] == pytest.approx(greedy)
    assert got["eval_sampled_return_mean"] == pytest.approx(sampled)
    assert got["eval_episodes"] == 2
    assert got["eval_return_std"] == pytest.approx(greedy * 2 ** 0.5)
    assert got["eval_sampled_return_std"] == pytest.approx(sampled * 2 ** 0.5)
    p.threshold = None
    assert p.scores()["solved"] is None


@pytest.mark.parametrize("episodes, error, words",
                         [(0, ValueError, r"episodes must be in \[1, 1e6\], got 0"),
                          (-3, ValueError, r"episodes must be in \[1, 1e6\], got -3"),
                          (2.5, TypeError, "episodes must be an integer, got 2.5")])
def test_an_evaluation_has_an_episode(episodes, error, words):
    with pytest.raises(error, match=f"^{words}$"):
        episode_returns(lambda obs: np.zeros(len(obs), int), 0, episodes)


def iterate_all(config):
    p = PPO(**vars(config))
    return p, [p.iterate() for _ in range(config.iterations)]


def test_an_iteration_sees_each_row_once_in_each_pass(monkeypatch):
    seen, original = [], inner.batch_loss
    monkeypatch.setattr(
        inner, "batch_loss", lambda a, b, c, clip: (seen.append(b), original(a, b, c, clip))[1])
    batches, make = [], inner.make_batch
    monkeypatch.setattr(
        inner, "make_batch", lambda *args: batches.append(make(*args)) or batches[-1])
    PPO(**vars(SMALL)).iterate()
    assert len(seen) == SMALL.epochs * SMALL.minibatches
    key = lambda b: sorted(
        map(tuple, torch.cat([b.obs, b.logp[:, None], b.returns[:, None]], 1).tolist()))
    join = lambda bs: Batch(*(torch.cat([getattr(b, f.name) for b in bs])
                              for f in fields(Batch)[:-1]))
    n = SMALL.minibatches
    for epoch in range(SMALL.epochs):
        assert key(join(seen[epoch * n:epoch * n + n])) == key(batches[0])
    assert not torch.equal(seen[0].obs, seen[4].obs)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_gradients_are_shortened_and_learning_rate_and_clip_fall(monkeypatch, power):
    norms, rates, clips, measured, original, measure = ([], [], [], [], inner.batch_loss,
                                                        inner.health)
    monkeypatch.setattr(inner, "batch_loss",
                        lambda a, b, c, clip: (clips.append(clip), original(a, b, c, clip))[1])
    monkeypatch.setattr(
        inner, "health", lambda a, b, c, clip: (measured.append(clip), measure(a, b, c, clip))[1])
    p = PPO(**vars(replace(SMALL, max_grad_norm=0.25, learning_rate=2e-3, lr_anneal=power,
                           clip_anneal=2 - power, clip=0.3)))
    step = p.optimizer.step
    def spy(rate):
        norms.append(torch.cat([q.grad.flatten() for q in p.agent.parameters()]).norm().item())
        rates.append(rate)
        return step(rate)
    monkeypatch.setattr(p.optimizer, "step", spy)
    rows = [p.iterate() for _ in range(8)]
    assert max(norms) <= 0.2501 and rows[0]["grad_norm"] > 0.25
    left, n = [1 - i / 8 for i in range(8)], SMALL.epochs * SMALL.minibatches
    assert [r["learning_rate"] for r in rows] == pytest.approx([2e-3 * x ** power for x in left])
    assert rates[::n] == pytest.approx([r["learning_rate"] for r in rows])
    assert clips[::n] == pytest.approx([0.3 * x ** (2 - power) for x in left])
    assert clips[n - 1::n] == clips[::n]
    assert measured == clips[::n]
    assert p.optimizer.eps == 1e-5
    assert PPO(**vars(replace(SMALL, adam_eps=1e-3))).optimizer.eps == 1e-3


@pytest.mark.parametrize("target_kl, passes", [(0.0, 6), (1e-12, 1), (1e3, 6)])
def test_target_kl_stops_the_passes(monkeypatch, target_kl, passes):
    count, original = [], inner.batch_loss
    monkeypatch.setattr(inner, "batch_loss", lambda *args: (count.append(0), original(*args))[1])
    p = PPO(**vars(replace(SMALL, epochs=6, target_kl=target_kl)))
    p.iterate()
    assert len(count) == passes * SMALL.minibatches


def test_a_target_kl_in_between_stops_after_the_pass_that_went_too_far(monkeypatch):
    """With a limit of half of what six passes move, the run stops on the way, past the limit by one
    pass and not more.
    """
    far = PPO(**vars(replace(SMALL, epochs=6))).iterate()["kl_k3"]
    moved, original = [], inner.health
    monkeypatch.setattr(
        inner, "health", lambda *args: (moved.append(original(*args)), moved[-1])[1])
    p = PPO(**vars(replace(SMALL, epochs=6, target_kl=far / 2)))
    p.iterate()
    kl = [m["kl_k3"] for m in moved]
    assert 2 <= len(kl) < 7 and kl[-2] == kl[-1] > far / 2 and all(k <= far / 2 for k in kl[:-2])


def test_value_clip_is_used_in_training():
    one, two = (PPO(**vars(replace(SMALL, value_clip=v))) for v in (0.0, 0.01))
    one.iterate()
    two.iterate()
    assert not torch.equal(one.agent.critic[0].weight, two.agent.critic[0].weight)


def test_more_minibatches_than_rows():
    p = PPO(
        **vars(PPOConfig(seed=0, steps=4 * 30, num_envs=1, num_steps=4, minibatches=4, epochs=1)))
    rows = [p.iterate() for _ in range(30)]
    assert rows[-1]["episodes"] > 2 and all(math.isfinite(r["policy_loss"]) for r in rows)


def test_the_rows_count_what_happened():
    p = PPO(**vars(SMALL))
    episodes = []
    collect = p.collector.collect
    def spy(*args):
        r, e = collect(*args)
        episodes.extend(e)
        steps.append(r.is_step.sum().item())
        return r, e
    p.collector.collect, steps = spy, []
    for i in range(8):
        row = p.iterate()
        assert (
            row["iteration"], row["steps"], row["episodes"]) == (i + 1, sum(steps), len(episodes))
        if episodes:
            assert row["return_mean"] == pytest.approx(np.mean([r for r, _ in episodes[-20:]]))
            assert row["length_mean"] == pytest.approx(np.mean([l for _, l in episodes[-20:]]))
        else: assert row["return_mean"] is None
    assert len(episodes) > 20 and 900 < sum(steps) < 8 * 128               # a reset is no step


HARD = replace(PENDULUM, normalize_obs=True, normalize_rewards=True)
both = pytest.mark.parametrize("config", [SMALL, HARD], ids=["cartpole", "pendulum-normalised"])


@both
def test_a_state_is_a_copy_of_the_scaling(config):
    """What was saved does not move with the run that goes on, and holds what plain torch.load can
    read.
    """
    p = PPO(**vars(config))
    p.iterate()
    state = p.state_dict()
    kept = scaling_of(state)
    p.iterate()
    assert scaling_of(state) == kept and (scaling_of(p.state_dict()) != kept) == (config is HARD)


def test_training_leaves_the_global_generators_alone():
    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(3), np.random.rand(3)
    torch.manual_seed(0)
    np.random.seed(0)
    PPO(**vars(SMALL)).iterate()
    assert torch.equal(torch.rand(3), expected[0]) and (np.random.rand(3) == expected[1]).all()


def test_a_gpu_is_asked_for_where_it_is_not():
    if torch.cuda.is_available(): pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="device must be .* got 'cuda'"):
        PPO(**vars(replace(SMALL, device="cuda")))


class Broken(gym.Env):
    "Rewards or observations that are no numbers, from the 100th step."
    observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (2,)), gym.spaces.Discrete(2)
    def __init__(self, what): self.what, self.t = what, 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.t += 1
        nan = math.nan if self.t > 100 else 0.5
        return (np.full(2, nan if self.what == "obs" else 0, np.float32),
                nan if self.what == "reward" else 0.5, self.t % 10 == 0, False, {})


@pytest.mark.parametrize(
    "what, words",
    [("reward", "iteration 4: the environment gave no finite number as reward"),
     ("obs", "iteration 4: the environment gave no finite number as observation"),
     ("rate", "iteration 1: policy_loss is nan")])
def test_a_training_that_comes_to_nan_ends_there(tmp_path, monkeypatch, what, words):
    monkeypatch.setattr(fit, "CHECKPOINT_EVERY", -1.0)
    monkeypatch.setitem(
        gym.registry, "Broken-v0",
        gym.envs.registration.EnvSpec("Broken-v0", Broken, max_episode_steps=500,
                                      kwargs={"what": what}, disable_env_checker=True))
    run, config = (Run.create(tmp_path / "run", {"task": "some"}),
                   replace(SMALL, env="Broken-v0") if what != "rate"
                   else replace(SMALL, learning_rate=1e30))
    with pytest.raises(
        FloatingPointError, match=words + ".*the last checkpoint, if there is one, is from before"):
        train(config, run)
    assert not (run.path / "summary.json").exists()
    if what != "rate":
        assert Run.resume(run.path).checkpoint["ppo"]["spent"] == 3 * 128
        assert len((run.path / "metrics.csv").read_text().splitlines()) == 4


def test_numbers_of_a_reset_may_be_anything():
    "They are no data."
    reset = torch.tensor([[False, True], [True, False]])
    r = Rollout(torch.where(reset[..., None], math.nan, torch.rand(2, 2, 1)), torch.zeros(2, 2),
                torch.where(reset, math.inf, 1.0), torch.zeros(2, 2, 1),
                *torch.zeros(2, 2, 2, dtype=torch.bool), ~reset)
    scaling = Scaling(replace(SMALL, num_envs=2, normalize_obs=True, normalize_rewards=True), 1)
    scaling(r)
    assert scaling.seen.count == scaling.earned.count == 2


class Endless(gym.Env):
    "No episode ends."
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action): return np.zeros(2, np.float32), 1.0, False, False, {}


def test_an_evaluation_without_a_time_limit_ends(tmp_path, monkeypatch):
    monkeypatch.setitem(
        gym.registry, "Endless-v0", gym.envs.registration.EnvSpec("Endless-v0", Endless))
    with pytest.warns(
        UserWarning, match="^an episode has no end after 50 steps, and counts as ended$"):
        got = episode_returns(lambda obs: np.zeros(len(obs), int), 0, 3, "Endless-v0", longest=50)
    assert got.tolist() == [50.0] * 3


@pytest.mark.parametrize("registered, limit", [
    (None, 20), (50, 20), (50, 80), (500, 80), (500, 1000), (None, 10_001)])
def test_an_episode_ends_where_its_environment_ends_it(monkeypatch, registered, limit):
    "Each step earns 1, so a return is a length."
    spec = gym.envs.registration.EnvSpec("Endless-v0", Endless, max_episode_steps=registered)
    monkeypatch.setitem(gym.registry, "Endless-v0", spec)
    p = PPO("Endless-v0", num_envs=2, num_steps=32, steps=64, minibatches=4, eval_episodes=3,
            env_kwargs=dict(max_episode_steps=limit))
    assert p.evaluate(2).tolist() == [limit] * 2
    scores = p.scores()
    assert scores["eval_return_mean"] == scores["eval_sampled_return_mean"] == limit


def test_the_summary_says_what_was_promised(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "threshold", lambda env_id: 22.0)
    run = Run.create(tmp_path / "run", {"task": "cartpole"})
    _, rows, s = train(replace(SMALL, recent_episodes=10), run)
    assert {"task", "env", "algo", "seed", "device", "steps", "wall_seconds", "eval_return_mean",
            "eval_return_std", "eval_episodes", "solved", "steps_to_solve", "seconds_to_solve",
            "interrupted",
            "eval_sampled_return_mean", "eval_sampled_return_std"} == set(s)
    assert json.loads((run.path / "summary.json").read_text()) == s
    assert ((s["task"], s["env"], s["algo"], s["seed"], s["device"], s["steps"], s["eval_episodes"])
            == ("cartpole", "CartPole-v1", "ppo", 3, "cpu", rows[-1]["steps"], 100))
    first = next((r["steps"] for r in rows if r["episodes"] >= 10 and r["return_mean"] >= 22), None)
    assert s["steps_to_solve"] == first
    assert first is not None
    assert 0 < s["seconds_to_solve"] <= s["wall_seconds"]
    assert s["solved"] == (min(s["eval_return_mean"], s["eval_sampled_return_mean"]) >= 22)
    assert isinstance(s["solved"], bool)
    monkeypatch.setattr(control, "threshold", lambda env_id: 475.0)
    _, _, s = train(SMALL)
    assert s["steps_to_solve"] is None
    assert s["seconds_to_solve"] is None
    assert s["solved"] is False
    assert s["task"] == "CartPole-v1"
    monkeypatch.setattr(control, "threshold", lambda env_id: None)
    _, _, s = train(replace(SMALL, steps=128))
    assert s["solved"] is None and s["steps_to_solve"] is None


class Robot(gym.Env):
    "There is one, which counts its steps; what it shows depends on what it has shown."
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    there, steps, shown = 0, 0, 0
    def __init__(self):
        if Robot.there: raise RuntimeError("port in use")
        Robot.there = 1
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action):
        Robot.steps += 1
        self.shown += 1
        return np.zeros(2, np.float32), float(self.shown > 200), False, False, {}
    def close(self): Robot.there = 0


def test_it_is_evaluated_where_it_has_trained_as_often_as_one_says(tmp_path, monkeypatch):
    """There may be one such environment only, its wrappers may have running moments, and no episode
    is played for nothing.
    """
    monkeypatch.setitem(gym.registry, "Robot-v0",
                        gym.envs.registration.EnvSpec("Robot-v0", Robot, max_episode_steps=20))
    monkeypatch.setattr(Robot, "there", 0)
    monkeypatch.setattr(Robot, "steps", 0)
    config = PPOConfig(env="Robot-v0", num_envs=1, num_steps=256, steps=256, eval_episodes=3)
    PPO.begin(config).envs.close()
    before, run = Robot.steps, Run.create(tmp_path / "run", {"task": "train"})
    ppo, _, summary = train(config, run)
    assert summary["eval_return_mean"] == summary["eval_sampled_return_mean"] == 20
    assert summary["eval_episodes"] == 3
    assert Robot.steps - before < 1 + 256 + 2 * 3 * 20
    assert json.loads((run.path / "summary.json").read_text()) == summary


def test_ended_episodes_do_not_play_on():
    "Each environment plays its share: the first to end would be the short ones."
    envs = make_envs("CartPole-v1", 3)
    lean = lambda obs: (obs[:, 2] > 0).astype(int)
    returns = episode_returns(lean, 5, 7, envs)
    assert len(returns) == 7 and torch.equal(returns, episode_returns(lean, 5, 7, envs))
    envs = make_envs("Pendulum-v1", 3, "sync")
    torque = lambda obs: np.zeros((len(obs), 1))
    one_each = [episode_returns(torque, 5 + i, 2 + (i == 2), single)
                for i, single in enumerate(make_envs("Pendulum-v1", 1) for _ in range(3))]
    assert (sorted(episode_returns(torque, 5, 7, envs).tolist())
            == pytest.approx(sorted(torch.cat(one_each).tolist())))


@pytest.mark.parametrize("call, words", [
    (lambda: PPO(lr=1e-3), "^lr must be an option of PPOConfig: did you mean learning_rate\\?$"),
    (lambda: PPO("MlpPolicy", "CartPole-v1"), "MlpPolicy is left out here: env comes first"),
    (lambda: PPO("CnnPolicy", gym.make("CartPole-v1")), "CnnPolicy is left out here"),
    (lambda: PPO(policy="MlpPolicy", env="CartPole-v1"), "^policy must be .* mean network "),
    (lambda: PPO(steps=2048).learn(total_timesteps=1000), "total_timesteps is steps here$"),
    (lambda: PPO(steps=2048).learn(1000, verbose=1), "^PPO.learn: got an unexpected .*'verbose'$")])
def test_a_call_in_the_manner_of_another_library_is_told_our_names(call, words):
    with pytest.raises((TypeError, ValueError), match=words): call()


def test_a_finished_run_can_be_loaded(tmp_path):
    run = Run.create(tmp_path / "run", {"task": "pendulum"})
    ppo, _, _ = train(replace(PENDULUM, eval_episodes=2), run)
    again, obs = (PPO.load(run.path / "ppo.pt", steps=2 * PENDULUM.steps),
                  np.ones((2, 3), np.float32))
    assert np.array_equal(again.predict(obs), ppo.predict(obs))
    assert len(again.learn().rows) == PENDULUM.iterations


@pytest.mark.parametrize(
    "break_it",
    [lambda m: m.setattr(control.plots, "plot_run", lambda *args: 1 / 0),
     lambda m: m.setitem(matplotlib.rcParams, "text.usetex", True)], ids=["broken", "usetex"])
def test_a_picture_that_fails_costs_no_summary(tmp_path, monkeypatch, break_it):
    break_it(monkeypatch)
    run = Run.create(tmp_path / "run", {"task": "cartpole"})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, _, summary = train(replace(SMALL, eval_episodes=2), run)
    assert json.loads((run.path / "summary.json").read_text()) == summary
    assert (run.path / "curve.svg").exists() or any("curve.svg" in str(w.message) for w in said)


def test_a_disk_that_is_full_at_the_end_costs_no_summary(tmp_path, monkeypatch):
    def full(self, path): raise OSError(28, "No space left on device", str(path))
    monkeypatch.setattr(PPO, "save", full)
    run = Run.create(tmp_path / "run", {"task": "cartpole"})
    with pytest.raises(OSError, match="No space left"): train(replace(SMALL, eval_episodes=2), run)
    assert (run.path / "summary.json").exists() and (run.path / "checkpoint.pt").exists()


def test_too_few_episodes_solve_nothing(monkeypatch):
    """With a threshold that the first episode passes, `steps_to_solve` still waits until
    `recent_episodes` have ended.
    """
    monkeypatch.setattr(control, "threshold", lambda env_id: 1.0)
    _, rows, s = train(SMALL)
    waited = [r["steps"] for r in rows if r["episodes"] >= SMALL.recent_episodes]
    assert rows[0]["episodes"] < SMALL.recent_episodes
    assert s["steps_to_solve"] == waited[0] > rows[0]["steps"]


def test_nothing_is_learned_without_the_surrogate(monkeypatch):
    "The same budget, with the formula and with zero in its place."
    config = PPOConfig(seed=0, steps=10240)
    learned, _ = iterate_all(config)
    with monkeypatch.context() as m:
        m.setattr(losses, "clipped_surrogate", lambda ratio, A, *bounds: ratio * 0)
        idle, _ = iterate_all(replace(config, steps=2560))
    assert torch.equal(idle.agent.policy[0].weight, PPO(**vars(config)).agent.policy[0].weight)
    assert learned.evaluate(seed=1, deterministic=True).mean() > 100
    assert idle.evaluate(seed=1, deterministic=False).mean() < 40


def test_any_environment_with_a_box(monkeypatch):
    """Discrete actions that do not begin at 0 and a continuous task with a threshold of Gymnasium:
    two iterations and an evaluation each.
    """
    for env in ("Acrobot-v1", "MountainCarContinuous-v0"):
        _, rows, s = train(replace(SMALL, env=env, steps=256, eval_episodes=2))
        assert len(rows) == 2
        assert s["solved"] is False
        assert all(math.isfinite(v) for r in rows for k, v in r.items() if v is not None
                   and k != "explained_variance")


def test_training_does_not_import_the_compiler():
    "It takes as long to import as CartPole to be solved."
    code = ("import sys; from rlhf_notes.control.trainer import PPO, PPOConfig; p = "
            "PPO(**vars(PPOConfig(num_envs=2))); p.iterate(); p.state_dict(); "
            "print('torch._dynamo' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          check=True).stdout == "False\n"


def test_seeds_are_apart():
    assert seeds(3) == seeds(3) == seeds(3, 0)
    assert len(set(seeds(0) + seeds(1) + seeds(2) + seeds(0, 1) + seeds(0, 2))) == 20


# resumed, saved, loaded

@both
def test_same_seed_same_run_and_a_saved_one_goes_on_with_new_episodes(tmp_path, config):
    (_, a), (_, b), (_, other) = (iterate_all(c) for c in (config, config, replace(config, seed=4)))
    assert a == b != other
    p = PPO(**vars(config))
    rows = [p.iterate() for _ in range(3)]
    p.save(tmp_path / "ppo.pt")
    one, two = (PPO.load(tmp_path / "ppo.pt") for _ in range(2))
    assert vars(one.config) == vars(config)
    assert rows == a[:3]
    assert one.iteration == 3
    assert one.episodes == p.episodes
    assert one.recent == p.recent
    assert torch.equal(one.optimizer.vector, p.optimizer.vector)
    assert torch.equal(one.optimizer.v, p.optimizer.v)
    fresh = PPO(**vars(config))
    assert not np.array_equal(one.collector.obs, p.collector.obs)
    assert not np.array_equal(one.collector.obs, fresh.collector.obs)
    assert (one.collector.until_cut == fresh.collector.until_cut).all()
    assert not one.scaling.running.any()
    assert one.learn().rows == two.learn().rows and len(one.rows) == 5 and one.iteration == 8
    assert rows[-1]["steps"] < one.rows[0]["steps"] <= rows[-1]["steps"] + 128
    assert [r["learning_rate"] for r in one.rows] == [r["learning_rate"] for r in a[3:]]


def test_new_episodes_have_earned_nothing_so_far():
    p = PPO(**vars(HARD))
    p.iterate()
    assert p.scaling.running.any()
    p.load_state_dict(p.state_dict())
    assert not p.scaling.running.any()


def interrupt_after(monkeypatch, iteration, error=None):
    iterate = PPO.iterate
    def interrupted(self):
        row = iterate(self)
        if self.iteration == iteration:
            if error: raise error
            signal.raise_signal(signal.SIGINT)
        return row
    monkeypatch.setattr(PPO, "iterate", interrupted)


@pytest.mark.skipif(os.name != "posix", reason="signals are sent to a process")
def test_a_signal_that_ends_the_program_leaves_a_run_that_goes_on(tmp_path):
    "The class writes all that the command would, then ends as who sent the signal expects."
    code = ("import signal; from rlhf_notes import PPO; "
            "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # nohup leaves it ignored
            "PPO('CartPole-v1', steps=60 * 128, num_envs=4, num_steps=32, epochs=1, seed=2, "
            "eval_episodes=2, out='cut').learn(); print('went on')")
    p = processes.start(code, cwd=tmp_path)
    metrics = tmp_path / "cut" / "metrics.csv"
    out, err = stopped(p, metrics, "SIGHUP")
    assert (p.returncode, out) == (-signal.SIGHUP, ""), err
    assert re.fullmatch(r"stopping after \d+ of 60 iterations; .*\n", err)
    summary, before = json.loads((tmp_path / "cut/summary.json").read_text()), metrics.read_text()
    assert summary["interrupted"] and 0 < before.count("\n") - 1 < 60
    assert cli.main(["train", "--resume", str(tmp_path / "cut")]) == 0
    assert metrics.read_text().startswith(before) and metrics.read_text().count("\n") == 61
    assert not json.loads((tmp_path / "cut/summary.json").read_text())["interrupted"]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("slow", [False, True])
def test_an_evaluation_that_takes_long_shows_a_bar(monkeypatch, slow, terminal):
    "After five seconds from its start (here 0.2), until all episodes have ended; else nothing."
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(tqdm, "tqdm", partial(tqdm.tqdm, disable=False))  # conftest turns it off
    if slow:
        for module in control, fit: monkeypatch.setattr(module, "FIRST_LINE", 0.2)
    seen = []
    def left(obs):
        time.sleep(0.01 * slow)
        seen.append((time.time(), stream.getvalue()))
        return np.ones(len(obs), int)
    assert len(episode_returns(left, 0, 30, make_envs("CartPole-v1", 3))) == 30
    first = [t - seen[0][0] for t, text in seen if "evaluation:" in text][:1]
    assert all(t >= 0.2 for t in first) and bool(first) == slow
    assert not slow or "evaluation: 100%" in stream.getvalue()
    assert control.FIRST_LINE == fit.FIRST_LINE == (0.2 if slow else 5)


def test_an_interrupted_run_leaves_a_whole_directory_and_goes_on(tmp_path, monkeypatch):
    run = Run.create(tmp_path / "run", {"task": "some"})
    with monkeypatch.context() as m:
        interrupt_after(m, 5)
        _, _, summary = train(SMALL, run)
    assert summary["interrupted"]
    assert summary["solved"] is False
    assert summary["eval_return_mean"] is None
    assert 4 * 128 < summary["steps"] < 5 * 128
    assert json.loads((run.path / "summary.json").read_text()) == summary
    assert {"checkpoint.pt", "curve.svg", "config.json", "metrics.csv"} <= {
        p.name for p in run.path.iterdir()}
    before = (run.path / "metrics.csv").read_bytes()
    PPO.begin(SMALL, Run.resume(run.path)).envs.close()
    ppo, rows, summary = train(SMALL, Run.resume(run.path))
    after = (run.path / "metrics.csv").read_bytes()
    assert after.startswith(before)
    assert len(after.splitlines()) == 9 == len(rows) + 1
    assert summary["steps"] == rows[-1]["steps"]
    assert not summary["interrupted"]
    assert [r["iteration"] for r in rows] == list(range(1, 9))
    assert summary["wall_seconds"] >= ppo.clock["wall_seconds"] > 0


def test_killed_between_two_checkpoints_it_continues_from_the_last(tmp_path, monkeypatch):
    run = Run.create(tmp_path / "killed", {"task": "cartpole"})
    with monkeypatch.context() as m:
        m.setattr(fit, "CHECKPOINT_EVERY", -1.0)
        interrupt_after(m, 4, MemoryError)
        with pytest.raises(MemoryError): train(SMALL, run)
    assert Run.resume(run.path).checkpoint["ppo"]["spent"] == 3 * 128
    _, rows, _ = train(SMALL, Run.resume(run.path))
    assert len(rows) == 8 and len((run.path / "metrics.csv").read_text().splitlines()) == 9


def test_ctrl_c_in_the_evaluation_is_an_interruption(tmp_path, monkeypatch):
    def interrupted(self): raise KeyboardInterrupt
    monkeypatch.setattr(PPO, "scores", interrupted)
    run = Run.create(tmp_path / "run", {"task": "some"})
    _, rows, summary = train(SMALL, run)
    assert len(rows) == 8
    assert summary["interrupted"]
    assert summary["eval_return_mean"] is None
    assert (run.path / "summary.json").exists()


def test_environments_in_processes_train_and_resume(tmp_path):
    config = replace(PENDULUM, vectorization="async", steps=2 * 128, num_envs=2, num_steps=64)
    ppo = PPO(**vars(config))
    ppo.iterate()
    ppo.save(tmp_path / "ppo.pt")
    ppo.envs.close()
    again = PPO.load(tmp_path / "ppo.pt").learn()
    assert len(again.rows) == 1 and again.rows[0]["iteration"] == 2
    again.envs.close()


# the interface

def test_learn_predict_evaluate():
    p = PPO(seed=0, steps=20 * 1024)
    assert p.learn() is p
    assert len(p.rows) == 20
    assert p.evaluate(episodes=10).mean() > 100
    assert len(p.evaluate(7, deterministic=False, seed=5)) == 7
    obs = np.array([[0, 0, 0.1, 0.1], [0, 0, -0.1, -0.1]])
    assert p.predict(obs).tolist() == [1, 0]
    assert p.predict(obs[0]) == 1
    assert np.shape(p.predict(obs[0])) == ()
    assert set(np.stack([p.predict(np.zeros((50, 4)), deterministic=False)
                         for _ in range(5)]).flatten().tolist()) == {0, 1}
    for wrong in (np.zeros(3), np.zeros((2, 3)), np.zeros((2, 2, 4)), 0.0):
        with pytest.raises(
            ValueError, match=r"obs must have shape \(4,\), or be a batch of that, got"):
            p.predict(wrong)


def test_pendulum_has_its_own_defaults_and_scaled_actions():
    p = PPO("Pendulum-v1", **SHAPE)
    assert vars(p.config) == vars(PendulumConfig(**SHAPE))
    assert PPO("CartPole-v1", **SHAPE).config == PPOConfig(**SHAPE)
    assert PPO(**vars(PPOConfig(env="Pendulum-v1", **SHAPE))).config.gamma == PPOConfig().gamma
    actions = p.predict(np.random.default_rng(0).normal(size=(1000, 3)), deterministic=False)
    assert actions.shape == (1000, 1) and actions.min() == -2 and actions.max() == 2


def test_an_environment_of_ones_own(tmp_path):
    "It learns, is evaluated, saved, and loaded with the environment beside it."
    env = gym.make("Pendulum-v1", g=5.0)
    p = PPO(env, **SHAPE, stagger=True).learn()
    assert len(p.rows) == 8 and p.config.env == "PendulumEnv"
    assert len(p.evaluate(6)) == 6
    assert torch.equal(p.evaluate(6, seed=1), p.evaluate(6, seed=1))
    assert p.evaluate(6, deterministic=False).std() > 0
    assert p.scores()["solved"] is None  # another gravity, another task
    p.save(tmp_path / "own.pt")
    assert np.array_equal(
        PPO.load(tmp_path / "own.pt", env=env).predict(np.ones(3)), p.predict(np.ones(3)))
    assert p.film(tmp_path / "own.gif").exists()


class Alone(Robot):
    def __init__(self): self.shown = 0
    def __deepcopy__(self, memo): raise TypeError("a licence for one")
    def close(self): raise AssertionError("not ours to close")


def test_an_environment_is_evaluated_itself_and_then_begins_new_episodes():
    p = PPO(gym.wrappers.TimeLimit(Alone(), 20), num_envs=1, num_steps=256, steps=512)
    p.iterate()
    assert p.evaluate(3).tolist() == [20, 20, 20] and p.iterate()["iteration"] == 2
    # of whole episodes, each with a reset step
    assert p.collector.episode_length.tolist() == [256 - 12 * 21]
    with pytest.raises(ValueError, match="it cannot be copied, so num_envs must be 1"): PPO(Alone())


@pytest.mark.parametrize("env, options, words", [
    ("CartPool-v1", {}, "env must be an environment that Gymnasium can make"),
    ("Blackjack-v1", {}, "env must have observations of Box"),
    ("CartPole-v1", dict(num_envs=0), "num_envs must be"),
    ("CartPole-v1", dict(device="cuda:99"), "device must be .* got 'cuda:99'"),
])
def test_what_cannot_be_trained_is_named(env, options, words):
    with pytest.raises(ValueError, match=words): PPO(env, **options)


@both
def test_plain_and_fast_give_the_same_first_iteration(config):
    a = PPO(**vars(config))
    with fast.off(): b = PPO(**vars(config))
    quick = a.iterate()
    with fast.off(): plain = b.iterate()
    numbers = lambda row: {k: v for k, v in row.items() if v is not None}
    assert numbers(quick) == pytest.approx(numbers(plain), rel=1e-4, abs=1e-5)
    for p, q in zip(a.agent.parameters(), b.agent.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_film(tmp_path):
    from PIL import Image
    for env in ("CartPole-v1", "Pendulum-v1"):
        path = PPO(env, **SHAPE).film(tmp_path / f"{env}.gif")
        assert Image.open(path).n_frames > 1
    with pytest.raises(ValueError, match=r"path must end in \.gif or \.mp4, got .*film\.avi"):
        PPO(**SHAPE).film(tmp_path / "film.avi")


@pytest.mark.parametrize("module", ["imageio.v3", "imageio_ffmpeg"])
def test_a_film_in_mp4_asks_for_its_extra(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError,
                       match=r"path must end in \.gif \(pip install rlhf_notes\[video\] brings "
                       r"\.mp4\), got .*film\.mp4"):
        PPO(**SHAPE).film(tmp_path / "film.mp4")


def test_a_film_in_mp4(tmp_path):
    imageio = pytest.importorskip("imageio.v3")
    pytest.importorskip("imageio_ffmpeg")
    path = PPO(**SHAPE).film(tmp_path / "film.mp4")
    frames = imageio.imread(path)
    assert len(frames) > 1 and frames.shape[1:] == (216, 216, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_callers_default_dtype_and_device_change_nothing(dtype, tmp_path):
    def trained():
        ppo, by_hand = (PPO("CartPole-v1", steps=128, num_envs=2, num_steps=32, minibatches=2,
                            epochs=1, normalize_obs=True, normalize_rewards=True) for _ in range(2))
        ppo.learn().save(tmp_path / "ppo.pt")
        again = PPO.load(tmp_path / "ppo.pt")
        return (by_hand.iterate()["policy_loss"], ppo.rows[-1], ppo.evaluate(3).tolist(),
                ppo.predict(np.zeros(4, np.float32)), again.evaluate(3).tolist(),
                again.scaling.seen.mean.tolist())
    expected = trained()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"): assert trained() == expected
    finally: torch.set_default_dtype(torch.float32)


def test_a_small_policy_learns_on_one_thread(monkeypatch):
    "Two wait for one another at every operation, where other programs take the cores."
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = []
    forward = Agent.forward
    monkeypatch.setattr(Agent, "forward", lambda *args: (
        threads.append(torch.get_num_threads()), forward(*args))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        PPO(**SHAPE).learn()
        assert {*threads} == {1} and torch.get_num_threads() == 2
    finally: torch.set_num_threads(before)


@pytest.mark.parametrize("call, error, words", [
    (lambda p: p.evaluate(0), ValueError, r"episodes must be in \[1, 1e6\], got 0"),
    (lambda p: p.evaluate(2.5), TypeError, "episodes must be an integer, got 2.5"),
    (lambda p: p.evaluate(2, seed=-1), ValueError, r"seed must be in \[0, inf\), got -1"),
    (lambda p: p.evaluate(2, 1), TypeError, "deterministic must be True or False, got 1"),
    (lambda p: p.predict(np.full(4, np.nan)), ValueError, "obs must be finite, got "),
    (lambda p: p.predict(np.zeros(3)), ValueError, "obs must have shape"),
    (lambda p: p.film("film.gif", seed=-1), ValueError, r"seed must be in \[0, inf\), got -1")])
def test_a_bad_argument_is_named(call, error, words):
    with pytest.raises(error, match=f"^{words}"): call(PPO(**vars(SMALL)))


def test_no_observation_gets_no_action():
    assert PPO(**vars(SMALL)).predict(np.zeros((0, 4))).shape == (0,)


TINY = dict(num_envs=4, num_steps=32, steps=256, minibatches=4)


@pytest.mark.parametrize("num_envs, iteration", [(32, 10), (8, 40), (1, 320), (64, 5)])
def test_progress_is_steps_whatever_the_number_of_environments(tmp_path, num_envs, iteration):
    p = PPO(steps=10 * 1024, epochs=1).learn()
    p.save(tmp_path / "ppo.pt")
    again = PPO.load(tmp_path / "ppo.pt", num_envs=num_envs, steps=20 * 1024)
    assert (again.iteration, again.steps) == (iteration, p.steps)
    row = again.iterate()
    assert row["learning_rate"] == pytest.approx(3e-3 / 2)
    assert p.steps < row["steps"] <= p.steps + again.config.batch
    assert again.config.iterations == 2 * iteration


# environments as they come

def test_the_recipe_follows_from_the_environment_however_it_comes():
    made = gym.make("Pendulum-v1")
    for env in "Pendulum-v1", "gymnasium:Pendulum-v1", made, lambda: gym.make("Pendulum-v1"):
        p = PPO(env, seed=3)
        assert vars(replace(p.config, env="Pendulum-v1")) == vars(PendulumConfig(seed=3))
        assert p.spec.id == "Pendulum-v1" and (p.collector.until_cut > 0).all()
    assert made.spec == gym.make("Pendulum-v1").spec                       # it was left alone
    assert PPO(lambda: gym.make("CartPole-v1")).config.gamma == PPOConfig().gamma


class Numbers(gym.Env):
    "A task without a recipe whose actions are numbers."
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Box(-1, 1, (3,))
    made = 0
    def __init__(self): Numbers.made += 1
    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}
    def step(self, action): return np.zeros(2, np.float32), 0.0, False, True, {}


@pytest.mark.parametrize("env, n", [
    (lambda: "Numbers-v0", 1), (lambda: Numbers, 1), (lambda: lambda: Numbers(), 1), (Numbers, 1),
    (lambda: gym.vector.SyncVectorEnv([Numbers] * 5), 5)],
    ids=["name", "class", "function", "environment", "vector"])
def test_where_actions_are_numbers_the_defaults_are_cautious(monkeypatch, tmp_path, env, n):
    monkeypatch.setitem(gym.registry, "Numbers-v0", EnvSpec("Numbers-v0", Numbers))
    c = PPO(env(), lam=0.5).config
    assert vars(c) == vars(PPOConfig(**continuous(n), env=c.env, lam=0.5))
    assert (c.learning_rate, c.normalize_obs, c.num_envs) == (3e-4, True, n)
    PPO(env(), steps=2048).save(tmp_path / "p.pt")
    assert PPO.load(tmp_path / "p.pt", Numbers, gamma=0.5).config.learning_rate == 3e-4
    if n == 1:
        c = PPO(env(), num_envs=4, learning_rate=1e-3, vectorization="sync").config
        assert (c.num_envs, c.num_steps, c.learning_rate) == (4, 512, 1e-3)


def test_no_environment_is_made_to_choose_options_that_are_given(monkeypatch):
    monkeypatch.setitem(gym.registry, "Numbers-v0", EnvSpec("Numbers-v0", Numbers))
    monkeypatch.setattr(Numbers, "made", 0)
    config = PPO("Numbers-v0").config
    assert Numbers.made == 2  # one to see its actions
    PPO.begin(config)
    assert Numbers.made == 3
    PPO("Numbers-v0", **{x: getattr(config, x) for x in vars(config).keys() - {"env", "lam"}})
    assert Numbers.made == 5


def test_a_batch_of_the_cautious_defaults_can_be_cut_whatever_the_number_of_environments():
    for n in range(1, 200):
        assert PPOConfig(**continuous(n)).batch >= min(32 * n, 1024)


def test_a_function_is_not_called_once_more_to_see_the_actions():
    for env in Numbers, lambda: Numbers():
        Numbers.made = 0
        PPO(env)
        assert Numbers.made == 1


@pytest.mark.parametrize("env", ["Acrobot-v1", "MountainCarContinuous-v0"])
def test_a_recipe_replaces_the_defaults_and_gives_way_to_options(env):
    config = PPO(env, lam=0.5).config
    assert vars(config) == vars(PPOConfig(**{**RECIPES[env], "env": env, "lam": 0.5}))


@pytest.mark.skipif(importlib.util.find_spec("Box2D"), reason="Box2D is installed")
def test_an_environment_that_needs_a_package_names_it():
    with pytest.raises(ValueError, match=r"LunarLander-v3.*Box2D is not installed.*pip install"):
        PPO("LunarLander-v3")


@pytest.mark.parametrize("factor, scaled, said", [(1000, False, 1), (1000, True, 0), (1, False, 0)])
def test_large_rewards_are_pointed_to_what_scales_them(factor, scaled, said):
    def make():
        return gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda reward: factor * reward)
    p = PPO(make, normalize_rewards=scaled, **SHAPE)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        p.iterate()
        p.iterate()
    found = [str(w.message) for w in found if "normalize_rewards=True" in str(w.message)]
    assert len(found) == said
    if said: assert re.match(r"the first advantages are around \d{4,5}, and", found[0])


class Screen(Endless):
    action_space = gym.spaces.Box(-10, 10, (1,))
    def __init__(self, shape, dtype=np.uint8):
        self.observation_space = gym.spaces.Box(0, 255, shape, dtype)
    def reset(self, *, seed=None, options=None): return self.observation_space.sample(), {}
    def step(self, action): return self.observation_space.sample(), 1.0, False, False, {}


@pytest.mark.parametrize("shape", [(8, 8, 1), (8, 8), (128,)])
def test_a_picture_is_the_same_in_any_dtype(shape):
    p = PPO(lambda: Screen(shape), **TINY)
    picture = p.spaces[0].sample()
    first, *others = (p.predict(x) for x in (
        picture, picture.astype(np.float32), picture.astype(np.int64), picture.tolist()))
    assert all(np.array_equal(first, other) for other in others)
    assert 0.9 < p.collector.obs.max() <= (1 if len(shape) == 1 else 255)
    if len(shape) == 1:  # as a picture, floats are refused
        assert 0.9 < PPO(lambda: Screen(shape, np.float32), **TINY).collector.obs.max() <= 1


class Clock(gym.Env):
    "Shows a Unix time, in which alone the right action can be seen."
    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)
    def look(self):
        self.x = float(self.np_random.integers(-50, 50))
        return np.array([1.7e9 + self.x])
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}
    def step(self, action):
        self.t += 1
        right = action == (self.x > 0)
        return self.look(), float(right), False, self.t == 20, {}


def test_observations_are_normalised_before_they_are_rounded():
    p = PPO(
        Clock, normalize_obs=True, num_envs=8, num_steps=64, steps=10_240, minibatches=8).learn()
    assert p.rows[-1]["return_mean"] > 17                                  # 10 by chance
    assert p.predict(np.array([[1.7e9 - 30], [1.7e9 + 30]])).tolist() == [0, 1]


class Bandit(Endless):
    steps = 0
    def step(self, action):
        Bandit.steps += 1
        return np.zeros(2, np.float32), 1.0, True, False, {}


def test_steps_are_those_of_the_environment():
    "Every second row of an environment whose episodes have one step is a reset."
    p = PPO(Bandit, **TINY)
    Bandit.steps = 0
    p.learn()
    assert [row["steps"] for row in p.rows] == [64, 128] and p.steps == Bandit.steps == 128


class Closes(Endless):
    made = closed = 0
    def __init__(self): Closes.made += 1
    def close(self): Closes.closed += 1


def test_environments_are_closed(monkeypatch):
    spec = gym.envs.registration.EnvSpec("Closes-v0", Closes, max_episode_steps=10)
    monkeypatch.setitem(gym.registry, "Closes-v0", spec)
    monkeypatch.setattr(Closes, "made", 0)
    monkeypatch.setattr(Closes, "closed", 0)
    p = PPO("Closes-v0", **TINY).learn()
    assert (Closes.made, Closes.closed) == (5, 1)                              # one was looked at
    p.evaluate(5)
    episode_returns(lambda obs: np.zeros(len(obs), int), 0, 5, "Closes-v0")
    assert (Closes.made, Closes.closed) == (15, 11)
    p.close()
    p.close()
    assert (Closes.made, Closes.closed) == (15, 15)
    p.learn(128)                                                           # in new ones
    assert (Closes.made, Closes.closed) == (19, 15)
    del p
    gc.collect()
    assert (Closes.made, Closes.closed) == (19, 19)
    PPO(env := Closes(), **TINY | dict(num_envs=1)).close()
    assert Closes.closed == 19 and env.reset()                             # it is not ours


def test_a_callback_sees_each_row_and_may_end_the_training():
    seen, p = [], PPO(**TINY | dict(steps=512))
    def callback(trainer, row):
        seen.append((trainer is p, row is p.rows[-1]))
        return len(seen) < 2
    assert p.learn(callback=callback).iteration == 2 and seen == [(True, True)] * 2
    assert p.learn(callback=lambda trainer, row: None).iteration == 4


BEST = TINY | dict(steps=512, eval_every=200, eval_episodes=3, keep_best=True)


def test_the_best_policy_of_the_evaluations_is_taken():
    p, weights, scores = PPO(**BEST), [], iter([5.0, 7.0])
    def look():
        weights.append(p.optimizer.vector.detach().clone())
        return next(scores, 6.0)
    p.evaluator.evaluate = look
    p.learn()
    assert [row["eval_return_mean"] for row in p.rows] == [None, 5.0, None, 7.0]
    assert torch.equal(p.optimizer.vector, weights[1])
    p.learn(1)                                                             # looked at: 6.0
    assert len(weights) == 3 and torch.equal(p.optimizer.vector, weights[1])
    assert not torch.equal(weights[2], weights[1])


def test_evaluation_while_training_changes_nothing_and_is_of_other_episodes():
    quiet, seen = PPO(**TINY | dict(steps=512)), PPO(**BEST | dict(keep_best=False))
    keys = [k for k in quiet.learn().rows[-1]]
    assert [{k: r[k] for k in keys} for r in seen.learn().rows] == quiet.rows
    score = seen.rows[-1]["eval_return_mean"]
    assert score == seen._look() and score != seen.evaluate(3).mean().item()
    with pytest.raises(ValueError, match="^keep_best must come with eval_every"):
        PPO(**TINY, keep_best=True)


def test_a_resumed_run_keeps_the_best_from_before(tmp_path):
    config = PPOConfig(**BEST)
    run = Run.create(tmp_path / "run", dict(task="cartpole"))
    p = PPO.begin(config)
    p.evaluator.evaluate = lambda: 1e9
    p.learn(run=run, callback=lambda trainer, row: row["iteration"] < 2)
    best = p.evaluator.kept["weights"]
    again, rows, _ = train(config, Run.resume(run.path))
    assert len(rows) == 4 and torch.equal(again.optimizer.vector, best)
    assert torch.equal(PPO.load(run.path / "ppo.pt").optimizer.vector, best)


def test_it_learns_as_many_steps_more_as_one_says():
    p = PPO(**TINY | dict(steps=512))
    assert p.learn(1) is p and p.iteration == 1
    assert p.rows[0]["learning_rate"] == p.config.learning_rate
    before = p.steps
    p.learn(384)
    assert 384 <= p.steps - before < 384 + 128 and p.iteration in (4, 5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        iteration = p.learn().iteration
    assert [str(w.message) for w in said] == [
        "nothing is left of 512 steps; learn(steps=...) goes on"]
    rates = [row["learning_rate"] for row in p.learn(1000).rows[iteration:]]
    assert len(rates) >= 8 and sorted(rates, reverse=True) == rates and rates[-1] > 0
    assert p.iterate()["learning_rate"] > 0                                # beyond the end
    for bad, error in ("runs/x", TypeError), (0, ValueError), (1.5, TypeError):
        with pytest.raises(error, match="^steps must be "): p.learn(bad)


class Breaks(Endless):
    "Breaks once, in the middle of an episode."
    t = 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action):
        Breaks.t += 1
        if Breaks.t == 300: raise KeyError("clock")
        return np.full(2, 0.5, np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("way", ["sync", "async"])
def test_after_an_environment_broke_episodes_begin_anew(monkeypatch, way):
    monkeypatch.setattr(Breaks, "t", 0)
    p = PPO(Breaks, **TINY | dict(num_envs=1, vectorization=way))
    with pytest.raises(RuntimeError, match="^the environment's step raised KeyError: 'clock'$"):
        p.learn(1000)
    done = p.iteration
    assert 0 < done and p.steps == done * 32 and (p.collector.obs == 0).all()
    assert not p.scaling.running.any() and p.learn(32).iteration == done + 1
    p.close()


def test_after_a_process_was_killed_there_are_new_ones():
    p = PPO("Pendulum-v1", **SHAPE, vectorization="async", stagger=False)
    p.envs.processes[0].kill()
    with pytest.raises(ChildProcessError, match="^the process of an environment has ended$"):
        p.iterate()
    assert p.iterate()["iteration"] == 1
    p.close()


class Ends(Endless):
    "Ends its process at a step, as a crash in C does."
    def step(self, action): os._exit(3)


def test_a_process_that_ends_is_told_from_the_first_step_and_in_an_evaluation():
    with pytest.raises(ValueError, match="^env must be an environment whose reset and step"):
        PPO(Ends, **TINY | dict(vectorization="async"))
    p = PPO("Pendulum-v1", **SHAPE, vectorization="async", stagger=False)
    p.envs.processes[0].kill()
    with pytest.raises(ChildProcessError, match="^the process of an environment has ended$"):
        p.evaluate(2, envs=p.envs)
    p.close()


def test_an_evaluation_names_what_does_not_fit():
    p = PPO(**TINY)
    for envs in gym.make_vec("Pendulum-v1", 2), gym.make("Pendulum-v1"), "Pendulum-v1":
        with pytest.raises(ValueError, match="^envs must have the observations that .* got Box"):
            p.evaluate(2, envs=envs)


def set_data(m):
    for p in m.parameters():
        p.data = p.data.clone()


CUT = dict(
    data=set_data, round_trip=lambda m: m.double().float(), zero_grad=lambda m: m.zero_grad(),
    assign=lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()},
                                       assign=True))


@pytest.mark.parametrize("cut", [*CUT.values(), copy.deepcopy], ids=[*CUT, "another agent"])
@pytest.mark.parametrize("at", [0, 2])
def test_weights_that_were_cut_off_from_the_optimizer_learn(cut, at):
    def rows(cut):
        def change(trainer, row=()):
            other = cut(trainer.agent) if at == len(trainer.rows) else None
            trainer.agent = other if isinstance(other, torch.nn.Module) else trainer.agent
        ppo = PPO(**vars(SMALL) | dict(eval_every=128, keep_best=True, eval_episodes=2))
        change(ppo)
        ppo.learn(3 * 128, callback=change)
        return ppo.rows, ppo.optimizer.vector.tolist()
    assert rows(cut) == rows(lambda agent: None)


COPIES = dict(deepcopy=copy.deepcopy, pickle=lambda t: pickle.loads(pickle.dumps(t)))


@pytest.mark.parametrize("how", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("env", ["CartPole-v1", "object", "class"])
def test_a_copy_of_a_trainer_learns_on(how, env, tmp_path):
    from gymnasium.envs.classic_control import CartPoleEnv
    env = dict(object=CartPoleEnv(), **{"class": CartPoleEnv}).get(env, env)
    options = dict(vars(SMALL), env=env, normalize_obs=True, eval_every=256, keep_best=True,
                   eval_episodes=2)
    ppo = PPO(**options, out=tmp_path / "run", track=[]).learn(256)
    one, two = how(ppo), how(ppo)
    assert torch.equal(one.evaluate(2), two.evaluate(2)) and one.out is None
    before = one.optimizer.vector.clone()
    assert one.learn(256).rows == two.learn(256).rows and len(one.rows) > len(ppo.rows)
    assert not torch.equal(one.optimizer.vector, before)
    assert torch.equal(ppo.optimizer.vector, before)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["run"]


def test_a_copy_that_was_not_trained_learns_as_the_original():
    ppo = PPO(**vars(SMALL))
    assert copy.deepcopy(ppo).learn().rows == ppo.learn().rows
