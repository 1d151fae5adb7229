import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import matplotlib
import pytest
import torch
from hypothesis import given, strategies as st

from rlhf_notes import runs
from rlhf_notes.runs import Run, check_options, option, pick_device, progress_bar, stop_on_interrupt, write_atomically

CONFIG = {"task": "toy", "seed": 0}


def snapshot(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def row(i): return {"iteration": i, "loss": 1 / i, "return": None if i == 1 else 10.0 * i}


# options

@dataclass(frozen=True)
class Options:
    seed: int = option(0, "the seed", low=0)
    rate: float = option(0.1, "a rate", low=0, high=1, open_low=True)
    mode: str = option("a", "a name", choices=("a", "b"))
    device: str = option("auto", "any string")
    def __post_init__(self): check_options(self)


@pytest.mark.parametrize("bad, error, words", [
    (dict(seed=-1), ValueError, r"seed must be in \[0, inf\), got -1"),
    (dict(seed=1.0), TypeError, "seed must be an integer, got 1.0"),
    (dict(seed=True), TypeError, "seed must be a number, got bool"),
    (dict(seed="1"), TypeError, "seed must be a number, got str"),
    (dict(seed=None), TypeError, "seed must be a number, got NoneType"),
    (dict(rate=0.0), ValueError, r"rate must be in \(0, 1\], got 0"),
    (dict(rate=math.nan), ValueError, "rate must be in"),
    (dict(rate=math.inf), ValueError, "rate must be in"),
    (dict(mode="c"), ValueError, "mode must be one of 'a', 'b', got 'c'"),
    (dict(device=3), TypeError, "device must be a string, got int"),
])
def test_options_out_of_range_are_named(bad, error, words):
    with pytest.raises(error, match=words): Options(**bad)


def test_options_in_range_pass():
    assert Options(seed=5, rate=1, mode="b", device="cuda:3").rate == 1


@pytest.mark.parametrize("name, gpus, auto, expected", [
    ("auto", 0, "cpu", "cpu"), ("auto", 2, "cpu", "cpu"), ("auto", 0, "cuda", "cpu"), ("auto", 2, "cuda", "cuda"),
    ("cpu", 0, "cuda", "cpu"), ("cuda", 1, "cpu", "cuda"), ("cuda:1", 2, "cpu", "cuda:1"),
    ("cuda", 0, "cpu", "device 'cuda' is not there"), ("cuda:2", 2, "cpu", "device 'cuda:2' is not there"),
    ("gpu", 2, "cpu", "device must be auto, cpu or cuda, got 'gpu'"), ("cuda:x", 2, "cpu", "device must be"), ("", 2, "cpu", "device must be"),
])
def test_pick_device(monkeypatch, name, gpus, auto, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if " " not in expected: assert pick_device(name, auto) == expected
    else:
        with pytest.raises(ValueError, match=expected): pick_device(name, auto)


# files

@pytest.mark.parametrize("content", ["text", b"bytes", lambda p: p.write_text("text")])
def test_write_atomically(tmp_path, content):
    write_atomically(tmp_path / "f", content)
    assert (tmp_path / "f").read_bytes() in (b"text", b"bytes") and [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_crash_while_writing_leaves_the_old_file(tmp_path):
    (tmp_path / "f").write_text("old")
    def crash(p): p.write_text("half"); raise RuntimeError
    with pytest.raises(RuntimeError): write_atomically(tmp_path / "f", crash)
    assert snapshot(tmp_path) == {(tmp_path / "f").relative_to(tmp_path): b"old"}


def test_a_new_run_directory(tmp_path):
    run = Run.create(tmp_path / "deep" / "run", CONFIG | {"rate": 0.1, "bad": math.nan})
    assert json.loads((run.path / "config.json").read_text()) == CONFIG | {"rate": 0.1, "bad": None}
    (tmp_path / "empty").mkdir()
    Run.create(tmp_path / "empty", CONFIG)


def test_what_is_there_is_refused_and_untouched(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "foreign").mkdir(); (tmp_path / "foreign" / "config.json").write_text('{"name": "another program"}')
    (tmp_path / "full").mkdir(); (tmp_path / "full" / "letter").write_text("x")
    Run.create(tmp_path / "run", CONFIG)
    before = snapshot(tmp_path)
    for name, overwrite, words in (("file", False, "must be a directory, got the file"), ("file", True, "must be a directory, got the file"), ("full", True, "which holds letter"),
                                   ("foreign", True, "which holds config.json"), ("run", False, "which holds a run: continue it with --resume")):
        with pytest.raises(ValueError, match=words): Run.create(tmp_path / name, CONFIG, overwrite)
    assert snapshot(tmp_path) == before


def test_overwriting_deletes_the_run_and_nothing_else(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    run.log(row(1), 1); run.save_checkpoint({"a": 1}); run.save_figure(lambda f: f.subplots()); run.finish({})
    (run.path / "notes.txt").write_text("mine")
    Run.create(tmp_path / "run", CONFIG | {"seed": 1}, overwrite=True)
    assert sorted(p.name for p in run.path.iterdir()) == ["config.json", "notes.txt"] and json.loads((run.path / "config.json").read_text())["seed"] == 1


def test_metrics_are_written_as_they_come(tmp_path):
    run = Run.create(tmp_path, CONFIG)
    for i in (1, 2, 3):
        run.log(row(i), i)
        assert len((tmp_path / "metrics.csv").read_text().splitlines()) == i + 1
    assert (tmp_path / "metrics.csv").read_text() == "iteration,loss,return\n1,1,\n2,0.5,20\n3,0.333333333,30\n"
    assert run.read_metrics() == [{"iteration": i, "loss": float(f"{1 / i:.9g}"), "return": row(i)["return"]} for i in (1, 2, 3)]


@given(x=st.floats(width=32, allow_nan=False))
def test_nine_digits_tell_float32_apart(x):
    assert runs._cell(x) == "inf" or torch.tensor(float(runs._cell(x)), dtype=torch.float32).item() == x


def test_nan_is_an_empty_cell_and_null(tmp_path):
    assert runs._cell(math.nan) == runs._cell(None) == "" and runs._cell(3) == "3"
    run = Run.create(tmp_path, CONFIG)
    run.finish({"a": math.nan, "b": {"c": math.inf}, "d": True, "e": None})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": None, "b": {"c": None}, "d": True, "e": None}


def scalars(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    acc = EventAccumulator(str(path)); acc.Reload()
    return {tag: [(e.step, e.value) for e in acc.Scalars(tag)] for tag in acc.Tags()["scalars"]}


def test_killed_after_the_checkpoint_the_run_continues_from_it(tmp_path):
    straight, killed = Run.create(tmp_path / "straight", CONFIG), Run.create(tmp_path / "killed", CONFIG)
    for i in range(1, 6): straight.log(row(i), i)
    straight.finish({})
    for i in range(1, 5):
        killed.log(row(i), i)
        if i == 2: killed.save_checkpoint({"i": i, "w": torch.arange(3), "names": ["a"], "none": None})
    killed._writer.close()                                                       # rows 3 and 4 are lost with the power
    time.sleep(1.1)                                                              # TensorBoard orders event files by the second in their names
    again = Run.resume(tmp_path / "killed")
    assert again.config == CONFIG and again.checkpoint["i"] == 2 and torch.equal(again.checkpoint["w"], torch.arange(3)) and again.checkpoint["names"] == ["a"]
    for i in range(3, 6): again.log(row(i), i)
    again.finish({})
    assert (tmp_path / "killed" / "metrics.csv").read_bytes() == (tmp_path / "straight" / "metrics.csv").read_bytes()
    assert scalars(tmp_path / "killed") == scalars(tmp_path / "straight") and [s for s, _ in scalars(tmp_path / "killed")["loss"]] == [1, 2, 3, 4, 5]


def test_a_run_interrupted_before_its_first_row_can_be_resumed(tmp_path):
    Run.create(tmp_path, CONFIG).save_checkpoint({"i": 0})
    run = Run.resume(tmp_path)
    run.log(row(1), 1)
    assert len(run.read_metrics()) == 1


@pytest.mark.parametrize("spoil, words", [
    (lambda p: (p / "checkpoint.pt").unlink(), "has no checkpoint.pt"),
    (lambda p: (p / "config.json").unlink(), "has no config.json"),
    (lambda p: (p / "checkpoint.pt").write_bytes(b"junk"), "whose files can be read"),
    (lambda p: (p / "config.json").write_text("{"), "whose files can be read"),
    (lambda p: (p / "metrics.csv").write_text("iteration,loss,return\n"), "with 2 rows in metrics.csv, as its checkpoint says, got .* with 0"),
    (lambda p: (p / "metrics.csv").unlink(), "with 2 rows in metrics.csv"),
    (lambda p: torch.save({"rows": 2, "state": os.system}, p / "checkpoint.pt"), "whose files can be read"),
])
def test_what_cannot_be_resumed_is_refused(tmp_path, spoil, words):
    run = Run.create(tmp_path, CONFIG)
    for i in (1, 2): run.log(row(i), i)
    run.save_checkpoint({"i": 2}); run.finish({})
    spoil(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=words): Run.resume(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_figure_is_drawn_without_touching_the_settings(tmp_path):
    before = dict(matplotlib.rcParams)
    Run.create(tmp_path, CONFIG).save_figure(lambda f: f.subplots().plot([1, 2]), "curve.svg")
    first = (tmp_path / "curve.svg").read_bytes()
    Run(tmp_path, CONFIG).save_figure(lambda f: f.subplots().plot([1, 2]), "curve.svg")
    assert b"<svg" in first and first == (tmp_path / "curve.svg").read_bytes() and dict(matplotlib.rcParams) == before


# Ctrl-C and progress

def test_first_interrupt_asks_second_stops():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt() as stop:
        assert not stop.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt): signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupts_are_left_alone_in_other_threads():
    seen = []
    def work():
        with stop_on_interrupt() as stop: seen.append(stop.is_set())
    thread = threading.Thread(target=work); thread.start(); thread.join()
    assert seen == [False]


class Screen:
    "A stderr that remembers."
    def __init__(self, tty): self.text, self.tty = "", tty
    def write(self, s): self.text += s
    def flush(self): pass
    def isatty(self): return self.tty


@pytest.mark.parametrize("tty", [True, False])
def test_progress_is_shown_on_a_terminal_alone(monkeypatch, tty):
    monkeypatch.setattr(sys, "stderr", Screen(tty))
    with progress_bar(10, 2, "toy") as bar: bar.update(8); bar.set_postfix({"kl": 0.5})
    assert ("toy: 100%" in sys.stderr.text and "kl=0.5" in sys.stderr.text) if tty else sys.stderr.text == ""


def test_importing_loads_nothing_heavy():
    out = subprocess.run([sys.executable, "-c", "import sys, rlhf_notes.runs; print([m for m in ('torch', 'numpy', 'matplotlib', 'tqdm', 'tensorboard', 'gymnasium') if m in sys.modules])"],
                         capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
