"""The step at which a curve of a run leaves its level, for comparing which of two curves moves first."""

import numpy as np
from scipy import ndimage

WINDOW = 5
"""Steps of the running median in which a rise is looked for."""
START = 1 / 8
"""Share of the steps, at least WINDOW, whose median is the level that a curve starts from."""
FARTHEST = 4.0
"""Way of a curve, in standard deviations of its steps, from which on it has moved at all."""


def half_way(values: np.ndarray, *, falls: bool = False) -> int | None:
    """Index of the first step at which a curve [N] has gone half of its way from its level at the start to its largest.

    The curve is the running median over WINDOW steps. None where its way is shorter than FARTHEST standard deviations
    of a single step, which are estimated from the differences of neighbours: then it has not moved.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if finite.size < 2 * WINDOW:
        return None
    known = -values[finite] if falls else values[finite]
    smooth = ndimage.median_filter(known, WINDOW, mode="nearest")
    start = float(np.median(known[: max(WINDOW, int(START * known.size))]))
    way = float(smooth.max()) - start
    noise = 1.4826 * float(np.median(np.abs(np.diff(known)))) / np.sqrt(2)
    if way <= FARTHEST * noise:
        return None
    return int(finite[np.argmax(smooth >= start + way / 2)])
