"""The trained policy: model chunks, optimizer, scheduler, and the two passes over packed micro-batches."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.logprobs.logits import Distribution
from megatron_rc.models.config import hf_config_dict
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training import emulation
from megatron_rc.training.gradient_cosine import GradientCosine
from megatron_rc.training.groups import Groups
from megatron_rc.training.heads import Answer, head_of
from megatron_rc.training.microbatches import MicroBatch
from megatron_rc.training.model.attention import packed_seq_params
from megatron_rc.training.model.build import build_model
from megatron_rc.training.model.optimizer import build_optimizer, wrap_ddp
from megatron_rc.training.model.weights import export_hf, init_weights, load_hf, save_hf

ReadAnswer = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]
"""(micro-batch, what the last stage of the model answers) -> (scalar loss, a value to collect)."""
LossFunction = Callable[[Answer], tuple[Tensor, Any]]
"""What the last stage answers to one micro-batch -> (scalar loss, a value to collect)."""
AroundForward = Callable[[int, MicroBatch], AbstractContextManager[None]]
"""(number of the model chunk, micro-batch) -> a context around its forward pass."""
Around = Callable[[Sequence[MicroBatch], bool], AbstractContextManager[AroundForward]]
"""(micro-batches, forward only) -> a context around one schedule."""

_STATE = ("params", "step")
"""What a parameter group of an optimizer has besides settings; Apex and TransformerEngine count steps there."""


class Policy:
    """Megatron model, optimizer and scheduler of one process."""

    def __init__(self, model: ModelSettings, parallel: ParallelSettings, train: TrainSettings, groups: Groups) -> None:
        self.groups = groups
        self.train = train
        self.device = emulation.device()
        self.phase_updates = 0
        """Optimizer steps since start_phase, not counting steps that the fp16 loss scaler skipped."""
        self.hf_config = hf_config_dict(model)
        chunks = build_model(self.hf_config, parallel, train.dtype)
        config: Any = chunks[0].config
        self.rows_multiple = parallel.tensor if config.sequence_parallel else 1
        if model.hf_path:
            load_hf(chunks, model.hf_path)
        else:
            init_weights(chunks, train.seed)
        self.chunks = wrap_ddp(chunks, train.dtype)
        for chunk in self.chunks:
            chunk.config.finalize_model_grads_func = finalize_model_grads
        self.head = head_of(train.head_options(), groups.tensor, self.hf_config["vocab_size"], train.backend)
        with self.head.answering(self.chunks):
            pass  # refuses a model that the head cannot read

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [chunk.module for chunk in self.chunks]

    def start_phase(self, *, lr: float, min_lr: float, warmup_steps: int, total_steps: int, decay_style: str) -> None:
        """Begin with a new optimizer state and a learning-rate schedule over ``total_steps`` optimizer steps."""
        self.phase_updates = 0
        self.optimizer = build_optimizer(self.train, self.chunks)
        self.cosine = GradientCosine() if self.train.grad_cosine else None
        for group in self.optimizer.param_groups:
            group["max_lr"], group["min_lr"] = lr, min_lr
        # it sets the first learning rate at once
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=lr / (warmup_steps + 1),  # the first update happens at step 0 and would be lost at 0
            max_lr=lr,
            min_lr=min_lr,
            lr_warmup_steps=warmup_steps,
            lr_decay_steps=max(total_steps, warmup_steps + 1),
            lr_decay_style=decay_style,
            start_wd=self.train.weight_decay,
            end_wd=self.train.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    def load_phase(self, optimizer: Any, scheduler: dict[str, Any]) -> None:
        """Go on from the states of both in a checkpoint; every rate and decay is that of the settings."""
        given = [{k: v for k, v in group.items() if k not in _STATE} for group in self.optimizer.param_groups]
        if optimizer is None:
            self.optimizer.reload_model_params()
        else:
            self.optimizer.load_state_dict(optimizer)
        for group, settings in zip(self.optimizer.param_groups, given, strict=True):
            group.update(settings)
        self.scheduler.load_state_dict(scheduler)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under Hugging Face names, one at a time; a collective of all processes."""
        return export_hf(self.modules)

    def save_weights(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint of the present weights; a collective of all processes."""
        save_hf(self.modules, str(folder), self.hf_config)

    def load_weights(self, folder: Path) -> None:
        load_hf(self.modules, str(folder))

    def keep_kl_policy(self) -> None:
        """Keep a host copy of the present weights as the policy that the KL penalty pulls towards."""
        self._kl_policy = self.host_copy()

    def kl_logprobs(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """`logprobs_by` with the policy that `keep_kl_policy` kept."""
        return self.logprobs_by(self._kl_policy, micro_batches)

    def host_copy(self) -> list[Tensor]:
        """This rank's part of the present weights, in host memory."""
        return [p.detach().to("cpu", copy=True) for p in self._parameters()]

    def logprobs_by(
        self, weights: Sequence[Tensor], micro_batches: Sequence[MicroBatch], *, around: Around | None = None
    ) -> Tensor:
        """[N] fp32, nats: log-probs by ``weights`` of `host_copy`; empty before the last pipeline stage."""
        with self.holding(weights):
            return self.logprobs(micro_batches, around=around)[0]

    @contextmanager
    def holding(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Within the block the model has ``weights`` of `host_copy`; then the trained ones are put back."""
        trained = [p.detach().clone() for p in self._parameters()]
        self._overwrite(weights)
        try:
            yield
        finally:
            self._overwrite(trained)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for module in self.modules for p in module.parameters()]

    @torch.no_grad()
    def _overwrite(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters(), values, strict=True):
            parameter.copy_(value)

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, around: Around | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies without gradient, ([N], [N]) fp32, nats; empty before the last pipeline stage."""
        described = self.distribution(micro_batches, around=around)
        return described.logprobs, described.entropy

    def distribution(
        self, micro_batches: Sequence[MicroBatch], *, around: Around | None = None, **columns: bool
    ) -> Distribution:
        """`Head.distribution` of every token by the present weights; empty before the last pipeline stage."""

        def read(micro: MicroBatch, answer: Tensor) -> tuple[Tensor, Any]:
            described = self.head.distribution(answer, micro, **columns)
            return described.logprobs.new_zeros(()), described

        with torch.no_grad():
            outputs = self._run(micro_batches, read, forward_only=True, around=around)
        if not outputs:
            empty = torch.zeros(0, device=self.device)
            return Distribution(empty, empty, empty)
        joined: list[Any] = [None if parts[0] is None else torch.cat(parts) for parts in zip(*outputs, strict=True)]
        return Distribution(*joined)

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossFunction,
        *,
        before_step: Callable[[list[Any]], None] | None = None,
        around: Around | None = None,
        take_step: bool = True,
    ) -> "UpdateResult":
        """One optimizer step on the sum of ``loss`` over all micro-batches of all data-parallel ranks.

        Args:
            before_step: called with all that ``loss`` collected; raising there leaves the weights as they were.
            take_step: False computes the gradient, which `gradient` then returns, and changes no weight and no state of
                the optimizer or the scheduler.
        """
        count = len(micro_batches)
        # what backward brings to the loss of a micro-batch, by the operations that follow it, to the bit
        scaled = self.optimizer.scale_loss(torch.ones((), device=self.device))
        upstream = scaled.reshape(()) / count * self._loss_factor(count)

        def read(micro: MicroBatch, answer: Tensor) -> tuple[Tensor, Any]:
            return loss(Answer(self.head, micro, answer, upstream))

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = self._run(micro_batches, read, forward_only=False, around=around)
        if before_step:
            before_step(outputs)
        lr = self.lr
        if not take_step:
            return UpdateResult(outputs, math.nan, False, lr)
        applied, grad_norm, _ = self.optimizer.step()
        cosine = self.cosine.after_step(self.optimizer) if self.cosine and applied else None
        self.scheduler.step(increment=1)
        self.phase_updates += bool(applied)
        return UpdateResult(outputs, float(grad_norm or 0.0), bool(applied), lr, cosine)

    def gradient(self) -> Tensor:
        """[P] fp32: the gradient that an update without a step left, over this rank's weights, before clipping."""
        gradients: list[Any] = [p.main_grad for p in self._parameters()]  # type: ignore[attr-defined]
        return torch.cat([g.flatten() for g in gradients]).float() / self.optimizer.get_loss_scale()

    def moved(self, direction: Tensor) -> AbstractContextManager[None]:
        """`holding` the weights plus ``direction``, [P] like `gradient`."""
        trained = [p.detach() for p in self._parameters()]
        parts = direction.split([p.numel() for p in trained])
        return self.holding([p + part.view_as(p) for p, part in zip(trained, parts, strict=True)])

    def close(self) -> None:
        """Release the model; a process that trains several jobs would keep each model, and the threads of its groups.

        The gradient hooks of megatron-core's DDP refer to it from C++, a cycle that Python's collector cannot see.
        """
        for chunk in self.chunks:
            vars(chunk).clear()

    def _loss_factor(self, micro_batches: int) -> int:
        """Megatron multiplies a two-tuple loss by cp / micro-batches and gradients by 1 / (dp * cp); cp is 1 here."""
        return micro_batches * self.groups.data_size

    def _run(
        self, micro_batches: Sequence[MicroBatch], read: ReadAnswer, *, forward_only: bool, around: Around | None
    ) -> list[Any]:
        for chunk in self.chunks:
            chunk.train(not forward_only)
        factor = self._loss_factor(len(micro_batches))
        outer = around(micro_batches, forward_only) if around else nullcontext()
        with outer as around_forward, self.head.answering(self.chunks):
            return get_forward_backward_func()(
                forward_step_func=_ForwardStep(self, read, factor, around_forward),
                data_iterator=iter(micro_batches),
                model=self.chunks,
                num_microbatches=len(micro_batches),
                seq_length=max(m.batch.num_tokens for m in micro_batches),
                micro_batch_size=1,
                forward_only=forward_only,
            )


@dataclass(frozen=True)
class _ForwardStep:
    """The forward step that Megatron's schedule calls for every micro-batch and model chunk."""

    policy: Policy
    read: ReadAnswer
    loss_factor: float
    around_forward: AroundForward | None

    def __call__(self, iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
        """(output of the chunk, function of the last chunk's output that returns the loss)."""
        micro, policy = next(iterator), self.policy
        around = self.around_forward
        with around(policy.chunks.index(model), micro) if around else nullcontext():
            output = model(
                **model_inputs(micro.batch, policy.rows_multiple),
                **({} if policy.train.dtype == "fp32" else {"fp32_output": False}),
            )
        return output, partial(self._loss, micro)

    def _loss(self, micro: MicroBatch, answer: Tensor) -> tuple[Tensor, Any]:
        value, collected = self.read(micro, answer)
        return value * self.loss_factor, collected


def model_inputs(batch: TokenBatch, multiple: int) -> dict[str, Any]:
    """Keyword arguments of GPTModel for a packed batch of N rows; its answer has the rows of the batch first.

    Tensor-parallel ranks split the rows, so one more sequence pads their number to a multiple of ``multiple``.
    """
    tokens, positions, cu_seqlens, lengths = batch.tokens, batch.position_ids, batch.cu_seqlens, [*batch.lengths]
    if short := -batch.num_tokens % multiple:
        tokens, positions = F.pad(tokens, (0, short)), F.pad(positions, (0, short))
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + short])
        lengths.append(short)
    return {
        "input_ids": tokens[None],
        "position_ids": positions[None],
        "attention_mask": None,
        "packed_seq_params": packed_seq_params(cu_seqlens, max(lengths), lengths),
    }


@dataclass
class UpdateResult:
    outputs: list[Any]
    """Values that the loss function collected, one per micro-batch; empty before the last pipeline stage."""
    grad_norm: float
    applied: bool
    """False when the fp16 loss scaler skipped the step, or none was to be taken."""
    lr: float
    grad_cosine: Tensor | None = None
    """0-d: cosine of the gradient and that of the step before; None where either was not kept."""
