"""Log-probability and entropy of rows of logits as operators, and when they pay off.

A row needs one read forward and one backward, and two numbers kept between them: a logit m to
measure from, and the total weight by that measure. With x_j = (z_j - m) log2(e) / tau and
s = sum_j 2^x_j,

    log pi(i) = log 2 (x_i - log2 s)        H = log 2 (log2 s - sum_j x_j 2^x_j / s)

and with upstream gradients g of log pi(i) and h of H,

    d / dz_j = 2^x_j (a + b x_j) + g / tau [i = j]
    a = -(g + h (H - log s)) / (tau s)      b = -h log 2 / (tau s)

A row without upstream gradient gets zeros. `row_loops` does both passes on a CPU, `kernels` on a
GPU. `torch.library` makes an operator of each pass, so that `torch.compile` keeps the call in its
graph; the gradient of the gradient, and everything under `torch.func`, comes from the plain code
of lesson 02. The door opens from two thousand logits on; up to 131,072 logits in rows of at most
2048, PyTorch's operations compute the gradient above.
"""

__all__ = ['LARGE', 'FEW', 'SMALL', 'forward', 'backward', 'four_of', 'rows', 'new_like',
           'gradient', 'usable', 'check_inplace', 'log_softmax', 'is_small', 'log_prob', 'entropy',
           'log_prob_and_entropy', 'draw']

from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from .. import fast
from ..checks import at_least_float32, pick


def forward(logits: Tensor, index: Tensor, temperature: float, entropy: bool) -> tuple:
    "log pi, entropy, base and total of each row, float32; without `entropy` the second is 0."
    return _backend(logits).forward_rows(logits, index.long(), temperature, entropy)


def _backend(logits):
    "The module with the loops for these logits: each needs a library that may not be there."
    name = "kernels" if fast.has_kernels(logits) else "row_loops"
    return import_module(f"rlhf_notes.fast.{name}")


def backward(logits, index, temperature, g, h, H, base, total, out):
    "Write the gradient of g log pi + h H into `out`, which may be the logits; h may be None."
    given = logits, index.long(), temperature, g, h, H, base, total, out
    _backend(logits).backward_rows(*given)
    torch.autograd.graph.increment_version(out)  # autograd does not see what a loop writes
    return out


def four_of(index):  # (...) int64
    "The shapes and dtypes that `rows` gives."
    return tuple(index.new_empty(index.shape, dtype=torch.float32) for _ in range(4))


