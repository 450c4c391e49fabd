"""oneDNN as a form of execution of torch's architectures, on the CPU.

Guarantees: experts of one architecture, input size and number of labels share one graph and one layout, so a switch
overwrites bytes. Packing decides the layouts, tries the form (``onednn.trial``) and writes them into the program.
Before any byte is read through a layout, torch is asked for its own again: on another CPU nothing runs until the line
is packed there.
"""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.fx import GraphModule

from experts.backends.base import RefusedModule, require_images, require_tensors
from experts.backends.modules.recording import recorded
from experts.backends.onednn.calls import Arrangements, bound
from experts.backends.onednn.fusion import LEVELS, FusedCall, fused
from experts.backends.onednn.layouts import in_reference_layout, reference, serves
from experts.backends.onednn.levels import Levels, Values
from experts.backends.onednn.operators import blocked_bytes, blocked_view, made_for, on_threads
from experts.backends.onednn.quantised_weights import quantised_weights
from experts.backends.onednn.quantising import quantised
from experts.errors import BackendUnavailable, OutputInvalid, Unrecordable, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module

    from experts.backends.base import Prepared
    from experts.backends.forms.base import Reader
    from experts.backends.onednn.fusion import Part
    from experts.backends.onednn.layouts import Shape
    from experts.backends.onednn.operators import BlockedLayout
    from experts.backends.onednn.quantised_weights import Ranges
    from experts.expert import Expert, Prediction

    Watched: TypeAlias = Callable[[FusedCall, Callable[..., Tensor]], Callable[..., Tensor]]

