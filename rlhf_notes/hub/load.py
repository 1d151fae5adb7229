"""Load a language model and its tokenizer, and check what the trainer relies on.

```python
rlhf = RLHF("HuggingFaceTB/SmolLM2-135M-Instruct", prompts=prompts, reward=reward,
            lora=8, learning_rate=1e-3).learn()
rlhf.save("mine", merge=True)  # AutoModelForCausalLM.from_pretrained("mine")
```

The model is a directory, a name on the hub (`--model`) or, with its tokenizer, a module. What
cannot be used is refused: missing weights, another model's tokenizer, nothing to train. Dropout is
removed, and weights to train become float32: at a learning rate of 1e-6, bfloat16 rounds 99 of 100
updates away.

**LoRA** ([Hu et al. 2021](https://arxiv.org/abs/2106.09685), eq. 3) freezes a matrix W and learns a
product of two thin ones beside it, W x + (alpha / r) B A x, here with alpha = 2 r and for every
matrix of the body: for one of 64 by 64 and r = 4, 512 numbers in place of 4,096. B begins with
zeros, so the model begins as it was. A model that is given itself has the adapter in its layers
from then on, as after `peft.get_peft_model`. `RLHF(..., lora=8)` and `--lora 8` do this, at
[a rate of its own](../../nbs/hub/recipes.ipynb#which-learning-rate); `peft.get_peft_model` has
other settings. A model with an adapter (`pip install rlhf_notes[peft]`) trains and saves that
alone, and [the reference](../../nbs/language/23_model.ipynb#the-reference) is the model with the
adapter that it began with. A model with frozen parts trains the others.

**Padding** gets a number outside of the vocabulary (detail G2). Some models have more tokens than
their tokenizer; those get names, so that padding comes after everything the model can write. A chat
model ends a turn and a text with different tokens; its generation config lists them.

**Five things must give the same numbers**: a text read twice, the head on the last hidden state,
the text in a padded batch, the text token by token from a cache, and blocks that gradient
checkpointing computes again. Dropout, a scale of the logits that `to_logits` does not know, padding
counted among the positions and a look ahead are found here; the message says which differs.

**Gradient checkpointing** works: call `lm.gradient_checkpointing_enable()` before
`RLHF(lm, tokenizer, ...)`. The update computes each block again, for
[less memory](../../nbs/hub/recipes.ipynb), in eval mode as in sampling: the noise that some routers
add in train mode (Mixtral, PhiMoE) stays off.

**A reward model** of transformers is a classifier with one label and a tokenizer of its own. It
reads the score off the last token that is not padding, and knows padding by its number. A model
without a padding token would be given the token that ends a text as one, and be read too early:
here the mask says where a text ends. What the policy wrote is passed on as tokens where the two
have the same, and as text otherwise.

| elsewhere | here |
|---|---|
| transformers' `from_pretrained` leaves dropout in place, and `train()` switches it on | it is 0 |
| transformers draws missing weights at random and warns | an error |
| many scripts set `trust_remote_code=True`, which runs whatever a repository holds | never set |
"""

__all__ = ['load_model', 'Classifier', 'other_tokens', 'as_text', 'check_tokens',
           'quiet_transformers', 'check_trainable', 'add_lora', 'pad_outside', 'end_tokens',
           'warn_of_turns_without_end', 'check_model']

import copy
import functools
import inspect
import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..checks import check_context
from ..formulas.logprob import selective_log_softmax
from ..language.model import (
    body, checkpointing, has_adapter, hidden_states, no_dropout, to_logits,
)
from ..language.sampling import sample
from ..training.devices import usual_defaults
from ..training.fit import Setting
from ..training.options import text_of
from ..training.runs import check_sums
from ..training.seeds import global_seed


