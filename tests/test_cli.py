import csv
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
import typing
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import processes
import pytest
import torch
from processes import stopped

from rlhf_notes import __version__, cli
from rlhf_notes.control import trainer as control
from rlhf_notes.control.config import PendulumConfig, PPOConfig
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.studies import benchmark
from rlhf_notes.training import fit
from rlhf_notes.training.runs import Run

QUICK = ["--steps", "1024", "--num-envs", "4", "--epochs", "1"]                  # eight iterations
SHORT = [*QUICK, "--num-steps", "32", "--eval-episodes", "2"]
TINY = ["--sft-steps", "3", "--sft-batch", "8", "--labels", "16", "--norm-samples", "16",
        "--iterations", "2", "--batch", "16", "--eval-responses", "8", "--device", "cpu"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def contents(path):
    return {p.relative_to(path): p.read_bytes() if p.is_file() else None for p in path.rglob("*")}


def read(path): return json.loads(Path(path).read_text())


def command(*args, **kwargs):
    hup = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # the tests may run under nohup
    return processes.start(f"import signal, sys; from rlhf_notes import cli; {hup}; "
                           f"sys.exit(cli.main({[*args]!r}))", **kwargs)


# a mistake gets a message and exit code 2, and leaves everything as it was

BAD = [
    ("pendulums", 'Unknown command "pendulums". Did you mean "pendulum"?'),
    ("--seed 3", "Unknown command"),
    ("cartpole --seed abc", "Invalid value for --seed: "),
    ("cartpole --seed 1.5", "Invalid value for --seed"),
    ("cartpole --steps 7.5",
     "Invalid value for --steps: must be a whole number, such as 40000 or " "4e4, got 7.5"),
    ("cartpole --steps 1e400", "Invalid value for --steps"),
    ("trian", 'Unknown command "trian". Did you mean "train"?'),
    ("train --env-kwargs g:5", "Invalid value for --env-kwargs: must be JSON, such as"),
    ("cartpole --seed", "--seed requires an argument"),
    ("cartpole --seed -1", "--seed must be greater than or equal to 0, got -1"),
    ("cartpole --seed 9223372036854775808",
     "--seed must be less than or equal to 9223372036854775807, got " "9223372036854775808"),
    ("cartpole --steps 100", "--steps must be at least num_envs * num_steps = 1024, got 100"),
    ("cartpole --minibatches 7", "--minibatches must divide num_envs * num_steps = 1024, got 7"),
    ("cartpole --hidden 1000000", "--hidden must be less than or equal to 16384, got 1000000"),
    ("cartpole --num-envs 2000000", "--num-envs must be less"),
    ("cartpole --gamma 1.5", "--gamma must be less than or equal to 1, got 1.5"),
    ("cartpole --learning-rate nan", "--learning-rate must be a finite number, got nan"),
    ("cartpole --activation gelu",
     'Invalid value "gelu" for --activation. Choose from: "tanh", "relu", ' '"silu"'),
    ("cartpole --squash=3", "Invalid value for --squash"),
    ("cartpole --sed 3", "Unknown option: --sed. Did you mean --seed?"),
    ("cartpole word", "expected an option after cartpole, got word"),
    ("train --seed 3 --squash false --gamma 1",
     "expected an option after --squash, got false (a yes or no is --x or " "--no-x)"),
    ("cartpole --env CartPole-v1", "Unknown option: --env"),
    ("cartpole --device gpu", "--device must be auto, cpu, cuda or mps, got 'gpu'"),
    ("cartpole --device cuda:99", "--device must be one that torch sees, got 'cuda:99'"),
    *([("cartpole --track wandb",
        "--track must be a tracker that is installed, got wandb (pip install "
        "rlhf_notes[track] brings it)")] if find_spec("wandb") is None else []),
    ("cartpole --track paper",
     'Invalid value "paper" for --track. Choose from: "tensorboard", ' '"wandb", "trackio"'),
    ("cartpole --out file", "--out must be a directory, got the file file"),
    ("cartpole --out file/below",
     "--out must be a directory that can be written to, got file/below: Not " "a directory"),
    ("cartpole --out /proc/mine",
     "--out must be a directory that can be written to, got /proc/mine: "),
    (f"cartpole --out {'a' * 300}", "--out must be a directory that can be written to, got aaa"),
    ("cartpole --out full --overwrite", "which holds letter.txt"),
    ("cartpole --out run",
     "which holds a run: continue it with --resume run, or replace it with " "--overwrite"),
    ("cartpole --out run --overwrite --seed -1", "--seed must be"),
    ("cartpole --resume nowhere",
     "--resume must be a run directory with a checkpoint, got nowhere"),
    ("cartpole --resume run", "--resume must be a run directory with a checkpoint, got run"),
    ("cartpole --resume other", "--resume must be a run of cartpole, got other, a run of pendulum"),
    ("cartpole --resume listed", "--resume must be a run directory with a checkpoint, got listed"),
    ("cartpole --resume short", "--env must be 'CartPole-v1' in "),
    ("cartpole --resume changed", "the options are not those of the saved networks"),
    ("cartpole --resume run --seed 3", "--resume must stand alone"),
    ("cartpole --resume run --out x", "--resume must stand alone"),
    ("train --env Nowhere-v0",
     "--env must be an environment that Gymnasium can make, got 'Nowhere-v0'"),
    ("train --env Blackjack-v1", "--env must have observations of Box"),
    ("train --env rlhf_notes/Grid-v0 --out run --overwrite", "--env must have actions of Discrete"),
    ("rlhf --algo reinforce",
     'Invalid value "reinforce" for --algo. Choose from: "ppo", "grpo", ' '"rloo"'),
    ("rlhf --minibatches 3", "--minibatches must divide the batch of 128 responses, got 3"),
    ("rlhf --variant sapo", "--variant must be ppo for algo ppo, got sapo"),
    ("rlhf --max-new-tokens 80", "--response-length must fit into the model's context"),
    ("generate word --model nowhere --max-new-tokens 0", "--max-new-tokens must be in"),
    ("rlhf --query-length 9", "Unknown option: --query-length. Did you mean --prompt-length?"),
    ("rlhf --eval-answers=9", "Unknown option: --eval-answers. Did you mean --eval-responses?"),
    ("rlhf --prompt-length 100000",
     "--prompt-length must fit into the model's context of 64 tokens"),
    ("rlhf --labels 2000000000", "--labels must be less than or equal to 1048576, got 2000000000"),
    ("rlhf --temperature 1e-7",
     "--temperature must be greater than or equal to 0.000001, got 1e-07"),
    ("rlhf --human-temperature 1e-7", "--human-temperature must be greater"),
    ("generate word --model nowhere --temperature 1e-7", "--temperature must be greater"),
    ("rlhf --model full", "--model must be a directory or a name on the hub"),
    ("rlhf --device cuda:99", "--device must be one that torch sees"),
    ("cartpole --seeds 0", 'Invalid value "0" for --seeds. Must be >= 1'),
    ("cartpole --seeds 2 --seed 9223372036854775807", "--seed must be less"),
    (f"cartpole --seeds {10**30}", "for --seeds. Must be <= 10000"),
    ("cartpole --seeds 2 --resume run", "--resume must stand alone"),
    ("cartpole --seeds 2 --gamma 2", "--gamma must be"),
    ("cartpole --seeds 2 --out run", "which holds a run"),
    ("cartpole --seeds 2 --out many --overwrite", "got many/seed1, which holds letter.txt"),
    ("cartpole --seeds 2 --out theirs --overwrite",
     "--out must hold no other run as seed1, got theirs/seed1"),
    ("cartpole --seeds 1 --out linked --overwrite",
     "--out must hold no other run as seed0, got linked/seed0"),
    ("compare --task acrobot", 'Invalid value "acrobot" for --task'),
    ("compare --seeds 0", 'Invalid value "0" for --seeds. Must be >= 1'),
    ("compare --out run", "which holds a run"),
    ("compare --seed 9223372036854775807 --seeds 2", "--seed must be less"),
    ("bench --size huge",
     'Invalid value "huge" for --size. Choose from: "quick", "small", "medium", "large"'),
    ("bench --rounds 0", 'Invalid value "0" for --rounds. Must be >= 1'),
    (f"bench --rounds {10**30}", "for --rounds. Must be <= 10000"),
    ("bench --device gpu", "--device must be auto"), ("bench --out run", "which holds a run"),
    ("demo --steps 3", "Unknown option: --steps"),
    ("demo --device cuda:99", "--device must be one that torch sees"),
    ("demo --out shows", "got shows/cartpole, which holds a run"),
    ("generate --model nowhere word", "--model must be a directory or a name on the hub"),
    ("generate --run nowhere word",
     "--run must be a run of rlhf, or a directory in which RLHF has saved, " "got nowhere"),
    ("generate --run run word", "--run must be a run of rlhf, or"),
    ("generate --run run --model x word", "either --run or --model"),
    ("generate --run file word", "--run must be a run of rlhf, or"),
    ("rlhf --algo dpo --variant grpo", "--variant must be an option of ReviewsDPOConfig"),
    ("rlhf --algo dpo --group 8", "--group must be an option of ReviewsDPOConfig"),
    ("rlhf --algo dpo --group 8 --seeds 2", "--group must be an option of ReviewsDPOConfig"),
    ("rlhf --algo grpo --lam 0.9", "--lam must be left out for algo grpo"),
    (f"generate --run {'x' * 300} word",
     "--run must be a run of rlhf, or a directory in which RLHF has saved, " "got xxx"),
    ("generate", 'requires an argument'),
]


class Grid(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Box(0, 9, (2,), np.int64)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action): return np.zeros(2, np.float32), 0.0, False, False, {}


@pytest.fixture
def furnished(tmp_path):
    (tmp_path / "file").write_text("x")
    for name in ("full", "many/seed1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "letter.txt").write_text("x")
    (tmp_path / "many" / "config.json").write_text('{"task": "cartpole"}')
    Run.create(tmp_path / "run", {"task": "cartpole"})
    Run.create(tmp_path / "shows" / "cartpole", {"task": "cartpole"})
    Run.create(tmp_path / "other", {"task": "pendulum"}).save_checkpoint({})
    for name, config in (("listed", "[1]"), ("short", '{"task": "cartpole"}'), ("changed", None)):
        run = Run.create(tmp_path / name, {"task": "cartpole", **vars(PPOConfig(hidden=8))})
        run.save_checkpoint({"ppo": control.PPO(hidden=16).state_dict()})
        if config: (tmp_path / name / "config.json").write_text(config)
    Run.create(tmp_path / "theirs", {"task": "cartpole", "seeds": 2, "seed": 0})
    Run.create(tmp_path / "theirs" / "seed1", {"task": "pendulum", "seed": 1})
    Run.create(tmp_path / "linked", {"task": "cartpole", "seeds": 1, "seed": 0})
    Run.create(tmp_path / "elsewhere", {"task": "cartpole", "seed": 0})
    (tmp_path / "linked" / "seed0").symlink_to(tmp_path / "elsewhere")
    if "rlhf_notes/Grid-v0" not in gym.registry: gym.register("rlhf_notes/Grid-v0", Grid)
    return tmp_path


@pytest.mark.parametrize("line, words", BAD, ids=[line for line, _ in BAD])
def test_mistakes_are_named_and_nothing_is_written(line, words, furnished, capsys):
    before = contents(furnished)
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and "rlhf-notes: " in err and words in err
    assert contents(furnished) == before


def test_a_lock_that_cannot_be_used_is_named(tmp_path, capsys):
    run = Run.create("run", {"task": "cartpole", **vars(PPOConfig())})
    run.save_checkpoint({"ppo": control.PPO().state_dict()})
    run.held.release()
    Path("run/.lock").unlink(missing_ok=True)
    Path("run/.lock").mkdir()
    assert cli.main(["cartpole", "--resume", "run"]) == 2
    assert capsys.readouterr().err == f"rlhf-notes: cannot use {tmp_path}/run: Is a directory\n"


def test_a_mistake_in_a_process_of_its_own(tmp_path):
    line = [sys.executable, "-m", "rlhf_notes.cli", "cartpole", "--seed", "abc"]
    p = subprocess.run(line, capture_output=True, text=True)
    assert (p.returncode, p.stdout) == (2, "") and "--seed" in p.stderr
    assert contents(tmp_path) == {}


def test_every_whole_number_is_whole_and_no_text_is_empty(capsys):
    "2.5 seeds are not 2, and an empty shell variable is not the default."
    tried = []
    for name in ("cartpole", "pendulum", "train", "rlhf", "demo", "generate", "compare", "bench"):
        arguments = cli.app[name].assemble_argument_collection()
        for argument in arguments:
            option = argument.names[-1]
            if not option.startswith("--"): continue
            kinds = {argument.hint, *typing.get_args(argument.hint)}
            if not kinds & {int, str, Path} or tuple[str, ...] in kinds: continue
            tried.append(option)
            value, words = ("2.5", "must be a whole number") if int in kinds else ("", "")
            rest = ["word", "--run", "x"] * (name == "generate" and option != "--run")
            assert cli.main([name, f"{option}={value}", *rest]) == 2, (name, option)
            assert words in capsys.readouterr().err
    assert len(tried) > 60


# help

def test_help_and_version_load_nothing_heavy():
    asked = [
        (["--help"],
         ["cartpole", "pendulum", "train", "rlhf", "generate", "demo", "compare", "bench",
          "--version"]),
        (["train", "--help"],
         ["--env STR", "--normalize-obs --no-normalize-obs", "--seeds INT", "[default: 40000]"]),
        (["pendulum", "--help"], ["[default: 50000]", "discount of a reward one step later"]),
        (["rlhf", "--help"], ["rloo (other responses), dpo (pairs of them) [choices: ppo, grpo, "
                              "rloo, dpo]", "--track", "--resume"]),
        (["--version"], [__version__])]
    code = f"""
import sys
from rlhf_notes.cli import main
heavy = "torch", "numpy", "gymnasium", "transformers", "matplotlib", "tensorboard"
for argv in {[argv for argv, _ in asked]}:
    print(main(argv), [m for m in heavy if m in sys.modules])"""
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent), "COLUMNS": "300"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    *told, rest = done.stdout.split("0 []\n")
    assert (done.returncode, done.stderr, rest, len(told)) == (0, "", "", len(asked)), done
    for text, (_, words) in zip(told, asked):
        for w in words: assert w in " ".join(text.split()), w


def test_every_argument_of_a_command_is_explained():
    def silent(app):
        for name in app:
            if name[0] == "-": continue
            if (sub := app[name]).default_command is None:
                yield from silent(sub)
                continue
            told = sub.default_command.__doc__ or ""
            yield from ((name, a.names) for a in sub.assemble_argument_collection()
                        if not a.parameter.help and f":param {a.field_info.name}:" not in told)
    assert not [*silent(cli.app)]


def test_the_command_needs_no_docstrings():
    line = [sys.executable, "-OO", "-m", "rlhf_notes", "doctor", "--help"]
    assert b"trainer_state.json" in subprocess.run(line, capture_output=True, check=True).stdout


@pytest.mark.parametrize("config", [PPOConfig, PendulumConfig, ReviewsConfig])
def test_every_option_of_a_config_is_offered(config):
    app = cli.App()
    app.default(cli.options_of(config)(lambda **options: options))

    def words(name, value):
        flag = name.replace("_", "-")
        if value is None: return [f"--{flag}=null"]
        if isinstance(value, bool): return ["--" * value + "--no-" * (not value) + flag]
        return ["--" + flag, str(value)]
    given = [name for name, x in vars(config()).items() if x != ""]  # which no one writes
    line = [w for name in given for w in words(name, getattr(config(), name))]
    options = app(line, result_action="return_value", exit_on_error=False)
    assert list(options) == given and config(**options) == config()
    assert app([], result_action="return_value") == {}
    assert app(["--gamma", "0.5"], result_action="return_value") == {"gamma": 0.5}


def test_help_begins_with_the_everyday_options(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    def shown(*argv):
        assert cli.main([*argv, "--help"]) == 0
        return capsys.readouterr().out
    everyday, *others = shown("train").split("╭─ ")[1:]
    assert re.findall(r"│ (--[a-z-]+)", everyday) == [
        "--env", "--env-kwargs", "--seed", "--device", "--steps", "--out", "--overwrite",
        "--resume", "--seeds", "--track", "--trust"]
    assert [o.split()[0] for o in others] == ["Environments", "Rollouts", "Updates", "Advantages",
                                              "Loss", "Scales", "Networks", "Evaluation"]
    assert "module:Name-v0" in everyday
    language = shown("rlhf")
    assert "--model" in language.split("╭─ ")[1] and not re.search(r"\([PRG]\d+\)", language)
    for command, words in (("bench", "in each of which every method is timed once"),
                           ("generate", "texts to continue"),
                           ("compare", "races, each with a seed of its own"),
                           ("demo", "one run below it for each training")):
        assert words in shown(command)


def test_numbers_as_people_write_them(monkeypatch):
    got = []
    monkeypatch.setattr(
        cli, "new_training", lambda task, options, *rest: got.append(options) or (lambda: 0))
    assert cli.main(["train", "--steps", "1e5", "--lr", "3e-4", "--seed", "9007199254740993"]) == 0
    assert got == [{"steps": 100_000, "learning_rate": 3e-4, "seed": 2**53 + 1}]
    assert isinstance(got[0]["steps"], int)


@pytest.mark.parametrize("number", ["-1e-1", "-1E-1", "-.1", "-0.1"])
def test_numbers_may_be_negative(number, monkeypatch):
    monkeypatch.setattr(cli, "new_training", lambda task, options, *rest: pytest.fail(f"{options}"))
    with pytest.raises(pytest.fail.Exception, match="{'log_std': -0.1}"):
        cli.main(["train", "--log-std", number])


# a run

def test_a_run_leaves_what_was_promised(tmp_path, capsys):
    assert cli.main(["cartpole", *QUICK, "--seed", "4"]) == 0
    out, err = capsys.readouterr()
    run = tmp_path / "runs" / "cartpole-seed4"
    names = {p.name for p in run.iterdir()}
    assert {"config.json", "metrics.csv", "summary.json", "curve.svg", "checkpoint.pt",
            "ppo.pt", "episodes.csv"} < names
    assert any(n.startswith("events.out.tfevents") for n in names)
    assert len(names) == 9
    config, summary = read(run / "config.json"), read(run / "summary.json")
    assert (
        config["task"], config["algo"], config["seed"], config["steps"], config["num_envs"],
        config["gamma"], config["track"]) == ("cartpole", "ppo", 4, 1024, 4, 0.98, "tensorboard")
    assert {"torch", "numpy", "gymnasium", "transformers", "python",
            "rlhf_notes"} == set(config["versions"])
    assert (summary["seed"], summary["interrupted"], summary["eval_episodes"],
            summary["solved"]) == (4, False, 100, False)
    assert 900 < summary["steps"] < 1024
    assert err == ""
    assert "NOT solved" in out
    assert "curve: runs/cartpole-seed4/curve.svg" in out
    assert f"{summary['eval_return_mean']:.1f}" in out
    first = (run / "metrics.csv").read_bytes()
    assert first.count(b"\n") == 9 and b"second" not in first

    assert cli.main(["cartpole", *QUICK, "--seed", "4"]) == 2  # not overwritten silently
    # the same seed, the same bytes
    assert cli.main(["cartpole", *QUICK, "--seed", "4", "--overwrite"]) == 0
    assert (run / "metrics.csv").read_bytes() == first and len(list(run.iterdir())) == 9


@pytest.mark.skipif(os.name != "posix", reason="signals are sent to a process")
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path, number):
    p = command("cartpole", "--steps", "7680", "--num-envs", "4", "--epochs", "1", "--minibatches",
                "1", "--seed", "2", "--eval-episodes", "2", "--out", "cut")
    metrics = tmp_path / "cut" / "metrics.csv"
    out, err = stopped(p, metrics, number)
    assert p.returncode == 130 and "interrupted" in out and "--resume cut" in out, (out, err)
    asked, *rest = err.splitlines()
    assert re.fullmatch(r"stopping after \d+ of 60 iterations; a second Ctrl-C .*", asked)
    assert rest == ([] if number == "SIGINT" else ["rlhf-notes: interrupted"])
    summary, before = read("cut/summary.json"), metrics.read_text()
    assert summary["interrupted"] is True
    assert summary["eval_return_mean"] is None
    assert summary["steps"] == int(before.splitlines()[-1].split(",")[1])
    run = Run.resume(Path("cut"))
    run.lock()
    second = command("cartpole", "--resume", "cut")
    assert "must be free, but another process is training there" in second.communicate(
        timeout=120)[1]
    assert second.returncode == 2
    run.held.release()
    assert cli.main(["cartpole", "--resume", "cut"]) == 0
    assert metrics.read_text().startswith(before) and metrics.read_text().count("\n") == 61
    assert read("cut/summary.json")["interrupted"] is False


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="signals are sent to a group of processes")
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_ctrl_c_ends_a_training_before_its_environments(tmp_path, number):
    "A terminal sends it to the whole group, and environments may have processes of their own."
    p = command("train", "--vectorization", "async", "--num-envs", "2", "--num-steps", "32",
                "--minibatches", "1", "--out", "cut", start_new_session=True)
    metrics, deadline = tmp_path / "cut" / "metrics.csv", time.time() + 120
    while time.time() < deadline and p.poll() is None and not metrics.exists(): time.sleep(0.01)
    os.killpg(p.pid, getattr(signal, number))
    out, err = p.communicate(timeout=120)
    assert p.returncode == 130 and "--resume cut" in out, (out, err)
    assert err.startswith("stopping after ") and "Traceback" not in err
    assert {"summary.json", "ppo.pt", "curve.svg"} < {p.name for p in Path("cut").iterdir()}


