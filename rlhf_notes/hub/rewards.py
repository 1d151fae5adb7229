"""Reward functions and models: what they get by name, what they may return, and their weights.

A reward gets what its signature names, as pytest's fixtures do; what is left over goes in order:
prompts first, then responses. It returns a number for each response, or None where there is no
score. An `async` function is awaited, always in the same event loop, so its client can be kept:

```python
async def patient(responses):
    asked = (asyncio.wait_for(ask(r), timeout=30) for r in responses)
    found = await asyncio.gather(*asked, return_exceptions=True)
    return [None if isinstance(x, Exception) else x for x in found]
```

An exception ends the training, None leaves a response out. Several rewards come in a list, with
weights or without; a directory or a name is that of a reward model.
"""

__all__ = ['TEXTS', 'STARRED', 'fresh', 'reward_arguments', 'called', 'call_rewards', 'call_reward', 'reward_functions']

import asyncio
import copy
import inspect
import math
import os
import re
import threading
import time
import traceback
from collections.abc import Mapping, Set
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path
from textwrap import shorten

import torch

from .load import Classifier


TEXTS = "prompts", "responses", "completion_ids"  # lists: of strings or chats, strings, tokens
STARRED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def fresh(x):
    "A copy, so that what users' code does to it stays with them; what has none is given itself."
    if type(x) is dict: return {k: fresh(v) for k, v in x.items()}
    if type(x) in (list, tuple): return type(x)(map(fresh, x))
    try: return copy.deepcopy(x)
    except Exception: return x  # a lock, a module, a client


def reward_arguments(
    function,  # a reward
    texts: dict,  # a list by each name in `TEXTS`
    columns: dict,  # name -> list: the other columns of the prompts
    kind: str = "reward",  # what the function is, for the message
) -> inspect.BoundArguments:
    "Arguments by name where a function names them; prompts and responses in turn for the others."
    if clash := columns.keys() & texts.keys():
        raise ValueError(f"prompts must have no column {min(clash)}, which a reward gets already")
    try:
        signature = inspect.signature(getattr(function, "forward", function))
    except (TypeError, ValueError):  # written in C
        signature = inspect.signature(lambda *texts, **columns: None)
    known = dict(completions=texts["responses"]) | columns | texts
    bound, parameters = signature.bind_partial(), signature.parameters.items()
    named = {k: known[k] for k, p in parameters if k in known and p.kind not in STARRED}
    left = [texts[k] for k in TEXTS[:2] if not any(x is texts[k] for x in named.values())]
    for name, p in parameters:
        if name in named:
            bound.arguments[name] = named[name]
        elif p.kind is p.VAR_KEYWORD:
            bound.arguments[name] = {k: x for k, x in columns.items() if k not in named}
        elif p.kind is p.VAR_POSITIONAL:
            bound.arguments[name], left = tuple(left), []
        elif p.default is p.empty:
            if not left or p.kind is p.KEYWORD_ONLY:
                raise ValueError(f"{kind} must take prompts, responses and columns of the prompts, "
                                 f"got the argument {name!r} beside the columns {[*columns]}")
            bound.arguments[name] = left.pop(0)
    if "completion_ids" not in named and any(x is texts["responses"] for x in left):
        raise ValueError(f"{kind} must take prompts and responses, got a function of {signature}")
    return bound


def called(function, given):  # an environment, from `reward_arguments`
    "The result of a function that may be async."
    return _result(_begin(function, given))


def _begin(function, given, timeout=None):
    "A future of (result, error): all that is async runs in one thread; with a timeout, all does."
    if timeout is None or inspect.iscoroutinefunction(function):
        return _outcome_of(function, given)
    future = Future()

    def run():
        outcome = _outcome_of(function, given).result()
        with suppress(InvalidStateError):  # nobody waits any more
            future.set_result(outcome)
    threading.Thread(target=run, daemon=True).start()
    return future


def _outcome_of(function, given):
    "Call a function: the future of an async one is under way, others have ended."
    future = Future()
    try:
        values = function(*given.args, **given.kwargs)
        if inspect.isawaitable(values):
            return asyncio.run_coroutine_threadsafe(_outcome(values), _loop())
        future.set_result((values, None))
    except BaseException as e:
        future.set_result((None, e))
    return future


async def _outcome(values):
    "A result and no error, or none and an error of any kind: sys.exit would end the loop's thread."
    try:
        return await values, None
    except BaseException as e:
        return None, e


def _result(future, until=None, timeout=None):
    "The result of a call that is over at `until`, by the clock of `time.monotonic`."
    try:
        left = None if until is None else max(0.0, until - time.monotonic())
        values, error = future.result(left)
    except FutureTimeout:
        raise TimeoutError(f"no result within reward_timeout = {timeout:g} seconds") from None
    finally:
        if not future.done():  # as well after a second Ctrl-C
            future.cancel()
            _leave_if_blocked()
    if error is not None: raise error
    return values


