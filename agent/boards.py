"""Boards: component outcomes -> one verdict per board. Pure: no clock, no file, no thread.

A board is OK only when every expected image came and is OK: for each component of its type as many distinct refs as
configured. It closes when the last one comes (NG if any is NG, else UNKNOWN if any is UNKNOWN, else OK), or when its
type's timeout has passed since the first one (NG if any is NG, else UNKNOWN), with what is missing.

Whatever comes twice counts at its worst, so the order of arrival never matters. A result that comes after closing may
make the verdict worse, which is told as a revision; it never makes it better. Once the timeout has passed again since
closing, the serial may open a new run of the board (rework). Times are wall-clock, because boards outlive restarts:
`replay` rebuilds the ledger from what is stored, where stored verdicts are the truth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

SEVERITY = {Verdict.OK: 0, Verdict.UNKNOWN: 1, Verdict.NG: 2}


@dataclass(frozen=True, slots=True)
class BoardManifest:
    """What a board of one type must show: component type -> how many, and how long to wait for all."""

    components: Mapping[str, int]
    timeout: timedelta


@dataclass(frozen=True, slots=True)
class Inspection:
    """One image's outcome on a board. ``at`` is when it was finished, with time zone."""

    serial: str
    board_type: str
    component: str
    ref: str
    verdict: Verdict
    at: datetime


@dataclass(frozen=True, slots=True)
class BoardVerdict:
    """A board's verdict. ``missing``: component -> images that never came; ``counts``: verdict -> images."""

    serial: str
    board_type: str
    verdict: Verdict
    opened_at: datetime
    closed_at: datetime
    missing: Mapping[str, int]
    counts: Mapping[Verdict, int]
    is_revision: bool = False


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """A snapshot: boards waiting for images, and closed ones that late results may still make worse."""

    open: int
    closed: int


@dataclass(slots=True)
class _Board:
    serial: str
    board_type: str
    manifest: BoardManifest
    opened_at: datetime
    images: dict[tuple[str, str], Verdict] = field(default_factory=dict)
    closed: BoardVerdict | None = None

    @property
    def deadline(self) -> datetime:
        return self.opened_at + self.manifest.timeout

    @property
    def forgotten_at(self) -> datetime | None:
        return self.closed.closed_at + self.manifest.timeout if self.closed else None

    def see(self, inspection: Inspection) -> None:
        place = (inspection.component, inspection.ref)
        before = self.images.get(place, inspection.verdict)
        self.images[place] = max(before, inspection.verdict, key=SEVERITY.__getitem__)

    @property
    def missing(self) -> dict[str, int]:
        came = dict.fromkeys(self.manifest.components, 0)
        for component, _ in self.images:
            if component in came:
                came[component] += 1
        wanted = self.manifest.components
        return {
            component: wanted[component] - came[component]
            for component in wanted
            if came[component] < wanted[component]
        }

    @property
    def counts(self) -> dict[Verdict, int]:
        verdicts = list(self.images.values())
        return {verdict: verdicts.count(verdict) for verdict in Verdict}

    @property
    def verdict(self) -> Verdict:
        """As it would be if the board closed now."""
        worst = max(self.images.values(), key=SEVERITY.__getitem__)
        return Verdict.UNKNOWN if worst is Verdict.OK and self.missing else worst

    def holds(self, at: datetime) -> bool:
        """Whether a closed run is the one of an image of this time, in time or late."""
        return self.opened_at <= at and (self.forgotten_at is None or at <= self.forgotten_at)

    def close(self, at: datetime) -> BoardVerdict:
        self.closed = BoardVerdict(
            self.serial, self.board_type, self.verdict, self.opened_at, at, self.missing, self.counts
        )
        return self.closed

    def take(self, inspection: Inspection) -> BoardVerdict | None:
        """Count an image of a closed run: the verdict made worse by it; None if it stays."""
        self.see(inspection)
        before = self.closed
        if before is None:
            return None
        worst = max(self.images.values(), key=SEVERITY.__getitem__)
        if SEVERITY[worst] <= SEVERITY[before.verdict]:
            return None
        self.closed = BoardVerdict(
            self.serial,
            self.board_type,
            worst,
            self.opened_at,
            before.closed_at,
            before.missing,
            self.counts,
            is_revision=True,
        )
        return self.closed


