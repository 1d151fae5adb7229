"""A policy loss: the weight of each token's gradient, against its ratio and over the tokens."""

__all__ = ["read_policy"]

import math

import torch

from ..formulas.grpo import POLICY_VARIANTS, policy_loss
from .calls import Unreadable
from .cautions import loss_cautions
from .fingerprint import CURVE, Curve, halves
from .masks import declared, group_of, has
from .probing import Losses, check_repeatable, report_dead, same
from .report import Report, number
from .weights import SHAPES, ragged, read_mode

SUPPLIED = ("labels logp logp_old logp_ref logp_rollout ratio log_ratio advantage mask padding "
            "lengths index entropy value value_old returns").split()


class Policy:
    "A policy loss, and the batches that it is given."

    def __init__(self, subject, report):
        self.subject, self.report = subject, report
        self.losses = Losses(subject, "logp")
        self.optional = {"entropy", "value", "value_old", "returns"} - subject.required()

    def case(self, logr, A, mask=None, kl=0.0, old=None, more=False):
        "A batch in which the log-ratios (B, T), advantages (B,) and log pi / pi_ref are these."
        B, T = logr.shape
        g = torch.Generator().manual_seed(B * T)
        drawn = -0.3 - 2 * torch.rand(B, T, generator=g, dtype=torch.float64)
        if old is None:  # no probability is above 1
            old = drawn - logr.clamp(min=0) + torch.as_tensor(kl).clamp(max=0)
        mask = torch.ones(B, T, dtype=torch.bool) if mask is None else mask
        x = old + logr
        case = dict(logp=x, logp_old=old, logp_ref=x - kl, advantage=self._shaped(A, T), mask=mask)
        zero = torch.zeros(B, T, dtype=torch.float64)
        if more:
            draw = torch.rand(B, T, generator=g, dtype=torch.float64)
            others = dict(entropy=draw, value=3 * draw, value_old=zero, returns=zero - 2)
        else:
            others = dict.fromkeys(("entropy", "value", "value_old", "returns"), zero)
        return case | {n: v for n, v in others.items() if more or n not in self.optional}

    def _shaped(self, A, T):
        if A.ndim == 2: return A
        how = self.subject.dialect.get("adv", "B")
        return A if how == "B" else A[:, None] if how == "B1" else A[:, None].repeat(1, T)

    def grad(self, logr, A, mask=None, **rest):
        "Gradient of the policy's part: less that of A = 0, where the KL and the like are alone."
        case = self.case(logr, A, mask, **rest)
        got = self.losses(case)[1]
        if not self.alone: return got
        return got - self.losses(case | dict(advantage=torch.zeros_like(case["advantage"])))[1]

    def tune(self):
        "Find the dialect on a random batch; then see whether the function repeats itself."
        B, T = SHAPES[0]
        mask, logr = ragged(B, T), torch.zeros(B, T, dtype=torch.float64)
        def attempt(dialect):
            return self.losses(self.case(logr, halves(B), mask))
        self.subject.tune(dict(dtype=(torch.float64, torch.float32), adv=("B", "BT", "B1", "flat"),
                               mask=("bool", "float", "int")), attempt)
        if "padding" in self.subject.roles:
            self.losses.settle(self.case(logr, halves(B), mask))
        self.alone = False
        zero = self.losses(self.case(logr, 0 * halves(B), mask))[1]
        self.alone = bool(zero.any()) and bool(zero.isfinite().all())
        check_repeatable(self.subject.name, lambda: list(self.losses(self.case(
            logr + 0.3, halves(B), mask))))


def read_policy(subject) -> Report:
    "Read a policy loss."
    report = Report("policy_loss", subject.name, axes=("ratio", "weight of the gradient"))
    if "advantage" in subject.roles and "labels" in subject.roles:
        subject.take_logits()
    subject.prepare(SUPPLIED)
    policy = Policy(subject, report)
    policy.tune()
    if not _flows(policy): return report
    weights = [_weights(policy, *shape) for shape in SHAPES]
    sign = _sign(policy, weights)
    report.facts["ratio"] = level = _level(policy)
    _mask(policy, weights, level)
    _aggregation(policy, [(sign * w, m) for w, m in weights])
    curve = Curve(policy, sign)
    _clip(policy, curve)
    _name(policy, curve, sign)
    _kl(policy, sign * weights[0][0], weights[0][1])
    _options(policy)
    loss_cautions(policy)
    return report


