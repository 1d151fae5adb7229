import itertools
import math
from contextlib import contextmanager, nullcontext
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    DTYPES,
    EXTREMES,
    JUNK,
    SEEDS,
    normal,
    random_mask,
    shapes,
    value_and_grad,
    values,
)

from rlhf_notes import fast
from rlhf_notes.fast import linear, rows
from rlhf_notes.formulas.logprob import (
    entropy_from_logits,
    gaussian_entropy,
    gaussian_log_prob,
    linear_log_probs,
    log_probs_and_entropy,
    log_softmax,
    selective_log_softmax,
    tanh_log_det,
)

TEMPERATURES = st.sampled_from([0.1, 0.5, 0.7, 1, 1.0, 2.0, 10.0])
GRAD_RTOL = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


@contextmanager
def by_rows(large=0, chunk=16):
    "However few the logits are, the loops take them."
    before = rows.LARGE, linear.CHUNK
    rows.LARGE, linear.CHUNK = large, chunk
    try:
        yield
    finally:
        rows.LARGE, linear.CHUNK = before


ways = pytest.mark.parametrize("way", [fast.off, by_rows, nullcontext])


def words(seed, shape, vocabulary):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def exact(z, i, temperature=1.0):
    "log pi and entropy in float64, by the definition; 0 entropy where no token is possible."
    logp = (z.double() / temperature).log_softmax(-1)
    p = torch.nan_to_num(logp.exp())
    return torch.stack(
        [logp.gather(-1, i[..., None])[..., 0], -(p * torch.where(p > 0, logp, 0.0)).sum(-1)])


def exact_gradient(z, i, temperature, g, h):
    "Of g log pi + h entropy, by the formula."
    logp = (z.double() / temperature).log_softmax(-1)
    p, H = torch.nan_to_num(logp.exp()), exact(z, i, temperature)[1]
    of_entropy = torch.where(p > 0, p * (logp + H[..., None]), 0.0)
    one = torch.nn.functional.one_hot(i, z.shape[-1])
    return (g[..., None] * (one - p) - h[..., None] * of_entropy) / temperature


def row_logp(row, temperature=1.0):
    "log softmax of a list of numbers, in plain Python."
    top = max(row)
    return [(v - top) / temperature
            - math.log(math.fsum(math.exp((w - top) / temperature) for w in row)) for v in row]


def close(got, expected, **kwargs):
    torch.testing.assert_close(got.double(), expected, **{"atol": 2e-6, "rtol": 1e-5, **kwargs})


def test_the_reference_equals_the_loops_in_plain_python():
    z, i = normal(0, (4, 6), scale=3.0), words(1, (4,), 6)
    logp = [row_logp(row, 0.7) for row in z.tolist()]
    close(exact(z, i, 0.7)[0],
          torch.tensor([row[k] for row, k in zip(logp, i.tolist())], dtype=torch.float64))
    close(exact(z, i, 0.7)[1],
          torch.tensor([-math.fsum(math.exp(l) * l for l in row) for row in logp],
                       dtype=torch.float64))


@ways
@given(shape=shapes(0, 3), vocabulary=st.integers(1, 9), seed=SEEDS, dtype=DTYPES,
       temperature=TEMPERATURES, shift=st.sampled_from([0.0, 50.0, -1e4]),
       share=st.sampled_from([0.0, 0.3]))
def test_values_and_gradients_are_the_formulas(
    way, shape, vocabulary, seed, dtype, temperature, shift, share):
    z, i = normal(seed, (*shape, vocabulary), scale=3.0) + shift, words(seed + 1, shape, vocabulary)
    z = z.masked_fill(
        random_mask(seed + 2, z.shape, share), -math.inf).scatter(-1, i[..., None], shift).to(dtype)
    before, g, h = z.clone(), *(normal(seed + k, shape) for k in (3, 4))
    with way():
        y, (grad,) = value_and_grad(
            lambda z: (lambda a, b: a * g + b * h)(*log_probs_and_entropy(z, i, temperature)), z)
        logp, H = log_probs_and_entropy(z, i, temperature)
        alone, (of_logp,) = value_and_grad(lambda z: selective_log_softmax(z, i, temperature), z)
        alone_H, (of_H,) = value_and_grad(lambda z: entropy_from_logits(z, temperature), z)
    assert torch.equal(z, before)
    assert logp.shape == H.shape == i.shape
    assert grad.dtype == of_logp.dtype == of_H.dtype == dtype
    assert logp.dtype == H.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (logp <= 0).all() and (H >= 0).all() and (H <= math.log(vocabulary) + 1e-5).all()
    for got, expected in zip((logp, H, alone, alone_H), (*exact(z, i, temperature),) * 2):
        close(got, expected, atol=1e-5)
    one, zero = torch.ones(shape), torch.zeros(shape)
    for got, weights in ((grad, (g, h)), (of_logp, (one, zero)), (of_H, (zero, one))):
        torch.testing.assert_close(
            got.double(), exact_gradient(z, i, temperature, *weights),
            atol=max(3e-5, 4 / temperature * GRAD_RTOL.get(dtype, 0) * (got is grad)),
            rtol=GRAD_RTOL.get(dtype, 1e-5))


@ways
@given(
    data=st.data(), count=st.integers(1, 3), vocabulary=st.integers(1, 4), temperature=TEMPERATURES)
def test_extreme_logits(way, data, count, vocabulary, temperature):
    z = data.draw(values((count, vocabulary), elements=EXTREMES, dtype=torch.float32))
    i = words(data.draw(SEEDS), (count,), vocabulary)
    for f in (lambda z: selective_log_softmax(z, i, temperature),
              lambda z: entropy_from_logits(z, temperature)):
        with way(): got, (grad,) = value_and_grad(f, z)
        with fast.off(): truth, (true_grad,) = value_and_grad(f, z.double())
        assert got.isfinite().all() and grad.isfinite().all()
        close(got, truth)
        close(grad, true_grad)


@ways
def test_bfloat16_logits_of_a_large_vocabulary(way):
    "The promise: error of log pi below 1e-4, of the gradient below 1e-2 in norm."
    z, i, g, h = (normal(0, (16, 128256), torch.bfloat16, 5.0), words(1, (16,), 128256),
                  *normal(2, (2, 16), torch.float32))
    with way():
        y, (grad,) = value_and_grad(
            lambda z: (torch.stack(log_probs_and_entropy(z, i)) * torch.stack([g, h])), z)
    formula = exact_gradient(z, i, 1.0, g, h)
    assert (y / torch.stack([g, h]) - exact(z, i)).abs().max() < 1e-4
    assert grad.dtype == torch.bfloat16
    assert (grad - formula).norm() / formula.norm() < 1e-2


