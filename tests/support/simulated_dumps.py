"""Dumps of a simulated sampler and trainer, honest or with one trap, whose every probability is known.

Trainer: Gaussian logits times a log-normal sharpness that changes slowly along a response. Sampler: the same logits
with noise. A trap changes what the sampler draws from, what it logs, or what the trainer computes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import special

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.diagnosis import Diagnosis, diagnosis_of
from megatron_rc.analyze.evidence import Evidence, Gathering
from megatron_rc.analyze.headline import HEADLINES, headline
from megatron_rc.analyze.readers.dump import CorruptRows
from megatron_rc.analyze.report_text import size_lines
from megatron_rc.analyze.rules.rule import DOUBTS, Level

VOCABULARY, LENGTH, SEQUENCES = 256, 160, 192
log_softmax = partial(special.log_softmax, axis=1)


@dataclass
class World:
    """Logits and log-probs [N, V] of both sides before a trap."""

    random: np.random.Generator
    logits: np.ndarray
    noisy: np.ndarray
    sequence: np.ndarray
    position: np.ndarray


def world(seed: int, noise: float = 0.03, sequences: int = SEQUENCES) -> World:
    random = np.random.default_rng(seed)
    size = (sequences, LENGTH)
    steps = random.normal(size=size)
    level = np.empty(size)
    level[:, 0] = steps[:, 0]
    for t in range(1, LENGTH):
        level[:, t] = 0.8 * level[:, t - 1] + 0.6 * steps[:, t]
    logits = random.normal(size=(sequences * LENGTH, VOCABULARY)) * np.exp(0.8 + 0.7 * level).reshape(-1, 1)
    noisy = logits + noise * random.normal(size=logits.shape)
    index = np.arange(sequences * LENGTH)
    return World(random, logits, noisy, index // LENGTH, index % LENGTH)


def draw(random: np.random.Generator, log_probs: np.ndarray) -> np.ndarray:
    """[N] ids drawn from [N, V] log-probs, -inf for ids that cannot come."""
    return np.argmax(log_probs + random.gumbel(size=log_probs.shape), axis=1)


def chunk_of(w: World, ids: np.ndarray, log_pi: np.ndarray, log_mu: np.ndarray, **columns: Any) -> Chunk:
    """A chunk of the drawn ids, from the log-probs [N, V] of the trainer and the logged ones [N] or [N, V]."""
    rows = np.arange(ids.size)
    probs = np.exp(log_pi)
    entropy = -(probs * np.where(probs > 0, log_pi, 0)).sum(axis=1)
    sequences = int(w.sequence[-1]) + 1
    return Chunk(
        log_pi[rows, ids], log_mu if log_mu.ndim == 1 else log_mu[rows, ids], np.arange(sequences + 1) * LENGTH,
        {"entropy": entropy, "token_id": ids, **{k: v for k, v in columns.items() if v.size == ids.size}},
        {"step": np.zeros(sequences, dtype=np.int64), **{k: v for k, v in columns.items() if v.size == sequences}},
    )  # fmt: skip


def sampled(w: World, logits: np.ndarray, **columns: Any) -> Chunk:
    """Drawn from these logits [N, V] and logged with their log-probs."""
    log_mu = log_softmax(logits)
    return chunk_of(w, draw(w.random, log_mu), log_softmax(w.logits), log_mu, **columns)


def honest(w: World) -> Chunk:
    return sampled(w, w.noisy)


def small_honest(seed: int, *, sequences: int = 12, length: int = 50, noise: float = 0.05) -> Chunk:
    """An honest dump of few tokens and 24 ids that is made in milliseconds, with the columns that most rules need.

    |l| grows with -log mu, as on real engines. Servers, caches and lags mean nothing here.
    """
    random, tokens = np.random.default_rng(seed), sequences * length
    logits = random.standard_normal((tokens, 24)) * np.exp(0.3 * random.standard_normal((tokens, 1)))
    pi, mu = log_softmax(logits), log_softmax(logits + noise * random.standard_normal(logits.shape))
    cumulative = np.cumsum(np.exp(mu), axis=1)
    ids = np.minimum((cumulative < random.random((tokens, 1)) * cumulative[:, -1:]).sum(axis=1), 23)
    rows, order = np.arange(tokens), np.arange(sequences)
    return Chunk(
        pi[rows, ids], mu[rows, ids], np.arange(sequences + 1) * length,
        {"entropy": -(np.exp(pi) * pi).sum(axis=1), "version": np.repeat(order % 2, length)},
        {
            "step": order * 2 // sequences, "server": np.array(["a", "b"])[order % 2],
            "trainer_version": np.ones(sequences, dtype=np.int64), "prompt_length": np.full(sequences, 20),
            "cached_tokens": random.integers(0, 2, sequences) * 16, "syncs": random.integers(0, 4, sequences),
        },
    )  # fmt: skip


def kept(log_probs: np.ndarray, top_p: float) -> np.ndarray:
    """[N, V] True for the ids of the smallest set that holds ``top_p`` of the probability."""
    order = np.argsort(-log_probs, axis=1)
    sorted_probs = np.take_along_axis(np.exp(log_probs), order, axis=1)
    keep_sorted = np.cumsum(sorted_probs, axis=1) - sorted_probs < top_p
    keep = np.zeros(log_probs.shape, dtype=bool)
    np.put_along_axis(keep, order, keep_sorted, axis=1)
    return keep


def renormalised_top_p(w: World, top_p: float) -> Chunk:
    full = log_softmax(w.noisy)
    return sampled(w, np.where(kept(full, top_p), full, -1e30))


def hidden_top_p(w: World, top_p: float) -> Chunk:
    full = log_softmax(w.noisy)
    return chunk_of(w, draw(w.random, np.where(kept(full, top_p), full, -np.inf)), log_softmax(w.logits), full)


def hidden_temperature(w: World, temperature: float) -> Chunk:
    return chunk_of(w, draw(w.random, log_softmax(w.noisy / temperature)), log_softmax(w.logits), log_softmax(w.noisy))


def raw_logs(w: World, temperature: float) -> Chunk:
    """Sampled and trained at a temperature; logged without it."""
    ids = draw(w.random, log_softmax(w.noisy / temperature))
    return chunk_of(w, ids, log_softmax(w.logits / temperature), log_softmax(w.noisy))


def padded_vocabulary(w: World, rows: int) -> Chunk:
    """The trainer's softmax runs over ``rows`` more logits of 0."""
    log_mu = log_softmax(w.noisy)
    return chunk_of(w, draw(w.random, log_mu), log_softmax(np.pad(w.logits, ((0, 0), (0, rows)))), log_mu)


