import copy
import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

from typing import get_args
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlhf_notes.formulas.advantage import gae_tokens, group_advantage, rloo_advantage
from rlhf_notes.formulas.kl import AdaptiveKLController
from rlhf_notes.formulas.reward import RewardNorm
from rlhf_notes.formulas.whitening import whiten
from rlhf_notes.language import rlhf as R
from rlhf_notes.language.config import RLHFConfig, Variant
from rlhf_notes.formulas.logprob import linear_log_probs
from rlhf_notes.language.model import RewardModel, answer_states, hidden_states, make_gpt2, pad_outside, to_logits
from rlhf_notes.language.task import WORDS, Reviews, make_tokenizer
from rlhf_notes.training.runs import Run
from strategies import SEEDS

TINY = RLHFConfig(device="cpu", seed=3, sft_steps=3, sft_batch=8, labels=8, rm_batch=4, norm_samples=16, iterations=4, batch=16, epochs=2, minibatches=2, group=4, eval_every=2, eval_answers=10)
TIMES = {"tokens_per_second", "seconds_sampling", "seconds_scoring", "seconds_update"}


def tiny_lm(seed=0, **changes):
    return make_gpt2("tiny", len(WORDS), eos_token_id=0, seed=seed, n_layer=1, n_embd=16, n_head=2, **changes)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    R.save_policy(path / "lm", tiny_lm(), tokenizer)
    return str(path / "lm")


def trainer(config=TINY, seed=0, noise=0.3, processes=None):
    "A policy a little away from its reference, so that nothing is 0 by accident; `noise=0` leaves it where it starts."
    lm, task = tiny_lm(seed), Reviews(make_tokenizer(), config.response_length, config.stop_after)
    rm = RewardModel(tiny_lm(seed + 1), torch.Generator().manual_seed(seed))
    t = R.RLHF(config, lm, rm, RewardNorm(1.5, 0.2), task, processes)
    g = torch.Generator().manual_seed(seed + 5)
    with torch.no_grad():
        for p in t.policy.parameters() if noise else (): p.add_(noise * torch.randn(p.shape, generator=g) * p.std(correction=0).clamp(0.02, 1))
    return t


def a_rollout(t):
    return t.gather(t.judge(*(d := t.draw())[:2], t.sample(t.policy.lm, *d)))


def a_batch(t):
    "With answers of many lengths."
    rollout = a_rollout(t)
    length = 1 + torch.arange(len(rollout)) * 5 % 16
    return R.with_advantages(t.config, replace(rollout, counts=torch.arange(16) < length[:, None]), t.kl.coef)


def logp_now(t, batch):
    logits, values = t.policy(batch.tokens, batch.mask, t.config.response_length)
    return (logits / t.config.temperature).log_softmax(-1).gather(-1, batch.answers[..., None])[..., 0], values


def vector(tensors): return torch.cat([x.detach().flatten() for x in tensors])
def weights(t): return vector(t.policy.parameters())
def without_times(rows): return [{k: v for k, v in r.items() if k not in TIMES} for r in rows]


# --- rollout

def test_the_log_probabilities_are_those_of_the_policy_and_of_the_reference_at_the_temperature():     # P1
    t = trainer(replace(TINY, temperature=0.6))
    b = a_batch(t)
    torch.testing.assert_close(b.logp, logp_now(t, b)[0].detach(), rtol=0, atol=2e-5)
    logits = to_logits(t.reference, hidden_states(t.reference, b.tokens, b.mask)[:, -17:-1])
    torch.testing.assert_close(b.logp_ref, (logits / 0.6).log_softmax(-1).gather(-1, b.answers[..., None])[..., 0].detach(), rtol=0, atol=2e-5)
    assert (b.logp - b.logp_ref).abs().max() > 0.1


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_without_logits_it_is_the_same_training(algo, monkeypatch):                                  # a large vocabulary, as it were
    calls = []
    monkeypatch.setattr("rlhf_notes.language.model.linear_log_probs", lambda *args, f=linear_log_probs, **kwargs: calls.append(args[0].shape) or f(*args, chunk=37, **kwargs))
    seen = {}
    for lean in (2**62, 0):
        monkeypatch.setattr("rlhf_notes.language.model.LEAN", lean)
        t = trainer(replace(TINY, algo=algo, temperature=0.7))
        rows = [t.iterate() for _ in range(2)]
        seen[lean] = without_times(rows), weights(t), [p.grad for p in t.policy.parameters() if p.grad is not None]
        assert bool(calls) == (lean == 0)
    (a, wa, ga), (b, wb, gb) = seen.values()
    for x, y in zip(a, b):
        for k in x:
            if x[k] is not None and not isinstance(x[k], str): assert y[k] == pytest.approx(x[k], rel=1e-3, abs=1e-4), k
    torch.testing.assert_close(wa, wb, atol=2e-4, rtol=1e-3)
    assert vector(ga).norm() > 0 and (vector(ga) - vector(gb)).norm() < 1e-2 * vector(ga).norm()


@pytest.mark.parametrize("algo", ["ppo", "grpo", "rloo"])
def test_the_ratio_of_the_first_minibatch_is_one(algo):                                              # P1, P4
    t = trainer(replace(TINY, algo=algo, temperature=0.7, epochs=1, minibatches=1))
    row = t.iterate()
    assert abs(row["ratio"] - 1) < 1e-5 and row["approx_kl"] < 1e-9 and row["clip_fraction"] == 0


def test_at_the_start_policy_and_reference_are_one_and_the_value_is_zero():                          # P2
    t = trainer(noise=0)
    b = a_rollout(t)
    torch.testing.assert_close(b.logp, b.logp_ref, rtol=0, atol=2e-5)
    assert not b.values.any()


def test_values_are_those_of_the_policy():
    t = trainer()
    b = a_rollout(t)
    torch.testing.assert_close(b.values, logp_now(t, b)[1].detach(), rtol=0, atol=1e-5)
    assert b.values.std() > 0.01


def test_scores_are_of_the_cut_answer_and_the_penalty_replaces_them():                               # P5, R3
    t = trainer(replace(TINY, penalty=-7.5, batch=64))
    b = a_rollout(t)
    cut, counts, found = t.task.truncate(b.answers)
    raw = t.reward_model(torch.cat([b.tokens[:, :-16], cut], 1), torch.cat([b.mask[:, :-16], counts], 1)).detach()
    torch.testing.assert_close(b.scores, torch.where(found, 1.5 * raw + 0.2, -7.5))
    assert torch.equal(b.counts, counts) and torch.equal(b.valid, found) and 0 < found.sum() < 64


