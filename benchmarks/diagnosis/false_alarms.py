"""How often an analysis calls an honest dump a bug.

    python benchmarks/diagnosis/false_alarms.py                              # 300 dumps of 30,000 tokens, 25 per row
    python benchmarks/diagnosis/false_alarms.py --tokens 1000000 --dumps 5
    python benchmarks/diagnosis/false_alarms.py --tokens 30000000 --dumps 1 --roundings "4 decimals"

Every token is drawn afresh from the distribution of a real sampler (bf16) in a real context, and scored by the real
trainer (fp32). The log-probs of both sides are then rounded as hosts round them; half of the dumps end early.
Sharpness multiplies the logits of both sides: entropy falls with it. All dumps of a table are independent draws.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders of benchmarks/ are packages

from diagnosis.real_dumps import accusing
from diagnosis.traps.lab import LENGTH, Lab
from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.diagnosis import Diagnosis, diagnosis_of
from megatron_rc.analyze.readers.dump import CorruptRows
from megatron_rc.analyze.rules.rule import Level
from megatron_rc.engine import SamplingParams
from megatron_rc.jobs.describe import table
from megatron_rc.rollout.embedded import engine

CONTEXTS = 12
"""Responses whose distributions are kept, LENGTH each."""
CHUNK = 2000
"""Sequences that are drawn at once."""
ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda values: values,
    "bf16": lambda values: torch.tensor(values, dtype=torch.bfloat16).double().numpy(),
    "float16": lambda values: values.astype(np.float16).astype(np.float64),
    "4 decimals": lambda values: np.round(values, 4),
}
"""How the log-probs of both sides may be kept."""


@dataclass(frozen=True)
class Tables:
    """Log-probs [CONTEXTS, LENGTH, V] of the trainer (fp32) and the sampler (bf16) in the same contexts, nats."""

    log_pi: Tensor
    log_mu: Tensor

    def sharper(self, factor: float) -> "Tables":
        """Both with their logits multiplied, as those of a model that is surer of itself."""
        return Tables(*((factor * each).log_softmax(-1) for each in (self.log_pi, self.log_mu)))

    @cached_property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """[CONTEXTS * LENGTH, V] of both sides."""
        log_pi, log_mu = (each.flatten(0, 1).numpy() for each in (self.log_pi, self.log_mu))
        return log_pi, log_mu

    @cached_property
    def entropy(self) -> np.ndarray:
        """[CONTEXTS * LENGTH] of the trainer, nats."""
        log_pi, _ = self.rows
        return -(np.exp(log_pi) * log_pi).sum(axis=-1)

    @cached_property
    def _stacked(self) -> np.ndarray:
        """[CONTEXTS * LENGTH * V] one rising array for all contexts, so that one search draws for all of them."""
        cumulative = np.cumsum(np.exp(self.rows[1].astype(np.float64)), axis=-1)
        return (cumulative / cumulative[:, -1:] + np.arange(CONTEXTS * LENGTH)[:, None]).reshape(-1)

    def honest(self, seed: int, tokens: int, rounding: str) -> Iterator[Chunk]:
        """Yield a fresh honest dump in pieces: each token is drawn from the sampler's distribution in its context.

        The responses of every second seed are cut at random lengths, decided before they are drawn.
        """
        random, ends_early, kept = np.random.default_rng(seed), seed % 2 == 1, ROUNDINGS[rounding]
        log_pi, log_mu = self.rows
        left = max(1, round(tokens / (0.75 * LENGTH if ends_early else LENGTH)))
        while left > 0:
            count = min(CHUNK, left)
            left -= count
            lengths = random.integers(LENGTH // 2, LENGTH + 1, count) if ends_early else np.full(count, LENGTH)
            context = random.integers(CONTEXTS, size=count)
            index = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            row = np.repeat(context, lengths) * LENGTH + index
            vocabulary = log_mu.shape[-1]
            ids = np.searchsorted(self._stacked, row + random.random(row.size), side="right") - row * vocabulary
            ids = np.clip(ids, 0, vocabulary - 1)
            yield Chunk(
                kept(log_pi[row, ids].astype(np.float64)),
                kept(log_mu[row, ids].astype(np.float64)),
                np.concatenate([[0], np.cumsum(lengths)]),
                {"entropy": self.entropy[row]},
                {"step": np.zeros(count, np.int64), "server": np.array(["a", "b", "c", "d"])[np.arange(count) % 4]},
            )


def tables(folder: Path) -> Tables:
    """The distributions of the dense model, from ``folder`` where they have been made before."""
    file = folder / "tables.pt"
    if not file.exists():
        torch.save(_tables(Lab(folder, 7)), file)
    return Tables(*torch.load(file, weights_only=True))


def _tables(lab: Lab) -> tuple[Tensor, Tensor]:
    """(log pi, log mu) [CONTEXTS, LENGTH, V]."""
    seen: list[Tensor] = []
    sound = engine.draw

    def draw(logits: Tensor, params: SamplingParams, uniforms: Tensor) -> engine.Drawn:
        # a short response stays in the batch: without its end, all have the same length
        logits = logits.clone()
        logits[:, 1] = -30
        seen.append(logits.float().log_softmax(-1))
        return sound(logits, params, uniforms)

    samples = lab.sample(prompts=lab.prompts[:CONTEXTS], draw=draw, n=1)
    log_pi = []
    with torch.inference_mode():
        for sample in samples:
            ids = torch.tensor([[*sample.prompt_ids, *sample.output_ids]])
            logits = lab.trainer(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1].float()
            logits[:, 1] = -30
            log_pi.append(logits.log_softmax(-1))
    return torch.stack(log_pi), torch.stack(seen, dim=1)


def cells(found: Sequence[Diagnosis]) -> list[str]:
    """How many honest dumps were called a bug, the rate that so few exclude at 5 %, and the wrong verdicts."""
    alarms = sum(any(verdict.level is Level.BUG for verdict in diagnosis.verdicts) for diagnosis in found)
    most = stats.binomtest(alarms, len(found), alternative="less").proportion_ci(0.95).high
    wrong = Counter(name for diagnosis in found for name in {f"{v.code} {v.level}" for v in accusing(diagnosis)})
    named = ", ".join(f"{name}: {count}" for name, count in wrong.items())
    return [f"{alarms} of {len(found)}", f"{most:.1%}", named or "none"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/megatron_rc_traps"), help="keeps models and tables")
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--dumps", type=int, default=25, help="per rounding and sharpness")
    parser.add_argument("--first", type=int, default=0, help="seed of the first dump")
    parser.add_argument("--roundings", nargs="+", choices=ROUNDINGS, default=list(ROUNDINGS))
    parser.add_argument("--sharpness", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain, rows, total, seed = tables(options.folder), list[list[str]](), list[Diagnosis](), options.first
    for sharpness in options.sharpness:
        honest = plain.sharper(sharpness)
        for rounding in options.roundings:
            dumps = [honest.honest(each, options.tokens, rounding) for each in range(seed, seed + options.dumps)]
            seed += options.dumps
            found = [diagnosis_of(dump, "honest", "arrays", CorruptRows()) for dump in dumps]
            total += found
            rows.append([f"{options.tokens:,}", f"{float(honest.entropy.mean()):.2f}", rounding, *cells(found)])
            print(rows[-1], flush=True)
    rows.append([f"{options.tokens:,}", "all", "all", *cells(total)])
    header = ("tokens", "entropy (nats)", "log-probs kept as", "called a bug", "rate at most", "verdicts")
    print(table(header, rows), end="")


if __name__ == "__main__":
    main()
