"""Any environment of Gymnasium, many copies side by side, behind one interface.

`PPO` takes the name of an environment, a function (or class) that makes one, an environment itself,
or a `VectorEnv` as it is (envpool's too). What it shows is a vector, a picture, whole numbers or a
`Dict` of these (`rlhf_notes.control.spaces`); its actions are `Discrete`, `MultiDiscrete`,
`MultiBinary` or `Box`. There are three ways to run N of them:

| `vectorization` | how | when |
|---|---|---|
| `auto` | the environment's own vectorized form if it has one, else `sync` | almost always |
| `sync` | N single environments, stepped in turn | what is cheap to step |
| `async` | each in a process of its own | a step takes much longer than a message |

The next step writes over the observations: copy those you keep, as the collector does. Each
environment is tried for one step, so that one that breaks Gymnasium's API is refused by name. The
seed reaches its spaces too, and with `async` the global generators of each process, which all begin
as copies of one. Of `info` only `action_mask` and `episode` are read.

**One meaning of a name.** `gym.make("ALE/Pong-v5")` shows the screen, 210 x 160 x 3; the game's own
vectorized form shows what the papers learn from, the last four frames in grey, 84 x 84, and clips
the rewards. A name means the second in training, `evaluate`, `predict` and `film`, and its rewards
are the score: the option `reward_clip` clips those of the training. A function or an environment is
learned from as it is. A seed that an environment refuses is taken modulo 2^30.

**The return** of an episode is the sum of its rewards; or what Gymnasium's
`RecordEpisodeStatistics` says, whatever wrappers outside of it make of rewards and ends.

**When an environment resets.** A vectorized environment resets by itself those that have ended:

| mode | the step in which the episode ends returns | the step after it |
|---|---|---|
| next step | the final observation | does nothing but reset: a row to leave out |
| same step | the *next* first one; the final one is in `info["final_obs"]` | is ordinary |

A third mode, which resets nothing, is refused. stable-baselines3 steps in turn (`DummyVecEnv`) or
in processes (`SubprocVecEnv`) and resets in the same step; CleanRL uses `SyncVectorEnv`; EnvPool
threads of a C++ program; Brax and Gymnax thousands of environments at once on a GPU.
"""

__all__ = ['PRESENTATION', 'NORMALIZERS', 'THRESHOLDS', 'STATISTICS', 'make_envs', 'close_envs',
           'make_one', 'reset', 'tells_episodes', 'told_episodes', 'copy_env', 'find_spec',
           'env_name', 'identify', 'is_continuous', 'usual_options', 'same_task', 'wrappers_of',
           'wrapper_names', 'threshold', 'autoreset_mode']

import inspect
import math
import os
import random
import signal
import warnings
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial, wraps
from importlib import import_module

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import batch_space

from ..checks import checked
from ..training.fit import settings_kept
from ..training.options import error_text, text_of
from .config import continuous, recipe
from .spaces import parts, read_mask, remedy, row_maker


@settings_kept()
@checked(num_envs="int [1, inf)", vectorization=("auto", "sync", "async"))
def make_envs(
    env,  # a name such as "CartPole-v1", a function that makes one, an environment, a VectorEnv
    num_envs: int,  # environments side by side: of an environment, itself or copies
    vectorization: str = "auto",  # "auto", "sync" or "async", see above
    env_kwargs: dict | None = None,  # arguments of the environment
) -> gym.vector.VectorEnv:  # its observations are overwritten by the next step
    "Environments side by side, tried for one step."
    if isinstance(env, gym.vector.VectorEnv): return _as_it_is(env, num_envs)
    spec, kwargs = find_spec(env), env_kwargs or {}
    with _naming(env):
        if vectorization == "auto" and spec.vector_entry_point:
            envs = _vector_form(spec, num_envs, kwargs)
        else:
            kind = AsyncVectorEnv if vectorization == "async" else SyncVectorEnv
            make = partial(_make_single, env, kwargs, num_envs == 1, os.getpid())
            envs = kind([partial(make, i) for i in range(num_envs)], copy=False)
            envs.spec = replace(spec, max_episode_steps=envs.get_attr("limit")[0])
            envs.kinds = envs.get_attr("kinds")[0]
    try:
        _check_envs(envs, env)
    except BaseException:
        close_envs(envs)
        raise
    return envs

