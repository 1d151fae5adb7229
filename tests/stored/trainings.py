"""Ten iterations of each kind of training with three seeds, and files as version 0.1.0 wrote them.

    PYTHONPATH=tests python tests/stored/trainings.py          # in a checkout of commit cde8d2c0

writes rows.csv, and beside it what that version left on the disk: a saved PPO, a saved RLHF, and
the directories of four interrupted runs. Made anew only for a change that is meant to move numbers.
"""
import csv
import os
import shutil
from pathlib import Path

import processes

from rlhf_notes import DPO, PPO, RLHF
from rlhf_notes.language.model import make_gpt2
from rlhf_notes.reviews.task import WORDS, make_tokenizer

HERE, SEEDS = Path(__file__).parent, (0, 1, 2)
PROMPTS = ["about the hotel .", "about the old film today ."]
PAIRS = [dict(prompt=p, chosen="it was good .", rejected="it was bad .") for p in PROMPTS] * 8
UNLIKE = "tokens_per_second", "iteration", "steps_per_second", "seconds"  # no numbers of a training


def small_lm(seed, **changes):
    size = dict(n_layer=1, n_embd=16, n_head=2) | changes
    return make_gpt2("tiny", len(WORDS), eos_token_id=0, seed=seed, **size)


def reward(prompts, responses): return [float("good" in r) - 0.1 * len(r) for r in responses]


def brevity(prompts, responses):
    return [None if i % 7 == 3 else -len(r) / 20 for i, r in enumerate(responses)]


def reply(prompts, responses):
    return [" the hotel ." if len(r.split()) % 2 else None for r in responses]


def trainer(algo, seed, **options):
    options = dict(iterations=10, seed=seed, batch=16, minibatches=2, max_new_tokens=8,
                   device="cpu", learning_rate=3e-3, adam="tensorflow", adam_eps=1e-5) | options
    model, tokenizer = small_lm(seed), make_tokenizer()
    if algo == "dpo": return DPO(model, tokenizer, PAIRS, **options)
    options = dict(reward=reward) | options
    return RLHF(model, tokenizer, PROMPTS, algo=algo, **options)


def control(seed):
    rows = []
    PPO("CartPole-v1", seed=seed, num_envs=4, num_steps=16, steps=640, hidden=16).learn(
        callback=lambda trainer, row: rows.append(row))
    return rows


LANGUAGE = dict(
    ppo=dict(algo="ppo"), grpo=dict(algo="grpo"), rloo=dict(algo="rloo"), dpo=dict(algo="dpo"),
    dr_grpo=dict(algo="grpo", variant="dr_grpo", microbatches=2),
    parts=dict(algo="ppo", microbatches=4, precision="bfloat16"),
    turns=dict(algo="grpo", environment=reply, max_new_tokens=16),
    lora=dict(algo="grpo", lora=2), lora_ppo=dict(algo="ppo", lora=2, microbatches=2),
    teacher=dict(algo="grpo", teacher=True),
    several=dict(algo="grpo", reward=[(reward, 2.0), brevity], reward_aggregation="normalise"),
    redrawn=dict(algo="grpo", dynamic_sampling=True, prompt_order="epochs",
                 reward=lambda prompts, responses: [float("good" in r) for r in responses]))
TWO = "grpo", "ppo", "dpo"  # with two processes as well


def rows(name, seed):
    if name == "control": return control(seed)
    options = dict(LANGUAGE[name])
    if options.get("teacher"): options["teacher"] = small_lm(seed + 10)
    return trainer(seed=seed, **options).learn().rows


def cells(name, seed, found):
    for row in found:
        for column, x in row.items():
            if column not in UNLIKE and isinstance(x, (int, float)):
                yield name, seed, row["iteration"] if "iteration" in row else row["steps"], \
                    column, f"{x:.9g}"


def write(path, lines):
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def in_two_processes(path, seeds=SEEDS):
    "Rows of trainings in two processes, written by the first of them."
    processes.together(2, f"""
from stored.trainings import two_processes, write
lines = [*two_processes({seeds!r})]
if os.environ["RANK"] == "0": write({str(path)!r}, lines)
""")


