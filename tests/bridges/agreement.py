"""Our losses and verl's or TRL's own, on the same seeded batches: the largest difference of each.

`benchmarks/engines.py` writes the table, the tests beside this file hold its bounds.
"""

import torch

SEEDS = range(5)


def batch(seed, B=8, T=12, spread=0.2):
    "Log-probabilities, old ones, advantages, ragged mask, weights."
    g = torch.Generator().manual_seed(seed)
    logp = torch.randn(B, T, generator=g) * 0.3 - 1
    old = logp + torch.randn(B, T, generator=g) * spread
    advantage = torch.randn(B, 1, generator=g).expand(B, T)
    mask = torch.arange(T) < torch.randint(2, T + 1, (B, 1), generator=g)
    return logp, old, advantage, mask, torch.rand(B, T, generator=g) + 0.5


def value_and_grad(f, logp):
    x = logp.clone().requires_grad_()
    loss = f(x)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def difference(ours, theirs, logp):
    "Of value and of gradient, the largest entry."
    a, b = value_and_grad(ours, logp), value_and_grad(theirs, logp)
    return tuple((x - y).abs().max().item() for x, y in zip(a, b))
