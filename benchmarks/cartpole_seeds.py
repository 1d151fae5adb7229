"""Train CartPole with many seeds and keep the learning curves as CSV.

    python benchmarks/cartpole_seeds.py
    python benchmarks/cartpole_seeds.py --entropy-coef 0 --name cartpole_no_entropy

Writes NAME_seeds.csv (one row for each seed: the final evaluation) and NAME_curves.csv (one row for each iteration). Everything but the
seconds comes out the same again on the same machine; on another one float32 may round otherwise, and the curves differ while their message does not.
"""
import argparse
import csv
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

CURVE = ("steps", "episodes", "return_mean", "entropy", "kl_k3", "clip_fraction", "explained_variance")
FINAL = ("eval_return_mean", "eval_return_std", "eval_sampled_return_mean", "eval_sampled_return_std", "solved", "steps", "steps_to_solve", "wall_seconds", "seconds_to_solve")


def run(job):
    import torch
    from rlhf_notes.control.cartpole import train
    from rlhf_notes.control.config import PPOConfig
    seed, options = job
    torch.set_num_threads(1)
    _, rows, summary = train(PPOConfig(seed=seed, **options))
    return seed, rows, summary


def tidy(value):
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="how many, from 0 on")
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread side by side")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "nbs" / "control" / "results")
    parser.add_argument("--entropy-coef", type=float, help="instead of the default")
    parser.add_argument("--name", default="cartpole", help="how the files begin")
    args = parser.parse_args()
    options = {} if args.entropy_coef is None else {"entropy_coef": args.entropy_coef}
    args.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.jobs) as pool, open(args.out / f"{args.name}_seeds.csv", "w", newline="") as f, open(args.out / f"{args.name}_curves.csv", "w", newline="") as g:
        final, curve = (csv.writer(x, lineterminator="\n") for x in (f, g))
        final.writerow(["seed", *FINAL]); curve.writerow(["seed", *CURVE])
        for seed, rows, s in pool.map(run, [(seed, options) for seed in range(args.seeds)]):
            final.writerow([seed, *(tidy(s[c]) for c in FINAL)])
            curve.writerows([seed, *(tidy(r[c]) for c in CURVE)] for r in rows)
            print(f"seed {seed}: greedy {s['eval_return_mean']:.1f}, sampled {s['eval_sampled_return_mean']:.1f}, {s['steps']} steps, {s['wall_seconds']:.1f} s, "
                  f"475 in training after {s['steps_to_solve']} steps", flush=True)


if __name__ == "__main__":
    main()
