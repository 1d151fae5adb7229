"identify reads what a function does: right ones with their numbers, faults by their kind."
import itertools
import json
import random
import statistics
import sys
import time
from collections import namedtuple

import numpy as np
import pytest
import torch
from forms import BAD_ONES, SPREADS, dropped, made, of_groups, whole
from planted import PLANTED, masked_mean, rows

import rlhf_notes
from rlhf_notes import POLICY_VARIANTS, cli, identify
from rlhf_notes.identify.calls import time_limit
from rlhf_notes.identify.names import role_of
from rlhf_notes.identify.report import CAUTIONS, FINDINGS
from rlhf_notes.identify.weights import mode_weights, ragged, read_mode

def near(a, b):
    return a == b or isinstance(a, float) and isinstance(b, (int, float)) and a == pytest.approx(
        b, rel=2e-3)


@pytest.mark.parametrize("name, f, given, kind, known, finding, facts", PLANTED,
                         ids=[p[0] for p in PLANTED])
def test_planted(name, f, given, kind, known, finding, facts):
    before = torch.get_rng_state()
    began = time.process_time()
    report = identify(f, **given)
    assert time.process_time() - began < 3
    assert torch.equal(before, torch.get_rng_state())
    assert report.kind == kind
    assert {x.kind for x in report.findings} == {*(finding or "").split()}, report
    assert report.right == (finding is None and known), report
    assert (
        not {n: report.facts.get(n) for n, x in facts.items() if not near(report.facts.get(n), x)}
    )
    assert {x.kind for x in report.findings} <= FINDINGS.keys()
    assert {x.kind for x in report.cautions} <= CAUTIONS.keys()
    assert json.loads(json.dumps(report.as_dict()))["right"] == report.right


def test_enough_is_planted():
    kinds = {kind for *_, kind, _, finding, _ in PLANTED if finding is None}
    found = {f for *_, finding, _ in PLANTED for f in (finding or "").split()}
    assert len(PLANTED) >= 40 and len(kinds) == 10 and found == FINDINGS.keys()


# Compositions of a dialect of names, a reduction, a range and a fault.

DIALECTS = ("logp logp_old advantage mask", "log_prob old_log_prob advantages response_mask",
            "per_token_logps old_per_token_logps advantages completion_mask",
            "action_log_probs old_action_log_probs advs action_mask",
            "pi_logprobs pi_old_logprobs advantages padding_masks")
REDUCTIONS = {
    "token-mean": masked_mean, "seq-mean-token-mean": lambda x, m: rows(x, m).mean(),
    "seq-mean-token-sum": lambda x, m: (x * m).sum(1).mean(), "sum": lambda x, m: (x * m).sum(),
    "constant": lambda x, m: (x * m).mean()}
FAULTS = {
    None: lambda r, A, clipped: -torch.min(r * A, clipped * A),
    "sign": lambda r, A, clipped: torch.min(r * A, clipped * A),
    "scale": lambda r, A, clipped: -3 * torch.min(r * A, clipped * A),
    "no-min": lambda r, A, clipped: -clipped * A,
    "clip-missing": lambda r, A, clipped: -r * A,
    "dual-clip-side": lambda r, A, clipped: -torch.max(torch.min(r * A, clipped * A), 3.7 * A),
    "no-gradient": lambda r, A, clipped: -torch.min(r * A, clipped * A).detach(),
    "ratio-constant": lambda r, A, clipped: -r / r.detach() * A}
CASES = list(itertools.product(DIALECTS, REDUCTIONS, FAULTS))


def composed(dialect, reduction, fault, low, high, result):
    "A policy loss that is put together from parts."
    padding = "padding" in dialect
    def loss(logp, old, A, mask):
        r = torch.exp(logp - old)
        x = FAULTS[fault](r, A if A.ndim == 2 else A[:, None], r.clamp(1 - low, 1 + high))
        value = REDUCTIONS[reduction](x, ~mask if padding else mask)
        return dict(tensor=value, tuple=(value, r.mean()), dict={"loss": value, "kl": 0.0})[result]
    space = {"loss": loss}
    arguments = ", ".join(dialect.split())
    exec(f"def named({arguments}): return loss({arguments})", space)
    return space["named"]


