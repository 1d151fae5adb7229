"""Groups whose responses all have the same score: drawn again, and warned of.

Such a group teaches nothing; the log has the share of them, `same`.

- `dynamic_sampling=True` draws other prompts in place of such groups, at most twice (DAPO,
  [Yu et al. 2025](https://arxiv.org/abs/2503.14476), eq. 11); `rounds` counts the rollouts of an
  iteration, `same` is of the first, and its `score` is that of the groups that were kept.
- `reward_aggregation="normalise"` normalises each of several rewards in its group before they are
  added ([GDPO](../../nbs/formulas/08_advantage.ipynb#several-rewards)), so that one of large
  variance cannot drown the others; a group has spread where one of them has.

The scores are those of the rewards: what `overlong` makes of them does not count.

Two warnings come once each in `learn`: of scores that do not differ in the first three iterations,
and of a KL that rises by more than a nat a token in one, as it does at a learning rate that is far
too high.
"""

__all__ = ['refill', 'draw_again', 'Warnings']

import warnings

import torch

from ..language.rollout import no_spread


def refill(rollout, more, same, too):
    """A rollout whose groups without spread, where `same` is True, are replaced by groups with
    spread of `more`, where `too` is False, as many as there are."""
    rows = torch.arange(len(rollout), device=same.device).view(len(same), -1)
    old, new = same.nonzero()[:, 0], rows[~too]
    count = min(len(old), len(new))
    rows[old[:count]] = len(rollout) + new[:count]
    return rollout.join(more)[rows.flatten()]


def draw_again(loop, again=2):
    "In place of `Loop.draw`: up to `again` more rollouts replace groups without spread."
    rollout, rounds = loop.collect(loop.policy.lm, *loop.prompts()), 1
    same = first = without_spread(loop, rollout)
    while rounds <= again and same.any():
        more = loop.collect(loop.policy.lm, *loop.prompts(rounds))
        rollout = refill(rollout, more, same, without_spread(loop, more))
        same, rounds = without_spread(loop, rollout), rounds + 1
    share = loop.machine.gather(first.float().mean()[None]).mean().item()
    return rollout, dict(same=share, rounds=rounds)


def without_spread(loop, rollout):
    "The groups of a rollout that teach nothing."
    return no_spread(loop.config, rollout, loop.task.weights)


class Warnings:
    "A hook of a training that warns, once each, of scores without spread and of a leap of the KL."

    def __init__(self):
        self.so_far, self.kl_before, self.calm = 0.0, 0.0, True

    def __call__(self, trainer, row):
        self.of_scores(row)
        self.of_kl(row, trainer.config.learning_rate)

    def of_scores(self, row):
        "Warn if nearly no group had a spread in the first three iterations."
        self.so_far += row["same"] / 3
        if row["iteration"] == 3 and self.so_far > 0.95:
            warnings.warn("reward must differ among the responses to a prompt to teach anything; "
                          f"in 3 iterations {self.so_far:.0%} of the groups had no spread")

    def of_kl(self, row, rate):
        "Warn if the KL per token jumps from one iteration to the next."
        kl = row["kl_k1"] / max(1, row["length"])
        if self.calm and kl - self.kl_before > 1:
            warnings.warn(f"the KL to the reference rose by {kl - self.kl_before:.1f} nats a token "
                          f"in one iteration, to {kl:.1f}: a learning_rate of {rate:.2g} may be "
                          "too high")
            self.calm = False
        self.kl_before = kl
