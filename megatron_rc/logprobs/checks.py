"""Checks of what becomes log-probs: logits, the rows of logits or hidden states, and values on the device."""

import torch
from torch import Tensor

from megatron_rc.batch import Support
from megatron_rc.collectives import Group
from megatron_rc.correction.inputs import check_same_on_ranks, check_shape, check_type
from megatron_rc.logprobs.reference.rows import Rows


def check_logits(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    support: Support | None,
    *,
    inplace_backward: bool = False,
) -> None:
    """The checks that do not wait for the device."""
    check_type(Tensor, logits=logits)
    if logits.dim() not in (2, 3) or not logits.is_floating_point() or logits.shape[-1] == 0:
        raise ValueError(
            f"logits must be floating point [N, V_local] or [B, T, V_local], got {logits.dtype} {tuple(logits.shape)}"
        )
    check_rows("logits", logits.shape[:-1], logits.device, targets, temperature, mask, support)
    expanded = (size > 1 and stride == 0 for size, stride in zip(logits.shape, logits.stride(), strict=True))
    if inplace_backward and any(expanded):
        raise ValueError("inplace_backward must be False for logits that overlap in memory (an expanded tensor)")
    if inplace_backward and logits.is_leaf and logits.requires_grad:
        raise ValueError("inplace_backward must be False for a leaf with requires_grad: its gradient would replace it")


def check_rows(
    of: str,
    rows: torch.Size,
    device: torch.device,
    targets: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    support: Support | None,
) -> None:
    """Refuse arguments that do not fit the rows of ``of``, logits or hidden states."""
    for name, value in (("targets", targets), ("mask", mask), ("temperature", temperature)):
        if value is not None and not isinstance(value, float | int):
            check_shape(name, value, rows, f"the rows of {of}")
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature!r}")
    ids, offsets = (None, None) if support is None else support
    if offsets is not None and offsets.shape != (rows.numel() + 1,):
        raise ValueError(
            f"support.offsets must have {rows.numel() + 1} entries for {rows.numel()} rows, got {tuple(offsets.shape)}"
        )
    integers = {"targets": targets, "support.ids": ids, "support.offsets": offsets}
    for name, value in integers.items():
        if value is not None and value.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} must be int64 or int32, got {value.dtype}")
    for name, value in {**integers, "mask": mask, "temperature": temperature}.items():
        if isinstance(value, Tensor) and value.device != device:
            raise ValueError(f"{name} must be on {device}, where {of} are, got {value.device}")


def check_values(rows: Rows, vocab_size: int, tp_group: Group) -> None:
    """The checks that read values from the device."""
    targets = rows.targets
    check_same_on_ranks("the number of rows of logits must be equal", targets.numel(), tp_group, "tp_group")
    kept = torch.ones_like(targets, dtype=torch.bool) if rows.mask is None else rows.mask != 0
    outside = targets[kept & ((targets < 0) | (targets >= vocab_size))]
    if outside.numel():
        raise ValueError(f"targets must lie in [0, {vocab_size}) where mask is not 0, got {outside[0].item()}")
    if isinstance(rows.temperature, Tensor):
        wrong = rows.temperature[kept & ~(rows.temperature > 0)]
        if wrong.numel():
            raise ValueError(f"temperature must be > 0 where mask is not 0, got {wrong[0].item()}")
    if rows.ids is not None and rows.offsets is not None:
        outside = rows.ids[(rows.ids < 0) | (rows.ids >= vocab_size)]
        if outside.numel():
            raise ValueError(f"support.ids must lie in [0, {vocab_size}), got {outside[0].item()}")
        ends = rows.offsets[0].item(), rows.offsets[-1].item()
        if ends != (0, rows.ids.numel()) or (rows.offsets.diff() < 0).any():
            raise ValueError(
                f"support.offsets must ascend from 0 to {rows.ids.numel()}, the length of support.ids, "
                f"got a list from {ends[0]} to {ends[1]}"
            )
