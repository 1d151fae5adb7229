"Films of an episode, and the tokens of a response in colour."
import io

import matplotlib
import numpy as np
import pytest

from rlhf_notes import viz
from rlhf_notes.viz import film, token_strip

def contrast_with_black(colour):
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    return (np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152,
                                                                                     0.0722]
            + 0.05) / 0.05


def test_film_draws_what_happened():
    drawn = []
    trace = np.sin(np.arange(30))
    figure = film(lambda ax, t: drawn.append(t), (0, 10, 29, 30, 60), trace, 0.5, 100, "height",
                  (-2, 2), "a title", "it fell")
    assert drawn == [0, 10, 29]
    below = figure.axes[-1]
    curve, marks, cross = below.lines
    np.testing.assert_allclose(curve.get_xydata(), np.stack([np.arange(30) * 0.5, trace], 1))
    np.testing.assert_allclose(
        marks.get_xydata(), [[0, trace[0]], [5, trace[10]], [14.5, trace[29]]])
    np.testing.assert_allclose(cross.get_xydata(), [[14.5, trace[-1]]])
    assert below.texts[0].get_text() == "it fell"
    assert below.get_xlim()[1] == 50
    assert below.get_ylim() == (-2, 2)
    assert [ax.get_title() for ax in figure.axes[:-1]] == ["0 s", "5 s", "14.5 s", "", ""]
    whole = film(lambda ax, t: None, (0,), trace, 0.5, 30, "height", (-2, 2), end="never")
    assert len(whole.axes[-1].lines) == 2 and not whole.axes[-1].texts  # to the end: no cross
    for wrong in ([], np.zeros((3, 2)), np.zeros(31)):
        with pytest.raises(ValueError, match="trace must be one number for each of 1 to 30 steps"):
            film(lambda ax, t: None, (0,), wrong, 0.5, 30, "height", (-2, 2))


def cells(figure): return np.array([p.get_facecolor() for p in figure.axes[0].patches])


def test_token_strip_shows_numbers_as_text_and_colour():
    figure = token_strip(
        ["a", "b", "c", "d"], {"log π": [-1.0, -0.004, 0.5, 3.0], "reward": [0.0, 2.0, -2.0, 9.0]},
        counts=[1, 1, 1, 0], title="t")
    texts = [t.get_text() for t in figure.axes[0].texts]
    assert texts == ["\N{MINUS SIGN}1.00", "0.00", "0.50", "3.00", "0.00", "2.00",
                     "\N{MINUS SIGN}2.00", "9.00", "a", "b", "c", "d", "log π", "reward"]
    assert figure.texts[0].get_text() == "t"
    colours = cells(figure).reshape(2, 4, 4)
    # the largest of what counts, negative
    np.testing.assert_allclose(
        colours[0, 0, :3], matplotlib.colors.to_rgb(viz.COLORS["yellow"]), atol=0.01)
    np.testing.assert_allclose(
        colours[1, 1, :3], matplotlib.colors.to_rgb(viz.COLORS["sky"]), atol=0.01)
    np.testing.assert_allclose(colours[1, 0, :3], 1, atol=0.01)
    # grey, whatever it holds
    assert (colours[:, 3] == colours[0, 3]).all() and len(set(colours[0, 3, :3])) == 1
    for c in colours.reshape(-1, 4): assert contrast_with_black(c) >= 5.5


def test_token_strip_limits_hold_for_all_frames():
    one, two = (
        cells(token_strip(["a", "b"], {"x": [1.0, v]}, limits={"x": 4})) for v in (0.0, 4.0))
    assert (one[0] == two[0]).all()
    assert (two[1] == cells(token_strip(["a"], {"x": [400.0]}, limits={"x": 4}))[0]).all()
    free = cells(token_strip(["a", "b"], {"x": [1.0, 4.0]}))
    assert (free == two).all()
    # nothing to scale by
    token_strip(["a"], {"x": [float("nan")]}, counts=[False])
    token_strip(["a"], {"x": [0.0]})


def test_token_strip_with_numbers_that_are_none_and_words_of_any_kind():
    figure = token_strip(["$a_^$", "", "c", "d"], {"x": [float("-inf"), float("nan"), 0.5, -1.0]})
    figure.savefig(io.BytesIO())
    assert [t.get_text() for t in figure.axes[0].texts[:4]] == ["\N{MINUS SIGN}\N{INFINITY}", "nan",
                                                                "0.50", "\N{MINUS SIGN}1.00"]
    assert (cells(figure)[2:] == cells(token_strip(["c", "d"], {"x": [0.5, -1.0]}))).all()
    assert (cells(figure)[0] == cells(figure)[3]).all()
    assert (cells(figure)[:, 3] == 1).all()
    token_strip(["", ""], {"x": [1.0, 2.0]}).savefig(io.BytesIO())


@pytest.mark.parametrize("tokens, rows, options, message", [
    ([], {"x": []}, {}, "tokens and rows must hold at least one each, got 0 tokens and 1 rows"),
    (["a"], {}, {}, "tokens and rows must hold at least one each"),
    (["a", "b"], {"x": [1.0]}, {}, r"x must have a number for each of 2 tokens, got shape \(1,\)"),
    (["a", "b"], {"x": [1.0, 2.0]}, dict(counts=[True]),
     r"counts must have a number for each of 2 tokens"),
])
def test_token_strip_names_what_is_wrong(tokens, rows, options, message):
    with pytest.raises(ValueError, match=message): token_strip(tokens, rows, **options)
