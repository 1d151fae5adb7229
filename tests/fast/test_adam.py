"One vector behind all weights."
import copy
import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from rlhf_notes.control.ppo import ppo_loss
from rlhf_notes.fast.adam import Adam, clip_gradient, one_vector
from strategies import SEEDS
from control.test_ppo import SMALL, agent, some_batch


def test_one_vector_learns_what_twelve_tensors_learn():
    batch = some_batch(3)
    def learn(together):
        a = agent(5)
        if together: weights = [one_vector(a)]; clear = weights[0].grad.zero_
        else: weights = list(a.parameters()); clear = lambda: a.zero_grad()
        adam = torch.optim.Adam(weights, lr=1e-2, eps=1e-5)
        for _ in range(5):
            clear()
            ppo_loss(a, batch, SMALL, 0.2)[0].backward()
            norm = torch.nn.utils.clip_grad_norm_(weights, 0.1)
            adam.step()
        return norm, torch.cat([p.detach().flatten() for p in a.parameters()])
    (norm, one), (norms, twelve) = learn(True), learn(False)
    assert norm > 0.1 and not torch.allclose(one, torch.cat([p.detach().flatten() for p in agent(5).parameters()]))
    torch.testing.assert_close(norm, norms); torch.testing.assert_close(one, twelve, rtol=1e-4, atol=1e-6)


@given(seed=SEEDS, size=st.integers(1, 50), scale=st.sampled_from([0.0, 1e-3, 1.0, 1e3]), longest=st.sampled_from([0.1, 0.5, 10.0]))
def test_a_gradient_is_clipped_as_pytorch_clips_it(seed, size, scale, longest):
    ours, theirs = torch.nn.Parameter(torch.zeros(size)), torch.nn.Parameter(torch.zeros(size))
    ours.grad, theirs.grad = (scale * torch.randn(size, generator=torch.Generator().manual_seed(seed)) for _ in range(2))
    before = math.sqrt(math.fsum(g * g for g in ours.grad.tolist()))
    norm = clip_gradient(ours.grad, longest)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_([theirs], longest)) and torch.equal(ours.grad, theirs.grad)
    assert norm.item() == pytest.approx(before, rel=1e-5) and ours.grad.norm().item() == pytest.approx(min(before, longest), rel=1e-4)


def test_one_vector_keeps_values_and_shares_memory():
    a = agent(2)
    before = {k: v.clone() for k, v in a.state_dict().items()}
    v = one_vector(a)
    assert all(torch.equal(before[k], x) for k, x in a.state_dict().items()) and v.numel() == sum(p.numel() for p in a.parameters())
    a.load_state_dict(agent(4).state_dict())
    assert torch.equal(v, torch.cat([p.flatten() for p in agent(4).parameters()]))


def test_the_gradient_of_each_parameter_is_added_into_the_vector():
    a = agent(2)
    v, x = one_vector(a), torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    def loss(): out, value = a(x); return out.square().sum() + value.square().sum()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss(), list(a.parameters()))])
    loss().backward(); assert torch.equal(v.grad, expected) and v.grad.any()
    loss().backward(); torch.testing.assert_close(v.grad, 2 * expected)
    v.grad.zero_(); assert all((p.grad == 0).all() for p in a.parameters())


def test_what_is_shared_stands_once_and_what_is_frozen_stays():
    embedding, head, frozen = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(3, 1)
    head.weight = embedding.weight; frozen.requires_grad_(False)
    v, kept = one_vector(nn.ModuleList([embedding, head, frozen])), frozen.weight.clone()
    assert len(v) == 15 and head.weight is embedding.weight and frozen.weight.grad is None
    head(embedding(torch.tensor([0, 3]))).square().sum().backward()
    Adam(v, 1e-8).step(0.1)
    assert torch.equal(frozen.weight, kept) and torch.equal(v, embedding.weight.flatten()) and v.grad.any()


def test_a_copy_of_the_module_has_weights_of_its_own():
    a = agent(2)
    v, b = one_vector(a), copy.deepcopy(a)
    with torch.no_grad(): v += 1
    assert all(torch.equal(p, q + 1) for p, q in zip(a.parameters(), b.parameters()))


def test_the_length_of_no_gradient_is_zero():
    g = torch.zeros(3)
    assert clip_gradient(g, 0.5) == 0 and torch.equal(g, torch.zeros(3))


@given(seed=SEEDS, eps=st.sampled_from([1e-8, 1e-5, 1e-1]), rates=st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=6), saved=st.integers(0, 5))
def test_adam_is_that_of_pytorch(seed, eps, rates, saved):
    "Bit for bit, at a learning rate that changes, and through a checkpoint; and the definition, in plain Python."
    g = torch.Generator().manual_seed(seed)
    ours, theirs = (torch.nn.Parameter(torch.ones(7)) for _ in range(2))
    a, b, m, v, x = Adam(ours, eps), torch.optim.Adam([theirs], eps=eps, fused=True), [0.0] * 7, [0.0] * 7, [1.0] * 7
    for t, rate in enumerate(rates, 1):
        if t - 1 == saved: state, a = {k: y.clone() for k, y in a.state_dict().items()}, Adam(ours, eps); a.load_state_dict(state)
        ours.grad = torch.randn(7, generator=g); theirs.grad = ours.grad.clone()
        b.param_groups[0]["lr"] = rate
        a.step(rate); b.step()
        assert torch.equal(ours, theirs)
        for i, d in enumerate(theirs.grad.tolist()):
            m[i], v[i] = 0.9 * m[i] + 0.1 * d, 0.999 * v[i] + 0.001 * d * d
            x[i] -= rate * (m[i] / (1 - 0.9 ** t)) / (math.sqrt(v[i] / (1 - 0.999 ** t)) + eps)
    torch.testing.assert_close(ours.detach(), torch.tensor(x), rtol=1e-3, atol=1e-4)
