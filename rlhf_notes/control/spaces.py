"""Observations of any space as rows of numbers: vectors, pictures, dicts, and masks.

| space | its part of the row |
|---|---|
| `Box` | its numbers; bytes from 0 to 255 divided by 255 |
| a picture: `Box` of bytes or bools with 2 or 3 axes, `MultiBinary` with 2 or 3, `Box` from 0.0 to 1.0 with 3 | its numbers, channels first |
| `Discrete(n)` | n numbers, a 1 at the value |
| `MultiDiscrete` | the same for each of its values |
| `MultiBinary` | zeros and ones |
| `Dict` of these | its entries, one after the other |
| `info["action_mask"]` | at the end, a 1 for each possible action |

Where all that is seen are pictures of bytes or bools, rows are of bytes, as they came: the network
divides by 255. With other entries beside them, rows are of floats.

The sides of a picture are at least three long. Its channels are the first axis or the last: the
one that differs from two equal others, or else the shorter (the last, where they are alike). What
cannot become a row is refused by name, with the wrapper of Gymnasium that helps.

stable-baselines3 divides pictures by 255 too, asks for at least 36 pixels, has an extractor for
each entry of a dict, and masks in its contrib package; CleanRL has a script of its own for
pictures and one for masks; RLlib flattens dicts and takes masks from an entry of the observation.
"""

__all__ = ['parts', 'picture_shape', 'remedy', 'row_maker', 'picture_is_last', 'scale_of',
           'byte_scale', 'mask_shape', 'read_mask', 'as_batch', 'space_to_numbers',
           'space_from_numbers', 'same_space']

import math
from functools import partial

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete


def parts(space: gym.Space) -> dict:  # name -> space
    "The entries of a Dict; any other space is its own one entry, without a name."
    return dict(space.spaces) if isinstance(space, Dict) else {None: space}


def _entry(obs, name): return obs if name is None else obs[name]


def picture_shape(space: gym.Space) -> tuple | None:  # (channels, height, width)
    "The shape of a picture, channels first, as PyTorch wants it; None for an entry that is none."
    axes, shape = len(space.shape or ()), space.shape
    if not (_is_small(space) and axes in (2, 3) or _is_unit(space) and axes == 3): return None
    first, middle, last = shape if axes == 3 else (1, *shape)
    if first != middle and (middle == last or first < last):
        channels, *sides = first, middle, last
    else:
        channels, *sides = last, first, middle
    return (channels, *sides) if min(sides) >= 3 else None


def _is_small(space):
    "True for bytes and bools: numbers that lose nothing as bytes."
    is_bool = isinstance(space, MultiBinary) or isinstance(space, Box) and space.dtype == bool
    return is_bool or _is_bytes(space) and space.dtype == np.uint8


def _is_unit(space):
    "True for floats from 0 to 1."
    floats = isinstance(space, Box) and space.dtype.kind == "f"
    return floats and bool((space.low == 0).all() and (space.high == 1).all())


def _is_bytes(space):
    return isinstance(space, Box) and bool((space.low == 0).all() and (space.high == 255).all())


def remedy(space: gym.Space) -> str | None:
    """The wrapper that makes observations learnable; "" if none does, None if rows can be made of
    them as they are."""
    for part in parts(space).values():
        shape = part.shape or ()
        if not isinstance(part, (Box, Discrete, MultiDiscrete, MultiBinary)) or 0 in shape:
            return "FlattenObservation" if _can_be_flat(space) and 0 not in shape else ""
        pictures = _is_bytes(part) or _is_unit(part) or _is_small(part)
        if pictures and len(shape) > 3: return "GrayscaleObservation below the stack"
        if _is_bytes(part) and len(shape) > 1 and part.dtype != np.uint8:
            return "DtypeObservation to uint8"
    return None


def _can_be_flat(space):
    try:
        return space.is_np_flattenable
    except NotImplementedError: return False  # a kind of space of the user's own


def row_maker(space):  # of one observation -> rows(obs of N environments): (N, numbers)
    """Observations as rows of float32, or float64 where float32 loses digits, bytes from 0 to 1;
    of uint8 where all are pictures of bytes or bools.
    """
    raw = all(_is_small(part) and picture_shape(part) for part in parts(space).values())
    makers = {name: _columns(part, raw) for name, part in parts(space).items()}
    if None in makers: return makers[None]
    def rows(obs): return np.concatenate([make(obs[name]) for name, make in makers.items()], 1)
    return rows


def _columns(space, raw):
    "A function from values of a space, (N, ...), to (N, numbers); `raw` = bytes, undivided."
    if isinstance(space, Discrete): return _one_hot(np.array([space.n]), space.start)
    if isinstance(space, MultiDiscrete): return _one_hot(space.nvec.ravel(), space.start.ravel())
    # C-contiguous: the last digits of a matrix product depend on the order in memory
    size, dtype = math.prod(space.shape), np.uint8 if raw else np.result_type(space.dtype, "f4")
    is_bytes, last = _is_bytes(space) and not raw, picture_is_last(space)
    if len(space.shape) == 1 and not is_bytes: return partial(np.ascontiguousarray, dtype=dtype)
    def columns(x):
        turned = np.moveaxis(x, -1, 1) if last else x
        flat = np.ascontiguousarray(turned, dtype).reshape(len(x), size)
        return flat / 255 if is_bytes else flat
    return columns


