"""Reads what losses, advantages and log-probabilities compute, by what they do with probes."""

__all__ = ["identify"]

import sys
from types import ModuleType

from .calls import LIMIT, Subject, Unreadable, time_limit
from .gae import GAE
from .groups import GroupAdvantage, discounts
from .losses import KL, PreferenceLoss, ValueLoss
from .masks import Aggregate, Whiten, reduces
from .names import KINDS
from .policy import PolicyLoss
from .report import Report
from .tokens import Entropy, LogProb

READERS = {reader.kind: reader for reader in (
    PolicyLoss, ValueLoss, GAE, GroupAdvantage, KL, LogProb, Entropy, Aggregate, Whiten,
    PreferenceLoss)} | {"x": reduces, "returns": discounts}


def identify(
    function,  # of tensors: a function, a method, a partial or a module with `forward`
    kind: str | None = None,  # one of `KINDS`; None = from the parameters' names
    names: dict | None = None,  # {"logp": "lp"}: parameters whose names are not known
    options: dict | None = None,  # values of parameters: numbers, modes, a config object
    layout: str | None = None,  # "BT", "TN" (time first), or None: found out
) -> Report:  # `.right`, `.formula`, `.facts`, `.findings`, `.cautions`, `.plot()`
    "Read what a function computes from what it does with probes."
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if layout not in (None, "BT", "TN"):
        raise ValueError(f'layout must be "BT", "TN" or None, got {layout!r}')
    subject = Subject(function, names, options, layout, guessed=kind is None)
    kind = kind or subject.guess()
    if kind is None:
        raise Unreadable(f"kind must be given, as the names of {subject.name} do not tell it: "
                         f"{', '.join(subject.parameters)} are understood as "
                         f"{subject.understood()}; a batch is read by keys or attributes, not by "
                         "position: write a function of its tensors around it")
    try:
        with time_limit(LIMIT):
            return READERS[kind](subject).reading()
    except TimeoutError:
        raise Unreadable(f"{subject.name} took more than {LIMIT:g} s in {subject.calls} calls: an "
                         "endless loop, or too slow to be read") from None


class _Callable(ModuleType):
    "`rlhf_notes.identify` is this module and the function alike."

    def __call__(self, *args, **kwargs): return identify(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
