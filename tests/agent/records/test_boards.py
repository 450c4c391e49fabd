"""Boards: one verdict each, never OK without every image, whatever the order, the clock or a restart does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.records.boards import BoardLedger, BoardManifest, BoardVerdict, Inspection, Rework
from experts.expert import Verdict
from tests import lines

START = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
TIMEOUT = timedelta(seconds=60)
MANIFESTS = {"main": BoardManifest({"r": 2, "c": 1}, TIMEOUT)}
STARTED_S = 1e6  # the monotonic clock at START
OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN


def seen(place, verdict=OK, after_s=0, serial="b1", image=None):
    component, _, ref = place.partition("/")
    return lines.inspection(serial, "main", component, ref, verdict, START + timedelta(seconds=after_s), image)


def ledger():
    return BoardLedger(MANIFESTS)


def clock_s(at):
    """The monotonic clock, where the wall clock has made no step since START."""
    return STARTED_S + (at - START).total_seconds()


def add(book, inspection):
    return book.add(inspection, clock_s(inspection.at))


def expire(book, after_s):
    return book.expire(STARTED_S + after_s, START + timedelta(seconds=after_s))


def verdicts(book, *inspections):
    return [add(book, inspection) for inspection in inspections]


def replay(book, inspections, recorded, after_s=None):
    """Take up what is stored, oldest first, at a moment; else at that of the latest image."""
    latest = max((one.at for one in inspections), default=START)
    now = latest if after_s is None else START + timedelta(seconds=after_s)
    known = list(recorded)
    return book.replay(
        reversed(inspections), lambda at: [one for one in known if one.closed_at >= at], clock_s(now), now
    )


def test_board_is_ok_with_its_last_image():
    first, second, last = verdicts(ledger(), seen("r/1"), seen("c/1", after_s=1), seen("r/2", after_s=5))
    assert (first, second) == (None, None)
    assert last == BoardVerdict("b1", "main", OK, START, START + timedelta(seconds=5), {}, {OK: 3, NG: 0, UNKNOWN: 0})


@pytest.mark.parametrize(("came", "verdict"), [(OK, UNKNOWN), (UNKNOWN, UNKNOWN), (NG, NG)])
def test_board_without_all_images_at_its_timeout_is_never_ok(came, verdict):
    book = ledger()
    add(book, seen("r/1", came))
    assert expire(book, 60) == ()
    (closed,) = expire(book, 60.5)
    assert (closed.verdict, closed.missing) == (verdict, {"r": 1, "c": 1})
    assert closed.closed_at == START + timedelta(seconds=60.5)
    assert expire(book, 62) == ()


def test_boards_past_their_timeout_are_closed_oldest_first():
    book = ledger()
    verdicts(book, seen("r/1", serial="b2"), seen("r/1", after_s=1), seen("r/1", after_s=30, serial="b3"))
    assert [closed.serial for closed in expire(book, 80)] == ["b2", "b1"]


def test_late_images_never_make_a_closed_board_better_only_worse():
    book = ledger()
    add(book, seen("r/1"))
    (closed,) = expire(book, 61)
    assert verdicts(book, seen("r/2", after_s=62), seen("c/1", after_s=63)) == [None, None]
    revised = add(book, seen("c/1", NG, after_s=64))
    assert (revised.verdict, revised.is_revision, revised.opened_at) == (NG, True, closed.opened_at)
    assert add(book, seen("c/2", UNKNOWN, after_s=65)) is None


@pytest.mark.parametrize(
    ("late", "verdict", "reason"),
    [(seen("r/3", NG, after_s=3), NG, ""), (seen("r/2 (2)", after_s=5), UNKNOWN, "'2 (2)' and '2'")],
)
def test_late_ng_or_copy_revises_an_ok_board(late, verdict, reason):
    *_, closed, revised = verdicts(ledger(), *complete(), late)
    assert (closed.verdict, revised.verdict, revised.is_revision) == (OK, verdict, True)
    assert reason in (revised.reason or "")


def test_image_past_the_deadline_is_late_even_before_its_board_is_closed():
    late = seen("c/1", after_s=61), seen("r/3", NG, after_s=120)
    closed, revised = verdicts(ledger(), seen("r/1"), seen("r/2"), *late)[2:]
    assert (closed.verdict, closed.missing, closed.is_revision) == (UNKNOWN, {"c": 1}, False)
    assert (revised.verdict, revised.is_revision) == (NG, True)


def test_closed_boards_are_forgotten():
    book = ledger()
    verdicts(book, seen("r/1"), seen("r/2"), seen("c/1"))
    assert book.statistics().closed == 1
    expire(book, 61)
    assert (book.statistics().open, book.statistics().closed) == (0, 0)


def test_board_type_without_a_manifest_is_the_callers_error():
    with pytest.raises(KeyError):
        add(ledger(), lines.inspection("b1", "other", "r", "1", OK, START))


LISTED = {"main": BoardManifest({"r": 2, "c": 1}, TIMEOUT, {"r": frozenset({"R1", "R\u00fc2"})})}


def closed_by(inspections, manifests=MANIFESTS):
    """What a board's run says last, before or at its timeout."""
    book = BoardLedger(manifests)
    said = [*verdicts(book, *inspections), *expire(book, 300)]
    return [one for one in said if one is not None][-1]