@torch.library.custom_op("rlhf_notes::rows", mutates_args=())
def rows(logits: Tensor, index: Tensor, temperature: float, entropy: bool,
         inplace: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    "log pi, entropy, base and total; with `inplace` the gradient may overwrite the logits."
    return forward(logits, index, temperature, entropy)

rows.register_fake(lambda logits, index, *_: four_of(index))


def new_like(x):  # any tensor
    "Memory for a tensor like `x`, on a CPU from NumPy, which asks Linux for pages of 2 MiB."
    if x.device.type != "cpu" or x.nbytes < 2**22: return x.new_empty(x.shape)
    memory = np.empty(x.numel() * x.element_size(), np.uint8)
    return torch.from_numpy(memory).view(x.dtype).view(x.shape)


def gradient(logits: Tensor, index: Tensor, temperature: float, g: Tensor, h: Tensor | None,
             H: Tensor, base: Tensor, total: Tensor) -> Tensor:
    "Gradient of g log pi + h H with respect to the logits."
    return backward(logits, index, temperature, g, h, H, base, total, new_like(logits))

_gradient = torch.library.custom_op("rlhf_notes::rows_backward", gradient, mutates_args=())
_gradient.register_fake(lambda logits, *_: logits.new_empty(logits.shape))


def _keep(ctx, inputs, output):
    logits, index, ctx.temperature, ctx.entropy, ctx.inplace = inputs
    ctx.save_for_backward(logits, index, *output[1:])
    ctx.set_materialize_grads(False)


def _eager(*upstream):
    return all(fast.eager(x) for x in upstream if x is not None)


def _derive(ctx, g, h, *_):
    logits, index, *kept = ctx.saved_tensors
    g, h = torch.zeros_like(kept[0]) if g is None else g, h if ctx.entropy else None
    if torch.is_grad_enabled():
        grad = _differentiable(logits, index, ctx.temperature, g, h)
    elif ctx.inplace:
        grad = backward(logits, index, ctx.temperature, g, h, *kept, logits.detach())
    else:
        by_name = torch.ops.rlhf_notes.rows_backward.default
        call = gradient if _eager(g, h) else by_name
        grad = call(logits, index, ctx.temperature, g, h, *kept)
    return grad, None, None, None, None


@torch.enable_grad()
def _differentiable(logits, index, temperature, g, h):
    "The gradient by the plain code, for second derivatives and batches of gradients."
    broken = ~logits.amax(-1).isfinite()
    outputs = [log_prob.plain(logits, index, temperature, ~(broken & (g == 0)))]
    upstream = [g]
    if h is not None:
        outputs.append(entropy.plain(logits, temperature, ~(broken & (h == 0))))
        upstream.append(h)
    return torch.autograd.grad(outputs, logits, upstream, create_graph=True)[0]

rows.register_autograd(_derive, setup_context=_keep)


class _Rows(torch.autograd.Function):
    "`rows` for eager code: an operator's way through the dispatcher takes 0.1 ms."
    @staticmethod
    def forward(ctx, *inputs):
        output = forward(*inputs[:4])
        _keep(ctx, inputs, output)
        return output[:2]

    backward = staticmethod(_derive)


LARGE = 2**20  # fewer logits are left to the plain code; the loops take a 512th as many


def usable(logits, temperature=1.0):  # (..., V), > 0
    "True if there are many logits, and a loop or a kernel for them."
    if temperature < 1e-30 or fast.transformed() or torch.compiler.is_exporting(): return False
    loops = logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16)
    least = LARGE // 512 if loops and fast.eager(logits) else LARGE
    return logits.numel() > least and (loops and fast.has_numba() or fast.has_kernels(logits))


def check_inplace(logits, inplace_backward):  # a tensor and a flag
    "Refuse leaves: overwriting them would change what is trained."
    if not inplace_backward or not fast.eager(logits): return
    owner = logits._base if logits._is_view() else logits
    if owner.is_leaf and owner.requires_grad:
        raise ValueError("inplace_backward needs logits that were computed from something, "
                         "got a leaf (or a view of one)")


FEW = 2048  # tokens that PyTorch's own adds up without a loss


def _log_softmax(z, temperature):
    if temperature != 1:
        z = (z - z.detach().amax(-1, keepdim=True)) / temperature
    return z.log_softmax(-1)


def log_softmax(logits, temperature):  # as the formula's
    "log softmax(logits / temperature) of few tokens in fewer launches, or NotImplemented."
    if not fast.is_open() or logits.shape[-1] > FEW: return NotImplemented
    z = at_least_float32(logits)
    impossible = z.detach().amax(-1, keepdim=True) == -torch.inf
    return _log_softmax(z.masked_fill(impossible, torch.nan), temperature)


SMALL = 2**17  # logits in rows of at most FEW: up to here PyTorch's operations are quicker


