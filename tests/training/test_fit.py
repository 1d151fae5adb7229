"A training that is stopped and continued: what goes into its state, and comes back."
import torch

from rlhf_notes.training.fit import Stage

class Part:
    def __init__(self, x): self.x = x
    def state_dict(self): return dict(x=self.x)
    def load_state_dict(self, state): self.x = state["x"]


class Toy(Stage):
    PARTS = "a", "b"

    def __init__(self, a, b, iteration=0, steps=0):
        self.a, self.b, self.iteration, self.steps = Part(a), Part(b), iteration, steps


def test_a_stage_comes_back_with_every_part_and_its_counts():
    state, other = Toy(torch.ones(2), 3.0, 5, 40).state_dict(), Toy(torch.zeros(2), 0.0)
    assert state.keys() == {"a", "b", "iteration", "steps"}
    other.load_state_dict(state)
    assert torch.equal(other.a.x, torch.ones(2)) and other.b.x == 3.0
    assert (other.iteration, other.steps) == (5, 40)
