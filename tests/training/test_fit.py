"A training that is stopped and continued: what goes into its state, and comes back."
import math
import os
import signal
import subprocess
import sys

import processes
import pytest
import torch

from rlhf_notes.training import fit as loop
from rlhf_notes.training.fit import Evaluator, Stage, fit, progress_bar

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


def test_ctrl_c_says_how_far_the_training_is(capsys):
    def interrupt(trainer, row):
        if row["iteration"] == 3: os.kill(os.getpid(), signal.SIGINT)
    for bar, size in ((progress_bar(7), 1), (progress_bar(70), 10)):
        toy = Rising()
        fit(toy, bar, size, hooks=[interrupt])
        assert toy.iteration == 3
        said = "stopping after 3 of 7 iterations; a second Ctrl-C stops at once\n"
        assert capsys.readouterr().err.endswith(said)
    toy.iteration = 4
    fit(toy, progress_bar(7, 4), hooks=[lambda *_: os.kill(os.getpid(), signal.SIGINT)])
    assert "stopping after 5 of 7 iterations" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)])
def test_a_program_that_is_to_end_ends_after_its_training_has_been_saved(number, tmp_path):
    "A script that trains ten times does not go on with the next."
    code = f"""
import os, signal, sys
signal.signal({int(number)}, signal.SIG_DFL)
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_fit import Rising, fit, progress_bar
for i in range(3):
    toy = Rising()
    fit(toy, progress_bar(7), hooks=[lambda t, row: os.kill(os.getpid(), {int(number)})],
        save=lambda: print("saved", toy.iteration, flush=True))
    print("went on")
"""
    done = processes.run(code)
    assert done.stdout == "saved 1\n" and done.returncode == -number, done
    assert "stopping after 1 of 7 iterations" in done.stderr


def test_a_training_that_stops_and_goes_on_is_the_uninterrupted_one():
    "The best stands in place in between, as long as nothing is learned."
    def make():
        toy = Rising()
        toy.weights = 0.0
        def put(kept): toy.weights = kept
        toy.score = lambda: 4 - abs(toy.iteration - 3)
        toy.best = Evaluator(toy.score, every=2, keep=lambda: toy.weights, put=put)
        iterate = toy.iterate
        def iterated():
            toy.weights += 1 + toy.weights / 3
            return iterate() | dict(weights=toy.weights)
        toy.iterate = iterated
        return toy
    def learn(toy, until=99):
        rows = []
        toy.best.go_on()
        hooks = [toy.best, lambda t, row: rows.append(row), lambda t, row: row["iteration"] < until]
        fit(toy, progress_bar(7), hooks=hooks)
        toy.best.take_best()
        toy.best.take_best()
        return rows
    whole, parts, loaded = make(), make(), make()
    rows = learn(whole)
    first = learn(parts, until=5)
    assert parts.weights == first[1]["weights"] != first[-1]["weights"]
    loaded.best.load_state_dict(parts.best.state_dict())
    loaded.iteration, loaded.weights = parts.iteration, parts.weights
    assert [*first, *learn(parts)] == [*first, *learn(loaded)] == rows
    assert whole.weights == parts.weights == loaded.weights == rows[1]["weights"]
    del loaded.best.__dict__["last"]
    loaded.best.load_state_dict(dict(times=1, best=2, kept=None))  # of an earlier version
    loaded.best.take_best()
    assert loaded.weights == rows[1]["weights"]


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


@pytest.mark.parametrize("harm", [dict.clear, lambda row: row.pop("score")])
def test_a_hook_takes_no_columns_from_its_row_but_may_change_and_add_some(harm):
    seen = []
    def hook(trainer, row):
        seen.append(row)
        harm(row)
        row.update(iteration=-1, own=5)
    run(hook)
    assert seen[:2] == [dict(iteration=-1, own=5, score=2), dict(iteration=-1, own=5, score=3)]


def test_autocast_around_a_training_is_off_inside_and_said():
    seen = []
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(UserWarning, match="^autocast for cpu is off in a training"):
            run(lambda trainer, row: seen.append(torch.is_autocast_enabled("cpu")))
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False] * 7
