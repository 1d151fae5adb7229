import csv
import json
import math
import os
import stat
import subprocess
import sys
import threading
import time

import matplotlib
import processes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_notes.training import runs
from rlhf_notes.training.runs import Run, write_atomically, write_table

CONFIG = {"task": "toy", "seed": 0}


def snapshot(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def row(i): return {"iteration": i, "loss": 1 / i, "return": None if i == 1 else 10.0 * i}


@pytest.mark.parametrize("content", ["text", lambda f: f.write(b"text")])
def test_write_atomically(tmp_path, content):
    write_atomically(tmp_path / "f", content)
    assert snapshot(tmp_path) == {"f": b"text"}


def test_a_crash_while_writing_leaves_the_old_file(tmp_path):
    (tmp_path / "f").write_text("old")

    def crash(f):
        f.write(b"half")
        raise RuntimeError
    with pytest.raises(RuntimeError): write_atomically(tmp_path / "f", crash)
    assert snapshot(tmp_path) == {"f": b"old"}


def test_a_directory_in_the_way_is_named(tmp_path):
    (tmp_path / "f").mkdir()
    with pytest.raises(IsADirectoryError) as e: write_atomically(tmp_path / "f", "text")
    assert e.value.filename == str(tmp_path / "f") and [*tmp_path.iterdir()] == [tmp_path / "f"]


def test_each_file_comes_by_one_rename(tmp_path, monkeypatch):
    "A process that is killed before it leaves the old file whole, one killed after it the new one."
    run, replace, renamed = Run.create(tmp_path, CONFIG), os.replace, []

    def one(tmp, path):
        assert before.get(path.name) == (path.read_bytes() if path.exists() else None)
        renamed.append(path.name)
        replace(tmp, path)
    monkeypatch.setattr(os, "replace", one)
    for i in (1, 2):
        before = snapshot(tmp_path)
        run.save_checkpoint({"i": i})
        run.finish({"i": i})
        write_table(tmp_path / "seeds.csv", [{"i": i}])
    assert renamed == ["checkpoint.pt", "summary.json", "seeds.csv"] * 2


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def sync(fd):
        events.append("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else os.fstat(fd).st_size)
        fsync(fd)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("renamed"), replace(*paths)))
    write_atomically(tmp_path / "f", "text")
    assert events == [4, "renamed", "directory"]


def test_a_link_in_the_way_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.secrets, "token_hex", lambda n: "guessed")
    (tmp_path / "letter").write_text("mine")
    for name in (".f.tmp", ".f.guessed.tmp"): (tmp_path / name).symlink_to("letter")
    with pytest.raises(FileExistsError): write_atomically(tmp_path / "f", "text")
    assert (tmp_path / "letter").read_text() == "mine" and not (tmp_path / "f").exists()


