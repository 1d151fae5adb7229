"""Functions as other people write them: right ones under many names, and the faults that are
public. Each stands under what `identify` has to say: `right(kind, **facts)`, or `fault(kind of
finding)`."""

import dataclasses
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

PLANTED = []  # (name, function, keyword arguments of identify, kind, formula known, finding, facts)


def right(kind, known=True, given=None, **facts):
    "The next function is right, with these numbers."

    def decorate(f):
        name = getattr(f, "__name__", type(f).__name__)
        PLANTED.append((name, f, given or {}, kind, known, None, facts))
        return f

    return decorate


def fault(finding, kind, given=None, **facts):
    "The next function has this fault, and no other."

    def decorate(f):
        PLANTED.append((f.__name__, f, given or {}, kind, None, finding, facts))
        return f

    return decorate


def masked_mean(x, m):
    return (x * m).sum() / m.sum()


def rows(x, m):
    return (x * m).sum(-1) / m.sum(-1)


# Policy losses: right


@right(
    "policy_loss",
    ratio="token",
    clip_low=0.13,
    clip_high=0.37,
    dual_clip=None,
    aggregation="token-mean",
    scale=1.0,
)
def verl_style(
    old_log_prob, log_prob, advantages, response_mask, cliprange_low=0.13, cliprange_high=0.37
):
    negative_approx_kl = torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0)
    ratio = torch.exp(negative_approx_kl)
    pg_losses1 = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, 1 - cliprange_low, 1 + cliprange_high)
    pg_losses = torch.maximum(pg_losses1, pg_losses2)
    pg_clipfrac = masked_mean(torch.gt(pg_losses2, pg_losses1).float(), response_mask)
    return (
        masked_mean(pg_losses, response_mask),
        pg_clipfrac,
        masked_mean(-negative_approx_kl, response_mask),
    )


@right(
    "policy_loss",
    ratio="token",
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=3.0,
    aggregation="token-mean",
)
def verl_dual(
    old_log_prob,
    log_prob,
    advantages,
    eos_mask,
    cliprange=None,
    cliprange_low=None,
    cliprange_high=None,
    clip_ratio_c=3.0,
):
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    ratio = torch.exp(log_prob - old_log_prob)
    one = torch.maximum(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - low, 1 + high))
    two = torch.min(-advantages * clip_ratio_c, one)
    losses = torch.where(advantages < 0, two, one)
    return {"loss": masked_mean(losses, eos_mask), "clipfrac": (two < one).float().mean()}


@right(
    "policy_loss",
    ratio="token",
    clip_low=0.13,
    clip_high=0.13,
    aggregation="seq-mean-token-mean",
    kl="k3",
    kl_coef=0.037,
)
def trl_style(
    per_token_logps,
    old_per_token_logps,
    ref_per_token_logps,
    advantages,
    completion_mask,
    epsilon=0.13,
    beta=0.037,
):
    old = per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps
    coef_1 = torch.exp(per_token_logps - old)
    coef_2 = torch.clamp(coef_1, 1 - epsilon, 1 + epsilon)
    loss = -torch.min(coef_1 * advantages.unsqueeze(1), coef_2 * advantages.unsqueeze(1))
    per_token_kl = (
        torch.exp(ref_per_token_logps - per_token_logps)
        - (ref_per_token_logps - per_token_logps)
        - 1
    )
    loss = loss + beta * per_token_kl
    return ((loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)).mean()


@right("policy_loss", clip_low=0.2, clip_high=0.28, aggregation="constant")
def dr_grpo_of_a_trainer(
    logps, old_logps, advs, mask, max_completion_length=20, epsilon=0.2, epsilon_high=0.28
):
    r = (logps - old_logps).exp()
    loss = -torch.min(r * advs[:, None], r.clamp(1 - epsilon, 1 + epsilon_high) * advs[:, None])
    return (loss * mask).sum() / (loss.size(0) * max_completion_length)


class OpenRLHFLoss(torch.nn.Module):
    "A module with options of its own."

    def __init__(self, clip_eps_low=0.13, clip_eps_high=0.2, dual_clip=None, token_level_loss=True):
        super().__init__()
        self.low, self.high, self.dual, self.token_level = (
            clip_eps_low,
            clip_eps_high,
            dual_clip,
            token_level_loss,
        )

    def forward(self, log_probs, old_log_probs, advantages, action_mask=None):
        ratio = (log_probs - old_log_probs).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - self.low, 1 + self.high) * advantages)
        if self.dual is not None:
            loss = torch.where(advantages < 0, torch.min(loss, -self.dual * advantages), loss)
        if self.token_level: return masked_mean(loss, action_mask), {"ratio": ratio.detach().mean()}
        return rows(loss, action_mask).mean(), {}


right("policy_loss", clip_low=0.13, clip_high=0.2, aggregation="token-mean")(OpenRLHFLoss())
right(
    "policy_loss", clip_low=0.13, clip_high=0.2, dual_clip=9.13, aggregation="seq-mean-token-mean"
)(OpenRLHFLoss(dual_clip=9.13, token_level_loss=False))


@right("policy_loss", clip_low=0.1, clip_high=0.1, aggregation="token-mean")
def torchtune_style(pi_old_logprobs, pi_logprobs, advantages, padding_masks=None, epsilon=0.1):
    ratios = torch.exp(pi_logprobs - pi_old_logprobs)
    clipped = torch.clamp(ratios, 1.0 - epsilon, 1.0 + epsilon)
    loss = -torch.minimum(ratios * advantages, clipped * advantages)
    keep = ~padding_masks
    return (loss * keep).sum() / keep.sum()


@right("policy_loss", clip_low=0.2, clip_high=0.2, aggregation="token-mean", advantage="whitened")
def cleanrl_style(newlogprob, b_logprobs, mb_advantages, clip_coef=0.2, norm_adv=True):
    logratio = newlogprob - b_logprobs
    ratio = logratio.exp()
    if norm_adv:
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
    pg_loss1 = -mb_advantages * ratio
    pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
    return torch.max(pg_loss1, pg_loss2).mean()


