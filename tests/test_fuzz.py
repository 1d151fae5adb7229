"""Files that are damaged or that somebody wrote by hand, at every door that reads one.

Each gives a result or one sentence, and never a traceback. The inputs are the same in each run.
"""
import json
import random

import pytest
from language_models import make, tokenizer

from rlhf_notes import PPO, RLHF, cli
from rlhf_notes.hub.prompts import read_prompts
from rlhf_notes.training.runs import SUMS, Run, load_checked, save_checked

WRONG = (None, True, -1, 0, 1.5, 1e300, float("nan"), 2**70, "", "x", "\x00", [], [1], {}, {"a": 1},
         [[]], "a" * 300)


def damaged(data, seed, count):
    "A file with flipped bits, gaps, other lengths, or another file's parts."
    r = random.Random(seed)
    for _ in range(count):
        bad, at = bytearray(data), r.randrange(max(1, len(data)))
        match r.randrange(5):
            case 0:
                bad[at] ^= 1 << r.randrange(8)
            case 1: del bad[at:]
            case 2: bad[at:at + 30] = bytes(30)
            case 3: bad[at:at] = r.randbytes(20)
            case 4: bad[at:at + 40] = bad[:r.randrange(40)]
        yield bytes(bad)


def spoiled(content, seed, count):
    "A dict of options with a field that is wrong, missing or unknown."
    r = random.Random(seed)
    for _ in range(count):
        changed = dict(content)
        match r.randrange(6):
            case 0: del changed[r.choice([*content])]
            case 1: changed[r.choice(["x", "", "self", "env", "reward"])] = r.choice(WRONG)
            case _: changed[r.choice([*content])] = r.choice(WRONG)
        yield changed


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def told(line, capsys):
    "Run a command that may refuse: one sentence, or several about several options."
    code = cli.main(line)
    err = [x for x in capsys.readouterr().err.splitlines() if "%|" not in x]
    assert code in (0, 1, 2), code
    if code == 2: assert err and err[0].startswith("rlhf-notes: ") and "Traceback" not in str(err)
    return code


def refused(read, *errors):
    "The message of a refusal, or None."
    try: read()
    except errors or ValueError as e:
        assert str(e) and len(str(e)) < 3000
        return str(e)


def test_the_options_of_a_run(capsys):
    line = ["train", "--steps", "1024", "--num-envs", "4", "--epochs", "1", "--eval-episodes", "2"]
    assert cli.main([*line, "--out", "run"]) == 0
    good = json.load(open("run/config.json"))
    codes = []
    for bad in spoiled(good, 0, 30):
        json.dump(bad, open("run/config.json", "w"))
        codes.append(told(["train", "--resume", "run"], capsys))
    for bad in damaged(json.dumps(good).encode(), 1, 12):
        open("run/config.json", "wb").write(bad)
        codes.append(told(["train", "--resume", "run"], capsys))
        told(["cartpole", "--out", "run"], capsys)
    assert codes.count(2) > 30


@pytest.mark.parametrize("task", ["train", "rlhf"])
def test_the_state_of_a_run(task, capsys):
    small = dict(train="--steps 1024 --num-envs 4 --epochs 1 --eval-episodes 2",
                 rlhf="--sft-steps 2 --sft-batch 4 --labels 8 --norm-samples 8 --iterations 1 "
                      "--batch 8 --eval-responses 4 --device cpu")[task].split()
    assert cli.main([task, *small, "--out", "run"]) == 0
    whole = load_checked("run/checkpoint.pt")
    for bad in (5, [], {}, {"state": {}}, {"metrics": [], "state": 5}, {"metrics": 5, "state": {}},
                *({"metrics": whole["metrics"], "state": x} for x in WRONG[::5])):
        save_checked("run/checkpoint.pt", bad)
        assert told([task, "--resume", "run"], capsys) == 2
    state = whole["state"]["ppo"] if task == "train" else whole["state"]
    for bad in spoiled(state, 2, 25 if task == "train" else 3):
        state_of = {"ppo": bad} if task == "train" else bad
        save_checked("run/checkpoint.pt", whole | {"state": state_of})
        told([task, "--resume", "run"], capsys)


