import copy
import io
import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from language_models import KINDS, count_rows, make, rough, texts, tiny
from strategies import SEEDS, random_mask

from rlhf_notes import fast
from rlhf_notes.checks import check_context
from rlhf_notes.formulas.logprob import entropy_from_logits, selective_log_softmax
from rlhf_notes.hub.load import check_model
from rlhf_notes.language import model
from rlhf_notes.language.model import (
    PRESETS,
    Policy,
    RewardModel,
    autocast,
    hidden_states,
    make_gpt2,
    no_dropout,
    position_ids,
    response_states,
    to_logits,
)
from rlhf_notes.reviews.pretraining import Pretraining, next_token_loss, warm_cosine

class Texts:
    "A task of which nothing but the texts is asked: the next word is the last one plus one."
    def __init__(self): self.asked = []
    def train_texts(self, n, seed):
        self.asked.append((n, seed))
        g = torch.Generator().manual_seed(seed)
        tokens = (torch.randint(37, (n, 1), generator=g) + torch.arange(8)) % 37
        mask = torch.arange(8) >= torch.randint(0, 4, (n, 1), generator=g)
        return tokens.where(mask, 37), mask


def config(**changes):
    return SimpleNamespace(**dict(seed=3, precision="float32", sft_steps=6, sft_batch=16,
                                  sft_learning_rate=1e-2) | changes)


