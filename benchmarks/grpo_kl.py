"""The price of GRPO's KL, which stands in the loss, and its learning rate, beside PPO's defaults.

    python benchmarks/grpo_kl.py --first 100

Writes nbs/reviews/results/grpo_kl.csv, for each seed a row for each choice: proxy, true score, KL
and more on held-out prompts. A run that was stopped goes on with the first choice that is missing.
"""
import torch
from jobs import RESULTS, options, read, text, write

from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.studies.variants import measure, prepare

COLUMNS = ("seed", "algo", "kl_coef", "learning_rate", "proxy", "true", "kl", "valid", "win")
OUT = RESULTS.parents[1] / "reviews" / "results" / "grpo_kl.csv"
CHOICES = [("ppo", 0.1, 1e-3), *(("grpo", coef, 1e-3) for coef in (0.1, 0.15, 0.2, 0.25, 0.3)),
           ("grpo", 0.2, 5e-4), ("grpo", 0.2, 2e-3)]


def main():
    args = options(__doc__, OUT, 5)
    torch.set_num_threads(1)
    rows = [] if args.fresh else read(args.out, COLUMNS)
    done = {tuple(map(str, row[:4])) for row in rows}
    for seed in args.seeds:
        todo = [x for x in CHOICES if (str(seed), *map(text, x)) not in done]
        if not todo: continue
        start = prepare(ReviewsConfig(seed=seed, device="cpu", eval_responses=1024))
        for algo, coef, rate in todo:
            trainer = start.trainer(algo=algo, kl_coef=coef, learning_rate=rate)
            while trainer.iteration < trainer.iterations:
                trainer.iterate()
            row = dict(seed=seed, algo=algo, kl_coef=coef, learning_rate=rate) | measure(trainer)
            rows.append([text(row[c]) for c in COLUMNS])
            write(args.out, COLUMNS, rows)
            print(dict(zip(COLUMNS, rows[-1])), flush=True)


if __name__ == "__main__": main()
