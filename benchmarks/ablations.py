"""Train CartPole and Pendulum with one detail of PPO changed at a time, over many seeds.

    python benchmarks/ablations.py --jobs 2

Writes nbs/studies/results/ablations.csv, a row for each training: the final mean returns over 100
fresh episodes, greedy and sampled; the steps after which the sampled mean first reached the
threshold (blank if never); the mean of each dial over the iterations. Trainings that stand in the
file are not repeated, so after a change of the defaults say --fresh. ablations_list.csv says what
each detail is; `nbs/studies/33_ablations.ipynb` says what came of them.
"""
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from unittest.mock import patch

import numpy as np
import torch
from jobs import RESULTS, options, read, side_by_side, text, write
from torch import nn

from rlhf_notes.control import policy, trainer
from rlhf_notes.control import ppo as control
from rlhf_notes.control.config import PendulumConfig, PPOConfig
from rlhf_notes.control.envs import threshold
from rlhf_notes.control.trainer import PPO
from rlhf_notes.formulas import ppo as losses

DIALS = ("kl_k3", "clip_fraction", "explained_variance", "entropy", "grad_norm", "value_loss")
COLUMNS = ("task", "detail", "seed", "greedy", "sampled", "first_sampled_steps", *DIALS)
SECONDS = {"cartpole": 2.5, "pendulum": 4.0}  # of one training, on a quiet core
INTACT, UNTRAINED = "intact", "untrained"  # the baseline, and the policy it begins with
CONFIGS = {"cartpole": PPOConfig, "pendulum": partial(PendulumConfig, stagger=False)}


@contextmanager
def swapped(*swaps):
    "Inside, make(the function) stands in its place, for each swap (module, name, make)."
    with ExitStack() as stack:
        for module, name, make in swaps:
            stack.enter_context(patch.object(module, name, make(getattr(module, name))))
        yield


def loud(mlp): # `policy.mlp`, called with gain 0.01 for the policy, 1 for the value function
    "Every last layer at gain 1, the policy's too."
    return lambda *args, gain, **kwargs: mlp(*args, gain=1.0, **kwargs)


def unclipped(surrogate): # `clipped_surrogate`
    "Ratio times advantage, however far the ratio has gone."
    return lambda ratio, advantage, *bounds: ratio * advantage


def doubly_clipped(surrogate): # `clipped_surrogate`, whose `dual_clip` is None if not given
    "With dual clip: where the advantage is negative, a ratio above 3 costs nothing more."
    return lambda ratio, advantage, clip, *rest: surrogate(ratio, advantage, clip, dual_clip=3.0)


def bounded_both_ways(surrogate): # `clipped_surrogate`, without dual clip
    "Dual clip whatever the sign: for a positive advantage the objective is the constant 3 A."
    return lambda ratio, advantage, clip, *rest: torch.maximum(
        surrogate(ratio, advantage, clip), 3.0 * advantage)


def across_ends(gae): # `advantage.gae`, whose recursion stops at `done`
    "The recursion does not stop at the end of an episode: the next one is credited to this one."
    return lambda rewards, values, next_values, terminated, done, gamma, lam: gae(
        rewards, values, next_values, terminated, torch.zeros_like(done), gamma, lam)


def no_end(gae): # `advantage.gae`, whose bootstrap is 0 at `terminated`
    "The value function bootstraps after the end, as if the episode went on."
    return lambda rewards, values, next_values, terminated, done, gamma, lam: gae(
        rewards, values, next_values, torch.zeros_like(terminated), done, gamma, lam)


def resets_kept(make_batch): # `control.make_batch`, which leaves such steps out
    "Reset steps, in which the action is ignored, are learned from like any other."
    return lambda agent, rollout, config: make_batch(
        agent, replace(rollout, is_step=torch.ones_like(rollout.is_step)), config)