@right("policy_loss", clip_low=0.2, clip_high=0.2, aggregation="token-mean")
def sb3_style(log_prob, old_log_prob, advantages, clip_range=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    policy_loss_1 = advantages * ratio
    policy_loss_2 = advantages * torch.clamp(ratio, 1 - clip_range, 1 + clip_range)
    return -torch.min(policy_loss_1, policy_loss_2).mean()


@dataclasses.dataclass
class Settings:
    "A config object."

    clip: float = 0.37
    mode: str = "seq-mean"


@right(
    "policy_loss",
    given=dict(options=dict(cfg=Settings())),
    clip_low=0.37,
    clip_high=0.37,
    aggregation="seq-mean-token-mean",
)
def with_config(new_logp, old_logp, adv, mask, cfg):
    ratio = (new_logp - old_logp).exp()
    objective = torch.minimum(ratio * adv, ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * adv)
    return (
        -rows(objective, mask).mean() if cfg.mode == "seq-mean" else -masked_mean(objective, mask)
    )


@right(
    "policy_loss",
    given=dict(options=dict(config=SimpleNamespace(eps=0.13), agg="sum")),
    aggregation="sum",
    clip_low=0.13,
)
def config_and_mode(logp, logp_old, A, mask, config, agg="mean"):
    r = (logp - logp_old).exp()
    loss = -torch.minimum(r * A, r.clamp(1 - config.eps, 1 + config.eps) * A) * mask
    return loss.sum() if agg == "sum" else loss.sum() / mask.sum()


@right(
    "policy_loss",
    ratio="sequence",
    clip_low=0.0013,
    clip_high=0.0037,
    aggregation="seq-mean-token-mean",
)
def gspo_style(log_probs, old_log_probs, advantages, response_mask):
    lengths = response_mask.sum(-1).clamp(min=1)
    s = (((log_probs - old_log_probs) * response_mask).sum(-1) / lengths).exp()
    loss = -torch.min(s * advantages, s.clamp(1 - 0.0013, 1 + 0.0037) * advantages)
    return loss.mean()


@right(
    "policy_loss",
    ratio="sequence",
    clip_low=0.003,
    clip_high=0.004,
    aggregation="seq-mean-token-mean",
)
def gspo_of_verl(
    old_log_prob, log_prob, advantages, response_mask, clip_ratio_low=0.003, clip_ratio_high=0.004
):
    seq_lengths = torch.sum(response_mask, dim=-1).clamp(min=1)
    seq = torch.sum((log_prob - old_log_prob) * response_mask, dim=-1) / seq_lengths
    log_ratio = log_prob - log_prob.detach() + seq.detach().unsqueeze(-1)
    ratio = torch.exp(torch.clamp(log_ratio, max=10.0))
    losses = torch.maximum(
        -advantages * ratio,
        -advantages * torch.clamp(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high),
    )
    return torch.mean(torch.sum(losses * response_mask, -1) / seq_lengths)


@right("policy_loss", clip_high=1.37, aggregation="token-mean")
def cispo_style(logprobs, old_logprobs, advantages, loss_mask, eps_max=1.37):
    weight = (logprobs - old_logprobs).exp().clamp(max=1 + eps_max).detach()
    return -(weight * advantages * logprobs * loss_mask).sum() / loss_mask.sum()


@right("policy_loss", aggregation="token-mean", clip_low=None)
def reinforce(log_probs, advantages, mask):
    return -masked_mean(log_probs * advantages.detach(), mask)


@right("policy_loss", aggregation="seq-mean-token-sum", clip_low=0.2)
def response_sums(lp, lp_old, adv, mask):
    ratio = torch.exp(lp - lp_old)
    return (
        (-torch.min(ratio * adv[:, None], ratio.clamp(0.8, 1.2) * adv[:, None]) * mask)
        .sum(1)
        .mean()
    )


@right("policy_loss", aggregation="prompt-mean", clip_low=0.2, clip_high=0.28)
def scale_rl(logp, old_logp, advantage, mask, num_generations=8):
    ratio = torch.exp(logp - old_logp)
    A = advantage[:, None]
    loss = -torch.min(ratio * A, ratio.clamp(0.8, 1.28) * A) * mask
    tokens = mask.reshape(-1, num_generations * mask.shape[1]).sum(1)
    return (loss.reshape(-1, num_generations * mask.shape[1]).sum(1) / tokens).mean()


def closed(eps):
    "A closure over the clip range."

    def surrogate(logp_new, logp_old, adv, mask):
        r = (logp_new - logp_old).exp()
        return -masked_mean(
            torch.where(
                adv > 0,
                torch.minimum(r, torch.tensor(1 + eps)) * adv,
                torch.maximum(r, torch.tensor(1 - eps)) * adv,
            ),
            mask,
        )

    return surrogate


right("policy_loss", clip_low=0.913, clip_high=0.913)(closed(0.913))


@right(
    "policy_loss",
    given=dict(names={"logp": "xs", "logp_old": "ys", "advantage": "zs", "mask": "ms"}),
    clip_low=0.2,
    aggregation="token-mean",
)
def under_no_name(xs, ys, zs, ms):
    r = (xs - ys).exp()
    return -(torch.min(r * zs, r.clamp(0.8, 1.2) * zs) * ms).sum() / ms.sum()


@right("policy_loss", clip_low=0.2, aggregation="token-mean")
def whole_ppo(
    newlogprob,
    oldlogprob,
    advantages,
    newvalue,
    old_values,
    returns,
    entropy,
    clip_coef=0.2,
    ent_coef=0.01,
    vf_coef=0.5,
):
    ratio = (newlogprob - oldlogprob).exp()
    pg = torch.max(
        -advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)
    ).mean()
    clipped = old_values + torch.clamp(newvalue - old_values, -clip_coef, clip_coef)
    v = 0.5 * torch.max((newvalue - returns) ** 2, (clipped - returns) ** 2).mean()
    return pg - ent_coef * entropy.mean() + vf_coef * v, pg.detach(), v.detach()


@right("policy_loss", clip_low=0.2, aggregation=None)
def not_reduced(logp, old_logp, adv):
    r = torch.exp(logp - old_logp)
    return -torch.min(r * adv, torch.clamp(r, 0.8, 1.2) * adv)


@right("policy_loss", known=False, aggregation="token-mean")
def smooth_clip(logp, old_logp, adv, mask):
    "Nobody's objective, but no fault: the ratio is bent, not cut."
    r = torch.atan(torch.exp(logp - old_logp) - 1)
    return -masked_mean(r * adv, mask)


# Policy losses: faults


def surrogate(logp, old, A, low=0.2, high=0.2):
    r = torch.exp(logp - old)
    return torch.min(r * A, torch.clamp(r, 1 - low, 1 + high) * A)


@fault("dual-clip-side", "policy_loss")
def ding_continuous(logp_new, logp_old, adv, clip_ratio=0.2, dual_clip=3.0):
    clipped = surrogate(logp_new, logp_old, adv, clip_ratio, clip_ratio)
    return -torch.max(clipped, dual_clip * adv).mean()


@fault("option-without-effect", "policy_loss", clip_low=0.2, dual_clip=None)
def slime_style(
    log_probs,
    old_log_probs,
    advantages,
    loss_mask,
    eps_clip=0.2,
    eps_clip_high=0.28,
    eps_clip_c=3.0,
):
    return -masked_mean(
        surrogate(log_probs, old_log_probs, advantages, eps_clip, eps_clip_high), loss_mask
    )


@fault("sign", "policy_loss", clip_low=0.2)
def objective_as_loss(logp, old_logp, adv, mask):
    return masked_mean(surrogate(logp, old_logp, adv), mask)


@fault("mask-ignored", "policy_loss")
def mask_forgotten(logp, old_logp, adv, mask):
    return -surrogate(logp, old_logp, adv).mean()


@fault("mask-leak", "policy_loss")
def mask_below_only(logp, old_logp, adv, mask):
    return -surrogate(logp, old_logp, adv).sum() / mask.sum()


