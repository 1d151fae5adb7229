"""Your own task: prompts, chats and files of them, and the responses to them.

```python
from rlhf_notes import RLHF

def reward(prompts, responses, **columns):
    return [len(set(response.split())) for response in responses]

rlhf = RLHF("path/or/name", prompts=["Tell me a story."], reward=reward,
            learning_rate=1e-5).learn()
```

`RLHF(model, tokenizer, prompts=..., reward=...)` makes `Prompts` of them: a task that samples
prompts, cuts responses at their end, and scores them. [Reviews](../../nbs/reviews/22_task.ipynb) is
another such task.

A prompt is

- a string, or a line of a file: read with the tokenizer's own special tokens, such as `<s>`;
- a list of chat messages: text by the tokenizer's chat template;
- a dict, a line of a `.jsonl` file, an item of a JSON array, a row of a `datasets` dataset or of a
  DataFrame: a `prompt`, and columns for the reward, such as the right result. The columns `tools`
  and `chat_template_kwargs` are for the chat template; the second is a dict of its options, such as
  `enable_thinking`.

The same prompt may stand in several rows with other columns. A training draws prompts at random;
with `prompt_order="epochs"` it takes them in turn. A response ends at the first end-of-sequence
token, the tokenizer's or one of the model's generation config, at position `stop_after` or later;
one without an end is treated as
[`overlong`](../../nbs/language/26_rollout.ipynb#responses-without-an-end) says. Prompts of more
than `prompt_length` tokens are an error, or with `long_prompts="filter"` left out; a warning says
how many.

Your own reward function, `reward(prompts, responses, **columns)`, gets lists and returns a number
for each response ([how it is called](rewards.py)):

- It gets what its signature names: `prompts`, `responses` (or `completions`), `completion_ids`
  (the tokens of each response), and columns, `**kwargs` the rest of these; under other names, the
  first is the prompts and the second the responses. They are copies: what a function does to them
  stays with it.
- Several are added, each with a weight if it has one; the log has the mean of each.
- A reward model of transformers (`AutoModelForSequenceClassification` with one label) may take the
  place of a function, as may [one that you trained](reward_trainer.py); it reads
  prompt and response together.
- `None` or NaN means *not scored*: the other functions count alone, and where none scores, the
  response is `unscored` in the log and enters no mean, no group and no loss. As a 0 it would punish
  the policy for a slow checker.
- `async` lets a function's requests to a server overlap. An exception ends the run.

For more than one turn, `environment(prompts, responses, **columns)` is called like a reward after
each turn of the model and returns what is said next, or `None` where the dialogue is over; the
model learns from its own tokens alone, and the reward sees the last turn after all that came before
([turns](../../nbs/hub/turns.ipynb)).

Every mistake in a file or a function is reported with its place, before anything is written.
"""

__all__ = ['read_prompts', 'token_ids', 'Prompts', 'in_epochs', 'warn_of_ends']

import math
import warnings
from pathlib import Path
from textwrap import shorten

import torch
from torch import nn

from ..formulas.reward import truncate_at_stop
from .load import Classifier, as_text, check_tokens, end_tokens, warn_of_turns_without_end
from .rewards import TEXTS, bind, call_rewards, fresh, reward_functions
from ..language.rollout import Responses, no_spread
from ..language.sampling import sample
from ..training.options import read_json
from ..training.seeds import seeded_generator


