"""The folder of a run: where the next start goes on, with which settings, and how a run branches off another."""

import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from megatron_rc import schema
from megatron_rc.jobs.lock import locked
from megatron_rc.report import context
from megatron_rc.report.log import FILE_NAME, read_metrics
from megatron_rc.report.run_page import write_report
from megatron_rc.settings import job as job_settings
from megatron_rc.settings.changes import BELONG_TO_CHECKPOINT, MAY_CHANGE, Change, changes
from megatron_rc.settings.job import JobSettings
from megatron_rc.settings.renamed import load_finished
from megatron_rc.training.progress import Progress, complete, newest, read_progress

FILES = (
    context.SETTINGS_FILE, context.CHANGES_FILE, context.FINGERPRINT_FILE, FILE_NAME, "report.html", "dashboards.json"
)  # fmt: skip
KL_POLICY = "kl_policy"
FOLDERS = ("checkpoints", KL_POLICY, "hf", "dump", "rejected", "sync", "tensorboard", "wandb")
"""What a run writes into its folder."""


class _Found(NamedTuple):
    """What a folder holds of a run."""

    last: Path | None
    """The checkpoint at which it goes on."""
    done: int | None
    """Steps of reinforcement learning that a start need not repeat; None where nothing is recorded."""
    made: JobSettings | None
    """The settings that its results were made with."""


class Start(NamedTuple):
    """How a run starts."""

    goes_on_from: Path | None = None
    """The saved step; None: the beginning."""
    finished: bool = False
    """Nothing is left to do."""


def begin(settings: JobSettings, *, fresh: bool) -> Start:
    """Prepare the folder of a run for these settings, which its settings.yaml then has, and print what it does.

    Args:
        fresh: move what an earlier run has written aside, and start anew.

    Raises:
        ValueError: the folder holds results of settings that a run may not change in the middle, or those of `branch`
            cannot act on the checkpoint that it names.
    """
    folder = Path(settings.output)
    if fresh and (aside := set_aside(folder)):
        print(f"starting anew; the earlier run is in {aside}", flush=True)
    found = _read(folder)
    if settings.branch and (found.made is None or found.done is None):
        _branch_off(settings)
        found = _read(folder)
    last, done, made = found
    if refused := _refused(settings, found):
        raise ValueError(f"{folder} was made with other settings: {'; '.join(refused)}; {_ways_out(folder, last)}")
    changed = changes(made, settings) if made and last else []
    if last and not made:
        print(f"{folder} has no {context.SETTINGS_FILE}: whether it was made with other settings is unknown")
    if last and changed:
        progress = read_progress(last)
        _note(folder, context.load_changes(folder), changed, progress)
        print(f"changed after step {progress.step}: {'; '.join(map(str, changed))}", flush=True)
    elif done is not None and done >= settings.train.steps and made and _complete(folder, settings):
        print(f"{folder} is already finished, {done} steps; --fresh or --set output=... starts anew", flush=True)
        return Start(last, finished=True)
    context.save_settings(folder, schema.to_dict(settings))
    return Start(last)