@ways
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_temperature_acts_in_float32_on_shifted_logits(way, temperature):
    z, i = normal(0, (8, 5000), torch.float32, 5.0), words(1, (8,), 5000)
    for logits in (z.bfloat16(), z + 1e4):
        with way(): got = torch.stack(log_probs_and_entropy(logits, i, temperature))
        assert (got - exact(logits, i, temperature)).abs().max() < 1e-5


@ways
@given(shape=shapes(1, 3), vocabulary=st.integers(1, 6), seed=SEEDS, junk=JUNK,
       temperature=TEMPERATURES, bad=st.sampled_from([-100, -1, 10**6]))
def test_nothing_leaks_from_under_the_mask(way, shape, vocabulary, seed, junk, temperature, bad):
    z, m, i = (normal(seed, (*shape, vocabulary), torch.float32), random_mask(seed + 1, shape),
               words(seed + 2, shape, vocabulary))
    dirty, outside = torch.where(m[..., None], z, junk), torch.where(m, i, bad)
    with way():
        for f in (lambda z, i: selective_log_softmax(z, i, temperature, m),
                  lambda z, i: entropy_from_logits(z, temperature, m),
                  lambda z, i: log_probs_and_entropy(z, i, temperature, m)[0]):
            value, (grad,) = value_and_grad(lambda z: f(z, i), z)
            y, (g,) = value_and_grad(lambda z: f(z, outside), dirty)
            assert torch.equal(y, value) and torch.equal(g, grad)
            assert (y[~m] == 0).all() and (g[~m] == 0).all() and g.isfinite().all()


@ways
@given(shape=shapes(0, 2), K=st.integers(0, 3), vocabulary=st.integers(1, 6), seed=SEEDS,
       dtype=DTYPES, temperature=TEMPERATURES)
def test_several_tokens_of_a_row_are_as_one_by_one(
    way, shape, K, vocabulary, seed, dtype, temperature):
    z, m = normal(seed, (*shape, vocabulary), dtype, 3.0), random_mask(seed + 1, shape)
    i = words(seed + 2, (*shape, K), vocabulary)
    dirty, outside = torch.where(m[..., None], z, math.nan), torch.where(m[..., None], i, -100)
    def one_by_one(z):
        return torch.stack([selective_log_softmax(z, i[..., k], temperature, m) for k in range(K)],
                           -1) if K else i.float()
    with way():
        got, (grad,) = value_and_grad(lambda z: selective_log_softmax(z, outside, temperature, m)
                                      * torch.arange(1, K + 1), dirty)
        assert got.shape == i.shape and (got[~m] == 0).all() and (grad[~m] == 0).all()
        if K:
            expected, (expected_grad,) = value_and_grad(
                lambda z: one_by_one(z) * torch.arange(1, K + 1), z)
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(
                grad, expected_grad, atol=max(1e-4, GRAD_RTOL.get(dtype, 0)),
                rtol=GRAD_RTOL.get(dtype, 1e-5) * 4)  # half precision adds up the K of them


@ways
def test_several_tokens_twice_differentiable_and_under_vmap(way):
    z, i = normal(0, (3, 5)), words(1, (3, 4), 5)
    with way():
        f = lambda z: selective_log_softmax(z, i, 0.7)
        assert torch.autograd.gradcheck(f, z.clone().requires_grad_(True))
        assert torch.autograd.gradgradcheck(f, z.clone().requires_grad_(True))
        torch.testing.assert_close(
            torch.func.vmap(selective_log_softmax)(z, i), selective_log_softmax(z, i))
        torch.testing.assert_close(torch.compile(selective_log_softmax, backend="eager",
                                                 fullgraph=True)(z, i), selective_log_softmax(z, i))
        with pytest.raises(
            ValueError,
            match=r"^index must have the shape \(..., K\) with ... = \(3,\), as logits "
            r"has, got \(2, 4\)"):
            selective_log_softmax(z, i[:2])
        with pytest.raises(ValueError, match="^index must be between 0 and 4"):
            selective_log_softmax(z, i + 5)


SECOND = {"log-probability": lambda z, i, m: selective_log_softmax(z, i, 0.7, m),
          "entropy": lambda z, i, m: entropy_from_logits(z, 0.7, m),
          "joint, log-probability": lambda z, i, m: log_probs_and_entropy(z, i, 0.7, m)[0],
          "joint, entropy": lambda z, i, m: log_probs_and_entropy(z, i, 0.7, m)[1]}


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_where_the_gradient_is_0_and_under_the_mask(way, dtype, name):
    "The square of a quantity less its own value has no gradient there, and the Hessian 2 J J^T."
    z, i, m = normal(0, (3, 5), dtype), words(1, (3,), 5), torch.tensor([True, True, False])
    z[1, (i[1] + 1) % 5] = -math.inf
    with way():
        here = SECOND[name](z, i, m)
        J = torch.autograd.functional.jacobian(lambda z: SECOND[name](z, i, m), z).flatten(1)
        for junk in (0.0, math.nan, math.inf, -math.inf):
            dirty = torch.where(m[:, None], z, junk)
            hessian = torch.autograd.functional.hessian(
                lambda z: (SECOND[name](z, i, m) - here).square().sum(), dirty).reshape(15, 15)
            assert J.norm() > 0.3 and hessian.isfinite().all()
            torch.testing.assert_close(hessian, 2 * J.T @ J, atol=1e-5, rtol=1e-4)


def test_the_gradient_against_finite_differences():
    z, i, m = normal(0, (2, 3, 5)).requires_grad_(True), words(1, (2, 3), 5), random_mask(2, (2, 3))
    for f in (lambda z: selective_log_softmax(z, i, 0.6, m), lambda z: entropy_from_logits(z, 0.6),
              lambda z: log_probs_and_entropy(z, i, 0.6, m)):
        assert torch.autograd.gradcheck(f, z) and torch.autograd.gradgradcheck(f, z)


