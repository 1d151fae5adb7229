"""A value loss, a KL estimate and a preference loss, read from values and gradients."""

__all__ = ["read_value_loss", "read_kl", "read_preference_loss"]

import math

import torch

from ..formulas.kl import KL_KINDS, kl_estimate
from ..formulas.preference import DPO_KINDS, dpo_loss
from ..formulas.value import value_loss
from .cautions import empty_rows
from .calls import Unreadable
from .masks import declared, masked_apart, mode_facts
from .probing import DIALECTS, Losses, check_repeatable, noise, report_dead, same
from .report import Report, number
from .weights import SHAPES, ragged

def _tuned(subject, leaf, report, case):
    "The losses of a function, in a dialect in which it takes the case."
    losses = Losses(subject, leaf)
    subject.tune(DIALECTS, lambda dialect: losses(case))
    if "padding" in subject.roles and not case["mask"].all():
        losses.settle(case)
    check_repeatable(subject.name, lambda: list(losses(case)))
    return losses


def _values(B, T, mask, seed=1):
    R = noise(B, T, seed=seed)
    V = R + noise(B, T, seed=seed + 1)
    return dict(value=V, value_old=V + noise(B, T, seed=seed + 2), returns=R, mask=mask)


def read_value_loss(subject) -> Report:
    "Read a value loss."
    report = Report("value_loss", subject.name, axes=("V - V_old", "share of the slope V - R"))
    subject.prepare(("value", "value_old", "returns", "mask", "padding", "lengths", "logp",
                     "advantage", "logp_old"))
    losses = _tuned(subject, "value", report, _values(*SHAPES[0], ragged(*SHAPES[0])))
    batches = [(ragged(B, T, seed=B), B, T) for B, T in SHAPES]
    def slopes(m, e):
        R = noise(*m.shape, seed=31)
        return losses(dict(value=R + e, value_old=R + e, returns=R, mask=m))[1] / e
    weights = [(slopes(m, 1.0), m) for m, *_ in batches]
    if all(w.abs().max() < 1e-12 for w, _ in weights):
        return _without_gradient(report, subject, losses, batches[0][0])
    masked_apart(report, losses, _values(*SHAPES[0], batches[0][0]),
                 ("value", "value_old", "returns"))
    factor = mode_facts(report, losses, weights) / 2
    sign = math.copysign(1, factor)
    W, mask = weights[0]
    one_sign = (W[mask] * factor >= 0).all()
    if sign < 0 and one_sign:
        report.find("sign",
                    "V = 1, R = 0: the gradient at V is negative; minimising drives V from R")
    if one_sign and (report.facts["aggregation"] or not losses.reduced):
        _factor(report, subject, abs(factor))
    square = same([slopes(mask, 3.0)], [W], 1e-3)
    clip = _value_clip(report, subject, losses, weights[0])
    case = _values(*mask.shape, mask, seed=11)
    x = case["value"].clone().requires_grad_()
    clip_range = clip if clip and clip > 0 else None
    each = value_loss(x, case["value_old"], case["returns"], clip_range, mask=None)
    expected, = torch.autograd.grad((each * W).sum(), x)
    if square and same([losses(case)[1]], [expected], 1e-3):
        known = report.facts["aggregation"] or not losses.reduced
        report.formula = "value_loss" if known else None
    report.nearest = None if report.formula else "value_loss"
    rich = [_values(*m.shape, m, seed=21) for m, *_ in batches]
    report_dead(report, subject, lambda **o: [y for c in rich for y in losses(c, **o)])
    if subject.roles.keys() & {"mask", "padding", "lengths"}:
        empty_rows(report, losses, case, mask)
    return report


def _without_gradient(report, subject, losses, mask):
    "No gradient at V: a fault where the number is a square of V - R, else no loss of values."
    V = torch.ones(SHAPES[0], dtype=torch.float64)
    one, three = (losses(dict(value=k * V, value_old=k * V, returns=0 * V, mask=mask))[0]
                  for k in (1, 3))
    if not one or not same([three], [9 * one]):
        subject.doubt("a number without gradient that is no square of V - R, a statistic")
    report.find("no-gradient", "V = 1, R = 0: the gradient at V is 0, the formula gives V - R")
    return report


def _factor(report, subject, factor):
    report.facts["factor"] = number(factor)
    explained = [k * x for k in (0.5, 1) for x in (1, *subject.numbers.values())]
    if not any(abs(factor - x) < 1e-3 * factor for x in explained):
        report.find("scale", f"the loss is {factor:.4g} (V - R)^2; usual are 0.5 and 1")
    report.facts.pop("scale", None)


