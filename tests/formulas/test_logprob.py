import math
from contextlib import contextmanager, nullcontext
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlhf_notes.fast import compiled
from rlhf_notes.formulas import logprob as module
from rlhf_notes.compat.ding import efficient_method, less_efficient_method, naive_method
from rlhf_notes.formulas.logprob import (entropy_from_logits, gaussian_entropy, gaussian_log_prob,
                                         linear_log_probs, log_probs_and_entropy, selective_log_softmax, tanh_log_det)
from strategies import DTYPES, EXTREMES, JUNK, SEEDS, normal, random_mask, shapes, value_and_grad, values

METHODS = {"naive": naive_method, "less efficient": less_efficient_method, "efficient": efficient_method, "selective": selective_log_softmax}
TEMPERATURES = st.sampled_from([0.1, 0.5, 0.7, 1, 1.0, 2.0, 10.0])


def words(seed, shape, vocabulary):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def row_logp(row, temperature=1.0):
    "log softmax of a list of numbers, in plain Python."
    top = max(row)
    return [(v - top) / temperature - math.log(math.fsum(math.exp((w - top) / temperature) for w in row)) for v in row]


def loop_logp(logits, index, temperature=1.0):
    rows = logits.double().flatten(0, -2).tolist() if logits.ndim > 1 else [logits.double().tolist()]
    picked = [row_logp(r, temperature)[i] for r, i in zip(rows, index.flatten().tolist())]
    return torch.tensor(picked, dtype=torch.float64).reshape(index.shape)


def loop_entropy(row, temperature=1.0):
    return -math.fsum(math.exp(l) * l for l in row_logp([v for v in row if v > -math.inf], temperature)) if max(row) > -math.inf else 0.0


def close(got, expected, **kwargs):
    torch.testing.assert_close(got.double(), expected, **{"atol": 2e-6, "rtol": 1e-5, **kwargs})


@pytest.mark.parametrize("name", METHODS)
@given(shape=shapes(1, 2), vocabulary=st.integers(1, 9), seed=SEEDS, dtype=DTYPES, scale=st.sampled_from([0.1, 1.0, 10.0, 1000.0]), shift=st.sampled_from([0.0, 1e4]))
def test_each_method_equals_the_loops(name, shape, vocabulary, seed, dtype, scale, shift):
    z, i = (normal(seed, (*shape, vocabulary), scale=scale) + shift).to(dtype), words(seed + 1, shape, vocabulary)
    z = z.clamp(-6e4, 6e4) if dtype == torch.float16 else z
    before = z.clone()
    got = METHODS[name](z, i)
    assert got.shape == i.shape and got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and (got <= 0).all()
    close(got, loop_logp(z, i))
    assert torch.equal(z, before)


@pytest.mark.parametrize("name", METHODS)
@given(shape=shapes(1, 2), vocabulary=st.integers(1, 9), seed=SEEDS, dtype=DTYPES)
def test_the_gradient_of_each_method_is_one_minus_p(name, shape, vocabulary, seed, dtype):
    z, i, weight = normal(seed, (*shape, vocabulary), dtype, 3.0), words(seed + 1, shape, vocabulary), normal(seed + 2, shape)
    _, (grad,) = value_and_grad(lambda z: METHODS[name](z, i) * weight, z)
    expected = (torch.nn.functional.one_hot(i, vocabulary) - z.double().softmax(-1)) * weight[..., None]
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.double(), expected, atol=1e-6, rtol={torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5))


@given(shape=shapes(0, 3), vocabulary=st.integers(1, 9), seed=SEEDS, dtype=DTYPES, temperature=TEMPERATURES)
def test_selective_with_a_temperature(shape, vocabulary, seed, dtype, temperature):
    z, i = normal(seed, (*shape, vocabulary), dtype, 3.0), words(seed + 1, shape, vocabulary)
    got, (grad,) = value_and_grad(lambda z: selective_log_softmax(z, i, temperature), z)
    close(got, loop_logp(z, i, temperature))
    expected = (torch.nn.functional.one_hot(i, vocabulary) - (z.double() / temperature).softmax(-1)) / temperature
    torch.testing.assert_close(grad.double(), expected, atol=1e-5, rtol={torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5))


@given(data=st.data(), rows=st.integers(1, 3), vocabulary=st.integers(1, 4), temperature=TEMPERATURES)
def test_extreme_logits(data, rows, vocabulary, temperature):
    z = data.draw(values((rows, vocabulary), elements=EXTREMES, dtype=torch.float32))
    i = words(data.draw(SEEDS), (rows,), vocabulary)
    for f in (lambda z: selective_log_softmax(z, i, temperature), lambda z: entropy_from_logits(z, temperature)):
        got, (grad,) = value_and_grad(f, z)
        exact, (exact_grad,) = value_and_grad(f, z.double())
        assert got.isfinite().all() and grad.isfinite().all()
        close(got, exact)
        close(grad, exact_grad)
    for f in METHODS.values(): close(f(z, i), loop_logp(z, i))
    close(entropy_from_logits(z, temperature), torch.tensor([loop_entropy(r, temperature) for r in z.tolist()], dtype=torch.float64))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_logits_keep_float32_digits(name, seed):
    z, i = normal(seed, (8, 5000), torch.bfloat16, 5.0), words(seed + 1, (8,), 5000)
    y, (grad,) = value_and_grad(lambda z: METHODS[name](z, i), z)
    exact, (exact_grad,) = value_and_grad(lambda z: z.log_softmax(-1).gather(-1, i[:, None])[:, 0], z.double())
    assert y.dtype == torch.float32 and (y - exact).abs().max() < 1e-5 and grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad, exact_grad.bfloat16(), atol=1e-7, rtol=1e-2)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_temperature_acts_in_float32_on_shifted_logits(temperature):
    z, i = normal(0, (8, 5000), torch.float32, 5.0), words(1, (8,), 5000)
    for logits in (z.bfloat16(), z + 1e4):
        exact = (logits.double() / temperature).log_softmax(-1)
        assert (selective_log_softmax(logits, i, temperature) - exact.gather(-1, i[:, None])[:, 0]).abs().max() < 1e-5
        assert (entropy_from_logits(logits, temperature) + (exact.exp() * exact).sum(-1)).abs().max() < 1e-5


