"""oneDNN as a form of execution of torch's architectures, beside fp32, bf16 and ONNX Runtime; on the CPU.

Guarantees: experts of one architecture, input size and number of labels share one graph and one layout, so a switch
overwrites bytes. Packing decides the layouts, tries the form (``onednn.trial``) and notes them in the program. Before
any byte is read through a layout, torch is asked again: on another CPU nothing runs until the line is packed there.
"""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.fx import GraphModule

from experts.backends.base import Packable, RefusedModule
from experts.backends.onednn.calibrating import quantised_weights
from experts.backends.onednn.calls import Arrangements, Call, bound
from experts.backends.onednn.fusion import LEVELS, FusedCall, fused
from experts.backends.onednn.layouts import in_reference_layout, reference, serves
from experts.backends.onednn.levels import Values
from experts.backends.onednn.operators import blocked_bytes, blocked_view, identity, on_threads
from experts.backends.onednn.quantised_calls import Levels, quantised_call
from experts.backends.onednn.quantising import quantised
from experts.backends.onednn.recording import recorded
from experts.errors import BackendUnavailable, OutputInvalid, Unrecordable, WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module

    from experts.backends.base import Prepared
    from experts.backends.forms.base import Form, Reader
    from experts.backends.onednn.calibrating import Ranges
    from experts.backends.onednn.layouts import Shape
    from experts.backends.onednn.operators import BlockedLayout
    from experts.expert import Expert, Prediction

    Watched: TypeAlias = Callable[[FusedCall, Callable[..., Tensor]], Callable[..., Tensor]]

DIGEST_LETTERS = 16
AGAIN = "pack the line again here"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FusedModule:
    """A module's graph with what oneDNN runs as one call, and what it is run with beside images of that size."""

    graph: GraphModule
    inputs: tuple[str | FusedCall | Values, ...]
    size: tuple[int, int]
    numbers: torch.dtype  # of the weights of fused calls

    @property
    def dtype(self) -> torch.dtype:
        return computed_in(self.numbers)  # of images, and of what no fused call computes

    @property
    def shapes(self) -> dict[str, Shape]:
        calls = (each for each in self.inputs if isinstance(each, FusedCall))
        return {call.weight: call.shape for call in calls if call.owns_weight}

    @property
    def levels_digest(self) -> str:
        """Digest of which calls read and answer which levels: it decides an expert's table, scales and offsets."""
        plan = [(each.weight, each.quantisation) for each in self.inputs if isinstance(each, FusedCall)]
        return hashlib.sha256(repr(plan).encode()).hexdigest()[:DIGEST_LETTERS]

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of all that is read, each once."""
        names: dict[str, None] = {}
        for part in self.inputs:
            names |= dict.fromkeys(_reads(part))
        return tuple(names)


@dataclass(frozen=True, slots=True)
class BlockedWeight:
    """Layout of one weight in a packed expert. ``sha256``: of the layout's description."""

    weight: str
    layout: BlockedLayout
    sha256: str

    @classmethod
    def of(cls, weight: str, layout: BlockedLayout) -> BlockedWeight:
        return cls(weight, layout, hashlib.sha256(layout.description).hexdigest())

    @property
    def name(self) -> str:
        return f"{self.weight} {self.sha256[:DIGEST_LETTERS]}"  # equal bytes in another layout are another tensor


