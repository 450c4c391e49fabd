"""The nouns of an expert: frozen records, no behaviour beyond reading them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path


ANOMALY_LABELS = ("ok", "anomalous")  # default of `task: anomaly`; the passing label comes first
NOTHING_FOUND = "nothing-found"  # no object was detected, or no label holds; passes only by an expert's `nothing_found`
ONE_LABEL = (  # refusal of a softmax over one label
    "one label leaves a softmax nothing to choose from: every image would be it - write `task: multilabel` for a model "
    "of one output, and `otherwise:` what an image is that is not its label; or name all of its labels"
)
OTHER_THRESHOLD = "its threshold was learned with other weights, or another input, than it has now"
HOLDS_FROM = 0.5  # default probability from which a label of `task: multilabel` holds
CONFIDENCE_MINIMUM = 0.25  # default for a detector's boxes
OVERLAP_MAXIMUM = 0.45  # default intersection over union beyond which the worse of two boxes of a label is dropped


class Verdict(StrEnum):
    """Verdict for the operator. An image that cannot be judged is UNKNOWN, never OK."""

    OK = "OK"
    NG = "NG"
    UNKNOWN = "UNKNOWN"


class Precision(StrEnum):
    """Name of a form that an expert's weights are packed and executed in (``experts.backends.forms``)."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    ONNXRUNTIME = "onnxruntime"
    ONEDNN_FP32 = "onednn-fp32"
    ONEDNN_BF16 = "onednn-bf16"
    ONEDNN_INT8 = "onednn-int8"
    ONNXRUNTIME_INT8 = "onnxruntime-int8"
    INT8 = "int8"
    INT4 = "int4"


class Task(StrEnum):
    """Task of an image expert, where the architecture does not imply it."""

    ANOMALY = "anomaly"
    MULTILABEL = "multilabel"  # its labels do not exclude one another: a sigmoid and a threshold for each


class Fit(StrEnum):
    """Fit of an image to an expert's input size; an ONNX detector's file states it.

    ``STRETCHED``: smoothed, proportions not kept. ``LETTERBOXED``: proportions kept, grey beside them (ultralytics).
    ``FILLED``: not kept (ultralytics' RT-DETR). ``CROPPED``: scaled, then cut from the middle (torchvision, timm).
    ``PADDED``: proportions kept, the rest filled as ``Padding`` says, by the spec's own resampler.
    """

    STRETCHED = "stretched"
    LETTERBOXED = "letterboxed"
    FILLED = "filled"
    CROPPED = "cropped"
    PADDED = "padded"


class Orientation(StrEnum):
    """Orientation of an expert's pixels: ``STORED`` as the file has them, ``EXIF`` turned as its EXIF entry says."""

    STORED = "stored"
    EXIF = "exif"


