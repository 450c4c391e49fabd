"""The core's constants as they were before each test: ``worlds.limits`` may set them."""

import pytest

from tests.agent.core.worlds import CONSTANTS


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    for module, name in CONSTANTS.values():
        monkeypatch.setattr(module, name, getattr(module, name))
