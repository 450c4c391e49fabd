"""The catalog: a line's experts and routes as read from YAML, validated and hashed.

The line file is checked completely, the disk is not: missing or broken weights quarantine their expert at run time and
leave the others serving. An ONNX file is opened once: its preprocessing facts are cached beside packed weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)  # fmt: skip
from pydantic_core import PydanticKnownError

from experts.architectures import known_architecture, served_variants
from experts.backends import LLM, family
from experts.document import Document, suggestion
from experts.errors import ConfigError, ExpertError
from experts.expert import (
    ANOMALY_LABELS,
    CONFIDENCE_MINIMUM,
    NAMED,
    NOTHING_FOUND,
    ONE_LABEL,
    OVERLAP_MAXIMUM,
    RESAMPLERS,
    Expert,
    Fit,
    InputSpec,
    Normalization,
    Orientation,
    Padding,
    Parallelism,
    Precision,
    Task,
    named_normalization,
)
from experts.graph import ExpertGraph, RouteStep, find_cycle
from experts.labels import moved
from experts.packed.image_facts import KeptImageFacts
from experts.sizes import SIZE, size_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from experts.graph import TextRoute

WEIGHTS_FILES = frozenset({".safetensors", ".onnx", ".gguf", ".json"})
NO_TEXTS: Mapping[str, TextRoute] = MappingProxyType({})
PICKLES = frozenset({".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin"})
AUTOMATIC = "auto"  # of a language model's precision
DETECTOR_STRIDE_PX = 32
OF_IMAGES = (
    "check",
    "confidence",
    "detector",
    "input",
    "iou",
    "nothing_found",
    "otherwise",
    "stem",
    "suppression",
    "task",
    "threshold",
    "threshold_of",
    "thresholds",
    "variant",
)
LARGEST_SIDE_PX = 8192

EXPERT_ID = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
ADDRESS = re.compile(r"\\\\|//|[\w.+-]+:[/\\]|[A-Za-z]:$")  # \\\\NAS\X, //nas/x, smb://nas/x, nas:/x, D:\X, D:
MOUNT = (
    "mount it, for a share of Windows or a NAS with a line of /etc/fstab such as `//NAS/SHARE /mnt/SHARE cifs "
    "credentials=FILE,uid=coserve,_netdev 0 0`, and write the mount point: /mnt/SHARE"
)
COMPONENT = re.compile(r"\w[\w.+-]*")  # letters of any script; valid in file names, metrics and addresses


def _expert_id(text: str) -> str:
    if not EXPERT_ID.fullmatch(text) or ".." in text:
        raise ValueError(f"{text!r} is not an expert id - write kind/name from letters, digits, `_`, `.` and `-`")
    return text


def _component(text: str) -> str:
    if not COMPONENT.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a component type that a file name or an address can carry - "
            "use letters, digits, `_`, `.`, `+` and `-`, a letter or digit first"
        )
    return text


def _list_or_words(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """A list, or a mapping of the file's labels to the line's, whose words are validated as a list."""
    if isinstance(value, dict):
        return dict(zip(value, validate(list(value.values())), strict=True))
    return validate(value)


def _labels(given: list[str] | dict[str, str] | None) -> list[str] | dict[str, str] | None:
    if given is None:
        return None
    labels = list(given.values()) if isinstance(given, dict) else given
    if isinstance(given, dict) and (wrong := moved(labels, list(given))):
        raise ValueError(f"{wrong[0]!r} is the word for another label of the file - give each its own meaning")
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"{twice[0]!r} is there twice - an expert's labels are distinct, in the order of its outputs")
    if "" in labels or NOTHING_FOUND in labels:
        raise ValueError(f"a label is neither empty nor {NOTHING_FOUND!r} - rename it")
    return given


def path_of_this_box(path: object) -> object:
    """Raises ValueError for an address of a share or a path of Windows: here it would be an odd name of a new folder.

    No message repeats an address: it may contain a password.
    """
    if path == "":
        raise ValueError("an empty path - name a file or folder, relative to this file")
    if not isinstance(path, str):
        return path
    if path.startswith("file:"):
        raise ValueError("an address, no path - leave out file://")
    if ADDRESS.match(path):
        raise ValueError(f"an address of a share, or of a Windows disk, is no path of this box - {MOUNT}")
    if "\\" in path:
        raise ValueError(f"{path!r} has the backslashes of Windows - write {path.replace(chr(92), '/')!r}")
    return path


def _in_folder(path: Path, info: ValidationInfo) -> Path:
    folder: Path = info.context["folder"] if info.context else Path()
    return (folder / path.expanduser()).absolute()


def _size(value: object) -> int:
    bytes_ = size_bytes(str(value))
    if bytes_ < 1:
        raise ValueError(f"{value!r} is nothing at all - write a size such as 4GiB")
    return bytes_


FilePath = Annotated[
    Path, BeforeValidator(path_of_this_box), AfterValidator(_in_folder)
]  # relative to the file naming it
Size = Annotated[int, BeforeValidator(_size), WithJsonSchema({"type": "string", "pattern": f"^{SIZE.pattern}$"})]
Labels = Annotated[
    list[str],
    Field(min_length=1),
    WrapValidator(_list_or_words, json_schema_input_type=list[str] | dict[str, str]),
]  # a dict where the line has other words than the file
Sample = Annotated[int, Field(strict=True, ge=0, le=0xFFFF)]
Pixels = Annotated[int, Field(strict=True, ge=1, le=LARGEST_SIDE_PX)]
DetectorName = Literal[
    "yolov8", "yolov5", "yolo-end2end", "yolo-batched", "yolox", "yolox-decoded", "mmdeploy", "rtdetr-ultralytics",
    "rtdetr", "rfdetr", "torchvision",
]  # fmt: skip  # rows of experts.backends.onnx.decoders
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Channel = Annotated[int, Field(strict=True, ge=0, le=255)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Mapping of a line file: frozen; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False)


class NormalizeSection(Section):
    """Normalisation of pixels: minus the mean, divided by the standard deviation, per channel."""

    mean: tuple[Number, Number, Number] = Field(description="three numbers, one for each channel")
    std: tuple[Positive, Positive, Positive] = Field(description="three numbers over 0, one for each channel")
    scale: Literal[1, 255] = Field(1, description="mean and std are of pixels from 0 to 1 or from 0 to 255; default 1")
    channels: Literal["rgb", "bgr", "grey"] = Field(
        "rgb",
        description="order in which the model takes the channels, mean and std; grey: of a grey image, in one or "
        "three; default rgb",
    )

    @model_validator(mode="after")
    def _consistent(self) -> NormalizeSection:
        if not all(0 <= each <= self.scale for each in self.mean):
            advice = "write `scale: 255` beside it, or correct it" if self.scale == 1 else "correct it"
            raise ValueError(f"mean {list(self.mean)} is not of pixels from 0 to {self.scale} - {advice}")
        return self


def _by_name(value: object) -> object:
    if isinstance(value, str):
        if value not in NAMED:
            raise ValueError(f"{value!r} is no name - write imagenet, unit, or {{mean: [...], std: [...]}}")
        return {"mean": NAMED[value].mean, "std": NAMED[value].std}
    return value


def _side_or_sides(value: object) -> object:
    sides = value if isinstance(value, list) and len(value) == 2 else [value]
    if value is not None and not all(type(side) is int and 1 <= side <= LARGEST_SIDE_PX for side in sides):
        raise ValueError(f"{value!r} is neither pixels nor [height, width] - write 1 to {LARGEST_SIDE_PX}")
    return value


class FitSection(Section):
    """Scaling of an image: stretched without `resize` and `pad`, else cut from its middle, or padded."""

    resize: Annotated[int | tuple[int, int] | None, BeforeValidator(_side_or_sides)] = Field(
        None,
        description="length of the shorter side before the cut, or [height, width]; not less than the size; default: "
        "not cut, the whole image is stretched to the size",
    )
    crop: Annotated[int | tuple[int, int] | None, BeforeValidator(_side_or_sides)] = Field(
        None, description="what is cut from the middle: as `size` says; default that"
    )
    pad: Literal["center", "top-left", "right"] | None = Field(
        None,
        description="instead of resize: the whole image in its proportions, placed center, top-left, or, padded on the "
        "right alone, right; default: not padded",
    )
    color: Channel | tuple[Channel, Channel, Channel] | Literal["mean"] = Field(
        0, description="of the padding: 0 to 255, [red, green, blue], or mean (0 once normalised); default 0"
    )
    rounding: Literal["nearest", "down", "up", "longer-nearest"] | None = Field(
        None,
        description="of the cut's place where half a pixel is left, and of a padded image's size; longer-nearest: "
        "down, and the longer side of the scaled image to the nearest pixel; default nearest",
    )
    interpolation: Literal[RESAMPLERS] = Field(  # type: ignore[valid-type]
        "bilinear",
        description="how pixels are scaled: Pillow's nearest, box, bilinear, hamming, bicubic or lanczos, or the "
        "function of another library, such as opencv-linear or torch-bilinear; default bilinear",
    )

    @model_validator(mode="after")
    def _consistent(self) -> FitSection:
        if self.pad is None and "color" in self.model_fields_set:
            raise ValueError("color is of the padding - write `pad:` beside it, or remove it")
        if self.pad is not None and (self.resize or self.crop):
            raise ValueError("an image is either cut or padded - remove `pad`, or `resize` and `crop`")
        if self.resize is None and self.crop is not None:
            raise ValueError("crop is cut from a scaled image - write `resize:` beside it, or remove it")
        return self

    @property
    def sides(self) -> tuple[int, int] | None:
        return None if self.resize is None else _sides(self.resize)

    def applied(self, spec: InputSpec) -> InputSpec:
        spec = replace(spec, interpolation=self.interpolation, rounding=self.rounding)
        if self.pad is not None:
            return replace(spec, fit=Fit.PADDED, padding=Padding(self.pad, self.color))
        return spec if self.resize is None else replace(spec, fit=Fit.CROPPED, resize=self.resize)


class PreparationSection(Section):
    """Preparation of an image's pixels for an expert."""

    normalize: (
        Annotated[
            NormalizeSection,
            BeforeValidator(_by_name, json_schema_input_type=Literal["imagenet", "unit"] | NormalizeSection),
        ]
        | None
    ) = Field(
        None,
        description="imagenet (torchvision's mean and deviation), unit (0 to 1) or {mean: [...], std: [...]}; default: "
        "unit for detectors, else imagenet",
    )
    fit: Annotated[
        FitSection | None,
        BeforeValidator(
            lambda value: None if value == Fit.STRETCHED else value,
            json_schema_input_type=Literal["stretched"] | FitSection | None,
        ),
    ] = Field(
        None,
        description="{resize: 256, crop: 224, interpolation: bicubic} cuts the middle of the scaled image; {pad: "
        "center} keeps its proportions; default: as a detector's graph implies, else stretched: the whole image, "
        "proportions not kept; not of ultralytics' weights",
    )


