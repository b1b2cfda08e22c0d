"""Every format of the same batch gives the same numbers; expected values come from what the hosts were given."""

from pathlib import Path

import numpy as np
import pytest
from host_batches import HOST_DUMPS, HOSTS, OURS, TRUTH, column, dump_at, whole

from megatron_rc.analyze.chunk import Chunk


@pytest.fixture(params=[*HOSTS, *OURS])
def chunk(request: pytest.FixtureRequest, tmp_path: Path) -> Chunk:
    return whole(dump_at(request.param, tmp_path))


def test_log_probs_lengths_and_mask_are_those_of_the_batch(chunk: Chunk):
    assert chunk.lengths.tolist() == [len(row["old"]) for row in TRUTH]
    loss = column("loss_mask")
    np.testing.assert_array_equal(chunk.log_pi[loss].astype(np.float32), column("old")[loss].astype(np.float32))
    np.testing.assert_array_equal(chunk.log_mu[loss].astype(np.float32), column("rollout")[loss].astype(np.float32))
    np.testing.assert_array_equal(chunk.tokens["loss_mask"], column("loss_mask"))
    np.testing.assert_array_equal(chunk.tokens["token_id"], column("token_ids"))
    assert not chunk.tokens["loss_mask"].all(), "a batch without tool tokens would not show a lost mask"


@pytest.mark.parametrize("name", ["prompt_length", "reward", "group", "train_rank", "entropy", "advantage"])
def test_a_column_that_a_host_writes_has_the_values_of_the_batch(chunk: Chunk, name: str):
    values = column(name)
    if name in chunk.tokens:
        values = values if values.size == chunk.log_pi.size else values[chunk.sequence_of]
        loss = column("loss_mask")
        np.testing.assert_allclose(chunk.tokens[name][loss], values[loss], rtol=1e-6)
    elif name in chunk.sequences:
        own = chunk.sequences[name]
        # miles names a rank by its global number, prime-rl a group by a text
        own = np.unique(own, return_inverse=True)[1] if name == "train_rank" else own
        own = [own.tolist().index(value) // 2 for value in own] if name == "group" else own
        np.testing.assert_allclose(own, values, rtol=1e-6)


UNLOCKED = {
    "nemo_rl": "advantage loss_mask prompt_length reward step token_id",
    "slime": "advantage cached_tokens entropy finish_reason group loss_mask pack_position prompt_length reward step "
             "syncs token_id train_rank version",
    "miles": "advantage cached_tokens entropy finish_reason group loss_mask prompt_length reward step syncs token_id "
             "train_rank version",
    "miles_tp": "advantage entropy finish_reason loss_mask prompt_length step token_id train_rank",
    "prime_rl": "advantage entropy loss_mask pack_position prompt_length step task token_id train_rank",
    "prime_rl_traces": "advantage entropy group loss_mask prompt_length reward step task token_id turn",
    "verl": "entropy loss_mask step token_id",
    "batch.parquet": "advantage entropy finish_reason group loss_mask prompt_length reward step token_id train_rank "
                     "version",
}  # fmt: skip


@pytest.mark.parametrize("name", UNLOCKED)
def test_each_host_unlocks_these_columns(name: str, tmp_path: Path):
    chunk = whole(dump_at(name, tmp_path))
    assert sorted([*chunk.tokens, *chunk.sequences]) == UNLOCKED[name].split()


@pytest.mark.parametrize("host", ["nemo_rl", "prime_rl_traces"])
def test_the_step_comes_from_the_name_of_the_file_or_from_the_batch_that_took_the_trace(host: str):
    assert set(whole(HOST_DUMPS / host).sequences["step"]) == {3}


def test_pack_positions_of_slime_follow_the_micro_batches():
    # each rank packs its first two samples together and the third alone
    assert whole(HOST_DUMPS / "slime").sequences["pack_position"].tolist() == [0, 0, 1, 1, 0, 0]
