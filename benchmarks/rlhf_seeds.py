"""Train a tiny GPT-2 with PPO, GRPO and RLOO over several seeds, each by its command, and time the whole process.

    python benchmarks/rlhf_seeds.py

Writes nbs/language/results/rlhf_seeds.csv, a row for each algorithm and seed, from the summary of the run; `seconds` is of the process, from its start to
its end, imports and evaluation included, the others are of its stages. `yardstick` is what a piece of work that is always the same took just before, since
machines that are shared change their speed: 100 products of two 512 x 512 matrices on one thread. The metrics of seed 0 with PPO are kept beside it, as
rlhf_metrics.csv.
"""
import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "nbs" / "language" / "results"
COLUMNS = ("algo", "seed", "true_score_sft", "true_score", "win_rate_vs_sft", "proxy_score", "kl", "valid", "seconds", "sft_seconds", "reward_model_seconds", "rl_seconds", "tokens_per_second", "yardstick")
OPTIONS = {"ppo": [], "grpo": ["--algo", "grpo"], "rloo": ["--algo", "rloo"]}


def yardstick():
    "Seconds; the least of five attempts."
    import torch
    from rlhf_notes.studies.speed import seconds
    torch.set_num_threads(1)
    a = torch.ones(512, 512)
    return min(seconds(lambda: [a @ a for _ in range(100)], "cpu") for _ in range(5))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on (default: 5)")
    parser.add_argument("--algos", nargs="+", choices=tuple(OPTIONS), default=list(OPTIONS), help="default: all")
    parser.add_argument("--out", type=Path, default=RESULTS / "rlhf_seeds.csv", help="the file")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in range(args.seeds):
        for algo in args.algos:
            with tempfile.TemporaryDirectory() as tmp:
                speed = yardstick()
                run, start = Path(tmp) / "run", time.perf_counter()
                subprocess.run([sys.executable, "-m", "rlhf_notes.cli", "rlhf", *OPTIONS[algo], "--seed", str(seed), "--out", str(run)], check=True, stdout=subprocess.DEVNULL)
                seconds, s = time.perf_counter() - start, json.loads((run / "summary.json").read_text())
                if (algo, seed) == ("ppo", 0): shutil.copy(run / "metrics.csv", args.out.with_name("rlhf_metrics.csv"))
            stages = {f"{name}_seconds": value for name, value in s["seconds"].items()}
            rows.append([f"{v:.6g}" if isinstance(v, float) else v for v in ({**s, **stages, "seconds": seconds, "yardstick": speed}[c] for c in COLUMNS)])
            with open(args.out, "w", newline="", encoding="utf-8") as f: csv.writer(f, lineterminator="\n").writerows([COLUMNS, *rows])
            print(f"{algo}, seed {seed}: true score {s['true_score_sft']:.2f} -> {s['true_score']:.2f}, wins {s['win_rate_vs_sft']:.3f}, KL {s['kl']:.1f}, valid {s['valid']:.3f}, {seconds:.1f} s, yardstick {speed:.2f} s", flush=True)


if __name__ == "__main__": main()
