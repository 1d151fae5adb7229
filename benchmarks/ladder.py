"""Train CartPole with the five programs of the lesson "From thirty lines to PPO", and three beside.

    python benchmarks/ladder.py [--jobs 2]

Appends to nbs/results/ladder.csv a row for each program and seed: the mean length of the five
episodes before each of thirty updates, at most 500. The programs stand in the lesson's cells. The
three beside are PPO with the returns of REINFORCE for advantages, with those less the value, and
PPO without whitening.
"""
from collections import namedtuple

import gymnasium as gym
import torch
from fastcore.nbio import read_nb
from jobs import RESULTS, options, resume, text
from torch import nn

NBS = RESULTS.parents[1]
COLUMNS = "program", "seed", *(f"length_{i}" for i in range(1, 31))
PROGRAMS = {                            # the cells that make it, in their order
    "REINFORCE": "program", "+ value": "program value", "+ GAE": "program value gae",
    "PPO": "program value gae reuse", "no clip": "program value gae reuse unclipped",
    "PPO of returns": "program reuse", "PPO of returns - V": "program value reuse",
    "no whitening": "program value gae reuse"}


def program(name):
    "The names that a program defines."
    space = dict(namedtuple=namedtuple, gym=gym, torch=torch, nn=nn)
    cells = {cell.id: cell.source for cell in read_nb(NBS / "ladder.ipynb").cells}
    for cell in PROGRAMS[name].split(): exec(cells[cell], space)
    if name == "no whitening":
        lines = cells["reuse"].splitlines(keepends=True)
        exec("".join(line for line in lines if "std()" not in line), space)
    return space


def run(name, seed):
    torch.set_num_threads(1)
    return name, seed, *map(text, program(name)["train"](seed))


def main():
    args = options(__doc__, NBS / "results" / "ladder.csv", 10, PROGRAMS)
    jobs = [(name, seed) for name in args.only for seed in args.seeds]
    resume(run, jobs, args, COLUMNS, seconds=6)


if __name__ == "__main__": main()
