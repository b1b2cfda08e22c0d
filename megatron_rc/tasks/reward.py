"""Reward functions of the user, named as module:function: how they are found, imported and called."""

import importlib
import math
import numbers
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rc.schema import one_line

RewardFunction = Callable[[str, str, str], Any]


def found_beside(name: str, *folders: Path) -> str:
    """``name`` with the file of its module, if one of ``folders`` holds it; otherwise ``name`` as it is.

    The file is imported by its path, and no folder joins sys.path: children would inherit it, and SGLang would take a
    neighbour called triton_kernels for Triton's package of that name.
    """
    module_name, colon, function_name = name.rpartition(":")
    for folder in folders if module_name.isidentifier() else ():
        if (file := (folder / f"{module_name}.py").absolute()).is_file():
            return f"{file}{colon}{function_name}"
    return name


def load_reward(name: str) -> RewardFunction:
    """Import ``module:function`` or ``FILE.py:function``.

    Raises ValueError for another form, and for what cannot be imported or called.
    """
    module_name, colon, function_name = name.rpartition(":")
    if not (colon and module_name and function_name):
        raise ValueError(f"reward must be given as module:function, got {name!r}")
    try:
        own = module_name.endswith(".py")
        names = runpy.run_path(module_name) if own else vars(importlib.import_module(module_name))
    except Exception as error:  # importing runs the user's file, which may raise anything
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        looked = f"; no {module_name}.py lies beside the YAML or the file of task.options.path" if missing else ""
        raise ValueError(f"reward {name!r}: importing {module_name!r} failed: {one_line(error)}{looked}") from error
    function: Any = names.get(function_name)
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
