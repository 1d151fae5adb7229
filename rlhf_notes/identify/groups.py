"""The advantages of a group of responses: baseline, deviation and eps."""

__all__ = ["read_group_advantage"]

import re

import torch

from ..formulas.advantage import reinforce_pp_advantage
from .calls import Unreadable, result_tensors
from .masks import group_of
from .probing import DTYPES, check_repeatable, noise, report_dead, same
from .report import Report, number


class Groups:
    "A function of the rewards of groups, called with (P, G)."

    def __init__(self, subject, report):
        self.subject, self.report, self.roles = subject, report, subject.roles
        subject.prepare(("rewards", "index", "mask", "padding", "lengths", "logp"))
        self.G = group_of(subject) or 4
        self.single = False  # one group a call, (G,)
        self.told = "index" in self.roles or "group_size" in self.roles or any(
            isinstance(x, int) and x > 1 for x in subject.numbers.values())  # which group

    def __call__(self, rewards, **options):
        "(P, G) -> (P, G)."
        if not self.single: return self._together(rewards, **options)
        return torch.cat([self._together(row, **options) for row in rewards[:, None]])

    def _together(self, rewards, **options):
        how, (P, G) = self.subject.dialect, rewards.shape
        rewards = rewards.to(how["dtype"], copy=True)  # the function may change it
        flat = rewards.reshape(-1)
        last = torch.nn.functional.pad(flat[:, None], (2, 0))
        x = {"PG": rewards, "flat": flat, "tokens": last}[how["form"]]
        index = torch.arange(P).repeat_interleave(G)
        index = dict(numpy=index.numpy(), tensor=index, list=index.tolist())[how["index"]]
        mask = torch.ones(x.shape, dtype=torch.bool)
        kind = DTYPES[how["mask"]]
        mask = mask.to(how["dtype"] if kind == torch.float64 else kind)
        case = dict(rewards=x, index=index, mask=mask, padding=mask == 0,
                    lengths=torch.full((P * G,), 3))
        case = {r: v for r, v in case.items() if r in self.roles}
        out = result_tensors(self.subject.run(case, **options))
        if len(out) == P * G > 1 and all(y.numel() == 1 for y in out.values()):  # a list
            return torch.stack([y.detach().double().reshape(()) for y in out.values()]).view(P, G)
        named = [n for n in out if "adv" in str(n).lower()] + list(out)
        for n in named:
            y = out[n].detach().double()
            if how["form"] == "tokens" and y.ndim == 2 and len(y) == P * G:
                self.each = y
                return y[:, -1].reshape(P, G)
            if y.numel() == P * G and y.ndim in (1, 2): return y.reshape(P, G)
        shapes = ", ".join(str(tuple(y.shape)) for y in out.values()) or "nothing"
        raise Unreadable(f"{self.subject.name} returned {shapes}, expected an advantage for each "
                         f"reward, {tuple(x.shape)}")

    def tokens(self, rewards):  # (P, G) on the last of three tokens -> (P G, 3)
        self(rewards)
        return self.each

    def tune(self):
        forms = ("flat", "PG") if self.told else ("PG", "flat")
        token = any(w in self.roles["rewards"].lower() for w in ("token", "level"))
        forms = (("tokens", *forms) if token or {"mask", "index"} <= self.roles.keys()
                 else (*forms, "tokens"))
        R = self.rewards()
        self.subject.tune(dict(dtype=(torch.float64, torch.float32), form=forms,
                               index=("numpy", "tensor", "list") if "index" in self.roles
                               else ("tensor",),
                               mask=("bool", "float")),
                          lambda dialect: self(R))
        check_repeatable(self.subject.name, lambda: [self(R)])
        self._alone(R)

    def _alone(self, R):
        """One group a call, (G,): where other rewards than a row's move its advantages, and the
        whole of a call, or each of its columns, is treated as one group is."""
        if self.told or self.subject.dialect["form"] == "tokens": return
        names = f"{self.subject.name} {self.roles['rewards']}".lower()
        if re.search("batch|global|whole|prompts", names): return
        A, other = self(R), R.clone()
        other[1, 0] += 1
        moved = (self(other) - A)[0]
        if not moved.any(): return
        order = torch.randperm(R.numel(), generator=torch.Generator().manual_seed(1))
        def mixed(x): return x.flatten()[order].view_as(x)
        form, alike = self.subject.dialect["form"], self(mixed(R))
        self.subject.dialect["form"], self.single = "flat", True
        try:
            if same([mixed(A)], [alike]) or same([A], [self(R.T).T]):
                return self.report.facts.update(groups="one a call") or self.report.notes.append(
                    f"read with the rewards of one group a call, ({self.G},); in a call with "
                    f"several, (P, G), 1 more for one prompt moves the advantages of another, "
                    f"by {moved.abs().max():.3g} here")
        except Unreadable: pass
        self.subject.dialect["form"], self.single = form, False

    def rewards(self, P=6, seed=0):
        "Groups of different means and spreads."
        spread = torch.linspace(0.5, 3, P, dtype=torch.float64)[:, None]
        return spread * noise(P, self.G, seed=seed) + torch.linspace(-2, 5, P).double()[:, None]


