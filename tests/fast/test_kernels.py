"""The Triton kernels. Where there is no GPU they are interpreted on the CPU, in a process of their
own, since Triton decides that when it is imported; and compiled for GPUs that are not there.
"""
import math
import os
import subprocess
import sys

import pytest
import torch
from strategies import normal, random_mask, value_and_grad

from rlhf_notes import fast
from rlhf_notes.fast import linear, rows
from rlhf_notes.formulas import advantage
from rlhf_notes.formulas.logprob import (
    entropy_from_logits,
    linear_log_probs,
    log_probs_and_entropy,
    selective_log_softmax,
)
from rlhf_notes.language.sampling import draw

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
triton = pytest.mark.skipif(not fast.HAS_TRITON, reason="triton is not installed")
if fast.HAS_TRITON:
    from rlhf_notes.fast import kernels
inside = pytest.mark.skipif(
    not INTERPRETED, reason="run by test_kernels_in_the_interpreter, in a process of its own")
outside = pytest.mark.skipif(INTERPRETED, reason="this is that process")


@outside
def test_nothing_of_triton_is_imported_or_used_on_the_cpu():
    code = ("import sys, torch; from rlhf_notes import fast, formulas; assert not "
            "fast.has_kernels(torch.ones(3)); print('triton' in sys.modules)")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env=env).stdout.strip() == "False"


def test_only_plain_tensors_are_computed_with():
    seen = []
    def f(x):
        seen.append(fast.eager(x))
        return x * 2
    x = torch.ones(3)
    f(x)
    f(torch.nn.Parameter(x))
    torch.func.vmap(f)(x)
    torch.func.grad(lambda x: f(x).sum())(x)
    assert seen == [True, True, False, False] and not fast.has_kernels(x.double())


@triton
def test_triton_that_cannot_work_is_left_aside_with_one_warning(monkeypatch, recwarn):
    def broken(*_): raise RuntimeError("no C compiler")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "scan", broken)
    fast._runs.cache_clear()
    try:
        z, i = torch.randn(3, 5), torch.arange(3)
        monkeypatch.setattr(rows, "LARGE", 0)
        for _ in range(2):
            torch.testing.assert_close(selective_log_softmax(z, i), z.log_softmax(-1)[range(3), i])
        assert ([str(w.message) for w in recwarn if "Triton kernels cannot run" in str(w.message)]
                == ["the Triton kernels cannot run on cpu, PyTorch's code does: "
                    "RuntimeError('no C compiler')"])
    finally: fast._runs.cache_clear()


@triton
@outside
def test_kernels_in_the_interpreter():
    p = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W",
                        "ignore", __file__], capture_output=True, text=True,
                       env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                       cwd=os.path.dirname(__file__), timeout=300)
    assert p.returncode == 0 and "15 passed" in p.stdout, p.stdout[-3000:] + p.stderr[-1000:]


@triton
@pytest.mark.skipif(INTERPRETED, reason="an interpreter does not compile")
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_for_gpus(capability):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    numbers = {"per_part": "i32", "stride_part": "i64", "stride_row": "i32", "stride_out": "i32",
               "inv_temperature": "fp32", "gamma": "fp32", "decay": "fp32", "I": "*i64",
               "TOKEN": "*i64", "TERMINATED": "*i1", "DONE": "*i1"}
    sizes = dict(BLOCK=256, COLUMNS=8)
    for kernel, pointers, constants in (
        (kernels._forward, dict(Z="*bf16", V="i32"), dict(ENTROPY=True, LANES=1024)),
        (kernels._backward, dict(Z="*bf16", OUT="*bf16", V="i32"), dict(ENTROPY=True, BLOCK=4096)),
        (kernels._draw, dict(Z="*bf16", V="i32"), dict(BLOCK=4096)),
        (kernels._scan, {}, sizes),
        (kernels._gae, {}, sizes)):
        names = kernel.arg_names
        known = numbers | pointers | {
            n: "i32" for n in names if n in ("T", "N") or n.endswith(("_t", "_n"))}
        signature = {n: "constexpr" if n in constants else known.get(n, "*fp32") for n in names}
        made = compile(ASTSource(fn=kernel, signature=signature,
                                 constexprs={(names.index(n),): v for n, v in constants.items()}),
                       target=GPUTarget("cuda", capability, 32))
        assert f".target sm_{capability}" in made.asm["ptx"] and len(made.asm["cubin"]) > 1000


