"""A line in memory at real addresses, for commands."""

import pytest

from agent.doors.access import logged
from agent.doors.http.door import WebDoor
from agent.doors.http.server import WebServer
from agent.doors.http.texts.endpoint import TextEndpoint
from agent.doors.orders import Orders
from tests.agent.doors.conftest import section, server_of
from tests.agent.doors.fake_desk import FakeDesk

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
    api = section(tmp_path, **keys, http=["unix:./state/coserve-web.sock", "127.0.0.1:0"])
    server = server_of(api, desk)
    server.start()
    web = WebServer(api, WebDoor([TextEndpoint(Orders(desk)).section()], server.credentials.tokens, logged, api))
    web.start()
    file = tmp_path / "line.yaml"
    file.write_text(LINE.replace("ADDRESS", "'unix:./state/coserve.sock'"))
    desk.tcp, desk.http = server.addresses[1], web.addresses[1]
    yield file
    web.stop()
    server.stop(0.0)
