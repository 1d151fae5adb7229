"""The loop around every training: progress, hooks, threads and checkpoints.

An iteration belongs to its lesson (19 for control, 27 for language models). What surrounds it is
the same everywhere: show progress, log, save, and end cleanly at the first Ctrl-C. A hook is
called after each iteration with the trainer and its row of metrics; it may add columns, write,
draw, or end the training by returning False.

**NaN.** In the loss, it reaches all weights with the next step. So each training loop checks its
numbers before it saves: if one is NaN or infinite, it stops, says where, and leaves the last
checkpoint.

**Settings.** A training computes on one thread if the largest of its models is small: threads wait
for one another at the end of every operation. The number is a setting of the process, made once
for a training, by `learn`; a single `iterate()` computes with that of its caller. Trainings may
overlap: the first one saves what it finds, and the last one restores it, unless it has been
changed since. What a reward, an environment or a callback sets for all of PyTorch is put back
behind it. The precision is the training's own too: an autocast around it is off inside, and said.

The last policy is not always the best. An `Evaluator` is a hook: every so often it scores the
policy on what no training sees, and keeps a copy of the best, which `take_best` puts in place.
"""

__all__ = ['CHECKPOINT_EVERY', 'as_hooks', 'fit', 'Evaluator', 'step_size', 'check_schedules',
           'Stage', 'diverged', 'check_finite', 'BAR', 'FIRST_LINE', 'progress_bar', 'Setting',
           'THREADS', 'SMALL', 'few_threads', 'READ_AND_SET', 'settings_kept']

import inspect
import math
import os
import sys
import threading
import time
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from numbers import Real

import torch

from .signals import note, stop_on_interrupt


CHECKPOINT_EVERY = 10.0  # seconds


def as_hooks(*hooks):
    "Those that are not None; TypeError names a callback that is no function, or is not run."
    for hook in hooks:
        if inspect.iscoroutinefunction(hook) or inspect.isgeneratorfunction(hook):
            raise TypeError(f"callback must be neither async nor a generator, got {hook!r}")
        if not (hook is None or callable(hook)):
            raise TypeError(f"callback must be a function or None, got {hook!r}")
    return [hook for hook in hooks if hook is not None]


def ends(said):
    "True if what a hook returned is False, of Python, NumPy or PyTorch; 0 and None are not."
    kind = str(getattr(said, "dtype", type(said).__name__))
    return kind.endswith("bool") and not said


def fit(trainer, bar, size: int=1, shown: dict | None=None, hooks: list=(), save=None,
        stopped=threading.Event.is_set):
    """Iterate until nothing is left, a hook returns False, or Ctrl-C.

    The trainer has `left` and iterate() -> a row, column -> number. `size` is what an iteration is
    on the bar, beside which `shown` puts columns, name -> column. hook(trainer, row) comes after
    each iteration; save() writes a checkpoint now and then and at the end; stopped(event) is True
    once Ctrl-C was pressed.
    """
    saved, done, total = time.perf_counter(), bar.n // size, bar.total // size

    def say():
        note(f"stopping after {done} of {total} iterations; a second Ctrl-C stops at once")
    with (stop_on_interrupt(say) as stop, bar, _no_autocast(),
          torch.inference_mode(False)):  # or no_grad
        while trainer.left and not stopped(stop):
            done += 1
            row = trainer.iterate()
            values = {name: row[column] for name, column in (shown or {}).items()
                      if row.get(column) is not None}
            bar.set_postfix(values, refresh=False)
            bar.update(size)
            before = dict(row)
            with settings_kept():
                said = [hook(trainer, row) for hook in hooks]
            row.update(before | row)  # a hook may add columns, but take none away
            if any(map(ends, said)):
                stop.set()  # in each process
            if save is not None and time.perf_counter() - saved >= CHECKPOINT_EVERY:
                save()
                saved = time.perf_counter()
        if save is not None:
            save()


@contextmanager
def _no_autocast():
    "Inside, PyTorch's autocast is off; say so, where it was on."
    with settings_kept():
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            torch.set_autocast_enabled(kind, False)
            warnings.warn(f"autocast for {kind} is off in a training, which has a precision of its "
                          "own", stacklevel=6)
        yield


def diverged(where: str, why) -> FloatingPointError:
    "Return the error to raise, before anything is saved, when training gives NaN or infinity."
    left = "the last checkpoint, if there is one, is from before"
    return FloatingPointError(f"{where}: {why}; {left}")


