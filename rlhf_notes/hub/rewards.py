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

__all__ = ['TEXTS', 'STARRED', 'fresh', 'bind', 'begin', 'called', 'call_rewards', 'shown',
           'reward_functions']

import asyncio
import copy
import inspect
import math
import os
import re
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Set
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import shorten

import torch

from ..training.fit import settings_kept
from ..training.options import error_text, text_of
from .load import Classifier


TEXTS = "prompts", "responses", "completion_ids"  # lists: of strings or chats, strings, tokens
STARRED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def fresh(x):
    "A copy, so that what users' code does to it stays with them; what has none is given itself."
    if type(x) is dict: return {k: fresh(v) for k, v in x.items()}
    if type(x) in (list, tuple): return type(x)(map(fresh, x))
    try: return copy.deepcopy(x)
    except Exception: return x  # a lock, a module, a client


def bind(function, columns=(), kind="reward") -> inspect.BoundArguments:
    """Where each of `TEXTS` and the columns goes, by its name: to the parameter of that name, and
    prompts and responses in turn to those of others; `kind` is what the function is. Prompts that
    come after responses by their name are told: a column may be meant."""
    if clash := {*columns} & {*TEXTS}:
        raise ValueError(f"prompts must have no column {min(clash)}, which a reward gets already")
    try:
        signature = inspect.signature(getattr(function, "forward", function))
    except (TypeError, ValueError):  # written in C
        signature = inspect.signature(lambda *texts, **columns: None)
    asked = signature.parameters
    if "completions" in columns and "completions" in asked and "responses" not in asked:
        raise ValueError("prompts must have no column completions for a reward that asks for "
                         "them, since they are the responses")
    known = dict(completions="responses") | {x: x for x in (*columns, *TEXTS)}
    bound, parameters = signature.bind_partial(), signature.parameters.items()
    named = {k: known[k] for k, p in parameters if k in known and p.kind not in STARRED}
    left = [x for x in TEXTS[:2] if x not in named.values()]
    for name, p in parameters:
        if name in named:
            bound.arguments[name] = named[name]
        elif p.kind is p.VAR_KEYWORD:  # the last
            texts = {x: known[x] for x in known if left and known[x] in (*left, "completion_ids")}
            bound.arguments[name] = texts | {x: x for x in columns if x not in named}
            left = []
        elif p.kind is p.VAR_POSITIONAL:
            bound.arguments[name], left = tuple(left), []
        elif p.default is p.empty:
            if not left or p.kind is p.KEYWORD_ONLY:
                raise ValueError(f"{kind} must take prompts, responses and columns of the prompts, "
                                 f"got the argument {name!r} beside the columns {[*columns]}")
            if "responses" in bound.arguments.values():
                warnings.warn(f"{kind}: the argument {name!r} gets the prompts, which have no "
                              "column of that name", stacklevel=2)
            bound.arguments[name] = left.pop(0)
    if "completion_ids" not in named and "responses" in left:
        raise ValueError(f"{kind} must take prompts and responses, got a function of {signature}")
    return bound


def begin(function, bound, known, timeout=None):
    """The result of a function of `known`, name -> list; or a future of (result, error) if it is
    async or has a time limit."""
    known = fresh(known)
    named = {k: known[x] for k, x in bound.kwargs.items()}
    work = partial(function, *(known[x] for x in bound.args), **named)
    if timeout is not None and not inspect.iscoroutinefunction(function): return _in_thread(work)
    result = work()
    return _in_loop(result) if inspect.isawaitable(result) else result


def called(function, bound, known):  # an environment
    "The result of a function that may be async."
    with settings_kept():
        result = begin(function, bound, known)
        return _result(result) if isinstance(result, Future) else result


def _in_loop(awaitable):
    "All that is async runs in one thread."
    return asyncio.run_coroutine_threadsafe(_outcome(awaitable), _loop())


def _in_thread(work):
    "A thread for each, which the end of the program does not wait for."
    future = Future()

    def run():
        try:
            result = work()
            outcome = _in_loop(result).result() if inspect.isawaitable(result) else (result, None)
        except BaseException as e:
            outcome = None, e
        with suppress(InvalidStateError):  # nobody waits any more
            future.set_result(outcome)
    threading.Thread(target=run, daemon=True).start()
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


def call_rewards(functions, bound, known, timeout=None) -> list:  # (B,) each, NaN = no score
    """The numbers that reward functions return; async ones run at the same time.

    `bound` is of `bind`, `known` has a list by each name; `timeout` is in seconds, for each call.
    ValueError tells what else a function does.
    """
    calls, count, end = [], len(known["responses"]), time.monotonic() + (timeout or 0)
    try:
        with settings_kept():
            for f, b in zip(functions, bound):  # if one fails at once, no other begins
                calls.append(_numbers(f, count, begin, f, b, known, timeout))
            return [_numbers(f, count, _result, x, timeout and end, timeout)
                    if isinstance(x, Future) else x for f, x in zip(functions, calls)]
    finally:
        for x in calls:
            if isinstance(x, Future):
                x.cancel()


def _numbers(function, count, step, *args):
    "The numbers that `step(*args)` of a reward returns, as a tensor; or the future of them."
    values = "nothing"
    try:
        values = step(*args)
        if isinstance(values, Future): return values
        if isinstance(values, (Mapping, Set)) or hasattr(values, "iterrows"):
            raise TypeError(f"a {type(values).__name__} is no list")
        numbers = torch.tensor([*map(_number, values)], dtype=torch.float32, device="cpu")
    except KeyboardInterrupt: raise
    except BaseException as e:
        raise _refused("a list of numbers, with None where there is no score", values, function,
                       e) from e
    if len(numbers) != count:
        raise _refused(f"a number for each of the {count} responses", len(numbers), function)
    if numbers.isinf().any():
        raise _refused("finite numbers, or None where there is no score", values, function)
    return numbers


def _number(x):
    if isinstance(x, (str, bytes, bytearray)): raise TypeError(f"{x!r} is no number")
    return math.nan if x is None else float(x)  # which would take them


def _refused(expected, got, function, error=None):
    place, hint = _place(error) if error else ("", "")
    return ValueError(f"reward must return {expected}, got {shown(got)}{place} from "
                      f"{_name(function)}{hint}")


def shown(x): return shorten(text_of(x), 80) or f"a {type(x).__name__}"


def _name(function): return getattr(function, "__name__", type(function).__name__)


def _place(error):
    "An error in one line, with its place where that is the user's, and what may be done there."
    told = shorten(error_text(error), 250)
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.filename == __file__: return f" ({told})", ""
    return (f" ({told}, line {last.lineno} of {last.filename})",
            ", which may catch it and return None for the responses that it concerns")


def reward_functions(reward, device="cpu") -> list:  # pairs (function, weight)
    """The function or reward model that is given, or each of a list of those and of pairs (it,
    weight); a model that is loaded lives on the device."""
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
