"""A random generator for each purpose.

One generator for everything couples what should be apart: evaluate once more, and the training
draws other numbers. So a generator depends on its purpose, the seed of the run and a few indices,
and on nothing that was drawn before: a run resumed at iteration 7 draws the numbers it would have
drawn. The global generators of Python, NumPy and PyTorch belong to the caller.
"""

__all__ = ['seeded_generator', 'global_seed']

import random
import threading
from contextlib import contextmanager

import torch


def seeded_generator(purpose: str, seed: int, *indices: int) -> torch.Generator:  # on the CPU
    """Return a generator that depends on the arguments alone.

    `purpose` is what it is for ("rollout", "minibatches"), `indices` such as iteration and process.
    """
    key = " ".join(map(str, (purpose, seed, *indices)))
    return torch.Generator().manual_seed(random.Random(key).getrandbits(63))


_TURN = threading.RLock()


@contextmanager
def global_seed(seed: int):
    "Lend PyTorch's global generator, seeded, to libraries that know no other; a thread at a time."
    with _TURN, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
