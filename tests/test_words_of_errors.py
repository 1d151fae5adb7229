"What goes wrong at a door is told in one sentence."
import json
import os

import processes
import pytest

from rlhf_notes import RLHF, cli
from rlhf_notes.hub.prompts import read_prompts

DEEP = "[" * 200_000 + "]" * 200_000


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(line, capsys):
    "The one line in which a command is refused."
    assert cli.main(line) == 2
    told = capsys.readouterr().err
    assert told.startswith("rlhf-notes: ") and told.count("\n") == 1 and len(told) < 400, told
    return told


@pytest.mark.parametrize("line, words", [
    ("rlhf --lr -1", "--learning-rate must be greater than 0, got -1.0"),
    ("rlhf --lr 1e300", "--learning-rate must fit float32, got 1e+300"),
    ("rlhf --kl-coef -1", "--kl-coef must be greater than or equal to 0, got -1.0"),
    ("rlhf --kl-coef 1e-300", "--kl-coef must fit float32, got 1e-300"),
    ("rlhf --kl-coef nan", "--kl-coef must be a finite number, got nan"),
    ("rlhf --clip-low 2", "--clip-low must be less than or equal to 1, got 2.0"),
    ("rlhf --clip-high 0", "--clip-high must be greater than 0, got 0.0"),
    ("rlhf --clip-high inf", "--clip-high must be a finite number, got inf"),
    ("rlhf --kl-coef x", "Invalid value for --kl-coef"),
])
def test_an_option_that_may_be_none_is_told_as_any_other(line, words, capsys):
    assert words in refused([*line.split(), "--out", "x"], capsys)


def test_every_number_that_may_be_none_is_told_in_one_sentence(capsys):
    from rlhf_notes.control.config import PPOConfig
    from rlhf_notes.reviews.config import ReviewsConfig
    for task, config in (("rlhf", ReviewsConfig), ("train", PPOConfig)):
        for name, field in config.__pydantic_fields__.items():
            if "None" not in str(field.annotation) or name == "env_kwargs": continue
            if "bool" in str(field.annotation): continue
            for bad in ("-5", "1e300"):
                told = refused([task, f"--{name.replace('_', '-')}", bad, "--out", "x"], capsys)
                assert f"--{name.replace('_', '-')} must" in told


def test_json_that_is_nested_too_deeply(tmp_path, capsys):
    (tmp_path / "d").mkdir()
    for name in ("config.json", "trainer_state.json", "p.jsonl", "p.json", "rlhf.json", "l.jsonl"):
        (tmp_path / "d" / name).write_text(DEEP)
    assert "which holds config.json" in refused(["cartpole", "--out", "d"], capsys)
    assert "the log must be one" in refused(["doctor", "d/trainer_state.json"], capsys)
    assert "resume must be a run" in refused(["cartpole", "--resume", "d"], capsys)
    assert "--env-kwargs: must be JSON" in refused(
        ["train", "--env-kwargs", DEEP[70_000:330_000], "--out", "q"], capsys)
    for name in ("p.jsonl", "p.json"):
        with pytest.raises(ValueError, match="^prompts must be JSON, got line 1 .*: nested too"):
            read_prompts(tmp_path / "d" / name)
    with pytest.raises(ValueError, match="^path must be .* got d: nested too deeply$"):
        RLHF.load("d")
    for kind, text in (("list", "[[1, 2]]"), ("int", "5"), ("str", '"task"'), ("NoneType", "null")):
        (tmp_path / "d" / "rlhf.json").write_text(text)
        with pytest.raises(ValueError, match=f"rlhf.json must hold options .*, got a {kind}$"):
            RLHF.load("d")


LOGS = {
    "list.json": json.dumps({"log_history": [[1, 2]]}), "num.json": '{"log_history": 5}',
    "none.json": '{"log_history": null}', "dict.json": '{"log_history": {"a": 1}}',
    "str.json": '{"log_history": ["a"]}', "other.json": "[1, 2]", "data.jsonl": '{"data": 5}\n',
    "rows.jsonl": '{"step": 1}\n5\n', "text.csv": "score\nx\n", "empty.csv": "",
    "bin.csv": "\x00\x01score\n1\n", "wide.csv": "iteration,score\n1," + "9" * 200_000 + "\n",
    "half.json": '{"log_history": [', "tail.jsonl": '{"step": 1}\n{"st',
}


@pytest.mark.parametrize("name", LOGS)
def test_what_is_no_log_is_told_in_one_sentence(name, tmp_path, capsys):
    (tmp_path / name).write_text(LOGS[name])
    told = refused(["doctor", name], capsys)
    assert "the log must" in told and "\x00" not in told and "\x01" not in told


@pytest.mark.parametrize("text, said", [
    ("iteration,score,kl_k1\nnan,1,0\n2,1,0\n", "a number is not finite: iteration is nan"),
    ("iteration,score,kl_k1\n1,1,0\ninf,1,0\n", "a number is not finite: iteration is inf"),
    ("iteration,score\n" + "1" * 400 + ",1\n", "a number is not finite: iteration is inf"),
    ("iteration,score\n2,inf\n", "a number is not finite: score is inf at step 2"),
])
def test_steps_that_are_no_numbers(text, said, tmp_path, capsys):
    (tmp_path / "log.csv").write_text(text)
    assert cli.main(["doctor", "log.csv"]) == 1
    assert capsys.readouterr().out.startswith(said)
    big = json.dumps({"log_history": [{"step": 10**400, "kl": 1.0}]})
    (tmp_path / "log.json").write_text(big)
    assert cli.main(["doctor", "log.json"]) == 1


def test_a_run_may_name_a_module_by_an_option_that_its_command_has_not(capsys):
    line = ["cartpole", "--steps", "1024", "--num-envs", "4", "--epochs", "1"]
    assert cli.main([*line, "--eval-episodes", "2", "--out", "run"]) == 0
    capsys.readouterr()
    saved = json.load(open("run/config.json"))
    for name, value in (("env", "mine:Env-v0"), ("env_kwargs", {"env_id": "mine:Env-v0"})):
        json.dump(saved | {name: value}, open("run/config.json", "w"))
        told = refused(["cartpole", "--resume", "run"], capsys)
        assert f"--trust must be given, since run names a module by {name}, got none for" in told


@pytest.mark.skipif(os.name != "posix", reason="resource")
@pytest.mark.parametrize("limit", [1500, 100])
def test_a_disk_that_is_full_at_the_first_events(limit, tmp_path):
    code = f"""
import resource, signal, sys
from rlhf_notes.cli import main
from rlhf_notes import fast
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
with fast.off(): code = main("cartpole --steps 2048 --eval-episodes 2 --out o".split())
sys.stderr.flush()
print("code", code, flush=True)
import os
os._exit(code)  # before the thread of TensorBoard says the same
"""
    done = processes.run(code, cwd=tmp_path)
    if limit == 100:  # not even the options
        assert done.returncode == 2 and "rlhf-notes: --out must be a dir" in done.stderr, done
        return
    assert done.returncode == 1 and f"cannot use {tmp_path}/o: File too large" in done.stderr, done