DIGEST_LETTERS = 16
AGAIN = "pack the line again here"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FusedModule:
    """Graph of a module with fused calls, and its inputs beside the images, which are of that size."""

    graph: GraphModule
    inputs: tuple[Part, ...]
    size: tuple[int, int]
    numbers: torch.dtype  # of the weights of fused calls

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of images, and of values that no fused call computes."""
        return _computed_in(self.numbers)

    @property
    def calls(self) -> tuple[FusedCall, ...]:
        return tuple(each for each in self.inputs if isinstance(each, FusedCall))

    @property
    def shapes(self) -> dict[str, Shape]:
        return {call.weight: call.shape for call in self.calls if call.owns_weight}

    @property
    def levels_digest(self) -> str:
        """Digest of which calls read and answer which levels: it decides an expert's table, scales and offsets."""
        plan = [(call.weight, call.quantisation) for call in self.calls]
        return hashlib.sha256(repr(plan).encode()).hexdigest()[:DIGEST_LETTERS]

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of all tensors that are read, each once."""
        return tuple(dict.fromkeys(name for part in self.inputs for name in _reads(part)))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class OnednnModule:
    """A fused module, and by their names in the module the weights in a layout of oneDNN's."""

    module: FusedModule
    blocked: Mapping[str, BlockedLayout]

    @property
    def quantised(self) -> frozenset[str]:
        return frozenset(call.weight for call in self.module.calls if call.quantisation is not None)

    @property
    def program(self) -> bytes:
        """Input of a skeleton beside the tensors; equal layouts give equal bytes."""
        weights = {name: layout.sha256 for name, layout in self.blocked.items()}
        document = {"made for": made_for(self.module.numbers), "images": self.module.size, "weights": weights}
        if self.module.numbers == torch.int8:
            document["levels"] = self.module.levels_digest
        return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()

    def packed_name(self, name: str) -> str:
        """Name in a packed expert: equal bytes in another layout are another tensor."""
        layout = self.blocked.get(name)
        return name if layout is None else f"{name} {layout.sha256[:DIGEST_LETTERS]}"

    def tensors(self, weights: Mapping[str, Tensor], ranges: Ranges | None = None) -> dict[str, Tensor]:
        """One expert's weights as they are packed. ``ranges``: ranges of its calls' values, for a form of eight
        bits."""
        if ranges is not None:
            weights = quantised_weights(self.module.calls, weights, ranges)
        return on_threads(1, lambda: dict(self._laid(name, weights[name].detach()) for name in self.module.weights))

    def _laid(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        if name in self.blocked:
            weight = blocked_bytes(in_reference_layout(self.module.shapes[name], weight))
        return self.packed_name(name), weight


class OnednnSkeleton:
    """One form's graph over one expert's bytes. ``answered`` reads the outputs; ``watched`` wraps each call."""

    def __init__(self, form: OnednnModule, answered: Reader, watched: Watched = lambda call, made: made) -> None:
        self._watched = watched
        self._form = form
        self._answered = answered
        self._names = {name: form.packed_name(name) for name in form.module.weights}
        self._arrangements = {
            call: Arrangements(call.shape, is_blocked=call.weight in form.blocked) for call in form.module.calls
        }
        self._inputs: list[Tensor | Levels | Callable[..., Tensor]] = []
        self._bytes: Mapping[str, Tensor] = {}  # kept alive: opaque tensors hold no reference to their memory

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        require_tensors(tensors, self._names.values())
        inputs = [self._bound(part, tensors) for part in self._form.module.inputs]
        self._bytes, self._inputs = tensors, inputs

    def infer(self, expert: Expert, batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
        require_images(batch)
        with torch.inference_mode():
            try:
                outputs = self.outputs([prepared.tensor for prepared in batch])
            except FloatingPointError as error:
                raise OutputInvalid(expert.id, f"{error}: check its weights, or use precision fp32") from error
            return self._answered(expert, outputs, batch)

    def outputs(self, images: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the graph, in inference mode, on images (3, height, width) in float32."""
        module = self._form.module
        found: tuple[Tensor, ...] = module.graph.forward(_laid_out(images, module.dtype), *self._inputs)
        return found

    def _bound(self, part: Part, tensors: Mapping[str, Tensor]) -> Tensor | Levels | Callable[..., Tensor]:
        if isinstance(part, str):
            return tensors[part]
        if isinstance(part, Values):
            return Levels(tensors[LEVELS], part)
        weight = tensors[self._names[part.weight]]
        layout = self._form.blocked.get(part.weight)
        opaque = weight if layout is None else blocked_view(weight, layout)
        return self._watched(part, bound(part, self._arrangements[part], opaque, tensors))


def fused_module(
    module: Module, size: tuple[int, int], outputs: Sequence[str], numbers: torch.dtype
) -> FusedModule | RefusedModule:
    """``module``: on meta; ``outputs``: see ``recorded``; ``numbers``: dtype of calls' weights, int8 where possible."""
    dtype = _computed_in(numbers)
    try:
        found = fused(recorded(deepcopy(module).to(dtype), size, outputs, dtype), dtype)
    except (Unrecordable, ValueError, RuntimeError, AssertionError) as error:  # torchvision refuses sizes so
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        return RefusedModule(str(error).strip().partition("\n")[0])
    if numbers == torch.int8:
        found = quantised(found)
    made = FusedModule(GraphModule(torch.nn.Module(), found.graph), found.inputs, size, numbers)
    if numbers == torch.int8 and not any(call.quantisation for call in made.calls):
        return RefusedModule("it has no layer that oneDNN runs in eight bits")
    return made


def decided_layouts(fused: FusedModule) -> OnednnModule:
    """The form that a fused module's weights are packed in, not tried yet."""
    serving = {shape for shape in fused.shapes.values() if shape.dtype == torch.int8 or serves(shape)}
    return _form(fused, [name for name, shape in fused.shapes.items() if shape in serving])


def packed_module(subject: str, fused: FusedModule | RefusedModule, program: bytes) -> OnednnModule:
    """``subject``: for errors. Raises BackendUnavailable where this CPU and torch lay weights out otherwise."""
    if isinstance(fused, RefusedModule):
        raise BackendUnavailable(subject, fused.reason)
    digests, levels = _read_program(subject, program, made_for(fused.numbers))
    if fused.numbers == torch.int8 and levels != fused.levels_digest:
        raise BackendUnavailable(subject, f"its levels belong to other calls: {AGAIN}")
    if not digests.keys() <= fused.shapes.keys():
        raise BackendUnavailable(subject, f"its program is of other weights: {AGAIN}")
    form = _form(fused, digests)
    for name, layout in form.blocked.items():
        if layout.sha256 != digests[name]:
            raise BackendUnavailable(subject, f"{name} is not in the layout that oneDNN wants on this box: {AGAIN}")
    return form


def _computed_in(numbers: torch.dtype) -> torch.dtype:
    return torch.float32 if numbers == torch.int8 else numbers


def _form(fused: FusedModule, blocked: Iterable[str]) -> OnednnModule:
    return OnednnModule(fused, {name: reference(fused.shapes[name]) for name in blocked})


def _read_program(subject: str, program: bytes, here: str) -> tuple[dict[str, str], str | None]:
    """Digests of oneDNN's layouts by the names of the weights, and the digest of levels."""
    try:
        document = json.loads(program)
        there = document["made for"]
        digests: dict[str, str] = dict(document["weights"])
        levels = document.get("levels")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BackendUnavailable(subject, f"its program is cut, or not of this form: {AGAIN}") from error
    if there != here:
        raise BackendUnavailable(subject, f"it was packed for {there}, this box has {here}: {AGAIN}")
    return digests, levels


def _laid_out(images: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A batch, channels last, in one copy; converted by channel, which torch does faster."""
    batch = torch.empty((len(images), *images[0].shape), dtype=dtype, memory_format=torch.channels_last)
    for place, image in zip(batch, images, strict=True):
        for part, values in ((place, image),) if image.dtype == dtype else zip(place, image, strict=True):
            part.copy_(values)
    return batch


def _reads(part: Part) -> tuple[str, ...]:
    if isinstance(part, Values):
        return (LEVELS,)
    return (part,) if isinstance(part, str) else part.reads