@ways
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tokens_masked_by_the_lowest_number_are_impossible(way, dtype, temperature):
    lowest = torch.finfo(dtype).min
    for row in (
        [2.0, 1.0, 0.0, lowest], [lowest, lowest, lowest], [lowest, lowest, -math.inf, -math.inf]):
        z = torch.tensor([row], dtype=dtype)
        possible = z[z > lowest] if row[0] > lowest else torch.zeros(row.count(lowest))
        expected = torch.distributions.Categorical(logits=possible.double() / temperature).entropy()
        with way(): H, (grad,) = value_and_grad(lambda z: entropy_from_logits(z, temperature), z)
        close(H[0], expected)
        assert (grad[z <= lowest].abs() < 1e-7).all() and (grad[z == -math.inf] == 0).all()


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_impossible_tokens_infinite_logits_and_nan(way, dtype):
    inf = math.inf
    z = torch.tensor([[1.0, 2.0, -inf],
                      [-inf] * 3,
                      [math.nan, 1.0, 2.0],
                      [5.0, 5.0, 5.0],
                      [-inf, -inf, 3.0],
                      [1.0, inf, 2.0],
                      [3e38, -3e38, 0.0],
                      [-3e38, 3e38, 0.0]]).to(dtype)
    i, asked = torch.tensor([2, 0, 1, 1, 2, 0, 0, 0]), torch.tensor([1, 0, 0, 1, 1, 0, 1, 0]).bool()
    with way():
        logp, H = log_probs_and_entropy(z, i)
        for y in (logp, selective_log_softmax(z, i)):
            assert y[0] == -inf
            assert y[1].isnan()
            assert y[2].isnan()
            assert y[4] == 0
            assert y[5].isnan()
            assert y[6] == 0
            assert y[7] < -1e37
        assert H[1] == 0 and H[2].isnan() and H[4] == 0
        close(H[[0, 3]], torch.tensor([0.58220309, math.log(3)]).double())
        # of broken rows nothing is asked
        _, (g,) = value_and_grad(lambda z: selective_log_softmax(z, i, mask=asked), z)
        assert g.isfinite().all() and (g[~asked] == 0).all() and g[0, 2] == 1 and g.dtype == dtype
        _, (g,) = value_and_grad(lambda z: selective_log_softmax(z, i), z)
        assert g[2].isnan().any()  # a NaN that counts is seen


