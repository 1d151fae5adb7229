import random

import torch

from rlhf_notes.training.seeds import seeded_generator

def test_a_generator_depends_on_its_arguments_alone():
    before, python = torch.get_rng_state(), random.getstate()
    assert torch.equal(
        seeded_generator("a", 1, 2).get_state(), seeded_generator("a", 1, 2).get_state())
    keys = ("a", 1, 2), ("a", 12), ("b", 1, 2), ("a", 1), ("a", 2, 1)
    assert len({seeded_generator(*key).initial_seed() for key in keys}) == len(keys)
    assert torch.equal(before, torch.get_rng_state()) and python == random.getstate()


def test_the_numbers_are_those_of_the_stored_runs():
    "Another hash would change every training."
    assert seeded_generator(
        "rollout", 0, 1).initial_seed() == random.Random("rollout 0 1").getrandbits(63)
