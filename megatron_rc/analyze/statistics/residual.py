"""The drift that weights of tokens leave: their mean weighted score under the sampler, from its most probable ids."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.chunk import Floats
from megatron_rc.correction.settings import RolloutCorrection

MOST_IDS = 32
"""Most probable ids of a token that are kept; the others are the tail."""
DTYPE = np.dtype([(name, "f4", (MOST_IDS,)) for name in ("log_mu", "log_pi")])
"""The column `top` of a token: nats, -inf where fewer ids are listed."""


def top_of(log_mu: Floats, log_pi: Floats) -> NDArray[Any]:
    """[N] of DTYPE from what sampler and trainer say of the listed ids, [N, k] nats each, NaN where fewer."""
    out = np.full(len(log_mu), -np.inf, DTYPE)
    listed = np.nan_to_num(log_mu, nan=-np.inf)
    order = np.argsort(-listed, axis=1, kind="stable")[:, :MOST_IDS]
    for name, values in (("log_mu", listed), ("log_pi", np.nan_to_num(log_pi, nan=-np.inf))):
        out[name][:, : order.shape[1]] = np.take_along_axis(values, order, axis=1)
    return out


def residual_drift(top: NDArray[Any], method: RolloutCorrection) -> float | None:
    """Mean over the tokens of || E_mu[w grad log pi] ||, over the logits of the top ids at temperature 1.

    It is what the metric centering/residual_drift measures in a run: the expected advantage at a prefix times this
    vector pulls pi towards mu. rho has none, because E_mu[rho grad log pi] = E_pi[grad log pi] = 0.

    Args:
        top: [N] of DTYPE.
        method: None is the answer where it judges more than a token's pi and mu, or removes the drift itself.
    """
    import torch

    from megatron_rc.batch import TopIds
    from megatron_rc.logprobs.centered import centered_logprobs

    correction = method.centred("top") if method.centering == "none" else None
    if correction is None or not len(top):
        return None
    log_mu, log_pi = (torch.from_numpy(top[name].astype(np.float64)) for name in DTYPE.names or ())
    # one more id holds what the trainer gives to all others
    tail = (1 - log_pi.exp().sum(1, keepdim=True)).clamp(min=0).log()
    ids = torch.where(log_mu > -torch.inf, torch.arange(MOST_IDS), -1)
    found = centered_logprobs(
        torch.cat([log_pi, tail], 1), log_pi.argmax(1), TopIds(ids, log_mu), correction, backend="torch"
    )
    return float(found.centering.drift.mean())
