"""Checks by name: each looks at facts and answers with a finding, which says what is wrong and how to fix it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar

Status = Literal["good", "error", "warning", "note"]

F = TypeVar("F")
Look = Callable[[F], "Finding"]


class Undecided(Exception):
    """A check lacks a fact. The sentence says which one, and ``fix`` says how to supply it."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.fix = fix


@dataclass(frozen=True)
class Finding:
    check: str
    status: Status
    found: str
    """One sentence."""
    fix: str = ""
    """One sentence naming the flag or field; empty when nothing has to be fixed."""
    compares: str = ""
    decided: bool = True
    """False: a fact was missing, so nothing was compared."""


good = partial(Finding, "", "good")
"""A match; `Check.run` adds the name of the check to this and to the mismatches below."""
error = partial(Finding, "", "error")
"""A mismatch that makes the job fail or the gradient wrong."""
warning = partial(Finding, "", "warning")
"""A mismatch that widens the gap between the policies, or an untested combination."""
note = partial(Finding, "", "note")
"""A difference worth knowing."""


@dataclass(frozen=True)
class Check(Generic[F]):
    name: str
    compares: str
    """What is compared with what, in a few words."""
    look: Look[F]

    def run(self, facts: F) -> Finding:
        """The finding about ``facts``; a note that names the missing fact where one is missing."""
        try:
            finding = self.look(facts)
        except Undecided as missing:
            finding = Finding("", "note", str(missing), missing.fix, decided=False)
        return replace(finding, check=self.name, compares=self.compares)


class Registry(Generic[F]):
    """Checks of one subject, in the order in which they were added."""

    def __init__(self, subject: str, *parts: "Registry[F]") -> None:
        """``subject``: what is checked, such as "SGLang server"; ``parts``: registries whose checks come first."""
        self.subject = subject
        self._checks: dict[str, Check[F]] = {}
        for part in parts:
            for check in part:
                self.add(check)

    def add(self, check: Check[F]) -> None:
        assert check.name not in self._checks, f"two checks are called {check.name!r}"
        self._checks[check.name] = check

    def check(self, look: Look[F]) -> Look[F]:
        """Decorator that adds a check: named as the function is, with what it compares as the docstring."""
        self.add(Check(look.__name__.replace("_", "-"), (look.__doc__ or "").rstrip("."), look))
        return look

    def __iter__(self) -> Iterator[Check[F]]:
        return iter(self._checks.values())

    def __getitem__(self, name: str) -> Check[F]:
        return self._checks[name]

    def run(self, facts: F) -> list[Finding]:
        """The findings of all checks, in order."""
        return [check.run(facts) for check in self]


class Known:
    """Facts by name; asking for one that is not known makes the check undecided."""

    def __init__(self, values: Mapping[str, Any] | None, source: str, *, fix: str = "") -> None:
        """None for ``values``: nothing is known. ``source`` does not report a value, and ``fix`` makes it known."""
        self._values, self._source, self._fix = values, source, fix

    def __bool__(self) -> bool:
        return self._values is not None

    def __contains__(self, name: str) -> bool:
        return self._values is not None and name in self._values

    def __getitem__(self, name: str) -> Any:
        values = self.require()
        if name not in values:
            raise Undecided(f"{self._source} does not report {name}", self._fix)
        return values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field that may be left out; undecided only when nothing at all is known."""
        return self.require().get(name, default)

    def require(self) -> Mapping[str, Any]:
        """All values; undecided when nothing is known."""
        if self._values is None:
            raise Undecided(f"{self._source} is not known", self._fix)
        return self._values


def worst(findings: Iterable[Finding]) -> Status:
    """The gravest status among the findings."""
    order: tuple[Status, ...] = ("good", "note", "warning", "error")
    return max((f.status for f in findings), key=order.index, default="good")
