import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import get_args

import pytest

from rlhf_notes.control.config import PendulumConfig, PPOConfig
from rlhf_notes.formulas.advantage import GROUP_SCALES as FORMULA_SCALES
from rlhf_notes.formulas.grpo import POLICY_VARIANTS
from rlhf_notes.language import config as module
from rlhf_notes.language.config import UNREAD, RLHFConfig, Variant, check_effect, check_variant
from rlhf_notes.language.model import PRESETS as MODEL_PRESETS

def test_defaults_are_whole():
    c = RLHFConfig()
    assert c.batch % c.minibatches == 0 and c.algo == "ppo" and c.responses_per_prompt == 1
    explained = [f.description for f in RLHFConfig.__pydantic_fields__.values()]
    assert len(explained) == len(RLHFConfig.__pydantic_fields__)
    assert all(len(text) > 8 for text in explained) and len(set(explained)) == len(explained)


def test_defaults_are_those_of_the_details():
    c = RLHFConfig()
    assert c.kl_target == 6 and c.kl_horizon == 10_000  # P11
    assert c.penalty == -1 and c.temperature == 1 and c.gamma == 1  # P5, P1, P6
    assert c.whiten_rewards and c.whiten_advantages and c.value_clip == 0.2  # P9, P10
    assert (c.adam, c.adam_eps, c.rm_epochs) == ("tensorflow", 1e-5, 1)  # P12, R4


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
    (dict(dpo_beta=0.0), "dpo_beta")])
def test_what_cannot_be_is_refused_by_name(bad, name):
    with pytest.raises(ValueError, match=rf"^{name}\b"): RLHFConfig(**bad)


@pytest.mark.parametrize("good",
                         [dict(algo="ppo", group=3), dict(sft_steps=0),
                          dict(kl_coef=0.0, kl_horizon=1), dict(kl_target=0.0, kl_horizon=1),
                          dict(kl_horizon=26), dict(microbatches=32), dict(stop_after=15)])
def test_what_can_be_is_taken(good):
    RLHFConfig(**good)


@pytest.mark.parametrize("config", [RLHFConfig, PPOConfig, PendulumConfig])
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
    (dict(algo="dpo", variant="grpo"), "variant"), (dict(algo="dpo", group=8), "group"),
    (dict(algo="ppo", group=8), "group"), (dict(algo="dpo", rm_epochs=2), "rm_epochs"),
    (dict(algo="grpo", dpo_beta=0.1), "dpo_beta"),
    (dict(algo="rloo", group_scale="none"), "group_scale"),
    (dict(algo="grpo", whiten_rewards=False), "whiten_rewards"),
    (dict(penalty=-2.0, overlong="keep"), "penalty"),
    (dict(algo="grpo", variant="dapo", clip=0.1), "clip"),
    (dict(algo="grpo", variant="sapo", clip_high=0.3), "clip_high"),
    (dict(label_smoothing=0.1), "label_smoothing"),
    (dict(overlong_buffer=2), "overlong_buffer"),
    (dict(model="x", preset="gpt2-small"), "preset")])
def test_an_option_without_effect_is_refused(options, name):
    with pytest.raises(ValueError, match=f"^{name} must be left out for .*, got "):
        check_effect(RLHFConfig(**options), options, own=False)
    taken = options | {name: getattr(RLHFConfig(), name)}                      # its default
    check_effect(RLHFConfig(**taken), taken, own=False)


def test_options_of_the_reviews_are_for_them():
    given = dict(preset="gpt2-small", sft_steps=1, labels=8, eval_every=1, norm_samples=2)
    check_effect(RLHFConfig(**given), given, own=False)
    for name, x in given.items():
        with pytest.raises(ValueError, match=f"^{name} must be left out for prompts of your own"):
            check_effect(RLHFConfig(**given), {name: x}, own=True)
    fields = RLHFConfig.__dataclass_fields__
    assert all(name in fields for names, *_ in UNREAD for name in names.split())


def test_groups_are_for_those_without_a_value_head():
    assert [RLHFConfig(algo=a, group=8).responses_per_prompt
            for a in ("ppo", "grpo", "rloo", "dpo")] == [1, 8, 8, 1]


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
    def choices(name): return set(get_args(RLHFConfig.__dataclass_fields__[name].type))
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
            "'transformers', 'tokenizers', 'accelerate', 'numpy'} & " "set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert module.__doc__
