"""What each choice in the recipe for Pendulum is worth: each variant with seeds 0 to 19, evaluated
greedily and sampled, on one thread.

    python benchmarks/pendulum_study.py
    python benchmarks/pendulum_study.py --seeds 2 --only baseline "truncation as termination"

Writes pendulum_study.csv (variant, seed, greedy, sampled: mean return over 100 fresh episodes),
pendulum_study_curves.csv (training return and the policy's standard deviation after every second
iteration) and pendulum_study_values.csv (V against the discounted return that was really earned, by
a policy that is not cut off). What stands in pendulum_study.csv already is not run again; --fresh
starts over. Everything comes out the same again on the same machine; another one may round float32
differently.
"""
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
from jobs import options, read, side_by_side, text, write

SHIFT = 8.0  # added to each reward: upright earns about 8 a step, hanging about -2
# name -> options of PendulumConfig, all environments started together; `trained` does the rest
VARIANTS = {
    "baseline": {},
    "truncation as termination": dict(truncation="terminate"),
    "gamma .99": dict(gamma=0.99),
    "gamma .99, truncation as termination": dict(gamma=0.99, truncation="terminate"),
    "reward + 8": {},
    "reward + 8, truncation as termination": dict(truncation="terminate"),
    "tanh": dict(activation="tanh"),
    "reward scale 1": dict(reward_scale=1.0),
    "log std -1": dict(log_std=-1.0),
    "log std 0": dict(log_std=0.0),
    "log std 2": dict(log_std=2.0),
    "fixed std 1": dict(log_std=0.0),
    "the old program": None,
    "the old program, 200,000 steps": None,
}
OUT = Path(__file__).resolve().parent.parent / "nbs" / "control" / "results"
FILES = dict(study=("variant", "seed", "greedy", "sampled"),
             curves=("variant", "seed", "steps", "return_mean", "std"),
             values=("variant", "seed", "where", "steps", "expected", "earned"))


def trained(config, shift=0.0, fixed_std=False):
    "PPO after training, and (steps, return_mean, std) of each iteration."
    from rlhf_notes.control.rollout import Scaling
    from rlhf_notes.control.trainer import PPO

    class Shifted(Scaling):
        def __call__(self, rollout):
            return super().__call__(replace(rollout, rewards=rollout.rewards + shift))

    ppo, curve = PPO(**vars(config)), []
    if shift: ppo.scaling = Shifted(config, 3)
    if fixed_std: ppo.agent.head.log_std.requires_grad_(False)
    for _ in range(config.iterations):
        row = ppo.iterate()
        spent = ppo.iteration * config.batch  # with resets
        curve.append((spent, row["return_mean"], ppo.agent.head.log_std.exp().item()))
    return ppo, curve


