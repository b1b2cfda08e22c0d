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
@pytest.mark.parametrize("version", ["3.4.0", "3.3.1+git1234", "2.3.1", None])
def test_auto_computes_with_torch_where_triton_is_missing_or_too_old(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "triton is not installed"
    if version is None:
        monkeypatch.setattr(backend, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(triton, "__version__", version)
        said = rf"the kernels need triton 3.5 or newer, found {version[:5]}"
    assert backend.use_triton("auto", rows=ROWS) is False
    with pytest.raises(ValueError, match=said):
        backend.use_triton("triton", rows=ROWS)


@pytest.mark.usefixtures("_kernels_run_here")
@pytest.mark.parametrize("version", ["3.5.0", "3.5.1+gitabc", "4.0.0"])
def test_auto_computes_with_the_kernels_where_triton_is_new_enough(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert backend.use_triton("auto", rows=ROWS)