@pytest.mark.parametrize(
    "copy",
    ["r1", " R1 ", "R1 (2)", "R1(1)", "R1 - Copy", "R1 - Kopie (3)", "R1_copy", "R1 copy 2", "Copy of R1", "R1~1",
     "R1 (another copy)", "Copy (2) of R1", "\uff32\uff11", "R\u200b1", "R1 - 副本"],
)  # fmt: skip
def test_copy_of_an_image_does_not_stand_for_a_missing_part(copy):
    came = [seen("r/R1"), seen(f"r/{copy}", after_s=1), seen("c/1", after_s=2)]
    closed = closed_by(came)
    assert (closed.verdict, closed.missing) == (UNKNOWN, {"r": 1})
    assert "missing: 1 of r" in closed.reason
    assert repr(copy) in closed.reason
    assert "'R1'" in closed.reason
    assert closed_by(came[::-1]).verdict is UNKNOWN
    assert closed_by([*came, seen("r/R2", after_s=3)]).verdict is UNKNOWN
    assert closed_by([*came, seen("r/R2", NG, after_s=3)]).verdict is NG


@pytest.mark.parametrize("pair", [("R1", "R1-2"), ("U3", "U3_2"), ("R1", "R1.2"), ("R1", "R1A"), ("R1-1", "R1-2"),
                                  ("C1", "copy"), ("R1 (A)", "R1 (B)")])  # fmt: skip
def test_refs_that_only_look_like_copies_are_parts_of_their_own(pair):
    assert closed_by([seen(f"r/{pair[0]}"), seen(f"r/{pair[1]}"), seen("c/1")]).verdict is OK


def test_equal_bytes_under_two_refs_make_a_board_unknown():
    first = [seen("r/1", image="aa"), seen("c/1", image="bb")]
    closed = closed_by([*first, seen("r/2", image="aa")])
    assert (closed.verdict, closed.reason) == (
        UNKNOWN, "missing: 1 of r; one part, or one image, under two refs: '2' and '1'"
    )  # fmt: skip
    assert closed_by([*first, seen("r/2", image="bb")]).verdict is UNKNOWN
    assert closed_by([*first, seen("r/1", image="aa"), seen("r/1", image="cc"), seen("r/2", image="dd")]).verdict is OK


