import math

import numpy as np
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

from rlhf_notes.compat.ding import calculate_kl_div
from rlhf_notes.formulas.kl import (
    KL_KINDS,
    AdaptiveKLController,
    FixedKLController,
    exact_kl,
    kl_estimate,
    kl_loss,
    rollout_rejection_mask,
)
from rlhf_notes.formulas.ratio import importance_ratio

KIND = st.sampled_from(KL_KINDS)


def k3(d, limit=40.0):
    "exp(-d) - 1 + d in float64, term by term where it would cancel; the exponent stops at `limit`."
    if abs(d) >= 0.5: return math.expm1(max(min(-d, limit), -limit)) + max(d, -limit)
    return math.fsum((-d) ** n / math.factorial(n) for n in range(2, 25))


def reference(kind, d, limit=40.0):
    return {"k1": d, "k2": d * d / 2}[kind] if kind != "k3" else k3(d, limit)


def slope(kind, d, limit=40.0):
    return {"k1": 1.0, "k2": d}[kind] if kind != "k3" else -math.expm1(max(min(-d, limit), -limit))


def like(f, d):
    return torch.tensor(
        [f(v) for v in d.double().flatten().tolist()], dtype=torch.float64).reshape(d.shape)


@pytest.mark.parametrize("kind", KL_KINDS)
@given(data=st.data(), shape=shapes(0), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_estimate_and_its_slope_at_any_log_ratio(kind, data, shape, dtype):
    d = data.draw(values(shape,
                         elements=st.one_of(st.sampled_from([0.0, 1e-30, 1e-8, 100.0, -100.0, 1e3,
                                                             -1e3, 1e6, -1e6, 1e18, -1e18]),
                                            st.floats(-30, 30), st.floats(-1e-3, 1e-3)))).to(dtype)
    got, (g, g_ref) = value_and_grad(lambda a, b: kl_estimate(a, b, kind), d, torch.zeros_like(d))
    limit, rtol = (40.0, 2e-6) if dtype == torch.float32 else (350.0, 1e-13)
    tiny = torch.finfo(dtype).tiny
    torch.testing.assert_close(
        got.double(), like(lambda v: reference(kind, v, limit), d), rtol=rtol, atol=tiny)
    torch.testing.assert_close(
        g.double(), like(lambda v: slope(kind, v, limit), d), rtol=rtol, atol=tiny)
    torch.testing.assert_close(g_ref, -g)
    assert got.dtype == dtype and got.shape == d.shape
    if kind != "k1": assert (got >= 0).all()


@given(seed=SEEDS, shape=shapes(), dtype=DTYPES, kind=KIND, scale=st.sampled_from([1e-3, 1.0, 5.0]))
def test_estimate_takes_halves_in_float32(seed, shape, dtype, kind, scale):
    logp, logp_ref = normal(seed, shape, dtype, scale), normal(seed + 1, shape, dtype, scale)
    got = kl_estimate(logp, logp_ref, kind)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        got.double(), like(lambda v: reference(kind, v), logp.double() - logp_ref.double()),
        rtol=1e-4, atol=1e-6)


