"""How fast the formulas are on the GPU at hand: log-probability, entropy and GAE against naive
code, DI-engine, TRL and Liger-Kernel where they are installed.

    python benchmarks/gpu.py                         # four shapes of logits, two dtypes, and GAE
    python benchmarks/gpu.py --sizes small           # one of them
    python benchmarks/gpu.py --sizes 4x128x32000     # a shape of your own

Takes minutes and no network. Writes speed_gpu.csv and speed_gpu.md into nbs/studies/results, with
the name of the device. What does not fit into its memory is left out, and said.
"""
import argparse
import time
from pathlib import Path

from jobs import RESULTS, write

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--sizes", nargs="+", default=["small", "medium", "promise", "large"],
                        help="of the logits: small, medium, promise (16x1024x50257), large, or "
                             "BxTxV (default: the four)")
    parser.add_argument("--rounds", type=int, default=15,
                        help="how often each method is timed (default: 15)")
    parser.add_argument("--seconds", type=float, default=240,
                        help="no new shape is begun after so many (default: 240)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the directory")
    args = parser.parse_args(argv)
    import torch

    from rlhf_notes import fast
    from rlhf_notes.studies import speed
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.exit(2, "gpu.py: no CUDA device is there\n")
    known = speed.SIZES | {"promise": (16, 1024, 50257)}
    start, name = time.time(), speed.device_name(args.device)
    kernels = "used" if fast.has_kernels(torch.ones(1, device=args.device)) else "not used"
    bandwidth = speed.copy_bandwidth(args.device)
    print(f"{name}, torch {torch.__version__}, Triton kernels: {kernels}, "
          f"copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    rows, notes = [], []

    def done(new):
        rows.extend(new)
        write(args.out / "speed_gpu.csv", speed.COLUMNS,
              [[row[c] for c in speed.COLUMNS] for row in rows])
        head, *lines = speed.table(rows)
        table = [head, ["---"] * len(head), *lines]
        text = [f"# {name}, torch {torch.__version__}, {args.rounds} rounds", "", *notes, "",
                *(f"| {' | '.join(line)} |" for line in table)]
        (args.out / "speed_gpu.md").write_text("\n".join(text) + "\n", encoding="utf-8")

    def left_out(what):
        notes.append(what + ".")
        print(notes[-1])

    for case in speed.gae_cases(args.device):
        done(speed.measure(case, args.device, args.rounds, bandwidth))
    for size in args.sizes:
        if time.time() - start > args.seconds:
            left_out(f"{size} was left out: {args.seconds:.0f} seconds were over")
            continue
        shape = known.get(size) or tuple(map(int, size.split("x")))
        speed.bench((shape,), args.device, args.rounds, done=done, left_out=left_out,
                    tasks=speed.TASKS[:-1])
        print(f"{size}: done after {time.time() - start:.0f} s", flush=True)
    if rows: done([])
    print((args.out / "speed_gpu.md").read_text(encoding="utf-8"))


if __name__ == "__main__": main()
