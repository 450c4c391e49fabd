"""Lines of fake experts."""

import threading

import pytest

from experts.backends.fake import FakeSkeleton
from tests.agent.service.fake_line import PATIENCE_S, FakeLine
from tests.agent.service.language_models import with_models, write_models


@pytest.fixture
def line(tmp_path):
    return FakeLine(tmp_path)


@pytest.fixture
def batches(monkeypatch):
    """While it is clear, what runs does not end. It is set until the agent has started."""
    may_end, infer = threading.Event(), FakeSkeleton.infer
    may_end.set()

    def held(*given):
        assert may_end.wait(PATIENCE_S)
        return infer(*given)

    monkeypatch.setattr(FakeSkeleton, "infer", held)
    yield may_end
    may_end.set()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def text_line(line, models):
    return with_models(line, models)
