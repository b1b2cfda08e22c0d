"""The answers of the faulty server: what a good one is, and how it can be damaged."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

VOCABULARY, LAYERS, TOP_K, EXPERTS = 37, 2, 3, 8


def token_at(ids: Sequence[int], position: int) -> int:
    """Follows from the first two ids and the position, so that it says which prompt it answers."""
    return (5 * ids[0] + 11 * ids[1] + 3 * position) % VOCABULARY


def tokens_after(prompt: Sequence[int], count: int) -> list[int]:
    return [token_at(prompt, len(prompt) + i) for i in range(count)]


def logprob_of(token: int) -> float:
    return -(token + 1) / 8


def kept_ids(token: int) -> list[int]:
    return [(token + 5) % VOCABULARY, token]


def routes_of(rows: range) -> np.ndarray:
    """[rows, layers, k] int32: the row number tells the experts."""
    first = np.arange(rows.start, rows.stop, dtype=np.int32)[:, None, None]
    return ((first + np.arange(LAYERS)[:, None] + np.arange(TOP_K)) % EXPERTS).astype(np.int32)


def answer_to(body: dict[str, Any], count: int, version: str, *, aborted: bool) -> dict[str, Any]:
    """A good answer to a request, with ``count`` tokens unless one of its stop tokens comes first."""
    ids, stop_ids = body["input_ids"], body["sampling_params"].get("stop_token_ids", ())
    output = tokens_after(ids, count)
    stops = [i for i, token in enumerate(output) if token in stop_ids]
    output = output[: stops[0] + 1] if stops else output
    finish: dict[str, Any] = {"type": "length", "length": len(output)}
    if aborted:
        finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    elif stops:
        finish = {"type": "stop", "matched": output[-1]}
    meta: dict[str, Any] = {
        "id": body.get("rid", ""), "finish_reason": finish, "num_retractions": 0,
        "prompt_tokens": len(ids), "completion_tokens": len(output), "output_token_logprobs_length": len(output),
        "weight_version": version, "weight_versions": [{"version": version, "start": 0, "end": len(output)}],
        "output_token_logprobs": [[logprob_of(token), token, None] for token in output],
    }  # fmt: skip
    if body.get("return_sampling_mask"):
        meta["output_token_sampling_mask"] = [kept_ids(token) for token in output]
        meta["output_token_sampling_logprobs"] = [logprob_of(token) / 2 for token in output]
        meta["output_token_sampling_mask_length"] = len(output)
    if k := body.get("top_logprobs_num"):
        meta["output_top_logprobs"] = [
            [[-float(rank + 2), (token + rank) % VOCABULARY, None] for rank in range(k)] for token in output
        ]
    if body.get("return_routed_experts"):
        rows = range(body.get("routed_experts_start_len", 0), len(ids) + len(output) - 1)
        meta["routed_experts"] = base64.b64encode(routes_of(rows).tobytes()).decode()
    return {"output_ids": output, "meta_info": meta}


FIELDS = {
    "missing_logprobs": ("output_token_logprobs", None), "other_request": ("id", "0" * 32),
    "strange_finish": ("finish_reason", {"type": "tired"}), "retracted": ("num_retractions", 1),
    "no_support": ("output_token_sampling_mask", None), "no_top": ("output_top_logprobs", None),
}  # fmt: skip
"""Damage -> a field of meta_info and its value."""
LAST = {"nan": float("nan"), "-inf": float("-inf"), "null": None, "text": "-1.0", "positive": 0.5}
"""Damage -> the last log-prob."""


def damaged(answer: dict[str, Any], damage: str) -> Any:
    meta, output = answer["meta_info"], answer["output_ids"]
    logprobs, routes = meta["output_token_logprobs"], base64.b64decode(meta.get("routed_experts", ""))
    support, top = meta.get("output_token_sampling_mask"), meta.get("output_top_logprobs")
    if damage in FIELDS:
        meta.update([FIELDS[damage]])
    elif damage in LAST:
        logprobs[-1][0] = LAST[damage]
    elif damage in ("prompt_tokens", "completion_tokens"):
        meta[damage] += 1
    elif damage == "extra_logprob":
        logprobs.append([-1.0, 0, None])
    elif damage == "too_many":
        output.append(0)
        logprobs.append([-1.0, 0, None])
        meta["completion_tokens"] += 1
    elif damage in ("phantom", "empty"):
        answer["output_ids"], meta["completion_tokens"], logprobs[:] = [], 0, logprobs[: damage == "phantom"]
    elif damage == "other_logprobs":
        for entry in logprobs:
            entry[0] -= 1
    elif damage == "other_token":
        logprobs[-1][1] = (output[-1] + 1) % VOCABULARY
    elif damage == "outside_vocabulary":
        output[-1] = logprobs[-1][1] = VOCABULARY
    elif damage == "list":
        return [answer]
    elif damage == "no_meta":
        del answer["meta_info"]
    elif damage == "gap_in_versions":
        meta["weight_versions"][0]["start"] = 1
    elif damage == "short_support":
        support.pop()
    elif damage == "foreign_support":
        support[-1].remove(output[-1])
    elif damage == "repeated_support":
        support[-1].append(output[-1])
    elif damage == "short_top":
        top[-1].pop()
    elif damage == "nan_top":
        top[-1][-1][0] = None
    elif damage == "heavy_top":
        top[-1][0][0] = top[-1][1][0] = -0.1
    elif damage == "repeated_top":
        top[-1][0][1] = top[-1][1][1]
    elif damage == "wild_top":
        top[-1][0][1] = VOCABULARY
    elif damage == "no_routes":
        del meta["routed_experts"]
    elif damage == "short_routes":
        meta["routed_experts"] = base64.b64encode(routes[:-4]).decode()
    elif damage == "wild_routes":
        meta["routed_experts"] = base64.b64encode((np.frombuffer(routes, np.int32) + EXPERTS).tobytes()).decode()
    elif damage in ("other_probe", "positive_probe"):
        for entry in meta["input_token_logprobs"][1:]:
            entry[0] = entry[0] - 1 if damage == "other_probe" else 0.5
    else:
        raise ValueError(f"no such fault: {damage}")
    return answer
