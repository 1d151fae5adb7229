"""Two processes whose scripts differ: in their prompts, their weights, their options, their ends.

    PYTHONPATH=tests torchrun --nproc_per_node 2 tests/language/test_processes.py DIRECTORY
"""
import os
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pytest
import torch
from language.test_own_task import SMALL, count, tokenizer
from language_models import make

from rlhf_notes import DPO, RLHF
from rlhf_notes.language.machine import Scaled

TESTS = Path(__file__).parent.parent
PLACES = str(TESTS), str(TESTS.parent)
rank = int(os.environ.get("RANK", 0))
BASE = SMALL | dict(batch=16, group=4, iterations=4)


def own(prompts=("w3 w4", "w5"), reward=count, weights=0, **options):
    return RLHF(make("GPT2", seed=weights), tokenizer(), prompts, reward, **BASE | options)


def state(t): return t.loop.optimizer.vector.detach().clone()


def lengths():
    "Prompts of other lengths, and scores by rank: both keep the same policy, the best."
    def judge(prompts, responses):
        return [x.count("9") if rank == 0 else -len(x) for x in responses]
    seen = {}
    def note(t, row): seen[row["eval_score"]] = state(t)
    t = own([f"w{i} " * (2 + 3 * rank) for i in range(3, 9)], eval_reward=judge, eval_every=1,
            eval_prompts=["w4 " * (5 - 2 * rank)] * (2 + rank), keep_best=True).learn(note)
    assert len(seen) > 1 and torch.equal(state(t), seen[max(seen)])
    return dict(scores=[row["eval_score"] for row in t.rows], weights=state(t))


def stopped():
    "A callback that stops one process stops both, and both go on."
    t = own().learn(lambda t, row: rank == 0 or t.iteration < 2)
    first = t.iteration
    return dict(at=(first, t.learn().iteration), weights=state(t))


def unlike():
    "Models of other weights: both train the first process's, and compare with it."
    t = own(weights=rank, learning_rate=1e-9, kl_coef=0.1).learn()
    return dict(kl=[round(abs(row["kl_k1"]), 5) for row in t.rows], weights=state(t))


def saved():
    "Both save into one directory at once: the first writes, as transformers would have it."
    t = own(iterations=1).learn()
    t.save(out / "saved")
    torch.distributed.barrier()
    again = RLHF.load(out / "saved", ["w3"], count)
    return dict(weights=state(again), files=sorted(x.name for x in (out / "saved").iterdir()))


PAIRS = [dict(prompt=f"w{i}", chosen="w9", rejected="w8") for i in range(3, 9)]
REFUSED = dict(
    seed=lambda: own(seed=rank), batch=lambda: own(batch=16 + 16 * rank),
    learning_rate=lambda: own(learning_rate=1e-2 + rank),
    minibatches=lambda: own(minibatches=1 + rank), iterations=lambda: own(iterations=2 + rank),
    response_length=lambda: own(max_new_tokens=2 + rank), rewards=lambda: own(
        reward=[count] * (1 + rank)), keep_best=lambda: own(
        eval_prompts=["w3"], keep_best=bool(rank)), eval_every=lambda: own(
        eval_prompts=["w3"], eval_every=1 + rank), eval_prompts=lambda: own(
        eval_prompts=["w3"] * rank), prompts=lambda: own(
        [f"w{rank}"], prompt_order="epochs"), pairs=lambda: DPO(
        make("GPT2"), tokenizer(), PAIRS[rank::2], max_new_tokens=2, batch=2, minibatches=1,
        device="cpu"))


def refused():
    "What the processes must share, and do not, is named in each of them before they start."
    found = {}
    for name, build in REFUSED.items():
        with pytest.raises(ValueError, match="must be the same in each process") as e: build()
        found[name] = str(e.value).split()[0], str(e.value)[-1]
    return found


def test_an_option_of_another_process_is_named():
    machine = object.__new__(Scaled)
    machine.device, machine.rank = torch.device("cpu"), 1
    def gather(own): return torch.cat([other, own])
    other = torch.tensor([[crc32(repr(x).encode()) for x in (16, None, 0.5)]])
    machine.gather = gather
    machine.check_same(batch=16, top=None, rate=0.5)
    with pytest.raises(ValueError, match="^rate must be the same in each process, got 0.25 in "
                                         "process 1$"):
        machine.check_same(batch=16, top=None, rate=0.25)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "thorough", reason="part of make test-all")
def test_processes_that_differ_agree_or_are_refused(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(PLACES), "OMP_NUM_THREADS": "1",
           "ACCELERATE_USE_CPU": "1"}
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            __file__, tmp_path]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (torch.load(tmp_path / f"{i}.pt", weights_only=True) for i in range(2))
    for name, x in one.items():
        for key in x.keys() & {"weights"}:
            assert torch.equal(x.pop(key), two[name].pop(key)), name
    assert one.pop("refused") == {name: (name.replace("pairs", "prompts"), "0") for name in REFUSED}
    assert two.pop("refused") == {name: (name.replace("pairs", "prompts"), "1") for name in REFUSED}
    assert one == two and len(one["lengths"]["scores"]) == 4
    assert one["stopped"] == dict(at=(2, 4)) and one["unlike"] == dict(kl=[0.0] * 4)
    assert "model.safetensors" in one["saved"]["files"]


if __name__ == "__main__":
    out = Path(sys.argv[1])
    found = {f.__name__: f() for f in (lengths, stopped, unlike, saved, refused)}
    torch.save(found, out / f"{rank}.pt")
