import json
import math
import random
import signal
import subprocess
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import gymnasium as gym
import matplotlib
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from hypothesis import given, settings, strategies as st
from matplotlib.figure import Figure

from rlhf_notes import viz
from rlhf_notes.control import ppo as cartpole
from rlhf_notes.control.ppo import PPO, Batch, Scaling, check_env, evaluate, health, make_batch, ppo_loss, check_start, score, scores, seeds, threshold, train
from rlhf_notes.control.config import PendulumConfig, PPOConfig
from rlhf_notes.control.policy import Agent
from rlhf_notes.control.rollout import Collector, Rollout, make_envs, minibatches
from rlhf_notes.formulas.whitening import RunningMoments
from rlhf_notes.training.runs import Run
from strategies import SEEDS

SHAPE = dict(seed=3, steps=8 * 128, num_envs=4, num_steps=32, epochs=2)      # eight iterations in a moment
SMALL, PENDULUM = PPOConfig(**SHAPE, whitening="minibatch"), PendulumConfig(**SHAPE, whitening="minibatch")
PUSHES, TORQUE = gym.spaces.Discrete(2), gym.spaces.Box(-2, 2, (1,), np.float32)


def agent(seed=0, config=SMALL): return Agent(*((4, PUSHES) if config.env == "CartPole-v1" else (3, TORQUE)), config, torch.Generator().manual_seed(seed))


def some_batch(seed=0, size=40):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=g)
    return Batch(normal(size, 4), torch.randint(2, (size,), generator=g), math.log(0.5) + 0.3 * normal(size), normal(size), 3 * normal(size) + 1, 2 * normal(size))


def collect(a, config=SMALL, steps=32, seed=0, envs=None):
    c = Collector(envs or make_envs(config.env, config.num_envs), seed)
    return c.collect(a.actor(np.random.default_rng(seed)), steps, a.head.for_env)[0]


def some_rollout(seed, T=40, N=3, size=2, mean=3.0, std=4.0, p_end=0.15):
    "Numbers with episodes of all lengths and, after each, a seam full of junk, that may lie at either edge of the data."
    rng = np.random.default_rng(seed)
    f = lambda *shape: torch.from_numpy(rng.normal(mean, std, shape).astype(np.float32))
    terminated, truncated = (torch.from_numpy(rng.random((T, N)) < p_end) for _ in range(2))
    truncated &= ~terminated
    valid = torch.ones(T, N, dtype=torch.bool)
    for t in range(1, T):
        valid[t] = ~((terminated | truncated)[t - 1] & valid[t - 1])
        terminated[t] &= valid[t]; truncated[t] &= valid[t]
    r = Rollout(f(T, N, size), torch.zeros(T, N, dtype=torch.long), f(T, N), f(T, N, size), terminated, truncated, valid)
    r.obs[~valid] = r.next_obs[~valid] = 1e6; r.rewards[~valid] = -1e6
    return r


def loss_and_grad(a, batch, config, clip=0.2):
    a.zero_grad()
    loss, parts = ppo_loss(a, batch, config, clip)
    loss.backward()
    return loss.item(), {k: v.item() for k, v in parts.items()}, torch.cat([p.grad.flatten() for p in a.parameters()])


# the loss

@settings(max_examples=40)
@given(seed=SEEDS, clip=st.sampled_from([0.1, 0.2, 1.0]), entropy_coef=st.sampled_from([0.0, 0.01, 1.0]), value_coef=st.sampled_from([0.0, 0.5, 2.0]),
       value_clip=st.sampled_from([0.0, 0.2, 1.0]), whitening=st.sampled_from(["minibatch", "rollout", "none"]))
def test_loss_equals_the_loops(seed, clip, entropy_coef, value_coef, value_clip, whitening):
    a, b = agent(seed % 7), some_batch(seed)
    config = replace(SMALL, clip=0.5, entropy_coef=entropy_coef, value_coef=value_coef, value_clip=value_clip, whitening=whitening)      # the clip is the argument, not the option
    logits, values = a.policy(b.obs).detach().double().tolist(), a.critic(b.obs).detach().double()[:, 0].tolist()
    n, advantage = len(values), b.advantages.double()
    mean, std = (advantage.mean().item(), advantage.std(correction=0).item()) if whitening == "minibatch" else (0, 1)
    policy = value = entropy = 0.0
    for i in range(n):
        top = max(logits[i])
        logp = [z - top - math.log(sum(math.exp(y - top) for y in logits[i])) for z in logits[i]]
        ratio, A = math.exp(logp[b.actions[i]] - b.logp[i].item()), (b.advantages[i].item() - mean) / std
        policy -= min(ratio * A, min(max(ratio, 1 - clip), 1 + clip) * A) / n
        old, R = b.values[i].item(), b.returns[i].item()
        near = old + min(max(values[i] - old, -value_clip), value_clip) if value_clip else values[i]
        value += 0.5 * max((values[i] - R) ** 2, (near - R) ** 2) / n
        entropy -= sum(math.exp(l) * l for l in logp) / n
    loss, parts, _ = loss_and_grad(a, b, config, clip)
    assert parts == pytest.approx(dict(policy_loss=policy, value_loss=value), abs=2e-5, rel=1e-4)
    assert loss == pytest.approx(policy + value_coef * value - entropy_coef * entropy, abs=2e-5, rel=1e-4)


