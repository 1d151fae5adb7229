"""A language model made from nothing first learns to continue texts.

The loss is the mean of -log p of each real token given those before it; AdamW, a learning rate that
rises in a straight line for the first 7.5% of the steps and falls along a cosine
([Loshchilov and Hutter 2017](https://arxiv.org/abs/1608.03983)), gradients rescaled to a norm of at
most 1.

Every stage can be stopped and continued to the last bit, and a NaN in the loss stops it before it
has touched a weight.
"""

__all__ = ['next_token_loss', 'warm_cosine', 'gradient_step', 'Pretraining']

import math

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from ..formulas.logprob import selective_log_softmax
from ..formulas.masking import masked_mean
from ..language.loop import check_left
from ..language.model import autocast, hidden_states, to_logits
from ..training.fit import Stage, check_finite


def next_token_loss(lm, tokens, mask):
    """Minus the mean log-probability of each real token (B, T), where `mask` is True, that has one
    before it, in nats."""
    counts = mask[:, :-1] & mask[:, 1:]
    logits = to_logits(lm, hidden_states(lm, tokens[:, :-1], mask[:, :-1], counts))
    return -masked_mean(selective_log_softmax(logits, tokens[:, 1:], mask=counts), counts)


def warm_cosine(step: int, steps: int) -> float:
    "Share of the peak learning rate: a rise over 7.5% of the steps, then a cosine down to 0."
    rise = min(1.0, (step + 1) / max(1.0, 0.075 * steps))
    return rise * 0.5 * (1 + math.cos(math.pi * step / steps))


def gradient_step(where, optimizer, learning_rate, loss, max_norm=math.inf, **logs):
    """One step of an optimizer with one group of weights; the loss, `logs` and the norm of the
    gradient as numbers, or FloatingPointError, which says `where`, if one is not finite."""
    group, = optimizer.param_groups
    optimizer.zero_grad()
    loss.backward()
    norm = clip_grad_norm_(group["params"], max_norm)
    row = dict(loss=loss.detach(), **logs, grad_norm=norm)
    row = dict(zip(row, torch.stack([*row.values()]).tolist())) # the only synchronisation
    check_finite(where, row)
    group["lr"] = learning_rate
    optimizer.step()
    return row | dict(learning_rate=learning_rate)


class Pretraining(Stage):
    "Trains a language model on a task's texts, step by step."
    PARTS = "lm", "optimizer"
    TEXTS = 8192 # at most; more steps read them several times

    def __init__(self, config, lm, task):
        "The model is trained in place; the task has `train_texts(n, seed) -> (tokens, mask)`."
        c, self.lm, self.device = config, lm, next(lm.parameters()).device
        self.config, self.iteration, self.iterations = c, 0, c.sft_steps
        fused = self.device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(lm.parameters(), fused=fused)
        if not self.iterations: return
        n = min(c.sft_steps * c.sft_batch, self.TEXTS)
        self.texts = [x.to(self.device) for x in task.train_texts(n, c.seed)]
        generator = torch.Generator().manual_seed(c.seed)
        order = torch.randint(len(self.texts[0]), (c.sft_steps, c.sft_batch), generator=generator)
        self.order = order.to(self.device)

    def iterate(self):
        "One gradient step on a batch of texts; its row: step, loss, grad_norm, learning_rate."
        check_left(self, "sft_steps")
        c, step = self.config, self.iteration + 1
        rate = c.sft_learning_rate * warm_cosine(self.iteration, self.iterations)
        with autocast(self.device, c.precision):
            loss = next_token_loss(self.lm, *(x[self.order[self.iteration]] for x in self.texts))
        row = gradient_step(f"pretraining, step {step}", self.optimizer, rate, loss, max_norm=1.0)
        self.iteration = step
        return dict(step=step) | row
