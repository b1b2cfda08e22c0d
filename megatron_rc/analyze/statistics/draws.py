"""Do the draws follow the distribution that was logged? Exact tests on the sampler's own top log-probs, without pi.

With q the logged distribution of a token, known on its k most probable ids, honest draws have for every set of ids

    P(the token is in the set) = q(set)           sets: what a filter would drop, ids that came before in the response
    E[log q(token)] = E_q[log q]                  on the listed ids outside of the set, given that the token is there

The difference of the second is the slope of the log-likelihood of q^beta at beta = 1, which a sampler at another
temperature draws from: 1 + sum / information is one step of Newton towards its beta.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.chunk import Chunk, Flags, Floats, Integers
from megatron_rc.analyze.statistics import single_ids
from megatron_rc.analyze.statistics.grid import logit_steps
from megatron_rc.analyze.statistics.significance import Test, normal_p, self_normalised
from megatron_rc.analyze.statistics.single_ids import FEWEST_EXPECTED, IdSums, OneId

NOTHING, SEEN = "nothing", "seen before"
FILTERS = (
    *(("top-p", p) for p in (0.8, 0.9, 0.95, 0.99)), *(("top-k", k) for k in (20, 50)), ("min-p", 0.05), ("min-p", 0.1)
)  # fmt: skip
SETS = (NOTHING, *(f"{kind} {value:g}" for kind, value in FILTERS), SEEN)
"""Sets of ids by what drops them: nothing, a filter, or having come before in the response."""
FIELDS = ("drawn", "mass", "score", "information")
DTYPE = np.dtype([*((name, "f4", (len(SETS),)) for name in FIELDS), *single_ids.DTYPE])
"""The column `draws` of a token, by set: whether it was drawn, its probability q; and outside of it, the token's log q
minus the mean, and the variance. Then the most probable ids one by one."""
_TIE = 1e-5  # nats: equal logits stay equal
_BLOCK = 16_384  # tokens at a time, so that memory stays small


def draws_of(top: Floats, log_mu: Floats, came: Flags | None = None) -> NDArray[Any]:
    """[N] of DTYPE; all is 0 for a set whose end the listed ids do not reach.

    Args:
        top: [N, k] nats, the sampler's log-probs of its most probable ids in any order, -inf or NaN where fewer.
        log_mu: [N] nats, the drawn token's own.
        came: [N, k]: the listed id came before in the response.
    """
    out = np.zeros(len(log_mu), DTYPE)
    for start in range(0, len(log_mu), _BLOCK):
        rows = slice(start, start + _BLOCK)
        _fill(out[rows], np.nan_to_num(top[rows], nan=-np.inf), log_mu[rows], None if came is None else came[rows])
    return out


def _fill(out: NDArray[Any], top: Floats, log_mu: Floats, came: Flags | None) -> None:
    order = np.argsort(-top, axis=1, kind="stable")
    log_q = np.take_along_axis(top, order, axis=1).astype(np.float64)
    q, drawn = np.exp(log_q), log_mu[:, None].astype(np.float64)
    logs, mass = np.where(q > 0, log_q, 0), q.sum(1)
    lowest = np.where(q > 0, log_q, 0.0).min(1)
    tail, listed = np.maximum(0.0, 1 - mass), log_mu >= lowest - _TIE
    # ids of equal probability have the rank, and the mass before them, of the first of them
    first = np.ones(q.shape, bool)
    first[:, 1:] = logs[:, :-1] - logs[:, 1:] > _TIE
    rank = np.maximum.accumulate(np.where(first, np.arange(q.shape[1]), 0), axis=1)
    before = np.take_along_axis(np.cumsum(q, 1) - q, rank, axis=1)
    above = log_q > drawn + _TIE
    drawn_before, drawn_rank = np.where(above, q, 0).sum(1), above.sum(1)
    for number, name in enumerate(SETS):
        dropped, beyond, was, known = np.zeros(q.shape, bool), tail, ~listed, np.ones(len(q), bool)
        if name == SEEN:
            if came is None:
                continue
            dropped = np.take_along_axis(came, order, axis=1)
            same = np.abs(log_q - drawn) <= _TIE
            # of several ids of equal probability, the share that came before
            beyond, was = 0 * tail, (same & dropped).sum(1) / np.maximum(1, same.sum(1))
        elif name != NOTHING:
            kind, bound = FILTERS[number - 1]
            least = log_q[:, :1] + math.log(bound) - _TIE
            if kind == "top-p":
                known, dropped, was = mass >= bound, before >= bound, drawn_before >= bound
            elif kind == "top-k":
                known, dropped, was = (q > 0).sum(1) >= bound, rank >= bound, drawn_rank >= bound
            else:
                known, dropped, was = lowest <= least[:, 0], log_q < least, log_mu < least[:, 0]
        out["drawn"][:, number] = known * was
        out["mass"][:, number] = known * np.minimum(1.0, (q * dropped).sum(1) + beyond)
        kept = q * ~dropped
        share = kept / np.maximum(kept.sum(1), 1e-300)[:, None]
        mean, outside = (share * logs).sum(1), (known & listed) * (1.0 - was)
        out["score"][:, number] = outside * (np.maximum(log_mu, lowest - _TIE) - mean)
        out["information"][:, number] = outside * np.maximum(0.0, (share * logs**2).sum(1) - mean**2)


def columns_of(
    top: Floats,
    log_mu: Floats,
    cu_seqlens: Integers,
    *,
    top_ids: Integers | None = None,
    token_id: Integers | None = None,
    temperature: Floats | None = None,
) -> dict[str, NDArray[Any]]:
    """The columns that a file's top log-probs give, `draws` and `logit_step`.

    Args:
        top: [N, k] as in ``draws_of``.
        log_mu: [N] nats.
        cu_seqlens: [S + 1] where each response starts.
        top_ids: [N, k] the ids of ``top``; with ``token_id`` [N], ids are judged one by one.
        temperature: [N] sampling temperature.
    """
    if top_ids is None or token_id is None or top_ids.shape != top.shape:
        return {"draws": draws_of(top, log_mu), "logit_step": logit_steps(top, temperature)}
    draws = draws_of(top, log_mu, came_before(top_ids, token_id, cu_seqlens))
    single_ids.fill(draws, np.nan_to_num(top, nan=-np.inf), top_ids, token_id)
    return {"draws": draws, "logit_step": logit_steps(top, temperature)}


def came_before(top_ids: Integers, output_ids: Integers, cu_seqlens: Integers) -> Flags:
    """[N, k]: an id of ``top_ids`` [N, k] is among the tokens of its response before it."""
    out = np.zeros(top_ids.shape, bool)
    for start, end in pairwise(cu_seqlens.tolist()):
        if start < end:
            seen, first = np.unique(output_ids[start:end], return_index=True)
            place = np.minimum(np.searchsorted(seen, top_ids[start:end]), len(seen) - 1)
            out[start:end] = (seen[place] == top_ids[start:end]) & (first[place] < np.arange(end - start)[:, None])
    return out


@dataclass(frozen=True)
class Outside:
    """One set: how often it was drawn, and the temperature of the draws outside of it."""

    drawn: float
    expected: float
    """Draws that the logs promise."""
    beta: float
    """Power of the logged distribution that the other tokens were drawn from: 1 / T of a temperature that is not in the
    logs."""
    beta_error: float
    test: Test | None
    """One-sided: fewer draws than the logs say; of the set "nothing", that beta is 1. None with too few expected."""

    @property
    def share(self) -> float:
        """Draws as a share of those expected."""
        return self.drawn / self.expected if self.expected else math.nan


class DrawSums:
    """Sums over tokens with the column `draws`."""

    def __init__(self) -> None:
        self._sums = {name: np.zeros(len(SETS)) for name in (*FIELDS, "variance")}
        self._squares = self._largest = 0.0
        self._ids = IdSums()

    def add(self, chunk: Chunk) -> None:
        if "draws" not in chunk.tokens:
            return
        found = chunk.tokens["draws"]
        self._ids.add(found)
        for name in FIELDS:
            self._sums[name] += found[name].sum(0, dtype=np.float64)
        self._sums["variance"] += (found["mass"] * (1.0 - found["mass"])).sum(0, dtype=np.float64)
        squares = found["score"][:, 0].astype(np.float64) ** 2
        self._squares, self._largest = self._squares + squares.sum(), max(self._largest, squares.max(initial=0.0))

    def worst_id(self) -> OneId | None:
        """The single id whose draws fit the logs worst."""
        return self._ids.worst()

    def draws(self) -> dict[str, Outside] | None:
        """By set; None without a token that has other listed ids than its own."""
        out = {}
        for number, name in enumerate(SETS):
            drawn, expected, score, information, variance = (float(sums[number]) for sums in self._sums.values())
            test = None
            if name == NOTHING:
                if not information:
                    return None
                test = self_normalised("temperature of the draws", score, self._squares, self._largest)
            elif variance >= FEWEST_EXPECTED:
                z = min(0.0, drawn - expected + 0.5) / math.sqrt(variance)
                test = Test(f"draws beyond {name}", z, normal_p(-z, two_sided=False))
            beta, error = (1 + score / information, information**-0.5) if information else (math.nan, math.inf)
            out[name] = Outside(drawn, expected, beta, error, test)
        return out
