import copy
import io
import logging
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import given, strategies as st

from language_models import KINDS, WORDS, make, texts, tokenizer
from rlhf_notes.formulas.logprob import entropy_from_logits, selective_log_softmax
from rlhf_notes.language.model import (PRESETS, Policy, Pretraining, RewardModel, _by_hand, answer_states, autocast, best_attention, check_context, check_model, check_weights, context_length, hidden_states, is_plain_gpt2,
                                       lean_head, load_model, make_gpt2, next_token_loss, no_dropout, pad_inside, pad_outside, position_ids, positions_for, to_logits, warm_cosine)
from strategies import SEEDS, random_mask

ATTENTIVE = [k for k in KINDS if k != "Mamba"]


def tiny(**changes): return make_gpt2("tiny", 37, **dict(n_embd=16, n_head=2, n_positions=32) | changes)


def rough(lm, seed=0):
    "With weights large enough to matter."
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in lm.parameters(): p.add_(0.2 * torch.randn(p.shape, generator=g))
    return lm


def saved(lm, path, tok=None):
    lm.save_pretrained(path)
    if tok is not None: tok.save_pretrained(path)
    return str(path)


class Texts:
    "A task of which nothing but the texts is asked: the next word is the last one plus one."
    def __init__(self): self.asked = []
    def train_texts(self, n, seed):
        self.asked.append((n, seed))
        g = torch.Generator().manual_seed(seed)
        tokens = (torch.randint(37, (n, 1), generator=g) + torch.arange(8)) % 37
        mask = torch.arange(8) >= torch.randint(0, 4, (n, 1), generator=g)
        return tokens.where(mask, 37), mask


def config(**changes): return SimpleNamespace(**dict(seed=3, precision="float32", sft_steps=6, sft_batch=16, sft_learning_rate=1e-2) | changes)


@given(B=st.integers(1, 4), T=st.integers(1, 9), seed=SEEDS)
def test_a_position_is_the_number_of_real_tokens_before(B, T, seed):
    mask = random_mask(seed, (B, T))
    positions = position_ids(mask)
    for b in range(B):
        for t in range(T): assert positions[b, t] == sum(mask[b, :t].tolist())
    assert positions.dtype == torch.int64


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_models_own_without_padding(kind):
    "G2, G3: for every row alone and unpadded, whatever stands where the mask is False; in training mode, so P4 too."
    lm = no_dropout(make(kind))
    tokens, mask = texts(1, 6, 9)
    with torch.no_grad():
        logits = to_logits(lm, hidden_states(lm, tokens, mask))
        for row, m, ours in zip(tokens, mask, logits): torch.testing.assert_close(ours[m], lm(input_ids=row[m][None]).logits[0], atol=2e-5, rtol=1e-4)
    check_model(lm)


@pytest.mark.parametrize("kind", ATTENTIVE)
def test_what_is_padding_on_the_right_is_seen_by_nobody(kind):
    lm = no_dropout(make(kind))
    tokens, mask = texts(2, 6, 9, right=True)
    with torch.no_grad():
        h = hidden_states(lm, tokens, mask)
        for row, m, ours in zip(tokens, mask, h): torch.testing.assert_close(ours[m], lm.base_model(input_ids=row[m][None]).last_hidden_state[0], atol=2e-5, rtol=1e-4)


# --- what nobody reads

def hooked(lm):
    "The same weights, computed by transformers."
    lm = copy.deepcopy(lm)
    lm.base_model.register_forward_hook(lambda *args: None)
    return lm


