"""Every default of a formula by its value: what a paper says is not changed by accident."""
import inspect
from importlib import import_module
from pkgutil import iter_modules

import pytest

import rlhf_notes as rn
from rlhf_notes import compat, fast, formulas

DEFAULTS = {  # None and False, which mean "without", are not listed
    "gae": dict(gamma=0.99, lam=0.95),
    "gae_tokens": dict(gamma=1.0, lam=0.95),
    "length_adaptive_lambda": dict(alpha=0.05),
    "group_advantage": dict(scale="std", eps=0.0001),
    "multi_reward_advantage": dict(eps=0.0001),
    "reinforce_pp_advantage": dict(gamma=1.0),
    "distillation_loss": dict(kind="reverse", beta=0.5, temperature=1.0),
    "register_variant": dict(aggregation="token-mean", eps_low=0.2, eps_high=0.2),
    "policy_loss": dict(variant="ppo", beta=0.04, kl_kind="k3", tau=(1.0, 1.05), divergence="tv"),
    "aggregation_weights": dict(mode="token-mean"),
    "kl_estimate": dict(kind="k1"),
    "kl_loss": dict(kind="k2"),
    "rollout_rejection_mask": dict(kind="k1", threshold=0.01),
    "AdaptiveKLController.__init__": dict(init=0.15, target=6.0, horizon=10000),
    "log_softmax": dict(temperature=1.0),
    "selective_log_softmax": dict(temperature=1.0),
    "entropy_from_logits": dict(temperature=1.0),
    "log_probs_and_entropy": dict(temperature=1.0),
    "linear_log_probs": dict(temperature=1.0),
    "aggregate_count": dict(mode="token-mean"),
    "aggregate_loss": dict(mode="token-mean"),
    "ppo_loss": dict(eps_low=0.2, value_coef=0.5, entropy_coef=0.01, beta=0.04, kl_kind="k2"),
    "ppo_stats": dict(eps_low=0.2),
    "top_entropy_mask": dict(share=0.2),
    "clip_cov_mask": dict(share=0.0002, low=1.0, high=5.0),
    "kl_cov_penalty": dict(share=0.0002),
    "bradley_terry_loss": dict(margin=0.0, centre=0.0),
    "dpo_loss": dict(beta=0.1, label_smoothing=0.0, kind="sigmoid", reduction="mean", alpha=1.0),
    "implicit_reward": dict(beta=0.1),
    "simpo_loss": dict(beta=2.0, gamma=1.0),
    "orpo_loss": dict(weight=0.1),
    "kto_loss": dict(beta=0.1, weight_desirable=1.0, weight_undesirable=1.0),
    "importance_ratio": dict(level="token"),
    "m2_mask": dict(limit=0.04),
    "turn_advantage": dict(baseline="leave-one-out"),
    "truncated_importance_weight": dict(cap=2.0, level="token", above="cap"),
    "RewardNorm.__init__": dict(gain=1.0, bias=0.0),
    "RewardNorm.fit": dict(mean=0.0, std=1.0),
    "truncate_at_stop": dict(after=0),
    "apply_penalty": dict(penalty=-1.0, mode="replace"),
    "clipped_surrogate": dict(eps_low=0.2),
    "clip_fraction": dict(eps_low=0.2, kind="binding"),
    "value_transform": dict(eps=0.01),
    "value_inv_transform": dict(eps=0.01),
    "whiten": dict(shift_mean=True, eps=1e-08),
    "RunningMoments.__init__": dict(shape=()),
    "RunningMoments.whiten": dict(eps=1e-08),
    "ppo_policy_error": dict(clip_ratio=0.2, entropy_bonus=True, kl_type="k1"),
    "ppo_policy_error_continuous": dict(clip_ratio=0.2, kl_type="k1"),
    "ppo_value_error": dict(clip_ratio=0.2, use_value_clip=True),
    "ppo_error": dict(clip_ratio=0.2, use_value_clip=True, kl_type="k1"),
    "ppo_error_continuous": dict(clip_ratio=0.2, use_value_clip=True, kl_type="k1"),
    "grpo_policy_error": dict(log_prob_fn=rn.efficient_method, clip_ratio=0.2, beta=0.1),
    "rloo_policy_error": dict(log_prob_fn=rn.efficient_method, clip_ratio=0.2),
    "PPOLoss.__init__": dict(epsilon=0.1, value_clip_range=0.2, value_coeff=0.1),
}


def public():
    "Functions and methods of formulas and compat, by name."
    for package in (formulas, compat):
        for info in iter_modules(package.__path__):
            module = import_module(f"{package.__name__}.{info.name}")
            for name in module.__all__:
                x = getattr(module, name)
                if inspect.isfunction(x): yield name, x
                elif inspect.isclass(x) and not issubclass(x, tuple):
                    methods = {k: f for k, f in vars(x).items() if inspect.isfunction(f)}
                    yield from ((f"{name}.{k}", f) for k, f in methods.items())


@pytest.mark.parametrize("name, function", sorted(public(), key=lambda x: x[0]))
def test_defaults_are_what_they_were(name, function):
    parameters = inspect.signature(function).parameters.values()
    found = {p.name: p.default for p in parameters if p.default is not p.empty}
    found = {k: x for k, x in found.items() if x is not None and x is not False}
    assert found == DEFAULTS.get(name, {})


def doors():
    "What runs in the place of a formula."
    for info in iter_modules(fast.__path__):
        for name, f in vars(import_module(f"rlhf_notes.fast.{info.name}")).items():
            plain = getattr(f, "plain", None)
            if getattr(plain, "__module__", "").startswith("rlhf_notes.formulas"):
                yield f"{info.name}.{name}", f


def test_a_default_stands_once():
    "The formula's: a door gets it from there."
    found = dict(doors())
    assert {"rows.log_softmax", "rows.log_prob", "linear.log_probs", "scan.gae"} < found.keys()
    for name, f in found.items():
        parameters = inspect.signature(f).parameters.values()
        assert all(p.default is p.empty for p in parameters), name
        assert [p.name for p in parameters] == [*inspect.signature(f.plain).parameters], name
