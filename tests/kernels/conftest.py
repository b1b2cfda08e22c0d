"""What the tests of kernels share."""

import os
from collections.abc import Iterator

import pytest
from on_device import CARD, INTERPRETED


@pytest.fixture(autouse=True, scope="session")
def _compiled_once_per_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing compiled before a run counts; what one test has compiled, another need not, in any process of the run."""
    if INTERPRETED or CARD:
        yield
        return
    from aot import fresh_cache

    base = tmp_path_factory.getbasetemp()
    with fresh_cache((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "triton"):
        yield


@pytest.fixture(scope="module")
def small_chunks() -> Iterator[None]:
    """Many chunks from few tokens of a correction, by the kernels also where "auto" chooses."""
    from kernel_correction_data import small_blocks

    with small_blocks():
        yield


@pytest.fixture(scope="module")
def small_rows() -> Iterator[None]:
    """Many blocks from few columns, by the kernels also where "auto" chooses."""
    from row_problems import small_blocks

    with small_blocks():
        yield
