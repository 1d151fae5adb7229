"Colours that can be read; values beside their gradients."
import matplotlib
import numpy as np
import torch

from rlhf_notes import viz

def luminance(colour):
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    return np.where(
        rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_ink_can_be_read_and_is_of_the_same_hue():
    for name, colour in viz.INK.items():
        assert contrast(colour, "white") >= 4.5, name
        (h1, s1, _), (h2, s2, _) = (
            matplotlib.colors.rgb_to_hsv(matplotlib.colors.to_rgb(c))
            for c in (colour, viz.COLORS[name]))
        assert min(s1, s2) < 0.1 or abs(h1 - h2) < 0.05, name


def test_value_and_gradient():
    x = torch.tensor([-1.0, 0.0, 3.0])
    y, g = viz.value_and_gradient(torch.square, x)
    assert y.tolist() == [1, 0, 9]
    assert g.tolist() == [-2, 0, 6]
    assert not x.requires_grad
    assert not y.requires_grad