@ways
@pytest.mark.parametrize("V", [5, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_without_a_possible_token_has_no_gradient(way, V, dtype):
    "Whether it is masked, left out afterwards, or asked for: its log-probability is NaN then."
    z, i, m = normal(0, (3, V), dtype), torch.arange(3), torch.tensor([True, False, True])
    z[1] = -math.inf
    ways_to_ask = (lambda z: selective_log_softmax(z, i, mask=m),
                   lambda z: torch.where(m, selective_log_softmax(z, i), 0),
                   lambda z: torch.stack(log_probs_and_entropy(z, i))[:, m],
                   lambda z: selective_log_softmax(z, i, 0.7))
    for f in ways_to_ask:
        with way(): y, (g,) = value_and_grad(f, z)
        assert g.isfinite().all() and (g[1] == 0).all() and g[0].any() and g[2].any()
    assert y.isnan().tolist() == [False, True, False]


@ways
def test_a_token_that_is_all_but_impossible(way):
    """Measured by its own logit, what all tokens weigh is 1 / pi, which float32 cannot hold; its
    neighbours must not notice.
    """
    z, i = normal(0, (7, 40), torch.float32, 4.0), words(1, (7,), 40)
    rare = z.clone()
    for row, below in ((1, 30.0), (2, 45.0), (3, 90.0), (4, 200.0), (5, math.inf)):
        rare[row, i[row]] = rare[row].max() - below
    ordinary = torch.tensor([True] + 5 * [False] + [True])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        with way():
            a, (ga,) = value_and_grad(lambda z: selective_log_softmax(z, i, 0.7), z.to(dtype))
            b, (gb,) = value_and_grad(lambda z: selective_log_softmax(z, i, 0.7), rare.to(dtype))
        assert torch.equal(a[ordinary], b[ordinary]) and torch.equal(ga[ordinary], gb[ordinary])
        assert b[5] == -math.inf and b[:5].isfinite().all()
        close(b, exact(rare.to(dtype), i, 0.7)[0])
        formula = exact_gradient(rare.to(dtype), i, 0.7, torch.ones(7), torch.zeros(7))
        torch.testing.assert_close(gb.double(), formula, atol=1e-5, rtol=GRAD_RTOL.get(dtype, 1e-5))


@ways
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_in_every_layout(way, threads):
    whole = normal(0, (3, 6, 11), torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for z in (whole[0, 0], whole[0], whole[:, :-1], whole[:, 1:].transpose(0, 1),
                  whole[:1, :1].expand(3, 5, 11), whole[..., ::3], whole[..., 2:],
                  whole[:, :, None, :5], whole[:0]):
            i = (torch.arange(math.prod(z.shape[:-1])) * 7 % z.shape[-1]).view(z.shape[:-1])
            leaf = z.detach().requires_grad_(True)
            with way():
                y = torch.stack(log_probs_and_entropy(leaf, i))
                g, = torch.autograd.grad(y.sum(), leaf)
            close(y.detach(), exact(z, i), atol=1e-5)
            close(g, exact_gradient(z, i, 1.0, torch.ones(i.shape), torch.ones(i.shape)), atol=1e-5)
            with way(), torch.inference_mode():
                close(selective_log_softmax(z, i), exact(z, i)[0], atol=1e-5)
    finally:
        torch.set_num_threads(before)


@ways
def test_index_of_any_integer_dtype_and_an_empty_batch(way):
    z, i = normal(0, (2, 3, 5), torch.float32), words(1, (2, 3), 5)
    with way():
        for dtype in (torch.uint8, torch.int16, torch.int32):
            assert torch.equal(selective_log_softmax(z, i.to(dtype)), selective_log_softmax(z, i))
        assert selective_log_softmax(
            z[:0], i[:0]).shape == entropy_from_logits(z[:0]).shape == (0, 3)


@ways
def test_works_under_vmap_and_compile(way):
    z, i, m = (normal(0, (4, 2, 3, 5), torch.float32), words(1, (4, 2, 3), 5),
               random_mask(2, (4, 2, 3)))
    h, W = normal(3, (4, 2, 3, 6), torch.float32), normal(4, (5, 6), torch.float32)
    with way():
        for f, x in ((lambda z, i, m: selective_log_softmax(z, i, 0.7, m), z),
                     (lambda z, i, m: entropy_from_logits(z, 0.7, m), z),
                     (lambda h, i, m: linear_log_probs(h, W, i, mask=m), h)):
            torch.testing.assert_close(torch.func.vmap(f)(x, i, m), f(x, i, m))
            grads = torch.func.vmap(torch.func.grad(lambda *a: f(*a).sum()))(x, i, m)
            torch.testing.assert_close(grads, value_and_grad(lambda t: f(t, i, m), x)[1][0])
            compiled = value_and_grad(
                lambda t: torch.compile(f, backend="aot_eager", fullgraph=True)(t, i, m), x)
            torch.testing.assert_close(compiled, value_and_grad(lambda t: f(t, i, m), x))
            if x is z and way is not fast.off:
                torch.testing.assert_close(
                    torch.autograd.functional.jacobian(lambda t: f(t, i, m), x, vectorize=True),
                    torch.autograd.functional.jacobian(lambda t: f(t, i, m), x))
    torch._dynamo.reset()


@ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_dtype_and_device_change_nothing(way, dtype):
    z, i, m = normal(0, (4, 9), torch.float32), words(1, (4,), 9), random_mask(2, (4,))
    h, W = normal(3, (4, 6), torch.float32), normal(4, (9, 6), torch.float32)
    mu, sigma = normal(5, (2, 4, 3), torch.float32).exp()
    def all_of_it():
        found = [
            value_and_grad(lambda z: torch.stack(log_probs_and_entropy(z, i, 0.7, m)), z),
            value_and_grad(lambda h, W: linear_log_probs(h, W, i, temperature=0.7, mask=m), h, W)]
        return [*found, gaussian_log_prob(mu, mu + 1, sigma, m), gaussian_entropy(sigma, m),
                tanh_log_det(mu)]
    with way():
        expected = all_of_it()
        torch.set_default_dtype(dtype)
        try: got = all_of_it()
        finally: torch.set_default_dtype(torch.float32)
        with torch.device("meta"): there = all_of_it()
    for other in (got, there): torch.testing.assert_close(other, expected, rtol=0, atol=0)


@ways
@pytest.mark.parametrize("R", [3, 3000])
def test_meta_tensors_give_shapes(way, R):
    with torch.device("meta"):
        h, W, b, i, m = (torch.empty(R, 8, dtype=torch.bfloat16),
                         torch.empty(999, 8, dtype=torch.bfloat16), torch.empty(999),
                         torch.empty(R, dtype=torch.int64), torch.empty(R, dtype=torch.bool))
    with way():
        for y in (*linear_log_probs(h, W, i, b, entropy=True, mask=m),
                  linear_log_probs(h, W, i, chunk=7), *log_probs_and_entropy(h @ W.T, i, mask=m)):
            assert (y.shape, y.dtype, y.device.type) == ((R,), torch.float32, "meta")


@ways
@pytest.mark.parametrize("call, error, words", [
    (lambda z, i: selective_log_softmax(z.tolist(), i), TypeError,
     "logits must be a torch.Tensor, got list"),
    (lambda z, i: selective_log_softmax(z.long(), i), TypeError,
     "logits must have a floating-point dtype, got torch.int64"),
    (lambda z, i: selective_log_softmax(z, i.float()), TypeError,
     "index must have an integer dtype"),
    (lambda z, i: selective_log_softmax(z, i > 0), TypeError,
     "index must have an integer dtype, got torch.bool"),
    (lambda z, i: selective_log_softmax(z, 3), TypeError, "index must be a torch.Tensor, got int"),
    (lambda z, i: selective_log_softmax(z, i[0]), ValueError,
     r"index must have .* = \(2, 3\), as logits has.*got \(3,\)"),
    (lambda z, i: selective_log_softmax(z, i + 5), ValueError,
     "^index must be between 0 and 4, the last of 5 choices"),
    (lambda z, i: selective_log_softmax(z, i - 100), ValueError, "index must be between 0 and 4"),
    (lambda z, i: selective_log_softmax(z.to("meta"), i), ValueError,
     "index must be on the device of logits, meta, got cpu"),
    (lambda z, i: selective_log_softmax(z[0, 0, 0], i), ValueError, "logits must have the shape"),
    (lambda z, i: selective_log_softmax(z, i, 0), ValueError,
     r"temperature must be in \(0, inf\), got 0"),
    (lambda z, i: selective_log_softmax(z, i, math.nan), ValueError, "temperature"),
    (lambda z, i: selective_log_softmax(z, i, "1"), TypeError,
     "temperature must be a number, got str"),
    (lambda z, i: selective_log_softmax(z, i, mask=i), TypeError, "mask must be boolean"),
    (lambda z, i: selective_log_softmax(z, i, mask=i[0] > 0), ValueError, "mask must have"),
    (lambda z, i: selective_log_softmax(z, i, inplace_backward="yes"), TypeError,
     "inplace_backward must be True or False, got 'yes'"),
    (lambda z, i: entropy_from_logits(z.long()), TypeError,
     "logits must have a floating-point dtype"),
    (lambda z, i: entropy_from_logits(z, 0.0), ValueError, "temperature"),
    (lambda z, i: entropy_from_logits(z, mask=z > 0), ValueError, r"mask must have .*\(2, 3\)"),
    (lambda z, i: log_probs_and_entropy(z, i[0]), ValueError, "index must have"),
])
def test_bad_input_is_named(way, call, error, words):
    with way(), pytest.raises(error, match=words):
        call(torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.long))


def gaussians(seed, shape, n, dtype=torch.float64):
    "action, mu and sigma of shape (*shape, n)."
    return (normal(seed, (*shape, n), dtype, 2.0), normal(seed + 1, (*shape, n), dtype),
            (normal(seed + 2, (*shape, n)) * 0.7).exp().to(dtype))


def loop_gaussian(action, mu, sigma):
    "log density of each action, by the definition of the density, in plain Python."
    rows = [t.double().reshape(-1, t.shape[-1]).tolist() for t in (action, mu, sigma)]
    logp = [math.fsum(-math.log(s * math.sqrt(2 * math.pi)) - (a - m) ** 2 / (2 * s * s)
                      for a, m, s in zip(*row)) for row in zip(*rows)]
    return torch.tensor(logp, dtype=torch.float64).reshape(action.shape[:-1])


@given(shape=shapes(0, 2), n=st.integers(1, 4), seed=SEEDS, dtype=DTYPES)
def test_gaussian_values_and_gradients(shape, n, seed, dtype):
    a, mu, sigma = gaussians(seed, shape, n, dtype)
    before = [t.clone() for t in (a, mu, sigma)]
    got, grads = value_and_grad(gaussian_log_prob, a, mu, sigma)
    assert got.shape == torch.Size(shape)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), loop_gaussian(a, mu, sigma), atol=1e-5, rtol=1e-5)
    x, s = (a.double() - mu.double()) / sigma.double(), sigma.double()
    for grad, formula in zip(grads, (-x / s, x / s, (x ** 2 - 1) / s)):
        assert grad.dtype == dtype
        torch.testing.assert_close(
            grad.double(), formula, atol=1e-4 if dtype != torch.float64 else 1e-12,
            rtol={torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5))
    H, (grad,) = value_and_grad(gaussian_entropy, sigma)
    torch.testing.assert_close(
        H.double(), torch.distributions.Normal(mu.double(), s).entropy().sum(-1), atol=1e-5,
        rtol=1e-5)
    torch.testing.assert_close(grad.double(), 1 / s, atol=0,
                               rtol={torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5))
    assert H.dtype == got.dtype and H.shape == got.shape
    assert all(torch.equal(b, t) for b, t in zip(before, (a, mu, sigma)))


