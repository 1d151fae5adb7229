import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from rlhf_notes import __version__, cli
from rlhf_notes.control import cartpole
from rlhf_notes.control.config import PPOConfig

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
    (["cartpole", "--seed", "abc"], "--seed: invalid int value: 'abc'"), (["cartpole", "--seed", "-1"], "--seed must be in [0, inf), got -1"), (["cartpole", "--seed", "1.5"], "--seed: invalid int value: '1.5'"),
    (["cartpole", "--seed"], "--seed: expected one argument"), (["cartpole", "--steps", "-5"], "--steps must be in [1, inf), got -5"), (["cartpole", "--steps=-5"], "--steps must be in"),
    (["cartpole", "--steps", "100"], "--steps must be at least num_envs * num_steps = 512, got 100"), (["cartpole", "--minibatches", "7"], "--minibatches must divide num_envs * num_steps = 512, got 7"),
    (["cartpole", "--gamma", "1.5"], "--gamma must be in [0, 1], got 1.5"), (["cartpole", "--learning-rate", "nan"], "--learning-rate must be in"), (["cartpole", "--clip", "a\nb"], "--clip: invalid float value"),
    (["cartpole", "--device", "gpu"], "--device must be auto, cpu or cuda, got 'gpu'"), (["cartpole", "--device", "cuda"], "device 'cuda' is not there"),
    (["cartpole", "--sed", "3"], "unrecognized argument '--sed'; did you mean --seed?"), (["cartpole", "--zzz"], "unrecognized argument '--zzz'; expected --help, --seed, --device"), (["cartpole", "word"], "unrecognized argument 'word'"),
    (["cartpole", "--learning", "0.1"], "unrecognized argument '--learning'; did you mean --learning-rate?"),
    (["cartpole", "--out", "file"], "--out must be a directory, got the file file"), (["cartpole", "--out", "file/below"], "cannot use file/below"), (["cartpole", "--out", "full"], "which holds letter.txt"),
    (["cartpole", "--out", "full", "--overwrite"], "which holds letter.txt"), (["cartpole", "--out", "run"], "which holds a run: continue it with --resume run, or replace it with --overwrite"),
    (["cartpole", "--out", "run", "--overwrite", "--seed", "-1"], "--seed must be in"), (["cartpole", "--out", "run", "--overwrite", "--device", "cuda"], "is not there"),
    (["cartpole", "--resume", "nowhere"], "got nowhere, which has no config.json"), (["cartpole", "--resume", "full"], "got full, which has no config.json"), (["cartpole", "--resume", "run"], "got run, which has no checkpoint.pt"),
    (["cartpole", "--resume", "done"], "got done, which is finished"), (["cartpole", "--resume", "other"], "got other, a run of pendulum"), (["cartpole", "--resume", "half"], "got half, which lacks gamma, lam"),
    (["cartpole", "--resume", "done", "--seed", "3"], "--resume must stand alone"), (["cartpole", "--resume", "done", "--out", "x"], "got --out as well"), (["cartpole", "--resume", "done", "--overwrite"], "got --overwrite as well"),
    (["demo", "--steps", "3"], "unrecognized argument '--steps'"), (["demo", "--device", "cuda"], "is not there"), (["demo", "--out", "file"], "cannot use file/cartpole"), (["demo", "--seed", "x"], "--seed: invalid int value"),
]


@pytest.fixture
def furnished(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir(); (tmp_path / "full" / "letter.txt").write_text("x")
    config = {"task": "cartpole", **{f: getattr(PPOConfig(), f) for f in PPOConfig.__dataclass_fields__}}
    without = {k: v for k, v in config.items() if k not in ("gamma", "lam")}
    for name, c, checkpoint, summary in (("run", config, False, None), ("done", config, True, {"interrupted": False}), ("other", config | {"task": "pendulum"}, True, None), ("half", without, True, None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(c))
        if checkpoint: torch.save({"rows": 0, "state": {}}, tmp_path / name / "checkpoint.pt")
        if summary: (tmp_path / name / "summary.json").write_text(json.dumps(summary))
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
            "print([m for m in ('torch', 'numpy', 'gymnasium', 'matplotlib', 'tensorboard') if m in sys.modules])")
    for argv, words in ((["--help"], ["cartpole", "demo", "--version"]), (["cartpole", "--help"], ["--seed N", "--device", "--steps N", "--out DIR", "--resume DIR", "--overwrite", "(default: 40000)"]),
                        (["demo", "--help"], ["--seed", "--device", "--out"]), (["--version"], [f"rlhf-notes {__version__}"])):
        env = {**os.environ, "PYTHONPATH": str(cli.Path(cli.__file__).parent.parent)}
        done = subprocess.run([sys.executable, "-c", code.format(argv=argv)], capture_output=True, text=True, env=env)
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]" and done.stderr == ""
        for w in words: assert w in " ".join(done.stdout.split()), w


