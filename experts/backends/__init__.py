"""The registry of backends, by architecture. Heavy runtimes are imported inside the factory only."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from experts.errors import BackendUnavailable, WeightsMismatch
from experts.expert import Orientation, Precision

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from experts.backends.base import Backend, Prepared
    from experts.calibrations import CallRanges
    from experts.expert import Expert
    from experts.images import Decoded

DETECTOR_PREFIXES = ("yolo", "rtdetr")
STORED_IN = {"bfloat16": Precision.BF16, "float16": Precision.FP16}  # as torch calls them
LLM = "llm"  # language models of any architecture that their config.json names
GRAPH_FAMILIES = frozenset({"onnx", "fake"})  # the owner's graph decides how an expert runs: it has one form


def family(architecture: str) -> str:
    """Name of an architecture's backend: "fake", "onnx", "llm", "detector" or "classifier"."""
    if architecture in {"fake", "onnx", LLM}:
        return architecture
    return "detector" if architecture.startswith(DETECTOR_PREFIXES) else "classifier"


def backend_for(architecture: str) -> Backend:
    """Backend of an architecture. Raises BackendUnavailable, naming the import that failed."""
    try:
        return _build(family(architecture))
    except ImportError as error:
        raise BackendUnavailable(architecture, f"its runtime cannot be imported: {error}") from error


def own_precision(expert: Expert, processor: str) -> Precision:
    """Language models run as stored, all others in fp32. Where 16 bits are emulated, they are slower than fp32."""
    if family(expert.architecture) != LLM:
        return Precision.FP32
    from experts.llm.files.config import stored_dtype

    own = STORED_IN.get(stored_dtype(expert.weights) or "", Precision.FP32)
    if own is Precision.FP32:
        return own
    from experts.backends.capabilities import capabilities_of

    return own if own in capabilities_of(processor).multiplied else Precision.FP32


def observed_ranges(
    expert: Expert, form: Precision, batches: Iterable[Tensor]
) -> Mapping[str, Mapping[str, CallRanges]]:
    """One form's ranges of a calibration. ``batches``: float32 (n, 3, height, width).

    Raises as packing, and WeightsMismatch without such a form.
    """
    from experts.backends.forms import form_of
    from experts.backends.torch_backend import TorchBackend

    backend = backend_for(expert.architecture)
    if not isinstance(backend, TorchBackend):
        raise WeightsMismatch(expert.id, f"{expert.architecture} has no form of eight bits")
    found = form_of(form)
    return {found.name_here: found.observed(backend, expert, batches)}


def prepare(expert: Expert, image: Decoded) -> Prepared:
    """Prepare an image for its expert, as the agent does; its scales map back to the file's pixels."""
    from experts.images import SWAPPED, UPRIGHT

    pixels = image.seen_by(expert)
    left_to_turn = UPRIGHT if expert.pixels.orientation is Orientation.EXIF else image.orientation
    prepared = replace(backend_for(expert.architecture).prepare(expert, pixels), orientation=left_to_turn)
    if image.reduction == 1:
        return prepared
    height, width = pixels.shape[:2]
    is_swapped = left_to_turn < SWAPPED <= image.orientation
    full_height, full_width = (image.width, image.height) if is_swapped else (image.height, image.width)
    return replace(
        prepared,
        image_height=full_height,
        image_width=full_width,
        scale_x=prepared.scale_x * width / full_width,
        scale_y=prepared.scale_y * height / full_height,
    )


@cache
def _build(name: str) -> Backend:
    if name == "fake":
        from experts.backends.fake import FakeBackend

        return FakeBackend()
    if name == "onnx":
        from experts.backends.onnx.backend import OnnxBackend

        return OnnxBackend()
    if name == LLM:
        from experts.backends.llm import LlmBackend

        return LlmBackend()
    if name == "detector":
        from experts.backends.vision.detector import DetectorBackend

        return DetectorBackend()
    from experts.backends.vision.classifier import ClassifierBackend

    return ClassifierBackend()
