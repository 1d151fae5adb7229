"""The advantages of a group of responses: baseline, deviation and eps."""

__all__ = ["GroupAdvantage", "discounts"]

import re

import torch

from ..formulas.advantage import reinforce_pp_advantage
from .calls import Unreadable, result_tensors, same
from .gae import GAE
from .probing import REAL, Reader, noise, number, read_eps
from .weights import group_of

P = 6  # prompts
ASK = ("whether a call has the rewards of one group or of many: no parameter says which belong "
       "together, and in a call with several groups 1 more for one prompt moves the advantages of "
       'another. kind="group_advantage" says that a call has one group')


class GroupAdvantage(Reader):
    "A function of the rewards of groups, called with (P, G)."
    kind, axes = "group_advantage", ("reward less its group's mean", "advantage")
    needs = "rewards"
    supplied = "rewards index mask padding lengths logp"

    def _start(self):
        subject, roles = self.subject, self.roles
        self.G, self.single = group_of(subject.numbers) or 4, False  # single: (G,) in each call
        self.told = bool(roles.keys() & {"index", "group_size"}) or any(
            isinstance(x, int) and x > 1 for x in subject.numbers.values())  # which group
        self.R, name = self.rewards(), roles.get("rewards", "").lower()
        forms = ("flat", "PG") if self.told else ("PG", "flat")
        first = "token" in name or "level" in name or {"mask", "index"} <= roles.keys()
        self.tries = dict(array=("tensor", "list"), dtype=REAL,
                          form=("tokens", *forms) if first else (*forms, "tokens"),
                          index=("numpy", "tensor", "list")[:None if "index" in roles else 1],
                          flags=("bool", "float"))

    @property
    def movable(self): return not self.found("no-gradient")

    def rewards(self):
        "Groups of different means and spreads."
        spread, mean = (torch.linspace(*ends, P).double()[:, None] for ends in ((0.5, 3), (-2, 5)))
        return spread * noise(P, self.G) + mean

    def __call__(self, rewards, **options):
        "(P, G) -> (P, G)."
        rows = rewards[:, None] if self.single else [rewards]
        return torch.cat([self._call(x, **options) for x in rows])

    def _call(self, rewards, **options):
        how, (n, G) = self.subject.dialect, rewards.shape
        flat, index = rewards.reshape(-1), torch.arange(n).repeat_interleave(G)
        last = torch.nn.functional.pad(flat[:, None], (2, 0))  # of three tokens
        x = dict(PG=rewards, flat=flat, tokens=last)[how["form"]]
        mask = torch.ones(x.shape, dtype=torch.bool)
        out = result_tensors(self.subject.run(dict(
            rewards=x, mask=mask, padding=~mask, lengths=torch.full((n * G,), 3),
            index=dict(numpy=index.numpy(), tensor=index, list=index.tolist())[how["index"]]),
            **options))
        found = {k: y.detach().double() for k, y in out.items()}
        for k in [k for k in found if "adv" in str(k).lower()] + [*found]:
            y = found[k]
            if how["form"] == "tokens" and y.ndim == 2 and len(y) == n * G:
                self.each = y
                return y[:, -1].reshape(n, G)
            if y.numel() == n * G and y.ndim in (1, 2): return y.reshape(n, G)
        self.refuse(found.values(), f"an advantage for each reward, {tuple(x.shape)}")

    def _probe(self): return [self(self.R)]

    def _outcome(self, **options):
        small = 1e-3 * (self.R - self.R.mean(1, keepdim=True))
        return [self(self.R, **options), self(small, **options)]

    def _read(self):
        self._alone()
        R, A, facts = self.R, self(self.R), self.facts
        if self.whole(): return
        centred, deviation = R - R.mean(1, keepdim=True), R.std(1, keepdim=True)
        order = centred[0].argsort()
        self.report.curves = {"": (centred[0, order], A[0, order],
                                   (centred / deviation)[0, order])}
        if not A.any():
            return self.find("no-gradient", f"rewards {R[0].tolist()}: all advantages are 0")
        facts.update(baseline=None, deviation=None)
        slope = self.slope(R)
        if not same([A - A.mean(1, keepdim=True)], [slope[:, None] * centred], 1e-3):
            return self._unknown()
        sign = -1 if (slope < 0).all() else 1
        if sign < 0:
            self.find("sign", "the best response of a group has the lowest advantage")
        factor = self._deviation(1e3 * sign * self.slope(1e3 * R))  # eps is nothing beside 1e3
        self._baseline(sign * A, factor)
        facts["eps"] = self._eps() if facts["deviation"] in ("sample", "population") else None
        if not self(torch.arange(6.0).double()[:, None].expand(P, self.G)).isfinite().all():
            self.warn("overflow", "equal rewards in a group give 0 / 0, NaN")
        loo = facts["baseline"] == "leave-one-out"
        if not self.report.nearest and facts["baseline"] and not (loo and facts["deviation"]):
            self.report.formula = "rloo_advantage" if loo else "group_advantage"

    def _unknown(self):
        "A form of its own: what must hold is that no group's rewards move those of another."
        self.report.nearest, R, A = "group_advantage", self.R, self(self.R)[0]
        if self._leans(): return
        for kind, others in (("baseline", R[1:] + 1), ("deviation", 3 * R[1:])):
            if not same([self(torch.cat([R[:1], others]))[0]], [A]):
                return self.find(kind, "rewards of other groups change the advantages of a group")

    def slope(self, R):
        "The slope of each group's advantages in its rewards."
        c = R - R.mean(1, keepdim=True)
        return (self(R) * c).sum(1) / c.square().sum(1)

    def _alone(self):
        """One group a call, (G,): where other rewards than a row's move its advantages, and the
        whole of a call, or each of its columns, is treated as one group is."""
        name = f"{self.subject.name} {self.roles['rewards']}".lower()
        whole = re.search("batch|global|whole|prompts", name)
        if self.told or whole or self.subject.dialect["form"] == "tokens": return
        R, A, other = self.R, self(self.R), self.R.clone()
        other[1, 0] += 1
        if not (self(other) - A)[0].any(): return
        order = torch.randperm(R.numel(), generator=torch.Generator().manual_seed(1))
        def mixed(x): return x.flatten()[order].view_as(x)
        def alone():
            self.single = True
            return same([mixed(A)], [alike]) or same([A], [self(R.T).T]) or None
        alike = self(mixed(R))
        if not self.in_dialect(alone, form="flat"):
            self.single = False
            return
        self.subject.dialect["form"], self.facts["groups"] = "flat", "one a call"
        if self.subject.guessed and not re.search("group|grpo|rloo", name):
            self.report.unknown = ASK

    def whole(self):
        "Whether token rewards come in and nothing says which are of one prompt: REINFORCE++."
        if self.told or self.subject.dialect["form"] != "tokens": return False
        got, R = self.each, self.R.flatten()
        slopes = ((got - got.mean(0)) * (R - R.mean())[:, None]).sum(0)
        gamma = (slopes[1] / slopes[2]).item()
        if not 0 < gamma <= 1.001: return False
        x = torch.nn.functional.pad(R[:, None], (2, 0))
        expected, n = reinforce_pp_advantage(x, gamma=min(gamma, 1.0)), x.numel()
        for name, factor in (("population", 1.0), ("sample", ((n - 1) / n) ** 0.5)):
            if not same([got], [factor * expected], 1e-4): continue
            self.facts.update(baseline=None, deviation=name, over="batch", gamma=number(gamma))
            self.report.formula = "reinforce_pp_advantage"
            return True
        return False

    def _deviation(self, slope):
        "Say what the rewards are divided by; gives the factor that is left."
        facts, R, G = self.facts, self.R, self.G
        std, natural = R.std(1), self.slope(R)
        def even(x): return bool((x.max() - x.min()) < 2e-3 * x.abs().max())
        if even(slope):
            if same([self(2e3 * R) / 2], [self(1e3 * R)], 1e-3): return natural.mean().abs().item()
            facts["deviation"] = "batch"
            self.find("deviation", f"groups with deviations {std[0]:.3g} and {std[-1]:.3g} are "
                                   "divided by one number: the deviation of the batch")
        elif even(slope * std):
            k = (slope * std).mean().item()
            for name, right in (("sample", 1.0), ("population", (G / (G - 1)) ** 0.5)):
                for factor in (1.0, G / (G - 1)):
                    if abs(k / right / factor - 1) < 2e-3:
                        facts["deviation"] = name
                        return factor
            self.find("scale", f"the advantages are {k:.4g} times (r - mean) / std")
        elif even(natural * R.mean(1)) or even(natural * R.abs().mean(1)):  # MaxRL
            facts["scale"] = "mean"
        elif not self._spread():
            self.report.nearest = "group_advantage"
            self.report.notes.append("groups weigh by more than their spread")
        else:  # a range, a deviation from the median
            what = ("the variance" if even(slope * std**2) else
                    "neither the sample nor the population deviation")
            self.find("deviation", f"rewards with a deviation of {std[0]:.3g} and {std[-1]:.3g} "
                      f"are divided by {1 / natural[0]:.3g} and {1 / natural[-1]:.3g}: {what}")
        return 1.0

    def _spread(self):
        "Whether groups are divided by a number that a shift keeps, and a scale scales."
        R, C = 1e3 * self.R, 1e3 * (self.R - self.R.mean(1, keepdim=True))
        one, moved, wide = (self.slope(x) for x in (R, R + 1e3, R + C))
        return same([moved], [one], 1e-3) and same([wide / one], [wide[0] / one[0] + 0 * one], 1e-3)

    def _baseline(self, A, factor):
        facts, G = self.facts, self.G
        shift = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 2.0], dtype=torch.float64)[:, None]
        own = same([self(self.R + shift).abs()], [A.abs()], 1e-3)
        free = (own or facts["deviation"] == "batch" or facts.get("scale") == "mean"
                or self.report.nearest)
        if free and A.mean(1).abs().max() < 1e-3 * A.abs().max():
            loo = abs(factor - G / (G - 1)) < 2e-3
            facts["baseline"] = "leave-one-out" if loo else "mean"
            if not loo and abs(factor - 1) > 2e-3 and not self.explained(
                    factor, lambda **options: self(self.R, **options)):
                self.find("scale", f"the advantages are {factor:.4g} times r - mean")
        elif own or self._leans():  # a median, a best response; a mean shrunk towards the batch's
            self.report.nearest = "group_advantage"
        elif facts["deviation"] or not same([A], [self.R], 1e-3):
            what = ("the mean over all groups" if A.mean().abs() < 1e-3 * A.abs().max() else
                    "no mean of the group")
            self.find("baseline", f"the advantages of group 0 have the mean {A[0].mean():.3g}, the "
                                  f"formula gives 0: {what} is subtracted")

    def _leans(self):
        """Whether a baseline that takes other groups' rewards too follows its own group's, up and
        down, more than twice as much as the batch's mean does, and all rewards alike."""
        def mean(R): return self(R).mean(1) / self.slope(R)
        def moves(i, by):
            R = self.R + by * (torch.arange(P) == i)[:, None]
            return (mean(R) - mean(self.R))[i].abs() < abs(by) * (1 - 2 / P)
        R, wide = self.R, 3 * self.R
        wide[0] = R[0]
        steady = self.found("deviation") or 2 / 3 < self.slope(wide)[0] / self.slope(R)[0] < 1.5
        return steady and same([self(R + 7)], [self(R)], 1e-3) and all(
            moves(i, by) for i in (0, P - 1) for by in (20, -20))

    def _eps(self):
        z = self.R - self.R.mean(1, keepdim=True)
        z = z / z.std(1, unbiased=self.facts["deviation"] == "sample", keepdim=True)
        def divisor(std): return (std * z.square().sum() / (self(std * z) * z).sum()).item()
        return read_eps(divisor)


def discounts(subject):
    "The reader of a function of token rewards and gamma: whitened over the batch, or as they are."
    try:
        reader = GroupAdvantage(subject)
        if reader.whole(): return reader
    except Unreadable: pass
    return GAE(subject)
