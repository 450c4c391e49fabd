"""Trainers' settings for preprocessing, as `normalize` and `fit` of a line file.

Each value comes with the keys that it was read from. A value that a line file would refuse is left out.
"""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from experts.expert import Normalization, named_normalization

if TYPE_CHECKING:
    from collections.abc import Mapping

Table: TypeAlias = "Mapping[Any, Any]"
Stated: TypeAlias = tuple[Any, str]  # value (None: not served), keys

PAIRS = (("mean", "std"), ("image_mean", "image_std"), ("pixel_mean", "pixel_std"), ("img_mean", "img_std"))
INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # in the order of Pillow's numbers
_STATED = ("image_mean", "image_std", "do_rescale", "rescale_factor")
CONFIG_LENGTH, SIDE_MAXIMUM = 1_000_000, 8192


def normalization_of(values: Table) -> Stated | None:
    """Find mean and std. Numbers over 1, and OpenMMLab's data_preprocessor, mean pixels up to 255."""
    is_openmmlab = values.get("to_rgb", values.get("bgr_to_rgb"))
    for keys in PAIRS:
        mean, std = (_channels(values.get(key)) for key in keys)
        if mean is not None and std is not None:
            scale = 255 if is_openmmlab is not None or max(*mean, *std) > 1 else 1
            return _normalize(mean, std, ", ".join(keys), scale, "bgr" if is_openmmlab is False else "rgb")
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
    if _is_side(resize) and _is_side(crop):
        fit = _fit(resize, crop, interpolation) if is_known and resize >= crop else None
        return fit, "val_resize_size, val_crop_size, interpolation"
    if size is None or not _is_number(part) or part <= 0:
        return None
    keys = ", ".join(key for key in ("crop_pct", "crop_mode", "interpolation") if key in values)
    is_square = size[0] == size[1]
    if part > 1 or not is_known or not (mode == "squash" or (mode == "center" and is_square)):
        return None, keys
    scaled = [math.floor(side / part) for side in size]
    return _fit(scaled[0] if mode == "center" else scaled, size[0] if is_square else list(size), interpolation), keys


def of_image_processor(values: Table) -> dict[str, Stated]:
    """``size``, ``normalize`` and ``fit`` of Hugging Face's preprocessor_config.json."""
    stated: dict[str, Stated] = {}
    factor = values.get("rescale_factor", 1 / 255) if values.get("do_rescale", True) else 1
    largest = 255 * factor if _is_number(factor) else 0  # value of a pixel
    mean, std = _channels(values.get("image_mean")), _channels(values.get("image_std"))
    is_served = largest > 0 and values.get("do_normalize", True) and not values.get("do_flip_channel_order")
    if is_served and mean and std:
        mean, std = (tuple(each / largest for each in numbers) for numbers in (mean, std))
        if found := _normalize(mean, std, ", ".join(key for key in _STATED if key in values)):
            stated["normalize"] = found
    given, cut = values.get("size"), values.get("crop_size")
    is_cut = bool(values.get("do_center_crop", cut is not None))
    side = given.get("shortest_edge") if isinstance(given, dict) else given if is_cut else None
    crop = _sides(cut if is_cut else given)
    resize = side if _is_side(side) else _sides(given)
    number = values.get("resample", 2)
    if crop:
        stated["size"] = crop, "crop_size" if is_cut else "size"
    if given is not None and values.get("do_resize", True):
        is_known = type(number) is int and number in range(len(INTERPOLATIONS))
        fit = _fit(resize, crop, INTERPOLATIONS[number]) if crop and resize and is_known else None
        fit = None if "crop_pct" in values else fit
        stated["fit"] = fit, "size, crop_size, resample" if is_cut else "size, resample"
    return stated


def _normalize(mean: Any, std: Any, keys: str, scale: Any = 1, channels: Any = "rgb") -> Stated | None:  # noqa: ANN401
    """The value of a line file's ``normalize``; None for numbers that a line file refuses."""
    if not all(0 <= each <= scale for each in mean) or not all(each > 0 for each in std):
        return None
    known = named_normalization(Normalization(mean, std, scale, channels))
    own = {"mean": list(mean), "std": list(std)} | ({} if scale == 1 else {"scale": scale})
    return (known if isinstance(known, str) else own | ({} if channels == "rgb" else {"channels": channels})), keys


def _fit(resize: Any, crop: Any, interpolation: str) -> dict[str, Any]:  # noqa: ANN401  # one side or two
    one = crop[0] if isinstance(crop, tuple) and crop[0] == crop[1] else crop
    return {"resize": resize, "crop": one, "interpolation": interpolation}


def _channels(value: object) -> tuple[float, ...] | None:
    """A number for each of three channels; one alone is of all."""
    if not isinstance(value, list | tuple) or not all(map(_is_number, value)):
        return None
    numbers = tuple(map(float, value)) * (3 if len(value) == 1 else 1)
    return numbers if len(numbers) == 3 and all(map(math.isfinite, numbers)) else None


def _sides(value: object) -> tuple[Any, Any] | None:
    both = (value.get("height"), value.get("width")) if isinstance(value, dict) else (value, value)
    return both if all(map(_is_side, both)) else None


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) in {int, float}


def _is_side(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= SIDE_MAXIMUM
