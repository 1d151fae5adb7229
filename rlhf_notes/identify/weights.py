"""The weights with which token losses become one number, and the mode that they show."""

__all__ = ["mode_weights", "read_mode", "SHAPES", "ragged"]

import torch

from ..formulas.masking import aggregation_weights

SHAPES = ((48, 7), (96, 11))  # (B, T): B has many divisors, so that many group sizes fit
GROUPS = (2, 3, 4, 6, 8, 12, 16, 24)


def ragged(B: int, T: int, seed: int = 0):  # -> (B, T) bool
    "Responses of 2 to T tokens, no two neighbouring groups of the same number of tokens."
    generator = torch.Generator().manual_seed(seed)
    n = torch.randint(2, T + 1, (B,), generator=generator)
    n[::5] = T
    return torch.arange(T) < n[:, None]


def mode_weights(
    mask: torch.Tensor,  # (B, T) bool, a token in each row
    mode: str,  # "token-mean", "seq-mean-token-mean", ..., "prompt-mean" or "sum"
    group: int | None = None,  # for "prompt-mean": rows of one prompt, which lie together
) -> torch.Tensor:  # (B, T), what each token's loss is multiplied by
    "Weights of an aggregation."
    if mode == "sum": return mask.double()
    return aggregation_weights(mask, mode, group=group, dtype=torch.float64)


def read_mode(
    found: list,  # (weights (B, T), mask (B, T) bool) of batches of several shapes
    group: int | None = None,  # rows of a prompt, if an option says so
    lengths: tuple = (),  # numbers that options hold: a constant length may be one
    tolerance: float = 2e-4,  # by which the factors of two batches may differ
) -> tuple | None:  # (mode, scale, number of the mode or None); None if no mode fits
    "The aggregation whose weights these are, up to a factor."
    groups = [g for g in ([group] if group else GROUPS) if all(len(m) % g == 0 for _, m in found)]
    modes = [(mode, None) for mode in
             ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "sum")]
    for mode, g in modes + [("prompt-mean", g) for g in groups if g > 1]:
        factors = [_factor(w, mode_weights(m, mode, g), m) for w, m in found]
        if any(f is None for f in factors) or not _same(tolerance, *factors): continue
        factor = sum(factors) / len(factors)
        longest = max(m.shape[1] for _, m in found)
        if mode == "seq-mean-token-sum" and factor < 0.9 and (
                any(abs(factor * n - 1) < 1e-4 for n in lengths) or _whole(1 / factor, longest)):
            return "constant", 1.0, round(1 / factor)
        return mode, factor, g
    return None


def _whole(x, least): return x >= least - 1e-3 and abs(x - round(x)) < 1e-3 * x


def _same(tolerance, *numbers):
    return max(numbers) - min(numbers) <= tolerance * max(map(abs, numbers))


def _factor(weights, expected, mask):
    "The one number by which the weights differ from those of a mode, where tokens count."
    factors = (weights / expected)[mask]
    mean = factors.mean().item()
    even = (factors - mean).abs().max() <= 2e-4 * abs(mean)
    return mean if mean and even else None
