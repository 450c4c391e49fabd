"""Bench: box, processor, samples and options that a kind's measurements have in common."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agent.core.performance import ExecutorSpec
from agent.device_profile.records import KindProfile
from agent.runtime.machine.box import threads_per_executor
from agent.runtime.measuring.batches import BatchOptions
from agent.runtime.measuring.fits import fit_workspace
from agent.runtime.measuring.rig import MeasuringRig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.device_profile.records import BatchTimes
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.machine.box import Box
    from experts.packed.weights import SegmentStore
    from profiler.workload.samples import LineSamples


@dataclass(frozen=True, slots=True)
class Bench:
    """Box, processor and samples that experts are measured with, one executor at a time."""

    box: Box
    processor: str
    segments: SegmentStore
    samples: LineSamples
    options: BatchOptions = field(default_factory=BatchOptions)

    @property
    def threads(self) -> int:
        """Threads that the agent gives a lone executor of the processor."""
        return threads_per_executor(self.box, [ExecutorSpec(0, self.processor, self.box.pool_of(self.processor))])

    def on(self, processor: str) -> Bench:
        return replace(self, processor=processor)

    def rig(self, copies: Sequence[ExpertCopy]) -> MeasuringRig:
        return MeasuringRig(self.box, self.processor, copies, self.segments, self.threads)

    def kind_profile(
        self,
        copy: ExpertCopy,
        load_s: Mapping[str, float],
        batches: tuple[BatchTimes, ...],
        **measured: Any,  # noqa: ANN401  # the other fields of a KindProfile
    ) -> KindProfile:
        workspace = fit_workspace(batches)
        return KindProfile(
            kind=copy.kind,
            architecture=copy.expert.architecture,
            processor=self.processor,
            precision=copy.packed.precision,
            threads=self.threads,
            workspace_base_bytes=workspace.base_bytes,
            workspace_bytes=workspace.per_image_bytes,
            load_s=load_s,
            batches=batches,
            **measured,
        )
