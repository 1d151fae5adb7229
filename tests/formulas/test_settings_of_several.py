"One rule: data are tensors; a setting for each of a few things is a sequence or a tensor of them."
import inspect
import typing

import pytest
import torch

import rlhf_notes as rn

rewards, logp = torch.randn(2, 4, 3), torch.randn(4, 5) - 3
A, old = torch.tensor([1.0, -1.0, 2.0, -0.5]), logp - 0.1
PLACES = "dim", "shape", "stop_token"  # no numbers to compute with
CASES = {
    ("multi_reward_advantage", "weights"): (
        lambda x: rn.multi_reward_advantage(rewards, x), [1, 2.5, 0]),
    ("policy_loss", "tau"): (
        lambda x: rn.policy_loss(logp, old, A, variant="sapo", tau=x)[0], [1, 2.5])}


def of_several():
    "(function, argument) of whatever public formula takes a sequence."
    for name in dir(rn):
        f = getattr(rn, name)
        if not callable(f) or not getattr(f, "__module__", "").startswith("rlhf_notes.formulas"):
            continue
        for p in inspect.signature(f).parameters.values():
            kinds = {typing.get_origin(k) or k for k in (*typing.get_args(p.annotation),
                                                         p.annotation)}
            if kinds & {list, tuple} and p.name not in PLACES: yield name, p.name


def test_each_argument_that_takes_a_sequence_is_tried():
    assert set(of_several()) == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_a_sequence_and_a_tensor_mean_the_same(case):
    f, numbers = CASES[case]
    expected = f(numbers)
    for x in (tuple(numbers), torch.tensor(numbers), torch.tensor(numbers).double(),
              [float(n) for n in numbers]):
        torch.testing.assert_close(f(x), expected)
    whole = [int(n) for n in numbers]
    torch.testing.assert_close(f(torch.tensor(whole)), f(whole))
    assert not torch.equal(f(numbers[::-1]), expected)


@pytest.mark.parametrize("case", CASES)
def test_too_many_too_few_and_no_numbers_are_refused_by_name(case):
    f, numbers = CASES[case]
    for x in (numbers[:-1], [*numbers, 1], torch.tensor(numbers[:-1]), torch.tensor(2.0), 2.0,
              "ab", ["a"] * len(numbers), [float("nan")] * len(numbers)):
        with pytest.raises((TypeError, ValueError), match=f"^{case[1]} must"): f(x)
