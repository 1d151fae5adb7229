import argparse
import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_notes import __version__, cli
from rlhf_notes.control import ppo as cartpole
from rlhf_notes.studies import benchmark as compare
from rlhf_notes.control.config import PPOConfig, PendulumConfig
from rlhf_notes.language import rlhf
from rlhf_notes.language.model import make_gpt2
from rlhf_notes.language.task import QUERIES, WORDS, make_tokenizer
from rlhf_notes.training.runs import Run

QUICK = ["--steps", "1024", "--num-envs", "4", "--epochs", "1"]                  # eight iterations


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def contents(path):
    return {p.relative_to(path): p.read_bytes() if p.is_file() else None for p in path.rglob("*")}


def command(*args, **kwargs):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(cli.Path(cli.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "rlhf_notes.cli", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **kwargs)


# what is wrong gets one line, exit code 2, and leaves everything as it was

BAD = [
    ([], "required: COMMAND"), (["pendulums"], "invalid choice: 'pendulums'"), (["--seed", "3"], "COMMAND"),
    (["cartpole", "--seed", "abc"], "--seed: invalid int value: 'abc'"), (["cartpole", "--seed", "-1"], "--seed must be in [0, 9223372036854775807], got -1"), (["cartpole", "--seed", "1.5"], "--seed: invalid int value: '1.5'"),
    (["cartpole", "--seed"], "--seed: expected one argument"), (["cartpole", "--steps", "-5"], "--steps must be in [1, 2147483647], got -5"), (["cartpole", "--steps=-5"], "--steps must be in"),
    (["cartpole", "--steps", "100"], "--steps must be at least num_envs * num_steps = 1024, got 100"), (["cartpole", "--minibatches", "7"], "--minibatches must divide num_envs * num_steps = 1024, got 7"),
    (["cartpole", "--gamma", "1.5"], "--gamma must be in [0, 1], got 1.5"), (["cartpole", "--learning-rate", "nan"], "--learning-rate must be in"), (["cartpole", "--clip", "a\nb"], "--clip: invalid float value"),
    (["rlhf", "--algo", "reinforce"], "argument --algo: invalid choice: 'reinforce'"), (["rlhf", "--minibatches", "3"], "--minibatches must divide the batch of 128 answers, got 3"), (["rlhf", "--microbatches", "5"], "--microbatches must divide"),
    (["rlhf", "--algo", "grpo", "--group", "7"], "--group must divide the batch of 128 answers, got 7"), (["rlhf", "--query-length", "3"], "--query-length must be 0 or at least"), (["rlhf", "--response-length", "80"], "--response-length must fit into the model's context of 64 tokens, beside a query of 9, got 80"), (["rlhf", "--query-length", "60"], "--query-length must fit into the model's context of 64 tokens, beside a response of 16, got 60"),
    (["rlhf", "--seed", "18446744073709551616"], "--seed must be in [0, 9223372036854775807], got 18446744073709551616"), (["cartpole", "--seed", "9223372036854775808"], "--seed must be in [0, 9223372036854775807], got"), (["rlhf", "--model", "file"], "--model must be a directory or a name on the hub, got the file 'file'"),
    (["rlhf", "--model", "shows"], "--model must be a directory or a name on the hub with a causal language model that transformers can load, got 'shows'"), (["rlhf", "--device", "cuda"], "device 'cuda' is not there"), (["compare", "--task", "rlhf", "--iterations", "0"], "--iterations must be at least 1, got 0"),
    (["cartpole", "--device", "gpu"], "--device must be auto, cpu, cuda or mps, got 'gpu'"), (["cartpole", "--device", "cuda"], "device 'cuda' is not there"),
    (["cartpole", "--sed", "3"], "unrecognized argument '--sed'; did you mean --seed?"), (["cartpole", "--zzz"], "unrecognized argument '--zzz' (see rlhf-notes cartpole --help)"), (["demo", "--zzz"], "unrecognized argument '--zzz'; expected --help, --seed, --device, --out"), (["cartpole", "word"], "unrecognized argument 'word'"),
    (["cartpole", "--learning", "0.1"], "unrecognized argument '--learning'; did you mean --learning-rate?"),
    (["cartpole", "--out", "file"], "--out must be a directory, got the file file"), (["cartpole", "--out", "file/below"], "cannot use file/below"), (["cartpole", "--out", "full"], "which holds letter.txt"),
    (["cartpole", "--out", "full", "--overwrite"], "which holds letter.txt"), (["cartpole", "--out", "cut"], "which holds a run: continue it with --resume cut, or replace it with --overwrite"), (["cartpole", "--out", "run"], "which holds a run: replace it with --overwrite"),
    (["cartpole", "--out", "run", "--overwrite", "--seed", "-1"], "--seed must be in"), (["cartpole", "--out", "run", "--overwrite", "--device", "cuda"], "is not there"),
    (["cartpole", "--resume", "nowhere"], "got nowhere, which has no config.json"), (["cartpole", "--resume", "full"], "got full, which has no config.json"), (["cartpole", "--resume", "run"], "got run, which has no checkpoint.pt"),
    (["cartpole", "--resume", "done"], "got done, which is finished"), (["cartpole", "--resume", "other"], "got other, a run of pendulum"), (["cartpole", "--resume", "half"], "got half, which lacks gamma, lam"),
    (["cartpole", "--resume", "cut"], "--resume must be a run directory whose checkpoint fits its config.json, got cut: KeyError: 'ppo'"),
    (["cartpole", "--log-std", "-1e2"], "--log-std must be in [-10, 10], got -100"), (["cartpole", "--steps", "-1E+3"], "--steps: invalid int value: '-1E+3'"),
    (["cartpole", "--resume", "done", "--seed", "3"], "--resume must stand alone"), (["cartpole", "--resume", "done", "--out", "x"], "got --out as well"), (["cartpole", "--resume", "done", "--overwrite"], "got --overwrite as well"),
    (["cartpole", "--env", "CartPole-v1"], "unrecognized argument '--env'; to choose it: rlhf-notes train --env"), (["train", "--env", "Nowhere-v0"], "--env must be an environment that Gymnasium can make, got 'Nowhere-v0'"),
    (["train", "--env", "FrozenLake-v1"], "--env must have Box observations, got 'FrozenLake-v1'"), (["train", "--env", "Blackjack-v1"], "--env must have Box observations"),
    (["train", "--env", "rlhf_notes/Grid-v0"], "--env must have Discrete actions, or a Box of floats, got MultiDiscrete"),
    *[(["train", "--overwrite", "--out", "cut", *rest], words) for rest, words in (
        (["--env", "rlhf_notes/Unset-v0"], "--env must be an environment that can be reset, got 'rlhf_notes/Unset-v0': division by zero"),
        (["--env", "rlhf_notes/Idle-v0"], "envs must reset themselves, autoreset_mode NextStep or SameStep, got Disabled"),
        (["--env", "rlhf_notes/Vector-v0", "--vectorization", "sync"], "--env must be an environment that Gymnasium can make, got 'rlhf_notes/Vector-v0'"),
        (["--env", "rlhf_notes/Wide-v0", "--squash"], "--squash must have bounds whose distance is a number"),
        (["--env", "rlhf_notes/Unbounded-v0", "--squash"], "--squash must have bounds whose distance is a number, got Box(-inf, inf, (2, 2), float32)"),
        (["--env", "CartPole-v1", "--hidden", "1000000000000"], "--hidden must be in [1, 2147483647], got 1000000000000"),
        (["--env", "CartPole-v1", "--num-envs", "2147483648"], "--num-envs must be in [1, 2147483647], got 2147483648"))],
    (["rlhf", "--labels", "9" * 400], "--labels must be in [1, 2147483647], got 999"), (["rlhf", "--penalty", "-1e300"], "--penalty must be in [-3.4e+38, 3.4e+38], got -1e+300"), (["cartpole", "--reward-scale", "1e39"], "--reward-scale must be in (0, 3.4e+38], got 1e+39"),
    (["cartpole", "--seeds", "10001", "--out", "file"], "--seeds must be at most 10000, got 10001"), (["compare", "--seeds", "10001", "--out", "file"], "--seeds must be at most 10000, got 10001"),
    (["compare", "--seed", "9" * 400], "--seed must be in [0, 9223372036854775807], got 999"),
    (["cartpole", "--activation", "gelu"], "--activation: invalid choice: 'gelu'"), (["cartpole", "--normalize-obs", "yes"], "unrecognized argument 'yes'"), (["cartpole", "--normalize-ob"], "did you mean --normalize-obs?"),
    (["cartpole", "--seeds", "0"], "--seeds must be at least 1, got 0"), (["cartpole", "--seeds", "-2"], "--seeds must be at least 1, got -2"), (["cartpole", "--seeds", "x"], "--seeds: invalid int value"),
    (["cartpole", "--seeds", "2", "--jobs", "0"], "--jobs must be at least 1, got 0"), (["cartpole", "--jobs", "2"], "--jobs must come with --seeds"),
    (["cartpole", "--seeds", "2", "--seed", "0"], "--seed must not stand beside --seeds"), (["cartpole", "--seeds", "2", "--resume", "done"], "--resume must not stand beside --seeds"),
    (["cartpole", "--seeds", "2", "--gamma", "2"], "--gamma must be in"), (["cartpole", "--seeds", "2", "--device", "cuda"], "is not there"), (["train", "--seeds", "2", "--env", "Nowhere-v0"], "--env must be"),
    (["cartpole", "--seeds", "2", "--out", "run"], "which holds a run"), (["cartpole", "--seeds", "2", "--out", "full", "--overwrite"], "which holds letter.txt"), (["cartpole", "--seeds", "2", "--out", "file"], "--out must be a directory"),
    (["cartpole", "--seeds", "2", "--out", "many", "--overwrite"], "got many/seed1, which holds letter.txt"),
    (["compare", "--task", "acrobot"], "--task: invalid choice: 'acrobot'"), (["compare", "--seeds", "0"], "--seeds must be at least 1, got 0"), (["compare", "--out", "run"], "which holds a run"), (["compare", "--out", "full", "--overwrite"], "which holds letter.txt"),
    (["compare", "--sees", "3"], "unrecognized argument '--sees'; did you mean --seeds?"), (["compare", "--seed", "-1"], "--seed must be in [0, 9223372036854775807], got -1"),
    (["compare", "--seed", "9223372036854775807", "--seeds", "2"], "--seed must be in [0, 9223372036854775807], got 9223372036854775808"),
    (["compare", "--device", "cpu"], "--device must come with --task rlhf, got it with cartpole"), (["compare", "--task", "rlhf", "--device", "cuda"], "device 'cuda' is not there"), (["compare", "--task", "rlhf", "--device", "gpu"], "--device must be auto, cpu, cuda or mps, got 'gpu'"),
    (["bench", "--size", "huge"], "--size: invalid choice: 'huge'"), (["bench", "--task", "gae"], "--task: invalid choice: 'gae'"), (["bench", "--rounds", "0"], "--rounds must be at least 1, got 0"), (["bench", "--rounds", "x"], "--rounds: invalid int value"), (["bench", "--device", "cuda"], "device 'cuda' is not there"),
    (["bench", "--device", "gpu"], "--device must be auto, cpu, cuda"), (["bench", "--out", "file"], "--out must be a directory, got the file file"), (["bench", "--out", "run"], "which holds a run"), (["bench", "--out", "full", "--overwrite"], "which holds letter.txt"), (["bench", "--seed", "1"], "unrecognized argument '--seed'"),
    (["demo", "--out", "shows"], "got shows/pendulum, which holds letter.txt"),
    (["demo", "--steps", "3"], "unrecognized argument '--steps'"), (["demo", "--device", "cuda"], "is not there"), (["demo", "--out", "file"], "cannot use file"), (["demo", "--seed", "x"], "--seed: invalid int value"),
]


class Unbounded(gym.Env):
    "Each action is a matrix, paid for by its distance from one whose entries are 1."
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Box(-np.inf, np.inf, (2, 2))
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action):
        assert action.shape == (2, 2)
        return np.zeros(2, np.float32), -float(np.square(action - 1).mean()), True, False, {}


