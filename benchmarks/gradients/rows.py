"""One row per checkpoint, rollouts and estimator."""

from typing import NamedTuple

Z90 = 1.645
"""Standard errors on either side of a 90 % interval."""
MEASURED = ("cosine", "norm_ratio", "squared_bias", "variance", "progress")
"""Fields of Row that have a standard error beside them."""


class Row(NamedTuple):
    """Squared norms and inner products are free of plug-in bias; errors are standard errors over batches."""

    run: int
    """From 1 on; the same seed trains otherwise on another processor."""
    step: int
    """Finished steps of the run at the checkpoint."""
    gap: str
    """What differs in the weights that the rollouts come from, such as "lag 16"; empty for exact rollouts."""
    estimator: str
    k3: float
    """KL(mu||pi) of the rollouts, nats per token."""
    length: float
    """Mean response length, tokens."""
    dropped: float
    """Share of the tokens that the estimator drops."""
    cosine: float
    """Cosine of the mean estimate and g*."""
    cosine_error: float
    norm_ratio: float
    norm_ratio_error: float
    squared_bias: float
    """||E g_hat - g*||^2 / ||g*||^2; an estimate below 0 says that it is too small to be seen."""
    squared_bias_error: float
    variance: float
    """E ||g_hat - E g_hat||^2 of a batch / ||g*||^2."""
    variance_error: float
    progress: float
    """Largest A + B - C over learning rates, as a share of that of exact rollouts."""
    progress_error: float
    a: float
    """Terms of the SGA lemma at `lr`, in units of the reward."""
    b: float
    c: float
    lr: float
    """Learning rate of plain gradient ascent whose steps with exact rollouts are as long as those of the run."""
    curvature: float
    """L of the lemma: the larger of the curvatures of J along g* and along gradients of single batches."""
    curvature_error: float
    exact_norm: float
    """||g*||."""
    halves_cosine: float
    """Cosine of the two halves of the batches that g* is the mean of."""

    @property
    def horizon_ratio(self) -> float:
        """T / T*, with T* = 1 / (2 k3)."""
        return 2 * self.k3 * self.length
