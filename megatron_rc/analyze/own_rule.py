"""A check of the user's own: a Python file with a function ``check(evidence)`` that returns a sentence or None.

The null test runs a check that found something on copies of the dump that have nothing to find: within each cell of
tokens of like probability, temperature and lag, log-ratios change places at random. Whatever ties them to servers, ids,
positions or responses is gone then, and the size of the gap is not.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np

from megatron_rc.analyze.conditions import Outcome
from megatron_rc.analyze.evidence import Evidence, Gathering
from megatron_rc.analyze.statistics.noise import Noise

Check = Callable[[Evidence], str | None]

COPIES = 19
"""Copies of the null test: a check that finds chance in one dump of 20 is expected to find something in one of them."""
TOKENS = 50_000
"""Tokens of each copy, at most, in whole responses."""


def read_check(path: Path) -> Check:
    """The function ``check`` of a file, which is run.

    Raises ValueError where the file is not Python, ends with an error, or has no such function.
    """
    spec = spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"--rule: {path} is not a file of Python")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"--rule: {path} ended with {error!r}") from error
    if not callable(check := getattr(module, "check", None)):
        raise ValueError(f"--rule: {path} has no function check(evidence)")
    return check


def outcome(name: str, check: Check, evidence: Evidence, *, share: bool = False) -> Outcome:
    """What a check says: it holds where it finds nothing, or finds something in more than one copy of the null test.

    ``share`` leaves out the sentence of the check, which may name servers and ids. Raises ValueError where the check
    ends with an error, or returns anything but text or None.
    """
    if not (found := _called(name, check, evidence)):
        return Outcome(name, True, "found nothing")
    by_chance = sum(bool(_called(name, check, null)) for null in _null_copies(evidence))
    said = "found something" if share else found
    null_test = f"{by_chance} of {COPIES} copies of the dump in which log-ratios changed places"
    if by_chance > 1:
        return Outcome(name, True, f"not counted, because it also finds something in {null_test}: {said}")
    return Outcome(name, False, f"{said} (null test: it finds something in {null_test})")


def _called(name: str, check: Check, evidence: Evidence) -> str | None:
    try:
        found = check(evidence)
    except (Exception, SystemExit) as error:
        raise ValueError(f"--rule: check of {name} ended with {error!r}") from error
    if not (found is None or isinstance(found, str)):
        raise ValueError(f"--rule: check of {name} must return a sentence or None, got {type(found).__name__}")
    return found


def _null_copies(evidence: Evidence) -> Iterator[Evidence]:
    sample = evidence.sample
    few = sample.select_sequences(sample.cu_seqlens[1:] <= max(TOKENS, int(sample.lengths[0])))
    cell, random = Noise(few).cell, np.random.default_rng(0)
    in_order = np.argsort(cell, kind="stable")
    for _ in range(COPIES):
        log_ratio = np.empty(cell.size)
        log_ratio[in_order] = few.log_ratio[np.lexsort((random.random(cell.size), cell))]
        gathering = Gathering(evidence.known)
        gathering.add(replace(few, log_mu=np.minimum(few.log_pi - log_ratio, 0.0)))
        yield gathering.evidence()
