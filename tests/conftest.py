"""The options and settings of the whole suite: tests/support/suite.py."""

from __future__ import annotations

import pytest


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.import_plugin("suite")
