"""What a rule is, and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
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
    LAG = "lag"
    """The weights that sampled were older, as the dump itself says."""
    NUMERICS = "numerics"
    """Kernels, precision or expert choice; nothing to fix in the logs."""


class Stage(IntEnum):
    """Rules of a later stage are not judged once one of an earlier stage answers BUG, suspect or undecided: they would
    find that bug again, because it changes the log-ratios that they read."""

    COUNTS = 0  # Values that were never log-probs of drawn tokens.
    ALIGNMENT = 1  # The two lists of log-probs describe different tokens.
    HONESTY = 2  # The logged distribution is not the one that drew the tokens, or not the one that the trainer models.
    HIDDEN_SAMPLING = 3  # The same, although the log-probs agree.
    PENALTY = 4  # The log-ratio follows from whether an id came before.
    MAP = 5  # The log-ratio follows from the logged log-prob.
    LOCATION = 6  # The sides differ in one place: a server, a cache, a turn, a shard.
    PROMPT = 7  # The sides differ where a response starts, or in whole responses.
    WEIGHTS = 8  # The sides differ in what they have learned.
    KNOWN_CAUSE = 9  # A gap whose cause is in the columns, and not a bug in the logs.
    NUMERICS = 10  # A gap that no other rule explains.


DOUBTS = (Level.BUG, Level.SUSPECT, Level.UNDECIDED)
"""Levels at which something may have to be fixed."""


@dataclass(frozen=True)
class Verdict:
    """What one rule says about a dump."""

    code: str = field(default="", kw_only=True)
    """That of its rule, which fills it in."""
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


LEAST_TOKENS, SURPRISAL = 2_000, (0.1, 4.0)
"""Range of the dumps, with and without a bug, that rules were tried on: least loss tokens, and mean of -log mu in nats
(how sure the model is of itself). It is what benchmarks/diagnosis (confusion.py) and the simulated dumps cover:
vocabularies of 256 and 4,096, temperatures of 0.7 to 1, sampled in bf16, fp8 or int8 by the embedded engine and SGLang.
At an entropy of 2.4, 0.9 and 0.3 nats, seeing a hidden top-p of 0.99 takes 14,000 to 17,000 tokens; a hidden
temperature of 0.95 takes 2,200, 5,800 and 14,600 (docs/results.md). A smaller dump without a verdict has not excluded
them."""


def untried(evidence: Evidence) -> str:
    """Why a dump is outside the range that rules were tried on, as text; empty if it is inside."""
    surprisal, (low, high) = -float(evidence.sample.log_mu.mean()), SURPRISAL
    if evidence.whole.tokens < LEAST_TOKENS:
        return f"fewer than {LEAST_TOKENS:,} tokens"
    if not low <= surprisal <= high:
        return f"a mean -log mu of {surprisal:.2g} nats, outside of {low:g} to {high:g}"
    return ""


@dataclass(frozen=True)
class Rule:
    """A rule: its file holds the thresholds, and the file of the same name with the ending .md its page."""

    code: str
    stage: Stage
    check: Callable[[Evidence], Verdict | None]
    needs: tuple[str, ...] = ()
    """Columns without which it is not run."""
    fitted: bool = False
    """A number in it was fitted to dumps: outside the range of these it only suspects."""
    unfiltered: bool = False
    """Its test is valid only while no response is chosen by its outcome."""

    def verdict(self, evidence: Evidence) -> Verdict | None:
        """What the rule says.

        The level is at most suspect outside of the range that a fitted rule was tried on, and undecided where the dump
        was filtered by outcome and the rule rests on a test that sees such a filter.
        """
        if (verdict := self.check(evidence)) is None:
            return None
        verdict = replace(verdict, code=self.code)
        if self.unfiltered and evidence.outcome_filter.filtered:
            sentence = f"{verdict.sentence} (undecided: the dump was filtered by outcome, which these tests see, too)"
            return replace(verdict, level=Level.UNDECIDED, sentence=sentence, p=None)
        if verdict.level is not Level.BUG or not self.fitted or not (reason := untried(evidence)):
            return verdict
        sentence = f"{verdict.sentence} (only suspected: the rule was never tried on {reason})"
        return replace(verdict, level=Level.SUSPECT, sentence=sentence)


@dataclass(frozen=True)
class Page:
    """The page of a rule, next to its file: Markdown with sections."""

    code: str

    @cached_property
    def text(self) -> str:
        file = resources.files("megatron_rc.analyze.rules") / f"{self.code.lower()}.md"
        return file.read_text(encoding="utf-8")

    def section(self, title: str) -> str:
        """The text under ``## title``."""
        _, _, rest = self.text.partition(f"\n## {title}\n")
        return rest.partition("\n## ")[0].strip()

    @property
    def title(self) -> str:
        """The heading, without the code."""
        return self.text.partition("\n")[0].partition(": ")[2]

    @property
    def experiment(self) -> str:
        return self.section("The experiment that decides")

    @property
    def fixes(self) -> dict[str, str]:
        """What to change, by host."""
        lines = self.section("Fix").removeprefix("- ").split("\n- ")
        pairs = (" ".join(line.split()).partition(": ") for line in lines)
        return {host.strip("*"): text for host, _, text in pairs}
