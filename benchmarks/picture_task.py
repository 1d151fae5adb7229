"""Train the picture task of the lesson "Your own environment" with five seeds.

    python benchmarks/picture_task.py

Writes nbs/control/results/picture_task.csv, a row for each seed:

    seconds     of the processor (one thread), in training alone
    greedy, sampled     balls caught, of 100 fresh ones
"""
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from jobs import names_of, options, text, write

from rlhf_notes import PPO
from rlhf_notes.training.fit import THREADS

CONTROL = Path(__file__).resolve().parent.parent / "nbs" / "control"
COLUMNS = "seed", "steps", "seconds", "greedy", "sampled"


def catch():
    "The environment, from its cell."
    return names_of(CONTROL / "47_own_environment.ipynb", "catch",
                    gym=gym, np=np, Box=Box, Discrete=Discrete)["Catch"]


def run(env, seed):
    ppo, start = PPO(env, steps=30_000, seed=seed), time.process_time()
    ppo.learn()
    seconds = time.process_time() - start
    greedy, sampled = (ppo.evaluate(deterministic=x).mean().item() for x in (True, False))
    return seed, ppo.steps, seconds, greedy, sampled


def main():
    args, env = options(__doc__, CONTROL / "results", 5), catch()
    with THREADS.held(1):
        rows = [[text(x) for x in run(env, seed)] for seed in args.seeds]
    write(args.out / "picture_task.csv", COLUMNS, rows)


if __name__ == "__main__":
    main()
