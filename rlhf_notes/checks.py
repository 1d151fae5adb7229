"""Errors that name the argument, what came and what was expected; float32 or better inside.

An advantage of shape $(B,)$ against a ratio of shape $(B, T)$ with $B = T$ broadcasts: the loss is
a number, and training goes nowhere. Of three responses of three tokens, the first good, the second
bad, the third as expected, the product raises the first token of every response, even of the bad
one. Plain PyTorch notices neither that, nor values of shape (B, 1) beside returns of shape (B,),
nor integers for a mask, which it takes for positions, nor a discount of 99.

So every public function checks types, shapes and plain numbers, never values inside a tensor;
`torch.compile` and `torch.func.vmap` pass. A number that float32 rounds to 0 is refused wherever 0
is, and one that it rounds to infinity everywhere.

*Precision.* A bfloat16 carries two to three digits, and a running sum of tenths stops growing at
32; in float16 an exponential overflows at 11.1. Formulas compute in float32 or better: halves are
widened, float64 stays float64, complex numbers are refused. Back through the same door, a float16
gradient ends at 65504: that of a ratio of $e^{12}$ comes back as 65504, not as infinity, which the
next layer would turn into NaN.

*Numbers* are an int or a float of Python's; `np.float64` inherits from float, and a whole number of
any kind becomes an int. NumPy's other scalars calculate in their own precision and range.
"""

__all__ = ['KINDS', 'ENDS', 'checked', 'defaults_after', 'check_value', 'check_partner', 'named_by',
           'check_read', 'under_its_name', 'told_as', 'pick', 'over_dim', 'check_context',
           'at_least_float32', 'widest_float']

import functools
import inspect
import re
from contextlib import contextmanager
from numbers import Integral

import torch


def checked(
    fast=None,  # runs in the function's place, unless it returns NotImplemented
    **rules,  # name of an argument -> what it must be
):  # a decorator
    """Check each argument that has a rule before the call.

    "float (T ...)"     a tensor of that kind and shape: a letter is the same size wherever it
                        stands, `...` the same leading or trailing shape
    "bool (T ...)?"     the same, or None
    "int (... K?)"      the last size may be absent, if the number of the others is known
    "float (...V)"      any shape, of its own
    "[0, 1]" "(0, inf)" a number in that interval; "int [1, inf)" a whole one
    "flag"              True or False
    ("k1", "k2")        one of these names

    Kinds: float (half precision comes in as float32), number (the same, from integers and booleans
    too), raw (floating, as it came), float32, real (any of these, as it came), int, bool.
    All tensors must be on one device.
    """
    def decorate(f):
        names, later = tuple(inspect.signature(f).parameters), defaults_after(f)
        checks = [(i, name, _rule(name, rules[name]))
                  for i, name in enumerate(names) if name in rules]
        if fast is not None:
            fast.plain = f

        @functools.wraps(f)
        def call(*args, **kwargs):
            values, seen = list(args), {}
            for i, name, check in checks:
                if i < len(args):
                    values[i] = check(args[i], seen)
                elif name in kwargs:
                    kwargs[name] = check(kwargs[name], seen)
            given = later[min(len(args), len(names))] | kwargs
            out = NotImplemented if fast is None else fast(*values, **given)
            return f(*values, **kwargs) if out is NotImplemented else out
        # torch.compile counts recompilations by code object
        call.__code__ = call.__code__.replace(co_name=f.__name__)
        return call
    return decorate


def defaults_after(f):  # -> a dict for each count of arguments: the defaults of those that follow
    "A default stands in the plain function alone; what is quicker gets it from here."
    parameters = inspect.signature(f).parameters.values()
    has = [(p.name, p.default) for p in parameters]
    return [{name: x for name, x in has[i:] if x is not inspect.Parameter.empty}
            for i in range(len(has) + 1)]

def _rule(name, rule):
    "The check of one argument: (value, shapes seen so far) -> the value that the function gets."
    if not isinstance(rule, str): return _choice(name, rule)
    optional, rule = rule.endswith("?"), rule.removesuffix("?")
    if rule == "flag":
        check = _flag(name)
    elif m := re.fullmatch(r"(int )?([\[(])(\S+), (\S+)([\])])", rule):
        check = _number(name, *m.groups())
    elif m := re.fullmatch(r"(\w+) \((.*)\)", rule):
        check = _tensor(name, m[1], tuple(m[2].split()))
    else: raise ValueError(f"{name} has an unknown rule, {rule!r}")
    return (lambda x, seen: x if x is None else check(x, seen)) if optional else check


_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max

