"""Comparison of two versions, as a page and as JSON; and their swap in a line file."""

import json
import os
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from sqlite_utils import Database

from agent.commands.experts import comparison_of, comparison_row
from agent.config import read_line
from agent.line_file.promotions import keeping_promotions, promotion_of
from agent.lines.promotion import promote
from agent.records.database import open_for_writing
from agent.records.truth.shadow_answers import KEPT_ROWS, Pair, Side, SideBySide, count_dropped, write_answer
from experts.errors import ConfigError
from tests.commands import coserve

LINE = """\
# A line whose comments matter.
line: test
state: ./state
experts:
  cls/a:   # it serves
    architecture: resnet18
    weights: weights/a.safetensors   # trained in May
    labels: [ok, bad]
    input: {size: [64, 64]}
    stem: 3x3
    shadow: cls/a-new
    pin: true
  cls/a-new:
    architecture: resnet34   # larger
    weights: weights/a-new.safetensors
    labels: [bad, ok]
    input: {size: [64, 64]}
  cls/b: {architecture: resnet18, weights: b.safetensors, labels: [ok, bad], input: {size: [64, 64]}}
routes:
  r: [{expert: cls/a, pass: [ok]}, {expert: cls/b, pass: [ok]}]   # in this order
"""
PAIR = Pair("cls/a", "cls/a-new", "11", "22")
AT = datetime(2026, 11, 1, tzinfo=UTC)
GOOD, BAD = ("ok", True), ("bad", False)


@pytest.fixture
def line(tmp_path):
    file = tmp_path / "line.yaml"
    file.write_text(LINE)
    return file


def answer(number, said, other, pair=PAIR, reason=None):
    first = Side(said[0], 0.75, said[1], 0.010, number % 2, "cuda")
    second = None if other is None else Side(other[0], 0.25, other[1], 0.004, 2, "cpu")
    return SideBySide(f"key-{number}", f"image-{number}.png", "r", pair, first, second, AT, reason)


def keep(line, rows, dropped=()):
    with closing(open_for_writing(read_line(line).results_file).conn) as connection:
        database = Database(connection)
        for row in rows:
            write_answer(database, row)
        for pair, count in dropped:
            count_dropped(database, pair, count)
        connection.commit()


def run_experts(*arguments):
    result = coserve("experts", *arguments)
    return result.exit_code, result.output


def test_comparison_counts_agreement_and_flips_each_way(line):
    pairs = [(GOOD, GOOD), (GOOD, BAD), (GOOD, BAD), (BAD, GOOD), (BAD, BAD), (("bad", None), ("ok", None))]
    rows = [answer(number, *each) for number, each in enumerate(pairs)]
    failed = [answer(8, GOOD, None, reason="it broke"), answer(9, GOOD, None, reason="it broke again")]
    keep(line, rows + failed, [(PAIR, 3), (PAIR, 4)])
    row = json.loads(run_experts("compare", line, "cls/a", "--json")[1])
    assert (row["images"], row["agreeing"], row["agreement"]) == (6, 2, pytest.approx(2 / 6))
    assert row["flips"] == {"to_ng": 2, "to_ok": 1}
    assert (row["failed"], row["dropped"], row["last_reason"]) == (2, 7, "it broke again")
    assert row["scores"] == {"expert": 0.75, "shadow": 0.25}
    assert row["seconds"] == {"expert": 0.010, "shadow": 0.004}
    assert [each["image"] for each in row["differing"]] == [f"image-{number}.png" for number in (1, 2, 3, 5)]
    code, page = run_experts("compare", line, "cls/a")
    assert code == 0
    assert "agreement       33.33%: 2 of 6 have the same label" in page
    assert "2 passed that would be NG, 1 did not pass that would pass" in page
    assert ("image-1.png" in page, "image-0.png" in page) == (True, False)


def test_times_on_different_processors_are_not_compared(line):
    keep(line, [answer(number, GOOD, BAD) for number in range(3)] + [answer(3, GOOD, None, reason="it broke")])
    row = comparison_row(comparison_of(read_line(line), "cls/a"))
    ran_on = [{"executor": number, "processor": "cuda", "images": 2 - number} for number in range(2)]
    assert row["executors"] == {"expert": ran_on, "shadow": [{"executor": 2, "processor": "cpu", "images": 3}]}
    names = ("executor", "processor", "shadow_executor", "shadow_processor")
    assert [row["differing"][0][name] for name in names] == [0, "cuda", 2, "cpu"]
    assert "ran on          cuda, shadow cpu: the times are not comparable" in run_experts("compare", line, "cls/a")[1]