@given(seed=SEEDS, n=st.integers(1, 3))
def test_gaussian_against_torch_distributions_and_finite_differences(seed, n):
    a, mu, sigma = gaussians(seed, (3,), n)
    theirs = torch.distributions.Independent(torch.distributions.Normal(mu, sigma), 1)
    torch.testing.assert_close(gaussian_log_prob(a, mu, sigma), theirs.log_prob(a))
    torch.testing.assert_close(gaussian_entropy(sigma), theirs.entropy())
    leaves = [t.requires_grad_(True) for t in (a, mu, sigma + 0.3)]
    assert torch.autograd.gradcheck(gaussian_log_prob, leaves)
    assert torch.autograd.gradcheck(gaussian_entropy, leaves[2])


def test_gaussian_is_a_density():
    grid = torch.linspace(-8, 8, 1601, dtype=torch.float64)[:, None]
    for mu, sigma in ((0.0, 1.0), (0.3, 0.2), (-1.0, 1.3)):
        logp = gaussian_log_prob(grid, torch.full_like(grid, mu), torch.full_like(grid, sigma))
        assert logp.exp().sum().item() * 0.01 == pytest.approx(1, abs=1e-6)
        assert -(logp.exp() * logp).sum().item() * 0.01 == pytest.approx(
            gaussian_entropy(torch.tensor([sigma], dtype=torch.float64)).item(), abs=1e-5)
    # above 0
    assert gaussian_log_prob(*torch.tensor([[0.0], [0.0], [0.1]])) == pytest.approx(
        math.log(10 / math.sqrt(2 * math.pi)), abs=1e-6)
    assert gaussian_entropy(torch.tensor([0.1])) < 0 < gaussian_entropy(torch.tensor([0.3]))


@given(shape=shapes(1, 2), n=st.integers(1, 3), seed=SEEDS,
       junk=st.one_of(JUNK, st.sampled_from([0.0, -1.0])),
       dtype=st.sampled_from([torch.float32, torch.float64]), keep=st.sampled_from([0.0, 0.5, 1.0]))
def test_nothing_leaks_from_under_the_mask_of_a_gaussian(shape, n, seed, junk, dtype, keep):
    clean, m = gaussians(seed, shape, n, dtype), random_mask(seed + 3, shape, keep)
    dirty = [torch.where(m[..., None], t, junk).to(dtype) for t in clean]
    for f, k in ((lambda *t: gaussian_log_prob(*t, mask=m), 3),
                 (lambda a, mu, s: gaussian_entropy(s, m), 3)):
        value, grads = value_and_grad(f, *clean)
        y, got = value_and_grad(f, *dirty)
        assert torch.equal(y, value) and (y[~m] == 0).all()
        for g, expected in zip(got, grads):
            if g is None: continue
            assert torch.equal(g, expected) and (g[~m] == 0).all() and g.isfinite().all()


def test_a_sigma_that_is_not_positive_is_seen():
    for sigma in (0.0, -1.0, math.nan):
        for a in (0.0, 1.0): assert gaussian_log_prob(*torch.tensor([[a], [0.0], [sigma]])).isnan()
    assert gaussian_entropy(torch.tensor([-1.0])).isnan()
    assert gaussian_entropy(torch.tensor([0.0])) == -math.inf


def test_gaussian_extremes_are_finite():
    a, mu, sigma = (torch.tensor([[1e6], [1e3], [-1e6], [0.0]]), torch.zeros(4, 1),
                    torch.tensor([[1.0], [1e-3], [1e3], [1e-30]]))
    y, grads = value_and_grad(gaussian_log_prob, a, mu, sigma)
    assert y.isfinite().all() and all(g.isfinite().all() for g in grads)


def test_gaussian_works_under_vmap():
    a, mu, sigma = gaussians(0, (4, 5), 3)
    m = random_mask(3, (4, 5))
    torch.testing.assert_close(
        torch.func.vmap(gaussian_log_prob)(a, mu, sigma, m), gaussian_log_prob(a, mu, sigma, m))
    torch.testing.assert_close(
        torch.func.vmap(gaussian_entropy)(sigma, m), gaussian_entropy(sigma, m))
    grads = torch.func.vmap(
        torch.func.grad(lambda *t: gaussian_log_prob(*t).sum(), argnums=(0, 1, 2)))(a, mu, sigma)
    torch.testing.assert_close(grads, value_and_grad(gaussian_log_prob, a, mu, sigma)[1])


@pytest.mark.parametrize("call, error, words", [
    (lambda x: gaussian_log_prob(x, x, x[0]), ValueError,
     r"sigma must have the shape of action, \(2, 3\), got \(3,\)"),
    (lambda x: gaussian_log_prob(x, x[:, :1], x), ValueError, "mu must have the shape of action"),
    (lambda x: gaussian_log_prob(x.long(), x, x), TypeError,
     "action must have a floating-point dtype, got torch.int64"),
    (lambda x: gaussian_log_prob(x, x, 1.0), TypeError, "sigma must be a torch.Tensor, got float"),
    (lambda x: gaussian_log_prob(x, x, x, x > 0), ValueError, r"mask must have .*\(2,\)"),
    (lambda x: gaussian_log_prob(x, x, x, x[:, 0]), TypeError, "mask must be boolean"),
    (lambda x: gaussian_log_prob(*[x[0, 0]] * 3), ValueError, "action must have the shape"),
    (lambda x: gaussian_entropy(x[0, 0]), ValueError, "sigma must have the shape"),
    (lambda x: gaussian_entropy(x.long()), TypeError, "sigma must have a floating-point dtype"),
    (lambda x: gaussian_entropy(x, x > 0), ValueError, "mask must have"),
])
def test_bad_input_of_a_gaussian_is_named(call, error, words):
    with pytest.raises(error, match=words): call(torch.ones(2, 3))


