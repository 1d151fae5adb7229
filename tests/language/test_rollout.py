from dataclasses import replace

import pytest
import torch
from language.parts import TINY, a_batch, handmade, trainer

from rlhf_notes.formulas.advantage import gae_tokens, group_advantage, rloo_advantage
from rlhf_notes.formulas.whitening import whiten
from rlhf_notes.hub.prompts import Prompts
from rlhf_notes.language.rollout import Rows, gdpo, treat_overlong, with_advantages
from rlhf_notes.reviews.task import make_tokenizer

def test_rows_of_a_rollout():
    b = a_batch(trainer())
    assert len(b) == 16
    assert len(b[3:5]) == 2
    assert b[3:5].responses.shape == (2, 16)
    assert b[torch.tensor([5])].scores == b.scores[5]
    assert a_batch(trainer(replace(TINY, algo="rloo")))[:4].returns is None


def test_kl_is_paid_per_token_and_the_score_lands_on_the_last_that_counts():  # P8
    x = handmade()
    b = with_advantages(replace(TINY, whiten_rewards=False, whiten_advantages=False), x, 0.3)
    last = torch.tensor([2, 3, 0, 1])
    expected = -0.3 * (x.logp - x.logp_ref)
    expected[torch.arange(4), last] += x.scores
    torch.testing.assert_close(b.rewards, expected.where(x.response_mask, torch.tensor(0.0)))
    in_loss = with_advantages(replace(TINY, kl_in_loss=True), x, 0.3).rewards
    assert torch.equal(in_loss[torch.arange(4), last], x.scores) and in_loss.count_nonzero() == 4


def test_ppo_whitens_rewards_keeping_their_mean_and_advantages_removing_it():  # P9
    x = handmade()
    raw = with_advantages(replace(TINY, whiten_rewards=False, whiten_advantages=False), x, 0.3)
    adv, ret = gae_tokens(whiten(raw.rewards, x.response_mask, shift_mean=False), x.values,
                          x.response_mask, 1.0, 0.95)
    b = with_advantages(TINY, x, 0.3)
    torch.testing.assert_close(b.returns, ret)
    torch.testing.assert_close(b.advantages, whiten(adv, x.response_mask))
    counted = b.advantages[x.response_mask]
    assert abs(counted.mean()) < 1e-5 and abs(counted.var(correction=0) - 1) < 1e-4
    assert not torch.allclose(b.returns, raw.returns, atol=1e-2)
    plain = gae_tokens(raw.rewards, x.values, x.response_mask, 1.0, 0.95)
    torch.testing.assert_close((raw.advantages, raw.returns), plain)


def test_nothing_is_discounted_unless_asked():  # P6
    x = replace(handmade(), values=torch.zeros(4, 4))
    b = with_advantages(replace(TINY, lam=1.0, whiten_rewards=False), x, 0.0)
    torch.testing.assert_close(
        b.returns, torch.where(x.response_mask, x.scores[:, None], torch.tensor(0.0)))
    half = with_advantages(replace(TINY, lam=1.0, gamma=0.5, whiten_rewards=False), x, 0.0)
    torch.testing.assert_close(half.returns[1], x.scores[1] * torch.tensor([0.125, 0.25, 0.5, 1.0]))


def in_groups(x, **options):
    "Advantages of two groups of two, one number a response, at a coefficient of 0.2; their KLs."
    b = with_advantages(replace(TINY, group=2, **options), x, 0.2)
    assert b.returns is None and (b.advantages == b.advantages[:, :1]).all()
    return (b.advantages[:, 0].view(2, 2),
            ((x.logp - x.logp_ref) * x.response_mask).sum(1).view(2, 2))


def test_rloo_compares_whole_rewards():
    x = handmade()
    A, kl = in_groups(x, algo="rloo")
    torch.testing.assert_close(A, rloo_advantage(x.scores.view(2, 2) - 0.2 * kl))


@pytest.mark.parametrize("scale", ["std", "batch", "none"])
def test_grpo_normalises_the_score_and_then_takes_off_the_kl(scale):
    x = handmade()
    normalised = group_advantage(x.scores.view(2, 2), None if scale == "none" else scale)
    A, kl = in_groups(x, algo="grpo", group_scale=scale, kl_in_loss=False)
    torch.testing.assert_close(A, normalised - 0.2 * (kl - kl.mean(1, keepdim=True)))
    assert torch.equal(in_groups(x, algo="grpo", group_scale=scale)[0], normalised)  # as the paper


@pytest.mark.parametrize("scale", ["std", "batch", "none"])
@pytest.mark.parametrize("score", [0.0, 1.0, 0.1])
def test_equal_scores_teach_nothing_but_the_kl(scale, score):
    x = replace(handmade(), scores=torch.full((4,), score))
    options = dict(algo="grpo", group_scale=scale)
    assert not in_groups(x, **options)[0].any()
    A, kl = in_groups(x, kl_in_loss=False, **options)
    torch.testing.assert_close(A, -0.2 * (kl - kl.mean(1, keepdim=True)), rtol=1e-4, atol=1e-6)


def test_what_has_no_score_is_not_in_its_group():
    x = handmade()
    x.scores[2], x.response_mask[2] = torch.nan, False
    for kl_in_loss in (True, False):
        A, _ = in_groups(x, algo="grpo", kl_in_loss=kl_in_loss)
        assert not A[1].any() and A[0].all()


def test_a_soft_punishment_counts_the_place_where_a_dialogue_ends():
    own = torch.tensor([[True, False, False, True], [True, True, False, False]])
    config = replace(TINY, overlong="soft", overlong_buffer=4)
    scores, _ = treat_overlong(config, torch.zeros(2), own, torch.ones(2, dtype=torch.bool))
    assert scores.tolist() == [-1, -0.5]


def test_a_reward_that_was_not_given_stays_out_of_its_group():
    nan = float("nan")
    parts = torch.tensor([[[1.0, 2.0], [0.0, nan], [1.0, 4.0], [0.0, 6.0]]])
    score = parts.nansum(-1)
    A = gdpo(TINY, score, score, torch.ones(1, 4, dtype=torch.bool), parts[0], torch.ones(2))
    half = 0.75 ** 0.5  # 0.5 over the deviation of 1, 0, 1, 0
    by_hand = torch.tensor([[half - 1, -half, half, 1 - half]])  # 2, 4, 6 become -1, 0, 1
    torch.testing.assert_close(A / A[0, 2], by_hand / half, atol=1e-3, rtol=0)


def test_a_batch_is_cut_row_by_row_and_what_it_lacks_it_lacks_then():
    x = handmade()
    part = x[1:3]
    assert isinstance(part, Rows) and type(part) is type(x) and (len(x), len(part)) == (4, 2)
    assert torch.equal(part.logp, x.logp[1:3]) and part.rewards is None
    doubled = x.map(lambda y: y.double() if y.is_floating_point() else y)
    assert doubled.scores.dtype == torch.float64 and doubled.mask.dtype == torch.bool
