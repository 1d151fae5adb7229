"""Wrong answers that no list knows: what is said is true, and tells where to look."""
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid, mse_loss

from rlhf_notes import check
from rlhf_notes.exercises import outcomes
from rlhf_notes.exercises.engine import Exercise
from rlhf_notes.exercises.relations import related, row_by_row
from rlhf_notes.exercises.substitutes import varied

def k3(d): return d.exp() - 1 - d


def kept(x, m): return torch.where(m, x, 0.0)


def surrogate(ratio, A, eps): return torch.min(ratio * A, ratio.clamp(1 - eps, 1 + eps) * A)


def advantages(r, V, W, terminated, done, gamma, lam, steps=None):
    out, last = torch.zeros_like(r), 0
    for t in reversed(range(len(r)) if steps is None else range(steps, len(r))):
        last = r[t] + gamma * W[t] * ~terminated[t] - V[t] + gamma * lam * ~done[t] * last
        out[t] = last
    return out


def control_loss(ratio, A, V, R, H, eps, cv, ch):
    return -surrogate(ratio, A, eps).mean() + cv * mse_loss(V, R) / 2 - ch * H.mean()


def scores_one_late(scores, logp, logp_ref, coef, mask):
    out = kept(-coef * (logp - logp_ref), mask)
    for b in range(len(scores)):
        if mask[b].any():
            out[b, min(int(mask[b].nonzero()[-1, 0]) + 1, mask.shape[1] - 1)] += scores[b]
    return out


def last_microbatch_only(losses, masks):
    n = sum(int(m.sum()) for m in masks)
    return sum(x[m].sum().detach()
               for x, m in zip(losses[:-1], masks)) / n + losses[-1][masks[-1]].sum() / n


