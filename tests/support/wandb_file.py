"""Reader of the file that an offline run of Weights & Biases leaves behind: records of a LevelDB log."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, FILE_HEADER, RECORD_HEADER = 32768, 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """The protobuf records of a .wandb file, without what a crash has torn."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), FILE_HEADER, b""
    while place + RECORD_HEADER <= len(data):
        if BLOCK - place % BLOCK < RECORD_HEADER:  # too small for a header: padding
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + RECORD_HEADER])
        place += RECORD_HEADER
        assert kind in (FULL, FIRST, MIDDLE, LAST)
        parts = (b"" if kind in (FULL, FIRST) else parts) + data[place : place + length]
        place += length
        if kind in (FULL, LAST) and place <= len(data):
            yield Record.FromString(parts)


def history(path: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, metrics) of every logged step."""
    return [
        (r.history.step.num, {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item})
        for r in records(path)
        if r.WhichOneof("record_type") == "history"
    ]
