import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import get_args

import pytest

from rlhf_notes.control.config import PendulumConfig, PPOConfig
from rlhf_notes.formulas.advantage import GROUP_SCALES as FORMULA_SCALES
from rlhf_notes.formulas.grpo import POLICY_VARIANTS
from rlhf_notes.hub.config import DROPPED, OwnConfig, OwnDPOConfig, OwnRunConfig, known_options
from rlhf_notes.language import config as module
from rlhf_notes.language.config import DPOConfig, LoopConfig, RLHFConfig, Variant, check_variant
from rlhf_notes.language.model import PRESETS as MODEL_PRESETS
from rlhf_notes.reviews.config import ReviewsConfig, ReviewsDPOConfig, dpo_config

ALL = ReviewsConfig, ReviewsDPOConfig, OwnConfig, OwnDPOConfig, OwnRunConfig


def test_defaults_are_whole():
    c = RLHFConfig()
    assert c.batch % c.minibatches == 0 and c.algo == "ppo" and c.responses_per_prompt == 1
    explained = {name: f.description for config in ALL for base in config.__mro__[-2::-1]
                 for name, f in base.__pydantic_fields__.items() if f.description}
    assert explained.keys() == {name for config in ALL for name in config.__dataclass_fields__}
    texts = [*explained.values()]
    assert all(len(text) > 8 for text in texts) and len(set(texts)) == len(texts)


def test_defaults_are_those_of_the_details():
    c = RLHFConfig()
    assert c.kl_target == 6 and c.kl_horizon == 10_000  # P11
    assert c.penalty == -1 and c.temperature == 1 and c.gamma == 1  # P5, P1, P6
    assert c.whiten_rewards and c.whiten_advantages and c.value_clip == 0.2  # P9, P10
    assert (c.adam, c.adam_eps) == ("tensorflow", 1e-5)  # P12
    assert ReviewsConfig().rm_epochs == 1  # R4


@pytest.mark.parametrize("bad, name", [
    (dict(algo="dqn"), "algo"),
    (dict(precision="int8"), "precision"),
    (dict(preset="huge"), "preset"),
    (dict(variant="x"), "variant"),
    (dict(group_scale="max"), "group_scale"),
    (dict(batch=0), "batch"),
    (dict(batch=2.5), "batch"),
    (dict(batch="many"), "batch"),
    (dict(minibatches=3), "minibatches"),
    (dict(microbatches=5), "microbatches"),
    (dict(microbatches=64), "microbatches"),
    (dict(algo="rloo", group=3), "group"),
    (dict(algo="grpo", group=1), "group"),
    (dict(temperature=0.0), "temperature"),
    (dict(learning_rate=float("nan")), "learning_rate"),
    (dict(gamma=1.1), "gamma"),
    (dict(stop_after=16), "stop_after"),
    (dict(response_length=8), "stop_after"),
    (dict(kl_coef=-0.1), "kl_coef"),
    (dict(kl_target=-1.0), "kl_target"),
    (dict(eval_every=0), "eval_every"),
    (dict(kl_horizon=25), "kl_horizon"),
    (dict(penalty=float("inf")), "penalty"),
    (dict(seed=-1), "seed"),
    (dict(model=3), "model"),
    (dict(whiten_rewards=1), "whiten_rewards"),
    (dict(labels=0), "labels"),
    (dict(norm_samples=1), "norm_samples"),
    (dict(clip=0.0), "clip"),
    (dict(clip_low=1.5), "clip_low"),
    (dict(clip_high=0.0), "clip_high"),
    (dict(dpo_kind="x"), "dpo_kind"),
    (dict(label_smoothing=0.6), "label_smoothing"),
    (dict(lr_anneal=-1.0), "lr_anneal"), (dict(lr_warmup=-1), "lr_warmup"),
    (dict(weight_decay=-0.1), "weight_decay"), (dict(adam_beta1=1.0), "adam_beta1"),
    (dict(adam_beta2=1.5), "adam_beta2"), (dict(entropy_coef=-0.1), "entropy_coef"),
    (dict(top_p=0.0), "top_p"), (dict(top_k=-1), "top_k"),
    (dict(dpo_beta=0.0), "dpo_beta")])
