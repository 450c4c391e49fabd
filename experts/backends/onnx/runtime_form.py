"""ONNX Runtime as a form of execution of torch's architectures, beside fp32, bf16 and fp16; on the CPU.

Guarantees: experts of one architecture, input size and number of labels share one program and session, so a switch
overwrites bytes. A graph is used only after it answered as its module does, on made-up weights and images; else the
architecture is refused. Export happens at packing, once per architecture and process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from onnxruntime import OrtValue
from torch.func import functional_call

from experts.backends.base import Packable, Prepared
from experts.backends.onnx.export import EXAMPLES, IMAGES, exported
from experts.backends.onnx.layout import LaidOutGraph, identity_of, laid_out, runtime_identity
from experts.backends.onnx.session import REFUSALS, session_once, shared_session
from experts.errors import BackendUnavailable, WeightsMismatch
from experts.expert import Expert, Precision, Prediction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module

    Answered: TypeAlias = Callable[[Expert, Sequence[Tensor], Sequence[Prepared]], tuple[Prediction, ...]]

DEVIATION_MAXIMUM = 1e-3  # of the made-up answers, relative to the largest value of each output
NOISE = 0.1  # on made-up weights, so that none is all 0 or all 1 as fresh ones may be; relative to a layer's output


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Refused:
    """An architecture that does not run in this form."""

    reason: str


class RuntimeSkeleton:
    """The session of one program, and the addresses of one expert's weights. ``answered`` reads the outputs."""

    def __init__(self, expert: Expert, program: bytes, device: str, answered: Answered) -> None:
        """Raises BackendUnavailable where this is not the CPU and the ONNX Runtime that the program is laid out for."""
        subject = f"{expert.architecture} in {Precision.ONNXRUNTIME}"
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
        if tensors.keys() != self._names:
            raise ValueError(f"tensors do not fit the skeleton: {sorted(tensors.keys() ^ self._names)[:5]}")
        self._weights = {name: _as_ort_value(tensor) for name, tensor in tensors.items()}

    def infer(self, expert: Expert, batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
        if not batch:
            raise ValueError("an empty batch")
        images = _as_ort_value(torch.stack([prepared.tensor for prepared in batch]))
        outputs = self._session.run(self._outputs, {IMAGES: images, **self._weights})
        return self._answered(expert, [torch.from_numpy(output) for output in outputs], batch)


def runtime_form(
    module: Module, size: tuple[int, int], outputs: Sequence[str], sample: Mapping[str, Tensor]
) -> LaidOutGraph | Refused:
    """``module``: on the meta device; ``sample``: weights as it may have; ``outputs``: see ``export.exported``."""
    try:
        graph = laid_out(exported(module, size, outputs), IMAGES)
        deviations = _deviations(module, graph, size, outputs, sample)
    except (ValueError, *REFUSALS) as error:
        return Refused(str(error))
    wrong = [
        f"{name} by {deviation:.2g}" for name, deviation in deviations.items() if not deviation <= DEVIATION_MAXIMUM
    ]
    if wrong:
        return Refused(f"its graph does not answer as torch does: {', '.join(wrong)} of the largest value")
    return graph


def packable(expert: Expert, form: LaidOutGraph | Refused, tensors: Mapping[str, Tensor]) -> Packable:
    """One expert's weights, float32, by their names in the module. Raises WeightsMismatch where the form is refused."""
    if isinstance(form, Refused):
        raise WeightsMismatch(
            expert.id,
            f"{expert.architecture} does not run in {Precision.ONNXRUNTIME}: {form.reason}; choose fp32 or bf16",
        )
    return Packable(form.tensors(tensors), program=form.program)


def _as_ort_value(tensor: Tensor) -> OrtValue:
    if not tensor.is_contiguous():
        raise ValueError("ONNX Runtime reads contiguous tensors only")
    return OrtValue.ortvalue_from_numpy(tensor.numpy())  # without a copy


def _deviations(
    module: Module, graph: LaidOutGraph, size: tuple[int, int], outputs: Sequence[str], sample: Mapping[str, Tensor]
) -> dict[str, float]:
    """How far the program's outputs are from the module's, by output; not a number where the module's are not."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: _noisy(tensor, generator) for name, tensor in sample.items()}
    images = torch.randn((EXAMPLES + 1, 3, *size), generator=generator)  # another number than it was exported with
    with torch.inference_mode():
        expected = functional_call(module, weights, (images,))
    named = {outputs[0]: expected} if isinstance(expected, torch.Tensor) else expected
    feeds = {name: _as_ort_value(tensor) for name, tensor in {IMAGES: images, **graph.tensors(weights)}.items()}
    session = session_once(graph.program, is_final=True)
    found = dict(zip(outputs, session.run(list(outputs), feeds), strict=True))
    return {name: _deviation(torch.from_numpy(found[name]), named[name]) for name in outputs}


def _noisy(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    summands = tensor[0].numel() if tensor.dim() > 1 else 1
    return tensor + NOISE / summands**0.5 * torch.randn(tensor.shape, generator=generator)


def _deviation(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max())
