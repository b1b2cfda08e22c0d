"""A rollout batch and a training step of the patched megatron-lm: one denominator, sharded logits, the length decay."""

import math
import re
from argparse import Namespace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from distributed import run_ranks
from hosts.megatron_lm import sources
from hosts.megatron_lm.ranks import VOCABULARY, WIDTH, Cut, Model, Rollout, rollouts, run, weights_by_epoch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_rc import LengthDecayLR, MismatchLR, Rejection, RolloutCorrection, Weight, correct
from megatron_rc.integrations.megatron_lm import HOST
from megatron_rc.integrations.megatron_lm import session as session
from megatron_rc.integrations.megatron_lm.loss import _logged_loss
from megatron_rc.integrations.megatron_lm.rollouts import mean_response_length
from megatron_rc.integrations.run_script import PatchSettings
from megatron_rc.integrations.scheduler_rule import ATTACHES_RULE
from megatron_rc.learning_rate.scale import Signals

CORRECTION = RolloutCorrection(
    Weight("token", "truncate", upper=1.2),
    (Rejection("ratio", "sequence", "mean", lower=0.5, upper=1.5, when="negative_advantage"),),
    normalize="batch",
)
TEMPERATURES = [1.0, 0.7]
CUTS = [Cut(rows=1), Cut(rows=2), Cut(rows=4), Cut(bins=[[[0, 2], [], [1], [3]]])]
HALVES = [Cut(rows=1), Cut(rows=2), Cut(bins=[[[0, 1], []], [[1], [0]]])]


def by_hand(correction: RolloutCorrection) -> tuple[Tensor, dict[str, float]]:
    """Gradient of -sum_t w_t A log pi_t / T over all tokens, and k3, from the four rollouts one by one."""
    model, made = Model(), [rollout for group in rollouts() for rollout in group]
    shape = (len(made), WIDTH - 1)
    tokens, rollout_logprobs = torch.zeros(len(made), WIDTH, dtype=torch.long), torch.full(shape, torch.nan)
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, one in enumerate(made):
        length, prompt = len(one.trajectory[0]), one.generation_mask[0].index(True)
        tokens[row, :length] = torch.tensor(one.trajectory[0])
        sampled = torch.tensor(one.logprobs[0])
        rollout_logprobs[row, prompt - 1 : prompt - 1 + len(sampled)] = sampled
        mask[row, prompt - 1 : length - 1] = True
    current = model.table[tokens[:, :-1]].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    advantages, known = torch.tensor([one.reward for one in made]), mask & ~rollout_logprobs.isnan()
    corrected = correct(current.detach(), rollout_logprobs, known, correction=correction, advantages=advantages)
    weights = corrected.weights.clone()
    assert (mask & ~known).sum() == 1 and corrected.mask[1].any()
    weights[mask & ~known] = 1.0
    (-weights * advantages[:, None] * current * mask).sum().div(mask.sum()).backward()
    return model.table.grad, corrected.metrics.values()


@cache
def ranks(count: int) -> list[dict[str, Any]]:
    """What `count` ranks answer; two of them also share a vocabulary."""
    cuts, settings = {1: CUTS, 2: HALVES}[count], PatchSettings(correction=CORRECTION)
    if count == 1:
        return run_ranks(1, run, cuts, settings, [], [])
    with TemporaryDirectory() as folder:
        folders = [sources.STUB] + ([sources.cut_out(sources.tree(), Path(folder))] if sources.named() else [])
        return run_ranks(2, run, cuts, settings, folders, TEMPERATURES)


@pytest.mark.host("megatron-lm", proof="stand-in", feature="data-parallel ranks")
@pytest.mark.parametrize("count", [1, 2])
def test_the_step_is_that_of_the_whole_batch_however_it_is_cut(count: int) -> None:
    gradient, metrics = by_hand(CORRECTION)
    assert gradient.abs().max() > 0.01 and 0 < metrics["masked_token"] < 1
    for rank in ranks(count):
        assert len(rank["steps"]) >= 3
        for outcome in rank["steps"]:
            torch.testing.assert_close(outcome["gradient"], gradient, rtol=1e-5, atol=1e-7)
            log = outcome["log"]
            for name in ("k3", "chi2_seq", "ess_token", "masked_token", "weight_mean"):
                assert log[f"rc/old/{name}"] == pytest.approx(metrics[name], rel=1e-5), name
            assert log["rc/old/missing"] == pytest.approx(1 / 17)


def test_a_correction_that_drops_most_of_the_tokens_warns_once_in_ten_rollout_batches() -> None:
    drops = RolloutCorrection(reject=(Rejection("abs_log_ratio", "token", upper=1e-3),))
    batches = run_ranks(1, weights_by_epoch, [Cut(rows=1)] * 11, drops, [])[0]
    assert [len(batch["warnings"]) for batch in batches] == [1] * 10 + [2]
    for sentence in batches[-1]["warnings"]:
        assert re.match(r"the correction drops (9\d|100)% of the tokens: k3 is .* use a weight|.*look at", sentence)


