"""slime's tis, loss, pg_loss_reducer and rollout_data: numbers by hand, and one correction through each of them."""

import math
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosts.slime.host import MILES, arguments, clipped, given_to_tis, hooks, micro_batch, naming, rollout
from hosts.slime.single import alone, loss_of
from hosts.slime.single import in_one_process as in_one_process

from megatron_rc.correction.warnings import LostBatchWarning
from megatron_rc.integrations.slime.hooks import rollout_data as rollout_hook

DATA_HOOK = naming("rollout_data")
LOG2 = math.log(2)


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tis(args: Namespace, train: list[list[float]], sampled: Any, masks: list[list[int]], **more: Any) -> Any:
    """The hook with pg_loss 1, 2, 3, ... and prompts of two tokens."""
    lengths = [len(mask) for mask in masks]
    given: dict[str, Any] = {"total_lengths": [n + 2 for n in lengths], "response_lengths": lengths}
    given |= {"train_log_probs": [*map(torch.tensor, train)], "loss_masks": [*map(torch.tensor, masks)]}
    given |= {"rollout_log_probs": sampled and [*map(torch.tensor, sampled)]}
    return hooks.tis(args, **{"pg_loss": torch.arange(1.0, sum(lengths) + 1), **given, **more})


def use_tis(correction: Any, **changes: Any) -> Namespace:
    return arguments(use_tis=True, megatron_rc={"correction": correction}, **changes)


def test_tis_truncates_pi_over_mu_of_a_token() -> None:
    # rho = 4, 1, 1/2 | 8
    train, sampled = [[-1.0, -2.0, -3.0 - LOG2], [-1.0]], [[-1.0 - 2 * LOG2, -2.0, -3.0], [-1.0 - 3 * LOG2]]
    loss, masks, metrics = tis(use_tis("token-tis"), train, sampled, [[1, 1, 1], [1]])
    torch.testing.assert_close(loss, torch.tensor([2.0, 2.0, 1.5, 8.0]))
    torch.testing.assert_close(metrics["rc/weight"], torch.tensor([2.0, 1.0, 0.5, 2.0]))
    torch.testing.assert_close(metrics["rc/weight_squared"], torch.tensor([4.0, 1.0, 0.25, 4.0]))
    torch.testing.assert_close(metrics["rc/k1"], torch.tensor([-2 * LOG2, 0.0, LOG2, -3 * LOG2]))
    torch.testing.assert_close(metrics["rc/k3"], torch.tensor([3 - 2 * LOG2, 0.0, LOG2 - 0.5, 7 - 3 * LOG2]))
    torch.testing.assert_close(metrics["rc/chi2_token"], torch.tensor([9.0, 0.0, 0.25, 49.0]))
    assert [mask.tolist() for mask in masks] == [[1, 1, 1], [1]]
    # a weight of a sequence is not the ratio of its tokens
    *_, metrics = tis(use_tis("seq-tis"), train, sampled, [[1, 1, 1], [1]])
    assert "tis" in metrics and "tis_clipfrac" not in metrics


def test_tis_rejects_in_the_numerator_and_returns_the_masks_of_all_loss_tokens() -> None:
    # mean l of the first response is 0 over its loss tokens, of the second log 2
    train, sampled = [[-1.0, -5.0, -1.0 - LOG2], [-1.0]], [[-1.0 - LOG2, -1.0, -1.0], [-1.0 - LOG2]]
    given = [[1, 0, 1], [1]]
    loss, masks, metrics = tis(use_tis("geo-mask"), train, sampled, given)
    assert loss.tolist() == [1.0, 0.0, 3.0, 0.0]
    assert [mask.tolist() for mask in masks] == given
    assert metrics["rc/masked_token"].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_tis_drops_a_corrupt_token_and_counts_it_whatever_its_loss_is() -> None:
    given = ([[-1.0, -1.0]], [[math.nan, -1.0]], [[1, 1]])
    loss, _, metrics = tis(use_tis("token-tis"), *given, pg_loss=torch.tensor([math.inf, 3.0]))
    assert loss.tolist() == [0.0, 3.0]
    assert metrics["rc/nonfinite_share"].tolist() == [1.0, 0.0]
    assert all(values.isfinite().all() for values in metrics.values())


