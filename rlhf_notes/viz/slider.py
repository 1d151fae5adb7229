"""A picture that moves: sliders that need no kernel.

`slider` takes a function that draws and the values of each parameter, and draws all combinations
beforehand, as range inputs and a few lines of JavaScript: it works in JupyterLab, on a site and in
a file. Without JavaScript, and on paper, the first frame is there. Each frame has a text of its
own, and whatever occurs in two frames is stored once.
"""

__all__ = ['Dial', 'value_text', 'Slider', 'slider']

import html
import io
import json
import re
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from xml.etree import ElementTree

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Dial:
    "A parameter that a `slider` can turn."
    values: tuple       # Its values, in the order of the slider
    label: str = ""     # Text beside the slider; "" = the name of the parameter
    start: object = ... # Value at first; ... = the first of `values`
    show: object = None # show(value) -> text of the value; None = `value_text`


def value_text(value) -> str:
    "A value in a few characters, to stand beside its slider."
    if value is None: return "off"
    if isinstance(value, bool): return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _dial(name, dial):
    "A complete `Dial` of plain Python values."
    dial = dial if isinstance(dial, Dial) else Dial(dial)
    if isinstance(dial.values, (str, bytes)) or not hasattr(dial.values, "__iter__"):
        raise TypeError(f"{name} must be a sequence of values or a Dial, got {dial.values!r}")
    values = [v.item() if hasattr(v, "item") else v for v in dial.values]
    if not values: raise ValueError(f"{name} must have at least one value, got none")
    start = values[0] if dial.start is ... else dial.start
    if start not in values:
        allowed = ", ".join(map(str, values))
        raise ValueError(f"{name} must start at one of its values, {allowed}; got {start!r}")
    return Dial(tuple(values), dial.label or name, start, dial.show or value_text)


def _draw(draw, values):
    "The figure that `draw` makes of these values; no figure stays open in pyplot."
    before = set(plt.get_fignums())
    try:
        plt.figure()
        returned = draw(**values)
        figure = returned if isinstance(returned, Figure) else plt.gcf()
    finally:
        for number in set(plt.get_fignums()) - before:
            plt.close(number)
    if figure.axes: return figure
    raise ValueError("draw must draw on the current figure or return one, "
                     f"but drew nothing at {values}")


def _settle(figures):
    "Put the axes of all frames where the layout puts them in the first, so that nothing jumps."
    first = figures[0]
    same = all(len(f.axes) == len(first.axes) for f in figures)
    if first.get_layout_engine() is None or not same: return figures
    first.draw_without_rendering()
    places = [ax.get_position(original=True) for ax in first.axes]
    for figure in figures:
        figure.set_layout_engine("none")
        for ax, place in zip(figure.axes, places):
            ax.set_position(place)
    return figures


def _round(text):
    def two_digits(m):
        x = float(m[0])
        return f"{round(x, 2) + 0:g}" if abs(x) < 1e4 else m[0]
    return re.sub(r"-?\d+\.\d+", two_digits, text)


