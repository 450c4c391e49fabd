"""Hugging Face's image processors: what preprocessor_config.json says, by the class in `image_processor_type`.

Guarantees: a file of an unknown class, or with a key that its class is not known to have, tells nothing but that key.

Source: transformers 5.24, image_processing_backends.py and models/*/image_processing_*.py, and 4.57 for classes whose
name ends in Fast (torchvision's tensors; the others use Pillow up to 4, and torchvision's tensors from 5 on, where
pixels differ by one of 255 at most).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experts.checkpoints.preprocessing import (
    INTERPOLATIONS,
    channels_of,
    is_number,
    is_side,
    line_fit,
    line_normalize,
    sides_of,
)

if TYPE_CHECKING:
    from experts.checkpoints.preprocessing import Stated, Table

PIXELS = frozenset(  # keys that every class has
    {"do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize"}
    | {"image_mean", "image_std", "image_processor_type", "feature_extractor_type"}
)
HARMLESS = frozenset(  # of RGB before, of segmentation maps, of arrays and not of values, names, defaults, speed
    {"do_convert_rgb", "do_reduce_labels", "reduce_labels", "data_format", "input_data_format", "return_tensors"}
    | {"processor_class", "default_to_square", "disable_grouping"}
)
EXIF_SOURCE = "transformers' load_image turns images as their EXIF entry says"
CONVNEXT_STRETCHED, CONVNEXT_PART, LEVIT_FACTOR = 384, 224 / 256, 256 / 224


@dataclass(frozen=True, slots=True)
class _Class:
    """``own``: its keys beside PIXELS. ``is_short``: ``size`` as one number is the shorter side. ``flips``: red and
    blue change places by default. ``scales_floats``: pixels are floats when they are scaled."""

    own: frozenset[str] = frozenset()
    is_short: bool = False
    flips: bool = False
    scales_floats: bool = False


_CUTTING = frozenset({"crop_pct"})
CLASSES = {
    **dict.fromkeys(("ViT", "DeiT", "Beit", "Siglip", "Pvt", "Blip"), _Class()),
    **dict.fromkeys(("CLIP", "Bit", "MobileNetV1", "MobileNetV2", "Levit"), _Class(is_short=True)),
    **dict.fromkeys(("ConvNext", "PoolFormer"), _Class(_CUTTING, is_short=True)),
    "MobileViT": _Class(frozenset({"do_flip_channel_order"}), is_short=True, flips=True),
    "EfficientNet": _Class(frozenset({"rescale_offset", "include_top"})),
    "DINOv3ViT": _Class(scales_floats=True),
}


@dataclass(frozen=True, slots=True)
class ProcessorFacts:
    """``stated``: by key of a line file. ``unclear``: what is not understood; nothing is stated then."""

    stated: dict[str, Stated]
    unclear: tuple[str, ...] = ()


def of_image_processor(values: Table) -> ProcessorFacts:
    """``size``, ``normalize``, ``fit`` and ``orientation`` of a preprocessor_config.json."""
    named = values.get("image_processor_type") or values.get("feature_extractor_type")
    if not isinstance(named, str):
        return ProcessorFacts({}, ("no image_processor_type",))
    name = named.removesuffix("Fast").removesuffix("Pil")
    name = name.removesuffix("ImageProcessor").removesuffix("FeatureExtractor")
    kind = CLASSES.get(name)
    if kind is None or name == named:
        return ProcessorFacts({}, (f"image_processor_type {named[:100]}",))
    if unclear := _unclear(values, kind):
        return ProcessorFacts({}, unclear)
    stated: dict[str, Stated] = {"orientation": ("exif", EXIF_SOURCE)}
    is_cut = bool(values.get("do_center_crop", values.get("crop_size") is not None)) or name == "ConvNext"
    resize, crop = _sizes(name, kind, values, is_cut)
    if crop:
        stated["size"] = crop, "crop_size" if is_cut and name != "ConvNext" else "size"
    if found := _normalization(kind, values):
        stated["normalize"] = found
    if values.get("size") is not None and values.get("do_resize", True):
        keys = ", ".join(key for key in ("size", "crop_size", "crop_pct", "resample") if values.get(key) is not None)
        resampler = _resampler(values.get("resample"), named, kind)
        fit = line_fit(resize, crop, resampler) if resize and crop and resampler else None
        stated["fit"] = fit and ({**fit, "rounding": "down"} if "resize" in fit else fit), f"{keys} of {named}"
    return ProcessorFacts(stated)


def _unclear(values: Table, kind: _Class) -> tuple[str, ...]:
    """A key without a value, and something that is not done, are clear."""
    known = PIXELS | HARMLESS | kind.own
    off = {key for key, value in values.items() if value is None or (value is False and str(key).startswith("do_"))}
    unclear = [str(key)[:100] for key in values if key not in known | off]
    for key in ("size", "crop_size"):
        inner = values.get(key)
        if isinstance(inner, dict) and {*inner} not in ({"height", "width"}, {"shortest_edge"}):
            unclear.append(f"{key} {', '.join(map(str, inner))[:100]}")
    return tuple(unclear)


def _sizes(name: str, kind: _Class, values: Table, is_cut: bool) -> tuple[Any, tuple[int, int] | None]:
    """Shorter side, or both, that an image is scaled to, and what is cut from it."""
    given, part = values.get("size"), values.get("crop_pct")
    side = given.get("shortest_edge") if isinstance(given, dict) else given if kind.is_short else None
    side = side if is_side(side) else None
    if name == "ConvNext" and side is not None:
        part = part if is_number(part) and 0 < part <= 1 else CONVNEXT_PART
        both = (side, side)
        return (both if side >= CONVNEXT_STRETCHED else int(side / part)), both
    resize: Any = side or sides_of(given)
    if name == "Levit" and side is not None:
        resize = int(LEVIT_FACTOR * side)
    if name == "PoolFormer" and resize and is_number(part) and 0 < part <= 1:
        resize = int(resize / part) if is_side(resize) else tuple(int(each / part) for each in resize)
    return resize, sides_of(values.get("crop_size") if is_cut else None if side else given)


def _normalization(kind: _Class, values: Table) -> Stated | None:
    """``(pixel * factor - offset - mean) / std``, for EfficientNet with ``include_top`` once more over std."""
    factor = values.get("rescale_factor", 1 / 255) if values.get("do_rescale", True) else 1
    largest = 255 * factor if is_number(factor) and math.isfinite(factor) else 0  # value of a pixel
    mean, std = channels_of(values.get("image_mean")), channels_of(values.get("image_std"))
    if not values.get("do_normalize", not kind.flips):
        mean, std = (0.0,) * 3, (1.0,) * 3
    if largest <= 0 or mean is None or std is None:
        return None
    again = std if "include_top" in kind.own and values.get("include_top", True) else (1.0,) * 3
    offset = 1.0 if values.get("rescale_offset") else 0.0
    numbers = (
        tuple((each + offset) / largest for each in mean),
        tuple(one * other / largest for one, other in zip(std, again, strict=True)),
    )
    flips = values.get("do_flip_channel_order", kind.flips)
    keys = ("image_mean", "image_std", "do_rescale", "rescale_factor", *sorted(kind.own - _CUTTING))
    named = ", ".join(key for key in keys if key in values)
    return line_normalize(*numbers, named, channels="bgr" if flips else "rgb")


def _resampler(number: object, named: str, kind: _Class) -> str | None:
    """``resample`` is one of Pillow's numbers."""
    if type(number) is not int or number not in range(len(INTERPOLATIONS)):
        return None
    name = INTERPOLATIONS[number]
    if not named.endswith("Fast") and not kind.scales_floats:
        return name
    library = "torch-float" if kind.scales_floats else "torch"
    return {"nearest": f"{library}-nearest"}.get(name) or (
        f"{library}-{name}-antialias" if name in {"bilinear", "bicubic"} else None
    )