def test_a_saved_policy():
    RLHF(make("Llama"), tokenizer(), max_new_tokens=4, device="cpu").save("saved")
    good, sums = json.load(open("saved/rlhf.json")), open("saved/" + SUMS, "rb").read()
    open("saved/" + SUMS, "w").write("{}")
    said = []
    for bad in spoiled(good, 3, 60):
        json.dump(bad, open("saved/rlhf.json", "w"))
        said.append(refused(lambda: RLHF.load("saved")))
    for bad in damaged(json.dumps(good).encode(), 4, 20):
        open("saved/rlhf.json", "wb").write(bad)
        said.append(refused(lambda: RLHF.load("saved")))
    json.dump(good, open("saved/rlhf.json", "w"))
    for bad in damaged(sums, 5, 30):
        open("saved/" + SUMS, "wb").write(bad)
        said.append(refused(lambda: RLHF.load("saved")))
    assert sum(x is not None for x in said) > 80
    open("saved/" + SUMS, "w").write("{}")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        whole = open("saved/" + name, "rb").read()
        for bad in damaged(whole, 6, 8):
            open("saved/" + name, "wb").write(bad)
            refused(lambda: RLHF.load("saved"))
        open("saved/" + name, "wb").write(whole)


def test_a_saved_trainer():
    PPO("CartPole-v1", num_envs=4, device="cpu").save("saved.pt")
    whole, data = load_checked("saved.pt"), open("saved.pt", "rb").read()
    def load():
        PPO.load("saved.pt").predict([0.0] * 4)
    for bad in damaged(data, 7, 40):
        open("saved.pt", "wb").write(bad)
        refused(load)
    for bad in spoiled(whole["config"], 8, 60):
        save_checked("saved.pt", whole | {"config": bad})
        refused(load, ValueError, TypeError)


def test_logs(tmp_path, capsys):
    rows = [dict(iteration=i, score=i / 3, kl_k1=0.1 * i, entropy=1.0, grad_norm=0.2, ratio=1.0)
            for i in range(1, 9)]
    texts = {
        "m.csv": "\n".join([",".join(rows[0]), *(",".join(map(str, x.values())) for x in rows)]),
        "t.json": json.dumps({"log_history": rows}), "l.jsonl": "\n".join(map(json.dumps, rows)),
        "c.txt": "\n".join(f"step:{x['iteration']} - actor/entropy:{x['entropy']}" for x in rows)}
    for seed, (name, text) in enumerate(texts.items()):
        for bad in damaged(text.encode(), 10 + seed, 60):
            (tmp_path / name).write_bytes(bad)
            told(["doctor", name], capsys)
    for bad in WRONG:
        for content in ({"log_history": bad}, {"log_history": [bad]}, bad,
                        {"log_history": [rows[0] | {"score": bad, "iteration": bad}]},
                        {"log_history": [{name: bad for name in rows[0]}] * 6}):
            (tmp_path / "t.json").write_text(json.dumps(content))
            told(["doctor", "t.json"], capsys)
            (tmp_path / "l.jsonl").write_text(json.dumps(content) + "\n{}")
            told(["doctor", "l.jsonl"], capsys)
    (tmp_path / "events.out.tfevents.1").write_bytes(random.Random(0).randbytes(300))
    told(["doctor", "events.out.tfevents.1"], capsys)


def test_prompts(tmp_path):
    good = "\n".join(json.dumps({"prompt": f"w{i}", "answer": i}) for i in range(5))
    for name in ("p.jsonl", "p.txt", "p.json"):
        for bad in damaged(good.encode(), 20, 40):
            (tmp_path / name).write_bytes(bad)
            refused(lambda: read_prompts(tmp_path / name))
    for bad in WRONG:
        for content in (bad, [bad], {"prompt": bad}, [{"prompt": bad}], [{"prompt": "a"}, bad]):
            (tmp_path / "p.jsonl").write_text(json.dumps(content))
            refused(lambda: read_prompts(tmp_path / "p.jsonl"))


def test_a_run_that_is_looked_at_before_it_is_overwritten(capsys):
    Run.create("run", {"task": "train"})
    for bad in (b"", b"\xff\xfe", b"[]", b'{"task": []}', b"{" * 5000, b"null"):
        open("run/config.json", "wb").write(bad)
        told(["cartpole", "--out", "run"], capsys)
        told(["cartpole", "--seeds", "2", "--out", "run"], capsys)
