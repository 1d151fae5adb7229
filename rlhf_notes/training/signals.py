"""Ctrl-C, numbers that have become NaN, a progress bar, and output that nothing reads.

The first Ctrl-C only sets a flag, which the training loop reads at the end of an iteration; a
second one stops at once. SIGTERM, from a batch queue or `docker stop`, and SIGHUP, from a closed
terminal, count as Ctrl-C; under `nohup` SIGHUP stays ignored.

A NaN in the loss reaches all weights with the next step. So each training loop checks its numbers
before it saves: if one is NaN or infinite, it stops, says where, and leaves the last checkpoint.
"""

__all__ = ['SIGNALS', 'BAR', 'FIRST_LINE', 'stop_on_interrupt', 'end_later', 'handle_signals',
           'told_once', 'note', 'diverged', 'check_finite', 'progress_bar', 'Lenient']

import math
import os
import signal
import sys
import threading
from contextlib import contextmanager


@contextmanager
def stop_on_interrupt():  # yields a threading.Event; its `say()` is called by the first signal
    """Let the first signal only set the event that this yields; a second one interrupts.

    After a Ctrl-C the program goes on. SIGTERM and SIGHUP are sent again at the end: whoever sent
    them wants the program to end.
    """
    stop, came = threading.Event(), []
    stop.say = lambda: None

    def handler(signum, frame):
        if came: raise KeyboardInterrupt
        came.append(signum)
        stop.set()
        stop.say()

    try:
        with handle_signals(handler):
            yield stop
    finally:
        _send_again(came)


_WAITING = []  # for each `end_later` that is entered, the signals to be sent at its end


def _send_again(signals):
    "Send all but Ctrl-C again, now or at the end of the innermost `end_later`."
    for signum in signals:
        if signum == signal.SIGINT: continue
        if _WAITING:
            _WAITING[-1].append(signum)
        else:
            signal.raise_signal(signum)


@contextmanager
def end_later():
    "A SIGTERM that stopped a training inside ends the program after this, when all is written."
    _WAITING.append([])
    try:
        yield
    finally:
        _send_again(_WAITING.pop())


@contextmanager
def told_once():
    "Leave a full disk to the main thread, where TensorBoard raises what its own thread met."
    show = threading.excepthook

    def other(args):
        theirs = type(args.thread).__module__.startswith("tensorboard.")
        if not (theirs and issubclass(args.exc_type, OSError)):
            show(args)

    threading.excepthook = other
    try:
        yield
    finally:
        threading.excepthook = show


def note(text: str):
    "Write a line to stderr, as a signal handler may: what cannot be written is lost."
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, RuntimeError, ValueError, AttributeError):  # full, in use, closed, None
        pass


SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")
           if hasattr(signal, name)]


@contextmanager
def handle_signals(handler):
    "Handle Ctrl-C, SIGTERM and SIGHUP by handler(signum, frame); under nohup SIGHUP stays ignored."
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    before = {s: signal.getsignal(s) for s in SIGNALS}
    try:
        for s, old in before.items():
            if s == signal.SIGINT or old is not signal.SIG_IGN:
                signal.signal(s, handler)
        yield
    finally:
        for s, old in before.items():
            signal.signal(s, old or signal.SIG_DFL)


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


class Lenient:
    "A stream that goes on when it can no longer be written to; `error` tells why."
    def __init__(self, stream):
        self.stream, self.error = stream or open(os.devnull, "w"), None

    def write(self, text: str) -> int:  # the number of characters
        "Write at once, or never again."
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as e:
            self.error = e
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return len(text)

    def __getattr__(self, name): return getattr(self.stream, name)
