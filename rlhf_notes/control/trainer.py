"""PPO for a user's environment: learn, predict, evaluate, film, save, load and continue.

`PPO` is the loop of `rlhf_notes.control.ppo` with all that a user wants around it; `train` is what
the command runs.
"""

__all__ = ['LONGEST', 'HIGH', 'LARGE', 'SCORES', 'PPO', 'spaces_of', 'episode_returns', 'finish',
           'train']

import math
import time
import warnings
import weakref
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import cached_property, partial

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec

from .. import __version__
from ..checks import checked
from . import plots
from .config import PPOConfig
from .envs import (
    NORMALIZERS, STATISTICS, autoreset_mode, close_envs, copy_env, env_name, identify, make_envs,
    reset, same_task, usual_options, tells_episodes, threshold, told_episodes, wrapper_names,
)
from .export import WholePolicy
from .policy import Agent
from .ppo import Loop, seeds
from .rollout import Collector, can_stagger
from .saved import (
    check_kept, check_sizes, options_again, read_saved, split_options, step_size, told_damage,
)
from .spaces import (
    as_batch, mask_shape, read_mask, row_maker, same_space, space_from_numbers,
    space_to_numbers,
)
from ..training.devices import pick_device, usual_defaults
from ..training.fit import (
    FIRST_LINE, Evaluator, as_hooks, check_finite, check_schedules, diverged, few_threads, fit,
    progress_bar, settings_kept,
)
from ..training.options import our_names, versions
from ..training.runs import Run, save_checked
from ..training.signals import end_later

LONGEST = 10_000  # steps of an episode whose time limit is not known
HIGH = 0.4  # clip fraction, from which on an update goes too far
LARGE = 1000  # root mean square of advantages, from which on rewards should be scaled
SCORES = ("eval_return_mean", "eval_return_std",
          "eval_sampled_return_mean", "eval_sampled_return_std")


@contextmanager
def told_ends():
    "Say what the bare errors of a pipe mean."
    try:
        yield
    except (ConnectionError, EOFError) as e:
        raise ChildProcessError("the process of an environment has ended") from e


