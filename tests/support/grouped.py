"""Flat options of a test case as arguments of the loss and of the head, which take them in groups."""

from dataclasses import fields
from typing import Any

from megatron_rc.logprobs.inputs import HeadInputs
from megatron_rc.loss.options import LossOptions


def grouped(**flat: Any) -> dict[str, Any]:
    """``options`` and ``head`` of the fields of `LossOptions` and `HeadInputs`; other arguments stay as they are."""
    for name, kind in (("options", LossOptions), ("head", HeadInputs)):
        own = {field.name: flat.pop(field.name) for field in fields(kind) if field.name in flat}
        if own:
            flat[name] = kind(**own)
    return flat
