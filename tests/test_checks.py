import inspect
import itertools
import math
import re

import numpy as np
import pytest
import torch
from strategies import normal, random_mask

import rlhf_notes as rn
from rlhf_notes.checks import at_least_float32, checked, told_as
from rlhf_notes.formulas.kl import kl_estimate
from rlhf_notes.formulas.logprob import selective_log_softmax
from rlhf_notes.formulas.masking import aggregate_loss, masked_mean, masked_sum, masked_var

@checked(
    x="float (... T)", mask="bool (... T)?", row="float (T)?", raw="raw (B T)?", index="int (B T)?",
    many="int (... T K?)?", share="[0, 1]", above="(0, inf)", n="int [1, 9]",
    flag="flag", kind=("a", "b"))
def f(x, mask=None, row=None, raw=None, index=None, many=None, share=0.5, above=1.0, n=1,
      flag=False, kind="a", *rest, **more):
    return x


X, M = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
ITEM = ", whose .item() is Python's own"


@pytest.mark.parametrize("given, error, message", [
    (dict(x=[1.0]), TypeError, "x must be a torch.Tensor, got list"),
    (dict(x=None), TypeError, "x must be a torch.Tensor, got NoneType"),
    (dict(x=X.long()), TypeError, "x must have a floating-point dtype, got torch.int64"),
    (dict(x=X + 1j), TypeError, "x must have a floating-point dtype, got torch.complex64"),
    (dict(x=torch.tensor(1.0)), ValueError, "x must have the shape (..., T), got ()"),
    (dict(mask=X), TypeError,
     "mask must be boolean (True = counts), got torch.float32; mask.bool() is"),
    (dict(mask=M[:0].long()), TypeError,
     "mask must be boolean (True = counts), got torch.int64; mask.bool() is"),
    (dict(mask=M.T), ValueError,
     "mask must have the shape of x, (2, 3), got (3, 2); mask.T has it"),
    (dict(mask=M[0]), ValueError, "mask must have the shape of x, (2, 3), got (3,)"),
    (dict(raw=X.T), ValueError,
     "raw must have the shape (B, T) with T = 3, as x has, got (3, 2); raw.T has it"),
    (dict(raw=X[:, :2]), ValueError,
     "raw must have the shape (B, T) with T = 3, as x has, got (2, 2)"),
    (dict(mask=M.to("meta")), ValueError, "mask must be on the device of x, cpu, got meta"),
    (dict(row=X[:, 0]), ValueError, "row must have the shape (T) with T = 3, as x has, got (2,)"),
    (dict(row=X), ValueError, "row must have the shape (T), got (2, 3)"),
    (dict(index=X), TypeError, "index must have an integer dtype, got torch.float32"),
    (dict(index=M), TypeError, "index must have an integer dtype, got torch.bool"),
    *[(dict(flag=v), TypeError,
       f"flag must be True or False, got {v!r}" + ITEM * (getattr(v, "ndim", 1) == 0))
      for v in (0, 1, 2, 0.0, None, "no", [True], torch.tensor(True), np.bool_(True))],
    *[({name: v}, TypeError, f"{name} must be a number, got {type(v).__name__}{ITEM}")
      for name in ("share", "n")
      for v
      in (np.float16(0.2), np.float32(3), np.longdouble(3), np.bool_(True), np.array(3),
          torch.tensor(3))],
    *[(dict(share=v), TypeError, f"share must be a number, got {type(v).__name__}{ITEM}")
      for v in (np.int64(1), np.uint8(1))],
    *[({name: v}, TypeError, f"{name} must be a number, got {type(v).__name__}")
      for name in ("share", "n") for v in ([3], np.ones(1), torch.ones(1), True, "3", None)],
    *[(dict(share=v), ValueError, f"share must be in [0, 1], got {v}")
      for v in (-0.1, 1.5, math.nan, math.inf, 10**400, np.float64(1.5))],
    *[(dict(above=v), ValueError, f"above must be in (0, inf), got {v}")
      for v in (0, -1, math.nan, math.inf)],
    *[(dict(n=v), TypeError, f"n must be an integer, got {v}")
      for v in (2.5, 2.0, math.inf, np.float64(3))],
    *[(dict(n=v), ValueError, f"n must be in [1, 9], got {v}") for v in (0, 10, 10**400)],
    *[(dict(kind=v), ValueError, f"kind must be one of 'a', 'b', got {v!r}")
      for v in ("c", ["a"], None, 0, np.array(["a", "b"]), torch.ones(2))],
    *[(dict(above=v), ValueError, f"above must be in (0, inf) and fit float32, got {v}")
      for v in (1e-39, 1e308, 10**39)],
    *[(dict(many=v), ValueError,
       f"many must have the shape (..., T, K) with {a} = {b}, as x has, got {tuple(v.shape)}")
      for v, a, b
      in ((X.long()[:1, :, None], "...", "(2,)"), (M.long()[..., None][:, :2], "T", 3))],
    (dict(many=M.long()[0]), ValueError, "many must have the shape (..., T, K), got (3,)"),
    (dict(many=M.long()[:1]), ValueError, "many must have the shape of x, (2, 3), got (1, 3)")])
