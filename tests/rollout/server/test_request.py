"""Answers of /generate: what is asked, what is taken over, and the reason for everything that is not."""

import base64
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import Any

import faulty_answers as faulty
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_rc.engine import SamplingParams
from megatron_rc.rollout.sglang.http import Server, without_tokens
from megatron_rc.rollout.sglang.request import DamagedAnswer, Piece, Request, RouteShape

ROUTES = RouteShape(faulty.LAYERS, faulty.TOP_K, faulty.EXPERTS)
PROMPT = [3, 4, 5]
PLAIN = SamplingParams(max_new_tokens=6, temperature=0.7)
KEPT = SamplingParams(max_new_tokens=6, top_k=4, top_p=0.9)
TOP = SamplingParams(max_new_tokens=6, top_logprobs=3)


def request(params: Any = PLAIN, *, drawn: Any = (), routes: Any = None, seed: Any = None, newest: int = -1) -> Request:
    return Request("f" * 32, PROMPT, drawn, params, faulty.VOCABULARY, seed, routes, newest)


def answer(asked: Request, damage: str | None = None, *, count: int | None = None, aborted: bool = False) -> Any:
    """As JSON carries it."""
    count = asked.budget if count is None else count
    good = faulty.answer_to(asked.body(), count, "default", aborted=aborted)
    return json.loads(json.dumps(faulty.damaged(good, damage) if damage else good))


def reason_of(asked: Request, given: Any) -> str:
    with pytest.raises(DamagedAnswer) as damage:
        asked.piece(given)
    assert str(damage.value)
    return damage.value.reason


def test_logprobs_are_those_of_the_server_unchanged() -> None:
    piece = request().piece(answer(request()))
    assert piece.output_ids == faulty.tokens_after(PROMPT, 6)
    assert piece.logprobs == [faulty.logprob_of(token) for token in piece.output_ids]
    assert (piece.finish_reason, piece.weight_versions, piece.support) == ("length", [(-1, 0, 6)], None)


def test_under_top_k_the_logprobs_are_the_renormalised_ones_beside_the_kept_ids() -> None:
    piece = request(KEPT).piece(answer(request(KEPT)))
    assert piece.logprobs == [faulty.logprob_of(token) / 2 for token in piece.output_ids]
    assert piece.support == [faulty.kept_ids(token) for token in piece.output_ids]


def test_under_top_k_the_top_ids_are_kept_ones_with_log_probs_moved_like_the_tokens_own() -> None:
    asked = request(replace(KEPT, top_logprobs=6))
    given = answer(asked)
    assert reason_of(asked, given) == "bad_top_logprobs", "their mass becomes more than 1"
    for row in given["meta_info"]["output_top_logprobs"]:
        for entry in row:
            entry[0] -= 3
    piece = asked.piece(given)
    listed = [[token, -1, -1, -1, -1, (token + 5) % faulty.VOCABULARY] for token in piece.output_ids]
    assert piece.top_ids is not None and piece.top_ids.tolist() == listed
    for token, values in zip(piece.output_ids, piece.top_rollout_logprobs.tolist(), strict=True):
        moved = -faulty.logprob_of(token) / 2
        assert values == pytest.approx([moved - 5, *[float("-inf")] * 4, moved - 10])


@pytest.mark.parametrize("item", [np.int32, np.uint16, np.uint8])
def test_routes_are_decoded_whatever_the_size_of_an_expert_id(item: type) -> None:
    asked = request(routes=ROUTES)
    given = answer(asked)
    expected = faulty.routes_of(range(len(PROMPT) + 6 - 1))
    given["meta_info"]["routed_experts"] = base64.b64encode(expected.astype(item).tobytes()).decode()
    routes = asked.piece(given).routes
    assert routes is not None and routes.dtype == torch.int32
    assert torch.equal(routes, torch.from_numpy(expected))


DAMAGES: list[tuple[SamplingParams, RouteShape | None, dict[str, list[str]]]] = [
    (PLAIN, None, {
        "length_mismatch": ["extra_logprob", "missing_logprobs"],
        "phantom_logprob": ["phantom"],
        "empty_output": ["empty"],
        "nan_logprob": ["nan", "-inf", "null"],
        "positive_logprob": ["positive"],
        "bad_answer": ["text", "other_token", "outside_vocabulary", "prompt_tokens", "completion_tokens", "too_many",
                       "other_request", "list", "no_meta", "strange_finish", "gap_in_versions"],
    }),
    (KEPT, None, {
        "missing_support": ["no_support"],
        "support_mismatch": ["short_support", "foreign_support", "repeated_support"],
    }),
    (TOP, None, {
        "missing_top_logprobs": ["no_top", "short_top"],
        "bad_top_logprobs": ["heavy_top", "repeated_top"],
        "nan_logprob": ["nan_top"],
        "bad_answer": ["wild_top"],
    }),
    (PLAIN, ROUTES, {
        "missing_routes": ["no_routes"],
        "routes_bytes": ["short_routes"],
        "bad_answer": ["wild_routes"],
        "retracted_with_routes": ["retracted"],
    }),
]  # fmt: skip


