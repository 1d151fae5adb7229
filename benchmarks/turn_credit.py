"""A model that may ask before it guesses: three advantages of a turn.

    python benchmarks/turn_credit.py                        # ten seeds
    python benchmarks/turn_credit.py --first 100 --seeds 3  # those that chose world and steps

Appends to nbs/formulas/results/turn_credit.csv: for each seed and advantage the score and the share
of dialogues that asked, in every iteration. `leave-one-out` is that of `RLHF(turn_credit=)`,
`dialogue` the training without it (GRPO's: one advantage for all tokens of a dialogue), `by index`
compares the reward of a turn with those of the dialogues that reached that turn. The world is that
of nbs/formulas/50_credit.ipynb. A run that was stopped goes on with the first seed that is missing.
"""
from functools import partial

from jobs import RESULTS, by_seed, names_of, options, text

from rlhf_notes.language.rollout import turn_advantages

FORMULAS = RESULTS.parents[1] / "formulas"
COLUMNS = "seed", "advantage", "iteration", "score", "asked"
WAYS = "leave-one-out", "by index", "dialogue"


def study(seed):
    "Yield the rows of a seed."
    space = names_of(FORMULAS / "50_credit.ipynb", "imports", "by-index", "world")
    for name in WAYS:
        trainer = space["world"](seed, turn_credit=None if name == "dialogue" else "leave-one-out")
        if name == "by index":
            trainer.loop.compare = partial(turn_advantages, space["by_index"])
        while trainer.left:
            row = trainer.iterate()
            asked = (trainer.rollout.turns > 0).any(1).float().mean().item()
            yield [text(x) for x in (seed, name, row["iteration"], row["score"], asked)]


def main():
    args = options(__doc__, FORMULAS / "results" / "turn_credit.csv", 10)
    by_seed(study, args, COLUMNS)


if __name__ == "__main__": main()
