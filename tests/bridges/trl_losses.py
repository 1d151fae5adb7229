"TRL's losses beside ours in its trainers, on batches of a tiny model; needs TRL."

from contextlib import contextmanager
from unittest.mock import patch

import torch
from bridges.agreement import SEEDS
from bridges.trl_parts import dpo, grpo, save_tiny
from trl import DPOTrainer, GRPOTrainer

from rlhf_notes.bridges.trl import dpo_trainer, grpo_trainer

LOSSES = {  # ours -> TRL's loss_type and options
    "ppo": ("bnpo", {}),
    "grpo": ("grpo", {}),
    "dr_grpo": ("dr_grpo", {}),
    "dapo": ("dapo", dict(epsilon_high=0.28)),
    "gspo": (
        "grpo",
        dict(importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
    ),
    "cispo": ("cispo", dict(epsilon_high=5.0)),  # TRL's bound is ours plus 1
    "sapo": ("sapo", {}),
}
KINDS = "sigmoid", "ipo", "apo_zero", "apo_down", "robust"  # of DPO, the same names in TRL
CASES = {"grpo": ("plain", "parts", "weights"), "dpo": ("plain", "smoothing")}
SMOOTHED = "sigmoid", "ipo", "robust"  # the kinds of ours that read label_smoothing
KNOWN = {  # (ours, case) -> why value or gradient differ by more than rounding
    ("gspo", "kl"): "TRL multiplies its KL by the ratio of the response, we by a token's",
    ("ppo", "parts"): "TRL's bnpo divides by the tokens of the microbatch, we by the batch's",
    ("ipo", "plain"): "TRL's ipo divides by the length of each response, we sum its tokens",
    ("ipo", "smoothing"): "TRL's ipo divides by the length and reads no label_smoothing",
    ("sigmoid", "smoothing"): "TRL's sigmoid reads no label_smoothing",
}


def inputs(seed, B=8, P=3, T=6):
    "A batch as `_generate_and_score_completions` makes it."
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=g)
    lengths = torch.randint(1, T + 1, (B, 1), generator=g)
    return dict(
        prompt_ids=(rand(B, P) * 40 + 2).long(),
        prompt_mask=torch.ones(B, P).long(),
        completion_ids=(rand(B, T) * 40 + 2).long(),
        completion_mask=(torch.arange(T) < lengths).long(),
        advantages=torch.randn(B, generator=g),
        old_per_token_logps=rand(B, T) - 4.2,
        ref_per_token_logps=rand(B, T) - 4.2,
        num_items_in_batch=lengths.sum(),
    )


def pairs(seed, B=8, P=3, T=6):
    "A batch of DPO: the chosen responses, then the rejected ones, of many lengths."
    x = inputs(seed, 2 * B, P, T)
    mask = torch.cat([x["prompt_mask"], x["completion_mask"]], 1)
    g = torch.Generator().manual_seed(seed)
    return dict(
        input_ids=torch.cat([x["prompt_ids"], x["completion_ids"]], 1),
        attention_mask=mask,
        completion_mask=mask * (torch.arange(P + T) >= P),
        ref_chosen_logps=-20 * torch.rand(B, generator=g),
        ref_rejected_logps=-20 * torch.rand(B, generator=g),
    )


def trainers(path, out):
    "One of GRPO and one of DPO, ready to compute a loss."
    made = dict(
        grpo=grpo(grpo_trainer(), path, out, beta=0.1),
        dpo=dpo(dpo_trainer(), path, out, beta=0.3, bf16=False),
    )
    for trainer in made.values():
        trainer.current_gradient_accumulation_steps = 1
        trainer.precompute_ref_logps = True  # they stand in the batch
        trainer.model.train()
    return made


def both(trainer, losses, x):
    "[(loss, gradient, metrics)] of each `_compute_loss`."
    found = []
    for loss in losses:
        trainer._metrics["train"].clear()
        trainer.model.zero_grad()
        value = loss(trainer, trainer.model, dict(x))
        value.backward()
        grads = [p.grad.flatten() for p in trainer.model.parameters()]
        metrics = {k: v[0] for k, v in trainer._metrics["train"].items()}
        found.append((value.detach(), torch.cat(grads), metrics))
    return found


@contextmanager
def put(thing, **attributes):
    "Attributes of a trainer or a class, for a while."
    with patch.multiple(thing, create=True, **attributes):
        yield


def of_grpo(trainer, variant, x, **arguments):
    "`both` for a variant, and for TRL's loss with the options that mean the same."
    loss_type, options = LOSSES[variant]
    usual = dict(epsilon_low=0.2, epsilon_high=0.2, importance_sampling_level="token")
    with (
        put(type(trainer), variant=variant, arguments=arguments),
        put(trainer, loss_type=loss_type, **usual | options),
    ):
        return both(trainer, (type(trainer)._compute_loss, GRPOTrainer._compute_loss), x)


def of_dpo(trainer, kind, x, smoothing):
    "`both` for a kind of DPO."
    theirs = lambda *args: DPOTrainer._compute_loss(*args, return_outputs=False)
    with (
        put(type(trainer), kind=kind),
        put(trainer, loss_types=[kind], label_smoothing=smoothing),
    ):
        return both(trainer, (type(trainer)._compute_loss, theirs), x)


def compare(made, name, case, seed):
    "Differences of value and gradient between ours and TRL's."
    if name in KINDS:
        found = of_dpo(made["dpo"], name, pairs(seed), 0.2 if case == "smoothing" else 0.0)
    else:
        trainer, x = made["grpo"], inputs(seed)
        parts, weights = case == "parts", case == "weights"
        if parts:  # a quarter of the batch: one of two microbatches on one of two processes
            x["num_items_in_batch"] = x["num_items_in_batch"] * 4 + 9
        if weights:
            g = torch.Generator().manual_seed(seed)
            x["importance_sampling_ratio"] = torch.rand(8, 6, generator=g) + 0.5
        n = 1 + parts
        with (
            put(type(trainer.accelerator), num_processes=n),
            put(
                trainer.args,
                steps_per_generation=n,
                use_bias_correction_kl=name != "gspo" or case == "kl",
            ),
            put(
                trainer,
                current_gradient_accumulation_steps=n,
                use_vllm=weights,
                vllm_importance_sampling_correction=weights,
            ),
        ):
            found = of_grpo(trainer, name, x)
    ours, theirs = found
    return tuple((a - b).abs().max().item() for a, b in zip(ours[:2], theirs[:2]))


def worst(made, name, case):
    return torch.tensor([compare(made, name, case, seed) for seed in SEEDS]).amax(0).tolist()


def cells():
    "(name of ours, TRL's, case) of the table."
    for name, (theirs, options) in LOSSES.items():
        level = ", sequence" if "importance_sampling_level" in options else ""
        cases = CASES["grpo"] + (("kl",) if level else ())
        yield from ((name, theirs + level, case) for case in cases)
    for kind in KINDS:
        yield from ((kind, kind, case) for case in CASES["dpo"][: 1 + (kind in SMOOTHED)])

