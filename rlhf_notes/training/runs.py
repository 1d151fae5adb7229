"""The directory of a run: it holds everything, survives Ctrl-C and can be continued.

| file | holds |
|---|---|
| `config.json` | every option, and the versions of what computed it |
| `metrics.csv` | one row for each iteration; the same seed writes the same bytes |
| `episodes.csv` | of control: the return and length of each episode, and the steps so far |
| `events.out.tfevents.*` | the same numbers, and samples, for TensorBoard |
| `checkpoint.pt` | all that is needed to continue |
| `curve.svg` | the learning curve |
| `responses.json` | of language models: responses token by token, for `rlhf-notes view` |
| `summary.json` | the result, with the seconds it took |

**A file is whole or absent.** Each file but the growing `metrics.csv` is written under another
name, flushed to disk, and moved into place in one indivisible step. A checkpoint with a flipped
bit is refused: `load_checked` compares the checksums that PyTorch writes but never reads.

**Nothing is lost silently.** A directory that holds a run is refused unless it is to be
overwritten; then the files of the run are deleted, and no others. A directory with anybody else's
files is always refused.

**One process at a time.** A lock, in `.lock`, refuses a second process; the operating system
releases it when the first one ends.

**A run goes on where it stopped**: `rlhf-notes cartpole --resume DIR`, and the same for the other
tasks. A checkpoint holds the rows of `metrics.csv`, and a resumed run begins by writing them. Rows
written after the checkpoint are dropped, in TensorBoard too.

`--track` adds TensorBoard (the default), Weights & Biases or Trackio, by way of Accelerate.
"""

__all__ = ['FILES', 'write_atomically', 'disk_errors', 'save_checked', 'load_checked', 'SUMS',
           'write_sums', 'check_sums', 'write_table', 'read_table', 'Run', 'HOOK', 'told_once']

import csv
import io
import json
import math
import os
import re
import secrets
import shutil
import threading
import warnings
import zipfile
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from .fit import Setting
from .options import TRACKERS, read_options


def write_atomically(path: Path, write):
    """Write text, or what write(file) puts into a binary file, so that it is there whole or not at
    all, on the disk too."""
    path = Path(path)
    tmp = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with disk_errors(path):
            with open(tmp, "xb") as file:
                file.write(write.encode()) if isinstance(write, str) else write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(tmp, path)
        _sync_directory(path.parent)
    finally:
        tmp.unlink(missing_ok=True)


def _sync_directory(path):
    if os.name != "posix": return
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def disk_errors(path: Path):
    "Raise what the disk refuses as an OSError with the path, which libraries leave out or hide."
    try:
        yield
    except Exception as e:
        hidden = e.__context__ if isinstance(e, RuntimeError) else None  # by torch.save
        told = re.search(r"os error (\d+)", str(e))  # by safetensors
        number = getattr(e, "errno", None) or getattr(hidden, "errno", None)
        number = int(told[1]) if told else number
        if not number: raise
        error = OSError(number, os.strerror(number), str(path))
        error.is_ours = True  # and not an environment's or a reward's
        raise error from e


def save_checked(path: Path, content):
    """Write tensors, numbers, strings, and lists and dicts of those for `load_checked`, whole or
    not at all."""
    write_atomically(path, lambda file: torch.save(content, file))


def load_checked(path: Path):
    """Read a file of `save_checked` to the CPU; an error of any kind if it is no such file, or if
    its content has changed."""
    with open(path, "rb") as opened:
        try:
            with zipfile.ZipFile(opened) as file:
                changed = file.testzip()
        except OSError as e:  # of places that are none, not of the disk
            raise ValueError(f"{Path(path).name} is damaged: {e}") from e
    if changed: raise ValueError(f"{Path(path).name} is damaged, in {changed}")
    return torch.load(path, weights_only=True, map_location="cpu")


SUMS = "checksums.json"


