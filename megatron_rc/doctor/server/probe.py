"""Reads from live SGLang servers what the checks compare; nothing is changed on a server."""

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rc.doctor.server.facts import ProbeAnswer, ServerFacts
from megatron_rc.engine import SamplingParams
from megatron_rc.files import read_json
from megatron_rc.rollout.sglang.http import Server, ServerError
from megatron_rc.rollout.sglang.pool import Pool
from megatron_rc.rollout.sglang.request import Request, RouteShape

PROBES = {
    "plain": SamplingParams(8),
    "cool": SamplingParams(1, temperature=0.5),
    "truncated": SamplingParams(8, top_p=0.9, top_k=4),
}
"""Requests that doctor sends, by the names of their answers."""
PROMPT = (1, 2, 3, 2)
"""Ids that every vocabulary has; an id outside the vocabulary would crash the server."""
_LISTED = 5  # top log-probs asked for: shows whether the server lists any, in a short answer
_ANY_VOCABULARY = 1 << 31
"""A limit above the size of any vocabulary."""


def read_servers(urls: Sequence[str], timeout_s: float) -> list[ServerFacts]:
    """Facts about each server at ``urls`` or behind a router there; ``timeout_s`` is the limit for one request.

    Raises ValueError where a server cannot be reached, or does not answer as an SGLang server does.
    """
    pool = Pool(urls, concurrency=1, timeout_s=timeout_s)
    try:
        return [_read(server, timeout_s) for server in pool.servers]
    except ServerError as error:
        raise ValueError(str(error)) from None
    finally:
        pool.close()


def _read(server: Server, timeout_s: float) -> ServerFacts:
    if not isinstance(server.info, dict) or "model_path" not in server.info:
        raise ValueError(f"{server.url} does not answer /server_info as an SGLang server does")
    config, generation_config = _model_files(server.info, server.model)
    schema, models = (_optional(server, path, timeout_s) for path in ("/openapi.json", "/v1/models"))
    fields = schema.get("components", {}).get("schemas", {}).get("GenerateReqInput", {}).get("properties")
    is_paused = _is_paused(server, timeout_s)
    routes = RouteShape.of(config) if config and server.info.get("enable_return_routed_experts") else None
    asked = {} if is_paused else {name: probe_request(name, routes) for name in PROBES}
    return ServerFacts(
        url=server.url,
        server_info=server.info,
        model_info=server.model,
        context_length=models["data"][0].get("max_model_len") if models.get("data") else None,
        paths=tuple(schema["paths"]) if "paths" in schema else None,
        request_fields=None if fields is None else tuple(fields),
        model_config=config,
        generation_config=generation_config,
        is_paused=is_paused,
        probes={name: _probe(server, request, timeout_s) for name, request in asked.items()},
    )


def probe_request(name: str, routes: RouteShape | None) -> Request:
    """One of PROBES as a job would send it."""
    return Request(uuid.uuid4().hex, PROMPT, (), PROBES[name], _ANY_VOCABULARY, None, routes, newest_version=-1)


def _probe(server: Server, request: Request, timeout_s: float) -> ProbeAnswer:
    body = request.body()
    body["sampling_params"]["ignore_eos"] = True
    # a server without the flag for routes, or of a model without experts, ignores the field
    body |= {"top_logprobs_num": _LISTED, "return_routed_experts": True}
    try:
        return ProbeAnswer(request, *server.generate([body], timeout_s))
    except ServerError as error:
        if error.status is None:
            raise
        return ProbeAnswer(request, refusal=str(error))


def _is_paused(server: Server, timeout_s: float) -> bool:
    try:
        _optional(server, "/ready", timeout_s)
    except ServerError as error:
        if error.status != 503:
            raise
        return True
    return False


def _optional(server: Server, path: str, timeout_s: float) -> dict[str, Any]:
    """The fields of the answer; none if the server has no such path, or answers with something else."""
    try:
        answer = server.get(path, timeout_s)
    except ServerError as error:
        if error.status != 404:
            raise
        return {}
    return answer if isinstance(answer, dict) else {}


def _model_files(
    info: Mapping[str, Any], model: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """config.json with the server's overrides, and generation_config.json, if this machine has them."""
    # after an update from disk /model_info names the folder of that update, which may be gone
    for folder in (model.get("model_path"), info["model_path"]):
        files = Path(str(folder))
        if (files / "config.json").is_file():
            config = read_json(files / "config.json") | json.loads(info.get("json_model_override_args") or "{}")
            generation = files / "generation_config.json"
            return config, read_json(generation) if generation.is_file() else {}
    return None, None