def read_group_advantage(subject) -> Report:
    "Read the advantages of groups of responses."
    report = Report("group_advantage", subject.name,
                    axes=("reward less its group's mean", "advantage"))
    groups = Groups(subject, report)
    groups.tune()
    R = groups.rewards()
    A = groups(R)
    if _without_groups(report, groups, R): return report
    centred, G = R - R.mean(1, keepdim=True), groups.G
    slope = (1e3 * (groups(1e3 * R) * centred).sum(1) / (1e3 * centred).square().sum(1))
    order = centred[0].argsort()
    report.curves = {"": (centred[0, order], A[0, order], (centred / R.std(1)[:, None])[0, order])}
    facts = report.facts
    if not A.any():
        report.find("no-gradient", f"rewards {R[0].tolist()}: all advantages are 0")
        return report
    within = A - A.mean(1, keepdim=True)
    fitted = (A * centred).sum(1, keepdim=True) / centred.square().sum(1, keepdim=True)
    if not same([within], [fitted * centred], 1e-3):
        facts.update(baseline=None, deviation=None)
        report.find("baseline",
                    "the advantages of a group are no linear function of its rewards: other "
                    "groups or ranks come in")
        return _group_options(report, groups, R)
    if (slope < 0).all():
        report.find("sign", "the best response of a group has the lowest advantage")
        slope, A = -slope, -A
    factor = _deviation(report, groups, R, slope)
    _baseline(report, groups, R, A, factor)
    facts["eps"] = (_group_eps(groups, facts["deviation"])
                    if facts["deviation"] in ("sample", "population") else None)
    equal = groups(torch.ones(6, G, dtype=torch.float64) * torch.arange(6.0)[:, None].double())
    if not equal.isfinite().all():
        report.warn("overflow", "equal rewards in a group give 0 / 0, NaN")
    if not report.findings and facts["baseline"]:
        loo = facts["baseline"] == "leave-one-out"
        report.formula = ("rloo_advantage" if loo and not facts["deviation"] else None if loo
                          else "group_advantage")
    return _group_options(report, groups, R)


def _without_groups(report, groups, R):
    "Whether token rewards come in and nothing says which responses are of one prompt: REINFORCE++."
    if groups.told or groups.subject.dialect["form"] != "tokens": return False
    got = groups.tokens(R)
    slopes = ((got - got.mean(0)) * (R.flatten() - R.mean())[:, None]).sum(0)
    gamma = (slopes[1] / slopes[2]).item()
    if not 0 < gamma <= 1.001: return False
    x = torch.nn.functional.pad(R.reshape(-1, 1), (2, 0))
    expected = reinforce_pp_advantage(x, gamma=min(gamma, 1.0))
    n = x.numel()
    for name, factor in (("population", 1.0), ("sample", ((n - 1) / n) ** 0.5)):
        if same([got], [factor * expected], 1e-4):
            report.facts.update(baseline=None, deviation=name, over="batch", gamma=number(gamma))
            report.formula = "reinforce_pp_advantage"
            return True
    return False


