"""What tis and loss log: metrics of tokens, the names that users of the hosts know, the rule of the learning rate."""

import math
from argparse import Namespace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.correction.correct import Corrected
from megatron_rc.correction.reference.log_ratio import k3
from megatron_rc.correction.reference.segments import segment_reduce, unit_sums
from megatron_rc.correction.settings import Rejection, RolloutCorrection
from megatron_rc.correction.weight import Weight
from megatron_rc.integrations.log_names import prefixed
from megatron_rc.integrations.slime.routes import WATCH
from megatron_rc.integrations.slime.settings import SlimeSettings, names
from megatron_rc.integrations.slime.tokens import HostTokens, correct_tokens, measuring

LR_METRICS: dict[str, float] = {}
"""Metrics of the rule of the learning rate for the rollout that is trained on; before_train_step writes them."""


def correct_micro_batch(
    args: Namespace, settings: SlimeSettings, tokens: HostTokens, weigh: bool, advantages: Tensor | None
) -> tuple[Corrected, dict[str, Tensor]]:
    """The correction of the next micro-batch of the update, and its metrics: name -> [N] fp32, detached.

    These are metrics per token, `host_metrics`, and one constant per metric of the rule. With l = log pi - log mu
    clamped to log_ratio_bound: k1 = -l, k3 = e^l - 1 - l, chi2_token = (e^l - 1)^2. Besides these the final weight, its
    square (ESS = mean^2 / mean of squares) and 1 where a token no longer counts. All are 0 at corrupt tokens, whose
    share is nonfinite_share. With `routes`, unless rollout_data judges them: route_shift, and route_tokens_touched, 1
    where it is not 0. The host averages them as it does its own; the mean of a constant is the constant where every
    sample has a loss token.

    Args:
        weigh: whether the correction acts; otherwise it is only measured.
    """
    shift = WATCH.next_shift(tokens.layout) if settings.routes and not names(args, "rollout_data") else None
    correction = settings.correction if weigh else measuring(settings.correction)
    corrected = correct_tokens(tokens, correction, advantages, shift)
    ratio, bound = tokens.log_ratio, correction.log_ratio_bound
    ell = ratio.value.clamp(-bound, bound)
    metrics = {
        "k1": -ell,
        "k3": k3(ell),
        "chi2_token": ell.expm1().square(),
        "weight": corrected.weights.clone(),
        "weight_squared": corrected.weights.square(),
        "masked_token": (ratio.valid & ~corrected.mask).float(),
        "nonfinite_share": (ratio.loss_mask & ~ratio.valid).float(),
    }
    if shift is not None:
        counted = shift * tokens.loss_mask
        metrics |= {"route_shift": counted, "route_tokens_touched": (counted > 0).float()}
    rule = {name: torch.full_like(ell, value) for name, value in LR_METRICS.items()}
    return corrected, prefixed(metrics) | host_metrics(tokens, correction) | rule


def host_metrics(tokens: HostTokens, correction: RolloutCorrection) -> dict[str, Tensor]:
    """Name -> [N] fp32, detached, 0 where loss_mask is 0; a per-sequence number is repeated on each of its loss tokens.

    With l = log pi - log mu of a token, rho = e^l, and mean and sum over the loss tokens of a sequence:

    * tis = rho, tis_abs = |rho - 1|; tis_clipfrac: 1 where a weight of level token is bounded
    * mis_kl = -l, mis_k3_kl = rho - 1 - l, mis_chi2_token = mean rho^2 - 1, mis_chi2_seq = exp(2 sum l) - 1
    * mis_{training, rollout}_log_ppl = -mean log {pi, mu}, without log their exp; mis_log_ppl_diff = -mean l,
      mis_log_ppl_abs_diff its absolute value, mis_ppl_ratio its exp
    * with a weight of level token, sequence or geometric: mis_tis_weight_before_bound, mis_tis_weight_after_bound, the
      latter also as mis_is_ratio_mean_after_tis_rs, and its mean, min and max as mis_is_ratio_{mean, min, max}_final;
      mis_tis_truncate_fraction, or mis_tis_{clip, mask}_fraction_{low, high}: 1 beyond a bound
    * with a rejection by the ratio of a token, or the product or geometric mean of a sequence:
      mis_rs_mask_fraction_{low, high}; with one by the smallest ratio of a sequence:
      mis_rs_catastrophic_{token, seq}_fraction

    The host's functions clamp some of the log-ratios at 20; here all of them are clamped at log_ratio_bound before exp,
    and a corrupt token has l = 0. Rejections beyond the first of a kind have no name.

    Source: slime, vanilla_tis_function, and its example train_infer_mismatch_helper/mis.py.
    """
    gap, weight = _Gap(tokens, correction), correction.weight
    found = _gap_names(gap)
    if weight is not None and weight.level in ("token", "sequence", "geometric"):
        found |= _weight_names(gap, weight)
    for gate in reversed(correction.reject):
        found |= _gate_names(gap, gate)
    return {name: torch.where(gap.loss_mask, value.float(), 0) for name, value in found.items()}


