import ast
import math
import os
import signal
import sys
import threading

import processes
import pytest
from tqdm import tqdm

from rlhf_notes.cli import Lenient
from rlhf_notes.training.fit import BAR, check_finite, diverged
from rlhf_notes.training.runs import told_once
from rlhf_notes.training.signals import end_later, note, stop_on_interrupt

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")
           if hasattr(signal, name)]


@pytest.fixture
def heard():
    "The signals that come through, whoever ignores them (nohup does); a list."
    found, before = [], {}
    for number in SIGNALS:
        before[number] = signal.signal(number, lambda signum, frame: found.append(signum))
    yield found
    for number, old in before.items(): signal.signal(number, old)


@pytest.mark.parametrize("number", SIGNALS)
def test_first_interrupt_asks_second_stops(number, heard):
    before, said = signal.getsignal(number), []
    with stop_on_interrupt(lambda: said.append(number)) as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.is_set() and said == [number]
        with pytest.raises(KeyboardInterrupt): signal.raise_signal(number)
    assert signal.getsignal(number) is before and said == [number]


@pytest.mark.parametrize("number", SIGNALS)
def test_who_wants_the_program_to_end_is_heard_after_the_training(number, heard):
    again = [] if number == signal.SIGINT else [number]
    with stop_on_interrupt(): signal.raise_signal(number)
    assert heard == again
    with end_later():
        with end_later():
            with stop_on_interrupt():
                signal.raise_signal(number)
                assert heard == again
            heard.append("the last files are written")
        heard.append("and reported")
    assert heard == [*again, "the last files are written", "and reported", *again]
    heard.clear()
    with pytest.raises(ZeroDivisionError), stop_on_interrupt():  # not lost with an error
        signal.raise_signal(number)
        1 / 0
    assert heard == again
    with stop_on_interrupt() as stop: stop.set()  # by a callback
    assert heard == again


@pytest.mark.parametrize("first", ["the thread", "the main one"])
def test_a_training_in_a_thread_delays_no_signal_of_the_main_one(first, heard):
    began, done = threading.Event(), threading.Event()

    def train():
        with end_later():
            began.set()
            done.wait(60)
    thread = threading.Thread(target=train)
    def enter():
        thread.start()
        began.wait(60)
    if first == "the thread":
        enter()
    with stop_on_interrupt():
        if first != "the thread":
            enter()
        signal.raise_signal(signal.SIGTERM)
    told = [*heard]
    done.set()
    thread.join()
    assert told == heard == [signal.SIGTERM]


def test_a_stop_by_a_callback_makes_no_signal_the_second(heard):
    with stop_on_interrupt() as stop:
        stop.set()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt): signal.raise_signal(signal.SIGINT)


def test_a_note_that_cannot_be_written_is_lost(monkeypatch, capsys):
    note("one line")
    assert capsys.readouterr().err == "one line\n"
    class Broken:
        def write(self, text): raise self.error
        def flush(self): pass
    for error in (BrokenPipeError(), RuntimeError("reentrant call"), ValueError("closed file")):
        stream = Broken()
        stream.error = error
        monkeypatch.setattr(sys, "stderr", stream)
        note("one line")
    monkeypatch.setattr(sys, "stderr", None)
    note("one line")


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
    assert str(
        error) == "iteration 3: loss is nan; the last checkpoint, if there is one, is from before"


SCRIPT = """
import sys, time, tqdm
from functools import partial
from rlhf_notes.training import fit
tqdm.tqdm = partial(tqdm.tqdm, disable=False)  # as without TQDM_DISABLE
class Screen:
    text, encoding = "", "utf-8"
    def write(self, s): self.text += s
    def flush(self): pass
    def isatty(self): return {tty}
screen = sys.stderr = {screen}
fit.FIRST_LINE = {first}
with fit.progress_bar(50, 2, "toy") as bar:
    for i in range(48):
        bar.set_postfix(dict(kl=0.5), refresh=False)
        bar.update()
        time.sleep(0.01)
print(repr(screen and screen.text))
"""


def progress(tty=False, screen="Screen()", first=0.05):
    "The text on stderr, from a process of its own."
    done = processes.run(SCRIPT.format(tty=tty, screen=screen, first=first))
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def test_progress_is_a_bar_on_a_terminal():
    text = progress(tty=True)
    assert "toy:   4%|" in text and "toy: 100%|█" in text and "kl=0.5" in text and "\r" in text


def test_progress_is_a_line_now_and_then_elsewhere():
    "In a log and in a notebook, where nothing is rewritten."
    lines = progress().splitlines()
    assert 3 <= len(lines) <= 10 and lines[0].startswith("toy: ") and "kl=0.5" in lines[0]
    assert lines[-1].startswith("toy: 100%| 50.0 [") and not {"\r", "\x1b", "█"} & {*"".join(lines)}
    assert progress(first=9) == ""


def test_a_closed_stderr_shows_no_progress():
    assert progress(screen="None") is None


@pytest.mark.parametrize("label", ["CartPole-v1", "LunarLanderContinuous-v3"])
def test_the_bar_is_seen_at_80_columns(label):
    shown = tqdm.format_meter(20480, 40000, 10, ncols=80, prefix=label, unit_scale=True,
                              bar_format=BAR, postfix="return=-123, kl=0.00123")
    bar = shown.split("|")[1]
    assert len(shown) == 80 and len(bar) >= 3 and shown.endswith("kl=0.00123]")


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
    with pytest.raises(
        FloatingPointError, match=f"^stage sft, iteration 5: loss is {bad}; the last checkpoint"):
        check_finite("stage sft, iteration 5", dict(a=1.0, loss=bad, none=None, n=3))
    check_finite("stage sft", dict(a=1.0, b=None, n=3))


def test_the_thread_of_a_tracker_leaves_its_error_to_the_main_thread(monkeypatch):
    seen, kind = [], type("Writer", (threading.Thread,), dict(__module__="tensorboard.writer"))
    monkeypatch.setattr(threading, "excepthook", seen.append)
    def full(): raise OSError(28, "No space left on device")
    with told_once():
        own = threading.Thread(target=full)
        for thread in (kind(target=full), kind(target=lambda: 1 / 0), own):
            thread.start()
            thread.join()
    assert [x.exc_type for x in seen] == [ZeroDivisionError, OSError]
    assert threading.excepthook == seen.append
