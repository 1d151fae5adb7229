"""The same numbers sooner, or in less memory: all that stands behind a door.

`with fast.off():`, or RLHF_NOTES_FAST=0 in the environment, runs the plain code everywhere.
"""
import functools
import os
import warnings
from contextlib import contextmanager
from importlib.util import find_spec

import torch

is_open = os.environ.get("RLHF_NOTES_FAST", "1") != "0"
HAS_NUMBA, HAS_TRITON = (find_spec(name) is not None for name in ("numba", "triton"))


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


def transformed():
    "True under torch.func, whose gradients see through plain code alone."
    return torch._C._are_functorch_transforms_active()


def eager(x):  # any tensor
    "True if `x` has memory of its own, and neither a compiler nor torch.func watches."
    watched = torch.compiler.is_compiling() or transformed()
    return type(x) in (torch.Tensor, torch.nn.Parameter) and not watched


def has_kernels(x):  # any tensor
    "True if Triton's kernels run on the GPU of `x` (or, interpreted, on the CPU); not in float64."
    cuda = x.device.type == "cuda" and torch.version.cuda is not None
    here = cuda or x.device.type == "cpu" and _interpreted()
    if not (here and HAS_TRITON) or x.dtype == torch.float64: return False
    return torch.compiler.is_compiling() or _runs(str(x.device))


def _interpreted():
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _runs(device):
    "True if Triton can launch a kernel on this device; warns, once, if it cannot."
    two = torch.ones(2, dtype=torch.float32, device=device)
    try:
        from . import kernels
        kernels.scan(two, two).tolist()
    except Exception as e:
        warnings.warn(f"the Triton kernels cannot run on {device}, PyTorch's code does: {e!r}")
        return False
    return True