@given(B=st.integers(1, 4), T=st.integers(1, 9), seed=SEEDS, changes=st.sampled_from((dict(), dict(n_layer=1), dict(n_layer=3, scale_attn_by_inverse_layer_idx=True), dict(activation_function="gelu_new"), dict(scale_attn_weights=False))))
def test_states_by_hand_are_those_of_transformers(B, T, seed, changes):
    lm = rough(tiny(**changes), seed)
    theirs = hooked(lm)
    assert _by_hand(lm.transformer) and not _by_hand(theirs.transformer)
    g = torch.Generator().manual_seed(seed)
    tokens, mask, at = torch.randint(37, (B, T), generator=g), random_mask(seed, (B, T)), random_mask(seed + 1, (B, T))
    some, weight = at & mask, torch.randn(B, T, 16, generator=g)
    for wanted in (None, at, torch.zeros_like(at)):
        looked = mask if wanted is None else wanted & mask
        h, expected = hidden_states(lm, tokens.where(mask, 10**9), mask, wanted), hidden_states(theirs, tokens, mask)
        torch.testing.assert_close(h[looked], expected[looked], atol=1e-5, rtol=1e-4)
        grads = [torch.autograd.grad((x * weight)[looked].sum(), list(m.base_model.parameters()), materialize_grads=True, allow_unused=True) for x, m in ((h, lm), (expected, theirs))]
        for a, b in zip(*grads): torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16): a, b = (hidden_states(m, tokens, mask, at)[some] for m in (lm, theirs))
    assert a.dtype == b.dtype
    if some.any(): assert (a - b).abs().mean() < 0.05 * b.abs().mean()


def test_what_nobody_reads_is_not_computed():
    class Counting(torch.nn.Module):
        def __init__(self, rows): super().__init__(); self.rows = rows
        def forward(self, x): self.rows.append(len(x)); return x.relu()
    lm, rows = tiny(n_layer=3), []
    for block in lm.transformer.h: block.mlp.act = Counting(rows)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    hidden_states(lm, tokens, mask); assert rows == [12, 12, 12]; rows.clear()
    at = torch.zeros_like(mask); at[0, 4] = at[1, 1] = at[1, 3] = True; at[1, 7] = True               # of padding nothing is read, whatever is asked
    hidden_states(lm, tokens, mask, at); assert rows == [3 + 4, 3 + 4, 3]; rows.clear()
    counts = torch.tensor([[True, True, False], [True, False, False]])
    Policy(lm)(tokens, mask, 3, counts=counts); assert rows == [4 + 5, 4 + 5, 3]; rows.clear()            # before the tokens that count
    Policy(lm)(tokens, mask, 3); assert rows == [5 + 6, 5 + 6, 3 + 2]; rows.clear()                         # the token before the last is padding there
    RewardModel(lm)(tokens, mask); assert rows == [12, 12, 2]; rows.clear()
    next_token_loss(lm, tokens, mask); assert rows == [10, 10, 10]


def test_what_is_not_plain_is_left_to_transformers():
    lm = tiny()
    assert _by_hand(lm.transformer) and not _by_hand(make("Llama").base_model) and not _by_hand(tiny(attention="sdpa").transformer)
    dropping = make("GPT2")
    assert not _by_hand(dropping.transformer) and _by_hand(dropping.eval().transformer) and _by_hand(no_dropout(dropping.train()).transformer)
    with pytest.warns() if hasattr(lm, "activation_checkpointing_enable") else nullcontext(): lm.gradient_checkpointing_enable()
    assert not _by_hand(lm.transformer)
    lm = tiny(); lm.transformer.h[0].gradient_checkpointing = True; assert not _by_hand(lm.transformer)
    for hook in ("register_forward_hook", "register_forward_pre_hook"):
        called, lm = [], tiny()
        getattr(lm.transformer.h[1].mlp.c_fc, hook)(lambda *args: called.append(1))
        hidden_states(lm, *texts(0, 2, 5)); assert called
    lm = tiny()
    lm.transformer.h[0].ln_1 = torch.nn.Identity(); assert not _by_hand(lm.transformer)
    assert not _by_hand(make("GPT2", add_cross_attention=True).eval().transformer)
    if torch.cuda.is_available(): assert not _by_hand(tiny().cuda().transformer)