@pytest.mark.parametrize("seed", range(60))
def test_compositions(seed):
    draw = random.Random(seed)
    dialect, reduction, fault = draw.choice(CASES)
    low, high = draw.choice((0.13, 0.2, 0.37)), draw.choice((0.28, 0.37, 0.913))
    f = composed(dialect, reduction, fault, low, high, draw.choice(("tensor", "tuple", "dict")))
    report = identify(f)
    assert {x.kind for x in report.findings} == {fault} - {None}, report
    if fault == "no-gradient": return
    expected = 3.0 if fault == "scale" else 1.0
    assert (report.facts["aggregation"], report.facts["scale"]) == (reduction, expected)
    if fault in (None, "sign", "scale", "no-min"):
        assert near(report.facts["clip_low"], low) and near(report.facts["clip_high"], high)


ESTIMATES = dict(k1=lambda d: d, k2=lambda d: d.square() / 2, k3=lambda d: (-d).exp() - 1 + d)
TOTALS = {"each": lambda k, m: k * m, "mean": masked_mean, "rows": rows,
          "sums": lambda k, m: (k * m).sum(1), "mean of sums": lambda k, m: (k * m).sum(1).mean(),
          "sum of means": lambda k, m: rows(k, m).sum(), "sum": lambda k, m: (k * m).sum()}


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("name", ESTIMATES)
def test_an_estimate_is_read_in_any_sum(name, total):
    def kl(logprobs, ref_logprobs, mask):
        return TOTALS[total](ESTIMATES[name](logprobs - ref_logprobs), mask)
    def turned(logprobs, ref_logprobs, mask): return -kl(logprobs, ref_logprobs, mask)
    report = identify(kl)
    assert report.right and report.facts["estimator"] == name, report
    assert [x.kind for x in identify(turned).findings] == ["kl-sign"]


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_each_variant_of_ours_is_named(variant):
    def loss(logp, logp_old, advantage, mask):
        return rlhf_notes.policy_loss(logp, logp_old, advantage, mask, variant=variant)
    report = identify(loss)
    assert report.right and not report.cautions, report
    assert report.formula == {"gspo_token": "gspo", "luspo": "gspo"}.get(variant, variant)


OURS = ("value_loss gae gae_tokens discounted_returns group_advantage rloo_advantage kl_estimate "
        "kl_loss selective_log_softmax entropy_from_logits aggregate_loss whiten dpo_loss "
        "bradley_terry_loss simpo_loss reinforce_pp_advantage").split()


@pytest.mark.parametrize("name", OURS)
def test_our_formulas_are_right(name):
    report = identify(getattr(rlhf_notes, name))
    assert report.right, report
    assert report.formula == {"kl_loss": "kl_estimate"}.get(name, name)


def test_a_padding_mask_may_say_which_tokens_count():
    "torchtune's loss calls it `padding_masks`, and True counts; elsewhere True is padding."
    report = identify(rlhf_notes.PPOLoss())
    assert report.right and report.facts["aggregation"] == "token-mean", report


def test_ways_of_libraries_are_no_fault():
    "A chunk that saves memory, a group divided by its mean, whitening that removes the mean."
    def chunked(logits, chunk_size=128):
        return -torch.cat([(z.softmax(-1) * z.log_softmax(-1)).sum(-1)
                           for z in logits.split(chunk_size)])
    assert identify(chunked).right
    def maxrl(rewards, num_generations=4):
        mean = rewards.view(-1, num_generations).mean(1).repeat_interleave(num_generations)
        return (rewards - mean) / (mean + 1e-6)
    report = identify(maxrl)
    assert report.right and report.facts["scale"] == "mean"


# What is like a kind and is none is not accused

@pytest.mark.parametrize("name", "importance_ratio distillation_advantage implicit_reward "
                         "ppo_stats clip_fraction value_clip_fraction explained_variance".split())
