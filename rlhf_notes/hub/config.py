"""Options of a training with a model, prompts and a reward of one's own.

Each adds to those that [its loop](../../nbs/language/21_config.ipynb) reads what its task and its
model read. A model of one's own is trained with PyTorch's Adam, at a rate by its size, and a
response without an end keeps its score.
"""

__all__ = ['TaskConfig', 'OwnConfig', 'OwnDPOConfig', 'OwnRunConfig', 'DROPPED', 'known_options']

from typing import Annotated, Literal

from pydantic import Field

from ..language.config import DPOConfig, RLHFConfig
from ..training.options import Count, Fraction, Only, Positive, Whole, config_class


@config_class
class TaskConfig:
    "Options of prompts and of the responses to them."
    device: str = "auto"
    "auto, cpu, cuda or mps; auto is a GPU if there is one"
    prompt_length: Whole = 0
    "tokens to which prompts are padded on the left (G2); 0 = length of the longest"
    stop_after: Whole = 0
    "first position, from 0, at which a full stop ends a response (P5)"
    top_p: Annotated[Fraction, Field(gt=0)] = 1.0
    "sample from the likeliest tokens with this much probability in all; 1 = from all"
    top_k: Whole = 0
    "sample from so many of the likeliest tokens; 0 = from all"

    def __post_init__(self):
        super().__post_init__()
        if self.stop_after >= self.response_length:
            self.refuse("stop_after", f"be less than response_length = {self.response_length}")


@config_class
class Own(TaskConfig):
    "Options of a model and prompts of one's own."
    lora: Whole = 0
    "rank of the adapter that is trained, by peft, inside of the model that is given; 0 = none"
    long_prompts: Literal["refuse", "filter"] = "refuse"
    "prompts with more tokens than prompt_length: an error (refuse), or left out (filter)"
    learning_rate: Positive | None = None
    adam: Literal["tensorflow", "pytorch"] = "pytorch"
    adam_eps: Positive = 1e-8

    def __post_init__(self):
        super().__post_init__()
        if self.long_prompts == "filter" and not self.prompt_length:
            self.refuse("long_prompts", "be refuse where prompt_length is 0")


@config_class
class OwnConfig(Own, RLHFConfig):
    "Options of `RLHF`."
    algo: Literal["ppo", "grpo", "rloo", "teacher", "hint"] = "grpo"
    overlong: Literal["replace", "subtract", "filter", "soft", "keep"] = "keep"
    prompt_order: Literal["random", "epochs"] = "random"
    "prompts of your own: each drawn at random, or all of them once before any comes again"
    dynamic_sampling: Annotated[bool, Only("algo", "grpo", "rloo")] = False
    "draw groups whose responses all have the same score again, at most twice (DAPO)"


@config_class
class OwnDPOConfig(Own, DPOConfig):
    "Options of `DPO`."
    dynamic_sampling = False


@config_class
class OwnRunConfig(OwnConfig):
    "Options of a run of the command."
    algo: Literal["ppo", "grpo", "rloo"] = "grpo"
    model: str = ""
    "causal language model for transformers: directory or name on the hub"
    eval_every: Count = 10
    "iterations between samples that are kept"


DROPPED = frozenset((  # version 0.1.0 wrote these beside a policy, of no use to it
    "preset sft_steps sft_batch sft_learning_rate labels human_temperature rm_batch rm_epochs "
    "rm_learning_rate norm_samples eval_responses model eval_every").split())


def known_options(config, saved):
    "The options of a config among those that were saved for any training of a language model."
    names = config.__dataclass_fields__
    every = DROPPED.union(names, OwnConfig.__dataclass_fields__, OwnDPOConfig.__dataclass_fields__)
    return {name: x for name, x in saved.items() if name in names or name not in every}