def test_answers_go_on_past_the_end():                                                               # G4
    b = a_rollout(trainer(replace(TINY, batch=64)))
    assert b.answers.shape == (64, 16) and b.tokens.max() < len(WORDS) or b.mask[b.tokens == len(WORDS)].sum() == 0
    assert (b.answers < len(WORDS)).all() and b.mask[:, -16:].all() and not b.counts.all()


def test_queries_of_a_group_are_one():
    t = trainer(replace(TINY, algo="rloo"))
    q = t.draw()[0].view(4, 4, -1)
    assert torch.equal(q, q[:, :1].expand_as(q)) and len(q[:, 0].unique(dim=0)) > 1
    assert len(trainer().draw()[0].unique(dim=0)) > 4


def test_chance_follows_from_seed_iteration_and_process():                                           # G6
    def first(t): return t.draw()[2]
    t = trainer()
    assert torch.equal(first(t), first(trainer()))
    assert R.process_seed(7, 0) == 7 and R.process_seed(7, 3) == 300_016
    other = trainer(replace(TINY, seed=4)); later = trainer(); later.iteration = 1
    rank = R.Processes("cpu"); rank.index = 1
    assert all(not torch.equal(first(t), first(x)) for x in (other, later, trainer(processes=rank)))
    assert torch.equal(R.stream("a", 1, 2).get_state(), R.stream("a", 1, 2).get_state())
    states = [R.stream(*x).initial_seed() for x in (("a", 1, 2), ("a", 12), ("b", 1, 2), ("a", 1), ("a", 2, 1))]
    assert len(set(states)) == 5


def test_rows_of_a_rollout():
    b = a_batch(trainer())
    assert len(b) == 16 and len(b[3:5]) == 2 and b[3:5].answers.shape == (2, 16) and b[torch.tensor([5])].scores == b.scores[5]
    assert a_batch(trainer(replace(TINY, algo="rloo")))[:4].returns is None


# --- advantages

def handmade(T=4):
    g = torch.Generator().manual_seed(0)
    counts = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    r = lambda: torch.randn(4, T, generator=g)
    tokens = torch.zeros(4, 6, dtype=torch.long)
    return R.Rollout(tokens, torch.ones(4, 6).bool(), counts, counts[:, 2], torch.randn(4, generator=g), r(), r(), r())


def test_kl_is_paid_per_token_and_the_score_lands_on_the_last_that_counts():                        # P8
    x = handmade()
    b = R.with_advantages(replace(TINY, whiten_rewards=False, whiten_advantages=False), x, 0.3)
    last = torch.tensor([2, 3, 0, 1])
    expected = -0.3 * (x.logp - x.logp_ref)
    expected[torch.arange(4), last] += x.scores
    torch.testing.assert_close(b.rewards, expected.where(x.counts, torch.tensor(0.0)))
    in_loss = R.with_advantages(replace(TINY, kl_in_loss=True), x, 0.3).rewards
    assert torch.equal(in_loss[torch.arange(4), last], x.scores) and in_loss.count_nonzero() == 4


def test_ppo_whitens_rewards_keeping_their_mean_and_advantages_removing_it():                        # P9
    x = handmade()
    raw = R.with_advantages(replace(TINY, whiten_rewards=False, whiten_advantages=False), x, 0.3)
    adv, ret = gae_tokens(whiten(raw.rewards, x.counts, shift_mean=False), x.values, x.counts, 1.0, 0.95)
    b = R.with_advantages(TINY, x, 0.3)
    torch.testing.assert_close(b.returns, ret); torch.testing.assert_close(b.advantages, whiten(adv, x.counts))
    counted = b.advantages[x.counts]
    assert abs(counted.mean()) < 1e-5 and abs(counted.var(correction=0) - 1) < 1e-4
    assert not torch.allclose(b.returns, raw.returns, atol=1e-2)
    plain = gae_tokens(raw.rewards, x.values, x.counts, 1.0, 0.95)
    torch.testing.assert_close((raw.advantages, raw.returns), plain)


def test_nothing_is_discounted_unless_asked():                                                       # P6
    x = replace(handmade(), values=torch.zeros(4, 4))
    b = R.with_advantages(replace(TINY, lam=1.0, whiten_rewards=False), x, 0.0)
    torch.testing.assert_close(b.returns, torch.where(x.counts, x.scores[:, None], torch.tensor(0.0)))
    half = R.with_advantages(replace(TINY, lam=1.0, gamma=0.5, whiten_rewards=False), x, 0.0)
    torch.testing.assert_close(half.returns[1], x.scores[1] * torch.tensor([0.125, 0.25, 0.5, 1.0]))


@pytest.mark.parametrize("algo, options, formula", [("rloo", {}, rloo_advantage), ("grpo", {}, group_advantage), ("grpo", dict(group_scale="none"), lambda x: group_advantage(x, None)),
                                                    ("grpo", dict(group_scale="batch"), lambda x: group_advantage(x, "batch"))])
def test_groups_compare_whole_rewards(algo, options, formula):
    x = handmade()
    c = replace(TINY, algo=algo, group=2, **options)
    b = R.with_advantages(c, x, 0.2)
    total = x.scores - 0.2 * ((x.logp - x.logp_ref) * x.counts).sum(1)
    torch.testing.assert_close(b.advantages, formula(total.view(2, 2)).reshape(4, 1).expand(4, 4))
    assert b.returns is None


# --- losses

def test_loss_by_hand():
    x = R.with_advantages(replace(TINY, whiten_rewards=False, whiten_advantages=False), handmade(), 0.1)
    g = torch.Generator().manual_seed(1)
    logp, values = x.logp + 0.3 * torch.randn(4, 4, generator=g), x.values + torch.randn(4, 4, generator=g)
    policy, value, _ = R.losses(replace(TINY, clip=0.1, value_clip=0.3), x, logp, values, 0.1)
    p = v = n = 0.0
    for i in range(4):
        for j in range(4):
            if not x.counts[i, j]: continue
            A, r, V, V0, ret = (float(y[i, j]) for y in (x.advantages, (logp - x.logp).exp(), values, x.values, x.returns))
            p -= min(r * A, min(max(r, 0.9), 1.1) * A)
            v += 0.5 * max((V - ret) ** 2, (min(max(V, V0 - 0.3), V0 + 0.3) - ret) ** 2)                # P10
            n += 1
    assert policy.item() == pytest.approx(p / n, rel=1e-5) and value.item() == pytest.approx(v / n, rel=1e-5)
    assert R.losses(replace(TINY, value_clip=0.0), x, logp, values, 0.1)[1] < value