def shifted(w: World) -> Chunk:
    return relogged(w, lambda log_mu: np.where(w.position == 0, -1.0, np.roll(log_mu, 1)))


def zero_filled(w: World, share: float) -> Chunk:
    """Every so many sequences have 0.0 for all log-probs of the sampler."""
    return relogged(w, lambda log_mu: np.where(w.sequence % round(1 / share) == 0, 0.0, log_mu))


def forced_end(w: World) -> Chunk:
    """The last token was forced, with 0.0 for its log-prob."""
    last = w.position == LENGTH - 1
    chunk = relogged(w, lambda log_mu: np.where(last, 0.0, log_mu))
    return replace(chunk, log_pi=np.where(last, log_softmax(w.logits)[:, 0], chunk.log_pi))


def other_context(w: World) -> Chunk:
    """The sampler's context differs at the start, and less and less later."""
    more = w.random.normal(size=w.noisy.shape) * (0.6 * np.exp(-w.position / 15))[:, None]
    return sampled(w, w.noisy + more)


def one_stale_server(w: World) -> Chunk:
    server = np.array(list("abcd"))[np.arange(int(w.sequence[-1]) + 1) % 4]
    more = w.random.normal(size=w.noisy.shape) * np.where(server[w.sequence] == "c", 0.4, 0.0)[:, None]
    return sampled(w, w.noisy + more, server=server)


def stale_cache(w: World) -> Chunk:
    """A cached prompt of old weights: the longer it was cached, the further the sampler is off."""
    sequences = int(w.sequence[-1]) + 1
    cached, syncs = w.random.integers(0, 2, sequences) * 64, np.sort(w.random.integers(0, 12, sequences))
    size = np.where(cached > 0, 0.06 * syncs, 0.0)[w.sequence] * np.exp(-w.position / 80)
    columns = {"cached_tokens": cached, "syncs": syncs, "prompt_length": np.full(sequences, 80)}
    return sampled(w, w.noisy + w.random.normal(size=w.noisy.shape) * size[:, None], **columns)


