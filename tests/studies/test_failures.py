import math
import random
import sys
from dataclasses import replace

import failures
import matplotlib.pyplot as plt
import notebooks
import pytest
import torch
from failures import BASES, COLUMNS, DIALS, FAILURES, PRETRAINED, Failure, attempt, read, swapped
from torch import nn

from rlhf_notes.formulas.kl import kl_estimate
from rlhf_notes.formulas.preference import bradley_terry_loss
from rlhf_notes.formulas.reward import RewardNorm
from rlhf_notes.formulas.surrogate import clipped_surrogate
from rlhf_notes.formulas.whitening import whiten
from rlhf_notes.language import loop, model
from rlhf_notes.language import rollout as rollouts
from rlhf_notes.language import sampling as sample
from rlhf_notes.reviews import reward_model
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.studies import failures as game
from rlhf_notes.studies.failures import _choices as choices
from rlhf_notes.studies.failures import _puzzles as puzzles
from rlhf_notes.studies.failures import diagnose, draw_dials, recorded, unusual
from rlhf_notes.studies.variants import measure, prepare

SMALL = dict(device="cpu", sft_steps=4, sft_batch=8, labels=16, norm_samples=16, batch=32,
             minibatches=2, iterations=2, eval_responses=8)
SAME = {"values unclipped"}          # in a moment no value moves as far as 0.2


@pytest.fixture(scope="module")
def start(): return prepare(ReviewsConfig(seed=1, **SMALL))


@pytest.fixture(scope="module")
def intact(start): return {name: logged(attempt(name, start)[1]) for name in BASES}


def logged(rows):
    return [{k: v for k, v in r.items() if not k.startswith(("seconds", "tokens"))} for r in rows]


@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_changes_the_training_and_leaves_nothing_behind(name, start, intact):
    f = FAILURES[name]
    before = [getattr(holder, attribute) for holder, attribute, _ in f.swaps]
    weights = {k: v.clone() for k, v in start.lm.state_dict().items()}
    outcome, rows = attempt(name, start)
    assert (logged(rows) == intact[f.base]) == (name in SAME)
    assert len(rows) == start.config.iterations
    assert [getattr(holder, attribute) for holder, attribute, _ in f.swaps] == before
    assert all(torch.equal(v, weights[k]) for k, v in start.lm.state_dict().items())
    assert set(DIALS) <= set(rows[0])
    assert set(outcome) == {"proxy", "true", "kl", "valid", "win", "first", "broke"}


@pytest.mark.parametrize(
    "name, i", [(name, i) for name, f in FAILURES.items() for i in range(len(f.swaps))])
def test_each_swap_changes_a_gradient(name, i, start, intact, monkeypatch):
    "They patch by name: one whose function is called by another name would be silent."
    f = FAILURES[name]
    monkeypatch.setitem(FAILURES, "one", replace(f, swaps=(f.swaps[i],)))
    found, usual = (
        [r["grad_norm"] for r in rows] for rows in (attempt("one", start)[1], intact[f.base]))
    # which computes more, for the swap beside it
    assert (found != pytest.approx(usual, rel=1e-5)) == (
        f.swaps[i][2] is not failures.behind_the_end)


def test_every_detail_has_a_row_and_options_are_changes():
    numbers = {f.number for f in FAILURES.values()}
    # P13 is about what is logged
    assert numbers - {""} == {*(f"G{i}" for i in range(1, 7)), *(f"R{i}" for i in range(1, 5)),
                              *(f"P{i}" for i in range(1, 13))}
    for name, f in FAILURES.items():
        intact = ReviewsConfig(**BASES[f.base])
        assert f.options or f.swaps or f.start, name
        assert all(getattr(intact, k) != v for k, v in f.options.items()), name
        replace(intact, **f.options)
    assert not set(BASES) & set(FAILURES)


