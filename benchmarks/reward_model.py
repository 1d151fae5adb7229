"""Train the reward model with several seeds and keep what it was worth as it learned.

    python benchmarks/reward_model.py
    python benchmarks/reward_model.py --labels 8192 --seeds 3 --out /tmp

Each seed pretrains a language model of its own, draws labels of its own, and trains on them in an order of its own; any option of `RLHFConfig` may be
given. Writes reward_model.csv, a row for each seed and each of some eleven moments, all measured on the same number of answers of that language model to
held-out queries, four to each:

    labels          how many the model was trained on by then
    pairs           share of the pairs of answers to one query, unequal in truth, that the reward puts in the right order
    best            how often the highest reward of four is (one of) the truly best
    correlation     of rewards and true scores
    foreseen        how often the highest reward of four is what the human chooses: the expectation, over the human's noise
    twice, ceiling  the same for the human asked a second time, and for the true score
    gain, bias      of the norm, if it were set then; score_mean and score_std: the rewards of the held-out answers after that norm
"""
import argparse
import csv
import dataclasses
import sys
from pathlib import Path

import torch

from rlhf_notes.language.config import RLHFConfig

OUT = Path(__file__).resolve().parent.parent / "nbs" / "language" / "results"
COLUMNS = ("seed", "labels", "pairs", "best", "correlation", "foreseen", "twice", "ceiling", "gain", "bias", "score_mean", "score_std")


def measure(stage, queries, mask, answers, counts, true):
    "What the reward model is worth as it is now; the training does not notice."
    from rlhf_notes.formulas.reward import RewardNorm
    from rlhf_notes.language.reward_model import agreement, score
    norm = RewardNorm().fit(stage.reference_rewards())
    with torch.no_grad(): rewards = norm(score(stage.model, queries, mask, answers, counts)).view(-1, 4)
    p = (true.double() / stage.config.human_temperature).softmax(1)
    return agreement(rewards, true) | dict(foreseen=p.gather(1, rewards.argmax(1, keepdim=True)).mean().item(), twice=p.square().sum(1).mean().item(), ceiling=p.amax(1).mean().item(),
                                           gain=norm.gain, bias=norm.bias, score_mean=rewards.mean().item(), score_std=rewards.std(correction=0).item())


def run(config, held_out):
    "One seed: its rows."
    from rlhf_notes.language.model import Pretraining
    from rlhf_notes.language.reward_model import RewardTraining, write_responses
    from rlhf_notes.language.pipeline import make_world
    lm, task = make_world(config, torch.device("cpu"))
    pretraining = Pretraining(config, lm, task)
    while pretraining.iteration < pretraining.iterations: pretraining.iterate()
    queries, mask = (x.repeat_interleave(4, 0) for x in task.held_out(held_out))
    answers, counts = write_responses(config, lm, task, queries, mask, torch.Generator().manual_seed(10_000 + config.seed))
    seen = queries, mask, answers, counts, task.true_rewards(queries, mask, answers).view(-1, 4)
    stage = RewardTraining(config, lm, task)
    moments = {0, stage.iterations, *(round(stage.iterations / 2 ** (i / 2)) for i in range(13))}
    while True:
        if stage.iteration in moments: yield dict(seed=config.seed, labels=min(stage.iteration * config.rm_batch, config.rm_epochs * config.labels)) | measure(stage, *seen)
        if stage.iteration == stage.iterations: return
        stage.iterate()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for f in dataclasses.fields(RLHFConfig):
        if f.name not in ("seed", "device", "model") and isinstance(f.default, (int, float, str)) and not isinstance(f.default, bool):
            parser.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), default=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on (default: 5)")
    parser.add_argument("--held-out", type=int, default=1040, help="queries, with four answers each, on which is measured (default: 1040)")
    parser.add_argument("--out", type=Path, default=OUT, help="where it goes (default: nbs/language/results)")
    given = vars(parser.parse_args())
    seeds, held_out, out = (given.pop(name) for name in ("seeds", "held_out", "out"))
    try: configs = [RLHFConfig(seed=seed, **given) for seed in range(seeds)]
    except (ValueError, TypeError) as e: sys.exit(f"reward_model.py: {e}")
    torch.set_num_threads(1)
    rows = []
    for config in configs:
        rows += run(config, held_out)
        print(", ".join(f"{name} {rows[-1][name]:.4g}" for name in COLUMNS), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "reward_model.csv", "w", newline="", encoding="utf-8") as f:
        csv.writer(f, lineterminator="\n").writerows([COLUMNS, *([f"{row[c]:.6g}" for c in COLUMNS] for row in rows)])
    print(out / "reward_model.csv")


if __name__ == "__main__":
    main()