@given(shape=shapes(1, 3), vocabulary=st.integers(1, 9), seed=SEEDS, dtype=DTYPES, temperature=TEMPERATURES, share=st.sampled_from([0.0, 0.3, 0.7, 1.0]))
def test_entropy_equals_the_loops_and_its_gradient_the_formula(shape, vocabulary, seed, dtype, temperature, share):
    z = normal(seed, (*shape, vocabulary), dtype, 3.0)
    impossible = random_mask(seed + 1, z.shape, share)
    z = z.masked_fill(impossible, -math.inf)
    before = z.clone()
    got, (grad,) = value_and_grad(lambda z: entropy_from_logits(z, temperature), z)
    assert torch.equal(z, before) and got.shape == torch.Size(shape) and got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = torch.tensor([loop_entropy(r, temperature) for r in z.double().flatten(0, -2).tolist()], dtype=torch.float64).reshape(shape)
    close(got, expected, atol=1e-5)
    assert (got >= 0).all() and (got <= math.log(vocabulary) + 1e-5).all()
    p = torch.nan_to_num((z.double() / temperature).softmax(-1))
    formula = -(torch.xlogy(p, p) + p * expected[..., None]) / temperature
    torch.testing.assert_close(grad.double(), formula, atol=1e-5, rtol={torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5))
    assert grad.isfinite().all() and (grad[impossible] == 0).all()


@given(shape=shapes(1, 3), vocabulary=st.integers(1, 6), seed=SEEDS, junk=JUNK, temperature=TEMPERATURES, bad=st.sampled_from([-100, -1, 10**6]))
def test_nothing_leaks_from_under_the_mask(shape, vocabulary, seed, junk, temperature, bad):
    z, m, i = normal(seed, (*shape, vocabulary), torch.float32), random_mask(seed + 1, shape), words(seed + 2, shape, vocabulary)
    dirty, outside = torch.where(m[..., None], z, junk), torch.where(m, i, bad)
    for clean, soiled in ((lambda z: selective_log_softmax(z, i, temperature, m), lambda z: selective_log_softmax(z, outside, temperature, m)),
                          (lambda z: entropy_from_logits(z, temperature, m),) * 2):
        value, (grad,) = value_and_grad(clean, z)
        y, (g,) = value_and_grad(soiled, dirty)
        assert torch.equal(y, value) and torch.equal(g, grad)
        assert (y[~m] == 0).all() and (g[~m] == 0).all() and g.isfinite().all()
    y, (g,) = value_and_grad(lambda z: torch.where(m, selective_log_softmax(z, i, temperature), 0.0), dirty)      # masked by someone else, later
    value, (grad,) = value_and_grad(lambda z: selective_log_softmax(z, i, temperature, m), z)
    assert torch.equal(y, value) and torch.equal(g, grad)


SECOND = {"log-probability": lambda z, i, m: selective_log_softmax(z, i, 0.7, m), "entropy": lambda z, i, m: entropy_from_logits(z, 0.7, m),
          "joint, log-probability": lambda z, i, m: log_probs_and_entropy(z, i, 0.7, m)[0], "joint, entropy": lambda z, i, m: log_probs_and_entropy(z, i, 0.7, m)[1]}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_where_the_gradient_is_0_and_under_the_mask(name, whole):
    "The square of a quantity less its own value has no gradient there, and the Hessian 2 J J^T."
    z, i, m = normal(0, (3, 5)), words(1, (3,), 5), torch.tensor([True, True, False])
    z[1, (i[1] + 1) % 5] = -math.inf
    with in_pieces(whole=2**20 if whole else 0):
        here = SECOND[name](z, i, m)
        J = torch.autograd.functional.jacobian(lambda z: SECOND[name](z, i, m), z).flatten(1)
        for junk in (0.0, math.nan, math.inf, -math.inf):
            dirty = torch.where(m[:, None], z, junk)
            hessian = torch.autograd.functional.hessian(lambda z: (SECOND[name](z, i, m) - here).square().sum(), dirty).reshape(15, 15)
            assert J.norm() > 0.3 and hessian.isfinite().all()
            torch.testing.assert_close(hessian, 2 * J.T @ J)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_words_masked_by_the_lowest_number_are_impossible(dtype, temperature):
    lowest = torch.finfo(dtype).min
    for row in ([2.0, 1.0, 0.0, lowest], [lowest, lowest, lowest], [lowest, lowest, -math.inf, -math.inf]):
        z = torch.tensor([row], dtype=dtype)
        possible = z[z > lowest] if row[0] > lowest else torch.zeros(row.count(lowest))
        expected = torch.distributions.Categorical(logits=possible.double() / temperature).entropy()
        for whole in (2**20, 0):
            with in_pieces(whole=whole): H, (grad,) = value_and_grad(lambda z: entropy_from_logits(z, temperature), z)
            close(H[0], expected)
            assert (grad[z <= lowest].abs() < 1e-7).all() and (grad[z == -math.inf] == 0).all()


def test_a_nan_that_counts_is_seen():
    z = torch.tensor([[math.nan, 1.0, 2.0], [0.0, 1.0, 2.0]])
    assert entropy_from_logits(z).isnan().tolist() == [True, False]
    for f in METHODS.values(): assert f(z, torch.tensor([1, 1])).isnan().tolist() == [True, False]


