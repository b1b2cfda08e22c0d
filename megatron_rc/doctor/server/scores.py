"""Log-probs of the same tokens by a server's decoding, by its prefill and by the trainer."""

import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rc.analyze import chunk
from megatron_rc.doctor.registry import Undecided
from megatron_rc.doctor.server.facts import ServerFacts
from megatron_rc.engine import SamplingParams
from megatron_rc.rollout.sglang.control import scoring
from megatron_rc.rollout.sglang.http import Background, Server, ServerError
from megatron_rc.rollout.sglang.request import DamagedAnswer, Piece, Request, checked_logprobs

Logprobs = np.ndarray[Any, np.dtype[np.float64]]
"""[N] nats, one per sampled token, sequence after sequence."""
Rescore = Callable[[Sequence[Sequence[int]], int, Sequence[float], int], list[Logprobs]]
"""(sequences of one length, first position, temperatures, micro-batch size) -> log-probs per temperature."""

PROMPTS = 16
"""Sequences to sample: enough for a batch of them to take other kernels than a single sequence."""
PROMPT_TOKENS = 16  # random ids, enough to differ; every more is scored again per temperature
RESPONSE_TOKENS = 64
"""16 x 64 tokens tell k3 = 1e-3 from a floor of 1e-4, and take minutes even if the trainer runs on a CPU."""
FINE_K3 = 1e-3
"""nats per token. NeMo-RL's documentation calls a gap below this healthy; in bf16 it may be larger (`usual_k3`)."""
SEED = 20  # any: the same prompts at every call, so that two reports can be compared
_COMMON_IDS = 1000
"""Every trained model has the ids below this; an id outside its vocabulary would crash a server."""
QUIET = "Run doctor --probe while no job uses or updates the server."


@dataclass(frozen=True)
class Scores:
    """Log-probs of one sample of tokens, all under the same weights of the server."""

    decode: Logprobs
    """As the server returned them when it sampled the tokens, at temperature 1."""
    alone: Logprobs
    """By the server's prefill of prompt and response, one sequence at a time."""
    together: Logprobs
    """By the server's prefill of all sequences in one batch."""
    trainer: Logprobs
    """By the trainer, one sequence per micro-batch."""
    trainer_together: Logprobs
    """By the trainer, all sequences in one micro-batch."""
    sequences: int
    asked_temperature: float
    """Temperature of the second sample."""
    warm: Logprobs
    """As the server returned them for the second sample."""
    warm_trainer: Mapping[float, Logprobs]
    """The trainer's log-probs of the second sample: temperature -> log-probs."""
    usual: float = FINE_K3
    """nats per token; k3 that the precision of the server explains."""


def measure(
    served: ServerFacts,
    rescore: Rescore,
    vocab_size: int,
    asked_temperature: float,
    temperatures: Sequence[float],
    timeout_s: float,
) -> Scores:
    """Sample from the server and score the tokens again, by its prefill and by the trainer, ``rescore``.

    Args:
        vocab_size: of the trainer.
        asked_temperature: of a second sample, which only the server's decoding and the trainer score.
        temperatures: by which the trainer divides its logits for the second sample.
        timeout_s: for one answer.

    Raises Undecided where the server answers with something that cannot be compared, ValueError where it is gone.
    """
    with _asking(served, vocab_size, timeout_s) as (client, prompts):
        drawn = client.sample(prompts, 1.0)
        sequences = _sequences(prompts, drawn)
        alone = np.concatenate([client.prefill([sequence]) for sequence in sequences])
        together = client.prefill(sequences)
        warm = client.sample(prompts, asked_temperature)
    warm_trainer = rescore(_sequences(prompts, warm), PROMPT_TOKENS, temperatures, 1)
    return Scores(
        decode=_joined(drawn),
        alone=alone,
        together=together,
        trainer=rescore(sequences, PROMPT_TOKENS, [1.0], 1)[0],
        trainer_together=rescore(sequences, PROMPT_TOKENS, [1.0], len(sequences))[0],
        sequences=len(sequences),
        asked_temperature=asked_temperature,
        warm=_joined(warm),
        warm_trainer=dict(zip(temperatures, warm_trainer, strict=True)),
    )


def fresh_gap(served: ServerFacts, rescore: Rescore, vocab_size: int, timeout_s: float) -> Logprobs:
    """log pi - log mu, nats, of responses drawn now; arguments and errors are those of ``measure``."""
    with _asking(served, vocab_size, timeout_s) as (client, prompts):
        drawn = client.sample(prompts, 1.0)
    return rescore(_sequences(prompts, drawn), PROMPT_TOKENS, [1.0], 1)[0] - _joined(drawn)


