"""Input that is not ordinary: nothing counts, NaN under the mask, huge ratios, half precision."""

__all__ = ["loss_cautions", "empty_rows"]

import torch

from .calls import Unreadable
from .weights import ragged

B, T = 48, 7
LEAVES = ("logp", "logp_old", "logp_ref", "value", "value_old", "returns", "x")


def _finite(*tensors): return all(bool(x.isfinite().all()) for x in tensors)


def loss_cautions(policy):
    "Cautions of a policy loss."
    report, roles = policy.report, policy.subject.roles
    m = ragged(B, T, seed=9)
    A = torch.ones(B, dtype=torch.float64)
    A[1::2] = -0.7
    logr = 0.1 * torch.sin(torch.arange(B * T, dtype=torch.float64)).reshape(B, T)
    case = policy.case(logr, A, m)
    if roles.keys() & {"mask", "padding", "lengths"}:
        empty_rows(report, policy.losses, case, m)
    _overflow(policy, A)
    _half(policy, case)
    _into_constants(policy, case)


def empty_rows(report, losses, case, mask, whole=True):
    "NaN under the mask; a row and a batch in which nothing counts."
    def attempt(case):
        try: return losses(case)
        except Unreadable: return torch.tensor(torch.nan), torch.tensor(torch.nan)
    under = {n: case[n].masked_fill(~mask, torch.nan) for n in LEAVES
             if n in case and case[n].shape == mask.shape}
    if not _finite(*attempt(case | under)):
        report.warn("mask-nan", "NaN under the mask makes the loss or the gradient NaN")
    nothing = torch.zeros_like(mask)
    if not _finite(*attempt(case | dict(mask=nothing))):
        report.warn("empty-batch", "a batch in which nothing counts gives NaN, not 0")
    row = mask.clone()
    row[1] = False
    got = attempt(case | dict(mask=row))
    if not _finite(*got):
        return report.warn("empty-row", "a response without tokens gives NaN")
    without = torch.arange(len(mask)) != 1
    if report.facts.get("aggregation") in ("seq-mean-token-mean", "seq-mean-token-sum"):
        full = losses(case)[1][without][mask[without]].abs().sum()
        share = got[1][without][mask[without]].abs().sum() / full
        if (share - 1).abs() < 1e-6:
            report.warn("empty-row", "a response without tokens counts as 0 in the mean over "
                                     "responses; here it is left out")


def _overflow(policy, A):
    far = torch.zeros(B, T, dtype=torch.float64)
    far[:, 0] = 100 * A.sign()
    dialect = policy.subject.dialect
    kept, dialect["dtype"] = dialect.get("dtype"), torch.float32
    try:
        loss, g = policy.losses(policy.case(far, A))
        if not _finite(loss, g):
            policy.report.warn("overflow", "log-ratio 100, A > 0: loss or gradient is not finite "
                                           "in float32; the formula gives 0")
    except Unreadable: pass
    finally:
        dialect["dtype"] = kept


def _half(policy, case):
    "bfloat16 in: computed in float32 or not."
    dialect = policy.subject.dialect
    kept = dialect.get("dtype")
    rounded = {n: x.bfloat16().double() if isinstance(x, torch.Tensor) and x.is_floating_point()
               else x for n, x in case.items()}
    try:
        dialect["dtype"] = torch.float32
        full = policy.losses(rounded)
        dialect["dtype"] = torch.bfloat16
        half = policy.losses(rounded)
        error = (half[0] - full[0]).abs() / full[1].abs().sum()
        if error > 1e-4:
            policy.report.warn("precision", f"bfloat16 comes in: the loss is {half[0]:.6g}, in "
                                            f"float32 {full[0]:.6g}")
    except Unreadable: pass
    finally:
        dialect["dtype"] = kept


def _into_constants(policy, case):
    "Gradients into old log-probs and advantages."
    for leaf, kind in (("logp_old", "old-gradient"), ("advantage", "advantage-gradient")):
        if leaf not in policy.subject.roles or not isinstance(case.get(leaf), torch.Tensor):
            continue
        if _reaches(policy, case, leaf):
            policy.report.warn(kind, f"a gradient flows into {policy.subject.roles[leaf]}: "
                                     "detach it")


def _reaches(policy, case, leaf):
    losses = policy.losses
    kept, losses.leaf = losses.leaf, leaf
    try:
        return bool(losses(case)[1].any())
    except (Unreadable, RuntimeError):
        return False
    finally:
        losses.leaf = kept