class Grid(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.MultiDiscrete([2, 3])


class Unset(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None): 1 / 0


class Wide(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Box(-3e38, 3e38, (1,))
    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}


class Idle(CartPoleVectorEnv):
    metadata = {**CartPoleVectorEnv.metadata, "autoreset_mode": gym.vector.AutoresetMode.DISABLED}


@pytest.fixture
def furnished(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir(); (tmp_path / "full" / "letter.txt").write_text("x")
    config = {"task": "cartpole", **{f: getattr(PPOConfig(), f) for f in PPOConfig.__dataclass_fields__}}
    without = {k: v for k, v in config.items() if k not in ("gamma", "lam")}
    for name, c, checkpoint, summary in (("run", config, False, None), ("cut", config, True, {"interrupted": True}), ("done", config, True, {"interrupted": False}), ("other", config | {"task": "pendulum"}, True, None), ("half", without, True, None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(c))
        if checkpoint: torch.save({"rows": 0, "state": {}}, tmp_path / name / "checkpoint.pt")
        if summary: (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    for name in ("many/seed1", "shows/pendulum"): (tmp_path / name).mkdir(parents=True); (tmp_path / name / "letter.txt").write_text("x")
    (tmp_path / "many" / "config.json").write_text(json.dumps(config))
    for name, env in (("Unbounded", Unbounded), ("Grid", Grid), ("Unset", Unset), ("Wide", Wide)):
        if f"rlhf_notes/{name}-v0" not in gym.registry: gym.register(f"rlhf_notes/{name}-v0", env)
    for name, env in (("Idle", Idle), ("Vector", CartPoleVectorEnv)):
        if f"rlhf_notes/{name}-v0" not in gym.registry: gym.register(f"rlhf_notes/{name}-v0", vector_entry_point=env)
    return tmp_path


@pytest.mark.parametrize("argv, words", BAD, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_mistakes_get_one_line(argv, words, furnished, capsys, monkeypatch):
    if any("cuda" in a for a in argv): monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = contents(furnished)
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("rlhf-notes: ") and err.count("\n") == 1 and err.endswith("\n") and words in err
    assert contents(furnished) == before


def test_mistakes_get_one_line_in_a_process_of_their_own(tmp_path):
    p = command("cartpole", "--seed", "abc")
    out, err = p.communicate()
    assert (p.returncode, out, err.count("\n")) == (2, "", 1) and contents(tmp_path) == {}


# help and version are quick

def test_help_and_version_load_nothing_heavy():
    code = ("import sys; from rlhf_notes.cli import main\ntry: main({argv})\nexcept SystemExit as e: assert not e.code\n"
            "print([m for m in ('torch', 'numpy', 'gymnasium', 'transformers', 'matplotlib', 'tensorboard') if m in sys.modules])")
    for argv, words in ((["--help"], ["cartpole", "pendulum", "train", "demo", "compare", "--version"]), (["compare", "--help"], ["--task {cartpole,pendulum,rlhf}", "--iterations N", "--seeds K", "--out DIR"]),
                        (["train", "--help"], ["--env ENV", "--normalize-obs | --no-normalize-obs", "--seeds K", "--jobs N", "(default: no)"]), (["pendulum", "--help"], ["(default: 50000)"]), (["cartpole", "--help"], ["--seed N", "--device", "--steps N", "--out DIR", "--resume DIR", "--overwrite", "(default: 40000)"]),
                        (["demo", "--help"], ["--seed", "--device", "--out"]), (["bench", "--help"], ["--size {small,medium,large}", "--rounds N", "--device", "--out DIR", "--overwrite"]), (["--version"], [f"rlhf-notes {__version__}"])):
        env = {**os.environ, "PYTHONPATH": str(cli.Path(cli.__file__).parent.parent)}
        done = subprocess.run([sys.executable, "-c", code.format(argv=argv)], capture_output=True, text=True, env=env)
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]" and done.stderr == ""
        for w in words: assert w in " ".join(done.stdout.split()), w


@pytest.mark.parametrize("task", cli.TASKS)
def test_every_option_of_the_config_is_offered(task):
    config, fixed = cli.TASKS[task].config, cli.TASKS[task].fixed
    def words(name, f):
        flag = name.replace("_", "-")
        if isinstance(f.default, bool): return ["--" + flag] if f.default else ["--no-" + flag]
        return ["--" + flag, str(f.default)]
    args = cli.parse([task, *(x for name, f in config.__dataclass_fields__.items() if name not in fixed for x in words(name, f))])
    assert set(cli.given(args, config)) == set(config.__dataclass_fields__) - set(fixed) and config(**cli.given(args, config)) == config()
    assert cli.given(cli.parse([task]), config) == {} and cli.given(cli.parse([task, "--gamma", "0.5"]), config) == {"gamma": 0.5}
    if task == "rlhf": assert cli.given(cli.parse([task, "--kl-in-loss", "--no-whiten-rewards"]), config) == {"kl_in_loss": True, "whiten_rewards": False}
    else: assert cli.given(cli.parse([task, "--squash", "--no-normalize-obs"]), config) == {"squash": True, "normalize_obs": False}


def test_help_says_what_the_defaults_are():
    for p in next(a for a in cli.make_parser()._actions if a.dest == "command").choices.values():
        for a in p._actions:
            if a.default not in (None, False, argparse.SUPPRESS): assert a.help.endswith(f"(default: {a.default})"), (p.prog, a.dest)


# a run

def test_a_run_leaves_what_was_promised(tmp_path, capsys):
    assert cli.main(["cartpole", *QUICK, "--seed", "4"]) == 0
    out, err = capsys.readouterr()
    run = tmp_path / "runs" / "cartpole-seed4"
    names = {p.name for p in run.iterdir()}
    assert {"config.json", "metrics.csv", "summary.json", "curve.svg", "checkpoint.pt"} < names and any(n.startswith("events.out.tfevents") for n in names) and len(names) == 6
    config, summary = (json.loads((run / n).read_text()) for n in ("config.json", "summary.json"))
    assert (config["task"], config["algo"], config["seed"], config["steps"], config["num_envs"], config["gamma"]) == ("cartpole", "ppo", 4, 1024, 4, 0.98)
    assert {"torch", "numpy", "gymnasium", "transformers", "python", "rlhf_notes"} == set(config["versions"])
    assert (summary["seed"], summary["steps"], summary["interrupted"], summary["eval_episodes"], summary["solved"]) == (4, 1024, False, 100, False)
    assert err == "" and "NOT solved" in out and "curve: runs/cartpole-seed4/curve.svg" in out and f"{summary['eval_return_mean']:.1f}" in out
    header, *rows = (run / "metrics.csv").read_text().splitlines()
    assert {"iteration", "steps", "return_mean", "length_mean", "policy_loss", "value_loss", "entropy", "kl_k3", "clip_fraction", "explained_variance", "learning_rate", "grad_norm"} <= set(header.split(","))
    assert len(rows) == 8 and "second" not in header and "time" not in header
    first = (run / "metrics.csv").read_bytes()

    assert cli.main(["cartpole", *QUICK, "--seed", "4"]) == 2                          # not overwritten silently
    assert cli.main(["cartpole", *QUICK, "--seed", "4", "--overwrite"]) == 0           # the same seed, the same bytes
    assert (run / "metrics.csv").read_bytes() == first and len(list(run.iterdir())) == 6
    assert cli.main(["cartpole", *QUICK, "--seed", "5", "--out", "elsewhere/x"]) == 0
    assert (tmp_path / "elsewhere" / "x" / "metrics.csv").read_bytes() != first
    assert torch.get_num_threads() == 1


def test_bench_leaves_a_table_and_a_csv(tmp_path, capsys, monkeypatch):
    from rlhf_notes.studies import speed
    monkeypatch.setitem(speed.SIZES, "small", (2, 3, 50))
    monkeypatch.setattr(speed, "gae_cases", lambda device: [speed.Case("GAE", (3, 2), torch.float32, {"loop": lambda r: r + 0, "ours": lambda r: r + 0}, (torch.ones(3, 2),))])
    monkeypatch.setattr(speed, "copy_bandwidth", lambda device: 1e10)
    assert cli.main(["bench", "--rounds", "2", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "x ours" in out and "runs/bench/bench.csv" in out
    with open("runs/bench/bench.csv", newline="") as f: rows = list(csv.DictReader(f))
    assert tuple(rows[0]) == speed.COLUMNS and {r["shape"] for r in rows} == {"2x3x50", "3x2"} and {r["dtype"] for r in rows} == {"float32", "bfloat16"}
    assert all(float(r["times_ours"]) == 1 for r in rows if r["method"] == "ours") and {"naive", "DI-engine efficient", "ours", "loop"} <= {r["method"] for r in rows}
    assert {r["task"] for r in rows} == {"log-probability", "entropy", "both", "from hidden states", "parts", "GAE"}
    assert cli.main(["bench"]) == 2
    for task, of in (("log-probability", {"log-probability", "parts"}), ("from-hidden-states", {"from hidden states"}), ("GAE", {"GAE"})):
        assert cli.main(["bench", "--rounds", "1", "--device", "cpu", "--overwrite", "--task", task]) == 0
        with open("runs/bench/bench.csv", newline="") as f: assert {r["task"] for r in csv.DictReader(f)} == of


def test_bench_hands_on_what_it_is_told(monkeypatch):
    from rlhf_notes.studies import speed
    told = []
    monkeypatch.setattr(cli, "pick_device", lambda name, auto: {"auto": "meta"}[name])
    monkeypatch.setattr(speed, "bench", lambda sizes, device, rounds, tasks, **_: told.append((sizes, device, rounds, tasks)))
    assert cli.main(["bench", "--size", "medium", "--rounds", "3", "--task", "entropy"]) == 0 and told == [(("medium",), "meta", 3, ("entropy",))]


@pytest.mark.skipif(os.name != "posix", reason="SIGINT is sent to a process")
def test_ctrl_c_leaves_a_run_that_goes_on_to_the_same_bytes(tmp_path):
    args = ["--steps", "25600", "--num-envs", "4", "--epochs", "1", "--minibatches", "1", "--seed", "2"]
    p = command("cartpole", *args, "--out", "cut")
    metrics, deadline = tmp_path / "cut" / "metrics.csv", time.time() + 120
    while p.poll() is None and time.time() < deadline and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 3): time.sleep(0.005)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=120)
    assert p.returncode == 130, (out, err)
    assert err == "" and "interrupted" in out and "--resume cut" in out
    assert {"config.json", "metrics.csv", "summary.json", "curve.svg", "checkpoint.pt"} <= {f.name for f in (tmp_path / "cut").iterdir()}
    summary, rows = json.loads((tmp_path / "cut" / "summary.json").read_text()), metrics.read_text().splitlines()[1:]
    assert summary["interrupted"] is True and summary["solved"] is False and summary["eval_return_mean"] is None and 3 <= len(rows) < 200 and summary["steps"] == len(rows) * 128
    assert cli.main(["cartpole", "--resume", "cut"]) == 0
    assert cli.main(["cartpole", *args, "--out", "straight"]) == 0
    assert metrics.read_bytes() == (tmp_path / "straight" / "metrics.csv").read_bytes()
    done = json.loads((tmp_path / "cut" / "summary.json").read_text())
    straight = json.loads((tmp_path / "straight" / "summary.json").read_text())
    clock = {"wall_seconds", "seconds_to_solve"}
    assert {k: v for k, v in done.items() if k not in clock} == {k: v for k, v in straight.items() if k not in clock}


@pytest.mark.parametrize("said, threads", [("4,2", 4), ("3", 3), (" 5 ", 5), ("abc", 7), ("0", 7), ("-1", 7), ("", 7), (None, 7)])
def test_threads_are_what_openmp_understands(monkeypatch, said, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    if said is None: monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else: monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert cli.allowed_threads() == threads


@pytest.mark.parametrize("task, allowed, threads", [("cartpole", "4", 1), ("rlhf", "4", 2), ("rlhf", "1", 1)])
def test_a_training_has_the_threads_that_it_can_use_and_may(monkeypatch, task, allowed, threads):
    said = []
    monkeypatch.setattr(torch, "set_num_threads", said.append); monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(train=lambda config, run: (None, None, {})))
    cli.train(task, None, None); cli.train(task, None, None, 1)
    assert said == [threads, 1]


def test_of_several_processes_the_first_makes_the_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2"); monkeypatch.setenv("RANK", "0")
    refused(["cartpole", "--seeds", "2", "--out", "many"], "--seeds must be trained by one command each where several processes train together", capsys, tmp_path)
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert cli.new_run("rlhf", cli.RLHFConfig(), Path("run")).config["processes"] == 2 and Path("run").exists() == (rank == "0")


def test_control_is_trained_by_one_process(tmp_path, monkeypatch, capsys):
    "A rank alone makes nobody a follower: what is there stays."
    assert cli.main(["cartpole", *QUICK, "--out", "run"]) == 0
    before = contents(tmp_path)
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["cartpole", *QUICK, "--out", "run"]) == 2 and contents(tmp_path) == before
    monkeypatch.setenv("WORLD_SIZE", "2"); capsys.readouterr()
    assert cli.main(["cartpole", *QUICK, "--out", "run", "--overwrite"]) == 2 and contents(tmp_path) == before
    assert capsys.readouterr().err == "rlhf-notes: CartPole-v1 must be trained by one process, got 2 that were launched together\n"


def test_a_training_that_diverges_says_so(tmp_path, capsys):
    wild = ["cartpole", *QUICK, "--learning-rate", "1e30"]
    assert cli.main([*wild, "--out", "one"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("rlhf-notes: iteration 1: policy_loss is nan")
    assert cli.main([*wild, "--seeds", "2", "--out", "many"]) == 1 and capsys.readouterr().err.startswith("rlhf-notes: seed 0: iteration 1: policy_loss is nan")
    p = command(*wild, "--seeds", "2", "--jobs", "2", "--out", "side")
    out, err = p.communicate(timeout=120)
    assert p.returncode == 1 and err.count("\n") == 3 and err.count("policy_loss is nan") == 2 and err.endswith("rlhf-notes: a seed has failed, as said above\n"), err


HOMEMADE = """
import random
import gymnasium as gym, numpy as np

class Homemade(gym.Env):
    observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (2,)), gym.spaces.Discrete(2)
    def __init__(self, which): self.which = which
    def reset(self, *, seed=None, options=None):
        if seed is not None: self.np_random = dict(old=np.random.RandomState, mt=lambda s: np.random.Generator(np.random.MT19937(s)), python=random.Random, nan=np.random.default_rng)[self.which](seed)
        self.t = 0
        return self.look(), {}
    def look(self): return np.array([self.np_random.random(), np.nan if self.which == "nan" and self.t > 9 else 0], np.float32)
    def step(self, action): self.t += 1; return self.look(), 1.0, self.t == 12, False, {}

for which in ("old", "mt", "python", "nan"): gym.register(f"rlhf_notes/homemade-{which}-v0", Homemade, kwargs={"which": which}, max_episode_steps=500)
"""


@pytest.mark.parametrize("which, kept", [("old", True), ("mt", True), ("python", False)])
def test_no_training_is_lost_by_the_random_generator_of_its_environment(tmp_path, capsys, monkeypatch, which, kept):
    (tmp_path / "homemade.py").write_text(HOMEMADE); monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["train", "--env", f"homemade:rlhf_notes/homemade-{which}-v0", *QUICK, "--out", "run"]) == 0
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 1024
    assert (Run.resume("run").checkpoint["ppo"]["collector"] is not None) == kept


def test_observations_that_cannot_be_normalized_are_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "homemade.py").write_text(HOMEMADE); monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["train", "--env", "homemade:rlhf_notes/homemade-nan-v0", *QUICK, "--normalize-obs", "--out", "run"]) == 1
    assert capsys.readouterr().err == "rlhf-notes: iteration 1: observations must be finite to be normalized, got nan; the last checkpoint, if there is one, is from before\n"


FAILING = """
import os
import gymnasium as gym, numpy as np

class Failing(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}
    def step(self, action): FAIL

gym.register("rlhf_notes/failing-v0", Failing)
"""
NO_MEMORY, SAID = "rlhf-notes: not enough memory: Unable to allocate 3 GiB\n", "rlhf-notes: a seed has failed, as said above\n"


@pytest.mark.skipif(os.name != "posix", reason="a process is ended by a signal")
@pytest.mark.parametrize("fail, alone, side", [
    ("raise MemoryError('Unable to allocate\\n3 GiB')", NO_MEMORY, 2 * NO_MEMORY + SAID), ("raise ValueError('a fault')", "ValueError: a fault\n", "ValueError: a fault\n" + SAID),
    ("os.kill(os.getpid(), 9)", "", "rlhf-notes: a process that trained seeds was ended by signal 9\n")])
def test_a_failure_is_said_alike_by_one_process_and_by_several(tmp_path, fail, alone, side):
    (tmp_path / "failing.py").write_text(FAILING.replace("FAIL", fail))
    for more, words in ((["--out", "one"], alone), (["--seeds", "2", "--out", "many"], alone), (["--seeds", "2", "--jobs", "2", "--out", "side"], side)):
        p = command("train", "--env", "failing:rlhf_notes/failing-v0", *QUICK, *more)
        _, err = p.communicate(timeout=120)
        err = "\n".join(line for line in err.split("\n") if "resource_tracker" not in line and "warnings.warn" not in line)         # multiprocessing's word on a process that was killed
        assert p.returncode == (1 if words else -9) and err.endswith(words) and (err == words or "a fault" in words), err
        assert err.count("Traceback") == ("a fault" in words) * (2 if words == side else 1), err


def test_how_to_continue_is_said_only_where_it_can_be_done(tmp_path, capsys, monkeypatch):
    iterate = cartpole.PPO.iterate
    def interrupted(self): signal.raise_signal(signal.SIGINT); return iterate(self)
    monkeypatch.setattr(cartpole.PPO, "iterate", interrupted)
    for how, words in (("sync", "continue with: rlhf-notes train --resume run"), ("async", "it cannot be continued: resume must be a run whose environments can be saved")):
        assert cli.main(["train", *QUICK, "--env", "Pendulum-v1", "--vectorization", how, "--out", "run", "--overwrite"]) == 130
        out, _ = capsys.readouterr()
        assert words in out and ("--resume" in out) == (how == "sync")


@pytest.mark.skipif(os.name != "posix", reason="a pipe is closed")
def test_nobody_need_listen(tmp_path):
    p = command("cartpole", *QUICK, "--seeds", "2", "--out", "many")
    p.stdout.close()
    err = p.stderr.read(); p.stderr.close()
    assert (p.wait(120), err) == (0, "") and (tmp_path / "many" / "seeds.csv").exists() and (tmp_path / "many" / "seed1" / "summary.json").exists()


def test_letters_that_the_terminal_does_not_know(monkeypatch, tmp_path):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert cli.main(["cartpole", *QUICK, "--out", "ü y"]) == 0 and raw.getvalue().endswith(b"curve: \\xfc y/curve.svg\n")


def test_small_numbers_may_be_negative():
    for number in ("-1e-1", "-1E-1", "-.1", "-0.1", "-1.e-1"): assert cli.parse(["train", "--log-std", number]).log_std == -0.1
    with pytest.raises(cli.UsageError, match="expected one argument"): cli.parse(["train", "--log-std", "--squash"])


def test_a_rank_alone_is_no_company(monkeypatch):
    monkeypatch.setenv("RANK", "1"); monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not cli.in_company()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.in_company()


def test_interrupted_before_it_began(capsys, monkeypatch):
    def interrupted(*args): raise KeyboardInterrupt
    monkeypatch.setattr(cli, "new_run", interrupted)
    assert cli.main(["cartpole"]) == 130 and capsys.readouterr().err == "rlhf-notes: interrupted\n"


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_fault_of_the_program_is_not_hidden(monkeypatch, error):
    def faulty(*args): raise error("a fault")
    monkeypatch.setattr(cartpole, "train", faulty)
    with pytest.raises(error, match="a fault"): cli.main(["cartpole"])


def test_writing_is_not_training(tmp_path, monkeypatch):
    "Loading TensorBoard at the first row takes a second; neither it nor any other writing counts as training."
    now, log = [0.0], cli.Run.log
    def slow_log(*args): now[0] += 1000.0; log(*args)
    monkeypatch.setattr(cartpole, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(cli.Run, "log", slow_log)
    assert cli.main(["cartpole", *QUICK, "--out", "slow"]) == 0 and now[0] == 8000
    assert json.loads((tmp_path / "slow" / "summary.json").read_text())["wall_seconds"] == 0


# many seeds

def test_seeds_in_processes_are_the_single_runs_and_a_table(tmp_path):
    p = command("pendulum", "--steps", "1024", "--num-envs", "4", "--epochs", "1", "--seeds", "3", "--jobs", "2", "--out", "many")
    out, err = p.communicate(timeout=120)
    assert (p.returncode, err) == (0, "")
    assert sorted(re.findall(r"^seed (\d): return", out, re.M)) == ["0", "1", "2"] and "solved: 0 of 3" in out and "many/seeds.csv" in out
    for seed in range(3):
        assert cli.main(["pendulum", "--steps", "1024", "--num-envs", "4", "--epochs", "1", "--seed", str(seed), "--out", f"alone{seed}"]) == 0
        many, alone = tmp_path / "many" / f"seed{seed}", tmp_path / f"alone{seed}"
        for name in ("metrics.csv", "config.json"): assert (many / name).read_bytes() == (alone / name).read_bytes()
        a, b = (json.loads((path / "summary.json").read_text()) for path in (many, alone))
        assert {k: v for k, v in a.items() if "seconds" not in k} == {k: v for k, v in b.items() if "seconds" not in k}
        assert {re.sub("tfevents.*", "", f.name) for f in many.iterdir()} == {re.sub("tfevents.*", "", f.name) for f in alone.iterdir()}
    with open(tmp_path / "many" / "seeds.csv") as f: rows = list(csv.DictReader(f))
    assert list(rows[0]) == ["seed", *cli.CONTROL_COLUMNS] and [r["seed"] for r in rows] == ["0", "1", "2", "low", "mean", "high"]
    for column in ("eval_return_mean", "eval_sampled_return_mean"):
        values = [json.loads((tmp_path / "many" / f"seed{seed}" / "summary.json").read_text())[column] for seed in range(3)]
        assert [float(r[column]) for r in rows[:3]] == pytest.approx(values, rel=1e-5) and float(rows[4][column]) == pytest.approx(sum(values) / 3, rel=1e-5)
        assert float(rows[3][column]) == pytest.approx(min(values), rel=1e-5) and float(rows[5][column]) == pytest.approx(max(values), rel=1e-5)          # of three seeds the interval is their range
    summary = json.loads((tmp_path / "many" / "summary.json").read_text())
    assert (summary["seeds"], summary["finished"], summary["interrupted"], summary["solved"]) == (3, [0, 1, 2], False, 0)


def test_the_table_of_seeds():
    summaries = [dict(seed=s, eval_return_mean=1 / 3 + s, eval_sampled_return_mean=-170.0, steps_to_solve=1234567 if s else None, seconds_to_solve=None, wall_seconds=2.0) for s in (0, 1)]
    assert cli.seeds_table(summaries, cli.CONTROL_COLUMNS) == [("seed", *cli.CONTROL_COLUMNS), ("0", "0.333333", "-170", "", "", "2"), ("1", "1.33333", "-170", "1234567", "", "2"),
                                          ("low", "0.333333", "-170", "", "", "2"), ("mean", "0.833333", "-170", "", "", "2"), ("high", "1.33333", "-170", "", "", "2")]


def test_seeds_are_replaced_only_when_asked(tmp_path, capsys):
    few = ["cartpole", *QUICK, "--out", "many"]
    assert cli.main([*few, "--seeds", "2"]) == 0 and "seed 0: return" in capsys.readouterr().out
    before = contents(tmp_path)
    assert cli.main([*few, "--seeds", "2"]) == 2 and contents(tmp_path) == before
    assert cli.main([*few, "--seeds", "1", "--overwrite"]) == 0
    assert [r.split(",")[0] for r in (tmp_path / "many" / "seeds.csv").read_text().splitlines()] == ["seed", "0", "low", "mean", "high"]
    assert json.loads((tmp_path / "many" / "config.json").read_text())["seeds"] == 1


@pytest.mark.skipif(os.name != "posix", reason="SIGINT is sent to processes")
@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_leaves_the_seeds_that_are_finished(tmp_path, jobs):
    args = ["--steps", "6400", "--num-envs", "4", "--epochs", "1", "--minibatches", "1"]
    p = command("cartpole", *args, "--seeds", "40", "--jobs", str(jobs), "--out", "many", start_new_session=True)
    summaries, deadline = tmp_path / "many" / "seed0" / "summary.json", time.time() + 120
    while p.poll() is None and time.time() < deadline and not summaries.exists(): time.sleep(0.01)
    os.killpg(p.pid, signal.SIGINT)                                              # as a terminal does: all processes get it
    out, err = p.communicate(timeout=120)
    assert (p.returncode, err) == (130, ""), (out, err)
    finished = [int(s) for s in re.findall(r"^seed (\d+): return", out, re.M)]
    assert 0 in finished and len(finished) < 40 and f"interrupted: {len(finished)} of 40 seeds are finished" in out and not (tmp_path / "many" / "seeds.csv").exists()
    summary = json.loads((tmp_path / "many" / "summary.json").read_text())
    assert summary["interrupted"] and summary["finished"] == sorted(finished)
    assert cli.main(["cartpole", *args, "--seed", "0", "--out", "alone"]) == 0
    assert (tmp_path / "many" / "seed0" / "metrics.csv").read_bytes() == (tmp_path / "alone" / "metrics.csv").read_bytes()


def running(session):
    "The processes of a session that have not ended."
    states = [line.rsplit(")", 1)[1].split() for path in cli.Path("/proc").glob("[0-9]*/stat") if (line := silent(path))]
    return sum(state[3] == str(session) and state[0] != "Z" for state in states)


def silent(path):
    try: return path.read_text()
    except OSError: return ""


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="/proc says which processes there are")
@pytest.mark.parametrize("sign, when", [(signal.SIGTERM, "training"), (signal.SIGKILL, "training"), (signal.SIGTERM, "booting")])
def test_seeds_end_with_the_process_that_began_them(tmp_path, sign, when):
    p = command("cartpole", "--steps", "4000000", "--seeds", "2", "--jobs", "2", "--out", "many", start_new_session=True)
    def begun(): return len(list(tmp_path.glob("many/*/metrics.csv"))) == 2 if when == "training" else running(p.pid) >= 3
    deadline = time.time() + 120
    while p.poll() is None and time.time() < deadline and not begun(): time.sleep(0.02)
    p.send_signal(sign)
    out, err = p.communicate(timeout=60)
    if sign == signal.SIGTERM: assert (p.returncode, err) == (130, "") and "interrupted: 0 of 2 seeds are finished" in out
    deadline = time.time() + 60
    while running(p.pid) and time.time() < deadline: time.sleep(0.1)
    assert not running(p.pid)
    if when == "training": assert all(json.loads((tmp_path / "many" / f"seed{k}" / "summary.json").read_text())["interrupted"] for k in (0, 1))


def test_actions_without_bounds_in_a_matrix_are_learned(furnished):
    "A fresh policy earns -2: 1 for the distance, 1 for the noise."
    options = ["--learning-rate", "1e-2", "--reward-scale", "1", "--num-envs", "8", "--num-steps", "64", "--steps", "8192", "--gamma", "0"]
    assert cli.main(["train", "--env", "rlhf_notes/Unbounded-v0", "--out", "matrix", *options]) == 0
    summary = json.loads((furnished / "matrix" / "summary.json").read_text())
    assert summary["eval_return_mean"] > -0.1 and summary["eval_sampled_return_mean"] > -0.5


def test_nothing_is_solved_where_nobody_says_what_solved_is(tmp_path, capsys):
    few = ["--env", "MountainCarContinuous-v0", "--seeds", "1", "--steps", "64", "--num-envs", "2", "--num-steps", "32", "--epochs", "1"]
    for threshold in (90.0, None):
        gym.spec("MountainCarContinuous-v0").reward_threshold, before = threshold, gym.spec("MountainCarContinuous-v0").reward_threshold
        try: assert cli.main(["train", *few, "--out", f"many{threshold}"]) == 0
        finally: gym.spec("MountainCarContinuous-v0").reward_threshold = before
        assert ("solved: 0 of 1" in capsys.readouterr().out) == ("solved" in json.loads((tmp_path / f"many{threshold}" / "summary.json").read_text())) == (threshold is not None)


def test_a_seed_that_fails_is_not_hidden(tmp_path, monkeypatch):
    def faulty(config, run): raise ValueError("a fault")
    monkeypatch.setattr(cartpole, "train", faulty)
    with pytest.raises(ValueError, match="a fault"): cli.main(["cartpole", *QUICK, "--seeds", "2"])
    with pytest.raises(cli.SeedFailed, match="a seed has failed, as said above"): cli.train_seeds("none", [(None, None)] * 2, 2)


# against others

def test_compare_writes_a_row_for_each_race(tmp_path, capsys, monkeypatch):
    class Still:
        batch = 512
        def iterate(self): time.sleep(0.001)
        def policy(self, rng=None): return lambda obs: np.zeros(len(obs), int)
    monkeypatch.setattr(compare, "contenders", lambda task: [compare.Contender(name, name, lambda seed: Still(), 1024, False) for name in ("ours", "other")])
    assert cli.main(["compare", "--seeds", "2"]) == 0
    out, err = capsys.readouterr()
    with open(tmp_path / "runs" / "compare-cartpole" / "compare.csv") as f: rows = list(csv.DictReader(f))
    assert list(rows[0]) == list(compare.COLUMNS) and [(r["seed"], r["contender"]) for r in rows] == [("0", "ours"), ("0", "other"), ("1", "other"), ("1", "ours")]
    assert all(r["sampled_steps"] == r["greedy_seconds"] == "" and r["steps"] == "1024" for r in rows)
    assert "not crossed within 1,024 steps" in out and "0 of 2" in out and out.count("is not installed") == 1 and "rlhf_notes[crosscheck]" in out and err == ""
    assert cli.main(["compare", "--seeds", "2"]) == 2 and cli.main(["compare", "--seeds", "1", "--overwrite", "--task", "cartpole"]) == 0
    capsys.readouterr()
    assert cli.main(["compare", "--seed", "3", "--seeds", "2", "--out", "later"]) == 0 and "cartpole, seeds 3 to 4," in capsys.readouterr().out
    with open(tmp_path / "later" / "compare.csv") as f: assert [(r["seed"], r["contender"]) for r in csv.DictReader(f)] == [("3", "other"), ("3", "ours"), ("4", "ours"), ("4", "other")]
    assert {k: json.loads((tmp_path / "later" / "config.json").read_text())[k] for k in ("seed", "seeds")} == {"seed": 3, "seeds": 2}


# the demo

SUMMARY = dict(task="cartpole", algo="ppo", seed=0, device="cpu", steps=39936, wall_seconds=5.0, interrupted=False, env="CartPole-v1", eval_return_mean=499.9, eval_return_std=1.0, eval_episodes=100,
               eval_sampled_return_mean=480.0, eval_sampled_return_std=2.0, solved=True, steps_to_solve=None, seconds_to_solve=None)
LANGUAGE = dict(task="rlhf", algo="ppo", seed=0, device="cpu", steps=7680, wall_seconds=40.0, interrupted=False, true_score_sft=-1.25, true_score=2.5, win_rate_vs_sft=0.985, proxy_score=2.25, kl=5.5, valid=1.0, tokens_per_second=7000.0)
SAMPLES = """iteration,query,answer,score,true_score
0,about the hotel .,the room was bad .,-1,-2.5
0,about the film .,the plot was weak .,-1,-1
60,about the hotel .,the room was superb .,2,3
60,about the film .,the plot was good .,2,2
"""


def written(change):
    "A training of rlhf that takes no time."
    def train(config, run, world=None):
        (run.path / "samples.csv").write_text(SAMPLES)
        return None, [], LANGUAGE | change
    return train


def test_the_outcome_by_hand():
    assert cli.outcome(SUMMARY) == "return over 100 fresh episodes: 499.9 (std 1.0) greedy, 480.0 (std 2.0) sampled: solved"
    assert cli.outcome(LANGUAGE) == "what the human thinks of its answers: -1.25 before, 2.50 after; the later one is better in 98.5%; 100.0% have an end; KL 5.5 nats"


def test_whoever_trains_a_known_environment_with_other_options_is_told():
    known = dict(task="train", env="Pendulum-v1", seed=0, eval_episodes=100, eval_return_mean=-1050.0, eval_return_std=9.0, eval_sampled_return_mean=-1060.0, eval_sampled_return_std=9.0, solved=False)
    assert cli.outcome(known).endswith("NOT solved; `rlhf-notes pendulum` has options for this environment")
    for other in (dict(task="pendulum"), dict(solved=True), dict(env="Acrobot-v1"), dict(solved=None)): assert "has options" not in cli.outcome(known | other)


@pytest.mark.parametrize("change, code", [({}, 0), ({"solved": False, "eval_return_mean": 300.0}, 1), ({"interrupted": True, "steps": 512}, 130), ({"win_rate_vs_sft": 0.85}, 1)])
def test_demo_says_what_came_of_it(capsys, monkeypatch, tmp_path, change, code):
    seen = []
    monkeypatch.setattr(cartpole, "train", lambda config, run: (seen.append((config, run.path)), (None, [], SUMMARY | change))[1])
    monkeypatch.setattr(rlhf, "train", written(change))
    assert cli.main(["demo", "--seed", "3"]) == code and cli.main(["demo", "--seed", "3"]) == code        # its own earlier demo is replaced
    out, err = capsys.readouterr()
    assert seen[0] == (PPOConfig(seed=3), cli.Path("runs/demo/cartpole")) and err == ""
    if code != 130:
        assert seen[1] == (PendulumConfig(seed=3), cli.Path("runs/demo/pendulum")) and len(seen) == 4
        for words in ("return", "sampled", "NO" if "solved" in change else "yes", "480.0", "s in all", "runs/demo/cartpole/curve.svg", "runs/demo/pendulum/curve.svg", "runs/demo/rlhf/curve.svg", "tensorboard --logdir runs/demo", "19_ppo.ipynb", "27_rlhf.ipynb",
                      "-1.25 before, 2.50 after", "85.0%" if "win_rate_vs_sft" in change else "98.5%", "about the hotel .\n  before  -2.50 the room was bad .\n  after    3.00 the room was superb .\nabout the film .\n"): assert words in out, words
    else: assert "interrupted" in out and len(seen) == 2                        # one at each of the two calls: the second task is not begun


@pytest.mark.parametrize("task", cli.DEMO)
def test_the_demo_replaces_no_run_but_a_demos(tmp_path, capsys, monkeypatch, task):
    monkeypatch.setattr(cartpole, "train", lambda config, run: (None, [], SUMMARY)); monkeypatch.setattr(rlhf, "train", written({}))
    assert cli.main(["demo", "--out", "here"]) == 0
    config = tmp_path / "here" / task / "config.json"
    assert (demos := json.loads(config.read_text())).pop("demo") is True
    config.write_text(json.dumps(demos)); (config.parent / "checkpoint.pt").write_text("of many hours")
    before = contents(tmp_path); capsys.readouterr()
    assert cli.main(["demo", "--out", "here"]) == 2 and contents(tmp_path) == before
    out, err = capsys.readouterr()
    assert out == "" and err == f"rlhf-notes: --out must be a directory whose runs an earlier demo has written, got here, where the run in {task} is none of a demo's\n"


def test_the_demo_solves_what_it_trains(capsys, tmp_path, monkeypatch):
    "The main job, as the README has it; the language model, which takes longer, is trained in a test of its own."
    monkeypatch.setattr(rlhf, "train", written({}))
    assert cli.main(["demo"]) == 0
    for task, enough in (("cartpole", 475), ("pendulum", -200)):
        summary = json.loads((tmp_path / "runs" / "demo" / task / "summary.json").read_text())
        assert summary["solved"] and min(summary["eval_return_mean"], summary["eval_sampled_return_mean"]) >= enough and summary["eval_episodes"] == 100


# language

TINY = ["--sft-steps", "3", "--sft-batch", "8", "--labels", "16", "--norm-samples", "16", "--iterations", "2", "--batch", "16", "--eval-answers", "8", "--device", "cpu"]


def test_rlhf_leaves_what_was_promised(tmp_path, capsys):
    assert cli.main(["rlhf", *TINY, "--algo", "rloo", "--seed", "2"]) == 0
    out, _ = capsys.readouterr()
    run = tmp_path / "runs" / "rlhf-seed2"
    assert {"config.json", "metrics.csv", "summary.json", "curve.svg", "checkpoint.pt", "sft.csv", "reward_model.csv", "samples.csv", "policy"} < {p.name for p in run.iterdir()}
    config, summary = (json.loads((run / n).read_text()) for n in ("config.json", "summary.json"))
    assert (config["task"], config["algo"], config["labels"]) == ("rlhf", "rloo", 16)
    assert {"task", "algo", "seed", "device", "steps", "wall_seconds", "true_score_sft", "true_score", "win_rate_vs_sft", "proxy_score", "kl", "tokens_per_second"} < set(summary) and set(summary["seconds"]) == {"sft", "reward_model", "rl"}
    assert f"{summary['true_score']:.2f} after" in out and "before" in out and "policy: runs/rlhf-seed2/policy" in out
    before = contents(tmp_path)
    assert cli.main(["rlhf", *TINY, "--algo", "rloo", "--seed", "2"]) == 2 and cli.main(["rlhf", "--resume", "runs/rlhf-seed2"]) == 2 and contents(tmp_path) == before       # a run that is there, a run that is finished
    assert cli.main(["rlhf", *TINY, "--model", str(run / "policy"), "--sft-steps", "0", "--out", "again"]) == 0          # what was saved can be trained further


def test_several_seeds_of_rlhf(tmp_path, capsys):
    assert cli.main(["rlhf", *TINY, "--seeds", "2", "--out", "many"]) == 0
    out, _ = capsys.readouterr()
    assert out.count("what the human thinks") == 2 and "solved" not in out
    assert (tmp_path / "many" / "seeds.csv").read_text().splitlines()[0] == "seed,true_score_sft,true_score,win_rate_vs_sft,proxy_score,kl,valid,wall_seconds"


def test_a_loss_that_is_not_a_number_is_said(monkeypatch, capsys):
    def broken(config, run, world=None): raise FloatingPointError("stage rl, iteration 7: value_loss is nan; the last checkpoint, if there is one, is from before")
    monkeypatch.setattr(rlhf, "train", broken)
    assert cli.main(["rlhf", *TINY]) == 1 and capsys.readouterr().err == "rlhf-notes: stage rl, iteration 7: value_loss is nan; the last checkpoint, if there is one, is from before\n"


@pytest.mark.parametrize("error, words", [
    (MemoryError("Unable to allocate 3.05 GiB for an array with shape (4, 100000000)"), "Unable to allocate 3.05 GiB for an array with shape (4, 100000000)\n"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate 72.00 GiB."), "CUDA out of memory. Tried to allocate 72.00 GiB.\n"), (None, "")])
def test_what_does_not_fit_into_memory_is_said(tmp_path, monkeypatch, capsys, error, words):
    monkeypatch.chdir(tmp_path)
    def broken(config, run, world=None):
        if error: raise error
        torch.empty(2**58, dtype=torch.uint8)                                             # PyTorch's own words
    monkeypatch.setattr(rlhf, "train", broken)
    assert cli.main(["rlhf", *TINY]) == 1
    err = capsys.readouterr().err
    assert err.startswith("rlhf-notes: not enough memory: ") and err.count("\n") == 1 and err.endswith(words or "\n")


def test_a_run_whose_environments_cannot_be_saved_is_not_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["--env", "Pendulum-v1", "--vectorization", "async", "--steps", "128", "--num-envs", "2", "--num-steps", "64", "--epochs", "1"]
    assert cli.main(["train", *small, "--out", "run"]) == 0
    (tmp_path / "run" / "summary.json").unlink()                            # as if it had been killed at the end
    capsys.readouterr()
    assert cli.main(["train", "--resume", "run"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--resume must be a run whose environments can be saved, got run: those of Pendulum-v1 (async) cannot" in err


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("language") / "lm"
    rlhf.save_model(path, make_gpt2("tiny", len(WORDS), n_layer=1, n_embd=16, n_head=2), make_tokenizer())
    return path


@pytest.fixture
def interrupted(tmp_path, monkeypatch, language_model):
    "run: stopped by Ctrl-C after some steps; it began from the model in lm."
    shutil.copytree(language_model, tmp_path / "lm")
    left = [6]
    def is_set(): left[0] -= 1; return left[0] < 0
    with monkeypatch.context() as m:
        m.setattr(rlhf, "stop_on_interrupt", lambda: nullcontext(SimpleNamespace(is_set=is_set)))
        assert cli.main(["rlhf", *TINY, "--model", "lm", "--out", "run"]) == 130
    return tmp_path / "run"


def refused(argv, words, capsys, path):
    before = contents(path)
    capsys.readouterr()
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err and contents(path) == before, err


@pytest.mark.parametrize("model, more", [("run/policy", []), ("run", []), ("link/policy", []), ("run/seed0/policy", ["--seeds", "2"]), ("run/policy", ["--seeds", "2"])])
def test_the_model_to_start_from_is_not_overwritten(tmp_path, capsys, language_model, model, more):
    shutil.copytree(language_model, tmp_path / "run" / "policy"); shutil.copytree(language_model, tmp_path / "run" / "seed0" / "policy")
    (tmp_path / "run" / "config.json").write_text('{"task": "rlhf"}'); (tmp_path / "link").symlink_to(tmp_path / "run")
    refused(["rlhf", *TINY, "--model", model, "--out", "run", "--overwrite", *more], f"--model must lie outside of the run directory run, whose files are replaced, got {model}", capsys, tmp_path)


def test_a_model_is_loaded_once(tmp_path, monkeypatch, language_model):
    made, original = [], rlhf.load_model
    monkeypatch.setattr(rlhf, "load_model", lambda *args: made.append(args[0]) or original(*args))
    assert cli.main(["rlhf", *TINY, "--model", str(language_model), "--out", "run"]) == 0 and made == [str(language_model)]


def test_a_tokenizer_that_loses_words_costs_no_run(tmp_path, capsys, language_model):
    shutil.copytree(language_model, tmp_path / "lm"); (tmp_path / "run").mkdir(); (tmp_path / "run" / "config.json").write_text('{"task": "rlhf"}'); (tmp_path / "run" / "metrics.csv").write_text("of the last time")
    known = json.loads((tmp_path / "lm" / "tokenizer.json").read_text())
    known["model"]["vocab"] = {"hyperb" if w == "superb" else w: i for w, i in known["model"]["vocab"].items()}
    (tmp_path / "lm" / "tokenizer.json").write_text(json.dumps(known))
    refused(["rlhf", *TINY, "--model", "lm", "--out", "run", "--overwrite"], "--model must have a tokenizer that fits the task, got 'lm'", capsys, tmp_path)


def test_a_tokenizer_from_which_words_come_back_otherwise_costs_no_run(tmp_path, capsys, language_model):
    shutil.copytree(language_model, tmp_path / "lm")
    known = json.loads((tmp_path / "lm" / "tokenizer.json").read_text()) | dict(decoder=dict(type="WordPiece", prefix="##", cleanup=True))
    (tmp_path / "lm" / "tokenizer.json").write_text(json.dumps(known))
    refused(["rlhf", *TINY, "--model", "lm", "--out", "run"], "tokenizer must give words back as they were, got 'about the hotel.' for 'about the hotel .'", capsys, tmp_path)


def test_a_qwen2_with_words_for_tokens(tmp_path, capsys):
    "And what has come of it can be trained further."
    config = Qwen2Config(vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, bos_token_id=0, eos_token_id=0)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "lm"); make_tokenizer().save_pretrained(tmp_path / "lm")
    for model, out in (("lm", "one"), ("one/policy", "two")): assert cli.main(["rlhf", *TINY, "--model", model, "--out", out]) == 0
    with open(tmp_path / "two" / "samples.csv", newline="") as f: assert {r["query"] for r in csv.DictReader(f)} <= set(QUERIES)


def test_rewards_that_are_all_equal_are_said(tmp_path, capsys):
    dull = make_gpt2("tiny", len(WORDS), n_layer=1, n_embd=16, n_head=2)
    torch.nn.init.zeros_(dull.transformer.ln_f.weight)
    rlhf.save_model(tmp_path / "lm", dull, make_tokenizer())
    assert cli.main(["rlhf", *TINY, "--model", "lm", "--sft-steps", "0", "--norm-samples", "2"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("rlhf-notes: reward model, step 0, answers to norm_samples queries: rewards must not all be equal, got 2 of them") and err.count("\n") == 1


def test_a_run_that_cannot_go_on_here_is_refused(interrupted, tmp_path, capsys, monkeypatch):
    resume = ["rlhf", "--resume", "run"]
    config = json.loads((interrupted / "config.json").read_text())
    assert config["processes"] == 1
    with monkeypatch.context() as m:
        m.setattr(torch.cuda, "is_available", lambda: False)
        (interrupted / "config.json").write_text(json.dumps(config | {"device": "cuda"}))
        refused(resume, "device 'cuda' is not there", capsys, tmp_path)
    (interrupted / "config.json").write_text(json.dumps(config | {"processes": 2}))
    refused(resume, "--resume must be a run of as many processes as there are now, 1, got run, begun with 2", capsys, tmp_path)
    with monkeypatch.context() as m:
        m.setenv("WORLD_SIZE", "3"); m.setenv("RANK", "0")
        refused(resume, "as there are now, 3, got run, begun with 2", capsys, tmp_path)
        (interrupted / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "processes"}))          # of an older version, which did not say
        refused(resume, "--batch must be a multiple of 3 processes times 1 answers to a query, got 16", capsys, tmp_path)
    (tmp_path / "lm").rename(tmp_path / "gone")
    refused(resume, "--model must be a directory or a name on the hub", capsys, tmp_path)
    (tmp_path / "gone").rename(tmp_path / "lm")
    assert cli.main(resume) == 0 and not json.loads((interrupted / "summary.json").read_text())["interrupted"]


def test_a_run_goes_on_from_elsewhere_with_the_model_it_began_with(interrupted, tmp_path, monkeypatch, capsys):
    assert json.loads((interrupted / "config.json").read_text())["model"] == str(tmp_path / "lm")
    (tmp_path / "elsewhere" / "lm").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["rlhf", "--resume", "../run"]) == 0
    assert cli.new_run("rlhf", cli.RLHFConfig(model="some/name"), tmp_path / "hub").config["model"] == "some/name"


@pytest.mark.parametrize("spoil, words", [
    (lambda c, saved: c.update(algo="grpo"), "ValueError: it was written with algo = 'ppo', and there stands 'grpo'"),
    (lambda c, saved: (c.update(algo="grpo"), saved.pop("config")), "RuntimeError: "),                   # of an older version, which did not say
    (lambda c, saved: c.update(model=c["model"] + "-wide"), "RuntimeError: Error(s) in loading state_dict"),
    (lambda c, saved: saved.update(state={}), "KeyError: 'lm'"), (lambda c, saved: saved.update(state=[]), "TypeError: its state is a list"), (lambda c, saved: saved.update(state=None), "TypeError: its state is a NoneType")])
def test_a_checkpoint_that_does_not_fit_is_refused(interrupted, tmp_path, capsys, spoil, words):
    rlhf.save_model(tmp_path / "lm-wide", make_gpt2("tiny", len(WORDS), n_layer=1, n_embd=32, n_head=2), make_tokenizer())
    config, saved = json.loads((interrupted / "config.json").read_text()), torch.load(interrupted / "checkpoint.pt", weights_only=True)
    assert saved["config"] == config and saved["state"]["name"] == "rl"
    spoil(config, saved)
    (interrupted / "config.json").write_text(json.dumps(config)); torch.save(saved, interrupted / "checkpoint.pt")
    refused(["rlhf", "--resume", "run"], f"--resume must be a run directory whose checkpoint fits its config.json, got run: {words}", capsys, tmp_path)


@pytest.mark.parametrize("spoil, words", [
    (lambda c, saved: c.update(hidden=16), "ValueError: it was written with hidden = 64, and there stands 16"), (lambda c, saved: (c.update(hidden=16), saved.pop("config")), "RuntimeError: "),
    (lambda c, saved: saved.update(state=[]), "TypeError: its state is a list"), (lambda c, saved: saved["state"].update(ppo={}), "KeyError: "), (lambda c, saved: saved["state"].update(ppo=5), "TypeError: ")])
def test_a_checkpoint_of_control_that_does_not_fit_is_refused(tmp_path, capsys, spoil, words):
    assert cli.main(["cartpole", *QUICK, "--out", "run"]) == 0
    (tmp_path / "run" / "summary.json").unlink()
    config, saved = json.loads((tmp_path / "run" / "config.json").read_text()), torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    spoil(config, saved)
    (tmp_path / "run" / "config.json").write_text(json.dumps(config)); torch.save(saved, tmp_path / "run" / "checkpoint.pt")
    refused(["cartpole", "--resume", "run"], f"--resume must be a run directory whose checkpoint fits its config.json, got run: {words}", capsys, tmp_path)


def test_alone_whatever_rank_the_environment_says(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert not cli.in_company() and cli.main(["cartpole", *QUICK, "--out", "run"]) == 0
    assert (tmp_path / "run" / "summary.json").exists() and "curve: run/curve.svg" in capsys.readouterr().out
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.in_company()
    for task in ("cartpole", "rlhf"):
        monkeypatch.setenv("WORLD_SIZE", "abc")
        refused([task, "--out", "new"], "WORLD_SIZE, from the environment, must be an integer, got 'abc'", capsys, tmp_path)
        monkeypatch.setenv("WORLD_SIZE", "0")
        refused([task, "--out", "new"], "WORLD_SIZE, from the environment, must be at least 1, got '0'", capsys, tmp_path)


def test_a_size_without_a_rank_is_no_training_together(tmp_path, monkeypatch, capsys):
    for name in list(os.environ):
        if name.endswith(("_SIZE", "RANK")): monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for task in ("cartpole", "rlhf"): refused([task, "--out", "new"], "WORLD_SIZE, from the environment, must come with a rank, as accelerate launch, torchrun and mpirun set it, got '2' alone", capsys, tmp_path)


def test_torchrun_starts_one_training_where_there_is_no_gpu(tmp_path):
    "Its processes share a batch, so that its answers are others than those of one process, and the first writes."
    options = TINY[:TINY.index("--device")]
    assert cli.main(["rlhf", *options, "--device", "cpu", "--out", "one"]) == 0
    (tmp_path / "start.py").write_text(f"import sys, torch, rlhf_notes.cli as c; torch.cuda.is_available = lambda: False; sys.exit(c.main(['rlhf', *{options!r}, '--out', 'two']))")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(cli.Path(cli.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "start.py"], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0 and done.stdout.count("curve: two/curve.svg") == 1, done.stderr[-3000:]
    processes, scores = zip(*((json.loads((tmp_path / run / "config.json").read_text())["processes"], [r["score"] for r in csv.DictReader((tmp_path / run / "metrics.csv").open())]) for run in ("one", "two")))
    assert processes == (1, 2) and len(scores[0]) == len(scores[1]) == 2 and scores[0][0] != scores[1][0]


def test_weights_that_are_no_numbers_are_said(tmp_path, capsys):
    for options, words in ((["--sft-steps", "1", "--sft-learning-rate", "1e38"], "pretraining, step 1"), (["--labels", "8", "--rm-learning-rate", "1e38"], "reward model, step 1"),
                           (["--epochs", "1", "--minibatches", "1", "--iterations", "1", "--learning-rate", "1e38"], "stage rl, iteration 1")):
        assert cli.main(["rlhf", *TINY, *options, "--out", words]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"rlhf-notes: {words}: the squares of the weights add up to ") and err.count("\n") == 1 and not (tmp_path / words / "policy").exists()
