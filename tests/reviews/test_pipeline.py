import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import processes
import pytest
import torch
from language.parts import (
    TIMES,
    TINY,
    After,
    a_batch,
    handmade,
    tiny_lm,
    trainer,
    vector,
    weights,
    without_times,
)
from test_view import distance_from_saved

from rlhf_notes.hub.load import pad_outside
from rlhf_notes.hub.save import save_model
from rlhf_notes.language.loop import Loop
from rlhf_notes.language.model import make_gpt2
from rlhf_notes.reviews import pipeline as P
from rlhf_notes.reviews.task import WORDS, Reviews, make_tokenizer, true_reward
from rlhf_notes.training import fit
from rlhf_notes.training.runs import Run

@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    save_model(path / "lm", tiny_lm(), tokenizer)
    return str(path / "lm")


def test_evaluation_is_of_held_out_queries_and_repeats_itself():
    t = trainer()
    a, b = P.evaluate(t), P.evaluate(t)
    assert a.texts == b.texts and torch.equal(a.true, b.true) and len(a.texts) == 10 == len(a.true)
    assert {q for q, _ in a.texts} <= set(
        t.task.texts(*(h := t.task.held_out(40)), h[0])[i][0] for i in range(40))
    assert P.evaluate(t, seed=9).texts != a.texts != P.evaluate(t, t.reference).texts
    queries, mask = t.task.held_out(10)
    torch.testing.assert_close(
        a.true, t.task.true_rewards(queries, mask, t.task.truncate(a.rollout.responses)[0]))
    assert all(" ".join(x.split()) == x for _, x in a.texts)
    small = trainer(replace(TINY, batch=4, minibatches=1))
    assert P.evaluate(small).texts == a.texts


def test_policy_and_reference_are_looked_at_with_luck_of_their_own():
    t = trainer(noise=0)
    assert P.evaluate(t).texts != P.evaluate(t, t.reference).texts


def test_evaluation_leaves_the_training_alone():
    a, b = trainer(), trainer()
    a.iterate()
    P.evaluate(a)
    a.iterate()
    b.iterate()
    b.iterate()
    assert torch.equal(weights(a), weights(b))


def test_win_rate_by_hand():
    e = lambda *true: P.Evaluation([], torch.tensor(true), handmade())
    assert e(1.0, 2.0, 3.0, 4.0).worth(e(0.0, 2.0, 5.0, 0.0))["win"] == (1 + 0.5 + 0 + 1) / 4


TWO = """
import torch
torch.set_num_threads(1)
from dataclasses import replace
from accelerate import Accelerator
from language import parts as T
from rlhf_notes.language.loop import Loop
from rlhf_notes.reviews import pipeline as P
from rlhf_notes.language.rollout import Rollout
p = Accelerator()
assert p.num_processes == 2
for i, options in enumerate({cases!r}):
    t = T.trainer(replace(T.TINY, **options))
    batch = Rollout(**torch.load({path!r} + f"/batch{{i}}.pt"))
    logs = [{{k: v.item() for k, v in t.step(batch[rows]).items()}}
            for rows in torch.arange(16).view(2, 8)]
    mine, stepped = t.prompts()[2], T.weights(t)
    [everyone] = [p.gather(mine)]
    assert len(mine) == 8 and len(everyone) == 16 and not torch.equal(everyone[:8], everyone[8:])
    row = t.iterate()
    if p.is_main_process:
        found = dict(weights=T.weights(t), stepped=stepped, logs=logs, row=row)
        torch.save(found, {path!r} + f"/two{{i}}.pt")
    else: torch.save(dict(weights=T.weights(t), row=row), {path!r} + f"/other{{i}}.pt")
P.Run.save_figure = lambda *args, **how: None
training = P.Training(replace(T.TINY, model={model!r}, iterations=2))
about = dict(task="rlhf", **vars(training.config))
run = P.Run.create({path!r} + "/run", about) if p.is_main_process else None
_, rows, summary = P.train(training, run)
assert summary["true_score"] is not None
same = p.gather(torch.tensor([rows[-1]["kl_k1"]]))
assert same[0] == same[1]
"""