@fault("mask-leak", "policy_loss")
def gspo_over_padding(logp, old_logp, adv, mask):
    s = ((logp - old_logp).sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp()
    loss = -torch.min(s * adv[:, None], s.clamp(1 - 0.13, 1 + 0.13) * adv[:, None])
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


@fault("ratio-constant", "policy_loss")
def old_recomputed(logp, old_logp, adv, mask):
    old_logp = logp.detach()
    return -masked_mean(surrogate(logp, old_logp, adv), mask)


@fault("no-min", "policy_loss")
def clamp_alone(logp, old_logp, adv, mask):
    return -masked_mean(torch.exp(logp - old_logp).clamp(0.8, 1.2) * adv, mask)


@fault("no-min", "policy_loss")
def the_larger(logp, old_logp, adv, mask):
    r = torch.exp(logp - old_logp)
    return -masked_mean(torch.max(r * adv, r.clamp(0.8, 1.2) * adv), mask)


@fault("clip-missing", "policy_loss", clip_low=None, clip_high=None)
def no_clip(logp, old_logp, adv, mask):
    return -masked_mean(torch.exp(logp - old_logp) * adv, mask)


@fault("clip-missing", "policy_loss", clip_low=None, clip_high=0.2)
def above_only(logp, old_logp, adv, mask):
    r = torch.exp(logp - old_logp)
    return -masked_mean(torch.min(r * adv, r.clamp(max=1.2) * adv), mask)


@fault("no-gradient", "policy_loss")
def ratio_detached(logp, old_logp, adv, mask):
    return -masked_mean(surrogate(logp.detach(), old_logp, adv), mask)


@fault("scale", "policy_loss", scale=0.25)
def divided_twice(logp, old_logp, adv, mask):
    return -rows(surrogate(logp, old_logp, adv[:, None]), mask).mean() / 4


@fault("aggregation", "policy_loss")
def prompt_mean_of_responses(logp, old_logp, adv, mask, loss_agg_mode="prompt-mean"):
    return -rows(surrogate(logp, old_logp, adv[:, None]), mask).mean()


@fault("kl-sign", "policy_loss")
def book_k3(logp, old_logp, ref_logp, adv, mask, beta=0.04):
    d = logp - ref_logp
    return masked_mean(-surrogate(logp, old_logp, adv) + beta * (d.exp() - 1 - d), mask)


@fault("kl-sign", "policy_loss")
def kl_as_bonus(logp, old_logp, ref_logp, adv, mask, beta=0.04):
    d = ref_logp - logp
    return masked_mean(-surrogate(logp, old_logp, adv) - beta * (d.exp() - 1 - d), mask)


@fault("in-place", "policy_loss")
def masked_in_place(logp, old_logp, adv, mask):
    adv *= mask
    return -masked_mean(surrogate(logp, old_logp, adv), mask)


# Value losses


@right("value_loss", clip=0.37, factor=0.5, aggregation="token-mean")
def value_of_verl(vpreds, values, returns, response_mask, cliprange_value=0.37):
    clipped = torch.max(torch.min(vpreds, values + cliprange_value), values - cliprange_value)
    return (
        0.5
        * masked_mean(torch.max((vpreds - returns) ** 2, (clipped - returns) ** 2), response_mask),
        None,
    )


@right("value_loss", clip=0.2, factor=0.5, aggregation="token-mean")
def value_of_cleanrl(newvalue, b_values, b_returns, clip_coef=0.2):
    unclipped = (newvalue - b_returns) ** 2
    clipped = b_values + torch.clamp(newvalue - b_values, -clip_coef, clip_coef)
    return 0.5 * torch.max(unclipped, (clipped - b_returns) ** 2).mean()


@right("value_loss", clip=None, factor=1.0)
def value_of_sb3(values, returns):
    return F.mse_loss(returns, values)


@right("value_loss", clip=0.13, factor=0.5, aggregation="seq-mean-token-mean")
def value_by_response(values, old_values, returns, action_mask, clip_eps=0.13):
    clipped = old_values + (values - old_values).clamp(-clip_eps, clip_eps)
    loss = torch.max((clipped - returns) ** 2, (values - returns) ** 2)
    return 0.5 * rows(loss, action_mask).mean()


@fault("no-min", "value_loss")
def value_min(values, old_values, returns, mask, cliprange=0.2):
    clipped = old_values + (values - old_values).clamp(-cliprange, cliprange)
    return 0.5 * masked_mean(torch.min((values - returns) ** 2, (clipped - returns) ** 2), mask)


@fault("scale", "value_loss", factor=0.25)
def value_halved_twice(values, returns, mask):
    return 0.5 * 0.5 * masked_mean((values - returns) ** 2, mask)


@fault("mask-leak", "policy_loss")
def mask_below_each_row(logp, old_logp, adv, mask):
    return -(surrogate(logp, old_logp, adv).sum(1) / mask.sum(1)).mean()


@fault("mask-leak", "kl")
def kl_sum_over_all(logps, ref_logps, mask):
    return (logps - ref_logps).detach().sum() / mask.sum()


@fault("mask-leak", "value_loss")
def value_sum_over_all(values, returns, mask):
    return (values - returns).pow(2).sum() / mask.sum()


@fault("mask-leak", "aggregate")
def sum_over_all(loss, mask):
    return loss.sum() / mask.sum()


@fault("mask-ignored", "value_loss")
def value_of_padding(values, returns, mask):
    return 0.5 * (values - returns).pow(2).mean()


@fault("no-gradient", "value_loss")
def value_of_data(values, returns):
    return F.mse_loss(values.data, returns)


@fault("option-without-effect clip-missing", "value_loss")
def value_clip_ignored(values, old_values, returns, mask, value_coef=0.5, clip_range=0.2):
    return value_coef * masked_mean((values - returns) ** 2, mask)


# GAE and returns


@right("gae", gamma=0.99, lam=0.913, bootstrap=True)
def gae_of_cleanrl(rewards, values, dones, next_value, next_done, gamma=0.99, gae_lambda=0.913):
    advantages, lastgaelam = torch.zeros_like(rewards), 0
    for t in reversed(range(len(rewards))):
        if t == len(rewards) - 1:
            nextnonterminal, nextvalues = 1.0 - next_done, next_value
        else:
            nextnonterminal, nextvalues = 1.0 - dones[t + 1], values[t + 1]
        delta = rewards[t] + gamma * nextvalues * nextnonterminal - values[t]
        advantages[t] = lastgaelam = delta + gamma * gae_lambda * nextnonterminal * lastgaelam
    return advantages, advantages + values


@right("gae", gamma=0.99, lam=0.95, bootstrap=True)
def gae_of_sb3(rewards, values, episode_starts, last_values, dones, gamma=0.99, gae_lambda=0.95):
    advantages, last = torch.zeros_like(rewards), 0
    for step in reversed(range(rewards.shape[0])):
        if step == rewards.shape[0] - 1:
            alive, following = 1.0 - dones.float(), last_values
        else:
            alive, following = 1.0 - episode_starts[step + 1].float(), values[step + 1]
        delta = rewards[step] + gamma * following * alive - values[step]
        last = delta + gamma * gae_lambda * alive * last
        advantages[step] = last
    return {"advantages": advantages, "returns": advantages + values}


@right("gae", gamma=0.97, lam=0.913, bootstrap=False)
def gae_of_verl(token_level_rewards, values, response_mask, gamma=0.97, lam=0.913):
    following, last, out = 0, 0, []
    for t in reversed(range(token_level_rewards.shape[-1])):
        delta = token_level_rewards[:, t] + gamma * following - values[:, t]
        now = delta + gamma * lam * last
        following = values[:, t] * response_mask[:, t] + (1 - response_mask[:, t]) * following
        last = now * response_mask[:, t] + (1 - response_mask[:, t]) * last
        out.append(last)
    advantages = torch.stack(out[::-1], dim=1)
    returns = advantages + values
    mean = masked_mean(advantages, response_mask)
    var = masked_mean((advantages - mean) ** 2, response_mask)
    return (advantages - mean) * torch.rsqrt(var + 1e-8), returns


@right("gae", gamma=1.0, lam=0.95, bootstrap=False)
def gae_of_openrlhf(values, rewards, action_mask, gamma=1.0, lambd=0.95):
    values, rewards = action_mask * values, action_mask * rewards
    last, out = 0, []
    for t in reversed(range(rewards.size(1))):
        following = values[:, t + 1] if t < rewards.size(1) - 1 else 0.0
        delta = rewards[:, t] + gamma * following - values[:, t]
        last = delta + gamma * lambd * last
        out.append(last)
    advantages = torch.stack(out[::-1], dim=1)
    return advantages.detach(), advantages + values


@right("gae", gamma=0.99, lam=0.95, bootstrap=True)
def gae_with_limits(rewards, values, next_values, terminated, truncated, gamma=0.99, lam=0.95):
    deltas = rewards + gamma * next_values * (~terminated) - values
    out, last = torch.zeros_like(deltas), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        last = deltas[t] + gamma * lam * last * (~(terminated[t] | truncated[t]))
        out[t] = last
    return out


@right("gae", gamma=0.9, lam=0.37, bootstrap=True)
def gae_of_one(rewards, values, dones, last_value, gamma=0.9, lam=0.37):
    "One environment, a list of numbers."
    out, g = [0.0] * len(rewards), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        following = last_value if t == len(rewards) - 1 else values[t + 1]
        if dones[t]:
            following, g = 0.0, 0.0
        g = rewards[t] + gamma * following - values[t] + gamma * lam * g
        out[t] = g
    return torch.stack(out)


@right("gae", gamma=0.99, lam=0.95, bootstrap=True)
def gae_of_kostrikov(rewards, value_preds, masks, next_value, gamma=0.99, gae_lambda=0.95):
    "Masks are 0 where the episode ended; returns come out."
    values, gae, returns = torch.cat([value_preds, next_value[None]]), 0, []
    for step in reversed(range(rewards.size(0))):
        delta = rewards[step] + gamma * values[step + 1] * masks[step] - values[step]
        gae = delta + gamma * gae_lambda * masks[step] * gae
        returns.insert(0, gae + values[step])
    return torch.stack(returns)


@right("gae", gamma=0.99, lam=0.95, bootstrap=True)
def gae_one_longer(rewards, values, dones, gamma=0.99, lam=0.95):
    deltas = rewards + gamma * values[1:] * (1 - dones) - values[:-1]
    out, last = [], 0
    for delta, done in zip(deltas.flip(0), dones.flip(0)):
        last = delta + gamma * lam * (1 - done) * last
        out.append(last)
    return torch.stack(out[::-1])


@right("gae", gamma=0.93)
def reward_to_go(rewards, dones, gamma=0.93):
    out, running = torch.zeros_like(rewards), 0
    for t in reversed(range(len(rewards))):
        running = rewards[t] + gamma * running * (1 - dones[t])
        out[t] = running
    return out


def recursion(rewards, values, nonterminal, boot, last_value, gamma, lam, carry=None):
    "GAE with a switch for each of its places."
    carry = nonterminal if carry is None else carry
    out, last = torch.zeros_like(rewards), 0
    following = torch.cat([values[1:], last_value[None]])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following[t] * boot[t] - values[t]
        last = delta + gamma * lam * carry[t] * last
        out[t] = last
    return out, out + values


@fault("off-by-one", "gae")
def end_of_the_next(rewards, values, dones, next_value, gamma=0.99, lam=0.95):
    alive = torch.cat([1 - dones[1:], torch.ones_like(dones[:1])])
    return recursion(rewards, values, alive, alive, next_value, gamma, lam)


@fault("ends-ignored", "gae")
def goes_on(rewards, values, dones, next_value, gamma=0.99, lam=0.95):
    return recursion(
        rewards, values, 1 - dones, 1 - dones, next_value, gamma, lam, torch.ones_like(dones)
    )


@fault("bootstrap-past-end", "gae")
def looks_past(rewards, values, dones, next_value, gamma=0.99, lam=0.95):
    return recursion(rewards, values, 1 - dones, torch.ones_like(dones), next_value, gamma, lam)


@fault("no-bootstrap", "gae")
def forgets_the_rest(rewards, values, dones, next_value, gamma=0.99, lam=0.95):
    return recursion(rewards, values, 1 - dones, 1 - dones, 0 * next_value, gamma, lam)


@fault("no-bootstrap", "gae", gamma=0.99, bootstrap=False)
def limit_is_an_end(rewards, values, next_values, terminated, truncated, gamma=0.99, lam=0.95):
    done = terminated | truncated
    return gae_with_limits(rewards, values, next_values, done, done, gamma, lam)


@fault("option-without-effect", "gae", lam=0.95)
def lambda_not_used(rewards, values, dones, next_value, gamma=0.99, lam=0.9):
    return recursion(rewards, values, 1 - dones, 1 - dones, next_value, gamma, 0.95)


@fault("mask-leak", "gae")
def padding_bootstraps(token_level_rewards, values, response_mask, gamma=1.0, lam=0.95):
    last, out = 0, []
    for t in reversed(range(values.shape[1])):
        following = values[:, t + 1] if t < values.shape[1] - 1 else 0.0
        last = token_level_rewards[:, t] + gamma * following - values[:, t] + gamma * lam * last
        out.append(last)
    return torch.stack(out[::-1], 1) * response_mask


# Advantages of groups


@right("group_advantage", baseline="mean", deviation="sample", eps=1e-4)
def group_of_trl(rewards, num_generations=8):
    mean = rewards.view(-1, num_generations).mean(dim=1).repeat_interleave(num_generations, dim=0)
    std = rewards.view(-1, num_generations).std(dim=1).repeat_interleave(num_generations, dim=0)
    return (rewards - mean) / (std + 1e-4)


@right("group_advantage", baseline="mean", deviation="sample", eps=1e-6)
def group_of_verl(
    token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True
):
    scores, of = token_level_rewards.sum(dim=-1), defaultdict(list)
    for i, score in zip(index, scores):
        of[i].append(score)
    with torch.no_grad():
        out = torch.zeros_like(scores)
        for i in range(len(scores)):
            group = torch.stack(of[index[i]])
            out[i] = scores[i] - group.mean()
            if norm_adv_by_std_in_grpo:
                out[i] = out[i] / (group.std() + epsilon)
        out = out.unsqueeze(-1) * response_mask
    return out, out


@right("group_advantage", baseline="mean", deviation=None)
def dr_grpo_advantage(rewards, num_generations=8):
    groups = rewards.view(-1, num_generations)
    return (groups - groups.mean(1, keepdim=True)).view(-1)


@right("group_advantage", baseline="mean", deviation="population", eps=0.037)
def group_of_numpy_habits(scores, eps=0.037):
    return (scores - scores.mean(-1, keepdim=True)) / (
        scores.std(-1, unbiased=False, keepdim=True) + eps
    )


@right("group_advantage", baseline="leave-one-out", deviation=None)
def rloo_of_trl(rewards, group_size=4):
    r = rewards.reshape(-1, group_size)
    return (r - (r.sum(1, keepdim=True) - r) / (group_size - 1)).flatten()


@fault("deviation", "group_advantage")
def over_the_variance(rewards):
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.var(1, keepdim=True) + 1e-6)


