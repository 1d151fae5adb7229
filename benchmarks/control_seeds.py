"""Train a task with many seeds and keep how each of them learned.

    python benchmarks/control_seeds.py cartpole
    python benchmarks/control_seeds.py pendulum
    python benchmarks/control_seeds.py pendulum --no-stagger --name pendulum_together
    python benchmarks/control_seeds.py cartpole --lr-anneal 2 --learning-rate 4.5e-3 \\
        --name cartpole_squared
    python benchmarks/control_seeds.py cartpole --seeds 120 --final --jobs 2 --name cartpole_many
    python benchmarks/control_seeds.py cartpole --first 300 --seeds 60 --final \\
        --name cartpole_unseen
    python benchmarks/control_seeds.py cartpole --first 400 --seeds 60 --final --name cartpole_fresh

Any option of `rlhf-notes TASK` may follow. Writes NAME_seeds.csv, a row for each seed:

    eval_*     the final policy over 100 fresh episodes, greedy and sampled; solved: both means
               reach the threshold
    train_seconds, steps_per_second     of training alone, without the evaluations
    first_greedy_*, first_sampled_*     when the mean over 100 fresh episodes first reached the
                                        threshold, in steps (of the budget, which counts resets
                                        too) and in seconds of training; blank if never

and NAME_curves.csv, a row for each iteration, with those evaluations in every second of them
(`--every`). With `--final` only the final policy is evaluated, and there are no curves. Each
evaluation has a seed of its own, so none is on what was trained on, and none decides anything in
the training. The first seed of a process also pays for PyTorch's warming up. All but the seconds
comes out the same again on the same machine; another one may round float32 differently.
"""
import sys
import time
from pathlib import Path

from cyclopts import App
from jobs import side_by_side, text, write

from rlhf_notes.cli import TASKS, options_of

OUT = Path(__file__).resolve().parent.parent / "nbs" / "control" / "results"
FINAL = ("eval_return_mean", "eval_return_std", "eval_sampled_return_mean",
         "eval_sampled_return_std", "solved")
SPEED = ("steps", "train_seconds", "steps_per_second", "first_greedy_steps", "first_greedy_seconds",
         "first_sampled_steps", "first_sampled_seconds")
CURVE = ("iteration", "steps", "episodes", "return_mean", "entropy", "kl_k3", "clip_fraction",
         "explained_variance", "learning_rate")


def run(config, every):
    "One seed: its row of NAME_seeds.csv and its rows of NAME_curves.csv."
    import numpy as np
    import torch

    from rlhf_notes.control.envs import threshold
    from rlhf_notes.control.trainer import PPO
    torch.set_num_threads(1)
    ppo, enough, seconds, curve, first = PPO(**vars(config)), threshold(config.env), 0.0, [], {}
    seeds = np.random.SeedSequence((config.seed, 1)).generate_state(2 * config.iterations).tolist()
    while ppo.iteration < config.iterations:
        start = time.perf_counter()
        row = ppo.iterate()
        row["steps"] = ppo.iteration * config.batch  # of the budget, which counts resets too
        seconds += time.perf_counter() - start
        evaluated = {"greedy": None, "sampled": None}
        if every and (ppo.iteration % every == 0 or ppo.iteration == config.iterations):
            for mode in evaluated:
                mean = ppo.evaluate(deterministic=mode == "greedy", seed=seeds.pop()).mean().item()
                if enough is not None and mean >= enough:
                    first.setdefault(mode, (row["steps"], seconds))
                evaluated[mode] = mean
        curve.append([config.seed, *(row[c] for c in CURVE), seconds, *evaluated.values()])
    final = ppo.scores()
    reached = [x for mode in ("greedy", "sampled") for x in first.get(mode, (None, None))]
    speed = row["steps"], seconds, row["steps"] / seconds
    return [config.seed, *(final[c] for c in FINAL), *speed, *reached], curve


def train(config, options, first, seeds, jobs, every, final, name, out):
    try:
        work = [(config(seed=seed, **options), 0 if final else every)
                for seed in range(first, first + seeds)]
    except ValueError as e:
        sys.exit(f"control_seeds.py: {e}")
    done = sorted(side_by_side(run, work, jobs, lambda job: 3.0))
    def table(rows): return [[text(x) for x in row] for row in rows]
    write(out / f"{name}_seeds.csv", ("seed", *FINAL, *SPEED), table(last for last, _ in done))
    if not final:
        write(out / f"{name}_curves.csv", ("seed", *CURVE, "train_seconds", "greedy", "sampled"),
              table(row for _, curve in done for row in curve))


def command(app, task, config):
    @app.command(name=task)
    @options_of(config, without=("env", "seed") if task != "train" else ("seed",))
    def run_all(*, first: int = 0, seeds: int = 20, jobs: int = 1, every: int = 2,
                final: bool = False, name: str = task, out: Path = OUT, **options):
        """Train with many seeds.

        Parameters
        ----------
        first: the first seed
        seeds: how many, from the first on
        jobs: processes of one thread side by side
        every: iterations between two evaluations
        final: evaluate the final policy alone, and write no curves
        name: how the files begin
        out: where they go
        """
        train(config, options, first, seeds, jobs, every, final, name, out)


def main():
    app = App(name="control_seeds.py", help=__doc__)
    for task in ("cartpole", "pendulum", "train"): command(app, task, TASKS[task][0])
    app()


if __name__ == "__main__":
    main()
