"""Functions of six other libraries beside ours, on the same random tensors.

TRL and stable-baselines3 are imported as anyone would. The other four ask for long lists of
packages, some of which exclude ours (DI-engine asks for NumPy below 2 and setuptools up to 66.1.1),
some of which need CUDA. Their loss functions need none of that: `alone` imports single modules of
an installed package, past every `__init__`.

TRL 1.16 has no PPO trainer any more; its GRPO trainer, asked for the mean over tokens, has PPO's
loss. That loss is a
method that reads its trainer: here the trainer is a namespace, and the log-probabilities come from
us.
stable-baselines3 computes its loss within `PPO.train`: one minibatch goes through all of it, with
an optimizer that
does nothing. TRL's group advantages are a few lines of a long method; those lines are run from its
source.

Each `Quantity` has our function and, for each library that has it, a call of theirs. `wrt` names
the tensors that get
a gradient; `change` prepares the batch. `DIFFERENT` holds what is known to differ, and why.
"""

import importlib
import inspect
import math
import sys
import textwrap
from collections import defaultdict, namedtuple
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import torch

from rlhf_notes.compat.ding import ppo_policy_data_continuous, ppo_policy_error_continuous
from rlhf_notes.formulas.advantage import gae, gae_tokens, group_advantage, rloo_advantage
from rlhf_notes.formulas.grpo import policy_loss
from rlhf_notes.formulas.kl import kl_estimate
from rlhf_notes.formulas.logprob import (
    entropy_from_logits,
    gaussian_entropy,
    gaussian_log_prob,
    selective_log_softmax,
)
from rlhf_notes.formulas.masking import masked_mean
from rlhf_notes.formulas.preference import bradley_terry_loss, dpo_loss
from rlhf_notes.formulas.ratio import importance_ratio
from rlhf_notes.formulas.reward import token_rewards, truncate_at_stop
from rlhf_notes.formulas.surrogate import clip_fraction
from rlhf_notes.formulas.value import explained_variance, symlog, value_loss, value_transform
from rlhf_notes.formulas.whitening import whiten

PEERS = dict(
    trl="trl", torchtune="torchtune", ding="DI-engine", sb3="stable-baselines3", verl="verl",
    openrlhf="openrlhf"
)
VERSIONS = dict(
    trl="1.16.0", torchtune="0.6.1", ding="0.5.3", sb3="2.9.2", verl="0.9.1", openrlhf="0.11.2")

Peer = namedtuple("Peer", "name version functions missing")


class _Stand(ModuleType):
    "A module in the place of one that is not needed: every name in it is an empty class."

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


def alone(package, modules, stands=None):
    """Modules of an installed package, imported without any `__init__`, `stands` taking the place
    of what they import; `sys.modules` stays as it was.
    """
    stands = stands or {}
    roots = {package, *(name.split(".")[0] for name in stands)}

    def loaded():
        return {name: m for name, m in sys.modules.items() if name.split(".")[0] in roots}

    def stand(name):
        if name in sys.modules:
            return sys.modules[name]
        module = sys.modules[name] = _Stand(name)
        module.__path__ = ([name.replace(".", "/").replace(package, folder, 1)]
                           if name.split(".")[0] == package else [])
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(stand(parent), last, module)
        return module

    [folder] = find_spec(package).submodule_search_locations
    before = loaded()
    for name in before:
        del sys.modules[name]
    try:
        for name in [f"{package}.{m}".rpartition(".")[0] for m in modules] + list(stands):
            vars(stand(name)).update(stands.get(name, {}))
        return {m.rpartition(".")[2]: importlib.import_module(f"{package}.{m}") for m in modules}
    finally:
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(before)


def _identity(*args, **kwargs):
    return args[0] if len(args) == 1 and callable(args[0]) else _identity


def _load_trl():
    from trl.trainer import grpo_trainer, rloo_trainer, utils

    return dict(grpo=grpo_trainer, rloo=rloo_trainer, utils=utils)


def _load_torchtune():
    found = alone("torchtune", ["rlhf.rewards"])
    stands = {
        "torchtune.rlhf": {"masked_mean": found["rewards"].masked_mean},
        "torchtune.data": {"CROSS_ENTROPY_IGNORE_IDX": -100},
    }
    return {**found,
            **alone("torchtune", ["rlhf.sequence_processing", "rlhf.loss.ppo", "rlhf.loss.dpo"],
                     stands)}


def _load_ding():
    return alone(
        "ding", ["rl_utils.ppo", "rl_utils.gae", "rl_utils.value_rescale"],
        {"ding.hpc_rl": {"hpc_wrapper": _identity}}
    )


def _load_sb3():
    from stable_baselines3.common import buffers, distributions, utils
    from stable_baselines3.ppo import ppo

    return dict(ppo=ppo, buffers=buffers, distributions=distributions, utils=utils)


def _load_verl():
    stands = {
        "omegaconf": {},
        "tensordict": {},
        "transformers": {},
        "verl.utils.device": {"get_device_name": lambda: "cpu"},
        "verl.utils.import_utils": {"deprecated": _identity},
        "verl.trainer.config": {},
        "verl.workers.config": {},
        "verl.protocol": {},
        "verl.trainer.config.algorithm": {},
        "verl.workers.config.actor": {},
    }
    groups = alone("verl", ["utils.groupwise"], stands)["groupwise"]
    stands["verl.utils"] = dict(
        as_torch_index=groups.as_torch_index, group_mean_std=groups.group_mean_std)
    configs = alone("verl", ["trainer.config.algorithm"], {"verl.base_config": {}})
    return configs | alone("verl", ["utils.torch_functional", "trainer.ppo.core_algos",
                                     "trainer.ppo.rollout_corr_helper"], stands)


def _load_openrlhf():
    found = alone("openrlhf", ["models.utils", "models.loss"], {"deepspeed": {}})
    stands = {
        "ray": {},
        "openrlhf.models.utils": {"compute_reward": found["utils"].compute_reward},
        "openrlhf.trainer.ppo_utils.experience": {},
        "openrlhf.trainer.ray.launcher": {},
        "openrlhf.utils.logging_utils": {"init_logger": lambda name: None},
        "openrlhf.utils.seqlen_balancing": {},
        "openrlhf.trainer.ppo_utils.length_penalty": {"apply_length_penalties": lambda *args: None},
    }
    return {**found, **alone("openrlhf", ["trainer.ppo_utils.experience_maker"], stands)}