@fault("deviation", "group_advantage", baseline="mean")
def over_the_batch(rewards):
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + 1e-4)


@fault("baseline", "group_advantage")
def mean_of_the_batch(rewards):
    return (rewards - rewards.mean()) / (rewards.std(1, keepdim=True) + 1e-4)


@fault("baseline", "group_advantage")
def groups_by_columns(rewards, num_generations=8):
    groups = rewards.view(num_generations, -1)
    return ((groups - groups.mean(0)) / (groups.std(0) + 1e-4)).view(-1)


@fault("option-without-effect", "group_advantage")
def eps_not_used(rewards, eps=0.01):
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


@fault("sign", "group_advantage")
def mean_less_reward(rewards):
    return rewards.mean(1, keepdim=True) - rewards


# KL estimates


@right("kl", estimator="k3")
def k3_of_trl(per_token_logps, ref_per_token_logps):
    return (
        torch.exp(ref_per_token_logps - per_token_logps)
        - (ref_per_token_logps - per_token_logps)
        - 1
    )


@right("kl", estimator="k3")
def k3_of_cleanrl(newlogprob, oldlogprob):
    logratio = newlogprob - oldlogprob
    return ((logratio.exp() - 1) - logratio).mean()


@right("kl", estimator="k3", given=dict(options=dict(kl_penalty="low_var_kl")))
def kl_of_verl(logprob, ref_logprob, kl_penalty):
    if kl_penalty == "kl": return logprob - ref_logprob
    if kl_penalty == "mse": return 0.5 * (logprob - ref_logprob).square()
    kl = torch.clamp(ref_logprob - logprob, min=-20, max=20)
    return torch.clamp(torch.exp(kl) - kl - 1, min=-10, max=10)


@right("kl", estimator="k2")
def k2_of_openrlhf(log_probs, log_probs_base):
    return (log_probs.float() - log_probs_base.float()) ** 2 / 2.0


@right("kl", estimator="k1")
def k1_masked(logps, ref_logps, mask):
    return masked_mean(logps - ref_logps, mask)


@fault("kl-sign", "kl")
def book_k1(logprobs, ref_logprobs):
    return ref_logprobs - logprobs


