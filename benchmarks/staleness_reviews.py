"""Reviews by older policies, and twelve losses, over many seeds.

    python benchmarks/staleness_reviews.py

Appends to nbs/studies/results/staleness_reviews.csv, for each seed, age and correction: proxy and
true reward, the share of responses with an end, win rate and KL from the pretrained model on
held-out prompts, nats a response; the mean score of the last ten rollouts; and the KL of the
rollout policy from the policy that learns, the mean over a training. Each seed has a pretrained
model and a reward model of its own. Rows that are there are not made again.
`nbs/studies/48_staleness.ipynb` says what came of it.
"""
from functools import lru_cache

import torch
from jobs import RESULTS, names_of, options, resume, text

from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.reviews.pipeline import evaluate
from rlhf_notes.studies.variants import prepare

LESSON = names_of(RESULTS.parent / "48_staleness.ipynb", "imports", "corrections", "samplers",
                  "stale-loop", "stale-reviews")
CORRECTIONS, stale_reviews = LESSON["CORRECTIONS"], LESSON["stale_reviews"]
RUNS = [*((age, "nothing") for age in (0, 2, 4, 8)), *((16, name) for name in CORRECTIONS)]
COLUMNS = ("seed", "age", "correction", "proxy", "true", "valid", "win", "kl_pretrained", "score",
           "kl")
SECONDS = 14  # of one training, on a quiet core


@lru_cache(maxsize=1)
def started(seed):
    "Both models, a trainer that looks at policies, and what it sees of the pretrained model."
    start = prepare(ReviewsConfig(seed=seed, device="cpu", eval_responses=1024))
    looker = start.trainer()
    return start, looker, evaluate(looker, start.lm)


def run(seed, age, name):
    torch.set_num_threads(1)
    start, looker, before = started(seed)
    loop = stale_reviews(start, name, age)
    rows = [loop.iterate() for _ in range(loop.iterations)]
    def mean(column, part): return sum(row[column] for row in part) / len(part)
    found = evaluate(looker, loop.policy.lm).worth(before)
    found |= dict(seed=seed, age=age, correction=name, kl_pretrained=found["kl"],
                  score=mean("score", rows[-10:]), kl=mean("kl_k1", rows))
    return [text(found[c]) for c in COLUMNS]


def main():
    args = options(__doc__, RESULTS / "staleness_reviews.csv", 10, CORRECTIONS)
    resume(run, [(seed, *job) for seed in args.seeds for job in RUNS if job[1] in args.only],
           args, COLUMNS, SECONDS)


if __name__ == "__main__": main()
