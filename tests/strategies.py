"""What hypothesis draws tensors from: shapes, masks, dtypes and extreme values."""
import math

import torch
from hypothesis import strategies as st

DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
EXTREMES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, -1e30, 1e-8, 88.0, -88.0, 100.0,
                            -100.0, 1e3, -1e3, 1e6, -1e6])
JUNK = st.sampled_from([1e30, -1e30, math.nan, math.inf, -math.inf])
SEEDS = st.integers(0, 2**31 - 1)


def shapes(min_dims=1, max_dims=3, max_side=5):
    return st.lists(st.integers(1, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


def normal(seed, shape, dtype=torch.float64, scale=1.0):
    "A normal sample that depends on `seed` alone."
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            * scale).to(dtype)


def random_mask(seed, shape, keep=0.6):
    "A mask whose elements are True with probability `keep`."
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < keep


@st.composite
def masked(draw, min_dims=1, max_dims=3, max_side=5, dtypes=DTYPES):
    """(x, mask): a normal sample of any dtype and a mask of its shape that may be full, empty or
    anything between.
    """
    shape, seed = draw(shapes(min_dims, max_dims, max_side)), draw(SEEDS)
    return (normal(seed, shape, draw(dtypes)),
            random_mask(seed + 1, shape, draw(st.sampled_from([0.0, 0.5, 0.8, 1.0]))))


@st.composite
def values(
    draw, shape, elements=st.one_of(EXTREMES, st.floats(-10, 10, width=32)), dtype=torch.float64):
    "A tensor whose elements are drawn one by one, extremes among them."
    return torch.tensor(draw(st.lists(elements, min_size=math.prod(shape),
                                      max_size=math.prod(shape))), dtype=dtype).reshape(shape)


def value_and_grad(f, *tensors):
    "f(*tensors).sum() and its gradient with respect to each of them."
    tensors = [t.detach().clone().requires_grad_(True) for t in tensors]
    y = f(*tensors)
    return y.detach(), torch.autograd.grad(y.sum(), tensors, allow_unused=True)
