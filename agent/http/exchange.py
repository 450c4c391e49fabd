"""One request over HTTP and its answer, as whoever serves something has them: no socket, no state of a connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request that has come whole. ``headers``: by names in lower case. ``is_local_user``: through a unix socket,
    whose permissions say who may come; else anybody on this machine may have sent it."""

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
    """What one exchange may take: its body, its time from the connection on, how long its caller may read nothing.

    ``connections``: how many at each address. ``withdraws``: who goes away before the answer's end wants none any more,
    and whoever answers is cancelled.
    """

    body_bytes: int
    longest_s: float
    stall_s: float
    connections: int
    withdraws: bool = False


class Stream(Protocol):
    """An answer that comes in pieces. Both raise OSError once nobody is there to read it, or does not read."""

    async def begin(self, status: int, headers: tuple[tuple[str, str], ...]) -> None: ...

    async def send(self, piece: bytes) -> None:
        """One more; returns once the caller's side has it, so that nothing piles up."""


class Application(Protocol):
    @property
    def terms(self) -> Terms: ...

    def serves(self, path: str) -> bool: ...

    async def answer(self, request: HttpRequest, stream: Stream) -> HttpAnswer | None:
        """An answer; None where it was streamed. Cancelled when nobody wants it any more; raises nothing else."""

    def refusal(self, status: int, reason: str) -> HttpAnswer:
        """What is said, in its own form, to a request that does not come as far as to be answered."""
