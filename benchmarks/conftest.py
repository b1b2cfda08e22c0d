"""The options and settings of the whole suite, also where benchmarks are tested alone: tests/support/suite.py."""

import pytest


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.import_plugin("suite")