def test_two_processes_take_the_steps_of_one(tmp_path, model_dir):
    cases = [
        dict(microbatches=2, temperature=0.8), dict(algo="grpo", variant="grpo", kl_in_loss=True)]
    ones = []
    for i, options in enumerate(cases):
        t = trainer(replace(TINY, **options))
        batch = a_batch(t)
        torch.save({f.name: x for f in fields(batch) if (x := getattr(batch, f.name)) is not None},
                   tmp_path / f"batch{i}.pt")
        ones.append((t,
                     [{k: v.item() for k, v in t.step(batch[rows]).items()}
                      for rows in torch.arange(16).view(2, 8)]))
    one_weights = [weights(t) for t, _ in ones]
    processes.together(2, TWO.format(cases=cases, path=str(tmp_path), model=model_dir))
    for i, (t, logs) in enumerate(ones):
        two, other = torch.load(tmp_path / f"two{i}.pt"), torch.load(tmp_path / f"other{i}.pt")
        torch.testing.assert_close(two["stepped"], one_weights[i], rtol=0, atol=1e-6)
        for a, b in zip(two["logs"], logs): assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
        assert torch.equal(two["weights"], other["weights"])
        assert without_times([two["row"]]) == without_times([other["row"]])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 32
    assert distance_from_saved(tmp_path / "run") < 5e-6


def test_a_number_that_is_none_stops_the_run_and_says_where(tmp_path, model_dir, monkeypatch):
    monkeypatch.setattr(fit, "CHECKPOINT_EVERY", 0.0)
    iterate = Loop.iterate
    def poisoned(self):
        if self.iteration == 2: self.policy.value_head.bias.data.fill_(math.nan)
        return iterate(self)
    monkeypatch.setattr(Loop, "iterate", poisoned)
    run = Run.create(tmp_path / "run", {"task": "rlhf"})
    with pytest.raises(FloatingPointError, match=r"stage rl, iteration 3: .*value_loss is nan"):
        P.train(P.Training(replace(TINY, model=model_dir)), run)
    left = Run.resume(tmp_path / "run").checkpoint
    assert left["name"] == "rl"
    assert left["stage"]["iteration"] == 2
    assert all(x.isfinite().all() for x in left["stage"]["policy"].values())


def test_weights_that_are_no_numbers_stop_the_run_after_the_last_step(tmp_path, model_dir):
    with pytest.raises(FloatingPointError, match="^stage rl, iteration 1: weights is"):
        trainer(replace(TINY, epochs=1, minibatches=1, learning_rate=1e38)).iterate()
    run = Run.create(tmp_path / "run", {"task": "rlhf"})
    with pytest.raises(
        FloatingPointError,
        match="^stage rl, iteration 1: weights is (nan|inf); the last checkpoint, if "
        "there is one, is from before$"):
        P.train(P.Training(replace(TINY, model=model_dir, epochs=1, minibatches=1, iterations=1,
                                   learning_rate=1e38)), run)
    left = Run.resume(tmp_path / "run").checkpoint
    assert left["name"] == "rl"
    assert left["stage"]["iteration"] == 0
    assert all(x.isfinite().all() for x in left["stage"]["policy"].values())
    assert not {"policy", "summary.json"} & {p.name for p in run.path.iterdir()}


@pytest.mark.parametrize("stage, before", [("sft", 0), ("reward_model", 3)])
def test_no_checkpoint_holds_weights_that_are_no_numbers(
    tmp_path, model_dir, monkeypatch, stage, before):
    "In the middle of a stage too, where the next loss has not been looked at."
    monkeypatch.setattr(fit, "stop_on_interrupt", lambda *say: After(before + 1))
    original = P.Training.iterate
    def poisoned(self):
        out = original(self)
        if self.name == stage and self.stage.iteration == 1:
            self.stage.optimizer.param_groups[0]["params"][0].data.fill_(math.inf)
        return out
    monkeypatch.setattr(P.Training, "iterate", poisoned)
    run = Run.create(tmp_path / "run", {"task": "rlhf"})
    with pytest.raises(FloatingPointError, match=f"^stage {stage}, iteration 1: weights is"):
        P.train(P.Training(replace(TINY, model=model_dir)), run)
    left = Run.resume(tmp_path / "run").checkpoint
    assert left["name"] == stage
    assert left["stage"]["iteration"] == 0
    assert not (run.path / "summary.json").exists()