@pytest.mark.host("megatron-lm", proof="stand-in", feature="tensor-parallel ranks")
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_logprobs_come_from_sharded_logits_at_the_sampling_temperature(temperature: float) -> None:
    tokens = torch.randint(0, VOCABULARY, (3, WIDTH), generator=torch.Generator().manual_seed(7))
    table = Model().table.detach().double() / temperature
    expected = table[tokens[:, :-1]].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    of_hosts = [rank["logprobs"][temperature] for rank in ranks(2)]
    for first, second in zip(*of_hosts, strict=True):
        for rank in (first, second):
            own, patched = rank["host"], rank["patched"]
            assert (own.gathers, patched.gathers) == (1, 0)
            torch.testing.assert_close(patched.logprobs.double(), expected, rtol=1e-6, atol=1e-6)
            if temperature == 1:
                torch.testing.assert_close(patched.logprobs, own.logprobs, rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(patched.gradient, own.gradient, rtol=1e-5, atol=1e-6)
        assert torch.equal(first["patched"].logprobs, second["patched"].logprobs)


def test_logprobs_of_a_bf16_model_are_fp32_and_the_host_takes_them() -> None:
    tokens = torch.randint(0, VOCABULARY, (3, WIDTH), generator=torch.Generator().manual_seed(7))
    model, state = Model(dtype=torch.bfloat16), session.Session(RolloutCorrection(), None)
    with sources.imported(sources.STUB) as host:
        rl = host.rl_utils
        sources.replace(rl, state, "get_logprobs", "selective_log_softmax", "compute_logprobs_batch")
        found = rl.compute_logprobs_batch(
            model, tokens, None, None, 3, WIDTH, 1, None, dtype=torch.bfloat16, pp_group=None, is_correction=True
        )
        outside = rl.selective_log_softmax(model.table[tokens[:, :-1]], tokens[:, 1:])
    expected = model.table[tokens[:, :-1]].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    assert found.dtype == torch.float32 and outside.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_under_batch_invariant_mode_logprobs_are_the_bits_of_the_hosts_own_log_softmax(
    temperature: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(0, VOCABULARY, (64, WIDTH), generator=torch.Generator().manual_seed(8))
    model, state = Model(dtype=dtype), session.Session(RolloutCorrection(), None)
    logits = model.table[tokens[:, :-1]].detach()
    with sources.imported(sources.STUB) as host:
        from megatron.training.global_vars import get_args

        rl, args = host.rl_utils, get_args()
        monkeypatch.setattr(args, "rl_default_temperature", temperature)
        own = rl.selective_log_softmax(logits if temperature == 1 else logits.float() / temperature, tokens[:, 1:])
        sources.replace(rl, state, "get_logprobs", "selective_log_softmax")
        patched = rl.get_logprobs(model, tokens, None)
        monkeypatch.setattr(args, "batch_invariant_mode", True, raising=False)
        invariant = rl.get_logprobs(model, tokens, None)
    assert torch.equal(invariant, own) and not torch.equal(patched, own)
    assert state.answers is None and not model._forward_pre_hooks


def test_with_per_token_loss_the_host_divides_itself() -> None:
    pair = {"rc": torch.tensor([3.0, 1.0])}
    own = (torch.tensor(6.0), torch.tensor(4), {"lm loss": torch.tensor([6.0, 4.0])})
    loss, tokens, log = _logged_loss(lambda output: own, None, pair, torch.zeros(1))
    assert (loss, tokens, set(log)) == (own[0], own[1], {"lm loss", "rc/rc"})
    loss, tokens, _ = _logged_loss(lambda output: own, torch.tensor(0.5), pair, torch.zeros(1))
    assert (float(loss), int(tokens)) == (3.0, 1)


def test_flags_that_cannot_be_honoured_are_named_before_the_model_is_built() -> None:
    with sources.imported(sources.STUB) as host:
        from megatron.training.global_vars import args

        args.perform_rl_step = False
        setup, own = session.setup_model_and_optimizer, host.training.setup_model_and_optimizer
        with pytest.raises(ValueError, match="--perform-rl-step"):
            setup(own, session.Session(RolloutCorrection(), None), None, lambda: pytest.fail("the model was built"))


@pytest.mark.parametrize(
    ("correction", "sentence"),
    [
        (RolloutCorrection(Weight(), old="rollout"), "weight must be None when old is 'rollout'"),
        (RolloutCorrection(old="current"), "old must be 'recompute' or 'rollout'"),
        (RolloutCorrection(Weight(upper="measured")), "upper must be a number in host 'megatron-lm'"),
        (RolloutCorrection(reject=(Rejection("standardized", upper=2.0),), old="rollout"),
         "reject must not use 'standardized' in the loss of host 'megatron-lm'"),
        (RolloutCorrection(reject=(Rejection("lag", upper=4.0),), old="rollout"),
         "lag must not be used in the loss of host 'megatron-lm' with old: rollout"),
        (RolloutCorrection(Weight(staleness_upper=2.0)), "staleness_upper must not be used in host 'megatron-lm'"),
        (RolloutCorrection(reject=(Rejection("surprise", upper=1.0),)), "statistic 'surprise' is not known"),
    ],
)  # fmt: skip
def test_a_correction_that_the_host_cannot_honour_is_refused(correction: RolloutCorrection, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        HOST.prepare(correction, None)


def rates(state: session.Session, signals: list[Signals]) -> tuple[list[float], Any, OptimizerParamScheduler]:
    """Learning rates after rollout batches whose correction measured these signals; optimizer and scheduler."""
    with sources.imported(sources.STUB) as host:
        make = ATTACHES_RULE.make(host.training.get_optimizer_param_scheduler, state)
        (prepare,) = (symbol.make for symbol in HOST.symbols if symbol.name == "prepare_data_for_update")
        optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))]}], lr=1.0)
        scheduler, found = make(optimizer), []
        for measured in signals:
            state.signals = measured
            prepare(lambda rollouts: (iter(()), None, {}), state)(rollouts=rollouts())
            found.append(optimizer.param_groups[0]["lr"])
    return found, optimizer, scheduler


