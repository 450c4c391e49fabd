"""What lies beside a model tells how images come to it, where the model's own file does not."""

import json
import shutil

import pytest
from safetensors.torch import save_file

from experts.backends.classifier import build_trainable
from experts.backends.detector import build_trainable as build_detector
from experts.model_files.formats import describe_file

HALF = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
PROCESSOR = {
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": True, "resample": 3, "do_center_crop": True,
    "size": {"shortest_edge": 72}, "crop_size": {"height": 64, "width": 64},
}  # fmt: skip
TIMM = {"pretrained_cfg": {**HALF, "input_size": [3, 64, 64], "crop_pct": 0.9, "interpolation": "bicubic"}}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    file = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(build_trainable("squeezenet1_1", 3).state_dict(), file)
    return file


def beside(folder, weights, name, content):
    shutil.copy(weights, folder / "model.safetensors")
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return describe_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "content", "resize", "normalize", "fit"),
    [
        ("preprocessor_config.json", PROCESSOR, 72, "image_mean, image_std", "size, crop_size, resample"),
        ("config.json", TIMM, 71, "pretrained_cfg.mean, std", "pretrained_cfg.crop_pct, interpolation"),
    ],
)
def test_what_hugging_faces_files_say_is_taken_with_its_place(tmp_path, weights, name, content, resize, normalize, fit):
    found = beside(tmp_path, weights, name, content)
    assert (found.size, found.normalize) == ((64, 64), HALF)
    assert found.fit == {"resize": resize, "crop": 64, "interpolation": "bicubic"}
    assert (found.sure["normalize"], found.sure["fit"]) == (f"{name} {normalize}", f"{name} {fit}")
    assert set(found.missing) == {"labels", "task", "variant"}


def test_a_fit_that_is_not_served_is_asked_for(tmp_path, weights):
    found = beside(tmp_path, weights, "preprocessor_config.json", {**PROCESSOR, "crop_pct": 0.9})
    assert found.fit is None
    assert "in a way that is not served (preprocessor_config.json size, crop_size" in found.missing["fit"]
    assert "--fit stretched" in found.missing["fit"]


def test_beside_several_models_nobody_knows_whose_it_is(tmp_path, weights):
    (tmp_path / "other.onnx").touch()
    assert beside(tmp_path, weights, "preprocessor_config.json", PROCESSOR).normalize is None


@pytest.mark.parametrize("content", ["", "[1]", '{"size": ', '{"image_mean": "a", "size": [], "crop_size": {}}'])
def test_what_is_broken_tells_nothing(tmp_path, weights, content):
    (tmp_path / "config.json").write_text('{"pretrained_cfg": "resnet18"}')
    found = beside(tmp_path, weights, "preprocessor_config.json", content)
    assert (found.size, found.normalize, found.fit) == (None, None, None)


def test_a_detector_sees_what_its_trainer_shows(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    save_file(build_detector("yolov8n", 2).state_dict(), tmp_path / "model.safetensors")
    found = describe_file(tmp_path / "model.safetensors")
    assert (found.normalize, found.fit) == ("unit", None)
