"Results by name, and errors that are expected."
from collections import Counter

import pytest

from rlhf_notes.lessons import NOTEBOOKS, ExceptionExpected, read_results

def test_results_are_found_by_their_name_alone():
    files = Counter(p.stem for p in NOTEBOOKS.rglob("results/*.csv"))
    assert len(files) > 40 and set(files.values()) == {1}
    assert {row["program"] for row in read_results("ladder")} > {"PPO", "REINFORCE"}
    for name in ("none", "ladder.csv", "control/cartpole_curves"):
        with pytest.raises(FileNotFoundError, match=f"name must be a CSV .* got '{name}'"):
            read_results(name)


def test_an_exception_that_is_expected_has_to_come():
    with ExceptionExpected(ValueError, regex="x must be .* 'a'"):
        raise ValueError("x must be 1, got 'a'")
    with ExceptionExpected(): raise KeyError("any")
    with pytest.raises(AssertionError, match="ValueError was not raised"):
        with ExceptionExpected(ValueError): pass
    for other in (ValueError("another message"), TypeError("message")):
        with pytest.raises(type(other)), ExceptionExpected(ValueError, regex="^message"):
            raise other
