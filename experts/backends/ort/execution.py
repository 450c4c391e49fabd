"""ONNX Runtime as a form of execution of torch's architectures, on the CPU.

Guarantees: experts of one architecture, input size and number of labels share one program and session, so a switch
overwrites bytes. A graph is used only after a proof of equal answers with its module, on synthetic weights and images;
else the architecture is refused. Export happens at packing, once per architecture and process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from onnxruntime import OrtValue
from torch.func import functional_call

from experts.backends.base import Packable, RefusedModule, require_images, require_tensors
from experts.backends.made_once import MadeOnce
from experts.backends.modules.binding import output_list
from experts.backends.ort.export import EXAMPLES, IMAGES, exported
from experts.backends.ort.layout import LaidOutGraph, identity_of, laid_out, runtime_identity
from experts.backends.ort.session import REFUSALS, session_once, shared_session
from experts.errors import BackendUnavailable, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module

    from experts.backends.base import Prepared
    from experts.backends.forms.base import Form, Modules, Reader
    from experts.expert import Expert, Prediction

KEPT = 64  # graphs beside those in use: packing alternates between the line's forms
DEVIATION_MAXIMUM = 1e-3  # of an output, in parts of its largest value
NOISE = 0.1  # on synthetic weights, so that none is all 0 or all 1 as fresh ones may be; relative to a layer's output


class RuntimeSkeleton:
    """The session of one program, and the addresses of one expert's weights. ``answered`` reads the outputs."""

    def __init__(self, subject: str, program: bytes, device: str, answered: Reader) -> None:
        """Raises BackendUnavailable for a program that was laid out for another device, CPU or ONNX Runtime."""
        if device != "cpu":
            raise BackendUnavailable(subject, f"it runs on the CPU, not on {device}")
        found, here = identity_of(program), runtime_identity()
        if found != here:
            raise BackendUnavailable(subject, f"it was packed for {found}, not for {here}: pack the line again here")
        self._session = shared_session(program, torch.get_num_threads(), device, is_final=True)
        self._names = frozenset(node.name for node in self._session.get_inputs()) - {IMAGES}
        self._outputs = [node.name for node in self._session.get_outputs()]
        self._answered = answered
        self._weights: Mapping[str, OrtValue] = {}

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        require_tensors(tensors, self._names)
        self._weights = {name: _as_ort_value(tensor) for name, tensor in tensors.items()}

    def infer(self, expert: Expert, batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
        require_images(batch)
        return self._answered(expert, self.outputs([prepared.tensor for prepared in batch]), batch)

    def outputs(self, images: Sequence[Tensor]) -> Sequence[Tensor]:
        feeds = {IMAGES: _as_ort_value(torch.stack(list(images))), **self._weights}
        return [torch.from_numpy(output) for output in self._session.run(self._outputs, feeds)]


def runtime_form(
    module: Module, size: tuple[int, int], outputs: Sequence[str], sample: Mapping[str, Tensor]
) -> LaidOutGraph | RefusedModule:
    """``module``: on the meta device; ``sample``: weights that it may have; ``outputs``: see ``output_list``."""
    try:
        graph = laid_out(exported(module, size, outputs), IMAGES)
        weights, images = synthetic(sample, size)
        found = deviations(module, graph.program, outputs, (weights, graph.tensors(weights)), images)
    except (ValueError, *REFUSALS) as error:
        if is_out_of_memory(error):  # it says nothing of the architecture, and a refusal is kept
            raise MemoryError(str(error)) from error
        return RefusedModule(str(error))
    return refused(found, DEVIATION_MAXIMUM) or graph


def refused(deviations: Mapping[str, float], most: float) -> RefusedModule | None:
    wrong = [f"{name} by {each:.2g}" for name, each in deviations.items() if not each <= most]
    if not wrong:
        return None
    return RefusedModule(f"its graph does not answer as torch does: {', '.join(wrong)} of the largest value")


def packed(form: Form, modules: Modules, expert: Expert) -> Packable:
    """One expert's weights, float32, by their names in the module. Raises WeightsMismatch where it is refused."""
    weights = modules.weights(expert, form)
    found = form.accepted(expert, _made(modules, modules.structure(expert), expert.pixels.size))
    return Packable(found.tensors(weights), program=found.program)


def _make(modules: Modules, structure: Hashable, size: tuple[int, int]) -> LaidOutGraph | RefusedModule:
    return runtime_form(modules.module(structure), size, modules.outputs, modules.sample(structure))


_made = MadeOnce(_make, KEPT)


def _as_ort_value(tensor: Tensor) -> OrtValue:
    if not tensor.is_contiguous():
        raise ValueError("ONNX Runtime reads contiguous tensors only")
    return OrtValue.ortvalue_from_numpy(tensor.numpy())  # without a copy


def synthetic(sample: Mapping[str, Tensor], size: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
    """Noisy weights, and images in another number than in the export's example."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: _noisy(tensor, generator) for name, tensor in sample.items()}
    return weights, torch.randn((EXAMPLES + 1, 3, *size), generator=generator)


def deviations(
    module: Module, program: bytes, outputs: Sequence[str],
    weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], images: Tensor,
) -> dict[str, float]:  # fmt: skip
    """Distance of the program's outputs from the module's; NaN where the module's are. ``weights``: the module's and
    the program's."""
    own, packed = weights
    with torch.inference_mode():
        expected = output_list(functional_call(module, own, (images,)), outputs)
    feeds = {name: _as_ort_value(tensor) for name, tensor in {IMAGES: images, **packed}.items()}
    found = session_once(program, is_final=True).run(list(outputs), feeds)
    pairs = zip(outputs, found, expected, strict=True)
    return {name: _deviation(torch.from_numpy(one), other) for name, one, other in pairs}


def _noisy(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    summands = tensor[0].numel() if tensor.dim() > 1 else 1
    return tensor + NOISE / summands**0.5 * torch.randn(tensor.shape, generator=generator)


def _deviation(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max())
