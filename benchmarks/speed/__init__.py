"""Timing of the kernels, and counters of what they ask of a device; importing it finds megatron_rc where it is not
installed."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if importlib.util.find_spec("megatron_rc") is None:
    # behind everything else: the folder triton_kernels must not be found before a package of that name
    sys.path.append(str(ROOT))