@cache
# name on PyPI; version, or None; namespace of its modules, or None; what is missing, or None
def load_peer(
    name: str,  # One of `PEERS`
) -> Peer:
    "A library to compare with: what it offers, or why it cannot be had."
    try:
        version = metadata.version(PEERS[name])
    except metadata.PackageNotFoundError:
        return Peer(PEERS[name], None, None, "not installed")
    try:
        return Peer(PEERS[name], version, SimpleNamespace(**globals()[f"_load_{name}"]()), None)
    except Exception as e:
        return Peer(PEERS[name], version, None, f"cannot be loaded: {type(e).__name__}: {e}")


# float32 tensors: one batch of everything that a policy-gradient loss may want
def random_batch(
    seed: int = 0,  # Of the generator
    B: int = 8,  # Answers, four for each of two prompts
    T: int = 7,  # Tokens
    V: int = 11,  # Words
) -> SimpleNamespace:
    """The same random tensors for all: tokens (B, T), padded on the right, and steps of an
    environment (T, B).
    """
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape, scale=1.0: torch.randn(shape, generator=g) * scale
    b = SimpleNamespace(
        logits=normal(B, T, V), tokens=torch.randint(V, (B, T), generator=g),
        logp_old=-normal(B, T).abs() - 0.1
    )
    b.logp, b.logp_ref = ((b.logp_old + normal(B, T, scale=0.3)).clamp(max=-0.01) for _ in range(2))
    b.lengths = torch.cat([torch.tensor([T]), torch.randint(2, T, (B - 1,), generator=g)])
    b.mask = torch.arange(T) < b.lengths[:, None]
    b.advantage, b.value_old, b.returns = normal(B, T), normal(B, T), normal(B, T)
    b.value, b.scores, b.reward = b.value_old + normal(B, T, scale=0.5), normal(B), normal(B, T)
    b.response_advantage = normal(B)
    b.mu, b.sigma, b.action, b.mu_old = (normal(B, 3), 0.5 + normal(B, 3).abs(), normal(B, 3),
                                         normal(B, 3))
    b.terminated, b.truncated = (torch.rand((T, B), generator=g) < 0.2 for _ in range(2))
    b.done = b.terminated | b.truncated
    b.step_reward, b.step_value, b.next_value = normal(T, B), normal(T, B), normal(T, B)
    # within an episode, the next value is the value of the next step
    b.next_value[:-1] = torch.where(b.done[:-1], b.next_value[:-1], b.step_value[1:])
    return b


class _WithGradient(torch.autograd.Function):
    "The given value, whose gradient with respect to x is the given slope."

    @staticmethod
    def forward(ctx, value, x, slope):
        ctx.slope = slope
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return None, grad * ctx.slope, None


# (loss, 0-dim; metrics: name -> number)
def trl_loss(
    lib: SimpleNamespace,  # `functions` of `load_peer("trl")`
    logp: torch.Tensor,  # log pi of the tokens, with gradient, (B, T)
    logp_old: torch.Tensor,  # log pi_old of the same tokens, (B, T)
    advantage: torch.Tensor,  # One for each response, (B,), or for each token, (B, T)
    mask: torch.Tensor,  # (B, T) boolean, True = counts
    # log pi_ref of the same tokens, (B, T); not looked at where beta is 0
    logp_ref: torch.Tensor | None = None,
    beta: float = 0.0,  # Weight of the KL in the loss, by k3
    loss_type: str = "grpo",  # As TRL calls it: "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"
    eps_low: float = 0.2,  # How far below 1 the ratio may go
    eps_high: float | None = None,  # How far above 1; for "cispo" the bound itself; None = eps_low
    level: str = "token",  # A ratio for each "token", or for the "sequence"
    delta: float | None = None,  # c of the dual clip; None = none
    kl_weighted: bool = False,  # multiply the KL by the ratio
) -> tuple:
    "`GRPOTrainer._compute_loss` of TRL on log-probabilities that take the place of a model's."
    metrics = defaultdict(list)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logp, torch.zeros_like(logp),
                                                                    None),
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        beta=beta,
        epsilon_low=eps_low,
        epsilon_high=eps_low if eps_high is None else eps_high,
        importance_sampling_level=level,
        max_completion_length=logp.shape[1],
        args=SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=kl_weighted,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x,
                                    reduce=lambda x, reduction: x),
        _metrics={"train": metrics},
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False,
    )
    tokens, mask = torch.zeros(mask.shape, dtype=torch.long), mask.long()
    inputs = dict(
        prompt_ids=tokens[:, :0],
        prompt_mask=tokens[:, :0],
        completion_ids=tokens,
        completion_mask=mask,
        advantages=advantage,
        old_per_token_logps=logp_old,
        ref_per_token_logps=logp_ref,
        num_items_in_batch=mask.sum(),
    )
    return lib.grpo.GRPOTrainer._compute_loss(trainer, None, inputs), {
        name: values[-1] for name, values in metrics.items()
    }


def trl_lines(
    method,  # Of a trainer of TRL
    first: str,  # How the first line begins, without its indentation
    last: str,  # How the last one begins, likewise; it may be the same line
    **names,  # What the lines need, `self` included
) -> SimpleNamespace:  # These names, and those that the lines set
    """Runs the lines of a method of TRL from the one that begins with `first` to the one that
    begins with `last`.
    """
    lines = textwrap.dedent(inspect.getsource(method)).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    end = next(i for i, line in enumerate(lines) if i >= begin and line.strip().startswith(last))
    exec(
        textwrap.dedent("\n".join(lines[begin : end + 1])),
        {**vars(sys.modules[method.__module__]), **names},
        found := dict(names),
    )
    return SimpleNamespace(**found)


