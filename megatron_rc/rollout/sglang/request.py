"""Requests to /generate, and the checks of its answers."""

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rc.engine import SamplingParams, joined_spans
from megatron_rc.rollout.sglang.http import without_tokens
from megatron_rc.versions import SGLANG_KEPT_IDS

_POSITIVE_BY_ROUNDING = 1e-5
"""nats; rounding may put the log-prob of a nearly certain token this far above 0."""
_MASS_BY_ROUNDING = 1e-3
"""Rounding may put the mass of the top ids this far above 1."""
_ROUTE_TYPES = {4: np.int32, 2: np.uint16, 1: np.uint8}


class DamagedAnswer(Exception):
    """An answer that must not be trained on, with a reason such as "nan_logprob" and a sentence without tokens."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.output_ids: list[int] = []
        """The tokens of the response, as far as they are known."""


class RouteShape(NamedTuple):
    """Sizes of the routes of one token."""

    layers: int
    top_k: int
    experts: int

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> "RouteShape | None":
        """None for a model without experts."""
        experts = hf_config.get("num_experts") or hf_config.get("num_local_experts")
        if not experts or not hf_config.get("num_experts_per_tok"):
            return None
        return cls(hf_config["num_hidden_layers"], hf_config["num_experts_per_tok"], experts)


@dataclass
class Piece:
    """Tokens drawn by one request, or by several that continued each other."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "abort"] = "abort"
    weight_versions: list[tuple[int, int, int]] = field(default_factory=list)
    support: list[list[int]] | None = None
    top_ids: Tensor | None = None
    top_rollout_logprobs: Tensor | None = None
    routes: Tensor | None = None
    retractions: int = 0
    cached_tokens: int | None = None
    server: str | None = None
    """Name of the server that drew the last of the tokens."""
    syncs: int | None = None
    """Weight syncs of that server so far."""

    def __add__(self, then: "Piece") -> "Piece":
        """These tokens, then those of ``then``, with its spans of versions shifted."""
        if not self.output_ids:
            return then
        if not then.output_ids:
            return Piece(**{**vars(self), "finish_reason": then.finish_reason})
        cached = [count for count in (self.cached_tokens, then.cached_tokens) if count is not None]
        tensors = {}
        for name in ("top_ids", "top_rollout_logprobs", "routes"):
            first, last = getattr(self, name), getattr(then, name)
            tensors[name] = None if first is None or last is None else torch.cat([first, last])
        return Piece(
            self.output_ids + then.output_ids,
            self.logprobs + then.logprobs,
            then.finish_reason,
            joined_spans(self.weight_versions, len(self.output_ids), then.weight_versions),
            None if self.support is None or then.support is None else self.support + then.support,
            **tensors,
            retractions=self.retractions + then.retractions,
            cached_tokens=max(cached, default=None),
            server=then.server,
            syncs=then.syncs,
        )


