import math
import sys
from dataclasses import replace

import ablations as details
import notebooks
import numpy as np
import pytest
import torch
from ablations import CONFIGS, DETAILS, INTACT, UNTRAINED, attempt, check_swap, experiments, swapped
from control.test_ppo import SHAPE, agent, collect, some_batch

from rlhf_notes.control import policy, trainer
from rlhf_notes.control import ppo as control
from rlhf_notes.control.trainer import PPO
from rlhf_notes.formulas import ppo as losses
from rlhf_notes.formulas.advantage import gae
from rlhf_notes.studies.ablations import compare, in_standard_deviations, verdict

# long enough for a truncation of Pendulum, fast enough for 0.005 nats in a pass or two
TINY = dict(SHAPE, steps=4 * 512, num_steps=128, epochs=6, learning_rate=1e-2)
EACH = [(task, name) for task in CONFIGS for name in experiments(task)[2:]]


def weights(task, name, seed=3):
    "The parameters after four iterations, as a vector."
    d = DETAILS.get(name)
    config = replace(CONFIGS[task](**TINY | dict(seed=seed)), **d.options if d else {})
    with swapped(*([d.swap] if d and d.swap else [])):
        p = PPO(**vars(config))
        for _ in range(config.iterations): p.iterate()
    return torch.cat([q.detach().flatten() for q in p.agent.parameters()])


@pytest.fixture(scope="module")
def intact(): return {task: weights(task, INTACT) for task in CONFIGS}


def test_what_is_tried_where():
    assert set(DETAILS) <= {name for task in CONFIGS for name in experiments(task)}
    assert not {INTACT, UNTRAINED} & set(DETAILS)
    for task in CONFIGS:
        assert experiments(task)[:2] == [INTACT, UNTRAINED]
        assert len(set(experiments(task))) == len(experiments(task))
    assert all(bool(d.options) != bool(d.swap) for d in DETAILS.values())


@pytest.mark.parametrize("task, name", EACH, ids=lambda v: v)
def test_each_detail_changes_the_training(task, name, intact):
    """In a moment CartPole cuts no episode off, so that changes of what happens at 500 steps cannot
    show, and no ratio gets as far as 3.
    """
    changed = weights(task, name)
    same = changed.shape == intact[task].shape and torch.equal(changed, intact[task])
    assert same == (name == "dual clip 3" or (task, name) == ("cartpole", "truncation is end"))


def test_the_baseline_is_the_defaults(intact):
    for task in CONFIGS: assert torch.equal(weights(task, INTACT), intact[task])


@pytest.mark.parametrize("name", [n for n, d in DETAILS.items() if d.swap])
def test_a_swap_is_undone(name):
    module, attribute, _ = DETAILS[name].swap
    before = getattr(module, attribute)
    with swapped(DETAILS[name].swap): assert getattr(module, attribute) is not before
    assert getattr(module, attribute) is before
    with pytest.raises(KeyError):
        with swapped(DETAILS[name].swap): raise KeyError
    assert getattr(module, attribute) is before


@pytest.mark.parametrize(
    "task, name", [(task, name) for task, name in EACH if DETAILS[name].swap], ids=lambda v: v)
def test_each_swap_changes_a_gradient(task, name): check_swap(task, name)


def test_a_swap_that_changes_nothing_is_refused(monkeypatch):
    monkeypatch.setitem(
        DETAILS, "silent",
        details.Detail("", "", swap=(control, "gae", lambda gae: lambda *args: gae(*args)),
                       tasks=("cartpole",)))
    with pytest.raises(RuntimeError, match="the swap of 'silent' changes no gradient on cartpole"):
        attempt("cartpole", "silent", 0)


def test_no_clip_is_ratio_times_advantage():
    a, b = agent(), some_batch()
    config = CONFIGS["cartpole"](value_coef=0.0, whitening="minibatch")
    with swapped(DETAILS["no clip"].swap): loss, _ = control.batch_loss(a, b, config, 0.2)
    logp = a.policy(b.obs).log_softmax(-1).gather(-1, b.actions[:, None])[:, 0]
    A = (b.advantages - b.advantages.mean()) / b.advantages.std(correction=0)
    torch.testing.assert_close(loss, -((logp - b.logp).exp() * A).mean(), rtol=1e-4, atol=1e-5)