# (what it logged: name -> number; the gradients that it left: "logp" and "value" -> (n,))
def sb3_update(
    lib: SimpleNamespace,  # `functions` of `load_peer("sb3")`
    logp: torch.Tensor,  # log pi of the actions, (n,)
    logp_old: torch.Tensor,  # log pi_old of the same actions, (n,)
    advantage: torch.Tensor,  # (n,)
    value: torch.Tensor | None = None,  # V now, (n,); None = 0
    value_old: torch.Tensor | None = None,  # V when the actions were drawn, (n,); None = 0
    returns: torch.Tensor | None = None,  # What V should be, (n,); None = 0
    value_clip: float | None = None,  # How far V may go from `value_old`; None = any distance
    normalize: bool = False,  # Are the advantages normalised?
) -> tuple:
    "One minibatch of `PPO.train` of stable-baselines3, the ratio clipped at 0.2."
    value, value_old, returns = (
        torch.zeros_like(logp) if x is None else x for x in (value, value_old, returns))
    given = dict(logp=logp, value=value)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    logged = {}
    data = SimpleNamespace(
        actions=logp.detach(),
        observations=None,
        advantages=advantage,
        old_log_prob=logp_old,
        old_values=value_old,
        returns=returns,
    )
    noop = lambda *args, **kwargs: None
    agent = SimpleNamespace(
        policy=SimpleNamespace(
            set_training_mode=noop,
            optimizer=SimpleNamespace(zero_grad=noop, step=noop),
            parameters=lambda: [],
            evaluate_actions=lambda *args: (
                leaves["value"],
                leaves["logp"],
                torch.zeros_like(logp),
            ),
        ),
        rollout_buffer=SimpleNamespace(
            get=lambda batch_size: [data], values=value_old.numpy(), returns=returns.numpy()
        ),
        logger=SimpleNamespace(
            record=lambda name, x, **kwargs: logged.update({name.split("/")[1]: x})
        ),
        _update_learning_rate=noop,
        clip_range=lambda progress: 0.2,
        clip_range_vf=value_clip and (lambda progress: value_clip),
        _current_progress_remaining=1.0,
        n_epochs=1,
        batch_size=len(logp),
        action_space=None,
        normalize_advantage=normalize,
        ent_coef=0.0,
        vf_coef=1.0,
        max_grad_norm=1e9,
        target_kl=None,
        _n_updates=0,
    )
    lib.ppo.PPO.train(agent)
    return logged, {name: leaf.grad for name, leaf in leaves.items()}


# (loss, 0-dim; metrics: name -> number)
def verl_loss(
    lib: SimpleNamespace,  # `functions` of `load_peer("verl")`
    kind: str,  # As verl calls it: "vanilla", "gspo", "cispo", "sapo", "geo_mean"
    logp: torch.Tensor,  # log pi of the tokens, with gradient, (B, T)
    logp_old: torch.Tensor,  # log pi_old of the same tokens, (B, T)
    advantage: torch.Tensor,  # (B, T)
    mask: torch.Tensor,  # (B, T) boolean, True = counts
    eps_low: float = 0.2,  # How far below 1 the ratio may go; for "geo_mean" the log-ratio below 0
    eps_high: float | None = None,  # How far above; None = eps_low
    # As verl calls it: "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"; "geo_mean"
    # does not look
    aggregation: str = "token-mean",
    dual_clip: float = 1e9,  # c of the dual clip, for "vanilla"; 1e9 is as good as none
    weight: torch.Tensor | None = None,  # (B, T), of another sampler's tokens
) -> tuple:
    "A registered policy loss of verl."
    config = lib.core_algos.ActorConfig()
    vars(config).update(
        clip_ratio=eps_low,
        clip_ratio_low=eps_low,
        clip_ratio_high=eps_low if eps_high is None else eps_high,
        clip_ratio_c=dual_clip,
        tau_pos=1.0,
        tau_neg=1.05,
        global_batch_info={},
    )
    config.get = lambda name, default: vars(config).get(name, default)
    return lib.core_algos.POLICY_LOSS_REGISTRY[kind](
        logp_old, logp, advantage, mask.to(logp), aggregation, config, weight)


def openrlhf_advantages(
    lib: SimpleNamespace,  # `functions` of `load_peer("openrlhf")`
    estimator: str,  # As OpenRLHF calls it: "group_norm", "rloo"
    scores: torch.Tensor,  # Score of each response, (B,), those to one prompt side by side
    group: int,  # Answers to each prompt
) -> torch.Tensor:  # The advantage of each response, (B,)
    "`compute_advantages_and_returns` of OpenRLHF on responses of one token."
    N = SimpleNamespace
    args = N(
        rollout=N(n_samples_per_prompt=group),
        algo=N(advantage=N(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=True)),
        reward=N(clip_range=None),
    )
    one = N(
        rewards=scores.clone(),
        index=list(range(len(scores))),
        kl=torch.zeros(len(scores), 1),
        action_mask=torch.ones(len(scores), 1),
        info={},
    )
    maker = object.__new__(lib.experience_maker.RemoteExperienceMaker)
    maker.strategy, maker.kl_ctl, maker.advantage_estimator = N(args=args), N(value=0.0), estimator
    return maker.compute_advantages_and_returns([one])[0].advantages[:, 0]


Quantity = namedtuple("Quantity", "group ours theirs wrt change", defaults=[("logp",), None])


def _mean(x, mask):
    return (x * mask).sum() / mask.sum()


def _torchtune_ppo(lib, b, mask=None, value_mask=None, **kwargs):
    return lib.ppo.PPOLoss(epsilon=0.2, value_clip_range=0.2, value_coeff=1.0)(
        b.logp_old, b.logp, b.advantage, b.value_old, b.value, b.returns, mask, value_mask
    )


def _as_logits(logp):
    "Logits of two actions, the first of which has the log-probability `logp`."
    return torch.stack([logp, torch.log(-torch.expm1(logp))], -1)


def _ding_ppo(lib, b, weight=None, dual_clip=None):
    data = lib.ppo.ppo_policy_data(
        _as_logits(b.logp).flatten(0, 1),
        _as_logits(b.logp_old).flatten(0, 1),
        torch.zeros(b.logp.numel(), dtype=torch.long),
        b.advantage.flatten(),
        None if weight is None else weight.flatten().float(),
    )
    return lib.ppo.ppo_policy_error(data, 0.2, dual_clip)