@contextmanager
def worked_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder within the block; raises ValueError naming the process that works in it."""
    with locked(folder / ".running") as holder:
        if holder:
            raise ValueError(f"{folder} is in use by {holder}: wait for its end, or take --set output=...")
        yield


def interrupted(folder: Path) -> str:
    """Write the report of a run that Ctrl-C has stopped; returns where it goes on."""
    if (folder / FILE_NAME).is_file() and read_metrics(folder):
        write_report(folder)
    last = newest(folder / "checkpoints")
    return f"goes on from {last}" if last else "starts at the beginning, because no checkpoint is written yet"


def other_settings(settings: JobSettings) -> list[str]:
    """Settings with which the results in the folder cannot go on, old and new; empty if they can, or there are none."""
    return _refused(settings, _read(Path(settings.output)))


def _refused(settings: JobSettings, found: _Found) -> list[str]:
    last, done, made = found
    if done is None or made is None:
        return []
    refused = [str(change) for change in changes(made, settings) if not change.allowed]
    steps = Change("train.steps", made.train.steps, settings.train.steps)
    if steps.new < done:
        refused.append(f"{steps}, and {done} are done")
    elif steps.new > done >= steps.old and not last:
        refused.append(f"{steps}, and no checkpoint is left to go on from")
    return refused


def _read(folder: Path) -> _Found:
    last = newest(folder / "checkpoints")
    made = job_settings.of_finished(folder) if (folder / context.SETTINGS_FILE).is_file() else None
    if last:
        progress = read_progress(last)
        return _Found(last, progress.step if progress.phase == "rl" else 0, made)
    records = read_metrics(folder) if (folder / FILE_NAME).is_file() else []
    steps = (int(record["step"]) for record in records if record["phase"] == "rl")
    return _Found(None, max(steps, default=0) if records else None, made)


def set_aside(folder: Path) -> Path | None:
    """Move what a run has written, and nothing else, into a new folder in its own, which is returned."""
    written = [folder / name for name in (*FILES, *FOLDERS) if (folder / name).exists()]
    if not written:
        return None
    aside = next(path for n in itertools.count(1) if not (path := folder / f"earlier-{n}").exists())
    aside.mkdir()
    for path in written:
        path.rename(aside / path.name)
    return aside


def _complete(folder: Path, settings: JobSettings) -> bool:
    """Whether a run has written what it writes after its last step."""
    return (folder / "report.html").is_file() and (not settings.train.save_hf or (folder / "hf/config.json").is_file())


def _branch_off(settings: JobSettings) -> None:
    """Make the folder one that `begin` continues: the checkpoint of `branch`, and the results that led to it."""
    point = settings.branch_point()
    assert point
    origin, step = Path(point[0]), point[1]
    folder, progress = Path(settings.output), Progress("rl", step)
    saved = {path.name: path for path in complete(origin / "checkpoints")}
    if progress.name not in saved:
        there = ", ".join(str(int(name.partition("-")[2])) for name in saved if name.startswith("rl-"))
        raise ValueError(f"branch: {origin} has no checkpoint of step {step}; its checkpoints: {there or 'none'}")
    rows, data = context.load_changes(origin), load_finished(origin / context.SETTINGS_FILE)
    later = [row for row in rows if row["phase"] == "rl" and row["step"] >= step]
    for row in reversed(later):
        schema.set_field(data, f"{row['name']}={schema.dump_yaml(row['old'], one_line=True)}", JobSettings)
    changed = changes(schema.from_dict(JobSettings, data), settings)
    for change in changed:
        if section := change.among(BELONG_TO_CHECKPOINT):
            raise ValueError(f"{change} cannot act in a branch: {BELONG_TO_CHECKPOINT[section]}")
    if settings.train.steps <= step:
        raise ValueError(f"train.steps must be above {step}, where the branch begins, got {settings.train.steps}")
    if settings.loss.kl_coef and not (origin / KL_POLICY).is_dir():
        raise ValueError(f"loss.kl_coef must be 0: {origin} did not keep the weights that its penalty pulls towards")
    set_aside(folder)
    for name in (f"checkpoints/{progress.name}", KL_POLICY):
        if (origin / name).is_dir():
            shutil.copytree(origin / name, folder / name, copy_function=_link)
    shutil.copy(origin / FILE_NAME, folder)
    _note(folder, [row for row in rows if row not in later], changed, progress)
    context.save_settings(folder, schema.to_dict(settings))  # the last file: without it the folder is made again
    print(f"branches off {origin} after step {step}: {'; '.join(map(str, changed))}", flush=True)


def _link(source: str, target: str) -> None:
    """A second name of a file, which nothing changes any more, or its copy where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _note(folder: Path, before: Sequence[dict[str, object]], changed: Iterable[Change], progress: Progress) -> None:
    at = {"phase": progress.phase, "step": progress.step}
    context.save_changes(folder, [*before, *({**at, **change._asdict()} for change in changed)])


def _ways_out(folder: Path, last: Path | None) -> str:
    reached = read_progress(last) if last else Progress()
    branch = f", and with --set branch={folder}:{reached.step} goes on from here" if reached.phase == "rl" else ""
    return (
        f"--fresh starts anew; --set output=... starts in another folder{branch}; "
        f"only these may change within a run: {', '.join(MAY_CHANGE)}"
    )
