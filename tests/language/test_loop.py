"The loop computes the same in one piece and in parts."
import pytest
from stored.trainings import trainer

from rlhf_notes.language.loop import Loop
from rlhf_notes.language.machine import Machine, Scaled

@pytest.mark.parametrize("algo", ["grpo", "dpo"])
def test_one_loop_runs_on_the_plain_machine_and_on_the_other(algo):
    plain, scaled = (trainer(algo, 0, microbatches=k).loop for k in (1, 2))
    assert isinstance(plain, Loop) and type(plain.machine) is Machine
    assert type(scaled) is type(plain) and type(scaled.machine) is Scaled
    a, b = (loop.iterate() for loop in (plain, scaled))
    for name in set(a) - {"tokens_per_second"}:
        assert (a[name] is None) == (b[name] is None), name
        if a[name] is not None: assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-4), name


def test_put_names_a_method():
    t = trainer("grpo", 0)
    with pytest.raises(ValueError, match="^put must name methods of Loop, got los$"):
        t.loop.put(los=lambda loop, *args: None)


@pytest.mark.parametrize("algo", ["grpo", "dpo"])
def test_a_rate_may_be_a_function_of_the_iterations_that_are_left(algo):
    t = trainer(algo, 0, learning_rate=lambda left: 1e-3 * left)
    rates = [t.iterate()["learning_rate"] for _ in range(2)]
    assert rates == pytest.approx([1e-3, 0.9e-3])
