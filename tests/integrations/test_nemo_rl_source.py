"""Loss and gradient against NeMo-RL's own corrections: recorded, or of the tree that NEMO_RL_DIR names."""

import ast
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hosts.cut_out import run_definitions
from hosts.nemo_rl import cases, sources
from hosts.nemo_rl.sources import fresh as fresh
from torch import Tensor

from megatron_rc.integrations import nemo_rl
from megatron_rc.integrations.nemo_rl import driver
from megatron_rc.integrations.nemo_rl.session import prepare
from megatron_rc.integrations.symbols import inspect_symbols

GRPO = sources.ROOT / "nemo_rl/algorithms/grpo.py"
GOLDEN = json.loads((sources.HERE / "golden.json").read_text())
real = pytest.mark.skipif(not sources.ROOT.is_dir(), reason="NEMO_RL_DIR names no source tree of NeMo-RL")


def weighted(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """What the workers are given to train on."""
    given: list[dict[str, Any]] = []

    def train(data: dict[str, Any], loss_fn: Any) -> dict[str, Any]:
        given.append(dict(data))
        return {"all_mb_metrics": {}}

    loss_fn = SimpleNamespace(use_importance_sampling_correction=False)
    driver.corrected_train(train, prepare(cases.correction(name), None), None, data, loss_fn)
    return given[0]


def corrected(power: int, reads: str = "advantages") -> int:
    """How often the host's Policy.train is called, of twice, for a loss of the advantages to this power."""
    train = Mock(side_effect=lambda *_: {"all_mb_metrics": {}})

    def loss(logprobs: Tensor, data: dict[str, Any], sequences: Tensor, tokens: Tensor) -> Any:
        losses = (0.1 - data[reads] ** power)[:, 1:] * logprobs
        return (losses * data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum() / tokens, {}

    loss.use_importance_sampling_correction = False  # type: ignore[attr-defined]

    session = prepare(cases.correction("tis"), None)
    for _ in range(2):
        driver.corrected_train(train, session, None, cases.rollout()[0], loss)
    return train.call_count


def test_a_loss_that_is_not_proportional_to_its_advantages_is_refused_before_the_first_update(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ValueError, match="function, is not proportional to its advantages, .* nothing was updated"):
        corrected(power=2)
    assert corrected(power=1) == 2 and not caplog.text
    assert corrected(power=1, reads="scores") == 2 and "could not be compared on a first batch" in caplog.text


@real
@pytest.mark.parametrize("name", cases.CASES)
def test_the_loss_of_the_tree_is_proportional_to_its_advantages(name: str) -> None:
    module = sources.loss_module()
    config = module.ClippedPGLossConfig(reference_policy_kl_penalty=cases.KL, **cases.CASES[name].plain)
    data, _ = cases.rollout()
    driver._compare(module.ClippedPGLossFn(config), data)


@pytest.mark.host("nemo-rl", proof="recorded", feature="loss and gradient of a correction")
@pytest.mark.parametrize("name", cases.CASES)
def test_loss_and_gradient_are_those_of_the_correction_of_nemo_rl(name: str) -> None:
    data, current = cases.rollout()
    loss, gradient = cases.plain_loss(name, *cases.as_recorded(weighted(name, data), current))
    theirs = GOLDEN["losses"][name]
    assert loss == pytest.approx(theirs["loss"], rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(theirs["gradient"]).double(), rtol=1e-5, atol=1e-8)


@pytest.mark.host("nemo-rl", proof="own code", feature="loss and gradient of a correction")
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
        loss, _ = sources.loss_of(module, name, *cases.as_recorded(data, current), corrects=True)
        assert loss == pytest.approx(GOLDEN["losses"][name]["loss"], rel=1e-6)


def _trainer(name: str) -> ast.FunctionDef:
    tree = ast.parse(GRPO.read_bytes())
    (node,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return node


def _train_data(fields: dict[str, Any]) -> dict[str, Any]:
    """The data of an update, built by the asynchronous trainer's own function."""

    class Messages(sources._Batch):
        def get_multimodal_dict(self, **_: Any) -> dict[str, Any]:
            return {}

    node = _trainer("_build_async_grpo_train_data")
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    module: dict[str, Any] = {name: Any for name in names} | {"BatchedDataDict": Messages}
    module |= {"_preserve_router_replay_routed_experts": lambda *_: None, "_policy_dtype": lambda _: torch.float32}
    run_definitions(GRPO, [node.name], module)
    mask, sampled = fields["token_mask"], fields["generation_logprobs"]
    flat = Messages(token_ids=torch.zeros_like(mask), generation_logprobs=sampled, token_loss_mask=mask)
    return dict(module["_build_async_grpo_train_data"](flat, None, {"loss_multiplier": fields["sample_mask"]}, {}))


@real
def test_the_asynchronous_trainer_trains_on_what_the_patch_corrects_with_its_demanded_weight_taken_off() -> None:
    for name in ("grpo_train", "async_grpo_train"):
        calls = [ast.unparse(node) for node in ast.walk(_trainer(name)) if isinstance(node, ast.Call)]
        (call,) = (call for call in calls if call.startswith("policy.train("))
        assert call.startswith("policy.train(train_data, loss_fn")
        text = ast.unparse(_trainer(name))
        assert "train_data['prev_logprobs'] = policy.get_logprobs(" in text and "train_data['advantages'] = " in text
    assert "assert master_config.loss_fn.use_importance_sampling_correction" in text
    data, current = cases.rollout()
    module = sources.loss_module()
    added = {name: data[name] for name in ("prev_logprobs", "reference_policy_logprobs", "advantages")}
    config = {"reference_policy_kl_penalty": cases.KL, "use_importance_sampling_correction": True}
    found = []

    def train(given: dict[str, Any], loss_fn: Any) -> dict[str, Any]:
        found.append(sources.loss_by(loss_fn, given, current))
        return {"all_mb_metrics": {}}

    demanded = module.ClippedPGLossFn(module.ClippedPGLossConfig(**config))
    session = prepare(cases.correction("tis"), None)
    results = driver.corrected_train(train, session, None, {**_train_data(data), **added}, demanded)
    loss, gradient = sources.loss_of(module, "tis", data, current, corrects=True)
    assert found[0][0] == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(found[0][1], gradient, rtol=1e-5, atol=1e-8)
    assert results["all_mb_metrics"]["rc/k3"][0] > 0 and demanded.use_importance_sampling_correction


@pytest.mark.host("nemo-rl", proof="own code", feature="symbols where they are expected")
@real
def test_the_tree_has_every_symbol_as_it_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(sources.ROOT))
    assert [inspected.problem for inspected in inspect_symbols(nemo_rl.HOST)] == [None] * len(nemo_rl.SYMBOLS)
    assert nemo_rl.HOST.knows(nemo_rl.HOST.read_version())
    # the worker replaces a name that this module imports by value
    text = (sources.ROOT / "nemo_rl/models/megatron/setup.py").read_text()
    assert "import setup_optimizer\n" in text and "optimizer, scheduler = setup_optimizer(" in text