def sixty_digits(x):
    "log(1 - tanh(x)^2) = -2 log cosh(x), in 60 decimal digits."
    with localcontext() as context:
        context.prec = 60
        return float(-2 * ((Decimal(x).exp() + Decimal(-x).exp()) / 2).ln())


@given(shape=shapes(0, 2), n=st.integers(1, 4), seed=SEEDS,
       scale=st.sampled_from([1e-3, 0.1, 1.0, 10.0, 300.0]), dtype=DTYPES)
def test_tanh_log_det_values_and_gradients(shape, n, seed, scale, dtype):
    x = normal(seed, (*shape, n), dtype, scale)
    before = x.clone()
    y, (g,) = value_and_grad(tanh_log_det, x)
    expected = torch.tensor([sixty_digits(v) for v in x.double().flatten().tolist()],
                            dtype=torch.float64).reshape(x.shape).sum(-1)
    assert y.shape == torch.Size(shape)
    assert y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tight = dtype == torch.float64
    torch.testing.assert_close(
        y.double(), expected, atol=1e-14 * n if tight else 4e-7 * n, rtol=1e-14 if tight else 1e-6)
    torch.testing.assert_close(g.double(), -2 * x.double().tanh(), atol=1e-6,
                               rtol={torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-6))
    assert g.dtype == dtype and torch.equal(x, before)


def test_tanh_log_det_by_hand_and_in_the_limits():
    assert (tanh_log_det(torch.tensor([math.atanh(0.5), -math.atanh(0.5)])).item()
            == pytest.approx(2 * math.log(0.75), abs=1e-6))
    assert tanh_log_det(torch.zeros(4)) == 0
    for v in (20.0, 1e3, 1e6, 1e30):
        for sign in (1, -1):
            y, (g,) = value_and_grad(tanh_log_det, torch.tensor([sign * v]))
            assert y.isfinite()
            assert y.item() == pytest.approx(math.log(4) - 2 * v, rel=1e-6)
            assert g.item() == pytest.approx(-2 * sign)


def test_tanh_log_det_in_float64_from_end_to_end():
    x = torch.linspace(-40, 40, 321, dtype=torch.float64)
    exact = torch.tensor([sixty_digits(v) for v in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(tanh_log_det(x[:, None]), exact, atol=1e-14, rtol=1e-14)


@given(seed=SEEDS)
def test_tanh_log_det_against_torch_distributions_and_finite_differences(seed):
    x = normal(seed, (5, 3), torch.float64, 2.0)
    torch.testing.assert_close(
        tanh_log_det(x),
        torch.distributions.TanhTransform().log_abs_det_jacobian(x, x.tanh()).sum(-1))
    assert torch.autograd.gradcheck(tanh_log_det, x.requires_grad_(True))
    step = 1e-5
    torch.testing.assert_close(
        tanh_log_det(x), (((x + step).tanh() - (x - step).tanh()) / (2 * step)).log().sum(-1),
        atol=1e-6, rtol=1e-6)


def test_a_squashed_gaussian_is_a_density():
    y = torch.linspace(-1, 1, 200_001, dtype=torch.float64)[1:-1, None]
    x = y.atanh()
    for mu, sigma in ((0.0, 0.5), (0.5, 0.7), (-1.0, 0.3)):
        logp = gaussian_log_prob(
            x, torch.full_like(x, mu), torch.full_like(x, sigma)) - tanh_log_det(x)
        assert (logp.exp().sum() * 1e-5).item() == pytest.approx(1, abs=1e-4)


def test_tanh_log_det_works_under_vmap():
    x = normal(0, (4, 5, 3))
    torch.testing.assert_close(torch.func.vmap(tanh_log_det)(x), tanh_log_det(x))
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(lambda t: tanh_log_det(t).sum()))(x), -2 * x.tanh())


@pytest.mark.parametrize("x, error, words", [
    (torch.tensor(1.0), ValueError, "x must have the shape"),
    (torch.ones(3).long(), TypeError, "x must have a floating-point dtype, got torch.int64"),
    (torch.ones(3) > 0, TypeError, "x must have a floating-point dtype, got torch.bool"),
    ([1.0], TypeError, "x must be a torch.Tensor, got list"),
])
def test_bad_input_of_tanh_log_det_is_named(x, error, words):
    with pytest.raises(error, match=words): tanh_log_det(x)


# ---- the gradient in the logits' place, and without the logits

INPLACE = {"log pi": lambda z, i, *a, **o: selective_log_softmax(z, i, *a, **o),
           "entropy": lambda z, i, *a, **o: entropy_from_logits(z, *a, **o),
           "both": lambda z, i, *a, **o: torch.stack(log_probs_and_entropy(z, i, *a, **o))}


@settings(max_examples=30)
@given(name=st.sampled_from(list(INPLACE)), shape=shapes(0, 3), vocabulary=st.integers(1, 9),
       seed=SEEDS, dtype=st.sampled_from([torch.float32, torch.bfloat16]), temperature=TEMPERATURES,
       with_mask=st.booleans())
def test_the_gradient_in_place_of_the_logits_is_the_gradient(
    name, shape, vocabulary, seed, dtype, temperature, with_mask):
    z, i = (normal(seed, (*shape, vocabulary), scale=3.0).to(dtype),
            words(seed + 1, shape, vocabulary))
    mask = random_mask(seed + 3, shape) if with_mask else None
    with by_rows():
        y, (expected,) = value_and_grad(lambda z: INPLACE[name](z, i, temperature, mask), z)
        leaf = z.clone().requires_grad_(True)
        logits = leaf * 1
        where, version = logits.data_ptr(), logits._version
        got = INPLACE[name](logits, i, temperature, mask, inplace_backward=True)
        # the forward pass leaves them alone
        assert torch.equal(got, y) and torch.equal(logits, z) and logits._version == version
        grad, = torch.autograd.grad(got.sum(), logits)
    assert torch.equal(grad, expected) and not grad.requires_grad and torch.equal(leaf, z)
    assert grad.data_ptr() == where and torch.equal(logits.detach(), expected)


