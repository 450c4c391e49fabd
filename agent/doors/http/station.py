"""Routes of `/api`: JSON of a line's station, its pictures, and what a person changes.

Guarantees: the line is asked off the event loop. The state is built at most once in FRESH_S, however many pages ask,
and an unchanged one is answered 304. A line that does not answer within its patience is 503, and pages go on asking.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import TypeAdapter
from starlette.responses import Response

from agent.doors.access import ended, making
from agent.doors.http.door import DoorSection
from agent.doors.http.openapi import document
from agent.doors.http.operations import NO_STORE, Asked, asked_of, body_of_json, json_answer, route_of
from agent.doors.http.routes import RouteRule, json_refused, route
from agent.doors.http.single_flight import SingleFlight
from agent.faults.errors import OrderRefused, Reason
from experts.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from pydantic import BaseModel

    from agent.doors.http.operations import Operation
    from agent.doors.http.routes import Call

    Answering = Callable[[Call], Awaitable[Response]]

FRESH_S = 0.75  # three pages that ask once a second share one; with their second, less than the 2 s of an NG
PATIENCE_S = 5.0
CHANGE_S = 300.0  # a reload packs new experts
THREADS = 4  # of questions about what is stored
KEPT = {"cache-control": "private, max-age=300, immutable"}  # a new results file counts from 1 again

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Shown:
    """A file for a browser. ``kind``: its media type."""

    content: bytes
    kind: str


class Station(Protocol):
    """Calls come from any thread, may take long, or never return. Refusals raise OrderRefused.

    ``reads``, ``shown``: answers of operations, and files, by what is asked; ``changes``: by whom, and a body or else
    parameters.
    """

    @property
    def reads(self) -> Mapping[Operation, Callable[[Any], object]]: ...

    @property
    def shown(self) -> Mapping[Operation, Callable[[Any], Shown]]: ...

    @property
    def changes(self) -> Mapping[Operation, Callable[[str, Any], object]]: ...

    def state(self) -> bytes:
        """JSON of `/api/state`, without ages. One call at a time."""

    def uptime_s(self) -> float: ...

    def stop(self) -> None:
        """No call follows; a call that hangs is abandoned."""


@dataclass(frozen=True, slots=True)
class _StateAnswer:
    """State as JSON, with its tag."""

    state: bytes
    tag: str
    at: datetime
    at_s: float


class StationRoutes:
    """The section of the door with `/api`."""

    def __init__(self, station: Station, operations: Sequence[Operation], patience_s: float = PATIENCE_S) -> None:
        """``operations``: all in the OpenAPI document, also other parts'."""
        self._station = station
        self._operations = operations
        self._patience_s = patience_s
        self._state = SingleFlight(self._read_state, "station-state", FRESH_S)
        self._reading = DaemonThreads(THREADS, "station")
        self._showing = DaemonThreads(THREADS, "station-pictures")  # which take long: questions do not wait for them
        # one each: a check or reload that waits for a share's files keeps no review waiting
        self._changing = {operation: DaemonThreads(1, "station-change") for operation in station.changes}
        self._routes = [
            route("GET", "/api/state", self._answer_state, RouteRule(json_refused)),
            route("GET", "/api/openapi.json", self._answer_document, RouteRule(json_refused)),
            *(route_of(operation, self._reader(operation, ask)) for operation, ask in station.reads.items()),
            *(route_of(operation, self._shower(operation, show)) for operation, show in station.shown.items()),
            *(route_of(operation, self._changer(operation, change)) for operation, change in station.changes.items()),
        ]

    def section(self) -> DoorSection:
        return DoorSection(("/api/",), self._routes, stop=self.stop)

    def stop(self) -> None:
        self._station.stop()
        for threads in (self._state.thread, self._reading, self._showing, *self._changing.values()):
            threads.stop(0.0)

    def _reader(self, operation: Operation, read: Callable[[Any], object]) -> Answering:
        adapter: TypeAdapter[Any] = TypeAdapter(operation.answer)

        async def answer(call: Call) -> Response:
            ask = partial(read, asked_of(operation.asked, call.request))
            return json_answer(await self._answered(self._reading, lambda: adapter.dump_json(ask(), by_alias=True)))

        return answer

    def _shower(self, operation: Operation, show: Callable[[Any], Shown]) -> Answering:
        async def answer(call: Call) -> Response:
            found = await self._answered(self._showing, partial(show, asked_of(operation.asked, call.request)))
            return Response(found.content, 200, KEPT if found.kind.startswith("image/") else NO_STORE, found.kind)

        return answer

    def _changer(self, operation: Operation, make: Callable[[str, Any], object]) -> Answering:
        adapter: TypeAdapter[Any] = TypeAdapter(operation.answer)

        async def answer(call: Call) -> Response:
            given: BaseModel = asked_of(operation.asked, call.request)
            if operation.body is not None:
                given = body_of_json(operation.body, call.request, call.body)
            if operation.action is not None:
                call.about = ", ".join(f"{name} {value}" for name, value in given if value is not None)

            found = await self._made(self._changing[operation], partial(make, call.caller.name, given))
            call.outcome = ended(found)
            return json_answer(adapter.dump_json(found, by_alias=True), operation.status)

        return answer

    async def _answered(self, threads: DaemonThreads, ask: Callable[[], Found]) -> Found:
        try:
            async with asyncio.timeout(self._patience_s):
                return await asyncio.wrap_future(threads.submit(ask))
        except TimeoutError:
            raise _hangs(self._patience_s) from None

    async def _made(self, threads: DaemonThreads, change: Callable[[], Found]) -> Found:
        try:
            async with asyncio.timeout(CHANGE_S):
                return await asyncio.wrap_future(making(threads.submit(change)))
        except TimeoutError:
            reason = f"not done within {CHANGE_S:g} s: it goes on, and /api/audit has its end once it is there"
            raise OrderRefused(Reason.NOT_NOW, reason, 60.0) from None

    async def _answer_state(self, call: Call) -> Response:
        asked_of(Asked, call.request)
        try:
            answer = await self._state.answer(self._patience_s)
        except TimeoutError:
            raise _hangs(self._patience_s) from None
        age_s = str(round(time.monotonic() - answer.at_s))  # as of any answer that was made earlier (RFC 9111)
        headers = {"etag": answer.tag, "cache-control": "no-cache", "age": age_s}
        known = call.request.headers.get("if-none-match", "")
        if answer.tag in {each.strip().removeprefix("W/") for each in known.split(",")}:
            return Response(status_code=304, headers=headers)
        ages = json.dumps({"uptime_s": round(self._station.uptime_s(), 1), "at": answer.at.isoformat()})
        return json_answer(b'{"state":%b,"ages":%b}' % (answer.state, ages.encode()), headers=headers)

    async def _answer_document(self, call: Call) -> Response:
        asked_of(Asked, call.request)
        make = partial(document, self._operations, version("coserve"))
        return json_answer(json.dumps(await self._answered(self._reading, make)).encode())

    def _read_state(self) -> _StateAnswer:
        at, at_s = datetime.now().astimezone(), time.monotonic()
        state = self._station.state()
        return _StateAnswer(state, f'"{hashlib.blake2b(state, digest_size=12).hexdigest()}"', at, at_s)


def _hangs(patience_s: float) -> OrderRefused:
    return OrderRefused(Reason.NOT_NOW, f"no answer from the line within {patience_s:g} s: it hangs", 1.0)