@pytest.mark.parametrize(
    ("params", "routes", "reason", "damage"),
    [(params, routes, reason, damage)
     for params, routes, by_reason in DAMAGES for reason, damages in by_reason.items() for damage in damages],
)  # fmt: skip
def test_every_damage_is_named(params: SamplingParams, routes: RouteShape | None, reason: str, damage: str) -> None:
    asked = request(params, routes=routes)
    asked.piece(answer(asked))
    assert reason_of(asked, answer(asked, damage)) == reason


def test_a_retraction_without_routes_is_counted_and_kept() -> None:
    assert request().piece(answer(request(), "retracted")).retractions == 1


@pytest.mark.parametrize("name", ["default", "8", "unproved-7", "", None, 7, "-1"])
def test_after_an_update_only_versions_up_to_the_newest_count(name: Any) -> None:
    given = answer(request())
    given["meta_info"]["weight_versions"][0]["version"] = name
    assert reason_of(request(newest=7), given) == "unknown_version"
    assert request().piece(given).weight_versions[0][0] == (8 if name == "8" else -1)


def test_versions_of_a_response_are_kept_per_token() -> None:
    given = answer(request())
    spans = [("4", 0, 2), ("5", 2, 2), ("7", 2, 6)]
    given["meta_info"]["weight_versions"] = [{"version": v, "start": start, "end": end} for v, start, end in spans]
    assert request(newest=7).piece(given).weight_versions == [(4, 0, 2), (7, 2, 6)]


def test_a_server_that_names_one_version_alone_means_all_tokens() -> None:
    given = answer(request())
    del given["meta_info"]["weight_versions"]
    given["meta_info"]["weight_version"] = "3"
    assert request(newest=3).piece(given).weight_versions == [(3, 0, 6)]


def lists_of(piece: Piece) -> dict[str, Any]:
    return {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in vars(piece).items()}


@pytest.mark.parametrize("params", [PLAIN, KEPT, TOP])
def test_a_continued_response_equals_one_that_was_never_aborted(params: SamplingParams) -> None:
    whole = request(params, routes=ROUTES).piece(answer(request(params, routes=ROUTES)))
    first = request(params, routes=ROUTES)
    piece = first.piece(answer(first, count=2, aborted=True))
    assert piece.finish_reason == "abort"
    nothing = request(params, drawn=piece.output_ids, routes=ROUTES)
    piece += nothing.piece(answer(nothing, count=0, aborted=True))
    second = request(params, drawn=piece.output_ids, routes=ROUTES)
    assert second.body()["sampling_params"]["max_new_tokens"] == 4
    # the fault server, like a real one, draws by what came before, so the prompt it sees holds the two tokens
    piece += second.piece(answer(second))
    assert (whole.top_ids is None) == (params is not TOP)
    assert lists_of(whole) == lists_of(piece)


def test_versions_of_a_continuation_move_behind_the_tokens_before_it() -> None:
    first = Piece([1, 2], [-1.0, -1.0], "abort", [(3, 0, 2)])
    same, other = Piece([4], [-1.0], "length", [(3, 0, 1)]), Piece([4], [-1.0], "length", [(5, 0, 1)])
    assert (first + same).weight_versions == [(3, 0, 3)]
    assert (first + other).weight_versions == [(3, 0, 2), (5, 2, 3)]


def test_the_prefix_cache_is_that_of_the_request_that_used_it_most() -> None:
    given = answer(request())
    for said, known in ((5, 5), (0, 0), (None, None)):
        given["meta_info"].pop("cached_tokens", None)
        given["meta_info"] |= {} if said is None else {"cached_tokens": said}
        assert request().piece(given).cached_tokens == known
    drawn = {"output_ids": [1], "logprobs": [-1.0], "weight_versions": [(3, 0, 1)]}
    pieces = [Piece(**drawn, cached_tokens=count) for count in (None, 7, 2)]
    assert (pieces[0] + pieces[0]).cached_tokens is None
    assert (pieces[0] + pieces[1] + pieces[2]).cached_tokens == 7


def test_a_continued_response_belongs_to_the_server_that_drew_its_end() -> None:
    drawn = {"output_ids": [1], "logprobs": [-1.0], "weight_versions": [(3, 0, 1)]}
    joined = Piece(**drawn, server="a:1", syncs=4) + Piece(**drawn, server="b:2", syncs=1)
    assert (joined.server, joined.syncs) == ("b:2", 1)
    nothing = Piece(server="c:3", syncs=9)
    assert ((joined + nothing).server, (joined + nothing).syncs) == ("b:2", 1)


def test_the_name_of_a_server_holds_no_password() -> None:
    server = Server("https://user:secret@10.0.0.1:30000", background=None)  # type: ignore[arg-type]
    assert server.name == "10.0.0.1:30000"


