"""Log-probabilities and entropies of logits: temperature, shift, and what they sum to."""

__all__ = ["read_log_prob", "read_entropy"]

import math

import torch

from .calls import Unreadable, result_tensors
from .probing import check_repeatable, noise, report_dead, same
from .report import Report, number

B, T, V = 4, 7, 9


class Logits:
    "A function of logits, and of labels if it takes them."

    def __init__(self, subject, report):
        self.subject, self.report, self.roles = subject, report, subject.roles
        subject.prepare(("logits", "labels", "mask", "padding", "lengths"))

    def __call__(self, logits, labels, grad=False, **options):
        "(B, T, V), (B, T) -> (B, T), (B, T - 1) or 0-dim; with grad, the gradient at the logits."
        how = self.subject.dialect
        dtype = how["dtype"]
        x = logits.detach().to(dtype).clone().requires_grad_(grad)
        case = dict(logits=x.clone(), labels=labels, mask=torch.ones(B, T, dtype=torch.bool))
        case |= dict(padding=~case["mask"], lengths=case["mask"].sum(1))
        if how["mask"] != "bool":
            case["mask"] = case["mask"].to(dtype)
        case = {r: v.flatten(0, 1) if how["flat"] else v
                for r, v in case.items()
                if r in self.roles}
        out = result_tensors(self.subject.run(case, **options))
        sizes = {B * T, B * (T - 1), 1}
        y = next((y for y in out.values() if y.is_floating_point() and y.numel() in sizes), None)
        if y is None:
            shapes = ", ".join(str(tuple(y.shape)) for y in out.values()) or "nothing"
            raise Unreadable(f"{self.subject.name} returned {shapes}, expected a number for each "
                             f"token, {(B, T)} or {(B, T - 1)}")
        value = y.detach().double()
        value = value.reshape(B, -1) if y.numel() > 1 else value.reshape(())
        if not grad: return value
        if not y.requires_grad: return value, torch.zeros_like(x)
        return value, torch.autograd.grad(y.sum(), x)[0].double()

    def tune(self):
        z, labels = 2 * noise(B, T, V), torch.arange(B * T).reshape(B, T) * 5 % V
        self.subject.tune(dict(dtype=(torch.float64, torch.float32), flat=(False, True),
                               mask=("bool", "float")), lambda dialect: self(z, labels))
        check_repeatable(self.subject.name, lambda: [self(z, labels)])
        return z, labels

    @property
    def heat(self):
        "The option that is the temperature, or None."
        return next((n for n in self.subject.numbers if n.lower().startswith(("temp", "tau"))),
                    None)


def read_log_prob(subject) -> Report:
    "Read the log-probability of tokens."
    report = Report("log_prob", subject.name, axes=("logit", "log-probability"))
    model = Logits(subject, report)
    model.tune()
    _read_labels(report, model)
    heat = model.heat
    if heat and report.facts.get("temperature"):
        other = Report("log_prob", subject.name)
        _read_labels(other, model, **{heat: 1.7})
        got = other.facts.get("temperature")
        if any(x.kind == "temperature" for x in other.findings):
            report.find("temperature", other.findings[0].text)
        elif got != 1.7 and got != report.facts["temperature"]:
            report.find("temperature", f"{heat} = 1.7: the logits are divided by {got}")
    z, labels = 2 * noise(B, T, V, seed=3), torch.arange(B * T).reshape(B, T) % V
    report_dead(report, subject, lambda **o: [model(z, labels, **o)])
    _fragile(report, model, labels)
    if report.findings:
        report.formula = None if report.formula is None else report.formula
    return report


