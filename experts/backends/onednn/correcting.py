"""Bias correction: by how much rounding to eight bits shifts the mean of each output channel, measured call by call.

Noise of rounding cancels out over an image; a shifted mean does not. A call reads what the calls before it answer in
eight bits, their shifts taken off, so it also makes up for what is left of these. Source: Nagel, van Baalen,
Blankevoort and Welling, "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section
4.2 and appendix D.

Guarantees: the same images, weights and ranges give the same shifts. All images are one batch, as a call's means must
be known before the next call runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from experts.backends.onednn.calibrating import mean_answers, mean_read
from experts.backends.onednn.form import OnednnSkeleton
from experts.backends.onednn.fusion import LEVELS, OFFSETS, FusedCall
from experts.backends.onednn.levels import quantised_weight
from experts.backends.onednn.quantised_calls import Levels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from experts.backends.onednn.calibrating import Observed
    from experts.backends.onednn.form import FusedModule, OnednnModule
    from experts.calibrations import CallRanges

DIGITS = 6  # of a shift, as it is kept: far below what a level is worth


def corrected(
    form: OnednnModule, plain: FusedModule, weights: Mapping[str, Tensor], seen: Observed, images: Tensor
) -> dict[str, CallRanges]:
    """``seen``: of ``plain``, float32, on ``images`` (n, 3, height, width). Raises ValueError, KeyError."""
    calls = {part.weight: part for part in plain.inputs if isinstance(part, FusedCall)}
    tensors = form.tensors(weights, seen.ranges)
    measured: dict[str, _Measured] = {}

    def watched(call: FusedCall, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if call.quantisation is None:
            return run
        means = seen.means[call.weight]
        measured[call.weight] = _Measured(calls[call.weight], call, run, weights[call.weight], tensors, means)
        return measured[call.weight]

    skeleton = OnednnSkeleton(form, lambda expert, answers, batch: (), watched)
    skeleton.bind(tensors)
    with torch.inference_mode():
        skeleton.outputs(images.unbind())
    shifts = {name: each.shifts for name, each in measured.items()}
    return {name: replace(ranges, shifts=shifts.get(name, ())) for name, ranges in seen.ranges.items()}


class _Measured:
    """A call in eight bits whose shifts are measured, and taken off, before it is run. ``plain``: it in float32."""

    def __init__(
        self, plain: FusedCall, call: FusedCall, run: Callable[..., Tensor], weight: Tensor,
        tensors: Mapping[str, Tensor], expected: Tensor,
    ) -> None:  # fmt: skip
        quantisation = call.quantisation
        assert quantisation is not None, "asked for calls of eight bits"
        self._plain, self._run = plain, run
        self._weight = weight
        self._source = Levels(tensors[LEVELS], quantisation.source)
        self._unit = 1.0 if quantisation.summand is None else Levels(tensors[LEVELS], quantisation.summand).scale
        self._offsets = tensors[f"{call.weight} {OFFSETS}"]
        self._expected = expected
        self.shifts: tuple[float, ...] = ()

    def __call__(self, source: Tensor, *others: Tensor) -> Tensor:
        quantised, scales = quantised_weight(self._weight.detach().float())
        rounded = quantised * scales.reshape(-1, *[1] * (quantised.dim() - 1))
        found = mean_answers(self._plain, rounded, self._source.back(mean_read(self._plain, source)))
        self.shifts = tuple(float(f"{each:.{DIGITS}g}") for each in (found - self._expected).tolist())
        self._offsets.sub_(torch.tensor(self.shifts) / self._unit)
        return self._run(source, *others)
