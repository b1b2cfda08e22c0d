"""Controls of a correction: rate, weights and mean stay those of the batch, and the tokens are others."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rc import Corrected, RolloutCorrection, correct
from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.training.microbatches import Share
from megatron_rc.training.step.control import controlled

SEQUENCES, TRAINED, BROKEN = 40, 30, 4
TOKEN_TRUNCATE = RolloutCorrection.preset("token-tis")
TOKEN_MASK = RolloutCorrection.from_dict({"weight": {"level": "token", "mode": "mask", "lower": 0.8, "upper": 1.2}})
SEQUENCE_MASK = RolloutCorrection.from_dict({"weight": {"level": "sequence", "mode": "mask", "upper": 1.1}})
SEQUENCE_TRUNCATE = RolloutCorrection.preset("seq-tis")
GATED = RolloutCorrection.from_dict(
    {"weight": {"level": "token", "upper": 1.1}, "reject": [{"statistic": "k3", "level": "sequence", "upper": 0.05}]}
)
TURNS = RolloutCorrection.from_dict({"weight": {"level": "segment", "mode": "mask", "upper": 1.1}})
DROPPING = [TOKEN_MASK, SEQUENCE_MASK, GATED, TURNS]
EVERY = [TOKEN_TRUNCATE, SEQUENCE_TRUNCATE, *DROPPING]
CASES = [
    *(("random-mask", correction) for correction in DROPPING),
    *((control, correction) for control in ("shuffled-weights", "mean-weight") for correction in EVERY),
]
IN_ORDER = list(range(SEQUENCES))
TAKEN = [s for s in range(TRAINED) if s != BROKEN]


def sample(number: int) -> Sample:
    length = int(torch.randint(1, 9, (1,), generator=torch.Generator().manual_seed(number)))
    values = [-1.0 - number / 100 - t / 1000 for t in range(length)]
    mask = [t % 4 != 2 for t in range(length)]
    return Sample([1, 2], list(range(length)), values, "stop", [(0, 0, length)], output_mask=mask)


def case(correction: RolloutCorrection, order: list[int]) -> tuple[Corrected, Share, Tensor]:
    """The correction of a batch whose sequences lie in this order; sequence BROKEN has a NaN."""
    batch = TokenBatch.from_samples([sample(s) for s in order], SamplingParams())
    rows = batch.rollout_logprobs
    # the gap of a token follows from its log-prob, so that every order has the same
    old = rows + 0.3 * torch.sin(1e4 * rows.double()).float()
    old = old.index_fill(0, torch.tensor([int(batch.cu_seqlens[order.index(BROKEN)]) + 1]), float("nan"))
    corrected = correct(old, rows, batch.loss_mask, correction=correction, cu_seqlens=batch.cu_seqlens)
    return corrected, Share(batch, order, [[range(TRAINED)], [range(TRAINED, SEQUENCES)]]), old


def by_sequence(values: Tensor, share: Share) -> dict[int, list[Any]]:
    parts = values.split(share.batch.lengths)
    masks = share.batch.loss_mask.split(share.batch.lengths)
    return {s: p[m].tolist() for s, p, m in zip(share.sequences, parts, masks, strict=True)}


def run(correction: RolloutCorrection, control: Any, order: list[int], seed: int = 5) -> tuple[Any, Any, Any, Any]:
    """Weights and mask per sequence, before the control and after it."""
    corrected, share, old = case(correction, order)
    after = controlled(corrected, share, old, parts=1, control=control, seed=seed)
    return tuple(by_sequence(v, share) for c in (corrected, after) for v in (c.weights, c.mask))  # type: ignore[return-value]


def flat(values: dict[int, list[Any]]) -> list[Any]:
    return [v for s in TAKEN for v in values[s]]


@pytest.mark.parametrize(("control", "correction"), CASES)
def test_only_trained_finite_sequences_take_part_in_any_order(control: str, correction: RolloutCorrection) -> None:
    before_weights, before_mask, weights, mask = run(correction, control, IN_ORDER)
    others = [BROKEN, *range(TRAINED, SEQUENCES)]
    assert all(weights[s] == before_weights[s] and mask[s] == before_mask[s] for s in others)
    assert flat(weights) != flat(before_weights)
    assert all(w == 0 for s in IN_ORDER for w, kept in zip(weights[s], mask[s], strict=True) if not kept)
    assert run(correction, control, [*range(TRAINED - 1, -1, -1), *range(TRAINED, SEQUENCES)])[2:] == (weights, mask)
    assert control == "mean-weight" or run(correction, control, IN_ORDER, seed=6)[2] != weights


def turns(values: list[Any]) -> list[list[Any]]:
    """The values of each turn; every fourth token, from the third on, is not drawn and parts two turns."""
    drawn = [t for t in range(2 * len(values) + 1) if t % 4 != 2][: len(values)]
    pairs = itertools.groupby(zip(drawn, values, strict=True), key=lambda pair: (pair[0] + 1) // 4)
    return [[value for _, value in pair] for _, pair in pairs]


def tokens(values: list[Any]) -> list[list[Any]]:
    return [[value] for value in values]


def whole(values: list[Any]) -> list[list[Any]]:
    return [values]


@pytest.mark.parametrize(("correction", "units"), [*zip(DROPPING, [tokens, whole, whole, turns], strict=True)])
def test_a_random_mask_drops_as_many_units_as_the_correction(correction: RolloutCorrection, units: Any) -> None:
    _, before, weights, after = run(correction, "random-mask", IN_ORDER)
    assert weights == {s: [float(kept) for kept in after[s]] if s in TAKEN else weights[s] for s in IN_ORDER}
    had, has = ([unit for s in TAKEN for unit in units(kept[s])] for kept in (before, after))
    assert all(len(set(unit)) == 1 for unit in has)
    assert 0 < sum(unit[0] for unit in has) == sum(unit[0] for unit in had) < len(has)


@pytest.mark.parametrize("correction", [TOKEN_TRUNCATE, TOKEN_MASK, GATED])
def test_shuffled_weights_are_the_same_numbers_on_other_tokens(correction: RolloutCorrection) -> None:
    weights, mask, shuffled, kept = run(correction, "shuffled-weights", IN_ORDER)
    pairs, others = (sorted(zip(flat(w), flat(m), strict=True)) for w, m in ((weights, mask), (shuffled, kept)))
    assert pairs == others and flat(weights) != flat(shuffled)


@pytest.mark.parametrize("correction", [SEQUENCE_TRUNCATE, SEQUENCE_MASK])
def test_weights_of_sequences_are_shuffled_among_sequences(correction: RolloutCorrection) -> None:
    weights, _, shuffled, _ = run(correction, "shuffled-weights", IN_ORDER)
    assert all(len(set(shuffled[s])) == 1 for s in TAKEN)
    assert sorted(weights[s][0] for s in TAKEN) == sorted(shuffled[s][0] for s in TAKEN)


@pytest.mark.parametrize("correction", DROPPING)
def test_the_mean_weight_keeps_every_token_and_the_sum_of_the_weights(correction: RolloutCorrection) -> None:
    weights, _, mean, mask = run(correction, "mean-weight", IN_ORDER)
    assert len(set(flat(mean))) == 1 and all(flat(mask))
    assert sum(flat(mean)) == pytest.approx(sum(flat(weights)), rel=1e-6)
