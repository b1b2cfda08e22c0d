"""Does the sign of l depend on the probability of a token? A test that lets |l| be larger where tokens are rare."""

import numpy as np

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.statistics.factors import log_mu_bin
from megatron_rc.analyze.statistics.profile import gamma_deviate
from megatron_rc.analyze.statistics.significance import Test, normal_p

RUN = 64
"""Tokens of a sequence whose signs are flipped together, so that errors of neighbours need not be independent."""
FEWEST_RUNS = 20
"""Runs that the test needs: with fewer, the law under random flips has hardly a tail."""
LOWEST = -50.0
"""nats; the log-prob of a token that the trainer cannot draw."""


def sign_flip_test(name: str, chunk: Chunk) -> Test:
    """Test that the sign of the log-ratio does not depend on the probability of the token, in a chunk of loss tokens.

    Each token adds x = h tanh(l / 2) with h = 2 rho / (1 + rho), to the bin of m = (log pi + log mu) / 2. h turns
    draws of mu into draws of the harmonic mean of both policies. An exchange of the two sides flips tanh(l / 2), and
    keeps m and that mean. Noise that both sides share equally therefore leaves a mean of exactly 0 in every bin,
    however it grows with -m. (The mean of l would not be 0: l and the log mu that names its bin hold the same noise.)
    With X_ub the sum of x over run u and bin b,

        T = sum_b (sum_u X_ub)^2 / sum_u X_ub^2

    is compared with its law when the sign of each run is flipped at random. That law is taken as a gamma distribution.
    Its mean is the number of bins and its variance 2 (|G|^2 - sum_u |A_u|^4), where A_ub is X_ub over the root of
    sum_u X_ub^2, and G = A^T A. Where all noise is on one side, m holds half of it, so that l correlates with m anyway:
    the squared correlation is mean l^2 / (4 Var m), which adds N times that to T. This is subtracted from T.

    Source: derived; flips of clusters as in the wild bootstrap (Cameron, Gelbach and Miller 2008).
    """
    middle = np.minimum((np.maximum(chunk.log_pi, LOWEST) + chunk.log_mu) / 2, 0.0)
    bins, runs = log_mu_bin(middle), np.cumsum(chunk.begins(chunk.index // RUN)) - 1
    ratio, log_ratio = chunk.ratio, chunk.log_ratio
    terms = 2 * ratio / (1 + ratio) * np.tanh(log_ratio / 2)
    count, width = int(runs[-1]) + 1 if runs.size else 0, int(bins.max(initial=0)) + 1
    if count < FEWEST_RUNS:
        return Test(name, 0.0, None, f"fewer than {FEWEST_RUNS} runs of up to {RUN} tokens")
    sums = np.bincount(runs * width + bins, weights=terms, minlength=count * width).reshape(count, width)
    squares = np.square(sums).sum(axis=0)
    scaled = sums[:, squares > 0] / np.sqrt(squares[squares > 0])
    variance = 2 * float(np.square(scaled.T @ scaled).sum() - np.square(np.square(scaled).sum(axis=1)).sum())
    if variance <= 1e-9:
        return Test(name, 0.0, None, "flips of the signs change nothing")
    regression = float(np.square(log_ratio).sum()) / max(4 * float(middle.var()), 1e-12)
    seen = float(np.square(scaled.sum(axis=0)).sum()) - regression
    z = gamma_deviate(seen, scaled.shape[1], variance)
    return Test(name, z, normal_p(z, two_sided=False))
