"""PPO for a user's environment: learn, predict, evaluate, film, save, load and continue.

`PPO` is the loop of `rlhf_notes.control.ppo` with all that a user wants around it; `train` is what
the command runs.
"""

__all__ = ['LARGE', 'SCORES', 'PPO', 'episode_returns', 'finish', 'train']

import math
import time
import warnings
import weakref
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec

from .. import __version__
from ..checks import checked
from . import plots
from .config import RECIPES, PPOConfig
from .envs import autoreset_mode, env_name, identify, make_envs, threshold
from .policy import Agent
from .ppo import RECENT, Loop, seeds
from .rollout import Collector
from .saved import check_kept, options_again, read_saved, split_options, step_size
from rlhf_notes.control.spaces import (
    as_batch,
    mask_shape,
    read_mask,
    row_maker,
    space_from_numbers,
    space_to_numbers,
)
from ..training.devices import pick_device, usual_defaults
from ..training.fit import Evaluator, fit
from ..training.options import versions
from ..training.runs import Run, save_checked
from ..training.signals import check_finite, diverged, progress_bar

LARGE = 1000  # root mean square of advantages, from which on rewards should be scaled
SCORES = ("eval_return_mean", "eval_return_std",
          "eval_sampled_return_mean", "eval_sampled_return_std")


