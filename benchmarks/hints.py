"""A policy that is told a right response, or that gets a reward for one: equal responses.

    python benchmarks/hints.py                        # ten seeds
    python benchmarks/hints.py --first 100 --seeds 3  # the learning rates

Appends to nbs/formulas/results/hints.csv: the digits of lesson 40, for each seed, way and learning
rate the mean score of the rollouts, the exact match and the pass@8 of 32 responses to each held-out
prompt, after 0, 10 and 30 rollouts of 256 responses. `sibling` is `RLHF(hint=)` told a right
response to the same prompt, where the rollout has one: it knows what GRPO's reward knows. The
pretrained model has read texts that repeat what was said after the prompt, so that it can take a
hint. Seeds from 100 on try all rates; the others learn at lesson 40's, and at the best of each way.
A run that was stopped goes on with the first seed that is missing.
"""
import random

import torch
from jobs import RESULTS, by_seed, options, text
from torch import nn

from rlhf_notes.language.model import make_gpt2
from rlhf_notes.reviews.pretraining import warm_cosine
from rlhf_notes.studies.checkable import (
    DIGITS,
    TOKENS,
    checkable_rlhf,
    digit_tokenizer,
    make_questions,
    measure,
)

COLUMNS = "seed", "way", "rate", "iteration", "score", "pass_1", "pass_8"
WAYS, STOPS = ("grpo", "sibling"), (0, 10, 30)
RATE, RATES = 1e-3, (1e-4, 3e-4, 1e-3, 3e-3)
BEST = dict(grpo=1e-3, sibling=3e-4)


def told(response): return f" {response} ="


def sibling(prompts, responses, solution):
    "A right response to the same prompt, if this rollout has one, to whoever missed it."
    found = {p: r for p, r, s in zip(prompts, responses, solution) if r == s}
    return [told(found[p]) if p in found and r != s else None
            for p, r, s in zip(prompts, responses, solution)]


def wrong(solution, rng):
    "A solution with a random digit, three times in four."
    digits = solution.split()
    if rng.random() < 0.75:
        digits[rng.randrange(len(digits))] = rng.choice(DIGITS)
    return " ".join(digits)


def pretrain(questions, seed, steps=500):
    "A tiny GPT-2 that has read solutions, most of them wrong; half of its texts say them twice."
    rng, lm = random.Random(seed), make_gpt2("tiny", len(TOKENS), eos_token_id=0, seed=seed)
    optimizer, tokenizer = torch.optim.AdamW(lm.parameters()), digit_tokenizer()
    tokenizer.pad_token = "<eos>"
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 5e-3 * warm_cosine(step, steps)
        texts = []
        for q in rng.choices(questions, k=64):
            said = wrong(q["solution"], rng)
            texts.append(f"{q['prompt']}{rng.choice(['', told(said)])} {said} <eos>")
        tokens = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
        optimizer.zero_grad()
        answer_loss(lm, tokens).backward()
        optimizer.step()
    return lm


def answer_loss(lm, tokens):
    "Cross-entropy of what follows the last equals sign, up to the first <eos>."
    to_come = (tokens == TOKENS.index("=")).flip(1).cumsum(1).flip(1) > 0
    over = (tokens == 0).cumsum(1) - (tokens == 0).long() > 0
    targets = tokens.masked_fill(to_come | over, -100)[:, 1:]
    return nn.functional.cross_entropy(lm(tokens).logits[:, :-1].flatten(0, 1), targets.flatten())


def trainer(lm, questions, way, seed, rate=RATE):
    "A training by the reward, or by a hint, with the same prompts and random numbers."
    ways = dict(hint=sibling, kl_coef=None) if way == "sibling" else {}
    return checkable_rlhf(lm, questions, seed=seed, iterations=STOPS[-1], learning_rate=rate,
                          **ways)


def study(seed):
    "Yield the rows of a seed."
    questions = make_questions()
    train, held_out = questions[:3000], questions[3000:3300]
    lm = pretrain(train, seed)
    first = measure(trainer(lm, train, WAYS[0], seed), held_out)[0]
    for way, rate in ((way, rate) for way in WAYS
                      for rate in (RATES if seed >= 100 else sorted({RATE, BEST[way]}))):
        t = trainer(lm, train, way, seed, rate)
        for stop in STOPS:
            rows = [t.iterate() for _ in range(t.iteration, stop)]
            found = measure(t, held_out)[0] if stop else first
            score = sum(r["score"] for r in rows) / len(rows) if rows else None
            yield [text(x) for x in (seed, way, rate, stop, score, found["pass_1"],
                                     found["pass_8"])]


def main():
    args = options(__doc__, RESULTS.parents[1] / "formulas" / "results" / "hints.csv", 10)
    by_seed(study, args, COLUMNS)


if __name__ == "__main__": main()
