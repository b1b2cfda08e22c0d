"""Where slime's response tokens lie: against an enumeration of the positions that every rank holds."""

import random
from types import SimpleNamespace

import pytest
import torch
from hosts.slime.host import local_masks, micro_batch, positions, rollout
from megatron.core import parallel_state

from megatron_rc.integrations.slime.layout import Layout, parallel

SIZES = [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0), (4, 3)]


def shapes(seed: int) -> list[tuple[int, int]]:
    chance = random.Random(seed)
    return [(chance.randint(1, 9), chance.randint(0, 9)) for _ in range(6)]


@pytest.mark.parametrize(("size", "rank"), SIZES)
@pytest.mark.parametrize("padded", [None, 20])
def test_every_token_is_found_where_the_rank_holds_it(size: int, rank: int, padded: int | None) -> None:
    for seed in range(20):
        whole = rollout(seed, shapes(seed))
        batch = micro_batch(whole, rank, size, padded)
        layout = Layout.of(whole.totals, whole.responses, batch["max_seq_lens"], rank, size)
        assert sum(layout.counts) == sum(map(len, batch["log_probs"]))
        assert layout.rows == sum(len(positions(padded or total, rank, size)) for total in whole.totals)
        assert torch.equal(layout.joined("log_probs", batch["log_probs"], ""), torch.cat(batch["log_probs"]))
        assert torch.equal(layout.local(whole.values["log_probs"]), torch.cat(batch["log_probs"]))
        assert torch.equal(layout.local(whole.loss_masks), torch.cat(local_masks(whole, rank, size, padded)))
        assert layout.cu_seqlens(torch.device("cpu")).diff().tolist() == [len(part) for part in batch["log_probs"]]
        # the row of a token is that of the logits which predict it, and its target is the token itself
        logits = batch["logits"].reshape(-1, batch["logits"].shape[-1])
        rows, targets = layout.logits_rows(torch.device("cpu")), layout.targets(whole.tokens)
        found = logits[rows].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        expected = [
            logits.log_softmax(-1)[prompt - 1 : -1].gather(1, ids[prompt:, None])[:, 0]
            for logits, ids, prompt in zip(whole.logits, whole.tokens, whole.prompts, strict=True)
        ]
        assert torch.equal(found, whole.on_rank(torch.cat(expected), rank, size, padded))


def test_a_turn_that_two_slices_share_has_one_number() -> None:
    # responses of 8 tokens with a hole: two turns per sample, cut by zigzag slices of 3 and 1, 2, 2 tokens
    masks = [torch.tensor([1, 1, 1, 1, 0, 1, 1, 1])] * 2
    ranks = [Layout.of([9, 9], [8, 8], None, rank, 2) for rank in range(2)]
    whole = [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3]
    for layout, (ids, bound) in zip(ranks, [layout.segments(masks) for layout in ranks], strict=True):
        assert ids.tolist() == [whole[8 * s.sample + t] for s in layout.spans for t in range(s.first, s.stop)]
        assert bound >= 4


def test_positions_are_those_of_whole_responses() -> None:
    masks = [torch.tensor([1, 1, 1, 1, 0, 1, 1, 1])] * 2
    for layout in (Layout.of([9, 9], [8, 8], None, rank, 2) for rank in range(2)):
        tokens = [t for s in layout.spans for t in range(s.first, s.stop) if t != 4]
        assert layout.positions(masks)[layout.local(masks).bool()].tolist() == [t - (t > 4) for t in tokens]


def test_a_list_of_the_wrong_length_is_named_with_its_sample() -> None:
    layout = Layout.of([4, 7], [2, 3], None, 0, 1)
    with pytest.raises(ValueError, match=r"^log_probs of sample 1 must be \[3\] on this rank, got \(2,\)$"):
        layout.joined("log_probs", [torch.zeros(2), torch.zeros(2)], "")
    with pytest.raises(ValueError, match="log_probs must be in every sample of the batch: set --this"):
        layout.joined("log_probs", None, "set --this")
    with pytest.raises(ValueError, match="log_probs must be in every sample"):
        layout.joined("log_probs", [torch.zeros(2), None], "set --this")  # type: ignore[list-item]


def test_slimes_wrapper_of_a_process_group_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("tensor_model_parallel", "context_parallel", "data_parallel", "pipeline_model_parallel")
    groups = {name: object() for name in names}
    for name, group in groups.items():
        wrapped = SimpleNamespace(group=group) if name != "context_parallel" else group
        monkeypatch.setattr(parallel_state, f"get_{name}_group", lambda found=wrapped, **kwargs: found)
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "is_pipeline_last_stage", lambda ignore_virtual: ignore_virtual)
    found = parallel()
    assert found.tp_group is groups["tensor_model_parallel"] and found.cp_group is groups["context_parallel"]
    assert found.dp_group is found.dp_cp_group is groups["data_parallel"]
    assert (found.cp_rank, found.cp_size, found.last_stage) == (1, 2, True)
