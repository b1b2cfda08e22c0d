"""TokenBatch: one rollout batch in the packed layout, shifted once, so that row t predicts token t + 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rc.engine import Sample, SamplingParams


class Support(NamedTuple):
    """Kept ids of every row in CSR form: row t was sampled from ``ids[offsets[t]:offsets[t + 1]]``."""

    ids: Tensor
    """[K] int64 vocabulary ids."""
    offsets: Tensor
    """[N + 1] int64."""

    def select(self, rows: Tensor) -> Support:
        """The kept ids of ``rows`` [M] (int64), in that order."""
        counts = (self.offsets[1:] - self.offsets[:-1])[rows]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        within = torch.arange(int(offsets[-1]), device=rows.device) - offsets[:-1].repeat_interleave(counts)
        return Support(self.ids[self.offsets[:-1][rows].repeat_interleave(counts) + within], offsets)

    def to(self, device: torch.device) -> Support:
        return Support(self.ids.to(device), self.offsets.to(device))


class TopIds(NamedTuple):
    """The sampler's k most probable ids of every row, with the mass that they have in the whole vocabulary."""

    ids: Tensor
    """[N, k] int32, global ids, distinct within a row; -1 where a row has fewer."""
    rollout_logprobs: Tensor
    """[N, k] fp32, nats: log mu of each id, of the distribution that drew; anything where the id is -1."""

    def select(self, rows: Tensor | slice) -> TopIds:
        """The ids of ``rows`` [M] (int64), in that order."""
        return TopIds(self.ids[rows], self.rollout_logprobs[rows])

    def to(self, device: torch.device) -> TopIds:
        return TopIds(self.ids.to(device), self.rollout_logprobs.to(device))


