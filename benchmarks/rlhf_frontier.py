"""How much approval for how much distance: PPO at several prices of KL, the same without any price for longer, and the best of n answers.

    python benchmarks/rlhf_frontier.py

Writes into nbs/studies/results: frontier.csv (for each seed a row for each fixed coefficient, each n, and the pretrained model: proxy, true score, KL and more
on held-out queries) and goodhart.csv (coefficient 0, one row for each look during training, with a text). Pretraining and reward model are made once for each seed.
A run that was stopped goes on with the first seed that is missing.
"""
import argparse
import csv
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "nbs" / "studies" / "results"
COEFS, NS, LONG, LOOK = (0.4, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.0), (2, 4, 16, 64, 256), 120, 5
FRONTIER = ("seed", "kind", "value", "proxy", "true", "kl", "valid", "win")
GOODHART = ("seed", "iteration", "proxy", "true", "kl", "valid", "win", "query", "answer")


def write(path, columns, rows):
    tmp = path.with_name(f".{path.name}.tmp")
    with open(tmp, "w", newline="", encoding="utf-8") as f: csv.writer(f, lineterminator="\n").writerows([columns, *([f"{v:.6g}" if isinstance(v, float) else v for v in row] for row in rows)])
    tmp.replace(path)


def read(path):
    if not path.exists(): return []
    with open(path, newline="", encoding="utf-8") as f: return list(csv.reader(f))[1:]


def main():
    import torch
    from rlhf_notes.language.config import RLHFConfig
    from rlhf_notes.language.pipeline import evaluate
    from rlhf_notes.language.task import HELD_OUT
    from rlhf_notes.studies.variants import measure, measure_best_of_n, prepare
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on (default: 5)")
    parser.add_argument("--fresh", action="store_true", help="begin again")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the directory")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    frontier, goodhart = ([] if args.fresh else read(args.out / name) for name in ("frontier.csv", "goodhart.csv"))
    done = {int(row[0]) for row in goodhart}
    print(f"{args.seeds - len(done)} seeds to do, about {5 * (args.seeds - len(done))} minutes on a quiet core", flush=True)
    for seed in range(args.seeds):
        if seed in done: continue
        start, began = prepare(RLHFConfig(seed=seed, device="cpu", kl_target=0.0, eval_answers=1024)), time.perf_counter()
        look, chosen = start.trainer(eval_answers=256), measure_best_of_n(start.trainer(eval_answers=len(HELD_OUT)), NS, max(NS))
        new = [[seed, "pretrained", "", *measure(start.trainer(), start.lm).values()], *([seed, "best of n", n, *row.values()] for n, row in chosen.items())]
        looks = []
        for coef in COEFS:
            trainer = start.trainer(kl_coef=coef, iterations=LONG if coef == 0 else start.config.iterations)
            while trainer.iteration < trainer.iterations:
                trainer.iterate()
                if coef == 0 and trainer.iteration % LOOK == 0: looks.append([seed, trainer.iteration, *measure(look, trainer.policy.lm).values(), *evaluate(look, trainer.policy.lm).texts[0]])
            new.append([seed, "coefficient", coef, *measure(trainer).values()])
            print(f"seed {seed}, coefficient {coef}: true score {new[-1][4]:.2f} at KL {new[-1][5]:.1f}, {time.perf_counter() - began:.0f} s", flush=True)
        frontier, goodhart = frontier + new, goodhart + looks
        write(args.out / "frontier.csv", FRONTIER, frontier); write(args.out / "goodhart.csv", GOODHART, goodhart)


if __name__ == "__main__": main()