def test_an_impossible_word_has_log_probability_minus_infinity():
    z = torch.tensor([[1.0, 2.0, -math.inf]] * 3)
    for f in METHODS.values():
        y, (g,) = value_and_grad(lambda z: f(z, torch.arange(3))[:2], z)
        assert y[:2].exp().sum().isclose(torch.tensor(1.0)) and f(z, torch.arange(3))[2] == -math.inf
        assert g.isfinite().all() and (g[:, 2] == 0).all() and (g[2] == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_gradient_written_by_hand_against_finite_differences(temperature):
    z, i, m = normal(0, (2, 3, 5)).requires_grad_(True), words(1, (2, 3), 5), random_mask(2, (2, 3))
    for f in (lambda z: selective_log_softmax(z, i, temperature), lambda z: selective_log_softmax(z, i, temperature, m), lambda z: entropy_from_logits(z, temperature)):
        assert torch.autograd.gradcheck(f, z) and torch.autograd.gradgradcheck(f, z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_for_the_backward_pass(dtype):
    z, i, saved = normal(0, (4, 16, 100), dtype).requires_grad_(True), words(1, (4, 16), 100), {}

    def save(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    for f in (selective_log_softmax, efficient_method, lambda z, i: selective_log_softmax(z, i, 0.7)):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t): y = f(z, i)
        saved.pop(z.untyped_storage().data_ptr(), None)
        assert y.requires_grad and sum(saved.values()) <= 2 * i.numel() * 8


def test_index_of_any_integer_dtype_and_an_empty_batch():
    z, i = normal(0, (2, 3, 5)), words(1, (2, 3), 5)
    for f in METHODS.values():
        for dtype in (torch.uint8, torch.int16, torch.int32): assert torch.equal(f(z, i.to(dtype)), f(z, i))
        assert f(z[:0], i[:0]).shape == (0, 3)
    assert entropy_from_logits(z[:0]).shape == (0, 3)


def test_works_under_vmap_and_compile():
    z, i, m = normal(0, (4, 2, 3, 5)), words(1, (4, 2, 3), 5), random_mask(2, (4, 2, 3))
    functions = {**METHODS, "0.7": lambda z, i: selective_log_softmax(z, i, 0.7), "entropy": lambda z, i: entropy_from_logits(z, 0.7)}
    for f in functions.values():
        one_by_one = torch.stack([f(a, b) for a, b in zip(z, i)])
        torch.testing.assert_close(torch.func.vmap(f)(z, i), one_by_one)
        grads = torch.func.vmap(torch.func.grad(lambda a, b: f(a, b).sum()))(z, i)
        torch.testing.assert_close(grads, torch.stack([value_and_grad(lambda t: f(t, b), a)[1][0] for a, b in zip(z, i)]))
    for f in (lambda z, i, m: selective_log_softmax(z, i, 0.7, m), lambda z, i, m: entropy_from_logits(z, 0.7, m)):
        torch.testing.assert_close(torch.func.vmap(f)(z, i, m), f(z, i, m))
        y, (g,) = value_and_grad(lambda t: torch.compile(f, backend="aot_eager")(t, i[0], m[0]), z[0])
        torch.testing.assert_close((y, g), (lambda v, g: (v, g[0]))(*value_and_grad(lambda t: f(t, i[0], m[0]), z[0])))


@pytest.mark.parametrize("call, error, words", [
    (lambda z, i: selective_log_softmax(z.tolist(), i), TypeError, "logits must be a torch.Tensor, got list"),
    (lambda z, i: selective_log_softmax(z.long(), i), TypeError, "logits must have a floating-point dtype, got torch.int64"),
    (lambda z, i: selective_log_softmax(z, i.float()), TypeError, "index must have an integer dtype"),
    (lambda z, i: selective_log_softmax(z, i > 0), TypeError, "index must have an integer dtype, got torch.bool"),
    (lambda z, i: selective_log_softmax(z, 3), TypeError, "index must be a torch.Tensor, got int"),
    (lambda z, i: selective_log_softmax(z, i[0]), ValueError, r"index must have the shape of logits without the vocabulary, \(2, 3\), got \(3,\)"),
    (lambda z, i: selective_log_softmax(z, i[..., None]), ValueError, "index must have the shape of logits"),
    (lambda z, i: selective_log_softmax(z, i + 5), ValueError, "^index must be between 0 and 4, the last of 5 choices: "),
    (lambda z, i: selective_log_softmax(z, i - 100), ValueError, "index must be between 0 and 4"),
    (lambda z, i: selective_log_softmax(z[0, 0, 0], i), ValueError, "logits must have at least 1 dimension"),
    (lambda z, i: selective_log_softmax(z[..., :0], i), ValueError, "logits .* vocabulary of at least 1 word"),
    (lambda z, i: selective_log_softmax(z, i, 0), ValueError, r"temperature must be in \(0, inf\), got 0"),
    (lambda z, i: selective_log_softmax(z, i, -1.0), ValueError, "temperature"),
    (lambda z, i: selective_log_softmax(z, i, math.nan), ValueError, "temperature"),
    (lambda z, i: selective_log_softmax(z, i, "1"), TypeError, "temperature must be a number, got str"),
    (lambda z, i: selective_log_softmax(z, i, mask=i), TypeError, "mask must be boolean"),
    (lambda z, i: selective_log_softmax(z, i, mask=i[0] > 0), ValueError, "mask must have the shape of index"),
    (lambda z, i: entropy_from_logits(z.long()), TypeError, "logits must have a floating-point dtype"),
    (lambda z, i: entropy_from_logits(z, 0.0), ValueError, "temperature"),
    (lambda z, i: entropy_from_logits(z[..., :0]), ValueError, "logits .* vocabulary of at least 1 word"),
    (lambda z, i: entropy_from_logits(z, mask=z > 0), ValueError, r"mask must have the shape of logits\[..., 0\], \(2, 3\), got \(2, 3, 5\)"),
    *[(lambda z, i, f=f: f(z, i + 5), ValueError, "index must be between 0 and 4") for f in METHODS.values()],
    *[(lambda z, i, f=f: f(z, i[0]), ValueError, "index must have the shape of logits") for f in (selective_log_softmax,)],
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.long))


def gaussians(seed, shape, n, dtype=torch.float64):
    "action, mu and sigma of shape (*shape, n)."
    return normal(seed, (*shape, n), dtype, 2.0), normal(seed + 1, (*shape, n), dtype), (normal(seed + 2, (*shape, n)) * 0.7).exp().to(dtype)


def loop_gaussian(action, mu, sigma):
    "log density of each action, by the definition of the density, in plain Python."
    rows = [t.double().reshape(-1, t.shape[-1]).tolist() for t in (action, mu, sigma)]
    logp = [math.fsum(-math.log(s * math.sqrt(2 * math.pi)) - (a - m) ** 2 / (2 * s * s) for a, m, s in zip(*row)) for row in zip(*rows)]
    return torch.tensor(logp, dtype=torch.float64).reshape(action.shape[:-1])


@given(shape=shapes(0, 2), n=st.integers(1, 4), seed=SEEDS, dtype=DTYPES)
def test_gaussian_values_and_gradients(shape, n, seed, dtype):
    a, mu, sigma = gaussians(seed, shape, n, dtype)
    before = [t.clone() for t in (a, mu, sigma)]
    got, grads = value_and_grad(gaussian_log_prob, a, mu, sigma)
    assert got.shape == torch.Size(shape) and got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), loop_gaussian(a, mu, sigma), atol=1e-5, rtol=1e-5)
    x, s = (a.double() - mu.double()) / sigma.double(), sigma.double()
    for grad, formula in zip(grads, (-x / s, x / s, (x ** 2 - 1) / s)):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.double(), formula, atol=1e-4 if dtype != torch.float64 else 1e-12, rtol={torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5))
    H, (grad,) = value_and_grad(gaussian_entropy, sigma)
    torch.testing.assert_close(H.double(), torch.distributions.Normal(mu.double(), s).entropy().sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad.double(), 1 / s, atol=0, rtol={torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5))
    assert H.dtype == got.dtype and H.shape == got.shape
    assert all(torch.equal(b, t) for b, t in zip(before, (a, mu, sigma)))


@given(seed=SEEDS, n=st.integers(1, 3))
def test_gaussian_against_torch_distributions_and_finite_differences(seed, n):
    a, mu, sigma = gaussians(seed, (3,), n)
    theirs = torch.distributions.Independent(torch.distributions.Normal(mu, sigma), 1)
    torch.testing.assert_close(gaussian_log_prob(a, mu, sigma), theirs.log_prob(a))
    torch.testing.assert_close(gaussian_entropy(sigma), theirs.entropy())
    leaves = [t.requires_grad_(True) for t in (a, mu, sigma + 0.3)]
    assert torch.autograd.gradcheck(gaussian_log_prob, leaves) and torch.autograd.gradcheck(gaussian_entropy, leaves[2])


