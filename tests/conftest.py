"""Options and settings of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# ranks of the multi-process tests share two cores; read by the libraries when they load, and inherited by the ranks
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
from built_wheel import checkout as checkout
from built_wheel import metadata as metadata
from built_wheel import wheel as wheel
from hypothesis import settings

from megatron_rc.backend import set_debug_checks

# the same examples on every run and machine; a slow machine is not a failure
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MARK = "mark.interpreter"
"""What the text of every test file says that holds interpreted tests."""
set_debug_checks(True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Under the interpreter, most files hold no test that runs: they are not imported."""
    if INTERPRETED and collection_path.name.startswith("test_") and MARK not in collection_path.read_text():
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Triton decides when a kernel is defined whether to interpret it, so a process runs either kind of test."""

    def runs(item: pytest.Item) -> bool:
        if item.get_closest_marker("full") and not config.getoption("--full"):
            return False
        return (item.get_closest_marker("interpreter") is not None) == INTERPRETED

    for path in {item.path for item in items if item.get_closest_marker("interpreter")}:
        if MARK not in path.read_text():
            raise pytest.UsageError(f"{path} holds interpreted tests and must say {MARK}, or they are passed over")
    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The servers that the tests shared end with all they started, or the run fails."""
    folder = session.config._tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ or not any(folder.glob("sglang-*.json")):
        return
    from sglang_server import end_shared_servers

    wrong = end_shared_servers(folder)
    if wrong:
        pytest.exit("; ".join(wrong), returncode=pytest.ExitCode.TESTS_FAILED)


@pytest.fixture
def no_debug_checks() -> Iterator[None]:
    """As outside of tests, where nothing reads values from the device to check them."""
    before = set_debug_checks(False)
    yield
    set_debug_checks(before)


@pytest.fixture(autouse=True, scope="session")
def _interpreter_that_remembers() -> Iterator[None]:
    """The interpreter without its most repeated work, for every test of a kernel."""
    if not INTERPRETED:
        yield
        return
    # the other tests need no triton
    from fast_interpreter import interpreter_that_remembers

    with interpreter_that_remembers():
        yield


@pytest.fixture(autouse=True)
def _outputs_start_as_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a kernel forgets to write is seen: torch.empty is filled with NaN, or with the largest integer."""
    if not INTERPRETED:
        yield
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
