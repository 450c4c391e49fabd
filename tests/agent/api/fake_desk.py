"""A small line in memory behind the desk's seam: it judges by what the image says, and can be told to keep its answers.

It keeps what the desk promises: one end for each order that is not cancelled, listeners called on a thread of its own,
results numbered, stored before they are told, and told in order.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from threading import Condition, RLock

from agent.api.calls.desk import (
    AnomalyView,
    BoardView,
    ImageOrder,
    Listener,
    ModelView,
    PoolView,
    QueueView,
    ReloadView,
    ResultsCursor,
    ShadowsView,
    StatusView,
    StoredView,
    TextEnd,
    TextListener,
    TextModelView,
    TextOrder,
    TextPiece,
    TextsView,
    TokenView,
    VerdictView,
)  # fmt: skip
from agent.subject import SourceStatus
from experts.daemon_threads import DaemonThreads
from experts.errors import OrderRefused, Refusing
from experts.expert import AnomalyMap, BoundingBox, LabelScore, Verdict
from experts.llm.serving.generation import Ending
from experts.thresholds.map_pictures import map_png

START = datetime(2026, 3, 1, 6, 0, tzinfo=UTC)
DEADLINE_S = 30.0
ROUTES = {"resistor": ("cls/resistor", "det/alignment"), "capacitor": ("cls/capacitor",)}
SOLDER = "solder"  # a route that no board has
EXPERTS = ("cls/resistor", "cls/capacitor", "det/alignment")
BOARD_TYPES = ("main",)
WRITERS = ("llm/code", "llm/maths", "helpdesk", "auto")
STRANGE = b"strange"  # in an image: what its anomaly expert finds
MAP = map_png(AnomalyMap(2, 3, 0.5, 3.5, bytes(range(6))))
PROSE = ("Hello", ", ", "wörld", " 🙂")  # what they all write


@dataclass(eq=False)
class FakeText:
    """A text under way, which its desk writes, or a test piece by piece."""

    desk: FakeDesk
    order: TextOrder
    listener: TextListener
    due_s: float | None = None
    written: int = 0

    def cancel(self) -> None:
        with self.desk.changed:
            if self in self.desk.texts:
                self.desk.texts.remove(self)
                self.desk.cancelled_texts.append(self.order)
                self.desk.changed.notify_all()

    def write(self, text: str) -> None:
        self.written += 1
        other = TokenView("Bye", b"Bye", -2.5)
        tokens = (TokenView(text, text.encode(), -0.5, (other,) * (self.order.sampling.logprobs or 0)),)
        shown = tokens if self.order.sampling.logprobs is not None else ()
        self.listener.wrote(TextPiece("llm/code", text, shown))

    def end(self, ending: Ending | None = Ending.STOP, failure: OrderRefused | None = None) -> None:
        with self.desk.changed:
            self.desk.texts.remove(self)
            self.desk.changed.notify_all()
        end = TextEnd(ending, "llm/code", 7, self.written, 0.5, 0.125, 0.25, failure=failure)
        self.listener.ended(end)


@dataclass(eq=False)
class FakeTicket:
    desk: FakeDesk
    order: ImageOrder
    listener: Listener

    def cancel(self) -> None:
        with self.desk.changed:
            if self in self.desk.under_way:
                self.desk.under_way.remove(self)
                self.desk.withdrawn.append(self.order)
                self.desk.changed.notify_all()


@dataclass
class FakeDesk:
    """``most``: orders under way at once. ``holds``: answers wait for ``release``."""

    most: int = 1_000_000
    holds: bool = False
    orders: list[ImageOrder] = field(default_factory=list)  # all that were taken
    under_way: list[FakeTicket] = field(default_factory=list)
    withdrawn: list[ImageOrder] = field(default_factory=list)
    file: str = "f11e"  # the results file's identity
    results: list[VerdictView] = field(default_factory=list)
    board_changes: list[BoardView] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    unloaded: list[str] = field(default_factory=list)
    is_stopping: bool = False
    most_under_way: int = 0
    text_orders: list[TextOrder] = field(default_factory=list)
    texts: list[FakeText] = field(default_factory=list)  # under way
    cancelled_texts: list[TextOrder] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = RLock()
        self.changed = Condition(self._lock)
        self._subscribers: list = []
        self._threads = DaemonThreads(1, "fake_desk")

    def order(self, order: ImageOrder, listener: Listener) -> FakeTicket:
        with self._lock:
            self._check(order)
            ticket = FakeTicket(self, order, listener)
            self.orders.append(order)
            self.under_way.append(ticket)
            self.most_under_way = max(self.most_under_way, len(self.under_way))
            self.changed.notify_all()
            if order.is_kept:
                self._threads.submit(listener.accepted)
            if not self.holds:
                self._threads.submit(self._judge, ticket)
        return ticket

    def _check(self, order: ImageOrder) -> None:
        if self.is_stopping:
            raise OrderRefused(Refusing.STOPPING, "stopping")
        if order.subject.component not in {None, SOLDER, *ROUTES} or order.subject.expert not in {None, *EXPERTS}:
            raise OrderRefused(
                Refusing.NOT_FOUND, f"no route for {order.subject.component!r}, no expert {order.subject.expert!r}"
            )
        if order.subject.board_type not in {None, *BOARD_TYPES}:
            raise OrderRefused(Refusing.NOT_FOUND, f"no board type {order.subject.board_type!r}")
        if len(self.under_way) >= self.most:
            raise OrderRefused(Refusing.QUEUE_FULL, f"{self.most} images are under way", 0.25)

    def generate(self, order: TextOrder, listener: TextListener) -> FakeText:
        with self._lock:
            self._check_text(order)
            due_s = None if order.deadline_s is None else time.monotonic() + order.deadline_s
            text = FakeText(self, order, listener, due_s)
            self.text_orders.append(order)
            self.texts.append(text)
            self.changed.notify_all()
        if not self.holds:
            self._threads.submit(self._write, text)
        return text

    def _check_text(self, order: TextOrder) -> None:
        if self.is_stopping:
            raise OrderRefused(Refusing.STOPPING, "stopping", 0.5)
        if order.model not in WRITERS:
            raise OrderRefused(Refusing.NOT_FOUND, f"no model {order.model!r} writes texts", field="model")
        if not order.prompt and not order.messages:
            raise OrderRefused(Refusing.INVALID, "prompt: is empty", field="prompt")
        if len(self.texts) >= self.most:
            raise OrderRefused(Refusing.QUEUE_FULL, f"{self.most} texts are under way", 0.25)

    def _write(self, text: FakeText) -> None:
        for piece in PROSE:
            text.write(piece)
        text.end()

    def text_models(self) -> list[TextModelView]:
        views = [TextModelView(name, (name,), 64, True) for name in WRITERS[:2]]
        return [*views, TextModelView("helpdesk", WRITERS[:2], None, False, "quarantined")]

    def release(self) -> None:
        """Judge what was held, and hold no more."""
        with self._lock:
            self.holds = False
            for ticket in self.under_way:
                self._threads.submit(self._judge, ticket)

    def wait_for(self, condition) -> None:
        """Until something is so of this desk."""
        with self._lock:
            assert self.changed.wait_for(lambda: condition(self), DEADLINE_S), self

    def _judge(self, ticket: FakeTicket) -> None:
        with self._lock:
            if ticket not in self.under_way:
                return
            self.under_way.remove(ticket)
            parts = self._known(ticket.order) or self._parts(ticket.order)
            self.changed.notify_all()
        ticket.listener.judged(parts)

    def _known(self, order: ImageOrder) -> list[VerdictView]:
        key = order.subject.key if order.is_kept else ""
        return [part for part in self.results if key and part.subject.key == key]

    def _parts(self, order: ImageOrder) -> list[VerdictView]:
        asked = order.subject.component or order.subject.expert
        parts = (self._part(order, name) for name in ([asked] if asked else ROUTES))
        return [self.commit(part) if order.is_kept else part for part in parts]

    def _part(self, order: ImageOrder, component: str) -> VerdictView:
        image = order.image if isinstance(order.image, bytes) else bytes(order.image)
        verdict = next((each for each in (Verdict.NG, Verdict.UNKNOWN) if each.value.encode() in image), Verdict.OK)
        number = len(self.results) + 1
        shown = MAP if order.wants_maps else None
        return VerdictView(
            subject=replace(
                order.subject,
                key=order.subject.key or f"{number}",
                source="",
                image=order.subject.key or f"{number}",
                arrived_at=START,
                component=component,
                board_type="main" if order.subject.board else None,
            ),
            verdict=verdict,
            label=None if verdict is Verdict.UNKNOWN else "good" if verdict is Verdict.OK else "bad",
            score=None if verdict is Verdict.UNKNOWN else 0.75,
            reason="not an image" if verdict is Verdict.UNKNOWN else None,
            experts=ROUTES.get(component, (component,)),
            boxes=(BoundingBox("good", 0.5, 1.0, 2.0, 3.0, 4.0),),
            finished_at=START + timedelta(seconds=number),
            seconds=0.5,
            queue_s=0.125,
            compute_s=0.25,
            anomalies=(AnomalyView("look/solder", 3.5, 1.25, shown),) if STRANGE in image else (),
            outputs=(LabelScore("bent", 0.75, 0.5),) if STRANGE in image else (),
        )

    def commit(self, part: VerdictView) -> VerdictView:
        """Store a result, and tell of it; a board is closed by its second one."""
        with self._lock:
            part = replace(part, seq=len(self.results) + 1)
            self.results.append(part)
            for tell in list(self._subscribers):
                tell()
            if part.subject.board and len(self._of_board(part.subject.board)) == 2:
                self.board_changes.append(self._board(part.subject.board))
                for tell in list(self._subscribers):
                    tell()
            return part

    def subscribe(self, tell):
        with self._lock:
            self._subscribers.append(tell)
            self.changed.notify_all()

        def end() -> None:
            with self._lock:
                self._subscribers.remove(tell)
                self.changed.notify_all()

        return end

    @property
    def watchers(self) -> int:
        return len(self._subscribers)

    def stored_after(self, seq: int, board: int, limit: int, *, with_maps: bool = False) -> StoredView:
        with self._lock:
            found = [part for part in self.results if part.seq > seq][:limit]
            boards = [] if len(found) == limit else self.board_changes[board : board + limit]
            end = ResultsCursor(self.file, len(self.results), len(self.board_changes))
        shown = MAP if with_maps else None
        parts = [
            replace(part, anomalies=tuple(replace(each, map_png=shown) for each in part.anomalies)) for part in found
        ]
        return StoredView(end, tuple(parts), tuple(enumerate(boards, start=board + 1)))

    def models(self) -> list[ModelView]:
        routes = [ModelView(name, experts, ("good", "bad"), (8, 8), 4, True) for name, experts in ROUTES.items()]
        experts = [ModelView(f"expert:{name}", (name,), ("good", "bad"), None, 4, True) for name in EXPERTS[:2]]
        strange = ModelView(SOLDER, ("look/solder",), ("ok", "anomalous"), (8, 8), 4, True, measures_anomalies=True)
        broken = ModelView(f"expert:{EXPERTS[2]}", EXPERTS[2:], ("good",), None, 1, False, "quarantined")
        return [*routes, strange, *experts, broken]

    def load(self, model: str) -> None:
        self._check_model(model)
        self.loaded.append(model)

    def unload(self, model: str) -> None:
        self._check_model(model)
        self.unloaded.append(model)

    def _check_model(self, model: str) -> None:
        if model not in {each.name for each in self.models()}:
            raise OrderRefused(Refusing.NOT_FOUND, f"no model {model!r}")

    def _of_board(self, serial: str) -> list[VerdictView]:
        return [part for part in self.results if part.subject.board == serial]

    def _board(self, serial: str) -> BoardView:
        parts = self._of_board(serial)
        is_closed = len(parts) >= 2
        counts = {verdict: sum(part.verdict is verdict for part in parts) for verdict in Verdict}
        verdict = Verdict.OK if counts[Verdict.OK] == len(parts) else Verdict.NG
        missing = {} if is_closed else {"capacitor": 1}
        closed_at = START if is_closed else None
        return BoardView(
            serial, "main", verdict if is_closed else None, START, closed_at, missing, counts, tuple(parts)
        )

    def boards(self, serial: str, board_type: str | None = None) -> list[BoardView]:
        with self._lock:
            return [self._board(serial)] if self._of_board(serial) and board_type in {None, "main"} else []

    def trigger(
        self, camera: str, board: str | None = None, board_type: str | None = None, key: str | None = None
    ) -> str:
        if camera != "top":
            raise OrderRefused(Refusing.NOT_FOUND, f"no camera {camera!r}")
        if board is None:
            raise OrderRefused(Refusing.NOT_NOW, "the camera is offline")
        return f"{camera}/{key or board}"

    def status(self) -> StatusView:
        with self._lock:
            return StatusView(
                line="test",
                version="0.1.0",
                uptime_s=3725.5,
                is_draining=self.is_stopping,
                requests_in_flight=len(self.under_way),
                verdicts={verdict: sum(part.verdict is verdict for part in self.results) for verdict in Verdict},
                boards_open=1,
                switches=7,
                loads=9,
                evictions=5,
                bytes_read=123_456_789,
                queues=(QueueView(0, "cpu", 3, "cls/resistor", 8.0, 2.0), QueueView(1, "cpu", 0, None)),
                pools=(PoolView("host", 50 * 2**20, 100 * 2**20, ("cls/resistor", "cls/capacitor"), 2**20, 2**21),),
                sources=(SourceStatus("inbox", "folder", "ONLINE", 12, 1, 0, None),
                         SourceStatus("top", "camera", "STALLED", 5, 0, 2, "no frame for 10 s")),
                standing={"det/alignment": "quarantined: its weights are not as they were packed"},
                alarms=("the disk is nearly full",),
                texts=TextsView(1, 2, 300, 40, 2, 0.5),
                shadows=ShadowsView(3, 1, 20, 2, 5),
            )  # fmt: skip

    def explain(self, subject: str) -> list[str]:
        if subject not in EXPERTS:
            raise OrderRefused(Refusing.NOT_FOUND, f"nothing is called {subject!r}")
        return [f"{subject} is in memory.", "It is asked often."]

    def reload(self) -> ReloadView:
        return ReloadView(is_applied=True, added=("cls/new",), needs_restart=("api.grpc",))
