"""Expert-shift metrics: every value of a tiny case by hand, and sums that no cut of the batch changes."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from route_sets import peak_memory, random_routes
from torch import Tensor

from megatron_rc.correction.correct import pair_metrics
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.moe import compare
from megatron_rc.moe import reference as routes
from megatron_rc.moe.router_distance import router_kl
from megatron_rc.moe.shift import ExpertShift, expert_shift
from megatron_rc.moe.shift_metrics import MARGINS, POSITIONS
from megatron_rc.moe.tables import MoeShape, RouteTable

TWO = MoeShape(num_layers=2, layers=(0, 1), top_k=2, num_experts=4)
MASK = torch.tensor([True, True, True, False])
CHOSEN = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[1, 2], [0, 3]], [[0, 1], [0, 1]]])
SAMPLED = torch.tensor([[[1, 0], [3, 2]], [[0, 2], [2, 3]], [[2, 1], [1, 2]], [[2, 3], [2, 3]]])
ROUTER = torch.tensor([0.4, 0.3, 0.2, 0.1])
"""Router probabilities of the trainer, at every token and layer."""
OTHER_ROUTER = torch.tensor([0.5, 0.1, 0.3, 0.1])
MARGIN = torch.tensor([[0.5, 2.0], [0.0005, 0.02], [0.5, 5.0], [9.0, 9.0]])
LOG_RATIO = torch.tensor([0.1, -0.8, 0.3, 5.0])
NAN = math.nan


def by_hand(other: RouteTable | None = None) -> dict[str, Any]:
    trainer = RouteTable(TWO, CHOSEN, ROUTER.log()[CHOSEN], MARGIN, ROUTER.log()[SAMPLED])
    other = other or RouteTable(TWO, SAMPLED)
    return expert_shift(trainer, other, MASK, log_ratio=LOG_RATIO, positions=torch.arange(4)).sums.values()


def padded(values: list[float], length: int) -> list[float]:
    return values + [NAN] * (length - len(values))


def test_every_metric_of_a_tiny_case() -> None:
    expected = {
        # overlaps 2 1 2 | 2 2 0 of 2
        "route_layers": [0, 1],
        "route_margins": list(MARGINS),
        "route_overlap": 0.75,
        "route_overlap_by_layer": [2.5 / 3, 2 / 3],
        "route_jaccard": 13 / 18,
        "route_jaccard_by_layer": [7 / 9, 2 / 3],
        "route_any_diff": 1 / 3,
        "route_any_diff_by_layer": [1 / 3, 1 / 3],
        "route_layers_differing": 2 / 3,
        "route_tokens_touched": 2 / 3,
        "route_first_layer": 0.5,
        "route_first_layer_by_layer": [0.5, 0.5],
        # token 1: |4/7 - 2/3| + 3/7 + 1/3; token 2: disjoint
        "route_gate_l1": (6 / 7 + 2) / 6,
        "route_gate_l1_by_layer": [2 / 7, 2 / 3],
        "route_margin": 8.0205 / 6,
        "route_margin_by_layer": [1.0005 / 3, 7.02 / 3],
        "route_any_diff_by_margin": [NAN, 1, NAN, NAN, 0, NAN, NAN, 0, 0, 1],
        # experts 0 0 1 | 1 1 2 against 0 0 1 | 1 2 2, and so on
        "route_load_change_by_expert": [[0, 1 / 6, -1 / 6, 0], [1 / 6, -1 / 6, -1 / 6, 1 / 6]],
        "route_load_change_by_layer": [1 / 6, 1 / 3],
        "route_load_change": 0.25,
        "abs_log_ratio_shifted": 0.55,
        "abs_log_ratio_unshifted": 0.1,
        "abs_log_ratio_shifted_by_layer": [0.8, 0.3],
        "abs_log_ratio_unshifted_by_layer": [0.2, 0.45],
        "f2_shifted": 0.5,
        "f2_unshifted": 0.0,
        "route_tokens_touched_by_position": padded([0, 1, 1], POSITIONS),
        "abs_log_ratio_shifted_by_position": padded([NAN, 0.8, 0.3], POSITIONS),
        "abs_log_ratio_unshifted_by_position": padded([0.1], POSITIONS),
    }
    found = by_hand()
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert flat(found[name]) == pytest.approx(flat(value), rel=1e-6, abs=1e-9, nan_ok=True), name


def flat(value: Any) -> list[float]:
    return torch.tensor(value, dtype=torch.float64).flatten().tolist()


def test_router_kl_and_gates_use_the_other_routers_log_probs_where_they_are_known() -> None:
    found = by_hand(RouteTable(TWO, SAMPLED, logprobs=OTHER_ROUTER.log()[SAMPLED]))
    kl = {ids: two_and_rest(ids) for ids in ((0, 1), (0, 2), (1, 2), (2, 3))}
    assert found["route_kl_by_layer"] == pytest.approx(
        [(kl[0, 1] + kl[0, 2] + kl[1, 2]) / 3, (kl[2, 3] + kl[2, 3] + kl[1, 2]) / 3], rel=1e-6
    )
    assert found["route_kl"] == pytest.approx(sum(found["route_kl_by_layer"]) / 2)
    # layer 0: 4/7 3/7 against 5/6 1/6; 4/7 3/7 of experts 0, 1 against 5/8 3/8 of 0, 2; 3/5 2/5 against 1/4 3/4
    first = 2 * (5 / 6 - 4 / 7) + (5 / 8 - 4 / 7) + 3 / 7 + 3 / 8 + 2 * (3 / 5 - 1 / 4)
    assert found["route_gate_l1_by_layer"][0] == pytest.approx(first / 3, rel=1e-6)


def two_and_rest(ids: tuple[int, int]) -> float:
    p, q = ([r[i].item() for i in ids] for r in (OTHER_ROUTER, ROUTER))
    cells = zip([*p, 1 - sum(p)], [*q, 1 - sum(q)], strict=True)
    return sum(a * math.log(a / b) for a, b in cells)


def test_router_kl_is_exact_over_all_experts_and_below_it_over_some() -> None:
    p, q = torch.randn(2, 50, 6, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum(-1).double()
    torch.testing.assert_close(router_kl(p, q), exact, rtol=1e-5, atol=1e-6)
    assert ((some := router_kl(p[:, :3], q[:, :3])) <= exact + 1e-6).all() and (some > 0).all()


def test_unnormalised_gates_are_the_routers_probabilities() -> None:
    shape = TWO.__class__(2, (0, 1), 2, 4, normalized=False)
    logs = ROUTER.log()
    mine = RouteTable(shape, CHOSEN, logs[CHOSEN], None, logs[SAMPLED])
    found = expert_shift(mine, RouteTable(shape, SAMPLED), MASK).sums.values()
    # token 1 layer 0: expert 1 (0.3) becomes expert 2 (0.2); token 2 layer 1: 0.4, 0.1 become 0.3, 0.2
    assert found["route_gate_l1_by_layer"] == pytest.approx([0.5 / 3, 1.0 / 3], rel=1e-6)


def test_route_shift_is_the_share_of_layers_that_differ_of_every_token() -> None:
    found = expert_shift(RouteTable(TWO, CHOSEN), RouteTable(TWO, SAMPLED), MASK)
    assert found.route_shift.tolist() == [0.0, 0.5, 0.5, 1.0] and found.route_shift.dtype == torch.float32


def test_layers_are_named_by_their_place_in_the_model() -> None:
    shape = MoeShape(num_layers=9, layers=(3, 8), top_k=2, num_experts=4)
    found = expert_shift(RouteTable(shape, CHOSEN), RouteTable(shape, SAMPLED), MASK).sums.values()
    assert found["route_first_layer"] == (3 + 8) / 2


def test_corrupt_tokens_count_nowhere_and_impossible_ones_at_the_bound() -> None:
    ratio = torch.tensor([math.nan, -math.inf, math.inf, 1.0])
    found = expert_shift(
        RouteTable(TWO, CHOSEN), RouteTable(TWO, SAMPLED), torch.ones(4), log_ratio=ratio, log_ratio_bound=7.0
    ).sums.values()
    assert found["route_tokens_touched"] == 1.0 and found["route_layers_differing"] == 1.5
    assert found["abs_log_ratio_shifted"] == 4.0 and math.isnan(found["abs_log_ratio_unshifted"])


def random_shift(rows: slice) -> ExpertShift:
    shape = MoeShape(num_layers=5, layers=(0, 2, 3), top_k=3, num_experts=12)
    generator = torch.Generator().manual_seed(3)
    a, b = random_routes((200, 3, 3), seed=1)
    own, reference, theirs = torch.randn(3, 200, 3, 12, generator=generator).log_softmax(-1)
    mine = RouteTable(shape, a, own.gather(-1, a), torch.rand(200, 3, generator=generator), reference.gather(-1, b))
    other = RouteTable(shape, b, theirs.gather(-1, b))
    ratio = torch.randn(200, generator=generator)
    mask, positions = torch.arange(200) % 3 != 1, torch.arange(200) * 7
    return expert_shift(mine[rows], other[rows], mask[rows], log_ratio=ratio[rows], positions=positions[rows])


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert flat(found[name]) == pytest.approx(flat(value), rel=1e-12, nan_ok=True), name


def test_no_cut_of_the_batch_changes_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_shift(slice(None)).sums.values()
    parts = [random_shift(slice(*edges)) for edges in ((0, 0), (0, 1), (1, 70), (70, 200))]
    merged = parts[0].sums
    for part in parts[1:]:
        merged.merge(part.sums)
    same(merged.values(), whole)
    monkeypatch.setattr(routes, "_CHUNK_IDS", 50)
    same(random_shift(slice(None)).sums.values(), whole)


def _pooled(rank: int) -> dict[str, Any]:
    return random_shift(slice(0, 60) if rank == 0 else slice(60, 200)).sums.all_reduce(dist.group.WORLD).values()


def test_ranks_pool_sums_and_not_averages() -> None:
    for found in run_ranks(2, _pooled):
        same(found, random_shift(slice(None)).sums.values())


def test_buckets_of_margin_and_position_have_the_edges_that_are_documented() -> None:
    shape = MoeShape(num_layers=1, layers=(0,), top_k=1, num_experts=2)
    edges = torch.tensor([0.0, *MARGINS])
    ids = torch.zeros(len(edges), 1, 1, dtype=torch.int64)

    def differing(which: int) -> Tensor:
        return ids.index_fill(0, torch.tensor([which]), 1)

    for bucket in range(len(edges)):
        mine = RouteTable(shape, ids, margins=edges[:, None])
        found = expert_shift(mine, RouteTable(shape, differing(bucket)), torch.ones(len(edges)))
        assert found.sums.values()["route_any_diff_by_margin"].index(1.0) == bucket
    starts = torch.tensor([0, 1, 2, 3, 4, 7, 8, 2**18, 2**19, 2**30])
    ids = torch.zeros(len(starts), 1, 1, dtype=torch.int64)
    where = [0, 1, 2, 2, 3, 3, 4, 19, 19, 19]
    for row, bucket in enumerate(where):
        shift = expert_shift(
            RouteTable(shape, ids), RouteTable(shape, differing(row)), torch.ones(len(starts)), positions=starts
        )
        shares = shift.sums.values()["route_tokens_touched_by_position"]
        assert [share for share in shares if share > 0] == [shares[bucket]] == [1 / where.count(bucket)]


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a must be int16, int32 or int64, got torch.float32"):
        compare.compare_routes(CHOSEN.float(), SAMPLED)
    with pytest.raises(ValueError, match=r"b must be \[tokens, layers, k\], got shape \(4, 2\)"):
        compare.compare_routes(CHOSEN, SAMPLED[:, 0])
    with pytest.raises(ValueError, match="must have the same shape"):
        compare.compare_routes(CHOSEN, SAMPLED[:3])


def test_a_comparison_of_a_large_batch_stays_within_its_budget() -> None:
    """65,536 tokens, 48 layers, 8 of 128 experts: four times the input in memory; for the time see test_routes."""
    a = torch.randint(0, 128, (65_536, 48, 8), dtype=torch.int16)
    b = torch.where(torch.rand(65_536, 48, 1) < 0.1, a.flip(0), a)
    shape = MoeShape(48, tuple(range(48)), 8, 128)
    before = peak_memory(reset=True)
    expert_shift(RouteTable(shape, a), RouteTable(shape, b), torch.ones(65_536), log_ratio=torch.rand(65_536))
    assert peak_memory() - before <= 4 * (a.nbytes + b.nbytes)


def test_shift_and_mismatch_are_pooled_together_under_one_prefix() -> None:
    shift, one = random_shift(slice(None)).sums, torch.full((4,), 0.5)
    pair = pair_metrics(one, one * 1.1, one.bool(), sequences=False)
    expected = {f"old/{name}": value for part in (shift, pair) for name, value in part.values().items()}
    for first, second in ((shift, pair), (pair, shift)):
        same(MetricSums().merge(first.prefixed("old/")).merge(second.prefixed("old/")).values(), expected)