@given(B=st.integers(1, 4), T=st.integers(1, 9), seed=SEEDS)
def test_a_position_is_the_number_of_real_tokens_before(B, T, seed):
    mask = random_mask(seed, (B, T))
    positions = position_ids(mask)
    for b in range(B):
        for t in range(T): assert positions[b, t] == sum(mask[b, :t].tolist())
    assert positions.dtype == torch.int64


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_models_own_without_padding(kind):
    """G2, G3: for every row alone and unpadded, whatever stands where the mask is False; in
    training mode, so P4 too.
    """
    lm = no_dropout(make(kind))
    tokens, mask = texts(1, 6, 9)
    with torch.no_grad():
        logits = to_logits(lm, hidden_states(lm, tokens, mask))
        for row, m, ours in zip(tokens, mask, logits):
            torch.testing.assert_close(
                ours[m], lm(input_ids=row[m][None]).logits[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_padding_on_the_right_is_seen_by_nobody(kind):
    lm = no_dropout(make(kind))
    tokens, mask = texts(2, 6, 9, right=True)
    with torch.no_grad():
        h = hidden_states(lm, tokens, mask)
        for row, m, ours in zip(tokens, mask, h):
            torch.testing.assert_close(
                ours[m], lm.base_model(input_ids=row[m][None]).last_hidden_state[0], atol=2e-5,
                rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_a_response(kind):
    lm = no_dropout(make(kind))
    tokens, mask = texts(5, 6, 9)
    counts = torch.arange(4) < torch.tensor([4, 3, 2, 1, 4, 0])[:, None]
    with torch.no_grad():
        expected = hidden_states(lm, tokens[:, :-1], mask[:, :-1])[:, -4:]
        read = mask[:, 4:-1]
        torch.testing.assert_close(
            response_states(lm, tokens, mask, 4)[read], expected[read], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(response_states(lm, tokens, mask, 4, counts)[read & counts],
                                   expected[read & counts], atol=1e-5, rtol=1e-4)
    with pytest.raises(
        ValueError,
        match=r"length must be in \[1, 8\], since tokens hold a prompt before the response, got 9"):
        response_states(lm, tokens, mask, 9)


def test_padding_has_no_embedding_and_no_gradient():
    lm = tiny()
    tokens, mask = texts(3, 8, 9)
    tokens = tokens.where(~mask | (tokens > 0), 1)
    hidden_states(lm, tokens, mask)[mask].square().sum().backward()
    grad = lm.transformer.wte.weight.grad
    assert grad[0].abs().max() == 0 and grad[tokens[mask].unique()].abs().amax(1).min() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_dropout_is_left(kind):
    lm = make(kind)
    tokens, mask = texts(4, 5, 8)
    assert no_dropout(lm) is lm and lm.training
    with torch.no_grad(): a, b = (hidden_states(lm, tokens, mask)[mask] for _ in range(2))
    assert torch.equal(a, b)
    assert all(value == 0 for name, value in vars(lm.config).items() if ("drop" in name)
               and isinstance(value, float))


def test_context():
    lm = tiny(n_positions=12)
    check_context(lm, tokens=12)
    lm.config.rope_parameters = dict(rope_type="longrope", original_max_position_embeddings=8)
    with pytest.raises(ValueError, match="context of 8 tokens, got 9"): check_context(lm, tokens=9)
    lm.config.rope_parameters = None
    message = "max_new_tokens must fit into the model's context of 12 tokens, got 4 \\+ 9"
    with pytest.raises(ValueError, match=message): check_context(lm, prompts=4, max_new_tokens=9)
    lm = tiny(n_positions=12)
    tokens, mask = texts(0, 2, 13)
    with pytest.raises(ValueError, match="must fit into the model's context of 12 tokens, got 13"):
        hidden_states(lm, tokens, mask)
    with pytest.raises(ValueError, match="context of 12"): RewardModel(lm)(tokens, mask)


def test_gradient_checkpointing_computes_again_and_the_same():
    policy, calls = Policy(no_dropout(make("Llama")).eval()), []
    def gradient():
        policy.zero_grad()
        policy(*texts(0, 2, 7), 3)[0].sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.lm.parameters()])
    plain, lm = gradient(), policy.lm
    getattr(lm, "activation_checkpointing_enable", lm.gradient_checkpointing_enable)()
    for layer in lm.model.layers:
        again = layer._gradient_checkpointing_func
        layer._gradient_checkpointing_func = lambda *a, f=again: calls.append(0) or f(*a)
    torch.testing.assert_close(gradient(), plain)
    assert len(calls) == len(lm.model.layers) and not any(m.training for m in lm.modules())


TRAINED_OTHERWISE = {  # in train mode: noise, clamped weights, blocks within blocks
    "mixtral": dict(num_local_experts=4, router_jitter_noise=0.5),
    "phimoe": dict(num_local_experts=4, router_jitter_noise=0.5, input_jitter_noise=0.5),
    "zamba2": dict(num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "hybrid"],
                   mamba_d_state=8, mamba_ngroups=1, n_mamba_heads=4, mamba_headdim=16,
                   num_mem_blocks=1, chunk_size=8),
    "gemma3n_text": dict(num_hidden_layers=3, hidden_size_per_layer_input=8, laurel_rank=4,
                         vocab_size_per_layer_input=50, num_kv_shared_layers=0, head_dim=8,
                         altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 3),
    "falcon": dict(hidden_dropout=0.3, attention_dropout=0.3),
}


@pytest.mark.parametrize("kind", TRAINED_OTHERWISE)
def test_what_is_computed_again_is_the_same(kind):
    shape = dict(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                 pad_token_id=None, bos_token_id=None, eos_token_id=0)
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**shape | TRAINED_OTHERWISE[kind])
    lm = transformers.AutoModelForCausalLM.from_config(config)
    policy = Policy(no_dropout(lm).eval())
    def gradient():
        policy.zero_grad()
        policy(*texts(0, 2, 7), 3)[0].sum().backward()
        return torch.cat([p.grad.flatten() for p in lm.parameters() if p.grad is not None])
    plain, before = gradient(), [p.clone() for p in lm.parameters()]
    lm.gradient_checkpointing_enable()
    torch.testing.assert_close(gradient(), plain)
    assert all(map(torch.equal, before, lm.parameters()))


def test_noise_in_a_block_that_is_computed_again_is_refused():
    class Noisy(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states, *args, **options):
            noise = 0.5 * self.training * torch.randn_like(hidden_states)
            return super().forward(hidden_states + noise, *args, **options)
    lm = make("Llama")
    lm.model.layers[0].__class__ = Noisy
    check_model(lm.eval())  # sampled and trained without the noise
    lm.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="the same logits in training, with gradient checkp"):
        check_model(lm)