def test_an_answer_about_a_request_aborted_in_the_queue_holds_nothing() -> None:
    finish = {"type": "abort", "message": "Abort in waiting queue"}
    meta = {"id": "f" * 32, "finish_reason": finish, "weight_version": "3"}
    assert request(routes=ROUTES).piece({"text": "", "output_ids": [], "meta_info": meta}) == Piece()


def test_an_abort_that_the_server_calls_an_error_is_one() -> None:
    given = answer(request(), count=2, aborted=True)
    given["meta_info"]["finish_reason"] |= {"status_code": 400, "message": "Sampling support exceeds 4096"}
    assert reason_of(request(), given) == "server_error"


def test_every_sampling_field_with_another_default_on_some_server_is_stated() -> None:
    sampling = request(seed=5).body()["sampling_params"]
    neutral = {"n": 1, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert sampling.items() >= (neutral | {"frequency_penalty": 0.0, "presence_penalty": 0.0}).items()
    assert sampling["sampling_seed"] == 5 and sampling["temperature"] == 0.7
    assert "sampling_seed" not in request().body()["sampling_params"]


@pytest.mark.parametrize(
    ("output", "known"), [([1, 2], [9, 1, 2]), ([1, 37], [9]), ([1, -1], [9]), ([1, "2"], [9]), (None, [9]), ([], [9])]
)
def test_a_damaged_answer_keeps_the_tokens_as_far_as_they_are_tokens(output: Any, known: list[int]) -> None:
    asked = request(drawn=[9])
    given = answer(asked, "other_request") | {"output_ids": output}
    with pytest.raises(DamagedAnswer) as damage:
        asked.piece(given)
    assert damage.value.output_ids == known


def test_no_token_is_in_a_servers_message() -> None:
    message = "bad input_ids [[3, 4, 5], [17, 18]] in {'prompt': 'secret'} of 300 tokens"
    assert without_tokens(message) == "bad input_ids [...], [...] in [...] of 300 tokens"
    assert "17" not in without_tokens("cut off [3, 4, [17, 18")


REQUEST = request(SamplingParams(max_new_tokens=4, top_k=4), drawn=[7], routes=ROUTES, newest=7)
REASONS = {"unknown_version", "server_error"} | {reason for *_, by_reason in DAMAGES for reason in by_reason}
NUMBERS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.just(-(10**400)) | st.floats()
VALUES = st.recursive(
    NUMBERS | st.text(max_size=6) | st.sampled_from(["stop", "abort", "7", "é", "AAAA", 0, -1, 3]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def good() -> Any:
    return json.loads(json.dumps(faulty.answer_to(REQUEST.body(), 3, "7", aborted=False)))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield from places(child, (*path, key))


def parent_of(answer: Any, path: tuple[Any, ...]) -> Any:
    return reduce(getitem, path[:-1], answer)


PLACES = list(places(good()))


@given(where=st.sampled_from(PLACES), value=VALUES)
@example(("meta_info", "num_retractions"), "often")
@example(("meta_info", "output_token_logprobs", 1, 0), -(10**400))
@example(("meta_info", "output_token_sampling_logprobs", 1), -(10**400))
@example(("meta_info", "output_token_sampling_mask", 0), [float(faulty.token_at(REQUEST.prompt_ids, 4))])
def test_an_answer_with_anything_anywhere_is_tokens_or_named_damage(where: tuple[Any, ...], value: Any) -> None:
    answer = good()
    if where:
        parent_of(answer, where)[where[-1]] = value
    try:
        piece = REQUEST.piece(answer if where else value)
    except DamagedAnswer as damage:
        assert damage.reason in REASONS and str(damage)
        assert all(0 <= token < faulty.VOCABULARY for token in damage.output_ids)
        return
    count = len(piece.output_ids)
    assert len(piece.logprobs) == count and all(math.isfinite(x) and x < 1e-4 for x in piece.logprobs)
    assert all(type(token) is int and 0 <= token < faulty.VOCABULARY for token in piece.output_ids)
    if count:
        assert piece.support is not None and len(piece.support) == count
        assert all(token in kept for token, kept in zip(piece.output_ids, piece.support, strict=True))
        assert all(type(kept) is int for row in piece.support for kept in row)
        assert piece.routes is not None and piece.routes.shape == (count, faulty.LAYERS, faulty.TOP_K)
        assert [span[1] for span in piece.weight_versions] == [0, *(span[2] for span in piece.weight_versions[:-1])]
        assert piece.weight_versions[-1][2] == count
        assert all(type(version) is int for version, _, _ in piece.weight_versions)


@pytest.mark.parametrize("where", [path for path in PLACES if path])
def test_an_answer_that_lacks_a_field_is_tokens_or_named_damage(where: tuple[Any, ...]) -> None:
    answer = good()
    del parent_of(answer, where)[where[-1]]
    try:
        assert len(REQUEST.piece(answer).output_ids) == 3
    except DamagedAnswer as damage:
        assert damage.reason in REASONS and str(damage)
