"""What trainers' tables say of how images come to their model, each value with its own keys."""

import pytest

from experts.checkpoints.preprocessing import fit_of, normalization_of, of_image_processor, openmmlab_preprocessor

HALF = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
VIT = {
    "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "image_processor_type": "ViTImageProcessor", "resample": 2, "rescale_factor": 1 / 255,
    "size": {"height": 224, "width": 224},
}  # fmt: skip
CLIP = {
    "do_center_crop": True, "crop_size": {"height": 224, "width": 224}, "size": {"shortest_edge": 256}, "resample": 3,
    "do_resize": True, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
}  # fmt: skip
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
def test_a_mean_and_a_deviation_are_taken_as_they_are_said(values, expected, keys):
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
def test_what_no_line_file_takes_is_not_told(values):
    assert normalization_of(values) is None


def test_the_text_of_a_configuration_of_openmmlab_is_read_and_not_run():
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
         {"resize": [96, 64], "crop": [96, 64], "interpolation": "bicubic"}, "crop_pct, crop_mode, interpolation"),
        ({"crop_pct": 0.9, "interpolation": "bicubic", "crop_mode": "border"}, (224, 224), None,
         "crop_pct, crop_mode, interpolation"),
        ({"crop_pct": 0.9, "interpolation": "random"}, (224, 224), None, "crop_pct, interpolation"),
        ({"val_resize_size": 200, "val_crop_size": 224, "interpolation": "bilinear"}, None, None,
         "val_resize_size, val_crop_size, interpolation"),
    ],
)  # fmt: skip
def test_how_images_are_cut_is_taken_as_torchvision_and_timm_say_it(values, size, expected, keys):
    assert fit_of(values, size) == (expected, keys)


@pytest.mark.parametrize(
    "values", [{"interpolation": "bilinear"}, {"crop_pct": True, "interpolation": "bilinear"}, {"crop_pct": None}]
)
def test_without_all_of_it_nothing_is_told(values):
    assert fit_of(values, (224, 224)) is None


def test_an_image_processor_squeezes_or_cuts_by_a_factor_of_its_own():
    told = of_image_processor(VIT)
    assert told["normalize"] == (HALF, "image_mean, image_std, do_rescale, rescale_factor")
    assert told["size"] == ((224, 224), "size")
    assert told["fit"] == ({"resize": (224, 224), "crop": 224, "interpolation": "bilinear"}, "size, resample")
    told, cut = of_image_processor(CLIP), {"resize": 256, "crop": 224, "interpolation": "bicubic"}
    assert (told["normalize"], told["size"]) == (("imagenet", "image_mean, image_std"), ((224, 224), "crop_size"))
    assert told["fit"] == (cut, "size, crop_size, resample")
    # pixels from 0 to 2 less 1 are those from 0 to 1 less 0.5, over 0.5
    told = of_image_processor({**VIT, "rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3})
    assert told["normalize"][0] == HALF


@pytest.mark.parametrize(
    "changed", [{"crop_pct": 0.875}, {"resample": 9}, {"resample": 2.0}, {"size": {"shortest_edge": 224}}]
)
def test_a_fit_that_is_not_served_is_named_and_has_no_value(changed):
    assert of_image_processor({**VIT, **changed})["fit"] == (None, "size, resample")


@pytest.mark.parametrize(
    "changed",
    [
        {"do_normalize": False}, {"do_flip_channel_order": True}, {"image_std": None}, {"rescale_factor": None},
        {"rescale_factor": 0},
    ],
)  # fmt: skip
def test_what_a_processor_does_not_do_is_not_told(changed):
    assert "normalize" not in of_image_processor({**VIT, **changed})