def close_envs(envs):
    "Close environments, also where the process of one has ended."
    try:
        envs.close()
    except (ConnectionError, EOFError):
        for process in envs.processes:
            process.terminate()
        envs.closed = True


def _as_it_is(envs, num_envs):
    if envs.closed: raise ValueError(f"env must be open, got {envs}, which is closed")
    if envs.num_envs != num_envs:
        raise ValueError(f"num_envs must be {envs.num_envs}, as env has it, got {num_envs}")
    _check_envs(envs, envs)
    return envs

def _make_single(env, kwargs, alone, home, i):
    "The i-th environment; `home` is the process that asked for it."
    if isinstance(env, gym.Env):
        if kwargs: raise ValueError(f"env_kwargs must be left out for what is made, got {kwargs}")
        made = env if alone else copy_env(env, i)
    elif callable(env):
        made = env(**kwargs)
    else:
        return _Single(_checked(make_one(env, kwargs), env), home)
    made = gym.wrappers.PassiveEnvChecker(_checked(made, env))
    return _Single(made, home, lent=made.env is env)

def _checked(made, env):
    "The same; ValueError where its spaces cannot be learned from, before anything is made of them."
    try:
        if isinstance(made, gym.Env):
            _check_observations(made.observation_space, env)
    except ValueError:
        if made is not env:
            made.close()
        raise
    return made

class _Single(gym.Wrapper):
    "One of the environments: seeded all over, with little of its info, its name on its errors."
    def __init__(self, env, home, lent=False):
        super().__init__(env)
        self.home, self.lent = home, lent
        self.kinds = _names(wrappers_of(env))
        self.limit = env.spec.max_episode_steps if env.spec else None
        if os.getpid() != home and hasattr(os, "setsid"):
            os.setsid()  # the signals of a terminal are for the training, which ends this process
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by this one, too, silently

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.unwrapped.observation_space.seed(seed)
            self.unwrapped.action_space.seed(seed)
            if os.getpid() != self.home:  # a process begins with the numbers of its parent
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.manual_seed(seed)
        obs, info = self._ask("reset", reset, self.env, seed, options=options)
        if not isinstance(info, dict): raise TypeError(f"info must be a dict, got {info!r}")
        return obs, _read_of(info)

    def step(self, action):
        obs, reward, *ends, info = self._ask("step", self.env.step, action)
        if np.ndim(reward): raise TypeError(f"its reward must be one number, got {reward!r}")
        return obs, reward, *ends, _read_of(info)

    def _ask(self, name, call, *args, **kwargs):
        try:
            return call(*args, **kwargs)
        except (Exception, SystemExit) as e:
            raise RuntimeError(f"the environment's {name} raised {error_text(e)}") from e

    def close(self):
        if self.lent: return
        try:
            self.env.close()
        except Exception as e:  # no reason to lose what was learned
            warnings.warn(f"the environment's close raised {error_text(e)}", stacklevel=2)

def _read_of(info):
    "All that is read of an info: the possible actions, and what RecordEpisodeStatistics tells."
    read = {"action_mask": np.asarray(info["action_mask"], bool)} if "action_mask" in info else {}
    return read | ({"episode": info["episode"]} if "episode" in info else {})

def _possible(envs, info):
    "An action of each environment, to try."
    space = envs.single_action_space
    act = batch_space(space, envs.num_envs).sample()
    if "action_mask" not in info: return act
    if not isinstance(space, gym.spaces.Discrete):
        raise ValueError(f"its action_mask needs Discrete actions, and it has {space}")
    return read_mask(info, (envs.num_envs, int(space.n))).argmax(1) + space.start

def _check_observations(space, env):
    if (helps := remedy(space)) is None: return
    hint = f" (gymnasium.wrappers.{helps} makes them)" if helps else ""
    if not helps and isinstance(space, gym.spaces.Dict):
        hint = " (gymnasium.wrappers.FilterObservation leaves an entry of a Dict out)"
    raise ValueError("env must have observations of Box, Discrete, MultiDiscrete, MultiBinary, "
                     f"or a Dict of these, got {env!r} with {space}{hint}")