def test_logits_that_others_need_are_not_overwritten_in_silence():
    z, i = normal(0, (4, 9), torch.float32).requires_grad_(True), words(1, (4,), 9)
    def logp(z, inplace=True): return selective_log_softmax(z, i, inplace_backward=inplace)
    others = {"saved by another": lambda z, **o: z.square().sum(-1) + logp(z, **o),
              "a second call": lambda z, **o: logp(z, **o) + logp(z, **o),
              "an output that its maker needs": lambda z, **o: logp(z.tanh(), **o)}
    with by_rows():
        for f in others.values():
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                value_and_grad(lambda z: f(z * 1), z)
        twice = logp(z * 1).sum()
        twice.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"): twice.backward()
        before = lambda z, **o: logp(z, **o) + z.square().sum(-1)  # its backward pass comes first
        torch.testing.assert_close(value_and_grad(lambda z: before(z * 1), z),
                                   value_and_grad(lambda z: before(z, inplace=False), z))
        # rows that share memory with others keep it
        for given in (lambda z: (z * 1)[:, 1:], lambda z: (z * 1)[:1].expand(4, 9),
                      lambda z: (z.t() * 1).t()):
            grads = [value_and_grad(lambda z: selective_log_softmax(given(z), i.clamp(max=7),
                                                                    inplace_backward=inplace), z)
                     for inplace in (True, False)]
            torch.testing.assert_close(*grads, rtol=0, atol=0)
        def second(inplace):
            g, = torch.autograd.grad(logp(z * 1, inplace).square().sum(), z, create_graph=True)
            return torch.autograd.grad(g.square().sum(), z)[0]
        assert torch.equal(second(True), second(False)) and (second(True) != 0).any()


@ways
@pytest.mark.parametrize("name", INPLACE)
def test_what_may_not_be_overwritten_is_refused(way, name):
    torch._dynamo.reset()
    z, i = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    with way():
        for leaf in (z.clone().requires_grad_(True), torch.nn.Parameter(z),
                     z.clone().requires_grad_(True).view(2, 3, 5)):
            with pytest.raises(
                ValueError,
                match="inplace_backward needs logits that were computed from something, got a "
                "leaf"):
                INPLACE[name](leaf, i, inplace_backward=True)
        # of which no gradient is wanted
        torch.testing.assert_close(
            INPLACE[name](z, i, inplace_backward=True), INPLACE[name](z, i), rtol=0, atol=0)
        # a compiler may ignore the permission
        f = lambda z: INPLACE[name](z * 1, i, inplace_backward=True)
        torch.testing.assert_close(
            torch.compile(f, backend="eager", fullgraph=True)(z), INPLACE[name](z, i))


