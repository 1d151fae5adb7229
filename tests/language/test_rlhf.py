import copy
import math
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from language.parts import (
    TIMES,
    TINY,
    Pretend,
    a_batch,
    a_rollout,
    handmade,
    logp_now,
    tiny_lm,
    trainer,
    vector,
    weights,
    without_times,
)
from strategies import SEEDS

from rlhf_notes.formulas.kl import AdaptiveKLController
from rlhf_notes.formulas.logprob import linear_log_probs
from rlhf_notes.formulas.reward import RewardNorm
from rlhf_notes.hub.trainers import RLHF, own_rate
from rlhf_notes.language import loop as R
from rlhf_notes.language.config import Variant
from rlhf_notes.language.machine import Machine, Scaled
from rlhf_notes.language.model import RewardModel, hidden_states, response_states, to_logits
from rlhf_notes.language.rollout import Rollout, rollout_stats, with_advantages
from rlhf_notes.reviews import pipeline as P
from rlhf_notes.reviews.reward_model import proxy_reward
from rlhf_notes.reviews.task import WORDS, Reviews, make_tokenizer
from rlhf_notes.training.devices import process_device

# P1
def test_the_log_probabilities_are_those_of_the_policy_and_of_the_reference_at_the_temperature():
    t = trainer(replace(TINY, temperature=0.6))
    b = a_batch(t)
    torch.testing.assert_close(b.logp, logp_now(t, b)[0].detach(), rtol=0, atol=2e-5)
    logits = to_logits(t.reference, hidden_states(t.reference, b.tokens, b.mask)[:, -17:-1])
    expected = (logits / 0.6).log_softmax(-1).gather(-1, b.responses[..., None])[..., 0].detach()
    torch.testing.assert_close(
        b.logp_ref[b.response_mask], expected[b.response_mask], rtol=0, atol=2e-5)
    assert (b.logp - expected).abs().max() > 0.1


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
# a large vocabulary, as it were
def test_without_logits_it_is_the_same_training(algo, monkeypatch):
    calls = []
    monkeypatch.setattr("rlhf_notes.language.model.linear_log_probs",
                        lambda *args, f=linear_log_probs, **kwargs: calls.append(args[0].shape)
                        or f(*args, chunk=37, **kwargs))
    seen = {}
    for lean in (2**62, 0):
        monkeypatch.setattr("rlhf_notes.language.model.LEAN", lean)
        t = trainer(replace(TINY, algo=algo, temperature=0.7))
        rows = [t.iterate() for _ in range(2)]
        seen[lean] = (without_times(rows), weights(t),
                      [p.grad for p in t.policy.parameters() if p.grad is not None])
        assert bool(calls) == (lean == 0)
    (a, wa, ga), (b, wb, gb) = seen.values()
    for x, y in zip(a, b):
        for k in x:
            if x[k] is not None and not isinstance(x[k], str):
                assert y[k] == pytest.approx(x[k], rel=1e-3, abs=1e-4), k
    torch.testing.assert_close(wa, wb, atol=2e-4, rtol=1e-3)
    assert vector(ga).norm() > 0 and (vector(ga) - vector(gb)).norm() < 1e-2 * vector(ga).norm()


@pytest.mark.parametrize("algo", ["ppo", "grpo", "rloo"])
def test_the_ratio_of_the_first_minibatch_is_one(algo):  # P1, P4
    t = trainer(replace(TINY, algo=algo, temperature=0.7, epochs=1, minibatches=1))
    row = t.iterate()
    assert abs(row["ratio"] - 1) < 1e-5 and row["approx_kl"] < 1e-9 and row["clip_fraction"] == 0


def test_at_the_start_policy_and_reference_are_one_and_the_value_is_zero():  # P2
    t = trainer(noise=0)
    b = a_rollout(t)
    torch.testing.assert_close(
        b.logp[b.response_mask], b.logp_ref[b.response_mask], rtol=0, atol=2e-5)
    assert not b.values.any()


def test_values_are_those_of_the_policy():
    t = trainer()
    b = a_rollout(t)
    torch.testing.assert_close(b.values, logp_now(t, b)[1].detach(), rtol=0, atol=1e-5)
    assert b.values.std() > 0.01


