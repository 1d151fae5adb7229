import math
import re
import warnings
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import SEEDS, normal

from rlhf_notes.control.config import PPOConfig
from rlhf_notes.control.policy import (
    ACTIVATIONS,
    Agent,
    Bernoulli,
    Categorical,
    Gaussian,
    distribution,
    mlp,
    numpy_mlp,
)

BOX = gym.spaces.Box(np.array([-1, 10, -0.3], np.float32), np.array([3, 20, 0.7], np.float32))
CART = gym.spaces.Box(-1, 1, (4,))
OPTIONS = dict(hidden=16, activation="tanh", init="orthogonal", log_std=-0.5, squash=False,
               shared=False)


def generator(seed=0): return torch.Generator().manual_seed(seed)


def agent(space, seed=0, **options):
    if not isinstance(space, gym.spaces.Box):
        options = dict(log_std=0.0) | options
    return Agent(CART, space, SimpleNamespace(**{**OPTIONS, **options}), generator(seed))


def observations(n=64, seed=0):
    return np.random.default_rng(seed).normal(size=(n, 4)).astype(np.float32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("init", ["orthogonal", "default"])
@settings(max_examples=10)
@given(seed=SEEDS, hidden=st.sampled_from([1, 8, 64]), outputs=st.integers(1, 4),
       scale=st.sampled_from([0.1, 1.0, 5.0]))
def test_the_copy_is_the_network(activation, init, seed, hidden, outputs, scale):
    net = mlp(4, outputs, 1.0, hidden, activation, init, generator(seed))
    obs = scale * observations(seed=seed)
    forward = numpy_mlp(net, activation)
    with torch.no_grad(): there = net(torch.from_numpy(obs)).numpy()
    here = forward(obs)
    assert here.dtype == np.float32 and here.shape == (64, outputs)
    assert np.abs(here - there).max() <= 5e-6 * max(1.0, np.abs(there).max())
    assert np.abs(forward(obs[0]) - there[0]).max() <= 1e-6 * max(1.0, np.abs(there).max())
    with torch.no_grad():
        for p in net.parameters(): p.add_(1.0)
    assert np.array_equal(forward(obs), here)  # it does not follow


def test_activations_are_those_of_torch_by_hand():
    one = {"tanh": math.tanh(1.5), "relu": 1.5, "silu": 1.5 / (1 + math.exp(-1.5))}
    minus = {"tanh": -math.tanh(1.5), "relu": 0.0, "silu": -1.5 / (1 + math.exp(1.5))}
    assert set(one) == set(ACTIVATIONS)
    for name, (layer, f) in ACTIVATIONS.items():
        for x, expected in ((1.5, one[name]), (-1.5, minus[name]), (0.0, 0.0)):
            assert layer()(torch.tensor(x)).item() == pytest.approx(expected, abs=1e-6) == f(
                np.float32(x))
        with np.errstate(all="raise"):
            assert np.isfinite(f(np.array([1e4, -1e4], np.float32))).all()


@given(seed=SEEDS, inputs=st.integers(1, 9), outputs=st.integers(1, 9),
       gain=st.sampled_from([0.01, 1.0]), hidden=st.sampled_from([4, 16]))
def test_orthogonal_weights(seed, inputs, outputs, gain, hidden):
    net = mlp(inputs, outputs, gain, hidden, generator=generator(seed))
    assert [tuple(m.weight.shape) for m in net[::2]] == [
        (hidden, inputs), (hidden, hidden), (outputs, hidden)]
    for linear, g in zip(net[::2], (math.sqrt(2), math.sqrt(2), gain)):
        values = torch.linalg.svdvals(linear.weight.detach())
        torch.testing.assert_close(values, torch.full_like(values, g), atol=1e-5 * g, rtol=0)
        assert (linear.bias == 0).all() and linear.weight.requires_grad


@given(seed=SEEDS)
def test_default_weights_are_those_of_torch(seed):
    ours = mlp(3, 2, 0.01, 16, "relu", "default", generator(seed))
    torch.manual_seed(seed)
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16),
                                 torch.nn.ReLU(), torch.nn.Linear(16, 2))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_weights_depend_on_the_generator_alone():
    torch.manual_seed(0)
    a = agent(BOX, 5)
    torch.manual_seed(1)
    b = agent(BOX, 5)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.policy[2].weight, agent(BOX, 6).policy[2].weight)
    assert not torch.equal(a.policy[2].weight, a.critic[2].weight)