@fault("kl-sign", "kl", estimator="k3")
def book_k3_alone(logprobs, ref_logprobs):
    log_ratio = logprobs - ref_logprobs
    return torch.exp(log_ratio) - 1 - log_ratio


@fault("kl-estimator", "kl")
def k3_without_log(logprobs, ref_logprobs):
    return torch.exp(ref_logprobs - logprobs) - 1


@fault("kl-estimator", "kl")
def another_than_asked(logprobs, ref_logprobs, kl_estimator="k3"):
    return 0.5 * (logprobs - ref_logprobs) ** 2


@fault("scale", "kl")
def k2_not_halved(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs) ** 2


# Log-probabilities and entropies


@right("log_prob", temperature=1.0, shift=0)
def logps_of_trl(logits, index):
    picked = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return picked - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


@right("log_prob", temperature=1.3, shift=1)
def logps_shifted(logits, input_ids, temperature=1.3):
    logits = logits[:, :-1, :] / temperature
    return torch.gather(logits.log_softmax(-1), 2, input_ids[:, 1:].unsqueeze(2)).squeeze(2)


@right("log_prob", temperature=0.37, shift=0)
def logps_by_cross_entropy(logits, labels, temperature=0.37):
    flat = F.cross_entropy(
        (logits / temperature).reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="none"
    )
    return -flat.reshape(labels.shape)


@fault("shift", "log_prob")
def not_shifted(logits, input_ids):
    return logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, :-1, None])[..., 0]


@fault("temperature", "log_prob")
def cooled_afterwards(logits, labels, temperature=1.0):
    return torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0] / temperature


@fault("temperature", "log_prob")
def multiplied(logits, labels, temperature=1.0):
    return torch.log_softmax(logits * temperature, -1).gather(-1, labels[..., None])[..., 0]


@fault("option-without-effect", "log_prob")
def temperature_forgotten(logits, labels, temperature=1.0):
    return torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]


@fault("in-place", "log_prob")
def divided_in_place(logits, labels, temperature=1.0):
    if temperature != 1.0:
        logits.div_(temperature)
    return torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]


