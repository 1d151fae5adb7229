"""A random generator for each purpose."""

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
