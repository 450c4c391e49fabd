"""Experts and routes of a line file as sections: types, defaults, descriptions, and rules within one expert.

The line file is checked completely, the disk is not; rules between experts are in ``problems``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    StrictBool,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from experts.architectures import known_architecture, served_variants
from experts.backends import LLM, family
from experts.document import suggestion
from experts.expert import (
    ANOMALY_LABELS,
    CONFIDENCE_MINIMUM,
    NOTHING_FOUND,
    ONE_LABEL,
    OVERLAP_MAXIMUM,
    Normalization,
    Parallelism,
    Task,
)
from experts.labels import moved
from experts.sections.inputs import InputSection
from experts.sections.values import ComponentType, ExpertId, FilePath, Section, Size

WEIGHTS_FILES = frozenset({".safetensors", ".onnx", ".json"})
PICKLES = frozenset({".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin"})
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


Labels = Annotated[
    list[str],
    Field(min_length=1),
    WrapValidator(_list_or_words, json_schema_input_type=list[str] | dict[str, str]),
]  # a dict where the line has other words than the file
DetectorName = Literal[
    "yolov8", "yolov5", "yolo-end2end", "yolo-batched", "yolox", "yolox-decoded", "mmdeploy", "rtdetr-ultralytics",
    "rtdetr", "rfdetr", "torchvision",
]  # fmt: skip  # rows of experts.backends.onnx.decoders


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
        description="weights, .safetensors or .onnx; of llm a .gguf or a Hugging Face directory; relative to this file"
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
    shadow: ExpertId | None = Field(
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
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"] | None = Field(
        None,
        description="llm: auto (what the device profile found, whatever the line's is), fp32, bf16, fp16, or int8 or "
        "int4 (weights only, for few rows); default: as the line says",
    )
    moe_cache: Size | None = Field(
        None,
        description="llm: memory for the experts inside it, which come and go when they take more; default: all stay "
        "where they fit",
    )
    adapter: FilePath | None = Field(
        None,
        description="llm: folder of a LoRA adapter over `weights` (adapter_config.json and adapter_model.safetensors, "
        "as PEFT saves them); experts of one `weights` hold it once; default none",
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
        for key in ("precision", "moe_cache", "parallel", "adapter"):
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
                f"weights of llm are a Hugging Face directory or a .gguf file, not a {suffix} file - name the folder "
                "that holds config.json and model.safetensors"
            )
        for key in OF_IMAGES:
            if key in self.model_fields_set and getattr(self, key) is not None:
                raise ValueError(f"{key} is for images, and llm takes texts - remove it")
        if self.parallel is not None:
            if self.parallel.degrees.ranks == 1:
                raise ValueError("parallel names a single process - give expert, tensor or data, or remove it")
            if self.moe_cache is not None or self.precision in {"int8", "int4"}:
                raise ValueError("parallel takes neither moe_cache nor precision int8 or int4 - remove one of them")
            if self.adapter is not None:
                raise ValueError("parallel takes no adapter - remove one of them, or merge the adapter into its model")
        return self


class StepSection(Section):
    """Step of a route: one expert."""

    expert: str = Field(description="id of an expert above")
    passing: list[str] = Field(
        alias="pass", min_length=1, description="labels that let the route go on; any other label is NG; at least one"
    )
    min_score: float = Field(0.0, strict=True, ge=0.0, le=1.0, description="a lower score is NG; 0 to 1, default 0")


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


def is_llm(section: ExpertSection) -> bool:
    return family(section.architecture) == LLM
