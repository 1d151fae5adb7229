"""Train CartPole and Pendulum with one detail changed at a time, over many seeds.

    python benchmarks/details.py --jobs 2

Writes nbs/studies/results/details.csv, a row for each training: the final policy's mean return over 100 fresh episodes, greedy and sampled, and the
steps after which the sampled mean first reached the threshold (blank if never), and the mean of each dial over the iterations. A run that was stopped continues with what is missing: trainings that
stand in the file are not repeated, so after a change of the defaults say --fresh. All seeds of a number come before the next one, so that a file
stopped half way still compares like with like. `nbs/studies/33_ablations.ipynb` says what the details are and what came of them.
"""
import argparse
import csv
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "nbs" / "studies" / "results" / "details.csv"
COLUMNS = ("task", "detail", "seed", "greedy", "sampled", "first_sampled_steps", "kl_k3", "clip_fraction", "explained_variance", "entropy", "grad_norm", "value_loss")
SECONDS = {"cartpole": 2.5, "pendulum": 4.0}          # of one training with its evaluations, on a quiet core


def run(job):
    import torch
    from rlhf_notes.studies.ablations import attempt
    torch.set_num_threads(1)
    result = attempt(*job)
    return [*job, *("" if result[c] is None else f"{result[c]:.6g}" for c in COLUMNS[3:])]


def main():
    from rlhf_notes.studies.ablations import CONFIGS, INTACT, UNTRAINED, experiments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="how many, from 0 on (default: 20)")
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread side by side (default: 1)")
    parser.add_argument("--task", choices=tuple(CONFIGS), help="only this one (default: both)")
    parser.add_argument("--only", nargs="+", metavar="DETAIL", help="only these details, and the intact baseline")
    parser.add_argument("--fresh", action="store_true", help="begin again, without what is in the file")
    parser.add_argument("--out", type=Path, default=OUT, help="the file")
    args = parser.parse_args()
    tasks = [args.task] if args.task else list(CONFIGS)
    known = {name for task in tasks for name in experiments(task)}
    if unknown := [name for name in args.only or () if name not in known]: parser.error(f"unknown detail {unknown[0]!r}; expected some of {', '.join(sorted(known))}")

    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    if args.out.exists() and not args.fresh:
        with open(args.out, newline="", encoding="utf-8") as f: rows = [[r[c] for c in COLUMNS] for r in csv.DictReader(f) if r.get(COLUMNS[-1]) or r["detail"] == UNTRAINED and r.get(COLUMNS[-1]) is not None]        # a line cut short is made again
    done = {(task, detail, int(seed)) for task, detail, seed, *_ in rows}
    wanted = [(task, name, seed) for seed in range(args.seeds) for task in tasks for name in experiments(task) if not args.only or name in args.only or name in (INTACT, UNTRAINED)]
    todo = [job for job in wanted if job not in done]
    print(f"{len(todo)} trainings to do, {len(wanted) - len(todo)} done before: about {sum(SECONDS[task] for task, _, _ in todo) / args.jobs / 60:.0f} minutes on quiet cores", flush=True)

    def write(rows):
        order = {job: i for i, job in enumerate(wanted)}
        rows = sorted(rows, key=lambda r: order.get((r[0], r[1], int(r[2])), len(order)))
        tmp = args.out.with_name(f".{args.out.name}.tmp")
        with open(tmp, "w", newline="", encoding="utf-8") as f: csv.writer(f, lineterminator="\n").writerows([COLUMNS, *rows])
        tmp.replace(args.out)

    start = time.perf_counter()
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        try:
            for n, future in enumerate(as_completed([pool.submit(run, job) for job in todo]), 1):
                rows.append(future.result()); write(rows)
                task, detail, seed, greedy, sampled, first, *_ = rows[-1]
                left = (time.perf_counter() - start) / n * (len(todo) - n) / 60
                print(f"{n} of {len(todo)}, {left:.0f} min left: {task}, {detail}, seed {seed}: greedy {greedy}, sampled {sampled}, threshold after {first or 'never'}", flush=True)
        except BaseException: pool.shutdown(wait=False, cancel_futures=True); raise


if __name__ == "__main__":
    main()
