"""policy_loss against a slow fp64 loop, and against every way to cut a batch."""

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_batch import corrected_of, evaluate, random_batch
from torch import Tensor

from megatron_rc import Corrected, LossOptions, MetricSums, RolloutCorrection, loss_scale, policy_loss

INF, NAN = float("inf"), float("nan")


def loss_by_hand(
    batch: dict[str, Tensor], scale: Tensor, old: Tensor, *, surrogate: str, dual_clip: float | None, kl_coef: float,
    kl_estimator: str, entropy_coef: float,
) -> tuple[float, list[float], dict[str, float]]:  # fmt: skip
    """(loss, its gradient by current log-prob, metrics), one token after the other."""
    total, gradient, counts = 0.0, [], defaultdict[str, float](float)
    lowest, highest = 1 - 0.2, 1 + 0.28
    for t in range(len(scale)):
        slope = 0.0
        if batch["loss_mask"][t]:
            s, a, lp = scale[t].item(), batch["advantages"][t].item(), batch["current"][t].item()
            r = math.exp(lp - old[t].item())
            if batch["mask"][t]:
                w = batch["weights"][t].item()
                value, inner = -a * lp, -a
                limited = min(max(r, lowest), highest)
                if surrogate == "cispo":
                    counts["clip_high"] += r > highest
                    counts["clip_low"] += r < lowest
                    value, inner = limited * value, limited * inner
                if surrogate == "ppo":
                    value, inner = max(-a * r, -a * limited), -a * r
                    clipped = -a * limited > -a * r
                    counts["clip_high"] += clipped and a > 0
                    counts["clip_low"] += clipped and a < 0
                    if dual_clip is not None and a < 0 and value > -a * dual_clip:
                        value, clipped = -a * dual_clip, True
                        counts["dual_clip"] += 1
                    inner = 0.0 if clipped else inner
                total += s * w * value
                slope += s * w * inner
                counts["kept"] += 1
            d = batch["reference"][t].item() - lp
            k = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[kl_estimator]
            total += kl_coef * s * r * k - entropy_coef * s * batch["entropy"][t].item()
            slope += kl_coef * s * r * -d
        gradient.append(slope)
    return total, gradient, {k: v / counts["kept"] for k, v in counts.items() if counts["kept"]}


@pytest.mark.parametrize("old_mode", ["recompute", "current", "rollout"])
@pytest.mark.parametrize("surrogate", ["ppo", "cispo", "reinforce"])
@given(
    seed=st.integers(0, 10_000), dual_clip=st.sampled_from([None, 1.2, 3.0]), coefficients=st.booleans(),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
)  # fmt: skip
def test_loss_and_gradient_equal_the_formula_token_by_token(
    surrogate: Any, old_mode: Any, seed: int, dual_clip: float | None, coefficients: bool, kl_estimator: str
) -> None:
    batch = random_batch([4, 0, 7, 1], seed)
    scale = torch.rand(12, generator=torch.Generator().manual_seed(seed)).double() * batch["loss_mask"]
    options: dict[str, Any] = {"kl_coef": 0.3 * coefficients, "entropy_coef": 0.1 * coefficients}
    options |= {"kl_estimator": kl_estimator, "surrogate": surrogate}
    options["dual_clip"] = dual_clip if surrogate == "ppo" else None
    old = None if old_mode == "current" else batch["old"]
    current = batch["current"].clone().requires_grad_()
    loss, metrics = policy_loss(
        current, old, batch["advantages"], corrected_of(batch, RolloutCorrection(old=old_mode)), scale=scale,
        reference_logprobs=batch["reference"], entropy=batch["entropy"], options=LossOptions(**options),
    )  # fmt: skip
    loss.backward()
    expected, gradient, shares = loss_by_hand(batch, scale, batch["current"] if old is None else old, **options)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert current.grad.tolist() == pytest.approx(gradient, rel=1e-9, abs=1e-12)
    if surrogate != "reinforce" and batch["mask"].any():
        values = metrics.values()
        for name in ("clip_high", "clip_low", *(["dual_clip"] if options["dual_clip"] else [])):
            assert values[name] == pytest.approx(shares.get(name, 0.0))


def test_kl_and_entropy_count_rejected_tokens() -> None:
    batch = random_batch([9], 3)
    scale = batch["loss_mask"].double()
    nothing_kept = dict(batch, mask=batch["mask"] & False)
    full, rejected = evaluate(batch, scale)[2].values(), evaluate(nothing_kept, scale)[2].values()
    assert full["kl_ref"] == rejected["kl_ref"] and full["entropy"] == rejected["entropy"]
    assert rejected["policy_loss"] == 0 != full["policy_loss"]


def test_the_loss_does_not_depend_on_the_cut_into_micro_batches() -> None:
    batch = random_batch([4, 7, 1, 6], 5)
    asked: Any = {"aggregation": "seq-mean-token-mean", "cu_seqlens": batch["cu_seqlens"]}
    scale = loss_scale(batch["loss_mask"], batch["mask"], **asked)
    loss, gradient, metrics = evaluate(batch, scale)
    per_token = {name: value for name, value in batch.items() if name != "cu_seqlens"}
    for cut in ([18], [4, 7, 1, 6], [11, 7], [5] * 3 + [3]):
        parts = [
            evaluate(dict(zip(per_token, values, strict=True)), part)
            for *values, part in zip(*(v.split(cut) for v in per_token.values()), scale.split(cut), strict=True)
        ]
        torch.testing.assert_close(sum(part[0] for part in parts), loss, atol=1e-14, rtol=1e-12)
        torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient, atol=0, rtol=0)
        pooled = MetricSums()
        for part in parts:
            pooled.merge(part[2])
        assert pooled.values() == pytest.approx(metrics.values(), rel=1e-9, nan_ok=True)