def _ding_continuous(b, module, **kwargs):
    data = ppo_policy_data_continuous(
        dict(mu=b.mu, sigma=b.sigma), dict(mu=b.mu_old, sigma=b.sigma), b.action, b.advantage[:, 0],
        None
    )
    return (
        module.ppo_policy_error_continuous(data[:5], dual_clip=3.0)[0].policy_loss
        if module
        else ppo_policy_error_continuous(data, dual_clip=3.0)[0].policy_loss
    )


def _openrlhf_policy(lib, b, mask, advantage=None, kind="ppo", **kwargs):
    A = b.advantage if advantage is None else advantage[:, None].expand_as(b.logp)
    return lib.loss.PolicyLoss(policy_loss_type=kind, **kwargs)(b.logp, b.logp_old, A, mask)


def _sb3(lib, b, loss, leaf, **kwargs):
    logged, slopes = sb3_update(
        lib, b.logp.flatten(), b.logp_old.flatten(), b.advantage.flatten(), **kwargs)
    return _WithGradient.apply(
        torch.tensor(float(logged[loss])), getattr(b, leaf), slopes[leaf].view_as(b.logp))


def _response(b):
    return b.response_advantage[:, None].expand_as(b.logp)


def _all(b):
    return torch.ones_like(b.mask)


def _sb3_values(b):
    return dict(
        value=b.value.flatten(), value_old=b.value_old.flatten(), returns=b.returns.flatten())


def _huge(b):
    b.logp, b.advantage[0, 0] = (torch.where(torch.arange(b.logp.numel()).view_as(b.logp) == 0,
                                             -0.1, b.logp), 1.0)
    b.logp_old[0, 0] = -100.1


def _five_nats(b):
    b.logp_ref = b.logp_ref.clone()
    b.logp_ref[0, 0] = b.logp[0, 0] + 5


def _nan(b):
    b.logp = torch.where(b.mask, b.logp, math.nan)


def _empty(b):
    b.mask[1] = False


def _nothing(b):
    b.mask[:] = False


def _impossible(b):
    b.logits[..., -2:] = -math.inf
    b.tokens %= b.logits.shape[-1] - 2


def _no_truncation(b):
    b.done = b.terminated
    b.next_value[:-1] = torch.where(b.done[:-1], b.next_value[:-1], b.step_value[1:])


def _sb3_gae(lib, b):
    """`RolloutBuffer.compute_returns_and_advantage`, after the bootstrap that `collect_rollouts`
    adds to the reward of a truncated step.
    """
    T, N = b.step_reward.shape
    reward = b.step_reward + 0.99 * torch.where(b.done & ~b.terminated, b.next_value, 0.0)
    buffer = object.__new__(lib.buffers.RolloutBuffer)
    vars(buffer).update(
        buffer_size=T,
        gamma=0.99,
        gae_lambda=0.95,
        rewards=reward.numpy(),
        values=b.step_value.numpy(),
        advantages=torch.zeros(T, N).numpy(),
        episode_starts=torch.cat([torch.zeros(1, N), b.done[:-1].float()]).numpy(),
    )
    buffer.compute_returns_and_advantage(b.next_value[-1], b.done[-1].numpy())
    return torch.from_numpy(buffer.advantages)


def _gae_row(change):
    return Quantity(
        "advantages",
        lambda b: gae(b.step_reward, b.step_value, b.next_value, b.terminated, b.done)[0],
        dict(
            ding=lambda l, b: l.gae.gae(
                l.gae.gae_data(b.step_value, b.next_value.clone(), b.step_reward, b.terminated,
                               b.done), 0.99, 0.95
            ),
            sb3=_sb3_gae,
        ),
        (),
        change,
    )


def _sb3_normalized(lib, b):
    "The policy gradient where the ratio is 1 is minus the normalised advantage, over n."
    return (
        -sb3_update(lib, b.logp.flatten(), b.logp.flatten(), b.advantage.flatten(),
                    normalize=True)[1]["logp"].view_as(
                        b.logp
                    )
        * b.logp.numel()
    )


def _verl_responses(function, b):
    return function(
        b.scores[:, None],
        torch.ones(len(b.scores), 1),
        torch.arange(len(b.scores)).div(4, rounding_mode="floor").numpy(),
    )[0][:, 0]


def _trl_group(lib, b):
    trainer = SimpleNamespace(scale_rewards="group")
    return trl_lines(
        lib.grpo.GRPOTrainer._generate_and_score_completions,
        "mean_grouped_rewards = torch.nanmean",
        "is_std_zero",
        rewards=b.scores,
        num_generations=4,
        self=trainer,
    ).advantages


def _trl_rloo(lib, b):
    return trl_lines(
        lib.rloo.RLOOTrainer._generate_and_score_completions,
        "grouped_rewards = ",
        "advantages = torch.nan_to_num",
        rewards=b.scores,
        num_generations=4,
        self=SimpleNamespace(normalize_advantages=False),
    ).advantages


def _kl_rows(kind):
    theirs = dict(
        verl=lambda l, b: l.core_algos.kl_penalty(b.logp, b.logp_ref, kind).mean(),
        openrlhf=lambda l, b: l.utils.compute_approx_kl(b.logp, b.logp_ref,
                                                        kl_estimator=kind).mean(),
    )
    if kind == "k1":
        theirs["torchtune"] = (lambda l, b: l.rewards.get_rewards_ppo(b.scores, b.logp, b.logp_ref,
                                                                      0.1)[1].mean())
    if kind == "k3":
        theirs["trl"] = lambda l, b: trl_loss(
            l, b.logp, b.logp_old, 0 * b.response_advantage, _all(b), b.logp_ref, 1.0, "bnpo"
        )[0]
    return Quantity("KL", lambda b: kl_estimate(b.logp, b.logp_ref, kind).mean(), theirs)