_LOOPS, _LOCK = {}, threading.Lock()  # process -> its loop


def _loop():
    "One loop for the life of a process, since clients and locks belong to the loop they met."
    with _LOCK:
        pid = os.getpid()
        if pid not in _LOOPS or _LOOPS[pid].is_closed():
            _LOOPS[pid] = asyncio.new_event_loop()
            threading.Thread(target=_run_forever, args=[_LOOPS[pid]], daemon=True).start()
        return _LOOPS[pid]


def _run_forever(loop):
    "Run on when a task within a task calls sys.exit, which asyncio hands to its result and to us."
    while not loop.is_closed():
        try:
            loop.run_forever()
        except BaseException:
            pass


def _leave_if_blocked():
    "Forget a loop that an async function without an `await` holds up: the next call gets another."
    alive = threading.Event()
    _loop().call_soon_threadsafe(alive.set)
    if not alive.wait(1.0):
        _LOOPS.pop(os.getpid(), None)


def _new_lock():
    global _LOCK
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):  # a thread that held it is not in the child
    os.register_at_fork(after_in_child=_new_lock)


def call_rewards(functions, texts, columns, timeout=None) -> list:  # (B,) each, NaN = no score
    """The numbers that reward functions return; async ones run at the same time.

    `texts` and `columns` are as for `reward_arguments`; `timeout` is in seconds, for each call.
    ValueError tells what else a function does.
    """
    begun, found, count = [], {}, len(texts["responses"])
    until = None if timeout is None else time.monotonic() + timeout

    def look(i):
        found[i] = _numbers(functions[i], begun[i], count, until, timeout)

    try:
        for i, function in enumerate(functions):
            given = reward_arguments(function, *fresh((texts, columns)))
            begun.append(_begin(function, given, timeout))
            if begun[i].done():  # if it has failed, no other begins
                look(i)
        for i in sorted({*range(len(functions))} - {*found}):
            look(i)
        return [found[i] for i in range(len(functions))]
    finally:
        for future in begun:
            future.cancel()


def call_reward(function, texts, columns) -> torch.Tensor:  # (B,), NaN = no score
    "The numbers that one reward function returns, as `call_rewards`."
    return call_rewards([function], texts, columns)[0]


def _numbers(function, future, count, until, timeout):
    "The numbers that a reward has returned, as a tensor."
    values = "nothing"
    try:
        values = _result(future, until, timeout)
        if isinstance(values, (Mapping, Set)) or hasattr(values, "iterrows"):
            raise TypeError(f"a {type(values).__name__} is no list")
        # + 0.0, since float takes strings
        numbers = torch.tensor([math.nan if x is None else float(x + 0.0) for x in values])
    except KeyboardInterrupt: raise
    except BaseException as e:
        place, hint = _place(e)
        raise ValueError("reward must return a list of numbers, with None where there is no score, "
                         f"got {shorten(str(values), 80)} ({place}) from {_name(function)}"
                         f"{hint}") from e
    if len(numbers) != count:
        raise ValueError(f"reward must return a number for each of the {count} responses, got "
                         f"{len(numbers)} from {_name(function)}")
    if numbers.isinf().any():
        raise ValueError("reward must return finite numbers, or None where there is no score, got "
                         f"{shorten(str(values), 80)} from {_name(function)}")
    return numbers


def _name(function): return getattr(function, "__name__", type(function).__name__)


def _place(error):
    "An error in one line, with its place where that is the user's, and what may be done there."
    told = shorten(f"{type(error).__name__}: {error}", 250)
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.filename == __file__: return told, ""
    return (f"{told}, line {last.lineno} of {last.filename}",
            ", which may catch it and return None for the responses that it concerns")


def reward_functions(
    reward,  # a function or a reward model; or a list of those and of pairs (it, weight)
    device="cpu",  # where a reward model that is loaded is to live
) -> list:  # pairs (function, weight)
    "Reward functions with their weights."
    parts = reward if isinstance(reward, list) else [reward]
    parts = [part if isinstance(part, tuple) else (part, 1.0) for part in parts]
    for part in parts:
        known = len(part) == 2 and (callable(part[0]) or isinstance(part[0], (str, Path)))
        if not (known and hasattr(part[1], "__float__") and not getattr(part[1], "ndim", 0)
                and math.isfinite(part[1])):
            raise ValueError("reward must be a function or a reward model, or a list of those and "
                             f"of pairs (function, weight), got {part!r}")
        dotted = re.fullmatch(r"([^\W\d][\w.]*)\.([^\W\d]\w*)", str(part[0]))
        if dotted and not Path(part[0]).exists():
            raise ValueError("reward must be a function or a reward model, got a text with a dot, "
                             f"{part[0]} (on the command line: {dotted[1]}:{dotted[2]})")
    def is_model(f): return isinstance(f, (str, Path)) or hasattr(f, "get_input_embeddings")
    return [(Classifier(f, device=device) if is_model(f) else f, weight) for f, weight in parts]
