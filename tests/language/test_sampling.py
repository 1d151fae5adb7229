"""The draw is exact, and a sample's log-probabilities and hidden states are those of a fresh
reading.
"""
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import KINDS, make, texts
from strategies import SEEDS, normal
from transformers import GPT2Model

from rlhf_notes import fast
from rlhf_notes.formulas.logprob import selective_log_softmax
from rlhf_notes.formulas.reward import truncate_at_stop
from rlhf_notes.language import sampling
from rlhf_notes.language.model import (
    Policy,
    hidden_states,
    make_gpt2,
    no_dropout,
    response_states,
    to_logits,
)
from rlhf_notes.language.sampling import draw, sample

TOP = 1 - 2**-24                                            # the largest float32 below 1


def uniform(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def gpt2(seed=0, sharp=0.3, **changes):
    "A small GPT-2 with weights large enough to matter."
    lm = make_gpt2("tiny", 37, **dict(n_embd=16, n_head=2, n_positions=32) | changes)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(sharp * torch.randn(p.shape, generator=g))
    return lm


def fresh(lm, prompts, mask, tokens, temperature=1.0):
    "Log-probabilities and hidden states of given responses, without any cache."
    both, seen = (torch.cat([prompts, tokens], 1),
                  torch.cat([mask, torch.ones_like(tokens, dtype=torch.bool)], 1))
    h = hidden_states(lm, both, seen)[:, prompts.shape[1] - 1:-1]
    return selective_log_softmax(to_logits(lm, h), tokens, temperature), h


def plain(*args):
    with fast.off():
        return sample(*args)


def close(got, lm, prompts, mask, temperature=1.0):
    for a, b in zip((got.logp, got.hidden), fresh(lm, prompts, mask, got.tokens, temperature)):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


# --- the draw

@given(V=st.integers(1, 12), temperature=st.sampled_from([0.3, 1.0, 2.5]), seed=SEEDS)
@settings(max_examples=40)
def test_every_token_has_a_stretch_as_long_as_its_probability(V, temperature, seed):
    "With u on a grid of N points each token is drawn p N times, but for the ends of its stretch."
    logits, N = normal(seed, (V,), torch.float32, 2.0), 4096
    tokens = draw(logits.expand(N, V), temperature, (torch.arange(N) + 0.5) / N)
    counts = torch.bincount(tokens, minlength=V)
    p = torch.softmax(logits.double() / temperature, -1)
    assert (counts.cumsum(0) - N * p.cumsum(0)).abs().max() <= 1 and (tokens.diff() <= 0).all()


@given(seed=SEEDS,
       dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
       temperature=st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=30)
def test_draw_is_the_inverse_of_the_cumulative_distribution(seed, dtype, temperature):
    logits, u = normal(seed, (3, 4, 7), dtype, 2.0), uniform(seed, 3, 4)
    tokens = draw(logits, temperature, u)
    cdf = np.cumsum(torch.softmax(logits.float() / temperature, -1).numpy(), -1, dtype=np.float64)
    for i in np.ndindex(3, 4):
        k = tokens[i].item()
        assert cdf[i][k] >= (1 - u[i].item()) * cdf[i][-1] - 1e-6
        assert (k == 0 or cdf[i][k - 1] <= (1 - u[i].item()) * cdf[i][-1] + 1e-6)
    assert tokens.dtype == torch.int64 and tokens.shape == (3, 4)


@given(V=st.integers(2, 40), seed=SEEDS,
       u=st.one_of(st.sampled_from([0.0, TOP, 2**-24, 0.5]),
                   st.integers(0, 2**24 - 1).map(lambda k: k / 2**24)))
def test_what_cannot_be_is_never_drawn(V, seed, u):
    "Not at the ends of u either, where sums that were rounded could leave a gap."
    logits = normal(seed, (64, V), torch.float32, 3.0)
    possible = uniform(seed, 64, V) < 0.5
    possible[:, seed % V] = True
    tokens = draw(logits.masked_fill(~possible, -torch.inf), 1.0, torch.full((64,), u))
    assert possible.gather(1, tokens[:, None]).all()


def test_draws_follow_the_distribution():
    logits, n = torch.tensor([0.0, 1.0, -2.0, 0.5, 3.0]), 200_000
    for temperature in (0.7, 1.0, 3.0):
        counts = torch.bincount(draw(logits.expand(n, 5), temperature, uniform(0, n)), minlength=5)
        p = torch.softmax(logits / temperature, -1)
        # chi-square with 4 degrees of freedom: 0.1%
        assert ((counts - n * p).square() / (n * p)).sum() < 18.5


def test_nan_is_not_an_index_out_of_range():
    assert draw(torch.full((2, 5), math.nan), 1.0, torch.tensor([0.0, TOP])).tolist() == [4, 4]


# --- responses

@given(B=st.integers(1, 5), Q=st.integers(1, 7), T=st.integers(1, 9),
       temperature=st.sampled_from([0.7, 1.0, 1.7]),
       seed=SEEDS)
@settings(max_examples=25)
def test_both_ways_are_the_model(B, Q, T, temperature, seed):
    lm, (prompts, mask), u = gpt2(seed % 1000), texts(seed, B, Q), uniform(seed, B, T)
    ours, theirs = (f(lm, prompts, mask, u, temperature) for f in (sample, plain))
    # a number at the very edge of a stretch may fall to either side
    assert torch.equal(ours.tokens, theirs.tokens) or (
        ours.tokens == theirs.tokens).float().mean() > 0.5
    for got in (ours, theirs):
        close(got, lm, prompts, mask, temperature)
        assert got.tokens.shape == got.logp.shape == (B, T) and got.hidden.shape == (B, T, 16)
        assert got.tokens.dtype == torch.int64
        assert got.logp.dtype == torch.float32
        assert not got.logp.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_any_model_can_be_sampled(kind):
    lm = no_dropout(make(kind))
    prompts, mask = texts(1, 5, 6)
    u = uniform(2, 5, 7)
    got = sample(lm, prompts, mask, u, 1.3)
    close(got, lm, prompts, mask, 1.3)
    assert torch.equal(
        got.tokens, draw(to_logits(lm, fresh(lm, prompts, mask, got.tokens)[1]), 1.3, u))
    torch.testing.assert_close(Policy(lm).value(got.hidden), torch.zeros(5, 7))


@given(seed=SEEDS)
@settings(max_examples=10)
def test_a_row_does_not_depend_on_the_others(seed):
    lm, (prompts, mask), u = gpt2(), texts(seed, 6, 5), uniform(seed, 6, 8)
    together = sample(lm, prompts, mask, u)
    for i in range(6):
        first = mask[i].long().argmax()  # and without its padding
        alone = sample(lm, prompts[i:i + 1, first:], mask[i:i + 1, first:], u[i:i + 1])
        assert torch.equal(alone.tokens[0], together.tokens[i])
        torch.testing.assert_close(alone.logp[0], together.logp[i], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("f", [sample, plain])
def test_responses_go_on_past_the_end_of_the_text(f):
    "G4: a model that gives all probability to eos draws it T times."
    lm = gpt2(sharp=0.0, eos_token_id=3, tie_word_embeddings=False)
    with torch.no_grad():
        lm.transformer.ln_f.bias.fill_(1.0)
        lm.lm_head.weight.zero_()
        lm.lm_head.weight[3] = 1.0
    prompts, mask = texts(0, 4, 5)
    got = f(lm, prompts, mask, uniform(0, 4, 9))
    assert got.tokens.shape == (4, 9)
    assert (got.tokens == 3).float().mean() > 0.9
    assert (got.logp < 0).all()


@pytest.mark.parametrize("f", [sample, plain])
def test_temperature(f):
    """P1: cold is greedy, hot is uniform, and log-probabilities are those at the temperature of
    sampling.
    """
    lm, (prompts, mask), u = gpt2(), texts(3, 64, 4), uniform(3, 64, 6)
    cold, hot = (f(lm, prompts, mask, u, t) for t in (1e-3, 1e4))
    assert torch.equal(cold.tokens, to_logits(lm, cold.hidden).argmax(-1))
    assert cold.logp.exp().mean() > 0.98
    torch.testing.assert_close(hot.logp, torch.full((64, 6), -math.log(37)), atol=1e-2, rtol=0)
    assert torch.bincount(hot.tokens.flatten(), minlength=37).min() > 0


def test_the_same_numbers_give_the_same_responses():
    lm, (prompts, mask), u = gpt2(), texts(4, 5, 6), uniform(4, 5, 7)
    a, other, b = (sample(lm, prompts, mask, x) for x in (u, uniform(5, 5, 7), u))
    assert all(torch.equal(x, y) for x, y in zip(a, b)) and not torch.equal(a.tokens, other.tokens)


def test_samples_can_be_learnt_from():
    lm, (prompts, mask), u = gpt2(), texts(7, 5, 6), uniform(7, 5, 7)
    got, head = sample(lm, prompts, mask, u), torch.nn.Linear(16, 1)
    ratio = (fresh(lm, prompts, mask, got.tokens)[0] - got.logp).exp()
    (ratio.sum() + head(got.hidden).sum()).backward()
    assert head.weight.grad.abs().sum() > 0 and lm.transformer.wte.weight.grad.abs().sum() > 0
    # the first ratio of an update
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)


def test_what_a_head_adds_is_not_passed_over():
    (prompts, mask), u = texts(11, 3, 4), uniform(11, 3, 7)
    lm = gpt2()
    lm.lm_head.register_forward_hook(lambda module, args, out: 3 * out)
    close(sample(lm, prompts, mask, u), lm, prompts, mask)
    lm = gpt2()
    lm.lm_head = torch.nn.Linear(16, 37)
    with torch.no_grad():
        lm.lm_head.bias.copy_(torch.arange(37.0) / 10)
    close(sample(lm, prompts, mask, u), lm, prompts, mask)


@pytest.mark.parametrize("f", [sample, plain])
def test_the_context_may_be_used_to_its_end(f):
    lm, (prompts, mask) = gpt2(n_positions=12), texts(12, 3, 5)
    assert f(lm, prompts, mask, uniform(0, 3, 7)).tokens.shape == (3, 7)
    with pytest.raises(ValueError, match="must fit into the model's context of 12 tokens, got"):
        f(lm, prompts, mask, uniform(0, 3, 8))


P, M, U = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 4)
@pytest.mark.parametrize("args, error, words", [
    ((P, M, U, 0.0), ValueError, "temperature must be in"),
    ((P, M, U, -1.0), ValueError, "temperature must be in"),
    ((P, M, U[:1]), ValueError, r"B = 2, as prompts has, got \(1, 4\)"),
    ((P, M, U.long()), TypeError, "u must have dtype torch.float32, got torch.int64"),
    ((P, M, U.double()), TypeError, "u must have dtype torch.float32, got torch.float64"),
    ((P, M.long(), U), TypeError, "mask must be boolean"),
    ((P, M[:, :2], U), ValueError, "mask must have the shape of prompts"),
    ((P.float(), M, U), TypeError, "prompts must have an integer dtype"),
])
def test_bad_arguments(args, error, words):
    with pytest.raises(error, match=words):
        sample(gpt2(), *args)


