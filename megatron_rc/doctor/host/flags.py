"""The flags of somebody else's training script, as far as their words tell."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import yaml

from megatron_rc import schema
from megatron_rc.doctor.registry import Undecided

EXPANDED = "Let the script echo its command, and give that."


class Flags:
    """Flags by name without dashes in front; a flag given twice has its last value, as in argparse.

    Args:
        words: of a command line, with or without the programs and the script in front of the flags.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._values: dict[str, list[str]] = {}
        name = ""
        for word in words:
            if re.match(r"--[A-Za-z]", word):
                given, equals, value = word[2:].partition("=")
                name = given.replace("_", "-")
                self._values.pop(name.removeprefix("no-"), None)
                self._values[name] = [value] if equals else []
            elif name:
                self._values[name].append(word)

    @classmethod
    def of_file(cls, path: Path) -> Flags:
        """The words of a file: flags alone, or the launch script with them.

        Raises:
            ValueError: no such file, or a quote that is not closed.
        """
        if not path.is_file():
            raise ValueError(f"flags_file must be a file, found none at {path}")
        try:
            return cls(shlex.split(path.read_text().replace("\\\n", " "), comments=True))
        except ValueError as error:
            raise ValueError(f"{path} cannot be split into words: {error}") from None

    def __contains__(self, name: str) -> bool:
        """Whether a switch is on: given, and not taken back by a later --no-NAME."""
        return name in self._values

    def text(self, name: str, default: str) -> str:
        """The first value of a flag.

        Raises:
            Undecided: it is a shell variable.
        """
        given = self._values.get(name)
        if not given:
            return default
        if "$" in given[0]:
            raise Undecided(f"--{name} is {given[0]}, a variable of the shell", EXPANDED)
        return given[0]

    def number(self, name: str, default: float) -> float:
        """The value of a flag that takes a number.

        Raises:
            ValueError: it is none.
            Undecided: it is a shell variable.
        """
        found = self.text(name, str(default))
        try:
            return float(found)
        except ValueError:
            raise ValueError(f"--{name} must be a number, got {found!r}") from None

    @property
    def variables(self) -> tuple[str, ...]:
        """Words that the shell would have replaced, perhaps by flags."""
        return tuple(dict.fromkeys(word for word in self.words if word.startswith("$")))

    def names_beginning(self, *starts: str) -> list[str]:
        return [name for name in self._values if name.startswith(starts)]

    def namespace(self) -> Namespace:
        """As the host's parser would have it, types guessed, with the keys of --custom-config-path on top.

        Raises:
            Undecided: that file cannot be read here.
        """
        fields = {n.replace("-", "_"): yaml.safe_load(v[0]) if v else True for n, v in self._values.items()}
        path = self.text("custom-config-path", "")
        if path:
            if not Path(path).is_file():
                raise Undecided(f"--custom-config-path {path} cannot be read here", "Run doctor where that file is.")
            fields |= schema.load_yaml(Path(path))
        return Namespace(**fields)
