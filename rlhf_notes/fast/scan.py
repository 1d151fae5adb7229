"""The recursion behind returns and GAE in one compiled loop, an operator for PyTorch.

Returns and advantages are one recursion, y_t = x_t + d_t y_{t+1} (lesson 08): one multiplication
and one addition for each number. Step by step in Python it costs a handful of calls into PyTorch
for each step, for one number or a thousand: 2048 steps of 64 environments take hardly longer than
of one. So the loop is compiled by Numba when it is first called; where Numba is missing, or takes
longer to load than the loop to run, a row of NumPy for each step does. Where the decay is 0 the
later steps are left out, not multiplied by 0: there may be NaN.

`torch.library` makes an operator of the loop, with a gradient: the same scan with time turned
around. Under `torch.func` the plain code of lesson 08 runs. The door opens from four steps on
(NumPy) and from 1024 numbers on (compiled). An operator is needed where there is a gradient or a
compiler; else the loop is called without the 0.05 ms that it takes. A GPU has one kernel for it.
`torch.export` and `torch.jit.trace` record the operator whatever the number of steps, which stays
free; whoever loads the program imports this package. ONNX has no such operator, and says so.
"""

__all__ = ['SHORT', 'SMALL', 'accumulate', 'gae']

import math
from functools import cache
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from .. import fast
from . import compiled


def _scan_loop(x, decay, y):
    "y_t = x_t + decay_t y_{t+1}, backwards in time, into y."
    zero, last = x.dtype.type(0), len(x) - 1
    for t in range(last, -1, -1):
        for n in range(x.shape[1]):
            cut = t == last or decay[t, n] == 0
            y[t, n] = x[t, n] + (zero if cut else decay[t, n] * y[min(t + 1, last), n])


def _scan_by_numpy(x, decay, y):
    "`_scan_loop`, a row at a time."
    y[:], goes_on, later = x, decay != 0, np.zeros_like(x)
    with np.errstate(all="ignore"):
        for t in range(len(x) - 2, -1, -1):
            np.multiply(decay[t], y[t + 1], out=later[t], where=goes_on[t])
            y[t] += later[t]


def _gae_loop(r, v, next_v, terminated, done, gamma, decay, A):
    "A_t = r_t + gamma V_{t+1} - V_t + decay A_{t+1}, backwards in time, into A."
    zero, last = r.dtype.type(0), len(r) - 1
    for t in range(last, -1, -1):
        for n in range(r.shape[1]):
            cut = t == last or done[t, n] or decay == 0
            delta = r[t, n] + (zero if terminated[t, n] else gamma * next_v[t, n]) - v[t, n]
            A[t, n] = delta + (zero if cut else decay * A[min(t + 1, last), n])


_compiled, _KERNELS = cache(compiled), "rlhf_notes.fast.kernels"


def _columns(*tensors):
    "NumPy views (T, N) of CPU tensors of one shape, all of the first one's dtype or boolean."
    x = tensors[0]
    for t in tensors:
        if t.device.type != "cpu" or t.shape != x.shape or t.dtype not in (x.dtype, torch.bool):
            raise ValueError(f"the loop expects {x.dtype}, {tuple(x.shape)}, cpu, got "
                             f"{t.dtype}, {tuple(t.shape)}, {t.device}")
    N = math.prod(x.shape[1:])
    return [t.detach().contiguous().view(len(x), N).numpy() for t in tensors]


def _empty(x, *_):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _scan_now(x: Tensor, decay: Tensor) -> Tensor:
    if x.is_cuda: return import_module(_KERNELS).scan(x, decay)
    loop = _compiled(_scan_loop) if _is_long(x) else _scan_by_numpy
    loop(*_columns(x, decay, y := _empty(x)))
    return y


def _gae_now(r: Tensor, v: Tensor, next_v: Tensor, terminated: Tensor, done: Tensor,
             gamma: float, lam: float) -> Tensor:
    if r.is_cuda: return import_module(_KERNELS).gae(r, v, next_v, terminated, done, gamma, lam)
    *inputs, out = _columns(r, v, next_v, terminated, done, A := _empty(r))
    number = out.dtype.type
    _compiled(_gae_loop)(*inputs, number(gamma), number(gamma * lam), out)
    return A

_scan_op = torch.library.custom_op("rlhf_notes::scan", _scan_now, mutates_args=())
_gae_op = torch.library.custom_op("rlhf_notes::gae", _gae_now, mutates_args=())
_scan_op.register_fake(_empty)
_gae_op.register_fake(_empty)


def _scan(x, decay): return torch.ops.rlhf_notes.scan.default(x, decay)


def _gae(*given): return torch.ops.rlhf_notes.gae.default(*given)


def _derive(ctx, grad):
    "The same scan with time turned around."
    decay, = ctx.saved_tensors
    earlier = torch.cat([torch.ones_like(decay[:1]), decay[:-1]])
    return _scan(grad.flip(0), earlier.flip(0)).flip(0), None


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])

_scan_op.register_autograd(_derive, setup_context=_keep)


SHORT, SMALL = 4, 2**10  # steps, numbers: for fewer the plain loop will do, or NumPy's


def _is_long(x):
    return x.numel() >= SMALL and fast.has_numba()


def _pays(x, *others):
    same = all(t.dtype in (x.dtype, torch.bool) for t in others)
    if fast.transformed() or not (fast.is_open() and same): return False
    if x.device.type == "cpu": return fast.recorded() or len(x) >= SHORT
    return x.is_cuda and fast.has_kernels(x)


def accumulate(x, decay):  # as the plain function gets them
    "Values and gradients of the plain function; NotImplemented where the loop does not pay."
    if decay.requires_grad or not _pays(x, decay): return NotImplemented
    return (_scan if x.requires_grad or not fast.eager(x) else _scan_now)(x, decay)


def gae(rewards, values, next_values, terminated, done, gamma, lam):
    "Values of the plain function in one read; NotImplemented where a gradient is asked for."
    tensors = rewards, values, next_values, terminated, done
    if not _pays(*tensors) or any(t.requires_grad for t in tensors): return NotImplemented
    if not rewards.is_cuda and (fast.recorded() or not _is_long(rewards)): return NotImplemented
    call = _gae_now if all(map(fast.eager, tensors)) else _gae
    advantages = call(*tensors, gamma, lam)
    return advantages, advantages + values