def test_a_guessed_kind_is_doubted(name):
    with pytest.raises(ValueError, match=f"kind must be given, as {name} gives") as e:
        identify(getattr(rlhf_notes, name))
    assert "\n" not in str(e.value)


def test_a_kind_that_was_given_is_not_doubted():
    report = identify(rlhf_notes.importance_ratio, kind="kl")
    assert [x.kind for x in report.findings] == ["kl-estimator"]


@pytest.mark.parametrize("name", "centre apply_mask apply_penalty masked_var symlog "
                                 "kl_cov_penalty".split())
def test_other_maps_have_no_finding(name):
    report = identify(getattr(rlhf_notes, name))
    assert report.formula is None and not report.findings, report


@pytest.mark.parametrize("name, f", [*made()], ids=[name for name, _ in made()])
def test_what_breaks_no_property_is_not_accused(name, f):
    report = identify(f)
    assert not report.findings and not report.right, report


@pytest.mark.parametrize("name", SPREADS)
def test_another_spread_than_a_deviation(name):
    assert [x.kind for x in identify(of_groups(SPREADS[name])).findings] == ["deviation"]


BATCH = {  # a baseline that does not follow its group's rewards
    "largest": lambda g: g - g.max(), "median": lambda g: g - g.median(),
    "of the others": lambda g: g - (g.sum() - g) / (g.numel() - 1),
    "running": lambda g: g - (g.mean(1).cumsum(0) / torch.arange(1, len(g) + 1))[:, None],
    "rank": lambda g: g.flatten().argsort().argsort().view_as(g).double(),
    "squashed": lambda g: (g - g.mean()).tanh()}


@pytest.mark.parametrize("name", BATCH)
def test_a_baseline_of_the_batch(name):
    assert "baseline" in {x.kind for x in identify(of_groups(BATCH[name])).findings}


@pytest.mark.parametrize("keep", [*BAD_ONES.values(), lambda d, A, m: whole(d, m).abs() < 0.7])
@pytest.mark.parametrize("fault", ["no-min", "dual-clip-side"])
def test_a_fault_beside_what_is_dropped(fault, keep):
    def objective(r, A): return -FAULTS[fault](r, A, r.clamp(0.8, 1.2))
    assert [x.kind for x in identify(dropped(keep, objective)).findings] == [fault]


@pytest.mark.parametrize("share, penalty, found", [(0.5, 0, ["ends-ignored"]), (1, 1, [])])
def test_ends_of_another_kind(share, penalty, found):
    "Half of what follows an end comes through; or an end costs something, which is no fault."
    def gae(rewards, values, dones, next_value, gamma=0.9, lam=0.8):
        last, out = torch.zeros_like(next_value), []
        for r, v, end in zip(rewards.flip(0), values.flip(0), dones.flip(0).double()):
            goes_on = gamma * (1 - share * end)
            last = r - penalty * end + goes_on * (next_value + lam * last) - v
            next_value = v
            out.insert(0, last)
        return torch.stack(out)
    report = identify(gae)
    assert [x.kind for x in report.findings] == found and not report.right, report


def without_a_clip(logprobs, old_logprobs, advantages, mask):
    return -((logprobs - old_logprobs).exp() * advantages[:, None] * mask).sum()
def with_it_in_the_name(logprobs, old_logprobs, advantages, mask):
    return without_a_clip(logprobs, old_logprobs, advantages, mask)
with_it_in_the_name.__name__ = "importance_sampling_loss"


@pytest.mark.parametrize("f, found", [(without_a_clip, ["clip-missing"]),
                                      (with_it_in_the_name, [])])
def test_a_name_may_say_that_there_is_no_clip(f, found):
    assert [x.kind for x in identify(f).findings] == found


def explained(values, returns): return 1 - (returns - values).var() / returns.var()
def sample_size(logp, old_logp): return (logp - old_logp).exp().sum().square() / (
    2 * (logp - old_logp)).exp().sum()


@pytest.mark.parametrize("f", [explained, sample_size])
def test_a_statistic_is_doubted(f):
    with pytest.raises(ValueError, match="kind must be given, as .* a statistic"): identify(f)


