import math
import os
import signal
import sys
import threading

import pytest

from rlhf_notes.training.signals import Lenient, check_finite, diverged, progress_bar, stop_on_interrupt


@pytest.mark.parametrize("number", [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)])
def test_first_interrupt_asks_second_stops(number):
    before = signal.getsignal(number)
    with stop_on_interrupt() as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt): signal.raise_signal(number)
    assert signal.getsignal(number) is before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_nohup_is_respected(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_interrupt() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally: signal.signal(signal.SIGHUP, before)


def test_interrupts_are_left_alone_in_other_threads():
    seen = []

    def work():
        with stop_on_interrupt() as stop: seen.append(stop.is_set())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_divergence_says_where_and_what_is_left():
    error = diverged("iteration 3", ValueError("loss is nan"))
    assert type(error) is FloatingPointError
    assert str(error) == "iteration 3: loss is nan; the last checkpoint, if there is one, is from before"


class Screen:
    "A stderr that remembers."
    def __init__(self, tty): self.text, self.tty = "", tty
    def write(self, s): self.text += s
    def flush(self): pass
    def isatty(self): return self.tty


@pytest.mark.parametrize("tty", [True, False])
def test_progress_is_shown_on_a_terminal_alone(monkeypatch, tty):
    monkeypatch.setattr(sys, "stderr", Screen(tty))
    with progress_bar(10, 2, "toy") as bar:
        bar.update(8)
        bar.set_postfix({"kl": 0.5})
    if tty: assert "toy: 100%" in sys.stderr.text and "kl=0.5" in sys.stderr.text
    else: assert sys.stderr.text == ""


def test_a_closed_stderr_shows_no_progress(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar(10) as bar: bar.update(8)


def test_output_that_cannot_be_written_is_lost_and_no_more():
    lenient = Lenient(None)
    print("lost", file=lenient)
    assert lenient.error is None
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe:
        lenient = Lenient(pipe)
        print("read", file=lenient)
        assert os.read(reader, 10) == b"read\n" and lenient.error is None
        os.close(reader)
        for _ in range(2): print("lost", file=lenient, flush=True)
        assert isinstance(lenient.error, BrokenPipeError) and not lenient.isatty()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_number_of_a_log_is_nan_or_infinite(bad):
    with pytest.raises(FloatingPointError, match=f"^stage sft, iteration 5: loss is {bad}; the last checkpoint"):
        check_finite("stage sft, iteration 5", dict(a=1.0, loss=bad, none=None, n=3))
    check_finite("stage sft", dict(a=1.0, b=None, n=3))
