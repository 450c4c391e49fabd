"""Reviews as data: what is exported, by whose label, in which turn, and what is left out and counted."""

import csv
import hashlib
import json

import numpy as np
import pytest
from PIL import Image

from agent.records.verdict import KeptMap
from experts.expert import NOTHING_FOUND, Verdict
from tests.agent.commands.reviewing.conftest import step
from tests.commands import coserve

OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN
ALIGNED, SHIFTED = ("aligned", 4.0, 4.0, 12.0, 12.0), ("shifted", 30.0, 5.0, 44.0, 15.0)
OF_BOTH = ("cls/r", "det/shift")
RED, BLUE = [250, 0, 0], [0, 0, 250]


def exported(line, *options):
    """What the command tells, and the rows of its table."""
    done = coserve("review", "export", line.file, line.folder / "out", "--json", *options)
    assert done.exit_code == 0, done.stderr
    with (line.folder / "out" / "reviews.csv").open(newline="", encoding="utf-8") as file:
        return json.loads(done.stdout), list(csv.DictReader(file))


def both(label, *boxes):
    return step("cls/r", "ok"), step("det/shift", label, *boxes)


def pixels(file):
    return np.asarray(Image.open(file))


def files_below(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_crops_have_the_reviewed_labels_and_good_parts_are_ok(line):
    name = line.keep("a.png")
    judged = {"component": "r", "kept_as": name, "experts": ("cls/r",)}
    line.judge(
        (NG, judged | {"label": "missing"}),  # the person agrees
        (NG, judged | {"label": "missing"}),  # a false call
        (NG, judged | {"label": "missing"}),  # another label by the person
        (OK, judged | {"label": "ok"}),  # a missed defect
        (NG, judged | {"label": "ok", "score": 0.2}),  # too low a score: `ok` is no label of a bad part
        (OK, judged | {"label": "ok"}),
        (UNKNOWN, judged | {"label": None}),
        (NG, judged | {"label": "missing"}),  # nobody reviews it
    )
    line.review(
        (1, NG, {}), (2, OK, {"reason": "a reflection"}), (3, NG, {"label": "Lötbrücke"}), (4, NG, {}), (5, NG, {}),
        (6, OK, {}), (7, NG, {"label": "../../x"}),
    )  # fmt: skip
    told, rows = exported(line)
    assert told["reviews"] == 7
    out = line.folder / "out"
    assert files_below(out / "crops") == [
        "r/%2E%2E%2F..%2Fx/00000007.png", "r/Lötbrücke/00000003.png", "r/defect/00000004.png", "r/defect/00000005.png",
        "r/missing/00000001.png", "r/ok/00000002.png", "r/ok/00000006.png",
    ]  # fmt: skip
    assert [row["finding"] for row in rows] == [
        "agree", "false_call", "agree", "missed_defect", "agree", "agree", "decided",
    ]  # fmt: skip
    second = rows[1]
    assert (second["who"], second["key"], second["reason"], second["machine_label"]) == (
        "ann", "k2", "a reflection", "missing",
    )  # fmt: skip
    assert second["at"].startswith("2026-05-01T")
    for row in rows:
        assert hashlib.sha256((out / row["crop"]).read_bytes()).hexdigest() == row["sha256"]


def test_crop_is_cut_from_the_upright_frame_and_turned_as_its_expert_saw_it(line):
    frame = line.keep("frame.jpg", (40, 20), orientation=6)  # upright it is 20 wide and 40 high: red above
    whole = {"component": "r", "kept_as": frame}
    line.judge(
        (NG, whole | {"experts": ("cls/r",), "label": "missing"}),
        (NG, whole | {"experts": OF_BOTH, "steps": both("shifted", ("shifted", 0.0, 20.0, 20.0, 40.0))}),
        (NG, whole | {"experts": ("cls/r",), "label": "missing", "box": (5, 5, 15, 20)}),
    )
    line.review((1, NG, {}), (2, NG, {}), (3, NG, {}))
    exported(line)
    seen, stored, part = (pixels(file) for file in sorted((line.folder / "out" / "crops").rglob("*.png")))
    assert (stored.shape, seen.shape, part.shape) == ((20, 40, 3), (40, 20, 3), (15, 10, 3))
    corners = (stored[0, 0], stored[0, -1], seen[0, 0], seen[-1, 0], part[0, 0])
    assert [list(corner.round(-1)) for corner in corners] == [RED, BLUE, RED, BLUE, RED]


def test_boxes_become_yolo_data_that_ultralytics_reads(line, monkeypatch):
    monkeypatch.setattr(Image, "open", Image.open)  # which ultralytics replaces
    from ultralytics.data.dataset import YOLODataset
    from ultralytics.data.utils import check_det_dataset

    judged = {"component": "r", "kept_as": line.keep("a.png", (60, 20)), "experts": OF_BOTH}
    line.judge(
        (NG, judged | {"label": "shifted", "steps": both("shifted", SHIFTED, ALIGNED)}),  # agree: its boxes
        (NG, judged | {"label": "shifted", "steps": both("shifted", SHIFTED, ALIGNED)}),  # false call: aligned alone
        (NG, judged | {"label": "shifted", "steps": both("shifted", SHIFTED)}),  # false call: no box
        (OK, judged | {"label": "aligned", "steps": both("aligned", ALIGNED)}),  # agree
        (NG, judged | {"label": NOTHING_FOUND, "steps": both(NOTHING_FOUND)}),  # agree: there is nothing
        (OK, judged | {"label": "aligned", "steps": both("aligned", ALIGNED)}),  # missed: its box is not known
        (NG, judged | {"label": "shifted", "steps": both("shifted", SHIFTED)}),  # it is tilted: where?
        (NG, judged | {"label": "aligned", "steps": both("aligned", ALIGNED)}),  # too low a score, and no defect's box
        (NG, judged | {"label": "gone", "steps": both("gone", ("gone", 1.0, 1.0, 2.0, 2.0))}),
        (UNKNOWN, judged | {"steps": both("aligned", ALIGNED)}),
        (OK, judged | {"label": "aligned", "steps": both("aligned", ALIGNED)}),  # missed by cls/r alone
    )
    line.review(
        (1, NG, {}), (2, OK, {}), (3, OK, {}), (4, OK, {}), (5, NG, {}), (6, NG, {}), (7, NG, {"label": "tilted"}),
        (8, NG, {}), (9, NG, {}), (10, OK, {}), (11, NG, {"label": "missing"}),
    )  # fmt: skip
    told, _ = exported(line)
    assert told["yolo"] == {"det/shift": 5}
    assert told["left_out_of_yolo"] == {
        "a missed defect has no boxes": 1,
        "the person named another defect than the boxes": 1,
        "no box shows the defect": 1,
        "a box has a label that det/shift has no more": 1,
        "the verdict was UNKNOWN: no box was confirmed": 1,
        "its review says nothing of the detector": 1,
    }
    folder = line.folder / "out" / "yolo" / "det" / "shift"
    data = check_det_dataset(str(folder / "data.yaml"), autodownload=False)
    assert data["names"] == {0: "aligned", 1: "shifted", 2: "tilted"}
    found = {
        label["im_file"][-6:-4]: [(int(kind), *box) for (kind,), box in zip(label["cls"], label["bboxes"], strict=True)]
        for label in YOLODataset(img_path=data["train"], data=data, imgsz=64, augment=False).labels
    }
    shifted, aligned = (1, 37 / 60, 10 / 20, 14 / 60, 10 / 20), (0, 8 / 60, 8 / 20, 8 / 60, 8 / 20)
    expected = {"01": [shifted, aligned], "02": [aligned], "03": [], "04": [aligned], "05": []}
    assert {name: len(boxes) for name, boxes in found.items()} == {name: len(each) for name, each in expected.items()}
    for name, boxes in expected.items():
        assert found[name] == [pytest.approx(box, abs=1e-5) for box in boxes]


def test_anomaly_maps_are_exported_with_their_crops(line):
    maps = (KeptMap(1, "ano/x", b"\x89PNG of step 1"),)
    line.judge((NG, {"component": "r", "kept_as": line.keep("a.png"), "experts": ("ano/x",), "maps": maps}))
    line.review((1, OK, {}))
    assert exported(line)[0]["maps"] == 1
    assert (line.folder / "out" / "maps" / "r" / "ok" / "00000001-1.png").read_bytes() == b"\x89PNG of step 1"


def test_missing_or_broken_image_is_left_out_and_counted_and_its_review_is_exported(line):
    broken, small = line.keep("broken.png"), line.keep("small.png", (8, 8))
    (line.folder / "state" / "images" / broken).write_bytes(b"no image")
    judged = {"experts": ("cls/r",), "label": "missing"}
    line.judge(
        (NG, judged | {"kept_as": "2026-05-01/gone.png"}),
        (NG, judged | {"kept_as": broken}),
        (NG, judged | {"kept_as": small, "box": (4, 4, 16, 16)}),
        (NG, judged | {"kept_as": small, "component": None}),
        (NG, judged | {"kept_as": small}),
    )
    line.review(*((number, NG, {}) for number in range(1, 6)))
    told, rows = exported(line)
    assert (told["reviews"], sum(told["crops"].values())) == (5, 1)
    assert sorted(told["left_out"].values()) == [1, 1, 1, 1]
    assert told["left_out"]["the image is no longer there"] == 1
    assert [bool(row["crop"]) for row in rows] == [False, False, False, False, True]
    assert all(bool(row["left_out"]) is not bool(row["crop"]) for row in rows)


def test_export_is_narrowed_by_component_and_a_folder_with_files_is_refused(line):
    name = line.keep("a.png")
    for component in ("r", "s"):
        line.document["routes"][component] = line.document["routes"]["r"]
    line.write()
    line.judge(*((NG, {"component": component, "kept_as": name, "experts": ("cls/r",)}) for component in "rs"))
    line.review((1, NG, {}), (2, NG, {}))
    assert exported(line, "--component", "s")[0]["crops"] == {"s/defect": 1}
    before = files_below(line.folder / "out")
    again = coserve("review", "export", line.file, line.folder / "out")
    assert (again.exit_code, "holds files already - name a new folder" in again.stderr) == (78, True)
    assert files_below(line.folder / "out") == before
    nothing = coserve("review", "export", line.file, line.folder / "new", "--expert", "det/shift")
    assert (nothing.exit_code, "no review matches" in nothing.stderr) == (78, True)
    assert not (line.folder / "new").exists()


def test_failed_export_leaves_nothing(line, monkeypatch):
    line.judge((NG, {"component": "r", "kept_as": line.keep("a.png"), "experts": ("cls/r",)}))
    line.review((1, NG, {}))
    with monkeypatch.context() as full:
        full.setattr("agent.commands.reviewing.write_rows", lambda *_: 1 / 0)
        assert isinstance(coserve("review", "export", line.file, line.folder / "out").exception, ZeroDivisionError)
    assert sorted(path.name for path in line.folder.iterdir()) == ["line.yaml", "state"]
    exported(line)


def test_reviews_are_listed_for_people_and_for_programs(line):
    line.judge((NG, {"component": "r", "board": "[red]B1", "experts": ("cls/r",), "label": "missing"}))
    line.review((1, OK, {"reason": "clean"}))
    shown = coserve("review", "list", line.file)
    assert (shown.exit_code, all(word in shown.stdout for word in ("ann", "[red]B1", "false_call", "clean"))) == (
        0,
        True,
    )
    (row,) = json.loads(coserve("review", "list", line.file, "--json").stdout)["reviews"]
    assert (row["seq"], row["finding"], row["verdict"], row["machine_verdict"]) == (1, "false_call", "OK", "NG")
    assert coserve("review", "list", line.file, "--expert", "det/shift", "--json").stdout == '{"reviews": []}\n'
    for no_time in ("28.11.2026", "0001-01-01T00:00+14:00"):
        refused = coserve("review", "list", line.file, "--since", no_time)
        assert (refused.exit_code, "is not a time" in refused.stderr) == (2, True)
