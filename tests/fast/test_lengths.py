"""Rows of like length together: the same samples and states as of the rectangle, from fewer places.
"""
from contextlib import nullcontext

import pytest
import torch
from language_models import make, tiny

from rlhf_notes import fast
from rlhf_notes.fast.lengths import by_length
from rlhf_notes.language.model import no_dropout, response_states
from rlhf_notes.language.sampling import sample

@pytest.mark.parametrize("is_open", [True, False])
def test_a_long_prompt_does_not_pad_the_others(is_open):
    lm = no_dropout(make("Llama", max_position_embeddings=256))
    g = torch.Generator().manual_seed(3)
    prompts, u = torch.randint(37, (9, 200), generator=g), torch.rand(9, 2, generator=g)
    lengths = torch.tensor([9, 3, 5, 200, 7, 9, 4, 90, 8])
    mask = torch.arange(200) >= 200 - lengths[:, None]
    read = []
    lm.model.register_forward_pre_hook(
        lambda m, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True)
    with nullcontext() if is_open else fast.off():
        got = sample(lm, prompts, mask, u)
        assert (sum(read) < 400) == is_open
        for i in range(9):
            alone = sample(lm, prompts[i:i + 1, mask[i]], mask[i:i + 1, mask[i]], u[i:i + 1])
            assert torch.equal(alone.tokens[0], got.tokens[i])
            torch.testing.assert_close(alone.hidden[0], got.hidden[i], atol=1e-4, rtol=1e-4)
        tokens = torch.cat([prompts, got.tokens], 1)
        seen = torch.cat([mask, torch.ones(9, 2, dtype=torch.bool)], 1)
        read.clear()
        again = response_states(lm, tokens, seen, 2)
        assert (sum(read) < 400) == is_open
    torch.testing.assert_close(again, got.hidden, atol=1e-4, rtol=1e-4)


def test_rows_of_like_length_are_computed_together():
    assert by_length([9, 3, 5, 200, 7, 9, 4, 90, 8], 2) == [[3], [7], [1, 6, 2, 4, 8, 0, 5]]
    assert by_length([5, 5, 9], 2) == [[0, 1, 2]] and by_length([], 2) == []


def test_each_row_brings_its_own_mask_of_the_response():
    lm, place = tiny(n_positions=256), torch.arange(202)
    mask = place >= 200 - torch.tensor([[200], [3], [5], [4]])
    tokens = torch.randint(37, mask.shape, generator=torch.Generator().manual_seed(1))
    counts = torch.tensor([[True, False], [True, True], [True, False], [True, True]])
    got = response_states(lm, tokens, mask, 2, counts)
    with fast.off():
        expected = response_states(lm, tokens, mask, 2, counts)
    torch.testing.assert_close(got[counts], expected[counts], atol=1e-4, rtol=1e-4)
