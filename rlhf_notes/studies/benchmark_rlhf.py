"""The same tiny GPT-2, reward model and budget: seconds per iteration of our trainers and TRL's.

`rlhf-notes compare --task rlhf` runs the race; its rules and its result stand in
[the lesson](../../nbs/studies/34_benchmark.ipynb#against-trl).
"""

__all__ = ['COLUMNS', 'trl_grpo', 'ours', 'contenders', 'race', 'compare', 'ratios', 'table']

import copy
import importlib.util
import io
import logging
import tempfile
import time
import warnings
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace

import numpy as np
import torch

from ..formulas.reward import apply_penalty
from ..hub.load import quiet_transformers
from ..reviews.config import ReviewsConfig
from ..reviews.pipeline import evaluate
from ..reviews.task import review_prompts
from .variants import Start, prepare
from ..training.fit import THREADS
from ..training.statistics import bootstrap_interval


def trl_grpo(start: Start, config: ReviewsConfig) -> tuple:
    "TRL's GRPOTrainer: the seconds at which iterations ended, and the model."
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    c, task, ends, device = config, start.task, [], start.lm.device
    tokenizer = copy.deepcopy(task.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token  # one that the model knows
    @torch.no_grad()
    def reward(prompts, completion_ids, **_):
        q = task.tokenizer(prompts, padding="max_length", max_length=task.prompt_length,
                           return_tensors="pt", add_special_tokens=False).to(device)
        padded = [ids + [tokenizer.eos_token_id] * (c.response_length - len(ids))
                  for ids in completion_ids]
        responses, mask, has_end = task.truncate(torch.tensor(padded, device=device))
        scores = start.reward_model.score(q["input_ids"], q["attention_mask"].bool(), responses,
                                          mask)
        return apply_penalty(start.norm(scores), has_end, c.penalty).tolist()
    steps = c.epochs * c.minibatches
    with _quiet(), tempfile.TemporaryDirectory() as tmp:
        start.lm.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)  # from where it reads the reference
        args = GRPOConfig(**_shared(c, tmp), gradient_checkpointing=False, disable_dropout=True,
                          per_device_train_batch_size=c.batch // c.minibatches,
                          steps_per_generation=c.minibatches, num_iterations=c.epochs,
                          max_steps=c.iterations * steps, num_generations=c.group,
                          max_completion_length=c.response_length, top_k=0, top_p=1.0,
                          beta=c.beta, epsilon=c.clip, loss_type="grpo")
        trainer = GRPOTrainer(model=AutoModelForCausalLM.from_pretrained(tmp), reward_funcs=reward,
                              args=args, processing_class=tokenizer,
                              train_dataset=Dataset.from_dict({"prompt": review_prompts()}))
        trainer.add_callback(_clock(ends, steps))
        trainer.train()
    return ends, trainer.model

@contextmanager
def _quiet():
    "Inside, neither TRL nor transformers says anything."
    logging.disable(logging.WARNING)
    try:
        with quiet_transformers(), warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)

def _clock(ends, every):
    "A callback that notes when iterations end, of so many of TRL's steps."
    from transformers import TrainerCallback
    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step % every: return
            ends.append(time.perf_counter())
    return Clock()

def _shared(c, tmp):
    "Options that both of TRL's trainers get."
    return dict(output_dir=tmp, seed=c.seed, use_cpu=c.device == "cpu",
                bf16=c.precision == "bfloat16", report_to="none", save_strategy="no",
                logging_steps=10**6, disable_tqdm=True, temperature=c.temperature,
                learning_rate=c.learning_rate, lr_scheduler_type="linear",
                adam_epsilon=c.adam_eps, max_grad_norm=c.max_grad_norm)


def ours(start: Start, config: ReviewsConfig) -> tuple:
    "Our loop: the seconds at which iterations ended, and the model."
    trainer, ends = replace(start, config=config).trainer(), []
    while trainer.iteration < trainer.iterations:
        trainer.iterate()
        ends.append(time.perf_counter())
    return ends, trainer.policy.lm


def contenders() -> dict:  # name -> (function, changes of the config)
    "All that can be raced here: TRL's GRPO if it is installed and can be imported."
    grpo = dict(algo="grpo")
    found = {"ours-grpo": (ours, grpo), "ours-ppo": (ours, dict(algo="ppo"))}
    if importlib.util.find_spec("trl") is None: return found
    try:
        with _quiet():
            from trl import GRPOTrainer  # noqa: F401
    except (ImportError, RuntimeError): return found  # its versions do not fit together
    return found | {"trl-grpo": (trl_grpo, grpo)}


COLUMNS = ("task", "seed", "contender", "iterations", "seconds", "seconds_per_iteration",
           "tokens_per_second", "true_score")

def race(name: str, start: Start, iterations: int) -> dict:
    "Train one iteration more than `iterations`, by the clock, and look at what came of it."
    train, changes = contenders()[name]
    trainer = start.trainer(**changes, iterations=iterations + 1)
    with THREADS.held(1):
        ends, lm = train(start, trainer.config)
    seconds, c = ends[-1] - ends[0], trainer.config
    return dict(task="rlhf", seed=c.seed, contender=name, iterations=iterations, seconds=seconds,
                seconds_per_iteration=seconds / iterations,
                tokens_per_second=iterations * c.batch * c.response_length / seconds,
                true_score=evaluate(trainer, lm).true.mean().item())


def compare(seeds: int, iterations: int, done=lambda row: None, first: int = 0, **options) -> list:
    """By turns: for each seed all contenders, and each seed begins with another one.

    `options` are those of `ReviewsConfig`; `done(row)` is called after each training.
    """
    rows, names = [], list(contenders())
    for seed in range(first, first + seeds):
        # TRL's coefficient of the KL does not change
        start = prepare(ReviewsConfig(seed=seed, kl_target=0.0, **{"device": "cpu"} | options))
        for i in range(len(names)):
            rows.append(race(names[(seed + i) % len(names)], start, iterations))
            done(rows[-1])
    return rows


def ratios(rows: list, name: str) -> dict:
    "Their seconds for an iteration over ours: median over the seeds, with its 95% interval."
    of = {(r["contender"], r["seed"]): r["seconds_per_iteration"] for r in rows}
    ours = f"ours-{name.split('-')[1]}"
    values = [s / of[ours, seed] for (who, seed), s in of.items() if who == name]
    low, high = bootstrap_interval(values, statistic="median")
    return dict(median=float(np.median(values)), low=low, high=high)


def table(rows: list) -> list:
    "Medians over the seeds, as rows of strings; the first is a header."
    lines = [("contender", "ms / iteration", "tokens / s", "times ours", "true score")]
    for name in sorted({r["contender"] for r in rows}):
        def median(column):
            return float(np.median([r[column] for r in rows if r["contender"] == name]))
        r = None if name.startswith("ours") else ratios(rows, name)
        times = f"{r['median']:.1f} [{r['low']:.1f}, {r['high']:.1f}]" if r else "1"
        lines.append((name, f"{1000 * median('seconds_per_iteration'):.0f}",
                      f"{median('tokens_per_second'):,.0f}", times, f"{median('true_score'):.2f}"))
    return lines