def _rich(B, T, seed=3):
    "Log-ratios with a part of their own and one of their response, small and large."
    g = torch.Generator().manual_seed(seed)
    def normal(*shape): return torch.randn(*shape, generator=g, dtype=torch.float64)
    return 0.35 * normal(B, T) + torch.where(normal(B, 1) > 0, 0.7, 0.0002) * normal(B, 1)


def _advantages(B):
    g = torch.Generator().manual_seed(B)
    return torch.randn(B, generator=g, dtype=torch.float64) + 0.2


def _flows(policy):
    "Whether any gradient reaches log pi."
    B, T = SHAPES[0]
    A, mask = _advantages(B), ragged(B, T)
    every = [policy.grad(logr, A, mask) for logr in (torch.zeros(B, T).double(), _rich(B, T))]
    if any(g.abs().max() > 1e-12 for g in every): return True
    one, two = (policy.losses(policy.case(_rich(B, T), k * A, mask))[0] for k in (1, 2))
    if not policy.losses.graded and not (one and same([two], [2 * one])):
        policy.subject.doubt("numbers without gradient that do not grow with the advantages, a "
                             "statistic")
    policy.report.find("no-gradient", "logp = -1, logp_old = -1, A = 1: the gradient at logp is 0 "
                                      "for every token; the formula gives -A times the weight")
    return False


