"""`rlhf-notes`: each run by one command, with options made from the configs.

```sh
rlhf-notes demo                            # every training with its defaults
rlhf-notes cartpole --seed 3 --gamma 0.99  # one of them
rlhf-notes pendulum --normalize-obs        # a yes or no; --no-normalize-obs is the other way
rlhf-notes train --env Acrobot-v1          # any environment of Gymnasium
rlhf-notes train --env my_module:Mine-v0 --env-kwargs '{"size": 8}'  # one of your own
rlhf-notes rlhf --algo grpo                # a tiny GPT-2 learns: ppo, grpo, rloo or dpo
rlhf-notes rlhf --model PATH_OR_NAME       # the same for a language model of your own
rlhf-notes rlhf --model PATH_OR_NAME --prompts FILE --reward module:function
rlhf-notes generate --run DIR "a prompt"   # print what the policy of a run writes
torchrun --nproc_per_node 2 -m rlhf_notes.cli rlhf  # one training, two processes
rlhf-notes cartpole --seed 100 --seeds 20  # seeds 100 to 119, and one table
rlhf-notes cartpole --resume DIR           # continue after Ctrl-C
rlhf-notes compare --task pendulum         # race against other implementations
rlhf-notes bench                           # time the fast formulas against others
rlhf-notes doctor FILE                     # name what is wrong with a log
rlhf-notes view RUN                        # its responses, token by token, as a page
rlhf-notes lab make FOLDER                 # lessons without solutions, for a course
rlhf-notes lab grade FOLDER                # FOLDER/marks.csv: marks, and mistakes by name
```

The options of a run are the fields of its config. `--help` shows the everyday ones first and the
others in sections. Steps may be written as `1e5`, and `--lr` is short for `--learning-rate`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a run failed, or `doctor` found something |
| 2 | a mistake in the command |
| 130 | interrupted by Ctrl-C |

A mistake gets a message that names the option, what came and what is allowed, and nothing is
written or lost: everything that can be wrong is checked before the first file is touched. An error
from training itself, or from an environment or a reward of your own, keeps its traceback, above
which a line says how to continue.
"""

__all__ = ['EVERYDAY', 'app', 'SECTIONS', 'GROUPS', 'ALIASES', 'CONVERTERS', 'Out', 'Overwrite',
           'Resume', 'Trust', 'Prompts', 'Reward', 'Directory', 'FEW', 'Few', 'Whole', 'Seeds',
           'Track', 'Chat', 'From', 'Named', 'BenchTask', 'main', 'options_of', 'training',
           'command', 'demo', 'generate', 'aligned', 'compare', 'bench', 'doctor', 'view',
           'identify']

import errno
import inspect
import json
import os
import re
import signal
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial, reduce
from operator import or_
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError, validators

from . import __version__
from .launch import LANGUAGE, TASKS, config_of, many_seeds, new_training, old_training, versions
from .training.options import TRACKERS, read_json
from .training.signals import handle_signals


EVERYDAY = Group("Everyday", sort_key=0)
app = App(name="rlhf-notes", version=f"rlhf-notes {__version__}", suppress_keyboard_interrupt=False,
          help="Train agents with the formulas of PPO, GRPO and RLHF, explained in notebooks.",
          group_parameters=EVERYDAY)
app.register_install_completion_command()


def main(
    argv: list | None = None,  # the arguments after `rlhf-notes`; None = those of the process
) -> int:  # the exit code
    "Run the command `rlhf-notes`."
    out, err = Lenient(sys.stdout), Lenient(sys.stderr)
    interrupts = handle_signals(signal.default_int_handler)
    with redirect_stdout(out), redirect_stderr(err), interrupts:
        code = _run(argv)
        if out.error is None or isinstance(out.error, BrokenPipeError): return code
        print("rlhf-notes: cannot write to stdout:", out.error.strerror, file=err)
    return code or 1


