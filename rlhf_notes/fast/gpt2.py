"""Hidden states of a GPT-2, computed only where they are read; its next tokens from a cache.

The last block computes only the positions whose states are read; sampling has a cache that is
allocated once and, on CUDA, the whole response as one graph. Plain twins: lesson 23 (states) and
lesson 24 (sampling).
"""

__all__ = ['is_plain', 'Block', 'states', 'Fused', 'Decoder', 'products', 'decoder', 'replay',
           'record', 'Recorded']

import warnings
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import embedding, layer_norm, scaled_dot_product_attention

from .. import fast
from .linear import aligned


def is_plain(lm):  # a model of transformers, with or without its head
    "True for a GPT-2 without adapters, hooks, quantised weights, cross-attention or dropout."
    from transformers.models.gpt2 import modeling_gpt2 as gpt2
    if not isinstance(lm, gpt2.GPT2PreTrainedModel) or lm.config.add_cross_attention: return False
    known = (gpt2.GPT2LMHeadModel, gpt2.GPT2Model, gpt2.GPT2Block, gpt2.GPT2Attention, gpt2.GPT2MLP,
             gpt2.Conv1D, nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.ModuleList)
    activations = {getattr(block.mlp, "act", None) for block in lm.base_model.h}
    return not any(_changed(m) or (type(m) not in known and m not in activations)
                   for m in lm.modules())


def _changed(m):
    "True if a module does more than its type says, or something random."
    hooks = m._forward_hooks or m._forward_pre_hooks or vars(m).get("gradient_checkpointing")
    return bool(hooks or "forward" in vars(m) or isinstance(m, nn.Linear) and m.bias is not None
                or isinstance(m, nn.Dropout) and m.training and m.p)


class Block:
    "The weights of one block as they are now, matrices in `dtype`."
    def __init__(self, block, layer, config, dtype):  # GPT2Block; its number, from 0
        def linear(m): return m.bias.to(dtype), m.weight.to(dtype)
        self.norm1, self.norm2, self.act = _norm(block.ln_1), _norm(block.ln_2), block.mlp.act
        self.qkv, self.out = linear(block.attn.c_attn), linear(block.attn.c_proj)
        self.up, self.down = linear(block.mlp.c_fc), linear(block.mlp.c_proj)
        width = config.n_embd // config.n_head
        self.scale = width ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1

    def rest(self, x, y):  # (n, d) each: what comes into the block, and what attention gives
        "x + W_o y + b_o, and the MLP on top of it."
        x = x + torch.addmm(self.out[0], y, self.out[1])
        h = layer_norm(x, *self.norm2).to(self.up[1].dtype)
        h = self.act(torch.addmm(self.up[0], h, self.up[1]))
        return x + torch.addmm(self.down[0], h, self.down[1])


def _norm(m): return m.normalized_shape, m.weight, m.bias, m.eps


def _blocks(trunk, dtype): return [Block(b, i, trunk.config, dtype) for i, b in enumerate(trunk.h)]


def _needed(mask, at):  # (B, T) boolean each
    "Real tokens up to the last that is read, in each row."
    return mask & at.flip(1).cummax(1).values.flip(1)


def states(trunk, tokens, mask, positions, at):
    "Final hidden states (B, T, d), computed only where `at` is True, or NotImplemented."
    if not is_plain(trunk): return NotImplemented
    if trunk.device.type != "cpu": return _unseen(trunk, tokens, mask, positions)
    (B, T), wanted = tokens.shape, at.flatten()
    rows = _needed(mask, at).flatten().nonzero().squeeze(1)
    x = (embedding(tokens.flatten()[rows], trunk.wte.weight)
         + embedding(positions.flatten()[rows], trunk.wpe.weight))
    seen = mask[:, None, None] & mask.new_ones(T, T).tril()
    bias = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)
    blocks = _blocks(trunk, x.dtype)
    for block in blocks:
        qkv = torch.addmm(block.qkv[0], layer_norm(x, *block.norm1), block.qkv[1])
        back = qkv.new_zeros(B * T, qkv.shape[1]).index_copy(0, rows, qkv)
        q, k, v = back.view(B, T, 3, trunk.config.n_head, -1).permute(2, 0, 3, 1, 4)
        y = torch.softmax(q @ k.mT * block.scale + bias, -1) @ v  # (B, heads, T, width)
        y = y.transpose(1, 2).reshape(B * T, -1)
        if block is blocks[-1]:  # nobody reads the others
            x, rows = x[wanted[rows]], wanted.nonzero().squeeze(1)
        x = block.rest(x, y[rows])
    out = layer_norm(x, *_norm(trunk.ln_f))
    return x.new_zeros(B * T, x.shape[1]).index_copy(0, rows, out).view(B, T, -1)


