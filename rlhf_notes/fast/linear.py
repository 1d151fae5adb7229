"""Log-probabilities from hidden states without the logits, a few hundred positions at a time.

The logits z = h W' are the largest tensor of a training step. So make some rows of them, keep four
numbers of each row, and forget them. The backward pass makes them again, writes their gradient dz
in their place, and dh = dz W, dW = sum dz' h, db = sum dz: four products instead of three.

A product of bfloat16 matrices that is stored as bfloat16 errs by up to 1/16 in a logit near 16. So
products stay in float32, and the gradient of the weight is summed in float32 over all chunks and
rounded once. The door opens above a million logits, or where a `chunk` is given.

verl's `linear_cross_entropy` and Liger's fused loss form the logits block by block too; cut
cross-entropy (Wijmans et al. 2024, arXiv:2411.09009) forms none in memory. Plain twin: lesson 02.
"""

__all__ = ['CHUNK', 'head', 'aligned', 'head_backward', 'log_probs']

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import fast
from . import rows


@torch.library.custom_op("rlhf_notes::head", mutates_args=())
def head(hidden: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None, temperature: float,
         chunk: int, entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log pi, entropy, base and total of the R rows of hidden (R, d) @ weight (V, d).T + bias (V,).

    `chunk` rows at a time; without `entropy` the second result is 0.
    """
    V, weight = len(weight), aligned(weight)
    parts = [rows.forward(z[:, :V], index[at], temperature, entropy)
             for at, z in _chunks(hidden, weight, bias, chunk)]
    return tuple(map(torch.cat, zip(*parts)))

CHUNK = 2**23  # logits at once; on a GPU eight times as many


def _product(a, b):
    "a @ b, accumulated and kept in float32."
    with torch.autocast(a.device.type, enabled=False):
        if a.is_cuda and b.dtype != torch.float32 and "dtype" in torch.ops.aten.mm.overloads():
            return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
        return a.float() @ b.float()


def _chunks(hidden, weight, bias, size):
    "Some rows at a time: where they are, and their logits."
    for first in range(0, len(hidden), size):
        at = slice(first, first + size)
        z = _product(hidden[at], weight.t())
        if bias is not None:
            z[:, :len(bias)] += bias
        yield at, z


def aligned(weight):  # (V, d)
    "Rows of zeros up to a multiple of 64 on a GPU, whose products read 16 bytes at a time."
    more = -len(weight) % 64
    return pad(weight, (0, 0, 0, more)) if weight.is_cuda and more else weight


@torch.library.custom_op("rlhf_notes::head_backward", mutates_args=())
def head_backward(hidden: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None,
                  temperature: float, chunk: int, g: Tensor, h: Tensor | None, H: Tensor,
                  base: Tensor, total: Tensor, train_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    "Gradients of g log pi + h H with respect to hidden, weight and bias."
    V, weight = len(weight), aligned(weight)
    d_hidden, d_bias = torch.empty_like(hidden), weight.new_zeros(V, dtype=torch.float32)
    d_weight = torch.zeros_like(weight, dtype=torch.float32)
    for at, z in _chunks(hidden, weight, bias, chunk):
        kept, h_at = (H[at], base[at], total[at]), None if h is None else h[at]
        dz = torch.zeros_like(z, dtype=weight.dtype) if z.is_cuda else z  # as it is multiplied
        rows.backward(z[:, :V], index[at], temperature, g[at], h_at, *kept, dz[:, :V])
        if bias is not None:
            d_bias += dz[:, :V].sum(0, dtype=torch.float32)
        d_hidden[at] = _product(dz, weight)
        if not train_weight: continue
        if hidden.dtype == torch.float32:
            d_weight.addmm_(dz.t(), hidden[at])
        else:
            d_weight += _product(dz.t(), hidden[at])
    return d_hidden, d_weight[:V].to(weight.dtype), d_bias.to(weight.dtype)


head.register_fake(lambda hidden, weight, index, *_: rows.four_of(index))
head_backward.register_fake(lambda hidden, weight, *_: tuple(
    t.new_empty(t.shape) for t in (hidden, weight, weight[:, 0])))


def _keep(ctx, inputs, output):
    *tensors, ctx.temperature, ctx.chunk, ctx.entropy = inputs
    ctx.save_for_backward(*tensors, *output[1:])


def _derive(ctx, g, h, *_):
    *inputs, H, base, total = ctx.saved_tensors
    h = h if ctx.entropy else None
    if torch.is_grad_enabled():
        plain = _differentiable(inputs, ctx.temperature, g, h, ctx.needs_input_grad)
        return *plain, None, None, None
    d_hidden, d_weight, d_bias = torch.ops.rlhf_notes.head_backward.default(
        *inputs, ctx.temperature, ctx.chunk, g, h, H, base, total, ctx.needs_input_grad[1])
    return d_hidden, d_weight, None, d_bias if ctx.needs_input_grad[3] else None, None, None, None


def _differentiable(inputs, temperature, g, h, needed):
    "The gradient by the plain code, for second derivatives."
    outputs = log_probs.plain(*inputs, temperature, None, h is not None)
    found = iter(torch.autograd.grad(outputs, [x for x, need in zip(inputs, needed) if need],
                                     g if h is None else (g, h), create_graph=True))
    return [next(found) if need else None for need in needed[:4]]

head.register_autograd(_derive, setup_context=_keep)


def log_probs(hidden, weight, index, bias, temperature, chunk, entropy, mask):
    "Values and gradients of `linear_log_probs`, or NotImplemented."
    V, kind = len(weight), hidden.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        cast = [t if t is None or t.dtype == torch.float64 else t.to(torch.get_autocast_dtype(kind))
                for t in (hidden, weight, bias)]
        hidden, weight, bias = cast
    many = index.numel() * V > rows.LARGE or chunk is not None and index.numel() > 0
    same = all(t.dtype == hidden.dtype for t in (weight, bias) if t is not None)
    if fast.transformed() or not (fast.is_open() and many and same): return NotImplemented
    loops = hidden.dtype != torch.float64 and kind == "cpu" and fast.has_numba()
    if not (loops or fast.has_kernels(hidden)): return NotImplemented
    if mask is not None:
        index, hidden = torch.where(mask, index, 0), torch.where(mask[..., None], hidden, 0)
    size = chunk or max(1, CHUNK * (8 if hidden.is_cuda else 1) // V)
    flat = hidden.reshape(-1, hidden.shape[-1])
    out = torch.ops.rlhf_notes.head.default(
        flat, weight, index.reshape(-1), bias, temperature, size, entropy)
    logp, H = (y.view(index.shape) for y in out[:2])
    if mask is not None:
        logp, H = torch.where(mask, logp, 0), torch.where(mask, H, 0)
    return (logp, H) if entropy else logp
