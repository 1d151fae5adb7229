"""Rows of like length together, so that one long prompt does not pad all the others.

Short rows become a batch of their own where that saves more padding than T more steps of a small
batch cost, about 32 tokens each. On a GPU a step is recorded for one shape, and all rows stay
together. Plain twins: lesson 23 (states) and lesson 24 (sampling). transformers and TRL pad a
batch to its longest prompt; verl and vLLM have kernels of attention that take rows of any length.
"""

__all__ = ['by_length', 'states', 'sample']

import torch

from . import gpt2


def by_length(lengths: list, T: int) -> list:
    """Lists of rows, where padding them would cost more than a batch of their own.

    `lengths` are the real tokens of each prompt, T those of a response.
    """
    rows, groups = sorted(range(len(lengths)), key=lengths.__getitem__), []
    while rows:
        short = [i for i in rows if 2 * lengths[i] < lengths[rows[-1]]]
        saved = sum(lengths[rows[-1]] - lengths[short[-1]] for _ in short)
        if saved <= 32 * T: return [*groups, rows]
        groups.append(rows[len(short):])
        rows = short
    return groups


def states(lm, tokens, mask, length, response_mask=None):  # as `response_states`
    "States of the response, of rows of like length together; NotImplemented if those are all."
    def some(rows, Q):
        counts = None if response_mask is None else response_mask[rows]
        return [states.plain(lm, tokens[rows, -Q - length:], mask[rows, -Q - length:], length,
                             counts)]
    found = _in_groups(mask[:, :-length], length, some)
    return found if found is NotImplemented else found[0]


def _in_groups(mask, T, compute):
    "The tensors of compute(rows, longest prompt), in the order of the rows."
    lengths = mask.sum(1).tolist() if mask.is_cpu else []
    groups = by_length(lengths, T)
    if len(groups) < 2: return NotImplemented
    found = [compute(rows, max(lengths[rows[-1]], 1)) for rows in groups]
    order = torch.tensor(sum(groups, [])).argsort()
    return [torch.cat(x)[order] for x in zip(*found)]


def sample(lm, prompts, mask, u, *rest):  # as `_sample` of language.sampling
    "A response to each prompt: as one graph on a GPU, else rows of like length together."
    if mask.is_cuda and rest[3:] in ((), (1.0, 0)):  # from all tokens
        return gpt2.replay(sample.plain, lm, prompts, mask, u, rest[0])
    return _in_groups(mask, u.shape[1], lambda rows, Q: sample.plain(
        lm, prompts[rows, -Q:], mask[rows, -Q:], u[rows], *rest))
