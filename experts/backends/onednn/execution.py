"""Modules of torch's backends in oneDNN's forms: each is fused, decided, and proven by a trial, once in a process.

The trial runs on synthetic weights and images, as a whole and call by call. Guarantees: a call is compared with torch's
own operators on exactly the values that it read, so no error vanishes and no rounding accumulates. The outputs are
compared with the module's. A deviation beyond the form's rounding refuses the form, by name. Equal boxes decide
equally.
"""

from __future__ import annotations

import json
import logging
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.func import functional_call
from torch.nn import functional

from experts.backends.base import Packable, RefusedModule
from experts.backends.made_once import MadeOnce
from experts.backends.modules.binding import output_list
from experts.backends.onednn.calibrating import corrected, observed
from experts.backends.onednn.form import (
    FusedModule,
    OnednnModule,
    OnednnSkeleton,
    decided_layouts,
    fused_module,
    packed_module,
)
from experts.backends.onednn.fusion import LEVELS, SCALES, FusedCall
from experts.backends.onednn.layouts import ConvolutionShape
from experts.backends.onednn.levels import Levels, by_channel
from experts.backends.onednn.quantised_weights import quantised_weights
from experts.calibrations import required_ranges
from experts.errors import BackendUnavailable, WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module

    from experts.backends.forms.base import Form, Modules
    from experts.backends.onednn.quantised_weights import Ranges
    from experts.expert import Expert

    Runs: TypeAlias = Callable[..., Tensor]

log = logging.getLogger(__name__)
TRIED_IMAGES = 4  # another number than it was recorded with
DEVIATION_MAXIMUM = {  # of an output, in parts of its largest value: rounding accumulates from call to call
    torch.float32: 1e-3,
    torch.bfloat16: 0.3,
    torch.int8: 0.5,
}
CALL_DEVIATION_MAXIMUM = {  # of one call's answer: rounding of its sums and of the expected ones
    torch.float32: 1e-4,
    torch.bfloat16: 0.03,
    torch.int8: 0.03,
}
GAIN = 1.0  # of a layer with synthetic weights: the change by a wrong call has to reach the outputs
NOISE = 0.1  # on vectors, so that none is all 0 or all 1 as fresh ones may be
NOTHING = torch.finfo(torch.float32).tiny
SUMMING = 1e-6  # of the largest activated sum, some units in float32's last place: no smaller sum is more exact
KEPT = 64  # modules beside those in use: packing alternates between the line's forms


@dataclass(frozen=True, slots=True)
class FormTrial:
    """Deviations from torch, in parts of its largest value; NaN where torch's answer is not finite."""

    outputs: Mapping[str, float]  # by name
    calls: tuple[tuple[FusedCall, float], ...]  # as they ran


def decided_module(
    module: Module, fused: FusedModule | RefusedModule, outputs: Sequence[str], sample: Mapping[str, Tensor]
) -> OnednnModule | RefusedModule:
    """Decide layouts and try them. ``module``: on meta, as it was fused; ``sample``: weights it may have, float32."""
    if isinstance(fused, RefusedModule):
        return fused
    form = decided_layouts(fused)
    reason = _why_refused(tried(deepcopy(module), form, outputs, sample), fused.numbers)
    if reason is None:
        return form
    log.warning("form_refused module=%s numbers=%s reason=%s", type(module).__name__, _named(fused.numbers), reason)
    return RefusedModule(reason)


def tried(module: Module, form: OnednnModule, outputs: Sequence[str], sample: Mapping[str, Tensor]) -> FormTrial:
    """Deviation of a form from its module on synthetic weights like the sample's."""
    generator = torch.Generator().manual_seed(0)
    fused, dtype = form.module, form.module.dtype
    weights = {name: _noisy(tensor, generator, dtype) for name, tensor in sample.items()}
    images = torch.randn((TRIED_IMAGES, 3, *fused.size), generator=generator)
    tensors = weights
    if fused.numbers == torch.int8:
        plain = fused_module(deepcopy(module).to("meta"), fused.size, outputs, torch.float32)
        assert isinstance(plain, FusedModule), "it was fused in float32 already"
        try:
            tensors = quantised_weights(fused.calls, weights, observed(plain, weights, [images]).ranges)
        except ValueError:  # NaN has no levels
            return FormTrial(dict.fromkeys(outputs, float("nan")), ())
        weights = weights | {call.weight: _rounded(call, tensors) for call in fused.calls if call.quantisation}
    calls: list[_TriedCall] = []

    def watched(call: FusedCall, made: Runs) -> Runs:
        calls.append(_TriedCall(call, made, tensors))
        return calls[-1]

    skeleton = OnednnSkeleton(form, lambda expert, answers, batch: (), watched)
    skeleton.bind(form.tensors(tensors))
    with torch.inference_mode():
        found = skeleton.outputs(images.unbind())
        expected = output_list(functional_call(module, weights, (images.to(dtype),)), outputs)
    return FormTrial(
        {name: _deviation(*pair) for name, *pair in zip(outputs, found, expected, strict=True)},
        tuple((each.call, each.deviation) for each in calls),
    )