def _variant(name, trl=None, verl=None, openrlhf=None, **ours):
    theirs = {}
    if trl:
        theirs["trl"] = (lambda l, b: trl_loss(l, b.logp, b.logp_old, b.response_advantage, b.mask,
                                               **trl)[0])
    if verl:
        theirs["verl"] = lambda l, b: verl_loss(
            l, logp=b.logp, logp_old=b.logp_old, advantage=_response(b), mask=b.mask, **verl
        )[0]
    if openrlhf:
        theirs["openrlhf"] = (lambda l, b: _openrlhf_policy(l, b, b.mask, b.response_advantage,
                                                            **openrlhf)[0])
    return Quantity(
        "losses of responses",
        lambda b: policy_loss(b.logp, b.logp_old, b.response_advantage, b.mask, name, **ours)[0],
        theirs,
    )


def _ppo(mask, change=None, group="losses of tokens", dual_clip=None, only=None, **eps):
    "The policy loss of PPO, token by token."
    high = eps.get("eps_high")
    theirs = dict(
        trl=lambda l, b: trl_loss(
            l, b.logp, b.logp_old, b.advantage, mask(b), loss_type="bnpo", delta=dual_clip, **eps
        )[0],
        torchtune=lambda l, b: _WithGradient.apply(
            _torchtune_ppo(l, b, mask(b))[1], b.logp,
            torch.autograd.grad(_torchtune_ppo(l, b, mask(b))[0], b.logp)[0]
        ),
        ding=lambda l, b: _ding_ppo(l, b, None if mask is _all else mask(b),
                                    dual_clip)[0].policy_loss,
        sb3=lambda l, b: _sb3(l, b, "policy_gradient_loss", "logp"),
        verl=lambda l, b: verl_loss(
            l, "vanilla", b.logp, b.logp_old, b.advantage, mask(b), dual_clip=dual_clip or 1e9,
            **eps
        )[0],
        openrlhf=lambda l, b: _openrlhf_policy(
            l, b, mask(b), dual_clip=dual_clip, **({"clip_eps_high": high} if high else {})
        )[0],
    )
    if mask is not _all:
        del theirs["sb3"]
    return Quantity(
        group,
        lambda b: policy_loss(b.logp, b.logp_old, b.advantage, mask(b), "ppo", dual_clip=dual_clip,
                              **eps)[0],
        {p: f for p, f in theirs.items() if not only or p in only},
        change=change,
    )


def _sb3_categorical(l, logits):
    return l.distributions.CategoricalDistribution(logits.shape[-1]).proba_distribution(logits)


def _sb3_gaussian(l, mu, sigma):
    return l.distributions.DiagGaussianDistribution(mu.shape[-1]).proba_distribution(
        mu, sigma.log())


def _entropy_row(change=None):
    return Quantity(
        "log-probabilities",
        lambda b: entropy_from_logits(b.logits).mean(),
        dict(
            trl=lambda l, b: l.utils.entropy_from_logits(b.logits).mean(),
            ding=lambda l, b: (
                l.ppo.ppo_policy_error(
                    l.ppo.ppo_policy_data(
                        b.logits.flatten(0, 1), b.logits.flatten(0, 1), b.tokens.flatten(),
                        b.advantage.flatten(), None
                    )
                )[0].entropy_loss
            ),
            sb3=lambda l, b: _sb3_categorical(l, b.logits).entropy().mean(),
            verl=lambda l, b: l.torch_functional.entropy_from_logits(b.logits).mean(),
            openrlhf=lambda l, b: inspect.unwrap(l.utils.compute_entropy)(b.logits).mean(),
        ),
        ("logits",),
        change,
    )