@dataclass(frozen=True, slots=True)
class Normalization:
    """``mean`` and ``std`` of pixels from 0 to ``scale``, in the order in which the model takes the ``channels``."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: Literal[1, 255] = 1
    channels: Literal["rgb", "bgr", "grey"] = "rgb"  # grey: one channel, weighed as Pillow and OpenCV do

    def __str__(self) -> str:
        mean, std = (",".join(str(each) for each in values) for values in (self.mean, self.std))
        return f"mean={mean}/std={std}/{self.scale}{'' if self.channels == 'rgb' else f'/{self.channels}'}"


IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
UNIT = Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
NAMED = {"imagenet": IMAGENET, "unit": UNIT}


def named_normalization(normalization: Normalization) -> str | Normalization:
    """Name of a normalization that has one: equal ones share prepared images."""
    return next((name for name, known in NAMED.items() if known == normalization), normalization)


LATER = (
    "bits",
    "window",
    "padding",
    "rounding",
)  # keys of an InputSpec that came after digests of its text were stored
PILLOW = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")  # all but the first are antialiased
RESAMPLERS = (
    *PILLOW,
    *("opencv-linear", "opencv-area", "opencv-cubic", "opencv-nearest", "opencv-lanczos4"),
    *("torch-bilinear", "torch-bicubic", "torch-nearest", "torch-bilinear-antialias", "torch-bicubic-antialias"),
    *("torch-float-bilinear", "torch-float-bicubic", "torch-float-bilinear-antialias", "torch-float-bicubic-antialias"),
    *("keras-bilinear", "keras-nearest"),
)  # by library, and Pillow's without a word before: see experts.backends.resampling
ALIKE_BUT_FOR_ROUNDING = {  # functions with one formula: pixels, even of noise, differ by 3 of 255 at most
    "torch-bilinear-antialias": "bilinear", "torch-float-bilinear-antialias": "bilinear",
    "torch-bicubic-antialias": "bicubic", "keras-nearest": "nearest", "torch-nearest": "opencv-nearest",
    "torch-bilinear": "opencv-linear", "torch-float-bilinear": "opencv-linear", "keras-bilinear": "opencv-linear",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding of a PADDED image. ``at``: place of the image; "right": padding on the right alone, as PaddleOCR pads.

    ``color``: 0 to 255, of all channels or of red, green and blue; "mean": 0 in the normalised image.
    """

    at: Literal["center", "top-left", "right"] = "center"
    color: int | tuple[int, int, int] | Literal["mean"] = 0


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Input of an expert: size and preprocessing of pixels.

    ``normalize``: "imagenet" (torchvision's mean and deviation), "unit" ([0, 1]), or explicit numbers. ``fit``: unused
    for ultralytics' detectors, whose backend defines it. ``resize``, of CROPPED: shorter side, or both, before the cut.
    ``interpolation``: one of RESAMPLERS. ``rounding``: nearest, down, up or longer-nearest, of a
    cut's place and of a PADDED image's size; None: nearest.
    ``bits``, or ``window``: what becomes 0 to 255 of images of more than 8 bits (experts.image_files.depth).
    """

    height: int
    width: int
    normalize: str | Normalization = "imagenet"
    fit: Fit = Fit.STRETCHED
    resize: int | tuple[int, int] | None = None
    interpolation: str = "bilinear"
    orientation: Orientation = Orientation.STORED
    bits: int | None = None
    window: tuple[int, int] | None = None
    padding: Padding | None = None
    rounding: str | None = None

    @property
    def is_antialiased(self) -> bool:
        """False where scaling skips pixels: a JPEG that was decoded smaller would be another image."""
        return self.interpolation in PILLOW[1:]

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def text(self) -> str:
        """The whole spec: equal texts mean equal pixels. Digests of it are stored: a later key is left out if unset."""
        keys = asdict(self)
        return json.dumps({key: keys[key] for key in keys if key not in LATER or keys[key] is not None}, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Degrees in which processes run one language model together."""

    data: int = 1
    expert: int = 1
    tensor: int = 1
    slices_experts: bool = False  # cut each moe_expert over its tensor ranks, even where each could have whole ones

    @property
    def ranks(self) -> int:
        return self.data * self.expert * self.tensor


@dataclass(frozen=True, slots=True)
class Expert:
    """Expert of a line. ``weights``: the owner's file, not the packed one.

    Image experts: ``weights`` is a file. Text experts: a Hugging Face directory or a GGUF file; ``input`` is None, and
    ``labels`` are choices of a router. ``calibration``: ranges of the eight-bit form (experts.calibrations), set by
    the packer.
    Task anomaly: two labels, good first; an image whose score reaches ``threshold`` is anomalous. Without a threshold
    every image is UNKNOWN.
    Task multilabel: a label holds from its entry in ``thresholds``, default HOLDS_FROM; ``otherwise`` is the label of
    an image where none holds.
    """

    id: str
    architecture: str
    weights: Path
    labels: tuple[str, ...]
    input: InputSpec | None
    pin: bool = False
    stem: str | None = None  # classifiers: "3x3" = first convolution 3x3, stride 1, for crops of about 64 px
    variant: str | None = None  # classifiers: another computation with the same weights, see experts.architectures
    precision: Precision | None = None  # language models: overrides the line's
    moe_cache_bytes: int | None = None  # language models: bytes for moe_experts; None: all of them
    adapter: Path | None = None  # language models: folder of a LoRA adapter over ``weights``
    parallel: Parallelism | None = None  # language models: run by ranks of their own; None: by an executor
    task: Task | None = None
    threshold: float | None = None  # anomaly experts: on the scale of the model's scores
    threshold_of: str | None = None  # digest of weights and input (experts.thresholds.binding); None: unknown
    thresholds: tuple[tuple[str, float], ...] = ()
    otherwise: str = NOTHING_FOUND
    names: tuple[str, ...] | None = None  # words of the weights file for ``labels``, where the line maps them
    confidence: float = CONFIDENCE_MINIMUM  # detectors: boxes must score higher
    iou: float = OVERLAP_MAXIMUM  # detectors whose boxes are suppressed here
    suppression: str | None = None  # "all": boxes of any labels suppress one another; None: those of one label
    nothing_found: str | None = None  # "pass": a detector whose labels are all defects; an image without a box is good
    detector: str | None = None  # ONNX graphs without evidence of their exporter: a row of its decoders' table
    calibration: Path | None = None
    tells_scores: bool = field(default=False, repr=False, compare=False)  # one label of several: scores of all, too
    is_automatic: bool = False  # language models: the profile chooses, whatever the line's precision
    check: Path | None = field(default=None, repr=False, compare=False)  # folder of known answers: its answers stay

    @property
    def answers(self) -> tuple[str, ...]:
        return self.labels if self.otherwise == NOTHING_FOUND else (*self.labels, self.otherwise)

    @property
    def takes_texts(self) -> bool:
        return self.input is None

    @property
    def pixels(self) -> InputSpec:
        """Raises ValueError for an expert of texts."""
        if self.input is None:
            raise ValueError(f"{self.id} takes texts, not images")
        return self.input


@dataclass(frozen=True, slots=True)
class BoundingBox:
    """Detected object; corners in pixels of the image as viewers show it, its EXIF orientation applied."""

    label: str
    score: float
    left: float
    top: float
    right: float
    bottom: float

    def rounded(self) -> BoundingBox:
        """Box for results: the score to six places, corners to a hundredth of a pixel."""
        corners = (round(side, 2) for side in (self.left, self.top, self.right, self.bottom))
        return BoundingBox(self.label, round(self.score, 6), *corners)

    def as_json(self) -> dict[str, str | float]:
        rounded = self.rounded()
        return {name: getattr(rounded, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class LabelScore:
    """Probability of a label, and the threshold from which a multilabel expert holds it to be true.

    ``holds``: decided by the score before any rounding.
    """

    label: str
    score: float
    threshold: float
    holds: bool

    @classmethod
    def of(cls, label: str, score: float, threshold: float) -> LabelScore:
        return cls(label, score, threshold, score >= threshold)

    def rounded(self) -> LabelScore:
        """Label for results: the score to six places."""
        return replace(self, score=round(self.score, 6))

    def as_json(self) -> dict[str, str | float | bool]:
        return asdict(self.rounded())


@dataclass(frozen=True, slots=True)
class AnomalyMap:
    """Anomaly map of an image: grey values (height, width), row by row, over the whole image as viewers show it.

    0 stands for ``lowest`` and 255 for ``highest``, on the model's own scale.
    """

    height: int
    width: int
    lowest: float
    highest: float
    values: bytes


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Measurement of an anomaly expert: its model's score, and the threshold for it.

    ``map``: None for good images, and for models without a map.
    """

    score: float
    threshold: float
    map: AnomalyMap | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """Image or text that its expert cannot take or finish; the rest of its batch is not affected."""

    reason: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """Answer of an expert for one image. ``label`` is NOTHING_FOUND and score 0 for a detector without a box.

    ``anomaly``: anomaly experts only; their ``score`` is the confidence in the label, 0.5 at the threshold.
    ``outputs``: one for each label, in order, if the expert is multilabel or tells all scores. ``label`` is the
    likeliest that holds, or ``otherwise`` with the confidence that none holds.
    """

    label: str
    score: float
    boxes: tuple[BoundingBox, ...] = ()
    anomaly: Anomaly | None = None
    outputs: tuple[LabelScore, ...] = ()
    otherwise: str = NOTHING_FOUND
