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
class SampledBatch:
    """The good samples of a step, prompt by prompt; the same on every process."""

    samples: list[Sample]
    rewards: list[float]
    groups: list[int]
    """Number of the prompt that each sample answers."""
    seeds: list[int]
    discarded: list[Sample] = field(default_factory=list)
    """Samples that came back damaged and are not trained on."""

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


@dataclass(frozen=True)
class Sampler:
    """Samples and scores responses to the prompts of a task."""

    engine: RolloutEngine
    task: Task
    groups: Groups
    params: SamplingParams
    seed: int
    """Seed of the job."""
    max_discarded_share: float
    """Share of the responses of one call that may come back damaged; the others are used without them."""

    def rollouts(
        self, prompts: Sequence[Prompt], n: int, *, first: int, on_finished: Callable[[int], None]
    ) -> SampledBatch:
        """`sample` training prompts; the seeds follow from ``first``, the number of the first one in the stream."""
        seeds = [seed_of(self.seed, "rollout", first * n + i) for i in range(len(prompts) * n)]
        return self.sample(prompts, n, seeds, on_finished)

    def held_out_accuracy(self, n: int) -> float:
        """Mean reward of ``n`` answers per held-out prompt, sampled with the same seeds at every call."""
        prompts = self.task.eval_prompts()
        seeds = [seed_of(self.seed, "eval", i) for i in range(len(prompts) * n)]
        rewards = self.sample(prompts, n, seeds).rewards
        return sum(rewards) / len(rewards)

    def sample(
        self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], on_finished: Callable[[int], None] | None = None
    ) -> SampledBatch:
        """Sample and score ``n`` responses per prompt, each with its own of the ``seeds``.

        ``on_finished`` is called with the number of newly finished responses.

        Raises:
            SharedError: an engine or a reward function failed on some process, or too many responses are damaged.
        """
        rank, world = self.groups.rank, self.groups.world_size
        first, last = (len(prompts) * r // world for r in (rank, rank + 1))

        def local() -> tuple[list[Sample], list[float]]:
            share = prompts[first:last]
            if not share:
                return [], []
            with emulation.suspended():
                ids, mine = [p.token_ids for p in share], seeds[first * n : last * n]
                samples = self.engine.generate(ids, self.params, n=n, seeds=mine, on_finished=on_finished)
            good = [i for i, s in enumerate(samples) if s.discarded is None]
            return samples, self.task.rewards([share[i // n] for i in good], [samples[i].output_ids for i in good])

        gathered = self.groups.gather(local)
        samples = [s for part, _ in gathered for s in part]
        discarded = [s for s in samples if s.discarded is not None]
        self._check_discarded(discarded, len(samples))
        good = [i for i, s in enumerate(samples) if s.discarded is None]
        return SampledBatch(
            samples=[samples[i] for i in good],
            rewards=[r for _, rewards in gathered for r in rewards],
            groups=[i // n for i in good],
            seeds=[seeds[i] for i in good],
            discarded=discarded,
        )

    def _check_discarded(self, discarded: Sequence[Sample], total: int) -> None:
        allowed = self.max_discarded_share
        if not discarded or len(discarded) <= min(allowed * total, total - 1):
            return
        reasons = Counter(str(s.discarded) for s in discarded)
        examples = {str(s.discarded): s.discarded_detail for s in reversed(discarded)}
        listed = "; ".join(f"{count} {reason} ({examples[reason]})" for reason, count in reasons.most_common())
        damaged = f"{len(discarded)} of {total} responses came back damaged"
        raise SharedError(f"{damaged}, rollout.sglang.max_rejected_share is {allowed!r}: {listed}")
