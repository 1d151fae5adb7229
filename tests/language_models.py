"""One small, random language model of each kind: positions learnt or rotated; logits plain, scaled
or capped.
"""
import torch
import transformers

from rlhf_notes.language.model import make_gpt2

SHAPE = dict(vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
             max_position_embeddings=32)
SPECIAL = dict(bos_token_id=0, eos_token_id=0, pad_token_id=None)
ROTARY = dict(
    **SHAPE, **SPECIAL, intermediate_size=32, num_key_value_heads=1, attention_dropout=0.2)

KINDS = {
    "GPT2": dict(vocab_size=37, n_embd=16, n_layer=2, n_head=2, n_positions=32, **SPECIAL),
    "GPTNeoX": dict(**SHAPE, **SPECIAL, intermediate_size=32, attention_dropout=0.1,
                    hidden_dropout=0.1),
    "Llama": ROTARY,
    "Qwen2": ROTARY,
    # its last hidden state is narrower than the others
    "OPT": dict(**SHAPE, **SPECIAL, ffn_dim=32, word_embed_proj_dim=8),
    "Gemma2": dict(**ROTARY, head_dim=8, query_pre_attn_scalar=8, sliding_window=4,
                   final_logit_softcapping=2.0),
    "Cohere": dict(**ROTARY, logit_scale=0.25),
    "Granite": dict(**ROTARY, logits_scaling=4.0),
    "Mistral": dict(**ROTARY, sliding_window=4),
    "Phi": ROTARY | dict(num_key_value_heads=2, resid_pdrop=0.1),
    "Falcon": dict(**ROTARY, multi_query=True, hidden_dropout=0.1),
    "Gemma": dict(**ROTARY, head_dim=8),
    # half of it is recurrent
    "FalconH1": dict(**ROTARY, lm_head_multiplier=0.5, mamba_d_ssm=16, mamba_n_heads=2,
                     mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=4),
}
WORDS = [f"w{i}" for i in range(37)]


def make(kind, seed=0, **changes):
    """A model of this kind with weights large enough to matter, in training mode, its dropout in
    place.
    """
    config = getattr(transformers, f"{kind}Config")(**KINDS[kind] | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for p in lm.parameters(): p.add_(0.1 * torch.randn(p.shape))
    return lm.train()


def tokenizer(words=WORDS, pad=None):
    from tokenizers import Tokenizer, models, pre_tokenizers
    t = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=t, eos_token="w0", pad_token=pad)


def texts(seed, B, T, vocab_size=37, right=False):
    """(tokens, mask): padded on the left by any number of tokens but the last, with rubbish where
    the mask is False; with `right`, on the right too.
    """
    g = torch.Generator().manual_seed(seed)
    tokens, place = torch.randint(vocab_size, (B, T), generator=g), torch.arange(T)
    left = torch.randint(0, T, (B, 1), generator=g)
    mask = place >= left
    if right: mask &= place <= left + torch.randint(0, T, (B, 1), generator=g)
    return tokens.where(mask, torch.randint(vocab_size, 10**9, (B, T), generator=g)), mask


def tiny(**changes):
    "A tiny GPT-2 with the vocabulary of the others."
    return make_gpt2("tiny", 37, **dict(n_embd=16, n_head=2, n_positions=32) | changes)


def rough(lm, seed=0, scale=0.2):
    "With weights large enough to matter."
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(scale * torch.randn(p.shape, generator=g))
    return lm


class Counting(torch.nn.Module):
    "An activation that notes how many rows it is given."
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def forward(self, x):
        self.rows.append(len(x))
        return x.relu()


def count_rows(lm):
    "Function of a call: the rows that each block of a GPT-2 computes in it."
    rows = []
    for block in lm.transformer.h:
        block.mlp.act = Counting(rows)

    def counted(f):
        rows.clear()
        f()
        return list(rows)
    return counted
