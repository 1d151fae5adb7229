"""A policy loss: the weight of each token's gradient, against its ratio and over the tokens."""

__all__ = ["PolicyLoss", "Curve"]

import math
import re

import torch

from ..formulas.grpo import POLICY_VARIANTS, policy_loss
from .calls import Unreadable, same
from .probing import FLAGS, REAL, Losses, edges, noise, number, ragged
from .weights import group_of

CURVE = 336  # rows of one ratio each, A > 0 and A < 0 by turns
CLIPPED = ("ppo", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token")
FAMILY = {"token-mean": "ppo", "seq-mean-token-mean": "grpo", "constant": "dr_grpo"}
UNCLIPPED = "importance|reinforce|vanilla|policy_gradient|(^|_)is(_|$)"  # names of the choice
OTHERS = ("entropy", "value", "value_old", "returns")  # of the whole loss of PPO


def halves(B: int):  # -> (B,), 1 and -1, each as often in either half of rows of equal length
    "Advantages that whitening leaves as they are."
    A = torch.ones(B // 2, dtype=torch.float64)
    A[1::2] = -1
    return torch.cat([A, -A])


def zeros(B, T): return torch.zeros(B, T, dtype=torch.float64)


def rich(B, T, seed=3):
    "Log-ratios with a part of their own and one of their response, small and large."
    wide = torch.where(noise(B, 1, seed=seed + 1) > 0, 1.0, 0.0002)
    return 0.35 * noise(B, T, seed=seed) + wide * noise(B, 1, seed=seed + 2)


class PolicyLoss(Losses):
    "A policy loss, and the batches that it is given."
    kind, axes = "policy_loss", ("ratio", "weight of the gradient")
    tries = dict(dtype=REAL, form=("B", "BT", "B1", "flat"), flags=FLAGS)
    needs = "logp|ratio|log_ratio advantage"
    supplied = ("labels logp logp_old logp_ref logp_rollout ratio log_ratio advantage mask padding "
                "lengths index entropy value value_old returns")

    def _start(self):
        self.optional = {*OTHERS} - self.subject.required()
        self.alone = False  # whether a part without advantage, a KL, is taken off
        if "labels" in self.roles:
            self.subject.take_logits()
        if "rewards" in self.roles and "advantage" not in self.roles:
            if group_of(self.subject.numbers):
                self.subject.refuse("names", "advantage")
            self.roles["advantage"] = self.roles.pop("rewards")

    def _probe(self):
        B, T = self.shapes[0]
        self.plain = self.case(zeros(B, T), halves(B), ragged(B, T))
        case = self.case(zeros(B, T) + 0.3, halves(B), ragged(B, T))
        self.settle(case)
        found = [*self(case)]
        without = self(case | dict(advantage=0 * case["advantage"]))[1]
        self.alone = bool(without.any()) and bool(without.isfinite().all())
        return found

    def case(self, logr, A, mask=None, kl=0.0, old=None, more=False):
        "A batch in which the log-ratios (B, T), advantages (B,) and log pi / pi_ref are these."
        B, T = logr.shape
        g = torch.Generator().manual_seed(B * T)
        drawn = -0.3 - 2 * torch.rand(B, T, generator=g, dtype=torch.float64)
        if old is None:  # no probability is above 1
            old = drawn - logr.clamp(min=0) + torch.as_tensor(kl).clamp(max=0)
        form, x = self.subject.dialect["form"], old + logr
        A = A if form == "B" else A[:, None] if form == "B1" else A[:, None].repeat(1, T)
        mask = torch.ones(B, T, dtype=torch.bool) if mask is None else mask
        others = [zeros(B, T)] * 4
        if more:
            draw = torch.rand(2, B, T, generator=g, dtype=torch.float64)
            others = [draw[0], 3 * draw[0], zeros(B, T), 8 * draw[1] - 4]
        return dict(logp=x, logp_old=old, logp_ref=x - kl, advantage=A, mask=mask) | {
            n: v for n, v in zip(OTHERS, others) if more or n not in self.optional}

    def _of_tokens(self, case):
        "With an advantage for each token, if that is the same here as one for each response."
        A, m = case["advantage"], case["mask"]
        if A.shape == m.shape: return case
        wide = case | dict(advantage=A.reshape(-1, 1).repeat(1, m.shape[1]))
        got = self.in_dialect(lambda: self(wide))
        return wide if got and same(got, self(case)) else case

    def grad(self, logr, A, mask=None, **rest):
        "Gradient of the policy's part: less that of A = 0, where the KL and the like are alone."
        case = self.case(logr, A, mask, **rest)
        got = self(case)[1]
        return got - self(case | dict(advantage=0 * case["advantage"]))[1] if self.alone else got

    def _read(self):
        "Sign, level, mask, aggregation, bounds, variant, KL; then what ordinary input hides."
        if not self._flows(): return
        masks = [ragged(B // 2, T, seed=B).repeat(2, 1) for B, T in self.shapes]
        weights = [(self.at_one(m), m) for m in masks]
        self.sign = self._sign(*weights[0])
        self.facts["ratio"] = self._level()
        B, T = self.shapes[0]
        A = noise(B, seed=B) + 0.2
        logr = rich(B, T)
        if not self.grad(logr, A, ragged(B, T)).any():  # all are dropped
            logr = 0.05 * logr
        case = self.case(logr, A, ragged(B, T))
        moved = dict(logp=-0.7, logp_old=-1.4, logp_ref=-2.1, advantage=2.1)
        self.check_mask(case, moved, self.facts["ratio"])
        self._aggregation([(self.sign * w, m) for w, m in weights])
        if "advantage" in self.facts:
            self.check_mask(self._of_tokens(case), moved, self.facts["ratio"])
        self.curve = Curve(self)
        self._clip()
        if self._name() and self.facts["aggregation"]:
            self.check_scale(self.facts["scale"], self.facts["aggregation"])
        self._kl(self.sign * weights[0][0], weights[0][1])
        self._cautions()

    def _outcome(self, **options):
        "Loss and gradient at large and small ratios."
        B, T = self.shapes[0]
        A, m = noise(B, seed=B) + 0.2, ragged(B, T, seed=5)
        wide = torch.linspace(-2, 2.2, B).double()[:, None] * A.sign()[:, None].roll(1)
        return [x for logr in (rich(B, T, 7) + wide, 0.002 * rich(B, T, 8))
                for x in self(self.case(logr, A, m, kl=0.8, more=True), **options)]

    @property
    def movable(self):
        "Whether bounds can have an effect."
        return not self.found("ratio-constant", "dual-clip-side")

    def _flows(self):
        "Whether any gradient reaches log pi."
        B, T = self.shapes[0]
        A, mask = noise(B, seed=B) + 0.2, ragged(B, T)
        if any(self.grad(x, A, mask).abs().max() > 1e-12 for x in (zeros(B, T), rich(B, T))):
            return True
        one, two = (self(self.case(rich(B, T), k * A, mask))[0] for k in (1, 2))
        if not self.graded and not (one and same([two], [2 * one])):
            self.subject.doubt("numbers without gradient that do not grow with the advantages, a "
                               "statistic")
        self.find("no-gradient", "logp = -1, logp_old = -1, A = 1: the gradient at logp is 0 for "
                                 "every token; the formula gives -A times the weight")

    def at_one(self, m, **rest):
        "Weights of the tokens at ratio 1, with their sign: of A < 0 where A > 0 has none."
        A = halves(len(m))
        one, other = (self.grad(zeros(*m.shape), s * A, m, **rest) / (-s * A[:, None])
                      for s in (1, -1))
        return torch.where(one.abs() > 1e-12, one, other)

    def _sign(self, w, m):
        "-1 if the loss is an objective to be maximised, or its sign is turned."
        A = halves(len(w))[:, None]
        up = self.grad(zeros(*w.shape), A[:, 0], m) / -A
        better, worse = (up[m & (s * A > 0)].mean() for s in (1, -1))
        if better * worse < 0:
            self.find("sign", "logp = logp_old, A = 1 and A = -1: the gradient has the same sign "
                              "for both; the formula gives -A times the weight")
            return 1 if better > 0 else -1
        if (w[m] < 0).double().mean() < 0.5: return 1
        if not self.reduced and self.roles.keys() & {"ratio", "log_ratio"}:
            self.facts["sign"] = "objective, to be maximised"
        else:
            self.find("sign", f"logp = logp_old, A = 1: the gradient is {-w[m][0]:.3g}, the "
                      f"formula gives {w[m][0]:.3g}; minimising it makes good tokens rarer")
        return -1

    def _level(self):
        'Whether the ratio of a token changes the gradient of the others: "token" or "sequence".'
        B, T = self.shapes[0]
        m, A, moved = ragged(B, T), halves(B), zeros(B, T)
        moved[:, 0] = 0.15 * A
        before, after = (self.grad(x, A, m)[:, 1:] for x in (zeros(B, T), moved))
        changed = (after - before).abs().max() > 1e-4 * before.abs().max()
        return "sequence" if changed else "token"

    def _aggregation(self, weights):
        """The mode and its scale. Advantages may be made inside, of rewards: whitened, so that a
        scale and a shift change nothing, or less the mean of the others."""
        B, T = self.shapes[0]
        A, facts = halves(B), self.facts
        def grad(A): return [self.grad(zeros(B, T), A)]
        shifted = self.reduced and same(grad(A + 0.5), grad(A), 1e-3)
        whitened = shifted and same(grad(2 * A + 0.5), grad(A), 1e-3)
        if shifted and not whitened:
            facts["advantage"] = "leave-one-out"
            weights = [(w * (len(w) - 1) / len(w), m) for w, m in weights]
        scale = self.read_mode(weights, 1e-2 if whitened else 2e-4)
        if whitened and abs(scale - 1) < 0.02:
            scale, facts["advantage"] = 1.0, "whitened"
        if facts["aggregation"]:
            facts["scale"] = number(scale)

    def _clip(self):
        "Bounds of the ratio and where they are wrong."
        facts, curve = self.facts, self.curve
        up, down = curve.dies(0, True), curve.dies(1, False)
        below, above = curve.dies(0, False), curve.dies(1, True)  # where the formula has weight
        facts.update(clip_low=_low(down), clip_high=_high(up), dual_clip=None)
        self.capped = False
        self.penalised = not (up and down) and self._penalised()
        flat = all((phi - 1).abs().max() < 1e-4 for phi in curve.phi)
        if "logp_old" in self.roles and flat and not self.penalised:
            return self.find("ratio-constant", "logp - logp_old = 0.5, A = 1: the weight of the "
                             "gradient is 1, the formula gives 1.65; the ratio is 1 whatever "
                             "logp_old is")
        none = [bool(phi.abs().max() < 1e-9) for phi in curve.phi]
        if all(none): return facts.update(clip_low=None, clip_high=None)
        if none[0] and self._has_value(0):
            facts["dual_clip"] = above and number(math.exp(above))
            return self.find("dual-clip-side", "A = 1, r = 1: the gradient is 0, the formula gives "
                             f"-1; the dual clip (c = {facts['dual_clip'] or '?'}) is for A < 0 "
                             "alone")
        if any(none):
            self.report.notes.append(f"tokens with A {'>' if none[0] else '<'} 0 have no weight")
            up, down = math.inf if none[0] else up, -math.inf if none[1] else down
        if not curve.is_ratio: return facts.update(clip_low=None, clip_high=None)
        self.capped = self._is_cap(up, down, below, above)
        if not self.capped:
            self._bounds(up, down, below, above)

    def _bounds(self, up, down, below, above):
        "Where a weight that is the ratio is cut off, too often or not at all."
        facts = self.facts
        if down and below and below < down - 1e-4:  # a guard against overflow
            below = None
        below, above = self._undropped(below, 1), self._undropped(above, -1)
        unbounded = not up and not below
        if above and not below and (not up or above > up + 1e-4):
            facts["dual_clip"], above = number(math.exp(above)), None
        if above or below:
            if not up and not down:
                facts.update(clip_low=_low(below), clip_high=_high(above))
            r = math.exp(2 * (below or above))
            what = "clipped ratio alone" if up or down else "larger of the two terms"
            self.find("no-min", f"A = {1 if below else -1}, r = {r:.3g}: the weight of the "
                      f"gradient is 0, the formula gives {r:.3g}; the {what} is taken, not the "
                      "smaller of r A and clip(r) A")
        elif self.penalised:
            self.report.notes.append("a penalty for the distance to the old policy, no clip")
        elif unbounded and not down and re.search(UNCLIPPED, self.subject.name.lower()):
            self.report.notes.append("an importance weight, no clip")
        elif unbounded and not down:
            self.find("clip-missing", "A = 1, r = 2: the weight of the gradient is 2; a clipped "
                      "objective gives 0, and no bound was found up to r = 130")
        elif not up or not down and not facts["dual_clip"]:
            side = "A < 0, below 1" if up else "A > 0, above 1"
            self.find("clip-missing", f"{side}: the gradient never vanishes; the formula stops it")

    def _is_cap(self, up, down, below, above):
        "Whether weights are capped, far above 1, for both signs: a truncated importance weight."
        if not up or not above or abs(up - above) > 1e-4 or math.exp(up) < 2 - 1e-3: return False
        if (down or below) and not (down and below and abs(down - below) < 1e-4): return False
        self.report.notes.append(f"weights are capped at r = {math.exp(up):.4g} for both signs")
        return True

    def _undropped(self, edge, sign):
        "None if what lies beyond the edge is dropped from the loss, not clipped."
        if edge is None or self._has_value(1.01 * edge, sign): return edge
        self.capped = True
        self.report.notes.append(f"A {'>' if sign > 0 else '<'} 0 is dropped from the loss "
                                 f"{'below' if edge < 0 else 'above'} r = {math.exp(edge):.4g}")

    def _has_value(self, logr, sign=1):
        "Whether tokens with A > 0, or A < 0, change the loss at that log-ratio."
        B, T = self.shapes[0]
        A = sign * halves(B).clamp(min=0)
        one, zero = (self(self.case(logr * A.abs()[:, None].repeat(1, T), k * A))[0]
                     for k in (1, 0))
        return not same([one], [zero])

    def _penalised(self):
        "Whether what does not depend on the advantage holds the policy at the old one."
        if not self.alone: return False
        B, T = self.shapes[0]
        case = self.case(rich(B, T), zeros(B, 1)[:, 0])
        return not same(self(case), self(case | dict(logp_old=case["logp_old"] - 0.3)))

    def _name(self):
        """The variant whose gradient this is on a random batch, with the bounds that were read off;
        gives whether its size at ratio 1 is no matter of a form of its own."""
        report, facts, (B, T) = self.report, self.facts, self.shapes[0]
        report.curves = self.curve.panels(facts)
        m = ragged(B // 2, T, seed=B).repeat(2, 1)
        if not self.masked or self.found("mask-ignored"):
            m = torch.ones_like(m)
        A = halves(B) if "advantage" in facts else noise(B, seed=B) + 0.2
        case, w = self.case(rich(B, T), A, m), self.at_one(m).abs() * m
        got, best = self.sign * self.grad(rich(B, T), A, m) * m, (2.0, None, {})
        known = (facts["aggregation"] or not self.reduced) and not self.penalised and (
            not self.capped)
        if same([got], [-(w * A[:, None])]):
            facts["ratio"] = None
            known = facts["aggregation"] and not self.penalised
            report.formula = "policy_gradient" if known else None
            return True
        for v, options in self._candidates():
            try:
                expected = _gradient(case, A, m, w, v, options)
            except (ValueError, TypeError, OverflowError): continue
            off = (got - expected).abs() > 1e-3 * expected.abs().max()
            best = min(best, (off[m].double().mean().item(), v, options), key=lambda x: x[0])
            if best[0] == 0: break
        off, v, options = best
        if off:
            report.nearest = v
            report.notes.append(f"differs from {v} in {off:.0%} of the tokens")
            twice = self.grad(rich(B, T), 2 * A, m) * m
            return self.curve.is_ratio and same([self.sign * twice], [2 * got])
        if v not in CLIPPED:  # it has a range of its own
            ranges = ("clip-missing", "no-min", "dual-clip-side")
            report.findings[:] = [x for x in report.findings if x.kind not in ranges]
        if v in ("cispo", "gmpo", "dppo"):  # its bounds are not those of the ratio
            low, high = (options.get(n, x) for n, x in
                         zip(("eps_low", "eps_high"), POLICY_VARIANTS[v][1:]))
            facts.update(clip_low=None if low >= 1 else number(low), clip_high=number(high))
        if known and not self.found("clip-missing") and (self.curve.is_ratio or v not in CLIPPED):
            report.formula = self._called(v)
        return True

    def _called(self, v):
        "The name of the variant with this objective and aggregation."
        if v not in CLIPPED[:4]: return v
        mode, uneven = self.facts["aggregation"], self.facts["clip_high"] != self.facts["clip_low"]
        return "dapo" if mode == "token-mean" and uneven else FAMILY.get(mode, "ppo")

    def _candidates(self):
        "Keyword arguments of `policy_loss` that the numbers suggest, by variant."
        facts, curve, phi = self.facts, self.curve, torch.stack(self.curve.phi)
        low, high, dual = (facts[n] for n in ("clip_low", "clip_high", "dual_clip"))
        for v in POLICY_VARIANTS:
            yield v, dict(eps_low=low or 1.0, eps_high=high or 1e6) | (
                dict(dual_clip=dual) if dual else {})
            yield v, {}
        least, most = phi.min().item(), phi.max().item()
        if most > 1:
            yield "cispo", dict(eps_low=min(1.0, 1 - max(least, 0)), eps_high=most - 1)
        at = (curve.logr - math.log(2)).abs().argmin()
        r = curve.logr[at].exp().item()
        taus = [_tau(x.item() / r, r) for x in phi[:, at]]
        if all(taus):
            yield "sapo", dict(tau=tuple(taus))
        if low and high:
            yield "gmpo", dict(eps_low=-math.log1p(-low) if low < 1 else 40.0,
                               eps_high=math.log1p(high))
        try:  # the probability of every token was 1 / e; ratios above e have no probability
            p, moved = math.exp(-1), Curve(self, zeros(self.rows(CURVE), 3) - 1)
        except Unreadable: return
        up, down = moved.dies(0, True), moved.dies(1, False)
        if up and down:
            yield "dppo", dict(eps_low=-p * math.expm1(down), eps_high=p * math.expm1(up))

    def _kl(self, weights, mask):
        "Estimator, sign and coefficient of the KL, from the gradient where A = 0."
        if "logp_ref" not in self.roles: return
        A, w, d = torch.zeros(len(mask)).double(), weights.abs(), torch.tensor([-1, -0.4, 0.4, 1])
        def slope(d):
            g = self(self.case(zeros(*mask.shape), A, mask, kl=zeros(*mask.shape) + d))[1]
            return (g[mask] / w[mask]).mean()
        d = d.double()
        q = torch.stack([slope(x) for x in d])
        if not q.any(): return self.facts.update(kl=None)
        for name, shape in dict(k1=1 + 0 * d, k2=d, k3=-torch.expm1(-d),
                                turned=-torch.expm1(d)).items():
            coef = (q / shape).mean().item()
            if not same([q], [coef * shape], 1e-3): continue
            self.facts.update(kl=name.replace("turned", "k3"), kl_coef=number(abs(coef)))
            if coef < 0 or name == "turned":
                what = ("exp(d) - 1 - d; the formula is exp(-d) - 1 + d" if name == "turned" else
                        "minus the KL: minimising it leaves pi_ref")
                self.find("kl-sign", f"log pi - log pi_ref = 1: the gradient is {q[3]:.3g}, that "
                                     f"of {what}")
            elif name == "k1":
                self.find("kl-estimator", "k1 in the loss: its gradient is the same for every "
                          "distance to pi_ref, 0 on average; the formula gives k2 or k3")
            return
        self.facts.update(kl="unknown")

    def _cautions(self):
        B, T = self.shapes[0]
        A, m, far = halves(B) * 0.85 + 0.15, ragged(B, T, seed=9), zeros(B, T)
        case = self.case(0.1 * torch.sin(torch.arange(B * T).double()).view(B, T), A, m)
        self.check_empty(case, ("logp", "logp_old", "logp_ref", "value", "value_old", "returns"))
        far[:, 0] = 100 * A.sign()
        got = self.in_dialect(lambda: self(self.case(far, A)), dtype=torch.float32)
        if got and not all(bool(x.isfinite().all()) for x in got):
            self.warn("overflow", "log-ratio 100, A > 0: loss or gradient is not finite in "
                                  "float32; the formula gives 0")
        half = {n: x.bfloat16().double() if x.is_floating_point() else x
                for n, x in self.case(rich(B, T) * 0.1, 1 + 0 * A, m).items()}
        self.check_half(lambda: self(half), 1e-5 * self(half)[1].abs().sum())
        for leaf, kind in (("logp_old", "old-gradient"), ("advantage", "advantage-gradient")):
            got = leaf in self.roles and self.in_dialect(lambda: self(case, leaf=leaf))
            if got and got[1].any():
                self.warn(kind, f"a gradient flows into {self.roles[leaf]}: detach it")


def _high(x): return x and number(math.expm1(x))
def _low(x): return x and number(-math.expm1(x))


def _tau(y, r):
    "The temperature of SAPO's gate whose slope at r is y."
    if not 0 < y < 1: return None
    s = (1 + math.sqrt(1 - y)) / 2
    return math.log(s / (1 - s)) / (r - 1)


def _gradient(case, A, mask, weights, variant, options):
    "Of our loss with these weights of the tokens."
    x = case["logp"].clone().requires_grad_()
    loss, _ = policy_loss(x, case["logp_old"], A, mask, variant, aggregation="token-mean",
                          weight=weights * mask.sum(), **options)
    return torch.autograd.grad(loss, x)[0]


class Curve:
    "The weight of the gradient against the ratio, for A > 0 and A < 0, and where it vanishes."

    def __init__(self, policy, old=None):
        self.policy, self.old, B = policy, old, policy.rows(CURVE)
        self.shape = (B, 3)
        self.A = halves(B)
        at_one = policy.at_one(torch.ones(B, 3, dtype=torch.bool), old=old)[:, 0]
        self.norm = policy.sign * at_one.abs().clamp(min=1e-300)
        sizes = torch.logspace(-5, 0.69, B // 4, dtype=torch.float64)
        self.logr = torch.cat([-sizes.flip(0), sizes])
        self.phi, r = self(self.logr), self.logr.exp()
        self.is_ratio = all(bool(((phi.abs() < 1e-9) | ((phi / r - 1).abs() < 1e-4)).all())
                            for phi in self.phi)
        self.edges = [[*edges(lambda x: self(x)[side], self.logr)] for side in (0, 1)]

    def __call__(self, logr):  # (B / 2,)
        "Weights at these log-ratios, for A > 0 and for A < 0."
        both, up = torch.empty(len(self.A), dtype=torch.float64), self.A > 0
        both[up] = both[~up] = logr
        g = self.policy.grad(both[:, None].expand(self.shape), self.A, old=self.old)[:, 0]
        g = g / (-self.A * self.norm)
        return g[up], g[~up]

    def dies(self, side, above):  # above or below ratio 1 -> log-ratio or None
        "Where the weight becomes 0 on the way from ratio 1."
        found = [x for x, gone in self.edges[side] if (x > 0) == above and gone == above]
        return min(found, key=abs) if found else None

    def panels(self, facts):
        "Fingerprint and clipped objective, for A > 0 and A < 0."
        low, high = (facts[n] or 0.2 for n in ("clip_low", "clip_high"))
        dual = facts["dual_clip"] or math.inf
        ends = (1 - 4 * high, 1 + 4 * high) if max(low, high) < 0.05 else (
            0.2, max(4.0, 1.3 * (facts["dual_clip"] or 0)))
        r = torch.linspace(*ends, len(self.logr), dtype=torch.float64)
        phi = self(r.log())
        return {"A > 0": (r, phi[0], torch.where(r > 1 + high, 0, r)),
                "A < 0": (r, phi[1], torch.where((r < 1 - low) | (r > dual), 0, r))}
