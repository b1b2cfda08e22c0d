"""Options and settings of the whole suite."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

# ranks of the multi-process tests share two cores; read by the libraries when they load, and inherited by the ranks
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# with it matrix products on a card have the same bits twice
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from built_wheel import checkout, metadata, wheel  # noqa: F401
from ceilings import SECONDS
from distributed import interpreter_of_this_run
from hypothesis import settings
from on_device import CARD, DEVICE, INTERPRETED, MadeByTests
from tested_kernels import TestedKernels

from megatron_rc.backend import set_debug_checks

# the same examples on every run and machine; a slow machine is not a failure
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

MARK = re.compile(r"mark\.(interpreter|kernel)\b")
"""What the text of every test file says that holds interpreted tests."""
set_debug_checks(True)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take, where pytest-timeout is there to end it")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(TestedKernels(config))
    config.addinivalue_line("markers", "timeout: as the setting timeout, for one test")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Under the interpreter, most files hold no test that runs: they are not imported."""
    if INTERPRETED and collection_path.name.startswith("test_") and not MARK.search(collection_path.read_text()):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Triton decides when a kernel is defined whether to interpret it, so a process runs either kind of test.

    Tests marked `kernel` are of both kinds: they run on a card where there is one.
    """

    def runs(item: pytest.Item) -> bool:
        marks = {mark.name for mark in item.iter_markers()}
        if "full" in marks and not config.getoption("--full"):
            return False
        return INTERPRETED if "interpreter" in marks else INTERPRETED or CARD if "kernel" in marks else not INTERPRETED

    for item in items:
        if item.get_closest_marker("cuda") and not CARD:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    interpreted = {item.path for item in items for mark in ("interpreter", "kernel") if item.get_closest_marker(mark)}
    for path in interpreted:
        if not MARK.search(path.read_text()):
            raise pytest.UsageError(
                f"{path} holds interpreted tests and must say mark.interpreter or mark.kernel, or they are passed over"
            )
    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the folders whose tests took half as long again as they should."""
    seconds: Counter[str] = Counter()
    for report in (one for kind in terminalreporter.stats.values() for one in kind):
        if isinstance(report, pytest.TestReport):
            seconds["/".join(report.nodeid.split("/")[:2])] += report.duration
    for folder in sorted(SECONDS.keys() & seconds.keys()):
        if seconds[folder] > 1.5 * (usual := SECONDS[folder][INTERPRETED]):
            terminalreporter.write_line(f"{folder} took {seconds[folder]:.0f} s, and {usual:.0f} s on two quiet cores")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The servers that the tests shared end with all they started, or the run fails."""
    folder = session.config._tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ or not any(folder.glob("sglang-*.json")):
        return
    from sglang_server import end_shared_servers

    if wrong := end_shared_servers(folder):
        pytest.exit("; ".join(wrong), returncode=pytest.ExitCode.TESTS_FAILED)


@pytest.fixture
def no_debug_checks() -> Iterator[None]:
    """As outside of tests, where nothing reads values from the device to check them."""
    before = set_debug_checks(False)
    yield
    set_debug_checks(before)


@pytest.fixture(autouse=True, scope="session")
def _interpreter_that_remembers() -> Iterator[None]:
    with interpreter_of_this_run():
        yield


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the tensors are that a test of kernels makes.

    Whatever a kernel forgets to write is seen: torch.empty is filled with NaN, or with the largest integer.
    """
    on_card = any(request.node.get_closest_marker(mark) for mark in ("kernel", "cuda")) and CARD
    if not INTERPRETED and not on_card:
        yield torch.device("cpu")
        return
    # some operations of PyTorch on a card, which the truth is computed with, are not deterministic, and only say so
    torch.use_deterministic_algorithms(True, warn_only=on_card)
    with MadeByTests(DEVICE) if on_card else nullcontext():
        yield DEVICE
    torch.use_deterministic_algorithms(False)