@pytest.mark.parametrize("name", INPLACE)
def test_the_loops_keep_four_numbers_of_a_row(name):
    saved = {}
    def save(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    z, i = normal(0, (4, 16, 100), torch.float32).requires_grad_(True), words(1, (4, 16), 100)
    with by_rows(), torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        y = INPLACE[name](z, i)
    saved.pop(z.untyped_storage().data_ptr(), None)
    assert y.requires_grad and sum(saved.values()) <= i.numel() * (8 + 3 * 4) + 100


@ways
@settings(max_examples=25)
@given(shape=shapes(1, 2), d=st.integers(1, 4), vocabulary=st.integers(1, 9), seed=SEEDS,
       dtype=st.sampled_from([torch.float32, torch.float64]), temperature=TEMPERATURES,
       chunk=st.sampled_from([None, 1, 3, 100]), with_bias=st.booleans(), with_mask=st.booleans(),
       junk=JUNK)
def test_linear_equals_the_way_through_the_logits(
    way, shape, d, vocabulary, seed, dtype, temperature, chunk, with_bias, with_mask, junk):
    h, W, i = (normal(seed, (*shape, d), dtype), normal(seed + 1, (vocabulary, d), dtype),
               words(seed + 2, shape, vocabulary))
    b, m = (normal(seed + 3, (vocabulary,), dtype) if with_bias else None,
            random_mask(seed + 4, shape) if with_mask else None)
    if m is not None: h = torch.where(m[..., None], h, 0.0)
    def soil(h): return h if m is None else torch.where(m[..., None], h, junk)
    def naive(h, W, *b):
        return torch.stack(
            log_probs_and_entropy(torch.nn.functional.linear(h, W, *b), i, temperature, m)).sin()
    def ours(h, W, *b):
        return torch.stack(linear_log_probs(soil(h), W, i, *b or [None], temperature=temperature,
                                            chunk=chunk, entropy=True, mask=m)).sin()
    leaves = [h, W] + [b] * with_bias
    with fast.off(): expected = value_and_grad(naive, *leaves)
    tol = dict(atol=3e-5, rtol=1e-4) if dtype == torch.float32 else {}
    with way():
        torch.testing.assert_close(value_and_grad(ours, *leaves), expected, **tol)
        torch.testing.assert_close(
            linear_log_probs(h, W, i, b, temperature, chunk, mask=m).sin(), expected[0][0], **tol)


@ways
def test_linear_where_only_some_gradients_are_wanted_and_their_gradients(way):
    h, W, b, i = (*(normal(k, s, torch.float32) for k, s in enumerate(((2, 3, 4), (7, 4), (7,)))),
                  words(3, (2, 3), 7))
    def f(h, W, b):
        return torch.stack(linear_log_probs(h, W, i, b, 0.7, chunk=4, entropy=True)).sin().sum()
    with fast.off(): every = value_and_grad(f, h, W, b)[1]
    for k in range(3):
        leaves = [t.clone().requires_grad_(j == k) for j, t in enumerate((h, W, b))]
        with way():
            got, = torch.autograd.grad(f(*leaves), leaves[k])
            second, = torch.autograd.grad(
                torch.autograd.grad(f(*leaves), leaves[k], create_graph=True)[0].square().sum(),
                leaves[k])
        with fast.off():
            expected, = torch.autograd.grad(
                torch.autograd.grad(f(*leaves), leaves[k], create_graph=True)[0].square().sum(),
                leaves[k])
        torch.testing.assert_close(got, every[k], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(second, expected, atol=1e-4, rtol=1e-3)


@ways
def test_products_of_half_precision_are_accumulated_in_float32(way):
    """Against float64: log pi to 1e-4, and the weight's gradient rounded once, not once for each
    chunk.
    """
    h, W, i = (normal(0, (300, 64), torch.bfloat16), normal(1, (500, 64), torch.bfloat16),
               words(2, (300,), 500))
    with way():
        y, grads = value_and_grad(lambda h, W: linear_log_probs(h, W, i, chunk=20), h, W)
    truth, exact_grads = value_and_grad(
        lambda h, W: (h @ W.T).log_softmax(-1).gather(-1, i[:, None])[:, 0], h.double(), W.double())
    assert y.dtype == torch.float32
    assert [g.dtype for g in grads] == [torch.bfloat16] * 2
    assert (y - truth).abs().max() < 1e-4
    for g, e in zip(grads, exact_grads): assert (g.double() - e).norm() / e.norm() < 2e-3


@ways
def test_linear_under_autocast(way):
    h, W, i = (normal(0, (40, 16), torch.float32), normal(1, (300, 16), torch.float32),
               words(2, (40,), 300))
    truth, exact_grads = value_and_grad(
        lambda h, W: (h @ W.T).log_softmax(-1).gather(-1, i[:, None])[:, 0], h, W)
    with way(), torch.autocast("cpu", torch.bfloat16):
        y, grads = value_and_grad(lambda h, W: linear_log_probs(h, W, i), h, W)
    assert y.dtype == torch.float32 and 1e-3 < (y - truth).abs().max() < 0.2
    for g, e in zip(grads, exact_grads):
        assert g.dtype == torch.float32 and (g - e).norm() / e.norm() < 2e-2
    with way(), torch.autocast("cpu", torch.bfloat16):
        y = linear_log_probs(h.double(), W.double(), i, chunk=3)
    assert y.dtype == torch.float64 and (y - truth).abs().max() < 1e-5


@ways
def test_linear_takes_any_dtypes_side_by_side(way):
    h, W, b = (normal(k, s) for k, s in enumerate([(3, 4), (7, 4), (7,)]))
    i, kinds = words(3, (3,), 7), (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtypes in itertools.product(kinds, repeat=3):
        given = [x.to(d) for x, d in zip((h, W, b), dtypes)]
        wide = [x.double() for x in given]
        exact = (wide[0] @ wide[1].T + wide[2]).log_softmax(-1)[range(3), i]
        with way(): y, grads = value_and_grad(lambda h, W, b: linear_log_probs(h, W, i, b), *given)
        assert y.dtype == (torch.float64 if torch.float64 in dtypes else torch.float32)
        assert [g.dtype for g in grads] == [*dtypes]
        close(y, exact, atol=1e-12 if torch.float64 in dtypes else 1e-5)
        with way(), torch.autocast("cpu", torch.bfloat16): linear_log_probs(*given[:2], i, given[2])


def test_linear_never_holds_the_logits():
    "Not one tensor that is made on the way is as large as a fifth of them."
    from torch.utils._python_dispatch import TorchDispatchMode
    largest = []
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            out = f(*args, **(kwargs or {}))
            largest.append(
                max((t.numel() for t in (out if isinstance(out, (tuple, list)) else [out])
                     if isinstance(t, torch.Tensor)), default=0))
            return out
    h, W, i = (normal(0, (64, 4), torch.float32).requires_grad_(True),
               normal(1, (200, 4), torch.float32).requires_grad_(True), words(2, (64,), 200))
    with by_rows(chunk=2000), Watch(): torch.autograd.backward(linear_log_probs(h, W, i).sum())
    assert max(largest) <= 2000 and h.grad.norm() > 0 < W.grad.norm()


@ways
@pytest.mark.parametrize("call, error, words", [
    (lambda h, W, i: linear_log_probs(h.tolist(), W, i), TypeError,
     "hidden must be a torch.Tensor, got list"),
    (lambda h, W, i: linear_log_probs(h, W[0], i), ValueError,
     r"weight must have the shape \(V, d\), got"),
    (lambda h, W, i: linear_log_probs(h, W[:, 1:], i), ValueError,
     "weight must have .*d = 5, as hidden has"),
    (lambda h, W, i: linear_log_probs(h, W, i[0]), ValueError, r"index must have .* = \(2, 3\)"),
    (lambda h, W, i: linear_log_probs(h, W, i.float()), TypeError,
     "index must have an integer dtype"),
    (lambda h, W, i: linear_log_probs(h, W, i, W[0]), ValueError, "bias must have .*V = 6"),
    (lambda h, W, i: linear_log_probs(h, W, i, temperature=0), ValueError,
     "temperature must be in"),
    (lambda h, W, i: linear_log_probs(h, W, i, chunk=0), ValueError, "chunk must be in"),
    (lambda h, W, i: linear_log_probs(h, W, i, chunk=2.5), TypeError,
     "^chunk must be an integer, got 2.5"),
    (lambda h, W, i: linear_log_probs(h, W, i, entropy="no"), TypeError,
     "^entropy must be True or False, got 'no'"),
    (lambda h, W, i: linear_log_probs(h, W, i, mask=i), TypeError, "mask must be boolean"),
    (lambda h, W, i: linear_log_probs(h, W, i + 6, chunk=2), ValueError,
     "index must be between 0 and 5"),
])
def test_bad_input_of_the_linear_function_is_named(way, call, error, words):
    with way(), pytest.raises(error, match=words):
        call(torch.randn(2, 3, 5), torch.randn(6, 5), torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize("size", [7, 1000, 100_000, 151_936, 1_100_000])
@pytest.mark.parametrize("tops", [1, 2, 30])
def test_a_few_tokens_above_many_equal_ones(size, tops):
    "A running sum in float32 is 1e-3 off here, and differently so on each processor."
    logits = torch.zeros(1, size)
    logits[0, :tops] = 16.7
    right = logits.double().log_softmax(-1)[0]
    for context in (nullcontext(), fast.off()):
        with context:
            added = min(size, 256)  # in float32, if fast is open
            allowed = 1e-7 + 6e-8 * (added - 1) * fast.is_open()
            for i in (0, size - 1):
                assert abs(selective_log_softmax(logits, torch.tensor([i]))[0].double()
                           - right[i]) < allowed + 6e-8 * abs(right[i])
            assert abs(entropy_from_logits(logits)[0].double()
                       + (right.exp() * right).sum()) < 4e-7 + allowed


def test_the_operator_promises_float32_whatever_the_default():
    torch.set_default_dtype(torch.float64)
    try: assert {x.dtype for x in rows.four_of(torch.zeros(3, dtype=torch.long))} == {torch.float32}
    finally: torch.set_default_dtype(torch.float32)


@pytest.mark.skipif(
    not (fast.is_open() and fast.has_numba()), reason="the plain code takes all rows")
def test_no_more_rows_of_logits_than_a_chunk(monkeypatch):
    seen, product = [], linear._product
    monkeypatch.setattr(linear, "_product", lambda a, b: seen.append(len(a)) or product(a, b))
    with by_rows():
        linear_log_probs(
            torch.randn(5, 3), torch.randn(7, 3), torch.zeros(5, dtype=torch.long), chunk=2)
    assert seen == [2, 2, 1]


@pytest.mark.parametrize("V", [5, 128, 50_000])
def test_a_distribution_keeps_its_digits(V):
    z = 5 * torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        log_softmax(z, 0.7).double(), (z.double() / 0.7).log_softmax(-1), rtol=1e-6, atol=1e-6)
