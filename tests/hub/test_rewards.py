"Rewards that are async: what they raise, where they run."
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import processes
import pytest

from rlhf_notes.hub import rewards
from rlhf_notes.hub.rewards import TEXTS, bind, call_rewards

GIVEN = dict(zip(TEXTS, (["a", "b"], ["x", "y"], [[1], [2]])))


def within(seconds, function, *args):
    "The result or the error of a call that must not hang."
    found = []

    def run():
        try: found.append(function(*args))
        except BaseException as e: found.append(e)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "hangs"
    return found[0]


def scores(reward):
    found = all_scores(reward)
    return found if isinstance(found, BaseException) else found[0]


async def fine(prompts, responses):
    await asyncio.sleep(0)
    return [1.0, None]


def raising(error, how):
    async def part(): raise error

    async def at_once(prompts, responses): raise error
    async def gathered(prompts, responses): return await asyncio.gather(part(), part())
    async def in_a_task(prompts, responses):
        task = asyncio.create_task(part())
        await asyncio.sleep(0.01)
        return await task

    async def in_a_callback(prompts, responses):
        asyncio.get_running_loop().call_soon(sys.exit, 3)
        await asyncio.sleep(0.01)
        return [1.0, 2.0]
    return locals()[how]


class Odd(BaseException): pass


@pytest.mark.parametrize("how", ["at_once", "gathered", "in_a_task"])
@pytest.mark.parametrize("error, words", [
    (SystemExit(3), "SystemExit: 3"), (GeneratorExit(), "GeneratorExit"),
    (Odd("of mine"), "Odd: of mine"),
    (asyncio.CancelledError(), "CancelledError"), (ValueError("no"), "ValueError: no")])
def test_an_error_of_any_kind_comes_out_of_the_thread(error, words, how):
    told = scores(raising(error, how))
    assert isinstance(told, ValueError) and "reward must return a list of numbers" in str(told)
    assert words in str(told)
    assert scores(fine)[0] == 1 and scores(fine)[1].isnan()  # the loop lives


def test_ctrl_c_in_an_async_reward_is_an_interrupt():
    assert isinstance(scores(raising(KeyboardInterrupt(), "at_once")), KeyboardInterrupt)
    assert isinstance(scores(raising(KeyboardInterrupt(), "gathered")), KeyboardInterrupt)
    assert scores(fine)[0] == 1


def test_what_else_would_end_the_loop():
    async def stops(prompts, responses):
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        return [1.0, 2.0]
    for reward in (stops, raising(None, "in_a_callback")):
        assert scores(reward).tolist() == [1, 2] and scores(fine)[0] == 1
    rewards._loop().call_soon_threadsafe(rewards._loop().stop)
    assert scores(fine)[0] == 1


