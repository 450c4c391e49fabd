"""Boards to which copies of images come, by each door: a copy stands for no part that never came."""

import time

import pytest

from experts.expert import Verdict
from tests import lines
from tests.agent.service.fake_line import asked, picture
from tests.waiting import until

OK, UNKNOWN = Verdict.OK, Verdict.UNKNOWN
TIMEOUT_S = 60
COMPOSED, DECOMPOSED = "Pr\u00fcfling", "Pru\u0308fling"


@pytest.fixture
def line(line):
    """Boards of two parts, of which only the number is known."""
    line.document["boards"] = {"main": {"components": {"c0": 2}, "takt_s": 3600, "timeout_s": TIMEOUT_S}}
    line.watch()
    return line


class LateClock:
    """Real time, and more once a test says so."""

    def __init__(self):
        self.more_s = 0.0

    def __call__(self):
        return time.monotonic() + self.more_s


def color(number):
    return picture((10, 200, 30 + number))


def part(ref, image, board="B1"):
    return lines.order(image, component="c0", board=board, board_type="main", ref=ref)


def closed(line):
    (row,) = line.results.boards()
    return row


@pytest.mark.parametrize("is_restarted", [False, True], ids=["running on", "restarted"])
@pytest.mark.parametrize(
    ("ref", "image"), [("R1 (2)", color(1)), ("R2", color(0))], ids=["by its name", "by its bytes"]
)
@pytest.mark.parametrize("door", ["folder", "caller"])
def test_copy_of_an_image_never_makes_its_board_ok(line, door, ref, image, is_restarted):
    def give(service, ref, image, known):
        if door == "folder":
            line.drop(f"B1_c0_{ref}.png", image)
        else:
            asked(service, part(ref, image))
        until(lambda: len(line.rows) == known)

    clock = LateClock()
    with line.served(clock=clock) as service:
        give(service, "R1", color(0), 1)
        if not is_restarted:
            give(service, ref, image, 2)
    if is_restarted:
        with line.served(clock=clock) as service:
            give(service, ref, image, 2)
    with line.served(clock=clock):  # what is stored tells of the copy
        assert line.boards == []
        clock.more_s = TIMEOUT_S + 1
        until(lambda: line.boards)
    assert (closed(line).verdict, closed(line).missing) == (UNKNOWN, {"c0": 1})
    assert f"{ref!r} and 'R1'" in closed(line).reason


def test_refs_of_a_list_complete_a_board_and_a_stranger_is_named(line):
    line.document["boards"]["main"]["components"]["c0"] = ["R1", "R2"]
    clock = LateClock()
    with line.served(clock=clock) as service:
        asked(service, part("R1", color(0)), part("R9", color(1)))
        asked(service, part("R1", color(0), "B2"), part("R2", color(1), "B2"))
        until(lambda: line.boards == [("B2", OK)])
        clock.more_s = TIMEOUT_S + 1
        until(lambda: len(line.boards) == 2)
    last = line.results.boards()[-1]
    assert (last.verdict, last.reason) == (UNKNOWN, "missing: 'R2' of c0; not parts of board type main: 'R9'")


def test_serial_in_two_spellings_raises_an_alarm_while_its_boards_are_known(line):
    with line.served() as service:
        asked(service, part("R1", color(0), COMPOSED), part("R2", color(1), DECOMPOSED))
        (alarm,) = until(lambda: [each for each in service.desk.status().alarms if "read alike" in each])
    assert ascii(COMPOSED) in alarm
    assert ascii(DECOMPOSED) in alarm
    assert "write a serial in one way" in alarm