@pytest.mark.parametrize("where", ["", "lm_head", "transformer", "transformer.h.1.mlp"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_makes_a_gpt2_no_plain_one(where, kind):
    lm = tiny()
    hook = getattr(lm.get_submodule(where), kind)(lambda *args: None)
    assert not is_plain_gpt2(lm)
    hook.remove()
    assert is_plain_gpt2(lm)


def test_a_bias_makes_a_head_no_plain_one():
    lm = tiny()
    lm.lm_head = torch.nn.Linear(16, 37)
    assert not is_plain_gpt2(lm)
    lm.lm_head = torch.nn.Linear(16, 37, bias=False)
    assert is_plain_gpt2(lm)


@pytest.mark.parametrize("kind", ATTENTIVE)
def test_states_of_an_answer(kind):
    lm = no_dropout(make(kind))
    tokens, mask = texts(5, 6, 9)
    counts = torch.arange(4) < torch.tensor([4, 3, 2, 1, 4, 0])[:, None]
    with torch.no_grad():
        expected = hidden_states(lm, tokens[:, :-1], mask[:, :-1])[:, -4:]
        read = mask[:, 4:-1]
        torch.testing.assert_close(answer_states(lm, tokens, mask, 4)[read], expected[read], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(answer_states(lm, tokens, mask, 4, counts)[read & counts], expected[read & counts], atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"response must be in \[1, 8\], since tokens hold a query before it, got 9"): answer_states(lm, tokens, mask, 9)


def test_padding_has_no_embedding_and_no_gradient():
    lm = tiny()
    tokens, mask = texts(3, 8, 9)
    tokens = tokens.where(~mask | (tokens > 0), 1)
    hidden_states(lm, tokens, mask)[mask].square().sum().backward()
    grad = lm.transformer.wte.weight.grad
    assert grad[0].abs().max() == 0 and grad[tokens[mask].unique()].abs().amax(1).min() > 0


def test_positions_are_told_to_whom_they_can_be_told():
    assert list(positions_for(make("GPT2"), 5)) == ["position_ids"] and positions_for(make("Bloom"), 5) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_no_dropout_is_left(kind):
    lm = make(kind)
    tokens, mask = texts(4, 5, 8)
    assert no_dropout(lm) is lm and lm.training
    with torch.no_grad(): a, b = (hidden_states(lm, tokens, mask)[mask] for _ in range(2))
    assert torch.equal(a, b)
    assert all(value == 0 for name, value in vars(lm.config).items() if ("drop" in name) and isinstance(value, float))


def test_check_model_refuses_what_is_not_as_it_should_be():
    with pytest.raises(ValueError, match="must compute the same logits with and without padding on the left, got 'x', of which they differ by"): check_model(make("GPT2", resid_pdrop=0.5), "x")
    lm = no_dropout(make("GPT2"))
    lm.eval(); check_model(lm); assert not lm.training
    lm.config.logit_scale = 3.0                                                    # what it says of itself is not what it does
    with pytest.raises(ValueError, match="must compute the same logits"): check_model(lm)
    lm = no_dropout(make("GPT2"))
    forward = type(lm.transformer).forward
    class Deaf(type(lm.transformer)):
        def forward(self, *a, position_ids=None, **k): return forward(self, *a, **k)       # hears of no positions
    lm.transformer.__class__ = Deaf
    with pytest.raises(ValueError, match="must compute the same logits"): check_model(lm)
    lm = rough(tiny())
    with torch.no_grad(): lm.transformer.ln_f.weight[0] = math.nan
    with pytest.raises(ValueError, match="must compute the same logits"): check_model(lm)


SEES_AHEAD = dict(vocab_size=37, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=32, sliding_window=32, use_bidirectional_attention=True)


def test_a_model_that_looks_ahead_or_forgets_is_refused(tmp_path):
    "Padding changes nothing for it, and yet it cannot be sampled from word by word."
    words = "model must say the same of a text token by token as of all of it at once, got '.*', of which log-probabilities differ by"
    lm = no_dropout(transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SEES_AHEAD)))
    with pytest.raises(ValueError, match=words): load_model(saved(rough(lm), tmp_path, tokenizer()))
    with torch.random.fork_rng(): lm = no_dropout(transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SEES_AHEAD | dict(use_bidirectional_attention=False))))
    check_model(rough(lm))
    class Forgetful(type(lm.base_model)):
        def forward(self, input_ids, attention_mask=None, **k):
            if k.get("past_key_values") is not None: input_ids = (input_ids + 1) % 37          # with a cache it reads something else
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **k)
    lm.base_model.__class__ = Forgetful
    with pytest.raises(ValueError, match=words): check_model(lm)


def test_looking_at_a_model_draws_nothing_from_a_common_source(tmp_path):
    path = saved(rough(tiny()), tmp_path, tokenizer())
    load_model(path)
    state = torch.get_rng_state()
    check_model(rough(tiny())); load_model(path)
    assert torch.equal(torch.get_rng_state(), state)


