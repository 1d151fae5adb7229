"""The learning rate, the size of a group and a reward that is too rare, on the checkable world.

    python benchmarks/recipes.py       # a quarter of an hour of one core

Writes nbs/hub/results/recipes.csv, for each study, choice and seed: the share of right responses
to held-out prompts, before the training in `start`; the KL and the share of groups without spread,
means over the last ten iterations. Trainings that are there are not made again.
    rate    Adam's learning rate, of all weights and of LoRA at rank 8
    group   responses to a prompt, at as many responses in all
    sparse  a model that is right once in a hundred, and what may help
"""
import copy
from functools import cache, partial

import torch
from jobs import RESULTS, options, read, right, text, write

from rlhf_notes.language.rollout import no_spread
from rlhf_notes.studies.checkable import checkable_rlhf, exact_match, make_questions, pretrain

COLUMNS = "study", "choice", "value", "seed", "start", "right", "kl", "same"
OPTIONS = dict(batch=128, group=8, iterations=40)
RATES = 1e-5, 1e-4, 1e-3, 1e-2, 1e-1
EARLY, LATE = 60, 300  # steps of pretraining: right once in a hundred, once in four


def digits(prompts, responses, solution):
    "The share of digits in their places: a reward in finer steps."
    pairs = [(said.split(), right.split()) for said, right in zip(responses, solution)]
    return [sum(map(str.__eq__, said, right)) / max(len(said), len(right)) for said, right in pairs]


JOBS = [("rate", name, rate, dict(lora=lora, learning_rate=rate), LATE)
        for rate in RATES for name, lora in (("all weights", 0), ("LoRA", 8))]
JOBS += [("group", "G", G, dict(group=G), LATE) for G in (2, 8, 32)]
JOBS += [("sparse", name, steps, more, steps) for name, more, steps in (
    ("as it is", {}, EARLY), ("32 in a group", dict(group=32), EARLY),
    ("dynamic sampling", dict(dynamic_sampling=True), EARLY),
    ("a reward for each digit", dict(reward=digits), EARLY),
    ("a better start", {}, 2 * EARLY))]


@cache
def started(seed, steps):
    "A pretrained model."
    return pretrain(make_questions()[:3000], seed, steps)


def run(study, choice, value, changes, steps, seed):
    torch.set_num_threads(1)
    questions = make_questions()
    lm = copy.deepcopy(started(seed, steps))
    trainer = checkable_rlhf(lm, questions[:3000], seed=seed, **OPTIONS | changes)
    score = partial(exact_match, None)  # looks at no prompt
    (start, _), same = right(trainer, questions[3000:3300], score), []
    while trainer.left:
        trainer.iterate()
        x = trainer.rollout
        spread = no_spread(trainer.config, x, trainer.task.weights)
        same.append(spread.float().mean().item())
    kl = sum(r["kl_k1"] for r in trainer.rows[-10:]) / 10
    end, _ = right(trainer, questions[3000:3300], score)
    return [text(x) for x in (study, choice, value, seed, start, end, kl, sum(same[-10:]) / 10)]


def main():
    args = options(__doc__, RESULTS.parents[1] / "hub" / "results" / "recipes.csv", 5)
    rows = [] if args.fresh else read(args.out, COLUMNS)
    done = {tuple(map(str, r[:4])) for r in rows}
    for seed in args.seeds:
        for job in JOBS:
            if tuple(str(text(x)) for x in (*job[:3], seed)) in done: continue
            rows.append(run(*job, seed))
            write(args.out, COLUMNS, rows)
            print(*rows[-1], flush=True)


if __name__ == "__main__": main()
