"""Train the reward model with several seeds and keep what it was worth as it learned.

    python benchmarks/reward_model.py
    python benchmarks/reward_model.py --labels 8192 --seeds 3 --out /tmp

Each seed pretrains a language model of its own, draws labels of its own, and trains on them in an
order of its own; any option of `ReviewsConfig` may be given. Writes reward_model.csv, a row for
each seed and each of some eleven moments, all measured on the same number of responses of that
language model to held-out prompts, four to each:

    labels          how many the model was trained on by then
    pairs           share of the pairs of responses to one prompt, unequal in truth, that the reward
                    puts in the right order
    best            how often the highest reward of four is (one of) the truly best
    correlation     of rewards and true scores
    foreseen        how often the highest reward of four is what the human chooses: the expectation
                    over the human's noise
    twice, ceiling  the same for the human asked a second time, and for the true score
    gain, bias      of the norm, if it were set then; score_mean and score_std are of the rewards of
                    the held-out responses after that norm
"""
import argparse
import dataclasses
import sys
from pathlib import Path

import torch
from jobs import text, write

from rlhf_notes.reviews.config import ReviewsConfig

OUT = Path(__file__).resolve().parent.parent / "nbs" / "reviews" / "results"
COLUMNS = ("seed", "labels", "pairs", "best", "correlation", "foreseen", "twice", "ceiling", "gain",
           "bias", "score_mean", "score_std")


def measure(stage, prompts, mask, responses, counts, true):
    "What the reward model is worth as it is now; the training does not notice."
    from rlhf_notes.formulas.reward import RewardNorm
    from rlhf_notes.reviews.reward_model import agreement
    norm = RewardNorm().fit(stage.reference_rewards())
    with torch.no_grad():
        rewards = norm(stage.model.score(prompts, mask, responses, counts)).view(-1, 4)
    p = (true.double() / stage.config.human_temperature).softmax(1)
    return agreement(rewards, true) | dict(
        foreseen=p.gather(1, rewards.argmax(1, keepdim=True)).mean().item(),
        twice=p.square().sum(1).mean().item(), ceiling=p.amax(1).mean().item(),
        gain=norm.gain, bias=norm.bias,
        score_mean=rewards.mean().item(), score_std=rewards.std(correction=0).item())


def run(config, held_out):
    "One seed: its rows."
    from rlhf_notes.reviews.pipeline import make_world
    from rlhf_notes.reviews.pretraining import Pretraining
    from rlhf_notes.reviews.reward_model import RewardTraining, write_responses
    lm, task = make_world(config, torch.device("cpu"))
    pretraining = Pretraining(config, lm, task)
    while pretraining.iteration < pretraining.iterations: pretraining.iterate()
    prompts, mask = (x.repeat_interleave(4, 0) for x in task.held_out(held_out))
    generator = torch.Generator().manual_seed(10_000 + config.seed)
    responses, counts = write_responses(config, lm, task, prompts, mask, generator)
    true = task.true_rewards(prompts, mask, responses).view(-1, 4)
    stage = RewardTraining(config, lm, task)
    moments = {0, stage.iterations, *(round(stage.iterations / 2 ** (i / 2)) for i in range(13))}
    while True:
        if stage.iteration in moments:
            labels = min(stage.iteration * config.rm_batch, config.rm_epochs * config.labels)
            found = measure(stage, prompts, mask, responses, counts, true)
            yield dict(seed=config.seed, labels=labels) | found
        if stage.iteration == stage.iterations: return
        stage.iterate()


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in dataclasses.fields(ReviewsConfig):
        if f.name in ("seed", "device", "model") or type(f.default) not in (int, float, str):
            continue
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default),
                            default=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on (default: 5)")
    parser.add_argument("--held-out", type=int, default=1040,
                        help="prompts, with four responses each, to measure on (default: 1040)")
    parser.add_argument("--out", type=Path, default=OUT,
                        help="where it goes (default: nbs/reviews/results)")
    given = vars(parser.parse_args())
    seeds, held_out, out = (given.pop(name) for name in ("seeds", "held_out", "out"))
    try: configs = [ReviewsConfig(seed=seed, **given) for seed in range(seeds)]
    except (ValueError, TypeError) as e: sys.exit(f"reward_model.py: {e}")
    torch.set_num_threads(1)
    rows = []
    for config in configs:
        rows += run(config, held_out)
        print(", ".join(f"{name} {rows[-1][name]:.4g}" for name in COLUMNS), flush=True)
    write(out / "reward_model.csv", COLUMNS, [[text(row[c]) for c in COLUMNS] for row in rows])
    print(out / "reward_model.csv")


if __name__ == "__main__":
    main()