def of_one(rewards, eps=1e-4): return (rewards - rewards.mean()) / (rewards.std() + eps)
def listed(rewards): return [r - sum(rewards) / len(rewards) for r in rewards]
def left_out(rewards): return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
def of_one_turned(rewards): return rewards.mean() - rewards
def of_one_by_variance(rewards): return (rewards - rewards.mean()) / rewards.var()
def not_exchangeable(rewards): return (rewards - rewards.mean()) / rewards.std(-1, keepdim=True)


@pytest.mark.parametrize("f, baseline, deviation, found", [
    (of_one, "mean", "sample", ""), (listed, "mean", None, ""),
    (left_out, "leave-one-out", None, ""), (of_one_turned, "mean", None, "sign"),
    (of_one_by_variance, "mean", None, "deviation"),
    (not_exchangeable, None, "sample", "baseline")])
def test_one_group_a_call(f, baseline, deviation, found):
    report = identify(f, kind="group_advantage")  # says that a call has one group
    assert {x.kind for x in report.findings} == set(found.split()), report
    assert report.right == (not found)
    assert (report.facts["baseline"], report.facts["deviation"]) == (baseline, deviation)
    open = identify(f)
    assert not open.right and bool(open.unknown) == (f is not not_exchangeable)


def test_names_may_say_that_a_call_has_one_group():
    def group_norm(rewards): return of_one(rewards)
    assert identify(group_norm).right and "right, one group a call" in str(identify(group_norm))
    assert "not known: whether a call has the rewards of one group" in str(identify(of_one))


# One prompt's rewards move another's advantages

def by_columns(rewards): return (rewards - rewards.mean(0)) / rewards.std(0)
def by_batch(batch_rewards): return (batch_rewards - batch_rewards.mean()) / batch_rewards.std()
def by_both(rewards): return (rewards - rewards.mean(0)) / rewards.std()
def of_a_number(rewards, num_generations=4): return by_batch(rewards)


@pytest.mark.parametrize("f, found", [
    (by_columns, ""), (by_batch, "baseline deviation"), (by_both, "baseline"),
    (of_a_number, "baseline deviation option-without-effect")])
def test_groups_in_one_call(f, found):
    report = identify(f)
    assert {x.kind for x in report.findings} == set(found.split()), report
    assert bool(report.unknown) == (f is by_columns) and not report.right


@pytest.mark.parametrize("name", "G k rloo_k rollout_n num_generations n_samples_per_prompt "
                         "responses_per_prompt num_return_sequences n_rollouts".split())
def test_the_size_of_a_group_has_many_names(name):
    space = {"leave_one_out": lambda r, n: (r - (r.sum(1, keepdim=True) - r) / (n - 1)).flatten()}
    exec(f"def f(scores, {name}=5): return leave_one_out(scores.view(-1, {name}), {name})", space)
    report = identify(space["f"])
    assert report.right and report.formula == "rloo_advantage", report


@pytest.mark.parametrize("name", "targets R td_targets lambda_returns return_ vtarg".split())
def test_what_values_aim_at_has_many_names(name):
    space = {}
    exec(f"def f(values, {name}, m): return ((values - {name})**2 * m).sum() / m.sum()", space)
    report = identify(space["f"])
    assert report.right and report.formula == "value_loss", report


# Log-probabilities that are made of logits

@pytest.mark.parametrize("name, formula", [
    ("ppo_error", "dr_grpo"), ("ppo_policy_error", "dr_grpo"), ("grpo_policy_error", "grpo"),
    ("ppo_value_error", "value_loss"), ("rloo_policy_error", "grpo"),
    ("ppo_error_continuous", "dr_grpo"), ("ppo_policy_error_continuous", "dr_grpo")])
def test_losses_of_logits(name, formula):
    report = identify(getattr(rlhf_notes, name))
    assert report.right and report.formula == formula, report
    assert report.facts.get("kl") == ("k3" if name == "grpo_policy_error" else None)


