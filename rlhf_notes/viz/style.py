"""One style for every figure, and an objective beside its gradient.

Six colours of the palette of Okabe and Ito (2008), an almost black and a grey, always with a
second sign: a line style, a marker or a label. Text has 4.5 times the luminance contrast of equal
colours, a line or a marker 3 times (WCAG 2.2, 1.4.3 and 1.4.11): so text takes its colour from
`INK`, the same hues, darkened. Sky and yellow reach neither: they are for areas and many small
points.
"""

__all__ = ['COLORS', 'INK', 'LINES', 'style', 'value_and_gradient', 'plot_with_gradient']

import matplotlib.pyplot as plt
import torch
from matplotlib import cycler, rcParams


COLORS = dict(blue="#0072B2", orange="#D55E00", green="#009E73", purple="#CC79A7", sky="#56B4E9",
              yellow="#E69F00", black="#222222", grey="#767676")
INK = dict(blue="#0072B2", orange="#B84F00", green="#007A59", purple="#A24F7A", sky="#1F77A8",
           yellow="#8F6200", black="#222222", grey="#666666")
LINES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1))]


def style():
    "Set the style of all figures: vector graphics that read without colour."
    rcParams.update({
        "figure.figsize": (7.2, 3.0), "figure.dpi": 100, "figure.constrained_layout.use": True,
        "figure.facecolor": "white", "savefig.facecolor": "white",
        "axes.prop_cycle": cycler(color=list(COLORS.values())[:6]) + cycler(linestyle=LINES),
        "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True,
        "axes.titlesize": 11, "axes.labelsize": 10, "xtick.labelsize": 9, "ytick.labelsize": 9,
        "legend.frameon": False, "legend.fontsize": 9, "lines.linewidth": 2,
        "svg.hashsalt": "rlhf_notes", "svg.fonttype": "path",
    })
    try:
        from IPython import get_ipython
        from matplotlib_inline.backend_inline import set_matplotlib_formats
    except ImportError: return
    if get_ipython() is None: return
    set_matplotlib_formats("svg", metadata={"Date": None}, bbox_inches=None)


def value_and_gradient(f, x: torch.Tensor):
    "`f`, elementwise, and its derivative by autograd at each of the points `x` (N,)."
    x = x.detach().clone().requires_grad_(True)
    y = f(x)
    grad, = torch.autograd.grad(y.sum(), x)
    return y.detach(), grad


def plot_with_gradient(
    functions: dict,  # label -> elementwise function of a tensor
    x: torch.Tensor,  # (N,) points
    xlabel="x",  # name of the variable
    ylabel="objective",  # name of the function
    axes=None,  # two axes to draw on; new ones by default
):  # the two axes
    "Draw each of `functions` on the left, its gradient by autograd on the right."
    axes = plt.subplots(1, 2)[1] if axes is None else axes
    for label, f in functions.items():
        y, grad = value_and_gradient(f, x)
        axes[0].plot(x, y, label=label)
        axes[1].plot(x, grad, label=label)
    axes[0].set(xlabel=xlabel, ylabel=ylabel, title=ylabel)
    axes[1].set(xlabel=xlabel, ylabel="gradient", title="its gradient")
    axes[0].legend()
    return axes