class Lenient:
    "A stream that goes on when it can no longer be written to; `error` tells why."
    def __init__(self, stream):
        self.stream, self.error = stream or open(os.devnull, "w"), None

    def write(self, text: str) -> int:  # the number of characters
        "Write at once, or never again."
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as e:
            self.error = e
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return len(text)

    def __getattr__(self, name): return getattr(self.stream, name)


def _run(argv):
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules of this directory, as `python -m` finds them
    quiet = dict(exit_on_error=False, print_error=False, result_action="return_value")
    try:
        return app(argv, **quiet) or 0
    except UnusedCliTokensError as e:
        given, stray = e.root_input_tokens, e.unused_tokens[0]
        before = given[given.index(stray) - 1]
        message = f"expected an option after {before}, got {stray} (a yes or no is --x or --no-x)"
        code = 2
    except (CycloptsError, _UsageError) as e:
        message, code = e, 2
    except FloatingPointError as e:
        message, code = e, 1
    except (OSError, MemoryError, RuntimeError) as e:
        message, code = _of_the_machine(e), 1
        if message is None: raise  # of an environment or a reward of one's own
    except SystemExit as e:
        message, code = f"an environment or a reward called sys.exit({e.code!r})", 1
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    print("rlhf-notes:", message, file=sys.stderr)
    return code


def _of_the_machine(error):
    "One sentence if a disk, memory or table of files was full, or a process ended; else None."
    if getattr(error, "is_ours", False): return f"cannot use {error.filename}: {error.strerror}"
    if isinstance(error, ChildProcessError): return str(error)
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE): return error.strerror
    kind, text = type(error).__name__, str(error).strip()
    if "MemoryError" in kind or kind == "OutOfMemoryError" or "can't allocate memory" in text:
        return f"out of memory: {text.splitlines()[0] if text else kind}"


class _UsageError(Exception):
    "A mistake in the command; nothing has been written."


@contextmanager
def _usage_errors():
    "Turn a wrong value or path into a _UsageError that names the option."
    try:
        yield
    except OSError as e:
        if not getattr(e, "is_ours", False): raise
        raise _UsageError(_of_the_machine(e)) from e
    except (ValueError, TypeError) as e:
        def option(name): return "--" + name[0].replace("_", "-")
        raise _UsageError(re.sub(r"(?m)^[a-z_]+(?= must )", option, str(e))) from e


SECTIONS = dict(  # first field -> title
    vectorization="Environments", precision="Model", preset="Model", lora="Model",
    response_length="Prompts and responses", prompt_length="Prompts and responses",
    long_prompts="Prompts and responses", sft_steps="Pretraining", labels="Reward model",
    rm_batch="Reward model", batch="Rollouts", num_envs="Rollouts", group="Rollouts",
    prompt_order="Rollouts", minibatches="Updates", epochs="Updates", gamma="Advantages",
    clip="Loss", variant="Loss", dpo_beta="Loss", max_grad_norm="Updates",
    whiten_rewards="Advantages", kl_coef="KL penalty", normalize_obs="Scales", hidden="Networks",
    overlong="Responses without an end", eval_every="Evaluation", eval_episodes="Evaluation")
GROUPS = {title: Group(title, sort_key=i)
          for i, title in enumerate(dict.fromkeys(SECTIONS.values()), 1)}
GROUPS |= dict.fromkeys("algo model env env_kwargs seed device steps iterations".split(), EVERYDAY)
ALIASES = dict(learning_rate="--lr", response_length="--max-new-tokens")


def options_of(*configs: type, without: tuple = ()):
    """A decorator: give a command an option for each field of some dataclasses but those `without`;
    those on the command line come in as **options."""
    def decorate(command):
        *own, _ = inspect.signature(command).parameters.values()
        fields, title = {}, None
        for config in configs:
            for name, field in config.__pydantic_fields__.items():
                title = SECTIONS.get(name, title)
                group = GROUPS.get(name) or GROUPS.get(title)
                if name not in fields:
                    fields[name] = _option(config, name, field, group, configs)
        offered = [p for p in (*fields.values(), *own) if p.name not in without]
        command.__signature__ = inspect.Signature(offered)
        return command
    return decorate