def test_a_fault_in_a_loss_of_logits():
    def loss(logits, old_log_probs, actions, advantages, clip_range=0.37):
        logp = logits.log_softmax(-1).gather(-1, actions[..., None])[..., 0]
        r = (logp - old_log_probs).exp()
        return -(r.clamp(1 - clip_range, 1 + clip_range) * advantages).mean()
    report = identify(loss)
    assert [x.kind for x in report.findings] == ["no-min"], report
    assert near(report.facts["clip_low"], 0.37)


def script(logps: torch.Tensor, old_logps: torch.Tensor, adv: torch.Tensor, mask: torch.Tensor):
    r = (logps - old_logps).exp()
    return -(torch.min(r * adv, r.clamp(0.87, 1.37) * adv) * mask).sum() / mask.sum()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_what_is_compiled_is_read_as_what_it_was_made_of():
    report = identify(torch.jit.script(script))
    assert report.right and near(report.facts["clip_low"], 0.13), report


# Names and forms of other people's code

def clip_each(r, A, low=0.2, high=0.2): return -torch.min(r * A, r.clamp(1 - low, 1 + high) * A)
def of_sums(seq_logps, old_seq_logps, lengths, advantages):
    assert seq_logps.ndim == advantages.ndim == 1
    return clip_each(((seq_logps - old_seq_logps) / lengths).exp(), advantages).mean()
def of_rewards(logps, old_logps, rewards):
    return clip_each((logps - old_logps).exp(), (rewards - rewards.mean()) / rewards.std()).mean()
def of_ppo_kl(ppo_kl, advantages, eps_clip):
    return clip_each((-ppo_kl).exp(), advantages, eps_clip, eps_clip)
def decoupled(logprobs, old_logprobs, prox_logp, advantages, loss_mask):
    w = (prox_logp - old_logprobs).exp().clamp(max=2)
    return masked_mean(w * clip_each((logprobs - prox_logp).exp(), advantages), loss_mask)
def with_a_switch(logp, old_logp, advantages, mask, norm_adv, clip_coef):
    A = advantages[:, None] if advantages.ndim == 1 else advantages
    if norm_adv:
        A = A.expand_as(logp)
        A = (A - masked_mean(A, mask)) / A[mask > 0].std()
    return masked_mean(clip_each((logp - old_logp).exp(), A, clip_coef, clip_coef), mask)
def critic(preds, targets, clip_vloss, v_old, clip_coef):
    each = (preds - targets) ** 2
    if clip_vloss:
        near = v_old + (preds - v_old).clamp(-clip_coef, clip_coef)
        each = torch.max(each, (near - targets) ** 2)
    return each.mean()
def bare(new, old, ref, advantages, mask, beta=0.04):
    d = ref - new
    return masked_mean(clip_each((new - old).exp(), advantages) + beta * (d.exp() - d - 1), mask)
def bare_values(new, old, returns, clip=0.2):
    near = old + (new - old).clamp(-clip, clip)
    return 0.5 * torch.max((new - returns)**2, (near - returns)**2).mean()
def of_measures(log_pi, log_mu, A): return clip_each((log_pi - log_mu).exp(), A).mean()
def popart(values, returns, sigma=2.0): return 0.5 * ((values - returns) / sigma).square().mean()
def of_data(data, mask): return masked_mean(data, mask)
def reverse(log_p, log_q): return (log_q - log_p).exp() - 1 - (log_q - log_p)


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("f, formula", [
    (of_sums, "ppo"), (of_rewards, "ppo"), (of_ppo_kl, "ppo"), (decoupled, "ppo"),
    (with_a_switch, "ppo"), (critic, "value_loss"), (of_data, "aggregate_loss"),
    (bare, "ppo"), (bare_values, "value_loss"), (of_measures, "ppo"), (popart, "value_loss"),
    (reverse, "kl_estimate")])
def test_names_and_forms_of_others(f, formula):
    report = identify(f)
    assert report.right and report.formula == formula, report


# Arrays and lists, time first

def kl_of_arrays(logprobs, ref_logprobs):
    d = np.asarray(ref_logprobs) - np.asarray(logprobs)
    return np.exp(d) - 1 - d
def entropy_of_arrays(logits):
    z = np.asarray(logits)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    return -(p * np.log(p)).sum(-1)
