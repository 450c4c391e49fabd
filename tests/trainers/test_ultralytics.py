"""Detectors of ultralytics, from its trainer and its exporter to judged images: its own boxes, of v5, v8 and 11."""

from functools import partial

import pytest

from tests.trainers.ultralytics_models import LABELS, SIZE, export, own_boxes, train

OTHERS = ("yolov5n", "yolo11n")
EXPORTS = {"exported": False, "exported-nms": True}
PLACE_PX, SCORE = 1.0, 0.01  # largest differences of a served box from ultralytics'


@pytest.fixture
def model(made_once):
    def file_of(architecture, form):
        best = made_once(architecture, partial(train, architecture)) / "best.pt"
        if form == "best":
            return best
        folder = made_once(
            f"{architecture}-{form}", lambda folder: export(best, folder / "best.onnx", nms=EXPORTS[form])
        )
        return folder / "best.onnx"

    return file_of


def require_same(boxes, own):
    """Each box has a near box of its label in the other; nearly equal scores may swap places."""
    assert len(boxes) == len(own)
    rows = zip(own.xyxy.tolist(), own.conf.tolist(), own.cls.tolist(), strict=True)
    left = [(LABELS[int(label)], score, corners) for corners, score, label in rows]
    for box in boxes:
        corners = [box[side] for side in ("left", "top", "right", "bottom")]
        beside = [
            one for one in left
            if one[0] == box["label"] and abs(one[1] - box["score"]) <= SCORE
            and max(abs(a - b) for a, b in zip(one[2], corners, strict=True)) <= PLACE_PX
        ]  # fmt: skip
        assert beside, (box, left)
        left.remove(beside[0])


@pytest.mark.parametrize("form", ["best", *(pytest.param(form, marks=pytest.mark.slow) for form in EXPORTS)])
@pytest.mark.parametrize("architecture", ["yolov8n", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
def test_ultralytics_model_is_served_with_its_own_boxes(line, model, images, architecture, form):
    file = model(architecture, form)
    added = line.add(file, "--pass", "aligned")
    assert added["entry"]["architecture"] == (architecture if form == "best" else "onnx")
    assert added["entry"]["labels"] == list(LABELS)
    assert added["entry"]["input"] == {"size": [SIZE, SIZE], "normalize": "unit"}
    own = own_boxes(file, images)
    assert sum(map(len, own)) > len(images)
    for row, boxes in zip(line.inspect(images), own, strict=True):
        require_same(row["boxes"], boxes)
        assert row["verdict"] == ("OK" if set(boxes.cls.tolist()) == {0.0} else "NG")
