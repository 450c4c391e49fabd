"""The nouns of what is stored: results, boards, and how their store is doing. Frozen records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from agent.records.boards import BoardVerdict
    from agent.subject import Subject
    from experts.expert import Verdict


@dataclass(frozen=True, slots=True)
class KeptMap:
    """Where an image is anomalous, as a small grey PNG over the whole of it. ``step``: which of the route, from 0."""

    step: int
    expert: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """The end of one request. ``detail`` is JSON-like: predictions, boxes.

    ``kept_as``: the image's file, relative to the archive's folder; None where none is kept. ``maps`` are stored
    beside the row; ``ResultReader.maps`` alone reads them.
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


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A stored result."""

    seq: int
    result: Result


@dataclass(frozen=True, slots=True)
class BoardRow:
    """A stored board verdict; ``revisions`` counts how often a later one of the same run replaced it.

    ``takt_s``: seconds by the wall clock since the board of its type closed that closed before it; None for the first.
    """

    seq: int
    revisions: int
    board: BoardVerdict
    takt_s: float | None = None


@dataclass(frozen=True, slots=True)
class StoredPage:
    """What is stored behind a place, of one moment. ``file``: the results file's identity, whose numbers these are.

    ``last_seq``, ``last_board``: the last numbers that it gave to a result, and to a change of a board's verdict.
    ``boards``: with these numbers; behind the last result alone.
    """

    file: str
    last_seq: int
    last_board: int
    results: tuple[ResultRow, ...]
    boards: tuple[tuple[int, BoardRow], ...]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What became of a record: its row's number, and whether this call wrote it (False: the key was there already)."""

    seq: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A snapshot. ``alarm`` says why nothing can be committed at the moment; None while all is well.

    ``log_alarm``: what keeps the log of the file from being folded in, so that it grows; commits go on.
    ``damage_alarm``: where a damaged file was put aside since the start.
    """

    pending: int
    committed: int
    duplicates: int
    failed_commits: int
    alarm: str | None
    log_alarm: str | None = None
    damage_alarm: str | None = None
