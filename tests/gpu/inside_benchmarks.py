"""Both benchmarks of a GPU run from end to end and write down what they measured, and on which
device.
"""
import csv

import gpu
import pytest
import rlhf_gpu
import torch

from rlhf_notes.studies import speed

NAME = torch.cuda.get_device_name()


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_formulas(kernels, tmp_path, monkeypatch, request, capsys):
    if kernels: request.getfixturevalue("with_kernels")
    monkeypatch.setattr(speed, "LONG", 0.0)
    monkeypatch.setattr(speed, "_trl", lambda: None)  # it is long to import, and not ours
    monkeypatch.setattr(speed, "copy_bandwidth", lambda device: 1e11)
    monkeypatch.setattr(speed, "GAE_SHAPES", ((20, 6), (12, 40)))
    gpu.main(["--sizes", "2x3x64", "--rounds", "1", "--out", str(tmp_path)])
    rows = [*csv.DictReader((tmp_path / "speed_gpu.csv").open())]
    assert {r["device"] for r in rows} == {NAME} and {r["task"] for r in rows} == {*speed.TASKS}
    text = (tmp_path / "speed_gpu.md").read_text()
    assert text.startswith(f"# {NAME}, torch ") and text.count("\n|") == len(rows) + 2
    assert f"Triton kernels: {'used' if kernels else 'not used'}" in capsys.readouterr().out


@pytest.mark.slow
def test_rlhf(tmp_path):
    rlhf_gpu.main(["--sizes", "tiny", "--batch", "16", "--response-length", "12", "--iterations",
                   "1", "--no-trl", "--out", str(tmp_path)])
    rows = [*csv.DictReader((tmp_path / "gpu.csv").open())]
    assert [(r["device"], r["contender"], r["precision"])
            for r in rows] == [(NAME, name, "bfloat16") for name in ("ours-ppo", "ours-grpo")]
    assert all(float(r["tokens_per_second"]) > 0 and float(r["peak_memory_MiB"]) >= 0 for r in rows)
    assert (tmp_path / "gpu.md").read_text().startswith(f"{NAME}, torch")