def test_the_kl_in_the_loss_is_k3_times_the_coefficient():
    x = R.with_advantages(replace(TINY, algo="rloo", group=2), handmade(), 0.1)
    c, logp = replace(TINY, algo="rloo"), x.logp + 0.1
    d = (logp - x.logp_ref)[x.counts]
    with_kl, without = R.losses(replace(c, kl_in_loss=True), x, logp, x.values, 0.4)[0], R.losses(c, x, logp, x.values, 0.4)[0]
    assert (with_kl - without).item() == pytest.approx(0.4 * (torch.exp(-d) - 1 + d).mean().item(), rel=1e-4)


def test_no_value_loss_without_a_value_head():
    x = R.with_advantages(replace(TINY, algo="grpo", group=2), handmade(), 0.1)
    assert R.losses(replace(TINY, algo="grpo"), x, x.logp, x.values, 0.1)[1] is None
    t = trainer(replace(TINY, algo="grpo"))
    before = t.policy.value_head.weight.clone()
    row = t.iterate()
    assert torch.equal(t.policy.value_head.weight, before) and row["value_loss"] is None is row["explained_variance"]
    assert trainer().iterate()["value_loss"] > 0


def test_the_share_of_a_part():
    whole = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    assert float(R.share(whole[:1], whole, "token-mean")) == pytest.approx(0.8)
    assert all(R.share(whole[:1], whole, a) == 0.5 for a in ("seq-mean-token-mean", "seq-mean-token-sum", "constant"))


# --- the step

def gradient_of(t, batch, microbatches):
    t.config = replace(t.config, microbatches=microbatches)
    t.weights.grad.zero_()
    parts = t.parts(batch)
    for part in parts: t.gradient(part, batch, part is parts[-1])
    return t.weights.grad.clone()


@pytest.mark.parametrize("options", [dict(algo="ppo"), *(dict(algo="rloo", variant=v, kl_in_loss=True) for v in get_args(Variant))], ids=lambda o: o.get("variant", "value head"))
def test_microbatches_add_up_to_the_gradient_of_the_minibatch(options):                              # P7
    t = trainer(replace(TINY, **options))
    batch = a_batch(t)
    assert len(batch.counts.sum(1).unique()) > 2
    t.policy.lm.transformer.wte.weight.data.add_(0.02 * torch.randn(len(WORDS), 16, generator=torch.Generator().manual_seed(0)))
    whole = gradient_of(t, batch, 1)
    for k in (2, 8): torch.testing.assert_close(gradient_of(t, batch, k), whole, rtol=1e-4, atol=1e-6 * whole.abs().max().item() + 1e-8)
    assert whole.norm() > 1e-3


def test_the_gradient_is_that_of_the_loss():
    t = trainer()
    batch = a_batch(t)
    found = gradient_of(t, batch, 2)
    logp, values = logp_now(t, batch)
    policy, value, _ = R.losses(t.config, batch, logp, values, t.kl.coef)
    expected = vector(torch.autograd.grad(policy + 0.1 * value, list(t.policy.parameters())))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_every_step_has_a_gradient_of_its_own(monkeypatch):
    t = trainer(replace(TINY, max_grad_norm=1e9))
    monkeypatch.setattr(t, "adam", lambda: None)
    b = a_batch(t)
    assert t.step(b)["grad_norm"] == t.step(b)["grad_norm"] > 0


def test_what_comes_after_the_end_does_not_teach():
    t = trainer()
    batch = a_batch(t)
    clean = gradient_of(t, batch, 1)
    poison = lambda x: x.masked_fill(~batch.counts, 1e6)
    dirty = replace(batch, logp=poison(batch.logp), logp_ref=poison(batch.logp_ref), values=poison(batch.values), advantages=poison(batch.advantages), returns=poison(batch.returns))
    torch.testing.assert_close(gradient_of(t, dirty, 1), clean, rtol=1e-5, atol=1e-7)


class TensorFlowAdam:
    "As the TensorFlow 1 documentation writes it: epsilon hat outside of the bias correction."
    def __init__(self, x, eps): self.x, self.eps, self.m, self.v, self.t = x.double(), eps, 0.0, 0.0, 0
    def step(self, g, lr):
        g = g.double(); self.t += 1
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g ** 2
        self.x = self.x - lr * math.sqrt(1 - 0.999 ** self.t) / (1 - 0.9 ** self.t) * self.m / (self.v.sqrt() + self.eps)


@given(seed=SEEDS, scale=st.sampled_from([1e-6, 1e-5, 1e-3, 1.0]))
@settings(max_examples=10)
def test_adam_is_that_of_tensorflow(seed, scale):                                                   # P12
    g = torch.Generator().manual_seed(seed)
    x = torch.nn.Parameter(torch.randn(7, generator=g, dtype=torch.float64))
    ours, theirs = torch.optim.Adam([x], lr=1e-3, eps=1e-5), TensorFlowAdam(x.detach().clone(), 1e-5)
    for step in range(1, 6):
        x.grad = scale * torch.randn(7, generator=g, dtype=torch.float64)
        ours.param_groups[0]["eps"] = R.tensorflow_eps(1e-5, 0.999, step)
        ours.step(); theirs.step(x.grad, 1e-3)
    torch.testing.assert_close(x.detach(), theirs.x, rtol=1e-9, atol=1e-12)


def first_step(adam):
    t = trainer(replace(TINY, adam=adam, learning_rate=1.0), noise=0)
    t.weights.grad.fill_(1e-5)
    before = weights(t); t.adam()
    return (before - weights(t)).median().item()


def test_the_first_step_of_pytorchs_adam_is_sixteen_times_longer():                                 # P12
    assert first_step("pytorch") == pytest.approx(0.5, rel=1e-3)
    assert first_step("pytorch") / first_step("tensorflow") == pytest.approx(16.3, abs=0.05)


def test_the_learning_rate_falls_to_zero_in_a_straight_line():                                      # G5
    t = trainer()
    found, used, step = [], [], t.optimizer.step
    t.optimizer.step = lambda rate: (used.append(rate), step(rate))
    for _ in range(4):
        row = t.iterate(); found.append(row["learning_rate"])
        assert used == [row["learning_rate"]] * 4; used.clear()
    assert found == pytest.approx([1e-3 * (1 - i / 4) for i in range(4)])
    assert t.optimizer.eps == R.tensorflow_eps(1e-5, 0.999, 16)                      # P12: four iterations of four steps


