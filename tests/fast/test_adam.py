"One vector behind all weights, and its plain twin."
import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SEEDS
from torch import nn

from rlhf_notes import fast
from rlhf_notes.fast.adam import Adam, one_vector

def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def flat(module): return torch.cat([p.detach().flatten() for p in module.parameters()])


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def learned(steps=5, eps=1e-5):
    module = net(5)
    adam = Adam(module, eps)
    for t in range(steps):
        adam.zero_grad()
        (module(X).squeeze(-1) - X.prod(-1)).square().mean().backward()
        norm = adam.clip(0.1)
        adam.step(1e-2 / (t + 1))
    return norm, flat(module)


def test_the_kernel_learns_what_the_formula_learns():
    norm, quick = learned()
    with fast.off(): norms, plain = learned()
    assert norm > 0.1 and not torch.allclose(quick, flat(net(5)))
    torch.testing.assert_close(norm, norms)
    torch.testing.assert_close(quick, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plain", [False, True])
def test_rate_epsilon_and_what_is_frozen_are_heeded(plain, monkeypatch):
    "Worked by hand: in the first step m / (1 - b1) = g and v / (1 - b2) = g ** 2."
    monkeypatch.setattr(fast, "is_open", lambda: not plain)
    module = nn.Linear(2, 1)
    nn.init.ones_(module.weight)
    module.bias.requires_grad_(False)
    kept, adam = module.bias.clone(), Adam(module, 1e-1)
    adam.zero_grad()
    (module.weight * torch.tensor([3.0, -0.1])).sum().backward()
    adam.step(0.5)
    torch.testing.assert_close(
        module.weight[0].detach(), torch.tensor([1 - 0.5 * 3 / 3.1, 1 + 0.5 * 0.1 / 0.2]))
    assert torch.equal(module.bias, kept)
    adam.eps = 1e9
    before = module.weight.clone()
    adam.step(0.5)
    torch.testing.assert_close(module.weight, before, rtol=0, atol=1e-6)


@given(seed=SEEDS, size=st.integers(1, 50), scale=st.sampled_from([0.0, 1e-3, 1.0, 1e3]),
       longest=st.sampled_from([0.1, 0.5, 10.0]))
def test_a_gradient_is_clipped_as_pytorch_clips_it(seed, size, scale, longest):
    adam, theirs = (Adam(nn.ParameterList([nn.Parameter(torch.zeros(size))]), 1e-8),
                    nn.Parameter(torch.zeros(size)))
    ours = adam.vector
    ours.grad, theirs.grad = (
        scale * torch.randn(size, generator=torch.Generator().manual_seed(seed)) for _ in range(2))
    before = math.sqrt(math.fsum(g * g for g in ours.grad.tolist()))
    norm = adam.clip(longest)
    assert torch.equal(norm, nn.utils.clip_grad_norm_([theirs], longest))
    assert torch.equal(ours.grad, theirs.grad)
    assert norm.item() == pytest.approx(before, rel=1e-5)
    assert ours.grad.norm().item() == pytest.approx(min(before, longest), rel=1e-4)


def test_one_vector_keeps_values_and_shares_memory():
    a = net(2)
    before = {k: v.clone() for k, v in a.state_dict().items()}
    v = one_vector(a)
    assert all(torch.equal(before[k], x) for k, x in a.state_dict().items())
    assert torch.equal(v, flat(a))
    a.load_state_dict(net(4).state_dict())
    assert torch.equal(v, flat(net(4)))


def test_the_gradient_of_each_parameter_is_added_into_the_vector():
    a = net(2)
    v = one_vector(a)
    expected = torch.cat(
        [g.flatten() for g in torch.autograd.grad(a(X).square().sum(), list(a.parameters()))])
    a(X).square().sum().backward()
    assert torch.equal(v.grad, expected) and v.grad.any()
    a(X).square().sum().backward()
    torch.testing.assert_close(v.grad, 2 * expected)
    v.grad.zero_()
    assert all((p.grad == 0).all() for p in a.parameters())


def test_what_is_shared_stands_once_and_what_is_frozen_stays():
    embedding, head, frozen = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(3, 1)
    head.weight = embedding.weight
    frozen.requires_grad_(False)
    adam, kept = Adam(nn.ModuleList([embedding, head, frozen]), 1e-8), frozen.weight.clone()
    v = adam.vector
    assert len(v) == 15 and head.weight is embedding.weight and frozen.weight.grad is None
    head(embedding(torch.tensor([0, 3]))).square().sum().backward()
    adam.step(0.1)
    assert torch.equal(frozen.weight, kept)
    assert torch.equal(v, embedding.weight.flatten())
    assert v.grad.any()


def test_a_copy_of_the_module_has_weights_of_its_own():
    a = net(2)
    v, b = one_vector(a), copy.deepcopy(a)
    with torch.no_grad(): v += 1
    assert all(torch.equal(p, q + 1) for p, q in zip(a.parameters(), b.parameters()))


@given(seed=SEEDS, eps=st.sampled_from([1e-8, 1e-5, 1e-1]),
       rates=st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=6), saved=st.integers(0, 5))