def _choice(name, choices):
    def check(x, seen):
        if (x is None or isinstance(x, str)) and x in choices: return x
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {x!r}")
    return check

def _flag(name):
    def check(x, seen):
        if isinstance(x, bool): return x
        raise TypeError(f"{name} must be True or False, got {x!r}{_hint(x)}")
    return check

def _number(name, whole, left, low, high, right):
    interval, low, high = f"{left}{low}, {high}{right}", float(low), float(high)

    def check(x, seen):
        if whole and isinstance(x, Integral) and not isinstance(x, bool):
            x = int(x)
        if isinstance(x, bool) or not isinstance(x, (int, float)):
            raise TypeError(f"{name} must be a number, got {type(x).__name__}{_hint(x)}")
        if whole and isinstance(x, float): raise TypeError(f"{name} must be an integer, got {x}")
        above, below = x > low or x == low and left == "[", x < high or x == high and right == "]"
        if not (above and below): raise ValueError(f"{name} must be in {interval}, got {x}")
        vanishes = left == "(" and low == 0 and x < _TINY
        if not whole and (vanishes or abs(x) > _HUGE):
            raise ValueError(f"{name} must be in {interval} and fit float32, got {x}")
        return x
    return check

def _hint(x):
    return ", whose .item() is Python's own" if getattr(x, "ndim", None) == 0 else ""


KINDS = {
    "real": (lambda x: not x.is_complex(), "be real"),
    "number": (lambda x: not x.is_complex(), "be real"),
    "float": (torch.Tensor.is_floating_point, "have a floating-point dtype"),
    "raw": (torch.Tensor.is_floating_point, "have a floating-point dtype"),
    "float32": (lambda x: x.dtype == torch.float32, "have dtype torch.float32"),
    "int": (lambda x: not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool),
            "have an integer dtype"),
    "bool": (lambda x: x.dtype == torch.bool, "be boolean (True = counts)"),
    "end": (lambda x: x.dtype == torch.bool, "be boolean (True = it ended)"),
}

ENDS = "terminated", "truncated", "done"

def _tensor(name, kind, dims):
    is_kind, wanted = KINDS["end" if name in ENDS else kind]
    cure = f"; {name}.bool() is" if kind == "bool" else ""
    one, many = dims[:-1], tuple(dim.removesuffix("?") for dim in dims)
    at = next((i for i, dim in enumerate(many) if dim.startswith("...")), None)
    is_open = dims != many

    def check(x, seen):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if not is_kind(x): raise TypeError(f"{name} must {wanted}, got {x.dtype}{cure}")
        device, first = seen.setdefault("device", (x.device, name))
        if device != x.device:
            raise ValueError(f"{name} must be on the device of {first}, {device}, got {x.device}")
        known = len(one) if at is None else len(one) - 1 + len(seen.get("...", ["" * 99])[0])
        absent = is_open and x.ndim == known
        dims = one if absent else many
        if dims not in seen:
            _match(name, x, dims, at, seen)
        elif x.shape != seen[dims][0]:
            shape, first = seen[dims]
            turned = f"; {name}.T has it" if x.ndim == 2 and x.T.shape == shape else ""
            raise ValueError(f"{name} must have the shape of {first}, {tuple(shape)}, "
                             f"got {tuple(x.shape)}{turned}")
        return at_least_float32(x) if kind in ("float", "number") else x
    return check

def _match(name, x, dims, at, seen):
    "Match the shape of x with the pattern, and with the sizes of its letters seen before."
    sizes = _sizes(tuple(x.shape), dims, at)
    if sizes is None: raise _misfit(name, x, dims)
    found = {}
    for dim, size in zip(dims, sizes):
        known, first = seen.get(dim) or found.setdefault(dim, (size, name))
        if known != size:
            turned = x.ndim == 2 and all(
                seen.get(d, (n,))[0] == n for d, n in zip(dims, _sizes(x.shape[::-1], dims, at)))
            raise _misfit(name, x, dims, f" with {dim} = {known}, as {first} has", turned)
    seen |= found | {dims: (x.shape, name)}

def _sizes(shape, dims, at):  # -> of each letter, `...` a tuple of them; None = too many or too few
    if at is not None and len(shape) >= len(dims) - 1:
        end = at + len(shape) - len(dims) + 1
        shape = *shape[:at], tuple(shape[at:end]), *shape[end:]
    return shape if len(shape) == len(dims) else None

def _misfit(name, x, dims, where="", turned=False):
    wanted = f"the shape ({', '.join(dims)}){where}"
    cure = f"; {name}.T has it" if turned else ""
    return ValueError(f"{name} must have {wanted}, got {tuple(x.shape)}{cure}")


