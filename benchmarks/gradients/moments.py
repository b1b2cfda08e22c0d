"""Bias and variance of an estimate of the gradient, from inner products of B batches, without plug-in bias.

The squared norm of a mean of B noisy gradients exceeds that of their expectation by Var / B. Products of two different
batches do not: E<g_b, g_c> = ||E g||^2 for b != c. Every squared norm here is the mean over all such pairs, which is
the mean over all ways to take two halves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

Floats = np.ndarray


class Moments(NamedTuple):
    """What is known of E g_hat, g* and the spread of g_hat."""

    exact: float
    """||g*||^2."""
    mean: float
    """||E g_hat||^2."""
    inner: float
    """<E g_hat, g*>."""
    square: float
    """E ||g_hat||^2."""

    @property
    def cosine(self) -> float:
        """cos(E g_hat, g*); NaN where the data cannot tell a squared norm from 0."""
        return self.inner / math.sqrt(self.mean * self.exact) if self.mean > 0 < self.exact else math.nan

    @property
    def norm_ratio(self) -> float:
        """||E g_hat|| / ||g*||; NaN as for the cosine."""
        return math.sqrt(self.mean / self.exact) if self.mean > 0 < self.exact else math.nan

    @property
    def squared_bias(self) -> float:
        """||E g_hat - g*||^2; its estimate may be below 0 where the bias is small."""
        return self.mean - 2 * self.inner + self.exact

    @property
    def variance(self) -> float:
        """E ||g_hat - E g_hat||^2 of one batch."""
        return self.square - self.mean

    def terms(self, lr: float, curvature: float) -> tuple[float, float, float]:
        """The terms (A, B, C) of the SGA lemma: E[J(theta + lr g_hat)] - J(theta) >= A + B - C.

        A = lr (1 - L lr / 2) ||g*||^2, B = lr (1 - L lr) <g*, Bias>, C = (L lr^2 / 2) (Var + ||Bias||^2)

        Args:
            lr: of plain gradient ascent, > 0.
            curvature: L, the Lipschitz constant of grad J.

        Source: szrlee, rl-collapse part 1; Beyond Precision (arXiv 2602.01826), equation 13.
        """
        bias = self.inner - self.exact
        return (
            lr * (1 - curvature * lr / 2) * self.exact,
            lr * (1 - curvature * lr) * bias,
            curvature * lr**2 / 2 * (self.variance + self.squared_bias),
        )

    def progress(self, reference: "Moments") -> float:
        """The largest A + B - C over all learning rates, as a share of that of ``reference``.

        A + B - C = lr <g*, E g_hat> - (L lr^2 / 2) E||g_hat||^2 is largest at lr = <g*, E g_hat> / (L E||g_hat||^2),
        where it is <g*, E g_hat>^2 / (2 L E||g_hat||^2). The share does not depend on L. It is 0 where
        <g*, E g_hat> <= 0: then no learning rate makes progress.
        """
        if not self.square:  # every token is dropped
            return 0.0
        return max(self.inner, 0.0) ** 2 / self.square / (max(reference.inner, 0.0) ** 2 / reference.square)


@dataclass(frozen=True)
class Products:
    """Inner products of the gradients of B batches; batch b of both kinds has the same prompts and other answers."""

    estimates: Floats
    """[B, B] <g_b, g_c>."""
    cross: Floats
    """[B, B] <g_b, f_c>, f an exact gradient."""
    exact: Floats
    """[B, B] <f_b, f_c>."""

    @classmethod
    def of(cls, estimates: Tensor, exact: Tensor) -> "Products":
        """From rows [B, P] of each kind."""
        estimates, exact = estimates.double(), exact.double()
        pairs = (estimates @ estimates.T, estimates @ exact.T, exact @ exact.T)
        return cls(*(products.cpu().numpy() for products in pairs))

    def moments(self, counts: Floats | None = None) -> Moments:
        """The moments; ``counts`` [B] says how often each batch is in the sample, once by default."""
        c = np.ones(len(self.exact)) if counts is None else counts
        return Moments(
            exact=_of_pairs(self.exact, c),
            mean=_of_pairs(self.estimates, c),
            inner=_of_pairs(self.cross, c),
            square=float(c @ np.diag(self.estimates) / c.sum()),
        )

    def error(self, value: Callable[[Moments], float]) -> float:
        """Standard error of ``value(moments)`` by the jackknife over batches; NaN where it is NaN without one of them.

        Source: Efron and Stein (1981), The jackknife estimate of variance.
        """
        return jackknife_error(len(self.exact), lambda counts: value(self.moments(counts)))


def jackknife_error(count: int, value: Callable[[Floats], float]) -> float:
    """Standard error of a function of the ``counts`` [count] of independent observations."""
    without = np.array([value(1.0 - row) for row in np.eye(count)])
    return float(np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum()))


def _of_pairs(products: Floats, c: Floats) -> float:
    """Mean over the pairs of different batches."""
    own = c**2 @ np.diag(products)
    return float((c @ products @ c - own) / (c.sum() ** 2 - (c**2).sum()))
