"""Learning to predict what an environment says, beside the reward.

    python benchmarks/observations.py    # ten seeds

Appends to nbs/formulas/results/observations.csv: for each seed, world and `observation_coef` the
score of every iteration. The worlds are those of nbs/formulas/50_credit.ipynb: an environment that
says what would have been right ("told"), and one that says the same to everybody ("mute"). A run
that was stopped goes on with the first seed that is missing.
"""
from jobs import RESULTS, by_seed, names_of, options, text

FORMULAS = RESULTS.parents[1] / "formulas"
COLUMNS = "seed", "world", "coef", "iteration", "score"
COEFS = dict(told=(0.0, 0.01, 0.1, 1.0), mute=(0.0, 0.1, 1.0))


def study(seed):
    "Yield the rows of a seed."
    space = names_of(FORMULAS / "50_credit.ipynb", "imports", "facts")
    says = dict(told=space["teacher"], mute=space["mute"])
    for world, coef in ((world, coef) for world in COEFS for coef in COEFS[world]):
        trainer = space["facts"](seed, says[world], observation_coef=coef)
        while trainer.left:
            row = trainer.iterate()
            yield [text(y) for y in (seed, world, coef, row["iteration"], row["score"])]


def main():
    args = options(__doc__, FORMULAS / "results" / "observations.csv", 10)
    by_seed(study, args, COLUMNS)


if __name__ == "__main__": main()
