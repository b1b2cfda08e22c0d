"""Configurations of NeMo-RL that a patched run refuses, before its cluster is built."""

from functools import partial
from typing import Any, NoReturn

from megatron_rc.integrations.flag_rules import refuse_by_path
from megatron_rc.integrations.nemo_rl.flag_rules import DEFAULTS, SAMPLING_RULES
from megatron_rc.integrations.nemo_rl.session import Session
from megatron_rc.integrations.refusals import value_at
from megatron_rc.integrations.symbols import Function


def refuse(session: Session, config: Any) -> None:
    """Refuse a configuration (MasterConfig) that the patch cannot work with, by the first key that must change."""
    at = partial(value_at, config)
    corrects, decays = session.correction is not None, session.lr_rule is not None
    truncation = at("loss_fn.truncated_importance_sampling_type")
    weight = session.correction.weight if session.correction is not None else None
    for wrong, sentence in (
        (at("data_plane.enabled"), "data_plane.enabled must be false in a patched run: with it no rollout is on the "
         "process that runs the script, where it is corrected"),
        (corrects and at("loss_fn.force_on_policy_ratio"), "loss_fn.force_on_policy_ratio must be false in a corrected "
         "run: it needs the log-probs before the update, which the host then leaves out"),
        (corrects and truncation is not None, "loss_fn.truncated_importance_sampling_type must be null next to the "
         f"correction of megatron_rc, got {truncation!r}: one of them corrects"),
        (corrects and at("loss_fn.use_importance_sampling_correction") and not demanded(config),
         "loss_fn.use_importance_sampling_correction must be false next to the correction of megatron_rc: pi / mu "
         "would be counted twice"),
        (corrects and at("loss_fn.score_centering"), "loss_fn.score_centering must be false next to the correction of "
         "megatron_rc: its term is centred for the host's own weights"),
        (at("loss_fn.sequence_level_importance_ratios") and weight is not None and weight.level != "geometric",
         "weight.level must be 'geometric' with loss_fn.sequence_level_importance_ratios, whose ratio is the geometric "
         f"mean over the sequence, got {weight.level if weight else None!r}"),
        (decays and not at("policy.megatron_cfg.enabled"), "policy.megatron_cfg.enabled must be true for lr_rule, "
         "which scales Megatron's scheduler"),
        (decays and at("policy.quant_cfg") is not None, "policy.quant_cfg must be null for lr_rule: its workers are "
         "not those that have the rule"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(sentence)
    if corrects:
        refuse_by_path(SAMPLING_RULES, at, DEFAULTS)


def demanded(config: Any) -> bool:
    """Whether the host refuses to run without use_importance_sampling_correction."""
    fp8 = value_at(config, "policy.generation.vllm_cfg.precision") == "fp8"
    return bool(value_at(config, "grpo.async_grpo.enabled")) or fp8


def refuse_trainer(original: Function, session: Session, *args: Any, **kwargs: Any) -> NoReturn:
    """Replaces the setup of a trainer that the patch does not correct: it always raises ValueError."""
    raise ValueError(
        f"nemo-rl is corrected in examples/run_grpo.py and scripts like it, not in {original.__module__}: drop "
        "`megatron_rc patch`, or run GRPO with data_plane.enabled=false"
    )