FORMULAS = {
    "importance_ratio": lambda logp, old: torch.ones_like(logp), "clipped_surrogate": lambda ratio, A, clip: torch.zeros_like(A), "whiten": lambda x: x,
    "value_loss": lambda v, old, returns, clip: v, "masked_mean": lambda x: x.sum(),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_loss_calls_the_formula(monkeypatch, name):
    a, b, config = agent(), some_batch(), replace(SMALL, entropy_coef=0.1)
    _, _, right = loss_and_grad(a, b, config)
    monkeypatch.setattr(cartpole, name, FORMULAS[name])
    _, _, broken = loss_and_grad(a, b, config)
    assert not torch.allclose(right, broken)


def test_the_batch_and_the_metrics_call_theirs(monkeypatch):
    a = agent()
    r = collect(a)
    seen = {}
    monkeypatch.setattr(cartpole, "gae", lambda *args: seen.setdefault("gae", args)[:2])
    b = make_batch(a, r, replace(SMALL, gamma=0.9, lam=0.8))
    rewards, values, next_values, terminated, done, gamma, lam = seen["gae"]
    assert torch.equal(values, a.value(r.obs)) and torch.equal(next_values, a.value(r.next_obs)) and (gamma, lam) == (0.9, 0.8)
    assert torch.equal(terminated, r.terminated) and torch.equal(done, r.done | ~r.valid)
    assert torch.equal(b.advantages, rewards[r.valid]) and torch.equal(b.returns, values[r.valid])
    for name, column in (("kl_estimate", "kl_k3"), ("clip_fraction", "clip_fraction"), ("explained_variance", "explained_variance")):
        monkeypatch.setattr(cartpole, name, lambda *args, shape=(len(b),) if column == "kl_k3" else (), **kwargs: torch.full(shape, 42.0))
        assert health(a, b, SMALL, 0.2)[column] == 42


@pytest.mark.parametrize("whitening", ["minibatch", "none"])
@pytest.mark.parametrize("clip", [0.05, 0.2])
def test_health_measures_the_move(clip, whitening):
    a, b = agent(), some_batch()
    b = replace(b, advantages=b.advantages + 3.0)                              # as they come from the task, whitened only if the loss does
    with torch.no_grad(): a.policy[-1].weight *= 100                           # decided here, undecided there
    logp = a.policy(b.obs).log_softmax(-1).gather(-1, b.actions[:, None])[:, 0].detach()
    ratio, A = (logp - b.logp).exp(), b.advantages - (b.advantages.mean() if whitening == "minibatch" else 0)
    d = b.logp - logp                                                       # samples from the old policy: KL(old || new)
    got, p = health(a, b, replace(SMALL, whitening=whitening), clip), a.policy(b.obs).softmax(-1).detach()
    assert got["entropy"] == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-5)
    assert got["kl_k3"] == pytest.approx(((-d).exp() - 1 + d).mean().item(), rel=1e-3)
    assert got["clip_fraction"] == pytest.approx((((ratio > 1 + clip) & (A > 0)) | ((ratio < 1 - clip) & (A < 0))).float().mean().item())
    assert got["explained_variance"] == pytest.approx(1 - ((b.returns - b.values).var() / b.returns.var()).item(), rel=1e-3)


# the batch

