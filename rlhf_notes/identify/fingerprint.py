"""The fingerprint of a policy loss: the weight of a token's gradient against its ratio."""

__all__ = ["Curve", "CURVE", "halves"]

import torch

CURVE = (336, 3)  # rows of one ratio each, A > 0 and A < 0 by turns


def halves(B: int):  # -> (B,), 1 and -1, each as often in either half of rows of equal length
    "Advantages that whitening leaves as they are."
    A = torch.ones(B // 2, dtype=torch.float64)
    A[1::2] = -1
    return torch.cat([A, -A])


class Curve:
    "The weight of the gradient against the ratio, for A > 0 and A < 0, and where it vanishes."

    def __init__(self, policy, sign, old=None):
        self.policy, self.sign, self.old, B = policy, sign, old, CURVE[0]
        self.A = halves(B)
        zero = torch.zeros(CURVE, dtype=torch.float64)
        at_one = [policy.grad(zero, s * self.A, old=old)[:, 0] for s in (1, -1)]
        at_one = torch.where(at_one[0].abs() > 1e-12, at_one[0].abs(), at_one[1].abs())
        self.norm = sign * at_one.clamp(min=1e-300)
        sizes = torch.logspace(-5, 0.7, B // 4, dtype=torch.float64)
        self.logr = torch.cat([-sizes.flip(0), sizes])
        self.phi = self(self.logr, self.logr)
        self.edges = [self._edges(s) for s in (0, 1)]

    def __call__(self, positive, negative):
        "Weights at (B / 2,) log-ratios for A > 0 and as many for A < 0."
        logr = torch.empty(len(self.A), dtype=torch.float64)
        where = self.A > 0
        logr[where], logr[~where] = positive, negative
        logr = logr[:, None].expand(CURVE)
        g = self.policy.grad(logr, self.A, old=self.old)[:, 0] / (-self.A * self.norm)
        return g[where], g[~where]

    def _edges(self, side):
        "(log-ratio, True if the weight vanishes above it) of each change between 0 and more."
        zero = self.phi[side].abs() < 1e-9
        at = (zero[1:] != zero[:-1]).nonzero().flatten().tolist()
        return [(self._refined(side, self.logr[i], self.logr[i + 1]),
                 bool(zero[i + 1])) for i in at]

    def _refined(self, side, low, high):
        for _ in range(2):
            x = torch.linspace(low, high, len(self.logr), dtype=torch.float64)
            zero = self(x, x)[side].abs() < 1e-9
            i = int((zero != zero[0]).nonzero().flatten()[0]) if (zero != zero[0]).any() else 1
            low, high = x[i - 1], x[i]
        return ((low + high) / 2).item()

    def vanishes(self, side, above):  # above or below ratio 1 -> log-ratio or None
        "Where the weight becomes 0 on the way from ratio 1."
        found = [x for x, gone in self.edges[side] if (x > 0) == above and gone == above]
        return min(found, key=abs) if found else None
