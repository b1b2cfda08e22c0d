"""Limits of numbers and choices in settings, each refused with one sentence that names the field."""

from typing import Any, get_args

from megatron_rc.schema import nearest


def check_positive(**values: float) -> None:
    """Raise ValueError for the first value that is not above 0; the keyword is the field's name."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be > 0, got {value!r}")


def check_at_least(bound: float, **values: float) -> None:
    """Raise ValueError for the first value below ``bound``; the keyword is the field's name."""
    for name, value in values.items():
        if not value >= bound:
            raise ValueError(f"{name} must be >= {bound}, got {value!r}")


def check_one_of(name: str, value: Any, choices: Any) -> None:
    """Raise ValueError, with the nearest known name, for a value that is none of those of a table or a Literal."""
    if value not in (known := get_args(choices) or list(choices)):
        names = ", ".join(map(repr, known))
        raise ValueError(f"{name} must be one of {names}, got {value!r}{nearest(value, known, otherwise='')}")
