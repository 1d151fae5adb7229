"""TRL's GRPO and DPO trainers with a policy loss or a preference loss of ours.

TRL trains with Accelerate: several GPUs, DeepSpeed, FSDP, vLLM. Its trainers have one method for
the loss; these classes replace it and leave the rest as it is.

```python
from rlhf_notes.bridges.trl import grpo_trainer

Trainer = grpo_trainer(variant="gspo")  # with arguments of policy_loss
Trainer(model, reward_funcs=reward, args=GRPOConfig(...), train_dataset=prompts).train()
```

An objective of `register_variant` may ask for entropy, logp_old, logp_ref (with TRL's `beta` above
0) and lengths; TRL shuffles the rows of a batch, so one that asks for `group`, as a mean over
prompts does, is refused. `advantage=f` is that of `RLHF`: f(rewards (P, G), mask) -> (P, G), of the
weighted sum of the rewards, in place of TRL's own.

Temperature, images, tools, vLLM, the reference and the beta of the KL are TRL's. IPO is another
thing there: TRL divides the log-probabilities of a response by its length, the paper's formula and
ours sum them. TRL's options for its own losses mean nothing to ours and are refused by name.

For a mean over tokens TRL counts the tokens of all responses that were sampled together,
`num_items_in_batch`; for the other aggregations each microbatch has the same number of responses,
and one without tokens counts as 0. The same here.
"""

__all__ = ['GRPO_UNREAD', 'DPO_UNREAD', 'OurGRPO', 'grpo_trainer', 'OurDPO', 'dpo_trainer']

from dataclasses import MISSING
from inspect import signature

import torch

from ..checks import told_as
from ..formulas.advantage import advantage_of
from ..formulas.grpo import POLICY_VARIANTS, policy_loss
from ..formulas.masking import masked_mean
from ..formulas.preference import dpo_loss, implicit_reward


try:
    from trl import DPOTrainer, GRPOTrainer
    HOOKS = GRPOTrainer._compute_loss, DPOTrainer._compute_loss
except (ImportError, AttributeError) as e:
    raise ImportError("rlhf_notes.bridges.trl needs trl with GRPOTrainer._compute_loss and "
                      f"DPOTrainer._compute_loss, as 1.16 has them (pip install trl): {e}") from e


class OurGRPO(GRPOTrainer):
    "TRL's GRPO trainer with `policy_loss`; made by `grpo_trainer`."
    variant, arguments, advantage = "grpo", {}, None

    def __init__(self, *args, **kwargs):  # of `trl.GRPOTrainer`
        super().__init__(*args, **kwargs)
        _refuse_unread(self.args, GRPO_UNREAD, "grpo_trainer")
        if self.aux_loss_enabled:
            raise ValueError("output_router_logits of the model must be False for grpo_trainer, "
                             "which has no auxiliary loss of routers, got True")

    def _calculate_rewards(self, *args):
        self._scores = super()._calculate_rewards(*args)  # (rows of all processes, rewards)
        return self._scores

    def _generate_and_score_completions(self, inputs):
        found = super()._generate_and_score_completions(inputs)
        if self.advantage is None: return found
        A, logged = self._own_advantages(), self._logs["advantages"]
        for _ in A:
            logged.pop()  # TRL's own
        logged.extend(A.tolist())
        n, i = len(inputs), self.accelerator.process_index
        return found | dict(advantages=A[i * n:(i + 1) * n])

    def _own_advantages(self):
        "Those of all processes' rows, (P * G,), in which a prompt's lie together."
        G = self.num_generations if self.model.training else self.num_generations_eval
        rewards = (self._scores * self.reward_weights.to(self._scores)).nansum(1).view(-1, G)
        scored = ~self._scores.isnan().all(1).view(-1, G)
        return (advantage_of(self.advantage, rewards, scored) * scored).flatten()

    def _compute_loss(self, model, inputs):
        logp, entropy, mask = self._read(model, inputs)
        old = inputs.get("old_per_token_logps")
        old = logp.detach() if old is None else old
        kl = dict(logp_ref=inputs["ref_per_token_logps"], beta=self.beta,
                  kl_weighted=self.args.use_bias_correction_kl) if self.beta else {}
        given = dict(length=self.max_completion_length, entropy=entropy.detach(), **kl)
        own = given | self.arguments
        mode = own.get("aggregation") or POLICY_VARIANTS[self.variant][0]
        A, weight = inputs["advantages"], inputs.get("importance_sampling_ratio")  # of vLLM
        with told_as(dict(advantage="advantages", weight="importance_sampling_ratio")):
            loss, _ = policy_loss(logp, old, A, mask, self.variant, weight=weight,
                                  total=_total(self, inputs, mode), **own)

        def measure(where):
            options = own | dict(aggregation="token-mean")
            return policy_loss(logp.detach(), old, A, mask & where, self.variant, **options)[1]

        means, sign = {"entropy": masked_mean(entropy.detach(), mask)}, A.reshape(len(A), -1).sign()
        for name, where in dict(region=mask, low=sign < 0, high=sign > 0).items():
            share = masked_mean((mask & where).float(), mask)
            if (held := measure(where).get("clip_fraction")) is not None:
                means[f"clip_ratio/{name}_mean"] = held * share
        if self.beta:
            means["kl"] = measure(mask)["kl"]
        _log(self, means, mask.sum())
        return loss

    def _read(self, model, inputs):
        "log pi and entropy of the tokens, and which of them count."
        mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        read = self._get_per_token_logps_and_entropies
        extra = {k: inputs[k] for k in signature(read).parameters if k in inputs}  # of images
        ids, attention = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1)
                          for x in ("ids", "mask"))
        logp, entropy, _ = read(model, ids, attention, mask.shape[1], compute_entropy=True, **extra)
        return logp, entropy, mask


