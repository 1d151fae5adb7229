"""How much approval for how much distance: PPO at several prices of KL, the same without any price
for longer, and the best of n responses.

    python benchmarks/rlhf_frontier.py

Writes into nbs/studies/results: frontier.csv (for each seed a row for each fixed coefficient, each
n, and the pretrained model: proxy, true score, KL and more on held-out prompts) and goodhart.csv
(coefficient 0, a row for each look during training, with a text). A run that was stopped goes on
with the first seed that is missing.
"""

import torch
from jobs import RESULTS, options, read, text, write

from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.reviews.pipeline import evaluate
from rlhf_notes.reviews.task import HELD_OUT
from rlhf_notes.studies.variants import best_of_n, best_of_n_kl, measure, prepare

COEFS, LONG, LOOK = (0.4, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.0), 120, 5
NS = (2, 4, 16, 64, 256)
WORTH = ("proxy", "true", "kl", "valid", "win")
FRONTIER = ("seed", "kind", "value", *WORTH)
GOODHART = ("seed", "iteration", *WORTH, "prompt", "response")


def best_of_n_win(proxy, true, n):
    "How often the best of n beats a response that is not among the n; a tie is half a win."
    def against(i):
        rest = [j for j in range(proxy.shape[-1]) if j != i]
        beats = 0.5 + (true[..., rest] - true[..., i:i + 1]).sign() / 2
        return best_of_n(proxy[..., rest], beats, n)
    return torch.stack([against(i) for i in range(proxy.shape[-1])]).mean(0)


def measure_best_of_n(trainer, ns, rounds):
    "n -> worth of the best of n responses of the pretrained model; kl is the bound."
    many = [evaluate(trainer, trainer.reference, seed=seed) for seed in range(rounds + 1)]
    def stack(value): return torch.stack([value(e) for e in many], 1).cpu()
    proxy, true = stack(lambda e: e.rollout.scores), stack(lambda e: e.true)
    found = dict(proxy=proxy, true=true, valid=stack(lambda e: e.rollout.has_end.float()))
    def best(x, n): return best_of_n(proxy[:, :rounds], x[:, :rounds], n).mean().item()
    return {n: {name: best(x, n) for name, x in found.items()}
            | dict(kl=best_of_n_kl(n), win=best_of_n_win(proxy, true, n).mean().item()) for n in ns}


def main():
    args = options(__doc__, RESULTS, 5)
    torch.set_num_threads(1)
    files = (args.out / "frontier.csv", FRONTIER), (args.out / "goodhart.csv", GOODHART)
    frontier, looks = ([] if args.fresh else read(*file) for file in files)
    done = {int(row[0]) for row in looks}
    for seed in args.seeds:
        if seed in done: continue
        start = prepare(ReviewsConfig(seed=seed, device="cpu", kl_target=0.0, eval_responses=1024))
        look = start.trainer(eval_responses=256)
        def worth(found): return [text(found[c]) for c in WORTH]
        frontier.append([seed, "pretrained", "", *worth(measure(start.trainer(), start.lm))])
        every = start.trainer(eval_responses=len(HELD_OUT))
        for n, found in measure_best_of_n(every, NS, max(NS)).items():
            frontier.append([seed, "best of n", n, *worth(found)])
        for coef in COEFS:
            iterations = LONG if coef == 0 else start.config.iterations
            trainer = start.trainer(kl_coef=coef, iterations=iterations)
            while trainer.iteration < trainer.iterations:
                trainer.iterate()
                if coef == 0 and trainer.iteration % LOOK == 0:
                    lm = trainer.policy.lm
                    looks.append([seed, trainer.iteration, *worth(measure(look, lm)),
                                  *evaluate(look, lm).texts[0]])
            frontier.append([seed, "coefficient", coef, *worth(measure(trainer))])
            print(dict(zip(FRONTIER, frontier[-1])), flush=True)
        for file, rows in zip(files, (frontier, looks)): write(*file, rows)


if __name__ == "__main__": main()
