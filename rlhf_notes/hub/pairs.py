"""Preferences as texts, or as chats, and the tokens of both responses after their prompt.

A response is tokenised as it stands after its prompt, where "2+3=" and "5" are "2+3=5" for every
tokenizer, and as the chat template writes it. It ends with the first token that would end it in
generation; if it has none, the end-of-sequence token is appended.
"""

__all__ = ['pairs_of', 'own_choices', 'continuation']

import torch

from .load import as_text, check_tokens
from .prompts import Prompts, token_ids
from ..language.dpo import Choices, chosen_first


def pairs_of(
    rows: list,  # dicts with chosen and rejected: strings, or the assistant's message in a list
) -> list:  # pairs of strings
    "The two responses of each row; ValueError names the one that cannot be used."
    names, pairs = ("chosen", "rejected"), []
    if not rows: raise ValueError("prompts must not be empty, got none to learn from")
    if not rows[0].keys() >= set(names):
        raise ValueError("prompts must have the columns prompt, chosen and rejected, got "
                         f"{', '.join(rows[0])}")
    for i, row in enumerate(rows):
        pair = [_said(row[name]) for name in names]
        for name, text in zip(names, pair):
            if not isinstance(text, str):
                raise ValueError(f"prompts must have a {name} response, a string, got "
                                 f"{row[name]!r} in prompts[{i}]")
        pairs.append(pair)
    return pairs


def _said(response):
    "The text of a response that may be a list with one message."
    is_chat = isinstance(response, list) and len(response) == 1 and isinstance(response[0], dict)
    return response[0].get("content") if is_chat else response


def own_choices(
    task: Prompts,  # of the prompts of `rows`, in their order
    rows: list,  # dicts with chosen and rejected
) -> Choices:  # without `logp_ref`
    "Two responses to each prompt as tokens; ValueError names the one that cannot be used."
    ids, T = [], task.response_length
    if not task.stop_token:
        raise ValueError("tokenizer must have a token for the end of a text")
    for i, (row, pair) in enumerate(zip(rows, pairs_of(rows))):
        ids += [_response_ids(task, row, response) for response in pair]
        longest = max(map(len, ids[-2:]))
        if longest > T:
            raise ValueError(f"max_new_tokens must hold each response with its end, {longest} "
                             f"tokens in prompts[{i}], got {T}")
    check_tokens(task.tokenizer, ids, task.vocab_size, "prompts")
    responses = torch.tensor([x + [0] * (T - len(x)) for x in ids]).view(-1, 2, T)
    lengths = torch.tensor([len(x) for x in ids]).view(-1, 2, 1)
    prompts = [x[:, None].expand(-1, 2, -1) for x in (task.tokens, task.mask)]
    return chosen_first(*prompts, responses, torch.arange(T) < lengths, torch.zeros(len(rows)))


def _response_ids(task, row, response):
    "A response's tokens, up to its end."
    tokenizer, prompt = task.tokenizer, row["prompt"]
    if not isinstance(prompt, str):
        prompt, response = _by_template(tokenizer, row, response)
    eos = tokenizer.eos_token_id
    ids = [*continuation(tokenizer, prompt, response), task.stop_token[0] if eos is None else eos]
    ends = (i for i, x in enumerate(ids) if x in task.stop_token and i >= task.stop_after)
    return ids[:next(ends, len(ids)) + 1]


def _by_template(tokenizer, row, response):
    "Prompt and response of a chat as text."
    chat = [*row["prompt"], dict(role="assistant", content=response)]
    (prompt,), _ = as_text(tokenizer, [row["prompt"]], [row], add_generation_prompt=True)
    (whole,), _ = as_text(tokenizer, [chat], [row])
    if not whole.startswith(prompt):
        raise ValueError("prompts must be chats that the tokenizer's template begins alike with "
                         f"and without a response, got {prompt!r} and {whole!r}")
    return prompt, whole[len(prompt):]


def continuation(
    tokenizer,  # of transformers
    prompt: str,  # text before it, without special tokens
    response: str,  # text
) -> list:  # integers
    "The tokens that a response adds to those of its prompt."
    for before in (prompt, "\n"):  # after a newline where a token would reach across the border
        try:
            texts = [before, before + response]
            start, whole = tokenizer(texts, add_special_tokens=False)["input_ids"]
        except Exception:  # of tokenizers, for what only the two together cannot be
            continue
        if whole[:len(start)] == start: return whole[len(start):]
    return token_ids(tokenizer, [response], special=False)[0]
