"""The mutants of tests/support/mutants.txt fit this tree, so that they can be run."""

import os

import pytest
from mutants import Mutant, find, mutants, mutated, run_tests


def test_there_are_a_hundred() -> None:
    assert [mutant.number for mutant in mutants()] == list(range(1, 101))


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: f"{mutant.number:03}-{mutant.name}")
def test_each_changes_one_line_and_compiles(mutant: Mutant) -> None:
    """After a move, the mutant finds its line by itself; after a rename or a rewrite, mutants.txt says the new one."""
    path, line = find(mutant)
    assert mutant.old != mutant.new
    compile(mutated(path, line, mutant.new), str(path), "exec")


def test_a_test_that_is_gone_is_an_error_and_lets_no_mutant_survive() -> None:
    assert run_tests([f"{__file__}::test_that_is_gone"], dict(os.environ)) == {"": "error"}
