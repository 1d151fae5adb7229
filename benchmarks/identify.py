"""Reads losses, advantages, KL estimates and reductions of other libraries with `identify`.

    python benchmarks/identify.py --packages DIR   # a minute; DIR holds the unpacked wheels

Writes nbs/studies/results/identify.csv: what each function is, the numbers, findings, cautions.
The libraries want CUDA, Ray or other versions of each other. Their functions of tensors want
nothing of that: each is taken from its file with what it calls, and runs without the rest; a
method gets an object that has what it reads. The wheels come from `pip download --no-deps`; TRL and
stable-baselines3 are those that are installed. A column says what was found by hand where there is
a finding: `wrong`, or `on purpose`.
"""
import argparse
import ast
import builtins
import importlib
import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from jobs import RESULTS, write

from rlhf_notes import identify

COLUMNS = ("library", "version", "function", "kind", "formula", "facts", "findings", "by_hand",
           "cautions")


class Source:
    "A module of a library: a name is executed, with what it needs, when it is asked for."
    known = {}

    def __init__(self, name):
        self._name, self._path = name, locate(name)
        tree = ast.parse(self._path.read_text(encoding="utf-8"))
        self._nodes, self._values = {}, {"__name__": name}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for a in node.names:
                    self._nodes.setdefault((a.asname or a.name).split(".")[0], node)
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)): self._nodes[node.name] = node
            if isinstance(node, ast.ClassDef):  # a method, without its class
                self._nodes |= {f"{node.name}.{m.name}": m for m in node.body
                                if isinstance(m, ast.FunctionDef)}
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._nodes[node.targets[0].id] = node

    def __getattr__(self, name):
        if name not in self._values:
            if name not in self._nodes: raise AttributeError(name)
            self._values[name] = None
            self._values[name] = self._made(self._nodes[name], name)
        return self._values[name]

    def _made(self, node, name):
        if isinstance(node, ast.ImportFrom): return self._imported(node, name)
        if isinstance(node, ast.Import):
            alias = next(a for a in node.names if (a.asname or a.name).split(".")[0] == name)
            whole = alias.name if alias.asname else alias.name.split(".")[0]
            return source(whole) if self._is_own(whole) else outside(whole)
        node = ast.parse(ast.unparse(node)).body[0]
        for part in ast.walk(node):
            if isinstance(part, (ast.FunctionDef, ast.ClassDef)):
                part.decorator_list = [d for d in part.decorator_list if ast.unparse(d).startswith(
                    ("dataclass", "staticmethod", "classmethod", "property", "torch.no_grad"))]
            if isinstance(part, ast.FunctionDef):
                part.returns = None
                for a in part.args.args + part.args.kwonlyargs: a.annotation = None
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and not hasattr(builtins, part.id):
                try: getattr(self, part.id)
                except AttributeError: pass
        exec(compile(ast.Module([node], []), str(self._path), "exec"), self._values)
        return self._values[getattr(node, "name", name)]

    def _imported(self, node, name):
        real = next(a.name for a in node.names if (a.asname or a.name) == name)
        parts = self._name.split(".") + ["__init__"] * (self._path.stem == "__init__")
        base = parts[:-node.level] if node.level else []
        module = ".".join([*base, *filter(None, [node.module])])
        if not self._is_own(module):
            return getattr(outside(module), real, None) or stand_in(real)
        if locate(f"{module}.{real}"): return source(f"{module}.{real}")
        if locate(module):
            try: return getattr(source(module), real)
            except AttributeError: return stand_in(real)
        return stand_in(real)

    def _is_own(self, module): return module.split(".")[0] == self._name.split(".")[0]


def stand_in(name): return type(name, (), {"__class_getitem__": classmethod(lambda c, x: c)})


def outside(name):
    "A module that is installed here, or a stand-in."
    try: return importlib.import_module(name)
    except ImportError: return stand_in(name)


def source(name): return Source.known.setdefault(name, None) or Source.known.update(
    {name: Source(name)}) or Source.known[name]


def locate(name):
    "The file of a module among the packages, or None."
    for root in ROOTS:
        path = root.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists(): return file


