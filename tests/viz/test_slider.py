"""Sliders that need no kernel: a frame for each combination, controls that can be reached and read,
the same bytes each time, few of them.
"""
import json
import re
from html.parser import HTMLParser
from itertools import product

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import notebooks
import pytest
import torch
from matplotlib.figure import Figure

from rlhf_notes.viz import Dial, slider, value_text
from rlhf_notes.viz.slider import _draw, _settle

PAGE_LIMIT = 300_000              # bytes of one slider


class Page(HTMLParser):
    "What stands in a piece of HTML: (tag, attributes), and the text of labels."
    VOID = {"input", "path", "use", "image", "rect"}

    def __init__(self, text):
        super().__init__()
        self.tags, self.stack, self.labels, self.script = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "label": self.labels.append("")
        if tag not in self.VOID: self.stack.append(tag)

    def handle_startendtag(self, tag, attrs): self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack and self.stack.pop() == tag, f"{tag} closes nothing"

    def handle_data(self, data):
        if "label" in self.stack: self.labels[-1] += data
        if self.stack[-1:] == ["script"]: self.script += data

    def all(self, tag, **attrs):
        return [
            a for t, a in self.tags if t == tag and all(a.get(k) == v for k, v in attrs.items())]


def line(slope, shift):
    plt.plot([0, 1], [shift, slope + shift])
    plt.ylim(-5, 5)
    plt.title(f"{slope} and {shift}")


def alt(slope, shift): return f"A line of slope {slope} that is shifted by {shift}."


def made(**changes):
    return slider(
        line,
        **{"alt": alt, "slope": Dial((1, 2, 3), "slope of it", 2), "shift": (0.0, 0.5)} | changes)


def test_draw_is_called_once_for_each_combination():
    calls = []
    def draw(**values):
        calls.append(values)
        line(**values)
    s = slider(draw, alt, slope=(1, 2, 3), shift=(0.0, 0.5))
    s._repr_html_(), s._repr_html_()
    assert calls == [
        dict(slope=a, shift=b) for a, b in product((1, 2, 3), (0.0, 0.5))] == s.combinations


def test_each_parameter_has_a_control_that_says_what_it_is():
    page = Page(made()._repr_html_())
    assert not page.stack, "tags are left open"
    inputs = page.all("input", type="range")
    # label and value, both seen
    assert [label for label in page.labels] == ["slope of it2", "shift0"]
    assert [(i["min"], i["max"], i["step"], i["value"], i["aria-valuetext"])
            for i in inputs] == [("0", "2", "1", "1", "2"), ("0", "1", "1", "0", "0")]
    assert [json.loads(i["data-texts"]) for i in inputs] == [["1", "2", "3"], ["0", "0.5"]]
    group, = page.all("div", role="group")
    assert "slope of it" in group["aria-label"] and "shift" in group["aria-label"]


def test_each_frame_has_its_text_and_the_default_is_shown():
    s = made()
    frames = Page(s._repr_html_()).all("div", role="img")
    assert [f["aria-label"] for f in frames] == [
        alt(a, b) for a, b in product((1, 2, 3), (0.0, 0.5))]
    assert ["hidden" not in f for f in frames] == [False, False, True, False, False, False]
    assert s.combinations[s.start] == dict(slope=2, shift=0.0)
    assert all(f["aria-label"] == "one for all"
               for f in Page(made(alt="one for all")._repr_html_()).all("div", role="img"))


def test_frames_differ_and_show_what_was_drawn():
    s = made()
    assert len(set(s.frames)) == 6
    def points(frame): return re.findall(r'd="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', frame)
    (x0, y0, x1, y1), = [
        p for p in points(made(slope=(1, 2), shift=(0.0, 0.5)).frames[1]) if p[1] != p[3]
        and p[0] != p[2]]
    (_, z0, _, z1), = [
        p for p in points(made(slope=(1, 2), shift=(0.0, 0.5)).frames[3]) if p[1] != p[3]
        and p[0] != p[2]]
    assert float(x0) < float(x1)
    assert float(y0) > float(y1)
    assert float(z0) == float(y0)
    assert float(y0) - float(z1) == pytest.approx(2 * (float(y0) - float(y1)), abs=0.05)


def test_no_reference_leads_nowhere_and_names_are_its_own():
    text = made()._repr_html_()
    names = re.findall(r'\bid="([^"]+)"', text)
    assert len(names) == len(set(names))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(names)
    name = re.search(r'data-slider="([^"]+)"', text)[1]
    assert all(n.startswith(name + "-") for n in names)
    assert f"[data-slider=\"{name}\"]" in text
    assert "\ue000" not in text
    other = re.search(r'data-slider="([^"]+)"', made(alt="another")._repr_html_())[1]
    assert other != name


def test_the_same_pictures_are_the_same_bytes():
    assert made()._repr_html_() == made()._repr_html_()
    assert repr(made()) == "Slider of 6 frames: slope of it (3 values), shift (2 values)"