def test_answers_of_an_earlier_version_do_not_count(line):
    earlier = Pair("cls/a", "cls/a-new", "11", "00")
    keep(line, [answer(0, GOOD, BAD, earlier), answer(1, GOOD, GOOD)], [(earlier, 5)])
    row = comparison_row(comparison_of(read_line(line), "cls/a"))
    assert (row["images"], row["agreement"], row["dropped"]) == (1, 1.0, 0)
    assert row["weights"] == {"expert": "11", "shadow": "22"}


def test_oldest_answers_are_dropped(line):
    keep(line, [answer(0, GOOD, BAD)])
    with closing(open_for_writing(read_line(line).results_file).conn) as connection:
        connection.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = 'shadow_answers'", (KEPT_ROWS,))
        connection.commit()
    keep(line, [answer(1, GOOD, GOOD)])
    assert comparison_of(read_line(line), "cls/a").images == 1


@pytest.mark.parametrize(
    ("expert", "reason"),
    [("cls/c", "no expert 'cls/c'"), ("cls/b", "has no shadow"), ("cls/a", "no results yet")],
)
def test_comparison_without_answers_gives_the_reason(line, expert, reason):
    code, output = run_experts("compare", line, expert)
    assert code == 78
    assert reason in output


def test_promotion_swaps_the_entries_and_changes_nothing_else(line):
    before = read_line(line).catalog
    code, output = run_experts("promote", line, "cls/a", "--json")
    assert code == 0
    assert json.loads(output)["swapped"] == ["architecture", "weights", "labels", "stem"]
    after = read_line(line).catalog
    for one, other in (("cls/a", "cls/a-new"), ("cls/a-new", "cls/a")):
        was, now = before.experts[other], after.experts[one]
        for swapped in ("architecture", "weights", "labels", "stem"):
            assert getattr(now, swapped) == getattr(was, swapped)
    assert after.experts["cls/a"].pin
    assert after.graph.shadows == before.graph.shadows
    assert after.graph.routes == before.graph.routes
    for comment in ("# A line whose comments matter.", "# it serves", "# in this order"):
        assert comment in line.read_text()
    promote(line, "cls/a")
    assert read_line(line).catalog.experts == before.experts
    text = line.read_text()
    with pytest.raises(ConfigError, match="has no shadow"):
        promote(line, "cls/b")
    assert line.read_text() == text


def promoted_over_api(line):
    config = read_line(line)
    config.state.mkdir()
    with keeping_promotions(config.state, [promotion_of(config.document, "cls/a", "cls/a-new", "ann", "2026-11-01")]):
        pass
    return config.catalog.experts


def test_promote_moves_a_promotion_of_the_state_into_the_line_file(line):
    before = promoted_over_api(line)
    served = read_line(line).catalog.experts
    assert served["cls/a"].weights == before["cls/a-new"].weights
    assert "cls/a serves the entry of cls/a-new, promoted by ann" in check(line)
    _, output = run_experts("promote", line, "cls/a")
    assert "the same versions serve" in output
    after = read_line(line)
    assert (after.catalog.experts, after.promotions) == (served, ())
    assert "a-new.safetensors" in line.read_text().partition("cls/a-new:")[0]


def test_discard_drops_a_promotion_whose_entries_were_edited(line):
    promoted_over_api(line)
    line.write_text(LINE.replace("resnet34", "resnet50"))
    assert "--discard" in check(line)
    assert run_experts("promote", line, "cls/a", "--discard")[0] == 0
    assert "no mistake found" in check(line)
    assert "not promoted" in run_experts("promote", line, "cls/a", "--discard")[1]


def test_damaged_file_of_promotions_is_refused_by_its_name(line):
    promoted_over_api(line)
    (line.parent / "state" / "promotions.json").write_text("[{")
    assert "promotions.json: cannot be read (it is damaged)" in check(line)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")
def test_line_file_is_checked_without_access_to_its_state():
    with TemporaryDirectory() as folder:
        line = Path(folder, "line.yaml")
        line.write_text(LINE)
        promoted_over_api(line)
        os.chmod(folder, 0o755)
        os.chmod(line.parent / "state", 0o700)
        os.seteuid(65534)
        try:
            assert read_line(line).promotions == ()
        finally:
            os.seteuid(0)


def check(line):
    done = coserve("config", "check", line)
    return " ".join((done.stdout + done.stderr).split())
