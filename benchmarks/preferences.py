"""The human's approval against KL: PPO, GRPO, RLOO, DPO and the best of n, from the same choices.

    python benchmarks/preferences.py

Appends to nbs/studies/results/preferences.csv: for each seed and method a row for each look during
the training (step = iteration) or for each n (step = n), on held-out prompts. Pretraining and the
reward model are made once for each seed. Rows that are there are not made again.
`nbs/studies/41_preferences.ipynb` says what came of it.
"""

import torch
from jobs import RESULTS, names_of, options, read, text, write

from rlhf_notes.formulas.masking import masked_sum
from rlhf_notes.language.dpo import DPOLoop
from rlhf_notes.reviews.config import ReviewsConfig, dpo_config
from rlhf_notes.reviews.pipeline import evaluate
from rlhf_notes.reviews.reward_model import choices_of
from rlhf_notes.reviews.task import HELD_OUT
from rlhf_notes.studies.variants import best_of_n, prepare

selection_kl = names_of(RESULTS.parent / "41_preferences.ipynb", "imports",
                        "selection-kl")["selection_kl"]
COLUMNS = ("seed", "method", "step", "true", "kl", "proxy", "valid", "win")
METHODS, NS = ("PPO", "GRPO", "RLOO", "DPO"), (1, 2, 4, 8, 16, 32, 64)
# chosen on seeds 100 and 101; at the other methods' batch some seeds leave the reference at once
DPO_OPTIONS = dict(batch=256, minibatches=1, learning_rate=2e-3)


def curve(start, method, every=5):
    "Train, and look at the policy on the way: the same prompts for every method."
    look = start.trainer()
    before = evaluate(look, start.lm)
    if method == "DPO":
        config = dpo_config(start.config, **DPO_OPTIONS)
        choices = choices_of(config, start.lm, start.task)
        trainer = DPOLoop(config, start.lm, start.task, choices)
    else:
        trainer = start.trainer(algo=method.lower())
    while trainer.iteration < trainer.iterations:
        trainer.iterate()
        if trainer.iteration % every == 0:
            found = evaluate(look, trainer.policy.lm)
            yield dict(step=trainer.iteration, **found.worth(before))


def best_of_n_curve(start, rounds=128, ns=NS):
    "The best of n responses of the pretrained model, by the reward model's score."
    look = start.trainer(eval_responses=len(HELD_OUT))
    seen = [evaluate(look, start.lm, seed=seed) for seed in range(rounds)]
    def stack(value): return torch.stack([value(e) for e in seen], 1).cpu()
    logp = stack(lambda e: masked_sum(e.rollout.logp, e.rollout.response_mask, 1))
    proxy = stack(lambda e: e.rollout.scores)
    found = dict(proxy=proxy, true=stack(lambda e: e.true),
                 valid=stack(lambda e: e.rollout.has_end.float()))
    for n in ns:
        row = {name: best_of_n(proxy, x, n).mean().item() for name, x in found.items()}
        yield dict(step=n, kl=selection_kl(proxy, logp, n).mean().item(), **row)


def main():
    args = options(__doc__, RESULTS / "preferences.csv", 10)
    torch.set_num_threads(1)
    rows = [] if args.fresh else read(args.out, COLUMNS)
    done = {(int(seed), method) for seed, method, *_ in rows}
    for seed in args.seeds:
        todo = [m for m in ("best of n", *METHODS) if (seed, m) not in done]
        if not todo: continue
        start = prepare(ReviewsConfig(seed=seed, device="cpu", eval_responses=512))
        for method in todo:
            found = best_of_n_curve(start) if method == "best of n" else curve(start, method)
            rows += [[text((dict(seed=seed, method=method) | row).get(c)) for c in COLUMNS]
                     for row in found]
            write(args.out, COLUMNS, rows)
            print(dict(zip(COLUMNS, rows[-1])), flush=True)


if __name__ == "__main__": main()
