"""The fields of a config: default, range and explanation of each, checked by pydantic.

A config is a frozen dataclass: the type of a field holds its range, and the string below it
explains it, to the command line too. What the formulas would refuse later is refused before
anything is computed. Whole numbers of any kind count as whole: `steps=1e5` and `seed=np.int64(1)`
are taken. An error has one line per fault: the option, what came, what was expected; for an
unknown name, the nearest one; for a name of stable-baselines3's or TRL's, ours.
"""

__all__ = ['MAX_SEED', 'TINY', 'HUGE', 'Integer', 'Seed', 'Whole', 'Count', 'Size', 'Number',
           'Positive', 'Temperature', 'NonNegative', 'Fraction', 'STRICT', 'ELSEWHERE', 'OLD_NAMES',
           'TRACKERS', 'Only', 'config_class', 'text_of', 'error_text', 'our_names', 'read_json',
           'read_options', 'versions']

import functools
import inspect
import json
import sys
from difflib import get_close_matches
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from .. import __version__


MAX_SEED = 2**63 - 1  # the largest that every generator takes
TINY, HUGE = 2.0**-126, 2.0**128 - 2.0**104  # the normal numbers of float32


def _integer(x):
    "An int for a whole number of any kind: 1e5, np.int64(3)."
    whole = isinstance(x, Real) and not isinstance(x, bool) and x % 1 == 0
    return int(x) if whole and abs(x) <= MAX_SEED else x


def _number(x):
    "A float for a number of NumPy's."
    return float(x) if isinstance(x, Real) and not isinstance(x, (bool, int, float)) else x


def _fits_float32(x):
    "The formulas refuse what float32 would make infinite, or 0."
    if x == 0 or TINY <= abs(x) <= HUGE: return x
    raise PydanticCustomError("float32", "Input should fit float32")

Integer = Annotated[int, BeforeValidator(_integer)]
Seed = Annotated[Integer, Field(ge=0, le=MAX_SEED)]
Whole = Annotated[Integer, Field(ge=0, lt=2**31)]
Count = Annotated[Integer, Field(ge=1, lt=2**31)]
Size = Annotated[Integer, Field(ge=1, le=2**20)]  # of what is in memory at once
Number = Annotated[float, BeforeValidator(_number), AfterValidator(_fits_float32)]
Positive = Annotated[Number, Field(gt=0)]
Temperature = Annotated[Number, Field(ge=1e-6)]  # logits are divided by it, in float32
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]

# Python takes True for 1 and 1 for true; strict takes neither for the other.
STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", use_attribute_docstrings=True)


ELSEWHERE = dict(  # what stable-baselines3 and TRL call it -> what it is called here
    lr="learning_rate", policy="network (of PPO)", policy_kwargs="network (of PPO)",
    tensorboard_log="out",
    total_timesteps="steps", n_envs="num_envs", n_steps="num_steps", n_epochs="epochs",
    batch_size="minibatches (how many)", gae_lambda="lam", clip_range="clip",
    clip_range_vf="value_clip", ent_coef="entropy_coef", vf_coef="value_coef",
    stats_window_size="recent_episodes",
    per_device_train_batch_size="batch (responses in all)", num_generations="group",
    num_iterations="epochs", max_steps="iterations", max_completion_length="max_new_tokens",
    max_prompt_length="prompt_length", beta="kl_coef (dpo_beta for DPO)", epsilon="clip",
    epsilon_high="clip_high", loss_type="variant (dpo_kind for DPO)", scale_rewards="group_scale",
    gradient_accumulation_steps="microbatches", warmup_steps="lr_warmup",
    reward_weights="reward (a list of pairs, function and weight)",
    system_prompt="prompts (a message with the role system in each)",
    **dict.fromkeys(("stop", "stop_strings", "stop_token_id", "eos_token_id"),
                    "model (its generation_config.eos_token_id ends a response)"))


