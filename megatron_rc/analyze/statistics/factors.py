"""What explains the mismatch? Columns, and values computed from them, that |l| may depend on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.chunk import Chunk

LOG_MU_EDGES = -np.concatenate([np.geomspace(20, 0.02, 30), [0.005, 0.001, 1e-4, 1e-5, 1e-6]])
"""nats, rising: fine where tokens are likely, because half of all tokens have a log-prob above -0.01."""
MAX_TOKEN_IDS = 1 << 20
"""Ids above this share bins."""


class Factor(NamedTuple):
    title: str
    needs: tuple[str, ...]
    """Columns that must be there."""
    codes: Callable[[Chunk], NDArray[Any]]
    """[N] bin of each loss token, or [S] of each sequence."""
    of_sequences: bool = False
    """True: one value per sequence. The test then permutes sequences, else the tokens within each sequence."""


def octave(values: NDArray[Any]) -> NDArray[np.int64]:
    """Four bins per power of two: bin 0 holds 0, and value 1 is in bin 1."""
    return np.where(values > 0, np.floor(4 * np.log2(np.maximum(values, 1))).astype(np.int64) + 1, 0)


def octave_start(code: int) -> int:
    """The smallest value of a bin of ``octave``."""
    return 0 if code <= 0 else int(np.ceil(2 ** ((code - 1) / 4)))


def log_mu_bin(log_mu: NDArray[np.float64]) -> NDArray[np.int64]:
    """The bin of a logged log-prob; the last bin holds exact zeros alone."""
    return np.where(log_mu == 0, LOG_MU_EDGES.size + 1, np.searchsorted(LOG_MU_EDGES, log_mu, side="right"))


def repeated(chunk: Chunk) -> NDArray[np.int64]:
    """[N] 1 where the id occurred earlier in the sequence."""
    pairs = chunk.sequence_of * MAX_TOKEN_IDS + chunk.tokens["token_id"] % MAX_TOKEN_IDS
    _, first = np.unique(pairs, return_index=True)
    result = np.ones(pairs.size, dtype=np.int64)
    result[first] = 0
    return result


def since_switch(chunk: Chunk, column: str) -> NDArray[np.int64]:
    """[N] octave of the tokens since the value of ``column`` last changed inside the sequence."""
    places = np.arange(chunk.log_pi.size)
    begun = np.maximum.accumulate(np.where(chunk.begins(chunk.tokens[column]), places, 0))
    return octave(places - begun)


def cached_share(chunk: Chunk) -> NDArray[np.int64]:
    """[S] tenths of the prompt that came from the prefix cache."""
    share = chunk.sequences["cached_tokens"] / np.maximum(chunk.sequences["prompt_length"], 1)
    return np.clip(np.ceil(10 * share), 0, 10).astype(np.int64)


def lag(chunk: Chunk) -> NDArray[np.int64]:
    """[N] updates between the weights that drew a token and those that scored it."""
    return chunk.per_token("trainer_version") - chunk.tokens["version"]


def _column(name: str) -> Callable[[Chunk], NDArray[Any]]:
    return lambda chunk: chunk.sequences[name]


FACTORS = {
    "log_mu": Factor("logged log-prob", (), lambda c: log_mu_bin(c.log_mu)),
    "position": Factor("position in the response", (), lambda c: octave(c.tokens["position"])),
    "from_end": Factor("tokens before the end", (), lambda c: octave(c.lengths[c.sequence_of] - 1 - c.index)),
    "token_id": Factor("token id", ("token_id",), lambda c: c.tokens["token_id"] % MAX_TOKEN_IDS),
    "repeated": Factor("id seen before", ("token_id",), repeated),
    "turn": Factor("turn", ("turn",), lambda c: c.tokens["turn"]),
    "turn_start": Factor("tokens since the turn began", ("turn",), lambda c: since_switch(c, "turn")),
    "version_switch": Factor("tokens since the weights changed", ("version",), lambda c: since_switch(c, "version")),
    "lag": Factor("updates since sampling", ("version", "trainer_version"), lag),
    "routes": Factor(
        "experts shifted", ("routes_shifted",), lambda c: np.ceil(10 * c.tokens["routes_shifted"]).astype(np.int64)
    ),
    "length": Factor("length of the response", (), lambda c: octave(c.lengths), True),
    "server": Factor("server", ("server",), _column("server"), True),
    "task": Factor("task", ("task",), _column("task"), True),
    "group": Factor("prompt group", ("group",), _column("group"), True),
    "finish_reason": Factor("finish reason", ("finish_reason",), _column("finish_reason"), True),
    "cached": Factor("cached share of the prompt", ("cached_tokens", "prompt_length"), cached_share, True),
    "syncs": Factor("syncs since the server started", ("syncs",), _column("syncs"), True),
    "retractions": Factor("retractions", ("retractions",), _column("retractions"), True),
    "train_rank": Factor("train rank", ("train_rank",), _column("train_rank"), True),
    "pack_position": Factor("place in the micro-batch", ("pack_position",), _column("pack_position"), True),
}
"""Every factor that a report knows, by its name."""