def test_gaussian_is_a_density():
    grid = torch.linspace(-8, 8, 1601, dtype=torch.float64)[:, None]
    for mu, sigma in ((0.0, 1.0), (0.3, 0.2), (-1.0, 1.3)):
        logp = gaussian_log_prob(grid, torch.full_like(grid, mu), torch.full_like(grid, sigma))
        assert logp.exp().sum().item() * 0.01 == pytest.approx(1, abs=1e-6)
        assert -(logp.exp() * logp).sum().item() * 0.01 == pytest.approx(gaussian_entropy(torch.tensor([sigma], dtype=torch.float64)).item(), abs=1e-5)
    assert gaussian_log_prob(*torch.tensor([[0.0], [0.0], [0.1]])) == pytest.approx(math.log(10 / math.sqrt(2 * math.pi)), abs=1e-6)       # above 0
    assert gaussian_entropy(torch.tensor([0.1])) < 0 < gaussian_entropy(torch.tensor([0.3]))


@given(shape=shapes(1, 2), n=st.integers(1, 3), seed=SEEDS, junk=st.one_of(JUNK, st.sampled_from([0.0, -1.0])), dtype=st.sampled_from([torch.float32, torch.float64]), keep=st.sampled_from([0.0, 0.5, 1.0]))
def test_nothing_leaks_from_under_the_mask_of_a_gaussian(shape, n, seed, junk, dtype, keep):
    clean, m = gaussians(seed, shape, n, dtype), random_mask(seed + 3, shape, keep)
    dirty = [torch.where(m[..., None], t, junk).to(dtype) for t in clean]
    for f, k in ((lambda *t: gaussian_log_prob(*t, mask=m), 3), (lambda a, mu, s: gaussian_entropy(s, m), 3)):
        value, grads = value_and_grad(f, *clean)
        y, got = value_and_grad(f, *dirty)
        assert torch.equal(y, value) and (y[~m] == 0).all()
        for g, expected in zip(got, grads):
            if g is None: continue
            assert torch.equal(g, expected) and (g[~m] == 0).all() and g.isfinite().all()


def test_a_sigma_that_is_not_positive_is_seen():
    for sigma in (0.0, -1.0, math.nan):
        for a in (0.0, 1.0): assert gaussian_log_prob(*torch.tensor([[a], [0.0], [sigma]])).isnan()
    assert gaussian_entropy(torch.tensor([-1.0])).isnan() and gaussian_entropy(torch.tensor([0.0])) == -math.inf


def test_gaussian_extremes_are_finite():
    a, mu, sigma = torch.tensor([[1e6], [1e3], [-1e6], [0.0]]), torch.zeros(4, 1), torch.tensor([[1.0], [1e-3], [1e3], [1e-30]])
    y, grads = value_and_grad(gaussian_log_prob, a, mu, sigma)
    assert y.isfinite().all() and all(g.isfinite().all() for g in grads)


def test_gaussian_works_under_vmap():
    a, mu, sigma = gaussians(0, (4, 5), 3)
    m = random_mask(3, (4, 5))
    torch.testing.assert_close(torch.func.vmap(gaussian_log_prob)(a, mu, sigma, m), gaussian_log_prob(a, mu, sigma, m))
    torch.testing.assert_close(torch.func.vmap(gaussian_entropy)(sigma, m), gaussian_entropy(sigma, m))
    grads = torch.func.vmap(torch.func.grad(lambda *t: gaussian_log_prob(*t).sum(), argnums=(0, 1, 2)))(a, mu, sigma)
    torch.testing.assert_close(grads, value_and_grad(gaussian_log_prob, a, mu, sigma)[1])


@pytest.mark.parametrize("call, error, words", [
    (lambda x: gaussian_log_prob(x, x, x[0]), ValueError, r"sigma must have the shape of action, \(2, 3\), got \(3,\)"),
    (lambda x: gaussian_log_prob(x, x[:, :1], x), ValueError, "mu must have the shape of action"),
    (lambda x: gaussian_log_prob(x.long(), x, x), TypeError, "action must have a floating-point dtype, got torch.int64"),
    (lambda x: gaussian_log_prob(x, x, 1.0), TypeError, "sigma must be a torch.Tensor, got float"),
    (lambda x: gaussian_log_prob(x, x, x, x > 0), ValueError, r"mask must have the shape of action\[..., 0\], \(2,\), got \(2, 3\)"),
    (lambda x: gaussian_log_prob(x, x, x, x[:, 0]), TypeError, "mask must be boolean"),
    (lambda x: gaussian_log_prob(*[x[0, 0]] * 3), ValueError, "action must have at least 1 dimension"),
    (lambda x: gaussian_entropy(x[0, 0]), ValueError, "sigma must have at least 1 dimension"),
    (lambda x: gaussian_entropy(x.long()), TypeError, "sigma must have a floating-point dtype"),
    (lambda x: gaussian_entropy(x, x > 0), ValueError, "mask must have the shape of sigma"),
])
def test_bad_input_of_a_gaussian_is_named(call, error, words):
    with pytest.raises(error, match=words): call(torch.ones(2, 3))


def sixty_digits(x):
    "log(1 - tanh(x)^2) = -2 log cosh(x), in 60 decimal digits."
    with localcontext() as context:
        context.prec = 60
        return float(-2 * ((Decimal(x).exp() + Decimal(-x).exp()) / 2).ln())


@given(shape=shapes(0, 2), n=st.integers(1, 4), seed=SEEDS, scale=st.sampled_from([1e-3, 0.1, 1.0, 10.0, 300.0]), dtype=DTYPES)
def test_tanh_log_det_values_and_gradients(shape, n, seed, scale, dtype):
    x = normal(seed, (*shape, n), dtype, scale)
    before = x.clone()
    y, (g,) = value_and_grad(tanh_log_det, x)
    expected = torch.tensor([sixty_digits(v) for v in x.double().flatten().tolist()], dtype=torch.float64).reshape(x.shape).sum(-1)
    assert y.shape == torch.Size(shape) and y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tight = dtype == torch.float64
    torch.testing.assert_close(y.double(), expected, atol=1e-14 * n if tight else 4e-7 * n, rtol=1e-14 if tight else 1e-6)
    torch.testing.assert_close(g.double(), -2 * x.double().tanh(), atol=1e-6, rtol={torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-6))
    assert g.dtype == dtype and torch.equal(x, before)


def test_tanh_log_det_by_hand_and_in_the_limits():
    assert tanh_log_det(torch.tensor([math.atanh(0.5), -math.atanh(0.5)])).item() == pytest.approx(2 * math.log(0.75), abs=1e-6)
    assert tanh_log_det(torch.zeros(4)) == 0
    for v in (20.0, 1e3, 1e6, 1e30):
        for sign in (1, -1):
            y, (g,) = value_and_grad(tanh_log_det, torch.tensor([sign * v]))
            assert y.isfinite() and y.item() == pytest.approx(math.log(4) - 2 * v, rel=1e-6) and g.item() == pytest.approx(-2 * sign)


