"""Which kernels a run has tested the values of: those that a passed test marked `kernel` has launched."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from on_device import CARD, DEVICE, INTERPRETED

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "megatron_rc/kernels"


def kernel_names() -> list[str]:
    """Every @triton.jit function named *_kernel, read from the source."""
    return [
        node.name
        for path in sorted(KERNELS.glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    ]


@contextmanager
def launched() -> Iterator[set[str]]:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    names: set[str] = set()

    def remembering(run: Any) -> Any:
        def remembered(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            names.add(kernel.fn.__name__)
            return run(kernel, *args, **kwargs)

        return remembered

    with pytest.MonkeyPatch.context() as patch:
        for kind in (InterpretedFunction, JITFunction):
            patch.setattr(kind, "run", remembering(kind.run))
        yield names


class TestedKernels:
    """A plugin that prints the count, and fails a run of all of tests/kernels that leaves a kernel out."""

    __test__ = False

    def __init__(self, config: pytest.Config) -> None:
        options = config.option
        paths = [Path(config.invocation_params.dir, argument) for argument in config.args]
        whole = any((ROOT / "tests/kernels").is_relative_to(path.resolve()) for path in paths) and not options.keyword
        # a process of pytest-xdist sees a part
        self.must_be_all = whole and not options.collectonly and not hasattr(config, "workerinput")
        self.must_be_all &= options.markexpr in ("", "kernel or cuda")
        self.found: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        if item.get_closest_marker("kernel") is None or item.get_closest_marker("interpreter") is not None:
            return (yield)
        with launched() as names:
            result = yield
        item.user_properties.append(("kernels", sorted(names)))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            for name, value in report.user_properties:
                if name == "kernels":
                    self.found.update(value)

    def missing(self) -> list[str]:
        return [name for name in kernel_names() if name not in self.found] if INTERPRETED or CARD else []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.must_be_all and self.missing() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        names = kernel_names()
        tested = [name for name in names if name in self.found]
        if not tested and not (self.must_be_all and self.missing()):
            return
        place = f"{DEVICE.type} (interpreted)" if INTERPRETED else DEVICE.type
        terminalreporter.write_line(f"kernels whose values were tested on {place}: {len(tested)} of {len(names)}")
        if self.must_be_all and self.missing():
            terminalreporter.write_line(f"FAILED: no test of the values of {', '.join(self.missing())}")
