"""FlagRule: one mistake in the flags of a host. A patch refuses it, and `megatron-rc doctor` finds it beforehand."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
"""error: the gradient is wrong or the job fails. warning: a gap between the policies that a setting closes, or a
combination that nobody tested. note: worth knowing, or not decidable."""


@dataclass(frozen=True, kw_only=True)
class FlagRule:
    """A mistake that the arguments of a training script show.

    `megatron-rc doctor` reads the arguments from a command line, a patch from the parsed arguments of the host. A patch
    refuses every mistake of severity "error" that a patched run can make.
    """

    name: str
    """Name of doctor's check. Rules of one name are tried in order, and the first mistake is reported."""
    wrong: Callable[[Any], bool]
    """Whether these arguments (an argparse.Namespace, or one like it) make the mistake."""
    problem: str | Callable[[Any], str]
    """What is wrong, one sentence without a full stop, or a function from the arguments to that sentence."""
    fix: str
    """How to mend it, one sentence that names the flag."""
    good: str = ""
    """What doctor says where no rule of this name finds a mistake; the first of them has it."""
    severity: Severity = "error"
    made_by: Literal["every run", "unpatched runs", "patched runs"] = "every run"
    """Which runs can make the mistake: a patch mends some mistakes of the host, and cannot work with some flags."""

    def problem_in(self, args: Any) -> str | None:
        """The sentence about these arguments; None where the mistake is not made."""
        if not self.wrong(args):
            return None
        return self.problem if isinstance(self.problem, str) else self.problem(args)

    def refuse(self, args: Namespace, host: str) -> None:
        """What a patch of the host does about the mistake.

        Raises:
            ValueError: one sentence that names the flag to change.
        """
        if self.severity != "error" or self.made_by == "unpatched runs":
            return
        problem = self.problem_in(args)
        if problem:
            raise ValueError(f"{host}: {problem}; {self.fix[0].lower()}{self.fix[1:].rstrip('.')}")


def captures_iteration(args: Any) -> bool:
    """Whether Megatron captures the whole training iteration in a CUDA graph."""
    # older releases name the scope in a flag of its own
    return "full_iteration" in (args.cuda_graph_impl, getattr(args, "cuda_graph_scope", None))
