import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    DTYPES,
    JUNK,
    SEEDS,
    masked,
    normal,
    random_mask,
    shapes,
    value_and_grad,
    values,
)

from rlhf_notes.formulas.whitening import RunningMoments, whiten

BOOL = st.booleans()
EPS = st.sampled_from([1e-8, 1e-3, 2.0])


def reference(kept, shift_mean=True, unbiased=False, eps=1e-8):
    "The same from the list of the elements that count, in plain Python."
    n = len(kept)
    mean = math.fsum(kept) / max(n, 1)
    var = math.fsum((v - mean) ** 2 for v in kept) / max(n - unbiased, 1)
    return [(v - mean) / math.sqrt(var + eps) + (0 if shift_mean else mean) for v in kept]


@given(xm=masked(), shift_mean=BOOL, unbiased=BOOL, eps=EPS)
def test_equals_the_list_of_what_counts(xm, shift_mean, unbiased, eps):
    x, m = xm
    before = x.clone()
    got = whiten(x, m, shift_mean, unbiased, eps)
    assert got.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    assert got.shape == x.shape
    assert (got[~m] == 0).all() and torch.equal(x, before)
    expected = torch.tensor(
        reference(x.double()[m].tolist(), shift_mean, unbiased, eps), dtype=torch.float64)
    torch.testing.assert_close(got[m].double(), expected, atol=1e-4, rtol=1e-4)
    if m.all(): assert torch.equal(whiten(x, None, shift_mean, unbiased, eps), got)


def test_defaults_remove_the_mean_and_are_biased():
    x = torch.tensor([0., 1., 5.], dtype=torch.float64)
    torch.testing.assert_close(
        whiten(x), torch.tensor(reference(x.tolist(), True, False, 1e-8), dtype=torch.float64),
        rtol=1e-12, atol=1e-12)
    small = x * 1e-4  # here the default eps is seen
    torch.testing.assert_close(whiten(small),
                               torch.tensor(reference(small.tolist(), True, False, 1e-8),
                                            dtype=torch.float64), rtol=1e-12, atol=1e-12)


@given(
    seed=SEEDS, n=st.integers(2, 40), offset=st.sampled_from([0.0, 1e3, 1e6, -1e6]), unbiased=BOOL)
def test_mean_and_variance_of_the_result(seed, n, offset, unbiased):
    # exact in float32
    x = torch.cat(
        [normal(seed, (n,)),
         torch.tensor([3., -3.], dtype=torch.float64)]).float().round(decimals=0) * 4 + offset
    w, kept = (whiten(x, unbiased=unbiased).double(),
               whiten(x, shift_mean=False, unbiased=unbiased).double())
    assert abs(w.mean()) < 1e-5
    assert abs(w.var(correction=int(unbiased)) - 1) < 1e-5
    assert w.abs().max() <= math.sqrt(n + 1) + 1e-5
    torch.testing.assert_close(kept, w + x.double().mean(), atol=0.07 if offset else 1e-4, rtol=0)
    torch.testing.assert_close(
        w.float(), whiten(x - offset, unbiased=unbiased), atol=1e-5, rtol=1e-5)


@given(seed=SEEDS, shape=shapes(), shift_mean=BOOL, unbiased=BOOL, eps=EPS)
def test_gradient_equals_the_formula(seed, shape, shift_mean, unbiased, eps):
    x, m, g = normal(seed, shape), random_mask(seed + 1, shape), normal(seed + 2, shape)
    _, (got,) = value_and_grad(lambda t: whiten(t, m, shift_mean, unbiased, eps) * g, x)
    g, n = g * m, m.sum()
    if n < 2:
        torch.testing.assert_close(got, g * (not shift_mean), atol=1e-12, rtol=1e-12)
        return
    centred = (x - x[m].mean()) * m
    s = (centred.square().sum() / (n - int(unbiased)) + eps).sqrt()
    w = centred / s
    expected = (g - g.sum() / n - w * (g * w).sum() / (n - int(unbiased))) / s + (0 if shift_mean
                                                                                  else g.sum() / n)
    torch.testing.assert_close(got, expected * m)
    if shift_mean: assert abs(got.sum()) < 1e-9 * (1 + got.abs().max())