def test_a_micro_batch_without_kept_tokens_gives_a_differentiable_zero() -> None:
    for lengths in ([5], [0]):
        batch = random_batch(lengths)
        batch["mask"] = batch["mask"] & False
        loss, gradient, metrics = evaluate(batch, torch.zeros(sum(lengths), dtype=torch.float64))
        assert loss.item() == 0 and gradient.tolist() == [0.0] * sum(lengths)
        metrics.values()


@pytest.mark.parametrize("surrogate", ["ppo", "cispo", "reinforce"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_dropped_tokens_have_exactly_no_gradient_whatever_they_hold(bad: float, surrogate: Any) -> None:
    batch = random_batch([8], 1)
    batch["loss_mask"][:] = True
    batch["mask"] = torch.tensor([True, False, False, True, False, True, True, True])
    batch["weights"] = batch["mask"].double()
    scale = torch.ones(8, dtype=torch.float64)
    scale[4] = 0
    for name, row in (("current", 1), ("old", 2), ("weights", 1)):
        batch[name][row] = bad
    for name in ("current", "old", "reference", "entropy", "advantages"):
        batch[name][4] = bad
    current = batch["current"].clone().requires_grad_()
    given = batch["old"], batch["advantages"], corrected_of(batch)
    loss, _ = policy_loss(current, *given, scale=scale, options=LossOptions(surrogate=surrogate))
    loss.backward()
    assert loss.isfinite() and current.grad is not None and current.grad.isfinite().all()
    assert (current.grad[[1, 2, 4]] == 0).all() and (current.grad[[0, 3, 5]] != 0).any()


@pytest.mark.parametrize("surrogate", ["ppo", "cispo", "reinforce"])
def test_a_kept_token_that_the_trainer_holds_impossible_adds_nothing(surrogate: Any) -> None:
    one = torch.ones(3, dtype=torch.float64)
    current = torch.tensor([-1.0, -INF, -1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0, -1.0, -INF], dtype=torch.float64)
    corrected = Corrected(one, one.bool(), one.bool(), MetricSums())
    options = LossOptions(kl_coef=1.0, surrogate=surrogate)
    loss, _ = policy_loss(current, old, -one, corrected, scale=one, reference_logprobs=old, options=options)
    loss.backward()
    assert loss.isfinite() and current.grad is not None
    assert current.grad[1:].tolist() == [0, 0] and current.grad[0] != 0


def test_a_nan_of_the_trainer_in_a_kept_token_is_not_hidden() -> None:
    one = torch.ones(2)
    corrected = Corrected(one, one.bool(), one.bool(), MetricSums())
    assert policy_loss(torch.tensor([NAN, -1.0], requires_grad=True), -one, one, corrected, scale=one).loss.isnan()


def test_far_ratios_are_bounded_before_exp() -> None:
    one = torch.ones(2)
    corrected = Corrected(one, one.bool(), one.bool(), MetricSums())
    current, old = torch.tensor([0.0, -500.0], requires_grad=True), torch.tensor([-500.0, 0.0])
    options = LossOptions(kl_coef=1e-9)
    loss, _ = policy_loss(current, old, -one, corrected, scale=one, reference_logprobs=-300 * one, options=options)
    loss.backward()
    assert loss.isfinite() and current.grad is not None and current.grad.isfinite().all()


@pytest.mark.parametrize("distance", [-700.0, -24.0, -20.0, -5.0, 5.0, 20.0, 24.0, 700.0])
@pytest.mark.parametrize("log_ratio", [-30.0, 0.0, 20.0, 30.0])
@pytest.mark.parametrize("bound", [5.0, 20.0])
def test_the_gradient_of_the_kl_term_points_to_the_reference_beyond_the_log_ratio_bound(
    bound: float, log_ratio: float, distance: float
) -> None:
    current = torch.tensor([-750.0], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    corrected = Corrected(0 * one, one < 0, one < 0, MetricSums(), RolloutCorrection(log_ratio_bound=bound))
    asked: Any = {"reference_logprobs": current.detach() + distance, "options": LossOptions(kl_coef=1.0)}
    loss, _ = policy_loss(current, current.detach() - log_ratio, one, corrected, scale=one, **asked)
    loss.backward()
    expected = -math.exp(min(log_ratio, bound)) * min(max(distance, -bound), bound)
    assert current.grad is not None and current.grad.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("aggregation", "value"),
    [("token-mean", 1), ("seq-mean-token-mean", 1), ("seq-mean-token-sum", 15), ("seq-mean-token-sum-norm", 0.15)],
)
def test_the_metric_loss_is_the_loss_under_every_aggregation(aggregation: Any, value: float) -> None:
    one, cu_seqlens = torch.ones(30), torch.tensor([0, 10, 30])
    corrected = Corrected(one, one.bool(), one.bool(), MetricSums())
    scale = loss_scale(one, one, aggregation=aggregation, cu_seqlens=cu_seqlens, max_length=100)
    pooled, total = MetricSums(), 0.0
    for part in (slice(0, 7), slice(7, 30)):
        ones = one[part]
        micro = Corrected(ones, ones.bool(), corrected.bad_sequences, MetricSums())
        asked: Any = {"reference_logprobs": ones + 1, "options": LossOptions(kl_coef=0.5)}
        loss, metrics = policy_loss(ones, ones, -ones, micro, scale=scale[part], **asked)
        total += loss.item()
        pooled.merge(metrics)
    values = pooled.values()
    assert values["policy_loss"] == pytest.approx(value) and values["loss"] == pytest.approx(total)
    assert values["kl_ref"] == pytest.approx(math.e - 2)
    assert values["loss"] == pytest.approx(value * (1 + 0.5 * (math.e - 2)))
