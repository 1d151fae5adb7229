"""Keeps for `rlhf-notes view` some responses of a run, token by token.

The recorder is a hook of `learn`. After an iteration it takes whole groups of responses, asks the
policy, as it is after the update, for the log-probability of their tokens, and keeps those with
the numbers of the rollout. It keeps about `TOKENS` tokens, and one in `SHARE` of those that were
sampled, spread evenly over the iterations; of long responses it keeps fewer iterations.
"""

__all__ = ['FILE', 'TOKENS', 'SHARE', 'ITERATIONS', 'LONGEST', 'pieces', 'Recorder',
           'write_records']

import json
import math

import torch

from ..language.config import CLIPPED
from ..language.model import response_logp
from ..training.runs import write_atomically


FILE = "responses.json"
TOKENS = 15_000  # of responses, that a training keeps
SHARE = 12  # tokens that were sampled for each that is kept: this takes 1 to 4% of the time
ITERATIONS = 25  # that are kept, beside the first and the last
LONGEST = 4_000  # characters of a prompt


def pieces(tokenizer, ids, seen):
    """The text of each token, which joined are the text of all; bytes that make a character only
    together stand with the last of them. `seen` is a dict, and remembers."""
    found, start = [], 0
    for i, token in enumerate(ids):
        before, part = tuple(ids[max(0, start - 1):start]), tuple(ids[start:i + 1])
        if (before, part) not in seen:
            first, both = (tokenizer.decode([*x], clean_up_tokenization_spaces=False)
                           for x in (before, before + part))
            whole = both if both.startswith(first) else tokenizer.decode([*part])
            seen[before, part] = whole[len(first):] if whole is both else whole
        text = seen[before, part]
        is_part = text.endswith("\ufffd") and len(part) < 4 and i + 1 < len(ids)
        found.append("" if is_part else text)
        start = start if is_part else i + 1
    return found


class Recorder:
    "A hook of a training that keeps some responses, to be looked at."

    def __init__(self):
        self.records, self.settings, self.texts = [], {}, {}
        self.sampled = self.used = 0  # tokens

    def __call__(self, trainer, row): self.look(trainer.loop, row)

    def look(self, loop, row, now=False):
        """Keep as many groups as there is room for; some of the first and the last iteration, and
        `now`, always."""
        if loop.machine.rank: return
        self.settings = self.settings or _settings(loop)
        shown, k = _shown(loop.task, loop.batch).cpu(), loop.config.responses_per_prompt
        self.sampled += int(shown.sum())
        room = min(TOKENS * loop.iteration / loop.iterations, self.sampled / SHARE) - self.used
        groups = int((shown.sum(1).view(-1, k).sum(1).cumsum(0) <= room).sum())
        if now or loop.iteration in (1, loop.iterations):
            groups = max(groups, 1)
        elif loop.iteration % math.ceil(loop.iterations / ITERATIONS):
            return
        rows = min(groups * k, max(1, int((shown.sum(1).cumsum(0) <= TOKENS // 4).sum())))
        if rows and groups:
            self.keep(loop, loop.batch[:rows], shown[:rows].sum(1).tolist(), row)

    @torch.no_grad()
    def keep(self, loop, batch, sizes, row):
        "Append the record of an iteration: `batch`, of which `sizes` tokens are shown in each row."
        with loop.machine.precision():
            now = response_logp(loop.policy.lm, batch.tokens, batch.mask, batch.response_mask,
                                loop.config.temperature).cpu()
        batch = batch.map(torch.Tensor.cpu)
        own = batch.response_mask
        numbers = dict(sampler=batch.logp, policy=now,
                       reference=batch.logp_ref, advantage=batch.advantages)
        numbers = {name: _rounded(x.masked_fill(~own, math.nan)) for name, x in numbers.items()}
        k, decode = loop.config.responses_per_prompt, loop.task.tokenizer.decode
        prompts = [_cut(decode(tokens[mask])) for tokens, mask in
                   zip(batch.tokens[::k, :-own.shape[1]], batch.mask[::k, :-own.shape[1]])]
        responses = []
        for i, n in enumerate(sizes):
            columns = {name: _row(x[i][:n]) for name, x in numbers.items()}
            responses.append(dict(
                prompt=i // k, score=_number(batch.scores[i].item()),
                parts=[_number(x) for x in batch.parts[i].tolist()],
                ended=bool(batch.has_end[i]), scored=bool(own[i].any()),
                tokens=pieces(loop.task.tokenizer, batch.responses[i, :n].tolist(), self.texts),
                own="".join("01"[x] for x in own[i, :n].tolist()), **columns))
        self.used += sum(sizes)
        self.records.append(dict(iteration=row["iteration"], kl_coef=row["kl_coef"],
                                 prompts=prompts, responses=responses))

    def state_dict(self):
        "The records, for a checkpoint and for `responses.json`."
        return dict(settings=self.settings, records=self.records, sampled=self.sampled)

    def load_state_dict(self, state):
        "Continue from a checkpoint."
        self.settings, self.records = state["settings"], state["records"]
        self.sampled = state["sampled"]
        self.used = sum(len(x["tokens"]) for r in self.records for x in r["responses"])


def write_records(path, recorder):
    "Write the records, if there are any."
    if recorder.records:
        write_atomically(path, json.dumps(recorder.state_dict(), separators=(",", ":")) + "\n")


def _settings(loop):
    "The options of the loss, for the page."
    c = loop.config
    clip = c.clip if c.variant in CLIPPED else None
    return dict(algo=c.algo, variant=c.variant, low=c.clip_low or clip, high=c.clip_high or clip,
                kl_in_loss=c.loss_has_kl, group=c.responses_per_prompt, length=c.response_length)


def _shown(task, batch):
    "Tokens up to the end of each response, (B, T), those of an environment too."
    until = batch.response_mask.flip(1).cumsum(1).flip(1) > 0
    return until | task.truncate(batch.responses)[1] & ~until.any(1, keepdim=True)


def _cut(text):
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} […] {text[-half:]}"


def _rounded(x): return (x.double().mul(1e7).round() / 1e7).tolist()


def _row(numbers):
    "Numbers for JSON; one in place of all, where they are equal."
    if len({*numbers}) == 1: return _number(numbers[0])
    return numbers if math.isfinite(sum(numbers)) else [*map(_number, numbers)]


def _number(x): return round(x, 7) if math.isfinite(x) else None