def test_transformers_is_silent_while_a_model_is_loaded(tmp_path):
    "Its report of what does not fit takes many lines, and what is wrong is said in one."
    records = []
    class Keep(logging.Handler):
        def emit(self, record): records.append(record.getMessage())
    logger, keep, level = logging.getLogger("transformers"), Keep(), transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_warning(); logger.addHandler(keep)
    try:
        for change, words in ((dict(vocab_size=50), "with others for 1 of them, transformer.wte.weight for one"), (dict(n_layer=3), "without 12 of them")):
            config = saved(tiny(), tmp_path, tokenizer()) and tiny().config
            for name, value in change.items(): setattr(config, name, value)
            config.save_pretrained(tmp_path)
            with pytest.raises(ValueError, match=words): load_model(str(tmp_path))
        assert not records and logger.level == logging.WARNING
    finally: logger.removeHandler(keep); transformers.utils.logging.set_verbosity(level)


def test_weights_that_are_no_numbers_or_nearly_none_are_noticed():
    for bad in (math.nan, math.inf, -math.inf, 1e38):
        weights = [torch.ones(3), torch.tensor([[1.0, bad]])]
        with pytest.raises(FloatingPointError, match="^here: the squares of the weights add up to (nan|inf); the last checkpoint, if there is one, is from before$"): check_weights("here", weights)
    check_weights("here", [torch.full((2, 3), 1e9), torch.zeros(0), torch.ones(2, dtype=torch.bfloat16).float()])


def test_the_last_step_of_pretraining_is_looked_at_too():
    p = Pretraining(config(sft_steps=1, sft_learning_rate=1e38), tiny(), Texts())
    with pytest.raises(FloatingPointError, match="pretraining, step 1: the squares of the weights add up to"): p.iterate()


def test_context():
    lm = tiny(n_positions=12)
    assert context_length(lm) == 12 and context_length(make("Bloom")) is None
    check_context(lm, 12); check_context(make("Bloom"), 10**6)
    lm.config.n_positions = lm.config.max_position_embeddings = -1                 # XLNet's way to say that there is no limit
    assert context_length(lm) is None; check_context(lm, 10**6)
    lm = tiny(n_positions=12)
    tokens, mask = texts(0, 2, 13)
    with pytest.raises(ValueError, match="must fit into the model's context of 12 tokens, got 13"): hidden_states(lm, tokens, mask)
    with pytest.raises(ValueError, match="context of 12"): RewardModel(lm)(tokens, mask)


# --- making and loading

def test_make_gpt2():
    lm = make_gpt2("tiny", 81)
    assert sum(p.numel() for p in lm.parameters()) == 109_376 and lm.config.activation_function == "gelu" and lm.config._attn_implementation == best_attention("cpu") == "eager"
    assert best_attention("cuda") == "sdpa" and context_length(lm) == 64 and lm.lm_head.weight is lm.transformer.wte.weight
    assert make_gpt2("tiny", 37, positions=9).config.n_positions == 9 and tiny(attention="sdpa").config._attn_implementation == "sdpa" and tiny(eos_token_id=5).config.eos_token_id == 5
    assert lm.config.pad_token_id is None and lm.config.resid_pdrop == 0
    from transformers import GPT2Config, GPT2LMHeadModel
    with torch.device("meta"): big = GPT2LMHeadModel(GPT2Config(**PRESETS["gpt2-small"], vocab_size=50257))
    assert sum(p.numel() for p in big.parameters()) == 124_439_808                # that of GPT-2


def test_the_seed_makes_the_weights_and_nothing_else_does():
    torch.manual_seed(7); state = torch.get_rng_state()
    a, b, c = tiny(seed=1), tiny(seed=1), tiny(seed=2)
    heads = [RewardModel(lm, torch.Generator().manual_seed(s)).head.weight for lm, s in ((a, 1), (b, 1), (c, 2))]
    Policy(a)
    assert torch.equal(torch.get_rng_state(), state)
    for x, y, z in zip(a.parameters(), b.parameters(), c.parameters()):
        assert torch.equal(x, y)
        if x.ndim == 2: assert not torch.equal(x, z)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


