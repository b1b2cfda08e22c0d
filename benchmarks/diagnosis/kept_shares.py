"""Print what gates on sequences keep: of Gaussian log-ratios by k3 and length, and of real ones beside them.

    python benchmarks/diagnosis/kept_shares.py                  # the section of docs/presets.md
    python benchmarks/diagnosis/kept_shares.py DUMP [DUMP ...]  # the second table for other dumps

Gaussian: l of a token is N(-K, 2 K), so that E[rho] = 1 and k3 is K; the sum over T tokens is N(-T K, 2 T K).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.readers import open_dump
from megatron_rc.config import Rejection, RolloutCorrection
from megatron_rc.correction import correct

ROOT = Path(__file__).parents[2]
LENGTHS = (40, 400, 2000, 16_000)
K3 = (1e-5, 1e-4, 1e-3, 1e-2)
GATES = {
    "mean of l, 0.999 to 1.001": Rejection("ratio", "sequence", "mean", 0.999, 1.001),
    "mean of l, 0.99 to 1.01": Rejection("ratio", "sequence", "mean", 0.99, 1.01),
    "product of rho, 0.5 to 2": Rejection("ratio", "sequence", "sum", 0.5, 2.0),
    "`standardized`, 2": Rejection("standardized", "sequence", upper=2.0),
}
DUMPS = (
    "examples/dumps/healthy.parquet",
    *(f"tests/support/data/traps/healthy-{kind}.parquet" for kind in ("bf16", "fp8-weights", "int8-weights")),
)
PREFIXES = (10, 40, 150)
"""Tokens; the first tokens of a response are a shorter response that was sampled as honestly."""
QUARTERS = ("lowest", "second", "third", "highest")
SHOWN = ("mean of l, 0.999 to 1.001", "`standardized`, 2")
TEXT = """
## What gates on whole sequences keep

`python benchmarks/diagnosis/kept_shares.py` prints the rest of this page. The first table gives the share of honest
sequences that a gate keeps, by the mean k3 of the engines and the number of tokens T, where log-ratios are Gaussian:
they then say nothing about a sequence, because all of it is noise. A fixed bound fits some cells of the table, and
`standardized` keeps about 95 % in all of them. The last rows are its price: the share of the probability of **pi**
that lies in what the gate keeps. It falls as T k3 grows, because a long sequence that pi likes is rare under mu. So
this gate is an outlier filter, not a correction of bias; it stands beside a weight, and beside `max_k3`, because it
adapts to a gap that grows. The preset is experimental: the runs above end no better with it than with the best fixed
bound.

"""
REAL = f"""
### Real log-ratios

The shares for log-ratios of real samplers and trainers: of the first {", ".join(map(str, PREFIXES[:-1]))} and
{PREFIXES[-1]} tokens of the responses that have as many, and of whole responses by quarter of their mean entropy. In
brackets stands the share that Gaussian log-ratios of the same lengths and the same mean k3 would keep; tails make the
difference. One sequence of a quarter is 2 % of it in the first dump and 4 % in the others.

"""


def kept_of_gaussian(gate: Rejection, length: int, k3: float) -> float:
    """Share of the sums that lie within the bounds."""
    mean, spread = -length * k3, math.sqrt(2 * length * k3)
    assert gate.upper is not None
    if gate.statistic == "standardized":
        low, high = mean - gate.upper * spread, mean + gate.upper * spread
    else:
        assert gate.lower is not None
        each = length if gate.reduce == "mean" else 1
        low, high = each * math.log(gate.lower), each * math.log(gate.upper)
    return _inside(NormalDist(mean, spread), low, high)


def pi_mass(gate: Rejection, length: int, k3: float) -> float:
    """Share of pi's probability: under pi the sums are N(T K, 2 T K)."""
    mean, spread = length * k3, math.sqrt(2 * length * k3)
    assert gate.upper is not None
    return _inside(NormalDist(mean, spread), -mean - gate.upper * spread, -mean + gate.upper * spread)


def _inside(law: NormalDist, low: float, high: float) -> float:
    return law.cdf(high) - law.cdf(low)


def percent(share: float) -> str:
    text = f"{100 * share:.2g}" if share < 0.095 else f"{100 * share:.0f}"
    return f"{text} %" if share >= 1e-6 else "0 %"


