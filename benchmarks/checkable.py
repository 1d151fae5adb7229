"""Seven algorithms, and dynamic sampling, on a task with a checkable reward, over many seeds.

    python benchmarks/checkable.py

Appends to nbs/studies/results/checkable.csv, for each seed, the pretrained model and each
algorithm: pass@k and length on held-out prompts; exact match on the third of them that is hardest,
and easiest, for the pretrained model; from the log, the KL, the share of the groups without spread
(mean over the first and the last ten iterations) and the rollouts sampled for an iteration; and the
CPU time of the training. Rows that are there are not made again.
`nbs/studies/40_checkable.ipynb` says what came of it.
"""
import time
from functools import lru_cache

import torch
from jobs import RESULTS, options, resume, text

from rlhf_notes.studies.checkable import (
    ALGORITHMS,
    KS,
    N,
    checkable_rlhf,
    make_questions,
    measure,
    pretrain,
)

COLUMNS = ("seed", "algorithm", *(f"pass_{k}" for k in KS), "length", "hard", "easy", "kl",
           "same_first", "same_last", "rounds", "seconds")
SECONDS = 9  # of one training, on a quiet core


@lru_cache(maxsize=1)
def started(seed):
    "Questions to train on and held-out ones, the pretrained model, the latter from hard to easy."
    questions = make_questions()
    train, held_out = questions[:3000], questions[3000:3300]
    lm = pretrain(train, seed)
    right = measure(checkable_rlhf(lm, train, seed=seed), held_out)[1]
    return train, held_out, lm, right.argsort(stable=True)


def run(seed, name):
    torch.set_num_threads(1)
    train, held_out, lm, rank = started(seed)
    trainer = checkable_rlhf(lm, train, name if name in ALGORITHMS else "GRPO", seed=seed)
    row = dict(seed=seed, algorithm=name)
    if name in ALGORITHMS:
        begin = time.process_time()
        rows = trainer.learn().rows
        def mean(column, part): return sum(r[column] for r in part) / len(part)
        row |= dict(seconds=time.process_time() - begin, kl=mean("kl_k1", rows[-10:]))
        if name != "PPO":
            row |= dict(same_first=mean("same", rows[:10]), same_last=mean("same", rows[-10:]),
                        rounds=mean("rounds", rows))
    found, right = measure(trainer, held_out)
    right, third = right.double() / N, len(held_out) // 3
    row |= found | dict(hard=right[rank[:third]].mean().item(),
                        easy=right[rank[-third:]].mean().item())
    return [text(row.get(c)) for c in COLUMNS]


def main():
    args = options(__doc__, RESULTS / "checkable.csv", 10, ("pretrained", *ALGORITHMS))
    resume(run, [(seed, name) for seed in args.seeds for name in args.only],
           args, COLUMNS, SECONDS)


if __name__ == "__main__": main()
