"""Relations that name a mistake nobody listed: wrong sign, scaled, shifted, late, a sum.

The right result is (1, 2, 4): then (2, 4, 8) is scaled, (0, 1, 2) and (1, 2, 5) are nothing, since
a relation is named only if it holds for all plain inputs with enough numbers. A result is compared
as a whole: its sign, a common factor or difference, a function, a shift in time, an exchange of
dimensions, a sum in the place of a mean, an argument too many, the place where it is wrong.
"""

__all__ = ['related', 'combined', 'row_by_row', 'only_where']

import torch

from .outcomes import close, each_close


def related(pairs: list) -> tuple | None:
    "(name, sentence) of the relation between all of yours and all that is right; or None."
    pairs = [(y.double(), x.double()) for y, x in pairs]
    if not all(t.isfinite().all() for pair in pairs for t in pair): return None
    if len(_numbers(y for y, _ in pairs)) == 1 < len(_numbers(x for _, x in pairs)):
        return "constant", f"Yours is {pairs[0][0].flatten()[0]:.4g} on every input tried."
    for name, sentence, least, parts in _relations(pairs):
        try:
            both = [parts(y, x) for y, x in pairs]
        except (IndexError, RuntimeError): continue
        told = len(_numbers(b for _, b in both) - ({0.0} if least > 2 else set()))
        if told >= least and all(close(a, b) for a, b in both): return name, sentence
    return None


def _numbers(tensors): return {v for t in tensors for v in t.flatten().tolist()}

_FUNCTIONS = {"1 minus": lambda x: 1 - x, "1 divided by": lambda x: 1 / x,
              "the exponential of": torch.exp, "the logarithm of": torch.log,
              "the square of": torch.square, "the square root of": torch.sqrt,
              "the absolute value of": torch.abs, "the positive part of": torch.relu}


def _relations(pairs):
    "(name, sentence, numbers that it takes, (yours, right) -> two tensors that shall agree)."
    same = [(y, x) for y, x in pairs if y.shape == x.shape]
    y, x = (torch.cat([t.flatten() for t in ts]) for ts in zip(*same)) if same else pairs[0]
    if y.shape == x.shape:
        scale, shift = (y * x).sum() / (x * x).sum(), (y - x).mean()
        size = "large" if shift > 0 else "small"
        yield "sign", "The sign is flipped.", 2, lambda y, x: (-y, x)
        yield "scaled", f"All of it is {scale:.4g} times what it should be.", 3, (
            lambda y, x: (y / scale, x))
        yield "shifted", f"All of it is {abs(shift):.4g} too {size}.", 3, (
            lambda y, x: (y - shift, x))
        yield "late", "Each value stands one step too late.", 3, lambda y, x: (y[1:], x[:-1])
        yield "early", "Each value stands one step too early.", 3, lambda y, x: (y[:-1], x[1:])
        yield "reversed", "The order is reversed.", 3, lambda y, x: (y.flip(0), x)
        for text, of in _FUNCTIONS.items():
            yield "function", f"Yours is {text} what is asked for.", 2, lambda y, x: (y, of(x))
    yield "transposed", "Rows and columns are exchanged.", 3, lambda y, x: (y.transpose(0, 1), x)
    if all(y.numel() == x.numel() for y, x in pairs): return
    for text, dims in ((" over its last dimension", -1), ("", None)):
        yield "not_averaged", f"The mean of yours{text} is right.", 2, (
            lambda y, x: (y.mean(dims), x))
        yield "not_summed", f"The sum of yours{text} is right.", 2, lambda y, x: (y.sum(dims), x)
    yield "last", "Yours is the last of what is asked for.", 2, lambda y, x: (y, x[-1])
    yield "summed", "Yours is the sum of what is asked for.", 2, lambda y, x: (y, x.sum())
    yield "averaged", "Yours is the mean of what is asked for.", 2, lambda y, x: (y, x.mean())