def test_a_process_of_an_environment_that_ends_is_told_in_a_line(capsys, monkeypatch):
    iterate = control.PPO.iterate

    def killed(self):
        self.envs.processes[0].terminate()
        self.envs.processes[0].join()
        return iterate(self)
    monkeypatch.setattr(control.PPO, "iterate", killed)
    assert cli.main(["cartpole", *QUICK, "--vectorization", "async"]) == 1
    assert capsys.readouterr().err == "rlhf-notes: the process of an environment has ended\n"


TWO = ["--seeds", "2", "--eval-episodes", "2", "--out", "many"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device")
@pytest.mark.parametrize("stream, code", [(1, 1), (2, 0)])
def test_output_that_cannot_be_written_ends_no_training(stream, code):
    done = processes.run(f"""
import os, sys
from rlhf_notes import cli
os.dup2(os.open("/dev/full", os.O_WRONLY), {stream})
sys.exit(cli.main({["cartpole", *QUICK, *TWO]}))""")
    assert Path("many/seeds.csv").read_text().count("\n") == 3 and done.returncode == code
    assert done.stderr == (
        "rlhf-notes: cannot write to stdout: No space left on device\n" if code else "")


@pytest.mark.skipif(os.name != "posix", reason="streams that are closed")
def test_without_any_output_it_trains():
    line = shlex.join([sys.executable, "-m", "rlhf_notes.cli", "cartpole", *QUICK, *TWO])
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    assert subprocess.run(["sh", "-c", f"{line} >&- 2>&-"], env=env).returncode == 0
    assert Path("many/seeds.csv").read_text().count("\n") == 3


@pytest.mark.skipif(os.name != "posix", reason="ulimit")
@pytest.mark.parametrize("kilobytes, full", [(16, "/checkpoint.pt"), (2, "")])
def test_a_full_disk_is_told_in_a_line(tmp_path, kilobytes, full):
    "With 2 the file of TensorBoard is full, whose thread has an error of its own."
    line = (f"ulimit -f {kilobytes}; {sys.executable} -m rlhf_notes.cli cartpole "
            f"{' '.join(QUICK)} --eval-episodes 2 --out run")
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=env)
    assert ((done.returncode, done.stderr)
            == (1, f"rlhf-notes: cannot use {tmp_path}/run{full}: File too large\n"))


