"""Which backend computes where the kernels cannot run."""

import pytest
import torch
import triton

from megatron_rc import backend

ROWS = torch.zeros(3)


@pytest.fixture
def _kernels_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "interpreted", lambda: True)
    assert backend.use_triton("auto", rows=ROWS) and backend.use_triton("triton", rows=ROWS)


@pytest.mark.usefixtures("_kernels_run_here")
@pytest.mark.parametrize("version", ["3.4.0", "3.3.1+git1234", "2.3.1"])
def test_auto_computes_with_torch_where_triton_is_too_old(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert backend.use_triton("auto", rows=ROWS) is False
    with pytest.raises(ValueError, match=rf"the kernels need triton 3.5 or newer, found {version[:5]}"):
        backend.use_triton("triton", rows=ROWS)


@pytest.mark.usefixtures("_kernels_run_here")
@pytest.mark.parametrize("version", ["3.5.0", "3.5.1+gitabc", "4.0.0"])
def test_auto_computes_with_the_kernels_where_triton_is_new_enough(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert backend.use_triton("auto", rows=ROWS)


@pytest.mark.usefixtures("_kernels_run_here")
def test_auto_computes_with_torch_where_there_is_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert backend.use_triton("auto", rows=ROWS) is False
    with pytest.raises(ValueError, match="triton is not installed"):
        backend.use_triton("triton", rows=ROWS)
