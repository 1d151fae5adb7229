"""LoRA's rate and rank, a reference that is renewed, and the clip's upper bound, on the checkable
world.

    python benchmarks/why.py           # twenty minutes of one core

Appends to nbs/results/why.csv, for each study, choice, value and seed: the share of right responses
to held-out prompts before the training and after it; the entropy of a token, mean over the last ten
iterations; the nats of a response from the first policy, in the last iteration.
    rate       Adam's learning rate for LoRA of rank 8; "" = the default
    reference  iterations after which the policy becomes its own reference; 0 = never, "" = no KL
    rank       the default rate for LoRA ("") at ranks and alphas
    clip       clip_high, without a KL
"""
import copy
import re
from functools import cache

import torch
from jobs import RESULTS, options, resume, right, text
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from rlhf_notes.formulas.masking import masked_sum
from rlhf_notes.studies.checkable import (
    TOKENS,
    checkable_rlhf,
    exact_match,
    make_questions,
    pretrain,
)
from rlhf_notes.training.seeds import global_seed

COLUMNS = "study", "choice", "value", "seed", "start", "right", "entropy", "kl"
SHAPE = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=len(TOKENS), eos_token_id=0, pad_token_id=None)
KINDS = {"GPT-2": None, "Llama": LlamaConfig, "Qwen2": Qwen2Config}
BASE = dict(batch=128, group=8, iterations=40)
STUDIES = {
    "rate": [(kind, rate, dict(lora=8, learning_rate=rate)) for kind in KINDS
             for rate in (None, 1e-3, 1e-2, 3e-2) if rate is None or kind != "GPT-2"],
    "reference": [("GPT-2", every, dict(kl_coef=coef, kl_target=0.0))
                  for every, coef in ((0, 0.2), (10, 0.2), (None, 0.0))],
    "rank": [(f"rank {rank}, alpha {alpha}", None, dict(lora=rank))
             for rank in (1, 8, 64) for alpha in sorted({2 * rank, 16})],
    "clip": [("GPT-2", high, dict(clip_high=high, kl_coef=0.0)) for high in (0.2, 0.28, 1.0)]}
SEEDS = {"rate": 5}


@cache
def started(kind, seed):
    "A model that is right once in four."
    lm = None
    if KINDS[kind]:
        with global_seed(seed):
            lm = AutoModelForCausalLM.from_config(KINDS[kind](**SHAPE))
    return pretrain(make_questions()[:3000], seed, 300, lm)


def adapted(lm, choice, seed):
    "With an adapter of the rank and the alpha that a choice names."
    rank, alpha = map(int, re.findall(r"\d+", choice))
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear",
                        task_type="CAUSAL_LM")
    with global_seed(seed): return get_peft_model(lm, config)


def nats(trainer, start):
    "Mean nats of the last responses from the first policy."
    x, loop = trainer.rollout, trainer.loop
    if not trainer.config.lora: loop.reference.load_state_dict(start)
    logp = loop.reference_logp(x.tokens, x.mask, x.response_mask)
    return masked_sum(x.logp - logp, x.response_mask, dim=1).mean().item()


def run(study, choice, value, seed):
    torch.set_num_threads(1)
    changes = next(c for kind, v, c in STUDIES[study] if (kind, text(v)) == (choice, value))
    kind = choice if choice in KINDS else "GPT-2"
    questions, lm = make_questions(), copy.deepcopy(started(kind, seed))
    start = copy.deepcopy(lm.state_dict())
    if study == "rank": lm = adapted(lm, choice, seed)
    trainer = checkable_rlhf(lm, questions[:3000], seed=seed, **BASE | changes)
    before, _ = right(trainer, questions[3000:3300], exact_of, n=2)
    while trainer.left:
        trainer.iterate()
        every = value if study == "reference" else 0
        if every and trainer.loop.iteration % every == 0 and trainer.left:
            trainer.loop.reference.load_state_dict(trainer.policy.lm.state_dict())
    after, _ = right(trainer, questions[3000:3300], exact_of, n=2)
    entropy = sum(row["entropy"] for row in trainer.rows[-10:]) / 10
    return [text(x) for x in (study, choice, value, seed, before, after, entropy,
                              nats(trainer, start))]


def exact_of(responses, solution): return exact_match(None, responses, solution)


def main():
    args = options(__doc__, RESULTS.parents[1] / "results" / "why.csv", 10, STUDIES)
    jobs = [(study, kind, text(value), seed) for study in args.only
            for seed in list(args.seeds)[:SEEDS.get(study)] for kind, value, _ in STUDIES[study]]
    resume(run, jobs, args, COLUMNS, seconds=9)


if __name__ == "__main__": main()