def test_a_long_gradient_is_shortened():
    t = trainer(replace(TINY, max_grad_norm=1e-3)); free = trainer()
    b = a_batch(t)
    assert t.step(b)["grad_norm"] == pytest.approx(free.step(b)["grad_norm"].item()) and t.weights.grad.norm() == pytest.approx(1e-3, rel=1e-3)


def test_the_coefficient_of_the_kl_adapts():                                                        # P11
    t = trainer(replace(TINY, kl_target=0.5, kl_horizon=100))
    expected, other = AdaptiveKLController(0.1, 0.5, 100), trainer(replace(TINY, kl_target=0.0))
    for _ in range(3):
        row = t.iterate()
        assert row["kl_coef"] == expected.coef
        expected.update(row["kl_k1"], 16)
        assert other.iterate()["kl_coef"] == 0.1
    assert t.kl.coef == expected.coef != 0.1
    assert trainer(replace(TINY, kl_coef=0.0)).iterate()["kl_coef"] == 0


def test_the_kl_that_steers_is_that_of_whole_answers():                                             # P11
    b = a_rollout(trainer())
    kl = ((b.logp - b.logp_ref) * b.counts).sum(1).mean().item()
    t = trainer(replace(TINY, kl_target=0.9 * kl, kl_horizon=100))
    t.iterate()
    assert t.kl.coef == pytest.approx(0.1 * (1 + (1 / 0.9 - 1) * 16 / 100), rel=1e-4)


def test_the_log_of_a_minibatch():                                                                  # P13
    t = trainer()
    b = a_batch(t)
    logp, values = (x.detach() for x in logp_now(t, b))
    logp, values = logp + 0.2 * torch.sin(torch.arange(16.0)), values + 0.3 + 0.3 * torch.cos(torch.arange(16.0))
    some = torch.rand(16, 16)
    x = {k: v.item() for k, v in t.diagnose(b, logp, values, some).items()}
    c, d, r = b.counts, (logp - b.logp)[b.counts], b.returns[b.counts]
    A, V, V0 = b.advantages[c], values[c], b.values[c]
    assert x["approx_kl"] == pytest.approx(0.5 * d.square().mean().item(), rel=1e-4)
    assert x["clip_fraction"] == pytest.approx(((A > 0) & (d.exp() > 1.2) | (A < 0) & (d.exp() < 0.8)).float().mean().item(), abs=1e-6) and x["clip_fraction"] > 0
    clipped = V.clamp(V0 - 0.2, V0 + 0.2)
    assert x["value_clip_fraction"] == pytest.approx(((clipped - r).abs() > (V - r).abs()).float().mean().item(), abs=1e-6) and x["value_clip_fraction"] > 0
    assert x["explained_variance"] == pytest.approx((1 - (r - V).var() / r.var()).item(), rel=1e-3)
    assert x["entropy"] == pytest.approx(some[c].mean().item(), rel=1e-5) and x["ratio"] == pytest.approx(d.exp().mean().item(), rel=1e-5)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_the_log_of_an_iteration_is_the_mean_over_its_minibatches(algo, monkeypatch):                 # P13
    t = trainer(replace(TINY, algo=algo))
    found, step = [], t.step
    monkeypatch.setattr(t, "step", lambda batch: found.append(step(batch)) or found[-1])
    row = t.iterate()
    assert len(found) == 4 and {"policy_loss", "approx_kl", "grad_norm"} <= set(found[0])
    for name in found[0]:
        each = [x[name].item() for x in found]
        assert row[name] == pytest.approx(sum(each) / 4, rel=1e-5, abs=1e-8), name
    assert row["policy_loss"] != found[-1]["policy_loss"].item() and row["approx_kl"] != found[-1]["approx_kl"].item() != found[0]["approx_kl"].item()