def test_bad_models_are_refused_in_a_line(tmp_path):
    with pytest.raises(ValueError, match="^model must"):
        P.Training(replace(TINY, model=str(tmp_path)))
    with pytest.raises(ValueError, match="^device|cuda"): P.Training(replace(TINY, device="cuda:9"))


def test_a_query_longer_than_the_context_is_refused(tmp_path):
    tokenizer = make_tokenizer()
    save_model(tmp_path / "short", tiny_lm(n_positions=20), tokenizer)
    with pytest.raises(ValueError, match="20 tokens"):
        P.make_world(replace(TINY, model=str(tmp_path / "short")), torch.device("cpu"))
    for options, words in (
        (dict(response_length=60),
         "response_length must fit into the model's context of 64 tokens, got 9 \\+ 60"),
        (dict(prompt_length=60),
         "prompt_length must fit into the model's context of 64 tokens, got 60 \\+ 16")):
        with pytest.raises(ValueError, match=f"^{words}$"):
            P.make_world(replace(TINY, **options), torch.device("cpu"))
    P.make_world(replace(TINY, response_length=55), torch.device("cpu"))


def test_a_tokenizer_that_does_not_fit_is_the_models(tmp_path):
    from reviews.test_task import words_alone
    words = [w for w in WORDS if w != "superb"]
    save_model(tmp_path / "lm", make_gpt2("tiny", len(words), n_layer=1, n_embd=16, n_head=2),
               words_alone(words))
    with pytest.raises(ValueError, match="^model must have a tokenizer for every word, got"):
        P.make_world(replace(TINY, model=str(tmp_path / "lm")), "cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model_dir):
    path = tmp_path_factory.mktemp("whole") / "run"
    config = replace(TINY, model=model_dir)
    return (
        path, config, *P.train(P.Training(config), Run.create(path, {"task": "rlhf", "seed": 3})))


def test_what_a_run_leaves_behind(whole):
    path, config, t, rows, summary = whole
    assert [r["iteration"] for r in rows] == [1, 2, 3, 4]
    assert [r["true_score"] is not None for r in rows] == [False, True, False, True]
    table = list(csv.DictReader(open(path / "metrics.csv")))
    assert list(table[0]) == list(rows[0])
    assert float(table[3]["kl_k1"]) == pytest.approx(rows[3]["kl_k1"])
    assert table[0]["true_score"] == ""
    assert len(list(csv.DictReader(open(path / "sft.csv")))) == 3
    assert len(list(csv.DictReader(open(path / "reward_model.csv")))) == 2
    samples = list(csv.DictReader(open(path / "samples.csv")))
    assert [int(s["iteration"]) for s in samples] == [i for i in (0, 2, 4) for _ in range(8)]
    assert list(samples[0]) == [
        "iteration", "prompt", "response", "score", "length", "kl", "true_score"]
    assert all(float(s["true_score"]) == pytest.approx(true_reward(s["prompt"], s["response"]))
               for s in samples)
    assert all([s["prompt"] for s in samples[:8]] == [s["prompt"] for s in samples[k:k + 8]]
               for k in (8, 16))
    assert (path / "curve.svg").read_text().lstrip().startswith("<?xml")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(path))
    events.Reload()
    assert [e.step for e in events.Tensors("samples/text_summary")] == [2, 4]
    assert not [p.name for p in path.iterdir() if p.name.endswith(".tmp")]


