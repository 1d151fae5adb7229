import importlib.util
import logging
import warnings

import pytest

from rlhf_notes import cli
from rlhf_notes.language import compare
from rlhf_notes.language.config import RLHFConfig
from rlhf_notes.language.variants import prepare

SMALL = dict(device="cpu", sft_steps=2, sft_batch=8, labels=16, norm_samples=16, batch=16, iterations=2, eval_answers=8, kl_target=0.0)


@pytest.fixture(scope="module")
def start(): return prepare(RLHFConfig(**SMALL))


def made_up(contender, seed, seconds): return dict(contender=contender, seed=seed, seconds_per_iteration=seconds, tokens_per_second=100 / seconds, true_score=float(seed))


def test_ratios_are_paired():
    rows = [made_up("ours-grpo", 0, 1.0), made_up("ours-ppo", 0, 2.0), made_up("trl-grpo", 0, 3.0), made_up("trl-grpo", 1, 8.0), made_up("ours-grpo", 1, 4.0), made_up("ours-ppo", 1, 2.0), made_up("trl-ppo", 0, 10.0), made_up("trl-ppo", 1, 14.0)]
    assert compare.ratios(rows, "trl-grpo") == dict(median=2.5, low=2.0, high=3.0) and compare.ratios(rows, "trl-ppo")["median"] == 6.0
    header, *lines = compare.table(rows)
    assert [line[0] for line in lines] == ["ours-grpo", "ours-ppo", "trl-grpo", "trl-ppo"] and lines[0][3] == "1" and lines[2][1:] == ("5500", "23", "2.5 [2.0, 3.0]", "0.50")


def test_quiet_puts_everything_back(capsys):
    from transformers.utils import logging as theirs
    before = theirs.get_verbosity(), logging.root.manager.disable
    with pytest.raises(KeyError), compare.quiet():
        print("hear me"); warnings.warn("and me"); logging.getLogger("x").warning("and me")
        raise KeyError
    assert capsys.readouterr() == ("", "") and (theirs.get_verbosity(), logging.root.manager.disable) == before


@pytest.mark.parametrize("name", ["ours-grpo", "ours-ppo", "trl-grpo", "trl-ppo"])
def test_each_contender_does_the_same_work(start, name):
    if name not in compare.contenders(): pytest.skip(f"{name} is not installed")
    row = compare.race(name, start, 2)
    assert tuple(row) == compare.COLUMNS and row["contender"] == name and row["iterations"] == 2 and row["seconds"] > 0
    assert row["tokens_per_second"] * row["seconds"] == pytest.approx(2 * 16 * 16)
    train, changes, _ = compare.contenders()[name]
    config = start.trainer(**changes, iterations=3).config
    ends, lm = train(start, config)
    assert len(ends) == 3 and ends == sorted(ends)
    assert any((x != y).any() for x, y in zip(lm.parameters(), start.lm.parameters())) and lm.config.n_layer == start.lm.config.n_layer


def test_the_command(tmp_path, monkeypatch, capsys, start):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "contenders", lambda: {"ours-grpo": (compare.ours, dict(algo="grpo"), "ours"), "ours-ppo": (compare.ours, {}, "ours too")})
    asked = []
    monkeypatch.setattr(compare, "prepare", lambda config: asked.append((config.seed, config.device)) or start)
    assert cli.main(["compare", "--task", "rlhf", "--seeds", "2", "--iterations", "1"]) == 0
    out, _ = capsys.readouterr()
    assert asked == [(0, "cpu"), (1, "cpu")] and "rlhf on cpu, seeds 0 to 1, 1 iterations each" in out
    lines = (tmp_path / "runs" / "compare-rlhf" / "compare.csv").read_text().splitlines()
    assert lines[0] == ",".join(compare.COLUMNS) and [line.split(",")[2] for line in lines[1:]] == ["ours-grpo", "ours-ppo", "ours-ppo", "ours-grpo"]
    assert "TRL is not installed" in out and "tokens / s" in out and "compare.csv" in out
    assert cli.main(["compare", "--task", "rlhf"]) == 2
    asked.clear(); monkeypatch.setattr(cli, "pick_device", lambda name, auto: "cuda:1" if (name, auto) == ("auto", "cuda") else name)
    assert cli.main(["compare", "--task", "rlhf", "--seed", "5", "--seeds", "1", "--iterations", "1", "--device", "auto", "--out", "gpu"]) == 0
    assert asked == [(5, "cuda:1")] and "rlhf on cuda:1, seeds 5 to 5" in capsys.readouterr().out and '"device": "cuda:1"' in (tmp_path / "gpu" / "config.json").read_text()


def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path, capsys):
    path = cli.Path(cli.__file__).parent.parent / "benchmarks" / "rlhf_gpu.py"
    spec = importlib.util.spec_from_file_location("rlhf_gpu", path)
    module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
    module.main(["--device", "cpu", "--presets", "tiny", "--batch", "16", "--response-length", "16", "--iterations", "1", "--no-trl", "--out", str(tmp_path)])
    rows = [line.split(",") for line in (tmp_path / "gpu.csv").read_text().splitlines()]
    assert tuple(rows[0]) == module.COLUMNS and [r[4] for r in rows[1:]] == ["ours-ppo", "ours-grpo"] and all(float(x) > 0 for r in rows[1:] for x in r[8:12])
    assert (tmp_path / "gpu.md").read_text().startswith("CPU, torch")
    with pytest.raises(SystemExit) as e: module.main(["--device", "cuda:99"])
    assert e.value.code == 2 and "device 'cuda:99' is not there" in capsys.readouterr().err
