"""Routes of `/api`: JSON of a line's station, its pictures, and what a person changes.

Guarantees: the line is asked off the event loop. The state is built at most once in FRESH_S, however many pages ask,
and an unchanged one is answered 304. A line that does not answer within its patience is 503, and pages go on asking.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter
from starlette.responses import Response

from agent.api.access import ended
from agent.web.door import Part
from agent.web.openapi import document
from agent.web.operations import NO_STORE, asked_of, body_of_json, json_answer
from agent.web.routes import Rule, json_refused, route
from agent.web.single_flight import SingleFlight
from agent.web.station import questions as asked
from agent.web.station import views
from agent.web.station.served import CHANGES, OF_SESSION, OPENAPI, OPERATIONS, PICTURES, READS, SHOWN, STATE
from experts.daemon_threads import DaemonThreads
from experts.errors import OrderRefused, Refusing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pydantic import BaseModel
    from starlette.routing import Route

    from agent.web.operations import Operation
    from agent.web.routes import Call
    from agent.web.station.served import Station

    Answering = Callable[[Call], Awaitable[Response]]

FRESH_S = 0.5
PATIENCE_S = 5.0
CHANGE_S = 300.0  # a reload packs new experts
THREADS = 4  # of questions about what is stored
BODY_BYTES = 64 * 1024
LINE_FILE_BYTES = 512 * 1024  # of a line file: hundreds of experts take a quarter
KEPT = {"cache-control": "private, max-age=300, immutable"}  # a new results file counts from 1 again

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class _Told:
    """State as JSON, with its tag."""

    state: bytes
    tag: str
    at: datetime


class StationRoutes:
    """The part of the door with `/api`."""

    def __init__(self, station: Station, others: Sequence[Operation] = (), patience_s: float = PATIENCE_S) -> None:
        """``others``: operations of other parts, which the OpenAPI document tells of too."""
        self._station = station
        self._operations = (*OPERATIONS, *OF_SESSION, *others)
        self._patience_s = patience_s
        self._state = SingleFlight(self._told_state, "station-state", FRESH_S)
        self._reading = DaemonThreads(THREADS, "station")
        self._showing = DaemonThreads(THREADS, "station-pictures")  # which take long: questions do not wait for them
        # one each: a check or reload that waits for a share's files keeps no review waiting
        self._changing = {operation: DaemonThreads(1, "station-change") for operation in CHANGES}
        self._state_json = TypeAdapter(views.StateView)
        self._ages_json = TypeAdapter(views.AgesView)
        self._routes = [
            _route(STATE, self._answer_state),
            _route(OPENAPI, self._answer_document),
            *(_route(operation, self._reader(operation)) for operation in READS),
            *(_route(operation, self._shower(operation)) for operation in SHOWN),
            *(_route(operation, self._changer(operation)) for operation in CHANGES),
        ]

    def part(self) -> Part:
        return Part(("/api/",), self._routes, stop=self.stop)

    def stop(self) -> None:
        self._station.stop()
        for threads in (self._state.thread, self._reading, self._showing, *self._changing.values()):
            threads.stop(0.0)

    def _reader(self, operation: Operation) -> Answering:
        adapter: TypeAdapter[Any] = TypeAdapter(operation.answer)

        async def answer(call: Call) -> Response:
            ask = partial(self._station.reads[operation], asked_of(operation.asked, call.request))
            return json_answer(await self._told(self._reading, lambda: adapter.dump_json(ask(), by_alias=True)))

        return answer

    def _shower(self, operation: Operation) -> Answering:
        async def answer(call: Call) -> Response:
            ask = partial(self._station.reads[operation], asked_of(operation.asked, call.request))
            found = await self._told(self._showing, ask)
            assert isinstance(found, views.Shown)
            return Response(found.content, 200, KEPT if operation.answer is PICTURES else NO_STORE, found.kind)

        return answer

    def _changer(self, operation: Operation) -> Answering:
        adapter: TypeAdapter[Any] = TypeAdapter(operation.answer)

        async def answer(call: Call) -> Response:
            given: BaseModel = asked_of(operation.asked, call.request)
            if operation.body is not None:
                given = body_of_json(operation.body, call.request, call.body)
            if operation.action is not None:
                call.about = ", ".join(f"{name} {value}" for name, value in given if value is not None)

            def change() -> bytes:
                found = self._station.changes[operation](call.caller.name, given)
                call.outcome = ended(found)
                return adapter.dump_json(found, by_alias=True)

            content = await self._told(self._changing[operation], change, CHANGE_S)
            return json_answer(content, operation.status)

        return answer

    async def _told(self, threads: DaemonThreads, ask: Callable[[], Found], patience_s: float | None = None) -> Found:
        patience_s = self._patience_s if patience_s is None else patience_s
        try:
            async with asyncio.timeout(patience_s):
                return await asyncio.wrap_future(threads.submit(ask))
        except TimeoutError:
            raise _hangs(patience_s) from None

    async def _answer_state(self, call: Call) -> Response:
        asked_of(STATE.asked, call.request)
        try:
            told = await self._state.answer(self._patience_s)
        except TimeoutError:
            raise _hangs(self._patience_s) from None
        headers = {"etag": told.tag, "cache-control": "no-cache"}
        known = call.request.headers.get("if-none-match", "")
        if told.tag in {each.strip().removeprefix("W/") for each in known.split(",")}:
            return Response(status_code=304, headers=headers)
        ages = self._ages_json.dump_json(views.AgesView(round(self._station.uptime_s(), 1), told.at))
        return json_answer(b'{"state":%b,"ages":%b}' % (told.state, ages), headers=headers)

    async def _answer_document(self, call: Call) -> Response:
        asked_of(STATE.asked, call.request)
        make = partial(document, self._operations, version("coserve"))
        return json_answer(json.dumps(await self._told(self._reading, make)).encode())

    def _told_state(self) -> _Told:
        at = datetime.now().astimezone()
        state = self._state_json.dump_json(self._station.state())
        return _Told(state, f'"{hashlib.blake2b(state, digest_size=12).hexdigest()}"', at)


def _route(operation: Operation, answer: Answering) -> Route:
    largest = 1024 if operation.body is None else BODY_BYTES
    largest = LINE_FILE_BYTES if operation.body is asked.LineText else largest
    return route(
        operation.method, operation.path, answer, Rule(json_refused, operation.least, operation.action, largest)
    )


def _hangs(patience_s: float) -> OrderRefused:
    return OrderRefused(Refusing.NOT_NOW, f"no answer from the line within {patience_s:g} s: it hangs", 1.0)
