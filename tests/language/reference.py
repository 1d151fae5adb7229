"""Ten iterations of each algorithm with three seeds: what the loop has to go on computing.

    PYTHONPATH=tests python tests/language/reference.py

Writes reference.csv beside it, from today's code: only for a change that is meant to move numbers.
"""
import csv
from pathlib import Path

from rlhf_notes import DPO, RLHF
from rlhf_notes.language.model import make_gpt2
from rlhf_notes.reviews.task import WORDS, make_tokenizer

FILE = Path(__file__).with_name("reference.csv")
ALGORITHMS, SEEDS = ("ppo", "grpo", "rloo", "dpo"), (0, 1, 2)
SHOWN = ("score", "kl_k1", "kl_k3", "kl_coef", "entropy", "policy_loss", "value_loss",
         "clip_fraction", "explained_variance", "grad_norm", "margin", "accuracy")
PROMPTS = ["about the hotel .", "about the old film today ."]
PAIRS = [dict(prompt=p, chosen="it was good .", rejected="it was bad .") for p in PROMPTS] * 8


def trainer(algo, seed, **options):
    model = make_gpt2("tiny", len(WORDS), eos_token_id=0, seed=seed, n_layer=1, n_embd=16, n_head=2)
    options = dict(iterations=10, seed=seed, batch=16, minibatches=2, max_new_tokens=8,
                   device="cpu", learning_rate=3e-3, adam="tensorflow", adam_eps=1e-5) | options

    def reward(prompts, responses): return [float("good" in r) - 0.1 * len(r) for r in responses]
    if algo == "dpo": return DPO(model, make_tokenizer(), PAIRS, **options)
    return RLHF(model, make_tokenizer(), PROMPTS, reward, algo, **options)


def rows(algo, seed, **options):
    found = trainer(algo, seed, **options).learn().rows
    return [dict(algo=algo, seed=seed, iteration=row["iteration"],
                 **{name: row.get(name) for name in SHOWN}) for row in found]


if __name__ == "__main__":
    with open(FILE, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["algo", "seed", "iteration", *SHOWN])
        for algo in ALGORITHMS:
            for seed in SEEDS:
                for row in rows(algo, seed):
                    cells = [f"{x:.9g}" if isinstance(x, float) else x for x in row.values()]
                    writer.writerow(cells)
