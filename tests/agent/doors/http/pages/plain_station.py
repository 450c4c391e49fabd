"""A station of records behind the real routes, door and pages: what the pages are drawn from.

``python -m tests.agent.doors.http.pages.plain_station PORT KIND`` serves it to look at.

Kinds: busy, empty, failing, hostile.
"""

from __future__ import annotations

import io
import random
import sys
import tempfile
import threading
from dataclasses import fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

from PIL import Image, ImageDraw
from pydantic import TypeAdapter

from agent.doors.access import Tokens
from agent.doors.desk import Explanation, ReloadView, TextModelView
from agent.doors.http import station
from agent.doors.http.door import WebDoor
from agent.doors.http.pages.files import pages_section
from agent.doors.http.server import WebServer
from agent.faults.errors import OrderRefused, Reason
from agent.line_file.api import ApiSection
from agent.records.boards import Rework
from agent.records.station.audit import AuditEntry
from agent.records.station.reviews import Finding, Review
from agent.records.verdict import AlarmRow
from agent.runtime.flight_record import ExpertSeen
from agent.service.station import served, views
from agent.service.texts.text_under_way import TextGlance
from experts.expert import BoundingBox, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.doors.http.operations import Operation
    from agent.service.station import questions as asked

TOKENS = {"anna": "admin", "bert": "read"}  # each one's token is its name and `-secret`
HOSTILE = "<img src=x onerror=alert(1)>\"'&</script>\u202e"
COMPONENTS = ("capacitor", "connector", "solder joint", "chip", "polarity mark")
LABELS = {"capacitor": "tombstone", "connector": "bent pin", "solder joint": "bridge", "chip": "scratch"}
OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN
FINDINGS = {(NG, OK): Finding.FALSE_CALL, (OK, NG): Finding.MISSED_DEFECT}
MIB = 2**20
Row = TypeVar("Row")


def moment(ago_s: float = 0.0) -> datetime:
    return datetime.now().astimezone() - timedelta(seconds=ago_s)


def widened(kind: type[Row], row: Any, **more: Any) -> Row:  # a record that it extends
    return kind(**{each.name: getattr(row, each.name) for each in fields(row)}, **more)


def rework(serial: str, who: str, reason: str | None = None) -> Rework:
    return Rework(serial, "demo-board", moment(2000), 12, who, reason, moment(900))


