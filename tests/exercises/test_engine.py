"""The exercises: right answers pass, however they are written; each wrong one that is known gets
its own name; solutions in the lessons are right.
"""
import concurrent.futures
import itertools
import json
import math
import re
import signal
import subprocess
import sys

import matplotlib
import nbformat
import notebooks
import pytest
import torch

from rlhf_notes import check, kl_loss
from rlhf_notes.exercises import engine, outcomes
from rlhf_notes.exercises.engine import EXERCISES, LEAK, Exercise
from rlhf_notes.exercises.given import pessimistic
from rlhf_notes.exercises.outcomes import ATOL, RTOL, Outcome, attempt, difference, show

MISTAKES = [(e.name, name) for e in EXERCISES.values() for name in e.mistakes]
each_exercise = pytest.mark.parametrize("e", EXERCISES.values(), ids=list(EXERCISES))
each_mistake = pytest.mark.parametrize(
    "exercise, mistake", MISTAKES, ids=[f"{a}-{b}" for a, b in MISTAKES])


def cells():
    "(lesson, cell) of every cell of every notebook."
    return [(path.stem, c) for path in notebooks.notebooks()
            for c in json.loads(path.read_text(encoding="utf-8"))["cells"]]


def source(cell): return "".join(cell["source"])


def convert(x, change):
    return change(x) if isinstance(x, torch.Tensor) else [
        convert(v, change) for v in x] if isinstance(x, list) else x


def in_float64(f):
    "f, computed in float64."
    def g(*args):
        out = f(*(convert(x, lambda t: t.double() if t.is_floating_point() else t) for x in args))
        return out if isinstance(out, tuple) else out
    return g


SOLUTIONS = {
    source(c): (lesson, c) for lesson, c in cells() if "#| code-summary: Solution" in source(c)}


# right answers

@each_exercise
def test_the_library_is_right(e, capsys):
    verdict = e(e.reference, strict=True)
    assert verdict and verdict.right and verdict.mistake is None and verdict.figure is None
    assert (capsys.readouterr().out
            == f"{e.name}: right, on all {2 * len(e.inputs) + len(e.edges)} inputs.\n")


@pytest.mark.parametrize("text", SOLUTIONS, ids=[c["id"] for _, c in SOLUTIONS.values()])
def test_solutions_are_right_in_float32_and_in_float64(text):
    space = dict(check=check, torch=torch, math=math)
    exec(text, space)
    name, = re.findall(r"check\.(\w+)\(", text)
    assert EXERCISES[name](space[f"{name}_solution"], strict=True)
    assert EXERCISES[name](in_float64(space[f"{name}_solution"]), strict=True)


@each_exercise
def test_rounding_passes_and_a_thousandth_does_not(e):
    def off(by):
        def f(*args):
            out = e.reference(*args)
            def change(v):
                return v * (1 + by) if isinstance(v, float) or isinstance(
                    v, torch.Tensor) and v.is_floating_point() else v
            return tuple(map(change, out)) if isinstance(out, tuple) else change(out)
        return f
    assert e(off(RTOL / 4), draw=False)
    floats = any(v.is_floating_point() and v.numel() and v.abs().max() > 0.05
                 for v in e.known()[0][0].values)
    if floats: assert not e(off(1e-2), draw=False)


def by_position(scores, logp, logp_ref, kl_coef, mask):
    last = torch.where(mask, torch.arange(mask.shape[1]), -1).amax(1)
    out = torch.where(mask, kl_coef * (logp_ref - logp), 0.0)
    out[mask.any(1), last[mask.any(1)]] += scores[mask.any(1)]
    return out


def entropy_of_possible(z):
    rows = [row[row > -math.inf].log_softmax(0) for row in z.reshape(-1, z.shape[-1])]
    return torch.stack([-(p.exp() * p).sum() for p in rows]).reshape(z.shape[:-1])


def entropy_by_logsumexp(z):
    expected = (z.softmax(-1) * z.masked_fill(z == -math.inf, 0)).sum(-1)
    return z.logsumexp(-1) - expected


def answers_of(loss, mask):
    return torch.stack([x[m].mean() for x, m in zip(loss, mask) if m.any()]).mean()


def grpo_by_rows(a, b, ref, A, m, eps, beta):
    a, b, ref = (torch.where(m, x, 0) for x in (a, b, ref))
    r, d = (a - b.detach()).exp(), ref - a
    worse = torch.where(A[:, None] >= 0, r.clamp(max=1 + eps), r.clamp(min=1 - eps))
    return answers_of(beta * (d.exp() - d - 1) - worse * A[:, None], m)


def grpo_in_one_row(a, b, ref, A, m, eps, beta):
    """All tokens behind each other, each with the weight 1 over its answer's length and the number
    of answers with any.
    """
    weight = (1 / m.sum(1, keepdim=True) / m.any(1).sum()).expand_as(m)[m]
    a, b, ref, A = a[m], b[m], ref[m], A[:, None].expand_as(m)[m]
    r = (a - b).exp()
    return (weight
            * (beta * ((ref - a).expm1() - (ref - a))
               - torch.minimum(r * A, r.clamp(1 - eps, 1 + eps) * A))).sum()