def gae_of_lists(rewards, values, next_value, masks, gamma=0.95, lam=0.9):
    values, last, out = values + [next_value], 0, []
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * values[t + 1] * masks[t] - values[t]
        last = delta + gamma * lam * masks[t] * last
        out.insert(0, last + values[t])
    return out
def group_of_lists(rewards: list):
    mean, std = statistics.mean(rewards), statistics.pstdev(rewards)
    return [(r - mean) / (std + 1e-6) for r in rewards]
def columns(logp, old_logp, adv, mask):
    return (clip_each((logp - old_logp).exp(), adv) * mask).sum(0).div(mask.sum(0)).mean()
def columns_of_values(values, returns, mask): return ((values - returns)**2 * mask).sum(0).mean()


@pytest.mark.parametrize("f, given, formula, facts", [
    (kl_of_arrays, {}, "kl_estimate", dict(estimator="k3")),
    (entropy_of_arrays, {}, "entropy_from_logits", dict(temperature=1.0)),
    (gae_of_lists, {}, "gae", dict(gamma=0.95, lam=0.9)),
    (group_of_lists, dict(kind="group_advantage"), "group_advantage", dict(deviation="population")),
    (columns, dict(layout="TN"), "grpo", dict(aggregation="seq-mean-token-mean")),
    (columns_of_values, dict(layout="TN"), "value_loss", dict(aggregation="seq-mean-token-sum"))])
def test_arrays_lists_and_time_first(f, given, formula, facts):
    report = identify(f, **given)
    assert report.right and report.formula == formula, report
    assert all(near(report.facts[name], x) for name, x in facts.items()), report


def of_a_group(logps, rewards, num_generations=4): return (logps * rewards).mean()
def both_in_one(logps, ref_logps):
    h = (logps - ref_logps).chunk(2)
    return -torch.nn.functional.logsigmoid(h[0] - h[1]).mean()


@pytest.mark.parametrize("f, says", [(of_a_group, "of_a_group is advantage"),
                                     (both_in_one, "kind must be given")])
def test_what_is_not_known_is_asked_for(f, says):
    with pytest.raises(ValueError, match=says) as e: identify(f)
    assert "\n" not in str(e.value)


# A batch in one argument

def core(logp, old, A, m, eps=0.37):
    r = (logp - old).exp()
    A = A if A.ndim == 2 else A[:, None]
    return -masked_mean(torch.min(r * A, r.clamp(1 - eps, 1 + eps) * A), m)


def by_key(batch):
    return core(batch["logprobs"], batch["old_logprobs"], batch["advantages"], batch["mask"])


def by_attribute(data, clip=0.37):
    return core(data.log_prob, data.old_log_prob, data.advantages, data.response_mask, clip)


def half_of_it(logprobs, batch):
    return core(logprobs, batch["old_logprobs"], batch["advantages"], batch.get("loss_mask"))


def with_reference(inputs):
    loss = core(*(inputs[k] for k in ("logps", "old_logps", "advantages", "mask")))
    if "ref_logps" in inputs:
        d = inputs["ref_logps"] - inputs["logps"]
        loss = loss + 0.04 * masked_mean(d.exp() - d - 1, inputs["mask"])
    return loss


Fields = namedtuple("Fields", "logp logp_old adv mask")
def with_fields(data: Fields): return core(*data)


@pytest.mark.parametrize("f", [by_key, by_attribute, half_of_it, with_reference, with_fields])
def test_a_batch_is_read_by_its_keys(f):
    report = identify(f)
    assert report.right and near(report.facts["clip_high"], 0.37), report
    assert report.facts.get("kl") == ("k3" if f is with_reference else None)


def test_a_fault_in_a_batch_is_found():
    def turned(batch): return -by_key(batch)
    def no_clip(batch, clip=0.2):
        r = (batch["logp"] - batch["old_logp"]).exp()
        return -masked_mean(r * batch["adv"][:, None], batch["mask"])
    assert [x.kind for x in identify(turned).findings] == ["sign"]
    found = {x.kind for x in identify(no_clip).findings}
    assert found == {"clip-missing", "option-without-effect"}