def test_wrong_gae():
    """Plain loops: across ends the sum goes on to the end of the data; without an end the value of
    what follows is always added.
    """
    g = torch.Generator().manual_seed(0)
    r, v, w = torch.randn(3, 12, 2, generator=g)
    terminated = torch.rand(12, 2, generator=g) < 0.3
    across, endless = (details.across_ends(gae)(r, v, w, terminated, terminated, 0.9, 0.8)[0],
                       details.no_end(gae)(r, v, w, terminated, terminated, 0.9, 0.8)[0])
    for n in range(2):
        one = two = 0.0
        for t in reversed(range(12)):
            over = bool(terminated[t, n])
            one = r[t, n].item() + 0.9 * (
                0 if over else w[t, n].item()) - v[t, n].item() + 0.72 * one
            two = r[t, n].item() + 0.9 * w[t, n].item() - v[t, n].item() + 0.72 * (
                0 if over else two)
            assert across[t, n].item() == pytest.approx(one, abs=1e-4)
            assert endless[t, n].item() == pytest.approx(two, abs=1e-4)


def test_dual_clips():
    """By hand, for ratios far out: the dual clip acts on negative advantages alone; without a look
    at the sign nothing is left of the positive ones.
    """
    r, A = (torch.tensor([0.5, 1.1, 2.0, 5.0, 0.5, 1.1, 2.0, 5.0]),
            torch.tensor([2.0] * 4 + [-2.0] * 4))
    right, wrong = (DETAILS[name].swap[2](losses.clipped_surrogate)(r, A, 0.2)
                    for name in ("dual clip 3", "dual clip, any sign"))
    torch.testing.assert_close(right, torch.tensor([1.0, 2.2, 2.4, 2.4, -1.6, -2.2, -4.0, -6.0]))
    torch.testing.assert_close(wrong, torch.tensor([6.0, 6.0, 6.0, 6.0, -1.6, -2.2, -4.0, -6.0]))


def test_dropout_is_in_the_update_alone():
    b = some_batch()
    with swapped(DETAILS["dropout"].swap): thin = PPO(**vars(CONFIGS["cartpole"](**SHAPE))).agent
    whole = PPO(**vars(CONFIGS["cartpole"](**SHAPE))).agent
    with torch.no_grad(): assert torch.equal(thin(b.obs)[0], whole(b.obs)[0])
    many = torch.stack([thin(b.obs)[0] for _ in range(400)]).detach()
    assert many.std(0).min() > 0 and not torch.equal(many[0], many[1])
    hidden = []
    thin.policy[2].register_forward_pre_hook(lambda module, x: hidden.append(x[0].detach()))
    for _ in range(200): thin(b.obs)
    x, kept = whole.policy[1](whole.policy[0](b.obs)).detach(), torch.stack(hidden)
    assert (kept == 0).float().mean().item() == pytest.approx(0.1, abs=0.01)
    torch.testing.assert_close(kept[kept != 0], (x / 0.9).expand_as(kept)[kept != 0])


def test_resets_kept_are_in_the_batch():
    r = collect(agent(), steps=64)
    assert (~r.is_step).any()
    with swapped(DETAILS["resets are data"].swap):
        b = control.make_batch(agent(), r, CONFIGS["cartpole"]())
    assert len(b) == r.is_step.numel()
    assert torch.equal(b.obs, r.obs.flatten(0, 1))
    assert not r.is_step.all()


