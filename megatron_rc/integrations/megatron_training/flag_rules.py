"""Flags of a program around `megatron.training.pretrain` that the patch refuses."""

from megatron_rc.integrations.facts import captures_iteration
from megatron_rc.integrations.flag_rules import FlagRule

NAME = "megatron-training"

RULES = (
    FlagRule("full-iteration-graph", captures_iteration,
        "a captured iteration replays the loss function without calling it, so metrics and response lengths are lost",
        "Set --cuda-graph-impl to local, transformer_engine or none.", good="the loss function is called in every step",
    ),
)  # fmt: skip
