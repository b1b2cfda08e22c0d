"""The answer to "is it a bug or is it numerics?": evidence, verdicts, and what was not judged."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.columns import SEQUENCE_COLUMNS, TOKEN_COLUMNS
from megatron_rc.analyze.evidence import Evidence, Gathering
from megatron_rc.analyze.known import Known
from megatron_rc.analyze.part import part_of
from megatron_rc.analyze.power import Power, power
from megatron_rc.analyze.readers import open_dump
from megatron_rc.analyze.readers.dump import CorruptRows
from megatron_rc.analyze.recommendation import Recommendation, recommend
from megatron_rc.analyze.rules import Judgement, judge
from megatron_rc.analyze.rules.rule import Level, Verdict
from megatron_rc.analyze.statistics.decomposition import Decomposition, decompose
from megatron_rc.analyze.statistics.timeline import Logged, Timeline, logged_next_to
from megatron_rc.analyze.statistics.what_if import Missing, WhatIfTable, what_if
from megatron_rc.correction.settings import PRESETS


@dataclass(frozen=True)
class Diagnosis:
    """What an analysis answers."""

    source: str
    """Path or name of what was analyzed."""
    format: str
    evidence: Evidence
    judgement: Judgement
    corrupt: CorruptRows
    ignored: list[str]
    """One sentence for each kind of file at the path that was not read."""
    only: tuple[str, ...] = ()
    """COLUMN=VALUE of the responses that were judged; empty where all were."""

    def __str__(self) -> str:
        """The report that `megatron-rc analyze` prints."""
        return str(_view("terminal").text(self))

    def __repr__(self) -> str:
        return f"<Diagnosis of {self.source}: {self.level}; print it>"

    def _repr_html_(self) -> str:
        """The page that `megatron-rc analyze` writes, in a notebook."""
        return str(_view("pages.html").framed(self))

    @property
    def verdicts(self) -> list[Verdict]:
        return self.judgement.verdicts

    @property
    def level(self) -> Level:
        """The gravest level of the verdicts."""
        return min((verdict.level for verdict in self.verdicts), key=[*Level].index, default=Level.NUMERICS)

    @cached_property
    def decomposition(self) -> Decomposition | None:
        """Why k3 grew from the first to the last steps; None where they cannot be compared."""
        return decompose(self.evidence.steps)

    @cached_property
    def timeline(self) -> Timeline | None:
        """The course of the run; None with too few steps."""
        course = self.evidence.course
        return None if course is None else course.corrected(self.evidence.adjusted)

    @cached_property
    def power(self) -> Power:
        """The smallest faults that these data would have shown."""
        return power(self.evidence)

    @property
    def hidden_sampling_possible(self) -> bool:
        """True without the column entropy: then a hidden temperature or top-p cannot be excluded."""
        return not self.evidence.has("entropy")

    @property
    def lagged(self) -> bool:
        """True where the lag of the policy explains a part of the gap: no part of its course is then the engines'."""
        return any(verdict.code == "RC502" for verdict in self.verdicts)

    @cached_property
    def recommendation(self) -> Recommendation:
        """The correction that suits the gap, or what must be done before any correction."""
        return recommend(self.evidence, self.verdicts)

    @cached_property
    def what_if(self) -> WhatIfTable | Missing:
        """What every preset and the recommended correction would do; computed at first use; needs torch."""
        # a surrogate acts in the loss, on weights that have moved
        methods = {name: preset.correction for name, preset in PRESETS.items() if preset.correction.surrogate is None}
        recommended = self.recommendation
        if recommended.correction is not None:
            methods[recommended.method] = recommended.correction
        return what_if(self.evidence.sample, self.evidence.growth.horizon, methods)