def whiten_by_std(x, m, shift):
    kept = x[m]
    out = torch.zeros_like(x)
    out[m] = (kept - kept.mean()) / (
        kept.var(unbiased=False) + 1e-8) ** 0.5 + (0 if shift else kept.mean())
    return out


def whiten_by_squares(x, m, shift):
    x = torch.where(m, x, 0)
    n = m.sum()
    mean = x.sum() / n
    return torch.where(
        m, (x - mean) * ((x ** 2).sum() / n - mean ** 2 + 1e-8).rsqrt() + (not shift) * mean, 0)


def through(value, slope):
    "A number with this value and the gradient of another."
    return value.detach() + slope - slope.detach()


def slope_of_kl(a, b, m): return ((a - b)[m].detach() * a[m]).mean()


RIGHT = {
    "kl_loss": [lambda a, b, m: kl_loss(a, b, "k1", mask=m, straight_through=True),
                lambda a, b, m: kl_loss(a, b, "k3", mask=m, straight_through=True),
                lambda a, b, m: ((a - b)[m].detach() * (a[m] - a[m].detach()).exp()).mean(),
                slope_of_kl, lambda a, b, m: slope_of_kl(a, b, m) - 7],
    "entropy": [entropy_of_possible, entropy_by_logsumexp,
                lambda z:
                -(z.softmax(-1) * z.log_softmax(-1).masked_fill(z == -math.inf, 0)).sum(-1)],
    "sequence_ratio": [lambda a, b, m: torch.where(m, a - b.detach(),
                                                   0).sum(1).div(m.sum(1).clamp(min=1)).exp(),
                       lambda a, b, m: torch.stack([(x[k]
                                                     - y.detach()[k]).sum().div(max(int(k.sum()),
                                                                                    1)).exp()
                                                    for x, y, k in zip(a, b, m)]),
                       lambda a, b, m: torch.where(m, a - b.detach(),
                                                   0).exp().prod(1) ** (1 / m.sum(1).clamp(min=1))],
    "explained_variance": [lambda V, R: torch.zeros(()) if R.max() == R.min()
                           else 1 - (R - V).var() / R.var(),
                           lambda V, R: 0.0 if (R - R.mean()).abs().max() < 1e-6
                           else 1 - ((R - V - (R - V).mean()) ** 2).sum()
                           / ((R - R.mean()) ** 2).sum(),
                           lambda V, R: torch.where(R.std() > 1e-6 * R.abs().mean(),
                                                    1 - (R - V).var() / R.var(), 0.0)],
    "whiten": [whiten_by_std, whiten_by_squares],
    "token_rewards": [by_position,
                      lambda s, a, b, c, m: torch.where(m, c * (b - a), 0) + s[:, None]
                      * (m & (m.cumsum(1) == m.sum(1, keepdim=True)))],
    "grpo_loss": [grpo_by_rows, grpo_in_one_row],
    "position_ids": [lambda m: (m.long().cumsum(-1) - 1).clamp(min=0),
                     lambda m: (m.cumsum(1) - 1).masked_fill(~m, 0),
                     lambda m: m.cumsum(1) - m.long(),
                     lambda m: (m.cumsum(1) - 1).clamp(min=0).masked_fill(~m & (m.cumsum(1) > 0),
                                                                          1)],
}


@pytest.mark.parametrize("exercise, f", [(name, f) for name, fs in RIGHT.items() for f in fs],
                         ids=[f"{name}-{i}" for name, fs in RIGHT.items() for i in range(len(fs))])
def test_a_right_answer_passes_however_it_is_written(exercise, f):
    assert EXERCISES[exercise](f, strict=True)
    assert EXERCISES[exercise](in_float64(f), strict=True)


# wrong answers

def into_place(s, a, b, c, m):
    out = torch.where(m, -c * (a - b), 0.0)
    for row in range(len(out)): out[row, m[row].sum() - 1] += s[row] * m[row].any()
    return out


def into_place_and_masked(*x): return torch.where(x[-1], into_place(*x), 0.0)


def by_patched_product(z): return -torch.nansum(z.softmax(-1) * z.log_softmax(-1), -1)


def plain_entropy(z): return entropy_of_possible(z.detach())


def every_answer(a, b, ref, A, m, eps, beta):
    return grpo_by_rows(a, b, ref, A, m, eps, beta) * m.any(1).float().mean()


