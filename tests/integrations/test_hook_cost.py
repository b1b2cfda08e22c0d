"""Measuring without a correction leaves slime's loss bit-identical."""

from __future__ import annotations

import pytest
import torch
from hosts.slime.host import MILES, arguments, micro_batch, rollout, sum_of_sample_mean
from hosts.slime.single import alone

from megatron_rc.integrations import slime


@pytest.mark.host("slime", "miles", proof="stand-in", feature="correction none leaves the loss bit-identical")
@pytest.mark.parametrize("host", ["slime", "miles"])
def test_correction_none_returns_the_very_bits_of_slimes_loss(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    whole, padded = rollout(5), 13 if host == "miles" else None
    batch = micro_batch(whole, padded=padded)
    names = ["loss_masks", "total_lengths", "response_lengths", "rollout_log_probs"] + ["max_seq_lens"] * bool(padded)
    given = {"train_log_probs": batch["log_probs"], **{name: batch[name] for name in names}}
    pg_loss = torch.randn(sum(whole.responses), generator=torch.Generator().manual_seed(0)).requires_grad_()
    layout = {**MILES, "qkv_format": "bshd"} if padded else {}
    args = arguments(use_tis=True, megatron_rc={"correction": "none"}, **layout)
    hooked, masks, _ = slime.tis(args, pg_loss=pg_loss, **given)
    reduce, total = sum_of_sample_mean(whole, padded=padded), sum(whole.responses)
    assert masks is batch["loss_masks"] and len(hooked) == total
    own, ours = reduce(pg_loss), reduce(hooked)
    assert torch.equal(own, ours)
    assert torch.equal(torch.autograd.grad(own, pg_loss)[0], torch.autograd.grad(ours, pg_loss)[0])
