"""Seven algorithms, and dynamic sampling, on a task with a checkable reward, over many seeds.

    python benchmarks/checkable.py

Appends to nbs/studies/results/checkable.csv: for each seed the pretrained model and each algorithm, with pass@k and length on held-out prompts, exact match on the third of the prompts that is hardest and easiest
for the pretrained model, and from the log KL, the share of the groups without spread (mean over the first and the last ten iterations) the rollouts sampled for an iteration, and the CPU time of the training. Rows that are there are not made again. `nbs/studies/40_checkable.ipynb` says what came of it.
"""
import argparse
import csv
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "nbs" / "studies" / "results" / "checkable.csv"
SECONDS = 9  # of one training, on a quiet core


def main():
    import torch
    from rlhf_notes.studies.checkable import ALGORITHMS, KS, N, CheckableRLHF, make_questions, measure, pretrain
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seeds", type=int, default=10, help="how many (default: 10)")
    parser.add_argument("--names", nargs="*", help="algorithms (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = ["seed", "algorithm", *(f"pass_{k}" for k in KS), "length", "hard", "easy", "kl", "same_first", "same_last", "rounds", "seconds"]
    if not args.out.exists(): args.out.write_text(",".join(columns) + "\n", encoding="utf-8")
    with open(args.out, newline="", encoding="utf-8") as f: done = {(int(r["seed"]), r["algorithm"]) for r in csv.DictReader(f)}
    names, seeds = args.names or ["pretrained", *ALGORITHMS], range(args.first, args.first + args.seeds)
    todo = {seed: [name for name in names if (seed, name) not in done] for seed in seeds}
    print(f"{sum(map(len, todo.values()))} rows to do, about {sum(map(len, todo.values())) * SECONDS / 60:.0f} minutes on a quiet core", flush=True)
    questions = make_questions()
    train, held_out = questions[:3000], questions[3000:3300]
    ready = {}
    for name in names:
        for seed in seeds:
            if name not in todo[seed]: continue
            if seed not in ready:
                lm = pretrain(train, seed)
                ready[seed] = lm, measure(CheckableRLHF(lm, train, seed=seed), held_out)[1].argsort(stable=True)
            lm, rank = ready[seed]
            trainer, begin = CheckableRLHF(lm, train, name if name in ALGORITHMS else "GRPO", seed=seed), time.process_time()
            row = dict(seed=seed, algorithm=name)
            if name in ALGORITHMS:
                rows = trainer.learn().rows
                def mean(column, part): return sum(r[column] for r in part) / len(part)
                row |= dict(seconds=time.process_time() - begin, kl=mean("kl_k1", rows[-10:]))
                if name != "PPO": row |= dict(same_first=mean("same", rows[:10]), same_last=mean("same", rows[-10:]), rounds=mean("rounds", rows))
            found, right = measure(trainer, held_out)
            right, third = right.double() / N, len(held_out) // 3
            row |= found | dict(hard=right[rank[:third]].mean().item(), easy=right[rank[-third:]].mean().item())
            with open(args.out, "a", newline="", encoding="utf-8") as f:
                csv.DictWriter(f, columns, lineterminator="\n").writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
            print(f"seed {seed}, {name}: exact match {row['pass_1']:.3f}, pass@8 {row['pass_8']:.3f}", flush=True)


if __name__ == "__main__": main()
