"""A demo's folder, its verdicts against the truth, and the board that its picture shows."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from agent.demo.demo import MARKER, fresh_folder, paint, proof_report, report_of, run_demo, show_report
from agent.demo.line import Judged, crops_of, part_verdict, renamed
from agent.demo.rendering.picture import STRIP_PX, PartVerdict
from agent.demo.rendering.render import Placement, RenderedBoard, render_board
from agent.demo.training.anomalies import TrainedAnomaly
from agent.demo.training.crops import LabelledCrop
from agent.records.database import state_held
from agent.records.verdict import AnomalyScore, KeptMap, Step
from experts.errors import ConfigError
from experts.expert import Anomaly, AnomalyMap, Expert, InputSpec, Task, Verdict
from experts.thresholds.map_pictures import map_png
from tests.lines import result
from tests.pictures import saved

MAP = AnomalyMap(1, 2, 1.0, 9.0, bytes([0, 255]))
GOOD, STRANGE = Anomaly(2.0, 5.0), Anomaly(9.0, 5.0, MAP)
PIXELS = np.zeros((4, 4, 3), np.uint8)

# component, true label, verdict, label, anomaly
ANSWERS = [
    ("lid", "ok", Verdict.OK, "ok", GOOD),
    ("lid", "ok", Verdict.NG, "anomalous", STRANGE),
    ("lid", "bent", Verdict.NG, "anomalous", STRANGE),
    ("lid", "bent", Verdict.OK, "ok", GOOD),
    ("lid", "stained", Verdict.UNKNOWN, "unreadable", None),
    ("chip", "missing", Verdict.OK, "ok", None),
    ("chip", "missing", Verdict.NG, "flipped", None),
    ("chip", "shifted", Verdict.NG, "shifted", None),
]


def judged():
    measured = {
        "budget_bytes": 2**21, "images_bytes": 2**19,
        "held_bytes": 2**20, "grown_bytes": 3 * 2**20, "left_bytes": 2**20, "judging_s": 2.0,
        "images_per_s": 4.0, "switches": 3, "evictions": 2, "bytes_read": 1,
    }  # fmt: skip
    return Judged({f"{n}.png": PartVerdict(*said) for n, (_, _, *said) in enumerate(ANSWERS)}, 60.0, measured)


def report(anomalies):
    crops = [LabelledCrop(component, label, f"{n}.png", PIXELS) for n, (component, label, *_) in enumerate(ANSWERS)]
    trained = SimpleNamespace(experts=[1, 2], seconds={"trunk": 1.0}, anomalies=anomalies)
    return report_of(Path("demo"), trained, 2**22, crops, judged(), 20.0) | proof_report([])


@pytest.fixture
def anomaly():
    expert = Expert("ano/lid", "onnx", Path("lid.onnx"), ("ok", "anomalous"), InputSpec(8, 8), task=Task.ANOMALY)
    return TrainedAnomaly(expert, {"training": 4, "good": 3, "bad": 2, "threshold": 5.5, "expected": 0.25})


def test_verdicts_are_held_against_the_truth(anomaly, capsys):
    found = report((anomaly,))
    assert (found["requests"], found["ok"], found["ng"], found["unknown"]) == (8, 3, 4, 1)
    assert (found["missed"], found["false_alarms"], found["accuracy"]) == (2, 1, 4 / 8)
    assert found["label_accuracy"] == 3 / 8  # an anomaly expert's word for every defect is right
    (lid,) = found["anomalies"]
    assert (lid["judged"], lid["defective"], lid["missed"], lid["false_alarms"]) == (5, 3, 1, 1)
    assert (lid["expert"], lid["training"], lid["good"], lid["bad"]) == ("ano/lid", 4, 3, 2)
    assert (lid["threshold"], lid["expected"]) == (5.5, 0.25)
    show_report(report((anomaly,)))
    page = capsys.readouterr().out
    assert "2 defects missed, 1 false alarms" in page
    assert "40 s after the start" in page
    assert "0 of 2 experts answer 0 held-back crops as their own networks do" in page
    assert "process: 2 MiB, within the budget" in page
    assert "judged 5 on the boards, 3 of them defective: 1 missed, 1 false alarms" in page
    show_report(report(()))
    assert re.search(r"anomaly expert +none", capsys.readouterr().out)


def row(steps, verdict=Verdict.NG, label="anomalous", reason=None):
    return result("k", verdict, label=label, reason=reason, steps=tuple(steps), seq=7)


MEASURED = Step("ano/lid", anomaly=AnomalyScore(9.0, 5.0))


@pytest.mark.parametrize(
    ("stored", "maps", "found"),
    [
        (row([MEASURED]), [KeptMap(0, "ano/lid", map_png(MAP))], PartVerdict(Verdict.NG, "anomalous", STRANGE)),
        (row([MEASURED], Verdict.OK, "ok"), [], PartVerdict(Verdict.OK, "ok", Anomaly(9.0, 5.0))),
        (row([Step("cls/a")], label="missing"), [], PartVerdict(Verdict.NG, "missing")),
        (row([], Verdict.UNKNOWN, None, "unreadable"), [], PartVerdict(Verdict.UNKNOWN, "unreadable")),
    ],
)
def test_stored_result_is_read_back_with_its_measurement(stored, maps, found):
    assert part_verdict(stored, SimpleNamespace(maps=lambda seq: maps)) == found


def test_files_of_a_board_are_named_for_the_inbox():
    board = render_board(2, "B7", 0.3, 0.3)
    crops = crops_of(board)
    named = [(f"B7_{place.component}_{place.ref}.png", place.label) for place in board.placements]
    assert [(each.file, each.label) for each in crops] == named
    assert crops[0].pixels.shape == (64, 64, 3)


def test_files_of_held_out_crops_do_not_contain_their_label():
    crops = [LabelledCrop("r", label, f"0007-{n}.png", PIXELS) for n, label in enumerate(("ok", "short", "short"))]
    files = [each.file for each in renamed([*crops, LabelledCrop("r", "open", "3.png", PIXELS)])]
    assert files == ["0007_r_P1.png", "0007_r_P2.png", "0007_r_P3.png", "3_r_P1.png"]


def test_only_folders_made_by_a_demo_are_replaced(tmp_path):
    folder = fresh_folder(tmp_path / "demo")
    (folder / "line.yaml").write_text("line: old")
    again = fresh_folder(tmp_path / "demo")
    assert [entry.name for entry in again.iterdir()] == [MARKER]
    (folder / MARKER).rename(folder / "precious.txt")
    with pytest.raises(ConfigError, match="--dir"):
        fresh_folder(folder)
    assert [entry.name for entry in again.iterdir()] == ["precious.txt"]


def test_demo_folder_served_by_an_agent_is_not_removed(tmp_path):
    folder = fresh_folder(tmp_path / "demo")
    with state_held(folder / "state"), pytest.raises(ConfigError, match=r"an agent serves the demo in .* --dir"):
        fresh_folder(tmp_path / "demo")
    assert (folder / MARKER).is_file()


def test_crops_of_a_single_image_cannot_be_judged(tmp_path):
    for label in ("ok", "short"):
        for number in range(6):
            saved(tmp_path / "data" / "r" / label / f"1-{label}{number}.png")
    with pytest.raises(ConfigError, match="all crops are from one image, 1, and none can be held out"):
        run_demo(tmp_path / "demo", tmp_path / "data", 0, lambda *step: None)


MISSING = PartVerdict(Verdict.NG, "missing")


@pytest.mark.parametrize(
    ("verdicts", "shown"),
    [
        ({}, 0),
        ({"B2_lid_R1.png": MISSING}, 1),
        ({"B2_lid_R1.png": MISSING, "B3_lid_R1.png": PartVerdict(Verdict.NG, "anomalous", GOOD)}, 2),
    ],
)
def test_picture_shows_the_board_with_most_to_see(tmp_path, verdicts, shown):
    colours = [(40, 0, 0), (0, 40, 0), (0, 0, 40)]
    place = Placement("R1", "lid", "ok", (100, 100, 200, 200), 0, None)
    boards = [
        RenderedBoard(f"B{n}", Image.new("RGB", (400, 300), colour), (place,)) for n, colour in enumerate(colours, 1)
    ]
    paint(tmp_path / "board.png", boards, verdicts)
    with Image.open(tmp_path / "board.png") as picture:
        assert picture.size == (400, 300 + STRIP_PX)
        assert picture.getpixel((390, 290)) == colours[shown]