def write_sums(folder: Path, without: tuple=()):
    "Write the checksums of a folder's files but those `without` beside them, for `check_sums`."
    files = sorted(p for p in Path(folder).rglob("*") if p.is_file() and p.name not in without)
    sums = {p.relative_to(folder).as_posix(): _sum(p) for p in files}
    write_atomically(Path(folder) / SUMS, json.dumps(sums, indent=1) + "\n")


def check_sums(folder, name: str='path'):
    """ValueError, about the argument `name`, unless the files are those whose checksums stand
    beside them; without checksums all is well."""
    folder = Path(folder)
    if not (folder / SUMS).is_file(): return
    try:
        sums = read_options(folder / SUMS)
    except ValueError:
        sums = {SUMS: None}
    for file, expected in sums.items():
        inside = (folder / file).is_file() and ".." not in file
        if inside and _sum(folder / file) == expected: continue
        raise ValueError(f"{name} must be a directory as it was saved, got {folder} with another "
                         f"{file}: a save that was cut off, damage, or a change by hand (then "
                         f"delete {SUMS} there)")


def _sum(path):
    total = 0
    with open(path, "rb") as file:
        while part := file.read(2**20):
            total = zlib.crc32(part, total)
    return f"{total:08x}"


def write_table(path: Path, rows: list) -> list:  # the columns, as they first came
    "Write a CSV file of dicts, whole or not at all; what a row does not have stays empty."
    columns = {name: name for row in rows for name in row}
    lines = (map(row.get, columns) for row in [columns, *rows]) if rows else ()
    write_atomically(path, "".join(map(_line, lines)))
    return [*columns]


def read_table(path: Path) -> list:
    "The rows of a CSV file: dicts, column -> text."
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _line(cells):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(map(_cell, cells))
    return text.getvalue()


def _cell(value):
    if value is None or value != value: return ""
    return f"{value:.9g}" if isinstance(value, float) else value  # nine digits tell float32 apart


FILES = ("checkpoint.pt", "metrics.csv", "curve.svg", "summary.json", "ppo.pt", "seeds.csv",
         "compare.csv", "sft.csv", "reward_model.csv", "samples.csv", "bench.csv",
         "responses.json", "view.html", "episodes.csv", "config.json")


