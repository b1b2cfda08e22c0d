"""The columns of this package's Parquet dump as JSON lines, one response per line."""

from functools import partial
from typing import Any

from numpy.typing import NDArray

from megatron_rc.analyze.columns import READ_TOKEN_COLUMNS, SEQUENCE_COLUMNS
from megatron_rc.analyze.readers import rows
from megatron_rc.analyze.readers.format import Format
from megatron_rc.analyze.readers.json_lines import read_rows
from megatron_rc.analyze.readers.parquet_columns import LOG_MU, LOG_PI, PROMPT, RENAMED, VERSIONS, versions


def row_of(record: dict[str, Any]) -> rows.Row:
    """The response of a record; a column without a value is absent."""
    log_pi, log_mu = (rows.log_probs(record.get(name), name) for name in (LOG_PI, LOG_MU))
    tokens: dict[str, NDArray[Any]] = {}
    sequence = {}
    for name, column in READ_TOKEN_COLUMNS.items():
        value = record.get(RENAMED.get(name, name))
        # advantage may be per token or per sequence: a list is per token
        if value is None or (name in SEQUENCE_COLUMNS and not isinstance(value, list)):
            continue
        tokens[name] = KINDS.get(column.kind, rows.numbers)(value, name)
    for name in SEQUENCE_COLUMNS:
        if name not in tokens and record.get(name) is not None:
            sequence[name] = record[name]
    if isinstance(record.get(PROMPT), list):
        sequence.setdefault("prompt_length", len(record[PROMPT]))
    if "version" not in tokens and (spans := record.get(VERSIONS)) is not None:
        tokens["version"] = versions(spans, log_mu.size)
    return rows.Row(log_pi, log_mu, tokens, sequence)


KINDS = {"flag": rows.flags, "id": rows.whole_numbers}
"""Readers of token columns that are not plain numbers."""


SHOWS = frozenset({LOG_PI, LOG_MU})
FORMAT = Format("jsonl", "megatron-rc JSON lines", "jsonl", (SHOWS,), partial(read_rows, row_of))
