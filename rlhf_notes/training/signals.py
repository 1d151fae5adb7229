"""Ctrl-C, and what counts as Ctrl-C.

The first one only sets a flag, which the loop reads at the end of an iteration; a second one
stops at once. SIGTERM, from a batch queue or `docker stop`, and SIGHUP, from a closed terminal,
count as Ctrl-C; under `nohup` SIGHUP stays ignored.
"""

__all__ = ['stop_on_interrupt', 'end_later', 'SIGNALS', 'handle_signals', 'note']

import signal
import sys
import threading
from contextlib import ExitStack, contextmanager


@contextmanager
def stop_on_interrupt(say=None):  # yields a threading.Event
    """Let the first signal only set the event that this yields, and call say(); a second one
    interrupts. SIGTERM and SIGHUP are sent again at the end."""
    stop = threading.Event()

    def handler(signum, frame):
        if came: raise KeyboardInterrupt
        came.append(signum)
        stop.set()
        if say is not None:
            say()
    with end_later() as came, handle_signals(handler):
        yield stop


_ENTERED = threading.local()  # each thread's `end_later`, a list of signals for each


@contextmanager
def end_later():  # yields the list of signals to be sent again at its end
    """A SIGTERM that stopped a training inside ends the program after this, when all is written.
    After a Ctrl-C the program goes on; whoever sent another signal wants it to end."""
    came, outer = [], vars(_ENTERED).setdefault("outer", [])
    outer.append(came)
    try:
        yield came
    finally:
        outer[:] = [signals for signals in outer if signals is not came]
        for signum in came:
            if outer:
                outer[-1].append(signum)
            elif signum != signal.SIGINT:
                signal.raise_signal(signum)


SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")
           if hasattr(signal, name)]


@contextmanager
def handle_signals(handler):
    "Handle Ctrl-C, SIGTERM and SIGHUP by handler(signum, frame); under nohup SIGHUP stays ignored."
    can = threading.current_thread() is threading.main_thread()  # no other handles signals
    with ExitStack() as restore:
        for s in SIGNALS if can else ():
            before = signal.getsignal(s)
            if s == signal.SIGINT or before is not signal.SIG_IGN:
                restore.callback(signal.signal, s, before or signal.SIG_DFL)
                signal.signal(s, handler)
        yield


def note(text: str):
    "Write a line to stderr, as a signal handler may: what cannot be written is lost."
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, RuntimeError, ValueError, AttributeError):  # full, in use, closed, None
        pass