def picture_is_last(space) -> bool:
    "True for a picture whose channels stand last."
    shape = picture_shape(space)
    return shape is not None and shape[-len(space.shape):] != space.shape


def scale_of(space) -> int:
    "The number by which `row_maker` divides: 255 for bytes."
    return 255 if _is_bytes(space) else 1


def byte_scale(space) -> np.ndarray:  # (numbers,), float32
    "Divisors of a row of bytes, as of `row_maker`: 255 for bytes, 1 for bools."
    entries = parts(space).values()
    return np.repeat(np.float32([*map(scale_of, entries)]), [*map(gym.spaces.flatdim, entries)])


def _one_hot(nvec, start):
    "The same for whole numbers, each below its own of `nvec`, counted from `start`."
    first = np.cumsum(nvec) - nvec
    def columns(x):
        x = np.reshape(x, (len(x), -1)) - start
        if not ((x >= 0) & (x < nvec)).all():
            raise ValueError(f"obs must be whole numbers below {nvec}, got {x}")
        hot = np.zeros((len(x), nvec.sum()), np.float32)
        hot[np.arange(len(x))[:, None], first + x] = 1
        return hot
    return columns


def mask_shape(info):  # of N environments, from their reset
    "(N, n) for the masks of n actions; None if there are none."
    return np.shape(info["action_mask"]) if "action_mask" in info else None


def read_mask(info, shape, done=False):  # (N, n); (N,) bool: nothing follows
    "Possible actions, (N, n) bool: all, where an environment gives no mask."
    mask = np.ones(shape, bool)
    if "action_mask" not in info: return mask
    given = np.asarray(info["action_mask"])
    if given.shape != shape:
        raise ValueError(f"action_mask must have shape {shape}, got {given.shape}")
    some = given.any(1)
    if not (some | done | ~info.get("_action_mask", np.ones(len(mask), bool))).all():
        raise ValueError(f"action_mask must leave an action possible, got {given[~some][0]}")
    mask[some] = given[some] != 0
    return mask


def as_batch(space: gym.Space, obs) -> tuple:  # a batch; True if it was one alone
    "One observation or more, with an axis for the batch; ValueError if they do not fit the space."
    names, entries = parts(space), {}
    if None not in names and not (isinstance(obs, dict) and names.keys() <= obs.keys()):
        raise ValueError(f"obs must be a dict with {', '.join(names)}, got {obs}")
    for name, part in names.items():
        where = "obs" if name is None else f"obs[{name!r}]"
        x, shape = _as_array(_entry(obs, name), where), part.shape
        if x.shape[x.ndim - len(shape):] != shape or x.ndim > len(shape) + 1:
            raise ValueError(f"{where} must have shape {shape}, or be a batch of that, "
                             f"got {x.shape}")
        if x.dtype.kind not in "biuf" or not np.isfinite(x).all():
            raise ValueError(f"{where} must be finite, got {x}")
        entries[name] = x.reshape(-1, *shape), x.ndim == len(shape)
    kinds = {(len(x), alone) for x, alone in entries.values()}
    if len(kinds) > 1: raise ValueError(f"obs must have as many of each entry, got {obs}")
    batch = {name: x for name, (x, _) in entries.items()}
    return batch.get(None, batch), kinds.pop()[1]


def _as_array(x, where):
    try:
        return np.asarray(x)
    except ValueError:  # of what has parts of several shapes
        raise ValueError(f"{where} must be an array, or a list of numbers, got a "
                         f"{type(x).__name__} (a reset returns obs and info)") from None


def space_to_numbers(space: gym.Space) -> dict:  # of numbers, tensors, and such dicts
    "The numbers that tell a space from others of its kind."
    if isinstance(space, Dict):
        return dict(entries={name: space_to_numbers(x) for name, x in space.spaces.items()})
    if isinstance(space, Discrete): return dict(n=int(space.n), start=int(space.start))
    if isinstance(space, MultiBinary): return dict(bits=space.n)
    names = ("nvec", "start") if isinstance(space, MultiDiscrete) else ("low", "high")
    return {name: torch.from_numpy(getattr(space, name)) for name in names}


def same_space(a, b) -> bool:
    "True if the numbers of both mean the same."
    return _equal(space_to_numbers(a), space_to_numbers(b))


def _equal(a, b):
    if type(a) is not type(b): return False
    if isinstance(a, dict): return [*a] == [*b] and all(_equal(a[name], b[name]) for name in a)
    if isinstance(a, torch.Tensor): return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def space_from_numbers(numbers: dict) -> gym.Space:
    "The space of a file, from `space_to_numbers`."
    if "entries" in numbers:
        entries = numbers["entries"].items()  # in pairs: of a dict, Dict would sort the names
        return Dict([(name, space_from_numbers(x)) for name, x in entries])
    if "n" in numbers: return Discrete(**numbers)
    if "bits" in numbers: return MultiBinary(numbers["bits"])
    first, second = (x.numpy() for x in numbers.values())
    if "nvec" in numbers: return MultiDiscrete(first, start=second)
    return Box(first, second, dtype=first.dtype.type)
