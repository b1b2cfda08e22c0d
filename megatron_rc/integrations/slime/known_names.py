"""The names under which slime's own functions log the gap and the weights, with their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.config import Rejection, RolloutCorrection
from megatron_rc.integrations.slime.layout import Layout, Parallel
from megatron_rc.reference.log_ratio import log_ratio
from megatron_rc.reference.segments import segment_reduce, unit_sums
from megatron_rc.weight import Weight


def known_names(
    layout: Layout,
    ranks: Parallel,
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    correction: RolloutCorrection,
) -> dict[str, Tensor]:
    """Name -> [N] fp32, detached, 0 where loss_mask is 0; a number of a sequence stands on each of its loss tokens.

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
    and a corrupt token has l = 0.

    Args:
        layout: the tokens of this rank, N in all.
        train_logprobs, rollout_logprobs: [N] fp32, nats.
        loss_mask: [N] bool.
        correction: what weighs and rejects; its gates beyond the first of a kind have no name.

    Source: slime, vanilla_tis_function, and its example train_infer_mismatch_helper/mis.py.
    """
    ratio = log_ratio(train_logprobs.detach(), rollout_logprobs, loss_mask)
    bound = correction.log_ratio_bound
    sequences = _Sequences.of(layout, ranks, loss_mask.device)
    ell, weight = ratio.value.clamp(-bound, bound), correction.weight
    rho = ell.double().exp()
    # all sums at once: context parallelism adds them up in one collective
    columns = [ratio.rollout.double(), ell.double(), rho.square()]
    if weight is not None and weight.level == "token":
        columns.append(_bounded(rho, weight))
    counted = [loss_mask.double(), *(torch.where(loss_mask, column, 0) for column in columns)]
    gap = _Gap(sequences, ell, loss_mask, bound, sequences.total(torch.stack(counted)))
    names = _gap_names(gap)
    if weight is not None and weight.level in _LEVELS:
        names |= _weight_names(gap, weight)
    for gate in reversed(correction.reject):
        names |= _gate_names(gap, gate)
    return {name: torch.where(loss_mask, value.float(), 0) for name, value in names.items()}


@dataclass(frozen=True)
class _Sequences:
    """Numbers of whole sequences, from the tokens of this rank and of the other context-parallel ranks."""

    offsets: Tensor
    """[S + 1] int32."""
    numbers: Tensor
    """[N] int64, the sequence of every token."""
    ranks: Parallel

    @classmethod
    def of(cls, layout: Layout, ranks: Parallel, device: torch.device) -> _Sequences:
        counts = torch.tensor(layout.counts, dtype=torch.int64)
        numbers = torch.arange(len(layout.counts)).repeat_interleave(counts, output_size=sum(layout.counts))
        return cls(layout.cu_seqlens(device), numbers.to(device), ranks)

    def total(self, columns: Tensor) -> Tensor:
        """[k, S] fp64 sums of columns [k, N]."""
        return self._over_context(unit_sums(columns.double(), self.offsets), dist.ReduceOp.SUM)

    def largest(self, columns: Sequence[Tensor]) -> Tensor:
        """[k, S] largest of every column [N], -inf without a token."""
        largest = torch.stack([segment_reduce(column, "max", self.offsets) for column in columns])
        return self._over_context(largest, dist.ReduceOp.MAX)

    def spread(self, values: Tensor) -> Tensor:
        """[k, N]: each sequence's number on its tokens of this rank, from [k, S]."""
        return values.index_select(1, self.numbers)

    def _over_context(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.ranks.cp_size > 1:
            # every context-parallel rank runs the same micro-batches, as the host's own gathers need
            dist.all_reduce(values, op, group=self.ranks.cp_group)
        return values


@dataclass(frozen=True)
class _Gap:
    """Log-ratios of the tokens, and the ratio of each level that the example knows."""

    sequences: _Sequences
    ell: Tensor
    """[N] fp32, nats, within the bound; 0 without a loss."""
    loss_mask: Tensor
    """[N] bool."""
    bound: float
    sums: Tensor
    """[k, S] fp64, over the loss tokens of a sequence: their number, log mu, l, rho^2 and, where weights are of tokens,
    the bounded ones."""

    def means(self) -> Tensor:
        """[k - 1, N] fp64: the other sums over the number of loss tokens of the sequence."""
        return self.sequences.spread(self.sums[1:] / self.sums[:1].clamp(min=1))

    def ratio(self, level: str) -> Tensor:
        """[N]: rho, or that of the sequence: a product or a geometric mean."""
        ell = self.ell.double()
        if level == "sequence":
            (ell,) = self.sequences.spread(self.sums[2:3])
        elif level == "geometric":
            ell = self.means()[1]
        return ell.clamp(-self.bound, self.bound).exp()


_LEVELS = ("token", "sequence", "geometric")


def _gap_names(gap: _Gap) -> dict[str, Tensor]:
    rho = gap.ratio("token")
    rollout, difference, square = gap.means()[:3]
    training = rollout + difference
    names = {
        "kl": -gap.ell,
        "k3_kl": gap.ell.expm1() - gap.ell,
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
    return {"tis": rho, "tis_abs": (rho - 1).abs()} | {f"mis_{name}": value for name, value in names.items()}


def _bounded(ratio: Tensor, weight: Weight) -> Tensor:
    return ratio if weight.mode == "mask" else ratio.clamp(weight.lower, _upper(weight))


def _upper(weight: Weight) -> float | None:
    return weight.upper if isinstance(weight.upper, float | int) else None


def _weight_names(gap: _Gap, weight: Weight) -> dict[str, Tensor]:
    ratio, upper = gap.ratio(weight.level), _upper(weight)
    high = ratio > (torch.inf if upper is None else upper)
    low = ratio < (0 if weight.lower is None else weight.lower)
    bounded = torch.where(gap.loss_mask, _bounded(ratio, weight), 0)
    # one weight of the whole sequence is its mean, smallest and largest, too
    mean = smallest = largest = bounded
    if weight.level == "token":
        beyond_all = torch.where(gap.loss_mask, 0, torch.inf)
        extremes = gap.sequences.spread(gap.sequences.largest([bounded - beyond_all, -bounded - beyond_all]))
        mean, smallest, largest = gap.means()[3], -extremes[1], extremes[0]
    names = {
        "tis_weight_before_bound": ratio,
        "tis_weight_after_bound": bounded,
        "is_ratio_mean_after_tis_rs": bounded,
        "is_ratio_mean_final": mean,
        "is_ratio_min_final": smallest,
        "is_ratio_max_final": largest,
    }
    if weight.mode == "truncate":
        names["tis_truncate_fraction"] = high
    else:
        names |= {f"tis_{weight.mode}_fraction_low": low, f"tis_{weight.mode}_fraction_high": high}
    clipped = {"tis_clipfrac": low | high} if weight.level == "token" else {}
    return clipped | {f"mis_{name}": value for name, value in names.items()}


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
        (sequence,) = gap.sequences.spread(gap.sequences.largest([token]))
        return {"mis_rs_catastrophic_token_fraction": token, "mis_rs_catastrophic_seq_fraction": sequence}
    return {}


_GATE_LEVELS = {("token", ""): "token", ("sequence", "sum"): "sequence", ("sequence", "mean"): "geometric"}