@given(seed=SEEDS, shape=shapes(), dtype=DTYPES, kind=KIND)
def test_calculate_kl_div_is_the_mean(seed, shape, dtype, kind):
    log_ratio = normal(seed, shape, dtype)
    got, (g,) = value_and_grad(lambda d: calculate_kl_div(d, kind), log_ratio)
    flat = log_ratio.double().flatten().tolist()
    assert got.ndim == 0 and got.dtype != torch.float16 and got.dtype != torch.bfloat16
    torch.testing.assert_close(got.double(),
                               torch.tensor(sum(reference(kind, v) for v in flat) / len(flat),
                                            dtype=torch.float64), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(g.double(), like(lambda v: slope(kind, v) / len(flat), log_ratio),
                               rtol=2e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-5,
                               atol=1e-3 if dtype in (torch.float16, torch.bfloat16) else 1e-7)


def softmax(logits):
    top = max(logits)
    e = [math.exp(v - top) for v in logits]
    return [v / sum(e) for v in e]


@given(seed=SEEDS, lead=shapes(0, 2, 3), V=st.integers(2, 7), blocked=st.booleans(),
       scale=st.sampled_from([0.1, 1.0, 5.0]))
def test_exact_kl_equals_the_loop(seed, lead, V, blocked, scale):
    logits, logits_ref = (normal(seed, (*lead, V), scale=scale),
                          normal(seed + 1, (*lead, V), scale=scale))
    if blocked:  # what pi cannot do; sometimes neither can the reference
        no = random_mask(seed + 2, logits.shape, 0.4)
        no[..., 0] = False
        logits = torch.where(no, -math.inf, logits)
        logits_ref = torch.where(
            no & random_mask(seed + 3, logits.shape, 0.5), -math.inf, logits_ref)
    got, (g, g_ref) = value_and_grad(exact_kl, logits, logits_ref)
    rows = [[softmax(x) for x in t.reshape(-1, V).tolist()] for t in (logits, logits_ref)]
    expected = [math.fsum(p * math.log(p / q) for p, q in zip(*row) if p > 0) for row in zip(*rows)]
    torch.testing.assert_close(
        got.flatten(), torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-9)
    p, q = [torch.tensor(r, dtype=torch.float64).reshape(logits.shape) for r in rows]
    torch.testing.assert_close(
        g, p * (torch.where(p > 0, (p / q).log(), 0.0) - got.unsqueeze(-1)), atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(g_ref, q - p, atol=1e-12, rtol=1e-9)
    assert (got > -1e-12).all() and got.shape == torch.Size(lead)
    # logits have no zero point
    torch.testing.assert_close(exact_kl(logits + 3, logits_ref - 7), got)
    assert exact_kl(logits, logits).abs().max() == 0


def test_exact_kl_at_the_edges():
    inf = math.inf
    assert exact_kl(torch.tensor([0., 0.]), torch.tensor([0., -inf])) == inf
    for far in (-1e9, -200.0):  # probability that is zero in floating point only
        value, grads = value_and_grad(exact_kl, torch.tensor([0., far]), torch.tensor([0., -inf]))
        assert value == 0 and all(g.isfinite().all() for g in grads)
    for dtype in (torch.float16, torch.bfloat16):
        wide = [normal(s, (3, 50), dtype, 3.0) for s in (0, 1)]
        got = exact_kl(*wide)
        assert got.dtype == torch.float32
        torch.testing.assert_close(
            got.double(), exact_kl(*[t.double() for t in wide]), rtol=1e-4, atol=1e-5)


def loss_reference(kind, through, logp, logp_ref, ratio, mask):
    "Value and gradients by plain Python, in float64: (value, by logp, by ratio)."
    n = max(sum(mask), 1)
    value, by_logp, by_ratio = 0.0, [], []
    for a, b, r, m in zip(logp, logp_ref, ratio, mask):
        d = a - b
        value += m and r * reference(kind, d) / n
        by_logp.append(m * r * slope("k2" if through else kind, d) / n if m else 0.0)
        by_ratio.append(reference(kind, d) / n if m and not through else 0.0)
    return value, by_logp, by_ratio


@given(xm=masked(), kind=KIND, through=st.booleans(), with_ratio=st.booleans(),
       with_mask=st.booleans())
def test_loss_equals_the_loop(xm, kind, through, with_ratio, with_mask):
    logp, m = xm
    logp = logp.float() if logp.dtype in (torch.float16, torch.bfloat16) else logp
    logp_ref, ratio = normal(1, logp.shape, logp.dtype), normal(2, logp.shape, logp.dtype).exp()
    before = [t.clone() for t in (logp, logp_ref, ratio, m)]
    tensors = (logp, logp_ref, ratio) if with_ratio else (logp, logp_ref)
    got, grads = value_and_grad(
        lambda a, b, r=None: kl_loss(a, b, kind, r, m if with_mask else None, through), *tensors)
    value, by_logp, by_ratio = loss_reference(
        kind, through,
        *[t.double().flatten().tolist()
          for t in (logp, logp_ref, ratio if with_ratio else torch.ones_like(ratio))],
        (m if with_mask else torch.ones_like(m)).flatten().tolist())
    assert got.ndim == 0
    torch.testing.assert_close(
        got.double(), torch.tensor(float(value), dtype=torch.float64), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads[0].double().flatten(),
                               torch.tensor(by_logp, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    assert grads[1] is None  # the reference is a constant
    if with_ratio and not through:
        torch.testing.assert_close(
            grads[2].double().flatten(), torch.tensor(by_ratio, dtype=torch.float64), rtol=1e-5,
            atol=1e-6)
    if with_ratio and through: assert grads[2] is None
    assert all(torch.equal(a, b) for a, b in zip(before, (logp, logp_ref, ratio, m)))


@pytest.mark.parametrize("which", [0, 1, 2])
@given(xm=masked(), kind=KIND, through=st.booleans(), junk=JUNK)
def test_nothing_leaks_from_under_the_mask(which, xm, kind, through, junk):
    logp, m = xm
    clean = [logp, normal(1, logp.shape, logp.dtype), normal(2, logp.shape, logp.dtype).exp()]
    dirty = [torch.where(m, t, junk).to(t.dtype) if i == which else t for i, t in enumerate(clean)]
    f = lambda a, b, r: kl_loss(a, b, kind, r, m, through)
    (value, grads), (v, gs) = value_and_grad(f, *clean), value_and_grad(f, *dirty)
    assert torch.equal(value, v)
    for a, b in zip(grads, gs):
        if a is not None: assert torch.equal(a, b) and (b[~m] == 0).all() and b.isfinite().all()
    if not m.any(): assert v == 0


@pytest.mark.parametrize("d", [1e30, -1e30, 3e38, -3e38])
def test_log_ratios_of_masked_logits(d):
    "Where someone has masked logits with the lowest float."
    for kind in ("k1", "k3"):
        value, (g,) = value_and_grad(
            lambda x: kl_estimate(x, torch.zeros(1), kind), torch.tensor([d]))
        assert value.isfinite() and g.isfinite() and (kind == "k1" or value > 0)
        value, (g,) = value_and_grad(
            lambda x: kl_loss(x, torch.zeros(1), kind, straight_through=True), torch.tensor([d]))
        assert value.isfinite() and (kind == "k1" or value > 0) and g == torch.tensor([d])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("kind", KL_KINDS)
def test_no_nan_arises_under_the_mask_even_on_the_way(kind, through):
    m = torch.tensor([True, False])
    logp, logp_ref, ratio = [
        torch.tensor([v, math.nan], requires_grad=True) for v in (-1.0, -2.0, 1.5)]
    with torch.autograd.detect_anomaly():  # raises where a backward function returns NaN
        kl_loss(logp, logp_ref, kind, ratio, m, through).backward()


@given(data=st.data(), kind=KIND, through=st.booleans(), with_ratio=st.booleans())
def test_no_log_ratio_gives_nan_or_an_infinite_gradient(data, kind, through, with_ratio):
    extremes = st.sampled_from(
        [0.0, 1e-8, 1.0, -1.0, 50.0, -50.0, 100.0, -100.0, 1e3, -1e3, 1e6, -1e6])
    logp, logp_ref, logp_old = [
        data.draw(values((4,), elements=extremes, dtype=torch.float32)) for _ in range(3)]
    value, (g, _) = value_and_grad(
        lambda a, b: kl_loss(a, b, kind, importance_ratio(a, logp_old) if with_ratio else None,
                             None, through), logp, logp_ref)
    assert value.isfinite() and g.isfinite().all()


# The table of values and gradients, for any three distributions: a batch that holds each action in
# proportion to its probability is its own expectation.
PLACEMENTS = {
    "loss": (lambda new, ref, old, kind: kl_loss(new, ref, kind), "new", ("zero", "kl", "forward")),
    "reward": (lambda new, ref, old, kind: (kl_estimate(new, ref, kind).detach() * new).mean(),
               "new", ("kl", None, "kl - forward")),
    "times ratio": (lambda new, ref, old, kind: kl_loss(new, ref, kind, importance_ratio(new, old)),
                    "old", ("kl", "mean k2", "kl")),
    "straight through": (lambda new, ref, old, kind: kl_loss(new, ref, kind, straight_through=True),
                         "new", ("kl", "kl", "kl")),
    "straight through times ratio": (lambda new, ref, old, kind: kl_loss(new, ref, kind,
                                                                         importance_ratio(new, old),
                                                                         straight_through=True),
                                     "old", ("kl", "kl", "kl")),
    "no ratio": (lambda new, ref, old, kind: kl_loss(new, ref, kind), "old",
                 ("away from old", None, None)),
}


@pytest.mark.parametrize("name", PLACEMENTS)
@given(seed=SEEDS, V=st.integers(2, 6))
def test_expected_gradient_of_each_placement(name, seed, V):
    f, source, verdicts = PLACEMENTS[name]
    counts = {
        n: torch.randint(1, 7, (V,), generator=torch.Generator().manual_seed(seed + i)).double()
        for i, n in enumerate(("new", "ref", "old"))}
    logp = {n: (c / c.sum()).log() for n, c in counts.items()}
    action = torch.arange(V).repeat_interleave(counts[source].long())
    gradient = lambda objective: torch.func.grad(
        lambda z: objective(z.log_softmax(-1)))(logp["new"])
    truth = {
        "zero": torch.zeros(V, dtype=torch.float64),
        "kl": gradient(lambda p: (p.exp() * (p - logp["ref"])).sum()),
        "forward": gradient(lambda p: (logp["ref"].exp() * (logp["ref"] - p)).sum()),
        "mean k2": gradient(lambda p: (p.exp() * (p - logp["ref"]) ** 2 / 2).sum()),
        "away from old": gradient(lambda p: (logp["old"].exp() * (p - logp["old"])).sum()),
    }
    truth["kl - forward"] = truth["kl"] - truth["forward"]
    mean = {"k1": lambda d: d, "k2": lambda d: d ** 2 / 2, "k3": lambda d: torch.exp(-d) - 1 + d}
    for kind, verdict in zip(KL_KINDS, verdicts):
        objective = lambda p: f(p[action], logp["ref"][action], logp["old"][action], kind)
        if verdict:
            torch.testing.assert_close(gradient(objective), truth[verdict], atol=1e-12, rtol=1e-9)
        if name not in ("reward", "no ratio"):
            expected = (logp["new"].exp() * mean[kind](logp["new"] - logp["ref"])).sum()
            torch.testing.assert_close(objective(logp["new"]), expected, atol=1e-12, rtol=1e-9)
            if kind != "k2":
                torch.testing.assert_close(
                    expected, exact_kl(logp["new"], logp["ref"]), atol=1e-12, rtol=1e-9)


def test_works_under_vmap_and_compile():
    logp, logp_ref, ratio, mask = (normal(0, (4, 3, 5)), normal(1, (4, 3, 5)),
                                   normal(2, (4, 3, 5)).exp(), random_mask(3, (4, 3, 5)))
    for kind in KL_KINDS:
        for f in (lambda a, b, r, m: kl_estimate(a, b, kind),
                  lambda a, b, r, m: calculate_kl_div(a - b, kind),
                  lambda a, b, r, m: kl_loss(a, b, kind, r, m),
                  lambda a, b, r, m: kl_loss(a, b, kind, r, m, True)):
            args = logp, logp_ref, ratio, mask
            torch.testing.assert_close(
                torch.func.vmap(f)(*args), torch.stack([f(*row) for row in zip(*args)]))
            per_row = torch.func.vmap(torch.func.grad(lambda *row: f(*row).sum()))(*args)
            torch.testing.assert_close(per_row,
                                       torch.stack([value_and_grad(lambda a: f(a, b, r, m), a)[1][0]
                                                    for a, b, r, m in zip(*args)]))
            torch.testing.assert_close(
                torch.compile(f, backend="eager", fullgraph=True)(*args), f(*args))
    torch.testing.assert_close(torch.func.vmap(exact_kl)(logp, logp_ref), exact_kl(logp, logp_ref))
    torch.testing.assert_close(
        torch.compile(exact_kl, backend="eager", fullgraph=True)(logp, logp_ref),
        exact_kl(logp, logp_ref))


@given(init=st.floats(1e-4, 10), target=st.floats(0.01, 100), horizon=st.integers(10, 10**5),
       batches=st.lists(st.tuples(st.floats(-50, 500), st.floats(0, 4.9)), min_size=1, max_size=20),
       as_tensor=st.booleans())
def test_adaptive_controller_equals_the_loop(init, target, horizon, batches, as_tensor):
    controller = AdaptiveKLController(init, target, horizon)
    assert controller.coef == init
    beta = init
    for kl, share in batches:
        n = share * horizon
        relative = (kl - target) / target
        beta = beta * (
            1 + (0.2 if relative > 0.2 else -0.2 if relative < -0.2 else relative) * n / horizon)
        before = controller.coef
        got = controller.update(torch.tensor(kl, dtype=torch.float64) if as_tensor else kl, n)
        assert got == controller.coef > 0 and math.isclose(got, beta, rel_tol=1e-9)
        if n:
            assert (got > before) == (kl > target) or math.isclose(kl, target) or math.isclose(
                got, before)
    resumed = AdaptiveKLController(1.0, target, horizon)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.update(3 * target, 1) == controller.update(3 * target, 1)


def test_the_coefficient_is_pythons_whatever_was_measured():
    "A checkpoint that holds a number of NumPy's cannot be read."
    controller = AdaptiveKLController(np.float64(0.1), np.float64(6.0), np.float64(1e4))
    assert type(
        controller.update(np.float64(9.0), 64)) is type(controller.state_dict()["coef"]) is float


@given(kl=st.floats(-20, 40), share=st.floats(0, 50), horizon=st.integers(1, 10**5))
def test_only_an_update_that_would_end_at_zero_or_below_is_refused(kl, share, horizon):
    n = int(share * horizon)
    controller, factor = (AdaptiveKLController(0.15, 6.0, horizon),
                          1 + min(max(kl / 6 - 1, -0.2), 0.2) * n / horizon)
    if factor > 0: assert controller.update(kl, n) == controller.coef == 0.15 * factor > 0
    else:
        with pytest.raises(ValueError, match=rf"^n must be less than .*, got {n}$"):
            controller.update(kl, n)
        assert controller.coef == 0.15


def test_upwards_a_batch_may_be_many_horizons():
    assert math.isclose(AdaptiveKLController(0.15, 6.0, 100).update(12.0, 512), 0.3036)
    assert AdaptiveKLController(0.15, 6.0, 100).update(6.0, 512) == 0.15
    assert math.isclose(AdaptiveKLController(0.15, 6.0, 100).update(5.4, 512), 0.15 * (1 - 0.512))
    controller = AdaptiveKLController(0.15, 6.0, 100)
    for n in (500, 512, 10**9):
        with pytest.raises(ValueError, match=f"n must be less than 500, .* got {n}"):
            controller.update(4.0, n)
    assert controller.coef == 0.15 and math.isclose(controller.update(4.0, 499), 0.15 * 0.002)


@given(coef=st.floats(0, 100), kl=st.floats(-1e3, 1e3), n=st.integers(0, 10**6))
def test_fixed_controller_stays(coef, kl, n):
    controller = FixedKLController(coef)
    assert controller.update(kl, n) == controller.update(
        torch.tensor(kl), n) == controller.coef == coef
    other = FixedKLController(0.0)
    other.load_state_dict(controller.state_dict())
    assert other.coef == coef


def test_defaults_are_those_of_the_paper():
    assert math.isclose(AdaptiveKLController().update(7.2, 10000), 0.15 * 1.2)
    assert math.isclose(AdaptiveKLController().update(4.8, 10000), 0.15 * 0.8)
    logp, logp_ref = normal(0, (5,)), normal(1, (5,))
    assert torch.equal(kl_estimate(logp, logp_ref), logp - logp_ref)
    assert torch.equal(kl_loss(logp, logp_ref), ((logp - logp_ref) ** 2 / 2).mean())


@pytest.mark.parametrize("call, error, words", [
    (lambda x: kl_estimate(x.tolist(), x), TypeError, "logp must be a torch.Tensor, got list"),
    (lambda x: kl_estimate(x, x.long()), TypeError, "logp_ref must have a floating-point dtype"),
    (lambda x: kl_estimate(x, x[:1]), ValueError, "logp_ref must have the shape of logp"),
    (lambda x: kl_estimate(x, x, "abs"), ValueError,
     "kind must be one of 'k1', 'k2', 'k3', got 'abs'"),
    (lambda x: kl_estimate(x, x, None), ValueError, "kind must be one of"),
    (lambda x: calculate_kl_div(x, "k4"), ValueError,
     "kl_type must be one of 'k1', 'k2', 'k3', got 'k4'"),
    (lambda x: calculate_kl_div(0.3, "k1"), TypeError, "log_ratio must be a torch.Tensor"),
    (lambda x: exact_kl(x, x[:, :2]), ValueError, "logits_ref must have the shape of logits"),
    (lambda x: exact_kl(x.int(), x), TypeError, "logits must have a floating-point dtype"),
    (lambda x: kl_loss(x, x[0]), ValueError, "logp_ref must have the shape of logp"),
    (lambda x: kl_loss(x, x, "k1+"), ValueError, "kind must be one of"),
    (lambda x: kl_loss(x, x, ratio=x[:, :1]), ValueError, "ratio must have the shape of logp"),
    (lambda x: kl_loss(x, x, ratio=x > 0), TypeError, "ratio must have a floating-point dtype"),
    (lambda x: kl_loss(x, x, mask=x), TypeError, "mask must be boolean"),
    (lambda x: kl_loss(x, x, mask=x[0] > 0), ValueError, "mask must have the shape of logp"),
    (lambda x: FixedKLController(-0.1), ValueError, "coef must be in"),
    (lambda x: FixedKLController(x), TypeError, "coef must be a number"),
    (lambda x: FixedKLController(math.nan), ValueError, "coef must be in"),
    (lambda x: AdaptiveKLController(0), ValueError, "init must be in"),
    (lambda x: AdaptiveKLController(target=0), ValueError, "target must be in"),
    (lambda x: AdaptiveKLController(target=-6), ValueError, "target must be in"),
    (lambda x: AdaptiveKLController(horizon=0), ValueError, "horizon must be in"),
    (lambda x: AdaptiveKLController(horizon="10000"), TypeError, "horizon must be a number"),
    (lambda x: AdaptiveKLController().update(math.nan, 1), ValueError,
     r"kl must be in \(-inf, inf\), got nan"),
    (lambda x: AdaptiveKLController().update(torch.tensor(math.inf), 1), ValueError,
     "kl must be in"),
    (lambda x: AdaptiveKLController().update(x, 1), TypeError, "kl must be a number, got Tensor"),
    (lambda x: AdaptiveKLController().update("6", 1), TypeError, "kl must be a number, got str"),
    (lambda x: AdaptiveKLController().update(6., -1), ValueError, "n must be in"),
    (lambda x: AdaptiveKLController().update(6., math.inf), ValueError, "n must be in"),
    (lambda x: AdaptiveKLController().update(6., math.nan), ValueError, "n must be in"),
    (lambda x: AdaptiveKLController().update(12., math.inf), ValueError, "n must be in"),
    (lambda x: AdaptiveKLController().update(0., 50000), ValueError,
     r"^n must be less than 50000, so that beta stays above 0 at an error of -0.2, got 50000$"),
    (lambda x: AdaptiveKLController().update(5.4, 100001), ValueError,
     r"^n must be less than 100000, so that beta stays above 0 at an error of -0.1, got 100001$"),
    *[(lambda x, s=s: kl_loss(x, x, straight_through=s), TypeError,
       f"^straight_through must be True or False, got {s!r}") for s in ("x", 1, None)],
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.ones(2, 3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_refused_kl_leaves_the_coefficient_alone(bad):
    controller = AdaptiveKLController()
    with pytest.raises(ValueError, match="kl"): controller.update(bad, 64)
    assert controller.coef == 0.15


@pytest.mark.parametrize("V, scale", [(1000, 1.0), (50257, 1.0), (50257, 5.0)])
@pytest.mark.parametrize("step", [5e-5, 1e-3, 1e-2, 0.1])
def test_exact_kl_of_policies_close_together(V, scale, step):
    """From a KL of about 1e-9 to one of 1e-2, as a number and as a gradient; the reference adds
    terms that are never negative.
    """
    for seed in range(3):
        logits = normal(seed, (V,), torch.float32, scale)
        logits_ref = logits + normal(seed + 100, (V,), torch.float32, step)
        logp, logp_ref = (z.double().log_softmax(-1) for z in (logits, logits_ref))
        p, d = logp.exp(), logp - logp_ref
        exact = (p * (torch.expm1(-d) + d)).sum() if step > 1e-2 else (
            p * d.square() / 2 * (1 - d / 3 * (1 - d / 4 * (1 - d / 5)))).sum()
        got, (g, g_ref) = value_and_grad(exact_kl, logits, logits_ref)
        assert got.dtype == torch.float32 and abs(got.double() / exact - 1) < 1e-4
        assert (g.double() - p * (d - exact)).norm() < 1e-4 * (p * (d - exact)).norm()
        assert (g_ref.double() - (logp_ref.exp() - p)).norm() < 1e-4 * (logp_ref.exp() - p).norm()


@pytest.mark.parametrize("with_ratio", [False, True])
@pytest.mark.parametrize("kind", KL_KINDS)
def test_straight_through_at_an_infinite_log_ratio(kind, with_ratio):
    inf = math.inf
    for d in (inf, -inf):
        for logp, logp_ref in (([d, 0.5], [0.0, 0.0]), ([0.0, 0.5], [-d, 0.0])):
            args = torch.tensor(logp), torch.tensor(logp_ref)
            r = torch.ones(2) if with_ratio else None
            value, (g, _) = value_and_grad(lambda a, b: kl_loss(a, b, kind, r, None, True), *args)
            assert torch.equal(value, kl_loss(*args, kind)) and not value.isnan()
            assert g.tolist() == [0, 0.25]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_exact_kl_of_one_token_above_a_large_vocabulary(dtype):
    logits, logits_ref = torch.zeros(2, 1, 151_936, dtype=dtype)
    logits[0, 0], logits_ref[0, 1] = 16.7, 16.7
    p, q = (z.double().log_softmax(-1) for z in (logits, logits_ref))
    torch.testing.assert_close(
        exact_kl(logits, logits_ref).double(), (p.exp() * (p - q)).sum(-1), rtol=2e-7, atol=0)


# ---- which responses to leave out

@given(seed=SEEDS, kind=st.sampled_from(KL_KINDS), threshold=st.sampled_from([0.01, 0.3, 1.0]),
       dtype=DTYPES, keep=st.sampled_from([0.0, 0.5, 1.0]))
def test_rejection_equals_the_loop(seed, kind, threshold, dtype, keep):
    old, rollout = (normal(seed + k, (5, 4), dtype) for k in range(2))
    m, before = random_mask(seed + 2, (5, 4), keep), (old.clone(), rollout.clone())
    formula = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
    expected = []
    for a, b, row in zip(old.tolist(), rollout.tolist(), m.tolist()):
        each = [formula[kind](q - p) for p, q, k in zip(a, b, row) if k]
        expected.append(sum(each) / max(len(each), 1))
    got = rollout_rejection_mask(old, rollout, kind, threshold, m)
    assert got.shape == (5, 1) and got.dtype == torch.bool
    for k, mean in zip(got[:, 0].tolist(), expected):
        if abs(mean - threshold) > 1e-3 * threshold: assert k == (mean <= threshold)
    assert torch.equal(before[0], old) and torch.equal(before[1], rollout)


def test_rejection_by_hand():
    rollout = torch.zeros(3, 2)
    old = torch.tensor([[1.0, -1.0], [-0.5, -0.5], [0.5, 0.5]])          # d = rollout - old
    kept = {"k1": [True, False, True], "k2": [False, True, True], "k3": [False, True, True]}
    for kind, expected in kept.items():
        assert rollout_rejection_mask(old, rollout, kind, 0.2)[:, 0].tolist() == expected
    at_it = torch.tensor([[-0.5, -0.5]])                                 # at most the threshold
    assert rollout_rejection_mask(at_it, 0 * at_it, "k1", 0.5).item()
    assert not rollout_rejection_mask(at_it, 0 * at_it, "k1", 0.49).item()
    assert torch.equal(rollout_rejection_mask(old / 40, rollout),
                       rollout_rejection_mask(old / 40, rollout, "k1", 0.01))


@given(seed=SEEDS, kind=st.sampled_from(KL_KINDS), junk=JUNK, other=JUNK)
def test_rejection_does_not_see_what_is_masked(seed, kind, junk, other):
    old, rollout, m = normal(seed, (4, 3)), normal(seed + 1, (4, 3)), random_mask(seed + 2, (4, 3))
    clean = rollout_rejection_mask(old, rollout, kind, 0.3, m)
    dirty = old.masked_fill(~m, junk), rollout.masked_fill(~m, other)
    assert torch.equal(clean, rollout_rejection_mask(*dirty, kind, 0.3, m))
    assert rollout_rejection_mask(old, rollout, kind, 0.3, torch.zeros_like(m)).all()
    assert rollout_rejection_mask(old * math.nan, rollout, kind, 0.3).all()      # stays visible


@pytest.mark.parametrize("call, error, words", [
    (lambda x, m: rollout_rejection_mask(x[0], x[0]), ValueError,
     r"logp_old must have the shape \(B, T\)"),
    (lambda x, m: rollout_rejection_mask(x, x[:1]), ValueError,
     "logp_rollout must have the shape of"),
    (lambda x, m: rollout_rejection_mask(x, x, "k4"), ValueError,
     "kind must be one of 'k1', 'k2', 'k3'"),
    (lambda x, m: rollout_rejection_mask(x, x, "k1", 0.0), ValueError, "threshold must be in"),
    (lambda x, m: rollout_rejection_mask(x, x, mask=m[0]), ValueError,
     "mask must have the shape of"),
])
def test_bad_input_of_the_rejection_is_named(call, error, words):
    with pytest.raises(error, match=words): call(torch.ones(2, 3), torch.ones(2, 3).bool())
