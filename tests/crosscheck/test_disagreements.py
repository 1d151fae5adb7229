"""Where a peer does something else: inputs that fit on a line, both numbers worked out by hand. One
that no longer holds fails.
"""
import inspect
import math

import pytest
import torch
from crosscheck.peers import openrlhf_advantages, sb3_update, trl_loss, verl_loss
from crosscheck.test_agreement import functions_of

from rlhf_notes.compat import ding as our_ding
from rlhf_notes.compat import torchtune as our_torchtune
from rlhf_notes.formulas import (
    advantage,
    grpo,
    kl,
    logprob,
    ppo,
    ratio,
    reward,
    surrogate,
    value,
    whitening,
)

NAN, INF = math.nan, math.inf


def t(*x): return torch.tensor(x)


def close(x, *expected):
    torch.testing.assert_close(
        torch.as_tensor(x, dtype=torch.float64).flatten(),
        torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-5, equal_nan=True)


def slope(f, x):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)[0]


def two(logp): return torch.stack([logp, torch.log(-torch.expm1(logp))], -1)


@pytest.fixture
def trl(): return functions_of("trl")
@pytest.fixture
def torchtune(): return functions_of("torchtune")
@pytest.fixture
def ding(): return functions_of("ding")
@pytest.fixture
def sb3(): return functions_of("sb3")
@pytest.fixture
def verl(): return functions_of("verl")
@pytest.fixture
def openrlhf(): return functions_of("openrlhf")


R, A = t(.5, .7, 1., 1.3, 1.5), t(1., -1., 1., -1., 1.)
OLD, NEW, ALL = torch.full((5,), -2.), R.log() - 2, torch.ones(1, 5, dtype=torch.bool)


# clip fraction: four of five ratios are outside of [0.8, 1.2]; the clip binds for two of them (0.7
# with A < 0, 1.5 with A > 0)
def test_clip_fraction_ours():
    close(surrogate.clip_fraction(R, A), 0.4)
    close(surrogate.clip_fraction(R, kind="outside"), 0.8)
def test_clip_fraction_trl(trl):
    close(trl_loss(trl, NEW[None], OLD[None], A[None], ALL)[1]["clip_ratio/region_mean"], 0.4)
def test_clip_fraction_torchtune(torchtune):
    close(torchtune.ppo.PPOLoss(epsilon=.2)(OLD, NEW, A, A, A, A)[4], 0.4)
def test_clip_fraction_ding(ding):
    close(ding.ppo.ppo_policy_error(ding.ppo.ppo_policy_data(two(NEW), two(OLD),
                                                             torch.zeros(5, dtype=torch.long), A,
                                                             None))[1].clipfrac, 0.8)
def test_clip_fraction_sb3(sb3): close(sb3_update(sb3, NEW, OLD, A)[0]["clip_fraction"], 0.8)
def test_clip_fraction_verl(verl):
    close(
        verl_loss(verl, "vanilla", NEW[None], OLD[None], A[None], ALL)[1]["actor/pg_clipfrac"], 0.4)
def test_clip_fraction_openrlhf(openrlhf):
    close(openrlhf.loss.PolicyLoss()(NEW[None], OLD[None], A[None], ALL)[1], 0.4)


# approximate KL of ratios 1, 1.3, 1.5: -mean(log r) = -(0.262364 + 0.405465) / 3; mean(r - 1 - log
# r) adds 0.8 / 3
def test_approximate_kl_ours(): close(kl.kl_estimate(OLD[2:], NEW[2:], "k1").mean(), -0.222610)
def test_approximate_kl_ding(ding):
    close(ding.ppo.ppo_policy_error(ding.ppo.ppo_policy_data(two(NEW[2:]), two(OLD[2:]),
                                                             torch.zeros(3, dtype=torch.long),
                                                             A[2:], None))[1].approx_kl, -0.222610)
def test_approximate_kl_sb3(sb3):
    close(sb3_update(sb3, NEW[2:], OLD[2:], A[2:])[0]["approx_kl"], 0.044057)


