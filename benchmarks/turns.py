"""A model learns to guess a number, and what it needs the second turn for.

    python benchmarks/turns.py

Appends to nbs/hub/results/turns.csv: for ten seeds and each environment of the lesson, one that
says "higher" or "lower" and one that says "no", the score of every iteration. The game is that of
nbs/hub/turns.ipynb. A run that was stopped goes on with the first seed that is missing.
"""
from jobs import RESULTS, by_seed, names_of, options, text

HUB = RESULTS.parents[1] / "hub"
COLUMNS = "seed", "environment", "iteration", "score"


def study(seed):
    "Yield the rows of a seed."
    space = names_of(HUB / "turns.ipynb", "imports", "game")
    for name in ("told", "untold"):
        trainer = space["game"](seed, space[name]).learn()
        for row in trainer.rows:
            yield [text(x) for x in (seed, name, row["iteration"], row["score"])]


def main():
    args = options(__doc__, HUB / "results" / "turns.csv", 10)
    by_seed(study, args, COLUMNS)


if __name__ == "__main__": main()
