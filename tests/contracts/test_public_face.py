"""The public names: lazy, light, and with the signatures that the README and the hosts are written against."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import megatron_rc

ROOT = Path(__file__).parents[2]
HEAVY = ("megatron", "transformers", "triton", "pydantic", "yaml", "rich", "typer", "pyarrow")

# every call as it is documented; only names, kinds and defaults are compared
SIGNATURES = """
def correct(train_logprobs, rollout_logprobs, loss_mask, *, correction, cu_seqlens=None, segment_ids=None,
            num_segments=None, advantages=None, extras=Extras(), dp_group=None, cp_group=None, backend="auto"): ...
def vocab_parallel_logprobs(logits, targets, *, tp_group=None, temperature=1.0, mask=None, vocab_size=None,
                            support=None, with_entropy=False, inplace_backward=False, backend="auto"): ...
def loss_scale(loss_mask, kept_mask, *, aggregation="token-mean", denominator="original", cu_seqlens=None,
               dp_group=None, cp_group=None, max_length=None): ...
def policy_loss(current_logprobs, old_logprobs, advantages, corrected, *, scale, reference_logprobs=None, entropy=None,
                options=LossOptions(), backend="auto"): ...
def linear_logprobs(hidden, weight, targets, *, head=HeadInputs(), with_entropy=False, backend="auto"): ...
def linear_policy_loss(hidden, weight, targets, old_logprobs, advantages, corrected, *, scale, reference_logprobs=None,
                       options=LossOptions(), head=HeadInputs(), with_entropy=False, backend="auto", upstream=None): ...
def LossOptions(*, surrogate="ppo", clip_lower=0.2, clip_upper=0.28, dual_clip=None, kl_coef=0.0, kl_estimator="k3",
                entropy_coef=0.0): ...
def HeadInputs(*, tp_group=None, sequence_parallel=False, temperature=1.0, mask=None, support=None, vocab_size=None,
               rows=None, chunk=None, logits_dtype=None): ...
def RolloutCorrection(weight=None, reject=(), normalize="none", old="recompute", log_ratio_bound=20.0, max_k3=None,
                      surrogate=None): ...
def Weight(level="token", mode="truncate", lower=None, upper=2.0, growth="none", upper_by_lag=(),
           staleness_upper=None, confidence_floor=None): ...
def Rejection(statistic="ratio", level="sequence", reduce="sum", lower=None, upper=None, when="always"): ...
"""
DOCUMENTED: dict[str, Callable[..., Any]] = {}
exec(SIGNATURES, {name: getattr(megatron_rc, name) for name in ("Extras", "HeadInputs", "LossOptions")}, DOCUMENTED)


def loaded_after(statements: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after ``statements``."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{statements}\nprint(*sys.modules, sep='\\n')"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def parameters(call: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(call).parameters.values()]


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_after("import megatron_rc") & {*HEAVY, "torch", "numpy"}


def test_every_public_name_needs_torch_alone() -> None:
    loaded = loaded_after("import megatron_rc\nfor name in megatron_rc.__all__: getattr(megatron_rc, name)")
    assert "torch" in loaded
    # what torch itself loads is no burden of ours
    assert not (loaded - loaded_after("import torch, torch.distributed")) & set(HEAVY)


@pytest.mark.parametrize("name", megatron_rc.__all__)
def test_every_public_name_resolves_to_the_object_of_that_name(name: str) -> None:
    assert getattr(megatron_rc, name).__name__ == name
    assert getattr(megatron_rc, name).__doc__
    assert name in dir(megatron_rc)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'corect'"):
        _ = megatron_rc.corect


@pytest.mark.parametrize("name", DOCUMENTED)
def test_signatures_are_the_documented_ones(name: str) -> None:
    found = getattr(megatron_rc, name)
    assert parameters(found) == parameters(DOCUMENTED[name])
    assert inspect.isfunction(found) or found.__dataclass_params__.frozen


def test_help_tells_the_fields_of_the_result_and_names_no_table_that_is_not_public() -> None:
    corrected, preset = megatron_rc.Corrected, megatron_rc.RolloutCorrection.preset
    assert all(f"{field.name}: " in str(corrected.__doc__) for field in fields(corrected))
    assert list(inspect.get_annotations(megatron_rc.PolicyLoss)) == ["loss", "metrics"]
    texts = (str(found.__doc__) for found in (preset, *(getattr(megatron_rc, name) for name in megatron_rc.__all__)))
    assert re.findall(r"(?<!`)`[A-Z_]{3,}`", "".join(texts)) == []