def read_prompts(prompts):
    """Prompts or dicts with a "prompt", a DataFrame or the path of a file: dicts, all with the same
    columns, which share nothing with what was given; ValueError names the place of one that cannot
    be used."""
    is_file = isinstance(prompts, (str, Path))
    if isinstance(prompts, dict) or not (is_file or hasattr(prompts, "__iter__")):
        raise ValueError("prompts must be a list, a dataset or the path of a file, got "
                         f"{shorten(str(prompts), 80)}")
    if hasattr(prompts, "iterrows"): # a DataFrame, whose items are the names of its columns
        prompts = prompts.to_dict("records")
    rows = _lines(Path(prompts)) if is_file else enumerate(prompts)
    found = []
    for place, row in rows:
        row = dict(row) if isinstance(row, dict) else dict(prompt=row)
        if hasattr(row.get("prompt"), "tolist"):  # a chat of a DataFrame read from Parquet
            row["prompt"] = row["prompt"].tolist()
        place = place if is_file else f"prompts[{place}]"
        if not _is_prompt(row.get("prompt")):
            raise ValueError("prompts must be strings, lists of messages with role and content, or "
                             f"dicts with such a prompt, got {shorten(str(row), 80)} in {place}")
        if found and row.keys() != found[0].keys():
            raise ValueError(f"prompts must all have the columns {list(found[0])}, got {list(row)} "
                             f"in {place}")
        if found and isinstance(row["prompt"], str) != isinstance(found[0]["prompt"], str):
            raise ValueError(f"prompts must be all strings or all chats, got both in {place}")
        found.append(fresh(row))
    if is_file and not found: raise ValueError(f"prompts must not be empty, got {prompts}")
    return found