QUANTITIES = {
    "log-probability": Quantity(
        "log-probabilities",
        lambda b: selective_log_softmax(b.logits, b.tokens),
        dict(
            trl=lambda l, b: l.utils.selective_log_softmax(b.logits, b.tokens),
            torchtune=lambda l, b: l.sequence_processing.logits_to_logprobs(b.logits, b.tokens),
            sb3=lambda l, b: _sb3_categorical(l, b.logits).log_prob(b.tokens),
            verl=lambda l, b: l.torch_functional.logprobs_from_logits_v2(b.logits, b.tokens),
            openrlhf=lambda l, b: l.utils.log_probs_from_logits(b.logits, b.tokens),
        ),
        ("logits",),
    ),
    "log-probability, temperature 0.7": Quantity(
        "log-probabilities",
        lambda b: selective_log_softmax(b.logits, b.tokens, 0.7),
        dict(
            trl=lambda l, b: l.utils.selective_log_softmax(b.logits, b.tokens, 0.7),
            torchtune=lambda l, b: l.sequence_processing.logits_to_logprobs(
                b.logits, b.tokens, 0.7
            ),
            openrlhf=lambda l, b: l.utils.log_probs_from_logits(b.logits.clone(), b.tokens, 0.7),
        ),
        ("logits",),
    ),
    "log-probability, Gaussian": Quantity(
        "log-probabilities",
        lambda b: gaussian_log_prob(b.action, b.mu, b.sigma),
        dict(sb3=lambda l, b: _sb3_gaussian(l, b.mu, b.sigma).log_prob(b.action)),
        ("mu", "sigma"),
    ),
    "entropy": _entropy_row(),
    "entropy, impossible tokens": _entropy_row(_impossible),
    "entropy, Gaussian": Quantity(
        "log-probabilities",
        lambda b: gaussian_entropy(b.sigma),
        dict(
            sb3=lambda l, b: (
                l.distributions.DiagGaussianDistribution(3)
                .proba_distribution(b.mu, b.sigma.log())
                .entropy()
            )
        ),
        ("sigma",),
    ),
    "policy loss": _ppo(_all),
    "policy loss, padded batch": _ppo(lambda b: b.mask),
    "policy loss, NaN in the padding": _ppo(lambda b: b.mask, _nan),
    "policy loss, nothing counts": _ppo(lambda b: b.mask, _nothing),
    "policy loss, a log-ratio of 100": _ppo(_all, _huge),
    "clip-higher": _ppo(_all, eps_high=0.28, only=("trl", "verl", "openrlhf")),
    "dual clip": _ppo(_all, dual_clip=1.3, only=("trl", "ding", "verl", "openrlhf")),
    "dual clip, Gaussian policy": Quantity(
        "losses of tokens",
        lambda b: _ding_continuous(b, None),
        dict(ding=lambda l, b: _ding_continuous(b, l.ppo)),
        ("mu",),
    ),
    "clip fraction": Quantity(
        "losses of tokens",
        lambda b: clip_fraction(importance_ratio(b.logp, b.logp_old), b.advantage),
        dict(
            trl=lambda l, b: torch.tensor(
                trl_loss(l, b.logp, b.logp_old, b.advantage, _all(b))[1]["clip_ratio/region_mean"]
            ),
            torchtune=lambda l, b: _torchtune_ppo(l, b)[4],
            ding=lambda l, b: torch.tensor(_ding_ppo(l, b)[1].clipfrac),
            sb3=lambda l, b: torch.tensor(
                float(
                    sb3_update(l, b.logp.flatten(), b.logp_old.flatten(), b.advantage.flatten())[0][
                        "clip_fraction"
                    ]
                )
            ),
            verl=lambda l, b: torch.tensor(
                verl_loss(l, "vanilla", b.logp, b.logp_old, b.advantage, _all(b))[1][
                    "actor/pg_clipfrac"
                ]
            ),
            openrlhf=lambda l, b: _openrlhf_policy(l, b, _all(b))[1],
        ),
        (),
    ),
    "approximate KL": Quantity(
        "losses of tokens",
        lambda b: (b.logp_old - b.logp).mean(),
        dict(
            ding=lambda l, b: torch.tensor(_ding_ppo(l, b)[1].approx_kl),
            sb3=lambda l, b: torch.tensor(
                float(
                    sb3_update(l, b.logp.flatten(), b.logp_old.flatten(), b.advantage.flatten())[0][
                        "approx_kl"
                    ]
                )
            ),
            verl=lambda l, b: torch.tensor(
                verl_loss(l, "vanilla", b.logp, b.logp_old, b.advantage, _all(b))[1]["actor/ppo_kl"]
            ),
            openrlhf=lambda l, b: _openrlhf_policy(l, b, _all(b))[2],
        ),
        (),
    ),
    "mean ratio, padded batch": Quantity(
        "losses of tokens",
        lambda b: masked_mean(importance_ratio(b.logp, b.logp_old), b.mask),
        dict(torchtune=lambda l, b: _torchtune_ppo(l, b, b.mask)[3]),
        (),
    ),
    "value loss": Quantity(
        "values",
        lambda b: value_loss(b.value, b.value_old, b.returns).mean(),
        dict(
            ding=lambda l, b: l.ppo.ppo_value_error(
                l.ppo.ppo_value_data(b.value, b.value_old, b.returns, None), 0.2, False
            ),
            sb3=lambda l, b: _sb3(l, b, "value_loss", "value", **_sb3_values(b)),
            openrlhf=lambda l, b: l.loss.ValueLoss()(b.value, b.value_old, b.returns, _all(b)),
        ),
        ("value",),
    ),
    "value loss, clipped": Quantity(
        "values",
        lambda b: value_loss(b.value, b.value_old, b.returns, 0.2).mean(),
        dict(
            torchtune=lambda l, b: _WithGradient.apply(
                _torchtune_ppo(l, b)[2],
                b.value,
                torch.autograd.grad(_torchtune_ppo(l, b)[0], b.value)[0],
            ),
            ding=lambda l, b: l.ppo.ppo_value_error(
                l.ppo.ppo_value_data(b.value, b.value_old, b.returns, None), 0.2
            ),
            sb3=lambda l, b: _sb3(l, b, "value_loss", "value", **_sb3_values(b), value_clip=0.2),
            verl=lambda l, b: l.core_algos.compute_value_loss(
                b.value, b.returns, b.value_old, _all(b), 0.2
            )[0],
            openrlhf=lambda l, b: l.loss.ValueLoss(0.2)(b.value, b.value_old, b.returns, _all(b)),
        ),
        ("value",),
    ),
    "explained variance": Quantity(
        "values",
        lambda b: explained_variance(b.value, b.returns),
        dict(
            sb3=lambda l, b: torch.tensor(
                float(
                    l.utils.explained_variance(
                        b.value.detach().flatten().numpy(), b.returns.flatten().numpy()
                    )
                )
            )
        ),
        (),
    ),
    "value transform": Quantity(
        "values",
        lambda b: value_transform(b.value),
        dict(ding=lambda l, b: l.value_rescale.value_transform(b.value)),
        ("value",),
    ),
    "symlog": Quantity(
        "values",
        lambda b: symlog(b.value),
        dict(ding=lambda l, b: l.value_rescale.symlog(b.value)),
        ("value",),
    ),
    "k1": _kl_rows("k1"),
    "k2": _kl_rows("k2"),
    "k3": _kl_rows("k3"),
    "k3, 5 nats apart": _kl_rows("k3")._replace(change=_five_nats),
    "whitening": Quantity(
        "advantages",
        lambda b: whiten(b.advantage),
        dict(
            torchtune=lambda l, b: l.rewards.whiten(b.advantage),
            sb3=_sb3_normalized,
            verl=lambda l, b: l.torch_functional.masked_whiten(
                b.advantage, torch.ones_like(b.advantage)
            ),
            openrlhf=lambda l, b: l.utils.masked_normalize(
                b.advantage.view(1, -1), torch.ones(1, b.advantage.numel())
            ).view_as(b.advantage),
        ),
        (),
    ),
    "GAE, terminations": _gae_row(_no_truncation),
    "GAE, truncations": _gae_row(None),
    "GAE of tokens, padded batch": Quantity(
        "advantages",
        lambda b: gae_tokens(b.reward, b.value, b.mask)[0] * b.mask,
        dict(
            torchtune=lambda l, b: (
                (l.rewards.estimate_advantages(b.value, b.reward, 1.0, 0.95, b.mask)[1] - b.value)
                * b.mask
            ),
            verl=lambda l, b: (
                (
                    l.core_algos.compute_gae_advantage_return(
                        b.reward, b.value, b.mask.float(), 1.0, 0.95
                    )[1]
                    - b.value
                )
                * b.mask
            ),
            openrlhf=lambda l, b: (
                l.experience_maker.RemoteExperienceMaker.get_advantages_and_returns(
                    None, b.value, b.reward, b.mask, 1.0, 0.95
                )[0]
                * b.mask
            ),
        ),
        (),
    ),
    "group advantage": Quantity(
        "advantages",
        lambda b: group_advantage(b.scores.view(-1, 4)).flatten(),
        dict(
            trl=_trl_group,
            verl=lambda l, b: _verl_responses(l.core_algos.compute_grpo_outcome_advantage, b),
            openrlhf=lambda l, b: openrlhf_advantages(l, "group_norm", b.scores, 4),
        ),
        (),
    ),
    "leave-one-out advantage": Quantity(
        "advantages",
        lambda b: rloo_advantage(b.scores.view(-1, 4)).flatten(),
        dict(
            trl=_trl_rloo,
            verl=lambda l, b: _verl_responses(l.core_algos.compute_rloo_outcome_advantage, b),
            openrlhf=lambda l, b: openrlhf_advantages(l, "rloo", b.scores, 4),
        ),
        (),
    ),
    "GRPO": _variant(
        "grpo",
        dict(loss_type="grpo"),
        dict(kind="vanilla", aggregation="seq-mean-token-mean"),
        dict(token_level_loss=False),
    ),
    "GRPO, an empty response": _variant(
        "grpo",
        dict(loss_type="grpo"),
        dict(kind="vanilla", aggregation="seq-mean-token-mean"),
        dict(token_level_loss=False),
    )._replace(change=_empty),
    "GRPO, KL in the loss": Quantity(
        "losses of responses",
        lambda b: policy_loss(
            b.logp, b.logp_old, b.response_advantage, b.mask, "grpo", logp_ref=b.logp_ref, beta=0.04
        )[0],
        dict(
            trl=lambda l, b: trl_loss(
                l, b.logp, b.logp_old, b.response_advantage, b.mask, b.logp_ref, 0.04
            )[0],
            verl=lambda l, b: (
                verl_loss(
                    l,
                    "vanilla",
                    b.logp,
                    b.logp_old,
                    _response(b),
                    b.mask,
                    aggregation="seq-mean-token-mean",
                )[0]
                + 0.04
                * l.core_algos.agg_loss(
                    l.core_algos.kl_penalty(b.logp, b.logp_ref, "k3"),
                    b.mask.float(),
                    "seq-mean-token-mean",
                )
            ),
        ),
    ),
    "Dr. GRPO": _variant(
        "dr_grpo",
        dict(loss_type="dr_grpo"),
        dict(kind="vanilla", aggregation="seq-mean-token-sum-norm"),
    ),
    "DAPO": _variant(
        "dapo",
        dict(loss_type="dapo", eps_high=0.28),
        dict(kind="vanilla", eps_high=0.28),
        dict(clip_eps_high=0.28),
    ),
    "GSPO": _variant(
        "gspo",
        dict(loss_type="grpo", level="sequence", eps_low=3e-4, eps_high=4e-4),
        dict(kind="gspo", aggregation="seq-mean-token-mean", eps_low=3e-4, eps_high=4e-4),
        dict(kind="gspo", clip_eps_low=3e-4, clip_eps_high=4e-4),
    ),
    "CISPO, upper bound 1.28": _variant(
        "cispo",
        dict(loss_type="cispo", eps_high=0.28),
        dict(kind="cispo", eps_low=1.0, eps_high=0.28),
        eps_high=0.28,
    ),
    "SAPO": _variant("sapo", dict(loss_type="sapo"), dict(kind="sapo")),
    "GMPO": _variant("gmpo", None, dict(kind="geo_mean", eps_low=0.4)),
    "reward of each token": Quantity(
        "rewards, preferences",
        lambda b: token_rewards(b.scores, b.logp, b.logp_ref, 0.1, b.mask)[0],
        dict(
            torchtune=lambda l, b: (
                l.rewards.get_rewards_ppo(b.scores, b.logp, b.logp_ref, 0.1, b.lengths - 1)[0]
                * b.mask
            ),
            openrlhf=lambda l, b: (
                l.utils.compute_reward(b.scores, 0.1, b.logp - b.logp_ref, b.mask) * b.mask
            ),
        ),
        (),
    ),
    "cut at a stop token": Quantity(
        "rewards, preferences",
        lambda b: truncate_at_stop(b.tokens, 1, 0)[0].float(),
        dict(
            torchtune=lambda l, b: l.sequence_processing.truncate_sequence_at_first_stop_token(
                b.tokens.clone(), torch.tensor([1]), 0
            )[1].float()
        ),
        (),
    ),
    "Bradley-Terry": Quantity(
        "rewards, preferences",
        lambda b: bradley_terry_loss(b.value[0], b.value[1], 0.3),
        dict(openrlhf=lambda l, b: l.loss.PairWiseLoss()(b.value[0], b.value[1], 0.3)),
        ("value",),
    ),
    "DPO": Quantity(
        "rewards, preferences",
        lambda b: dpo_loss(b.logp[0], b.logp[1], b.logp_ref[0], b.logp_ref[1], label_smoothing=0.1),
        dict(
            torchtune=lambda l, b: l.dpo.DPOLoss(0.1, 0.1)(
                b.logp[0], b.logp[1], b.logp_ref[0], b.logp_ref[1]
            )[0].mean(),
            openrlhf=lambda l, b: l.loss.DPOLoss(0.1, 0.1)(
                b.logp[0], b.logp[1], b.logp_ref[0], b.logp_ref[1]
            )[0],
        ),
    ),
}