def _weights(policy, B, T):
    "Weights of the tokens at ratio 1, with their sign: of A < 0 where A > 0 has none."
    m = ragged(B // 2, T, seed=B).repeat(2, 1)
    zero, A = torch.zeros(B, T, dtype=torch.float64), halves(B)
    one, other = (policy.grad(zero, s * A, m) / (-s * A[:, None]) for s in (1, -1))
    return torch.where(one.abs() > 1e-12, one, other), m


def _sign(policy, weights):
    "-1 if the loss is an objective to be maximised, or its sign is turned."
    w, m = weights[0]
    A = halves(len(w))
    up = policy.grad(torch.zeros_like(w), A, m)
    negative = (w[m] < 0).double().mean()
    up_positive, up_negative = (-(up / A[:, None])[m & (A * s > 0)[:, None]] for s in (1, -1))
    if ((up_positive.mean() > 0) != (up_negative.mean() > 0) and up_positive.any()
        and up_negative.any()):
        policy.report.find("sign", "logp = logp_old, A = 1 and A = -1: the gradient has the same "
                                   "sign for both; the formula gives -A times the weight")
        return 1 if up_positive.mean() > 0 else -1
    if negative < 0.5: return 1
    objective = not policy.losses.reduced and policy.subject.roles.keys() & {"ratio", "log_ratio"}
    if objective:
        policy.report.facts["sign"] = "objective, to be maximised"
    else:
        policy.report.find("sign",
                           f"logp = logp_old, A = 1: the gradient is {-w[m][0]:.3g}, the formula "
                           f"gives {w[m][0]:.3g}; minimising it makes good tokens rarer")
    return -1


def _level(policy):
    'Whether the ratio of a token changes the gradient of the others: "token" or "sequence".'
    B, T = SHAPES[0]
    m, zero, A = ragged(B, T), torch.zeros(B, T, dtype=torch.float64), halves(B)
    moved = zero.clone()
    moved[:, 0] = 0.15 * A
    before, after = policy.grad(zero, A, m)[:, 1:], policy.grad(moved, A, m)[:, 1:]
    changed = (after - before).abs() > 1e-4 * before.abs().max()
    return "sequence" if changed.any() else "token"


def _mask(policy, weights, level):
    "Find an effect of tokens under the mask: there is none if all is right."
    roles, report = policy.subject.roles, policy.report
    if not roles.keys() & {"mask", "padding", "lengths"}: return
    (w, m), (B, T) = weights[0], SHAPES[0]
    A, logr = _advantages(B), _rich(B, T)
    loss, g = policy.losses(policy.case(logr, A, m))
    whole = policy.losses(policy.case(logr, A))
    if same([loss, g], whole):
        return report.find("mask-ignored", f"{roles.get('mask') or roles.get('padding')} all True "
                           "or with False: loss and gradient are the same")
    if level == "token" and (w[~m].abs() > 1e-9 * w[m].abs().max()).any():
        return report.find("mask-ignored", f"a token under the mask has the weight {w[~m][0]:.3g} "
                                           "in the gradient, the formula gives 0")
    case = policy.case(logr, A, m)
    under = torch.where(m, 0.0, 0.7)
    other = {n: case[n] - k * under for k, n in enumerate(("logp", "logp_old", "logp_ref"), 1)}
    if case["advantage"].ndim == 2 and case["advantage"].shape[1] > 1:
        other["advantage"] = case["advantage"] + 3 * under
    after = policy.losses(case | other)
    if not same([loss, g * m], [after[0], after[1] * m]):
        report.find("mask-leak", f"log-probs under the mask moved by 0.7: the loss goes from "
                                 f"{loss:.4g} to {after[0]:.4g}, the formula keeps it")


def _aggregation(policy, weights):
    "The mode, its scale, and whether an option promises another."
    subject, facts, report = policy.subject, policy.report.facts, policy.report
    if not policy.losses.reduced: return facts.update(aggregation=None, scale=1.0)
    has_mask = subject.roles.keys() & {"mask", "padding", "lengths"}
    if has(report, "mask-ignored") or not has_mask:
        weights = [(w, torch.ones_like(m)) for w, m in weights]
    whitened = _whitens(policy)
    found = read_mode(weights, group_of(subject), tuple(subject.numbers.values()),
                      2e-3 if whitened else 2e-4)
    if found is None: return facts.update(aggregation=None)
    mode, scale, n = found
    facts.update(aggregation=mode, scale=number(scale))
    facts |= {} if n is None else {"group" if mode == "prompt-mean" else "length": n}
    whitened = whitened and abs(scale - 1) < 0.02
    facts |= {"scale": 1.0, "advantage": "whitened"} if whitened else {}
    if abs(facts["scale"] - 1) > 1e-3 and not _explained(policy, scale):
        report.find("scale", f"the loss is {scale:.4g} times that of {mode}")
    declared(report, subject, mode)


def _whitens(policy):
    "Whether the advantages are whitened inside: then a scale and a shift change nothing."
    B, T = SHAPES[0]
    zero, A = torch.zeros(B, T, dtype=torch.float64), halves(B)
    return same([policy.grad(zero, 2 * A + 0.5)], [policy.grad(zero, A)], 1e-3)


def _explained(policy, scale):
    "Whether a numeric option has this factor as its value."
    near = [n for n, x in policy.subject.numbers.items() if x and min(
        abs(x - scale), abs(1 / x - scale)) < 1e-3 * abs(scale)]
    B, T = SHAPES[0]
    case = policy.case(torch.zeros(B, T, dtype=torch.float64), halves(B), ragged(B, T))
    base = policy.losses(case)[1]
    def halved(n):
        try:
            got = policy.losses(case, **{n: policy.subject.numbers[n] / 2})[1]
        except Unreadable: return False
        return same([got], [base / 2], 1e-3) or same([got], [2 * base], 1e-3)
    return any(map(halved, near))


def _clip(policy, curve):
    "Bounds of the ratio and where they are wrong."
    facts, report = policy.report.facts, policy.report
    up, down = curve.vanishes(0, True), curve.vanishes(1, False)
    wrong_down, wrong_up = curve.vanishes(0, False), curve.vanishes(1, True)
    def high(x): return None if x is None else number(math.expm1(x))
    def low(x): return None if x is None else number(-math.expm1(x))
    facts.update(clip_low=low(down), clip_high=high(up), dual_clip=None)
    r = curve.logr.exp()
    constant = [bool((phi - 1).abs().max() < 1e-4) for phi in curve.phi]
    if "logp_old" in policy.subject.roles and all(constant):
        return report.find("ratio-constant",
                           "logp - logp_old = 0.5, A = 1: the weight of the gradient is 1, the "
                           "formula gives 1.65; the ratio is 1 whatever logp_old is")
    dead = [not phi.abs().max() > 1e-9 for phi in curve.phi]
    if dead[0] and not dead[1]:
        facts["dual_clip"] = wrong_up and number(math.exp(wrong_up))
        return report.find("dual-clip-side", "A = 1, r = 1: the gradient is 0, the formula gives "
                           f"-1; the dual clip (c = {_ratio(wrong_up)}) is for A < 0 alone")
    if not _as_ratio(curve): return facts.update(clip_low=None, clip_high=None)
    if wrong_up is not None and wrong_down is None and up is not None and wrong_up > up + 1e-4:
        facts["dual_clip"] = number(math.exp(wrong_up))
    elif wrong_down is not None and up is not None and down is not None and wrong_up is None:
        return report.find("dual-clip-side",
                           f"A = 1, r = {math.exp(wrong_down) / 2:.3g}: no gradient below "
                           f"{math.exp(wrong_down):.4g}, the formula gives r A")
    elif wrong_up is not None or wrong_down is not None:
        _without_min(report, facts, curve, up, down, wrong_up, wrong_down)
        return
    if all(bool((phi / r - 1).abs().max() < 1e-4) for phi in curve.phi):
        report.find("clip-missing", "A = 1, r = 2: the weight of the gradient is 2; a clipped "
                    "objective gives 0, and no bound was found up to r = 150")
    elif (up is None) != (down is None) and _as_ratio(curve):
        side = "A > 0, above 1" if up is None else "A < 0, below 1"
        report.find("clip-missing", f"{side}: the gradient never vanishes; the formula stops it")


def _ratio(x): return "?" if x is None else f"{math.exp(x):.4g}"


def _as_ratio(curve):
    r = curve.logr.exp()
    return all(bool(((phi.abs() < 1e-9) | ((phi / r - 1).abs() < 1e-4)).all()) for phi in curve.phi)


def _without_min(report, facts, curve, up, down, wrong_up, wrong_down):
    if up is None and down is None:
        facts.update(clip_low=wrong_down and number(-math.expm1(wrong_down)),
                     clip_high=wrong_up and number(math.expm1(wrong_up)))
        what = "the larger of the two terms is taken"
    else:
        what = "the clipped ratio alone is taken"
    x = wrong_down if wrong_down is not None else wrong_up
    A = 1 if wrong_down is not None else -1
    r = math.exp(2 * x) if x else 1.0
    report.find("no-min", f"A = {A}, r = {r:.3g}: the weight of the gradient is 0, the formula "
                f"gives {r:.3g}; {what}, not the smaller of r A and clip(r) A")


def _candidates(policy, curve):
    "Keyword arguments of `policy_loss` that the numbers suggest, by variant."
    facts, phi = policy.report.facts, curve.phi
    low, high, dual = (facts.get(n) for n in ("clip_low", "clip_high", "dual_clip"))
    bounds = dict(eps_low=low or 1.0, eps_high=high or 1e6)
    for v in POLICY_VARIANTS:
        yield v, bounds | (dict(dual_clip=dual) if dual else {})
        yield v, {}
    sides = [(phi[s].min().item(), phi[s].max().item()) for s in (0, 1)]
    least, most = min(x for x, _ in sides), max(x for _, x in sides)
    if "cispo" in POLICY_VARIANTS and most > 1:
        yield "cispo", dict(eps_low=min(1.0, 1 - least) if least > 0.01 else 1.0, eps_high=most - 1)
    at = (curve.logr - math.log(2)).abs().argmin()
    r = curve.logr[at].exp().item()
    taus = [_tau(phi[s][at].item() / r, r) for s in (0, 1)]
    if all(taus):
        yield "sapo", dict(tau=tuple(taus))
    if low and high:
        yield "gmpo", dict(eps_low=-math.log1p(-low) if low < 1 else 40.0,
                           eps_high=math.log1p(high))
    try:  # the probability of every token was 1 / e; ratios above e have no probability
        p, moved = math.exp(-1), Curve(policy, curve.sign, torch.full(CURVE, -1.0).double())
    except Unreadable: return
    up, down = moved.vanishes(0, True), moved.vanishes(1, False)
    if up and down:
        yield "dppo", dict(eps_low=-p * math.expm1(down), eps_high=p * math.expm1(up))


def _tau(y, r):
    if not 0 < y < 1: return None
    s = (1 + math.sqrt(1 - y)) / 2
    return math.log(s / (1 - s)) / (r - 1)


FAMILY = {"token-mean": "ppo", "seq-mean-token-mean": "grpo", "constant": "dr_grpo"}


def _name(policy, curve, sign):
    "The variant whose gradient this is on a random batch, with the bounds that were read off."
    report, facts = policy.report, policy.report.facts
    report.curves = _panels(curve, facts)
    B, T = SHAPES[0]
    m = ragged(B // 2, T, seed=B).repeat(2, 1)
    if not policy.subject.roles.keys() & {"mask", "padding", "lengths"} or has(
            report, "mask-ignored"):
        m = torch.ones_like(m)
    A, logr = (halves(B) if "advantage" in facts else _advantages(B)), _rich(B, T)
    zero, ones = torch.zeros(B, T, dtype=torch.float64), halves(B)
    w = [(policy.grad(zero, s * ones, m) / (-s * ones[:, None])) for s in (1, -1)]
    w = torch.where(w[0].abs() > 1e-12, w[0].abs(), w[1].abs()) * m
    case = policy.case(logr, A, m)
    got, best = sign * policy.grad(logr, A, m) * m, (2.0, None)
    if same([got], [-(w * A[:, None])]):
        facts["ratio"] = None
        report.formula = "policy_gradient" if facts.get("aggregation") else None
        return
    for v, options in _candidates(policy, curve):
        try:
            expected = _gradient(case, A, m, w, v, options)
        except (ValueError, TypeError, OverflowError): continue
        differ = ((got - expected).abs() > 1e-3 * expected.abs().max())[m].double().mean().item()
        best = min(best, (differ, v), key=lambda x: x[0])
        if differ == 0: break
    clipped = ("ppo", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token")
    if best[0] == 0 and best[1] not in clipped:
        ranges = ("clip-missing", "no-min", "dual-clip-side")  # it has a range of its own
        report.findings = [x for x in report.findings if x.kind not in ranges]
    report.nearest = None if best[0] == 0 else best[1]
    known = facts.get("aggregation") or not policy.losses.reduced
    if best[0] == 0 and known:
        report.formula = None if has(report, "clip-missing") else _called(best[1], facts)
        if best[1] in ("cispo", "gmpo", "dppo"):
            _bounds_of(best[1], facts, options)
    elif best[1] and best[0]:
        report.notes.append(f"differs from {best[1]} in {best[0]:.0%} of the tokens")


def _called(v, facts):
    "The name of the variant with this objective and aggregation."
    if v not in ("ppo", "grpo", "dr_grpo", "dapo"): return v
    if facts.get("aggregation") == "token-mean" and facts["clip_high"] != facts["clip_low"]:
        return "dapo"
    return FAMILY.get(facts.get("aggregation"), "ppo")


def _bounds_of(variant, facts, options):
    "The bounds under which a variant fits, where they are not those of the ratio."
    _, low, high = POLICY_VARIANTS[variant]
    low, high = options.get("eps_low", low), options.get("eps_high", high)
    facts.update(clip_low=None if low >= 1 else number(low), clip_high=number(high))


def _gradient(case, A, mask, weights, variant, options):
    "Of our loss with these weights of the tokens."
    x = case["logp"].clone().requires_grad_()
    loss, _ = policy_loss(x, case["logp_old"], A, mask, variant, aggregation="token-mean",
                          weight=weights * mask.sum(), **options)
    return torch.autograd.grad(loss, x)[0]


def _panels(curve, facts):
    "Fingerprint and clipped objective, for A > 0 and A < 0."
    low, high, dual = (facts.get(n) for n in ("clip_low", "clip_high", "dual_clip"))
    small = max(low or 0.2, high or 0.2) < 0.05
    ends = (1 - 4 * high, 1 + 4 * high) if small else (0.2, max(4.0, 1.3 * (dual or 0)))
    r = torch.linspace(*ends, len(curve.logr), dtype=torch.float64)
    phi = curve(r.log(), r.log())
    up = torch.where(r > 1 + (high or 0.2), 0, r)
    down = torch.where((r < 1 - (low or 0.2)) | (r > (dual or torch.inf)), 0, r)
    return {"A > 0": (r, phi[0], up), "A < 0": (r, phi[1], down)}


def _kl(policy, weights, mask):
    "Estimator, sign and coefficient of the KL, from the gradient where A = 0."
    report, facts = policy.report, policy.report.facts
    if "logp_ref" not in policy.subject.roles: return
    B, T = mask.shape
    zero, A, w = torch.zeros(B, T, dtype=torch.float64), torch.zeros(B).double(), weights.abs()
    def slope(d):
        g = policy.losses(policy.case(zero, A, mask, kl=torch.full((B, T), d).double()))[1]
        return (g[mask] / w[mask]).mean().item()
    D = (-1.0, -0.4, 0.4, 1.0)
    q = torch.tensor([slope(d) for d in D], dtype=torch.float64)
    if not q.any(): return facts.update(kl=None)
    d = torch.tensor(D, dtype=torch.float64)
    shapes = {"k1": torch.ones(4).double(), "k2": d, "k3": -torch.expm1(-d)}
    turned = {"k1": -shapes["k1"], "k2": -d, "k3": torch.expm1(d)}
    for name, shape in shapes.items():
        coef = (q / shape).mean().item()
        if not same([q], [coef * shape], 1e-3): continue
        facts.update(kl=name, kl_coef=number(abs(coef)))
        if coef < 0:
            report.find("kl-sign",
                        f"log pi - log pi_ref = 1: the gradient of the KL is {q[3]:.3g}, the "
                        f"formula gives a positive one; minimising it leaves pi_ref")
        elif name == "k1":
            report.find("kl-estimator", "k1 in the loss: its gradient is the same for every "
                        "distance to pi_ref, 0 on average; the formula gives k2 or k3")
        return
    if same([q], [(q / turned["k3"]).mean() * turned["k3"]], 1e-3):
        facts.update(kl="k3")
        return report.find("kl-sign",
                           f"log pi - log pi_ref = 1: the gradient of k3 is {q[3]:.3g}, that of "
                           f"exp(d) - 1 - d; the formula is exp(-d) - 1 + d")
    facts.update(kl="unknown")


def _options(policy):
    "Options that change nothing."
    B, T = SHAPES[0]
    m, A = ragged(B, T, seed=5), _advantages(B)
    rich = (_rich(B, T, seed=7)
            + torch.linspace(-2, 2.2, B, dtype=torch.float64)[:, None] * A.sign()[:, None].roll(1))
    small = _rich(B, T, seed=8) * 0.002
    def outcome(**options):
        cases = [policy.case(logr, A, m, kl=0.8, more=True) for logr in (rich, small)]
        return [x for case in cases for x in policy.losses(case, **options)]
    because = next((x.kind for x in policy.report.findings
                    if x.kind in ("ratio-constant", "dual-clip-side")), None)
    if because:  # no bound can have an effect
        return policy.report.notes.append(f"options were not moved: {because}")
    report_dead(policy.report, policy.subject, outcome)
