import csv
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from itertools import product

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from rlhf_notes.training import runs
from rlhf_notes.training.runs import Run, bootstrap_interval, check_options, option, pick_device, progress_bar, stop_on_interrupt, wilson_interval, write_atomically

CONFIG = {"task": "toy", "seed": 0}


def snapshot(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def row(i): return {"iteration": i, "loss": 1 / i, "return": None if i == 1 else 10.0 * i}


# options

@dataclass(frozen=True)
class Options:
    seed: int = option(0, "the seed", low=0)
    rate: float = option(0.1, "a rate", low=0, high=1, open_low=True)
    count: int = option(0, "any whole number")
    shift: float = option(0.0, "any number")
    mode: str = option("a", "a name", choices=("a", "b"))
    device: str = option("auto", "any string")
    scale: bool = option(False, "yes or no")
    def __post_init__(self): check_options(self)


@pytest.mark.parametrize("bad, error, words", [
    (dict(seed=-1), ValueError, r"seed must be in \[0, 2147483647\], got -1"),
    (dict(seed=2**31), ValueError, r"seed must be in \[0, 2147483647\], got 2147483648"), (dict(seed=10**400), ValueError, r"seed must be in \[0, 2147483647\], got 1000"),
    (dict(shift=-10**400), ValueError, r"shift must be in \[-3.4e\+38, 3.4e\+38\], got -1000"), (dict(shift=3.5e38), ValueError, r"shift must be in \[-3.4e\+38, 3.4e\+38\], got 3.5e\+38"), (dict(count=-2**31), ValueError, r"count must be in \[-2147483647, 2147483647\], got"),
    (dict(seed=1.0), TypeError, "seed must be an integer, got 1.0"),
    (dict(seed=True), TypeError, "seed must be a number, got bool"),
    (dict(seed="1"), TypeError, "seed must be a number, got str"),
    (dict(seed=None), TypeError, "seed must be a number, got NoneType"),
    (dict(rate=0.0), ValueError, r"rate must be in \(0, 1\], got 0"),
    (dict(rate=math.nan), ValueError, "rate must be in"),
    (dict(rate=math.inf), ValueError, "rate must be in"),
    (dict(mode="c"), ValueError, "mode must be one of 'a', 'b', got 'c'"),
    (dict(device=3), TypeError, "device must be a string, got int"),
    (dict(scale=1), TypeError, "scale must be True or False, got 1"),
    (dict(scale=None), TypeError, "scale must be True or False, got None"),
    (dict(scale="yes"), TypeError, "scale must be True or False, got 'yes'"),
])
def test_options_out_of_range_are_named(bad, error, words):
    with pytest.raises(error, match=words): Options(**bad)


def test_options_in_range_pass():
    assert Options(seed=2**31 - 1, count=-2**31 + 1, shift=-3.4e38) and torch.tensor(runs.MAX_FLOAT).isfinite() and torch.tensor(runs.MAX_SEED).item() == runs.MAX_SEED
    assert Options(seed=5, rate=1, mode="b", device="cuda:3", scale=True).rate == 1
    assert type(Options(rate=np.float64(0.3)).rate) is float and Options(rate=np.float64(0.3)) == Options(rate=0.3)


@pytest.mark.parametrize("name, gpus, auto, expected", [
    ("auto", 0, "cpu", "cpu"), ("auto", 2, "cpu", "cpu"), ("auto", 0, "cuda", "cpu"), ("auto", 2, "cuda", "cuda"),
    ("cpu", 0, "cuda", "cpu"), ("cuda", 1, "cpu", "cuda"), ("cuda:1", 2, "cpu", "cuda:1"),
    ("cuda", 0, "cpu", "device 'cuda' is not there"), ("cuda:2", 2, "cpu", "device 'cuda:2' is not there"),
    ("gpu", 2, "cpu", "device must be auto, cpu, cuda or mps, got 'gpu'"), ("cuda:x", 2, "cpu", "device must be"), ("cuda:\N{SUPERSCRIPT TWO}", 3, "cpu", "device must be"), ("", 2, "cpu", "device must be"),
])
def test_pick_device(monkeypatch, name, gpus, auto, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if " " not in expected: assert pick_device(name, auto) == expected
    else:
        with pytest.raises(ValueError, match=expected): pick_device(name, auto)


def test_pick_an_apple_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("mps") == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device 'mps' is not there: .* sees no Apple GPU; use cpu or auto"): pick_device("mps")


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


def test_each_file_comes_by_one_rename(tmp_path, monkeypatch):
    "Whoever is killed before it leaves the old one whole, whoever is killed after it the new one."
    run, replace, renamed = Run.create(tmp_path, CONFIG), os.replace, []
    def one(tmp, path):
        assert before.get(path.relative_to(tmp_path)) == (path.read_bytes() if path.exists() else None)
        renamed.append(path.name); replace(tmp, path)
    monkeypatch.setattr(os, "replace", one)
    for i in (1, 2):
        before = snapshot(tmp_path)
        run.save_checkpoint({"i": i}); run.save_figure(lambda f: f.subplots().plot([i, 0])); run.finish({"i": i}); runs.write_table(tmp_path / "seeds.csv", [{"i": i}])
    assert renamed == ["checkpoint.pt", "curve.svg", "summary.json", "seeds.csv"] * 2


def test_a_new_run_directory(tmp_path):
    run = Run.create(tmp_path / "deep" / "run", CONFIG | {"rate": 0.1, "bad": math.nan})
    assert json.loads((run.path / "config.json").read_text()) == CONFIG | {"rate": 0.1, "bad": None}
    (tmp_path / "empty").mkdir()
    Run.create(tmp_path / "empty", CONFIG)


def test_what_is_there_is_refused_and_untouched(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "foreign").mkdir(); (tmp_path / "foreign" / "config.json").write_text('{"name": "another program"}')
    (tmp_path / "full").mkdir(); (tmp_path / "full" / "letter").write_text("x")
    for name, text in (("five", "5"), ("list", '["task"]')): (tmp_path / name).mkdir(); (tmp_path / name / "config.json").write_text(text)
    Run.create(tmp_path / "run", CONFIG).save_checkpoint({}); Run.create(tmp_path / "new", CONFIG)
    Run.create(tmp_path / "done", CONFIG).save_checkpoint({}); (tmp_path / "done" / "summary.json").write_text('{"interrupted": false}')
    before = snapshot(tmp_path)
    for name, overwrite, words in (("file", False, "must be a directory, got the file"), ("file", True, "must be a directory, got the file"), ("full", True, "which holds letter"),
                                   ("foreign", True, "which holds config.json"), ("five", True, "which holds config.json"), ("list", True, "which holds config.json"), ("run", False, "which holds a run: continue it with --resume"),
                                   ("new", False, "which holds a run: replace it with --overwrite"), ("done", False, "which holds a run: replace it with --overwrite")):
        with pytest.raises(ValueError, match=words): Run.create(tmp_path / name, CONFIG, overwrite)
        with pytest.raises(ValueError, match=words): Run.check(tmp_path / name, overwrite)
    assert Run.check(tmp_path / "new", overwrite=True) == [tmp_path / "new" / "config.json"] and Run.check(tmp_path / "newer") == [] and not (tmp_path / "newer").exists()
    assert snapshot(tmp_path) == before


def test_overwriting_deletes_the_run_and_nothing_else(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    run.log(row(1), 1); run.save_checkpoint({"a": 1}); run.save_figure(lambda f: f.subplots()); run.finish({})
    (run.path / "policy").mkdir(); (run.path / "policy" / "config.json").write_text("of the last time")
    (run.path / "notes.txt").write_text("mine"); (run.path / "seeds.csv").write_text("of the last time"); (run.path / "compare.csv").write_text("of the last time"); (run.path / "bench.csv").write_text("of the last time")
    Run.create(tmp_path / "run", CONFIG | {"seed": 1}, overwrite=True)
    assert sorted(p.name for p in run.path.iterdir()) == ["config.json", "notes.txt"] and json.loads((run.path / "config.json").read_text())["seed"] == 1


def test_overwriting_deletes_the_runs_of_the_seeds_and_no_others(tmp_path):
    "Those that the old run has written: not a seed beyond its own, not a directory that only has such a name, not a letter beside a run."
    many = Run.create(tmp_path / "many", CONFIG | {"seeds": 3}).path
    for k in (0, 1, 3): Run.create(many / f"seed{k}", CONFIG).save_checkpoint({})
    (many / "seed1" / "notes.txt").write_text("mine"); (many / "seed2").mkdir(); (many / "seed2" / "config.json").write_text("[]")
    Run.create(many, CONFIG | {"seeds": 1}, overwrite=True)
    assert sorted(str(p) for p in snapshot(many)) == ["config.json", "seed1/notes.txt", "seed2/config.json", "seed3/checkpoint.pt", "seed3/config.json"] and not (many / "seed0").exists()
    one = Run.create(tmp_path / "one", CONFIG).path
    Run.create(one / "seed0", CONFIG); Run.create(one, CONFIG, overwrite=True)
    assert (one / "seed0" / "config.json").exists()


def test_a_link_to_a_run_is_no_seed(tmp_path):
    many, other = Run.create(tmp_path / "many", CONFIG | {"seeds": 1}).path, Run.create(tmp_path / "other", CONFIG).path
    (many / "seed0").symlink_to(other)
    Run.create(many, CONFIG, overwrite=True)
    assert (other / "config.json").exists()


@pytest.mark.parametrize("closed", ["many", "many/seed1", "many/policy", "many/policy/below", "many/seed1/policy", "."])
def test_what_may_not_be_written_to_is_refused_before_anything_is_deleted(tmp_path, monkeypatch, closed):
    many = Run.create(tmp_path / "many", CONFIG | {"seeds": 2}).path
    for k in (0, 1): Run.create(many / f"seed{k}", CONFIG).save_checkpoint({})
    for name in ("policy/below", "seed1/policy"): (many / name).mkdir(parents=True); (many / name / "weights").write_text("x")
    before = snapshot(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path.resolve() != (tmp_path / closed).resolve())            # to root everything is open
    with pytest.raises(ValueError, match="out must be a directory that may be written to"): Run.create(tmp_path / "other" if closed == "." else many, CONFIG, overwrite=True)
    if closed == "many/seed1":
        with pytest.raises(ValueError, match="resume must be a run directory that may be written to, got .*seed1"): Run.resume(many / "seed1")
    assert snapshot(tmp_path) == before


def test_what_a_killed_process_has_left_half_written_is_no_hindrance(tmp_path):
    for name in (".config.json.tmp", ".checkpoint.pt.tmp", ".curve.svg.tmp"): (tmp_path / name).write_text("half")
    (tmp_path / ".policy.tmp").mkdir(); (tmp_path / ".policy.tmp" / "model.safetensors").write_text("half")
    run = Run.create(tmp_path, CONFIG)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    (tmp_path / ".checkpoint.pt.tmp").write_text("half")
    with pytest.raises(ValueError, match="which holds a run"): Run.create(tmp_path, CONFIG)
    Run.create(tmp_path, CONFIG, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    (tmp_path / "config.json").rename(tmp_path / ".notes.txt.tmp")
    with pytest.raises(ValueError, match="which holds .notes.txt.tmp"): Run.create(tmp_path, CONFIG, overwrite=True)


def test_killed_while_it_overwrites_it_is_still_a_run(tmp_path, monkeypatch):
    "After each number of deletions: what is left can be overwritten, of the seeds as well, and then nothing of the old run is left."
    class Killed(BaseException): pass
    for lives in range(100):
        many = Run.create(tmp_path / str(lives), CONFIG | {"seeds": 2}).path
        for path in (many, many / "seed0", many / "seed1"):
            if path != many: Run.create(path, CONFIG)
            for name in ("checkpoint.pt", "summary.json"): (path / name).write_text("{}")
            (path / "policy").mkdir(); (path / "policy" / "config.json").write_text("{}")
        (many / "notes.txt").write_text("mine"); (many / "seed1" / "notes.txt").write_text("mine")
        count, finished = [lives], False
        def counted(act):
            def run(*args, **kwargs):
                count[0] -= 1
                if count[0] < 0: raise Killed
                return act(*args, **kwargs)
            return run
        with monkeypatch.context() as m:
            for name in ("unlink", "rmdir"): m.setattr(runs.Path, name, counted(getattr(runs.Path, name)))
            m.setattr(runs.shutil, "rmtree", counted(runs.shutil.rmtree)); m.setattr(os, "replace", counted(os.replace))
            try: Run.create(many, CONFIG, overwrite=True); finished = True
            except Killed: pass
        Run.create(many, CONFIG, overwrite=True)
        assert set(snapshot(many)) == {runs.Path("config.json"), runs.Path("notes.txt"), runs.Path("seed1/notes.txt")}
        if finished: break
    assert finished and lives > 10


def test_a_link_to_a_policy_goes_and_what_it_leads_to_stays(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    (tmp_path / "elsewhere").mkdir(); (tmp_path / "elsewhere" / "weights").write_text("x"); (run.path / "policy").symlink_to(tmp_path / "elsewhere")
    Run.create(run.path, CONFIG, overwrite=True)
    assert not (run.path / "policy").exists() and (tmp_path / "elsewhere" / "weights").exists()


def test_a_checkpoint_of_which_a_bit_has_changed_is_refused(tmp_path):
    Run.create(tmp_path, CONFIG).save_checkpoint({"weights": torch.full((1000,), 0.5)})
    path = tmp_path / "checkpoint.pt"
    data = bytearray(path.read_bytes())
    data[data.index(np.full(1000, 0.5, np.float32).tobytes()) + 1234] ^= 1
    path.write_bytes(data)
    assert len(torch.load(path, weights_only=True)["state"]["weights"].unique()) == 2            # PyTorch takes it
    with pytest.raises(ValueError, match="^resume must be a run directory whose files can be read, got .*: ValueError: checkpoint.pt has changed since it was written, in "): Run.resume(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="names there are bytes")
def test_a_name_that_is_no_text_is_refused(tmp_path):
    bad = os.fsdecode(os.fsencode(tmp_path) + b"/b\xff")
    with pytest.raises(ValueError, match=r"out must be a path in UTF-8, got b'.*/b\\xff'"): Run.create(bad, CONFIG)
    with pytest.raises(ValueError, match="resume must be a path in UTF-8"): Run.resume(bad)
    assert Run.create(tmp_path / "ü y", CONFIG).path.exists() and len(list(tmp_path.iterdir())) == 1


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
    assert len(again.read_metrics()) == 2
    assert again.config == CONFIG and again.checkpoint["i"] == 2 and torch.equal(again.checkpoint["w"], torch.arange(3)) and again.checkpoint["names"] == ["a"]
    for i in range(3, 6): again.log(row(i), i)
    again.finish({})
    assert (tmp_path / "killed" / "metrics.csv").read_bytes() == (tmp_path / "straight" / "metrics.csv").read_bytes()
    assert scalars(tmp_path / "killed") == scalars(tmp_path / "straight") and [s for s, _ in scalars(tmp_path / "killed")["loss"]] == [1, 2, 3, 4, 5]
    assert scalars(tmp_path / "killed")["return"] == [(i, 10.0 * i) for i in (2, 3, 4, 5)]


def test_a_run_interrupted_before_its_first_row_can_be_resumed(tmp_path):
    Run.create(tmp_path, CONFIG).save_checkpoint({"i": 0})
    run = Run.resume(tmp_path)
    run.log(row(1), 1)
    assert len(run.read_metrics()) == 1


@pytest.mark.parametrize("name", ["device", "model", "processes", "versions"])
def test_a_run_goes_on_in_another_place_and_with_no_other_options(tmp_path, name):
    Run.create(tmp_path, CONFIG | {name: "there"}).save_checkpoint({"i": 1})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {name: "here"}))
    assert Run.resume(tmp_path).config[name] == "here"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {name: "here", "seed": 1}))
    with pytest.raises(runs.Misfit, match="it was written with seed = 0, and there stands 1"): Run.resume(tmp_path)
    torch.save({"rows": 0, "state": {"i": 2}}, tmp_path / "checkpoint.pt")                # of an older version, which did not say
    assert Run.resume(tmp_path).checkpoint == {"i": 2}


def test_a_lack_of_memory_is_no_misfit(tmp_path):
    for error, seen in ((MemoryError("of 3 GiB"), MemoryError), (KeyError("w"), runs.Misfit)):
        with pytest.raises(seen), Run(tmp_path, CONFIG).fitting(): raise error


@pytest.mark.parametrize("spoil, words", [
    (lambda p: (p / "checkpoint.pt").unlink(), "has no checkpoint.pt"),
    (lambda p: (p / "config.json").unlink(), "has no config.json"),
    (lambda p: (p / "checkpoint.pt").write_bytes(b"junk"), "whose files can be read"),
    (lambda p: (p / "config.json").write_text("{"), "whose files can be read"),
    (lambda p: (p / "config.json").write_text("5"), "whose files can be read, .*config.json holds no object but a int"),
    (lambda p: (p / "config.json").write_text('["task"]'), "config.json holds no object but a list"),
    (lambda p: (p / "summary.json").write_text("{"), "whose files can be read"),
    (lambda p: (p / "summary.json").write_text("[]"), "summary.json holds no object but a list"),
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
    out = subprocess.run([sys.executable, "-c", "import sys, rlhf_notes.training.runs; print([m for m in ('torch', 'numpy', 'matplotlib', 'tqdm', 'tensorboard', 'gymnasium') if m in sys.modules])"],
                         capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# intervals

def every_resample(values, statistic):
    "The exact bootstrap: the statistic of each of the n ** n resamples, in order; as a function that reads off a quantile."
    results = sorted(statistic(sample) for sample in product(values, repeat=len(values)))
    return lambda q: results[min(max(int(q * len(results)), 0), len(results) - 1)]


@pytest.mark.parametrize("statistic, by_hand", [("mean", lambda v: sum(v) / len(v)), ("median", lambda v: sorted(v)[len(v) // 2] if len(v) % 2 else sum(sorted(v)[len(v) // 2 - 1:len(v) // 2 + 1]) / 2)])
@pytest.mark.parametrize("values", [[0.0, 1.0], [3.0, 1.0, 2.0], [5.0, -1.0, 0.0, 7.5], [1.9, 2.1, 1.8, 2.4, 6.0]])
@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_interval_is_that_of_all_resamples(values, statistic, by_hand, level):
    exact = every_resample(values, by_hand)
    for end, q in zip(bootstrap_interval(values, level, 100_000, statistic), ((1 - level) / 2, (1 + level) / 2)):
        assert exact(q - 0.01) - 1e-9 <= end <= exact(q + 0.01) + 1e-9


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), level=st.floats(0.05, 0.99), statistic=st.sampled_from(["mean", "median"]))
def test_interval_properties(values, level, statistic):
    low, high = bootstrap_interval(values, level, 500, statistic)
    assert (low, high) == bootstrap_interval(values, level, 500, statistic), "the same numbers, the same interval"
    assert type(low) is type(high) is float and min(values) - 1e-6 <= low <= high <= max(values) + 1e-6
    wide = bootstrap_interval(values, (1 + level) / 2, 500, statistic)
    assert wide[0] <= low and high <= wide[1]
    assert bootstrap_interval([2 * v for v in values], level, 500, statistic) == pytest.approx((2 * low, 2 * high), rel=1e-9, abs=1e-9)
    if len(values) == 1: assert low == high == pytest.approx(values[0])


def test_interval_leaves_numpys_generator_alone_and_covers_the_mean():
    np.random.seed(3); before = np.random.get_state()[1].tolist()
    rng = np.random.default_rng(5)
    covered = np.mean([low <= 4 <= high for low, high in (bootstrap_interval(4 + rng.standard_normal(30), resamples=500) for _ in range(400))])
    assert 0.88 < covered < 0.98 and np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize("bad, error, words", [
    (dict(values=[]), ValueError, r"values must be finite numbers, at least one, got \[\]"), (dict(values=[1.0, math.nan]), ValueError, "values must be finite"),
    (dict(values=[math.inf]), ValueError, "values must be finite"), (dict(values=[None]), ValueError, "values must be finite"), (dict(values=["a"]), ValueError, "values must be finite"),
    (dict(values=[[1.0], [2.0]]), ValueError, "values must be finite"), (dict(values=3.0), ValueError, "values must be finite"),
    (dict(values=[1.0], level=0.0), ValueError, r"level must be in \(0, 1\), got 0"), (dict(values=[1.0], level=1.0), ValueError, r"level must be in \(0, 1\), got 1"),
    (dict(values=[1.0], level="0.9"), TypeError, "level must be a number"), (dict(values=[1.0], resamples=0), ValueError, "resamples must be in"), (dict(values=[1.0], statistic="mode"), ValueError, "statistic must be one of 'mean', 'median'"),
])
def test_interval_refuses(bad, error, words):
    with pytest.raises(error, match=words): bootstrap_interval(**bad)


@pytest.mark.parametrize("level, z", [(0.95, 1.959964), (0.9, 1.644854), (0.5, 0.674490)])
@pytest.mark.parametrize("count, total", [(0, 1), (1, 1), (0, 20), (1, 20), (7, 20), (20, 20), (3, 1000)])
def test_ends_of_a_share_are_the_shares_that_are_just_no_surprise(count, total, level, z):
    low, high = wilson_interval(count, total, level)
    assert type(low) is type(high) is float and 0 <= low <= count / total <= high <= 1
    for p in (low, high): assert abs(count / total - p) == pytest.approx(z * math.sqrt(p * (1 - p) / total), rel=1e-5, abs=1e-7)
    assert wilson_interval(total - count, total, level) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_none_of_twenty_by_hand():
    assert wilson_interval(0, 20) == pytest.approx((0, 3.841459 / 23.841459), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("bad, error, words", [
    (dict(count=-1, total=5), ValueError, r"count must be in \[0, 5\], got -1"), (dict(count=6, total=5), ValueError, r"count must be in \[0, 5\], got 6"), (dict(count=0, total=0), ValueError, r"total must be in \[1, inf\), got 0"),
    (dict(count=0.5, total=5), TypeError, "count must be an integer, got 0.5"), (dict(count=1, total=5.0), TypeError, "total must be an integer"), (dict(count=True, total=5), TypeError, "count must be a number"),
    (dict(count=1, total=5, level=1), ValueError, r"level must be in \(0, 1\), got 1"), (dict(count=1, total=5, level=0.0), ValueError, r"level must be in \(0, 1\), got 0"),
])
def test_share_refuses(bad, error, words):
    with pytest.raises(error, match=words): wilson_interval(**bad)


@pytest.mark.parametrize("environment, size, rank", [({}, 1, 0), ({"WORLD_SIZE": "2", "RANK": "1"}, 2, 1), ({"PMI_SIZE": "3", "PMI_RANK": "2"}, 3, 2), ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, 4, 0),
                                                    ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}, 2, 1), ({"WORLD_SIZE": "1", "PMI_SIZE": "2", "PMI_RANK": "0"}, 2, 0), ({"WORLD_SIZE": "1"}, 1, 0)])
def test_launched_knows_each_launcher(monkeypatch, environment, size, rank):
    for name in list(os.environ):
        if name.endswith(("_SIZE", "RANK")): monkeypatch.delenv(name)
    for name, value in environment.items(): monkeypatch.setenv(name, value)
    assert (runs.launched("SIZE", 1), runs.launched("RANK", 0)) == (size, rank)


@pytest.mark.parametrize("name, value", [("WORLD_SIZE", "abc"), ("PMI_SIZE", ""), ("OMPI_COMM_WORLD_SIZE", "1.5")])
def test_a_number_of_processes_that_is_none_is_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name}, from the environment, must be an integer, got '{value}'$"): runs.launched("SIZE", 1)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "PMI_SIZE"])
def test_no_process_is_too_few(monkeypatch, name):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2"); monkeypatch.setenv(name, "00"); monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=f"^{name}, from the environment, must be at least 1, got '00'$"): runs.launched("SIZE", 1)
    assert runs.launched("RANK", 1) == 0


@pytest.mark.parametrize("name", ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_a_number_of_processes_without_a_rank_is_refused(monkeypatch, name):
    for known in list(os.environ):
        if known.endswith(("_SIZE", "RANK")): monkeypatch.delenv(known)
    monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match=f"^{name}, from the environment, must come with a rank, as accelerate launch, torchrun and mpirun set it, got '2' alone$"): runs.launched("SIZE", 1)
    assert runs.launched("RANK", 0) == 0
    monkeypatch.setenv("MV2_COMM_WORLD_RANK", "1")
    assert runs.launched("SIZE", 1) == 2


def test_a_table_is_quoted_where_it_must_be(tmp_path):
    rows = [{"a, b": "x, y", "c": None, "d": 1 / 3, "e": 7}, {"a, b": 'say "z"', "c": "", "d": math.nan, "e": -1}]
    runs.write_table(tmp_path / "t.csv", rows)
    with open(tmp_path / "t.csv", newline="") as f: assert list(csv.DictReader(f)) == [{"a, b": "x, y", "c": "", "d": "0.333333333", "e": "7"}, {"a, b": 'say "z"', "c": "", "d": "", "e": "-1"}]


def test_an_interrupt_inside_is_known_outside():
    "Of many trainings, Ctrl-C in the last moment of one must still stop those to come."
    with stop_on_interrupt() as outer:
        with stop_on_interrupt() as inner: assert not inner.is_set()
        assert not outer.is_set()
        with stop_on_interrupt() as inner:
            signal.raise_signal(signal.SIGINT)
            assert inner.is_set() and not outer.is_set()
        assert outer.is_set()
    with stop_on_interrupt() as again: assert not again.is_set()


def test_another_flag_is_heeded_inside():
    "What stops the many stops the one in training, and the first Ctrl-C after that is still the first."
    flag = threading.Event()
    with stop_on_interrupt(flag) as outer:
        with stop_on_interrupt() as inner:
            assert not inner.is_set()
            flag.set()
            assert inner.is_set() and outer.is_set()
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt): signal.raise_signal(signal.SIGINT)


def test_what_has_come_to_nan_says_where_and_what_is_left():
    error = runs.diverged("iteration 3", ValueError("loss is nan"))
    assert type(error) is FloatingPointError and str(error) == "iteration 3: loss is nan; the last checkpoint, if there is one, is from before"
