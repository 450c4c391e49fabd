"""The contract of a backend: how one family of architectures is packed, bound to memory and run.

A backend is stateless; a skeleton is one module without memory of its own. ``bind`` makes its parameters views of
bytes that somebody else owns; after that, overwriting those bytes is a complete switch of expert: nothing is
constructed, converted or allocated. Numbers (thresholds, means) belong to the siblings, not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from torch import Tensor

    from experts.expert import Expert, Precision, Prediction


@dataclass(frozen=True, slots=True)
class Packable:
    """An expert's weights ready to be laid down: execution dtype, memory format in the strides.

    ``program`` is what a skeleton needs beside the tensors (ONNX: the graph without its weights), or is built for where
    the tensors do not show it; experts with equal programs and equal tensor tables share skeletons.
    ``stacks``: names of tensors with one first dimension in common, that of the moe_experts of a layer: they are laid
    so that what belongs to one of these can be read alone.
    """

    tensors: Mapping[str, Tensor]
    program: bytes = b""
    stacks: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """One image as its expert wants it: float32 (3, height, width) on the CPU, normalised.

    Scales and pads lead from the expert's pixels back to the image's: x = (x' - pad_left) / scale_x, and y alike. Whole
    pixels are filled, so the scales differ a little even where proportions are kept. ``orientation``: the EXIF
    orientation that was not applied, by which boxes and maps are turned.
    """

    tensor: Tensor
    image_height: int
    image_width: int
    scale_x: float = 1.0
    scale_y: float = 1.0
    pad_left: float = 0.0
    pad_top: float = 0.0
    orientation: int = 1  # upright


class Skeleton(Protocol):
    """One module, bound to memory that it does not own. Safe to run from several threads once bound."""

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the parameters these views. All names of the packed expert, on the skeleton's device."""

    def infer(self, expert: Expert, batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
        """One prediction per prepared image, in order. An empty batch is the caller's error: ValueError.

        Raises OutputInvalid where the expert answers, for any of the images, with something that is not a number or
        with more than can be judged.
        """


class Backend(Protocol):
    """One family of architectures (torchvision classifiers, YOLO detectors, ONNX graphs, the fake).

    ``precisions``: those it can pack for and run in; ``pack`` in another one is WeightsMismatch, never a silent fp32.
    """

    @property
    def precisions(self) -> frozenset[Precision]: ...

    def pack(self, expert: Expert, precision: Precision) -> Packable:
        """Read the expert's own weights file and convert it, offline.

        Raises WeightsMissing, WeightsCorrupt, WeightsRefused, or WeightsMismatch with the names that do not fit.
        """

    def template(self, expert: Expert, precision: Precision, program: bytes, device: str) -> object:
        """Whatever the skeletons of an expert's form are copies of, made now; to be held, and for nothing else.

        While it is held, ``skeleton`` copies and never constructs, for this form on this device and number of torch's
        threads. Raises like ``skeleton``.
        """

    def skeleton(self, expert: Expert, precision: Precision, program: bytes, device: str) -> Skeleton:
        """A new unbound skeleton; called rarely, then kept. ``device`` is a torch device string.

        Batches may run on other threads meanwhile, of any expert. Raises WeightsMismatch, BackendUnavailable.
        """

    def prepare(self, expert: Expert, image: np.ndarray) -> Prepared:
        """Scale and normalise one image: uint8 RGB (height, width, 3), of any size. Thread-safe."""

    def recipe(self, expert: Expert, precision: Precision) -> str:
        """What decides on packed bytes beside the expert and its file, such as a runtime's version; mostly nothing."""

    def workspace_bytes(self, expert: Expert, precision: Precision, batch_size: int) -> int:
        """An estimate, from shapes alone, of the memory one batch needs beside the weights; a profile overrides it.

        Of language models: that of one iteration of so many texts.
        """

    def token_bytes(self, expert: Expert, precision: Precision) -> int:
        """What each token of a text takes from when it is read until the text ends; 0 for experts of images.

        Raises what ``pack`` raises where the directory says nothing that is served.
        """