@pytest.mark.parametrize("exercise, f, mistake", [
    ("entropy", by_patched_product, "gradient"),
    ("entropy", lambda z: torch.special.entr(z.softmax(-1)).sum(-1), "gradient"),
    ("entropy", lambda z: torch.where(z > -math.inf, -z.softmax(-1) * z.log_softmax(-1), 0).sum(-1),
     "gradient"),
    ("entropy", plain_entropy, "no_gradient"),
    ("entropy", lambda z: -plain_entropy(z), "sign"),
    ("token_rewards", into_place, "counts"),
    ("token_rewards", into_place_and_masked, "counts"),
    ("sequence_ratio",
     lambda a, b, m: torch.where(m, a - b, 0).sum(1).div(m.sum(1).clamp(min=1)).exp(), "gradient"),
    ("sequence_ratio", lambda a, b, m: torch.where(m, a - b, 0).sum(1).exp(), "product"),
    ("sequence_ratio",
     lambda a, b, m: torch.tensor([math.exp(sum((x - y)[k].tolist()) / max(int(k.sum()), 1))
                                   for x, y, k in zip(a, b, m)]), "no_gradient"),
    # of the gradient
    ("sequence_ratio",
     lambda a, b, m: torch.where(m, (a - b.detach()).exp(),
                                 1).prod(1) ** (1 / m.sum(1).clamp(min=1)), "leak"),
    ("grpo_loss", every_answer, "empty_is_zero"),
    ("grpo_loss",
     lambda a, b, ref, A, m, eps, beta: torch.stack([grpo_by_rows(*(x[i:i + 1]
                                                                    for x in (a, b, ref, A, m)),
                                                                  eps, beta) if m[i].any()
                                                     else torch.zeros(())
                                                     for i in range(len(a))]).mean(),
     "empty_is_zero"),
    ("grpo_loss",
     lambda a, b, ref, A, m, eps, beta: answers_of(torch.where(m,
                                                               beta
                                                               * ((ref - a).expm1() - (ref - a))
                                                               - pessimistic((a - b).exp(),
                                                                             A[:, None], eps), 0),
                                                   m), "leak"),
    ("whiten",
     lambda x, m, s: torch.where(m,
                                 (x - x[m].mean()) / (x[m].std(unbiased=False) + 1e-8)
                                 + (0 if s else x[m].mean()), 0), None),
    ("kl_loss", lambda a, b, m: (a - b)[m].mean(), "k1"),
    ("kl_loss", lambda a, b, m: a[m].mean(), "k1"),
    ("kl_loss", lambda a, b, m: ((b - a).exp() - 1 + a - b)[m].mean(), "k3"),
    ("kl_loss", lambda a, b, m: ((a - b) ** 2)[m].mean(), "no_half"),
    ("kl_loss", lambda a, b, m: 2 * slope_of_kl(a, b, m), "no_half"),
    ("kl_loss", lambda a, b, m: -slope_of_kl(a, b, m), "sign"),
    ("kl_loss", lambda a, b, m: (a - b)[m].mean().detach(), "no_gradient"),
    ("kl_loss", lambda a, b, m: ((a - b).detach() * (a - a.detach()).exp())[m].mean(), "leak"),
    ("kl_loss", lambda a, b, m: through((a * m).sum(), slope_of_kl(a, b, m)), "leak"),
    ("kl_loss", lambda a, b, m: through((a - b)[m].mean(), 3 * slope_of_kl(a, b, m)), "scaled"),
    ("kl_loss", lambda a, b, m: slope_of_kl(a, b, m) + a[m].mean(), None),
    ("masked_mean", lambda x, m: (x.nan_to_num() * m).sum() / m.sum().clamp(min=1), None),
    ("clipped_surrogate", lambda r, A, eps: torch.minimum(r * A, r.clip(eps, 1 + eps) * A), "term"),
    # right for equal rewards, which without eps is 0 / 0
    ("group_advantage",
     lambda r, eps: (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-8), "argument"),
    ("group_advantage",
     lambda r, eps: (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True).clamp(min=eps),
     "clamped"),
    ("group_advantage",
     lambda r, eps: (r - r.mean(1, keepdim=True))
     / torch.maximum(r.std(1, keepdim=True), torch.tensor(eps).to(r)), "clamped"),
    ("merge_moments",
     lambda n, a, v, k, b, w: (n + k, (n * a + k * b) / (n + k),
                               (n * v + k * w + n * a * a + k * b * b) / (n + k)
                               - ((n * a + k * b) / (n + k)) ** 2), None),
    ("whiten",
     lambda x, m, s: torch.where(m,
                                 (x - x[m].mean()) / (x[m].var(unbiased=False) + 1e-8).sqrt()
                                 + (x[m].mean() if s else 0), 0), "argument"),
    ("approx_kl", lambda a, b, m: ((a - b) - (a - b).exp() + 1)[m].mean(), "sign"),
    ("off_policy_sequence_mask",
     lambda a, b, A, m, t: ~((A < 0) & (torch.where(m, (b - a).exp(), 0).sum(1) / m.sum(1) > t)),
     "where"),
    ("off_policy_sequence_mask",
     lambda a, b, A, m, t: ~((A < 0)
                             & (torch.where(m, (a - b).expm1() - (a - b), 0).sum(1) / m.sum(1)
                                > t)), None),
    ("control_loss",
     lambda r, A, V, R, H, eps, v, h:
     -torch.minimum((r * A).mean(), (r.clamp(1 - eps, 1 + eps) * A).mean()) + v
     * ((V - R) ** 2).mean() / 2 - h * H.mean(), "minimum_of_means"),
    ("dpo_loss", lambda c, r, p, q, b: (1 + (-b * (c - p - r + q)).exp()).log().mean(),
     "underflow"),
    ("explained_variance", lambda V, R: 1 - (R - V).var() / (R.var() + 1e-8), None),
    ("explained_variance",
     lambda V, R: torch.zeros(()) if ((R - R.mean()) ** 2).mean() == 0
     else 1 - (R - V).var(unbiased=False) / ((R - R.mean()) ** 2).mean(), None),
])
def test_a_known_mistake_is_named_however_it_is_written(exercise, f, mistake):
    assert EXERCISES[exercise](f, draw=False).mistake == mistake


