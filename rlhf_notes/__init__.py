"""Every formula of PPO, GRPO and RLHF: explained, proved, drawn, and shipped as a library

All of `rlhf_notes.formulas` and `rlhf_notes.compat` can be imported from here, as can `PPO`,
`RLHF`, `check` and `fast`; a module is loaded when one of its names is first asked for.

Modules:

- `rlhf_notes.bridges.trl`: TRL's GRPO and DPO trainers with a policy loss or a preference loss of ours.
- `rlhf_notes.bridges.verl`: Every policy loss and advantage of ours as a `loss_mode` and an `adv_estimator` of verl.
- `rlhf_notes.cli`: `rlhf-notes`: each run by one command, with options made from the configs.
- `rlhf_notes.control.config`: Hyperparameters of PPO for control: each with its meaning, its range and its default.
- `rlhf_notes.control.envs`: Any environment of Gymnasium, many copies side by side, behind one interface.
- `rlhf_notes.control.export`: The whole policy as one module of PyTorch, for `torch.export`, ONNX and `torch.compile`.
- `rlhf_notes.control.saved`: A trainer in a file, and what no file holds: networks and schedules of one's own.
- `rlhf_notes.control.scaling`: Observations and rewards at unit scale, by the moments of all data so far.
- `rlhf_notes.control.spaces`: Observations of any space as rows of numbers: vectors, pictures, dicts, and masks.
- `rlhf_notes.control.trainer`: PPO for a user's environment: learn, predict, evaluate, film, save, load and continue.
- `rlhf_notes.exercises.engine`: Checks that name the mistake: the usual wrong functions are known, and outcomes compared.
- `rlhf_notes.exercises.facts`: Facts about a wrong function: its relation to the right one, and the term that is to blame.
- `rlhf_notes.exercises.outcomes`: Values, gradients, an exception or a hang: the outcome of one call, and how two calls differ.
- `rlhf_notes.exercises.relations`: Relations that name a mistake nobody listed: wrong sign, scaled, shifted, late, a sum.
- `rlhf_notes.exercises.substitutes`: Functions called with other arguments than they are given: a forgotten discount is one of 1.
- `rlhf_notes.fast.gpt2`: Hidden states of a GPT-2, computed only where they are read; its next tokens from a cache.
- `rlhf_notes.fast.lengths`: Rows of like length together, so that one long prompt does not pad all the others.
- `rlhf_notes.fast.linear`: Log-probabilities from hidden states without the logits, a few hundred positions at a time.
- `rlhf_notes.fast.rows`: Log-probability and entropy of rows of logits as operators, and when they pay off.
- `rlhf_notes.fast.scan`: The recursion behind returns and GAE in one compiled loop, an operator for PyTorch.
- `rlhf_notes.fast.steps`: The next tokens of Llama, Qwen, Mistral or Gemma: one step is recorded on a GPU and replayed.
- `rlhf_notes.formulas.advantage`: Returns, GAE over steps and over tokens, and advantages that need no value function.
- `rlhf_notes.formulas.credit`: The advantage of each turn of a dialogue, and what the environment's tokens teach.
- `rlhf_notes.formulas.distillation`: A teacher in place of a reward: three divergences, and the advantage of each token.
- `rlhf_notes.formulas.grpo`: GRPO, RLOO and their family: ten policy losses, one of your own, and samples of an older policy.
- `rlhf_notes.formulas.kl`: KL to the reference: three estimators as values and as losses, and coefficient controllers.
- `rlhf_notes.formulas.logprob`: The log-probability of a token and the entropy, in any precision; both for Gaussians.
- `rlhf_notes.formulas.masking`: Sums and means over the tokens that count, and five ways to reduce token losses to one number.
- `rlhf_notes.formulas.ppo`: The loss of PPO: policy, value, entropy and KL; and the tokens that spend the entropy.
- `rlhf_notes.formulas.preference`: Which of two responses is better: the losses of a reward model, and DPO with its family.
- `rlhf_notes.formulas.ratio`: Importance ratios without overflow, effective sample size, truncated weights, and M2PO's mask.
- `rlhf_notes.formulas.reward`: From a score to rewards of tokens: scale, price of KL, end of a response, penalties.
- `rlhf_notes.formulas.surrogate`: PPO's clipped objective, clip-higher and dual clip, and two ways to count what was clipped.
- `rlhf_notes.formulas.value`: The value loss and its clip, explained variance, and two exact ways to squash returns.
- `rlhf_notes.formulas.whitening`: Rewards and advantages at unit scale, padding left out; and moments that add up.
- `rlhf_notes.hub.config`: Options of a training with a model, prompts and a reward of one's own.
- `rlhf_notes.hub.load`: Load a language model and its tokenizer, and check what the trainer relies on.
- `rlhf_notes.hub.pairs`: Preferences as texts, or as chats, and the tokens of both responses after their prompt.
- `rlhf_notes.hub.prompts`: Your own task: prompts, chats and files of them, and the responses to them.
- `rlhf_notes.hub.recorder`: Keeps for `rlhf-notes view` some responses of a run, token by token.
- `rlhf_notes.hub.rewards`: Reward functions and models: what they get by name, what they may return, and their weights.
- `rlhf_notes.hub.save`: Write a policy or a reward model so that other programs load it, and nothing is lost.
- `rlhf_notes.hub.spread`: Groups whose responses all have the same score: drawn again, and warned of.
- `rlhf_notes.hub.told`: Learn from what is told: an environment's replies, and a hint beside the prompt.
- `rlhf_notes.hub.trainers`: A model, prompts and a reward, or pairs of responses: learn, generate, save, load.
- `rlhf_notes.lab`: Exercises for a course: lessons without their solutions, and marks for what is handed in.
- `rlhf_notes.language.machine`: Where a loop runs: one device in float32, or several processes, bfloat16, microbatches.
- `rlhf_notes.launch`: Begin a run, continue one, train many seeds, or train by a reward of your own.
- `rlhf_notes.reviews.pretraining`: A language model made from nothing first learns to continue texts.
- `rlhf_notes.training.devices`: The device to compute on, and the settings to compute with.
- `rlhf_notes.training.fit`: The loop around every training: progress, hooks, Ctrl-C and checkpoints.
- `rlhf_notes.training.options`: The fields of a config: default, range and explanation of each, checked by pydantic.
- `rlhf_notes.training.runs`: The directory of a run: it holds everything, survives Ctrl-C and can be continued.
- `rlhf_notes.training.seeds`: A random generator for each purpose.
- `rlhf_notes.training.signals`: Ctrl-C, numbers that have become NaN, a progress bar, and output that nothing reads.
- `rlhf_notes.view`: A run, token by token, in one HTML file that needs no network.
- `rlhf_notes.viz.slider`: A picture that moves: sliders that need no kernel.
- `rlhf_notes.viz.strip`: An episode as a film, a response token by token.
- `rlhf_notes.viz.style`: One style for every figure, and an objective beside its gradient."""

