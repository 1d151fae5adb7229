import signal
import sys
import threading

import pytest

from rlhf_notes.training.signals import diverged, progress_bar, stop_on_interrupt


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
