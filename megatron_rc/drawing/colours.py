"""The one table of colours: of pages and pictures on light and on dark ground, of series, and of methods.

Each text is readable on its ground (contrast 4.5), and the colour-blind tell the methods that figures compare apart.
"""

import itertools
from collections.abc import Sequence

LIGHT = {
    **{"page": "#f6f7f9", "card": "#ffffff", "text": "#1b2330", "soft": "#5d6878", "grid": "#e4e8ee"},
    **{"edge": "#d0d6e0", "blue": "#2148d6", "orange": "#b64a06", "green": "#12805c", "magenta": "#8e1a9c"},
    **{"olive": "#4d4300", "cyan": "#0a4a66", "red": "#6b1230", "alarm": "#c8232c", "caution": "#8a5700"},
}
DARK = {
    **{"page": "#0f141b", "card": "#171e28", "text": "#e6ebf2", "soft": "#97a3b4", "grid": "#263040"},
    **{"edge": "#2b3646", "blue": "#8ab6ff", "orange": "#ff9a45", "green": "#5fdcae", "magenta": "#e85ad0"},
    **{"olive": "#fbe9a0", "cyan": "#b4ecf7", "red": "#e0707a", "alarm": "#ff7b7f", "caution": "#ffc24d"},
}
SERIES = ("blue", "orange", "green", "magenta", "olive", "cyan", "red")
"""Colours of the curves of one chart, in their order; the style sheet calls them c0, c1, ..., too."""
METHODS = {
    "exact": "soft",
    "none": "orange",
    "none, old: rollout": "magenta",
    "token-tis": "blue",
    "seq-tis": "green",
    "seq-mis": "olive",
    "standardized": "red",
}
"""Methods that have one colour in every figure; "exact" is the sampler without a gap."""
OTHER = "cyan"
"""Colour of all other methods."""


def hues(names: Sequence[str]) -> dict[str, str]:
    """A colour per name: that of the method, or else one that no method among the names has."""
    own = {METHODS[name] for name in names if name in METHODS}
    spare = itertools.cycle([hue for hue in ((OTHER, *SERIES) if own else SERIES) if hue not in own])
    return {name: METHODS[name] if name in METHODS else next(spare) for name in dict.fromkeys(names)}


def style_sheet() -> str:
    """The colours as variables and classes of CSS; dark ones where the reader's system is dark."""
    light, dark = ("; ".join(f"--{name}: {value}" for name, value in each.items()) for each in (LIGHT, DARK))
    series = "".join(f".c{number}, .{hue} {{ --c: var(--{hue}); }}\n" for number, hue in enumerate(SERIES))
    return (
        f":root {{ {light}; color-scheme: light dark; }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark}; }} }}\n"
        f"{series}.soft {{ --c: var(--soft); }}\n"
    )