def test_scores_are_of_the_cut_answer_and_the_penalty_replaces_them():  # P5, R3
    t = trainer(replace(TINY, penalty=-7.5, batch=64))
    b = a_rollout(t)
    cut, response_mask, found = t.task.truncate(b.responses)
    raw = t.reward_model(torch.cat([b.tokens[:, :-16], cut], 1),
                         torch.cat([b.mask[:, :-16], response_mask], 1)).detach()
    torch.testing.assert_close(b.scores, torch.where(found, 1.5 * raw + 0.2, -7.5))
    assert torch.equal(b.response_mask, response_mask)
    assert torch.equal(b.has_end, found)
    assert 0 < found.sum() < 64


def test_a_score_that_is_no_number_stays_visible():
    t = trainer()
    t.reward_model.head.weight.data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="stage rl, iteration 1: score is inf"): t.iterate()


def test_answers_go_on_past_the_end():  # G4
    b = a_rollout(trainer(replace(TINY, batch=64)))
    assert b.responses.shape == (64, 16) and b.tokens.max() < len(WORDS) or b.mask[
        b.tokens == len(WORDS)].sum() == 0
    assert (b.responses < len(WORDS)).all() and b.mask[:, -16:].all() and not b.response_mask.all()


def test_queries_of_a_group_are_one():
    t = trainer(replace(TINY, algo="rloo"))
    q = t.prompts()[0].view(4, 4, -1)
    assert torch.equal(q, q[:, :1].expand_as(q)) and len(q[:, 0].unique(dim=0)) > 1
    assert len(trainer().prompts()[0].unique(dim=0)) > 4


def test_chance_follows_from_seed_iteration_and_process():  # G6
    def first(t): return t.prompts()[2]
    t = trainer()
    assert torch.equal(first(t), first(trainer()))
    other = trainer(replace(TINY, seed=4))
    later = trainer()
    later.iteration = 1
    rank = trainer()
    rank.machine.rank, rank.machine.processes = 1, 2
    assert not any(torch.equal(first(t)[:8], first(x)[:8]) for x in (other, later, rank))
    again = t.prompts(1)[2]
    assert not torch.equal(again, first(t)) and torch.equal(again, t.prompts(1)[2])
    rank.config = replace(TINY, batch=32)
    assert torch.equal(first(rank), first(trainer(replace(TINY, seed=3 + 100_003))))


def test_loss_by_hand():
    x = with_advantages(
        replace(TINY, whiten_rewards=False, whiten_advantages=False), handmade(), 0.1)
    g = torch.Generator().manual_seed(1)
    logp, values = (x.logp + 0.3 * torch.randn(4, 4, generator=g),
                    x.values + torch.randn(4, 4, generator=g))
    loss, parts = R.rl_loss(replace(TINY, clip=0.1, value_clip=0.3), x, logp, values, values, 0.1)
    policy, value = parts["policy_loss"], parts["value_loss"]
    p = v = n = 0.0
    for i in range(4):
        for j in range(4):
            if not x.response_mask[i, j]: continue
            A, r, V, V0, ret = (
                float(y[i, j])
                for y in (x.advantages, (logp - x.logp).exp(), values, x.values, x.returns))
            p -= min(r * A, min(max(r, 0.9), 1.1) * A)
            v += 0.5 * max((V - ret) ** 2, (min(max(V, V0 - 0.3), V0 + 0.3) - ret) ** 2)  # P10
            n += 1
    assert policy.item() == pytest.approx(p / n, rel=1e-5)
    assert value.item() == pytest.approx(v / n, rel=1e-5)
    assert loss.item() == pytest.approx((policy + 0.1 * value).item())
    assert R.rl_loss(
        replace(TINY, value_clip=0.0), x, logp, values, values, 0.1)[1]["value_loss"] < value


@pytest.mark.parametrize("algo", ["ppo", "rloo"])
def test_both_bounds_of_the_ratio_reach_the_loss(algo):
    group = {} if algo == "ppo" else dict(group=2)
    c = replace(TINY, algo=algo, clip_low=0.1, clip_high=0.4, **group)
    x = with_advantages(c, handmade(), 0.1)
    logp = x.logp + 0.3 * torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    found = R.rl_loss(c, x, logp, x.values, x.values, 0.1)[1]
    r, A = (logp - x.logp).exp(), x.advantages
    held = (r.clamp(0.9, 1.4) != r) & (r.clamp(0.9, 1.4) * A < r * A)
    objective = torch.minimum(r * A, r.clamp(0.9, 1.4) * A)
    torch.testing.assert_close(found["policy_loss"], -objective[x.response_mask].mean())
    assert found["clip_fraction"] == held[x.response_mask].float().mean() > 0
    def loss(**options): return R.rl_loss(
        replace(TINY, algo=algo, **group, **options), x, logp, x.values, x.values, 0.1)[0]
    assert loss(clip_low=0.1, clip_high=0.1) == loss(clip=0.1) != loss(clip=0.1, clip_high=0.4)


