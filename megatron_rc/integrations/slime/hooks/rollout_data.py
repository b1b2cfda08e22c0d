"""The hooks before the update: one has the routers watched, the other (slime alone) corrects a whole rollout."""

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rc.correction.warnings import LostBatchWarning
from megatron_rc.integrations.log_names import prefixed, warn
from megatron_rc.integrations.slime.routes import WATCH
from megatron_rc.integrations.slime.settings import read
from megatron_rc.integrations.slime.signals import LENGTHS
from megatron_rc.integrations.slime.tokens import HostTokens
from megatron_rc.learning_rate.rule import mismatch_signals
from megatron_rc.moe.shift import expert_shift
from megatron_rc.moe.tables import RouteTable

_LOST_BATCH = LostBatchWarning()


def before_log_prob(args: Namespace, model: Sequence[torch.nn.Module], store_prefix: str) -> None:
    """Watch the routers in the pass over the old log-probs, for which ``store_prefix`` is "", and in no other."""
    WATCH.end()
    if store_prefix == "" and getattr(model[0], "role", "actor") == "actor":
        WATCH.begin(model)


def rollout_data(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Multiply the weights into the advantages, once over all samples of this rank; rejected tokens get 0.

    A policy-gradient loss is proportional to its advantage: w L(A) = L(w A) for w >= 0, also for PPO with its clips,
    GSPO and CISPO. So every loss of the host is corrected; entropy and KL terms and denominators stay. Metrics are
    pooled over DP x CP and added to the data, which slime logs below rollout/. What before_train_step needs is kept.
    With `routes` the metrics of expert shift are among them, and a rejection may use the statistic route_shift.

    Args:
        rollout_data: the host's rollout on this rank, changed in place on the last pipeline stage.

    Raises:
        ValueError: on every rank of the last stage, more than max_nonfinite_share of log-probs that are not finite, or
            a k3 above the correction's max_k3.
    """
    settings, tokens = read(args), HostTokens(args, rollout_data)
    correction, layout, ranks = settings.correction, tokens.layout, tokens.ranks
    LENGTHS.record_rollout(rollout_id, rollout_data["response_lengths"], rollout_data.get("truncated"))
    routes = _routes(args, tokens) if settings.routes else None
    if not ranks.last_stage:
        return
    train = tokens.joined(
        "log_probs", "with one train step per rollout slime leaves them out unless --get-mismatch-metrics is set"
    )
    advantages = tokens.joined("advantages", "--compute-advantages-and-returns")
    shift = None
    if routes is not None:
        shift = expert_shift(
            *routes,
            tokens.loss_mask,
            log_ratio=train - tokens.rollout_logprobs,
            positions=layout.positions(rollout_data["loss_masks"]),
            log_ratio_bound=correction.log_ratio_bound,
        )
    corrected = tokens.corrected(train, correction, advantages, shift and shift.route_shift)
    if shift is not None:
        corrected.metrics.merge(shift.sums)
    corrected.metrics.all_reduce(ranks.dp_cp_group)
    given = settings.max_nonfinite_share
    corrected.metrics.check(0.01 if given is None else given, correction.max_k3)
    weighted = torch.where(corrected.mask, advantages * corrected.weights, 0)
    # not in place: returns may be the same tensors
    rollout_data["advantages"] = list(weighted.split(layout.counts))
    # 0 times NaN is NaN: a token that is dropped must not leave one in the gradient of the host's loss
    rollout_data["log_probs"] = list(torch.where(train.isfinite(), train, 0).split(layout.counts))
    values = corrected.metrics.values()
    warn(_LOST_BATCH.see(values, correction), ranks.dp_cp_group, ranks.tp_group)
    LENGTHS.record_mismatch(rollout_id, mismatch_signals(values, correction))
    for name, value in prefixed(values).items():
        # the lists of expert shift, by layer and by position, have no place in the host's log
        if not isinstance(value, list) and not math.isnan(value):
            rollout_data[name] = torch.tensor(value)


def _routes(args: Namespace, tokens: HostTokens) -> tuple[RouteTable, RouteTable]:
    batches, layouts = tokens.batch["micro_batch_indices"], []
    for samples in batches:
        lengths = {name: [tokens.batch[name][i] for i in samples] for name in ("total_lengths", "response_lengths")}
        layouts.append(HostTokens(args, lengths).layout)
    return WATCH.whole(tokens.ranks, batches, layouts)
