import logging
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import own_prompts
import pytest
import rlhf_gpu
import torch

from rlhf_notes import cli
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.reviews.pipeline import evaluate
from rlhf_notes.studies import benchmark_rlhf as compare
from rlhf_notes.studies.variants import prepare

SMALL = dict(device="cpu", sft_steps=2, sft_batch=8, labels=16, norm_samples=16, batch=16,
             iterations=2, eval_responses=8, kl_target=0.0)


@pytest.fixture(scope="module")
def start(): return prepare(ReviewsConfig(**SMALL))


def made_up(contender, seed, seconds):
    return dict(contender=contender, seed=seed, seconds_per_iteration=seconds,
                tokens_per_second=100 / seconds, true_score=float(seed))


def test_ratios_are_paired():
    rows = [made_up("ours-grpo", 0, 1.0), made_up("ours-ppo", 0, 2.0), made_up("trl-grpo", 0, 3.0),
            made_up("trl-grpo", 1, 8.0), made_up("ours-grpo", 1, 4.0), made_up("ours-ppo", 1, 2.0),
            made_up("trl-ppo", 0, 10.0), made_up("trl-ppo", 1, 14.0)]
    assert compare.ratios(rows, "trl-grpo") == dict(median=2.5, low=2.0, high=3.0)
    assert compare.ratios(rows, "trl-ppo")["median"] == 6.0
    header, *lines = compare.table(rows)
    assert [line[0] for line in lines] == ["ours-grpo", "ours-ppo", "trl-grpo", "trl-ppo"]
    assert lines[0][3] == "1"
    assert lines[2][1:] == ("5500", "23", "2.5 [2.0, 3.0]", "0.50")


def test_the_interval_of_a_ratio_is_that_of_the_median():
    "Of nine seeds one is far away, which the mean's interval would show."
    rows = [
        made_up(name, s, seconds) for s in range(9)
        for name, seconds in (("ours-ppo", 1.0), ("trl-ppo", 1000.0 if s == 8 else 2.0 + s / 100))]
    assert compare.ratios(rows, "trl-ppo")["high"] < 3


def test_quiet_puts_everything_back(capsys):
    from transformers.utils import logging as theirs
    before = theirs.get_verbosity(), logging.root.manager.disable
    with pytest.raises(KeyError), compare._quiet():
        print("hear me")
        warnings.warn("and me")
        logging.getLogger("x").warning("and me")
        raise KeyError
    assert capsys.readouterr() == ("", "")
    assert (theirs.get_verbosity(), logging.root.manager.disable) == before


@pytest.mark.parametrize("name", ["ours-grpo", "ours-ppo", "trl-grpo"])
def test_each_contender_does_the_same_work(start, name):
    if name not in compare.contenders(): pytest.skip(f"{name} is not installed")
    row = compare.race(name, start, 2)
    assert tuple(row) == compare.COLUMNS
    assert row["contender"] == name
    assert row["iterations"] == 2
    assert row["seconds"] > 0
    assert row["tokens_per_second"] * row["seconds"] == pytest.approx(2 * 16 * 16)
    train, changes = compare.contenders()[name]
    config = start.trainer(**changes, iterations=3).config
    ends, lm = train(start, config)
    assert len(ends) == 3 and ends == sorted(ends)
    assert any((x != y).any() for x, y in zip(lm.parameters(), start.lm.parameters()))
    assert lm.config.n_layer == start.lm.config.n_layer


def test_the_race_by_hand(start, monkeypatch):
    "The first of three iterations, which may load and compile, does not count."
    trained = object()
    monkeypatch.setattr(compare, "contenders",
                        lambda: {"x": (lambda start, config: ([10.0, 11.0, 14.0], trained), {})})
    monkeypatch.setattr(
        compare, "evaluate",
        lambda trainer, lm: SimpleNamespace(true=torch.tensor([1.0,
                                                               2.0 if lm is trained else 0.0])))
    row = compare.race("x", start, 2)
    assert (row["seconds"], row["seconds_per_iteration"], row["true_score"]) == (4.0, 2.0, 1.5)


def test_everybody_has_one_thread(start, monkeypatch):
    found = []
    def train(start, config):
        found.append(torch.get_num_threads())
        return [1.0, 2.0], start.lm
    monkeypatch.setattr(compare, "contenders", lambda: {"x": (train, {})})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compare.race("x", start, 1)
        assert (found, torch.get_num_threads()) == ([1], 2)
    finally: torch.set_num_threads(before)


def test_the_start_of_a_race_is_what_the_command_says(monkeypatch):
    begun = []
    monkeypatch.setattr(compare, "prepare", begun.append)
    monkeypatch.setattr(compare, "race", lambda *args: {})
    compare.compare(1, 1, first=4, precision="bfloat16")
    assert begun == [ReviewsConfig(seed=4, device="cpu", precision="bfloat16", kl_target=0.0)]