def load_model(model, tokenizer=None, device="cpu", lora=0, seed=0):
    """A causal language model without dropout, and its tokenizer, which pads outside of the
    vocabulary; ValueError tells in one sentence why they cannot be trained. `model` is a directory,
    a name on the hub or a model, which is changed in place; `lora` is the rank of an adapter."""
    lm, name = model, type(model).__name__
    if not isinstance(model, nn.Module | str | Path):
        raise TypeError(f"model must be a model, a directory or a name, got {model!r}")
    if not isinstance(model, nn.Module):
        lm, name = _from_directory(str(model)), str(model)
        tokenizer = tokenizer or name
    if isinstance(tokenizer, (str, Path)):
        option = "model" if tokenizer == name else "tokenizer"
        tokenizer = _load_tokenizer(str(tokenizer), option)
    if tokenizer is None:
        raise ValueError(f"tokenizer must come with a model that is a module, got None for {name}")
    head = getattr(lm, "get_output_embeddings", lambda: None)()
    if not isinstance(getattr(head, "weight", None), torch.Tensor):
        inside = " (give the model inside, its .module)" if hasattr(lm, "module") else ""
        raise ValueError("model must be a causal language model of transformers, whose head is a "
                         f"matrix, got {name!r} with {type(head).__name__}{inside}")
    _read_by_names(lm)
    if any(p.is_meta for p in lm.parameters()):
        raise ValueError(f"model must have weights, got {name!r} on the device meta")
    if any(p.is_inference() for p in lm.parameters()):  # which can have no gradient; copies can
        lm = copy.deepcopy(lm)
    _check_body(lm, name)
    lm = add_lora(lm, lora, seed)
    check_trainable(_in_float32(lm), name)
    tokenizer = pad_outside(tokenizer, len(head.weight))
    no_dropout(lm).eval()
    if not getattr(lm, "is_quantized", False): # whose weights stay where they were loaded
        lm.to(device)
    check_model(lm, name)
    return lm, tokenizer


def _read_by_names(model):
    "A config may ask for tuples, with `return_dict` False."
    for config in (model.config, model.config.get_text_config()):
        config.return_dict = True


def _from_directory(name):
    if os.path.isfile(name):
        raise ValueError(f"model must be a directory or a name on the hub, got the file {name!r}")
    check_sums(name, "model")
    return _with_adapter(name) if _is_adapter(name) else _from_pretrained(name)


def _is_adapter(name): return os.path.isfile(Path(name, "adapter_config.json"))


def _with_adapter(name, what="causal language model", kind="AutoModelForCausalLM", option="model",
                  **options):
    peft = _peft(f"{option} must be without an adapter", name)
    with _told("LoRA adapter", name, option), warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        base = peft.PeftConfig.from_pretrained(name).base_model_name_or_path
        if not base: raise ValueError("its adapter_config.json names no base")
        base = _from_pretrained(base, what, kind, option, **options)
        return peft.PeftModel.from_pretrained(base, name, is_trainable=True)


def _peft(rule, got):
    try:
        import peft
    except ImportError as e:
        raise ValueError(f"{rule} where peft is missing (pip install rlhf_notes[peft] brings it), "
                         f"got {got!r}") from e
    return peft


def _in_float32(lm):
    "Half precision would round small updates away; what is sampled is float32, not double."
    half = [p for p in lm.parameters() if p.requires_grad and p.dtype != torch.float32]
    rounded = {n for n, b in lm.named_buffers() if b.is_floating_point() and b.dtype.itemsize < 4}
    if half and not has_adapter(lm):
        lm.float()
    for p in half:
        p.data = p.data.float()  # of an adapter; its base stays as it is
    if rounded:
        _make_buffers_anew(lm)
    return lm


def _make_buffers_anew(lm):
    "Angles and scales that follow from the config, not as half precision has rounded them."
    from accelerate import init_empty_weights
    lm = lm.get_base_model() if has_adapter(lm) else lm
    with init_empty_weights(include_buffers=False), quiet_transformers():
        exact = dict(type(lm)(copy.deepcopy(lm.config)).named_buffers())
    for name, b in lm.named_buffers():
        if name in exact and b.is_floating_point() and name not in lm.state_dict():
            b.data = exact[name].to(b.device)


def _from_pretrained(name, what="causal language model", kind="AutoModelForCausalLM",
                     option="model", head=(), **options):
    "Load all weights, but for those whose names begin with `head`."
    lm, info = _load(what, kind, name, option, dtype=torch.float32, output_loading_info=True,
                     ignore_mismatched_sizes=True, **options)
    lost = [*sorted(info["missing_keys"]), *(key for key, *_ in sorted(info["mismatched_keys"]))]
    lost = [key for key in lost if not key.startswith(tuple(head))]
    if lost:
        raise ValueError(f"{option} must come with all weights that its config.json asks for, got "
                         f"{name!r} without {len(lost)} of them, {lost[0]} for one")
    return lm


