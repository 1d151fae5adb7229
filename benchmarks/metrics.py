"""Short trainings, each with one thing wrong, and a healthy one: every number that they log.

    python benchmarks/metrics.py

Writes metrics_control.csv, metrics_sft.csv, metrics_reward_model.csv and metrics_rl.csv into
nbs/results: the rows of metrics.csv, sft.csv and reward_model.csv of a run directory, with the name
of the run before them. A name such as learning_rate=0.05 is the option that was changed; sampled_at
is no option but a mistake that is made on purpose. One seed each: they show what a sickness looks
like, not how often it strikes. About eight minutes on one core. `nbs/metrics.ipynb` draws them.
"""
import argparse
import time
from pathlib import Path

from jobs import text, write

OUT = Path(__file__).resolve().parent.parent / "nbs" / "results"
CONTROL = (dict(), dict(learning_rate=0.05, lr_anneal=0.0), dict(learning_rate=0.2, lr_anneal=0.0),
           dict(learning_rate=3e-5), dict(value_coef=0.0), dict(reward_scale=100.0),
           dict(whitening="none"))
SFT = (dict(), dict(sft_learning_rate=0.2), dict(sft_learning_rate=5e-5))
REWARD_MODEL = (dict(), dict(rm_learning_rate=0.05), dict(human_temperature=100.0))
RL = (dict(), dict(learning_rate=0.02), dict(learning_rate=2e-5), dict(kl_coef=0.0),
      dict(kl_coef=2.0), dict(kl_horizon=100), dict(penalty=5.0), dict(epochs=8),
      dict(value_clip=0.005), dict(sampled_at=0.7))
SHORT = dict(sft_steps=4, sft_batch=8, labels=16, norm_samples=16, batch=16, iterations=2,
             eval_responses=12, eval_every=1)


def name(change): return ", ".join(f"{k}={v}" for k, v in change.items()) or "healthy"


def finish(stage):
    "The rows of a stage until its end, or until its numbers are no numbers any more."
    rows = []
    try:
        while stage.iteration < stage.iterations: rows.append(stage.iterate())
    except FloatingPointError as e: print(e, flush=True)
    return rows


def control(change):
    from rlhf_notes.control.trainer import PPO
    ppo = PPO(**change)
    c = ppo.config
    # steps of the budget, which counts resets too
    return [ppo.iterate() | dict(steps=(i + 1) * c.batch) for i in range(c.iterations)]


def reinforce(start, change):
    "PPO on a language model; the loss does not know the temperature `sampled_at`."
    from rlhf_notes.hub import prompts
    from rlhf_notes.reviews.pipeline import evaluate
    change = dict(change)
    temperature = change.pop("sampled_at", None)
    trainer, rows = start.trainer(**change), []
    if temperature:
        collect = trainer.collect

        def colder(*inputs):
            plain = prompts.sample
            prompts.sample = lambda *args, **options: plain(*args[:-1], temperature, **options)
            try:
                return collect(*inputs)
            finally:
                prompts.sample = plain
        trainer.collect = colder
    try:
        while trainer.iteration < trainer.iterations:
            rows.append(trainer.iterate())
            if trainer.iteration % trainer.config.eval_every == 0:
                rows[-1]["true_score"] = evaluate(trainer).true.mean().item()
    except FloatingPointError as e: print(e, flush=True)
    return rows


def main():
    import torch

    from rlhf_notes.reviews.config import ReviewsConfig
    from rlhf_notes.reviews.pipeline import make_world
    from rlhf_notes.reviews.pretraining import Pretraining
    from rlhf_notes.reviews.reward_model import RewardTraining
    from rlhf_notes.studies.variants import Start
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few steps of each, as a test")
    parser.add_argument("--out", type=Path, default=OUT, help="the directory")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    base, few = dict(device="cpu"), {}
    if args.short:
        base, few = base | SHORT, dict(steps=2048)

    def table(file, changes, run):
        columns, lines = None, []
        for change in changes:
            rows = run(change)
            columns = columns or list(rows[0])
            lines += [[name(change), *(text(row[c]) for c in columns)] for row in rows]
            print(f"{time.perf_counter() - began:.0f} s: {file}, {name(change)}, {len(rows)} rows",
                  flush=True)
            write(args.out / file, ["run", *columns], lines)

    made = {}
    def sft(change):
        c = ReviewsConfig(**base | change)
        lm, task = make_world(c, torch.device("cpu"))
        rows = finish(Pretraining(c, lm, task))
        if not change: made.update(config=c, lm=lm, task=task)
        return rows
    def reward_model(change):
        stage = RewardTraining(ReviewsConfig(**base | change), made["lm"], made["task"])
        rows = finish(stage)
        if not change: made.update(reward_model=stage.model, norm=stage.norm)
        return rows

    table("metrics_control.csv", CONTROL, lambda change: control(change | few))
    table("metrics_sft.csv", SFT, sft)
    table("metrics_reward_model.csv", REWARD_MODEL, reward_model)
    start = Start(**made)
    table("metrics_rl.csv", RL, lambda change: reinforce(start, change))


if __name__ == "__main__": main()
