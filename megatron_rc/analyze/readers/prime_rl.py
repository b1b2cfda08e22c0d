"""prime-rl's token exports, ``token_exports/step_N/rank_R.jsonl``: one sequence per line."""

from functools import partial
from typing import Any

from megatron_rc.analyze.readers import rows
from megatron_rc.analyze.readers.format import Format
from megatron_rc.analyze.readers.json_lines import read_rows

LOG_PI, LOG_MU, MASK = "trainer_logprobs", "inference_logprobs", "loss_mask"
TOKENS = {"entropy": "entropy", "advantage": "advantages"}
SEQUENCE = {"step": "step", "train_rank": "rank", "pack_position": "micro_sequence_idx", "task": "env_name"}
"""Columns of tokens and of sequences by their name here, with the name in the file."""


def row_of(record: dict[str, Any]) -> rows.Row:
    """The response of a record: from the first token with loss to the last one."""
    log_pi, log_mu = (rows.log_probs(record.get(name), name) for name in (LOG_PI, LOG_MU))
    mask = rows.flags(record.get(MASK), MASK)
    columns = {name: rows.numbers(record[key], key) for name, key in TOKENS.items() if record.get(key) is not None}
    if record.get("token_ids") is not None:
        columns["token_id"] = rows.whole_numbers(record["token_ids"], "token_ids")
    rows.check_sizes({LOG_PI: log_pi, LOG_MU: log_mu, **columns}, mask.size, f"{MASK} has")
    # tokens that only the cross-entropy or the reference term uses have no log-prob of the sampler
    weights = record.get("rl_weights")
    if weights is not None:
        weights = rows.numbers(weights, "rl_weights")
        # null means a weight of 1 for every token
        mask = mask & (weights != 0) if weights.size == mask.size else mask
    span = rows.trained_span(mask)
    known = {name: record[key] for name, key in SEQUENCE.items() if record.get(key) is not None}
    tokens = {name: values[span] for name, values in {**columns, "loss_mask": mask}.items()}
    return rows.Row(log_pi[span], log_mu[span], tokens, {"prompt_length": span.start, **known})


SHOWS = frozenset({LOG_PI, LOG_MU, MASK})
FORMAT = Format("prime-rl", "prime-rl token export", "jsonl", (SHOWS,), partial(read_rows, row_of))