@pytest.mark.parametrize("config", [SMALL, PENDULUM, replace(PENDULUM, squash=True)], ids=lambda c: f"{c.env} {c.squash}")
def test_the_first_ratio_is_one_and_the_first_loss_zero(config):
    "log pi_old is that of the policy that acted, recomputed: on its own data the ratio is 1, and whitened advantages have mean 0."
    a = agent(config=config)
    r = collect(a, config, steps=64)
    b = make_batch(a, r, config)
    out = a.policy(b.obs).detach()
    if config is SMALL: expected = torch.distributions.Categorical(logits=out).log_prob(b.actions)
    else:
        base = torch.distributions.Normal(out, a.head.log_std.exp().detach().expand_as(out))
        expected = base.log_prob(b.actions).sum(-1)
        if config.squash: expected = expected - torch.distributions.TanhTransform().log_abs_det_jacobian(b.actions, b.actions.tanh()).sum(-1)
    torch.testing.assert_close(b.logp, expected, atol=2e-5, rtol=1e-4)
    assert not b.logp.requires_grad
    for rows in (torch.arange(len(b)), torch.arange(len(b)).flip(0)[:len(b) // 4]):
        logp, _ = a.logp_entropy(b[rows].obs, b[rows].actions)
        assert ((logp - b.logp[rows]).exp() - 1).abs().max() < 2e-6         # exactly 1 where a product of matrices rounds each row alike whatever its size
    _, parts, grad = loss_and_grad(a, b, replace(config, value_coef=0.0))
    assert abs(parts["policy_loss"]) < 1e-5 and grad.norm() > 1e-3
    assert abs(health(a, b, config, 0.2)["kl_k3"]) < 1e-9 and health(a, b, config, 0.2)["clip_fraction"] == 0


@settings(max_examples=12)
@given(seed=st.integers(0, 10000), gamma=st.sampled_from([0.9, 1.0]), lam=st.sampled_from([0.0, 0.7, 1.0]), truncation=st.sampled_from(["bootstrap", "terminate"]))
def test_advantages_equal_the_sums_over_each_episode(seed, gamma, lam, truncation):
    "From the definition, episode by episode, with terminations, truncations, seams and the end of the data."
    a = agent(1)
    r = collect(a, steps=50, seed=seed, envs=gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point", max_episode_steps=17))
    assert r.truncated.any() and (~r.valid).any()
    b = make_batch(a, r, replace(SMALL, gamma=gamma, lam=lam, truncation=truncation))
    V = lambda o: a.value(o).item()
    i = 0
    for t in range(50):
        for n in range(3):
            if not r.valid[t, n]: continue
            total, weight, k = 0.0, 1.0, t
            while True:
                over = r.terminated[k, n] or truncation == "terminate" and r.truncated[k, n]
                total += weight * (r.rewards[k, n].item() + gamma * (0.0 if over else V(r.next_obs[k, n])) - V(r.obs[k, n]))
                weight *= gamma * lam; k += 1
                if k == 50 or r.done[k - 1, n]: break
            assert b.advantages[i].item() == pytest.approx(total, abs=1e-3) and b.returns[i].item() == pytest.approx(total + V(r.obs[t, n]), abs=1e-3)
            assert torch.equal(b.obs[i], r.obs[t, n]) and b.actions[i] == r.actions[t, n] and b.values[i].item() == pytest.approx(V(r.obs[t, n]), abs=1e-5)
            i += 1
    assert len(b) == i == r.valid.sum()
    rows = torch.tensor([3, 77, 3])
    for f in fields(b): assert torch.equal(getattr(b[rows], f.name), getattr(b, f.name)[rows]) and not getattr(b, f.name).requires_grad


@settings(max_examples=20)
@given(seed=SEEDS)
def test_rows_that_are_no_data_have_no_influence(seed):
    a, r = Agent(2, PUSHES, SMALL, torch.Generator().manual_seed(0)), some_rollout(seed)
    seam = ~r.valid
    other = replace(r, obs=torch.where(seam[..., None], -7.0, r.obs), next_obs=torch.where(seam[..., None], 3.0, r.next_obs), rewards=torch.where(seam, 1e4, r.rewards), actions=torch.where(seam, 1, r.actions))
    for whitening in ("minibatch", "rollout"):
        one, two = (make_batch(a, x, replace(SMALL, whitening=whitening)) for x in (r, other))
        for f in fields(one): torch.testing.assert_close(getattr(one, f.name), getattr(two, f.name), rtol=1e-5, atol=1e-5)


def test_whitening_choices():
    a = agent()
    r = collect(a, steps=64)
    raw, rollout = (make_batch(a, r, replace(SMALL, whitening=w)).advantages for w in ("none", "rollout"))
    assert (~r.valid).any() and torch.equal(raw, make_batch(a, r, SMALL).advantages) and abs(raw.mean()) > 0.1
    torch.testing.assert_close(rollout, (raw - raw.mean()) / raw.std(correction=0), rtol=1e-4, atol=1e-5)
    b = some_batch()
    losses = {w: ppo_loss(a, b, replace(SMALL, whitening=w), 0.2)[1]["policy_loss"].item() for w in ("none", "rollout", "minibatch")}
    assert losses["none"] == losses["rollout"] != losses["minibatch"]


# observations and rewards at unit scale

def loops(rollouts, config):
    "For each rollout, observations and rewards as they should come out, by plain loops in float64."
    seen, earned, running, out = [], [], [0.0] * config.num_envs, []
    for r in rollouts:
        T, N, size = r.obs.shape
        def scaled(o):
            if not config.normalize_obs or not seen: return [float(v) for v in o]
            columns = list(zip(*seen))
            means = [sum(c) / len(c) for c in columns]
            stds = [math.sqrt(sum((v - m) ** 2 for v in c) / len(c) + 1e-8) for c, m in zip(columns, means)]
            return [min(max((float(v) - m) / s, -10.0), 10.0) for v, m, s in zip(o, means, stds)]
        obs, next_obs = ([[scaled(o) for o in row] for row in x] for x in (r.obs, r.next_obs))
        for t in range(T):
            for n in range(N):
                if not r.valid[t, n]: continue
                seen.append([float(v) for v in r.obs[t, n]])
                running[n] = config.gamma * running[n] + float(r.rewards[t, n]) * config.reward_scale
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
@given(seed=SEEDS, normalize_obs=st.booleans(), normalize_rewards=st.booleans(), reward_scale=st.sampled_from([1.0, 0.1, 30.0]), std=st.sampled_from([0.01, 4.0]))
def test_scaling_equals_the_loops(seed, normalize_obs, normalize_rewards, reward_scale, std):
    config = replace(SMALL, num_envs=3, num_steps=12, minibatches=1, normalize_obs=normalize_obs, normalize_rewards=normalize_rewards, reward_scale=reward_scale, gamma=0.9)
    rollouts = [some_rollout(seed + k, T=12, std=std) for k in range(3)]
    scaling = Scaling(config, 2)
    for r, (obs, next_obs, rewards) in zip(rollouts, loops(rollouts, config)):
        before = [x.clone() for x in (r.obs, r.next_obs, r.rewards)]
        got = scaling(r)
        assert all(map(torch.equal, before, (r.obs, r.next_obs, r.rewards)))
        torch.testing.assert_close(got.obs, torch.tensor(obs), rtol=2e-4, atol=2e-4); torch.testing.assert_close(got.next_obs, torch.tensor(next_obs), rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(got.rewards[r.valid], torch.tensor(rewards)[r.valid], rtol=2e-4, atol=2e-4)
        for name in ("actions", "terminated", "truncated", "valid"): assert torch.equal(getattr(got, name), getattr(r, name))
        assert got.obs.dtype == got.rewards.dtype == torch.float32
    if normalize_obs: assert got.obs[r.valid].abs().max() < 10 and (got.obs[~r.valid] == 10).all()
    if not (normalize_obs or normalize_rewards) and reward_scale == 1: assert torch.equal(got.obs, r.obs) and torch.equal(got.rewards, r.rewards)


@pytest.mark.parametrize("reward", [3.0, -3.0])
def test_a_rare_reward_is_cut_at_ten_deviations(reward):
    "One reward among 400 zeros lies sqrt(400) deviations out, nearly."
    r = some_rollout(0, T=40, N=10, p_end=0.0)
    r.rewards.zero_(); r.rewards[20, 5] = reward
    scaled = Scaling(replace(SMALL, num_envs=10, gamma=0.0, normalize_rewards=True), 2)(r).rewards
    assert scaled[20, 5] == math.copysign(10, reward) and scaled.count_nonzero() == 1


def test_the_batch_holds_what_the_policy_saw(monkeypatch):
    p = PPO(replace(PENDULUM, normalize_obs=True, normalize_rewards=True))
    saw, batches, actor, make = [], [], p.agent.actor, cartpole.make_batch
    def recording(rng=None):
        act = actor(rng)
        return lambda obs: (saw.append(obs.copy()), act(obs))[1]
    monkeypatch.setattr(p.agent, "actor", recording)
    monkeypatch.setattr(cartpole, "make_batch", lambda a, r, c: batches.append(r) or make(a, r, c))
    for i in range(3):
        saw.clear(); p.iterate()
        torch.testing.assert_close(batches[-1].obs, torch.from_numpy(np.stack(saw)), rtol=0, atol=0)
    assert abs(batches[-1].obs.mean()) < 0.6 and p.scaling.seen.count == 3 * 128 and p.scaling.earned.count == 3 * 128


def test_evaluation_sees_scaled_observations_and_teaches_the_scaling_nothing(monkeypatch):
    p = PPO(replace(PENDULUM, normalize_obs=True))
    p.iterate()
    before, weights = json.dumps(p.state_dict()["scaling"], default=lambda t: t.tolist()), [q.clone() for q in p.agent.parameters()]
    mean, std = p.scaling.seen.mean.numpy(), p.scaling.seen.var.sqrt().numpy()
    obs = np.array([[0.3, -0.9, 4.0], [1e9, 0.0, 0.0]], np.float32)
    expected = p.agent.actor()(np.clip((obs - mean) / std, -10, 10).astype(np.float32))
    np.testing.assert_allclose(p.policy()(obs), expected, rtol=1e-3, atol=1e-5)
    score(p, 1, True)
    assert json.dumps(p.state_dict()["scaling"], default=lambda t: t.tolist()) == before and all(map(torch.equal, weights, p.agent.parameters()))


# evaluation

def test_evaluation_plays_each_episode_whole_and_once():
    def choose(obs): return (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)
    returns = evaluate(choose, seed=5, episodes=40)
    envs = make_envs("CartPole-v1", 40)
    envs.reset(seed=5)
    expected = []
    for state in envs.state.T:
        single, total, over = gym.make("CartPole-v1"), 0.0, False
        single.reset(); single.unwrapped.state = tuple(state)
        while not over:
            _, reward, terminated, truncated, _ = single.step(int(choose(np.array(single.unwrapped.state, np.float32)[None])[0]))
            total += reward; over = terminated or truncated
        expected.append(total)
    assert returns.tolist() == expected and len(set(expected)) > 3
    assert len(evaluate(choose, seed=5)) == 100
    assert evaluate(lambda o: np.zeros(len(o), np.int64), seed=0).max() < 12
    assert (evaluate(lambda o: np.zeros((len(o), 1)), seed=0, episodes=5, env_id="Pendulum-v1") < -5).all()


def test_seeds_are_apart():
    assert seeds(3) == seeds(3) and len(set(seeds(0) + seeds(1) + seeds(2))) == 12


def test_nothing_is_evaluated_on_what_it_was_trained_on(monkeypatch):
    trained, seen = [], []
    collector, original = cartpole.Collector, cartpole.evaluate
    monkeypatch.setattr(cartpole, "Collector", lambda envs, seed, *stagger: (trained.append(seed), collector(envs, seed, *stagger))[1])
    monkeypatch.setattr(cartpole, "evaluate", lambda choose, seed, **kwargs: (seen.append(seed), original(choose, seed, **kwargs))[1])
    got = scores(PPO(SMALL))
    assert seen == seeds(3)[2:] and trained == seeds(3)[:1] and not set(seen) & set(trained)
    assert got["eval_episodes"] == 100 and got["solved"] is False and 5 < got["eval_return_mean"] < 475


def test_starts_are_staggered_over_the_time_limit_if_asked_for():
    assert PPO(PENDULUM).collector.until_cut.tolist() == [50, 100, 150, 200] and PPO(replace(PENDULUM, stagger=False)).collector.until_cut.tolist() == [0] * 4 == PPO(SMALL).collector.until_cut.tolist()
    assert PPO(replace(SMALL, stagger=True, vectorization="sync")).collector.until_cut.tolist() == [125, 250, 375, 500]
    with pytest.raises(ValueError, match="stagger must be left off .*, got CartPoleVectorEnv"): PPO(replace(SMALL, stagger=True))


def test_greedy_takes_the_most_probable_action_and_sampled_draws():
    p = PPO(SMALL)
    logits = p.agent.policy(torch.zeros(1, 4)).detach()
    greedy = p.policy()(np.zeros((5000, 4), np.float32))
    drawn = p.policy(np.random.default_rng(0))(np.zeros((5000, 4), np.float32))
    assert (greedy == logits.argmax().item()).all() and abs(drawn.mean() - logits.softmax(-1)[0, 1].item()) < 0.03
    assert torch.equal(score(p, 7, False), score(p, 7, False)) and not torch.equal(score(p, 7, False), score(p, 8, False))

def test_what_draws_the_start_states_does_not_draw_the_actions(monkeypatch):
    "Gymnasium begins with the stream of the seed: actions from the same numbers would know where their episode began."
    p, handed = PPO(SMALL), []
    monkeypatch.setattr(p, "policy", lambda rng: handed.append(rng) or (lambda obs: np.zeros(len(obs), np.int64)))
    for seed in range(20): score(p, seed, False)
    streams = [rng.random(8) for rng in handed] + [np.random.default_rng(seed + i).random(8) for seed in range(20) for i in range(3)]
    assert len(np.unique(np.concatenate(streams[:20]))) == 160 and not np.isin(np.concatenate(streams[:20]), np.concatenate(streams[20:])).any()


def test_a_greedy_score_is_that_of_the_most_probable_actions():
    p = PPO(SMALL)
    assert torch.equal(score(p, 7, True), evaluate(lambda obs: p.agent.policy(torch.from_numpy(obs)).argmax(-1).numpy(), 7))


@pytest.mark.parametrize("greedy, sampled, solved", [(475, 475, True), (500, 474.9, False), (474.9, 500, False), (500, 500, True), (20, 20, False)])
def test_solved_needs_both_means(monkeypatch, greedy, sampled, solved):
    monkeypatch.setattr(cartpole, "score", lambda ppo, seed, g: torch.tensor([0.0, 2.0 * (greedy if g else sampled)], dtype=torch.float64))
    p = PPO(SMALL)
    got = scores(p)
    assert got["solved"] is solved and got["eval_return_mean"] == pytest.approx(greedy) and got["eval_sampled_return_mean"] == pytest.approx(sampled) and got["eval_episodes"] == 2
    assert got["eval_return_std"] == pytest.approx(greedy * 2 ** 0.5) and got["eval_sampled_return_std"] == pytest.approx(sampled * 2 ** 0.5)
    monkeypatch.setattr(cartpole, "threshold", lambda env_id: None)
    assert scores(p)["solved"] is None


@pytest.mark.parametrize("episodes, error, words", [(0, ValueError, r"episodes must be in \[1, inf\), got 0"), (-3, ValueError, r"episodes must be in \[1, inf\), got -3"), (2.5, TypeError, "episodes must be an integer, got 2.5")])
def test_an_evaluation_has_an_episode(episodes, error, words):
    with pytest.raises(error, match=f"^{words}$"): evaluate(lambda obs: np.zeros(len(obs), int), 0, episodes)


def test_thresholds():
    assert (threshold("CartPole-v1"), threshold("Pendulum-v1"), threshold("Acrobot-v1")) == (475, -200, -100)
    gym.register("rlhf_notes/NoThreshold-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
    try: assert threshold("rlhf_notes/NoThreshold-v0") is None and threshold("gymnasium:Pendulum-v1") == -200
    finally: del gym.registry["rlhf_notes/NoThreshold-v0"]
    with pytest.raises(ValueError, match="^env must be an environment that Gymnasium can make, got 'Nope-v0': "): threshold("Nope-v0")


class Switches(gym.Env):
    "Box observations, but two actions at a time."
    observation_space, action_space = gym.spaces.Box(0, 1, (2,), np.float32), gym.spaces.MultiDiscrete([2, 2])
    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}
    def step(self, action): return np.zeros(2, np.float32), 0.0, False, False, {}


def test_check_env():
    for name in ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCarContinuous-v0"): check_env(name)
    gym.register("rlhf_notes/Switches-v0", entry_point=Switches)
    try:
        for name, message in (("CartPool-v1", "env must be an environment"), ("FrozenLake-v1", "env must have Box observations"), ("rlhf_notes/Switches-v0", "env must have Discrete actions")):
            with pytest.raises(ValueError, match=message): check_env(name)
    finally: del gym.registry["rlhf_notes/Switches-v0"]


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_a_pass_is_cut_as_its_minibatches_are(parts):
    b = some_batch()
    got = b.shuffled(parts, torch.Generator().manual_seed(5))
    expected = [b[rows] for rows in minibatches(len(b), parts, torch.Generator().manual_seed(5))]
    assert len(got) == parts == len(expected) and not torch.equal(torch.cat([x.obs for x in got]), b.obs)
    for x, y in zip(got, expected):
        for f in fields(b): assert torch.equal(getattr(x, f.name), getattr(y, f.name))


def test_check_start(monkeypatch, tmp_path):
    "What is not there, does not fit, or belongs to something else, is said before a run is begun; nothing is left open."
    opened, original = [], cartpole.make_envs
    monkeypatch.setattr(cartpole, "make_envs", lambda *args: (opened.append(original(*args)), opened[-1])[1])
    check_start(SMALL); check_start(HARD)
    state = {"ppo": PPO(SMALL).state_dict(), "clock": {}}
    opened.pop().close()
    def left(state): return Run(tmp_path, {}, checkpoint=state)
    check_start(SMALL, left(state))
    for config, wrong in ((replace(SMALL, hidden=16), state), (SMALL, {}), (SMALL, {"ppo": state["ppo"]}), (SMALL, state | {"clock": 5}), (SMALL, {"ppo": 5, "clock": {}})):
        with pytest.raises(ValueError, match=f"resume must be a run directory whose checkpoint fits its config.json, got {tmp_path}: "): check_start(config, left(wrong))
    assert sum(hasattr(envs, "envs") for envs in opened) == 2 and all(envs.closed for envs in opened if hasattr(envs, "envs"))           # Gymnasium's CartPole does not say
    for size in (dict(hidden=10 ** 12), dict(num_steps=10 ** 15, steps=10 ** 17), dict(num_envs=10 ** 15, steps=10 ** 17)):
        with pytest.raises(ValueError, match="num_envs, num_steps and hidden must fit into memory"): check_start(SimpleNamespace(**{name: getattr(SMALL, name) for name in dir(SMALL) if name[0] != "_"} | size))
    monkeypatch.setenv("RANK", "1"); monkeypatch.setenv("WORLD_SIZE", "1")
    check_start(SMALL)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="CartPole-v1 must be trained by one process, got 2"): check_start(SMALL)


def test_an_environment_is_checked_as_it_will_be_made():
    gym.register("rlhf_notes/OnlyVector-v0", vector_entry_point=CartPoleVectorEnv)
    try:
        check_env("rlhf_notes/OnlyVector-v0")
        with pytest.raises(ValueError, match="env must be an environment that Gymnasium can make"): check_env("rlhf_notes/OnlyVector-v0", "sync")
    finally: del gym.registry["rlhf_notes/OnlyVector-v0"]


# the loop

def iterate_all(config):
    p = PPO(config)
    return p, [p.iterate() for _ in range(config.iterations)]


def test_an_iteration_sees_each_row_once_in_each_pass(monkeypatch):
    seen, original = [], cartpole.ppo_loss
    monkeypatch.setattr(cartpole, "ppo_loss", lambda a, b, c, clip: (seen.append(b), original(a, b, c, clip))[1])
    batches, make = [], cartpole.make_batch
    monkeypatch.setattr(cartpole, "make_batch", lambda *args: batches.append(make(*args)) or batches[-1])
    PPO(SMALL).iterate()
    assert len(seen) == SMALL.epochs * SMALL.minibatches
    key = lambda b: sorted(map(tuple, torch.cat([b.obs, b.logp[:, None], b.returns[:, None]], 1).tolist()))
    join = lambda bs: Batch(*(torch.cat([getattr(b, f.name) for b in bs]) for f in fields(Batch)))
    n = SMALL.minibatches
    for epoch in range(SMALL.epochs): assert key(join(seen[epoch * n:epoch * n + n])) == key(batches[0])
    assert not torch.equal(seen[0].obs, seen[4].obs)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_gradients_are_shortened_and_learning_rate_and_clip_fall(monkeypatch, power):
    norms, rates, clips, measured, original, measure = [], [], [], [], cartpole.ppo_loss, cartpole.health
    monkeypatch.setattr(cartpole, "ppo_loss", lambda a, b, c, clip: (clips.append(clip), original(a, b, c, clip))[1])
    monkeypatch.setattr(cartpole, "health", lambda a, b, c, clip: (measured.append(clip), measure(a, b, c, clip))[1])
    p = PPO(replace(SMALL, max_grad_norm=0.25, learning_rate=2e-3, lr_anneal=power, clip_anneal=2 - power, clip=0.3))
    step = p.optimizer.step
    def spy(rate):
        norms.append(torch.cat([q.grad.flatten() for q in p.agent.parameters()]).norm().item()); rates.append(rate)
        return step(rate)
    monkeypatch.setattr(p.optimizer, "step", spy)
    rows = [p.iterate() for _ in range(8)]
    assert max(norms) <= 0.2501 and rows[0]["grad_norm"] > 0.25
    left, n = [1 - i / 8 for i in range(8)], SMALL.epochs * SMALL.minibatches
    assert [r["learning_rate"] for r in rows] == pytest.approx([2e-3 * x ** power for x in left]) and rates[::n] == pytest.approx([r["learning_rate"] for r in rows])
    assert clips[::n] == pytest.approx([0.3 * x ** (2 - power) for x in left]) and clips[n - 1::n] == clips[::n] and measured == clips[::n]
    assert p.optimizer.eps == 1e-5 and PPO(replace(SMALL, adam_eps=1e-3)).optimizer.eps == 1e-3


@pytest.mark.parametrize("target_kl, passes", [(0.0, 6), (1e-12, 1), (1e3, 6)])
def test_target_kl_stops_the_passes(monkeypatch, target_kl, passes):
    count, original = [], cartpole.ppo_loss
    monkeypatch.setattr(cartpole, "ppo_loss", lambda *args: (count.append(0), original(*args))[1])
    p = PPO(replace(SMALL, epochs=6, target_kl=target_kl))
    p.iterate()
    assert len(count) == passes * SMALL.minibatches


def test_a_target_kl_in_between_stops_after_the_pass_that_went_too_far(monkeypatch):
    "With a limit of half of what six passes move, the run stops on the way, past the limit by one pass and not more."
    far = PPO(replace(SMALL, epochs=6)).iterate()["kl_k3"]
    moved, original = [], cartpole.health
    monkeypatch.setattr(cartpole, "health", lambda *args: (moved.append(original(*args)), moved[-1])[1])
    p = PPO(replace(SMALL, epochs=6, target_kl=far / 2))
    p.iterate()
    kl = [m["kl_k3"] for m in moved]
    assert 2 <= len(kl) < 7 and kl[-2] == kl[-1] > far / 2 and all(k <= far / 2 for k in kl[:-2])


def test_value_clip_is_used_in_training():
    one, two = (PPO(replace(SMALL, value_clip=v)) for v in (0.0, 0.01))
    one.iterate(); two.iterate()
    assert not torch.equal(one.agent.critic[0].weight, two.agent.critic[0].weight)


def test_more_minibatches_than_rows():
    p = PPO(PPOConfig(seed=0, steps=4 * 30, num_envs=1, num_steps=4, minibatches=4, epochs=1))
    rows = [p.iterate() for _ in range(30)]
    assert rows[-1]["episodes"] > 2 and all(math.isfinite(r["policy_loss"]) for r in rows)


def test_the_rows_count_what_happened():
    p = PPO(SMALL)
    episodes = []
    collect = p.collector.collect
    def spy(*args):
        r, e = collect(*args); episodes.extend(e); return r, e
    p.collector.collect = spy
    for i in range(8):
        row = p.iterate()
        assert (row["iteration"], row["steps"], row["episodes"]) == (i + 1, (i + 1) * 128, len(episodes))
        if episodes: assert row["return_mean"] == pytest.approx(np.mean([r for r, _ in episodes[-20:]])) and row["length_mean"] == pytest.approx(np.mean([l for _, l in episodes[-20:]]))
        else: assert row["return_mean"] is None
    assert len(episodes) > 20


HARD = replace(PENDULUM, normalize_obs=True, normalize_rewards=True)
both = pytest.mark.parametrize("config", [SMALL, HARD], ids=["cartpole", "pendulum-normalised"])


@both
def test_same_seed_same_run_and_a_saved_one_goes_on(config):
    _, a = iterate_all(config)
    _, b = iterate_all(config)
    _, other = iterate_all(replace(config, seed=4))
    assert a == b != other
    p = PPO(config)
    rows = [p.iterate() for _ in range(3)]
    q = PPO(config); q.load_state_dict(p.state_dict())
    assert rows + [q.iterate() for _ in range(5)] == a


@both
def test_a_state_is_a_copy_of_the_scaling(config):
    "What was saved does not move with the run that goes on, and holds what plain torch.load can read."
    p = PPO(config)
    p.iterate()
    state = p.state_dict()["scaling"]
    kept = json.dumps(state, default=lambda t: t.tolist())
    p.iterate()
    assert json.dumps(state, default=lambda t: t.tolist()) == kept
    assert (json.dumps(p.state_dict()["scaling"], default=lambda t: t.tolist()) != kept) == (config is HARD)


def test_training_leaves_the_global_generators_alone():
    torch.manual_seed(0); np.random.seed(0)
    expected = torch.rand(3), np.random.rand(3)
    torch.manual_seed(0); np.random.seed(0)
    p = PPO(SMALL)
    torch.manual_seed(0)                                        # torch initialises layers before we do
    p.iterate()
    assert torch.equal(torch.rand(3), expected[0]) and (np.random.rand(3) == expected[1]).all()


def test_a_gpu_is_asked_for_where_it_is_not():
    if torch.cuda.is_available(): pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="device 'cuda' is not there"): PPO(replace(SMALL, device="cuda"))


# the run

@both
def test_metrics_are_the_same_bytes_straight_or_interrupted_anywhere(tmp_path, monkeypatch, config):
    straight = Run.create(tmp_path / "straight", {"task": "some"})
    _, rows, expected_summary = train(config, straight)
    expected = (straight.path / "metrics.csv").read_bytes()
    assert len(expected.splitlines()) == 9 and len(rows) == 8
    for stop_at in (0, 1, 5) if config is SMALL else (3,):
        run, iterate = Run.create(tmp_path / f"stop{stop_at}", {"task": "some"}), PPO.iterate
        def interrupted(self):
            row = iterate(self)
            if self.iteration == max(stop_at, 1): signal.raise_signal(signal.SIGINT)
            return row
        with monkeypatch.context() as m:
            if stop_at == 0: m.setattr(cartpole, "PPO", lambda config: (signal.raise_signal(signal.SIGINT), PPO(config))[1])
            else: m.setattr(PPO, "iterate", interrupted)
            _, _, summary = train(config, run)
        assert summary["interrupted"] and summary["solved"] is False and summary["eval_return_mean"] is None and summary["steps"] == stop_at * 128
        assert json.loads((run.path / "summary.json").read_text()) == summary
        assert {"checkpoint.pt", "curve.svg", "config.json"} <= {p.name for p in run.path.iterdir()}
        ppo, rows, summary = train(config, Run.resume(run.path))
        assert (run.path / "metrics.csv").read_bytes() == expected and len(rows) == 8 and summary["steps"] == 1024 and not summary["interrupted"]
        assert {k: summary[k] for k in cartpole.SCORES} == {k: expected_summary[k] for k in cartpole.SCORES}


class Broken(gym.Env):
    "Rewards or observations that are no numbers, from the 100th step."
    observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (2,)), gym.spaces.Discrete(2)
    def __init__(self, what): self.what, self.t = what, 0
    def reset(self, *, seed=None, options=None): super().reset(seed=seed); return np.zeros(2, np.float32), {}
    def step(self, action):
        self.t += 1
        nan = math.nan if self.t > 100 else 0.5
        return np.full(2, nan if self.what == "obs" else 0, np.float32), nan if self.what == "reward" else 0.5, self.t % 10 == 0, False, {}


@pytest.mark.parametrize("what, words", [("reward", "iteration 4: return_mean is nan, policy_loss is nan"), ("obs", "iteration 4: policy_loss is nan"), ("rate", "iteration 1: policy_loss is nan")])
def test_a_training_that_comes_to_nan_ends_there(tmp_path, monkeypatch, what, words):
    monkeypatch.setattr(cartpole, "CHECKPOINT_EVERY", -1.0)
    monkeypatch.setitem(gym.registry, "Broken-v0", gym.envs.registration.EnvSpec("Broken-v0", Broken, max_episode_steps=500, kwargs={"what": what}, disable_env_checker=True))
    run, config = Run.create(tmp_path / "run", {"task": "some"}), replace(SMALL, env="Broken-v0") if what != "rate" else replace(SMALL, learning_rate=1e30)
    with pytest.raises(FloatingPointError, match=words + ".*the last checkpoint, if there is one, is from before"): train(config, run)
    assert not (run.path / "summary.json").exists()
    if what != "rate": assert Run.resume(run.path).checkpoint["ppo"]["iteration"] == 3 and len((run.path / "metrics.csv").read_text().splitlines()) == 4


class Bad(Broken):
    "A number that is not finite from the 100th step."
    def __init__(self, what, number): super().__init__(None); self.bad, self.number = what, number
    def step(self, action):
        obs, reward, *rest = super().step(action)
        obs += 0.01 * self.t % 7
        if self.t > 100 and self.bad == "observations": obs[1] = self.number
        return obs, self.number if self.t > 100 and self.bad == "rewards" else reward, *rest


@pytest.mark.parametrize("what", ["observations", "rewards"])
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_numbers_that_cannot_be_normalized_end_a_training(tmp_path, monkeypatch, what, number):
    monkeypatch.setattr(cartpole, "CHECKPOINT_EVERY", -1.0)
    monkeypatch.setitem(gym.registry, "Bad-v0", gym.envs.registration.EnvSpec("Bad-v0", Bad, max_episode_steps=500, kwargs={"what": what, "number": float(number)}, disable_env_checker=True))
    run, config = Run.create(tmp_path / "run", {"task": "some"}), replace(SMALL, env="Bad-v0", normalize_obs=what == "observations", normalize_rewards=what == "rewards")
    with pytest.raises(FloatingPointError, match=f"^iteration 4: {what} must be finite to be normalized, got {number}; the last checkpoint, if there is one, is from before$"): train(config, run)
    assert Run.resume(run.path).checkpoint["ppo"]["iteration"] == 3 and len((run.path / "metrics.csv").read_text().splitlines()) == 4


def test_rewards_whose_sum_is_no_number_are_not_normalized_either():
    r = Rollout(torch.zeros(4, 2, 1), torch.zeros(4, 2), torch.full((4, 2), 2e38), torch.zeros(4, 2, 1), *torch.zeros(2, 4, 2, dtype=torch.bool), torch.ones(4, 2, dtype=torch.bool))
    with pytest.raises(FloatingPointError, match="^rewards must be finite to be normalized, got inf$"): Scaling(replace(SMALL, num_envs=2, gamma=1.0, normalize_rewards=True), 1)(r)


def test_numbers_of_a_seam_may_be_anything():
    "They are no data."
    seam = torch.tensor([[False, True], [True, False]])
    r = Rollout(torch.where(seam[..., None], math.nan, torch.rand(2, 2, 1)), torch.zeros(2, 2), torch.where(seam, math.inf, 1.0), torch.zeros(2, 2, 1), *torch.zeros(2, 2, 2, dtype=torch.bool), ~seam)
    scaling = Scaling(replace(SMALL, num_envs=2, normalize_obs=True, normalize_rewards=True), 1)
    scaling(r)
    assert scaling.seen.count == scaling.earned.count == 2


def test_another_mistake_is_not_taken_for_such_numbers():
    with pytest.raises(ValueError, match="x must have a shape"): cartpole.take_in(RunningMoments((2,)), "observations", torch.zeros(3, 1), torch.ones(3, dtype=torch.bool))


class Dice(random.Random):
    "No generator of NumPy's."


class Gambling(Broken):
    def __init__(self): super().__init__(None)
    def reset(self, *, seed=None, options=None):
        if seed is not None: self.np_random = Dice(seed)
        return np.full(2, self.np_random.random(), np.float32), {}


def test_a_generator_that_cannot_be_saved_does_not_end_a_training(tmp_path, monkeypatch):
    monkeypatch.setitem(gym.registry, "Gambling-v0", gym.envs.registration.EnvSpec("Gambling-v0", Gambling, max_episode_steps=500, disable_env_checker=True))
    run, config = Run.create(tmp_path / "run", {"task": "some"}), replace(SMALL, env="Gambling-v0", steps=256)
    ppo, _, summary = train(config, run)
    assert summary["steps"] == 256 and (run.path / "summary.json").exists()
    with pytest.raises(ValueError, match="got Gambling.np_random, a Dice"): ppo.collector.state_dict()
    checkpoint = Run.resume(run.path).checkpoint["ppo"]
    assert checkpoint["collector"] is None and checkpoint["agent"].keys() == ppo.agent.state_dict().keys()
    with pytest.raises(ValueError, match="resume must be a run whose environments can be saved, got one of Gambling-v0"): PPO(config).load_state_dict(checkpoint)


def test_returns_that_are_all_alike_are_no_divergence():
    cartpole.check_numbers(dict(iteration=1, explained_variance=math.nan, return_mean=None, kl_k3=0.0, steps=3))


class Endless(gym.Env):
    "No episode ends."
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None): super().reset(seed=seed); return np.zeros(2, np.float32), {}
    def step(self, action): return np.zeros(2, np.float32), 1.0, False, False, {}