@pytest.mark.parametrize("corrupt", [math.nan, -math.inf])
def test_a_corrupt_trainer_logprob_is_a_nan_in_the_loss_of_tis_and_harmless_after_rollout_data(
    corrupt: float, world: None
) -> None:
    # the host's own loss may still be finite here, by its clip, and its gradient is not
    loss, *_ = tis(use_tis("token-tis"), [[corrupt, -1.0]], [[-1.0, -1.0]], [[1, 1]])
    assert loss.isnan().tolist() == [True, False]
    for mask, others in (([0, 1], {}), ([1, 1], {"parallel_state": object()})):
        # miles has put ratio 1 in its place, and its gradient is finite
        loss, *_ = tis(use_tis("token-tis"), [[corrupt, -1.0]], [[-1.0, -1.0]], [mask], **others)
        assert loss.isfinite().all() and loss[0].abs() < 1e-6
    data = micro_batch(rollout(11))
    current = torch.cat(data["log_probs"]).clone().requires_grad_()
    data["log_probs"][0][1] = corrupt
    settings = {"correction": "token-tis", "max_nonfinite_share": 0.5}
    hooks.rollout_data(arguments(megatron_rc=settings, **DATA_HOOK), 0, data)
    clipped((current - torch.cat(data["log_probs"])).exp(), torch.cat(data["advantages"])).sum().backward()
    # e^-20 where the trainer calls the token impossible
    assert current.grad is not None and current.grad.isfinite().all() and current.grad[1].abs() < 1e-7
    assert (data["rc/nonfinite_share"] > 0) == math.isnan(corrupt)


def test_tis_only_reports_under_get_mismatch_metrics_or_where_the_advantages_are_weighted() -> None:
    train, sampled = [[-1.0, -1.0]], [[-1.0 - 2 * LOG2, -1.0]]
    weighted = use_tis("token-tis", **naming("rollout_data", "tis"))
    for args in (arguments(get_mismatch_metrics=True, megatron_rc={"correction": "token-tis"}), weighted):
        loss, _, metrics = tis(args, train, sampled, [[1, 1]])
        assert loss.tolist() == [1.0, 2.0]
        torch.testing.assert_close(metrics["rc/k1"], torch.tensor([-2 * LOG2, 0.0]))


@pytest.mark.host("slime", "miles", proof="stand-in", feature="correction none leaves the loss bit-identical")
@pytest.mark.parametrize("host", ["slime", "miles"])
def test_correction_none_returns_the_very_bits_of_slimes_loss(host: str) -> None:
    whole, padded = rollout(5), 13 if host == "miles" else None
    batch = micro_batch(whole, padded=padded)
    given = given_to_tis(batch) | ({"max_seq_lens": batch["max_seq_lens"]} if padded else {})
    pg_loss = torch.randn(sum(whole.responses), generator=torch.Generator().manual_seed(0)).requires_grad_()
    layout = {**MILES, "qkv_format": "bshd"} if padded else {}
    args = arguments(use_tis=True, megatron_rc={"correction": "none"}, **layout)
    hooked, masks, _ = hooks.tis(args, pg_loss=pg_loss, **given)
    reduce, total = whole.sum_of_sample_mean(padded=padded), sum(whole.responses)
    assert masks is batch["loss_masks"] and len(hooked) == total
    own, ours = reduce(pg_loss), reduce(hooked)
    assert torch.equal(own, ours)
    assert torch.equal(torch.autograd.grad(own, pg_loss)[0], torch.autograd.grad(ours, pg_loss)[0])


def test_missing_rollout_logprobs_are_refused_with_the_flag_that_records_them() -> None:
    with pytest.raises(ValueError, match="^rollout_log_probs must be in every.*--custom-generate-function-path"):
        tis(use_tis("token-tis"), [[-1.0]], None, [[1]])
    whole = rollout(1)
    batch = {**micro_batch(whole), "rollout_log_probs": None}
    with pytest.raises(ValueError, match="^rollout_log_probs must be in every.*--custom-generate-function-path"):
        hooks.loss(arguments(), batch, batch["logits"], whole.sum_of_sample_mean())


def test_miles_passes_its_own_arguments_by_keyword() -> None:
    given = ([[-1.0]], [[-1.0 - LOG2]], [[1]])
    more = {"current_log_probs": [torch.zeros(1)], "advantages": [torch.ones(1)]}  # of some versions of both hosts
    loss, _, _ = tis(use_tis("token-tis", qkv_format="thd"), *given, max_seq_lens=None, parallel_state=object(), **more)
    torch.testing.assert_close(loss, torch.tensor([2.0]))


def test_reducer_divides_by_all_loss_tokens_of_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = torch.tensor([1.0, 2.0, 0.0, 40.0, math.nan])  # 0: a rejected token, NaN: under the mask
    shapes = ([6, 5], [3, 2], [torch.tensor([1, 1, 1]), torch.tensor([1, 0])])
    for aggregation, per_token, expected in (
        ("seq-mean-token-mean", False, 1.0 + 40.0),
        ("seq-mean-token-sum", False, 43.0),
        ("seq-mean-token-sum-norm", False, 43.0 / 16),
        ("token-mean", True, 43.0),
    ):
        alone(monkeypatch, arguments(megatron_rc={"aggregation": aggregation}, calculate_per_token_loss=per_token))
        value = hooks.pg_loss_reducer(*shapes, per_token)(losses.requires_grad_())
        assert value.item() == pytest.approx(expected)
        assert torch.autograd.grad(value, losses)[0][-1] == 0


