"""What the last stage of the model answers, as log-probs: logits, or hidden states and the weight of the head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_rc.batch import Support, TokenBatch
from megatron_rc.gradient import check_wide_products
from megatron_rc.head_inputs import of_chunks
from megatron_rc.linear_head import linear_distribution, linear_logprobs, linear_policy_loss
from megatron_rc.logprobs import Distribution, vocab_parallel_distribution, vocab_parallel_logprobs
from megatron_rc.loss import PolicyLoss
from megatron_rc.schema.head_options import HeadOptions
from megatron_rc.training.model.hidden_states import OutputHead, hidden_states
from megatron_rc.training.step.loss_terms import LossTerms
from megatron_rc.training.step.microbatches import MicroBatch


class Head(Protocol):
    """Reads the answer of the model to one micro-batch of n tokens, whose loss_mask is the mask."""

    @contextmanager
    def answering(self, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Within the block the model answers what this head reads."""

    def logprobs(self, answer: Tensor, micro: MicroBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """([n], [n]) fp32, nats, with gradient; no entropy unless asked for."""

    def policy_loss(
        self, answer: Tensor, micro: MicroBatch, terms: LossTerms, upstream: Tensor
    ) -> tuple[PolicyLoss, Tensor]:
        """The loss, whose gradient in backward will be ``upstream``, 0-d; and log-probs [n] without gradient."""

    def distribution(
        self, answer: Tensor, micro: MicroBatch, *, with_kept_mass: bool, with_varentropy: bool
    ) -> Distribution:
        """[n] fp32 each, without gradient."""


@dataclass(frozen=True)
class Answer:
    """The answer of the model to one micro-batch of an update, which a loss function reads once, in one of two ways."""

    head: Head
    micro: MicroBatch
    values: Tensor
    """Logits or hidden states."""
    upstream: Tensor
    """0-d: the gradient that backward will bring by the loss."""

    def logprobs(self, *, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """`Head.logprobs`, for any loss."""
        return self.head.logprobs(self.values, self.micro, with_entropy=with_entropy)

    def policy_loss(self, terms: LossTerms) -> tuple[PolicyLoss, Tensor]:
        """`Head.policy_loss`, for a correction that does not depend on these log-probs."""
        return self.head.policy_loss(self.values, self.micro, terms, self.upstream)


class LogitsHead:
    """Reads logits [1, n, V_local], behind which rows of padding may follow."""

    def __init__(self, tensor: dist.ProcessGroup, vocab_size: int, backend: str) -> None:
        self._tensor, self._vocab_size, self._backend = tensor, vocab_size, backend

    @contextmanager
    def answering(self, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
        yield

    def logprobs(self, answer: Tensor, micro: MicroBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        # the output layer does not need its logits for backward
        result = vocab_parallel_logprobs(
            **self._arguments(answer, micro.batch), with_entropy=with_entropy, inplace_backward=True
        )
        return _without_padding(result, micro.batch)

    def policy_loss(
        self, answer: Tensor, micro: MicroBatch, terms: LossTerms, upstream: Tensor
    ) -> tuple[PolicyLoss, Tensor]:
        current, entropy = self.logprobs(answer, micro, with_entropy=terms.with_entropy)
        return terms.loss_of(current, entropy, self._backend), current.detach()

    def distribution(
        self, answer: Tensor, micro: MicroBatch, *, with_kept_mass: bool, with_varentropy: bool
    ) -> Distribution:
        options: dict[str, Any] = {"with_kept_mass": with_kept_mass, "with_varentropy": with_varentropy}
        described = vocab_parallel_distribution(**self._arguments(answer, micro.batch), **options)
        return _own_part(described, micro.batch)

    def _arguments(self, answer: Tensor, batch: TokenBatch) -> dict[str, Any]:
        logits = answer.squeeze(0)
        return {
            "logits": logits,
            "tp_group": self._tensor,
            "temperature": batch.sampling.temperature,
            "vocab_size": self._vocab_size,
            "backend": self._backend,
            **_padded(batch, len(logits)),
        }


class LinearHead:
    """Reads hidden states [1, n, H], or this rank's part of them and of the rows of padding behind them."""

    def __init__(self, tensor: dist.ProcessGroup, vocab_size: int, backend: str, options: HeadOptions) -> None:
        self._tensor, self._vocab_size, self._backend = tensor, vocab_size, backend
        self._of_chunks = of_chunks(options)
        self._of_model: OutputHead | None = None

    @contextmanager
    def answering(self, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            *_, self._of_model = [stack.enter_context(hidden_states(chunk)) for chunk in chunks]
            if self._of_model is not None:
                check_wide_products(self._of_model.weight.dtype, self._of_model.weight.device)
            yield

    def logprobs(self, answer: Tensor, micro: MicroBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        result = linear_logprobs(**self._arguments(answer, micro), with_entropy=with_entropy)
        return _without_padding(result, micro.batch)

    def policy_loss(
        self, answer: Tensor, micro: MicroBatch, terms: LossTerms, upstream: Tensor
    ) -> tuple[PolicyLoss, Tensor]:
        arguments = self._arguments(answer, micro)
        of_loss = terms.padded(len(arguments["targets"])).arguments()
        result = linear_policy_loss(**arguments, **of_loss, with_entropy=terms.with_entropy, upstream=upstream)
        return PolicyLoss(result.loss, result.metrics), result.logprobs[: micro.batch.num_tokens]

    def distribution(
        self, answer: Tensor, micro: MicroBatch, *, with_kept_mass: bool, with_varentropy: bool
    ) -> Distribution:
        options: dict[str, Any] = {"with_kept_mass": with_kept_mass, "with_varentropy": with_varentropy}
        described = linear_distribution(**self._arguments(answer, micro), **options)
        return _own_part(described, micro.batch)

    def _arguments(self, answer: Tensor, micro: MicroBatch) -> dict[str, Any]:
        assert self._of_model is not None
        batch, head, hidden = micro.batch, self._of_model, answer.squeeze(0)
        ranks = dist.get_world_size(self._tensor) if head.sequence_parallel else 1
        return {
            "hidden": hidden,
            "weight": head.weight,
            "tp_group": self._tensor,
            "sequence_parallel": head.sequence_parallel,
            "temperature": batch.sampling.temperature,
            "vocab_size": self._vocab_size,
            "rows": micro.loss_rows,
            "backend": self._backend,
            **self._of_chunks,
            **_padded(batch, ranks * len(hidden)),
        }


def _padded(batch: TokenBatch, rows: int) -> dict[str, Any]:
    """What a batch knows of its rows, and of rows behind them that do not count.

    It is padded to the rows of the answer because a slice of logits would get its gradient in new memory, and that
    would be copied to new memory again.
    """
    targets, mask, support = batch.targets, batch.loss_mask, batch.support
    if short := rows - batch.num_tokens:
        targets, mask = F.pad(targets, (0, short)), F.pad(mask, (0, short))
        if support is not None:
            support = Support(support.ids, torch.cat([support.offsets, support.offsets[-1:].expand(short)]))
    return {"targets": targets, "mask": mask, "support": support}


def _without_padding(result: Tensor | tuple[Tensor, Tensor], batch: TokenBatch) -> tuple[Tensor, Tensor | None]:
    logprobs, entropy = result if isinstance(result, tuple) else (result, None)
    return logprobs[: batch.num_tokens], None if entropy is None else entropy[: batch.num_tokens]


def _own_part(described: Distribution, batch: TokenBatch) -> Distribution:
    return Distribution(*(None if part is None else part[: batch.num_tokens] for part in described))  # type: ignore[arg-type]


def head_of(options: HeadOptions, tensor: dist.ProcessGroup, vocab_size: int, backend: str) -> Head:
    """The head that a job asks for."""
    if options.linear:
        return LinearHead(tensor, vocab_size, backend, options)
    return LogitsHead(tensor, vocab_size, backend)