UNSEEN = [
    # an argument
    ("masked_mean", lambda x, m: kept(x, m).mean(), "argument", "with padding counted as zeros"),
    ("masked_mean", lambda x, m: (kept(x, m).sum(-1) / m.sum(-1).clamp(min=1)).mean(), "argument",
     "with each row by itself, averaged"),
    ("mean_of_answers", lambda x, m: (kept(x, m).sum(0) / m.sum(0).clamp(min=1))[m.any(0)].mean(),
     "argument", "with rows and columns exchanged"),
    ("rloo_advantage", lambda r: r - (r.sum() - r) / (r.numel() - 1), "argument",
     "with all rows in one"),
    ("gae", lambda r, V, W, e, d, g, l: advantages(r, V, W, d, d, g, l), "argument",
     "with done in place of terminated"),
    ("gae", lambda r, V, W, e, d, g, l: advantages(r, V, W, e, d, g, 1.0), "argument",
     "lam has no effect on yours. Yours is what is right with 1 in place of lam."),
    ("dpo_loss", lambda c, r, p, q, b: -logsigmoid((c - p - r + q) / b).mean(), "argument",
     "with 1 / beta in place of beta"),
    ("dpo_loss", lambda c, r, p, q, b: -logsigmoid(b * (c - r)).mean(), "unused",
     "ref_chosen and ref_rejected have no effect on yours."),
    ("annealed_rate", lambda i, n, s, p: s * (1 - i / (n - 1)) ** p, "argument",
     "with iterations - 1 in place of iterations"),
    ("clipped_surrogate", lambda r, A, eps: surrogate(r, A, 0.2), "unused",
     "eps has no effect on yours."),
    ("whiten",
     lambda x, m, s: kept((x - x[m].mean()) / (x[m].var(unbiased=False) + 1e-8).sqrt()
                          + (x[m].mean() if s else 0), m), "argument",
     "with not shift_mean in place of shift_mean"),
    ("group_advantage",
     lambda r, eps: (r - r.mean(0, keepdim=True)) / (r.std(0, keepdim=True) + eps), "argument",
     "with rows and columns exchanged"),  # NaN for a single row
    # a relation
    ("control_loss", lambda *x: -control_loss(*x), "sign", "The sign is flipped."),
    ("masked_mean", lambda x, m: kept(x, m).sum(), "combined",
     "Yours is what is asked for times the number of True values of mask."),
    ("rloo_advantage", lambda r: (r.sum(1, keepdim=True) - r) / (r.shape[1] - 1), "combined",
     "Yours is rewards minus what is asked for."),
    ("sequence_ratio", lambda a, b, m: kept(a - b.detach(), m).sum(-1) / m.sum(-1).clamp(min=1),
     "function", "Yours is the logarithm of what is asked for."),
    ("group_advantage",
     lambda r, eps: (r - r.median(1, keepdim=True).values) / (r.std(1, keepdim=True) + eps),
     "row_by_row", "Yours is right but for a difference in each row"),
    ("gaussian_logprob",
     lambda mu, s, a: (-((a - mu) / s) ** 2 / 2 - s.log()).sum(-1) - math.log(2 * math.pi) / 2,
     "shifted", "Where yours is wrong, all of it is 0.9189 too large."),
    ("merge_moments",
     lambda n, a, v, k, b, w: check.merge_moments.reference(n, a, v, k, b, w)[::-1], "order",
     "the results come in another order"),
    ("online_logsumexp", lambda z: z.logsumexp(0), "last",
     "not of the expected kind. Yours is the last of what is asked for."),
    # numbers where tensors come
    ("gae", lambda r, V, W, ends, done, g, l: torch.tensor([
        float(r[t]) + (0 if ends[t] else g * float(W[t])) - float(V[t]) for t in range(len(r))]),
     "scalars", "Your code takes single numbers, and here it gets tensors"),
    # a place, a term
    ("gae", lambda *x: advantages(*x, steps=1), "where",
     "Here yours is wrong only at the beginning."),
    ("token_rewards",
     lambda s, a, b, c, m: -c * (a - b) + check.token_rewards.reference(s, a, a, c, m), "where",
     "Here yours is wrong only where mask is False."),
    ("token_rewards", scores_one_late, "term",
     "Yours would be right if scores were 0"),
    ("ppo_loss",
     lambda a, b, A, V, R, H, m, eps, v, h: (v * (V - R) ** 2 / 2
                                             - surrogate((a - b.detach()).exp(), A, eps))[m].mean()
     - h * H.mean(), "term", "Yours would be right if entropy were 0"),
    ("ppo_loss",
     lambda a, b, A, V, R, H, m, eps, v, h: (v * (V - R) ** 2
                                             - surrogate((a - b.detach()).exp(), A, eps) + h
                                             * H)[m].mean(), "term",
     "if entropy were 0 and value_coef were 0"),
    ("one_step_target", lambda r, v, e, c, g: r + g * torch.where(e & ~c, 0.0, v), "term",
     "Yours would be right if next_values were 0"),
    ("dpo_loss", lambda c, r, p, q, b: -logsigmoid(b * (c - r) - (p - q)).mean(), "term",
     "Yours would be right if ref_chosen were ref_rejected"),
    ("choice_loss",
     lambda a, b, beta: -logsigmoid(beta * ((a - b)[:, 0] - (a - b)[:, 1:].mean(1))).mean(), "term",
     "Yours would be right if there were the first two elements alone"),
    # a gradient
    ("importance_ratio", lambda a, b: (a - b).exp(), "gradient",
     "a gradient flows into logp_old: detach it"),
    ("microbatch_loss",
     lambda x, m: sum(float(a[b].sum()) for a, b in zip(x, m)) / sum(int(b.sum()) for b in m),
     "no_gradient", "no gradient flows into losses"),
    ("microbatch_loss", last_microbatch_only, "constant",
     "Where yours is wrong, yours is 0 on every input tried."),
    # an edge
    ("microbatch_loss",
     lambda x, m: sum((a * b).sum() for a, b in zip(x, m)) / sum(b.sum() for b in m), "leak",
     "A value that does not count leaks"),
    ("one_step_target", lambda r, v, e, c, g: r + g * v * ~e, "leak",
     "A value that does not count leaks"),
    # NaN for an empty mask, too
    ("masked_mean", lambda x, m: (x * m).sum() / m.sum(), "leak", "x = [1, nan, 4]"),
    ("importance_ratio", lambda a, b: a.exp() / b.detach().exp(), "nan",
     "Right on ordinary inputs, but NaN on this one."),
    ("explained_variance", lambda V, R: 1 - (R - V).var() / R.var(), None,
     "Right on ordinary inputs, but not on this one."),  # -inf, and NaN on another
    ("clip_fraction", lambda r, A, eps: (r.log() * A.sign() > eps).float().mean(), None,
     "Right on ordinary inputs, but not on this one."),
    ("horner", lambda f, c: sum(c_k * f ** k for k, c_k in enumerate(c)), "powers",
     "a power of f may overflow"),
    # listed, and right at the edges
    ("explained_variance",
     lambda V, R: 0.0 if R.var() < 1e-10 else 1 - ((R - V) ** 2).mean() / R.var(unbiased=False),
     "squared_error", "You use the mean squared error"),
    # what holds by accident on few numbers is not told
    ("no_spread", lambda r: (r.mean(1) == r[:, 0]).float().mean(), None, "yours is 1"),
    ("no_spread", lambda r: (r.amax(0) == r.amin(0)).float().mean(), "argument",
     "with rows and columns exchanged"),  # 0 on the plain inputs
    ("off_policy_sequence_mask",
     lambda a, b, A, m, t: ~((A < 0) | (kept(b - a, m).sum(1) / m.sum(1) > t)), None,
     "No mistake that is known here."),
    ("data_rows", lambda d, r: torch.cat([r[None], d[:-1]]).cumsum(0) == 0, None,
     "No mistake that is known here."),  # right with True in place of done, as much else
    ("token_logprob",
     lambda z, i, T: ((z / T).softmax(-1) + 1e-8).log().gather(-1, i[..., None])[..., 0], None,
     "No mistake that is known here."),  # and with a temperature of 1
    ("control_loss",
     lambda r, A, V, R, H, eps, v, h: -(r * A).mean() + v * mse_loss(V, R) / 2 - h * H.mean(),
     "unused", "eps has no effect on yours.\n"),  # right with 1 / eps, which is large
    # a factor, of one number
    ("dual_clip",
     lambda r, A, eps, c: check.dual_clip.reference(r, A, eps, c)
     * torch.where((A < 0) & (r == 0.5), 2.0, 1.0), None, "No mistake that is known here."),
    ("kl_loss", lambda a, b, m: -check.kl_loss.reference(a, b, m), "sign",
     "Any value is right, the gradient with respect to logp is not. The sign is flipped."),
    # nothing but the numbers
    ("masked_mean", lambda x, m: kept(x, m).sum() / (m.sum() + 1), None,
     "result: expected 1.5, yours is 1"),
    ("dual_clip", lambda r, A, eps, c: np.zeros(3), "constant",
     "yours has the shape (3,), expected (1,)"),
]