def _lines(path):
    if path.suffix.lower() == ".csv":
        raise ValueError("prompts must be a .jsonl file or a text with a prompt on each line, got "
                         f"{path}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as e:
        raise ValueError(f"prompts must be a list or the path of a file, got {path}: {e}") from e
    is_json = path.suffix.lower().startswith(".json")
    if is_json and (array := _array(text)) is not None:
        yield from ((f"item {i} of {path}", row) for i, row in enumerate(array))
        return
    for i, line in enumerate(text.split("\n"), 1):
        place = f"line {i} of {path}"
        if not line.strip(): continue
        try:
            yield place, read_json(line) if is_json else line
        except ValueError as e:
            raise ValueError(f"prompts must be JSON, got {place}: {e}") from e


def _array(text):
    "The items of a JSON array; None for all else, and for a chat alone on its line."
    try:
        whole = read_json(text)
    except ValueError:
        return None
    return whole if isinstance(whole, list) and not _is_prompt(whole) else None


def _is_prompt(x):
    messages = isinstance(x, list) and x and all(isinstance(m, dict) for m in x)
    return isinstance(x, str) or messages and all({"role", "content"} <= m.keys() for m in x)


def token_ids(tokenizer, texts, special):
    """Texts as lists of integers, with the tokenizer's tokens around each if `special`; ValueError
    names one that it cannot read."""
    try:
        return tokenizer(texts, add_special_tokens=special)["input_ids"]
    except Exception as e: # tokenizers has no other
        if len(texts) > 1: return [token_ids(tokenizer, [x], special)[0] for x in texts]
        raise ValueError("prompts must be texts that the tokenizer can read, got "
                         f"{texts[0]!r} ({e})") from e


class Prompts:
    "Prompts and reward functions as a task: its prompts, its model's responses, their scores."
    special_tokens = True
    reward_timeout = None  # seconds for each call of a reward function

    def __init__(self, tokenizer, prompts, reward, response_length, prompt_length=0, stop_after=0,
                 lm=None, drop_long=False, order="random", seed=0,
                 top_p=1.0, top_k=0):
        """A tokenizer as `pad_outside` leaves it; `prompts` as for `read_prompts`, `reward` as for
        `reward_functions`, None to generate alone. Prompts are padded to `prompt_length` tokens, 0
        = as many as the longest has; longer ones are left out if `drop_long`. A response may end
        from position `stop_after` on. The policy `lm` may know of more end tokens, and a reward
        model joins it. In "epochs" all prompts come once, in an order of `seed`, before any comes
        again."""
        self.tokenizer, self.response_length = tokenizer, response_length
        self.prompt_length, self.stop_after, self.order, self.seed = 0, stop_after, order, seed
        self.pad_token, self.stop_token = tokenizer.pad_token_id, end_tokens(tokenizer, lm)
        self.how = dict(stop=self.stop_token, stop_after=stop_after, top_p=top_p, top_k=top_k)
        self.vocab_size = math.inf if lm is None else len(lm.get_output_embeddings().weight)
        self.rows = read_prompts(prompts)
        self.use(reward, getattr(lm, "device", "cpu"))
        if not self.rows: return
        self.tokens, self.mask = self.encode(self.rows, prompt_length)
        if drop_long:
            self._drop(self.mask.sum(1) > prompt_length, prompt_length)
        self.prompt_length = self.tokens.shape[1]
        if 0 < prompt_length < self.prompt_length:
            raise ValueError(f"prompt_length must be 0 or at least {self.prompt_length}, the "
                             f"tokens of the longest prompt, got {prompt_length}")
        if not isinstance(self.rows[0]["prompt"], str):
            warn_of_turns_without_end(tokenizer, self.stop_token)

    def use(self, reward, device="cpu"):
        "Take the rewards of `reward_functions`, None = none, and bind what each asks for."
        self.rewards = [] if reward is None else reward_functions(reward, device)
        models = (f.model for f, _ in self.rewards if isinstance(f, Classifier))
        self.reward_models = nn.ModuleList(models)
        self.weights = torch.tensor([float(weight) for _, weight in self.rewards] or [1.0])
        self.own = [f for f, _ in self.rewards if not isinstance(f, Classifier)]
        names = [getattr(f, "__name__", type(f).__name__) for f, _ in self.rewards]
        several = enumerate(names, 1) if len(names) > 1 else ()
        self.reward_columns = [f"reward_{i}_{name}" for i, name in several]
        self.bound = [bind(f, self.columns()) for f in self.own if self.rows]

    def columns(self):
        "The names of the prompts' columns beside the prompt."
        return [name for name in self.rows[0] if name != "prompt"]

    def _drop(self, long, length):
        "Leave out the rows where `long` is True, and say how many."
        if long.all():
            raise ValueError(f"prompt_length must hold one of the prompts, got {length}")
        if not long.any(): return
        warnings.warn(f"{int(long.sum())} of {len(long)} prompts have more than prompt_length = "
                      f"{length} tokens and are left out", stacklevel=2)
        self.rows = [row for row, is_long in zip(self.rows, long) if not is_long]
        self.tokens, self.mask = (x[~long, -length:] for x in (self.tokens, self.mask))

    def encode(self, prompts, length=0):
        """n prompts as tokens (n, Q), padded on the left, and their mask; Q is `length`, or as many
        as the longest has."""
        rows = read_prompts(prompts)
        texts, special = as_text(self.tokenizer, [row["prompt"] for row in rows], rows,
                                 add_generation_prompt=True)
        special &= self.special_tokens
        ids = token_ids(self.tokenizer, texts, special)
        longest = max(range(len(ids)), key=lambda i: len(ids[i]))
        own = token_ids(self.tokenizer, [texts[longest]], False)[0] if special else None
        if special and ids[longest][-len(own) - 1:] == [*own, self.tokenizer.eos_token_id]:
            ids = [row[:-1] for row in ids]  # the tokenizer ends each text, and a prompt goes on
        check_tokens(self.tokenizer, ids, self.vocab_size, "prompts")
        lengths = torch.tensor([len(row) for row in ids])
        if not lengths.all():
            raise ValueError(f"prompts must have tokens, got {texts[int(lengths.argmin())]!r}")
        longest = int(lengths.max())
        rows = torch.tensor([[self.pad_token] * (longest - len(row)) + row for row in ids])  # G2
        length = max(length, longest)
        rows = nn.functional.pad(rows, (length - longest, 0), value=self.pad_token)
        return rows, torch.arange(length) >= length - lengths[:, None]

    def widen(self, length):
        "Pad the prompts to the longest that another process has."
        more = length - self.prompt_length
        self.tokens = nn.functional.pad(self.tokens, (more, 0), value=self.pad_token)
        self.mask, self.prompt_length = nn.functional.pad(self.mask, (more, 0)), length

    def decode(self, rows):
        "Tokens as strings, without special tokens."
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)

    def sample_prompts(self, n, generator, first=None):
        """Prompts to train on, (n, Q), their mask, and a dict for each: at random, or in turn after
        the `first` that came before."""
        if not self.rows: raise ValueError("prompts must not be empty, got none to learn from")
        at = torch.randint(len(self.tokens), (n,), generator=generator)
        if self.order == "epochs" and first is not None:
            at = in_epochs(len(self.tokens), first, n, "prompts", self.seed)
        return self.tokens[at], self.mask[at], [self.rows[i] for i in at.tolist()]

    def respond(self, lm, prompts, mask, u, rows, temperature):
        "A response to each prompt, sampled by `u` (B, T) and cut at its end, as `Responses`."
        samples = sample(lm, prompts, mask, u, temperature, **self.how)
        cut, own, has_end = self.truncate(samples.tokens)
        return Responses(*samples, cut, cut, own, has_end, rows)

    def truncate(self, responses):
        """Cut responses (B, T) after the first stop token at position `stop_after` or later: padded
        after their end, their mask, and whether they have one (B,)."""
        return truncate_at_stop(responses, self.stop_token, self.pad_token, self.stop_after)  # P5

    def as_arguments(self, rows, said):
        "Return all that a reward may ask for: a list by each name in `TEXTS`, and of each column."
        known = {name: [row[name] for row in rows] for name in rows[0]}
        ids = [[t for t in row if t != self.pad_token] for row in said.tolist()]
        return known | dict(zip(TEXTS, (known["prompt"], self.decode(said), ids)))

    def read_by(self, model, known, prompts, responses):
        "The scores of a reward model, which reads tokens without padding and the token of an end."
        rows = torch.cat([prompts, responses], 1).tolist()
        rows = [[t for t in row if t != self.pad_token] for row in rows]
        rows = [row[:-1] if row[-1] in self.stop_token else row for row in rows]
        return model(model.read(self.tokenizer, known["prompts"], known["responses"], rows))

    def score(self, prompts, mask, found):
        "Each of the user's rewards, (B, R); NaN where there is none."
        if not self.rewards:
            raise ValueError("reward must be a function to learn from, got none (DPO learns from "
                             "pairs)")
        known = self.as_arguments(found.rows, found.said.cpu())
        numbers = iter(call_rewards(self.own, self.bound, known, self.reward_timeout))
        scores = [self.read_by(f, known, prompts, found.whole) if isinstance(f, Classifier)
                  else next(numbers) for f, _ in self.rewards]
        return torch.stack(scores, 1).to(prompts.device)

    def reward_stats(self, rollout, config):
        """Of the newest responses: those without a score, the share of groups without spread, and
        the mean of each of several rewards."""
        same = no_spread(config, rollout, self.weights).float().mean()
        numbers = torch.stack([(~rollout.is_scored).sum(), same, *rollout.parts.nanmean(0)])
        unscored, same, *means = numbers.tolist()  # the only synchronisation
        means = dict(zip(self.reward_columns, means))
        return dict(unscored=int(unscored)) | means | dict(same=same, rounds=1)