ROOTS = []
CORE, SKY = "verl.trainer.ppo.core_algos", "skyrl.backends.skyrl_train.utils.ppo_utils"
VF, LOSS, UTILS = "verl.utils.torch_functional", "openrlhf.models.loss", "openrlhf.models.utils"
AREAL, TUNE = "areal.utils.functional.functional", "torchtune.rlhf"
TRINITY, SWIFT = "trinity.algorithm.policy_loss_fn", "swift.rlhf_trainers.grpo_trainer"


class Config(SimpleNamespace):
    "The options that these functions read."
    def get(self, name, default=None): return getattr(self, name, default)


VERL = Config(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, clip_ratio_c=3.0,
              global_batch_info={}, tau_pos=1.0, tau_neg=1.05)
SKYRL = Config(policy_loss_type="regular", eps_clip_low=0.2, eps_clip_high=0.28, clip_ratio_c=3.0,
               off_policy_correction=None, max_seq_len=64, value_clip=0.2,
               sapo=Config(tau_pos=1.0, tau_neg=1.05), loss_reduction="sequence_mean",
               cispo=Config(cispo_eps_clip_low=0.2, cispo_eps_clip_high=0.28))


def with_config(config): return dict(options=dict(config=config))


def ding(error):
    "Discrete actions: the log-probabilities go in as logits of one action and the rest."
    def loss(logp, logp_old, adv, weight_mask, clip_ratio=0.2, dual_clip=3.0):
        new, old = (torch.stack([x, torch.log1p(-x.exp())], -1) for x in (logp, logp_old))
        data = new, old, torch.zeros_like(logp).long(), adv, weight_mask
        return error(data, clip_ratio=clip_ratio, dual_clip=dual_clip)[0].policy_loss
    return loss


def ding_continuous(error, sigma=0.05):
    "Gaussian actions: the mean lies where the density of the action 0 is the one asked for."
    top = -math.log(sigma) - 0.5 * math.log(2 * math.pi)
    def loss(logp, logp_old, adv, clip_ratio=0.2, dual_clip=3.0):
        def gauss(x):
            mu = sigma * (2 * (top - x)).sqrt()[..., None]
            return dict(mu=mu, sigma=torch.full_like(mu, sigma))
        data = gauss(logp), gauss(logp_old), torch.zeros_like(logp)[..., None], adv, None
        return error(data, clip_ratio=clip_ratio, dual_clip=dual_clip)[0].policy_loss
    return loss


def ding_gae(gae):
    def advantages(value, next_values, reward, done, gamma=0.99, lambda_=0.97):
        return gae((value, next_values, reward, done, None), gamma, lambda_)
    return advantages


def tianshou(gae):
    def advantages(values, next_values, rewards, dones, gamma=0.99, gae_lambda=0.95):
        parts = (x.numpy() for x in (values, next_values, rewards, dones))
        return torch.as_tensor(gae(*parts, gamma, gae_lambda))
    return advantages


def called(f):
    "A policy loss of Trinity-RFT, whose `__call__` hides its parameters."
    def loss(logprob, old_logprob, action_mask, advantages):
        return type(f).__call__(f, logprob, old_logprob, action_mask, advantages)
    return loss


def trl(level="token", high=0.28, **options):
    "A trainer's `_compute_loss`, with a trainer that knows the log-probabilities."
    def around(method):
        def loss(per_token_logps, old_per_token_logps, ref_per_token_logps, advantages,
                 completion_mask, epsilon=0.2, epsilon_high=high, beta=0.04):
            trainer, some = MagicMock(), torch.zeros_like(per_token_logps)
            mask, ids = completion_mask, some.long()
            for name, value in dict(
                    top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=beta,
                    epsilon_low=epsilon, epsilon_high=epsilon_high, importance_sampling_level=level,
                    use_vllm=False, current_gradient_accumulation_steps=1, aux_loss_enabled=False,
                    max_completion_length=20, _entropy_bonus_enabled=False, **options).items():
                setattr(trainer, name, value)
            trainer.args = MagicMock(delta=None, use_bias_correction_kl=False, top_k=0,
                                     sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
                                     steps_per_generation=1)
            trainer.accelerator.num_processes = 1
            trainer.accelerator.gather = trainer.accelerator.reduce = lambda x, **_: x
            trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
                per_token_logps, some, None)
            return method(trainer, None, dict(
                prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=mask,
                old_per_token_logps=old_per_token_logps, old_logps=old_per_token_logps,
                ref_per_token_logps=ref_per_token_logps, advantages=advantages,
                num_items_in_batch=mask.sum()))
        return loss
    return around


