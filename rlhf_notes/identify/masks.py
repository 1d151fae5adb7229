"""The effect of a mask on a loss; and two kinds that are all mask: aggregation and whitening."""

__all__ = ["declared", "masked_apart", "mode_facts", "read_aggregate", "read_whiten", "read_x"]

import re

import torch

from ..formulas.whitening import whiten
from .calls import Unreadable, result_tensors
from .cautions import empty_rows
from .names import GROUP_NAME
from .probing import DIALECTS, Losses, check_repeatable, noise, report_dead, same
from .report import Report, number
from .weights import SHAPES, ragged, read_mode

MODES = {  # what an option says -> the mode
    "tokenmean": "token-mean", "token": "token-mean", "seqmeantokenmean": "seq-mean-token-mean",
    "seqmean": "seq-mean-token-mean", "sequencemean": "seq-mean-token-mean",
    "sequence": "seq-mean-token-mean", "responsemean": "seq-mean-token-mean",
    "samplemean": "seq-mean-token-mean", "sample": "seq-mean-token-mean",
    "seqmeantokensum": "seq-mean-token-sum", "promptmean": "prompt-mean", "prompt": "prompt-mean",
    "constant": "constant", "sum": "sum"}


def group_of(subject):
    "The number of responses to a prompt, if an option says it."
    found = [x for n, x in subject.numbers.items()
             if GROUP_NAME.search(n.lower()) and x == int(x) and x > 1]
    return int(found[0]) if found else None


def declared(report, subject, mode):
    "Find an aggregation that an option promises and the weights do not have."
    for name, value in subject.switches().items():
        text = value.lower().replace("-", "").replace("_", "") if isinstance(value, str) else ""
        wanted = MODES.get(text)
        about = any(part in name.lower() for part in ("agg", "mode", "reduc", "norm"))
        if wanted and about and mode != wanted:
            report.find("aggregation", f"{name}={value!r} promises {wanted}; the weights of the "
                                       f"tokens are those of {mode or 'no known mode'}")


def has(report, kind): return any(x.kind == kind for x in report.findings)


def masked_apart(report, losses, case, tensors):
    "Find that the mask has no effect, or that what is under it has one."
    subject, m = losses.subject, case["mask"]
    if not subject.roles.keys() & {"mask", "padding", "lengths"}: return
    name = subject.roles.get("mask") or subject.roles.get("padding") or subject.roles["lengths"]
    before = losses(case)
    if same(before, losses(case | dict(mask=torch.ones_like(m)))):
        return report.find("mask-ignored", f"{name} with False or all True: loss and gradient "
                                           "are the same")
    weight = before[1].abs()
    if weight.any() and weight[~m].max() > 1e-6 * weight[m].max():
        return report.find("mask-ignored", f"a token under {name} has the gradient "
                                           f"{before[1][~m].abs().max():.3g}, the formula gives 0")
    under = torch.where(m, 0.0, 0.7)
    shifts = {n: (1 + i) * under for i, n in enumerate(tensors)}
    after = losses(case | {n: case[n] + shift for n, shift in shifts.items() if n in case})
    if not same([before[0], before[1] * m], [after[0], after[1] * m]):
        kind = "mask-leak" if before[1].any() else "mask-ignored"
        report.find(kind, f"other numbers under {name}: the result goes from {before[0]:.4g} to "
                          f"{after[0]:.4g}, the formula keeps it")


def mode_facts(report, losses, weights, scaled=True) -> float:
    "Say the aggregation of these weights; gives their scale."
    subject, facts = losses.subject, report.facts
    if not losses.reduced:
        facts["aggregation"] = None
        w, m = weights[0]
        return w[m].mean().item()
    if has(report, "mask-ignored") or not subject.roles.keys() & {"mask", "padding", "lengths"}:
        weights = [(w, torch.ones_like(m)) for w, m in weights]
    found = read_mode(weights, group_of(subject), tuple(subject.numbers.values()))
    mode, scale, n = found or (None, (weights[0][0].sum()).item(), None)
    facts["aggregation"] = mode
    if scaled:
        facts["scale"] = number(scale)
    facts |= {} if n is None else {"group" if mode == "prompt-mean" else "length": n}
    declared(report, subject, mode)
    return scale