@pytest.mark.parametrize("kind", KINDS)
def test_any_model_that_was_saved_can_be_loaded(kind, tmp_path):
    lm = no_dropout(make(kind)).eval()
    got, tok = load_model(saved(make(kind), tmp_path, tokenizer()))
    tokens, mask = texts(5, 3, 7)
    with torch.no_grad(): torch.testing.assert_close(hidden_states(got, tokens, mask)[mask], hidden_states(lm, tokens, mask)[mask])
    assert tok.pad_token_id >= 37 and tok.padding_side == "left"
    assert tok(["w1 w2", "w3"], padding=True)["input_ids"] == [[1, 2], [tok.pad_token_id, 3]]         # to a Qwen2 AutoTokenizer gives a tokenizer of its own kind
    assert next(got.parameters()).dtype == torch.float32
    ours = rough(tiny()); saved(ours, tmp_path / "own", tok)                        # what is saved with this tokenizer can be loaded again, with the same numbers
    assert load_model(str(tmp_path / "own"))[1].pad_token_id == tok.pad_token_id


@pytest.mark.parametrize("words, pad, expected", [(37, None, 37), (37, "w0", 37), (37, "mine", 37), (30, None, 37), (30, "w3", 37), (30, "mine", 37)])
def test_the_padding_token_is_outside_of_the_vocabulary(words, pad, expected):
    tok = pad_outside(tokenizer(WORDS[:words], pad), 37)
    assert tok.pad_token_id == expected and tok("w1 w29")["input_ids"] == [1, 29]
    assert (tok.pad_token == "mine") == (pad == "mine" and words == 37)


@pytest.mark.parametrize("words, pad, expected", [(37, None, "w0"), (37, "w3", "w3"), (37, "mine", "w0"), (30, None, "w0"), (30, "mine", "mine")])
def test_the_padding_token_is_inside_for_others(words, pad, expected, tmp_path):
    tok = pad_outside(tokenizer(WORDS[:words], pad), 37)
    before = tok.get_vocab(), tok.pad_token, tok.pad_token_id
    pad_inside(tok, 37).save_pretrained(tmp_path)
    assert (tok.get_vocab(), tok.pad_token, tok.pad_token_id) == before and tok.pad_token_id == 37
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert saved.pad_token == expected and saved.padding_side == "left" and max(saved.get_vocab().values()) == 36
    assert saved(["w1 w2", "w3"], padding=True)["input_ids"] == [[1, 2], [saved.pad_token_id, 3]]
    assert pad_outside(saved, 37).pad_token_id == 37


def test_a_tokenizer_from_which_no_token_can_be_taken_can_be_used_again():
    tok = tokenizer(pad="mine")
    tok.pad_token = "w0"                                                            # "mine" stays, numbered 37
    assert pad_outside(tok, 37).pad_token_id >= 37


class Stubborn:
    "A tokenizer to which nothing can be added."
    pad_token = pad_token_id = None
    all_special_tokens = []
    def get_vocab(self): return {"a": 0, "b": 1}
    def add_tokens(self, words): return 0
    add_special_tokens = add_tokens


@pytest.mark.parametrize("call, words", [
    (lambda d: load_model(str(d / "nothing")), "model must be a directory or a name on the hub .* got '.*nothing'"),
    (lambda d: load_model("no-such-org/no-such-model"), "model must be a directory or a name on the hub .* got 'no-such-org/no-such-model'"),
    (lambda d: load_model(""), "got ''"),
    (lambda d: load_model(saved(tiny(), d)), "model must have a tokenizer with a vocabulary|with a tokenizer that transformers can load"),
    (lambda d: load_model(saved(tiny(), d, tokenizer()), attention="nonsense"), "nonsense"),
    (lambda d: load_model(saved(tiny(), d, tokenizer([f"w{i}" for i in range(50)]))), "must have a tokenizer of its own, got one that numbers words up to 49 for a model that knows 37"),
    (lambda d: ((d / "config.json").write_text("{"), load_model(str(d))), "config.json"),
    (lambda d: ((d / "config.json").write_text('{"model_type": "nonsense"}'), load_model(str(d))), "nonsense"),
    (lambda d: (tiny().config.save_pretrained(d), tokenizer().save_pretrained(d), load_model(str(d))), "no file named"),
    (lambda d: (saved(tiny(), d, tokenizer()), tiny(n_layer=3).config.save_pretrained(d), load_model(str(d))), r"must come with all its weights, got '.*' without 12 of them, transformer.h.2"),
    (lambda d: load_model(saved(make("Gemma2", num_key_value_heads=4), d, tokenizer())), "must be one that can be run on tokens and a mask, got '.*': "),
    (lambda d: load_model(saved(tiny(), d, tokenizer()) + "/config.json"), "^model must be a directory or a name on the hub, got the file '.*config.json'$"),
    (lambda d: load_model(saved(tiny(n_positions=6), d, tokenizer())), "^model must be one that can be run on tokens and a mask, got '.*': "),             # a ValueError of someone else
    (lambda d: pad_outside(Stubborn(), 2), "must have a tokenizer that can be given a padding token, got Stubborn"),
    (lambda d: make_gpt2("huge", 37), "preset must be one of 'tiny', 'gpt2-small', got 'huge'"),
    (lambda d: make_gpt2("tiny", 0), "vocab_size must be in"),
])
def test_what_cannot_be_loaded_is_refused_in_one_line(call, words, tmp_path):
    with pytest.raises(ValueError, match=words) as e: call(tmp_path)
    assert "\n" not in str(e.value)


