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
    recorded = {(one.serial, one.board_type, one.opened_at, one.verdict) for one in kept}

    restarted = ledger()
    replayed = restarted.replay(in_order[:crash_at], recorded)
    final = {(one.serial, one.opened_at): one.verdict for one in (*kept, *replayed)}
    assert final == {(one.serial, one.opened_at): one.verdict for one in said}
    assert not {(one.serial, one.board_type, one.opened_at, one.verdict) for one in replayed} & recorded
    assert last_words(restarted, in_order[crash_at:]) == last_words(book, in_order[crash_at:])


def test_a_restart_passes_over_types_that_are_no_longer_configured() -> None:
    assert BoardLedger({}).replay([seen("r/1")], ()) == ()
