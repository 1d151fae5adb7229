"""Responses of older policies, or of another sampler, and twelve losses, over many seeds.

    python benchmarks/staleness.py

Appends to nbs/studies/results/staleness.csv, for each seed, sampler, age and correction: exact
match (pass_1), pass@8 and pass@32 on held-out prompts; the mean score of the last ten rollouts; and
the KL of the rollout policy from the policy that learns, nats a response, over the whole training.
Rows that are there are not made again. `nbs/studies/48_staleness.ipynb` says what came of it.
"""
from functools import lru_cache

import torch
from jobs import RESULTS, names_of, options, resume, text

from rlhf_notes.studies.checkable import make_questions, measure, pretrain

LESSON = names_of(RESULTS.parent / "48_staleness.ipynb", "imports", "corrections", "samplers",
                  "stale-loop", "stale-rlhf")
CORRECTIONS, ITERATIONS = LESSON["CORRECTIONS"], 60
RUNS = [
    *(("float32", age, "nothing") for age in (0, 2, 4)),
    *(("float32", age, name) for age in (8, 16) for name in CORRECTIONS),
    *(("mixture", 16, name) for name in ("nothing", "clip", "DPPO", "sequence TIS")),
    *((s, 0, name) for s in ("bfloat16", "top-p") for name in ("nothing", "token TIS"))]
COLUMNS = ("seed", "sampler", "age", "correction", "pass_1", "pass_8", "pass_32", "score", "kl")
SECONDS = 8  # of one training, on a quiet core


@lru_cache(maxsize=1)
def started(seed):
    "Questions to train on, held-out ones, the pretrained model."
    questions = make_questions()
    return questions[:3000], questions[3000:3300], pretrain(questions[:3000], seed)


def run(seed, sampler, age, name):
    torch.set_num_threads(1)
    train, held_out, lm = started(seed)
    trainer = LESSON["stale_rlhf"](lm, train, name, age, sampler, seed=seed,
                                   iterations=ITERATIONS)
    rows = trainer.learn().rows
    def mean(column, part): return sum(row[column] for row in part) / len(part)
    found = measure(trainer, held_out)[0]
    found |= dict(seed=seed, sampler=sampler, age=age, correction=name,
                  score=mean("score", rows[-10:]), kl=mean("kl_k1", rows))
    return [text(found[c]) for c in COLUMNS]


def main():
    args = options(__doc__, RESULTS / "staleness.csv", 10, CORRECTIONS)
    resume(run, [(seed, *job) for seed in args.seeds for job in RUNS if job[2] in args.only],
           args, COLUMNS, SECONDS)


if __name__ == "__main__": main()
