"The numbers of the page on a loop of one's own come from two processes."
import csv
from functools import partial

import own_loop
import pytest
from processes import FORKS
from torch.multiprocessing import start_processes

@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one_by_the_tokens_of_both(monkeypatch):
    monkeypatch.setattr(own_loop, "SIZES", (4,))
    if FORKS:  # with the imports of this process
        monkeypatch.setattr(own_loop, "spawn", partial(start_processes, start_method="fork"))
    (_, _, shared, own), = own_loop.study(0)
    with (own_loop.BRIDGES / "results" / "own_loop.csv").open(encoding="utf-8") as f:
        stored = next(csv.DictReader(f))
    assert float(shared) < 1e-6
    assert float(own) == pytest.approx(float(stored["own"]), rel=1e-3)
