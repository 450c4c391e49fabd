"""A line in memory, whose part /v2 is served by the door at a port of this machine."""

import pytest

from agent.doors.access import Caller, Role, Tokens
from agent.doors.http.door import WebDoor
from agent.doors.http.inference.endpoint import InferenceEndpoint
from agent.doors.http.server import WebServer
from agent.doors.orders import Orders
from agent.doors.statistics import CallStatistics
from agent.line_file.api import ApiSection

MESSAGE_BYTES = 2**20


class Served(Tokens):
    """``audited``: calls that changed something, as action, subject and outcome. Each call is of ``caller``."""

    def __init__(self, desk):
        super().__init__(ApiSection())
        self.desk, self.address, self.audited = desk, None, []
        self.who = Caller("test", Role.ADMIN)

    def caller(self, authorization, where, *, is_required=False):
        return self.who

    def audit(self, caller, action, subject, outcome):
        self.audited.append((caller.name, action, subject, outcome))


@pytest.fixture
def served(desk):
    api = ApiSection(http=["127.0.0.1:0"], limits={"message": "1MiB", "requests": 100})
    here = Served(desk)
    part = InferenceEndpoint(Orders(desk), api.limits, CallStatistics()).section()
    server = WebServer(api, WebDoor([part], here, here.audit, api))
    server.start()
    (here.address,) = server.addresses
    yield here
    server.stop()
