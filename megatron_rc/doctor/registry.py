"""Checks by name: each looks at facts, and reports what it found and how to mend it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from megatron_rc.integrations.flag_rules import Severity

Status = Literal["good", "error", "warning", "note"]

F = TypeVar("F")


class Undecided(Exception):
    """A check lacks a fact: the sentence says which one, ``fix`` how to supply it."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.fix = fix


class Outcome(NamedTuple):
    """The result of a check, made by `good` or `bad`; the check adds its name and its own severity and fix."""

    found: str
    is_good: bool
    severity: Severity | None = None
    fix: str | None = None


def good(found: str) -> Outcome:
    return Outcome(found, is_good=True)


def bad(found: str, *, severity: Severity | None = None, fix: str | None = None) -> Outcome:
    """A mismatch; ``severity`` and ``fix`` only where they differ from those of the check."""
    return Outcome(found, is_good=False, severity=severity, fix=fix)


@dataclass(frozen=True)
class Finding:
    check: str
    status: Status
    found: str
    """One sentence."""
    fix: str = ""
    """One sentence naming the flag or field; empty when nothing has to be mended."""
    compares: str = ""
    decided: bool = True
    """False: a fact was missing, so nothing was compared."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Check(Generic[F]):
    name: str
    compares: str
    """What is compared with what, in a few words."""
    severity: Severity
    """Severity of a mismatch."""
    fix: str
    """How to mend a mismatch, one sentence naming the flag."""
    look: Callable[[F], Outcome]

    def run(self, facts: F) -> Finding:
        """Look at the facts; if one is missing, the finding is a note that names it."""
        try:
            outcome = self.look(facts)
        except Undecided as missing:
            return Finding(self.name, "note", str(missing), missing.fix, self.compares, decided=False)
        if outcome.is_good:
            return Finding(self.name, "good", outcome.found, compares=self.compares)
        fix = self.fix if outcome.fix is None else outcome.fix
        return Finding(self.name, outcome.severity or self.severity, outcome.found, fix, self.compares)


class Registry(Generic[F]):
    """Checks of one subject, in the order in which they were added."""

    def __init__(self, subject: str) -> None:
        """
        Args:
            subject: what is checked, such as "SGLang server".
        """
        self.subject = subject
        self._checks: dict[str, Check[F]] = {}

    def check(
        self, name: str, *, compares: str, severity: Severity, fix: str
    ) -> Callable[[Callable[[F], Outcome]], Callable[[F], Outcome]]:
        """Decorator that adds a function from facts to `good(...)` or `bad(...)` under ``name``."""

        def add(look: Callable[[F], Outcome]) -> Callable[[F], Outcome]:
            assert name not in self._checks, f"two checks are called {name!r}"
            self._checks[name] = Check(name, compares, severity, fix, look)
            return look

        return add

    @classmethod
    def joined(cls, subject: str, *parts: Registry[F]) -> Registry[F]:
        """The checks of all parts, in their order."""
        whole = cls(subject)
        for check in (check for part in parts for check in part):
            assert check.name not in whole._checks, f"two checks are called {check.name!r}"
            whole._checks[check.name] = check
        return whole

    def __iter__(self) -> Iterator[Check[F]]:
        return iter(self._checks.values())

    def __getitem__(self, name: str) -> Check[F]:
        return self._checks[name]

    def run(self, facts: F) -> list[Finding]:
        """Every check on ``facts``, in order."""
        return [check.run(facts) for check in self]


class Known:
    """Facts by name; asking for one that is not known makes the check undecided."""

    def __init__(self, values: Mapping[str, Any] | None, source: str, *, fix: str = "") -> None:
        """
        Args:
            values: None when nothing is known.
            source: where the values come from, the subject of the sentence "... does not report x".
            fix: how to make the values known, one sentence.
        """
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
