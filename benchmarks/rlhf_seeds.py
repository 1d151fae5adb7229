"""Train a tiny GPT-2 with PPO, GRPO and RLOO over several seeds, each by its command.

    python benchmarks/rlhf_seeds.py

Writes nbs/reviews/results/rlhf_seeds.csv, a row for each algorithm and seed, from the summary of
the run; `seconds` is of the process, from its start to its end, imports and evaluation included,
the others are of its stages. `yardstick` is what a piece of work that is always the same took just
before, since machines that are shared change their speed: 100 products of two 512 x 512 matrices on
one thread. The metrics of seed 0 with PPO are kept beside it, as rlhf_metrics.csv. Rows that are
there are not made again without --fresh.
"""
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from jobs import RESULTS, options, read, text, write

from rlhf_notes.studies.speed import seconds

COLUMNS = ("algo", "seed", "true_score_sft", "true_score", "win_rate_vs_sft", "proxy_score", "kl",
           "valid", "seconds", "sft_seconds", "reward_model_seconds", "rl_seconds",
           "tokens_per_second", "yardstick")
OUT = RESULTS.parents[1] / "reviews" / "results" / "rlhf_seeds.csv"


def yardstick():
    "Seconds; the least of five attempts."
    torch.set_num_threads(1)
    a = torch.ones(512, 512)
    return min(seconds(lambda: [a @ a for _ in range(100)], "cpu") for _ in range(5))


def run(algo, seed, metrics):
    "The row of a training by its command; its metrics go to a file, if there is one to go to."
    speed = yardstick()
    with tempfile.TemporaryDirectory() as tmp:
        command = (sys.executable, "-m", "rlhf_notes.cli", "rlhf", "--algo", algo,
                   "--seed", str(seed), "--out", tmp)
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        whole = time.perf_counter() - start
        summary = json.loads(Path(tmp, "summary.json").read_text(encoding="utf-8"))
        if metrics:
            shutil.copy(Path(tmp, "metrics.csv"), metrics)
    stages = {f"{name}_seconds": value for name, value in summary["seconds"].items()}
    return {**summary, **stages, "seconds": whole, "yardstick": speed}


def main():
    args = options(__doc__, OUT, 5)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [] if args.fresh else read(args.out, COLUMNS)
    done = {(algo, int(seed)) for algo, seed, *_ in rows}
    for seed in args.seeds:
        for algo in ("ppo", "grpo", "rloo"):
            if (algo, seed) in done: continue
            first = (algo, seed) == ("ppo", 0)
            row = run(algo, seed, first and args.out.with_name("rlhf_metrics.csv"))
            rows.append([text(row[c]) for c in COLUMNS])
            write(args.out, COLUMNS, rows)
            print(dict(zip(COLUMNS, rows[-1])), flush=True)


if __name__ == "__main__": main()
