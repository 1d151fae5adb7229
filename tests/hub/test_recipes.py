"Memory of a training: to the byte where tensors can be counted, else within a tenth."
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhf_notes.fast.adam import Adam
from rlhf_notes.hub.load import add_lora
from rlhf_notes.hub.recipes import training_memory
from rlhf_notes.language.model import Policy, autocast

def make(rank=0, **changes):
    shape = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=3, vocab_size=50,
                 num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    return add_lora(AutoModelForCausalLM.from_config(LlamaConfig(**shape | changes)), rank)


@pytest.mark.parametrize("rank", [0, 8])
def test_what_stays_is_right_to_the_byte(rank):
    lm = make(rank)
    told, adam = training_memory(lm, 3, 2, 20), Adam(lm, 1e-8)
    cache = lm(torch.ones(3, 20, dtype=torch.long), use_cache=True).past_key_values
    assert told["cache"] == sum(x.nbytes for y in cache.layers for x in (y.keys, y.values))
    assert told["weights"] == sum(p.nbytes for p in lm.parameters())
    start = Policy(lm, learn_value=False).lm.start.values() if rank else lm.parameters()
    assert told["reference"] == sum(x.nbytes for x in start)
    assert told["gradient"] == adam.vector.grad.nbytes
    assert told["optimizer"] == adam.m.nbytes + adam.v.nbytes
    kept = sum(told[k] for k in ("weights", "reference", "gradient", "optimizer"))
    assert told["peak"] == kept + max(told["cache"], told["activations"])


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_are_what_autograd_saves(rank, precision):
    lm, found = make(rank, num_hidden_layers=6), {}
    policy = Policy(lm, learn_value=False)

    def pack(x):
        found[x.untyped_storage().data_ptr()] = x
        return x
    tokens, mask = torch.ones(4, 48, dtype=torch.long), torch.ones(4, 48, dtype=torch.bool)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), autocast("cpu", precision):
        policy(tokens, mask, 8)
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    real = sum(x.untyped_storage().nbytes() for at, x in found.items() if at not in own)
    told = training_memory(lm, 4, 4, 47, precision == "bfloat16")["activations"]
    assert abs(told / real - 1) < 0.1


def test_a_batch_of_none_is_refused():
    with pytest.raises(ValueError, match="backward"): training_memory(make(), 4, 0, 20)
