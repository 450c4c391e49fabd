"""Pixels as classifiers see them: what torchvision's own transforms make of the same image."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from experts.backends.vision.pixels import fitted, normalized
from experts.expert import IMAGENET, Fit, InputSpec, Normalization, named_normalization

OWN = Normalization((0.5, 0.4, 0.3), (0.25, 0.5, 0.125))
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
TOLERANCE = 1e-5  # of values about 1: the order in which two implementations round


def picture(height, width):
    rows, columns = np.mgrid[:height, :width]
    channels = (rows * 7 + columns * 3, rows * columns // 5, (rows - columns) ** 2 // 11)
    return (np.stack(channels, axis=2) % 256).astype(np.uint8)


def by_torchvision(image, *steps, numbers):
    pipeline = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(numbers.mean, numbers.std)])
    return pipeline(Image.fromarray(image))


@pytest.mark.parametrize(
    ("size", "interpolation", "scaled", "cut"),
    [
        *itertools.product([(97, 61), (61, 98), (64, 64), (40, 40), (120, 33)], INTERPOLATIONS, [37], [(32, 32)]),
        ((50, 60), "bilinear", 35, (32, 65)),  # beyond the scaled image it is black
    ],
)
def test_crop_equals_torchvisions_resize_and_center_crop(size, interpolation, scaled, cut):
    image = picture(*size)
    resize = transforms.Resize(scaled, InterpolationMode(interpolation))
    expected = by_torchvision(image, resize, transforms.CenterCrop(cut), numbers=OWN)
    found = fitted(image, InputSpec(*cut, OWN, Fit.CROPPED, scaled, interpolation)).tensor
    assert torch.allclose(found, expected, atol=TOLERANCE, rtol=0)


def test_normalisation_may_be_of_pixels_up_to_255_or_of_bgr():
    image = picture(20, 30)
    large = Normalization(*(tuple(each * 255 for each in numbers) for numbers in (OWN.mean, OWN.std)), scale=255)
    assert torch.allclose(normalized(image, large), normalized(image, OWN), atol=TOLERANCE, rtol=0)
    assert torch.equal(normalized(image, Normalization((0, 0, 0), (1, 1, 1), 255))[:, 4, 5], torch.tensor(image[4, 5]))
    turned = Normalization(OWN.mean[::-1], OWN.std[::-1], channels="bgr")
    assert torch.equal(normalized(image, turned), normalized(image, OWN).flip(0))


def test_normalisation_that_has_a_name_is_called_by_it():
    assert named_normalization(Normalization(IMAGENET.mean, IMAGENET.std)) == "imagenet"
    assert named_normalization(OWN) is OWN
    assert torch.equal(normalized(picture(8, 8), IMAGENET), normalized(picture(8, 8), "imagenet"))
