"""The table of colours: readable on both grounds, and methods that the colour-blind tell apart."""

import itertools

import numpy as np
import pytest

from megatron_rc.drawing.colours import DARK, LIGHT, METHODS, OTHER, SERIES, hues

APART = 10.0
"""Least distance of two colours in CIELAB; 2 is just visible side by side."""
SIGHT = {
    "usual": np.eye(3),
    "deuteranopia": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
    "protanopia": np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
}
"""Viénot, Brettel and Mollon (1999), on linear RGB."""
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    x, y, z = np.cbrt(TO_XYZ @ rgb / (TO_XYZ @ np.ones(3)))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_is_readable_and_methods_stay_apart_for_everybody(colours: dict[str, str]) -> None:
    for name in ("text", "soft", "alarm", "caution", *SERIES):
        for ground in ("page", "card"):
            dark, light = sorted(TO_XYZ[1] @ linear(colours[each]) for each in (name, ground))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, ground)
    shown = {name: linear(colours[hue]) for name, hue in (METHODS | {"others": OTHER}).items()}
    for sight, matrix in SIGHT.items():
        for one, other in itertools.combinations(shown, 2):
            distance = np.linalg.norm(lab(matrix @ shown[one]) - lab(matrix @ shown[other]))
            assert distance >= APART, (sight, one, other, distance)


def test_a_method_has_one_colour_in_any_company() -> None:
    for names in (["none", "seq-tis"], ["exact", "none", "icepop"], ["bf16", "none", "fp8"]):
        given = hues(names)
        assert all(given[name] == METHODS[name] for name in names if name in METHODS)
        assert len({*given.values()}) == len(names)
    assert list(hues(["bf16", "fp8"]).values()) == [*SERIES[:2]]
