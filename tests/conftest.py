"""The options and settings of the whole suite: tests/support/suite.py."""

import pytest


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.import_plugin("suite")
