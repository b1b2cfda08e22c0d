"""Rollouts and held-out evaluation: every process samples its share of the prompts, every process gets them all."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_rc.engine import RolloutEngine, Sample, SamplingParams
from megatron_rc.tasks import Prompt, Task
from megatron_rc.training import emulation
from megatron_rc.training.groups import Groups, SharedError


@dataclass
class Rollouts:
    """The good samples of a step, prompt by prompt; the same on every process."""

    samples: list[Sample]
    rewards: list[float]
    groups: list[int]
    """Number of the prompt that each one answers."""
    seeds: list[int]
    discarded: list[Sample] = field(default_factory=list)
    """What came back damaged and is not trained on."""

    def metrics(self) -> dict[str, float]:
        """Shares of all responses that were damaged, in all and by reason, and how often the server retracted one."""
        total = len(self.samples) + len(self.discarded)
        reasons = Counter(s.discarded for s in self.discarded)
        out = {"rollout/rejected": len(self.discarded) / total}
        out |= {f"rollout/rejected_{reason}": count / total for reason, count in reasons.items()}
        out["rollout/retractions"] = float(sum(s.retractions for s in (*self.samples, *self.discarded)))
        return out


def seed_of(*parts: int | str) -> int:
    """A 62-bit seed from (job seed, purpose, step, index ...): no generator state to keep, whatever the layout."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def sample(
    engine: RolloutEngine,
    task: Task,
    groups: Groups,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    n: int,
    seeds: Sequence[int],
    max_rejected_share: float = 0.0,
    on_finished: Callable[[int], None] | None = None,
) -> Rollouts:
    """Sample and score ``n`` responses a prompt.

    Args:
        max_rejected_share: of the responses that may come back damaged; the others are trained on without them.

    Raises:
        SharedError: an engine or a reward function failed on some process, or too many responses are damaged; raised
            on all processes.
    """
    first, last = (len(prompts) * r // groups.world_size for r in (groups.rank, groups.rank + 1))

    def mine() -> tuple[list[Sample], list[float]]:
        share = prompts[first:last]
        if not share:
            return [], []
        with emulation.suspended():
            samples = engine.generate(
                [p.token_ids for p in share], params, n=n, seeds=seeds[first * n : last * n], on_finished=on_finished
            )
        good = [i for i, s in enumerate(samples) if s.discarded is None]
        return samples, task.rewards([share[i // n] for i in good], [samples[i].output_ids for i in good])

    gathered = groups.gather(mine)
    samples = [s for part, _ in gathered for s in part]
    discarded = [s for s in samples if s.discarded is not None]
    _check_discarded(discarded, len(samples), max_rejected_share)
    good = [i for i, s in enumerate(samples) if s.discarded is None]
    return Rollouts(
        samples=[samples[i] for i in good],
        rewards=[r for _, rewards in gathered for r in rewards],
        groups=[i // n for i in good],
        seeds=[seeds[i] for i in good],
        discarded=discarded,
    )


def _check_discarded(discarded: Sequence[Sample], total: int, max_share: float) -> None:
    if not discarded or (len(discarded) <= max_share * total and len(discarded) < total):
        return
    reasons = Counter(str(s.discarded) for s in discarded)
    examples = {str(s.discarded): s.discarded_detail for s in reversed(discarded)}
    listed = "; ".join(f"{count} {reason} ({examples[reason]})" for reason, count in reasons.most_common())
    raise SharedError(
        f"{len(discarded)} of {total} responses came back damaged, rollout.sglang.max_rejected_share is {max_share!r}: "
        f"{listed}"
    )


def held_out_accuracy(
    engine: RolloutEngine,
    task: Task,
    groups: Groups,
    params: SamplingParams,
    *,
    n: int,
    seed: int,
    max_rejected_share: float = 0.0,
) -> float:
    """Mean reward of ``n`` sampled answers a held-out prompt, with the same seeds at every call."""
    prompts = task.eval_prompts()
    seeds = [seed_of(seed, "eval", i) for i in range(len(prompts) * n)]
    rewards = sample(
        engine, task, groups, prompts, params, n=n, seeds=seeds, max_rejected_share=max_rejected_share
    ).rewards
    return sum(rewards) / len(rewards)
