"""A loss that takes one batch, a mapping or an object: its keys become parameters."""

__all__ = ["Pack", "opened"]

import inspect
import re

import torch

from .names import role_of, usual_number

EMPTY = inspect.Parameter.empty
SELF = ("to", "cuda", "cpu", "contiguous", "detach", "clone", "float")  # methods that give a batch


class Pack(dict):
    "A batch whose values are items and attributes alike; it notes what is asked of it."

    def __init__(self, values, asked=None, make=None):
        super().__init__(values)
        self.asked, self.make = asked, make  # key -> default; key -> a tensor to go on with

    def _found(self, key, default=EMPTY):
        if dict.__contains__(self, key): return dict.__getitem__(self, key)
        if self.asked is None or not isinstance(key, str):
            if default is EMPTY: raise KeyError(key)
            return default
        before = self.asked.get(key, default)
        self.asked[key] = default if before is EMPTY or default is EMPTY else before
        if default is EMPTY:
            self.asked[key] = EMPTY
        return self.make(key) if default in (EMPTY, None) else default

    def __getitem__(self, key): return self._found(key)
    def get(self, key, default=None): return self._found(key, default)
    def pop(self, key, default=EMPTY): return self._found(key, default)

    def __contains__(self, key):
        if self.asked is not None:
            self.asked.setdefault(key, None)
            return True
        return dict.__contains__(self, key)

    def __getattribute__(self, key):
        own = key.startswith("_") or key in ("asked", "make", "get", "pop", "keys", "items")
        if own: return super().__getattribute__(key)
        if key in SELF and not dict.__contains__(self, key): return lambda *_, **__: self
        try: return self._found(key)
        except KeyError: raise AttributeError(key) from None


def _dummy(flat):  # advantages (B,) or (B, T)
    B, T = 4, 5
    def make(key):
        role = role_of(key)
        if role is None and usual_number(key) is not None: return usual_number(key)
        if role == "mask": return torch.ones(B, T, dtype=torch.bool)
        if role == "padding": return torch.zeros(B, T, dtype=torch.bool)
        if role in ("labels", "index"): return torch.zeros(B, T, dtype=torch.long)
        if role == "logits": return torch.zeros(B, T, 6)
        one = flat and role in ("advantage", "rewards", "lengths")
        return torch.zeros(B) if one else torch.zeros(B, T)
    return make


def _keys(call, name, others):
    "The keys that a call asks of its batch: key -> default."
    asked = {}
    for flat in (False, True):
        pack = Pack({}, asked, _dummy(flat))
        try:
            call(**others(_dummy(flat)), **{name: pack})
        except TimeoutError: raise
        except (Exception, SystemExit): pass
    return {k: d for k, d in asked.items()  # x.sum() asks a tensor, not a batch
            if role_of(k) or not hasattr(torch.Tensor, k) and not hasattr(dict, k)}


def opened(
    function,  # with the parameters `parameters`
    parameters: dict,  # name -> inspect.Parameter
    known: set,  # names whose meaning was given
) -> tuple | None:  # (a function of the keys, its parameters, the batch's name), None: no batch
    "A function whose one parameter without meaning is a batch, as a function of the batch's keys."
    needed = [n for n, p in parameters.items() if p.default is EMPTY and n not in known]
    strange = [n for n in needed if not role_of(n) and usual_number(n) is None]
    strange = needed if len(needed) == 1 and role_of(needed[0]) == "x" else strange
    if len(strange) != 1 or any(p.kind is p.POSITIONAL_ONLY for p in parameters.values()):
        return None
    name, = strange
    fields = getattr(parameters[name].annotation, "_fields", None)
    if fields:
        make, given = parameters[name].annotation, parameters[name].annotation._field_defaults
        keys = {n: given.get(n, EMPTY) for n in fields}
    else:
        def others(dummy):
            return {n: dummy(n) for n in needed if n != name}
        make, keys = lambda **values: Pack(values), _keys(function, name, others)
    plain = {re.sub(r"\W", "_", k): k for k in keys}
    if not keys or plain.keys() & parameters.keys(): return None
    def call(**values):
        inside = {plain[n]: values.pop(n) for n in list(values) if n in plain}
        if not fields:
            inside = {k: x for k, x in inside.items() if x is not None or keys[k] is EMPTY}
        return function(**{name: make(**inside) if fields else Pack(inside)}, **values)
    kind = inspect.Parameter.KEYWORD_ONLY
    taken = {n: inspect.Parameter(n, kind, default=keys[k]) for n, k in plain.items()}
    return call, taken | {n: p for n, p in parameters.items() if n != name}, name
