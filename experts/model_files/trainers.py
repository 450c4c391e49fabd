"""Preparation of images by known trainers where nothing else is said, for `experts add --trainer NAME`.

Each row is read from the library's source. A trainer leaves open what its users choose, such as sizes and cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from experts.model_files.description import ModelDescription

HALF = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "channels": "bgr"}


@dataclass(frozen=True, slots=True)
class Trainer:
    """None: chosen by its users. ``fit``: "cut" is scaled to the size by the shorter side, and cut from the middle.
    ``rounding``: how edges of cuts are rounded."""

    source: str
    orientation: Literal["stored", "exif"]
    resample: str | None = None
    fit: str | Mapping[str, Any] | None = None
    normalize: str | Mapping[str, Any] | None = None
    rounding: str | None = None


TRAINERS = {
    "albumentations": Trainer(
        "albumentations 1.4: Resize and Normalize, on images of cv2.imread", "exif", "opencv-linear", None, "imagenet",
        "longer-nearest",
    ),
    "mmcv": Trainer("mmcv 2.1: image/io.py, image/geometric.py", "exif", "opencv-linear"),
    "torchvision": Trainer("torchvision 0.29: ImageFolder, transforms.Resize of a PIL image", "stored", "bilinear"),
    "torchvision-v2": Trainer(
        "torchvision 0.29: ImageFolder, transforms.v2.Resize of a tensor", "stored", "torch-bilinear-antialias"
    ),
    "timm": Trainer("timm 1.0: data/dataset.py; interpolation and crop_pct are its model's", "stored"),
    "transformers": Trainer("transformers 5.24: image_utils.load_image", "exif", rounding="down"),
    "ultralytics": Trainer(
        "ultralytics 8.4: data/augment.py, classify_transforms", "exif", "bilinear", "cut", "unit"
    ),
    "keras": Trainer(
        "Keras 3: utils/image_dataset_utils.py, image_dataset_from_directory", "stored", "keras-bilinear", "stretched"
    ),
    "paddleclas": Trainer(
        "PaddleClas 2.6: deploy/python/preprocess.py, as PaddleX", "exif", "opencv-linear", None, "imagenet",
        "longer-nearest",
    ),
    "paddleocr": Trainer(
        "PaddleOCR 2.7: tools/infer/predict_cls.py, resize_norm_img", "exif", "opencv-linear",
        {"pad": "right", "color": "mean", "rounding": "up"}, HALF,
    ),
    "anomalib": Trainer(
        "Anomalib 2.7: data/utils/image.py, PreProcessor's Resize", "stored", "torch-float-bilinear-antialias",
        "stretched",
    ),
}  # fmt: skip


def as_trained(described: ModelDescription, name: str, size: tuple[int, int] | None) -> ModelDescription:
    """The description with what the trainer does where the file states nothing. ``size``: the model's input size."""
    trainer = TRAINERS[name]
    stated = {key: getattr(trainer, key) for key in ("resample", "rounding", "orientation", "normalize", "fit")}
    values: dict[str, Any] = {key: dict(each) if isinstance(each, dict) else each for key, each in stated.items()}
    if trainer.fit == "cut":
        side = None if size is None else size[0] if size[0] == size[1] else list(size)
        values["fit"] = None if side is None else {"resize": side, "crop": side}
    new = {key: value for key, value in values.items() if value is not None and getattr(described, key) is None}
    missing = {key: why for key, why in described.missing.items() if key not in new}
    if described.fit is not None:
        new = {key: value for key, value in new.items() if key not in {"resample", "rounding"}}
    evidence = {**described.evidence, **dict.fromkeys(new, f"given by --trainer {name} ({trainer.source})")}
    return replace(described, **new, evidence=evidence, missing=missing)
