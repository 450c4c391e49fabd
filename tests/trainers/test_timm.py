"""Models of timm, as its saver leaves them and as they are exported, to judged images: timm's own probabilities."""

import json

import pytest

from tests.trainers.test_torch import LABELS, require_same

NAMED = ("--labels", ",".join(LABELS), "--normalize", "imagenet", "--task", "multiclass")


def own_answers(folder, model):
    rows = json.loads((folder / "answers.json").read_text())[model]
    return [LABELS[row.index(max(row))] for row in rows], [max(row) for row in rows]


def test_a_resnet_of_its_saver_is_served_with_its_own_answers(line, made_by, images):
    folder = made_by("timm")
    added = line.add(folder / "resnet18" / "last.pth.tar", *NAMED)
    assert added["expert"] == "cls/last"
    assert (added["entry"]["architecture"], added["entry"]["input"]["size"]) == ("resnet18", [64, 64])
    require_same(line.inspect(images), *own_answers(folder, "resnet18"))


def test_an_onnx_export_is_served_with_its_own_answers(line, made_by, images):
    folder = made_by("timm")
    assert line.add(folder / "mobilenetv3.onnx", *NAMED)["entry"]["architecture"] == "onnx"
    require_same(line.inspect(images), *own_answers(folder, "mobilenetv3_small_050"))


@pytest.mark.parametrize(
    ("file", "place"),
    [("own/whole.pt", "the file itself.pretrained_cfg."), ("hub/model.onnx", "config.json pretrained_cfg.")],
)
def test_its_own_numbers_and_cut_are_taken_from_where_it_writes_them(line, made_by, images, file, place):
    folder = made_by("timm")
    added = line.add(folder / file, "--labels", ",".join(LABELS), "--task", "multiclass")
    own = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    fit = {"resize": 71, "crop": 64, "interpolation": "bicubic"}
    assert added["entry"]["input"] == {"size": [64, 64], "normalize": own, "fit": fit}
    assert added["sure"]["normalize"] == f"{place}mean, std"
    assert added["sure"]["fit"] == f"{place}crop_pct, crop_mode, interpolation"
    require_same(line.inspect(images), *own_answers(folder, "own"), tolerance=1e-4)