@pytest.mark.parametrize(
    "name, f, mistake, words", UNSEEN, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(UNSEEN)])
def test_what_nobody_listed_is_told(name, f, mistake, words):
    verdict = getattr(check, name)(f, draw=False)
    assert not verdict and (verdict.mistake, words in verdict.text) == (mistake, True), verdict.text


def test_what_the_reader_prints_is_not_printed_for_each_fact(capsys):
    def mean(x, m):
        print("look")
        return kept(x, m).sum() / (m.sum() + 1)
    check.masked_mean(mean)
    assert capsys.readouterr().out.count("look") == len(check.masked_mean.cases)


def test_a_large_result_shows_the_first_difference():
    verdict = check.gae(
        lambda r, *x: check.gae.reference(r, *x) * (r.shape != (9, 2)) + 0.0, draw=False)
    assert "; first at [0, 0]: " in verdict.text


def test_a_hang_on_another_input_ends_the_search(monkeypatch):
    monkeypatch.setattr(outcomes, "LIMIT", 0.2)
    hangs = []
    def mean(x, m):
        if m.all() and not x.isnan().any(): hangs.append(1)
        while m.all() and not x.isnan().any(): pass
        return kept(x, m).sum() / (m.sum() + 1)
    verdict = check.masked_mean(mean)
    assert verdict.mistake is None
    assert "expected 1.5, yours is 1" in verdict.text
    assert len(hangs) == 1


def test_the_input_that_is_shown_is_one_that_the_name_is_for():
    def by_count(scores, logp, logp_ref, coef, mask):
        out = kept(-coef * (logp - logp_ref), mask)
        out[torch.arange(len(out)), mask.sum(1) - 1] += scores      # wrong without tokens, too
        return out
    verdict = check.token_rewards(by_count, draw=False)
    assert verdict.mistake == "counts" and "mask = [[False, False, True, True]]" in verdict.text


def test_copies_are_shuffled_and_the_answer_is_judged_by_them():
    x = varied(
        dict(x=torch.arange(1.0, 9.0), n=torch.arange(8), mask=torch.arange(8) > 3, k=3), seed=0)
    assert not all(i / 2 <= v <= 2 * i for i, v in enumerate(x["x"].tolist(), 1))
    assert 0.5 <= x["x"].min()
    assert x["x"].max() <= 16
    assert x["n"].tolist() != [*range(8)] == sorted(x["n"].tolist())
    assert x["mask"].tolist() == [i > 3 for i in range(8)]
    assert x["k"] == 3
    one = Exercise("one", "", lambda x: 2 * x, "f(x) -> x", "", [(torch.tensor([2.0]),)], {})
    assert one(lambda x: x + x) and not one(lambda x: x ** 2)


def test_few_numbers_say_nothing():
    right = torch.arange(1.0, 6.0)
    assert row_by_row([(torch.tensor([2.0]), torch.tensor([1.0])), (right, right)]) is None
    assert related([(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 4.0]))]) is None
    assert row_by_row([(torch.tensor([2.0]), torch.tensor([1.0]))]) is None
    assert row_by_row(
        [(torch.tensor([2.0, 4.0, 6.0, 8.0]), torch.arange(1.0, 5.0))])[0] == "row_by_row"


def test_nan_of_a_listed_mistake_speaks_not_against_its_name():
    one = Exercise("one", "", lambda x: x + 1, "f(x) -> x", "", [(torch.tensor([1.0, 2.0, 5.0]),)],
                   {"doubles": (lambda x: 2 * x + 0 / x, "You double.")}, edges=[(torch.zeros(2),)])
    assert one(lambda x: torch.where(x == 0, 1.0, 2 * x)).mistake == "doubles"
