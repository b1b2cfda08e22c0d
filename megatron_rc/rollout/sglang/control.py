"""Requests of a weight update that carry no weights: session, version, checksums and the log-probs of a probe."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from megatron_rc.rollout.sglang.http import Server, ServerError
from megatron_rc.rollout.sglang.request import DamagedAnswer, checked_logprobs

T = TypeVar("T")


def on_every(servers: Sequence[Server], call: Callable[[Server], T]) -> tuple[dict[str, T], dict[str, str]]:
    """Results of ``call`` on all servers at once, and one sentence why each of the others failed; both by url."""
    results, failures = dict[str, T](), dict[str, str]()
    if not servers:
        return results, failures
    with ThreadPoolExecutor(len(servers), thread_name_prefix="sglang") as threads:
        for server, future in [(server, threads.submit(call, server)) for server in servers]:
            try:
                results[server.url] = future.result()
            except (ServerError, ValueError) as error:
                failures[server.url] = str(error)
    return results, failures


def begin_update(server: Server, timeout_s: float) -> bool:
    """Open the session that tensor and distributed updates need; False if the server has none (before June 2026)."""
    try:
        server.post("/begin_weight_update", {}, timeout_s)
    except ServerError as error:
        if error.status == 404:
            return False
        if error.status != 400:
            raise
        # a trainer that died during an update left a session open
        server.post("/end_weight_update", {}, timeout_s)
        server.post("/begin_weight_update", {}, timeout_s)
    return True


def set_version(server: Server, version: str, timeout_s: float) -> None:
    # by default this aborts every request, also those that a retracting pause means to continue
    server.post("/update_weight_version", {"new_version": version, "abort_all_requests": False}, timeout_s)


def read_version(server: Server, timeout_s: float) -> str:
    """The server's name of its weights."""
    return str(_fields(server.get("/model_info", timeout_s)).get("weight_version"))


def checksums(server: Server, timeout_s: float) -> list[dict[str, str]] | None:
    """Checksums per rank, by the server's name of each tensor; None where the server cannot compute them."""
    try:
        answer = _fields(server.post("/weights_checker", {"action": "checksum"}, timeout_s))
    except ServerError as error:
        if error.status in (400, 404):
            return None
        raise
    ranks = [rank.get("checksums") for rank in answer.get("ranks") or []]
    return ranks if ranks and all(ranks) else None


def _fields(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise ValueError(f"it answered with a {type(answer).__name__} instead of an object")
    return answer


def probe_prompt(vocab_size: int, context: int) -> list[int]:
    """Token ids spread over the vocabulary, the same for every server and update.

    The last id is left out, because SGLang calls it 0 among the log-probs of a prompt.
    """
    return [(7919 * i * i + 104729 * i + 1) % (vocab_size - 1) for i in range(min(32, context - 1))]


def scoring(input_ids: Sequence[Any]) -> dict[str, Any]:
    """The body of a request for the log-probs of a prompt, or of several prompts."""
    return {
        "input_ids": input_ids,
        # 0 new tokens would do, but some versions answer it with a log-prob of a token that does not exist
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        # from the first token on: what comes before this position may come from the prefix cache
        "logprob_start_len": 0,
    }


def prompt_logprobs(server: Server, prompt: Sequence[int], timeout_s: float) -> list[float]:
    """log mu(prompt[t] | prompt[:t]), nats, at temperature 1, of t = 1 .. len(prompt) - 1.

    Raises:
        ValueError: the answer lacks some of them, or holds a value that no log-prob can have.
    """
    meta = _fields(server.post("/generate", scoring(list(prompt)), timeout_s)).get("meta_info") or {}
    entries = meta.get("input_token_logprobs") or []
    if [entry[1] for entry in entries] != list(prompt):
        raise ValueError("the probe prompt came back without a log-prob for each of its tokens")
    try:
        return checked_logprobs([entry[0] for entry in entries[1:]])
    except DamagedAnswer as damage:
        raise ValueError(f"the probe prompt came back damaged: {damage}") from None