class PPO(Loop):
    """PPO for a user's environment: learn, predict, evaluate, save and load.

    Options that are not given come from the recipe of the environment, or else from `continuous`
    where actions are numbers, or else they are CartPole's; `.config` shows them all.
    """
    out = run = _rows = None
    clipped = False  # True once the clip fraction was said to be high
    collect = settings_kept()(Loop.collect)  # an environment may have set them

    @our_names
    @usual_defaults()
    def __init__(
        self,
        env="CartPole-v1",  # a name, a function that makes one, an environment or a VectorEnv
        *,
        out=None,  # a run directory to write; None = none
        track=("tensorboard",),  # trackers for it: tensorboard, wandb, trackio
        **options,  # of `PPOConfig`; `network`; learning_rate and clip as functions of what is left
    ):
        self._write_to(out, track, options)
        made = isinstance(env, gym.vector.VectorEnv)
        for name in ("vectorization", "env_kwargs") if made else ():
            if options.get(name) not in (None, "auto"):
                raise ValueError(f"{name} must be left out for environments that are made, got "
                                 f"{options[name]!r}")
        self.spec, make, same_units = identify(env, options.get("env_kwargs"))
        self._setup(env, make, env_name(env), options, same_units)
        self._tell_copies()
        self.collector  # raises what is wrong with `stagger`

    def _write_to(self, out, track, options):
        "Take a run directory; refuse it, or options, before an environment is made."
        if out is not None:
            Run.check(out)
        check_schedules(options, learning_rate=["lr_anneal"], clip=["clip_anneal"])
        self.out, self.track = out, [track] if isinstance(track, str) else [*track]

    def _setup(self, env, make, name, options, same_units, spaces=None):
        "Networks and counters; `spaces` None = those of the environments, which are made now."
        if isinstance(env, gym.vector.VectorEnv):
            options = {"num_envs": env.num_envs, **options}
        options, self.own = split_options(options)
        self.env, self._make, self._envs, self._spare = env, make, None, None
        self.threshold = threshold(self.spec) if same_units else None
        whole = spaces or options.keys() >= PPOConfig.__dataclass_fields__.keys() - {"env"}
        found = {} if whole else usual_options(self.spec.id, make, options)
        self.config = c = PPOConfig(**{**found, "env": name, **options})
        self.spaces = spaces or spaces_of(self.envs)
        if "stagger" in found.keys() - options and not can_stagger(self.envs):
            warnings.warn(f"the recipe of {self.spec.id} has stagger=True, which is left off: "
                          "these environments have no time limit, or are not reset one by one")
            self.config = c = replace(c, stagger=False)
        weights = torch.Generator().manual_seed(seeds(c.seed)[1])
        agent = Agent(*self.spaces, c, weights, self.own.get("network"))
        agent.to(pick_device(c.device))
        super().__init__(c, agent)
        for name in self.schedules.keys() & self.own:
            self.schedules[name] = partial(step_size, name, self.own[name])
        self.rows = []  # of metrics, one for each iteration
        self.goal, self.end = 0, c.iterations  # of `learn`: steps and iterations
        self.clock = dict(wall_seconds=0.0, steps_to_solve=None, seconds_to_solve=None)
        self.evaluator = None
        if c.eval_every:
            self.evaluator = Evaluator(self._look, c.eval_every, "steps", "eval_return_mean",
                                       self._keep if c.keep_best else None, self._put)

    def _tell_copies(self):
        "Say at the start what an environment's copies and wrappers keep to themselves."
        n, kinds = self.config.num_envs, wrapper_names(self.envs)
        if isinstance(self.env, gym.Env) and n > 1:
            warnings.warn(f"num_envs={n} makes copies of env, and none follows its changes: change "
                          'them by trainer.envs.set_attr("name", value)', stacklevel=4)
        for kind in dict.fromkeys(kinds):
            if kind in NORMALIZERS:
                warnings.warn(f"env has {kind}: each of {n} environments keeps moments of its own, "
                              f"and no file holds them; leave it out, and give "
                              f"{NORMALIZERS[kind]}=True", stacklevel=4)
        around = kinds[:kinds.index(STATISTICS)] if STATISTICS in kinds else ()
        if "TimeLimit" in around:
            warnings.warn(f"env has TimeLimit around {STATISTICS}, which tells of no episode that "
                          "it cuts: return_mean leaves them out; put it inside", stacklevel=4)

    @classmethod
    def begin(
        cls,
        config: PPOConfig,  # all options
        run: Run | None = None,  # to continue, if it has a checkpoint
    ) -> "PPO":  # ready to `learn`
        "A trainer at the start of its training, or where its run stopped."
        ppo = cls(**vars(config))
        if run is None or run.checkpoint is None: return ppo
        ppo.load_state_dict(run.checkpoint["ppo"])
        ppo.rows = list(run.rows)
        return ppo

    def __getstate__(self):  # of a copy or a pickle, without environments and run directory
        spec = EnvSpec(self.spec.id, reward_threshold=self.spec.reward_threshold)
        kept = {name: x for name, x in vars(self).items() if name not in ("_closing", "collector")}
        left_out = dict.fromkeys(("_envs", "_spare", "_rows", "out", "run"))
        return kept | left_out | dict(spec=spec, _make=self.env)

    def __setstate__(self, state):
        vars(self).update(state)
        self._begin_episodes()

    @property
    def envs(self) -> gym.vector.VectorEnv:  # made when they are needed
        "The environments of the training."
        if self._envs is None:
            c = self.config
            self._envs = make_envs(self._make, c.num_envs, c.vectorization, c.env_kwargs)
            lent = self._envs is self._make  # a VectorEnv of the user's, who closes it
            self._closing = weakref.finalize(self, bool if lent else close_envs, self._envs)
            self._closing.atexit = False
            self._check_spaces(self._envs)
        return self._envs

    def _check_spaces(self, envs, name="env"):
        "ValueError if these environments show or take something else than the policy knows."
        for kind, mine, theirs in zip(("observations", "actions"), getattr(self, "spaces", ()),
                                      spaces_of(envs)):
            if not same_space(mine, theirs):
                raise ValueError(f"{name} must have the {kind} that the policy has learned with, "
                                 f"{mine}, got {theirs}")

    def close(self):
        "Close the environments; what needs them later makes new ones, with new episodes."
        envs, self._envs = self._envs, None
        spare, self._spare = self._spare, None
        self._begin_episodes()
        if spare is not None and spare is not envs:
            close_envs(spare)
        if envs is not None:
            self._closing()

    @cached_property
    def collector(self) -> Collector:  # in the middle of its episodes
        "Plays the environments of the training."
        return Collector(self.envs, seeds(self.config.seed, self.iteration)[0],
                         self.config.stagger)

    def _begin_episodes(self):
        "Fresh episodes and random numbers, seeded by (seed, iteration)."
        vars(self).pop("collector", None)
        self.scaling.running.zero_()
        self.draw_from(seeds(self.config.seed, self.iteration)[1])

    def iterate(self) -> dict:  # column -> number
        "One iteration: its row of metrics, which joins `rows`."
        start = time.perf_counter()
        try:
            row = super().iterate()
        except BaseException as e:
            self._fail(e)
        check_finite(f"iteration {self.iteration}", row)
        self.rows.append(row)
        if self.iteration == 1:
            self._note_size(row)
        self._note_clips()
        self._note_time(row, time.perf_counter() - start)
        return row

    def _fail(self, error):
        "Close the environments, one of which may have failed; raise, and say what it means."
        with suppress(Exception):  # which may be as broken
            self.close()
        if isinstance(error, FloatingPointError):
            raise diverged(f"iteration {self.iteration + 1}", error) from error
        with told_ends():
            raise error

    @our_names
    @checked(steps="int [1, 1e12]?")
    def learn(
        self,
        steps: int | None = None,  # at least so many more; None = to the end of the option `steps`
        run: Run | None = None,  # directory to log and save to; None = nowhere
        callback=None,  # callback(trainer, row) after each iteration; False ends the training
    ) -> "PPO":  # itself, with the metrics in `rows`
        "Train, until Ctrl-C at most; rate and clip fall to the end of `steps`, whichever is later."
        c = self.config
        self.goal = self.steps + (steps or 0)
        more = self.iteration + math.ceil((steps or 0) / self.size)
        self.end = self.iterations if steps is None else more
        self.last = max(self.iterations, self.end)
        if not self.left:
            warnings.warn(f"nothing is left of {c.steps} steps; learn(steps=...) goes on",
                          stacklevel=3)
        run = run or self._own_run()
        log, save = self._files(run) if run else (None, None)
        hooks = as_hooks(self.evaluator, log, callback)
        bar = progress_bar(self.end * self.size, self.iteration * self.size, c.env)
        logged = run.training() if run else nullcontext()
        with end_later(), few_threads(self.agent), logged:
            if self.evaluator:
                self.evaluator.go_on()
            fit(self, bar, self.size, {"return": "return_mean", "kl": "kl_k3"}, hooks, save)
            self.take_best()
            if self.run is not None:
                finish(self, self.run, interrupted=self.left)
        return self

    def _own_run(self):
        "The run in the directory `out`; None without one."
        if self.out and self.run is None:
            about = {"task": "train", "algo": "ppo", **asdict(self.config)}
            self.run = Run.create(self.out, {**about, "track": self.track, "versions": versions()})
        return self.run

    def _files(self, run):
        "A hook that writes a row to a run; what saves a checkpoint there."
        def log(trainer, row):
            run.log(row, row["steps"])
            run.log_episodes(self.ended)
        return log, lambda: run.save_checkpoint({"ppo": self.state_dict()})

    @property
    def left(self) -> bool:
        "True while `learn` has iterations left."
        return self.iteration < self.end or self.steps < self.goal

    def _look(self):
        "Mean return on episodes of its own."
        c = self.config
        return self.evaluate(c.eval_episodes, seed=seeds(c.seed, 1)[2]).mean().item()

    def _keep(self):
        self.optimizer.tie(self.agent)
        return dict(weights=self.optimizer.vector.detach().clone(),
                    obs=self.scaling.seen.state_dict())

    @torch.no_grad()
    def _put(self, kept):
        self.optimizer.tie(self.agent)
        self.optimizer.vector.copy_(kept["weights"])
        self.scaling.seen.load_state_dict(kept["obs"])

    def take_best(self):
        "Put the best policy of the evaluations back, if one was kept."
        if self.evaluator:
            self.evaluator.take_best()

    def _note_size(self, row):
        "Warn of rewards that the value function will never reach."
        size = (2 * row["value_loss"]) ** 0.5  # the loss is half the mean square
        if size > LARGE:
            warnings.warn(f"the first advantages are around {size:.0f}, and a value function "
                          "learns numbers around 1: try normalize_rewards=True", stacklevel=5)

    def _note_clips(self):
        "Warn, once, of an update that leaves the clip range for ten iterations in a row."
        clips = [row["clip_fraction"] for row in self.rows[-10:]]
        if self.clipped or len(clips) < 10 or min(clips) <= HIGH: return
        self.clipped = True
        warnings.warn(f"clip_fraction has been above {HIGH} for ten iterations: an update moves "
                      "the policy too far; try less than learning_rate="
                      f"{self.config.learning_rate:g}, or fewer epochs", stacklevel=5)

    def _note_time(self, row, seconds):
        "Add to the clock; note when the recent episodes first reached the threshold."
        clock, full = self.clock, len(self.recent) == self.recent.maxlen
        clock["wall_seconds"] += seconds
        if clock["steps_to_solve"] or self.threshold is None or not full: return
        if row["return_mean"] >= self.threshold:
            clock.update(steps_to_solve=row["steps"], seconds_to_solve=clock["wall_seconds"])

    def predict(
        self,
        obs,  # one observation, or a batch of them
        deterministic: bool = True,  # the most probable action; False = drawn
        action_mask=None,  # (n,), or a batch: 1 for each possible one of n Discrete actions
    ):  # an action for the environment, or a batch of them
        "Choose an action."
        batch, alone = as_batch(self.spaces[0], obs)
        if self._rows is None:
            self._rows = row_maker(self.spaces[0])
        rows, mask = self._rows(batch), ()
        if action_mask is None and getattr(vars(self).get("collector"), "mask_shape", None):
            warnings.warn("action_mask is None, so that impossible actions may be chosen: env "
                          'gives info["action_mask"]', stacklevel=2)
        if action_mask is not None:
            given = np.asarray(action_mask)
            mask = self._read_mask(given[None] if alone else given, len(rows)),
        choose = self.policy(None if deterministic else self.rng, copy=False)
        chosen = self.agent.head.for_env(choose(rows, *mask))
        return chosen[0] if alone else chosen

    def _read_mask(self, mask, size):
        if not isinstance(self.spaces[1], gym.spaces.Discrete):
            raise ValueError(f"action_mask must be None for actions of {self.spaces[1]}")
        return read_mask(dict(action_mask=mask), (size, self.agent.head.outputs))

    @checked(episodes="int [1, 1e6]", deterministic="flag", seed="int [0, inf)?",
             longest="int [1, 1e12]?")
    def evaluate(
        self,
        episodes: int = 100,  # each played whole
        deterministic: bool = True,  # the most probable actions; False = drawn
        seed: int | None = None,  # of the episodes; None = the run's own for evaluation
        envs=None,  # to play in; None = the evaluation's own, a user's VectorEnv excepted
        longest: int | None = None,  # steps after which an episode is given up; None = time limit
    ) -> torch.Tensor:  # (episodes,)
        "Return of each of some episodes; in the training's environments, training begins new ones."
        own = seeds(self.config.seed)[2 if deterministic else 3]
        seed = own if seed is None else seed
        # `seed` alone would give the environments' own random numbers
        policy = self.policy(None if deterministic else np.random.default_rng((seed, 1)))
        def choose(*seen): return self.agent.head.for_env(policy(*seen))
        kwargs = self.config.env_kwargs if envs is None else None
        if envs is None:
            normal = NORMALIZERS.keys() & wrapper_names(self._envs)  # a name's entry point may wrap
            own = not isinstance(self.env, str) or normal
            envs = self._own_envs() if own else self.env
        with ExitStack() as made:
            if not isinstance(envs, gym.vector.VectorEnv):
                envs = make_envs(envs, episodes, env_kwargs=kwargs)
                made.callback(envs.close)
            self._check_spaces(envs, "envs")
            if envs is self._envs:
                self._begin_episodes()
            return episode_returns(choose, seed, episodes, envs, longest)

    def _own_envs(self):
        "Environments for evaluation; the training's, where they cannot be had a second time."
        alone = isinstance(self.env, gym.Env) and self.config.num_envs == 1
        if alone and self._spare is not None and self._spare is not self.envs:
            close_envs(self._spare)  # a copy of the object as it was
            self._spare = None
        if self._spare is None:
            try:
                self._spare = self._second_envs()
            except ValueError as e:
                warnings.warn("each evaluation plays in the training's environments and ends their "
                              f"episodes: {e}", stacklevel=4)
                self._spare = self.envs
        return self.envs if self._spare.closed else self._spare

    def _second_envs(self):
        c, env = self.config, self.env
        if isinstance(env, gym.vector.VectorEnv) or env is None:
            raise ValueError("give env as a function or a name, and it has others")
        if normal := [kind for kind in wrapper_names(self.envs) if kind in NORMALIZERS]:
            raise ValueError(f"{normal[0]} has its moments there")
        alone = isinstance(env, gym.Env) and c.num_envs == 1
        made = make_envs(partial(copy_env, env, 0) if alone else env, c.num_envs, c.vectorization,
                         c.env_kwargs)
        mine, theirs = ({id(x.unwrapped) for x in getattr(e, "envs", ())}
                        for e in (self.envs, made))
        if mine & theirs: raise ValueError("env returns the same environment again")
        return made

    def scores(self) -> dict:  # for the summary
        "Mean and standard deviation of the return, greedy and sampled; solved if both are."
        # in the training's environments: there may be one only, and wrappers may hold moments
        how = dict(episodes=self.config.eval_episodes, envs=self.envs)
        greedy, sampled = self.evaluate(**how), self.evaluate(**how, deterministic=False)
        numbers = greedy.mean(), greedy.std(), sampled.mean(), sampled.std()
        solve = self.threshold
        solved = None if solve is None else bool(min(greedy.mean(), sampled.mean()) >= solve)
        scores = dict(zip(SCORES, map(float, numbers)))
        return scores | dict(eval_episodes=len(greedy), solved=solved)

    def film(
        self,
        path,  # the file to write, .gif or .mp4
        seed: int = 0,  # of the episode
        deterministic: bool = True,  # the most probable actions; False = drawn
    ):  # the path
        "Film one episode."
        return plots.film(self.env, lambda obs, **mask: self.predict(obs, deterministic, **mask),
                          path, seed, env_kwargs=self.config.env_kwargs)

    def export(self) -> WholePolicy:  # forward(obs, mask=None) -> actions, for torch.export or ONNX
        "The policy as it is now, from observations to actions, as one module of PyTorch."
        return WholePolicy(self.agent, self.scaling, self.spaces)

    def _learned(self):
        return dict(agent=self.agent, optimizer=self.optimizer,
                    obs=self.scaling.seen, rewards=self.scaling.earned)

    def state_dict(self) -> dict:  # tensors, numbers, strings, and lists and dicts of those
        "Everything a training continues from, but the episodes: those begin anew."
        learned = {name: x.state_dict() for name, x in self._learned().items()}
        if self.evaluator:
            learned["evaluator"] = self.evaluator.state_dict()
        return learned | dict(spent=self.iteration * self.config.batch, steps=self.steps,
                              episodes=self.episodes, recent=[*self.recent], clock=dict(self.clock))

    def load_state_dict(
        self,
        state: dict,  # from `state_dict` of a PPO with the same networks
    ):
        "Continue from a checkpoint, with new episodes; other `num_envs` share what was spent."
        if missing := self.state_dict().keys() - state.keys() - {"evaluator"}:
            raise ValueError(f"the state is of another version, without {min(missing)}")
        try:
            for name, x in self._learned().items():
                x.load_state_dict(state[name])
        except RuntimeError as e:
            raise ValueError(f"the options are not those of the saved networks: {e}") from e
        self.iteration = round(state["spent"] / self.config.batch)
        self.steps, self.episodes = state["steps"], state["episodes"]
        self.recent.extend(state["recent"])
        self.clock.update(state["clock"])
        if self.evaluator and "evaluator" in state:
            self.evaluator.load_state_dict(state["evaluator"])
        self._begin_episodes()

    def save(
        self,
        path,  # the file to write
    ):
        "Save config, networks and optimizer."
        check_kept(self.config.env_kwargs or {})
        own = {name: None if callable(x) else x for name, x in self.own.items()}
        saved = dict(version=__version__, config=vars(self.config), own=own,
                     state=self.state_dict(),
                     spaces=[space_to_numbers(space) for space in self.spaces])
        save_checked(path, saved)

    @classmethod
    @usual_defaults()
    def load(
        cls,
        path,  # from `save`
        env=None,  # a name, a function or an environment; None = the saved name, if registered
        *,
        out=None,  # a run directory to write; None = none
        track=("tensorboard",),  # trackers for it: tensorboard, wandb, trackio
        **options,  # that change; device="cpu" if need be
    ) -> "PPO":  # as it was saved; to predict needs no environment
        "A trainer to predict, evaluate or learn on; nothing is imported that the file names."
        ppo = cls.__new__(cls)
        ppo._write_to(out, track, options)
        saved = read_saved(path)
        with told_damage(path, ValueError):
            spaces = [space_from_numbers(x) for x in saved["spaces"]]
        with told_damage(path):
            options = options_again(saved, path, options)
            name = options.pop("env")
            check_sizes(saved, path, options, spaces)
        given = env
        if given is None:
            given = make = name if name in gym.registry else None
            ppo.spec = gym.registry.get(name, EnvSpec("Unknown"))
            same = given is None or same_task(ppo.spec, options.get("env_kwargs") or {})
        else:
            ppo.spec, make, same = identify(env, options.get("env_kwargs"))
            name = env_name(env)
        ppo._setup(given, make, name, options, same, spaces)
        if env is not None:
            ppo._tell_copies()
        try:
            with told_damage(path):
                ppo.load_state_dict(saved["state"])
        except ValueError as e:
            raise ValueError(f"path must fit the options and the version, got {path}: {e}") from e
        return ppo


