import pytest

def pytest_collection_modifyitems(config):
    for name in filter(None, config.getoption("--expect").split(",")):
        __import__(name)


@pytest.fixture(autouse=True, scope="module")
def own_accelerator():
    "TRL trains in bfloat16 by default, and accelerate keeps that for the whole process."
    yield
    from accelerate.state import AcceleratorState, GradientState
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
