"""The hook of --custom-tis-function-path: weights on the host's own policy-gradient loss."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rc.integrations.flag_rules import refuse
from megatron_rc.integrations.slime.flag_rules import DEFAULTS, MILES_TOP_P, settings_for
from megatron_rc.integrations.slime.layout import Layout, layout_of, parallel
from megatron_rc.integrations.slime.log_metrics import logged, route_shift
from megatron_rc.integrations.slime.settings import flag, in_advantages, judges_advantages
from megatron_rc.integrations.slime.tokens import LENGTHS, NO_ROLLOUT_LOGPROBS, HostTokens, correct_tokens, measuring


def tis(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor] | None,
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_seq_lens: Sequence[int] | None = None,
    parallel_state: Any = None,
    current_log_probs: Sequence[Tensor] | Tensor | None = None,
    advantages: Sequence[Tensor] | Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    """weights * pg_loss under --use-tis, with 0 at rejected tokens; metrics alone under --get-mismatch-metrics.

    The masks are returned unchanged: the host also reduces its entropy and KL terms with them, and those count
    rejected tokens. Denominators count all loss tokens. On slime a log-prob of the host's ratio that is not finite
    makes the loss NaN, because the host has used it already and its gradient is NaN under any weight: the trainer's,
    and with old 'rollout' the sampler's. miles counts such a token with ratio 1; here it is dropped, or weighs e^-20
    where the trainer calls it impossible.

    Args:
        pg_loss: [N] fp32, nats; response tokens of this rank, samples one after another.
        train_log_probs, rollout_log_probs: one [tokens on this rank] per sample, fp32, nats.
        loss_masks: one [response_length] per sample.
        total_lengths, response_lengths: tokens of each sample.
        max_seq_lens, parallel_state: passed by miles only.
        current_log_probs, advantages: one [tokens on this rank] per sample, or [N], fp32; passed by versions of the
            hosts that have them here. old 'rollout' judges current / mu, and a gate with a sign the advantages.
        more: what other versions of the hosts pass, ignored.

    Returns:
        (pg_loss [N], loss_masks, name -> [N]).
    """
    settings = settings_for("tis", args)
    if parallel_state is not None:
        refuse((MILES_TOP_P,), args, DEFAULTS)
    LENGTHS.record(response_lengths)
    ranks = parallel()
    layout = layout_of(args, ranks, total_lengths, response_lengths, max_seq_lens)
    two_policies = settings.correction.old == "rollout"
    if two_policies:
        train = _handed_over(layout, "current_log_probs", current_log_probs)
    else:
        train = layout.joined("train_log_probs", train_log_probs, "the host computes them").detach()
    rollout = layout.joined("rollout_log_probs", rollout_log_probs, NO_ROLLOUT_LOGPROBS)
    weigh = args.use_tis and not in_advantages(args, settings)
    correction = settings.correction if weigh else measuring(settings.correction)
    shift = route_shift(args, settings, layout)
    judged = _handed_over(layout, "advantages", advantages) if judges_advantages(correction) else None
    tokens = HostTokens(layout, ranks, train, rollout, loss_masks)
    corrected = correct_tokens(tokens, correction, judged, shift)
    metrics = logged(tokens, corrected, shift)
    if weigh:
        # more than a product: 0 times an infinite loss is NaN
        pg_loss = torch.where(corrected.mask, pg_loss * corrected.weights, 0)
        if parallel_state is None:
            usable = train.isfinite() & rollout.isfinite() if two_policies else train.isfinite()
            pg_loss = torch.where(tokens.loss_mask & ~usable, torch.nan, pg_loss)
    return pg_loss, loss_masks, metrics


def _handed_over(layout: Layout, name: str, values: Sequence[Tensor] | Tensor | None) -> Tensor:
    """[N], detached, of what only some versions of the hosts pass; ValueError if this one does not."""
    if isinstance(values, Tensor):
        values = values.split(layout.counts) if values.shape == (sum(layout.counts),) else [*values]
    remedy = f"this host does not hand it to --custom-tis-function-path; {flag('loss')} needs no such host"
    return layout.joined(name, values, remedy).detach()
