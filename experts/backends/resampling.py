"""Scaling of pixels as the library of a trainer does it, by that library itself where the agent has it.

Pillow's filters are antialiased; OpenCV's are not, but for `area`. torch's are those of torchvision's transforms v2 on
tensors: of whole numbers, or of floats, whose values are not rounded. Keras' are TensorFlow's `image.resize` (2.x, half
pixel centres), which is torch's on floats without antialiasing, and its nearest-exact.
"""

from __future__ import annotations

import cv2
import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resize_image

from experts.expert import PILLOW, RESAMPLERS

OPENCV = {
    "linear": cv2.INTER_LINEAR, "area": cv2.INTER_AREA, "cubic": cv2.INTER_CUBIC, "nearest": cv2.INTER_NEAREST,
    "lanczos4": cv2.INTER_LANCZOS4,
}  # fmt: skip


def resampled(image: np.ndarray, height: int, width: int, resampler: str) -> np.ndarray:
    """An image (height, width, 3), uint8 or as ``resampler`` gives it: float32, of values from 0 to 255."""
    if image.shape[:2] == (height, width):
        return image
    if resampler in PILLOW:
        return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling[resampler.upper()]))
    library, _, name = resampler.partition("-")
    if resampler not in RESAMPLERS:
        raise ValueError(f"interpolation is {resampler!r}: {', '.join(RESAMPLERS)} are known")
    if library == "opencv":
        return np.asarray(cv2.resize(image, (width, height), interpolation=OPENCV[name]))
    pixels = torch.from_numpy(np.array(image.transpose(2, 0, 1), order="C"))
    scale = _by_torch if library == "torch" else _by_keras
    return np.asarray(scale(pixels, (height, width), name).permute(1, 2, 0))


def _by_torch(pixels: torch.Tensor, size: tuple[int, int], name: str) -> torch.Tensor:
    mode = name.removeprefix("float-").removesuffix("-antialias")
    values = pixels.float() if name.startswith("float-") else pixels
    return resize_image(values, list(size), InterpolationMode(mode), antialias=name.endswith("-antialias"))


def _by_keras(pixels: torch.Tensor, size: tuple[int, int], name: str) -> torch.Tensor:
    mode = "nearest-exact" if name == "nearest" else name
    return interpolate(pixels[None].float(), size, mode=mode)[0]