@pytest.mark.parametrize("algo", ["ppo", "grpo", "rloo"])
def test_the_kl_in_the_loss_is_k3_times_the_ratio(algo):
    group = {} if algo == "ppo" else dict(group=2)
    x = with_advantages(replace(TINY, algo=algo, **group), handmade(), 0.1)
    logp = x.logp + 0.1 * torch.arange(4)
    def loss(**options):
        return R.rl_loss(replace(TINY, algo=algo, **options), x, logp, x.values, x.values, 0.4)[0]
    r, d = ((logp - y)[x.response_mask] for y in (x.logp, x.logp_ref))
    expected = 0.4 * (r.exp() * (torch.exp(-d) - 1 + d)).mean()
    torch.testing.assert_close(loss(kl_in_loss=True) - loss(kl_in_loss=False), expected)
    assert loss() == loss(kl_in_loss=algo == "grpo")  # what each algorithm's paper does


def test_a_reward_that_is_always_the_same_leaves_the_policy_where_it_is():
    t = trainer(replace(TINY, algo="grpo", iterations=8), noise=0)
    t.reward = lambda prompts, mask, found: torch.ones(len(prompts), 1)
    t.config = replace(t.config, overlong="keep")
    before = weights(t).clone()
    norms = [t.iterate()["grad_norm"] for _ in range(8)]
    assert max(norms) < 1e-5 and (weights(t) - before).abs().max() < 1e-4


def test_no_value_loss_without_a_value_head():
    x = with_advantages(replace(TINY, algo="grpo", group=2), handmade(), 0.1)
    assert "value_loss" not in R.rl_loss(
        replace(TINY, algo="grpo"), x, x.logp, x.values, x.values, 0.1, x.response_mask)[1]
    t = trainer(replace(TINY, algo="grpo"))
    before = t.policy.value_head.weight.clone()
    row = t.iterate()
    assert torch.equal(t.policy.value_head.weight, before)
    assert row["value_loss"] is None is row["explained_variance"]
    assert trainer().iterate()["value_loss"] > 0


def gradient_of(t, batch, microbatches):
    t.machine.pieces = microbatches
    update, t.update = t.update, lambda: torch.zeros(())
    t.step(batch)
    t.update = update
    return t.optimizer.vector.grad.clone()


@pytest.mark.parametrize(
    "options",
    [dict(algo="ppo"), *(dict(algo="rloo", variant=v, kl_in_loss=True) for v in get_args(Variant))],
    ids=lambda o: o.get("variant", "value head"))
def test_microbatches_add_up_to_the_gradient_of_the_minibatch(options):  # P7
    t = trainer(replace(TINY, **options), scaled=True)
    batch = a_batch(t)
    assert len(batch.response_mask.sum(1).unique()) > 2
    t.policy.lm.transformer.wte.weight.data.add_(
        0.02 * torch.randn(len(WORDS), 16, generator=torch.Generator().manual_seed(0)))
    whole = gradient_of(t, batch, 1)
    close = dict(rtol=1e-4, atol=1e-6 * whole.abs().max().item() + 1e-8)
    for k in (2, 8): torch.testing.assert_close(gradient_of(t, batch, k), whole, **close)
    shares = []
    for index in range(2):  # DDP takes the mean over processes
        t.machine.rank, t.machine.processes = index, 2
        shares.append(gradient_of(t, batch, 1))
    torch.testing.assert_close(sum(shares) / 2, whole, **close)
    assert whole.norm() > 1e-3


def test_the_gradient_is_that_of_the_loss():
    t = trainer(scaled=True)
    batch = a_batch(t)
    found = gradient_of(t, batch, 2)
    logp, values = logp_now(t, batch)
    loss, _ = R.rl_loss(t.config, batch, logp, values, values, t.kl.coef, batch.response_mask)
    expected = vector(torch.autograd.grad(loss, list(t.policy.parameters())))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_every_step_has_a_gradient_of_its_own(monkeypatch):
    t = trainer(replace(TINY, max_grad_norm=1e9))
    monkeypatch.setattr(t.optimizer, "step", lambda rate: None)
    b = a_batch(t)
    assert t.step(b)["grad_norm"] == t.step(b)["grad_norm"] > 0


