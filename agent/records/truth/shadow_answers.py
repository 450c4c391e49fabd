"""Answers of experts and their shadows to the same images, written, and read back as a comparison.

Guarantees: rows belong to one pair of versions, identified by the digests of their weights and of the terms of their
answers: inputs, thresholds and routes. The latest KEPT_ROWS rows stay. Images that a shadow never judged are counted. A
comparison is a pure function of the rows.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import asdict, astuple, dataclass
from datetime import datetime
from statistics import fmean, median
from typing import TYPE_CHECKING

from agent.records.database import open_for_reading, utc_text
from experts.expert import Verdict

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from sqlite_utils import Database

KEPT_ROWS = 100_000  # over all pairs: about 30 MB
OF_IMAGE = ("key", "image", "component", "board", "ref", "kept_as", "reason")
COLUMNS = (
    "key image component expert shadow expert_sha256 shadow_sha256 label score passes seconds"
    " shadow_label shadow_score shadow_passes shadow_seconds reason asked_at"
    " executor processor shadow_executor shadow_processor terms_sha256"
)
INSERT = f"""
    INSERT INTO shadow_answers ({COLUMNS.replace(" ", ", ")}) VALUES (:{COLUMNS.replace(" ", ", :")}) RETURNING seq
"""
DROP_OLD = "DELETE FROM shadow_answers WHERE seq <= ?"
COUNT_DROPPED = """
    INSERT INTO shadow_drops (expert, shadow, expert_sha256, shadow_sha256, terms_sha256, dropped)
    VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (expert, shadow, expert_sha256, shadow_sha256, terms_sha256)
    DO UPDATE SET dropped = dropped + excluded.dropped
"""
LATEST = "SELECT * FROM shadow_answers WHERE expert = ? AND shadow = ? ORDER BY seq DESC LIMIT 1"
OF_PAIR = "expert = ? AND shadow = ? AND expert_sha256 = ? AND shadow_sha256 = ? AND terms_sha256 = ?"
OF_VERSIONS = f"""
    SELECT answers.*, results.kept_as, results.board, results.ref
    FROM shadow_answers AS answers LEFT JOIN results ON results.key = answers.key
    WHERE answers.{OF_PAIR} ORDER BY answers.seq
"""
REVIEWED = f"""
    SELECT answers.key, passes, shadow_passes FROM shadow_answers AS answers
    JOIN results ON results.key = answers.key JOIN reviews ON reviews.result = results.seq AND undone_at IS NULL
    WHERE answers.{OF_PAIR}
    AND passes IS NOT NULL AND shadow_passes IS NOT NULL
"""
DROPPED = f"SELECT dropped FROM shadow_drops WHERE {OF_PAIR}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Expert and shadow, by the line file's names, with the versions of their weights.

    ``terms_sha256``: digest of both entries and of the expert's steps on routes, by which both are judged.
    """

    expert: str
    shadow: str
    expert_sha256: str
    shadow_sha256: str
    terms_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Side:
    """Answer of expert or shadow. ``passes``: its step of the route does not judge NG; None outside a route.
    ``executor``: number of the executor."""

    label: str
    score: float
    passes: bool | None
    seconds: float
    executor: int
    processor: str


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Both answers to one image. ``key``: its result's; ``reason``: why the shadow has no answer. Set only on
    reading: the place of the image, and ``kept_as``, its file in the archive."""

    key: str
    image: str
    component: str | None
    pair: Pair
    answer: Side
    shadow_answer: Side | None
    asked_at: datetime
    reason: str | None = None
    board: str | None = None
    ref: str | None = None
    kept_as: str | None = None

    @property
    def agrees(self) -> bool:
        return self.shadow_answer is not None and self.shadow_answer.label == self.answer.label

    @property
    def flips_to_ng(self) -> bool:
        return self.answer.passes is True and self.shadow_answer is not None and self.shadow_answer.passes is False

    @property
    def flips_to_ok(self) -> bool:
        return self.answer.passes is False and self.shadow_answer is not None and self.shadow_answer.passes is True


def write_answer(database: Database, row: SideBySide) -> None:
    """Write an answer, and delete the oldest rows beyond KEPT_ROWS. Call inside a transaction."""
    values = answer_row(row) | asdict(row.pair) | {"asked_at": utc_text(row.asked_at)}
    (seq,) = database.execute(INSERT, values).fetchall()[0]
    database.execute(DROP_OLD, (seq - KEPT_ROWS,))


def count_dropped(database: Database, pair: Pair, count: int) -> None:
    """Count images that a shadow never judged. Call inside a transaction."""
    database.execute(COUNT_DROPPED, (*astuple(pair), count))


@dataclass(frozen=True, slots=True)
class Sides:
    expert: float
    shadow: float


@dataclass(frozen=True, slots=True)
class Ran:
    """Number of images that an executor ran."""

    executor: int
    processor: str
    images: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of an expert and its shadow over all images that both judged in these versions.

    ``flips_to_ng``: passed by the expert only; ``flips_to_ok``: by the shadow only. Scores are means, seconds
    medians; None without a common image. ``failed``: images without an answer of the shadow, with ``last_reason``;
    ``dropped``: images not submitted for lack of time or memory. ``ran_on``, ``shadow_ran_on``: executors.
    ``differing``: latest last.
    """

    pair: Pair
    images: int
    agreeing: int
    flips_to_ng: int
    flips_to_ok: int
    failed: int
    dropped: int
    last_reason: str | None
    scores: Sides | None
    seconds: Sides | None
    ran_on: tuple[Ran, ...]
    shadow_ran_on: tuple[Ran, ...]
    differing: tuple[SideBySide, ...]

    @property
    def agreement(self) -> float | None:
        """Fraction of equal judgements, 0 to 1; None before the first image."""
        return self.agreeing / self.images if self.images else None