def _takes_masks(trunk):
    return trunk.config._attn_implementation == "sdpa"


def _unseen(trunk, tokens, mask, positions):
    "transformers' pass with a mask (B, 1, T, T), which it does not wait for a GPU to look at."
    if not _takes_masks(trunk): return NotImplemented
    itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    seen = (mask[:, None, None] & torch.ones_like(itself).tril()) | itself
    return trunk(input_ids=tokens, attention_mask=seen, use_cache=False,
                 position_ids=positions).last_hidden_state


class Fused:
    "Keys and values of all blocks, batch first."
    def __init__(self, layers, heads, width, mask, dtype):  # mask (B, S): real tokens to come
        self.mask, zeros = mask, torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        self.bias = zeros.masked_fill(~mask, torch.finfo(dtype).min)
        B, S = mask.shape
        self.keys, self.values = zeros.new_zeros(2, layers, B, heads, S, width)

    def read(self, layer, block, h, last):  # h (Q * B, d), time first; last: of the last block
        "Keep keys and values of a prompt, and let its tokens attend."
        B, heads = self.keys.shape[1:3]
        Q = len(h) // B
        qkv = torch.addmm(block.qkv[0], h, block.qkv[1]).view(Q, B, 3, heads, -1)
        q, k, v = qkv.permute(2, 1, 3, 0, 4)  # (B, heads, Q, width) each
        self.keys[layer, :, :, :Q], self.values[layer, :, :, :Q] = k, v
        itself = torch.eye(Q, dtype=torch.bool, device=h.device)
        seen = (self.mask[:, None, None, :Q] & itself.new_ones(Q, Q).tril()) | itself
        n = 1 if last else Q
        y = scaled_dot_product_attention(q[:, :, -n:], k, v, seen[:, :, -n:], scale=block.scale)
        return y.permute(2, 0, 1, 3).reshape(n * B, -1)

    def step(self, layer, block, h, p):  # h (B, d) of the token at place p
        "Keep key and value of one token, and let it attend to all places up to its own."
        keys, values = self.keys[layer], self.values[layer]
        qkv = torch.addmm(block.qkv[0], h, block.qkv[1]).view(len(h), 3, keys.shape[1], -1)
        q, keys[:, :, p], values[:, :, p] = qkv.unbind(1)
        bias = self.bias[:, None, None, :p + 1]
        y = scaled_dot_product_attention(q.unsqueeze(2), keys[:, :, :p + 1], values[:, :, :p + 1],
                                         bias, scale=block.scale)
        return y.reshape(h.shape)


