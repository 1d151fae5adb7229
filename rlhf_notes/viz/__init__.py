"Figures in one style, sliders and films that need no kernel, and tokens in colour."
from .theme import *
