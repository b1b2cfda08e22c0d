"""What one call of correct() asks of the device."""

import pytest
import torch
from correction_cases import case, correct

from megatron_rc.correction.correct import pair_metrics
from megatron_rc.correction.settings import PRESETS, Rejection, RolloutCorrection, Weight
from speed.operations import OperationCount

# they wait for the device, and are off unless somebody turns them on
pytestmark = pytest.mark.usefixtures("no_debug_checks")

OF_PRESETS = [row.correction for row in PRESETS.values()]
SEQ_MIS_AND_GEO_MASK = RolloutCorrection(PRESETS["seq-mis"].correction.weight, PRESETS["geo-mask"].correction.reject)
TWO_SIDED_AND_GEO_MASK = RolloutCorrection(Weight("sequence", "mask", 0.5, 2.0), SEQ_MIS_AND_GEO_MASK.reject)
EVERYTHING = RolloutCorrection(
    Weight("segment", "clip", 0.5, 2.0),
    tuple(
        Rejection(statistic, level, reduce, lower=0.1, upper=9.0, when="negative_advantage")  # type: ignore[arg-type]
        for statistic in ("ratio", "k2", "k3", "abs_log_ratio", "prob_diff", "surprise")
        for level in ("token", "sequence", "segment")
        for reduce in ("sum", "mean", "max", "min")
    ),
    normalize="batch",
)


@pytest.mark.parametrize("correction", [SEQ_MIS_AND_GEO_MASK, TWO_SIDED_AND_GEO_MASK, *OF_PRESETS])
def test_correcting_with_all_metrics_takes_at_most_105_operations(correction: RolloutCorrection) -> None:
    batch = case([40, 60, 50])
    with OperationCount() as count:
        correct(*batch.arguments, correction=correction, **batch.options)
    # the mean k3 of the batch, the distance from it and its metrics
    more = 40 * any(gate.statistic == "standardized" for gate in correction.reject)
    if correction.weight is not None and correction.weight.level == "prefix":
        # three for each of the 8 doublings that reach from 1 to 150 tokens
        more += 3 * 8
    if correction.weight is not None and correction.weight.growth == "confidence":
        more += 1  # a bound per token
    more += 9 * sum(gate.statistic == "prob_diff" for gate in correction.reject) // 2  # dppo has two gates
    assert sum(count.operations.values()) <= 105 + more
    assert not count.waits


def test_the_number_of_operations_does_not_grow_with_the_number_of_sequences() -> None:
    counts = []
    for lengths in ([7, 5], [3] * 400):
        batch = case(lengths)
        with OperationCount() as count:
            correct(*batch.arguments, correction=SEQ_MIS_AND_GEO_MASK, cu_seqlens=batch.cu_seqlens)
        counts.append(count.operations)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("correction", [EVERYTHING, *OF_PRESETS])
@pytest.mark.parametrize("per_token", [False, True])
def test_nothing_waits_for_the_device(correction: RolloutCorrection, per_token: bool) -> None:
    batch = case([9, 0, 12, 4])
    if per_token:
        batch.advantages = batch.train * 0 - 1
    with OperationCount() as count:
        corrected = correct(*batch.arguments, correction=correction, **batch.options)
        metrics = pair_metrics(*batch.arguments, cu_seqlens=batch.cu_seqlens).prefixed("current/")
        corrected.metrics.merge(corrected.metrics).merge(metrics)
    assert not count.waits


@pytest.mark.parametrize("wait", ["x[0].item()", "x[x > 0]", "x.nonzero()", "bool(x.any())", "x.repeat_interleave(n)"])
def test_the_counter_sees_a_wait(wait: str) -> None:
    x, n = torch.ones(3), torch.ones(3, dtype=torch.long)
    with OperationCount() as count:
        eval(wait, {"x": x, "n": n})
    assert count.waits
