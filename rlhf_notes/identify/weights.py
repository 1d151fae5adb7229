"""The weights with which token losses become one number, and the mode that they show."""

__all__ = ["mode_weights", "read_mode", "group_of", "SHAPES", "ragged"]

import torch

from ..formulas.masking import aggregation_weights
from .names import GROUP_NAME

SHAPES = ((48, 7), (96, 11))  # (B, T): B has many divisors, so that many group sizes fit
GROUPS = (2, 3, 4, 6, 8, 12, 16, 24)
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "sum")


def ragged(B: int, T: int, seed: int = 0):  # -> (B, T) bool
    "Responses of 2 to T tokens, no two neighbouring groups of the same number of tokens."
    generator = torch.Generator().manual_seed(seed)
    n = torch.randint(2, T + 1, (B,), generator=generator)
    n[::5] = T
    return torch.arange(T) < n[:, None]


def group_of(numbers: dict):  # option -> value
    "The number of responses to a prompt, if an option says it."
    found = [x for n, x in numbers.items()
             if GROUP_NAME.search(n.lower()) and isinstance(x, int) and x > 1]
    return found[0] if found else None


def mode_weights(mask, mode: str, group: int | None = None):  # (B, T) bool, a token in each row
    'The weight of each token\'s loss, (B, T); the mode may be "sum" too.'
    if mode == "sum": return mask.double()
    return aggregation_weights(mask, mode, group=group, dtype=torch.float64)


def read_mode(found: list, group=None, lengths=(), tolerance=2e-4) -> tuple | None:
    """(mode, scale, number of the mode or None) whose weights these are; None if no mode fits.

    found: (weights (B, T), mask) of batches of several shapes; lengths: numbers that options hold.
    """
    groups = [g for g in ([group] if group else GROUPS) if all(len(m) % g == 0 for _, m in found)]
    for mode, g in [(mode, None) for mode in MODES] + [("prompt-mean", g) for g in groups]:
        each = [(w / mode_weights(m, mode, g))[m] for w, m in found]
        factors = [x.mean().item() for x in each]
        factor = sum(factors) / len(factors)
        uneven = any((x - f).abs().max() > 2e-4 * abs(f) for x, f in zip(each, factors))
        if not factor or uneven or max(factors) - min(factors) > tolerance * abs(factor): continue
        n, longest = 1 / factor, max(m.shape[1] for _, m in found)
        length = n > longest - 1e-3 and abs(n - round(n)) < 1e-3 * n
        if mode == "seq-mean-token-sum" and factor < 0.9 and (
                length or any(abs(factor * x - 1) < 1e-4 for x in lengths)):
            return "constant", 1.0, round(n)
        return mode, factor, g
    return None