def test_nothing_comes_from_elsewhere():
    text = made()._repr_html_()
    assert not re.search(r"https?:|url\((?!#)|<link|<img|\bsrc=", text)
    assert "<style" not in text  # it would hold for the whole page


def test_shared_parts_are_stored_once():
    s, many = (slider(line, alt, slope=(1,), shift=(0,)),
               slider(line, alt, slope=tuple(range(20)), shift=(0,)))
    assert len(many._repr_html_()) < 4 * len(s._repr_html_())


def test_all_frames_have_their_axes_in_one_place():
    def draw(n):
        fig, ax = plt.subplots(layout="constrained")
        ax.plot([0, n], [0, n])
        ax.set_ylabel("y\n" * n)
    figures = _settle([_draw(draw, dict(n=n)) for n in (1, 2, 5)])
    places = [f.axes[0].get_position().bounds for f in figures]
    assert places[0] == places[1] == places[2] and places[0][0] > 0.02
    free = _draw(draw, dict(n=5))
    free.draw_without_rendering()
    assert free.axes[0].get_position().bounds != places[0]


def test_a_figure_may_be_returned_and_none_is_left_open():
    plt.close("all")
    mine = plt.figure()
    mine.add_subplot().plot([1, 2])
    def draw(a):
        figure = Figure()
        figure.add_subplot().plot([0, a])
        return figure
    assert len(slider(draw, "a line", a=(1, 2)).frames) == 2
    made()
    assert plt.get_fignums() == [mine.number]
    with pytest.raises(ZeroDivisionError): slider(lambda a: plt.plot(1 / a), "a line", a=(0,))
    assert plt.get_fignums() == [mine.number]
    plt.close("all")


def test_texts_of_values():
    assert ([value_text(v) for v in (None, True, False, 0.30000000000000004, 2, "halfway")]
            == ["off", "yes", "no", "0.3", "2", "halfway"])
    page = Page(
        slider(lambda a: plt.plot(0), "x", a=Dial((0.1, 0.25), show="{:.0%}".format))._repr_html_())
    assert json.loads(page.all("input")[0]["data-texts"]) == ["10%", "25%"]
    assert slider(
        lambda a: plt.plot(0), "x", a=torch.tensor([1.0, 2.0])).dials["a"].values == (1.0, 2.0)
    page = Page(slider(lambda a: plt.plot(0), 'a "quoted" <text> & more',
                       a=Dial(("<b>", 'c"'), "<label>"))._repr_html_())
    assert page.all("div", role="img")[0]["aria-label"] == 'a "quoted" <text> & more'
    assert page.labels[0].startswith("<label>")


@pytest.mark.parametrize("arguments, error, message", [
    (dict(slope=[]), ValueError, "slope must have at least one value"),
    (dict(slope=Dial((1, 2), start=3)), ValueError,
     "slope must start at one of its values, 1, 2; got 3"),
    (dict(slope=3), TypeError, "slope must be a sequence of values"),
    (dict(slope="abc"), TypeError, "slope must be a sequence of values"),
    (dict(alt=""), ValueError, "alt must be a text"),
    (dict(alt=lambda slope, shift: None), ValueError, "alt must be a text"),
])
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message): made(**arguments)


def test_no_parameters_and_nothing_drawn():
    with pytest.raises(ValueError, match="parameters must name at least one"): slider(line, "x")
    with pytest.raises(
        ValueError,
        match="draw must draw on the current figure or return one, but drew nothing at {'a': 1}"):
        slider(lambda a: None, "x", a=(1,))


STORED = [(p, c) for p in notebooks.notebooks()
          for c in json.loads(p.read_text(encoding="utf-8"))["cells"]
          if any("data-slider" in "".join(o.get("data", {}).get("text/html", ""))
                 for o in c.get("outputs", []))]


@pytest.mark.parametrize(
    "path, cell", STORED, ids=lambda x: x["id"] if isinstance(x, dict) else x.stem)
def test_stored_sliders_are_frames_and_light(path, cell):
    data = cell["outputs"][-1]["data"]
    text = "".join(data["text/html"])
    assert len(text.encode()) < PAGE_LIMIT, f"{path.stem}, {cell['id']}: {len(text.encode())} bytes"
    assert len(notebooks.directives("".join(cell["source"])).get("fig-alt", "")) >= 30
    page = Page(text)
    assert all(len(f["aria-label"]) > 30 for f in page.all("div", role="img"))
    assert len({f["aria-label"] for f in page.all("div", role="img")}) > 1


def test_the_lessons_have_their_sliders():
    assert {p.stem for p, _ in STORED} >= {
        "02_logprob", "03_ratio", "04_surrogate", "06_kl", "07_whitening", "08_advantage",
        "35_variants", "19_ppo", "20_plots"}
