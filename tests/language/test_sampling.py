import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from language_models import KINDS, make, texts
from rlhf_notes.formulas.logprob import selective_log_softmax
from rlhf_notes.language.model import Policy, autocast, hidden_states, make_gpt2, no_dropout, to_logits
from rlhf_notes.language.sampling import Elementwise, Fused, GPT2Rollout, Sampler, draw, is_plain_gpt2, sample
from strategies import SEEDS, normal

TOP = 1 - 2**-24                                            # the largest float32 below 1


def uniform(seed, *shape): return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def gpt2(seed=0, sharp=0.3, **changes):
    "A small GPT-2 with weights large enough to matter."
    lm = make_gpt2("tiny", 37, **dict(n_embd=16, n_head=2, n_positions=32) | changes)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in lm.parameters(): p.add_(sharp * torch.randn(p.shape, generator=g))
    return lm


def fresh(lm, queries, mask, tokens, temperature):
    "Log-probabilities and hidden states of given answers, without any cache."
    both, seen = torch.cat([queries, tokens], 1), torch.cat([mask, torch.ones_like(tokens, dtype=torch.bool)], 1)
    h = hidden_states(lm, both, seen)[:, queries.shape[1] - 1:-1]
    return selective_log_softmax(to_logits(lm, h), tokens, temperature), h


# --- the draw

@given(V=st.integers(1, 12), temperature=st.sampled_from([0.3, 1.0, 2.5]), seed=SEEDS)
@settings(max_examples=40)
def test_every_word_has_a_stretch_as_long_as_its_probability(V, temperature, seed):
    "With u on a grid of N points each word is drawn p N times, but for the ends of its stretch."
    logits, N = normal(seed, (V,), torch.float32, 2.0), 4096
    tokens = draw(logits.expand(N, V), temperature, (torch.arange(N) + 0.5) / N)
    counts = torch.bincount(tokens, minlength=V)
    p = torch.softmax(logits.double() / temperature, -1)
    assert (counts.cumsum(0) - N * p.cumsum(0)).abs().max() <= 1 and (tokens.diff() <= 0).all()


@given(seed=SEEDS, dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]), temperature=st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=30)
def test_draw_is_the_inverse_of_the_cumulative_distribution(seed, dtype, temperature):
    logits, u = normal(seed, (3, 4, 7), dtype, 2.0), uniform(seed, 3, 4)
    tokens = draw(logits, temperature, u)
    cdf = np.cumsum(torch.softmax(logits.float() / temperature, -1).numpy(), -1, dtype=np.float64)
    for i in np.ndindex(3, 4):
        k = tokens[i].item()
        assert cdf[i][k] >= (1 - u[i].item()) * cdf[i][-1] - 1e-6 and (k == 0 or cdf[i][k - 1] <= (1 - u[i].item()) * cdf[i][-1] + 1e-6)
    assert tokens.dtype == torch.int64 and tokens.shape == (3, 4)


@given(V=st.integers(2, 40), seed=SEEDS, u=st.one_of(st.sampled_from([0.0, TOP, 2**-24, 0.5]), st.integers(0, 2**24 - 1).map(lambda k: k / 2**24)))
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
        assert ((counts - n * p).square() / (n * p)).sum() < 18.5                    # chi-square with 4 degrees of freedom: 0.1%


def test_nan_is_not_an_index_out_of_range():
    assert draw(torch.full((2, 5), math.nan), 1.0, torch.tensor([0.0, TOP])).tolist() == [4, 4]


# --- all paths are the same

@given(B=st.integers(1, 5), Q=st.integers(1, 7), T=st.integers(1, 9), temperature=st.sampled_from([0.7, 1.0, 1.7]), seed=SEEDS,
       changes=st.sampled_from([{}, dict(n_layer=1), dict(n_layer=3), dict(scale_attn_by_inverse_layer_idx=True), dict(scale_attn_weights=False), dict(tie_word_embeddings=False),
                                dict(activation_function="gelu_new", n_inner=24), dict(n_head=1), dict(layer_norm_epsilon=0.3)]))
