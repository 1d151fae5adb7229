"""Hyperparameters of PPO for control: each with its meaning, its range and its default.

Every hyperparameter stands in one config, checked when it is made and never changed; a variant is a
new one, `replace(config, gamma=0.9)`. `rlhf-notes cartpole --help` shows them all. Most can stay;
try the learning rate, the number of passes, the discount and the reward scale first. What a choice
does shows over many seeds only.

| option | a larger value means |
|---|---|
| `steps` | more practice; the learning rate falls more slowly |
| `num_envs` | more data in each update, more varied, and fewer updates |
| `num_steps` | the same; and GAE sees further before it must trust the value function |
| `epochs`, `minibatches` | more gradient steps from the same data: the clip begins to bind |
| `learning_rate` | larger steps, up to the point where the policy forgets what it knew |
| `lr_anneal`, `clip_anneal` | learning rate or clip falls earlier (see below) |
| `gamma` | a longer horizon, 1 / (1 - gamma) steps: 50 by default, a second of CartPole |
| `lam` | less bias from the value function, more noise from the rewards |
| `clip` | the policy may move further on one batch |
| `target_kl` | the policy may move further before the remaining passes are cancelled |
| `entropy_coef` | more exploration, and a policy less decided than would be best |
| `value_coef` | of the gradient, limited for both networks together, more is the value function's |
| `value_clip` | the value function may move further in one iteration; 0 = freely |
| `max_grad_norm` | one strange minibatch can do more damage |
| `reward_scale` | larger returns; those in the hundreds or thousands want it below 1 |
| `hidden` | networks that can represent more, and take longer |
| `log_std` | a Gaussian policy begins by trying a wider range of actions |

| choice | what it means |
|---|---|
| `truncation` | `bootstrap` is right unless the time limit is part of the task |
| `whitening` | steps of one size whatever the rewards are; `none` needs a `reward_scale` |
| `normalize_obs` | for components of very different size: mean 0 and variance 1, clipped at 10 |
| `normalize_rewards` | a `reward_scale` found from the rewards; the target moves |
| `activation` | `tanh` is flat beyond 3; `relu` has a corner; `silu` is smooth and unbounded |
| `init` | `orthogonal`: all directions pass alike, and the first policy has no opinions |
| `stagger` | spreads environments that only a time limit ends over the whole of an episode |
| `squash` | for bounds that are not around 0, or where extreme actions do harm |

**How steps become smaller.** The learning rate of iteration k of K is its start times (1 - k/K) to
the power `lr_anneal`: with power 2, 58% of the way (rate times steps) is done after a quarter of
the training, with power 0 a quarter. Why should it fall at all? Once a task is solved the
advantages are noise, whitened to variance 1, and Adam's steps do not shrink with the gradient.

**What the defaults do not learn.** They are CartPole's. `RECIPES` holds other options by the ID of
an environment; `PPO` and `rlhf-notes train` look them up, and an option that is given wins. Lesson
34 judges them on seeds that did not choose them; those of Atari, MuJoCo and MinAtar are CleanRL's
and gymnax-blines', of Atari nothing was trained to the end here. Without a recipe, actions of `Box`
have the cautious options of `continuous`: nearly CleanRL's, with the data of an iteration shared
among the environments.
"""

__all__ = ['MUJOCO', 'RECIPES', 'PPOConfig', 'PendulumConfig', 'recipe', 'continuous']

from typing import Annotated, Literal

from pydantic import Field

from ..training.options import (
    TINY, Count, Fraction, NonNegative, Number, Positive, Seed, Size, Whole, config_class,
)