def spaces_of(envs) -> list:
    "The spaces of one observation and of one action."
    return [envs.single_observation_space, envs.single_action_space]


@told_ends()
@settings_kept()
@checked(episodes="int [1, 1e6]", longest="int [1, 1e12]?")
def episode_returns(choose, seed: int, episodes: int = 100, env="CartPole-v1",
                    longest: int | None = None) -> torch.Tensor:
    """Return of each of whole episodes, (episodes,), in the order in which they ended.

    choose(obs (N, obs_size) array) -> actions; choose(obs, mask) where there are masks. `env` is
    one for `make_envs`, an episode in each, or its result. An episode is given up after `longest`
    steps: by default the time limit, or `LONGEST` where none is known.
    """
    if not isinstance(env, gym.vector.VectorEnv):
        with closing(make_envs(env, episodes)) as envs:
            return episode_returns(choose, seed, episodes, envs, longest)
    N, done, bar = env.num_envs, False, progress_bar(episodes, 0, "evaluation", FIRST_LINE)
    limit = getattr(env.spec, "max_episode_steps", None)
    longest = longest or limit or LONGEST
    left = (episodes + np.arange(N)) // N  # for each its share: the first to end are the short ones
    total, length, resetting, returns = np.zeros(N), np.zeros(N, int), np.zeros(N, bool), []
    obs, info = reset(env, seed)
    rows, shape = row_maker(env.single_observation_space), mask_shape(info)
    tells = tells_episodes(env)
    while left.any():
        seen = (rows(obs),) if shape is None else (rows(obs), read_mask(info, shape, done))
        obs, reward, terminated, truncated, info = env.step(choose(*seen))
        total += np.where(resetting, 0, reward)
        length += ~resetting
        done = terminated | truncated
        ended, told, _ = told_episodes(info, N) if tells else (done, total, length)
        over = ended | (length >= longest)
        _tell_long(length[left > 0], ended[left > 0], longest, limit)
        returns.extend(np.where(ended, told, total)[over & (left > 0)])
        left[over & (left > 0)] -= 1
        total[over] = length[over] = 0
        resetting = done & (autoreset_mode(env) == "NextStep")
        bar.update(len(returns) - bar.n)
    bar.close()
    return torch.from_numpy(np.float32(returns))