@fault("sign", "log_prob")
def negative(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


@right("entropy", temperature=1.0)
def entropy_of_verl(logits):
    pd = torch.nn.functional.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(pd * logits, dim=-1)


@right("entropy", temperature=0.913)
def entropy_cooled(logits, temperature=0.913):
    p = (logits / temperature).softmax(-1)
    return -(p * p.log()).sum(-1)


@fault("sign", "entropy")
def entropy_without_minus(logits):
    return (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


@fault("scale", "entropy")
def entropy_in_bits(logits):
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1) / 0.6931471805599453


# Aggregations, whitening, preferences


@right("aggregate", aggregation="seq-mean-token-mean")
def agg_of_verl(loss_mat, loss_mask, loss_agg_mode="seq-mean-token-mean"):
    if loss_agg_mode == "token-mean": return masked_mean(loss_mat, loss_mask)
    return torch.mean(torch.sum(loss_mat * loss_mask, dim=-1) / torch.sum(loss_mask, dim=-1))


@right("aggregate", aggregation="token-mean")
def mean_of_trl(values, mask, axis=None):
    return (values * mask).sum() / mask.sum()


@right("aggregate", aggregation="constant", length=64)
def sum_over_length(losses, mask, max_tokens=64):
    return (losses * mask).sum() / (losses.shape[0] * max_tokens)


@fault("aggregation", "aggregate")
def torchrl_prompt_mean(loss, mask, reduction="prompt_mean"):
    return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


@fault("mask-ignored", "aggregate")
def plain_mean(loss, mask):
    return loss.mean()


@right("whiten", deviation="sample", eps=1e-8, shift_mean=True)
def whiten_of_trl(values, mask, shift_mean=True):
    mean = masked_mean(values, mask)
    n = mask.sum()
    var = masked_mean((values - mean) ** 2, mask) * n / (n - 1)
    whitened = (values - mean) * torch.rsqrt(var + 1e-8)
    return whitened if shift_mean else whitened + mean


@right("whiten", deviation="population", eps=0.13, shift_mean=True)
def whiten_plainly(advantages, mask):
    x = advantages[mask]
    out = torch.zeros_like(advantages)
    out[mask] = (x - x.mean()) / (x.std(unbiased=False) + 0.13)
    return out


@fault("baseline", "whiten")
def whiten_of_torchtune(x, mask, shift_mean=True):
    mean = masked_mean(x, mask)
    var = masked_mean((x - mean) ** 2, mask)
    whitened = (x - mean) * torch.rsqrt(var + 1e-8)
    return whitened + mean if shift_mean else whitened


@fault("mask-leak", "whiten")
def whiten_by_all(x, mask):
    return ((x - x.mean()) / (x.std() + 1e-8)) * mask


@right("preference_loss", form="sigmoid", beta=0.13, label_smoothing=0.0)
def dpo_of_trl(
    policy_chosen_logps,
    policy_rejected_logps,
    reference_chosen_logps,
    reference_rejected_logps,
    beta=0.13,
    label_smoothing=0.0,
):
    h = (policy_chosen_logps - policy_rejected_logps) - (
        reference_chosen_logps - reference_rejected_logps
    )
    losses = (
        -F.logsigmoid(beta * h) * (1 - label_smoothing) - F.logsigmoid(-beta * h) * label_smoothing
    )
    rewards = beta * (policy_chosen_logps - reference_chosen_logps).detach()
    return losses, rewards, beta * (policy_rejected_logps - reference_rejected_logps).detach()


@right("preference_loss", form="ipo", beta=0.37)
def ipo(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, tau=0.37):
    return (
        (chosen_logps - ref_chosen_logps - rejected_logps + ref_rejected_logps - 1 / (2 * tau)) ** 2
    ).mean()


@right("preference_loss", form="sigmoid")
def bradley_terry(chosen_rewards, rejected_rewards):
    return -F.logsigmoid(chosen_rewards - rejected_rewards).mean()


@right("preference_loss", beta=0.1)
def dpo_of_a_letter(logp_w, logp_l, ref_logp_w, ref_logp_l, beta=0.1):
    return -torch.log(torch.sigmoid(beta * ((logp_w - ref_logp_w) - (logp_l - ref_logp_l)))).mean()


@fault("sign", "preference_loss")
def pairs_swapped(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta=0.1):
    return -F.logsigmoid(
        beta * ((rejected_logps - ref_rejected_logps) - (chosen_logps - ref_chosen_logps))
    ).mean()


@fault("option-without-effect", "preference_loss")
def smoothing_forgotten(
    chosen_logps,
    rejected_logps,
    ref_chosen_logps,
    ref_rejected_logps,
    beta=0.1,
    label_smoothing=0.1,
):
    return -F.logsigmoid(
        beta * ((chosen_logps - ref_chosen_logps) - (rejected_logps - ref_rejected_logps))
    ).mean()


@fault("baseline", "preference_loss")
def without_reference(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta=0.1):
    return -F.logsigmoid(beta * (chosen_logps - rejected_logps)).mean()


right("policy_loss", clip_low=0.2, aggregation="token-mean", given=dict(kind="policy_loss"))(
    partial(verl_style, cliprange_low=0.2)
)


# What says less than it does, and more


@fault("deviation", "whiten")
def normalize_without_dividing(values, mask):
    return values - masked_mean(values, mask)


@fault("mask-leak", "value_loss")
def returns_whitened_over_padding(values, returns, mask):
    returns = (returns - returns.mean()) / returns.std()
    return 0.5 * masked_mean((values - returns) ** 2, mask)


@fault("scale", "log_prob", temperature=1.0)
def log_prob_in_bits(logits, labels):
    return logits.softmax(-1).log2().gather(-1, labels[..., None])[..., 0]


@right("gae", gamma=0.93)
def to_go(rewards, gamma=0.93):
    out, run = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        run = rewards[t] + gamma * run
        out[t] = run
    return out


@fault("off-by-one", "gae")
def starts_of_the_same_step(
    rewards, values, episode_starts, last_values, dones, gamma=0.97, gae_lambda=0.913
):
    adv, last = torch.zeros_like(rewards), 0
    for t in reversed(range(len(rewards))):
        end = t == len(rewards) - 1
        live = 1 - (dones if end else episode_starts[t]).double()
        following = last_values if end else values[t + 1]
        last = rewards[t] + gamma * live * following - values[t] + gamma * gae_lambda * live * last
        adv[t] = last
    return adv, adv + values


@fault("bootstrap-past-end", "gae")
def tianshou_alone(v_s, v_s_, rew, end_flag, gamma=0.98, gae_lambda=0.913):
    delta, live = rew + gamma * v_s_ - v_s, 1 - end_flag.double()
    out, last = torch.zeros_like(rew), 0
    for t in reversed(range(len(rew))):
        last = delta[t] + gamma * gae_lambda * live[t] * last
        out[t] = last
    return out


@fault("in-place", "gae")
def rewards_moved_and_back(rewards, values, dones, next_value, gamma=0.99, lam=0.95):
    rewards += 0.5
    shifted, last, out, following = rewards - 0.5, 0, [], next_value
    for t in reversed(range(len(rewards))):
        live = 1 - dones[t].double()
        last = shifted[t] + gamma * live * following - values[t] + gamma * lam * live * last
        following = values[t]
        out.append(last)
    return torch.stack(out[::-1])


# A switch, a promise and a mask that do nothing, or not what they say


@fault("option-without-effect", "policy_loss", clip_low=0.37)
def switch_not_forwarded(logp, old_logp, adv, mask, eps=0.37, norm_adv=True):
    return -masked_mean(surrogate(logp, old_logp, adv, eps, eps), mask)


@fault("option-without-effect", "group_advantage")
def scaled_in_any_case(rewards, num_generations=4, scale_rewards=True):
    groups = rewards.view(-1, num_generations)
    return ((groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)).flatten()


@right("policy_loss", clip_low=0.13, aggregation="token-mean")
def a_statistic_is_an_effect(logp, old_logp, adv, mask, eps=0.13, with_ratio=True):
    loss = -masked_mean(surrogate(logp, old_logp, adv, eps, eps), mask)
    return (loss, (logp - old_logp).exp().mean()) if with_ratio else loss


@fault("scale", "policy_loss", scale=8.0)
def group_not_divided(logp, old_logp, adv, mask, group_size=8):
    return -rows(surrogate(logp, old_logp, adv), mask).view(-1, group_size).sum(1).mean()


@fault("scale", "gae", gamma=0.9, lam=0.8889)
def lambda_without_gamma(rewards, values, dones, next_value, gamma=0.9, lam=0.8):
    live = 1 - dones.double()
    return recursion(rewards, values, live, live, next_value, gamma, lam / gamma)


@fault("mask-leak", "kl")
def centred_over_padding(logps, ref_logps, mask):
    d = logps - ref_logps
    return masked_mean(d - d.mean(), mask)


@right("preference_loss", form="hinge", beta=0.37)
def hinge(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta=0.37):
    h = (chosen_logps - ref_chosen_logps) - (rejected_logps - ref_rejected_logps)
    return torch.relu(1 - beta * h).mean()


@fault("mask-leak", "policy_loss", advantage="whitened")
def whitened_over_padding(logp, old_logp, adv, mask):
    adv = adv if adv.dim() == 2 else adv[:, None].expand_as(logp)
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    return -masked_mean(surrogate(logp, old_logp, adv), mask)


@fault("ends-ignored", "gae")
def sums_over_a_time_limit(rewards, values, next_values, terminated, truncated, gamma=0.9, lam=0.8):
    return gae_with_limits(rewards, values, next_values, terminated, terminated, gamma, lam)


@right("gae", gamma=0.9, lam=0.37, whitened="sample")
def whitened_alone(rewards, values, dones, next_value, gamma=0.9, lam=0.37):
    live = 1 - dones.double()
    adv, _ = recursion(rewards, values, live, live, next_value, gamma, lam)
    return (adv - adv.mean()) / (adv.std() + 1e-8)


@fault("bootstrap-past-end ends-ignored", "gae", whitened="sample")
def whitened_without_ends(rewards, values, dones, next_value, gamma=0.9, lam=0.37):
    return whitened_alone(rewards, values, 0 * dones, next_value, gamma, lam)


@right("preference_loss", form="robust", beta=0.37, label_smoothing=0.13)
def robust_dpo(
    chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta=0.37, epsilon=0.13
):
    h = beta * ((chosen_logps - ref_chosen_logps) - (rejected_logps - ref_rejected_logps))
    loss = -F.logsigmoid(h) * (1 - epsilon) + F.logsigmoid(-h) * epsilon
    return (loss / (1 - 2 * epsilon)).mean()


@right("policy_loss", clip_low=0.2, aggregation="token-mean")
def of_samples(samples):
    return -masked_mean(
        surrogate(samples["log_probs"], samples["old_log_probs"], samples["advantages"]),
        samples["action_mask"],
    )


@right("group_advantage", baseline="mean", deviation=None)
def of_token_rewards(token_rewards, mask, group_size=4):
    scores = (token_rewards * mask).sum(-1).view(-1, group_size)
    return (scores - scores.mean(-1, keepdim=True)).view(-1)


@fault("mask-leak", "aggregate")
def a_little_of_the_padding(loss, mask):
    return masked_mean(loss, mask) + 0.01 * loss.mean()


@fault("scale", "policy_loss", aggregation=None)
def divided_by_the_batch_twice(logp, old_logp, adv, mask):
    return -rows(surrogate(logp, old_logp, adv), mask).mean() / len(logp)


@right("policy_loss", known=False, aggregation=None)
def means_that_are_added(logp, old_logp, adv, mask):
    return -rows(surrogate(logp, old_logp, adv), mask).sum()


# rl_games, RLlib, ORPO; a row's own KL; a compiled function


@right("policy_loss", clip_low=0.11, clip_high=0.11)
def of_negative_log_probs(old_action_neglog_probs_batch, action_log_probs, advantage, e_clip=0.11):
    ratio = torch.exp(old_action_neglog_probs_batch - action_log_probs)
    clipped = torch.clamp(ratio, 1.0 - e_clip, 1.0 + e_clip)
    return torch.max(-advantage * ratio, -advantage * clipped)


@right("value_loss", factor=1.0, clip=0.13)
def new_values_last(value_preds_batch, values, return_batch, curr_e_clip=0.13):
    clipped = value_preds_batch + (values - value_preds_batch).clamp(-curr_e_clip, curr_e_clip)
    return torch.max((values - return_batch) ** 2, (clipped - return_batch) ** 2)


@right("value_loss", factor=0.5)
def of_rllib(value_fn_out, value_targets):
    return 0.5 * torch.mean(torch.pow(value_fn_out - value_targets, 2.0))


@right("gae", gamma=0.95, lam=0.6)
def discount_values(fdones, last_values, mb_fdones, mb_values, mb_rewards, gamma=0.95, tau=0.6):
    live = 1 - torch.cat([mb_fdones[1:], fdones[None]]).double()
    return recursion(mb_rewards, mb_values, live, live, last_values, gamma, tau)[0]


@right("gae", gamma=0.913, lam=0.37, bootstrap=True)
def short_names(rew, val, next_val, term, truncateds, gamma=0.913, lam=0.37):
    return gae_with_limits(rew, val, next_val, term, truncateds, gamma, lam)


@right("gae", gamma=0.9, lam=0.37)
def of_one_episode(rewards, vf_preds, last_r, gamma=0.9, lambda_=0.37):
    following = torch.cat([vf_preds[1:], last_r.reshape(1)])
    delta, last, out = rewards + gamma * following - vf_preds, 0, []
    for x in reversed(delta):
        last = x + gamma * lambda_ * last
        out.append(last)
    return torch.stack(out[::-1])


@fault("off-by-one", "gae")
def ends_of_the_next_step(rewards, values, next_values, dones, gamma=0.9, lam=0.8):
    ends = torch.cat([dones[1:], dones[-1:]]).bool()
    return gae_with_limits(rewards, values, next_values, ends, ends, gamma, lam)


@right("kl", estimator="k1")
def of_each_row(log_probs, log_probs_base, action_mask):
    return rows(log_probs - log_probs_base, action_mask)


@right("preference_loss", known=False)
def orpo(chosen_logps, rejected_logps, beta=0.1):
    odds = [x - torch.log1p(-x.exp()) for x in (chosen_logps, rejected_logps)]
    return -beta * F.logsigmoid(odds[0] - odds[1]).mean()


# Of two results the advantages are those that the other exceeds by V


@fault("sign", "gae")
def both_turned(rewards, values, dones, last_value, gamma=0.97, lam=0.83):
    live = 1 - dones.double()
    adv, _ = recursion(rewards, values, live, live, last_value, gamma, lam)
    return values - adv, -adv


@fault("baseline", "gae")
def returns_called_advantages(rewards, values, dones, next_val, discount=0.97, gae_lambda=0.83):
    live = 1 - dones.double()
    adv, _ = recursion(rewards, 0 * values, live, live, 0 * next_val, discount, gae_lambda)
    return adv, adv + values


@fault("no-gradient", "group_advantage")
def all_zero(rewards, num_generations=4):
    return 0 * rewards.view(-1, num_generations).flatten()


@fault("no-gradient", "value_loss")
def detached(vpreds, values, returns, response_mask, cliprange_value=0.37):
    clipped = values + (vpreds - values).clamp(-cliprange_value, cliprange_value)
    error = torch.max((vpreds - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * masked_mean(error, response_mask).detach()


# Groups whose size divides no power of 2


@right("policy_loss", aggregation="prompt-mean", clip_low=0.2, clip_high=0.2)
def of_seven(logps, old_logps, advantages, mask, num_generations=7):
    x = surrogate(logps, old_logps, advantages) * mask
    total, count = (y.sum(1).view(-1, num_generations).sum(1) for y in (x, mask))
    return -(total / count).mean()


@right("aggregate", aggregation="prompt-mean")
def of_five(loss, mask, group_size=5):
    total, count = ((y * mask).sum(1).view(-1, group_size).sum(1) for y in (loss, mask))
    return (total / count).mean()


@right("gae", gamma=0.97, lam=0.9, bootstrap=True)
def gae_of_arrays(rewards, values, episode_starts, last_values, dones, gamma=0.97, lam=0.9):
    "Over NumPy's arrays, as stable-baselines3's."
    out, last, n = np.zeros_like(rewards), 0, len(rewards)
    for t in reversed(range(n)):
        goes_on = 1.0 - (dones if t == n - 1 else episode_starts[t + 1])
        following = last_values if t == n - 1 else values[t + 1]
        delta = rewards[t] + gamma * following * goes_on - values[t]
        out[t] = last = delta + gamma * lam * goes_on * last
    return out, out + values


@right("gae", gamma=0.97, lam=0.9, bootstrap=True)
def td_lambda(rewards, values, next_values, terminated, truncated, gamma=0.97, lmbda=0.9):
    "Returns of the next values alone."
    out, last = [], next_values[-1]
    for t in reversed(range(len(rewards))):
        following = next_values[t] * ~terminated[t]
        cut = terminated[t] | truncated[t] | (t == len(rewards) - 1)
        last = rewards[t] + gamma * torch.where(
            cut, following, (1 - lmbda) * following + lmbda * last)
        out.insert(0, last)
    return torch.stack(out)


@right("gae", gamma=0.9)
def token_returns(token_rewards, response_mask, gamma=0.9):
    steps = torch.arange(token_rewards.shape[1], dtype=token_rewards.dtype)
    powers = torch.tril(gamma ** (steps[:, None] - steps))
    return (token_rewards * response_mask) @ powers * response_mask


@fault("mask-leak", "whiten")
def whitened_with_zeros(x, mask):
    x = x * mask
    return (x - x.mean()) / (x.std() + 1e-8) * mask


@fault("scale", "gae")
def lambda_squared(rewards, values, next_value, dones, gamma=0.9, lam=0.8):
    values = torch.cat([values, next_value[None]])
    out, last = [], 0
    for t in reversed(range(len(rewards))):
        goes_on = 1 - dones[t].to(values)
        last = rewards[t] + gamma * values[t + 1] * goes_on - values[t] + (
            gamma * lam * lam * goes_on * last)
        out.insert(0, last)
    return torch.stack(out)


@fault("baseline", "group_advantage")
def means_repeated_the_other_way(rewards, num_generations=4):
    return rewards - rewards.view(-1, num_generations).mean(1).repeat(num_generations)


@fault("deviation", "whiten")
def whitened_by_a_sum(x, mask):
    z = x - masked_mean(x, mask)
    return z / ((z.square() * mask).sum() + 1e-8).sqrt()


@fault("baseline", "preference_loss")
def reference_crossed(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps):
    h = chosen_logps - ref_rejected_logps - rejected_logps + ref_chosen_logps
    return -F.logsigmoid(0.1 * h).mean()


@right("gae", gamma=0.9, lam=0.8, bootstrap=True)
def masks_are_of_steps(rewards, values, masks, gamma=0.9, lam=0.8):
    "One value more than rewards: a mask is 0 where an episode ends."
    out, last = [], 0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * values[t + 1] * masks[t] - values[t]
        last = delta + gamma * lam * masks[t] * last
        out.insert(0, last)
    return torch.stack(out)


def of_two_ends(rewards, values, next_values, terminated, end, gamma, lam):
    out, last = [], 0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_values[t] * ~terminated[t] - values[t]
        last = delta + gamma * lam * ~end[t] * last
        out.insert(0, last)
    return torch.stack(out)


@right("gae", gamma=0.9, lam=0.8, bootstrap=True)
def done_is_terminated(rewards, values, next_values, dones, truncated, gamma=0.9, lam=0.8):
    return of_two_ends(rewards, values, next_values, dones, dones | truncated, gamma, lam)


@right("gae", gamma=0.9, lam=0.8, bootstrap=True)
def done_is_either(rewards, values, next_values, dones, truncated, gamma=0.9, lam=0.8):
    return of_two_ends(rewards, values, next_values, dones & ~truncated, dones, gamma, lam)


@fault("no-bootstrap", "gae")
def done_and_no_bootstrap(rewards, values, next_values, dones, truncated, gamma=0.9, lam=0.8):
    either = dones | truncated
    return of_two_ends(rewards, values, next_values, either, either, gamma, lam)


# An option or a dual clip, and yet no clip; tokens of two responses


@fault("clip-missing option-without-effect", "policy_loss", clip_low=None, clip_high=None)
def eps_stands_there(logp, old_logp, adv, mask, eps=0.2):
    return -masked_mean((logp - old_logp).exp() * adv, mask)


@fault("clip-missing", "policy_loss", clip_high=None, dual_clip=3.7)
def dual_clip_alone(logp, old_logp, adv, mask, clip_ratio_c=3.7):
    x = (logp - old_logp).exp() * adv
    return -masked_mean(torch.where(adv < 0, torch.max(x, clip_ratio_c * adv), x), mask)


@fault("no-min", "policy_loss")
def clamp_above_alone(logp, old_logp, adv, mask, eps=0.2):
    return -masked_mean((logp - old_logp).exp().clamp(max=1 + eps) * adv, mask)


def lead(chosen, rejected, ref_chosen, ref_rejected):
    return (chosen - ref_chosen) - (rejected - ref_rejected)


@right("preference_loss", form="sigmoid", beta=0.37)
def dpo_of_tokens(
    chosen_logps,
    rejected_logps,
    ref_chosen_logps,
    ref_rejected_logps,
    chosen_mask,
    rejected_mask,
    beta=0.37,
):
    pairs = (chosen_logps, chosen_mask), (rejected_logps, rejected_mask)
    refs = (ref_chosen_logps, chosen_mask), (ref_rejected_logps, rejected_mask)
    return -F.logsigmoid(beta * lead(*((x * m).sum(-1) for x, m in pairs + refs)))


@right("preference_loss", form="sigmoid", beta=2.3, margin=0.7)
def simpo_of_tokens(chosen_lp, rejected_lp, chosen_pad_mask, rejected_pad_mask, beta=2.3):
    h = rows(chosen_lp, ~chosen_pad_mask) - rows(rejected_lp, ~rejected_pad_mask)
    return -F.logsigmoid(beta * h - 0.7).mean()


@fault("mask-ignored", "preference_loss")
def dpo_of_padding(
    chosen_logps,
    rejected_logps,
    ref_chosen_logps,
    ref_rejected_logps,
    chosen_mask,
    rejected_mask,
    beta=0.1,
):
    pairs = (chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    return -F.logsigmoid(beta * lead(*(x.sum(-1) for x in pairs))).mean()


@fault("mask-leak", "preference_loss")
def masks_crossed(
    chosen_logps,
    rejected_logps,
    ref_chosen_logps,
    ref_rejected_logps,
    chosen_mask,
    rejected_mask,
    beta=0.1,
):
    x = ((chosen_logps - ref_chosen_logps) * rejected_mask).sum(-1)
    y = ((rejected_logps - ref_rejected_logps) * chosen_mask).sum(-1)
    return -F.logsigmoid(beta * (x - y)).mean()


# Each finding where it is rare


@fault("sign", "policy_loss")
def squared_advantage(logp, old_logp, adv, mask):
    return -masked_mean(surrogate(logp, old_logp, adv.abs()), mask)


@fault("kl-estimator", "policy_loss", kl="k1")
def k1_in_the_loss(logp, old_logp, ref_logp, adv, mask, beta=0.05):
    return masked_mean(-surrogate(logp, old_logp, adv) + beta * (logp - ref_logp), mask)


@right("policy_loss", scale=0.5, clip_low=0.2)
def scaled_by_an_option(logp, old_logp, adv, mask, policy_coef=0.5):
    return -policy_coef * masked_mean(surrogate(logp, old_logp, adv), mask)


@fault("no-gradient", "gae")
def rewards_not_read(rewards, values, dones, next_value, gamma=0.99, lam=0.95):
    live = 1 - dones.double()
    return recursion(0 * rewards, values, live, live, next_value, gamma, lam)[0]


@fault("off-by-one", "gae")
def own_value_for_the_next(rewards, values, dones, next_value, gamma=0.99, lam=0.95):
    live = 1 - dones.double()
    following = torch.cat([values[:1], values[:-1]])
    return recursion(rewards, following, live, live, next_value, gamma, lam)[0]


@fault("off-by-one", "gae")
def without_its_own_reward(rewards, dones, gamma=0.9):
    out, run = torch.zeros_like(rewards), 0
    for t in reversed(range(len(rewards))):
        out[t] = run
        run = rewards[t] + gamma * run * (1 - dones[t])
    return out


@fault("baseline", "gae")
def returns_are_advantages(rewards, values, dones, next_value, gamma=0.99, lam=0.95):
    live = 1 - dones.double()
    adv, _ = recursion(rewards, values, live, live, next_value, gamma, lam)
    return {"advantages": adv, "returns": adv.clone()}


@fault("off-by-one", "gae")
def returns_of_the_next_step(rewards, values, dones, next_value, gamma=0.99, lam=0.95):
    live = 1 - dones.double()
    adv, _ = recursion(rewards, values, live, live, next_value, gamma, lam)
    return adv, adv + torch.cat([values[1:], next_value[None]])


@right("gae", known=False, steps=3)
def three_steps(rewards, values, dones, next_value, gamma=0.9):
    after, live = torch.cat([values, next_value[None]]), 1 - dones.double()
    out = []
    for t in range(len(rewards)):
        total, keep = 0, torch.ones_like(rewards[0])
        for k in range(3):
            if t + k < len(rewards):
                total, keep = total + keep * rewards[t + k], keep * gamma * live[t + k]
        out.append(total + keep * after[min(t + 3, len(rewards))] - values[t])
    return torch.stack(out)


@fault("scale", "group_advantage")
def twice_the_centred(rewards, group_size=4):
    groups = rewards.view(-1, group_size)
    return 2 * (groups - groups.mean(1, keepdim=True)).flatten()


@fault("scale", "group_advantage")
def twice_the_standardised(rewards, group_size=4):
    groups = rewards.view(-1, group_size)
    return (2 * (groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)).flatten()


@fault("no-gradient", "kl")
def kl_of_one(logprobs, ref_logprobs):
    return 0 * (logprobs - ref_logprobs)


@fault("kl-sign", "kl")
def a_divergence_below_zero(logprobs, ref_logprobs):
    return -(logprobs - ref_logprobs).cosh() + 1


@right("kl", known=False, estimator="abs")
def absolute(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs).abs()


@fault("no-gradient", "log_prob")
def of_data_alone(logits, labels):
    return logits.data.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


@fault("scale", "log_prob")
def not_normalised(logits, labels):
    return logits.gather(-1, labels[..., None])[..., 0]


@fault("temperature", "log_prob")
def rooted(logits, labels, temperature=0.5):
    return (logits / temperature**0.5).log_softmax(-1).gather(-1, labels[..., None])[..., 0]


@fault("no-gradient", "entropy")
def entropy_of_data(logits):
    return torch.distributions.Categorical(logits=logits.data).entropy()


@fault("no-gradient", "aggregate")
def losses_detached(loss, mask):
    return masked_mean(loss.detach(), mask)


@fault("sign", "aggregate")
def turned(loss, mask):
    return -masked_mean(loss, mask)


@fault("aggregation", "aggregate")
def first_token_twice(loss, mask):
    weights = mask * (1 + (torch.arange(loss.shape[1]) == 0))
    return (loss * weights).sum() / weights.sum()


@fault("mask-ignored", "whiten")
def whitened_without_mask(x, mask):
    return (x - x.mean()) / (x.std() + 1e-8)


@fault("sign", "whiten")
def mean_less_x(x, mask):
    mean = masked_mean(x, mask)
    return (mean - x) * torch.rsqrt(masked_mean((x - mean) ** 2, mask) + 1e-8)


@fault("baseline", "whiten")
def mean_added_twice(x, mask):
    mean = masked_mean(x, mask)
    return (x - mean) * torch.rsqrt(masked_mean((x - mean) ** 2, mask) + 1e-8) + 2 * mean


def of_lead(h):
    def loss(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta=0.37):
        return h(beta, lead(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps))

    return loss


fault("sign", "preference_loss", form="ipo")(
    of_lead(lambda beta, h: ((h + 1 / (2 * beta)) ** 2).mean())
)
fault("scale", "preference_loss", form="ipo")(
    of_lead(lambda beta, h: 3 * ((h - 1 / (2 * beta)) ** 2).mean())
)
fault("sign", "preference_loss")(of_lead(lambda beta, h: torch.relu(1 + beta * h).mean()))
fault("scale", "preference_loss")(of_lead(lambda beta, h: -3 * F.logsigmoid(beta * h).mean()))
fault("no-gradient", "preference_loss")(
    of_lead(lambda beta, h: -F.logsigmoid(beta * h.detach()).mean())
)


@right("preference_loss", form="apo_zero", beta=0.37)
def apo(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta=0.37):
    better, worse = chosen_logps - ref_chosen_logps, rejected_logps - ref_rejected_logps
    return (1 - torch.sigmoid(beta * better) + torch.sigmoid(beta * worse)).mean()