class InputSection(PreparationSection):
    """Input of an expert: size and preparation."""

    size: tuple[Pixels, Pixels] = Field(description="[height, width] in pixels, 1 to 8192; detectors: multiples of 32")
    orientation: Orientation | None = Field(
        None,
        description="stored (as the file has its pixels) or exif (turned as its EXIF entry says); default: as the "
        "trainer's loader does, exif for models of ultralytics', else stored",
    )

    bits: Annotated[int, Field(strict=True, ge=9, le=16)] | None = Field(
        None,
        description="of images of more than 8 bits: the bits that their values have, 9 to 16; the upper 8 count; "
        "default: as the file states, else it is refused",
    )
    window: tuple[Sample, Sample] | None = Field(
        None,
        description="of images of more than 8 bits: [low, high], the values that become 0 and 255; values beyond are "
        "cut; default: see bits",
    )

    @property
    def named(self) -> str | Normalization | None:
        return None if self.normalize is None else named_normalization(Normalization(**dict(self.normalize)))

    @model_validator(mode="after")
    def _consistent(self) -> InputSection:
        if self.window is not None and self.bits is not None:
            raise ValueError("bits and window both say what becomes 0 to 255 - remove one of them")
        if self.window is not None and self.window[0] >= self.window[1]:
            raise ValueError(f"window {list(self.window)} is empty - write [low, high], the lower value first")
        if self.fit is None:
            return self
        crop, resize, size = self.fit.crop, self.fit.resize, self.size
        if crop is not None and _sides(crop) != size:
            raise ValueError(f"fit.crop {crop} is not the size {list(size)} - make them the same")
        pairs = [(resize, min(size))] if isinstance(resize, int) else zip(resize or size, size, strict=True)
        if any(scaled < seen for scaled, seen in pairs):
            raise ValueError(f"fit.resize {resize} is less than the size {list(size)} - raise it")
        return self