def _read_labels(report, model, **options):
    "Which logits meet which labels, by the difference that two labels make; then the sum."
    z = 2 * noise(1, T, V).expand(B, T, V).contiguous()  # the same logits in each row
    labels = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))
    labels[1] = (labels[0] + 1 + torch.arange(T) % 3) % V
    y, grad = model(z, labels, grad=True, **options)
    if y.ndim == 0:
        raise Unreadable(f"{model.subject.name} returned one number, expected one for each token")
    n = y.shape[1]
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):  # first logits, first label
        if max(i, j) + n > T: continue
        logits, of = z[0, i:i + n], labels[:, j:j + n]
        picked = torch.stack([logits.gather(-1, row[:, None])[:, 0] for row in of])
        rise, run = y[0] - y[1], picked[0] - picked[1]
        slope = ((rise * run).sum() / run.square().sum()).item()
        if abs(slope) > 1e-6 and same([rise], [slope * run], 1e-3):
            return _normalised(report, y, grad, logits, picked, slope, (i, j), n)
    _diagonal(report, model, y, z, labels)


def _diagonal(report, model, y, z, labels):
    "Neighbours: logits of t with the label of t + 1 in a result of T - 1, or none."
    report.facts.update(temperature=None, shift=None)
    table = z.log_softmax(-1)
    for name, logits, of in (("the label of the position before", table[:, 1:], labels[:, :-1]),
                             ("the label of the next position", table[:, :-1], labels[:, 1:])):
        right = logits.gather(-1, of[..., None])[..., 0]
        for part in (y[:, 1:], y[:, :-1]):
            if part.shape == right.shape and same([part], [right], 1e-3):
                report.facts["temperature"] = 1.0
                return report.find("shift", f"a result for each position takes {name}")
    report.nearest = "selective_log_softmax"
    total = sum(model(z, torch.full_like(labels, v)).exp() for v in range(V))
    if (total - 1).abs().max() > 1e-3:
        report.find("scale", f"the probabilities of all tokens sum to {total[0, 0]:.4g}, the "
                             "formula gives 1")


def _normalised(report, y, grad, logits, picked, slope, at, n):
    facts = report.facts
    if slope < 0:
        report.find("sign",
                    f"the log-probability of a token is {y[0, 0].item():.3g}, the "
                    f"negative is given: log pi <= 0")
        y, slope, grad = -y, -slope, -grad
    heat = 1 / slope
    facts.update(temperature=number(heat), shift=1 if at == (0, 1) and n == T - 1 else 0)
    wanted = (0, 0) if n == T else (0, 1)
    if at != wanted and n < T:
        report.find("shift",
                    f"a result of T - 1 takes the logits from position {at[0]} and the labels "
                    f"from {at[1]}; the formula takes logits[:, :-1] and labels[:, 1:]")
        facts["shift"] = None
    right = picked / heat - (logits / heat).logsumexp(-1)
    bits = [n for n in (2, 10) if abs(heat - math.log(n)) < 1e-4]
    if same([y], [right], 1e-3):
        report.formula = "selective_log_softmax"
    elif bits and same([y], [(picked - logits.logsumexp(-1)) / heat], 1e-3):
        facts["temperature"] = 1.0
        report.find("scale", f"the log-probability is the logarithm to the base {bits[0]}, "
                             f"{slope:.4g} times that in nats")
    elif abs(heat - 1) > 1e-6 and same([y], [(picked - logits.logsumexp(-1)) / heat], 1e-3):
        report.find("temperature",
                    f"the log-probability is divided by {heat:.4g}, not the logits: the "
                    f"probabilities do not sum to 1")
    elif abs(heat - 1) > 1e-6 and same([y - y[:, :1]], [(right - right[:, :1])], 1e-3):
        report.find("temperature",
                    "the temperature divides the logit and not the sum over the vocabulary")
    elif abs(heat - 1) > 1e-6 and same([y], [picked / heat - logits.logsumexp(-1)], 1e-3):
        report.find("temperature",
                    "the temperature divides the logit and not the sum over the vocabulary")
    else:
        total = (y - picked / heat + 0).exp()[0, 0] * (logits[0] / heat).exp().sum()
        report.find("scale",
                    f"the probabilities of all tokens sum to {total:.4g}, the formula gives 1")
    if not grad.any():
        report.find("no-gradient", "no gradient reaches the logits")


