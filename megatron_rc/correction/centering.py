"""What score centering can be combined with: weights and gates that one token's two probabilities decide."""

from megatron_rc.correction.rejection import STANDARDIZED, STATISTICS, Rejection
from megatron_rc.correction.weight import Weight


def check_centering(
    centering: str, old: str, surrogate: str | None, weight: Weight | None, reject: tuple[Rejection, ...]
) -> None:
    """Refuse what a token that was not drawn has no value of, since the mean over all tokens needs it."""
    where = f"when centering is {centering!r}"
    if old != "current":
        raise ValueError(
            f"old must be 'current' {where}, got {old!r}: the weights of the drawn token and of the top ids must be "
            "those of the policy that is trained"
        )
    if surrogate not in (None, "ppo", "reinforce"):
        raise ValueError(f"surrogate must be null, 'ppo' or 'reinforce' {where}, got {surrogate!r}")
    if weight is not None and weight.level != "token":
        raise ValueError(f"weight.level must be 'token' {where}, got {weight.level!r}")
    if weight is not None and (weight.reads_lags or weight.staleness_upper is not None or weight.upper == "measured"):
        raise ValueError(f"weight must depend on pi / mu alone {where}: no lags, no staleness_upper, no measured upper")
    for gate in reject:
        by_token = gate.level == "token" and gate.when == "always" and gate.statistic in STATISTICS
        if not by_token or gate.statistic == STANDARDIZED:
            raise ValueError(f"reject must not hold {gate.name!r} {where}: a gate must judge a token by its pi and mu")
