"""`correct` for tests: the fields of its `Extras` are arguments of their own, so that batches can hand over any."""

from dataclasses import fields
from typing import Any

from correction_book import gapped

from megatron_rc.correction import correct as of_package
from megatron_rc.correction.correct import Corrected
from megatron_rc.correction.inputs import Extras
from megatron_rc.correction.settings import RolloutCorrection


def correct(*pair: Any, **given: Any) -> Corrected:
    own = {field.name: given.pop(field.name) for field in fields(Extras) if field.name in given}
    return of_package.correct(*pair, extras=Extras(**own), **given)


def on_gaps(
    correction: RolloutCorrection, *log_ratios: float, lengths: list[int] | None = None, **options: Any
) -> Corrected:
    """The correction of tokens with these log-ratios, which all count."""
    train, rollout, mask, cu_seqlens = gapped(*log_ratios, lengths=lengths)
    return correct(train, rollout, mask, correction=correction, cu_seqlens=cu_seqlens, **options)
