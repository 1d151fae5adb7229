"""Learning to predict what an environment says, beside the reward.

    python benchmarks/observations.py    # ten seeds

Appends to nbs/formulas/results/observations.csv: for each seed and `observation_coef` the score of
every iteration. The world is `facts` of nbs/formulas/50_credit.ipynb, whose environment says what
would have been right. A run that was stopped goes on with the first seed that is missing.
"""
from fastcore.nbio import read_nb
from jobs import RESULTS, by_seed, options, text

FORMULAS = RESULTS.parents[1] / "formulas"
COLUMNS = "seed", "coef", "iteration", "score"
COEFS = 0.0, 1.0


def lesson():
    "The lesson's world, from its cells."
    cells = {cell.id: cell.source for cell in read_nb(FORMULAS / "50_credit.ipynb").cells}
    space = {}
    for name in ("imports", "facts"): exec(cells[name], space)
    return space["facts"]


def study(seed):
    "Yield the rows of a seed."
    for coef in COEFS:
        trainer = lesson()(seed, observation_coef=coef)
        while trainer.left:
            row = trainer.iterate()
            yield [text(y) for y in (seed, coef, row["iteration"], row["score"])]


def main():
    args = options(__doc__, FORMULAS / "results" / "observations.csv", 10)
    by_seed(study, args, COLUMNS)


if __name__ == "__main__": main()