__version__ = "0.2.0"

import re as _re
import sys as _sys
from difflib import get_close_matches as _get_close_matches
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path

from . import _moved

_moved.install()


def _read(file): return (_Path(__file__).parent / file).read_text(encoding="utf-8")


def _names():
    "Public name -> module, as `__init__.pyi` says; of a star, what the module's `__all__` lists."
    found = {}
    stub = _read("__init__.pyi")
    for module, names in _re.findall(r"^from \.(\w[\w.]*) import (.+)$", stub, _re.M):
        if names == "*":
            source = _read(module.replace(".", "/") + ".py")
            names = _re.search(r"^__all__ = (\[.*?\])", source, _re.M | _re.S)[1]
        found |= dict.fromkeys(_re.findall(r"\w+(?= as|')", names), module)
    return found


_MODULE_OF = _names()
__all__ = [*_MODULE_OF, "fast"]


def __getattr__(name):
    if name == "fast":
        value = _import_module(".fast", __name__)
    elif name in _MODULE_OF:
        value = getattr(_import_module(f".{_MODULE_OF[name]}", __name__), name)
        _import_module("._docstrings", __name__).explain(value)
    else:
        raise _missing(name, _sys._getframe(1).f_code.co_name == "_handle_fromlist")
    globals()[name] = value
    return value


def _missing(name, imported):
    "The error, with a hint; `from rlhf_notes import` would replace an AttributeError by its own."
    near = " or ".join(map(repr, _get_close_matches(name, __all__)))
    hint = f"; did you mean {near}?" if near else ""
    place = _moved.PLACES.get(f"{__name__}.{name}")
    hint = f"; it was removed, use {place}" if place else hint
    if imported and (place or _find_spec(f"{__name__}.{name}") is None):
        return ImportError(f"cannot import name {name!r} from {__name__!r}{hint}", name=name)
    return AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__():
    return sorted({*globals(), *__all__})
