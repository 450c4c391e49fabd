"""A small line in memory behind the desk's seam: it judges by what the image says, and can be told to keep its answers.

It keeps what the desk promises: one end for each order that is not cancelled, listeners called on a thread of its own,
results numbered, stored before they are told, and told in order.
"""

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Condition, RLock

from agent.doors import desk as views
from agent.faults.errors import OrderRefused, Reason
from agent.subject import SourceStatus, checked_name
from experts.daemon_threads import DaemonThreads
from experts.expert import AnomalyMap, BoundingBox, LabelScore, Verdict
from experts.llm.serving.generation import Ending, Piece, Token
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
SAID = {
    Verdict.OK: {"label": "good", "score": 0.75},
    Verdict.NG: {"label": "bad", "score": 0.75},
    Verdict.UNKNOWN: {"label": None, "score": None, "reason": "not an image"},
}


class FakeTicket:
    def __init__(self, desk, order, listener):
        self.desk, self.order, self.listener = desk, order, listener

    def cancel(self):
        with self.desk.changed:
            for under_way, cancelled in ((self.desk.under_way, self.desk.withdrawn),
                                         (self.desk.texts, self.desk.cancelled_texts)):  # fmt: skip
                if self in under_way:
                    under_way.remove(self)
                    cancelled.append(self.order)
                    self.desk.changed.notify_all()


class FakeText(FakeTicket):
    """A text under way, which its desk writes, or a test piece by piece."""

    written, characters, due_s = 0, 0, None

    def write(self, text):
        self.written += 1
        other = Token(1, -2.5, content=b"Bye")
        others = (other,) * (self.order.sampling.logprobs or 0)
        tokens = (Token(0, -0.5, others, text.encode(), self.characters),)
        self.characters += len(text)
        shown = tokens if self.order.sampling.logprobs is not None else ()
        self.listener.wrote(Piece("llm/code", text, shown))

    def end(self, ending=Ending.STOP, failure=None):
        with self.desk.changed:
            self.desk.texts.remove(self)
            self.desk.changed.notify_all()
        end = views.TextEnd(ending, "llm/code", 7, self.written, 0.5, 0.125, 0.25, failure=failure)
        self.listener.ended(end)


