"""Every formula of PPO, GRPO and RLHF: explained, proved, drawn, and shipped as a library.

All of `rlhf_notes.formulas` can be imported from here; a module is loaded when one of its names is first asked for.
"""
__version__ = "0.1.0"

from importlib import import_module as _import_module

_FORMULAS = ("masking", "logprob", "ratio", "surrogate", "value", "kl", "whitening", "advantage", "reward")


def _names():
    return [name for m in _FORMULAS for name in _import_module(f".formulas.{m}", __name__).__all__]


def __getattr__(name):
    if name == "__all__":
        return _names()
    if not name.startswith("_"):
        for m in _FORMULAS:
            try: module = _import_module(f".formulas.{m}", __name__)
            except ModuleNotFoundError: continue
            if name in module.__all__:
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_names()])