@given(seed=SEEDS)
def test_tanh_log_det_against_torch_distributions_and_finite_differences(seed):
    x = normal(seed, (5, 3), torch.float64, 2.0)
    torch.testing.assert_close(tanh_log_det(x), torch.distributions.TanhTransform().log_abs_det_jacobian(x, x.tanh()).sum(-1))
    assert torch.autograd.gradcheck(tanh_log_det, x.requires_grad_(True))
    step = 1e-5
    torch.testing.assert_close(tanh_log_det(x), (((x + step).tanh() - (x - step).tanh()) / (2 * step)).log().sum(-1), atol=1e-6, rtol=1e-6)


def test_a_squashed_gaussian_is_a_density():
    y = torch.linspace(-1, 1, 200_001, dtype=torch.float64)[1:-1, None]
    x = y.atanh()
    for mu, sigma in ((0.0, 0.5), (0.5, 0.7), (-1.0, 0.3)):
        logp = gaussian_log_prob(x, torch.full_like(x, mu), torch.full_like(x, sigma)) - tanh_log_det(x)
        assert (logp.exp().sum() * 1e-5).item() == pytest.approx(1, abs=1e-4)


def test_tanh_log_det_works_under_vmap():
    x = normal(0, (4, 5, 3))
    torch.testing.assert_close(torch.func.vmap(tanh_log_det)(x), tanh_log_det(x))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(lambda t: tanh_log_det(t).sum()))(x), -2 * x.tanh())


@pytest.mark.parametrize("x, error, words", [
    (torch.tensor(1.0), ValueError, "x must have at least 1 dimension"), (torch.ones(3).long(), TypeError, "x must have a floating-point dtype, got torch.int64"),
    (torch.ones(3) > 0, TypeError, "x must have a floating-point dtype, got torch.bool"), ([1.0], TypeError, "x must be a torch.Tensor, got list"),
])
def test_bad_input_of_tanh_log_det_is_named(x, error, words):
    with pytest.raises(error, match=words): tanh_log_det(x)


# ---- in pieces, and without the logits

HOW = compiled.without                # test_compiled has the tests of pieces once more, without this


@contextmanager
def in_pieces(chunk=7, whole=0, threads=1, linear=16):
    "However few the logits are, they are taken in pieces of `chunk`."
    before = module._WHOLE, module._CHUNK, module._LINEAR_CHUNK, torch.get_num_threads()
    module._WHOLE, module._CHUNK, module._LINEAR_CHUNK = whole, chunk, linear
    torch.set_num_threads(threads)
    try:
        with HOW(): yield
    finally:
        module._WHOLE, module._CHUNK, module._LINEAR_CHUNK = before[:3]
        torch.set_num_threads(before[3])


def exact(z, i, temperature=1.0):
    "log pi and entropy in float64, by the definition; 0 entropy where no word is possible."
    logp = (z.double() / temperature).log_softmax(-1)
    p = torch.nan_to_num(logp.exp())
    return logp.gather(-1, i[..., None])[..., 0], -(p * torch.where(p > 0, logp, 0.0)).sum(-1)


@settings(max_examples=40)
@given(shape=shapes(0, 3), vocabulary=st.integers(1, 9), seed=SEEDS, dtype=DTYPES, temperature=TEMPERATURES, shift=st.sampled_from([0.0, 50.0, -1e4]), share=st.sampled_from([0.0, 0.3]), chunk=st.sampled_from([1, 7, 20]), threads=st.sampled_from([1, 2]))
def test_pieces_give_what_the_whole_gives(shape, vocabulary, seed, dtype, temperature, shift, share, chunk, threads):
    z, i = normal(seed, (*shape, vocabulary), scale=3.0) + shift, words(seed + 1, shape, vocabulary)
    if dtype == torch.float16: z = z.clamp(-6e4, 6e4)
    z = z.masked_fill(random_mask(seed + 2, z.shape, share), -math.inf).scatter(-1, i[..., None], shift).to(dtype)
    before = z.clone()
    logp, H = exact(z, i, temperature)
    with in_pieces(chunk, threads=threads):
        y, (grad,) = value_and_grad(lambda z: torch.stack(log_probs_and_entropy(z, i, temperature)), z)
        alone = selective_log_softmax(z, i, temperature), entropy_from_logits(z, temperature)
        for f, a in ((lambda z: selective_log_softmax(z, i, temperature), 1), (lambda z: entropy_from_logits(z, temperature), 0)):
            formula = a * torch.nn.functional.one_hot(i, vocabulary) - a * logp_all(z, temperature).exp() if a else -(logp_all(z, temperature).exp() * torch.where(logp_all(z, temperature) > -math.inf, logp_all(z, temperature) + H[..., None], 0.0))
            torch.testing.assert_close(value_and_grad(f, z)[1][0].double(), formula / temperature, atol=2e-5, rtol={torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5))
    assert torch.equal(z, before) and y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and grad.dtype == dtype
    close(y[0], logp); close(y[1], H, atol=1e-5)
    torch.testing.assert_close(torch.stack(alone), y, rtol=1e-6, atol=1e-6 if y.dtype == torch.float32 else 1e-14)
    assert (y[0] <= 0).all() and (y[1] >= 0).all()


def logp_all(z, temperature): return (z.double() / temperature).log_softmax(-1)


def test_a_row_does_not_depend_on_its_neighbours():
    z, i = normal(0, (6, 40), torch.float32, 4.0), words(1, (6,), 40)
    far = z.clone(); far[1] += 1e4; far[2] = math.nan; far[3] = -math.inf
    keep = torch.tensor([True, False, False, False, True, True])
    for chunk in (40, 120, 1000):
        with in_pieces(chunk):
            f = lambda z: torch.stack(log_probs_and_entropy(z, i))
            (a, (ga,)), (b, (gb,)) = value_and_grad(f, z), value_and_grad(f, far)
            assert torch.equal(a[:, keep], b[:, keep]) and torch.equal(ga[keep], gb[keep])
            assert b[:, 2].isnan().all() and b[0, 3].isnan() and b[1, 3] == 0
            close(b[:, 1], torch.stack(exact(far, i))[:, 1], atol=1e-5)
            _, (g,) = value_and_grad(lambda z: torch.where(keep, selective_log_softmax(z, i), 0.0), far)
            assert g.isfinite().all() and (g[~keep] == 0).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_pieces_of_logits_whose_rows_do_not_follow_one_another(threads):
    whole, i, seen = normal(0, (3, 6, 11), torch.float32), words(1, (3, 8), 11)[:, 1:6], random_mask(2, (3, 5))
    with in_pieces(22, threads=threads):
        for z in (whole[:, :-1], whole[:, :-1].transpose(0, 1).contiguous().transpose(0, 1), whole[:1, :1].expand(3, 5, 11), whole.transpose(1, 2).contiguous().transpose(1, 2)[:, 1:]):
            value, (grad,) = value_and_grad(lambda z: log_probs_and_entropy(z, i, mask=seen)[0], z)
            leaf = z.detach().requires_grad_(True)
            strided, (g,) = (y := log_probs_and_entropy(leaf, i, mask=seen)[0]).detach(), torch.autograd.grad(y.sum(), leaf)
            close(strided, torch.where(seen, exact(z, i)[0], 0.0)); torch.testing.assert_close((strided, g), (value, grad))
        with pytest.raises(ValueError, match="index must be between 0 and 10"): selective_log_softmax(whole, torch.full((3, 6), 11))
        with torch.inference_mode(): close(selective_log_softmax(whole[:, 1:], i), exact(whole[:, 1:], i)[0])
    assert torch.get_num_threads() == 1


