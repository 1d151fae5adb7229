"""Defaults for continuous actions: settings tried on some environments, judged on others.

    pip install 'gymnasium[mujoco]'
    python benchmarks/continuous.py choose                  # two hours on a quiet core
    python benchmarks/continuous.py judge                   # two and a half more
    python benchmarks/continuous.py choose --only Reacher-v5 --settings "8 x 256" --seeds 1

Writes nbs/studies/results/continuous.csv, a row for each training as it ends, and goes on where it
stopped: `recent` is the mean return of the last 20 episodes of the training, `sampled` that of 20
fresh ones by the last policy, drawing; KL and clip fraction are means over the iterations. The
seeds from 100 on choose, on the tasks of `CHOOSE`; those from 200 on judge, on `JUDGE`. No task has
a recipe here: each comes as a function.
"""
import time
import warnings
from argparse import ArgumentParser
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from jobs import RESULTS, read, text, write

from rlhf_notes import PPO
from rlhf_notes.control.config import MUJOCO

OUT = RESULTS / "continuous.csv"
COLUMNS = ("task", "setting", "seed", "steps", "recent", "sampled", "seconds", "kl_k3",
           "clip_fraction")
CHOOSE = {"HalfCheetah-v5": 200_000, "InvertedDoublePendulum-v5": 100_000, "Reacher-v5": 100_000,
          "Pendulum-v1": 60_000}
JUDGE = {"HalfCheetah-v4": 300_000, "Hopper-v4": 300_000, "Walker2d-v4": 300_000,
         "InvertedPendulum-v5": 100_000, "Pendulum-v1": 100_000}
SCALED = dict(normalize_obs=True, normalize_rewards=True, gamma=0.99)


def setting(num_envs, num_steps, epochs, minibatches, learning_rate, **more):
    return SCALED | more | dict(num_envs=num_envs, num_steps=num_steps, epochs=epochs,
                                minibatches=minibatches, learning_rate=learning_rate)


CARTPOLE = dict(num_envs=32, num_steps=32, epochs=4, minibatches=8, learning_rate=3e-3, gamma=0.98)
SETTINGS = {
    "CartPole": CARTPOLE,
    "CleanRL": MUJOCO,
    "1 x 2048, 3e-4": setting(1, 2048, 10, 32, 3e-4),
    "8 x 256, 3e-4": setting(8, 256, 10, 32, 3e-4),
    "32 x 64, 3e-4": setting(32, 64, 10, 32, 3e-4),
    "32 x 64, 1e-3": setting(32, 64, 10, 32, 1e-3),
    "32 x 64, 1e-3, 16 parts": setting(32, 64, 10, 16, 1e-3),
    "32 x 64, 1e-3, 5 passes": setting(32, 64, 5, 32, 1e-3),
}


def run(task, name, seed, steps):
    "One training; its row."
    begin = time.process_time()
    options = {**SETTINGS[name], "steps": steps, "recent_episodes": 20}
    ppo = PPO(partial(gym.make, task), seed=seed, **options).learn()
    seconds = time.process_time() - begin
    sampled = ppo.evaluate(20, deterministic=False).mean().item()
    kl, clipped = (float(np.mean([row[c] for row in ppo.rows])) for c in COLUMNS[-2:])
    recent = ppo.rows[-1]["return_mean"]
    return [*map(text, (task, name, seed, ppo.steps, recent, sampled, seconds, kl, clipped))]


def main():
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("choose", "judge"))
    parser.add_argument("--only", nargs="+", help="some of the tasks")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--first", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    tasks, first, seeds = {"choose": (CHOOSE, 100, 4), "judge": (JUDGE, 200, 10)}[args.what]
    first, seeds = args.first or first, args.seeds or seeds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # v4 is what was published; a clip fraction is a column
    for seed in range(first, first + seeds):
        for task, name in ((t, s) for t in args.only or tasks for s in args.settings):
            rows = read(args.out, COLUMNS)
            if [task, name, str(seed)] in [row[:3] for row in rows]: continue
            write(args.out, COLUMNS, [*rows, run(task, name, seed, tasks[task])])
            print(*rows[-1:], flush=True)


if __name__ == "__main__": main()