def _tell_masks(space, actions):
    "Warn of a mask of the actions among the observations, where it would be only looked at."
    if not isinstance(actions, gym.spaces.Discrete): return
    stems = "mask", "legal", "valid", "avail", "allow"
    for name, part in parts(space).items():
        shown = any(stem in str(name).lower() for stem in stems)
        if shown and math.prod(part.shape or ()) == actions.n:
            warnings.warn(f"observation[{name!r}] is an observation like any other: impossible "
                          'actions are ruled out by info["action_mask"], of reset and step',
                          stacklevel=2)

def _check_envs(envs, env):
    "ValueError unless a trainer can learn in them: try a reset and a step."
    space = envs.single_observation_space
    _check_observations(space, env)
    _tell_masks(space, envs.single_action_space)
    rows = row_maker(space)
    singles = [id(single.unwrapped) for single in getattr(envs, "envs", ())]
    if len(set(singles)) < len(singles):
        raise ValueError(f"env must make a new environment at each call, got {env!r}, "
                         "which returns the same one again")
    with _naming(env, "whose reset and step are as Gymnasium's API has them, "
                     f"with observations of shape {space.shape}"):
        obs, info = envs.reset(seed=0)
        obs, act = rows(obs).copy(), _possible(envs, info)
        after, reward, *_, then = envs.step(act)
        if "action_mask" in then and "action_mask" not in info:
            raise ValueError('its reset must give info["action_mask"], too, as its step does')
        if "action_mask" not in info and any(
                x.has_wrapper_attr("action_masks") for x in getattr(envs, "envs", ())):
            warnings.warn("env has action_masks, which is not read: impossible actions are ruled "
                          'out by info["action_mask"], of reset and step', stacklevel=2)
        if np.shape(reward) != (len(obs),):
            raise ValueError(f"its reward has shape {np.shape(reward)[1:]}")
        for name, x in ("observation", obs), ("observation", rows(after)), ("reward", reward):
            if not np.isfinite(x).all(): raise ValueError(f"its {name} is not a finite number")

@contextmanager
def _naming(env, wanted="that Gymnasium can make", hint=""):
    "Turn any error inside into a ValueError that names the environment."
    try:
        yield
    except (Exception, SystemExit) as e:
        if isinstance(e, ValueError) and text_of(e).startswith("env must"): raise
        told = isinstance(e, (gym.error.Error, RuntimeError, TypeError, ValueError)) and text_of(e)
        raise ValueError(f"env must be an environment {wanted}, got {env!r}: "
                         f"{told or error_text(e)}{hint}") from e


def make_one(env: str, kwargs: dict, **render) -> gym.Env:
    "One environment by its name; it shows what the name's vectorized form shows, if it has one."
    spec = find_spec(env)
    if not _shows_other(spec.id, spec.entry_point, spec.vector_entry_point):
        return gym.make(env, **render, **kwargs)
    return _One(_vector_form(spec, 1, kwargs), **render)

def _vector_form(spec, num_envs, kwargs):
    "The vectorized form of an environment, with its rewards as they are."
    make = spec.vector_entry_point
    make = load_env_creator(make) if isinstance(make, str) else make
    if "reward_clipping" in inspect.signature(make).parameters:
        kwargs = {"reward_clipping": False, **kwargs}
    return gym.make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)

@cache  # both are made, once, to find out
def _shows_other(name, single, vectorized):
    "True if the vectorized form of a name shows something else than the single environment."
    if vectorized is None: return False
    if single is None: return True
    spec = gym.spec(name)
    with closing(gym.make(spec)) as one, closing(_vector_form(spec, 1, {})) as many:
        return one.observation_space != many.single_observation_space

