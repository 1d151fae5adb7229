"""The formulas that TRL, verl or another has too and the table of lesson 32 has not: value and
gradient on the same random tensors. Without the library they are skipped."""
import collections
import importlib
import inspect
import math
import textwrap
import warnings
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from crosscheck.peers import alone, load_peer, random_batch, verl_loss
from jobs import RESULTS, names_of
from strategies import normal, random_mask, value_and_grad

import rlhf_notes as rn

SEEDS, FORMULAS = range(5), RESULTS.parents[1] / "formulas"


def trl(module):
    "A module of TRL, which warns that some are experimental."
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"trl.{module}")


def trl_lines(method, first, last):
    "The lines of a method of TRL from the one that begins with `first` to the next with `last`."
    lines = textwrap.dedent(inspect.getsource(method)).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    end = next(i for i, line in enumerate(lines) if i > begin and line.strip().startswith(last))
    return textwrap.dedent("\n".join(lines[begin : end + 1]))


def same(ours, theirs, *tensors):
    "Value and gradients of both agree."
    (a, slopes), (b, expected) = value_and_grad(ours, *tensors), value_and_grad(theirs, *tensors)
    torch.testing.assert_close((a, slopes), (b, expected), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind, beta, theirs", [
    ("reverse", 0.5, 1.0), ("forward", 0.5, 0.0), ("jsd", 0.5, 0.5), ("jsd", 0.1, 0.1)])
def test_distillation_is_trls(kind, beta, theirs, seed):
    loss = trl("experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
    s, t, m = normal(seed, (2, 4, 7)), normal(seed + 9, (2, 4, 7)), random_mask(seed, (2, 4))
    labels = torch.where(m, 1, -100)
    same(lambda s: rn.distillation_loss(s, t, m, kind, beta, 0.7),
         lambda s: loss(s, t, labels, beta=theirs, temperature=0.7), s)


def pairs(seed): return [normal(seed + k, (6,), scale=3.0) - 20 for k in range(4)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind, eps", [("apo_zero", 0.0), ("apo_down", 0.0), ("robust", 0.2)])
def test_the_pair_losses_are_trls(kind, eps, seed):
    method = trl("trainer.dpo_trainer").DPOTrainer._compute_loss

    def theirs(w, l, rw, rl):
        first = f'elif loss_type == "{kind}":'
        names = dict(chosen_logratios=w - rw, rejected_logratios=l - rl,
                     delta_score=(w - rw) - (l - rl), F=torch.nn.functional, torch=torch,
                     self=SimpleNamespace(beta=0.3, label_smoothing=eps), loss_type=kind)
        exec(trl_lines(method, first, "per_sequence_loss = ").removeprefix("el"), names)
        return names["per_sequence_loss"].mean()
    def mine(w, l, rw, rl): return rn.dpo_loss(w, l, rw, rl, 0.3, eps, kind)
    w, l, rw, rl = pairs(seed)
    same(lambda w, l: mine(w, l, rw, rl), lambda w, l: theirs(w, l, rw, rl), w, l)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_centre_of_a_reward_model_is_trls(seed):
    method = trl("trainer.reward_trainer").RewardTrainer.compute_loss
    c, r = normal(seed, (6,)), normal(seed + 1, (6,))
    names = dict(rewards_chosen=c, rewards_rejected=r, torch=torch, nn=torch.nn, inputs={},
                 self=SimpleNamespace(args=SimpleNamespace(center_rewards_coefficient=0.3)))
    lines = trl_lines(method, "if self.args.center_rewards_coefficient", "loss += ")
    names["loss"] = rn.bradley_terry_loss(c, r)
    exec(lines, names)
    torch.testing.assert_close(rn.bradley_terry_loss(c, r, centre=0.3), names["loss"])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 0.2, 3.0]])
def test_several_rewards_are_trls(weights, seed):
    module = trl("trainer.grpo_trainer")
    r, w = normal(seed, (3, 4, 3)), torch.tensor(weights, dtype=torch.float64)
    names = dict(vars(module), rewards_per_func=r.flatten(0, 1), num_generations=4, device="cpu",
                 unscorable_mask=torch.zeros(12).bool(),
                 self=SimpleNamespace(reward_funcs=[None] * 3, reward_weights=w))
    lines = trl_lines(module.GRPOTrainer._generate_and_score_completions,
                      "grouped = rewards_per_func.view", "advantages = (rewards - ")
    exec(lines, names)
    torch.testing.assert_close(rn.multi_reward_advantage(r, w).flatten(), names["advantages"])


