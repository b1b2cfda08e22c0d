"""The patches of docs/hosts/patches/: additions alone, and on their host's tree what their comments say."""

import re
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts.owner_trees import HOSTS, PATCHES, ROOT, outcomes, parses, same, steps

CORE = SimpleNamespace(**run_path(str(ROOT / "examples/rollout_correction.py")))
TOKEN_TIS, BOUNDED = CORE.Settings(), CORE.Settings(mode="mask", lower=0.5, upper=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(one).float(), torch.as_tensor(other).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("host", HOSTS)
def test_a_patch_adds_lines_without_context_and_says_what_it_is(host: str) -> None:
    text = (PATCHES / f"{host}.patch").read_text()
    comments, *files = re.split(r"^diff --git .*\n", text, flags=re.M)
    assert text.count("\n") <= 120 and "megatron_rc" not in text and files
    assert all(line.startswith("# ") for line in comments.splitlines())
    for word in (HOSTS[host][1], "Off by default", f"git apply --unidiff-zero {host}.patch"):
        assert word in comments
    for file in files:
        names, *hunks = re.split(r"^@@ -\d+,0 \+\d+(?:,(\d+))? @@\n", file, flags=re.M)
        assert re.fullmatch(r"--- a/(\S+)\n\+\+\+ b/\1\n", names) and hunks
        for number, lines in zip(hunks[::2], hunks[1::2], strict=True):
            assert re.fullmatch(r"(\+.*\n)+", lines) and lines.count("\n") == int(number or 1)
            code = re.sub(r"^\+", "", lines, flags=re.M)
            assert parses(code) or "(optional)" in code  # of a docstring


@pytest.mark.parametrize("host", HOSTS)
def test_without_its_settings_a_patch_changes_no_bit(host: str, folder: Path) -> None:
    own, patched = outcomes(host, folder)
    for case in ("aligned", "packed") if host == "megatron_lm" else ():  # two statistics more
        assert all(patched["off"][case][1].pop(f"{name}_inf_train") > 0 for name in ("k3", "ess"))
    assert same(own["off"], patched["off"]) and "on" not in own


def test_every_loss_of_verl_but_that_of_the_bypass_doubles_with_its_weights(folder: Path) -> None:
    losses = outcomes("verl", folder)[0]["off"]["weighed"]
    doubled = {name for name, (plain, ones, twos) in losses.items() if plain == ones and 2 * plain == twos}
    assert {*losses} - doubled == {"bypass_mode"} and len(doubled) >= 10


def test_v1_of_verl_has_the_loss_of_its_bypass_and_the_asynchronous_program_refuses_it(folder: Path) -> None:
    on = SimpleNamespace(**outcomes("verl", folder)[1]["on"])
    assert "drops loss_type, rollout_rs in this program" in on.program and "instead of gspo" in on.gspo
    given, advantages = (on.train, on.rollout, on.mask), on.advantages
    weights = CORE.correct(*given, TOKEN_TIS).weights
    close(on.reinforce[0], CORE.policy_gradient_loss(-advantages * on.train, weights, 33))
    close(on.reinforce[1], -advantages * weights / 33)
    ratio, kept = (on.train - on.rollout).exp(), CORE.correct(*given, BOUNDED).mask
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    close(on.rejected[0], CORE.policy_gradient_loss(clipped, kept.float(), 33))
    assert on.padding[0] == 0 and not on.padding[1].any() and on.padding[2] == on.rejected[2]


def test_a_hook_of_slime_gets_what_it_names(folder: Path) -> None:
    off, on = (SimpleNamespace(**outcomes("slime", folder)[1][name]) for name in ("off", "on"))
    assert "advantages" not in off.others and on.versions == ["none", [["1"], ["2", "3"], [], ["4"]]]
    assert on.shipped == [["2", "3"], ["1"]] and on.names.count("weight_versions") == 1  # sent, and no metric
    close(on.current, on.logits)
    weights = CORE.correct(on.current[None], on.rollout[None], on.masks[None], TOKEN_TIS).weights[0]
    sums = [part.sum() for part in (-weights * on.advantages * on.current).split(on.lengths)]
    close(on.loss, (torch.stack(sums) / on.denominators).sum())


def test_bounds_of_megatron_lm_drop_what_is_outside_or_missing(folder: Path) -> None:
    on = SimpleNamespace(**outcomes("megatron_lm", folder)[1]["on"])
    everything = torch.ones_like(on.mask)
    weights = CORE.correct(on.train, on.corrupt, everything, BOUNDED).weights
    assert 0 < (weights > 0).sum() < weights.numel() - 3
    close(on.bounded, weights * on.one)
    close(on.both, CORE.correct(on.train, on.rollout, everything, BOUNDED).weights.clamp(max=1.2) * on.one)
    missing = on.mask & (torch.arange(9) >= torch.tensor(on.short)[:, None])
    assert torch.equal(on.whole[0][0].isnan(), on.corrupt[0].isnan()) and missing.sum() == 11
    for number, (rollout, statistics) in enumerate((on.whole, on.aligned, on.packed)):
        expected = CORE.metrics(CORE.correct(on.train, rollout, on.mask, CORE.Settings(mode="none")).sums)
        close([statistics["k3_inf_train"], statistics["ess_inf_train"]], [expected["k3"], expected["ess_token"]])
        if number:
            assert torch.equal(rollout.isnan(), missing)
            close(statistics["mean_piold_to_inf_prob"], (on.train - rollout).exp()[on.mask & ~missing].mean())


def test_steps_of_megatron_lm_have_the_same_loss_packed_or_not(folder: Path) -> None:
    bounds, packed = {"rl_importance_sampling_bounds": [0.0, 1e9]}, {"rl_use_sequence_packing": True}
    off = {"off": {}, "off, packed": packed}
    own, patched = steps((off, {**off, "on": bounds, "on, packed": bounds | packed}), folder)
    assert all(own[name] == patched[name] for name in off)
    losses = {name: [step["log"]["lm loss"] for step in each["steps"]] for name, each in patched.items()}
    close(losses["on"], losses["on, packed"])
    close(patched["on"]["weights"], patched["on, packed"]["weights"])
    assert losses["off"][0] - losses["off, packed"][0] > 1e-4