def sb3(method):
    "A rollout buffer's `compute_returns_and_advantage`, with a buffer of these arrays."
    def advantages(rewards, values, episode_starts, last_values, dones, gamma=0.99,
                   gae_lambda=0.95):
        buffer = SimpleNamespace(
            rewards=rewards.numpy(), values=values.numpy(), buffer_size=len(rewards), gamma=gamma,
            episode_starts=episode_starts.numpy(), gae_lambda=gae_lambda,
            advantages=rewards.numpy() * 0)
        method(buffer, last_values, dones.numpy())
        return torch.as_tensor(buffer.advantages), torch.as_tensor(buffer.returns)
    return advantages


class Caught:
    "A coefficient that keeps the loss to which its term is added, and asks for no gradient."
    def __init__(self, loss): self.loss = loss
    def __mul__(self, term): return Caught(self.loss * term)
    def __radd__(self, other): return Caught(other + self.loss)
    def backward(self): Caught.last = self.loss
    def item(self): return self.loss.item()


def sb3_train(of):
    "`PPO.train` for one minibatch, with a trainer that knows values and log-probabilities."
    def around(method):
        def train(log_prob, old_log_prob, advantages, values, old_values, returns, clip_range,
                  clip_range_vf):
            trainer = MagicMock(
                n_epochs=1, batch_size=len(advantages), ent_coef=0.0, vf_coef=Caught(0.5),
                clip_range=lambda _: clip_range, clip_range_vf=lambda _: clip_range_vf,
                target_kl=None, normalize_advantage=True, _n_updates=0)
            trainer.policy.evaluate_actions = lambda *_: (values, log_prob, log_prob * 0)
            trainer.policy.log_std = log_prob.detach()
            trainer.rollout_buffer.get = lambda _: [SimpleNamespace(
                actions=log_prob, observations=None, advantages=advantages, returns=returns,
                old_log_prob=old_log_prob, old_values=old_values)]
            trainer.rollout_buffer.values = trainer.rollout_buffer.returns = returns.numpy()
            method(trainer)
            return Caught.last
        def policy_loss(log_prob, old_log_prob, advantages, clip_range=0.2):
            zero = advantages.detach() * 0
            return train(log_prob, old_log_prob, advantages, zero, zero, zero, clip_range, 0.2)
        def value_loss(values, old_values, returns, clip_range_vf=0.2):
            zero = returns.detach() * 0
            return train(zero, zero, zero, values, old_values, returns, 0.2, clip_range_vf)
        return dict(policy=policy_loss, value=value_loss)[of]
    return around


def swift(loss_type, level="token", high=0.28, **options):
    "A trainer's `_compute_loss_and_metrics`, with a trainer that knows the log-probabilities."
    def around(method):
        def loss(per_token_logps, old_per_token_logps, ref_per_token_logps, advantages,
                 completion_mask, epsilon=0.2, epsilon_high=high, beta=0.04):
            trainer = MagicMock()
            for name, value in dict(
                    compute_entropy=False, overlong_filter=False, beta=beta, kl_in_reward=False,
                    rollout_importance_sampling_mode=None, log_rollout_offpolicy_metrics=False,
                    importance_sampling_level=level, _has_teacher=False, loss_type=loss_type,
                    epsilon_low=epsilon, epsilon_high=epsilon_high, tau_pos=1.0, tau_neg=1.05,
                    off_policy_sequence_mask_delta=None, max_completion_length=20,
                    sdar_loss_coef=0, chord_sft_iterator=None, **options).items():
                setattr(trainer, name, value)
            trainer.args = MagicMock(delta=None, top_entropy_quantile=1.0)
            trainer.accelerator.num_processes = 1
            trainer.accelerator.gather_for_metrics = lambda x: x
            trainer._undo_gradient_accumulation_scaling = lambda x: x  # one step
            trainer._get_per_token_logps_and_entropies = lambda *_, **__: (per_token_logps, None)
            return method(trainer, None, {}, SimpleNamespace(
                completion_mask=completion_mask, truncated_mask=completion_mask[:, 0] & False,
                ref_per_token_logps=ref_per_token_logps, advantages=advantages,
                old_per_token_logps=old_per_token_logps, rollout_per_token_logps=None,
                teacher_per_token_logps=None, num_items_in_batch=completion_mask.sum()))[0]
        return loss
    return around