def _value_clip(report, subject, losses, weights):
    "The range of V around V_old, beyond which the slope vanishes; R lies far away."
    W, m = weights
    B, T = m.shape
    if "value_old" not in subject.roles: return report.facts.setdefault("clip", None)
    def share(x, far):  # (N,) with N = B: a row each
        V = x[:, None].expand(B, T)
        g = losses(dict(value=V, value_old=0 * V, returns=torch.full_like(V, far), mask=m))[1]
        return torch.where(m, g / (W * (V - far)), 0).sum(1) / m.sum(1)
    sizes = torch.logspace(-4, 2, B // 2, dtype=torch.float64)
    x = torch.cat([-sizes.flip(0), sizes])
    def edges(far):
        found, gone = [], share(x, far).abs() < 1e-6
        for i in (gone[1:] != gone[:-1]).nonzero().flatten().tolist():
            low, high = x[i], x[i + 1]
            for _ in range(3):
                at = torch.linspace(low, high, B, dtype=torch.float64)
                zero = share(at, far).abs() < 1e-6
                j = int((zero != zero[0]).nonzero()[0]) if (zero != zero[0]).any() else 1
                low, high = at[j - 1], at[j]
            found.append(((low + high) / 2).item())
        return found
    up, down = edges(200.0), edges(-200.0)
    near = x.abs() < 5
    report.curves = {f"R far {side}": (x[near], share(x, far)[near], None)
                     for side, far in (("above", 200.0), ("below", -200.0))}
    towards, away = [e for e in up if e > 0], [e for e in up if e < 0]
    report.facts["clip"] = number(towards[0]) if towards else None
    if away:
        report.facts["clip"] = number(-away[0])
        report.find("no-min",
                    "R above V_old, V below it by more than the range: the slope is 0, the "
                    "formula takes the larger of the two errors and keeps V - R")
    clips = [n for n in subject.numbers if "clip" in n.lower() or "range" in n.lower()]
    if not up and not down and clips:
        report.find("clip-missing", f"V moves by 100 from V_old towards R: the slope is V - R, "
                                    f"whatever {clips[0]} says")
    return report.facts["clip"]


PROMISED = {"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}


def read_kl(subject) -> Report:
    "Read an estimate of the KL."
    report = Report("kl", subject.name, axes=("log pi - log pi_ref", "estimate"))
    other = "logp_ref" if "logp_ref" in subject.roles else "logp_old"
    subject.prepare(("logp", "logp_ref", "logp_old", "log_ratio", "ratio", "mask", "padding",
                     "lengths"))
    def case(d, mask, shape=SHAPES[0], scale=1.0):
        x = -2 + 0.3 * noise(*shape)
        d = d if isinstance(d, torch.Tensor) else torch.full(shape, d).double()
        return {"logp": x, "logp_ref": x - d, "logp_old": x - d, "mask": mask}
    full = torch.ones(SHAPES[0], dtype=torch.bool)
    losses = _tuned(subject, "logp", report, case(0.3, full))
    D = torch.tensor([-1.5, -1.0, -0.5, -0.02, 0.0, 0.02, 0.5, 1.0, 1.5], dtype=torch.float64)
    def value(d, shape=SHAPES[0]):
        loss = losses(case(d, torch.ones(shape, dtype=torch.bool), shape))[0].item()
        return loss if losses.reduced else loss / (shape[0] * shape[1])
    v = torch.tensor([value(d) for d in D.tolist()], dtype=torch.float64)
    if losses.reduced:
        per_token = abs(value(1.0, SHAPES[1]) / (value(1.0) or 1) - 1) > 0.1
        v = v / full.numel() if per_token else v
        masked_apart(report, losses, case(noise(*SHAPES[0]), ragged(*SHAPES[0])),
                     ("logp", "logp_ref", "logp_old"))
    if abs(v[4] - 1) < 1e-3 and any(
            abs(v[i] - math.exp(s * D[i])) < 1e-4 for i in (3, 5) for s in (1, -1)):
        subject.doubt("1 where both log-probs are equal, and exp of their difference near it: a "
                      "ratio, no KL")
    _estimator(report, subject, D, v, reverse=other == "logp_old")
    if report.findings and not losses.graded and report.facts["estimator"] == "k1":
        subject.doubt("a multiple of logp - logp_ref without gradient, a KL, an advantage or a "
                      "reward")
    rich = case(noise(*SHAPES[0], seed=4), ragged(*SHAPES[0]))
    report_dead(report, subject, lambda **o: list(losses(rich, **o)))
    if losses.reduced and subject.roles.keys() & {"mask", "padding"}:
        if losses(rich)[1].any():
            shapes = [(case(0.5, ragged(B, T), (B, T)), ragged(B, T)) for B, T in SHAPES]
            mode_facts(report, losses, [(losses(c)[1], m) for c, m in shapes], scaled=False)
        empty_rows(report, losses, rich, ragged(*SHAPES[0]))
    return report


def _estimator(report, subject, D, v, reverse):
    known = {kind: kl_estimate(D, 0 * D, kind) for kind in KL_KINDS}
    turned = {kind: kl_estimate(-D, 0 * D, kind) for kind in KL_KINDS}
    report.curves = {"": (D, v, None)}
    def close(a, b): return same([a], [b], 1e-3)
    for kind, k in known.items():
        factor = ((v * k).sum() / (k * k).sum()).item()
        if factor and close(v, factor * k):
            report.facts["estimator"] = kind
            report.formula = "kl_estimate"
            if factor < 0 and not (reverse and kind == "k1"):
                report.find("kl-sign",
                            f"log pi - log pi_ref = 1: the estimate is {v[-2]:.4g}, "
                            f"{kind} gives {k[-2]:.4g}")
            if abs(abs(factor) - 1) > 1e-3:
                report.find("scale", f"the estimate is {factor:.4g} times {kind}")
    if not report.formula and close(v, turned["k3"]):
        report.facts["estimator"], report.formula = "k3", "kl_estimate"
        if not reverse:
            report.find("kl-sign",
                        f"log pi - log pi_ref = 1: the estimate is {v[-2]:.4g}, k3 gives "
                        f"{known['k3'][-2]:.4g}: its log-ratio is log pi_ref - log pi")
    if not report.formula:
        report.facts["estimator"] = "abs" if close(v, D.abs()) else None
        slope, bend = (v[5] - v[3]) / 0.04, (v[5] + v[3] - 2 * v[4]) / 0.02**2
        if not v.any():
            report.find("no-gradient", "log pi - log pi_ref = 1: the estimate is 0")
        elif report.facts["estimator"] is None and (
                v[4].abs() > 1e-4 or abs(slope + bend - 1) > 0.02 and not (
                    reverse and abs(bend - slope - 1) < 0.02)):
            report.find("kl-estimator",
                        f"log pi - log pi_ref = 0 and 1: the estimate is {v[4]:.4g} and "
                        f"{v[-2]:.4g}; k1 gives 0 and 1, k2 0 and 0.5, k3 0 and 0.3679")
    else:
        report.curves = {"": (D, v, known[report.facts["estimator"]])}
    _promised(report, subject)


def _promised(report, subject):
    "Find an estimator that an option promises and the values do not have."
    for name, text in subject.switches().items():
        wanted = PROMISED.get(text) if isinstance(text, str) else None
        if wanted and report.facts["estimator"] != wanted:
            report.find("kl-estimator",
                        f"{name}={text!r} promises {wanted}, the values are those of "
                        f"{report.facts['estimator'] or 'no known estimator'}")


PAIR = ("chosen", "rejected", "chosen_ref", "rejected_ref")


def read_preference_loss(subject) -> Report:
    "Read a preference loss."
    report = Report("preference_loss", subject.name, axes=("lead of the chosen response", "slope"))
    subject.prepare(PAIR)
    def case(h, B=96, seed=0):
        w, ref = noise(B, seed=seed), [noise(B, seed=seed + i) for i in (1, 2)]
        refs = ref if {"chosen_ref", "rejected_ref"} <= subject.roles.keys() else [0 * w, 0 * w]
        return dict(chosen=w, rejected=w - refs[0] + refs[1] - h, chosen_ref=refs[0],
                    rejected_ref=refs[1])
    losses = _tuned(subject, "chosen", report, case(noise(96, seed=9)))
    for far in (1e5, 6e2, 60):
        h = torch.cat([torch.tensor([-far, far]), torch.linspace(-8, 8, 94)]).double()
        psi = losses(case(h))[1]
        if psi.isfinite().all(): break
        report.warn("overflow", f"a lead of {far:g}: the loss or its gradient is not finite")
    if not psi.any():
        report.find("no-gradient", "a lead of 0: no gradient at the chosen response")
        return report
    mean = losses.reduced and same([losses(case(h.repeat(2), 192))[1][:96]], [psi / 2], 1e-3)
    psi = 96 * psi if mean else psi
    report.facts["aggregation"] = "mean" if mean else "sum" if losses.reduced else None
    if not _other_kind(report, subject, losses, case(noise(96, seed=5))):
        _preference_form(report, subject, h, psi)
        _reference(report, subject, losses, case)
    order = h.argsort()[1:-1]
    report.curves = {"": (h[order], psi[order], None)}
    rich = [case(noise(96, seed=3, scale=s)) for s in (1.0, 30.0)]
    report_dead(report, subject, lambda **o: [y for c in rich for y in losses(c, **o)])
    for leaf in ("chosen_ref", "rejected_ref"):
        if leaf in subject.roles:
            losses.leaf = leaf
            if losses(case(h))[1].any():
                report.warn("old-gradient",
                            f"a gradient flows into {subject.roles[leaf]}: detach it")
    return report


def _preference_form(report, subject, h, psi):
    "Logistic, squared or hinge: its slope against the lead h gives beta, margin and smoothing."
    facts, low, high, x, y = report.facts, psi[0], psi[1], h[2:], psi[2:]
    has_ref = "chosen_ref" in subject.roles
    slope = ((y[-1] - y[0]) / (x[-1] - x[0])).item()
    if abs(low) > 1e3 and same([y], [y[0] + slope * (x - x[0])], 1e-3):  # squared
        at0 = (y[0] - slope * x[0]).item()
        facts.update(form="ipo", beta=number(-slope / (2 * at0)) if at0 else None)
        report.formula = "dpo_loss" if has_ref else None
        if slope < 0 or at0 > 0:
            report.find("sign",
                        f"a lead of 0: the slope at the chosen response is {at0:.3g}, the "
                        f"formula gives -1 / beta")
        elif abs(slope - 2) > 1e-3:
            report.find("scale", f"the loss is {slope / 2:.4g} times (h - 1 / (2 beta))^2")
        return
    rise = (high - low).item()
    if abs(rise) < 1e-12: return
    s = ((y - low) / rise).clamp(1e-12, 1 - 1e-12)  # sigmoid(k h - m)
    logit = (s / (1 - s)).log()
    inside = (s > 1e-5) & (s < 1 - 1e-5)
    if inside.sum() < 3 or not inside.any():
        return _hinge(report, x, y, low, high, has_ref)
    t, u = x[inside], logit[inside]
    k = (((t - t.mean()) * (u - u.mean())).sum() / (t - t.mean()).square().sum()).item()
    m = (k * t.mean() - u.mean()).item()
    if not same([torch.sigmoid(k * x - m)], [s], 1e-3): return
    scale, smooth = rise / k, (high / rise).item()
    facts.update(form="sigmoid", beta=number(abs(k)), label_smoothing=number(smooth))
    facts |= {"margin": number(m)} if abs(m) > 1e-3 else {}
    report.formula = ("dpo_loss" if has_ref else "bradley_terry_loss" if abs(k - 1) < 1e-3
                      else "simpo_loss")
    if scale < 0 or smooth > 0.5:
        facts["label_smoothing"] = 0.0
        report.find("sign",
                    f"a lead of 0: the slope at the chosen response is {y[len(y) // 2]:.3g}, the "
                    f"formula gives a negative one; the chosen response becomes rarer")
    elif abs(scale - 1) > 2e-3:
        report.find("scale", f"the loss is {scale:.4g} times -log sigmoid(beta h)")


def _hinge(report, x, y, low, high, has_ref):
    edge = x[(y - low).abs() < 1e-6 * low.abs()]
    if len(edge) and abs(high) < 1e-9 and low < 0:
        report.facts.update(form="hinge", beta=number(-low.item()))
    elif low > 0 or high > 0:
        report.find("sign",
                    f"a lead of -8: the slope at the chosen response is {y[0]:.3g}, the "
                    f"formula gives a negative one")


def _reference(report, subject, losses, case):
    "Whether the reference counts, with the sign that it has in the lead."
    if "chosen_ref" not in subject.roles: return
    c = case(noise(96, seed=5))
    base = losses(c)
    both = losses(c | dict(chosen=c["chosen"] + 0.7, chosen_ref=c["chosen_ref"] + 0.7))
    if same(base, losses(c | dict(chosen_ref=c["chosen_ref"] + 0.7,
                                  rejected_ref=c["rejected_ref"] - 0.3))):
        report.formula = None
        report.find("baseline", "other log-probs of the reference give the same loss; the formula "
                                "takes the lead over the reference")
    elif not same(base, both, 1e-3):
        report.formula = None
        against = c | dict(chosen=c["chosen"] + 0.7, chosen_ref=c["chosen_ref"] - 0.7)
        if "form" in report.facts or same(base, losses(against), 1e-3):
            report.find("baseline", "0.7 more for the chosen response under policy and reference "
                                    "alike changes the loss; the formula takes their difference")


def _other_kind(report, subject, losses, c):
    "Whether it is a kind of `dpo_loss` that no lead alone decides, under a beta of its options."
    if "chosen_ref" not in subject.roles: return False
    for kind in [k for k in DPO_KINDS if k not in ("sigmoid", "ipo", "robust")]:
        for beta in (0.1, *(x for x in subject.numbers.values() if 0 < x)):
            x = c["chosen"].clone().requires_grad_()
            g, = torch.autograd.grad(dpo_loss(x, *(c[n] for n in PAIR[1:]), beta=beta, kind=kind),
                                     x)
            if same([losses(c)[1]], [g], 1e-3):
                report.formula = "dpo_loss"
                report.facts.update(form=kind, beta=beta)
                return True
    return False