class _Gap:
    """Log-ratios of this rank's tokens, and numbers of whole sequences over all context-parallel ranks."""

    def __init__(self, tokens: HostTokens, correction: RolloutCorrection) -> None:
        ratio, layout = tokens.log_ratio, tokens.layout
        self.loss_mask, self._bound, self._ranks = ratio.loss_mask, correction.log_ratio_bound, tokens.ranks
        self._offsets = layout.cu_seqlens(self.loss_mask.device)
        counts = torch.tensor(layout.counts, dtype=torch.int64)
        numbers = torch.arange(len(layout.counts)).repeat_interleave(counts, output_size=sum(layout.counts))
        self._numbers = numbers.to(self.loss_mask.device)
        self.ell = ratio.value.clamp(-self._bound, self._bound)
        rho, weight = self.ell.double().exp(), correction.weight
        # all sums at once: context parallelism adds them up in one collective
        columns = [ratio.rollout.double(), self.ell.double(), rho.square()]
        if weight is not None and weight.level == "token":
            columns.append(_bounded(rho, weight))
        counted = [self.loss_mask.double(), *(torch.where(self.loss_mask, column, 0) for column in columns)]
        sums = self._over_context(unit_sums(torch.stack(counted), self._offsets), dist.ReduceOp.SUM)
        self._total = sums[2:3]
        self.means = self.spread(sums[1:] / sums[:1].clamp(min=1))
        """[k, N] fp64, over the loss tokens of a sequence: log mu, l, rho^2 and, of tokens, the bounded weights."""

    def ratio(self, level: str) -> Tensor:
        """[N]: rho, or that of the sequence: a product or a geometric mean."""
        logs = {"token": self.ell.double(), "sequence": self.spread(self._total)[0], "geometric": self.means[1]}
        return logs[level].clamp(-self._bound, self._bound).exp()

    def largest(self, *columns: Tensor) -> Tensor:
        """[k, N] largest of every column [N] in each sequence."""
        largest = torch.stack([segment_reduce(column, "max", self._offsets) for column in columns])
        return self.spread(self._over_context(largest, dist.ReduceOp.MAX))

    def spread(self, values: Tensor) -> Tensor:
        """[k, N]: each sequence's number on its tokens of this rank, from [k, S]."""
        return values.index_select(1, self._numbers)

    def _over_context(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self._ranks.cp_size > 1:
            # every context-parallel rank runs the same micro-batches, as the host's own gathers need
            dist.all_reduce(values, op, group=self._ranks.cp_group)
        return values


def _gap_names(gap: _Gap) -> dict[str, Tensor]:
    rho, (rollout, difference, square) = gap.ratio("token"), gap.means[:3]
    training = rollout + difference
    values = {
        "kl": -gap.ell,
        "k3_kl": k3(gap.ell),
        "chi2_token": square - 1,
        "chi2_seq": gap.ratio("sequence").square() - 1,
        "training_log_ppl": -training,
        "training_ppl": (-training).exp(),
        "rollout_log_ppl": -rollout,
        "rollout_ppl": (-rollout).exp(),
        "log_ppl_diff": -difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": (-difference).exp(),
    }
    return {"tis": rho, "tis_abs": (rho - 1).abs()} | {f"mis_{name}": value for name, value in values.items()}


def _bounds(weight: Weight) -> tuple[float, float]:
    return weight.lower or 0, weight.upper if isinstance(weight.upper, float | int) else math.inf


def _bounded(ratio: Tensor, weight: Weight) -> Tensor:
    return ratio if weight.mode == "mask" else ratio.clamp(*_bounds(weight))


def _weight_names(gap: _Gap, weight: Weight) -> dict[str, Tensor]:
    ratio, (lower, upper) = gap.ratio(weight.level), _bounds(weight)
    low, high = ratio < lower, ratio > upper
    bounded = torch.where(gap.loss_mask, _bounded(ratio, weight), 0)
    # one weight of the whole sequence is its mean, smallest and largest, too
    mean = smallest = largest = bounded
    if weight.level == "token":
        beyond_all = torch.where(gap.loss_mask, 0, torch.inf)
        extremes = gap.largest(bounded - beyond_all, -bounded - beyond_all)
        mean, smallest, largest = gap.means[3], -extremes[1], extremes[0]
    values = {
        "tis_weight_before_bound": ratio,
        "tis_weight_after_bound": bounded,
        "is_ratio_mean_after_tis_rs": bounded,
        "is_ratio_mean_final": mean,
        "is_ratio_min_final": smallest,
        "is_ratio_max_final": largest,
    }
    if weight.mode == "truncate":
        values["tis_truncate_fraction"] = high
    else:
        values |= {f"tis_{weight.mode}_fraction_low": low, f"tis_{weight.mode}_fraction_high": high}
    clipped = {"tis_clipfrac": low | high} if weight.level == "token" else {}
    return clipped | {f"mis_{name}": value for name, value in values.items()}


def _gate_names(gap: _Gap, gate: Rejection) -> dict[str, Tensor]:
    if gate.statistic != "ratio" or gate.when != "always":
        return {}
    level = _GATE_LEVELS.get((gate.level, gate.reduce if gate.level == "sequence" else ""))
    if level is not None:
        ratio = gap.ratio(level)
        low = {} if gate.lower is None else {"mis_rs_mask_fraction_low": ratio < gate.lower}
        return low if gate.upper is None else low | {"mis_rs_mask_fraction_high": ratio > gate.upper}
    if (gate.level, gate.reduce) == ("sequence", "min") and gate.lower is not None:
        token = ((gap.ratio("token") < gate.lower) & gap.loss_mask).float()
        (sequence,) = gap.largest(token)
        return {"mis_rs_catastrophic_token_fraction": token, "mis_rs_catastrophic_seq_fraction": sequence}
    return {}


_GATE_LEVELS = {("token", ""): "token", ("sequence", "sum"): "sequence", ("sequence", "mean"): "geometric"}
