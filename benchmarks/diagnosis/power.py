"""How many tokens an analysis needs to see sampling that differs a little, by the entropy of the model.

    python benchmarks/diagnosis/power.py

Mean and spread of a term of z_W and z_rho are computed without drawing anything, from whole distributions of a real
sampler (bf16) and trainer (fp32) in real contexts. Sharpness multiplies the logits of both: entropy falls with it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders of benchmarks/ are packages

from diagnosis.traps.tables import Tables, tables
from megatron_rc.jobs.describe import table

DEVIATIONS = 4.5
"""Standard errors that stay significant after the correction for a report of about a thousand tests."""
TOP_P, TEMPERATURE = 0.99, 0.95


def kept(probs: np.ndarray) -> np.ndarray:
    """[N, V] the distributions under TOP_P, renormalised."""
    order = np.argsort(-probs, axis=1)
    ranked = np.take_along_axis(probs, order, axis=1)
    keep = np.zeros(probs.shape, dtype=bool)
    np.put_along_axis(keep, order, np.cumsum(ranked, axis=1) - ranked < TOP_P, axis=1)
    left = np.where(keep, probs, 0.0)
    return left / left.sum(axis=1, keepdims=True)


def needed(law: np.ndarray, terms: np.ndarray) -> str:
    """Mean of the terms when tokens come from ``law`` [N, V], and the tokens until their sum is significant."""
    mean = float((law * terms).sum(axis=1).mean())
    spread = float(np.sqrt((law * terms**2).sum(axis=1).mean()))
    return f"{(DEVIATIONS * spread / mean) ** 2:,.0f} ({mean:+.4f})"


def row(both: Tables) -> list[str]:
    """Entropy, and the tokens that a hidden top-p, a hidden temperature and a renormalised top-p need."""
    size = both.log_pi.shape[-1]
    log_pi, log_mu = (values.reshape(-1, size).astype(np.float64) for values in (both.log_pi, both.log_mu))
    probs = np.exp(log_mu) / np.exp(log_mu).sum(axis=1, keepdims=True)
    entropy = -(np.exp(log_pi) * log_pi).sum(axis=1, keepdims=True)
    surprise = np.exp(log_pi - log_mu) * (-log_pi - entropy)
    filtered, cold = kept(probs), probs ** (1 / TEMPERATURE)
    cold /= cold.sum(axis=1, keepdims=True)
    excess = np.divide(np.exp(log_pi), filtered, out=np.ones_like(filtered), where=filtered > 0) - 1
    cells = needed(filtered, surprise), needed(cold, surprise), needed(filtered, excess)
    return [f"{float(entropy.mean()):.2f}", *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/megatron_rc_traps"), help="keeps models and tables")
    parser.add_argument("--sharpness", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain = tables(options.folder)
    names = f"hidden top-p {TOP_P}", f"hidden temperature {TEMPERATURE}", f"renormalised top-p {TOP_P}"
    rows = [row(plain.sharper(factor)) for factor in options.sharpness]
    print(table(("entropy (nats)", *names), rows), end="")


if __name__ == "__main__":
    main()
