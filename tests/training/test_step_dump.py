"""The steps and the versions of weights that a run keeps: rotated, private, and as they were when they were loaded."""

import itertools
import math
import stat
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from distributed import run_ranks
from jobs import DENSE
from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.correction.settings import RolloutCorrection, Weight
from megatron_rc.dump.schema import read_dump
from megatron_rc.dump.writer import DumpWriter
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.rollout.recorded import RecordedEngine
from megatron_rc.settings.dump import DumpSettings
from megatron_rc.settings.loss import LossSettings
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training import groups
from megatron_rc.training.groups import SharedError
from megatron_rc.training.kept_steps import StepDump
from megatron_rc.training.microbatches import split_rows
from megatron_rc.training.policy import Policy
from megatron_rc.training.sampling_weights import SamplingWeights
from megatron_rc.training.step.reinforce import StepSettings, StepState, reinforce_step

SAMPLING = SamplingParams(max_new_tokens=4096, top_k=2)


def batch_of(sequences: int, tokens: int = 2) -> tuple[TokenBatch, dict[str, Any]]:
    """A batch whose groups have two responses each, and the other arguments of a write."""
    drawn = ([1, 2], [3] * tokens, [-0.5] * tokens, "length", [(0, 0, tokens)], [[3, 4]] * tokens)
    samples = [Sample(*drawn) for _ in range(sequences)]
    batch = TokenBatch.from_samples(samples, SAMPLING, groups=[i // 2 for i in range(sequences)])
    return batch, {"samples": samples, "seeds": [*range(sequences)]}


def write(dump: StepDump, *steps: int, sequences: int = 4, tokens: int = 2) -> None:
    for step in steps:
        batch, arguments = batch_of(sequences, tokens)
        dump.write(step, batch, **arguments)
    dump.finish()


def steps_in(folder: Path) -> list[int]:
    return [records[0]["step"] for records in read_dump(folder)]


def test_a_resumed_run_leaves_only_steps_that_lead_to_one_another(tmp_path: Path) -> None:
    write(StepDump(tmp_path, DumpSettings(keep=3), every_step=False), 5, 6, 7)
    leftover = tmp_path / ".step-000008.parquet.writing"
    leftover.write_bytes(b"half a file of a process that was killed")
    resumed = StepDump(tmp_path, DumpSettings(keep=3), every_step=False)
    assert steps_in(tmp_path) == [5, 6, 7] and not leftover.exists(), "the steps of the crash stay until a new one"
    write(resumed, 6)
    assert steps_in(tmp_path) == [5, 6]


def test_only_the_user_can_read_what_is_written(tmp_path: Path) -> None:
    for name, every_step in (("kept", False), ("every", True)):
        folder = tmp_path / name / "dump"
        write(StepDump(folder, DumpSettings(), every_step=every_step), 1)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()] == [0o600]


def test_neither_token_ids_nor_routes_are_in_a_kept_file_unless_asked_for(tmp_path: Path) -> None:
    batch, arguments = batch_of(2)
    for sample in arguments["samples"]:
        sample.routes = torch.zeros(3, 1, 1, dtype=torch.int32)
    for tokens in (False, True):
        folder = tmp_path / str(tokens)
        dump = StepDump(folder, DumpSettings(tokens=tokens), every_step=False)
        dump.write(1, batch, **arguments, routes=True)
        dump.close()
        table = pq.read_table(folder)
        for name in ("prompt_ids", "output_ids", "support", "routes"):
            assert table[name].null_count == (0 if tokens else 2), name
        assert table["rollout_logprobs"].null_count == 0


def test_the_steps_together_stay_below_the_cap(tmp_path: Path) -> None:
    cap = 1024**2
    dump = StepDump(tmp_path, DumpSettings(keep=50, max_bytes=cap), every_step=False)
    for step in range(1, 9):
        batch, arguments = batch_of(100, tokens=1000)
        noise = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(step))
        dump.write(step, batch, **arguments, computed={"old_logprobs": noise})
        dump.finish()
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= cap
    kept = steps_in(tmp_path)
    assert len(kept) >= 2 and kept == [*range(9 - len(kept), 9)]


def test_a_step_above_the_cap_keeps_its_first_whole_groups(tmp_path: Path) -> None:
    write(StepDump(tmp_path, DumpSettings(max_bytes=1024**2), every_step=False), 1, sequences=60, tokens=4096)
    [records] = read_dump(tmp_path)
    assert [r["sequence"] for r in records] == [*range(len(records))]
    assert 0 < len(records) < 60 and len(records) % 2 == 0, "groups have two responses"