def test_the_summary(whole):
    path, config, t, rows, summary = whole
    for name in (
        "task", "algo", "seed", "device", "steps", "wall_seconds", "interrupted", "true_score_sft",
        "true_score", "win_rate_vs_sft", "proxy_score", "kl", "tokens_per_second"):
        assert summary[name] is not None, name
    assert summary["task"] == "rlhf"
    assert summary["steps"] == 64
    assert not summary["interrupted"]
    assert set(summary["seconds"]) == {"sft", "reward_model", "rl"}
    assert 0 < min(summary["seconds"].values())
    assert sum(summary["seconds"].values()) < summary["wall_seconds"]
    after, before = P.evaluate(t), P.evaluate(t, t.reference)
    assert summary["true_score"] == after.true.mean().item() == rows[-1]["true_score"]
    assert summary["true_score_sft"] == before.true.mean().item()
    assert summary["win_rate_vs_sft"] == after.worth(before)["win"]
    assert summary["proxy_score"] == pytest.approx(after.rollout.scores.mean().item())
    assert summary["proxy_score_sft"] == pytest.approx(before.rollout.scores.mean().item())
    assert json.loads((path / "summary.json").read_text()) == json.loads(json.dumps(summary))


def test_the_policy_loads_as_any_model_does(whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    path, config, t, rows, summary = whole
    lm, tokenizer = (AutoModelForCausalLM.from_pretrained(path / "policy"),
                     AutoTokenizer.from_pretrained(path / "policy"))
    assert (path / "policy" / "model.safetensors").exists()
    assert not list((path / "policy").glob("*.bin"))
    text = "about the hotel . the room was"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    torch.testing.assert_close(lm(ids).logits, t.policy.lm(ids).logits)
    assert tokenizer.decode(ids[0]) == text
    again = P.make_world(replace(config, model=str(path / "policy")), torch.device("cpu"))[0]
    torch.testing.assert_close(again(ids).logits, lm(ids).logits)


@pytest.mark.parametrize(
    "pad, expected", [(None, WORDS[0]), (WORDS[5], WORDS[5]), ("outside", WORDS[0])])
def test_the_policy_answers_many_texts_as_it_does_one(tmp_path, pad, expected):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
    words, lm = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)})), tiny_lm()
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # or it would say the same to all
        for p in lm.parameters(): p.add_(0.3 * torch.randn(p.shape, generator=g))
    tokenizer = pad_outside(make_tokenizer() if pad == "outside"
                            else PreTrainedTokenizerFast(tokenizer_object=words, eos_token=WORDS[0],
                                                         pad_token=pad), len(WORDS))
    save_model(tmp_path / "p", lm, tokenizer)
    assert tokenizer.pad_token_id == len(WORDS)
    assert lm.config.pad_token_id is None
    assert lm.generation_config.pad_token_id is None
    lm, tokenizer = (AutoModelForCausalLM.from_pretrained(tmp_path / "p"),
                     AutoTokenizer.from_pretrained(tmp_path / "p"))
    assert tokenizer.pad_token == expected
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token_id < len(WORDS)
    assert tokenizer.pad_token_id == lm.config.pad_token_id == lm.generation_config.pad_token_id
    def answers(texts):
        return lm.generate(
            **{k: x for k, x in tokenizer(texts, return_tensors="pt", padding=True).items()
               if k != "token_type_ids"}, max_new_tokens=4, min_new_tokens=4,
            do_sample=False)[:, -4:]
    texts = ["about the hotel .", "a word on the old hotel ."]
    assert torch.equal(answers(texts), torch.cat([answers([t]) for t in texts]))
    assert not torch.equal(*answers(texts))
    assert P.make_world(replace(TINY, model=str(tmp_path / "p")), "cpu")[1].pad_token >= len(WORDS)


@pytest.fixture
def no_figure(monkeypatch): monkeypatch.setattr(Run, "save_figure", lambda *args, **how: None)


def same_as_whole(whole, path, t, rows):
    assert without_times(rows) == without_times(whole[3])
    for name in ("sft.csv", "reward_model.csv", "samples.csv", "responses.json"):
        assert (path / name).read_bytes() == (whole[0] / name).read_bytes(), name
    columns = [[{k: v for k, v in r.items() if k not in TIMES}
                for r in csv.DictReader(open(p / "metrics.csv"))] for p in (path, whole[0])]
    assert columns[0] == columns[1]
    assert torch.equal(weights(t), weights(whole[2]))


@pytest.mark.parametrize("steps, stage", [((0,), ["sft"]),
                                          ((2, 2), ["sft", "reward_model"]),
                                          ((3, 3), ["reward_model", "rl"]),
                                          ((7,), ["rl"]),
                                          ((9,), ["rl"])], ids=str)