def gaussian_table() -> str:
    lines = [row("gate", "k3", *(f"T = {length:,}" for length in LENGTHS)), row(*["---"] * (2 + len(LENGTHS)))]
    for name, gate in GATES.items():
        lines += [row(name, f"{k3:.0e}", *(percent(kept_of_gaussian(gate, t, k3)) for t in LENGTHS)) for k3 in K3]
    gate = GATES["`standardized`, 2"]
    name = "π's share of what `standardized` keeps"
    lines += [row(name, f"{k3:.0e}", *(percent(pi_mass(gate, t, k3)) for t in LENGTHS)) for k3 in K3]
    return "\n".join(lines) + "\n"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def real_table(dumps: Sequence[Path]) -> str:
    names = (*(f"first {count}" for count in PREFIXES), *(f"entropy {quarter}" for quarter in QUARTERS))
    lines = [row("dump", "k3", "gate", *names), row(*["---"] * (3 + len(names)))]
    for path in dumps:
        chunk = _whole(path)
        for name in SHOWN:
            gate = GATES[name]
            cells = []
            for count in PREFIXES:
                kept, gaussian, _ = _shares(_first(chunk, count), gate)
                cells.append(_beside(kept, gaussian))
            kept, gaussian, k3 = _shares(chunk, gate)
            quarter = _quarter_by_entropy(chunk)
            cells += [_beside(kept[quarter == q], gaussian[quarter == q]) for q in range(len(QUARTERS))]
            lines.append(row(f"{path.stem}, {chunk.num_sequences} responses", f"{k3:.1e}", name, *cells))
    return "\n".join(lines) + "\n"


def _beside(kept: np.ndarray, gaussian: np.ndarray) -> str:
    return f"{percent(kept.mean())} ({percent(gaussian.mean())})" if kept.size else "none"


def _whole(path: Path) -> Chunk:
    """The sequences of a dump that have tokens."""
    chunks = list(open_dump(path).chunks())
    assert len(chunks) == 1, f"{path} is larger than this table is meant for"
    return chunks[0]


def _first(chunk: Chunk, count: int) -> Chunk:
    """The first tokens of the sequences that have as many."""
    rows = (chunk.index < count) & (chunk.lengths >= count)[chunk.sequence_of]
    offsets = np.arange(int(rows.sum()) // count + 1) * count
    return Chunk(chunk.log_pi[rows], chunk.log_mu[rows], offsets)


def _shares(chunk: Chunk, gate: Rejection) -> tuple[np.ndarray, np.ndarray, float]:
    """([S] whether each sequence is kept, [S] the share of Gaussian ones, the mean k3 that `standardized` uses)."""
    # any correction with that statistic measures K
    measures = Rejection("standardized", "sequence", upper=math.inf)
    found = correct(
        torch.from_numpy(chunk.log_pi),
        torch.from_numpy(chunk.log_mu),
        torch.ones(chunk.log_pi.size, dtype=torch.bool),
        correction=RolloutCorrection(reject=(gate,) if gate.statistic == measures.statistic else (gate, measures)),
        cu_seqlens=torch.from_numpy(chunk.cu_seqlens),
    )
    assert found.mean_k3 is not None
    k3 = found.mean_k3.item()
    kept = np.bincount(chunk.sequence_of, weights=found.mask.numpy(), minlength=chunk.num_sequences) > 0
    return kept, np.array([kept_of_gaussian(gate, int(length), k3) for length in chunk.lengths]), k3


def _quarter_by_entropy(chunk: Chunk) -> np.ndarray:
    total = np.bincount(chunk.sequence_of, weights=chunk.per_token("entropy"), minlength=chunk.num_sequences)
    mean = total / chunk.lengths
    return np.searchsorted(np.quantile(mean, (0.25, 0.5, 0.75), method="inverted_cdf"), mean)


def main() -> None:
    if len(sys.argv) > 1:
        print(real_table([Path(path) for path in sys.argv[1:]]), end="")
        return
    print(TEXT + gaussian_table() + REAL + real_table([ROOT / path for path in DUMPS]), end="")


if __name__ == "__main__":
    main()