Comparison = namedtuple("Comparison", "label value gradient ours theirs")
TOLERANCE = 1e-5


def _evaluate(f, quantity, seed):
    "Value and gradients of `f` on the batch of the quantity."
    b = random_batch(seed)
    if quantity.change:
        quantity.change(b)
    for name in quantity.wrt:
        getattr(b, name).requires_grad_()
    y = f(b)
    weight = torch.linspace(0.5, 1.5, y.numel()).view_as(y)
    return (y.detach(), [
        torch.zeros(()) if g is None else g
        for g
        in torch.autograd.grad((y * weight).sum(), [getattr(b, name) for name in quantity.wrt])
    ] if quantity.wrt else [])


def _apart(ours, theirs):
    "The largest difference, relative where the number is larger than 1."
    if not ours.numel():
        return 0.0
    return torch.where(
        ours == theirs, 0.0, (ours - theirs).abs() / ours.abs().clamp(min=1)).max().item()


def _label(value, gradient, ours, theirs):
    if not theirs.isfinite().all():
        return "NaN"
    if value <= TOLERANCE:
        return "=" if gradient <= TOLERANCE else "gradient NaN" if math.isnan(
            gradient) else "gradient"
    big = ours.abs() > 1e-3
    ratios = (theirs / ours)[big]
    if big.any() and ratios.max() - ratios.min() < 1e-3:
        return f"× {round(ratios.mean().item(), 4):.2f}" if abs(
            ratios.mean() - 1) > 5e-3 else f"× {ratios.mean():.4f}"
    return f"up to {value:.1g}"