def groups_slope(groups, R):
    "The slope of each group's advantages in its rewards."
    centred = R - R.mean(1, keepdim=True)
    return (groups(R).abs() * 0 + groups(R) * centred).sum(1) / centred.square().sum(1)


def _group_options(report, groups, R):
    small = 1e-3 * (R - R.mean(1, keepdim=True))
    report_dead(report, groups.subject, lambda **o: [groups(R, **o), groups(small, **o)])
    return report


def _deviation(report, groups, R, slope):
    "Say what the rewards are divided by; gives the factor that is left."
    facts, G = report.facts, groups.G
    std = R.std(1)
    by_std, by_var = 1e3 * slope * std, slope * std.square()
    def even(x): return bool((x.max() - x.min()) < 2e-3 * x.abs().max())
    root = (G / (G - 1)) ** 0.5
    if even(slope):
        facts["deviation"] = None
        if same([groups(2e3 * R) / 2], [groups(1e3 * R)], 1e-3):
            return groups_slope(groups, R).mean().abs().item()
        facts["deviation"] = "batch"
        report.find("deviation",
                    f"groups with deviations {std[0]:.3g} and {std[-1]:.3g} are divided by one "
                    f"number: the deviation of the batch")
        return 1.0
    if even(by_std):
        k = by_std.mean().item()
        for name, right in (("sample", 1.0), ("population", root)):
            for factor in (1.0, G / (G - 1)):
                if abs(k / right / factor - 1) < 2e-3:
                    facts["deviation"] = name
                    return factor
        facts["deviation"] = None
        report.find("scale", f"the advantages are {k:.4g} times (r - mean) / std")
        return 1.0
    facts["deviation"] = None
    natural = groups_slope(groups, R)
    for mean in (R.mean(1), R.abs().mean(1)):
        if even(natural * mean):  # MaxRL
            facts.update(deviation=None, scale="mean")
            return 1.0
    what = "the variance" if even(by_var) else "neither the sample nor the population deviation"
    report.find("deviation",
                f"rewards with a deviation of {std[0]:.3g} and {std[-1]:.3g} are divided by "
                f"{1 / natural[0]:.3g} and {1 / natural[-1]:.3g}: {what}")
    return 1.0


def _baseline(report, groups, R, A, factor):
    facts, G = report.facts, groups.G
    shift = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 2.0], dtype=torch.float64)[:, None]
    free = facts["deviation"] == "batch" or "scale" in facts or same(
        [groups(R + shift).abs()], [A.abs()], 1e-3)
    if free and A.mean(1).abs().max() < 1e-3 * A.abs().max():
        loo = abs(factor - G / (G - 1)) < 2e-3
        facts["baseline"] = "leave-one-out" if loo else "mean"
        if not loo and abs(factor - 1) > 2e-3:
            report.find("scale", f"the advantages are {factor:.4g} times r - mean")
        return
    facts["baseline"] = None
    if facts["deviation"] is None and same([A], [R], 1e-3): return
    what = ("the mean over all groups is subtracted" if A.mean().abs() < 1e-3 * A.abs().max()
            else "no mean of the group is subtracted")
    report.find("baseline",
                f"the advantages of group 0 have the mean {A[0].mean():.3g}, the "
                f"formula gives 0: {what}")


def _group_eps(groups, deviation):
    "The number added to the deviation or the variance, from groups whose spread is as small."
    z = groups.rewards() - groups.rewards().mean(1, keepdim=True)
    z = z / z.std(1, unbiased=deviation == "sample", keepdim=True)
    def divisor(std):  # of groups with this deviation
        return (std * z.square().sum() / (groups(std * z) * z).sum()).item()
    size = next((10.0**-k for k in range(1, 13) if not divisor(10.0**-k) < 2 * 10.0**-k), None)
    left = divisor(size / 1e3) if size else 0.0
    if not left or left != left: return 0.0
    squared = abs(divisor(3 * left) / left - 10**0.5) < 0.01
    return number(left**2 if squared else left - size / 1e3 if divisor(left) > 1.5 * left else left)