@settings(max_examples=8)
@given(seed=SEEDS, logits=st.lists(st.floats(-3, 3), min_size=2, max_size=5),
       shift=st.sampled_from([0.0, 100.0, -100.0]))
def test_the_largest_noisy_logit_is_a_sample_of_the_softmax(seed, logits, shift):
    n, z = 40_000, np.array(logits) + shift
    actions = Categorical(gym.spaces.Discrete(len(z))).sampler(np.random.default_rng(seed))(
        np.tile(z, (n, 1)))
    assert actions.dtype == np.int64 and actions.shape == (n,)
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    frequency = np.bincount(actions, minlength=len(z)) / n
    assert (np.abs(frequency - p) <= 5 * np.sqrt(p * (1 - p) / n) + 1e-9).all()


@settings(max_examples=10)
@given(seed=SEEDS, mean=st.floats(-2, 2), log_std=st.floats(-1.5, 0.7), squash=st.booleans())
def test_a_gaussian_is_drawn_with_its_mean_and_spread(seed, mean, log_std, squash):
    n, head = 20_000, Gaussian(BOX, log_std, squash)
    x = head.sampler(np.random.default_rng(seed))(np.full((n, 3), mean, np.float32))
    assert x.dtype == np.float32 and x.shape == (n, 3)
    sigma = math.exp(log_std)
    assert (np.abs(x.mean(0) - mean) < 5 * sigma / math.sqrt(n)).all()
    assert (np.abs(x.std(0) / sigma - 1) < 5 / math.sqrt(2 * n)).all()
    # each dimension for itself
    assert (np.abs(np.corrcoef(x.T) - np.eye(3)) < 5 / math.sqrt(n)).all()
    shares = (x < mean + sigma * np.array([[[-1.0]], [[0.0]], [[1.0]]])).mean(1)
    assert (np.abs(shares - np.array([[0.15866], [0.5], [0.84134]])) < 5 * 0.5 / math.sqrt(n)).all()


@given(seed=SEEDS, n=st.integers(2, 6))
def test_categorical_against_torch_distributions(seed, n):
    out, actions = (normal(seed, (7, n), torch.float32, 2.0).requires_grad_(True),
                    torch.randint(n, (7,), generator=generator(seed)))
    d = torch.distributions.Categorical(logits=out)
    head = Categorical(gym.spaces.Discrete(n))
    for ours, theirs in (
        (head.logp(out, actions), d.log_prob(actions)), (head.entropy(out), d.entropy())):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(*[torch.autograd.grad(t.sum(), out, retain_graph=True)[0]
                                     for t in (ours, theirs)], atol=1e-5, rtol=1e-5)


@given(seed=SEEDS, n=st.integers(1, 6))
def test_switches_against_torch_distributions(seed, n):
    head, out = Bernoulli(gym.spaces.MultiBinary(n)), normal(seed, (7, n), torch.float32, 2.0)
    actions, d = out > normal(seed + 1, (7, n)), torch.distributions.Bernoulli(logits=out)
    torch.testing.assert_close(head.logp(out, actions), d.log_prob(actions.float()).sum(-1))
    torch.testing.assert_close(head.entropy(out), d.entropy().sum(-1))


def test_a_switch_is_on_as_often_as_its_logit_says():
    head, out = Bernoulli(gym.spaces.MultiBinary(3)), np.tile([-2.0, 0.5, 2.0], (20_000, 1))
    on = head.sampler(np.random.default_rng(0))(out).mean(0)
    np.testing.assert_allclose(on, 1 / (1 + np.exp(-out[0])), atol=0.01)


