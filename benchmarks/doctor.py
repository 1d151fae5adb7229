"""Judge `rlhf-notes doctor` on planted failures, with seeds that did not make its rules.

    python benchmarks/doctor.py

Writes into nbs/studies/results: doctor_runs.csv, the dials of failures that the doctor claims to
know and of intact trainings, in each iteration (recorded once; trainings that stand there are not
repeated); doctor.csv, a row for each run: the failure, the seed, and the faults that were named.
The rules were made on seed 0 of the failures' dials; seeds 200 and 201 judge them.
"""
from failures import BASES, DIALS, FAILURES, SECONDS, run
from jobs import RESULTS, options, read, side_by_side, write

KNOWN = ("temperature forgotten", "no KL", "KL reversed", "k3 in the reward", "reference moves",
         "paid at the edge", "paid everywhere", "no truncation", "sixteen minibatches",
         "eight epochs", "rate x 5", "positions differ", "scores as they come", "scaled too early",
         "GRPO: k1 in the loss", "GRPO: no KL")
COLUMNS = "failure", "seed", "iteration", *DIALS


def record(args):
    "The dials of each training, from the file or from a training of now."
    path = args.out / "doctor_runs.csv"
    rows = [] if args.fresh else read(path, COLUMNS)
    done, names = {(r[0], int(r[1])) for r in rows}, [*BASES, *KNOWN]
    todo = [(name, seed) for seed in args.seeds for name in names if (name, seed) not in done]
    for _, curve in side_by_side(run, todo, args.jobs, lambda job: SECONDS):
        rows = sorted([*rows, *curve], key=lambda r: (int(r[1]), names.index(r[0]), int(r[2])))
        write(path, COLUMNS, rows)
    return rows


def main():
    args = options(__doc__, RESULTS, 2, FAILURES, first=200)
    rows = record(args)
    runs = {}
    for r in rows:
        numbers = {k: float(x) for k, x in zip(COLUMNS[2:], r[2:]) if x != ""}
        runs.setdefault((r[0], int(r[1])), []).append(numbers)
    from rlhf_notes.doctor import examine
    found = [(*key, "; ".join(x.fault for x in examine(run))) for key, run in runs.items()]
    write(args.out / "doctor.csv", ("failure", "seed", "found"), found)


if __name__ == "__main__": main()