def _tell_long(length, done, longest, limit):
    "Warn of an episode that may have no end, before it is given up and when it is."
    if limit is None and (length == longest // 10).any() and longest > 10:
        warnings.warn(f"an episode goes on after {longest // 10} steps, and no time limit is "
                      f"known: it is given up after longest={longest}", stacklevel=4)
    if ((length >= longest) & ~done).any():
        warnings.warn(f"an episode has no end after {longest} steps, and counts as ended",
                      stacklevel=4)


def finish(
    ppo: PPO,  # that has learned
    run: Run | None,  # its directory; None = nothing is written
    interrupted: bool = False,  # before the end of its steps
) -> dict:  # the summary
    "Evaluate, and write the last files of a run directory."
    scores = dict.fromkeys([*SCORES, "eval_episodes"])
    scores["solved"] = None if ppo.threshold is None else False
    try:
        scores = scores if interrupted else ppo.scores()
    except KeyboardInterrupt:
        interrupted = True
    c = ppo.config
    task = c.env if run is None else run.config["task"]
    summary = dict(task=task, env=c.env, algo="ppo", seed=c.seed, device=str(ppo.device),
                   steps=ppo.steps, interrupted=interrupted, **ppo.clock, **scores)
    if run is not None:
        ppo.close()  # the next seed may need the only one there is
        run.finish(summary)
        ppo.save(run.path / "ppo.pt")
        run.save_figure(lambda figure: plots.plot_run(figure, ppo.rows, summary))
    return summary


def train(
    config: PPOConfig,  # all options
    run: Run | None = None,  # where to write, and perhaps continue; None = nowhere
) -> tuple[PPO, list, dict]:  # the trainer, the rows of metrics, and the summary
    "Train to the end or to Ctrl-C, evaluate, and write a whole run directory in either case."
    with run.training() if run else nullcontext():
        ppo = PPO.begin(config, run)
        if ppo.left:
            ppo.learn(run=run)
        ppo.take_best()
        summary = finish(ppo, run, interrupted=ppo.iteration < config.iterations)
    return ppo, ppo.rows, summary
