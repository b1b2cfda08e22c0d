"""Rewards -> advantages: the baselines of groups, and the value of a sequence for each of its tokens.

Settings read the names of the estimators from here, without torch: only the functions that compute import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


def rloo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = r_i - mean of the other rewards of its group: REINFORCE with a leave-one-out baseline, unbiased.

    All finite rewards of a group enter the baseline, those of rejected samples too. A sample without a finite reward,
    or alone in its group, gets 0, because there is nothing to compare it with.

    Args:
        rewards: [S] float.
        groups: [S] int64, samples of one prompt share a number.

    Returns:
        [S] fp32, exactly 0 in a group of equal rewards.

    Source: Kool et al. 2019; Ahmadian et al. 2024 (arXiv 2402.14740).
    """
    group = _Groups.of(rewards, groups)
    count, total = group.sums(group.finite), group.sums(group.rewards)
    others = (total - group.rewards) / (count - 1).clamp(min=1)
    return (group.rewards - others).where(group.finite & ~group.equal_rewards, 0).float()


def grpo_advantages(rewards: Tensor, groups: Tensor, *, divide_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean) / (std + epsilon) over the finite rewards of its group, std with n - 1 in the denominator.

    Args:
        rewards, groups: as in rloo_advantages; a sample that gets 0 there gets 0 here.
        divide_by_std: False leaves r_i - mean (Dr. GRPO).
        epsilon: in units of the reward.

    Returns:
        [S] fp32, exactly 0 in a group of equal rewards.

    Source: DeepSeekMath (arXiv 2402.03300); Dr. GRPO (arXiv 2503.20783).
    """
    group = _Groups.of(rewards, groups)
    count = group.sums(group.finite)
    # where all rewards are equal, the mean is one of them only up to rounding
    deviation = (group.rewards - group.sums(group.rewards) / count.clamp(min=1)).where(group.finite, 0)
    if divide_by_std:
        variance = group.sums(deviation.square()) / (count - 1).clamp(min=1)
        deviation = deviation / (variance.sqrt() + epsilon)
    return deviation.where(~group.equal_rewards, 0).float()


def equal_reward_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """[S] bool: the finite rewards of the sample's group are all equal, so the group teaches nothing.

    Also true where a group has one or no finite reward. Args as in rloo_advantages.
    """
    return _Groups.of(rewards, groups).equal_rewards


def expand_to_tokens(values: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """One value per sequence [S] -> one per token [N] packed; 0 in rows that no sequence covers."""
    from torch.nn.functional import pad

    # [S + 2]: the number of rows before the first sequence, in every sequence, and after the last one
    rows = pad(pad(cu_seqlens, (1, 0)), (0, 1), value=num_tokens).diff()
    return pad(values, (1, 1)).repeat_interleave(rows, output_size=num_tokens)


class _Groups(NamedTuple):
    """Reductions of rewards over groups, on the device; every result is [S], the value of its group at each sample."""

    rewards: Tensor
    """fp64; 0 where not finite."""
    finite: Tensor
    order: Tensor
    number: Tensor
    """int64, dense number of the sample's group."""
    offsets: Tensor
    """[S + 1], where each group starts in `order`; unused groups are empty."""

    @classmethod
    def of(cls, rewards: Tensor, groups: Tensor) -> _Groups:
        import torch

        if rewards.dim() != 1 or groups.shape != rewards.shape:
            raise ValueError(f"rewards and groups must both be [S], got {tuple(rewards.shape)}, {tuple(groups.shape)}")
        ordered, order = groups.sort(stable=True)
        sorted_number = torch.cat([ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).cumsum(0)])[: len(groups)]
        number = torch.empty_like(sorted_number).scatter_(0, order, sorted_number)
        edges = torch.arange(len(groups) + 1, device=groups.device)
        finite = rewards.isfinite()
        offsets = torch.searchsorted(sorted_number, edges)
        return cls(rewards.double().where(finite, 0), finite, order, number, offsets)

    def reduce(self, values: Tensor, how: str) -> Tensor:
        import torch

        # adds segment by segment in a fixed order, without atomics; unsafe skips checks that would wait for the device
        return torch.segment_reduce(values[self.order], how, offsets=self.offsets, unsafe=True)[self.number]

    @property
    def equal_rewards(self) -> Tensor:
        """bool: all finite rewards of the group are equal, or there is at most one."""
        largest = self.reduce(self.rewards.where(self.finite, -math.inf), "max")
        smallest = self.reduce(self.rewards.where(self.finite, math.inf), "min")
        return largest <= smallest

    def sums(self, values: Tensor) -> Tensor:
        return self.reduce(values.double(), "sum")


class Advantage(NamedTuple):
    sentence: str
    compute: Callable[[Tensor, Tensor], Tensor]
    """(rewards [S], groups [S]) -> [S] fp32."""


ADVANTAGES = {
    "rloo": Advantage("reward minus the mean of the others of its prompt (REINFORCE leave-one-out).", rloo_advantages),
    "grpo": Advantage("reward minus the mean of its prompt, over their standard deviation.", grpo_advantages),
}
"""Estimators by the names of the setting loss.advantage; both need several samples per prompt."""
