"""Boards: one verdict each, never OK without every image, whatever the order, the clock or a restart does."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.boards import BoardLedger, BoardManifest, BoardVerdict, Inspection
from experts.expert import Verdict

if TYPE_CHECKING:
    import random

START = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
TIMEOUT = timedelta(seconds=60)
MANIFESTS = {"main": BoardManifest({"r": 2, "c": 1}, TIMEOUT)}
LONG_AGO = START - 100 * TIMEOUT
OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN


def seen(place: str, verdict: Verdict = OK, after_s: float = 0, serial: str = "b1") -> Inspection:
    component, _, ref = place.partition("/")
    return Inspection(serial, "main", component, ref, verdict, START + timedelta(seconds=after_s))


def ledger() -> BoardLedger:
    return BoardLedger(MANIFESTS)


def verdicts(book: BoardLedger, *inspections: Inspection) -> list[BoardVerdict | None]:
    return [book.add(inspection) for inspection in inspections]


def test_a_board_is_ok_with_its_last_image() -> None:
    first, second, last = verdicts(ledger(), seen("r/1"), seen("c/1", after_s=1), seen("r/2", after_s=5))
    assert (first, second) == (None, None)
    assert last == BoardVerdict("b1", "main", OK, START, START + timedelta(seconds=5), {}, {OK: 3, NG: 0, UNKNOWN: 0})


@pytest.mark.parametrize(("worst", "verdict"), [([NG], NG), ([UNKNOWN], UNKNOWN), ([UNKNOWN, NG], NG)])
def test_the_worst_image_decides(worst: list[Verdict], verdict: Verdict) -> None:
    each = [*worst, OK, OK, OK][:3]
    last = verdicts(ledger(), *(seen(place, one) for place, one in zip(("r/1", "r/2", "c/1"), each, strict=True)))[-1]
    assert last is not None
    assert last.verdict is verdict


def test_the_same_image_twice_does_not_stand_for_two() -> None:
    assert verdicts(ledger(), seen("r/1"), seen("r/1"), seen("c/1")) == [None, None, None]


def test_the_same_image_twice_counts_at_its_worst() -> None:
    for order in ((NG, OK), (OK, NG)):
        last = verdicts(ledger(), *(seen("r/1", one) for one in order), seen("r/2"), seen("c/1"))[-1]
        assert last is not None
        assert last.verdict is NG


def test_an_unexpected_component_cannot_help_but_harm() -> None:
    assert verdicts(ledger(), seen("x/1"), seen("r/1"), seen("c/1")) == [None, None, None]
    last = verdicts(ledger(), seen("x/1", NG), seen("r/1"), seen("r/2"), seen("c/1"))[-1]
    assert last is not None
    assert last.verdict is NG


def test_boards_do_not_mix() -> None:
    book = ledger()
    assert verdicts(book, seen("r/1"), seen("r/2", serial="b2"), seen("c/1", serial="b2")) == [None, None, None]
    assert book.statistics().open == 2


@pytest.mark.parametrize(("came", "verdict"), [(OK, UNKNOWN), (UNKNOWN, UNKNOWN), (NG, NG)])
def test_a_board_that_lacks_images_at_its_timeout_is_never_ok(came: Verdict, verdict: Verdict) -> None:
    book = ledger()
    book.add(seen("r/1", came))
    assert book.next_deadline == START + TIMEOUT
    assert book.expire(START + TIMEOUT) == ()
    (closed,) = book.expire(START + TIMEOUT + timedelta(seconds=1))
    assert (closed.verdict, closed.missing) == (verdict, {"r": 1, "c": 1})
    assert closed.closed_at == START + TIMEOUT
    assert book.expire(START + TIMEOUT + timedelta(seconds=2)) == ()
    assert book.next_deadline is None


def test_late_images_never_make_a_closed_board_better_only_worse() -> None:
    book = ledger()
    book.add(seen("r/1"))
    (closed,) = book.expire(START + timedelta(seconds=61))
    assert verdicts(book, seen("r/2", after_s=62), seen("c/1", after_s=63)) == [None, None]
    revised = book.add(seen("c/1", NG, after_s=64))
    assert revised is not None
    assert (revised.verdict, revised.is_revision, revised.opened_at) == (NG, True, closed.opened_at)
    assert book.add(seen("c/2", UNKNOWN, after_s=65)) is None


def test_an_ok_board_becomes_ng_by_a_late_ng() -> None:
    book = ledger()
    verdicts(book, seen("r/1"), seen("r/2"), seen("c/1"))
    revised = book.add(seen("r/3", NG, after_s=1))
    assert revised is not None
    assert (revised.verdict, revised.is_revision) == (NG, True)


def test_an_image_past_the_deadline_is_late_even_if_nobody_expired_the_board() -> None:
    book = ledger()
    closed = verdicts(book, seen("r/1"), seen("r/2"), seen("c/1", after_s=61))[-1]
    assert closed is not None
    assert (closed.verdict, closed.missing, closed.is_revision) == (UNKNOWN, {"c": 1}, False)


def test_a_serial_that_comes_again_much_later_is_a_new_run() -> None:
    book = ledger()
    verdicts(book, seen("r/1", NG), seen("r/2"), seen("c/1"))
    again = verdicts(book, *(seen(place, after_s=100) for place in ("r/1", "r/2", "c/1")))[-1]
    assert again is not None
    assert (again.verdict, again.opened_at) == (OK, START + timedelta(seconds=100))


def test_closed_boards_are_forgotten() -> None:
    book = ledger()
    verdicts(book, seen("r/1"), seen("r/2"), seen("c/1"))
    assert book.statistics().closed == 1
    book.expire(START + timedelta(seconds=61))
    assert (book.statistics().open, book.statistics().closed) == (0, 0)


def test_a_type_without_manifest_is_the_callers_error() -> None:
    with pytest.raises(KeyError):
        ledger().add(replace(seen("r/1"), board_type="other"))


PLACES = st.sampled_from(["r/1", "r/2", "r/3", "c/1", "c/2", "x/1"])
INSPECTIONS = st.lists(
    st.builds(seen, PLACES, st.sampled_from(list(Verdict)), st.integers(0, 59), st.sampled_from(["b1", "b2"])),
    max_size=14,
)


def last_words(book: BoardLedger, inspections: list[Inspection]) -> dict[str, Verdict]:
    said = [*(book.add(one) for one in inspections), *book.expire(START + timedelta(seconds=300))]
    return {one.serial: one.verdict for one in said if one is not None}


def has_all_ok(inspections: list[Inspection], serial: str) -> bool:
    own = [one for one in inspections if one.serial == serial]
    refs = {component: {one.ref for one in own if one.component == component} for component in ("r", "c")}
    return len(refs["r"]) >= 2 and len(refs["c"]) >= 1 and all(one.verdict is OK for one in own)


@given(INSPECTIONS)
def test_ok_means_that_every_image_came_and_was_ok(inspections: list[Inspection]) -> None:
    said = last_words(ledger(), inspections)
    assert set(said) == {one.serial for one in inspections}
    for serial, verdict in said.items():
        assert (verdict is OK) == has_all_ok(inspections, serial)


@given(INSPECTIONS, st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(inspections: list[Inspection], chance: random.Random) -> None:
    at_once = [replace(one, at=START) for one in inspections]
    shuffled = list(at_once)
    chance.shuffle(shuffled)
    assert last_words(ledger(), at_once) == last_words(ledger(), shuffled)


@given(INSPECTIONS, st.integers(0, 14), st.integers(0, 4))
def test_a_restart_says_what_was_not_recorded_and_nothing_twice(
    inspections: list[Inspection], crash_at: int, lost: int
) -> None:
    in_order = sorted(inspections, key=lambda one: one.at)
    book = ledger()
    said = [one for one in (book.add(inspection) for inspection in in_order[:crash_at]) if one is not None]
    kept = said[: max(len(said) - lost, 0)]
    recorded = list({(one.serial, one.opened_at): one for one in kept}.values())

    restarted = ledger()
    replayed = restarted.replay(in_order[:crash_at], recorded, LONG_AGO)
    final = {(one.serial, one.opened_at): one.verdict for one in (*kept, *replayed)}
    assert final == {(one.serial, one.opened_at): one.verdict for one in said}
    known = {(one.serial, one.opened_at, one.verdict) for one in recorded}
    assert not {(one.serial, one.opened_at, one.verdict) for one in replayed} & known
    assert last_words(restarted, in_order[crash_at:]) == last_words(book, in_order[crash_at:])


def test_a_restart_passes_over_types_that_are_no_longer_configured() -> None:
    assert BoardLedger({}).replay([seen("r/1")], (), LONG_AGO) == ()


def complete(serial: str = "b1", after_s: float = 0, worst: Verdict = OK) -> list[Inspection]:
    places = (("r/1", OK), ("c/1", worst), ("r/2", OK))
    return [seen(place, one, after_s + second, serial) for second, (place, one) in enumerate(places)]


def restart(
    inspections: list[Inspection],
    recorded: list[BoardVerdict],
    since: datetime = LONG_AGO,
    manifest: BoardManifest = MANIFESTS["main"],
    after_s: float = 1_000_000,
) -> list[BoardVerdict]:
    """What a new ledger says of what is stored, when it starts and when its boards' time is over."""
    book = BoardLedger({"main": manifest})
    inside = [one for one in inspections if one.at >= since]
    return [*book.replay(inside, recorded, since), *book.expire(START + timedelta(seconds=after_s))]


