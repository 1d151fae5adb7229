"""Observations and rewards at unit scale, by the moments of all data so far.

A network likes inputs and targets of about size 1; but a joint may turn at 30 rad/s, and a reward
be -16. `normalize_obs` shifts and divides each component of an observation; `normalize_rewards`
divides rewards by the standard deviation of the discounted return so far,
G_t = gamma G_{t-1} + r_t. Rewards are not centred: a reward of 1 for standing must not become 0.
"""

__all__ = ['Scaling']

from dataclasses import replace

import numpy as np
import torch

from ..formulas.advantage import accumulate
from ..formulas.whitening import RunningMoments


class Scaling:
    "Observations and rewards at unit scale, if the config says so."
    LIMIT = 10.0  # in standard deviations

    def __init__(self, config, obs_size: int, byte_scale=1.0):  # as of `byte_scale`
        self.config, self.byte_scale = config, byte_scale
        self.seen = RunningMoments((obs_size,))      # of observations
        self.earned = RunningMoments(())             # of the discounted return so far,
        self.running = torch.zeros(config.num_envs)  # and that return
        self._kept = None, None, None                # see `moments`

    def obs(self, obs):  # (N, obs_size) array -> the same, float32, or bytes as they came
        "Observations for the policy; those of the first rollout are left as they are."
        if self.config.normalize_obs and self.seen.count:
            mean, std = self.moments()
            obs = ((self._fractions(obs) - mean) / std).clip(-self.LIMIT, self.LIMIT)
        return obs if obs.dtype == "uint8" else obs.astype("float32", copy=False)

    def _fractions(self, obs): return obs / self.byte_scale if obs.dtype == "uint8" else obs

    def moments(self):  # two arrays (obs_size,), float64
        "Mean and standard deviation of observations, kept until `seen` changes."
        if self._kept[0] is not self.seen.m2:  # each change makes a new tensor
            std = (self.seen.var + 1e-8).sqrt()
            self._kept = self.seen.m2, self.seen.mean.numpy(), std.numpy()
        return self._kept[1:]

    def __call__(self, rollout):  # a rollout -> one with the policy's observations, scaled rewards
        "Scale a rollout by the moments of those before it, then learn from it."
        rows = (x.flatten(0, 1).numpy() for x in (rollout.obs, rollout.next_obs))
        obs, next_obs = (torch.from_numpy(self.obs(x)).view_as(rollout.obs) for x in rows)
        if self.config.normalize_obs:
            obs_seen = torch.from_numpy(self._fractions(rollout.obs.numpy()))
            self.seen.update(obs_seen, rollout.is_step)
        return replace(rollout, obs=obs, next_obs=next_obs, rewards=self.rewards(rollout))

    def rewards(self, rollout):  # (T, N)
        "Rewards over the standard deviation of the return so far, this rollout's included."
        c, rewards = self.config, rollout.rewards
        if c.reward_clip:
            rewards = rewards.clamp(-c.reward_clip, c.reward_clip)
        rewards = rewards * c.reward_scale
        return self._normalized(rewards, rollout) if c.normalize_rewards else rewards

    def _normalized(self, rewards, rollout):
        earned = self.discounted(rewards, rollout.done, rollout.is_step)
        if not earned.isfinite().all():
            raise FloatingPointError("the discounted return of scaled rewards is infinite")
        self.earned.update(earned, rollout.is_step)
        self.running = torch.where(rollout.done[-1], 0.0, earned[-1])
        scale = (self.earned.var + 1e-8).rsqrt().to(rewards)
        return (rewards * scale).clamp(-self.LIMIT, self.LIMIT)

    def discounted(self, rewards, done, is_step):  # (T, N)
        "The discounted return so far, G_t = gamma G_{t-1} + r_t; a reset step leaves it as it is."
        gains = torch.where(is_step, rewards, 0)
        keeps = torch.where(is_step, self.config.gamma, 1.0)
        gains[0] += keeps[0] * self.running
        keeps[1:] *= ~done[:-1]  # an end starts anew
        return accumulate(gains.flip(0), keeps.flip(0)).flip(0)
