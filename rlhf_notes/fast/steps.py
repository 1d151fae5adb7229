"""The next tokens of Llama, Qwen, Mistral or Gemma: one step is recorded on a GPU and replayed.

A step of a large model waits for its launches: for half a billion parameters and 512 texts the GPU
is done in 6 ms, while Python launches a thousand operations at 5 microseconds each. A CUDA graph
launches all at once, but reads and writes the same memory each time. So keys and values lie in
tensors for all tokens from the beginning, and a step writes them at a place that is itself a
tensor; what lies after that place is hidden by the mask, and is 0.

The prompt is read as it is; the step is recorded at the second token. A window that slides within
the text, another attention than PyTorch's, adapters, dropout and hooks leave a model to
transformers' growing cache. Plain twin: lesson 24. vLLM and SGLang record a graph for each of some
batch sizes; transformers compiles the step of its `StaticCache`, which takes a minute.
"""

__all__ = ['KNOWN', 'make_cache', 'Steps', 'obstacle', 'decoder']

import functools
import logging
from weakref import WeakKeyDictionary

import torch
from torch import nn

from . import gpt2


def make_cache(config, size: int, dtype: torch.dtype):
    "A cache for transformers with an attribute `at`: places (n,) of the tokens that come."
    from transformers import StaticCache

    class Cache(StaticCache):
        def update(self, keys, values, layer_idx, *args, **kwargs):
            new = keys.to(dtype), values.to(dtype)
            if layer_idx not in self.stores:
                self.stores[layer_idx] = [x.new_zeros(*x.shape[:2], size, x.shape[3]) for x in new]
            for store, x in zip(self.stores[layer_idx], new):
                store.index_copy_(2, self.at, x)
            return self.stores[layer_idx]

        def get_seq_length(self, layer_idx=0): return 0  # positions and masks are given

    cache = Cache(config=config, max_cache_len=size)
    cache.stores = {}
    return cache


class Steps:
    "Reads tokens of texts of one size, batch after batch."
    def __init__(self, lm, mask):  # a causal language model; (B, S) of all that will be read
        (B, S), kind = mask.shape, mask.device.type
        self.enabled, self.products = torch.is_autocast_enabled(kind), gpt2.products(lm)
        self.cache, self.graph = make_cache(lm.config, S, self.products), None
        self.token, self.position = mask.new_zeros(2, B, 1, dtype=torch.long)
        self.seen, self.at = mask.new_zeros(B, 1, 1, S), mask.new_zeros(1, dtype=torch.long)

    def start(self, mask, positions):  # (B, S) each
        "The next batch of texts."
        self.mask, self.positions, self.place = mask, positions, 0

    def __call__(self, lm, tokens):  # (B, n), the next of each text
        "Hidden state (B, d) and logits (B, V) of the newest tokens."
        n, p = tokens.shape[1], self.place
        self.place += n
        if p == 0: return self._read_prompt(lm, tokens)
        self.token.copy_(tokens)
        self.position.copy_(self.positions[:, p:p + 1])
        self.seen.copy_(self.mask[:, None, None])
        self.seen[..., p + 1:] = False
        self.at.fill_(p)
        if not tokens.is_cuda: return self._step(lm)
        if self.graph is None:
            self.graph, self.out = gpt2.record(lambda: self._step(lm))
        self.graph.replay()
        return [x.clone() for x in self.out]

    def _read_prompt(self, lm, tokens):
        n, S = tokens.shape[1], self.mask.shape[1]
        itself = torch.eye(S, dtype=torch.bool, device=tokens.device)[:n]
        seen = (self.mask[:, None, None] & torch.ones_like(itself).tril()) | itself
        at = torch.arange(n, device=tokens.device)
        return self._read(lm, tokens, self.positions[:, :n], seen, at)

    def _step(self, lm):
        return self._read(lm, self.token, self.position, self.seen, self.at)

    def _read(self, lm, tokens, positions, seen, at):
        self.cache.at, kind = at, tokens.device.type
        with torch.autocast(kind, self.products, self.enabled, cache_enabled=False):
            hidden = lm.base_model.base_model(
                input_ids=tokens, position_ids=positions, attention_mask=seen, use_cache=True,
                past_key_values=self.cache).last_hidden_state[:, -1]
            return hidden, lm.get_output_embeddings()(hidden)


KNOWN = "llama", "qwen2", "qwen3", "mistral", "gemma"  # SmolLM is a Llama


def obstacle(lm, size):  # a model of transformers; tokens of a text
    "Why no step of this model is recorded; None if there is no reason."
    config = lm.config
    if config.model_type not in KNOWN: return f"a {config.model_type} was not tried"
    if hasattr(lm, "disable_adapter"): return "an adapter can be switched off"
    if not type(lm).__module__.startswith("transformers."): return "its code is not transformers'"
    if (getattr(config, "sliding_window", None) or size) < size: return "its window slides"
    if config._attn_implementation != "sdpa": return "its attention is not PyTorch's"
    for m in lm.modules():
        if m._forward_hooks or m._forward_pre_hooks: return "it has hooks"
        if m.training and getattr(m, "gradient_checkpointing", False): return "it computes again"
        if isinstance(m, nn.Linear) and type(m) is not nn.Linear: return "its weights are special"
    if lm.training and config.attention_dropout: return "its training step is another one"


@functools.cache
def _tell(why):
    logging.getLogger("rlhf_notes").debug("no step is recorded: %s", why)


_steps = WeakKeyDictionary()  # model -> (key, Steps)


def decoder(lm, mask, positions):  # as the plain function's
    "A function that reads tokens, or NotImplemented where nothing is gained."
    found = gpt2.decoder(lm, mask, positions)
    if found is not NotImplemented or not mask.is_cuda: return found
    if why := obstacle(lm, mask.shape[1]):
        _tell(why)
        return NotImplemented
    key = (mask.shape, gpt2.products(lm), torch.is_autocast_enabled(mask.device.type), lm.training,
           *(p.data_ptr() for p in lm.parameters()))
    if lm not in _steps or _steps[lm][0] != key:
        _steps[lm] = key, Steps(lm, mask)
    steps = _steps[lm][1]
    steps.start(mask, positions)
    return functools.partial(steps, lm)
