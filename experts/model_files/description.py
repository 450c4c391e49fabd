"""Facts found in a model's file, and questions for those that were not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

Kind: TypeAlias = Literal["classifier", "detector", "anomaly"]
KINDS: tuple[Kind, ...] = ("classifier", "detector", "anomaly")
NORMALIZE_OPTIONS = (
    "--normalize imagenet (torchvision's mean and deviation), --normalize unit (pixels in [0, 1]), or numbers of its "
    "own: --normalize '{mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}', with `scale: 255` if of pixels up to 255, "
    "`channels: bgr` if blue came first, `channels: grey` if images were made grey"
)
FIT_OPTIONS = (
    "--fit stretched (the whole image), --fit '{resize: 256, crop: 224}' (scaled, then cut from the middle) or --fit "
    "'{pad: center, color: 114}' (scaled in its proportions, then padded)"
)
RESAMPLE_OPTIONS = (
    "--resample with the function that scaled them: bilinear or bicubic (Pillow: torchvision's and timm's transforms), "
    "opencv-linear (albumentations, MMCV, PaddleX), torch-bilinear-antialias (torchvision v2 on tensors), "
    "keras-bilinear and others, or --trainer with the library"
)
NO_RESAMPLER = f"nothing says which function scaled images in training: {RESAMPLE_OPTIONS}"

ONE_OUTPUT = "one output, which leaves a softmax nothing to choose from"


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Description of a model's file. None: not known; ``missing``: by key the reason, and the option.

    ``size``: (height, width). ``normalize``, ``fit`` and ``orientation``: as a line file has them. ``resample``: a
    library's function of scaling, where the fit is not known. ``task``: for classifiers, "multiclass" (softmax) or
    "multilabel" (sigmoids). ``label_count``: also where their names are not known. ``variant``: "plain", or one of
    experts.architectures. ``evidence``: by key of the line file. ``tensors``: weights of a file that is not served
    directly; ``is_scattered``: for a graph with its weights in other files. ``remarks``: for the user.
    """

    file: Path
    kind: Kind | None
    architecture: str | None
    labels: tuple[str, ...] | None = None
    size: tuple[int, int] | None = None
    normalize: str | dict[str, Any] | None = None
    fit: str | dict[str, Any] | None = None
    resample: str | None = None
    rounding: str | None = None  # of a cut, as its trainer does where no fit says
    orientation: str | None = None
    stem: str | None = None
    variant: str | None = None
    task: str | None = None
    label_count: int | None = None
    tensors: Mapping[str, Tensor] | None = None
    is_scattered: bool = False
    evidence: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    detector: str | None = None  # of a graph: a row of DETECTORS
    confidence: float | None = None  # of a graph that leaves out boxes below, where that is above the default
    is_grey: bool = False  # of a graph: it takes one channel
    detectors: tuple[str, ...] = ()  # of a graph: rows that its outputs do not contradict

    @property
    def is_served_as_it_is(self) -> bool:
        return self.tensors is None and not self.is_scattered


def in_grey(normalize: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Normalisation of the one channel that a graph takes; that of three channels is nobody's answer to that."""
    if normalize == "unit":
        return {"mean": [0.0] * 3, "std": [1.0] * 3, "channels": "grey"}
    return {**normalize, "channels": "grey"} if isinstance(normalize, dict) else normalize


def unknown_labels(what: str, count: int | None) -> str:
    if count == 1:
        return f"{what} no name for the one output: --labels LABEL, of what a high value says"
    return f"{what} no names for the {count or ''} outputs: --labels first,second,... in their order".replace("  ", " ")


def unknown_task(what: str) -> str:
    return (
        f"{what} not show whether labels exclude one another: --task multiclass (trained with cross entropy: a "
        "softmax) or --task multilabel (with binary cross entropy: a sigmoid for each)"
    )


def unserved_fit(evidence: str) -> str:
    return f"the file scales images in a way that is not served ({evidence}); the nearest that is: {_fit_options()}"


def unknown_fit() -> str:
    return f"nothing says how images were brought to this size in training: {_fit_options()}"


def _fit_options() -> str:
    return f"{FIT_OPTIONS}; and {RESAMPLE_OPTIONS}"