@contextmanager
def _asking(served: ServerFacts, vocab_size: int, timeout_s: float) -> "Iterator[tuple[_Client, list[list[int]]]]":
    """A client of a server that can be probed, and the prompts; the weights must stay the same within the block."""
    if served.is_paused:
        raise Undecided("a paused server answers no probe request", "POST /continue_generation, then try again.")
    needed = PROMPT_TOKENS + RESPONSE_TOKENS + 4
    if served.context_length is not None and served.context_length < needed:
        raise Undecided(f"the probes need a context of {needed} tokens, the server has {served.context_length}")
    served_ids = served.config["vocab_size"] if served.config else _COMMON_IDS
    background = Background()
    try:
        client = _Client(Server(served.url, background), vocab_size, timeout_s)
        yield client, seeded_prompts(min(vocab_size, served_ids))
    except DamagedAnswer as damage:
        raise Undecided(f"a job would discard an answer to the probes: {damage.reason}, {damage}") from None
    except ServerError as error:
        if error.status is None:
            raise ValueError(str(error)) from None
        raise Undecided(f"the server refuses a request of the probes: {error}") from None
    finally:
        background.close()
    if len(client.versions) > 1:
        raise Undecided("the weights of the server changed during the probes", QUIET)


def seeded_prompts(vocab_size: int) -> list[list[int]]:
    """Random ids, the same at every call."""
    generator = random.Random(SEED)
    return [[generator.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def k3(log_ratio: Logprobs) -> float:
    """Mean k3 over the tokens."""
    with np.errstate(over="ignore"):
        return float(np.mean(chunk.k3(log_ratio)))


def exact_share(a: Logprobs, b: Logprobs) -> float:
    """The share of tokens whose log-probs are equal in every bit of fp32."""
    return float(np.mean(a.astype(np.float32) == b.astype(np.float32)))


def _sequences(prompts: Sequence[Sequence[int]], pieces: Sequence[Piece]) -> list[list[int]]:
    return [[*prompt, *piece.output_ids] for prompt, piece in zip(prompts, pieces, strict=True)]


def _joined(pieces: Sequence[Piece]) -> Logprobs:
    return np.concatenate([np.array(piece.logprobs, np.float64) for piece in pieces])


class _Client:
    """Requests to one server, which remember the versions of the weights that answered."""

    def __init__(self, server: Server, vocab_size: int, timeout_s: float) -> None:
        self._server, self._vocab_size, self._timeout_s = server, vocab_size, timeout_s
        self.versions: set[str] = set()

    def sample(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[Piece]:
        """Responses of full length to all prompts, decoded at the same time."""
        params = SamplingParams(RESPONSE_TOKENS, temperature=temperature)
        requests = [Request(uuid.uuid4().hex, p, (), params, self._vocab_size, None, None, -1) for p in prompts]
        bodies = [request.body() for request in requests]
        for body in bodies:
            body["sampling_params"]["ignore_eos"] = True
        answers = self._server.generate(bodies, self._timeout_s)
        pieces = [request.piece(answer) for request, answer in zip(requests, answers, strict=True)]
        for piece, answer in zip(pieces, answers, strict=True):
            if len(piece.output_ids) != RESPONSE_TOKENS:
                raise Undecided(f"{RESPONSE_TOKENS} tokens were asked for and {len(piece.output_ids)} came", QUIET)
            self._see(answer["meta_info"])
        return pieces

    def prefill(self, sequences: Sequence[Sequence[int]]) -> Logprobs:
        """Log-probs of the responses from one request with all sequences, which ignores what the server has cached."""
        (answers,) = self._server.generate([scoring([list(sequence) for sequence in sequences])], self._timeout_s)
        if not isinstance(answers, list) or len(answers) != len(sequences):
            raise DamagedAnswer("bad_answer", f"a request with {len(sequences)} sequences has not as many answers")
        return np.concatenate([self._scored(s, answer) for s, answer in zip(sequences, answers, strict=True)])

    def _scored(self, sequence: Sequence[int], answer: Any) -> Logprobs:
        try:
            meta = answer["meta_info"]
            entries = meta["input_token_logprobs"]
            values, ids = [entry[0] for entry in entries], [entry[1] for entry in entries]
        except (TypeError, KeyError, IndexError) as error:
            raise DamagedAnswer("bad_answer", f"the log-probs of a prompt are not readable ({error!r:.80})") from None
        # SGLang calls the last id of a vocabulary 0 here
        if len(ids) != len(sequence) or any(i not in (s, 0) for i, s in zip(ids, sequence, strict=True)):
            raise DamagedAnswer("bad_answer", "a prompt came back without a log-prob for each of its tokens")
        self._see(meta)
        return np.array(checked_logprobs(values[PROMPT_TOKENS:]), np.float64)

    def _see(self, meta: Mapping[str, Any]) -> None:
        self.versions.add(str(meta.get("weight_version")))
        self.versions.update(str(span["version"]) for span in meta.get("weight_versions") or ())