def test_a_word_that_is_all_but_impossible():
    "Measured by its own logit, what all words weigh is 1 / pi, which float32 cannot hold; its neighbours must not notice."
    z, i = normal(0, (7, 40), torch.float32, 4.0), words(1, (7,), 40)
    rare = z.clone()
    for row, below in ((1, 30.0), (2, 45.0), (3, 90.0), (4, 200.0), (5, math.inf)): rare[row, i[row]] = rare[row].max() - below
    ordinary = torch.tensor([True] + 5 * [False] + [True])
    for chunk in (40, 120, 1000):
        with in_pieces(chunk):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                a, (ga,) = value_and_grad(lambda z: selective_log_softmax(z, i, 0.7), z.to(dtype))
                b, (gb,) = value_and_grad(lambda z: selective_log_softmax(z, i, 0.7), rare.to(dtype))
                assert torch.equal(a[ordinary], b[ordinary]) and torch.equal(ga[ordinary], gb[ordinary])
                assert b[5] == -math.inf and b[:5].isfinite().all()
                close(b, exact(rare.to(dtype), i, 0.7)[0])
                formula = (torch.nn.functional.one_hot(i, 40) - logp_all(rare.to(dtype), 0.7).exp()) / 0.7
                torch.testing.assert_close(gb.double(), formula, atol=1e-5, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("backward", [False, True])
def test_copies_are_the_same_share_of_the_logits_whatever_their_type(backward, monkeypatch):
    made = {}
    monkeypatch.setattr(module, "_buffers", lambda size, logits, dtype, two, f=module._buffers: made.setdefault(logits.dtype, []).append(size * (1 + two) * dtype.itemsize / logits.itemsize) or f(size, logits, dtype, two))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        z = torch.randn(64, 11).to(dtype).requires_grad_()
        with in_pieces(704):
            y = selective_log_softmax(z, torch.zeros(64, dtype=torch.long))
            if backward: y.sum().backward()
    assert made == {torch.float32: [64] * (1 + backward), torch.bfloat16: [64] * (1 + backward), torch.float16: [64] * (1 + backward), torch.float64: [64] * (1 + backward)}


def test_the_gradient_of_pieces_against_finite_differences():
    z, i, m = normal(0, (2, 3, 5)).requires_grad_(True), words(1, (2, 3), 5), random_mask(2, (2, 3))
    with in_pieces():
        for f in (lambda z: selective_log_softmax(z, i, 0.6, m), lambda z: entropy_from_logits(z, 0.6), lambda z: log_probs_and_entropy(z, i, 0.6, m), lambda z: torch.stack(log_probs_and_entropy(z, i)).cos()):
            assert torch.autograd.gradcheck(f, z) and torch.autograd.gradgradcheck(f, z)


@pytest.mark.parametrize("how", [nullcontext, compiled.without])
def test_bfloat16_logits_of_a_large_vocabulary(how):
    "The promise: error of log pi below 1e-4, of the gradient below 1e-2 in norm."
    with how(): check_a_large_vocabulary()


def check_a_large_vocabulary():
    z, i, w = normal(0, (16, 128256), torch.bfloat16, 5.0), words(1, (16,), 128256), normal(2, (16,), torch.float32)
    logp, H = exact(z, i)
    y, (grad,) = value_and_grad(lambda z: selective_log_softmax(z, i) * w, z)
    formula = (torch.nn.functional.one_hot(i, 128256) - logp_all(z, 1.0).exp()) * w[:, None]
    assert z.numel() > module._WHOLE and (y / w - logp).abs().max() < 1e-4 and grad.dtype == torch.bfloat16
    assert (grad - formula).norm() / formula.norm() < 1e-2
    y, (grad,) = value_and_grad(entropy_from_logits, z)
    p = logp_all(z, 1.0).exp()
    formula = -p * (logp_all(z, 1.0) + H[:, None])
    assert (y - H).abs().max() < 1e-4 and (grad - formula).norm() / formula.norm() < 1e-2


def test_pieces_keep_two_numbers_for_a_row():
    saved = {}
    def save(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    z, i = normal(0, (4, 16, 100), torch.float32).requires_grad_(True), words(1, (4, 16), 100)
    with in_pieces(), torch.autograd.graph.saved_tensors_hooks(save, lambda t: t): y = selective_log_softmax(z, i)
    saved.pop(z.untyped_storage().data_ptr(), None)
    assert y.requires_grad and sum(saved.values()) <= 2 * i.numel() * 8


INPLACE = {"log pi": lambda z, i, *a, **o: selective_log_softmax(z, i, *a, **o), "entropy": lambda z, i, *a, **o: entropy_from_logits(z, *a, **o), "both": lambda z, i, *a, **o: torch.stack(log_probs_and_entropy(z, i, *a, **o))}


@settings(max_examples=30)
@given(name=st.sampled_from(list(INPLACE)), shape=shapes(0, 3), vocabulary=st.integers(1, 9), seed=SEEDS, dtype=DTYPES, temperature=TEMPERATURES, shift=st.sampled_from([0.0, -1e4]), share=st.sampled_from([0.0, 0.3]), chunk=st.sampled_from([1, 7, 20]), with_mask=st.booleans())
def test_the_gradient_in_place_of_the_logits_is_the_gradient(name, shape, vocabulary, seed, dtype, temperature, shift, share, chunk, with_mask):
    z, i = normal(seed, (*shape, vocabulary), scale=3.0) + shift, words(seed + 1, shape, vocabulary)
    z = z.masked_fill(random_mask(seed + 2, z.shape, share), -math.inf).scatter(-1, i[..., None], shift).to(dtype)
    mask = random_mask(seed + 3, shape) if with_mask else None
    with in_pieces(chunk):
        y, (expected,) = value_and_grad(lambda z: INPLACE[name](z, i, temperature, mask), z)
        leaf = z.clone().requires_grad_(True)
        logits = leaf * 1
        where, version = logits.data_ptr(), logits._version
        got = INPLACE[name](logits, i, temperature, mask, inplace_backward=True)
        assert torch.equal(got, y) and torch.equal(logits, z) and logits._version == version      # the forward pass leaves them alone
        grad, = torch.autograd.grad(got.sum(), logits)
    assert torch.equal(grad, expected) and not grad.requires_grad and torch.equal(leaf, z)
    assert grad.data_ptr() == where and torch.equal(logits.detach(), expected)


def test_in_place_makes_no_tensor_of_the_logits_size():
    from torch.utils._python_dispatch import TorchDispatchMode
    made = []
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            out = f(*args, **(kwargs or {}))
            made.extend(t.untyped_storage().data_ptr() for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor) and t.untyped_storage().nbytes() >= 64 * 200 * 4)
            return out
    for inplace in (True, False):
        made.clear()
        z, i = normal(0, (64, 200), torch.float32).requires_grad_(True) * 1, words(1, (64,), 200)
        with in_pieces(400), Watch(): torch.autograd.grad(log_probs_and_entropy(z, i, inplace_backward=inplace)[0].sum(), z)
        assert (set(made) <= {z.data_ptr()}) == inplace


def test_logits_that_others_need_are_not_overwritten_in_silence():
    z, i = normal(0, (4, 9), torch.float32).requires_grad_(True), words(1, (4,), 9)
    def logp(z, inplace=True): return selective_log_softmax(z, i, inplace_backward=inplace)
    others = {"saved by another": lambda z, **o: z.square().sum(-1) + logp(z, **o), "a second call": lambda z, **o: logp(z, **o) + logp(z, **o), "an output that its maker needs": lambda z, **o: logp(z.tanh(), **o)}
    with in_pieces(18):
        for f in others.values():
            with pytest.raises(RuntimeError, match="modified by an inplace operation"): value_and_grad(lambda z: f(z * 1), z)
        twice = logp(z * 1).sum()
        twice.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"): twice.backward()
        before = lambda z, **o: logp(z, **o) + z.square().sum(-1)                    # its backward pass comes first
        torch.testing.assert_close(value_and_grad(lambda z: before(z * 1), z), value_and_grad(lambda z: before(z, inplace=False), z))
        for given in (lambda z: (z * 1)[:, 1:], lambda z: (z * 1)[:1].expand(4, 9), lambda z: (z.t() * 1).t()):       # rows that share memory with others keep it
            grads = [value_and_grad(lambda z: selective_log_softmax(given(z), i.clamp(max=7), inplace_backward=inplace), z) for inplace in (True, False)]
            torch.testing.assert_close(*grads, rtol=0, atol=0)
        def second(inplace):
            g, = torch.autograd.grad(logp(z * 1, inplace).square().sum(), z, create_graph=True)
            return torch.autograd.grad(g.square().sum(), z)[0]
        assert torch.equal(second(True), second(False)) and (second(True) != 0).any()


def test_few_logits_and_a_compiler_may_ignore_the_permission():
    z, i = normal(0, (4, 9), torch.float32), words(1, (4,), 9)
    f = lambda z: torch.stack([selective_log_softmax(z * 1, i, inplace_backward=True), entropy_from_logits(z * 1, inplace_backward=True), *log_probs_and_entropy(z * 1, i, inplace_backward=True)])
    plain = lambda z: torch.stack([selective_log_softmax(z, i), entropy_from_logits(z), *log_probs_and_entropy(z, i)])
    torch.testing.assert_close(value_and_grad(f, z), value_and_grad(plain, z), rtol=0, atol=0)
    torch.testing.assert_close(torch.compile(f, backend="eager", fullgraph=True)(z), plain(z))
    torch.testing.assert_close(torch.func.vmap(lambda z, i: log_probs_and_entropy(z * 1, i, inplace_backward=True))(z, i), log_probs_and_entropy(z, i))


@pytest.mark.parametrize("name", INPLACE)
def test_what_may_not_be_overwritten_is_refused(name):
    z, i = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    for few in (False, True):
        with in_pieces(whole=2**20 if few else 0):
            for leaf in (z.clone().requires_grad_(True), torch.nn.Parameter(z), z.clone().requires_grad_(True).view(2, 3, 5), z.clone().requires_grad_(True).detach_().requires_grad_(True)[:]):
                with pytest.raises(ValueError, match="inplace_backward needs logits that were computed from something, got a leaf"): INPLACE[name](leaf, i, inplace_backward=True)
            with pytest.raises(TypeError, match="inplace_backward must be True or False, got 'yes'"): INPLACE[name](z, i, inplace_backward="yes")
            torch.testing.assert_close(INPLACE[name](z, i, inplace_backward=True), INPLACE[name](z, i), rtol=0, atol=0)          # of which no gradient is wanted


@settings(max_examples=25)
@given(shape=shapes(1, 2), d=st.integers(1, 4), vocabulary=st.integers(1, 9), seed=SEEDS, temperature=TEMPERATURES, chunk=st.sampled_from([None, 1, 3, 100]), with_bias=st.booleans(), with_mask=st.booleans(), junk=JUNK)
def test_linear_equals_the_way_through_the_logits(shape, d, vocabulary, seed, temperature, chunk, with_bias, with_mask, junk):
    h, W, i = normal(seed, (*shape, d)), normal(seed + 1, (vocabulary, d)), words(seed + 2, shape, vocabulary)
    b, m = normal(seed + 3, (vocabulary,)) if with_bias else None, random_mask(seed + 4, shape) if with_mask else None
    if m is not None: h = torch.where(m[..., None], h, 0.0)
    def soil(h): return h if m is None else torch.where(m[..., None], h, junk)
    def naive(h, W, *b): return torch.stack(log_probs_and_entropy(torch.nn.functional.linear(h, W, *b), i, temperature, m)).sin()
    def ours(h, W, *b): return torch.stack(linear_log_probs(soil(h), W, i, *b or [None], temperature=temperature, chunk=chunk, entropy=True, mask=m)).sin()
    leaves = [h, W] + [b] * with_bias
    expected = value_and_grad(naive, *leaves)
    with in_pieces(linear=20): got = value_and_grad(ours, *leaves)
    torch.testing.assert_close(got, expected)
    with in_pieces(linear=20): torch.testing.assert_close(linear_log_probs(h, W, i, b, temperature, chunk, mask=m).sin(), expected[0][0])


def test_linear_by_finite_differences_and_where_only_some_gradients_are_wanted():
    h, W, b, i = normal(0, (2, 3, 4)), normal(1, (7, 4)), normal(2, (7,)), words(3, (2, 3), 7)
    with in_pieces():
        assert torch.autograd.gradcheck(lambda *x: linear_log_probs(x[0], x[1], i, x[2], 0.7, entropy=True), [t.clone().requires_grad_(True) for t in (h, W, b)])
        assert torch.autograd.gradgradcheck(lambda *x: linear_log_probs(x[0], x[1], i, x[2], 0.7, chunk=4, entropy=True), [t.clone().requires_grad_(True) for t in (h, W, b)])
        for k in range(3):
            leaves = [t.clone().requires_grad_(j == k) for j, t in enumerate((h, W, b))]
            assert torch.autograd.gradcheck(lambda x: linear_log_probs(*[x if j == k else t for j, t in enumerate(leaves[:2])], i, x if k == 2 else leaves[2]), leaves[k])


@pytest.mark.parametrize("autocast", [False, True])
def test_linear_in_half_precision(autocast):
    h, W, i = normal(0, (40, 16), torch.float32), normal(1, (300, 16), torch.float32), words(2, (40,), 300)
    if not autocast: h, W = h.bfloat16(), W.bfloat16()
    with in_pieces(1500, linear=3000), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, grads = value_and_grad(lambda h, W: linear_log_probs(h, W, i), h, W)
        naive, expected = value_and_grad(lambda h, W: selective_log_softmax(torch.nn.functional.linear(h, W), i), h, W)
    assert y.dtype == torch.float32 and [g.dtype for g in grads] == [h.dtype, W.dtype]
    torch.testing.assert_close(y, naive, atol=1e-5, rtol=1e-5)
    for g, e in zip(grads, expected): assert (g - e).norm() / e.norm() < 1e-2


@pytest.mark.parametrize("chunk", [None, 3])
def test_autocast_leaves_float64_alone(chunk):
    h, W, i = normal(0, (8, 4)), normal(1, (6, 4)), words(2, (8,), 6)
    with torch.autocast("cpu", torch.bfloat16): y = linear_log_probs(h, W, i, chunk=chunk)
    torch.testing.assert_close(y, linear_log_probs(h, W, i, chunk=chunk), rtol=0, atol=1e-12)


def test_linear_never_holds_the_logits():
    "Not one tensor that is made on the way is as large as a fifth of them, and the logits of a chunk, then their gradient, lie where those of the chunk before lay."
    from torch.utils._python_dispatch import TorchDispatchMode
    largest, places = [], []
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            out = f(*args, **(kwargs or {}))
            largest.append(max((t.numel() for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)), default=0))
            if largest[-1] == 2000: places.append(out)          # kept, so that no other can lie in its place
            return out
    h, W, i = normal(0, (64, 4), torch.float32).requires_grad_(True), normal(1, (200, 4), torch.float32).requires_grad_(True), words(2, (64,), 200)
    with in_pieces(400, linear=2000), Watch(): torch.autograd.backward(linear_log_probs(h, W, i).sum())
    assert max(largest) <= 2000 and h.grad.norm() > 0 < W.grad.norm()
    assert len({t.untyped_storage().data_ptr() for t in places}) == 2          # forward, backward


