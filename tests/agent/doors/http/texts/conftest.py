"""Texts of a fake desk over HTTP, and OpenAI's client of them."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import openai
import pytest

from agent.doors.access import Tokens
from agent.doors.http.door import WebDoor
from agent.doors.http.server import WebServer
from agent.doors.http.texts.endpoint import TextEndpoint
from agent.doors.orders import Orders
from tests.agent.doors.conftest import DEADLINE_S, section


@pytest.fixture
def serve_texts(tmp_path, desk):
    """Serve them with these keys of `api:`, at a port and at a unix socket; the addresses."""
    with ExitStack() as running:

        def start(**keys):
            api = section(tmp_path, http=["127.0.0.1:0", "unix:./h.sock"], **keys)
            server = WebServer(api, WebDoor([TextEndpoint(Orders(desk)).section()], Tokens(api), print, api))
            running.callback(server.stop)
            server.start()
            return server.addresses

        yield start


@pytest.fixture
def client_of():
    with ExitStack() as opened:

        def connect(address, key="none"):
            is_path = address.startswith("unix:")
            transport = httpx2.HTTPTransport(uds=address.removeprefix("unix:")) if is_path else None
            http = opened.enter_context(httpx2.Client(transport=transport, timeout=DEADLINE_S))
            url = f"http://{'localhost' if is_path else address}/v1"
            return openai.OpenAI(base_url=url, api_key=key, max_retries=0, http_client=http)

        yield connect


@pytest.fixture
def client(serve_texts, client_of):
    return client_of(serve_texts()[0])


@pytest.fixture
def asking():
    with ThreadPoolExecutor(4) as threads:
        yield threads
