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
        "id": body.get("rid", ""),
        "finish_reason": finish,
        "prompt_tokens": len(ids),
        "completion_tokens": len(output),
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": len(output)}],
        "num_retractions": 0,
        "output_token_logprobs": [[logprob_of(token), token, None] for token in output],
        "output_token_logprobs_length": len(output),
    }
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


def damaged(answer: dict[str, Any], damage: str) -> Any:
    meta, output = answer["meta_info"], answer["output_ids"]
    logprobs = meta["output_token_logprobs"]
    if damage == "extra_logprob":
        logprobs.append([-1.0, 0, None])
    elif damage == "missing_logprobs":
        meta["output_token_logprobs"] = None
    elif damage == "phantom":
        answer["output_ids"], meta["completion_tokens"], logprobs[:] = [], 0, logprobs[:1]
    elif damage == "empty":
        answer["output_ids"], meta["completion_tokens"], logprobs[:] = [], 0, []
    elif damage in ("nan", "-inf", "null", "text", "positive"):
        values = {"nan": float("nan"), "-inf": float("-inf"), "null": None, "text": "-1.0", "positive": 0.5}
        logprobs[-1][0] = values[damage]
    elif damage == "other_logprobs":
        for entry in logprobs:
            entry[0] -= 1
    elif damage == "other_token":
        logprobs[-1][1] = (output[-1] + 1) % VOCABULARY
    elif damage == "outside_vocabulary":
        output[-1] = logprobs[-1][1] = VOCABULARY
    elif damage in ("prompt_tokens", "completion_tokens"):
        meta[damage] += 1
    elif damage == "too_many":
        output.append(0)
        logprobs.append([-1.0, 0, None])
        meta["completion_tokens"] += 1
    elif damage == "other_request":
        meta["id"] = "0" * 32
    elif damage == "list":
        return [answer]
    elif damage == "no_meta":
        del answer["meta_info"]
    elif damage == "strange_finish":
        meta["finish_reason"] = {"type": "tired"}
    elif damage == "gap_in_versions":
        meta["weight_versions"][0]["start"] = 1
    elif damage == "retracted":
        meta["num_retractions"] = 1
    elif damage == "no_support":
        meta["output_token_sampling_mask"] = None
    elif damage == "short_support":
        meta["output_token_sampling_mask"].pop()
    elif damage == "foreign_support":
        meta["output_token_sampling_mask"][-1].remove(output[-1])
    elif damage == "repeated_support":
        meta["output_token_sampling_mask"][-1].append(output[-1])
    elif damage == "no_top":
        meta["output_top_logprobs"] = None
    elif damage == "short_top":
        meta["output_top_logprobs"][-1].pop()
    elif damage == "nan_top":
        meta["output_top_logprobs"][-1][-1][0] = None
    elif damage == "heavy_top":
        meta["output_top_logprobs"][-1][0][0] = meta["output_top_logprobs"][-1][1][0] = -0.1
    elif damage == "repeated_top":
        meta["output_top_logprobs"][-1][0][1] = meta["output_top_logprobs"][-1][1][1]
    elif damage == "wild_top":
        meta["output_top_logprobs"][-1][0][1] = VOCABULARY
    elif damage == "no_routes":
        del meta["routed_experts"]
    elif damage == "short_routes":
        meta["routed_experts"] = base64.b64encode(base64.b64decode(meta["routed_experts"])[:-4]).decode()
    elif damage == "wild_routes":
        wild = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32) + EXPERTS
        meta["routed_experts"] = base64.b64encode(wild.tobytes()).decode()
    elif damage in ("other_probe", "positive_probe"):
        for entry in meta["input_token_logprobs"][1:]:
            entry[0] = entry[0] - 1 if damage == "other_probe" else 0.5
    else:
        raise ValueError(f"no such fault: {damage}")
    return answer