@given(seed=SEEDS)
def test_gradient_by_finite_differences(seed):
    x, m = normal(seed, (2, 4)), random_mask(seed + 1, (2, 4), 0.8)
    assert torch.autograd.gradcheck(
        lambda t: whiten(t, m, False, True, 0.1), x.requires_grad_(True))


@given(xm=masked(), junk=JUNK, shift_mean=BOOL, unbiased=BOOL)
def test_nothing_leaks_from_under_the_mask(xm, junk, shift_mean, unbiased):
    x, m = xm
    weight = normal(3, x.shape).to(x.dtype)
    f = lambda t: whiten(t, m, shift_mean, unbiased) * weight
    value, (grad,) = value_and_grad(f, x)
    dirty, (dirty_grad,) = value_and_grad(f, torch.where(m, x, junk).to(x.dtype))
    assert torch.equal(value, dirty) and torch.equal(grad, dirty_grad)
    assert (value[~m] == 0).all() and (grad[~m] == 0).all() and grad.isfinite().all()


@given(x=shapes(1, 2).flatmap(lambda s: values(s, dtype=torch.float32)), shift_mean=BOOL,
       unbiased=BOOL, eps=st.sampled_from([0.0, 1e-30, 1e-8, 1.0]))
def test_extreme_values_give_finite_values_and_gradients(x, shift_mean, unbiased, eps):
    value, (grad,) = value_and_grad(lambda t: whiten(t, None, shift_mean, unbiased, eps) * 3, x)
    assert value.isfinite().all() and grad.isfinite().all()
    if shift_mean: assert value.abs().max() <= 3 * math.sqrt(max(x.numel() - 1, 0)) + 1e-3


@given(seed=SEEDS, scale=st.sampled_from([1e-15, 1e-10, 1e10, 1e18, 1e30]))
def test_no_square_overflows_or_vanishes(seed, scale):
    x = normal(seed, (20,), torch.float32)
    torch.testing.assert_close(whiten(x * scale, eps=0), whiten(x, eps=0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("value", [0.0, 3.3, -1e6, 1e30])
def test_one_element_and_equal_elements(value, unbiased, eps):
    for x in (torch.tensor([value]), torch.full((7,), value)):
        for shift_mean in (True, False):
            got, (grad,) = value_and_grad(lambda t: whiten(t, None, shift_mean, unbiased, eps), x)
            torch.testing.assert_close(
                got, torch.zeros_like(x) if shift_mean else x, atol=1e-3, rtol=1e-6)
            assert grad.isfinite().all()
            if len(x) == 1: assert grad.item() == (0 if shift_mean else 1)


def test_none_at_all():
    assert whiten(torch.empty(0)).shape == (0,)
    assert whiten(torch.empty(2, 0), shift_mean=False).shape == (2, 0)
    assert (whiten(torch.full((3,), math.nan), torch.zeros(3, dtype=torch.bool), shift_mean=False)
            == 0).all()


@given(seed=SEEDS, shift_mean=BOOL)
def test_works_under_vmap(seed, shift_mean):
    x, m = normal(seed, (4, 3, 5)), random_mask(seed + 1, (4, 3, 5))
    rows = torch.stack([whiten(a, b, shift_mean) for a, b in zip(x, m)])
    torch.testing.assert_close(torch.func.vmap(lambda a, b: whiten(a, b, shift_mean))(x, m), rows)


def observations(seed, n, shape, dtype=torch.float64):
    "n observations with a mask; offsets and scales differ widely between features."
    scale, offset = 10 ** (3 * normal(seed, shape)), 10 ** (3 * normal(seed + 1, shape))
    return ((normal(seed + 2, (n, *shape)) * scale + offset).to(dtype),
            random_mask(seed + 3, (n,), 0.8))


def moments_of(rows):
    "(count, mean, var) of a float64 tensor of rows, straight from the definition."
    n = len(rows)
    mean = rows.sum(0) / max(n, 1)
    m2 = (rows - mean).square().sum(0)
    return n, mean, m2 / max(n, 1)


def check_moments(moments, rows, tolerance=1e-8):
    n, mean, var = moments_of(rows.double())
    assert moments.count == n and moments.mean.dtype == moments.var.dtype == torch.float64
    torch.testing.assert_close(moments.mean, mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(moments.var, var, rtol=tolerance, atol=1e-12)


@given(seed=SEEDS, n=st.integers(0, 30), shape=st.sampled_from([(), (3,), (2, 2)]), dtype=DTYPES,
       data=st.data())
def test_pieces_in_any_order_equal_the_whole(seed, n, shape, dtype, data):
    x, m = observations(seed, n, shape)
    x = x.clamp(-6e4, 6e4).to(dtype)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=5)))
    pieces = [(x[a:b], m[a:b]) for a, b in zip([0, *cuts], [*cuts, n])]
    check_moments(RunningMoments(shape).update(x, m), x[m])
    updated, merged = RunningMoments(shape), RunningMoments(shape)
    for part, keep in data.draw(st.permutations(pieces)): updated.update(part, keep)
    others = [RunningMoments(shape).update(*p) for p in data.draw(st.permutations(pieces))]
    saved = [o.state_dict() for o in others]
    for o in others: merged.merge(o)
    for moments in (updated, merged): check_moments(moments, x[m], 1e-6)
    for o, s in zip(others, saved):
        assert all(
            torch.equal(torch.as_tensor(o.state_dict()[k]), torch.as_tensor(s[k])) for k in s)