def test_an_evaluation_without_a_time_limit_ends(tmp_path, monkeypatch):
    monkeypatch.setitem(gym.registry, "Endless-v0", gym.envs.registration.EnvSpec("Endless-v0", Endless))
    with pytest.warns(UserWarning, match="Endless-v0 names no max_episode_steps: 3 of 3 episodes were cut off after 50 steps"):
        assert evaluate(lambda obs: np.zeros(len(obs), int), 0, 3, "Endless-v0", longest=50).tolist() == [50.0] * 3
    assert (evaluate(lambda obs: np.zeros((len(obs), 1)), 0, 2, "Pendulum-v1", longest=5) < -100).all()               # one that has its own ends there


def test_ctrl_c_in_the_evaluation_leaves_a_run_that_can_be_evaluated_later(tmp_path, monkeypatch):
    monkeypatch.setitem(gym.registry, "Endless-v0", gym.envs.registration.EnvSpec("Endless-v0", Endless))
    config, calls, original = replace(SMALL, env="Endless-v0", steps=128), [], evaluate
    def asked(choose, seed, env_id):
        def later(obs):
            calls.append(0)
            if len(calls) == 7: signal.raise_signal(signal.SIGINT)
            return choose(obs)
        return original(later, seed, 2, env_id)
    run = Run.create(tmp_path / "run", {"task": "some"})
    with monkeypatch.context() as m:
        m.setattr(cartpole, "evaluate", asked)
        ppo, rows, summary = train(config, run)
    assert len(calls) == 7 and len(rows) == 1 and summary["interrupted"] and summary["steps"] == 128
    assert summary["solved"] is None and summary["eval_return_mean"] is None                # nobody says from where on it is solved
    with monkeypatch.context() as m:
        m.setattr(cartpole, "evaluate", lambda choose, seed, env_id: original(choose, seed, 2, env_id, longest=9))
        with pytest.warns(UserWarning, match="cut off"): _, _, summary = train(config, Run.resume(run.path))
    assert not summary["interrupted"] and summary["eval_return_mean"] == 9


