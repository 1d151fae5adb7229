"""A loss that takes one batch, a mapping or an object: its keys become parameters."""

__all__ = ["EMPTY", "Pack", "opened"]

import inspect
import re

import torch

from .names import role_of, usual_number

EMPTY = inspect.Parameter.empty
SELF = ("to", "cuda", "cpu", "contiguous", "detach", "clone", "float")  # methods that give a batch


class Pack(dict):
    "A batch whose values are items and attributes alike; `make` stands in for missing keys."
    make = None  # (key, default) -> a value to go on with

    def get(self, key, default=None):
        "The value of a key, the default, or what `make` gives."
        if dict.__contains__(self, key): return dict.__getitem__(self, key)
        if self.make: return self.make(key, default)
        if default is EMPTY: raise KeyError(key)
        return default

    def pop(self, key, default=EMPTY): return self.get(key, default)
    def __getitem__(self, key): return self.get(key, EMPTY)
    def __contains__(self, key): return bool(self.make) or dict.__contains__(self, key)

    @property
    def values(self): return self["values"]

    def __getattr__(self, key):
        if key in SELF: return lambda *_, **__: self
        if key.startswith("_"): raise AttributeError(key)
        try: return self[key]
        except KeyError: raise AttributeError(key) from None


def _dummy(key, flat):  # advantages (B,) or (B, T)
    role, (B, T) = role_of(key), (4, 5)
    if role is None and usual_number(key) is not None: return usual_number(key)
    if role in ("mask", "padding"): return torch.full((B, T), role == "mask")
    if role in ("labels", "index"): return torch.zeros(B, T, dtype=torch.long)
    if role == "logits": return torch.zeros(B, T, 6)
    return torch.zeros(B, T)[:, 0 if flat and role in ("advantage", "rewards", "lengths") else ...]


def _keys(call, name, needed):
    "The keys that a call asks of its batch: key -> default."
    asked, pack = {}, Pack()
    def make(key, default):
        asked[key] = default
        return _dummy(key, flat) if default is EMPTY or default is None else default
    pack.make = make
    for flat in (False, True):
        try:
            call(**{n: _dummy(n, flat) for n in needed}, **{name: pack})
        except TimeoutError: raise
        except (Exception, SystemExit): pass
    def is_key(k):  # x.sum() asks a tensor, not a batch
        return role_of(k) or not hasattr(torch.Tensor, k) and not hasattr(dict, k)
    return {k: d for k, d in asked.items() if isinstance(k, str) and is_key(k)}


def opened(function, parameters: dict, known: set) -> tuple | None:  # known: names that were given
    """A function whose one parameter without meaning is a batch, as (a function of the batch's
    keys, its parameters, the batch's name); None if there is no batch."""
    needed = [n for n, p in parameters.items() if p.default is EMPTY and n not in known]
    strange = [n for n in needed if not role_of(n) and usual_number(n) is None]
    strange = needed if len(needed) == 1 and role_of(needed[0]) == "x" else strange
    if len(strange) != 1 or any(p.kind is p.POSITIONAL_ONLY for p in parameters.values()):
        return None
    name, = strange
    made, make = parameters[name].annotation, Pack
    if fields := getattr(made, "_fields", None):
        keys, make = {n: made._field_defaults.get(n, EMPTY) for n in fields}, lambda x: made(**x)
    else:
        keys = _keys(function, name, [n for n in needed if n != name])
    plain = {re.sub(r"\W", "_", k): k for k in keys}
    if not plain or plain.keys() & parameters.keys(): return None
    def call(**values):
        inside = {plain[n]: values.pop(n) for n in list(values) if n in plain}
        if not fields:
            inside = {k: x for k, x in inside.items() if x is not None or keys[k] is EMPTY}
        return function(**{name: make(inside)}, **values)
    kind = inspect.Parameter.KEYWORD_ONLY
    taken = {n: inspect.Parameter(n, kind, default=keys[k]) for n, k in plain.items()}
    return call, taken | {n: p for n, p in parameters.items() if n != name}, name
