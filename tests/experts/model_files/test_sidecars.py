"""Files beside a model tell how images come to it, and give the pixels of the image processor that wrote them."""

import importlib
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from experts.backends.vision.classifier import build_trainable
from experts.backends.vision.detector import build_trainable as build_detector
from experts.backends.vision.pixels import fitted
from experts.errors import WeightsRefused
from experts.model_files.formats import describe_file
from experts.model_files.side_files import of_image_processor
from experts.sections.inputs import InputSection, input_spec

HALF = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
PROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": True, "resample": 3, "do_center_crop": True,
    "size": {"shortest_edge": 72}, "crop_size": {"height": 64, "width": 64},
}  # fmt: skip
TIMM = {
    "architecture": "squeezenet1_1",
    "pretrained_cfg": {**HALF, "input_size": [3, 64, 64], "crop_pct": 0.9, "interpolation": "bicubic"},
}
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
    ("name", "content", "fit", "orientation", "keys"),
    [
        ("preprocessor_config.json", PROCESSOR, {"resize": 72, "rounding": "down"}, "exif",
         ("image_mean, image_std", "size, crop_size, resample of BitImageProcessor")),
        ("config.json", TIMM, {"resize": 71}, "stored",
         ("pretrained_cfg.mean, std", "pretrained_cfg.crop_pct, interpolation")),
    ],
)  # fmt: skip
def test_facts_of_hugging_faces_files_are_taken_with_their_places(
    tmp_path, weights, name, content, fit, orientation, keys
):
    found = beside(tmp_path, weights, name, content)
    assert (found.size, found.normalize, found.orientation) == ((64, 64), HALF, orientation)
    assert found.fit == {"crop": 64, "interpolation": "bicubic", **fit}
    assert (found.evidence["normalize"], found.evidence["fit"]) == tuple(f"{name} {each}" for each in keys)
    assert set(found.missing) == {"labels", "task", *([] if name == "config.json" else ["variant"])}


def test_labels_and_task_of_transformers_config_are_taken(tmp_path, weights):
    config = {"model_type": "resnet", "id2label": {"0": "open", "1": "ok", "2": "short"}}
    found = beside(tmp_path, weights, "config.json", {**config, "problem_type": "multi_label_classification"})
    assert (found.labels, found.evidence["labels"]) == (("open", "ok", "short"), "config.json id2label")
    assert (found.task, found.evidence["task"]) == ("multilabel", "config.json problem_type")
    unnamed = {str(number): f"LABEL_{number}" for number in range(3)}
    assert beside(tmp_path, weights, "config.json", {**config, "id2label": unnamed}).labels is None


def test_unsupported_fit_is_asked_for(tmp_path, weights):
    found = beside(tmp_path, weights, "preprocessor_config.json", {**PROCESSOR, "resample": 9})
    assert found.fit is None
    assert "in a way that is not served (preprocessor_config.json size, crop_size" in found.missing["fit"]
    assert "--fit stretched" in found.missing["fit"]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("preprocessor_config.json", {**PROCESSOR, "crop_pct": 0.9}, "crop_pct"),
        ("preprocessor_config.json", {**PROCESSOR, "image_processor_type": "OwnProcessor"}, "image_processor_type Own"),
        ("config.json", {**TIMM, "augmentation": "gray"}, "augmentation"),
        ("config.json", {"pretrained_cfg": {**TIMM["pretrained_cfg"], "gray": True}}, "pretrained_cfg.gray"),
        ("config.json", {"pretrained_cfg": {**TIMM["pretrained_cfg"], "test_crop_pct": 1.0}}, "test_crop_pct"),
    ],
)
def test_sidecar_with_an_unknown_key_is_ignored_and_named(tmp_path, weights, name, content, named):
    found = beside(tmp_path, weights, name, content)
    assert (found.size, found.normalize, found.fit, found.orientation) == (None, None, None, None)
    for key in ("size", "normalize", "fit"):
        assert f"{name} has " in found.missing[key]
        assert named in found.missing[key]
        assert "nothing of that file is taken" in found.missing[key]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architecture": "squeezenet1_0"}, "says that it is a squeezenet1_0 (config.json architecture)"),
        ({"model_args": {"act_layer": "gelu"}}, "act_layer"),
        ({"global_pool": "max"}, "global_pool"),
    ],
)
def test_architecture_named_by_timm_must_agree_with_the_weights(tmp_path, weights, config, reason):
    with pytest.raises(WeightsRefused) as caught:
        beside(tmp_path, weights, "config.json", {**TIMM, **config})
    assert reason in str(caught.value)
    assert "export it to ONNX" in str(caught.value)