def two_samplers(seed):
    "log pi_old, log pi_rollout, mask."
    old = normal(seed, (20, 4), scale=0.5)
    return old, old + normal(seed + 9, (20, 4), scale=0.5), random_mask(seed, (20, 4))


def weights_of_trl(mode, low, high, old, mu, mask):
    module = trl("trainer.grpo_trainer")
    trainer = SimpleNamespace(use_vllm=True, vllm_importance_sampling_correction=True,
                              vllm_importance_sampling_mode=mode,
                              vllm_importance_sampling_clip_min=low,
                              vllm_importance_sampling_clip_max=high)
    names = dict(vars(module), self=trainer, completion_mask=mask.long(), tool_mask=None,
                 old_per_token_logps=old, sampling_per_token_logps=mu)
    exec(trl_lines(module.GRPOTrainer._generate_and_score_completions,
                   "if self.use_vllm and self.vllm_importance_sampling_correction:",
                   "# Compute the per-token log probabilities for the reference"), names)
    return names["vllm_importance_sampling_ratio"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("above, low", [("cap", None), ("zero", None), ("zero", 0.8)])
def test_weights_for_another_samplers_tokens_are_trls(level, above, low, seed):
    (old, mu, mask), mode = two_samplers(seed), dict(cap="truncate", zero="mask")[above]
    theirs = weights_of_trl(f"{level}_{mode}", low, 1.5, old, mu, mask)
    ours = rn.truncated_importance_weight(old, mu, 1.5, mask, level, above, low)
    torch.testing.assert_close(ours, theirs)
    assert (theirs == (1.5 if above == "cap" else 0)).any()


def test_trl_raises_a_small_weight_to_the_lower_bound():
    old, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    mu = torch.tensor([[0.0, 2.0]])  # weights of 1 and e^-2
    theirs = weights_of_trl("token_truncate", 0.5, 2.0, old, mu, mask)
    ours = rn.truncated_importance_weight(old, mu, 2.0, mask, floor=0.5)
    assert (theirs.tolist(), ours.tolist()) == ([[1, 0.5]], [[1, 0]])


def verl():
    peer = load_peer("verl")
    if peer.version is None: pytest.skip("verl is not installed")
    return peer.functions


@pytest.mark.parametrize("seed", SEEDS)
def test_the_advantage_from_a_teacher_is_verls(seed):
    "Minus the k1 of its trainer.distillation.losses."
    logp, teacher, mask = two_samplers(seed)
    theirs = -verl().core_algos.kl_penalty(logp, teacher, "k1")
    torch.testing.assert_close(rn.distillation_advantage(logp, teacher, mask), theirs * mask)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("low", [None, 0.8])
def test_weights_for_another_samplers_tokens_are_verls(level, low, seed):
    f = verl().rollout_corr_helper.compute_rollout_correction_weights
    old, mu, mask = two_samplers(seed)
    theirs, _ = f(old - mu, mask.double(), level, 1.5 if low is None else f"{low}_1.5")
    above = "cap" if low is None else "zero"
    ours = rn.truncated_importance_weight(old, mu, 1.5, mask, level, above, low)
    torch.testing.assert_close(ours * mask, theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_rejected_responses_are_verls(kind, seed):
    f = verl().rollout_corr_helper.compute_rollout_rejection_mask
    old, mu, mask = two_samplers(seed)
    upper = f"1e-9_{math.exp(0.1)}" if kind == "k1" else 0.1  # of k1 verl bounds the exponential
    theirs, _ = f(old - mu, mask.double(), f"seq_mean_{kind}", upper)
    ours = rn.rollout_rejection_mask(old, mu, kind, 0.1, mask)
    assert torch.equal(ours & mask, theirs.bool())
    assert 0 < (ours & mask).sum() < mask.sum()


def dppo_of_verl(divergence, low, high):
    "Gradient of verl's loss and of ours, `ratio` times the old policy's probabilities."
    theirs = getattr(verl().core_algos, f"compute_policy_loss_dppo_{divergence}")
    config = SimpleNamespace(clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high,
                             global_batch_info={}, get=lambda name, default: default)

    def gradients(logp, old, A, mask):
        (_, ours), (_, slopes) = (value_and_grad(f, logp) for f in (
            lambda x: rn.policy_loss(x, old, A, mask, "dppo", eps_low=low, eps_high=high,
                                     divergence=divergence)[0],
            lambda x: theirs(old, x, A, mask, config=config)[0]))
        return ours, slopes
    return gradients


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("divergence, low, high", [
    ("tv", 0.05, 0.1), ("tv", 0.1, 0.05), ("kl", 0.01, 0.03), ("kl", 0.03, 0.01)])
def test_the_gradient_of_dppo_is_verls(divergence, low, high, seed):
    b = random_batch(seed)
    gradients = dppo_of_verl(divergence, low, high)
    ours, theirs = gradients(b.logp, b.logp_old, b.advantage, b.mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert 0 < (ours[0][b.mask] == 0).sum() < b.mask.sum()


def test_verl_holds_the_ratio_of_dppo_at_20():
    old, logp = torch.tensor([[-9.0]]), torch.tensor([[-5.0]])  # a ratio of e^4
    one = torch.ones(1, 1)
    (ours,), (theirs,) = dppo_of_verl("tv", 0.2, 0.2)(logp, old, one, one > 0)
    assert ours.item() == pytest.approx(-logp.sub(old).exp().item())
    assert theirs.item() == pytest.approx(-20)


@pytest.mark.parametrize("seed", SEEDS)
def test_vespo_is_trls(seed):
    weights = trl("trainer.grpo_trainer").GRPOTrainer.get_gamma_weights
    b = random_batch(seed)
    A = b.advantage[:, :1] if b.advantage.ndim == 2 else b.advantage[:, None]

    def theirs(logp):
        phi = weights(A, (logp - b.logp_old).detach(), b.mask, None)
        return -(phi * A * logp * b.mask).sum() / b.mask.sum()
    same(lambda x: rn.policy_loss(x, b.logp_old, A, b.mask, "vespo")[0], theirs, b.logp)


@pytest.mark.parametrize("seed", SEEDS)
def test_luspo_is_trls(seed):
    "Its lines of the clipped loss at a ratio of the response, and of the aggregation."
    module = trl("trainer.grpo_trainer")
    b = random_batch(seed)
    A = b.advantage[:, :1] if b.advantage.ndim == 2 else b.advantage[:, None]
    assert b.mask.any(1).all()
    args = SimpleNamespace(delta=None)
    trainer = SimpleNamespace(loss_type="luspo", epsilon_low=3e-4, epsilon_high=4e-4, args=args,
                              model=SimpleNamespace(training=False))

    def theirs(logp):
        mean = ((logp - b.logp_old) * b.mask).sum(1, keepdim=True) / b.mask.sum(1, keepdim=True)
        names = dict(vars(module), self=trainer, coef_1=mean.exp(), advantages=A, mode="eval",
                     mask=b.mask)
        for first, last in (('elif self.loss_type in ["grpo", "bnpo"', "per_token_loss = -torch"),
                            ('elif self.loss_type == "luspo":', "policy_loss = loss")):
            lines = trl_lines(module.GRPOTrainer._compute_loss, first, last)
            exec(lines.removeprefix("el"), names)
        return names["loss"]
    same(lambda x: rn.policy_loss(x, b.logp_old, A, b.mask, "luspo")[0], theirs, b.logp)


def test_the_entropys_weight_is_trls():
    "Its lines of the bonus and of its weight, over eight steps of one minibatch each."
    module = trl("trainer.grpo_trainer")
    row = names_of(FORMULAS / "11_grpo.ipynb", "export-imports", "entropy-target")
    row = row["EntropyTarget"](2.0)
    trainer = SimpleNamespace(
        _entropy_bonus_enabled=True, use_adaptive_entropy=True, entropy_coef=0.0,
        current_gradient_accumulation_steps=1, _last_world_entropy=math.inf,
        _entropy_window_stats=None, _metrics=dict(train=collections.defaultdict(list)),
        accelerator=SimpleNamespace(sync_gradients=True, gather=lambda x: x,
                                    reduce=lambda x, reduction: x),
        args=SimpleNamespace(entropy_target=2.0, entropy_coef_delta=0.005, entropy_coef_min=0.0,
                             entropy_coef_max=1.0))
    lines = trl_lines(module.GRPOTrainer._compute_loss, "if self._entropy_bonus_enabled:",
                      'self._metrics[mode]["entropy_coef"].append')
    mask, one = random_mask(0, (4, 6)), torch.ones(4, 6)
    for step in range(8):
        H = normal(step, (4, 6)).abs() + (2.5 if step in (0, 4, 5) else 0.5)
        names = dict(vars(module), self=trainer, mode="train", entropies=H, mask=mask,
                     entropy_mask=None, loss=torch.zeros(()), policy_loss=torch.zeros(()))
        exec(lines, names)
        bonus = rn.masked_mean(row(one, one * 0, None, mask, 0.2, 0.2, H), mask)
        torch.testing.assert_close(bonus, -names["loss"])
        assert row.coef == pytest.approx(trainer.entropy_coef)
    assert row.coef > 0 and bonus > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_the_baseline_of_each_token_is_verls(seed):
    "With pi of the token in the place of the sum of pi^2, whose mean it is."
    f = verl().core_algos.compute_optimal_token_baseline_advantage
    row = names_of(FORMULAS / "50_credit.ipynb", "imports", "token-baseline")["token_baseline"]
    logp, mask = -normal(seed, (6, 5)).abs(), random_mask(seed, (6, 5)).cumprod(1).bool()
    mask[:, 0] = True
    scores = normal(seed + 9, (6,))
    last = (torch.arange(5) == mask.sum(1, keepdim=True) - 1) * scores[:, None]
    theirs, _ = f(last, mask.double(), [0, 0, 0, 1, 1, 1], logp, logp.exp(),
                  handle_zero_tail=False)
    A = rn.rloo_advantage(scores.view(2, 3)).view(-1, 1) * 2 / 3  # scores less the group's mean
    ours = row(torch.ones_like(logp), A * mask, logp, mask, 0.2, 0.2, 3)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def weight(*bounds, **more):
    return lambda now, mu, mask: rn.truncated_importance_weight(now, mu, *bounds, mask, **more)


# what lesson 48 says of the presets' parts; verl bounds the inverse ratio
WEIGHTS = {("token", 2.0): weight(2.0), ("sequence", 2.0): weight(2.0, level="sequence"),
           ("token", "0.5_5.0"): weight(5.0, floor=0.5, above="zero")}
KEPT = {"seq_mean_k1": weight(1 / 0.999, level="geometric", above="zero", floor=1 / 1.001),
        "seq_sum_k1": weight(2.0, level="sequence", above="zero", floor=0.5),
        "seq_mean_k3": lambda now, mu, mask: rn.rollout_rejection_mask(now, mu, "k3", 0.01, mask)}
PRESETS = """decoupled_token_is decoupled_seq_is decoupled_token_icepop decoupled_seq_is_rs
decoupled_geo_rs decoupled_geo_rs_seq_tis decoupled_geo_rs_token_tis decoupled_k3_rs
decoupled_k3_rs_seq_tis decoupled_k3_rs_token_tis bypass_ppo_clip bypass_ppo_clip_geo_rs
bypass_ppo_clip_k3_rs bypass_pg_is bypass_pg_token_icepop bypass_pg_geo_rs
bypass_pg_geo_rs_seq_tis bypass_pg_geo_rs_token_tis disabled""".split()


def loss_of_verl(c, logp, old, mu, A, mask):
    "By its weights, its rejection and its losses, as its trainer puts them together."
    lib, m = verl(), mask.double()
    now = logp.detach() if c.bypass_mode else old
    w = c.rollout_is and lib.rollout_corr_helper.compute_rollout_correction_weights(
        now - mu, m, c.rollout_is, c.rollout_is_threshold)[0]
    if c.rollout_rs:
        m = lib.rollout_corr_helper.compute_rollout_rejection_mask(
            now - mu, m, c.rollout_rs, c.rollout_rs_threshold)[0]
    if c.bypass_mode and c.loss_type == "reinforce":
        config = SimpleNamespace(global_batch_info={})
        return lib.core_algos.compute_policy_loss_reinforce(
            mu, logp, A, m, "token-mean", config, w)[0]
    old = mu if c.bypass_mode else old
    return verl_loss(lib, "vanilla", logp, old, A, m, weight=None if c.bypass_mode else w)[0]


def loss_of_ours(c, logp, old, mu, A, mask):
    "By the table of lesson 48."
    plain = c.bypass_mode and c.loss_type == "reinforce"
    now = logp.detach() if c.bypass_mode else old
    w = c.rollout_is and WEIGHTS[c.rollout_is, c.rollout_is_threshold](now, mu, mask)
    if c.rollout_rs:
        mask = mask & (KEPT[c.rollout_rs](now, mu, mask) > 0)
    old = now if plain or not c.bypass_mode else mu
    return rn.policy_loss(logp, old, A, mask, weight=w)[0]


def test_the_table_has_all_presets_of_verl():
    kind = verl().algorithm.RolloutCorrectionConfig
    assert set(PRESETS) == {name for name, x in vars(kind).items() if isinstance(x, classmethod)}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_gradient_of_each_preset_is_verls(preset):
    c = getattr(verl().algorithm.RolloutCorrectionConfig, preset)()
    old, apart = normal(0, (24, 5)) - 3, torch.logspace(-4, 0, 24)[:, None]
    mu, logp = (old + apart * normal(seed, (24, 5)) for seed in (1, 2))
    A, mask = normal(3, (24, 1)).expand(24, 5), random_mask(4, (24, 5))
    ours, theirs = (value_and_grad(lambda x: f(c, x, old, mu, A, mask), logp)[1]
                    for f in (loss_of_ours, loss_of_verl))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    assert 0 < (ours[0] == 0).sum() < 120


def topr_of_trinity():
    "TOPR of Trinity-RFT; skipped where it is not installed."
    try: metadata.version("trinity-rft")
    except metadata.PackageNotFoundError: pytest.skip("trinity-rft is not installed")
    module = alone("trinity", ["algorithm.policy_loss_fn.topr_policy_loss"])["topr_policy_loss"]
    loss = module.TOPRPolicyLossFn(loss_agg_mode="seq-mean-token-sum")
    return lambda logp, old, A, mask: loss(logp, old, mask, A.expand_as(logp))[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_topr_is_trinitys_at_the_ratio_of_the_response(seed):
    "Trinity-RFT asks each token's own ratio; it is given that of the response in its place."
    theirs, b = topr_of_trinity(), random_batch(seed)
    A = b.advantage[:, :1] if b.advantage.ndim == 2 else b.advantage[:, None]
    assert b.mask.any(1).all()

    def by_response(logp):
        product = ((logp - b.logp_old) * b.mask).detach().sum(1, keepdim=True)
        return theirs(logp, logp.detach() - product, A, b.mask)
    same(lambda x: rn.policy_loss(x, b.logp_old, A, b.mask, "topr")[0], by_response, b.logp)
    first = b.mask & (b.mask.cumsum(1) == 1)  # a token for each response: the same as it stands
    same(lambda x: rn.policy_loss(x, b.logp_old, A, first, "topr")[0],
         lambda x: theirs(x, b.logp_old, A, first), b.logp)


STALE = dict(  # three responses of 3, 2 and 1 tokens
    log_ratio=[[0.3, -0.3, 0.1], [0.3, -0.3, -0.1], [0.05, 0.2, 0.0]],
    advantage=[[2.0], [-1.0], [0.5]], mask=[[1, 1, 1], [1, 1, 0], [1, 0, 0]])


def stale(variant, aggregation):
    "Value and gradient of ours on `STALE`, where pi_old is e^-1, e^-2 and e^-0.5."
    old = torch.tensor([[-1.0, -2.0, -0.5]] * 3, dtype=torch.float64)
    log_ratio, A, mask = (torch.tensor(x, dtype=torch.float64) for x in STALE.values())
    value, (slope,) = value_and_grad(
        lambda x: rn.policy_loss(x, old, A, mask > 0, variant, aggregation=aggregation)[0],
        old + log_ratio)
    return value, slope, rn.aggregate_loss(A * old, mask > 0, aggregation)


def test_cpgd_has_the_gradient_that_lightrft_gave():
    """`PolicyLoss(use_cpg_loss=True)` of opendilab/LightRFT at 49e62cb, lightrft/models/loss.py,
    which clips log pi in place of log r and averages within each response."""
    value, slope, constant = stale("cpgd", "seq-mean-token-mean")
    theirs = [[0, -2 / 9, -2 / 9], [1 / 6, 0, 0], [-1 / 6, 0, 0]]
    torch.testing.assert_close(slope, torch.tensor(theirs, dtype=torch.float64))
    assert (value - constant).item() == pytest.approx(0.4528490621600862, abs=1e-7)


def test_topr_tapers_a_response_where_roll_tapers_its_tokens():
    """`_compute_topr_loss` of alibaba/ROLL at 8eb27cc, roll/pipeline/agentic: a bad response of
    ratio 1 whose second token became rarer is held by e^-0.3 there, as in Trinity-RFT."""
    _, slope, _ = stale("topr", "seq-mean-token-sum")
    theirs = [[-2 / 3] * 3, [1 / 3, 0.24693940689390598, 0], [-1 / 6, 0, 0]]
    different = slope - torch.tensor(theirs, dtype=torch.float64)
    torch.testing.assert_close(different.nonzero(), torch.tensor([[1, 1]]))
    assert slope[1, 1].item() == pytest.approx(1 / 3)
    assert slope[1, 1].item() * math.exp(-0.3) == pytest.approx(theirs[1][1])
