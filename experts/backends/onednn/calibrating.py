"""Calibration of an expert: ranges of its values, and shifts of its answers by rounding to eight bits.

Ranges are observed on the float32 form's own calls. Bias correction subtracts the shift of each output channel's mean:
noise of rounding averages out over an image, a shifted mean does not. A call reads what earlier calls answer in eight
bits, already corrected, so it also makes up for their remaining error. Source: Nagel, van Baalen, Blankevoort and
Welling, "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, 4.2 and appendix D.

Guarantees: the same images and weights give the same ranges and shifts, however the graph is put into eight bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from experts.backends.onednn.calls import Arrangements, bound
from experts.backends.onednn.form import OnednnSkeleton
from experts.backends.onednn.fusion import LEVELS, OFFSETS, FusedCall
from experts.backends.onednn.layouts import ConvolutionShape
from experts.backends.onednn.levels import Levels, Values, by_channel, quantised_weight
from experts.backends.onednn.operators import weight_highest
from experts.calibrations import CallRanges, Range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from experts.backends.onednn.calls import Call
    from experts.backends.onednn.form import FusedModule, OnednnModule
    from experts.backends.onednn.fusion import Part

DIGITS = 6  # resolution of a stored shift: far below one level


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """Values of calls, by the names of their weights."""

    ranges: Mapping[str, CallRanges]
    means: Mapping[str, Tensor]  # of each output channel, float32, before the bias, summand and activation


def observed(plain: FusedModule, weights: Mapping[str, Tensor], batches: Iterable[Tensor]) -> Observed:
    """``plain``: module in float32; ``weights``: the module's. Raises ValueError, naming the weight, for NaN."""
    watched = [_watched(part, weights) for part in plain.inputs]
    with torch.inference_mode():
        for images in batches:
            plain.graph.forward(images.to(memory_format=torch.channels_last), *watched)
    found = [each for each in watched if isinstance(each, _Watched) and each.seen]
    return Observed({each.weight: each.ranges for each in found}, {each.weight: each.means for each in found})


def corrected(
    form: OnednnModule, plain: FusedModule, weights: Mapping[str, Tensor], seen: Observed, images: Tensor
) -> dict[str, CallRanges]:
    """The ranges with shifts. ``seen``: ranges of ``plain``, float32, on ``images`` (n, 3, height, width).

    All images are one batch: a call's means must be known before the next call runs. Raises ValueError, KeyError.
    """
    calls = {call.weight: call for call in plain.calls}
    tensors = form.tensors(weights, seen.ranges)
    measured: dict[str, _Measured] = {}

    def watched(call: FusedCall, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if call.quantisation is None:
            return run
        name, levels = call.weight, tensors[LEVELS]
        summand = call.quantisation.summand
        measured[name] = _Measured(
            calls[name], run, weights[name], seen.means[name], tensors[f"{name} {OFFSETS}"],
            Levels(levels, call.quantisation.source), 1.0 if summand is None else Levels(levels, summand).scale,
        )  # fmt: skip
        return measured[name]

    skeleton = OnednnSkeleton(form, lambda expert, answers, batch: (), watched)
    skeleton.bind(tensors)
    with torch.inference_mode():
        skeleton.outputs(images.unbind())
    shifts = {name: each.shifts for name, each in measured.items()}
    return {name: replace(ranges, shifts=shifts.get(name, ())) for name, ranges in seen.ranges.items()}


def mean_read(call: FusedCall, source: Tensor) -> Tensor:
    """Mean image, or row, that a call reads: float32 (1, channels, height, width), or (1, channels)."""
    if isinstance(call.shape, ConvolutionShape):
        found = torch.zeros(source.shape[1:])
        for image in source:  # torch's own mean of levels would hold all of them as float32 first
            found += image
        return found[None] / len(source)
    return source.reshape(-1, source.shape[-1]).mean(dim=0, keepdim=True, dtype=torch.float32)


def _mean_answers(call: FusedCall, weight: Tensor, read: Tensor) -> Tensor:
    """Each output channel's mean before bias, summand and activation: linear, so the answer to ``mean_read``."""
    shape = call.shape
    if not isinstance(shape, ConvolutionShape):
        return functional.linear(read, weight)[0]
    geometry = (list(shape.stride), list(shape.padding), list(shape.dilation), shape.groups)
    return functional.conv2d(read, weight, None, *geometry).mean(dim=(0, 2, 3))


def _watched(part: Part, weights: Mapping[str, Tensor]) -> Tensor | Call | _Watched:
    assert not isinstance(part, Values), "ranges are observed in float32"
    if isinstance(part, str):
        return weights[part]
    call = bound(part, Arrangements(part.shape, is_blocked=False), weights[part.weight], weights)
    return _Watched(part, weights[part.weight], call) if part.owns_weight else call


class _Watched:
    """A call in float32 whose ranges and means are noted."""

    def __init__(self, part: FusedCall, weight: Tensor, call: Call) -> None:
        self.weight = part.weight
        self.seen: dict[str, Range] = {}
        self._part, self._tensor, self._call = part, weight, call
        self._sums = torch.zeros(len(weight), dtype=torch.float64)
        self._read = 0

    def __call__(self, source: Tensor, *others: Tensor) -> Tensor:
        self._note("source", source)
        self._sums += source.numel() * _mean_answers(self._part, self._tensor, mean_read(self._part, source))
        self._read += source.numel()
        for each in others:
            self._note("summand", each)  # before the call may overwrite it
        answer: Tensor = self._call(source, *others)
        self._note("answer", answer)
        return answer

    @property
    def ranges(self) -> CallRanges:
        return CallRanges(self.seen["source"], self.seen["answer"], self.seen.get("summand"))

    @property
    def means(self) -> Tensor:
        return (self._sums / self._read).float()

    def _note(self, what: str, values: Tensor) -> None:
        low, high = (float(each) for each in values.aminmax())
        earlier = (self.seen[what],) if what in self.seen else ()
        try:
            self.seen[what] = Range.around((Range(low, high), *earlier))
        except ValueError as error:
            raise ValueError(f"{what} of {self.weight}: {error}") from error


@dataclass(eq=False)
class _Measured:
    """A call in eight bits whose shifts are measured, and taken off its offsets, before it runs."""

    plain: FusedCall  # the same call in float32
    run: Callable[..., Tensor]
    weight: Tensor
    expected: Tensor  # means of its output channels
    offsets: Tensor
    source: Levels
    unit: float  # of the offsets
    shifts: tuple[float, ...] = ()

    def __call__(self, source: Tensor, *others: Tensor) -> Tensor:
        quantised, scales = quantised_weight(self.plain.weight, self.weight, weight_highest())
        read = self.source.back(mean_read(self.plain, source))
        found = _mean_answers(self.plain, quantised * by_channel(scales, quantised), read)
        self.shifts = tuple(float(f"{each:.{DIGITS}g}") for each in (found - self.expected).tolist())
        self.offsets.sub_(torch.tensor(self.shifts) / self.unit)
        return self.run(source, *others)