def expert_flips(w: World) -> Chunk:
    flips = w.random.random(w.sequence.size) < 0.05
    more = w.random.normal(size=w.noisy.shape) * np.where(flips, 0.8, 0.0)[:, None]
    return sampled(w, w.noisy + more, routes_shifted=np.where(flips, w.random.integers(1, 8, flips.size) / 8, 0.0))


def policy_lag(w: World) -> Chunk:
    """Sequences of weights that are up to four updates old."""
    sequences = int(w.sequence[-1]) + 1
    lag = w.random.integers(0, 5, sequences)
    size = 0.1 * np.sqrt(lag)[w.sequence][:, None] * w.random.normal(size=w.noisy.shape)
    return sampled(w, w.noisy + size, **{"version": (10 - lag)[w.sequence], "trainer_version": np.full(sequences, 10)})


def repetition_penalty(w: World, size: float) -> Chunk:
    """Logits of ids that came before are divided by ``size`` if positive, else multiplied; the logs show it."""
    sequences = int(w.sequence[-1]) + 1
    logits = w.noisy.reshape(sequences, LENGTH, VOCABULARY).copy()
    seen, ids = np.zeros((sequences, VOCABULARY), dtype=bool), np.zeros((sequences, LENGTH), dtype=np.int64)
    for t in range(LENGTH):
        row = logits[:, t]
        logits[:, t] = np.where(seen, np.where(row > 0, row / size, row * size), row)
        ids[:, t] = draw(w.random, log_softmax(logits[:, t]))
        seen[np.arange(sequences), ids[:, t]] = True
    return chunk_of(w, ids.reshape(-1), log_softmax(w.logits), log_softmax(logits.reshape(w.noisy.shape)))


def relogged(w: World, change: Callable[[np.ndarray], np.ndarray]) -> Chunk:
    chunk = honest(w)
    return replace(chunk, log_mu=change(chunk.log_mu))


def shuffled_rows(log_mu: np.ndarray) -> np.ndarray:
    """[N] with every response moved to the place of the next one."""
    return np.roll(log_mu.reshape(-1, LENGTH), 1, axis=0).reshape(-1)


def likeliest_logged(w: World) -> Chunk:
    full = log_softmax(w.noisy)
    return chunk_of(w, draw(w.random, full), log_softmax(w.logits), full.max(axis=1))


def noisier(w: World, size: float, rows: np.ndarray, columns: slice = slice(None), **more: np.ndarray) -> Chunk:
    """The sampler has more noise on the logits of ``rows`` [N] and ``columns`` of [V]."""
    extra = np.zeros(w.noisy.shape)
    extra[rows, columns] = size * w.random.normal(size=extra[rows, columns].shape)
    return sampled(w, w.noisy + extra, **more)


def later_turn(w: World) -> Chunk:
    """The second turn, behind five tokens outside the loss, is off."""
    return noisier(w, 0.3, w.position >= 80, loss_mask=(w.position < 75) | (w.position >= 80))


def stale_shard(w: World) -> Chunk:
    """One of eight shards of a vocabulary of 5,120 ids is off."""
    chunk = noisier(w, 0.3, w.position >= 0, slice(64, 96))
    return replace(chunk, tokens={**chunk.tokens, "token_id": chunk.tokens["token_id"] * 20})


def missing_bias(w: World) -> Chunk:
    """The sampler adds half a nat to every sixteenth id."""
    return sampled(w, w.noisy + np.where(np.arange(VOCABULARY) % 16 == 0, 0.5, 0.0))