@dataclass
class Run:
    "A run directory: `Run.create` begins one, `Run.resume` continues an interrupted one."
    path: Path # The directory
    config: dict # The content of config.json
    rows: list = field(default_factory=list, repr=False) # Of metrics.csv
    checkpoint: dict | None = None # The state to continue from; None in a new run
    trackers: list | None = field(default=None, repr=False) # Made with the first row
    columns: list = field(default_factory=list, repr=False) # Of metrics.csv
    held: object = field(default=None, repr=False) # The lock
    begun: bool = field(default=False, repr=False) # True once episodes.csv has been written to

    def __post_init__(self):
        self.path = Path(self.path).absolute()  # an environment may change the directory

    @classmethod
    def create(cls, path: Path, config: dict, overwrite: bool=False) -> 'Run':
        """Begin a run directory for a config with a "task", and perhaps a "track"; ValueError if
        something else is there."""
        cls.check(path, overwrite)
        _check_tracker(config)
        run = cls(path, config)
        with _usable(path):
            run.path.mkdir(parents=True, exist_ok=True)
            run.lock()
            for name in ("policy", "reward_model"):
                shutil.rmtree(run.path / name, ignore_errors=True)
            events = run.path.glob("events.out.tfevents.*")
            for file in (*events, *map(run.path.joinpath, FILES)):
                file.unlink(missing_ok=True)  # config.json goes last: until then this is a run
            run._write_json("config.json", config)
        return run

    @staticmethod
    def check(path: Path, overwrite: bool=False):
        "Raise the ValueError with which `create` would refuse."
        path = Path(path)
        with _usable(path):
            str(path).encode()  # fails for bytes that are no UTF-8
            if path.exists() and not path.is_dir():
                raise ValueError(f"out must be a directory, got the file {path}")
            there = {p.name for p in path.iterdir()} if path.exists() else set()
            there -= {".lock", *(p.name for p in _unfinished(path))}
        if there and not _is_run(path):
            raise ValueError(f"out must be a new or empty directory or an earlier run, "
                             f"got {path}, which holds {min(there)}")
        if _is_run(path) and not overwrite:
            raise ValueError(f"out must be a new directory, got {path}, which holds a run: "
                             f"continue it with --resume {path}, or replace it with --overwrite")

    @classmethod
    def resume(cls, path: Path) -> 'Run':
        "Open an interrupted run at its last checkpoint; ValueError if there is none."
        path = Path(path)
        try:
            config = read_options(path / "config.json")
            saved = load_checked(path / "checkpoint.pt")
            run = cls(path, config, saved["metrics"], saved["state"])
            run.began_with = saved.get("config", config)  # earlier versions did not keep it
        except Exception as e:
            raise ValueError("resume must be a run directory with a checkpoint, got "
                             f"{path}: {e}") from e
        _check_tracker(config)
        return run

    def check_config(self):
        "ValueError if config.json is not that of the beginning: a damaged file has other options."
        began, file = self.began_with, self.path / "config.json"
        for name in began | self.config:
            if name not in began:
                raise ValueError(f"{name} must be left out of {file}, as when the run began, got "
                                 f"{self.config[name]!r}")
            if (found := self.config.get(name)) != began[name] or name not in self.config:
                raise ValueError(f"{name} must be {began[name]!r} in {file}, as when the run "
                                 f"began, got {found!r}")

    def lock(self):
        "Keep other processes out and clear up; ValueError if one is training here."
        self.held = FileLock(self.path / ".lock", is_singleton=True)
        try:
            with disk_errors(self.path):
                self.held.acquire(timeout=1)
        except Timeout:
            raise ValueError(f"{self.path} must be free, but another process is training "
                             "there") from None
        for file in _unfinished(self.path):
            file.unlink()

    def log(self, row: dict, step: int, samples: list=()):
        """Append a row, column -> number or None, to metrics.csv and, with samples, to the tracker,
        which draws it at `step`."""
        path, values = self.path / "metrics.csv", {k: x for k, x in row.items() if x is not None}
        if samples:
            values["samples"] = _as_text(samples)
        self.rows.append(row)
        if self.trackers is None:
            self.lock()
            self.columns = []
            with disk_errors(self.path):
                self.trackers = [_make_tracker(self.path, step, self.config, name)
                                 for name in _tracks(self.config)]
        if row.keys() <= set(self.columns):
            with disk_errors(path), open(path, "a", newline="", encoding="utf-8") as f:
                f.write(_line(map(row.get, self.columns)))
        else:
            self.columns = write_table(path, self.rows)
        with disk_errors(self.path):
            for tracker in self.trackers:
                tracker.log(values, step=step)

    def log_episodes(self, episodes: list):  # (return, length) of those of the last row
        "Append to episodes.csv; a resumed run first drops what came after its checkpoint."
        path, *steps = self.path / "episodes.csv", *(row["steps"] for row in self.rows[-2:])
        if not self.begun:
            old = path.read_text(encoding="utf-8").splitlines()[1:] if path.exists() else []
            last = steps[0] if len(steps) > 1 else 0
            kept = [line for line in old if re.fullmatch(r"\d+,[^,]+,\d+", line)
                    and int(line.split(",")[0]) <= last]
            write_atomically(path, "\n".join(["steps,return,length", *kept, ""]))
            self.begun = True
        with disk_errors(path), open(path, "a", newline="", encoding="utf-8") as f:
            f.writelines(_line([steps[-1], *episode]) for episode in episodes)

    def save_checkpoint(self, state: dict):
        "Replace the checkpoint."
        config = json.loads(json.dumps(_finite(self.config)))  # as config.json has it
        saved = {"metrics": self.rows, "state": state, "config": config}
        save_checked(self.path / "checkpoint.pt", saved)

    def save_figure(self, draw, figsize: tuple=(7.2, 4.4)):
        """Draw curve.svg by draw(figure) in the style of the project, `figsize` in inches; warn if
        that fails. Needs no display."""
        try:
            import matplotlib  # which may find a backend that is not there
            from matplotlib.figure import Figure

            from rlhf_notes import viz
            with matplotlib.rc_context():
                matplotlib.rcdefaults()
                viz.style()
                figure = Figure(figsize=figsize)
                draw(figure)
                figure.savefig(self.path / "curve.svg", metadata={"Date": None})
        except Exception as e:
            warnings.warn(f"could not draw curve.svg: {e}", stacklevel=2)

    def finish(self, summary: dict):
        "Write the summary and close the run."
        if self.rows:
            write_table(self.path / "metrics.csv", self.rows)
        self._write_json("summary.json", summary)
        self.close()

    def close(self):
        "Close the trackers and let go of the directory."
        trackers, self.trackers = self.trackers, None
        try:
            with disk_errors(self.path):
                for tracker in trackers or ():
                    tracker.finish()
        finally:
            if self.held is not None:
                self.held.release(force=True)

    @contextmanager
    def training(self):
        "Inside, the main thread alone tells of a full disk; a failure leaves the run closed."
        with told_once():
            try:
                yield
            except BaseException:
                with suppress(Exception):  # which may be as broken
                    self.close()
                raise

    def _write_json(self, name, values):
        write_atomically(self.path / name, json.dumps(_finite(values), indent=1) + "\n")


