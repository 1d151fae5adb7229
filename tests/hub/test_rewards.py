"Rewards that are async: what they raise, where they run."
import asyncio
import sys
import threading

import pytest

from rlhf_notes.hub import rewards
from rlhf_notes.hub.rewards import TEXTS, call_reward

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


def scores(reward): return within(20, call_reward, reward, GIVEN, {})


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
