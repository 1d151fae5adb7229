import pytest
import torch

from rlhf_notes.training.devices import pick_device


@pytest.mark.parametrize("name, gpus, auto, expected", [
    ("auto", 0, "cpu", "cpu"), ("auto", 2, "cpu", "cpu"), ("auto", 0, "cuda", "cpu"), ("auto", 2, "cuda", "cuda"),
    ("cpu", 0, "cuda", "cpu"), ("cuda", 1, "cpu", "cuda"), ("cuda:1", 2, "cpu", "cuda:1"),
    ("cuda", 0, "cpu", "got 'cuda': torch .* sees 0 of cuda"), ("cuda:2", 2, "cpu", "got 'cuda:2': torch .* sees 2 of cuda"),
    ("gpu", 2, "cpu", "device must be auto, cpu, cuda or mps, got 'gpu'"), ("cuda:x", 2, "cpu", "device must be auto"),
    ("cuda:\N{SUPERSCRIPT TWO}", 3, "cpu", "device must be auto, "), ("cuda:", 1, "cpu", "device must be auto, "), ("cuda:01", 2, "cpu", "device must be auto, "), ("", 2, "cpu", "device must be auto, "),
])
def test_pick_device(monkeypatch, name, gpus, auto, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if " " not in expected: assert pick_device(name, auto) == expected
    else:
        with pytest.raises(ValueError, match=expected): pick_device(name, auto)


@pytest.mark.parametrize("is_there", [True, False])
def test_pick_an_apple_gpu(monkeypatch, is_there):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: is_there)
    if is_there: assert pick_device("mps") == "mps"
    else:
        with pytest.raises(ValueError, match="got 'mps': torch .* sees 0 of mps; use cpu or auto"): pick_device("mps")