def test_every_step_of_a_whole_dump_stays_also_when_a_later_run_keeps_its_last_steps_there(tmp_path: Path) -> None:
    write(StepDump(tmp_path, DumpSettings(keep=1), every_step=True), *range(1, 6))
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    later = StepDump(tmp_path, DumpSettings(keep=1), every_step=False)
    assert "so the last steps are not kept" in later.announcement
    write(later, 3, 6)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_whole_dump_holds_no_step_without_token_ids_which_replay_refuses(tmp_path: Path) -> None:
    write(StepDump(tmp_path, DumpSettings(), every_step=False), 1, 2, 3)
    sentence = r"step-000001.parquet has no token ids, .* record a dump with --dump, or with"
    with pytest.raises(ValueError, match=sentence):
        RecordedEngine(tmp_path)
    write(StepDump(tmp_path, DumpSettings(), every_step=True), 4)
    assert steps_in(tmp_path) == [4]
    RecordedEngine(tmp_path)


def test_a_file_of_another_writer_is_not_deleted(tmp_path: Path) -> None:
    batch, arguments = batch_of(2)
    DumpWriter(tmp_path).write(1, batch, **arguments)
    write(StepDump(tmp_path, DumpSettings(), every_step=True), 2)
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("every_step", "settings", "line"),
    [
        (False, DumpSettings(), "the last 3 steps are kept in {}, without token ids, at most 512 MiB"),
        (False, DumpSettings(keep=1, tokens=True), "the last step is kept in {}, with token ids, at most 512 MiB"),
        (True, DumpSettings(), "every step goes to {}, with token ids"),
    ],
)
def test_one_line_says_what_is_written(tmp_path: Path, every_step: bool, settings: DumpSettings, line: str) -> None:
    assert line.format(tmp_path) in StepDump(tmp_path, settings, every_step=every_step).announcement


def test_a_step_that_cannot_be_written_is_an_error_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError("No space left on device")

    dump = StepDump(tmp_path, DumpSettings(), every_step=False)
    monkeypatch.setattr(pq, "write_table", full)
    batch, arguments = batch_of(2)
    dump.write(1, batch, **arguments)
    with pytest.raises(OSError, match="No space left"):
        dump.close()
    assert not list(tmp_path.iterdir())


TRAINED = 2
"""Version that the batch trains; versions 0 to 2 sampled it, two of them within one response."""
UPPER, STALENESS_UPPER = 1.1, 1.02
TWO_FACTORS = RolloutCorrection(Weight(upper=UPPER, staleness_upper=STALENESS_UPPER))


def mixed_batch() -> TokenBatch:
    spans = [[(0, 0, 3), (1, 3, 5)], [(0, 0, 4)], [(1, 0, 3)], [(2, 0, 6)], [(1, 0, 2), (2, 2, 3)], [(0, 0, 1)]]
    samples = []
    for i, versions in enumerate(spans):
        ids = [(7 * i + 3 * t) % 20 for t in range(versions[-1][2])]
        logprobs = [-3.0 + 0.2 * math.sin(i + 5 * t) for t in range(len(ids))]
        samples.append(Sample([1, 2 + i], ids, logprobs, "stop", versions))
    rewards, groups = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2]  # the last group is not trained on
    return TokenBatch.from_samples(samples, SamplingParams(), rewards=rewards, groups=groups)