def test_networks():
    with swapped(DETAILS["last layer 1"].swap):
        loud = PPO(**vars(CONFIGS["cartpole"](**SHAPE))).agent
    quiet = PPO(**vars(CONFIGS["cartpole"](**SHAPE))).agent
    torch.testing.assert_close(loud.policy[-1].weight, 100 * quiet.policy[-1].weight)
    torch.testing.assert_close(loud.critic[-1].weight, quiet.critic[-1].weight)
    with swapped(DETAILS["shared trunk"].swap):
        shared = PPO(**vars(CONFIGS["cartpole"](**SHAPE))).agent
    shared.value(torch.randn(5, 4)).sum().backward()
    assert shared.policy[0].weight.grad.any()
    assert not shared.policy[-1].weight.grad.any()
    assert shared.critic[0].weight is shared.policy[0].weight
    assert isinstance(shared, policy.Agent)
    assert sum(p.numel() for p in shared.parameters()) == sum(
        p.numel() for p in quiet.parameters()) - 4 * 64 - 64 - 64 * 64 - 64
    with swapped(DETAILS["fixed std"].swap): p = PPO(**vars(CONFIGS["pendulum"](**SHAPE)))
    first = p.agent.policy[0].weight.clone()
    p.iterate()
    p.iterate()
    assert (p.agent.head.log_std == CONFIGS["pendulum"]().log_std).all()
    assert not torch.equal(p.agent.policy[0].weight, first)


def test_an_attempt_is_paired_repeatable_and_notes_the_first_crossing(monkeypatch):
    few = dict(SHAPE)
    few.pop("seed")
    evaluated, original = [], trainer.episode_returns
    monkeypatch.setattr(
        trainer, "episode_returns",
        lambda choose, seed, *rest: (evaluated.append(seed), original(choose, seed, *rest))[1])
    one = attempt("cartpole", INTACT, 3, every=2, **few)
    seeds_one = evaluated[:]
    evaluated.clear()
    two = attempt("cartpole", "no whitening", 3, every=2, **few)
    assert evaluated == seeds_one
    assert len(set(evaluated)) == 4 + 2
    assert one["first_sampled_steps"] is None
    assert attempt("cartpole", INTACT, 3, every=2, **few) == one != two
    assert all(5 < x["sampled"] < 475 for x in (one, two))
    ppo = PPO(**vars(CONFIGS["cartpole"](seed=3, **few)))
    rows = [ppo.iterate() for _ in range(ppo.config.iterations)]
    assert {d: one[d] for d in details.DIALS} == {
        d: float(np.mean([r[d] for r in rows])) for d in details.DIALS}
    monkeypatch.setattr(details, "threshold", lambda env: 15.0)
    assert attempt("cartpole", INTACT, 3, every=2, **few)["first_sampled_steps"] == 2 * 128


def test_before_training(monkeypatch):
    few = dict(SHAPE)
    few.pop("seed")
    outcome, ppo = (attempt("cartpole", UNTRAINED, 3, **few),
                    PPO(**vars(CONFIGS["cartpole"](seed=3, **few))))
    final = ppo.scores()
    assert (outcome["greedy"], outcome["sampled"]) == (
        final["eval_return_mean"], final["eval_sampled_return_mean"])
    assert all(outcome[k] is None for k in ("first_sampled_steps", *details.DIALS))


def test_verdicts():
    gain = 100.0
    near = lambda x, n=5: [x - 0.1] * (n - 1) + [x + 0.4]          # the mean is x
    words = {-50: "breaks it", -49: "hurts", -2: "hurts", -1.9: "too small for the rule",
             0: "too small for the rule", 1.9: "too small for the rule", 2: "helps", 80: "helps"}
    assert {x: verdict([x] * 5, gain)[0] for x in words} == words
    assert verdict(near(-30.0), gain) == (
        "hurts", pytest.approx(-30), -30.1, pytest.approx(-29.8, abs=0.11))
    # so does this one, far as its mean is
    assert verdict([-400.0, -400, -400, 500, 400], gain)[0] == "too small for the rule"
    # the interval holds 0
    assert (verdict([-90.0, -90, -90, 30, 0], gain)[0] == verdict([90.0, 90, 90, -30, 0], gain)[0]
            == "too small for the rule")
    assert verdict([-50.0] * 4, gain)[0] == "too few seeds"


