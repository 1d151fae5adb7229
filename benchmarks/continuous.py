"""What is learned where actions are numbers and nothing is named, beside the options of others.

    pip install 'gymnasium[mujoco]'
    python benchmarks/continuous.py                         # four hours on a quiet core
    python benchmarks/continuous.py --only "Hopper-v4 default" --seeds 1         # two minutes

Writes nbs/studies/results/continuous.csv, a row for each training as it ends, and goes on where it
stopped: `recent` is the mean return of the last 20 episodes of the training, `sampled` that of 20
fresh ones by the last policy, drawing; KL and clip fraction are means over the iterations. The rate
falls to 0 at the end of these steps; with "-1M" at a million, as in what was published. The
environments come without their names, so that none has a recipe: "default" is what `PPO` takes
then, "CleanRL" the recipe of HalfCheetah, Hopper and Walker2d, "CartPole" what was taken before.
No seed has chosen a default. In "kept" the default's rate stays what it is; seeds 100 and 101
picked that. KL and clip fraction are missing where they were not written. "itself" is CleanRL's own
file with its million steps, where the environment variable CLEANRL says how to start it (it wants
gymnasium 0.29):

    CLEANRL="python cleanrl/ppo_continuous_action.py" python benchmarks/continuous.py --only \
        "HalfCheetah-v4 itself" --first 1 --seeds 3
"""
import os
import re
import subprocess
import time
import warnings
from functools import partial

import gymnasium as gym
import numpy as np
import torch
from jobs import RESULTS, options, resume, text

from rlhf_notes import PPO
from rlhf_notes.control.config import MUJOCO, continuous

COLUMNS = ("job", "seed", "steps", "recent", "sampled", "seconds", "kl_k3", "clip_fraction")
TASKS = {"HalfCheetah-v4": 300_000, "Hopper-v4": 300_000, "Walker2d-v4": 300_000,
         "InvertedPendulum-v5": 100_000, "InvertedDoublePendulum-v5": 100_000,
         "Pendulum-v1": 100_000}
CARTPOLE = dict(num_envs=32, num_steps=32, epochs=4, minibatches=8, learning_rate=3e-3, gamma=0.98,
                normalize_obs=False, normalize_rewards=False)
SETTINGS = {"default": continuous(), "kept": continuous() | dict(lr_anneal=0.0),
            "CleanRL": MUJOCO, "CartPole": CARTPOLE}
WHOLE = 1_000_000  # steps after which the rate is 0 in what was published
SETTINGS |= {f"{name}-1M": SETTINGS[name] for name in ("default", "CleanRL")}
JOBS = [f"{task} {name}" for task in TASKS for name in (*SETTINGS, "itself")]


class Unnamed(gym.Wrapper):
    "An environment whose name, and with it its recipe, is not known."
    spec = None


def make(task): return Unnamed(gym.make(task))


def itself(task, seed):
    "Steps, and the mean of the last 20 returns that CleanRL's file prints up to then."
    command = [*os.environ["CLEANRL"].split(), "--env-id", task, "--seed", str(seed), "--no-cuda"]
    returns, steps = [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True,
                          env=os.environ | dict(PYTHONUNBUFFERED="1")) as program:
        while steps < TASKS[task] - 2000 and (line := program.stdout.readline()):
            if found := re.match(r"global_step=(\d+), episodic_return=\[?([-.\de]+)", line):
                steps, returns = int(found[1]), [*returns, float(found[2])]
        program.kill()
    return steps, float(np.mean(returns[-20:]))


def run(job, seed):
    "One training; its row."
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # v4 is what was published; the clip fraction is a column
    task, name = job.split()
    if name == "itself": return [*map(text, (job, seed, *itself(task, seed), *[None] * 4))]
    steps = WHOLE if name.endswith("-1M") else TASKS[task]
    given = SETTINGS[name] | dict(steps=steps, recent_episodes=20)
    begin = time.process_time()
    ppo = PPO(partial(make, task), seed=seed, **given)
    for _ in range(TASKS[task] // ppo.config.batch): ppo.iterate()
    seconds = time.process_time() - begin
    sampled = ppo.evaluate(20, deterministic=False).mean().item()
    kl, clipped = (float(np.mean([row[c] for row in ppo.rows])) for c in COLUMNS[-2:])
    recent = ppo.rows[-1]["return_mean"]
    return [*map(text, (job, seed, ppo.steps, recent, sampled, seconds, kl, clipped))]


def main():
    args = options(__doc__, RESULTS / "continuous.csv", 10, JOBS, first=200)
    jobs = [(job, seed) for seed in args.seeds for job in args.only
            if "CLEANRL" in os.environ or not job.endswith("itself")]
    resume(run, jobs, args, COLUMNS, 120.0)


if __name__ == "__main__": main()
