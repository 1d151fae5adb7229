"""Responses of older policies, or of another sampler, and eleven losses, over many seeds.

    python benchmarks/staleness.py

Appends to nbs/studies/results/staleness.csv, for each seed, sampler, age and correction: exact
match (pass_1), pass@8 and pass@32 on held-out prompts; the mean score of the last ten rollouts; and
the KL of the rollout policy from the policy that learns, nats a response, over the whole training.
Rows that are there are not made again. `nbs/studies/48_staleness.ipynb` says what came of it.
"""
from functools import lru_cache

import torch
from jobs import RESULTS, options, read, side_by_side, text, write

from rlhf_notes.studies.checkable import make_questions, measure, pretrain
from rlhf_notes.studies.staleness import CORRECTIONS, StaleRLHF

ITERATIONS = 60
OTHERS = [name for name in CORRECTIONS if name != "nothing"]
RUNS = (  # the first for twice as many seeds, then the second, then the third
    [("float32", 0, "nothing"), *(("float32", 16, name) for name in CORRECTIONS)],
    [*(("float32", age, "nothing") for age in (8, 4, 2)),
     *((s, 0, name) for s in ("bfloat16", "top-p") for name in ("nothing", "token TIS"))],
    [("float32", 8, name) for name in OTHERS])
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
    trainer = StaleRLHF(lm, train, name, age, sampler, seed=seed, iterations=ITERATIONS)
    rows = trainer.learn().rows
    def mean(column, part): return sum(row[column] for row in part) / len(part)
    found = measure(trainer, held_out)[0]
    found |= dict(seed=seed, sampler=sampler, age=age, correction=name,
                  score=mean("score", rows[-10:]), kl=mean("kl_k1", rows))
    return [text(found[c]) for c in COLUMNS]


def main():
    args = options(__doc__, RESULTS / "staleness.csv", 5, CORRECTIONS)
    rows = [] if args.fresh else read(args.out, COLUMNS)
    done = {(int(seed), sampler, int(age), name) for seed, sampler, age, name, *_ in rows}
    twice = range(args.first, args.first + 2 * len(args.seeds))
    todo = [(seed, *job) for jobs in RUNS for seed in (twice if jobs is RUNS[0] else args.seeds)
            for job in jobs
            if job[2] in args.only and (seed, *job) not in done]
    for row in side_by_side(run, todo, args.jobs, lambda job: SECONDS):
        rows.append(row)
        write(args.out, COLUMNS, rows)


if __name__ == "__main__": main()
