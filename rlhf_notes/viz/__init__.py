"Figures in one style, sliders and films that need no kernel, and tokens in colour."
from .slider import Dial, Slider, slider, value_text
from .strip import film, token_strip
from .style import COLORS, INK, LINES, plot_with_gradient, style, value_and_gradient

__all__ = ["COLORS", "INK", "LINES", "Dial", "Slider", "film", "plot_with_gradient", "slider",
           "style", "token_strip", "value_and_gradient", "value_text"]
