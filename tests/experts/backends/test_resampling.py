"""Pixels scaled by other libraries than Pillow: no value differs from what that library makes of the same image."""

import math

import cv2
import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode, v2

from experts.backends.vision.pixels import fitted, normalized, resampled
from experts.expert import ALIKE_BUT_FOR_ROUNDING, RESAMPLERS, Fit, InputSpec, Normalization, Padding
from experts.model_files.trainers import TRAINERS

SIZES = [(97, 61), (33, 120), (20, 24), (300, 411)]
HEIGHT, WIDTH = 32, 40
OPENCV = {
    "linear": cv2.INTER_LINEAR, "area": cv2.INTER_AREA, "cubic": cv2.INTER_CUBIC, "nearest": cv2.INTER_NEAREST,
    "lanczos4": cv2.INTER_LANCZOS4,
}  # fmt: skip
CENTRED = Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def picture(height, width):
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OPENCV)
def test_opencv_resampling_equals_cv2_resize(size, name):
    image = picture(*size)
    expected = cv2.resize(image, (WIDTH, HEIGHT), interpolation=OPENCV[name])
    assert np.array_equal(resampled(image, HEIGHT, WIDTH, f"opencv-{name}"), expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [each for each in RESAMPLERS if each.startswith("torch-")])
def test_torch_resampling_equals_its_v2_transform_on_a_tensor(size, name):
    image = picture(*size)
    mode = InterpolationMode(name.removeprefix("torch-").removeprefix("float-").removesuffix("-antialias"))
    steps = [v2.ToImage(), v2.Resize((HEIGHT, WIDTH), mode, antialias=name.endswith("-antialias"))]
    if "float" in name:
        steps.insert(1, v2.ToDtype(torch.float32, scale=True))
    expected = v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True)])(image)
    found = fitted(image, InputSpec(HEIGHT, WIDTH, "unit", interpolation=name)).tensor
    assert torch.allclose(found, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("size", [(97, 61), (20, 24), (300, 411)])
@pytest.mark.parametrize(("name", "other"), ALIKE_BUT_FOR_ROUNDING.items())
def test_resampling_functions_of_one_formula_differ_by_rounding_only(size, name, other):
    found, expected = (resampled(picture(*size), HEIGHT, WIDTH, each).astype(np.float64) for each in (name, other))
    assert np.abs(found - expected).max() <= 3


def test_keras_resampling_equals_tensorflows_without_antialiasing():
    """tensorflow/core/kernels/image/resize_bilinear_op.cc and resize_nearest_neighbor_op.cc, half pixel centres."""
    image = picture(97, 61).astype(np.float64)
    places = [(np.arange(new) + 0.5) * old / new - 0.5 for new, old in ((HEIGHT, 97), (WIDTH, 61))]
    scaled = image
    for axis, (place, old) in enumerate(zip(places, (97, 61), strict=True)):
        low = np.floor(place)
        part = (place - low).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        below, above = (np.clip(each, 0, old - 1).astype(int) for each in (low, low + 1))
        scaled = np.take(scaled, below, axis) * (1 - part) + np.take(scaled, above, axis) * part
    found = resampled(image.astype(np.uint8), HEIGHT, WIDTH, "keras-bilinear")
    assert np.abs(found - scaled).max() < 1e-3  # of 255
    rows, columns = (np.floor(place + 0.5).astype(int) for place in places)
    assert np.array_equal(
        resampled(image.astype(np.uint8), HEIGHT, WIDTH, "keras-nearest"), image[rows][:, columns].astype(np.float32)
    )


@pytest.mark.parametrize("size", [*SIZES, (32, 10), (1, 400)])
def test_padded_image_equals_yoloxs_preproc(size):
    """yolox/data/data_augment.py, preproc (0.3.0): padded below and on the right, channels blue first, 0 to 255."""
    image = picture(*size)
    ratio = min(HEIGHT / size[0], WIDTH / size[1])
    inner = max(int(size[0] * ratio), 1), max(int(size[1] * ratio), 1)
    expected = np.full((HEIGHT, WIDTH, 3), 114, np.uint8)
    expected[: inner[0], : inner[1]] = cv2.resize(image[:, :, ::-1], inner[::-1], interpolation=cv2.INTER_LINEAR)
    numbers = Normalization((0, 0, 0), (1, 1, 1), 255, "bgr")
    spec = InputSpec(
        HEIGHT, WIDTH, numbers, Fit.PADDED, interpolation="opencv-linear", padding=Padding("top-left", 114),
        rounding="down",
    )  # fmt: skip
    found = fitted(image, spec)
    assert torch.equal(found.tensor, torch.from_numpy(expected.transpose(2, 0, 1).astype(np.float32)))
    assert (found.scale_x * size[1], found.scale_y * size[0]) == pytest.approx(inner[::-1])


@pytest.mark.parametrize("size", [(48, 20), (97, 61), (33, 120), (20, 300)])
def test_image_padded_on_the_right_equals_paddleocrs(size):
    """tools/infer/predict_rec.py, resize_norm_img (2.7): its height is filled, and the padding is 0 once normalised."""
    image = picture(*size)
    width = min(math.ceil(HEIGHT * size[1] / size[0]), WIDTH)
    scaled = cv2.resize(image, (width, HEIGHT)).astype(np.float32).transpose(2, 0, 1) / 255
    expected = np.zeros((3, HEIGHT, WIDTH), np.float32)
    expected[:, :, :width] = (scaled - 0.5) / 0.5
    spec = InputSpec(
        HEIGHT, WIDTH, CENTRED, Fit.PADDED, interpolation="opencv-linear", padding=Padding("right", "mean"),
        rounding="up",
    )  # fmt: skip
    assert torch.allclose(fitted(image, spec).tensor, torch.from_numpy(expected), atol=2e-6, rtol=0)


def test_padded_image_is_centred_on_its_colour():
    image = picture(20, 60)
    spec = InputSpec(40, 40, "unit", Fit.PADDED, padding=Padding("center", (255, 0, 128)))
    found = fitted(image, spec)
    assert (found.pad_top, found.pad_left, found.scale_x) == (13, 0, 40 / 60)
    assert torch.equal(found.tensor[:, :13], normalized(np.full((13, 40, 3), (255, 0, 128), np.uint8), "unit"))
    assert torch.equal(found.tensor[:, 13:26], normalized(resampled(image, 13, 40, "bilinear"), "unit"))


@pytest.mark.parametrize(("rounding", "left"), [(None, 2), ("nearest", 2), ("down", 1)])
def test_half_pixel_of_a_crop_is_rounded_as_its_library_does(rounding, left):
    """torchvision: nearest; transformers' center_crop: down."""
    image = picture(32, 35)
    spec = InputSpec(32, 32, "unit", Fit.CROPPED, (32, 35), rounding=rounding)
    assert torch.equal(fitted(image, spec).tensor, normalized(image[:, left : left + 32], "unit"))


@pytest.mark.parametrize("size", [(97, 61), (33, 120), (50, 50)])
def test_cropped_image_equals_albumentations(size):
    """SmallestMaxSize and CenterCrop (1.4.24): the longer side to the nearest pixel, a cut's place down."""
    image, side = picture(*size), 36
    height, width = (round(extent * (side / min(size))) for extent in size)
    top, left = (height - 32) // 2, (width - 32) // 2
    scaled = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    spec = InputSpec(
        32, 32, "unit", Fit.CROPPED, side, interpolation="opencv-linear", rounding=TRAINERS["albumentations"].rounding
    )
    assert torch.equal(fitted(image, spec).tensor, normalized(scaled[top : top + 32, left : left + 32], "unit"))


def test_jpeg_is_not_decoded_smaller_for_a_resampler_that_skips_pixels():
    antialiased = {name for name in RESAMPLERS if InputSpec(8, 8, interpolation=name).is_antialiased}
    assert antialiased == {"box", "bilinear", "hamming", "bicubic", "lanczos"}
