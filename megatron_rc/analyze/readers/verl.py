"""What the hook integrations/verl/dump.py saves in a run of verl: one torch file per step, padded."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.readers import rows
from megatron_rc.analyze.readers.dump import CorruptRows, Group, UnreadableFile
from megatron_rc.analyze.readers.format import Format
from megatron_rc.analyze.readers.torch_file import TorchFile, item_of, length_of, value_of

LOG_PI, LOG_MU, MASK = "old_log_probs", "rollout_log_probs", "response_mask"
IDS, ENTROPY, TASKS = "responses", "entropy", "data_source"


def read(group: Group, corrupt: CorruptRows) -> Iterator[Chunk]:
    """Yield the chunks of one file; UnreadableFile unless it is a whole one of the hook."""
    (file,) = group
    saved = TorchFile(file).load()
    count = length_of(saved.get(MASK)) if type(saved) is dict else None
    if count is None or any(length_of(saved.get(name)) != count for name in (LOG_PI, LOG_MU)):
        raise UnreadableFile(f"{file} must hold {LOG_PI}, {LOG_MU} and {MASK} with one row per response")
    names = [name for name in (LOG_PI, LOG_MU, MASK, IDS, ENTROPY) if length_of(saved.get(name)) == count]
    reads = ((f"{file}, row {index}", partial(_row_of, saved, names, index)) for index in range(count))
    yield from rows.packed(reads, corrupt)


FORMAT = Format("verl", "verl dump of the hook", "torch", (frozenset({LOG_PI, LOG_MU, MASK}),), read)


def _row_of(saved: dict[str, Any], names: list[str], index: int) -> rows.Row:
    """The response of a row, up to its last token with loss."""
    values = {name: value_of(item_of(saved[name], index)) for name in names}
    mask = rows.flags(values[MASK], MASK)
    end = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
    columns: dict[str, Any] = {name: rows.log_probs(values[name], name) for name in (LOG_PI, LOG_MU)}
    if IDS in values:
        columns["token_id"] = rows.whole_numbers(values[IDS], IDS)
    if ENTROPY in values:
        columns["entropy"] = rows.numbers(values[ENTROPY], ENTROPY)
    rows.check_sizes(columns, mask.size, f"{MASK} has")
    log_pi, log_mu, *others = (column[:end] for column in columns.values())
    tokens = dict(zip([*columns][2:], others, strict=True))
    known = {} if saved.get("step") is None else {"step": saved["step"]}
    tasks = saved.get(TASKS)
    known |= {"task": tasks[index]} if type(tasks) is list and len(tasks) == length_of(saved[MASK]) else {}
    return rows.Row(log_pi, log_mu, {**tokens, "loss_mask": mask[:end]}, known)
