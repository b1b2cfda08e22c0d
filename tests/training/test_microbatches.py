"""A batch that is cut, a probe prompt and a checkpoint: nothing lost, the same on every process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from distributed import run_ranks
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import DENSE

from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training import checkpoint, groups
from megatron_rc.training.heads import Answer
from megatron_rc.training.microbatches import MicroBatch, cut, mini_batches, share_of, split_rows
from megatron_rc.training.policy import Policy
from megatron_rc.training.probe import Probe
from megatron_rc.training.progress import Progress

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=60)
PROMPT = [3, 30, 4, 17, 5, 36, 0, 9]


@given(
    lengths=LENGTHS, data_size=st.integers(1, 4), max_tokens=st.integers(50, 2000), fixed=st.none() | st.integers(1, 5)
)
def test_every_sequence_is_in_one_micro_batch_and_ranks_have_equally_many(lengths, data_size, max_tokens, fixed):
    division = cut(range(len(lengths)), lengths, data_size=data_size, max_tokens=max_tokens, micro_batches=fixed)
    placed = [s for share in division for micro_batch in share for s in micro_batch if s >= 0]
    assert sorted(placed) == list(range(len(lengths)))
    assert len({len(share) for share in division}) == 1
    assert all(micro_batch for share in division for micro_batch in share)
    if fixed:
        assert len(division[0]) == fixed


@given(lengths=LENGTHS, data_size=st.integers(1, 4), max_tokens=st.integers(50, 2000))
def test_no_micro_batch_exceeds_the_limit_unless_one_sequence_does(lengths, data_size, max_tokens):
    for share in cut(range(len(lengths)), lengths, data_size=data_size, max_tokens=max_tokens):
        for micro_batch in share:
            assert sum(lengths[s] for s in micro_batch if s >= 0) <= max(max_tokens, max(lengths))


@given(lengths=st.lists(st.integers(1, 100), min_size=40, max_size=80), data_size=st.integers(1, 4))
def test_ranks_differ_by_at_most_one_longest_sequence_per_micro_batch(lengths, data_size):
    division = cut(range(len(lengths)), lengths, data_size=data_size, max_tokens=10_000, micro_batches=1)
    loads = [sum(lengths[s] for m in share for s in m) for share in division]
    assert max(loads) - min(loads) <= max(lengths)


def test_empty_places_hold_the_shortest_sequence_as_ballast_that_does_not_count():
    division = cut([0, 1], [9, 4], data_size=4, max_tokens=100)
    assert sorted([m for share in division for m in share]) == [[~1], [~1], [0], [1]]


@given(sizes=st.lists(st.integers(1, 6), max_size=12), count=st.integers(1, 6))
@example(sizes=[], count=3)
def test_mini_batches_keep_groups_whole_and_in_order(sizes, count):
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    parts = mini_batches(groups, count)
    assert [s for part in parts for s in part] == list(range(len(groups)))
    assert len(parts) == min(count, len(sizes))
    held = [{groups[s] for s in part} for part in parts]
    assert all(not (a & b) for i, a in enumerate(held) for b in held[i + 1 :])


def test_rows_with_a_loss_are_listed_for_every_micro_batch_of_the_fused_head() -> None:
    samples = [Sample([1] * p, [2] * n, [-1.0] * n, "stop") for p, n in ((3, 2), (1, 1), (2, 5), (4, 1))]
    batch = TokenBatch.from_samples(samples, SamplingParams())
    place: Any = SimpleNamespace(data_size=1, data_rank=0)
    for head in ("logits", "linear"):
        # five micro-batches of four sequences: one of them holds a sequence that does not count
        share = share_of(batch, [range(4)], TrainSettings(head=head, micro_batches=5), place)  # type: ignore[arg-type]
        (members,) = share.micro_batches
        parts = split_rows(share.batch, members, loss_rows=share.loss_rows_of(members))
        listed = [part.loss_rows for part in parts]
        if head == "logits":
            assert listed == [None] * 5
        else:
            assert sorted(len(rows) for rows in listed if rows is not None) == [0, 1, 1, 2, 5]
            for part, rows in zip(parts, listed, strict=True):
                assert rows is not None and torch.equal(rows, part.batch.loss_mask.nonzero()[:, 0])


def _probed(rank: int, model: str) -> Any:
    """Log-probs after a refresh, after a step of training, and after another refresh; and the weights then."""
    parallel = ParallelSettings(pipeline=2)
    place = groups.initialize(parallel, seed=1)
    policy = Policy(ModelSettings(hf_path=model), parallel, TrainSettings(optimizer="sgd", lr=0.5), place)
    policy.start_phase(lr=0.5, min_lr=0.5, warmup_steps=0, total_steps=10, decay_style="constant")
    probe = Probe(policy, PROMPT)
    probe.refresh()
    found = [probe.logprobs(PROMPT)]
    batch = TokenBatch.from_samples([Sample([3, 4], [5, 6], [0.0, 0.0], "length")], SamplingParams())

    def loss(answer: Answer) -> tuple[torch.Tensor, Any]:
        return -(answer.logprobs()[0] * batch.loss_mask).mean(), None

    policy.update([MicroBatch(batch)], loss)
    found.append(probe.logprobs(PROMPT))
    probe.refresh()
    found.append(probe.logprobs(PROMPT))
    return found, dict(policy.export())


def test_every_stage_of_a_pipeline_has_the_log_probs_of_the_weights_at_the_last_refresh(tmp_path: Path) -> None:
    truth = tiny_models.transformers_model(tiny_models.DENSE).float().eval()
    truth.save_pretrained(tmp_path)
    ranks = run_ranks(2, _probed, str(tmp_path))
    (before, unrefreshed, after), weights = ranks[0]
    assert [found for found, _ in ranks] == [ranks[0][0]] * 2, "the same on every process"
    assert before == unrefreshed
    assert before == pytest.approx(logprobs(truth), abs=2e-5)
    truth.load_state_dict(weights)
    assert after == pytest.approx(logprobs(truth), abs=2e-5)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3


def logprobs(model: Any) -> list[float]:
    """log p(PROMPT[t] | PROMPT[:t]) of t >= 1, nats."""
    with torch.no_grad():
        rows = model(torch.tensor([PROMPT])).logits[0, :-1].double().log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, PROMPT[1:], strict=True)]


def loaded(rank: int, folder: str) -> dict[str, Any]:
    place = groups.initialize(ParallelSettings(), 1)

    def policy(**settings: Any) -> Policy:
        made = Policy(ModelSettings(config=DENSE), ParallelSettings(), TrainSettings(**settings), place)
        made.start_phase(lr=made.train.lr, min_lr=0.0, warmup_steps=0, total_steps=10, decay_style="constant")
        return made

    writer = policy(lr=1e-3)
    writer.optimizer.step()  # an optimizer without an update has no state
    writer.phase_updates = 1
    checkpoint.save(Path(folder), writer, Progress("rl", 2), extra={}, keep=1)
    other = policy(lr=1e-4, adam_beta1=0.5, adam_beta2=0.7, adam_eps=1e-3, weight_decay=0.2)
    checkpoint.load(Path(folder, "rl-000002"), other)
    of_groups = other.optimizer.param_groups
    return {name: {group[name] for group in of_groups} for name in ("lr", "betas", "eps", "weight_decay")}


def test_the_settings_of_the_optimizer_are_those_of_the_job_that_loads_a_checkpoint(tmp_path: Path) -> None:
    (found,) = run_ranks(1, loaded, str(tmp_path))
    assert found["lr"] == {1e-4} and found["betas"] == {(0.5, 0.7)} and found["eps"] == {1e-3}
    # norms and biases have no weight decay
    assert max(found["weight_decay"]) == 0.2
