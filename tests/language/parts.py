"What the tests of rollout, RLHF and pipeline are made of."
from dataclasses import replace
from types import SimpleNamespace

import torch

from rlhf_notes.formulas.reward import RewardNorm
from rlhf_notes.language.loop import Loop, with_weights
from rlhf_notes.language.machine import Scaled
from rlhf_notes.language.model import RewardModel, make_gpt2
from rlhf_notes.language.rollout import Rollout, with_advantages
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.reviews.reward_model import proxy_reward
from rlhf_notes.reviews.task import WORDS, Reviews, make_tokenizer

TINY = ReviewsConfig(
    device="cpu", seed=3, sft_steps=3, sft_batch=8, labels=8, rm_batch=4, norm_samples=16,
    iterations=4, batch=16, epochs=2, minibatches=2, group=4, eval_every=2, eval_responses=10)
TIMES = {"tokens_per_second"}


def tiny_lm(seed=0, **changes):
    return make_gpt2(
        "tiny", len(WORDS), eos_token_id=0, seed=seed, n_layer=1, n_embd=16, n_head=2, **changes)


def trainer(config=TINY, seed=0, noise=0.3, scaled=False):
    """A policy a little away from its reference, so that nothing is 0 by accident; `noise=0` leaves
    it where it starts.
    """
    lm, task = tiny_lm(seed), Reviews(make_tokenizer(), config.response_length, config.stop_after)
    rm = RewardModel(tiny_lm(seed + 1), torch.Generator().manual_seed(seed))
    norm = RewardNorm(1.5, 0.2)
    machine = Scaled(config, torch.device("cpu")) if scaled else None
    t = Loop(config, lm, task, proxy_reward(rm, norm, config.precision), machine)
    t.reward_model, t.norm = rm, norm
    g = torch.Generator().manual_seed(seed + 5)
    with torch.no_grad():
        for p in t.policy.parameters() if noise else ():
            p.add_(noise * torch.randn(p.shape, generator=g) * p.std(correction=0).clamp(0.02, 1))
    return t


def a_rollout(t):
    return t.collect(t.policy.lm, *t.prompts()).map(t.machine.gather)


def a_batch(t):
    "With answers of many lengths."
    rollout = a_rollout(t)
    length = 1 + torch.arange(len(rollout)) * 5 % 16
    rollout = replace(rollout, response_mask=torch.arange(16) < length[:, None])
    return with_weights(t.config, with_advantages(t.config, rollout, t.kl.coef))


def logp_now(t, batch):
    logp, _, values = t.policy(
        batch.tokens, batch.mask, t.config.response_length, t.config.temperature)
    return logp, values


def vector(tensors): return torch.cat([x.detach().flatten() for x in tensors])


def weights(t): return vector(t.policy.parameters())


def without_times(rows): return [{k: v for k, v in r.items() if k not in TIMES} for r in rows]


class Pretend(SimpleNamespace):
    "An accelerator of one of several processes."
    def __init__(self, index, count):
        super().__init__(process_index=index, num_processes=count, gather=lambda x: x,
                         prepare_model=lambda x: x, device=torch.device("cpu"))


def handmade(T=4):
    g = torch.Generator().manual_seed(0)
    response_mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    r = lambda: torch.randn(4, T, generator=g)
    tokens = torch.zeros(4, 6, dtype=torch.long)
    return Rollout(tokens, torch.ones(4, 6).bool(), response_mask, response_mask[:, 2],
                   torch.randn(4, generator=g), r(), r(), r())


class After:
    "A Ctrl-C after some steps."
    def __init__(self, steps): self.left = steps
    def __enter__(self): return self
    def __exit__(self, *args): pass
    def is_set(self):
        self.left -= 1
        return self.left < 0