# dual clip of one Gaussian action 0.5, mu 0 and 0.1, sigma 1: log-ratio (0.4^2 - 0.5^2) / 2 =
# -0.045
@pytest.mark.parametrize("sign", [1., -1.])
def test_dual_clip_ours(sign):
    close(_dual(our_ding.ppo_policy_error_continuous, our_ding.ppo_policy_data_continuous, sign),
          -sign * math.exp(-.045), -sign * .5 * math.exp(-.045))
def test_dual_clip_ding_good_action(ding):
    close(
        _dual(ding.ppo.ppo_policy_error_continuous, ding.ppo.ppo_policy_data_continuous, 1.), -3, 0)
def test_dual_clip_ding_bad_action(ding):
    close(_dual(ding.ppo.ppo_policy_error_continuous, ding.ppo.ppo_policy_data_continuous, -1.),
          math.exp(-.045), .5 * math.exp(-.045))


def _dual(error, kind, sign):
    one = torch.ones(1, 1)
    f = lambda mu: error(kind(dict(mu=mu, sigma=one), dict(mu=.1 * one, sigma=one), .5 * one,
                              sign * one[0], None), dual_clip=3.)[0].policy_loss
    return [f(0 * one).item(), slope(f, 0 * one).item()]


# whitening of 4, 5, 5, 6: variance 1/2 biased, 2/3 unbiased
X = t(4., 5., 5., 6.)
def test_whitening_ours(): close(whitening.whiten(X), -2 ** .5, 0, 0, 2 ** .5)
def test_whitening_torchtune_keeps_the_mean(torchtune):
    close(torchtune.rewards.whiten(X), 5 - 1.5 ** .5, 5, 5, 5 + 1.5 ** .5)
def test_whitening_torchtune_false_removes_it(torchtune):
    close(torchtune.rewards.whiten(X, shift_mean=False), -1.5 ** .5, 0, 0, 1.5 ** .5)
def test_whitening_verl(verl):
    close(verl.torch_functional.masked_whiten(X, torch.ones(4)), -1.5 ** .5, 0, 0, 1.5 ** .5)
def test_whitening_verl_keeps_it_when_told(verl):
    close(verl.torch_functional.masked_whiten(X, torch.ones(4), shift_mean=False), 5 - 1.5 ** .5, 5,
          5, 5 + 1.5 ** .5)
def test_advantages_of_torchtune_keep_a_mean(torchtune):
    assert torchtune.rewards.estimate_advantages(
        torch.zeros(1, 4), X[None], 0.0, 0.95)[0].mean() > 4.9


# GAE of a response of two tokens and one token of padding with value 10: delta = 0, 0.5 without it,
# 0, 10.5 with it
REWARD, VALUE, REAL = t([0., 1., 0.]), t([.5, .5, 10.]), t([True, True, False])
def test_padding_ours(): close(advantage.gae_tokens(REWARD, VALUE, REAL)[0], .475, .5, 0)
# 0.5 + 10 - 0.95 * 10 = 1
def test_padding_torchtune(torchtune):
    close((torchtune.rewards.estimate_advantages(VALUE, REWARD, 1., .95, REAL)[1] - VALUE)[:, :2],
          .95, 1.)
def test_padding_verl(verl):
    close((verl.core_algos.compute_gae_advantage_return(REWARD, VALUE, REAL.float(), 1., .95)[1]
           - VALUE)[:, :2], .475, .5)


def test_stop_token_at_the_very_end(torchtune):
    tokens = torch.tensor([[5, 2, 7], [5, 7, 2], [5, 7, 7]])
    assert reward.truncate_at_stop(tokens, 2, 0)[2].tolist() == [True, True, False]
    padded, _ = torchtune.sequence_processing.truncate_sequence_at_first_stop_token(
        tokens.clone(), torch.tensor([2]), 0)
    assert torchtune.rewards.get_reward_penalty_mask(
        padded, (~padded).sum(1) - 1).tolist() == [False, True, True]


