import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
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

from rlhf_notes.formulas.value import (
    explained_variance,
    inv_symlog,
    symlog,
    value_clip_fraction,
    value_inv_transform,
    value_loss,
    value_transform,
)

CLIPS = st.sampled_from([None, 0.05, 0.2, 1, 10.0])
TRANSFORMS = {
    "h": value_transform, "h inverse": value_inv_transform, "symlog": symlog, "symexp": inv_symlog}


def cases(V, V_old, R, c):
    "(loss, gradient, is it clipped) of one value, case by case."
    if c is not None and V > V_old + c and R > (V + V_old + c) / 2:
        return (V_old + c - R) ** 2 / 2, 0.0, True
    if c is not None and V < V_old - c and R < (V + V_old - c) / 2:
        return (V_old - c - R) ** 2 / 2, 0.0, True
    return (V - R) ** 2 / 2, V - R, False


@given(shape=shapes(0, 3), seed=SEEDS, clip=CLIPS, scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_the_loss_and_its_gradient_case_by_case(shape, seed, clip, scale):
    V, V_old, R = (normal(seed + k, shape, scale=scale) for k in range(3))
    before = [x.clone() for x in (V, V_old, R)]
    loss, (grad, *others) = value_and_grad(lambda *x: value_loss(*x, clip), V, V_old, R)
    rows = [cases(*row, clip) for row in zip(*(x.flatten().tolist() for x in (V, V_old, R)))]
    expected = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(loss.flatten(), expected[:, 0])
    torch.testing.assert_close(grad.flatten(), expected[:, 1])
    torch.testing.assert_close(
        value_clip_fraction(V, V_old, R, clip).double(), expected[:, 2].mean(), atol=1e-6, rtol=0)
    assert others == [None, None]                                           # V_old and R are data
    assert all(torch.equal(a, b) for a, b in zip(before, (V, V_old, R)))


@pytest.mark.parametrize("V, R, loss, grad", [
    (3.0, 9.0, 24.5, 0.0),
    (3.0, 1.5, 1.125, 1.5),
    (3.0, 2.4, 0.18, 0.6),  # above, V_old + c = 2: towards a far return; overshot; past the middle
    (1.2, 9.0, 30.42, -7.8),
    (0.8, -9.0, 48.02, 9.8),  # inside
    (-1.0, -9.0, 40.5, 0.0),
    (-1.0, 0.5, 1.125, -1.5),
    (-1.0, -0.4, 0.18, -0.6),  # below, V_old - c = 0
])
def test_by_hand(V, R, loss, grad):
    y, (g,) = value_and_grad(
        lambda V: value_loss(V, torch.tensor([1.0]), torch.tensor([R]), 1.0), torch.tensor([V]))
    torch.testing.assert_close((y, g), (torch.tensor([loss]), torch.tensor([grad])))


def test_a_value_that_is_nearly_right_can_have_a_large_loss_and_no_gradient():
    y, (g,) = value_and_grad(
        lambda V: value_loss(V, torch.tensor(0.0), torch.tensor(1.9), 0.2), torch.tensor(2.0))
    assert y.isclose(torch.tensor(1.445)) and g == 0


@pytest.mark.parametrize("V", [0.8, 1.0, 1.2])
def test_inside_the_range_and_on_its_edge_the_gradient_is_whole(V):
    for dtype in (torch.float32, torch.float64):
        V_, V_old, R = (torch.tensor([x], dtype=dtype) for x in (V, 1.0, 5.0))
        y, (g,) = value_and_grad(lambda v: value_loss(v, V_old, R, 0.5), V_)
        assert g == V_ - R
        assert y == 0.5 * (V_ - R) ** 2
        assert value_clip_fraction(V_, V_old, R, 0.5) == 0
    for edge in (0.5, 1.5):
        assert value_clip_fraction(
            torch.tensor([edge]), torch.tensor([1.0]), torch.tensor([5.0]), 0.5) == 0
    assert value_and_grad(lambda v: value_loss(v, torch.tensor([1.0]), torch.tensor([5.0]), 0.5),
                          torch.tensor([1.5]))[1][0] == -3.5


@given(data=st.data(), n=st.integers(1, 5), clip=CLIPS)
def test_extreme_values(data, n, clip):
    V, V_old, R = (
        data.draw(values((n,), elements=EXTREMES, dtype=torch.float32)) for _ in range(3))
    loss, (grad,) = value_and_grad(lambda V: value_loss(V, V_old, R, clip), V)
    assert not loss.isnan().any() and grad.isfinite().all() and (loss >= 0).all()
    # where V_old - c is still distinguishable from V_old
    moved = torch.where(V_old.abs() < 1e6, V_old, 0.0)
    _, (grad,) = value_and_grad(lambda V: value_loss(V, moved, R, clip), V)
    _, (exact,) = value_and_grad(
        lambda V: value_loss(V, moved.double(), R.double(), clip), V.double())
    torch.testing.assert_close(grad.double(), exact, rtol=1e-5, atol=1e-5)


def test_what_is_not_a_number_shows():
    nan, x = float("nan"), torch.tensor([1.0, 2.0, 3.0])
    for k in range(3):
        given = [x[:1].clone(), x[1:2].clone(), x[2:].clone()]
        given[k][0] = nan
        assert value_loss(*given, 0.2).isnan().all(), k
    broken = [torch.tensor([2.0, 2.0]), torch.tensor([nan, 1.0]), torch.tensor([3.0, 3.0]), 0.2]
    assert value_clip_fraction(*broken).isnan()
    assert value_clip_fraction(*broken, torch.tensor([False, True])) == 1
    for broken in (nan, math.inf, -math.inf):
        y = torch.tensor([1.0, broken, 3.0])
        assert explained_variance(x, y).isnan()
        assert explained_variance(y, x).isnan()
        assert explained_variance(y, torch.ones(3)).isnan()
        kept = torch.tensor([True, False, True])
        assert explained_variance(x, y, kept) == explained_variance(y, x, kept) == 1


@given(shape=shapes(1, 2), seed=SEEDS, clip=CLIPS, dtype=DTYPES)
def test_computed_in_float32_or_better(shape, seed, clip, dtype):
    V, V_old, R = (normal(seed + k, shape, dtype) for k in range(3))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for f in (lambda *x: value_loss(*x, clip), lambda V, _, R: explained_variance(V, R)):
        assert f(V, V_old, R).dtype == wide
        torch.testing.assert_close(
            f(V, V_old, R), f(V.double(), V_old.double(), R.double()).to(wide), rtol=1e-4,
            atol=1e-4)
    for f in TRANSFORMS.values():
        assert f(V).dtype == wide
        torch.testing.assert_close(f(V), f(V.double()).to(wide), rtol=1e-5, atol=0)


@given(shape=shapes(1, 3), seed=SEEDS, clip=CLIPS, junk=JUNK)
def test_nothing_leaks_from_under_the_mask(shape, seed, clip, junk):
    clean, m = [normal(seed + k, shape) for k in range(3)], random_mask(seed + 3, shape)
    dirty = [torch.where(m, x, junk) for x in clean]
    loss = lambda V, V_old, R: value_loss(V, V_old, R, clip, m)
    value, (grad, *_) = value_and_grad(loss, *clean)
    y, (g, *_) = value_and_grad(loss, *dirty)
    assert torch.equal(y, value)
    assert torch.equal(g, grad)
    assert (y[~m] == 0).all()
    assert (g[~m] == 0).all()
    torch.testing.assert_close(y[m], value_loss(*(x[m] for x in clean), clip))
    kept = [x[m] for x in clean]
    torch.testing.assert_close(value_clip_fraction(*dirty, clip, m),
                               value_clip_fraction(*kept, clip) if m.any() else torch.tensor(0.0))
    explained, (g, _) = value_and_grad(lambda V, R: explained_variance(V, R, m), dirty[0], dirty[2])
    torch.testing.assert_close(
        explained,
        explained_variance(kept[0], kept[2]) if m.any() else torch.tensor(0.0, dtype=torch.float64))
    assert g.isfinite().all() and (g[~m] == 0).all()


@given(seed=SEEDS, n=st.integers(2, 20), scale=st.sampled_from([1e-6, 1.0, 1e6]),
       shift=st.sampled_from([0.0, 3.0]), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_explained_variance_equals_the_definition(seed, n, scale, shift, dtype):
    V, R = normal(seed, (n,), dtype, scale), normal(seed + 1, (n,), dtype, scale) + shift * scale
    variance = lambda x: sum((v - sum(x) / n) ** 2 for v in x) / n
    v, r = V.tolist(), R.tolist()
    expected = torch.tensor(1 - variance([b - a for a, b in zip(v, r)]) / variance(r), dtype=dtype)
    torch.testing.assert_close(explained_variance(V, R), expected, rtol=1e-3, atol=1e-3)
    # blind to a constant
    torch.testing.assert_close(explained_variance(V + 5 * scale, R), expected, rtol=1e-3, atol=1e-3)
    assert explained_variance(R, R) == 1 and explained_variance(V, R) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [0.0, 1e2, 1e4, 1e8, 1e12])
def test_a_value_far_from_the_returns_explains_what_is_in_its_digits(dtype, shift):
    def variance(x): return sum((v - sum(x) / len(x)) ** 2 for v in x) / len(x)
    m, offset = random_mask(3, (40,)), 100 * (shift > 1e3)
    for a in (0.0, 0.5, 1.0):
        R = normal(0, (40,), dtype) + offset
        V = a * R + 0.3 * normal(1, (40,), dtype) + shift
        for mask in (None, m):
            pairs = zip(V.tolist(), R.tolist(), m.tolist())
            v, r = zip(
                *[(Fraction(x), Fraction(y)) for x, y, kept in pairs if kept or mask is None])
            exact = float(1 - variance([y - x for x, y in zip(v, r)]) / variance(r))
            got = explained_variance(V, R, mask).item()
            assert got == pytest.approx(exact, rel=1e-4, abs=1e-4), (a, mask)
    assert explained_variance(torch.full_like(R, shift), R) == 0


@given(seed=SEEDS, n=st.integers(0, 300),
       constant=st.one_of(EXTREMES.map(lambda x: max(-1e15, min(1e15, x))),
                          st.floats(-1e6, 1e6, width=32)), dtype=DTYPES)
def test_a_constant_return_leaves_nothing_to_explain(seed, n, constant, dtype):
    limit = 6e4 if dtype == torch.float16 else 1e15
    R = torch.full((n,), max(-limit, min(limit, constant)), dtype=dtype)
    y, (g, _) = value_and_grad(lambda V, R: explained_variance(V, R), normal(seed, (n,), dtype), R)
    assert y == 0 and g.isfinite().all()
    assert explained_variance(R, R) == 0


def test_almost_constant_returns_count_as_constant_and_small_variance_does_not():
    R, V = torch.full((1000,), 0.1), normal(0, (1000,), torch.float32)
    R[::2] += 1e-8
    assert explained_variance(V, R) == 0
    R = 100 + 0.01 * normal(1, (1000,), torch.float32)
    assert (explained_variance(R + 0.001 * V, R) - 0.99).abs() < 0.002


def plain(name, x, eps=1e-2):
    "The textbook form of a transform and of its slope, in Python's floats."
    s, a = math.copysign(1, x), abs(x)
    if name == "h": return s * (a / (math.sqrt(a + 1) + 1) + eps * a), 0.5 / math.sqrt(a + 1) + eps
    if name == "symlog": return s * math.log1p(a), 1 / (1 + a)
    if name == "symexp": return s * math.expm1(a), math.exp(a)
    if eps == 0: return s * (a * a + 2 * a), 2 * (a + 1)
    root = math.sqrt((1 + 2 * eps) ** 2 + 4 * eps * a)
    t = 2 * a / (root + 1 + 2 * eps)
    return s * t * (t + 2), 2 * (t + 1) / root


@pytest.mark.parametrize("name", TRANSFORMS)
@given(x=st.lists(st.one_of(EXTREMES, st.floats(-80, 80, width=32),
                            st.floats(-2**-10, 2**-10, width=32)), min_size=1, max_size=8))
def test_transforms_and_their_slopes(name, x):
    if name == "symexp": x = [max(-80.0, min(80.0, v)) for v in x]
    for dtype in (torch.float32, torch.float64):
        t = torch.tensor(x, dtype=dtype)
        y, (g,) = value_and_grad(TRANSFORMS[name], t)
        expected = torch.tensor([plain(name, v) for v in t.tolist()], dtype=dtype)
        torch.testing.assert_close(y, expected[:, 0], rtol=2e-6, atol=1e-40)
        torch.testing.assert_close(g, expected[:, 1], rtol=2e-6, atol=1e-40)
        assert torch.equal(TRANSFORMS[name](-t), -y) and (g > 0).all()


@pytest.mark.parametrize("eps", [0, 1e-3, 1e-2, 1.0])
@given(x=st.lists(st.one_of(EXTREMES.filter(lambda v: abs(v) <= 1e6),
                            st.floats(-1e6, 1e6, width=32)), min_size=1, max_size=8))
def test_round_trips(eps, x):
    x = torch.tensor(x)
    torch.testing.assert_close(
        value_inv_transform(value_transform(x, eps), eps), x, rtol=3e-6, atol=1e-40)
    torch.testing.assert_close(inv_symlog(symlog(x)), x, rtol=3e-6, atol=1e-40)
    y, (g,) = value_and_grad(lambda x: value_transform(x, eps), x.double())
    torch.testing.assert_close(
        (y, g),
        tuple(torch.tensor([plain("h", v, eps) for v in x.tolist()], dtype=torch.float64).T))
    y, (g,) = value_and_grad(lambda x: value_inv_transform(x, eps), x.double())
    torch.testing.assert_close((y, g),
                               tuple(torch.tensor([plain("h inverse", v, eps) for v in x.tolist()],
                                                  dtype=torch.float64).T))


def test_the_slope_at_zero():
    for f, slope in zip(TRANSFORMS.values(), (0.51, 1 / 0.51, 1.0, 1.0)):
        for zero in (0.0, -0.0):
            assert value_and_grad(f, torch.tensor([zero]))[1][0].isclose(torch.tensor(slope))


def test_textbook_values():
    torch.testing.assert_close(
        value_transform(torch.tensor([3.0, -8.0])), torch.tensor([1.03, -2.08]))
    torch.testing.assert_close(
        value_transform(torch.tensor([3.0, -8.0]), 0), torch.tensor([1.0, -2.0]))
    torch.testing.assert_close(
        symlog(torch.tensor([math.e - 1, 1 - math.e])), torch.tensor([1.0, -1.0]))


def test_works_under_vmap_and_compile():
    V, V_old, R, m = *(normal(k, (4, 3, 5)) for k in range(3)), random_mask(3, (4, 3, 5))
    functions = [
        lambda *x: value_loss(*x[:3], 0.2, x[3]), lambda *x: value_clip_fraction(*x[:3], 0.2, x[3]),
        lambda V, _, R, m: explained_variance(V, R, m),
        *(lambda V, V_old, R, m, f=f: f(V) for f in TRANSFORMS.values())]
    for f in functions:
        torch.testing.assert_close(torch.func.vmap(f)(V, V_old, R, m),
                                   torch.stack([f(*row) for row in zip(V, V_old, R, m)]))
    every = lambda *x: sum(f(*x).sum() for f in functions)
    one = (V[0], V_old[0], R[0])
    y, (g, *_) = value_and_grad(
        lambda *x: torch.compile(every, backend="aot_eager")(*x, m[0]), *one)
    value, (grad, *_) = value_and_grad(lambda *x: every(*x, m[0]), *one)
    torch.testing.assert_close((y, g), (value, grad))


@pytest.mark.parametrize("call, error, words", [
    (lambda V, m: value_loss(V.long(), V, V), TypeError,
     "value must have a floating-point dtype, got torch.int64"),
    (lambda V, m: value_loss(V, V.tolist(), V, 0.2), TypeError,
     "value_old must be a torch.Tensor, got list"),
    (lambda V, m: value_loss(V, V, V[0]), ValueError,
     r"returns must have the shape of value, \(2, 3\), got \(3,\)"),
    (lambda V, m: value_loss(V, V[:1], V), ValueError, "value_old must have the shape of value"),
    (lambda V, m: value_loss(V, None, V, 0.2), ValueError,
     "value_old must be given if clip_range is, got None"),
    (lambda V, m: value_loss(V, V, V, 0), ValueError, r"clip_range must be in \(0, inf\), got 0"),
    (lambda V, m: value_loss(V, V, V, -0.2), ValueError, "clip_range"),
    (lambda V, m: value_loss(V, V, V, math.nan), ValueError, "clip_range"),
    (lambda V, m: value_loss(V, V, V, "0.2"), TypeError, "clip_range must be a number, got str"),
    (lambda V, m: value_loss(V, V, V, 0.2, m.float()), TypeError, "mask must be boolean"),
    (lambda V, m: value_loss(V, V, V, 0.2, m[0]), ValueError, "mask must have the shape of value"),
    (lambda V, m: value_clip_fraction(V, V, V, -1), ValueError, "clip_range"),
    (lambda V, m: value_clip_fraction(V, V, V, 0.2, m[0]), ValueError,
     "mask must have the shape of value"),
    (lambda V, m: explained_variance(V, V[0]), ValueError, "returns must have the shape of value"),
    (lambda V, m: explained_variance(V, V.long()), TypeError,
     "returns must have a floating-point dtype"),
    (lambda V, m: explained_variance(V, V, m.long()), TypeError, "mask must be boolean"),
    (lambda V, m: value_transform(V, -1), ValueError, r"eps must be in \[0, inf\), got -1"),
    (lambda V, m: value_inv_transform(V, "a"), TypeError, "eps must be a number, got str"),
    *[(lambda V, m, f=f: f(V.long()), TypeError, "x must have a floating-point dtype")
      for f in TRANSFORMS.values()],
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))


@given(seed=SEEDS, n=st.integers(2, 20),
       size=st.sampled_from([1e-36, 1e-25, 1e-12, 1e12, 1e19, 1e36]), masks=st.booleans())
def test_explained_variance_at_any_size(seed, n, size, masks):
    V, R = normal(seed, (n,), torch.float32), normal(seed + 1, (n,), torch.float32)
    m = random_mask(seed + 2, (n,), 0.8) if masks else None
    value, (g, _) = value_and_grad(lambda V, R: explained_variance(V, R, m), V * size, R * size)
    torch.testing.assert_close(value, explained_variance(V, R, m), rtol=1e-4, atol=1e-4)
    assert g.isfinite().all() or size < 1e-30  # 1 / size, times a number that may be large
    if n > 2 and m is None: assert value != 0
