"""Responses that came back damaged: counted, written down, never trained on, and an end to the step when too many."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import run_ranks

from megatron_rc.dump.writer import DiscardedWriter
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.settings.model import ParallelSettings
from megatron_rc.tasks import Prompt
from megatron_rc.training import groups
from megatron_rc.training.groups import SharedError
from megatron_rc.training.step.sampling import SampledBatch, Sampler

PROMPTS = [Prompt((i,), "", "") for i in range(4)]
SEEDS = [100, 101, 110, 111, 120, 121, 130, 131]
"""Seed of sample j of prompt i: 100 + 10 i + j."""
ALONE: Any = SimpleNamespace(rank=0, world_size=1, gather=lambda compute: [compute()])


def response(seed: int, discarded: str | None = None, **fields: Any) -> Sample:
    detail = f"what was found in {seed}" if discarded else ""
    return Sample([seed // 10 % 10], [seed], [-1.0], "stop", discarded=discarded, discarded_detail=detail, **fields)


class Engine:
    """Answers with its seeds; ``damage`` says by seed what is wrong."""

    def __init__(self, damage: dict[int, str]) -> None:
        self.damage = damage

    def generate(self, prompts: Any, params: Any, *, seeds: Sequence[int], **_: Any) -> list[Sample]:
        return [response(seed, self.damage.get(seed), retractions=seed % 10) for seed in seeds]


class Task:
    max_turns = 1

    def eval_prompts(self) -> list[Prompt]:
        return PROMPTS

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        assert [prompt.token_ids[0] for prompt in prompts] == [seed // 10 % 10 for (seed,) in responses]
        return [float(seed) for (seed,) in responses]


def sampler(engine: Engine, max_share: float, groups: Any = ALONE) -> Sampler:
    task: Any = Task()
    return Sampler(engine, task, groups, SamplingParams(), seed=0, max_discarded_share=max_share)


def sampled(damage: dict[int, str], max_share: float, groups: Any = ALONE) -> SampledBatch:
    return sampler(Engine(damage), max_share, groups).sample(PROMPTS, 2, SEEDS)


def test_damaged_responses_are_kept_apart_and_the_others_keep_their_rewards_groups_and_seeds() -> None:
    rollouts = sampled({110: "nan_logprob", 131: "timeout"}, 0.25)
    assert [s.output_ids for s in rollouts.samples] == [[100], [101], [111], [120], [121], [130]]
    assert rollouts.rewards == [100.0, 101.0, 111.0, 120.0, 121.0, 130.0]
    assert rollouts.groups == [0, 0, 1, 2, 2, 3]
    assert rollouts.seeds == [100, 101, 111, 120, 121, 130]
    assert [(s.output_ids, s.discarded) for s in rollouts.discarded] == [([110], "nan_logprob"), ([131], "timeout")]


def test_metrics_are_shares_of_all_responses_by_reason_and_a_count_of_retractions() -> None:
    assert sampled({110: "nan_logprob", 120: "nan_logprob", 131: "timeout"}, 0.5).metrics() == {
        "rollout/rejected": 3 / 8,
        "rollout/rejected_nan_logprob": 2 / 8,
        "rollout/rejected_timeout": 1 / 8,
        "rollout/retractions": 4.0,  # of the discarded, too: one of every odd seed
    }
    assert sampled({}, 0.0).metrics() == {"rollout/rejected": 0.0, "rollout/retractions": 4.0}


@pytest.mark.parametrize(("share", "stops"), [(0.0, True), (0.24, True), (0.25, False), (1.0, False)])
def test_the_step_stops_above_the_allowed_share_and_not_at_it(share: float, stops: bool) -> None:
    damage = {110: "nan_logprob", 131: "timeout"}
    if not stops:
        assert len(sampled(damage, share).samples) == 6
        return
    with pytest.raises(SharedError) as error:
        sampled(damage, share)
    assert str(error.value) == (
        f"2 of 8 responses came back damaged, rollout.sglang.max_rejected_share is {share!r}: "
        "1 nan_logprob (what was found in 110); 1 timeout (what was found in 131)"
    )
    with pytest.raises(SharedError, match="8 of 8 responses came back damaged"):
        sampled(dict.fromkeys(SEEDS, "timeout"), 1.0)
    # the most frequent reason comes first, each with its first example
    with pytest.raises(SharedError, match=r": 2 timeout \(what was found in 111\); 1 nan_logprob \(.* 100\)$"):
        sampled({100: "nan_logprob", 111: "timeout", 121: "timeout"}, share)


def test_a_held_out_evaluation_leaves_damaged_responses_out_of_its_mean_and_stops_with_too_many() -> None:
    class Second(Engine):
        """An engine whose second answer of four is damaged, whatever its seed."""

        def generate(self, prompts: Sequence[Sequence[int]], params: Any, **_: Any) -> list[Sample]:
            return [response(100 + 10 * p, "timeout" if p == 1 else None) for (p,) in prompts]

    def accuracy(share: float) -> float:
        return sampler(Second({}), share).held_out_accuracy(1)

    assert accuracy(0.25) == (100 + 120 + 130) / 3
    with pytest.raises(SharedError, match="1 of 4"):
        accuracy(0.2)


def _on_two_processes(rank: int) -> tuple[SampledBatch, str]:
    place = groups.initialize(ParallelSettings(), seed=1)
    rollouts = sampled({131: "timeout"}, 0.125, place)
    try:
        sampled({131: "timeout"}, 0.1, place)
    except SharedError as error:
        return rollouts, str(error)
    raise AssertionError("it went on")


def test_what_one_process_discards_all_leave_out_and_all_stop_for() -> None:
    (first, first_error), (second, second_error) = run_ranks(2, _on_two_processes)
    assert first == second and first_error == second_error
    assert first.seeds == SEEDS[:-1] and first.groups == [0, 0, 1, 1, 2, 2, 3] and len(first.discarded) == 1
    assert first_error.startswith("1 of 8 responses came back damaged, ")


def records_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_discarded_responses_are_written_with_their_reason_and_a_step_written_again_is_replaced(tmp_path: Path) -> None:
    writer = DiscardedWriter(tmp_path / "runs" / "rejected")
    late = response(110, "timeout", weight_versions=[(3, 0, 1)], retractions=2)
    rows = records_of(writer.write(12, [late, response(120, "nan_logprob")]))
    assert [path.name for path in writer.folder.iterdir()] == ["step-000012.jsonl"]
    assert rows[0] == {
        "rejected": "timeout", "rejected_detail": "what was found in 110", "prompt_ids": [1], "output_ids": [110],
        "logprobs": [-1.0], "finish_reason": "stop", "weight_versions": [[3, 0, 1]], "retractions": 2,
    }  # fmt: skip
    assert rows[1]["rejected"] == "nan_logprob" and len(rows) == 2
    assert len(records_of(writer.write(12, [late]))) == 1
