"""Frozen records of stored results, boards and alarms, and of their store."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003  # pydantic reads it for `/api`
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.records.boards import BoardVerdict
    from agent.subject import Subject
    from experts.expert import Verdict


OF_KEPT = re.compile(r"~([0-9a-f]{32})\.\w+$")  # a kept image's name has the first digits of its digest


def rests_on_unproven(detail: Mapping[str, Any]) -> bool:
    """Whether an expert of these steps had no proof when it answered."""
    return any(step.get("unproven") for step in detail.get("steps", ()))


@dataclass(frozen=True, slots=True)
class KeptMap:
    """Anomaly map of an image: a small grey PNG over the whole image. ``step``: index in the route, from 0."""

    step: int
    expert: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one request. ``detail`` is JSON-like: predictions, boxes.

    ``kept_as``: path of the image below the archive's folder; None if not kept. ``maps`` are stored in another table,
    and read by ``ResultReader.maps`` only.
    """

    subject: Subject
    line: str
    verdict: Verdict
    finished_at: datetime
    seconds: float
    config_sha256: str
    label: str | None = None
    score: float | None = None
    reason: str | None = None
    experts: tuple[str, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)
    kept_as: str | None = None
    maps: tuple[KeptMap, ...] = ()

    @property
    def place(self) -> str | None:
        """Path of a judged file below its watched folder, once it was put away."""
        return self.detail.get("place")

    @property
    def unproven(self) -> bool:
        return rests_on_unproven(self.detail)

    @property
    def image_sha256(self) -> str:
        """Digest of the judged image file, or its first digits; empty if a row of before does not tell it."""
        named = OF_KEPT.search(self.kept_as or "")
        return str(self.detail.get("image_sha256") or (named[1] if named else ""))


@dataclass(frozen=True, slots=True)
class ResultRow:
    seq: int
    result: Result


@dataclass(frozen=True, slots=True)
class BoardRow:
    """Stored board verdict. ``revisions``: number of later verdicts of this run."""

    seq: int
    revisions: int
    board: BoardVerdict


@dataclass(frozen=True, slots=True)
class StoredPage:
    """Rows after a cursor, in one snapshot. ``file``: identity of the results file, to which the numbers belong.

    ``last_seq``, ``last_board``: last numbers of a result and of a change of a board's verdict. ``boards``: changes
    with their numbers, only after the last result.
    """

    file: str
    last_seq: int
    last_board: int
    results: tuple[ResultRow, ...]
    boards: tuple[tuple[int, BoardRow], ...]


@dataclass(frozen=True, slots=True)
class AlarmRow:
    """``number``: None until it is stored. ``cleared_at``: None while the alarm is there."""

    number: int | None
    name: str
    message: str
    raised_at: datetime
    cleared_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """Number of a record's row. ``is_new``: written by this call; False: the key was already stored."""

    seq: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Snapshot. ``alarm``: why commits fail now. ``log_alarm``: why the log grows; commits continue. ``damage_alarm``:
    path of a damaged file that was put aside since the start. None: no alarm."""

    pending: int
    committed: int
    duplicates: int
    failed_commits: int
    alarm: str | None
    log_alarm: str | None = None
    damage_alarm: str | None = None
