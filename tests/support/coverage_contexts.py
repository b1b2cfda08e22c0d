"""Pytest plugin of coverage_table.py: notes what each test covers, in all processes, and how long it takes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

DATA = Path(os.environ["COVERAGE_TABLE_DATA"])
CONTEXT, REPORTS = DATA / f"context-{os.getpid()}", DATA / f"tests-{os.getpid()}.jsonl"
# a file, because some processes are forked from one that was started for an earlier test
os.environ["COVERAGE_TABLE_CONTEXT"] = str(CONTEXT)
MEASURING: Any = coverage.Coverage.current()
context = ""


def switch(name: str) -> str:
    """Count what runs from now on for ``name``; returns what it counted for before."""
    global context
    before, context = context, name
    CONTEXT.write_text(name)
    MEASURING.switch_context(name)
    return before


def shared(fixture: Any) -> str:
    return f"{fixture.baseid}::{fixture.argname}@{fixture.scope}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    switch(item.nodeid)
    result = yield
    switch("")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    before = switch(shared(fixturedef))
    try:
        return (yield)
    finally:
        switch(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any) -> Iterator[None]:
    report: Any = yield
    fixtures = [found[-1] for found in item._fixtureinfo.name2fixturedefs.values()]
    row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
    row["interpreted"] = os.environ.get("TRITON_INTERPRET") == "1"
    row["fixtures"] = [shared(fixture) for fixture in fixtures if fixture.scope != "function"]
    with open(REPORTS, "a") as file:
        print(json.dumps(row), file=file)
    return report


def pytest_sessionfinish() -> None:
    """A worker of pytest-xdist may be killed after this."""
    MEASURING.save()