def grpo_trainer(
    variant: str = "grpo",  # one of `POLICY_VARIANTS`
    advantage=None,  # f(rewards (P, G), mask (P, G) bool) -> (P, G), in place of TRL's
    **arguments,  # of `policy_loss`: eps_low, eps_high, dual_clip, tau, aggregation, length
) -> type:  # a subclass of `trl.GRPOTrainer`
    "TRL's GRPO trainer with a policy loss of ours; the KL's `beta` stays an option of TRL."
    if other := arguments.keys() - set("eps_low eps_high dual_clip tau aggregation length".split()):
        raise TypeError("grpo_trainer must get eps_low, eps_high, dual_clip, tau, aggregation or "
                        f"length, got {', '.join(sorted(other))}: TRL has the rest")
    if not (advantage is None or callable(advantage)):
        raise TypeError(f"advantage must be a function or None, got {advantage!r}")
    zero = torch.zeros(1, 1)  # for its errors, at once
    policy_loss(zero, zero, zero, variant=variant, logp_ref=zero, entropy=zero, **arguments)
    own = advantage if advantage is None else staticmethod(advantage)
    return type("OurGRPO", (OurGRPO,), dict(variant=variant, arguments=arguments, advantage=own))


class OurDPO(DPOTrainer):
    "TRL's DPO trainer with `dpo_loss`; made by `dpo_trainer`."
    kind = "sigmoid"

    def __init__(self, *args, **kwargs):  # of `trl.DPOTrainer`
        super().__init__(*args, **kwargs)
        _refuse_unread(self.args, DPO_UNREAD, "dpo_trainer")

    def _compute_loss(self, model, inputs, return_outputs=False):
        if return_outputs:
            raise ValueError("compute_metrics must be None for dpo_trainer, which keeps no outputs")
        ours = {"completion_mask", "ref_chosen_logps", "ref_rejected_logps"}
        texts = {k: x for k, x in inputs.items() if k not in ours}
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        out = model(**texts, labels=labels, use_cache=False, fused_lm_head=True)
        logp = out.log_probs[:, 1 - labels.shape[1]:].sum(1).chunk(2)
        if self.precompute_ref_logps:
            ref = inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
        else:
            ref = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
        rewards = [implicit_reward(x, y, self.beta) for x, y in zip(logp, ref)]
        margin = rewards[0] - rewards[1]
        found = {"rewards/chosen": rewards[0], "rewards/rejected": rewards[1],
                 "rewards/margins": margin, "rewards/accuracies": (margin > 0).float(),
                 "logps/chosen": logp[0].detach(), "logps/rejected": logp[1].detach()}
        _log(self, {name: x.mean() for name, x in found.items()}, logp[0].new_tensor(len(margin)))
        return dpo_loss(*logp, *ref, self.beta, self.label_smoothing, self.kind)


def dpo_trainer(
    kind: str = "sigmoid",  # one of `DPO_KINDS`
) -> type:  # a subclass of `trl.DPOTrainer`
    "TRL's DPO trainer with a preference loss of ours."
    dpo_loss(*torch.zeros(4, 1), kind=kind)  # its error, at once
    return type("OurDPO", (OurDPO,), dict(kind=kind))


def _total(trainer, inputs, aggregation):
    "`total` of `policy_loss` for a microbatch, so that a step has the loss of its batch."
    training = trainer.model.training
    parts = trainer.current_gradient_accumulation_steps if training else 1
    if aggregation != "token-mean": return len(inputs["completion_mask"]) * parts
    of_all = trainer.args.steps_per_generation if training else 1  # whose tokens were counted
    return inputs["num_items_in_batch"] * parts / (trainer.accelerator.num_processes * of_all)


def _log(trainer, means, n):
    "Means over n tokens or pairs of this process become those over all processes."
    parts = torch.stack([*(x * n for x in means.values()), n])
    *sums, n = trainer.accelerator.reduce(parts, reduction="sum").tolist()
    for name, x in zip(means, sums):
        trainer._metrics["train" if trainer.model.training else "eval"][name].append(x / max(n, 1))


GRPO_UNREAD = ("loss_type epsilon epsilon_high delta sapo_temperature_pos sapo_temperature_neg "
               "importance_sampling_level top_entropy_quantile off_policy_mask_threshold "
               "entropy_coef use_adaptive_entropy use_liger_kernel")
DPO_UNREAD = "loss_type loss_weights f_divergence_type ld_alpha use_weighting use_liger_kernel"


def _refuse_unread(args, options, instead):
    "ValueError names an option of TRL that our loss does not read, unless it is at its default."
    for name in options.split():
        field, given = type(args).__dataclass_fields__[name], getattr(args, name)
        usual = field.default if field.default is not MISSING else field.default_factory()
        if given != usual:
            raise ValueError(f"{name} must be left at {usual!r}, as TRL's own losses alone read "
                             f"it, got {given!r}: {instead} takes the options of ours")