def _sides(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _for_images(value: object, info: ValidationInfo) -> object:
    if value is None and family(info.data.get("architecture", LLM)) != LLM:
        raise PydanticKnownError("missing")
    return value


def _labels_of_images(labels: list[str] | dict[str, str] | None, info: ValidationInfo) -> object:
    """Labels, with the default of anomaly experts."""
    if isinstance(labels, dict) and (info.data.get("task") == Task.ANOMALY or info.data.get("architecture") == LLM):
        raise ValueError("words for the labels of a file are for classifiers and detectors - write a list")
    if labels is None and info.data.get("task") == Task.ANOMALY:
        return list(ANOMALY_LABELS)
    return _for_images(labels, info)


class ParallelSection(Section):
    """Processes that run one language model together."""

    expert: int = Field(1, strict=True, ge=1, le=1024, description="parts among which the experts inside it are shared")
    tensor: int = Field(1, strict=True, ge=1, le=64, description="slices of each matrix; must divide its heads")
    data: int = Field(1, strict=True, ge=1, le=64, description="copies of all that, for more texts at once")
    slices: StrictBool = Field(
        False, description="true: cut each expert inside it over the tensor slices, instead of sharing them out whole"
    )

    @property
    def degrees(self) -> Parallelism:
        return Parallelism(self.data, self.expert, self.tensor, slices_experts=self.slices)


class ExpertSection(Section):
    """Expert of a line: architecture, weights, and for images labels and input."""

    architecture: Annotated[str, AfterValidator(known_architecture)] = Field(
        description="a torchvision classifier (resnet18), an ultralytics detector (yolov5m), onnx, or llm"
    )
    weights: FilePath = Field(
        description="weights file, .safetensors or .onnx, of llm a Hugging Face directory; relative to this file"
    )
    task: Literal["anomaly", "multilabel"] | None = Field(
        None,
        description="multilabel = its labels do not exclude one another (trained with binary cross entropy, or one "
        "output): a sigmoid and a threshold for each; of onnx also anomaly = it gives a score or a map of what is "
        "strange; default: one of its labels is the answer",
    )
    labels: Annotated[Labels | None, AfterValidator(_labels), AfterValidator(_labels_of_images)] = Field(
        None,
        validate_default=True,
        description="what the outputs mean, in their order: distinct words, at least one; of task anomaly the good one "
        "and the other, default [ok, anomalous]; of llm what a router may answer, by default nothing; where the "
        "file's own labels are other words, {good: ok, bad: ng}: the file's, in its order, and the line's",
    )
    threshold: float | None = Field(
        None,
        strict=True,
        allow_inf_nan=False,
        description="of task anomaly: the score from which an image is anomalous; default none, and nothing is judged "
        "until `coserve experts threshold` has found one",
    )
    threshold_of: str | None = Field(
        None,
        pattern="^[0-9a-f]{16}$",
        description="which weights and input the threshold was learned with, as `coserve experts threshold` writes it: "
        "with others every image is UNKNOWN; default none: the threshold counts for any weights",
    )
    otherwise: str | None = Field(
        None,
        min_length=1,
        description="of task multilabel: what an image is called of which no label holds, such as ok where labels are "
        "defects; default nothing-found, which never passes",
    )
    thresholds: dict[str, Annotated[float, Field(strict=True, gt=0, lt=1)]] = Field(
        {}, description="of task multilabel: label -> the probability from which it holds, between 0 and 1; default 0.5"
    )
    confidence: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        CONFIDENCE_MINIMUM, description="detectors: boxes count whose score is higher, 0 to 1; default 0.25"
    )
    iou: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(
        OVERLAP_MAXIMUM,
        description="detectors: of two boxes of a label that overlap more, the better counts (intersection over "
        "union), 0 to 1; default 0.45; where a graph suppresses its boxes itself, it has no effect",
    )
    suppression: Literal["all"] | None = Field(
        None,
        description="detectors: all = of two boxes that overlap more than iou the better counts, whatever their labels "
        "(OpenCV's NMSBoxes, ultralytics' agnostic_nms); default: of two boxes of a label",
    )
    nothing_found: Literal["pass"] | None = Field(
        None,
        description="detectors whose labels are all defects: pass = an image without a box is good; its verdicts are "
        "UNKNOWN until it is proven on images with and without defects; default: nothing-found is NG",
    )
    detector: DetectorName | None = Field(
        None,
        description="of onnx: which exporter's boxes the graph answers with; default: as the file itself shows",
    )
    input: Annotated[InputSection | None, AfterValidator(_for_images)] = Field(
        None,
        validate_default=True,
        description="the pixels it wants: {size: [height, width], normalize: imagenet}; not of llm",
    )
    check: FilePath | None = Field(
        None,
        description="folder of images with its trainer's own answers, as `coserve experts add --check` keeps them: "
        "`coserve experts verify` and golden compare it with them; default none, and it is unproven",
    )
    pin: StrictBool = Field(False, description="true: never evicted from memory; default false")
    shadow: Annotated[str, AfterValidator(_expert_id)] | None = Field(
        None,
        description="another version of it, which runs on the same images when there is time, decides nothing and is "
        "compared: id of an expert on no route, with the same labels; default none",
    )
    stem: Literal["3x3"] | None = Field(
        None,
        description='classifiers for crops of about 64 px: "3x3" = first convolution 3x3, stride 1; default: as built',
    )
    variant: Literal["no-maxpool", "transform-input"] | None = Field(
        None,
        description="classifiers whose weights are those of the architecture, and whose computation is not: no-maxpool "
        "(a ResNet without its maxpool) or transform-input (a GoogLeNet or Inception made with weights=, which scales "
        "its input itself); default: as built",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8"] | None = Field(
        None,
        description="llm: auto (what the device profile found, whatever the line's is), fp32, bf16, fp16, or int8 "
        "(weights only, for few rows); default: as the line says",
    )
    moe_cache: Size | None = Field(
        None,
        description="llm: memory for the experts inside it, which come and go when they take more; default: all stay "
        "where they fit",
    )
    parallel: ParallelSection | None = Field(
        None,
        description="llm: run by processes of its own, which share its weights: {expert: 4, tensor: 2}; default: by "
        "the agent",
    )

    @property
    def words(self) -> list[str] | None:
        given: object = self.labels
        return list(given.values()) if isinstance(given, dict) else self.labels

    @property
    def names(self) -> tuple[str, ...] | None:
        """The file's labels where the line maps them."""
        given: object = self.labels
        return tuple(given) if isinstance(given, dict) else None

    @model_validator(mode="after")
    def _consistent(self) -> ExpertSection:
        kind = family(self.architecture)
        if kind == LLM:
            return self._consistent_llm()
        suffix = self.weights.suffix.lower()
        if suffix in PICKLES:
            raise ValueError(f"weights {suffix} are a pickle - convert them once with `coserve experts import`")
        wanted = ".onnx" if kind == "onnx" else ".safetensors"
        if kind != "fake" and suffix != wanted:
            found = suffix or "without suffix"
            raise ValueError(f"weights of {self.architecture} must be a {wanted} file, not {found}")
        self._consistent_labels(kind)
        if kind != "detector" and (kind != "onnx" or self.task):
            for key in sorted(self.model_fields_set & {"confidence", "iou", "nothing_found", "suppression"}):
                raise ValueError(f"{key} is for detectors - remove it")
        if self.detector is not None and (kind != "onnx" or self.task):
            raise ValueError("detector is for onnx graphs that answer with boxes - remove it")
        if self.threshold is not None and self.task != "anomaly":
            raise ValueError("threshold is for task anomaly - write `task: anomaly` beside it, or remove it")
        if self.threshold_of is not None and self.threshold is None:
            raise ValueError("threshold_of says what a threshold was learned with - write `threshold:`, or remove it")
        if self.task == "anomaly" and len(self.words or ()) != len(ANOMALY_LABELS):
            raise ValueError(f"labels of task anomaly are two, good and anomalous, not {self.words} - correct them")
        if self.stem and kind != "classifier":
            raise ValueError(f"stem is for classifiers, not for {self.architecture} - remove it")
        if self.variant not in {None, *served_variants(self.architecture)}:
            raise ValueError(f"{self.architecture} has no variant {self.variant} - remove it")
        for key in ("precision", "moe_cache", "parallel"):
            if getattr(self, key) is not None:
                raise ValueError(f"{key} is for llm, not for {self.architecture} - remove it")
        if self.input is not None:
            self._consistent_input(kind, self.input)
        return self

    def _consistent_input(self, kind: str, wanted: InputSection) -> None:
        if self.task == "anomaly" and wanted.fit and (wanted.fit.pad or wanted.fit.sides not in {None, wanted.size}):
            raise ValueError(
                "fit is not for task anomaly, whose map lies over the whole image - remove it, but for `interpolation`"
            )
        if kind != "detector":
            return
        if wanted.fit or isinstance(wanted.named, Normalization):
            images = f"images of {self.architecture} are letterboxed, and pixels 0 to 1"
            raise ValueError(f"{images} - remove `fit` and `normalize`")
        if any(side % DETECTOR_STRIDE_PX for side in wanted.size):
            raise ValueError(f"a detector's input size must be multiples of 32, not {list(wanted.size)} - change it")

    def _consistent_labels(self, kind: str) -> None:
        if self.task and kind != "onnx" and (kind, self.task) != ("classifier", "multilabel"):
            served = "onnx" if self.task == "anomaly" else "classifiers"
            raise ValueError(f"task {self.task} is for {served}, not for {self.architecture} - remove it")
        labels = self.words or ()
        if kind == "classifier" and not self.task and len(labels) == 1:
            raise ValueError(ONE_LABEL)
        if self.task != "multilabel":
            for key in sorted(self.model_fields_set & {"otherwise", "thresholds"}):
                raise ValueError(f"{key} is for task multilabel - write `task: multilabel` beside it, or remove it")
        if self.otherwise in {*labels, NOTHING_FOUND}:
            raise ValueError(f"otherwise is {self.otherwise!r}, which is a label already - write another word")
        for label in self.thresholds.keys() - {*labels}:
            raise ValueError(f"thresholds: there is no label {label!r} - {suggestion(label, labels)}")

    def _consistent_llm(self) -> ExpertSection:
        suffix = self.weights.suffix.lower()
        if suffix in WEIGHTS_FILES | PICKLES:
            raise ValueError(
                f"weights of llm are a Hugging Face directory, not a {suffix} file - name the folder that holds "
                "config.json and model.safetensors"
            )
        for key in OF_IMAGES:
            if key in self.model_fields_set and getattr(self, key) is not None:
                raise ValueError(f"{key} is for images, and llm takes texts - remove it")
        if self.parallel is not None:
            if self.parallel.degrees.ranks == 1:
                raise ValueError("parallel names a single process - give expert, tensor or data, or remove it")
            if self.moe_cache is not None or self.precision == "int8":
                raise ValueError("parallel takes neither moe_cache nor precision int8 - remove one of them")
        return self


