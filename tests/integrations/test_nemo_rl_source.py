"""Loss and gradient against NeMo-RL's own corrections: recorded, or of the tree that NEMO_RL_DIR names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts.nemo_rl import cases, sources

from megatron_rc.integrations import nemo_rl
from megatron_rc.integrations.nemo_rl import driver
from megatron_rc.integrations.nemo_rl.session import prepare
from megatron_rc.integrations.symbols import inspect_symbols

GOLDEN = json.loads((sources.HERE / "golden.json").read_text())
real = pytest.mark.skipif(not sources.ROOT.is_dir(), reason="NEMO_RL_DIR names no source tree of NeMo-RL")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with sources.fresh():
        yield


def weighted(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """What the workers are given to train on."""
    given: list[dict[str, Any]] = []

    def train(data: dict[str, Any], loss_fn: Any) -> dict[str, Any]:
        given.append(dict(data))
        return {"all_mb_metrics": {}}

    loss_fn = SimpleNamespace(use_importance_sampling_correction=False)
    driver.corrected_train(train, prepare(cases.correction(name), None), None, data, loss_fn)
    return given[0]


@pytest.mark.parametrize("name", cases.CASES)
def test_loss_and_gradient_are_those_of_the_correction_of_nemo_rl(name: str) -> None:
    data, current = cases.rollout()
    loss, gradient = cases.plain_loss(name, weighted(name, data), current)
    theirs = GOLDEN["losses"][name]
    assert loss == pytest.approx(theirs["loss"], rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(theirs["gradient"]).double(), rtol=1e-5, atol=1e-8)


@real
@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_of_the_tree_are_equal_with_its_correction_and_with_ours(name: str, seed: int) -> None:
    data, current = cases.rollout(seed)
    module = sources.loss_module()
    loss, gradient = sources.loss_of(module, name, data, current, corrects=True)
    ours = sources.loss_of(module, name, weighted(name, data), current, corrects=False)
    assert ours[0] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    torch.testing.assert_close(ours[1], gradient, rtol=1e-5, atol=1e-8)
    if seed == 0:
        assert loss == pytest.approx(GOLDEN["losses"][name]["loss"], rel=1e-6)


@real
def test_the_tree_has_every_symbol_as_it_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(sources.ROOT))
    assert [inspected.problem for inspected in inspect_symbols(nemo_rl.HOST)] == [None] * len(nemo_rl.SYMBOLS)
    assert nemo_rl.HOST.knows(nemo_rl.HOST.read_version())
    # the worker replaces a name that this module imports by value
    text = (sources.ROOT / "nemo_rl/models/megatron/setup.py").read_text()
    assert "import setup_optimizer\n" in text and "optimizer, scheduler = setup_optimizer(" in text
