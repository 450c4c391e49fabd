"""Pixels in experts' input form: scaled, normalised, channels first.

An image is scaled as the library of its trainer does it, by that library itself where the agent has it. Pillow's
filters are antialiased; OpenCV's are not, but for `area`. torch's are those of torchvision's transforms v2 on tensors:
of whole numbers, or of floats, whose values are not rounded. They are called here, as to import these transforms loads
`torch._dynamo`. Keras' are TensorFlow's `image.resize` (2.x, half pixel
centres), which is torch's on floats without antialiasing, and its nearest-exact.
"""

from __future__ import annotations

import math
import platform
from dataclasses import replace
from typing import TYPE_CHECKING

import cv2
import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from experts.backends.base import Prepared
from experts.expert import NAMED, PILLOW, RESAMPLERS, Fit, Normalization, Padding

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from experts.expert import InputSpec

OPENCV = {
    "linear": cv2.INTER_LINEAR, "area": cv2.INTER_AREA, "cubic": cv2.INTER_CUBIC, "nearest": cv2.INTER_NEAREST,
    "lanczos4": cv2.INTER_LANCZOS4,
}  # fmt: skip
LONGER_NEAREST = "longer-nearest"  # albumentations and PaddleClas: so the longer side, and down a cut's place
GREY = (0.299, 0.587, 0.114)  # of red, green and blue
ROUNDED: dict[str, Callable[[float], int]] = {
    "nearest": round, "down": math.floor, "up": math.ceil, LONGER_NEAREST: round,
}  # fmt: skip


def fitted(image: np.ndarray, spec: InputSpec) -> Prepared:
    return _FITTED.get(spec.fit, stretched)(image, spec)


def stretched(image: np.ndarray, spec: InputSpec) -> Prepared:
    """The whole image, scaled to the expert's size without keeping its proportions."""
    require_rgb(image)
    height, width = image.shape[:2]
    scaled = resampled(image, spec.height, spec.width, spec.interpolation)
    return Prepared(normalized(scaled, spec.normalize), height, width, spec.width / width, spec.height / height)


def cropped(image: np.ndarray, spec: InputSpec) -> Prepared:
    """Crop as torchvision's Resize and CenterCrop do, with black beyond the scaled image."""
    require_rgb(image)
    height, width = image.shape[:2]
    scaled_height, scaled_width = _resized(height, width, spec.resize, spec.rounding)
    scaled = resampled(image, scaled_height, scaled_width, spec.interpolation)
    left = _before(scaled_width, spec.width, spec.rounding)
    top = _before(scaled_height, spec.height, spec.rounding)
    middle = _cut(scaled, top, left, spec)
    scales = scaled_width / width, scaled_height / height
    return Prepared(normalized(middle, spec.normalize), height, width, *scales, pad_left=-left, pad_top=-top)