# --- policy

def test_policy_says_before_each_token_what_the_model_says():
    lm = rough(tiny())
    policy = Policy(lm)
    query, mask = texts(6, 5, 6)
    tokens, mask = torch.cat([query, torch.randint(37, (5, 4), generator=torch.Generator().manual_seed(0))], 1), torch.cat([mask, torch.ones(5, 4, dtype=torch.bool)], 1)
    logits, values = policy(tokens, mask, 4)
    assert logits.shape == (5, 4, 37) and values.shape == (5, 4) and (values == 0).all()                        # P2
    for row, m, ours in zip(tokens, mask, logits): torch.testing.assert_close(ours, lm(input_ids=row[m][None]).logits[0, -5:-1], atol=1e-5, rtol=1e-5)
    with torch.no_grad(): policy.value_head.weight.normal_(generator=torch.Generator().manual_seed(0)); policy.value_head.bias.fill_(2.0)
    values = policy(tokens, mask, 4)[1]
    by_hand = torch.nn.functional.linear(hidden_states(lm, tokens, mask), policy.value_head.weight, policy.value_head.bias)[:, -5:-1, 0]
    torch.testing.assert_close(values, by_hand); torch.testing.assert_close(policy.value(hidden_states(lm, tokens, mask)[:, -5:-1]), values)
    other = tokens.clone(); other[:, -3] = (other[:, -3] + 1) % 37                 # a later token changes what comes after it, and nothing before
    changed = policy(other, mask, 4)[1] != values
    assert not changed[:, :2].any() and changed[:, 2:].all()
    first = mask.long().argmax(1)
    other = tokens.clone(); other[torch.arange(5), first] = (other[torch.arange(5), first] + 1) % 37           # G1: the query is read too
    assert (policy(other, mask, 4)[1] != values).all()
    for response in (0, -1, 10, 11):
        with pytest.raises(ValueError, match=r"response must be in \[1, 9\]"): policy(tokens, mask, response)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_fit_any_model_and_learn(kind):
    tokens, mask = texts(7, 4, 8)
    mask[:, -4:] = True; tokens = tokens.where(mask, 0) % 37
    policy, judge = Policy(no_dropout(make(kind))), RewardModel(no_dropout(make(kind)), torch.Generator().manual_seed(0))
    logits, values = policy(tokens, mask, 3)
    (selective_log_softmax(logits, tokens[:, -3:]).sum() + (values - 1).square().sum() + judge(tokens, mask).sum()).backward()
    assert logits.shape == (4, 3, 37) and policy.value_head.weight.grad.abs().max() > 0 and judge.head.weight.grad.abs().max() > 0
    assert sum(p.grad is not None and p.grad.abs().max() > 0 for p in policy.lm.parameters()) >= 4


@pytest.mark.parametrize("kind", KINDS)
def test_answers_without_logits(kind, monkeypatch):
    tokens, mask = texts(7, 4, 8)
    mask[:, -4:] = True; tokens = tokens.where(mask, 0) % 37
    policy, answers = Policy(no_dropout(make(kind))), tokens[:, -3:]
    logits, values = policy(tokens, mask, 3)
    assert not lean_head(policy.lm, answers.numel())                                # too few to be worth it
    monkeypatch.setattr("rlhf_notes.language.model.LEAN", 0)
    if not lean_head(policy.lm, answers.numel()): return                            # this kind does something to its logits
    (logp, entropy), same = policy(tokens, mask, 3, answers, 0.7)
    torch.testing.assert_close(logp, selective_log_softmax(logits, answers, 0.7)); torch.testing.assert_close(entropy, entropy_from_logits(logits, 0.7))
    assert torch.equal(values, same) and logp.requires_grad and not entropy.requires_grad