@pytest.mark.parametrize(
    "manifest",
    [
        MANIFESTS["main"],
        BoardManifest({"r": 2, "c": 1, "x": 1}, TIMEOUT),
        BoardManifest({"r": 3, "c": 1}, TIMEOUT),
        BoardManifest({"r": 1}, TIMEOUT),
        BoardManifest({"r": 2, "c": 1}, 10 * TIMEOUT),
        BoardManifest({"r": 2, "c": 1}, TIMEOUT / 10),
    ],
)
def test_a_restart_leaves_recorded_boards_as_they_are_whatever_is_configured_now(manifest: BoardManifest) -> None:
    book = ledger()
    stored = [*complete("b1"), *complete("b2", 3, worst=NG), seen("r/1", after_s=6, serial="b3")]
    recorded = [one for one in verdicts(book, *stored) if one is not None]
    recorded += book.expire(START + timedelta(seconds=200))
    rework = complete("b2", 300)
    recorded += [one for one in verdicts(book, *rework) if one is not None]
    assert len(recorded) == 4
    assert restart([*stored, *rework], recorded, manifest=manifest) == []


def test_a_board_that_began_before_what_is_read_again_is_not_judged_by_its_rest() -> None:
    stored = complete()
    for begin_s in (0.5, 1.5, 2.5):
        assert restart(stored, [], since=START + timedelta(seconds=begin_s)) == []
    assert restart(stored, [], since=START - TIMEOUT)[0].verdict is OK