def test_board_with_a_list_of_refs_is_completed_by_listed_refs_only():
    strange = [seen("r/R1"), seen("r/R1 (2)", after_s=1), seen("r/r\u00fc2", after_s=2), seen("c/1", after_s=3)]
    closed = closed_by(strange, LISTED)
    assert (closed.verdict, closed.missing) == (UNKNOWN, {"r": 1})
    assert closed.reason == "missing: 'Rü2' of r; not parts of board type main: 'R1 (2)', 'rü2'"
    assert closed_by([*strange, seen("r/Ru\u03082", after_s=4)], LISTED).verdict is OK  # decomposed, the same text
    assert closed_by([seen("r/R9", NG), *strange], LISTED).verdict is NG
    assert closed_by([seen("r/R1", image="a"), seen("r/R\u00fc2", image="a"), seen("c/1")], LISTED).verdict is UNKNOWN


def test_serials_that_look_alike_are_reported_and_stay_two_boards():
    book = ledger()
    for serial in ("Pr\u00fcfling", "Pru\u0308fling", "S1", "s1 ", "S2"):
        add(book, seen("r/1", serial=serial))
    assert book.read_alike() == [["Pr\u00fcfling", "Pru\u0308fling"], ["S1", "s1 "]]
    assert book.statistics().open == 5


PLACES = st.sampled_from(["r/1", "r/2", "r/3", "r/3 (2)", "c/1", "c/2", "x/1"])
IMAGES = st.sampled_from([None, None, None, "aa", "bb"])
INSPECTIONS = st.lists(
    st.builds(
        seen, PLACES, st.sampled_from([OK, OK, NG, UNKNOWN]), st.integers(0, 59), st.sampled_from(["b1", "b2"]), IMAGES
    ),
    max_size=14,
)


def last_words(book, inspections):
    said = [*(add(book, one) for one in inspections), *expire(book, 300)]
    return {one.serial: one for one in said if one is not None}


def has_copies(own):
    """By a comparison of each pair: the refs are apart by ` (2)` alone, and `x` is on no board."""
    pairs = [
        (one, other) for one in own for other in own if "x" not in (one.subject.component, other.subject.component)
    ]
    return any(
        (one.subject.component, one.subject.ref) != (other.subject.component, other.subject.ref)
        and (one.image_sha256 == other.image_sha256 is not None
             or (one.subject.component == other.subject.component
                 and one.subject.ref.removesuffix(" (2)") == other.subject.ref.removesuffix(" (2)")))
        for one, other in pairs
    )  # fmt: skip


def expected(inspections, serial):
    own = [one for one in inspections if one.subject.board == serial]
    places = {(one.subject.component, one.subject.ref) for one in own}
    refs = {
        component: {ref.removesuffix(" (2)") for part, ref in places if part == component} for component in ("r", "c")
    }
    is_complete = len(refs["r"]) >= 2 and len(refs["c"]) >= 1
    verdicts = {one.verdict for one in own} | ({UNKNOWN} if has_copies(own) else set())
    return NG if NG in verdicts else OK if is_complete and verdicts == {OK} else UNKNOWN


@given(INSPECTIONS)
def test_worst_image_decides_and_ok_needs_every_image_ok(inspections):
    said = last_words(ledger(), inspections)
    serials = {str(one.subject.board) for one in inspections}
    assert {serial: one.verdict for serial, one in said.items()} == {one: expected(inspections, one) for one in serials}


@given(INSPECTIONS, st.integers(0, 14), st.integers(0, 4))
@example([seen("r/1"), seen("r/2"), seen("c/1"), seen("r/3", NG, after_s=30)], 3, 0)
def test_restart_closes_unrecorded_boards_and_records_none_twice(inspections, crash_at, lost):
    in_order = sorted(inspections, key=lambda one: one.at)
    book = ledger()
    said = [one for one in verdicts(book, *in_order[:crash_at]) if one is not None]
    kept = said[: max(len(said) - lost, 0)]
    recorded = list({(one.serial, one.opened_at): one for one in kept}.values())
    restarted = ledger()
    replayed = replay(restarted, in_order[:crash_at], recorded)
    final = {(one.serial, one.opened_at): one.verdict for one in (*kept, *replayed)}
    assert final == {(one.serial, one.opened_at): one.verdict for one in said}
    known = {(one.serial, one.opened_at, one.verdict) for one in recorded}
    assert not {(one.serial, one.opened_at, one.verdict) for one in replayed} & known
    assert last_words(restarted, in_order[crash_at:]) == last_words(book, in_order[crash_at:])


