"""The recipes of control beside stable-baselines3 with rl-zoo's settings, in one run.

    python benchmarks/control_recipes.py                       # 30 minutes of one quiet core
    python benchmarks/control_recipes.py --only Acrobot-v1

LunarLander needs Box2D (`pip install "gymnasium[box2d]"`). Writes
nbs/studies/results/control_recipes.csv, a row for each training as it ends, and goes on where it
stopped. The seeds, from 0 on, did not choose the recipes: those were tried on 900 to 907.

    seconds     of the processor, in training alone, after one iteration that warms up
    greedy, sampled     mean return over 100 fresh episodes
    solved      both reach the threshold of Gymnasium

Ours trains to the end of its recipe and is evaluated then. stable-baselines3 is evaluated after
each tenth of the zoo's budget, and is done at the first time it has solved the task: what comes
after would cost it more time.
"""
import time

import numpy as np
from jobs import RESULTS, options, read, text, write

from rlhf_notes.control.config import RECIPES, PPOConfig
from rlhf_notes.control.envs import threshold
from rlhf_notes.studies.benchmark import Ours, StableBaselines, _look
from rlhf_notes.training.fit import THREADS

COLUMNS = ("task", "seed", "contender", "steps", "seconds", "greedy", "sampled", "solved")
ZOO = {  # hyperparams/ppo.yml; LunarLander-v3 has the settings of v2
    "MountainCarContinuous-v0": dict(
        total=20_000, n_envs=1, n_steps=8, batch_size=256, n_epochs=10, gamma=0.9999,
        gae_lambda=0.9, learning_rate=7.77e-5, ent_coef=0.00429, clip_range=0.1, vf_coef=0.19,
        max_grad_norm=5, use_sde=True, policy_kwargs=dict(log_std_init=-3.29, ortho_init=False),
        normalize=True),
    "Acrobot-v1": dict(total=1_000_000, n_envs=16, n_steps=256, n_epochs=4, gamma=0.99,
                       gae_lambda=0.94, ent_coef=0.0, normalize=True),
    "LunarLander-v3": dict(total=1_000_000, n_envs=16, n_steps=1024, batch_size=64, n_epochs=4,
                           gamma=0.999, gae_lambda=0.98, ent_coef=0.01),
}


def ours(task, seed):
    config = PPOConfig(**{"env": task, "seed": seed, **RECIPES[task]})
    return Ours(config), config.iterations, 1


def zoo(task, seed):
    trainer = StableBaselines(task, seed, **ZOO[task])
    return trainer, ZOO[task]["total"] // trainer.batch, 10


def run(task, seed, make):
    "Train, look at it so many times, and stop when it is solved; a row without the first three."
    make(task, seed)[0].iterate()
    (trainer, iterations, looks), seconds, done = make(task, seed), 0.0, 0
    for due in (np.arange(1, looks + 1) * iterations // looks).tolist():
        start = time.process_time()
        for _ in range(due - done): trainer.iterate()
        seconds += time.process_time() - start
        done, steps = due, due * trainer.batch
        means = _look(trainer, task, seed, steps)
        if min(means.values()) >= threshold(task): return steps, seconds, *means.values(), True
    return steps, seconds, *means.values(), False


def main():
    args = options(__doc__, RESULTS, 10, ZOO)
    path = args.out / "control_recipes.csv"
    rows = [] if args.fresh else read(path, COLUMNS)
    todo = [(task, seed, make) for task in args.only for seed in args.seeds for make in (ours, zoo)
            if make is ours or seed < args.first + 3]
    with THREADS.held(1):
        for task, seed, make in todo:
            key = [task, str(seed), make.__name__]
            if key in [row[:3] for row in rows]: continue
            rows.append([*key, *map(text, run(task, seed, make))])
            print(*rows[-1], flush=True)
            write(path, COLUMNS, rows)


if __name__ == "__main__":
    main()
