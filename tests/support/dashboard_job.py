"""A job that does nothing but log: arguments SERVICE, FOLDER, FIRST, LAST and how it ends (finish, fail or kill)."""

import os
import signal
import sys
import time
from pathlib import Path

from megatron_rc.report.context import without_credentials
from megatron_rc.report.dashboards import Dashboards
from megatron_rc.report.log import MetricsLog

SECRET = "hunter2"
URL = f"http://me:{SECRET}@host:30000"
CONFIG = {
    "settings": {"train": {"lr": 0.25}, "urls": [URL], "model": {f"f{i}": i for i in range(150)}},
    "machine": {"torch": "9.9"},
}


def value(step: int) -> float:
    return step + 0.5


def main(service: str, folder: Path, first: int, last: int, end: str) -> None:
    with MetricsLog(folder) as log:
        log.truncate_after("rl", first - 1)
        config = without_credentials(CONFIG)
        dashboards = Dashboards(folder, {service: "project"}, name="job", config=config, say=sys.exit)
        dashboards.start("rl")
        for step in range(first, last + 1):
            record = {"phase": "rl", "step": step, "old/k3": value(step)}
            record |= {"current/route_layers": [0, 1], "none": float("nan")}
            log.write(record)
            dashboards.write(record)
        if end == "kill":
            time.sleep(1.5)  # training steps take longer than the queues of the libraries
            os.kill(os.getpid(), signal.SIGKILL)
        dashboards.close(failed=end == "fail")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