class Only:
    "Beside a field: it is read only where another option has one of these values."

    def __init__(self, option, *values):
        self.option, self.values = option, values

    def check(self, config, name, default):
        "ValueError if an option that is not read has another value than its default."
        x, why = getattr(config, name), getattr(config, self.option)
        if x != default and why not in self.values:
            raise ValueError(f"{name} must be left out for {self.option} {why}, where it has no "
                             f"effect, got {x!r}")


def config_class(cls):
    """A decorator: a frozen dataclass of options, checked by pydantic, with one line per fault in
    its ValueError: option, value, expectation."""
    made = dataclass(cls, frozen=True, config=STRICT)
    rules = [(rule, name, field.default) for name, field in made.__pydantic_fields__.items()
             for rule in field.metadata if isinstance(rule, Only)]
    make = made.__init__

    @functools.wraps(make)
    def init(self, /, *args, **kwargs):  # a file may name any option
        try:
            make(self, *args, **kwargs)
        except ValidationError as e:
            raise ValueError("\n".join(_line(made, fault) for fault in e.errors())) from None
        for rule, name, default in rules:
            rule.check(self, name, default)

    made.__init__ = init
    return made


def text_of(x) -> str:  # "" where its `__str__` fails
    "The text of users' own objects, whatever their code does."
    try:
        return str(x)
    except BaseException:
        return ""


def error_text(e) -> str:
    "The kind of an error, and what it says."
    return ": ".join(filter(None, (type(e).__name__, text_of(e))))


def our_names(
    method,  # called by users who may know another library
):  # the same
    "Make a TypeError about the arguments say what they are called here."
    @functools.wraps(method)
    def call(*args, **kwargs):
        try:
            return method(*args, **kwargs)
        except TypeError:
            _tell_names(method, args, kwargs)
            raise
    return call


def _tell_names(method, args, kwargs):
    "TypeError, with our names, if these are no arguments of the method."
    try:
        inspect.signature(method).bind(*args, **kwargs)
    except TypeError as e:
        said = [f"{x} is {ELSEWHERE[x]} here" for x in ELSEWHERE if x in kwargs]
        said += [f"{x} is left out here: env comes first, and network= tells of networks"
                 for x in args if isinstance(x, str) and x.endswith("Policy")]
        raise TypeError("; ".join([f"{method.__qualname__}: {e}", *said])) from None


def _line(cls, fault):
    if own := fault.get("ctx", {}).get("error"): return str(own)
    name = fault["loc"][0]
    if fault["type"] == "unexpected_keyword_argument":
        options = cls.__dataclass_fields__
        close = [ELSEWHERE[name]] if name in ELSEWHERE else get_close_matches(name, options, n=1)
        hint = f"did you mean {close[0]}?" if close else ", ".join(options)
        return f"{name} must be an option of {cls.__name__}: {hint}"
    return f"{name} {fault['msg'].replace('Input should', 'must')}, got {fault['input']!r}"


TRACKERS = "tensorboard", "wandb", "trackio"
OLD_NAMES = dict(query_length="prompt_length", eval_answers="eval_responses")


def read_json(text: str):
    "Read JSON; ValueError, also if it is nested deeper than Python reads."
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_options(
    path: Path,  # a JSON file with the options of a run
) -> dict:  # name -> value
    "Read options; those that an earlier version wrote come with the names of today."
    saved = read_json(path.read_text(encoding="utf-8"))
    if not isinstance(saved, dict):
        raise ValueError(f"{path.name} must hold options by their names, got a "
                         f"{type(saved).__name__}")
    return {OLD_NAMES.get(name, name): value for name, value in saved.items()}


def versions() -> dict:  # name -> version
    "Return what a result depends on besides the options."
    names = ("torch", "numpy", "gymnasium", "transformers")
    found = {name: version(name) for name in names}
    return {"rlhf_notes": __version__, "python": sys.version.split()[0], **found}
