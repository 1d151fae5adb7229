"""Reads what losses, advantages and log-probabilities compute, by what they do with probes."""

__all__ = ["identify"]

import sys
from types import ModuleType

from .calls import LIMIT, Subject, Unreadable, time_limit
from .gae import read_gae
from .groups import read_group_advantage
from .losses import read_kl, read_preference_loss, read_value_loss
from .masks import read_aggregate, read_whiten, read_x
from .names import KINDS
from .policy import read_policy
from .report import Report
from .tokens import read_entropy, read_log_prob

READERS = {"policy_loss": read_policy, "value_loss": read_value_loss, "gae": read_gae,
           "group_advantage": read_group_advantage, "kl": read_kl, "log_prob": read_log_prob,
           "entropy": read_entropy, "aggregate": read_aggregate, "whiten": read_whiten,
           "preference_loss": read_preference_loss, "x": read_x}


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
    subject = Subject(function, names, options)
    subject.guessed = kind is None
    kind = kind or subject.guess()
    if kind is None:
        raise Unreadable(f"kind must be given, as the names of {subject.name} do not tell it: "
                         f"{', '.join(subject.parameters)} are understood as "
                         f"{subject.understood()}; a batch is read by keys or attributes, not by "
                         "position: write a function of its tensors around it")
    subject.layout = layout
    try:
        with time_limit(LIMIT):
            report = READERS[kind](subject)
    except TimeoutError:
        raise Unreadable(f"{subject.name} took more than {LIMIT:g} s in {subject.calls} calls: an "
                         "endless loop, or too slow to be read") from None
    if subject.changed:
        report.find("in-place", f"a call changes {' and '.join(sorted(subject.changed))} of its "
                                "caller")
    if subject.printed:
        report.notes.append(f"it prints: {subject.printed.splitlines()[0][:80]}")
    return report


class _Callable(ModuleType):
    "`rlhf_notes.identify` is this module and the function alike."

    def __call__(self, *args, **kwargs): return identify(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
