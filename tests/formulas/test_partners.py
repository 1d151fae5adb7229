"A weight whose partner is missing would have no effect, unsaid."
import pytest
import torch

from rlhf_notes import distillation_loss, dpo_loss, policy_loss, ppo_loss

X = torch.zeros(2, 3)


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