def test_restart_ignores_board_types_no_longer_configured():
    assert replay(BoardLedger({}), [seen("r/1")], ()) == ()


def complete(serial="b1", after_s=0, worst=OK):
    places = (("r/1", OK), ("c/1", worst), ("r/2", OK))
    return [seen(place, one, after_s + second, serial) for second, (place, one) in enumerate(places)]


def restart(inspections, recorded, manifest=MANIFESTS["main"], after_s=1_000_000):
    """What a new ledger says of what is stored, when it starts and when its boards' time is over."""
    book = BoardLedger({"main": manifest})
    return [*replay(book, inspections, recorded, after_s=1000), *expire(book, after_s)]


@pytest.mark.parametrize(
    "manifest",
    [
        MANIFESTS["main"], BoardManifest({"r": 2, "c": 1, "x": 1}, TIMEOUT), BoardManifest({"r": 3, "c": 1}, TIMEOUT),
        BoardManifest({"r": 1}, TIMEOUT), BoardManifest({"r": 2, "c": 1}, 10 * TIMEOUT),
        BoardManifest({"r": 2, "c": 1}, TIMEOUT / 10),
    ],
)  # fmt: skip
def test_restart_keeps_recorded_boards_after_a_change_of_manifest(manifest):
    book = ledger()
    stored = [*complete("b1"), *complete("b2", 3, worst=NG), seen("r/1", after_s=6, serial="b3")]
    recorded = [one for one in verdicts(book, *stored) if one is not None]
    recorded += expire(book, 200)
    rework = complete("b2", 300)
    recorded += [one for one in verdicts(book, *rework) if one is not None]
    assert (len(recorded), restart([*stored, *rework], recorded, manifest=manifest)) == (4, [])


def busy(minutes):
    """Complete boards, one a minute, after the one that a test looks at."""
    return [one for minute in range(1, minutes + 1) for one in complete(f"later{minute}", after_s=60 * minute)]


def records_of(inspections):
    return [one for one in verdicts(ledger(), *inspections) if one is not None]


@pytest.mark.parametrize("step_s", [0.0, 3600.0, -3600.0])
def test_restart_reads_only_the_rows_that_open_boards_can_need(step_s):
    """Four timeouts and a minute, of which a clock's step counts as one timeout at most; a board a minute."""
    stored = busy(100)
    stored[297:] = [replace(one, at=one.at + timedelta(seconds=step_s)) for one in stored[297:]]
    left = iter(stored[::-1])
    ledger().replay(left, lambda _: records_of(busy(100)), STARTED_S + 6000, stored[-1].at)
    assert 280 < len(list(left)) < 290


def test_board_older_than_the_replayed_rows_is_not_judged_by_its_rest():
    later = busy(10)
    for shift_s in range(200, 500):
        stored = complete(after_s=shift_s) + [one for one in later if one.at > START + timedelta(seconds=shift_s + 3)]
        said = {one.serial: one.verdict for one in restart(stored, records_of(later))}
        assert said in ({}, {"b1": OK})
    assert said == {"b1": OK}


def test_recorded_board_older_than_the_replayed_rows_stays():
    board = [*complete(), seen("r/2", NG, after_s=50)]
    later = [one for one in busy(5) if one.at > START + timedelta(seconds=100)]
    recorded, revised, *_ = records_of(board + later)
    assert revised.is_revision
    for seconds in range(120):  # what is read begins earlier or later in the board
        shifted = [replace(one, at=one.at - timedelta(seconds=seconds)) for one in later]
        assert restart(board + shifted, [revised, *records_of(shifted)]) == []
        assert restart(board + shifted, [recorded, *records_of(shifted)]) in ([], [revised])