@config_class
class PPOConfig:
    "Hyperparameters of PPO for control; the defaults are for CartPole."
    env: str = "CartPole-v1"
    "Gymnasium ID, or module:Name-v0 of your own"
    env_kwargs: dict | None = None
    "arguments of the environment, as JSON: '{\"g\": 5.0}'"
    seed: Seed = 0
    "of environments, first weights, actions and minibatches"
    device: str = "auto"
    "auto, cpu, cuda or mps; auto is the cpu, which is faster for networks this small"
    vectorization: Literal["auto", "sync", "async"] = "auto"
    "environments side by side: auto (their own way, else sync), sync (in turn), async (processes)"
    steps: Count = 40_000
    "environment steps in all, with those that only reset; an incomplete last iteration is left out"
    num_envs: Size = 32
    "environments side by side"
    num_steps: Annotated[Size, Field(ge=2)] = 32
    "steps of each environment in an iteration"
    stagger: bool = False
    "cut the first episodes at different steps, so that they do not all end together"
    epochs: Count = 4
    "passes over the data of an iteration"
    minibatches: Count = 8
    "gradient steps in each pass"
    learning_rate: Positive = 3e-3
    "of Adam, at the start"
    lr_anneal: NonNegative = 1.0
    "power of the share of steps left by which the learning rate falls: 0 keeps it, 1 is linear"
    adam_eps: Positive = 1e-5
    "epsilon of Adam"
    gamma: Fraction = 0.98
    "discount of a reward one step later"
    lam: Fraction = 0.95
    "lambda of GAE: 0 trusts the value function, 1 the rewards"
    truncation: Literal["bootstrap", "terminate"] = "bootstrap"
    "value of what follows a time limit: bootstrap (the value function's estimate), terminate (0)"
    whitening: Literal["minibatch", "rollout", "none"] = "rollout"
    "whiten advantages per minibatch, per rollout, or not at all"
    clip: Annotated[Fraction, Field(gt=0)] = 0.2
    "clip range of the ratio around 1"
    clip_anneal: NonNegative = 0.0
    "power by which the clip range falls, like lr_anneal"
    target_kl: NonNegative = 0.0
    "KL in nats at which an iteration makes no further pass; 0 = no limit"
    entropy_coef: NonNegative = 0.0
    "weight of the entropy bonus"
    value_coef: NonNegative = 0.5
    "weight of the value loss"
    value_clip: NonNegative = 0.0
    "clip range of the value, in units of the return; 0 = no clip"
    max_grad_norm: Positive = 0.5
    "maximum gradient norm"
    normalize_obs: bool = False
    "whiten observations by running moments"
    normalize_rewards: bool = False
    "divide rewards by the running standard deviation of the discounted return"
    reward_scale: Positive = 1.0
    "factor of the rewards, in training alone"
    reward_clip: NonNegative = 0.0
    "cut rewards to this size, in training alone, before they are scaled; 0 = as they are"
    hidden: Annotated[Size, Field(le=2**14)] = 64
    "width of the two hidden layers"
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    "of the hidden layers"
    init: Literal["orthogonal", "default"] = "orthogonal"
    "of the weights: orthogonal, or PyTorch's default"
    shared: bool = False
    "one network for policy and value function up to their last layers; pictures are read once"
    log_std: Annotated[Number, Field(ge=-10, le=10)] = 0.0
    "first log standard deviation of a Gaussian policy, in units of the action (before the tanh)"
    squash: bool = False
    "bound Gaussian actions by tanh instead of clipping them"
    eval_episodes: Annotated[Count, Field(ge=2)] = 100
    "episodes of each evaluation: the two final ones, greedy and sampled, and those of eval_every"
    eval_every: Whole = 0
    "steps from one evaluation of the greedy policy to the next while it trains; 0 = none"
    keep_best: bool = False
    "end with the policy of the best evaluation, not with the last"
    recent_episodes: Count = 20
    "last episodes in return_mean and length_mean; papers take 100"

    def __post_init__(self):
        wanted = f"num_envs * num_steps = {self.batch}"
        if self.batch % self.minibatches:
            raise ValueError(f"minibatches must divide {wanted}, got {self.minibatches}")
        if self.steps < self.batch:
            raise ValueError(f"steps must be at least {wanted}, got {self.steps}")
        if self.keep_best and not self.eval_every:
            raise ValueError("keep_best must come with eval_every, which finds the best, got 0")
        if self.clip * (1 / self.iterations) ** self.clip_anneal < TINY:
            raise ValueError("clip_anneal must leave a clip range that fits float32 in the last of "
                             f"{self.iterations} iterations, got {self.clip_anneal}")

    @property
    def batch(self) -> int:  # in environment steps
        "Size of an iteration's data, over all environments."
        return self.num_envs * self.num_steps

    @property
    def iterations(self) -> int:  # >= 1
        "Number of whole iterations that fit into `steps`."
        return self.steps // self.batch