def test_the_intact_training_is_that_of_the_trainer(start, intact):
    trainer = start.trainer()
    rows = [trainer.iterate() for _ in range(trainer.iterations)]
    assert logged(rows) == intact["ppo"]
    outcome = attempt("ppo", start)[0]
    assert ({k: outcome[k] for k in ("proxy", "true", "kl", "valid", "win")}
            == measure(start.trainer(), trainer.policy.lm))


def test_the_policy_is_measured_with_everything_intact(start, monkeypatch):
    "Whatever is planted: by the intact reward model, task, temperature and reference."
    seen = []
    monkeypatch.setattr(failures, "measure",
                        lambda look, lm: (seen.append((look, lm, loop.Policy, model.position_ids,
                                                       sample.draw)), measure(look, lm))[1])
    for name in ("prompt unseen", "scores as they come", "no truncation", "temperature forgotten",
                 "reference moves", "top five", "positions count padding"):
        attempt(name, start)
    for look, lm, *originals in seen:
        assert look.reward is not None
        assert look.task is start.task
        assert look.reference is start.lm
        assert lm is not start.lm
        assert originals == [loop.Policy, model.position_ids, sample.draw]
        assert originals[1].__module__ == "rlhf_notes.language.model"
    assert [look.config.temperature for look, *_ in seen] == [1, 1, 1, 0.7, 1, 1, 1]


def test_a_training_that_breaks_says_where(start, monkeypatch):
    boom = Failure("", "", dict(learning_rate=1e20, max_grad_norm=1e9))
    monkeypatch.setitem(FAILURES, "boom", boom)
    outcome, rows = attempt("boom", replace(start, config=replace(start.config, iterations=6)))
    assert outcome["broke"] == len(rows) + 1 and outcome["first"] is None


def test_the_first_look_that_is_worth_it(start, monkeypatch):
    monkeypatch.setattr(failures, "LOOK", 2)
    monkeypatch.setattr(failures, "WORTH", -1e9)
    longer = replace(start, config=replace(start.config, iterations=5))
    assert attempt("ppo", longer)[0]["first"] == 2
    monkeypatch.setattr(failures, "WORTH", 1e9)
    assert attempt("ppo", longer)[0]["first"] is None


def test_swaps_are_undone_when_something_fails():
    f = FAILURES["padding is a token"]
    before = [getattr(holder, attribute) for holder, attribute, _ in f.swaps]
    with pytest.raises(KeyError):
        with swapped(*f.swaps):
            assert all(getattr(holder, attribute) is not b
                       for (holder, attribute, _), b in zip(f.swaps, before))
            raise KeyError
    assert [getattr(holder, attribute) for holder, attribute, _ in f.swaps] == before


def wrong(name, i=0):
    "The wrong function of a failure, made of the right one."
    holder, attribute, make = FAILURES[name].swaps[i]
    return make(getattr(holder, attribute))


def test_rewards_by_hand():
    scores, mask = torch.tensor([2.0]), torch.tensor([[True, True, False]])
    logp, ref = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -1.0, -1.0]])
    for name, expected in {"KL reversed": [0.05, 1.9, 0.0], "paid at the edge": [-0.05, 0.1, 2.2],
                           "paid everywhere": [1.95, 2.1, 0.0]}.items():
        torch.testing.assert_close(
            wrong(name)(scores, logp, ref, 0.1, mask)[0], torch.tensor([expected]), msg=name)
    k3 = torch.tensor([-0.5, 1.0]).exp() - 1 - torch.tensor([-0.5, 1.0])
    torch.testing.assert_close(wrong("k3 in the reward")(scores, logp, ref, 0.1, mask)[0][0, :2],
                               -0.1 * k3 + torch.tensor([0.0, 2.0]))


def test_whitening_by_hand():
    x, mask = torch.tensor([[1.0, 3.0, 100.0]]), torch.tensor([[True, True, False]])
    torch.testing.assert_close(wrong("whitened with padding")(x, mask), whiten(x))
    torch.testing.assert_close(
        wrong("whitened with padding")(x, mask, shift_mean=False), whiten(x, shift_mean=False))
    torch.testing.assert_close(
        wrong("rewards centred")(x, mask, shift_mean=False)[:, :2], torch.tensor([[-1.0, 1.0]]))


