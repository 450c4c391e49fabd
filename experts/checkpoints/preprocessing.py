"""Trainers' settings for preprocessing, as `normalize` and `fit` of a line file.

Each value comes with the keys that it was read from. A value that a line file would refuse is left out.
"""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from experts.expert import RESAMPLERS, Normalization, named_normalization

if TYPE_CHECKING:
    from collections.abc import Mapping

Table: TypeAlias = "Mapping[Any, Any]"
Stated: TypeAlias = tuple[Any, str]  # value (None: not served), keys

PAIRS = (("mean", "std"), ("image_mean", "image_std"), ("pixel_mean", "pixel_std"), ("img_mean", "img_std"))
INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # in the order of Pillow's numbers
TENSORS = frozenset({"tensor", "datapoint", "tv_tensor"})  # `backend` of torchvision's references beside PIL
CONFIG_LENGTH, SIDE_MAXIMUM = 1_000_000, 8192


def normalization_of(values: Table) -> Stated | None:
    """Find mean and std. Numbers over 1, and OpenMMLab's data_preprocessor, mean pixels up to 255."""
    is_openmmlab = values.get("to_rgb", values.get("bgr_to_rgb"))
    for keys in PAIRS:
        mean, std = (channels_of(values.get(key)) for key in keys)
        if mean is not None and std is not None:
            scale = 255 if is_openmmlab is not None or max(*mean, *std) > 1 else 1
            return line_normalize(mean, std, ", ".join(keys), scale, "bgr" if is_openmmlab is False else "rgb")
    return None


def openmmlab_preprocessor(config: object) -> Table:
    """``data_preprocessor`` of a configuration that is the text of a Python file. The text is parsed, never run."""
    try:
        statements = ast.parse(config).body if isinstance(config, str) and len(config) < CONFIG_LENGTH else []
        for each in statements:
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "data_preprocessor":
                if isinstance(each.value, ast.Call):  # dict(...); BGR by default
                    return {"to_rgb": False} | {one.arg: ast.literal_eval(one.value) for one in each.value.keywords}
                return {"to_rgb": False, **ast.literal_eval(each.value)}
    except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    return {}


def fit_of(values: Table, size: tuple[int, int] | None) -> Stated | None:
    """Find the fit: torchvision's references give both sizes, timm the fraction of the image that is kept."""
    interpolation, mode = str(values.get("interpolation")), values.get("crop_mode") or "center"
    resize, crop, part = (values.get(key) for key in ("val_resize_size", "val_crop_size", "crop_pct"))
    is_known = interpolation in INTERPOLATIONS
    if is_known and str(values.get("backend")).lower() in TENSORS:
        interpolation = f"torch-{interpolation}-antialias"
        is_known = interpolation in RESAMPLERS
    if is_side(resize) and is_side(crop):
        fit = line_fit(resize, crop, interpolation) if is_known and resize >= crop else None
        return fit, "val_resize_size, val_crop_size, interpolation"
    if size is None or not is_number(part) or part <= 0:
        return None
    keys = ", ".join(key for key in ("crop_pct", "crop_mode", "interpolation") if key in values)
    is_square = size[0] == size[1]
    if part > 1 or not is_known or not (mode == "squash" or (mode == "center" and is_square)):
        return None, keys
    scaled = [math.floor(side / part) for side in size]
    return line_fit(
        scaled[0] if mode == "center" else scaled, size if mode == "squash" else size[0], interpolation
    ), keys


def line_normalize(mean: Any, std: Any, keys: str, scale: Any = 1, channels: Any = "rgb") -> Stated | None:  # noqa: ANN401
    """The value of a line file's ``normalize``; None for numbers that a line file refuses."""
    if not all(0 <= each <= scale for each in mean) or not all(each > 0 for each in std):
        return None
    known = named_normalization(Normalization(mean, std, scale, channels))
    own = {"mean": list(mean), "std": list(std)} | ({} if scale == 1 else {"scale": scale})
    return (known if isinstance(known, str) else own | ({} if channels == "rgb" else {"channels": channels})), keys


def line_fit(resize: Any, crop: Any, interpolation: str) -> dict[str, Any]:  # noqa: ANN401  # one side or two
    """The value of a line file's ``fit``: without a cut where nothing is cut."""
    if isinstance(resize, tuple | list) and isinstance(crop, tuple | list) and [*resize] == [*crop]:
        return {"interpolation": interpolation}
    resize, crop = (list(each) if isinstance(each, tuple) else each for each in (resize, crop))
    one = crop[0] if isinstance(crop, list) and crop[0] == crop[1] else crop
    return {"resize": resize, "crop": one, "interpolation": interpolation}


def channels_of(value: object) -> tuple[float, ...] | None:
    """A number for each of three channels; one alone is of all."""
    if not isinstance(value, list | tuple) or not all(map(is_number, value)):
        return None
    numbers = tuple(map(float, value)) * (3 if len(value) == 1 else 1)
    return numbers if len(numbers) == 3 and all(map(math.isfinite, numbers)) else None


def sides_of(value: object) -> tuple[Any, Any] | None:
    both = (value.get("height"), value.get("width")) if isinstance(value, dict) else (value, value)
    return both if all(map(is_side, both)) else None


def is_number(value: object) -> TypeGuard[float]:
    return type(value) in {int, float}


def is_side(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= SIDE_MAXIMUM
