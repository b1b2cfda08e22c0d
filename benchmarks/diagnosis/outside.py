"""Healthy and faulty dumps of a simulator on which no limit was fitted: is a healthy one accused, is a fault found?

    python benchmarks/diagnosis/outside.py --first 2000    # 240 healthy dumps and as many faults as show: eight minutes
    python benchmarks/diagnosis/outside.py --healthy 20 --faulty 8

Every token has its own candidates of a Zipf vocabulary. The sampler's logits are the trainer's plus a noise of any
size and tail, plus what training has moved since; tokens are drawn from the sampler, and both sides logged. A fault has
twice the size that the report on its healthy twin says it would have shown. No code is shared with tests/support.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import special, stats

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders of benchmarks/ are packages

from diagnosis.real_dumps import accusing
from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.diagnosis import Diagnosis, diagnosis_of
from megatron_rc.analyze.readers.dump import CorruptRows
from megatron_rc.files import write_csv
from megatron_rc.jobs.describe import table

RESULTS = Path(__file__).with_name("results") / "outside.csv"
CANDIDATES, SERVERS = 64, 4
AT_ONCE = 40_000
"""Tokens whose candidates are in memory at once."""


@dataclass(frozen=True)
class Setting:
    seed: int
    tokens: int
    length: int
    vocabulary: int
    sharpness: float
    """Factor of the logits: from 3 nats of entropy to 0.05."""
    noise: float
    tail: str
    temperature: float
    lag: tuple[int, ...]
    """Updates since sampling, of which each response has one; () where versions are unknown."""
    kept: str
    """all; groups: prompts whose rewards are equal are dropped; right: only right answers are kept."""

    @staticmethod
    def drawn(seed: int) -> "Setting":
        random = np.random.default_rng(10_000 + seed)

        def one(*values: Any) -> Any:
            return values[int(random.integers(len(values)))]

        lag = one((), (), (), (int(random.integers(1, 17)),), (0, 1, 2, 4), (0, 8, 16))
        tokens = int(np.exp(random.uniform(np.log(200), np.log(120_000)))) if seed % 40 else 1_000_000
        return Setting(
            seed=seed,
            tokens=tokens,
            length=one(20, 60, 200, 800, 4_000),
            vocabulary=one(16, 256, 4_096, 32_000, 150_000),
            sharpness=one(0.7, 1.2, 2.5, 6.0),
            noise=one(1e-3, 0.01, 0.05, 0.1, 0.3, 0.6),
            tail=one("normal", "student", "flips", "rare"),
            temperature=one(0.2, 0.7, 1.0, 1.0, 1.3),
            lag=lag,
            kept=one("all", "all", "all", "groups", "right"),
        )


@dataclass(frozen=True)
class Fault:
    """What differs from an honest dump; sizes of 0 are none."""

    temperature: float = 0.0
    """Hidden: tokens are drawn at T (1 - this)."""
    missing: float = 0.0
    """The trainer's softmax has one more id, with this times the probability of all others."""
    server: float = 0.0
    """Factor by which the noise of server 0 is larger."""
    shift: bool = False


