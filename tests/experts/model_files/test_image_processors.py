"""transformers' image processors: what a preprocessor_config.json says gives the pixels of the class that wrote it."""

import importlib
import json

import numpy as np
import pytest
import torch
from PIL import Image

from experts.backends.pixels import fitted
from experts.model_files.side_files import of_image_processor
from experts.sections.inputs import InputSection, input_spec

HALF = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
VIT = {
    "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "image_processor_type": "ViTImageProcessor", "resample": 2, "rescale_factor": 1 / 255,
    "size": {"height": 224, "width": 224},
}  # fmt: skip
SIZES = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}
SERVED = [  # class, module, keys beside those that it saves by itself
    ("ViTImageProcessor", "vit", {"size": {"height": 32, "width": 48}}),
    ("DeiTImageProcessor", "deit", {"size": {"height": 40, "width": 40}, "crop_size": {"height": 32, "width": 32}}),
    ("CLIPImageProcessor", "clip", SIZES),
    ("BitImageProcessor", "bit", SIZES),
    ("MobileNetV2ImageProcessor", "mobilenet_v2", SIZES),
    ("MobileViTImageProcessor", "mobilevit", SIZES),
    ("LevitImageProcessor", "levit", {**SIZES, "size": {"shortest_edge": 32}}),
    ("PoolFormerImageProcessor", "poolformer", {**SIZES, "size": {"shortest_edge": 32}, "crop_pct": 0.9}),
    ("ConvNextImageProcessor", "convnext", {"size": {"shortest_edge": 32}}),
    ("ConvNextImageProcessor", "convnext", {"size": {"shortest_edge": 384}}),
    ("EfficientNetImageProcessor", "efficientnet", {"size": {"height": 32, "width": 32}}),
    ("EfficientNetImageProcessor", "efficientnet",
     {"size": {"height": 32, "width": 32}, "rescale_factor": 1 / 127.5, "rescale_offset": True, "include_top": False}),
    ("DINOv3ViTImageProcessor", "dinov3_vit", {"size": {"height": 32, "width": 32}}),
]  # fmt: skip


def spec_of(values):
    stated = {key: value for key, (value, _) in of_image_processor(values).stated.items()}
    return input_spec(InputSection.model_validate(json.loads(json.dumps(stated))), "onnx")


@pytest.mark.parametrize("shape", [(45, 64), (90, 61)])
@pytest.mark.parametrize(("name", "module", "keys"), SERVED, ids=lambda each: each if isinstance(each, str) else "")
def test_pixels_are_those_of_the_class(name, module, keys, shape):
    image = np.random.default_rng(4).integers(0, 256, (*shape, 3), np.uint8)
    pil = importlib.util.find_spec(f"transformers.models.{module}.image_processing_pil_{module}")
    for made, suffix in ((name, "Fast"), (f"{name}Pil", "Pil")):
        if made != name and pil is None:
            continue
        where = f"transformers.models.{module}.image_processing_{'pil_' if made != name else ''}{module}"
        processor = getattr(importlib.import_module(where), made)(**keys)
        saved = {**json.loads(processor.to_json_string()), "image_processor_type": f"{name}{suffix}"}
        expected = torch.as_tensor(np.asarray(processor(Image.fromarray(image), return_tensors="np")["pixel_values"]))
        found = fitted(image, spec_of(saved)).tensor
        assert torch.allclose(found, expected[0], atol=2e-4, rtol=0), (made, float((found - expected[0]).abs().max()))


def test_each_fact_has_its_keys():
    told = of_image_processor(VIT).stated
    assert told["normalize"] == (HALF, "image_mean, image_std, do_rescale, rescale_factor")
    assert told["size"] == ((224, 224), "size")
    assert told["fit"] == ({"interpolation": "bilinear"}, "size, resample of ViTImageProcessor")
    assert told["orientation"] == ("exif", "transformers' load_image turns images as their EXIF entry says")
    told = of_image_processor({**VIT, **SIZES, "image_processor_type": "CLIPImageProcessorFast"}).stated
    assert told["fit"] == (
        {"resize": 40, "crop": 32, "interpolation": "torch-bilinear-antialias", "rounding": "down"},
        "size, crop_size, resample of CLIPImageProcessorFast",
    )
    # pixels from 0 to 2 less 1 are those from 0 to 1 less 0.5, over 0.5
    told = of_image_processor({**VIT, "rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3})
    assert told.stated["normalize"][0] == HALF
    assert of_image_processor({**VIT, "do_normalize": False}).stated["normalize"][0] == "unit"


@pytest.mark.parametrize("changed", [{"resample": 9}, {"resample": 2.0}, {"resample": None}])
def test_a_fit_that_is_not_served_is_named_and_has_no_value(changed):
    assert of_image_processor({**VIT, **changed}).stated["fit"][0] is None


@pytest.mark.parametrize("changed", [{"image_std": None}, {"rescale_factor": None}, {"rescale_factor": 0}])
def test_numbers_that_are_incomplete_are_not_told(changed):
    assert "normalize" not in of_image_processor({**VIT, **changed}).stated


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"crop_pct": 0.875}, "crop_pct"),
        ({"do_pad": True}, "do_pad"),
        ({"do_flip_channel_order": True}, "do_flip_channel_order"),
        ({"auto_map": {"AutoImageProcessor": "own.Own"}}, "auto_map"),
        ({"size": {"shortest_edge": 224, "longest_edge": 500}}, "size shortest_edge, longest_edge"),
        ({"image_processor_type": "OwnImageProcessor"}, "image_processor_type OwnImageProcessor"),
        ({"image_processor_type": None}, "no image_processor_type"),
    ],
)
def test_of_a_file_that_is_not_understood_nothing_is_told_but_the_key(changed, named):
    found = of_image_processor({**VIT, **changed})
    assert (found.stated, found.unclear) == ({}, (named,))


def test_what_is_off_or_has_no_value_is_harmless():
    off = {"do_pad": False, "pad_size": None, "do_convert_rgb": True, "do_reduce_labels": True}
    assert of_image_processor({**VIT, **off}) == of_image_processor(VIT)