def test_a_recorded_board_that_began_before_what_is_read_again_stays() -> None:
    book = ledger()
    stored = [*complete(), seen("r/2", NG, after_s=50)]
    *_, recorded = [one for one in verdicts(book, *stored) if one is not None]
    assert recorded.is_revision
    assert restart(stored, [recorded], since=START + timedelta(seconds=1)) == []


def test_a_revision_that_a_crash_kept_from_being_stored_is_said_with_all_its_images() -> None:
    book = ledger()
    stored = [*complete(), seen("r/3", NG, after_s=30)]
    recorded, revised = [one for one in verdicts(book, *stored) if one is not None]
    assert restart(stored, [recorded], since=START) == [revised]


def test_late_images_after_a_restart_make_a_recorded_board_worse() -> None:
    stored = complete()
    recorded = [one for one in verdicts(ledger(), *stored) if one is not None]
    book = ledger()
    assert book.replay(stored, recorded, START) == ()
    assert book.add(seen("c/1", after_s=20)) is None
    revised = book.add(seen("c/1", NG, after_s=21))
    assert revised is not None
    assert (revised.is_revision, revised.opened_at, revised.counts) == (True, START, {OK: 2, NG: 1, UNKNOWN: 0})


def test_an_image_stored_after_one_that_is_older_belongs_to_the_same_run() -> None:
    stored = [seen("r/1", after_s=0.2), seen("c/1", UNKNOWN, after_s=0.1), seen("r/2", after_s=1)]
    recorded = [one for one in verdicts(ledger(), *stored) if one is not None]
    assert [one.opened_at for one in recorded] == [START + timedelta(seconds=0.2)]
    assert restart(stored, recorded) == []


def test_a_board_that_was_open_goes_on_and_ends_by_its_own_time() -> None:
    (closed,) = restart([seen("r/1"), seen("c/1", after_s=3)], [], since=START - 2 * TIMEOUT)
    assert (closed.verdict, closed.missing, closed.closed_at) == (UNKNOWN, {"r": 1}, START + TIMEOUT)
