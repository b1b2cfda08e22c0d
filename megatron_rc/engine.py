"""RolloutEngine, the protocol of every sampler: token ids in, token ids and log-probs out, weights back in.

`ENGINES` has one row per engine that a job can name, and `rollout.opening` opens the engine of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from megatron_rc.schema.limits import check_at_least, check_positive

if TYPE_CHECKING:
    import torch

Prompts = Sequence[Sequence[int]]
"""Token ids of each prompt."""
OnFinished = Callable[[int], None] | None
"""Called with the number of newly finished responses."""


class EngineKind(NamedTuple):
    """What an engine is, and what it can do."""

    module: str
    """Module of `megatron_rc.rollout` whose `open_engine` makes it."""
    sentence: str
    returns_routes: str = ""
    """Which routes its samples have, to follow its name in a sentence; empty: none."""
    has_servers: bool = False
    """It asks servers, which are started apart from the trainer and must prove that they took the weights."""
    replays: bool = False
    """Its samples exist already: no weights are served, and no held-out prompt is answered."""
    draws_otherwise: bool = False
    """It obeys `HiddenSampling`."""
    rounds_inputs: bool = False
    """It rounds inputs of matrices, keys and values as `rollout.quantize` says."""
    lends_itself: bool = False
    """It may serve other weights for the time of an evaluation."""


DEFAULT_ENGINE = "embedded"
"""Needs nothing besides the trainer's process; warm-ups use it, whatever engine the job has."""
ENGINES = {
    DEFAULT_ENGINE: EngineKind(
        "embedded.engine",
        "a transformers model in the trainer's process.",
        returns_routes="returns them",
        draws_otherwise=True,
        rounds_inputs=True,
        lends_itself=True,
    ),
    "sglang": EngineKind("sglang.engine", "the servers of `sglang`.", returns_routes="returns them", has_servers=True),
    "recorded": EngineKind(
        "recorded",
        "the samples that --dump wrote to `recorded_path`.",
        returns_routes="has those that were dumped (moe.dump_routes)",
        replays=True,
    ),
}


@dataclass(frozen=True)
class HiddenSampling:
    """Changes to the sampled distribution that the reported log-probs and kept ids do not reflect.

    drawn from: softmax(z / temperature) over its top-p, where softmax(z) is the reported distribution
    """

    temperature: float = 1.0
    """Divides the logits once more; below 1 sharpens."""
    top_p: float = 1.0
    """Below 1 leaves out the tail of what would else be drawn from."""

    def __post_init__(self) -> None:
        check_positive(temperature=self.temperature)
        check_top_p(self.top_p)

    @property
    def active(self) -> bool:
        return self != HiddenSampling()


@dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn: softmax(logits / temperature), then top-k, then top-p, then one draw."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    """Must be > 0: at 0 the sampled distribution has no log-probability to correct with."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    """The stop token itself is part of the output and has a log-prob."""
    hidden: HiddenSampling | None = None
    """A fault made on purpose, of the embedded engine alone; None in every honest sampler."""
    top_logprobs: int = 0
    """Most probable ids per token that come back with their log-probs; 0 for none. Under top-p or top-k they are kept
    ids, renormalised over all kept ones; where fewer are kept, the others are -1 with log-prob -inf."""

    def __post_init__(self) -> None:
        check_at_least(1, max_new_tokens=self.max_new_tokens)
        check_positive(temperature=self.temperature)
        check_top_p(self.top_p)
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k must be -1 (off) or >= 1, got {self.top_k!r}")
        check_at_least(0, top_logprobs=self.top_logprobs)

    @property
    def truncates(self) -> bool:
        """True when top-p or top-k removes tokens, so that kept ids are needed in addition to the log-probs."""
        return self.top_p < 1 or self.top_k != -1


def check_top_p(top_p: float) -> None:
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p!r}")


@dataclass
class Sample:
    """One finished response.

    ``logprobs[t]`` is log mu(output_ids[t]) in nats as drawn: after temperature, renormalised over
    ``support[t]`` when top-p or top-k was active.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    """abort: generation was stopped early and not continued."""
    weight_versions: list[tuple[int, int, int]] = field(default_factory=list)
    """(version, start, end) spans over the output tokens."""
    support: list[list[int]] | None = None
    """Kept ids of every output token under top-p/top-k, else None."""
    output_mask: list[bool] | None = None
    """False for output tokens that the sampler did not draw (tool results between turns); None: all drawn."""
    routes: torch.Tensor | None = None
    """[prompt + output - 1, layers, k] expert ids, int32; row i is the routing that predicted token i + 1."""
    retractions: int = 0
    """How often the server put the request back into its queue and computed it again."""
    server: str | None = None
    """Name of the server, or embedded engine, that finished the response."""
    syncs: int | None = None
    """Weight syncs of that server since it started, as far as this job sent or saw them."""
    cached_tokens: int | None = None
    """Tokens of the request that the server took from its prefix cache, the most over the requests of a response."""
    discarded: str | None = None
    """Why this sample must not be trained on, as the end of a metric name ("nan_logprob"); None: it may be."""
    discarded_detail: str = ""
    """One sentence that explains ``discarded``, without any token or text of the prompt."""
    top_ids: torch.Tensor | None = None
    """[output, k] int32: the sampler's k most probable ids of every output token, -1 where it drew none; None: not
    asked for."""
    top_rollout_logprobs: torch.Tensor | None = None
    """[output, k] fp32, nats: log mu of each, over the whole vocabulary; 0 where the id is -1."""


