"""Reviews: a person's verdict on a stored result, beside the machine's verdict and never over it.

Guarantees: a result has at most one review that counts; the ones before it stay as undone. The same review sent twice
is one. A review can be undone in the shift in which it was made. An answer is given after the commit. Numbers belong to
one results file: a number of another file is refused, and so is one without its file once the file was replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003  # pydantic reads it
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from agent.faults.errors import OrderRefused, Reason
from agent.records.database import Rows, read_rows, utc_text, was_exchanged
from agent.records.result_reader import LARGEST_SEQ
from agent.records.verdict import result_row
from experts.expert import Verdict

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from sqlite_utils import Database

    from agent.records.result_writer import ResultStore
    from agent.records.station.shifts import Shifts
    from agent.records.verdict import Result

MACHINE = "SELECT verdict FROM results WHERE seq = ?"
REVIEW_COLUMNS = ("number", "result", "finding", "verdict", "label", "reason", "who", "at", "undone_at", "undone_by")
COUNTING = "SELECT * FROM reviews WHERE result = ? AND undone_at IS NULL"
OF_NUMBER = "SELECT * FROM reviews WHERE number = ?"
INSERT = """
    INSERT INTO reviews (result, finding, verdict, label, reason, who, at)
    VALUES (:result, :finding, :verdict, :label, :reason, :who, :at) RETURNING *
"""
UNDO = "UPDATE reviews SET undone_at = ?, undone_by = ? WHERE number = ? RETURNING *"
# qualified, as results have some of these columns too
AS_REVIEW = ", ".join(f"reviews.{name} AS review_{name}" for name in REVIEW_COLUMNS)
CHAINS = """
    WITH RECURSIVE chains (experts) AS (
        SELECT min(experts) FROM results
        UNION ALL SELECT (SELECT min(results.experts) FROM results WHERE results.experts > chains.experts) FROM chains
        WHERE chains.experts IS NOT NULL
    ) SELECT experts FROM chains WHERE EXISTS (SELECT 1 FROM json_each(chains.experts) WHERE value = :expert)
"""  # each list of experts with this one, by one look into the index
# NOT INDEXED: in the order of numbers; by the index of times each page would sort all reviews
PAGE = f"""
    SELECT results.*, {AS_REVIEW} FROM reviews NOT INDEXED JOIN results ON results.seq = reviews.result
    WHERE number < :before AND undone_at IS NULL AND at >= :since AND at < :until
    AND (:who IS NULL OR who = :who) AND (:component IS NULL OR component = :component)
    AND (:expert IS NULL OR results.experts IN ({CHAINS}))
    ORDER BY number DESC LIMIT :limit
"""
COUNTS = """
    SELECT json_extract(results.experts, '$[#-1]') AS expert, finding, count(*) AS reviews,
        sum(results.verdict = 'NG') AS machine_ng
    FROM reviews INDEXED BY reviews_at JOIN results ON results.seq = reviews.result
    WHERE at >= ? AND undone_at IS NULL GROUP BY expert, finding
"""


class Finding(StrEnum):
    """A person's verdict against the machine's. DECIDED: the machine said UNKNOWN."""

    AGREE = "agree"
    FALSE_CALL = "false_call"
    MISSED_DEFECT = "missed_defect"
    DECIDED = "decided"


@dataclass(frozen=True, slots=True)
class Review:
    """A person's verdict on a result, OK or NG. ``who``: name of the person's token. ``undone_at``: None for a review
    that counts."""

    number: int
    result: int
    finding: Finding
    verdict: Verdict
    label: str | None
    reason: str | None
    who: str
    at: datetime
    undone_at: datetime | None = None
    undone_by: str | None = None


REVIEWS = Rows(Review)


@dataclass(frozen=True, slots=True)
class ReviewCounts:
    """``machine_ng``: reviews of results that the machine called NG, of which false calls are a part."""

    findings: Mapping[Finding, int] = field(default_factory=lambda: dict.fromkeys(Finding, 0))
    machine_ng: int = 0


@dataclass(frozen=True, slots=True)
class ReviewedResult:
    review: Review
    result: Result


@dataclass(frozen=True, slots=True)
class ReviewQuery:
    """Filters of reviews that count; None: any. ``expert``: one of those that judged. ``before``: number."""

    since: datetime | None = None
    until: datetime | None = None
    who: str | None = None
    expert: str | None = None
    component: str | None = None
    before: int | None = None
    limit: int | None = None


def finding_of(machine: Verdict, person: Verdict) -> Finding:
    if machine is Verdict.UNKNOWN:
        return Finding.DECIDED
    if machine is person:
        return Finding.AGREE
    return Finding.FALSE_CALL if machine is Verdict.NG else Finding.MISSED_DEFECT


class Reviews:
    """Writes reviews of a running line. Each call blocks until the commit: not for the store's thread."""

    def __init__(self, store: ResultStore, shifts: Shifts, wall: Callable[[], datetime]) -> None:
        self._store = store
        self._shifts = shifts
        self._wall = wall

    def add(
        self,
        result: int,
        verdict: Verdict,
        who: str,
        label: str | None = None,
        reason: str | None = None,
        file: str | None = None,
    ) -> Review:
        """Store a review, which replaces an earlier one of the result. ``file``: identity of the results file that the
        number is of. Raises OrderRefused."""
        now = utc_text(self._wall())
        review = {"result": result, "verdict": verdict, "label": label, "reason": reason, "who": who}
        return self._store.write_now(lambda database: self._refusal(database, file) or _add(database, review, now))

    def undo(self, number: int, who: str, file: str | None = None) -> Review:
        """Raises OrderRefused for an unknown number, and NOT_NOW after the shift in which the review was made."""
        now = self._wall()
        began_at = self._shifts.began_at(now)
        return self._store.write_now(
            lambda database: self._refusal(database, file) or _undo(database, number, who, now, began_at)
        )

    def _refusal(self, database: Database, file: str | None) -> OrderRefused | None:
        """Numbers begin again in another results file."""
        ((present,),) = database.execute("SELECT id FROM identity").fetchall()
        if file == present or (file is None and not was_exchanged(self._store.path)):
            return None
        of = "no file is named, and the results file was replaced" if file is None else f"the number is of file {file}"
        reason = f"{of}: the line has file {present} - look the result up again, and send its `file`"
        return OrderRefused(Reason.CURSOR_UNKNOWN, reason, field="file")