def _load(what, kind, name, option="model", **options):
    import transformers
    with _told(what, name, option):
        return getattr(transformers, kind).from_pretrained(name, trust_remote_code=False, **options)


def _load_tokenizer(name, option):
    "The kind that was saved: for a Qwen2, AutoTokenizer makes another of a general tokenizer."
    from transformers.models.auto.tokenization_auto import get_tokenizer_config
    with _told("tokenizer", name, option):
        saved = get_tokenizer_config(name).get("tokenizer_class")
    general = saved in ("TokenizersBackend", "PreTrainedTokenizerFast")
    kind = "PreTrainedTokenizerFast" if general else "AutoTokenizer"
    return _load("tokenizer", kind, name, option)


@contextmanager
def _told(what, name, option="model"):
    try:
        with quiet_transformers():
            yield
    except Exception as e:
        raise ValueError(f"{option} must be a directory or a name on the hub with a {what} that "
                         f"transformers can load, got {name!r}: {_in_one_line(e)}") from e


def _in_one_line(e): return shorten(text_of(e), 250) or type(e).__name__


class Classifier:
    "A reward model of transformers: scores whole texts, in batches and without a gradient."
    BATCH = 64

    def __init__(self, model, device="cpu", tokenizer=None):
        "A sequence classifier with one label: its directory, its name, or the model itself."
        name = model.config._name_or_path if isinstance(model, nn.Module) else str(model)
        if not isinstance(model, nn.Module):
            model = _classifier(name).to(device)
        if model.config.num_labels != 1:
            raise ValueError(f"reward must be a model with one label, got {name!r} with "
                             f"{model.config.num_labels}")
        if not (tokenizer or name):
            raise ValueError("reward must come with its tokenizer, Classifier(model, tokenizer=...)"
                             f", where it has no directory, got a {type(model).__name__}")
        self.model, self.tokenizer = model.eval(), tokenizer or _load_tokenizer(name, "reward")
        _read_by_names(model)
        self.pad = model.config.get_text_config().pad_token_id
        if self.pad is None and not hasattr(model, "score"):
            raise ValueError("reward must be a model with a padding token in its config.json, got "
                             f"{name!r} without")

    def encode(self, texts: list) -> tuple:  # tokens (n, T), integer; mask (n, T) int64
        "Texts, chats that end with a response, or lists of tokens, padded on the right."
        ids = texts
        if not (isinstance(texts[0], list) and isinstance(texts[0][0], int)):
            texts, special = as_text(self.tokenizer, texts)
            ids = self.tokenizer(texts, add_special_tokens=special)["input_ids"]
        vocab_size = len(self.model.get_input_embeddings().weight)
        check_tokens(self.tokenizer, ids, vocab_size, "reward")
        length, pad = max(map(len, ids)), self.pad or 0
        check_context(self.model, reward=length)
        tokens = torch.tensor([[*row, *[pad] * (length - len(row))] for row in ids])
        mask = torch.arange(length) < torch.tensor([len(row) for row in ids])[:, None]
        return tokens.to(self.model.device), mask.long().to(self.model.device)

    @usual_defaults("model")
    @torch.no_grad()
    def __call__(self, texts: list) -> torch.Tensor:  # (n,) float32
        "One score for each text, as for `encode`."
        parts = (texts[i:i + self.BATCH] for i in range(0, len(texts), self.BATCH))
        return torch.cat([self.score(*self.encode(part)).cpu() for part in parts])

    def score(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # (n,) float32
        "Scores of texts from `encode`, with their gradient."
        if self.pad is not None:
            return self.model(tokens, attention_mask=mask).logits[:, 0].float()
        hidden = body(self.model)(input_ids=tokens, attention_mask=mask).last_hidden_state
        last = mask.sum(1)[:, None, None] - 1
        return self.model.score(hidden.take_along_dim(last, 1)).flatten().float()

    def read(self, tokenizer, prompts: list, responses: list, tokens: list) -> list:
        "The arguments of `encode`: a policy's prompts, responses, and both together as tokens."
        if not isinstance(prompts[0], str):
            return [[*chat, dict(role="assistant", content=x)]
                    for chat, x in zip(prompts, responses)]
        if not other_tokens(tokenizer, self.tokenizer): return tokens
        return [prompt + x for prompt, x in zip(prompts, responses)]


def _classifier(name):
    "A sequence classifier; an adapter is merged into its base, whose head it brings."
    kind = "sequence classifier", "AutoModelForSequenceClassification", "reward"
    check_sums(name, "reward")
    if not _is_adapter(name): return _from_pretrained(name, *kind)
    lm = _with_adapter(name, *kind, head=("score.", "classifier."), num_labels=1)
    if not {"score", "classifier"} & set(lm.modules_to_save or ()):
        raise ValueError(f"reward must be an adapter that was saved with its head, got {name!r}")
    return lm.merge_and_unload()


@functools.lru_cache(8)
def other_tokens(ours, theirs):
    "A token with another number in theirs, its number in ours, and there; None = they are alike."
    known, pad = theirs.get_vocab(), ours.pad_token_id
    numbers = ((t, i, known.get(t)) for t, i in ours.get_vocab().items() if i != pad)
    return next((found for found in numbers if found[1] != found[2]), None)


def as_text(tokenizer, texts, columns=None, **options):
    """Strings as they are, chats through the tokenizer's template, with `options` of it and those
    in `columns`, a dict for each; and False if their special tokens stand in them already."""
    if not texts: raise ValueError("prompts must not be empty, got none")
    if isinstance(texts[0], str): return texts, True
    if not tokenizer.chat_template:
        raise ValueError("prompts must be strings for a tokenizer without a chat template, got "
                         "chat messages")
    try:
        found = [tokenizer.apply_chat_template(chat, tokenize=False, **options, **_of_template(row))
                 for chat, row in zip(texts, columns or [{}] * len(texts))]
    except Exception as e: # whatever the template does
        raise ValueError("prompts must be chats that the tokenizer's template takes, got "
                         f"{type(e).__name__}: {_in_one_line(e)}") from e
    for chat, text in zip(texts, found):
        if "{'type':" in text and any(isinstance(m["content"], list) for m in chat):
            raise ValueError("prompts must have texts as contents for a template that takes no "
                             f"lists, got {shorten(str(chat), 80)}")
    return found, False


def _of_template(row):
    "The options of a template among columns; a dataset fills up missing ones with None."
    options = {k: x for k, x in (row.get("chat_template_kwargs") or {}).items() if x is not None}
    return dict(tools=row.get("tools")) | options


def check_tokens(tokenizer, ids: list, vocab_size: int, name: str):
    "ValueError, about `name`, unless the model's embedding has a row for each token."
    for row in ids:
        if max(row, default=0) >= vocab_size:
            token = tokenizer.convert_ids_to_tokens(max(row))
            raise ValueError(f"{name} must have tokens among the {vocab_size} of the model, got "
                             f"{token!r}, number {max(row)}")


def quiet_transformers():  # a context manager, for threads that overlap too
    "Inside, transformers and peft draw no progress bars and report nothing but errors."
    return _QUIET.held(True)


@contextmanager
def _errors_alone():
    from huggingface_hub.utils import logging as hub  # tells of every try to reach it
    from transformers.utils import logging
    levels, bars = [x.get_verbosity() for x in (logging, hub)], logging.is_progress_bar_enabled()
    for x in (logging, hub):
        x.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for x, level in zip((logging, hub), levels):
            x.set_verbosity(level)
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()

_inside = []  # the context that is entered, by the first who asks


def _set_quiet(quiet):
    if not quiet:
        _inside.pop().__exit__(None, None, None)
    elif not _inside:
        _inside.append(_errors_alone())
        _inside[0].__enter__()

_QUIET = Setting(lambda: bool(_inside), _set_quiet)


def check_trainable(lm: nn.Module, name: str):
    "ValueError if nothing is trained, half precision, or more than an adapter that is saved holds."
    learned = {n: p.dtype for n, p in lm.named_parameters() if p.requires_grad}
    if not learned:
        raise ValueError(f"model must have weights to train, got {name!r} with all of them frozen "
                         "(lora= trains an adapter" + ", and PeftModel.from_pretrained(..., "
                         "is_trainable=True) one that was saved" * hasattr(lm, "peft_config") + ")")
    made = [n for n, m in lm.named_modules() if is_parametrized(m)
            or isinstance(vars(m).get("weight"), torch.Tensor)]  # a hook's, anew for each call
    if made:
        raise ValueError("model must have weights that are parameters themselves, got "
                         f"{name!r} with {made[0]}, whose weight is made of others (by "
                         "weight_norm, spectral_norm or pruning): remove that first")
    half = next((dtype for dtype in learned.values() if dtype.itemsize < 4), None)
    if half is not None:
        raise ValueError(f"model must train weights in float32, got {name!r} with {half}")
    _refuse_router_loss(lm.config.get_text_config(), name)
    if not hasattr(lm, "peft_config"): return
    if not hasattr(lm, "active_peft_config"):
        raise ValueError("model must be a PeftModel if it has adapters (peft.get_peft_model makes "
                         f"one), got {name!r} with some")
    if [*lm.peft_config] != ["default"]:
        raise ValueError("model must have one adapter, named default, which is what is saved and "
                         f"loaded, got {name!r} with {[*lm.peft_config]}")
    if lm.active_peft_config.is_prompt_learning:
        raise ValueError("model must have an adapter inside of its layers, as LoRA is, got "
                         f"{name!r} with {lm.active_peft_config.peft_type.value}")
    if hasattr(lm.base_model, "update_and_allocate") and getattr(
            lm.active_peft_config, "use_asa", True):
        raise ValueError("model must have an adapter that its gradient alone changes, got "
                         f"{name!r} with {lm.active_peft_config.peft_type.value}, whose ranks "
                         "follow from a call after each step")
    init = str(getattr(lm.active_peft_config, "init_lora_weights", ""))
    if init.startswith(("pissa_niter", "corda")):
        raise ValueError("model must have an adapter whose base is the same when it is loaded "
                         f"again, got {name!r} with init_lora_weights {init!r}, which changes it "
                         "by chance or by data (pissa does so by neither)")
    others = [n for n in learned if lm.active_adapter not in n.split(".")]
    if others:
        raise ValueError("model must train nothing beside its adapter, which alone is saved, got "
                         f"{name!r} with {others[0]}")


def _refuse_router_loss(config, name):
    "transformers adds it to the loss that it computes itself; here it would have no effect."
    coef = next((getattr(config, k) for k in ("router_aux_loss_coef", "aux_loss_coef")
                 if hasattr(config, k)), 0)
    if getattr(config, "output_router_logits", False) and coef:
        raise ValueError("model must have output_router_logits = False in its config, since the "
                         "loss here is without the router's auxiliary loss, got True in "
                         f"{name!r}")


def add_lora(lm: nn.Module, rank: int, seed: int = 0) -> nn.Module:
    "Freeze a model, and put an adapter beside each matrix of its body; with rank 0, nothing."
    if not rank: return lm
    if has_adapter(lm):
        own = getattr(lm.active_peft_config, "r", None)
        if own == rank: return lm
        raise ValueError(f"lora must be 0 for a model with an adapter, whose rank is {own}, got "
                         f"{rank}")
    if hasattr(lm, "peft_config"): return lm  # which `check_trainable` refuses
    peft = _peft("lora must be 0", rank)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear",
                             task_type="CAUSAL_LM")
    with global_seed(seed), quiet_transformers():
        return peft.get_peft_model(lm, config)


