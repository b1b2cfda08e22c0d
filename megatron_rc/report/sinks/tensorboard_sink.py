"""TensorBoard: event files in OUTPUT/tensorboard, one folder per phase."""

import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megatron_rc.report.sinks import Run


class TensorBoardSink:
    def __init__(self, run: Run) -> None:
        self._writer = EventFileWriter(str(run.folder / "tensorboard" / run.phase))
        self._started = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if not self._started:
            # makes TensorBoard hide what an earlier process wrote for this step and later ones
            self._add(step, session_log=SessionLog(status=SessionLog.START))
            self._started = True
        tagged = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=Summary(value=tagged))
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()

    def _add(self, step: int, **content: SessionLog | Summary) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))


open_run = TensorBoardSink
