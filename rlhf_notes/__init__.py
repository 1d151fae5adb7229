"""Every formula of PPO, GRPO and RLHF: explained, proved, drawn, and shipped as a library.

All of `rlhf_notes.formulas` can be imported from here; a module is loaded when one of its names is first asked for.
"""
__version__ = "0.1.0"

from importlib import import_module as _import_module

FORMULAS = {
    "masking": ("AGGREGATION_MODES", "apply_mask", "masked_sum", "masked_mean", "centre", "masked_var", "aggregate_loss"),
    "logprob": ("selective_log_softmax", "naive_method", "less_efficient_method", "efficient_method", "entropy_from_logits", "log_probs_and_entropy", "linear_log_probs",
                "gaussian_log_prob", "gaussian_entropy", "tanh_log_det"),
    "ratio": ("RATIO_LEVELS", "bounded_log_ratio", "importance_ratio", "effective_sample_size", "truncated_importance_weight"),
    "surrogate": ("CLIP_KINDS", "clipped_surrogate", "clip_fraction"),
    "value": ("value_loss", "value_clip_fraction", "explained_variance", "value_transform", "value_inv_transform", "symlog", "inv_symlog"),
    "kl": ("KL_KINDS", "kl_estimate", "calculate_kl_div", "exact_kl", "kl_loss", "FixedKLController", "AdaptiveKLController"),
    "whitening": ("whiten", "RunningMoments"),
    "advantage": ("GROUP_SCALES", "accumulate", "discounted_returns", "gae", "gae_tokens", "group_advantage", "rloo_advantage", "reinforce_pp_advantage"),
    "reward": ("PENALTY_MODES", "best_of_n_loss", "bradley_terry_loss", "RewardNorm", "token_rewards", "truncate_at_stop", "apply_penalty",
               "overlong_penalty"),
    "ppo": ("ppo_data", "ppo_data_continuous", "ppo_policy_data", "ppo_policy_data_continuous", "ppo_value_data", "ppo_loss", "ppo_policy_loss", "ppo_info",
            "PPO_REDUCTIONS", "ppo_policy_error", "ppo_policy_error_continuous", "ppo_value_error", "ppo_error", "ppo_error_continuous", "shape_fn_ppo", "PPOLoss"),
    "grpo": ("grpo_policy_data", "grpo_info", "rloo_policy_data", "rloo_info", "POLICY_VARIANTS", "DPO_KINDS", "grpo_policy_error", "rloo_policy_error", "policy_loss",
             "off_policy_sequence_mask", "dpo_loss"),
}
_MODULE_OF = {name: module for module, names in FORMULAS.items() for name in names}
__all__ = list(_MODULE_OF)


def __getattr__(name):
    if name == "check":
        return _import_module(".exercises.check", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(_import_module(f".formulas.{_MODULE_OF[name]}", __name__), name)
    return value


def __dir__():
    return sorted({*globals(), *__all__})
