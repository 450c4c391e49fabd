"""Outbox: undelivered messages, one for each receiver and event.

Guarantees: a message is written in the transaction of its result or board verdict: no message is lost, and none reports
an unstored fact. Its id is constant over deliveries, and unique across results files. A receiver gets messages in the
order of storing. At most ``limit`` messages wait for a receiver: beyond that the oldest are dropped, and counted.

A message is JSON with the number of its ``schema``. Under one number keys may be added, but none changes or is removed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from agent.records.database import read_rows, utc_text
from agent.records.verdict import steps_of
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from sqlite_utils import Database

    from agent.records.boards import BoardVerdict
    from agent.records.verdict import AlarmRow, Result, Step

SCHEMA = 1
BOARD, NG, RESULT, ALARM = "board", "ng", "result", "alarm"  # events
INSERT = """
    INSERT INTO outbox (receiver, id, event, board, payload) VALUES (:receiver, :id, :event, :board, :payload)
    ON CONFLICT (receiver, id) DO NOTHING RETURNING number
"""
COUNT = """
    INSERT INTO outbox_receivers (receiver, waiting) VALUES (?, 1)
    ON CONFLICT (receiver) DO UPDATE SET waiting = waiting + 1 RETURNING waiting
"""
GIVE_WAY = """
    DELETE FROM outbox WHERE number IN (SELECT number FROM outbox WHERE receiver = ? ORDER BY number LIMIT ?)
"""
GAVE_WAY = "UPDATE outbox_receivers SET waiting = waiting - ?, given_way = given_way + ? WHERE receiver = ?"
DELIVERED = "DELETE FROM outbox WHERE receiver = ? AND id = ? RETURNING number"
# Of a run: by seq from the board's first image, as the clock may have been set back since.
FIRST = """
    SELECT seq FROM results INDEXED BY results_finished_at WHERE finished_at >= ?1 AND board = ?2 AND board_type = ?3
    ORDER BY finished_at LIMIT 1
"""
OF_RUN = f"results INDEXED BY results_board WHERE board = ?2 AND board_type = ?3 AND seq >= ({FIRST})"
LATEST = f"SELECT config_sha256 FROM {OF_RUN} ORDER BY seq DESC LIMIT 1"
JUDGED = f"""
    SELECT json_extract(step.value, '$.expert'), nullif(json_extract(step.value, '$.model_sha256'), ''),
        max(ifnull(json_extract(step.value, '$.unproven'), 0))
    FROM (SELECT seq, iif(json_valid(detail), detail, '{{}}') AS detail FROM {OF_RUN}) AS judged,
    json_each(judged.detail, '$.steps') AS step GROUP BY 1, 2 ORDER BY min(judged.seq), min(step.key)
"""  # in SQLite: a run has megabytes of details, of which few facts are told
NOT_FOR_SQLITE = f"SELECT detail FROM {OF_RUN} AND NOT json_valid(detail) ORDER BY seq"  # as they hold NaN


@dataclass(frozen=True, slots=True)
class Message:
    """Message to one receiver. ``board``: serial; ``payload``: JSON."""

    id: str
    event: str
    board: str | None
    payload: str


@dataclass(frozen=True, slots=True)
class OutboxCounts:
    """Waiting messages of one receiver, and messages dropped since the results file was created."""

    waiting: int
    given_way: int


class Outbox:
    """Follower of a line's results: writes a message for each receiver of the event."""

    def __init__(
        self, line: str, receivers: Sequence[str], events: Sequence[str], limit: int, most_boxes: int | None = None
    ) -> None:
        self.line = line
        self._most_boxes = most_boxes
        self.receivers = tuple(receivers)
        self.limit = limit
        self._events = frozenset(events)
        self._when_committed: tuple[Callable[[], None], ...] = ()

    def when_committed(self, wake: Callable[[], None]) -> None:
        """Register a callback after each commit, on the store's thread."""
        self._when_committed = (*self._when_committed, wake)

    def result_stored(self, database: Database, row: Result) -> None:
        is_bad = row.verdict is not Verdict.OK
        for event in (NG, RESULT):
            if event in self._events and (is_bad or event == RESULT):
                payload = result_payload(row, self._most_boxes)
                self._put(database, f"result-{row.seq}-{event}", event, row.subject.board, payload)

    def board_stored(self, database: Database, row: BoardVerdict) -> None:
        if BOARD in self._events:
            payload = board_payload(row) | _judged_by(database, row)
            self._put(database, f"board-{row.seq}-{row.revisions}", BOARD, row.serial, payload)

    def alarm_stored(self, database: Database, row: AlarmRow) -> None:
        """Called for an alarm that was raised or cleared, inside a transaction."""
        if ALARM in self._events:
            payload = alarm_payload(row)
            self._put(database, f"alarm-{row.number}-{payload['state']}", ALARM, None, payload)

    def committed(self) -> None:
        for wake in self._when_committed:
            wake()

    def begin(self, database: Database) -> int:
        """Delete messages of receivers that left the line file; returns their number."""
        forgotten = 0
        for receiver, waiting in database.execute("SELECT receiver, waiting FROM outbox_receivers").fetchall():
            if receiver in self.receivers:
                self._give_way(database, receiver, waiting)
            else:
                database.execute("DELETE FROM outbox WHERE receiver = ?", (receiver,))
                database.execute("DELETE FROM outbox_receivers WHERE receiver = ?", (receiver,))
                forgotten += waiting
        return forgotten

    def _put(self, database: Database, fact: str, event: str, board: str | None, payload: Mapping[str, object]) -> None:
        id_ = f"{database.execute('SELECT id FROM identity').fetchall()[0][0]}-{fact}"
        text = json.dumps({"schema": SCHEMA, "id": id_, "event": event, "line": self.line} | dict(payload))
        message = {"id": id_, "event": event, "board": board, "payload": text}
        for receiver in self.receivers:
            if database.execute(INSERT, message | {"receiver": receiver}).fetchall():
                self._give_way(database, receiver, database.execute(COUNT, (receiver,)).fetchall()[0][0])

    def _give_way(self, database: Database, receiver: str, waiting: int) -> None:
        excess = waiting - self.limit
        if excess > 0:
            database.execute(GIVE_WAY, (receiver, excess))
            database.execute(GAVE_WAY, (excess, excess, receiver))