def test_every_option_of_the_config_is_offered():
    args = cli.parse(["cartpole", *(x for name, f in PPOConfig.__dataclass_fields__.items() for x in ("--" + name.replace("_", "-"), str(f.default)))])
    assert PPOConfig(**cli.given(args, PPOConfig)) == PPOConfig()
    assert cli.given(cli.parse(["cartpole"]), PPOConfig) == {} and cli.given(cli.parse(["cartpole", "--gamma", "0.5"]), PPOConfig) == {"gamma": 0.5}


# a run

def test_a_run_leaves_what_was_promised(tmp_path, capsys):
    assert cli.main(["cartpole", *QUICK, "--seed", "4"]) == 0
    out, err = capsys.readouterr()
    run = tmp_path / "runs" / "cartpole-seed4"
    names = {p.name for p in run.iterdir()}
    assert {"config.json", "metrics.csv", "summary.json", "curve.svg", "checkpoint.pt"} < names and any(n.startswith("events.out.tfevents") for n in names) and len(names) == 6
    config, summary = (json.loads((run / n).read_text()) for n in ("config.json", "summary.json"))
    assert (config["task"], config["algo"], config["seed"], config["steps"], config["num_envs"], config["gamma"]) == ("cartpole", "ppo", 4, 1024, 4, 0.98)
    assert {"torch", "numpy", "gymnasium", "python", "rlhf_notes"} == set(config["versions"])
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


def test_interrupted_before_it_began(capsys, monkeypatch):
    def interrupted(*args): raise KeyboardInterrupt
    monkeypatch.setattr(cli, "new_run", interrupted)
    assert cli.main(["cartpole"]) == 130 and capsys.readouterr().err == "rlhf-notes: interrupted\n"


def test_a_fault_of_the_program_is_not_hidden(monkeypatch):
    def faulty(*args): raise ValueError("a fault")
    monkeypatch.setattr(cartpole, "train", faulty)
    with pytest.raises(ValueError, match="a fault"): cli.main(["cartpole"])


# the demo

SUMMARY = dict(task="cartpole", algo="ppo", seed=0, device="cpu", steps=39936, wall_seconds=5.0, interrupted=False, eval_return_mean=499.9, eval_return_std=1.0, eval_episodes=100,
               eval_sampled_return_mean=480.0, eval_sampled_return_std=2.0, solved=True, steps_to_solve=None, seconds_to_solve=None)


@pytest.mark.parametrize("change, code", [({}, 0), ({"solved": False, "eval_return_mean": 300.0}, 1), ({"interrupted": True, "steps": 512}, 130)])
def test_demo_says_what_came_of_it(capsys, monkeypatch, tmp_path, change, code):
    seen = []
    monkeypatch.setattr(cartpole, "train", lambda config, run: (seen.append((config, run.path)), (None, [], SUMMARY | change))[1])
    assert cli.main(["demo", "--seed", "3"]) == code and cli.main(["demo", "--seed", "3"]) == code        # its own earlier demo is replaced
    out, err = capsys.readouterr()
    assert seen[0] == (PPOConfig(seed=3), cli.Path("runs/demo/cartpole")) and err == ""
    if code != 130:
        for words in ("return", "sampled", "yes" if code == 0 else "NO", "480.0", "s in all", "runs/demo/cartpole/curve.svg", "tensorboard --logdir runs/demo", "21_cartpole.ipynb"): assert words in out
    else: assert "interrupted" in out


def test_the_demo_solves_cartpole(capsys, tmp_path):
    "The main job, as the README has it."
    assert cli.main(["demo"]) == 0
    summary = json.loads((tmp_path / "runs" / "demo" / "cartpole" / "summary.json").read_text())
    assert summary["solved"] and summary["eval_return_mean"] >= 475 and summary["eval_episodes"] == 100