def check_finite(where: str, row: dict):
    "FloatingPointError if a number of a log is NaN or infinite."
    bad = [f"{k} is {v}" for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
    if bad: raise diverged(where, ", ".join(bad))


BAR = "{l_bar}{bar}| {n_fmt} [{elapsed}<{remaining}{postfix}]"
FIRST_LINE = 5.0  # seconds


def progress_bar(total: int, initial: int=0, label: str='', delay: float=0.0):
    """Return a tqdm bar on stderr of `total` units, `initial` of them done, which a terminal shows
    after `delay` seconds; a line now and then where that is no terminal."""
    from tqdm import tqdm
    options = dict(total=total, initial=initial, desc=label, unit_scale=True)
    if sys.stderr is None: return tqdm(**options, disable=True)
    if sys.stderr.isatty():
        return tqdm(**options, bar_format=BAR, dynamic_ncols=True, mininterval=0.2, delay=delay)
    lines = _Lines(sys.stderr)
    lines.bar = tqdm(**options, bar_format=BAR.replace("{bar}|", ""), file=lines, miniters=1,
                     mininterval=FIRST_LINE, delay=FIRST_LINE)
    return lines.bar


class _Lines:
    "Writes each state of a bar on a line of its own, and has it wait a tenth longer."
    def __init__(self, stream):
        self.stream, self.flush = stream, stream.flush

    def write(self, text):
        if not text.startswith("\r") or not text.strip(): return
        self.stream.write(text.strip() + "\n")
        self.bar.mininterval *= 1.1


class Setting:
    """A setting of the process: the first to hold it saves it, the last to let go restores it, if
    nobody else has set it since."""

    def __init__(self, get, set, owner=lambda: None):
        """get() and set(value) are the setting; owner() tells whose it is: threading.get_ident if
        each thread has its own."""
        self.get, self.set, self.owner = get, set, owner
        self.holders, self.lock = [], threading.Lock()

    @contextmanager
    def held(self, value):
        "Inside, the setting has this value, the same for all who hold it at the same time."
        owner = self.owner()
        with self.lock:
            now = self.get()  # a thread's own from here on: PyTorch looks it up at the first use
            if not self.holders:
                self.before, self.values = now, set()
            self.holders.append(owner)
            self.values.add(value)
            self.set(value)
        try:
            yield
        finally:
            with self.lock:
                self.holders.remove(owner)
                if owner not in self.holders and self.get() in self.values:
                    self.set(self.before)


THREADS = Setting(torch.get_num_threads, torch.set_num_threads, threading.get_ident)
SMALL = 1_000_000  # weights; a model with fewer computes on one thread


def few_threads(*models: torch.nn.Module):
    "Inside, a training computes on one thread, if the largest of its models is small."
    largest = max((sum(p.numel() for p in m.parameters()) for m in models), default=SMALL)
    small = largest < SMALL and "OMP_NUM_THREADS" not in os.environ
    return THREADS.held(1) if small else nullcontext()


READ_AND_SET = [(getattr(torch, get), getattr(torch, put)) for get, put in (
    ("get_default_dtype", "set_default_dtype"), ("is_grad_enabled", "set_grad_enabled"),
    ("get_num_threads", "set_num_threads"),
    ("get_deterministic_debug_mode", "set_deterministic_debug_mode"),
    ("get_float32_matmul_precision", "set_float32_matmul_precision"))]
READ_AND_SET += [(partial(torch.is_autocast_enabled, kind),
                  partial(torch.set_autocast_enabled, kind)) for kind in ("cpu", "cuda")]
READ_AND_SET += [(torch.get_default_device, lambda device: torch.set_default_device(
    None if device.type == "cpu" else device))]


@contextmanager
def settings_kept():
    "Put back, at the end, the settings of PyTorch that users' code has changed inside."
    before = [(read, put, read()) for read, put in READ_AND_SET]
    try:
        yield
    finally:
        for read, put, x in before:
            if read() != x:
                put(x)


class Evaluator:
    "A hook that scores the policy now and then, and keeps the best."
    def __init__(self, evaluate, every: int, column: str='iteration', name: str='eval_score',
                 keep=None, put=None):
        """`evaluate` gives a number, the more the better, each `every` units of a column; `name` is
        its own column, None in between. keep() gives a copy of the policy, put(copy) makes it the
        policy; without them none is kept."""
        self.evaluate, self.every, self.column, self.name = evaluate, every, column, name
        self.keep, self.put, self.times, self.best = keep, put, 0, -math.inf
        self.kept = self.last = None

    def __call__(self, trainer, row):
        row[self.name], times = None, row[self.column] // self.every
        if times <= self.times and trainer.left: return
        self.times = times
        row[self.name] = score = self.evaluate()
        if self.keep is not None and score > self.best:
            self.best, self.kept = score, self.keep()
        if self.keep is not None and self.kept is None and not trainer.left:
            warnings.warn(f"no {self.name} was a number, so the last policy stays, not the best")

    def take_best(self):
        "Put the best policy in place, if one was kept; the last is remembered."
        if self.kept is None or self.last is not None: return
        self.last = self.keep()
        self.put(self.kept)

    def go_on(self):
        "Put the last policy back: its optimizer's moments are those of no other."
        if self.last is None: return
        self.put(self.last)
        self.last = None

    def state_dict(self) -> dict:  # for a checkpoint
        "Evaluations so far, the best score and its policy; the last policy where that stands."
        return dict(times=self.times, best=self.best, kept=self.kept, last=self.last)

    def load_state_dict(self, state: dict):  # from `state_dict`
        "Continue from a checkpoint."
        self.times, self.best, self.kept = state["times"], state["best"], state["kept"]
        self.last = state.get("last")


def step_size(name, schedule, left):
    "A step size by a user's schedule of the share that is left; ValueError if it is none."
    x = schedule(left)
    if isinstance(x, Real) and 0 < x < math.inf: return float(x)
    raise ValueError(f"{name} must be a function to numbers > 0, got {x!r}")


def check_schedules(options, **shaped_by):  # name of a step size -> options that shape it
    "ValueError if a step size is a function, which an option would have to shape besides."
    for name, others in shaped_by.items():
        for other in options.keys() & set(others) if callable(options.get(name)) else ():
            raise ValueError(f"{other} must be left out where {name} is a function, got "
                             f"{options[other]!r}")


class Stage:
    "A training that can be stopped and continued to the last bit."
    PARTS = () # what has a `state_dict` of its own
    steps = 0  # of the optimizer, where they are not the iterations

    def state_dict(self) -> dict:  # tensors, numbers, and lists and dicts of those
        "Everything the rest of the training depends on."
        state = {name: getattr(self, name).state_dict() for name in self.PARTS}
        return state | dict(iteration=self.iteration, steps=self.steps)

    def load_state_dict(self, state: dict):  # from `state_dict` of the same training
        "Continue from a checkpoint."
        for name in self.PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.iteration, self.steps = state["iteration"], state["steps"]