@dataclass(frozen=True)
class Request:
    """One POST of /generate for one response."""

    rid: str
    prompt_ids: Sequence[int]
    drawn: Sequence[int]
    """Tokens of the response that earlier requests drew."""
    params: SamplingParams
    vocab_size: int
    seed: int | None
    """None if the server does not obey seeds."""
    routes: RouteShape | None
    """None if routes are not wanted."""
    newest_version: int
    """-1 before the first weight update."""

    @property
    def budget(self) -> int:
        return self.params.max_new_tokens - len(self.drawn)

    @property
    def first_route(self) -> int:
        """First new row of the routes: the one that predicts the next token."""
        return len(self.prompt_ids) + len(self.drawn) - 1 if self.drawn else 0

    def body(self) -> dict[str, Any]:
        """The JSON; it sets every sampling field whose default may differ between servers."""
        params = self.params
        sampling: dict[str, Any] = {
            "n": 1,
            "max_new_tokens": self.budget,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(params.stop_token_ids),
        }
        if self.seed is not None:
            sampling["sampling_seed"] = self.seed
        body: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": [*self.prompt_ids, *self.drawn],
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if params.truncates:
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        if params.top_logprobs:
            body["top_logprobs_num"] = params.top_logprobs
        if self.routes is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self.first_route}
        return body

    def _known_ids(self, answer: Any) -> list[int]:
        """The drawn tokens, and those of a damaged answer if all of them are token ids."""
        ids = answer.get("output_ids") if isinstance(answer, dict) else None
        are_ids = isinstance(ids, list) and all(type(i) is int and 0 <= i < self.vocab_size for i in ids)
        return [*self.drawn, *ids] if are_ids and ids else list(self.drawn)

    def piece(self, answer: Any) -> Piece:
        """The tokens of a checked answer; raises DamagedAnswer if it must not be trained on."""
        try:
            return self._piece(answer)
        except DamagedAnswer as error:
            damage = error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
            damage = DamagedAnswer("bad_answer", f"the answer lacks a field or has a wrong type ({error!r:.80})")
        damage.output_ids = self._known_ids(answer)
        raise damage from None

    def _piece(self, answer: Any) -> Piece:
        if not isinstance(answer, dict):
            raise DamagedAnswer("bad_answer", f"the answer is a {type(answer).__name__}, not an object")
        ids, meta = answer["output_ids"], answer["meta_info"]
        finish = meta["finish_reason"]
        kind = finish["type"]
        if meta["id"] != self.rid:
            raise DamagedAnswer("bad_answer", "the answer names another request")
        if kind not in ("stop", "length", "abort"):
            raise DamagedAnswer("bad_answer", f"the finish reason is {kind!r:.40}")
        if kind == "abort" and finish.get("status_code") is not None:
            raise DamagedAnswer("server_error", f"the server gave up: {without_tokens(finish.get('message'))}")
        entries = meta.get("output_token_logprobs")
        if not ids:
            if entries:
                raise DamagedAnswer("phantom_logprob", f"{len(entries)} log-probs came back without a token")
            if kind != "abort":
                raise DamagedAnswer("empty_output", f"no token came back, finish reason {kind}")
            return Piece()
        self._check_tokens(ids, meta)
        logprobs = own = self._logprobs(ids, entries)
        support = None
        if self.params.truncates:
            support, logprobs = self._support(ids, meta)
        # from the log-prob of the drawn token among all ids to that among the kept ones
        by_kept = torch.tensor(logprobs) - torch.tensor(own)
        top_ids, top_logprobs = self._top(meta, support, by_kept) if self.params.top_logprobs else (None, None)
        retractions = int(meta["num_retractions"]) if "num_retractions" in meta else 0
        routes = self._routes(len(ids), retractions, meta) if self.routes is not None else None
        cached = int(meta["cached_tokens"]) if "cached_tokens" in meta else None
        versions = self._versions(len(ids), meta)
        return Piece(
            ids, logprobs, kind, versions, support, top_ids, top_logprobs, routes, retractions, cached_tokens=cached
        )

    def _check_tokens(self, ids: Any, meta: Mapping[str, Any]) -> None:
        if set(map(type, ids)) != {int}:
            raise DamagedAnswer("bad_answer", "output_ids holds something other than integers")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise DamagedAnswer("bad_answer", f"an output id is outside the vocabulary of {self.vocab_size}")
        if len(ids) > self.budget:
            raise DamagedAnswer("bad_answer", f"{len(ids)} tokens came back, {self.budget} were asked for")
        sent = len(self.prompt_ids) + len(self.drawn)
        # absent from answers about requests that were aborted before they ran
        for name, expected in (("prompt_tokens", sent), ("completion_tokens", len(ids))):
            if meta.get(name, expected) != expected:
                raise DamagedAnswer("bad_answer", f"{name} is {meta[name]!r:.20}, expected {expected}")

    def _logprobs(self, ids: Sequence[int], entries: Any) -> list[float]:
        if entries is None or len(entries) != len(ids):
            count = 0 if entries is None else len(entries)
            raise DamagedAnswer("length_mismatch", f"{count} log-probs came back for {len(ids)} tokens")
        if [entry[1] for entry in entries] != ids:
            raise DamagedAnswer("bad_answer", "the log-probs belong to other tokens than output_ids")
        return checked_logprobs([entry[0] for entry in entries])

    def _support(self, ids: Sequence[int], meta: Mapping[str, Any]) -> tuple[list[list[int]], list[float]]:
        kept, values = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
        if not kept or not values:
            raise DamagedAnswer("missing_support", "no kept ids came back though top-p or top-k was active")
        if len(kept) != len(ids) or len(values) != len(ids):
            came = f"{len(kept)} sets of kept ids and {len(values)} log-probs"
            raise DamagedAnswer("support_mismatch", f"{came} for {len(ids)} tokens")
        for token, row in zip(ids, kept, strict=True):
            if set(map(type, row)) != {int}:
                raise DamagedAnswer("bad_answer", "the kept ids of a token are not integers")
            if token not in row or len(set(row)) != len(row):
                raise DamagedAnswer("support_mismatch", "a token is not among its kept ids, or they repeat")
            if min(row) < 0 or max(row) >= self.vocab_size:
                raise DamagedAnswer("support_mismatch", f"a kept id is outside the vocabulary of {self.vocab_size}")
        return kept, checked_logprobs(values)

    def _top(self, meta: Mapping[str, Any], support: Any, by_kept: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and log-probs [n, k]; with ``support`` those of the kept ids, which ``by_kept`` [n] nats renormalises."""
        rows, k = meta.get("output_top_logprobs"), self.params.top_logprobs
        if not rows or len(rows) != len(by_kept) or any(row is None or len(row) != k for row in rows):
            raise DamagedAnswer("missing_top_logprobs", f"not every token came back with {k} top log-probs")
        values = checked_logprobs([entry[0] for row in rows for entry in row])
        ids = torch.tensor([[entry[1] for entry in row] for row in rows])
        if ids.dtype != torch.int64 or ids.min() < 0 or ids.max() >= self.vocab_size:
            raise DamagedAnswer("bad_answer", f"a top id is no integer below the vocabulary of {self.vocab_size}")
        logprobs, ordered = torch.tensor(values).view(ids.shape), ids.sort(1).values
        if support is not None:
            # the server lists ids of the whole vocabulary
            sets = zip(rows, map(set, support), strict=True)
            kept = torch.tensor([[entry[1] in kept_ids for entry in row] for row, kept_ids in sets])
            ids, logprobs = ids.where(kept, -1), (logprobs + by_kept[:, None]).where(kept, float("-inf"))
        if (ordered[:, 1:] == ordered[:, :-1]).any() or logprobs.double().exp().sum(1).max() > 1 + _MASS_BY_ROUNDING:
            raise DamagedAnswer("bad_top_logprobs", "the top ids of a token repeat, or their mass is above 1")
        return ids.to(torch.int32), logprobs

    def _routes(self, outputs: int, retractions: int, meta: Mapping[str, Any]) -> Tensor:
        assert self.routes is not None
        if retractions:
            raise DamagedAnswer("retracted_with_routes", "the routes were overwritten when the server computed again")
        text = meta.get("routed_experts")
        if not text:
            raise DamagedAnswer("missing_routes", "no routes came back")
        rows = len(self.prompt_ids) + len(self.drawn) + outputs - 1 - self.first_route
        values = rows * self.routes.layers * self.routes.top_k
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise DamagedAnswer("bad_answer", "the routes are not base64") from None
        item = _ROUTE_TYPES.get(len(data) // values)
        if len(data) % values or item is None:
            raise DamagedAnswer("routes_bytes", f"routes have {len(data)} bytes, expected {values} expert ids")
        routes = np.frombuffer(data, item).astype(np.int32).reshape(rows, self.routes.layers, self.routes.top_k)
        if routes.min() < 0 or routes.max() >= self.routes.experts:
            raise DamagedAnswer("bad_answer", f"routes name an expert outside of {self.routes.experts}")
        return torch.from_numpy(routes)

    def _versions(self, outputs: int, meta: Mapping[str, Any]) -> list[tuple[int, int, int]]:
        spans = meta.get("weight_versions")
        if not spans:
            spans = [{"version": meta["weight_version"], "start": 0, "end": outputs}]
        versions, end = [], 0
        for span in spans:
            if span["start"] != end or span["end"] < end:
                raise DamagedAnswer("bad_answer", "the weight versions do not cover the tokens one after the other")
            end = span["end"]
            if end > span["start"]:
                versions.append((self._version(span["version"]), span["start"], end))
        if end != outputs:
            raise DamagedAnswer("bad_answer", f"the weight versions cover {end} of {outputs} tokens")
        return versions

    def _version(self, name: Any) -> int:
        if isinstance(name, str) and name.isascii() and name.isdigit():
            if self.newest_version < 0 or int(name) <= self.newest_version:
                return int(name)
        elif self.newest_version < 0:
            return -1
        sentence = f"the weights are called {name!r:.40}, the newest are {self.newest_version}"
        raise DamagedAnswer("unknown_version", sentence)


def missing_kept_ids(info: Mapping[str, Any], params: SamplingParams) -> tuple[str, str] | None:
    """Why a server with this /server_info lacks the kept ids that ``params`` need, and the fix; None if it has them."""
    if not params.truncates:
        return None
    sampling, most = f"top_p={params.top_p} and top_k={params.top_k}", info.get("sampling_mask_max_tokens")
    without = "or set rollout.top_p=1 and rollout.top_k=-1"
    if most is None:
        fix = f"Serve with SGLang {SGLANG_KEPT_IDS} or newer, {without}."
        return f"{sampling} truncate, and this server cannot return kept ids", fix
    algorithm = info.get("speculative_algorithm")
    if algorithm and "DFLASH" not in str(algorithm):
        fix = f"Start the server without --speculative-algorithm, {without}."
        return f"{sampling} truncate, and the server returns no kept ids under speculative decoding ({algorithm})", fix
    if params.top_k == -1:
        fix = f"Set rollout.top_k to a number from 2 to {most}, large enough that top_p decides."
        return f"top_p={params.top_p} with top_k=-1: the server returns kept ids only for a finite top_k", fix
    if params.top_k > most:
        fix = f"Start the server with --sampling-mask-max-tokens {params.top_k}, or lower rollout.top_k to {most}."
        return f"top_k={params.top_k} is more than the {most} kept ids that the server returns", fix
    return None


def checked_logprobs(values: list[Any]) -> list[float]:
    """``values`` if all of them can be log-probs; raises DamagedAnswer otherwise."""
    types = set(map(type, values)) - {float, int}
    # JSON knows no NaN: servers write null for it
    if types == {type(None)}:
        raise DamagedAnswer("nan_logprob", "a log-prob is null")
    if types:
        raise DamagedAnswer("bad_answer", "a log-prob is not a number")
    if not all(map(math.isfinite, values)):
        raise DamagedAnswer("nan_logprob", "a log-prob is NaN or infinite")
    if max(values) > _POSITIVE_BY_ROUNDING:
        raise DamagedAnswer("positive_logprob", f"a log-prob is {max(values):.3g}, above 0")
    return values
