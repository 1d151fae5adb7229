import threading
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState

from rlhf_notes import RLHF
from rlhf_notes.cli import main
from rlhf_notes.training.devices import (
    DTYPE,
    make_accelerator,
    pick_device,
    stopped_anywhere,
    usual_defaults,
)
from rlhf_notes.training.fit import SMALL, THREADS

@pytest.mark.parametrize("name, gpus, auto, expected", [
    ("auto", 0, "cpu", "cpu"),
    ("auto", 2, "cpu", "cpu"),
    ("auto", 0, "cuda", "cpu"),
    ("auto", 2, "cuda", "cuda"),
    ("cpu", 0, "cuda", "cpu"),
    ("cuda", 1, "cpu", "cuda"),
    ("cuda:1", 2, "cpu", "cuda:1"),
    ("cuda", 0, "cpu", "got 'cuda': torch .* sees 0 of cuda"),
    ("cuda:2", 2, "cpu", "got 'cuda:2': torch .* sees 2 of cuda"),
    ("gpu", 2, "cpu", "device must be auto, cpu, cuda or mps, got 'gpu'"),
    ("cuda:x", 2, "cpu", "device must be auto"),
    ("cuda:\N{SUPERSCRIPT TWO}", 3, "cpu", "device must be auto, "),
    ("cuda:", 1, "cpu", "device must be auto, "),
    ("cuda:01", 2, "cpu", "device must be auto, "),
    ("", 2, "cpu", "device must be auto, "),
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
        with pytest.raises(ValueError, match="got 'mps': torch .* sees 0 of mps; use cpu or auto"):
            pick_device("mps")


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_of_what_a_launcher_sets_is_named(missing, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=f"variable {missing} must be set beside LOCAL_RANK, as"):
        make_accelerator()
    monkeypatch.delenv("LOCAL_RANK")
    assert make_accelerator().num_processes == 1


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_a_launcher_that_shards_is_refused_before_a_model_is_loaded(name, monkeypatch, tmp_path):
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "True")
    words = f"^use_{name.lower()} of accelerate must be off, .* got true: rlhf_notes.bridges.trl "
    for begin in (make_accelerator, lambda: RLHF("no such model", prompts=[], reward=len)):
        with pytest.raises(ValueError, match=words): begin()
    run = tmp_path / "run"
    assert main(["rlhf", "--out", str(run)]) == 2 and not run.exists()
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "false")
    make_accelerator()


def test_a_sharded_accelerator_of_this_process_is_refused(monkeypatch, fresh_accelerate):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    with pytest.raises(ValueError, match="^use_fsdp of accelerate must be off"): make_accelerator()


@pytest.fixture
def fresh_accelerate():
    "What another trainer does to accelerate's state of the process is undone."
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_precision_of_another_trainer_is_not_ours(fresh_accelerate):
    assert Accelerator(mixed_precision="bf16").mixed_precision == "bf16"
    model, x = torch.nn.Linear(9, 9), torch.randn(9, 9)
    expected = model(x)
    assert torch.equal(make_accelerator().prepare_model(model)(x), expected)


# the caller's settings

@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_a_thread(function):
    "What a function returns in a new thread, which inherits the setting of the process."
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def overlap(setting, value):
    "Of two trainings the first ends first: what is set after it, and after the second, per thread."
    began, ended, found = threading.Event(), threading.Event(), {}

    def second():
        with setting.held(value):
            began.set()
            ended.wait()
            found["while"] = setting.get()
        found["second"] = setting.get()
    with setting.held(value):
        thread = threading.Thread(target=second)
        thread.start()
        began.wait()
    ended.set()
    thread.join()
    return found | dict(first=setting.get(), new=in_a_thread(setting.get))


def test_the_last_of_two_trainings_restores_the_default_dtype():
    torch.set_default_dtype(torch.float16)
    try: found = overlap(DTYPE, torch.float32)
    finally: torch.set_default_dtype(torch.float32)
    half = torch.float16
    assert found == {"while": torch.float32, "second": half, "first": half, "new": half}


def test_each_thread_gets_back_its_number_of_threads(two_threads):
    assert overlap(THREADS, 1) == {"while": 1, "second": 2, "first": 2, "new": 2}


def test_a_setting_within_itself_ends_with_the_outer_one(two_threads):
    with THREADS.held(1):
        with THREADS.held(1): pass
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_an_error_restores_the_setting(two_threads):
    with pytest.raises(ValueError), THREADS.held(1): raise ValueError
    assert torch.get_num_threads() == 2 and not THREADS.holders


def test_the_largest_of_the_models_decides(two_threads):
    small, large = (torch.nn.Linear(n, 1, bias=False, device="meta") for n in (10, SMALL))
    count = usual_defaults("policy", "task.models")(lambda trainer: torch.get_num_threads())
    for policy, models, threads in (small, [], 1), (small, [large], 2), (large, [small], 2):
        task = SimpleNamespace(models=torch.nn.ModuleList(models))
        assert count(SimpleNamespace(policy=policy, task=task)) == threads


@pytest.mark.parametrize("weights, threads", [(SMALL - 1, 1), (SMALL, 2)])
def test_a_small_model_computes_on_one_thread(weights, threads, two_threads, monkeypatch):
    model = torch.nn.Linear(weights, 1, bias=False, device="meta")
    count = usual_defaults("model")(lambda trainer: torch.get_num_threads())
    assert count(SimpleNamespace(model=model)) == threads and torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert count(SimpleNamespace(model=model)) == 2


class Process:
    "One of several that share a flag, as accelerate's triggers do."
    flag = False
    def set_trigger(self): Process.flag = True
    def check_trigger(self): return Process.flag


def test_processes_stop_together():
    stop, go_on, one, other = threading.Event(), threading.Event(), Process(), Process()
    assert not stopped_anywhere(one, stop)
    stop.set()
    assert stopped_anywhere(one, stop) and stopped_anywhere(other, go_on)
