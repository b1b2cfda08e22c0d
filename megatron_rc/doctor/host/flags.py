"""Best-effort parser for the flags of a host's training script."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from megatron_rc import schema
from megatron_rc.doctor.host.script import program_of, read_script
from megatron_rc.doctor.registry import Undecided

EXPANDED = "Let the script echo its command, and give that."
THERE = "Run doctor where that file is."
_VARIABLE = re.compile(r"(\$(\w+|\{.*\}))+")
"""A word of variables alone; one with text behind them, as a path has, can be no flag."""
CHECKPOINTS = ("hf-checkpoint", "path", "model_name")
"""Names of settings whose value is a checkpoint; doctor judges one by its name where the folder is a variable."""
_LIST = re.compile(r"\$\{\w+\[[@*]\]\}$|\$[@*]$")


class Flags:
    """Flags of a command line by name, without leading dashes; of a repeated flag the last counts, as in argparse."""

    def __init__(
        self, words: Sequence[str], maybe: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        """A command line, the words it also has if a branch of its script runs, and the variables the script sets."""
        self.words, self.maybe, self.variables = tuple(words), tuple(maybe), dict(variables or {})
        self._values = _values_of(words)
        self._in_branches = _values_of(maybe)

    @classmethod
    def of_file(cls, path: Path) -> "Flags":
        """The flags in a file, which may be a launch script; ValueError if it is missing or a quote is not closed."""
        if not path.is_file():
            raise ValueError(f"flags_file must be a file, found none at {path}")
        script = read_script(path)
        plain = {name: value for name in script.variables if (value := script.value(name)) is not None}
        return cls(script.words, script.maybe, plain)

    def __contains__(self, name: str) -> bool:
        """True if a switch is on: given, and not turned off by a later --no-NAME."""
        return name in self._values

    def text(self, name: str, default: str) -> str:
        """The first value of a flag; Undecided if it is a shell variable."""
        given = self._values.get(name)
        if not given:
            self.require_absence(name)
            return default
        if not is_spelled_out(name, given[0]):
            raise Undecided(f"--{name} is {given[0]}, a variable of the shell", EXPANDED)
        return given[0]

    @property
    def hiding(self) -> str:
        """The first of `hidden`, as a sentence names them: dozens would fill the screen."""
        return ", ".join(self.hidden[:5])

    @property
    def hidden(self) -> tuple[str, ...]:
        """Words that the shell would replace; flags may hide in them."""
        words = pairwise(("", *self.words[program_of(self.words) :], *self.maybe))
        free = [(word, not before.startswith("-") or "=" in before) for before, word in words]
        found = [word for word, is_free in free if _LIST.match(word) or (is_free and _VARIABLE.fullmatch(word))]
        return tuple(dict.fromkeys(found))

    def require_absence(self, name: str) -> None:
        """Raise Undecided if a flag that is not visible may hide in a shell variable."""
        if name in self._values or f"no-{name}" in self._values:
            return
        if name in self._in_branches or f"no-{name}" in self._in_branches:
            raise Undecided(f"--{name} is in a branch of the script that may run or not", EXPANDED)
        if self.hidden:
            raise Undecided(f"--{name} may be set in {self.hiding}", EXPANDED)

    @property
    def patched(self) -> bool:
        """Whether `megatron-rc patch` starts the script."""
        return any(name.startswith("rc-") for name in self._values)


class Arguments:
    """The arguments that the host's parser would make of flags: `arguments.train_iters` is the value of --train-iters.

    Reading a value raises Undecided if a shell variable hides it, and ValueError if it is not the number it must be.

    Args:
        defaults: values of arguments whose flags are not given; they also determine the types.
        config_flag: flag that names a YAML file whose keys are arguments, too; None if the host has no such flag.
    """

    def __init__(self, flags: Flags, defaults: Mapping[str, Any], config_flag: str | None) -> None:
        self._flags, self._defaults, self._config_flag = flags, defaults, config_flag
        self.patched = flags.patched

    @property
    def program(self) -> str:
        """The words that start the program: its file or module, and what comes before it."""
        return " ".join(self._flags.words[: program_of(self._flags.words)])

    def __getattr__(self, name: str) -> Any:
        flag, default = name.replace("_", "-"), self._defaults.get(name)
        try:
            if name in self._config_keys:
                return self._config_keys[name]
        except Undecided:
            if flag not in self._flags:
                raise
        if flag not in self._flags:
            self._flags.require_absence(flag)
        if isinstance(default, bool):
            return flag in self._flags
        if flag not in self._flags:
            if name in self._defaults:
                return default
            raise AttributeError(name)
        text = self._flags.text(flag, "true" if default is None else str(default))
        if not isinstance(default, int | float):
            return yaml.safe_load(text)
        try:
            return type(default)(text)
        except ValueError:
            raise ValueError(f"--{flag} must be a number, got {text!r}") from None

    @cached_property
    def _config_keys(self) -> dict[str, Any]:
        path = self._flags.text(self._config_flag, "") if self._config_flag else ""
        if path and not Path(path).is_file():
            raise Undecided(f"--{self._config_flag} {path} cannot be read here", THERE)
        return schema.load_yaml(Path(path)) if path else {}


def is_spelled_out(name: str, value: str) -> bool:
    """Whether no variable of the shell hides what a value says; of a checkpoint only the last part of its path."""
    return "$" not in (value.rstrip("/").rpartition("/")[2] if name in CHECKPOINTS else value)


def _values_of(words: Sequence[str]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            given, equals, value = word[2:].partition("=")
            name = given.replace("_", "-")
            values.pop(name.removeprefix("no-"), None)
            values[name] = [value] if equals else []
        elif name:
            values[name].append(word)
    return values
