from dataclasses import replace

import pytest
import torch

from language.parts import TINY, a_batch, handmade, trainer
from rlhf_notes.formulas.advantage import gae_tokens, group_advantage, rloo_advantage
from rlhf_notes.formulas.whitening import whiten
from rlhf_notes.language.prompts import Prompts
from rlhf_notes.language.rollout import with_advantages
from rlhf_notes.language.task import make_tokenizer


def test_rows_of_a_rollout():
    b = a_batch(trainer())
    assert len(b) == 16 and len(b[3:5]) == 2 and b[3:5].responses.shape == (2, 16) and b[torch.tensor([5])].scores == b.scores[5]
    assert a_batch(trainer(replace(TINY, algo="rloo")))[:4].returns is None


def test_kl_is_paid_per_token_and_the_score_lands_on_the_last_that_counts():                        # P8
    x = handmade()
    b = with_advantages(replace(TINY, whiten_rewards=False, whiten_advantages=False), x, 0.3)
    last = torch.tensor([2, 3, 0, 1])
    expected = -0.3 * (x.logp - x.logp_ref)
    expected[torch.arange(4), last] += x.scores
    torch.testing.assert_close(b.rewards, expected.where(x.response_mask, torch.tensor(0.0)))
    in_loss = with_advantages(replace(TINY, kl_in_loss=True), x, 0.3).rewards
    assert torch.equal(in_loss[torch.arange(4), last], x.scores) and in_loss.count_nonzero() == 4


def test_ppo_whitens_rewards_keeping_their_mean_and_advantages_removing_it():                        # P9
    x = handmade()
    raw = with_advantages(replace(TINY, whiten_rewards=False, whiten_advantages=False), x, 0.3)
    adv, ret = gae_tokens(whiten(raw.rewards, x.response_mask, shift_mean=False), x.values, x.response_mask, 1.0, 0.95)
    b = with_advantages(TINY, x, 0.3)
    torch.testing.assert_close(b.returns, ret); torch.testing.assert_close(b.advantages, whiten(adv, x.response_mask))
    counted = b.advantages[x.response_mask]
    assert abs(counted.mean()) < 1e-5 and abs(counted.var(correction=0) - 1) < 1e-4
    assert not torch.allclose(b.returns, raw.returns, atol=1e-2)
    plain = gae_tokens(raw.rewards, x.values, x.response_mask, 1.0, 0.95)
    torch.testing.assert_close((raw.advantages, raw.returns), plain)


def test_nothing_is_discounted_unless_asked():                                                       # P6
    x = replace(handmade(), values=torch.zeros(4, 4))
    b = with_advantages(replace(TINY, lam=1.0, whiten_rewards=False), x, 0.0)
    torch.testing.assert_close(b.returns, torch.where(x.response_mask, x.scores[:, None], torch.tensor(0.0)))
    half = with_advantages(replace(TINY, lam=1.0, gamma=0.5, whiten_rewards=False), x, 0.0)
    torch.testing.assert_close(half.returns[1], x.scores[1] * torch.tensor([0.125, 0.25, 0.5, 1.0]))


@pytest.mark.parametrize("algo, options, formula", [("rloo", {}, rloo_advantage), ("grpo", {}, group_advantage), ("grpo", dict(group_scale="none"), lambda x: group_advantage(x, None)),
                                                    ("grpo", dict(group_scale="batch"), lambda x: group_advantage(x, "batch"))])
def test_groups_compare_whole_rewards(algo, options, formula):
    x = handmade()
    c = replace(TINY, algo=algo, group=2, **options)
    b = with_advantages(c, x, 0.2)
    total = x.scores - 0.2 * ((x.logp - x.logp_ref) * x.response_mask).sum(1)
    torch.testing.assert_close(b.advantages, formula(total.view(2, 2)).reshape(4, 1).expand(4, 4))
    assert b.returns is None