# --- where it stops, and what is computed apart

def words(seed, *shape):
    return torch.randint(37, shape, generator=torch.Generator().manual_seed(seed))


def counted_steps(monkeypatch):
    "How many tokens are drawn, step by step."
    steps = []
    monkeypatch.setattr(sampling, "draw", lambda *a: steps.append(1) or draw(*a))
    return steps


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("way", [fast.off, nullcontext])
def test_all_that_is_read_is_the_same_when_it_stops_with_the_last_end(monkeypatch, way, first):
    lm, (prompts, mask), u = gpt2(), texts(3, 6, 4), uniform(1, 6, 20)
    stop, steps = [1, 2, 3, 5, 7, 11, 13, 17], counted_steps(monkeypatch)
    with way():
        whole = sample(lm, prompts, mask, u)
        cut, count, found = truncate_at_stop(whole.tokens, stop, 0, first)
        steps.clear()
        got = sample(lm, prompts, mask, u, 1.0, stop, first)
    assert found.all() and len(steps) == count.sum(1).max() < 20
    assert torch.equal(truncate_at_stop(got.tokens, stop, 0, first)[0], cut)
    assert torch.equal(got.logp[count], whole.logp[count])
    assert torch.equal(got.hidden[count], whole.hidden[count])
    assert [x.shape for x in got] == [x.shape for x in whole]