def test_architecture_named_by_timm_counts_for_a_checkpoint_beside_it(tmp_path, weights):
    torch.save(load_file(weights), tmp_path / "model.pth")
    (tmp_path / "config.json").write_text(json.dumps({**TIMM, "architecture": "squeezenet1_0"}))
    with pytest.raises(WeightsRefused, match="says that it is a squeezenet1_0"):
        describe_file(tmp_path / "model.pth")
    (tmp_path / "config.json").write_text(json.dumps(TIMM))
    found = describe_file(tmp_path / "model.pth")
    assert (found.normalize, found.missing.keys()) == (HALF, {"labels", "task"})


def test_labels_named_by_timm_are_taken_if_their_number_fits(tmp_path, weights):
    assert beside(tmp_path, weights, "config.json", {**TIMM, "label_names": ["a", "b", "c"]}).labels == ("a", "b", "c")
    assert beside(tmp_path, weights, "config.json", {**TIMM, "label_names": ["a", "b"]}).labels is None


def test_sidecars_of_other_exporters_are_named_and_not_read(tmp_path, weights):
    found = beside(tmp_path, weights, "environment.json", {"PREPROCESSING": {"grayscale": True}})
    assert "environment.json (Roboflow's export) lies beside it, and is not read" in found.remarks
    assert "fit" in found.missing


def test_sidecar_beside_several_models_is_ignored(tmp_path, weights):
    (tmp_path / "other.onnx").touch()
    assert beside(tmp_path, weights, "preprocessor_config.json", PROCESSOR).normalize is None


@pytest.mark.parametrize("content", ["", "[1]", '{"size": ', '{"image_mean": "a", "size": [], "crop_size": {}}'])
def test_broken_sidecar_states_nothing(tmp_path, weights, content):
    (tmp_path / "config.json").write_text('{"pretrained_cfg": "resnet18"}')
    found = beside(tmp_path, weights, "preprocessor_config.json", content)
    assert (found.size, found.normalize, found.fit) == (None, None, None)


def test_detector_sees_what_its_trainer_shows(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    save_file(build_detector("yolov8n", 2).state_dict(), tmp_path / "model.safetensors")
    found = describe_file(tmp_path / "model.safetensors")
    assert (found.normalize, found.fit) == ("unit", None)


def spec_of(values):
    stated = {key: value for key, (value, _) in of_image_processor(values).stated.items()}
    return input_spec(InputSection.model_validate(json.loads(json.dumps(stated))), "onnx")


@pytest.mark.parametrize("shape", [(45, 64), (90, 61)])
@pytest.mark.parametrize(("name", "module", "keys"), SERVED, ids=lambda each: each if isinstance(each, str) else "")
def test_pixels_are_those_of_the_processor_class(name, module, keys, shape):
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
def test_unsupported_fit_is_named_and_has_no_value(changed):
    assert of_image_processor({**VIT, **changed}).stated["fit"][0] is None


@pytest.mark.parametrize("changed", [{"image_std": None}, {"rescale_factor": None}, {"rescale_factor": 0}])
def test_incomplete_normalisation_is_not_stated(changed):
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
def test_processor_with_an_unknown_key_states_nothing_but_the_key(changed, named):
    found = of_image_processor({**VIT, **changed})
    assert (found.stated, found.unclear) == ({}, (named,))


def test_switched_off_keys_are_harmless():
    off = {"do_pad": False, "pad_size": None, "do_convert_rgb": True, "do_reduce_labels": True}
    assert of_image_processor({**VIT, **off}) == of_image_processor(VIT)
