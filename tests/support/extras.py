"""`correct` for tests: the fields of its `Extras` are arguments of their own, so that batches can hand over any."""

from dataclasses import fields
from typing import Any

from megatron_rc.correction import correct as of_package
from megatron_rc.correction.correct import Corrected
from megatron_rc.correction.inputs import Extras


def correct(*pair: Any, **given: Any) -> Corrected:
    own = {field.name: given.pop(field.name) for field in fields(Extras) if field.name in given}
    return of_package.correct(*pair, extras=Extras(**own), **given)