def unpacked(data):
    logp, old, A, m = data
    return core(logp, old, A, m)


def strange_keys(batch): return core(batch["foo"], batch["bar"], batch["adv"], batch["mask"])
def of_a_model(model, batch): return model(batch["ids"]).sum()
def of_anything(batch): return batch.sum()


@pytest.mark.parametrize("f, says", [
    (unpacked, "data .* not by position"), (strange_keys, "has foo, bar, adv, mask"),
    (of_a_model, "model, batch"), (of_anything, "batch are understood as nothing")])
def test_a_batch_that_tells_no_names_is_refused(f, says):
    with pytest.raises(ValueError, match=says) as e: identify(f)
    assert "\n" not in str(e.value)


# Cautions

def fragile(logp, old_logp, advantages, mask):
    r = torch.exp(logp - old_logp)
    loss = -torch.min(r * advantages, r.clamp(.8, 1.2) * advantages)
    return rows(loss, mask).mean()


def sturdy(logp, old_logp, advantages, mask):
    return rlhf_notes.policy_loss(logp, old_logp, advantages, mask, variant="grpo")[0]


def test_cautions():
    kinds = {x.kind for x in identify(fragile).cautions}
    assert kinds >= {"mask-nan", "empty-batch", "empty-row", "overflow", "old-gradient",
                     "advantage-gradient"}
    assert not identify(sturdy).cautions
    def half(logits, labels): return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    assert [x.kind for x in identify(half).cautions] == ["precision"]


# What cannot be read: one sentence

def endless(logp, old_logp, adv, mask):
    while True: pass


def talks(logp, old_logp, adv, mask):
    print("hello")
    return sturdy(logp, old_logp, adv, mask)


def draws(logp, old_logp, adv, mask): return -(torch.rand_like(logp) * logp * adv[:, None]).mean()
def fails(logp, old_logp, adv, mask): raise KeyError("no such key")
def on_cuda(logp, old_logp, adv, mask): return logp.to("cuda").sum()
def nothing(logp, old_logp, adv, mask): pass
def other_shape(logp, old_logp, adv, mask): return logp.new_ones(3, 3)
def asks(logp, old_logp, adv, mask, mystery): return logp.sum()
def three(rewards, values, dones, next_value, gamma=0.9): return rewards, rewards, rewards
def in_graph(logp, old_logp, adv, mask):
    r = (logp - old_logp).exp()
    x, _ = r * adv[:, None], r.mul_(2)
    return -(x * mask).sum()
def nameless(foo, bar): return foo + bar
async def awaited(values, returns): return values.sum()
def yields(values, returns): yield values.sum()
def not_finite(logp, old_logp, adv, mask): return logp.sum() * float("nan")


@pytest.mark.parametrize("f, error, says", [
    (3, TypeError, "callable, got int"), (lambda *args: args[0], TypeError, "named parameters"),
    (dict, TypeError, "the class dict"), (torch.exp, TypeError, "its parameters, got exp"),
    (draws, ValueError, "draws is random"), (fails, ValueError, "fails raised KeyError"),
    (on_cuda, ValueError, "on_cuda raised"), (nothing, ValueError, "nothing returned None"),
    (other_shape, ValueError, r"\(3, 3\)"), (three, ValueError, "three returned"),
    (asks, ValueError, "what mystery of asks is; it has logp, old_logp, adv, mask, mystery"),
    (awaited, TypeError, "got awaited, which"), (yields, TypeError, "got yields, which"),
    (in_graph, ValueError, "the gradient of in_graph fails: one of the variables"),
    (nameless, ValueError, "kind must be given"), (not_finite, ValueError, "gives NaN")])
def test_what_cannot_be_read_is_said_in_one_sentence(f, error, says):
    with pytest.raises(error, match=says) as e: identify(f)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("kind, role", [
    ("gae", "rewards"), ("group_advantage", "rewards"), ("log_prob", "logits"), ("kl", "logp or"),
    ("preference_loss", "chosen"), ("policy_loss", "logp or"), ("entropy", "logits")])
