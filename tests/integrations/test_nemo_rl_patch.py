"""The patch of nemo-rl on a stand-in: what it replaces and refuses, the data of an update, metrics, learning rates."""

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts.nemo_rl import cases, sources
from hosts.nemo_rl.sources import fresh as fresh
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rc import Rejection, RolloutCorrection, Weight, patch
from megatron_rc.integrations.nemo_rl import session as sessions
from megatron_rc.integrations.run_script import patch_settings, run_script
from megatron_rc.learning_rate.length_decay import LengthDecayLR, LengthDecaySettings
from megatron_rc.learning_rate.mismatch import MismatchSettings

TIS = RolloutCorrection.preset("token-tis")
DECAY = LengthDecaySettings(decay_period=1)


@pytest.fixture(autouse=True)
def stub(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(sources.STUB)


def module(name: str) -> Any:
    return importlib.import_module(f"nemo_rl.{name}")


def scheduler() -> OptimizerParamScheduler:
    """Megatron's own, with a constant learning rate; the next stand-in of a worker gets it."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    made = OptimizerParamScheduler(optimizer, 0.0, 1e-3, 0.0, 0, 100, "constant", 0.0, 0.0, 100, "constant")
    module("models.megatron.setup").SCHEDULERS.append(made)
    return made


def config(**changes: Any) -> Any:
    """A MasterConfig: pydantic models and dictionaries, as the host has them."""
    loss = {"use_importance_sampling_correction": False, "truncated_importance_sampling_type": None}
    loss |= {"force_on_policy_ratio": False, "sequence_level_importance_ratios": False}
    policy = {"megatron_cfg": {"enabled": True}, "generation": {"vllm_cfg": {"precision": "bfloat16"}}}
    return SimpleNamespace(
        policy=policy | changes.get("policy", {}),
        data_plane=changes.get("data_plane"),
        loss_fn=SimpleNamespace(**loss | changes.get("loss_fn", {})),
        grpo=SimpleNamespace(async_grpo=SimpleNamespace(enabled=changes.get("asynchronous", False))),
    )


def loss_fn(corrects: bool = False) -> Any:
    return SimpleNamespace(use_importance_sampling_correction=corrects)


@contextmanager
def policy_of(correction: RolloutCorrection | None, rule: Any = None, settings: Any = None) -> Iterator[Any]:
    """The policy that GRPO's setup builds in a patched process."""
    with patch("nemo-rl", correction=correction, lr_rule=rule):
        yield module("algorithms.grpo").setup(settings or config(), None, None, None, policy_factory=None)


@pytest.mark.host("nemo-rl", proof="stand-in", feature="everything is given back")
def test_only_setup_is_replaced_and_it_is_given_back() -> None:
    with patch("nemo-rl", correction=TIS) as patched:
        assert "once this process imports them: nemo_rl.algorithms.grpo.setup" in patched.report()
        replaced, _, others = patched.report().partition("their code is not that of")
        assert "Policy" not in replaced, "what ours extend is not replaced"
        assert "lm_policy.Policy.train" in others, "a stand-in is no state of the host that was tested"
        grpo = module("algorithms.grpo")
        during = grpo.setup
        report = patched.report()
        assert report.startswith("nemo-rl 0.6.0, patched") and "  nemo_rl.algorithms.grpo.setup: refuses" in report
        policy = during(config(), None, None, None)
        assert isinstance(policy, grpo.Policy) and type(policy) is not grpo.Policy
    assert grpo.setup is not during and type(grpo.setup(config(), None, None, None)) is grpo.Policy
    assert patched.report().startswith("nemo-rl 0.6.0, restored")


def test_the_script_is_corrected_and_says_so(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "its_config", SimpleNamespace(config=config))
    script = tmp_path / "run_grpo.py"
    script.write_text(
        "import sys\nfrom nemo_rl.algorithms.grpo import setup\nfrom its_config import config\n"
        "policy = setup(config(), None, None, None, policy_factory=None)\n"
        "print(type(policy).__name__, sys.argv[1:])\n"
    )
    run_script(script, ["--config", "x.yaml"], patch_settings(preset="none"), host="nemo-rl")
    out = capsys.readouterr().out
    assert out.startswith("nemo-rl 0.6.0, patched") and "differs from the host on purpose" in out
    assert "megatron_rc is on in this run of NeMo-RL: RolloutCorrection(weight=None" in out
    assert out.endswith("CorrectedPolicy ['--config', 'x.yaml']\n")


def test_a_script_that_never_comes_to_grpo_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    with patch("nemo-rl", correction=TIS):
        pass
    assert "nothing was corrected" in caplog.text
    caplog.clear()
    with policy_of(TIS):
        pass
    assert caplog.text == ""


def test_another_signature_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in sources.STUB.rglob("*.py"):
        copy = tmp_path / file.relative_to(sources.STUB)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text().replace("timer=None, check_dim_skip_keys=None", "clock=None"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"lm_policy.Policy.train takes \(self, data, loss_fn, .*clock=None\)"):
        patch("nemo-rl", correction=TIS)


GSPO = {"loss_fn": {"sequence_level_importance_ratios": True}}
ON_POLICY = {"loss_fn": {"force_on_policy_ratio": True}}
CORRECTS = {"loss_fn": {"use_importance_sampling_correction": True}}
RAW = {"policy": {"generation": {"temperature": 0.7, "vllm_cfg": {"logprobs_mode": "raw_logprobs"}}}}
TYPED = {"loss_fn": {"truncated_importance_sampling_type": "tis"}}


@pytest.mark.parametrize(
    ("correction", "rule", "changes", "sentence"),
    [
        (TIS, None, {"data_plane": {"enabled": True}}, "set data_plane.enabled=false"),
        (None, DECAY, {"data_plane": {"enabled": True}}, "set data_plane.enabled=false"),
        (TIS, None, ON_POLICY, "set loss_fn.force_on_policy_ratio=false"),
        (TIS, None, TYPED, "sampling_type=tis counts pi / mu a second time"),
        (TIS, None, {"policy": {"generation": {"temperature": 0.0}}}, "a greedy sampler .* set policy.generation.temp"),
        (TIS, None, RAW, "raw_logprobs returns log-probs before the"),
        (TIS, None, {"loss_fn": {"score_centering": True}}, "loss_fn.score_centering must be false"),
        (TIS, None, CORRECTS, "_correction counts pi / mu a second time; set"),
        (TIS, None, GSPO, "weight.level must be 'geometric' .* got 'token'"),
        (TIS, DECAY, {"policy": {"megatron_cfg": {"enabled": False}}}, "policy.megatron_cfg.enabled must be true"),
        (TIS, DECAY, {"policy": {"quant_cfg": "x.yaml"}}, "policy.quant_cfg must be null"),
    ],
)
def test_a_configuration_that_cannot_be_honoured_is_refused_by_name(
    correction: Any, rule: Any, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence), policy_of(correction, rule, config(**changes)):
        pass


@pytest.mark.parametrize(
    ("correction", "changes"),
    [
        (None, ON_POLICY),
        (TIS, {"policy": {"generation": {"temperature": 1.0, "vllm_cfg": {"logprobs_mode": "raw_logprobs"}}}}),
        (RolloutCorrection(weight=Weight(level="geometric")), GSPO),
        (RolloutCorrection(reject=(Rejection(upper=2.0),)), GSPO),
        (TIS, {"policy": {"megatron_cfg": {"enabled": False}, "quant_cfg": "x.yaml"}}),
    ],
)
def test_what_a_run_does_not_need_is_not_refused(correction: Any, changes: dict[str, Any]) -> None:
    rule = DECAY if correction is None else None
    scheduler()
    with policy_of(correction, rule, config(**changes)) as policy:
        assert policy.megatron_rc.used


@pytest.mark.host("nemo-rl", proof="refused", feature="two policies (`old: rollout`)")
@pytest.mark.host("nemo-rl", proof="refused", feature="bounds by lag")
@pytest.mark.parametrize(
    ("correction", "rule", "sentence"),
    [
        (RolloutCorrection(old="rollout"), None, "old must be 'recompute' .* got 'rollout'"),
        (RolloutCorrection(old="current"), None, "old must be 'recompute' .* got 'current'"),
        (RolloutCorrection(weight=Weight(upper="measured")), None, "upper must be a number"),
        (RolloutCorrection(weight=Weight(growth="sqrt_lag")), None, "host 'nemo-rl'"),
        (RolloutCorrection(reject=(Rejection("mine", upper=1.0),)), None, "statistic 'mine' is not known"),
        (None, LengthDecayLR(1e-3), "lr_rule must be settings, .* which go to other processes"),
    ],
)
def test_settings_that_no_run_can_honour_are_refused_by_patch(correction: Any, rule: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        patch("nemo-rl", correction=correction, lr_rule=rule)


def test_other_trainers_and_factories_are_refused() -> None:
    with patch("nemo-rl", correction=TIS):
        with pytest.raises(ValueError, match=r"not in nemo_rl.algorithms.ppo: drop"):
            module("algorithms.ppo").setup(config(), None, None, None)
        with pytest.raises(ValueError, match=r"not in nemo_rl.algorithms.single_controller_utils.setup"):
            module("algorithms.single_controller_utils").setup_single_controller(config(), None)
        with pytest.raises(ValueError, match="policy_factory must be None"):
            module("algorithms.grpo").setup(config(), None, None, None, policy_factory=dict)


def test_workers_get_weighted_advantages_and_the_driver_keeps_its_own() -> None:
    data, _ = cases.rollout()
    own = dict(data)
    with policy_of(TIS) as policy:
        results = policy.train(data, loss_fn(), timer="timer")
    (seen,) = policy.seen
    assert seen["timer"] == "timer" and not seen["eval_mode"]
    assert data == own and all(data[name] is own[name] for name in own)
    mask = (own["token_mask"] * own["sample_mask"][:, None]) > 0
    weights = (own["prev_logprobs"] - own["generation_logprobs"]).exp().clamp(max=2)
    expected = torch.where(mask, own["advantages"] * weights, own["advantages"])
    torch.testing.assert_close(seen["data"]["advantages"], expected)
    assert all(seen["data"][name] is own[name] for name in own if name != "advantages")
    metrics = results["all_mb_metrics"]
    assert metrics["loss"] == [0.25, 0.5], "the host's own metrics stay"
    log_ratio = (own["prev_logprobs"] - own["generation_logprobs"])[mask].double()
    # the host sums the list of each metric
    assert sum(metrics["rc/k3"]) == pytest.approx((log_ratio.expm1() - log_ratio).mean().item())
    assert sum(metrics["rc/ess_token_final"]) < 1 and all(len(metrics[name]) == 1 for name in metrics if "rc/" in name)


@pytest.mark.host("nemo-rl", proof="stand-in", feature="turns as units (`level: segment`)")
def test_turns_are_the_runs_of_the_token_mask() -> None:
    data, _ = cases.rollout()
    with policy_of(RolloutCorrection(Weight("segment", "truncate", upper=1.05))) as policy:
        policy.train(data, loss_fn())
    log_ratio = data["prev_logprobs"] - data["generation_logprobs"]
    ends = int(data["token_mask"][0].nonzero().max()) + 1
    for turn in (slice(2, 4), slice(6, ends)):  # tool output is between them
        weight = log_ratio[0, turn].mean().exp().clamp(max=1.05)
        torch.testing.assert_close(policy.seen[0]["data"]["advantages"][0, turn], data["advantages"][0, turn] * weight)


def test_an_update_that_fails_leaves_the_data_as_they_were() -> None:
    data, _ = cases.rollout()
    advantages = data["advantages"]
    failing = {**data, "fails": True}
    with policy_of(TIS) as policy, pytest.raises(RuntimeError, match="a worker died"):
        policy.train(failing, loss_fn())
    assert failing["advantages"] is advantages


@pytest.mark.host("nemo-rl", proof="stand-in", feature="correction none leaves the loss bit-identical")
def test_with_correction_none_advantages_are_the_hosts_bit_for_bit() -> None:
    data, _ = cases.rollout()
    with policy_of(RolloutCorrection()) as policy:
        policy.train(data, loss_fn())
    assert torch.equal(policy.seen[0]["data"]["advantages"], data["advantages"])


@pytest.mark.host("nemo-rl", proof="stand-in", feature="corrupt log-probs leave the gradient finite")
@pytest.mark.parametrize("where", ["prev_logprobs", "generation_logprobs"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_corrupt_token_gets_weight_0_and_finite_logprobs(where: str, value: float) -> None:
    data, current = cases.rollout(rows=40)
    other = ({"prev_logprobs", "generation_logprobs"} - {where}).pop()
    data[where][3, 3] = value
    assert data["token_mask"][3, 3] == 1
    with policy_of(TIS) as policy:
        metrics = policy.train(data, loss_fn())["all_mb_metrics"]
    given = policy.seen[0]["data"]
    assert given["advantages"][3, 3] == 0 and given[where][3, 3] == given[other][3, 3] == data[other][3, 3]
    assert metrics["rc/nonfinite_share"][0] > 0 and not data[where][3, 3].isfinite()
    loss, gradient = cases.plain_loss("tis", given, current)
    assert math.isfinite(loss) and gradient.isfinite().all()


def test_more_corrupt_tokens_stop_the_run_before_the_update() -> None:
    data, _ = cases.rollout()
    data["generation_logprobs"][:, 3] = math.nan
    with policy_of(TIS) as policy, pytest.raises(ValueError, match="nonfinite_share must be <= 0.01"):
        policy.train(data, loss_fn())
    assert policy.seen == []


def test_the_weight_of_the_host_leaves_the_loss_where_the_host_demands_it() -> None:
    for demands in ({"asynchronous": True}, {"policy": {"generation": {"vllm_cfg": {"precision": "fp8"}}}}):
        function = loss_fn(corrects=True)
        with policy_of(TIS, settings=config(**CORRECTS, **demands)) as policy:
            policy.train(cases.rollout()[0], function)
        assert policy.seen[0]["loss_fn"].use_importance_sampling_correction is False
        assert function.use_importance_sampling_correction is True, "the host's own object stays"


def test_an_evaluation_is_left_alone_and_data_of_another_loss_are_refused() -> None:
    data, _ = cases.rollout()
    with policy_of(TIS) as policy:
        policy.train(data, loss_fn(), eval_mode=True)
        assert policy.seen[0]["data"]["advantages"] is data["advantages"] and policy.seen[0]["eval_mode"]
        del data["advantages"]
        with pytest.raises(ValueError, match=r"the data of Policy.train must have advantages"):
            policy.train(data, loss_fn())


@pytest.mark.host("nemo-rl", proof="stand-in", feature="length decay: resume")
def test_the_decay_steps_before_the_update_and_resumes_from_the_schedulers_own_state() -> None:
    data, _ = cases.rollout()

    def rates(policy: Any, count: int) -> list[float]:
        return [policy.train(data, loss_fn())["all_mb_metrics"]["lr"][0] for _ in range(count)]

    rule = LengthDecaySettings(decay_period=2)
    scheduler()
    with policy_of(None, rule) as policy:
        assert policy.python == "uv mcore", "our worker runs in the Python of the host's"
        whole = rates(policy, 6)
    first = scheduler()
    with policy_of(None, rule) as policy:
        begun = rates(policy, 3)
        saved = first.state_dict()
    second = scheduler()
    with policy_of(None, rule) as policy:
        second.load_state_dict(saved)
        assert begun + rates(policy, 3) == whole
    assert whole == pytest.approx([1e-3, 0.5e-3, 0.5e-3, 0.25e-3, 0.25e-3, 0.125e-3])
    plain = scheduler()
    plain.load_state_dict(saved)
    plain.step(0)
    assert plain.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3), "the checkpoint loads without the patch"
    assert sessions.WORKER not in module("distributed.ray_actor_environment_registry").ACTOR_ENVIRONMENT_REGISTRY


def test_the_rule_reads_lengths_and_mismatch_of_the_whole_rollout() -> None:
    data, _ = cases.rollout()
    scheduler()
    with policy_of(TIS, MismatchSettings(signal="k3", target=1e-3)) as policy:
        metrics = policy.train(data, loss_fn())["all_mb_metrics"]
    assert metrics["lr_rule/signal"] == metrics["rc/k3"] and metrics["lr_rule/scale"][0] < 1
    assert metrics["lr"] == [pytest.approx(1e-3 * metrics["lr_rule/scale"][0])]
    scheduler()
    data["sample_mask"][0] = 0
    with policy_of(None, MismatchSettings(signal="length", target=1.0)) as policy:
        metrics = policy.train(data, loss_fn())["all_mb_metrics"]
    assert metrics["lr_rule/signal"] == [pytest.approx(data["token_mask"][:, 1:].sum().item() / 6)]


def test_a_host_that_builds_its_optimizer_elsewhere_is_refused_by_its_worker() -> None:
    scheduler()
    del module("models.megatron.setup").setup_optimizer
    with pytest.raises(ValueError, match=r"setup_optimizer is missing"), policy_of(None, DECAY):
        pass