def test_adam_is_that_of_pytorch(seed, eps, rates, saved):
    """Bit for bit, at a learning rate that changes, and through a checkpoint; and the definition,
    in plain Python.
    """
    g = torch.Generator().manual_seed(seed)
    ours, theirs = (nn.Parameter(torch.ones(7)) for _ in range(2))
    new = lambda: Adam(nn.ParameterList([ours]), eps)
    a, b, m, v, x = (new(), torch.optim.Adam([theirs], eps=eps, fused=True), [0.0] * 7, [0.0] * 7,
                     [1.0] * 7)
    for t, rate in enumerate(rates, 1):
        if t - 1 == saved:
            state, a = {k: y.clone() for k, y in a.state_dict().items()}, new()
            a.load_state_dict(state)
        ours.grad.copy_(torch.randn(7, generator=g))
        theirs.grad = ours.grad.clone()
        b.param_groups[0]["lr"] = rate
        a.step(rate)
        b.step()
        assert torch.equal(ours, theirs)
        for i, d in enumerate(theirs.grad.tolist()):
            m[i], v[i] = 0.9 * m[i] + 0.1 * d, 0.999 * v[i] + 0.001 * d * d
            x[i] -= rate * (m[i] / (1 - 0.9 ** t)) / (math.sqrt(v[i] / (1 - 0.999 ** t)) + eps)
    torch.testing.assert_close(ours.detach(), torch.tensor(x), rtol=1e-3, atol=1e-4)


def set_data(m):
    for p in m.parameters():
        p.data = p.data.clone()


def swap(m):
    m[0].weight.data, m[2].weight.data = m[2].weight.data, m[0].weight.data


def vector(m):
    v = nn.utils.parameters_to_vector(m.parameters()).detach().clone()
    nn.utils.vector_to_parameters(v, m.parameters())


CUT = dict(
    data=set_data, swap=swap, vector=vector,
    assign=lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()},
                                       assign=True),
    round_trip=lambda m: m.double().float(), zero_grad=lambda m: m.zero_grad(),
    own_gradient=lambda m: setattr(m[0].weight, "grad", torch.ones(4, 4)),
    new_parameter=lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 4))),
    transposed=lambda m: setattr(m[0].weight, "data", m[0].weight.data.T),
    same_memory=lambda m: setattr(m[0].weight, "data", m[2].weight.data))


@pytest.mark.parametrize("cut", CUT.values(), ids=CUT)
def test_what_was_cut_off_is_tied_again_and_the_new_values_stay(cut):
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    adam = Adam(module, 1e-8)
    module(X).square().mean().backward()
    adam.step(1e-2)
    cut(module)
    before = flat(module)
    adam.tie()
    assert torch.equal(flat(module), before) and torch.equal(adam.vector, before)
    adam.zero_grad()
    loss = module(X).square().mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(
        loss, list(module.parameters()), retain_graph=True)])
    loss.backward()
    torch.testing.assert_close(adam.vector.grad, expected)
    adam.step(1e-2)
    assert torch.equal(flat(module), adam.vector) and (flat(module) != before).all()


@pytest.mark.parametrize("change, word", [
    (lambda m: m.double(), r"^0.weight must stay .*float32.* got .*float64"),
    (lambda m: m.to("meta"), "^0.weight must stay .*cpu.* got .*meta"),
    (lambda m: setattr(m[2], "weight", nn.Parameter(torch.ones(1, 3))),
     r"^2.weight must stay \(\(1, 8\).* got \(\(1, 3\)"),
    (lambda m: setattr(m[2], "bias", None), "^2.bias must stay .* got None"),
    (lambda m: m.append(nn.Linear(1, 1)), "^3.weight must be learned from the start or never"),
    (lambda m: m.requires_grad_(False), "^model must have weights that learn, got all of them")])
def test_parameters_of_another_kind_are_named(change, word):
    module = net()
    adam = Adam(module, 1e-8)
    change(module)
    with pytest.raises(ValueError, match=word): adam.tie()


def test_what_is_frozen_stops_and_learns_again_later():
    module = net()
    adam = Adam(module, 1e-8)

    def step():
        adam.tie()
        adam.zero_grad()
        module(X).square().mean().backward()
        adam.step(1e-2)
        return module[0].weight.clone()
    before = step()
    module[0].weight.requires_grad_(False)
    assert torch.equal(step(), before)
    module[0].weight.requires_grad_(True)
    assert not torch.equal(step(), before)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_module_and_optimizer_learns_on(how):
    module = net()
    adam = Adam(module, 1e-8)
    pair = [module, adam]
    for _ in range(2):
        for m, a in pair, how(pair):
            a.zero_grad()
            m(X).square().mean().backward()
            a.step(1e-2)
            assert torch.equal(flat(m), a.vector)
    (m, a), one = how(pair), flat(module)
    for _ in range(3):
        a.zero_grad()
        m(X).square().mean().backward()
        a.step(1e-2)
    assert torch.equal(flat(module), one) and not torch.equal(flat(m), one)


@pytest.mark.parametrize("other", [copy.deepcopy, torch.compile], ids=["a copy", "compiled"])
def test_a_module_in_the_place_of_the_first_is_learned(other):
    module = net()
    adam, second = Adam(module, 1e-8), other(module)
    adam.tie(second)
    before = flat(second).clone()
    adam.step(1e-2), adam.zero_grad()
    second(X).square().mean().backward() if other is copy.deepcopy else adam.vector.grad.fill_(1.0)
    adam.step(1e-2)
    assert torch.equal(flat(second), adam.vector) and (flat(second) != before).all()
