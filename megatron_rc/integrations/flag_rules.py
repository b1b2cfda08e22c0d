"""Refusing what a host cannot do: corrections, by plain functions, and mistakes in its flags, by rules."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rc.correction.settings import STATISTICS, RolloutCorrection

Severity = Literal["error", "warning", "note"]
"""error: the gradient is wrong or the job fails. warning: a gap between the policies that a setting closes, or a
combination that nobody tested. note: worth knowing, or not decidable."""


@dataclass(frozen=True)
class FlagRule:
    """A mistake that the arguments of a training script show: doctor finds it beforehand, a patch refuses it.

    ``args.patched`` is true in a patched run: the patch repairs some mistakes of the host, and some flags break it.
    """

    name: str
    """Name of doctor's check. Rules of one name are tried in order, and the first mistake is reported."""
    wrong: Callable[[Any], object]
    """Answers with something true where these arguments (an argparse.Namespace, or one like it) make the mistake."""
    problem: str
    """What is wrong, one sentence without a full stop; {args.NAME} is an argument, {found} the answer of ``wrong``."""
    fix: str
    """How to fix it, in one sentence that names the flag."""
    good: str = ""
    """What doctor says where no rule of this name finds a mistake; the first of them has it."""
    severity: Severity = "error"

    def mistake(self, args: Any) -> str | None:
        """The sentence about what is wrong with these arguments; None where they do not make the mistake."""
        found = self.wrong(args)
        return self.problem.format(args=args, found=found) if found else None

    def refusal(self, mistake: str) -> str:
        """What is wrong and how to fix it, in one sentence."""
        return f"{mistake}; {self.fix[0].lower()}{self.fix[1:].rstrip('.')}"


@dataclass(frozen=True)
class WithDefaults:
    """What a patched host has parsed, with a default for each setting that this version of it does not have."""

    args: Any
    """Its arguments, or a function that reads its configuration by dotted path, None where it has no such setting."""
    defaults: Mapping[str, Any]
    patched: bool = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.args, name, self.defaults[name]) if name in self.defaults else getattr(self.args, name)

    def __getitem__(self, path: str) -> Any:
        found = self.args(path)
        return self.defaults[path] if found is None else found


def refuse(rules: Iterable[FlagRule], args: Any, defaults: Mapping[str, Any], *, host: str = "") -> None:
    """Stop a patched run at the first mistake that is an error; ``args`` and ``defaults`` are those of `WithDefaults`.

    Raises:
        ValueError: one sentence that names the flag to change, and first the ``host``, unless that is "".
    """
    given = WithDefaults(args, defaults)
    for rule in rules:
        if rule.severity == "error" and (mistake := rule.mistake(given)):
            raise ValueError((f"{host}: " if host else "") + rule.refusal(mistake))


def refuse_correction(correction: RolloutCorrection, where: str, statistics: Collection[str] = STATISTICS) -> None:
    """Refuse a correction that needs what no host gives us, or what the host ``where`` does not.

    ``statistics`` are those by which a rejection may judge; a host that knows "lag" among them says which version of
    the weights sampled a token.
    """
    correction.check_keeps_upper(where)
    correction.check_surrogate_of(where)
    if "lag" in statistics:
        correction.check_without_sampling_logprobs(where)
    else:
        correction.check_without_versions(where)
    unknown = [gate.statistic for gate in correction.reject if gate.statistic not in statistics]
    if unknown:
        raise ValueError(f"statistic {unknown[0]!r} is not known to {where}, use one of {', '.join(statistics)}")


def first_wrong(*checks: tuple[object, str]) -> str:
    """The sentence of the first pair (wrong, sentence) that is wrong; "" where none is."""
    return next((sentence for wrong, sentence in checks if wrong), "")


def refuse_first(*checks: tuple[object, str]) -> None:
    """Raise ValueError with `first_wrong`, where there is one."""
    if sentence := first_wrong(*checks):
        raise ValueError(sentence)


def refused(check: Callable[..., object], *args: Any) -> str:
    """The sentence of the ValueError that ``check(*args)`` raises; "" where it raises none."""
    try:
        check(*args)
    except ValueError as error:
        return str(error)
    return ""


def value_at(config: Any, path: str) -> Any:
    """The value under a dotted path of mappings and objects; None where a part is missing or null."""
    for name in path.split("."):
        config = config.get(name) if hasattr(config, "get") else getattr(config, name, None)
    return config