def described(call: FusedCall) -> str:
    kind = _convolution_kind(call.shape) if isinstance(call.shape, ConvolutionShape) else "linear"
    done = " + ".join((kind, *["sum"] * call.adds, *[call.activation.name] * (call.activation.name != "none")))
    return f"{call.weight.removesuffix('.weight')} ({done} in {_named(call.shape.dtype)})"


def _noisy(tensor: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """A weight plus noise that keeps the size of values from layer to layer."""
    if not tensor.is_floating_point():
        return tensor
    scale = GAIN / tensor[0].numel() ** 0.5 if tensor.dim() > 1 else NOISE
    noisy = (tensor + scale * torch.randn(tensor.shape, generator=generator)).detach().to(dtype)
    return noisy.contiguous(memory_format=torch.channels_last) if noisy.dim() == 4 else noisy


def _why_refused(trial: FormTrial, numbers: torch.dtype) -> str | None:
    wrong = _beyond(((described(call), off) for call, off in trial.calls), CALL_DEVIATION_MAXIMUM[numbers])
    if wrong:
        others = f", and {len(wrong) - 1} more of its {len(trial.calls)} calls" if len(wrong) > 1 else ""
        return f"on this box oneDNN is off in {wrong[0]} of the largest value{others}"
    wrong = _beyond(trial.outputs.items(), DEVIATION_MAXIMUM[numbers])
    return f"its graph does not answer as torch does: {', '.join(wrong)} of the largest value" if wrong else None


def _beyond(deviations: Iterable[tuple[str, float]], limit: float) -> list[str]:
    return [f"{name} by {deviation:.2g}" for name, deviation in deviations if not deviation <= limit]


class _TriedCall:
    """A call whose answer to the last image is compared with the answer of torch's operators, in float32.

    ``tensors``: the form's, not laid out yet.
    """

    def __init__(self, call: FusedCall, made: Runs, tensors: Mapping[str, Tensor]) -> None:
        self.call = call
        self.deviation = 0.0  # of a call that no image reaches
        self._made = made
        self._tensors = tensors
        values = call.quantisation
        self._source = None if values is None else Levels(tensors[LEVELS], values.source)
        self._summand = None if values is None or values.summand is None else Levels(tensors[LEVELS], values.summand)
        self._answer = None if values is None or values.answer is None else Levels(tensors[LEVELS], values.answer)

    def __call__(self, source: Tensor, *others: Tensor) -> Tensor:
        expected, slack = self._expected(source, *others)  # before the call may overwrite its summand
        answer: Tensor = self._made(source, *others)
        self.deviation = _deviation(_values(self._last(answer), self._answer).float(), expected, slack)
        return answer

    def _expected(self, source: Tensor, other: Tensor | None = None) -> tuple[Tensor, float]:
        """Expected answer, and its tolerance: rounding of sums of that size, and one level."""
        sums = self._applied(_values(self._last(source), self._source)).float()
        if other is not None:
            sums = sums + _values(self._last(other), self._summand)
        activation = self.call.activation
        slack = SUMMING * float(sums.abs().nan_to_num(0.0, posinf=0.0).max())  # infinity explains no deviation
        algorithm = {"approximate": activation.algorithm} if activation.algorithm else {}
        found = _ACTIVATIONS[activation.name](sums, *activation.scalars, **algorithm)
        if self._answer is None:
            return found, slack
        return self._answer.back(self._answer.of(found)), slack + self._answer.scale

    def _applied(self, source: Tensor) -> Tensor:
        call, shape, weight = self.call, self.call.shape, self._tensors[self.call.weight]
        bias = None if call.bias is None else self._tensors[call.bias]
        if call.quantisation is not None:
            weight = _rounded(call, self._tensors)
        if not isinstance(shape, ConvolutionShape):
            return functional.linear(source, weight, bias)
        height, width = source.shape[-2:]  # a call of eight bits may have padded its shape in advance
        padding = (shape.padding[0] + (shape.height - height) // 2, shape.padding[1] + (shape.width - width) // 2)
        return torch.conv2d(source, weight, bias, shape.stride, padding, shape.dilation, shape.groups)

    def _last(self, values: Tensor) -> Tensor:
        shape = self.call.shape
        if isinstance(shape, ConvolutionShape):
            return values[-1:]
        return values.reshape(-1, values.shape[-1])[-shape.rows :]


def _rounded(call: FusedCall, tensors: Mapping[str, Tensor]) -> Tensor:
    """The weight that a call's levels stand for."""
    weight = tensors[call.weight]
    return weight * by_channel(tensors[f"{call.weight} {SCALES}"], weight)


def _values(found: Tensor, levels: Levels | None) -> Tensor:
    return found if levels is None else levels.back(found)


def _named(numbers: torch.dtype) -> str:
    return str(numbers).removeprefix("torch.")


def _convolution_kind(shape: ConvolutionShape) -> str:
    outputs, inputs, height, width = shape.weight
    groups = f" in {shape.groups} groups" * (shape.groups > 1)
    return f"convolution {height}x{width} of {inputs * shape.groups} to {outputs} channels{groups}"


def _deviation(found: Tensor, expected: Tensor, slack: float = 0.0) -> float:
    """Deviation beyond ``slack``, of the largest expected value."""
    if found.shape != expected.shape:
        return float("inf")
    off = ((found - expected).abs().max() - slack).clamp_min(0.0)
    return float(off / expected.abs().max().clamp_min(NOTHING))


_ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {
    "none": torch.positive,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "swish": functional.silu,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "hardtanh": functional.hardtanh,
    "leaky_relu": functional.leaky_relu,
    "gelu": functional.gelu,
}


def packed(form: Form, modules: Modules, expert: Expert) -> Packable:
    """One expert's weights. Raises WeightsMismatch where the module is refused, or the expert is not calibrated."""
    weights, decided = modules.weights(expert, form), form.accepted(expert, _decided(*_key(form, modules, expert)))
    ranges = required_ranges(expert, form.name_here, decided.quantised) if form.needs_calibration else None
    try:
        program = _with_structure(decided.program, modules.unseen_structure(expert))
        return Packable(decided.tensors(weights, ranges), program=program)
    except ValueError as error:
        raise WeightsMismatch(expert.id, f"{error}: choose {form.plain}") from error


def _with_structure(program: bytes, structure: bytes) -> bytes:
    """The program, which experts of equal weights and another computation do not share."""
    if not structure:
        return program
    return json.dumps({**json.loads(program), "structure": structure.decode()}, separators=(",", ":")).encode()


def observed_ranges(form: Form, modules: Modules, expert: Expert, batches: Iterable[Tensor]) -> Ranges:
    """Raises WeightsMismatch without a form of eight bits, and for NaN."""
    key = _key(form, modules, expert)
    plain = form.accepted(expert, _fused(*key[:-1], torch.float32))
    decided = form.accepted(expert, _decided(*key))
    weights, images = modules.weights(expert, form), list(batches)
    try:
        return corrected(decided, plain, weights, observed(plain, weights, images), torch.cat(images))
    except ValueError as error:
        raise WeightsMismatch(expert.id, f"it cannot be calibrated: {error}") from error


def proven(form: Form, modules: Modules, expert: Expert, program: bytes) -> OnednnModule:
    """Module that a program's skeletons run. Raises BackendUnavailable where it was not packed for this box."""
    return _proven(f"{expert.architecture} in {form.name}", *_key(form, modules, expert), program)


def skeleton(form: Form, modules: Modules, expert: Expert, program: bytes, device: str) -> OnednnSkeleton:
    if device != "cpu":
        raise BackendUnavailable(f"{expert.architecture} in {form.name}", f"it runs on the CPU, not on {device}")
    return OnednnSkeleton(proven(form, modules, expert, program), modules.reader(expert))


def _key(form: Form, modules: Modules, expert: Expert) -> tuple[Modules, Hashable, tuple[int, int], torch.dtype]:
    return modules, modules.structure(expert), expert.pixels.size, getattr(torch, form.numbers)


def _fuse(
    modules: Modules, structure: Hashable, size: tuple[int, int], numbers: torch.dtype
) -> FusedModule | RefusedModule:
    return fused_module(modules.module(structure), size, modules.outputs, numbers)


def _decide(
    modules: Modules, structure: Hashable, size: tuple[int, int], numbers: torch.dtype
) -> OnednnModule | RefusedModule:
    found = _fused(modules, structure, size, numbers)
    return decided_module(modules.module(structure), found, modules.outputs, modules.sample(structure))


def _prove(
    subject: str, modules: Modules, structure: Hashable, size: tuple[int, int], numbers: torch.dtype, program: bytes
) -> OnednnModule:
    return packed_module(subject, _fused(modules, structure, size, numbers), program)


_fused, _decided, _proven = MadeOnce(_fuse, KEPT), MadeOnce(_decide, KEPT), MadeOnce(_prove, KEPT)
