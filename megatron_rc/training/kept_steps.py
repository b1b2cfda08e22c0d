"""The steps of a run in OUTPUT/dump: all of them with --dump, else the last ones, rotated and capped."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_rc.batch import TokenBatch
from megatron_rc.dump.schema import is_kept_step, step_files
from megatron_rc.dump.writer import DumpWriter
from megatron_rc.settings.dump import DumpSettings


class StepDump:
    """Writes the steps of a run, on the writing process, in a thread during the next step."""

    def __init__(self, folder: Path, settings: DumpSettings, *, every_step: bool) -> None:
        """Open the folder; with ``every_step`` kept steps in it are deleted, because a replay needs whole steps."""
        self._settings, self._every_step = settings, every_step
        self._writer = DumpWriter(folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dump")
        self._unfinished: Future[None] | None = None
        files = step_files(folder)
        kept = {step: file for step, file in files.items() if is_kept_step(file)}
        self._blocked = not every_step and len(kept) < len(files)
        if every_step:
            for file in kept.values():
                file.unlink()

    @property
    def announcement(self) -> str:
        """One line that says what is written."""
        folder, settings = self._writer.folder, self._settings
        if self._every_step:
            return f"dump: every step goes to {folder}, with token ids"
        if self._blocked:
            return f"dump: {folder} holds steps of an earlier --dump, so the last steps are not kept"
        ids, size = "with" if settings.tokens else "without", settings.max_bytes / 1024**2
        steps = "the last step is" if settings.keep == 1 else f"the last {settings.keep} steps are"
        return f"dump: {steps} kept in {folder}, {ids} token ids, at most {size:.0f} MiB (dump.keep=0 keeps none)"

    def write(self, step: int, batch: TokenBatch, **columns: Any) -> None:
        """Begin to write ``step`` as `DumpWriter.write` does, and to delete what need not be kept any longer.

        The arguments may not change afterwards. Errors are raised by the next call of a method.
        """
        self.finish()
        if not self._blocked:
            self._unfinished = self._thread.submit(self._write, step, batch, columns)

    def finish(self) -> None:
        """Wait until the last step is on the disk."""
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            unfinished.result()

    def close(self) -> None:
        try:
            self.finish()
        finally:
            self._thread.shutdown()

    def _write(self, step: int, batch: TokenBatch, columns: dict[str, Any]) -> None:
        if self._every_step:
            self._writer.write(step, batch, **columns)
            return
        settings = self._settings
        if not settings.tokens:
            columns["routes"] = False
        self._writer.write(step, batch, **columns, tokens=settings.tokens, max_bytes=settings.max_bytes)
        self._rotate(step)

    def _rotate(self, newest: int) -> None:
        """Keep the steps that lead to ``newest``; later steps belong to a run that was resumed at an earlier step."""
        room = self._settings.max_bytes
        for step, file in sorted(step_files(self._writer.folder).items(), reverse=True):
            size = file.stat().st_size
            room -= size if step <= newest else 0
            if step > newest or step <= newest - self._settings.keep or (room < 0 and step < newest):
                file.unlink()
