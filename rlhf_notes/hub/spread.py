"""Groups whose responses all have the same score: counted, drawn again, warned of.

Such a group teaches nothing; the log has the share of them, `same`.

| option | meaning |
|---|---|
| `dynamic_sampling=True` | other prompts are drawn in place of such groups, at most twice (DAPO, [Yu et al. 2025](https://arxiv.org/abs/2503.14476), eq. 11); `rounds` counts the rollouts of an iteration, and its `score` is that of the groups that were kept |
| `reward_aggregation="normalise"` | each of several rewards is normalised in its group before they are added ([GDPO](../../nbs/formulas/09_reward.ipynb)), so that one of large variance cannot drown the others; a group has spread where one of them has |

The scores are those of the rewards: what `overlong` makes of them does not count.

Two warnings come once each: of scores that do not differ in the first three iterations, and of a KL
that rises by more than a nat a token in one, as it does at a learning rate that is far too high.
"""

__all__ = ['no_spread', 'refill', 'Spread']

import math
import warnings

import torch

from ..language.rollout import weighted_sum
from ..training.devices import to_device


def no_spread(scores, scored, group):
    """True for the groups (B / group,) whose scored responses all have the same, in each column of
    the scores (B, C); the responses to a prompt are adjacent."""
    x = scores.masked_fill(~scored[:, None], math.nan).unflatten(0, (-1, group))
    return (x.nan_to_num(-math.inf).amax(1) <= x.nan_to_num(math.inf).amin(1)).all(-1)


def refill(rollout, more, same, too):
    """A rollout whose groups without spread, where `same` is True, are replaced by groups with
    spread of `more`, where `too` is False, as many as there are."""
    rows = torch.arange(len(rollout), device=same.device).view(len(same), -1)
    old, new = same.nonzero()[:, 0], rows[~too]
    count = min(len(old), len(new))
    rows[old[:count]] = len(rollout) + new[:count]
    return rollout.join(more)[rows.flatten()]


class Spread:
    "A hook of the loop: the groups without spread, and its two warnings."
    again = 2  # rollouts at most, to replace groups without spread

    def __init__(self, config, warns=True):
        self.config, self.warns = config, warns
        self.so_far, self.kl_before, self.calm = 0.0, 0.0, True

    def same(self, loop, rollout):
        "The groups of a rollout that teach nothing."
        c, weights = self.config, to_device(loop.task.weights, rollout.parts.device)
        scores = rollout.parts * weights
        if c.reward_aggregation == "sum":
            scores = weighted_sum(rollout.parts, weights)[:, None]
        k = c.responses_per_prompt
        return no_spread(scores, rollout.is_scored, k if k > 1 else len(rollout))

    def collected(self, loop, rollout):
        "The rollout; with dynamic sampling, groups without spread are replaced."
        same, self.rounds = self.same(loop, rollout), 1
        self.share = loop.machine.gather(same.float().mean()[None])
        while self.config.dynamic_sampling and self.rounds <= self.again and same.any():
            more = loop.collect(loop.policy.lm, *loop.prompts(self.rounds))
            rollout = refill(rollout, more, same, self.same(loop, more))
            same, self.rounds = self.same(loop, rollout), self.rounds + 1
        return rollout

    def logged(self, loop, row):
        "The share of groups without spread, and the rollouts; warnings by the main process."
        row |= dict(same=self.share.mean().item(), rounds=self.rounds)
        if self.warns and loop.machine.rank == 0:
            self.warn_of_scores(row)
            self.warn_of_kl(row, loop.config.learning_rate)

    def warn_of_scores(self, row):
        "Warn once if nearly no group had a spread in the first three iterations."
        self.so_far += row["same"] / 3
        if row["iteration"] == 3 and self.so_far > 0.95:
            warnings.warn("reward must differ among the responses to a prompt to teach anything; "
                          f"in 3 iterations {self.so_far:.0%} of the groups had no spread")

    def warn_of_kl(self, row, rate):
        "Warn once if the KL per token jumps from one iteration to the next."
        kl = row["kl_k1"] / max(1, row["length"])
        if self.calm and kl - self.kl_before > 1:
            warnings.warn(f"the KL to the reference rose by {kl - self.kl_before:.1f} nats a token "
                          f"in one iteration, to {kl:.1f}: a learning_rate of {rate:.2g} may be "
                          "too high")
            self.calm = False
        self.kl_before = kl
