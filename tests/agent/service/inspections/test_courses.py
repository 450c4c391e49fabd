"""Which images' courses are stored beside those that are not OK: slow ones, and never many."""

from agent.service.inspections.courses import SlowImages
from tests.agent.service.fake_line import asked, picture
from tests.lines import order


def test_slow_image_exceeds_the_bound_and_99_percent_of_the_latest_ones():
    slow = SlowImages()
    assert not any(slow.is_slow(seconds / 100, 1.0) for seconds in range(100))
    assert slow.is_slow(1.01, 1.0)
    late = [slow.is_slow(3.0 + number % 100 / 100, 1.0) for number in range(5_000)]  # a line that is always late
    assert late[0]
    assert sum(late[2_000:]) <= 3_000 * 0.02


def test_course_of_a_slow_ok_is_stored(line):
    line.document["scheduling"] = {"max_overtake_s": 0.01}
    line.fake(0, B_s=0.05)
    with line.served() as service:
        asked(service, order(picture(), component="c0", key="slow"), order(picture(), component="c1", key="quick"))
    courses = {row.subject.key: row.course for row in line.rows}
    assert courses["api/slow"]["steps"][0]["batch"]["seconds"] >= 0.05
