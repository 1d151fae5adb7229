"A variant of one's own, beside those that are there."
import math

import pytest
import torch
from formulas.test_grpo import F64, batch, close, token_weights
from strategies import value_and_grad

from rlhf_notes.formulas.grpo import (
    POLICY_VARIANTS,
    VARIANT_LISTENERS,
    policy_loss,
    register_variant,
)

def spo(ratio, advantage, logp, mask, eps_low, eps_high):
    "r A less a quadratic pull, as in SPO; its gradient has w = r (1 - (r - 1) / eps) where A > 0."
    held = (ratio > 1 + eps_high) & (advantage > 0) | (ratio < 1 - eps_low) & (advantage < 0)
    return ratio * advantage - advantage.abs() * (ratio - 1).square() / (2 * eps_high), held


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("low, mode", [(None, None), (0.1, "constant")])
def test_an_objective_of_ones_own_is_a_variant(own_variant, seed, low, mode):
    logp, old, A, m = batch(seed)
    register_variant(own_variant, spo, "seq-mean-token-mean", 0.3, 0.4)
    f = lambda x: policy_loss(x, old, A, m, own_variant, eps_low=low, aggregation=mode)[0]
    _, (grad,) = value_and_grad(f, logp)
    c = torch.tensor(token_weights(m.tolist(), mode or "seq-mean-token-mean"), dtype=F64)[:, None]
    r, a, eps = (logp - old).exp(), A[:, None], low or 0.4
    close(grad, -m.double() * c * r * (a - a.abs() * (r - 1) / eps))
    held = (r > 1 + eps) & (a > 0) | (r < 1 - (low or 0.3)) & (a < 0)
    stats = policy_loss(logp, old, A, m, own_variant, eps_low=low)[1]
    close(stats["clip_fraction"], ((held & m).sum() / m.sum().clamp(min=1)).item(), atol=1e-6)


def test_listeners_are_told_of_a_new_variant(own_variant, monkeypatch):
    told = []
    monkeypatch.setattr("rlhf_notes.formulas.grpo.VARIANT_LISTENERS", [*VARIANT_LISTENERS,
                                                                       told.append])
    register_variant(own_variant, spo)
    assert told == [own_variant]


def test_an_objective_of_ones_own_has_all_that_the_others_have(own_variant):
    logp, old, A, m = batch(3)
    register_variant(own_variant, lambda *x: spo(*x)[0] * math.nan)
    register_variant(own_variant, lambda r, A, logp, m, low, high:
                     torch.minimum(r * A, r.clamp(1 - low, 1 + high) * A))          # once more
    for kw in ({}, dict(logp_ref=old + 0.1, beta=0.5), dict(weight=m.double() / 2, total=9),
               dict(aggregation="constant", length=9), dict(eps_low=0.1, eps_high=0.4)):
        (loss, stats), (expected, ours) = (
            policy_loss(logp, old, A, m, name, **kw) for name in (own_variant, "ppo"))
        torch.testing.assert_close(loss, expected)
        del ours["clip_fraction"]  # nobody knows what an objective holds unless it tells
        torch.testing.assert_close(stats, ours)
    seen = []
    register_variant(own_variant, lambda r, A, logp, m, *range: seen.append((m, range)) or r * A,
                     eps_low=None, eps_high=None)
    assert "clip_fraction" not in policy_loss(logp, old, A, None, own_variant)[1]
    assert seen[0][0].all() and seen[0][0].shape == logp.shape and seen[0][1] == (None, None)


def test_an_objective_gets_what_it_names(own_variant):
    logp, old, A, m = batch(5)
    seen, given = {}, dict(entropy=logp.abs(), logp_ref=old - 1, group=2)
    def asks(r, A, logp, mask, low, high, entropy, lengths, logp_ref, group, logp_old, mine=3):
        seen.update(entropy=entropy, logp_ref=logp_ref, group=group, lengths=lengths,
                    logp_old=logp_old, mine=mine)
        return r * A
    register_variant(own_variant, asks)
    policy_loss(logp, old, A, m, own_variant, beta=0.0, **given)
    assert seen["group"] == 2 and seen["mine"] == 3
    torch.testing.assert_close(seen["lengths"], m.sum(1))
    torch.testing.assert_close(seen["entropy"], given["entropy"])
    torch.testing.assert_close(seen["logp_old"][m], old[m])
    for name in given:
        rest = {k: x for k, x in given.items() if k != name}
        with pytest.raises(ValueError, match=f"^{name} must be given for variant='mine'"):
            policy_loss(logp, old, A, m, own_variant, **rest)


@pytest.mark.parametrize("kwargs, error, words", [
    (dict(name="gspo"), ValueError, "name must be an identifier other than ppo, .*, got 'gspo'"),
    (dict(name="my loss"), ValueError, "name must be an identifier .*, got 'my loss'"),
    (dict(name=3), ValueError, "name must be an identifier .*, got 3"),
    (dict(objective="gspo"), TypeError, "objective must be a function .*, got 'gspo'"),
    (dict(aggregation="mean"), ValueError, "aggregation must be one of 'token-mean'"),
    (dict(eps_low=0.0), ValueError, r"eps_low must be in \(0, 1\], got 0.0"),
    (dict(eps_low=None), ValueError, "eps_high must be None where eps_low is, got None and 0.2"),
])
def test_what_cannot_be_registered_is_named(own_variant, kwargs, error, words):
    with pytest.raises(error, match=words):
        register_variant(**dict(name=own_variant, objective=spo) | kwargs)
    assert POLICY_VARIANTS["gspo"] == ("seq-mean-token-mean", 3e-4, 4e-4)


def test_what_an_objective_cannot_be_is_named(own_variant):
    logp, old, A, m = batch(3)
    register_variant(own_variant, lambda r, A, *rest: (r * A).mean(1))
    with pytest.raises(ValueError, match="objective of variant 'mine' must have the shape"):
        policy_loss(logp, old, A, m, own_variant)
    register_variant(own_variant, lambda r, A, *rest: (r * A)[:, :1])
    with pytest.raises(ValueError, match=r"must have the shape of the ratio, \(3, 4\), got \(3, 1"):
        policy_loss(logp, old, A, m, own_variant)
    register_variant(own_variant, spo)
    with pytest.raises(ValueError, match="dual_clip must be None for variant='mine', got 3.0"):
        policy_loss(logp, old, A, m, own_variant, dual_clip=3.0)
