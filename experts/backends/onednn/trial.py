"""A form is tried before anything is packed in it: on made-up weights and images, as a whole and call by call.

Guarantees: a call is compared with torch's own operators on the very values that it read, so no error vanishes and no
rounding adds up on the way. The outputs are compared with the module's. A deviation beyond the form's rounding refuses
the form, by name. The same box decides the same way.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.func import functional_call
from torch.nn import functional

from experts.backends.base import RefusedModule
from experts.backends.onednn.calibrating import observed, quantised_weights
from experts.backends.onednn.form import FusedModule, OnednnSkeleton, decided_layouts, fused_module
from experts.backends.onednn.fusion import LEVELS, SCALES, FusedCall
from experts.backends.onednn.layouts import ConvolutionShape
from experts.backends.onednn.quantised_calls import Levels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module

    from experts.backends.onednn.calibrating import Ranges
    from experts.backends.onednn.form import OnednnModule
    from experts.backends.onednn.fusion import Activation
    from experts.backends.onednn.levels import Values

    Runs: TypeAlias = Callable[..., Tensor]

log = logging.getLogger(__name__)

TRIED_IMAGES = 4  # another number than it was recorded with
DEVIATION_MAXIMUM = {  # of made-up answers, of the largest value of each: rounding adds up from call to call
    torch.float32: 1e-3,
    torch.bfloat16: 0.3,
    torch.int8: 0.5,
}
CALL_DEVIATION_MAXIMUM = {  # of one call's: what its sums, its own rounding and that of what it is compared with make
    torch.float32: 1e-4,
    torch.bfloat16: 0.03,
    torch.int8: 0.03,
}
GAIN = 1.0  # of a layer with made-up weights: what a wrong call changes has to reach the outputs
NOISE = 0.1  # on what is no matrix, so that none is all 0 or all 1 as fresh ones may be
NOTHING = torch.finfo(torch.float32).tiny
SUMMING = 1e-6  # of the largest sum that is activated, some units in float32's last place: no small one is more exact


@dataclass(frozen=True, slots=True)
class FormTrial:
    """Deviations from torch, in parts of its largest value; NaN where torch's answer is not finite."""

    outputs: Mapping[str, float]  # by name
    calls: tuple[tuple[FusedCall, float], ...]  # as they ran


def decided_module(
    module: Module, fused: FusedModule | RefusedModule, outputs: Sequence[str], sample: Mapping[str, Tensor]
) -> OnednnModule | RefusedModule:
    """Layouts, decided and tried. ``module``: on meta, as it was fused; ``sample``: weights it may have, float32."""
    if isinstance(fused, RefusedModule):
        return fused
    form = decided_layouts(fused)
    reason = _why_refused(tried(deepcopy(module), form, outputs, sample), fused.numbers)
    if reason is None:
        return form
    log.warning("form_refused module=%s numbers=%s reason=%s", type(module).__name__, _named(fused.numbers), reason)
    return RefusedModule(reason)


def tried(module: Module, form: OnednnModule, outputs: Sequence[str], sample: Mapping[str, Tensor]) -> FormTrial:
    """Deviation of a form from its module on made-up weights like the sample's."""
    generator = torch.Generator().manual_seed(0)
    dtype = form.module.dtype
    weights = {name: made_up(tensor, generator, dtype) for name, tensor in sample.items()}
    images = torch.randn((TRIED_IMAGES, 3, *form.module.size), generator=generator)
    try:
        ranges = _made_up_ranges(module, outputs, form.module, weights, images)
        packed = form.tensors(weights, ranges)
    except ValueError:  # values without levels, which are no numbers
        return FormTrial(dict.fromkeys(outputs, float("nan")), ())
    calls: list[_TriedCall] = []
    plain = weights if ranges is None else quantised_weights(form.module.inputs, weights, ranges)

    def watched(call: FusedCall, made: Runs) -> Runs:
        calls.append(_TriedCall(call, made, _Expected(call, weights, plain)))
        return calls[-1]

    skeleton = OnednnSkeleton(form, lambda expert, answers, batch: (), watched)
    skeleton.bind(packed)
    with torch.inference_mode():
        found = skeleton.outputs(images.unbind())
        expected = functional_call(module, weights, (images.to(dtype),))
    named = {outputs[0]: expected} if isinstance(expected, torch.Tensor) else expected
    return FormTrial(
        {name: _deviation(each, named[name]) for name, each in zip(outputs, found, strict=True)},
        tuple((each.call, each.deviation) for each in calls),
    )


def described(call: FusedCall) -> str:
    kind = _convolution_kind(call.shape) if isinstance(call.shape, ConvolutionShape) else "linear"
    done = " + ".join((kind, *["sum"] * call.adds, *[call.activation.name] * (call.activation.name != "none")))
    return f"{call.weight.removesuffix('.weight')} ({done} in {_named(call.shape.dtype)})"


