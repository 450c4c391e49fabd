"""Plans in a fifth of the time: whether a takt is met shows in fewer requests here."""

import pytest

from profiler.simulation import forecast


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch):
    monkeypatch.setattr(forecast, "LEAST_REQUESTS", 300)
