"""Flags on a command line are read as the parser of a host would."""

from __future__ import annotations

import pytest

from megatron_rc.doctor.host.flags import Arguments, Flags


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--lr 1 --lr 2", 2.0),
        ("--lr=3", 3.0),
        ("--lr -4", -4.0),
        ("torchrun --nproc_per_node 8 train.py --wd 1", 5.0),
        ("--lr", 5.0),
    ],
)
def test_flags_are_read_as_argparse_reads_them(words: str, expected: float) -> None:
    assert Arguments(Flags(words.split()), {"lr": 5.0}, None).lr == expected


def test_underscores_and_negations_name_the_same_flag() -> None:
    flags = Flags(["--use_tis", "--rl-partial-rollouts", "--no-rl-partial-rollouts", "--no-x", "--x"])
    assert "use-tis" in flags and "rl-partial-rollouts" not in flags and "x" in flags
