import random
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from rlhf_notes.training.seeds import global_seed, seeded_generator

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


def test_threads_that_make_models_at_once_make_those_of_their_seeds():
    "Libraries draw weights from the one global generator."
    from rlhf_notes.hub.load import add_lora
    from rlhf_notes.language.model import make_gpt2
    small = dict(n_layer=1, n_embd=8, n_head=2)

    def weights(seed):
        lm = add_lora(make_gpt2("tiny", 11, seed=seed, **small), 2, seed)
        return torch.nn.utils.parameters_to_vector(lm.parameters()).detach()
    torch.manual_seed(5)
    state, alone = torch.get_rng_state(), [weights(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool: found = [*pool.map(weights, [*range(4)] * 6)]
    for i, x in enumerate(found): assert torch.equal(x, alone[i % 4])
    assert torch.equal(state, torch.get_rng_state())


def test_the_global_generator_is_lent_to_one_thread_at_a_time():
    def draw(seed):
        with global_seed(seed):
            parts = []
            for _ in range(20):
                parts.append(torch.rand(3))
                time.sleep(0)
            return torch.stack(parts)
    state, alone = torch.get_rng_state(), [draw(seed) for seed in range(3)]
    with ThreadPoolExecutor(6) as pool: found = [*pool.map(draw, [*range(3)] * 8)]
    for i, x in enumerate(found): assert torch.equal(x, alone[i % 3])
    assert torch.equal(state, torch.get_rng_state())
    with global_seed(1), global_seed(2): pass  # a model within a model
