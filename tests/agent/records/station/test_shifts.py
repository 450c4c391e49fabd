"""Shifts begin by local time, also on the days when clocks are changed."""

from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.records.station.shifts import Shifts

ZURICH = ZoneInfo("Europe/Zurich")
USUAL = Shifts((time(6), time(14), time(22)), ZURICH)


def local(text):
    return datetime.fromisoformat(text).replace(tzinfo=ZURICH)


@pytest.mark.parametrize(
    ("now", "began"),
    [
        ("2026-05-01T05:59:59", "2026-04-30T22:00"),
        ("2026-05-01T06:00", "2026-05-01T06:00"),
        ("2026-05-01T13:59", "2026-05-01T06:00"),
        ("2026-05-01T23:00", "2026-05-01T22:00"),
        ("2026-03-29T05:00", "2026-03-28T22:00"),  # the night of seven hours
        ("2026-10-25T05:00", "2026-10-24T22:00"),  # and of nine
    ],
)
def test_shift_begins_when_clocks_show_its_time(now, began):
    assert USUAL.began_at(local(now)) == local(began)


def test_shift_at_a_skipped_time_begins_after_the_gap():
    assert Shifts((time(2, 30),), ZURICH).began_at(local("2026-03-29T04:00")) == local("2026-03-29T03:30")


def test_shift_at_a_repeated_time_begins_the_first_time():
    second = datetime(2026, 10, 25, 1, 45, tzinfo=UTC)  # 02:45 for the second time
    assert Shifts((time(2, 30),), ZURICH).began_at(second) == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)


@given(
    st.lists(st.times(), min_size=1, max_size=5, unique=True),
    st.datetimes(datetime(2025, 1, 1), datetime(2027, 1, 1), timezones=st.just(ZURICH)),
)
def test_shift_of_any_moment_began_at_most_a_day_ago(begins, now):
    began = Shifts(tuple(begins), ZURICH).began_at(now)
    assert timedelta() <= now.astimezone(UTC) - began <= timedelta(hours=25)