def _option(config, name, field, group, configs):
    bases = (c.__pydantic_fields__ for c in config.__mro__[:-1])
    infos = [fields[name] for fields in bases if name in fields]  # those of a base explain
    help = next(info.description for info in infos if info.description)
    help = re.sub(r" \([PRG]\d+\)", "", help)  # numbers of the details, which the lessons explain
    kinds = [_bare(x.__pydantic_fields__[name].annotation) for x in configs
             if name in x.__pydantic_fields__]
    kind = reduce(or_, kinds) if field.annotation != dict | None else object
    if all(get_origin(k) is Literal for k in kinds):  # the choices of all
        kind = Literal[tuple(dict.fromkeys(choice for k in kinds for choice in get_args(k)))]
    given = next((x for x in get_args(kind) if x in CONVERTERS), kind)  # if it is not None
    how = Parameter(help=help, group=group, converter=CONVERTERS.get(given),
                    alias=ALIASES.get(name))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default,
                             annotation=Annotated[kind, how])


def _bare(kind):
    "A type without the rules that pydantic checks: of those the config itself tells."
    if get_origin(kind) is Annotated: return _bare(get_args(kind)[0])
    if get_origin(kind) not in (Union, UnionType): return kind
    return reduce(or_, map(_bare, get_args(kind)))


def _whole(type_, tokens):  # cyclopts itself rounds 7.5
    text = tokens[0].value
    if text.lstrip("-").isdecimal(): return int(text)
    try:
        if float(text).is_integer(): return int(float(text))
    except ValueError:
        pass
    raise ValueError(f"must be a whole number, such as 40000 or 4e4, got {text}")


def _object(type_, tokens):  # cyclopts itself makes strings of the values
    text = tokens[0].value
    try:
        return read_json(text)
    except ValueError as e:
        raise ValueError(f"must be JSON, such as '{{\"g\": 5.0}}', got {shorten(text, 80)}") from e


def _filled(type_, tokens):  # an empty shell variable, say
    text = tokens[0].value
    if not text: raise ValueError("must not be empty")
    return Path(text) if type_ is Path else text

CONVERTERS = {int: _whole, object: _object, str: _filled}


def _path(help): return Annotated[Path | None, Parameter(help=help, converter=_filled)]

Out = _path("directory to write [default: in runs]")
Overwrite = Annotated[bool, Parameter(help="replace the run that is there", negative=())]
Resume = _path("interrupted run to continue, with its options; control begins new episodes")
Trust = Annotated[bool, Parameter(help="import the module:name that the run to resume names",
                                  negative=())]
Prompts = _path("file with a prompt on each line, or .jsonl with prompt and columns for the reward")
Reward = Annotated[str | None, Parameter(help="MODULE:FUNCTION, or a reward model of transformers",
                                         converter=_filled)]
Directory = Annotated[Path, Parameter(converter=_filled)]
FEW = dict(validator=validators.Number(gte=1, lte=10_000), converter=_whole)
Few, Whole = Annotated[int, Parameter(**FEW)], Annotated[int, Parameter(converter=_whole)]
Seeds = Annotated[int | None, Parameter(help="seeds to train, from --seed on; writes seeds.csv",
                                        **FEW)]
Track = Annotated[Literal[TRACKERS], Parameter(help="where to log")]


def training(
    task: str,  # a name in TASKS
):
    "Add the command of a training."
    config, about = TASKS[task]
    fixed = {"rlhf": (), "train": ("prompts", "reward")}.get(task, ("env", "prompts", "reward"))

    @app.command(name=task, help=about)
    @options_of(*(LANGUAGE if task == "rlhf" else [config]), without=fixed)
    def command(*, out: Out = None, overwrite: Overwrite = False, resume: Resume = None,
                seeds: Seeds = None, track: Track = "tensorboard", prompts: Prompts = None,
                reward: Reward = None, trust: Trust = False, **options):
        if resume and ({*options} - {"env"} or out or overwrite or seeds or prompts):
            raise _UsageError("--resume must stand alone: the options come from config.json")
        if trust and not resume:
            raise _UsageError("--trust must come with --resume")
        if seeds and (prompts or reward):
            raise _UsageError("--seeds cannot go with a reward of your own")
        own = {k: str(x) for k, x in dict(prompts=prompts, reward=reward).items() if x}
        with _usage_errors():
            if resume:
                code = {"env": options.get("env"), "reward": reward}
                train = old_training(task, resume, trust, **code)
            elif seeds:
                train = many_seeds(task, options, out, overwrite, track, seeds)
            else:
                train = new_training(task, options, out, overwrite, track, **own)
        return train()

