"""What the user knows about the sides of a dump and the dump does not say: precision, kind of model, noise floor."""

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_rc.analyze.accepted import Accepted

PRECISIONS = ("fp32", "bf16", "fp16", "int8", "fp8", "int4")
SIXTEEN_BITS = ("fp32", "bf16", "fp16")
KINDS = ("dense", "moe")
USUAL = {"fp32": 0.001, "fp16": 0.08, "bf16": 0.12, "int8": 0.45, "fp8": 0.45, "int4": 2.0}
"""Noise of a logit at the typical token at temperature 1, up to which dense models were measured on prose. docs/real.md
has 0.008 (fp16), 0.04 to 0.08 (bf16), 0.12 and 0.43 (int8), 0.16 to 0.32 (fp8), 1.1 and 1.8 (4 bits). Other models are
within half of it (docs/atlas.md)."""
TRAINED = USUAL | {"bf16": 0.2}
"""The same where the answers may be short ones that the model was trained for: its logits are larger then, and bf16 has
0.18. A tensor that was converted wrongly has 0.23."""
LEAST_FLOOR = USUAL["fp32"] / 3
"""A smaller floor, such as the 0 of batch-invariant kernels, counts as this: the rounding of fp32 log-probs."""
OF_GAP = 2 / 3
"""Share of the gap that a probe saw and that counts as floor: twice that gap is usual then."""


@dataclass(frozen=True)
class Known:
    precision: str = ""
    """The coarser precision of the two sides, of PRECISIONS; empty if unknown."""
    kind: str = ""
    """dense or moe; empty if unknown."""
    floor: float | None = None
    """Noise of a logit that the sides have against themselves, as `doctor --probe --floor` measured it."""
    accepted: tuple[Accepted, ...] = ()
    """Findings that decide nothing until a date."""

    def __post_init__(self) -> None:
        for name, value, known in (("precision", self.precision, PRECISIONS), ("model-kind", self.kind, KINDS)):
            if value and value not in known:
                raise ValueError(f"--{name} must be one of {', '.join(known)}, got {value!r}")

    @property
    def usual(self) -> float | None:
        """Noise of a logit up to which nothing is unusual; None where it is not known.

        A mixture of experts shifts experts, which has no limit.
        """
        if self.floor is not None and (self.kind != "moe" or self.floor >= LEAST_FLOOR):
            # a side against itself does not show what is the same in every batch, such as the loss of quantised weights
            return max(3 * max(self.floor, LEAST_FLOOR), TRAINED.get(self.precision, 0.0))
        return None if self.kind == "moe" or not self.precision else TRAINED[self.precision]

    @property
    def fine(self) -> bool:
        """True where rounding is known to be small: 16 bits or more, or a floor of that size where that is not said."""
        small = not self.precision and LEAST_FLOOR <= (self.floor or 0) <= USUAL["bf16"]
        return small or self.precision in SIXTEEN_BITS


def read_floor(path: Path) -> float:
    """The floor in a file of `doctor --probe --floor`, or a share of the gap in it; ValueError without either.

    A side against itself does not show the kernels of the other: in bf16 the gap of a healthy pair is seven floors.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        noise = max(float(read["noise"]), OF_GAP * float(read.get("gap", 0.0)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--floor: {path} is not a file of `megatron-rc doctor --probe --floor` ({error!r})") from None
    if not 0 <= noise < float("inf") or float(read["noise"]) < 0:
        raise ValueError(f"--floor: noise in {path} must be a number from 0, got {noise}")
    return noise
