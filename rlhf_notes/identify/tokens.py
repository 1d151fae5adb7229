"""Log-probabilities and entropies of logits: temperature, shift, and what they sum to."""

__all__ = ["LogProb", "Entropy"]

import math
import re

import torch

from .calls import Unreadable, result_tensors, same
from .probing import REAL, Reader, noise, number

B, T, V = 4, 7, 9
LABELS = torch.arange(B * T).reshape(B, T) * 5 % V


class OfLogits(Reader):
    "A function of logits, and of labels if it takes them."
    needs = "logits"
    supplied = "logits labels mask padding lengths"
    tries = dict(array=("tensor", "numpy"), dtype=REAL, flat=(False, True),
                 flags=("bool", "float"))

    def __call__(self, logits, labels=LABELS, grad=False, **options):
        "(B, T, V), (B, T) -> (B, T), (B, T - 1) or 0-dim; with grad, the gradient at the logits."
        x, mask = logits.detach().clone().requires_grad_(grad), torch.ones(B, T, dtype=torch.bool)
        case = dict(logits=x, labels=labels, mask=mask, padding=~mask, lengths=mask.sum(1))
        if self.subject.dialect["flat"]:
            case = {r: v.flatten(0, 1) for r, v in case.items() if r in self.roles}
        found = result_tensors(self.subject.run(case, **options)).values()
        y = next((y for y in found if y.is_floating_point()
                  and y.numel() in (B * T, B * (T - 1), 1)), None)
        if y is None:
            self.refuse(found, f"a number for each token, {(B, T)} or {(B, T - 1)}")
        value = y.detach().double().reshape((B, -1) if y.numel() > 1 else ())
        if not grad: return value
        return value, self.gradient(y, x)

    def _probe(self): return [self(2 * noise(B, T, V), grad=True)[0]]

    def _outcome(self, **options): return [self(2 * noise(B, T, V, seed=3), **options)]

    def check_heat(self, measure):  # (**options) -> the temperature, or None if none fits
        "Find that the option of the temperature does not divide the logits."
        name = next((n for n in self.subject.numbers if re.match("temp|tau", n.lower())), None)
        if not name or not self.facts.get("temperature"): return
        value, heat, got = self.subject.numbers[name], self.facts["temperature"], measure(
            **{name: 1.7})
        if got is None or min(abs(got - 1.7), abs(got - heat)) > 1e-3:
            self.find("temperature", f"{name} = 1.7: the logits are divided by {got or '?'}")
        elif abs(got - heat) > 1e-3 < abs(heat - value):
            self.find("temperature", f"{name} = {value}: the logits are divided by {heat}")

    def check_fragile(self):
        "Half precision, and logits 400 apart."
        z = 3 * noise(B, T, V, seed=5).bfloat16().double()
        far = torch.arange(V).double().expand(B, T, V) * 400
        wide = self.in_dialect(lambda: self(far, 0 * LABELS), dtype=torch.float32)
        if wide is not None and not wide.isfinite().all():
            self.warn("overflow", "logits 400 apart: the result is not finite")
        self.check_half(lambda: [self(z)], 2e-3)


