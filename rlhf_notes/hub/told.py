"""Learn from what is told: an environment's replies, and a hint beside the prompt.

- `RLHF(observation_coef=0.05)` learns, beside the loss, to predict what the environment says (ECHO,
  [lesson 50](../../nbs/formulas/50_credit.ipynb)).
- `RLHF(hint=f)` learns, in place of a reward, what the policy itself would have said with a hint
  (SDPO, [lesson 39](../../nbs/formulas/39_distillation.ipynb)).

`hint` is called like a reward, with whole dialogues as responses: it returns a text for each, which
the policy reads after the prompt, or at the end of a chat's last message; None = no hint, from
which nothing is learned. The context must hold prompt, hint and response.
"""

__all__ = ['observing_loss', 'Hint', 'hinted_prompt']

from dataclasses import replace

import torch

from ..checks import check_context
from ..formulas.credit import observation_loss
from ..language.loop import rl_loss
from ..language.model import response_logp
from .rewards import bind, called, shown


def observing_loss(coef, loop, part, batch):
    "In place of `Loop.loss`: a part's share, with that of the environment's tokens."
    (theirs, all_theirs), kl_coef = map(observed, (part, batch)), loop.kl.coef
    found = loop.forward(replace(part, response_mask=part.response_mask | theirs))
    loss, log = rl_loss(loop.config, part, *found, kl_coef, batch.response_mask)
    told = observation_loss(found[0], theirs, coef)
    told = told * theirs.sum() / all_theirs.sum().clamp(min=1)
    return loss + told, log | dict(observation_loss=told.detach())


def observed(batch):
    "True at what the environment said in dialogues that have a score, (B, T)."
    return (batch.turns >= 0) & ~batch.response_mask & batch.is_scored[:, None]


class Hint:
    "In place of `Loop.reference_logp`: the policy, told a hint."

    def __init__(self, hint, task):
        self.hint, self.task, self.asked = hint, task, bind(hint, task.columns(), "hint")

    def __call__(self, loop, tokens, mask, response_mask, found, rows):
        "Log-probabilities (B, T) of responses after a hint; as sampled, where there is none."
        hints = self.texts(found, rows)
        told = [row | dict(prompt=hinted_prompt(row["prompt"], h)) for row, h in zip(rows, hints)]
        prompts, seen = (y.to(loop.device) for y in self.task.encode(told))
        lm, T = loop.policy.lm, found.logp.shape[1]
        check_context(lm, hint=prompts.shape[1], max_new_tokens=T)
        prompts, seen = (torch.cat([x, y[:, -T:]], 1) for x, y in ((prompts, tokens), (seen, mask)))
        logp = response_logp(lm, prompts, seen, response_mask, loop.config.temperature)
        is_told = torch.tensor([h is not None for h in hints], device=loop.device)
        return logp.where(is_told[:, None], found.logp)

    def texts(self, found, rows):
        "A text, or None, for each response."
        after = found.mask.flip(1).cumsum(1).flip(1) == 0
        said = found.tokens.masked_fill(after, self.task.pad_token)
        hints = called(self.hint, self.asked, self.task.as_arguments(rows, said.cpu()))
        known = isinstance(hints, list) and all(isinstance(x, str | None) for x in hints)
        if not known or len(hints) != len(rows):
            raise ValueError(f"hint must return a list of {len(rows)} texts, with None where there "
                             f"is no hint, got {shown(hints)}")
        return hints


def hinted_prompt(prompt, hint):
    "A prompt, text or chat, with a hint at its end."
    if hint is None: return prompt
    if isinstance(prompt, str): return prompt + hint
    *before, last = prompt
    return [*before, last | dict(content=f"{last['content']}\n\n{hint}")]
