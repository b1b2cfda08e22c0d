"""correct(): log-ratios of a rollout batch -> importance weights, mask, metrics; pair_metrics(): the metrics alone."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.backend import use_triton
from megatron_rc.collectives import Group
from megatron_rc.correction.formulas import PART_METRICS, beyond
from megatron_rc.correction.inputs import Extras, Inputs, Pair, check_inputs, check_pair, check_tokens, check_type
from megatron_rc.correction.measured_upper import settled
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.plan import Plan
from megatron_rc.correction.reference.sums import Computed, Statistics
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.correction.sums import POSITIVE_FROM

_NO_EXTRAS = Extras()


@dataclass(frozen=True)
class Corrected:
    """The result of `correct`; every tensor is detached.

    Attributes:
        weights: [N] or [B, T] like the input, fp32 (fp64 for fp64 log-probs); 0 where mask is 0.
        mask: [N] or [B, T], bool: the tokens that still count in the policy-gradient term.
        bad_sequences: [S] bool: sequences with a corrupt log-prob.
        metrics: statistics of the tokens of this rank; `metrics.all_reduce` pools them over DP x CP.
        correction: the settings that made it; `policy_loss` refuses arguments that contradict them.
        mean_k3: 0-d, fp64: the K that the gate "standardized" used, pooled over DP x CP or as given; None without that
            gate.
    """

    weights: Tensor
    mask: Tensor
    bad_sequences: Tensor
    metrics: MetricSums
    correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    mean_k3: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "correction", RolloutCorrection.of(self.correction))


class CorrectionBackend(Protocol):
    """What `reference.correction` computes in PyTorch, and `fused` with kernels."""

    def correct(self, pair: Pair, inputs: Inputs, plan: Plan, dp_group: Group, cp_group: Group) -> Computed: ...

    def pair_metrics(self, pair: Pair, log_ratio_bound: float, cp_group: Group, sequences: bool) -> Statistics: ...


def computing(backend: str, **tensors: Tensor | None) -> CorrectionBackend:
    """The module that computes, by `use_triton`."""
    if use_triton(backend, **tensors):
        from megatron_rc.correction import fused

        return fused
    from megatron_rc.correction.reference import correction

    return correction


def correct(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    correction: RolloutCorrection | str,
    cu_seqlens: Tensor | None = None,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    advantages: Tensor | None = None,
    extras: Extras = _NO_EXTRAS,
    dp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> Corrected:
    """Importance weights and mask, so that pi learns from tokens of mu; call it once on all local tokens of a rollout.

    With l = log pi - log mu of a token, a unit shares one value. It is rho = e^l (token), exp sum l (sequence), exp
    mean l (geometric, segment), sums and means over the unit's loss tokens. Of a prefix it is exp of the sum of l up to
    and with the token. weights = min(rho, upper), clamp(rho, lower, upper), or rho inside the bounds and dropped
    outside; then every Rejection drops its units; then normalize="batch" divides by the mean weight of the kept tokens.
    No gate sees another gate or the weight. The gate "standardized" keeps units with |S + T K| <= upper sqrt(2 T K),
    where S = sum l over T tokens, K = mean min(k3, 0.5) over the batch. It also keeps all of T K < 1e-6, which is
    rounding. A NaN or +inf log-prob, one above 0 by more than rounding (1e-3), or -inf from the sampler, drops its
    sequence when any unit is larger than a token, else its token. log pi = -inf with a finite log mu is rho = 0.
    Nothing here waits for the device.

    Args:
        train_logprobs: [N] packed or [B, T] padded, fp32, nats.
        rollout_logprobs: the same shape, fp32, nats, as returned at sampling time.
        loss_mask: the same shape, bool, or any dtype where not 0 means True; rows without it may hold anything.
        correction: the weight, the rejections and the normalisation; or the name of a preset.
        cu_seqlens: [S + 1] int32, ascending within 0 and N; packed layout only. Rows that no sequence covers, such as
            the padding behind a THD batch, get weight 0 and mask False and count nowhere.
        segment_ids: the shape of loss_mask, int, ascending over the loss tokens of a sequence; the turn that a token
            belongs to. Numbers may restart in every sequence, except under context parallelism: there they ascend
            over the whole batch (as those of TokenBatch do), because ranks that hold parts of a turn tell it by its
            number alone. Without segment_ids, turns are the contiguous runs of loss_mask.
        num_segments: a number above every segment id; required with segment_ids.
        advantages: the shape of loss_mask, or one per sequence; for rejections whose `when` names a sign, which
            look at the sign of a unit's mean. [S, 1] always is one per sequence, and [S] unless S = N.
        extras: what some corrections read besides: statistics, positions, lags, sampling_logprobs, mean_k3,
            measured_upper. `Extras` describes each.
        dp_group: data-parallel ranks, for normalize="batch" and the gate "standardized".
        cp_group: ranks that hold other tokens of the same sequences, in the same order.
        backend: "torch", "triton", or "auto": triton where its kernels can take every argument, which excludes fp64.
            Triton needs three launches, a fourth where turns are judged, one more to normalise, three for
            sampling_logprobs and two for a K of this batch. An argument that is not contiguous, or a mean_k3 that is
            not fp64, is copied in a launch of its own.

    Returns:
        Corrected, in the layout of the input.

    Raises:
        ValueError: mismatched shapes; missing advantages, statistics or segments that `correction` needs; "triton" with
            a tensor that its kernels cannot take; an argument of another type. For PyTorch on a CPU, cu_seqlens that do
            not ascend within 0 and N, or lengths in their place. Under set_debug_checks(True) also cu_seqlens on any
            device, loss tokens that no sequence covers, segment_ids that do not ascend below num_segments, ranks of
            cp_group that hold other sequences.

    Source: truncated IS, Yao et al. (fengyao.notion.site/off-policy-rl); masked and geometric forms, szrlee,
        rl-collapse part 3; IcePop, arXiv 2510.18855; prefixes, CTPO, arXiv 2605.07331.
    """
    correction = RolloutCorrection.of(correction)
    check_type(Extras, extras=extras)
    applied, measures_upper = settled(correction, extras.measured_upper)
    plan = Plan.of(applied)._replace(measures_upper=measures_upper)
    pair = check_pair(train_logprobs, rollout_logprobs, loss_mask, cu_seqlens, cp_group)
    inputs = check_inputs(pair, plan, segment_ids, num_segments, advantages, extras, cp_group)
    if inputs.sampling_logprobs is not None:
        # a token that is corrupt on any side becomes corrupt: 0 times NaN or an infinity is NaN
        sampling, rollout = inputs.sampling_logprobs, pair.rollout_logprobs
        rollout = torch.where(sampling > POSITIVE_FROM, sampling, torch.add(rollout, sampling, alpha=0))
        pair = pair._replace(rollout_logprobs=rollout)
    module = computing(backend, **pair._asdict(), **inputs.tensors())
    with torch.no_grad():
        found = module.correct(pair, inputs, plan, dp_group, cp_group)
    weights, mask = found.weights.view(loss_mask.shape), found.mask.view(loss_mask.shape)
    metrics = MetricSums(found.statistics, PART_METRICS | beyond(plan.bounds))
    return Corrected(weights, mask, found.bad_sequences, metrics, correction, found.mean_k3)


def pair_metrics(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    log_ratio_bound: float = 20.0,
    cp_group: dist.ProcessGroup | None = None,
    sequences: bool = True,
    backend: str = "auto",
) -> MetricSums:
    """Metrics of any two policies, with pi = train and mu = rollout: current/mu, old/mu, current/old.

    Args:
        train_logprobs, rollout_logprobs: [N] packed or [B, T] padded, fp32, nats.
        loss_mask: the same shape, bool.
        cu_seqlens: [S + 1] int32, packed layout only.
        log_ratio_bound: clamp of log-ratios before exp, nats.
        cp_group: its ranks complete the sums of sequences in one all-gather; without it every sequence must be whole.
        sequences: False leaves out the metrics of whole sequences and needs neither cu_seqlens nor cp_group.
        backend: as in `correct`.

    Returns:
        Statistics of the tokens of this rank; pool them with `MetricSums.all_reduce` over DP x CP.

    Raises:
        ValueError: mismatched shapes; as `correct` for `backend` and under set_debug_checks(True).
    """
    if sequences:
        pair = check_pair(train_logprobs, rollout_logprobs, loss_mask, cu_seqlens, cp_group)
    else:
        check_tokens(train_logprobs, rollout_logprobs, loss_mask)
        # sequence boundaries do not matter here
        pair = Pair(train_logprobs.reshape(1, -1), rollout_logprobs.reshape(1, -1), loss_mask.reshape(1, -1), None)
    module = computing(backend, **pair._asdict())
    with torch.no_grad():
        return MetricSums(module.pair_metrics(pair, log_ratio_bound, cp_group, sequences))
