"""Preferences as texts, or as chats, and the tokens of both responses after their prompt.

A response is tokenised as it stands after its prompt, where "2+3=" and "5" are "2+3=5" for every
tokenizer, and as the chat template writes it. It ends with the first token that would end it in
generation; if it has none, the end-of-sequence token is appended.
"""

__all__ = ['pairs_of', 'margins_of', 'own_choices', 'continuation']

import math
import numbers

import torch

from .load import as_text, check_tokens
from .prompts import Prompts, token_ids
from ..language.dpo import Choices, chosen_first


def pairs_of(rows: list) -> list:
    "The two responses of each row, as strings; ValueError names one that cannot be used."
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
                                 f"{row[name]!r} in prompts[{i}] (a list holds one message of the "
                                 "assistant)")
        pairs.append(pair)
    return pairs


def margins_of(rows: list) -> torch.Tensor:  # (n,) float32
    "By how much the chosen response should win: the column `margin`, or 0."
    found = [row.get("margin", 0.0) for row in rows]
    for i, x in enumerate(found):
        if not isinstance(x, numbers.Real) or not math.isfinite(x):
            raise ValueError(f"prompts must have finite numbers as margin, got {x!r} in "
                             f"prompts[{i}]")
    return torch.tensor(found, dtype=torch.float32)


def _said(response):
    "The text of a response that may be a list with one message."
    is_chat = isinstance(response, list) and len(response) == 1 and isinstance(response[0], dict)
    own = is_chat and response[0].get("role") not in ("user", "system", "tool")
    return response[0].get("content") if own else response


def own_choices(task: Prompts, rows: list) -> Choices:
    "Two responses to each prompt as tokens, without `logp_ref`; `rows` are the task's."
    ids, T = [], task.response_length
    if not task.stop_token:
        raise ValueError("tokenizer must have a token for the end of a text")
    for i, (row, pair) in enumerate(zip(rows, pairs_of(rows))):
        prompt = task.tokens[i][task.mask[i]].tolist()
        ids += [_pair_ids(task, row, prompt, response) for response in pair]
        longest = max(len(response) for _, response in ids[-2:])
        if longest > T:
            raise ValueError(f"max_new_tokens must hold each response with its end, {longest} "
                             f"tokens in prompts[{i}], got {T}")
    prompts, responses = zip(*ids)
    check_tokens(task.tokenizer, responses, task.vocab_size, "prompts")
    Q = task.prompt_length
    tokens = [[task.pad_token] * (Q - len(x)) + x + y + [0] * (T - len(y)) for x, y in ids]
    tokens, place = torch.tensor(tokens).view(-1, 2, Q + T), torch.arange(Q + T)
    begin, end = (torch.tensor([*map(len, x)]).view(-1, 2, 1) for x in (prompts, responses))
    mask = (place >= Q - begin) & (place < Q + end)
    parts = [x[..., part] for part in (slice(Q), slice(Q, None)) for x in (tokens, mask)]
    return chosen_first(*parts, torch.zeros(len(rows)))


def _pair_ids(task, row, prompt, response):
    "Tokens of a prompt, and of a response up to its end."
    tokenizer, before = task.tokenizer, row["prompt"]
    if isinstance(before, str):
        ids = continuation(tokenizer, before, response)
    else:
        before, whole = _by_template(tokenizer, row, response)
        if whole.startswith(before):
            ids = continuation(tokenizer, before, whole[len(before):])
        else:  # the response does not go on after what opens it, as <think>
            ids = token_ids(tokenizer, [whole], special=False)[0]
            pairs = enumerate(zip(prompt, ids))
            n = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(ids)))
            prompt, ids = prompt[:n], ids[n:]
    eos = tokenizer.eos_token_id
    ids = [*ids, task.stop_token[0] if eos is None else eos]
    ends = (i for i, x in enumerate(ids) if x in task.stop_token and i >= task.stop_after)
    return prompt, ids[:next(ends, len(ids)) + 1]


def _by_template(tokenizer, row, response):
    "A chat's prompt and the whole as text; ValueError if they differ before the last turn."
    chat = [*row["prompt"], dict(role="assistant", content=response)]
    (prompt,), _ = as_text(tokenizer, [row["prompt"]], [row], add_generation_prompt=True)
    (bare,), _ = as_text(tokenizer, [row["prompt"]], [row])
    (whole,), _ = as_text(tokenizer, [chat], [row])
    begins = prompt.startswith(bare) and whole.startswith(bare) and bare
    if not (whole.startswith(prompt) or begins):
        raise ValueError("prompts must be chats that the tokenizer's template begins alike with "
                         f"and without a response, got {prompt!r} and {whole!r}")
    return prompt, whole


def continuation(tokenizer, prompt: str, response: str) -> list:
    "The tokens that a response adds to those of its prompt."
    for before in (prompt, "\n"):  # after a newline where a token would reach across the border
        try:
            texts = [before, before + response]
            start, whole = tokenizer(texts, add_special_tokens=False)["input_ids"]
        except Exception:  # of tokenizers, for what only the two together cannot be
            continue
        if whole[:len(start)] == start: return whole[len(start):]
    return token_ids(tokenizer, [response], special=False)[0]