def test_bad_input_is_named(given, error, message):
    for call in (lambda: f(**{"x": X, **given}),
                 lambda: f(*({"x": X, "mask": None, **given}[k] for k in ("x", "mask")))
                 if not given.keys() - {"x", "mask"} else f(**{"x": X, **given})):
        with pytest.raises(error) as e: call()
        assert str(e.value) == message


@pytest.mark.parametrize("n", [np.int64(3), np.uint8(3)])
def test_a_whole_number_of_any_kind_becomes_an_int(n):
    given = checked(n="int [1, 9]")(lambda n: n)(n)
    assert given == 3 and type(given) is int
    with pytest.raises(ValueError, match=r"n must be in \[1, 9\], got 10"):
        f(X, n=type(n)(10))


def test_what_is_right_passes():
    assert f(
        X, M, X[0], X, X.long(), X.long()[..., None], 0, 1e-9, 9, True, "b", 1, 2, three=3) is X
    assert f(X, share=1e-60, above=np.float64(0.2)) is X and f(X[0], M[0]) .shape == (3,)
    assert f(torch.ones(0, 3), torch.ones(0, 3) > 0, X[0]).shape == (0, 3)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"): f()
    assert f.__name__ == "f" and f.__wrapped__(1) == 1
    with pytest.raises(ValueError, match="x has an unknown rule, 'anything'"):
        checked(x="anything")(lambda x: x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float_comes_in_as_float32_or_better_and_raw_as_it_came(dtype):
    seen = checked(x="float (...)", y="raw (...)")(
        lambda x, y: (x.dtype, y.dtype))(X.to(dtype), X.to(dtype))
    assert seen == (torch.float64 if dtype == torch.float64 else torch.float32, dtype)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("g, name", [(masked_sum, "x"),
                                     (masked_mean, "x"),
                                     (masked_var, "x"),
                                     (at_least_float32, "x"),
                                     (lambda x: masked_mean(x, M), "x"),
                                     (aggregate_loss, "loss")])
def test_complex_numbers_do_not_lose_half_of_themselves(g, name, dtype):
    with pytest.raises(TypeError) as e: g(torch.zeros(2, 3, dtype=dtype))
    assert str(e.value) == f"{name} must be real, got {dtype}"


@pytest.mark.parametrize("dtype",
                         [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16,
                          torch.float32, torch.float64])
def test_all_that_is_real_passes(dtype):
    x = torch.ones(2, 3, dtype=dtype)
    assert masked_mean(x) == 1 and masked_var(x) == 0
    torch.testing.assert_close(aggregate_loss(x), torch.ones_like(aggregate_loss(x)))  # by weights


def test_gradients_stay_within_float16():
    x = torch.tensor([11.0, 12.0, 50.0, -50.0, math.nan], dtype=torch.float16, requires_grad=True)
    g, = torch.autograd.grad(at_least_float32(x).exp().sum(), x)
    assert g.dtype == torch.float16 and g[:4].tolist() == [59872, 65504, 65504, 0] and g[4].isnan()
    loss = lambda x: kl_estimate(-x, torch.zeros_like(x), "k3").sum()
    assert torch.autograd.grad(loss(x[:4]), x)[0].isfinite().all()
    x = x.detach()[:4]
    torch.testing.assert_close(torch.func.grad(loss)(x), torch.func.vmap(torch.func.grad(loss))(x))
    g = torch.compile(lambda x: at_least_float32(x).exp(), fullgraph=True,
                      backend="aot_eager")(y := x.clone().requires_grad_(True))
    assert torch.autograd.grad(g.sum(), y)[0].tolist() == [59872, 65504, 65504, 0]


def test_each_function_has_recompilations_of_its_own():
    torch._dynamo.reset()
    for n in range(torch._dynamo.config.recompile_limit + 2):
        g = checked(x="float (...)")(lambda x, n=n: x + n)
        assert torch.compile(g, fullgraph=True, backend="eager")(X).sum() == 6 * (n + 1)


@pytest.mark.parametrize("names", [*itertools.permutations(("logits", "index", "mask"))])
def test_named_arguments_come_in_any_order(names):
    given = dict(logits=normal(0, (2, 3, 5)), index=torch.zeros(2, 3, dtype=torch.long), mask=M)
    assert torch.equal(selective_log_softmax(**{n: given[n] for n in names}),
                       selective_log_softmax(*(given[n] for n in given if n != "mask"), mask=M))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'logits'"):
        selective_log_softmax(index=given["index"])


def test_passes_through_vmap_and_compile():
    x, m = normal(0, (5, 2, 3)), random_mask(1, (5, 2, 3))
    g = checked(x="float (B T)", m="bool (B T)?", c="(0, 1)")(
        lambda x, m=None, c=0.5: torch.where(m, x, c))
    torch.testing.assert_close(torch.func.vmap(g)(x, m), g.__wrapped__(x, m))
    torch.testing.assert_close(
        torch.compile(g, fullgraph=True, backend="eager")(x[0], m[0], c=0.2), g(x[0], m[0], 0.2))


LOGITS, TOKENS, ROWS = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long), torch.ones(2)
GOOD = {
    "mask": M, "done": ~M, "terminated": ~M, "action": TOKENS, "logits": LOGITS,
    "logits_ref": LOGITS, "index": TOKENS, "logit_new": LOGITS, "logit_old": LOGITS,
    "logit_pretrained": LOGITS, "logit_ref": LOGITS, "padding_masks": M, "value_padding_masks": M,
    "scores": ROWS, "kl_coef": 0.1, "x": X, "weight": X, "best": TOKENS[:, 0],
    "mu_sigma_new": (X, X), "mu_sigma_old": (X, X), "args": ((LOGITS,),), "kwargs": {},
    "tokens": TOKENS, "stop_token": 1, "pad_token": 0, "lengths": TOKENS, "max_length": 10,
    "buffer": 2, "clip_range": 0.2, "variant": "ppo", "kl_type": "k1"}
