"A training that is stopped and continued: what goes into its state, and comes back."
import math
import os
import signal

import pytest
import torch

from rlhf_notes.training import fit as loop
from rlhf_notes.training.fit import Evaluator, Stage, fit
from rlhf_notes.training.signals import progress_bar

class Part:
    def __init__(self, x): self.x = x
    def state_dict(self): return dict(x=self.x)
    def load_state_dict(self, state): self.x = state["x"]


class Toy(Stage):
    PARTS = "a", "b"

    def __init__(self, a, b, iteration=0, steps=0):
        self.a, self.b, self.iteration, self.steps = Part(a), Part(b), iteration, steps


def test_a_stage_comes_back_with_every_part_and_its_counts():
    state, other = Toy(torch.ones(2), 3.0, 5, 40).state_dict(), Toy(torch.zeros(2), 0.0)
    assert state.keys() == {"a", "b", "iteration", "steps"}
    other.load_state_dict(state)
    assert torch.equal(other.a.x, torch.ones(2)) and other.b.x == 3.0
    assert (other.iteration, other.steps) == (5, 40)


class Rising:
    "A training whose score rises to 4 at its third iteration, and falls."
    def __init__(self): self.iteration, self.saved = 0, []

    @property
    def left(self): return self.iteration < 7

    def score(self): return 4 - abs(self.iteration - 3)

    def iterate(self):
        self.iteration += 1
        return dict(iteration=self.iteration, score=self.score())


def run(*hooks, **options):
    toy, rows = Rising(), []
    hooks = [*hooks, lambda trainer, row: rows.append(row)]
    fit(toy, progress_bar(7), hooks=hooks, **options)
    return toy, rows


def test_a_hook_that_returns_false_ends_the_training_after_the_others():
    toy, rows = run(lambda trainer, row: row["iteration"] < 3)
    assert toy.iteration == len(rows) == 3
    assert run(lambda trainer, row: None)[0].iteration == 7


@pytest.mark.parametrize("every, saves", [(0.0, 8), (1e9, 1)])
def test_a_checkpoint_is_written_now_and_then_and_at_the_end(every, saves, monkeypatch):
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", every)
    saved = []
    run(save=lambda: saved.append(0))
    assert len(saved) == saves


def test_ctrl_c_ends_after_the_iteration_and_saves():
    saved = []
    def interrupt(trainer, row): os.kill(os.getpid(), signal.SIGINT)
    toy, _ = run(interrupt, save=lambda: saved.append(0))
    assert toy.iteration == 1 and saved == [0]


def test_the_best_policy_is_kept_and_the_last_is_looked_at():
    toy = Rising()
    best = Evaluator(toy.score, every=2, keep=lambda: toy.iteration)
    rows = []
    fit(toy, progress_bar(7), hooks=[best, lambda trainer, row: rows.append(row)])
    assert [row["eval_score"] for row in rows] == [None, 3, None, 3, None, 1, 0]
    assert (best.best, best.kept) == (3, 2)


def test_that_nothing_was_the_best_is_said():
    with pytest.warns(UserWarning, match="^no eval_score was a number, so the last policy stays"):
        run(Evaluator(lambda: math.nan, 2, keep=list))


def test_an_evaluator_goes_on_where_it_was():
    toy = Rising()
    one, two = (Evaluator(toy.score, 3, keep=lambda: toy.iteration) for _ in range(2))
    for _ in range(4): one(toy, toy.iterate())
    two.load_state_dict(one.state_dict())
    row = toy.iterate()
    two(toy, row)
    assert row["eval_score"] is None and (two.best, two.kept) == (4, 3)