def test_a_head_that_is_more_than_a_matrix_is_left_alone(monkeypatch):
    monkeypatch.setattr("rlhf_notes.language.model.LEAN", 0)
    lm = make("GPT2")
    assert lean_head(lm, 1)
    lm.config.final_logit_softcapping = 30.0
    assert not lean_head(lm, 1)
    lm = make("GPT2")
    hook = lm.lm_head.register_forward_hook(lambda *_: None)
    assert not lean_head(lm, 1)
    hook.remove()
    assert lean_head(lm, 1)


# --- reward model

def test_the_last_real_token_gives_the_score():
    "R1, G1, under padding on both sides."
    lm = rough(tiny())
    judge = RewardModel(lm, torch.Generator().manual_seed(0))
    assert judge.trunk is lm.transformer
    tokens, mask = texts(8, 12, 9, right=True)
    scores = judge(tokens, mask)
    for row, m, score in zip(tokens, mask, scores): torch.testing.assert_close(score, judge.head(lm.transformer(input_ids=row[m][None]).last_hidden_state[0, -1])[0], atol=1e-5, rtol=1e-5)
    assert len(scores.unique()) == 12 and scores.shape == (12,)
    other = tokens.clone(); first = mask.long().argmax(1)
    other[torch.arange(12), first] = (other[torch.arange(12), first] + 1) % 37
    assert (judge(other, mask) != scores).all()


def test_the_reward_head_starts_as_it_should():
    heads = [RewardModel(tiny(n_embd=64, n_layer=1), torch.Generator().manual_seed(s)).head for s in range(40)]
    w = torch.cat([h.weight.detach().flatten() for h in heads])
    assert abs(w.std() * math.sqrt(65) - 1) < 4 / math.sqrt(2 * len(w)) and abs(w.mean()) < 4 / math.sqrt(65 * len(w))                  # R2
    assert all((h.bias == 0).all() for h in heads)
    exact = RewardModel(tiny(), torch.Generator().manual_seed(5)).head.weight[0]
    torch.testing.assert_close(exact.detach(), torch.randn(1, 16, generator=torch.Generator().manual_seed(5))[0] / 17**0.5)


def test_heads_stay_in_float32_under_autocast():
    lm = rough(tiny())
    policy, judge = Policy(lm), RewardModel(lm, torch.Generator().manual_seed(0))
    with torch.no_grad(): policy.value_head.weight.fill_(1.0)
    tokens, mask = texts(9, 6, 8)
    with torch.no_grad():
        exact_logits, exact_values = policy(tokens, mask, 4)
        exact = judge(tokens, mask)
        with autocast("cpu", "bfloat16"):
            logits, values = policy(tokens, mask, 4)
            scores = judge(tokens, mask)
        with autocast("cpu", "float32"): assert torch.equal(judge(tokens, mask), exact)
    assert logits.dtype == torch.bfloat16 and values.dtype == scores.dtype == torch.float32
    assert (scores != scores.bfloat16().float()).any() and not torch.equal(scores, exact)
    torch.testing.assert_close(scores, exact, atol=0.1, rtol=0.1)
    with pytest.raises(ValueError, match="precision must be one of 'float32', 'bfloat16', got 'half'"): autocast("cpu", "half")


# --- pretraining

def test_next_token_loss_is_that_of_transformers():
    lm = rough(tiny())
    tokens, mask = texts(10, 6, 9)
    lengths, each = [], []
    for row, m in zip(tokens, mask):
        if m.sum() > 1: each.append(lm(input_ids=row[m][None], labels=row[m][None]).loss); lengths.append(int(m.sum()) - 1)
    expected = sum(l * n for l, n in zip(each, lengths)) / sum(lengths)
    torch.testing.assert_close(next_token_loss(lm, tokens, mask), expected)


