"""HTTP request and answer, as applications see them: without sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """Complete request. ``headers``: by lower-case name. ``is_local_user``: it came by a unix socket, whose permissions
    guard it; by TCP any user of this machine may have sent it."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    is_local_user: bool


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Terms:
    """Limits of one exchange: body, seconds since the connection, seconds without the caller reading. ``connections``:
    at each address. ``withdraws``: the answer is cancelled when its caller disconnects."""

    body_bytes: int
    longest_s: float
    stall_s: float
    connections: int
    withdraws: bool = False


class Stream(Protocol):
    """Answer in pieces. Both methods raise OSError once the caller is gone or does not read."""

    async def begin(self, status: int, headers: tuple[tuple[str, str], ...]) -> None: ...

    async def send(self, piece: bytes) -> None:
        """Send a piece; returns once the socket has taken it, so that nothing piles up."""


class Application(Protocol):
    @property
    def terms(self) -> Terms: ...

    def serves(self, path: str) -> bool: ...

    async def answer(self, request: HttpRequest, stream: Stream) -> HttpAnswer | None:
        """Answer; None if it was streamed. Cancelled when its caller disconnects; raises nothing else."""

    def refusal(self, status: int, reason: str) -> HttpAnswer:
        """Refusal in the application's own format, for a request that it never sees."""

    def stop(self) -> None:
        """Called once its server has stopped."""
