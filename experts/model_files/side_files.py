"""Files beside a model that state its preprocessing: transformers' preprocessor_config.json, timm's config.json.

Guarantees: a file counts only if each of its keys is known, as what it states or as harmless; else nothing of it is
taken, and what it has is asked for by its name. Files count only in a folder with one model. The other exports in
UNREAD are named and not read.

Source of the image processors: transformers 5.24, image_processing_backends.py and models/*/image_processing_*.py, and
4.57 for classes whose name ends in Fast (torchvision's tensors; the others use Pillow up to 4, and from 5 on
torchvision's tensors, whose pixels differ by one of 255 at most).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from experts.checkpoints.facts import Facts
from experts.checkpoints.importing import is_checkpoint
from experts.checkpoints.preprocessing import (
    INTERPOLATIONS,
    channels_of,
    fit_of,
    is_number,
    is_side,
    line_fit,
    line_normalize,
    normalization_of,
    sides_of,
)
from experts.checkpoints.trainer_facts import PROBLEMS, FactCollector, labels_of, size_of
from experts.errors import WeightsRefused
from experts.model_files.description import unknown_fit, unserved_fit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from experts.checkpoints.preprocessing import Stated, Table
    from experts.model_files.description import ModelDescription

PIXEL_KEYS = frozenset(  # keys that every class has
    {"do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize"}
    | {"image_mean", "image_std", "image_processor_type", "feature_extractor_type"}
)
HARMLESS = frozenset(  # of RGB before, of segmentation maps, of arrays and not of values, names, defaults, speed
    {"do_convert_rgb", "do_reduce_labels", "reduce_labels", "data_format", "input_data_format", "return_tensors"}
    | {"processor_class", "default_to_square", "disable_grouping"}
)
EXIF_SOURCE = "transformers' load_image turns images as their EXIF entry says"
CONVNEXT_STRETCHED, CONVNEXT_PART, LEVIT_FACTOR = 384, 224 / 256, 256 / 224
UNNAMED = "LABEL_0"
PROCESSOR, CONFIG, TIMM = "preprocessor_config.json", "config.json", "pretrained_cfg"
PIXELS = ("size", "normalize", "fit", "orientation")
LENGTH_MAXIMUM = 1_000_000
UNREAD = {
    "environment.json": "Roboflow's export", "metadata.json": "Anomalib's export", "inference.yml": "PaddleX's export",
    "pipeline.json": "mmdeploy's export", "args.yaml": "ultralytics' training",
}  # fmt: skip
TIMM_STATED = frozenset({"architecture", "model_args", "global_pool", "label_names", TIMM})
TIMM_HARMLESS = frozenset({"num_classes", "num_features", "label_descriptions"})  # of weights, or of people
CFG_STATED = frozenset({"mean", "std", "input_size", "crop_pct", "crop_mode", "interpolation"})
CFG_HARMLESS = (
    frozenset(  # where pretrained weights come from, and how a head is replaced: timm 1.0, models/_pretrained
        {"url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "architecture", "tag", "custom_load"}
        | {"min_input_size", "fixed_input_size", "num_classes", "label_offset", "label_names", "label_descriptions"}
        | {"pool_size", "test_pool_size", "first_conv", "classifier", "license", "description", "origin_url"}
        | {"paper_name", "paper_ids", "notes"}
    )
)


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
    """``stated``: facts by key of a line file. ``unclear``: reason why the file is not understood; nothing is stated
    then."""

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
    known = PIXEL_KEYS | HARMLESS | kind.own
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


@dataclass(frozen=True, slots=True)
class SideFiles:
    """Content of the files beside a model, and the names of other exports' files."""

    processor: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    @classmethod
    def of(cls, file: Path) -> SideFiles:
        folder = file.absolute().parent
        suffixes = {".onnx", ".safetensors"}
        models = {each.stem for each in folder.iterdir() if each.suffix in suffixes or is_checkpoint(each)}
        if len(models) > 1:
            return cls()
        unread = tuple(name for name in UNREAD if (folder / name).is_file())
        return cls(_table(folder / PROCESSOR), _table(folder / CONFIG), unread)

    def of_weights(self, file: Path, given: str | None, own: Facts | None = None) -> Facts:
        """A file's ``own`` facts with the architecture that timm names. ``given``: by the user.

        Raises WeightsRefused for layers that weights do not show.
        """
        name, own = self.config.get("architecture"), own or Facts()
        if not isinstance(self.config.get(TIMM), dict) or not isinstance(name, str) or own.architecture is not None:
            return own
        others = {key: self.config[key] for key in ("model_args", "global_pool") if self.config.get(key)}
        if others.get("global_pool") == "avg":
            del others["global_pool"]
        if others and given is None:
            raise WeightsRefused(
                str(file),
                f"is a {name} with {json.dumps(others)[:200]} ({CONFIG}), which may compute otherwise than "
                "torchvision's model of these weights: export it to ONNX, and add that, or say --architecture",
            )
        builder = None if others else "timm"  # which builds the model by its name
        plain = name.partition(".")[0]  # without the tag of its training
        evidence = {**own.evidence, "architecture": f"{CONFIG} architecture"}
        return replace(own, architecture=plain, builder=builder, evidence=evidence)


