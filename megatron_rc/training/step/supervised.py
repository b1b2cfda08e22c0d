"""The supervised warm-up: cross-entropy on demonstrations through the same batches, cuts and schedules."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.loss.scale import loss_scale
from megatron_rc.settings.train import TrainSettings
from megatron_rc.tasks import Demonstration
from megatron_rc.training.heads import Answer
from megatron_rc.training.microbatches import MicroExtras, share_of, split_rows
from megatron_rc.training.policy import Policy


def demonstration_batch(demonstrations: Sequence[Demonstration]) -> TokenBatch:
    """Demonstrations as a TokenBatch; they have no sampler, so their rollout log-probs are 0 and unused."""
    samples = [
        Sample(prompt, response, [0.0] * len(response), "stop", output_mask=mask)
        for prompt, response, mask in demonstrations
    ]
    return TokenBatch.from_samples(samples, SamplingParams())


def supervised_step(policy: Policy, batch: TokenBatch, train: TrainSettings) -> dict[str, float]:
    """One optimizer step on the mean cross-entropy over response tokens; returns the metrics."""
    groups = policy.groups
    share = share_of(batch, [range(batch.num_sequences)], train, groups)
    local, (micro_batches,) = share.batch, share.micro_batches
    scale = loss_scale(local.loss_mask, local.loss_mask, cu_seqlens=local.cu_seqlens, dp_group=groups.data)

    def loss(answer: Answer) -> tuple[Tensor, Any]:
        logprobs, _ = answer.logprobs()
        assert answer.micro.extras.scale is not None
        value = -(logprobs * answer.micro.extras.scale).sum()
        return value, value.detach()

    parts = split_rows(local, micro_batches, MicroExtras(scale=scale), share.loss_rows_of(micro_batches))
    result = policy.update(parts, loss)
    total = torch.stack([*result.outputs, torch.zeros((), device=policy.device)]).sum()
    dist.all_reduce(total, group=groups.data)
    return {"cross_entropy": float(groups.from_last_stage(total)), "grad_norm": result.grad_norm, "lr": result.lr}