def test_ours_is_told_what_theirs_is_told(start, monkeypatch):
    told, done = [], SimpleNamespace(iteration=0, iterations=0, policy=SimpleNamespace(lm=None))
    monkeypatch.setattr(compare.Start, "trainer", lambda self: told.append(self.config) or done)
    compare.ours(start, config := ReviewsConfig(**SMALL | dict(learning_rate=0.5)))
    assert told == [config]


def test_trl_is_told_what_we_are_told(start, monkeypatch):
    if "trl-grpo" not in compare.contenders(): pytest.skip("TRL is not installed")
    import trl
    told = {}
    class Told:
        def __init__(self, model, reward_funcs, args, **_):
            self.model = model
            told.update(args=args, reward=reward_funcs)
        def add_callback(self, callback): pass
        def train(self): pass
    monkeypatch.setattr(trl, "GRPOTrainer", Told)
    trainer = start.trainer(
        algo="grpo", kl_in_loss=True, seed=5, temperature=0.9, learning_rate=2e-3, adam_eps=1e-6,
        max_grad_norm=0.7, kl_coef=0.2, clip=0.3, epochs=3, iterations=5)
    compare.trl_grpo(start, c := trainer.config)
    a = told["args"]
    assert (a.seed, a.temperature, a.learning_rate, a.lr_scheduler_type, a.adam_epsilon,
            a.max_grad_norm, a.beta, a.epsilon) == (5, 0.9, 2e-3, "linear", 1e-6, 0.7, 0.2, 0.3)
    assert ((a.num_iterations, a.num_generations, a.max_completion_length, a.max_steps,
             a.per_device_train_batch_size * a.steps_per_generation)
            == (3, c.group, c.response_length, 5 * 3 * c.minibatches, c.batch))
    look = evaluate(trainer)
    assert (told["reward"]([query for query, _ in look.texts], look.rollout.responses.tolist())
            == pytest.approx(look.rollout.scores.tolist(), abs=1e-5))
    assert 0 < look.rollout.has_end.sum() < len(look.true)


def test_a_trl_that_cannot_be_imported_is_left_out(monkeypatch):
    class Unfit(ModuleType):
        def __getattr__(self, name):
            if name == "GRPOTrainer":
                raise RuntimeError("Failed to import trl.trainer.grpo_trainer")
            raise AttributeError(name)
    unfit = Unfit("trl")
    unfit.__spec__ = ModuleSpec("trl", None)
    monkeypatch.setitem(sys.modules, "trl", unfit)
    assert list(compare.contenders()) == ["ours-grpo", "ours-ppo"]


def test_the_command(tmp_path, monkeypatch, capsys, start):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        compare, "contenders",
        lambda: {"ours-grpo": (compare.ours, dict(algo="grpo")), "ours-ppo": (compare.ours, {})})
    asked = []
    monkeypatch.setattr(
        compare, "prepare", lambda config: asked.append((config.seed, config.device)) or start)
    assert cli.main(["compare", "--task", "rlhf", "--seeds", "2", "--iterations", "1"]) == 0
    out, _ = capsys.readouterr()
    assert asked == [(0, "cpu"), (1, "cpu")] and "tokens / s" in out and "compare.csv" in out
    lines = (tmp_path / "runs" / "compare-rlhf" / "compare.csv").read_text().splitlines()
    assert lines[0] == ",".join(compare.COLUMNS)
    assert [line.split(",")[2:4] for line in lines[1:]] == [
        ["ours-grpo", "1"], ["ours-ppo", "1"], ["ours-ppo", "1"], ["ours-grpo", "1"]]
    assert cli.main(["compare", "--task", "rlhf"]) == 2


def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path, capsys):
    rlhf_gpu.main(["--device", "cpu", "--sizes", "tiny", "--batch", "16", "--response-length", "16",
                   "--iterations", "1", "--no-trl", "--out", str(tmp_path)])
    rows = [line.split(",") for line in (tmp_path / "gpu.csv").read_text().splitlines()]
    assert tuple(rows[0]) == rlhf_gpu.COLUMNS
    assert [r[4] for r in rows[1:]] == ["ours-ppo", "ours-grpo"]
    assert all(float(x) > 0 for r in rows[1:] for x in r[8:12])
    assert (tmp_path / "gpu.md").read_text().startswith("CPU, torch")
    with pytest.raises(SystemExit) as e: rlhf_gpu.main(["--device", "cuda:99"])
    assert e.value.code == 2 and "got 'cuda:99'" in capsys.readouterr().err


def test_a_race_on_own_prompts(monkeypatch):
    """The first iteration is left out, the ratio is theirs over ours, and the reward sees words."""
    monkeypatch.setitem(own_prompts.CASES, "short",
                        dict(max_new_tokens=4, batch=16, iterations=3))
    monkeypatch.setattr(own_prompts, "ours", lambda trainer: trainer.iterate() and [9.0, 9.5, 10.0])
    monkeypatch.setattr(own_prompts, "trl", lambda folder, config: [0.0, 1.0, 2.5])
    assert own_prompts.race("Llama", "short", 1) == ["Llama", "short", 1, 2, 0.5, 1.25, 2.5]
    assert own_prompts.reward([], ["w2 w3 w4 w6", ""]) == [0.75, 0]
