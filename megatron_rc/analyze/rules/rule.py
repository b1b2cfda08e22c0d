"""What a rule is, and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from importlib import resources

from megatron_rc.analyze.evidence import Evidence

HOSTS = ("verl", "slime", "miles", "Megatron-LM", "NeMo-RL", "TRL")
"""Every page says what to change in each of them."""


class Level(StrEnum):
    """What a verdict claims."""

    BUG = "BUG"
    """Logs, weights or inputs of the two sides differ in a way that no rounding explains."""
    SUSPECT = "suspect"
    """A bug fits, but the data are outside the range that the rule was tried on, or do not tell it from others."""
    UNDECIDED = "undecided"
    """A bug fits, but the responses were chosen by outcome, and the test that shows the bug may be seeing that."""
    STALENESS = "staleness"
    """The weights that sampled were older, as the dump itself says."""
    NUMERICS = "numerics"
    """Kernels, precision or expert choice; nothing to fix in the logs."""


DOUBTS = (Level.BUG, Level.SUSPECT, Level.UNDECIDED)
"""Levels at which something may have to be fixed."""


@dataclass(frozen=True)
class Verdict:
    """What one rule says about a dump."""

    code: str
    level: Level
    sentence: str
    """What is wrong, in this dump's numbers."""
    numbers: dict[str, float]
    """The evidence."""
    p: float | None = None
    """Corrected for the number of tests; None where the rule needs no test."""
    share: float | None = None
    """Share of k3 that it explains; None where that is not defined."""
    one_of: tuple[str, ...] = ()
    """Rules that these data do not separate from this one."""

    @property
    def page(self) -> "Page":
        return Page(self.code)


@dataclass(frozen=True)
class Range:
    """The range of dumps, with and without the bug, that a rule was tried on; outside it, the rule only suspects."""

    tokens: int
    """Loss tokens, at least."""
    surprisal: tuple[float, float]
    """Mean of -log mu, nats: how sure the model is of itself."""

    def outside(self, evidence: Evidence) -> str:
        """Why a dump is outside the range, as text; empty if it is inside."""
        tokens = evidence.whole.tokens
        surprisal = -float(evidence.sample.log_mu.mean())
        low, high = self.surprisal
        if tokens < self.tokens:
            return f"fewer than {self.tokens:,} tokens"
        if not low <= surprisal <= high:
            return f"a mean -log mu of {surprisal:.2g} nats, outside of {low:g} to {high:g}"
        return ""


@dataclass(frozen=True)
class Rule:
    code: str
    stage: int
    """Rules of a later stage are not judged once one of an earlier stage answers BUG, suspect or undecided: they would
    find that bug again, because it changes the log-ratios that they read."""
    judge: Callable[[Evidence], Verdict | None]
    needs: tuple[str, ...] = ()
    """Columns without which it is not run."""
    calibrated: Range | None = None
    """None: the rule may claim a bug in any dump, because no number in it was fitted to dumps."""
    unfiltered: bool = False
    """Its test is valid only while no response is chosen by its outcome."""
    also: frozenset[str] = frozenset()
    """Further codes that it may answer with."""

    @property
    def codes(self) -> frozenset[str]:
        return self.also | {self.code}

    def verdict(self, evidence: Evidence) -> Verdict | None:
        """What the rule says.

        The level is at most suspect outside of the calibrated range, and undecided where the dump was filtered by
        outcome and the rule rests on a test that sees such a filter.
        """
        verdict = self.judge(evidence)
        if verdict is not None and self.unfiltered and evidence.outcome_filter.filtered:
            sentence = f"{verdict.sentence} (undecided: the dump was filtered by outcome, which these tests see, too)"
            return replace(verdict, level=Level.UNDECIDED, sentence=sentence, p=None)
        if verdict is None or verdict.level is not Level.BUG or self.calibrated is None:
            return verdict
        if not (reason := self.calibrated.outside(evidence)):
            return verdict
        sentence = f"{verdict.sentence} (only suspected: the rule was never tried on {reason})"
        return replace(verdict, level=Level.SUSPECT, sentence=sentence)


@dataclass(frozen=True)
class Page:
    """The page of a rule, in the package: Markdown with sections."""

    code: str

    @cached_property
    def text(self) -> str:
        return (resources.files("megatron_rc.analyze.rules") / "pages" / f"{self.code}.md").read_text(encoding="utf-8")

    def section(self, title: str) -> str:
        """The text under ``## title``."""
        _, _, rest = self.text.partition(f"\n## {title}\n")
        return rest.partition("\n## ")[0].strip()

    @property
    def title(self) -> str:
        """The heading, without the code."""
        return self.text.partition("\n")[0].partition(": ")[2]

    @property
    def look_alikes(self) -> str:
        return self.section("What else looks like this")

    @property
    def experiment(self) -> str:
        return self.section("The experiment that decides")

    @property
    def fixes(self) -> dict[str, str]:
        """What to change, by host."""
        lines = self.section("Fix").removeprefix("- ").split("\n- ")
        pairs = (" ".join(line.split()).partition(": ") for line in lines)
        return {host.strip("*"): text for host, _, text in pairs}
