"""The arguments and options of the loss: layouts, dtypes, what has a gradient, what is refused; no call waits."""

from typing import Any, get_args

import pytest
import torch
from distributed import Collectives
from loss_batch import corrected_of, evaluate, grouped, padded, random_batch
from refusals import refusal
from story import story

from megatron_rc import Corrected, MetricSums, loss_scale, policy_loss
from megatron_rc import loss as room
from megatron_rc.correction.settings import RolloutCorrection, Surrogate, Weight
from megatron_rc.loss import advantages as baselines
from megatron_rc.loss import reference
from megatron_rc.loss.options import AGGREGATIONS, KL_ESTIMATORS, SURROGATES, LossOptions
from speed.operations import OperationCount

MASK_OF_FLOATS = Corrected(torch.ones(2), torch.ones(2), torch.ones(2).bool(), MetricSums())


def test_padded_layout_takes_advantages_by_sequence() -> None:
    lengths = [3, 5, 2]
    batch = random_batch(lengths, 2)
    advantages = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    batch["advantages"] = baselines.expand_to_tokens(advantages, batch["cu_seqlens"], 10)
    packed = evaluate(batch, batch["loss_mask"].double())
    rows = {name: padded(value, lengths) for name, value in batch.items() if name != "cu_seqlens"}
    for given in (advantages, advantages[:, None]):
        in_rows = evaluate(rows | {"advantages": given}, rows["loss_mask"].double())
        torch.testing.assert_close(in_rows[0], packed[0])
        assert torch.equal(in_rows[1], padded(packed[1], lengths))
        assert in_rows[2].values() == pytest.approx(packed[2].values(), nan_ok=True)


def test_the_entropy_metric_is_its_mean_over_the_loss_tokens() -> None:
    batch = random_batch([9], 3)
    values = evaluate(batch, batch["loss_mask"].double())[2].values()
    assert values["entropy"] == pytest.approx(batch["entropy"][batch["loss_mask"]].mean().item())


def test_no_collective_runs_and_nothing_waits_for_the_device() -> None:
    batch = random_batch([4, 7], 5)
    asked: Any = {"aggregation": "seq-mean-token-mean", "cu_seqlens": batch["cu_seqlens"]}
    with OperationCount() as count, Collectives() as collectives:
        scale = loss_scale(batch["loss_mask"], batch["mask"], **asked)
        rewards, groups = torch.rand(6), torch.arange(6) // 2
        for of_groups in (baselines.rloo_advantages, baselines.grpo_advantages, baselines.equal_reward_groups):
            of_groups(rewards, groups)
        evaluate(batch, scale)
    assert count.operations.total() > 50 and not count.waits and not collectives.seen


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"correction": RolloutCorrection(Weight(), old="rollout")}, "weight must be None when old is 'rollout' and"),
        ({"correction": RolloutCorrection(old="current")}, "old_logprobs must be None when old is 'current'"),
        ({"old_logprobs": None, "correction": RolloutCorrection()}, "old_logprobs must be given when old is 'recomput"),
        ({"surrogate": "gspo"}, "surrogate must be one of 'ppo', 'cispo', 'reinforce', got 'gspo'"),
        ({"clip_lower": 1.5}, "clip_lower must be in [0, 1] and clip_upper >= 0, got clip_lower=1.5"),
        ({"dual_clip": 0.9}, "dual_clip must be > 1, got 0.9"),
        ({"correction": RolloutCorrection(log_ratio_bound=0.2)}, "log_ratio_bound must be >= log(1 + clip_upper) = "),
        (
            {"correction": RolloutCorrection(log_ratio_bound=0.5), "dual_clip": 3.0},
            "log_ratio_bound must be >= log(dual_clip) = 1.10, got 0.5",
        ),
        ({"kl_coef": 0.1}, "reference_logprobs must be given"),
        ({"entropy_coef": 0.1}, "entropy must be given"),
        ({"advantages": [1.0, 1.0]}, "advantages must be of type Tensor, got list"),
        ({"scale": [1.0, 1.0]}, "scale must be of type Tensor, got list"),
        ({"correction": "token-tsi"}, "unknown preset 'token-tsi'; did you mean 'token-tis'?"),
        ({"advantages": torch.ones(2, 1)}, "advantages must have the shape (2,) of current_logprobs, got (2, 1)"),
        ({"advantages": torch.ones(3)}, "advantages must have the shape (2,) of current_logprobs, got (3,)"),
        ({"corrected": RolloutCorrection()}, "corrected must be of type Corrected, got RolloutCorrection"),
        ({"corrected": MASK_OF_FLOATS}, "corrected.mask must be bool, got torch.float32"),
        ({"kl_estimator": "k4"}, "kl_estimator must be"),
        ({"kl_coef": -0.1}, "kl_coef must be"),
        ({"backend": "triton"}, "current_logprobs must be on a CUDA device for backend 'triton', got cpu"),
    ],
)
def test_bad_loss_arguments_are_named(arguments: dict[str, Any], sentence: str) -> None:
    one = torch.ones(2)
    given = {"current_logprobs": one, "old_logprobs": one, "advantages": one, "scale": one, **arguments}
    correction = given.pop("correction", RolloutCorrection())

    def loss() -> None:
        given.setdefault("corrected", Corrected(one, one.bool(), one.bool(), MetricSums(), correction))
        policy_loss(**grouped(**given))

    assert refusal(loss).startswith(sentence)


def test_the_story_of_the_room_is_the_loss() -> None:
    batch = random_batch([9, 30], 3)
    mask, corrected, leaves = batch["loss_mask"], corrected_of(batch), [batch["current"].clone() for _ in range(2)]
    given = batch["old"], batch["advantages"], corrected
    simple = story(room)["simple_policy_loss"](leaves[0].requires_grad_(), *given, mask)
    real = policy_loss(leaves[1].requires_grad_(), *given, scale=loss_scale(mask, batch["mask"]).double()).loss
    for found in (simple, real):
        found.backward()
    torch.testing.assert_close(simple, real, rtol=1e-6, atol=0)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-6, atol=0)


def test_every_row_has_a_sentence_and_its_formula() -> None:
    assert reference._SURROGATES.keys() == SURROGATES.keys()
    assert (*get_args(Surrogate),) == (*SURROGATES,)
    assert reference._KL_ESTIMATORS.keys() == KL_ESTIMATORS.keys()
    rows = [*SURROGATES.values(), *AGGREGATIONS.values(), *baselines.ADVANTAGES.values()]
    assert all(sentence.endswith(".") for sentence in [*(row.sentence for row in rows), *KL_ESTIMATORS.values()])


def test_only_ppo_on_the_ratio_to_the_sampler_refuses_a_weight_on_top() -> None:
    for surrogate, correction in (
        ("reinforce", RolloutCorrection(weight=Weight(), old="rollout")),
        ("ppo", RolloutCorrection(old="rollout")),
        ("ppo", RolloutCorrection(weight=Weight())),
    ):
        LossOptions(surrogate=surrogate).check(correction)