class StepSection(Section):
    """Step of a route: one expert."""

    expert: str = Field(description="id of an expert above")
    passing: list[str] = Field(
        alias="pass", min_length=1, description="labels that let the route go on; any other label is NG; at least one"
    )
    min_score: float = Field(0.0, strict=True, ge=0.0, le=1.0, description="a lower score is NG; 0 to 1, default 0")


ExpertId = Annotated[str, AfterValidator(_expert_id)]
ComponentType = Annotated[str, AfterValidator(_component)]
Steps = Annotated[list[StepSection], Field(min_length=1)]


class CatalogSections(Section):
    """`experts:` and `routes:` of a line file."""

    experts: dict[ExpertId, ExpertSection] = Field(
        min_length=1, description="expert models by id, kind/name; at least one"
    )
    routes: dict[ComponentType, Steps] = Field(
        {},
        description="component type -> its experts in order; the first is the preliminary one; at least one where "
        "experts take images",
    )


@dataclass(frozen=True, slots=True)
class Catalog:
    """The experts and routes of one line. ``sha256`` is that of the whole file's bytes.

    ``graph`` has the routes of images, and those of texts that ask a router.
    """

    experts: Mapping[str, Expert]
    graph: ExpertGraph
    sha256: str
    texts: Mapping[str, TextRoute] = field(default_factory=dict)

    @property
    def components(self) -> Mapping[str, tuple[RouteStep, ...]]:
        return {name: steps for name, steps in self.graph.routes.items() if name not in self.texts}


