"""Callers of the door: well-behaved ones, and connections that a test drives by hand."""

import http.client
import json
import socket
from contextlib import closing, contextmanager

from agent.doors.access import Tokens
from agent.doors.http.door import WebDoor
from agent.doors.http.server import WebServer
from agent.line_file.api import ApiSection

PATIENCE_S = 60.0
TCP = "127.0.0.1:0"


@contextmanager
def opened(parts, api=None, *, audit=print, tokens=None, tls=None):
    api = ApiSection(http=[TCP]) if api is None else api
    server = WebServer(api, WebDoor(parts, tokens or Tokens(api), audit, api), tls)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def connected(address):
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE_S)
        connection.connect(address.removeprefix("unix:"))
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S)


def asked(address, path, method="GET", body=None, tls=None, **headers):
    """Status, headers and body of an answer. ``tls``: context of an encrypted connection."""
    with closing(http.client.HTTPConnection("localhost", timeout=PATIENCE_S)) as caller:
        connection = connected(address)
        caller.sock = connection if tls is None else tls.wrap_socket(connection, server_hostname="localhost")
        content = json.dumps(body) if isinstance(body, dict) else body
        kind = {} if body is None else {"content-type": "application/json"}
        caller.request(method, path, content, kind | {name.replace("_", "-"): it for name, it in headers.items()})
        answer = caller.getresponse()
        return answer.status, answer.headers, answer.read().decode("utf-8", "replace")


def hears_nothing_more(connection):
    """Whether the other side has ended it, sooner or later, in whatever way."""
    try:
        while connection.recv(65536):
            continue
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True
