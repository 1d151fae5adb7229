"""Values, gradients, an exception or a hang: the outcome of one call, and how two calls differ.

A call that takes more than ten seconds is stopped. Two functions are the same formula if their
outcomes agree on all inputs: a thousandth is a mistake, a hundred-thousandth is not.
"""

__all__ = ['LIMIT', 'RTOL', 'ATOL', 'Outcome', 'attempt', 'weights', 'time_limit', 'alike', 'close',
           'each_close', 'kind_of', 'show', 'difference']

from copy import deepcopy
from dataclasses import dataclass

import torch

from ..identify.calls import LIMIT, time_limit


@dataclass
class Outcome:
    "The result of one call."
    values: tuple = ()   # What was returned, as tensors
    grads: tuple = ()    # Gradients with respect to the arguments that the exercise names
    error: str = ""      # Why there are no values
    changed: tuple = ()  # Arguments that the call changed in place


def attempt(f, case: dict, wrt: tuple = ()) -> Outcome:
    "Call `f` with copies of the arguments, and catch exceptions; gradients go to those of `wrt`."
    args = deepcopy(case)
    leaves = [[x.requires_grad_(True) for x in _listed(args[name])] for name in wrt]
    for name, own in zip(wrt, leaves):
        clones = [x.clone() for x in own]                  # a leaf forbids x += 1
        args[name] = clones if isinstance(args[name], list) else clones[0]
    try:
        with time_limit(LIMIT):
            out = f(*args.values())
        parts = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        if any(p is None for p in parts):
            return Outcome(error="returns None: is the `return` missing?")
        try:
            values = tuple(map(_tensor, parts))
        except (TypeError, ValueError, RuntimeError):
            return Outcome(error=f"returns {repr(out)[:60]}: neither a tensor nor a number")
        grads = _gradients(values, leaves)
    except (Exception, SystemExit) as e: return Outcome(error=f"raises {type(e).__name__}: {e}")
    changed = tuple(name for name, x in case.items() if repr(_plain(args[name])) != repr(_plain(x)))
    return Outcome(tuple(v.detach() for v in values), grads, changed=changed)


def _listed(x): return x if isinstance(x, list) else [x]


def _tensor(x):
    if isinstance(x, torch.Tensor): return x
    number = isinstance(x, (int, float)) and not isinstance(x, bool)
    return torch.tensor(x, dtype=torch.float64 if number else None)


def _gradients(values, leaves):
    "Gradients of a weighted sum, so that no element can stand in for another."
    values = [v for v in values if v.requires_grad]
    total = sum((v.double().flatten() * weights(v.numel())).sum() for v in values)
    def grads(own):
        if not values: return [*map(torch.zeros_like, own)]
        return torch.autograd.grad(total, own, retain_graph=True, materialize_grads=True)
    return tuple(g[0] if len(g) == 1 else torch.cat([*map(torch.flatten, g)])
                 for g in map(grads, leaves))


def _plain(x):
    if isinstance(x, list): return [*map(_plain, x)]
    return x.tolist() if isinstance(x, torch.Tensor) else x


def weights(n: int): return torch.linspace(1, 2, n, dtype=torch.float64)  # all different


def alike(a: Outcome, b: Outcome) -> bool:
    "True if values and gradients of two outcomes agree, or both raise the same kind of error."
    if a.error or b.error: return a.error.split(":")[0] == b.error.split(":")[0]
    if len(a.values) != len(b.values): return False
    return all(map(close, a.values + a.grads, b.values + b.grads))


def close(a, b):  # two tensors
    "True if shape, kind and all numbers agree."
    if a.shape != b.shape or kind_of(a) != kind_of(b): return False
    return bool(each_close(a, b).all())


RTOL, ATOL = 1e-4, 1e-5


def each_close(a, b):  # two tensors of one shape
    "Which elements agree up to rounding."
    return torch.isclose(a.double(), b.double(), RTOL, ATOL, equal_nan=True)


def kind_of(x):  # a tensor
    "Boolean, integer, floating-point or half precision."
    if x.dtype == torch.bool: return "boolean"
    if x.dtype in (torch.float16, torch.bfloat16): return "half precision"
    return "floating-point" if x.is_floating_point() else "integer"


def show(x) -> str:
    "Numbers with four digits, on one line of at most 160 characters."
    text = _text(_plain(x))
    return text if len(text) <= 160 else text[:157] + "..."


def show_shape(x) -> str:
    "A tensor by its shape, anything else as it is."
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else show(x)


def _text(v):
    if isinstance(v, list): return "[" + ", ".join(map(_text, v)) + "]"
    return str(v) if isinstance(v, (bool, int)) else f"{v:.4g}"


def difference(got: Outcome, expected: Outcome, wrt: tuple = ()) -> str:
    "The first difference, as a sentence; empty if there is none."
    if got.error: return f"yours {got.error}"
    n, m = len(got.values), len(expected.values)
    if n != m:
        one = "" if m > 1 else " (torch.stack makes one tensor of several)"
        return f"yours returns {n} thing{'s' * (n != 1)}, expected {m}{one}"
    for i, (g, e) in enumerate(zip(got.values, expected.values), 1):
        which = f"result {i}: " if m > 1 else ""
        if wrong := _wrong_kind(g, e): return f"{which}yours {wrong}"
        if close(g, e): continue
        at = tuple((~each_close(g, e)).nonzero()[0].tolist())
        first = f"; first at {[*at]}: {show(e[at])}, {show(g[at])}" if g.numel() > 12 else ""
        return f"{which}expected {show(e)}, yours is {show(g)}{first}"
    for name, g, e in zip(wrt, got.grads, expected.grads):
        if close(g, e): continue
        none = "" if g.any() else ": none flows; is it detached, or computed from plain numbers?"
        n = sum(v.numel() for v in expected.values)
        of = "" if n == 1 else " of the results, weighted from 1 to 2 and added,"
        return (f"the gradient{of} with respect to {name} should be {show(e)}, "
                f"yours is {show(g)}{none}")
    return ""


def _wrong_kind(got, expected):
    "The reason why a value is of the wrong kind, or an empty string."
    if got.shape != expected.shape:
        return f"has the shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    kind, asked = kind_of(got), kind_of(expected)
    if kind != asked or kind == "integer" and got.dtype != expected.dtype:
        return f"is {kind} ({got.dtype}), expected {asked} ({expected.dtype})"
    return ""
