"""NeMo-RL's ``train_data_step*.jsonl``: one sample per line, each value inside a list of length one."""

import re
from collections.abc import Iterator
from typing import Any

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.readers import rows
from megatron_rc.analyze.readers.dump import CorruptRows, Group
from megatron_rc.analyze.readers.format import Format
from megatron_rc.analyze.readers.json_lines import read_rows

LOG_PI, LOG_MU, MASK = "prev_logprobs", "generation_logprobs", "token_loss_mask"


def read(group: Group, corrupt: CorruptRows) -> Iterator[Chunk]:
    """Yield the chunks of one file; the step is in its name."""
    numbered = re.search(r"step(\d{1,15})", group[0].name)
    step = int(numbered[1]) if numbered else None
    return read_rows(lambda record: row_of(record, step), group, corrupt)


FORMAT = Format("nemo-rl", "NeMo-RL train data", "jsonl", (frozenset({LOG_PI, LOG_MU, MASK}),), read)


def row_of(record: dict[str, Any], step: int | None) -> rows.Row:
    """The response of a record: from the first token with loss to the last one."""
    log_pi, log_mu = (rows.log_probs(single(record.get(name)), name) for name in (LOG_PI, LOG_MU))
    mask = rows.flags(single(record.get(MASK)), MASK)
    if not log_pi.size == log_mu.size == mask.size:
        raise rows.BadRow(f"{LOG_PI}, {LOG_MU} and {MASK} have {log_pi.size}, {log_mu.size} and {mask.size} values")
    span = rows.trained_span(mask)
    counted = rows.flags(record.get("sample_loss_mask", [1]), "sample_loss_mask")
    tokens: dict[str, Any] = {"loss_mask": mask[span] & bool(counted.all())}
    sequence: dict[str, Any] = {"prompt_length": span.start}
    if record.get("token_ids") is not None:
        ids = rows.whole_numbers(single(record["token_ids"]), "token_ids")
        rows.check_sizes({"token_ids": ids}, mask.size, f"{MASK} has")
        tokens["token_id"] = ids[span]
    if record.get("advantages") is not None:
        advantages = rows.numbers(single(record["advantages"], lists=False), "advantages")
        if advantages.size == 1 != mask.size:
            sequence["advantage"] = advantages[0]
        else:
            rows.check_sizes({"advantages": advantages}, mask.size, f"{MASK} has")
            tokens["advantage"] = advantages[span]
    # with dynamic sampling, rewards are those from before the filter, and belong to other rows
    reward = record.get("filtered_rewards", record.get("rewards"))
    if reward is not None:
        sequence["reward"] = single(reward)
    if step is not None:
        sequence["step"] = step
    return rows.Row(log_pi[span], log_mu[span], tokens, sequence)


def single(value: Any, *, lists: bool = True) -> Any:
    """The value inside a list of one; a list of numbers stays as it is unless ``lists``."""
    if isinstance(value, list) and len(value) == 1 and (lists or isinstance(value[0], list)):
        return value[0]
    return value