# one token with a log-ratio of 100: [loss, slope] for A = 1, then for A = -1
def _far(loss):
    x, was, one = t([-1.]), t([-101.]), torch.ones(1, 1)
    return [y for A in (one, -one)
            for y
            in (loss(x, was, A, one.bool()).item(),
                slope(lambda x: loss(x, was, A, one.bool()), x).item())]


def test_far_ours():
    close(_far(lambda x, was, A, m: grpo.policy_loss(x, was, A, m)[0]), -1.2, 0, math.exp(40),
          math.exp(40))
def test_far_trl(trl):
    close(_far(lambda x, was, A, m: trl_loss(trl, x, was, A, m, loss_type="bnpo")[0]), -1.2, NAN,
          INF, INF)
def test_far_torchtune(torchtune):
    close(_far(lambda x, was, A, m: torchtune.ppo.PPOLoss(epsilon=.2)(was, x, A, A, A, A)[0]), -1.2,
          NAN, INF, INF)
def test_far_verl(verl):
    close(_far(lambda x, was, A, m: verl_loss(verl, "vanilla", x, was, A, m)[0]), -1.2, 0,
          math.exp(20), 0)
def test_far_openrlhf(openrlhf):
    close(_far(lambda x, was, A, m: openrlhf.loss.PolicyLoss()(x, was, A, m)[0]), -1.2, 0,
          math.exp(20), 0)
def test_far_sb3(sb3):
    close(sb3_update(sb3, t(-1., -1.), t(-101., -1.), t(1., 1.))[1]["logp"], NAN, -.5)


# entropy of two equal words and an impossible one: log 2
MASKED = t([0., 0., -INF])
def test_entropy_ours():
    close(logprob.entropy_from_logits(MASKED), math.log(2))
    assert slope(logprob.entropy_from_logits, MASKED).isfinite().all()
def test_entropy_trl(trl): assert trl.utils.entropy_from_logits(MASKED).isnan().all()
def test_entropy_verl(verl): assert verl.torch_functional.entropy_from_logits(MASKED).isnan().all()
def test_entropy_openrlhf(openrlhf):
    assert inspect.unwrap(openrlhf.utils.compute_entropy)(MASKED).isnan().all()
def test_entropy_sb3(sb3):
    close(sb3.distributions.CategoricalDistribution(3).proba_distribution(MASKED).entropy(),
          math.log(2))


# policy loss with A = 1, ratio 1: one real token beside a NaN, then no token that counts
FINE, BAD, UP, ONE, NONE = (t([-1., -1.]), t([-1., NAN]), t([1., 1.]), t([True, False]),
                            t([False, False]))
def test_nothing_ours():
    close(
        [grpo.policy_loss(BAD, FINE, UP, ONE)[0], grpo.policy_loss(FINE, FINE, UP, NONE)[0]], -1, 0)
def test_nothing_trl(trl):
    close([trl_loss(trl, x, FINE, UP, m, loss_type="bnpo")[0]
           for x, m in ((BAD, ONE), (FINE, NONE))], NAN, 0)
def test_nothing_torchtune(torchtune):
    close([torchtune.ppo.PPOLoss()(FINE, x, UP, UP, UP, UP, m, m)[1]
           for x, m in ((BAD, ONE), (FINE, NONE))], NAN, 0)
def test_nothing_verl(verl):
    close([verl_loss(verl, "vanilla", x, FINE, UP, m)[0] for x, m in ((BAD, ONE), (FINE, NONE))],
          -1, NAN)
def test_nothing_openrlhf(openrlhf):
    close([openrlhf.loss.PolicyLoss()(x, FINE, UP, m)[0] for x, m in ((BAD, ONE), (FINE, NONE))],
          NAN, NAN)


def test_ding_gae_zeroes_the_next_value(ding):
    zero, done, following = (torch.zeros(2, 1), torch.tensor([[True], [False]]),
                             torch.full((2, 1), 5.))
    ding.gae.gae(ding.gae.gae_data(zero, following, zero, done, done))
    assert following.flatten().tolist() == [0, 5]


def test_torchtune_overwrites_the_tokens(torchtune):
    tokens = torch.tensor([[5, 2, 7]])
    torchtune.sequence_processing.truncate_sequence_at_first_stop_token(
        tokens, torch.tensor([2]), 0)
    assert tokens.tolist() == [[5, 2, 0]]


