"""The page of metrics: every column that a training logs has its text and its picture, and none
that it does not log.
"""
import csv
import re
import sys
from dataclasses import asdict

import metrics
import nbformat
import notebooks
import pytest
from test_words import NBS, code_names, linked, module_of, tables

from rlhf_notes.control.config import PendulumConfig, PPOConfig
from rlhf_notes.control.trainer import PPO
from rlhf_notes.reviews import pipeline
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.training.runs import Run

FILES = {"control": "control", "`sft.csv`": "sft", "`reward_model.csv`": "reward_model",
         "language": "rl"}
RESULTS = NBS / "results"


def header(path):
    with open(path, newline="", encoding="utf-8") as f: return next(csv.reader(f))


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    "What trainings write, by their files: {(file, column)}."
    tmp, found = tmp_path_factory.mktemp("runs"), set()
    for config in (PPOConfig(steps=64, num_envs=4, num_steps=16, epochs=1, minibatches=1),
                   PendulumConfig(steps=64, num_envs=4, num_steps=16, epochs=1, minibatches=1)):
        ppo, run = (PPO(**vars(config)),
                    Run.create(tmp / type(config).__name__, dict(task="control") | asdict(config)))
        run.log(ppo.iterate(), 64)
        run.finish({})
        found |= {("control", c) for c in header(run.path / "metrics.csv")}
    config = ReviewsConfig(device="cpu", sft_steps=2, sft_batch=4, labels=8, rm_batch=4,
                        norm_samples=8, batch=8, minibatches=2, iterations=1, eval_responses=4)
    run = Run.create(tmp / "rlhf", dict(task="rlhf") | asdict(config))
    pipeline.train(pipeline.Training(config), run)
    for file, name in (("sft", "sft"), ("reward_model", "reward_model"), ("rl", "metrics")):
        found |= {(file, c) for c in header(run.path / f"{name}.csv")}
    return found


def kinds(text):
    return [FILES[f]
            for f
            in re.findall("|".join(FILES),
                          text.rpartition(")")[2].replace("both", "control, language"))]


@pytest.fixture(scope="module")
def sections():
    "(names and perhaps a stage, text, figure) under each heading that names metrics."
    cells = nbformat.read(NBS / "metrics.ipynb", as_version=4).cells
    headings = [(re.match(r"### (`.+)", text.source), text.source, figure)
                for text, figure in zip(cells, cells[1:]) if text.cell_type == "markdown"]
    return [(m[1], text, figure) for m, text, figure in headings if m]


def described(sections):
    rows = [(file, r["column"].strip("`")) for r in tables("metrics.ipynb") if "in" in r
            for file in kinds(r["in"])]
    return rows + [(file, name) for heading, text, _ in sections
                   for name in re.findall(r"`(\w+)`", heading) for file in kinds(source(text))]


def source(text): return re.search(r"\. \*(.+)\*$", text, re.M)[1]


def test_every_column_is_described_and_no_other(logged, sections):
    found = described(sections)
    assert len(found) == len(set(found)) and set(found) == logged


def test_sections_name_what_computes_them(sections):
    for heading, text, _ in sections:
        modules = [m for m in map(module_of, linked(dict(lesson=source(text)))) if m is not None]
        assert modules, heading
        for name, _ in code_names(re.sub(r"`\w+\.csv`", "", source(text))):
            assert any(
                name in m.__all__ for m in modules), f"{heading}: no linked lesson exports {name}"


def test_every_metric_has_its_text_and_its_picture(sections):
    "Under each heading: healthy, not, what to do; then a figure of both."
    for heading, text, figure in sections:
        for part in ("**Healthy:**", "**Not:**", "**Do:**"):
            assert part in text, f"{heading}: no {part}"
        assert len(
            notebooks.directives(figure.source).get("fig-alt", "")) > 40, f"{heading}: no picture"
        assert any("image/svg+xml" in out.get("data", {})
                   for out in figure.outputs), f"{heading}: the picture is not stored"


def test_the_stored_curves_are_those_of_the_command(logged):
    "The runs that the command makes, whole, with the columns that trainings log today."
    for file, changes, rows in (
        ("control", metrics.CONTROL, PPOConfig().iterations),
        ("sft", metrics.SFT, ReviewsConfig().sft_steps),
        ("reward_model", metrics.REWARD_MODEL, ReviewsConfig().labels // ReviewsConfig().rm_batch),
        ("rl", metrics.RL, ReviewsConfig().iterations)):
        with open(RESULTS / f"metrics_{file}.csv", newline="", encoding="utf-8") as f:
            stored = list(csv.DictReader(f))
        assert ({("run" if c == "run" else (file, c)) for c in stored[0]} == {"run"}
                | {x for x in logged if x[0] == file})
        runs = [r["run"] for r in stored]
        assert {run: runs.count(run) for run in runs} == {
            metrics.name(change): rows for change in changes}


def test_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["metrics.py", "--short", "--out", str(tmp_path)])
    for name in ("CONTROL", "SFT", "REWARD_MODEL"):
        monkeypatch.setattr(metrics, name, getattr(metrics, name)[:2])
    monkeypatch.setattr(metrics, "RL", (metrics.RL[0], metrics.RL[-1]))
    metrics.main()
    for file in FILES.values():
        assert header(tmp_path / f"metrics_{file}.csv") == header(RESULTS / f"metrics_{file}.csv")
    with open(tmp_path / "metrics_rl.csv", newline="", encoding="utf-8") as f:
        healthy, _, mistaken, _ = csv.DictReader(f)
    # sampler and reference disagree from the first answer on
    assert mistaken["run"] == "sampled_at=0.7"
    assert abs(float(mistaken["kl_k1"])) > 0.05 > 1e-4 > abs(float(healthy["kl_k1"]))