def made_up(tensor: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """A weight with noise on it, as large as keeps what comes through it as large as it was."""
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


def _made_up_ranges(
    module: Module, outputs: Sequence[str], fused: FusedModule, weights: Mapping[str, Tensor], images: Tensor
) -> Ranges | None:
    if fused.numbers != torch.int8:
        return None
    plain = fused_module(deepcopy(module).to("meta"), fused.size, outputs, torch.float32)
    assert isinstance(plain, FusedModule), "it was fused in float32 already"
    return observed(plain.graph, plain.inputs, weights, [images]).ranges


class _TriedCall:
    """A call whose last image is compared with what torch's operators make of it."""

    def __init__(self, call: FusedCall, made: Runs, expected: _Expected) -> None:
        self.call = call
        self.deviation = 0.0  # of one that no image reaches
        self._made = made
        self._expected = expected

    def __call__(self, source: Tensor, *others: Tensor) -> Tensor:
        expected, slack = self._expected.of(source, *others)  # before the call may write over what is added
        answer: Tensor = self._made(source, *others)
        self.deviation = _deviation(self._expected.read(answer), expected, slack)
        return answer


class _Expected:
    """A call's right answer for its last image, by torch, float32. ``packed``: weights, not laid out yet."""

    def __init__(self, call: FusedCall, weights: Mapping[str, Tensor], packed: Mapping[str, Tensor]) -> None:
        self._call = call
        self._weights = weights
        self._packed = packed
        answer = None if call.quantisation is None else call.quantisation.answer
        self._answer = None if answer is None else Levels(packed[LEVELS], answer)

    def of(self, source: Tensor, other: Tensor | None = None) -> tuple[Tensor, float]:
        """The answer, and its slack: rounding of sums of that size, and one level, as either may come."""
        quantisation = self._call.quantisation
        values = self._values(self._last(source), None if quantisation is None else quantisation.source)
        sums = self._applied(values).float()
        if other is not None:
            sums = sums + self._values(self._last(other), None if quantisation is None else quantisation.summand)
        activation = self._call.activation
        largest = float(sums.abs().nan_to_num(0.0, posinf=0.0).max())  # an infinite one explains nothing
        found, slack = _ACTIVATIONS[activation.name](sums, activation), SUMMING * largest
        if self._answer is None:
            return found, slack
        return self._answer.back(self._answer.of(found)), slack + self._answer.scale

    def read(self, answer: Tensor) -> Tensor:
        last = self._last(answer)
        return last.float() if self._answer is None else self._answer.back(last)

    def _last(self, values: Tensor) -> Tensor:
        shape = self._call.shape
        return (
            values[-1:] if isinstance(shape, ConvolutionShape) else values.reshape(-1, values.shape[-1])[-shape.rows :]
        )

    def _values(self, found: Tensor, levels: Values | None) -> Tensor:
        return found if levels is None else Levels(self._packed[LEVELS], levels).back(found)

    def _applied(self, source: Tensor) -> Tensor:
        call, shape = self._call, self._call.shape
        bias = None if call.bias is None else self._weights[call.bias]
        if not isinstance(shape, ConvolutionShape):
            return functional.linear(source, self._weight(), bias)
        height, width = source.shape[-2:]  # what a call of eight bits pads before is part of what it does
        padding = (shape.padding[0] + (shape.height - height) // 2, shape.padding[1] + (shape.width - width) // 2)
        return torch.conv2d(source, self._weight(), bias, shape.stride, padding, shape.dilation, shape.groups)

    def _weight(self) -> Tensor:
        name = self._call.weight
        if self._call.quantisation is None:
            return self._weights[name]
        levels, scales = self._packed[name], self._packed[f"{name} {SCALES}"]
        return levels * scales.reshape(-1, *[1] * (levels.dim() - 1))


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


_ACTIVATIONS: Mapping[str, Callable[[Tensor, Activation], Tensor]] = {
    "none": lambda values, _: values,
    "relu": lambda values, _: functional.relu(values),
    "sigmoid": lambda values, _: torch.sigmoid(values),
    "tanh": lambda values, _: torch.tanh(values),
    "swish": lambda values, _: functional.silu(values),
    "hardswish": lambda values, _: functional.hardswish(values),
    "hardsigmoid": lambda values, _: functional.hardsigmoid(values),
    "hardtanh": lambda values, done: functional.hardtanh(values, min_val=done.scalars[0], max_val=done.scalars[1]),
    "leaky_relu": lambda values, done: functional.leaky_relu(values, negative_slope=done.scalars[0]),
    "gelu": lambda values, done: functional.gelu(values, approximate=done.algorithm),
}
