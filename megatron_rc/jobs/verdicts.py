"""Endpoints of the runs of a grid: their check before the runs, and endpoints.csv after them."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rc import schema
from megatron_rc.jobs.grid_settings import Cell
from megatron_rc.report.endpoints import Endpoints, Outcome, failed, outcome_of
from megatron_rc.report.log import read_metrics
from megatron_rc.settings.job import JobSettings
from megatron_rc.tasks.registry import build_task

FILE_NAME = "endpoints.csv"


def answers_per_evaluation(settings: JobSettings) -> int:
    """Held-out prompts of a job times the answers to each."""
    task = settings.task
    built = build_task(task.kind, task.options, seed=settings.train.seed, tokenizer=settings.model.hf_path)
    return len(built.eval_prompts()) * settings.train.eval_samples


def check(rules: Endpoints, jobs: Mapping[str, JobSettings]) -> None:
    """Refuse jobs, by name, whose evaluations are too small or too few; ValueError names the job and the setting."""
    known: dict[str, int] = {}
    for name, settings in jobs.items():
        train = settings.train
        task = repr((schema.to_dict(settings.task), train.eval_samples))
        if task not in known:
            known[task] = answers_per_evaluation(settings)
        answers = known[task]
        if answers < rules.min_answers:
            few = f"endpoints.min_answers is {rules.min_answers}, and an evaluation has {answers} answers"
            raise ValueError(f"{name}: {few}: raise train.eval_samples or the number of held-out prompts")
        evaluations = 1 + math.ceil(train.steps / train.eval_interval)
        if evaluations < rules.least_evaluations:
            given = f"train.steps {train.steps} with train.eval_interval {train.eval_interval} gives {evaluations}"
            raise ValueError(f"{name}: the endpoints need {rules.least_evaluations} evaluations, and {given}")


def outcome_of_cell(rules: Endpoints, cell: Cell) -> Outcome:
    """The outcome of a finished or broken cell."""
    return outcome_of(read_metrics(cell.folder / "metrics.jsonl"), rules, stopped=cell.broken())


def write(rules: Endpoints, cells: Sequence[Cell], folder: Path) -> Path:
    """Write endpoints.csv, one row per finished or broken run, into ``folder``; returns its path."""
    outcomes = {(cell.folder.parent.name, cell.seed): outcome_of_cell(rules, cell) for cell in cells}
    path = folder / FILE_NAME
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*cells[0].choices, "seed", *Outcome._fields, "failed"])
        for cell in cells:
            mine = outcomes[cell.folder.parent.name, cell.seed]
            of_exact = "-".join((cell.choices | rules.exact).values()) if rules.exact else ""
            exact = outcomes.get((of_exact, cell.seed))
            verdict = "" if exact is None else int(failed(mine.final, exact.final, rules))
            shown = ("" if value is None else value for value in mine)
            writer.writerow([*cell.choices.values(), cell.seed, *shown, verdict])
    return path
