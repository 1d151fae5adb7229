"""A random generator for each purpose.

One generator for everything couples what should be apart: evaluate once more, and the training
draws other numbers. So a generator depends on its purpose, the seed of the run and a few indices,
and on nothing that was drawn before: a run resumed at iteration 7 draws the numbers it would have
drawn. The global generators of Python, NumPy and PyTorch belong to the caller.
"""

__all__ = ['seeded_generator']

import random

import torch


def seeded_generator(
    purpose: str,  # what it is for: "rollout", "minibatches", ...
    seed: int,  # of the run
    *indices: int,  # such as iteration, process
) -> torch.Generator:  # on the CPU
    "Return a generator that depends on the arguments alone."
    key = " ".join(map(str, (purpose, seed, *indices)))
    return torch.Generator().manual_seed(random.Random(key).getrandbits(63))
