"""How many bytes each call has to move, derived from what its kernels read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_rc.cluster.step_time import CORRECT_BYTES, LOSS_BYTES, row_bytes

Row = dict[str, Any]


class Moved(NamedTuple):
    """Bytes of one call as the rows of the benchmark make it: bf16 logits, fp32 numbers, int64 ids."""

    call: str
    formula: str
    parts: str
    total: Callable[[Row], float]
    """What the kernels of a row of the benchmark move."""
    share: float = 0.02
    """What the partial sums of tiles and units add at most, as a share."""


def logits_bytes(row: Row, phase: str) -> float:
    """One pass over logits [tokens, columns], log-probs alone or with entropy. No logit of a masked row is read."""
    counted = row.get("counted_rows", row["tokens"])
    entropy = row["outputs"] == "logprobs, entropy"
    masked = row["tokens"] - counted
    return row_bytes(phase, columns=row["columns"], rows=counted, masked=masked, entropy=entropy)


def _policy_loss(row: Row) -> float:
    return row["tokens"] * LOSS_BYTES


def _correct(row: Row) -> float:
    return row["tokens"] * CORRECT_BYTES


def _routes(row: Row) -> float:
    return row["tokens"] * (4 * row["layers"] * row["k"] + 9)


def _support(row: Row) -> float:
    return 104 * row["tokens"] + 34 * row["kept"]


MOVED = {
    "logits, forward": Moved(
        "log-probs and entropy",
        "2 V + 26 per row",
        "V logits, target id and logit; log-prob, entropy, max and log-sum out",
        lambda row: logits_bytes(row, "forward"),
    ),
    "logits, backward": Moved(
        "their gradient, in place",
        "4 V + 32 per row",
        "V logits in and out, target id, the four numbers above, two upstream gradients",
        lambda row: logits_bytes(row, "backward"),
    ),
    "support": Moved(
        "log-probs over kept ids and their gradient, in place",
        "34 per kept id + 104 per row, and the fill of the gradient, 2 V per row",
        "id and logit twice, gradient of the kept ids parked, then scattered",
        _support,
    ),
    "correct": Moved(
        "`correct`, weights and gates of sequences, all metrics",
        "23 per token",
        "both log-probs and the mask twice, weight and mask out",
        _correct,
        share=0.12,
    ),
    "policy_loss": Moved(
        "`policy_loss` with KL and entropy terms, and its gradients",
        "49 per token",
        "seven numbers and the mask, coefficient out; coefficient and scale in, two gradients out",
        _policy_loss,
    ),
    "compare_routes": Moved(
        "`compare_routes` of int16 ids",
        "4 L K + 9 per token",
        "both ids of every layer and slot, mask; first differing layer and number of differing layers out",
        _routes,
        share=0.03,
    ),
}
