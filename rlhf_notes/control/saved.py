"""A trainer in a file, and what no file holds: networks and schedules of one's own.

A file that could hold any object could also hold a program, which would run as it is read. So the
file holds tensors, numbers and strings: options, networks, the optimizer and the spaces. Nothing
is imported that it names. A step size of one's own is stored as its value at the start, and
loading warns of that; of a module the weights are stored, and loading asks for the module again.
"""

__all__ = ['split_options', 'options_again', 'read_saved', 'told_damage', 'check_sizes',
           'check_kept']

import io
import math
import warnings
from contextlib import contextmanager
from numbers import Real

import numpy as np
import torch
from torch import nn

from .. import __version__
from .config import PPOConfig
from .policy import Agent
from ..training.fit import step_size
from ..training.options import error_text
from ..training.runs import load_checked


def split_options(options: dict) -> tuple:
    """Tell data from code: the options of a config, and what it cannot hold, a network and step
    sizes that are functions."""
    options, own = {k: _plain(x) for k, x in options.items()}, {}
    network = options.pop("network", None)
    if isinstance(network, str):
        options["activation"] = network
    elif isinstance(network, nn.Module):
        own["network"] = network
    elif isinstance(network, (tuple, list)) and all(isinstance(n, int) and n > 0 for n in network):
        own["network"] = tuple(network)
    elif network is not None:
        raise ValueError("network must be widths of hidden layers, an activation or a module, got "
                         f"{network!r}")
    for name in "learning_rate", "clip":
        if callable(options.get(name)):
            own[name] = options[name]
            options[name] = step_size(name, own[name], 1.0)
    return options, own


def _plain(x):
    "A number of NumPy's as Python's, whose kind is checked: a bool is none."
    return x.item() if isinstance(x, np.generic) else x


def options_again(saved: dict, path, options: dict) -> dict:
    "All options of a file's content, with those that change; what is code has to be given again."
    own = {name: x for name, x in saved.get("own", {}).items() if name not in options}
    if "network" in own and own["network"] is None:
        raise ValueError(f"network must be given to load again: {path} holds its weights, no code")
    if lost := [name for name, x in own.items() if x is None]:
        warnings.warn(f"{lost[0]} was a function, of which {path} holds the value at the start",
                      stacklevel=4)
    return {**saved["config"], **{name: x for name, x in own.items() if x is not None}, **options}


def read_saved(path) -> dict:
    "The content of a file of `PPO.save`; ValueError if it is another's."
    try:
        saved, why = load_checked(path), ""
    except OSError: raise
    except Exception as e:  # whatever is said of another file
        saved, why = {}, f": {e}" if isinstance(e, ValueError) else ""
    whole = isinstance(saved, dict) and {"version", "config", "state", "spaces"} <= saved.keys()
    config = saved["config"] if whole else None
    if not isinstance(config, dict) or not isinstance(config.get("env"), str):
        raise ValueError(f"path must be a file that PPO.save has written, got {path}{why}")
    if unknown := config.keys() - PPOConfig.__dataclass_fields__.keys():
        raise ValueError(f"path must be a file of rlhf_notes {__version__}, got {path} of another "
                         f"version, {saved['version']}, with the option {min(unknown)}")
    return saved


@contextmanager
def told_damage(path, *kinds):
    "ValueError where a file holds something else than `PPO.save` writes there."
    kinds += ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError
    try:
        yield
    except kinds as e:
        raise ValueError("path must be a file as PPO.save has written it, got "
                         f"{path}: {error_text(e)}") from e


def check_sizes(saved: dict, path, options: dict, spaces: list):
    "ValueError unless the file's weights are those of its options: before such networks are made."
    options, own = split_options(options)
    if isinstance(own.get("network"), nn.Module): return
    with torch.device("meta"):
        wanted = Agent(*spaces, PPOConfig(**options), None, own.get("network")).state_dict()
    for name, x in wanted.items():
        got = saved["state"]["agent"].get(name)
        if getattr(got, "shape", None) != x.shape:
            raise ValueError(f"path must fit the options and the version, got {path}: {name} must "
                             f"have shape {tuple(x.shape)}, got {tuple(getattr(got, 'shape', ()))}")


def check_kept(env_kwargs: dict):
    "ValueError unless each argument of the environment comes back from a file as it was."
    for name, x in env_kwargs.items():
        file = io.BytesIO()
        try:
            torch.save(x, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception as e:  # whatever pickle says
            raise ValueError("env_kwargs must hold numbers, strings, lists and dicts to be saved, "
                             f"got {name}={x!r}") from e
