"""The tables of the loss, what refuses a surrogate, and the story at the top of the room."""

import pytest
import torch
from loss_batch import corrected_of, random_batch
from story import story

from megatron_rc import loss as room
from megatron_rc.correction.settings import RolloutCorrection, Weight
from megatron_rc.loss import reference
from megatron_rc.loss.advantages import ADVANTAGES
from megatron_rc.loss.options import AGGREGATIONS, KL_ESTIMATORS, SURROGATES, LossOptions, check_surrogate
from megatron_rc.loss.policy_loss import policy_loss
from megatron_rc.loss.scale import loss_scale


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
    assert reference._KL_ESTIMATORS.keys() == KL_ESTIMATORS.keys()
    rows = [*SURROGATES.values(), *AGGREGATIONS.values(), *ADVANTAGES.values()]
    assert all(sentence.endswith(".") for sentence in [*(row.sentence for row in rows), *KL_ESTIMATORS.values()])


def test_ppo_on_the_ratio_to_the_sampler_refuses_a_weight_on_top() -> None:
    two_policy = RolloutCorrection(weight=Weight(), old="rollout")
    with pytest.raises(ValueError, match="weight must be None when old is 'rollout' and the surrogate is 'ppo'"):
        check_surrogate("ppo", two_policy)
    for surrogate, correction in (
        ("reinforce", two_policy),
        ("ppo", RolloutCorrection(old="rollout")),
        ("ppo", RolloutCorrection(weight=Weight())),
    ):
        LossOptions(surrogate=surrogate).check(correction)


@pytest.mark.parametrize(("name", "value"), [("kl_estimator", "k4"), ("kl_coef", -0.1)])
def test_options_that_no_loss_has_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        LossOptions(**{name: value})  # type: ignore[arg-type]
