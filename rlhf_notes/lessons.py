"""Results of measurements for the lessons that quote them, and errors that they expect."""

__all__ = ["NOTEBOOKS", "read_results", "ExceptionExpected"]

import csv
import re
from pathlib import Path

_HERE = Path(__file__).parent
# A wheel holds the notebooks and their results; otherwise this is the repository.
NOTEBOOKS = next(p for p in (_HERE / "nbs", _HERE.parent / "nbs") if p.is_dir())


def read_results(
    name: str,  # of a CSV in one of the folders nbs/**/results, without its suffix
) -> list[dict]:  # column -> text, a dict for each row
    "Read the rows of a measurement, wherever the notebook stands."
    if not (found := [*NOTEBOOKS.rglob(f"results/{name}.csv")]):
        raise FileNotFoundError(f"name must be a CSV of a folder nbs/**/results, got {name!r}")
    with found[0].open(newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


class ExceptionExpected:
    "A block that has to raise `kind`, with a message in which `regex` is found."

    def __init__(self, kind=Exception, regex: str = ""):
        self.kind, self.regex = kind, regex

    def __enter__(self): pass

    def __exit__(self, _, error, traceback):
        if error is None: raise AssertionError(f"{self.kind.__name__} was not raised")
        return isinstance(error, self.kind) and bool(re.search(self.regex, str(error)))
