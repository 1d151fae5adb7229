"""On a narrow screen the panels of a figure stand one above the other: parts of the same file, cut
between the axes. What is written across them becomes a line above or below.
"""
import html
import re
from pathlib import Path

AXES = re.compile(r'<g id="axes_\d+">\s*<g id="patch_\d+">\s*<path d="([^"]*)"')
ACROSS = re.compile(r'^  <g id="text_\d+">\n   <!-- ([^$]*?) -->\n   <g [^>]*?transform='
                    r'"translate\([\d.]+ ([\d.]+)\) scale\(([\d.]+)', re.M)
TICK = re.compile(r'<g id="ytick_\d+">')
PICTURE = re.compile(
    r'<img alt="([^"]*)" src="([^"]*/_images/([^"/]+\.svg)|_images/([^"/]+\.svg))"\s*/?>')
NARROW = 520            # points: a figure of one panel that a narrow screen shows whole
STRIP = 6               # panels: more are the frames of a film, which stay side by side
SPACE = 4               # points to the right of its axes that belong to a panel
BAR = 30                # points: what is narrower is the colour bar of the axes to its left


def spans(svg):
    "(left, right) of each column of axes in the drawing `svg`, in points, from left to right."
    found = []
    for path in AXES.findall(svg):
        x = [float(number) for number in re.findall(r"[ML] ?([\d.]+) ", path)]
        found.append((min(x), max(x)))
    columns = []
    for left, right in sorted(found):
        if columns and (left < columns[-1][1] or right - left < BAR):
            columns[-1][1] = max(columns[-1][1], right)
        else: columns.append([left, right])
    return columns


def share_labels(svg):
    "True if axes have vertical ticks without a number: those of their neighbour hold for them too."
    ticks = [TICK.split(axes) for axes in svg.split('<g id="axes_')[1:]]
    return any(len(t) > 2 and 'id="text_' not in t[1] for t in ticks)


def across(svg):
    """Words above all axes, words below all, and what is left between: (above, below, top, bottom).
    """
    height = float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg)[1])
    y = [float(y) for path in AXES.findall(svg) for y in re.findall(r"[ML] ?[\d.]+ ([\d.]+)", path)]
    above, below, top, bottom = [], [], 0, height
    for words, at, scale in ACROSS.findall(svg):
        at, size = float(at), 100 * float(scale)
        if at < min(y): above, top = [*above, words], max(top, round(at + size / 3, 1))
        elif at > max(y): below, bottom = [*below, words], min(bottom, round(at - size, 1))
    return above, below, top, bottom


def panels(svg):
    """Each panel of `svg`, from left to right, as its view boxes (x, y, width, height): where axes
    share their labels, those come first.
    """
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])
    *_, top, bottom = across(svg)
    columns = spans(svg)
    cuts = [0, *(min(a[1] + SPACE, b[0]) for a, b in zip(columns, columns[1:])), width]
    def box(left, right):
        return round(left, 1), top, round(right - left, 1), round(bottom - top, 1)
    whole = [[box(a, b)] for a, b in zip(cuts, cuts[1:])]
    if not share_labels(svg): return whole
    labels = box(0, columns[0][0] - SPACE)
    return whole[:1] + [[labels, box(*cut)] for cut in zip(cuts[1:], cuts[2:])]


def stacked(alt, src, rows, above=(), below=()):
    "The panels above each other, none larger than in the whole figure, between shared words."
    def part(x, y, w, h):
        view = f"svgView(viewBox({x},{y},{w},{h}))"
        return (f'<img alt="" aria-hidden="true" loading="lazy" style="aspect-ratio: {w} '
                f'/ {h}; flex: {w} {w} 0" src="{src}#{view}">')
    drawn = "".join(
        f'<div style="max-width: {(wide := sum(box[2] for box in row)):.0f}pt; '
        f'--width: {wide:.0f}pt">{"".join(part(*box) for box in row)}</div>'
        for row in rows)
    title, label = ("".join(f"<p>{html.escape(w)}</p>" for w in x) for x in (above, below))
    return f'<div class="panels" role="img" aria-label="{alt}">{title}{drawn}{label}</div>'


def stack(app, pagename, templatename, context, doctree):
    if "body" not in context: return
    files = {name: Path(app.srcdir, uri) for uri, name in app.builder.images.items()}

    def change(m):
        alt, src, name = m[1], m[2], m[3] or m[4]
        svg = files[html.unescape(name)].read_text(encoding="utf-8")
        rows, (above, below, *_) = panels(svg), across(svg)
        if 1 < len(rows) <= STRIP:
            return (m[0].replace("<img ", '<img class="side-by-side" ', 1)
                    + stacked(alt, src, rows, above, below))
        wide = f'style="--width: {sum(box[2] for row in rows for box in row):.0f}pt" '
        if len(rows) > STRIP or rows[0][0][2] <= NARROW:
            return m[0].replace("<img ", f'<img class="narrow" {wide}', 1)
        return m[0].replace("<img ", f"<img {wide}", 1)
    context["body"] = PICTURE.sub(change, context["body"])


def setup(app): app.connect("html-page-context", stack)