def test_large_offsets_keep_the_variance():
    x = torch.arange(10, dtype=torch.float64) + 1e9
    moments = RunningMoments()
    for v in x: moments.update(v)
    assert moments.mean == 1e9 + 4.5
    torch.testing.assert_close(
        moments.var, torch.tensor(8.25, dtype=torch.float64), rtol=1e-9, atol=0)


@given(seed=SEEDS, n=st.integers(2, 30), eps=EPS, offset=st.sampled_from([0.0, 1e6]),
       dtype=st.sampled_from([torch.float32, torch.float64]))
def test_whitening_the_pieces_with_merged_moments_is_whitening_the_whole(
    seed, n, eps, offset, dtype):
    x, m = (normal(seed, (n,)) * 64).round().to(dtype) + offset, random_mask(seed + 1, (n,), 0.9)
    m[0] = True
    a, b = (RunningMoments().update(x[:n // 2], m[:n // 2]),
            RunningMoments().update(x[n // 2:], m[n // 2:]))
    total = RunningMoments().merge(a).merge(b)
    pieces = torch.cat([total.whiten(part, eps) for part in (x[:n // 2], x[n // 2:])])
    assert pieces.dtype == dtype
    torch.testing.assert_close(pieces[m], whiten(x, m, eps=eps)[m], atol=1e-4, rtol=1e-4)


def test_features_are_whitened_apart():
    x = torch.tensor([[0., 100.], [2., 300.], [4., 500.]])
    m = torch.tensor([True, False, True])
    value, (grad,) = value_and_grad(
        RunningMoments((2,)).update(torch.where(m[:, None], x, math.nan), m).whiten, x[m])
    torch.testing.assert_close(value, torch.tensor([[-1., -1.], [1., 1.]]))
    torch.testing.assert_close(grad, torch.tensor([[0.5, 0.005], [0.5, 0.005]]))


def test_state_survives_a_checkpoint_and_shares_nothing():
    a = RunningMoments((2,)).update(torch.randn(5, 2))
    b = RunningMoments((2,))
    b.load_state_dict(a.state_dict())
    mean = a.mean.clone()
    b.update(torch.randn(4, 2))
    assert a.count == 5 and b.count == 9 and torch.equal(a.mean, mean)
    a.state_dict()["mean"].add_(1)
    assert torch.equal(a.mean, mean)


def test_gradients_do_not_enter_the_moments():
    x = torch.randn(3, requires_grad=True)
    assert not RunningMoments().update(x).mean.requires_grad


X = torch.ones(2, 3)


@pytest.mark.parametrize("call, error, words", [
    (lambda: whiten([1., 2.]), TypeError, "x must be a torch.Tensor, got list"),
    (lambda: whiten(X * 1j), TypeError, "x must be real"),
    (lambda: whiten(X, X), TypeError, "mask must be boolean"),
    (lambda: whiten(X, X[0] > 0), ValueError, "mask must have the shape of x"),
    (lambda: whiten(X, eps=-1.0), ValueError, "eps must be in"),
    (lambda: whiten(X, X > 0, "no"), TypeError, "^shift_mean must be True or False, got 'no'"),
    (lambda: whiten(X, X > 0, True, "x"), TypeError, "^unbiased must be True or False, got 'x'"),
    (lambda: whiten(X, unbiased=2), TypeError, "^unbiased must be True or False, got 2"),
    (lambda: whiten(X, eps=math.nan), ValueError, "eps must be in"),
    (lambda: RunningMoments().update(3.0), TypeError, "x must be a torch.Tensor"),
    (lambda: RunningMoments((2,)).update(X), ValueError,
     r"x must have a shape that ends in \(2,\), got \(2, 3\)"),
    (lambda: RunningMoments((3,)).update(X, X > 0), ValueError,
     r"mask must have the shape of the observations in x, \(2,\), got"),
    (lambda: RunningMoments((3,)).update(X, X[:, 0]), TypeError,
     "mask must be boolean .*, got torch.float32"),
    (lambda: RunningMoments((3,)).update(X, [True, False]), TypeError,
     "mask must be a torch.Tensor, got list"),
    (lambda: RunningMoments().update(X / 0), ValueError, "x must be finite"),
    (lambda: RunningMoments().update(X * math.nan), ValueError, "x must be finite"),
    (lambda: RunningMoments().merge({"count": 1}), TypeError,
     "other must be RunningMoments, got dict"),
    (lambda: RunningMoments((3,)).merge(RunningMoments()), ValueError,
     r"other must have moments of shape \(3,\), got \(\)"),
    (lambda: RunningMoments().whiten(X), ValueError, "moments of no observations"),
    (lambda: RunningMoments().update(X).whiten(X, eps=0), ValueError, "eps must be in"),
    (lambda: RunningMoments().load_state_dict({"count": 1}), ValueError,
     "state must have the keys"),
    (lambda: RunningMoments().update(torch.tensor([1e200, -1e200], dtype=torch.float64)),
     ValueError, "x must be so small that its squares have a sum in float64"),
    *[(lambda state=state: RunningMoments().load_state_dict({"count": 3, "mean": torch.tensor(1.0),
                                                             "m2": torch.tensor(1.0)} | state),
       ValueError, "state must hold count >= 0, finite mean and m2 >= 0")
      for state
      in ({"count": -3}, {"m2": torch.tensor(-1.0)}, {"mean": torch.tensor(math.nan)},
          {"m2": torch.ones(2)})],
    (lambda: RunningMoments().load_state_dict(RunningMoments((3,)).state_dict()), ValueError,
     "state must hold .* of shape"),
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_refused_batch_changes_nothing():
    moments = RunningMoments().update(X)
    with pytest.raises(ValueError): moments.update(X * math.inf)
    with pytest.raises(ValueError):
        moments.load_state_dict({"count": -1, "mean": torch.tensor(2.0), "m2": torch.tensor(0.0)})
    assert moments.count == 6 and moments.mean == 1


def test_one_huge_number_has_a_mean_and_no_deviation():
    moments = RunningMoments().update(torch.tensor([1e200], dtype=torch.float64))
    assert moments.mean == 1e200 and moments.var == 0
    with pytest.raises(ValueError, match="x must be so small"): moments.update(torch.tensor([0.0]))
    with pytest.raises(ValueError, match="x must be so small"):
        moments.merge(RunningMoments().update(torch.ones(2)))
    assert moments.count == 1 and moments.mean == 1e200 and moments.var == 0


def test_observations_without_elements():
    moments = RunningMoments((0,)).update(torch.zeros(3, 0)).update(
        torch.zeros(2, 4, 0), torch.ones(2, 4, dtype=torch.bool))
    assert moments.count == 11
    assert moments.var.shape == (0,)
    assert moments.whiten(torch.zeros(3, 0)).shape == (3, 0)
    with pytest.raises(
        ValueError, match=r"mask must have the shape of the observations in x, \(3,\), got \(2,\)"):
        moments.update(torch.zeros(3, 0), torch.ones(2, dtype=torch.bool))