def pad_outside(tokenizer, vocab_size: int):
    "A copy that pads with a token outside of the model's vocabulary, on the left (detail G2)."
    tokenizer = copy.deepcopy(getattr(tokenizer, "original", tokenizer))
    numbers = set(tokenizer.get_vocab().values())
    last = max(numbers - set(tokenizer.added_tokens_decoder), default=-1)
    if not 0 <= last < vocab_size:
        raise ValueError("model must have a tokenizer of its own, got one with tokens up to "
                         f"{last} for a model with {vocab_size} tokens")
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id < vocab_size: # G2
        tokenizer.original = copy.deepcopy(tokenizer) # for `save_model`
        unused = range(max(numbers) + 1, vocab_size)
        tokenizer.add_tokens([f"<|unused {i}|>" for i in unused])
        tokenizer.add_special_tokens({"pad_token": "<|padding|>"})
    return tokenizer


def end_tokens(tokenizer, lm=None) -> list:
    "Tokens that end a response, of the tokenizer and the generation config; perhaps none."
    config = getattr(lm, "generation_config", None)
    found = []
    for ids in (tokenizer.eos_token_id, getattr(config, "eos_token_id", None)):
        found += ids if isinstance(ids, list) else [ids]
    if wrong := [x for x in found if not isinstance(x, int | None)]:
        raise ValueError("model must have whole numbers as generation_config.eos_token_id, got "
                         f"{wrong[0]!r}")
    return sorted(set(found) - {None})


