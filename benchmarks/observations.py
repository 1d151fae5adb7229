"""Learning to predict what an environment says, beside the reward.

    python benchmarks/observations.py    # ten seeds

Appends to nbs/formulas/results/observations.csv: for each seed and `observation_coef` the score of
every iteration. The world is `facts` of nbs/formulas/50_credit.ipynb, whose environment says what
would have been right. A run that was stopped goes on with the first seed that is missing.
"""
from jobs import RESULTS, by_seed, names_of, options, text

FORMULAS = RESULTS.parents[1] / "formulas"
COLUMNS = "seed", "coef", "iteration", "score"
COEFS = 0.0, 1.0


def study(seed):
    "Yield the rows of a seed."
    space = names_of(FORMULAS / "50_credit.ipynb", "imports", "facts")
    for coef in COEFS:
        trainer = space["facts"](seed, observation_coef=coef)
        while trainer.left:
            row = trainer.iterate()
            yield [text(y) for y in (seed, coef, row["iteration"], row["score"])]


def main():
    args = options(__doc__, FORMULAS / "results" / "observations.csv", 10)
    by_seed(study, args, COLUMNS)


if __name__ == "__main__": main()
