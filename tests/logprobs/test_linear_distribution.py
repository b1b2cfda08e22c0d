"""The distribution by the fused head against that of logits, which has the fp64 truth in its own tests."""

from typing import Any

import pytest
import torch
from head_case import Case, distance, head_case
from logprobs_truth import random_support

from megatron_rc.logprobs.inputs import HeadInputs
from megatron_rc.logprobs.linear import linear_distribution
from megatron_rc.logprobs.logits import vocab_parallel_distribution

WANTED = {"with_kept_mass": True, "with_varentropy": True}


def options_of(case: Case, kept: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": 0.8, "mask": case.batch["loss_mask"], "vocab_size": 13}
    if kept:
        options["support"] = random_support(case.targets, 13, torch.Generator().manual_seed(0))
    return options


@pytest.mark.parametrize("kept", [False, True], ids=["all ids", "kept ids"])
@pytest.mark.parametrize("with_rows", [False, True], ids=["", "rows"])
@pytest.mark.parametrize("chunk", [4, 11])
def test_every_chunk_gives_what_the_logits_give(chunk: int, with_rows: bool, kept: bool) -> None:
    case = head_case()
    options = options_of(case, kept)
    expected = vocab_parallel_distribution(case.hidden @ case.weight.T, case.targets, **options, **WANTED)
    if with_rows:
        options["rows"] = case.batch["loss_mask"].nonzero()[:, 0]
    found = linear_distribution(
        case.hidden, case.weight, case.targets, head=HeadInputs(chunk=chunk, **options), **WANTED
    )
    for name, value in expected._asdict().items():
        if value is None:
            assert name == "kept_mass" and not kept and found.kept_mass is None
        else:
            assert value.unique().numel() > 3 and distance(getattr(found, name), value) <= 1e-12, name