for task in TASKS:
    training(task)


def command(
    function,  # each argument on a line of its own, with a comment
    to: App = app,  # the app that gets it
    **named,  # `name=`, of the command
):  # the function
    "Add a command; the comments of its arguments explain its options."
    arguments = re.findall(r"(\w+):.*# (.+)", inspect.getsource(function))
    lines = [f":param {name}: {help[0].lower()}{help[1:]}" for name, help in arguments]
    function.__doc__ = "\n".join([inspect.getdoc(function) or "", "", *lines])
    return to.command(function, **named)


@command
def demo(
    *,
    seed: Whole = 0,  # of every training
    device: str = "auto",  # auto, cpu, cuda or mps
    out: Directory = Path("runs/demo"),  # to write: one run below it for each training
):  # the exit code
    "Run every training with its defaults; an earlier demo in runs/demo is replaced."
    options, earlier, trainings = {"seed": seed, "device": device}, out == Path("runs/demo"), {}
    with _usage_errors():
        for task in ("cartpole", "pendulum", "rlhf"):
            trainings[task] = new_training(task, options, out / task, earlier)
    for task, train in trainings.items():
        print(f"\n{task}: {TASKS[task][1]}", flush=True)
        if code := train(): return code
    print(f"\nlook next at: tensorboard --logdir {out}")


Chat = Annotated[bool, Parameter(negative=())]
From = Annotated[Path | None, Parameter(converter=_filled)]
Named = Annotated[str | None, Parameter(converter=_filled)]


@command
def generate(
    *prompts: str,  # texts to continue
    run: From = None,  # a run of rlhf, or a directory in which RLHF has saved
    model: Named = None,  # in its place any causal language model
    max_new_tokens: Whole = 16,  # tokens of a response, at most
    temperature: float = 1.0,  # of the samples
    seed: Whole = 0,  # of the samples
    device: str = "auto",  # auto, cpu, cuda or mps
    chat: Chat = False,  # ask as a user, by the chat template
):
    "Print the continuation of prompts by the policy of a run, or by a model (name, directory)."
    from rlhf_notes.hub.trainers import RLHF
    if (run is None) == (model is None):
        raise _UsageError("generate requires an argument: either --run or --model")
    with _usage_errors():
        trainer = RLHF(model or _policy_of(run), max_new_tokens=max_new_tokens,
                       temperature=temperature, device=device)
        asked = [[dict(role="user", content=p)] for p in prompts] if chat else list(prompts)
        texts = trainer.generate(asked, seed) if prompts else []
    for prompt, text in zip(prompts, texts):
        print(prompt, text)


def _policy_of(run):
    "The directory of a policy that RLHF has saved; no hub is asked for it."
    for path in (run / "policy", run):
        if os.path.isfile(path / "rlhf.json"): return str(path)
    raise ValueError("run must be a run of rlhf, or a directory in which RLHF has saved, got "
                     f"{run}")


def _study(run, rows_of, table, total=None, rows_as_lines=True):
    "Run a study, write its rows as they come, and show its table."
    from rlhf_notes.training.runs import write_table
    rows, path = [], run.path / f"{run.config['task']}.csv"

    def done(new):
        for row in new if isinstance(new, list) else [new]:
            rows.append(row)
            if not rows_as_lines: continue
            count = [f"{len(rows)} of {total}:"] * bool(total)
            print(*count, *(x for x in row.values() if isinstance(x, str)), flush=True)
        write_table(path, rows)
    rows_of(done=done)
    print(aligned(table(rows)), path, sep="\n")


