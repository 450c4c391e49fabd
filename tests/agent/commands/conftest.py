"""A line in memory at real addresses, for commands."""

import pytest

from tests.agent.api.conftest import section, server_of
from tests.agent.api.fake_desk import FakeDesk

LINE = """line: test
state: ./state
experts:
  cls/resistor: {architecture: fake, weights: weights.yaml, labels: [good, bad], input: {size: [8, 8]}}
routes:
  resistor: [{expert: cls/resistor, pass: [good]}]
api: {grpc: [ADDRESS]}
"""


@pytest.fixture
def desk():
    return FakeDesk()


@pytest.fixture
def line(tmp_path, desk):
    """The line file of a running agent, which answers at its first address and at another one."""
    (tmp_path / "token").write_text("s3cret\n")
    keys = {"grpc": ["unix:./state/coserve.sock", "127.0.0.1:0"], "token": {"file": "token"}}
    server = server_of(section(tmp_path, **keys), desk)
    server.start()
    file = tmp_path / "line.yaml"
    file.write_text(LINE.replace("ADDRESS", "'unix:./state/coserve.sock'"))
    desk.tcp = server.addresses[1]
    yield file
    server.stop(0.0)