SPOILED = (
    "x", 1, -1, 1e308, math.nan, 10**400, True, [1], {}, ("std",), np.array(["a", "b"]), np.ones(2),
    torch.ones(()), torch.ones(2), torch.ones(0), torch.ones(4, 1, 3), X + 0j, TOKENS, object(),
    torch.zeros(2, 3, 4, device="meta"))
FIELDS = {"ppo_policy_error": rn.ppo_policy_data, "grpo_policy_error": rn.grpo_policy_data,
          "ppo_policy_error_continuous": rn.ppo_policy_data_continuous,
          "ppo_value_error": rn.ppo_value_data}


@pytest.mark.parametrize(
    "name",
    ["masked_mean", "selective_log_softmax", "importance_ratio", "clipped_surrogate", "value_loss",
     "kl_loss", "whiten", "gae", "token_rewards", "truncate_at_stop",
     "overlong_penalty", "policy_loss", "dpo_loss", "best_of_n_loss", "calculate_kl_div", "PPOLoss",
     "shape_fn_ppo", *FIELDS])
def test_a_spoiled_call_names_an_argument(name):
    f = getattr(rn, name) if name != "PPOLoss" else rn.PPOLoss().forward
    given = {}
    for p in inspect.signature(FIELDS.get(name, f)).parameters.values():
        if p.name in GOOD or p.default is p.empty: given[p.name] = GOOD.get(p.name, X)
    if name == "ppo_policy_error_continuous":
        given |= {"action": X, "logit_pretrained": (X, X), "adv": ROWS, "weight": ROWS}
    if name in ("grpo_policy_error", "policy_loss"):
        given |= {"adv" if "adv" in given else "advantage": ROWS}
    if name == "best_of_n_loss": given["rewards"] = X
    call = (lambda **kw: f(FIELDS[name](**kw))) if name in FIELDS else f
    call(**given)
    for spoiled in given:
        for value in SPOILED:
            try: call(**{**given, spoiled: value})
            except (TypeError, ValueError) as e:
                assert {*given, "mu", "sigma"} & {
                    *re.findall(r"\w+", str(e))}, f"{spoiled} = {value!r}: {e}"


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_an_error_is_told_under_the_name_of_the_option(error):
    for names, told in ((dict(eps_low="clip_ratio_low"), "clip_ratio_low must be 1"),
                        (dict(eps="clip_ratio"), "eps_low must be 1")):
        with pytest.raises(error, match=f"^{told}$"), told_as(names):
            raise error("eps_low must be 1")
    with pytest.raises(KeyError), told_as(dict(eps_low="x")): raise KeyError("eps_low")


def test_a_last_size_may_be_absent_where_the_others_are_counted():
    @checked(x="real (P G R)", mask="bool (P G R?)?")
    def f(x, mask=None): return mask.shape
    x = torch.ones(2, 3, 4)
    assert f(x, torch.ones(2, 3).bool()) == (2, 3) and f(x, x > 0) == (2, 3, 4)
    for shape in ((2,), (3, 2), (2, 3, 1), (2, 3, 4, 1)):
        with pytest.raises(ValueError, match="^mask must have"): f(x, torch.ones(shape).bool())


def test_the_defaults_of_the_plain_function_reach_the_quick_one():
    seen = []
    def quick(x, scale, shift):
        seen.append((scale, shift))
        return NotImplemented

    @checked(fast=quick, scale="(0, inf)")
    def f(x, scale=2.0, shift=None): return scale
    assert (f(1), f(1, 3.0), f(1, shift=5), f(1, scale=4.0)) == (2.0, 3.0, 2.0, 4.0)
    assert seen == [(2.0, None), (3.0, None), (2.0, 5), (4.0, None)]
    with pytest.raises(TypeError): f(1, 2.0, None, 3)
