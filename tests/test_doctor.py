"The doctor reads the logs of four libraries, names planted faults, and cries no wolf."
import csv
import json
import math
from pathlib import Path

import notebooks
import pytest
import site_pages

from rlhf_notes import PPO, cli
from rlhf_notes.doctor import DIALS, RULES, SITE, Finding, examine, read_log, series
from rlhf_notes.studies.failures import recorded
from rlhf_notes.training.runs import Run

ROWS = [dict(step=i, entropy=1.5, approx_kl=0.09) for i in range(1, 7)]


def found(rows): return [x.fault for x in examine(rows)]


def healthy(**dials):
    "Rows of a training without a fault, with some dials replaced by functions of the step."
    usual = dict(score=lambda i: 0.1 * i, kl_k1=lambda i: 0.5 * (i - 1),
                 entropy=lambda i: 2 - i / 9,
                 ratio=lambda i: 1.001, approx_kl=lambda i: 0.01, clip_fraction=lambda i: 0.03,
                 valid=lambda i: 1.0, explained_variance=lambda i: 0.5, grad_norm=lambda i: 0.7)
    return [dict(iteration=i, **{k: f(i) for k, f in (usual | dials).items()})
            for i in range(1, 9)]


def test_a_healthy_training_gets_no_finding_however_short():
    for n in range(1, 9): assert not found(healthy()[:n])


FAULTS = [
    ("the log-probabilities of sampler and update differ", dict(kl_k1=lambda i: 0.5)),
    ("the ratio is not 1 on average", dict(ratio=lambda i: 1.1)),
    ("the KL is negative", dict(kl_k1=lambda i: (1 - i) / 5)),
    ("the KL to the reference runs away", dict(kl_k1=lambda i: 4 * (i - 1))),
    ("the KL to the reference runs away", dict(kl=lambda i: i - 1)),
    ("the reference is the policy itself", dict(kl_k1=lambda i: 1e-9 * (-1)**i)),
    ("the entropy collapses", dict(entropy=lambda i: 2 / i**2)),
    ("the reward falls", dict(score=lambda i: 1 - i)),
    ("most responses have no end", dict(valid=lambda i: 1 / i)),
    ("the updates are too large", dict(approx_kl=lambda i: 0.06)),
    ("the clip holds too many samples", dict(clip_fraction=lambda i: 0.1)),
    ("the values explain nothing", dict(explained_variance=lambda i: -0.1)),
    ("most groups have no spread", dict(frac_reward_zero_std=lambda i: 0.6)),
    ("there is no gradient", dict(grad_norm=lambda i: float(i > 6))),
    ("a number is not finite", dict(grad_norm=lambda i: math.nan if i == 4 else 1.0)),
]


@pytest.mark.parametrize("fault, dials", FAULTS)
def test_a_fault_is_named_by_its_dial_alone(fault, dials):
    rows = healthy(**dials)
    assert found(rows) == [fault]
    finding, = examine(rows)
    assert finding.column in dials
    assert finding.value == pytest.approx(dials[finding.column](finding.step), nan_ok=True)


def test_every_rule_is_tried():
    assert {fault for _, fault, *_ in RULES} <= {fault for fault, _ in FAULTS}
    assert {d for dials, *_ in RULES for d in dials} <= DIALS.keys()


def test_a_rule_with_two_dials_needs_both():
    assert not found([dict(iteration=i, kl_k1=0.0) for i in range(1, 9)])


def test_pages_are_there():
    pages = {f"{SITE}{site_pages.page(path)}.html" for path in notebooks.notebooks()}
    for _, _, page, *_ in RULES:
        assert str(Finding("", "", 1, 0.0, "", page)).split()[-1] in pages, page


def test_four_libraries_and_their_formats_are_one(tmp_path):
    console = "\n".join(f"(pid=7) step:{r['step']} - actor/entropy:np.float64({r['entropy']}) - "
                        f"actor/ppo_kl:{r['approx_kl']}" for r in ROWS)
    lines = "\n".join(json.dumps(dict(step=r["step"], data={
        "actor/entropy": r["entropy"], "actor/ppo_kl": r["approx_kl"]})) for r in ROWS)
    sb3 = ["time/total_timesteps,train/entropy_loss,train/approx_kl",
           *(f"{r['step']},{-r['entropy']},{r['approx_kl']}" for r in ROWS)]
    for name, text in {"verl.log": console, "verl.jsonl": lines, "progress.csv": "\n".join(sb3),
                       "trainer_state.json": json.dumps(dict(log_history=ROWS))}.items():
        (tmp_path / name).write_text(text)
        dials = series(read_log(tmp_path / name))
        assert dials["entropy"].values == [1.5] * 6 and dials["entropy"].steps == [*range(1, 7)]
        assert found(read_log(tmp_path / name)) == ["the updates are too large"], name


