"""What tis does with the current log-probs and advantages that some versions of its hosts hand over."""

import math
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts.slime.host import PATH, Rollout, arguments, clipped, given_to_tis, micro_batch, rollout
from hosts.slime.single import alone, loss_of
from torch import Tensor

from megatron_rc import RolloutCorrection
from megatron_rc.integrations import slime
from megatron_rc.integrations.slime.settings import FAMILY, SLIME, hands_over_both

TIS = {"use_tis": True, "custom_tis_function_path": PATH + "tis"}
CALLER = "def policy_loss_function(args, batch, logits, sum_of_sample_mean):\n    "
BOTH = CALLER + 'tis_kwargs = {"args": args, "current_log_probs": log_probs, "advantages": batch["advantages"]}\n'
LATER = CALLER + 'tis_kwargs = {"advantages": 1}\n    if args:\n        tis_kwargs["current_log_probs"] = log_probs\n'
ONE = f"""{CALLER}tis_kwargs = {{"args": args, "current_log_probs": log_probs}}
    other = {{"advantages": log_probs}}
    other["advantages"] = torch.cat(batch["advantages"])
    loss(advantages=tis_kwargs["advantages"])
tis_kwargs = {{"advantages": 1}}
"""
TWO_POLICIES = RolloutCorrection.preset("off-policy-sequence-mask").to_dict()
NEGATIVE = {"weight": {"upper": 1.2}, "reject": [{"statistic": "k3", "upper": 0.001, "when": "negative_advantage"}]}


def installed(folder: Path, module: str, source: str) -> None:
    """A host with this module, which calls the TIS function."""
    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    for package in file.relative_to(folder).parents[:-1]:
        (folder / package / "__init__.py").touch()
    file.write_text(source)
    hands_over_both.cache_clear()


@pytest.fixture(autouse=True)
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    alone(monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    hands_over_both.cache_clear()
    yield tmp_path
    hands_over_both.cache_clear()


def case() -> tuple[Rollout, dict[str, Any]]:
    """Two responses that the gate on k3 or current / mu refuses, one with a negative advantage."""
    whole = rollout(26)
    signs = (1.0, -1.0, -0.5, 1.0)
    advantages = [torch.full((n,), sign) for n, sign in zip(whole.responses, signs, strict=True)]
    return whole, {**micro_batch(whole), "advantages": advantages}


def by_tis(whole: Rollout, batch: dict[str, Any], args: Namespace, joined: bool) -> tuple[float, Tensor, Tensor]:
    """Loss and gradient of the host's own loss with tis, and the shares of tokens that it drops."""
    logits = batch["logits"].clone().requires_grad_()
    current = whole.current(logits)
    old = torch.cat(batch["rollout_log_probs" if args.use_rollout_logprobs else "log_probs"])
    ratio, advantages = (current - old).exp(), torch.cat(batch["advantages"])
    more: dict[str, Any] = {"current_log_probs": current, "advantages": advantages}
    if not joined:
        more = {"current_log_probs": current.split(whole.responses), "advantages": batch["advantages"]}
    # of another policy: nothing may read them where current / mu is judged
    more["train_log_probs"] = [each + int(args.use_rollout_logprobs) for each in batch["log_probs"]]
    loss, masks, metrics = slime.tis(args, pg_loss=clipped(ratio, advantages), **{**given_to_tis(batch), **more})
    assert masks is batch["loss_masks"]
    total = whole.sum_of_sample_mean()(loss)
    return total.item(), torch.autograd.grad(total, logits)[0], metrics["rc/masked_token"]


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(("correction", "old_is_mu"), [(TWO_POLICIES, True), (NEGATIVE, False)])
def test_tis_equals_the_hook_loss(correction: dict[str, Any], old_is_mu: bool, joined: bool, tree: Path) -> None:
    installed(tree, SLIME.tis_caller, BOTH)
    whole, batch = case()
    if old_is_mu:
        # every response looks less likely to pi than to mu
        batch["rollout_log_probs"] = [each + 0.8 for each in batch["rollout_log_probs"]]
    settings = {"use_rollout_logprobs": old_is_mu, "megatron_rc": {"correction": correction}}
    loss, _, gradient = loss_of(whole, arguments(**settings), **batch)
    found, found_gradient, dropped = by_tis(whole, batch, arguments(**settings, **TIS), joined)
    assert found == pytest.approx(loss, rel=1.3e-6)
    torch.testing.assert_close(found_gradient, gradient)
    positive = torch.cat(batch["advantages"]) > 0
    assert dropped[~positive].any() and not dropped[positive].any()


def test_a_host_that_does_not_hand_over_what_its_source_names_is_one_sentence(tree: Path) -> None:
    installed(tree, SLIME.tis_caller, BOTH)
    whole, batch = case()
    for correction, name in ((TWO_POLICIES, "current_log_probs"), (NEGATIVE, "advantages")):
        args = arguments(use_rollout_logprobs=correction is TWO_POLICIES, megatron_rc={"correction": correction}, **TIS)
        losses = torch.ones(sum(whole.responses))
        with pytest.raises(ValueError, match=f"^{name} must be in every sample.*--custom-loss-function-path"):
            slime.tis(args, pg_loss=losses, **given_to_tis(batch))


def test_a_corrupt_rollout_logprob_of_the_hosts_own_ratio_is_a_nan_in_slimes_loss(tree: Path) -> None:
    installed(tree, SLIME.tis_caller, BOTH)
    whole, batch = case()
    batch["rollout_log_probs"][0] = batch["rollout_log_probs"][0].clone()
    batch["rollout_log_probs"][0][0] = math.nan
    args = arguments(use_rollout_logprobs=True, megatron_rc={"correction": TWO_POLICIES}, **TIS)
    assert math.isnan(by_tis(whole, batch, args, joined=True)[0])


REFUSED = [
    ({"old": "rollout", "weight": {}}, {"use_rollout_logprobs": True}, "weight must be None.*count it twice"),
    (TWO_POLICIES, {}, "old must be 'recompute' for tis, or 'rollout' with --use-rollout-logprobs"),
    ({"old": "current"}, {"use_rollout_logprobs": True}, "old must be 'recompute' for tis.*got 'current'"),
    ({"weight": {}}, {"use_rollout_logprobs": True}, "--use-tis multiplies it again"),
]


@pytest.mark.parametrize(("correction", "changes", "sentence"), REFUSED)
def test_what_tis_cannot_do_is_refused_too(correction: Any, changes: dict[str, Any], sentence: str, tree: Path) -> None:
    installed(tree, SLIME.tis_caller, BOTH)
    with pytest.raises(ValueError, match=sentence):
        slime.check(arguments(megatron_rc={"correction": correction}, **changes, **TIS))


@pytest.mark.parametrize(
    ("sources", "passes"),
    [([BOTH], True), ([ONE], False), ([], False), ([BOTH, ONE], False), ([BOTH, LATER], True), (["pass\n"], False)],
)
def test_settings_pass_where_every_host_found_hands_both_over(sources: list[str], passes: bool, tree: Path) -> None:
    for member, source in zip(FAMILY, sources, strict=False):
        installed(tree, member.tis_caller, source)
    hands_over_both.cache_clear()
    two_policies = arguments(use_rollout_logprobs=True, megatron_rc={"correction": TWO_POLICIES}, **TIS)
    for args in (two_policies, arguments(megatron_rc={"correction": NEGATIVE}, **TIS)):
        if passes:
            slime.check(args)
        else:
            with pytest.raises(ValueError, match="--custom-loss-function-path"):
                slime.check(args)