@given(steps=st.integers(1, 500))
def test_the_learning_rate_rises_and_falls(steps):
    rates = [warm_cosine(i, steps) for i in range(steps)]
    assert all(0 < r <= 1 for r in rates) and max(rates) > 0.49
    up = math.ceil(0.075 * steps)
    assert all(a < b for a, b in zip(rates[:up - 1], rates[1:up - 1])) and all(a > b for a, b in zip(rates[up:], rates[up + 1:]))
    assert warm_cosine(0, 400) == pytest.approx(1 / 30) and warm_cosine(200, 400) == pytest.approx(0.5) and warm_cosine(400, 400) == pytest.approx(0)


def test_pretraining_learns():
    task = Texts()
    p = Pretraining(config(sft_steps=60, sft_batch=32), tiny(), task)
    rows = [p.iterate() for _ in range(p.iterations)]
    assert rows[0]["loss"] == pytest.approx(math.log(37), abs=0.15) and rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert [r["step"] for r in rows] == list(range(1, 61)) and rows[29]["learning_rate"] == pytest.approx(1e-2 * warm_cosine(29, 60)) and all(r["grad_norm"] > 0 for r in rows)
    assert task.asked == [(60 * 32, 3)]
    Pretraining(config(sft_steps=1000, sft_batch=100), tiny(), task); assert task.asked[-1] == (8192, 3)


def test_pretraining_goes_on_to_the_last_bit():
    def fresh(): return Pretraining(config(), tiny(), Texts())
    torch.manual_seed(1); state = torch.get_rng_state()
    whole, first = fresh(), fresh()
    rows = [whole.iterate() for _ in range(6)]
    assert [first.iterate() for _ in range(3)] == rows[:3]
    file = io.BytesIO(); torch.save(first.state_dict(), file); file.seek(0)
    second = Pretraining(config(), tiny(seed=9), Texts())
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.iteration == 3 and [second.iterate() for _ in range(3)] == rows[3:]
    for a, b in zip(whole.lm.parameters(), second.lm.parameters()): assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), state)
    other = Pretraining(config(seed=4), tiny(), Texts())
    assert other.iterate() != rows[0]


def test_pretraining_takes_other_batches_each_time():
    p = Pretraining(config(sft_learning_rate=1e-12), tiny(), Texts())
    assert len({p.iterate()["loss"] for _ in range(6)}) == 6


def test_pretraining_at_the_edges():
    nothing = Pretraining(config(sft_steps=0), tiny(), None)
    assert nothing.iterations == nothing.iteration == 0
    p = Pretraining(config(precision="bfloat16"), tiny(), Texts())
    exact = Pretraining(config(), tiny(), Texts())
    a, b = p.iterate()["loss"], exact.iterate()["loss"]
    assert a != b and a == pytest.approx(b, abs=0.05) and next(p.lm.parameters()).dtype == torch.float32
    with torch.no_grad(): p.lm.transformer.ln_f.bias[0] = math.nan
    before = copy.deepcopy([x.detach() for x in p.lm.parameters()])
    with pytest.raises(FloatingPointError, match="pretraining, step 2: the loss is nan"): p.iterate()
    assert all(torch.equal(a[a == a], b[b == b]) for a, b in zip(before, p.lm.parameters())) and p.iteration == 1
    with pytest.raises(ValueError, match="context of 7 tokens, got 8"): Pretraining(config(), tiny(n_positions=7), Texts())


def test_large_gradients_are_shortened():
    lm = tiny()
    p = Pretraining(config(), lm, Texts())
    with torch.no_grad(): lm.transformer.ln_f.weight.mul_(300)
    norm = p.iterate()["grad_norm"]
    assert norm > 2 and torch.stack([x.grad.norm() for x in lm.parameters()]).norm() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("call, error, words", [
    (lambda: position_ids(torch.ones(2, 3)), TypeError, "mask must be boolean"),
    (lambda: hidden_states(tiny(), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)), TypeError, "tokens must have an integer dtype"),
    (lambda: hidden_states(tiny(), torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3)), TypeError, "mask must be boolean"),
    (lambda: hidden_states(tiny(), torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 4, dtype=torch.bool)), ValueError, "mask must have the shape of tokens"),
    (lambda: hidden_states(tiny(), torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3)), TypeError, "at must be boolean"),
    (lambda: hidden_states(tiny(), torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 1, dtype=torch.bool)), ValueError, "at must have the shape of tokens"),
])
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words): call()
