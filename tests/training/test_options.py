import json
import math
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from inspect import signature
from typing import Literal

import numpy as np
import pytest
import torch
from pydantic import Field

from rlhf_notes import RLHF, checks
from rlhf_notes.control.config import PPOConfig
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.training.options import (
    ELSEWHERE,
    HUGE,
    MAX_SEED,
    TINY,
    Count,
    NonNegative,
    Positive,
    Seed,
    config_class,
    read_options,
)
from rlhf_notes.training.options import Fraction as Share

@config_class
class Options:
    seed: Seed = Field(0, description="the seed")
    count: Count = Field(2, description="a count")
    rate: Positive = Field(0.1, description="a rate")
    gamma: Share = Field(0.9, description="a share")
    coef: NonNegative = Field(0.0, description="a weight")
    mode: Literal["a", "b"] = Field("a", description="a name")
    device: str = Field("auto", description="any string")
    scale: bool = Field(False, description="yes or no")

    def __post_init__(self):
        if self.count % 2: raise ValueError(f"count must be even, got {self.count}")


@pytest.mark.parametrize("bad, words", [
    (dict(seed=-1), "seed must be greater than or equal to 0, got -1"),
    (dict(seed=2**63),
     "seed must be less than or equal to 9223372036854775807, got " "9223372036854775808"),
    (dict(seed=1.5), "seed must be a valid integer, got 1.5"),
    (dict(seed=np.bool_(True)), "seed must be a valid integer, got np.True_"),
    (dict(count=1e300), "count must be a valid integer, got 1e+300"),
    (dict(count=math.nan), "count must be a valid integer, got nan"),
    (dict(count=np.int64(3)), "count must be even, got 3"),
    (dict(seed=True), "seed must be a valid integer, got True"),
    (dict(seed="1"), "seed must be a valid integer, got '1'"),
    (dict(seed=None), "seed must be a valid integer, got None"),
    (dict(count=0), "count must be greater than or equal to 1, got 0"),
    (dict(count=2**31), "count must be less than 2147483648, got 2147483648"),
    (dict(count=3), "count must be even, got 3"),
    (dict(rate=0.0), "rate must be greater than 0, got 0.0"),
    (dict(rate=math.nan), "rate must be a finite number, got nan"),
    (dict(rate=math.inf), "rate must be a finite number, got inf"),
    (dict(rate=1e-39), "rate must fit float32, got 1e-39"),
    (dict(rate=1e39), "rate must fit float32, got 1e+39"),
    (dict(rate=True), "rate must be a valid number, got True"),
    (dict(coef=1e-300), "coef must fit float32, got 1e-300"),
    (dict(gamma=1.5), "gamma must be less than or equal to 1, got 1.5"),
    (dict(gamma="0.9"), "gamma must be a valid number, got '0.9'"),
    (dict(coef=-1), "coef must be greater than or equal to 0, got -1"),
    (dict(mode="c"), "mode must be 'a' or 'b', got 'c'"),
    (dict(device=3), "device must be a valid string, got 3"),
    (dict(scale=1), "scale must be a valid boolean, got 1"),
    (dict(scale="yes"), "scale must be a valid boolean, got 'yes'"),
    (dict(sed=3), "sed must be an option of Options: did you mean seed?"),
    (dict(xyz=3), "xyz must be an option of Options: seed, count,"),
    (dict(seed=-1, gamma=2),
     "seed must be greater than or equal to 0, got -1\ngamma must be less "
     "than or equal to 1, got 2"),
])
def test_faults_are_named_one_per_line(bad, words):
    with pytest.raises(ValueError) as e: Options(**bad)
    assert str(e.value).startswith(words) and type(e.value) is ValueError


RENAMED = [("query_length", "prompt_length"), ("eval_answers", "eval_responses")]


@pytest.mark.parametrize("old, new", RENAMED)
def test_an_old_name_is_answered_with_the_new_one(old, new):
    words = f"^{old} must be an option of ReviewsConfig: did you mean {new}\\?$"
    with pytest.raises(ValueError, match=words): ReviewsConfig(**{old: 20})
    assert getattr(ReviewsConfig(**{new: 20}), new) == 20


CONTROL = [name for name, ours in ELSEWHERE.items()
           if ours.split()[0] in (*PPOConfig.__dataclass_fields__, "network", "out")]


@pytest.mark.parametrize("name, cls", [(name, PPOConfig if name in CONTROL else ReviewsConfig)
                                       for name in ELSEWHERE])
def test_another_librarys_name_is_answered_with_ours(name, cls):
    ours = ELSEWHERE[name].split()[0]
    assert ours in (*cls.__dataclass_fields__, "network", "out", *signature(RLHF).parameters)
    words = f"{name} must be an option of {cls.__name__}: did you mean {ELSEWHERE[name]}?"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"): cls(**{name: 1})


@pytest.mark.parametrize("old, new", RENAMED)
def test_a_file_with_old_names_is_read_with_the_new_ones(old, new, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"seed": 3, old: 20}))
    assert read_options(tmp_path / "config.json") == {"seed": 3, new: 20}


def test_values_in_range_pass():
    assert Options(seed=MAX_SEED, rate=1, mode="b", scale=True).rate == 1
    assert torch.tensor(MAX_SEED).item() == MAX_SEED
    assert Options(coef=0.0, gamma=0).coef == 0 and Options(rate=HUGE).rate == HUGE


@pytest.mark.parametrize("kind", [int, float, np.int64, np.uint8, np.float32, np.float64, Fraction])
def test_numbers_of_any_kind_become_pythons_own(kind):
    options = Options(seed=kind(4), count=kind(2), rate=kind(3), gamma=kind(1))
    assert options == Options(seed=4, count=2, rate=3.0, gamma=1.0)
    assert {type(x) for x in (options.seed, options.count)} == {int}
    assert kind is int or {type(x) for x in (options.rate, options.gamma)} == {float}


def test_the_bounds_are_those_of_float32_and_of_the_formulas():
    precision = torch.finfo(torch.float32)
    assert (TINY, HUGE) == (precision.tiny, precision.max) == (checks._TINY, checks._HUGE)


def test_a_config_is_frozen_and_its_variants_are_checked():
    with pytest.raises(FrozenInstanceError): Options().seed = 3
    with pytest.raises(ValueError, match="^count must be even"): replace(Options(), count=3)


def test_importing_the_options_loads_nothing_heavy():
    code = ("import sys, rlhf_notes.training.options; print([m for m in ('torch', "
            "'numpy', 'matplotlib', 'accelerate') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          check=True).stdout.strip() == "[]"