def combined(pairs: list, cases: list) -> tuple | None:
    "The argument, or its size, that yours and what is right differ by."
    sizes = [*map(_sizes, cases)]
    if any(y.shape != x.shape for y, x in pairs): return None
    for name in sizes[0]:
        both = [(y.double(), x.double(), size[name]) for size, (y, x) in zip(sizes, pairs)]
        if any(a.ndim and a.shape != x.shape for _, x, a in both): continue
        for text, of in _OPERATIONS.items():
            made = [of(x, a) for _, x, a in both]
            if len(_numbers(made)) > 1 and all(close(y, m) for (y, _, _), m in zip(both, made)):
                return "combined", f"Yours is {text.format(x='what is asked for', a=name)}."
    return None

_OPERATIONS = {"{x} times {a}": lambda x, a: x * a, "{x} divided by {a}": lambda x, a: x / a,
               "{x} plus {a}": lambda x, a: x + a, "{x} minus {a}": lambda x, a: x - a,
               "{a} minus {x}": lambda x, a: a - x}


def _sizes(case):
    "{text: 0-dim or floating-point tensor} of the arguments."
    found = {}
    for name, v in case.items():
        parts = v if isinstance(v, list) else [torch.as_tensor(v)]
        flat = torch.cat([part.flatten() for part in parts])
        flag = flat.dtype == torch.bool
        found |= {} if flag or isinstance(v, list) else {name: v}
        found |= {f"the length of {name}": len(v) if flat.numel() > 1 else 1,
                  f"the last dimension of {name}": (*parts[0].shape, 1)[parts[0].ndim - 1],
                  f"the number of elements of {name}": flat.numel()}
        found |= {f"the number of True values of {name}": flat.sum()} if flag else {}
    return {name: torch.as_tensor(n) for name, n in found.items()}


def row_by_row(pairs: list) -> tuple | None:
    "A factor or a difference that changes from row to row."
    if any(y.shape != x.shape or not x.ndim or not x.numel() for y, x in pairs): return None
    rows = [(y.double().flatten(0, -2), x.double().flatten(0, -2)) if x.ndim > 1
            else (y.double()[None], x.double()[None]) for y, x in pairs if not close(y, x)]
    if sum(x.numel() - len(x) for _, x in rows) < 3: return None
    factors = [((y * x).sum(1) / (x * x).sum(1))[:, None] for y, x in rows]
    shifts = [(y - x).mean(1, keepdim=True) for y, x in rows]
    for text, numbers, of in (("factor", factors, torch.div), ("difference", shifts, torch.sub)):
        if all(close(of(y, n), x) for (y, x), n in zip(rows, numbers)):
            least, most = torch.cat(numbers).aminmax()
            return "row_by_row", (f"Yours is right but for a {text} in each row, from {least:.4g} "
                                  f"to {most:.4g}.")
    return None


def only_where(pairs: list, cases: list) -> tuple | None:
    "The narrowest condition that holds wherever yours is wrong, and mostly nowhere else."
    if any(y.shape != x.shape or not x.ndim for y, x in pairs): return None
    def joined(tensors): return torch.cat([t.flatten() for t in tensors])
    holds = {}
    for text, i in (("at the beginning", 0), ("at the end", -1)):
        place = [torch.zeros_like(x, dtype=torch.bool) for _, x in pairs]
        for p in place:
            p[i] = True
        holds[text] = joined(place)
    for name in cases[0]:
        values = [case[name] for case, _ in zip(cases, pairs)]
        if any(getattr(v, "shape", None) != x.shape for v, (_, x) in zip(values, pairs)): continue
        a = joined(values)
        tests = {"True": a, "False": ~a} if a.dtype == torch.bool else {
            "positive": a > 0, "negative": a < 0}
        holds |= {f"where {name} is {value}": test for value, test in tests.items()}
    wrong = joined(~each_close(y, x) for y, x in pairs)
    told = joined(x for _, x in pairs) != 0                # a mask says nothing where all is 0
    found = [(int(test.sum()), text) for text, test in holds.items() if (told & ~test).any()
             and not (wrong & ~test).any() and 2 * wrong.sum() >= test.sum()]
    return ("where", f"Here yours is wrong only {min(found)[1]}.") if found else None