def test_killed_between_two_checkpoints_it_continues_from_the_last(tmp_path, monkeypatch):
    straight = Run.create(tmp_path / "straight", {"task": "cartpole"})
    train(SMALL, straight)
    run, iterate = Run.create(tmp_path / "killed", {"task": "cartpole"}), PPO.iterate
    def dies(self):
        if self.iteration == 5: raise MemoryError
        monkeypatch.setattr(cartpole, "CHECKPOINT_EVERY", 0.0 if self.iteration == 2 else 1e9)
        return iterate(self)
    with monkeypatch.context() as m:
        m.setattr(PPO, "iterate", dies)
        with pytest.raises(MemoryError): train(SMALL, run)
    assert Run.resume(run.path).checkpoint["ppo"]["iteration"] == 3 and len((run.path / "metrics.csv").read_text().splitlines()) == 6
    train(SMALL, Run.resume(run.path))
    assert (run.path / "metrics.csv").read_bytes() == (straight.path / "metrics.csv").read_bytes()


def test_the_summary_says_what_was_promised(tmp_path, monkeypatch):
    monkeypatch.setattr(cartpole, "threshold", lambda env_id: 22.0); monkeypatch.setattr(cartpole, "RECENT", 10)
    run = Run.create(tmp_path / "run", {"task": "cartpole"})
    _, rows, s = train(SMALL, run)
    assert {"task", "env", "algo", "seed", "device", "steps", "wall_seconds", "eval_return_mean", "eval_return_std", "eval_episodes", "solved", "steps_to_solve", "seconds_to_solve", "interrupted",
            "eval_sampled_return_mean", "eval_sampled_return_std"} == set(s)
    assert json.loads((run.path / "summary.json").read_text()) == s
    assert (s["task"], s["env"], s["algo"], s["seed"], s["device"], s["steps"], s["eval_episodes"]) == ("cartpole", "CartPole-v1", "ppo", 3, "cpu", 1024, 100)
    first = next((r["steps"] for r in rows if r["episodes"] >= 10 and r["return_mean"] >= 22), None)
    assert s["steps_to_solve"] == first and first is not None and 0 < s["seconds_to_solve"] <= s["wall_seconds"]
    assert s["solved"] == (min(s["eval_return_mean"], s["eval_sampled_return_mean"]) >= 22) and isinstance(s["solved"], bool)
    monkeypatch.setattr(cartpole, "threshold", lambda env_id: 475.0)
    _, _, s = train(SMALL)
    assert s["steps_to_solve"] is None and s["seconds_to_solve"] is None and s["solved"] is False and s["task"] == "CartPole-v1"
    monkeypatch.setattr(cartpole, "threshold", lambda env_id: None)
    _, _, s = train(replace(SMALL, steps=128))
    assert s["solved"] is None and s["steps_to_solve"] is None