def test_openrlhf_divides_the_logits_in_place(openrlhf):
    logits = torch.tensor([[[0., 2.]]])
    openrlhf.utils.log_probs_from_logits(logits, torch.ones(1, 1, dtype=torch.long), 2.)
    assert logits.flatten().tolist() == [0, 1]


def test_ding_sends_gradients_into_the_old_policy(ding):
    z, action, one = torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), torch.ones(1)
    close(
        slope(lambda old: ding.ppo.ppo_policy_error(ding.ppo.ppo_policy_data(z, old, action, one,
                                                                             None))[0].policy_loss,
              z), .5, -.5)
    close(
        slope(lambda old: our_ding.ppo_policy_error(our_ding.ppo_policy_data(z + 0 * old, old,
                                                                             action, one,
                                                                             None))[0].policy_loss,
              z), 0, 0)


def test_ding_divides_by_all_elements(ding):
    data = (t([1., 0.])[0].expand(4, 2), torch.zeros(4, 2), torch.zeros(4, dtype=torch.long),
            torch.ones(4), t(1., 1., 0., 0.))
    # ratio 2 sigmoid(1) = 1.46, clipped to 1.2
    close(ding.ppo.ppo_policy_error(ding.ppo.ppo_policy_data(*data))[0].policy_loss, -.6)
    logp, logp_old = (logprob.selective_log_softmax(z, data[2]) for z in data[:2])
    close(ppo.ppo_loss(logp, logp_old, data[3], mask=data[4] > 0)[0], -1.2)
    close(our_ding.ppo_policy_error(our_ding.ppo_policy_data(*data))[0].policy_loss, -.6)


def test_ding_docstrings(ding):
    assert "defaults to 5.0" in ding.ppo.ppo_policy_error.__doc__
    assert inspect.signature(ding.ppo.ppo_policy_error).parameters["dual_clip"].default is None
    assert "loss, info = ppo_value_error(data)" in ding.ppo.ppo_value_error.__doc__
    with pytest.raises(TypeError, match="iteration over a 0-d tensor"):
        _, _ = ding.ppo.ppo_value_error(ding.ppo.ppo_value_data(t(1.), t(1.), t(1.), None))


# k3 of log pi - log pi_ref = -5: e^5 - 1 - 5, slope 1 - e^5
def test_k3_ours():
    close(_k3(lambda x, ref: kl.kl_estimate(x, ref, "k3")), math.exp(5) - 6, 1 - math.exp(5))
def test_k3_verl(verl):
    close(_k3(lambda x, ref: verl.core_algos.kl_penalty(x, ref, "low_var_kl")), 10, 0)
def test_k3_openrlhf(openrlhf):
    close(_k3(lambda x, ref: openrlhf.utils.compute_approx_kl(x, ref, kl_estimator="k3")), 10, 0)
def test_k3_trl(trl):
    close(
        _k3(lambda x, ref: trl_loss(trl, x[None], x.detach()[None], t(0.), torch.ones(1, 1).bool(),
                                    ref[None], 1.)[0]), math.exp(5) - 6, 1 - math.exp(5))
def _k3(f): return [f(t(-6.), t(-1.)).item(), slope(lambda x: f(x, t(-1.)), t(-6.)).item()]


def test_verl_straight_through_works_now(verl):
    x, ref = t(-1., -2.), t(-1.5, -1.)
    for kind in ("k1", "k3"):
        close(
            verl.core_algos.kl_penalty(x, ref, kind + "+"), *kl.kl_estimate(x, ref, kind).tolist())
        close(slope(lambda x: verl.core_algos.kl_penalty(x, ref, kind + "+"), x), .5, -1.)


# value loss, V = 2, V_old = 0, clip 0.2: errors V - R and 0.2 - R
@pytest.mark.parametrize(
    "R, usual, clipped",
    [(1.9, (.5 * 1.7 ** 2, 0), (1.7 ** 2, 0)), (.1, (.5 * 1.9 ** 2, 1.9), (.1 ** 2, 0))])
