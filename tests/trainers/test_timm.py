"""Models of timm, as its saver leaves them and as they are exported, to judged images: timm's own probabilities."""

import json

import pytest

from tests.trainers.test_torch import FITTED, LABELS, require_same

NAMED = ("--labels", ",".join(LABELS), "--normalize", "imagenet", "--task", "multiclass", *FITTED)


def own_answers(folder, model):
    rows = json.loads((folder / "answers.json").read_text())[model]
    return [LABELS[row.index(max(row))] for row in rows], [max(row) for row in rows]


@pytest.mark.parametrize(
    ("group", "file", "architecture", "model"),
    [
        ("quick", "resnet18/last.pth.tar", "resnet18", "resnet18"),
        pytest.param("more", "mobilenetv3.onnx", "onnx", "mobilenetv3_small_050", marks=pytest.mark.slow),
    ],
)
def test_timm_model_is_served_with_its_own_answers(line, made_by, images, group, file, architecture, model):
    folder = made_by("timm", group)
    entry = line.add(folder / file, *NAMED)["entry"]
    assert (entry["architecture"], entry["input"]["size"]) == (architecture, [64, 64])
    require_same(line.inspect(images), *own_answers(folder, model))


@pytest.mark.parametrize(
    ("group", "file", "place"),
    [
        ("quick", "own/whole.pt", "the file itself.pretrained_cfg."),
        pytest.param("more", "hub/model.onnx", "config.json pretrained_cfg.", marks=pytest.mark.slow),
    ],
)
def test_timms_normalisation_and_crop_are_taken_from_its_files(line, made_by, images, group, file, place):
    folder = made_by("timm", group)
    added = line.add(folder / file, "--labels", ",".join(LABELS), "--task", "multiclass")
    own = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    fit = {"resize": 71, "crop": 64, "interpolation": "bicubic"}
    stated = {"orientation": "stored"} if file.startswith("hub") else {}
    assert added["entry"]["input"] == {"size": [64, 64], "normalize": own, "fit": fit, **stated}
    assert added["sure"]["normalize"] == f"{place}mean, std"
    assert added["sure"]["fit"] == f"{place}crop_pct, crop_mode, interpolation"
    require_same(line.inspect(images), *own_answers(folder, "own"), tolerance=1e-4)