def test_late_image_of_a_board_without_stored_images_opens_no_run():
    recorded = records_of(complete())
    assert restart([seen("r/1", after_s=40)], recorded) == []


def test_revision_lost_in_a_crash_is_reported_again_with_all_its_images():
    book = ledger()
    stored = [*complete(), seen("r/3", NG, after_s=30)]
    recorded, revised = [one for one in verdicts(book, *stored) if one is not None]
    assert restart(stored, [recorded]) == [revised]


def test_image_stored_after_an_older_one_belongs_to_the_same_run():
    stored = [seen("r/1", after_s=0.2), seen("c/1", UNKNOWN, after_s=0.1), seen("r/2", after_s=1)]
    recorded = records_of(stored)
    assert [one.opened_at for one in recorded] == [START + timedelta(seconds=0.2)]
    assert restart(stored, recorded) == []


# -- a person reworks boards --


DEEDS_OF_A_STATION = st.lists(
    st.one_of(
        st.tuples(st.just("see"), PLACES, st.sampled_from([OK, OK, NG, UNKNOWN]), st.sampled_from(["b1", "b2"])),
        st.tuples(st.just("rework"), st.sampled_from(["b1", "b2"])),
    ),
    max_size=30,
)


@dataclass
class ReworkingLine:
    """A line on which a person reworks closed boards: the ledger of the day, and what is stored."""

    book: BoardLedger = field(default_factory=ledger)
    stored: list[Inspection] = field(default_factory=list)
    said: list[BoardVerdict] = field(default_factory=list)
    reworks: list[Rework] = field(default_factory=list)
    least_recorded: int = 0  # verdicts that are committed, as a rework is behind them

    @property
    def at(self):
        return START + timedelta(seconds=len(self.stored))

    def do(self, deed, *what):
        if deed == "see":
            place, verdict, serial = what
            one = replace(seen(place, verdict, len(self.stored), serial), seq=len(self.stored) + 1)
            self.stored.append(one)
            self.said += [said for said in [add(self.book, one)] if said is not None]
            return
        run = self.book.run_of(what[0], "main")
        if run is not None and run.closed is not None:
            self.book.rework(what[0], "main", run.opened_at)
            self.reworks.append(Rework(what[0], "main", run.opened_at, len(self.stored), "ann", None, self.at))
            self.least_recorded = len(self.said)

    def restarted(self, lost):
        """The line after a kill that kept the last verdicts from being stored."""
        kept = self.said[: max(len(self.said) - lost, self.least_recorded)]
        recorded = {(one.serial, one.opened_at): one for one in kept}.values()
        line = replace(self, book=ledger(), said=list(kept))
        line.said += line.book.replay(
            reversed(self.stored),
            lambda at: [one for one in recorded if one.closed_at >= at],
            clock_s(self.at), self.at, self.reworks,
        )  # fmt: skip
        return line

    @property
    def verdicts(self):
        return {(one.serial, one.opened_at): one.verdict for one in self.said}


def open_boards(book):
    runs = [run for serial in ("b1", "b2") for run in book.runs(serial) if run.closed is None]
    return {(run.serial, run.opened_at): run.images for run in runs}


@given(DEEDS_OF_A_STATION, DEEDS_OF_A_STATION, st.integers(0, 4))
@example([("see", "r/1", OK, "b1"), ("see", "r/2", OK, "b1"), ("see", "c/1", NG, "b1"), ("rework", "b1")],
         [("see", "r/1", OK, "b1"), ("see", "r/2", OK, "b1"), ("see", "c/1", OK, "b1")], 4)  # fmt: skip