def test_losses_by_hand():
    r, A = torch.tensor([0.5, 3.0]), torch.tensor([-2.0, 2.0])
    assert wrong("no clip")(r, A, 0.2, 0.2, None).tolist() == [-1, 6]
    assert clipped_surrogate(r, A).tolist() == pytest.approx([-1.6, 2.4])
    logp, old, mask = (torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.0]]),
                       torch.tensor([[True, False]]))
    batch = rollouts.Rollout(torch.zeros(1, 3), mask, mask, mask[:, 0], old[:, 0], old, old, old,
                             old, torch.tensor([[4.0, 0.0]]), old)
    for algo in ("ppo", "grpo"):
        (right, _), (padded, stats) = (
            loss(ReviewsConfig(algo=algo), batch if algo == "ppo" else replace(batch, returns=None),
                 logp, logp, old, 0.1) for loss in (loop.rl_loss, wrong("mean over padding", -1)))
        assert (padded - right).item() == 2 and stats["policy_loss"] == -2
    rewards, best = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 5.0, 2.0]]), torch.tensor([3, 1])
    torch.testing.assert_close(
        wrong("pairs")(rewards, best),
        bradley_terry_loss(torch.tensor([4.0, 1.0]), torch.tensor([1.0, 5.0])))
    parts = [replace(batch, returns=None), replace(batch, returns=None, advantages=3 * old.abs())]
    now, config = (logp, logp, old, 0.1), ReviewsConfig(microbatches=2)
    alone = [loop.rl_loss(config, part, *now)[0] for part in parts]
    alike = [wrong("microbatches alike")(config, part, *now, mask)[0] for part in parts]
    torch.testing.assert_close(sum(alike), sum(alone) / 2)
    torch.testing.assert_close(
        wrong("GRPO: k3 reversed")(logp, old + 1, "k3"), kl_estimate(old + 1, logp, "k3"))
    ref = torch.tensor([[-1.5, -2.0]])
    torch.testing.assert_close(
        wrong("GRPO: k1 in the loss")(logp, old, torch.zeros(1, 2), None, "grpo", ref,
                                      1.0)[1]["kl"], torch.tensor(0.25))


