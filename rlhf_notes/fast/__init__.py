"""The same numbers sooner, or in less memory: all that stands behind a door.

`with fast.off():`, or RLHF_NOTES_FAST=0 in the environment, runs the plain code everywhere.
"""
import functools
import os
import warnings
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec

import torch
from torch.autograd import forward_ad

HAS_TRITON = find_spec("triton") is not None
_open = ContextVar("open", default=os.environ.get("RLHF_NOTES_FAST", "1") != "0")
_inside = [] if _open.get() else [None]  # one entry for each `off` that is entered, in any thread


@contextmanager
def off():
    "Inside, plain code runs everywhere; other threads and tasks are left alone."
    before = _open.get()
    _open.set(False)
    _inside.append(None)
    try:
        yield
    finally:
        _inside.pop()
        _open.set(before)


def is_open():
    "True outside `off`. torch.compile cannot read a ContextVar: a graph asks for all threads."
    return not _inside if torch.compiler.is_compiling() else _open.get()


def door(quick):  # with the arguments of the plain function
    "Decorate a plain function: `quick` runs in its place, unless it returns NotImplemented."
    def decorate(plain):
        quick.plain = plain
        @functools.wraps(plain)
        def call(*args, **kwargs):
            if is_open() and (out := quick(*args, **kwargs)) is not NotImplemented:
                return out
            return plain(*args, **kwargs)
        # torch.compile counts recompilations by code object
        call.__code__ = call.__code__.replace(co_name=plain.__name__)
        return call
    return decorate


def has_numba():
    "True if Numba is installed, and compiles."
    return _numba_works()


has_numba._dynamo_marked_constant = True  # torch.compile calls it, instead of looking into it


@functools.cache
def _numba_works():
    "True if Numba compiles; warns, once, if it is installed and does not."
    if find_spec("numba") is None: return False
    try:
        from numba import config
        if not config.DISABLE_JIT: return True
        why = "NUMBA_DISABLE_JIT is set"
    except Exception as e:  # it asks for another NumPy, for example
        why = repr(e)
    warnings.warn(f"the Numba loops cannot be compiled, the plain code runs: {why}")
    return False


def compiled(loop, **options):  # a function of arrays; options of `numba.njit`
    "Compile a loop with Numba when it is first called; keep the result on disk where it can be."
    from numba import njit
    options = dict(nogil=True, error_model="numpy", **options)
    try:
        made = njit(cache=True, **options)(loop)
    except RuntimeError:  # no folder for the cache
        return njit(**options)(loop)
    for name in ("load_overload", "save_overload"):
        setattr(made._cache, name, _forgiving(made._cache, getattr(made._cache, name)))
    return made


def _forgiving(cache, method):
    "A method of Numba's cache that warns of damaged or unwritable files, and does without them."
    def call(*args):
        try:
            return method(*args)
        except Exception as e:
            warnings.warn(f"Numba's cache in {cache.cache_path} is made anew: {e!r}")
        try:
            cache.flush()
        except OSError:
            cache.disable()
    return call


def transformed():
    "True under torch.func or with dual numbers, whose derivatives see through plain code alone."
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def recorded():
    "True while torch.compile, torch.export or torch.jit.trace writes down what is done."
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def eager(x):  # any tensor
    "True if `x` has memory of its own, and nothing records or transforms what is done."
    if recorded() or transformed(): return False
    is_plain = type(x) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and not torch._C._functorch.is_legacy_batchedtensor(x)


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