def build_catalog(
    sections: CatalogSections, document: Document, texts: Mapping[str, TextRoute] = NO_TEXTS, packed: Path | None = None
) -> Catalog:
    """Catalog of sections without ``catalog_problems``.

    ``texts``: routes of texts, by name. ``packed``: folder of packed weights, with cached facts of ONNX files.
    """
    facts = KeptImageFacts(packed)
    experts = {name: _expert(name, section, facts) for name, section in sections.experts.items()}
    routes = {
        component: tuple(_step(step, sections.experts[step.expert]) for step in steps)
        for component, steps in sections.routes.items()
    }
    routes |= {name: route.steps for name, route in texts.items() if route.steps}
    shadows = {name: section.shadow for name, section in sections.experts.items() if section.shadow is not None}
    graph = ExpertGraph(experts, routes, shadows)
    return Catalog(MappingProxyType(experts), graph, document.sha256, MappingProxyType({**texts}))


def _step(step: StepSection, expert: ExpertSection) -> RouteStep:
    passing = {*step.passing} | ({NOTHING_FOUND} if expert.nothing_found else set())
    return RouteStep(step.expert, frozenset(passing), step.min_score)


def catalog_problems(sections: CatalogSections, document: Document) -> Iterator[ConfigError]:
    """Problems between keys: routes of images against experts, shadows, and dependencies in a circle.

    A router of texts always comes first, so routes of texts form no circle.
    """
    if not sections.routes and any(not is_llm(section) for section in sections.experts.values()):
        meaning = CatalogSections.model_fields["routes"].description
        yield document.error(f"is missing - {meaning}", "routes")
    for component, steps in sections.routes.items():
        yield from _route_problems(component, steps, sections, document)
    yield from _shadow_problems(sections, document)
    yield from _cycle_problems(sections, document)