CORRECTION = {"preset": "geo-mask-token-tis", "reject": [{"statistic": "ratio", "reduce": "mean", "upper": 1.05}]}


def test_one_correction_is_the_same_through_tis_loss_and_rollout_data(world: None) -> None:
    whole = rollout(11)
    batch = micro_batch(whole)
    weighed, _, _ = loss_of(whole, arguments(megatron_rc={"correction": CORRECTION}))

    # the policy-gradient loss of every token, as the host has it before the hook
    ratio = (whole.current(batch["logits"]) - torch.cat(batch["log_probs"])).exp()
    pg_loss = clipped(ratio, torch.cat(batch["advantages"]))
    hooked, _, metrics = hooks.tis(use_tis(CORRECTION), pg_loss=pg_loss, **given_to_tis(batch))
    assert 0 < metrics["rc/masked_token"].sum() < len(pg_loss)
    assert whole.sum_of_sample_mean()(hooked).item() == pytest.approx(weighed, rel=1.3e-6)

    args = arguments(megatron_rc={"correction": CORRECTION}, **DATA_HOOK)
    hooks.rollout_data(args, 0, batch)
    unweighed = clipped(ratio, torch.cat(batch["advantages"]))
    assert whole.sum_of_sample_mean()(unweighed).item() == pytest.approx(weighed, rel=1.3e-6)


def test_rollout_data_normalises_over_the_whole_rollout_and_leaves_returns_alone(world: None) -> None:
    whole = rollout(12)
    data = {**micro_batch(whole), "returns": list(whole.values["advantages"])}
    before = [one.clone() for one in data["returns"]]
    data["advantages"] = list(data["returns"])
    gate = {"statistic": "k3", "reduce": "mean", "upper": 0.12, "when": "negative_advantage"}
    settings = {"preset": "token-tis", "normalize": "batch", "reject": [gate]}
    args = arguments(megatron_rc={"correction": settings}, **DATA_HOOK)
    hooks.rollout_data(args, 3, data)
    corrected = whole.corrected(settings)
    assert corrected.weights[corrected.mask].mean().item() == pytest.approx(1) and not corrected.mask.all()
    torch.testing.assert_close(torch.cat(data["advantages"]), torch.cat(before) * corrected.weights)
    assert [len(one) for one in data["advantages"]] == whole.responses
    assert all(torch.equal(one, other) for one, other in zip(data["returns"], before, strict=True))
    pooled = corrected.metrics.values()
    assert data["rc/k3"].item() == pytest.approx(pooled["k3"])
    assert data["rc/ess_token_final"].item() == pytest.approx(pooled["ess_token_final"])
    # one token has no correlation: what cannot be said is not logged
    single = micro_batch(rollout(13, [(2, 1)]))
    hooks.rollout_data(args, 4, single)
    reported = {name: value for name, value in single.items() if name.startswith("rc/")}
    assert "rc/k3" in reported and "rc/prob_correlation" not in reported
    assert not any(torch.isnan(value) for value in reported.values())


def test_rollout_data_warns_once_in_ten_rollouts_of_a_correction_that_drops_most_tokens(
    world: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollout_hook, "_LOST_BATCH", LostBatchWarning())
    gate = {"statistic": "abs_log_ratio", "level": "token", "upper": 1e-3}
    args = arguments(megatron_rc={"correction": {"reject": [gate]}}, **DATA_HOOK)
    counts = []
    for number in range(11):
        data = micro_batch(rollout(12))
        hooks.rollout_data(args, number, data)
        assert data["rc/masked_token"] > 0.5
        counts.append(sum("the correction drops" in record.getMessage() for record in caplog.records))
    assert counts == [1] * 10 + [2]
    k3, length = data["rc/k3"].item(), data["rc/response_length"].item()
    assert f"k3 is {k3:.3g} nats per token and the mean length {length:.0f} tokens" in caplog.text


def test_rollout_data_refuses_what_it_has_not_been_given(world: None) -> None:
    args = arguments(megatron_rc={"correction": "token-tis"}, **DATA_HOOK)
    data = micro_batch(rollout(1))
    with pytest.raises(ValueError, match="^log_probs must be in.*unless --get-mismatch-metrics is set"):
        hooks.rollout_data(args, 0, {**data, "log_probs": None})
    data["rollout_log_probs"] = [torch.full_like(one, math.nan) for one in data["rollout_log_probs"]]
    with pytest.raises(ValueError, match=r"nonfinite_share must be <= 0.01"):
        hooks.rollout_data(args, 0, data)


def test_other_pipeline_stages_have_nothing_to_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch, last_stage=False)
    data: dict[str, Any] = {"total_lengths": [3], "response_lengths": [2], "loss_masks": [torch.tensor([1, 1])]}
    hooks.rollout_data(arguments(megatron_rc={"correction": "token-tis"}, **DATA_HOOK), 0, data)
    assert data.keys() == {"total_lengths", "response_lengths", "loss_masks"}
