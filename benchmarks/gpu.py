"""How fast the formulas are on the GPU at hand: log-probability, entropy and GAE against naive code, DI-engine, TRL and Liger-Kernel where they are installed.

    python benchmarks/gpu.py                       # three shapes of logits, float32 and bfloat16, and GAE; no network, minutes
    python benchmarks/gpu.py --sizes small         # one of them; or a shape of your own: --sizes 4x128x32000

Writes speed_gpu.csv and speed_gpu.md into nbs/studies/results, with the name of the device. What does not fit into its memory is left out, and said.
"""
import argparse
import csv
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "nbs" / "studies" / "results"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--sizes", nargs="+", default=["small", "medium", "promise", "large"], help="of the logits: small, medium, promise (16x1024x50257), large, or BxTxV (default: the four)")
    parser.add_argument("--rounds", type=int, default=15, help="how often each method is timed (default: 15)")
    parser.add_argument("--seconds", type=float, default=240, help="no new shape is begun after so many (default: 240)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the directory")
    args = parser.parse_args(argv)
    import torch
    from rlhf_notes import fast
    from rlhf_notes.studies import speed
    if args.device.startswith("cuda") and not torch.cuda.is_available(): parser.exit(2, "gpu.py: no CUDA device is there\n")
    known = speed.SIZES | {"promise": (16, 1024, 50257)}
    start, name = time.time(), speed.device_name(args.device)
    print(f"{name}, torch {torch.__version__}, Triton kernels: {'used' if fast.has_kernels(torch.ones(1, device=args.device)) else 'not used'}, copy {speed.copy_bandwidth(args.device) / 1e9:.0f} GB/s", flush=True)
    rows, notes = [], []
    args.out.mkdir(parents=True, exist_ok=True)

    def done(new):
        rows.extend(new)
        with open(args.out / "speed_gpu.csv", "w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, speed.COLUMNS)
            writer.writeheader(); writer.writerows(rows)
        lines = [" | ".join(line) for line in speed.table(rows)]
        text = [f"# {name}, torch {torch.__version__}, {args.rounds} rounds", "", *notes, "", f"| {lines[0]} |", "|" + "---|" * len(speed.table(rows)[0]), *(f"| {line} |" for line in lines[1:])]
        (args.out / "speed_gpu.md").write_text("\n".join(text) + "\n", encoding="utf-8")

    for case in speed.gae_cases(args.device): done(speed.measure(case, args.device, args.rounds, speed.copy_bandwidth(args.device)))
    for size in args.sizes:
        if time.time() - start > args.seconds: notes.append(f"{size} was left out: {args.seconds:.0f} seconds were over."); print(notes[-1]); continue
        shape = known.get(size) or tuple(map(int, size.split("x")))
        speed.bench((shape,), args.device, args.rounds, done=done, left_out=lambda words: (notes.append(words + "."), print(words)), tasks=speed.TASKS[:-1])
        print(f"{size}: done after {time.time() - start:.0f} s", flush=True)
    if rows: done([])
    print((args.out / "speed_gpu.md").read_text(encoding="utf-8"))


if __name__ == "__main__": main()