def diagnose(
    log_pi: ArrayLike,
    log_mu: ArrayLike,
    cu_seqlens: ArrayLike | None = None,
    *,
    name: str = "arrays",
    select: Collection[str] = (),
    ignore: Collection[str] = (),
    known: Known | None = None,
    **columns: ArrayLike,
) -> Diagnosis:
    """Diagnose the gap between trainer and sampler from arrays.

    Args:
        log_pi: [N], or [B, T] with one sequence per row; log pi of the drawn tokens by the trainer before the update,
            nats. NumPy arrays, lists, or CPU tensors.
        log_mu: the same shape; log mu as the sampler logged it, nats.
        cu_seqlens: [S + 1] where each sequence starts; None with [B, T], or for a single sequence.
        name: what the report calls the data.
        select: codes of the only rules to judge.
        ignore: codes of rules to leave out.
        known: precision, kind of model and noise floor, which the gap is compared with.
        columns: further columns by their names in ``analyze.columns``, [N] per token or [S] per sequence, such as
            ``entropy``, ``loss_mask``, ``server``; each unlocks rules.

    Raises:
        ValueError: sizes that do not fit, an unknown column or rule, or no loss token.
    """
    pi, mu = _array(log_pi).astype(np.float64), _array(log_mu).astype(np.float64)
    if cu_seqlens is None:
        rows, length = pi.shape if pi.ndim == 2 else (1, pi.size)
        cu_seqlens = np.arange(rows + 1) * length
    arrays = {column: _array(values) for column, values in columns.items()}
    for column in arrays:
        if column not in TOKEN_COLUMNS and column not in SEQUENCE_COLUMNS:
            names = ", ".join([*TOKEN_COLUMNS, *SEQUENCE_COLUMNS])
            raise ValueError(f"unknown column {column!r}; known: {names}")
    offsets, tokens = _array(cu_seqlens).astype(np.int64), pi.size
    # advantage may be per token or per sequence; its length decides
    per_token = {c: a.reshape(-1) for c, a in arrays.items() if c in TOKEN_COLUMNS and a.size == tokens}
    chunk = Chunk(
        pi.reshape(-1),
        mu.reshape(-1),
        offsets,
        {c: a.astype(bool) if c == "loss_mask" else a for c, a in per_token.items()},
        {c: a for c, a in arrays.items() if c not in per_token},
    )
    return diagnosis_of([chunk], name, "arrays", CorruptRows(), select=select, ignore=ignore, known=known)


def diagnose_dump(
    path: str | Path,
    *,
    format: str | None = None,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
    known: Known | None = None,
    only: Mapping[str, str] = MappingProxyType({}),
    progress: Callable[[int], None] = lambda done: None,
) -> Diagnosis:
    """Diagnose a dump on disk; the memory that this takes does not grow with the dump.

    Args:
        path: a file or folder of a known format.
        format: name of the format in ``analyze.readers.FORMATS``; None looks into the files.
        select: codes of the only rules to judge.
        ignore: codes of rules to leave out.
        known: precision, kind of model and noise floor, which the gap is compared with.
        only: values by the column of a response that the judged ones have, such as {"task": "code"}.
        progress: called with the size in bytes of each file once it is read.

    Raises:
        ValueError: nothing to read, an unknown format or rule, or no loss token.
    """
    dump = open_dump(path, format)
    found = diagnosis_of(
        part_of(dump.chunks(progress), only) if only else dump.chunks(progress),
        str(path),
        dump.format,
        dump.corrupt,
        ignored=dump.ignored,
        logged=logged_next_to(Path(path)),
        select=select,
        ignore=ignore,
        known=known,
    )
    return replace(found, only=tuple(f"{column}={value}" for column, value in only.items()))


def diagnosis_of(
    chunks: Iterable[Chunk],
    source: str,
    format: str,
    corrupt: CorruptRows,
    *,
    ignored: Sequence[str] = (),
    logged: Logged = MappingProxyType({}),
    select: Collection[str] = (),
    ignore: Collection[str] = (),
    known: Known | None = None,
) -> Diagnosis:
    gathering = Gathering(known)
    for chunk in chunks:
        gathering.add(chunk)
    evidence = gathering.evidence(logged)
    return Diagnosis(source, format, evidence, judge(evidence, select=select, ignore=ignore), corrupt, [*ignored])


def _view(name: str) -> ModuleType:
    """The module that shows a diagnosis; it imports this one, so it is loaded when something is shown."""
    return import_module(f"{__package__}.{name}")


def _array(values: Any) -> np.ndarray:
    """The values as a NumPy array; a torch tensor is detached and copied to the CPU first."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if "bfloat16" in str(values.dtype) else values
    return np.asarray(values)