def test_linear_works_under_vmap_and_compile():
    h, W, i = normal(0, (4, 3, 5)), normal(1, (6, 5)), words(2, (4, 3), 6)
    f = lambda h, i: linear_log_probs(h, W, i, chunk=2)
    torch.testing.assert_close(torch.func.vmap(f)(h, i), f(h, i))
    torch.testing.assert_close(torch.compile(f, backend="eager", fullgraph=True)(h, i), f(h, i))


@pytest.mark.parametrize("call, error, words", [
    (lambda h, W, i: linear_log_probs(h.tolist(), W, i), TypeError, "hidden must be a torch.Tensor, got list"),
    (lambda h, W, i: linear_log_probs(h, W[0], i), ValueError, "weight must have 2 dimensions, got 1"),
    (lambda h, W, i: linear_log_probs(h, W[:, 1:], i), ValueError, r"hidden must end in the width of weight, 4, got shape \(2, 3, 5\)"),
    (lambda h, W, i: linear_log_probs(h, W, i[0]), ValueError, r"index must have the shape of hidden without its width, \(2, 3\), got \(3,\)"),
    (lambda h, W, i: linear_log_probs(h, W, i.float()), TypeError, "index must have an integer dtype"),
    (lambda h, W, i: linear_log_probs(h, W, i, W[0]), ValueError, r"bias must have one number for each word, shape \(6,\), got \(5,\)"),
    (lambda h, W, i: linear_log_probs(h, W, i, i), TypeError, "bias must have a floating-point dtype"),
    (lambda h, W, i: linear_log_probs(h, W, i, temperature=0), ValueError, "temperature must be in"),
    (lambda h, W, i: linear_log_probs(h, W, i, chunk=0), ValueError, "chunk must be in"),
    (lambda h, W, i: linear_log_probs(h, W, i, chunk=2.5), TypeError, "^chunk must be an integer, got 2.5"),
    (lambda h, W, i: linear_log_probs(h, W, i, entropy="no"), TypeError, "^entropy must be True or False, got 'no'"),
    (lambda h, W, i: linear_log_probs(h, W, i, mask=i), TypeError, "mask must be boolean"),
    (lambda h, W, i: linear_log_probs(h, W, i + 6, chunk=2), ValueError, "index must be between 0 and 5"),
    *[(lambda h, W, i, c=c: linear_log_probs(h, W[:0], i, chunk=c), ValueError, r"weight must have a row for each word .*, got shape \(0, 5\)") for c in (None, 2)],
    *[(lambda h, W, i, c=c: linear_log_probs(h, W.double(), i, chunk=c), TypeError, "weight must have the dtype of hidden, torch.float32, got torch.float64") for c in (None, 2)],
    (lambda h, W, i: linear_log_probs(h, W, i, W[:, 0].double()), TypeError, "bias must have the dtype of hidden"),
    (lambda h, W, i: log_probs_and_entropy(W, i), ValueError, "index must have the shape of logits"),
    (lambda h, W, i: log_probs_and_entropy(W.long(), i), TypeError, "logits must have a floating-point dtype"),
])
def test_bad_input_of_the_joint_and_the_linear_function_is_named(call, error, words):
    with pytest.raises(error, match=words): call(torch.randn(2, 3, 5), torch.randn(6, 5), torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.skipif(not compiled.usable(torch.ones(1)), reason=compiled.status())
def test_many_logits_are_compiled_and_both_passes_go_the_same_way(monkeypatch):
    "Reference and total of the one are not those of the other."
    calls = []
    monkeypatch.setattr(compiled, "_call", lambda name, *given, f=compiled._call: calls.append(name) or f(name, *given))
    monkeypatch.setattr(module, "_WHOLE", 0)
    z, i = normal(0, (4, 50), torch.float32).requires_grad_(True), torch.arange(4)
    h, W = normal(1, (4, 3), torch.float32).requires_grad_(True), normal(2, (50, 3), torch.float32)
    for f, x in ((lambda: selective_log_softmax(z, i), z), (lambda: linear_log_probs(h, W, i, chunk=2), h)):
        calls.clear()
        with compiled.without(): y = f()
        torch.autograd.grad(y.sum(), x)
        assert not calls
        y = f()
        with compiled.without(): torch.autograd.grad(y.sum(), x)
        assert set(calls) == {"forward_float", "backward_float"}