def in_epochs(total, first, count, *purpose):
    """The next `count` of `total` rows, after the `first` that came before: all come once before
    any comes again, each epoch in an order of its own, by
    `seeded_generator(*purpose, epoch)`."""
    epochs = range(first // total, (first + count - 1) // total + 1)
    orders = [torch.randperm(total, generator=seeded_generator(*purpose, epoch))
              for epoch in epochs]
    return torch.cat(orders)[first - epochs[0] * total:][:count]


def warn_of_ends(task):
    "Warn of prompts that end with a token that ends a text, or begin twice."
    if not task.rows: return
    bos = task.tokenizer.bos_token_id
    twice = sum(ids[real][:2].tolist() == [bos, bos] for ids, real in zip(task.tokens, task.mask))
    if twice:
        warnings.warn(f"{twice} of {len(task.rows)} prompts begin with {task.tokenizer.bos_token} "
                      "twice: it stands in their text, and the tokenizer adds it")
    own = sum(row["prompt"][-1]["role"] == "assistant" for row in task.rows
              if not isinstance(row["prompt"], str))
    if own:
        warnings.warn(f"{own} of {len(task.rows)} prompts end with a message of the assistant, "
                      "which is not continued: the model begins another one after it")
    ended = torch.isin(task.tokens[:, -1], torch.tensor(task.stop_token))
    ended &= task.mask.sum(1) > 1
    if ended.any():
        i = int(ended.int().argmax())
        about = f"{shorten(str(task.rows[i]['prompt']), 60)} for one: the model goes on after it"
        warnings.warn(f"{int(ended.sum())} of {len(ended)} prompts end with a token that ends a "
                      f"text, {about}")
