"""Everything that a job shows and writes for people: display, metrics, dashboards and dumps, by one process."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rc import schema
from megatron_rc.dump.writer import DiscardedWriter
from megatron_rc.loss.options import SURROGATES
from megatron_rc.report import sinks
from megatron_rc.report.context import save_fingerprint, without_credentials
from megatron_rc.report.dashboards import Dashboards
from megatron_rc.report.display import Display
from megatron_rc.report.log import MetricsLog
from megatron_rc.report.run_page import write_report
from megatron_rc.settings.job import JobSettings
from megatron_rc.training.fingerprint import fingerprint
from megatron_rc.training.groups import Groups
from megatron_rc.training.kept_steps import StepDump
from megatron_rc.training.progress import Progress
from megatron_rc.training.step.reinforce import StepResult
from megatron_rc.training.step.sampling import SampledBatch

PLACED = ("train_rank", "pack_position")
"""Columns of the dump that say where the trainer put a sequence."""


class Observers:
    """Every process calls the same methods; only the writing process draws and writes."""

    def __init__(self, settings: JobSettings, *, writer: bool, dumps: bool) -> None:
        """``dumps``, whether to write every step whole, must be the same on every process."""
        self._folder = folder = Path(settings.output)
        self._dumping, self._dumps_routes = dumps or settings.dump.keep > 0, settings.moe.dump_routes
        self._display = Display(settings.train.steps, settings.name) if writer else None
        self._log = MetricsLog(folder) if writer else None
        self._dump = None
        if writer and self._dumping:
            self._dump = StepDump(folder / "dump", settings.dump, every_step=dumps)
        self._loss, self._surrogate = settings.loss, settings.correction.surrogate
        keeps_discarded = writer and settings.rollout.sglang.dump_rejected
        self._discarded = DiscardedWriter(folder / "rejected") if keeps_discarded else None
        self._dashboards = None
        if writer:
            facts = fingerprint(train_dtype=settings.train.dtype, rollout_dtype=settings.rollout.dtype)
            shown, wanted = schema.to_dict(settings), sinks.requested(vars(settings.log))
            save_fingerprint(folder, facts)
            config = without_credentials({"settings": shown, "machine": facts})
            self._dashboards = Dashboards(folder, wanted, name=settings.name, config=config, say=self.message)

    def __enter__(self) -> "Observers":
        if self._display:
            self._display.__enter__()
        if self._dump:
            self.message(self._dump.announcement)
        if self._loss.surrogate == self._surrogate:
            between = f" of a ratio between {1 - self._loss.clip_lower:g} and {1 + self._loss.clip_upper:g}"
            clips = SURROGATES[self._loss.surrogate].clips
            self.message(f"the correction sets loss.surrogate: {self._surrogate}{between * clips}")
        return self

    def __exit__(self, *exception: Any) -> None:
        with ExitStack() as leaving:
            if self._dump:
                leaving.callback(self._dump.close)
            if self._dashboards:
                self._dashboards.close(failed=exception[0] is not None)
            if self._display:
                self._display.__exit__(None, None, None)
            if self._log:
                self._log.close()

    def finish_dump(self) -> None:
        """Wait until the dump has every step so far, because a checkpoint must not be ahead of it."""
        if self._dump:
            self._dump.finish()

    def report(self) -> None:
        """Write report.html from everything recorded so far."""
        if self._log:
            self.message(f"report: {write_report(self._folder)}")

    def start(self, phase: str) -> None:
        """Open the runs of ``phase`` on the dashboards; raises ValueError when one cannot be reached or refuses it."""
        if self._dashboards:
            self._dashboards.start(phase)

    def phase(self, name: str, total: int, done: int = 0) -> None:
        if self._display:
            self._display.phase(name, total)
            self._display.advance(done)

    def advance(self, count: int) -> None:
        if self._display:
            self._display.advance(count)

    def message(self, text: str) -> None:
        if self._display:
            self._display.message(text)

    def record(self, progress: Progress, metrics: dict[str, float]) -> None:
        """Log and show the metrics of one step."""
        record = {"phase": progress.phase, "step": progress.step, **metrics}
        if self._log:
            self._log.write(record)
        if self._dashboards:
            self._dashboards.write(record)
        if self._display:
            self._display.step(progress.step, metrics)

    def resumed(self, checkpoint: Path, progress: Progress) -> None:
        """Delete what was logged after the checkpoint."""
        if self._log:
            self._log.truncate_after(progress.phase, progress.step)
        self.message(f"resumed from {checkpoint}")

    def dump(self, progress: Progress, sampled: SampledBatch, result: StepResult, groups: Groups) -> None:
        """Write a finished step and its discarded responses where they are wanted; a collective.

        The weights that the step was scored with have the version of ``progress``.
        """
        step = progress.step
        if self._discarded and sampled.discarded:
            self._discarded.write(step, sampled.discarded)
        if not self._dumping:
            return
        parts = groups.gather_to_writer(result.trained_part(groups))
        if not self._dump:
            return
        batch, computed = result.batch, dict[str, Tensor]()
        placed: dict[str, list[int | None]] = {name: [None] * batch.num_sequences for name in PLACED}
        for part in parts:
            if part is None:
                continue
            rows = batch.rows_of(part.sequences)
            for name, values in part.columns.items():
                empty = values.new_zeros(batch.num_tokens, *values.shape[1:])
                computed.setdefault(name, empty)[rows] = values
            for sequence, position in zip(part.sequences, part.positions, strict=True):
                placed["train_rank"][sequence], placed["pack_position"][sequence] = part.rank, position
        self._dump.write(
            step,
            batch,
            samples=sampled.samples,
            seeds=sampled.seeds,
            computed=computed,
            placed=placed,
            trainer_version=progress.weight_version,
            routes=self._dumps_routes,
        )
