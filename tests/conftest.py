import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# a name that is no directory is no reason to wait for a network
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# what a training says does not depend on how long it takes
os.environ.setdefault("TQDM_DISABLE", "1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_addoption(parser):
    parser.addoption("--expect", default="",
                     help="libraries, with commas between their names, that must be there: one "
                     "that is missing fails instead of being skipped")


def pytest_terminal_summary(terminalreporter):
    "Close with a count that names the failures even when there are none."
    count = {
        k: len(terminalreporter.stats.get(k, [])) for k in ("passed", "failed", "error", "skipped")}
    terminalreporter.write_line(
        f"{count['passed']} passed, {count['failed'] + count['error']} failed, "
        f"{count['skipped']} skipped")


@pytest.fixture
def own_variant(monkeypatch):
    "A name that the test may register; forgotten after it."
    from rlhf_notes.formulas import grpo
    for names in (grpo.POLICY_VARIANTS, grpo._OBJECTIVES):
        monkeypatch.setitem(names, "mine", None)
    yield "mine"
    grpo.BY_PROMPT.discard("mine")