@pytest.mark.skipif(os.name != "posix", reason="resource")
def test_a_full_disk_is_told_and_leaves_the_last_checkpoint(tmp_path):
    import resource
    run = Run.create(tmp_path, CONFIG)
    run.save_checkpoint({"i": 1})
    run.log(row(1), 1)
    before, limits = snapshot(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large: .*checkpoint.pt"):
            run.save_checkpoint({"w": torch.ones(10_000)})
        with pytest.raises(OSError, match="File too large: .*seeds.csv"):
            write_table(tmp_path / "seeds.csv", [{"a": "x" * 5000}])
        with pytest.raises(OSError, match="File too large: .*metrics.csv"):
            run.log({"a": "x" * 5000}, 2)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    after = snapshot(tmp_path)
    assert after.keys() == before.keys() and after["checkpoint.pt"] == before["checkpoint.pt"]


def test_a_second_process_is_refused(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    run.save_checkpoint({})
    before = snapshot(tmp_path)
    code = f"""
from rlhf_notes.training.runs import Run
for begin in (lambda: Run.resume({str(run.path)!r}).lock(),
              lambda: Run.create({str(run.path)!r}, {{"task": "toy"}}, overwrite=True)):
    try: begin()
    except ValueError as e: print(e)
"""
    done = processes.run(code)
    assert (done.stdout == f"{run.path} must be free, but another process is training there\n" * 2
            and snapshot(tmp_path) == before), (done)
    del run
    assert processes.run(code).stdout == ""


def test_a_table_is_quoted_where_it_must_be(tmp_path):
    write_table(tmp_path / "t.csv",
                [{"a, b": "x, y", "c": None, "d": 1 / 3, "e": 7},
                 {"a, b": 'say "z"', "c": "", "d": math.nan, "e": -1}])
    with open(tmp_path / "t.csv", newline="") as f: read = list(csv.DictReader(f))
    assert read == [{"a, b": "x, y", "c": "", "d": "0.333333333", "e": "7"},
                    {"a, b": 'say "z"', "c": "", "d": "", "e": "-1"}]


def test_columns_that_a_callback_adds_now_and_then_stand_under_their_names(tmp_path):
    "Also where rows are appended, and where one lacks a column or has others in another order."
    run = Run.create(tmp_path / "run", dict(task="train", track=[]))
    added = {}, dict(odd=22), dict(third=33), dict(third=34, odd=24), {}
    for i, more in enumerate(added):
        row = dict(steps=i, loss=i / 2)
        run.log(row, i)
        row |= more
    rows = [dict(loss=0.5, steps=5, late=6), dict(steps=7)]
    for row in rows:
        run.log(row, 5)
    expected = [dict(steps=i, loss=i / 2) | more for i, more in enumerate(added)] + rows
    def read():
        with open(run.path / "metrics.csv", newline="") as f: return [*csv.DictReader(f)]
    for _ in range(2):
        found = [{k: float(x) for k, x in row.items() if x} for row in read()]
        assert found == expected
        run.finish({})


@given(x=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_nine_digits_tell_float32_apart(x):
    assert torch.tensor(float(runs._cell(x)), dtype=torch.float32).item() == x


def test_a_new_run_directory(tmp_path):
    run = Run.create(tmp_path / "deep" / "run", CONFIG | {"rate": 0.1, "bad": math.nan})
    assert json.loads((run.path / "config.json").read_text()) == CONFIG | {"rate": 0.1, "bad": None}
    (tmp_path / "empty").mkdir()
    Run.create(tmp_path / "empty", CONFIG)


def test_what_is_there_is_refused_and_untouched(tmp_path):
    (tmp_path / "file").write_text("x")
    for name, file, text in (
        ("full", "letter", "x"), ("foreign", "config.json", '{"name": "another program"}'),
        ("five", "config.json", "5")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    Run.create(tmp_path / "run", CONFIG).save_checkpoint({})
    before = snapshot(tmp_path)
    for name, overwrite, words in (
        ("file", True, "must be a directory, got the file"),
        ("full", True, "which holds letter"),
        ("foreign", True, "which holds config.json"),
        ("five", True, "which holds config.json"),
        ("run", False,
         "which holds a run: continue it with --resume .*run, or replace it with --overwrite")):
        with pytest.raises(ValueError, match=words): Run.create(tmp_path / name, CONFIG, overwrite)
        with pytest.raises(ValueError, match=words): Run.check(tmp_path / name, overwrite)
    Run.check(tmp_path / "run", overwrite=True)
    Run.check(tmp_path / "newer")
    assert snapshot(tmp_path) == before and not (tmp_path / "newer").exists()


def test_overwriting_deletes_the_run_and_nothing_else(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    run.log(row(1), 1)
    run.save_checkpoint({"a": 1})
    run.save_figure(lambda f: f.subplots())
    run.finish({})
    for name in ("policy", "reward_model"):
        (run.path / name).mkdir()
        (run.path / name / "config.json").write_text("of the last time")
    for name in ("seeds.csv", "compare.csv", "bench.csv"):
        (run.path / name).write_text("of the last time")
    (run.path / "notes.txt").write_text("mine")
    Run.create(run.path, CONFIG | {"seed": 1}, overwrite=True)
    assert sorted(p.name for p in run.path.iterdir()) == [".lock", "config.json", "notes.txt"]
    assert json.loads((run.path / "config.json").read_text())["seed"] == 1


def test_killed_while_it_overwrites_it_is_still_a_run(tmp_path, monkeypatch):
    "After each number of deletions, what is left can be overwritten."
    class Killed(BaseException): pass
    for lives in range(20):
        run = Run.create(tmp_path / str(lives), CONFIG)
        run.save_checkpoint({})
        (run.path / "notes.txt").write_text("mine")
        left, unlink = [lives], runs.Path.unlink

        def mortal(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0: raise Killed
            return unlink(*args, **kwargs)
        with monkeypatch.context() as m:
            m.setattr(runs.Path, "unlink", mortal)
            try: Run.create(run.path, CONFIG, overwrite=True)
            except Killed: pass
        if (run.path / "config.json").exists(): Run.create(run.path, CONFIG, overwrite=True)
        else: assert snapshot(run.path) == {".lock": b"", "notes.txt": b"mine"}


def test_metrics_are_written_as_they_come(tmp_path):
    run = Run.create(tmp_path, CONFIG)
    for i in (1, 2, 3):
        run.log(row(i), i)
        assert len((tmp_path / "metrics.csv").read_text().splitlines()) == i + 1
    assert ((tmp_path / "metrics.csv").read_text()
            == "iteration,loss,return\n1,1,\n2,0.5,20\n3,0.333333333,30\n")
    assert run.rows == [row(i) for i in (1, 2, 3)]


def test_nan_is_an_empty_cell_and_null(tmp_path):
    assert runs._cell(math.nan) == runs._cell(None) == ""
    Run.create(tmp_path, CONFIG).finish({"a": math.nan, "b": {"c": math.inf}, "d": True, "e": None})
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "a": None, "b": {"c": None}, "d": True, "e": None}


def scalars(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(path))
    events.Reload()
    assert '"task"' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("end",
                         [lambda lines: lines, lambda lines: [*lines[:-1], lines[-1][:3]],
                          lambda lines: [*lines[:2], lines[2][:-1]], lambda lines: []])
def test_killed_after_the_checkpoint_the_run_continues_from_it(tmp_path, end):
    "Whatever the end of metrics.csv is."
    straight, killed = (Run.create(tmp_path / "straight", CONFIG),
                        Run.create(tmp_path / "killed", CONFIG))
    for i in range(1, 6): straight.log(row(i), i)
    straight.finish({})
    for i in range(1, 5):
        killed.log(row(i), i)
        if i == 2:
            killed.save_checkpoint({"i": i, "w": torch.arange(3), "names": ["a"], "none": None})
    killed.trackers[0].finish()                        # rows 3 and 4 are lost with the power
    metrics = killed.path / "metrics.csv"
    metrics.write_text("".join(end(metrics.read_text().splitlines(True))))
    time.sleep(1.1)  # TensorBoard orders event files by the second in their names
    again = Run.resume(tmp_path / "killed")
    assert again.config == CONFIG
    assert len(again.rows) == 2
    assert torch.equal(again.checkpoint.pop("w"), torch.arange(3))
    assert again.checkpoint == {"i": 2, "names": ["a"], "none": None}
    for i in range(3, 6):
        again.log(row(i), i)
        assert metrics.read_text().count("\n") == i + 1
    again.finish({})
    assert (tmp_path / "killed" / "metrics.csv").read_bytes() == (
        tmp_path / "straight" / "metrics.csv").read_bytes()
    assert scalars(tmp_path / "killed") == scalars(tmp_path / "straight")
    assert scalars(tmp_path / "killed")["return"] == [(i, 10.0 * i) for i in (2, 3, 4, 5)]


def test_a_run_interrupted_before_its_first_row_can_be_resumed(tmp_path):
    Run.create(tmp_path, CONFIG).save_checkpoint({"i": 0})
    run = Run.resume(tmp_path)
    run.log(row(1), 1)
    assert len(run.rows) == 1


def test_another_tracker(tmp_path, monkeypatch):
    from accelerate import tracking
    seen = []

    class Tracker:
        def __init__(self, project): seen.append(project)
        def start(self): seen.append("start")
        def store_init_configuration(self, config): seen.append(config)
        def log(self, values, step): seen.append((values, step))
        def finish(self): seen.append("finish")
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Tracker)
    monkeypatch.setattr(runs, "find_spec", lambda name: name)
    run = Run.create(tmp_path, CONFIG | {"track": "wandb"})
    run.log(row(1), 5)
    run.log(row(2), 6, [{"prompt": "a", "score": 1 / 3}, {"prompt": "b", "score": None}])
    run.finish({})
    table = "| prompt | score |\n| --- | --- |\n| a | 0.333333333 |\n| b |  |"
    assert seen == [
        "rlhf_notes", "start", CONFIG | {"track": "wandb"}, ({"iteration": 1, "loss": 1.0}, 5),
        (row(2) | {"samples": table}, 6), "finish"]
    assert not list(tmp_path.glob("events*"))


def test_a_tracker_that_is_missing_is_refused(tmp_path, monkeypatch):
    "Where a run begins and where it goes on."
    config = CONFIG | {"track": "wandb"}
    monkeypatch.setattr(runs, "find_spec", lambda name: name)
    Run.create(tmp_path / "run", config).save_checkpoint({})
    monkeypatch.setattr(runs, "find_spec", lambda name: None)
    for begin in (
        lambda: Run.create(tmp_path / "new", config), lambda: Run.resume(tmp_path / "run")):
        with pytest.raises(
            ValueError,
            match=r"^track must be a tracker that is installed, got wandb \(pip install "
            r"rlhf_notes\[track\] brings it\)$"):
            begin()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_samples_are_a_table_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    run = Run.create(tmp_path, CONFIG)
    run.log(row(1), 1, [{"prompt": "about", "score": 2}])
    run.finish({})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    event, = events.Tensors("samples/text_summary")
    assert event.step == 1
    assert event.tensor_proto.string_val[0] == b"| prompt | score |\n| --- | --- |\n| about | 2 |"


def test_a_damaged_checkpoint_is_refused(tmp_path):
    "A flipped bit or zeroed bytes, wherever they are, change nothing or are noticed."
    run = Run.create(tmp_path, CONFIG)
    run.log(row(2), 2)
    random = torch.Generator().manual_seed(0)
    run.save_checkpoint({"w": torch.randn(99, generator=random).tolist(), "n": 3, "s": "adam",
                         "deep": [{"v": torch.randn(200, generator=random)}]})
    file = tmp_path / "checkpoint.pt"
    good = file.read_bytes()

    def loaded():
        try: again = Run.resume(tmp_path)
        except ValueError as e: return "resume must be a run directory" in str(e) or str(e)
        return again.rows, {**again.checkpoint, "deep": again.checkpoint["deep"][0]["v"].tolist()}
    expected = loaded()
    flips = [good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1:]
             for i in range(0, len(good), 11)]
    gaps = [good[:i] + bytes(64) + good[i + 64:] for i in range(0, len(good) - 64, 64)]
    found = []
    for bad in flips + gaps + [good[:len(good) // 2], b""]:
        file.write_bytes(bad)
        found.append(loaded())
    assert expected[0] == [row(2)] and all(x in (True, expected) for x in found)
    assert found.count(True) > 0.75 * len(found)  # the rest is padding


def test_a_checkpoint_of_plain_torch_is_read(tmp_path):
    "As earlier versions wrote it."
    run = Run.create(tmp_path, CONFIG)
    torch.save({"metrics": [row(2)], "state": {"n": 3}}, tmp_path / "checkpoint.pt")
    again = Run.resume(run.path)
    assert (again.rows, again.checkpoint) == ([row(2)], {"n": 3})


def test_what_a_kill_left_is_cleared_when_the_run_goes_on(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    run.save_checkpoint({})
    left, mine = run.path / f".checkpoint.pt.{'0a' * 8}.tmp", run.path / ".notes.tmp"
    for begin in (lambda: Run.resume(run.path).lock(),
                  lambda: Run.create(run.path, CONFIG, overwrite=True)):
        left.write_text("half")
        mine.write_text("mine")
        begin()
        assert not left.exists() and mine.exists()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / f".config.json.{'0a' * 8}.tmp").write_text("half")
    assert {p.name for p in Run.create(tmp_path / "new", CONFIG).path.iterdir()} == {
        ".lock", "config.json"}


def test_a_run_stays_where_it_began(tmp_path, monkeypatch):
    "Also if an environment changes the directory."
    monkeypatch.chdir(tmp_path)
    run = Run.create("run", CONFIG)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run.log(row(1), 1)
    run.save_checkpoint({})
    run.finish({})
    assert not [*(tmp_path / "elsewhere").iterdir()]
    assert (tmp_path / "run" / "summary.json").exists() and Run.resume("../run").rows == [row(1)]


@pytest.mark.parametrize("spoil", [
    lambda p: (p / "checkpoint.pt").unlink(), lambda p: (p / "config.json").unlink(),
    lambda p: (p / "checkpoint.pt").write_bytes(b"junk"),
    lambda p: (p / "config.json").write_text("{"),
    lambda p: torch.save({"metrics": [], "state": os.system}, p / "checkpoint.pt")])
def test_what_cannot_be_resumed_is_refused(tmp_path, spoil):
    run = Run.create(tmp_path, CONFIG)
    run.log(row(1), 1)
    run.save_checkpoint({"i": 1})
    run.finish({})
    spoil(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(
        ValueError, match=f"resume must be a run directory with a checkpoint, got {tmp_path}: "):
        Run.resume(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_figure_is_drawn_without_touching_the_settings(tmp_path):
    before = dict(matplotlib.rcParams)
    Run.create(tmp_path, CONFIG).save_figure(lambda f: f.subplots().plot([1, 2]))
    first = (tmp_path / "curve.svg").read_bytes()
    Run(tmp_path, CONFIG).save_figure(lambda f: f.subplots().plot([1, 2]))
    assert b"<svg" in first
    assert first == (tmp_path / "curve.svg").read_bytes()
    assert dict(matplotlib.rcParams) == before


def test_a_path_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError,
        match="^out must be a directory that can be written to, got .*below: Not a directory"):
        Run.create(tmp_path / "file" / "below", CONFIG)


def test_a_path_that_is_no_utf8_is_refused():
    "TensorBoard cannot use it."
    with pytest.raises(
        ValueError, match="^out must be a directory that can be written to, got .*can't encode"):
        Run.check("\udcff")


def test_while_a_training_logs_the_main_thread_alone_tells_of_a_full_disk(tmp_path):
    "From before the first events on; a run that nobody finishes leaves the hook alone."
    before, run = threading.excepthook, Run.create(tmp_path / "run", CONFIG)
    with run.training(), run.training():
        assert threading.excepthook is not before
        run.log(row(1), 1)
    assert threading.excepthook is before and run.trackers
    run.log(row(2), 2)
    assert threading.excepthook is before
    run.finish({})


def test_a_training_that_fails_leaves_its_run_closed(tmp_path):
    before, run = threading.excepthook, Run.create(tmp_path / "run", CONFIG)
    with pytest.raises(KeyboardInterrupt) as error, run.training():
        run.log(row(1), 1)
        raise KeyboardInterrupt
    assert threading.excepthook is before and error.value
    assert run.trackers is None and not run.held.is_locked


def test_the_last_of_overlapping_runs_puts_the_hook_of_threads_back():
    "In the order in which they began, too."
    before, first, second = threading.excepthook, runs.told_once(), runs.told_once()
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert threading.excepthook is not before
    second.__exit__(None, None, None)
    assert threading.excepthook is before


def test_a_hook_of_threads_that_is_set_during_a_training_stays(monkeypatch):
    "One that calls the hook it found, too: in the next training nothing goes round in circles."
    seen = []
    monkeypatch.setattr(threading, "excepthook", seen.append)

    def training():
        found = threading.excepthook
        with runs.told_once():
            inner = threading.excepthook
            threading.excepthook = hook = lambda args: inner(args)
        return found, hook
    found, hook = training()
    assert threading.excepthook is hook is not found
    with runs.told_once():
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    assert threading.excepthook is hook and [x.exc_type for x in seen] == [ZeroDivisionError]
