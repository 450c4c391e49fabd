"""The forms of one backend's architectures, each fused, decided and proven once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from experts.backends.made_once import MadeOnce
from experts.backends.onednn.calibrating import observed
from experts.backends.onednn.correcting import corrected
from experts.backends.onednn.form import (
    FusedModule,
    OnednnForm,
    OnednnSkeleton,
    Refused,
    fused_module,
    packable,
    packed_form,
)
from experts.backends.onednn.trial import decided_form
from experts.calibrations import HOW, read_calibration
from experts.errors import BackendUnavailable, WeightsMismatch
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module

    from experts.backends.base import Packable
    from experts.backends.onednn.calibrating import Ranges
    from experts.backends.onednn.form import Answered
    from experts.expert import Expert

ONEDNN_NUMBERS = {  # that fused calls multiply
    Precision.ONEDNN_FP32: torch.float32,
    Precision.ONEDNN_BF16: torch.bfloat16,
    Precision.ONEDNN_INT8: torch.int8,
}
FORMS_KEPT = 64  # beside those that are held: packing goes through the line's forms in turn

Structure = TypeVar("Structure", bound="Hashable")
Made = TypeVar("Made", FusedModule, OnednnForm)


class OnednnForms(Generic[Structure]):
    """``module``: folded, on meta; ``sample``: weights it may have, float32; ``outputs``: see ``recorded``."""

    def __init__(
        self, module: Callable[[Structure], Module], sample: Callable[[Structure], Mapping[str, Tensor]],
        outputs: Sequence[str],
    ) -> None:  # fmt: skip
        self._module = module
        self._sample = sample
        self._outputs = outputs
        self._fused = MadeOnce(self._fuse, FORMS_KEPT)
        self._decided = MadeOnce(self._decide, FORMS_KEPT)
        self._packed = MadeOnce(self._prove, FORMS_KEPT)

    def pack(
        self, expert: Expert, precision: Precision, structure: Structure, weights: Mapping[str, Tensor]
    ) -> Packable:
        """One expert's weights by name. Raises WeightsMismatch, also for eight bits that were not calibrated so."""
        form = self._decided(structure, image_size(expert), ONEDNN_NUMBERS[precision])
        ranges = _calibrated(expert, form) if precision is Precision.ONEDNN_INT8 else None
        return packable(expert, precision, form, weights, ranges)

    def ranges(
        self, expert: Expert, structure: Structure, weights: Mapping[str, Tensor], batches: Iterable[Tensor]
    ) -> Ranges:
        """``weights``: float32, by name. Raises WeightsMismatch without a form of eight bits, and for NaN."""
        plain = _taken(expert, self._fused(structure, image_size(expert), torch.float32))
        form = _taken(expert, self._decided(structure, image_size(expert), torch.int8))
        images = list(batches)
        try:
            seen = observed(plain.graph, plain.inputs, weights, images)
            return corrected(form, plain, weights, seen, torch.cat(images))
        except ValueError as error:
            raise WeightsMismatch(expert.id, f"it cannot be calibrated: {error}") from error

    def packed(self, expert: Expert, precision: Precision, structure: Structure, program: bytes) -> OnednnForm:
        """What the skeletons of a packed form run. Raises BackendUnavailable where it was not packed for this box."""
        subject = f"{expert.architecture} in {precision}"
        return self._packed(subject, structure, image_size(expert), ONEDNN_NUMBERS[precision], program)

    def skeleton(
        self, expert: Expert, precision: Precision, structure: Structure, program: bytes, device: str,
        answered: Answered,
    ) -> OnednnSkeleton:  # fmt: skip
        if device != "cpu":
            raise BackendUnavailable(f"{expert.architecture} in {precision}", f"it runs on the CPU, not on {device}")
        return OnednnSkeleton(self.packed(expert, precision, structure, program), answered)

    def _fuse(self, structure: Structure, size: tuple[int, int], numbers: torch.dtype) -> FusedModule | Refused:
        return fused_module(self._module(structure), size, self._outputs, numbers)

    def _decide(self, structure: Structure, size: tuple[int, int], numbers: torch.dtype) -> OnednnForm | Refused:
        fused = self._fused(structure, size, numbers)
        return decided_form(self._module(structure), fused, self._outputs, self._sample(structure))

    def _prove(
        self, subject: str, structure: Structure, size: tuple[int, int], numbers: torch.dtype, program: bytes
    ) -> OnednnForm:
        return packed_form(subject, self._fused(structure, size, numbers), program)


def _taken(expert: Expert, made: Made | Refused) -> Made:
    if isinstance(made, Refused):
        raise WeightsMismatch(expert.id, f"{expert.architecture} cannot be calibrated: {made.reason}")
    return made


def _calibrated(expert: Expert, form: OnednnForm | Refused) -> Ranges:
    """Raises WeightsMismatch where nothing was observed, or not all calls of the form."""
    found = None if expert.calibration is None else read_calibration(expert.calibration)
    if found is None:
        raise WeightsMismatch(expert.id, f"it has no form of eight bits before it is calibrated: {HOW}")
    if isinstance(form, OnednnForm) and not form.quantised <= found.ranges.keys():
        raise WeightsMismatch(expert.id, f"its calibration is of another architecture or version: {HOW} anew")
    return found.ranges


def image_size(expert: Expert) -> tuple[int, int]:
    return expert.pixels.height, expert.pixels.width