class _One(gym.Env):
    "The only environment of a vectorized form; its picture is the last that it has shown."
    metadata = {"render_modes": ["rgb_array"]}
    def __init__(self, envs, render_mode=None):
        self.envs, self.render_mode = envs, render_mode
        self.observation_space = envs.single_observation_space
        self.action_space = envs.single_action_space

    def reset(self, *, seed=None, options=None):
        obs, info = self.envs.reset(seed=seed, options=options)
        return self._shown(obs, info)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.envs.step(np.asarray([action]))
        obs, info = self._shown(obs, info)
        return obs, float(reward[0]), bool(terminated[0]), bool(truncated[0]), info

    def _shown(self, obs, info):
        self.seen = obs[0].copy()
        return self.seen, {name: info[name][0] for name in ("action_mask",) if name in info}

    def render(self):
        last = self.seen[-1]
        picture = np.stack([last] * 3, -1) if last.ndim == 2 else last
        return picture.repeat(4, 0).repeat(4, 1)

    def close(self): self.envs.close()


def reset(env, seed: int | None, **options) -> tuple:  # as of `env.reset`
    "Reset; a seed that is refused is taken modulo 2^30: some take 31 bits, seed + i included."
    try:
        return env.reset(seed=seed, **options)
    except Exception:
        if seed is None or seed < 2**30: raise
        return env.reset(seed=seed % 2**30, **options)


STATISTICS = "RecordEpisodeStatistics"

def tells_episodes(envs) -> bool:
    "True if RecordEpisodeStatistics tells of each episode's return."
    return STATISTICS in wrapper_names(envs)


def told_episodes(info: dict, size: int) -> tuple:  # three arrays (size,)
    "Ends, returns and lengths that RecordEpisodeStatistics tells of in this step."
    told = info if "episode" in info else info.get("final_info", {})  # of a reset in the same step
    if "episode" not in told: return np.zeros(size, bool), np.zeros(size), np.zeros(size, int)
    return told["_episode"], told["episode"]["r"], told["episode"]["l"]


def copy_env(env, i):
    "A copy whose random generators go on in ways of their own."
    copies = {}
    try:
        copy = deepcopy(env, copies)
    except Exception as e:
        raise ValueError(f"it cannot be copied, so num_envs must be 1 ({e})") from e
    for x in [*copies.values()]:
        if isinstance(x, np.random.Generator):
            kind = type(x.bit_generator)
            x.bit_generator.state = kind((i, int(x.integers(2**63)))).state
        elif isinstance(x, np.random.RandomState):
            x.seed((i, x.randint(2**31)))
        elif isinstance(x, random.Random):
            x.seed(f"{i} {x.random()}")
        elif isinstance(x, torch.Generator):
            x.manual_seed(x.initial_seed() + i)
    return copy


def find_spec(env) -> EnvSpec:  # ID, threshold, entry points; the time limit of a name
    """The entry of an environment in Gymnasium's registry, or one made for your own. It comes by
    name ("module:Name-v0" too), as an object, or from a function."""
    if isinstance(env, EnvSpec): return env
    if isinstance(env, (gym.Env, gym.vector.VectorEnv)):
        known = env.spec if isinstance(env.spec, EnvSpec) else EnvSpec(env_name(env))
        return EnvSpec(known.id, reward_threshold=known.reward_threshold,
                       entry_point=lambda render_mode=None: copy_env(env, 0))
    if callable(env):
        return EnvSpec(env_name(env), entry_point=lambda **kwargs: env(**kwargs))
    if not isinstance(env, str):
        raise TypeError("env must be a name, an environment or a function that makes one, "
                        f"got {env!r}" + ": give it to PPO.load" * (env is None))
    with _naming(env, hint=" (one of your own, or of a package such as minigrid, "
                      "is module:Name-v0)"):
        module, _, name = env.rpartition(":")
        if module:
            import_module(module)
        return gym.spec(name)


def env_name(env) -> str:
    "A name as it came, or that of the class or the function, for logs and files."
    if isinstance(env, str): return env
    if isinstance(env, gym.Env): return type(env.unwrapped).__name__
    return getattr(env, "__name__", type(env).__name__).strip("<>")