def warn_of_turns_without_end(tokenizer, stop: list):
    "Warn if the chat template ends a turn with a token that does not end a response."
    turn = [dict(role="user", content="a"), dict(role="assistant", content="@turn@")]
    (text,), _ = as_text(tokenizer, [turn])
    after = tokenizer(text.rpartition("@turn@")[2].strip(), add_special_tokens=False)["input_ids"]
    if after and after[0] in tokenizer.added_tokens_decoder and after[0] not in stop:
        token = tokenizer.convert_ids_to_tokens(after[0])
        warnings.warn(f"the tokenizer's chat template ends a turn with {token!r}, which ends no "
                      "response: name it in the model's generation_config.eos_token_id",
                      stacklevel=4)


@torch.no_grad()
def check_model(lm: nn.Module, name: str = "this one"):
    "ValueError unless padding and a cache leave the model's log-probabilities as they are."
    try:
        errors = _largest_errors(lm)
    except Exception as e:
        raise ValueError(f"model must be a decoder with a cache of what it has read, got {name!r}: "
                         f"{_in_one_line(e)}") from e
    for what, error in errors.items():
        if not error <= 0.02: # or NaN
            raise ValueError(f"model must give the same logits {what}, got {name!r}, whose differ "
                             f"by {error:.1%}")


