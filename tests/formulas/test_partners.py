"A weight whose partner is missing would have no effect, unsaid."
import pytest
import torch

from rlhf_notes import (
    POLICY_VARIANTS,
    distillation_loss,
    dpo_loss,
    policy_loss,
    ppo_loss,
    register_variant,
)

X = torch.zeros(2, 3)
OTHER = dict(  # than the default, of all that a variant or a KL may read
    eps_low=0.6, eps_high=0.6, dual_clip=1.1, tau=(2.0, 3.0), divergence="kl", kl_kind="k1",
    kl_weighted=True)
BATCH = dict(length=7, total=9, group=2, entropy=torch.full((64, 3), 2.0))  # goes with each loss


def tokens():
    g = torch.Generator().manual_seed(0)
    logp, old, ref = (-2 * torch.rand(64, 3, generator=g) - 0.1 for _ in range(3))
    mask = torch.arange(3) < torch.tensor([3, 2, 1, 3] * 16)[:, None]
    return logp.requires_grad_(), old, torch.randn(64, generator=g), mask, ref


def found(variant, options):
    "Loss and gradient."
    logp, *data, ref = tokens()
    loss, _ = policy_loss(logp, *data, variant, **options | (
        dict(logp_ref=ref) if options.get("logp_ref") else {}))
    return torch.cat([loss.detach()[None], torch.autograd.grad(loss, logp)[0].flatten()])


@pytest.mark.parametrize("loss, option, partner, usual", [
    (ppo_loss, "value_coef", "value", 0.5), (ppo_loss, "entropy_coef", "entropy", 0.01),
    (ppo_loss, "beta", "logp_ref", 0.04), (policy_loss, "beta", "logp_ref", 0.04)])
def test_a_weight_needs_what_it_weighs(loss, option, partner, usual):
    with pytest.raises(ValueError, match=f"^{partner} must be given with {option}=0.3, its weight"):
        loss(X, X, X, **{option: 0.3})
    more = {partner: X} | (dict(returns=X) if partner == "value" else {})
    for given in ({option: 0.3} | more, {option: 0.0}, {option: 0}, {option: usual}):
        loss(X, X, X, **given)


def test_a_number_of_another_kind_is_refused():
    pair = [torch.zeros(2)] * 4
    for kind in ("sigmoid", "ipo", "apo_zero", "apo_down", "robust"):
        with pytest.raises(ValueError, match=f"^alpha must be left out for kind='{kind}', got 2"):
            dpo_loss(*pair, kind=kind, alpha=2.0)
    for kind in ("reverse", "forward"):
        with pytest.raises(ValueError, match=f"^beta must be left out for kind='{kind}', got 0.3"):
            distillation_loss(X, X, kind=kind, beta=0.3)


@pytest.mark.parametrize("variant", sorted(POLICY_VARIANTS))
@pytest.mark.parametrize("case", [{}, dict(aggregation="constant"), dict(logp_ref=True),
                                  dict(aggregation="prompt-mean", group=4),
                                  dict(aggregation=torch.ones(64, 3))],
                         ids=lambda x: next(iter(x), "none") if isinstance(x, dict) else x)
def test_an_option_has_an_effect_or_is_refused(variant, case):
    plain = found(variant, case)
    for name, x in OTHER.items():
        try:
            assert not torch.equal(found(variant, case | {name: x}), plain), name
        except ValueError as e:
            assert str(e).startswith(f"{name} must be "), (name, e)


def test_an_option_is_read_where_it_says_so():
    "The other half: nothing that is read is refused."
    read = dict(sapo="tau", dppo="divergence eps_low eps_high", gspo="eps_low dual_clip",
                dr_grpo="dual_clip")
    for variant, names in read.items():
        for name in names.split():
            found(variant, {name: OTHER[name]})
    found("ppo", dict(logp_ref=True, kl_kind="k1", kl_weighted=True))


@pytest.mark.parametrize("variant", sorted(POLICY_VARIANTS))
def test_what_tells_of_the_batch_is_taken_by_each_variant(variant):
    "So that one call serves them all: a mean over tokens leaves the length unread."
    assert torch.isfinite(found(variant, BATCH)).all()


def test_an_objective_of_ones_own_is_given_what_it_asks_for_alone():
    def asks(ratio, advantage, logp, mask, eps_low, eps_high, entropy): return entropy * logp
    try:
        register_variant("asks", asks, eps_low=None, eps_high=None)
        found("asks", BATCH)
        for name in ("eps_low", "tau", "dual_clip"):
            with pytest.raises(ValueError, match=f"^{name} must be .*, got {OTHER[name]}".replace(
                    "(2.0, 3.0)", ".*")):
                found("asks", BATCH | {name: OTHER[name]})
    finally:
        POLICY_VARIANTS.pop("asks", None)


def test_the_kl_of_ppo_has_no_kind_without_a_reference():
    for name in ("kl_kind", "kl_weighted"):
        with pytest.raises(ValueError, match=f"^{name} must be .* for logp_ref=None, got "):
            ppo_loss(X, X, X, **{name: OTHER[name]})
        ppo_loss(X, X, X, logp_ref=X, **{name: OTHER[name]})
