"""The hooks before the update: one has the routers watched, the other (slime alone) corrects a whole rollout."""

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rc.correction.warnings import LostBatchWarning
from megatron_rc.integrations.log_names import prefixed, warn
from megatron_rc.integrations.slime.layout import Parallel, layout_of, parallel
from megatron_rc.integrations.slime.routes import WATCH, Routes
from megatron_rc.integrations.slime.settings import read
from megatron_rc.integrations.slime.tokens import LENGTHS, NO_ROLLOUT_LOGPROBS, HostTokens, correct_tokens
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
    settings = read(args)
    LENGTHS.record_rollout(rollout_id, rollout_data["response_lengths"], rollout_data.get("truncated"))
    ranks = parallel()
    routes = _routes(args, ranks, rollout_data) if settings.routes else None
    if not ranks.last_stage:
        return
    layout = layout_of(args, ranks, rollout_data["total_lengths"], rollout_data["response_lengths"], None)
    remedy = "with one train step per rollout slime leaves them out unless --get-mismatch-metrics is set"
    train = layout.joined("log_probs", rollout_data.get("log_probs"), remedy)
    rollout = layout.joined("rollout_log_probs", rollout_data.get("rollout_log_probs"), NO_ROLLOUT_LOGPROBS)
    advantages = layout.joined("advantages", rollout_data.get("advantages"), "--compute-advantages-and-returns")
    masks = rollout_data["loss_masks"]
    tokens = HostTokens(layout, ranks, train, rollout, masks)
    if routes is None:
        corrected = correct_tokens(tokens, settings.correction, advantages)
    else:
        bound, positions = settings.correction.log_ratio_bound, layout.positions(masks)
        mask, gap = tokens.loss_mask, train - rollout
        shift = expert_shift(*routes, mask, log_ratio=gap, positions=positions, log_ratio_bound=bound)
        corrected = correct_tokens(tokens, settings.correction, advantages, shift.route_shift)
        corrected.metrics.merge(shift.sums)
    corrected.metrics.all_reduce(ranks.dp_cp_group)
    given = settings.max_nonfinite_share
    limit = {} if given is None else {"max_nonfinite_share": given}
    corrected.metrics.check(**limit, max_k3=settings.correction.max_k3)
    weighted = torch.where(corrected.mask, advantages * corrected.weights, 0)
    # not in place: returns may be the same tensors
    rollout_data["advantages"] = list(weighted.split(layout.counts))
    # 0 times NaN is NaN: a token that is dropped must not leave one in the gradient of the host's loss
    rollout_data["log_probs"] = list(torch.where(train.isfinite(), train, 0).split(layout.counts))
    values = corrected.metrics.values()
    warn(_LOST_BATCH.see(values, settings.correction), ranks.dp_cp_group, ranks.tp_group)
    LENGTHS.record_mismatch(rollout_id, mismatch_signals(values, settings.correction))
    for name, value in prefixed(values).items():
        # the lists of expert shift, by layer and by position, have no place in the host's log
        if not isinstance(value, list) and not math.isnan(value):
            rollout_data[name] = torch.tensor(value)


def _routes(args: Namespace, ranks: Parallel, rollout_data: dict[str, Any]) -> Routes:
    names = ("micro_batch_indices", "total_lengths", "response_lengths")
    batches, totals, responses = (rollout_data[name] for name in names)
    layouts = [layout_of(args, ranks, [totals[i] for i in b], [responses[i] for i in b], None) for b in batches]
    return WATCH.whole(ranks, batches, layouts)
