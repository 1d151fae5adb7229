"Our losses in TRL's trainers."

import processes
import pytest
import torch

pytest.importorskip("trl", exc_type=ImportError)
from bridges.trl_losses import KNOWN, cells, inputs, of_grpo, trainers, worst  # noqa: E402
from bridges.trl_parts import dpo, fixed, grpo, save_tiny, train, weights  # noqa: E402
from trl import DPOTrainer, GRPOTrainer  # noqa: E402

from rlhf_notes import group_advantage, policy_loss, register_variant  # noqa: E402
from rlhf_notes.bridges.trl import dpo_trainer, grpo_trainer  # noqa: E402

@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def made(path, tmp_path_factory):
    return trainers(path, tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def trainer(made):
    return made["grpo"]


@pytest.mark.parametrize("name, theirs, case", cells())
def test_losses_are_trls_own(made, name, theirs, case):
    value, gradient = worst(made, name, case)
    if (name, case) in KNOWN:
        assert max(value, gradient) > 1e-4
    else:
        assert value < 2e-6 and gradient < 1e-5  # of entries up to 100


def test_metrics_have_trls_names_and_numbers(trainer):
    ours, theirs = (x[2] for x in of_grpo(trainer, "dapo", inputs(2)))
    assert ours == pytest.approx({k: theirs[k] for k in ours}, rel=1e-4)
    assert theirs.keys() - ours.keys() == {"clip_ratio/low_min", "clip_ratio/high_max"}
    assert ours["clip_ratio/low_mean"] > 0 and ours["clip_ratio/high_mean"] > 0


@pytest.mark.parametrize("variant", ["dapo", "sapo"])
def test_what_trl_adds_to_a_batch_is_read(trainer, variant, monkeypatch):
    x = inputs(3)
    g = torch.Generator().manual_seed(0)
    plain = of_grpo(trainer, variant, x)[0][0]
    with monkeypatch.context() as put:  # vLLM's correction
        put.setattr(trainer, "use_vllm", True)
        put.setattr(trainer, "vllm_importance_sampling_correction", True)
        ours, theirs = of_grpo(
            trainer, variant, x | dict(importance_sampling_ratio=torch.rand(8, 6, generator=g))
        )
        torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-6)
        assert ours[0] != plain
    tools = torch.ones(8, 6).long()
    tools[:, 0] = 0  # what a tool has written
    tools[x["completion_mask"].sum(1) == 1] = 1
    ours, theirs = of_grpo(trainer, variant, x | dict(tool_mask=tools))
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-6)
    assert ours[0] != plain
    monkeypatch.setattr(trainer, "current_gradient_accumulation_steps", 4)  # one microbatch of four
    ours, theirs = of_grpo(trainer, variant, x)
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-6)
    assert ours[0] != plain
    monkeypatch.setattr(trainer.args, "use_bias_correction_kl", False)
    ours, theirs = of_grpo(trainer, variant, x)
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-6)


def test_without_old_log_probabilities_the_policy_is_the_old_one(trainer):
    x = inputs(4) | dict(old_per_token_logps=None)
    ours, theirs = of_grpo(trainer, "grpo", x)
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-6)


def test_training_ends_with_trls_weights(path, tmp_path):
    options = dict(gradient_accumulation_steps=2, per_device_train_batch_size=8, beta=0.05)
    start = weights(grpo(GRPOTrainer, path, tmp_path))
    theirs = train(
        grpo(GRPOTrainer, path, tmp_path, loss_type="dapo", epsilon_high=0.28, **options)
    )
    ours = train(grpo(grpo_trainer("dapo"), path, tmp_path, **options))
    assert (ours - theirs).norm() < 1e-3 * (ours - start).norm()  # Adam magnifies rounding


def test_a_variant_of_ones_own_trains(path, tmp_path, own_variant):
    register_variant(own_variant, lambda r, A, logp, m, low, high: r.clamp(max=1 + high) * A)
    trainer = grpo(grpo_trainer(own_variant, eps_high=0.1), path, tmp_path, max_steps=1)
    seen = []
    read = trainer._read

    def spy(model, x):
        seen.append((read(model, x), x))
        return seen[-1][0]

    trainer._read = spy
    train(trainer)
    (((logp, _, mask), x),) = seen
    loss = policy_loss(logp, logp, x["advantages"], mask, own_variant)[0]
    assert torch.isfinite(loss) and trainer.state.global_step == 1


def test_an_objective_gets_what_it_asks_for(path, tmp_path, own_variant):
    seen = []

    def f(ratio, advantage, logp, mask, eps_low, eps_high, entropy, logp_old, logp_ref, lengths):
        seen.append((entropy, logp_old, logp_ref, lengths, mask))
        return ratio * advantage * entropy

    register_variant(own_variant, f)
    train(grpo(grpo_trainer(own_variant), path, tmp_path, max_steps=1, beta=0.1))
    entropy, old, ref, lengths, mask = seen[-1]
    assert entropy.shape == old.shape == ref.shape == mask.shape and (entropy[mask] > 0).all()
    assert lengths.tolist() == mask.sum(1).tolist()
    register_variant(own_variant, lambda r, A, *rest, group: r * A)
    with pytest.raises(ValueError, match="^group must be given"):
        grpo_trainer(own_variant)