def test_the_entropy_is_that_of_the_policy():
    t = trainer(replace(TINY, temperature=0.5))
    b = a_batch(t)
    (_, _, entropy), _ = t.gradient(b, b, True)
    logits, _ = t.policy(b.tokens, b.mask, 16)
    expected = torch.distributions.Categorical(logits=logits / 0.5).entropy().detach()
    torch.testing.assert_close(entropy[b.counts], expected[b.counts], rtol=1e-4, atol=1e-4)
    whole = replace(b, counts=torch.ones_like(b.counts))
    (_, _, entropy), _ = t.gradient(whole, whole, True)
    torch.testing.assert_close(entropy, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_nothing_depends_on_what_stands_behind_the_end(algo, monkeypatch):
    def run():
        t = trainer(replace(TINY, algo=algo, kl_in_loss=algo == "grpo"))
        return without_times([t.iterate() for _ in range(2)]), [p.grad for p in t.policy.parameters() if p.grad is not None], weights(t)
    (rows, grads, at_last), calls = run(), []
    def all_of_it(lm, tokens, mask, response, counts=None):
        calls.append(counts)
        return answer_states(lm, tokens, mask, response)
    monkeypatch.setattr("rlhf_notes.language.model.answer_states", all_of_it)
    more, wide, after = run()
    assert calls and all(c is not None for c in calls) and not torch.cat(calls).all()                 # asked for less
    for a, b in zip(rows, more):
        for k in a: assert b[k] == a[k] or b[k] == pytest.approx(a[k], rel=1e-4, abs=1e-5), k
    assert (vector(grads) - vector(wide)).norm() < 1e-3 * vector(grads).norm(); torch.testing.assert_close(at_last, after, atol=1e-4, rtol=1e-3)


def test_the_log_does_not_depend_on_the_microbatches():
    rows = [trainer(replace(TINY, microbatches=k)).iterate() for k in (1, 4)]
    for name in set(R.COLUMNS) - {"true_score"}: assert rows[0][name] == pytest.approx(rows[1][name], rel=2e-3, abs=1e-4), name


def test_the_row_of_an_iteration():
    t = trainer()
    b = a_rollout(t)
    row = t.iterate()
    d = (b.logp - b.logp_ref) * b.counts
    k3 = (torch.exp(-d) - 1 + d) * b.counts
    assert row["score"] == pytest.approx(b.scores.mean().item(), rel=1e-5) and row["kl_k1"] == pytest.approx(d.sum(1).mean().item(), rel=1e-4) and row["kl_k3"] == pytest.approx(k3.sum(1).mean().item(), rel=1e-4)
    assert row["length"] == b.counts.sum(1).float().mean() and row["valid"] == b.valid.float().mean() and row["iteration"] == 1 and row["true_score"] is None
    assert set(row) == {*R.COLUMNS} | TIMES and all(row[x] > 0 for x in TIMES)
    assert row["tokens_per_second"] == pytest.approx(256 / sum(row[x] for x in TIMES if x.startswith("seconds")))


def test_every_answer_is_learned_from_once_per_epoch(monkeypatch):
    t, seen = trainer(replace(TINY, epochs=3, minibatches=4)), []
    step = t.step
    monkeypatch.setattr(t, "step", lambda b: seen.append(b) or step(b))
    t.iterate()
    assert [len(b) for b in seen] == [4] * 12
    epochs = [torch.cat([b.logp for b in seen[i:i + 4]]) for i in (0, 4, 8)]
    assert all(torch.equal(e.sort(0).values, epochs[0].sort(0).values) for e in epochs) and not torch.equal(epochs[0], epochs[1])


def test_only_the_policy_learns():
    t = trainer()
    frozen = vector([*t.reference.parameters(), *t.reward_model.parameters()]); before = weights(t)
    t.iterate()
    assert torch.equal(vector([*t.reference.parameters(), *t.reward_model.parameters()]), frozen) and not torch.equal(weights(t), before)


def test_dropout_is_gone():                                                                         # P4
    lm = tiny_lm()
    for m in lm.modules():
        if isinstance(m, torch.nn.Dropout): m.p = 0.5
    t = R.RLHF(TINY, lm, RewardModel(tiny_lm(1)), RewardNorm(), Reviews(make_tokenizer(), 16))
    assert {m.p for m in t.policy.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
    row = t.iterate()
    assert abs(row["kl_k1"]) < 1e-4 and t.policy.training


def test_training_never_sees_the_true_score(monkeypatch):
    t = trainer()
    def forbidden(*args): raise AssertionError("the true score was looked up")
    monkeypatch.setattr(Reviews, "true_scores", forbidden); monkeypatch.setattr("rlhf_notes.language.task.human_score", forbidden)
    t.iterate()
    with pytest.raises(AssertionError): R.evaluate(t)


def test_learning_raises_the_score():
    "Whatever the reward model likes, the policy comes to write: here a word."
    c = replace(TINY, iterations=14, batch=32, kl_coef=0.0, learning_rate=3e-2, penalty=0.0, stop_after=15)
    for algo in ("ppo", "rloo", "grpo"):
        t = trainer(replace(c, algo=algo), noise=0)
        t.judge_before = t.judge
        def judge(queries, mask, answers): return replace(t.judge_before(queries, mask, answers), scores=(answers.tokens == 5).float().sum(1))
        t.judge = judge
        scores = [t.iterate()["score"] for _ in range(12)]
        assert sum(scores[-3:]) / 3 > 4 * max(sum(scores[:2]) / 2, 0.2), (algo, scores)


def test_bfloat16():
    t = trainer(replace(TINY, precision="bfloat16"))
    row = t.iterate()
    assert all(math.isfinite(v) for v in row.values() if v is not None) and all(p.dtype == torch.float32 for p in t.policy.parameters())
    assert a_rollout(t).logp.dtype == torch.float32


# --- evaluation

def test_evaluation_is_of_held_out_queries_and_repeats_itself():
    t = trainer()
    a, b = R.evaluate(t), R.evaluate(t)
    assert a.texts == b.texts and torch.equal(a.true, b.true) and len(a.texts) == 10 == len(a.true)
    assert {q for q, _ in a.texts} <= set(t.task.texts(*(h := t.task.held_out(40)), h[0])[i][0] for i in range(40))
    assert R.evaluate(t, seed=9).texts != a.texts != R.evaluate(t, t.reference).texts
    queries, mask = t.task.held_out(10)
    torch.testing.assert_close(a.true, t.task.true_scores(queries, mask, t.task.truncate(a.rollout.answers)[0]))
    assert all(" ".join(x.split()) == x for _, x in a.texts)
    small = trainer(replace(TINY, batch=4, minibatches=1))
    assert R.evaluate(small).texts == a.texts


def test_policy_and_reference_are_looked_at_with_luck_of_their_own():
    t = trainer(noise=0)
    assert R.evaluate(t).texts != R.evaluate(t, t.reference).texts


def test_evaluation_leaves_the_training_alone():
    a, b = trainer(), trainer()
    a.iterate(); R.evaluate(a); a.iterate()
    b.iterate(); b.iterate()
    assert torch.equal(weights(a), weights(b))


def test_win_rate_by_hand():
    e = lambda *true: R.Evaluation([], torch.tensor(true), None)
    assert e(1.0, 2.0, 3.0, 4.0).win_rate(e(0.0, 2.0, 5.0, 0.0)) == (1 + 0.5 + 0 + 1) / 4


# --- processes

class Pretend(R.Processes):
    "One of several processes, as far as shares go."
    def __init__(self, index, count): super().__init__("cpu"); self.index, self.count = index, count


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_shares_of_all_processes_are_the_minibatch(microbatches):
    c = replace(TINY, microbatches=microbatches)
    batch = a_batch(trainer(c))
    parts = [p for i in range(4) for p in trainer(c, processes=Pretend(i, 4)).parts(batch)]
    assert len(parts) == 4 * microbatches and torch.equal(torch.cat([p.logp for p in parts]), batch.logp)
    assert len(trainer(c, processes=Pretend(1, 4)).draw()[0]) == 4


@pytest.mark.parametrize("options, count", [(dict(), 3), (dict(minibatches=8), 4), (dict(algo="rloo", group=8), 4), (dict(microbatches=4), 4)])
def test_batches_that_processes_do_not_divide_are_refused(options, count):
    with pytest.raises(ValueError, match="^batch must .*got 16"): R.check_processes(replace(TINY, **options), count)
    R.check_processes(replace(TINY, **options), 1)


def test_one_process_needs_no_accelerate():
    p = R.Processes("cpu")
    assert (p.index, p.count, p.is_main, str(p.device)) == (0, 1, True, "cpu") and p.any(True) and not p.any(False)
    x = (torch.ones(2),)
    assert p.gather(x) is x and p.agree({"a": 1}) == {"a": 1}
    with pytest.raises(ValueError, match="^device must"): R.Processes("tpu")


def test_processes_of_which_accelerate_knows_nothing_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2"); monkeypatch.setenv("RANK", "1")
    told = []
    monkeypatch.setattr("accelerate.Accelerator", lambda **how: told.append(how) or SimpleNamespace(num_processes=1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("auto", "cpu"):
        with pytest.raises(ValueError, match="^processes must be the 2 of which the environment speaks, got 1 by Accelerate; "): R.Processes(device)
    assert told == [dict(cpu=True)] * 2                               # without a GPU it has to be told, or each would train alone


TWO = """
import json, sys, torch
torch.set_num_threads(1)
sys.path[:0] = [{root!r}, {tests!r}, {tests!r} + "/language"]
from dataclasses import replace
from accelerate import Accelerator
import test_rlhf as T
from rlhf_notes.language import rlhf as R
p = R.Processes("cpu")
assert p.count == 2, p.count
for i, options in enumerate({cases!r}):
    t = T.trainer(replace(T.TINY, **options), processes=p)
    batch = R.Rollout(**torch.load({path!r} + f"/batch{{i}}.pt"))
    logs = [{{k: v.item() for k, v in t.step(batch[rows]).items()}} for rows in torch.arange(16).view(2, 8)]
    mine, stepped = t.draw()[2], T.weights(t)
    (everyone,) = p.gather((mine,))
    assert len(mine) == 8 and len(everyone) == 16 and not torch.equal(everyone[:8], everyone[8:])
    row = t.iterate()
    if p.is_main: torch.save(dict(weights=T.weights(t), stepped=stepped, logs=logs, row=row), {path!r} + f"/two{{i}}.pt")
    else: torch.save(dict(weights=T.weights(t), row=row), {path!r} + f"/other{{i}}.pt")
R.Run.save_figure = lambda *args, **how: None
_, rows, summary = R.train(replace(T.TINY, model={model!r}, iterations=2), R.Run.create({path!r} + "/run", dict(task="rlhf")) if p.is_main else None)
assert summary["true_score"] is not None and p.any(p.is_main) and not p.any(False)
same = p.gather((torch.tensor([rows[-1]["kl_k1"]]),))[0]
assert same[0] == same[1]
agreed = p.agree(dict(x=torch.tensor(float(p.index)), y=1.25 + p.index))
assert agreed["x"] == 0 and agreed["y"] == 1.25
"""


def test_two_processes_take_the_steps_of_one(tmp_path, model_dir):
    cases = [dict(microbatches=2, temperature=0.8), dict(algo="grpo", variant="grpo", kl_in_loss=True)]
    ones = []
    for i, options in enumerate(cases):
        t = trainer(replace(TINY, **options))
        batch = a_batch(t)
        torch.save({f.name: x for f in fields(batch) if (x := getattr(batch, f.name)) is not None}, tmp_path / f"batch{i}.pt")
        ones.append((t, [{k: v.item() for k, v in t.step(batch[rows]).items()} for rows in torch.arange(16).view(2, 8)]))
    one_weights = [weights(t) for t, _ in ones]
    script = tmp_path / "two.py"
    tests = Path(__file__).parent.parent
    script.write_text(TWO.format(root=str(tests.parent), tests=str(tests), cases=cases, path=str(tmp_path), model=model_dir))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.stderr[-3000:]
    for i, (t, logs) in enumerate(ones):
        two, other = torch.load(tmp_path / f"two{i}.pt"), torch.load(tmp_path / f"other{i}.pt")
        torch.testing.assert_close(two["stepped"], one_weights[i], rtol=0, atol=1e-6)
        for a, b in zip(two["logs"], logs): assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
        assert torch.equal(two["weights"], other["weights"]) and without_times([two["row"]]) == without_times([other["row"]])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 32


# --- when something goes wrong

def test_a_number_that_is_none_stops_the_run_and_says_where(tmp_path, model_dir, monkeypatch):
    monkeypatch.setattr(R, "CHECKPOINT_EVERY", 0.0); monkeypatch.setattr(R, "CHECKPOINT_SHARE", math.inf)
    iterate = R.RLHF.iterate
    def poisoned(self):
        if self.iteration == 2: self.policy.value_head.bias.data.fill_(math.nan)
        return iterate(self)
    monkeypatch.setattr(R.RLHF, "iterate", poisoned)
    run = Run.create(tmp_path / "run", {"task": "rlhf"})
    with pytest.raises(FloatingPointError, match=r"stage rl, iteration 3: .*value_loss is nan"): R.train(replace(TINY, model=model_dir), run)
    left = Run.resume(tmp_path / "run").checkpoint
    assert left["name"] == "rl" and left["stage"]["iteration"] == 2 and all(x.isfinite().all() for x in left["stage"]["policy"].values())


def test_weights_that_are_no_numbers_stop_the_run_after_the_last_step(tmp_path, model_dir):
    with pytest.raises(FloatingPointError, match="^stage rl, iteration 1: the squares of the weights"): trainer(replace(TINY, epochs=1, minibatches=1, learning_rate=1e38)).iterate()
    run = Run.create(tmp_path / "run", {"task": "rlhf"})
    with pytest.raises(FloatingPointError, match="^stage rl, iteration 1: the squares of the weights add up to (nan|inf); the last checkpoint, if there is one, is from before$"):
        R.train(replace(TINY, model=model_dir, epochs=1, minibatches=1, iterations=1, learning_rate=1e38), run)
    left = Run.resume(tmp_path / "run").checkpoint
    assert left["name"] == "rl" and left["stage"]["iteration"] == 0 and all(x.isfinite().all() for x in left["stage"]["policy"].values())
    assert not {"policy", "summary.json"} & {p.name for p in run.path.iterdir()}


@pytest.mark.parametrize("stage, before", [("sft", 0), ("reward_model", 3)])
def test_no_checkpoint_holds_weights_that_are_no_numbers(tmp_path, model_dir, monkeypatch, stage, before):
    "In the middle of a stage too, where the next loss has not been looked at."
    monkeypatch.setattr(R, "stop_on_interrupt", lambda: After(before + 1))
    original = R.Training.iterate
    def poisoned(self):
        out = original(self)
        if self.name == stage and self.stage.iteration == 1: self.stage.optimizer.param_groups[0]["params"][0].data.fill_(math.inf)
        return out
    monkeypatch.setattr(R.Training, "iterate", poisoned)
    run = Run.create(tmp_path / "run", {"task": "rlhf"})
    with pytest.raises(FloatingPointError, match=f"^stage {stage}, iteration 1: the squares of the weights add up to"): R.train(replace(TINY, model=model_dir), run)
    left = Run.resume(tmp_path / "run").checkpoint
    assert left["name"] == stage and left["stage"]["iteration"] == 0 and not (run.path / "summary.json").exists()


@pytest.mark.parametrize("row", [dict(loss=math.nan), dict(a=1.0, loss=math.inf, none=None)])
def test_finite(row):
    with pytest.raises(FloatingPointError, match="stage sft, iteration 5: loss is"): R.check_finite("sft", 5, row)
    R.check_finite("sft", 5, dict(a=1.0, b=None, n=3))


def test_bad_models_are_refused_in_a_line(tmp_path):
    with pytest.raises(ValueError, match="^model must"): R.train(replace(TINY, model=str(tmp_path)))
    with pytest.raises(ValueError, match="^device|cuda"): R.train(replace(TINY, device="cuda:9"))


def test_a_query_longer_than_the_context_is_refused(tmp_path):
    tokenizer = make_tokenizer()
    R.save_policy(tmp_path / "short", tiny_lm(positions=20), tokenizer)
    with pytest.raises(ValueError, match="20 tokens"): R.make_world(replace(TINY, model=str(tmp_path / "short")), torch.device("cpu"))
    for options, words in ((dict(response_length=60), "response_length must fit into the model's context of 64 tokens, beside a query of 9, got 60"), (dict(query_length=60), "query_length must fit into the model's context of 64 tokens, beside a response of 16, got 60")):
        with pytest.raises(ValueError, match=f"^{words}$"): R.make_world(replace(TINY, **options), torch.device("cpu"))
    R.make_world(replace(TINY, response_length=55), torch.device("cpu"))


def test_a_tokenizer_that_does_not_fit_is_the_models(tmp_path):
    from language.test_task import words_alone
    words = [w for w in WORDS if w != "superb"]
    R.save_policy(tmp_path / "lm", make_gpt2("tiny", len(words), n_layer=1, n_embd=16, n_head=2), words_alone(words))
    with pytest.raises(ValueError, match="^model must have a tokenizer that fits the task, got '.*lm': tokenizer must be one that can read every word"): R.make_world(replace(TINY, model=str(tmp_path / "lm")), "cpu")


def test_a_world_that_is_there_is_not_made_again(model_dir, monkeypatch, no_figure, tmp_path, whole):
    world = R.make_world(whole[1], "cpu")
    monkeypatch.setattr(R, "make_world", None)
    t, rows, summary = R.train(whole[1], Run.create(tmp_path / "run", {"task": "rlhf", "seed": 3}), world)
    same_as_whole(whole, tmp_path / "run", t, rows)


# --- a whole run

@pytest.fixture(scope="module")
def whole(tmp_path_factory, model_dir):
    path = tmp_path_factory.mktemp("whole") / "run"
    config = replace(TINY, model=model_dir)
    return (path, config, *R.train(config, Run.create(path, {"task": "rlhf", "seed": 3})))


def test_what_a_run_leaves_behind(whole):
    path, config, t, rows, summary = whole
    assert [r["iteration"] for r in rows] == [1, 2, 3, 4] and [r["true_score"] is not None for r in rows] == [False, True, False, True]
    table = list(csv.DictReader(open(path / "metrics.csv")))
    assert list(table[0]) == list(rows[0]) and float(table[3]["kl_k1"]) == pytest.approx(rows[3]["kl_k1"]) and table[0]["true_score"] == ""
    assert len(list(csv.DictReader(open(path / "sft.csv")))) == 3 and len(list(csv.DictReader(open(path / "reward_model.csv")))) == 2
    samples = list(csv.DictReader(open(path / "samples.csv")))
    assert [int(s["iteration"]) for s in samples] == [i for i in (0, 2, 4) for _ in range(8)]
    assert all([s["query"] for s in samples[:8]] == [s["query"] for s in samples[k:k + 8]] for k in (8, 16))
    assert (path / "curve.svg").read_text().lstrip().startswith("<?xml")
    assert not [p.name for p in path.iterdir() if p.name.endswith(".tmp")]


def test_the_summary(whole):
    path, config, t, rows, summary = whole
    for name in ("task", "algo", "seed", "device", "steps", "wall_seconds", "interrupted", "true_score_sft", "true_score", "win_rate_vs_sft", "proxy_score", "kl", "tokens_per_second"): assert summary[name] is not None, name
    assert summary["task"] == "rlhf" and summary["steps"] == 64 and not summary["interrupted"] and set(summary["seconds"]) == {"sft", "reward_model", "rl"}
    assert 0 < min(summary["seconds"].values()) and sum(summary["seconds"].values()) < summary["wall_seconds"]
    after, before = R.evaluate(t), R.evaluate(t, t.reference)
    assert summary["true_score"] == after.true.mean().item() == rows[-1]["true_score"] and summary["true_score_sft"] == before.true.mean().item() and summary["win_rate_vs_sft"] == after.win_rate(before)
    assert summary["proxy_score"] == pytest.approx(after.rollout.scores.mean().item()) and summary["proxy_score_sft"] == pytest.approx(before.rollout.scores.mean().item())
    assert json.loads((path / "summary.json").read_text()) == json.loads(json.dumps(summary))


def test_the_policy_loads_as_any_model_does(whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    path, config, t, rows, summary = whole
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(path / "policy"), AutoTokenizer.from_pretrained(path / "policy")
    assert (path / "policy" / "model.safetensors").exists() and not list((path / "policy").glob("*.bin"))
    text = "about the hotel . the room was"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    torch.testing.assert_close(lm(ids).logits, t.policy.lm(ids).logits)
    assert tokenizer.decode(ids[0]) == text
    again = R.make_world(replace(config, model=str(path / "policy")), torch.device("cpu"))[0]
    torch.testing.assert_close(again(ids).logits, lm(ids).logits)


@pytest.mark.parametrize("pad, expected", [(None, WORDS[0]), (WORDS[5], WORDS[5]), ("outside", WORDS[0])])
def test_the_policy_answers_many_texts_as_it_does_one(tmp_path, pad, expected):
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
    from tokenizers import Tokenizer, models, pre_tokenizers
    words, lm = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)})), tiny_lm()
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in lm.parameters(): p.add_(0.3 * torch.randn(p.shape, generator=g))                     # or it would say the same to all
    tokenizer = pad_outside(make_tokenizer() if pad == "outside" else PreTrainedTokenizerFast(tokenizer_object=words, eos_token=WORDS[0], pad_token=pad), len(WORDS))
    R.save_policy(tmp_path / "p", lm, tokenizer)
    assert tokenizer.pad_token_id == len(WORDS) and lm.config.pad_token_id is None and lm.generation_config.pad_token_id is None
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "p"), AutoTokenizer.from_pretrained(tmp_path / "p")
    assert tokenizer.pad_token == expected and tokenizer.padding_side == "left" and len(tokenizer) == len(WORDS)
    assert tokenizer.pad_token_id == lm.config.pad_token_id == lm.generation_config.pad_token_id
    def answers(texts): return lm.generate(**{k: x for k, x in tokenizer(texts, return_tensors="pt", padding=True).items() if k != "token_type_ids"}, max_new_tokens=4, min_new_tokens=4, do_sample=False)[:, -4:]
    texts = ["about the hotel .", "a word on the old hotel ."]
    assert torch.equal(answers(texts), torch.cat([answers([t]) for t in texts])) and not torch.equal(*answers(texts))
    assert R.make_world(replace(TINY, model=str(tmp_path / "p")), "cpu")[1].pad_token == len(WORDS)