def test_a_wrong_value_is_named_by_its_value_whatever_its_gradient():
    "As from someone who computes with plain numbers, or forgets to detach."
    for name, mistake in (("importance_ratio", "quotient_of_logs"),
                          ("sequence_ratio", "product"),
                          ("control_loss", "no_minimum"),
                          ("entropy", "unnormalised")):
        e = EXERCISES[name]
        verdict = e(lambda *x: e.mistakes[mistake][0](*x).detach(), draw=False)
        assert verdict.mistake == mistake
        assert verdict.text.startswith(f"{name}: not yet. {e.mistakes[mistake][1]}\n")


def test_where_the_gradient_is_asked_for_nobody_calls_the_value_right():
    verdict = EXERCISES["kl_loss"](lambda a, b, m: slope_of_kl(a, b, m) + 3 * a[m].mean())
    assert ("  result: the gradient with respect to logp should be [0.5, -0.25, 0], yours is"
            in verdict.text)
    assert not any(
        "value is right" in sentence for _, sentence, *_ in EXERCISES["kl_loss"].mistakes.values())
    assert EXERCISES["kl_loss"](
        lambda a, b, m: slope_of_kl(a, b, m)[None]).text.count("yours has the shape (1,), "
                                                               "expected ()") == 1


def test_positions_are_judged_where_they_matter():
    e = EXERCISES["position_ids"]
    verdict = e(lambda m: e.reference(m).int())
    assert verdict.mistake is None
    assert "yours is integer (torch.int32), expected integer (torch.int64)" in verdict.text
    assert e(lambda m: m.cumsum(1) - 1).mistake == "where"  # left padding is judged
    assert not e(lambda m: (m.cumsum(1) - 1).clamp(min=0)[:, :-1])
    assert not e(lambda m: (m.cumsum(1) - 1).clamp(min=0).double())


@each_mistake
def test_a_wrong_answer_gets_its_own_name(exercise, mistake, capsys):
    e = EXERCISES[exercise]
    wrong, sentence, *_ = e.mistakes[mistake]
    verdict = e(wrong, draw=False)
    assert not verdict and verdict.mistake == mistake
    text = capsys.readouterr().out
    assert text.startswith(f"{exercise}: not yet. {sentence}\n")
    assert "  input:  " in text
    assert "  result: " in text
    assert f"gives a hint; read {(e.mistakes[mistake][2:] or [e.read])[0]}.\n" in text
    with pytest.raises(AssertionError) as raised: e(wrong, strict=True)
    assert str(raised.value) + "\n" == text and capsys.readouterr().out == ""


# float64 holds those
@pytest.mark.parametrize(
    "exercise, mistake",
    [m for m in MISTAKES if m[1] not in ("cancels", "underflow", "overflow", "powers")])
def test_it_gets_the_same_name_in_float64(exercise, mistake):
    e = EXERCISES[exercise]
    assert e(in_float64(e.mistakes[mistake][0]), draw=False).mistake == mistake


@each_exercise
def test_no_two_mistakes_look_alike(e):
    "On some input they differ by far more than the tolerance."
    def far(a, b):
        if a.error or b.error: return a.error.split(":")[0] != b.error.split(":")[0]
        pairs = list(zip(a.values + a.grads, b.values + b.grads))
        return len(a.values) != len(b.values) or any(
            x.shape != y.shape
            or not torch.allclose(x.double(), y.double(), 30 * RTOL, 30 * ATOL, equal_nan=True)
            for x, y in pairs)
    expected, known = e.known()
    rows = {"right": expected, **known}
    for a, b in itertools.combinations(rows, 2):
        assert any(map(far, rows[a], rows[b])), f"{a} and {b} look alike"


def test_feedback_leads_to_a_section_that_is_there():
    heads = {f"{lesson}, {head}" for lesson, c in cells() if c["cell_type"] == "markdown"
             for head in re.findall(r"^##+ (.+)$", source(c), re.M)}
    read = {e.explained(name) for e in EXERCISES.values() for name in (None, "leak", *e.mistakes)}
    assert len(read) > 50 and not read - heads, read - heads


