"""PPO in one class of plain PyTorch, in the manner of CleanRL: what lesson 19 opens with."""

__all__ = ['SingleFile']

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from .policy import mlp


class SingleFile:
    "PPO as a single file has it."
    gamma, lam, clip, value_coef, max_grad_norm = 0.99, 0.95, 0.2, 0.5, 0.5

    def __init__(self, env_id: str, seed: int, **settings):  # as in `SINGLE_FILE`
        args = self.args = SimpleNamespace(**settings)
        self.batch = args.num_envs * args.num_steps
        self.iterations, self.iteration = args.total // self.batch, 0
        torch.manual_seed(seed)
        space = gym.spec(env_id).make().action_space
        self.discrete, self.space = isinstance(space, gym.spaces.Discrete), space
        make = [lambda: self._environment(env_id)] * args.num_envs
        autoreset = gym.vector.AutoresetMode.SAME_STEP
        self.envs = gym.vector.SyncVectorEnv(make, autoreset_mode=autoreset)
        size = self.envs.single_observation_space.shape[0]
        outputs = int(space.n) if self.discrete else space.shape[0]
        self.actor, self.critic = mlp(size, outputs, 0.01), mlp(size, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(1, outputs))
        self.parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.parameters += [self.log_std] * (not self.discrete)
        self.optimizer = torch.optim.Adam(self.parameters, lr=args.learning_rate, eps=1e-5)
        self.obs = torch.tensor(self.envs.reset(seed=seed)[0], dtype=torch.float32)
        self.done = torch.zeros(args.num_envs)

    def _environment(self, env_id):
        w, env = gym.wrappers, gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))
        if self.discrete: return env
        env = w.NormalizeObservation(w.ClipAction(env))
        env = w.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), env.observation_space)
        env = w.NormalizeReward(env, gamma=self.gamma)
        return w.TransformReward(env, lambda reward: float(np.clip(reward, -10, 10)))

    def _distribution(self, obs):
        out = self.actor(obs)
        if self.discrete: return torch.distributions.Categorical(logits=out)
        normal = torch.distributions.Normal(out, self.log_std.exp())
        return torch.distributions.Independent(normal, 1)

    @torch.no_grad()
    def _collect(self):
        steps, rewards = [], []
        for _ in range(self.args.num_steps):
            pi, value = self._distribution(self.obs), self.critic(self.obs).squeeze(-1)
            action = pi.sample()
            steps.append((self.obs, action, pi.log_prob(action), value, self.done))
            obs, reward, terminated, truncated, _ = self.envs.step(action.numpy())
            rewards.append(torch.tensor(reward, dtype=torch.float32))
            self.obs = torch.tensor(obs, dtype=torch.float32)
            self.done = torch.tensor(terminated | truncated, dtype=torch.float32)
        return [torch.stack(x) for x in zip(*steps)], torch.stack(rewards)

    @torch.no_grad()
    def _advantages(self, rewards, values, dones):
        advantages, advantage = torch.zeros_like(rewards), 0.0
        value, alive = self.critic(self.obs).squeeze(-1), 1 - self.done
        for t in reversed(range(len(rewards))):
            delta = rewards[t] + self.gamma * value * alive - values[t]
            advantages[t] = advantage = delta + self.gamma * self.lam * alive * advantage
            value, alive = values[t], 1 - dones[t]
        return advantages

    def iterate(self):
        "Collect once, learn from it."
        args, left = self.args, 1 - self.iteration / self.iterations
        self.optimizer.param_groups[0]["lr"] = args.learning_rate * left
        (obs, actions, logp_old, values, dones), rewards = self._collect()
        advantages = self._advantages(rewards, values, dones)
        data = obs, actions, logp_old, values, advantages, advantages + values
        data = [x.flatten(0, 1) for x in data]
        for _ in range(args.epochs):
            for rows in torch.randperm(self.batch).split(self.batch // args.minibatches):
                loss = self._loss(*(x[rows] for x in data))
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
                self.optimizer.step()
        self.iteration += 1

    def _loss(self, obs, actions, logp_old, value_old, adv, returns):
        pi, value = self._distribution(obs), self.critic(obs).squeeze(-1)
        ratio = (pi.log_prob(actions) - logp_old).exp()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        policy_loss = -torch.minimum(ratio * adv, clipped * adv).mean()
        near = value_old + (value - value_old).clamp(-self.clip, self.clip)
        value_loss = 0.5 * torch.maximum((value - returns) ** 2, (near - returns) ** 2).mean()
        bonus = self.args.entropy_coef * pi.entropy().mean()
        return policy_loss + self.value_coef * value_loss - bonus

    def policy(self, rng=None):  # function: (N, obs_size) array -> actions for the environments
        "The policy as it is now; rng None = the most probable actions, else sampled ones."
        seen = None if self.discrete else self.envs.envs[0].get_wrapper_attr("obs_rms")
        @torch.no_grad()
        def choose(obs):
            if not self.discrete:
                obs = np.clip((obs - seen.mean) / np.sqrt(seen.var + 1e-8), -10, 10)
            pi = self._distribution(torch.tensor(obs, dtype=torch.float32))
            actions = (pi.mode if rng is None else pi.sample()).numpy()
            return actions if self.discrete else actions.clip(self.space.low, self.space.high)
        return choose
