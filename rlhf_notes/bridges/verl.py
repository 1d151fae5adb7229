"""Every policy loss and advantage of ours as a `loss_mode` and an `adv_estimator` of verl.

verl trains on many GPUs: Ray, FSDP or Megatron, vLLM or SGLang. At `import verl` it loads what the
entry points `verl.plugins` of other packages name. Ours is one of them, so nothing has to be
imported:

```sh
pip install rlhf_notes verl
python -m verl.trainer.main_ppo \\
    actor_rollout_ref.actor.policy_loss.loss_mode=rlhf_notes_gspo \\
    actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.actor.clip_ratio_high=4e-4 \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \\
    algorithm.adv_estimator=rlhf_notes_rloo ...
```

An advantage of your own, f(rewards (P, G), mask) -> (P, G), gets a name by
`register_advantage("mine", f)`: `algorithm.adv_estimator=rlhf_notes_mine`. verl gives its losses
neither entropy nor reference, and groups need not lie together: of what an objective of
`register_variant` may ask for, it gets logp_old and lengths, and is refused if it asks for more.

The options are verl's, with verl's defaults: without the clip ratios, `rlhf_notes_gspo` would get
the clip range of PPO. A group of one has the advantage 0 here, and its own score in verl. verl
adds the KL to the loss itself; there is no hook for ours. An estimator of another name than `gae`
is not given the values in verl 0.9.1: `rlhf_notes_gae` says so.

verl computes a loss microbatch by microbatch, on each of `dp_size` processes whose gradients are
averaged. What the whole batch counts, `config.global_batch_info`, becomes our `total`, and the
loss is multiplied by `dp_size`.
"""

__all__ = ['ACTOR', 'AGGREGATIONS', 'OPTIONS', 'DUAL', 'verl_loss', 'register_loss',
           'register_advantage']

from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..checks import told_as
from ..formulas import advantage
from ..formulas.grpo import VARIANT_LISTENERS, POLICY_VARIANTS, policy_loss
from ..formulas.masking import aggregate_count, masked_mean
from ..formulas.whitening import whiten


try:
    from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss
except ImportError as e:
    raise ImportError("rlhf_notes.bridges.verl needs verl with register_policy_loss and "
                      f"register_adv_est, as 0.9.1 has them (pip install verl): {e}") from e


def verl_loss(
    variant: str,  # one of `POLICY_VARIANTS`
    old_log_prob: Tensor,  # (B, T) nats
    log_prob: Tensor,  # (B, T) nats, with gradient
    advantages: Tensor,  # (B, T)
    response_mask: Tensor,  # (B, T) bool, or 0 and 1
    loss_agg_mode: str = "token-mean",  # one of `AGGREGATIONS`
    config=None,  # of verl's actor
    rollout_is_weights: Tensor | None = None,  # (B, T)
    **others,  # none in 0.9.1
) -> tuple[Tensor, dict]:  # 0-dim loss; metrics under verl's names
    "`policy_loss` as verl calls its losses."
    if others:
        raise TypeError(f"{ACTOR}policy_loss.loss_mode=rlhf_notes_{variant} knows the arguments of "
                        f"verl 0.9.1, got {', '.join(others)} besides")
    info, mask, bounds = config.global_batch_info, response_mask.bool(), _ranges(variant, config)
    with told_as(OPTIONS):
        loss, stats = policy_loss(log_prob, old_log_prob, advantages, mask, variant,
                                  weight=rollout_is_weights, **bounds,
                                  **_divisors(loss_agg_mode, mask, info))
    d = log_prob.detach() - old_log_prob
    held = (advantages < 0) & (d.exp() > bounds.get("dual_clip", torch.inf))
    numbers = {"actor/ppo_kl": -masked_mean(d, mask),
               "actor/pg_clipfrac_lower": masked_mean(held.float(), mask)}
    if "clip_fraction" in stats:  # of an objective of one's own only if it tells
        numbers["actor/pg_clipfrac"] = stats["clip_fraction"]
    found = dict(zip(numbers, torch.stack([*numbers.values()]).tolist()))
    return loss * (info.get("dp_size") or 1), found


def register_loss(variant: str):  # one of `POLICY_VARIANTS`
    "Make a variant verl's `loss_mode=rlhf_notes_VARIANT`."
    register_policy_loss(f"rlhf_notes_{variant}")(partial(verl_loss, variant))

for name in POLICY_VARIANTS:
    register_loss(name)
VARIANT_LISTENERS.append(register_loss)  # `register_variant` from here on


