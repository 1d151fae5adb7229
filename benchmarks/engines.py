"""The largest difference between our losses and those of verl and TRL, under their interfaces.

    .venv/bridges/bin/python benchmarks/engines.py     writes nbs/bridges/results/differences.csv

One row for each formula, library and case: over five seeded batches of 8 x 12 tokens with ragged
masks, alone, as a quarter of a batch (two processes, two microbatches), and with token weights.
"""
import argparse
import csv
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
OUT = ROOT / "nbs" / "bridges" / "results" / "differences.csv"
NAMES = "library", "version", "theirs", "ours", "case", "value", "gradient", "why"


def rows():
    "Differences in verl, by variant and case."
    from bridges.verl_losses import CASES, KNOWN, LOSSES, worst

    import rlhf_notes.bridges.verl  # noqa: F401
    for variant, (theirs, *_) in LOSSES.items():
        for case in CASES:
            value, gradient = worst(variant, case)
            yield ("verl", version("verl"), theirs, variant, case, f"{value:.1e}",
                   f"{gradient:.1e}", KNOWN.get((variant, case), ""))


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = list(rows())
    OUT.parent.mkdir(parents=True, exist_ok=True)
    with open(OUT, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(NAMES)
        writer.writerows(found)
    for row in found: print(*row[2:])


if __name__ == "__main__":
    main()
