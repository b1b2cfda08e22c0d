"""Gives the test modules their names in a process that unpickles functions of theirs."""

import sys
from pathlib import Path
from types import ModuleType

# functions of tests/training/test_model.py are pickled as those of tests.training.test_model, but the repository's root
# stays off sys.path
tests = ModuleType("tests")
tests.__path__ = [str(Path(__file__).parents[1])]
sys.modules["tests"] = tests
