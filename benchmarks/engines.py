"""The largest difference between our losses and those of verl and TRL, under their interfaces.

    .venv/bridges/bin/python benchmarks/engines.py     writes nbs/bridges/results/differences.csv

One row for each formula, library and case: over five seeded batches with ragged masks, alone, as a
quarter of a batch (two processes, two microbatches), with token weights, with label smoothing, and
with a KL times the ratio.
In verl 8 x 12 tokens and the gradient for log-probabilities; in TRL 8 x 6 tokens or 8 pairs, and
the gradient for the weights of a tiny model.
"""
import argparse
import csv
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
OUT = ROOT / "nbs" / "bridges" / "results" / "differences.csv"
NAMES = "library", "version", "theirs", "ours", "case", "value", "gradient", "why"


def verl_rows():
    "Differences in verl, by variant and case."
    from bridges.verl_losses import CASES, KNOWN, LOSSES, worst

    import rlhf_notes.bridges.verl  # noqa: F401
    for variant, (theirs, *_) in LOSSES.items():
        for case in CASES:
            yield row("verl", theirs, variant, case, worst(variant, case), KNOWN)


def trl_rows():
    "Differences in TRL, by variant or kind and case."
    from bridges.trl_losses import KNOWN, cells, trainers, worst
    from bridges.trl_parts import save_tiny
    with tempfile.TemporaryDirectory() as tmp:
        made = trainers(save_tiny(tmp), tmp)
        for ours, theirs, case in cells():
            yield row("trl", theirs, ours, case, worst(made, ours, case), KNOWN)


def row(library, theirs, ours, case, differences, known):
    value, gradient = (f"{x:.1e}" for x in differences)
    return (library, version(library), theirs, ours, case, value, gradient,
            known.get((ours, case), ""))


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = [*verl_rows(), *trl_rows()]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    with open(OUT, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(NAMES)
        writer.writerows(found)
    for x in found: print(*x)


if __name__ == "__main__":
    main()
