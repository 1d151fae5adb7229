"""PPO whose value head learns alone in the first iterations (VC-PPO, Yuan et al. 2025).

    python benchmarks/value_warmup.py

Appends to nbs/studies/results/value_warmup.csv, for each seed, a row for each number of iterations
in which only the value head learns (`warmup`) of all of them (`iterations`): proxy and true reward
and KL in nats on held-out prompts, and the share of the returns' variance that the values explain
in the first iteration in which the policy learns. Warm-up within the sixty iterations takes samples
from the policy; beyond them it is free. Rows that are there are not made again.
"""
import torch
from jobs import RESULTS, options, read, text, write

from rlhf_notes.language.loop import Loop
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.studies.variants import measure, prepare

COLUMNS = ("seed", "warmup", "iterations", "proxy", "true", "kl", "valid", "win", "explained")
CHOICES = (0, 60), (5, 60), (5, 65)


class WarmLoop(Loop):
    "`Loop` whose language model waits for its value head."
    warmup = 0

    def update(self):
        if self.iteration < self.warmup:
            for p in self.policy.lm.parameters():
                p.grad.zero_()
        return super().update()


def run(start, warmup, iterations):
    "The row of a training."
    plain = start.trainer(iterations=iterations)
    trainer = WarmLoop(plain.config, start.lm, start.task, plain.reward)
    trainer.warmup, rows = warmup, []
    while trainer.iteration < iterations:
        rows.append(trainer.iterate())
    found = measure(trainer) | dict(seed=start.config.seed, warmup=warmup, iterations=iterations,
                                    explained=rows[warmup]["explained_variance"])
    return [text(found[c]) for c in COLUMNS]


def main():
    args = options(__doc__, RESULTS / "value_warmup.csv", 10)
    torch.set_num_threads(1)
    rows = [] if args.fresh else read(args.out, COLUMNS)
    done = {tuple(map(int, row[:3])) for row in rows}
    for seed in args.seeds:
        todo = [choice for choice in CHOICES if (seed, *choice) not in done]
        if not todo: continue
        start = prepare(ReviewsConfig(seed=seed, device="cpu", eval_responses=1024))
        for choice in todo:
            rows.append(run(start, *choice))
            write(args.out, COLUMNS, rows)
            print(dict(zip(COLUMNS, rows[-1])), flush=True)


if __name__ == "__main__": main()
