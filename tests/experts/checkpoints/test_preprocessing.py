"""What trainers' tables say of how images come to their model, each value with its own keys."""

import pytest

from experts.checkpoints.preprocessing import fit_of, normalization_of, openmmlab_preprocessor

HALF = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
MMPRETRAIN = """
model = dict(type='ImageClassifier', backbone=dict(type='ResNet', depth=18))
data_preprocessor = dict(num_classes=3, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True)
"""


@pytest.mark.parametrize(
    ("values", "expected", "keys"),
    [
        ({"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}, "imagenet", "mean, std"),
        ({"image_mean": [0, 0, 0], "image_std": [1, 1, 1], "mean": None}, "unit", "image_mean, image_std"),
        ({"mean": [0.5], "std": (0.5,)}, HALF, "mean, std"),
        ({"pixel_mean": [103.53, 116.28, 123.675], "pixel_std": [1.0, 1.0, 1.0]},
         {"mean": [103.53, 116.28, 123.675], "std": [1.0, 1.0, 1.0], "scale": 255}, "pixel_mean, pixel_std"),
        ({"mean": [0, 0, 0], "std": [255, 255, 255], "to_rgb": False},
         {"mean": [0.0, 0.0, 0.0], "std": [255.0, 255.0, 255.0], "scale": 255, "channels": "bgr"}, "mean, std"),
    ],
)  # fmt: skip
def test_mean_and_deviation_are_taken_as_stated(values, expected, keys):
    assert normalization_of(values) == (expected, keys)


@pytest.mark.parametrize(
    "values",
    [
        {"mean": [0.5] * 3},
        {"mean": [0.5] * 3, "std": [0.5, 0.0, 0.5]},
        {"mean": [0.5] * 3, "std": [0.5, float("nan"), 0.5]},
        {"mean": [0.5, 0.5], "std": [0.5, 0.5]},
        {"mean": 0.5, "std": 0.5},
        {"mean": [-3.0] * 3, "std": [0.5] * 3},
        {"mean": ["a"] * 3, "std": [0.5] * 3},
        {"mean": [0.5] * 3, "image_std": [0.5] * 3},  # of two pairs
    ],
)
def test_normalisation_that_no_line_file_takes_is_not_stated(values):
    assert normalization_of(values) is None


def test_openmmlab_configuration_is_read_and_not_run():
    found = normalization_of(openmmlab_preprocessor(MMPRETRAIN))
    assert found == (
        {"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375], "scale": 255}, "mean, std",
    )  # fmt: skip
    blue_first, _ = normalization_of(openmmlab_preprocessor(MMPRETRAIN.replace(", to_rgb=True", "")))
    assert blue_first["channels"] == "bgr"
    for hostile in (
        None,
        "(" * 10_000,
        "data_preprocessor = dict(mean=open('/etc/passwd'))",
        "data_preprocessor = [1]",
    ):
        assert openmmlab_preprocessor(hostile) == {}


@pytest.mark.parametrize(
    ("values", "size", "expected", "keys"),
    [
        ({"val_resize_size": 232, "val_crop_size": 224, "interpolation": "bilinear", "crop_pct": None}, None,
         {"resize": 232, "crop": 224, "interpolation": "bilinear"}, "val_resize_size, val_crop_size, interpolation"),
        ({"crop_pct": 0.9, "interpolation": "bicubic", "mean": None}, (224, 224),
         {"resize": 248, "crop": 224, "interpolation": "bicubic"}, "crop_pct, interpolation"),
        ({"crop_pct": 1.0, "interpolation": "bicubic", "crop_mode": "squash"}, (96, 64),
         {"interpolation": "bicubic"}, "crop_pct, crop_mode, interpolation"),
        ({"val_resize_size": 232, "val_crop_size": 224, "interpolation": "bilinear", "backend": "tensor"}, None,
         {"resize": 232, "crop": 224, "interpolation": "torch-bilinear-antialias"},
         "val_resize_size, val_crop_size, interpolation"),
        ({"crop_pct": 0.9, "interpolation": "bicubic", "crop_mode": "border"}, (224, 224), None,
         "crop_pct, crop_mode, interpolation"),
        ({"crop_pct": 0.9, "interpolation": "random"}, (224, 224), None, "crop_pct, interpolation"),
        ({"val_resize_size": 200, "val_crop_size": 224, "interpolation": "bilinear"}, None, None,
         "val_resize_size, val_crop_size, interpolation"),
    ],
)  # fmt: skip
def test_crop_is_read_in_the_terms_of_torchvision_and_timm(values, size, expected, keys):
    assert fit_of(values, size) == (expected, keys)


@pytest.mark.parametrize(
    "values", [{"interpolation": "bilinear"}, {"crop_pct": True, "interpolation": "bilinear"}, {"crop_pct": None}]
)
def test_incomplete_fit_is_not_stated(values):
    assert fit_of(values, (224, 224)) is None
