"A training that is stopped, and goes on."
import json
import os
import signal
import subprocess
import sys

import processes
import pytest
import torch
from language_models import make, tokenizer

from rlhf_notes import PPO, RLHF

TIMES = {"tokens_per_second", "seconds", "steps_per_second"}


def rlhf():
    def reward(prompts, responses): return [float(x.count("w9")) for x in responses]
    def judge(prompts, responses): return [-float(len(x)) for x in responses]
    return RLHF(make("Llama"), tokenizer(), ["w3", "w4 w5", "w6"], reward, algo="grpo",
                max_new_tokens=4, iterations=8, batch=16, minibatches=2, device="cpu",
                learning_rate=1e-2, eval_prompts=["w5", "w7"], eval_reward=judge, eval_every=2,
                keep_best=True)


def same(rows, others):
    assert len(rows) == len(others)
    for a, b in zip(rows, others):
        assert {k: x for k, x in a.items() if k not in TIMES} == {
            k: x for k, x in b.items() if k not in TIMES}


def weights(trainer):
    return trainer.loop.optimizer.vector.detach().clone()


@pytest.mark.parametrize("make_trainer, stop", [(rlhf, 5), (rlhf, 3)])
def test_with_the_best_kept_as_without_a_stop(make_trainer, stop, tmp_path):
    whole, parts = make_trainer().learn(), make_trainer()
    parts.learn(callback=lambda trainer, row: row["iteration"] < stop)
    best = weights(parts)
    assert parts.left and not torch.equal(best, parts.evaluator.last)
    parts.learn()
    same(whole.rows, parts.rows)
    assert torch.equal(weights(whole), weights(parts))


@pytest.mark.skipif(os.name != "posix", reason="signals are sent to a process")
@pytest.mark.parametrize("number", ["SIGINT"])  # SIGTERM
def test_a_script_whose_training_is_stopped(number, tmp_path):
    "After Ctrl-C it goes on and can tell; SIGTERM ends it, with a run that can be continued."
    code = f"""
import os, signal
from rlhf_notes import PPO
def stop(trainer, row):
    if row["iteration"] == 2: os.kill(os.getpid(), signal.{number})
ppo = PPO("CartPole-v1", steps=1024, num_envs=4, num_steps=32, out="run", device="cpu")
ppo.learn(callback=stop)
print("went on", ppo.left)
ppo.learn()
print(ppo.left)
"""
    done = processes.run(code, cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "stopping after 2 of 8 iterations" in done.stderr
    if number == "SIGINT":
        assert done.returncode == 0 and done.stdout == "went on True\nFalse\n", done.stderr
        assert summary["interrupted"] is False
        return
    assert done.returncode == -signal.SIGTERM and done.stdout == ""
    assert summary["interrupted"] is True and summary["eval_return_mean"] is None
    line = [sys.executable, "-m", "rlhf_notes", "train", "--resume", "run"]
    again = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") == 9


def test_a_run_that_has_ended_is_free(tmp_path):
    "Also while the notebook that wrote it is open."
    trainer = PPO("CartPole-v1", steps=256, num_envs=4, num_steps=32, eval_episodes=2, device="cpu",
                  out=tmp_path / "run").learn()
    code = f"from rlhf_notes.training.runs import Run; Run.resume({str(tmp_path / 'run')!r}).lock()"
    assert processes.run(code).returncode == 0
    trainer.learn(steps=128)  # and it is taken again
    assert trainer.rows[-1]["iteration"] > 2