def test_mistakes_are_told_in_sentences():
    sentences = [s for e in EXERCISES.values() for _, s, *_ in e.mistakes.values()]
    assert all(len(s) > 15 and s.endswith(".") for s in sentences)


def test_two_mistakes_at_once_get_the_numbers(capsys):
    verdict = EXERCISES["masked_mean"](lambda x, m: x[m].sum() / (m.sum() + 1) - 2.5)
    assert not verdict and verdict.mistake is None
    assert capsys.readouterr().out.splitlines()[
        0] == "masked_mean: not yet. No mistake that is known here."
    assert ("input:  x = [1, 2, 6]\n          mask = [True, True, False]\n  result: "
            "expected 1.5, yours is -1.5" in verdict.text)


def test_edges_do_not_hide_a_wrong_formula():
    "A known mistake is named even if it fails at the edges in another way than the known one does."
    # leaks NaN, which the known wrong version does not
    def divides_by_all(x, m): return (x * m).mean()
    assert "with padding counted as zeros" in EXERCISES["masked_mean"](divides_by_all).text


def test_two_edges_at_once_are_named_one_after_the_other():
    for f, mistake in ((lambda x, m: (x * m).sum() / m.sum(), "leak"),
                       (lambda x, m: torch.where(m, x, 0).sum() / m.sum(), "nan")):
        assert EXERCISES["masked_mean"](f).mistake == mistake


def test_a_leak_is_known_where_it_is_not_listed():
    e = EXERCISES["effective_sample_size"]
    one = Exercise("one", "", lambda x, m: torch.where(m, x, 0.0), "f(x, mask) -> x", "",
                   [(torch.tensor([1.0, 2.0]), torch.tensor([True, False]))], {},
                   edges=[(torch.tensor([1.0, math.nan]), torch.tensor([True, False]))])
    assert one(lambda x, m: x * m).mistake == "leak" and LEAK in one(lambda x, m: x * m).text
    assert one(lambda x, m: torch.where(m, x, 0.0)) and e(e.reference)


# what is no result at all

def masked_mean_with(change): return lambda x, m: change(EXERCISES["masked_mean"].reference(x, m))


@pytest.mark.parametrize("f, words", [
    (lambda x, m: None, "yours returns None: is the `return` missing?"),
    (lambda x, m: (torch.zeros(()), None), "returns None"),
    (lambda x: x, "raises TypeError: .*takes 1 positional argument but 2 were given"),
    (lambda x, m: 1 / 0, "raises ZeroDivisionError: division by zero"),
    (lambda x, m: "1.5", "returns '1.5': neither a tensor nor a number"),
    (lambda x, m: {"mean": 1.5}, "returns {.mean.: 1.5}: neither a tensor nor a number"),
    (masked_mean_with(lambda v: v[None]), r"yours has the shape \(1,\), expected \(\)"),
    (masked_mean_with(lambda v: (v, v)), "yours returns 2 things, expected 1"),
    (masked_mean_with(lambda v: v > 0),
     r"yours is boolean \(torch.bool\), expected floating-point"),
    (masked_mean_with(lambda v: v.long()),
     r"yours is integer \(torch.int64\), expected floating-point"),
    (masked_mean_with(lambda v: v.half()),
     r"yours is half precision \(torch.float16\), expected floating-point"),
])
def test_what_is_no_result_is_said(f, words):
    verdict = EXERCISES["masked_mean"](f)
    assert not verdict and re.search(words, verdict.text), verdict.text
    assert verdict.text.startswith(
        "masked_mean: not yet. The result is not of the expected kind.\n")


@pytest.mark.parametrize(
    "change",
    [lambda v: v.double(), lambda v: v.item(), lambda v: v.numpy(), lambda v: (v,), lambda v: [v]])
def test_a_number_is_as_good_as_a_tensor(change):
    assert EXERCISES["masked_var"](lambda x, m: change(EXERCISES["masked_var"].reference(x, m)))


def test_a_changed_argument_is_said():
    def mean(x, m):
        x.masked_fill_(~m, 0)
        return x.sum() / m.sum().clamp(min=1)
    verdict = EXERCISES["masked_mean"](mean)
    assert verdict.mistake == "changed" and "your function changes x in place" in verdict.text
    def microbatches(losses, masks):
        out = EXERCISES["microbatch_loss"].reference(losses, masks)
        losses.pop()
        return out
    assert "changes losses in place" in EXERCISES["microbatch_loss"](microbatches).text
    def cut(tokens, stop, pad):
        new, mask = EXERCISES["truncate_at_stop"].reference(tokens, stop, pad)
        return tokens.copy_(new), mask
    assert "changes tokens in place" in EXERCISES["truncate_at_stop"](cut).text


def test_one_call_does_not_spoil_the_next():
    e = EXERCISES["masked_var"]
    def spoil(x, m):
        x.zero_()
        m.zero_()
        return torch.tensor(0.0)
    for _ in range(2):
        e(spoil)
        assert e(e.reference, strict=True)


