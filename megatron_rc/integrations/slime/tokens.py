"""The tokens that a hook of slime or miles sees on its process, and their correction."""

from argparse import Namespace
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from megatron_rc.correction.correct import Corrected, correct
from megatron_rc.correction.inputs import Extras
from megatron_rc.correction.plan import Plan
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations.parallel import parallel
from megatron_rc.integrations.slime.layout import Layout
from megatron_rc.integrations.slime.settings import ROUTE_SHIFT


class HostTokens:
    """The response tokens of this rank in a micro-batch or a rollout of the host: [N], samples one after another.

    Args:
        batch: the host's, whose lists have an entry per sample: total_lengths, response_lengths, loss_masks
            [response_length], and rollout_log_probs and others [tokens on this rank], fp32.
    """

    def __init__(self, args: Namespace, batch: Mapping[str, Any]) -> None:
        self.batch, self.ranks = batch, parallel()
        padded = batch.get("max_seq_lens") if getattr(args, "qkv_format", "thd") == "bshd" else None
        place = self.ranks.cp_rank, self.ranks.cp_size
        self.layout = Layout.of(batch["total_lengths"], batch["response_lengths"], padded, *place)

    @cached_property
    def loss_mask(self) -> Tensor:
        """[N] bool."""
        return self.layout.local(self.batch["loss_masks"]).bool()

    @cached_property
    def rollout_logprobs(self) -> Tensor:
        """[N] fp32, nats."""
        default = (
            "the function of --custom-generate-function-path must set Sample.rollout_log_probs (the default one does)"
        )
        return self.joined("rollout_log_probs", default)

    def joined(self, name: str, remedy: str) -> Tensor:
        """[N] of a list of the batch; raises as `Layout.joined`."""
        return self.layout.joined(name, self.batch.get(name), remedy)

    def corrected(
        self,
        train_logprobs: Tensor,
        correction: RolloutCorrection,
        advantages: Tensor | None,
        route_shift: Tensor | None = None,
    ) -> Corrected:
        """`correct` on the host's layout; all other tensors are [N]."""
        layout, ranks, loss_masks = self.layout, self.ranks, self.batch["loss_masks"]
        # all context-parallel ranks run the same micro-batches, as the host's own gathers in the loss need
        cut, plan = ranks.cp_size > 1, Plan.of(correction)
        positions = layout.positions(loss_masks) if cut and plan.sums_prefixes else None
        segment_ids, num_segments = layout.segments(loss_masks) if cut and "segment" in plan.units else (None, None)
        return correct(
            train_logprobs,
            self.rollout_logprobs,
            self.loss_mask,
            correction=correction,
            cu_seqlens=layout.cu_seqlens(train_logprobs.device),
            segment_ids=segment_ids,
            num_segments=num_segments,
            advantages=advantages,
            extras=Extras({} if route_shift is None else {ROUTE_SHIFT: route_shift}, positions),
            dp_group=ranks.dp_group,
            cp_group=ranks.cp_group if cut else None,
        )
