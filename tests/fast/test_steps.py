"""One step with keys and values of one size gives the tokens of transformers' growing cache."""
import logging

import pytest
import torch
from language_models import texts
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

from rlhf_notes.fast import steps
from rlhf_notes.language.model import no_dropout, position_ids
from rlhf_notes.language.sampling import draw, sample

SHAPE = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             bos_token_id=0, eos_token_id=0, pad_token_id=None)
KINDS = {"llama": LlamaConfig(**SHAPE), "qwen2": Qwen2Config(**SHAPE),
         "qwen3": Qwen3Config(**SHAPE, head_dim=8),
         "mistral": MistralConfig(**SHAPE, sliding_window=20),
         "gemma": GemmaConfig(**SHAPE, head_dim=8)}


def make(config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for p in lm.parameters(): p.add_(0.1 * torch.randn(p.shape))
    return no_dropout(lm).eval()


@torch.no_grad()
def by_steps(run, lm, prompts, mask, u):
    "As `sample`, from one size of cache."
    seen = torch.cat([mask, mask.new_ones(len(u), u.shape[1] - 1)], 1)
    run.start(seen, position_ids(seen))
    new, found = prompts.masked_fill(~mask, 0), []
    for i in range(u.shape[1]):
        hidden, logits = run(lm, new)
        new = draw(logits, 1.0, u[:, i])[:, None]
        found.append((new[:, 0], hidden))
    return [torch.stack(x, 1) for x in zip(*found)]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_states_are_those_of_the_growing_cache(kind):
    lm, (T, Q) = make(KINDS[kind]), (7, 6)
    run = steps.Steps(lm, torch.ones(5, Q + T - 1, dtype=torch.bool))
    assert steps.obstacle(lm, Q + T - 1) is None and lm.config.model_type == kind
    for seed in range(2):  # the second batch finds what the first has left
        (prompts, mask), u = texts(seed, 5, Q), torch.rand(5, T)
        expected = sample(lm, prompts, mask, u)
        tokens, hidden = by_steps(run, lm, prompts, mask, u)
        assert torch.equal(tokens, expected.tokens)
        torch.testing.assert_close(hidden, expected.hidden, atol=1e-5, rtol=1e-4)


def test_what_would_not_be_the_same_is_not_recorded(caplog):
    lm, size = make(KINDS["llama"]), 12
    def why(**changes): return steps.obstacle(make(type(lm.config)(**SHAPE | changes)), size)
    assert steps.obstacle(make(StableLmConfig(**SHAPE)), size) == "a stablelm was not tried"
    assert steps.obstacle(make(KINDS["mistral"]), 20) is None
    assert steps.obstacle(make(KINDS["mistral"]), 21) == "its window slides"
    assert why(attn_implementation="eager") == "its attention is not PyTorch's"
    trained = make(LlamaConfig(**SHAPE))
    trained.config.attention_dropout = 0.1
    assert steps.obstacle(trained, size) is None
    assert steps.obstacle(trained.train(), size) == "its training step is another one"
    lm.disable_adapter = None
    assert steps.obstacle(lm, size) == "an adapter can be switched off"
    del lm.disable_adapter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(lm), "__module__", "transformers_modules.mine")
        assert steps.obstacle(lm, size) == "its code is not transformers'"
    hook = lm.model.layers[0].register_forward_hook(lambda *_: None)
    assert steps.obstacle(lm, size) == "it has hooks"
    hook.remove()
    lm.model.layers[0].mlp.up_proj.__class__ = type("Quantised", (torch.nn.Linear,), {})
    assert steps.obstacle(lm, size) == "its weights are special"
    steps._tell.cache_clear()
    with caplog.at_level(logging.DEBUG, "rlhf_notes"):
        for _ in range(2): steps._tell("its window slides")
    assert caplog.messages == ["no step is recorded: its window slides"]
