"""Pixels in experts' input form: scaled with antialiasing, normalised, channels first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from experts.backends.base import Prepared
from experts.expert import NAMED, Fit, Normalization

if TYPE_CHECKING:
    from torch import Tensor

    from experts.expert import InputSpec


def fitted(image: np.ndarray, spec: InputSpec) -> Prepared:
    return cropped(image, spec) if spec.fit is Fit.CROPPED else stretched(image, spec)


def stretched(image: np.ndarray, spec: InputSpec) -> Prepared:
    """The whole image, scaled to the expert's size without keeping its proportions."""
    require_rgb(image)
    height, width = image.shape[:2]
    if (height, width) != (spec.height, spec.width):
        image = np.asarray(_scaled(image, spec.height, spec.width, spec.interpolation))
    return Prepared(normalized(image, spec.normalize), image_height=height, image_width=width)


def cropped(image: np.ndarray, spec: InputSpec) -> Prepared:
    """Crop as torchvision's Resize and CenterCrop do with a PIL image, with black beyond the scaled image."""
    require_rgb(image)
    height, width = image.shape[:2]
    scaled_height, scaled_width = _resized(height, width, spec.resize)
    scaled = _scaled(image, scaled_height, scaled_width, spec.interpolation)
    left, top = _before(scaled_width, spec.width), _before(scaled_height, spec.height)
    middle = np.asarray(scaled.crop((left, top, left + spec.width, top + spec.height)))
    scales = scaled_width / width, scaled_height / height
    return Prepared(normalized(middle, spec.normalize), height, width, *scales, pad_left=-left, pad_top=-top)


def normalized(image: np.ndarray, normalize: str | Normalization) -> Tensor:
    """float32 (3, height, width). ``normalize``: see InputSpec; ValueError for an unknown name."""
    if isinstance(normalize, Normalization) and normalize.channels == "bgr":
        image = image[:, :, ::-1]
    pixels = torch.from_numpy(np.array(image.transpose(2, 0, 1), dtype=np.float32, order="C"))
    if normalize == "unit":
        return pixels.mul_(1 / 255)
    numbers = NAMED.get(normalize) if isinstance(normalize, str) else normalize
    if numbers is None:
        raise ValueError(f"normalize is {normalize!r}: {', '.join(NAMED)} or a Normalization is known")
    mean, std = (torch.tensor(values).view(3, 1, 1) * (255 / numbers.scale) for values in (numbers.mean, numbers.std))
    return pixels.sub_(mean).mul_(1 / std)


def require_rgb(image: np.ndarray) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise ValueError(f"an image is uint8 (height, width, 3), not {image.dtype} {image.shape}")


def _scaled(image: np.ndarray, height: int, width: int, interpolation: str) -> Image.Image:
    return Image.fromarray(image).resize((width, height), Image.Resampling[interpolation.upper()])


def _resized(height: int, width: int, wanted: int | tuple[int, int] | None) -> tuple[int, int]:
    """Scaled height and width. One number is the shorter side; proportions are kept, rounded down as in torchvision."""
    if not isinstance(wanted, int):
        return wanted or (height, width)
    return (wanted, int(wanted * width / height)) if height <= width else (int(wanted * height / width), wanted)


def _before(scaled: int, wanted: int) -> int:
    return round((scaled - wanted) / 2) if scaled >= wanted else -((wanted - scaled) // 2)  # as torchvision rounds