def test_too_few_episodes_solve_nothing(monkeypatch):
    "With a threshold that the first episode passes, `steps_to_solve` still waits until RECENT episodes have ended."
    monkeypatch.setattr(cartpole, "threshold", lambda env_id: 1.0)
    _, rows, s = train(SMALL)
    waited = [r["steps"] for r in rows if r["episodes"] >= cartpole.RECENT]
    assert rows[0]["episodes"] < cartpole.RECENT and s["steps_to_solve"] == waited[0] > rows[0]["steps"]


def test_nothing_is_learned_without_the_surrogate(monkeypatch):
    "The same budget, with the formula and with zero in its place."
    config = PPOConfig(seed=0, steps=10240)
    learned, _ = iterate_all(config)
    with monkeypatch.context() as m:
        m.setattr(cartpole, "clipped_surrogate", lambda ratio, A, clip: ratio * 0)
        idle, _ = iterate_all(replace(config, steps=2560))
    assert torch.equal(idle.agent.policy[0].weight, PPO(config).agent.policy[0].weight)
    assert score(learned, 1, True).mean() > 100 and score(idle, 1, False).mean() < 40


def test_any_environment_with_a_box(monkeypatch):
    "Discrete actions that do not begin at 0 and a continuous task with a threshold of Gymnasium: two iterations and an evaluation each."
    for env in ("Acrobot-v1", "MountainCarContinuous-v0"):
        monkeypatch.setattr(cartpole, "evaluate", lambda choose, seed, env_id, original=evaluate: original(choose, seed, episodes=2, env_id=env_id))
        _, rows, s = train(replace(SMALL, env=env, steps=256))
        assert len(rows) == 2 and s["solved"] is False and all(math.isfinite(v) for r in rows for k, v in r.items() if v is not None and k != "explained_variance")