def test_a_kind_without_its_tensors_is_refused(kind, role):
    def f(values, returns): return (values - returns).square().mean()
    with pytest.raises(ValueError, match=f"which parameter of f is {role}") as e:
        identify(f, kind=kind)
    assert "\n" not in str(e.value)


def stubborn(logp, old_logp, adv, mask):
    while True:
        try: time.sleep(60)
        except Exception: pass


@pytest.mark.parametrize("f", [endless, stubborn])
def test_an_endless_loop_ends(f, monkeypatch):
    monkeypatch.setattr(sys.modules["rlhf_notes.identify"], "LIMIT", 0.3)
    with pytest.raises(ValueError, match=f"{f.__name__} took more than 0.3 s in 1 call"):
        identify(f)


def test_what_others_take_of_the_processor_does_not_count():
    with time_limit(0.1): time.sleep(0.3)
    with pytest.raises(TimeoutError), time_limit(0.1):
        while True: pass
    with pytest.raises(TimeoutError), time_limit(0.1): time.sleep(60)


def test_arguments_are_checked():
    for bad, error in ((dict(kind="loss"), ValueError), (dict(layout="NT"), ValueError),
                       (dict(options=dict(c=1)), ValueError), (dict(names=3), TypeError),
                       (dict(names={"a": "b"}), ValueError)):
        with pytest.raises(error, match=next(iter(bad))): identify(fragile, **bad)


def test_prints_are_kept(capsys):
    assert identify(talks).notes == ["it prints: hello"]
    assert capsys.readouterr().out == ""


def test_the_figure_shows_both_signs():
    figure = identify(fragile).plot()
    assert [ax.get_title() for ax in figure.axes] == ["A > 0", "A < 0"]
    assert all(len(ax.lines) == 2 for ax in figure.axes)


def test_the_module_is_the_function_too():
    import importlib
    module = importlib.import_module("rlhf_notes.identify")
    assert module(fragile).right and module.identify(fragile).right


def test_roles():
    table = {"logp": "lp new_logprobs action_log_probs", "logp_old": "b_old_logprobs oldlogprob",
             "logp_ref": "log_probs_base ref_logprob", "padding": "padding_masks is_pad",
             "mask": "eos_mask completion_mask m", "not_done": "not_done nonterminal",
             "starts": "episode_starts", "log_ratio": "ppo_kl log_importance_ratio",
             "next_value": "last_values bootstrap_value V_T terminal_value value_end v_final",
             "rewards": "token_level_rewards total_rewards", "done": "d fdones done_mask",
             "returns": "lambda_returns value_targets batch_rtgs discounted_rewards reward_to_go",
             "chosen": "chosen_token_logps", "chosen_ref": "ref_logp_w",
             None: "clip_range gamma norm_adv clip_vloss", "value": "preds v_pred"}
    assert not [(name, role) for role, names in table.items() for name in names.split()
                if role_of(name) != role]


def test_modes_are_told_apart():
    for mode, group in (("token-mean", 1), ("seq-mean-token-mean", 1), ("seq-mean-token-sum", 1),
                        ("constant", 1), ("sum", 1), ("prompt-mean", 6)):
        masks = [ragged(B, T) for B, T in ((48, 7), (96, 11))]
        found = read_mode([(0.37 * mode_weights(m, mode, group), m) for m in masks])
        assert found[0] == mode and found[1] == pytest.approx(0.37)


# The command

def test_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "of_mine.py").write_text(
        "def good(values, returns): return (values - returns).pow(2).mean()\n"
        "def bad(values, returns, clip=0.2): return -(values - returns).pow(2).mean()\n"
        "def odd(*args): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["identify", "of_mine:good"]) == 0
    assert "value_loss: right" in capsys.readouterr().out
    assert cli.main(["identify", "of_mine:bad", "--options", "clip=0.3", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert {x["kind"] for x in said["findings"]} == {"sign", "option-without-effect"}
    for wrong in ("of_mine:odd", "of_mine:none", "nowhere:f", "of_mine"):
        assert cli.main(["identify", wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert cli.main(["identify", "of_mine:good", "--names", "v"]) == 2