def read_x(subject) -> Report:
    "Read a reduction or a whitening: one number comes back, or as many as went in."
    subject.roles = {_x_role(r, subject.roles): n for r, n in subject.roles.items()}
    (B, T), calls = SHAPES[0], Losses(subject, "x")
    subject.prepare(("x", "mask", "padding", "lengths", "index"))
    case = dict(x=noise(B, T), mask=ragged(B, T))
    shape = subject.tune(DIALECTS, lambda dialect: [
        x.shape for x in result_tensors(subject.run(calls._values(case, case["x"].clone().to(
            dialect["dtype"]), dialect["dtype"]))).values()])
    return (read_whiten if shape and shape[0] == (B, T) else read_aggregate)(subject)


def _x_role(role, roles):
    if "x" in roles: return role
    first = next((r for r in ("value", "advantage", "rewards", "returns", "logp",
                              "entropy") if r in roles),
                 None)
    return "x" if role == first else role


def _only_x(subject):
    subject.roles = {_x_role(r, subject.roles): n for r, n in subject.roles.items()}
    if "x" not in subject.roles:
        name = next((n for n in subject.parameters if n not in subject.roles.values()), None)
        if name is None: raise Unreadable(f"names must say which parameter of {subject.name} is x")
        subject.roles["x"] = name
        subject.unknown = [n for n in subject.unknown if n != name]
    subject.prepare(("x", "mask", "padding", "lengths", "index"))


def read_aggregate(subject) -> Report:
    "Read how token losses become one number."
    report = Report("aggregate", subject.name)
    _only_x(subject)
    losses = Losses(subject, "x")
    subject.tune(DIALECTS, lambda d: losses(dict(x=noise(*SHAPES[0]), mask=ragged(*SHAPES[0]))))
    if "padding" in subject.roles:
        losses.settle(dict(x=noise(*SHAPES[0]), mask=ragged(*SHAPES[0])))
    check_repeatable(subject.name,
                     lambda: list(losses(dict(x=noise(*SHAPES[0]), mask=ragged(*SHAPES[0])))))
    if not losses.reduced:
        raise Unreadable(f"{subject.name} returned a tensor, expected one number")
    batches = [dict(x=noise(B, T, seed=B), mask=ragged(B, T, seed=B)) for B, T in SHAPES]
    got = [(*losses(b), b) for b in batches]
    if not any(g.any() for _, g, _ in got):
        report.find("no-gradient", "no gradient reaches the token losses")
        return report
    masked_apart(report, losses, batches[0], ("x",))
    linear = all(abs(loss - (g * b["x"]).sum()) < 1e-4 * (loss.abs() + 1e-3) for loss, g, b in got)
    scale = mode_facts(report, losses, [(g, b["mask"]) for _, g, b in got])
    if report.facts["aggregation"] and linear:
        report.formula = "aggregate_loss"
        report.facts["scale"] = number(scale)
        if scale < 0:
            report.find("sign", f"all token losses 1: the result is {scale:.3g}")
        elif abs(scale - 1) > 1e-3 and not any(abs(scale - x) < 1e-3 * scale or x and abs(
                scale - 1 / x) < 1e-3 * scale for x in subject.numbers.values()):
            report.find("scale", f"all token losses 1: the result is {scale:.4g} times that of "
                                 f"{report.facts['aggregation']}")
    elif linear and not has(report, "mask-ignored") and not has(report, "mask-leak"):
        _uneven(report, got)
    report_dead(report, subject, lambda **o: [y for b in batches for y in losses(b, **o)])
    if subject.roles.keys() & {"mask", "padding", "lengths"}:
        empty_rows(report, losses, batches[0], batches[0]["mask"])
    return report


def _uneven(report, got):
    "Tokens of one response that count must weigh the same."
    for _, g, b in got:
        m = b["mask"]
        mean = (g * m).sum(1, keepdim=True) / m.sum(1, keepdim=True)
        off = ((g - mean).abs() > 1e-3 * mean.abs()) & m
        if off.any():
            i, j = off.nonzero()[0].tolist()
            return report.find("aggregation",
                               f"token {j} of a response weighs {g[i, j]:.3g}, the mean of its "
                               f"response is {mean[i, 0]:.3g}")


