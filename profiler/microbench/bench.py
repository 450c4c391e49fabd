"""Bench: what a microbenchmark measures with. One record for a box, a processor and the experts' samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.runtime.measuring.meter import meter_for
from agent.runtime.measuring.rig import MeasuringRig
from profiler.microbench.batches import BatchOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.machine.box import Box
    from agent.runtime.measuring.meter import WorkspaceMeter
    from experts.packed.weights import SegmentStore
    from profiler.workload.samples import LineSamples


@dataclass(frozen=True, slots=True)
class Bench:
    """Box, processor and samples that experts are measured with. ``threads``: of each executor of the processor.

    ``meter``: measures the bytes of a processor's batches; None where they can only be estimated.
    """

    box: Box
    processor: str
    segments: SegmentStore
    samples: LineSamples
    threads: int
    options: BatchOptions = field(default_factory=BatchOptions)
    meter: Callable[[str], WorkspaceMeter | None] = meter_for

    def rig(self, copies: Sequence[ExpertCopy]) -> MeasuringRig:
        return MeasuringRig(self.box, self.processor, copies, self.segments, self.threads)
