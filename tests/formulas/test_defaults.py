"""The caller's default dtype and default device change no number, no dtype and no place."""
import runpy
from pathlib import Path

import pytest
import torch

import rlhf_notes as rn
from rlhf_notes.fast import scan

SHARED = runpy.run_path(str(Path(__file__).with_name("test_compile.py")))  # a call of every formula
CALLS, NAMES = SHARED["CALLS"], sorted(set(SHARED["CALLS"]) - set(SHARED["WITH_INFO"]))


def computed(name, dtype):
    "Value and gradients for inputs of one dtype."
    f, *inputs = CALLS[name]()
    leaves = [x.to(dtype).requires_grad_(True) for x in inputs]
    y = f(*leaves)
    grads = torch.autograd.grad(
        y.sum(), leaves, allow_unused=True, materialize_grads=True) if y.requires_grad else ()
    return y.detach(), *grads


@pytest.fixture(autouse=True)
def many(monkeypatch):
    "However few the numbers are, the compiled loops run."
    monkeypatch.setattr(scan, "SMALL", 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_default_dtype_changes_nothing(name):
    for dtype in (torch.float32, torch.float64):
        expected, before = computed(name, dtype), torch.get_default_dtype()
        for default in (torch.float16, torch.bfloat16, torch.float64):
            torch.set_default_dtype(default)
            try: got = computed(name, dtype)
            finally: torch.set_default_dtype(before)
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_default_device_changes_nothing(name):
    expected = computed(name, torch.float32)
    f, *inputs = CALLS[name]()
    with torch.device("meta"): y = f(*(x.float() for x in inputs))
    assert y.device.type == "cpu" and torch.equal(y, expected[0])


def test_moments_stay_where_they_are_and_in_double_precision():
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            moments = rn.RunningMoments((2,))
            moments.load_state_dict(rn.RunningMoments((2,)).state_dict())
    finally: torch.set_default_dtype(torch.float32)
    moments.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert moments.mean.dtype == torch.float64
    assert moments.mean.tolist() == [2, 4]
    assert moments.var.tolist() == [1, 4]
