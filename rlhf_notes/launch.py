"""Begin a run, continue one, train many seeds, or train by a reward of your own.

`cartpole` and `pendulum` are one trainer with two sets of defaults, `train` takes any environment,
with its recipe where there is one, and `rlhf` goes through three stages (lesson 28). A trainer is
loaded when it is asked for, so `rlhf-notes --help` never loads PyTorch.

Everything that can be wrong is checked before the first file is touched. Each function raises
ValueError, or returns a function that trains, prints the outcome and returns an exit code: 0, or
130 after Ctrl-C. Each of many seeds is trained in a directory of its own, exactly as it would have
been alone; the means come with 95% intervals.

An environment or a reward called `module:name` is code, and importing it runs it. A run directory
may come from someone else, so `--resume` imports a module only if it is given again, or with
`--trust`.
"""

__all__ = ['TASKS', 'LANGUAGE', 'config_of', 'new_training', 'old_training', 'report', 'many_seeds']

import json
import os
import random
import sys
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib import import_module
from numbers import Real
from pathlib import Path
from textwrap import shorten

from .control.config import PendulumConfig, PPOConfig, recipe
from .hub.config import OwnRunConfig
from .language.config import LoopConfig, check_variant
from .reviews.config import ReviewsConfig, ReviewsDPOConfig
from .training.options import read_options, versions
from .training.signals import end_later


TASKS = {
    "cartpole": (PPOConfig, "Balance a pole: a random policy lasts 20 steps; 475 is solved."),
    "pendulum": (PendulumConfig, "Swing up a pendulum: random earns -1200; -200 is solved."),
    "train": (PPOConfig, "Train on any Gymnasium environment, --env."),
    "rlhf": (ReviewsConfig, "Teach a GPT-2 what a human likes, or a model of yours by --reward."),
}
LANGUAGE = ReviewsConfig, ReviewsDPOConfig, OwnRunConfig  # of rlhf, in three cases


def config_of(task, algo="ppo", own=False):
    "The class of a training's options; `own` is for prompts and a reward of one's own."
    if task != "rlhf": return TASKS[task][0]
    return OwnRunConfig if own else ReviewsDPOConfig if algo == "dpo" else ReviewsConfig


def new_training(task: str, options: dict, out: Path | None=None, overwrite: bool=False, track:
                 str='tensorboard', **own):
    """Begin a run directory: the function that trains and returns the exit code; `own` has prompts,
    a file, and reward, module:function or a reward model. ValueError if it cannot begin here."""
    from rlhf_notes.training.runs import Run
    with _same_directory():
        options = _with_recipe(task, options)
        config, train, is_main = _trainer(task, options, **own)
    about = {"task": task, "algo": "ppo", **asdict(config), **own, "track": track,
             "versions": versions()}
    path = out or Path("runs", f"{task}-own" if own else f"{task}-seed{config.seed}")
    run = Run.create(path, about, overwrite) if is_main else Run(path, about)
    return partial(_train, config, train, run, is_main)


def _with_recipe(task, options):
    "The options, and those that the environment's recipe adds, which are printed."
    if task != "train": return options
    from rlhf_notes.control.envs import usual_options
    env = options.get("env", "CartPole-v1")
    whose = f"the recipe of {env}" if recipe(env) else "the defaults of Box actions"
    found = usual_options(env, env, options)
    added = {name: x for name, x in found.items() if name not in options}
    if added:
        told = ", ".join(f"{name}={x}" for name, x in added.items())
        print(f"by {whose}: {told}", flush=True)
    return {**added, **options}


def _trainer(task, options, run=None, **own):
    "The config, a function of a run that trains, and whether this process is to write."
    if task == "rlhf":
        from rlhf_notes.reviews.pipeline import Training, train
        training = _own(options, **own) if own else Training(_of_reviews(options))
        _go_on(run, training, lambda state: state)
        return training.config, partial(train, training), training.accelerator.is_main_process
    from rlhf_notes.control.trainer import PPO, train
    config = TASKS[task][0](**options)
    ppo = PPO.begin(config)
    _go_on(run, ppo, lambda state: state["ppo"])
    ppo.envs.close()
    return config, partial(train, config), True


def _go_on(run, trainer, part):
    "Load a checkpoint; ValueError if it is one of another training, or nonsense."
    from torch import OutOfMemoryError
    if run is None: return
    try:
        state = part(run.checkpoint)
        _check_kind("state", trainer.state_dict(), state)
        trainer.load_state_dict(state)
    except (OSError, MemoryError, OutOfMemoryError): raise
    except Exception as e:
        raise ValueError("resume must be a run whose checkpoint fits its options, got "
                         f"{run.path}: {shorten(f'{type(e).__name__}: {e}', 250)}") from e