def is_small(logits, entropy):  # (..., V); a flag: twice the work
    "True if PyTorch's operations, with a gradient of their own, are to be taken."
    if not fast.eager(logits): return False
    few = logits.shape[-1] <= FEW and logits.numel() <= min(SMALL // (1 + entropy), LARGE)
    return few and logits.is_cpu and logits.dtype in (torch.float32, torch.bfloat16)


class _Small(torch.autograd.Function):
    "log pi and entropy of a few rows, as `rows`."
    @staticmethod
    def forward(ctx, logits, index, temperature, entropy):
        ctx.temperature, H, p = temperature, None, None
        ctx.set_materialize_grads(False)
        logp = _log_softmax(logits.float(), temperature)
        chosen = pick(logp, index.unsqueeze(-1)).squeeze(-1)
        if entropy:
            p = logp.exp()
            H = (p * logp.clamp_(min=-1e4)).sum(-1).neg_()  # 0 times -inf would be NaN
            if H.isnan().any():
                H.masked_fill_(logits.amax(-1) == -torch.inf, 0)
        ctx.save_for_backward(logits, index, logp, chosen, H, p)
        return chosen, H

    @staticmethod
    def backward(ctx, g, h):
        logits, index, logp, chosen, H, p = ctx.saved_tensors
        if torch.is_grad_enabled():
            g = torch.zeros_like(chosen) if g is None else g
            return _differentiable(logits, index, ctx.temperature, g, h), None, None, None
        if not _eager(g, h):  # a batch of gradients, into which nothing can be written
            one = torch.zeros_like(logp).scatter_(-1, index.unsqueeze(-1), 1)
            grad = 0 if g is None else g.unsqueeze(-1) * (one - logp.exp())
            if h is not None:
                grad = grad - h.unsqueeze(-1) * p * (logp + H.unsqueeze(-1))
            return (grad / ctx.temperature).to(logits.dtype), None, None, None
        if h is None:
            grad = logp.exp().mul_(-g.unsqueeze(-1))
        else:
            grad = (logp + H.unsqueeze(-1)).mul_(-h.unsqueeze(-1))
            grad = (grad if g is None else grad.sub_(g.unsqueeze(-1))).mul_(p)
        if g is not None:
            grad.scatter_add_(-1, index.unsqueeze(-1), g.unsqueeze(-1))
        if chosen.isnan().any():
            ignored = logits.amax(-1) == -torch.inf
            ignored |= sum(x != 0 for x in (g, h) if x is not None) == 0
            grad.masked_fill_(ignored.unsqueeze(-1), 0)
        grad = grad if ctx.temperature == 1 else grad.div_(ctx.temperature)
        return grad.to(logits.dtype), None, None, None


def _call(logits, index, temperature, mask, entropy, inplace):
    "log pi and entropy, or twice NotImplemented."
    if not fast.is_open(): return NotImplemented, NotImplemented
    small = is_small(logits, entropy) and temperature >= 1e-30
    if not small and not usable(logits, temperature): return NotImplemented, NotImplemented
    check_inplace(logits, inplace)
    if mask is not None:
        index = torch.where(mask, index, 0)
    if small:
        both = _Small.apply(logits, index.long(), temperature, entropy)
    else:
        eager = fast.eager(logits)
        inplace = inplace and logits.is_contiguous() and eager
        call = _Rows.apply if eager else torch.ops.rlhf_notes.rows.default
        both = call(logits, index, temperature, entropy, inplace)[:2]
    return both if mask is None else [y if y is None else torch.where(mask, y, 0) for y in both]


def log_prob(logits, index, temperature, mask, inplace_backward):
    "Values and gradients of `selective_log_softmax`, or NotImplemented."
    if index.ndim == logits.ndim: return NotImplemented
    return _call(logits, index, temperature, mask, False, inplace_backward)[0]


def entropy(logits, temperature, mask, inplace_backward):
    "Values and gradients of `entropy_from_logits`, or NotImplemented."
    first = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _call(logits, first, temperature, mask, True, inplace_backward)[1]


def log_prob_and_entropy(logits, index, temperature, mask, inplace_backward):
    "Values and gradients of `log_probs_and_entropy`, or NotImplemented."
    both = _call(logits, index, temperature, mask, True, inplace_backward)
    return NotImplemented if both[0] is NotImplemented else tuple(both)


def draw(logits, temperature, u):  # as the formula's
    "Tokens, or NotImplemented where no kernel draws them."
    here = usable(logits, temperature) and fast.has_kernels(logits)
    if not here or torch.compiler.is_compiling(): return NotImplemented
    return _backend(logits).draw_rows(logits, temperature, u)
