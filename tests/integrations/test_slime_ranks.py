"""slime's and miles's losses on real ranks: tensor parallel, context parallel by zigzag slices, packed and padded."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from distributed import run_ranks
from hosts.slime import sources
from hosts.slime.cases import CASES, KNOWN, LOG, whole
from hosts.slime.excerpt import first_steps
from hosts.slime.runs import BATCH_MEAN, PADDED, UNITS, golden, whole_gradient, work

LABELS = [f"{layout}{padded}" for layout in ("tp2", "cp2", "dp2") for padded in ("", " padded")]
HOSTS = {"slime": "", "miles": " padded"}
"""Host -> the layout of its micro-batches here: packed, or padded."""
of_each_host = pytest.mark.parametrize("padded", HOSTS.values(), ids=HOSTS)
Results = list[dict[tuple[str, str, str], dict[str, Any]]]


@pytest.fixture(scope="module")
def results() -> Results:
    with pytest.MonkeyPatch.context() as patch:
        # or the hosts compile what they compute on a handful of tokens
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        return run_ranks(2, work)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.host("slime", proof="recorded", feature="loss and gradient of a correction")
@pytest.mark.host("miles", proof="stand-in", feature="two policies (`old: rollout`)")
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_slime_on_one_rank(results: Results, label: str, name: str) -> None:
    expected = golden()[name]
    runs = [rank["ours", label, name] for rank in results]
    losses = [run["loss"] for run in runs]
    close(sum(losses) if label.startswith("cp2") else losses[0], expected["loss"])
    gradient = whole_gradient(label, CASES[name], [run["gradient"] for run in runs])
    if label.endswith("padded"):
        totals = [8, 2, 11, 10]
        assert all(not gradient[i, total:].any() for i, total in enumerate(totals))
        packed = [gradient[i, :total] for i, total in enumerate(totals)]
        gradient = torch.cat([*packed, torch.zeros(3, gradient.shape[-1])])[None]
    close(gradient, expected["gradient"])
    for key in LOG + KNOWN:
        if key in KNOWN and key not in expected["log"]:
            continue
        parts = [run["log"][key] for run in runs if key in run["log"]]
        assert bool(parts) == (key in expected["log"])
        if parts:
            close(sum(parts) if label.startswith("cp2") else parts[0], expected["log"][key])


@pytest.mark.host("slime", "miles", proof="stand-in", feature="tensor-parallel ranks")
@of_each_host
def test_tensor_parallel_ranks_hold_the_same_bits(results: Results, padded: str) -> None:
    for name in CASES:
        first, second = (rank["ours", f"tp2{padded}", name] for rank in results)
        assert first["loss"] == second["loss"] and first["log"] == second["log"]


def whose(results: Results, host: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(case, ours, the host's own) of every rank and layout."""
    sources.tree(host)
    for rank in results:
        for (found, label, name), theirs in rank.items():
            if found == host:
                yield name, rank["ours", label, name], theirs


@pytest.mark.host("slime", "miles", proof="own code", feature="loss and gradient of a correction")
@pytest.mark.parametrize("host", sources.VARIABLES)
def test_every_rank_has_the_loss_of_the_hosts_own_source(results: Results, host: str) -> None:
    pairs = list(whose(results, host))
    assert len(pairs) == 2 * len(CASES) * (6 if host == "miles" else 3)
    for name, mine, theirs in pairs:
        close(mine["loss"], theirs["loss"])
        shared = sorted(mine["log"].keys() & theirs["log"].keys())
        assert {"loss", "pg_loss", "ppo_kl", "train_rollout_logprob_abs_diff"} <= {*shared}
        assert not name.startswith("token ") or {*KNOWN} <= {*shared}
        if (host, name) == ("miles", "two policies"):
            # there miles compares the rollout log-probs with themselves, slime and we with the current ones
            shared.remove("train_rollout_logprob_abs_diff")
        close([mine["log"][k] for k in shared], [theirs["log"][k] for k in shared])


def test_every_rank_has_the_gradient_of_slimes_own_source(results: Results) -> None:
    for _, mine, theirs in whose(results, "slime"):
        close(mine["gradient"], theirs["gradient"])


def test_miles_rounds_to_bf16_the_gradient_that_we_keep_in_fp32(results: Results) -> None:
    for name, mine, theirs in whose(results, "miles"):
        assert (mine["gradient"] - theirs["gradient"]).abs().max() <= 2**-8 * theirs["gradient"].abs().max()
        if name == "plain":
            assert torch.equal(theirs["gradient"], theirs["gradient"].bfloat16().float())


@pytest.mark.host("slime", "miles", proof="stand-in", feature="turns as units (`level: segment`)")
@of_each_host
@pytest.mark.parametrize("unit", UNITS)
def test_units_that_context_parallelism_cuts_have_one_weight(results: Results, unit: str, padded: str) -> None:
    weights = whole().corrected(UNITS[unit]).weights
    assert len(set(weights.tolist())) > 3
    for rank, found in enumerate(results):
        close(found["hooks", f"tp2{padded}", ""][unit], weights)
        close(found["hooks", f"cp2{padded}", ""][unit], whole().on_rank(weights, rank, 2, PADDED if padded else None))


@pytest.mark.host("slime", proof="stand-in", feature="data-parallel ranks")
def test_rollout_data_normalises_and_pools_over_data_and_context_parallel_ranks(results: Results) -> None:
    corrected = whole().corrected(BATCH_MEAN)
    weighted, pooled = corrected.weights * torch.cat(whole().values["advantages"]), corrected.metrics.values()
    first = sum(whole().responses[:2])
    for rank, found in enumerate(results):
        close(found["hooks", "tp2", ""]["advantages"], weighted)
        close(found["hooks", "cp2", ""]["advantages"], whole().on_rank(weighted, rank, 2))
        close(found["hooks", "dp2", ""]["advantages"], weighted[:first] if rank == 0 else weighted[first:])
        for layout in ("tp2", "cp2", "dp2"):
            metrics = found["hooks", layout, ""]["metrics"]
            assert metrics.keys() == {f"rc/{name}" for name, value in pooled.items() if value == value}
            for name, value in metrics.items():
                assert value == pytest.approx(pooled[name.removeprefix("rc/")], rel=1e-5, abs=1e-9)


def test_the_mean_length_is_that_of_the_samples_of_all_ranks(results: Results) -> None:
    for found in results:
        for layout in ("tp2", "cp2"):
            one = found["hooks", layout, ""]
            length, truncated, *mismatch, _ = one["length"]
            assert (length, truncated) == (4, None)
            assert mismatch == pytest.approx([one["metrics"][f"rc/{name}"] for name in ("ess_token_final", "k3")])
        assert found["hooks", "dp2", ""]["length"] == (30, pytest.approx(2 / 3), None, None, None)


@pytest.mark.host("miles", proof="stand-in", feature="data-parallel ranks")
def test_the_mean_length_of_micro_batches_is_that_of_all_ranks_on_miles(results: Results) -> None:
    for found in results:
        lengths = [found["hooks", f"{layout} padded", ""]["length"].length for layout in ("tp2", "cp2", "dp2")]
        assert lengths == [4, 4, 30]


@pytest.mark.parametrize("host", sources.VARIABLES)
def test_the_hosts_own_loss_calls_the_hook_that_enable_has_set_and_logs_what_it_says(host: str) -> None:
    sources.tree(host)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        (logs,) = run_ranks(1, first_steps, host)
    assert {"rc/k3", "tis", "ois", "pg_loss"} <= logs[0].keys()
    assert [log["lr_rule/scale"] for log in logs] == pytest.approx([1, 0.5, 0.5])