def _largest_errors(lm):
    "Differences that should be 0, by cause, as a share of a logit."
    V, device = len(lm.get_output_embeddings().weight), next(lm.parameters()).device
    tokens = torch.randint(V, (3, 5), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.arange(5, device=device) >= torch.tensor([[2], [0], [1]], device=device)
    samples = sample(lm, tokens, mask, torch.tensor([[0.2, 0.5, 0.8]] * 3, device=device))
    tokens = torch.cat([tokens, samples.tokens], 1)
    mask = torch.cat([mask, torch.ones_like(samples.tokens, dtype=torch.bool)], 1)
    logits, rows = to_logits(lm, hidden_states(lm, tokens, mask)), []
    with checkpointing(lm):
        trained = to_logits(lm, hidden_states(lm, tokens, mask))
    for row, real, padded, learns, logp in zip(tokens, mask, logits, trained, samples.logp):
        row, padded, learns = row[real][None], padded[real], learns[real]
        alone, again = (lm(input_ids=row).logits[0].float() for _ in range(2))
        if not alone.isfinite().all(): raise ValueError("its logits are not all finite")
        head = to_logits(lm, hidden_states(lm, row, torch.ones_like(row, dtype=torch.bool)))[0]
        pairs = {"each time (is there dropout?)": (again, alone),
                 "as its head makes of its last hidden state": (head, alone),
                 "with padding on the left": (padded, alone),
                 "in training, with gradient checkpointing": (learns, padded),
                 "token by token": (logp, selective_log_softmax(alone[-4:-1], row[0, -3:]))}
        size = alone.abs().max()
        rows.append({what: (a - b).abs().max() / size for what, (a, b) in pairs.items()})
    return {what: torch.stack([row[what] for row in rows]).max().item() for what in rows[0]}


def _check_body(lm, name):
    "ValueError for what has no cache of keys and values, and no states before its head."
    if getattr(lm.config, "is_encoder_decoder", False):
        raise ValueError(f"model must be a decoder alone, got {name!r}, which has an encoder (as "
                         "T5)")
    takes = inspect.signature(body(lm).forward).parameters
    if not {"past_key_values", "cache"} & takes.keys():  # so it is called from transformers 5.24 on
        raise ValueError("model must be a decoder with a cache of what it has read, keys and "
                         f"values, got {name!r}, which takes no past_key_values (as Mamba)")
    if body(lm).get_output_embeddings() is not None:
        raise ValueError(f"model must have a body without its head as base_model, got {name!r}, "
                         "whose base_model has the head (as Llama 4)")