class PlainStation:
    """Implements ``station.Station``. ``now`` and ``results`` may be replaced between requests."""

    def __init__(self, kind: str = "busy") -> None:
        self.kind = kind
        self.random = random.Random(7)
        self.results = {} if kind == "empty" else {seq: self._result(seq) for seq in range(1, 61)}
        self.now = self._state()
        self.reads: dict[Operation, Callable[[Any], object]] = {
            served.RESULTS: self._results,
            served.RESULT: self._detail,
            served.BOARDS: self._boards,
            served.BOARD: self._board,
            served.EXPERTS: lambda _: views.ExpertsDocument(
                tuple(map(self._expert, ("cls/capacitor", "cls/chip", "cls/connector")))
            ),
            served.EXPERT: self._expert_detail,
            served.ENGINE: lambda _: self._engine(),
            served.TEXTS: lambda _: self._texts(),
            served.EXPLAIN: self._explain,
            served.LINE: lambda _: views.LineDocument(
                "/etc/coserve/line.yaml", "line: top-side\nexperts: {}\n", "0" * 64, is_served=True
            ),
            served.AUDIT: lambda _: views.AuditDocument(
                (AuditEntry(1, moment(60), self._text("anna"), "operate", "review", "result 59", "done", "0" * 64),),
                None,
            ),
        }
        self.shown: dict[Operation, Callable[[Any], station.Shown]] = {
            served.IMAGE: lambda query: picture(query.seq, 400, 300),
            served.THUMBNAIL: lambda query: picture(query.seq, 160, 120),
            served.FRAME: lambda query: picture(query.seq, 900, 600),
            served.HEAT: lambda _: heat(),
        }
        self.changes: dict[Operation, Callable[[str, Any], object]] = {
            served.REVIEW: self._review,
            served.UNDO: self._undo,
            served.REWORK: lambda who, given: rework(given.serial, who),
            served.CHECK: lambda *_: views.CheckedDocument(
                (views.LineProblem(2, 1, "experts", self._text("no expert: name one at least")),)
            ),
            served.RELOAD: lambda *_: ReloadView(is_applied=True, added=("cls/new",)),
        }

    def state(self) -> bytes:
        cases = tuple(self.results[each.seq] for each in self.now.cases)  # with their reviews
        return TypeAdapter(views.StateView).dump_json(replace(self.now, cases=cases), warnings="error")

    def uptime_s(self) -> float:
        return 4000.0

    def stop(self) -> None:
        """Nothing is under way."""

    def _text(self, usual: str) -> str:
        return HOSTILE if self.kind == "hostile" else usual

    # -- results and boards --

    def _result(self, seq: int) -> views.ResultView:
        verdict = (NG, OK, UNKNOWN, OK, NG, OK)[seq % 6]
        component = COMPONENTS[seq % 5]
        ago_s = (61 - seq) * 37.0
        label = {NG: LABELS.get(component, "wrong way"), OK: "good", UNKNOWN: None}[verdict]
        return views.ResultView(
            seq=seq,
            file="0a1b2c3d",
            key=f"inbox/{seq}",
            board=self._text(f"SN-2026-{7300 + seq // 6:06}"),
            board_type="demo-board",
            ref=f"C{seq % 40}",
            component=self._text(component),
            image=self._text(f"board_{seq}.png"),
            verdict=verdict,
            label=label and self._text(label),
            score=None if verdict is UNKNOWN else 0.93 + (seq % 7) / 100,
            reason=self._text("no expert answered in time") if verdict is UNKNOWN else None,
            experts=(f"cls/{component.split()[0]}", f"det/{component.split()[0]}"),
            unproven=seq % 2 == 1,
            arrived_at=moment(ago_s + 0.8),
            finished_at=moment(ago_s),
            seconds=0.3 + self.random.random(),
            has_image=seq % 11 != 0,
            has_maps=verdict is NG,
            review=None,
        )

    def _known(self, seq: int) -> views.ResultView:
        if seq not in self.results:
            raise OrderRefused(Reason.NOT_FOUND, "no such result")
        return self.results[seq]

    def _detail(self, query: asked.OfResult) -> views.ResultDetail:
        result = self._known(query.seq)
        label, is_ng = result.label or "?", result.verdict is NG
        anomaly = views.MeasuredView(0.61 if is_ng else 0.2, 0.42, is_ng)
        outputs = (views.OutputView("bridge", 0.7, 0.5, holds=True),) if query.seq % 4 == 0 else ()
        boxes = (BoundingBox(label, 0.91, 150.0, 90.0, 260.0, 190.0),) if is_ng else ()
        first, second = result.experts
        return widened(
            views.ResultDetail,
            result,
            steps=(
                views.StepView(first, "passed", 0.98, (), anomaly, (), unproven=False),
                views.StepView(second, label, result.score or 0.4, boxes, None, outputs, result.unproven),
            ),
            box=(20, 30, 220, 180),
            size=(300, 400),
            config_sha256="0" * 64,
            reviews=(result.review,) if result.review else (),
            timeline=self._course(result),
        )

    def _course(self, result: views.ResultView) -> dict[str, Any]:
        usual = {"executor": "cuda0 0", "processor": "cuda0", "queued_s": 0.1}
        batch = {"images": 12, "began_s": 0.3, "seconds": 0.08}
        load = {"from": "host", "to": "cuda0", "seconds": 0.21, "evicted": ["cls/chip"]}
        steps = [
            {**usual, "expert": expert, "joined": index > 0, "load": None if index else load, "batch": batch}
            for index, expert in enumerate(result.experts)
        ]
        return {"steps": steps, "total_s": result.seconds}

    def _results(self, query: asked.ResultsAsked) -> views.ResultsDocument:
        found = [
            each
            for each in reversed(self.results.values())
            if query.verdict in (None, each.verdict) and (query.before is None or each.seq < query.before)
        ]
        page = tuple(found[:25])
        return views.ResultsDocument(page, page[-1].seq if len(found) > 25 else None)

    def _boards(self, query: asked.BoardsAsked) -> views.BoardsDocument:
        closed = [each for each in self.now.boards if each.number is not None and each.serial == query.serial]
        return views.BoardsDocument(tuple(closed[:1]), None)

    def _board(self, query: asked.OfNumber) -> views.BoardDetail:
        tile = next(each for each in self.now.boards if each.number == query.number)
        places = [(60 + 210 * (n % 4), 60 + 180 * (n // 4)) for n in range(12)]
        boxes = [None if query.number % 2 else (left, top, left + 160, top + 140) for left, top in places]
        rows = [replace(self.results[seq], board=tile.serial) for seq in range(1, 13)]
        parts = tuple(widened(views.PartView, row, box=box) for row, box in zip(rows, boxes, strict=True))
        reworks = (rework(tile.serial, "anna", self._text("resoldered C4")),)
        more = {"parts": parts, "size": (600, 900), "frame": 1, "reworks": reworks, "is_cut": False}
        return widened(views.BoardDetail, replace(tile, opened_at=parts[0].arrived_at), **more)

    def _review(self, who: str, given: asked.ReviewGiven) -> Review:
        result, verdict = self._known(given.result), Verdict(given.verdict)
        finding = FINDINGS.get((result.verdict, verdict), Finding.AGREE)
        finding = Finding.DECIDED if result.verdict is UNKNOWN else finding
        made = Review(result.seq * 10, result.seq, finding, verdict, given.label, given.reason, who, moment())
        self.results[result.seq] = replace(result, review=made)
        return made

    def _undo(self, _: str, query: asked.OfReview) -> Review | None:
        result = self._known(query.number // 10)
        self.results[result.seq] = replace(result, review=None)
        return result.review

    # -- the line now --

    def _state(self) -> views.StateView:
        is_empty, is_failing = self.kind == "empty", self.kind == "failing"
        boards = tuple(
            views.BoardTile(
                number=None if n == 0 else 171 - n,
                serial=self._text(f"SN-2026-{7311 - n:06}"),
                board_type="demo-board",
                verdict=None if n == 0 else NG if n % 7 == 3 else UNKNOWN if n == 12 else OK,
                opened_at=moment(180.0 * n + 60),
                closed_at=moment(180.0 * n),
                takt_s=171.0,
                counts={OK: 6, NG: 0, UNKNOWN: 0},
                missing=2 if n == 0 else 0,
                reason="missing: 2 of resistor" if n == 0 else None,
            )
            for n in range(0 if is_empty else 24)
        )
        alarms = (
            AlarmRow(3, "camera/belt", self._text("camera belt is OFFLINE: no frame for 42 s"), moment(300)),
            AlarmRow(2, "disk", "3.1 GiB left on /var/lib/coserve: images are no longer kept", moment(9000)),
        )
        lack = "no frame for 42 s" if is_failing else None
        return views.StateView(
            line=self._text("top-side"),
            version="0.2.0",
            config_sha256="0" * 64,
            phase=None,
            judging=views.JudgingView("FAILING", "results cannot be stored: the disk is full")
            if is_failing
            else views.JudgingView("IDLE" if is_empty else "JUDGING"),
            shift=self._shift(),
            alarms=alarms if is_failing or self.kind == "hostile" else (),
            boards=boards,
            cases=tuple(each for each in reversed(self.results.values()) if each.verdict is not OK)[:12],
            sources=(
                views.SourceView(
                    self._text("belt"), "camera", "OFFLINE" if is_failing else "STREAMING", lack, 4000, 0, 4.0, 0
                ),
                views.SourceView("inbox", "folder", "READING", None, 90, 3, 1.2, 0),
            ),
            receivers=(views.ReceiverView("mes", 0, None),),
            executors=(
                views.ExecutorView(0, "cuda0", "main", 12, "cls/capacitor", 0.82, 0.91),
                views.ExecutorView(1, "cpu", "main", 3, None, 1.4, 0.37),
            ),
            memories=(
                views.MemoryView("cuda0", 6100 * MIB, 6500 * MIB, 31, 0, 0),
                views.MemoryView("host", 9000 * MIB, 24_000 * MIB, 164, 0, 0),
            ),
            loads=views.LoadsView(1712, 9.4, 1544, 10**11, 1.31),
            texts=views.WritingView(2, 40, 118.0),
            standing=(),
            unproven=("cls/capacitor",),
        )

    def _shift(self) -> views.ShiftView:
        is_empty, bars = self.kind == "empty", [*LABELS.items(), ("polarity mark", None)]
        return views.ShiftView(
            since=moment(3 * 3600),
            verdicts=dict.fromkeys(Verdict, 0) if is_empty else {OK: 10_243, NG: 61, UNKNOWN: 3},
            boards=dict.fromkeys(Verdict, 0) if is_empty else {OK: 164, NG: 6, UNKNOWN: 1},
            takt_s=None if is_empty else 191.0 if self.kind == "failing" else 171.0,
            takt_target_s=180.0,
            takts=(views.TaktView("demo-board", 171.0, 180.0),),
            reviews={"agree": 9, "false_call": 2, "missed_defect": 1, "decided": 3},
            pareto=()
            if is_empty
            else tuple(views.ParetoBar(self._text(name), label, 31 - 6 * n) for n, (name, label) in enumerate(bars)),
        )

    # -- the machine --

    def _expert(self, name: str) -> views.ExpertView:
        return views.ExpertView(
            id=self._text(name),
            sha256="0" * 64,
            shadow=None,
            components=(self._text("capacitor"),),
            architecture="resnet18",
            memories=("cuda0",),
            usage_profiled=0.21,
            usage_seen=0.34,
            loads=41,
            evictions=40,
            standing=None,
            unproven="not compared with its known answers yet",
            false_calls=2,
            reviewed_ng=14,
        )

    def _expert_detail(self, query: asked.OfExpert) -> views.ExpertDetail:
        on_cuda = views.LatencyView(0.004, 16, 0.03, {"host": 0.02, "disk": 0.3})
        why = self._text("nothing waits for it")
        return widened(
            views.ExpertDetail,
            replace(self._expert(query.id), id=query.id),
            labels=("good", self._text("tombstone")),
            task="classify",
            latency={"cuda": on_cuda, "cpu": replace(on_cuda, one_s=0.05)},
            drift=0.13,
            reviews={"agree": 11, "false_call": 2, "missed_defect": 1, "decided": 0},
            seen=ExpertSeen(8123, 702, 0.31, 1.2),
            evictions_recent=(views.EvictionView(moment(60), "cuda0", 2, why, "cls/chip", ("cls/chip", "cls/cap")),),
        )

    def _engine(self) -> views.EngineDocument:
        def spans(count: int, longest_s: float, most: int) -> tuple[views.Span, ...]:
            begins = sorted(-60 * self.random.random() for _ in range(count))
            ends = [min(begin + longest_s * self.random.random(), 0.0) for begin in begins]
            draw = self.random.randrange
            return tuple((*each, f"cls/{draw(20)}", draw(1, most)) for each in zip(begins, ends, strict=True))

        experts = tuple(views.Resident(f"cls/{n}", 10**7) for n in range(5))
        executors, memories = enumerate(self.now.executors), self.now.memories
        links = ("host->cuda0", spans(60, 0.4, 10**8)), ("disk->host", spans(12, 2.0, 10**8))
        return views.EngineDocument(
            moment(),
            60.0,
            tuple(views.ExecutorSpans(n, one.processor, one.worker, spans(300, 0.3, 16)) for n, one in executors),
            tuple(views.LinkSpans(*each) for each in links),
            tuple(views.MemoryDetail(one.name, one.used_bytes, one.capacity_bytes, experts, 0, 0) for one in memories),
        )

    def _texts(self) -> views.TextsDocument:
        rows = tuple(TextGlance(n, self._text("llm/notes"), "llm/notes", 0.4 * n, 512, 20 * n) for n in (1, 2))
        models = (TextModelView("llm/notes", ("llm/notes",), 4096, is_ready=True),)
        return views.TextsDocument(models, rows, 118.2, 0.31)

    def _explain(self, query: asked.ExplainAsked) -> Explanation:
        waited = self._text("It waited 0.10 s in the group of cls/capacitor on cuda0.")
        return Explanation(query.subject, [waited, "The group waited 0.21 s for its expert to be loaded from host."])


def picture(seq: int, width: int, height: int) -> station.Shown:
    image = Image.new("RGB", (width, height), (24, 74, 52))
    pen = ImageDraw.Draw(image)
    unit = width / 400

    def scaled(*numbers: int) -> list[float]:
        return [number * unit for number in numbers]

    for top in range(20, 20 + 14 * 24, 24):
        pen.line(scaled(0, top, 400, top + seq % 9), (36, 98, 70), max(1, int(3 * unit)))
    pen.rectangle(scaled(90, 80, 310, 220), (46, 48, 52), (200, 200, 205), max(1, int(4 * unit)))
    pen.line(scaled(160, 100, 250, 180), (170, 172, 176), max(1, int(5 * unit)))
    return png(image)


def heat() -> station.Shown:
    image = Image.new("RGBA", (40, 30))
    distances = [int(((x - 20) ** 2 + (y - 14) ** 2) ** 0.5) for y in range(30) for x in range(40)]
    image.putdata([(255, max(0, 220 - 16 * far), 0, max(0, 230 - 24 * far)) for far in distances])
    return png(image)


def png(image: Image.Image) -> station.Shown:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return station.Shown(stream.getvalue(), "image/png")


class Served:
    """The station at a port. ``stop`` and ``start`` as an agent's restart: same port, nothing else kept."""

    def __init__(self, station: PlainStation, port: int = 0) -> None:
        self.station = station
        self.port = port
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name in TOKENS:
                Path(folder, name).write_text(f"{name}-secret", "utf-8")
            tokens = {name: {"role": role, "file": f"{folder}/{name}"} for name, role in TOKENS.items()}
            values = {"http": f"127.0.0.1:{self.port}", "tokens": tokens}
            api = ApiSection.model_validate(values, context={"folder": Path(folder)})
            known = Tokens(api)
        with patch.object(station, "FRESH_S", 0.0):  # a test sees at once what it has changed
            answers = station.StationRoutes(self.station, served.OPERATIONS)
        self._server = WebServer(api, WebDoor([answers.section(), pages_section()], known, lambda *_: None, api))
        self._server.start()
        self.port = int(self._server.addresses[0].rpartition(":")[2])

    def stop(self) -> None:
        self._server.stop()


if __name__ == "__main__":
    print(Served(PlainStation(sys.argv[2]), int(sys.argv[1])).url)  # noqa: T201 - to be opened
    threading.Event().wait()
