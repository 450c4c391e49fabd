"""Pixels as classifiers see them: what torchvision's own transforms make of the same image."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from experts.backends.pixels import fitted, normalized
from experts.expert import IMAGENET, Fit, InputSpec, Normalization, named_normalization

OWN = Normalization((0.5, 0.4, 0.3), (0.25, 0.5, 0.125))
TOLERANCE = 1e-5  # of values about 1: the order in which two implementations round


def picture(height, width):
    rows, columns = np.mgrid[:height, :width]
    channels = (rows * 7 + columns * 3, rows * columns // 5, (rows - columns) ** 2 // 11)
    return (np.stack(channels, axis=2) % 256).astype(np.uint8)


def by_torchvision(image, *steps, numbers):
    pipeline = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(numbers.mean, numbers.std)])
    return pipeline(Image.fromarray(image))


@pytest.mark.parametrize("size", [(97, 61), (61, 98), (64, 64), (40, 40), (120, 33)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_a_crop_is_torchvisions_resize_and_center_crop(size, interpolation):
    spec = InputSpec(32, 32, OWN, Fit.CROPPED, 37, interpolation)
    image = picture(*size)
    resize = transforms.Resize(37, InterpolationMode(interpolation))
    expected = by_torchvision(image, resize, transforms.CenterCrop(32), numbers=OWN)
    assert torch.allclose(fitted(image, spec).tensor, expected, atol=TOLERANCE, rtol=0)


def test_a_crop_beyond_the_scaled_image_is_black_as_torchvisions():
    spec = InputSpec(32, 65, OWN, Fit.CROPPED, 35)
    image = picture(50, 60)
    expected = by_torchvision(image, transforms.Resize(35), transforms.CenterCrop((32, 65)), numbers=OWN)
    assert torch.allclose(fitted(image, spec).tensor, expected, atol=TOLERANCE, rtol=0)


def test_numbers_of_pixels_up_to_255_are_the_same_as_those_up_to_1():
    image = picture(20, 30)
    large = Normalization(*(tuple(each * 255 for each in numbers) for numbers in (OWN.mean, OWN.std)), scale=255)
    assert torch.allclose(normalized(image, large), normalized(image, OWN), atol=TOLERANCE, rtol=0)
    assert torch.equal(normalized(image, Normalization((0, 0, 0), (1, 1, 1), 255))[:, 4, 5], torch.tensor(image[4, 5]))


def test_a_model_of_blue_first_is_handed_blue_first():
    image = picture(20, 30)
    turned = Normalization(OWN.mean[::-1], OWN.std[::-1], channels="bgr")
    assert torch.equal(normalized(image, turned), normalized(image, OWN).flip(0))


def test_numbers_with_a_name_go_by_it():
    assert named_normalization(Normalization(IMAGENET.mean, IMAGENET.std)) == "imagenet"
    assert named_normalization(OWN) is OWN
    assert torch.equal(normalized(picture(8, 8), IMAGENET), normalized(picture(8, 8), "imagenet"))