def shared_trunk(Agent): # `policy.Agent`, with a network for each
    "Policy and value function with two hidden layers in common."
    class Shared(Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.critic = nn.Sequential(*self.policy[:-1], self.critic[-1])
    return Shared


def thinned(Agent): # `policy.Agent`, without dropout
    "Dropout of 0.1 in the update only: the ratio compares two different networks."
    class Thinned(Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.chance = torch.Generator().manual_seed(0)
        def forward(self, obs, mask=None):
            out = obs
            for layer in self.policy:
                out = layer(out)
                if torch.is_grad_enabled() and not isinstance(layer, nn.Linear):
                    out = out * (torch.rand(out.shape, generator=self.chance) >= 0.1) / 0.9
            return out, self.value(obs)
    return Thinned


def fixed_std(distribution): # `policy.distribution`, whose Gaussian learns it
    "A Gaussian whose standard deviation is not learned."
    return lambda *args: distribution(*args).requires_grad_(False)


@dataclass(frozen=True)
class Detail:
    "One thing that is done otherwise than by default."
    what: str
    number: str  # in the list of Huang et al.; "" if it does not stand there
    options: dict = field(default_factory=dict)
    swap: tuple = ()
    tasks: tuple = ("cartpole", "pendulum")  # where it is a change at all

    def changed(self):
        "The option and its values, or the function that is swapped."
        if self.swap: return f"`{self.swap[1]}` in {self.swap[0].__name__.split('.')[-1]}"
        configs = [CONFIGS[task]() for task in self.tasks]
        def usual(name): return " or ".join(dict.fromkeys(str(getattr(c, name)) for c in configs))
        return ", ".join(f"`{name}` {usual(name)} → {v}" for name, v in self.options.items())


DETAILS = {
    "staggered starts": Detail("the first episodes are cut off one after the other", "",
                               dict(stagger=True),
                               tasks=("pendulum",)),
    "default init": Detail("weights as PyTorch draws them", "core 2", dict(init="default")),
    "last layer 1": Detail("the policy's last layer begins at gain 1, not 0.01", "core 2",
                           swap=(policy, "mlp", loud)),
    "adam eps 1e-8": Detail("Adam's epsilon as PyTorch has it", "core 3", dict(adam_eps=1e-8)),
    "constant rate": Detail("the learning rate does not fall", "core 4", dict(lr_anneal=0.0)),
    "linear rate": Detail("the learning rate falls in a straight line, not squared", "core 4",
                          dict(lr_anneal=1.0),
                          tasks=("pendulum",)),
    "squared rate": Detail("the learning rate falls squared, not in a straight line", "core 4",
                           dict(lr_anneal=2.0),
                           tasks=("cartpole",)),
    "truncation is end": Detail("an episode that was cut off counts as one that ended", "core 5",
                                dict(truncation="terminate")),
    "end is truncation": Detail("an episode that ended counts as one that was cut off", "core 5",
                                swap=(control, "gae", no_end), tasks=("cartpole",)),
    "lambda 1": Detail("the rewards alone are trusted", "core 5", dict(lam=1.0)),
    "lambda 0": Detail("the value function alone is trusted", "core 5", dict(lam=0.0)),
    "GAE across ends": Detail("GAE runs on from one episode into the one before", "core 5",
                              swap=(control, "gae", across_ends)),
    "resets are data": Detail("resets are learned from", "",
                              swap=(control, "make_batch", resets_kept)),
    "no minibatches": Detail("one gradient step in a pass", "core 6", dict(minibatches=1)),
    "1 epoch": Detail("one pass over the data", "core 6", dict(epochs=1)),
    "4 epochs": Detail("four passes", "core 6", dict(epochs=4), tasks=("pendulum",)),
    "8 epochs": Detail("eight passes", "core 6", dict(epochs=8), tasks=("cartpole",)),
    "16 epochs": Detail("sixteen passes", "core 6", dict(epochs=16)),
    "no whitening": Detail("advantages as they are", "core 7", dict(whitening="none")),
    "whitening per minibatch": Detail("advantages whitened in each minibatch", "core 7",
                                      dict(whitening="minibatch")),
    "no clip": Detail("ratio times advantage, not clipped", "core 8",
                      swap=(losses, "clipped_surrogate", unclipped)),
    "dual clip 3": Detail("dual clip at 3", "", swap=(losses, "clipped_surrogate", doubly_clipped)),
    "dual clip, any sign": Detail("dual clip at 3, for positive advantages too", "",
                                  swap=(losses, "clipped_surrogate", bounded_both_ways)),
    "falling clip": Detail("the clip falls in a straight line to 0", "core 8",
                           dict(clip_anneal=1.0)),
    "stop at KL 0.005": Detail("no further pass once the policy has moved 0.005 nats", "",
                               dict(target_kl=0.005)),
    "value clip 0.2": Detail("the value loss is clipped, at 0.2 in units of the return", "core 9",
                             dict(value_clip=0.2)),
    "entropy 0.01": Detail("an entropy bonus", "core 10", dict(entropy_coef=0.01)),
    "long gradients": Detail("gradients of any length", "core 11", dict(max_grad_norm=1e9)),
    "dropout": Detail("dropout of 0.1 in the update", "", swap=(trainer, "Agent", thinned)),
    "shared trunk": Detail("policy and value share their hidden layers", "core 13",
                           swap=(trainer, "Agent", shared_trunk)),
    "log std 0": Detail("the standard deviation begins at 1, not at 2.7", "continuous 2",
                        dict(log_std=0.0),
                        tasks=("pendulum",)),
    "fixed std": Detail("the standard deviation is not learned", "continuous 2",
                        swap=(policy, "distribution", fixed_std),
                        tasks=("pendulum",)),
    "tanh squash": Detail("tanh brings actions between their bounds", "continuous 5",
                          dict(squash=True),
                          tasks=("pendulum",)),
    "normalised obs": Detail("observations are normalised and clipped", "continuous 6",
                             dict(normalize_obs=True)),
    "normalised rewards": Detail("rewards are normalised and clipped", "continuous 8",
                                 dict(normalize_rewards=True)),
    "reward scale 1": Detail("rewards as they come, not a tenth of them", "continuous 8",
                             dict(reward_scale=1.0),
                             tasks=("pendulum",)),
    "tanh": Detail("hidden layers with tanh, not silu", "", dict(activation="tanh"),
                   tasks=("pendulum",)),
    "silu": Detail("hidden layers with silu, not tanh", "", dict(activation="silu"),
                   tasks=("cartpole",)),
    "relu": Detail("hidden layers with relu", "", dict(activation="relu")),
}


def experiments(task):
    "The baseline, the untrained policy, and each detail of a task."
    return [INTACT, UNTRAINED, *(name for name, d in DETAILS.items() if task in d.tasks)]


def first_gradient(config):
    "Gradient of the first loss, on a long rollout, with log pi_old shifted at random."
    ppo = PPO(**vars(config))
    rollout, _ = ppo.collector.collect(ppo.policy(ppo.rng), 256, ppo.agent.head.for_env)
    batch = control.make_batch(ppo.agent, ppo.scaling(rollout), config)
    shift = torch.randn(len(batch), generator=ppo.generator)
    batch = replace(batch, logp=batch.logp + shift)
    control.batch_loss(ppo.agent, batch, config, config.clip)[0].backward()
    weights = (p for p in ppo.agent.parameters() if p.requires_grad)
    return torch.cat([p.grad.flatten() for p in weights])


@cache
def check_swap(task, name):
    "RuntimeError unless the swap of a detail changes a gradient: it is patched by name."
    intact = first_gradient(CONFIGS[task]())
    with swapped(DETAILS[name].swap): changed = first_gradient(CONFIGS[task]())
    if torch.equal(intact, changed):
        raise RuntimeError(f"the swap of {name!r} changes no gradient on {task}")


def attempt(task, name, seed, every=4, **options):
    "One training with a detail changed; a look every so many iterations until it is solved."
    detail = DETAILS.get(name, Detail("", ""))
    config = replace(CONFIGS[task](seed=seed, **options), **detail.options)
    if detail.swap: check_swap(task, name)
    with swapped(*[detail.swap] * bool(detail.swap)):
        ppo, first, rows = PPO(**vars(config)), None, []
        seeds = np.random.SeedSequence((seed, 2)).generate_state(config.iterations).tolist()
        def is_solved():
            returns = ppo.evaluate(deterministic=False, seed=seeds[ppo.iteration - 1])
            return returns.mean() >= threshold(config.env)
        while ppo.iteration < config.iterations and name != UNTRAINED:
            rows.append(ppo.iterate())
            if first is None and ppo.iteration % every == 0 and is_solved():
                first = ppo.iteration * config.batch  # resets included
        final = ppo.scores()
    return dict(greedy=final["eval_return_mean"], sampled=final["eval_sampled_return_mean"],
                first_sampled_steps=first,
                **{d: float(np.mean([r[d] for r in rows])) if rows else None for d in DIALS})


def run(*job):
    torch.set_num_threads(1)
    result = attempt(*job)
    return [*job, *(text(result[c]) for c in COLUMNS[3:])]


def main():
    args = options(__doc__, RESULTS / "ablations.csv", 20, DETAILS)
    write(args.out.with_name("ablations_list.csv"),
          ("detail", "number", "what", "changed", "tasks"),
          [(n, d.number, d.what, d.changed(), " ".join(d.tasks)) for n, d in DETAILS.items()])
    rows = [] if args.fresh else read(args.out, COLUMNS)
    done = {(task, detail, int(seed)) for task, detail, seed, *_ in rows}
    chosen = [INTACT, UNTRAINED, *args.only]
    wanted = [(task, name, seed) for seed in args.seeds for task in CONFIGS
              for name in experiments(task) if name in chosen]
    order = {job: i for i, job in enumerate(wanted)}
    def place(row): return order.get((row[0], row[1], int(row[2])), len(order))
    todo = [job for job in wanted if job not in done]
    for row in side_by_side(run, todo, args.jobs, lambda job: SECONDS[job[0]]):
        rows = sorted([*rows, row], key=place)
        write(args.out, COLUMNS, rows)


if __name__ == "__main__": main()
