"""Write a policy or a reward model so that other programs load it, and nothing is lost.

Other programs look the padding up in the model. So the tokenizer is saved as it was, padding with
its own token or else with the end of a text. `generation_config.json` holds the end tokens and the
sampling of the training, and nothing of the base's own sampling. Of a PeftModel the adapter alone
is saved; with `merge=True` the sum, a model like any other. Other files in the directory stay. An
adapter is not saved beside a whole model, its base perhaps, nor a whole model beside an adapter.
Of several processes the first writes, and the others write nothing, as in transformers.

A reward model's padding token gets a row of its own in the embedding. Its score is the raw one;
`config.json` has gain and bias of its norm (lesson 09).
"""

__all__ = ['EARLIER', 'save_model', 'to_classifier', 'save_classifier', 'save_reward_model']

import copy
import os
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten

import torch
from torch import nn

from ..checks import check_value
from ..formulas.reward import RewardNorm
from .load import end_tokens, quiet_transformers
from ..language.model import has_adapter
from ..training.runs import SUMS, disk_errors, write_sums
from ..training.seeds import global_seed


def save_model(path, lm, tokenizer, merge=False, dtype=None, files=None, **generation):
    """Write what AutoModelForCausalLM (of an adapter: AutoPeftModelForCausalLM) loads: with `merge`
    an adapter is added to the weights, `dtype` None = as they are, `files` are name -> text, and
    `generation` is for generation_config.json."""
    from transformers import GenerationConfig
    if not is_first(): return
    own = _known_padding(tokenizer, len(lm.get_output_embeddings().weight))
    check_value("dtype", dtype, (None, "float32", "bfloat16", "float16"))
    if merge and has_adapter(lm):
        lm = _merged(lm, dtype)
    if has_adapter(lm) and not lm.peft_config["default"].base_model_name_or_path:
        warnings.warn("the adapter alone is saved, and its base has no name or directory to be "
                      "found by; merge=True saves both as one", stacklevel=4)
    if dtype and has_adapter(lm):
        raise ValueError(f"dtype must be None for an adapter that is not merged, got {dtype}")
    if dtype:
        lm = copy.deepcopy(lm).to(getattr(torch, dtype))
    sampling = GenerationConfig(
        do_sample=True, top_k=0, eos_token_id=end_tokens(tokenizer, lm) or None,
        bos_token_id=own.bos_token_id, pad_token_id=own.pad_token_id, **generation)
    with _moved_into(path, has_adapter(lm)) as new, quiet_transformers():
        if not has_adapter(lm): # whose directory would be taken for a whole model
            lm = copy.copy(lm) # shares the weights
            lm.config, lm.generation_config = copy.deepcopy(lm.config), sampling
            lm.config.pad_token_id = own.pad_token_id
        for part in (lm, own, sampling):
            part.save_pretrained(new)
        for name, text in (files or {}).items():
            (new / name).write_text(text, encoding="utf-8")


def is_first() -> bool:
    "True in the first of several processes, and in one that is alone."
    group = torch.distributed
    return not (group.is_available() and group.is_initialized()) or group.get_rank() == 0


def _merged(lm, dtype):
    "A copy with the adapter in its weights; with a dtype, added in float32."
    from peft.tuners.tuners_utils import BaseTunerLayer
    ends = lm.get_input_embeddings(), lm.get_output_embeddings()
    tied = getattr(lm.config, "tie_word_embeddings", False)
    if tied and any(isinstance(end, BaseTunerLayer) for end in ends):
        raise ValueError("merge must be False for an adapter on an embedding and head that are "
                         "tied: the sum would change both, got True")
    base = lm.get_input_embeddings().weight.dtype
    if base.itemsize < 4 and not dtype:
        warnings.warn(f"merge rounds the weights to {base}, and with them part of what the adapter "
                      "has learned; dtype=\"float32\" keeps it", stacklevel=4)
    lm = copy.deepcopy(lm)
    return (lm.float() if dtype else lm).merge_and_unload()


