"""The tokens that a hook of slime or miles sees on its process: their correction, and their metrics."""

import math
from argparse import Namespace
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.correct import Corrected, correct
from megatron_rc.correction.inputs import Extras
from megatron_rc.correction.per_token import per_token
from megatron_rc.correction.plan import Plan
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations.log_names import prefixed
from megatron_rc.integrations.parallel import parallel
from megatron_rc.integrations.slime.layout import Layout
from megatron_rc.integrations.slime.routes import WATCH
from megatron_rc.integrations.slime.settings import ROUTE_SHIFT, compares_in_update
from megatron_rc.integrations.slime.signals import LR_METRICS


class HostTokens:
    """The response tokens of this rank in a micro-batch or a rollout of the host: [N], samples one after another.

    Args:
        batch: the host's, whose lists have an entry per sample: total_lengths, response_lengths, loss_masks
            [response_length], and rollout_log_probs and others [tokens on this rank], fp32.
    """

    def __init__(self, args: Namespace, batch: Mapping[str, Any]) -> None:
        self.args, self.batch, self.ranks = args, batch, parallel()
        totals, padded = batch["total_lengths"], batch.get("max_seq_lens")
        if padded is None or getattr(args, "qkv_format", "thd") != "bshd":
            padded = totals
        lengths = zip(totals, batch["response_lengths"], padded, strict=True)
        self.layout = Layout.of(lengths, self.ranks.cp_rank, self.ranks.cp_size)

    @cached_property
    def loss_mask(self) -> Tensor:
        """[N] bool."""
        return self.layout.local(self.batch["loss_masks"]).bool()

    @cached_property
    def rollout_logprobs(self) -> Tensor:
        """[N] fp32, nats."""
        remedy = "must set Sample.rollout_log_probs (the default one does)"
        return self.joined("rollout_log_probs", f"the function of --custom-generate-function-path {remedy}")

    def joined(self, name: str, remedy: str) -> Tensor:
        """[N] from the batch's list of that name; ValueError where it is missing or not what this rank holds."""
        values = self.batch.get(name)
        if values is None or any(value is None for value in values):
            raise ValueError(f"{name} must be in every sample of the batch: {remedy}")
        for sample, (value, count) in enumerate(zip(values, self.layout.counts, strict=True)):
            if tuple(value.shape) != (count,):
                raise ValueError(f"{name} of sample {sample} must be [{count}] on this rank, got {tuple(value.shape)}")
        return torch.cat([*values])

    def corrected(
        self, train: Tensor, correction: RolloutCorrection, advantages: Tensor | None, route_shift: Tensor | None
    ) -> Corrected:
        """`correct` on the host's layout, for log pi ``train``; all tensors are [N]."""
        layout, ranks, loss_masks = self.layout, self.ranks, self.batch["loss_masks"]
        # all context-parallel ranks run the same micro-batches, as the host's own gathers in the loss need
        cut, plan = ranks.cp_size > 1, Plan.of(correction)
        positions = layout.positions(loss_masks) if cut and plan.sums_prefixes else None
        segment_ids, num_segments = layout.segments(loss_masks) if cut and "segment" in plan.units else (None, None)
        return correct(
            train,
            self.rollout_logprobs,
            self.loss_mask,
            correction=correction,
            cu_seqlens=torch.tensor([0, *layout.counts], device=train.device).cumsum(0).to(torch.int32),
            segment_ids=segment_ids,
            num_segments=num_segments,
            advantages=advantages,
            extras=Extras({} if route_shift is None else {ROUTE_SHIFT: route_shift}, positions),
            dp_group=ranks.dp_group,
            cp_group=ranks.cp_group if cut else None,
        )

    def corrected_next(
        self, train: Tensor, correction: RolloutCorrection, advantages: Tensor | None = None
    ) -> tuple[Corrected, dict[str, Tensor]]:
        """The correction of the next micro-batch of the update, and its metrics: name -> [N] fp32, detached.

        Those of `per_token`; with `routes` also route_shift, and route_tokens_touched, 1 where it is not 0. Both hosts
        log more by their own weights, in slime's vanilla_tis_function: tis = rho = e^l, tis_abs = |rho - 1|, and with a
        weight of level token tis_clipfrac, 1 where it is bounded. Metrics of the rule of the learning rate are
        constants, which the host's mean keeps where every sample has a loss token.
        """
        shift = WATCH.next_shift(self.layout) if compares_in_update(self.args) else None
        corrected = self.corrected(train, correction, advantages, shift)
        metrics = per_token(train, self.rollout_logprobs, self.loss_mask, corrected, correction)
        rho, weight = metrics["k1"].neg().double().exp(), correction.weight
        if shift is not None:
            metrics |= {"route_shift": shift, "route_tokens_touched": shift > 0}
        metrics = prefixed(metrics) | {"tis": rho, "tis_abs": (rho - 1).abs()}
        if weight is not None and weight.level == "token":
            upper = weight.upper if isinstance(weight.upper, float | int) else math.inf
            metrics["tis_clipfrac"] = (rho < (weight.lower or 0)) | (rho > upper)
        found = {name: torch.where(self.loss_mask, value.float(), 0) for name, value in metrics.items()}
        return corrected, found | {name: torch.full_like(train, value) for name, value in LR_METRICS.items()}