class LogProb(OfLogits):
    "Which logits meet which labels, by the difference that two labels make; then the sum."
    needs = "logits labels"
    kind, axes = "log_prob", ("logit", "log-probability")

    def _read(self):
        self.facts.update(zip(("temperature", "shift"), self._labels(self.find)))
        def quietly(kind, text): wrong.append(kind)
        wrong = []
        def measure(**options):
            heat = self._labels(quietly, **options)[0]
            return None if "temperature" in wrong else heat
        self.check_heat(measure)
        self.check_fragile()

    def _labels(self, find, **options):
        "(temperature, shift), of the first logits and labels between which the result is linear."
        z = 2 * noise(1, T, V).expand(B, T, V).contiguous()  # the same logits in each row
        labels = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))
        labels[1] = (labels[0] + 1 + torch.arange(T) % 3) % V
        y, grad = self(z, labels, grad=True, **options)
        if y.ndim == 0:
            self.refuse([y], f"a number for each token, {(B, T)} or {(B, T - 1)}")
        if not grad.any() and not self.of_arrays:
            find("no-gradient", "no gradient reaches the logits")
        n = y.shape[1]
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1), (0, -1), (-1, 0)):  # beside its own position
            own = slice(max(0, -i, -j), min(n, T - i, T - j))
            def beside(x, by, own=own): return x[:, own.start + by:own.stop + by]
            logits, got = beside(z, i), y[:, own]
            picked = logits.gather(-1, beside(labels, j)[..., None])[..., 0]
            rise, run = got[0] - got[1], picked[0] - picked[1]
            slope = ((rise * run).sum() / run.square().sum()).item()
            if abs(slope) < 1e-6 or not same([rise], [slope * run], 1e-3): continue
            right = (i, j) == ((0, 0) if n == T else (0, 1))
            if not right:
                find("shift", f"of {T} positions come {n} results: the first takes the logits of "
                              f"position {own.start + i} and the label of position "
                              f"{own.start + j}; the formula takes logits[:, :-1], labels[:, 1:]")
            shift = (1 if n < T else 0) if right else None
            return self._normalised(find, got, logits, picked, slope), shift
        self.report.nearest = "selective_log_softmax"
        total = sum(self(z, torch.full_like(labels, v)).exp() for v in range(V))
        if (total - 1).abs().max() > 1e-3:
            find("scale", f"the probabilities of all tokens sum to {total[0, 0]:.4g}, the formula "
                          "gives 1")
        return None, None

    def _normalised(self, find, y, logits, picked, slope):
        "The temperature, and what is wrong with the sum over the vocabulary."
        if slope < 0:
            find("sign", f"the log-probability of a token is {y[0, 0].item():.3g}, the negative is "
                         "given: log pi <= 0")
            y, slope = -y, -slope
        heat, whole = 1 / slope, logits.logsumexp(-1)
        base = next((b for b in (2, 10) if abs(heat - math.log(b)) < 1e-4), None)
        for kind, formula, says in (
                (None, picked / heat - (logits / heat).logsumexp(-1), ""),
                ("temperature", (picked - whole) / heat, f"the log-probability is divided by "
                 f"{heat:.4g}, not the logits: the probabilities do not sum to 1"),
                ("temperature", picked / heat - whole, "the temperature divides the logit and not "
                                                       "the sum over the vocabulary"),
                ("scale", y, "the probabilities of all tokens sum to {:.4g}, the formula gives 1")):
            if same([y], [formula], 1e-3): break
        if kind is None:
            self.report.formula = "selective_log_softmax"
        elif kind == "temperature" and base:
            find("scale", f"the log-probability is the logarithm to the base {base}, {slope:.4g} "
                          "times that in nats")
            heat = 1.0
        else:
            total = (y - picked / heat).exp()[0, 0] * (logits[0, 0] / heat).exp().sum()
            find(kind, says.format(total))
        return number(heat)


class Entropy(OfLogits):
    "The temperature at which the entropies fit, up to a factor."
    kind = "entropy"

    def _read(self):
        z = 2 * noise(B, T, V)
        y, grad = self(z, grad=True)
        heat, factor = self._fit(y, z)
        if not heat:
            self.report.nearest = "entropy_from_logits"
        else:
            self.facts["temperature"], self.report.formula = number(heat), "entropy_from_logits"
            if factor < 0:
                self.find("sign", f"the entropy of a token is {y.flatten()[0]:.3g}; entropy of a "
                                  "choice is at least 0")
            if abs(abs(factor) * math.log(V) - 1) < 1e-3:
                self.facts["scale"], self.report.formula = "of its maximum", None
            elif abs(abs(factor) - 1) > 1e-3:
                self.find("scale", f"the entropy is {abs(factor):.4g} times that in nats, summed "
                                   "over the vocabulary")
            if not grad.any() and not self.of_arrays:
                self.find("no-gradient", "no gradient reaches the logits")
        self.check_heat(lambda **o: self._fit(self(z, **o), z)[0])
        far = self.in_dialect(lambda: self(z.masked_fill(torch.arange(V) == 2, -torch.inf)))
        if far is not None and not far.isfinite().all():
            self.warn("overflow", "a logit of -inf, which no sampler can draw, gives NaN")
        self.check_fragile()

    def _fit(self, y, z):
        "(temperature, factor), or (None, None)."
        def of(heat):
            logp = (z / heat).log_softmax(-1)
            H = -(logp.exp() * logp).sum(-1)
            return H[:, :y.shape[1]] if y.ndim else H.mean()
        for heat in (1.0, _solved(y, of), _solved(-y, of)):
            if heat is None: continue
            factor = (y / of(heat)).mean().item()
            free = y.ndim or heat != 1.0 or abs(abs(factor) - 1) < 1e-3
            if free and same([y], [factor * of(heat)], 1e-3): return heat, factor
        return None, None


def _solved(y, of):
    "The temperature at which the first entropy is that one: it rises with the temperature."
    low, high, first = 0.02, 50.0, y.flatten()[0]
    if not of(low).flatten()[0] < first < of(high).flatten()[0]: return None
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if of(middle).flatten()[0] < first else (low, middle)
    return low