@contextmanager
def _usable(path):
    try:
        yield
    except (OSError, UnicodeError) as e:
        why = getattr(e, "strerror", e)
        raise ValueError(f"out must be a directory that can be written to, got {path}: "
                         f"{why}") from e


def _unfinished(path):
    "The files that a killed `write_atomically` left."
    return [p for p in path.glob(".*.tmp") if re.fullmatch(r"\..+\.[0-9a-f]{16}\.tmp", p.name)]


def _is_run(path):
    try:
        return "task" in read_options(path / "config.json")
    except (OSError, ValueError, TypeError):
        return False


def _finite(x):
    if isinstance(x, dict): return {k: _finite(v) for k, v in x.items()}
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _check_tracker(config):
    "ValueError unless each tracker is one that we know, and installed; no other is looked up."
    for track in _tracks(config):
        if track not in TRACKERS:
            raise ValueError(f"track must be {', '.join(TRACKERS[:-1])} or {TRACKERS[-1]}, or a "
                             f"list of those, got {track!r}")
        if find_spec(track) is None:
            raise ValueError(f"track must be a tracker that is installed, got {track} (pip install "
                             "rlhf_notes[track] brings it)")


def _tracks(config):
    track = config.get("track", "tensorboard")
    return track if isinstance(track, (list, tuple)) else [track]


def _as_text(rows):
    "A table in Markdown."
    lines = rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)
    return "\n".join(f"| {' | '.join(str(_cell(x)) for x in line)} |" for line in lines)


HOOK = Setting(lambda: threading.excepthook, partial(setattr, threading, "excepthook"))


def told_once():
    "Leave a full disk to the main thread, where TensorBoard raises what its own thread met."
    before = threading.excepthook

    def hook(args):
        theirs = type(args.thread).__module__.startswith("tensorboard.")
        if not (theirs and issubclass(args.exc_type, OSError)):
            before(args)
    return HOOK.held(hook)


def _make_tracker(path, step, config, name):
    "One of Accelerate's trackers, with `log(values, step)` and `finish()`, before its first row."
    from accelerate import PartialState, tracking
    PartialState()  # trackers ask it which process they are in
    kind = tracking.LOGGER_TYPE_TO_CLASS[name]
    if name == "tensorboard":
        tracker = kind(path.name, logging_dir=path.parent, purge_step=step)
        tracker.start()
        tracker.log({"config": f"    {json.dumps(config, indent=4)}".replace("\n", "\n    ")})
        return tracker
    tracker = kind("rlhf_notes")
    tracker.start()
    tracker.store_init_configuration(config)
    return tracker