def test_an_advantage_of_ones_own_takes_the_place_of_trls(path, tmp_path):
    shapes = []

    def f(rewards, mask):
        shapes.append((*rewards.shape, mask.all().item()))
        return group_advantage(rewards)

    theirs = train(grpo(grpo_trainer(), path, tmp_path))
    ours = train(grpo(grpo_trainer(advantage=f), path, tmp_path))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert set(shapes) == {(4, 4, True)}
    none = grpo(grpo_trainer(advantage=lambda r, m: 0 * r), path, tmp_path)
    start = weights(none)
    torch.testing.assert_close(train(none), start, rtol=0, atol=0)
    assert not any(none._logs["advantages"])
    wrong = grpo(grpo_trainer(advantage=lambda r, m: r.mean(1)), path, tmp_path)
    with pytest.raises(ValueError, match="^advantage"):
        train(wrong)
    with pytest.raises(TypeError, match="^advantage must be a function or None, got 'mean'"):
        grpo_trainer(advantage="mean")


def test_dpo_ends_with_trls_weights_and_metrics(path, tmp_path):
    trainers = [
        dpo(T, path, tmp_path, beta=0.3, logging_steps=1) for T in (DPOTrainer, dpo_trainer())
    ]
    start = weights(trainers[0])
    theirs, ours = map(train, trainers)
    assert (ours - theirs).norm() < 1e-3 * (ours - start).norm()
    logs = [t.state.log_history[1] for t in trainers]
    names = [k for k in logs[1] if "/" in k or k == "loss"]
    assert len(names) == 7
    for k in names:
        assert logs[0][k] == pytest.approx(logs[1][k], rel=1e-3, abs=1e-5), k


def test_smoothing_and_kind_are_those_of_dpo_loss(path, tmp_path):
    "TRL's sigmoid reads no label_smoothing, and its ipo divides by the length."
    first = [
        dpo(
            dpo_trainer(kind),
            path,
            tmp_path,
            beta=0.3,
            label_smoothing=e,
            logging_steps=1,
            max_steps=2,
        )
        for kind, e in (("sigmoid", 0.4), ("ipo", 0.0))
    ]
    for trainer in first:
        train(trainer)
    smooth, ipo = (t.state.log_history[1] for t in first)
    assert first[1].state.log_history[0]["loss"] == pytest.approx((1 / 0.6) ** 2, rel=1e-4)  # h = 0
    h = smooth["rewards/margins"]
    sigmoid = torch.nn.functional.logsigmoid
    expected = -0.6 * sigmoid(torch.tensor(h)) - 0.4 * sigmoid(torch.tensor(-h))
    assert smooth["loss"] == pytest.approx(expected.item(), abs=0.05)


@pytest.mark.parametrize(
    "Trainer, make, wrong",
    [
        (grpo_trainer(), grpo, dict(epsilon=0.1)),
        (grpo_trainer(), grpo, dict(loss_type="sapo")),
        (grpo_trainer(), grpo, dict(top_entropy_quantile=0.5)),
        (grpo_trainer(), grpo, dict(use_liger_kernel=True)),
        (dpo_trainer(), dpo, dict(loss_type=["ipo"])),
        (dpo_trainer(), dpo, dict(ld_alpha=0.5)),
    ],
)
def test_an_option_that_ours_does_not_read_is_refused(path, tmp_path, Trainer, make, wrong):
    ((name, value),) = wrong.items()
    if name == "use_liger_kernel":
        pytest.importorskip("liger_kernel")
    with pytest.raises(
        ValueError, match=rf"^{name} must be left at .*, got .*: (grpo|dpo)_trainer "
    ):
        make(Trainer, path, tmp_path, **wrong)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: grpo_trainer("gpro"), ValueError, "variant must be one of 'ppo'"),
        (
            lambda: grpo_trainer("sapo", eps_low=0.1),
            ValueError,
            "eps_low must be None for variant='sapo'",
        ),
        (
            lambda: grpo_trainer(beta=0.1),
            TypeError,
            "grpo_trainer must get eps_low, .*, got beta: TRL has",
        ),
        (lambda: dpo_trainer("dop"), ValueError, "kind must be one of 'sigmoid'"),
    ],
)
def test_bad_arguments_are_told_before_a_model_is_loaded(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_advantages_of_another_shape_have_trls_name(trainer):
    with pytest.raises(ValueError, match="^advantages must have"):
        trainer._compute_loss(trainer.model, inputs(1) | dict(advantages=torch.zeros(8, 3)))


@pytest.mark.slow
def test_two_processes_end_with_the_weights_of_one(path, tmp_path):
    "The same prompts and responses in two halves, by torch.distributed on a CPU."
    one = fixed(path, 16, tmp_path)
    processes.together(2, f"""
import torch
from bridges.trl_parts import fixed
weights = fixed({path!r}, 8, {str(tmp_path)!r})
if os.environ["RANK"] == "0": torch.save(weights, {str(tmp_path / "both")!r})
""")
    both = torch.load(tmp_path / "both")
    assert (one - both).norm() < 1e-5 * one.norm()


def test_arguments_reach_the_loss(trainer, monkeypatch):
    made = grpo_trainer("ppo", eps_low=0.01, eps_high=0.02)
    loss = lambda Trainer: Trainer._compute_loss(trainer, trainer.model, inputs(1)).item()
    monkeypatch.setattr(type(trainer), "variant", "ppo")
    wide = loss(made)
    monkeypatch.setattr(type(trainer), "arguments", made.arguments)
    assert loss(made) != wide