def dump(setting: Setting, fault: Fault = Fault()) -> Chunk:
    """The dump of a setting."""
    random = np.random.default_rng(setting.seed)
    count = max(4, setting.tokens // setting.length)
    lengths = np.maximum(1, (setting.length * np.exp(random.normal(-0.1, 0.5, count))).astype(np.int64))
    lengths = np.minimum(lengths, max(1, setting.tokens))
    sequence = np.repeat(np.arange(count), lengths)
    server = np.arange(count) % SERVERS
    lags = np.array(setting.lag or (0,))[np.arange(count) % max(1, len(setting.lag))]
    moved = random.normal(size=setting.vocabulary) * 0.05
    parts: list[dict[str, np.ndarray]] = []
    for start in range(0, sequence.size, AT_ONCE):
        rows = sequence[start : start + AT_ONCE]
        scale = np.where(server[rows] == 0, max(1.0, fault.server), 1.0)
        parts.append(_tokens(random, setting, fault, lags[rows], scale, moved))
    flat = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if fault.shift:
        flat["log_mu"] = np.roll(flat["log_mu"], 1)
    tokens = {name: flat[name] for name in ("entropy", "token_id")}
    sequences: dict[str, np.ndarray] = {
        "step": np.arange(count) * 2 // count,
        "group": np.arange(count) // 4,
        "server": np.array([f"server {number}" for number in server]),
        "temperature": np.full(count, setting.temperature),
    }
    if setting.lag:
        tokens["version"], sequences["trainer_version"] = (20 - lags)[sequence], np.full(count, 20)
    chunk = Chunk(flat["log_pi"], flat["log_mu"], np.concatenate([[0], np.cumsum(lengths)]), tokens, sequences)
    return _kept(random, setting, chunk)


def _tokens(
    random: np.random.Generator, setting: Setting, fault: Fault, lag: np.ndarray, scale: np.ndarray, moved: np.ndarray
) -> dict[str, np.ndarray]:
    """Values of N tokens, each with candidates [N, K] of its own."""
    size = (lag.size, min(CANDIDATES, setting.vocabulary))
    # Zipf: the frequent ids come again and again
    ids = np.minimum((setting.vocabulary ** random.random(size)).astype(np.int64), setting.vocabulary - 1)
    surer = setting.sharpness * np.exp(random.normal(0, 0.8, (lag.size, 1)))
    logits = surer * random.normal(size=size)
    noise = setting.noise * _noise(random, setting.tail, size, ids, setting.vocabulary) * scale[:, None]
    drift = np.sqrt(lag)[:, None] * (moved[ids] + 0.02 * random.normal(size=size)) - 0.004 * lag[:, None] * logits
    log_pi = special.log_softmax(logits / setting.temperature, axis=1)
    sampled = (logits + drift + noise) / setting.temperature
    log_mu = special.log_softmax(sampled, axis=1)
    entropy = -(np.exp(log_pi) * log_pi).sum(axis=1)
    if fault.missing:
        leaked = fault.missing / (1 + fault.missing)
        log_pi = log_pi - np.log1p(fault.missing)
        entropy = -(np.exp(log_pi) * log_pi).sum(axis=1) - leaked * np.log(leaked)
    drawn_from = special.log_softmax(sampled / (1 - fault.temperature), axis=1) if fault.temperature else log_mu
    chosen = np.argmax(drawn_from + random.gumbel(size=size), axis=1)
    of_candidates = {"log_pi": log_pi, "log_mu": log_mu, "token_id": ids}
    of_tokens = {name: values[np.arange(lag.size), chosen] for name, values in of_candidates.items()}
    return {**of_tokens, "entropy": entropy}


def _noise(
    random: np.random.Generator, tail: str, size: tuple[int, int], ids: np.ndarray, vocabulary: int
) -> np.ndarray:
    if tail == "student":
        return random.standard_t(4, size=size) / np.sqrt(2)
    if tail == "flips":
        return random.normal(size=size) * np.where(random.random((size[0], 1)) < 0.04, 8.0, 0.6)
    if tail == "rare":
        return random.normal(size=size) * (0.7 + 0.6 * np.log1p(ids) / np.log1p(vocabulary))
    return random.normal(size=size)


def _kept(random: np.random.Generator, setting: Setting, chunk: Chunk) -> Chunk:
    """The responses that are dumped; a reward depends on how likely the response is."""
    if setting.kept == "all":
        return chunk
    score = np.bincount(chunk.sequence_of, chunk.log_pi) / chunk.lengths + 0.1 * random.normal(size=chunk.num_sequences)
    reward = (score > np.median(score)).astype(np.float64)
    group = chunk.sequences["group"]
    mean = np.bincount(group, reward) / np.bincount(group)
    advantage = reward - mean[group]
    known = {**chunk.sequences, "reward": reward, "advantage": advantage}
    whole = replace(chunk, sequences=known)
    keep = np.abs(advantage) > 0 if setting.kept == "groups" else advantage > 0
    return whole.select_sequences(keep) if keep.sum() >= 4 else chunk


def diagnosed(chunk: Chunk) -> Diagnosis:
    return diagnosis_of([chunk], "outside", "arrays", CorruptRows())


FAULTS: dict[str, tuple[tuple[str, ...], Callable[[Diagnosis], Fault | None]]] = {
    "hidden temperature": (
        ("RC103",),
        lambda d: Fault(temperature=2 * d.power.temperature) if (d.power.temperature or 1) < 0.2 else None,
    ),
    "missing mass": (
        ("RC102", "RC106"),
        lambda d: Fault(missing=2 * d.power.missing_mass) if (d.power.missing_mass or 1) < 0.1 else None,
    ),
    "stale server": (("RC303",), lambda d: Fault(server=5.0) if (d.power.server or 1) < 1 / SERVERS else None),
    "shift": (("RC201",), lambda d: Fault(shift=True) if d.evidence.whole.tokens >= 1_000 else None),
}
"""Rules that are right, and the fault of twice the stated size; None where these data would not have shown it."""


class Row(NamedTuple):
    """What an analysis says of one dump."""

    dump: str
    """healthy, or the name of its fault."""
    seed: int
    tokens: int
    accused: str
    """found: a right rule accuses; else all that accuse, or none."""


def row_of(dump: str, seed: int, found: Diagnosis, right: tuple[str, ...] = ()) -> Row:
    accused = accusing(found)
    said = "; ".join(f"{v.code} {v.level}" for v in accused) or "none"
    return Row(dump, seed, found.evidence.whole.tokens, "found" if any(v.code in right for v in accused) else said)


def healthy_row(seed: int) -> Row:
    return row_of("healthy", seed, diagnosed(dump(Setting.drawn(seed))))


def faulty_row(seed: int) -> Row | None:
    name = [*FAULTS][seed % len(FAULTS)]
    right, planted = FAULTS[name]
    setting = replace(Setting.drawn(seed), kept="all", lag=(), vocabulary=32_000)
    fault = planted(diagnosed(dump(setting)))
    return fault and row_of(name, seed, diagnosed(dump(setting, fault)), right)


def summary(rows: list[Row]) -> str:
    """A line per kind, with the bound of Clopper and Pearson at 95 %."""
    lines = []
    for kind in dict.fromkeys(row.dump for row in rows):
        answers = Counter(row.accused for row in rows if row.dump == kind)
        count, healthy = answers.total(), kind == "healthy"
        hits = count - answers["none"] if healthy else answers["found"]
        bounds = stats.binomtest(hits, count, alternative="less" if healthy else "greater").proportion_ci(0.95)
        rate = f"at most {bounds.high:.1%}" if healthy else f"at least {bounds.low:.1%}"
        others = ", ".join(f"{name} ({n})" for name, n in answers.items() if name not in ("none", "found")) or "none"
        lines.append((kind, f"{hits} of {count} {'accused' if healthy else 'found'}", rate, others))
    return table(("dumps", "result", "rate, 95 %", "other answers"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--healthy", type=int, default=240)
    parser.add_argument("--faulty", type=int, default=240, help="seeds; those that would not show are left out")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for make, count in ((healthy_row, options.healthy), (faulty_row, options.faulty)):
        for seed in range(options.first, options.first + count):
            if (row := make(seed)) is not None:
                rows.append(row)
                print(*row, sep=",", flush=True)
    write_csv(Row, rows, options.out, digits=4)
    print(summary(rows), end="", file=sys.stderr)


if __name__ == "__main__":
    main()
