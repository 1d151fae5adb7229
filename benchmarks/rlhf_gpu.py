"""How fast RLHF is on the device at hand, with TRL's GRPOTrainer beside it: tokens a second in
sampling, scoring and update, and peak memory.

    python benchmarks/rlhf_gpu.py                              # three sizes in bfloat16, on a GPU
    python benchmarks/rlhf_gpu.py --device cpu --sizes tiny    # the same on a CPU

The sizes are the tiny GPT-2, GPT-2's own 124M architecture, and a Llama as large as Qwen2-0.5B,
which transformers computes. Writes gpu.csv and gpu.md into nbs/studies/results, with the name of
the device. It needs no network and no weights: models are made here and are not trained before,
which changes none of these numbers. TRL is left out where it is not installed, and with `--no-
trl`. Its trainer takes all GPUs it sees: with several, set CUDA_VISIBLE_DEVICES to one.
"""
import argparse
import time
from pathlib import Path

from jobs import RESULTS, write

COLUMNS = ("device", "torch", "size", "precision", "contender", "batch", "response_length",
           "iterations", "tokens_per_second", "sampling", "scoring", "update", "peak_memory_MiB")
SIZES = "tiny", "gpt2-small", "llama-0.5b"
LLAMA = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
             num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True)
PARTS = "sampling", "scoring", "update"


def timed(method, seconds, part, cuda):
    "The same method; its time is added to `seconds[part]`."
    import torch
    def run(*args, **options):
        if cuda: torch.cuda.synchronize()
        start = time.perf_counter()
        out = method(*args, **options)
        if cuda: torch.cuda.synchronize()
        seconds[part] += time.perf_counter() - start
        return out
    return run


def ours(trainer, iterations, cuda):
    "Tokens a second: of the whole, and of each part, for which each part is waited for."
    trainer.iterate()  # warm up
    rows = [trainer.iterate() for _ in range(iterations)]
    each = trainer.config.batch * trainer.config.response_length
    whole = sum(each / r["tokens_per_second"] for r in rows)
    seconds = dict.fromkeys(PARTS, 0.0)
    from rlhf_notes.hub import prompts
    sample = prompts.sample
    prompts.sample = timed(sample, seconds, "sampling", cuda)
    trainer.collect = timed(trainer.collect, seconds, "scoring", cuda)
    trainer.step = timed(trainer.step, seconds, "update", cuda)
    try:
        for _ in range(iterations):
            trainer.iterate()
    finally:
        prompts.sample = sample
    seconds["scoring"] -= seconds["sampling"]
    return [iterations * each / s for s in (whole, *seconds.values())]


def options(size, folder):
    "What the config says of a model of this size; an untrained Llama is written to the folder."
    if size != "llama-0.5b": return dict(preset=size)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_notes.reviews.task import make_tokenizer
    make_tokenizer().save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    return dict(model=folder)


def measure(device, size, precision, batch, length, iterations, trl):
    "A row for ours with PPO and with GRPO, and for TRL's GRPOTrainer."
    import gc
    import tempfile

    import torch

    from rlhf_notes.reviews.config import ReviewsConfig
    from rlhf_notes.studies import benchmark_rlhf as compare
    from rlhf_notes.studies.variants import prepare
    cuda = device.startswith("cuda")
    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    with tempfile.TemporaryDirectory() as folder:
        start = prepare(ReviewsConfig(**options(size, folder), device=device, precision=precision,
                                   batch=batch, response_length=length, sft_steps=0, labels=16,
                                   norm_samples=16, eval_responses=16, kl_target=0.0))
    known = compare.contenders()
    for contender in ("ours-ppo", "ours-grpo", *["trl-grpo"] * (trl and "trl-grpo" in known)):
        gc.collect()  # the peak is of one contender
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        if contender.startswith("ours"):
            trainer = start.trainer(**known[contender][1], iterations=2 * iterations + 1)
            speeds = ours(trainer, iterations, cuda)
            del trainer
        else:
            speeds = [compare.race(contender, start, iterations)["tokens_per_second"], "", "", ""]
        memory = torch.cuda.max_memory_allocated(device) / 2**20 if cuda else ""
        yield [name, torch.__version__, size, precision, contender, batch, length, iterations,
               *(f"{v:.0f}" if v != "" else "" for v in (*speeds, memory))]


def save(rows, out):
    "What was measured so far, as CSV and Markdown."
    write(out / "gpu.csv", COLUMNS, rows)
    lines = [COLUMNS[2:], ["---"] * len(COLUMNS[2:]), *(r[2:] for r in rows)]
    table = "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
    text = f"{rows[0][0]}, torch {rows[0][1]}; tokens a second\n\n{table}"
    (out / "gpu.md").write_text(text, encoding="utf-8")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--sizes", nargs="+", default=SIZES, choices=SIZES,
                        help="default: all three")
    parser.add_argument("--precision", default="bfloat16", choices=("float32", "bfloat16"),
                        help="default: bfloat16")
    parser.add_argument("--batch", type=int, default=512,
                        help="responses in an iteration (default: 512)")
    parser.add_argument("--response-length", type=int, default=48,
                        help="tokens of each (default: 48)")
    parser.add_argument("--iterations", type=int, default=5,
                        help="that count; one comes before, as many follow for the parts "
                             "(default: 5)")
    parser.add_argument("--trl", action=argparse.BooleanOptionalAction, default=True,
                        help="TRL's GRPOTrainer too")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the directory")
    args = parser.parse_args(argv)
    from rlhf_notes.training.devices import pick_device
    try:
        device = pick_device(args.device)
    except ValueError as e:
        parser.error(str(e))
    rows = []
    for size in args.sizes:
        for row in measure(device, size, args.precision, args.batch, args.response_length,
                           args.iterations, args.trl):
            rows.append(row)
            print(", ".join(f"{c} {v}" for c, v in zip(COLUMNS, row) if v != ""), flush=True)
            save(rows, args.out)


if __name__ == "__main__": main()
