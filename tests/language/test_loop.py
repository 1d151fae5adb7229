"The loop computes what it has always computed, plain and above it."
import csv

import pytest
from language import reference

from rlhf_notes.language.loop import Loop
from rlhf_notes.language.scale import Scale

with open(reference.FILE, newline="") as file:
    KNOWN = {(r["algo"], int(r["seed"]), int(r["iteration"])): r for r in csv.DictReader(file)}


@pytest.mark.parametrize("algo", reference.ALGORITHMS)
@pytest.mark.parametrize("seed", reference.SEEDS)
def test_ten_iterations_are_those_that_were_recorded(algo, seed):
    found = reference.rows(algo, seed)
    assert len(found) == 10
    for row in found:
        known = KNOWN[algo, seed, row["iteration"]]
        for name in reference.SHOWN:
            assert (row[name] is None) == (known[name] == ""), name
            if row[name] is None: continue
            assert row[name] == pytest.approx(float(known[name]), rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("algo", ["grpo", "dpo"])
def test_one_device_runs_the_plain_loop_and_microbatches_the_one_above_it(algo):
    plain, scaled = (reference.trainer(algo, 0, microbatches=k).loop for k in (1, 2))
    assert isinstance(plain, Loop) and not isinstance(plain, Scale)
    assert isinstance(scaled, Scale) and isinstance(scaled, Loop)
    a, b = (loop.iterate() for loop in (plain, scaled))
    for name in set(a) - {"tokens_per_second"}:
        assert (a[name] is None) == (b[name] is None), name
        if a[name] is not None: assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-4), name