def two_processes(seeds):
    for seed in seeds:
        for name in TWO:
            yield from cells(f"two {name}", seed, rows(name, seed))


def interrupted(task, options, after, **own):
    "A run directory whose training was stopped after some iterations."
    import signal

    from rlhf_notes import launch
    from rlhf_notes.training.runs import Run
    name = "own" if own else options.get("algo", task)
    out, log = HERE / f"run_{name}", Run.log
    shutil.rmtree(out, ignore_errors=True)

    def logged(self, *args, **kwargs):
        log(self, *args, **kwargs)
        if len(self.rows) == after: os.kill(os.getpid(), signal.SIGINT)
    Run.log = logged
    try:
        launch.new_training(task, options, out, **own)()
    finally:
        Run.log = log
    for file in [*out.rglob("*")]:
        if file.suffix in (".svg", ".lock", ".md") or "events" in file.name or file.name == ".lock":
            file.unlink()
    for folder in ("policy", "reward_model"):
        shutil.rmtree(out / folder, ignore_errors=True)


def resumed(folder, task, **given):
    "The rows of an interrupted run that is continued; it is changed."
    from rlhf_notes.launch import old_training
    old_training(task, folder, trust=True, **given)()
    with open(folder / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            for column, x in row.items():
                if x and column not in UNLIKE:
                    yield folder.name, 0, row.get("iteration") or row["steps"], column, x


TINY = dict(seed=1, device="cpu", batch=16, minibatches=2, iterations=6)
REVIEWS = TINY | dict(sft_steps=4, labels=16, eval_every=2, eval_responses=8)
RUNS = dict(
    run_ppo=("rlhf", REVIEWS | dict(algo="ppo", microbatches=2, norm_samples=16), {}),
    run_dpo=("rlhf", REVIEWS | dict(algo="dpo"), {}),
    run_own=("rlhf", TINY | dict(algo="grpo", response_length=8, stop_after=0, overlong="keep"),
             dict(prompts="prompts.txt", reward="stored.trainings:reward")),
    run_cartpole=("cartpole", dict(seed=1, num_envs=4, num_steps=16, steps=640, hidden=8), {}))


def generated():
    "What the saved policy said to the prompts."
    return (HERE / "generated.txt").read_text().split("\n")


def files():
    shutil.rmtree(HERE / "model", ignore_errors=True)
    RLHF(small_lm(0, n_embd=8), make_tokenizer()).save(HERE / "model")
    (HERE / "model" / "rlhf.json").unlink()
    (HERE / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    t = PPO("CartPole-v1", seed=0, num_envs=4, num_steps=16, steps=640, hidden=8).learn()
    t.save(HERE / "ppo.pt")
    t = trainer("grpo", 0).learn()
    shutil.rmtree(HERE / "rlhf", ignore_errors=True)
    t.save(HERE / "rlhf")
    (HERE / "generated.txt").write_text("\n".join(RLHF.load(HERE / "rlhf").generate(PROMPTS, 1)))
    os.chdir(HERE)
    for task, options, own in RUNS.values():
        model = dict(model="model") if task == "rlhf" else {}
        interrupted(task, options | model, 3, **own)


def make():
    from tempfile import TemporaryDirectory
    lines = [("training", "seed", "iteration", "column", "value")]
    for name in ("control", *LANGUAGE):
        for seed in SEEDS:
            lines += cells(name, seed, rows(name, seed))
    with TemporaryDirectory() as folder:
        two = Path(folder, "two.csv")
        in_two_processes(two)
        with open(two, newline="") as file: lines += csv.reader(file)
    files()
    with TemporaryDirectory() as folder:
        for name in (*RUNS, "model", "prompts.txt"):
            (shutil.copytree if (HERE / name).is_dir() else shutil.copy)(
                HERE / name, Path(folder, name))
        os.chdir(folder)
        for name, (task, _, own) in RUNS.items():
            lines += resumed(Path(name), task, **own and dict(reward=own["reward"]))
    write(HERE / "rows.csv", lines)


if __name__ == "__main__": make()