def test_the_length_decay_takes_the_mean_length_of_the_batch_once_a_rollout_and_lets_go_of_the_scheduler() -> None:
    decay = LengthDecayLR(1e-3, decay_period=2)
    state = session.Session(None, decay)
    found, optimizer, scheduler = rates(state, [Signals()] * 4)
    assert found == [1e-3, 5e-4, 5e-4, 2.5e-4]
    assert decay.detector.measured == 4
    saved = scheduler.state_dict()
    HOST.release(state)
    assert optimizer.param_groups[0]["lr"] == 1e-3 and scheduler.state_dict() != saved
    assert not {"get_lr", "state_dict", "load_state_dict"} & set(vars(scheduler))


def test_the_gate_takes_what_the_correction_of_the_batch_measured() -> None:
    state = session.Session(None, MismatchLR(1e-3))
    found, *_ = rates(state, [Signals(ess=0.125), Signals(ess=0.9)])
    assert found == pytest.approx([5e-4, 1e-3])
    HOST.release(state)


def test_the_mean_response_length_counts_generated_tokens_of_every_turn_and_no_failed_episode() -> None:
    turns = Rollout([[1, 2], [1, 2, 3, 4]], [[False, True], [False, False, False, True]], None, 0.0)
    failed, text = Rollout([], None, None, 0.0), Rollout([[1]], None, None, 0.0)
    assert mean_response_length([*rollouts(), [turns], [failed, text]]) == (2 + 5 + 7 + 3 + 2) / 5
    assert mean_response_length([[failed, text]]) is None


def test_missing_logprobs_are_nan_after_padding_packing_and_aligning(tmp_path: Path) -> None:
    folders = [sources.STUB] + ([sources.cut_out(sources.tree(), tmp_path)] if sources.named() else [])
    returned = [torch.tensor([-1.0, -2.0]), None]
    generated = torch.tensor([[False, True, True, True, False], [False] * 5])
    info = Namespace(bin_seq_indices=[[1], [0]], seq_starts=[[0, 5], [0, 4]], seq_lengths=[4, 5])
    state = session.Session(RolloutCorrection(), None)
    for folder in folders:
        with sources.imported(folder) as host:
            rl, packing = host.rl_utils, host.sequence_packing_utils
            sources.replace(rl, state, "_pad_nonnull_with_zeros", "align_unpacked_inference_logprobs")
            sources.replace(packing, state, "pack_inference_logprobs")
            padded = rl._pad_nonnull_with_zeros(returned, 5)
            packed, filled = packing.pack_inference_logprobs(padded, info, generated, 5)
            aligned = rl.align_unpacked_inference_logprobs(returned, torch.full((2, 4), -0.5), generated, Namespace())
        nan = math.nan
        for found, expected in (
            (padded, [[-1, -2, nan, nan, nan], [nan] * 5]),
            (packed, [[nan] * 4, [-1, -2, nan, nan]]),
            (aligned, [[-1, -2, nan, -0.5], [-0.5] * 4]),
        ):
            torch.testing.assert_close(found, torch.tensor(expected), equal_nan=True)
        assert filled.tolist() == [[False] * 4, [True, True, False, False]]