class After:
    "A Ctrl-C after some steps."
    def __init__(self, steps): self.left = steps
    def __enter__(self): return self
    def __exit__(self, *args): pass
    def is_set(self): self.left -= 1; return self.left < 0


@pytest.fixture
def no_figure(monkeypatch): monkeypatch.setattr(Run, "save_figure", lambda *args, **how: None)


def same_as_whole(whole, path, t, rows):
    assert without_times(rows) == without_times(whole[3])
    for name in ("sft.csv", "reward_model.csv", "samples.csv"): assert (path / name).read_bytes() == (whole[0] / name).read_bytes(), name
    columns = [[{k: v for k, v in r.items() if k not in TIMES} for r in csv.DictReader(open(p / "metrics.csv"))] for p in (path, whole[0])]
    assert columns[0] == columns[1]
    assert torch.equal(weights(t), weights(whole[2])) and torch.equal(vector(t.reward_model.parameters()), vector(whole[2].reward_model.parameters()))


@pytest.mark.parametrize("steps, stage", [((0,), ["sft"]), ((2, 2), ["sft", "reward_model"]), ((3, 3), ["reward_model", "rl"]), ((7,), ["rl"]), ((9,), ["rl"])], ids=str)
def test_an_interrupted_run_resumed_is_one_that_was_not(whole, tmp_path, monkeypatch, steps, stage, no_figure):
    run = Run.create(tmp_path / "run", {"task": "rlhf", "seed": 3})
    original = R.stop_on_interrupt
    for n, expected in zip(steps, stage):
        monkeypatch.setattr(R, "stop_on_interrupt", lambda: After(n))
        t, rows, summary = R.train(whole[1], run)
        run = Run.resume(tmp_path / "run")
        assert run.checkpoint["name"] == expected
        if n < 9: assert summary["interrupted"] and summary["true_score"] is None and not (tmp_path / "run" / "policy").exists()
    monkeypatch.setattr(R, "stop_on_interrupt", original)
    t, rows, summary = R.train(whole[1], run)
    same_as_whole(whole, tmp_path / "run", t, rows)
    assert {k: v for k, v in summary.items() if "seconds" not in k and "per_second" not in k} == {k: v for k, v in whole[4].items() if "seconds" not in k and "per_second" not in k}