def is_llm(section: ExpertSection) -> bool:
    return family(section.architecture) == LLM


def expert_of(name: str, entry: Mapping[str, object], folder: Path) -> Expert:
    """An expert of one entry, without its line. Raises ValueError for values that no entry has."""
    section = ExpertSection.model_validate(entry, context={"folder": folder})
    return _expert(name, section, KeptImageFacts(None))


def _expert(name: str, section: ExpertSection, facts: KeptImageFacts) -> Expert:
    as_given = (
        "architecture",
        "weights",
        "pin",
        "stem",
        "variant",
        "threshold",
        "threshold_of",
        "confidence",
        "iou",
        "suppression",
        "check",
        "detector",
        "nothing_found",
    )
    expert = Expert(
        id=name,
        labels=tuple(section.words or ()),
        names=section.names,
        input=None if section.input is None else input_spec(section.input, section.architecture),
        precision=None if section.precision in {None, AUTOMATIC} else Precision(section.precision),
        is_automatic=section.precision == AUTOMATIC,
        moe_cache_bytes=section.moe_cache,
        parallel=None if section.parallel is None else section.parallel.degrees,
        task=None if section.task is None else Task(section.task),
        thresholds=tuple(sorted(section.thresholds.items())),
        otherwise=section.otherwise or NOTHING_FOUND,
        **{key: getattr(section, key) for key in as_given},
    )
    return _fitted(expert, section, facts) if section.architecture == "onnx" and section.task is None else expert


