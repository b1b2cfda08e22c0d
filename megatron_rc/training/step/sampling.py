"""Rollouts and held-out evaluation: every process samples its share of the prompts, every process gets them all."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_rc.engine import OnFinished, RolloutEngine, Sample, SamplingParams
from megatron_rc.tasks import Prompt, Task
from megatron_rc.training import emulation
from megatron_rc.training.groups import Groups, SharedError
from megatron_rc.training.step.seeds import seed_of
from megatron_rc.training.step.turns import respond


class Request(NamedTuple):
    """A rollout of the training stream: ``n`` responses to each of ``prompts`` prompts, from number ``first`` on.

    Response j of prompt p of the stream is sample p * n + j of the job; its seed follows from that number.
    """

    first: int
    prompts: int
    n: int


class Part(NamedTuple):
    """What one process sampled of a rollout."""

    samples: list[Sample]
    rewards: list[float]
    """Rewards of the samples that are not damaged."""


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

    def rollout(self, request: Request, on_finished: Callable[[int], None]) -> SampledBatch:
        """Sample and score the prompts of ``request``; raises as `sample`."""
        return self.joined(request, self.groups.gather(lambda: self.part(request, on_finished)))

    def part(self, request: Request, on_finished: OnFinished = None) -> Part:
        """This process's part of a rollout, without communication, so that any thread may call it."""
        prompts = self.task.prompts(request.first, request.prompts)
        return self._part(prompts, request.n, self._seeds(request), on_finished)

    def joined(self, request: Request, parts: Sequence[Part]) -> SampledBatch:
        """The rollout joined from ``parts``, what each process sampled; raises as `sample`."""
        return self._joined(parts, request.n, self._seeds(request))

    def held_out_accuracy(self, n: int) -> float:
        """Mean reward of ``n`` answers per held-out prompt, sampled with the same seeds at every call."""
        prompts = self.task.eval_prompts()
        seeds = [seed_of(self.seed, "eval", i) for i in range(len(prompts) * n)]
        rewards = self.sample(prompts, n, seeds).rewards
        return sum(rewards) / len(rewards)

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int]) -> SampledBatch:
        """Sample and score ``n`` responses per prompt, each with its own of the ``seeds``.

        Raises:
            SharedError: an engine or a reward function failed on some process, or too many responses are damaged.
        """
        return self._joined(self.groups.gather(lambda: self._part(prompts, n, seeds)), n, seeds)

    def _seeds(self, request: Request) -> list[int]:
        numbers = range(request.first * request.n, (request.first + request.prompts) * request.n)
        return [seed_of(self.seed, "rollout", number) for number in numbers]

    def _part(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], on_finished: OnFinished = None) -> Part:
        rank, world = self.groups.rank, self.groups.world_size
        first, last = (len(prompts) * r // world for r in (rank, rank + 1))
        share = prompts[first:last]
        if not share:
            return Part([], [])
        with emulation.suspended():
            mine = seeds[first * n : last * n]
            samples = respond(self.engine, self.task, share, self.params, n=n, seeds=mine, on_finished=on_finished)
        good = [i for i, s in enumerate(samples) if s.discarded is None]
        return Part(samples, self.task.rewards([share[i // n] for i in good], [samples[i].output_ids for i in good]))

    def _joined(self, parts: Sequence[Part], n: int, seeds: Sequence[int]) -> SampledBatch:
        samples = [s for part in parts for s in part.samples]
        discarded = [s for s in samples if s.discarded is not None]
        self._check_discarded(discarded, len(samples))
        good = [i for i, s in enumerate(samples) if s.discarded is None]
        return SampledBatch(
            samples=[samples[i] for i in good],
            rewards=[r for part in parts for r in part.rewards],
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