def test_a_missing_gradient_is_said():
    e = EXERCISES["importance_ratio"]
    verdict = e(lambda a, b: torch.tensor([math.exp(x)
                                           for x in (a - b).flatten().tolist()]).reshape(a.shape))
    assert verdict.mistake == "no_gradient"
    verdict = EXERCISES["value_loss"](
        lambda V, O, R, c: EXERCISES["value_loss"].reference(V, O, R, c).detach())
    assert "the gradient with respect to value should be" in verdict.text
    assert "none flows" in verdict.text
    assert verdict.mistake == "no_gradient"
    assert "The value is right, but no gradient flows into value." in verdict.text
    verdict = EXERCISES["value_loss"](
        lambda V, O, R, c: through(EXERCISES["value_loss"].reference(V, O, R, c),
                                   -EXERCISES["value_loss"].reference(V, O, R, c)), draw=False)
    assert verdict.mistake == "sign"
    assert ("The value is right, the gradient with respect to value is not. The sign is flipped."
            in verdict.text)


def test_a_list_of_numbers_is_no_tensor():
    words = "yours returns 3 things, expected 1 (torch.stack makes one tensor of several)"
    for change in (list, torch.Tensor.tolist):
        assert words in EXERCISES["online_logsumexp"](lambda z: change(z.logcumsumexp(0))).text
    assert "yours returns 1 thing, expected 2\n" in EXERCISES["combine_steps"](
        lambda x, d, X, D: x + d * X).text


def test_a_gradient_is_compared_element_by_element():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    one, other = (attempt(lambda x: x * w, {"x": torch.ones(2)}, ("x",)) for w in (a, b))
    assert one.grads[0].tolist() == [1.0, 4.0] and other.grads[0].tolist() == [2.0, 2.0]


def test_a_foreign_exception_is_not_a_known_mistake():
    one = Exercise("one", "", lambda x: x, "f(x) -> x", "", [(torch.ones(2),)],
                   {"raises": (lambda x: x @ x[:1], "a")})
    assert one(lambda x: x @ x[:1]).mistake == "raises" and one(lambda x: x.nothing).mistake is None


def test_leaving_python_and_endless_loops_are_said(monkeypatch):
    assert "yours raises SystemExit: 3" in EXERCISES["masked_mean"](lambda x, m: sys.exit(3)).text
    monkeypatch.setattr(outcomes, "LIMIT", 0.2)
    calls, before = [], signal.getsignal(signal.SIGALRM)
    def hang(x, m):
        calls.append(x)
        while True: pass
    assert ("yours raises TimeoutError: no result after 0.2 s; is there an endless loop?"
            in EXERCISES["masked_mean"](hang).text)
    assert len(calls) == 1
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == before
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(EXERCISES["masked_mean"], EXERCISES["masked_mean"].reference).result()


def test_nan_of_a_mistake_does_not_speak_against_its_name():
    e = Exercise(
        "root", "", lambda x: x.clamp(min=0).sqrt(), "f(x) -> root", "",
        [(torch.tensor([4.0]),), (torch.tensor([9.0, 1.0]),)],
        {"twice": (lambda x: 2 * x.sqrt(), "Twice as large.")}, edges=[(torch.tensor([-1.0]),)])
    assert e(lambda x: 2 * x.clamp(min=0).sqrt(), draw=False).mistake == "twice"


def test_a_name_does_not_hold_where_the_answer_is_right():
    "Right on an edge where the listed mistake is wrong: another mistake."
    one = Exercise("one", "", lambda x: x + 1, "f(x) -> x", "", [(torch.tensor([1.0, 2.0, 5.0]),)],
                   {"doubles": (lambda x: 2 * x, "You double.")}, edges=[(torch.zeros(2),)])
    assert one(lambda x: 2 * x).mistake == "doubles"
    assert one(lambda x: 2 * x if x.any() else x + 1).mistake is None


@pytest.mark.parametrize("exercise, change, mistake, words", [
    ("clipped_surrogate", lambda y, *_: 3 * y, "scaled", "All of it is 3 times what it should be."),
    ("gae", lambda y, *_: y + 2, "shifted", "All of it is 2 too large."),
    ("gae", lambda y, *_: y - 0.5, "shifted", "All of it is 0.5 too small."),
    ("gae", lambda y, *_: y.flip(0), "reversed", "The order is reversed."),
    ("gae", lambda y, *_: torch.cat([y[:1] * 0, y[:-1]]), "late",
     "Each value stands one step too late."),
    ("gae", lambda y, *_: torch.cat([y[1:], y[:1] * 0]), "early",
     "Each value stands one step too early."),
    ("gae", lambda y, *_: y / 0 * 0, "nan", "Yours is NaN where a number is expected."),
    ("token_logprob", lambda y, *_: y.sum(), "summed", "Yours is the sum of what is asked for."),
    ("token_logprob", lambda y, *_: y.mean(), "averaged",
     "Yours is the mean of what is asked for."),
    ("masked_mean", lambda y, x, m: torch.stack([y, y]), "not_averaged",
     "The mean of yours over its last dimension is right."),
    ("masked_mean", lambda y, x, m: torch.stack([y, y / 2]), None,
     "The result is not of the expected kind."),
    ("clipped_surrogate", lambda y, r, A, eps: torch.where(A < 0, 0.3 * y * r, y), "where",
     "Here yours is wrong only where advantage is negative."),
    ("clipped_surrogate", lambda y, r, A, eps: torch.where(A > 0, 0.3 * y * r, y), "where",
     "Here yours is wrong only where advantage is positive."),
    ("clipped_surrogate", lambda y, r, A, eps: y * r.cos() + 1, None,
     "No mistake that is known here.\n")])