def register_advantage(
    name: str,  # of verl's `adv_estimator=rlhf_notes_NAME`
    function,  # f(rewards (P, G), mask (P, G) bool) -> (P, G), as `RLHF(advantage=)`
):
    "Make an advantage of one's own known to verl."
    def estimate(token_level_rewards, response_mask, index, **_):
        def f(rewards, mask): return advantage.advantage_of(function, rewards, mask)
        return _by_group(f, token_level_rewards, response_mask, index)
    register_adv_est(f"rlhf_notes_{name}")(estimate)

register_advantage("rloo", advantage.rloo_advantage)


@register_adv_est("rlhf_notes_group")
def _group(token_level_rewards, response_mask, index, config, **_):
    scale = "std" if config.get("norm_adv_by_std_in_grpo", True) else None
    f = partial(advantage.group_advantage, scale=scale)
    return _by_group(f, token_level_rewards, response_mask, index)


@register_adv_est("rlhf_notes_reinforce_pp")
def _reinforce_pp(token_level_rewards, response_mask, config, **_):
    mask, gamma = response_mask.bool(), config.get("gamma", 1.0)
    return (advantage.reinforce_pp_advantage(token_level_rewards, mask, gamma),) * 2


@register_adv_est("rlhf_notes_gae")
def _gae(token_level_rewards, response_mask, config, values=None, **_):
    if values is None:
        raise ValueError("algorithm.adv_estimator must be gae, the one that verl 0.9.1 hands "
                         "values to, got rlhf_notes_gae")
    mask, gamma, lam = response_mask.bool(), config.get("gamma", 1.0), config.get("lam", 1.0)
    A, returns = advantage.gae_tokens(token_level_rewards, values, mask, gamma, lam)
    return whiten(A, mask), returns


def _by_group(f, rewards, mask, index):
    "Advantages within groups of any size, as verl wants them: twice; index names the prompts."
    scores = rewards.sum(1)
    names = np.unique(np.asarray(index), return_inverse=True)[1]
    row = torch.as_tensor(names, device=scores.device)
    column = (row[:, None] == row).tril(-1).sum(1)  # how many of the group came before
    shape = int(row.max()) + 1, max(2, int(column.max()) + 1)
    table, present = scores.new_zeros(shape), torch.zeros(shape, dtype=bool, device=scores.device)
    table[row, column], present[row, column] = scores, True
    return (f(table, mask=present)[row, column, None] * mask,) * 2


ACTOR = "actor_rollout_ref.actor."
AGGREGATIONS = {  # verl's -> ours, and the number of the batch that it is divided by
    "token-mean":              ("token-mean",          "batch_num_tokens"),
    "token-sum":               ("token-mean",          None),
    "seq-mean-token-mean":     ("seq-mean-token-mean", "global_batch_size"),
    "seq-mean-token-sum":      ("seq-mean-token-sum",  "global_batch_size"),
    "seq-mean-token-sum-norm": ("constant",            "global_batch_size"),
}


def _divisors(mode, mask, info):
    "aggregation, total and length of `policy_loss`; info is verl's `global_batch_info`."
    if mode not in AGGREGATIONS:
        raise ValueError(f"{ACTOR}loss_agg_mode must be one of {', '.join(AGGREGATIONS)}, "
                         f"got {mode!r}")
    aggregation, count = AGGREGATIONS[mode]
    total = 1 if count is None else info.get(count)
    if total is None and (info.get("dp_size") or 1) > 1:
        raise ValueError(f"global_batch_info must have {count} for {ACTOR}loss_agg_mode={mode} "
                         f"and a dp_size above 1, got {info}")
    if total is None:
        total = aggregate_count(mask, "token-mean" if count[0] == "b" else "seq-mean-token-sum")
    return dict(aggregation=aggregation, total=int(total), length=info.get("loss_scale_factor"))


OPTIONS = dict(  # argument of `policy_loss` -> option of verl
    eps_low=f"{ACTOR}clip_ratio_low", eps_high=f"{ACTOR}clip_ratio_high",
    dual_clip=f"{ACTOR}clip_ratio_c", tau=f"{ACTOR}tau_pos or tau_neg",
    length=f"{ACTOR}loss_scale_factor", advantage="advantages", weight="rollout_is_weights")
DUAL = ("ppo", "grpo", "dr_grpo", "dapo")  # verl's vanilla has the dual clip, its gspo has none


def _ranges(variant, config):
    "eps_low, eps_high, dual_clip and tau of `policy_loss`; config is that of verl's actor."
    found = dict(tau=(config.get("tau_pos", 1.0), config.get("tau_neg", 1.05)))
    if POLICY_VARIANTS[variant][1] is not None:
        low, high = (config.get(f"clip_ratio_{x}") for x in ("low", "high"))
        found["eps_low"] = config.clip_ratio if low is None else low
        found["eps_high"] = config.clip_ratio if high is None else high
    if variant in DUAL:
        found["dual_clip"] = config.get("clip_ratio_c", 3.0)
    return found
