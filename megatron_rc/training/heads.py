"""What the last stage of the model answers, as log-probs: logits, or hidden states and the weight of the head."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_rc.batch import Support, TokenBatch, TopIds
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.logprobs.centered import CenteredLogprobs, centered_logprobs, linear_centered_logprobs
from megatron_rc.logprobs.centering import Centering
from megatron_rc.logprobs.gradient import check_wide_products
from megatron_rc.logprobs.inputs import HeadInputs, of_chunks
from megatron_rc.logprobs.linear import linear_distribution, linear_logprobs, linear_policy_loss
from megatron_rc.logprobs.logits import Distribution, vocab_parallel_distribution, vocab_parallel_logprobs
from megatron_rc.loss.policy_loss import PolicyLoss
from megatron_rc.settings.head import HeadOptions
from megatron_rc.training.loss_terms import LossTerms
from megatron_rc.training.microbatches import MicroBatch
from megatron_rc.training.model.hidden_states import OutputHead, hidden_states


class Head(ABC):
    """Reads the answer of the model to one micro-batch of n tokens, whose loss_mask is the mask.

    Rows of padding may follow the n tokens in the answer.
    """

    _logprobs_of: Callable[..., Tensor | tuple[Tensor, Tensor]]
    _distribution_of: Callable[..., Distribution]
    _centered_of: Callable[..., CenteredLogprobs]

    def __init__(self, tensor: dist.ProcessGroup, vocab_size: int, backend: str) -> None:
        self._tensor, self._backend = tensor, backend
        self._vocabulary: dict[str, Any] = {"tp_group": tensor, "vocab_size": vocab_size}

    @abstractmethod
    def answering(self, chunks: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
        """Within the block the model answers what this head reads."""

    @abstractmethod
    def policy_loss(
        self, answer: Tensor, micro: MicroBatch, terms: LossTerms, upstream: Tensor
    ) -> tuple[PolicyLoss, Tensor]:
        """The loss, whose gradient in backward will be ``upstream``, 0-d; and log-probs [n] without gradient."""

    @abstractmethod
    def _arguments(self, answer: Tensor, micro: MicroBatch) -> dict[str, Any]:
        """The arguments that both functions of the head take."""

    def logprobs(self, answer: Tensor, micro: MicroBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """([n], [n]) fp32, nats, with gradient; no entropy unless asked for."""
        result = self._logprobs_of(**self._arguments(answer, micro), with_entropy=with_entropy)
        logprobs, entropy = result if isinstance(result, tuple) else (result, None)
        tokens = micro.batch.num_tokens
        return logprobs[:tokens], None if entropy is None else entropy[:tokens]

    def centered(
        self, answer: Tensor, micro: MicroBatch, correction: RolloutCorrection, *, with_entropy: bool
    ) -> CenteredLogprobs:
        """[n] each, for the top ids of the batch."""
        arguments = self._arguments(answer, micro)
        tokens, top = micro.batch.num_tokens, _padded_top(micro.batch, len(arguments["targets"]))
        assert top is not None, "the settings ask for top log-probs"
        found = self._centered_of(**arguments, top=top, correction=correction, with_entropy=with_entropy)
        entropy = None if found.entropy is None else found.entropy[:tokens]
        return CenteredLogprobs(
            found.logprobs[:tokens], entropy, Centering(*(part[:tokens] for part in found.centering))
        )

    def distribution(self, answer: Tensor, micro: MicroBatch, **columns: bool) -> Distribution:
        """[n] fp32 each, [n, k] for top ids, without gradient; ``columns`` as in `vocab_parallel_distribution`."""
        arguments = self._arguments(answer, micro)
        top = _padded_top(micro.batch, len(arguments["targets"]))
        described = self._distribution_of(**arguments, top_ids=None if top is None else top.ids, **columns)
        tokens = micro.batch.num_tokens
        return Distribution(*(None if part is None else part[:tokens] for part in described))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Answer:
    """The answer of the model to one micro-batch of an update, which a loss function reads once, in one of two ways."""

    head: Head
    micro: MicroBatch
    values: Tensor
    """Logits or hidden states."""
    upstream: Tensor
    """0-d: the gradient with respect to the loss that backward will pass in."""

    def logprobs(self, *, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """`Head.logprobs`, for any loss."""
        return self.head.logprobs(self.values, self.micro, with_entropy=with_entropy)

    def policy_loss(self, terms: LossTerms) -> tuple[PolicyLoss, Tensor]:
        """`Head.policy_loss`, for a correction that does not depend on these log-probs."""
        return self.head.policy_loss(self.values, self.micro, terms, self.upstream)


class LogitsHead(Head):
    """Reads logits [1, n, V_local]."""

    # the output layer does not need its logits for backward
    _logprobs_of = staticmethod(partial(vocab_parallel_logprobs, inplace_backward=True))
    _distribution_of = staticmethod(vocab_parallel_distribution)
    _centered_of = staticmethod(partial(centered_logprobs, inplace_backward=True))

    def answering(self, chunks: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
        return nullcontext()

    def policy_loss(
        self, answer: Tensor, micro: MicroBatch, terms: LossTerms, upstream: Tensor
    ) -> tuple[PolicyLoss, Tensor]:
        current, entropy = self.logprobs(answer, micro, with_entropy=terms.with_entropy)
        return terms.loss_of(current, entropy, self._backend), current.detach()

    def _arguments(self, answer: Tensor, micro: MicroBatch) -> dict[str, Any]:
        logits = answer.squeeze(0)
        targets, of_rows = _rows(micro.batch, len(logits))
        return {"logits": logits, "targets": targets, "backend": self._backend, **self._vocabulary, **of_rows}


class LinearHead(Head):
    """Reads hidden states [1, n, H], or this rank's part of them and of the rows of padding."""

    _logprobs_of, _distribution_of = staticmethod(linear_logprobs), staticmethod(linear_distribution)
    _centered_of = staticmethod(linear_centered_logprobs)

    def __init__(self, tensor: dist.ProcessGroup, vocab_size: int, backend: str, options: HeadOptions) -> None:
        super().__init__(tensor, vocab_size, backend)
        self._of_chunks = of_chunks(options)
        self._of_model: OutputHead | None = None

    @contextmanager
    def answering(self, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            *_, self._of_model = [stack.enter_context(hidden_states(chunk)) for chunk in chunks]
            if self._of_model is not None:
                check_wide_products(self._of_model.weight.dtype, self._of_model.weight.device)
            yield

    def policy_loss(
        self, answer: Tensor, micro: MicroBatch, terms: LossTerms, upstream: Tensor
    ) -> tuple[PolicyLoss, Tensor]:
        arguments = self._arguments(answer, micro)
        of_loss = terms.padded(len(arguments["targets"]))._asdict()
        result = linear_policy_loss(**arguments, **of_loss, with_entropy=terms.with_entropy, upstream=upstream)
        return PolicyLoss(result.loss, result.metrics), result.logprobs[: micro.batch.num_tokens]

    def _arguments(self, answer: Tensor, micro: MicroBatch) -> dict[str, Any]:
        assert self._of_model is not None
        hidden, parallel = answer.squeeze(0), self._of_model.sequence_parallel
        targets, of_rows = _rows(micro.batch, len(hidden) * (dist.get_world_size(self._tensor) if parallel else 1))
        head = HeadInputs(
            sequence_parallel=parallel, rows=micro.loss_rows, **self._vocabulary, **self._of_chunks, **of_rows
        )
        weight = self._of_model.weight
        return {"hidden": hidden, "weight": weight, "targets": targets, "head": head, "backend": self._backend}


def _rows(batch: TokenBatch, rows: int) -> tuple[Tensor, dict[str, Any]]:
    """Targets of a batch, and arguments with a value per row, padded by rows that do not count.

    It is padded to the rows of the answer because a slice of logits would get its gradient in new memory, and that
    would be copied to new memory again.
    """
    targets, mask, support = batch.targets, batch.loss_mask, batch.support
    if short := rows - batch.num_tokens:
        targets, mask = F.pad(targets, (0, short)), F.pad(mask, (0, short))
        if support is not None:
            support = Support(support.ids, torch.cat([support.offsets, support.offsets[-1:].expand(short)]))
    return targets, {"mask": mask, "support": support, "temperature": batch.sampling.temperature}


def _padded_top(batch: TokenBatch, rows: int) -> TopIds | None:
    """The top ids of a batch, padded like its targets."""
    top, short = batch.top, rows - batch.num_tokens
    if top is None or not short:
        return top
    return TopIds(F.pad(top.ids, (0, 0, 0, short), value=-1), F.pad(top.rollout_logprobs, (0, 0, 0, short)))


def head_of(options: HeadOptions, tensor: dist.ProcessGroup, vocab_size: int, backend: str) -> Head:
    """The head that a job asks for."""
    if options.linear:
        return LinearHead(tensor, vocab_size, backend, options)
    return LogitsHead(tensor, vocab_size, backend)