def _check_kind(name, ours, theirs):
    "TypeError unless a part of a checkpoint is of the kind that the trainer itself would write."
    if ours is None: return  # as yet
    number = isinstance(ours, Real) and isinstance(theirs, Real)
    if not (number or isinstance(theirs, (list, tuple) if isinstance(ours, list) else type(ours))):
        raise TypeError(f"{name} is a {type(theirs).__name__} in place of a {type(ours).__name__}")
    if not isinstance(ours, dict): return
    for key in ours.keys() & theirs.keys():
        _check_kind(key, ours[key], theirs[key])


def _of_reviews(options):
    config = config_of("rlhf", options.get("algo"))(**options)
    check_variant(config)
    return config


def _train(config, train, run, is_main):
    import numpy as np
    random.seed(config.seed)  # for an environment or reward that draws from these
    np.random.seed(config.seed % 2**32)
    if is_main and isinstance(config, LoopConfig):
        from rlhf_notes.training.devices import make_accelerator
        print("processes:", make_accelerator().num_processes, flush=True)
    path = _as_typed(run.path)
    with end_later():
        try:
            with _same_directory():
                summary = train(run)[2]
        except BaseException:  # of an environment or a reward of one's own, say
            if (path / "checkpoint.pt").exists():
                print(_next_command(run.config["task"], path), file=sys.stderr)
            raise
        if is_main:
            report(summary, path)
    return 130 if summary["interrupted"] else 0


@contextmanager
def _same_directory():
    "Come back to it, wherever an environment or a reward has gone."
    here = os.getcwd()
    try:
        yield
    finally:
        os.chdir(here)


def _as_typed(path):
    "A path without the current directory."
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def old_training(task: str, path: Path, trust: bool=False, **given):
    """Continue a run with the options it began with: the function that trains. `given` is env or
    reward as the run names it: that module is imported, with `trust` any. ValueError if it cannot
    go on here."""
    from rlhf_notes.training.runs import Run
    run = Run.resume(path)
    if (found := run.config.get("task")) != task:
        raise ValueError(f"resume must be a run of {task}, got {path}, a run of {found}")
    own = {name: run.config[name] for name in ("prompts", "reward") if name in run.config}
    names = config_of(task, run.config.get("algo"), bool(own)).__dataclass_fields__
    if not trust:
        _check_code(run.config, path, given, {"train": "env", "rlhf": "reward"}.get(task))
    run.check_config()
    options = {name: run.config[name] for name in names if name in run.config}
    for name, value in own.items():
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a text in {path / 'config.json'}, got {value!r}")
    with _same_directory():
        config, train, is_main = _trainer(task, options, run, **own)
    if is_main:
        run.lock()
    return partial(_train, config, train, run, is_main)


def _check_code(config, path, given, offered):
    "ValueError if a run names a module that is not given again: importing runs its code."
    for name, value in _code(config).items():
        if name != offered:
            raise ValueError(f"trust must be given, since {path} names a module by {name}, got "
                             f"none for {value!r}")
        if (again := given.get(name)) != value:
            raise ValueError(f"{name} must be {value} again, or --trust given, since {path} "
                             f"names that module, got {again or 'neither'}")


def _code(config):
    "Options that name a module, as module:name; arguments of an environment may, too."
    found = {name: config.get(name) for name in ("env", "reward", "env_kwargs")}
    return {name: x for name, x in found.items() if any(":" in text for text in _texts(x))}


def _texts(x):
    "All strings of what JSON can hold."
    if isinstance(x, str): return [x]
    parts = [*x, *x.values()] if isinstance(x, dict) else x if isinstance(x, list) else ()
    return [text for part in parts for text in _texts(part)]


def report(s: dict, path: Path):
    "Print what came of a run, by its summary and directory."
    print(f"{s['task']}, seed {s['seed']}: {s['steps']} steps in {s['wall_seconds']:.1f} s", end="")
    if s["interrupted"]:
        print(", interrupted", _next_command(s["task"], path), sep="\n")
        return
    outcome = _control if s["task"] != "rlhf" else _reviews if "true_score" in s else _own_task
    curve = [f"curve: {path / 'curve.svg'}"] * (path / "curve.svg").exists()
    print("", *outcome(s, path), *curve, sep="\n", flush=True)


def _next_command(task, path):
    trust = " --trust" if _code(_config(path)) else ""
    return f"continue with: rlhf-notes {task} --resume {path}{trust}"


def _own_task(s, path):
    yield f"score {s['score_first']:.3g} at first, {s['score']:.3g} at last"
    yield path / "samples.csv"