class PPO(Loop):
    "PPO for a user's environment: learn, predict, evaluate, save and load."
    out = run = None

    @usual_defaults()
    def __init__(
        self,
        env="CartPole-v1",  # a name, a function that makes one, an environment or a VectorEnv
        *,
        out=None,  # a run directory to write; None = none
        track=("tensorboard",),  # trackers for it: tensorboard, wandb, trackio
        **options,  # of `PPOConfig`; `network`; learning_rate and clip as functions of what is left
    ):
        if out is not None:
            Run.check(out)
        self.spec, make = identify(env, options.get("env_kwargs"))
        self._setup(env, make, env_name(env), options)
        self.out, self.track = out, [track] if isinstance(track, str) else [*track]
        self.collector  # raises what is wrong with `stagger`

    def _setup(self, env, make, name, options, spaces=None):
        "Networks and counters; `spaces` None = those of the environments, which are made now."
        if isinstance(env, gym.vector.VectorEnv):
            options = {"num_envs": env.num_envs, **options}
        options, self.own = split_options(options)
        self.env, self._make, self._envs = env, make, None
        self.config = c = PPOConfig(**{**RECIPES.get(self.spec.id, {}), "env": name, **options})
        single = "single_observation_space", "single_action_space"
        self.spaces = spaces or [getattr(self.envs, space) for space in single]
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
                                       self._keep if c.keep_best else None)

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
        left_out = dict(spec=spec, _make=self.env, _envs=None, _collector=None, out=None, run=None)
        return {name: x for name, x in vars(self).items() if name != "_closing"} | left_out

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
            self._closing = weakref.finalize(self, bool if lent else self._envs.close)
            self._closing.atexit = False
        return self._envs

    def close(self):
        "Close the environments; what needs them later makes new ones, with new episodes."
        envs, self._envs = self._envs, None
        self._begin_episodes()
        if envs is not None:
            self._closing()

    @property
    def collector(self) -> Collector:  # in the middle of its episodes
        "Plays the environments of the training."
        if self._collector is None:
            env_seed = seeds(self.config.seed, self.iteration)[0]
            self._collector = Collector(self.envs, env_seed, self.config.stagger)
        return self._collector

    def _begin_episodes(self):
        "Fresh episodes and random numbers, seeded by (seed, iteration)."
        self._collector = None
        self.scaling.running.zero_()
        self.draw_from(seeds(self.config.seed, self.iteration)[1])

    def collect(self) -> tuple:  # as of the loop
        "Play; an environment that fails is closed."
        try:
            return super().collect()
        except BaseException as e:
            with suppress(Exception):  # which may be as broken
                self.close()
            if not isinstance(e, (ConnectionError, EOFError)): raise
            raise ChildProcessError("the process of an environment has ended") from e

    @usual_defaults("agent")
    def iterate(self) -> dict:  # column -> number
        "One iteration: its row of metrics, which joins `rows`."
        start, where = time.perf_counter(), f"iteration {self.iteration + 1}"
        try:
            row = super().iterate()
        except FloatingPointError as e:
            raise diverged(where, e) from e
        check_finite(where, row)
        self.rows.append(row)
        self._note_size(row)
        self._note_time(row, time.perf_counter() - start)
        return row

    @checked(steps="int [1, inf)?")
    def learn(
        self,
        steps: int | None = None,  # at least so many more; None = to the end of the option `steps`
        run: Run | None = None,  # directory to log and save to; None = nowhere
        callback=None,  # callback(trainer, row) after each iteration; False ends the training
    ) -> "PPO":  # itself, with the metrics in `rows`
        "Train, until Ctrl-C at most; rate and clip fall to the end of `steps`, whichever is later."
        c, goes_on = self.config, math.ceil((steps or 0) / self.config.batch)
        self.end = c.iterations if steps is None else self.iteration + goes_on
        self.goal, self.last = self.steps + (steps or 0), max(c.iterations, self.end)
        if not self.left:
            warnings.warn(f"nothing is left of {c.steps} steps; learn(steps=...) goes on",
                          stacklevel=3)
        run = run or self._begin_run()
        hooks, save = [self.evaluator, callback], None
        if run is not None:
            hooks.insert(1, lambda trainer, row: run.log(row, row["steps"]))
            def save(): run.save_checkpoint({"ppo": self.state_dict()})
        bar = progress_bar(self.end * c.batch, self.iteration * c.batch, c.env)
        fit(self, bar, c.batch, {"return": "return_mean", "kl": "kl_k3"},
            hooks, save)
        self.take_best()
        if self.run is not None:
            finish(self, self.run)
        return self

    def _begin_run(self):
        "The directory `out`, made by the first `learn`; None without one."
        if self.out is not None and self.run is None:
            about = {"task": "train", "algo": "ppo", **asdict(self.config)}
            self.run = Run.create(self.out, {**about, "track": self.track, "versions": versions()})
        return self.run

    @property
    def left(self) -> bool:
        "True while `learn` has iterations left."
        return self.iteration < self.end or self.steps < self.goal

    def _look(self):
        "Mean return on episodes of its own."
        c = self.config
        return self.evaluate(c.eval_episodes, seed=seeds(c.seed, 1)[2]).mean().item()

    def _keep(self):
        return dict(weights=self.optimizer.vector.detach().clone(),
                    obs=self.scaling.seen.state_dict())

    @torch.no_grad()
    def take_best(self):
        "Put the best policy of the evaluations back, if one was kept."
        kept = self.evaluator and self.evaluator.kept
        if not kept: return
        self.optimizer.vector.copy_(kept["weights"])
        self.scaling.seen.load_state_dict(kept["obs"])

    def _note_size(self, row):
        "Warn, at the first iteration, of rewards that the value function will never reach."
        size = (2 * row["value_loss"]) ** 0.5  # the loss is half the mean square
        if row["iteration"] == 1 and size > LARGE:
            warnings.warn(f"the first advantages are around {size:.0f}, and a value function "
                          "learns numbers around 1: try normalize_rewards=True", stacklevel=6)

    def _note_time(self, row, seconds):
        "Add to the clock; note when the recent episodes first reached the threshold."
        clock, solve = self.clock, threshold(self.spec)
        clock["wall_seconds"] += seconds
        if clock["steps_to_solve"] or solve is None or len(self.recent) < RECENT: return
        if row["return_mean"] >= solve:
            clock.update(steps_to_solve=row["steps"], seconds_to_solve=clock["wall_seconds"])

    def predict(
        self,
        obs,  # one observation, or a batch of them
        deterministic: bool = True,  # the most probable action; False = drawn
        action_mask=None,  # (n,), or a batch: 1 for each possible one of n Discrete actions
    ):  # an action for the environment, or a batch of them
        "Choose an action."
        batch, alone = as_batch(self.spaces[0], obs)
        rows, mask = row_maker(self.spaces[0])(batch), ()
        if action_mask is not None:
            mask = self._read_mask(np.asarray(action_mask)[None if alone else slice(None)], len(rows)),
        choose = self.policy(None if deterministic else self.rng, copy=False)
        chosen = self.agent.head.for_env(choose(rows, *mask))
        return chosen[0] if alone else chosen

    def _read_mask(self, mask, size):
        if not isinstance(self.spaces[1], gym.spaces.Discrete):
            raise ValueError(f"action_mask must be None for actions of {self.spaces[1]}")
        return read_mask(dict(action_mask=mask), (size, self.agent.head.outputs))

    @checked(episodes="int [1, inf)", deterministic="flag", seed="int [0, inf)?")
    def evaluate(
        self,
        episodes: int = 100,  # each played whole
        deterministic: bool = True,  # the most probable actions; False = drawn
        seed: int | None = None,  # of the episodes; None = the run's own for evaluation
        envs=None,  # to play in; None = fresh ones by name, else the training's
    ) -> torch.Tensor:  # (episodes,)
        "Return of each of some episodes; in the training's environments, training begins new ones."
        own = seeds(self.config.seed)[2 if deterministic else 3]
        seed = own if seed is None else seed
        # `seed` alone would give the environments' own random numbers
        policy = self.policy(None if deterministic else np.random.default_rng((seed, 1)))
        size, head = self.agent.obs_size, self.agent.head
        def choose(obs, *mask):
            if obs.shape[1] == size: return head.for_env(policy(obs, *mask))
            raise ValueError(f"envs must have observations of size {size}, got {obs.shape[1]}")
        if envs is None and isinstance(self.env, str):
            with closing(make_envs(self.env, episodes, env_kwargs=self.config.env_kwargs)) as fresh:
                return episode_returns(choose, seed, episodes, fresh)
        if envs in (None, self._envs):
            envs = self.envs
            self._begin_episodes()
        return episode_returns(choose, seed, episodes, envs)

    def scores(self) -> dict:  # for the summary
        "Mean and standard deviation of the return, greedy and sampled; solved if both are."
        # in the training's environments: there may be one only, and wrappers may hold moments
        how = dict(episodes=self.config.eval_episodes, envs=self.envs)
        greedy, sampled = self.evaluate(**how), self.evaluate(**how, deterministic=False)
        numbers = greedy.mean(), greedy.std(), sampled.mean(), sampled.std()
        solve = threshold(self.spec)
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
        env=None,  # as for `PPO`; None = made when it is needed, if the saved name is registered
        **options,  # that change; device="cpu" if need be
    ) -> "PPO":  # as it was saved; to predict needs no environment
        "A trainer to predict, evaluate or learn on; nothing is imported that the file names."
        saved = read_saved(path)
        options = options_again(saved, path, options)
        name = options.pop("env")
        if env is not None:
            ppo = cls(env, **options)
        else:
            ppo, known = cls.__new__(cls), name if name in gym.registry else None
            ppo.spec = gym.registry.get(name, EnvSpec("Unknown"))
            spaces = [space_from_numbers(x) for x in saved["spaces"]]
            ppo._setup(known, known, name, options, spaces)
        try:
            ppo.load_state_dict(saved["state"])
        except ValueError as e:
            raise ValueError(f"path must fit the options and the version, got {path}: {e}") from e
        return ppo


