"""The hooks before the update: one has the routers watched, the other (slime alone) corrects a whole rollout."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rc.correction.warnings import LostBatchWarning
from megatron_rc.integrations.log_names import checked, measured, prefixed
from megatron_rc.integrations.slime.routes import WATCH
from megatron_rc.integrations.slime.settings import read
from megatron_rc.integrations.slime.signals import LENGTHS
from megatron_rc.integrations.slime.tokens import HostTokens
from megatron_rc.learning_rate.rule import mismatch_signals
from megatron_rc.moe.shift import expert_shift

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
    if settings.routes:
        batches, lengths = rollout_data["micro_batch_indices"], ("total_lengths", "response_lengths")
        parts = [{name: [rollout_data[name][i] for i in samples] for name in lengths} for samples in batches]
        routes = WATCH.whole(ranks, batches, [HostTokens(args, part).layout for part in parts])
    if not ranks.last_stage:
        return
    remedy = "with one train step per rollout slime leaves them out unless --get-mismatch-metrics is set"
    train = tokens.joined("log_probs", remedy)
    advantages = tokens.joined("advantages", "--compute-advantages-and-returns")
    shift = None
    if settings.routes:
        bound, positions = correction.log_ratio_bound, layout.positions(rollout_data["loss_masks"])
        gap, mask = train - tokens.rollout_logprobs, tokens.loss_mask
        shift = expert_shift(*routes, mask, log_ratio=gap, positions=positions, log_ratio_bound=bound)
    corrected = tokens.corrected(train, correction, advantages, shift and shift.route_shift)
    if shift is not None:
        corrected.metrics.merge(shift.sums)
    corrected.metrics.all_reduce(ranks.dp_cp_group)
    limit = {} if settings.max_nonfinite_share is None else {"max_nonfinite_share": settings.max_nonfinite_share}
    values = checked(corrected.metrics, correction, _LOST_BATCH, ranks.dp_cp_group, ranks.tp_group, **limit)
    weighted = torch.where(corrected.mask, advantages * corrected.weights, 0)
    # not in place: returns may be the same tensors
    rollout_data["advantages"] = list(weighted.split(layout.counts))
    # 0 times NaN is NaN: a token that is dropped must not leave one in the gradient of the host's loss
    rollout_data["log_probs"] = list(torch.where(train.isfinite(), train, 0).split(layout.counts))
    LENGTHS.record_mismatch(rollout_id, mismatch_signals(values, correction))
    # the lists of expert shift, by layer and by position, have no place in the host's log
    rollout_data.update({name: torch.tensor(value) for name, value in prefixed(measured(values)).items()})
