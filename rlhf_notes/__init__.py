"""Every formula of PPO, GRPO and RLHF: explained, proved, drawn, and shipped as a library

All of `rlhf_notes.formulas` and `rlhf_notes.compat` can be imported from here, as can `PPO`,
`RLHF`, `check` and `fast`; a module is loaded when one of its names is first asked for.
"""

__version__ = "0.2.0"

import re as _re
import sys as _sys
from difflib import get_close_matches as _get_close_matches
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path

from . import _moved

_moved.install()


def _read(file): return (_Path(__file__).parent / file).read_text(encoding="utf-8")


def _names():
    "Public name -> module, as `__init__.pyi` says; of a star, what the module's `__all__` lists."
    found = {}
    stub = _read("__init__.pyi")
    for module, names in _re.findall(r"^from \.(\w[\w.]*) import (.+)$", stub, _re.M):
        if names == "*":
            source = _read(module.replace(".", "/") + ".py")
            names = _re.search(r"^__all__ = (\[.*?\])", source, _re.M | _re.S)[1]
        found |= dict.fromkeys(_re.findall(r"\w+(?= as|')", names), module)
    return found


_MODULE_OF = _names()
__all__ = [*_MODULE_OF, "fast"]


def __getattr__(name):
    if name == "fast":
        value = _import_module(".fast", __name__)
    elif name in _MODULE_OF:
        value = getattr(_import_module(f".{_MODULE_OF[name]}", __name__), name)
        _import_module("._docstrings", __name__).explain(value)
    else:
        raise _missing(name, _sys._getframe(1).f_code.co_name == "_handle_fromlist")
    globals()[name] = value
    return value


def _missing(name, imported):
    "The error, with a hint; `from rlhf_notes import` would replace an AttributeError by its own."
    near = " or ".join(map(repr, _get_close_matches(name, __all__)))
    hint = f"; did you mean {near}?" if near else ""
    place = _moved.PLACES.get(f"{__name__}.{name}")
    hint = f"; it was removed, use {place}" if place else hint
    if imported and (place or _find_spec(f"{__name__}.{name}") is None):
        return ImportError(f"cannot import name {name!r} from {__name__!r}{hint}", name=name)
    return AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__():
    return sorted({*globals(), *__all__})
