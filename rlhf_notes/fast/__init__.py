"""The same numbers sooner, or in less memory: all that stands behind a door.

`with fast.off():`, or RLHF_NOTES_FAST=0 in the environment, runs the plain code everywhere.
"""
import functools
import os
from contextlib import contextmanager
from importlib.util import find_spec

is_open = os.environ.get("RLHF_NOTES_FAST", "1") != "0"
HAS_NUMBA = find_spec("numba") is not None


@contextmanager
def off():
    "Inside, plain code runs everywhere."
    global is_open
    before, is_open = is_open, False
    try:
        yield
    finally:
        is_open = before


def door(quick):  # with the arguments of the plain function
    "Decorate a plain function: `quick` runs in its place, unless it returns NotImplemented."
    def decorate(plain):
        quick.plain = plain
        @functools.wraps(plain)
        def call(*args, **kwargs):
            if is_open and (out := quick(*args, **kwargs)) is not NotImplemented:
                return out
            return plain(*args, **kwargs)
        # torch.compile counts recompilations by code object
        call.__code__ = call.__code__.replace(co_name=plain.__name__)
        return call
    return decorate


def compiled(loop, **options):  # a function of arrays; options of `numba.njit`
    "Compile a loop with Numba when it is first called; keep the result on disk where it can be."
    from numba import njit
    options = dict(nogil=True, error_model="numpy", **options)
    try:
        return njit(cache=True, **options)(loop)
    except RuntimeError:  # no folder for the cache
        return njit(**options)(loop)
