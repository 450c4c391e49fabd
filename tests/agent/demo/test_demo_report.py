"""What the closing report says of anomaly experts, and which board its picture shows."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from PIL import Image

from agent.demo.demo import DemoReport, anomaly_report, anomaly_rows, known_label, paint, part_verdict
from agent.demo.inbox import Specimen
from agent.demo.rendering.picture import STRIP_PX, PartVerdict
from agent.demo.rendering.render import Placement, RenderedBoard
from agent.demo.training.anomalies import TrainedAnomaly
from agent.records.results import KeptMap, ResultRow
from experts.expert import Anomaly, AnomalyMap, Expert, InputSpec, Task, Verdict
from experts.thresholds.learning import learned
from experts.thresholds.map_pictures import map_png
from tests.lines import result

MAP = AnomalyMap(1, 2, 1.0, 9.0, bytes([0, 255]))
GOOD, STRANGE = Anomaly(2.0, 5.0), Anomaly(9.0, 5.0, MAP)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def specimen(component, label, name="B001_x_R1.png"):
    return Specimen(Path(name), "B001", component, "R1", label)


@pytest.fixture
def trained():
    expert = Expert("ano/lid", "onnx", Path("lid.onnx"), ("ok", "anomalous"), InputSpec(8, 8), task=Task.ANOMALY)
    found = learned([1.0, 2.0, 3.0], [8.0, 9.0], 0.01)
    return TrainedAnomaly("lid", expert, found, training=4, good=3, bad=2)


def test_an_anomaly_expert_is_held_against_the_truth_of_its_own_parts(trained):
    said = [
        (specimen("lid", "ok"), PartVerdict(Verdict.OK, "ok", GOOD)),
        (specimen("lid", "ok"), PartVerdict(Verdict.NG, "anomalous", STRANGE)),
        (specimen("lid", "bent"), PartVerdict(Verdict.NG, "anomalous", STRANGE)),
        (specimen("lid", "bent"), PartVerdict(Verdict.OK, "ok", GOOD)),
        (specimen("lid", "stained"), PartVerdict(Verdict.UNKNOWN, "unreadable")),
        (specimen("chip", "missing"), PartVerdict(Verdict.OK, "ok")),
    ]
    found = anomaly_report(trained, said)
    assert (found.judged, found.defective, found.missed, found.false_alarms) == (5, 3, 1, 1)
    assert (found.expert, found.training, found.good, found.bad) == ("ano/lid", 4, 3, 2)
    assert found.threshold == trained.learned.rates.threshold


def test_its_word_for_every_defect_is_right():
    assert known_label(specimen("lid", "bent"), PartVerdict(Verdict.NG, "anomalous", STRANGE)) == "anomalous"
    assert known_label(specimen("lid", "ok"), PartVerdict(Verdict.NG, "anomalous", STRANGE)) == "ok"
    assert known_label(specimen("chip", "missing"), PartVerdict(Verdict.NG, "flipped")) == "missing"


class Kept:
    """The maps of one result."""

    def __init__(self, *maps):
        self._maps = maps

    def maps(self, seq):
        return self._maps if seq == 7 else ()


def row(steps, verdict=Verdict.NG, label="anomalous", reason=None):
    detail = {"steps": steps} if steps else {}
    return ResultRow(7, result("k", verdict, label=label, reason=reason, detail=detail))


def test_a_stored_map_comes_back_with_its_score():
    steps = [{"expert": "ano/lid", "anomaly": {"score": 9.0, "threshold": 5.0}}]
    assert part_verdict(row(steps), Kept(KeptMap(0, "ano/lid", map_png(MAP)))) == PartVerdict(
        Verdict.NG, "anomalous", STRANGE
    )
    assert part_verdict(row(steps, Verdict.OK, "ok"), Kept()).anomaly == Anomaly(9.0, 5.0)


def test_what_nobody_measured_has_no_anomaly():
    assert part_verdict(row([{"expert": "cls/a"}], label="missing"), Kept()) == PartVerdict(Verdict.NG, "missing")
    assert part_verdict(row([], Verdict.UNKNOWN, None, "unreadable"), Kept()).label == "unreadable"


def board(name, colour):
    return RenderedBoard(
        name, Image.new("RGB", (400, 300), colour), (Placement("R1", "lid", "ok", (100, 100, 200, 200), 0, None),)
    )


@pytest.mark.parametrize(
    ("verdicts", "shown"),
    [
        ({}, 0),
        ({"B2_lid_R1.png": PartVerdict(Verdict.NG, "missing")}, 1),
        (
            {
                "B2_lid_R1.png": PartVerdict(Verdict.NG, "missing"),
                "B3_lid_R1.png": PartVerdict(Verdict.NG, "anomalous", STRANGE),
            },
            2,
        ),
    ],
)
def test_the_picture_is_of_the_board_that_shows_most(tmp_path, verdicts, shown):
    colours = [(40, 0, 0), (0, 40, 0), (0, 0, 40)]
    boards = [board(f"B{number}", colour) for number, colour in enumerate(colours, start=1)]
    paint(tmp_path / "board.png", boards, verdicts)
    with Image.open(tmp_path / "board.png") as picture:
        assert picture.size == (400, 300 + STRIP_PX)
        assert picture.getpixel((390, 290)) == colours[shown]


def test_a_line_without_one_says_so():
    numbers = {name: 0 for name in DemoReport.__dataclass_fields__ if name not in {"line_file", "picture", "anomalies"}}
    ((name, words),) = anomaly_rows(DemoReport(line_file=Path("line.yaml"), picture=None, **numbers))
    assert name == "anomaly expert"
    assert words.startswith("none")