def test_what_cannot_be_is_refused_by_name(bad, name):
    kind = ReviewsDPOConfig if name in ReviewsDPOConfig.__dataclass_fields__ else ReviewsConfig
    with pytest.raises(ValueError, match=rf"^{name}\b"): kind(**bad)


@pytest.mark.parametrize("good",
                         [dict(sft_steps=0), dict(lr_anneal=0.0), dict(top_p=1.0, top_k=0),
                          dict(kl_coef=0.0, kl_horizon=1), dict(kl_target=0.0, kl_horizon=1),
                          dict(kl_horizon=26), dict(microbatches=32), dict(stop_after=15)])
def test_what_can_be_is_taken(good):
    ReviewsConfig(**good)


@pytest.mark.parametrize("config", [*ALL, PPOConfig, PendulumConfig])
def test_a_seed_is_one_that_every_source_of_chance_takes(config):
    import numpy
    import torch
    assert config(seed=2**63 - 1).seed == 2**63 - 1
    torch.Generator().manual_seed(2**63 - 1)
    numpy.random.default_rng(2**63 - 1)
    for seed in (2**63, 2**64, -1):
        with pytest.raises(
            ValueError, match=rf"^seed must be (greater|less) than or equal to .*, got {seed}$"):
            config(seed=seed)


@pytest.mark.parametrize("options, name", [
    (dict(algo="ppo", group=8), "group"), (dict(algo="rloo", group_scale="none"), "group_scale"),
    (dict(algo="grpo", whiten_rewards=False), "whiten_rewards"),
    (dict(algo="grpo", gamma=0.5), "gamma"), (dict(algo="rloo", lam=0.5), "lam"),
    (dict(penalty=-2.0, overlong="keep"), "penalty"),
    (dict(algo="grpo", variant="dapo", clip=0.1), "clip"),
    (dict(algo="teacher", kl_coef=0.1), "kl_coef"),
    (dict(algo="teacher", kl_in_loss=True), "kl_in_loss"),
    (dict(overlong_buffer=2), "overlong_buffer")])
def test_an_option_without_effect_is_refused(options, name):
    with pytest.raises(ValueError, match=f"^{name} must be left out for .*, got "):
        RLHFConfig(**options)
    RLHFConfig(**options | {name: getattr(RLHFConfig(), name)})  # its default


def test_a_range_is_for_variants_that_have_one():
    with pytest.raises(ValueError, match="^clip_high must be left out for variant sapo.* got 0.3"):
        check_variant(RLHFConfig(algo="grpo", variant="sapo", clip_high=0.3))
    check_variant(RLHFConfig(algo="grpo", variant="dapo", clip_high=0.3))


@pytest.mark.parametrize("config, given", [
    (OwnConfig, "preset"), (OwnConfig, "sft_steps"), (OwnConfig, "eval_responses"),
    (OwnConfig, "dpo_beta"), (OwnDPOConfig, "clip"), (OwnDPOConfig, "prompt_order"),
    (OwnDPOConfig, "kl_coef"), (ReviewsConfig, "lora"), (ReviewsConfig, "dynamic_sampling"),
    (ReviewsConfig, "label_smoothing"), (ReviewsDPOConfig, "rm_epochs"),
    (ReviewsDPOConfig, "epochs"), (LoopConfig, "algo"), (OwnRunConfig, "labels")])
def test_an_option_that_a_training_does_not_read_is_none(config, given):
    with pytest.raises(ValueError, match=f"^{given} must be an option of {config.__name__}"):
        config(**{given: 1})
    assert any(given in other.__dataclass_fields__ for other in ALL)


def test_a_loop_has_no_options_but_those_it_reads():
    "Each is read in its modules; a new one that nothing reads is seen here."
    from pathlib import Path
    code = "".join((Path(module.__file__).parent / f"{name}.py").read_text()
                   for name in ("loop", "machine", "rollout", "dpo"))
    code += Path(module.__file__).read_text().partition("@property")[2]
    for config in (LoopConfig, RLHFConfig, DPOConfig):
        for name in config.__dataclass_fields__:
            assert any(f"{x}.{name}" in code for x in ("c", "config", "self")), name


