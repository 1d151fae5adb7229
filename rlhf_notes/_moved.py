"""Names that 0.1 had elsewhere: whoever imports one is told its new place.

A line of `PLACES` is a name and what to use now: a module, a name of this package or a call.
"""
import sys
from functools import partial
from importlib.machinery import PathFinder

PLACES = {
    "rlhf_notes.FORMULAS": "rlhf_notes.__all__",
    "rlhf_notes.microbatch_weight": "aggregation_weights, or policy_loss(total=)",
    "rlhf_notes.control.ppo.LARGE": "rlhf_notes.control.trainer.LARGE",
    "rlhf_notes.control.ppo.PPO": "rlhf_notes.control.trainer.PPO",
    "rlhf_notes.control.ppo.RECENT": "PPO(recent_episodes=)",
    "rlhf_notes.control.ppo.SCORES": "rlhf_notes.control.trainer.SCORES",
    "rlhf_notes.control.ppo.episode_returns": "rlhf_notes.control.trainer.episode_returns",
    "rlhf_notes.control.ppo.finish": "rlhf_notes.control.trainer.finish",
    "rlhf_notes.control.ppo.train": "rlhf_notes.control.trainer.train",
    "rlhf_notes.control.scaling": "rlhf_notes.control.rollout",
    "rlhf_notes.control.spaces.mask_size": "rlhf_notes.control.spaces.mask_shape",
    "rlhf_notes.exercises.check.hint": "check.NAME.hint()",
    "rlhf_notes.exercises.check.names": "rlhf_notes.check",
    "rlhf_notes.exercises.control_checks": "rlhf_notes.exercises.check",
    "rlhf_notes.exercises.fast_checks": "rlhf_notes.exercises.check",
    "rlhf_notes.exercises.formulas_checks": "rlhf_notes.exercises.check",
    "rlhf_notes.exercises.language_checks": "rlhf_notes.exercises.check",
    "rlhf_notes.formulas.family": "rlhf_notes.formulas.grpo",
    "rlhf_notes.formulas.grpo.microbatch_weight": "rlhf_notes.aggregation_weights",
    "rlhf_notes.formulas.reward.multi_reward_advantage":
        "rlhf_notes.formulas.advantage.multi_reward_advantage",
    "rlhf_notes.hub.own_loop": "rlhf_notes.hub.trainers",
    "rlhf_notes.hub.rewards.call_reward": "rlhf_notes.hub.rewards.called",
    "rlhf_notes.hub.rewards.reward_arguments": "rlhf_notes.hub.rewards.bind",
    "rlhf_notes.hub.trainers.own_config": "rlhf_notes.hub.config.OwnConfig",
    "rlhf_notes.hub.trainers.taught_options": "RLHF(teacher=)",
    "rlhf_notes.hub.turns.add_environment": "rlhf_notes.hub.turns.Turns",
    "rlhf_notes.hub.turns.take_turns": "rlhf_notes.hub.turns.Turns",
    "rlhf_notes.language.config.Algo": "rlhf_notes.language.config.RLHFConfig",
    "rlhf_notes.language.config.UNREAD": "rlhf_notes.language.config.RLHFConfig",
    "rlhf_notes.language.config.check_effect": "rlhf_notes.language.config.RLHFConfig",
    "rlhf_notes.language.dpo.ScaledDPO": "rlhf_notes.language.dpo.DPOLoop",
    "rlhf_notes.language.dpo.make_dpo": "rlhf_notes.language.dpo.DPOLoop",
    "rlhf_notes.language.loop.count_mode": "rlhf_notes.aggregation_weights",
    "rlhf_notes.language.loop.respond": "rlhf_notes.language.loop.Loop",
    "rlhf_notes.language.loop.value_stats": "rlhf_notes.language.loop.Loop",
    "rlhf_notes.language.model.adapter_off": "rlhf_notes.language.model.as_reference",
    "rlhf_notes.language.scale": "rlhf_notes.language.machine",
    "rlhf_notes.studies.checkable.CheckableRLHF": "rlhf_notes.studies.checkable.checkable_rlhf",
    "rlhf_notes.studies.preferences": "the cells of nbs/studies/41_preferences.ipynb",
    "rlhf_notes.studies.staleness": "the cells of nbs/studies/48_staleness.ipynb",
    "rlhf_notes.training.devices.SMALL": "rlhf_notes.training.fit.SMALL",
    "rlhf_notes.training.devices.THREADS": "rlhf_notes.training.fit.THREADS",
    "rlhf_notes.training.signals.BAR": "rlhf_notes.training.fit.BAR",
    "rlhf_notes.training.signals.FIRST_LINE": "rlhf_notes.training.fit.FIRST_LINE",
    "rlhf_notes.training.signals.Lenient": "rlhf_notes.cli.Lenient",
    "rlhf_notes.training.signals.check_finite": "rlhf_notes.training.fit.check_finite",
    "rlhf_notes.training.signals.diverged": "rlhf_notes.training.fit.diverged",
    "rlhf_notes.training.signals.progress_bar": "rlhf_notes.training.fit.progress_bar",
    "rlhf_notes.training.signals.told_once": "rlhf_notes.training.runs.told_once",
}


def instead(module, name):
    "The error about a name that a module no longer has; `hasattr` is False for any other."
    if place := PLACES.get(f"{module}.{name}"):
        raise ImportError(f"cannot import name {name!r} from {module!r}; it was removed, use "
                          f"{place}", name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)


class Finder:
    "Tells of modules that are gone, and gives those that have lost a name a `__getattr__`."
    LOSERS = {name.rpartition(".")[0] for name in PLACES} - {"rlhf_notes"}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in PLACES:
            raise ModuleNotFoundError(f"{name} was removed, use {PLACES[name]}", name=name)
        if name not in cls.LOSERS: return None
        if spec := PathFinder.find_spec(name, path, target):
            run = spec.loader.exec_module
            def exec_module(module):
                module.__getattr__ = partial(instead, name)
                run(module)
            spec.loader.exec_module = exec_module
        return spec


def install():
    sys.meta_path.insert(0, Finder)
