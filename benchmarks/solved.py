"""Train PPO on CartPole long after it is solved, at constant and falling learning rates.

    python benchmarks/solved.py        # five minutes of one core

Appends to nbs/results/solved.csv, for each choice and seed, the mean return of the last twenty
episodes after every second iteration of 1,024 steps.
"""
import torch
from jobs import RESULTS, options, resume, text

from rlhf_notes import PPO

ITERATIONS = 120
COLUMNS = "choice", "seed", *(f"return_{i}" for i in range(2, ITERATIONS + 1, 2))
CHOICES = {f"{way} {rate:g}": dict(learning_rate=rate, **more) for rate in (3e-3, 1e-2)
           for way, more in (("constant", dict(lr_anneal=0.0)), ("falling from", {}))}


def run(choice, seed):
    torch.set_num_threads(1)
    agent = PPO("CartPole-v1", steps=1024 * ITERATIONS, seed=seed, **CHOICES[choice]).learn()
    return choice, seed, *(text(row["return_mean"]) for row in agent.rows[1::2])


def main():
    args = options(__doc__, RESULTS.parents[1] / "results" / "solved.csv", 10, CHOICES)
    jobs = [(choice, seed) for seed in args.seeds for choice in args.only]
    resume(run, jobs, args, COLUMNS, seconds=12)


if __name__ == "__main__": main()