def steps(rank: int, layout: dict[str, int], saved: str, folder: str) -> dict[str, Any] | None:
    """Two updates with all versions kept, then the step on the mixed batch; None before the last pipeline stage."""
    parallel = ParallelSettings(**layout)
    train = TrainSettings(optimizer="sgd", micro_batches=2, clip_grad=0.0)
    policy = Policy(ModelSettings(config=DENSE), parallel, train, groups.initialize(parallel, 1))
    policy.start_phase(lr=1.0, min_lr=0.0, warmup_steps=0, total_steps=10, decay_style="constant")
    batch, kept = mixed_batch(), SamplingWeights(policy, oldest=TRAINED)
    whole = split_rows(batch, [range(batch.num_sequences)])

    def step(correction: RolloutCorrection, version: int | None) -> Any:
        settings = StepSettings(correction=correction, loss=LossSettings(), train=train, max_nonfinite_share=0.0)
        return reinforce_step(policy, batch, settings, StepState(version=version, sampling_weights=kept))

    then = []
    for version in range(TRAINED + 1):
        kept.keep(version)
        then.append(policy.logprobs(whole)[0])
        if version < TRAINED:
            step(RolloutCorrection(), None)
    if saved:
        kept.save(Path(saved), TRAINED)
    later = [kept.logprobs(version, whole) for version in kept.versions]
    assert torch.equal(policy.logprobs(whole)[0], then[-1]), "the trained weights are loaded again"
    result = step(TWO_FACTORS, TRAINED)
    kept.keep(TRAINED + 1)
    assert kept.versions == [1, 2, 3], "no rollout of version 0 can arrive any more"
    if folder:
        kept.load(Path(folder))
        later = [*(kept.logprobs(version, whole) for version in (0, 1)), later[-1]]
    if not policy.groups.last_stage:
        return None
    weights = torch.full((batch.num_tokens,), math.nan)
    counted = [i for i, s in enumerate(result.share.sequences) if s >= 0]
    rows = batch.rows_of([result.share.sequences[i] for i in counted])
    weights[rows] = result.columns["weights"][result.share.batch.rows_of(counted)]
    return {"then": then, "later": later, "weights": weights, "metrics": result.metrics}


def check(ranks: list[dict[str, Any] | None], *, exact: bool) -> list[Tensor]:
    """Compare what the ranks of one run computed with the definition; returns the log-probs of each version."""
    batch, found = mixed_batch(), [rank for rank in ranks if rank is not None]
    mask, mu = batch.loss_mask, batch.rollout_logprobs
    then = found[0]["then"]
    for rank, version in itertools.product(found, range(TRAINED + 1)):
        torch.testing.assert_close(rank["later"][version], then[version], rtol=0, atol=0 if exact else 1e-5)
    sampling = torch.stack(then).gather(0, batch.weight_versions.clamp(min=0).long()[None])[0]
    mismatch, staleness = (sampling - mu)[mask].double(), (then[-1] - sampling)[mask].double()
    expected = mismatch.exp().clamp(max=UPPER) * staleness.exp().clamp(max=STALENESS_UPPER)
    weights = torch.stack([rank["weights"] for rank in found]).nanmean(0)[mask].double()
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0)
    older = (batch.weight_versions < TRAINED)[mask]
    assert (staleness[~older] == 0).all() and (staleness[older].abs() > 1e-3).all()
    assert 0 < (staleness > math.log(STALENESS_UPPER)).sum() < older.sum()
    for rank, (name, log) in itertools.product(found, (("mismatch", mismatch), ("staleness", staleness))):
        metrics = rank["metrics"]
        assert metrics[f"old/{name}_k3"] == pytest.approx((log.expm1() - log).mean().item(), rel=1e-3)
        rho = log.exp()
        ess = (rho.sum() ** 2 / len(rho) / rho.square().sum()).item()
        assert metrics[f"old/{name}_ess"] == pytest.approx(ess, rel=1e-5)
    return then


@pytest.mark.parametrize("layout", ["pipeline", "data"])
def test_the_step_is_that_of_the_definition_on_two_processes(layout: str) -> None:
    check(run_ranks(2, steps, {} if layout == "data" else {layout: 2}, "", ""), exact=True)


def test_what_two_tensor_parallel_processes_save_one_process_loads(tmp_path: Path) -> None:
    then = check(run_ranks(2, steps, {"tensor": 2}, str(tmp_path), ""), exact=True)
    alone = check(run_ranks(1, steps, {}, "", str(tmp_path)), exact=False)
    assert max((a - b).abs().max() for a, b in zip(then, alone, strict=True)) < 1e-5


def test_stale_samples_without_those_log_probs_are_refused_on_every_process() -> None:
    samples = [Sample([1], [2, 3], [-1.0, -2.0], "stop", [(4, 0, 2)]) for _ in range(2)]
    batch = TokenBatch.from_samples(samples, SamplingParams(), rewards=[0.0, 1.0], groups=[0, 0])
    policy: Any = None
    train = TrainSettings()
    settings = StepSettings(correction=TWO_FACTORS, loss=LossSettings(), train=train, max_nonfinite_share=0.0)
    with pytest.raises(SharedError, match="the batch holds samples of older weights, and neither copies of"):
        reinforce_step(policy, batch, settings, StepState(version=5))