def test_a_training_that_diverges_says_so(capsys):
    assert cli.main(["cartpole", *QUICK, "--learning-rate", "1e30"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("rlhf-notes: iteration 1: policy_loss is nan")


def test_interrupted_before_it_began(capsys, monkeypatch):
    def interrupted(*args): raise KeyboardInterrupt
    monkeypatch.setattr(cli, "new_training", interrupted)
    assert cli.main(["cartpole"]) == 130 and capsys.readouterr().err == "rlhf-notes: interrupted\n"


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_fault_of_the_program_is_not_hidden(monkeypatch, error):
    def faulty(*args): raise error("a fault")
    monkeypatch.setattr(control, "train", faulty)
    with pytest.raises(error, match="a fault"): cli.main(["cartpole"])


def test_train_takes_the_recipe_of_the_environment_and_says_so(capsys):
    own = ["--steps", "2048", "--epochs", "1", "--eval-episodes", "2"]
    assert cli.main(["train", "--env", "Acrobot-v1", *own, "--out", "run"]) == 0
    said = "by the recipe of Acrobot-v1: num_steps=64, normalize_obs=True\n"
    assert capsys.readouterr().out.startswith(said)
    config = json.loads(Path("run/config.json").read_text())
    found = [config[name] for name in ("steps", "num_steps", "epochs", "normalize_obs")]
    assert found == [2048, 64, 1, True]


def test_train_says_its_defaults_for_actions_that_are_numbers(capsys, monkeypatch):
    from gymnasium.envs.registration import EnvSpec
    spec = EnvSpec("Mine-v0", "gymnasium.envs.classic_control.pendulum:PendulumEnv",
                   max_episode_steps=50)
    monkeypatch.setitem(gym.registry, "Mine-v0", spec)
    own = ["--steps", "2048", "--epochs", "1", "--eval-episodes", "2"]
    assert cli.main(["train", "--env", "Mine-v0", *own, "--num-envs", "4", "--out", "run"]) == 0
    said = "by the defaults of Box actions: num_steps=512, minibatches=32, learning_rate=0.0003, "
    assert capsys.readouterr().out.startswith(said)
    config = json.loads(Path("run/config.json").read_text())
    assert [config[name] for name in ("num_envs", "num_steps", "gamma")] == [4, 512, 0.99]


def test_seeds_are_single_runs_and_a_table(capsys):
    assert cli.main(["cartpole", *QUICK, "--seeds", "2", "--out", "many"]) == 0
    out, _ = capsys.readouterr()
    assert cli.main(["cartpole", *QUICK, "--seed", "1", "--out", "alone"]) == 0
    for name in ("metrics.csv", "config.json"):
        assert Path("many/seed1", name).read_bytes() == Path("alone", name).read_bytes()
    with open("many/seeds.csv", newline="") as f: rows = list(csv.DictReader(f))
    greedy = [float(row["eval_return_mean"]) for row in rows]
    assert [row["seed"] for row in rows] == ["0", "1"] and rows[0]["steps_to_solve"] == ""
    mean, half = sum(greedy) / 2, 12.706205 * abs(greedy[1] - greedy[0]) / 2  # Student's t of one
    assert (f"eval_return_mean: {mean:.4g} (95% interval {mean - half:.4g} to {mean + half:.4g})"
            in out)
    assert "many/seeds.csv" in out
    again = ["cartpole", *QUICK, "--seeds", "2", "--seed", "1", "--out", "many"]
    assert cli.main(again) == 2 and cli.main([*again, "--overwrite"]) == 0
    with open("many/seeds.csv", newline="") as f:
        assert [row["seed"] for row in csv.DictReader(f)] == ["1", "2"]


def test_after_ctrl_c_no_further_seed_is_begun(monkeypatch, capsys):
    iterate = control.PPO.iterate

    def interrupted(self):
        signal.raise_signal(signal.SIGINT)
        return iterate(self)
    monkeypatch.setattr(control.PPO, "iterate", interrupted)
    assert cli.main(["cartpole", *QUICK, "--seeds", "2", "--out", "many"]) == 130
    assert "rlhf-notes cartpole --resume many/seed0" in capsys.readouterr().out
    assert not Path("many/seed1").exists()


# language

def test_rlhf_leaves_what_was_promised_and_it_can_be_trained_further(tmp_path, capsys):
    assert cli.main(["rlhf", *TINY, "--algo", "rloo", "--seed", "2"]) == 0
    out, _ = capsys.readouterr()
    run = tmp_path / "runs" / "rlhf-seed2"
    assert {"config.json", "metrics.csv", "summary.json", "curve.svg", "checkpoint.pt", "sft.csv",
            "reward_model.csv", "samples.csv", "policy",
            "reward_model"} < {p.name for p in run.iterdir()}
    config, summary = read(run / "config.json"), read(run / "summary.json")
    assert (config["task"], config["algo"], config["labels"]) == ("rlhf", "rloo", 16)
    assert {
        "task", "algo", "seed", "device", "steps", "wall_seconds", "true_score_sft", "true_score",
        "win_rate_vs_sft", "proxy_score", "kl", "tokens_per_second"} < set(summary)
    assert set(summary["seconds"]) == {"sft", "reward_model", "rl"}
    assert out.startswith("processes: 1\n")
    assert f"{summary['true_score']:.2f} after" in out
    assert "\n  before " in out
    assert cli.main(["rlhf", *TINY[2:], "--model", str(run / "policy"), "--sft-steps", "0", "--out",
                     "again"]) == 0
    Path(run, "summary.json").unlink()
    for new, old in (("prompt_length", "query_length"), ("eval_responses", "eval_answers")):
        config[old] = config.pop(new)
    Path(run, "config.json").write_text(json.dumps(config))  # an earlier version wrote it
    assert cli.main(["rlhf", "--resume", str(run)]) == 0
    assert read(run / "summary.json")["steps"] == summary["steps"]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    from rlhf_notes.hub.save import save_model
    from rlhf_notes.language.model import make_gpt2
    from rlhf_notes.reviews.task import WORDS, make_tokenizer
    path = tmp_path_factory.mktemp("language") / "lm"
    save_model(
        path, make_gpt2("tiny", len(WORDS), n_layer=1, n_embd=16, n_head=2), make_tokenizer())
    return path


def test_a_model_learns_by_a_reward_of_ones_own_and_generates(
    tmp_path, capsys, language_model, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_reward.py").write_text(
        "def size(prompts, responses, bonus): return [len(r) + b for r, b in "
        "zip(responses, bonus)]\ndef bad(prompts, responses, bonus): return " "'good'")
    Path("bad.jsonl").write_text('{"prompt": "about the hotel .", "bonus": 1}\n{"prompt"\n')
    Path("prompts.jsonl").write_text(
        '{"prompt": "about the hotel .", "bonus": 1}\n{"prompt": "about the film .", "bonus": 2}\n')
    own = ["rlhf", "--model", str(language_model), "--prompts", "prompts.jsonl", "--batch", "16",
           "--iterations", "2", "--response-length", "4", "--device", "cpu"]
    assert cli.main([*own, "--algo", "grpo", "--reward", "own_reward:size", "--out", "own"]) == 0
    assert {"config.json", "metrics.csv", "summary.json", "policy"} < {
        p.name for p in Path("own").iterdir()}
    assert Path("own/metrics.csv").read_text().count("\n") == 3
    assert read("own/config.json")["response_length"] == 4
    capsys.readouterr()
    assert cli.main(["generate", "--run", "own", "about the hotel .", "about the film .",
                     "--max-new-tokens", "3", "--device", "cpu"]) == 0
    assert [line[:15] for line in capsys.readouterr().out.splitlines()] == ["about the hotel",
                                                                            "about the film "]
    before = contents(tmp_path)
    for more, words in ((["--reward", "own_reward:height"],
                         "--reward must be MODULE:FUNCTION, got 'own_reward:height': "),
                        (["--reward", "nowhere:size"],
                         "--reward must be MODULE:FUNCTION, got 'nowhere:size': No module"),
                        (["--reward", "own_reward.size"], "(on the command line: own_reward:size)"),
                        (["--reward", "own_reward:size", "--labels", "8"],
                         "--labels must be an option of OwnRunConfig"),
                        ([], "--reward must come with --model and --prompts"),
                        (["--reward", "own_reward:bad"], "--reward must return a list of numbers"),
                        (["--reward", "own_reward:size", "--seeds", "2"], "--seeds cannot go"),
                        (["--reward", "own_reward:size", "--prompts", "bad.jsonl"],
                         "--prompts must be JSON, got line 2 of bad.jsonl")):
        argv = [
            x for x in own if "bad.jsonl" not in more or x not in ("--prompts", "prompts.jsonl")]
        assert cli.main([*argv, *more, "--out", "new"]) == 2 and words in capsys.readouterr().err
    assert cli.main(["cartpole", "--reward", "own_reward:size"]) == 2
    assert contents(tmp_path).keys() == before.keys()


# the demo

def test_the_demo_solves_what_it_trains(capsys, monkeypatch):
    """The main job, as the README has it; the language model, which takes longer, is trained in a
    test of its own.
    """
    begin, little = (cli.new_training,
                     dict(sft_steps=3, labels=8, norm_samples=8, iterations=1, batch=8,
                          eval_responses=8))
    monkeypatch.setattr(
        cli, "new_training",
        lambda task, options, *rest: begin(task, {**options, **(little if task == "rlhf" else {})},
                                           *rest))
    assert cli.main(["demo", "--device", "cpu"]) == 0
    for task, enough in (("cartpole", 475), ("pendulum", -200)):
        summary = read(f"runs/demo/{task}/summary.json")
        assert summary["solved"]
        assert min(summary["eval_return_mean"], summary["eval_sampled_return_mean"]) >= enough
    assert "tensorboard --logdir runs/demo" in capsys.readouterr().out


# studies

def test_bench_leaves_a_table_and_a_csv(capsys, monkeypatch):
    from rlhf_notes.studies import speed
    monkeypatch.setitem(speed.SIZES, "quick", (2, 3, 50))
    monkeypatch.setattr(speed, "copy_bandwidth", lambda device: 1e10)
    for task in ("log-probability", "entropy"):
        assert cli.main(
            ["bench", "--rounds", "1", "--device", "cpu", "--task", task, "--out", task]) == 0
        out, err = capsys.readouterr()
        assert err == "" and "naive line" in out and f"{task}/bench.csv" in out
        assert "2 of 2: " in out and max(map(len, out.splitlines())) <= 100
        with open(f"{task}/bench.csv", newline="") as f: rows = list(csv.DictReader(f))
        assert tuple(rows[0]) == speed.COLUMNS
        assert {r["shape"] for r in rows} == {"2x3x50"}
        assert {r["task"] for r in rows} == {task}


def test_compare_writes_a_row_for_each_race(capsys, monkeypatch):
    class Still:
        batch = 512
        def iterate(self): time.sleep(0.001)
        def policy(self, rng=None): return lambda obs: np.zeros(len(obs), int)
    monkeypatch.setattr(benchmark, "contenders",
                        lambda task: [benchmark.Contender(name, lambda seed: Still(), 1024, False)
                                      for name in ("ours", "other")])
    assert cli.main(["compare", "--seed", "3", "--seeds", "2"]) == 0
    out, err = capsys.readouterr()
    with open("runs/compare-cartpole/compare.csv", newline="") as f: rows = list(csv.DictReader(f))
    assert list(rows[0]) == list(benchmark.COLUMNS)
    assert [(r["seed"], r["contender"]) for r in rows] == [
        ("3", "other"), ("3", "ours"), ("4", "ours"), ("4", "other")]
    assert err == "" and "0 of 2" in out and read("runs/compare-cartpole/config.json")["seed"] == 3
    told = "without stable-baselines3, which pip install rlhf_notes[crosscheck] brings"
    assert out.splitlines()[:2] == [told, "1 of 4: cartpole other"] and "4 of 4: cartpole" in out
    assert cli.main(["compare", "--seeds", "1"]) == 2
    assert cli.main(["compare", "--seeds", "1", "--overwrite"]) == 0


def test_arguments_of_an_environment_are_json(monkeypatch):
    got = []
    monkeypatch.setattr(
        cli, "new_training",
        lambda task, options, *rest: got.append(options["env_kwargs"]) or (lambda: 0))
    assert cli.main(["train", "--env-kwargs",
                     '{"g": 9.81, "n": 3, "name": "x", "list": [1, 2], "none": null}']) == 0
    assert got == [{"g": 9.81, "n": 3, "name": "x", "list": [1, 2], "none": None}]
    assert isinstance(got[0]["n"], int)
    assert cli.main(["train", "--env-kwargs", "g=9"]) == 2 and len(got) == 1


def test_an_environment_may_draw_from_the_global_generators(monkeypatch):
    class Noisy(gym.Env):
        observation_space, action_space = gym.spaces.Box(-9, 9, (2,)), gym.spaces.Discrete(2)
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.random.uniform(-1, 1, 2).astype(np.float32), {}
        def step(self, action):
            return (np.random.uniform(-1, 1, 2).astype(np.float32), random.random(),
                    random.random() < 0.1, False, {})
    monkeypatch.setitem(gym.registry, "Noisy-v0", gym.envs.registration.EnvSpec("Noisy-v0", Noisy))
    rows = []
    for out, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert cli.main(["train", "--env", "Noisy-v0", *QUICK, "--seed", seed, "--out", out]) == 0
        rows.append((Path(out) / "metrics.csv").read_text())
    assert rows[0] == rows[1] != rows[2]


def test_of_an_environment_that_is_the_only_one_there_may_be_many_seeds(monkeypatch):
    class Only(gym.Env):
        observation_space, action_space, there = (gym.spaces.Box(-9, 9, (2,)),
                                                  gym.spaces.Discrete(2), [])
        def __init__(self):
            if self.there: raise OSError("address already in use")
            self.there.append(self)
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.zeros(2, np.float32), {}
        def step(self, action): return np.zeros(2, np.float32), 1.0, False, False, {}
        def close(self): self.there.clear()
    monkeypatch.setitem(gym.registry, "Only-v0",
                        gym.envs.registration.EnvSpec("Only-v0", Only, max_episode_steps=9))
    assert cli.main(["train", "--env", "Only-v0", "--num-envs", "1", "--steps", "64",
                     "--eval-episodes", "2", "--seeds", "2"]) == 0


class Breaking(gym.Env):
    observation_space, action_space, left = gym.spaces.Box(-9, 9, (2,)), gym.spaces.Discrete(2), 700
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action):
        Breaking.left -= 1
        if Breaking.left == 0: raise self.error("the sensor is gone")
        return np.zeros(2, np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("error", [ValueError, ConnectionError])
def test_an_environment_that_breaks_loses_no_run(error, monkeypatch, capsys):
    monkeypatch.setitem(gym.registry, "Breaking-v0",
                        gym.envs.registration.EnvSpec("Breaking-v0", Breaking, max_episode_steps=9))
    monkeypatch.setattr(fit, "CHECKPOINT_EVERY", 0)
    monkeypatch.setattr(Breaking, "left", 700)
    monkeypatch.setattr(Breaking, "error", error, raising=False)
    words = f"^the environment's step raised {error.__name__}: the sensor is gone$"
    with pytest.raises(RuntimeError, match=words):
        cli.main(["train", "--env", "Breaking-v0", *QUICK, "--eval-episodes", "2", "--out", "run"])
    assert capsys.readouterr() == ("", "continue with: rlhf-notes train --resume run\n")
    assert cli.main(["train", "--resume", "run"]) == 0
    assert len(Path("run/metrics.csv").read_text().splitlines()) == 9


WALK = """import gymnasium as gym, os
from gymnasium.envs.classic_control import PendulumEnv
class Walk(PendulumEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        os.makedirs('elsewhere', exist_ok=True)
        os.chdir('elsewhere')
gym.register('{}-v0', Walk, max_episode_steps=9)"""


def test_a_module_that_a_run_names_is_imported_by_ones_own_word_alone(
    tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(WALK.format("Mine"))
    line = ["train", "--env", "mine:Mine-v0", *SHORT, "--out", "run"]
    assert cli.main(line) == 0
    del sys.modules["mine"], gym.registry["Mine-v0"]
    for given in ([], ["--env", "CartPole-v1"]):
        assert cli.main(["train", "--resume", "run", *given]) == 2 and "mine" not in sys.modules
        assert "--env must be mine:Mine-v0 again, or --trust given" in capsys.readouterr().err
    assert cli.main(["train", "--resume", "run", "--env", "mine:Mine-v0"]) == 0
    assert cli.main(["train", "--resume", "run", "--trust"]) == 0
    capsys.readouterr()
    assert cli.main([*line, "--trust"]) == 2
    assert capsys.readouterr().err == "rlhf-notes: --trust must come with --resume\n"


def test_an_environment_that_changes_the_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "roams.py").write_text(WALK.format("Roams"))
    line = ["train", "--env", "roams:Roams-v0", *SHORT, "--seeds", "2"]
    assert cli.main([*line, "--out", "runs"]) == 0 and Path.cwd() == tmp_path
    assert {"ppo.pt", "curve.svg", "summary.json"} < {
        p.name for p in (tmp_path / "runs/seed1").iterdir()}
    assert "curve: runs/seed1/curve.svg" in capsys.readouterr().out
    assert not [*tmp_path.rglob("elsewhere/**/runs")]


class Leaving(gym.Env):
    observation_space, action_space = gym.spaces.Box(-9, 9, (2,)), gym.spaces.Discrete(2)
    left, error = 700, SystemExit(0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        Leaving.left -= 1
        if Leaving.left == 0: raise self.error
        return np.zeros(2, np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("error, words", [
    (SystemExit(0), "SystemExit: 0"),
    (FileNotFoundError(2, "No such file", "asset.bin"), "asset.bin")])
def test_an_environment_cannot_end_the_program_as_if_all_were_well(error, words, monkeypatch):
    "Nor is its file taken for one of the command."
    monkeypatch.setitem(gym.registry, "Leaving-v0", gym.envs.registration.EnvSpec(
        "Leaving-v0", Leaving, max_episode_steps=9))
    monkeypatch.setattr(Leaving, "error", error)
    for left, code in ((700, None), (1, 2)):  # in training, at the first step
        monkeypatch.setattr(Leaving, "left", left)
        line = ["train", "--env", "Leaving-v0", *QUICK, "--out", f"run{left}"]
        if code: assert cli.main(line) == 2
        else:
            with pytest.raises(RuntimeError, match=f"the environment's step raised .*{words}"):
                cli.main(line)


def test_a_training_that_leaves_by_itself_is_a_failure(monkeypatch, capsys):
    def leave(*args): raise SystemExit(0)
    monkeypatch.setattr(cli, "new_training", leave)
    assert cli.main(["cartpole"]) == 1
    told = "rlhf-notes: an environment or a reward called sys.exit(0)\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("error, words", [
    (MemoryError("Unable to allocate 7 GiB"), "out of memory: Unable to allocate 7 GiB"),
    (MemoryError(), "out of memory: MemoryError"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nmore"),
     "out of memory: DefaultCPUAllocator: can't allocate memory: you tried"),
    (torch.OutOfMemoryError("CUDA out of memory."), "out of memory: CUDA out of memory."),
    (OSError(24, "Too many open files"), "Too many open files")])
def test_a_machine_that_is_full_is_told_in_a_line(error, words, monkeypatch, capsys):
    def fail(*args): raise error
    monkeypatch.setattr(control.PPO, "iterate", fail)
    assert cli.main(["cartpole", *QUICK]) == 1
    assert capsys.readouterr().err == f"rlhf-notes: {words}\n"


def test_an_environment_from_the_directory_one_stands_in(tmp_path, monkeypatch):
    (tmp_path / "walk_env.py").write_text(
        "import gymnasium as gym\ngym.register('Walk-v0', "
        "'gymnasium.envs.classic_control:PendulumEnv', " "max_episode_steps=9)")
    command = [str(Path(sys.executable).with_name("rlhf-notes")), "train", "--env",
               "walk_env:Walk-v0", *SHORT, "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