def test_an_interrupted_run_resumed_is_one_that_was_not(
    whole, tmp_path, monkeypatch, steps, stage, no_figure):
    run = Run.create(tmp_path / "run", {"task": "rlhf", "seed": 3})
    original = fit.stop_on_interrupt
    for n, expected in zip(steps, stage):
        monkeypatch.setattr(fit, "stop_on_interrupt", lambda *say: After(n))
        t, rows, summary = P.train(P.Training(whole[1]), run)
        run = Run.resume(tmp_path / "run")
        assert run.checkpoint["name"] == expected
        if n < 9:
            assert summary["interrupted"]
            assert summary["true_score"] is None
            assert (tmp_path / "run" / "policy").exists() == (expected == "rl")
    monkeypatch.setattr(fit, "stop_on_interrupt", original)
    run.checkpoint["wall_seconds"] += 1e6
    t, rows, summary = P.train(P.Training(whole[1]), run)
    assert summary["wall_seconds"] > 1e6
    same_as_whole(whole, tmp_path / "run", t, rows)
    assert {k: v for k, v in summary.items() if "seconds" not in k and "per_second" not in k} == {
        k: v for k, v in whole[4].items() if "seconds" not in k and "per_second" not in k}


def test_a_killed_run_resumed_is_one_that_was_not(whole, tmp_path, no_figure):
    path = tmp_path / "run"
    script = f"""
import sys, time, math, torch
torch.set_num_threads(1)
sys.path[:0] = {[str(p) for p in Path(__file__).parents[:3]]!r}
from dataclasses import replace
from language import parts as T
from rlhf_notes.language.loop import Loop
from rlhf_notes.reviews import pipeline as P
from rlhf_notes.training import fit
fit.CHECKPOINT_EVERY, P.Run.save_figure = 0.0, lambda *args, **how: None
iterate = Loop.iterate
Loop.iterate = lambda self: (time.sleep(0.5), iterate(self))[1]
training = P.Training(replace(T.TINY, model={whole[1].model!r}))
P.train(training, P.Run.create({str(path)!r}, dict(task="rlhf", seed=3)))
"""
    child = processes.start(script)
    deadline = time.time() + 120
    while time.time() < deadline and child.poll() is None:
        if (path / "metrics.csv").exists() and len(
            (path / "metrics.csv").read_text().splitlines()) >= 3:
            break
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, child.stderr.read()[-2000:]
    assert not (path / "summary.json").exists()
    t, rows, summary = P.train(P.Training(whole[1]), Run.resume(path))
    same_as_whole(whole, path, t, rows)


def test_nothing_is_written_without_a_run(tmp_path, monkeypatch, model_dir):
    monkeypatch.chdir(tmp_path)
    t, rows, summary = P.train(
        P.Training(replace(TINY, model=model_dir, iterations=1, sft_steps=0, algo="rloo")))
    assert not list(tmp_path.iterdir())
    assert len(rows) == 1
    assert summary["algo"] == "rloo"
    assert summary["seconds"]["sft"] >= 0


def test_a_policy_takes_the_place_of_another(tmp_path):
    tokenizer = make_tokenizer()
    for seed in (0, 1): save_model(tmp_path / "p", tiny_lm(seed), tokenizer)
    from transformers import AutoModelForCausalLM
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "p").transformer.wte.weight,
                       tiny_lm(1).transformer.wte.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_other_tokenizers_will_do(tmp_path):
    "One that response_mask further than the model it comes with was made for."
    tokenizer = pad_outside(make_tokenizer(), len(WORDS))
    save_model(tmp_path / "p", tiny_lm(), tokenizer)
    assert P.train(
        P.Training(replace(TINY, model=str(tmp_path / "p"), iterations=1)))[2]["steps"] == 16


def test_a_stage_that_is_complete_says_so():
    training = P.Training(TINY)
    for name, option in (("sft", "sft_steps"), ("reward_model", "labels"), ("rl", "iterations")):
        while training.stage.iteration < training.stage.iterations: training.stage.iterate()
        with pytest.raises(ValueError, match=f"^{option}.* must be more than .* are done$"):
            training.stage.iterate()
        assert training.name == name
        training.advance()
