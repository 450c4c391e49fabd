"""An expert in one form, as it is packed, loaded and run; and what holding it costs. No runtime is imported."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.performance import Footprint, SharedPart
from experts.backends import GRAPH_FAMILIES, family

if TYPE_CHECKING:
    from collections.abc import Iterable

    from experts.expert import Expert
    from experts.packed.weights import PackedExpert

SHORT_SHA256 = 12


@dataclass(frozen=True, slots=True)
class ExpertCopy:
    """An expert in one precision, packed. ``name`` is what the Engine calls it."""

    name: str
    expert: Expert
    packed: PackedExpert

    @property
    def kind(self) -> str:
        """The name of its kind."""
        return kind_name(self.expert, self.packed.program_sha256)


def kind_name(expert: Expert, program_sha256: str | None) -> str:
    """The name of experts that run alike: architecture, input, stem, and for graphs of their owner's the program.

    A classifier or a detector that is executed from a graph (ONNX Runtime) is still of its architecture's kind: how it
    is executed is its precision. Language models are alike where all that their directories say beside the weights is,
    and where they are to run in the same precision, if the line says one of each.
    """
    if expert.takes_texts:
        own = None if expert.precision is None else f"precision={expert.precision}"
        program = None if program_sha256 is None else _program(program_sha256)
        return " ".join(part for part in (expert.architecture, program, own) if part)
    size = f"{expert.pixels.height}x{expert.pixels.width}"
    parts = [expert.architecture, size, expert.pixels.normalize]
    if expert.stem is not None:
        parts.append(f"stem={expert.stem}")
    if program_sha256 is not None and family(expert.architecture) in GRAPH_FAMILIES:
        parts.append(_program(program_sha256))
    return " ".join(parts)


def _program(sha256: str) -> str:
    return f"program={sha256[:SHORT_SHA256]}"


def by_kind(copies: Iterable[ExpertCopy]) -> dict[str, list[ExpertCopy]]:
    """Copies by the name of their kind, in their order."""
    found: defaultdict[str, list[ExpertCopy]] = defaultdict(list)
    for copy in copies:
        found[copy.kind].append(copy)
    return dict(found)


def footprint_of(packed: PackedExpert) -> Footprint:
    """What holding a packed expert costs, exactly as the slots hold it."""
    shared = tuple(SharedPart(segment.sha256, segment.slot_bytes) for segment in packed.shared)
    return Footprint(packed.own.slot_bytes, shared)