def test_the_share_without_an_end_is_turned():
    rows = [dict(step=i, **{"completions/clipped_ratio": 0.75}) for i in (1, 2)]
    assert series(rows)["ended"].values == [0.25, 0.25]
    finding, = examine(rows)
    assert finding.fault == "most responses have no end" and finding.value == 0.75  # as logged


@pytest.mark.parametrize("rate, said", [
    ("1e-4", ["most responses have no end"]),
    ("0.2", ["the entropy collapses", "most responses have no end",
             "the clip holds too many samples"])])
def test_trl_and_its_rate(rate, said):
    "TRL 1.16, `grpo` of bridges/trl_parts.py: 24 steps, num_iterations=4, beta=0.04, 16 tokens."
    assert found(read_log(Path(__file__).parent / "logs" / f"trl_grpo_rate_{rate}.json")) == said


@pytest.mark.parametrize("rate, said", [(3e-3, []), (0.1, ["the updates are too large"])])
def test_our_control_and_its_rate(rate, said, tmp_path):
    run = Run.create(tmp_path / "run", dict(task="cartpole"))
    PPO(steps=10_240, learning_rate=rate).learn(run=run)
    assert found(read_log(run.path / "metrics.csv")) == said


def test_stable_baselines3_with_a_rate_too_high(tmp_path):
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import configure
    model = sb3.PPO("MlpPolicy", make_vec_env("CartPole-v1", 4, seed=0), n_steps=64,
                    batch_size=64, seed=0, device="cpu", learning_rate=0.1)
    model.set_logger(configure(str(tmp_path), ["csv", "tensorboard"]))
    model.learn(4 * 256)
    for path in (tmp_path / "progress.csv", tmp_path):
        assert "the updates are too large" in found(read_log(path))


def test_the_command(tmp_path, capsys):
    log = tmp_path / "trainer_state.json"
    log.write_text(json.dumps(dict(log_history=ROWS)))
    assert cli.main(["doctor", str(log)]) == 1
    out = capsys.readouterr().out
    assert "the updates are too large: approx_kl is 0.09 at step 1" in out
    assert "formulas/ppo.html" in out
    log.write_text(json.dumps(dict(log_history=[r | dict(approx_kl=0.01) for r in ROWS])))
    assert cli.main(["doctor", str(log)]) == 0
    assert "nothing found in 6 rows, by step, entropy, approx_kl" in capsys.readouterr().out


@pytest.mark.parametrize("name, text", [
    ("trainer_state.json", "{}"), ("x.json", "{"), ("x.csv", ""), ("x.csv", "a,b\n1,2\n"),
    ("x.jsonl", "[1]"), ("x.csv", "step\n1\n"), ("x.bin", "\udcff")])
def test_what_is_no_log_is_refused(name, text, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert cli.main(["doctor", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("rlhf-notes: the log must ") and err.count("\n") == 1
    assert cli.main(["doctor", str(tmp_path / "none.csv")]) == 2


def runs_in(path, key):
    "{value of `key`: rows of numbers} of a file of results."
    found = {}
    with open(notebooks.ROOT / "nbs" / path, newline="") as f:
        for row in csv.DictReader(f):
            found.setdefault(row.pop(key), []).append(
                {k: float(x) for k, x in row.items() if x})
    return found


@pytest.mark.parametrize("task", ["cartpole", "pendulum"])
def test_no_intact_training_of_control_gets_a_finding(task):
    runs = runs_in(f"control/results/{task}_curves.csv", "seed")
    assert len(runs) == 20 and not [seed for seed, rows in runs.items() if found(rows)]


def test_a_rate_too_high_in_control_is_seen_without_a_kl_to_the_reference():
    runs = runs_in("results/metrics_control.csv", "run")
    collapsed, healthy = (next(rows for name, rows in runs.items() if name.startswith(start))
                          for start in ("learning_rate=0.05", "healthy"))
    assert found(collapsed) == ["the entropy collapses", "the updates are too large"]
    assert not found(healthy)


def test_no_intact_training_of_the_gallery_gets_a_finding():
    intact = [run for (name, _), run in recorded()[1].items() if name in ("ppo", "cooler", "grpo")]
    assert len(intact) == 30
    for run in intact:
        rows = [dict(zip(run, values)) for values in zip(*run.values())]
        assert not found([{k: x for k, x in row.items() if x is not None} for row in rows])
