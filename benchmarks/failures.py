"""Plant one failure at a time, over many seeds: in control (CartPole and Pendulum) and in RLHF.

    python benchmarks/failures.py --jobs 2

Control: benchmarks/details.py, into nbs/studies/results/details.csv. RLHF: nbs/studies/results/failures.csv, a row for each training (what the policy is
worth, when it was worth 2, the mean of each dial over the iterations: mean_...), and rlhf_notes/studies/dials.csv, the dials in each iteration: of all failures with
seed 0, and of the intact trainings with every seed (`check.diagnose` plays with them). Says beforehand how long it will take. A run that was stopped continues with what is missing: trainings that stand in the files are not repeated, so after a change of the
defaults say --fresh. All failures of a seed come before the next seed. `nbs/studies/37_failures.ipynb` says what the failures are and what came of them.

Surprising rows again, with other seeds:

    python benchmarks/failures.py --part rlhf --first 100 --only "NAME" "NAME"
"""
import argparse
import csv
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS, DIALS_CSV = HERE.parent / "nbs" / "studies" / "results" / "failures.csv", HERE.parent / "rlhf_notes" / "studies" / "dials.csv"
PRETRAINED = "pretrained"
OUTCOME = ("proxy", "true", "kl", "valid", "win", "first", "broke")
SECONDS = 16           # of one training, on a quiet core
FRESH = 100            # seeds from here on are for doing surprising rows again


def number(x): return "" if x is None else f"{x:.5g}" if isinstance(x, float) else x


@lru_cache(maxsize=1)
def start(seed):
    from rlhf_notes.language.config import RLHFConfig
    from rlhf_notes.studies.variants import prepare
    return prepare(RLHFConfig(seed=seed, device="cpu", eval_answers=512))


def run(job):
    "(name, seed) -> its row, and a row of dials for each iteration."
    import torch
    from rlhf_notes.studies.variants import measure
    from rlhf_notes.studies.failures import DIALS, attempt
    torch.set_num_threads(1)
    name, seed = job
    outcome, rows = (measure(start(seed).trainer(), start(seed).lm), []) if name == PRETRAINED else attempt(name, start(seed))
    def mean(dial):
        x = [r[dial] for r in rows if r[dial] is not None]
        return sum(x) / len(x) if x else None
    return [name, seed, *(number(outcome.get(c)) for c in OUTCOME), *(number(mean(d)) for d in DIALS)], [[name, seed, r["iteration"], *(number(r[d]) for d in DIALS)] for r in rows]


def read(path, columns):
    if not path.exists(): return []
    with open(path, newline="", encoding="utf-8") as f: return [[r[c] for c in columns] for r in csv.DictReader(f) if r[columns[-1]] is not None]         # a line cut short is made again


def write(path, columns, rows):
    tmp = path.with_name(f".{path.name}.tmp")
    with open(tmp, "w", newline="", encoding="utf-8") as f: csv.writer(f, lineterminator="\n").writerows([columns, *rows])
    tmp.replace(path)


def rlhf(args):
    from rlhf_notes.studies.failures import BASES, DIALS, FAILURES
    names = [PRETRAINED, *BASES, *FAILURES]
    if unknown := [name for name in args.only or () if name not in names]: sys.exit(f"failures.py: unknown failure {unknown[0]!r}; expected some of {', '.join(names)}")
    columns, dial_columns = ("failure", "seed", *OUTCOME, *(f"mean_{d}" for d in DIALS)), ("failure", "seed", "iteration", *DIALS)
    path, dial_path = (args.out / "failures.csv", args.out / "dials.csv") if args.out else (RESULTS, DIALS_CSV)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, dials = ([] if args.fresh else read(p, c) for p, c in ((path, columns), (dial_path, dial_columns)))
    chosen = [n for n in names if not args.only or n in args.only or n == PRETRAINED or n in BASES]
    wanted = [(name, seed) for seed in range(args.first, args.first + args.rlhf_seeds) for name in chosen]
    done = {(r[0], int(r[1])) for r in rows}
    todo = [job for job in wanted if job not in done]
    print(f"RLHF: {len(todo)} trainings to do, {len(wanted) - len(todo)} done before: about {len(todo) * SECONDS / args.jobs / 60:.0f} minutes on quiet cores", flush=True)
    begin = time.perf_counter()
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        try:
            for n, future in enumerate(as_completed([pool.submit(run, job) for job in todo]), 1):
                row, curve = future.result()
                rows = sorted([*rows, row], key=lambda r: (int(r[1]), names.index(r[0]) if r[0] in names else len(names)))
                write(path, columns, rows)
                if row[1] == 0 or row[0] in BASES and row[1] < FRESH:
                    dials = sorted([*dials, *curve], key=lambda r: (names.index(r[0]) if r[0] in names else len(names), int(r[1]), int(r[2])))
                    write(dial_path, dial_columns, dials)
                print(f"{n} of {len(todo)}, {(time.perf_counter() - begin) / n * (len(todo) - n) / 60:.0f} min left: {row[0]}, seed {row[1]}: true score {row[3]}, KL {row[4]}, win {row[6]}", flush=True)
        except BaseException: pool.shutdown(wait=False, cancel_futures=True); raise


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("control", "rlhf"), help="only this one (default: both)")
    parser.add_argument("--seeds", type=int, default=20, help="of control, from 0 on (default: 20)")
    parser.add_argument("--rlhf-seeds", type=int, default=10, help="of RLHF (default: 10)")
    parser.add_argument("--first", type=int, default=0, help="RLHF: the first seed (default: 0)")
    parser.add_argument("--only", nargs="+", metavar="FAILURE", help="RLHF: only these, and the intact trainings")
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread side by side (default: 1)")
    parser.add_argument("--fresh", action="store_true", help="begin again, without what is in the files")
    parser.add_argument("--out", type=Path, help="RLHF: the directory of both files")
    args = parser.parse_args()
    if args.part != "rlhf": subprocess.run([sys.executable, str(HERE / "details.py"), "--jobs", str(args.jobs), "--seeds", str(args.seeds), *["--fresh"] * args.fresh], check=True)
    if args.part != "control": rlhf(args)


if __name__ == "__main__":
    main()
