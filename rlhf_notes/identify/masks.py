"""Two kinds that are all mask: aggregation and whitening."""

__all__ = ["Aggregate", "Whiten", "reduces"]

import re

import torch

from .calls import Unreadable, result_tensors, same
from .probing import Losses, noise, number, ragged, read_eps

NAMES = ("value", "advantage", "rewards", "returns", "logp", "entropy")  # what may stand for x


class OfX(Losses):
    "A function of numbers (B, T), under whatever name, and a mask."
    leaf, supplied = "x", "x mask padding lengths index"

    def _start(self):
        roles, subject = self.roles, self.subject
        if "x" in roles: return
        free = [n for n in subject.parameters if n not in roles.values()]
        name = next((roles.pop(r) for r in NAMES if r in roles), next(iter(free), None))
        if name is None: raise Unreadable(f"names must say which parameter of {subject.name} is x")
        roles["x"] = name
        subject.unknown = [n for n in subject.unknown if n != name]

    def case(self, B, T, seed=0): return dict(x=noise(B, T, seed=seed), mask=ragged(B, T, seed))

    def _probe(self):
        self.plain = self.case(*self.shapes[0])
        self.settle(self.plain)
        return [*self(self.plain)]


def reduces(subject):
    "The reader of a function of x: one number comes back, or as many as went in."
    try:
        reader = Aggregate(subject)
    except Unreadable: return Whiten(subject)
    return reader if reader.reduced else Whiten(subject)


class Aggregate(OfX):
    "The weights with which token losses become one number."
    kind = "aggregate"

    @property
    def cases(self): return [self.case(B, T, seed=B) for B, T in self.shapes]

    def _outcome(self, **options): return [y for c in self.cases for y in self(c, **options)]

    def _read(self):
        if not self.reduced:
            self.refuse([self.cases[0]["x"]], "one number")
        got = [(*self(c), c["x"], c["mask"]) for c in self.cases]
        if not any(g.any() for _, g, *_ in got):
            return self.find("no-gradient", "no gradient reaches the token losses")
        self.check_mask(self.cases[0], dict(x=0.7))
        linear = all((loss - (g * x).sum()).abs() < 1e-4 * (loss.abs() + 1e-3)
                     for loss, g, x, _ in got)
        scale, mode = self.read_mode([(g, m) for _, g, _, m in got]), self.facts["aggregation"]
        if mode and linear:
            self.report.formula = "aggregate_loss"
            if scale < 0:
                self.facts["scale"] = number(scale)
                self.find("sign", f"all token losses 1: the result is {scale:.3g}")
            else:
                self.check_scale(scale, mode)
        elif linear and not self.found("mask-ignored", "mask-leak"):
            self._uneven(*got[0])
        self.check_empty(self.cases[0], ("x",))

    def _uneven(self, loss, g, x, m):
        "Tokens of one response that count must weigh the same."
        mean = (g * m).sum(1, keepdim=True) / m.sum(1, keepdim=True)
        off = ((g - mean).abs() > 1e-3 * mean.abs()) & m
        if not same([self(dict(x=-x, mask=m))[1]], [g]):  # a maximum, a median
            self.report.nearest = "aggregate_loss"
        elif off.any():
            i, j = off.nonzero()[0].tolist()
            self.find("aggregation", f"token {j} of a response weighs {g[i, j]:.3g}, the mean of "
                                     f"its response is {mean[i, 0]:.3g}")