def test_value_clip_sb3(sb3, R, usual, clipped):
    v = t(2.)
    f = lambda v: value.value_loss(v, t(0.), t(R), .2)
    close([f(v).item(), slope(f, v).item()], *usual)
    logged, slopes = sb3_update(sb3, t(0.), t(0.), t(0.), v, t(0.), t(R), value_clip=.2)
    close([float(logged["value_loss"]), slopes["value"].item()], *clipped)


def test_value_loss_sb3_has_no_half(sb3):
    close(sb3_update(sb3, t(0.), t(0.), t(0.), t(2.), t(0.), t(1.))[0]["value_loss"], 1.0)


# four scores 0, 0, 0, 1e-5: deviation 0.75e-5, unbiased standard deviation 0.5e-5
SCORES = t(0., 0., 0., 1e-5)
def test_group_ours(): close(advantage.group_advantage(SCORES[None])[0, 3], .75 / 10.5)
def test_group_verl(verl):
    close(
        verl.core_algos.compute_grpo_outcome_advantage(SCORES[:, None], torch.ones(4, 1),
                                                       torch.zeros(4,
                                                                   dtype=torch.long).numpy())[0][3],
        .75 / .6)
def test_group_openrlhf(openrlhf):
    close(openrlhf_advantages(openrlhf, "group_norm", SCORES, 4)[3], .75 / .5001)


def test_group_of_one(verl):
    alone, mask, index = t([2.]), torch.ones(1, 1), torch.zeros(1, dtype=torch.long).numpy()
    assert advantage.group_advantage(alone).item() == 0
    found = [f(alone, mask, index)[0].item()
             for f
             in (verl.core_algos.compute_grpo_outcome_advantage,
                 verl.core_algos.compute_rloo_outcome_advantage,
                 verl.core_algos.compute_rloo_vectorized_outcome_advantage)]
    close(found, 2 / (1 + 1e-6), 2, 0)
    with pytest.raises(ValueError, match="at least 2 responses"): advantage.rloo_advantage(alone)


def test_empty_response_trl(trl):
    logp, mask = torch.full((2, 2), -1.), t([True, True], [False, False])
    close(grpo.policy_loss(logp, logp, t(1., 1.), mask, "grpo")[0], -1.)
    close(trl_loss(trl, logp, logp, t(1., 1.), mask)[0], -.5)


def test_cispo_bound_trl(trl):
    logp, mask = torch.full((2, 2), -1.), torch.ones(2, 2, dtype=torch.bool)
    close(slope(lambda x: grpo.policy_loss(x, logp, t(1., 1.), mask, "cispo", eps_high=.28)[0],
                logp), *[-.25] * 4)
    close(slope(lambda x: trl_loss(trl, x, logp, t(1., 1.), mask, loss_type="cispo",
                                   eps_high=.28)[0], logp), *[-.25 * .28] * 4)


def test_mean_ratio_includes_padding(torchtune):
    logp = t([0., math.log(3.)])
    close(torchtune.ppo.PPOLoss()(torch.zeros(1, 2), logp, UP, UP, UP, UP, ONE)[3], 2.)
    close(our_torchtune.PPOLoss()(torch.zeros(1, 2), logp, UP, UP, UP, UP, ONE)[3], 1.)
    close(ratio.importance_ratio(logp, torch.zeros(1, 2)), 1., 3.)


@pytest.mark.parametrize(
    "log_ratio, expected, asserted", [(-1., -math.exp(-1), .8), (.1, -math.exp(.1), math.exp(.1))])
def test_what_the_tests_of_torchtune_expect(torchtune, log_ratio, expected, asserted):
    old, one = t(.5, .8, 1.2), torch.ones(3)
    for loss in (our_torchtune.PPOLoss(epsilon=.2), torchtune.ppo.PPOLoss(epsilon=.2)):
        close(loss(old, old + log_ratio, one, one, one, one)[1], expected)
    torch.testing.assert_close(torch.tensor(expected), torch.tensor(asserted), atol=1e-4, rtol=1e6)