def old_program(seed, steps=50_000, bootstrap=False):
    """A program for Pendulum as it stands in many tutorials: a ReLU trunk that policy and value
    share, mean 2 tanh(.), standard deviation 1, ten full-batch steps of Adam (1e-3) after every ten
    episodes, gamma 0.99, lambda 0.95, advantages as they are. It keeps one flag `done`, so the end
    of the 200 steps is an end. Ten episodes of one policy are here one episode of each of ten
    environments side by side."""
    import torch
    from torch import nn

    from rlhf_notes.control.envs import make_envs
    from rlhf_notes.control.ppo import seeds
    from rlhf_notes.control.spaces import row_maker
    from rlhf_notes.control.trainer import episode_returns
    from rlhf_notes.formulas.advantage import gae
    from rlhf_notes.formulas.logprob import gaussian_log_prob
    from rlhf_notes.formulas.surrogate import clipped_surrogate
    env_seed, agent_seed, greedy_seed, sampled_seed = seeds(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(agent_seed)
        trunk = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        mean, value = nn.Linear(64, 1), nn.Linear(64, 1)
    adam = torch.optim.Adam([p for net in (trunk, mean, value) for p in net.parameters()], lr=1e-3)
    rng, envs, curve = np.random.default_rng(agent_seed), make_envs("Pendulum-v1", 10), []
    rows = row_maker(envs.single_observation_space)

    @torch.no_grad()
    def act(obs, rng=None):
        mu = 2 * torch.tanh(mean(trunk(torch.from_numpy(obs)))).numpy()
        return mu if rng is None else mu + rng.standard_normal(mu.shape, dtype=np.float32)

    for update in range(steps // 2000):
        obs, after = np.empty((2, 200, 10, 3), np.float32)
        actions, rewards = np.empty((200, 10, 1), np.float32), np.empty((200, 10), np.float32)
        now, _ = envs.reset(seed=env_seed if update == 0 else None)
        for t in range(200):
            obs[t] = rows(now)
            actions[t] = act(obs[t], rng)
            now, rewards[t], _, _, _ = envs.step(np.clip(actions[t], -2, 2))
            after[t] = rows(now)
        obs, after, actions, rewards = map(torch.from_numpy, (obs, after, actions, rewards))
        done = torch.zeros(200, 10, dtype=torch.bool)
        done[-1] = True
        one = torch.ones(200, 10, 1)
        with torch.no_grad():
            old = gaussian_log_prob(actions, 2 * torch.tanh(mean(trunk(obs))), one)
            V, V_after = value(trunk(obs))[..., 0], value(trunk(after))[..., 0]
            advantages, returns = gae(rewards, V, V_after, done & (not bootstrap), done, 0.99, 0.95)
        for _ in range(10):
            h = trunk(obs)
            ratio = (gaussian_log_prob(actions, 2 * torch.tanh(mean(h)), one) - old).exp()
            error = value(h)[..., 0] - returns
            loss = -clipped_surrogate(ratio, advantages).mean() + 0.5 * error.square().mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
        curve.append((2000 * (update + 1), rewards.sum(0).mean().item(), 1.0))
    envs.close()
    greedy = episode_returns(act, greedy_seed, env="Pendulum-v1")
    noise = np.random.default_rng((sampled_seed, 1))  # not the environments' own stream
    sampled = episode_returns(lambda obs: np.clip(act(obs, noise), -2, 2), sampled_seed,
                              env="Pendulum-v1")
    return greedy.mean().item(), sampled.mean().item(), curve


def value_check(ppo, shift=0.0, num_envs=32, steps=200, more=400):
    """V along episodes that nobody cuts off, and what the sampled policy earned from there on,
    discounted, in the units of the environment: rows (where, steps, expected, earned)."""
    import gymnasium as gym
    import torch

    from rlhf_notes.control.ppo import seeds
    from rlhf_notes.control.rollout import Collector
    c, seed = ppo.config, seeds(ppo.config.seed)[3]
    envs = gym.vector.SyncVectorEnv([lambda: gym.make(c.env, max_episode_steps=10 ** 6)] * num_envs)
    policy = ppo.policy(np.random.default_rng((seed, 1)))
    rollout, _ = Collector(envs, seed).collect(policy, steps + more, ppo.agent.head.for_env)
    with torch.no_grad(): expected = (ppo.agent.value(rollout.obs) / c.reward_scale).double()
    earned, after = torch.zeros_like(expected), 0.0
    for t in reversed(range(steps + more)):
        after = earned[t] = rollout.rewards[t].double() + shift + c.gamma * after
    # within 0.2 rad of upright and all but at rest
    up = (rollout.obs[..., 0] > np.cos(0.2)) & (rollout.obs[..., 2].abs() < 0.5)
    up, expected, earned = up[:steps], expected[:steps], earned[:steps]
    envs.close()
    return [(name, int(where.sum()), expected[where].mean().item(), earned[where].mean().item())
            for name, where in (("upright", up), ("elsewhere", ~up)) if where.any()]


def run(variant, seed):
    "The rows of one training for each of `FILES`, without variant and seed."
    import torch

    from rlhf_notes.control.config import PendulumConfig
    torch.set_num_threads(1)
    if VARIANTS[variant] is None:
        greedy, sampled, curve = old_program(seed, 200_000 if "200,000" in variant else 50_000)
        return variant, seed, dict(study=[(greedy, sampled)], curves=curve[1::2], values=[])
    shift = SHIFT if "reward +" in variant else 0.0
    config = PendulumConfig(seed=seed, stagger=False, **VARIANTS[variant])
    ppo, curve = trained(config, shift, variant == "fixed std 1")
    s = ppo.scores()
    scores = s["eval_return_mean"], s["eval_sampled_return_mean"]
    return variant, seed, dict(study=[scores], curves=curve[1::2], values=value_check(ppo, shift))


def main():
    args = options(__doc__, OUT, 20, VARIANTS)
    paths = {name: args.out / f"pendulum_{'study_' * (name != 'study')}{name}.csv"
             for name in FILES}
    tables = {name: [] if args.fresh else read(path, FILES[name]) for name, path in paths.items()}
    there = {tuple(row[:2]) for row in tables["study"]}
    for name in tables:  # no job cut off halfway
        tables[name] = [row for row in tables[name] if tuple(row[:2]) in there]
    todo = [(variant, seed) for seed, variant in product(args.seeds, args.only)
            if (variant, str(seed)) not in there]
    order = list(VARIANTS)
    for variant, seed, rows in side_by_side(run, todo, args.jobs, lambda job: 8.0):
        for name in ("curves", "values", "study"):
            tables[name] += [[variant, str(seed), *map(text, row)] for row in rows[name]]
            tables[name].sort(key=lambda r: (order.index(r[0]), int(r[1])))
            write(paths[name], FILES[name], tables[name])


if __name__ == "__main__":
    main()
