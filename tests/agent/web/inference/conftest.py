"""A line in memory, whose routes of /v2 are served by uvicorn at a port of this machine."""

import asyncio
import threading
from contextlib import contextmanager

import pytest
import uvicorn
from starlette.applications import Starlette

from agent.api.access import Caller, Role
from agent.api.calls.door import Door
from agent.api.calls.orders import Orders
from agent.api.services.inference import InferenceService
from agent.api.services.statistics import CallStatistics
from agent.line_file.api import ApiLimitsSection
from agent.web.inference.endpoint import InferenceEndpoint
from agent.web.routes import AUDIT, CALLER
from tests.agent.api.fake_desk import FakeDesk
from tests.waiting import until

MESSAGE_BYTES = 2**20


class Served:
    """``audited``: calls that changed something, as action, subject and outcome."""

    def __init__(self, desk, address):
        self.desk, self.address, self.audited = desk, address, []
        self.caller = Caller("test", Role.ADMIN)

    def audit(self, caller, action, subject, outcome):
        self.audited.append((caller.name, action, subject, outcome))


@contextmanager
def running(app):
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=asyncio.run, args=[server.serve()])
    thread.start()
    until(lambda: server.started)
    yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def desk():
    return FakeDesk()


@pytest.fixture
def served(desk):
    limits = ApiLimitsSection(message="1MiB", requests=100)
    orders = Orders(desk)
    service = InferenceService(orders, Door(limits), limits, CallStatistics())
    app = Starlette(routes=InferenceEndpoint(service, MESSAGE_BYTES).routes())

    async def behind_a_door(scope, receive, send):
        scope |= {CALLER: here.caller, AUDIT: here.audit}
        await app(scope, receive, send)

    with running(behind_a_door) as address:
        here = Served(desk, address)
        yield here
    orders.stop()