class OutboxReader:
    """Reads a line's outbox. Each call is one short query."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def waiting(self, receiver: str, limit: int) -> list[Message]:
        sql = "SELECT id, event, board, payload FROM outbox WHERE receiver = ? ORDER BY number LIMIT ?"
        return [Message(*row) for row in read_rows(self.path, sql, (receiver, limit))]

    def oldest(self, receiver: str) -> datetime | None:
        """Time of the oldest message's verdict or alarm; None without a message."""
        first = [json.loads(message.payload) for message in self.waiting(receiver, 1)]
        times = [each.get(name) for each in first for name in ("finished_at", "closed_at", "cleared_at", "raised_at")]
        return next((datetime.fromisoformat(time) for time in times if time), None)

    def standing(self, receiver: str) -> OutboxCounts:
        sql = "SELECT waiting, given_way FROM outbox_receivers WHERE receiver = ?"
        rows = read_rows(self.path, sql, (receiver,))
        return OutboxCounts(*rows[0]) if rows else OutboxCounts(0, 0)


def forget(receiver: str, ids: Sequence[str], database: Database) -> None:
    gone = sum(len(database.execute(DELIVERED, (receiver, id_)).fetchall()) for id_ in ids)
    database.execute("UPDATE outbox_receivers SET waiting = waiting - ? WHERE receiver = ?", (gone, receiver))


def result_payload(row: Result, most_boxes: int | None = None) -> dict[str, object]:
    boxes = [(step.expert, box) for step in row.steps for box in step.boxes]
    return {
        "seq": row.seq,
        "board_serial": row.subject.board,
        **row.flat(("board_type", "ref")),
        "component": row.subject.component or "",
        **row.flat(("verdict", "label", "score", "reason", "experts")),
        "models": _models(row.steps),
        "unproven": row.unproven,
        "boxes": [{"expert": expert, **box.as_json()} for expert, box in boxes[:most_boxes]],
        "boxes_total": len(boxes),
        **row.flat(("image", "kept_as")),
        "arrived_at": _iso(row.subject.arrived_at),
        "finished_at": _iso(row.finished_at),
        **row.flat(("seconds", "config_sha256")),
    }


def board_payload(row: BoardVerdict) -> dict[str, object]:
    """Message of one board, without the facts of its images."""
    return {
        "seq": row.seq,
        "revision": row.revisions,
        "is_revision": row.is_revision,
        "board_serial": row.serial,
        "board_type": row.board_type,
        "verdict": row.verdict,
        "opened_at": _iso(row.opened_at),
        "closed_at": _iso(row.closed_at),
        "takt_s": row.takt_s,
        "missing": row.missing,
        "reason": row.reason,
        "counts": row.counts,
    }


def alarm_payload(row: AlarmRow) -> dict[str, object]:
    return {
        "number": row.number,
        "name": row.name,
        "message": row.message,
        "state": "raised" if row.cleared_at is None else "cleared",
        "raised_at": _iso(row.raised_at),
        "cleared_at": None if row.cleared_at is None else _iso(row.cleared_at),
    }


def _judged_by(database: Database, board: BoardVerdict) -> dict[str, object]:
    """Facts of a board's images: line file of the latest, and all models."""
    run = utc_text(board.opened_at), board.serial, board.board_type
    latest = database.execute(LATEST, run).fetchone()
    rows = database.execute(JUDGED, run).fetchall()
    steps = [step for (detail,) in database.execute(NOT_FOR_SQLITE, run) for step in steps_of(detail)]
    judged: list[dict[str, object]] = [{"expert": expert, "sha256": sha256} for expert, sha256, _ in rows]
    models = judged + [each for each in _models(steps) if each not in judged]
    unproven = any(is_unproven for *_, is_unproven in rows) or any(step.unproven for step in steps)
    return {"config_sha256": latest and latest[0], "models": models, "unproven": unproven}


def _models(steps: Iterable[Step]) -> list[dict[str, object]]:
    """Experts that judged, with the sha256 of their weights; an expert appears twice if its weights were replaced."""
    judged = dict.fromkeys((step.expert, step.model_sha256 or None) for step in steps)
    return [{"expert": expert, "sha256": sha256} for expert, sha256 in judged]


def _iso(at: datetime) -> str:
    return at.astimezone().isoformat(timespec="milliseconds")
