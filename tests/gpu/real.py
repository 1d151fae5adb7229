"""The same tests on a GPU that is there: `PYTHONPATH=tests/gpu pytest -p real
tests/gpu/inside_*.py`.

Takes the place of `pretend`. What waits for the device is what PyTorch's own debug mode warns of:
without its kind, and launches are not counted.
"""
import contextlib
import os
import sys
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils import _pytree as pytree

sys.modules["pretend"] = sys.modules[__name__]
STATE = SimpleNamespace(real=True, outside=0, kernels=0, recorded=0)
REAL_GRAPHS = torch.cuda.make_graphed_callables


def moved(tree, device):
    return pytree.tree_map(lambda x: x.detach().to(device).requires_grad_(x.requires_grad)
                           if isinstance(x, torch.Tensor) else x, tree)
def to_gpu(tree, index=0): return moved(tree, torch.device("cuda", index))
def on_cpu(tree):
    return pytree.tree_map(lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else x, tree)
def inner(x): return x.detach().cpu()


@contextlib.contextmanager
def counted():
    found = SimpleNamespace(kinds=Counter(), lines=Counter(), launches=0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try: yield found
        finally: torch.cuda.set_sync_debug_mode("default")
    for w in told:
        if "synchronizing CUDA operation" not in str(w.message): continue
        found.kinds["wait"] += 1
        found.lines["wait", f"{os.path.relpath(w.filename)}:{w.lineno}"] += 1


def make_graphed_callables(*args, **kwargs):
    STATE.recorded += 1
    return REAL_GRAPHS(*args, **kwargs)


torch.cuda.make_graphed_callables = make_graphed_callables


def pytest_collection_modifyitems(items):
    "A recording must not change the stream on which a weight's gradient is added up."
    torch.set_warn_always(True)
    for item in items: item.add_marker(pytest.mark.filterwarnings("error:The AccumulateGrad node"))


class Launcher:
    "A Triton kernel whose launches are counted."
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid):
        STATE.kernels += 1
        return self.kernel[grid]


@pytest.fixture(autouse=True)
def pretended(monkeypatch):
    "Kernels are off; float32 is float32."
    from rlhf_notes import fast
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr(fast, "HAS_TRITON", False)


@pytest.fixture
def with_kernels(pretended, monkeypatch):
    "Triton's kernels, however few the numbers."
    from rlhf_notes import fast
    from rlhf_notes.fast import kernels, rows
    monkeypatch.setattr(fast, "HAS_TRITON", True)
    for name in ("_forward", "_backward", "_draw", "_scan", "_gae"):
        monkeypatch.setattr(kernels, name, Launcher(getattr(kernels, name)))
    monkeypatch.setattr(rows, "LARGE", 0)
