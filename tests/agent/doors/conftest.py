"""A line in memory, served at real addresses, and callers of it."""

from contextlib import ExitStack

import grpc
import pytest

from agent.doors.access import logged
from agent.doors.credentials import Credentials
from agent.doors.grpc.client import AgentClient
from agent.doors.grpc.server import ApiServer
from agent.doors.proto import inspection_pb2_grpc
from agent.line_file.api import ApiSection
from tests.agent.doors.fake_desk import FakeDesk

DEADLINE_S = 30.0


def section(folder, **keys):
    keys = {"grpc": ["unix:./a.sock", "127.0.0.1:0"]} | keys
    return ApiSection.model_validate(keys, context={"folder": folder})


def server_of(api, desk):
    return ApiServer(api, desk, Credentials(api), logged)


def silent(end):
    end.wait(DEADLINE_S)
    yield from ()


@pytest.fixture
def desk():
    return FakeDesk()


@pytest.fixture
def serve(tmp_path, desk):
    """Start a server with these keys of `api:`; it is stopped at the end."""
    with ExitStack() as running:

        def start(**keys):
            api = section(tmp_path, **keys)
            api._local_doors = frozenset(api.grpc[:1])  # as the default socket, for its owner alone
            server = server_of(api, desk)
            server.start()
            running.callback(lambda: server.addresses and server.stop(0.0))
            return server

        yield start


def refused(call, *given, **named):
    with pytest.raises(grpc.RpcError) as error:
        call(*given, **named)
    return error.value


def metadata(error):
    return dict(error.trailing_metadata())


@pytest.fixture
def server(serve):
    return serve()


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.addresses[0], (("grpc.max_send_message_length", -1),)) as channel:
        yield channel


@pytest.fixture
def client(server):
    with AgentClient(server.addresses[0]) as client:
        yield client


@pytest.fixture
def agent(channel):
    return inspection_pb2_grpc.InspectionStub(channel)
