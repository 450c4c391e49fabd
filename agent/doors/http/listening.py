"""Listening sockets of the HTTP door, which the server serves: one for each address, with the side of its callers.

Guarantees: no name is resolved over the network. A unix socket appears with its permissions, and no other process
replaces it while it is served (``agent.doors.unix_sockets``).
"""

from __future__ import annotations

import os
import socket as sockets
import struct
from contextlib import ExitStack
from dataclasses import dataclass, field

from agent.doors.access import Where
from agent.doors.shares import Shares
from agent.doors.unix_sockets import GROUPS, OWNERS, UnixSocket
from agent.faults.errors import AddressUnusable
from agent.line_file.api import UNIX, ApiSection, is_loopback

ARRIVALS = 128  # connections of an address that have sent no request yet: it comes within milliseconds
BACKLOG = 128  # connections that the kernel holds until they are accepted
USER = "user "
ROOT_USER = 0
CREDENTIALS = struct.Struct("3i")  # process, user, group


@dataclass(slots=True, eq=False)
class WebListener:
    """Bound address. ``arrivals``: places of connections without a request under way; the longest silent one yields."""

    address: str
    socket: sockets.socket
    where: Where
    unix_socket: UnixSocket | None = None
    arrivals: Shares = field(default_factory=lambda: Shares(ARRIVALS, 0.0))

    def machine_of(self, connection: sockets.socket, peer: tuple[str, int]) -> str:
        """HOST:PORT of the peer, or its user at a unix socket."""
        if self.unix_socket is None:
            return "{}:{}".format(*peer[:2])
        if not hasattr(sockets, "SO_PEERCRED"):
            return ""
        credentials = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, CREDENTIALS.size)
        return f"{USER}{CREDENTIALS.unpack(credentials)[1]}"

    def is_owner(self, machine: str) -> bool:
        """True for the agent's user or root at a unix socket."""
        return self.where is Where.OWNER or machine in (f"{USER}{ROOT_USER}", f"{USER}{os.getuid()}")

    def close(self) -> None:
        self.socket.close()
        if self.unix_socket is not None:
            self.unix_socket.close()


def listener_at(address: str, api: ApiSection) -> WebListener:
    """Bind an address of the line file. Raises AddressUnusable."""
    return _at_path(address, is_owners=api.is_owners(address)) if address.startswith(UNIX) else _at_port(address)


def _at_path(address: str, *, is_owners: bool) -> WebListener:
    unix_socket = UnixSocket(address, OWNERS if is_owners else GROUPS)
    with ExitStack() as undoing:
        undoing.callback(unix_socket.close)
        listening = _listening(address, sockets.AF_UNIX, unix_socket.to_bind.removeprefix(UNIX))
        undoing.callback(listening.close)
        unix_socket.show()
        undoing.pop_all()
    return WebListener(address, listening, Where.OWNER if is_owners else Where.GROUP, unix_socket)


def _at_port(address: str) -> WebListener:
    host, _, port = address.rpartition(":")
    try:
        family, *_, to_bind = sockets.getaddrinfo(host.strip("[]") or None, int(port), type=sockets.SOCK_STREAM,
                                               flags=sockets.AI_PASSIVE)[0]  # fmt: skip
    except OSError as error:
        raise AddressUnusable(address, error.strerror or str(error)) from error
    listening = _listening(address, family, to_bind)
    side = Where.LOOPBACK if is_loopback(address) else Where.FAR
    return WebListener(f"{host}:{listening.getsockname()[1]}", listening, side)


def _listening(address: str, family: sockets.AddressFamily, to_bind: object) -> sockets.socket:
    # asyncio sets TCP_NODELAY on sockets of this protocol: without it an answer waits 40 ms for its head's receipt
    protocol = 0 if family is sockets.AF_UNIX else sockets.IPPROTO_TCP
    listening = sockets.socket(family, sockets.SOCK_STREAM, protocol)
    try:
        if family is not sockets.AF_UNIX:
            listening.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        listening.bind(to_bind)  # type: ignore[arg-type]  # as getaddrinfo returns it
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise AddressUnusable(address, error.strerror or str(error)) from error
    listening.setblocking(False)
    return listening