def test_a_killed_run_resumed_is_one_that_was_not(whole, tmp_path, no_figure):
    path = tmp_path / "run"
    script = f"""
import sys, time, math, torch
torch.set_num_threads(1)
sys.path[:0] = {[str(p) for p in Path(__file__).parents[:3]]!r}
from dataclasses import replace
import test_rlhf as T
from rlhf_notes.language import rlhf as R
R.CHECKPOINT_EVERY, R.CHECKPOINT_SHARE, R.Run.save_figure = 0.0, math.inf, lambda *args, **how: None
iterate = R.RLHF.iterate
R.RLHF.iterate = lambda self: (time.sleep(0.5), iterate(self))[1]
R.train(replace(T.TINY, model={whole[1].model!r}), R.Run.create({str(path)!r}, dict(task="rlhf", seed=3)))
"""
    child = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    deadline = time.time() + 120
    while time.time() < deadline and child.poll() is None:
        if (path / "metrics.csv").exists() and len((path / "metrics.csv").read_text().splitlines()) >= 3: break
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, child.stderr.read()[-2000:]
    assert not (path / "summary.json").exists()
    t, rows, summary = R.train(whole[1], Run.resume(path))
    same_as_whole(whole, path, t, rows)


def test_nothing_is_written_without_a_run(tmp_path, monkeypatch, model_dir):
    monkeypatch.chdir(tmp_path)
    t, rows, summary = R.train(replace(TINY, model=model_dir, iterations=1, sft_steps=0, algo="rloo"))
    assert not list(tmp_path.iterdir()) and len(rows) == 1 and summary["algo"] == "rloo" and summary["seconds"]["sft"] >= 0


def test_the_table_keeps_commas_and_gaps(tmp_path):
    R.write_table(tmp_path / "t.csv", [dict(a="x, y", b=None), dict(a='say "z"', b=0.1)])
    assert list(csv.DictReader(open(tmp_path / "t.csv"))) == [dict(a="x, y", b=""), dict(a='say "z"', b="0.1")]
    R.write_table(tmp_path / "none.csv", [])
    assert (tmp_path / "none.csv").read_text() == ""


def test_a_policy_takes_the_place_of_another(tmp_path):
    tokenizer = make_tokenizer()
    for seed in (0, 1): R.save_policy(tmp_path / "p", tiny_lm(seed), tokenizer)
    from transformers import AutoModelForCausalLM
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "p").transformer.wte.weight, tiny_lm(1).transformer.wte.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_other_tokenizers_will_do(tmp_path):
    "One that counts further than the model it comes with was made for."
    tokenizer = pad_outside(make_tokenizer(), len(WORDS))
    R.save_policy(tmp_path / "p", tiny_lm(), tokenizer)
    assert R.train(replace(TINY, model=str(tmp_path / "p"), iterations=1))[2]["steps"] == 16