class FakeDesk:
    """``most``: orders under way at once. ``holds``: answers wait for ``release``."""

    def __init__(self, most=1_000_000, holds=False):
        self.most, self.holds, self.is_stopping, self.most_under_way = most, holds, False, 0
        self.file = "f11e"  # the results file's identity
        self.orders, self.under_way, self.withdrawn = [], [], []  # orders: all that were taken
        self.results, self.board_changes, self.loaded, self.unloaded = [], [], [], []
        self.text_orders, self.texts, self.cancelled_texts = [], [], []  # texts: under way
        self._lock = RLock()
        self.changed = Condition(self._lock)
        self._subscribers = []
        self._threads = DaemonThreads(1, "fake_desk")

    def order(self, order, listener):
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

    def _check(self, order):
        if self.is_stopping:
            raise OrderRefused(Reason.STOPPING, "stopping")
        for what in ("board", "ref", "key"):
            checked_name(getattr(order.subject, what), what)
        if order.subject.component not in {None, SOLDER, *ROUTES} or order.subject.expert not in {None, *EXPERTS}:
            told = f"no route for {order.subject.component!r}, no expert {order.subject.expert!r}"
            raise OrderRefused(Reason.NOT_FOUND, told)
        if order.subject.board_type not in {None, *BOARD_TYPES}:
            raise OrderRefused(Reason.NOT_FOUND, f"no board type {order.subject.board_type!r}")
        if len(self.under_way) >= self.most:
            raise OrderRefused(Reason.QUEUE_FULL, f"{self.most} images are under way", 0.25)

    def generate(self, order, listener):
        with self._lock:
            self._check_text(order)
            text = FakeText(self, order, listener)
            text.due_s = order.deadline_s and time.monotonic() + order.deadline_s
            self.text_orders.append(order)
            self.texts.append(text)
            self.changed.notify_all()
        if not self.holds:
            self._threads.submit(self._write, text)
        return text

    def _check_text(self, order):
        if self.is_stopping:
            raise OrderRefused(Reason.STOPPING, "stopping", 0.5)
        if order.model not in WRITERS:
            raise OrderRefused(Reason.NOT_FOUND, f"no model {order.model!r} writes texts", field="model")
        if not order.prompt and not order.messages:
            raise OrderRefused(Reason.INVALID, "prompt: is empty", field="prompt")
        if len(self.texts) >= self.most:
            raise OrderRefused(Reason.QUEUE_FULL, f"{self.most} texts are under way", 0.25)

    def _write(self, text):
        for piece in PROSE:
            text.write(piece)
        text.end()

    def text_models(self):
        both = [views.TextModelView(name, (name,), 64, True) for name in WRITERS[:2]]
        return [*both, views.TextModelView("helpdesk", WRITERS[:2], None, False, "quarantined")]

    def tokenised(self, order):
        self._check_text(order)
        words = order.prompt or "".join(each["content"] for each in order.messages)
        return views.PromptView(order.model, tuple(words.encode()), 64)

    def detokenised(self, model, tokens):
        return bytes(tokens).decode()

    def release(self):
        """Judge what was held, and hold no more."""
        with self._lock:
            self.holds = False
            for ticket in self.under_way:
                self._threads.submit(self._judge, ticket)

    def wait_for(self, condition):
        with self._lock:
            assert self.changed.wait_for(lambda: condition(self), DEADLINE_S), self

    def _judge(self, ticket):
        with self._lock:
            if ticket not in self.under_way:
                return
            self.under_way.remove(ticket)
            parts = self._parts(ticket.order)
            self.changed.notify_all()
        ticket.listener.judged(parts)

    def _parts(self, order):
        key = order.subject.key if order.is_kept else ""
        if known := [part for part in self.results if key and part.subject.key == key]:
            return known
        asked = order.subject.component or order.subject.expert
        parts = (self._part(order, name) for name in ([asked] if asked else ROUTES))
        return [self.commit(part) if order.is_kept else part for part in parts]

    def _part(self, order, component):
        image = order.image if isinstance(order.image, bytes) else bytes(order.image)
        verdict = next((each for each in (Verdict.NG, Verdict.UNKNOWN) if each.value.encode() in image), Verdict.OK)
        number = len(self.results) + 1
        key, board_type = order.subject.key or f"{number}", "main" if order.subject.board else None
        about = {"source": "", "arrived_at": START, "component": component, "board_type": board_type}
        shown = MAP if order.wants_maps else None
        return views.VerdictView(
            subject=replace(order.subject, key=key, image=key, **about),
            verdict=verdict,
            **SAID[verdict],
            experts=ROUTES.get(component, (component,)),
            boxes=(BoundingBox("good", 0.5, 1.0, 2.0, 3.0, 4.0),),
            finished_at=START + timedelta(seconds=number),
            **{"seconds": 0.5, "queue_s": 0.125, "compute_s": 0.25},
            anomalies=(views.AnomalyView("look/solder", 3.5, 1.25, shown),) if STRANGE in image else (),
            outputs=(LabelScore.of("bent", 0.75, 0.5),) if STRANGE in image else (),
        )

    def commit(self, part):
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

        def end():
            with self._lock:
                self._subscribers.remove(tell)
                self.changed.notify_all()

        return end

    @property
    def watchers(self):
        return len(self._subscribers)

    def stored_after(self, seq, board, limit, *, with_maps=False):
        with self._lock:
            found = [part for part in self.results if part.seq > seq][:limit]
            boards = [] if len(found) == limit else self.board_changes[board : board + limit]
            end = views.ResultsCursor(self.file, len(self.results), len(self.board_changes))
        shown = MAP if with_maps else None
        parts = [
            replace(part, anomalies=tuple(replace(each, map_png=shown) for each in part.anomalies)) for part in found
        ]
        return views.StoredView(end, tuple(parts), tuple(enumerate(boards, start=board + 1)))

    def models(self):
        routes = [views.ModelView(name, experts, ("good", "bad"), (8, 8), 4, True) for name, experts in ROUTES.items()]
        experts = [views.ModelView(f"expert:{name}", (name,), ("good", "bad"), None, 4, True) for name in EXPERTS[:2]]
        strange = views.ModelView(
            SOLDER, ("look/solder",), ("ok", "anomalous"), (8, 8), 4, True, measures_anomalies=True
        )
        broken = views.ModelView(f"expert:{EXPERTS[2]}", EXPERTS[2:], ("good",), None, 1, False, "quarantined")
        return [*routes, strange, *experts, broken]

    def load(self, model):
        self.loaded.append(model)

    def unload(self, model):
        self.unloaded.append(model)

    def _of_board(self, serial):
        return [part for part in self.results if part.subject.board == serial]

    def _board(self, serial):
        parts = self._of_board(serial)
        is_closed = len(parts) >= 2
        counts = {verdict: sum(part.verdict is verdict for part in parts) for verdict in Verdict}
        verdict = Verdict.OK if counts[Verdict.OK] == len(parts) else Verdict.NG
        missing = {} if is_closed else {"capacitor": 1}
        closed_at = START if is_closed else None
        ended = verdict if is_closed else None
        return views.BoardView(serial, "main", ended, START, closed_at, missing, counts, tuple(parts))

    def boards(self, serial, board_type=None):
        with self._lock:
            return [self._board(serial)] if self._of_board(serial) and board_type in {None, "main"} else []

    def trigger(self, camera, board=None, board_type=None, key=None):
        if camera != "top":
            raise OrderRefused(Reason.NOT_FOUND, f"no camera {camera!r}")
        if board is None:
            raise OrderRefused(Reason.NOT_NOW, "the camera is offline")
        return f"{camera}/{key or board}"

    def unready(self):
        return "it stops" if self.is_stopping else None

    def status(self):
        with self._lock:
            return views.StatusView(
                line="test", version="0.1.0", uptime_s=3725.5, is_draining=self.is_stopping,
                requests_in_flight=len(self.under_way),
                verdicts={verdict: sum(part.verdict is verdict for part in self.results) for verdict in Verdict},
                boards_open=1, switches=7, loads=9, evictions=5, bytes_read=123_456_789,
                queues=(views.QueueView(0, "cpu", 3, "cls/resistor", 8.0, 2.0), views.QueueView(1, "cpu", 0, None)),
                pools=(views.PoolView("host", 50 * 2**20, 100 * 2**20, EXPERTS[:2], 2**20, 2**21),),
                sources=(SourceStatus("inbox", "folder", "ONLINE", 12, 1, 0, None),
                         SourceStatus("top", "camera", "STALLED", 5, 0, 2, "no frame for 10 s")),
                standing={"det/alignment": "quarantined: its weights are not as they were packed"},
                alarms=("the disk is nearly full",), advice=("a profile proves a faster form",),
                texts=views.TextsView(1, 2, 300, 40, 2, 0.5), shadows=views.ShadowsView(3, 1, 20, 2, 5),
            )  # fmt: skip

    def explanation(self, subject):
        if subject not in EXPERTS:
            raise OrderRefused(Reason.NOT_FOUND, f"nothing is called {subject!r}")
        return views.Explanation(subject, [f"{subject} is in memory.", "It is asked often."])

    def reload(self):
        return views.ReloadView(is_applied=True, added=("cls/new",), needs_restart=("api.grpc",))
