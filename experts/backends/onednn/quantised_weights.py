"""An expert's tensors in eight bits, computed from its weights and the observed ranges of its values."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from experts.backends.onednn.fusion import LEVELS, OFFSETS, SCALES
from experts.backends.onednn.levels import levels, quantised_weight
from experts.backends.onednn.operators import weight_highest
from experts.calibrations import CallRanges, Range

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from experts.backends.onednn.fusion import FusedCall
    from experts.backends.onednn.levels import Quantisation, Values

    Table: TypeAlias = Mapping[Values, tuple[float, int]]  # scales and zeros

Ranges: TypeAlias = "Mapping[str, CallRanges]"  # by the names of the calls' weights


def quantised_weights(calls: Iterable[FusedCall], weights: Mapping[str, Tensor], ranges: Ranges) -> dict[str, Tensor]:
    """Add levels, scales, offsets and table. Raises KeyError if not observed, ValueError for NaN, wrong shifts."""
    quantised = [(call, call.quantisation) for call in calls if call.quantisation is not None]
    seen: dict[Values, list[Range]] = {}
    for call, quantisation in quantised:
        observed = ranges[call.weight]
        seen.setdefault(quantisation.source, []).append(observed.source)
        if quantisation.answer is not None:
            seen.setdefault(quantisation.answer, []).append(observed.answer)
        if quantisation.summand is not None and observed.summand is not None:
            seen.setdefault(quantisation.summand, []).append(observed.summand)
    table = {values: levels(Range.around(found), values.zero) for values, found in seen.items()}
    found = dict(weights)
    for call, quantisation in quantised:
        found |= _quantised_call(call, quantisation, weights, table, ranges[call.weight].shifts)
    rows = sorted((values.row, *pair) for values, pair in table.items())
    return found | {LEVELS: torch.tensor([pair for _, *pair in rows], dtype=torch.float32)}


def _quantised_call(
    call: FusedCall, quantisation: Quantisation, weights: Mapping[str, Tensor], table: Table, shifts: Sequence[float]
) -> dict[str, Tensor]:
    """With w = s q and x = t (l - z): sum(w x) = s t sum(q l) - s t z sum(q), in units of the summand's scale."""
    quantised, scales = quantised_weight(call.weight, weights[call.weight], weight_highest())
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