def _fitted(expert: Expert, section: ExpertSection, facts: KeptImageFacts) -> Expert:
    """Apply the exporter's preprocessing; packing and ``config check`` report a broken file."""
    try:
        found = facts.of(expert)
        pixels = found.applied(expert.pixels)
    except ExpertError:
        return expert
    given = section.input
    if given is not None and given.normalize is None and (own := found.normalize) is not None:
        pixels = replace(pixels, normalize=own)
    if given is not None and given.fit is None and found.prepared:
        pixels = FitSection.model_validate(dict(found.prepared)).applied(pixels)
    if given is not None and given.orientation is not None:
        pixels = replace(pixels, orientation=given.orientation)
    return replace(expert, input=pixels)


def input_spec(section: InputSection, architecture: str) -> InputSpec:
    """Input of an expert; ultralytics' loader applies EXIF orientation to a detector's images."""
    is_detector = family(architecture) == "detector"
    normalize, orientation = ("unit", Orientation.EXIF) if is_detector else ("imagenet", Orientation.STORED)
    spec = InputSpec(
        *section.size, section.named or normalize, orientation=section.orientation or orientation, bits=section.bits,
        window=section.window,
    )  # fmt: skip
    return spec if section.fit is None else section.fit.applied(spec)


def _route_problems(
    component: str, steps: list[StepSection], sections: CatalogSections, document: Document
) -> Iterator[ConfigError]:
    first_steps: dict[str, int] = {}
    for index, step in enumerate(steps):
        where = ("routes", component, index)
        expert = sections.experts.get(step.expert)
        if expert is None:
            hint = suggestion(step.expert, sections.experts, "add it under `experts`")
            yield document.error(f"no expert {step.expert!r} - {hint}", *where, "expert")
            continue
        if step.expert in first_steps:
            again = f"{step.expert} is already step {first_steps[step.expert] + 1} of this route - remove one"
            yield document.error(again, *where, "expert")
        if is_llm(expert):
            yield document.error(f"{step.expert} takes texts, not images - name it in texts.routes", *where, "expert")
            continue
        first_steps.setdefault(step.expert, index)
        if expert.nothing_found and step.min_score > 0:
            told = f"{step.expert} passes what has no box, and so no score - remove min_score"
            yield document.error(told, *where, "min_score")
        for label in step.passing:
            may_find = family(expert.architecture) == "detector" or (expert.architecture == "onnx" and not expert.task)
            if label == NOTHING_FOUND and may_find:
                if not expert.nothing_found:
                    told = f"{NOTHING_FOUND} passes only by `nothing_found: pass` of {step.expert} - write it there"
                    yield document.error(told, *where, "pass")
            elif label not in (labels := [*(expert.words or ()), *([expert.otherwise] if expert.otherwise else ())]):
                hint = suggestion(label, labels)
                yield document.error(f"{step.expert} has no label {label!r} - {hint}", *where, "pass")


