"""Lags of megatron/rl: the epochs of a rollout batch reach the tokens that the correction judges."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import run_ranks
from hosts.megatron_lm.ranks import Cut, rollouts, weights_by_epoch

from megatron_rc import Rejection, RolloutCorrection, Weight
from megatron_rc.integrations.megatron_lm.lags import UNKNOWN, epochs_of_rows, is_stale, lags_of

NOW = 9
"""Iteration of the stub."""
SEGMENTS = [[[(7, 1), (8, 1), (9, 1)], [(9, 7)]], [[(8, 3), (9, 5)], [(5, 6)]]]
"""(epoch, tokens) over prompt and answer of the four rollouts of the stub."""
CUTS = [Cut(rows=1), Cut(rows=4), Cut(bins=[[[0, 2], [], [1], [3]]])]


def rollout(*turns: tuple[list[int], list[int]] | None) -> Any:
    """A rollout of (tokens, generation mask) per turn."""
    kept = [turn for turn in turns if turn]
    return SimpleNamespace(trajectory=[t for t, _ in kept], generation_mask=[[bool(g) for g in m] for _, m in kept])


def test_rows_are_those_of_the_host_and_each_token_has_the_epoch_of_the_turn_that_generated_it() -> None:
    chain = rollout(([1, 2, 3], [0, 1, 1]), ([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1]))
    rewritten = rollout(([1, 2], [0, 1]), ([7, 8, 9], [0, 1, 1]))
    failed, text = rollout(), SimpleNamespace(trajectory=["words of text"], generation_mask=None)
    # over the turns one after another: the second turn encodes the first one again
    segments = [[[(3, 2), (4, 1), (6, 5), (7, 1)], []], [[(5, 2), (6, 3)], []]]
    rows = epochs_of_rows([[chain, failed], [rewritten, text]], segments, lambda one: one is not rewritten)
    _ = UNKNOWN
    assert rows == [[_, 3, 4, _, 6, 7], [_, 5], [_, 6, 6], []]
    assert is_stale(rows, 7) and not is_stale(rows, 3)
    shape = torch.Size([3, 5])
    both = [lags_of(rows, [[0]] * 3, [[of], [of + 1], [of + 2]], shape, 7).tolist() for of in (0, 3)]
    assert both == [[[4, 3, 0, 1, 0], [2, 0, 0, 0, 0], [1, 1, 0, 0, 0]], [[0] * 5] * 3], "the last row, and padding"
    packed = lags_of(rows, [[0, 3], [0]], [[2, 1], [5]], torch.Size([2, 7]), 7)
    assert packed.tolist() == [[1, 1, 0, 2, 0, 0, 0], [0] * 7]


@pytest.fixture(scope="module")
def judged() -> list[dict[str, Any]]:
    correction = RolloutCorrection(reject=(Rejection("lag", "token", upper=1.0),))
    return run_ranks(1, weights_by_epoch, CUTS, correction, SEGMENTS)[0]  # type: ignore[no-any-return]


@pytest.mark.host("megatron-lm", proof="stand-in", feature="bounds by lag")
@pytest.mark.parametrize("cut", range(len(CUTS)), ids=["rows of 1", "rows of 4", "packed"])
def test_the_correction_of_the_batch_judges_every_token_by_its_lag(judged: list[dict[str, Any]], cut: int) -> None:
    made = [one for group in rollouts() for one in group]
    dropped = total = 0
    for row, (one, segments) in enumerate(zip(made, [s for group in SEGMENTS for s in group], strict=True)):
        epochs = [epoch for epoch, count in segments for _ in range(count)]
        known = one.generation_mask[0].index(True) + len(one.logprobs[0])
        for token in range(1, len(epochs)):
            if one.generation_mask[0][token] and token < known:
                kept = NOW - epochs[token] <= 1
                assert bool(judged[cut]["weights"][row, token - 1] == 1) == kept, (row, token)
                dropped, total = dropped + (not kept), total + 1
    log = {name: float(pair[0]) for name, pair in judged[cut]["log"].items()}
    assert 0 < dropped < total and log["old/masked_token"] == pytest.approx(dropped / total)
    assert log["old/tokens_lag_4_7"] == pytest.approx(dropped / total) and log["old/k3_lag_1"] > 0


def test_without_a_stale_token_there_are_no_metrics_by_lag_and_without_epochs_lags_are_refused() -> None:
    fresh = [[[(NOW, 3)], [(NOW, 7)]], [[(NOW, 8)], [(NOW, 6)]]]
    [found] = run_ranks(1, weights_by_epoch, CUTS[:1], RolloutCorrection(), fresh)[0]
    assert not any("_lag_" in name for name in found["log"]) and not found["warnings"]
    correction = RolloutCorrection(Weight(growth="sqrt_lag"))
    with pytest.raises(Exception, match="returns no policy_epoch_segments"):
        run_ranks(1, weights_by_epoch, CUTS[:1], correction, [])