def test_threads_that_begin_together_share_one_loop(monkeypatch):
    monkeypatch.setattr(rewards, "_LOOPS", {})
    make, begin, found = asyncio.new_event_loop, threading.Barrier(8), []

    def slowly():
        threading.Event().wait(0.05)
        return make()
    monkeypatch.setattr(asyncio, "new_event_loop", slowly)

    def look():
        begin.wait()
        found.append(rewards._loop())
    threads = [threading.Thread(target=look) for _ in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(found) == 8 and len({*found}) == 1


# ---- several at the same time, and no longer than they may

def sleeping(seconds, value=1.0):
    async def judge(prompts, responses):
        await asyncio.sleep(seconds)
        return [value, value]
    return judge


def blocking(seconds):
    def judge(prompts, responses):
        time.sleep(seconds)
        return [5.0, 5.0]
    return judge


def all_scores(*functions, timeout=None):
    return within(20, call_rewards, functions, [*map(bind, functions)], GIVEN, timeout)


def test_async_rewards_run_at_the_same_time():
    start = time.monotonic()
    met = []

    def plain(prompts, responses):
        met.append(0)
        return [3.0, None]
    found = all_scores(sleeping(0.5, 1.0), plain, sleeping(0.5, 2.0), sleeping(0.4, 4.0))
    assert 0.5 <= time.monotonic() - start < 0.9 and met == [0]
    assert [x[0].item() for x in found] == [1, 3, 2, 4]  # in their order
    start = time.monotonic()
    assert len(all_scores(blocking(0.5), sleeping(0.5), blocking(0.5), timeout=10)) == 3
    assert time.monotonic() - start < 0.9


@pytest.mark.parametrize("hung", [sleeping(60), blocking(8)])
def test_a_reward_that_takes_too_long_is_an_error_that_names_the_option(hung):
    start = time.monotonic()
    told = all_scores(sleeping(0.01), hung, timeout=0.3)
    assert time.monotonic() - start < 3 and isinstance(told, ValueError)
    assert "(TimeoutError: no result within reward_timeout = 0.3 seconds) from judge" in str(told)
    assert scores(fine)[0] == 1


def test_an_async_reward_that_holds_up_the_loop_is_left_behind():
    async def judge(prompts, responses): time.sleep(8)
    told = all_scores(judge, timeout=0.3)
    assert "reward_timeout = 0.3" in str(told) and scores(fine)[0] == 1


def test_a_failure_says_who_and_where_none_is_allowed_and_ends_the_others():
    ended = []

    async def slow(prompts, responses):
        try: await asyncio.sleep(60)
        finally: ended.append("slow")
    def breaks(prompts, responses): raise ConnectionError("no route")
    def late(prompts, responses): ended.append("late")
    for reward in (breaks, raising(ConnectionError("no route"), "in_a_task")):
        told = str(all_scores(slow, reward, late) if reward is breaks else all_scores(reward, slow))
        assert "got nothing (ConnectionError: no route, line " in told
        assert told.endswith(f"from {reward.__name__}, which may catch it and return None for the "
                             "responses that it concerns")
    deadline = time.monotonic() + 5
    while ended != ["slow", "slow"] and time.monotonic() < deadline: time.sleep(0.01)
    assert ended == ["slow", "slow"]  # and the one behind it has not begun


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals are sent to a thread")
@pytest.mark.parametrize("kind", ["async", "plain"])
def test_a_hung_reward_does_not_mute_ctrl_c(kind, tmp_path):
    "The first is answered at once, the second ends the training."
    code = f"""
import asyncio, os, signal, sys, threading, time
sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})
from language_models import make, tokenizer
from rlhf_notes import RLHF
def press(): os.kill(os.getpid(), signal.SIGINT)
async def sleeps(prompts, responses):
    threading.Timer(0.5, press).start()
    threading.Timer(1.5, press).start()
    await asyncio.sleep(30)
def blocks(prompts, responses):
    threading.Timer(0.5, press).start()
    threading.Timer(1.5, press).start()
    time.sleep(30)
reward = dict(plain=blocks).get({kind!r}, sleeps)
r = RLHF(make("Llama"), tokenizer(), ["w3"], reward, max_new_tokens=4, batch=4, iterations=2,
         minibatches=1, device="cpu")
try: r.learn()
except KeyboardInterrupt: print("ended", flush=True)
"""
    start = time.monotonic()
    done = processes.run(code)
    assert done.stdout == "ended\n" and "stopping after 1 of 2 iterations" in done.stderr, done
    assert time.monotonic() - start < 28


def test_the_option_of_the_trainer():
    from language_models import make, tokenizer

    from rlhf_notes import RLHF
    how = dict(max_new_tokens=4, batch=4, iterations=1, minibatches=1, device="cpu")
    def learn(reward, **options):
        return RLHF(make("Llama"), tokenizer(), ["w3"], reward, **how | options).learn()
    def judge(prompts, responses):
        time.sleep(4)
        return [1.0] * len(responses)
    with pytest.raises(ValueError, match=r"TimeoutError: .* reward_timeout = 0.2 .* judge"):
        learn(judge, reward_timeout=0.2)
    with pytest.raises(ValueError, match=r"TimeoutError: .* reward_timeout = 0.2 .* judge"):
        learn(lambda p, r: [1.0] * len(r), eval_prompts=["w4"], eval_reward=judge, eval_every=1,
              reward_timeout=0.2)
    for bad, error in ((0, ValueError), (-1.0, ValueError), ("5", TypeError), (True, TypeError)):
        with pytest.raises(error, match="^reward_timeout must be"): learn(judge, reward_timeout=bad)