@dataclass
class TokenBatch:
    """S packed sequences with N tokens in all. Row t of every [N] tensor belongs to logits row t.

    The last row of each sequence predicts nothing: its loss_mask is False.
    """

    tokens: Tensor
    """[N] int64 input ids."""
    targets: Tensor
    """[N] int64, the id that each row predicts; 0 on the last row of a sequence."""
    position_ids: Tensor
    """[N] int64, position inside the sequence."""
    loss_mask: Tensor
    """[N] bool, True where the target was sampled by the rollout policy."""
    rollout_logprobs: Tensor
    """[N] fp32, nats; 0 where loss_mask is False."""
    cu_seqlens: Tensor
    """[S + 1] int32."""
    segment_ids: Tensor
    """[N] int32, ascending; every contiguous run of loss_mask has an id of its own."""
    weight_versions: Tensor
    """[N] int32, version of the rollout weights that the target was sampled with; -1 where loss_mask is False."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, on the host."""
    num_segments: int
    sampling: SamplingParams
    rewards: Tensor | None = None
    """[S] fp32."""
    groups: Tensor | None = None
    """[S] int64, number of the prompt that a sequence answers."""
    advantages: Tensor | None = None
    """[S] fp32."""
    support: Support | None = None
    top: TopIds | None = None
    """Rows that predict no output token have no id."""
    routes: Tensor | None = None
    """[N, layers, k] int32; the row of the last token of a sequence is zeros."""
    truncated: Tensor | None = None
    """[S] bool: the response was cut off at max_new_tokens."""
    sampling_logprobs: Tensor | None = None
    """[N] fp32, nats: log pi of every target by the trainer's weights of the version that sampled it, from a forward
    pass while they were loaded; anything where loss_mask is False."""
    positions: Tensor | None = None
    """[N] int32, index of each loss token among those of its sequence; made here, from whole sequences, where None."""

    def __post_init__(self) -> None:
        if self.positions is None:
            self.positions = _positions(self.loss_mask, self.cu_seqlens)
        if self.sampling.truncates and self.support is None:
            raise ValueError(
                f"sampling with top_p={self.sampling.top_p} top_k={self.sampling.top_k} needs the kept ids of every "
                "token (support): without them, pi and mu would be normalised over different sets"
            )

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[Sample],
        sampling: SamplingParams,
        *,
        rewards: Sequence[float] | None = None,
        groups: Sequence[int] | None = None,
    ) -> TokenBatch:
        """Shift and pack samples.

        Raises:
            ValueError: log-probs, kept ids or routes of a sample do not match its tokens; the error names its index.
        """
        for index, sample in enumerate(samples):
            _check_sample(index, sample, sampling)
        lengths = tuple(len(s.prompt_ids) + len(s.output_ids) for s in samples)
        tokens, targets, mask, logprobs, versions, kept, kept_counts = [], [], [], [], [], [], []
        for s in samples:
            ids = list(s.prompt_ids) + list(s.output_ids)
            lead = len(s.prompt_ids) - 1
            tokens += ids
            targets += [*ids[1:], 0]
            mask += [False] * lead + (s.output_mask or [True] * len(s.output_ids)) + [False]
            logprobs += [0.0] * lead + list(s.logprobs) + [0.0]
            versions += [-1] * lead + _versions_per_token(s) + [-1]
            if sampling.truncates:
                assert s.support is not None
                kept += [i for row in s.support for i in row]
                kept_counts += [0] * lead + [len(row) for row in s.support] + [0]
        loss_mask = torch.tensor(mask, dtype=torch.bool)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        segment_ids, num_segments = segments(loss_mask, cu_seqlens)
        kept_ids = Support(torch.tensor(kept, dtype=torch.int64), torch.tensor([0, *kept_counts]).cumsum(0))
        return cls(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            targets=torch.tensor(targets, dtype=torch.int64),
            position_ids=torch.cat([torch.arange(n) for n in (0, *lengths)]),
            loss_mask=loss_mask,
            rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
            cu_seqlens=cu_seqlens,
            segment_ids=segment_ids,
            weight_versions=torch.tensor(versions, dtype=torch.int32),
            lengths=lengths,
            num_segments=num_segments,
            sampling=sampling,
            rewards=None if rewards is None else torch.tensor(rewards, dtype=torch.float32),
            groups=None if groups is None else torch.tensor(groups, dtype=torch.int64),
            support=kept_ids if sampling.truncates else None,
            top=_stack_top(samples, sampling.top_logprobs) if sampling.top_logprobs else None,
            routes=_stack_routes(samples),
            truncated=torch.tensor([s.finish_reason == "length" for s in samples], dtype=torch.bool),
        )

    def lags(self, version: int) -> Tensor:
        """[N] int32: how many versions older than ``version`` the weights were that sampled each target; 0 elsewhere.

        Weights that are newer, as in a recording of another run, count as 0.
        """
        return torch.where(self.loss_mask, version - self.weight_versions, 0).clamp(min=0)

    def rows_of(self, sequences: Sequence[int]) -> Tensor:
        """Row numbers of ``sequences`` in their order, [M] int64."""
        starts = [0, *accumulate(self.lengths)]
        parts = [torch.arange(starts[i], starts[i + 1]) for i in sequences]
        return torch.cat(parts).to(self.tokens.device) if parts else self.tokens.new_zeros(0)

    def select(self, sequences: Sequence[int]) -> TokenBatch:
        """The batch of these sequences, in this order; segments are numbered again."""
        which = torch.tensor(list(sequences), dtype=torch.int64, device=self.tokens.device)
        taken = self._take(self.rows_of(sequences), tuple(self.lengths[i] for i in sequences))
        fields: dict[str, Any] = {n: None if (v := getattr(self, n)) is None else v[which] for n in _SEQUENCE_FIELDS}
        segment_ids, num_segments = segments(taken.loss_mask, taken.cu_seqlens)
        return dataclasses.replace(taken, **fields, segment_ids=segment_ids, num_segments=num_segments)

    def _take(self, rows: Tensor, lengths: tuple[int, ...]) -> TokenBatch:
        """These rows; per-sequence fields and segment numbers stay as they are."""
        fields: dict[str, Any] = {n: None if (v := getattr(self, n)) is None else v[rows] for n in _ROW_FIELDS}
        fields["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(rows.device, torch.int32)
        fields["support"] = None if self.support is None else self.support.select(rows)
        fields["top"] = None if self.top is None else self.top.select(rows)
        return dataclasses.replace(self, **fields, lengths=lengths)

    def muted(self, sequences: Sequence[int]) -> TokenBatch:
        """The same batch, in which no token of ``sequences`` counts: their loss_mask is False."""
        loss_mask = self.loss_mask.clone()
        loss_mask[self.rows_of(sequences)] = False
        segment_ids, num_segments = segments(loss_mask, self.cu_seqlens)
        return dataclasses.replace(self, loss_mask=loss_mask, segment_ids=segment_ids, num_segments=num_segments)

    def to(self, device: torch.device) -> TokenBatch:
        moved: Any = {name: v.to(device) for name, v in vars(self).items() if isinstance(v, Tensor | Support | TopIds)}
        return dataclasses.replace(self, **moved)


_ROW_FIELDS = (
    *("tokens", "targets", "position_ids", "loss_mask"),
    *("rollout_logprobs", "segment_ids", "weight_versions", "routes", "positions", "sampling_logprobs"),
)
_SEQUENCE_FIELDS = ("rewards", "groups", "advantages", "truncated")


def segments(loss_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, int]:
    """Number the contiguous runs of loss_mask [N] = 1 inside each sequence of cu_seqlens [S + 1].

    Returns:
        ([N] int32 ascending ids; rows outside a run have the id of the run before them, or 0), number of runs.
    """
    ids = first_tokens(loss_mask, cu_seqlens).cumsum(0)
    return (ids - 1).clamp(min=0).to(torch.int32), int(ids[-1]) if len(ids) else 0


def _positions(loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    after = torch.cat([loss_mask.new_zeros(1, dtype=torch.int64), loss_mask.cumsum(0)])
    starts = cu_seqlens.long()
    before = after[starts[:-1]].repeat_interleave(starts.diff())
    return (after[:-1] - before).to(torch.int32)


def first_tokens(loss_mask: Tensor, offsets: Tensor) -> Tensor:
    """[N] bool: the first token of every run of loss_mask [N] = 1 inside a sequence, which start at offsets [S + 1]."""
    starts = torch.zeros(len(loss_mask) + 1, dtype=torch.bool, device=loss_mask.device)
    starts = starts.index_fill(0, offsets.long(), True)[:-1]
    return loss_mask & (starts | ~loss_mask.roll(1))


def _check_sample(index: int, sample: Sample, sampling: SamplingParams) -> None:
    outputs = len(sample.output_ids)
    if not sample.prompt_ids:
        raise ValueError(f"sample {index}: the prompt is empty; log-probs of a first token do not exist")
    if len(sample.logprobs) != outputs:
        raise ValueError(f"sample {index}: the engine returned {len(sample.logprobs)} log-probs for {outputs} tokens")
    if sample.output_mask is not None and len(sample.output_mask) != outputs:
        raise ValueError(f"sample {index}: output_mask has {len(sample.output_mask)} entries for {outputs} tokens")
    if sampling.truncates and (sample.support is None or len(sample.support) != outputs):
        rows = "none" if sample.support is None else f"{len(sample.support)} rows"
        raise ValueError(f"sample {index}: top-p/top-k sampling needs kept ids for {outputs} tokens, got {rows}")
    if sampling.top_logprobs:
        _check_top(index, sample, (outputs, sampling.top_logprobs))
    expected = len(sample.prompt_ids) + outputs - 1
    if sample.routes is not None and len(sample.routes) != expected:
        raise ValueError(f"sample {index}: routes have {len(sample.routes)} rows, expected tokens - 1 = {expected}")


def _check_top(index: int, sample: Sample, shape: tuple[int, int]) -> None:
    ids, logprobs = sample.top_ids, sample.top_rollout_logprobs
    if ids is None or logprobs is None or ids.shape != shape or logprobs.shape != shape:
        got = "none" if ids is None or logprobs is None else f"{tuple(ids.shape)} and {tuple(logprobs.shape)}"
        raise ValueError(f"sample {index}: top_logprobs needs ids and log-probs of shape {shape}, got {got}")


def _stack_top(samples: Sequence[Sample], k: int) -> TopIds:
    ids, logprobs = [torch.empty(0, k, dtype=torch.int32)], [torch.empty(0, k)]
    for sample in samples:
        assert sample.top_ids is not None and sample.top_rollout_logprobs is not None
        around = (0, 0, len(sample.prompt_ids) - 1, 1)
        ids.append(torch.nn.functional.pad(sample.top_ids.to(torch.int32), around, value=-1))
        logprobs.append(torch.nn.functional.pad(sample.top_rollout_logprobs.float(), around))
    return TopIds(torch.cat(ids), torch.cat(logprobs))


def _versions_per_token(sample: Sample) -> list[int]:
    versions = [0] * len(sample.output_ids)
    for version, start, end in sample.weight_versions:
        versions[start:end] = [version] * (min(end, len(versions)) - start)
    if sample.output_mask is not None:
        versions = [v if drawn else -1 for v, drawn in zip(versions, sample.output_mask, strict=True)]
    return versions


def _stack_routes(samples: Sequence[Sample]) -> Tensor | None:
    if not samples or any(s.routes is None for s in samples):
        return None
    # one row of zeros for the last token of each sequence
    padded = [torch.nn.functional.pad(s.routes, (0, 0, 0, 0, 0, 1)) for s in samples if s.routes is not None]
    return torch.cat(padded).to(torch.int32)
