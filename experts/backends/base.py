"""Contract of a backend, which packs one family of architectures, binds it to memory and runs it.

A backend is stateless; a skeleton is one module without memory of its own. ``bind`` makes its parameters views of
borrowed bytes. After that, overwriting those bytes is a complete switch of expert: nothing is constructed, converted
or allocated. Numbers (thresholds, means) belong to the implementations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from torch import Tensor

    from experts.expert import Expert, Precision, Prediction


@dataclass(frozen=True, slots=True)
class Packable:
    """An expert's weights ready to be written. Experts of equal programs and tensor tables share skeletons."""

    tensors: Mapping[str, Tensor]  # in execution dtype, memory format in the strides
    program: bytes = b""  # further input of a skeleton, or key of its construction
    stacks: tuple[tuple[str, ...], ...] = ()  # tensors of all moe_experts of a layer, readable one moe_expert at a time
    remark: str | None = None  # for the user
    added: frozenset[str] = frozenset()  # tensors of an adapter; all others are of ``weights``


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of an expert's packed weights, without sharing; those of a language model's moe_experts in equal blocks."""

    dense_bytes: int
    block_bytes: int = 0
    blocks: int = 0

    @property
    def total_bytes(self) -> int:
        return self.dense_bytes + self.block_bytes * self.blocks


@dataclass(frozen=True, slots=True, weakref_slot=True)
class RefusedModule:
    """An architecture that does not run in a form."""

    reason: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """Image in its expert's input form. Back to the image's pixels: x = (x' - pad_left) / scale_x, y alike."""

    tensor: Tensor  # float32 (3, height, width) on the CPU, normalised
    image_height: int
    image_width: int
    scale_x: float = 1.0  # differs a little from ``scale_y`` even in kept proportions: whole pixels are filled
    scale_y: float = 1.0
    pad_left: float = 0.0
    pad_top: float = 0.0
    orientation: int = 1  # EXIF orientation that was not applied; boxes and maps are turned by it


class Skeleton(Protocol):
    """One module, bound to memory that it does not own. Safe to run from several threads once bound."""

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these views as parameters: all names of the packed expert, on the skeleton's device."""

    def infer(self, expert: Expert, batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
        """Predict in order. ValueError for an empty batch, OutputInvalid for NaN or too many boxes."""


class Backend(Protocol):
    """One family of architectures. A form outside ``precisions`` is WeightsMismatch, never a silent fp32."""

    @property
    def precisions(self) -> frozenset[Precision]: ...

    def pack(self, expert: Expert, precision: Precision) -> Packable:
        """Convert the weights file, offline. Raises WeightsMissing, WeightsCorrupt, WeightsRefused, WeightsMismatch."""

    def check(self, expert: Expert) -> None:
        """Open the weights as ``pack`` does, by their headers alone: within milliseconds. Raises as ``pack``, and
        TokenizerUnusable; faults in the numbers are found by packing."""

    def template(self, expert: Expert, precision: Precision, program: bytes, device: str) -> object:
        """Prototype of skeletons: while it lives, ``skeleton`` only copies, for this form, device and thread count."""

    def skeleton(self, expert: Expert, precision: Precision, program: bytes, device: str) -> Skeleton:
        """Make an unbound skeleton; batches may run meanwhile. Raises WeightsMismatch, BackendUnavailable."""

    def prepare(self, expert: Expert, image: np.ndarray) -> Prepared:
        """Scale and normalise one image: uint8 RGB (height, width, 3), of any size. Thread-safe."""

    def recipe(self, expert: Expert, precision: Precision) -> str:
        """Dependencies of packed bytes beside the expert and its file, such as a runtime's version; often empty."""

    def weight_bytes(self, expert: Expert, precision: Precision) -> WeightBytes:
        """Bytes that ``pack`` will make, within some percent, from shapes and headers. A bound in a calibrated form.
        Raises as ``check``, and OSError."""

    def workspace_bytes(self, expert: Expert, precision: Precision, batch_size: int) -> int:
        """Memory of a batch (texts: of an iteration) without the weights, from shapes. A profile overrides it."""

    def token_bytes(self, expert: Expert, precision: Precision) -> int:
        """Bytes that each token of a text holds until the text ends; 0 for images. Raises as ``pack``."""


def require_tensors(tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Raises ValueError unless these are exactly the tensors that a skeleton is bound to."""
    if wrong := tensors.keys() ^ set(names):
        raise ValueError(f"tensors do not fit the skeleton: {sorted(wrong)[:5]}")


def require_images(batch: Sequence[Prepared]) -> None:
    if not batch:
        raise ValueError("an empty batch")
