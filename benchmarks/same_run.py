"""The same training three times: by our loop, by our loop with verl's own loss, by TRL with ours.

    .venv/bridges/bin/python benchmarks/same_run.py     20 minutes for five seeds

Writes nbs/bridges/results/same_run.csv: for each engine and seed, the mean reward of every ten
iterations of GRPO on the questions of `nbs/studies/40_checkable.ipynb` that have four digits. Same
pretrained model, batch, loss, learning rate and clip; TRL samples by its own random numbers, and
its Adam is PyTorch's. "padded" are all questions, the shorter ones with padding on the left: TRL
gives the model no positions, so its GPT-2 learns with others than it samples with.
Rows that are there are not made again.
`nbs/bridges/45_scale.ipynb` draws them.
"""
import tempfile
from functools import lru_cache

import torch
from jobs import RESULTS, options, read, side_by_side, text, write

from rlhf_notes.studies.checkable import (
    OPTIONS,
    checkable_rlhf,
    digit_tokenizer,
    exact_match,
    make_questions,
    pretrain,
)

OUT = RESULTS.parent.parent / "bridges" / "results" / "same_run.csv"
COLUMNS = "engine", "seed", "iteration", "reward"
EVERY = 10  # iterations of a row
SECONDS = {"ours": 15, "verl": 15, "trl": 60, "ours, padded": 15, "trl, padded": 60}


@lru_cache(maxsize=2)
def started(seed, padded):
    "Questions, and a model that answers some of them."
    train = [q for q in make_questions() if padded or len(q["solution"].split()) == 4]
    return train, pretrain(train, seed)


def verl_loss(loop, batch, whole):
    "In place of `Loop.loss`: the loss of a minibatch is verl's own."
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig
    config = ActorConfig(strategy="fsdp", rollout_n=loop.config.group, ppo_mini_batch_size=8,
                         ppo_micro_batch_size_per_gpu=1, clip_ratio=loop.config.clip)
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=batch.logp, log_prob=loop.forward(batch)[0], advantages=batch.advantages,
        response_mask=batch.response_mask, loss_agg_mode="seq-mean-token-mean", config=config)
    return loss, dict(policy_loss=loss.detach())


def by_trl(lm, train, config):
    "Rewards, one for each iteration, of TRL's GRPO trainer with our loss."
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig

    from rlhf_notes.bridges.trl import grpo_trainer
    c, tokenizer = config, digit_tokenizer()
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    lm.config.pad_token_id = lm.generation_config.pad_token_id = tokenizer.pad_token_id
    with tempfile.TemporaryDirectory() as tmp:
        args = GRPOConfig(
            tmp, per_device_train_batch_size=c.batch // c.minibatches,
            steps_per_generation=c.minibatches, max_steps=c.iterations * c.minibatches,
            num_generations=c.group, max_completion_length=c.response_length, beta=0.0,
            temperature=c.temperature, learning_rate=c.learning_rate, adam_epsilon=c.adam_eps,
            max_grad_norm=c.max_grad_norm, seed=c.seed, logging_steps=c.minibatches, use_cpu=True,
            bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
            disable_tqdm=True)
        trainer = grpo_trainer("grpo", eps_low=c.clip, eps_high=c.clip)(
            lm, reward_funcs=lambda prompts, completions, solution, **_: exact_match(
                prompts, completions, solution),
            args=args, train_dataset=Dataset.from_list(train), processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [row["reward"] for row in trainer.state.log_history if "reward" in row]


def run(engine, seed):
    torch.set_num_threads(1)
    train, lm = started(seed, engine.endswith("padded"))
    ours = checkable_rlhf(lm, train, "GRPO", seed=seed)
    if engine == "verl": ours.loop.put(loss=verl_loss)
    if engine.startswith("trl"): rewards = by_trl(lm, train, ours.config)
    else: rewards = [row["score"] for row in ours.learn().rows]
    assert len(rewards) == OPTIONS["iterations"], len(rewards)
    parts = [rewards[i:i + EVERY] for i in range(0, len(rewards), EVERY)]
    return [[engine, str(seed), str((i + 1) * EVERY), text(sum(x) / len(x))]
            for i, x in enumerate(parts)]


def main():
    args = options(__doc__, OUT, 5, SECONDS)
    rows = [] if args.fresh else read(args.out, COLUMNS)
    done = {(engine, int(seed)) for engine, seed, *_ in rows}
    todo = [(name, seed) for seed in args.seeds for name in args.only if (name, seed) not in done]
    for found in side_by_side(run, todo, args.jobs, lambda job: SECONDS[job[0]]):
        rows += found
        write(args.out, COLUMNS, rows)


if __name__ == "__main__": main()
