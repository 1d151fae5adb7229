"""Race our PPO against the PPOTrainer that TRL had up to version 0.24 (with transformers before 5).

    python benchmarks/trl_ppo.py

Writes nbs/studies/results/compare_rlhf_trl024.csv, by the rules of
`nbs/studies/34_benchmark.ipynb`, which says what came of it.
"""
import argparse
import copy
import csv
import tempfile
from pathlib import Path

import torch
from jobs import RESULTS
from torch import nn

from rlhf_notes.reviews.task import review_prompts
from rlhf_notes.studies import benchmark_rlhf as study

def classifier(start, trunk, weight, bias):
    "A model of transformers with the trunk and a head of one output."
    from transformers import GPT2ForSequenceClassification
    settings = copy.deepcopy(start.lm.config)
    settings.num_labels = 1
    model = GPT2ForSequenceClassification(settings)
    model.transformer.load_state_dict(trunk.state_dict())
    model.score = nn.Linear(weight.shape[1], 1)
    model.score.load_state_dict(dict(weight=weight.detach(), bias=bias.detach()))
    return model


def trl_ppo(start, config):
    "TRL's PPOTrainer: the moments at which iterations ended, and the model."
    from datasets import Dataset
    from trl import PPOConfig, PPOTrainer
    c, task, ends = config, start.task, []
    gain, head = start.norm.gain, start.reward_model.head
    with study._quiet(), tempfile.TemporaryDirectory() as tmp:
        args = PPOConfig(**study._shared(c, tmp), num_sample_generations=0,
                         per_device_train_batch_size=c.batch, gradient_accumulation_steps=1,
                         num_mini_batches=c.minibatches, num_ppo_epochs=c.epochs,
                         total_episodes=c.iterations * c.batch,
                         local_rollout_forward_batch_size=c.batch, gamma=c.gamma, lam=c.lam,
                         response_length=c.response_length, missing_eos_penalty=None,
                         kl_coef=c.beta, cliprange=c.clip, cliprange_value=c.value_clip,
                         vf_coef=c.value_coef, whiten_rewards=c.whiten_rewards)
        reward_model = classifier(start, start.reward_model.trunk, gain * head.weight,
                           gain * head.bias + start.norm.bias)
        value = classifier(start, start.lm.base_model, 0 * head.weight, 0 * head.bias)
        prompts = task.tokenizer(review_prompts(), add_special_tokens=False)
        trainer = PPOTrainer(args=args, processing_class=task.tokenizer,
                             model=copy.deepcopy(start.lm), ref_model=copy.deepcopy(start.lm),
                             reward_model=reward_model, value_model=value,
                             train_dataset=Dataset.from_dict(prompts),
                             callbacks=[study._clock(ends, 1)])
        trainer.train()
    return ends, trainer.model.policy


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on (default: 5)")
    parser.add_argument("--iterations", type=int, default=10, help="of each training (default: 10)")
    parser.add_argument("--out", type=Path, default=RESULTS / "compare_rlhf_trl024.csv")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours_and_grpo = study.contenders
    study.contenders = lambda: ours_and_grpo() | {"trl-ppo": (trl_ppo, dict(algo="ppo"))}
    rows = study.compare(args.seeds, args.iterations, done=lambda row: print(row, flush=True))
    with open(args.out, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, study.COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__": main()
