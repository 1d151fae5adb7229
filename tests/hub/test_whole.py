"What is saved is there whole, or loading says that it is not."
import json
import os
import shutil

import pytest
import torch
from language_models import make, tokenizer
from transformers import AutoModelForCausalLM

from rlhf_notes import RLHF, cli
from rlhf_notes.training.runs import SUMS, Run, check_sums, write_sums

def filled(x):
    "A trainer whose weights are all x / 10, with the temperature x / 2."
    trainer = RLHF(make("Llama"), tokenizer(), max_new_tokens=4, temperature=x / 2, device="cpu")
    trainer.loop.optimizer.vector.data.fill_(x / 10)
    return trainer


def loaded(path):
    "The weights, and the temperatures of the options and of the model, all as filled with."
    trainer = RLHF.load(path)
    weights = {round(p.flatten()[0].item() * 10) for p in trainer.policy.lm.parameters()}
    sampling = json.load(open(path / "generation_config.json"))["temperature"]
    return weights | {round(trainer.config.temperature * 2), round(sampling * 2)}


def killed(after, save):
    "Save in a process that is killed after so many moves; True if it was."
    pid = os.fork()
    if pid == 0:
        move, count = os.replace, [0]
        def replace(old, new):
            if count[0] == after: os._exit(7)
            count[0] += 1
            move(old, new)
        os.replace = replace
        save()
        os._exit(0)
    return os.waitpid(pid, 0)[1] != 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_save_that_is_killed_leaves_old_or_new_or_a_refusal(tmp_path):
    a, b, path, k, refused = filled(1), filled(2), tmp_path / "s", 0, 0
    a.save(path)
    whole = {p.name for p in path.iterdir()}
    while True:
        shutil.rmtree(path)
        a.save(path)
        (path / "notes.txt").write_text("mine")
        if not killed(k, lambda: b.save(path)): break
        assert [p for p in path.iterdir() if p.name.endswith(".saving")]
        try: assert loaded(path) == ({1} if k < 2 else {2})
        except ValueError as e:
            assert "path must be a directory as it was saved, got" in str(e)
            refused += 1
        b.save(path)
        assert loaded(path) == {2}
        assert {p.name for p in path.iterdir()} == whole | {"notes.txt"}  # cleared up
        k += 1
    assert loaded(path) == {2} and k >= 6 and refused >= 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_first_save_that_is_killed_is_no_save(tmp_path):
    a, path = filled(1), tmp_path / "s"
    assert killed(3, lambda: a.save(path))
    with pytest.raises(ValueError, match="^path must be a directory as it was saved, got"):
        RLHF.load(path)
    a.save(path)
    assert loaded(path) == {1}


@pytest.mark.parametrize("lora", [0, 2])
def test_a_flipped_bit_is_noticed(lora, tmp_path):
    pytest.importorskip("peft")
    make("Llama").save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    path = tmp_path / "s"
    base = str(tmp_path / "base")
    RLHF(base, max_new_tokens=4, device="cpu", lora=lora).save(path)
    RLHF.load(path)
    if not lora: AutoModelForCausalLM.from_pretrained(path)
    files = [p for p in path.iterdir() if p.name not in (SUMS, "README.md")]
    assert {"rlhf.json", "adapter_model.safetensors" if lora else "model.safetensors"} <= {
        p.name for p in files}
    for i, file in enumerate(files):
        good = file.read_bytes()
        for at in (0, len(good) // 3 + i, len(good) - 1):
            file.write_bytes(good[:at] + bytes([good[at] ^ 1 << i % 8]) + good[at + 1:])
            words = f"as it was saved, got .* with another {file.name}"
            told = f"^path must be a directory {words}" if file.name != "rlhf.json" else ""
            with pytest.raises(ValueError, match=told): RLHF.load(path)
            with pytest.raises(ValueError, match=f"^model must be a directory {words}"):
                RLHF(str(path), max_new_tokens=4, device="cpu")
        file.unlink()
        with pytest.raises(ValueError, match=file.name): RLHF.load(path)
        file.write_bytes(good)
    RLHF.load(path)
    config = path / "rlhf.json"
    config.write_text(config.read_text().replace('"temperature": 1.0', '"temperature": 0.5'))
    (path / SUMS).unlink()  # by hand, and said so
    assert RLHF.load(path).config.temperature == 0.5


def test_checksums_are_read_as_data(tmp_path):
    (tmp_path / "a").write_text("1")
    write_sums(tmp_path)
    check_sums(tmp_path)
    for sums in ({"/dev/zero": "0"}, {"../x": "0"}, {"a": 5}, {"a": None}, {".": "0"}):
        (tmp_path / SUMS).write_text(json.dumps(sums))
        with pytest.raises(ValueError, match="^path must be a directory as it was saved"):
            check_sums(tmp_path)
    for torn in (b"[", b"", b"[]", b"\xff", b'{"a'):
        (tmp_path / SUMS).write_bytes(torn)
        with pytest.raises(ValueError, match=f"^path must be a directory .* another {SUMS}"):
            check_sums(tmp_path)


def test_the_options_of_a_run_are_those_it_began_with(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = ["cartpole", "--steps", "1024", "--num-envs", "4", "--epochs", "1", "--out", "run"]
    assert cli.main([*line, "--eval-episodes", "2"]) == 0
    good = (tmp_path / "run" / "config.json").read_bytes()
    generator, found = torch.Generator().manual_seed(0), []
    for at in torch.randint(len(good), (60,), generator=generator).tolist():
        bit = int(torch.randint(7, (1,), generator=generator))
        bad = good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1:]
        (tmp_path / "run" / "config.json").write_bytes(bad)
        capsys.readouterr()
        found.append(cli.main(["cartpole", "--resume", "run"]))
        if found[-1] == 0: assert json.loads(bad) == json.loads(good)
        else: assert capsys.readouterr().err.count("\n") == 1
    assert found.count(2) > 40
    changed = json.loads(good) | {"gamma": 0.5}
    (tmp_path / "run" / "config.json").write_text(json.dumps(changed))
    capsys.readouterr()
    assert cli.main(["cartpole", "--resume", "run"]) == 2
    assert "--gamma must be 0.98 in " in capsys.readouterr().err
    saved = Run.resume(tmp_path / "run")
    assert saved.began_with == json.loads(good)
