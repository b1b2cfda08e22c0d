"""Whether a committed picture is what its code draws."""

from pathlib import Path

import numpy as np
from matplotlib.image import imread

DIFFERENT, SHARE = 0.1, 1e-4
"""Difference of a colour, and share of the pixels that may have one: another machine rounds edges otherwise."""


def same_picture(drawn: Path, committed: Path) -> bool:
    one, other = imread(drawn), imread(committed)
    return one.shape == other.shape and float((np.abs(one - other).max(-1) > DIFFERENT).mean()) <= SHARE
