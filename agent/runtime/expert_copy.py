"""An expert in one form, as it is packed, loaded and run; and what holding it costs. No runtime is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.performance import Footprint, SharedPart

if TYPE_CHECKING:
    from experts.expert import Expert
    from experts.weights import PackedExpert


@dataclass(frozen=True, slots=True)
class ExpertCopy:
    """An expert in one precision, packed. ``name`` is what the Engine calls it."""

    name: str
    expert: Expert
    packed: PackedExpert


def footprint_of(packed: PackedExpert) -> Footprint:
    """What holding a packed expert costs, exactly as the slots hold it."""
    shared = tuple(SharedPart(segment.sha256, segment.slot_bytes) for segment in packed.shared)
    return Footprint(packed.own.slot_bytes, shared)
