"""Two loops that learn from what is told: an environment's replies, and a hint beside the prompt.

| option of `RLHF` | what is learned |
|---|---|
| `observation_coef=0.05` | beside the loss, to predict what the environment says (ECHO, [lesson 50](../../nbs/formulas/50_credit.ipynb)) |
| `hint=f` | in place of a reward, what the policy itself would have said with a hint (SDPO, [lesson 39](../../nbs/formulas/39_distillation.ipynb)) |

`hint` is called like a reward, with whole dialogues as responses: it returns a text for each, which
the policy reads after the prompt, or at the end of a chat's last message; None = no hint, from
which nothing is learned. The context must hold prompt, hint and response.
"""

__all__ = ['Observing', 'Hinted', 'hinted_prompt']

from dataclasses import replace
from textwrap import shorten

import torch

from ..formulas.credit import observation_loss
from ..language.loop import Loop, rl_loss
from ..language.model import check_context, head_log_probs, response_states
from .rewards import bind, called


class Observing(Loop):
    "`Loop` that predicts the environment's tokens too."

    def __init__(self, coef, *parts, **options):
        super().__init__(*parts, **options)
        self.coef = coef

    def loss(self, part, batch):
        "A part's share of the loss of its minibatch, with that of the environment's tokens."
        (theirs, all_theirs), kl_coef = map(observed, (part, batch)), self.kl.coef
        found = self.forward(replace(part, response_mask=part.response_mask | theirs))
        loss, log = rl_loss(self.config, part, *found, kl_coef, batch.response_mask)
        told = observation_loss(found[0], theirs, self.coef)
        told = told * theirs.sum() / all_theirs.sum().clamp(min=1)
        return loss + told, log | dict(observation_loss=told.detach())


def observed(batch):
    "True at what the environment said in dialogues that have a score, (B, T)."
    return (batch.turns >= 0) & ~batch.response_mask & batch.is_scored[:, None]


class Hinted(Loop):
    "`Loop` whose policy, told a hint, stands where the reference would."

    def __init__(self, hint, *parts, **options):
        super().__init__(*parts, **options)
        self.hint, self.asked = hint, bind(hint, self.task.columns(), "hint")

    @torch.no_grad()
    def collect(self, lm, prompts, mask, u, rows):
        "Responses, with the log-probabilities that they would have had with a hint."
        x = super().collect(lm, prompts, mask, u, rows)
        hints = self.hints(x, rows)
        told = [row | dict(prompt=hinted_prompt(row["prompt"], h)) for row, h in zip(rows, hints)]
        tokens, seen = (y.to(self.device) for y in self.task.encode(told))
        T = x.logp.shape[1]
        check_context(lm, hint=tokens.shape[1], max_new_tokens=T)
        tokens, seen = torch.cat([tokens, x.responses], 1), torch.cat([seen, x.mask[:, -T:]], 1)
        with self.machine.precision():
            hidden = response_states(lm, tokens, seen, T, x.response_mask)
            logp = head_log_probs(lm, hidden, x.responses, self.config.temperature)[0]
        is_told = torch.tensor([h is not None for h in hints], device=self.device)
        return replace(x, logp_ref=logp.where(is_told[:, None], x.logp))

    def reference_logp(self, *texts):
        "None: the policy with its hint, which `collect` asks, stands there."

    def hints(self, rollout, rows):
        "A text, or None, for each response."
        after = rollout.response_mask.flip(1).cumsum(1).flip(1) == 0
        said = rollout.responses.masked_fill(after, self.task.pad_token)
        hints = called(self.hint, self.asked, self.task.as_arguments(rows, said.cpu()))
        known = isinstance(hints, list) and all(isinstance(x, str | None) for x in hints)
        if not known or len(hints) != len(rows):
            raise ValueError(f"hint must return a list of {len(rows)} texts, with None where there "
                             f"is no hint, got {shorten(str(hints), 80)}")
        return hints


def hinted_prompt(prompt, hint):
    "A prompt, text or chat, with a hint at its end."
    if hint is None: return prompt
    if isinstance(prompt, str): return prompt + hint
    *before, last = prompt
    return [*before, last | dict(content=f"{last['content']}\n\n{hint}")]
