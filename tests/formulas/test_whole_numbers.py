"""Rewards and scores that are whole numbers, or True and False, count as what they are."""
import inspect

import pytest
import torch

import rlhf_notes as rn

TAKEN = {"rewards", "token_rewards", "scores", "chosen", "rejected"}
R = torch.tensor([[1, 0, 2], [0, 1, 1], [3, 0, 0], [1, 1, 0]])
V, ENDS = torch.linspace(-1, 1, 12).reshape(4, 3), R == 3
NORM = rn.RewardNorm(0.5, 0.25)
CALLS = {
    "RewardNorm.fit": lambda r: NORM.fit(r).gain,
    "RewardNorm": lambda r: NORM(r),
    "discounted_returns": lambda r: rn.discounted_returns(r, ENDS, 0.9),
    "gae": lambda r: rn.gae(r, V, V + 1, ENDS, ENDS),
    "gae_tokens": lambda r: rn.gae_tokens(r, V, ~ENDS, 0.9, 0.8),
    "group_advantage": lambda r: rn.group_advantage(r),
    "rloo_advantage": lambda r: rn.rloo_advantage(r),
    "multi_reward_advantage": lambda r: rn.multi_reward_advantage(r[None]),
    "reinforce_pp_advantage": lambda r: rn.reinforce_pp_advantage(r, baseline=r[:, 0]),
    "token_rewards": lambda r: rn.token_rewards(r[:, 0], V, V - 1, 0.1),
    "apply_penalty": lambda r: rn.apply_penalty(r, ~ENDS, mode="subtract"),
    "best_of_n_loss": lambda r: rn.best_of_n_loss(r, R[:, 2]),
    "bradley_terry_loss": lambda r: rn.bradley_terry_loss(r, r * 0),
    "turn_advantage": lambda r: rn.turn_advantage(r[None], ~ENDS[None]),
    "whiten": lambda r: rn.whiten(r, ~ENDS),
}


def test_each_function_of_rewards_is_tried():
    def takes(name):
        f = getattr(rn, name)
        return inspect.isfunction(f) and TAKEN & inspect.signature(f).parameters.keys()
    module = "rlhf_notes.formulas."
    ours = {n for n in rn.__all__ if getattr(getattr(rn, n), "__module__", "").startswith(module)}
    found = set(filter(takes, ours))
    assert len(found) > 8 and found <= CALLS.keys()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_whole_numbers_are_computed_in_float32(name, dtype):
    r = R.to(dtype)
    torch.testing.assert_close(CALLS[name](r), CALLS[name](r.float()), rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"RewardNorm.fit"}))
def test_float64_stays(name):
    out = CALLS[name](R.double())
    assert (out[0] if isinstance(out, tuple) else out).dtype == torch.float64