TRAPS: dict[str, tuple[str, Callable[[World], Chunk]]] = {
    "logged temperature .7": ("RC101", lambda w: sampled(w, w.noisy / 0.7)),
    "logged temperature .98": ("RC101", lambda w: sampled(w, w.noisy / 0.98)),
    "renormalised top-p .95": ("RC102", lambda w: renormalised_top_p(w, 0.95)),
    "renormalised top-p .99": ("RC102", lambda w: renormalised_top_p(w, 0.99)),
    "hidden temperature .7": ("RC103", lambda w: hidden_temperature(w, 0.7)),
    "hidden temperature .95": ("RC103", lambda w: hidden_temperature(w, 0.95)),
    "hidden top-p .95": ("RC103", lambda w: hidden_top_p(w, 0.95)),
    "hidden top-p .99": ("RC103", lambda w: hidden_top_p(w, 0.99)),
    "raw logs at temperature .7": ("RC104", lambda w: raw_logs(w, 0.7)),
    "raw logs at temperature .95": ("RC104", lambda w: raw_logs(w, 0.95)),
    "padded vocabulary": ("RC106", lambda w: padded_vocabulary(w, 2)),
    "repetition penalty": ("RC105", lambda w: repetition_penalty(w, 1.2)),
    "logs of base 2": ("RC108", lambda w: relogged(w, lambda log_mu: log_mu / np.log(2))),
    "logs of no decimals but one": ("RC108", lambda w: relogged(w, lambda log_mu: np.round(log_mu, 1))),
    "shifted by one": ("RC201", shifted),
    "rows paired wrongly": ("RC208", lambda w: relogged(w, shuffled_rows)),
    "sentinel": ("RC209", lambda w: relogged(w, lambda log_mu: np.where(w.position == 7, -9999.0, log_mu))),
    "likeliest id logged": ("RC210", likeliest_logged),
    "later turn off": ("RC206", later_turn),
    "stale shard": ("RC306", stale_shard),
    "a bias on some ids": ("RC307", missing_bias),
    "failed responses": ("RC402", lambda w: noisier(w, 0.8, w.sequence % 10 == 5)),
    "zero-filled": ("RC203", lambda w: zero_filled(w, 1 / 8)),
    "forced end": ("RC203", forced_end),
    "another template": ("RC205", other_context),
    "stale cache": ("RC301", stale_cache),
    "one stale server": ("RC303", one_stale_server),
    "expert flips": ("RC404", expert_flips),
    "honest": ("RC501", honest),
    "policy lag": ("RC502", policy_lag),
}
"""Expected rule and maker of every simulated dump."""
ONE_EACH = list({code: name for name, (code, _) in reversed(TRAPS.items())}.values())
"""The strongest dump of every rule."""


def diagnosed(*chunks: Chunk, source: str = "a dump", **options: Any) -> Diagnosis:
    return diagnosis_of(chunks, source, "arrays", CorruptRows(), **options)


def evidence_of(*chunks: Chunk) -> Evidence:
    gathering = Gathering()
    for chunk in chunks:
        gathering.add(chunk)
    return gathering.evidence()


def levels(diagnosis: Diagnosis) -> dict[str, Level]:
    return {verdict.code: verdict.level for verdict in diagnosis.verdicts}


def write_dump(chunk: Chunk, path: Path) -> Path:
    lists = {"old_logprobs": chunk.log_pi, "rollout_logprobs": chunk.log_mu}
    names = {"entropy": "entropy", "token_id": "output_ids"}
    lists |= {names[name]: values for name, values in chunk.tokens.items() if name in names}
    offsets = chunk.cu_seqlens.astype(np.int32)
    columns = {name: pa.ListArray.from_arrays(offsets, values) for name, values in lists.items()}
    # a file has whole numbers for its groups
    columns |= {name: pa.array(values.tolist()) for name, values in chunk.sequences.items() if name != "group"}
    pq.write_table(pa.table(columns), path)
    return path


def contradictions(found: Diagnosis) -> list[str]:
    """What the report says that its headline or recommendation denies; empty if nothing."""
    evidence, said, large = found.evidence, headline(found), found.evidence.whole.k3 >= 1e-3
    experts = any(verdict.code == "RC404" for verdict in found.verdicts)
    adds_up = evidence.growth.exponent >= 0.8 and "later tokens are noisier" not in dict(size_lines(evidence))["growth"]
    all_clear = said == HEADLINES[Level.NUMERICS]
    denied = {
        "a rule doubts": all_clear and any(verdict.level in DOUBTS for verdict in found.verdicts),
        # both are NaN where there are too few responses
        "the gap adds up": all_clear and large and not experts and adds_up,
        "few tokens carry it": all_clear and large and not experts and evidence.token_tail.k > 0.7,
        "too few tokens": all_clear and evidence.whole.tokens < 1_000,
        "a bug comes first": ("bug" in found.recommendation.headline) != (found.level is Level.BUG),
        "none at a gap at which runs failed": found.recommendation.method == "none" and evidence.whole.k3 >= 0.012,
    }
    return [what for what, holds in denied.items() if holds]
