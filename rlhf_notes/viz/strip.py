"""An episode as a film, a response token by token.

`film` draws some states of an episode side by side, and under them one number over all of it.
`token_strip` has a column for each token and a row for each number that belongs to it: orange
below zero, blue above, grey after the end of the response.
"""

__all__ = ['film', 'token_strip']

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .style import COLORS, INK


def film(
    draw,  # draw(ax, t) draws the state of step t
    steps,  # steps to draw, integers; beyond the episode nothing is drawn
    trace,  # a number for each step, (T,), for the lower picture
    dt: float,  # seconds of a step
    length: int,  # steps on the time axis, at least T
    ylabel: str,  # name of the number
    limits: tuple,  # of its axis
    title: str = "",  # of the whole
    end: str = "",  # label of the last step, if it comes before `length`
) -> Figure:  # 7.2 x 2.8 inches
    "Draw some states of an episode side by side, and below them a number over time."
    trace, steps = np.asarray(trace, float), list(steps)
    if trace.ndim != 1 or not 0 < len(trace) <= length:
        raise ValueError(f"trace must be one number for each of 1 to {length} steps, "
                         f"got shape {trace.shape}")
    figure = Figure(figsize=(7.2, 2.8), layout="none")
    grid = figure.add_gridspec(2, len(steps), left=0.09, right=0.98, top=0.81, bottom=0.16,
                               height_ratios=(1.1, 1), hspace=0.12, wspace=0.05)
    for i, t in enumerate(steps):
        ax = figure.add_subplot(grid[0, i])
        if t >= len(trace):
            ax.axis("off")
            continue
        draw(ax, t)
        ax.set_title(f"{t * dt:.3g} s", fontsize=8)
    ax = figure.add_subplot(grid[1, :])
    ax.plot(np.arange(len(trace)) * dt, trace, "-", color=COLORS["blue"], linewidth=1.5)
    shown = [t for t in steps if t < len(trace)]
    ax.plot([t * dt for t in shown], trace[shown], "o", color=COLORS["orange"], markersize=4)
    if len(trace) < length:
        last = (len(trace) - 1) * dt, trace[-1]
        ax.plot(*last, "x", color=COLORS["black"], markersize=7)
        ax.annotate(end, last, xytext=(7, -3), textcoords="offset points", fontsize=9)
    ax.set(xlim=(-0.01 * length * dt, length * dt), ylim=limits, xlabel="seconds", ylabel=ylabel)
    figure.text(0.09, 0.98, title, fontsize=10, va="top")
    return figure


# Black letters read on all of its colours.
_SIGNED = LinearSegmentedColormap.from_list("signed", [COLORS["yellow"], "white", COLORS["sky"]])


def _number(v):
    text = f"{v + 0:.2f}".replace("-0.00", "0.00").replace("inf", "\N{INFINITY}")
    return text.replace("-", "\N{MINUS SIGN}")


def _row(ax, y, row, counts, limit):
    "Draw the cells of one row."
    largest = limit or max(np.abs(row[counts & np.isfinite(row)]).max(initial=0), 1e-12)
    for x, v in enumerate(row):
        share = 0.0 if np.isnan(v) else float(np.clip(v / largest, -1, 1))
        colour = _SIGNED(0.5 + 0.5 * round(share, 1)) if counts[x] else "#eeeeee"
        ax.add_patch(Rectangle((x, y), 0.96, 0.92, facecolor=colour, linewidth=0, clip_on=False))
        if not counts[x] and not np.isfinite(v): continue
        ink = COLORS["black"] if counts[x] else INK["grey"]
        ax.text(x + 0.48, y + 0.48, _number(v), ha="center", va="center", fontsize=8, color=ink)


def token_strip(
    tokens,  # (T,) tokens of a response
    rows: dict,  # (T,) label -> a number for each token
    counts=None,  # (T,), True = belongs to the response; None = all do
    limits=None,  # label -> size of the darkest colour; the largest by default
    title="",  # above it
) -> Figure:  # 0.62 inches for each token and 0.34 for each row
    "Draw numbers of each token of a response, as colours and as text."
    tokens, n = list(tokens), len(tokens)
    if not tokens or not rows:
        raise ValueError("tokens and rows must hold at least one each, "
                         f"got {n} tokens and {len(rows)} rows")
    counts = np.ones(n, bool) if counts is None else np.asarray(counts, bool)
    values = {label: np.asarray(row, float) for label, row in rows.items()}
    for name, row in {"counts": counts, **values}.items():
        if row.shape == (n,): continue
        raise ValueError(f"{name} must have a number for each of {n} tokens, got shape {row.shape}")
    left, top = 1.15, 0.55
    width, height = left + 0.62 * n, top + 0.34 * len(rows) + 0.05
    figure = Figure(figsize=(width, height), layout="none")
    place = left / width, 0.05 / height, 1 - left / width, 1 - (top + 0.05) / height
    ax = figure.add_axes(place)
    for y, (label, row) in enumerate(values.items()):
        _row(ax, y, row, counts, (limits or {}).get(label))
    small = min(8.5, 75 / max(1, *map(len, tokens)))
    for x, token in enumerate(tokens):
        ink = COLORS["black"] if counts[x] else INK["grey"]
        ax.text(x + 0.48, -0.15, token, parse_math=False, ha="center", va="bottom",
                fontsize=small, color=ink)
    for y, label in enumerate(rows):
        ax.text(-0.12, y + 0.48, label, ha="right", va="center", fontsize=9)
    ax.set(xlim=(0, n), ylim=(len(rows), 0))
    ax.axis("off")
    figure.text(0.01, 1 - 0.06 / height, title, fontsize=10, va="top")
    return figure
