"""Boards: component outcomes -> one verdict per board. Pure: no clock, no file, no thread.

A board is OK only if every expected image arrived and is OK: for each component of its type as many distinct refs as
configured. A board closes with the last image: NG if any is NG, else UNKNOWN if any is UNKNOWN, else OK. Or it closes
when its type's timeout has passed since the first image: NG if any is NG, else UNKNOWN, with the missing images.

No image stands for a part that never came. If a type lists a component's refs, only those count towards completeness;
any other ref can only make the verdict worse. If a type has only a number, two refs that mean one part (`named_part`)
are copies. Equal bytes under two refs are copies as well. A board with a copy is UNKNOWN or NG, never OK.

A part that is judged twice counts at its worst, so the order of arrival never matters. A result after closing may
make the verdict worse, which is reported as a revision, but never better. Once the timeout has passed again since
closing, the serial may open a new run of the board (rework). A person who reworks a closed board ends that wait: the
next image of the serial opens a new run. No stored verdict changes by it.

A board's age is monotonic time (``now_s``), so no step of the wall clock closes a board; wall-clock times (``at``) are
stored and shown. Boards outlive restarts, monotonic time does not. So `replay` rebuilds the ledger from stored rows,
with stored verdicts unchanged, and derives each age from the stored times:
    Results are read in the order of storing. The time between two results is the difference of their stored times,
    limited to 0 and the longest timeout: a larger value is a step of the clock, or time in which no agent ran.
    Time since the latest result does not count: while the agent is off, a board's images wait as files.
    An open board keeps at least half of its timeout, since a step may have counted as a timeout.
    A run without a stored verdict is still open: a timeout would have been stored.
    A rework names its run, which was closed, and the last result before it: later images are not of that run.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping  # noqa: TC003  # pydantic reads it
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TypeAlias

from agent.subject import named_part, read_alike
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from agent.subject import Subject

SEVERITY = {Verdict.OK: 0, Verdict.UNKNOWN: 1, Verdict.NG: 2}
READ_BACK_TIMEOUTS = 4  # of the longest: one for starts of unknown runs, one for open runs, two for clock steps
READ_BACK_LEAST_S = 60.0  # arbitrary: for verdicts due but not stored at the end of the agent
SET_BACK_S = 60.0  # arbitrary: results are stored almost in the order of their times
LARGEST_AGE_AT_START = 0.5  # of a board's timeout
MOST_NAMED = 5  # names in a reason

_Key: TypeAlias = tuple[str, str]  # a board's serial and type
_Place: TypeAlias = tuple[str, str]  # component and ref


@dataclass(frozen=True, slots=True)
class BoardManifest:
    """Images that a board of one type needs, by component, and the timeout for all of them. ``refs``: refs of
    components whose refs are known."""

    components: Mapping[str, int]
    timeout: timedelta
    refs: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def timeout_s(self) -> float:
        return self.timeout.total_seconds()

    def expects(self, place: _Place) -> bool:
        component, ref = place
        listed = self.refs.get(component)
        return component in self.components and (listed is None or unicodedata.normalize("NFC", ref) in listed)


@dataclass(frozen=True, slots=True)
class Inspection:
    """Verdict of one subject, as boards count it. ``at``: time of the verdict, with time zone. ``seq``: number of the
    stored result, for the replay. ``image_sha256``: digest of an image of this part alone."""

    subject: Subject
    verdict: Verdict
    at: datetime
    seq: int = 0
    image_sha256: str | None = None

    @property
    def board(self) -> tuple[str, str]:
        """Serial and type of the board; only for a subject on a board."""
        return str(self.subject.board), str(self.subject.board_type)


@dataclass(frozen=True, slots=True)
class BoardVerdict:
    """A board's verdict. ``missing``: component -> images that never arrived; ``counts``: verdict -> images.
    ``reason``: names of missing refs, of copies and of refs that are not of the board; None for OK.

    ``takt_s``: monotonic seconds since the ledger closed a board of this type before; None for the first one of a run
    of the agent, and for a revision. ``seq``: number of its row, 0 until it is stored; ``revisions``: number of
    later verdicts of this run.
    """

    serial: str
    board_type: str
    verdict: Verdict
    opened_at: datetime
    closed_at: datetime
    missing: Mapping[str, int]
    counts: Mapping[Verdict, int]
    is_revision: bool = False
    takt_s: float | None = field(default=None, compare=False)
    reason: str | None = None
    seq: int = field(default=0, compare=False)
    revisions: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Rework:
    """End of a closed run of a board, for a person. ``after_seq``: number of the last result before it."""

    serial: str
    board_type: str
    opened_at: datetime
    after_seq: int
    who: str
    reason: str | None
    at: datetime


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """Snapshot: open boards, and closed boards that late results may still make worse."""

    open: int
    closed: int


@dataclass(slots=True)
class BoardRun:
    """One run of a board. ``closed``: its verdict; None while the board is open. ``opened_s`` and ``closed_s`` are
    monotonic; `replay` derives both for stored runs. ``arrived``: places that count towards completeness; ``copies``:
    places with the earlier place that each repeats; ``known``: the first place of each image, by bytes and by name."""

    serial: str
    board_type: str
    manifest: BoardManifest
    opened_at: datetime
    opened_s: float = math.nan
    images: dict[_Place, Verdict] = field(default_factory=dict)
    arrived: set[_Place] = field(default_factory=set)
    copies: dict[_Place, _Place] = field(default_factory=dict)
    known: dict[object, _Place] = field(default_factory=dict)
    closed: BoardVerdict | None = None
    closed_s: float = math.inf

    @property
    def deadline_s(self) -> float:
        return self.opened_s + self.manifest.timeout_s

    @property
    def forgotten_s(self) -> float:
        return self.closed_s + self.manifest.timeout_s

    def see(self, inspection: Inspection) -> None:
        place = (str(inspection.subject.component), str(inspection.subject.ref))
        before = self.images.get(place, inspection.verdict)
        self.images[place] = max(before, inspection.verdict, key=SEVERITY.__getitem__)
        if not self.manifest.expects(place):
            return
        component, sha256 = place[0], inspection.image_sha256
        marks: list[object] = [] if sha256 is None else [sha256]
        if component in self.manifest.refs:
            marks = [(component, mark) for mark in marks]  # parts of two components may share an image
        else:
            marks.append((component, named_part(place[1])))
        earlier = [self.known.setdefault(mark, place) for mark in marks]
        if (first := next((each for each in earlier if each != place), None)) is not None:
            self.copies.setdefault(place, first)
        else:
            self.arrived.add(place)

    @property
    def closed_at(self) -> datetime:
        """Wall-clock time of closing; of an open board, of opening."""
        return self.closed.closed_at if self.closed else self.opened_at

    @property
    def missing(self) -> dict[str, int]:
        came = Counter(component for component, _ in self.arrived)
        wanted = self.manifest.components.items()
        return {component: images - came[component] for component, images in wanted if came[component] < images}

    @property
    def counts(self) -> dict[Verdict, int]:
        counted = Counter(self.images.values())
        return {verdict: counted[verdict] for verdict in Verdict}

    @property
    def worst(self) -> Verdict:
        verdict = max(self.images.values(), key=SEVERITY.__getitem__)
        return Verdict.UNKNOWN if verdict is Verdict.OK and self.copies else verdict

    @property
    def lack(self) -> list[str]:
        """Missing images, by ref where the refs are known."""
        came = {(component, unicodedata.normalize("NFC", ref)) for component, ref in self.arrived}
        lacking = []
        for component, images in self.missing.items():
            refs = sorted(ref for ref in self.manifest.refs.get(component, ()) if (component, ref) not in came)
            lacking.append(f"missing: {_names(refs)} of {component}" if refs else f"missing: {images} of {component}")
        return lacking

    def reason(self, lack: Sequence[str]) -> str | None:
        """Why the board is not OK, besides verdicts of its parts. ``lack``: at its closing."""
        strangers = sorted({ref for component, ref in self.images if not self.manifest.expects((component, ref))})
        others = [f"not parts of board type {self.board_type}: {_names(strangers)}"] if strangers else []
        copies = [_pair(*pair) for pair in sorted(self.copies.items())]
        doubles = [f"one part, or one image, under two refs: {_names(copies, str)}"] if copies else []
        return "; ".join([*lack, *others, *doubles]) or None

    def snapshot(self) -> BoardRun:
        """A copy that later images do not change."""
        return replace(self, images=dict(self.images), arrived=set(self.arrived), copies=dict(self.copies), known={})

    def holds(self, at: datetime) -> bool:
        """True if an image of this wall-clock time belongs to this closed run, in time or late."""
        return self.opened_at <= at <= self.closed_at + self.manifest.timeout

    def close(self, at: datetime, now_s: float, late: Inspection | None = None) -> BoardVerdict:
        """Close, never before the opening, even if the clock was set back. ``late``: an image after the deadline."""
        missing, lack = self.missing, self.lack
        if late is not None:
            self.see(late)
        verdict = Verdict.UNKNOWN if self.worst is Verdict.OK and missing else self.worst
        self.closed = BoardVerdict(
            self.serial, self.board_type, verdict, self.opened_at, max(at, self.opened_at), missing, self.counts,
            reason=None if verdict is Verdict.OK else self.reason(lack),
        )  # fmt: skip
        self.closed_s = now_s
        return self.closed

    def count(self, inspection: Inspection, now_s: float) -> BoardVerdict | None:
        """Count an image. Returns the verdict if the image closes the board, or makes a closed one worse."""
        self.see(inspection)
        if self.closed is None:
            return None if self.missing else self.close(inspection.at, now_s)
        if SEVERITY[self.worst] <= SEVERITY[self.closed.verdict]:
            return None
        reason = self.closed.reason or self.reason(())
        self.closed = replace(self.closed, verdict=self.worst, counts=self.counts, is_revision=True, reason=reason)
        return self.closed


class BoardLedger:
    """Open and recently closed boards. For one thread at a time; ``now_s`` never decreases."""

    def __init__(self, manifests: Mapping[str, BoardManifest]) -> None:
        self._manifests = dict(manifests)
        self._boards: dict[_Key, BoardRun] = {}
        self._closed_s: dict[str, float] = {}  # of the latest board, by type

    def change(self, manifests: Mapping[str, BoardManifest]) -> None:
        """Set the types of boards that open later; open boards keep their manifest."""
        self._manifests = dict(manifests)

    def counts(self, inspection: Inspection, now_s: float) -> bool:
        """True if the type has a manifest, or had one when the board opened."""
        return inspection.board[1] in self._manifests or self._known(inspection, now_s) is not None

    def add(self, inspection: Inspection, now_s: float) -> BoardVerdict | None:
        """Count one outcome. Returns the verdict if the outcome closes its board, or makes a closed one worse.

        A result past the deadline of a board not yet expired counts as late: the board closes as timed out.
        Raises KeyError for an outcome without a board.
        """
        board = self._board_of(inspection, now_s)
        if board.closed is None and now_s > board.deadline_s:
            return self._timed(board.close(inspection.at, now_s, late=inspection), now_s)
        verdict = board.count(inspection, now_s)
        return verdict if verdict is None or verdict.is_revision else self._timed(verdict, now_s)

    def _timed(self, verdict: BoardVerdict, now_s: float) -> BoardVerdict:
        before_s, self._closed_s[verdict.board_type] = self._closed_s.get(verdict.board_type), now_s
        return replace(verdict, takt_s=None if before_s is None else now_s - before_s)

    def rework(self, serial: str, board_type: str, opened_at: datetime) -> None:
        """Forget this run, if it is known still. Call for a closed run only."""
        run = self._boards.get((serial, board_type))
        if run is not None and run.opened_at == opened_at:
            del self._boards[serial, board_type]

    def expire(self, now_s: float, now: datetime) -> tuple[BoardVerdict, ...]:
        """Close all boards past their deadline, oldest first, and forget boards that closed long ago."""
        self._boards = {key: board for key, board in self._boards.items() if now_s < board.forgotten_s}
        due = [board for board in self._boards.values() if board.closed is None and now_s > board.deadline_s]
        due.sort(key=lambda board: board.deadline_s)
        return tuple(self._timed(board.close(now, now_s), now_s) for board in due)

    @property
    def longest_timeout(self) -> timedelta:
        return max((manifest.timeout for manifest in self._manifests.values()), default=timedelta())

    def run_of(self, serial: str, board_type: str) -> BoardRun | None:
        return self._boards.get((serial, board_type))

    def runs(self, serial: str) -> tuple[BoardRun, ...]:
        """Snapshots of the boards of this serial, at most one of each type."""
        return tuple(board.snapshot() for board in self._boards.values() if board.serial == serial)

    def open_runs(self) -> tuple[BoardRun, ...]:
        """Snapshots of the boards that wait for images."""
        return tuple(run.snapshot() for run in self._boards.values() if run.closed is None)

    def read_alike(self) -> list[list[str]]:
        """Serials of the known boards of one type that people read as one, in the order of their opening."""
        alike: defaultdict[_Key, list[str]] = defaultdict(list)
        for serial, board_type in self._boards:
            alike[read_alike(serial), board_type].append(serial)
        return [serials for serials in alike.values() if len(serials) > 1]

    def statistics(self) -> LedgerStatistics:
        closed = sum(board.closed is not None for board in self._boards.values())
        return LedgerStatistics(len(self._boards) - closed, closed)

    def replay(
        self,
        newest_first: Iterable[Inspection],
        recorded_since: Callable[[datetime], Iterable[BoardVerdict]],
        now_s: float,
        now: datetime,
        reworks: Iterable[Rework] = (),
    ) -> tuple[BoardVerdict, ...]:
        """Rebuild the ledger from stored rows after a restart; see the module for the boards' ages.

        ``newest_first``: the installation's results, latest first, read as far as open boards need; ``recorded_since``:
        verdicts closed at that time or later. A recorded run stays unchanged, even under other manifests. Returns
        verdicts and revisions that a crash kept from being stored; none for types without manifest, or for runs that
        may have begun before the results read.
        """
        longest = self.longest_timeout.total_seconds()
        history = _read_back(newest_first, now_s, longest)
        if not history.moments:
            return ()
        recorded = recorded_since(min(moment.inspection.at for moment in history.moments) - self.longest_timeout)
        runs = _Runs(recorded, self._manifests, reworks)
        known_from_s = history.since_s + longest  # a run that opens later has no earlier image
        verdicts: dict[tuple[str, str, datetime], BoardVerdict] = {}
        for moment in history.moments:
            inspection = moment.inspection
            if inspection.board[1] not in self._manifests:
                continue
            run = runs.run_of(inspection, moment.at_s)
            board = self._board_of(inspection, moment.at_s) if run is None else run
            verdict = board.count(inspection, moment.at_s)
            if verdict is not None and board.opened_s >= (known_from_s if run is None else history.since_s):
                verdicts[verdict.serial, verdict.board_type, verdict.opened_at] = verdict
        self._boards = {key: board for key, board in self._boards.items() if board.opened_s >= known_from_s}
        self._take_up(runs.latest(), now_s, now)
        for board in self._boards.values():
            board.opened_s = max(board.opened_s, now_s - LARGEST_AGE_AT_START * board.manifest.timeout_s)
        return tuple(verdicts.values())

    def _take_up(self, latest: Iterable[BoardRun], now_s: float, now: datetime) -> None:
        """Keep stored runs by the wall clock, unless a new run has followed."""
        for run in latest:
            key = (run.serial, run.board_type)
            known = self._boards.get(key)
            if known is None or known.opened_s <= run.opened_s:
                run.closed_s = now_s - max((now - run.closed_at).total_seconds(), 0.0)
                self._boards[key] = run

    def _board_of(self, inspection: Inspection, now_s: float) -> BoardRun:
        """The known run of an image, or a new one."""
        board = self._known(inspection, now_s)
        if board is None:
            key, manifest = inspection.board, self._manifests[inspection.board[1]]
            board = self._boards[key] = BoardRun(*key, manifest, inspection.at, now_s)
        return board

    def _known(self, inspection: Inspection, now_s: float) -> BoardRun | None:
        board = self._boards.get(inspection.board)
        return None if board is None or now_s >= board.forgotten_s else board


def _pair(place: _Place, first: _Place) -> str:
    of = "" if place[0] == first[0] else f" of {place[0]} and {first[0]}"
    return f"{place[1]!r} and {first[1]!r}{of}"


def _names(names: Sequence[str], shown: Callable[[str], str] = repr) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(shown, names[:MOST_NAMED])) + more


@dataclass(frozen=True, slots=True)
class _Moment:
    """Stored inspection with its time on the current monotonic clock."""

    inspection: Inspection
    at_s: float


@dataclass(frozen=True, slots=True)
class _History:
    """Stored inspections, oldest first. ``since_s``: complete from this time on."""

    moments: tuple[_Moment, ...]
    since_s: float


def _read_back(newest_first: Iterable[Inspection], now_s: float, longest_s: float) -> _History:
    """Read as far as open boards need; the latest result gets the time ``now_s``."""
    since_s = now_s - READ_BACK_TIMEOUTS * longest_s - READ_BACK_LEAST_S
    moments: list[_Moment] = []
    at_s, earliest = now_s, None
    for stored in newest_first:
        if earliest is None or (stored.at - earliest).total_seconds() > SET_BACK_S:
            earliest = stored.at  # the clock was set back between this result and the next
        elif stored.at < earliest:
            at_s -= min((earliest - stored.at).total_seconds(), longest_s)
            earliest = stored.at
        if at_s < since_s:
            return _History(tuple(reversed(moments)), since_s)
        if stored.subject.is_on_board:
            moments.append(_Moment(stored, at_s))
    return _History(tuple(reversed(moments)), -math.inf)


class _Runs:
    """Stored runs of boards, matched with images in the order of storing.

    A run begins with the image whose time equals the run's opening. Later images belong to the run until it would have
    been forgotten. Images of runs that began before the results read are matched by the wall clock.
    """

    def __init__(
        self,
        recorded: Iterable[BoardVerdict],
        manifests: Mapping[str, BoardManifest],
        reworks: Iterable[Rework],
    ) -> None:
        self._over = {(each.serial, each.board_type, each.opened_at): each.after_seq for each in reworks}
        self._runs: dict[_Key, list[BoardRun]] = {}  # oldest first
        self._begun: dict[_Key, BoardRun] = {}  # the latest run whose first image was read
        for verdict in sorted(recorded, key=lambda verdict: verdict.opened_at):
            manifest = manifests.get(verdict.board_type)
            if manifest is not None:
                run = BoardRun(verdict.serial, verdict.board_type, manifest, verdict.opened_at, closed=verdict)
                self._runs.setdefault((verdict.serial, verdict.board_type), []).append(run)

    def run_of(self, inspection: Inspection, at_s: float) -> BoardRun | None:
        key = inspection.board
        runs = self._runs.get(key, ())
        beginning = next((run for run in runs if run.opened_at == inspection.at and math.isnan(run.opened_s)), None)
        if beginning is not None:
            beginning.opened_s = at_s
            lasted = min(beginning.closed_at - beginning.opened_at, beginning.manifest.timeout)
            beginning.closed_s = at_s + lasted.total_seconds()
            self._begun[key] = beginning
        begun = self._begun.get(key)
        if begun is not None and at_s < begun.forgotten_s and not self._is_over(begun, inspection.seq):
            return begun
        holding = [run for run in runs if run.holds(inspection.at) and not self._is_over(run, inspection.seq)]
        return holding[-1] if holding else None

    def latest(self) -> Iterator[BoardRun]:
        """The latest run of each board, unless it was reworked."""
        latest = (self._begun.get(key, runs[-1]) for key, runs in self._runs.items())
        return (run for run in latest if not self._is_over(run, math.inf))

    def _is_over(self, run: BoardRun, seq: float) -> bool:
        """True for a run that was reworked before the result of this number."""
        after_seq = self._over.get((run.serial, run.board_type, run.opened_at))
        return after_seq is not None and seq > after_seq
