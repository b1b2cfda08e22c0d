"""The patched GRPO loss of megatron/rl against the host's own, and what differs by hand; stub and real sources."""

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts.megatron_lm import sources
from torch import Tensor

from megatron_rc import Rejection, RolloutCorrection, Weight, patch
from megatron_rc.integrations import hosts
from megatron_rc.integrations.megatron_lm import HOST
from megatron_rc.integrations.megatron_lm.loss import calculate_grpo_loss
from megatron_rc.integrations.megatron_lm.rollouts import RolloutRows, corrected_rows
from megatron_rc.integrations.megatron_lm.session import Session
from megatron_rc.integrations.symbols import inspect_symbols
from megatron_rc.learning_rate.length_decay import LengthDecaySettings

CLIP: dict[str, Any] = {"clamp_eps_lower": 0.2, "clamp_eps_upper": 0.3, "kl_beta": 0.1, "entropy_weight": 0.05}
GOLDEN = json.loads((Path(sources.__file__).parent / "golden.json").read_text())


@pytest.fixture(params=["stub", "source"])
def host(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of megatron-lm; the installed megatron-core next to them has another version."""
    folder = sources.STUB if request.param == "stub" else sources.cut_out(sources.tree(), tmp_path)
    monkeypatch.setitem(hosts.HOSTS, "megatron-lm", replace(HOST, read_version=lambda: "0.20.0"))
    with sources.imported(folder) as modules:
        yield modules


def names(host: SimpleNamespace) -> dict[str, Any]:
    return {f"{part}.{name}": value for part in vars(host) for name, value in vars(vars(host)[part]).items()}


@pytest.mark.host("megatron-lm", proof="own code", feature="symbols where they are expected")
def test_the_real_tree_has_the_signatures_and_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(sources.tree())
    assert [found.problem for found in inspect_symbols(HOST)] == [None] * len(HOST.symbols)
    assert HOST.read_version() == "0.20.0"


@pytest.mark.host("megatron-lm", proof="own code", feature="everything is given back")
@pytest.mark.host("megatron-lm", proof="stand-in", feature="everything is given back")
def test_every_name_is_replaced_and_restored_exactly(host: SimpleNamespace) -> None:
    before = names(host)
    with patch("megatron-lm", correction=RolloutCorrection(), head="linear"):
        changed = {name for name, value in names(host).items() if value is not before[name]}
    expected = {f"{symbol.module.rpartition('.')[2]}.{symbol.name}" for symbol in HOST.symbols}
    expected -= {"training.get_optimizer_param_scheduler"}  # no length decay was asked for
    imported = {"train_rl.calculate_grpo_loss", "train_rl.get_logprobs"}
    may_be = {"train_rl.load_packed_data_by_index", "rl_utils.load_packed_data_by_index"}
    assert expected | imported <= changed
    assert changed - expected - imported <= may_be | {"rl_utils.pack_inference_logprobs"}
    assert {name: id(value) for name, value in names(host).items()} == {name: id(v) for name, v in before.items()}


def test_a_length_decay_alone_leaves_the_loss_to_the_host(host: SimpleNamespace) -> None:
    before = names(host)
    with patch("megatron-lm", lr_rule=LengthDecaySettings()):
        changed = {name for name, value in names(host).items() if value is not before[name]}
    replaced = {"setup_model_and_optimizer", "get_optimizer_param_scheduler", "prepare_data_for_update"}
    assert {name.partition(".")[2] for name in changed} == replaced


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_hosts_own_loss_has_the_golden_values(host: SimpleNamespace, layout: str) -> None:
    current = torch.tensor([[-1.0, -0.5, -2.0, -3.0, -0.1, -1.5]])
    old = torch.tensor([[-1.2, -0.4, -2.0, -2.0, -0.3, -1.6]])
    reference = torch.tensor([[-1.1, -0.6, -1.0, -3.5, -0.2, -1.4]])
    rollout = torch.tensor([[-1.0, -1.4, -2.5, -2.2, -0.3, -1.0]])
    shape = (2, 3) if layout == "padded" else (1, 6)
    given = [one.view(shape) for one in (current, old, reference)]
    bins = {"seq_starts": [0, 4, 6], "seq_lengths": [4, 3]} if layout == "packed" else {}
    options = {**CLIP, "inference_logprobs": rollout.view(shape), "is_truncation_coef": 1.5, **bins}
    found = host.rl_utils.calculate_grpo_loss(*given, torch.tensor([1.5, -0.5]), **options)
    for one, golden in zip(found, GOLDEN[layout], strict=True):
        torch.testing.assert_close(one.float().flatten(), torch.tensor(golden))


class Batch:
    """Random log-probs of 4 sequences in 6 columns, or of 2 bins with an alignment gap between two sequences."""

    def __init__(self, layout: str, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.packed, shape = layout == "packed", (4, 6) if layout == "padded" else (2, 12)
        self.old, self.reference = (-torch.rand(shape, generator=draw) * 3 for _ in range(2))
        self.current = (self.old + 0.4 * torch.randn(shape, generator=draw)).clamp(max=0)
        self.rollout = (self.old + 0.5 * torch.randn(shape, generator=draw)).clamp(max=0)
        self.advantages = torch.randn(4, generator=draw)
        # starts, and the end of the last; sequence lengths are one above their number of log-probs
        self.bins = [([0, 8, 13], [7, 5]), ([0, 6, 13], [6, 7])]
        self.mask = torch.rand(shape, generator=draw) < 0.7
        if self.packed:
            for row, (starts, lengths) in enumerate(self.bins):
                inside = torch.zeros(12, dtype=torch.bool)
                for start, length in zip(starts, lengths, strict=False):
                    inside[start : start + length - 1] = True
                self.mask[row] &= inside

    def rows(self) -> RolloutRows:
        starts = [list(starts[:2]) for starts, _ in self.bins] if self.packed else None
        return RolloutRows(self.old, self.rollout, self.mask, self.advantages, starts)

    def run(self, function: Any, slot: Tensor | None, **settings: Any) -> tuple[Tensor, Tensor]:
        """Loss of the loss tokens, and the gradient of their sum; every micro-batch is a bin or a row."""
        losses, current = [], self.current.clone().requires_grad_()
        for row in range(len(self.old)):
            one, options = slice(row, row + 1), {**CLIP, **settings}
            advantages = self.advantages[one]
            if self.packed:
                advantages = self.advantages[2 * row : 2 * row + 2]
                options |= {"seq_starts": self.bins[row][0], "seq_lengths": self.bins[row][1]}
            options["inference_logprobs"] = None if slot is None else slot[one]
            loss, *_ = function(current[one], self.old[one], self.reference[one], advantages, **options)
            losses.append(loss)
        loss = torch.where(self.mask, torch.cat(losses), 0)
        loss.sum().backward()
        return loss.detach(), current.grad


@pytest.mark.host("megatron-lm", proof="own code", feature="loss and gradient of a correction")
@pytest.mark.host("megatron-lm", proof="stand-in", feature="loss and gradient of a correction")
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("upper", [None, 1.3], ids=["no correction", "truncation"])
def test_token_truncation_is_the_hosts_own_option(host: SimpleNamespace, layout: str, seed: int, upper: Any) -> None:
    batch, correction = Batch(layout, seed), RolloutCorrection(Weight(upper=upper) if upper else None)
    expected = batch.run(host.rl_utils.calculate_grpo_loss, batch.rollout if upper else None, is_truncation_coef=upper)
    _, weights = corrected_rows(batch.old, batch.rows(), correction)
    assert not upper or ((weights == 1.3).any() and ((weights > 0) & (weights < 1.3)).any())
    with patch("megatron-lm", correction=correction):
        found = batch.run(host.rl_utils.calculate_grpo_loss, weights)
    torch.testing.assert_close(found, expected, rtol=1e-6 if upper else 2e-7, atol=1e-7 if upper else 0)


def test_a_loss_with_a_term_that_the_correction_would_drop_is_refused_at_the_first_batch(host: SimpleNamespace) -> None:
    own = host.rl_utils.calculate_grpo_loss

    def more(current: Tensor, *args: Any, **settings: Any) -> Any:
        loss, *others = own(current, *args, **settings)
        return loss + settings["kl_beta"] * current**2, *others

    batch, session = Batch("padded", 0), Session(RolloutCorrection(), None)
    for function, refused in ((own, False), (wraps(own)(more), True)):
        replaced = partial(calculate_grpo_loss, function, replace(session))
        with pytest.raises(ValueError, match="has other terms than policy gradient") if refused else nullcontext():
            batch.run(replaced, torch.ones_like(batch.old))


@pytest.mark.host("megatron-lm", proof="own code", feature="corrupt log-probs leave the gradient finite")
@pytest.mark.host("megatron-lm", proof="stand-in", feature="corrupt log-probs leave the gradient finite")
def test_a_rejected_token_keeps_its_kl_and_entropy_terms_and_nothing_else(host: SimpleNamespace) -> None:
    current = torch.tensor([[-2.0, -0.5]], requires_grad=True)
    old, reference = torch.tensor([[math.nan, -0.5]]), torch.tensor([[-2.2, -0.5]])
    with patch("megatron-lm", correction=RolloutCorrection()):
        loss, kl, *_ = host.rl_utils.calculate_grpo_loss(
            current, old, reference, torch.tensor([2.0]), **CLIP, inference_logprobs=torch.tensor([[0.0, 1.0]])
        )
    loss.sum().backward()
    assert kl[0, 0].item() == pytest.approx(math.exp(-0.2) + 0.2 - 1)
    # 0.1 (e^d - d - 1) + 0.05 l e^l with d = -2.2 - l, and its derivative, at l = -2
    assert loss[0, 0].item() == pytest.approx(0.1 * (math.exp(-0.2) + 0.2 - 1) - 0.1 * math.exp(-2))
    assert current.grad[0, 0].item() == pytest.approx(0.1 * (1 - math.exp(-0.2)) - 0.05 * math.exp(-2))


@pytest.mark.host("megatron-lm", proof="own code", feature="two policies (`old: rollout`)")
@pytest.mark.host("megatron-lm", proof="stand-in", feature="two policies (`old: rollout`)")
def test_two_policies_use_pi_over_mu_as_the_ratio_and_drop_what_the_gate_refuses(host: SimpleNamespace) -> None:
    # log pi/mu by sequence: 0.1, -0.1 | 1.0, 1.0: the second has a geometric mean of e, above 2
    rollout = torch.tensor([[-1.0, -1.0], [-2.0, -2.0]])
    current = rollout + torch.tensor([[0.1, -0.1], [1.0, 1.0]])
    correction = RolloutCorrection(reject=(Rejection("ratio", "sequence", "mean", upper=2.0),), old="rollout")
    quiet = {**CLIP, "kl_beta": 0.0, "entropy_weight": 0.0}
    with patch("megatron-lm", correction=correction):
        loss, _, ratios, _, above, _ = host.rl_utils.calculate_grpo_loss(
            current, current + 3, current, torch.tensor([1.0, 1.0]), **quiet, inference_logprobs=rollout
        )
    torch.testing.assert_close(ratios, torch.tensor([[0.1, -0.1], [1.0, 1.0]]).exp())
    torch.testing.assert_close(loss, torch.tensor([[-math.exp(0.1), -math.exp(-0.1)], [0.0, 0.0]]))
    assert above.tolist() == [[False, False], [True, True]]


def test_two_policies_judge_the_sequences_of_a_bin_one_by_one(host: SimpleNamespace) -> None:
    # rows 0-1 and 4-5 are two sequences, log pi/mu 0.1 and 1.0; row 2 is the first one's end, row 3 an alignment gap
    rollout = torch.tensor([[-1.0, -1.0, math.nan, math.nan, -2.0, -2.0]])
    current = torch.tensor([[-0.9, -0.9, -0.5, -0.5, -1.0, -1.0]])
    gate = Rejection("ratio", "sequence", "mean", upper=2.0, when="negative_advantage")
    quiet = {**CLIP, "kl_beta": 0.0, "entropy_weight": 0.0, "seq_starts": [0, 4, 7], "seq_lengths": [3, 3]}
    with patch("megatron-lm", correction=RolloutCorrection(reject=(gate,), old="rollout")):
        for advantages, kept in (([1.0, -1.0], 0.0), ([-1.0, 1.0], 1.0)):
            loss, *_ = host.rl_utils.calculate_grpo_loss(
                current, current, current, torch.tensor(advantages), **quiet, inference_logprobs=rollout
            )
            expected = [-advantages[0] * math.exp(0.1)] * 2 + [-advantages[1] * 1.3 * kept] * 2
            torch.testing.assert_close(loss[0, [0, 1, 4, 5]], torch.tensor(expected))
    with patch("megatron-lm", correction=RolloutCorrection(old="rollout")):
        nothing = {**quiet, "seq_starts": [], "seq_lengths": []}
        empty = torch.full_like(rollout, math.nan)
        loss, *_ = host.rl_utils.calculate_grpo_loss(
            current, current, current, torch.tensor([]), **nothing, inference_logprobs=empty
        )
    assert loss.isfinite().all()


def test_a_token_without_rollout_logprob_has_weight_1_and_0_in_a_dropped_sequence() -> None:
    rollout = torch.tensor([[-1.0, math.nan, -1.0], [-3.0, math.nan, -1.0], [math.nan, math.nan, -1.0]])
    mask = torch.tensor([[True, True, False], [True, True, False], [True, True, False]])
    rows = RolloutRows(torch.full((3, 3), -1.0), rollout, mask, torch.ones(3), None)
    correction = RolloutCorrection(Weight(upper=1.5), (Rejection("ratio", "sequence", "max", upper=2.0),))
    corrected, weights = corrected_rows(rows.old_logprobs, rows, correction)
    # the second sequence has a ratio of e^2, the third nothing to judge it by
    assert weights.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0]]
    values = corrected.metrics.values()
    assert values["masked_token"] == 0.5 and values["nonfinite_count"] == 0


def test_a_loss_without_rollout_logprobs_names_the_flag(host: SimpleNamespace) -> None:
    one = torch.zeros(1, 2)
    refused = pytest.raises(ValueError, match="add --rl-inference-logprobs-is-correction")
    with patch("megatron-lm", correction=RolloutCorrection()), refused:
        host.rl_utils.calculate_grpo_loss(one, one, one, torch.ones(1), **CLIP)