def test_what_nobody_listed_is_told_by_its_relation(exercise, change, mistake, words):
    e = EXERCISES[exercise]
    verdict = e(lambda *x: change(e.reference(*x), *x), draw=False)
    assert not verdict and verdict.mistake == mistake and words in verdict.text


def test_interrupts_are_not_swallowed():
    def interrupt(x, m): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): EXERCISES["masked_mean"](interrupt)
    with pytest.raises(TypeError, match="f must be a function, got int"):
        EXERCISES["masked_mean"](3)


def test_differences_in_words():
    def outcome(*values): return Outcome(tuple(map(torch.tensor, values)))
    assert difference(outcome([1.0, 2.0]), outcome([1.0, 2.00001])) == ""
    assert difference(
        outcome([1.0], [2.0]), outcome([1.0], [3.0])) == "result 2: expected [3], yours is [2]"
    assert difference(outcome([math.nan]), outcome([math.nan])) == ""
    assert difference(
        outcome([math.inf]), outcome([-math.inf])) == "expected [-inf], yours is [inf]"
    assert show(torch.tensor([[1.23456, -2.0]])) == "[[1.235, -2]]"
    assert show(0.1) == "0.1"
    assert show([torch.tensor([True])]) == "[[True]]"
    assert len(show(torch.arange(1000.0))) == 160 and show(torch.arange(1000.0)).endswith("...")


# pictures

DRAWN = {"clipped_surrogate", "dual_clip", "value_loss", "kl_k3", "gae", "token_rewards"}


def test_which_have_a_picture(): assert {e.name for e in EXERCISES.values() if e.picture} == DRAWN


@pytest.mark.parametrize("exercise", sorted(DRAWN))
def test_expected_is_drawn_against_yours(exercise, monkeypatch):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    e = EXERCISES[exercise]
    for f, *_ in e.mistakes.values():
        verdict = e(f)
        if verdict.figure is None: continue
        for ax in verdict.figure.axes:
            expected, yours = ax.lines[:2]
            assert expected.get_label() == "expected"
            assert yours.get_label() == "yours"
            assert len(expected.get_xdata()) == len(yours.get_xdata())
        plt.close(verdict.figure)
    first = e(next(iter(e.mistakes.values()))[0]).figure
    # matplotlib keeps no figure open
    assert first is not None and first.number not in plt.get_fignums()
    first.canvas.draw()                                # mathematics in titles is read only now
    plt.close(first)
    before = plt.get_fignums()
    assert e(e.reference).figure is None
    assert e(next(iter(e.mistakes.values()))[0], draw=False).figure is None
    assert e(lambda *args: None).figure is None
    assert e(lambda *args: torch.zeros(7, 7, 7)).figure is None and plt.get_fignums() == before


def test_the_picture_shows_objective_and_gradient():
    import matplotlib.pyplot as plt
    figure = EXERCISES["clipped_surrogate"](lambda r, A, eps: r * A).figure
    r = figure.axes[0].lines[0].get_xdata()
    assert len(figure.axes) == 4
    assert [ax.get_title() for ax in figure.axes] == ["$A = 1$", "its gradient", "$A = -1$",
                                                      "its gradient"]
    for row, A in ((0, 1.0), (1, -1.0)):
        value, slope = figure.axes[2 * row:2 * row + 2]
        torch.testing.assert_close(
            torch.tensor(value.lines[0].get_ydata()),
            torch.minimum(A * torch.tensor(r), A * torch.tensor(r).clamp(0.8, 1.2)))
        torch.testing.assert_close(torch.tensor(value.lines[1].get_ydata()), A * torch.tensor(r))
        torch.testing.assert_close(torch.tensor(slope.lines[1].get_ydata()).double(),
                                   torch.full((len(r),), A, dtype=torch.float64))
    plt.close(figure)


