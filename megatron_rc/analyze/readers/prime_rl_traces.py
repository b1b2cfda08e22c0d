"""prime-rl's trace stream with the trainer's annotations, ``monitors/file/traces``.

``stream/*.jsonl`` holds each episode as it arrived: traces of messages, each with its tokens and the log-probs of the
sampled ones. ``annotations/*/*.jsonl`` holds what the trainer computed later, by trace and branch: one value per token
from the first message of the branch on, null where the token was not trained on. It ends early where the trainer cut
the sequence. Finished files end in .zst.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_rc.analyze.chunk import Chunk, Floats
from megatron_rc.analyze.readers import rows
from megatron_rc.analyze.readers.dump import CorruptRows, Group, UnreadableFile
from megatron_rc.analyze.readers.format import Format
from megatron_rc.analyze.readers.json_lines import lines, parsed

LOG_PI, ENTROPY = "trainer_logprobs", "entropies"


def groups(files: list[Path]) -> list[Group]:
    """All files together: an annotation may stand anywhere after its trace."""
    return [tuple(files)]


def read(group: Group, corrupt: CorruptRows) -> Iterator[Chunk]:
    """Yield the chunks of all episodes with annotations of the trainer; those that were not trained on are skipped."""
    with tempfile.TemporaryFile() as file:
        notes = Annotations(file)
        streams = [path for path in group if not _is_annotations(path, notes, corrupt)]
        if not notes:
            raise UnreadableFile(
                f"{group[0]}: no annotation of the trainer is there; give the folder traces as a whole or token_exports"
            )
        for path in streams:
            try:
                yield from rows.packed(_rows(path, notes), corrupt)
            except UnreadableFile as error:
                corrupt.add_file(str(error))


FORMAT = Format(
    "prime-rl-traces",
    "prime-rl trace stream",
    "jsonl",
    (frozenset({"traces"}), frozenset({"trace_id", "branches"})),
    read,
    groups,
)


class Note(NamedTuple):
    """Where the values of a branch lie in the file."""

    offset: int
    size: int
    has_entropy: bool


class Annotations:
    """What the trainer said of each branch, on disk, because it is as long as the dump."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._notes: dict[tuple[str, int], Note] = {}
        self._end = 0

    def add(self, record: dict[str, Any]) -> None:
        """Add the branches of a record; a later one replaces an earlier one.

        Raises:
            BadRow: not such a record.
        """
        trace, branches = record.get("trace_id"), record.get("branches")
        if not isinstance(trace, str) or not isinstance(branches, list):
            raise rows.BadRow("trace_id must be a text and branches a list")
        for branch in branches:
            if not isinstance(branch, dict) or type(branch.get("index")) is not int:
                raise rows.BadRow("branches must be a list of objects with an index")
            if branch.get(LOG_PI) is None:
                continue
            values = [rows.log_probs(branch[LOG_PI], LOG_PI)]
            if branch.get(ENTROPY) is not None:
                values.append(rows.log_probs(branch[ENTROPY], ENTROPY))
                if values[1].size != values[0].size:
                    raise rows.BadRow(f"{ENTROPY} has {values[1].size} values, {LOG_PI} has {values[0].size}")
            raw = np.concatenate(values).tobytes()
            self._file.seek(self._end)
            self._file.write(raw)
            self._notes[trace, branch["index"]] = Note(self._end, values[0].size, len(values) > 1)
            self._end += len(raw)

    def __bool__(self) -> bool:
        return bool(self._notes)

    def of(self, trace: str, branch: int) -> tuple[Floats, Floats | None] | None:
        """Log pi and entropy of the tokens of a branch, NaN where the trainer did not train on them."""
        note = self._notes.get((trace, branch))
        if note is None:
            return None
        self._file.seek(note.offset)
        values = np.frombuffer(self._file.read(8 * note.size * (1 + note.has_entropy)))
        return values[: note.size], values[note.size :] if note.has_entropy else None


def _is_annotations(path: Path, notes: Annotations, corrupt: CorruptRows) -> bool:
    """Add the records of a file of annotations; False for a file of episodes, of which one line is read."""
    found = False
    try:
        for number, line in enumerate(lines(path), 1):
            if not line.strip():
                continue
            try:
                record = parsed(line)
                if "traces" in record and not found:
                    return False
                found = True
                notes.add(record)
            except rows.BadRow as error:
                if not found:
                    return False
                corrupt.add(f"{path}, line {number}: {error}")
    except UnreadableFile as error:
        if not found:
            return False
        corrupt.add_file(str(error))
    return found