def test_a_response_without_an_end_is_sampled_to_the_last_token(monkeypatch):
    lm, (prompts, mask), steps = gpt2(), texts(3, 6, 4), counted_steps(monkeypatch)
    sample(lm, prompts, mask, uniform(1, 6, 9), 1.0, [40])
    assert len(steps) == 9


@pytest.mark.parametrize("how", [dict(top_k=3), dict(top_p=0.6), dict(top_p=0.8, top_k=4),
                                 dict(top_p=1e-6), dict(top_k=1)])
def test_the_likeliest_tokens_are_those_of_the_definition(how):
    logits, t = normal(3, (4, 5, 9)) * 2, 0.7
    found = sampling.likeliest(logits, t, **how)
    for z, kept in zip(logits.flatten(0, 1), found.flatten(0, 1)):
        k, p = how.get("top_k", 9), how.get("top_p", 1.0)
        order = sorted(range(9), key=lambda i: -z[i])[:k]
        shares = (z[order] / t).softmax(0).tolist()
        n = next((i for i in range(1, k + 1) if sum(shares[:i]) >= p), k)
        assert {i for i in range(9) if kept[i] > -math.inf} == {*order[:n]}
        assert all(kept[i] == z[i] for i in order[:n])


@pytest.mark.parametrize("how", [dict(top_k=2), dict(top_p=0.5)])
def test_a_truncated_draw_keeps_the_log_probability_of_the_whole(how):
    "So the first ratio is 1, and the tokens are the likeliest at each place."
    lm, prompts = gpt2(), torch.arange(12).view(3, 4)
    mask, u = torch.ones(3, 4, dtype=torch.bool), uniform(1, 3, 6)
    got = sample(lm, prompts, mask, u, 1.3, **how)
    logp, h = fresh(lm, prompts, mask, got.tokens, 1.3)
    torch.testing.assert_close(got.logp, logp, atol=1e-5, rtol=1e-5)
    kept = sampling.likeliest(to_logits(lm, h), 1.3, **how)
    assert (kept.gather(-1, got.tokens[..., None]) > -math.inf).all()
    assert not torch.equal(got.tokens, sample(lm, prompts, mask, u, 1.3).tokens)
    for bad in (dict(top_p=0.0), dict(top_p=1.5), dict(top_k=-1)):
        with pytest.raises(ValueError, match="^top_"): sample(lm, prompts, mask, u, **bad)
