"""Options of the reviews: pretraining, a reward model, and what is learned from it.

`ReviewsConfig` is for PPO, GRPO and RLOO, `ReviewsDPOConfig` for DPO, which needs no reward model.
"""

__all__ = ['ReviewsTask', 'ReviewsConfig', 'ReviewsDPOConfig', 'dpo_config']

from typing import Annotated, Literal

from pydantic import Field

from ..hub.config import TaskConfig
from ..language.config import DPOConfig, RLHFConfig
from ..training.options import Count, Only, Positive, Size, Temperature, Whole, config_class


@config_class
class ReviewsTask(TaskConfig):
    "Options of the world of the reviews, whatever is learned in it."
    model: str = ""
    "causal language model for transformers: directory or name on the hub; empty = a new GPT-2"
    preset: Annotated[Literal["tiny", "gpt2-small"], Only("model", "")] = "tiny"
    "size of the new GPT-2: tiny (2 layers of 64), gpt2-small (12 of 768, the 124M architecture)"
    stop_after: Whole = 8
    sft_steps: Whole = 400
    "pretraining: gradient steps; 0 = none"
    sft_batch: Size = 64
    "pretraining: texts in each step"
    sft_learning_rate: Positive = 5e-3
    "pretraining: peak learning rate of AdamW"
    labels: Size = 4096
    "reward model: prompts for which the human picks the best of four responses (R4)"
    human_temperature: Temperature = 0.5
    "reward model: noise of the human's choice"
    eval_every: Count = 10
    "iterations between evaluations of the true score"
    eval_responses: Size = 256
    "responses to held-out prompts in each evaluation"


@config_class
class ReviewsConfig(ReviewsTask, RLHFConfig):
    "Options of pretraining, reward model and RL."
    algo: Literal["ppo", "grpo", "rloo"] = "ppo"
    "ppo (with a value head), grpo, rloo (other responses), dpo (pairs of them)"
    rm_batch: Size = 8
    "reward model: labels in each gradient step"
    rm_epochs: Count = 1
    "reward model: passes over the labels (R4)"
    rm_learning_rate: Positive = 2e-3
    "reward model: peak learning rate of Adam; falls to 0 (G5)"
    norm_samples: Annotated[Size, Field(ge=2)] = 1024
    "reward model: responses of the pretrained model whose rewards are whitened (R3)"


@config_class
class ReviewsDPOConfig(ReviewsTask, DPOConfig):
    "Options of pretraining and DPO."


def dpo_config(config: ReviewsConfig, **changes) -> ReviewsDPOConfig:
    "The options of a training for DPO on the same choices, as far as DPO reads them."
    shared = ReviewsDPOConfig.__dataclass_fields__.keys() & vars(config).keys() - {"algo"}
    return ReviewsDPOConfig(**{name: getattr(config, name) for name in shared} | changes)