class BoardLedger:
    """Every board that waits for images, or that closed a short while ago. One thread at a time."""

    def __init__(self, manifests: Mapping[str, BoardManifest]) -> None:
        self._manifests = dict(manifests)
        self._boards: dict[tuple[str, str], _Board] = {}

    def add(self, inspection: Inspection) -> BoardVerdict | None:
        """Count one outcome. The board's verdict, if this closes it or makes a closed one worse.

        A result past the deadline of a board that nobody expired yet counts as late: the board closes as timed out.
        Raises KeyError for a board type without manifest.
        """
        manifest = self._manifests[inspection.board_type]
        key = (inspection.serial, inspection.board_type)
        board = self._boards.get(key)
        if board is None or (board.forgotten_at is not None and inspection.at > board.forgotten_at):
            board = self._boards[key] = _Board(*key, manifest, opened_at=inspection.at)
        missing_before = board.missing
        if board.closed is not None:
            return board.take(inspection)
        board.see(inspection)
        if inspection.at > board.deadline:
            return self._close_late(board, missing_before)
        return None if board.missing else board.close(inspection.at)

    def expire(self, now: datetime) -> tuple[BoardVerdict, ...]:
        """Close every board whose time is over, oldest first, and forget boards that closed long ago."""
        for key, board in list(self._boards.items()):
            if board.forgotten_at is not None and now > board.forgotten_at:
                del self._boards[key]
        due = [board for board in self._boards.values() if board.closed is None and now > board.deadline]
        return tuple(board.close(board.deadline) for board in sorted(due, key=lambda board: board.deadline))

    @property
    def next_deadline(self) -> datetime | None:
        """When `expire` has something to close next; None while no board is open."""
        return min((board.deadline for board in self._boards.values() if board.closed is None), default=None)

    @property
    def longest_timeout(self) -> timedelta:
        """Of all board types; nothing where there are none."""
        return max((manifest.timeout for manifest in self._manifests.values()), default=timedelta())

    def statistics(self) -> LedgerStatistics:
        """A snapshot of how many boards are open and closed."""
        closed = sum(board.closed is not None for board in self._boards.values())
        return LedgerStatistics(len(self._boards) - closed, closed)

    def replay(
        self, inspections: Iterable[Inspection], recorded: Iterable[BoardVerdict], since: datetime
    ) -> tuple[BoardVerdict, ...]:
        """After a restart: take up where it ended, from what is stored. Then call `expire`.

        ``inspections`` are those since ``since``, in the order in which they were stored; ``recorded`` the verdicts of
        all runs that may hold one of them. A recorded run is closed and stays as it is, whatever the manifests say by
        now; only what a crash kept from being stored is returned: verdicts of runs that are not recorded, and
        revisions. Of a run that may have begun before ``since`` nothing is said; nor of types without manifest.
        """
        runs = self._closed_runs(recorded)
        known_from = since + self.longest_timeout  # a run that opens later has no image from before ``since``
        said: dict[tuple[str, str, datetime], BoardVerdict] = {}
        for inspection in inspections:
            if inspection.board_type not in self._manifests:
                continue
            run = _run_of(inspection, runs.get((inspection.serial, inspection.board_type), ()))
            verdict = self.add(inspection) if run is None else run.take(inspection)
            if verdict is not None and verdict.opened_at >= (known_from if run is None else since):
                said[verdict.serial, verdict.board_type, verdict.opened_at] = verdict
        self._boards = {key: board for key, board in self._boards.items() if board.opened_at >= known_from}
        self._take_up(runs)
        return tuple(said.values())

    def _closed_runs(self, recorded: Iterable[BoardVerdict]) -> dict[tuple[str, str], list[_Board]]:
        """The recorded runs of each board, oldest first."""
        runs: dict[tuple[str, str], list[_Board]] = {}
        for verdict in sorted(recorded, key=lambda verdict: verdict.opened_at):
            manifest = self._manifests.get(verdict.board_type)
            if manifest is not None:
                run = _Board(verdict.serial, verdict.board_type, manifest, verdict.opened_at, closed=verdict)
                runs.setdefault((verdict.serial, verdict.board_type), []).append(run)
        return runs

    def _take_up(self, runs: Mapping[tuple[str, str], Sequence[_Board]]) -> None:
        """The latest run of each board is the one that its next image meets."""
        for key, recorded in runs.items():
            known = self._boards.get(key)
            if known is None or known.opened_at < recorded[-1].opened_at:
                self._boards[key] = recorded[-1]

    def _close_late(self, board: _Board, missing_before: Mapping[str, int]) -> BoardVerdict:
        """Close a board whose deadline passed before its last image: what was missing then stays missing."""
        worst = max(board.images.values(), key=SEVERITY.__getitem__)
        verdict = Verdict.UNKNOWN if worst is Verdict.OK else worst
        board.closed = BoardVerdict(
            board.serial, board.board_type, verdict, board.opened_at, board.deadline, missing_before, board.counts
        )
        return board.closed


def _run_of(inspection: Inspection, runs: Sequence[_Board]) -> _Board | None:
    """The recorded run that an image belongs to; None if to none of them.

    A refused file's time may lie a little before that of the image that opened its run: it was stored after it.
    """
    holding = [run for run in runs if run.holds(inspection.at)]
    if holding:
        return holding[-1]
    later = (run for run in runs if inspection.at < run.opened_at <= inspection.at + run.manifest.timeout)
    return next(later, None)
