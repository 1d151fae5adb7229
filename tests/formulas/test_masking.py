import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import JUNK, SEEDS, masked, normal, random_mask, value_and_grad

from rlhf_notes.formulas.masking import (
    AGGREGATION_MODES,
    aggregate_count,
    aggregate_loss,
    aggregation_weights,
    apply_mask,
    centre,
    masked_mean,
    masked_sum,
    masked_var,
)

REDUCTIONS = {
    "sum": masked_sum,
    "mean": masked_mean,
    "var": masked_var,
    "unbiased var": lambda x, m, dim=None: masked_var(x, m, dim, unbiased=True),
}


def reference(name, kept):
    "The same from the list of the elements that count, in plain Python."
    n = len(kept)
    mean = sum(kept) / max(n, 1)
    squares = sum((v - mean) ** 2 for v in kept)
    return {"sum": sum(kept), "mean": mean, "var": squares / max(n, 1),
            "unbiased var": squares / max(n - 1, 1)}[name]


@pytest.mark.parametrize("name", REDUCTIONS)
@given(xm=masked())
def test_equals_the_list_of_what_counts(name, xm):
    x, m = xm
    got = REDUCTIONS[name](x, m)
    wide = x.double()
    assert got.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    assert got.ndim == 0
    torch.testing.assert_close(
        got.double(), torch.tensor(reference(name, wide[m].tolist()), dtype=torch.float64),
        atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", REDUCTIONS)
@given(xm=masked())
def test_no_mask_is_one_of_true(name, xm):
    x, _ = xm
    for t in (x, x[:0]):
        torch.testing.assert_close(
            REDUCTIONS[name](t, None), REDUCTIONS[name](t, torch.ones_like(t, dtype=torch.bool)),
            rtol=0, atol=0)
    assert REDUCTIONS[name](x[:0], None) == 0
    assert REDUCTIONS[name](torch.ones(0, 3), None, 1).shape == (0,)


@pytest.mark.parametrize("name", REDUCTIONS)
@given(xm=masked(min_dims=2), data=st.data())
def test_along_a_dimension_equals_row_by_row(name, xm, data):
    x, m = xm
    dim = data.draw(st.integers(-x.ndim, x.ndim - 1))
    got = REDUCTIONS[name](x, m, dim)
    rows = [REDUCTIONS[name](a, b)
            for a, b in zip(x.movedim(dim, -1).flatten(0, -2), m.movedim(dim, -1).flatten(0, -2))]
    torch.testing.assert_close(got.flatten(), torch.stack(rows))


@pytest.mark.parametrize("name", [*REDUCTIONS, *AGGREGATION_MODES])
@given(xm=masked(min_dims=2, max_dims=2), junk=JUNK)
def test_nothing_leaks_from_under_the_mask(name, xm, junk):
    x, m = xm
    f = REDUCTIONS.get(name) or (lambda x, m: aggregate_loss(x, m, name, group=len(x)))
    value, (grad,) = value_and_grad(lambda t: f(t, m), x)
    dirty, (dirty_grad,) = value_and_grad(lambda t: f(t, m), torch.where(m, x, junk).to(x.dtype))
    assert torch.equal(value, dirty) and torch.equal(grad, dirty_grad)
    assert (grad[~m] == 0).all() and grad.isfinite().all()
    if not m.any(): assert value == 0


@given(xm=masked())
def test_apply_mask(xm):
    x, m = xm
    before = x.clone()
    y = apply_mask(x, m)
    assert torch.equal(y[m], x[m]) and (y[~m] == 0).all() and y.dtype == x.dtype
    assert torch.equal(x, before) and apply_mask(x) is x


@given(seed=SEEDS, rows=st.integers(1, 5), width=st.integers(1, 6), length=st.integers(1, 9))
def test_aggregate_loss_equals_the_loops(seed, rows, width, length):
    loss, mask = normal(seed, (rows, width)), random_mask(seed + 1, (rows, width))
    kept = [[v for v, k in zip(l, m) if k] for l, m in zip(loss.tolist(), mask.tolist())]
    real = [r for r in kept if r]
    expected = {
        "token-mean": sum(map(sum, real)) / max(sum(map(len, real)), 1),
        "seq-mean-token-mean": sum(sum(r) / len(r) for r in real) / max(len(real), 1),
        "seq-mean-token-sum": sum(map(sum, real)) / max(len(real), 1),
        "constant": sum(map(sum, real)) / (rows * length),
    }
    for group in (g for g in range(1, rows + 1) if rows % g == 0):
        prompts = [sum(kept[i:i + group], []) for i in range(0, rows, group)]
        expected["prompt-mean"] = sum(sum(p) / len(p) for p in prompts if p) / max(
            sum(map(bool, prompts)), 1)
        for mode in AGGREGATION_MODES:
            options = mode, length if mode == "constant" else None, None, group
            got = aggregate_loss(loss, mask, *options)
            torch.testing.assert_close(got, torch.tensor(expected[mode], dtype=torch.float64))
            w = aggregation_weights(mask, *options, torch.float64)
            assert (w[~mask] == 0).all()
            torch.testing.assert_close((w * loss).sum(), got)
            torch.testing.assert_close(aggregate_loss(loss, mask, w), got)
    torch.testing.assert_close(
        aggregate_loss(loss, mask, "constant"), aggregate_loss(loss, mask, "constant", width))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@given(seed=SEEDS, rows=st.integers(1, 6), cut=st.integers(0, 6), as_tensor=st.booleans())
def test_the_parts_of_a_batch_add_up_to_it(mode, seed, rows, cut, as_tensor):
    loss, mask = normal(seed, (rows, 5)), random_mask(seed + 1, (rows, 5))
    parts = [(loss[rows], mask[rows]) for rows in (slice(None, cut), slice(cut, None))]
    total = sum(aggregate_count(m, mode, group=1) for _, m in parts)
    total = total.float() if as_tensor else int(total)
    summed = sum(aggregate_loss(*part, mode, total=total, group=1) for part in parts)
    torch.testing.assert_close(summed, aggregate_loss(loss, mask, mode, group=1))
    assert total == {"token-mean": mask.sum(), "constant": rows}.get(mode, mask.any(1).sum())
    w = aggregation_weights(mask, mode, group=rows, dtype=torch.float64)
    summed = aggregate_loss(*parts[0], w[:cut]) + aggregate_loss(*parts[1], w[cut:])
    torch.testing.assert_close(summed, aggregate_loss(loss, mask, mode, group=rows))


def test_a_mean_over_prompts_by_hand():
    loss = torch.tensor([[1.0, 3.0], [2.0, 9.0], [5.0, 7.0], [9.0, 9.0], [4.0, 4.0], [4.0, 4.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0], [0, 0], [0, 0]]).bool()
    assert aggregate_loss(loss, mask, "prompt-mean", group=2).item() == 4  # (2 + 6) / 2
    assert aggregate_loss(loss, mask, "prompt-mean", group=3).item() == pytest.approx(18 / 5)
    for group, words in ((None, "group must be the number .*, got None"),
                         (4, "group must divide the 6 responses, got 4"),
                         (0, "group must be in"), (2.0, "group must be an integer")):
        with pytest.raises((ValueError, TypeError), match=words):
            aggregate_loss(loss, mask, "prompt-mean", group=group)
    with pytest.raises(ValueError, match=r"mode must be weights of the shape .*\(6, 2\), got"):
        aggregate_loss(loss, mask, torch.ones(6))


def test_works_under_vmap_and_compile():
    loss, mask = normal(0, (4, 3, 5)), random_mask(1, (4, 3, 5))
    for mode in AGGREGATION_MODES:
        one_by_one = torch.stack([aggregate_loss(l, m, mode, group=3) for l, m in zip(loss, mask)])
        torch.testing.assert_close(
            torch.func.vmap(lambda l, m: aggregate_loss(l, m, mode, group=3))(loss, mask),
            one_by_one)
    for f in REDUCTIONS.values():
        torch.testing.assert_close(
            torch.func.vmap(f)(loss, mask), torch.stack([f(l, m) for l, m in zip(loss, mask)]))


@pytest.mark.parametrize("call, error, words", [
    (lambda x, m: masked_mean(x, m.long()), TypeError, "mask must be boolean"),
    (lambda x, m: masked_sum(x, m[:1]), ValueError, "mask must have the shape of x"),
    (lambda x, m: masked_var(x, m.tolist()), TypeError, "mask must be a torch.Tensor, got list"),
    (lambda x, m: masked_sum(x, m, 5), ValueError,
     "dim must be None, or different dimensions of x, got 5: .*-2, 1"),
    (lambda x, m: masked_mean(x, m, -3), ValueError, "dim must be None, or .*, got -3"),
    (lambda x, m: masked_var(x, m, (0, 2)), ValueError, r"dim must be None, or .*, got \(0, 2\)"),
    (lambda x, m: masked_sum(x, m, (0, -2)), ValueError,
     r"dim must be None, or different dimensions .*, got \(0, -2\)"),
    (lambda x, m: masked_sum(x, m, True), ValueError, "dim must be None, or .*, got True"),
    (lambda x, m: masked_sum(x, m, "rows"), ValueError, "dim must be None, or .*, got 'rows'"),
    (lambda x, m: aggregate_loss(x[0], m[0]), ValueError,
     r"loss must have the shape \(B, T\), got \(3,\)"),
    (lambda x, m: aggregate_loss(x, m, "sum"), ValueError, "mode must be one of .* got 'sum'"),
    (lambda x, m: aggregate_loss(x, m, "constant", -3), ValueError, "length must be in"),
    (lambda x, m: aggregate_loss(x, m, "constant", "3"), TypeError, "length must be a number"),
    *[(lambda x, m, n=n: aggregate_loss(x, m, "constant", n), TypeError,
       f"^length must be an integer, got {n}$") for n in (2.5, 0.5, 3.0)],
    (lambda x, m: aggregate_loss(x, m, total=-1), ValueError,
     r"^total must be in \[0, 1e18\), got -1$"),
    (lambda x, m: aggregate_loss(x, m, total=2.5), TypeError,
     "^total must be an integer, got 2.5$"),
    (lambda x, m: aggregate_loss(x, m, total=m.sum(1)), ValueError,
     r"^total must have the shape \(\), got \(2,\)$"),
    (lambda x, m: aggregate_loss(x, m, total=10**400), ValueError, "^total must be in"),
    (lambda x, m: centre(x.tolist(), m), TypeError, "^x must be a torch.Tensor, got list$"),
    (lambda x, m: aggregate_count(m, "sum"), ValueError, "^mode must be one of"),
    (lambda x, m: aggregate_loss(x.tolist(), m), TypeError,
     "^loss must be a torch.Tensor, got list"),
    *[(lambda x, m, f=f: f(x + 2j, m), TypeError, "^x must be real, got torch.complex64$")
      for f in (masked_sum, masked_mean, masked_var)],
    *[(lambda x, m, mode=mode: aggregate_loss(x + 2j, m, mode), TypeError,
       "^loss must be real, got torch.complex64$") for mode in AGGREGATION_MODES],
    *[(lambda x, m, f=f, mode=mode: aggregate_loss(x, f(m), mode), error, f"^mask must {words}$")
      for mode in AGGREGATION_MODES for f, error, words in (
          (lambda m: m.tolist(), TypeError, "be a torch.Tensor, got list"),
          (lambda m: m.numpy(), TypeError, "be a torch.Tensor, got ndarray"),
          (lambda m: m.float(), TypeError,
           r"be boolean \(True = counts\), got torch.float32; mask.bool\(\) is"),
          (lambda m: m[:, 0], ValueError, r"have the shape of loss, \(2, 3\), got \(2,\)"),
          (lambda m: m[:, :1], ValueError, r"have the shape of loss, \(2, 3\), got \(2, 1\)"),
          (lambda m: torch.tensor(True), ValueError,
           r"have the shape of loss, \(2, 3\), got \(\)"))],
    *[(lambda x, m, u=u: masked_var(x, m, unbiased=u), TypeError,
       f"^unbiased must be True or False, got {u!r}$") for u in (2, 1, "no", None)],
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int32, torch.int64, torch.bool, torch.bfloat16])
def test_masking_keeps_the_dtype(dtype):
    x, m = torch.tensor([1, 1, 0]).to(dtype), torch.tensor([True, False, True])
    y = apply_mask(x, m)
    assert y.dtype == dtype and y.tolist() == [1, 0, 0]
    large = torch.tensor([2**24 + 1, 2**62 + 1])
    assert torch.equal(apply_mask(large, torch.tensor([True, True])), large)
    torch.testing.assert_close(torch.func.vmap(apply_mask)(x, m), apply_mask(x, m))
    torch.testing.assert_close(
        torch.compile(apply_mask, backend="eager", fullgraph=True)(x, m), apply_mask(x, m))


@pytest.mark.parametrize("dim", [None, 0, 1, (0, 1), (-1,)])
@given(seed=SEEDS, offset=st.sampled_from([0.0, 1e5, -1e7]), masks=st.booleans())
def test_far_from_zero_deviations_and_variance_are_right(dim, seed, offset, masks):
    x = normal(seed, (40, 30), torch.float32) + offset
    m = random_mask(seed + 1, x.shape) if masks else None
    exact, deviation = masked_var(x.double(), m, dim), centre(x, m, dim)
    torch.testing.assert_close(masked_var(x, m, dim).double(), exact, rtol=1e-5, atol=0)
    assert masked_mean(deviation.double(), m, dim).abs().max() < 1e-5
    if dim is None and m is None:
        torch.testing.assert_close(exact, x.double().var(correction=0), rtol=1e-9, atol=0)


@given(seed=SEEDS, unbiased=st.booleans())
def test_the_gradient_of_the_variance(seed, unbiased):
    x, m = normal(seed, (4, 5), scale=3.0) + 7, random_mask(seed + 1, (4, 5))
    _, (grad,) = value_and_grad(lambda t: masked_var(t, m, unbiased=unbiased), x)
    n = int(m.sum())
    torch.testing.assert_close(
        grad, 2 * (x - masked_mean(x, m)) * m / max(n - unbiased, 1), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(
    "shape, length", [((0, 5), None), ((3, 0), None), ((0, 0), None), ((0, 5), 7), ((3, 0), 7)])
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_no_answers_and_no_tokens_give_zero(mode, shape, length):
    for m in (None, torch.zeros(shape, dtype=torch.bool)):
        assert aggregate_loss(torch.empty(shape), m, mode, length, group=1) == 0
    assert math.isclose(aggregate_loss(torch.ones(1, 1), None, "constant", 1), 1)


@pytest.mark.parametrize("f", [masked_sum, masked_mean, masked_var, centre])
@pytest.mark.parametrize("dim", [10**400, -2**63, 2**63, [10**30], "0", 1.0, {}])
def test_a_dimension_that_is_none_is_named(f, dim):
    with pytest.raises(ValueError, match="^dim must be None, or different dimensions of x, got "):
        f(torch.ones(2, 3), dim=dim)
