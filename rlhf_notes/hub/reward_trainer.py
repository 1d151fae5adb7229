r"""A reward model of your own, from pairs of responses: trained, saved, and used as a reward.

[DPO](trainers.py) learns a policy from pairs at once. A reward model learns a
*score*, which then judges responses that nobody has seen: those of the policy in training. The
score $r$ of a text is one number, read off the last token of a language model whose head was
replaced. It is trained until the difference of two scores predicts the choice
([Bradley and Terry](../../nbs/formulas/12_preference.ipynb)):

$$L = -\log \sigma\bigl(r(x, y_{\text{chosen}}) - r(x, y_{\text{rejected}})\bigr)
+ c\,\bigl(r(x, y_{\text{chosen}}) + r(x, y_{\text{rejected}})\bigr)^2$$

The choices say nothing of where 0 is; the second term, `centre=0.01` say, keeps it between the two.
Prompt and response are read together, as they will be when the model is a reward.

```python
from rlhf_notes import RLHF, RewardTrainer

pairs = [dict(prompt="about the hotel .", chosen="it was good .", rejected="it was bad .")]
rm = RewardTrainer("path/or/name", prompts=pairs, centre=0.01).learn()
rm(["about the film . it was superb ."])  # scores
rm.save("rm")                             # as AutoModelForSequenceClassification
rlhf = RLHF("path/or/name", prompts=["about the hotel ."], reward=rm).learn()
```
"""

__all__ = ['whole_texts', 'RewardTrainer']

import copy
from pathlib import Path

import torch

from ..checks import checked
from ..fast.adam import Adam
from ..formulas.preference import bradley_terry_loss
from .load import Classifier, load_model
from .pairs import continuation, margins_of, pairs_of
from .prompts import Prompts, in_epochs, read_prompts
from .save import save_classifier, to_classifier
from ..language.loop import check_left, rate_by_size
from ..language.model import RewardModel
from ..training.devices import process_device, usual_defaults
from ..training.fit import as_hooks, check_finite, fit, progress_bar
from ..training.seeds import seeded_generator


def whole_texts(task: Prompts) -> list:
    "Two for each row, chosen and rejected, as `RLHF` shows them: tokens of strings, or chats."
    found = []
    for row, ids, mask, pair in zip(task.rows, task.tokens, task.mask, pairs_of(task.rows)):
        for response in pair:
            if isinstance(row["prompt"], str):
                more = continuation(task.tokenizer, row["prompt"], response)
                found.append(ids[mask].tolist() + more)
            else:
                found.append([*row["prompt"], dict(role="assistant", content=response)])
    return found


class RewardTrainer(Classifier):
    "A reward model from pairs (Bradley and Terry 1952); the `reward=` of `RLHF`."
    @usual_defaults()
    @checked(centre="[0, inf)", iterations="int [1, inf)", batch="int [1, inf)",
             learning_rate="(0, inf)?", max_grad_norm="(0, inf)", seed="int [0, inf)")
    def __init__(
        self,
        model,  # a causal language model: its name, its directory, or the model itself
        tokenizer=None,  # of a model that is given itself
        prompts=(),  # dicts with prompt, chosen, rejected, perhaps margin; or a .jsonl file
        centre: float = 0.0,  # c: weight of (r_chosen + r_rejected)^2
        *,
        iterations: int = 60,  # gradient steps
        batch: int = 32,  # pairs in each step; at most all of them
        learning_rate: float | None = None,  # of Adam; None = by size; falls linearly to 0
        max_grad_norm: float = 1.0,  # maximum gradient norm
        seed: int = 0,  # of the new head and the order of the pairs
        device: str = "auto",  # auto, cpu, cuda or mps
    ):
        pairs_of(rows := read_prompts(prompts))
        lm, tokenizer = load_model(model, tokenizer, process_device(device))
        head = seeded_generator("reward head", seed)
        theirs, own = to_classifier(RewardModel(copy.deepcopy(lm), head), tokenizer)
        super().__init__(theirs.to(lm.device), tokenizer=own)
        texts = whole_texts(Prompts(tokenizer, rows, None, 1, lm=lm))
        self.tokens, self.mask = (x.unflatten(0, (-1, 2)) for x in self.encode(texts))
        self.margins = margins_of(rows).to(lm.device)
        self.optimizer = Adam(theirs, 1e-8)
        self.learning_rate = learning_rate or rate_by_size(self.optimizer.vector.numel())
        self.centre, self.max_grad_norm, self.seed = centre, max_grad_norm, seed
        self.iteration, self.iterations, self.batch = 0, iterations, min(batch, len(rows))
        self.rows = []

    @property
    def left(self) -> bool:
        "True while iterations are left."
        return self.iteration < self.iterations

    def pairs(self) -> torch.Tensor:  # (batch,) rows
        "The pairs of this iteration: all once, in an order of each epoch, before any comes again."
        first = self.iteration * self.batch
        return in_epochs(len(self.tokens), first, self.batch, "pairs", self.seed)

    def iterate(self) -> dict:  # column -> number
        "One gradient step: its row of metrics."
        check_left(self)
        self.optimizer.tie(self.model)
        rows = self.pairs().to(self.tokens.device)
        tokens, mask = (x[rows].flatten(0, 1) for x in (self.tokens, self.mask))
        chosen, rejected = self.score(tokens, mask).view(-1, 2).unbind(1)
        loss = bradley_terry_loss(chosen, rejected, self.margins[rows], self.centre)
        self.optimizer.zero_grad()
        loss.backward()
        norm, margin = self.optimizer.clip(self.max_grad_norm), (chosen - rejected).detach()
        rate = self.learning_rate * (1 - self.iteration / self.iterations)
        self.optimizer.step(rate)
        self.iteration += 1
        row = dict(iteration=self.iteration, loss=loss.item(), margin=margin.mean().item(),
                   accuracy=(margin > 0).float().mean().item(), grad_norm=norm.item(),
                   learning_rate=rate)
        check_finite(f"reward model, iteration {self.iteration}", row)
        self.rows.append(row)
        return row

    @usual_defaults("model")
    def learn(
        self,
        callback=None,  # callback(trainer, row) after each iteration; False ends the training
    ) -> "RewardTrainer":  # itself, with the metrics in `rows`
        "Run the iterations that are left; Ctrl-C stops after the current one."
        bar = progress_bar(self.iterations, self.iteration, "reward model")
        fit(self, bar, shown=dict(loss="loss", accuracy="accuracy"), hooks=as_hooks(callback))
        return self

    def save(
        self,
        path,  # a directory; other files in it stay
    ):
        "Write model and tokenizer for `AutoModelForSequenceClassification`."
        save_classifier(Path(path), self.model, self.tokenizer)