def test_what_comes_after_the_end_does_not_teach():
    t = trainer(scaled=True)
    batch = a_batch(t)
    clean = gradient_of(t, batch, 1)
    poison = lambda x: x.masked_fill(~batch.response_mask, 1e6)
    dirty = replace(batch, logp=poison(batch.logp), logp_ref=poison(batch.logp_ref),
                    values=poison(batch.values), advantages=poison(batch.advantages),
                    returns=poison(batch.returns))
    torch.testing.assert_close(gradient_of(t, dirty, 1), clean, rtol=1e-5, atol=1e-7)


class TensorFlowAdam:
    "As the TensorFlow 1 documentation writes it: epsilon hat outside of the bias correction."
    def __init__(self, x, eps):
        self.x, self.eps, self.m, self.v, self.t = x.double(), eps, 0.0, 0.0, 0
    def step(self, g, lr):
        g = g.double()
        self.t += 1
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g ** 2
        self.x = self.x - lr * math.sqrt(1 - 0.999 ** self.t) / (1 - 0.9 ** self.t) * self.m / (
            self.v.sqrt() + self.eps)


@given(seed=SEEDS, scale=st.sampled_from([1e-6, 1e-5, 1e-3, 1.0]))
@settings(max_examples=10)
def test_adam_is_that_of_tensorflow(seed, scale):  # P12
    g = torch.Generator().manual_seed(seed)
    x = torch.nn.Parameter(torch.randn(7, generator=g, dtype=torch.float64))
    ours, theirs = (torch.optim.Adam([x], lr=1e-3, eps=1e-5),
                    TensorFlowAdam(x.detach().clone(), 1e-5))
    for step in range(1, 6):
        x.grad = scale * torch.randn(7, generator=g, dtype=torch.float64)
        ours.param_groups[0]["eps"] = R.tensorflow_eps(1e-5, 0.999, step)
        ours.step()
        theirs.step(x.grad, 1e-3)
    torch.testing.assert_close(x.detach(), theirs.x, rtol=1e-9, atol=1e-12)


def first_step(adam):
    t = trainer(replace(TINY, adam=adam, learning_rate=1.0), noise=0)
    t.optimizer.vector.grad.fill_(1e-5)
    before = weights(t)
    t.update()
    return (before - weights(t)).median().item()


def test_the_first_step_of_pytorchs_adam_is_sixteen_times_longer():  # P12
    assert first_step("pytorch") == pytest.approx(0.5, rel=1e-3)
    assert first_step("pytorch") / first_step("tensorflow") == pytest.approx(16.3, abs=0.05)


def test_the_learning_rate_falls_to_zero_in_a_straight_line():  # G5
    t = trainer()
    found, used, step = [], [], t.optimizer.step
    t.optimizer.step = lambda rate: (used.append(rate), step(rate))
    for _ in range(4):
        row = t.iterate()
        found.append(row["learning_rate"])
        assert used == [row["learning_rate"]] * 4
        used.clear()
    assert found == pytest.approx([1e-3 * (1 - i / 4) for i in range(4)])
    # P12: four iterations of four steps
    assert t.optimizer.eps == R.tensorflow_eps(1e-5, 0.999, 16)


def test_a_long_gradient_is_shortened():
    t = trainer(replace(TINY, max_grad_norm=1e-3))
    free = trainer()
    b = a_batch(t)
    assert t.step(b)["grad_norm"] == pytest.approx(free.step(b)["grad_norm"].item())
    assert t.optimizer.vector.grad.norm() == pytest.approx(1e-3, rel=1e-3)


def test_the_coefficient_of_the_kl_adapts():  # P11
    t = trainer(replace(TINY, kl_target=0.5, kl_horizon=100))
    expected, other = AdaptiveKLController(0.1, 0.5, 100), trainer(replace(TINY, kl_target=0.0))
    for _ in range(3):
        row = t.iterate()
        assert row["kl_coef"] == expected.coef
        expected.update(row["kl_k1"], 16)
        assert other.iterate()["kl_coef"] == 0.1
    assert t.kl.coef == expected.coef != 0.1
    assert trainer(replace(TINY, kl_coef=0.0)).iterate()["kl_coef"] == 0


def test_the_kl_that_steers_is_that_of_whole_answers():  # P11
    b = a_rollout(trainer())
    kl = ((b.logp - b.logp_ref) * b.response_mask).sum(1).mean().item()
    t = trainer(replace(TINY, kl_target=0.9 * kl, kl_horizon=100))
    t.iterate()
    assert t.kl.coef == pytest.approx(0.1 * (1 + (1 / 0.9 - 1) * 16 / 100), rel=1e-4)