class Whiten(OfX):
    "Mean, deviation and eps."
    kind = "whiten"

    def _start(self):
        super()._start()
        B, T = self.shapes[0]
        self.mask = ragged(B, T) if self.masked else torch.ones(B, T, dtype=torch.bool)
        self.x = 3e3 * noise(B, T) + 2e3

    def __call__(self, x, mask=None, **options):
        mask = self.mask if mask is None else mask
        found = result_tensors(self.call(dict(x=x, mask=mask), **options))
        out = next(iter(found.values()), None)
        if out is None or out.numel() != x.numel():
            self.refuse(found.values(), f"the shape of its argument, {tuple(x.shape)}")
        return self.turned(out.detach()).double().reshape(x.shape)

    def _probe(self): return [self(self.x)]

    def _outcome(self, **options): return [self(self.x, **options), self(1e-3 * self.x, **options)]

    def _read(self):
        x, m, y = self.x, self.mask, self(self.x)
        if not same([y[m]], [self(torch.where(m, x, x + 1 + x.abs()))[m]]):
            if not same([self(x, torch.ones_like(m))], [y]):
                return self.find("mask-leak", "other numbers under the mask change what counts")
            self.find("mask-ignored", "a mask of all True gives the same")
            m = self.mask = torch.ones_like(m)
        elif not m.all() and self._counts(y):
            return self.find("mask-leak", "two more columns of padding change what counts")
        self._moments(x[m], y[m], y)
        if not bool(self(1 + 0 * x).isfinite().all()):
            self.warn("overflow", "equal numbers give NaN: 0 / 0")

    def _counts(self, y):
        "Whether padding counts, as zeros may."
        x, m = (torch.cat([z, z[:, :2] * k], 1) for z, k in ((self.x, 1), (self.mask, 0)))
        try: return not same([self(x, m.bool())[:, :-2][self.mask]], [y[self.mask]])
        except Unreadable: return False

    def slope(self, x):
        "The slope of the result, and the variance of what goes in."
        s, z = x[self.mask], self(x)[self.mask]
        s = s - s.mean()
        return ((s * z).sum() / s.square().sum()).item(), s

    def _moments(self, x, z, y):
        facts, n = self.facts, len(x)
        (slope, s), mean, kept = self.slope(self.x), z.mean().item(), x.mean().item()
        self.report.nearest = "whiten"
        if not slope or not same([z - mean], [slope * s], 1e-3): return
        ratio = abs(slope) * s.std(unbiased=False).item()
        known = dict(population=1.0, sample=((n - 1) / n) ** 0.5)
        facts["deviation"] = next((d for d, r in known.items() if abs(ratio - r) < 3e-4), None)
        if slope < 0:
            self.find("sign", "the largest number becomes the smallest")
        if facts["deviation"] is None:
            if self._of_its_own(y, mean): return
            self.find("deviation", f"the deviation of the result is {ratio:.4g}, the formula "
                                   "gives 1")
        facts["shift_mean"] = abs(mean) < 1e-3
        wanted = next((x for n, x in self.subject.switches.items()
                       if isinstance(x, bool) and re.search("shift|mean", n.lower())), None)
        if not facts["shift_mean"] and abs(mean - kept) > 1e-2 * abs(kept):
            self.find("baseline", f"the mean of the result is {mean:.4g}; the formula gives 0, or "
                                  f"{kept:.4g}")
        elif wanted is not None and wanted != facts["shift_mean"]:
            self.find("baseline", f"shift_mean={wanted}: the mean of the result is {mean:.4g}; "
                                  "True removes the mean")
        facts["eps"] = self._eps()
        if not self.report.findings:
            self.report.formula, self.report.nearest = "whiten", None

    def _of_its_own(self, y, mean):
        """No deviation, but a range or one from the median, which a scale and, where the mean is
        removed, a shift leave as they are; or, if no name promises more, a linear map."""
        def spread(x): return self(x)[self.mask].std()
        other = self.x.sign() * self.x.square() / 3e3
        moved = 2 * self.x + (5e3 if abs(mean) < 0.05 * spread(self.x) else 0)
        own = same([self(moved)], [y], 1e-3) and not same([spread(other)], [spread(self.x)], 1e-2)
        first, second = self(2 * self.x) - y, self(3 * self.x) - self(2 * self.x)
        promised = re.search("whiten|normali[sz]|standardi[sz]", self.subject.name.lower())
        if own:
            self.report.notes.append("divided by another spread than the deviation")
        elif self.subject.guessed and not promised and first.any() and same([first], [second]):
            self.report.notes.append("a linear map of its numbers: nothing is divided by a "
                                     "deviation")
        else: return False
        return True

    def _eps(self):
        unit = (self.x - self.x[self.mask].mean()) / self.x[self.mask].std(
            unbiased=self.facts["deviation"] == "sample")
        def divisor(std): return 1 / (self.slope(std * unit)[0] or 1e300)
        return read_eps(divisor)
