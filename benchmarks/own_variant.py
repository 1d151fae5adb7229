"""A clip range that follows the entropy before each token, against a fixed one.

    python benchmarks/own_variant.py                        # ten seeds
    python benchmarks/own_variant.py --first 100 --seeds 1  # the one that chose the four passes

Appends to nbs/studies/results/own_variant.csv: for each seed and clip the mean score, entropy and
share of clipped tokens of every five iterations, and in the last of these rows pass@1 and pass@8
on held-out questions. Objectives and training are those of nbs/studies/own_variant.ipynb. A run
that was stopped goes on with the first seed that is missing.
"""
from statistics import mean

from jobs import RESULTS, by_seed, names_of, options, text

from rlhf_notes.studies.checkable import measure

CLIPS = dict(fixed="ppo", undecided="undecided", sure="sure")  # variants
LOGGED = "score", "entropy", "clip_fraction"
COLUMNS = "seed", "clip", "iteration", *LOGGED, "pass_1", "pass_8"


def study(seed):
    "Yield the rows of a seed."
    space = names_of(RESULTS.parent / "own_variant.ipynb", "imports", "variant", "train")
    lm = space["pretrain"](space["train"], seed)
    for name, variant in CLIPS.items():
        trainer = space["trainer"](lm, variant, seed).learn()
        found, _ = measure(trainer, space["held_out"])
        for end in range(5, len(trainer.rows) + 1, 5):
            logged = [mean(r[c] for r in trainer.rows[end - 5:end]) for c in LOGGED]
            last = end == len(trainer.rows)
            passed = [found[c] if last else None for c in ("pass_1", "pass_8")]
            yield [text(x) for x in (seed, name, end, *logged, *passed)]


def main():
    by_seed(study, options(__doc__, RESULTS / "own_variant.csv", 10), COLUMNS)


if __name__ == "__main__": main()