@settings(max_examples=40)
def test_gpt2_by_hand_is_gpt2(B, Q, T, temperature, seed, changes):
    lm = gpt2(seed % 1000, **changes)
    queries, mask = texts(seed, B, Q)
    u = uniform(seed, B, T)
    ours, theirs = Sampler(lm, T, temperature)(queries, mask, u), Sampler(lm, T, temperature, fast=False)(queries, mask, u)
    assert torch.equal(ours.tokens, theirs.tokens) or (ours.tokens == theirs.tokens).float().mean() > 0.5       # a number at the very edge of a stretch may fall to either side
    logp, hidden = fresh(lm, queries, mask, ours.tokens, temperature)
    torch.testing.assert_close(ours.logp, logp, atol=1e-4, rtol=1e-4); torch.testing.assert_close(ours.hidden, hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(to_logits(lm, ours.hidden), to_logits(lm, hidden), atol=1e-4, rtol=1e-4)
    logp, hidden = fresh(lm, queries, mask, theirs.tokens, temperature)
    torch.testing.assert_close(theirs.logp, logp, atol=1e-4, rtol=1e-4); torch.testing.assert_close(theirs.hidden, hidden, atol=1e-4, rtol=1e-4)
    for rollout in (GPT2Rollout(lm, B, Q, T, temperature, attention=a) for a in (Elementwise, Fused)):
        for name, x in dict(queries=queries, mask=mask, u=u).items(): getattr(rollout, name).copy_(x)
        with torch.no_grad(): tokens, logp, hidden = rollout.run()
        assert torch.equal(tokens, ours.tokens)
        torch.testing.assert_close(logp, ours.logp, atol=1e-4, rtol=1e-4); torch.testing.assert_close(hidden, ours.hidden, atol=1e-4, rtol=1e-4)
    assert ours.tokens.shape == ours.logp.shape == (B, T) and ours.hidden.shape == (B, T, 16) and ours.tokens.dtype == torch.int64 and ours.logp.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_any_model_can_be_sampled(kind):
    lm = no_dropout(make(kind))
    queries, mask = texts(1, 5, 6)
    u = uniform(2, 5, 7)
    got = Sampler(lm, 7, 1.3)(queries, mask, u)
    logp, hidden = fresh(lm, queries, mask, got.tokens, 1.3)
    torch.testing.assert_close(got.logp, logp, atol=1e-4, rtol=1e-4); torch.testing.assert_close(got.hidden, hidden, atol=1e-4, rtol=1e-4)
    assert torch.equal(got.tokens, draw(to_logits(lm, hidden), 1.3, u)) and not got.logp.requires_grad
    torch.testing.assert_close(Policy(lm).value(got.hidden), torch.zeros(5, 7))
    assert is_plain_gpt2(lm) == (kind == "GPT2")


@given(seed=SEEDS)
@settings(max_examples=10)
def test_a_row_does_not_depend_on_the_others(seed):
    lm, (queries, mask), u = gpt2(), texts(seed, 6, 5), uniform(seed, 6, 8)
    together = sample(lm, queries, mask, 8, 1.0, u)
    for i in range(6):
        alone = sample(lm, queries[i:i + 1, mask[i].long().argmax():], mask[i:i + 1, mask[i].long().argmax():], 8, 1.0, u[i:i + 1])            # and without its padding
        assert torch.equal(alone.tokens[0], together.tokens[i])
        torch.testing.assert_close(alone.logp[0], together.logp[i], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fast", [True, False])
def test_answers_go_on_past_the_end_of_the_text(fast):
    "G4: a model that says nothing but eos says it T times."
    lm = gpt2(sharp=0.0, eos_token_id=3, tie_word_embeddings=False)
    with torch.no_grad(): lm.transformer.ln_f.bias.fill_(1.0); lm.lm_head.weight.zero_(); lm.lm_head.weight[3] = 1.0
    queries, mask = texts(0, 4, 5)
    got = Sampler(lm, 9, fast=fast)(queries, mask, uniform(0, 4, 9))
    assert got.tokens.shape == (4, 9) and (got.tokens == 3).float().mean() > 0.9 and (got.logp < 0).all()


@pytest.mark.parametrize("fast", [True, False])
def test_temperature(fast):
    "P1: cold is greedy, hot is uniform, and log-probabilities are those at the temperature of sampling."
    lm, (queries, mask), u = gpt2(), texts(3, 64, 4), uniform(3, 64, 6)
    cold, hot = (Sampler(lm, 6, t, fast=fast)(queries, mask, u) for t in (1e-3, 1e4))
    assert torch.equal(cold.tokens, to_logits(lm, cold.hidden).argmax(-1)) and cold.logp.exp().mean() > 0.98
    torch.testing.assert_close(hot.logp, torch.full((64, 6), -math.log(37)), atol=1e-2, rtol=0)
    assert torch.bincount(hot.tokens.flatten(), minlength=37).min() > 0


# --- the sampler

def test_the_same_numbers_give_the_same_answers():
    lm, (queries, mask), u = gpt2(), texts(4, 5, 6), uniform(4, 5, 7)
    sampler = Sampler(lm, 7)
    a, other, b = sampler(queries, mask, u), sampler(queries, mask, uniform(5, 5, 7)), sampler(queries, mask, u)
    for name in ("tokens", "logp", "hidden"): assert torch.equal(getattr(a, name), getattr(b, name))            # and what came first was not written over
    assert not torch.equal(a.tokens, other.tokens)
    c = sample(lm, queries, mask, 7, 1.0, u)
    assert torch.equal(a.tokens, c.tokens) and torch.equal(a.logp, c.logp)


def test_the_buffers_are_those_of_before_and_the_weights_those_of_now():
    lm, (queries, mask), u = gpt2(), texts(6, 5, 6), uniform(6, 5, 7)
    sampler = Sampler(lm, 7)
    before = sampler(queries, mask, u)
    (rollout, _), = sampler.rollouts.values()
    where = rollout.cache.keys.data_ptr()
    with torch.no_grad():
        for p in lm.parameters(): p.mul_(1.5)                                       # in place, as an optimizer does
    after = sampler(queries, mask, u)
    (again, _), = sampler.rollouts.values()
    assert again is rollout and rollout.cache.keys.data_ptr() == where
    torch.testing.assert_close(after.logp, fresh(lm, queries, mask, after.tokens, 1.0)[0], atol=1e-4, rtol=1e-4)
    assert not torch.equal(before.hidden, after.hidden)
    lm.load_state_dict({k: v / 2 for k, v in lm.state_dict().items()}, assign=True)   # elsewhere in memory: a captured graph would not know
    moved = sampler(queries, mask, u)
    assert len(sampler.rollouts) == 2
    torch.testing.assert_close(moved.logp, fresh(lm, queries, mask, moved.tokens, 1.0)[0], atol=1e-4, rtol=1e-4)
    for n in range(1, 6): sampler(queries[:n], mask[:n], u[:n])
    assert [rollout.B for rollout, _ in sampler.rollouts.values()] == [2, 3, 4, 5]


@pytest.mark.parametrize("fast", [True, False])
def test_temperature_and_length_are_those_of_now(fast):
    lm, (queries, mask), u = gpt2(), texts(13, 5, 6), uniform(13, 5, 7)
    sampler = Sampler(lm, 7, 0.3, fast=fast)
    sampler(queries, mask, u)
    for length, temperature in ((7, 1.7), (1, 1.7), (7, 0.3)):
        sampler.length, sampler.temperature = length, temperature
        got, fresh_one = sampler(queries, mask, u[:, :length]), Sampler(lm, length, temperature, fast=fast)(queries, mask, u[:, :length])
        for name in ("tokens", "logp", "hidden"): assert torch.equal(getattr(got, name), getattr(fresh_one, name))


def test_what_comes_out_can_be_learnt_from():
    lm, (queries, mask), u = gpt2(), texts(7, 5, 6), uniform(7, 5, 7)
    got = Sampler(lm, 7)(queries, mask, u)
    head = torch.nn.Linear(16, 1)
    ratio = (fresh(lm, queries, mask, got.tokens, 1.0)[0] - got.logp).exp()
    (ratio.sum() + head(got.hidden).sum()).backward()
    assert head.weight.grad.abs().sum() > 0 and lm.transformer.wte.weight.grad.abs().sum() > 0
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)        # the first ratio of an update


class Watch(TorchDispatchMode):
    "Writes down what is called, and the largest tensor that is new."
    def __init__(self): super().__init__(); self.names, self.largest = [], {}
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        self.names.append(name)
        if isinstance(out, torch.Tensor): self.largest[name] = max(self.largest.get(name, 0), out.numel())
        return out


@pytest.mark.parametrize("attention", [Elementwise, Fused])
def test_nothing_is_looked_at_and_no_cache_is_allocated(attention):
    "What a CUDA graph asks for: no operator whose result goes to the host or decides a shape. And the cache is where it was: what grows with the text is never put together anew."
    lm, (queries, mask), u = gpt2(), texts(8, 5, 6), uniform(8, 5, 20)
    rollout = GPT2Rollout(lm, 5, 6, 20, 0.9, attention=attention)
    for name, x in dict(queries=queries, mask=mask, u=u).items(): getattr(rollout, name).copy_(x)
    with torch.no_grad(), Watch() as watch: rollout.run()
    assert not {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "unique", "_unique2", "masked_select", "index_put_"} & set(watch.names)
    assert watch.names.count("cat") <= 3
    if attention is Elementwise: assert not {"clone", "repeat"} & {n for n, size in watch.largest.items() if size > 5 * 6 * 48}


@pytest.mark.parametrize("attention", [Elementwise, Fused])
def test_a_rollout_runs_without_numbers(attention):
    "On tensors that have a shape and no numbers: whoever looked at one would be found out."
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    lm = gpt2()
    with FakeTensorMode(allow_non_fake_inputs=True):
        rollout = GPT2Rollout(lm, 3, 4, 5, 0.9, attention=attention)
        with torch.no_grad(): tokens, logp, hidden = rollout.run()
        assert tokens.shape == logp.shape == (3, 5) and hidden.shape == (3, 5, 16)
        with pytest.raises(DataDependentOutputException): tokens.sum().item()


@pytest.mark.parametrize("attention", [Elementwise, Fused])
def test_bfloat16(attention):
    lm, (queries, mask), u = gpt2(sharp=0.1), texts(9, 16, 6), uniform(9, 16, 8)
    rollout = GPT2Rollout(lm, 16, 6, 8, 1.0, torch.bfloat16, attention)
    for name, x in dict(queries=queries, mask=mask, u=u).items(): getattr(rollout, name).copy_(x)
    with torch.no_grad(): tokens, logp, hidden = rollout.run()
    exact, _ = fresh(lm, queries, mask, tokens, 1.0)
    assert rollout.cache.keys.dtype == torch.bfloat16 and logp.dtype == hidden.dtype == torch.float32 and not torch.equal(logp, exact)
    torch.testing.assert_close(logp, exact, atol=0.1, rtol=0.05)


def test_autocast_is_heeded():
    lm, (queries, mask), u = gpt2(sharp=0.1), texts(9, 16, 6), uniform(9, 16, 8)
    sampler = Sampler(lm, 8)
    exact = sampler(queries, mask, u)
    with autocast("cpu", "bfloat16"): got, slow = sampler(queries, mask, u), Sampler(lm, 8, fast=False)(queries, mask, u)
    with autocast("cpu", "float32"): again = sampler(queries, mask, u)
    assert {r.dtype for r, _ in sampler.rollouts.values()} == {torch.float32, torch.bfloat16} and torch.equal(again.logp, exact.logp)
    for x in (got, slow): torch.testing.assert_close(x.logp, fresh(lm, queries, mask, x.tokens, 1.0)[0], atol=0.1, rtol=0.05)


def test_weights_in_bfloat16():
    lm, (queries, mask), u = gpt2(sharp=0.1).bfloat16(), texts(9, 16, 6), uniform(9, 16, 8)
    got = Sampler(lm, 8)(queries, mask, u)
    assert got.hidden.dtype == torch.bfloat16 and got.logp.dtype == torch.float32
    torch.testing.assert_close(got.logp, fresh(lm, queries, mask, got.tokens, 1.0)[0], atol=0.1, rtol=0.05)


def test_log_probabilities_are_taken_in_pieces_where_all_logits_would_be_too_many(monkeypatch):
    lm, (queries, mask), u = gpt2(), texts(10, 3, 4), uniform(10, 3, 7)
    whole = sample(lm, queries, mask, 7, 1.0, u)
    for limit in (1, 3 * 37 * 2, 3 * 37 * 7):
        monkeypatch.setattr(GPT2Rollout, "PENDING", limit)
        parts = sample(lm, queries, mask, 7, 1.0, u)
        assert torch.equal(parts.tokens, whole.tokens); torch.testing.assert_close(parts.logp, whole.logp)


def test_only_plain_gpt2_is_computed_by_hand():
    class Adapter(torch.nn.Module):
        "Adds to what a layer says."
        def __init__(self, layer): super().__init__(); self.layer, self.weight, self.bias = layer, layer.weight, layer.bias
        def forward(self, x): return self.layer(x) + 0.5 * x.sum(-1, keepdim=True)
    lm, (queries, mask), u = gpt2(), texts(11, 3, 4), uniform(11, 3, 7)
    assert is_plain_gpt2(lm) and is_plain_gpt2(gpt2(activation_function="gelu_new")) and Sampler(lm, 7).fast
    lm.transformer.h[1].attn.c_proj = Adapter(lm.transformer.h[1].attn.c_proj)
    assert not is_plain_gpt2(lm) and not is_plain_gpt2(gpt2(add_cross_attention=True)) and not is_plain_gpt2(lm.transformer)
    got = sample(lm, queries, mask, 7, 1.0, u)
    torch.testing.assert_close(got.logp, fresh(lm, queries, mask, got.tokens, 1.0)[0], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="fast must be False or None for a model that is not GPT-2, got True with GPT2LMHeadModel"): Sampler(lm, 7, fast=True)


def test_what_a_head_adds_is_not_passed_over():
    (queries, mask), u = texts(11, 3, 4), uniform(11, 3, 7)
    lm = gpt2()
    lm.lm_head.register_forward_hook(lambda module, args, out: 3 * out)
    got = sample(lm, queries, mask, 7, 1.0, u)
    torch.testing.assert_close(got.logp, fresh(lm, queries, mask, got.tokens, 1.0)[0], atol=1e-4, rtol=1e-4)
    lm = gpt2()
    lm.lm_head = torch.nn.Linear(16, 37)
    with torch.no_grad(): lm.lm_head.bias.copy_(torch.arange(37.0) / 10)
    assert not is_plain_gpt2(lm)
    got = sample(lm, queries, mask, 7, 1.0, u)
    torch.testing.assert_close(got.logp, fresh(lm, queries, mask, got.tokens, 1.0)[0], atol=1e-4, rtol=1e-4)


def test_the_context_may_be_used_to_its_end():
    lm, (queries, mask) = gpt2(n_positions=12), texts(12, 3, 5)
    for fast in (True, False):
        assert Sampler(lm, 7, fast=fast)(queries, mask, uniform(0, 3, 7)).tokens.shape == (3, 7)
        with pytest.raises(ValueError, match="must fit into the model's context of 12 tokens, got 13"): Sampler(lm, 8, fast=fast)(queries, mask, uniform(0, 3, 8))


Q, M, U = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 4)
@pytest.mark.parametrize("call, error, words", [
    (lambda lm: Sampler(lm, 0), ValueError, "length must be in"),
    (lambda lm: Sampler(lm, 4, 0.0), ValueError, "temperature must be in"),
    (lambda lm: Sampler(lm, 4, -1.0), ValueError, "temperature must be in"),
    (lambda lm: Sampler(lm, 4)(Q, M, U[:, :3]), ValueError, r"u must have shape \(2, 4\), one number for each token of the answers, got \(2, 3\)"),
    (lambda lm: Sampler(lm, 4)(Q, M, U[:1]), ValueError, r"got \(1, 4\)"),
    (lambda lm: Sampler(lm, 4)(Q, M, U.long()), TypeError, "u must have a floating-point dtype"),
    (lambda lm: Sampler(lm, 4)(Q, M, U.double()), TypeError, "u must have dtype torch.float32, got torch.float64"),
    (lambda lm: Sampler(lm, 4)(Q, M.long(), U), TypeError, "mask must be boolean"),
    (lambda lm: Sampler(lm, 4)(Q, M[:, :2], U), ValueError, "mask must have the shape of queries"),
    (lambda lm: Sampler(lm, 4)(Q.float(), M, U), TypeError, "queries must have an integer dtype"),
])
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words): call(gpt2())
