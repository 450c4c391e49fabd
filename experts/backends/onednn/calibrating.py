"""The ranges of an expert's values, observed on images, and its weights in eight bits by them, less what that shifts
(``correcting``).

Guarantees: ranges are those of the float32 form's own calls, by the names of their weights, so that they hold however a
graph is put into eight bits. The same images and weights give the same ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn import functional

from experts.backends.onednn.calls import Arrangements, bound
from experts.backends.onednn.fusion import LEVELS, OFFSETS, SCALES, FusedCall
from experts.backends.onednn.layouts import ConvolutionShape
from experts.backends.onednn.levels import Values, levels, quantised_weight
from experts.calibrations import CallRanges, Range

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.fx import GraphModule

    from experts.backends.onednn.calls import Call


Ranges: TypeAlias = "Mapping[str, CallRanges]"  # by the names of the calls' weights


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """Values of calls, by the names of their weights."""

    ranges: Mapping[str, CallRanges]
    means: Mapping[str, Tensor]  # of each output channel, float32, before the bias, what is added and the activation


def observed(
    graph: GraphModule, inputs: Sequence[str | FusedCall | Values], weights: Mapping[str, Tensor],
    batches: Iterable[Tensor],
) -> Observed:  # fmt: skip
    """``weights``: as the module has them. Raises ValueError, naming the weight, for NaN or infinity."""
    watched = [_watched(part, weights) for part in inputs]
    with torch.inference_mode():
        for images in batches:
            graph.forward(images.to(memory_format=torch.channels_last), *watched)
    found = [each for each in watched if isinstance(each, _Watched) and each.is_seen]
    return Observed({each.weight: each.ranges for each in found}, {each.weight: each.means for each in found})


def mean_read(call: FusedCall, source: Tensor) -> Tensor:
    """The mean image, or row, of what a call reads: float32 (1, channels, height, width), or (1, channels)."""
    if isinstance(call.shape, ConvolutionShape):
        found = torch.zeros(source.shape[1:])
        for image in source:  # torch's own mean of levels holds all of them as float32 first
            found += image
        return found[None] / len(source)
    return source.reshape(-1, source.shape[-1]).mean(dim=0, keepdim=True, dtype=torch.float32)


def mean_answers(call: FusedCall, weight: Tensor, read: Tensor) -> Tensor:
    """Each output channel's mean before bias, sum and activation: linear, so the answer to ``mean_read``."""
    shape = call.shape
    if not isinstance(shape, ConvolutionShape):
        return functional.linear(read, weight)[0]
    geometry = (list(shape.stride), list(shape.padding), list(shape.dilation), shape.groups)
    return functional.conv2d(read, weight, None, *geometry).mean(dim=(0, 2, 3))


def quantised_weights(
    inputs: Sequence[str | FusedCall | Values], weights: Mapping[str, Tensor], ranges: Ranges
) -> dict[str, Tensor]:
    """Add levels, scales, offsets and table. Raises KeyError if not observed, ValueError for NaN, wrong shifts."""
    calls = [each for each in inputs if isinstance(each, FusedCall) and each.quantisation is not None]
    table = _table(calls, ranges)
    found = dict(weights)
    for call in calls:
        found |= _quantised_call(call, weights, table, ranges[call.weight].shifts)
    rows = sorted((values.row, *pair) for values, pair in table.items())
    return found | {LEVELS: torch.tensor([pair for _, *pair in rows], dtype=torch.float32)}


def _table(calls: Iterable[FusedCall], ranges: Ranges) -> dict[Values, tuple[float, int]]:
    """The scale and zero of all values."""
    found: dict[Values, list[Range]] = {}
    for call in calls:
        for values, seen in _seen(call, ranges[call.weight]):
            found.setdefault(values, []).append(seen)
    return {values: levels(Range.around(seen), values.zero) for values, seen in found.items()}


def _seen(call: FusedCall, ranges: CallRanges) -> Iterator[tuple[Values, Range]]:
    quantisation = call.quantisation
    assert quantisation is not None, "asked for calls of eight bits"
    yield quantisation.source, ranges.source
    if quantisation.answer is not None:
        yield quantisation.answer, ranges.answer
    if quantisation.summand is not None and ranges.summand is not None:
        yield quantisation.summand, ranges.summand


def _quantised_call(
    call: FusedCall, weights: Mapping[str, Tensor], table: Mapping[Values, tuple[float, int]], shifts: Sequence[float]
) -> dict[str, Tensor]:
    """With w = s q and x = t (l - z): sum(w x) = s t sum(q l) - s t z sum(q), in units of the summand's scale."""
    quantisation = call.quantisation
    assert quantisation is not None, "asked for calls of eight bits"
    quantised, scales = _quantised_weight(call.weight, weights)
    scale, zero = table[quantisation.source]
    unit = 1.0 if quantisation.summand is None else table[quantisation.summand][0]
    offsets = -scale * zero * scales * quantised.flatten(1).sum(dim=1)
    if call.bias is not None:
        offsets = offsets + weights[call.bias].detach().float()
    if shifts:
        if len(shifts) != len(offsets):
            raise ValueError(f"{call.weight}: calibrated for {len(shifts)} output channels, it has {len(offsets)}")
        offsets = offsets - torch.tensor(shifts)
    return {
        call.weight: quantised,
        f"{call.weight} {SCALES}": scales,
        f"{call.weight} {OFFSETS}": (offsets / unit).contiguous(),
    }


def _quantised_weight(name: str, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    try:
        return quantised_weight(weights[name].detach().float())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _watched(part: str | FusedCall | Values, weights: Mapping[str, Tensor]) -> Tensor | Call | _Watched:
    assert not isinstance(part, Values), "ranges are observed in float32"
    if isinstance(part, str):
        return weights[part]
    bias = None if part.bias is None else weights[part.bias]
    call = bound(part, Arrangements(part.shape, is_blocked=False), weights[part.weight], bias)
    return _Watched(part, weights[part.weight], call) if part.owns_weight else call


class _Watched:
    def __init__(self, part: FusedCall, weight: Tensor, call: Call) -> None:
        self.weight = part.weight
        self._part, self._tensor, self._call = part, weight, call
        self._seen: dict[str, Range] = {}
        self._sums = torch.zeros(len(weight), dtype=torch.float64)
        self._read = 0

    def __call__(self, source: Tensor, *others: Tensor) -> Tensor:
        self._note("source", source)
        self._sums += source.numel() * mean_answers(self._part, self._tensor, mean_read(self._part, source))
        self._read += source.numel()
        for each in others:
            self._note("summand", each)  # before the call may write its answer there
        answer: Tensor = self._call(source, *others)
        self._note("answer", answer)
        return answer

    @property
    def is_seen(self) -> bool:
        return bool(self._seen)

    @property
    def ranges(self) -> CallRanges:
        return CallRanges(self._seen["source"], self._seen["answer"], self._seen.get("summand"))

    @property
    def means(self) -> Tensor:
        return (self._sums / self._read).float()

    def _note(self, what: str, values: Tensor) -> None:
        low, high = (float(each) for each in values.aminmax())
        earlier = (self._seen[what],) if what in self._seen else ()
        try:
            self._seen[what] = Range.around((Range(low, high), *earlier))
        except ValueError as error:
            raise ValueError(f"{what} of {self.weight}: {error}") from error