def padded(image: np.ndarray, spec: InputSpec) -> Prepared:
    """The whole image in its proportions, with the padding's colour beside it."""
    require_rgb(image)
    height, width = image.shape[:2]
    padding, rounded = spec.padding or Padding(), ROUNDED[spec.rounding or "nearest"]
    scale = spec.height / height if padding.at == "right" else min(spec.height / height, spec.width / width)
    extents = ((height, spec.height), (width, spec.width))
    inner_height, inner_width = (min(max(int(rounded(extent * scale)), 1), most) for extent, most in extents)
    room = (spec.height - inner_height, spec.width - inner_width)
    top, left = (each // 2 for each in room) if padding.at == "center" else (0, 0)
    pixels = normalized(resampled(image, inner_height, inner_width, spec.interpolation), spec.normalize)
    canvas = _canvas(padding, spec)
    canvas[:, top : top + inner_height, left : left + inner_width] = pixels
    return Prepared(canvas, height, width, inner_width / width, inner_height / height, pad_left=left, pad_top=top)


def letterboxed(image: np.ndarray, spec: InputSpec) -> Prepared:
    """The whole image in its proportions, amid the expert's size, with grey beside it: as ultralytics scales images."""
    return padded(image, replace(spec, padding=Padding("center", 114), interpolation="opencv-linear", rounding=None))


def filled(image: np.ndarray, spec: InputSpec) -> Prepared:
    """The whole image, scaled without keeping its proportions: as ultralytics' RT-DETR does."""
    return stretched(image, replace(spec, interpolation="opencv-linear"))


_FITTED = {Fit.CROPPED: cropped, Fit.PADDED: padded, Fit.LETTERBOXED: letterboxed, Fit.FILLED: filled}


def normalized(image: np.ndarray, normalize: str | Normalization) -> Tensor:
    """float32 (3, height, width). ``normalize``: see InputSpec; ValueError for an unknown name."""
    if isinstance(normalize, Normalization) and normalize.channels == "bgr":
        image = image[:, :, ::-1]
    elif isinstance(normalize, Normalization) and normalize.channels == "grey":
        image = np.repeat(_grey(image)[:, :, None], 3, axis=2)
    pixels = torch.from_numpy(np.array(image.transpose(2, 0, 1), dtype=np.float32, order="C"))
    if normalize == "unit":
        return pixels.mul_(1 / 255)
    numbers = NAMED.get(normalize) if isinstance(normalize, str) else normalize
    if numbers is None:
        raise ValueError(f"normalize is {normalize!r}: {', '.join(NAMED)} or a Normalization is known")
    mean, std = (torch.tensor(values).view(3, 1, 1) * (255 / numbers.scale) for values in (numbers.mean, numbers.std))
    return pixels.sub_(mean).mul_(1 / std)


def _grey(image: np.ndarray) -> np.ndarray:
    """Pillow's grey (ITU-R 601-2); of floats without rounding."""
    if image.dtype != np.uint8:
        return np.asarray(np.dot(image, np.array(GREY, np.float32)))
    return np.asarray(Image.fromarray(np.ascontiguousarray(image)).convert("L"))


def require_rgb(image: np.ndarray) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise ValueError(f"an image is uint8 (height, width, 3), not {image.dtype} {image.shape}")


def _canvas(padding: Padding, spec: InputSpec) -> Tensor:
    if padding.color == "mean":
        return torch.zeros((3, spec.height, spec.width))
    pixel = np.broadcast_to(np.array(padding.color, np.uint8), (1, 1, 3))
    return normalized(pixel, spec.normalize).expand(3, spec.height, spec.width).contiguous()


def _cut(scaled: np.ndarray, top: int, left: int, spec: InputSpec) -> np.ndarray:
    height, width = scaled.shape[:2]
    inner = scaled[max(top, 0) : top + spec.height, max(left, 0) : left + spec.width]
    if inner.shape[:2] == spec.size:
        return inner
    middle = np.zeros((*spec.size, 3), scaled.dtype)
    middle[max(-top, 0) : height - top, max(-left, 0) : width - left] = inner
    return middle


def _resized(height: int, width: int, wanted: int | tuple[int, int] | None, rounding: str | None) -> tuple[int, int]:
    """Scaled height and width. One number is the shorter side; the longer one is rounded down as in torchvision."""
    if not isinstance(wanted, int):
        return wanted or (height, width)
    rounded = round if rounding == LONGER_NEAREST else int
    longer = rounded(wanted * max(height, width) / min(height, width))
    return (wanted, longer) if height <= width else (longer, wanted)


def _before(scaled: int, wanted: int, rounding: str | None) -> int:
    if scaled < wanted:
        return -((wanted - scaled) // 2)
    # torchvision: nearest, others down
    return ROUNDED["down" if rounding == LONGER_NEAREST else rounding or "nearest"]((scaled - wanted) / 2)


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
    values = pixels if _takes_bytes(mode) and not name.startswith("float-") else pixels.float()
    scaled = interpolate(values[None], size, mode=mode, antialias=name.endswith("-antialias"))[0]
    return scaled if name.startswith("float-") else scaled.round_().to(pixels.dtype)


def _takes_bytes(mode: str) -> bool:
    """Whether torchvision lets torch scale whole numbers: its bilinear function is fast on some processors only."""
    if mode != "bilinear":
        return True
    is_arm = platform.machine() in {"aarch64", "arm64"}
    return is_arm or torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}


def _by_keras(pixels: torch.Tensor, size: tuple[int, int], name: str) -> torch.Tensor:
    mode = "nearest-exact" if name == "nearest" else name
    return interpolate(pixels[None].float(), size, mode=mode)[0]
