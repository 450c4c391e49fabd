"""An expert in one packed form, and its bytes in memory. Imports no runtime."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.performance import Footprint, PreparedForm, SharedTensors
from experts.backends import GRAPH_FAMILIES, family
from experts.expert import Fit, Orientation
from experts.packed.weights import slot_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from experts.expert import Expert
    from experts.packed.weights import PackedExpert, Segment

SHORT_SHA256 = 12
PREPARED_BYTES_PER_PIXEL = 3 * 4  # float32 in three channels: see experts.backends.base.Prepared


@dataclass(frozen=True, slots=True)
class ExpertCopy:
    """Expert packed in one form. ``name``: the Engine's name for it.

    ``moe_places``: moe_experts held at a time; None: all, or a model without moe_experts.
    """

    name: str
    expert: Expert
    packed: PackedExpert
    moe_places: int | None = None

    @property
    def kind(self) -> str:
        return kind_name(self.expert, self.packed.program_sha256)

    @property
    def is_offloaded(self) -> bool:
        return self.moe_places is not None

    @property
    def block_bytes(self) -> int:
        return moe_block_bytes(self.packed)

    @property
    def parts(self) -> tuple[Segment, ...]:
        """Shareable segments; equal ones are held once for several copies."""
        return tuple(segment for segment in self.packed.shared if segment.blocks is None or not self.is_offloaded)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (self.packed.own, *self.parts)

    @property
    def own_bytes(self) -> int:
        return self.packed.own.slot_bytes + slot_bytes((self.moe_places or 0) * self.block_bytes)

    @property
    def loaded_bytes(self) -> int:
        """Bytes that a load moves when shared segments are resident: own bytes, and layers of moe_experts."""
        layers = () if self.is_offloaded else self.packed.moe_layers
        return self.packed.own.slot_bytes + sum(segment.slot_bytes for segment in layers)

    @property
    def footprint(self) -> Footprint:
        shared = tuple(SharedTensors(segment.sha256, segment.slot_bytes) for segment in self.parts)
        return Footprint(self.own_bytes, shared)


def prepared_form(expert: Expert, *, is_reduced: bool = False) -> PreparedForm | None:
    """Prepared form of an image for an expert; None for an expert of texts.

    The name lists all inputs: orientation, fit, size, normalisation (detectors have none), depth, reduced decoding.
    """
    if expert.takes_texts:
        return None
    pixels = expert.pixels
    fit = Fit.LETTERBOXED if family(expert.architecture) == "detector" else pixels.fit
    is_scaled_by_spec = fit in {Fit.STRETCHED, Fit.CROPPED, Fit.PADDED}
    name = f"{fit} {pixels.height}x{pixels.width} {pixels.normalize if is_scaled_by_spec else 'unit'}"
    if is_scaled_by_spec and (pixels.resize, pixels.interpolation) != (None, "bilinear"):
        name += f" resize={pixels.resize} {pixels.interpolation}"
    if is_scaled_by_spec and (pixels.padding or pixels.rounding):
        name += f" {pixels.padding} {pixels.rounding}"
    if pixels.orientation is Orientation.EXIF:
        name += f" {pixels.orientation}"
    name += f" bits={pixels.bits}" if pixels.bits else f" window={pixels.window}" if pixels.window else ""
    if is_reduced and pixels.is_antialiased:
        name += " reduced"
    return PreparedForm(name, pixels.height * pixels.width * PREPARED_BYTES_PER_PIXEL)


def moe_block_bytes(packed: PackedExpert) -> int:
    """Bytes of one moe_expert of a packed model, equal for all; 0 for a model without moe_experts."""
    return max((segment.blocks.size_bytes for segment in packed.moe_layers if segment.blocks is not None), default=0)


def moe_experts_of(packed: PackedExpert) -> int:
    return sum(len(segment.blocks.sha256) for segment in packed.moe_layers if segment.blocks is not None)


def kind_name(expert: Expert, program_sha256: str | None) -> str:
    """Name of a group of experts with equal run times: architecture, input, stem, variant, and a user's graph.

    An architecture that runs from a graph (ONNX Runtime) keeps its kind: only the precision differs. Language models
    share a kind if their directories differ in weights only, and the line file gives them one precision.
    """
    if expert.takes_texts:
        given = "auto" if expert.is_automatic else expert.precision
        own = None if given is None else f"precision={given}"
        program = None if program_sha256 is None else _program(program_sha256)
        return " ".join(part for part in (expert.architecture, program, own) if part)
    size = f"{expert.pixels.height}x{expert.pixels.width}"
    parts = [expert.architecture, size, str(expert.pixels.normalize)]
    if expert.stem is not None:
        parts.append(f"stem={expert.stem}")
    if expert.variant is not None:
        parts.append(f"variant={expert.variant}")
    if program_sha256 is not None and family(expert.architecture) in GRAPH_FAMILIES:
        parts.append(_program(program_sha256))
    return " ".join(parts)


def _program(sha256: str) -> str:
    return f"program={sha256[:SHORT_SHA256]}"


def by_kind(copies: Iterable[ExpertCopy]) -> dict[str, list[ExpertCopy]]:
    found: defaultdict[str, list[ExpertCopy]] = defaultdict(list)
    for copy in copies:
        found[copy.kind].append(copy)
    return dict(found)
