"""A line's boards: what is stored is in the order of what was decided, and nothing decided is lost on the way."""

import threading
from datetime import UTC, datetime, timedelta

import pytest

from agent.line_file.boards import BoardSection
from agent.service.inspections.line_boards import LineBoards
from experts.expert import Verdict
from tests import lines
from tests.agent.service.fake_line import PATIENCE_S

START = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN
BOARDS = {"main": BoardSection(components={"c0": 1, "c1": 1}, takt_s=3600, timeout_s=60)}


class Clocks:
    """Both clocks of a machine, each moved by the test's hand."""

    def __init__(self):
        self.running_s = 1000.0
        self.off_by = timedelta()

    def clock(self):
        return self.running_s

    def wall(self):
        return START + timedelta(seconds=self.running_s - 1000.0) + self.off_by

    def result(self, component, verdict=OK, serial="B1", board_type="main"):
        at = self.wall()
        place = {"component": component, "board": serial, "board_type": board_type, "ref": "R1"}
        return lines.result(f"{serial}{component}{at}", verdict, arrived_at=at, **place)


class StoreInMemory:
    """Keeps board verdicts in the order in which they come; ``before`` runs before each, and may refuse it."""

    def __init__(self):
        self.boards = []
        self.before = lambda verdict: None

    def record_board(self, verdict, on_committed):
        self.before(verdict)
        self.boards.append(verdict)

    @property
    def verdicts(self):
        return [(verdict.serial, verdict.verdict) for verdict in self.boards]


class WatchedLock:
    """A lock that tells when somebody has to wait for it."""

    def __init__(self, is_awaited):
        self._lock = threading.Lock()
        self._is_awaited = is_awaited

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self._is_awaited.set()
            self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


@pytest.fixture
def clocks():
    return Clocks()


@pytest.fixture
def store():
    return StoreInMemory()


@pytest.fixture
def boards(store, clocks):
    return LineBoards(BOARDS, store, clock=clocks.clock, wall=clocks.wall)


def test_late_ng_is_never_overwritten_by_the_earlier_verdict(boards, store, clocks):
    """The housekeeper is held between deciding UNKNOWN and storing it, until the late NG has come as far as it can."""
    has_gone_on = threading.Event()
    boards._guard = WatchedLock(has_gone_on)
    late = threading.Thread(target=lambda: boards.count(clocks.result("c1", NG)))

    def hold(verdict):
        if verdict.verdict is UNKNOWN:
            late.start()
            assert has_gone_on.wait(PATIENCE_S)
        else:
            has_gone_on.set()

    store.before = hold
    boards.count(clocks.result("c0"))
    clocks.running_s += 61
    boards.expire()
    late.join(PATIENCE_S)
    assert store.verdicts == [("B1", UNKNOWN), ("B1", NG)]


def test_board_whose_type_is_removed_from_the_line_file_keeps_its_manifest(boards, store, clocks):
    """Else it would close as UNKNOWN, as if its last images had never come; and no other board of its type opens."""
    boards.count(clocks.result("c0"))
    boards.change({})
    boards.count(clocks.result("c1"))
    boards.count(clocks.result("c0", serial="B2"))
    clocks.running_s += 61
    boards.expire()
    assert store.verdicts == [("B1", OK)]


def test_board_verdict_refused_by_the_store_is_stored_before_later_ones(boards, store, clocks):
    def refuse(verdict):
        raise OSError("no space left on device")

    for serial in ("B1", "B2"):
        boards.count(clocks.result("c0", serial=serial))
    clocks.running_s += 61
    store.before = refuse
    with pytest.raises(OSError, match="no space"):
        boards.expire()
    with pytest.raises(OSError, match="no space"):
        boards.count(clocks.result("c1", NG))
    assert store.verdicts == []
    store.before = lambda verdict: None
    boards.expire()
    assert store.verdicts == [("B1", UNKNOWN), ("B2", UNKNOWN), ("B1", NG)]


@pytest.mark.parametrize("step", [timedelta(hours=1), timedelta(hours=-1)], ids=["forward", "back"])
def test_boards_time_out_by_the_monotonic_clock_despite_clock_steps(boards, store, clocks, step):
    boards.count(clocks.result("c0"))
    clocks.off_by = step
    clocks.running_s += 59
    boards.expire()
    assert store.boards == []
    clocks.running_s += 2
    boards.expire()
    (expired,) = store.boards
    assert (expired.verdict, expired.opened_at, expired.closed_at) == (UNKNOWN, START, max(clocks.wall(), START))


def test_takt_is_the_elapsed_time_despite_clock_steps(clocks, store):
    """NTP sets a box without a battery by 26 years; later somebody sets the clock back."""
    boards = LineBoards(BOARDS, store, clock=clocks.clock, wall=clocks.wall)
    for serial, leap in (("B1", timedelta()), ("B2", timedelta(days=9747)), ("B3", timedelta(hours=-1))):
        clocks.running_s += 20
        clocks.off_by += leap
        for component in ("c0", "c1"):
            boards.count(clocks.result(component, serial=serial))
    assert [board.takt_s for board in store.boards] == [None, 20.0, 20.0]


def test_boards_of_two_types_in_turn_have_one_takt_each_and_a_revision_has_none(clocks, store):
    two = BOARDS | {"back": BoardSection(components={"c0": 1}, takt_s=5, timeout_s=60)}
    boards = LineBoards(two, store, clock=clocks.clock, wall=clocks.wall)
    for serial in ("B1", "B2"):
        clocks.running_s += 9
        boards.count(clocks.result("c0", serial=serial))
        boards.count(clocks.result("c1", serial=serial))
        clocks.running_s += 1
        boards.count(clocks.result("c0", serial=f"{serial}back", board_type="back"))
    boards.count(clocks.result("c0", NG, serial="B2"))
    takts = [(board.serial, board.takt_s) for board in store.boards]
    assert takts == [("B1", None), ("B1back", None), ("B2", 10.0), ("B2back", 10.0), ("B2", None)]