def _shadow_problems(sections: CatalogSections, document: Document) -> Iterator[ConfigError]:
    asked = {step.expert: component for component, steps in sections.routes.items() for step in steps}
    first: dict[str, str] = {}
    for name, section in sections.experts.items():
        if section.shadow is None:
            continue
        reason = _wrong_with_shadow(name, section, section.shadow, sections.experts)
        if reason is None and section.shadow in asked:
            reason = f"{section.shadow} is on route {asked[section.shadow]} - a shadow decides nothing: take it off"
        if reason is None and section.shadow in first:
            reason = f"{section.shadow} is the shadow of {first[section.shadow]} already - remove one"
        first.setdefault(section.shadow, name)
        if reason is not None:
            yield document.error(reason, "experts", name, "shadow")


def _wrong_with_shadow(
    name: str, section: ExpertSection, other: str, experts: Mapping[str, ExpertSection]
) -> str | None:
    """Reason why two experts cannot be compared on the same images."""
    shadow = experts.get(other)
    if shadow is None:
        return f"no expert {other!r} - {suggestion(other, experts, 'add it under `experts`')}"
    if other == name:
        return "an expert is not its own shadow - name another version of it"
    if is_llm(section) or is_llm(shadow):
        return "shadows are shown images, and llm takes texts - remove it"
    if shadow.shadow is not None:
        return f"{other} has a shadow itself - remove that one"
    if shadow.pin:
        return f"{other} is pinned, and nothing gives way to a shadow - remove its pin"
    if shadow.task != section.task:
        return f"{other} and {name} have different tasks - only the same task can be compared"
    if {*(shadow.words or ()), shadow.otherwise} != {*(section.words or ()), section.otherwise}:
        return f"{other} has the labels {shadow.words}, not {section.words} - only the same can be compared"
    return None


def _cycle_problems(sections: CatalogSections, document: Document) -> Iterator[ConfigError]:
    edges: dict[tuple[str, str], str] = {}
    preliminaries: dict[str, set[str]] = {}
    for component, steps in sections.routes.items():
        names = [step.expert for step in steps]
        if len(set(names)) < len(names):
            continue
        for before, after in pairwise(names):
            edges.setdefault((before, after), component)
            preliminaries.setdefault(after, set()).add(before)
    cycle = find_cycle(preliminaries)
    if not cycle:
        return
    turned = ((one, other) if (one, other) in edges else (other, one) for one, other in pairwise(cycle))
    routes = list(dict.fromkeys(edges[edge] for edge in turned))
    lines = ", ".join(f"{route} (line {document.place('routes', route).line})" for route in routes)
    found = f"experts depend on one another in a circle: {' -> '.join(cycle)}, by the routes {lines}"
    yield document.error(f"{found} - change the order in one", "routes", routes[0])