@pytest.fixture(autouse=True)
def however_few(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(rows, "LARGE", 0)
        monkeypatch.setattr(linear, "CHUNK", 60)


def reference(z, i, temperature):
    logp = (z.double() / temperature).log_softmax(-1)
    return torch.stack([logp.gather(-1, i[..., None])[..., 0],
                        -(logp.exp() * torch.where(logp > -math.inf, logp, 0.0)).sum(-1)])


@inside
def test_rows_in_every_layout_and_dtype():
    whole = normal(0, (2, 4, 4200), scale=3.0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for z, temperature in ((whole[0, 0, :37], 1.0),
                               (whole[:, 0, :64], 0.7),
                               (whole[:, :-1], 2.0),
                               (whole[:, 1:, :16].transpose(0, 1), 1.0),
                               (whole[..., :1], 1.0),
                               (whole + 1e3, 1.0),
                               (whole[:, :, None, :5], 1.0),
                               (whole[:0], 1.0)):
            z = z.to(dtype).detach()
            assert fast.has_kernels(z)
            i = (torch.arange(math.prod(z.shape[:-1])) * 7 % z.shape[-1]).view(z.shape[:-1])
            weight = normal(1, (2, *i.shape))
            exact = z.double().requires_grad_(True)
            (expected,) = torch.autograd.grad(
                (reference(exact, i, temperature) * weight).sum(), exact)
            leaf = z.requires_grad_(True)
            y = torch.stack(log_probs_and_entropy(leaf, i, temperature))
            (got,) = torch.autograd.grad((y * weight).sum(), leaf)
            torch.testing.assert_close(
                y.detach().double(), reference(z.detach(), i, temperature), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(
                got.double(), expected, atol=2e-6,
                rtol={torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5))
            with torch.no_grad():
                assert torch.equal(selective_log_softmax(z, i, temperature), y[0])
                assert torch.equal(entropy_from_logits(z, temperature), y[1])


@inside
def test_the_gradient_in_place_of_the_logits():
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((5, 37), (2, 3, 4200)):
            z = normal(0, shape, scale=3.0).to(dtype).requires_grad_(True)
            i = torch.arange(math.prod(shape[:-1])).view(shape[:-1]) % 37
            for f in (lambda z, **o: selective_log_softmax(z, i, 0.7, **o),
                      lambda z, **o: entropy_from_logits(z, 0.7, **o),
                      lambda z, **o: torch.stack(log_probs_and_entropy(z, i, 0.7, **o))):
                (expected,) = torch.autograd.grad(f(z).sin().sum(), z)
                logits = z * 1
                (got,) = torch.autograd.grad(f(logits, inplace_backward=True).sin().sum(), logits)
                assert torch.equal(got, expected) and got.data_ptr() == logits.data_ptr()


@inside
def test_whoever_else_needs_the_overwritten_logits_is_told():
    W, i = normal(0, (15, 40)).float().requires_grad_(True), torch.arange(15)
    def logp(z): return selective_log_softmax(z, i, inplace_backward=True)
    for of in (lambda z: entropy_from_logits(z) + logp(z), lambda z: logp(z) + logp(z),
               lambda z: z.logsumexp(-1) ** 2 + logp(z)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            of(W * 1).sum().backward()
    for made in (torch.tanh, torch.exp):  # whose gradient needs what they gave out
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            logp(made(W)).sum().backward()
    loss = logp(W * 1).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"): loss.backward()


@inside
def test_impossible_words_masks_and_nan():
    z = torch.tensor([[1.0, 2.0, -math.inf],
                      [-math.inf] * 3,
                      [math.nan, 1.0, 2.0],
                      [5.0, 5.0, 5.0],
                      [-math.inf, -math.inf, 3.0]])
    i, m = torch.tensor([2, 0, 1, 1, 2]), torch.tensor([True, True, False, True, True])
    y, H = log_probs_and_entropy(z, i)
    assert y[0] == -math.inf
    assert y[1].isnan()
    assert y[2].isnan()
    assert H[2].isnan()
    assert H[1] == 0
    assert y[4] == 0
    assert H[4] == 0
    torch.testing.assert_close(H[[0, 3]], torch.tensor([0.58220309, math.log(3)]))
    _, (g,) = value_and_grad(lambda z: entropy_from_logits(z, mask=m), z)
    assert g.isfinite().all() and (g[1:3] == 0).all() and g[0, 2] == 0
    _, (g,) = value_and_grad(
        lambda z: selective_log_softmax(z, i.clamp(max=1), mask=m)[[0, 2, 3]], z)
    assert g.isfinite().all() and (g[[1, 2, 4]] == 0).all() and g[0, 2] == 0
    assert selective_log_softmax(z, i + 3)[:1].isnan().all()  # beyond the vocabulary


@inside
def test_a_token_is_the_first_at_which_the_sum_reaches_1_minus_u():
    "Whatever the layout, and never one that is impossible, at the ends of u neither."
    u = torch.cat([torch.tensor([0.0, 1 - 2.0**-24]), torch.arange(1, 23) / 23]).view(4, 6)
    whole = normal(0, (4, 6, 5000), scale=3.0)
    for dtype in (torch.float32, torch.bfloat16):
        for z, temperature in ((whole[..., :37], 1.0),
                               (whole[:, :, 64:], 0.7),
                               (whole[..., :4097], 2.0),
                               (whole.mT.contiguous().mT, 1.0),
                               (whole[..., :1], 1.0),
                               (whole + 1e3, 1.0)):
            possible = torch.arange(z.shape[-1]) % 7 % 3 == 0
            z = z.to(dtype).masked_fill(~possible, -math.inf)
            tokens = draw(z, temperature, u)
            p = (z.double() / temperature).softmax(-1)
            at, here = (x.gather(-1, tokens[..., None])[..., 0] for x in (p.cumsum(-1), p))
            assert tokens.dtype == torch.int64
            assert tokens.shape == u.shape
            assert possible[tokens].all()
            assert (at >= 1 - u.double() - 1e-6).all()
            assert (at - here <= 1 - u.double() + 1e-6).all()
    nothing = torch.stack([torch.full((300,), math.nan), torch.full((300,), -math.inf)])
    assert draw(nothing, 1.0, torch.zeros(2)).tolist() == [299, 299]  # as the formula's


@inside
def test_second_derivatives():
    z, i = normal(0, (3, 5), torch.float32), torch.tensor([0, 3, 4])
    f = lambda z: (torch.stack(log_probs_and_entropy(z, i)).cos()).sum()
    got = torch.autograd.functional.hessian(f, z)
    exact = torch.autograd.functional.hessian(
        lambda z: reference(z, i, 1.0).cos().sum(), z.double())
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-4)


@inside
def test_from_hidden_states():
    h, W, b, i = (normal(0, (2, 5, 4), torch.float32), normal(1, (19, 4), torch.float32),
                  normal(2, (19,), torch.float32), torch.arange(10).view(2, 5))
    ours = value_and_grad(
        lambda h, W, b: torch.stack(linear_log_probs(h, W, i, b, 0.7, entropy=True)).sin(), h, W, b)
    exact = value_and_grad(lambda h, W, b: reference(torch.nn.functional.linear(h, W, b), i,
                                                     0.7).sin(), *(t.double() for t in (h, W, b)))
    torch.testing.assert_close(ours[0].double(), exact[0], atol=1e-5, rtol=1e-5)
    for g, e in zip(ours[1], exact[1]):
        torch.testing.assert_close(g.double(), e, atol=1e-5, rtol=1e-4)


@pytest.fixture
def short_blocks(monkeypatch):
    "Blocks of 32 steps, so that a few steps fill several: an interpreter takes each by itself."
    tiles = kernels._tiles
    def short(T, N):
        grid, sizes = tiles(T, N)
        return grid, sizes | dict(BLOCK=min(32, sizes["BLOCK"]))
    monkeypatch.setattr(kernels, "_tiles", short)


@inside
def test_a_long_scan_takes_two_blocks():
    x, decay = normal(0, (300, 8), torch.float32), torch.full((300, 8), 0.94)
    assert kernels._tiles(*x.shape)[1]["BLOCK"] == 256
    torch.testing.assert_close(
        kernels.scan(x, decay), advantage.accumulate(x, decay), atol=1e-4, rtol=1e-5)


@inside
def test_the_scan_equals_the_loop(short_blocks):
    for T, N, dtypes in ((1, 3, [torch.float32]), (7, 2, [torch.float32]),
                         (70, 5, [torch.float32, torch.float64])):  # three blocks
        for dtype in dtypes:
            x, decay = (normal(0, (T, N), dtype),
                        torch.full((T, N), 0.94,
                                   dtype=dtype).masked_fill(random_mask(1, (T, N), 0.1), 0))
            tol = dict(atol=1e-10, rtol=0) if dtype == torch.float64 else dict(atol=1e-4, rtol=1e-5)
            loop = advantage.accumulate(x, decay)
            y = kernels.scan(x, decay)
            torch.testing.assert_close(y, loop, **tol)
            assert torch.equal(kernels.scan(x.T.contiguous().T, decay), y)
            assert torch.equal(kernels.scan(x[:, None], decay[:, None])[:, 0], y)
            spoilt = x.clone()
            spoilt[T // 2:, 0] = math.nan
            assert torch.equal(
                kernels.scan(spoilt, decay).isnan(), advantage.accumulate(spoilt, decay).isnan())
    assert kernels.scan(torch.zeros(0, 2), torch.zeros(0, 2)).shape == (0, 2)


@inside
def test_gae_equals_the_formula(short_blocks):
    for T, N in ((1, 1), (7, 3), (40, 9), (75, 8)):
        r, v, nv, terminated, truncated = (*(normal(i, (T, N), torch.float32) for i in range(3)),
                                           random_mask(3, (T, N), 0.05),
                                           random_mask(4, (T, N), 0.05))
        nv = torch.where(terminated, math.nan, nv)
        done = terminated | truncated
        with fast.off():
            exact = advantage.gae(
                r.double(), v.double(), nv.double(), terminated, done, 0.9, 0.8)[0]
        torch.testing.assert_close(kernels.gae(r, v.T.contiguous().T, nv, terminated, done, 0.9,
                                               0.8).double(), exact, atol=2e-5, rtol=1e-5)
    assert kernels.gae(*[torch.zeros(0, 2)] * 3, *[torch.zeros(0, 2, dtype=torch.bool)] * 2, 0.9,
                       0.8).shape == (0, 2)


@inside
@pytest.mark.parametrize("gamma, lam", [(0.9, 0.0), (0.5, 0.5)])
def test_a_decay_of_0_cuts_and_one_that_underflows_does_not(gamma, lam, short_blocks):
    "0.25^75 is 0 in float32, but an infinity some blocks of steps later still counts."
    for bad in (math.inf, -math.inf, math.nan):
        r, zero = torch.ones(200, 2), torch.zeros(200, 2)
        end = zero > 0
        r[190], end[50] = bad, True
        with fast.off(): plain = advantage.gae(r, zero, zero, end, end, gamma, lam)[0]
        quick = kernels.gae(r, zero, zero, end, end, gamma, lam)
        torch.testing.assert_close(quick, plain, equal_nan=True)


@inside
def test_a_row_without_a_possible_token_has_no_gradient():
    z, i = torch.randn(3, 5), torch.tensor([0, 1, 2])
    z[1] = -math.inf
    y, (g,) = value_and_grad(lambda z: selective_log_softmax(z, i), z)
    assert y.isnan().tolist() == [False, True, False] and g.isfinite().all() and (g[1] == 0).all()
