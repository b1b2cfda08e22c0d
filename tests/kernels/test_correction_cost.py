"""What the correction kernels ask of the device, where they read and write, and the functions inside of them."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from correction_cases import correct
from kernel_calls import EVERY_LEVEL
from kernel_correction_data import SEGMENTS, assert_agrees, batch_of, padded, small_blocks

from megatron_rc.correction.correct import pair_metrics
from megatron_rc.correction.settings import PRESETS, Rejection, RolloutCorrection, Weight
from megatron_rc.kernels.chunks import locate_chunk
from megatron_rc.kernels.log_ratio import expm1
from speed.launches import count_launches, recorded_launches
from speed.traffic import counted_traffic

# of rows without a loss, which hold anything
pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:invalid value encountered")]
pytestmark += [pytest.mark.usefixtures("no_debug_checks")]

COUNTED: dict[str, tuple[RolloutCorrection, dict[str, Any], int]] = {
    **{name: (preset.correction, {}, 3) for name, preset in PRESETS.items() if name != "standardized"},
    "standardized needs the mean k3 of the batch": (PRESETS["standardized"].correction, {}, 5),
    "a given mean k3": (PRESETS["standardized"].correction, {"mean_k3": torch.tensor(0.1, dtype=torch.float64)}, 3),
    "a measured bound": (RolloutCorrection(Weight("sequence", upper="measured")), {"measured_upper": 2.0}, 3),
    "log-probs by the version that sampled": (PRESETS["token-tis"].correction, {"sampling_logprobs": True}, 6),
    "turns, and normalised": (SEGMENTS, {}, 5),
    "every level": (EVERY_LEVEL, {}, 5),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("in_rows", [False, True])
@pytest.mark.parametrize("name", COUNTED)
def test_a_correction_is_three_launches_and_few_more_for_what_needs_them(name: str, in_rows: bool) -> None:
    correction, options, launches = COUNTED[name]
    batch = batch_of([13, 13, 13] if in_rows else [9, 0, 30], sampling="sampling_logprobs" in options)
    batch = padded(batch, 3) if in_rows else batch
    call = {"correction": correction, "backend": "triton", **options, **batch.options}
    asked = count_launches(lambda: correct(*batch.arguments, **call))
    assert asked.total == launches and not asked.waits and not asked.collectives, asked


@pytest.mark.interpreter
def test_metrics_of_a_pair_are_three_launches_and_two_without_sequences() -> None:
    batch = batch_of([9, 0, 30], sampling=False)
    for sequences, launches in ((True, 3), (False, 2)):
        call = {"cu_seqlens": batch.cu_seqlens if sequences else None, "sequences": sequences, "backend": "triton"}
        asked = count_launches(lambda call=call: pair_metrics(*batch.arguments, **call))
        assert asked.total == launches and not asked.waits, asked


@pytest.mark.interpreter
def test_a_sweep_over_bounds_compiles_nothing_anew() -> None:
    def compiled_in(lower: float, upper: float) -> list[dict[str, object]]:
        batch = batch_of([9, 0, 30], sampling=False)
        gates = (Rejection("k3", "sequence", "mean", upper=upper), Rejection("ratio", "token", lower=lower))
        correction = RolloutCorrection(Weight("token", "clip", lower, upper), gates)
        with recorded_launches() as launches:
            correct(*batch.arguments, correction=correction, backend="triton", **batch.options)
        return [
            {p: v for p, v in launch.arguments.items() if isinstance(v, (str, bool, tuple)) and p not in runtime}
            for launch in launches
        ]

    runtime = ("bounds", "statistics")
    assert compiled_in(0.5, 2.0) == compiled_in(0.31, 7.5)
    assert compiled_in(0.5, 2.0)[1]["GATES"] != ()


@pytest.mark.interpreter
@pytest.mark.parametrize("ids", [None, "batch"])
def test_offsets_and_ids_that_are_rubbish_touch_no_foreign_memory(ids: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = batch_of([70, 40], ids=ids)
    batch.advantages = torch.randn(9, generator=generator)
    for _ in range(2):
        if ids:
            batch.segment_ids = torch.randint(-200, 200, (110,), generator=generator)
        batch.cu_seqlens = torch.randint(-300, 300, (10,), generator=generator)
        with small_blocks(), counted_traffic() as traffic:
            correct(*batch.arguments, correction=SEGMENTS, backend="triton", **batch.options)
        assert traffic.total() > 0


@pytest.mark.parametrize("tokens", [20_000, pytest.param(131_072, marks=pytest.mark.full)])
def test_a_sequence_of_many_tokens_and_its_neighbours_are_right(tokens: int) -> None:
    gate = Rejection("k2", "segment", "max", upper=1e-3)
    correction = RolloutCorrection(Weight("geometric", "clip", 0.5, 2.0), (gate,), "batch")
    assert_agrees(batch_of([3, tokens, 0, 1], gap=0.01), RolloutCorrection(correction.weight))
    assert_agrees(batch_of([3, 5000, 0, 1], gap=0.01, density=0.999), correction)


@pytest.mark.parametrize("sequences", [40, pytest.param(4200, marks=pytest.mark.full)])
def test_many_short_sequences_are_right(sequences: int) -> None:
    lengths = torch.randint(4, (sequences,), generator=torch.Generator().manual_seed(0)).tolist()
    with small_blocks():
        assert_agrees(batch_of(lengths), RolloutCorrection(Weight("sequence", "mask", 0.803, 1.297)))


@triton.jit(do_not_specialize=["num_tokens", "row_length", "num_sequences"])
def located_kernel(
    chunks,  # [n] int64
    cu_seqlens,  # [S + 1], or None
    found,  # [n, 4] int64 out
    num_tokens,
    row_length,
    num_sequences,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0)
    sequence, begin, end, start = locate_chunk(
        tl.load(chunks + place), cu_seqlens, row_length, num_tokens, num_sequences, BLOCK, BLOCK // 4
    )
    tl.store(found + 4 * place, sequence)
    tl.store(found + 4 * place + 1, begin)
    tl.store(found + 4 * place + 2, end)
    tl.store(found + 4 * place + 3, start)


def expected_chunks(cu_seqlens: torch.Tensor, block: int) -> torch.Tensor:
    """[chunks, 4]: sequence, its first and last row, first row of the chunk; by walking over the sequences."""
    first = cu_seqlens // block + torch.arange(len(cu_seqlens))
    sequence = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), first.diff())
    begin, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
    start = begin + (torch.arange(len(sequence)) - first[sequence]) * block
    return torch.stack([sequence, begin, end, start], dim=1)


@pytest.mark.parametrize(
    ("count", "longest"), [(1, 5000), (1, 0), (7, 300), (70_000, 3), (70_000, 0), (66_000, 5000), (1025, 1024)]
)
@pytest.mark.parametrize("block", [16, 1024])
def test_chunks_cover_every_token_once_and_are_found_by_search(count: int, longest: int, block: int) -> None:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(longest + 1, (count,), generator=generator)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    table = expected_chunks(cu_seqlens, block)
    tokens = int(cu_seqlens[-1])
    assert len(table) == tokens // block + count
    sizes = (torch.minimum(table[:, 2], table[:, 3] + block) - table[:, 3]).clamp(min=0)
    assert sizes.sum() == tokens
    assert torch.equal(torch.zeros(count, dtype=torch.int64).index_add(0, table[:, 0], sizes), lengths)
    # so a chunk that is not empty begins where the one before it in its sequence ends
    full = (table[1:, 0] == table[:-1, 0]) & (sizes[1:] > 0)
    assert (sizes[:-1][full] == block).all()

    asked = torch.cat([torch.tensor([0, len(table) - 1]), torch.randint(len(table), (25,), generator=generator)])
    found = torch.empty(len(asked), 4, dtype=torch.int64)
    located_kernel[(len(asked),)](asked, cu_seqlens.int(), found, tokens, 0, count, BLOCK=block)
    assert torch.equal(found, table[asked])


def test_rows_of_one_length_are_found_without_offsets() -> None:
    table = expected_chunks(torch.arange(301) * 37, 16)
    asked = torch.arange(0, len(table), 50)
    found = torch.empty(len(asked), 4, dtype=torch.int64)
    located_kernel[(len(asked),)](asked, None, found, 300 * 37, 37, 300, BLOCK=16)
    assert torch.equal(found, table[asked])


@triton.jit
def expm1_kernel(
    x,  # [N] fp64
    out,  # [N] fp64 out
    N: tl.constexpr,
):
    index = tl.arange(0, N)
    value = tl.load(x + index)
    tl.store(out + index, expm1(value, tl.exp(value)))


def test_expm1_is_exact_to_rounding_from_the_smallest_numbers_to_where_exp_minus_1_takes_over() -> None:
    sizes = torch.logspace(-18, 0.3, 256, dtype=torch.float64)
    x = torch.cat([-sizes, sizes])
    found = torch.empty_like(x)
    expm1_kernel[(1,)](x, found, N=len(x))
    # the difference e^x - 1 loses the most at 0.1: half a unit of 2^-52 in the last place of e^x, over 0.1
    torch.testing.assert_close(found, x.expm1(), rtol=2e-15, atol=0)