@config_class
class PendulumConfig(PPOConfig):
    "Hyperparameters of PPO for Pendulum."
    env: str = "Pendulum-v1"
    steps: Count = 50_000
    num_envs: Size = 16
    num_steps: Annotated[Size, Field(ge=2)] = 64
    stagger: bool = True
    epochs: Count = 6
    minibatches: Count = 4
    learning_rate: Positive = 5e-3
    lr_anneal: NonNegative = 2.0
    gamma: Fraction = 0.95
    reward_scale: Positive = 0.1
    activation: Literal["tanh", "relu", "silu"] = "silu"
    log_std: Annotated[Number, Field(ge=-10, le=10)] = 1.0


MUJOCO = dict(  # as CleanRL's ppo_continuous_action.py has them
    steps=1_000_000, num_envs=1, num_steps=2048, epochs=10, minibatches=32, learning_rate=3e-4,
    lr_anneal=1.0, adam_eps=1e-5, gamma=0.99, lam=0.95, truncation="terminate",
    whitening="minibatch", clip=0.2, value_clip=0.2, value_coef=0.5, entropy_coef=0.0,
    max_grad_norm=0.5, normalize_obs=True, normalize_rewards=True, hidden=64, activation="tanh",
    init="orthogonal", log_std=0.0, recent_episodes=100)

RECIPES = {  # by ID of the environment, or by its namespace: options that replace the defaults
    "Pendulum-v1": {x: getattr(PendulumConfig, x) for x in PendulumConfig.__annotations__},
    "Acrobot-v1": dict(steps=100_000, num_steps=64, epochs=8, normalize_obs=True),
    "MountainCarContinuous-v0": dict(
        steps=100_000, num_envs=16, num_steps=256, epochs=8, gamma=0.999, lam=0.98,
        log_std=2.0, normalize_obs=True, reward_scale=0.1),
    "LunarLander-v3": dict(
        steps=500_000, num_steps=128, minibatches=16, learning_rate=1e-3, gamma=0.999, lam=0.98,
        entropy_coef=0.01, normalize_obs=True, reward_scale=0.1, hidden=128),
    "ALE/": dict(  # as CleanRL's ppo_atari.py has them
        steps=10_000_000, num_envs=8, num_steps=128, minibatches=4, learning_rate=2.5e-4,
        gamma=0.99, whitening="minibatch", clip=0.1, value_clip=0.1, entropy_coef=0.01,
        hidden=512, activation="relu", shared=True, reward_clip=1.0, recent_episodes=100),
    "MinAtar/": dict(  # as gymnax-blines has them for Breakout; the network is another
        steps=1_000_000, num_envs=64, num_steps=128, learning_rate=5e-4, lr_anneal=0.0,
        gamma=0.999, value_clip=0.2, entropy_coef=0.01, hidden=128, activation="relu",
        shared=True, recent_episodes=100),
} | {f"{name}-v{n}": MUJOCO for name in ("HalfCheetah", "Hopper", "Walker2d") for n in (4, 5)}

def recipe(env: str) -> dict:  # option -> value; empty without one
    "Options that replace the defaults for an environment of this ID, which may be module:ID."
    name = env.rpartition(":")[2]
    return RECIPES.get(name, RECIPES.get(name.partition("/")[0] + "/", {}))


def continuous(num_envs: int = 1) -> dict:  # option -> value
    "Options that replace the defaults for actions of `Box`, where there is no recipe."
    return dict(steps=300_000, num_envs=num_envs, num_steps=max(1, 64 // num_envs) * 32, epochs=10,
                minibatches=32, learning_rate=3e-4, gamma=0.99, normalize_obs=True,
                normalize_rewards=True)

