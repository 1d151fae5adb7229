"Our losses and advantages in verl: `make bridges` has it, elsewhere these are skipped."

import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
from bridges.agreement import SEEDS, batch, value_and_grad  # noqa: E402
from bridges.verl_losses import CASES, KNOWN, LOSSES, actor, call, worst  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402

from rlhf_notes.bridges import verl as bridge  # noqa: E402
from rlhf_notes.formulas.grpo import (  # noqa: E402
    POLICY_VARIANTS,
    policy_loss,  # noqa: E402
    register_variant,
)

MODES = list(bridge.AGGREGATIONS)


def test_each_variant_has_a_name():
    names = {f"rlhf_notes_{v}" for v in POLICY_VARIANTS}
    assert names <= core_algos.POLICY_LOSS_REGISTRY.keys()
    assert set(LOSSES) <= set(POLICY_VARIANTS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", LOSSES)
def test_losses_are_verls_own(variant, case):
    value, gradient = worst(variant, case)
    if (variant, case) in KNOWN:
        assert max(value, gradient) > 1e-5
    else:
        assert value < 2e-6 and gradient < 2e-6


@pytest.mark.parametrize("mode", MODES)
def test_every_aggregation_is_verls(mode):
    logp, old, A, mask, _ = batch(3)
    mask[2] = False  # a response without tokens
    for info in (
        {},
        dict(loss_scale_factor=50),
        dict(dp_size=2, batch_num_tokens=99, global_batch_size=16),
    ):
        ours, theirs = (
            value_and_grad(call(n, mode, actor(**info), old, A, mask.float()), logp)
            for n in ("rlhf_notes_ppo", "vanilla")
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", ["dapo", "gspo"])
def test_shards_are_the_whole_batch(variant, mode):
    logp, old, A, mask, _ = batch(4)
    f = lambda rows, **info: call(
        f"rlhf_notes_{variant}", mode, actor(**info), old[rows], A[rows], mask[rows]
    )
    total = dict(batch_num_tokens=int(mask.sum()), global_batch_size=8)
    whole = value_and_grad(f(slice(0, 8), **total), logp)
    for dp in (1, 2):  # two microbatches, or two processes
        parts = [
            value_and_grad(f(rows, dp_size=dp, **total), logp[rows])
            for rows in (slice(0, 3), slice(3, 8))
        ]
        torch.testing.assert_close(sum(p[0] for p in parts) / dp, whole[0])
        torch.testing.assert_close(torch.cat([p[1] for p in parts]) / dp, whole[1])


def test_metrics_have_verls_names_and_numbers():
    logp, old, A, mask, _ = batch(5, spread=1.0)
    rest = dict(
        old_log_prob=old,
        log_prob=logp,
        advantages=A,
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=actor(),
    )
    ours, theirs = (
        core_algos.get_policy_loss_fn(n)(**rest)[1] for n in ("rlhf_notes_ppo", "vanilla")
    )
    assert ours == pytest.approx(theirs) and theirs["actor/pg_clipfrac_lower"] > 0


def test_sapo_has_verls_taus_and_no_range():
    logp, old, A, mask, _ = batch(1)
    config = actor(low=5.0)
    object.__setattr__(config, "tau_neg", 3.0)
    a, b = (
        value_and_grad(call(n, "seq-mean-token-mean", config, old, A, mask), logp)
        for n in ("rlhf_notes_sapo", "sapo")
    )
    torch.testing.assert_close(a, b)


def test_a_variant_of_ones_own_is_known(own_variant):
    register_variant(own_variant, lambda r, A, *rest: r * A)
    logp, old, A, mask, _ = batch(1)
    got = call("rlhf_notes_mine", "token-mean", actor(), old, A, mask)(logp)
    torch.testing.assert_close(got, policy_loss(logp, old, A, mask, own_variant)[0])
    del core_algos.POLICY_LOSS_REGISTRY["rlhf_notes_mine"]


def test_an_objective_gets_no_more_than_verl_gives(own_variant):
    logp, old, A, mask, _ = batch(1)
    register_variant(own_variant, lambda r, A, *rest, lengths: r * A)
    assert torch.isfinite(call("rlhf_notes_mine", "token-mean", actor(), old, A, mask)(logp))
    register_variant(own_variant, lambda r, A, *rest, entropy: r * A)
    with pytest.raises(ValueError, match="^entropy must be given"):
        call("rlhf_notes_mine", "token-mean", actor(), old, A, mask)(logp)
    del core_algos.POLICY_LOSS_REGISTRY["rlhf_notes_mine"]


# Advantages


def rewards(seed, mask):
    g = torch.Generator().manual_seed(seed)
    last = mask.sum(1) - 1
    x = torch.zeros(mask.shape)
    x[torch.arange(len(x)), last] = torch.randn(len(x), generator=g)
    return x


def test_an_advantage_of_ones_own_is_known():
    mask, index = torch.ones(4, 3).long(), np.array(["a", "b", "a", "b"])
    x = rewards(1, mask)
    bridge.register_advantage("mine", lambda r, m: r - r.mean(1, keepdim=True))
    got, again = core_algos.get_adv_estimator_fn("rlhf_notes_mine")(
        token_level_rewards=x, response_mask=mask, index=index, config={}
    )
    s = x.sum(1)
    want = s - torch.stack([s[::2].mean(), s[1::2].mean()]).repeat(2)
    torch.testing.assert_close(got, want[:, None].expand_as(mask) * mask)
    assert got is again or torch.equal(got, again)


def bessel(mask):
    "verl whitens by the unbiased variance, we by that of what is there."
    return (1 - 1 / mask.sum()).sqrt()


GROUPS = np.array(list("abcabaca"), dtype=object)  # 4, 2 and 2 responses


@pytest.mark.parametrize(
    "ours, theirs, config",
    [
        ("group", "grpo", {}),
        ("group", "grpo", dict(norm_adv_by_std_in_grpo=False)),
        ("rloo", "rloo", {}),
        ("reinforce_pp", "reinforce_plus_plus", dict(gamma=0.9)),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_are_verls_own(ours, theirs, config, seed):
    from verl.trainer.config import AlgoConfig

    mask = batch(seed)[3]
    given = dict(
        token_level_rewards=rewards(seed, mask),
        response_mask=mask.float(),
        index=GROUPS,
        config=AlgoConfig(**config),
    )
    f = core_algos.get_adv_estimator_fn
    a, _ = f(f"rlhf_notes_{ours}")(**given)
    if theirs == "grpo":
        given["norm_adv_by_std_in_grpo"] = given["config"].norm_adv_by_std_in_grpo
    b, _ = f(theirs)(**given)
    if ours == "reinforce_pp":
        a = a * bessel(mask)
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)  # epsilons of 1e-4 and 1e-6
    assert a.abs().max() > 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_is_verls_own(seed):
    from verl.trainer.config import AlgoConfig

    values, _, _, mask, _ = batch(seed)
    given = dict(token_level_rewards=rewards(seed, mask), response_mask=mask.float(), values=values)
    a = core_algos.get_adv_estimator_fn("rlhf_notes_gae")(config=AlgoConfig(lam=0.9), **given)
    b = core_algos.get_adv_estimator_fn("gae")(gamma=1.0, lam=0.9, **given)
    torch.testing.assert_close(a[0] * bessel(mask), b[0] * mask)
    torch.testing.assert_close(a[1], b[1] * mask)


def test_a_group_of_one_has_no_advantage():
    mask = torch.ones(3, 2, dtype=torch.bool)
    for name in ("group", "rloo"):
        A, _ = core_algos.get_adv_estimator_fn(f"rlhf_notes_{name}")(
            token_level_rewards=rewards(0, mask),
            response_mask=mask,
            index=np.array([7, 8, 7]),
            config={},
        )
        assert (A[1] == 0).all() and A[0, 0] == -A[2, 0] != 0


# Errors


@pytest.mark.parametrize(
    "mode, config, extra, words",
    [
        ("mean", {}, {}, "^actor_rollout_ref.actor.loss_agg_mode must be one of .*, got 'mean'$"),
        ("token-mean", dict(low=-0.2), {}, "^actor_rollout_ref.actor.clip_ratio_low must be in"),
        ("token-mean", dict(dp_size=2), {}, "^global_batch_info must have batch_num_tokens for "),
        (
            "seq-mean-token-sum-norm",
            dict(loss_scale_factor=0),
            {},
            "^actor_rollout_ref.actor.loss_scale_factor must be in",
        ),
        (
            "token-mean",
            {},
            dict(entropy=1),
            "knows the arguments of verl 0.9.1, got entropy besides$",
        ),
    ],
)
def test_errors_name_verls_option(mode, config, extra, words):
    logp, old, A, mask, _ = batch(0)
    with pytest.raises((ValueError, TypeError), match=words):
        core_algos.get_policy_loss_fn("rlhf_notes_ppo")(
            old_log_prob=old,
            log_prob=logp,
            advantages=A,
            response_mask=mask,
            loss_agg_mode=mode,
            config=actor(**config),
            **extra,
        )


def test_gae_says_who_has_the_values():
    mask = torch.ones(2, 2)
    with pytest.raises(ValueError, match="^algorithm.adv_estimator must be gae, "):
        core_algos.get_adv_estimator_fn("rlhf_notes_gae")(
            token_level_rewards=mask, response_mask=mask, config={}
        )


@pytest.mark.slow
def test_import_verl_is_enough():
    "The entry point of the installed package: no import of ours."
    code = (
        "import sys, verl\nfrom verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as r\n"
        "assert 'rlhf_notes_gspo' in r, sorted(r)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_two_workers_of_ray_add_up_to_the_whole():
    pytest.importorskip("ray")
    from bridges.ray_workers import differences

    assert max(differences()) < 1e-6
