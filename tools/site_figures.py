"""On a narrow screen the panels of a figure stand one above the other: parts of the same file, cut between the axes."""
import html
import re
from pathlib import Path

AXES = re.compile(r'<g id="axes_\d+">\s*<g id="patch_\d+">\s*<path d="([^"]*)"')
TICK = re.compile(r'<g id="ytick_\d+">')
PICTURE = re.compile(r'<img alt="([^"]*)" src="([^"]*/_images/([^"/]+\.svg)|_images/([^"/]+\.svg))"\s*/?>')
NARROW = 400            # points: a figure that a narrow screen shows whole
SPACE = 4               # points to the right of its axes that belong to a panel


def spans(svg):
    "(left, right) of each column of axes in the drawing `svg`, in points, from left to right."
    found = []
    for path in AXES.findall(svg):
        x = [float(number) for number in re.findall(r"[ML] ?([\d.]+) ", path)]
        found.append((min(x), max(x)))
    columns = []
    for left, right in sorted(found):
        if columns and left < columns[-1][1]: columns[-1][1] = max(columns[-1][1], right)
        else: columns.append([left, right])
    return columns


def share_labels(svg):
    "True if axes have vertical ticks without a number: those of their neighbour hold for them too."
    ticks = [TICK.split(axes) for axes in svg.split('<g id="axes_')[1:]]
    return any(len(t) > 2 and 'id="text_' not in t[1] for t in ticks)


def panels(svg):
    "The view boxes (x, y, width, height) of the panels of `svg`; one for a figure that cannot be cut."
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    columns = [] if share_labels(svg) else spans(svg)
    cuts = [0, *(min(a[1] + SPACE, b[0]) for a, b in zip(columns, columns[1:])), width]
    return [(round(a, 1), 0, round(b - a, 1), height) for a, b in zip(cuts, cuts[1:])]


def stacked(alt, src, boxes):
    parts = "".join(
        f'<img alt="" aria-hidden="true" loading="lazy" style="aspect-ratio: {w} / {h}" '
        f'src="{src}#svgView(viewBox({x},{y},{w},{h}))">' for x, y, w, h in boxes)
    return f'<div class="panels" role="img" aria-label="{alt}">{parts}</div>'


def stack(app, pagename, templatename, context, doctree):
    if "body" not in context: return
    files = {name: Path(app.srcdir, uri) for uri, name in app.builder.images.items()}

    def change(m):
        alt, src, name = m[1], m[2], m[3] or m[4]
        boxes = panels(files[html.unescape(name)].read_text(encoding="utf-8"))
        if len(boxes) == 1 and boxes[0][2] <= NARROW: return m[0].replace("<img ", '<img class="narrow" ', 1)
        if len(boxes) == 1: return m[0]
        return m[0].replace("<img ", '<img class="side-by-side" ', 1) + stacked(alt, src, boxes)
    context["body"] = PICTURE.sub(change, context["body"])


def setup(app): app.connect("html-page-context", stack)