# label: "=" if value and gradient agree to 1e-5, else what is different; largest differences; both
# values. None = the library has no such function, or is missing
def compare(
    quantity: str,  # A name of `QUANTITIES`
    peer: str,  # A name of `PEERS`
    seed: int = 0,  # Of the batch
) -> (
    Comparison | None
):
    "One quantity from one batch, once by our function and once by that of the peer."
    q, functions = QUANTITIES[quantity], load_peer(peer).functions
    if peer not in q.theirs or functions is None:
        return None
    ours, our_slopes = _evaluate(q.ours, q, seed)
    theirs, their_slopes = _evaluate(lambda b: q.theirs[peer](functions, b), q, seed)
    value, gradient = (
        _apart(ours, theirs),
        max(
            [_apart(a, b) if a.shape == b.shape else math.inf
             for a, b in zip(our_slopes, their_slopes)],
            key=lambda d: math.inf if math.isnan(d) else d,
            default=0.0,
        ),
    )
    return Comparison(_label(value, gradient, ours, theirs), value, gradient, ours, theirs)


_ZERO_TIMES = "the mask multiplies, and 0 · NaN is NaN"
_OVERFLOW = "exp(100) is infinite in float32, and the backward pass multiplies it by 0"
DIFFERENT = {  # (quantity, peer): what the picture says instead of a number, or None; why
    ("entropy, impossible tokens", "trl"): (None,
                                            "a logit of −inf has probability "
                                            "0, and 0 · −inf is NaN"),
    ("entropy, impossible tokens", "verl"): (None,
                                             "a logit of −inf has probability "
                                             "0, and 0 · −inf is NaN"),
    ("entropy, impossible tokens", "openrlhf"): (None,
                                                 "a logit of −inf has probability "
                                                 "0, and 0 · −inf is NaN"),
    ("policy loss, padded batch", "ding"): ("÷ BS",
                                            "weight 0 leaves a token out of "
                                            "the sum, not out of the divisor"),
    ("policy loss, NaN in the padding", "trl"): (None, _ZERO_TIMES),
    ("policy loss, NaN in the padding", "torchtune"): (None, _ZERO_TIMES),
    ("policy loss, NaN in the padding", "ding"): (None, _ZERO_TIMES),
    ("policy loss, NaN in the padding", "openrlhf"): (None, _ZERO_TIMES),
    ("policy loss, nothing counts", "verl"): (None,
                                              "the sum of no tokens is "
                                              "divided by their number, 0"),
    ("policy loss, nothing counts", "openrlhf"): (None,
                                                  "the sum of no tokens is "
                                                  "divided by their number, 0"),
    ("policy loss, a log-ratio of 100", "trl"): (None, _OVERFLOW),
    ("policy loss, a log-ratio of 100", "torchtune"): (None, _OVERFLOW),
    ("policy loss, a log-ratio of 100", "ding"): (None, _OVERFLOW),
    ("policy loss, a log-ratio of 100", "sb3"): (None, _OVERFLOW),
    ("dual clip, Gaussian policy", "ding"): (
        "−cA",
        "the sign of the advantage is not looked at: for A > 0 the loss is the constant −cA, "
        "without a gradient",
    ),
    ("clip fraction", "ding"): ("outside",
                                "counts ratios outside of the " "range, whether the clip binds "
                                "or not"),
    ("clip fraction", "sb3"): ("outside",
                               "counts ratios outside of the " "range, whether the clip binds "
                               "or not"),
    ("approximate KL", "sb3"): ("k3", "the mean of r − 1 − log r, not " "of −log r"),
    ("mean ratio, padded batch", "torchtune"): ("+ padding", "the mean is over the padding " "too"),
    ("value loss", "sb3"): (None, "the squared error without the " "half"),
    ("value loss, clipped", "sb3"): ("clipped",
                                     "the clipped error alone, not "
                                     "the larger of the two, and no " "half"),
    ("k3, 5 nats apart", "verl"): ("≤ 10",
                                   "each token's estimate is " "clamped at 10, and beyond that "
                                   "has no gradient"),
    ("k3, 5 nats apart", "openrlhf"): (
        "≤ 10",
        "each token's estimate is " "clamped at 10, and beyond that " "has no gradient",
    ),
    ("whitening", "torchtune"): ("+ mean",
                                 "shift_mean=True adds the mean " "again; and Bessel's n − 1"),
    ("whitening", "sb3"): ("n − 1", "Bessel's correction in the " "standard deviation"),
    ("whitening", "verl"): ("n − 1", "Bessel's correction in the " "standard deviation"),
    ("GAE of tokens, padded batch", "torchtune"): (
        "+ padding",
        "rewards and values in the " "padding flow back into the " "response",
    ),
    ("group advantage", "verl"): ("ε = 1e-6",
                                  "1e-6 is added to the standard " "deviation, here 1e-4"),
    ("group advantage", "openrlhf"): ("ε = 1e-9", "1e-9 is added to the standard " "deviation"),
    ("GRPO, an empty response", "trl"): ("7 / 8",
                                         "the empty response counts as a " "response with loss 0"),
    ("CISPO, upper bound 1.28", "trl"): ("r ≤ 0.28",
                                         "epsilon_high is the bound "
                                         "itself, not what is added to 1"),
}
