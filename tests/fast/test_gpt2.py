"""GPT-2 by hand against transformers: the same numbers, and never for a model that is something
else.
"""
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import KINDS, count_rows, make, rough, texts, tiny
from strategies import SEEDS, random_mask
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_notes import fast
from rlhf_notes.fast.gpt2 import Decoder, decoder, is_plain, states
from rlhf_notes.language import sampling
from rlhf_notes.language.model import autocast, hidden_states, no_dropout, position_ids
from rlhf_notes.language.sampling import sample

CHANGES = ({}, dict(n_layer=1), dict(n_layer=3, scale_attn_by_inverse_layer_idx=True),
           dict(scale_attn_weights=False),
           dict(activation_function="gelu_new", n_inner=24), dict(tie_word_embeddings=False),
           dict(n_head=1),
           dict(layer_norm_epsilon=0.3))


@given(B=st.integers(1, 4), T=st.integers(1, 9), seed=SEEDS, changes=st.sampled_from(CHANGES))
@settings(max_examples=30)
def test_states_are_those_of_transformers(B, T, seed, changes):
    lm = rough(tiny(**changes), seed)
    g = torch.Generator().manual_seed(seed)
    tokens, mask, at = (torch.randint(37, (B, T), generator=g), random_mask(seed, (B, T)),
                        random_mask(seed + 1, (B, T)))
    weight = torch.randn(B, T, 16, generator=g)
    for wanted in (None, at, torch.zeros_like(at)):
        read, found = mask if wanted is None else wanted & mask, []
        for plain in (False, True):
            with fast.off() if plain else torch.enable_grad():
                h = hidden_states(lm, tokens.where(mask, 10**9), mask, wanted)
            grads = torch.autograd.grad((h * weight)[read].sum(), list(lm.base_model.parameters()),
                                        materialize_grads=True, allow_unused=True)
            found.append((h[read], grads))
        torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-4)
        for a, b in zip(found[0][1], found[1][1]):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_what_nobody_reads_is_not_computed():
    lm = tiny(n_layer=3)
    counted = count_rows(lm)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    assert counted(lambda: hidden_states(lm, tokens, mask)) == [12, 12, 12]
    at = torch.zeros_like(mask)
    at[0, 4] = at[1, 1] = at[1, 3] = at[1, 7] = True  # the last is padding, whatever is asked
    assert counted(lambda: hidden_states(lm, tokens, mask, at)) == [3 + 4, 3 + 4, 3]


def runs_by_hand(lm):
    trunk, mask = lm.base_model, torch.ones(2, 3, dtype=torch.bool)
    return states(trunk, mask.long(), mask, position_ids(mask), mask) is not NotImplemented


def test_what_is_not_plain_is_left_to_transformers():
    assert runs_by_hand(tiny()) and not runs_by_hand(make("Llama"))
    dropping = make("GPT2")
    assert not runs_by_hand(dropping) and runs_by_hand(copy.deepcopy(dropping).eval())
    assert runs_by_hand(no_dropout(dropping.train()))
    lm = tiny()
    lm.transformer.h[0].gradient_checkpointing = True
    assert not runs_by_hand(lm)
    lm = tiny()
    lm.transformer.h[0].ln_1 = torch.nn.Identity()
    assert not runs_by_hand(lm) and not runs_by_hand(make("GPT2", add_cross_attention=True).eval())