@given(seed=SEEDS, squash=st.booleans(), log_std=st.floats(-2, 1))
def test_gaussian_against_loops(seed, squash, log_std):
    """The density by its definition, and the stretch of the tanh by a finite difference, in plain
    Python; the gradients by their formulas.
    """
    head, out, x = (Gaussian(BOX, log_std, squash),
                    normal(seed, (5, 3), torch.float64).requires_grad_(True),
                    normal(seed + 1, (5, 3), torch.float64))
    head.double()
    with torch.no_grad(): head.log_std += torch.tensor([0.0, 0.3, -0.4])
    s = head.log_std.exp().tolist()
    def stretch(v):
        return math.log((math.tanh(v + 1e-5) - math.tanh(v - 1e-5)) / 2e-5) if squash else 0.0
    expected = [math.fsum(-((v - m) / d) ** 2 / 2 - math.log(d * math.sqrt(2 * math.pi))
                          - stretch(v) for v, m, d in zip(row, means, s))
                for row, means in zip(x.tolist(), out.tolist())]
    logp, entropy = head.logp(out, x), head.entropy(out)
    torch.testing.assert_close(
        logp.detach(), torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        entropy.detach(),
        torch.full((5,), math.fsum(math.log(d) + 0.5 * math.log(2 * math.pi * math.e) for d in s),
                   dtype=torch.float64))
    grad, grad_std = torch.autograd.grad(logp.sum(), [out, head.log_std], retain_graph=True)
    z = (x - out.detach()) / torch.tensor(s, dtype=torch.float64)
    torch.testing.assert_close(grad, z / torch.tensor(s, dtype=torch.float64))
    torch.testing.assert_close(grad_std, (z ** 2 - 1).sum(0))
    torch.testing.assert_close(torch.autograd.grad(entropy.sum(), head.log_std)[0],
                               torch.full((3,), 5.0, dtype=torch.float64))


@given(seed=SEEDS)
def test_the_log_det_cancels_in_the_ratio(seed):
    x, old, new = (normal(seed + k, (9, 3), torch.float64) for k in range(3))
    ratio = {}
    for squash in (False, True):
        a, b = Gaussian(BOX, 0.0, squash).double(), Gaussian(BOX, -0.2, squash).double()
        ratio[squash] = b.logp(new, x) - a.logp(old, x)
    torch.testing.assert_close(ratio[True], ratio[False])


