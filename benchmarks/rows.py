"""Log-probability, entropy and GAE beside the line that everybody writes, from small to large.

    python benchmarks/rows.py                  # five minutes on two quiet cores

Writes nbs/studies/results/rows.csv: `ratio` is our time over the naive line's in the same round,
the median of the rounds with its 95% interval; `allowed` is 1.1 plus 60 us over the naive time.
Method 1 is `logits.log_softmax(-1).gather(-1, index)`, `-(p.exp() * p).sum(-1)` of that
log-softmax, or a loop over time in NumPy.
"""
import argparse
import statistics
import time

import numpy as np
import torch
from jobs import RESULTS, write

from rlhf_notes.formulas import advantage as adv
from rlhf_notes.formulas import logprob as lp
from rlhf_notes.studies import speed

SHAPES = ((2, 16, 110), (2, 16, 300), (4, 16, 1000), (4, 16, 2000), (4, 16, 5000), (4, 32, 8000),
          (8, 64, 2000), (1, 16, 50257), (8, 64, 5000), (8, 128, 32000))
GAE = ((128, 8), (128, 32), (2048, 64), (5, 1024), (512, 64))
COLUMNS = ("device", "threads", "task", "shape", "dtype", "passes", "rounds", "naive_us", "ours_us",
           "ratio", "ratio_low", "ratio_high", "allowed")
NAIVE = {"log-probability": speed._naive_log_prob,
         "entropy": lambda z, i: speed._naive_entropy(z),
         "both": lambda z, i: (speed._naive_log_prob(z, i), speed._naive_entropy(z))}
OURS = {"log-probability": lp.selective_log_softmax,
        "entropy": lambda z, i: lp.entropy_from_logits(z),
        "both": lp.log_probs_and_entropy}

def numpy_gae(r, v, after, done, gamma=0.99, lam=0.95):
    "GAE as stable-baselines3 writes it, a row of NumPy for each step."
    r, v, after, done = (x.numpy() for x in (r, v, after, done))
    A, last = np.zeros_like(r), 0
    for t in reversed(range(len(r))):
        going = 1.0 - done[t].astype(r.dtype)
        delta = r[t] + gamma * after[t] * going - v[t]
        A[t] = last = delta + gamma * lam * going * last
    return torch.from_numpy(A), torch.from_numpy(A + v)

def seconds(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start

def compare(naive, ours, rounds):
    "Medians, and the median ratio with its 95% interval from the order of the ratios."
    for f in (naive, ours, naive, ours):
        first = seconds(f)
    repeats = max(1, int(2e-3 / first))
    rounds = rounds if first < 0.1 else rounds // 4
    def turn(f): return min(seconds(f), seconds(lambda: [f() for _ in range(repeats)]) / repeats)
    turns = [(turn(naive), turn(ours)) for _ in range(rounds)]
    ratios, edge = sorted(b / a for a, b in turns), 0.98 * rounds**0.5
    low, high = int(rounds / 2 - edge), int(rounds / 2 + edge)
    times = [statistics.median(x) * 1e6 for x in zip(*turns)]
    return [rounds, *(round(t, 1) for t in times), *(round(x, 3) for x in (
        statistics.median(ratios), ratios[max(0, low)], ratios[min(high, rounds - 1)],
        1.1 + 60 / times[0]))]

def logit_rows(shape, dtype, rounds):
    z = (3 * torch.randn(shape)).to(dtype).requires_grad_()
    i, g = torch.randint(shape[-1], shape[:2]), torch.randn(shape[:2])
    def run(f, backward):
        if not backward:
            with torch.no_grad(): return f(z, i)
        out = f(z, i)
        torch.autograd.grad(out, z, [g] * len(out) if isinstance(out, tuple) else g)
    for task in NAIVE:
        for backward in (False, True):
            found = compare(lambda: run(NAIVE[task], backward),
                            lambda: run(OURS[task], backward), rounds)
            yield task, shape, dtype, "forward + backward" if backward else "forward", found

def gae_rows(T, N, rounds):
    r, v, after = torch.randn(3, T, N)
    done = torch.rand(T, N) < 0.02
    found = compare(lambda: numpy_gae(r, v, after, done),
                    lambda: adv.gae(r, v, after, done, done), rounds)
    yield "GAE", (T, N), torch.float32, "forward", found

def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args, rows = parser.parse_args(), []
    torch.manual_seed(0)
    for threads in args.threads:
        torch.set_num_threads(threads)
        logits = (x for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)
                  for x in logit_rows(shape, dtype, args.rounds))
        times = (x for shape in GAE for x in gae_rows(*shape, args.rounds))
        for each in (logits, times):
            for task, shape, dtype, passes, found in each:
                rows.append([speed.device_name("cpu"), threads, task, "x".join(map(str, shape)),
                             str(dtype).removeprefix("torch."), passes, *found])
                print(*rows[-1][1:], flush=True)
                write(RESULTS / "rows.csv", COLUMNS, rows)
    over = [r for r in rows if r[COLUMNS.index("ratio")] > r[-1]]
    print(f"{len(over)} of {len(rows)} are above what is allowed")

if __name__ == "__main__":
    main()