class Decoder:
    "Hidden state and logits of the newest token of each text, of a plain GPT-2."
    def __init__(self, lm, mask, positions):  # GPT2LMHeadModel; (B, S) of all that will be read
        c, self.trunk, self.dtype = lm.config, lm.transformer, products(lm)
        self.positions, self.place = positions.t(), 0
        self.blocks = _blocks(self.trunk, self.dtype)
        self.V, self.head = c.vocab_size, aligned(lm.lm_head.weight.to(self.dtype)).t()
        self.cache = Fused(c.n_layer, c.n_head, c.n_embd // c.n_head, mask, self.dtype)

    def __call__(self, tokens):  # (B, n), the next of each text; n > 1 at the first call only
        "Read tokens; hidden states (B, d) and logits (B, V)."
        (_, n), p = tokens.shape, self.place
        self.place += n
        with torch.autocast(tokens.device.type, enabled=False):
            x = (embedding(tokens.t(), self.trunk.wte.weight)
                 + embedding(self.positions[p:p + n], self.trunk.wpe.weight)).flatten(0, 1)
            for layer, block in enumerate(self.blocks):
                h, last = layer_norm(x, *block.norm1).to(self.dtype), block is self.blocks[-1]
                if n == 1:
                    y = self.cache.step(layer, block, h, p)
                else:
                    y = self.cache.read(layer, block, h, last)
                x = block.rest(x[-len(y):], y)
            h = layer_norm(x, *_norm(self.trunk.ln_f))
            return h, torch.mm(h.to(self.dtype), self.head)[:, :self.V]


def products(lm):
    "The dtype of a model's matrix products: autocast's, or that of the weights."
    kind, weight = lm.device.type, next(lm.parameters())
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def decoder(lm, mask, positions):  # as `Decoder`
    "A decoder for `sample`; NotImplemented unless this is a plain GPT-2."
    if not hasattr(lm, "lm_head") or not is_plain(lm): return NotImplemented
    return Decoder(lm, mask, positions)


_KEEP = 4  # graphs of one model
_graphs = WeakKeyDictionary()  # model -> {shapes, temperature, weights: graph, outputs, inputs}


def replay(loop, lm, prompts, mask, u, temperature):  # loop(the rest) -> tensors
    "A sampling loop recorded once and then replayed; NotImplemented unless a plain GPT-2 on CUDA."
    if not (u.is_cuda and is_plain(lm)): return NotImplemented
    known, inputs = _graphs.setdefault(lm, {}), (prompts, mask, u)
    key = (prompts.shape, u.shape, temperature, products(lm),
           *(p.data_ptr() for p in lm.parameters()))
    with torch.cuda.device_of(u):
        if key not in known:
            while len(known) >= _KEEP:
                del known[next(iter(known))]
            buffers = [x.clone() for x in inputs]
            known[key] = *record(lambda: loop(lm, *buffers, temperature)), buffers
        graph, outputs, buffers = known[key]
        for buffer, x in zip(buffers, inputs):
            buffer.copy_(x)
        graph.replay()
        return [x.clone() for x in outputs]


def record(call):
    "A CUDA graph of `call()`, and the tensors that each replay writes anew."
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # libraries set themselves up
            call()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, stream=side):
        outputs = call()
    return graph, outputs


class Recorded:
    "A policy's forward pass and its gradient; of a plain GPT-2 on the first GPU they are replayed."
    def __init__(self, policy):  # `Policy`, or what a distributed training makes of it
        self.policy, self.key = policy, None

    def __call__(self, tokens, mask, length, temperature, response_mask):  # as `Policy.forward`'s
        "As `Policy.forward`; the gradient must be taken before the next call."
        inputs, numbers = (tokens, mask, response_mask), (length, temperature)
        lm = getattr(self.policy, "lm", None)
        first = tokens.is_cuda and tokens.get_device() == 0  # PyTorch records on one stream
        usable = fast.is_open() and first and torch.is_grad_enabled() and lm is not None
        if not (usable and is_plain(lm) and _takes_masks(lm)):
            return self.policy(tokens, mask, *numbers, response_mask)
        weights = [*self.policy.parameters()]
        key = tokens.shape, numbers, products(lm), *(w.data_ptr() for w in weights)
        with torch.cuda.device_of(tokens):
            if key != self.key:
                self.replay, self.key = _passes(self.policy, numbers, inputs), key
            found = [x.clone() for x in self.replay(*inputs, *weights)]
            return *found, *[None] * (3 - len(found))  # no value


def _passes(policy, numbers, inputs):
    "Both passes, recorded with memory of their own for the inputs, and with that of the weights."
    names, weights = zip(*policy.named_parameters())
    def forward(tokens, mask, response_mask, *weights):
        call = tokens, mask, *numbers, response_mask
        found = functional_call(policy, dict(zip(names, weights)), call)
        return tuple(x for x in found if x is not None)
    # other leaves: a weight's own adds up its gradient on the stream that saw it first
    leaves = [w.detach().requires_grad_(w.requires_grad) for w in weights]
    dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
    with torch.autocast("cuda", dtype, enabled, cache_enabled=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The AccumulateGrad node")  # of PyTorch's warming up
        buffers = *(x.clone() for x in inputs), *leaves
        return torch.cuda.make_graphed_callables(forward, buffers, allow_unused_input=True)
