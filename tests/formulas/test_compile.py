"""Every formula goes through torch.compile, in one graph unless it returns Python floats, and
computes in double precision what it is given in double precision.
"""
import os

import pytest
import torch
from strategies import normal, random_mask

import rlhf_notes as rn

x, y, z = (normal(seed, (4, 5)) for seed in (0, 1, 2))
m = random_mask(3, (4, 5))
done = random_mask(4, (4, 5), 0.3)
logits, logits_ref = normal(5, (4, 5, 7)), normal(6, (4, 5, 7))
index = torch.arange(20).reshape(4, 5) % 7

CALLS = {
    "ppo_loss": lambda: (lambda a: rn.ppo_loss(a, y, z, value=x, returns=y, entropy=z, mask=m)[0],
                         x),
    "ppo_stats": lambda: (lambda a: rn.ppo_stats(a, y, z, m)["approx_kl"], x),
    "top_entropy_mask": lambda: (lambda a: rn.top_entropy_mask(a, m) * a, x),
    "clip_cov_mask": lambda: (lambda a, b, c: rn.clip_cov_mask(a, b, c, m, 0.5, -1.0, 1.0) * a, x,
                              y, z),
    "kl_cov_penalty": lambda: (lambda a, b, c: rn.kl_cov_penalty(a, b, c, m, 0.3), x, y, z),
    "aggregation_weights": lambda: (lambda a: (rn.aggregation_weights(m, "token-mean") * a).sum(),
                                  x),
    "apply_mask": lambda: (lambda a: rn.apply_mask(a, m), x),
    "masked_sum": lambda: (lambda a: rn.masked_sum(a, m, 1), x),
    "masked_mean": lambda: (lambda a: rn.masked_mean(a, m), x),
    "centre": lambda: (lambda a: rn.centre(a, m, 1), x),
    "masked_var": lambda: (lambda a: rn.masked_var(a, m, unbiased=True), x),
    "aggregate_count": lambda: (lambda a: rn.aggregate_count(m, "constant") * a.sum(), x),
    "aggregate_loss": lambda: (lambda a: rn.aggregate_loss(a, m, "seq-mean-token-mean"), x),
    "naive_method": lambda: (lambda a: rn.naive_method(a, index), logits),
    "less_efficient_method": lambda: (lambda a: rn.less_efficient_method(a, index), logits),
    "efficient_method": lambda: (lambda a: rn.efficient_method(a, index), logits),
    "log_softmax": lambda: (lambda a: rn.log_softmax(a, 0.7), logits),
    "selective_log_softmax": lambda: (lambda a: rn.selective_log_softmax(a, index, 0.7), logits),
    "entropy_from_logits": lambda: (lambda a: rn.entropy_from_logits(a, 0.7), logits),
    "log_probs_and_entropy": lambda: (lambda a: sum(rn.log_probs_and_entropy(a, index, 0.7)),
                                      logits),
    "linear_log_probs": lambda: (lambda a, b: rn.linear_log_probs(a, b, index, chunk=2),
                                 normal(7, (4, 5, 3)), normal(8, (7, 3))),
    "gaussian_log_prob": lambda: (lambda a, b, c: rn.gaussian_log_prob(a, b, c.exp(), m[:, 0]), x,
                                  y, z),
    "gaussian_entropy": lambda: (lambda a: rn.gaussian_entropy(a.exp(), m[:, 0]), x),
    "tanh_log_det": lambda: (rn.tanh_log_det, x),
    "bounded_log_ratio": lambda: (rn.bounded_log_ratio, x * 1e3),
    "importance_ratio": lambda: (lambda a, b: rn.importance_ratio(a, b, m, "sequence"), x, y),
    "effective_sample_size": lambda: (lambda a: rn.effective_sample_size(a, m), x.exp()),
    "truncated_importance_weight": lambda: (lambda a, b: rn.truncated_importance_weight(a, b, 1.5,
                                                                                        m), x, y),
    "clipped_surrogate": lambda: (lambda a, b: rn.clipped_surrogate(a, b, eps_high=0.28,
                                                                    dual_clip=3.0), x.exp(), y),
    "clip_fraction": lambda: (lambda a, b: rn.clip_fraction(a, b, mask=m), x.exp(), y),
    "value_loss": lambda: (lambda a, b, c: rn.value_loss(a, b, c, 0.2), x, y, z),
    "value_clip_fraction": lambda: (lambda a, b, c: rn.value_clip_fraction(a, b, c, 0.2, m), x, y,
                                    z),
    "explained_variance": lambda: (lambda a, b: rn.explained_variance(a, b, m), x, y),
    "value_transform": lambda: (rn.value_transform, x),
    "value_inv_transform": lambda: (rn.value_inv_transform, x),
    "symlog": lambda: (rn.symlog, x),
    "inv_symlog": lambda: (rn.inv_symlog, x),
    "kl_estimate": lambda: (lambda a, b: rn.kl_estimate(a, b, "k3"), x, y),
    "calculate_kl_div": lambda: (lambda a: rn.calculate_kl_div(a, "k3"), x),
    "exact_kl": lambda: (rn.exact_kl, logits, logits_ref),
    "distillation_loss": lambda: (lambda a, b: rn.distillation_loss(a, b, m, "jsd", 0.3, 0.7),
                                  logits, logits_ref),
    "distillation_advantage": lambda: (lambda a, b: rn.distillation_advantage(a, b, m), x, y),
    "self_distillation_advantage": lambda: (
        lambda a, b: rn.self_distillation_advantage(a, b, m), x, y),
    "turn_advantage": lambda: (
        lambda a: rn.turn_advantage(a.reshape(1, *a.shape), m.reshape(1, *m.shape)), x),
    "observation_loss": lambda: (lambda a: rn.observation_loss(a, m, 0.1), x),
    "m2_mask": lambda: (lambda a, b, c: rn.m2_mask(a, b, c, m, 0.5), x, y, z),
    "kl_loss": lambda: (lambda a, b: rn.kl_loss(a, b, "k3", mask=m, straight_through=True), x, y),
    "rollout_rejection_mask": lambda: (
        lambda a, b: rn.rollout_rejection_mask(a, b, "k3", 0.5, m) * a, x, y),
    "whiten": lambda: (lambda a: rn.whiten(a, m, unbiased=True), x),
    "accumulate": lambda: (lambda a: rn.accumulate(a, 0.9 * done.to(a.dtype)), x),
    "discounted_returns": lambda: (lambda a: rn.discounted_returns(a, done, 0.9), x),
    "gae": lambda: (lambda a, b, c: rn.gae(a, b, c, done, done)[0], x, y, z),
    "gae_tokens": lambda: (lambda a, b: rn.gae_tokens(a, b, m)[0], x, y),
    "length_adaptive_lambda": lambda: (lambda a: rn.length_adaptive_lambda(a.abs() * 100), x),
    "multi_reward_advantage": lambda: (lambda a: rn.multi_reward_advantage(a, mask=m),
                                       logits[..., :2]),
    "group_advantage": lambda: (rn.group_advantage, x),
    "rloo_advantage": lambda: (rn.rloo_advantage, x),
    "reinforce_pp_advantage": lambda: (lambda a: rn.reinforce_pp_advantage(a, m, 0.9), x),
    "token_rewards": lambda: (lambda a, b: rn.token_rewards(a[:, 0], a, b, 0.1, m)[0], x, y),
    "truncate_at_stop": lambda: (lambda a: rn.truncate_at_stop(index + a.long() * 0, 3,
                                                               9)[0].double(), x),
    "apply_penalty": lambda: (lambda a: rn.apply_penalty(a, m), x),
    "overlong_penalty": lambda: (lambda a: rn.overlong_penalty(a.abs() * 10, 16, 8), x),
    "best_of_n_loss": lambda: (lambda a: rn.best_of_n_loss(a, index[:, 0] % 5), x),
    "bradley_terry_loss": lambda: (lambda a, b: rn.bradley_terry_loss(a, b, 0.5), x, y),
    "shape_fn_ppo": lambda: (lambda a: a
                             * rn.shape_fn_ppo((rn.ppo_policy_data(a, a, index, x, None),), {})[-1],
                             logits),
    "policy_loss": lambda: (lambda a, b, c: rn.policy_loss(a, b, c, m, logp_ref=y)[0], x, y, z),
    "off_policy_sequence_mask": lambda: (lambda a, b, c: rn.off_policy_sequence_mask(a, b, c[:, 0],
                                                                                     0.1, m), x, y,
                                         z),
    "implicit_reward": lambda: (lambda a, b: rn.implicit_reward(a, b), x, y),
    "simpo_loss": lambda: (rn.simpo_loss, x, y),
    "orpo_loss": lambda: (lambda a, b: rn.orpo_loss(-a.abs(), -b.abs()), x, y),
    "kto_loss": lambda: (lambda a, b: rn.kto_loss(a, b, m, x.mean()), x, y),
    "dpo_loss": lambda: (lambda a, b, c: rn.dpo_loss(a, b, c, y, label_smoothing=0.1), x, y, z),
}
# these return Python floats beside the loss, where the graph has to break
WITH_INFO = {
    "ppo_policy_error": lambda: (
        lambda a, b: sum(
            rn.ppo_policy_error(
                rn.ppo_policy_data(a, b, index, x, m.double(), logits_ref),
                dual_clip=3.0,
                kl_type="k3",
            )[0]
        ),
        logits,
        logits_ref,
    ),
    "ppo_value_error": lambda: (
        lambda a, b, c: rn.ppo_value_error(rn.ppo_value_data(a, b, c, m.double())),
        x,
        y,
        z,
    ),
    "ppo_error": lambda: (
        lambda a, b: sum(
            rn.ppo_error(
                rn.ppo_data(a, b, index, x, y, z, x, m.double(), logits_ref), dual_clip=3.0
            )[0]
        ),
        logits,
        logits_ref,
    ),
    "ppo_policy_error_continuous": lambda: (
        lambda a, b, c: sum(
            rn.ppo_policy_error_continuous(
                rn.ppo_policy_data_continuous(
                    dict(mu=a, sigma=b.exp()), (y, z.exp()), c, x[:, 0], None
                ),
                dual_clip=3.0,
            )[0]
        ),
        x,
        y,
        z,
    ),
    "ppo_error_continuous": lambda: (
        lambda a, b, c: sum(
            rn.ppo_error_continuous(
                rn.ppo_data_continuous(
                    dict(mu=a, sigma=b.exp()),
                    (y, z.exp()),
                    c,
                    a[:, 0],
                    y[:, 0],
                    x[:, 0],
                    z[:, 0],
                    None,
                )
            )[0]
        ),
        x,
        y,
        z,
    ),
    "grpo_policy_error": lambda: (
        lambda a, b: rn.grpo_policy_error(
            rn.grpo_policy_data(a, b, logits_ref, index, x[:, 0], m.double())
        )[0],
        logits,
        logits_ref,
    ),
    "rloo_policy_error": lambda: (
        lambda a, b: rn.rloo_policy_error(
            rn.rloo_policy_data(a, b, index, x[:, :1].reshape(2, 2), m.double())
        )[0],
        logits,
        logits_ref,
    ),
}
CALLS |= WITH_INFO
# of `make test-all`: what they compute is compiled as a whole above, under the formulas' own names
SLOW = {"ppo_policy_error", "ppo_value_error", "grpo_policy_error", "rloo_policy_error",
        "ppo_policy_error_continuous"}
ALL = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def test_all_functions_are_here():
    functions = {n for n, module in rn._MODULE_OF.items()
                 if module.startswith(("formulas", "compat")) and callable(getattr(rn, n))
                 and not isinstance(getattr(rn, n), type)}
    assert set(CALLS) == functions - {"register_variant"}


@pytest.mark.parametrize("name", CALLS if ALL else [n for n in CALLS if n not in SLOW])
def test_compiles_and_stays_double(name):
    torch._dynamo.reset()
    f, *inputs = CALLS[name]()
    leaves = [t.clone().requires_grad_(True) for t in inputs]
    expected, found = (f(*leaves),
                       torch.compile(f, fullgraph=name not in WITH_INFO,
                                     backend="aot_eager")(*leaves))
    assert expected.dtype == torch.float64 or name in (
        "clip_fraction", "value_clip_fraction", "off_policy_sequence_mask",
        "m2_mask")
    torch.testing.assert_close(found, expected)
    if expected.requires_grad:
        torch.testing.assert_close(
            *(torch.autograd.grad(y.sum(), leaves, allow_unused=True, materialize_grads=True)
              for y in (found, expected)))