READ = [  # (module, name, keyword arguments of identify, or make= and around=)
    *((CORE, f"compute_policy_loss_{name}", with_config(VERL)) for name in (
        "vanilla", "gspo", "sapo", "cispo", "geo_mean", "dppo_tv", "gpg")),
    (CORE, "compute_value_loss", dict(options=dict(cliprange_value=0.2))),
    *((CORE, f"compute_{name}", {}) for name in (
        "gae_advantage_return", "grpo_outcome_advantage", "rloo_outcome_advantage")),
    *((CORE, "agg_loss", dict(kind="aggregate", options=dict(loss_agg_mode=mode))) for mode in (
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")),
    *((CORE, "kl_penalty", dict(options=dict(kl_penalty=kind)))
      for kind in ("kl", "mse", "low_var_kl")),
    (VF, "logprobs_from_logits_naive", {}), (VF, "entropy_from_logits", {}),
    (VF, "masked_mean", {}), (VF, "masked_whiten", {}),
    (LOSS, "PolicyLoss", {}), (LOSS, "ValueLoss", {}), (LOSS, "DPOLoss", dict(make=dict(beta=0.1))),
    (LOSS, "PairWiseLoss", {}), (UTILS, "compute_approx_kl", {}),
    (UTILS, "log_probs_from_logits", {}), (UTILS, "masked_mean", {}),
    (UTILS, "compute_entropy", {}),
    (f"{TUNE}.loss.ppo", "PPOLoss", {}), (f"{TUNE}.loss.dpo", "DPOLoss", {}),
    (f"{TUNE}.rewards", "estimate_advantages", {}), (f"{TUNE}.rewards", "whiten", {}),
    (f"{TUNE}.rewards", "masked_mean", {}),
    ("ding.rl_utils.ppo", "ppo_policy_error", dict(around=ding)),
    ("ding.rl_utils.ppo", "ppo_policy_error_continuous", dict(around=ding_continuous)),
    ("ding.rl_utils.gae", "gae", dict(around=ding_gae)),
    *((SKY, name, with_config(SKYRL)) for name in (
        "ppo_policy_loss", "gspo_policy_loss", "sapo_policy_loss", "compute_policy_loss_cispo",
        "ppo_critic_loss")),
    *((SKY, name, {}) for name in (
        "compute_approx_kl", "masked_whiten", "compute_gae_advantage_return",
        "compute_grpo_outcome_advantage", "compute_rloo_outcome_advantage",
        "compute_maxrl_advantage")),
    (AREAL, "ppo_actor_loss_fn", dict(names={"proximal_logprobs": "logp_old",
                                             "old_logprobs": "logp_rollout"})),
    (AREAL, "sapo_loss_fn", {}), (AREAL, "ppo_critic_loss_fn", {}),
    ("tinker_cookbook.preference.train_dpo", "compute_dpo_loss", {}),
    ("torchrl.objectives.value.functional", "generalized_advantage_estimate", {}),
    ("tianshou.algorithm.algorithm_base", "_gae", dict(around=tianshou)),
    (f"{TRINITY}.ppo_policy_loss", "PPOPolicyLossFn",
     dict(make=dict(clip_range=0.2), around=called)),
    (f"{TRINITY}.gspo_policy_loss", "GSPOLossFn",
     dict(make=dict(clip_range_low=3e-4, clip_range_high=4e-4), around=called)),
    ("trl.trainer.utils", "selective_log_softmax", {}),
    ("trl.trainer.utils", "entropy_from_logits", {}),
    *(("trl.trainer.grpo_trainer", "GRPOTrainer._compute_loss",
       dict(around=trl(loss_type=kind, high=5.0 if kind == "cispo" else 0.28), mode=kind))
      for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")),
    ("trl.trainer.grpo_trainer", "GRPOTrainer._compute_loss",
     dict(around=trl("sequence", loss_type="grpo"), mode="sequence")),
    ("trl.trainer.grpo_trainer", "GRPOTrainer._compute_loss",
     dict(around=trl("sequence", loss_type="luspo"), mode="luspo, sequence")),
    ("stable_baselines3.common.buffers", "RolloutBuffer.compute_returns_and_advantage",
     dict(around=sb3)),
    *(("stable_baselines3.ppo.ppo", "PPO.train", dict(around=sb3_train(of), mode=of))
      for of in ("policy", "value")),
    *((SWIFT, "GRPOTrainer._compute_loss_and_metrics",
       dict(around=swift(kind, high=5.0 if kind == "cispo" else 0.28), mode=kind))
      for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")),
    *((SWIFT, "GRPOTrainer._compute_loss_and_metrics",
       dict(around=swift("grpo", level), mode=level)) for level in ("sequence", "sequence_token")),
]
UNUSED = "on purpose: one signature for all estimators"
BY_HAND = {  # (function, finding) -> what a reading of the source says
    ("compute_policy_loss_geo_mean", "aggregation"): "on purpose: documented as not used",
    ("compute_policy_loss_gpg", "ratio-constant"): "on purpose: a policy gradient without a ratio",
    ("compute_rloo_outcome_advantage", "option-without-effect"): UNUSED,
    ("log_probs_from_logits", "in-place"): "side effect: logits.div_ if the temperature is not 1",
    ("whiten", "baseline"): "wrong: shift_mean is the wrong way round",
    ("estimate_advantages", "baseline"): "wrong: whitened by that function",
    ("estimate_advantages", "mask-leak"): "on purpose: the recipe zeroes the padding before",
    ("compute_gae_advantage_return", "mask-leak"):
        "stands: nothing on the way to it sets the values in the padding to 0",
    ("ppo_policy_error_continuous", "dual-clip-side"): "wrong: for A > 0 too",
    **{(f"GRPOTrainer.{name}", "option-without-effect"): "on purpose: CISPO has no lower bound, "
       "SAPO none" for name in ("_compute_loss", "_compute_loss_and_metrics")},
    ("PPO.train", "no-min"): "stands: the clipped error alone, not the larger, and off by default",
    ("_gae", "bootstrap-past-end"): "on purpose: its caller sets V after an end to 0",
    ("gae", "in-place"): "side effect: next_value *= 1 - done",
}


def version(package):
    "Of the unpacked wheel, or of what is installed."
    for root in ROOTS:
        found = [*root.glob(f"{package}-*.dist-info"),
                 *root.glob(f"{NAMES.get(package)}-*.dist-info")]
        if found: return found[0].name.split("-")[1].removesuffix(".dist")


NAMES = {"ding": "DI_engine", "trinity": "trinity_rft", "swift": "ms_swift"}


def rows():
    "A row for each function that can be read."
    for module, name, given in READ:
        given, f = dict(given), getattr(source(module), name)
        said = given.pop("mode", "")
        if isinstance(f, type): f = f(**given.pop("make", {}))
        if "around" in given: f = given.pop("around")(f)
        report = identify(f, **given)
        mode = said or ", ".join(x for x in given.get("options", {}).values() if isinstance(x, str))
        package = module.split(".")[0]
        kinds = [x.kind for x in report.findings]
        hand = "; ".join(BY_HAND.get((name, k), "not looked at") for k in kinds)
        facts = ", ".join(f"{k}={v}" for k, v in report.facts.items() if v is not None)
        yield (package, version(package), name + (f" ({mode})" if mode else ""), report.kind,
               report.formula, facts, "; ".join(kinds), hand,
               " ".join(x.kind for x in report.cautions))


def main():
    "Read all and write the table."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", type=Path, action="append", default=[])
    parser.add_argument("--out", type=Path, default=RESULTS / "identify.csv")
    args = parser.parse_args()
    ROOTS.extend([*args.packages, *(Path(p) for p in sys.path if p.endswith("-packages"))])
    logger = SimpleNamespace(logger=SimpleNamespace(warning=print, info=print))
    sys.modules.setdefault("loguru", logger)
    source(CORE)._values["ActorConfig"] = Config
    source(SWIFT)._values["logger"] = logger
    found = []
    for row in rows():
        print(*row[:7], row[7], sep=" | ")
        found.append(row)
    write(args.out, COLUMNS, found)


if __name__ == "__main__":
    main()