def test_the_log_of_a_minibatch():  # P13
    t = trainer()
    b = a_batch(t)
    logp, values = (x.detach() for x in logp_now(t, b))
    logp, values = (logp + 0.2 * torch.sin(torch.arange(16.0)),
                    values + 0.3 + 0.3 * torch.cos(torch.arange(16.0)))
    some = torch.rand(16, 16)
    x = {k: v.item() for k, v in R.rl_loss(
        t.config, b, logp, some, values, t.kl.coef, b.response_mask)[1].items()}
    c, d, r = b.response_mask, (logp - b.logp)[b.response_mask], b.returns[b.response_mask]
    A, V, V0 = b.advantages[c], values[c], b.values[c]
    assert x["approx_kl"] == pytest.approx(0.5 * d.square().mean().item(), rel=1e-4)
    assert x["clip_fraction"] == pytest.approx(
        ((A > 0) & (d.exp() > 1.2) | (A < 0) & (d.exp() < 0.8)).float().mean().item(), abs=1e-6)
    assert x["clip_fraction"] > 0
    clipped = V.clamp(V0 - 0.2, V0 + 0.2)
    assert x["value_clip_fraction"] == pytest.approx(
        ((clipped - r).abs() > (V - r).abs()).float().mean().item(), abs=1e-6)
    assert x["value_clip_fraction"] > 0
    assert rollout_stats(b)["explained_variance"].item() == pytest.approx(
        (1 - (r - V0).var() / r.var()).item(), rel=1e-3)
    assert x["entropy"] == pytest.approx(some[c].mean().item(), rel=1e-5)
    assert x["ratio"] == pytest.approx(d.exp().mean().item(), rel=1e-5)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_the_log_of_an_iteration_is_the_mean_over_its_minibatches(algo, monkeypatch):  # P13
    t = trainer(replace(TINY, algo=algo))
    found, step = [], t.step
    monkeypatch.setattr(t, "step", lambda batch: found.append(step(batch)) or found[-1])
    row = t.iterate()
    assert len(found) == 4 and {"policy_loss", "approx_kl", "grad_norm"} <= set(found[0])
    for name in found[0]:
        each = [x[name].item() for x in found]
        assert row[name] == pytest.approx(sum(each) / 4, rel=1e-5, abs=1e-8), name
    assert row["policy_loss"] != found[-1]["policy_loss"].item()
    assert row["approx_kl"] != found[-1]["approx_kl"].item() != found[0]["approx_kl"].item()