def _fragile(report, model, labels):
    "Half precision, and logits 400 apart."
    z = 3 * noise(B, T, V, seed=5).bfloat16().double()
    how = model.subject.dialect
    kept = how["dtype"]
    try:
        how["dtype"] = torch.float32
        full = model(z, labels)
        far = model(torch.arange(V).double().expand(B, T, V) * 400, torch.zeros_like(labels))
        if not far.isfinite().all():
            report.warn("overflow", "logits 400 apart: the log-probability is not finite")
        how["dtype"] = torch.bfloat16
        error = (model(z, labels) - full).abs().max().item()
        if error > 2e-3:
            report.warn("precision", f"bfloat16 logits: off by {error:.2g} nats")
    except (Unreadable, RuntimeError): pass
    finally:
        how["dtype"] = kept


def _entropy(z, heat=1.0):
    logp = (z / heat).log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def read_entropy(subject) -> Report:
    "Read an entropy of logits."
    report = Report("entropy", subject.name)
    model = Logits(subject, report)
    z, labels = model.tune()
    y, grad = model(z, labels, grad=True)
    heat = _fit(report, y, z)
    if heat and model.heat:
        value = model.subject.numbers[model.heat]
        moved = Report("entropy", subject.name)
        got = _fit(moved, model(z, labels, **{model.heat: 1.7}), z)
        if got and abs(got - 1.7) > 1e-3 and abs(got - heat) > 1e-3 or not got:
            report.find("temperature",
                        f"{model.heat} = 1.7: the entropy is that of a temperature of {got or '?'}")
        elif abs(heat - value) > 1e-3 and abs(got - heat) > 1e-3:
            report.find("temperature",
                        f"{model.heat} = {value}: the entropy is that of a temperature of {heat}")
    if report.facts.get("temperature") and not grad.any():
        report.find("no-gradient", "no gradient reaches the logits")
    report_dead(report, subject, lambda **o: [model(z, labels, **o)])
    far = z.masked_fill(torch.arange(V) == 2, -torch.inf)
    try:
        if not model(far, labels).isfinite().all():
            report.warn("overflow", "a logit of -inf, which no sampler can draw, gives NaN")
    except Unreadable: pass
    _fragile(report, model, labels)
    return report


def _fit(report, y, z):
    "The temperature at which entropies fit, up to a factor."
    facts = report.facts
    def of(heat):
        H = _entropy(z, heat)
        return H if y.ndim else H.mean()
    for sign in (0, 1, -1):
        heat = _solved(sign * y, of) if sign else 1.0
        if heat is None: continue
        H = of(heat)
        if y.ndim and y.shape != H.shape:
            H = H[:, :y.shape[1]]
        factor = (y / H).mean().item()
        if (not same([y], [factor * H], 1e-3)
            or not y.ndim and heat == 1.0 and abs(abs(factor) - 1) > 1e-3):
            continue
        facts["temperature"] = number(heat)
        report.formula = "entropy_from_logits"
        if factor < 0:
            report.find("sign",
                        f"the entropy of a token is {y.flatten()[0]:.3g}; entropy of "
                        f"a choice is at least 0")
        if abs(abs(factor) - 1) > 1e-3:
            report.find("scale",
                        f"the entropy is {abs(factor):.4g} times that in nats, "
                        f"summed over the vocabulary")
        return heat
    report.nearest = "entropy_from_logits"
    return None


def _solved(y, of):
    "The temperature at which the first entropy is that one: it rises with the temperature."
    first = y.flatten()[0]
    low, high = 0.02, 50.0
    if not of(low).flatten()[0] < first < of(high).flatten()[0]: return None
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if of(middle).flatten()[0] < first else (low, middle)
    return low