def compare(pair: Pair, rows: Sequence[SideBySide], dropped: int) -> Comparison:
    both = [row for row in rows if row.shadow_answer is not None]
    failed = [row for row in rows if row.shadow_answer is None]
    answers, shadow_answers = [row.answer for row in both], [row.shadow_answer for row in both if row.shadow_answer]
    return Comparison(
        pair=pair,
        images=len(both),
        agreeing=sum(row.agrees for row in both),
        flips_to_ng=sum(row.flips_to_ng for row in both),
        flips_to_ok=sum(row.flips_to_ok for row in both),
        failed=len(failed),
        dropped=dropped,
        last_reason=failed[-1].reason if failed else None,
        scores=Sides(*(fmean(each.score for each in side) for side in (answers, shadow_answers))) if both else None,
        seconds=Sides(*(median(each.seconds for each in side) for side in (answers, shadow_answers))) if both else None,
        ran_on=_ran(answers),
        shadow_ran_on=_ran(shadow_answers),
        differing=tuple(row for row in both if not row.agrees or row.flips_to_ng or row.flips_to_ok),
    )


def read_comparison(path: Path, expert: str, shadow: str) -> Comparison | None:
    """Comparison of the latest versions of a pair; None without rows. Raises FileNotFoundError."""
    with closing(open_for_reading(path)) as connection:
        latest = connection.execute(LATEST, (expert, shadow)).fetchone()
        if latest is None:
            return None
        terms = latest["terms_sha256"] if "terms_sha256" in latest.keys() else ""  # noqa: SIM118  a row is no mapping
        pair = Pair(expert, shadow, latest["expert_sha256"], latest["shadow_sha256"], terms)
        rows = [_answer(pair, row) for row in connection.execute(_here(connection, OF_VERSIONS), astuple(pair))]
        dropped = connection.execute(_here(connection, DROPPED), astuple(pair)).fetchone()
    return compare(pair, rows, dropped[0] if dropped else 0)


def read_verdicts(path: Path, pair: Pair) -> dict[str, tuple[Verdict, Verdict]]:
    """Answers of expert and shadow to each reviewed image: OK or NG, by key. Raises FileNotFoundError."""
    verdicts = (Verdict.NG, Verdict.OK)
    with closing(open_for_reading(path)) as connection:
        rows = connection.execute(_here(connection, REVIEWED), astuple(pair)).fetchall()
    return {key: (verdicts[passes], verdicts[shadow_passes]) for key, passes, shadow_passes in rows}


def _here(connection: sqlite3.Connection, sql: str) -> str:
    """The query for this file: one of an earlier version, which is read as it is, has no terms."""
    columns = {row["name"] for row in connection.execute("PRAGMA table_info(shadow_answers)")}
    return sql if "terms_sha256" in columns else sql.replace("terms_sha256 = ?", "? = ''")


def answer_row(row: SideBySide) -> dict[str, object]:
    """Both answers as one flat row; keys of the shadow begin with `shadow_`."""
    shadow = dict.fromkeys(Side.__slots__) if row.shadow_answer is None else asdict(row.shadow_answer)
    place = {name: getattr(row, name) for name in OF_IMAGE}
    return place | asdict(row.answer) | {f"shadow_{name}": value for name, value in shadow.items()}


def _answer(pair: Pair, row: sqlite3.Row) -> SideBySide:
    return SideBySide(
        **{name: row[name] for name in OF_IMAGE},
        pair=pair,
        answer=_side(row, ""),
        shadow_answer=None if row["shadow_label"] is None else _side(row, "shadow_"),
        asked_at=datetime.fromisoformat(row["asked_at"]),
    )


def _side(row: sqlite3.Row, prefix: str) -> Side:
    values = {name: row[f"{prefix}{name}"] for name in Side.__slots__}
    return Side(**values | {"passes": None if values["passes"] is None else bool(values["passes"])})


def _ran(sides: Iterable[Side]) -> tuple[Ran, ...]:
    counts = Counter((side.executor, side.processor) for side in sides if side.processor)
    return tuple(Ran(number, processor, images) for (number, processor), images in sorted(counts.items()))
