"""One response per row, as hosts write them, checked and packed into chunks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.chunk import Chunk, Floats, common
from megatron_rc.analyze.columns import SEQUENCE_COLUMNS, TOKEN_COLUMNS
from megatron_rc.analyze.readers.dump import CHUNK_TOKENS, CorruptRows, UnreadableFile, printable

MAX_TEXT = 200
"""Most characters of a text in a column, such as the name of a server; a longer one is damage."""
NUMBERS = {int, float, bool, type(None)}
"""Types that a list of numbers may hold. Nested lists are refused unread: in a pickle they may share their items,
so that a small file becomes a list of any size."""


class BadRow(ValueError):
    """A row that cannot be used; the message says what is wrong, without file and row."""


@dataclass
class Row:
    """One response; values of columns that the host did not write are absent, not None."""

    log_pi: Floats
    log_mu: Floats
    tokens: dict[str, NDArray[Any]] = field(default_factory=dict)
    """[T] values by their name in TOKEN_COLUMNS."""
    sequence: dict[str, Any] = field(default_factory=dict)
    """Single values by their name in SEQUENCE_COLUMNS."""

    def __post_init__(self) -> None:
        check_sizes({"log mu": self.log_mu, **self.tokens}, self.log_pi.size, "log pi has")
        for name, values in self.tokens.items():
            self.tokens[name] = values.astype(bool, copy=False) if TOKEN_COLUMNS[name].kind == "flag" else values
        for name, value in self.sequence.items():
            self.sequence[name] = one_value(value, name, SEQUENCE_COLUMNS[name].kind)


def numbers(values: Any, name: str) -> NDArray[Any]:
    """[T] numbers of a list, NaN for null; BadRow for anything else."""
    if isinstance(values, (list, tuple)) and set(map(type, values)) <= NUMBERS:
        try:
            values = np.array(values) if None not in values else np.array(values, dtype=np.float64)
            values = values.astype(np.float64) if values.dtype == object else values
        except OverflowError:
            raise BadRow(f"{name} has a number that is too large") from None
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "fiub":
        raise BadRow(f"{name} must be a list of numbers")
    return values


def log_probs(values: Any, name: str) -> Floats:
    """[T] fp64 numbers of a list that must be there."""
    if values is None:
        raise BadRow(f"{name} is missing")
    return numbers(values, name).astype(np.float64)


def whole_numbers(values: Any, name: str) -> NDArray[np.int64]:
    """[T] integers of a list; BadRow for anything else."""
    array = numbers(values, name)
    if not array.size or array.dtype.kind in "iu":
        return array.astype(np.int64, copy=False)
    if array.dtype.kind != "f" or not (np.abs(array) < 2**53).all() or (array != np.rint(array)).any():
        raise BadRow(f"{name} must be a list of integers")
    return array.astype(np.int64)


def flags(values: Any, name: str) -> NDArray[np.bool_]:
    """[T] flags of a list of booleans or numbers, where 0 means False; BadRow for null and for anything else."""
    array = numbers(values, name)
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise BadRow(f"{name} must be a list of flags")
    return array.astype(bool)


def size(value: Any, name: str) -> int:
    """A count; BadRow unless it is a whole number of at least 0."""
    if not _is_number(value) or not 0 <= value < 2**53 or value != int(value):
        raise BadRow(f"{name} must be a whole number")
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def one_value(value: Any, name: str, kind: str) -> Any:
    """A value of a sequence, converted to the kind of its column."""
    if kind == "text":
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise BadRow(f"{name} must be a text of at most {MAX_TEXT} characters")
        return printable(value)
    if not _is_number(value):
        raise BadRow(f"{name} must be a number")
    if kind == "id":
        if not np.isfinite(value) or value != int(value) or abs(value) >= 2**63:
            raise BadRow(f"{name} must be an integer")
        return int(value)
    try:
        return float(value)
    except OverflowError:
        raise BadRow(f"{name} must be a number") from None


def checked(chunk: Chunk, where: Callable[[int], str], corrupt: CorruptRows) -> Chunk:
    """A chunk without the rows whose loss tokens lack a value, and without the columns of sequences that lack one.

    Log-probs stay as they are: damage to them is evidence. ``where`` turns the number of a row in the chunk into the
    name that messages use.
    """
    gaps = {n for n, v in chunk.sequences.items() if v.dtype.kind == "f" and not np.isfinite(v).all()}
    if gaps:
        chunk = replace(chunk, sequences={n: v for n, v in chunk.sequences.items() if n not in gaps})
    counts = chunk.tokens.get("loss_mask", np.ones(chunk.log_pi.size, dtype=bool))
    bad = np.zeros(chunk.num_sequences, dtype=bool)
    for name, values in chunk.tokens.items():
        if values.dtype.kind != "f" or np.isfinite(values).all():
            continue
        missing = counts & ~np.isfinite(values)
        rows = np.bincount(chunk.sequence_of[missing], minlength=bad.size) > 0
        for row in np.flatnonzero(rows & ~bad):
            corrupt.add(f"{where(int(row))}: {name} must be a number at every loss token")
        bad |= rows
    return chunk.select_sequences(~bad) if bad.any() else chunk


def packed(rows: Iterable[tuple[str, Callable[[], Row]]], corrupt: CorruptRows) -> Iterator[Chunk]:
    """Yield rows as chunks of about CHUNK_TOKENS; of a damaged file, the rows before the damage.

    ``rows``: the file and number of each, and a function that reads it; a damaged row is counted and left out.
    """
    places: list[str] = []
    waiting: list[Row] = []
    tokens = 0
    try:
        for place, read in rows:
            try:
                row = read()
            except (BadRow, UnreadableFile) as error:
                corrupt.add(f"{place}: {error}")
                continue
            places.append(place)
            waiting.append(row)
            tokens += row.log_pi.size
            if tokens >= CHUNK_TOKENS:
                yield from _chunk(waiting, places, corrupt)
                places, waiting, tokens = [], [], 0
    except UnreadableFile:
        yield from _chunk(waiting, places, corrupt)
        raise
    yield from _chunk(waiting, places, corrupt)


def check_sizes(columns: Mapping[str, NDArray[Any]], size: int, says: str) -> None:
    """Raise BadRow for a column whose size is not ``size``; ``says`` tells where that number is from."""
    for name, values in columns.items():
        if values.size != size:
            raise BadRow(f"{name} has {values.size} values, {says} {size}")


def trained_span(mask: NDArray[np.bool_]) -> slice:
    """From the first token with loss to the last one; empty without any."""
    trained = np.flatnonzero(mask)
    return slice(int(trained[0]), int(trained[-1]) + 1) if trained.size else slice(0, 0)


def _chunk(rows: list[Row], places: list[str], corrupt: CorruptRows) -> Iterator[Chunk]:
    """The chunk of some rows with the columns that all of them have; nothing when no row is whole."""
    if not rows:
        return
    chunk = Chunk(
        np.concatenate([row.log_pi for row in rows]),
        np.concatenate([row.log_mu for row in rows]),
        np.cumsum([0, *(row.log_pi.size for row in rows)]),
        {name: np.concatenate([row.tokens[name] for row in rows]) for name in common([row.tokens for row in rows])},
        {name: np.array([row.sequence[name] for row in rows]) for name in common([row.sequence for row in rows])},
    )
    chunk = checked(chunk, places.__getitem__, corrupt)
    if chunk.num_sequences:
        yield chunk