def test_the_entropy_is_that_of_the_policy():
    t = trainer(replace(TINY, temperature=0.5))
    b = a_batch(t)
    _, entropy, _ = t.forward(b)
    logits = to_logits(t.policy.lm, response_states(t.policy.lm, b.tokens, b.mask, 16))
    expected = torch.distributions.Categorical(logits=logits / 0.5).entropy().detach()
    torch.testing.assert_close(
        entropy[b.response_mask], expected[b.response_mask], rtol=1e-4, atol=1e-4)
    whole = replace(b, response_mask=torch.ones_like(b.response_mask))
    _, entropy, _ = t.forward(whole)
    torch.testing.assert_close(entropy, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_nothing_depends_on_what_stands_behind_the_end(algo, monkeypatch):
    def run():
        t = trainer(replace(TINY, algo=algo, kl_in_loss=algo == "grpo"))
        return (without_times([t.iterate() for _ in range(2)]),
                [p.grad for p in t.policy.parameters() if p.grad is not None], weights(t))
    (rows, grads, at_last), calls = run(), []
    def all_of_it(lm, tokens, mask, response, response_mask=None):
        calls.append(response_mask)
        return response_states(lm, tokens, mask, response)
    monkeypatch.setattr("rlhf_notes.language.model.response_states", all_of_it)
    more, wide, after = run()
    # asked for less
    assert calls and all(c is not None for c in calls) and not torch.cat(calls).all()
    for a, b in zip(rows, more):
        for k in a: assert b[k] == a[k] or b[k] == pytest.approx(a[k], rel=1e-4, abs=1e-5), k
    assert (vector(grads) - vector(wide)).norm() < 1e-3 * vector(grads).norm()
    torch.testing.assert_close(at_last, after, atol=1e-4, rtol=1e-3)


def test_the_log_does_not_depend_on_the_microbatches():
    rows = [trainer(replace(TINY, microbatches=k)).iterate() for k in (1, 4)]
    for name in set(R.COLUMNS) - {"true_score"}:
        assert rows[0][name] == pytest.approx(rows[1][name], rel=2e-3, abs=1e-4), name


def test_the_row_of_an_iteration():
    t = trainer()
    b = a_rollout(t)
    row = t.iterate()
    d = (b.logp - b.logp_ref) * b.response_mask
    k3 = (torch.exp(-d) - 1 + d) * b.response_mask
    assert row["score"] == pytest.approx(b.scores.mean().item(), rel=1e-5)
    assert row["kl_k1"] == pytest.approx(d.sum(1).mean().item(), rel=1e-4)
    assert row["kl_k3"] == pytest.approx(k3.sum(1).mean().item(), rel=1e-4)
    assert row["length"] == b.response_mask.sum(1).float().mean()
    assert row["valid"] == b.has_end.float().mean()
    assert row["iteration"] == 1
    assert row["true_score"] is None
    assert set(row) == {*R.COLUMNS} | TIMES and all(row[x] > 0 for x in TIMES)



def test_every_answer_is_learned_from_once_per_epoch(monkeypatch):
    t, seen = trainer(replace(TINY, epochs=3, minibatches=4)), []
    step = t.step
    monkeypatch.setattr(t, "step", lambda b: seen.append(b) or step(b))
    t.iterate()
    assert [len(b) for b in seen] == [4] * 12
    epochs = [torch.cat([b.logp for b in seen[i:i + 4]]) for i in (0, 4, 8)]
    assert all(torch.equal(e.sort(0).values, epochs[0].sort(0).values) for e in epochs)
    assert not torch.equal(epochs[0], epochs[1])


def test_only_the_policy_learns():
    t = trainer()
    frozen = vector([*t.reference.parameters(), *t.reward_model.parameters()])
    before = weights(t)
    t.iterate()
    assert torch.equal(vector([*t.reference.parameters(), *t.reward_model.parameters()]), frozen)
    assert not torch.equal(weights(t), before)


def test_dropout_is_gone():  # P4
    lm = tiny_lm()
    for m in lm.modules():
        if isinstance(m, torch.nn.Dropout): m.p = 0.5
    task = Reviews(make_tokenizer(), 16)
    t = R.Loop(TINY, lm, task, proxy_reward(RewardModel(tiny_lm(1)), RewardNorm()))
    assert {m.p for m in t.policy.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
    row = t.iterate()
    assert abs(row["kl_k1"]) < 1e-4 and t.policy.training


def test_training_never_sees_the_true_score(monkeypatch):
    t = trainer()
    def forbidden(*args): raise AssertionError("the true score was looked up")
    monkeypatch.setattr(Reviews, "true_rewards", forbidden)
    monkeypatch.setattr("rlhf_notes.reviews.task.true_reward", forbidden)
    t.iterate()
    with pytest.raises(AssertionError): P.evaluate(t)


def test_learning_raises_the_score():
    "Whatever the reward model likes, the policy comes to write: here a word."
    c = replace(TINY, iterations=14, batch=32, kl_coef=0.0, learning_rate=3e-2, overlong="keep",
                stop_after=15)
    for algo in ("ppo", "rloo", "grpo"):
        t = trainer(replace(c, algo=algo), noise=0)
        t.reward = lambda prompts, mask, found: (found.whole == 5).float().sum(1, keepdim=True)
        scores = [t.iterate()["score"] for _ in range(12)]
        assert sum(scores[-3:]) / 3 > 4 * max(sum(scores[:2]) / 2, 0.2), (algo, scores)


@pytest.mark.parametrize("options, kind", [
    ({}, Machine), (dict(microbatches=2), Scaled), (dict(precision="bfloat16"), Scaled)])
def test_the_plain_machine_does_what_it_can(options, kind):
    assert type(trainer(replace(TINY, **options)).machine) is kind


def test_bfloat16():
    t = trainer(replace(TINY, precision="bfloat16"))
    row = t.iterate()
    assert all(math.isfinite(v) for v in row.values() if v is not None)
    assert all(p.dtype == torch.float32 for p in t.policy.parameters())
    assert a_rollout(t).logp.dtype == torch.float32


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_parts_of_all_processes_are_the_minibatch(microbatches):
    c = replace(TINY, microbatches=microbatches)
    batch, parts = a_batch(trainer(c)), []
    for i in range(4):
        t = trainer(c, scaled=True)
        t.machine.rank, t.machine.processes = i, 4
        parts += t.machine.parts(batch)
    assert len(parts) == 4 * microbatches
    assert torch.equal(torch.cat([p.logp for p in parts]), batch.logp)
    assert len(t.prompts()[0]) == 4


@pytest.mark.parametrize("options, count",
                         [(dict(), 3), (dict(minibatches=8), 4), (dict(algo="rloo", group=8), 4),
                          (dict(microbatches=4), 4)])
def test_batches_that_processes_do_not_divide_are_refused(options, count):
    with pytest.raises(ValueError, match="^batch must .*got 16"):
        replace(TINY, **options).check_processes(count)
    replace(TINY, **options).check_processes(1)


def test_one_process_keeps_its_device_and_its_rows():
    with pytest.raises(ValueError, match="^device"): process_device("tpu")
    t, x = trainer(scaled=True), torch.ones(2, 3).T
    assert torch.equal(t.machine.gather(x), x)
    assert str(process_device("cpu")) == "cpu" == str(t.device)


# --- a user's prompts and reward

def likes_good(prompts, responses): return [r.split().count("good") for r in responses]


def own(reward=likes_good, prompts=("about the hotel .", "about the old film ."), **options):
    return RLHF(tiny_lm(), make_tokenizer(), prompts=list(prompts), reward=reward,
                **dict(algo="rloo", max_new_tokens=8, iterations=2, batch=8, minibatches=2,
                       device="cpu") | options)


@pytest.mark.parametrize("algo", ["ppo", "grpo", "rloo"])
def test_a_users_reward_is_learned(algo):
    t = own(algo=algo, iterations=25, batch=32, learning_rate=3e-2, kl_coef=0.0)
    assert t.learn() is t and len(t.rows) == 25 == t.iteration
    assert sum(r["score"] for r in t.rows[-3:]) / 3 > 4 * max(t.rows[0]["score"], 0.2)
    assert len(t.learn().rows) == 25  # nothing is left to do


def test_held_out_prompts_are_scored_and_the_best_policy_is_taken():
    def ids(prompts, responses, completion_ids): return [sum(x) for x in completion_ids]
    t = own(iterations=5, eval_prompts=["about the old hotel ."] * 9, eval_reward=ids,
            eval_every=2, keep_best=True)
    plain, weights, look = own(iterations=5).learn(), [], t.evaluator.evaluate
    def evaluate():
        weights.append(t.loop.optimizer.vector.detach().clone())
        assert look() == look()
        return [1.0, 3.0, 2.0][len(weights) - 1]
    t.evaluator.evaluate = evaluate
    rows = t.learn().rows
    assert [row["eval_score"] for row in rows] == [None, 1.0, None, 3.0, 2.0]
    assert torch.equal(t.loop.optimizer.vector, weights[1])
    assert [r["score"] for r in rows] == [r["score"] for r in plain.rows]  # training is the same
    score, t.loop.iteration = look(), 0
    assert 1 <= score == look()  # whatever the iteration
    with pytest.raises(ValueError, match="^eval_prompts must be given with .* got none"):
        own(keep_best=True)
    with pytest.raises(ValueError, match="^eval_every must be "): own(eval_every=0)


def test_a_callback_may_end_the_training():
    rows = []
    t = own(iterations=5).learn(callback=lambda trainer, row: rows.append(row) or len(rows) < 2)
    assert t.rows == rows and len(rows) == 2 and t.learn().iteration == 5


def test_a_reward_sees_prompts_responses_and_columns():
    seen = []
    def reward(prompts, responses, word):
        seen.append((prompts, responses, word))
        return [1.0 if p.endswith(f"{w} .") else 0.0 for p, w in zip(prompts, word)]
    t = own(reward,
            [dict(prompt="about the hotel .", word="hotel"),
             dict(prompt="about the film .", word="film")])
    row = t.iterate()
    (prompts, responses, word), = seen
    assert row["score"] == 1
    assert len(prompts) == 8
    assert {*zip(prompts, word)} <= {("about the hotel .", "hotel"), ("about the film .", "film")}
    assert prompts[:4] == [prompts[0]] * 4
    assert all(isinstance(r, str) and "<" not in r for r in responses)


def test_a_saved_policy_answers_as_before(tmp_path):
    t = own().learn()
    t.save(tmp_path / "mine")
    again = RLHF.load(tmp_path / "mine")
    texts = ["about the hotel .", "about the old film ."]
    assert again.generate(texts) == t.generate(texts) != t.generate(texts, seed=1)
    assert again.config == t.config
    assert RLHF.load(tmp_path / "mine", ["about the hotel ."], likes_good).learn().iteration == 2
    by_name = RLHF(
        str(tmp_path / "mine"), prompts=texts, reward=likes_good, max_new_tokens=8, device="cpu")
    assert by_name.generate(texts) == t.generate(texts)


def test_an_option_that_is_none_is_refused():
    with pytest.raises((TypeError, ValueError), match="learning_rat"): own(learning_rat=1.0)
    with pytest.raises(ValueError, match="batch"): own(batch=9)


def test_a_trainer_resumes_to_the_last_bit():
    t, other = trainer(replace(TINY, kl_horizon=100)), trainer(replace(TINY, kl_horizon=100))
    for _ in range(2): t.iterate()
    other.load_state_dict({k: copy.deepcopy(v) for k, v in t.state_dict().items()})
    assert without_times([t.iterate() for _ in range(2)]) == without_times(
        [other.iterate() for _ in range(2)])
    assert torch.equal(weights(t), weights(other))


def test_nothing_is_learned_past_the_last_iteration():
    t = trainer(replace(TINY, iterations=1))
    t.iterate()
    with pytest.raises(ValueError, match="iterations must be more than 1 to go on"):
        t.iterate()


# --- options of the update and of the samples

def test_the_rate_is_a_warm_up_and_a_power_of_what_is_left():
    def rates(n=8, **options):
        c = replace(TINY, iterations=n, learning_rate=2.0, **options)
        return [R.learning_rate(c, i) for i in range(n)]
    assert rates() == [2 * (1 - i / 8) for i in range(8)]
    assert rates(lr_anneal=0.0) == [2.0] * 8
    assert rates(lr_anneal=2.0)[4] == 0.5
    assert rates(lr_anneal=0.0, lr_warmup=3) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0]
    t = trainer(replace(TINY, lr_anneal=0.0))
    assert [t.iterate()["learning_rate"] for _ in range(3)] == [TINY.learning_rate] * 3


def test_a_rate_of_ones_own_is_a_function_of_what_is_left():
    t, seen = trainer(replace(TINY, iterations=4)), []
    t.put(rate=partial(own_rate, lambda left: seen.append(left) or 1e-3 * left ** 2))
    rows = [t.iterate() for _ in range(4)]
    assert {*seen} == {1.0, 0.75, 0.5, 0.25}
    assert [r["learning_rate"] for r in rows] == [1e-3 * x ** 2 for x in (1.0, 0.75, 0.5, 0.25)]
    t = trainer()
    t.put(rate=partial(own_rate, lambda left: 0.0))
    with pytest.raises(ValueError, match="^learning_rate must be a function to numbers > 0"):
        t.iterate()


def test_adam_takes_its_betas_and_decays_the_weights():
    "One step on the same gradient, beside torch's AdamW."
    options = dict(epochs=1, minibatches=1, adam="pytorch", adam_eps=1e-8, adam_beta1=0.5,
                   adam_beta2=0.7, weight_decay=0.3, learning_rate=0.01, max_grad_norm=1e9)
    t = trainer(replace(TINY, **options))
    before, step = weights(t).clone(), t.optimizer.step
    learned = torch.nn.Parameter(t.optimizer.vector.detach().clone())
    theirs = torch.optim.AdamW([learned], lr=0.01, betas=(0.5, 0.7), weight_decay=0.3)

    def both(rate):
        learned.grad = t.optimizer.vector.grad.clone()
        theirs.step()
        step(rate)
    t.optimizer.step = both
    t.iterate()
    torch.testing.assert_close(t.optimizer.vector.detach(), learned.detach())
    assert not torch.equal(before, weights(t))


def test_an_entropy_bonus_pulls_towards_entropy():
    def grad(**options):
        t = trainer(replace(TINY, algo="grpo", **options))
        batch = a_batch(t)
        assert t.forward(batch)[1].requires_grad == bool(options)
        t.optimizer.zero_grad()
        t.loss(batch, batch)[0].backward()
        return t, batch, t.optimizer.vector.grad.clone()
    (_, _, plain), (t, batch, found) = grad(), grad(entropy_coef=0.5)
    t.optimizer.zero_grad()
    entropy, mask = t.forward(batch)[1], batch.response_mask
    ((entropy * mask).sum() / mask.sum()).backward()
    torch.testing.assert_close(found, plain - 0.5 * t.optimizer.vector.grad, atol=1e-6, rtol=1e-4)
