"""The public names, lazy and light with the signatures that are documented, and the examples, which learn."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jobs import script_environment

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
                centering=None, options=LossOptions(), backend="auto"): ...
def linear_logprobs(hidden, weight, targets, *, head=HeadInputs(), with_entropy=False, backend="auto"): ...
def centered_logprobs(logits, targets, top, correction, *, tp_group=None, temperature=1.0, mask=None, vocab_size=None,
                      support=None, with_entropy=False, inplace_backward=False, backend="auto"): ...
def linear_centered_logprobs(hidden, weight, targets, top, correction, *, head=HeadInputs(), with_entropy=False,
                             backend="auto"): ...
def linear_policy_loss(hidden, weight, targets, old_logprobs, advantages, corrected, *, scale, reference_logprobs=None,
                       options=LossOptions(), head=HeadInputs(), with_entropy=False, top=None, backend="auto",
                       upstream=None): ...
def LossOptions(*, surrogate="ppo", clip_lower=0.2, clip_upper=0.28, dual_clip=None, kl_coef=0.0, kl_estimator="k3",
                entropy_coef=0.0): ...
def HeadInputs(*, tp_group=None, sequence_parallel=False, temperature=1.0, mask=None, support=None, vocab_size=None,
               rows=None, chunk=None, logits_dtype=None): ...
def RolloutCorrection(weight=None, reject=(), normalize="none", old="recompute", centering="none", log_ratio_bound=20.0,
                      max_k3=None, surrogate=None): ...
def Weight(level="token", mode="truncate", lower=None, upper=2.0, growth="none", upper_by_lag=(),
           staleness_upper=None, confidence_floor=None): ...
def Rejection(statistic="ratio", level="sequence", reduce="sum", lower=None, upper=None, when="always"): ...
"""
DOCUMENTED: dict[str, Callable[..., Any]] = {}
exec(SIGNATURES, {name: getattr(megatron_rc, name) for name in ("Extras", "HeadInputs", "LossOptions")}, DOCUMENTED)
# the loop that exists learns little from its old rollouts, one batch teaches nothing, the others have a test each
APART = ("existing_loop", "correct_a_batch", "patch_existing_loop", "replay_routes", "rollout_correction")
LEARNING = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem not in APART)


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


@cache
def printed(example: Path) -> str:
    """What an example prints; each is run once."""
    command = [sys.executable, str(example)]
    done = subprocess.run(command, env=script_environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", LEARNING, ids=lambda path: path.name)
def test_an_example_learns(example: Path):
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", printed(example))]
    assert rewards[-1] > rewards[0] + 0.2


def test_a_loop_that_exists_learns_twice_as_much_by_one_line_and_is_left_alone_when_only_measured():
    alone = printed(ROOT / "examples/existing_loop.py").splitlines()
    before, after = printed(ROOT / "examples/patch_existing_loop.py").split("after: ")
    # measuring changes no loss, learning rate or reward
    assert [line for line in before.splitlines() if line.startswith("step")] == alone
    rates = {int(step): rate for step, rate in re.findall(r"step (\d+): .*LR ([\d.e-]+)", after)}
    assert [rates[step] for step in (1, 50, 60, 80)] == ["1.0e-02", "1.0e-02", "5.0e-03", "5.0e-03"]
    last = [float(re.findall(r"step 80: reward ([\d.]+)", part)[0]) for part in (before, after)]
    assert last[1] > 2 * last[0] and last[1] > 0.6
    numbers = r"k3 ([\d.]+), ESS of pi/mu ([\d.]+); the loss had ESS ([\d.]+) with weights up to ([\d.]+)"
    (measured,), (acted,) = re.findall(numbers, before), re.findall(numbers, after)
    # weights of 1 are no sign of a small gap
    assert measured[2:] == ("1.0000", "1.000") and float(measured[0]) > 1e-4 and float(measured[1]) < 0.9
    assert float(acted[2]) < 1 < float(acted[3]) <= 2
    assert "existing-loop, restored" in after


def test_replayed_routes_close_a_part_of_the_gap_in_a_plain_loop_that_learns():
    said = printed(ROOT / "examples/replay_routes.py")
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", said)]
    assert rewards[-1] > rewards[0] + 0.2
    pattern = r"k3 without replay ([\d.]+), as trained ([\d.]+)"
    own, replayed = (re.findall(pattern, part) for part in said.split("(R3)"))
    assert len(own) == len(replayed) == 6
    assert all(without == trained for without, trained in own)
    # the last line is the mean over all steps: a single batch may show either, by a few tokens
    assert float(replayed[-1][0]) > float(replayed[-1][1])


def test_the_code_of_the_readme_is_an_example_that_runs():
    example = ROOT / "examples/correct_a_batch.py"
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code == example.read_text().partition('"""\n\n')[2]
    assert re.fullmatch(r"k3 0\.00\d\d, ESS 0\.9\d\d\n", printed(example))