def test_ledger_after_restarts_and_reworks_equals_an_uninterrupted_one(before, after, lost):
    line = ReworkingLine()
    for deed in before:
        line.do(*deed)
    restarted = line.restarted(lost)
    assert restarted.verdicts == line.verdicts
    assert open_boards(restarted.book) == open_boards(line.book)
    restarted = replace(restarted, stored=list(line.stored), reworks=list(line.reworks))
    for deed in after:
        line.do(*deed)
        restarted.do(*deed)
    assert restarted.verdicts == line.verdicts
    assert restarted.reworks == line.reworks


def test_next_image_of_a_reworked_board_opens_a_new_run_and_its_verdict_stays():
    line = ReworkingLine()
    for place, verdict in (("r/1", OK), ("c/1", NG), ("r/2", OK)):
        line.do("see", place, verdict, "b1")
    line.do("rework", "b1")
    for place in ("r/1", "c/1", "r/2"):
        line.do("see", place, OK, "b1")
    assert list(line.verdicts.values()) == [NG, OK]
    assert not any(one.is_revision for one in line.said)


# -- the wall clock makes steps --


@dataclass
class SteppedLine:
    """A line whose wall clock is set while it runs, or while it is off: what is stored, and the ledger of the day."""

    elapsed_s: float = 0.0
    off_by_s: float = 0.0
    book: BoardLedger = field(default_factory=ledger)
    stored: list[Inspection] = field(default_factory=list)
    recorded: dict[tuple[str, datetime], BoardVerdict] = field(default_factory=dict)
    reboots: int = 0

    @property
    def now(self):
        return START + timedelta(seconds=self.elapsed_s + self.off_by_s)

    @property
    def now_s(self):
        return STARTED_S / (1 + self.reboots) + self.elapsed_s  # a machine that boots starts its clock anew

    def see(self, place, verdict=OK, serial="b1"):
        one = replace(seen(place, verdict, serial=serial), at=self.now)
        self.stored.append(one)
        self._record([self.book.add(one, self.now_s)])

    def see_all(self, serial):
        for place in ("r/1", "c/1", "r/2"):
            self.see(place, serial=serial)
            self.wait(1)

    def wait(self, seconds):
        """As the agent does: looking twice a second for boards whose time is over."""
        for _ in range(round(2 * seconds)):
            self.elapsed_s += 0.5
            self._record(self.book.expire(self.now_s, self.now))

    def restart(self, off_s=0.0):
        self.elapsed_s += off_s
        self.reboots += 1
        self.book = ledger()
        known = list(self.recorded.values())
        said = self.book.replay(
            reversed(self.stored), lambda at: [one for one in known if one.closed_at >= at], self.now_s, self.now
        )
        assert said == ()  # nothing was lost in a crash, so there is nothing to say again

    def _record(self, said):
        for one in said:
            if one is not None:
                self.recorded[one.serial, one.opened_at] = one

    @property
    def verdicts(self):
        return [one.verdict for one in self.recorded.values()]


def stepped(step_s):
    """A line whose clock makes a step while its board is open."""
    line = SteppedLine()
    line.see("r/1")
    line.wait(5)
    line.off_by_s = step_s
    return line


STEPS = pytest.mark.parametrize("step_s", [3600.0, -3600.0, 86400.0, -45.0, 45.0])
RESTARTS = pytest.mark.parametrize("is_restarted", [False, True], ids=["running on", "restarted"])


@STEPS
@RESTARTS
def test_clock_step_does_not_close_an_open_board(step_s, is_restarted):
    line = stepped(step_s)
    line.wait(5)
    line.see("c/1")
    if is_restarted:
        line.restart()
    line.wait(10)
    assert line.verdicts == []
    line.see("r/2")
    assert line.verdicts == [OK]
    (closed,) = line.recorded.values()
    assert closed.opened_at == START
    assert closed.closed_at >= closed.opened_at


