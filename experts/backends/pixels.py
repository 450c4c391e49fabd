"""Pixels as experts want them: scaled with antialiasing, normalised, channels first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from experts.backends.base import Prepared

if TYPE_CHECKING:
    from torch import Tensor

    from experts.expert import InputSpec

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_DEVIATION = (0.229, 0.224, 0.225)


def stretched(image: np.ndarray, spec: InputSpec) -> Prepared:
    """The whole image, brought to the expert's size without keeping its proportions."""
    require_rgb(image)
    height, width = image.shape[:2]
    if (height, width) != (spec.height, spec.width):
        scaled = Image.fromarray(image).resize((spec.width, spec.height), Image.Resampling.BILINEAR)
        image = np.asarray(scaled)
    return Prepared(normalized(image, spec.normalize), image_height=height, image_width=width)


def normalized(image: np.ndarray, normalize: str) -> Tensor:
    """float32 (3, height, width). ``normalize`` as in InputSpec; ValueError for a way that is not known."""
    pixels = torch.from_numpy(np.array(image.transpose(2, 0, 1), dtype=np.float32, order="C"))
    if normalize == "unit":
        return pixels.mul_(1 / 255)
    if normalize != "imagenet":
        raise ValueError(f"normalize is {normalize!r}: 'imagenet' or 'unit' is known")
    mean = torch.tensor(IMAGENET_MEAN).view(3, 1, 1)
    deviation = torch.tensor(IMAGENET_DEVIATION).view(3, 1, 1)
    return pixels.sub_(mean * 255).mul_(1 / (deviation * 255))


def require_rgb(image: np.ndarray) -> None:
    """ValueError unless uint8 (height, width, 3) with at least one pixel."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise ValueError(f"an image is uint8 (height, width, 3), not {image.dtype} {image.shape}")
