"""Trainings side by side that go on where they were stopped."""
import argparse
import csv
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "nbs" / "studies" / "results"


def options(doc, out, seeds, names=None, first=0):
    "The options of studies over seeds; with names, --only some of them and --jobs side by side."
    parser = argparse.ArgumentParser(description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=first,
                        help=f"the first seed (default: {first})")
    parser.add_argument("--seeds", type=int, default=seeds, help=f"how many (default: {seeds})")
    if names:
        parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(names),
                            default=list(names), help="some of: " + "; ".join(names))
        parser.add_argument("--jobs", type=int, default=1,
                            help="processes of one thread side by side (default: 1)")
    parser.add_argument("--fresh", action="store_true", help="forget what was written before")
    parser.add_argument("--out", type=Path, default=out, help=f"where to (default: {out})")
    args = parser.parse_args()
    args.seeds = range(args.first, args.first + args.seeds)
    return args


def text(x): return "" if x is None else f"{x:.6g}" if isinstance(x, float) else x


def read(path, columns):
    "The rows of a file, without a line that was cut short."
    if not path.exists(): return []
    with open(path, newline="", encoding="utf-8") as f:
        return [[r[c] for c in columns] for r in csv.DictReader(f) if r[columns[-1]] is not None]


def write(path, columns, rows):
    "Replace a file in one step."
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.tmp")
    with open(tmp, "w", newline="", encoding="utf-8") as f:
        csv.writer(f, lineterminator="\n").writerows([columns, *rows])
    tmp.replace(path)


def resume(run, jobs, args, columns, seconds):
    "The rows run(*job) of the jobs whose own are not there, appended as each ends."
    rows = [] if args.fresh else read(args.out, columns)
    done = [row[:len(jobs[0])] for row in rows]
    todo = [job for job in jobs if [*map(str, job)] not in done]
    for row in side_by_side(run, todo, args.jobs, lambda job: seconds):
        rows.append(row)
        write(args.out, columns, rows)


def names_of(notebook, *cells, **space):
    "What cells of a notebook define, run in this order, in a space that holds the other names."
    from fastcore.nbio import read_nb
    sources = {cell.id: cell.source for cell in read_nb(notebook).cells}
    for cell in cells: exec(sources[cell], space)
    return space


def by_seed(study, args, columns):
    "The rows of study(seed), the seed first, for each seed that has none; written seed by seed."
    import torch
    torch.set_num_threads(1)
    rows = [] if args.fresh else read(args.out, columns)
    done = {int(row[0]) for row in rows}
    for seed in args.seeds:
        if seed in done: continue
        rows += study(seed)
        write(args.out, columns, rows)


def side_by_side(run, todo, jobs, seconds):
    "Yield run(*job) for each job as it ends, from processes of one thread; `seconds` of one job."
    minutes = sum(map(seconds, todo)) / jobs / 60
    print(f"{len(todo)} trainings to do, about {minutes:.0f} minutes on quiet cores", flush=True)
    begin = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            futures = [pool.submit(run, *job) for job in todo]
            for n, future in enumerate(as_completed(futures), 1):
                left = (time.perf_counter() - begin) / n * (len(todo) - n) / 60
                print(f"{n} of {len(todo)}, {left:.0f} min left", flush=True)
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def right(trainer, rows, reward, n=4):
    "Share of right responses to the prompts of `rows`, n to each; the first response to each."
    found = trainer.generate([row["prompt"] for row in rows], seed=1, n=n)
    scores = [reward(responses=texts, solution=[row["solution"]] * n)
              for row, texts in zip(rows, found)]
    return sum(map(sum, scores)) / (n * len(rows)), [texts[0] for texts in found]