def check_value(name, value, rule):  # name of the argument, what came, a rule as for `checked`
    "Check one value by one rule."
    return _rule(name, rule)(value, {})


def check_partner(name, x, usual, **options):  # defaults; options of x: its weight, then others
    """ValueError if an option is given and the argument `name`, without which it has no effect, is
    not; a weight of 0 wants no partner either."""
    if x is not None: return
    (option, weight), *_ = options.items()
    if weight not in (0, usual[option]):
        raise ValueError(f"{name} must be given with {option}={weight!r}, its weight, got None")
    check_read(usual, {None: (option,)}, **{name: None}, **options)


def named_by(f):  # a function that may leave others to **_
    "Names of the arguments that a function reads."
    every = inspect.signature(f).parameters.values()
    return frozenset(p.name for p in every if p.kind is not p.VAR_KEYWORD)


def check_read(usual, reads, **given):  # defaults, case -> names that it reads, case and arguments
    "ValueError if an argument that the case, the first, does not read is not at its default."
    (name, case), *others = given.items()
    for option, x in others:
        alone = isinstance(x, torch.Tensor)
        if option not in reads[case] and (alone or x != usual[option]):
            came = "a tensor" if alone else repr(x)
            raise ValueError(f"{option} must be {usual[option]!r} for {name}={case!r}, got {came}")


def under_its_name(name, f, *args, **kwargs):  # its caller's name, a function, its arguments
    "f(*args, **kwargs); an error about `index` is told under the caller's name."
    try: return f(*args, **kwargs)
    except ValueError as e:
        if not str(e).startswith("index "): raise
        raise ValueError(name + str(e).removeprefix("index")) from e


@contextmanager
def told_as(names: dict):  # argument -> the option that it came from
    "A ValueError or TypeError that begins with one of the arguments begins with its option."
    try:
        yield
    except (ValueError, TypeError) as e:
        ours, _, rest = str(e).partition(" ")
        if ours not in names: raise
        raise type(e)(f"{names[ours]} {rest}") from e


def pick(x, index):  # (..., V), (..., K) int64 -> (..., K)
    "Gather along the last dimension; ValueError if `index` leads beyond it."
    try: return x.gather(-1, index)
    except (IndexError, RuntimeError) as e:
        if "out of bounds" not in str(e): raise
        n = x.shape[-1]
        raise ValueError(f"index must be between 0 and {n - 1}, the last of {n} choices: {e}")


def over_dim(f, x, dim, keepdim):  # torch.sum or mean, (...), dimensions or None, True keeps them
    "f(x, dim, keepdim); ValueError if `dim` is not a dimension of x, or names one twice."
    try: return f(x, dim, keepdim)
    except (IndexError, RuntimeError, TypeError, ValueError) as e:
        if not any(told in str(e).lower() for told in ("dim", "overflow")): raise
        raise ValueError(f"dim must be None, or different dimensions of x, got {dim!r}: {e}")


def check_context(lm, **lengths):  # a model of transformers, name of an argument -> its tokens
    "ValueError, which names the longest, unless all fit together into the model's context."
    limit = getattr(lm.config, "max_position_embeddings", None)
    rope = getattr(lm.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # a longer text has other positions from its start
        limit = rope["original_max_position_embeddings"]
    if limit is None or sum(lengths.values()) <= limit: return
    raise ValueError(f"{max(lengths, key=lengths.get)} must fit into the model's context of "
                     f"{limit} tokens, got {' + '.join(map(str, lengths.values()))}")


def at_least_float32(x: torch.Tensor) -> torch.Tensor:  # (...), any real dtype -> (...)
    "float64 as it came, all else as float32; gradients too large for float16 saturate."
    if x.dtype in (torch.float32, torch.float64): return x
    if x.is_complex(): raise TypeError(f"x must be real, got {x.dtype}")
    return _Widen.apply(x) if x.dtype == torch.float16 else x.float()

class _Widen(torch.autograd.Function):
    "float16 to float32; back, a gradient stays within the range of float16."
    generate_vmap_rule = True

    @staticmethod
    def forward(x): return x.float()

    @staticmethod
    def setup_context(ctx, inputs, output): pass

    @staticmethod
    def backward(ctx, grad): return grad.clamp(-65504, 65504).half()


def widest_float(x: torch.Tensor) -> torch.dtype:  # x: any tensor
    "float64, or float32 on a device without it (MPS)."
    return torch.float32 if x.device.type == "mps" else torch.float64
