"""Why a camera in the network cannot be opened: its host, its port, or what it answers. In words, without secrets."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from agent.intake.cameras.sources.source import Connection

PORTS = {"http": 80, "https": 443, "rtsp": 554, "rtsps": 322}
ADVICE = {
    "401": "it wants a login, or another one - correct user: and password:",
    "403": "this user may not see it - correct user: and password:, or permit it at the camera",
    "404": "there is no such stream - correct the path in url:",
    "453": "it has no bandwidth left - end other viewers",
    "503": "it cannot serve this now - end other viewers, or look at the camera itself",
}
SHORTEST_S = 0.5  # a question gets at least so long


def why_not(connection: Connection, deadline: float) -> str:
    """The reason, found out by asking once more. Takes until the deadline at most, or a little longer."""
    parts = urlsplit(connection.url)
    host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
    try:
        with socket.create_connection((host, port), max(deadline - time.monotonic(), SHORTEST_S)) as plain:
            if parts.scheme in {"https", "rtsps"}:
                return f"{host}:{port} answers, but does not send a video that can be read"
            return _said(_status(plain, connection), host, port)
    except socket.gaierror:
        return f"no host of the name {host} is known - correct url:, or the box's name resolution"
    except TimeoutError:
        return f"{host}:{port} does not answer - is the camera on, and in this network?"
    except OSError as error:
        return f"{host}:{port}: {(error.strerror or str(error)).lower()} - is the camera on, and is the port right?"


def _status(plain: socket.socket, connection: Connection) -> str:
    """The status line that it answers with. It is told no login: this is no place to send one in the clear."""
    parts = urlsplit(connection.url)
    is_rtsp = parts.scheme == "rtsp"
    target = connection.url if is_rtsp else (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"{'DESCRIBE' if is_rtsp else 'GET'} {target} {'RTSP/1.0' if is_rtsp else 'HTTP/1.0'}"]
    lines += ["CSeq: 1"] if is_rtsp else [f"Host: {parts.netloc.rpartition('@')[2]}"]
    plain.sendall("\r\n".join([*lines, "", ""]).encode())
    return plain.recv(256).split(b"\r\n")[0].decode("latin-1")


def _said(status: str, host: str, port: int) -> str:
    words = status.split(" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        return f"{host}:{port} answers, but not as a camera of this kind does - correct the scheme or the port in url:"
    if words[1] == "200":
        return f"{host}:{port} answers, but does not send a video that can be read"
    return f"{host}:{port} says {' '.join(words[1:])[:80]}: {ADVICE.get(words[1], 'correct url:')}"
