"""A value loss, a KL estimate and a preference loss, read from values and gradients."""

__all__ = ["ValueLoss", "KL", "PreferenceLoss"]

import math

import torch

from ..formulas.kl import KL_KINDS, kl_estimate
from ..formulas.preference import DPO_KINDS, dpo_loss
from ..formulas.value import value_loss
from .calls import same
from .probing import Losses, edges, noise, number, ragged


class ValueLoss(Losses):
    "The slope at V: its weights over the tokens, and the range in which it is V - R."
    kind, axes, leaf = "value_loss", ("V - V_old", "share of the slope V - R"), "value"
    needs = "value returns"
    supplied = "value value_old returns mask padding lengths logp advantage logp_old"

    def case(self, mask, seed=1):
        "Values about their returns, old values about them."
        R, e, old = (noise(*mask.shape, seed=seed + i) for i in range(3))
        return dict(value=R + e, value_old=R + e + old, returns=R, mask=mask)

    def _probe(self):
        case = self.case(ragged(*self.shapes[0]))
        self.settle(case)
        if self.subject.vague and not self._moves():
            self._turn()
            self._moves() or self._turn()
        return [*self(case)]

    def _turn(self):
        self.roles |= dict(value=self.roles["value_old"], value_old=self.roles["value"])

    def _moves(self): return bool(self.slopes(self.batches[0], 1.0).any())

    def slopes(self, mask, error):
        "The gradient for one error of every value, per unit of it."
        R = noise(*mask.shape, seed=31)
        return self(dict(value=R + error, value_old=R + error, returns=R, mask=mask))[1] / error

    def _outcome(self, **options): return [
        y for m in self.batches for y in self(self.case(m, seed=21), **options)]

    def _read(self):
        for error in (1.0, 0.01):  # an error may be capped
            weights = [(self.slopes(m, error), m) for m in self.batches]
            if any(w.abs().max() > 1e-12 for w, _ in weights): break
        else: return self._without_gradient()
        W, mask = weights[0]
        self.check_mask(self.case(mask), dict(value=0.7, value_old=1.4, returns=2.1))
        factor = self.read_mode(weights) / 2
        known = self.facts["aggregation"] or not self.reduced
        if (W[mask] * factor >= 0).all():
            if factor < 0:
                self.find("sign", "V = 1, R = 0: the gradient at V is negative; minimising drives "
                                  "V from R")
            square = [self.slopes(mask, error) for error in (0.1, -1.0)]
            if known and same(square, [W, W], 1e-3):
                self._factor(abs(factor))
        self._clip(W, mask)
        case, clip = self.case(mask, seed=11), self.facts["clip"]
        x = case["value"].clone().requires_grad_()
        each = value_loss(x, case["value_old"], case["returns"], clip or None, mask=None)
        expected, = torch.autograd.grad((each * W).sum(), x)
        right = same([self.slopes(mask, 3.0), self(case)[1]], [W, expected], 1e-3)
        self.report.formula = "value_loss" if right and known else None
        self.report.nearest = None if self.report.formula else "value_loss"
        self.check_empty(case, ("value", "value_old", "returns"))

    def _without_gradient(self):
        "No gradient at V: a fault where the number is a square of V - R, else no loss of values."
        V = torch.ones(self.shapes[0]).double()
        one, three = (self(dict(value=k * V, value_old=k * V, returns=0 * V,
                                mask=self.batches[0]))[0] for k in (1, 3))
        if not one or not one.isfinite() or not same([three], [9 * one]):
            self.subject.doubt("a number without gradient that is no square of V - R, a statistic")
        self.find("no-gradient", "V = 1, R = 0: the gradient at V is 0, the formula gives V - R")

    def _factor(self, factor):
        self.facts["factor"] = number(factor)
        options = [x for x in self.subject.numbers.values() if x]
        known = [k * y for k in (0.5, 1) for x in (1, *options) for y in (x, 1 / x, 1 / x**2)]
        if not any(abs(factor - x) < 1e-3 * factor for x in known):
            self.find("scale", f"the loss is {factor:.4g} (V - R)^2; usual are 0.5 and 1")

    def _clip(self, W, m):
        "The range of V around V_old, beyond which the slope vanishes; R lies far away."
        self.facts["clip"] = None
        if "value_old" not in self.roles: return
        def share(x, far):  # (B,): a row each
            V = x[:, None].expand(m.shape)
            g = self(dict(value=V, value_old=0 * V, returns=torch.full_like(V, far), mask=m))[1]
            return torch.where(m, g / (W * (V - far)), 0).sum(1) / m.sum(1)
        sizes = torch.logspace(-4, 2, len(m) // 2, dtype=torch.float64)
        x = torch.cat([-sizes.flip(0), sizes])
        up, down = ([e for e, _ in edges(lambda x: share(x, far), x)] for far in (200.0, -200.0))
        near = x.abs() < 5
        self.report.curves = {f"R far {side}": (x[near], share(x, far)[near], None)
                              for side, far in (("above", 200.0), ("below", -200.0))}
        away = [-e for e in up if e < 0]
        self.facts["clip"] = next((number(e) for e in [*away, *up] if e > 0), None)
        name = next((n for n in self.subject.numbers if "clip" in n.lower() or "range" in n), None)
        if away:
            self.find("no-min", "R above V_old, V below it by more than the range: the slope is 0, "
                      "the formula takes the larger of the two errors and keeps V - R")
        elif name and not up and not down:
            self.find("clip-missing", "V moves by 100 from V_old towards R: the slope is V - R, "
                                      f"whatever {name} says")


PROMISED = {"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}


class KL(Losses):
    "The estimate against the log-ratio."
    kind, axes = "kl", ("log pi - log pi_ref", "estimate")
    needs, tries = "logp|ratio|log_ratio", dict(array=("tensor", "numpy")) | Losses.tries
    supplied = "logp logp_ref logp_old log_ratio ratio mask padding lengths"
    D = torch.tensor([-1.5, -1.0, -0.5, -0.02, 0.0, 0.02, 0.5, 1.0, 1.5], dtype=torch.float64)

    def case(self, d, mask=None, shape=None):
        "Log-probs whose difference is d."
        mask = torch.ones(shape or self.shapes[0], dtype=torch.bool) if mask is None else mask
        x = -2 + 0.3 * noise(*mask.shape)
        return dict(logp=x, logp_ref=x - d, logp_old=x - d, mask=mask)

    def _probe(self):
        self.settle(self.case(0.3, self.batches[0]))
        return [*self(self.case(0.3))]

    def _outcome(self, **options):
        return [*self(self._rich(), **options)]

    def _rich(self): return self.case(noise(*self.shapes[0], seed=4), ragged(*self.shapes[0]))

    def _read(self):
        def value(d, shape=None): return self(self.case(d, shape=shape))[0] / self.numel
        v, grown = torch.stack([value(d) for d in self.D]), value(1.0, self.shapes[1])
        grown = grown / (value(1.0) or 1)
        (B, T), (B2, T2) = self.shapes  # a sum over tokens, over responses, or over both?
        v = v / next((n for n, r in ((T, T2 / T), (B, B2 / B), (B * T, B2 * T2 / (B * T)))
                      if abs(grown - r) < 1e-3), 1)
        v = torch.where(v.abs() < 1e-12, 0, v)
        rich = self._rich()
        if self.reduced:
            self.check_mask(rich, dict(logp=0.7, logp_ref=1.4, logp_old=1.4))
        near = self.D.abs() < 0.1
        if any(same([v[near]], [(s * self.D[near]).exp()]) for s in (1, -1)):
            self.subject.doubt("1 where both log-probs are equal, and exp of their difference near "
                               "it: a ratio, no KL")
        if v[4] and same([v], [v[4].expand_as(v)]):
            self.subject.doubt("the same for any log-ratio that all tokens have, a statistic")
        self.report.curves = {"": (self.D, v, None)}
        if not self.found("mask-leak"):
            self._estimator(v, "logp_ref" not in self.roles)
        if self.report.findings and not self.graded and self.facts.get("estimator") == "k1":
            self.subject.doubt("a multiple of logp - logp_ref without gradient, a KL, an advantage "
                               "or a reward")
        if self.reduced and self.masked:
            if self(rich)[1].any():
                self.read_mode([(self(self.case(0.5, m))[1], m) for m in self.batches])
            self.check_empty(rich, ("logp", "logp_ref", "logp_old"))

    def _estimator(self, v, reverse):  # log-probs before an update: the ratio may be turned
        D, facts = self.D, self.facts
        known = {kind: kl_estimate(D, 0 * D, kind) for kind in KL_KINDS}
        turned = kl_estimate(-D, 0 * D, "k3")
        fits = {kind: ((v * k).sum() / (k * k).sum()).item() for kind, k in known.items()}
        kind = next((k for k, f in fits.items() if f and same([v], [f * known[k]], 1e-3)), None)
        if kind:
            if fits[kind] < 0 and not (reverse and kind == "k1"):
                self.find("kl-sign", f"log pi - log pi_ref = 1: the estimate is {v[-2]:.4g}, "
                                     f"{kind} gives {known[kind][-2]:.4g}")
            if abs(abs(fits[kind]) - 1) > 1e-3:
                self.find("scale", f"the estimate is {fits[kind]:.4g} times {kind}")
        elif same([v], [turned], 1e-3):
            kind = "k3"
            if not reverse:
                self.find("kl-sign", f"log pi - log pi_ref = 1: the estimate is {v[-2]:.4g}, k3 "
                          f"gives {known[kind][-2]:.4g}: its log-ratio is log pi_ref - log pi")
        facts["estimator"] = kind
        if kind:
            self.report.formula = "kl_estimate"
            self.report.curves = {"": (D, v, known[kind])}
        elif same([v], [D.abs()], 1e-3):
            facts["estimator"] = "abs"
        elif not v.any():
            self.find("no-gradient", "log pi - log pi_ref = 1: the estimate is 0")
        elif v[4].abs() < 1e-4 and (v < 1e-6).all():
            self.find("kl-sign", f"log pi - log pi_ref = 1: the estimate is {v[-2]:.4g}; a "
                                 "divergence is at least 0")
        else:
            slope, bend = (v[5] - v[3]) / 0.04, (v[5] + v[3] - 2 * v[4]) / 0.02**2
            ways = [slope + bend] + [bend - slope] * reverse  # 1: the KL on average, near pi_ref
            other = (v > -1e-6).all() or (v * D > -1e-6).all() and 0.02 < slope + bend < 1
            if v[4].abs() > 1e-4 or not (other or any(abs(way - 1) < 0.02 for way in ways)):
                self.find("kl-estimator", f"log pi - log pi_ref = 0 and 1: the estimate is "
                          f"{v[4]:.4g} and {v[-2]:.4g}; k1 gives 0 and 1, k2 0 and 0.5, k3 0 and "
                          "0.3679")
        for name, text in self.subject.switches.items():
            wanted = PROMISED.get(text) if isinstance(text, str) else None
            if wanted and facts["estimator"] != wanted:
                self.find("kl-estimator", f"{name}={text!r} promises {wanted}, the values are "
                                          f"those of {facts['estimator'] or 'no known estimator'}")


PAIR = ("chosen", "rejected", "chosen_ref", "rejected_ref")
N = 96


class PreferenceLoss(Losses):
    "The slope at the chosen response against its lead h."
    kind, axes, leaf = "preference_loss", ("lead of the chosen response", "slope"), "chosen"
    needs = "chosen rejected"
    supplied = " ".join([*PAIR, "mask padding", *(f"{side}_{what}" for side in PAIR[:2]
                                                  for what in ("mask", "padding", "lengths"))])

    def _start(self):
        self.masks = [r for r in self.roles if r.endswith(("mask", "padding"))]
        self.count, self.averaged = 4, False  # tokens of a response; the mean of theirs is taken

    def __call__(self, case, leaf=None, **options):
        "(loss, its gradient at the log-prob of each response)."
        if not self.masks:
            ones = torch.ones(len(case["chosen"]))
            return super().__call__(case | dict(chosen_lengths=ones, rejected_lengths=ones), leaf,
                                    **options)
        tokens, leaf = self.tokens(case), leaf or self.leaf
        loss, grad = super().__call__(tokens, leaf, **options)
        grad = grad * tokens[leaf.split("_")[0] + "_mask"]
        return loss, grad.sum(1) / (1 if self.averaged else self.count)

    def tokens(self, case, under=0.0):
        "The log-probs of responses as those of their tokens, and the masks with this under them."
        t, one_mask, out = torch.arange(8), self.masks[0] in ("mask", "padding"), {}
        for i, (name, x) in enumerate(case.items()):
            side, first = name.split("_")[0], int(name.startswith("rejected") and not one_mask)
            m = ((t >= first) & (t < first + self.count)).expand(len(x), 8)
            each = x[:, None] / (1 if self.averaged else self.count)
            out |= {name: torch.where(m, each, under * i * i), f"{side}_mask": m,
                    f"{side}_padding": ~m, f"{side}_lengths": m.sum(1)}
        return out | dict(mask=m, padding=~m)

    def _check_masks(self):
        "Find that what is under a mask reaches the loss."
        case = self.case(noise(N, seed=7))
        base, junk = (self.tokens(case, under) for under in (0.0, -0.7))
        whole = junk | {r: torch.full_like(junk[r], r.endswith("mask")) for r in self.masks}
        losses = [super(PreferenceLoss, self).__call__(x)[:1] for x in (base, junk, whole)]
        if same(*losses[:2]): return
        names = " and ".join(self.roles[r] for r in self.masks)
        self.find("mask-ignored" if same(*losses[1:]) else "mask-leak",
                  f"other log-probs where {names} leave a token out change the loss")

    def case(self, h, seed=0):
        "Pairs in which the chosen response leads by h."
        w, *ref = (noise(len(h), seed=seed + i) - 9 for i in range(3))
        ref = ref if self.has_ref else [0 * w, 0 * w]
        return dict(chosen=w, rejected=w - ref[0] + ref[1] - h, chosen_ref=ref[0],
                    rejected_ref=ref[1])

    @property
    def has_ref(self): return {"chosen_ref", "rejected_ref"} <= self.roles.keys()

    def _probe(self):
        case, losses = self.case(noise(N, seed=9)), []
        for self.count in (2, 4) if self.masks and not self.averaged else ():
            losses.append(self(case)[:1])
        self.averaged |= bool(losses) and not same(*losses)
        return [*self(case)]

    def _outcome(self, **options): return [
        y for s in (1.0, 30.0) for y in self(self.case(noise(N, seed=3, scale=s)), **options)]

    def _read(self):
        if self.masks:
            self._check_masks()
        for far in (1e5, 6e2, 60):
            ends = torch.tensor([-far, far, -far / 2, far / 2])
            h = torch.cat([ends, torch.linspace(-8, 8, N - 4)]).double()
            psi = self(self.case(h))[1]
            if psi.isfinite().all(): break
            self.warn("overflow", f"a lead of {far:g}: the loss or its gradient is not finite")
        if not psi.any():
            return self.find("no-gradient", "a lead of 0: no gradient at the chosen response")
        mean = self.reduced and same([self(self.case(h.repeat(2)))[1][:N]], [psi / 2], 1e-3)
        psi = N * psi if mean else psi
        self.facts["aggregation"] = "mean" if mean else "sum" if self.reduced else None
        if not self._other_kind() and self._of_lead():
            self._form(h, psi)
            self._reference()
        self.report.curves = {"": (h[4:], psi[4:], None)}
        for leaf in PAIR[2:]:
            if leaf in self.roles and self(self.case(h), leaf=leaf)[1].any():
                self.warn("old-gradient", f"a gradient flows into {self.roles[leaf]}: detach it")

    def _of_lead(self):
        "Whether the lead alone decides: 7 nats more for both responses change nothing."
        c = self.case(0.3 * noise(N))
        likely = {n: c[n] + 7 for n in ("chosen", "rejected")}
        slope = self(c)[1]
        if same([slope, slope], [self(c | likely)[1], -self(c, leaf="rejected")[1]]): return True
        self.report.nearest = "dpo_loss" if self.has_ref else "bradley_terry_loss"
        self.report.notes.append("more than the lead of the chosen response decides")

    def _form(self, h, psi):
        "Squared, hinge or logistic: its slope against the lead gives beta, margin and smoothing."
        facts, low, high, x, y = self.facts, psi[0].item(), psi[1].item(), h[4:], psi[4:]
        slope, rise = ((y[-1] - y[0]) / (x[-1] - x[0])).item(), high - low
        at0 = (y[0] - slope * x[0]).item()
        says = f"a lead of 0: the slope at the chosen response is {at0:.3g}, the formula gives "
        if not same([psi[:2]], [psi[2:4]], 1e-3):  # no end of growth
            if not same([psi], [at0 + slope * h], 1e-3): return
            facts.update(form="ipo", beta=number(-slope / (2 * at0)) if at0 else None)
            self.report.formula = "dpo_loss" if self.has_ref else None
            if slope < 0 or at0 > 0:
                self.find("sign", says + "-1 / beta")
            elif abs(slope - 2) > 1e-3:
                self.find("scale", f"the loss is {slope / 2:.4g} times (h - 1 / (2 beta))^2")
            return
        if abs(rise) < 1e-12: return
        s = ((y - low) / rise).clamp(1e-12, 1 - 1e-12)  # sigmoid(k h - m)
        inside = (s > 1e-5) & (s < 1 - 1e-5)
        t, u = x[inside], (s / (1 - s)).log()[inside]
        if len(t) < 3:
            if abs(high) < 1e-9 and low < 0:
                facts.update(form="hinge", beta=number(-low))
                self.report.formula = "hinge"
            elif low > 0 or high > 0:
                self.find("sign", says + "a negative one for a negative lead")
            return
        k = (((t - t.mean()) * (u - u.mean())).sum() / (t - t.mean()).square().sum()).item()
        m = (k * t.mean() - u.mean()).item()
        if not same([torch.sigmoid(k * x - m)], [s], 1e-3): return
        smooth = high / rise
        form = "robust" if smooth < -1e-6 else "sigmoid"
        smooth = smooth / (2 * smooth - 1) if form == "robust" else smooth
        facts.update(form=form, beta=number(abs(k)), label_smoothing=number(smooth))
        facts |= {"margin": number(m)} if abs(m) > 1e-3 else {}
        self.report.formula = ("dpo_loss" if self.has_ref else "bradley_terry_loss"
                               if abs(k - 1) < 1e-3 else "simpo_loss")
        if rise / k < 0 or smooth > 0.5:
            facts["label_smoothing"] = 0.0
            self.find("sign", says + "a negative one; the chosen response becomes rarer")
        elif abs(rise / k - 1) > 2e-3:
            self.find("scale", f"the loss is {rise / k:.4g} times -log sigmoid(beta h)")

    def _reference(self):
        "Whether the reference counts, with the sign that it has in the lead."
        if "chosen_ref" not in self.roles: return
        c = self.case(noise(N, seed=5))
        base = self(c)
        def moved(chosen=0.0, ref=0.0, other=0.0): return self(c | dict(
            chosen=c["chosen"] + chosen, chosen_ref=c["chosen_ref"] + ref,
            rejected_ref=c["rejected_ref"] + other))
        if same(base, moved(ref=0.7, other=-0.3)):
            says = ("other log-probs of the reference give the same loss; the formula takes the "
                    "lead over the reference")
        elif not same(base, moved(0.7, 0.7), 1e-3) and (
                "form" in self.facts or same(base, moved(0.7, -0.7), 1e-3)):
            says = ("0.7 more for the chosen response under policy and reference alike changes the "
                    "loss; the formula takes their difference")
        else: return
        self.report.formula = None
        self.find("baseline", says)

    def _other_kind(self):
        "Whether it is a kind of `dpo_loss` that no lead alone decides, with a beta of its own."
        if not self.has_ref: return False
        c = self.case(noise(N, seed=5))
        x, got = c["chosen"].clone().requires_grad_(), self(c)[1]
        for kind in [k for k in DPO_KINDS if k not in ("sigmoid", "ipo", "robust")]:
            for beta in (0.1, *(x for x in self.subject.numbers.values() if 0 < x)):
                loss = dpo_loss(x, *(c[n] for n in PAIR[1:]), beta=beta, kind=kind)
                if same([got], torch.autograd.grad(loss, x), 1e-3):
                    self.report.formula = "dpo_loss"
                    self.facts.update(form=kind, beta=beta)
                    return True
        return False
