"verl's losses beside ours under verl's interface; needs verl."

import torch
from bridges.agreement import SEEDS, batch, difference
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

LOSSES = {  # theirs, loss_agg_mode, clip_ratio_low, clip_ratio_high
    "ppo": ("vanilla", "token-mean", 0.2, 0.2),
    "grpo": ("vanilla", "seq-mean-token-mean", 0.2, 0.2),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm", 0.2, 0.2),
    "dapo": ("vanilla", "token-mean", 0.2, 0.28),
    "gspo": ("gspo", "seq-mean-token-mean", 3e-4, 4e-4),
    "gspo_token": ("gspo", "seq-mean-token-mean", 3e-4, 4e-4),
    "cispo": ("cispo", "token-mean", 0.2, 0.28),
    "sapo": ("sapo", "seq-mean-token-mean", 0.2, 0.2),
    "gmpo": ("geo_mean", "seq-mean-token-mean", 0.4, 0.4),
}
CASES = "plain", "parts", "weights"
KNOWN = {  # (variant, case) -> why value or gradient differ by more than rounding
    ("gspo", "weights"): "verl's gspo is our gspo_token: the same value, another gradient",
    ("gmpo", "weights"): "verl multiplies a response by the geometric mean of its weights, "
    "we multiply each token by its own",
    ("gmpo", "parts"): "verl divides by the responses of the microbatch, whatever the batch has",
}


def actor(low=0.2, high=0.2, **info):
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        ppo_mini_batch_size=8,
        clip_ratio=0.2,
        clip_ratio_low=low,
        clip_ratio_high=high,
    )
    everything = dict(
        dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None
    )
    config.global_batch_info.update(everything | info)
    return config


def call(name, mode, config, old, A, mask, weight=None):
    "f(log_prob) -> loss, of verl's registry."
    f = get_policy_loss_fn(name)
    return lambda x: f(
        old_log_prob=old,
        log_prob=x,
        advantages=A,
        response_mask=mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weight,
    )[0]


def compare(variant, case, seed):
    "Differences of value and gradient between rlhf_notes_VARIANT and verl's own."
    theirs, mode, low, high = LOSSES[variant]
    logp, old, A, mask, weight = batch(seed)
    # a quarter of the batch: one of two microbatches on one of two processes
    info = dict(dp_size=2, batch_num_tokens=int(mask.sum()) * 4, global_batch_size=32)
    config = actor(low, high, **info if case == "parts" else {})
    rest = config, old, A, mask, weight if case == "weights" else None
    return difference(call(f"rlhf_notes_{variant}", mode, *rest), call(theirs, mode, *rest), logp)


def worst(variant, case):
    return torch.tensor([compare(variant, case, seed) for seed in SEEDS]).amax(0).tolist()