def joined_spans(
    before: Sequence[tuple[int, int, int]], start: int, after: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """Spans of versions that follow each other: the last one of ``before`` reaches up to ``start``."""
    spans = [*before[:-1], *((version, first, start) for version, first, _ in before[-1:])]
    for version, first, end in after:
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1], start + end)
        else:
            spans.append((version, start + first, start + end))
    return spans


def check_request(
    prompts: Prompts,
    params: SamplingParams,
    *,
    n: int,
    seeds: Sequence[int],
    vocabulary: int | None = None,
    context: int | None = None,
    limited_by: str = "max_position_embeddings",
) -> None:
    """Check the arguments of ``RolloutEngine.generate``.

    Args:
        vocabulary: ids that the sampler knows; None: any.
        context: tokens of prompt and response together that the sampler takes; None: any number.
        limited_by: the field or flag that sets ``context``, for the error.

    Raises:
        ValueError: n < 1, another number of seeds than responses, an empty prompt, an id outside the vocabulary, or a
            prompt that with max_new_tokens is longer than the context. The sentence names the prompt by its index.
    """
    check_at_least(1, n=n)
    if vocabulary is not None and params.top_logprobs > vocabulary:
        raise ValueError(f"top_logprobs must be at most the vocabulary of {vocabulary}, got {params.top_logprobs!r}")
    if len(seeds) != len(prompts) * n:
        raise ValueError(f"seeds must hold one seed per response ({len(prompts)} x {n}), got {len(seeds)}")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty")
        if vocabulary is not None and (min(prompt) < 0 or max(prompt) >= vocabulary):
            raise ValueError(f"prompt {index} has an id outside the vocabulary of {vocabulary}")
        if context is not None and len(prompt) + params.max_new_tokens > context:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens, which with max_new_tokens={params.max_new_tokens} is longer "
                f"than the context of {context} tokens ({limited_by})"
            )


@runtime_checkable
class RolloutEngine(Protocol):
    """A sampler. One instance serves one trainer process; every process may sample its own share of the prompts."""

    weight_version: int

    def generate(
        self, prompts: Prompts, params: SamplingParams, *, n: int, seeds: Sequence[int], on_finished: OnFinished = None
    ) -> list[Sample]:
        """Sample ``n`` responses per prompt.

        Damaged responses are returned as well, with ``Sample.discarded`` set; the caller leaves them out.

        Args:
            prompts: token ids of each prompt.
            n: responses per prompt; sample j of prompt i is element i * n + j of the answer.
            seeds: one seed per response, len(prompts) * n in all; a response depends on its seed, its prompt and the
                weights, not on the other prompts of the call.
            on_finished: called with the number of newly finished responses.
        """

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load weights given under Hugging Face names, and serve them as ``version``."""

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must hold besides the trained weights, such as weights queued for later."""
        return {}

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore what ``state_tensors`` returned; the trainer sends the weights themselves again."""
        return None

    def check(self) -> None:
        """Raise ValueError when the engine is known to have ended; it costs little, and any thread may call it."""
        return None

    def close(self) -> None: ...
