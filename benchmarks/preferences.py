"""The human's approval against KL: PPO, GRPO, RLOO, DPO and the best of n, from the same choices.

    python benchmarks/preferences.py

Appends to nbs/studies/results/preferences.csv: for each seed and method a row for each look during the training (step = iteration) or for each n (step = n), on held-out prompts.
Pretraining and the reward model are made once for each seed. Rows that are there are not made again. `nbs/studies/40_preferences.ipynb` says what came of it.
"""
import argparse
import csv
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "nbs" / "studies" / "results" / "preferences.csv"
COLUMNS = ("seed", "method", "step", "true", "kl", "proxy", "valid", "win")


def main():
    import torch
    from rlhf_notes.language.config import RLHFConfig
    from rlhf_notes.studies.preferences import METHODS, best_of_n_curve, curve
    from rlhf_notes.studies.variants import prepare
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seeds", type=int, default=10, help="how many (default: 10)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.out.exists(): args.out.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    with open(args.out, newline="", encoding="utf-8") as f: done = {(int(r["seed"]), r["method"]) for r in csv.DictReader(f)}
    for seed in range(args.first, args.first + args.seeds):
        todo, began = [m for m in ("best of n", *METHODS) if (seed, m) not in done], time.perf_counter()
        if not todo: continue
        start = prepare(RLHFConfig(seed=seed, device="cpu", eval_answers=512))
        for method in todo:
            rows = list(best_of_n_curve(start) if method == "best of n" else curve(start, method))
            with open(args.out, "a", newline="", encoding="utf-8") as f:
                for row in rows: csv.DictWriter(f, COLUMNS, lineterminator="\n").writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in dict(seed=seed, method=method, **row).items()})
            print(f"seed {seed}, {method}: true reward {rows[-1]['true']:.2f} at KL {rows[-1]['kl']:.1f}, {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__": main()