def test_make_gpt2():
    lm = make_gpt2("tiny", 81)
    assert sum(p.numel() for p in lm.parameters()) == 109_376
    assert lm.config.activation_function == "gelu"
    assert lm.config.max_position_embeddings == 64
    assert lm.lm_head.weight is lm.transformer.wte.weight
    assert make_gpt2("tiny", 37, n_positions=9).config.n_positions == 9
    assert tiny(eos_token_id=5).config.eos_token_id == 5
    assert lm.config.pad_token_id is None and lm.config.resid_pdrop == 0
    from transformers import GPT2Config, GPT2LMHeadModel
    with torch.device("meta"):
        big = GPT2LMHeadModel(GPT2Config(**PRESETS["gpt2-small"], vocab_size=50257))
    assert sum(p.numel() for p in big.parameters()) == 124_439_808                # that of GPT-2


def test_the_seed_makes_the_weights_and_nothing_else_does():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    a, b, c = tiny(seed=1), tiny(seed=1), tiny(seed=2)
    heads = [RewardModel(lm, torch.Generator().manual_seed(s)).head.weight
             for lm, s in ((a, 1), (b, 1), (c, 2))]
    Policy(a)
    assert torch.equal(torch.get_rng_state(), state)
    for x, y, z in zip(a.parameters(), b.parameters(), c.parameters()):
        assert torch.equal(x, y)
        if x.ndim == 2: assert not torch.equal(x, z)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_what_nobody_reads_is_not_asked_for():
    lm = tiny(n_layer=3)
    counted = count_rows(lm)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    at = torch.zeros_like(mask)
    at[0, 4] = at[1, 1] = at[1, 3] = at[1, 7] = True  # the last is padding, whatever is asked
    assert counted(lambda: hidden_states(lm, tokens, mask, at)) == [3 + 4, 3 + 4, 3]
    response_mask = torch.tensor([[True, True, False], [True, False, False]])
    assert counted(
        lambda: Policy(lm)(tokens, mask, 3, response_mask=response_mask)) == [4 + 5, 4 + 5, 3]
    assert counted(lambda: RewardModel(lm)(tokens, mask)) == [12, 12, 2]
    assert counted(lambda: next_token_loss(lm, tokens, mask)) == [10, 10, 10]


# --- policy