def with_side_facts(described: ModelDescription, side: SideFiles) -> ModelDescription:
    """Add what the files state where the model's own lacks it, and questions for what nothing states."""
    remarks = tuple(f"{name} ({UNREAD[name]}) lies beside it, and is not read" for name in side.unread)
    if described.kind == "detector":
        return replace(described, remarks=(*described.remarks, *remarks))
    facts, unclear = _collected(side, described.size)
    keys = (*PIXELS, "labels", *(("task",) if described.kind == "classifier" else ()))
    new = [key for key in keys if getattr(described, key) is None and key in facts.values]
    values = {
        key: facts.values[key] for key in new if key != "labels" or len(facts.values[key]) == described.label_count
    }
    missing = {key: why for key, why in described.missing.items() if key not in values}
    if described.fit is None and "fit" not in values and described.kind is not None:
        missing.setdefault("fit", unserved_fit(facts.evidence["fit"]) if facts.lacks("fit") else unknown_fit())
    if unclear:
        why = f"{'; '.join(unclear)}, which is not understood, and nothing of that file is taken: "
        missing |= {key: why + missing[key] for key in PIXELS if key in missing}
        remarks = (*remarks, *(f"{each}, which is not understood: nothing of that file was taken" for each in unclear))
    evidence = {**described.evidence, **{key: facts.evidence[key] for key in values}}
    return replace(described, **values, evidence=evidence, missing=missing, remarks=(*described.remarks, *remarks))


def _collected(side: SideFiles, size: tuple[int, int] | None) -> tuple[FactCollector, list[str]]:
    """Facts, and what is not understood."""
    facts = FactCollector()
    facts.add("size", size, "")
    found = of_image_processor(side.processor) if side.processor else ProcessorFacts({})
    for fact, stated in found.stated.items():
        facts.add_found(fact, stated, f"{PROCESSOR} ")
    unclear = [f"{PROCESSOR} has {each}" for each in found.unclear]
    if "model_type" in side.config:  # transformers', whose labels without names are LABEL_0, LABEL_1, ...
        names = labels_of(side.config.get("id2label")) or ()
        facts.add("labels", None if UNNAMED in names else names or None, f"{CONFIG} id2label")
        facts.add("task", PROBLEMS.get(str(side.config.get("problem_type"))), f"{CONFIG} problem_type")
    if isinstance(cfg := side.config.get(TIMM), dict):
        others = _unclear_timm(side.config, cfg)
        unclear += [f"{CONFIG} has {each}" for each in others]
        if not others:
            _add_timm(facts, side.config, cfg)
    return facts, unclear


def _unclear_timm(config: Mapping[str, Any], cfg: Mapping[str, Any]) -> list[str]:
    unclear = [str(key)[:100] for key in config if key not in TIMM_STATED | TIMM_HARMLESS and config[key] is not None]
    for key, value in cfg.items():
        other = {"test_input_size": cfg.get("input_size"), "test_crop_pct": cfg.get("crop_pct")}
        if value is not None and key not in CFG_STATED | CFG_HARMLESS and (key not in other or value != other[key]):
            unclear.append(f"{TIMM}.{str(key)[:100]}")
    return unclear


def _add_timm(collector: FactCollector, config: Mapping[str, Any], cfg: Mapping[str, Any]) -> None:
    where = f"{CONFIG} {TIMM}."
    collector.add("labels", labels_of(config.get("label_names")), f"{CONFIG} label_names")
    collector.add("size", size_of(cfg.get("input_size")), f"{where}input_size")
    collector.add_found("normalize", normalization_of(cfg), where)
    collector.add_found("fit", fit_of(cfg, collector.values.get("size")), where)
    collector.add("orientation", "stored", f"{CONFIG}: timm's loader takes pixels as stored")


def _table(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(LENGTH_MAXIMUM))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
