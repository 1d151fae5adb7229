"Every exported function on a GPU, with and without kernels: values and gradients of the CPU."
import pytest
import torch
from formulas import test_compile as calls
from pretend import STATE, counted, inner, on_cpu, to_gpu
from strategies import normal, random_mask

import rlhf_notes as rn
from rlhf_notes import fast

INPUTS = ("x", "y", "z", "m", "done", "logits", "logits_ref", "index")
TOLERANCE = {torch.float64: (1e-9, 1e-7), torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2)}
SYNCHRONISE = {*calls.WITH_INFO, "truncate_at_stop"}  # Python floats come out; stop tokens go in
cuda_0 = torch.device("cuda:0")


def both_ways(name, dtype, monkeypatch):
    "(CPU's, GPU's) value and gradients, and what was counted."
    def run(move):
        for n in INPUTS: monkeypatch.setattr(calls, n, move(host[n]))
        f, *leaves = calls.CALLS[name]()
        leaves = [x if x.is_cuda else move(x.to(dtype)) for x in leaves]
        leaves = [x.detach().clone().requires_grad_(True) for x in leaves]
        with counted() as found: out = f(*leaves)
        grads = torch.autograd.grad(out.sum(), leaves, allow_unused=True,
                                    materialize_grads=True) if out.requires_grad else ()
        return [out, *grads], found
    host = {n: x.to(dtype) if (x := getattr(calls, n)).is_floating_point() else x for n in INPUTS}
    expected, _ = run(lambda x: x)
    got, found = run(to_gpu)
    assert all(x.device == cuda_0 for x in got)
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(on_cpu(got), on_cpu(expected), atol=atol, rtol=rtol, equal_nan=True)
    return found


@pytest.mark.parametrize("name", calls.CALLS)
def test_every_function_is_that_of_the_cpu(name, monkeypatch):
    for dtype in TOLERANCE:
        with monkeypatch.context() as patch: found = both_ways(name, dtype, patch)
        if name not in SYNCHRONISE: assert not found.kinds, found.lines


DOORS = {
    "selective_log_softmax", "entropy_from_logits", "log_probs_and_entropy", "linear_log_probs",
    "efficient_method", "accumulate", "discounted_returns", "gae", "gae_tokens",
    "reinforce_pp_advantage", "best_of_n_loss", "ppo_policy_error", "ppo_error",
    "grpo_policy_error", "rloo_policy_error"}


@pytest.mark.parametrize("name", calls.CALLS)
def test_with_kernels_too(name, monkeypatch, with_kernels):
    assert fast.has_kernels(to_gpu(torch.ones(2)))
    before = STATE.kernels
    for dtype in (torch.float32, torch.bfloat16):
        with monkeypatch.context() as patch: both_ways(name, dtype, patch)
    assert (STATE.kernels > before) == (name in DOORS)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second GPU")
def test_kernels_run_on_the_device_of_their_tensors(with_kernels):
    z, i = normal(0, (3, 4, 300), torch.float32), torch.arange(12).view(3, 4)
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(on_cpu(rn.log_probs_and_entropy(to_gpu(z, 1), to_gpu(i, 1))),
                               rn.log_probs_and_entropy(z, i), atol=1e-5, rtol=1e-5)
    r, v, n, end = (*(normal(k, (50, 3), torch.float32) for k in range(3)),
                    random_mask(3, (50, 3), 0.1))
    torch.testing.assert_close(on_cpu(rn.gae(*(to_gpu(x, 1) for x in (r, v, n, end, end)))),
                               rn.gae(r, v, n, end, end), atol=1e-5, rtol=1e-5)
    for wrong in (dict(index=i), dict(index=to_gpu(i), mask=i > 3)):
        with pytest.raises((RuntimeError, ValueError)): rn.selective_log_softmax(to_gpu(z), **wrong)


@pytest.mark.parametrize(
    "name", ["RunningMoments", "RewardNorm", "PPOLoss", "AdaptiveKLController"])
def test_every_class_is_that_of_the_cpu(name):
    x, k, more = (normal(0, (5, 4), torch.float32), random_mask(1, (5, 4)),
                  [normal(s, (5, 4), torch.float32) for s in range(2, 8)])
    def run(x, k, more):
        if name == "RunningMoments":
            moments = rn.RunningMoments((4,)).update(x, k[:, 0])
            return [moments.mean, moments.var, moments.whiten(x)]
        if name == "RewardNorm": return [rn.RewardNorm().fit(x.flatten())(x)]
        if name == "PPOLoss":
            return list(rn.PPOLoss()(*more, padding_masks=k, value_padding_masks=k))
        return [torch.tensor(rn.AdaptiveKLController().update(x.mean().abs(), 10))]
    torch.testing.assert_close(
        on_cpu(run(*to_gpu((x, k, more)))), run(x, k, more), atol=1e-6, rtol=1e-5)


@pytest.mark.skipif(STATE.real, reason="launches are counted on the pretended GPU")
def test_a_formula_is_one_launch_or_two(with_kernels):
    "The kernel, and a little around it."
    z, i = to_gpu((normal(0, (3, 4, 30), torch.float32), torch.arange(12).view(3, 4)))
    r, v, n, end = to_gpu(
        (*(normal(k, (16, 48), torch.float32) for k in range(3)), random_mask(3, (16, 48), 0.1)))
    fast.has_kernels(z)
    with counted() as forward: y = rn.log_probs_and_entropy(z.requires_grad_(True), i)
    with counted() as backward: torch.autograd.grad(y, z, (torch.ones_like(y[0]),) * 2)
    with counted() as steps: rn.gae(r, v, n, end, end)
    with counted() as tokens: rn.gae_tokens(r, v, end)
    # backward: the ones, the kernel; steps: returns = advantages + values
    assert (forward.launches, backward.launches, steps.launches) == (1, 2, 2), tokens.launches
    assert tokens.launches < 30


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_vocabulary_that_is_no_multiple_of_64_is_filled_up(with_bias, with_kernels, monkeypatch):
    "Values, gradients and second gradients from hidden states, in chunks."
    h, W, b, i = (normal(0, (2, 5, 8), torch.float32), normal(1, (70, 8), torch.float32),
                  normal(2, (70,), torch.float32), torch.arange(10).view(2, 5) * 7)
    def run(h, W, b, i):
        leaves = [x.requires_grad_(True) for x in ((h, W, b) if with_bias else (h, W))]
        y, H = rn.linear_log_probs(
            *leaves[:2], i, b if with_bias else None, 0.7, chunk=3, entropy=True)
        first = torch.autograd.grad((y.sin() + H).sum(), leaves, create_graph=True)
        return [y, H, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]
    found, expected = run(*to_gpu((h, W, b, i))), run(h, W, b, i)
    torch.testing.assert_close(on_cpu(found), on_cpu(expected), atol=1e-4, rtol=1e-4)
