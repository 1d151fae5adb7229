"""The device to compute on, and the settings to compute with.

For RLHF, `"auto"` is a GPU if there is one. For control it is the CPU: to send work to a GPU takes
longer than to do it, where a network has a few thousand weights.

Several processes may train one language model; the launcher gives each a device. Each holds the
whole model, so a launcher that is to shard it is refused.

Models are made, and language models trained, in float32 and on the CPU unless they are sent
elsewhere, whatever the process has as its defaults.
"""

__all__ = ['LAUNCHER', 'SHARDED', 'DTYPE', 'pick_device', 'to_device', 'make_accelerator',
           'process_device', 'stopped_anywhere', 'usual_defaults']

import os
import re
import threading
from contextlib import nullcontext
from functools import wraps
from operator import attrgetter

import torch

from .fit import Setting, few_threads


def pick_device(name: str, auto: str='cpu') -> str:
    """Return the name of the device to compute on: "auto" is `auto`, "cpu" or "cuda" = a GPU if
    there is one; ValueError if torch does not see it."""
    mps = int(torch.backends.mps.is_available())
    seen = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": mps}
    if name == "auto": return auto if seen[auto] else "cpu"
    match = re.fullmatch(r"(cpu|cuda|mps)(?::(0|[1-9][0-9]*))?", name)
    if match is None:
        raise ValueError(f"device must be auto, cpu, cuda or mps, got {name!r}")
    if int(match[2] or 0) >= seen[kind := match[1]]:
        raise ValueError(f"device must be one that torch sees, got {name!r}: "
                         f"torch {torch.version.__version__} sees {seen[kind]} of {kind}; "
                         "use cpu or auto")
    return name


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    "Send a tensor of the CPU to a device; nobody waits for a GPU."
    if device.type != "cuda": return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


LAUNCHER = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
SHARDED = "FSDP", "DEEPSPEED", "MEGATRON_LM"


def make_accelerator():  # accelerate.Accelerator
    "The processes that `accelerate launch` or torchrun started, or this one alone."
    missing = [name for name in LAUNCHER if name not in os.environ]
    if missing and "LOCAL_RANK" in os.environ:
        raise ValueError(f"the environment variable {missing[0]} must be set beside LOCAL_RANK, as "
                         "torchrun does, got none")
    for name in SHARDED:
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise ValueError(f"use_{name.lower()} of accelerate must be off, as each process holds "
                             "the whole model, got true: rlhf_notes.bridges.trl brings our losses "
                             "to TRL, which shards")
    from accelerate import Accelerator
    accelerator = Accelerator(device_placement=False)
    accelerator.native_amp = False  # of another trainer in this process, or of the launcher
    return accelerator


def process_device(name: str) -> torch.device:
    "The device that the launcher gave to this process; alone, the one that is asked for."
    accelerator = make_accelerator()
    if accelerator.num_processes > 1: return accelerator.device
    return torch.device(pick_device(name, auto="cuda"))


def stopped_anywhere(accelerator, stop: threading.Event) -> bool:
    "True, in each process, if one of them is to stop, so that none waits for another."
    if stop.is_set():
        accelerator.set_trigger()
    return accelerator.check_trigger()


DTYPE = Setting(torch.get_default_dtype, torch.set_default_dtype)


def usual_defaults(*models: str):
    """A decorator: inside, a new tensor is float32, on the CPU and for gradients, and small models
    compute on one thread; `models` are attributes of a method's object, none = no model yet."""
    def decorate(function):
        @wraps(function)
        def inside(*args, **kwargs):
            threads = few_threads(*(attrgetter(name)(args[0]) for name in models))
            on_cpu = torch.get_default_device().type == "cpu"
            device = nullcontext() if on_cpu else torch.device("cpu")
            with DTYPE.held(torch.float32), device, threads, torch.inference_mode(False):
                return function(*args, **kwargs)
        return inside
    return decorate