def aligned(
    rows: list,  # of strings
) -> str:  # lines
    "Align a table for the eye."
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@command
def compare(
    *,
    task: Literal["cartpole", "pendulum", "rlhf"] = "cartpole",  # the training that is raced
    seed: Whole = 0,  # the first
    seeds: Few = 5,  # races, each with a seed of its own
    iterations: Few = 20,  # of each training, for rlhf
    device: str = "cpu",  # auto, cpu, cuda or mps
    out: Out = None,  # directory to write; by default in runs
    overwrite: Overwrite = False,  # replace the run that is there
):
    """Race against other libraries, where they are installed (pip install rlhf_notes[crosscheck]).

    CartPole and Pendulum: stable-baselines3 and a loop like CleanRL's, time to the threshold.
    rlhf: TRL, time of an iteration. Medians over the seeds, with 95% intervals.
    """
    from rlhf_notes.training.devices import pick_device
    from rlhf_notes.training.runs import Run
    with _usage_errors():
        for s in (seed, seed + seeds - 1):
            config_of(task)(seed=s)
        about = dict(task="compare", of=task, seed=seed, seeds=seeds, versions=versions(),
                     device=pick_device(device, auto="cuda"))
        run = Run.create(out or Path("runs", f"compare-{task}"), about, overwrite)
    if task == "rlhf":
        from rlhf_notes.studies import benchmark_rlhf as study
        field, rival = study.contenders(), "TRL"
        race = partial(study.compare, seeds, iterations, first=seed, device=run.config["device"])
    else:
        from rlhf_notes.studies import benchmark as study
        field, rival = study.contenders(task), "stable-baselines3"
        race = partial(study.compare, task, seeds, first=seed)
    names = [getattr(x, "name", x) for x in field]
    if not any(x.startswith(("trl", "sb3")) for x in names):
        print(f"without {rival}, which pip install rlhf_notes[crosscheck] brings", flush=True)
    _study(run, race, study.table, len(names) * seeds)


BenchTask = Literal["log-probability", "entropy", "both", "from-hidden-states", "GAE"]


@command
def bench(
    *,
    size: Literal["quick", "small", "medium", "large"] = "quick",  # of the logits, see above
    rounds: Few = 7,  # in each of which every method is timed once
    task: BenchTask | None = None,  # one alone; by default all
    every: bool = False,  # our plain code, ours in place and the parts of the bill, too
    device: str = "auto",  # auto, cpu, cuda or mps
    out: Directory = Path("runs/bench"),  # directory to write
    overwrite: Overwrite = False,  # replace the run that is there
):
    """Time the fast formulas against naive code, DI-engine, TRL and Liger-Kernel, by turns.

    Logits of 4x64x16000 (two minutes), 8x128x32000, 16x256x50257 or 4x1024x128256: the naive
    methods need 0.1, 1, 7 or 17 GB. The table has their time over ours in the same round: the
    median of the rounds, and the smallest and the largest. The CSV has every method.
    """
    from rlhf_notes.studies import speed
    from rlhf_notes.training.devices import pick_device
    from rlhf_notes.training.runs import Run
    with _usage_errors():
        device = pick_device(device, auto="cuda")
        about = dict(task="bench", size=size, rounds=rounds, device=device, versions=versions())
        run = Run.create(out, about, overwrite)
    print(f"{speed.device_name(device)}, {rounds} rounds", flush=True)
    tasks = tuple(t for t in speed.TASKS if task in (None, t.replace(" ", "-")))
    print(f"ours: {speed.code_that_runs(device)}", flush=True)
    say = partial(print, flush=True)
    timed = partial(speed.bench, (size,), device, rounds, left_out=say, tasks=tasks, every=every,
                    begin=say)
    _study(run, timed, speed.summary, rows_as_lines=False)