def read_whiten(subject) -> Report:
    "Read a whitening: mean, deviation and eps."
    report = Report("whiten", subject.name)
    _only_x(subject)
    (B, T), calls, roles = SHAPES[0], Losses(subject, "x"), subject.roles
    m = ragged(B, T)
    m = m if roles.keys() & {"mask", "padding", "lengths"} else torch.ones_like(m)
    def run(x, mask=m, **options):
        dtype = subject.dialect["dtype"]
        values = calls._values(dict(x=x, mask=mask), x.clone().to(dtype), dtype)
        out = next(iter(result_tensors(subject.run(values, **options)).values()), None)
        if out is None or out.numel() != x.numel():
            raise Unreadable(f"{subject.name} returned "
                             f"{None if out is None else tuple(out.shape)}, expected the shape of "
                             f"its argument, {tuple(x.shape)}")
        return out.detach().double().reshape(x.shape)
    x = 3e3 * noise(B, T) + 2e3
    subject.tune(DIALECTS, lambda d: run(x))
    check_repeatable(subject.name, lambda: [run(x)])
    y = run(x)
    if m.all() or not same([y[m]], [run(torch.where(m, x, x + 1 + x.abs()))[m]]):
        if not m.all() and same([run(x, torch.ones_like(m))], [y]):
            report.find("mask-ignored", "a mask of all True gives the same")
            m = torch.ones_like(m)
        elif not m.all():
            report.find("mask-leak", "other numbers under the mask change what counts")
            return report
    _moments(report, subject, run, x, y, m)
    report_dead(report, subject, lambda **o: [run(x, **o), run(1e-3 * x, **o)])
    return report


def _moments(report, subject, run, x, y, m):
    facts, n = report.facts, m.sum().item()
    z, x0 = y[m], x[m]
    slope = (((x0 - x0.mean()) * (z - z.mean())).sum() / (x0 - x0.mean()).square().sum()).item()
    if not slope or not same([z - z.mean()], [slope * (x0 - x0.mean())], 1e-3):
        report.nearest = "whiten"
        return
    if slope < 0:
        report.find("sign", "the largest number becomes the smallest")
    ratio = abs(slope) * x0.std(unbiased=False).item()
    sample = ((n - 1) / n) ** 0.5
    deviations = {"population": 1.0, "sample": sample}
    facts["deviation"] = next((d for d, r in deviations.items() if abs(ratio - r) < 3e-4), None)
    first, second = run(2 * x) - y, run(3 * x) - run(2 * x)
    promised = re.search("whiten|normali[sz]|standardi[sz]", subject.name.lower())
    if (facts["deviation"] is None and subject.guessed and not promised and first.any()
            and same([first], [second])):
        report.nearest = "whiten"
        return report.notes.append("a linear map of its numbers: nothing is divided by a deviation")
    if facts["deviation"] is None:
        report.find("deviation", f"the deviation of the result is {ratio:.4g}, the formula gives 1")
    mean, kept = z.mean().item(), x0.mean().item()
    facts["shift_mean"] = abs(mean) < 1e-3
    wanted = next((v for name, v in subject.switches().items() if isinstance(v, bool)
                   and "shift" in name.lower() or "mean" in name.lower()), None)
    if not facts["shift_mean"] and abs(mean - kept) > 1e-2 * abs(kept):
        report.find("baseline",
                    f"the mean of the result is {mean:.4g}; the formula gives 0, or {kept:.4g}")
    elif wanted is not None and wanted != facts["shift_mean"]:
        report.find("baseline", f"shift_mean={wanted}: the mean of the result is {mean:.4g}; True "
                                "removes the mean")
    facts["eps"] = _eps(run, x, m, facts["deviation"])
    if not report.findings:
        report.formula = "whiten"
    if not same([run(1 + 0 * x)], [run(1 + 0 * x).nan_to_num(7)]):
        report.warn("overflow", "equal numbers give NaN: 0 / 0")


def _eps(run, x, m, deviation):
    "The number added to the variance, from numbers so small that it outweighs it."
    unit = (x - x[m].mean()) / x[m].std()
    for size in (1e0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        small = size * unit
        z, s = run(small)[m], small[m]
        slope = ((s * z).sum() / s.square().sum()).item()
        var = s.var(unbiased=deviation == "sample").item()
        extra = 1 / slope**2 - var
        if extra > 0.05 * var: return _of(extra, var, slope, run, x, m)
    return 0.0


def _of(extra, var, slope, run, x, m):
    "eps added to the variance, or to the deviation: by a number ten times smaller."
    tiny = 0.01 * (var**0.5) / x[m].std().item() * (x - x[m].mean())
    z, s = run(tiny)[m], tiny[m]
    after = ((s * z).sum() / s.square().sum()).item()
    whole = 1 / slope - var**0.5
    inside = abs(1 / after**2 - 1e-4 * var - extra) < 1e-2 * extra
    return number(extra if inside else whole)