@pytest.mark.parametrize("where", ["", "lm_head", "transformer", "transformer.h.1.mlp"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_makes_a_gpt2_no_plain_one(where, kind):
    lm = tiny()
    hook = getattr(lm.get_submodule(where), kind)(lambda *args: None)
    assert not is_plain(lm)
    hook.remove()
    assert is_plain(lm)


def test_a_bias_an_adapter_or_another_kind_is_no_plain_gpt2():
    class Adapter(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.weight, self.bias = layer, layer.weight, layer.bias
        def forward(self, x):
            return self.layer(x) + 0.5 * x.sum(-1, keepdim=True)
    lm = tiny()
    lm.lm_head = torch.nn.Linear(16, 37)
    assert not is_plain(lm)
    lm = tiny()
    lm.transformer.h[1].attn.c_proj = Adapter(lm.transformer.h[1].attn.c_proj)
    assert not is_plain(lm)
    lm = tiny()
    lm.transformer.h[1].mlp = torch.nn.Sequential(lm.transformer.h[1].mlp)
    assert not is_plain(lm)
    lm = tiny()
    mlp = lm.transformer.h[1].mlp
    mlp.forward = lambda x, forward=mlp.forward: 2 * forward(x)
    assert not is_plain(lm)
    assert {kind for kind in KINDS if is_plain(no_dropout(make(kind)))} == {"GPT2"}
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert decoder(lm, mask, position_ids(mask)) is NotImplemented
    assert decoder(tiny().transformer, mask, position_ids(mask)) is NotImplemented
    assert decoder(tiny(), mask, position_ids(mask)) is not NotImplemented


# --- the decoder

@given(B=st.integers(1, 5), Q=st.integers(1, 7), T=st.integers(1, 9), seed=SEEDS,
       changes=st.sampled_from(CHANGES))
@settings(max_examples=40)
def test_the_decoder_gives_the_states_and_logits_of_transformers(B, Q, T, seed, changes):
    lm = rough(tiny(**changes), seed % 1000)
    prompts, mask = texts(seed, B, Q)
    prompts = prompts.masked_fill(~mask, 0)
    seen = torch.cat([mask, mask.new_ones(B, T)], 1)
    new = [prompts, *torch.randint(37, (T, B, 1), generator=torch.Generator().manual_seed(seed))]
    with torch.no_grad():
        theirs = sampling.decoder.__wrapped__(lm, seen, position_ids(seen))
        ours = Decoder(lm, seen, position_ids(seen))
        for tokens in new:
            expected = theirs(tokens)
            torch.testing.assert_close(ours(tokens), expected, atol=1e-4, rtol=1e-4)


def test_every_row_of_attention_has_a_place_to_look_at(monkeypatch):
    "On a GPU PyTorch before 2.5 makes NaN of a row without one."
    from rlhf_notes.fast import gpt2
    masks, attention = [], gpt2.scaled_dot_product_attention
    def watched(q, k, v, mask, **kwargs):
        masks.append(mask)
        return attention(q, k, v, mask, **kwargs)
    monkeypatch.setattr(gpt2, "scaled_dot_product_attention", watched)
    lm, mask = tiny(), torch.tensor([[False, False, True], [True, True, True]])
    decoder = Decoder(lm, mask, position_ids(mask))
    with torch.no_grad():
        decoder(torch.zeros(2, 3, dtype=torch.long))
    assert all(m.any(-1).all() for m in masks) and masks[0].shape == (2, 1, 3, 3)
    assert masks[0][0, 0].tolist() == [
        [True, False, False], [False, True, False], [False, False, True]]


class Watch(TorchDispatchMode):
    "Writes down what is called."
    def __init__(self):
        super().__init__()
        self.names = set()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def test_nothing_is_looked_at_and_no_cache_is_made_longer():
    "What a CUDA graph asks for: no operator whose result goes to the host or decides a shape."
    lm, (prompts, mask) = rough(tiny()), texts(8, 5, 6)
    mask = torch.cat([mask, mask.new_ones(5, 20)], 1)
    decoder = Decoder(lm, mask, position_ids(mask))
    with torch.no_grad(), Watch() as watch:
        decoder(prompts % 37)
        for _ in range(20):
            decoder(torch.zeros(5, 1, dtype=torch.long))
    assert not {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_unique2",
                "masked_select", "cat"} & watch.names


def test_the_weights_are_those_of_now():
    lm, (prompts, mask), u = rough(tiny()), texts(6, 5, 6), torch.rand(5, 7)
    before = sample(lm, prompts, mask, u)
    with torch.no_grad():
        for p in lm.parameters():
            p.mul_(1.5)  # in place, as an optimizer does
    after = sample(lm, prompts, mask, u)
    with fast.off():
        plain = sample(lm, prompts, mask, u)
    torch.testing.assert_close(after.hidden, plain.hidden, atol=1e-4, rtol=1e-4)
    assert not torch.equal(before.hidden, after.hidden)


@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_bfloat16(how):
    lm, (prompts, mask), u = rough(tiny(), scale=0.1), texts(9, 16, 6), torch.rand(16, 8)
    exact = sample(lm, prompts, mask, u)
    if how == "weights":
        lm = lm.bfloat16()
    with autocast("cpu", "bfloat16" if how == "autocast" else "float32"):
        got = sample(lm, prompts, mask, u)
        both, seen = (torch.cat([prompts, got.tokens], 1),
                      torch.cat([mask, torch.ones_like(got.tokens, dtype=torch.bool)], 1))
        hidden = hidden_states(lm, both, seen)[:, 5:-1]
    assert got.logp.dtype == torch.float32 and not torch.equal(got.logp, exact.logp)
    torch.testing.assert_close(got.hidden.float(), hidden.float(), atol=0.1, rtol=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_follows_the_weights_on_every_device():
    for device in range(torch.cuda.device_count()):
        lm = rough(tiny()).to(f"cuda:{device}")
        prompts, mask = (x.to(lm.device) for x in texts(8, 5, 6))
        for factor in (1.0, 1.1):
            with torch.no_grad():
                lm.transformer.ln_f.weight.mul_(factor)
            for _ in range(2):
                u = torch.rand(5, 7).to(lm.device)
                got = sample(lm, prompts, mask, u)
                with fast.off():
                    plain = sample(lm, prompts, mask, u)
                assert torch.equal(got.tokens, plain.tokens)
                torch.testing.assert_close(got.logp, plain.logp, atol=1e-4, rtol=1e-4)
