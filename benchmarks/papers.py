"""Published numbers of PPO beside ours: MuJoCo with CleanRL's options, MinAtar with gymnax-blines'.

    pip install 'gymnasium[mujoco]' minatar stable-baselines3
    python benchmarks/papers.py                                # three hours on a quiet core
    python benchmarks/papers.py --only Hopper Hopper-sb3 --seeds 1

Writes nbs/studies/results/papers.csv: about every 10,000 steps the mean of the last 100 episodes of
the training, the processor seconds so far, and of ours the KL and the clip fraction. "-plain" has
the defaults of `PPOConfig`, for 300,000 steps; "-recipe" plays the game by its name, a picture for
convolutions, where the others see a vector. stable-baselines3 ("-sb3") plays the first 300,000
steps of the same schedule, with the same options by its own names. Rows are stored as they come; a
training that was cut short begins again.
"""
import time
import warnings
from dataclasses import asdict
from functools import partial

import gymnasium as gym
import torch
from jobs import RESULTS, options, read, text, write

from rlhf_notes import PPO
from rlhf_notes.control.config import MUJOCO, PPOConfig, recipe
from rlhf_notes.studies.benchmark import StableBaselines, equal

OUT = RESULTS / "papers.csv"
COLUMNS = ("task", "program", "seed", "iteration", "steps", "return_mean", "seconds", "kl_k3",
           "clip_fraction")
EVERY = 10_000  # steps from one row to the next

GYMNAX = dict(  # agents/Breakout-MinAtar/ppo.yaml of gymnax-blines, as far as it goes
    steps=1_000_000, num_envs=64, num_steps=128, epochs=4, minibatches=8, learning_rate=5e-4,
    lr_anneal=0.0, gamma=0.999, lam=0.95, clip=0.2, value_clip=0.2, value_coef=0.5,
    entropy_coef=0.01, max_grad_norm=0.5, hidden=256, activation="relu", recent_episodes=100)
PLAIN = asdict(PPOConfig(steps=300_000, recent_episodes=100))
del PLAIN["env"], PLAIN["seed"]


def flat(name):
    "MinAtar's board of booleans as a vector, as gymnax-blines' network sees it."
    import minatar.gym
    if name not in gym.registry:
        minatar.gym.register_envs()
    return gym.wrappers.FlattenObservation(gym.make(name))


TASKS = {"HalfCheetah": ("HalfCheetah-v4", MUJOCO), "Hopper": ("Hopper-v4", MUJOCO),
         "Walker2d": ("Walker2d-v4", MUJOCO),
         "Breakout": (partial(flat, "MinAtar/Breakout-v1"), GYMNAX),
         "SpaceInvaders": (partial(flat, "MinAtar/SpaceInvaders-v1"), GYMNAX)}
TASKS |= {f"{name}-plain": (TASKS[name][0], PLAIN)
          for name in ("HalfCheetah", "Hopper", "Walker2d")}
TASKS |= {f"{name}-recipe": (f"MinAtar/{name}-v1", recipe(f"MinAtar/{name}-v1"))
          for name in ("Breakout", "SpaceInvaders")}


def iterations(task, program):
    "How many are played: all of ours, of the other program those of the first 300,000 steps."
    config = PPOConfig(**TASKS[task][1])
    return config.iterations if program == "rlhf_notes" else -(-300_000 // config.batch)


def ours(task, seed):
    "After each iteration: steps, mean return, KL, clip fraction."
    env, given = TASKS[task]
    ppo = PPO(env, seed=seed, **given)
    while True:
        row = ppo.iterate()
        yield [row[name] for name in ("steps", "return_mean", "kl_k3", "clip_fraction")]


def stable_baselines3(task, seed):
    "The same of the other program; its Monitor has the returns before they are scaled."
    env, given = TASKS[task]
    config = PPOConfig(**given)
    settings = equal(config) | dict(clip_range_vf=config.value_clip)
    trainer = StableBaselines(env, seed, normalize=config.normalize_obs, **settings)
    while True:
        trainer.iterate()
        recent = [episode["r"] for episode in trainer.model.ep_info_buffer]  # the last 100
        mean = sum(recent) / len(recent) if recent else None
        yield [trainer.model.num_timesteps, mean, None, None]


PROGRAMS = {"rlhf_notes": ours, "stable-baselines3": stable_baselines3}
JOBS = {name + end: (name, program) for name in TASKS
        for end, program in zip(("", "-sb3"), PROGRAMS)}


def curve(task, program, seed):
    "The rows of one training, as they come."
    begin, due, whole = time.process_time(), EVERY, iterations(task, program)
    for n, (steps, mean, *rest) in enumerate(PROGRAMS[program](task, seed), 1):
        if steps >= due or n == whole:
            due += EVERY
            seconds = time.process_time() - begin
            yield [*map(text, (task, program, seed, n, steps, mean, seconds, *rest))]
        if n == whole: return


def main():
    args = options(__doc__, OUT, 3, JOBS, first=1)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)  # v4 is what was published
    for job in [(*JOBS[name], seed) for seed in args.seeds for name in args.only]:
        rows = [] if args.fresh else read(args.out, COLUMNS)
        name = [*map(str, job)]
        if [*name, str(iterations(*job[:2]))] in [row[:4] for row in rows]: continue
        rows = [row for row in rows if row[:3] != name]
        for row in curve(*job):
            write(args.out, COLUMNS, rows := [*rows, row])
        print(*rows[-1], flush=True)


if __name__ == "__main__": main()