def test_what_other_versions_saved_is_read_by_a_table():
    saved = dict(vars(OwnConfig()), sft_steps=400, preset="tiny", dpo_beta=0.3, rm_batch=8)
    assert OwnConfig(**known_options(OwnConfig, saved)) == OwnConfig()
    assert not DROPPED & OwnConfig.__dataclass_fields__.keys()
    with pytest.raises(ValueError, match="^colour must be an option of OwnConfig"):
        OwnConfig(**known_options(OwnConfig, saved | dict(colour="red")))


def test_dpo_takes_over_what_it_reads():
    given = ReviewsConfig(seed=3, batch=16, kl_coef=0.5, sft_steps=2, learning_rate=1e-2)
    c = dpo_config(given, dpo_beta=0.2)
    assert (c.algo, c.seed, c.batch, c.sft_steps, c.dpo_beta) == ("dpo", 3, 16, 2, 0.2)


def test_groups_are_for_those_without_a_value_head():
    assert [RLHFConfig(algo=a, group=8).responses_per_prompt
            for a in ("grpo", "rloo", "teacher")] == [8, 8, 8]
    assert RLHFConfig().responses_per_prompt == DPOConfig().responses_per_prompt == 1


def test_the_kl_stands_where_the_paper_of_the_algorithm_has_it():
    def places(x):
        return [RLHFConfig(algo=a, kl_in_loss=x).loss_has_kl for a in ("ppo", "grpo", "rloo")]
    assert places(None) == [False, True, False] and places(True) == [True] * 3
    assert places(False) == [False] * 3
    assert [RLHFConfig(algo=a).beta for a in ("ppo", "grpo", "rloo")] == [0.1, 0.2, 0.1]
    assert RLHFConfig(algo="grpo", kl_in_loss=False).beta == 0.1
    assert RLHFConfig(algo="grpo", kl_coef=0.0).beta == 0.0


def test_the_coefficient_adapts_only_if_it_can():
    assert RLHFConfig().kl_adapts
    assert not RLHFConfig(kl_target=0.0).kl_adapts
    assert not RLHFConfig(kl_coef=0.0).kl_adapts


def test_names_are_those_of_the_modules_that_use_them():
    def choices(name):
        return set(get_args(ReviewsConfig.__pydantic_fields__[name].annotation))
    assert set(get_args(Variant)) == set(POLICY_VARIANTS)
    assert choices("preset") == set(MODEL_PRESETS)
    assert {None if s == "none" else s for s in choices("group_scale")} == set(FORMULA_SCALES)


@pytest.mark.parametrize("variant", get_args(Variant))
def test_ppo_takes_its_own_loss_alone(variant):
    RLHFConfig(algo="grpo", variant=variant)
    if variant == "ppo": RLHFConfig(variant=variant)
    else:
        with pytest.raises(ValueError, match=f"^variant must be ppo for algo ppo, got {variant}$"):
            RLHFConfig(variant=variant)


def test_a_registered_variant_is_one(own_variant):
    assert RLHFConfig(algo="grpo", variant=own_variant).variant == own_variant
    with pytest.raises(ValueError, match="^variant must be one of ppo, .* or registered, got x$"):
        check_variant(RLHFConfig(algo="grpo", variant="x"))  # which may be saved, to generate
    with pytest.raises(ValueError, match="^variant must be one of ppo"): RLHFConfig(variant="2 x")


def test_frozen_and_checked_again():
    with pytest.raises(FrozenInstanceError): RLHFConfig().batch = 7
    with pytest.raises(ValueError, match="minibatches"): replace(RLHFConfig(), batch=126)


def test_imports_nothing_heavy():
    code = ("import sys, rlhf_notes.language.config; sys.exit(bool({'torch', "
            "'transformers', 'tokenizers', 'accelerate', 'numpy'} & set(sys.modules)))")
    code = code.replace("rlhf_notes.language.config", "rlhf_notes.reviews.config")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert module.__doc__