@checked(episodes="int [1, inf)")
def episode_returns(
    choose,  # choose(obs (N, obs_size) array) -> actions; choose(obs, mask) where there are masks
    seed: int,  # of the environments
    episodes: int = 100,  # each played from start to end
    env="CartPole-v1",  # as for `make_envs`, an episode in each; or such a result
    longest: int = 100_000,  # steps after which an episode is given up, with a warning
) -> torch.Tensor:  # (episodes,), in the order in which they ended
    "Return of whole episodes."
    if not isinstance(env, gym.vector.VectorEnv):
        with closing(make_envs(env, episodes)) as envs:
            return episode_returns(choose, seed, episodes, envs, longest)
    N, done = env.num_envs, False
    left = (episodes + np.arange(N)) // N  # for each its share: the first to end are the short ones
    total, length, resetting, returns = np.zeros(N), np.zeros(N, int), np.zeros(N, bool), []
    obs, info = env.reset(seed=seed)
    rows, shape = row_maker(env.single_observation_space), mask_shape(info)
    while left.any():
        seen = (rows(obs),) if shape is None else (rows(obs), read_mask(info, shape, done))
        obs, reward, terminated, truncated, info = env.step(choose(*seen))
        total += np.where(resetting, 0, reward)
        length += ~resetting
        done = terminated | truncated
        over = done | (length >= longest)
        if (over & ~done & (left > 0)).any():
            warnings.warn(f"an episode has no end after {longest} steps, and counts as ended")
        returns.extend(total[over & (left > 0)])
        left[over & (left > 0)] -= 1
        total[over] = length[over] = 0
        resetting = done & (autoreset_mode(env) == "NextStep")
    return torch.from_numpy(np.float32(returns))


def finish(
    ppo: PPO,  # that has learned
    run: Run | None,  # its directory; None = nothing is written
    interrupted: bool = False,  # before the end of its steps
) -> dict:  # the summary
    "Evaluate, and write the last files of a run directory."
    scores = dict.fromkeys([*SCORES, "eval_episodes"])
    scores["solved"] = None if threshold(ppo.spec) is None else False
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
    ppo = PPO.begin(config, run)
    if ppo.left:
        ppo.learn(run=run)
    ppo.take_best()
    summary = finish(ppo, run, interrupted=ppo.iteration < config.iterations)
    return ppo, ppo.rows, summary
