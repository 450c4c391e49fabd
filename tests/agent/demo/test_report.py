"""Verdicts against the truth: what counts as missed, as a false alarm, as named; and the stored measurements."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from agent.demo.demo import report_of, show_report
from agent.demo.line import crops_of, part_verdict, renamed
from agent.demo.rendering.picture import PartVerdict
from agent.demo.rendering.render import RenderedBoard, render_board
from agent.demo.training.anomalies import TrainedAnomaly
from agent.demo.training.crops import LabelledCrop
from agent.records.results import KeptMap, ResultRow
from experts.expert import Anomaly, AnomalyMap, Expert, InputSpec, Task, Verdict
from experts.thresholds.map_pictures import map_png
from tests.lines import result

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
    verdicts = {f"{n}.png": PartVerdict(*said) for n, (_, _, *said) in enumerate(ANSWERS)}
    engine = SimpleNamespace(pools=[SimpleNamespace(peak_used_bytes=2**20)], switches=3, evictions=2, bytes_read=1)
    return SimpleNamespace(
        verdicts=verdicts, statistics=SimpleNamespace(engine=engine), budget_bytes=2**21, grown_bytes=3 * 2**20,
        left_bytes=2**20, judging_s=2.0,
    )  # fmt: skip


def report(anomalies):
    crops = [LabelledCrop(component, label, f"{n}.png", PIXELS) for n, (component, label, *_) in enumerate(ANSWERS)]
    trained = SimpleNamespace(experts=[1, 2], seconds={"trunk": 1.0}, anomalies=anomalies)
    return report_of(Path("demo"), trained, 2**22, crops, judged(), 9.0)


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
    assert "process: 2 MiB, within the budget" in page
    assert "judged 5 on the boards, 3 of them defective: 1 missed, 1 false alarms" in page


def test_a_line_without_an_anomaly_expert_says_so(capsys):
    show_report(report(()))
    assert re.search(r"anomaly expert +none", capsys.readouterr().out)


def row(steps, verdict=Verdict.NG, label="anomalous", reason=None):
    return ResultRow(7, result("k", verdict, label=label, reason=reason, detail={"steps": steps} if steps else {}))


MEASURED = {"expert": "ano/lid", "anomaly": {"score": 9.0, "threshold": 5.0}}


@pytest.mark.parametrize(
    ("stored", "maps", "found"),
    [
        (row([MEASURED]), [KeptMap(0, "ano/lid", map_png(MAP))], PartVerdict(Verdict.NG, "anomalous", STRANGE)),
        (row([MEASURED], Verdict.OK, "ok"), [], PartVerdict(Verdict.OK, "ok", Anomaly(9.0, 5.0))),
        (row([{"expert": "cls/a"}], label="missing"), [], PartVerdict(Verdict.NG, "missing")),
        (row([], Verdict.UNKNOWN, None, "unreadable"), [], PartVerdict(Verdict.UNKNOWN, "unreadable")),
    ],
)
def test_a_stored_result_comes_back_with_its_measurement(stored, maps, found):
    assert part_verdict(stored, SimpleNamespace(maps=lambda seq: maps)) == found


def test_files_of_a_board_are_named_for_the_inbox():
    board = render_board(seed=2, defect_rate=0.3, name="B7")
    few = RenderedBoard(board.name, board.image, board.placements[:5])
    crops = crops_of(few)
    assert [each.file for each in crops] == [f"B7_{p.component}_{p.ref}.png" for p in few.placements]
    assert [each.label for each in crops] == [p.label for p in few.placements]
    assert crops[0].pixels.shape == (64, 64, 3)
    assert Image.fromarray(crops[0].pixels).mode == "RGB"


def test_files_of_held_out_crops_do_not_contain_their_label():
    crops = [LabelledCrop("r", label, f"0007-{n}.png", PIXELS) for n, label in enumerate(("ok", "short", "short"))]
    files = [each.file for each in renamed([*crops, LabelledCrop("r", "open", "3.png", PIXELS)])]
    assert files[:3] == ["0007_r_P1.png", "0007_r_P2.png", "0007_r_P3.png"]
    assert len(set(files)) == 4
    assert all(file.count("_") == 2 for file in files)
    assert not any(label in file for label in ("ok", "short") for file in files[:3])
