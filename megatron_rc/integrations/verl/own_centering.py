"""verl's own score centering, for doctor: what makes it stop at the start. Read at commit c6236f515b81."""

from typing import Any

from megatron_rc.integrations.flag_rules import first_wrong
from megatron_rc.integrations.verl.refusals import ACTOR, CORRECTION, FUSED, LOSS, ROLLOUT, STRATEGY

OF_ACTOR = f"{ACTOR}.policy_loss.rollout_correction"
"""The actor's copy of the correction; with loss_mode=bypass_mode the loss reads this one."""
_SIDES = {"bypass_mode": False, "loss_type": "ppo_clip", "rollout_is": None, "rollout_is_threshold": 2.0}
_TOP, _ENGINE, _FUSED_ACTOR = f"{ROLLOUT}.topk_log_probs", f"{ROLLOUT}.name", f"{ACTOR}.use_fused_kernels"

DEFAULTS: dict[str, Any] = {
    **{f"{OF_ACTOR}.{name}": default for name, default in _SIDES.items()},
    **dict.fromkeys((f"{OF_ACTOR}.score_centering", f"{OF_ACTOR}.rollout_is_batch_normalize", _FUSED_ACTOR), False),
    **{f"{OF_ACTOR}.rollout_rs": None, _TOP: 0, _ENGINE: None},
}


def acts(args: Any) -> bool:
    """Whether the actor's loss reads its own copy of the correction, and that says what the trainer's says."""
    same = all(args[f"{OF_ACTOR}.{name}"] == args[f"{CORRECTION}.{name}"] for name in ("loss_type", "rollout_rs"))
    return bool(args[LOSS] == "bypass_mode" and same)


def is_asked_for(args: Any) -> bool:
    return any(args[f"{side}.score_centering"] for side in (CORRECTION, OF_ACTOR))


def mistake(args: Any, is_megatron: bool) -> str:
    """The setting under which verl does not start with its score centering; "" where it starts, or has none."""
    if not is_asked_for(args):
        return ""
    flags = [f"{side}.score_centering" for side in (CORRECTION, OF_ACTOR)]
    return first_wrong(
        (not all(args[flag] for flag in flags), f"{' and '.join(flags)} must both be True"),
        (is_megatron, f"{STRATEGY} must be fsdp or fsdp2: verl has no centering with Megatron"),
        (args[FUSED] or args[_FUSED_ACTOR], f"{FUSED} and {_FUSED_ACTOR} must be False: centering reads the logits"),
        (args["distillation.enabled"], "distillation.enabled must be False"),
        (args[LOSS] != "bypass_mode", f"{LOSS} must be bypass_mode"),
        (args[_TOP] <= 0, f"{_TOP} must be above 0, such as 128"),
        (args[_ENGINE] not in (None, "vllm"), f"{_ENGINE} must be vllm, which alone returns {_TOP}"),
        (not args[f"{ROLLOUT}.calculate_log_probs"], f"{ROLLOUT}.calculate_log_probs must be True"),
        (args[f"{ROLLOUT}.logprobs_mode"] != "processed_logprobs",
         f"{ROLLOUT}.logprobs_mode must be processed_logprobs: q is the distribution that draws"),
        (args[f"{ROLLOUT}.top_p"] != 1 or args[f"{ROLLOUT}.top_k"] != -1,
         f"{ROLLOUT}.top_p=1 and {ROLLOUT}.top_k=-1 are needed: the top ids are those before filters"),
        (args[f"{OF_ACTOR}.rollout_is"] not in (None, "token"), f"{OF_ACTOR}.rollout_is must be token or null"),
        (args[f"{OF_ACTOR}.rollout_is_batch_normalize"], f"{OF_ACTOR}.rollout_is_batch_normalize must be False"),
        *(
            (args[f"{OF_ACTOR}.{name}"] != args[f"{CORRECTION}.{name}"],
             f"{OF_ACTOR}.{name} must be that of {CORRECTION}, {args[f'{CORRECTION}.{name}']}")
            for name in _SIDES
        ),
        (args[f"{CORRECTION}.loss_type"] != "reinforce" or not args[f"{CORRECTION}.bypass_mode"],
         f"{CORRECTION}.bypass_mode must be True, and loss_type reinforce"),
    )  # fmt: skip