def _rows(path: Path, notes: Annotations) -> Iterator[tuple[str, rows.Row | rows.BadRow]]:
    for number, line in enumerate(lines(path), 1):
        if not line.strip():
            continue
        try:
            episode = parsed(line)
            traces = episode.get("traces") or []
            if not isinstance(traces, list) or not all(isinstance(trace, dict) for trace in traces):
                raise rows.BadRow("traces must be a list of objects")
        except rows.BadRow as error:
            yield f"{path}, line {number}", error
            continue
        for trace in traces:
            for row in _branches(trace, episode, notes):
                yield f"{path}, line {number}", row


def _branches(trace: dict[str, Any], episode: dict[str, Any], notes: Annotations) -> Iterator[rows.Row | rows.BadRow]:
    nodes, name = trace.get("nodes"), trace.get("id")
    if not isinstance(name, str) or not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        yield rows.BadRow("a trace must have an id and a list of nodes")
        return
    for index, leaf in enumerate(_leaves(nodes)):
        note = notes.of(name, index)
        if note is None:
            continue
        try:
            yield _row(_path(nodes, leaf), note, _sequence(trace, episode))
        except rows.BadRow as error:
            yield error


def _leaves(nodes: list[dict[str, Any]]) -> list[int]:
    parents = {node.get("parent") for node in nodes if isinstance(node.get("parent"), int)}
    return [index for index in range(len(nodes)) if index not in parents]


def _path(nodes: list[dict[str, Any]], leaf: int) -> list[dict[str, Any]]:
    """The messages of a branch from the first to the last.

    Raises:
        BadRow: the parents form a circle, or one is missing.
    """
    path, at = [], leaf
    while True:
        path.append(nodes[at])
        parent = nodes[at].get("parent")
        if parent is None:
            return path[::-1]
        # a parent stands before its children
        if type(parent) is not int or not 0 <= parent < at:
            raise rows.BadRow(f"the parent of node {at} must stand before it")
        at = parent


def _row(path: list[dict[str, Any]], note: tuple[Floats, Floats | None], sequence: dict[str, Any]) -> rows.Row:
    """The response of a branch: from the first trained token to the last one."""
    log_pi, entropy = note
    ids = np.concatenate([rows.whole_numbers(node.get("token_ids") or [], "token_ids") for node in path])
    sampled = np.concatenate([rows.flags(node.get("mask") or [], "mask") for node in path])
    logged = np.concatenate([rows.log_probs(node.get("logprobs") or [], "logprobs") for node in path])
    if ids.size != sampled.size or ids.size < log_pi.size:
        raise rows.BadRow(f"token_ids, mask and {LOG_PI} have {ids.size}, {sampled.size} and {log_pi.size} values")
    if logged.size != sampled.sum():
        raise rows.BadRow(f"logprobs has {logged.size} values, mask says {sampled.sum()} sampled tokens")
    log_mu = np.full(ids.size, np.nan)
    log_mu[sampled] = logged
    mask = sampled[: log_pi.size] & ~np.isnan(log_pi)
    trained = np.flatnonzero(mask)
    start, end = (int(trained[0]), int(trained[-1]) + 1) if trained.size else (0, 0)
    tokens: dict[str, Any] = {"loss_mask": mask[start:end], "token_id": ids[start:end]}
    if entropy is not None:
        tokens["entropy"] = entropy[start:end]
    turn = np.repeat(np.arange(len(path)), [len(node.get("token_ids") or []) for node in path])[start:end]
    tokens["turn"] = turn
    return rows.Row(log_pi[start:end], log_mu[start:end], tokens, {"prompt_length": start, **sequence})


def _sequence(trace: dict[str, Any], episode: dict[str, Any]) -> dict[str, Any]:
    """The columns of a trace: its reward, as prime-rl weighs its parts, and a number for its prompt group."""
    sequence: dict[str, Any] = {}
    rewards = trace.get("rewards")
    parts = [part for part in rewards.values() if isinstance(part, dict)] if isinstance(rewards, dict) else []
    if parts:
        weights = [1 if part.get("weight") is None else part["weight"] for part in parts]
        values = rows.numbers([part.get("score") or 0 for part in parts], "rewards")
        sequence["reward"] = float(values @ rows.numbers(weights, "rewards"))
    group = episode.get("group")
    if isinstance(group, dict) and group.get("id") is not None:
        sequence["group"] = zlib.crc32(str(group["id"])[: rows.MAX_TEXT].encode())
    return sequence