def _known_padding(tokenizer, vocab_size):
    "The tokenizer as it was, padding with a token that the model knows."
    own = copy.deepcopy(getattr(tokenizer, "original", tokenizer))
    names = own.pad_token, own.eos_token, own.bos_token, own.unk_token
    known = (t for t in names if t is not None and own.convert_tokens_to_ids(t) < vocab_size)
    own.pad_token = next(known, None)
    own.init_kwargs["padding_side"] = "left" # from there it is saved
    return own


@contextmanager
def _moved_into(path, adapter=False):
    """A new directory whose files move into `path` when all are written; other files there stay.

    Their checksums go first: of a save that is killed between two files, loading says so.
    """
    path = Path(path)
    _check_place(path, adapter)
    is_new = not path.exists()
    for left in path.glob(".*.saving"):  # by one that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".", suffix=".saving", dir=path) as new:
                yield Path(new)
                write_sums(new, without=["README.md"])
                _move(Path(new), path, adapter)
    except BaseException:
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        raise


def _check_place(path, adapter):
    "ValueError if a file that is there would be lost, or read in place of what is saved."
    config, other = path / "config.json", path / "adapter_config.json"
    for refused, rule in (
        (not path.name, "with a name of its own"),
        (path.exists() and not path.is_dir(), "and not a file"),
        (adapter and config.exists(), "without a model, to hold an adapter"),
        (not adapter and other.exists(), "without an adapter, to hold a whole model"),
        (config.exists() and "model_type" not in config.read_text(errors="replace"),
         "without a config.json that is no model's"),
    ):
        if refused: raise ValueError(f"path must be a directory {rule}, got {str(path)!r}")

EARLIER = ("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors",
           "chat_template.jinja")  # of a model saved before: would be read beside the new files


def _move(new, path, adapter):
    os.replace(new / SUMS, path / SUMS)
    files = sorted(p.relative_to(new) for p in new.rglob("*") if p.is_file())
    files.sort(key=lambda file: file.name != "rlhf.json")  # tells first whose directory it is
    for old in () if adapter else (p for name in EARLIER for p in path.glob(name)):
        if old.relative_to(path) not in files:
            old.unlink()
    for file in files:
        (path / file).parent.mkdir(exist_ok=True)
        if file.name != "README.md" or not (path / file).exists():  # peft writes one
            os.replace(new / file, path / file)


def to_classifier(model: nn.Module, tokenizer) -> tuple:
    "A `RewardModel` as transformers has it, without the bias of its head, and its tokenizer."
    from transformers import AutoModelForSequenceClassification
    config, own = copy.deepcopy((model.trunk.config, tokenizer))
    config.num_labels, pad = 1, own.pad_token_id
    # positions count from the left edge there
    own.padding_side = own.init_kwargs["padding_side"] = "right"
    with global_seed(0), quiet_transformers():  # of weights that are replaced
        theirs = AutoModelForSequenceClassification.from_config(config)
        theirs.base_model.load_state_dict(model.trunk.state_dict())
        theirs.resize_token_embeddings(pad + 1, mean_resizing=False)
    theirs.score.weight.data = model.head.weight.detach().cpu()
    theirs.config.pad_token_id = pad
    return theirs, own


def save_classifier(path: Path, model: nn.Module, tokenizer):
    "Write a sequence classifier with its tokenizer; other files in the directory stay."
    if not is_first(): return
    with _moved_into(path) as new, quiet_transformers():
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)


def save_reward_model(path: Path, model: nn.Module, norm: RewardNorm, tokenizer):
    "Write what AutoModelForSequenceClassification loads: one label, the raw score of a text."
    try:
        theirs, own = to_classifier(model, tokenizer)
    except ValueError as e: # transformers has no such class
        warnings.warn(f"no reward model in {path}: {shorten(str(e), 250)}")
        return
    bias = norm(model.head.bias).item()
    theirs.config.update(dict(reward_gain=norm.gain, reward_bias=bias))
    save_classifier(path, theirs, own)
