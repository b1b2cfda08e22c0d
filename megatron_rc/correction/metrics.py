"""MetricSums: pooled sums, maxima and minima, and the metrics that `correction.formulas` makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.collectives import Group, all_reduced
from megatron_rc.correction.formulas import METRICS, Metric, totals_and_means
from megatron_rc.correction.reference.sums import Statistics
from megatron_rc.correction.sums import Key, Sum
from megatron_rc.correction.warnings import check_k3


class MetricSums:
    """Sufficient statistics of metrics: fp64 sums and maxima on the device, merged over micro-batches and ranks.

    Only `values` divides, so no metric depends on how the batch was cut. Only `check` and `values` wait for the device.
    """

    def __init__(self, statistics: Statistics | None = None, metrics: Mapping[str, Metric] | None = None) -> None:
        """
        Args:
            statistics: what one call computed; its vector is not copied. None: nothing yet.
            metrics: name -> what is made of them besides METRICS.
        """
        if statistics is None:
            statistics = Statistics((), (), (), torch.empty(0, dtype=torch.float64))
        assert statistics.vector.dtype == torch.float64
        counts = [len(keys) for keys in statistics[:3]]
        self._sums, self._maxima, self._minima = (
            _Named([_Entry("", key) for key in keys], part)
            for keys, part in zip(statistics[:3], statistics.vector.split(counts), strict=True)
        )
        self._metrics: Mapping[str, Metric] = METRICS if metrics is None else {**METRICS, **metrics}

    @classmethod
    def of_sums(cls, sums: Mapping[str, Tensor], metrics: Mapping[str, Metric]) -> MetricSums:
        """Sums of any shape, by names that `METRICS` has not, and the metrics made of them once they are pooled."""
        self = cls()
        entries = [_Entry("", name, tuple(value.shape)) for name, value in sums.items()]
        self._sums = _Named(entries, torch.cat([value.reshape(-1).double() for value in sums.values()]))
        self._metrics = {**METRICS, **metrics}
        return self

    @classmethod
    def of_means(cls, means: Mapping[str, tuple[Tensor, Tensor]]) -> MetricSums:
        """Metrics that are a total divided by a count once both are pooled: {name: (total, count)}, 0-d tensors."""
        totals, counts = zip(*means.values(), strict=True)
        return cls.of_vector(torch.stack([*totals, *counts]).double(), means=tuple(means))

    @classmethod
    def of_vector(cls, vector: Tensor, *, totals: tuple[str, ...] = (), means: tuple[str, ...] = ()) -> MetricSums:
        """Metrics that are a pooled total, or a mean, from one vector.

        Args:
            vector: [2K] fp64: the totals of ``totals`` and of ``means``, then a count of each; means are divided by it.
        """
        keys = tuple(Sum(name, part=part) for part in ("total", "count") for name in (*totals, *means))
        return cls(Statistics(keys, (), (), vector), totals_and_means(totals, means))

    def prefixed(self, prefix: str) -> MetricSums:
        """The same statistics under names that start with `prefix`, such as "current/" or "old/"."""
        renamed = MetricSums()
        renamed._metrics = self._metrics
        renamed._sums = self._sums.prefixed(prefix)
        renamed._maxima = self._maxima.prefixed(prefix)
        renamed._minima = self._minima.prefixed(prefix)
        return renamed

    def merge(self, other: MetricSums) -> MetricSums:
        """Add the statistics of other tokens, or of another prefix. Returns self."""
        self._metrics = {**self._metrics, **other._metrics}
        self._sums = self._sums.join(other._sums, torch.add)
        self._maxima = self._maxima.join(other._maxima, torch.maximum)
        self._minima = self._minima.join(other._minima, torch.minimum)
        return self

    def all_reduce(self, group: Group) -> MetricSums:
        """Pool over a process group (DP x CP, or one after the other) in two collectives. Returns self.

        None means no communication; the whole world is `torch.distributed.group.WORLD`. Every rank must hold the same
        metrics. Call it once: a second call on the same group counts everything twice.
        """
        if self._sums.entries:
            self._sums = self._sums._replace(tensor=all_reduced(self._sums.tensor, group))
        if self._maxima.entries or self._minima.entries:
            extremes = torch.cat([self._maxima.tensor, -self._minima.tensor])
            extremes = all_reduced(extremes, group, dist.ReduceOp.MAX)
            self._maxima = self._maxima._replace(tensor=extremes[: len(self._maxima.tensor)])
            self._minima = self._minima._replace(tensor=-extremes[len(self._maxima.tensor) :])
        return self

    def check(self, max_nonfinite_share: float = 0.01, max_k3: float | None = None) -> None:
        """Refuse too many corrupt log-probs, and policies too far apart; the k3 of current_old/ does not count.

        Call it on all ranks after `all_reduce` and before the optimizer step.

        Args:
            max_nonfinite_share: largest share of loss tokens with a log-prob that is NaN, infinite or above 0.
            max_k3: largest mean k3, nats. None: a k3 above 0.1 is logged as a warning, once per process.

        Raises:
            ValueError: a share or a k3 is larger.
        """
        for prefix, s in self._fetch().items():
            total = s.get("loss_tokens", 0.0)
            corrupt = total - s.get("tokens", 0.0)
            if corrupt > max_nonfinite_share * total:
                sequences = s.get("bad_sequences", math.nan)
                kinds = ["log-probs above 0 (probabilities, or -log p?)"] * (s.get("positive", 0.0) > 0)
                kinds += ["NaN or infinite log-probs"] * (corrupt > s.get("positive", 0.0))
                raise ValueError(
                    f"{prefix}nonfinite_share must be <= {max_nonfinite_share!r}, got {corrupt:.0f} of "
                    f"{total:.0f} loss tokens with {' and '.join(kinds)}, in "
                    f"{sequences:.0f} sequence{'s' * (sequences != 1)} (bad_sequences names them)"
                )
            if METRICS["k3"].needs in s and not prefix.startswith("current_old/"):
                check_k3(f"{prefix}k3", METRICS["k3"].value(s), max_k3)

    def values(self) -> dict[str, Any]:
        """Name -> number or list by their formulas; NaN where nothing can be divided by."""
        out = {}
        for prefix, s in self._fetch().items():
            out.update({prefix + name: metric.value(s) for name, metric in self._metrics.items() if metric.exists(s)})
        return out

    def _fetch(self) -> dict[str, dict[Key, Any]]:
        """prefix -> key -> number, or tensor where it is a list."""
        by_prefix: dict[str, dict[Key, Any]] = {}
        parts = [part for part in (self._sums, self._maxima, self._minima) if part.entries]
        if not parts:
            return by_prefix
        fetched = _Named(
            [entry for part in parts for entry in part.entries], torch.cat([p.tensor for p in parts]).cpu()
        )
        for entry, value in zip(fetched.entries, fetched.split(), strict=True):
            number = value.view(entry.shape) if entry.shape else value.item()
            by_prefix.setdefault(entry.prefix, {})[entry.key] = number
        return by_prefix


class _Entry(NamedTuple):
    prefix: str
    key: Key
    shape: tuple[int, ...] = ()


class _Named(NamedTuple):
    """Statistics that are pooled in one way."""

    entries: list[_Entry]
    tensor: Tensor
    """[K] fp64, the entries one after the other."""

    def split(self) -> tuple[Tensor, ...]:
        """One tensor [n] per entry."""
        return self.tensor.split([math.prod(entry.shape) for entry in self.entries])

    def prefixed(self, prefix: str) -> _Named:
        return _Named([entry._replace(prefix=prefix + entry.prefix) for entry in self.entries], self.tensor)

    def join(self, other: _Named, combine: Callable[[Tensor, Tensor], Tensor]) -> _Named:
        if not self.entries or not other.entries:
            return self if self.entries else other
        if self.entries == other.entries:
            return _Named(self.entries, combine(self.tensor, other.tensor))
        mine = dict(zip(self.entries, self.split(), strict=True))
        for entry, value in zip(other.entries, other.split(), strict=True):
            mine[entry] = combine(mine[entry], value) if entry in mine else value
        return _Named(list(mine), torch.cat(list(mine.values())))