def identify(env, env_kwargs: dict | None = None) -> tuple:
    """Tell which environment it is: its `EnvSpec`; `env` for `make_envs`; True if its returns are
    in the units of the registry's threshold. What a function or a class makes for that is used
    first.
    """
    kwargs = env_kwargs or {}
    if isinstance(env, str): return find_spec(env), env, same_task(find_spec(env), kwargs)
    if isinstance(env, gym.Env) or not callable(env):
        return find_spec(env), env, same_task(getattr(env, "spec", None), kwargs, env)
    with _naming(env):
        made = [env(**kwargs)]
        spec = made[0].spec or find_spec(env)
    make = wraps(env)(lambda **kwargs: made.pop() if made else env(**kwargs))
    make.action_space = made[0].action_space
    return spec, make, same_task(made[0].spec, {}, made[0])


def is_continuous(env, env_kwargs: dict | None = None) -> bool:  # as `identify` gives it
    "True if its actions are of `Box`, and no whole numbers; by its name, one is made to see."
    if not isinstance(env, str):
        space = env.action_space
        return isinstance(space, gym.spaces.Box) and space.dtype.kind == "f"
    with _naming(env), closing(make_one(env, env_kwargs or {})) as one:
        return is_continuous(one)


def usual_options(name: str, env, options: dict) -> dict:  # option -> value
    "Those of the name's recipe, or else of `continuous`, where the actions of `env` are numbers."
    found = recipe(name)
    if found or not is_continuous(env, options.get("env_kwargs")): return found
    return continuous(options.get("num_envs", 1))


# arguments that change no task; the time limit is looked at apart
PRESENTATION = "render_mode", "num_envs", "vectorization_mode", "max_episode_steps"

def same_task(spec, kwargs: dict, env=None) -> bool:
    "False if arguments, time limit or wrappers have made another task of a registered one."
    known = gym.registry.get(getattr(spec, "id", None))
    if known is None: return True
    def told(kwargs): return {k: x for k, x in kwargs.items() if k not in PRESENTATION}
    return (told({**spec.kwargs, **kwargs}) == told(known.kwargs)
            and kwargs.get("max_episode_steps", spec.max_episode_steps) == known.max_episode_steps
            and not any(map(_changes_rewards, _below_statistics(wrappers_of(env)))))

def _below_statistics(kinds):
    "The wrappers that RecordEpisodeStatistics tells the returns of; all, without it."
    told = [STATISTICS in _names([kind]) for kind in kinds]
    return kinds[told.index(True) + 1:] if any(told) else kinds

def _changes_rewards(kind):
    "True if a class of wrappers may change rewards: one of the user's own with a `step` may."
    if kind.__module__.startswith("gymnasium."): return "Reward" in kind.__name__
    harmless = gym.ObservationWrapper, gym.ActionWrapper
    return not issubclass(kind, harmless) and kind.step is not gym.Wrapper.step


NORMALIZERS = {"NormalizeObservation": "normalize_obs", "NormalizeReward": "normalize_rewards"}

def wrappers_of(env) -> list:
    "Classes of the wrappers of an environment, the outermost first; of a VectorEnv, its first."
    found = []
    while isinstance(env, (gym.Wrapper, gym.vector.VectorWrapper)):
        found.append(type(env))
        env = env.env
    singles = getattr(env, "envs", ()) if isinstance(env, gym.vector.VectorEnv) else ()
    return found + (wrappers_of(singles[0]) if len(singles) else [])


def wrapper_names(envs) -> list:
    """Names of the wrappers around vectorized environments and around each of them, and of the
    classes that they derive from."""
    if hasattr(envs, "kinds"): return envs.kinds
    return _names(wrappers_of(envs))

def _names(kinds): return [base.__name__ for kind in kinds for base in kind.__mro__]


THRESHOLDS = {"Pendulum-v1": -200.0}  # where Gymnasium names none

def threshold(env) -> float | None:  # mean return; None = none is known
    "Return from which an environment, by `find_spec`, counts as solved."
    spec = find_spec(env)
    return THRESHOLDS.get(spec.id, spec.reward_threshold)


def autoreset_mode(envs: gym.vector.VectorEnv) -> str:  # "NextStep" or "SameStep"
    "When a vectorized environment resets the environments that have ended."
    mode = getattr(envs.metadata.get("autoreset_mode"), "value", None)
    if mode in ("NextStep", "SameStep"): return mode
    raise ValueError(f"envs must reset themselves, autoreset_mode NextStep or SameStep, got {mode}")