@given(seed=SEEDS, squash=st.booleans(), scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_what_the_environment_is_told(seed, squash, scale):
    rng = np.random.default_rng(seed)
    low = rng.normal(size=6).astype(np.float32) * 3
    high = (low + 5 * rng.random(6) + 0.1).astype(np.float32)
    head = Gaussian(gym.spaces.Box(low, high), squash=squash)
    x = (scale * rng.normal(size=(50, 6))).astype(np.float32)
    told = head.for_env(x)
    assert told.dtype == np.float32 and (told >= low).all() and (told <= high).all()
    for i in range(50):
        for k in range(6):
            v, l, h = float(x[i, k]), float(low[k]), float(high[k])
            expected = l + (math.tanh(v) + 1) / 2 * (h - l) if squash else min(max(v, l), h)
            assert told[i, k] == pytest.approx(expected, abs=2e-6 * (abs(l) + abs(h)))


def test_rounding_never_leads_over_a_bound():
    "low + (high - low) is larger than high for one pair of float32 in seven."
    rng = np.random.default_rng(0)
    space = gym.spaces.Box(
        -3 * rng.random(1000).astype(np.float32), 10 * rng.random(1000).astype(np.float32))
    assert (space.low + (space.high - space.low) > space.high).mean() > 0.1
    assert space.contains(Gaussian(space, squash=True).for_env(np.full(1000, 20, np.float32)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("squash", [False, True])
def test_actions_have_the_dtype_of_their_space(dtype, squash):
    space = gym.spaces.Box(-0.1, 0.3, (3,), dtype)
    actions = Gaussian(space, squash=squash).for_env(np.array([[-9, 0.123, 9]], np.float32))
    assert actions.dtype == dtype and space.contains(actions[0])


def test_discrete_actions_that_do_not_start_at_zero():
    head = distribution(gym.spaces.Discrete(3, start=-1))
    assert isinstance(head, Categorical)
    assert head.outputs == 3
    assert head.for_env(np.array([0, 1, 2])).tolist() == [-1, 0, 1]
    assert head.sampler()(np.array([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])).tolist() == [1, 0]


@pytest.mark.parametrize("space, words", [
    (gym.spaces.Box(0, 9, (2,), np.uint8), r"Box\(0, 9, \(2,\), uint8\)"),
    (gym.spaces.Dict({"a": gym.spaces.Discrete(2)}), "Dict"),
    (gym.spaces.Tuple([gym.spaces.Discrete(2)]), "Tuple"),
])
def test_other_spaces_are_refused_by_name(space, words):
    with pytest.raises(
        ValueError,
        match=f"env must have actions of Discrete, .* or a non-empty Box of floats, got {words}"):
        distribution(space)


def test_a_box_without_numbers_and_networks_nobody_knows():
    with pytest.raises(
        ValueError, match="env must have actions of Discrete, .* Box of floats, got Box"):
        distribution(gym.spaces.Box(-1, 1, (0,)))
    with pytest.raises(
        ValueError, match="activation must be one of 'tanh', 'relu', 'silu', got 'elu'"):
        mlp(3, 2, 1.0, activation="elu")
    with pytest.raises(
        ValueError, match="init must be one of 'orthogonal', 'default', got 'ortho'"):
        mlp(3, 2, 1.0, init="ortho")


def test_bounds_too_far_apart_to_be_squashed():
    "The distance of these bounds is no float32; clipping needs none."
    wide = gym.spaces.Box(-3e38, 3e38, (1,), np.float32)
    for box in (
        wide, gym.spaces.Box(-1, np.inf, (2,)), gym.spaces.Box(-np.inf, 1, (2,)),
        gym.spaces.Box(np.array([-1, -np.inf], np.float32), np.array([1, np.inf], np.float32))):
        with pytest.raises(
            ValueError,
            match=f"squash must have bounds whose distance is a number, got {re.escape(str(box))}"):
            distribution(box, squash=True)
    assert distribution(wide).for_env(np.array([[1.0]], np.float32)) == 1


@pytest.mark.parametrize("low, high", [(-1, 1), (-np.inf, 1), (0.5, np.inf), (-np.inf, np.inf)])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_boxes_of_any_shape(low, high, shape, dtype):
    box, n = gym.spaces.Box(low, high, shape, dtype), math.prod(shape)
    head, x = (distribution(box),
               (3 * np.random.default_rng(0).standard_normal((50, n))).astype(np.float32))
    told = head.for_env(x)
    assert head.outputs == len(head.log_std) == n and told.shape == (50, *shape)
    assert all(box.contains(np.asarray(a, dtype)) for a in told)
    assert np.array_equal(told.reshape(50, n),
                          np.array([[min(max(v, low), high) for v in row] for row in x.tolist()],
                                   np.float32).reshape(50, n))
    logp = head.logp(torch.zeros(50, n), torch.from_numpy(x))
    torch.testing.assert_close(
        logp, torch.distributions.Normal(0.0, 1.0).log_prob(torch.from_numpy(x)).sum(-1))


def test_squashed_actions_of_a_matrix_lie_each_between_its_own_bounds():
    low, high = np.array([[-1, 10], [0, -5]], np.float32), np.array([[1, 20], [0.5, 5]], np.float32)
    told = Gaussian(gym.spaces.Box(low, high), squash=True).for_env(
        np.array([[0, 0, 0, 0], [9, -9, 9, -9]], np.float32))
    np.testing.assert_allclose(told[0], (low + high) / 2)
    np.testing.assert_allclose(told[1], [[1, 10], [0.5, -5]], atol=1e-3)


def test_distribution_passes_its_options_on():
    head = distribution(BOX, -0.7, True)
    assert isinstance(head, Gaussian)
    assert head.squash
    assert head.outputs == 3
    assert torch.equal(head.log_std, torch.full((3,), -0.7))
    assert head.log_std.requires_grad
    a = agent(BOX, squash=True, log_std=0.25, activation="silu", hidden=8, init="default")
    assert a.head.squash
    assert (a.head.log_std == 0.25).all()
    assert a.policy[0].out_features == 8
    assert isinstance(a.policy[1], torch.nn.SiLU)
    assert (a.policy[0].bias != 0).all()


@pytest.mark.parametrize("space", [gym.spaces.Discrete(4), BOX], ids=["discrete", "box"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_actor_is_the_policy(space, activation):
    a, obs = agent(space, activation=activation), observations(4000)
    with torch.no_grad():
        for p in a.policy.parameters(): p.add_(0.2 * torch.randn(p.shape, generator=generator(1)))
        out = a.policy(torch.from_numpy(obs))
    greedy, drawn = a.actor()(obs), a.actor(np.random.default_rng(0))(obs)
    again = a.actor(np.random.default_rng(0))(obs)
    assert np.array_equal(drawn, again)
    assert not np.array_equal(drawn, greedy)
    assert not np.array_equal(drawn, a.actor(np.random.default_rng(1))(obs))
    if isinstance(space, gym.spaces.Discrete):
        assert np.array_equal(greedy, out.argmax(-1).numpy())
        p = out.softmax(-1).numpy()
        for k in range(4):
            assert abs((drawn == k).mean() - p[:, k].mean()) < 5 * math.sqrt(0.25 / 4000)
    else:
        np.testing.assert_allclose(greedy, out.numpy(), atol=1e-5)
        noise = (drawn - out.numpy()) / math.exp(-0.5)
        assert drawn.dtype == np.float32
        assert abs(noise.mean()) < 0.05
        assert abs(noise.std() - 1) < 0.05
    logp, entropy = a.head.logp(out, torch.from_numpy(drawn)), a.head.entropy(out)
    assert logp.shape == entropy.shape == a.value(torch.from_numpy(obs)).shape == (4000,)
    assert abs((logp + entropy).mean()) < 0.1  # the entropy is the mean of -log pi of what is drawn


def test_a_fresh_policy_has_no_opinions_and_the_two_networks_share_nothing():
    a, obs = agent(gym.spaces.Discrete(2)), torch.from_numpy(observations())
    entropy = a.head.entropy(a.policy(obs))
    assert (entropy > math.log(2) - 1e-3).all() and a.value(obs).std() > 0.1
    a.value(obs).sum().backward()
    assert all(p.grad is None for p in a.policy.parameters())
    assert all(p.grad is not None for p in a.critic.parameters())


def test_the_options_of_the_trainer_fit():
    for space in (gym.spaces.Discrete(2), BOX):
        Agent(CART, space, PPOConfig(), generator()).actor()(observations())


def test_an_actor_does_not_follow():
    a, obs = agent(BOX), observations()
    act = a.actor(np.random.default_rng(0))
    with torch.no_grad():
        for p in a.parameters(): p.add_(1.0)
    fresh = agent(BOX)
    assert np.array_equal(act(obs), fresh.actor(np.random.default_rng(0))(obs))


def test_discrete_actions_are_not_squashed():
    with pytest.raises(
        ValueError, match=r"^squash must be left out for actions of Discrete\(2\), got True$"):
        distribution(gym.spaces.Discrete(2), squash=True)
    with pytest.raises(ValueError, match="^log_std must be left out for actions of MultiBinary"):
        distribution(gym.spaces.MultiBinary(2), log_std=-1.0)


@pytest.mark.parametrize("low, high, far", [(-1, 1, False),
                                            (-2, 2, False),
                                            (0, 1, False),
                                            (-np.inf, np.inf, False),
                                            (5, 35, True),
                                            (0, 1000, True),
                                            (30, 1017, True),
                                            (-10, 10, False), (-10.5, 10.5, True),
                                            (-0.11, 0.11, False), (-0.09, 0.09, True),
                                            (0, 1e-3, True)])
def test_far_bounds_are_said(low, high, far):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        distribution(gym.spaces.Box(low, high, (2,)))
        assert ["is far from [-1, 1]" in str(w.message) for w in said] == [True] * far
        if np.isfinite(high): distribution(gym.spaces.Box(low, high, (2,)), squash=True)
        assert len(said) == far
