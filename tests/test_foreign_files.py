"A file of somebody else is data: whatever its fields say, no code of theirs runs."
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from language_models import make, tokenizer

from rlhf_notes import PPO, RLHF, cli
from rlhf_notes.control.config import PPOConfig
from rlhf_notes.launch import old_training
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.training.runs import load_checked, save_checked

PAYLOADS = ("payload", "payload.x", "payload:x", "payload/x-v0", "payload:Name-v0", ["payload.x"],
            ["payload:x"], {"payload.x": 1}, {"x": "payload:y"}, [["payload:x"]])
NAMING = ("env", "env_kwargs", "reward", "track", "model", "device")


def spoiled(names):
    "Pairs (field, payload): two for each field, all for those that name things."
    for i, name in enumerate(names):
        some = PAYLOADS if name in NAMING else (PAYLOADS[i % 10], PAYLOADS[(3 * i + 1) % 10])
        yield from ((name, payload) for payload in some)


@pytest.fixture(autouse=True)
def planted(tmp_path, monkeypatch):
    "A module that tells when it is imported."
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "payload.py").write_text("import builtins\nbuiltins.payload_has_run = True")
    yield
    import builtins
    ran = vars(builtins).pop("payload_has_run", False)
    assert not ran and "payload" not in sys.modules


def said(capsys):
    "What was printed is one sentence."
    text = capsys.readouterr().err
    assert text.startswith("rlhf-notes: ") and text.count("\n") == 1, text
    return text


def test_a_name_of_a_tracker_is_never_looked_up(capsys):
    line = ["--steps", "1024", "--eval-episodes", "2", "--num-envs", "4", "--epochs", "1"]
    assert cli.main(["cartpole", *line, "--out", "run"]) == 0
    capsys.readouterr()
    saved = json.load(open("run/config.json"))
    for track in (*PAYLOADS, "torch", 5, None, "tensorboard.x", ["tensorboard", "payload.x"]):
        json.dump(saved | {"track": track}, open("run/config.json", "w"))
        assert cli.main(["cartpole", "--resume", "run"]) == 2
        assert "track must be tensorboard, wandb or trackio, or a list of those" in said(capsys)
    with pytest.raises(ValueError, match="^track must be"):
        PPO("CartPole-v1", out="other", track="payload.x").learn()


@pytest.mark.parametrize("task, config", [("train", PPOConfig()), ("rlhf", ReviewsConfig())])
def test_no_field_of_a_run_imports_a_module(task, config, capsys):
    from rlhf_notes.training.runs import Run
    whole = {"task": task, "algo": "ppo", "prompts": "p.txt", "reward": "rm",
             "track": "tensorboard", "versions": {}, **asdict(config)}
    if task == "train": del whole["prompts"], whole["reward"]
    Run.create("run", whole).save_checkpoint({})
    for name, payload in spoiled({**whole, "env_kwargs": None}):
        json.dump(whole | {name: payload}, open("run/config.json", "w"))
        if name in NAMING:
            assert cli.main([task, "--resume", "run"]) == 2, (name, payload)
            said(capsys)
            continue
        with pytest.raises(ValueError) as e: old_training(task, Path("run"))
        assert "\n" not in str(e.value), (name, payload)


def test_no_field_of_a_saved_policy_imports_a_module():
    RLHF(make("Llama"), tokenizer(), max_new_tokens=4, device="cpu").save("saved")
    os.unlink("saved/checksums.json")
    whole = json.load(open("saved/rlhf.json"))
    for name, payload in spoiled((*whole, "reward", "prompts", "track", "LOOP")):
        json.dump(whole | {name: payload}, open("saved/rlhf.json", "w"))
        try: RLHF.load("saved")
        except ValueError as e: assert name in str(e), (name, payload)
        else: assert name == "model"  # which is where it was loaded from


def test_no_field_of_a_saved_trainer_imports_a_module():
    PPO("CartPole-v1", num_envs=4, device="cpu").save("saved.pt")
    whole = load_checked("saved.pt")
    for name, payload in spoiled(whole["config"]):
        save_checked("saved.pt", whole | {"config": whole["config"] | {name: payload}})
        try: PPO.load("saved.pt")
        except (ValueError, TypeError): pass
        else: assert name in ("env", "env_kwargs"), (name, payload)
    for name in ("own", "state", "spaces", "version"):
        for payload in PAYLOADS:
            save_checked("saved.pt", whole | {name: payload})
            try: PPO.load("saved.pt")
            except Exception: pass
    torch.save(whole | {"config": print}, "saved.pt")
    with pytest.raises(ValueError, match="a file that PPO.save has written"): PPO.load("saved.pt")