def test_drawings(tmp_path):
    _, rows, summary = train(replace(SMALL, steps=128))
    for rows, summary in ((rows, summary), ([], summary | dict(interrupted=True, eval_return_mean=None))):
        figure = Figure()
        cartpole.plot_run(figure, rows, summary)
        assert len(figure.axes) == 4 and ("interrupted" in figure.axes[3].get_xlabel()) == summary["interrupted"]
        figure.savefig(tmp_path / "f.svg")
    with matplotlib.rc_context():
        viz.style()
        figure = Figure()
        cartpole.plot_run(figure, rows, summary | dict(eval_return_mean=20.0, eval_sampled_return_mean=20.0))
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert len(figure.legends[0].texts) == 3 and not any(box.overlaps(ax.get_window_extent()) for ax in figure.axes), "a legend lies on a curve"
    ax = Figure().subplots()
    cartpole.draw_cartpole(ax, [1.0, 0.0, math.pi / 6, 0.0])
    pole = ax.lines[-1]
    assert pole.get_xdata()[1] - pole.get_xdata()[0] == pytest.approx(0.5) and pole.get_ydata()[1] - pole.get_ydata()[0] == pytest.approx(math.cos(math.pi / 6))


# the optimiser

def test_training_does_not_import_the_compiler():
    "It takes as long to import as CartPole to be solved."
    code = "import sys; from rlhf_notes.control.ppo import PPO, PPOConfig; p = PPO(PPOConfig(num_envs=2)); p.iterate(); p.state_dict(); print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# environments whose state nobody can save

def test_environments_in_processes_train_to_the_end_and_cannot_be_resumed(tmp_path):
    config = replace(PENDULUM, vectorization="async", steps=2 * 128, num_envs=2, num_steps=64)
    _, rows, summary = train(config, Run.create(tmp_path / "run", {"task": "train"}))
    assert len(rows) == 2 and summary["eval_return_mean"] < 0 and (tmp_path / "run" / "curve.svg").exists()
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["state"]["ppo"]
    fresh = Agent(3, TORQUE, config, torch.Generator().manual_seed(9))
    fresh.load_state_dict(state["agent"])                                   # what was learned is there
    with pytest.raises(ValueError, match=r"resume must be a run whose environments can be saved, got one of Pendulum-v1 \(async\)"): PPO(config).load_state_dict(state)