class ReviewReader:
    """Reads the reviews of one results file. Each call is one short query, or several."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def page(self, query: ReviewQuery) -> tuple[ReviewedResult, ...]:
        """Newest first."""
        values = {name: getattr(query, name) for name in ("who", "expert", "component")} | {
            "limit": -1 if query.limit is None else query.limit,
            "before": LARGEST_SEQ if query.before is None else query.before,
            "since": "" if query.since is None else utc_text(query.since),
            "until": "~" if query.until is None else utc_text(query.until),  # "~" sorts behind all times
        }
        return tuple(ReviewedResult(review_beside(row), result_row(row)) for row in read_rows(self.path, PAGE, values))

    def of_result(self, seq: int) -> tuple[Review, ...]:
        """All reviews of a result, also undone ones, newest first."""
        rows = read_rows(self.path, "SELECT * FROM reviews WHERE result = ? ORDER BY number DESC", (seq,))
        return tuple(map(REVIEWS.record, rows))

    def counts(self, since: datetime) -> dict[str | None, ReviewCounts]:
        """Reviews made since then, by the last expert of the result's route; None where no expert judged."""
        counts: dict[str | None, ReviewCounts] = {}
        for expert, finding, reviews, machine_ng in read_rows(self.path, COUNTS, (utc_text(since),)):
            before = counts.get(expert, ReviewCounts())
            findings = {**before.findings, Finding(finding): reviews}
            counts[expert] = ReviewCounts(findings, before.machine_ng + machine_ng)
        return counts


def review_beside(row: sqlite3.Row) -> Review:
    """Review of a row with a result's columns, too."""
    return REVIEWS.record({name: row[f"review_{name}"] for name in REVIEW_COLUMNS})


def _add(database: Database, review: Mapping[str, Any], now: str) -> Review | OrderRefused:
    machine = database.execute(MACHINE, (review["result"],)).fetchone()
    if machine is None:
        return OrderRefused(Reason.NOT_FOUND, f"no result {review['result']}", field="result")
    counting = _first(database, COUNTING, review["result"])
    if counting is not None:
        if all(getattr(counting, name) == value for name, value in review.items()):
            return counting
        database.query(UNDO, (now, review["who"], counting.number))
    finding = finding_of(Verdict(machine[0]), review["verdict"])
    return REVIEWS.record(next(database.query(INSERT, {**review, "finding": finding, "at": now})))


def _first(database: Database, sql: str, value: int) -> Review | None:
    return next(map(REVIEWS.record, database.query(sql, (value,))), None)


def _undo(database: Database, number: int, who: str, now: datetime, began_at: datetime) -> Review | OrderRefused:
    found = _first(database, OF_NUMBER, number)
    if found is None:
        return OrderRefused(Reason.NOT_FOUND, f"no review {number}", field="number")
    if found.undone_at is not None:
        return found
    if found.at < began_at:
        made = f"review {number} was made in an earlier shift, at {found.at.astimezone():%Y-%m-%d %H:%M}"
        return OrderRefused(Reason.NOT_NOW, f"{made}: review the result again instead", field="number")
    return REVIEWS.record(next(database.query(UNDO, (utc_text(now), who, number))))
