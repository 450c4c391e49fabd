"""Modules of torch's backends in ONNX Runtime's eight bits: each graph is quantised, laid out and tried once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from experts.backends.base import Packable, RefusedModule
from experts.backends.made_once import MadeOnce
from experts.backends.ort.eight_bits import QuantisedGraph, observed_values, quantised_graph
from experts.backends.ort.execution import KEPT, deviations, made_up, refused
from experts.backends.ort.export import IMAGES, exported
from experts.backends.ort.layout import LaidOutGraph, laid_out
from experts.backends.ort.session import REFUSALS
from experts.calibrations import required_ranges
from experts.errors import WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    import onnx
    from torch import Tensor

    from experts.backends.forms.base import Form, Modules
    from experts.calibrations import CallRanges
    from experts.expert import Expert

DEVIATION_MAXIMUM = 0.5  # of made-up answers, of the largest value of each: rounding adds up from layer to layer


@dataclass(frozen=True, slots=True, weakref_slot=True)
class EightBits:
    """``plain``: the float32 graph whose values are observed."""

    plain: onnx.ModelProto
    quantised: QuantisedGraph
    graph: LaidOutGraph

    def tensors(self, weights: Mapping[str, Tensor], ranges: Mapping[str, CallRanges]) -> dict[str, Tensor]:
        return self.graph.tensors(self.quantised.quantised(weights, ranges))

    def ranges(self, weights: Mapping[str, Tensor], batches: Iterable[Tensor]) -> dict[str, CallRanges]:
        return observed_values(self.plain, self.quantised.values, weights, batches, IMAGES)


def packed(form: Form, modules: Modules, expert: Expert) -> Packable:
    """Raises WeightsMismatch where the module is refused, or the expert is not calibrated for it."""
    weights, made = modules.weights(expert, form), _taken(form, modules, expert)
    ranges = required_ranges(expert, form.name, made.quantised.values.keys())
    try:
        return Packable(made.tensors(weights, ranges), program=made.graph.program)
    except ValueError as error:
        raise WeightsMismatch(expert.id, f"{error}: choose {form.plain}") from error


def observed_ranges(form: Form, modules: Modules, expert: Expert, batches: Iterable[Tensor]) -> dict[str, CallRanges]:
    """Raises WeightsMismatch where the module is refused, and for NaN."""
    try:
        return _taken(form, modules, expert).ranges(modules.weights(expert, form), batches)
    except ValueError as error:
        raise WeightsMismatch(expert.id, f"it cannot be calibrated: {error}") from error


def _taken(form: Form, modules: Modules, expert: Expert) -> EightBits:
    made = _made(modules, modules.structure(expert), expert.pixels.size)
    if isinstance(made, RefusedModule):
        reason = f"{expert.architecture} does not run in {form.name}: {made.reason}; choose {form.plain}"
        raise WeightsMismatch(expert.id, reason)
    return made


def _make(modules: Modules, structure: Hashable, size: tuple[int, int]) -> EightBits | RefusedModule:
    module = modules.module(structure)
    try:
        plain = exported(module, size, modules.outputs)
        quantised = quantised_graph(plain)
        made = EightBits(plain, quantised, laid_out(quantised.copied(), IMAGES, quantised.constants()))
        weights, images = made_up(modules.sample(structure), size)
        laid = made.tensors(weights, made.ranges(weights, [images]))
        found = deviations(module, made.graph.program, modules.outputs, (weights, laid), images)
    except (ValueError, *REFUSALS) as error:
        return RefusedModule(str(error))
    return refused(found, DEVIATION_MAXIMUM) or made


_made = MadeOnce(_make, KEPT)
