"""Reward functions of the user, named as module:function: how they are imported and called."""

import importlib
import math
import numbers
from collections.abc import Callable
from typing import Any

from megatron_rc.schema import one_line

RewardFunction = Callable[[str, str, str], Any]


def load_reward(name: str) -> RewardFunction:
    """Import ``module:function``; raises ValueError for another form, and for what cannot be imported or called."""
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name):
        raise ValueError(f"reward must be given as module:function, got {name!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's file, which may raise anything
        raise ValueError(f"reward {name!r}: importing {module_name!r} failed: {one_line(error)}") from error
    function: Any = getattr(module, function_name, None)
    if function is None:
        raise ValueError(f"reward {name!r}: module {module_name!r} has no {function_name!r}")
    if not callable(function):
        raise ValueError(f"reward {name!r} must be a function, got {type(function).__name__}")
    return function


def score(function: RewardFunction, name: str, prompt: str, response: str, answer: str, place: str) -> float:
    """``function(prompt, response, answer)`` as a finite float; ValueError for anything else that it returns or raises.

    The error says ``name``, the function as the user wrote it, and ``place``, the file and line of the prompt.
    """
    try:
        value = function(prompt, response, answer)
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"reward {name!r} raised {one_line(error)} for {place}") from error
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"reward {name!r} must return a finite number, got {value!r} for {place}")
    return float(value)