def test_sampling_by_hand():
    logits = torch.arange(10.0).log().expand(1000, 10)
    drawn = wrong("top five")(
        logits, 1.0, torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    assert set(drawn.tolist()) == {5, 6, 7, 8, 9}
    mask = torch.tensor([[False, False, True, True]])
    assert wrong("positions count padding")(mask).tolist() == [[0, 1, 2, 3]]
    assert model.position_ids(mask).tolist() == [[0, 0, 0, 1]]
    torch.testing.assert_close(wrong("temperature forgotten")(logits[0], torch.tensor(4), 0.5),
                               (logits[0].log_softmax(-1))[4])
    assert wrong("constant rate")(ReviewsConfig(), 59) == ReviewsConfig().learning_rate


def test_draws_and_tasks(start):
    trainer = start.trainer()
    queries, mask, u, rows = wrong("one seed for two")(trainer)
    assert rows[:16] == rows[16:]
    assert len(u) == 32
    assert torch.equal(u[:16], u[16:])
    assert torch.equal(queries[:16], queries[16:])
    assert not torch.equal(u[:8], u[8:16])
    torch.testing.assert_close(u[:16], trainer.prompts()[2][:16])
    g = lambda: torch.Generator().manual_seed(0)
    task, cut = start.task, FAILURES["unfinished prompts"].start(start).task
    whole, short = (t.texts(*t.sample_prompts(6, g())[:2], torch.zeros(6, 0, dtype=torch.long))
                    for t in (task, cut))
    assert all(a[0] == f"{b[0]} ." for a, b in zip(whole, short))
    answers = torch.full((2, 16), task.stop_token)
    kept, counts, found = FAILURES["no truncation"].start(start).task.truncate(answers)
    assert kept is answers and counts.all() and found.all() and not task.truncate(answers)[1].all()


def test_models(start):
    lm = start.lm
    with swapped(*FAILURES["loud head"].swaps):
        loud = reward_model.RewardModel(lm, torch.Generator().manual_seed(0))
    quiet = model.RewardModel(lm, torch.Generator().manual_seed(0))
    torch.testing.assert_close(loud.head.weight, quiet.head.weight * 65 ** 0.5)
    tokens, mask = (torch.randint(20, (3, 9), generator=torch.Generator().manual_seed(0)),
                    torch.ones(3, 9, dtype=torch.bool))
    with swapped(*FAILURES["score at the edge"].swaps):
        edge = reward_model.RewardModel(lm, torch.Generator().manual_seed(0))
    torch.testing.assert_close(edge(tokens, mask), quiet(tokens, mask))
    mask[:, 7:] = False
    assert not torch.allclose(edge(tokens, mask), quiet(tokens, mask))
    with swapped(*FAILURES["loud values"].swaps):
        assert start.trainer().policy.value_head.weight.std().item() == pytest.approx(1, abs=0.3)
    with swapped(*FAILURES["dropout"].swaps): trainer = start.trainer()
    twice = [
        trainer.policy(tokens, torch.ones_like(tokens, dtype=torch.bool), 4)[0] for _ in range(2)]
    assert not torch.equal(*twice)
    assert not any(m.p for m in lm.modules() if isinstance(m, nn.Dropout))
    alone = failures.scored_alone(None)(
        quiet, tokens[:, :3], mask[:, :3], tokens[:, 3:], mask[:, 3:])
    torch.testing.assert_close(alone, quiet(tokens[:, 3:], mask[:, 3:]))


def test_what_stands_behind_the_end_is_looked_at(start):
    def seen():
        trainer = start.trainer()
        rollout = trainer.collect(trainer.policy.lm, *trainer.prompts())
        with torch.no_grad(): return rollout, trainer.forward(rollout)[0]
    rollout, logp = seen()
    behind = ~rollout.response_mask
    assert behind.any()
    assert (logp - rollout.logp)[behind].abs().max() > 0.1
    assert (logp - rollout.logp)[~behind].abs().max() < 1e-4
    torch.testing.assert_close(
        rollout.logp_ref[~behind], rollout.logp[~behind], atol=1e-4, rtol=1e-4)
    with swapped(*FAILURES["mean over padding"].swaps): rollout, logp = seen()
    torch.testing.assert_close(logp, rollout.logp, atol=1e-4, rtol=1e-4)


def test_padding_that_is_read(start):
    "With it, a padded query is another query; without, it is the same."
    tokens = torch.randint(1, 20, (2, 6), generator=torch.Generator().manual_seed(0))
    padded, mask = (torch.cat([torch.full((2, 3), 5), tokens], 1),
                    torch.cat([torch.zeros(2, 3, dtype=torch.bool),
                               torch.ones(2, 6, dtype=torch.bool)], 1))
    states = lambda x, m: model.hidden_states(start.lm, x, m)[:, -6:]
    torch.testing.assert_close(
        states(padded, mask), states(tokens, torch.ones_like(tokens, dtype=torch.bool)), rtol=1e-3,
        atol=1e-4)
    with swapped(*FAILURES["padding is a token"].swaps):
        read = states(padded, mask)
        torch.testing.assert_close(
            read,
            model.hidden_states(start.lm,
                                torch.cat([torch.zeros(2, 3, dtype=torch.long), tokens], 1),
                                torch.ones_like(mask))[:, -6:])
    assert not torch.allclose(read, states(padded, mask), atol=1e-3)


def test_scales(start):
    assert FAILURES["scores as they come"].start(
        start).norm.state_dict() == RewardNorm().state_dict()
    early = FAILURES["scaled too early"].start(start).norm.state_dict()
    assert early == reward_model.RewardTraining(
        start.config, start.lm, start.task).norm.state_dict() != start.norm.state_dict()
    with swapped(*FAILURES["reference moves"].swaps): moving = start.trainer()
    assert moving.reference is moving.policy.lm
    moving.iterate()
    assert abs(moving.iterate()["kl_k1"]) < 1e-5


@pytest.fixture
def invented(monkeypatch):
    """Three intact seeds, and failures that move the mean of one dial or two, though not at first;
    GRPO has no values.
    """
    def run(base="ppo", **moved):
        return {d: [None] * 3 if base == "grpo" and "value" in d
                else [t + 1.5 * moved.get(d, 0.0) * (t > 0) for t in range(3)] for d in DIALS}
    runs = {(b, s): run(b, **{d: s - 1.0 for d in DIALS}) for b in BASES for s in range(3)}
    moves = {"no KL": dict(score=9), "KL reversed": dict(score=-7), "no clip": dict(entropy=5),
             "one epoch": dict(entropy=-4, score=3.5), "lambda 0": dict(kl_k1=2.5),
             "eight epochs": dict(score=8, entropy=1), "GRPO: no KL": dict(kl_k1=6),
             "GRPO: k3 reversed": dict(kl_k1=-5), "GRPO: k1 in the loss": dict(valid=-7),
             "GRPO: unscaled": dict(grad_norm=4), "temperature forgotten": dict(length=4)}
    listed = {n: dict(base=FAILURES[n].base, what=FAILURES[n].what) for n in moves}
    runs |= {(n, 0): run(FAILURES[n].base, **m) for n, m in moves.items()}
    monkeypatch.setattr(game, "recorded", lambda: (listed, runs))
    game._loudest.cache_clear()
    yield runs
    game._loudest.cache_clear()


def test_unusual_by_hand(invented):
    # the standard deviation of the means 0, 1, 2 is 1
    assert unusual("no KL")["score"] == 9
    assert list(unusual("one epoch").items())[:2] == [("entropy", -4), ("score", 3.5)]
    assert set(unusual("no KL")) == set(DIALS)
    assert not any("value" in d for d in unusual("GRPO: no KL"))
    for s in range(3): invented["ppo", s]["valid"] = [1.0] * 3
    invented["no clip", 0]["valid"], invented["no KL", 0]["valid"] = [0.5] * 3, [1.0] * 3
    assert next(iter(unusual("no clip").items())) == ("valid", -math.inf)
    assert unusual("no KL")["valid"] == 0


def test_cases_and_their_choices(invented):
    names = puzzles()
    # lambda 0 moves nothing by 3
    assert set(names) == {n for n, s in invented if n in FAILURES} - {"lambda 0"}
    assert names == puzzles()
    loudest = lambda n: {"no KL": "score+", "eight epochs": "score+", "KL reversed": "score-",
                         "no clip": "entropy+", "one epoch": "entropy-", "GRPO: no KL": "kl+",
                         "GRPO: k3 reversed": "kl-", "GRPO: k1 in the loss": "valid-",
                         "GRPO: unscaled": "grad+", "temperature forgotten": "length+"}[n]
    places = set()
    for truth in names:
        four = choices(truth)
        assert len(set(four)) == 4 and truth in four and four == choices(truth)
        assert all(loudest(n) != loudest(truth) for n in four if n != truth)
        assert {FAILURES[n].base for n in four if n != truth} == {"grpo" if truth.startswith("GRPO")
                                                                  else "ppo"}
        places.add(four.index(truth))
    assert len(places) > 1


def test_the_game(invented, capsys):
    case, four = puzzles().index("no KL") + 1, choices("no KL")
    assert diagnose(case, draw=False) is None
    asked = capsys.readouterr().out
    assert asked.startswith(f"Case {case} of 10: PPO, with one thing wrong. Which?")
    assert all(f"  {letter}  {n}: {FAILURES[n].what}\n" in asked for letter, n in zip("abcd", four))
    for answer in ("no KL", "abcd"[four.index("no KL")]):
        verdict = diagnose(case, answer)
        assert verdict
        assert ("Right: no KL: KL costs nothing. Farthest from usual, in standard "
                "deviations of the intact trainings: score +9;" in capsys.readouterr().out)
    other = next(n for n in four if n in ("no clip", "one epoch", "KL reversed"))
    verdict = diagnose(case, other)
    dial, z = next(iter(unusual(other).items()))
    assert not verdict
    assert verdict.mistake == other
    assert (f"No. With {other} the loudest dial would be {dial} {z:+.0f}; here "
            f"{dial} is {unusual('no KL')[dial]:+.0f} from usual. Look at score " f"again."
            in verdict.text)
    for wrong in (0, 11, "1", 1.0):
        with pytest.raises(ValueError, match="case must be a number from 1 to 10"): diagnose(wrong)
    with pytest.raises(ValueError, match="answer must be a, b, c, d or one of .*; got 'e'"):
        diagnose(case, "e")
    random.seed(0)
    for _ in range(5): assert diagnose(draw=False) is None
    assert len(
        {line for line in capsys.readouterr().out.splitlines() if line.startswith("Case")}) > 1


def test_the_picture_of_the_dials(invented):
    figure = draw_dials("GRPO: no KL")
    shown = figure.axes
    assert [ax.get_title() for ax in shown] == list(unusual("GRPO: no KL"))[:6]
    band = shown[0].collections[0].get_paths()[0].vertices[:, 1]
    assert list(shown[0].lines[0].get_ydata()) == [0, 10, 11]
    assert (band.min(), band.max()) == (-0.5, 3.5)
    for s in range(3): invented["grpo", s]["ratio"] = [1.0] * 3
    invented["GRPO: no KL", 0]["ratio"] = [1 + 1e-4 * t for t in range(3)]
    flat = draw_dials("GRPO: no KL")
    flat.draw_without_rendering()
    assert not any(ax.yaxis.get_major_formatter().get_offset()
                   for ax in flat.axes), "numbers that have to be added up"
    plt.close(figure)
    plt.close(flat)


def test_what_is_recorded():
    """Every failure with seed 0, and every intact training; each case of the game has four choices,
    and one is right.
    """
    listed, runs = recorded()
    assert list(map(list, map(dict.values, listed.values()))) == [
        [n, f.number, f.what, f.changed(), f.base] for n, f in FAILURES.items()]
    assert {n for n, s in runs if s == 0} == {*BASES, *FAILURES}
    assert {n for n, s in runs if s} == set(BASES)
    assert all(list(run) == list(DIALS) and len(values) == ReviewsConfig().iterations
               for run in runs.values() for values in run.values()), "a training is shorter"
    assert len({s for _, s in runs}) >= 5 and len(puzzles()) == 41
    for name in puzzles():
        four = choices(name)
        assert len(set(four)) == 4
        assert name in four
        assert ({FAILURES[n].base for n in four if n != name}
                == {"grpo" if FAILURES[name].base == "grpo" else "ppo"})
    assert [
        sum(bool(diagnose(case, letter)) for letter in "abcd") for case in (1, 2, 3)] == [1, 1, 1]


def test_the_benchmark_resumes(tmp_path, monkeypatch, capsys):
    path = tmp_path / "failures.csv"
    path.write_text(",".join(COLUMNS) + "\n"
                    + "".join(f"{n},0,1,2,3,4,5,,,{','.join('6' * len(DIALS))}\n"
                              for n in (PRETRAINED, *BASES, "no KL")) + "ppo,5,77\n")
    command = ["failures.py", "--seeds", "1", "--out", str(tmp_path), "--only", "no KL"]
    monkeypatch.setattr(sys, "argv", command)
    failures.main()
    assert capsys.readouterr().out.startswith("0 trainings to do")
    assert len(read(path, COLUMNS)) == len(BASES) + 2
    monkeypatch.setattr(sys, "argv", [*command, "--only", "nonsense"])
    with pytest.raises(SystemExit, match="2"): failures.main()
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err