@command
def doctor(
    log: Path,  # metrics.csv, trainer_state.json, progress.csv, events, console or JSON lines
):
    """Read the log of a training and name what is wrong with it.

    Ours, TRL's, stable-baselines3's or verl's. The exit code is 1 if something is wrong.
    """
    from rlhf_notes.doctor import examine, read_log, report
    with _usage_errors():
        rows = read_log(log)
    found = examine(rows)
    print(report(rows, found))
    return int(bool(found))


@command
def view(
    run: Path,  # of rlhf, or completions that TRL or verl has logged: a directory or a file
    *,
    out: From = None,  # an .html file to write; by default view.html in the run, or beside the file
):
    """Write a page that shows the responses of a run token by token, without a network.

    With log pi of sampler, policy and reference, ratio, advantage and weight in the gradient.
    """
    from rlhf_notes.view import view
    with _usage_errors():
        print(view(run, out))


@command
def identify(
    function: Annotated[str, Parameter(converter=_filled)],  # to read, as MODULE:FUNCTION
    *,
    kind: str | None = None,  # policy_loss, gae, ...; by default from the parameters' names
    names: str | None = None,  # a=b,...: a parameter and what it is, such as lp=logp
    options: str | None = None,  # a=1,...: values of other parameters
    layout: str | None = None,  # shape, BT or TN (time first); by default found out
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,  # print JSON
):
    """Read what a loss, an advantage or a log-probability computes, by what it does.

    The exit code is 1 if something is wrong with it, 2 if it cannot be called.
    """
    from rlhf_notes.identify import identify
    with _usage_errors():
        report = identify(_function(function), kind, _pairs("names", names),
                          _pairs("options", options), layout)
    print(json.dumps(report.as_dict(), indent=1) if as_json else report)
    return int(bool(report.findings))


lab = App(name="lab", help="Hand out lessons without solutions, and mark what comes back.")
app.command(lab)


@partial(command, to=lab, name="make")
def make_lab(
    folder: Path,  # to write
    *,
    lessons: str | None = None,  # a,b: their names, as 04_surrogate; by default all
):
    "Write lessons without solutions, and exercises.csv, the table of what to write."
    from rlhf_notes.lab import make
    with _usage_errors():
        rows = make(folder, lessons.split(",") if lessons is not None else None)
    print(aligned([("exercise", "lesson", "minutes"), *((a, b, str(c)) for a, b, c, _ in rows)]))
    print(f"{len(rows)} exercises, about {sum(row[2] for row in rows)} minutes, in {folder}")


@partial(command, to=lab, name="grade")
def grade_lab(
    folder: Path,  # with the notebooks of one student
):
    "Run what a student has written, and write marks.csv: exercise, right, mistake."
    from rlhf_notes.lab import grade
    with _usage_errors():
        marks = grade(folder)
    wrong = [m for m in marks if m.says and not m.right]
    print(*(m.says.split("\n  input:")[0] for m in wrong), sep="\n")
    print(aligned([("exercise", "right", "mistake"),
                   *((m.exercise, str(m.right), m.mistake) for m in marks)]))
    print(f"{sum(m.right for m in marks)} of {len(marks)} right; {folder / 'marks.csv'}")


def _function(path):
    "The function that MODULE:FUNCTION names; an attribute of an attribute too."
    module, _, names = path.partition(":")
    try:
        with redirect_stdout(sys.stderr):
            return reduce(getattr, names.split("."), import_module(module))
    except (Exception, SystemExit) as e:  # whatever the module does when it is imported
        raise _UsageError(f"expected MODULE:FUNCTION that can be imported, got {path}: {e}") from e


def _pairs(name, text):
    "{a: b} of a=b,...; numbers, true, false and null are read as in JSON."
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair]
    wrong = next((a for a, equals, _ in pairs if not (a and equals)), None)
    if wrong is not None: raise ValueError(f"{name} must be a=b,..., got {text}")
    def value(b):
        try: return json.loads(b)
        except ValueError: return b
    return {a.strip(): value(b.strip()) for a, _, b in pairs}


if __name__ == "__main__" and "__file__" in globals():  # a notebook has no file
    sys.exit(main())