def test_dials_tell():
    intact = [1.0, 2, 3, 4, 5]
    std = 2.5 ** 0.5
    def deviation(differences, intact):
        rows = [dict(name=n, seed=s, score=0.0, dial=x)
                for n, values
                in (("good", intact), ("bad", [a + d for a, d in zip(intact, differences)]))
                for s, x in enumerate(values)]
        return compare(
            rows, lambda name: "good", "score", {"good": 1.0}, ("dial",))["bad"]["dials"]["dial"]
    assert deviation([4.0] * 5, intact) == (pytest.approx(4 / std), True)
    assert deviation([-4.0] * 5, intact) == (pytest.approx(-4 / std), True)
    # less than two standard deviations
    assert deviation([3.0] * 5, intact) == (pytest.approx(3 / std), False)
    assert deviation([-20.0, 40, -20, 40, -20], intact)[1] is False  # now here, now there
    assert deviation([9.0] * 4, intact[:4])[1] is False  # too few
    assert deviation([1.0] * 5, [2.0] * 5) == (math.inf, True)
    assert deviation([-1.0] * 5, [2.0] * 5)[0] == -math.inf
    assert deviation([0.0] * 5, [2.0] * 5) == (0.0, False)
    # rounding is no difference, and no spread
    assert in_standard_deviations(2.8e-17, [0.2] * 10) == 0 == in_standard_deviations(
        -3e-7, [2e3] * 3)
    assert in_standard_deviations(0.1, [0.3, 0.1 + 0.2, 0.3]) == math.inf
    assert in_standard_deviations(1e-8, [0.2] * 10) == math.inf
    assert in_standard_deviations(-1e-5, [1e-4, 2e-4, 3e-4]) == pytest.approx(-0.1)


def test_comparison():
    row = lambda name, seed, score, dial=None: dict(name=name, seed=seed, score=score, dial=dial)
    rows = [row("bad", 1, 3.0, 4.0), row("good", 0, 9.0, 1.0), row("good", 1, 10.0, 3.0),
            row("good", 2, 8.0), row("bad", 0, 8.0), row("bad", 7, 1.0), row("other", 0, 1.0),
            row("lonely", 9, 1.0), row("base", 0, 2.0)]
    table = compare(rows,
                    {"bad": "good", "good": "good", "other": "base", "base": "base",
                     "lonely": "good"}.get, "score", {"good": 10.0, "base": 1.0}, ("dial",))
    assert list(table) == ["bad", "other"]
    bad = table["bad"]
    assert (bad["seeds"], bad["differences"], bad["mean"], bad["low"], bad["high"],
            bad["verdict"]) == ([0, 1], [-1, -7], -4, -7, -1, "too few seeds")
    # seed 0 lacks the dial, and one intact value has no standard deviation
    assert bad["dials"] == {"dial": (math.inf, False)}
    assert table["other"]["mean"] == -1 and table["other"]["dials"] == {}


def test_the_benchmark_resumes(tmp_path, monkeypatch, capsys):
    "What stands in the file is not trained again, and a line that was cut short is."
    out = tmp_path / "ablations.csv"
    lines = [f"{task},{d},0,1,1,,1,2,3,4,5,6" for task in CONFIGS
             for d in (INTACT, "no clip")] + [f"{task},untrained,0,3,4,,,,,,," for task in CONFIGS]
    out.write_text("\n".join([",".join(details.COLUMNS), *lines, "cartpole,intact,5,77"]) + "\n")
    command = ["ablations.py", "--seeds", "1", "--only", "no clip", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    details.main()
    assert capsys.readouterr().out.startswith("0 trainings to do")
    assert len(details.read(out, details.COLUMNS)) == 6
    monkeypatch.setattr(sys, "argv", [*command, "--only", "nonsense"])
    with pytest.raises(SystemExit, match="2"): details.main()
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err


def test_the_results_are_whole():
    "And the list says what the script does."
    folder = notebooks.ROOT / "nbs" / "studies" / "results"
    rows = details.read(folder / "ablations.csv", details.COLUMNS)
    keys = [tuple(r[:3]) for r in rows]
    assert len(set(keys)) == len(keys)
    assert all(r[1] in experiments(r[0]) and math.isfinite(float(r[3]))
               and math.isfinite(float(r[4])) for r in rows)
    listed = details.read(
        folder / "ablations_list.csv", ("detail", "number", "what", "changed", "tasks"))
    assert listed == [
        [n, d.number, d.what, d.changed(), " ".join(d.tasks)] for n, d in DETAILS.items()]
