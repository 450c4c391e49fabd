"""Proxies in front of the door: who calls through them, and which address a browser shows.

Guarantees: only a connection of ``api.trusted_proxy`` is believed what it forwards, and every call of it counts as one
from another machine, also one that it says nothing of.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING

from agent.doors.access import Where
from agent.line_file.api import PORTS, UNIX

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from agent.doors.http.protocol import BoundedProtocol
    from agent.line_file.api import ApiSection

ADDRESS_CHARS = 64


@dataclass(frozen=True, slots=True)
class Provenance:
    """``machine``: the caller, as HOST:PORT or another text. ``scheme``: its browser's; ``origins``: our
    pages there."""

    where: Where
    machine: str
    scheme: str
    origins: tuple[str, ...]


class Proxies:
    def __init__(self, api: ApiSection) -> None:
        self._networks = [ip_network(each) for each in api.trusted_proxy if not each.startswith(UNIX)]
        self._sockets = [each for each in api.trusted_proxy if each.startswith(UNIX)]
        self._public = api.public_origin

    def seen(self, connection: BoundedProtocol, headers: Headers) -> Provenance:
        scheme: str = connection.scheme or "http"
        host = headers.get("host")
        if not self._trusts(connection):
            where = Where.OWNER if connection.is_owner else connection.listener.where
            return Provenance(where, connection.machine, scheme, (f"{scheme}://{host}",))
        forwarded = headers.get("x-forwarded-proto", "").strip().lower()
        if forwarded in PORTS:
            scheme = forwarded
        elif self._public is not None and headers.get("origin") == self._public:
            scheme = self._public.partition(":")[0]
        hops = [hop.strip() for hop in ",".join(headers.getlist("x-forwarded-for")).split(",")]
        nearest = next((f"{hop[:ADDRESS_CHARS]}:0" for hop in reversed(hops) if hop and not self._holds(hop)), None)
        own = f"{scheme}://{host}"
        origins = (own,) if self._public is None else (self._public, own)
        return Provenance(Where.FAR, nearest or connection.machine, scheme, origins)

    def _trusts(self, connection: BoundedProtocol) -> bool:
        if connection.client is None:
            return connection.listener.address in self._sockets
        return self._holds(connection.client[0])

    def _holds(self, host: str) -> bool:
        try:
            address = ip_address(host)
        except ValueError:
            return False
        if isinstance(address, IPv6Address):
            address = address.ipv4_mapped or address
        return any(address in network for network in self._networks)