def _svg(figure):
    "A figure as an XML tree, without what no viewer needs."
    file = io.BytesIO()
    with plt.rc_context({"svg.hashsalt": "rlhf_notes", "svg.fonttype": "path"}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
    root = ElementTree.fromstring(file.getvalue())
    for e in root.iter():
        e.tag, e.text, e.tail = e.tag.split("}")[-1], None, None
        e.attrib = {k.split("}")[-1]: v for k, v in e.attrib.items()}
        for k in {"d", "x", "y", "width", "height"} & e.attrib.keys():
            e.set(k, _round(e.get(k)))
        if "d" in e.attrib:
            e.set("d", re.sub(r"\s*([A-Za-z])\s*", r"\1", e.get("d")).strip())
    return root


_NAME = "\ue000" # Stands for the name of the slider until that is known


def _text(e):
    return ElementTree.tostring(e, encoding="unicode").replace(" />", "/>")


def _refer(e, names):
    "Replace names in the references of `e` and all below it."
    for x in e.iter():
        x.attrib.pop("id", None)
        if x.get("href", "").startswith("#"):
            x.set("href", "#" + names[x.get("href")[1:]])
        for k in {"clip-path", "style"} & x.attrib.keys():
            x.set(k, re.sub(r"url\(#([^)]+)\)", lambda m: f"url(#{names[m[1]]})", x.get(k)))


def _define(root, name_of):
    "Move glyphs, markers and clips of a frame to the store."
    names, parents = {}, {child: parent for parent in root.iter() for child in parent}
    for defs in root.findall(".//defs"):
        for item in defs:
            if item.tag == "style": continue # it would hold for the whole page; see _frame
            old = item.attrib.pop("id")
            _refer(item, names)
            names[old] = name_of(_text(item))
        parents[defs].remove(defs)
    _refer(root, names)


def _share(roots):
    "The texts of the frames, and the definitions of all that occurs twice."
    store = {}
    def name_of(piece): return store.setdefault(piece, f"{_NAME}-{len(store)}")
    for root in roots:
        _define(root, name_of)
    counts = Counter(_text(e) for root in roots for e in root.iter())
    def replace(e):
        for i, child in enumerate(e):
            text = _text(child)
            if counts[text] == 1 or len(text) <= 80:
                replace(child)
            else:
                e[i] = ElementTree.Element("use", href="#" + name_of(text))
    for root in roots:
        replace(root)
    named = (re.sub(r"^<(\w+)", rf'<\1 id="{name}"', piece) for piece, name in store.items())
    return [_text(root) for root in roots], "".join(named)


_SCRIPT = f"""for (const slider of document.querySelectorAll('[data-slider="{_NAME}"]')) {{
  const inputs = slider.querySelectorAll('input');
  const frames = slider.querySelectorAll('[role=img]');
  const show = () => {{
    let k = 0;
    for (const input of inputs) {{
      const texts = JSON.parse(input.dataset.texts), text = texts[input.value];
      k = k * texts.length + Number(input.value);
      input.setAttribute('aria-valuetext', text); input.nextElementSibling.textContent = text;
    }}
    frames.forEach((frame, i) => {{ frame.hidden = i !== k; }});
  }};
  for (const input of inputs) input.addEventListener('input', show);
  show();
}}"""


def _frame(svg, alt, hidden):
    "A frame. The style sheet in it would hold for the whole page: attributes take its place."
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()
    svg = re.sub(r"^<svg[^>]*>",
                 f'<svg viewBox="0 0 {width} {height}" aria-hidden="true" focusable="false" '
                 'style="display:block;width:100%;height:auto;stroke-linejoin:round;'
                 'stroke-linecap:butt">', svg)
    return (f'<div role="img" aria-label="{html.escape(alt)}"{" hidden" * hidden} '
            f'style="max-width:{width}pt">{svg}</div>')


def _control(dial):
    texts, at = [dial.show(v) for v in dial.values], dial.values.index(dial.start)
    width = max(map(len, texts)) * 0.65
    return ('<label style="display:flex;flex:1 1 14em;align-items:center;gap:.6em;color:inherit">'
            f'<span>{html.escape(dial.label)}</span>'
            f'<input type="range" min="0" max="{len(texts) - 1}" step="1" value="{at}" '
            f'autocomplete="off" aria-valuetext="{html.escape(texts[at])}" '
            'data-lm-suppress-shortcuts="true" '  # or JupyterLab takes the arrow keys
            f'data-texts="{html.escape(json.dumps(texts, ensure_ascii=False))}" '
            'style="flex:1;min-width:5em;min-height:24px;accent-color:#0072B2">'
            f'<span aria-hidden="true" style="min-width:{width:.1f}em">'
            f'{html.escape(texts[at])}</span></label>')


class Slider:
    "Frames for all combinations of some parameters, and sliders that choose. Made by `slider`."
    def __init__(
        self,
        draw,  # draw(**values) draws a figure with pyplot or returns one
        alt,  # text for those who do not see it, or alt(**values)
        dials: dict,  # name -> complete `Dial`
    ):
        self.dials = dials
        values = product(*(d.values for d in dials.values()))
        self.combinations = [dict(zip(dials, v)) for v in values]
        self.start = self.combinations.index({name: d.start for name, d in dials.items()})
        self.alts = [alt(**v) if callable(alt) else alt for v in self.combinations]
        if not all(isinstance(a, str) and a for a in self.alts):
            raise ValueError(f"alt must be a text, or a function of {', '.join(dials)} "
                             f"that returns one, got {alt!r}")
        figures = _settle([_draw(draw, v) for v in self.combinations])
        self.frames, self.store = _share([_svg(figure) for figure in figures])

    def __repr__(self):
        dials = ", ".join(f"{d.label} ({len(d.values)} values)" for d in self.dials.values())
        return f"Slider of {len(self.frames)} frames: {dials}"

    def _repr_html_(self):
        pairs = enumerate(zip(self.frames, self.alts))
        frames = "".join(_frame(svg, alt, i != self.start) for i, (svg, alt) in pairs)
        labels = html.escape(", ".join(d.label for d in self.dials.values()))
        controls = "".join(map(_control, self.dials.values()))
        text = (f'<div data-slider="{_NAME}" role="group" '
                f'aria-label="Figure with a slider: {labels}" style="color:inherit;margin:.5em 0">'
                '<div style="display:flex;flex-wrap:wrap;gap:.2em 1.5em;margin:.3em 0">'
                f'{controls}</div><svg width="0" height="0" style="position:absolute" '
                f'aria-hidden="true" focusable="false"><defs>{self.store}</defs></svg>'
                f'{frames}</div><script>{_SCRIPT}</script>')
        return text.replace(_NAME, "s" + sha256(text.encode()).hexdigest()[:6])


def slider(
    draw,  # draw(**values) draws a figure with pyplot or returns one
    alt,  # text for those who do not see it, or a function of the values
    **parameters,  # name -> a sequence of values or a `Dial`; the last one turns fastest
) -> Slider:  # a notebook renders it
    "A figure with a slider for each parameter, as HTML that needs no kernel."
    if not parameters:
        raise ValueError("parameters must name at least one, with its values, got none")
    return Slider(draw, alt, {name: _dial(name, d) for name, d in parameters.items()})