def test_policy_gives_log_probabilities_entropy_and_values_before_each_token():
    lm = rough(tiny())
    policy = Policy(lm)
    prompt, mask = texts(6, 5, 6)
    response = torch.randint(37, (5, 4), generator=torch.Generator().manual_seed(0))
    tokens, mask = (torch.cat([prompt, response], 1),
                    torch.cat([mask, torch.ones(5, 4, dtype=torch.bool)], 1))
    logp, entropy, values = policy(tokens, mask, 4, 0.7)
    assert logp.shape == entropy.shape == values.shape == (5, 4) and (values == 0).all()  # P2
    assert logp.requires_grad and not entropy.requires_grad
    for i in range(5):
        logits = lm(input_ids=tokens[i][mask[i]][None]).logits[0, -5:-1]
        torch.testing.assert_close(
            logp[i], selective_log_softmax(logits, response[i], 0.7), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            entropy[i], entropy_from_logits(logits, 0.7).detach(), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        policy.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
        policy.value_head.bias.fill_(2.0)
    values, hidden = policy(tokens, mask, 4)[2], hidden_states(lm, tokens, mask)
    by_hand = torch.nn.functional.linear(
        hidden, policy.value_head.weight, policy.value_head.bias)[:, -5:-1, 0]
    torch.testing.assert_close(values, by_hand)
    torch.testing.assert_close(policy.value(hidden[:, -5:-1]), values)
    other = tokens.clone()
    # a later token changes what comes after it, and nothing before
    other[:, -3] = (other[:, -3] + 1) % 37
    changed = policy(other, mask, 4)[2] != values
    assert not changed[:, :2].any() and changed[:, 2:].all()
    first, other = mask.long().argmax(1), tokens.clone()
    other[torch.arange(5), first] = (other[torch.arange(5), first] + 1) % 37                    # G1
    assert (policy(other, mask, 4)[2] != values).all()
    for length in (0, -1, 10, 11):
        with pytest.raises(ValueError, match=r"length must be in \[1, 9\]"):
            policy(tokens, mask, length)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_fit_any_model_and_learn(kind):
    tokens, mask = texts(7, 4, 8)
    mask[:, -4:] = True
    tokens = tokens.where(mask, 0) % 37
    policy = Policy(no_dropout(make(kind)))
    reward_model = RewardModel(no_dropout(make(kind)), torch.Generator().manual_seed(0))
    logp, _, values = policy(tokens, mask, 3)
    (logp.sum() + (values - 1).square().sum() + reward_model(tokens, mask).sum()).backward()
    assert policy.value_head.weight.grad.abs().max() > 0
    assert reward_model.head.weight.grad.abs().max() > 0
    assert sum(p.grad is not None and p.grad.abs().max() > 0 for p in policy.lm.parameters()) >= 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_without_its_logits(kind, monkeypatch):
    tokens, mask = texts(7, 4, 8)
    mask[:, -4:] = True
    tokens = tokens.where(mask, 0) % 37
    policy, calls = Policy(no_dropout(make(kind))), []
    few = policy(tokens, mask, 3, 0.7)
    monkeypatch.setattr(model, "LEAN", 0)
    lean = model.linear_log_probs
    monkeypatch.setattr(
        model, "linear_log_probs", lambda *args, **kw: calls.append(1) or lean(*args, **kw))
    torch.testing.assert_close(policy(tokens, mask, 3, 0.7), few)
    # others do something to their logits
    assert len(calls) == (kind not in ("Cohere", "FalconH1", "Granite", "Gemma2"))


# --- reward model

def test_the_last_real_token_gives_the_score():
    "R1, G1, under padding on both sides."
    lm = rough(tiny())
    reward_model = RewardModel(lm, torch.Generator().manual_seed(0))
    assert reward_model.trunk is lm.transformer
    tokens, mask = texts(8, 12, 9, right=True)
    scores = reward_model(tokens, mask)
    for row, m, score in zip(tokens, mask, scores):
        torch.testing.assert_close(
            score,
            reward_model.head(lm.transformer(input_ids=row[m][None]).last_hidden_state[0, -1])[0],
            atol=1e-5, rtol=1e-5)
    assert len(scores.unique()) == 12 and scores.shape == (12,)
    other = tokens.clone()
    first = mask.long().argmax(1)
    other[torch.arange(12), first] = (other[torch.arange(12), first] + 1) % 37
    assert (reward_model(other, mask) != scores).all()


def test_the_reward_head_starts_as_it_should():
    heads = [RewardModel(tiny(n_embd=64, n_layer=1), torch.Generator().manual_seed(s)).head
             for s in range(40)]
    w = torch.cat([h.weight.detach().flatten() for h in heads])
    # R2
    assert abs(w.std() * math.sqrt(65) - 1) < 4 / math.sqrt(2 * len(w))
    assert abs(w.mean()) < 4 / math.sqrt(65 * len(w))
    assert all((h.bias == 0).all() for h in heads)
    exact = RewardModel(tiny(), torch.Generator().manual_seed(5)).head.weight[0]
    torch.testing.assert_close(
        exact.detach(), torch.randn(1, 16, generator=torch.Generator().manual_seed(5))[0] / 17**0.5)


def test_heads_stay_in_float32_under_autocast():
    lm = rough(tiny())
    policy, reward_model = Policy(lm), RewardModel(lm, torch.Generator().manual_seed(0))
    with torch.no_grad(): policy.value_head.weight.fill_(1.0)
    tokens, mask = texts(9, 6, 8)
    tokens = tokens % 37
    with torch.no_grad():
        exact_logp, _, exact_values = policy(tokens, mask, 4)
        exact = reward_model(tokens, mask)
        with autocast("cpu", "bfloat16"):
            logp, entropy, values = policy(tokens, mask, 4)
            scores = reward_model(tokens, mask)
        with autocast("cpu", "float32"): assert torch.equal(reward_model(tokens, mask), exact)
    assert logp.dtype == entropy.dtype == values.dtype == scores.dtype == torch.float32
    assert not torch.equal(logp, exact_logp)
    assert (scores != scores.bfloat16().float()).any() and not torch.equal(scores, exact)
    torch.testing.assert_close(scores, exact, atol=0.1, rtol=0.1)


# --- pretraining

def test_next_token_loss_is_that_of_transformers():
    lm = rough(tiny())
    tokens, mask = texts(10, 6, 9)
    lengths, each = [], []
    for row, m in zip(tokens, mask):
        if m.sum() > 1:
            each.append(lm(input_ids=row[m][None], labels=row[m][None]).loss)
            lengths.append(int(m.sum()) - 1)
    expected = sum(l * n for l, n in zip(each, lengths)) / sum(lengths)
    torch.testing.assert_close(next_token_loss(lm, tokens, mask), expected)


@given(steps=st.integers(1, 500))
def test_the_learning_rate_rises_and_falls(steps):
    rates = [warm_cosine(i, steps) for i in range(steps)]
    assert all(0 < r <= 1 for r in rates) and max(rates) > 0.49
    up = math.ceil(0.075 * steps)
    assert all(a < b for a, b in zip(rates[:up - 1], rates[1:up - 1]))
    assert all(a > b for a, b in zip(rates[up:], rates[up + 1:]))
    assert warm_cosine(0, 400) == pytest.approx(1 / 30)
    assert warm_cosine(200, 400) == pytest.approx(0.5)
    assert warm_cosine(400, 400) == pytest.approx(0)


def test_pretraining_learns():
    task = Texts()
    p = Pretraining(config(sft_steps=60, sft_batch=32), tiny(), task)
    rows = [p.iterate() for _ in range(p.iterations)]
    assert rows[0]["loss"] == pytest.approx(math.log(37), abs=0.15)
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert [r["step"] for r in rows] == list(range(1, 61))
    assert rows[29]["learning_rate"] == pytest.approx(1e-2 * warm_cosine(29, 60))
    assert all(r["grad_norm"] > 0 for r in rows)
    assert task.asked == [(60 * 32, 3)]
    Pretraining(config(sft_steps=1000, sft_batch=100), tiny(), task)
    assert task.asked[-1] == (8192, 3)


def test_pretraining_goes_on_to_the_last_bit():
    def fresh(): return Pretraining(config(), tiny(), Texts())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    whole, first = fresh(), fresh()
    rows = [whole.iterate() for _ in range(6)]
    assert [first.iterate() for _ in range(3)] == rows[:3]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
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
    assert a != b
    assert a == pytest.approx(b, abs=0.05)
    assert next(p.lm.parameters()).dtype == torch.float32
    with torch.no_grad(): p.lm.transformer.ln_f.bias[0] = math.nan
    before = copy.deepcopy([x.detach() for x in p.lm.parameters()])
    with pytest.raises(FloatingPointError, match="pretraining, step 2: loss is nan"): p.iterate()
    assert all(torch.equal(a[a == a], b[b == b]) for a, b in zip(before, p.lm.parameters()))
    assert p.iteration == 1
    with pytest.raises(ValueError, match="context of 6 tokens, got 7"):
        Pretraining(config(), tiny(n_positions=6), Texts()).iterate()


def test_large_gradients_are_shortened():
    lm = tiny()
    p = Pretraining(config(), lm, Texts())
    with torch.no_grad(): lm.transformer.ln_f.weight.mul_(300)
    norm = p.iterate()["grad_norm"]
    assert norm > 2
    assert torch.stack(
        [x.grad.norm() for x in lm.parameters()]).norm() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("call, error, words", [
    (lambda: position_ids(torch.ones(2, 3)), TypeError, "mask must be boolean"),
    (lambda: hidden_states(tiny(), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)),
     TypeError, "tokens must have an integer dtype"),
    (lambda: hidden_states(tiny(), torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3)),
     TypeError, "mask must be boolean"),
    (lambda: hidden_states(tiny(), torch.zeros(2, 3, dtype=torch.long),
                           torch.ones(2, 4, dtype=torch.bool)), ValueError,
     "mask must have the shape of tokens"),
    (lambda: hidden_states(tiny(), torch.zeros(2, 3, dtype=torch.long),
                           torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3)), TypeError,
     "at must be boolean"),
    (lambda: hidden_states(tiny(), torch.zeros(2, 3, dtype=torch.long),
                           torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 1, dtype=torch.bool)),
     ValueError, "at must have the shape of tokens"),
])
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words): call()
