"""Whatever a server answers becomes tokens that can be trained on, or a discarded one with a reason."""

import json
import math
from collections.abc import Iterator
from typing import Any

import faulty_answers as faulty
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_rc.engine import SamplingParams
from megatron_rc.rollout.sglang.request import DamagedAnswer, Request, RouteShape

REQUEST = Request(
    rid="f" * 32, prompt_ids=[3, 4, 5], drawn=[7], params=SamplingParams(max_new_tokens=4, top_k=4),
    vocab_size=faulty.VOCABULARY, seed=None, routes=RouteShape(faulty.LAYERS, faulty.TOP_K, faulty.EXPERTS),
    newest_version=7,
)  # fmt: skip
REASONS = {
    *("length_mismatch", "phantom_logprob", "nan_logprob", "positive_logprob", "missing_support", "support_mismatch"),
    *("missing_routes", "routes_bytes", "retracted_with_routes", "unknown_version", "empty_output", "bad_answer"),
    "server_error",
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.just(-(10**400))
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["stop", "abort", "7", "é", "AAAA", 0, -1, 3]),
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


def with_value(answer: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    inside = answer
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return answer


PLACES = list(places(good()))


@given(where=st.sampled_from(PLACES), value=VALUES)
@example(("meta_info", "num_retractions"), "often")
@example(("meta_info", "output_token_logprobs", 1, 0), -(10**400))
@example(("meta_info", "output_token_sampling_logprobs", 1), -(10**400))
@example(("meta_info", "output_token_sampling_mask", 0), [float(faulty.token_at(REQUEST.prompt_ids, 4))])
def test_an_answer_with_anything_anywhere_is_tokens_or_named_damage(where: tuple[Any, ...], value: Any) -> None:
    try:
        piece = REQUEST.piece(with_value(good(), where, value))
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
    inside = answer
    for key in where[:-1]:
        inside = inside[key]
    del inside[where[-1]]
    try:
        assert len(REQUEST.piece(answer).output_ids) == 3
    except DamagedAnswer as damage:
        assert damage.reason in REASONS and str(damage)