def _control(s, path):
    verdict = {None: "no solve threshold defined", True: "solved", False: "NOT solved"}[s["solved"]]
    greedy, sampled = s["eval_return_mean"], s["eval_sampled_return_mean"]
    yield (f"return over {s['eval_episodes']} fresh episodes: {greedy:.1f} greedy, "
           f"{sampled:.1f} sampled: {verdict}")


def _reviews(s, path):
    from rlhf_notes.training.runs import read_table
    rows = read_table(path / "samples.csv")
    texts = {(r["iteration"], r["prompt"]): f"{float(r['true_score']):5.2f} {r['response']}"
             for r in rows}
    first, last = rows[0]["iteration"], rows[-1]["iteration"]
    for prompt in list(dict.fromkeys(r["prompt"] for r in rows))[:4]:
        yield f"{prompt}\n  before {texts[first, prompt]}\n  after  {texts[last, prompt]}"
    yield (f"true score {s['true_score_sft']:.2f} before, {s['true_score']:.2f} after; "
           f"better in {s['win_rate_vs_sft']:.1%}; KL {s['kl']:.1f} nats")


def many_seeds(task: str, options: dict, out: Path | None=None, overwrite: bool=False, track:
               str='tensorboard', count: int=1):
    """Train with `count` seeds, from that in the options on, one after the other: the function that
    trains. ValueError if that cannot begin here."""
    from rlhf_notes.training.runs import Run
    out, first = out or Path("runs", f"{task}-seeds"), options.get("seed", 0)
    with _same_directory():
        options = _with_recipe(task, options)
        config_of(task, options.get("algo"))(**{**options, "seed": first + count - 1})
        _trainer(task, options)
    Run.check(out, overwrite)
    for seed in range(first, first + count):
        _check_seed(out, seed)
    about = {"task": task, **options, "seed": first, "seeds": count, "track": track,
             "versions": versions()}
    run = Run.create(out, about, overwrite)
    return partial(_train_seeds, task, options, range(first, first + count), run, track)


def _check_seed(out, seed):
    "ValueError if something is there that a training with many seeds has not written."
    from rlhf_notes.training.runs import Run
    path = out / f"seed{seed}"
    Run.check(path, overwrite=True)
    found, all_seeds = _config(path), _config(out)
    known = "seeds" in all_seeds and all(
        found.get(name) == x for name, x in {**all_seeds, "seed": seed}.items() if name != "seeds")
    if path.is_symlink() or found and not known:
        raise ValueError(f"out must hold no other run as seed{seed}, got {path}")


def _config(path):
    try:
        return read_options(path / "config.json")
    except OSError:
        return {}


def _train_seeds(task, options, seeds, run, track):
    from rlhf_notes.training.runs import write_table
    rows = []
    for seed in seeds:
        path = run.path / f"seed{seed}"
        code = new_training(task, {**options, "seed": seed}, path, True, track)()
        if code: return code
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        rows.append({name: x for name, x in summary.items() if not isinstance(x, dict)})
        write_table(run.path / "seeds.csv", rows)
    run.finish({"task": task, "seeds": len(seeds), "interrupted": False})
    _print_means(rows)
    print(_as_typed(run.path) / "seeds.csv")
    return 0


def _print_means(rows):
    from rlhf_notes.training.statistics import mean_interval
    for name, x in rows[0].items():
        values = [row[name] for row in rows]
        if not isinstance(x, float) or None in values: continue
        if len(values) == 1:
            print(f"{name}: {x:.4g}")
            continue
        mean, low, high = mean_interval(values)
        print(f"{name}: {mean:.4g} (95% interval {low:.4g} to {high:.4g})")


def _own(options, prompts=None, reward=None):
    "A training by a user's reward."
    from rlhf_notes.hub.trainers import RLHF
    from rlhf_notes.reviews.pipeline import OwnTraining
    if not (prompts and reward and options.get("model")):
        raise ValueError("reward must come with --model and --prompts")
    kept = {name: options[name] for name in ("model", "eval_every") if name in options}
    rest = {k: x for k, x in options.items() if k not in (*kept, "response_length")}
    OwnRunConfig(**options)  # refuses those of other trainings
    trainer = RLHF(options["model"], prompts=prompts, reward=_reward(reward),
                   max_new_tokens=options.get("response_length", 16), **rest)
    loop = trainer.loop  # a reward that fails, fails before anything is written
    loop.collect(loop.policy.lm, *loop.prompts())
    return OwnTraining(trainer, OwnRunConfig(**asdict(trainer.config), **kept))


def _reward(path):
    "The function, or the directory or name of a reward model, which has no colon."
    module, colon, name = path.partition(":")
    if not colon: return path
    try:
        return getattr(import_module(module), name)
    except (Exception, SystemExit) as e:  # whatever the module does
        raise ValueError(f"reward must be MODULE:FUNCTION, got {path!r}: {e}") from e
