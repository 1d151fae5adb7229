"""Functions called with other arguments than they are given: a forgotten discount is one of 1.

The right function, called with something else in place of an argument, gives the result of a
reader who forgot, doubled, negated or mixed up this argument; with a term switched off, a wrong
function may become right, and so tell which term is wrong.
"""

__all__ = ['substitutes', 'switches', 'varied']

import torch


def substitutes(case: dict) -> dict:
    """Ways to call a function with other arguments, or along other dimensions.

    {(new, argument) or (dimensions,): function -> function of the same arguments}.
    """
    changes = _replaced(case) | ({("padding counted as zeros",): _zeros} if "mask" in case else {})
    def by(change): return lambda f: lambda *args: f(*change(dict(zip(case, args))).values())
    return {key: by(change) for key, change in changes.items()} | {
        ("rows and columns exchanged",): _turned, ("all rows in one",): _in_one_row,
        ("each row by itself",): _by_rows,
        ("each row by itself, averaged",): lambda f: lambda *args: _by_rows(f)(*args).mean()}

_CONSTANTS = {"0": lambda v: v * 0, "1": lambda v: v * 0 + 1}
_FLAGS = {"True": lambda v: v | True, "False": lambda v: v & False}
_NUMBERS = _CONSTANTS | {"-{}": lambda v: -v}
_CHANGES = {torch.float32: _NUMBERS, float: _NUMBERS | {
                "2 {}": lambda v: v * 2, "half of {}": lambda v: v / 2,
                "{} squared": lambda v: v ** 2, "1 / {}": lambda v: 1 / v},
            int: {"{} + 1": lambda v: v + 1, "{} - 1": lambda v: v - 1},
            bool: _FLAGS | {"not {}": lambda v: not v},
            torch.bool: _FLAGS | {"not {}": lambda v: ~v}}


def _kind(v): return v.dtype if isinstance(v, torch.Tensor) else type(v)


def _sort(v): return _kind(v), getattr(v, "shape", None)


def _replaced(case):
    "{(new, argument) or (both exchanged,): arguments by name -> other arguments}."
    found = {}
    for name, v in case.items():
        for new, change in _CHANGES.get(_kind(v), {}).items():
            found[new.format(name), name] = (
                lambda x, name=name, change=change: x | {name: change(x[name])})
        for other in case:
            if other == name or _sort(case[other]) != _sort(v): continue
            found[other, name] = lambda x, name=name, other=other: x | {name: x[other]}
            found[" and ".join(sorted([name, other])) + " exchanged",] = (
                lambda x, name=name, other=other: x | {name: x[other], other: x[name]})
    return found


def _zeros(case):
    "Zeros where the mask is False, and a mask that is True."
    mask = case["mask"]
    def zero(v): return torch.where(mask, v, 0.0) if v.shape == mask.shape else v
    return {k: zero(v) if _kind(v) == torch.float32 else v for k, v in case.items()} | {
        "mask": mask | True}


def _grid(x): return isinstance(x, torch.Tensor) and x.ndim == 2


def _shape(args): return next((x.shape for x in args if _grid(x)), None)


def _turned(f):
    def turn(x): return x.T if _grid(x) else x
    return lambda *args: turn(f(*map(turn, args)))


def _in_one_row(f):
    def g(*args):
        shape = _shape(args)
        y = f(*(x.reshape(1, -1) if _grid(x) else x for x in args))
        return y.reshape(shape) if shape and y.numel() == shape.numel() else y
    return g


def _by_rows(f):
    def g(*args):
        if not _shape(args): return f(*args)
        n = _shape(args)[0]
        def row(x, i): return x[i:i + 1] if isinstance(x, torch.Tensor) and len(x) == n else x
        rows = [f(*(row(x, i) for x in args)) for i in range(n)]
        return torch.cat(rows) if rows[0].ndim else torch.stack(rows)
    return g


def switches(case: dict) -> dict:
    """Ways to call a function with an argument 0, 1, True, False, or as a later one, or with less.

    {(new, argument) or (part,): function -> function of the same arguments}.
    """
    def off(new, name): return new in {*_CONSTANTS, *_FLAGS} or new in [*case][[*case].index(name):]
    def first(n): return lambda f: lambda *args: f(*(_first(v, n) for v in args))
    return {key: change for key, change in substitutes(case).items()
            if len(key) == 2 and off(*key)} | {
        ("one element alone",): first(1), ("the first two elements alone",): first(2)}


def _first(v, n):
    if isinstance(v, list): return v[:n]
    return v[..., :n] if isinstance(v, torch.Tensor) and v.ndim else v


def varied(case: dict, seed: int) -> dict:
    """Shuffle tensors and scale them by 0.5 to 2, so that nothing holds by accident.

    Numbers become up to a quarter smaller.
    """
    g = torch.Generator().manual_seed(seed)
    def other(v):
        if isinstance(v, list): return [*map(other, v)]
        if isinstance(v, float): return v * (1 - torch.rand((), generator=g).item() / 4)
        if not isinstance(v, torch.Tensor) or v.dtype == torch.bool: return v
        v = v.flatten()[torch.randperm(v.numel(), generator=g)].reshape(v.shape)
        return v * 2 ** (2 * torch.rand(v.shape, generator=g) - 1) if v.is_floating_point() else v
    return {name: other(v) for name, v in case.items()}
