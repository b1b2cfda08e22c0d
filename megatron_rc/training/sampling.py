"""Rollouts and held-out evaluation: every process samples its share of the prompts, every process gets them all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rc.engine import RolloutEngine, Sample, SamplingParams
from megatron_rc.tasks import Prompt, Task
from megatron_rc.training import emulation
from megatron_rc.training.groups import Groups


@dataclass
class Rollouts:
    """All samples of a step, n a prompt and prompt by prompt; the same on every process."""

    samples: list[Sample]
    rewards: list[float]
    groups: list[int]
    seeds: list[int]


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
    on_finished: Callable[[int], None] | None = None,
) -> Rollouts:
    """Sample and score ``n`` responses a prompt.

    Raises:
        SharedError: an engine or a reward function failed on some process; raised on all of them.
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
        repeated = [p for p in share for _ in range(n)]
        return samples, task.rewards(repeated, [s.output_ids for s in samples])

    gathered = groups.gather(mine)
    return Rollouts(
        samples=[s for samples, _ in gathered for s in samples],
        rewards=[r for _, rewards in gathered for r in rewards],
        groups=[i for i in range(len(prompts)) for _ in range(n)],
        seeds=list(seeds),
    )


def held_out_accuracy(
    engine: RolloutEngine, task: Task, groups: Groups, params: SamplingParams, *, n: int, seed: int
) -> float:
    """Mean reward of ``n`` sampled answers a held-out prompt, with the same seeds at every call."""
    prompts = task.eval_prompts()
    seeds = [seed_of(seed, "eval", i) for i in range(len(prompts) * n)]
    rewards = sample(engine, task, groups, prompts, params, n=n, seeds=seeds).rewards
    return sum(rewards) / len(rewards)