def test_matplotlib_is_imported_only_to_draw():
    code = ("import sys; from rlhf_notes import check; check.kl_k3(lambda a, b: b - "
            "a, draw=False); check.names(); check.kl_k3.hint(); print('matplotlib' "
            "in sys.modules, 'gymnasium' in sys.modules, 'transformers' in " "sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          check=True).stdout.splitlines()[-1] == "False False False"


# the register and the lessons

@each_exercise
def test_there_is_a_hint(e, capsys):
    e.hint()
    check.hint(e.name)
    text = capsys.readouterr().out.splitlines()
    assert text == [f"{e.name}: {e.tip}"] * 2 and len(e.tip) > 15


def test_names():
    table = check.names()
    assert isinstance(table, str) and repr(table) == str(table) == table._repr_markdown_()
    rows = table.splitlines()[2:]
    assert len(rows) == len(EXERCISES)
    assert all(f"`check.{e.name}`" in r for e, r in zip(EXERCISES.values(), rows))
    assert all(r.replace("\\|", "").count("|") == 4 for r in rows)
    assert check.gae is EXERCISES["gae"]
    assert "gae" in dir(check)
    assert "names" in dir(check)
    assert "check.gae(your_function): f(rewards" in repr(check.gae)
    with pytest.raises(AttributeError, match="no exercise 'gea'; did you mean 'gae'"): check.gea
    with pytest.raises(AttributeError, match=r"check.names\(\) lists them"):
        check.diagnose_everything
    source = (notebooks.ROOT / "rlhf_notes/exercises/check.py").read_text(encoding="utf-8")
    names = re.findall(r'^exercise\("(\w+)"', source, re.M)
    assert sorted(names) == sorted(EXERCISES), "each name once"
    assert set(EXERCISES).isdisjoint(dir(type(check))), "an exercise hides behind a method"


def on_one_line(source): return " ".join(source.split())


def test_each_exercise_stands_in_its_lesson():
    found = {lesson: [c for l, c in cells() if l == lesson]
             for lesson in {e.lesson for e in EXERCISES.values()}}
    assert len(found) >= 20
    for lesson, its in found.items():
        names = [e.name for e in EXERCISES.values() if e.lesson == lesson]
        assert 1 <= len(names) <= 3
        ids = [c["id"] for c in its]
        start = ids.index("exercises")
        assert ids[start:] == [
            "exercises", "exercise-imports",
            *(f"exercise-{n}{part}" for n in names for part in ("-task", "", "-solution")),
            "exercise-checks-imports", "exercise-checks"], "exercises end the lesson"
        by_id = dict(zip(ids, its))
        assert source(by_id["exercises"]).startswith("## Exercises\n")
        for n in names:
            stub, solution = by_id[f"exercise-{n}"], by_id[f"exercise-{n}-solution"]
            arguments = ", ".join(EXERCISES[n].arguments)
            assert f"`{n}({arguments})`" in source(by_id[f"exercise-{n}-task"])
            assert on_one_line(source(stub)) == (
                f"#| eval: false def my_{n}({arguments}): ... check.{n}(my_{n})")
            assert stub["outputs"] == []
            assert notebooks.directives(source(solution)) == {
                "code-fold": "true", "code-summary": "Solution"}
            assert solution["metadata"] == {"jupyter": {"source_hidden": True}}
            assert f"def {n}_solution({arguments}):" in on_one_line(source(solution))
            assert source(solution).endswith(f"check.{n}({n}_solution, strict=True);")


def test_a_stub_raises_nothing(capsys):
    for lesson, cell in cells():
        if re.fullmatch(r"exercise-\w+", cell["id"]) and "#| eval: false" in source(cell):
            exec(source(cell), dict(check=check))
    lines = [line for line in capsys.readouterr().out.splitlines() if "not yet" in line]
    assert len(lines) == len(EXERCISES)


def test_folded_cells_stay_folded():
    "Cleaning a notebook keeps what folds a solution."
    path = next(p for p in notebooks.notebooks() if p.stem == "01_masking")
    cleaned = json.loads(notebooks.cleaned(json.loads(path.read_text(encoding="utf-8"))))
    assert [c["metadata"] for c in cleaned["cells"]
            if c["id"].endswith("-solution")] == [{"jupyter": {"source_hidden": True}}] * 3


def checks_of_lessons():
    "The cells that define the exercises of a lesson: those of its imports, and the checks."
    for path in notebooks.notebooks():
        found = {c.id: c.source for c in nbformat.read(path, as_version=4).cells}
        if "exercise-checks" in found:
            yield path.stem, [found["exercise-checks-imports"], found["exercise-checks"]]


def test_an_exercise_brings_its_imports(monkeypatch):
    "Whatever its lesson and the others import, and no name means two things in `check`."
    monkeypatch.setattr(engine, "EXERCISES", {})
    names = {}
    for lesson, cells in checks_of_lessons():
        assert all(cell.startswith("#| export exercises.check") for cell in cells), lesson
        alone = {}
        exec(cells[0], alone)
        for name in alone.keys() - {"__builtins__"}:
            assert names.setdefault(name, alone[name]) is alone[name], f"{lesson}: {name}"
        exec(cells[1], alone)
    for e in engine.EXERCISES.values(): e.known()
    assert engine.EXERCISES.keys() == EXERCISES.keys()
