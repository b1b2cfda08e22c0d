"""Rows from the training samples of slime and miles, which have the same columns in both hosts.

A sample from before training, where the dump has it, adds columns to the row.
Their ``rewards`` are normalised within the group and are not read.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.chunk import Floats
from megatron_rc.analyze.readers import rows
from megatron_rc.analyze.readers.torch_file import value_of
from megatron_rc.analyze.statistics.draws import columns_of

LOG_PI, LOG_MU = "log_probs", "rollout_log_probs"
PER_TOKEN = {"loss_mask": "loss_masks", "entropy": "entropy", "advantage": "advantages"}
"""Columns of response tokens by their name here, with the host's name."""

FINISH_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "failed"}
"""Finish reasons by the status of a sample before training."""

TOP_IDS, TOP = "rollout_topk_token_ids", "rollout_topk_log_probs"
"""Most probable ids of miles' sampler, [response, k], and their log-probs."""

READ = (LOG_PI, LOG_MU, TOP_IDS, TOP, *PER_TOKEN.values(), "tokens", "response_lengths", "total_lengths", "truncated",
        "weight_versions")  # fmt: skip
"""Columns that are read from disk."""


def row_of(sample: Mapping[str, Any], known: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> rows.Row:
    """The response of a sample, with the columns ``known`` from elsewhere in the file and those from ``before``."""
    # routes and images may be many times as large as all of these
    values = {name: value_of(sample[name]) for name in READ if name in sample}
    response, total = (rows.size(values.get(name), name) for name in ("response_lengths", "total_lengths"))
    log_pi, log_mu = (rows.log_probs(values.get(name), name) for name in (LOG_PI, LOG_MU))
    columns = {name: values[key] for name, key in PER_TOKEN.items() if values.get(key) is not None}
    tokens = {n: (rows.flags if n == "loss_mask" else rows.numbers)(v, PER_TOKEN[n]) for n, v in columns.items()}
    if values.get("tokens") is not None:
        ids = rows.whole_numbers(values["tokens"], "tokens")
        rows.check_sizes({"tokens": ids}, total, "total_lengths says")
        tokens["token_id"] = ids[total - response :]
    rows.check_sizes({LOG_PI: log_pi, LOG_MU: log_mu, **tokens}, response, "response_lengths says")
    if values.get(TOP) is not None:
        tokens |= _draws(values.get(TOP_IDS), values[TOP], log_mu, tokens.get("token_id"))
    if total < response:
        raise rows.BadRow(f"total_lengths says {total}, response_lengths says {response}")
    versions = values.get("weight_versions")
    sequence: dict[str, Any] = {"prompt_length": total - response}
    if values.get("truncated") is not None:
        sequence["finish_reason"] = "length" if rows.size(values["truncated"], "truncated") else "stop"
    if before is not None:
        sequence |= columns_before(before, total - response)
        versions = before.get("weight_versions", versions)
    if numbers := whole_versions(versions):
        # the version counts the weight syncs of a job
        sequence["syncs"] = max(numbers)
        # the host does not say which tokens belong to which turn
        if len(set(numbers)) == 1:
            tokens["version"] = np.full(response, numbers[0], dtype=np.int64)
    return rows.Row(log_pi, log_mu, tokens, {**sequence, **known})


def _draws(ids: Any, top: Any, log_mu: Floats, token_id: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
    arrays = [v for v in (ids, top) if isinstance(v, np.ndarray) and v.ndim == 2 and len(v) == log_mu.size]
    if len(arrays) < 2 or ids.shape != top.shape or ids.dtype.kind not in "iu" or top.dtype.kind != "f":
        raise rows.BadRow(f"{TOP_IDS} must be ids, and {TOP} as many numbers, of every response token")
    return columns_of(top, log_mu, np.array([0, len(ids)]), top_ids=ids, token_id=token_id)


def columns_before(sample: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
    """The columns of the sequence that a sample before training knows.

    The host adds up the cached tokens of all requests of a sample, so ``cached_tokens`` is the cached share of their
    prompts times the length of the first one; with a single request, it is the host's number.
    """
    known: dict[str, Any] = {}
    if type(sample.get("group_index")) is int:
        known["group"] = sample["group_index"]
    if type(sample.get("reward")) in (int, float):
        known["reward"] = sample["reward"]
    status = sample.get("status")
    if isinstance(status, str) and status in FINISH_REASONS:
        known["finish_reason"] = FINISH_REASONS[status]
    cache = sample.get("prefix_cache_info")
    if type(cache) is dict:
        cached, prompts = (rows.size(cache.get(name, 0), name) for name in ("cached_tokens", "total_prompt_tokens"))
        # a host whose server reports nothing has 0 of 0
        if prompts:
            known["cached_tokens"] = cached * prompt_length / prompts
    return known


def whole_versions(versions: Any) -> list[int]:
    """The versions of the weights of a sample's requests; empty if one of them is not a number."""
    if not isinstance(versions, list):
        return []
    texts = [str(version) if type(version) is int and 0 <= version < 2**53 else version for version in versions]
    numbers = all(isinstance(t, str) and t.isascii() and t.isdecimal() and len(t) < 18 for t in texts)
    return [int(text) for text in texts] if numbers else []
