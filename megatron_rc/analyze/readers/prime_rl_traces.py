"""prime-rl's trace stream with the trainer's annotations, ``monitors/file/traces``.

``stream/*.jsonl`` holds each episode as it arrived: traces of messages, each with its tokens and the log-probs of the
sampled ones. ``annotations/*/*.jsonl`` holds what the trainer and the orchestrator computed later, by trace and branch:
one value per token from the first message of the branch on, null where the token was not trained on. The trainer's
values end early where it cut the sequence. Finished files end in .zst.
"""

import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rc.analyze.chunk import Chunk, Floats
from megatron_rc.analyze.readers import rows
from megatron_rc.analyze.readers.dump import CorruptRows, Group, UnreadableFile
from megatron_rc.analyze.readers.format import Format
from megatron_rc.analyze.readers.json_lines import lines, parsed

LOG_PI, ENTROPY, ADVANTAGE = STREAMS = ("trainer_logprobs", "entropies", "advantages")


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
                yield from rows.packed(_rows(path, notes, corrupt), corrupt)
            except UnreadableFile as error:
                corrupt.add_file(str(error))


SHOWS = (frozenset({"traces"}), frozenset({"trace_id", "branches"}))
# all files together: an annotation may come anywhere after its trace
FORMAT = Format("prime-rl-traces", "prime-rl trace stream", "jsonl", SHOWS, read, lambda files: [tuple(files)])


class Annotations:
    """What the trainer and the orchestrator wrote about each branch; it is as long as the dump, so it is on disk."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._notes: dict[str, dict[tuple[str, int], tuple[int, int]]] = {name: {} for name in STREAMS}
        """Where the values of each branch begin in the file, and how many there are."""
        self.steps: dict[str, int] = {}
        """The step of the batch that a trace was trained in, where the orchestrator wrote it."""
        self._end = 0

    def add(self, record: dict[str, Any]) -> None:
        """Add the branches of a record, which replace those of an earlier one; BadRow if it is not an annotation."""
        trace, branches, info = record.get("trace_id"), record.get("branches"), record.get("info")
        if not isinstance(trace, str) or not isinstance(branches, list):
            raise rows.BadRow("trace_id must be a text and branches a list")
        for branch in branches:
            if not isinstance(branch, dict) or type(branch.get("index")) is not int:
                raise rows.BadRow("branches must be a list of objects with an index")
            values = {name: rows.log_probs(branch[name], name) for name in STREAMS if branch.get(name) is not None}
            if LOG_PI in values:
                if ENTROPY in values:
                    rows.check_sizes({ENTROPY: values[ENTROPY]}, values[LOG_PI].size, f"{LOG_PI} has")
                # the entropy of an earlier pass does not belong to these log-probs
                self._notes[ENTROPY].pop((trace, branch["index"]), None)
            for name, stream in values.items():
                self._file.seek(self._end)
                self._notes[name][trace, branch["index"]] = self._end, stream.size
                self._end += self._file.write(stream.tobytes())
        batch = info.get("ship") if isinstance(info, dict) else None
        if isinstance(batch, dict) and type(batch.get("step")) is int:
            self.steps[trace] = batch["step"]

    def __bool__(self) -> bool:
        return bool(self._notes[LOG_PI])

    def of(self, trace: str, branch: int) -> dict[str, Floats]:
        """Values of the tokens of a branch by the name in the file; NaN where the trainer did not train on them."""
        values = {}
        for name, notes in self._notes.items():
            if (trace, branch) in notes:
                offset, size = notes[trace, branch]
                self._file.seek(offset)
                values[name] = np.frombuffer(self._file.read(8 * size))
        return values


def _is_annotations(path: Path, notes: Annotations, corrupt: CorruptRows) -> bool:
    """Add the records of a file of annotations; False after one line for a file of episodes."""
    found = False
    try:
        for number, line in lines(path):
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


def _rows(path: Path, notes: Annotations, corrupt: CorruptRows) -> Iterator[tuple[str, Callable[[], rows.Row]]]:
    for number, line in lines(path):
        place = f"{path}, line {number}"
        try:
            episode = parsed(line)
            traces = episode.get("traces") or []
            if not isinstance(traces, list) or not all(isinstance(trace, dict) for trace in traces):
                raise rows.BadRow("traces must be a list of objects")
        except rows.BadRow as error:
            corrupt.add(f"{place}: {error}")
            continue
        for trace in traces:
            nodes, name = trace.get("nodes"), trace.get("id")
            if isinstance(name, str) and isinstance(nodes, list) and all(isinstance(node, dict) for node in nodes):
                parents = {node.get("parent") for node in nodes if isinstance(node.get("parent"), int)}
                leaves = (at for at in range(len(nodes)) if at not in parents)
                for index, leaf in enumerate(leaves):
                    if LOG_PI in (note := notes.of(name, index)):
                        step = {"step": notes.steps[name]} if name in notes.steps else {}
                        yield place, partial(_row, trace, episode, leaf, note, step)
            else:
                corrupt.add(f"{place}: a trace must have an id and a list of nodes")


def _path(nodes: list[dict[str, Any]], leaf: int) -> list[dict[str, Any]]:
    """The messages of a branch from the first to the last; BadRow where parents form a circle, or one is missing."""
    path, at = [], leaf
    while True:
        path.append(nodes[at])
        parent = nodes[at].get("parent")
        if parent is None:
            return path[::-1]
        # a parent comes before its children
        if type(parent) is not int or not 0 <= parent < at:
            raise rows.BadRow(f"the parent of node {at} must come before it")
        at = parent


def _row(
    trace: dict[str, Any], episode: dict[str, Any], leaf: int, note: dict[str, Floats], step: dict[str, int]
) -> rows.Row:
    """The response of a branch: from the first trained token to the last one."""
    path, log_pi = _path(trace["nodes"], leaf), note[LOG_PI]
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
    span = rows.trained_span(mask)
    tokens: dict[str, Any] = {"loss_mask": mask[span], "token_id": ids[span]}
    if ENTROPY in note:
        tokens["entropy"] = note[ENTROPY][span]
    if ADVANTAGE in note:
        rows.check_sizes({ADVANTAGE: note[ADVANTAGE]}, ids.size, "token_ids has")
        tokens["advantage"] = note[ADVANTAGE][span]
    tokens["turn"] = np.repeat(np.arange(len(path)), [len(node.get("token_ids") or []) for node in path])[span]
    return rows.Row(
        log_pi[span], log_mu[span], tokens, {"prompt_length": span.start, **_sequence(trace, episode), **step}
    )


def _sequence(trace: dict[str, Any], episode: dict[str, Any]) -> dict[str, Any]:
    """The columns of a trace: its reward, as prime-rl weighs its parts, and a number for its prompt group."""
    sequence: dict[str, Any] = {}
    rewards = trace.get("rewards")
    parts = [part for part in rewards.values() if isinstance(part, dict)] if isinstance(rewards, dict) else []
    if parts:
        weights = [1 if part.get("weight") is None else part["weight"] for part in parts]
        values = rows.numbers([part.get("score") or 0 for part in parts], "rewards")
        sequence["reward"] = float(values @ rows.numbers(weights, "rewards"))
    environment = episode.get("env")
    if isinstance(environment, dict) and isinstance(name := environment.get("name"), str):
        sequence["task"] = name
    group = episode.get("group")
    if isinstance(group, dict) and group.get("id") is not None:
        sequence["group"] = zlib.crc32(str(group["id"])[: rows.MAX_TEXT].encode())
    return sequence