@dataclass(frozen=True, slots=True, weakref_slot=True)
class OnednnModule:
    """A fused module, and by their names in the module the weights that lie in a layout of oneDNN's."""

    module: FusedModule
    blocked: Mapping[str, BlockedWeight]

    @property
    def quantised(self) -> frozenset[str]:
        calls = (each for each in self.module.inputs if isinstance(each, FusedCall))
        return frozenset(call.weight for call in calls if call.quantisation is not None)

    @property
    def program(self) -> bytes:
        """Input of a skeleton beside the tensors; the same bytes for the same layouts."""
        weights = {name: laid.sha256 for name, laid in self.blocked.items()}
        document = {"made for": identity(), "images": self.module.size, "weights": weights}
        if self.module.numbers == torch.int8:
            document["levels"] = self.module.levels_digest
        return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()

    def tensors(self, weights: Mapping[str, Tensor], ranges: Ranges | None = None) -> dict[str, Tensor]:
        """One expert's weights as they are packed. ``ranges``: of its calls' values, for a form of eight bits."""
        if ranges is not None:
            weights = quantised_weights(self.module.inputs, weights, ranges)
        return on_threads(1, lambda: dict(self._laid(name, weights[name].detach()) for name in self.module.weights))

    def _laid(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        laid = self.blocked.get(name)
        if laid is None:
            return name, weight
        return laid.name, blocked_bytes(in_reference_layout(self.module.shapes[name], weight))


class OnednnSkeleton:
    """One form's graph over one expert's bytes. ``answered`` reads the outputs; ``watched`` wraps each call."""

    def __init__(self, form: OnednnModule, answered: Reader, watched: Watched = lambda call, made: made) -> None:
        self._watched = watched
        self._module = form.module
        self._blocked = form.blocked
        self._answered = answered
        self._names = {form.blocked[name].name if name in form.blocked else name for name in form.module.weights}
        self._arrangements = {
            call: Arrangements(call.shape, is_blocked=self._is_blocked(call))
            for call in form.module.inputs
            if isinstance(call, FusedCall)
        }
        self._inputs: list[Tensor | Levels | Callable[..., Tensor]] = []
        self._bytes: Mapping[str, Tensor] = {}  # of which opaque tensors hold nothing

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors.keys() != self._names:
            raise ValueError(f"tensors do not fit the skeleton: {sorted(tensors.keys() ^ self._names)[:5]}")
        inputs = [self._bound(part, tensors) for part in self._module.inputs]
        self._bytes, self._inputs = tensors, inputs

    def infer(self, expert: Expert, batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
        if not batch:
            raise ValueError("an empty batch")
        with torch.inference_mode():
            try:
                outputs = self.outputs([prepared.tensor for prepared in batch])
            except FloatingPointError as error:
                raise OutputInvalid(expert.id, f"{error}: check its weights, or use precision fp32") from error
            return self._answered(expert, outputs, batch)

    def outputs(self, images: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the graph, in inference mode, on images (3, height, width) in float32."""
        found: tuple[Tensor, ...] = self._module.graph.forward(_laid_out(images, self._module.dtype), *self._inputs)
        return found

    def _bound(
        self, part: str | FusedCall | Values, tensors: Mapping[str, Tensor]
    ) -> Tensor | Levels | Callable[..., Tensor]:
        if isinstance(part, str):
            return tensors[part]
        if isinstance(part, Values):
            return Levels(tensors[LEVELS], part)
        return self._watched(part, self._call(part, tensors))

    def _call(self, part: FusedCall, tensors: Mapping[str, Tensor]) -> Call:
        weight = self._weight(part, tensors)
        if part.quantisation is not None:
            return quantised_call(part, self._arrangements[part], weight, *(tensors[name] for name in part.reads[1:]))
        return bound(part, self._arrangements[part], weight, None if part.bias is None else tensors[part.bias])

    def _weight(self, call: FusedCall, tensors: Mapping[str, Tensor]) -> Tensor:
        if not self._is_blocked(call):
            return tensors[call.weight]
        laid = self._blocked[call.weight]
        return blocked_view(tensors[laid.name], laid.layout)

    def _is_blocked(self, call: FusedCall) -> bool:
        return call.weight in self._blocked


def fused_module(
    module: Module, size: tuple[int, int], outputs: Sequence[str], numbers: torch.dtype
) -> FusedModule | RefusedModule:
    """``module``: on meta; ``outputs``: see ``recorded``; ``numbers``: of calls' weights, int8 where they can be."""
    dtype = computed_in(numbers)
    try:
        found = fused(recorded(deepcopy(module).to(dtype), size, outputs, dtype), dtype)
    except (Unrecordable, ValueError, RuntimeError, AssertionError) as error:  # torchvision refuses sizes so
        return RefusedModule(str(error).strip().partition("\n")[0])
    if numbers == torch.int8:
        found = quantised(found)
        if not any(isinstance(each, FusedCall) and each.quantisation for each in found.inputs):
            return RefusedModule("it has no layer that oneDNN runs in eight bits")
    return FusedModule(GraphModule(torch.nn.Module(), found.graph), found.inputs, size, numbers)


def computed_in(numbers: torch.dtype) -> torch.dtype:
    return torch.float32 if numbers == torch.int8 else numbers


def decided_layouts(fused: FusedModule) -> OnednnModule:
    """The form that a fused module's weights are packed in: how each lies is decided here, and not tried yet."""
    serving = {shape for shape in fused.shapes.values() if shape.dtype == torch.int8 or serves(shape)}
    return _form(fused, [name for name, shape in fused.shapes.items() if shape in serving])


def packable(
    expert: Expert,
    form: Form,
    decided: OnednnModule | RefusedModule,
    tensors: Mapping[str, Tensor],
    ranges: Ranges | None,
) -> Packable:
    """``ranges``: for eight bits. Raises WeightsMismatch where the module is refused, and for NaN in eight bits."""
    if isinstance(decided, RefusedModule):
        raise WeightsMismatch(
            expert.id, f"{expert.architecture} does not run in {form.name}: {decided.reason}; choose {form.plain}"
        )
    try:
        return Packable(decided.tensors(tensors, ranges), program=decided.program)
    except ValueError as error:
        raise WeightsMismatch(expert.id, f"{error}: choose {form.plain}") from error


def packed_module(subject: str, fused: FusedModule | RefusedModule, program: bytes) -> OnednnModule:
    """``subject``: for errors. Raises BackendUnavailable where weights do not lie so on this CPU with this torch."""
    if isinstance(fused, RefusedModule):
        raise BackendUnavailable(subject, fused.reason)
    told, levels = _told(subject, program)
    if fused.numbers == torch.int8 and levels != fused.levels_digest:
        raise BackendUnavailable(subject, f"its levels are of other calls than those here: {AGAIN}")
    if not told.keys() <= fused.shapes.keys():
        raise BackendUnavailable(subject, f"its program is of other weights: {AGAIN}")
    form = _form(fused, told)
    for name, laid in form.blocked.items():
        if laid.sha256 != told[name]:
            raise BackendUnavailable(subject, f"{name} does not lie as oneDNN wants it on this box: {AGAIN}")
    return form


def _form(fused: FusedModule, blocked: Iterable[str]) -> OnednnModule:
    return OnednnModule(fused, {name: BlockedWeight.of(name, reference(fused.shapes[name])) for name in blocked})


def _told(subject: str, program: bytes) -> tuple[dict[str, str], str | None]:
    """The digests of oneDNN's descriptions by the names of the weights, and that of levels, as a program has them."""
    try:
        document = json.loads(program)
        made_for = document["made for"]
        told: dict[str, str] = dict(document["weights"])
        levels = document.get("levels")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BackendUnavailable(subject, f"its program is cut, or not of this form: {AGAIN}") from error
    if made_for != identity():
        raise BackendUnavailable(subject, f"it was packed for {made_for}, this box has {identity()}: {AGAIN}")
    return told, levels


def _laid_out(images: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A batch, channels last, without a copy of the whole; converted by channel, which torch does faster."""
    batch = torch.empty((len(images), *images[0].shape), dtype=dtype, memory_format=torch.channels_last)
    for place, image in zip(batch, images, strict=True):
        for part, values in ((place, image),) if image.dtype == dtype else zip(place, image, strict=True):
            part.copy_(values)
    return batch


def _reads(part: str | FusedCall | Values) -> tuple[str, ...]:
    if isinstance(part, Values):
        return (LEVELS,)
    return (part,) if isinstance(part, str) else part.reads