@STEPS
@pytest.mark.parametrize("off_s", [None, 0.0, 3600.0], ids=["running on", "restarted", "off for a while"])
def test_incomplete_board_ends_after_its_timeout_despite_clock_steps(step_s, off_s):
    line = stepped(step_s)
    if off_s is not None:
        line.restart(off_s)
    line.wait(54.5)
    assert line.verdicts == []
    line.wait(6)
    assert line.verdicts == [UNKNOWN]


@STEPS
@RESTARTS
def test_late_ng_after_a_clock_step_revises_its_board_and_a_rework_opens_a_run(step_s, is_restarted):
    line = stepped(step_s)
    for place in ("c/1", "r/2"):
        line.see(place)
    line.wait(5)
    line.see("c/1", NG)
    assert line.verdicts == [NG]
    if is_restarted:
        line.restart()
    line.wait(130)
    for place in ("r/1", "c/1", "r/2"):
        line.see(place)
    assert line.verdicts == [NG, OK]
    line.restart()


def test_late_ng_after_the_clock_was_set_back_belongs_to_the_earlier_run():
    line = stepped(0.0)
    line.wait(40)
    for place in ("c/1", "r/2"):
        line.see(place)
    line.off_by_s = -3600.0
    line.see("c/1", NG)
    line.restart()
    assert (line.verdicts, line.book.statistics().open) == ([NG], 0)


@STEPS
def test_rework_interrupted_by_a_restart_continues_despite_clock_steps(step_s):
    for is_set_while_open in (True, False):
        line = SteppedLine()
        line.see("r/1")
        line.off_by_s = step_s if is_set_while_open else 0.0
        for place in ("c/1", "r/2"):
            line.see(place)
        for number in range(4):  # what is stored in between shows how much time passed, whatever the clock says
            line.see_all(f"other{number}")
            line.wait(30)
        line.off_by_s = step_s
        line.see_all("b2")
        line.see("r/1")
        line.restart()
        line.see("c/1")
        line.see("r/2")
        assert line.verdicts == [OK] * 7


DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("see"), st.sampled_from(["r/1", "r/2", "c/1"]), st.sampled_from(["b1", "b2"])),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 7.0, 20.0])),
        st.tuples(st.just("step"), st.sampled_from([3600.0, -3600.0])),
        st.tuples(st.just("restart"), st.sampled_from([0.0, 600.0])),
    ),
    max_size=16,
)


@given(DEEDS)
@example([("see", "r/1", "b1"), ("step", 3600.0), ("see", "c/1", "b1"), ("restart", 0.0), ("step", -3600.0)])
def test_board_has_half_its_timeout_after_each_start_and_ends_in_time(deeds):
    """Steps and restarts in any order: only a board that ran for its timeout, or for half of it since a start, ends."""
    line = SteppedLine()
    opened = {}  # serial -> running seconds since it opened, and since the start or opening
    for deed, *what in deeds:
        before = set(line.recorded)
        if deed == "see":
            line.see(what[0], serial=what[1])
        elif deed == "wait":
            line.wait(what[0])
            opened = {serial: [whole + what[0], last + what[0]] for serial, (whole, last) in opened.items()}
        elif deed == "step":
            line.off_by_s += what[0]
        else:
            line.restart(off_s=what[0])
            opened = {serial: [whole, 0.0] for serial, (whole, _) in opened.items()}
        for serial, _ in set(line.recorded) - before:
            if deed == "see":
                assert serial == what[1]
            else:
                assert deed == "wait"
                assert opened[serial][0] > 60 or opened[serial][1] > 30
            opened.pop(serial, None)
        if deed == "see" and line.book.statistics().open > len(opened):
            opened[what[1]] = [0.0, 0.0]
    line.wait(61)
    assert line.book.statistics().open == 0
    assert all(one.verdict is not OK or not one.missing for one in line.recorded.values())
