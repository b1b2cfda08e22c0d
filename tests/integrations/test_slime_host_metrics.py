"""The names that slime's own functions log: the numbers of tis and loss are those of the host, in every layout."""

import os
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import run_ranks
from hosts.slime.cases import Case, batch_of, ours, whole
from hosts.slime.mismatch import SETTINGS, TREES, of_the_host, recorded
from hosts.slime.single import alone
from torch import Tensor

from megatron_rc.integrations import slime

SEQUENCE_LEVEL = {"mis_chi2_seq", "mis_ppl_ratio", "mis_training_ppl", "mis_is_ratio_max_final"}


def named(key: str, cp_rank: int = 0, cp_size: int = 1, **given: list[Tensor]) -> dict[str, Tensor]:
    """What `tis` adds below mis_ on one context-parallel rank."""
    batch = batch_of(Case(), cp_rank, cp_size) | given
    use_tis = SETTINGS[key].example.get("use_tis", True)
    keys = ("loss_masks", "total_lengths", "response_lengths", "rollout_log_probs")
    losses = torch.ones(sum(map(len, batch["log_probs"])))
    args = ours(Case(SETTINGS[key].correction), use_tis=use_tis, get_mismatch_metrics=not use_tis)
    *_, metrics = slime.tis(
        args, pg_loss=losses, train_log_probs=batch["log_probs"], **{name: batch[name] for name in keys}
    )
    return {name: values for name, values in metrics.items() if name.startswith("mis_")}


def equal_on_loss_tokens(found: dict[str, Tensor], expected: dict[str, Tensor], rank: int = 0, ranks: int = 1) -> None:
    here = partial(whole().on_rank, cp_rank=rank, cp_size=ranks)
    mask = here(torch.cat(whole().loss_masks)).bool()
    assert found.keys() == expected.keys()
    for name, values in found.items():
        torch.testing.assert_close(values[mask], here(expected[name])[mask], rtol=2e-5, atol=2e-6, msg=name)
        assert not values[~mask].any()


@pytest.mark.parametrize("key", SETTINGS)
def test_every_number_is_that_of_slimes_example(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    equal_on_loss_tokens(named(key), recorded()[key])


@pytest.mark.parametrize("host", TREES)
@pytest.mark.parametrize("key", SETTINGS)
def test_every_number_is_that_of_the_hosts_own_example(key: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.environ.get(TREES[host][0]):
        pytest.skip(f"{TREES[host][0]} names no source tree of {host}")
    alone(monkeypatch)
    equal_on_loss_tokens(named(key), of_the_host(host, key))


def _work(rank: int) -> dict[str, tuple[dict[str, Tensor], int]]:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    found = {}
    for key in SETTINGS:
        with mock.patch.object(torch.distributed, "all_reduce", wraps=torch.distributed.all_reduce) as all_reduce:
            numbers = named(key, rank, 2)
        found[key] = numbers, all_reduce.call_count
    return found


def test_a_sequence_that_context_parallelism_cuts_has_the_same_numbers() -> None:
    for rank, results in enumerate(run_ranks(2, _work)):
        for key, (found, all_reduces) in results.items():
            assert 1 <= all_reduces <= 3
            assert found.keys() >= SEQUENCE_LEVEL - ({"mis_is_ratio_max_final"} if key == "metrics alone" else set())
            equal_on_loss_tokens(found, recorded()[key], rank, 2)


def test_a_corrupt_or_impossible_token_leaves_every_name_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    batch: dict[str, Any] = batch_of(Case())
    train, sampled = ([each.clone() for each in batch[name]] for name in ("log_probs", "rollout_log_probs"))
    sampled[0][0], train[3][0] = torch.nan, -torch.inf
    for key in SETTINGS:
        found = named(key, log_probs=train, rollout_log_probs=sampled)
        assert all(values.isfinite().all() for values in found.values())
        assert found["mis_kl"][0] == 0 and found["mis_kl"][8] == 20


def test_the_current_policy_over_the_old_one_is_ois(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    batch, samples = batch_of(Case()), whole()
    shifted = {"log_probs": [each - 0.25 for each in batch["log_probs"]]}
    reduce = samples.sum_of_sample_mean()
    logs = [slime.loss(ours(Case()), {**batch, **given}, batch["logits"], reduce)[1] for given in ({}, shifted)]
    assert logs[1]["ois"] / logs[0]["ois"] == pytest.approx(torch.tensor(0.25).exp().item(), rel=1e-5)
