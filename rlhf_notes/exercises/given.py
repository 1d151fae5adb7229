"""Inputs, pieces of formulas, and pictures, for the exercises of the lessons.

`x` are values, `m` a mask, `r` a ratio, `A` an advantage.
"""

__all__ = ['NAN', 'INF', 'vec', 'flags', 'normal', 'keep', 'mean', 'row_means', 'over_rows',
           'variance', 'clip', 'always_clipped', 'pessimistic', 'k3', 'curves', 'steps']

import math

import torch

from .outcomes import attempt, weights


NAN, INF = math.nan, math.inf


def vec(*rows): return torch.tensor(rows[0] if len(rows) == 1 else rows)
def flags(*rows): return vec(*[[c == "1" for c in row] for row in rows])  # strings such as "110"


def normal(*shape, seed=0, scale=1.0):
    "Normal random numbers, the same on each call."
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def keep(x, m): return torch.where(m, x, 0.0)
def mean(x, m): return keep(x, m).sum() / m.sum().clamp(min=1)
def row_means(x, m): return keep(x, m).sum(-1) / m.sum(-1).clamp(min=1)
def over_rows(x, m): return x.sum() / (m.sum(-1) > 0).sum().clamp(min=1)  # of rows that count
def variance(x): return x.var(unbiased=False)


def clip(r, eps): return r.clamp(1 - eps, 1 + eps)
def always_clipped(r, A, eps): return clip(r, eps) * A
def pessimistic(r, A, eps): return torch.minimum(r * A, clip(r, eps) * A)
def k3(d): return (-d).exp() - 1 + d


def _draw(ax, x, expected, yours, marker=None):
    from rlhf_notes.viz import COLORS
    ax.plot(x, expected, "-", color=COLORS["grey"], linewidth=6, alpha=0.45,
            marker=marker and "s", markersize=9, label="expected")
    ax.plot(x, yours, "--", color=COLORS["orange"], marker=marker, markersize=5, label="yours")


def curves(var, points, panels: dict):
    """A picture: value and gradient over one argument, a row for each panel.

    A panel has the other arguments by name: numbers, or 0-dim tensors to expand.
    """
    def expanded(x): return x.expand_as(points) if isinstance(x, torch.Tensor) else x
    def picture(exercise, f):
        import matplotlib.pyplot as plt
        rows = []
        for label, fixed in panels.items():
            fixed = {**fixed, var: points}
            case = {name: expanded(fixed[name]) for name in exercise.arguments}
            both = [attempt(g, case, (var,)) for g in (exercise.reference, f)]
            if [v.shape for v in both[1].values] != [points.shape]: return None
            rows.append((label, both))
        figure, axes = plt.subplots(len(rows), 2, figsize=(7.2, 2.4 * len(rows)), squeeze=False)
        for (label, both), (left, right) in zip(rows, axes):
            _draw(left, points, *(o.values[0] for o in both))
            _draw(right, points, *(o.grads[0] / weights(len(points)) for o in both))
            left.set(title=label, xlabel=var)
            right.set(title="its gradient", xlabel=var)
        axes[0, 0].legend()
        return figure
    return picture


def steps(case: int, along: int = 0, marks: tuple = ()):
    "A picture of input `case`, step by step along a dimension; the flags of `marks` draw lines."
    def first(v): return v if v.ndim < 2 else v.select(1 - along, 0)
    def picture(exercise, f):
        import matplotlib.pyplot as plt
        x = exercise.cases[case]
        expected, yours = (attempt(g, x).values for g in (exercise.reference, f))
        if not yours or yours[0].shape != expected[0].shape: return None
        figure, ax = plt.subplots(figsize=(7.2, 2.6))
        at = range(len(first(expected[0])))
        _draw(ax, at, first(expected[0]), first(yours[0]), "o")
        for name, line in zip(marks, (":", "-")):
            for t in first(x[name]).nonzero().flatten().tolist():
                ax.axvline(t + 0.5, color="black", linestyle=line, linewidth=1)
            ax.plot([], [], color="black", linestyle=line, linewidth=1, label=name)
        ax.set(xlabel="step", title=exercise.name, xticks=at)
        ax.legend()
        return figure
    return picture
